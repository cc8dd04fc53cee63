"""Mutants of the code that decides a window: ledger, planning, intervals, and the reading of topics and sources."""

from __future__ import annotations

from tests.mutants.model import Mutant

_LEDGER = "tests/ledger/test_attempt.py"
_MODEL = "tests/windows/test_ledger_model.py"
_PLAN = "tests/windows/test_plan.py"
_READER = "tests/sources/kafka/test_read.py"

_OF_LEDGER = (
    Mutant(
        name="ledger-plan-not-fenced",
        path="ledger/attempt.py",
        old='pool.submit(self._fence, "plan")',
        new='pool.submit(self._fence, f"plan.{secrets.token_hex(4)}")',
        breaks="An attempt that was replaced can no longer plan a window.",
        tests=(f"{_LEDGER}::test_a_newer_attempt_fences_the_plan_of_an_older_one",),
    ),
    Mutant(
        name="ledger-close-not-fenced",
        path="ledger/attempt.py",
        old='pool.submit(self._fence, "close")',
        new='pool.submit(self._fence, f"close.{secrets.token_hex(4)}")',
        breaks="An attempt that was replaced can no longer complete a window or move the group's offsets.",
        tests=(f"{_LEDGER}::test_a_newer_attempt_fences_the_close_of_an_older_one",),
    ),
    Mutant(
        name="ledger-read-before-fencing",
        path="ledger/attempt.py",
        old="""        self._fence_both()
        self.hint = self.hint or self._find_hint()
        return self.read()
""",
        new="""        self.hint = self.hint or self._find_hint()
        self.read()
        self._fence_both()
        return self.memory
""",
        breaks="An attempt sees everything that earlier attempts have written before they were fenced.",
        tests=(f"{_LEDGER}::test_what_an_older_attempt_writes_until_it_is_fenced_is_seen",),
    ),
    Mutant(
        name="ledger-hint-behind-the-markers",
        path="ledger/attempt.py",
        old="            return read_from\n        return Hint(topic_id, partition, 0)\n",
        new="            return read_from\n        return Hint(topic_id, partition, self.memory.oldest_offset)\n",
        breaks="A later attempt at a first window sees the splits that earlier ones have published, and the position before it.",
        tests=("tests/control/test_hint.py::test_later_attempts_at_a_first_window_see_what_the_first_attempt_saw_and_published",),
    ),
    Mutant(
        name="ledger-window-given-up-without-a-claim",
        path="control/position.py",
        old="    ledger.take_over(published)\n",
        new="",
        breaks="No task publishes a split of a window once a command has given it up.",
        tests=(f"{_MODEL}::test_a_window_that_is_published_in_part_is_given_up_while_attempts_are_at_work_on_it",),
    ),
    Mutant(
        name="ledger-owner-of-a-group-read-before-the-fence",
        path="ledger/attempt.py",
        old="""            producer = self._fence_as(make_transactional_id(self.topic.name, name, OWNER))
            recorded = self._read_recorded_owner(name)
""",
        new="""            recorded = self._read_recorded_owner(name)
            producer = self._fence_as(make_transactional_id(self.topic.name, name, OWNER))
""",
        breaks="Of two pipelines that take a group at once, one is refused.",
        tests=(f"{_MODEL}::test_two_new_pipelines_with_one_group",),
    ),
    Mutant(
        name="ledger-owner-of-any-group",
        path="ledger/attempt.py",
        old="        return binding is not None and binding.owns and self._get_exclusive_object(binding) == name\n",
        new="        return binding is not None and binding.owns\n",
        breaks="A pipeline that gets another group uses it only if no other pipeline does.",
        tests=(f"{_MODEL}::test_a_pipeline_gets_another_group_while_a_new_one_begins_with_it",),
    ),
    Mutant(
        name="ledger-owner-of-a-group-that-it-came-back-to",
        path="ledger/attempt.py",
        old="        return replace(before, owns=False)\n",
        new="        return before\n",
        breaks="A pipeline that is refused another group comes back to its own only if no other pipeline has taken that.",
        tests=(f"{_MODEL}::test_intervals_come_back_to_their_group_while_a_new_pipeline_begins_with_it",),
    ),
    Mutant(
        name="ledger-command-moves-the-group-of-another-pipeline",
        path="control/position.py",
        old="        raise GroupOwned(pipeline, group, owner)\n",
        new="        pass\n",
        breaks="A command moves no group that another pipeline uses.",
        tests=(
            "tests/control/test_rebind.py::test_a_command_moves_the_group_of_the_newest_window_and_none_that_another_pipeline_uses",
        ),
    ),
    Mutant(
        name="ledger-unblock-fences-closes-only",
        path="ledger/topic.py",
        old='    found = [(own, "plan"), (own, "close")]\n',
        new='    found = [(own, "close")]\n',
        breaks="The open transaction of a command that has died is ended by `unblock`.",
        tests=(f"{_LEDGER}::test_the_open_transaction_of_a_command_that_has_died_is_ended_by_the_command_for_that",),
    ),
    Mutant(
        name="cdc-deletes-left-out-after-a-lost-window-of-chunks",
        path="sources/cdc/snapshot.py",
        old="        return [] if self.repeats else [table.to_json() for table in self.tables]\n",
        new="        return [table.to_json() for table in self.tables]\n",
        breaks="Rows of a lost window of chunks that were deleted since are deleted in copies.",
        tests=(
            "tests/sources/postgres_cdc/test_faults.py"
            "::test_rows_of_a_lost_window_of_chunks_that_were_deleted_since_are_deleted_after_the_reset",
        ),
    ),
    Mutant(
        name="ledger-forgets-intervals-that-are-not-fenced",
        path="control/lifecycle.py",
        old="            if planned <= fenced and not _is_newer_key(memory, keys):\n",
        new="            if planned <= fenced:\n",
        breaks="An interval that is planned while its pipeline is forgotten is fenced, or stays in the ledger whole.",
        tests=(f"{_MODEL}::test_intervals_are_forgotten_while_one_is_planned_and_moved",),
    ),
    Mutant(
        name="ledger-forgets-windows-that-the-sink-has",
        path="operators/intervals.py",
        old="        return find_forgotten_windows(memory, self.last_applied) if memory.is_blank else memory.claimed_position\n",
        new="        return memory.claimed_position\n",
        breaks="An interval leaves out what windows of a pipeline have moved that was forgotten since.",
        tests=(
            "tests/operators/test_interval_plans.py::TestBesideProgress"
            "::test_a_pipeline_that_was_forgotten_with_its_group_moves_nothing_again_that_its_sink_has",
        ),
    ),
    Mutant(
        name="ledger-lost-beside-intervals-in-the-sink",
        path="operators/from_kafka.py",
        old="            after=ELSEWHERE if found.is_beyond_sink else 0,\n",
        new="            after=0,\n",
        breaks="A pipeline of windows of both kinds whose ledger is lost continues behind its intervals.",
        tests=(
            "tests/operators/test_intervals.py"
            "::test_a_pipeline_with_windows_of_both_kinds_doubles_nothing_when_it_was[ledger-lost]",
        ),
    ),
    Mutant(
        name="ledger-old-interval-removed-beside-its-replay",
        path="ledger/interval.py",
        old='[self._fence_as(make_transactional_id(self.topic.name, name, "plan")) for name in names]',
        new='[self._fence_as(make_transactional_id(self.topic.name, name, "old")) for name in names]',
        breaks="A replay of an old interval keeps the record of the dead letters that it has sent.",
        tests=(
            "tests/ledger/test_interval.py::TestArchives::test_an_old_interval_that_is_just_being_moved_again_keeps_its_records",
        ),
    ),
    Mutant(
        name="ledger-dead-letters-go-with-the-window",
        path="ledger/interval.py",
        old="kept = dead.exclude_topics(entry.window.lost_topic_ids).for_replays if dead is not None else None",
        new="kept = None",
        breaks="A replay of a data interval does not send dead letters once more, however old the interval is.",
        tests=("tests/ledger/test_interval.py::TestArchives::test_the_dead_letters_of_an_old_interval_are_not_sent_once_more",),
    ),
    Mutant(
        name="ledger-change-under-the-id-of-closes",
        path="ledger/attempt.py",
        old="""        producer, self._planner = self._planner, None
        assert producer is not None, "one ledger commits one change""",
        new="""        producer, self._closer = self._closer, None
        assert producer is not None, "one ledger commits one change""",
        breaks="An attempt that fences at the same moment as a change by hand plans nothing by what it saw before.",
        tests=(f"{_MODEL}::test_a_pipeline_is_moved_back_while_attempts_are_at_work",),
    ),
    Mutant(
        name="ledger-close-without-offsets",
        path="ledger/attempt.py",
        old="""self._send_offsets(
                producer, self.group_id, offsets, lambda topic: make_offset_metadata(window, topic, hint), window.epochs
            )""",
        new="pass",
        breaks="The group's offsets move with the window's COMPLETE record.",
        tests=(f"{_LEDGER}::test_close_completes_the_window_and_moves_the_group_in_one_transaction",),
    ),
    Mutant(
        name="ledger-offsets-outside-transaction",
        path="ledger/attempt.py",
        old="        send_offsets(producer, self.hook.make_consumer_config(), group_id, committed, TRANSACTION_SECONDS, epochs)",
        new="""        from confluent_kafka import Consumer
        from confluent_kafka import TopicPartition as Place

        consumer = Consumer({**self.hook.make_consumer_config(), "group.id": group_id})
        consumer.commit(offsets=[Place(*tp, offset, told) for tp, offset, told in committed], asynchronous=False)
        consumer.close()""",
        breaks="The group's offsets move only if the window's COMPLETE record is committed.",
        tests=(f"{_LEDGER}::test_death_inside_the_closing_transaction_leaves_neither",),
    ),
    Mutant(
        name="ledger-token-not-compared",
        path="windows/memory.py",
        old="entry if entry is not None and entry.attempt.token == token else None",
        new="entry if entry is not None else None",
        breaks="An attempt that was replaced learns from the ledger that it no longer owns its window.",
        tests=(f"{_LEDGER}::test_a_newer_attempt_fences_the_close_of_an_older_one",),
    ),
    Mutant(
        name="ledger-hidden-records-passed-over",
        path="ledger/topic.py",
        old="if not _has_hidden_records(span.make_uncommitted(message.offset()), awaited):",
        new="if message.offset() < end:",
        breaks="A pipeline's records behind an open transaction are waited for.",
        tests=(f"{_LEDGER}::test_own_records_behind_another_pipelines_open_transaction_are_waited_for_not_looked_past",),
    ),
)

_OF_PLANNING = (
    Mutant(
        name="plan-end-one-too-far",
        path="windows/plan.py",
        old="max(start, min(stop, partition.lso))",
        new="max(start, min(stop, partition.lso + 1))",
        breaks="A window ends at the last stable offset.",
        tests=(
            f"{_PLAN}::TestWhereAWindowEnds::test_it_ends_at_the_last_stable_offset_and_reports_the_records_that_are_held_back",
        ),
    ),
    Mutant(
        name="plan-position-one-too-far",
        path="windows/plan.py",
        old="offsets={**kept, **window.ends},",
        new="offsets={**kept, **{tp: end + 1 for tp, end in window.ends.items()}},",
        breaks="A window starts where the one before it ended.",
        tests=(f"{_LEDGER}::test_close_completes_the_window_and_moves_the_group_in_one_transaction",),
    ),
    Mutant(
        name="plan-splits-one-too-few",
        path="windows/plan.py",
        old="r.start + r.span * turn // count",
        new="r.start + (r.span - 1) * turn // count",
        breaks="The splits of a window cover every offset of it.",
        tests=(f"{_PLAN}::test_splits_tile_the_window_without_gap_or_overlap",),
    ),
    Mutant(
        name="plan-recreated-topic-unnoticed",
        path="windows/plan.py",
        old="return bool(known and found and known != found)",
        new="return bool(known and not found)",
        breaks="A topic that was deleted and created again is not taken for the old one.",
        tests=(f"{_PLAN}::TestWhatIsRefused::test_a_topic_deleted_and_created_again_even_when_its_offsets_look_right",),
    ),
    Mutant(
        name="plan-deleted-records-unnoticed",
        path="windows/plan.py",
        old="return Gap(*tp, start, partition.low)",
        new="return None",
        breaks="A record that retention deleted before it was read fails the run.",
        tests=(f"{_PLAN}::TestWhatIsRefused::test_records_deleted_before_they_were_read",),
    ),
    Mutant(
        name="plan-topics-not-checked-before-commit",
        path="operators/kafka_to_sink.py",
        old="        operator.check(window)\n        self.ledger.verify()\n",
        new="        self.ledger.verify()\n",
        breaks="A topic that was created again while it was read fails the window before the sink commits.",
        tests=(
            "tests/operators/test_kafka_to_sink.py::test_a_topic_created_again_while_it_is_read_fails_the_window_before_the_sink_takes_it",
        ),
    ),
)

_CONTINUITY = "tests/windows/test_continuity.py"

_OF_CONTINUITY = (
    Mutant(
        name="offsets-of-an-earlier-cluster-in-rows-of-a-new-pipeline",
        path="operators/from_kafka.py",
        old="            earlier = foreign.union(recreated)\n",
        new="            earlier = set(recreated)\n",
        breaks="Records do not lose against offsets that another pipeline has read from an earlier topic of this name.",
        tests=(
            "tests/operators/test_kafka_to_sink.py::TestDataLoss"
            "::test_records_of_a_topic_created_again_do_not_lose_against_the_offsets_of_the_old_one",
        ),
    ),
    Mutant(
        name="continuity-hole-behind-the-last-window",
        path="windows/continuity.py",
        old="(*window.passed, *window.gaps), window.after == ELSEWHERE",
        new="(*window.passed, *window.gaps), True",
        breaks="A sink takes no window that leaves out offsets behind the last one that it has recorded.",
        tests=(f"{_CONTINUITY}::test_offsets_that_would_be_left_out_are_named",),
    ),
    Mutant(
        name="continuity-windows-without-records-are-a-hole",
        path="windows/continuity.py",
        old="(*window.passed, *window.gaps), window.after == ELSEWHERE",
        new="window.gaps, window.after == ELSEWHERE",
        breaks="What windows without records have passed over is no hole in the record of a sink, which never sees them.",
        tests=(f"{_CONTINUITY}::test_offsets_that_went_elsewhere_or_that_windows_without_records_have_skipped_are_no_hole",),
    ),
    Mutant(
        name="continuity-lost-record-unnoticed",
        path="windows/continuity.py",
        old="if window.after > 0 and not window.moved:",
        new="if window.after > window.number:",
        breaks="A sink that has lost its record of windows takes no further one.",
        tests=(f"{_CONTINUITY}::test_a_sink_without_a_record_takes_a_first_window_and_none_that_has_a_predecessor_there",),
    ),
    Mutant(
        name="continuity-window-elsewhere-counts-as-committed-here",
        path="operators/binding.py",
        old="        return ELSEWHERE\n    return last.number if",
        new="        pass\n    return last.number if",
        breaks="A pipeline that goes to another destination needs no record there of windows that went elsewhere.",
        tests=(
            "tests/operators/test_binding.py"
            "::test_a_window_names_the_last_one_with_records_at_the_same_place_unless_a_user_has_decided_since",
        ),
    ),
)

_OF_INTERVALS = (
    Mutant(
        name="interval-into-a-sink-that-has-lost-the-others",
        path="operators/kafka_to_sink.py",
        old="if sink.has_lost(replace(window, pipeline=name)):",
        new="if False:",
        breaks="A data interval goes only where the record of the latest one is.",
        tests=(
            "tests/operators/test_binding.py"
            "::test_a_directory_that_has_lost_its_data_intervals_takes_no_further_one_until_somebody_says_so",
        ),
    ),
    Mutant(
        name="intervals-overlap-not-withdrawn",
        path="ledger/interval.py",
        old="if state.offset < mine.offset]",
        new="if state.offset < 0]",
        breaks="Of two overlapping intervals that are planned at the same moment the later one is withdrawn.",
        tests=(
            "tests/ledger/test_interval.py::test_of_two_overlapping_intervals_that_are_planned_at_once_the_later_one_is_withdrawn",
        ),
    ),
    Mutant(
        name="intervals-boundary-one-too-far",
        path="ledger/boundaries.py",
        old="ends[tp] if offset is None else offset for",
        new="ends[tp] if offset is None else offset + 1 for",
        breaks="A record at the end of an interval belongs to the next one.",
        tests=("tests/operators/test_intervals.py::test_a_record_at_the_end_of_an_interval_belongs_to_the_next",),
    ),
    Mutant(
        name="intervals-late-boundary-not-moved",
        path="windows/interval_boundaries.py",
        old="return replace(proposal, offsets=offsets, epochs=epochs)",
        new="return proposal",
        breaks="A boundary that is decided late lies between its neighbours.",
        tests=(
            "tests/windows/test_interval_boundaries.py::TestSettle::test_a_boundary_decided_late_stays_between_those_that_are_there",
        ),
    ),
    Mutant(
        name="intervals-replayed-without-leader-epochs",
        path="windows/interval.py",
        old="            epochs=self.epochs,\n",
        new="",
        breaks="The window of an old interval has the leader epochs with which it was planned, which a replay compares.",
        tests=(
            "tests/windows/test_interval_archive.py"
            "::test_the_window_of_an_interval_has_its_leader_epochs_from_its_record_and_from_an_archive",
        ),
    ),
    Mutant(
        name="intervals-recorded-without-leader-epochs",
        path="ledger/interval.py",
        old=", epochs=window.epochs,\n",
        new=",\n",
        breaks="The record of an interval keeps the leader epochs of its window, whose own records are removed some day.",
        tests=(
            "tests/operators/test_log_truncated.py"
            "::test_intervals_behind_a_log_that_was_cut_off_and_has_grown_again_are_refused_until_a_user_decides",
        ),
    ),
    Mutant(
        name="intervals-archive-over-a-hole",
        path="windows/interval_archive.py",
        old="and all(ends.get(tp, 0) == start for tp, (start, _) in outer.items())",
        new="and all(ends.get(tp, 0) <= start for tp, (start, _) in outer.items())",
        breaks="An archive of intervals that leave a hole in the offsets is taken apart by what touches it.",
        tests=("tests/windows/test_interval_archive.py::test_an_archive_knows_its_holes",),
    ),
    Mutant(
        name="ledger-reads-on-behind-what-is-hidden",
        path="ledger/topic.py",
        old="read.past = record.offset + 1",
        new="read.past = bounds.high",
        breaks="Records that an open transaction hides are read once it has ended.",
        tests=(f"{_LEDGER}::test_a_pause_is_believed_only_once_it_is_known_that_no_open_transaction_hides_its_end",),
    ),
    Mutant(
        name="intervals-group-passes-a-hole",
        path="windows/interval.py",
        old="all(start <= reached.get(tp, 0) for tp, start in starts.items() if tp in spans)",
        new="any(start <= reached.get(tp, 0) for tp, start in starts.items() if tp in spans)",
        breaks="The group's offsets follow only the intervals that are complete without a hole.",
        tests=("tests/windows/test_interval.py::TestContiguous::test_one_partition_that_lags_holds_the_others",),
    ),
)

_OF_READING = (
    Mutant(
        name="reading-uncommitted",
        path="hooks/kafka/config.py",
        old='"isolation.level": "read_committed",',
        new='"isolation.level": "read_uncommitted",',
        breaks="Records of an aborted transaction are never delivered.",
        tests=(f"{_READER}::test_aborted_records_are_not_read_and_markers_do_not_stop_it",),
    ),
    Mutant(
        name="reading-ends-one-too-early",
        path="sources/kafka/tasks/read.py",
        old="m.offset() < end] if last >= end",
        new="m.offset() < end - 1] if last >= end",
        breaks="Every committed record of a range is read.",
        tests=(f"{_READER}::test_a_range_with_a_marker_between_its_records_is_read_to_its_end_and_not_beyond",),
    ),
    Mutant(
        name="reading-deleted-records-unnoticed",
        path="sources/kafka/tasks/read.py",
        old="        if not self.skip_lost:\n            raise DataLoss(topic, partition, position, low, self.remedy)\n",
        new="",
        breaks="Records that are deleted while a window is read fail it.",
        tests=(f"{_READER}::test_records_deleted_before_they_are_read_are_an_error",),
    ),
    Mutant(
        name="reading-replaced-records-unnoticed",
        path="sources/kafka/tasks/read.py",
        old="(message.leader_epoch() or 0) > self.epoch",
        new="False",
        breaks="A record that was written in place of a planned one is not read.",
        tests=("tests/operators/test_log_truncated.py::test_a_reader_hands_out_records_of_the_log_that_was_planned_only",),
    ),
    Mutant(
        name="reading-splits-without-leader-epochs",
        path="windows/plan.py",
        old="window.epochs.get(piece.topic_partition, -1)",
        new="-1",
        breaks="Each split carries the leader epoch with which its window was planned.",
        tests=("tests/windows/test_plan.py::test_each_split_carries_the_leader_epoch_with_which_its_partition_was_planned",),
    ),
    Mutant(
        name="reading-splits-lose-their-epoch-on-the-way",
        path="windows/model.py",
        old="return Split(index, OffsetRange(self.topics[topic], partition, start, end), epoch, self.interval)",
        new="return Split(index, OffsetRange(self.topics[topic], partition, start, end), -1, self.interval)",
        breaks="A task gets its split as it was planned, leader epoch included.",
        tests=("tests/windows/test_model.py::test_splits_are_the_same_when_they_were_packed_and_a_task_unpickles_few_objects",),
    ),
)

_OF_SOURCES = (
    Mutant(
        name="source-split-loses-its-last-row",
        path="sources/jdbc/postgres.py",
        old='return _compare(names, "<=", literals)',
        new='return _compare(names, "<", literals)',
        breaks="Every row of a table is in one split of one window.",
        tests=("tests/sources/jdbc/test_windows.py::test_incrementing_windows_follow_each_other",),
    ),
    Mutant(
        name="source-position-past-the-window",
        path="sources/jdbc/windows.py",
        old="_make_position(options, relation, start, last, complete=not remaining)",
        new="_make_position(options, relation, start, end, complete=not remaining)",
        breaks="The position of a table is the last row of the window, not the last row of the table.",
        tests=("tests/sources/jdbc/test_windows.py::test_incrementing_windows_follow_each_other",),
    ),
    Mutant(
        name="source-position-holds-files-not-taken",
        path="sources/files/seen.py",
        old="for file in taken:",
        new="for file in (*taken, *listing.new):",
        breaks="A file counts as read only if a window has taken it.",
        tests=("tests/sources/files/test_windows.py::test_the_oldest_files_come_first_and_the_rest_remains",),
    ),
    Mutant(
        name="source-position-moved-with-the-plan",
        path="ledger/attempt.py",
        old="offsets = self.send(producer, [make_window_record(entry), *self.make_companion_records(entry)])",
        new="""position = make_position_record(
                self.pipeline, find_next_position(self.memory.position, entry.window), self.memory.last_number
            )
            offsets = self.send(producer, [make_window_record(entry), *self.make_companion_records(entry), position])""",
        breaks="The position of a pipeline moves only when its window is complete.",
        tests=("tests/control/test_reset.py::TestReset::test_unless_it_is_given_up_and_then_its_number_is_not_used_again",),
    ),
)

_SNAPSHOTS = "tests/sources/mysql_cdc/test_snapshots.py"
_OF_ROWS_AND_LOG = f"{_SNAPSHOTS}::test_snapshot_and_log_give_each_change_once_and_in_order_whatever_is_read_again[1-False]"

_PAGES = "tests/sources/jdbc/test_pages.py"

_OF_SNAPSHOTS = (
    Mutant(
        name="pages-have-versions-that-are-newer-than-the-pass",
        path="sources/jdbc/pages.py",
        old="""    unchanged = f"NOT ({make_changed_condition('k1', split['since'])})"
""",
        new="""    unchanged = "true"
""",
        breaks="A row that moves to another page while a table is read by its pages is read once at most.",
        tests=(f"{_PAGES}::test_a_version_that_is_newer_than_the_pass_is_not_read_so_that_no_row_is_there_twice",),
    ),
    Mutant(
        name="pages-of-a-table-that-changes",
        path="sources/jdbc/pages.py",
        old="    if rows:\n",
        new="    if False:\n",
        breaks="A table that changes while it is read by its pages is refused.",
        tests=(f"{_PAGES}::test_a_table_that_changes_while_it_is_read_by_pages_is_refused_before_the_pass_is_complete",),
    ),
    Mutant(
        name="snapshot-place-is-asked-for-behind-it",
        path="sources/mysql_cdc/tasks/snapshot.py",
        old="""    return LogCoordinates(str(found["binlog_snapshot_file"]), int(found["binlog_snapshot_position"]))
""",
        new="""    (end,) = fetch_rows(connection, "SHOW MASTER STATUS")
    return LogCoordinates(str(end[0]), int(end[1]))
""",
        breaks="The coordinates of a chunk are those of its snapshot, also while others write.",
        tests=(_OF_ROWS_AND_LOG,),
    ),
    Mutant(
        name="snapshot-includes-what-is-behind-it",
        path="sources/mysql_cdc/tasks/snapshot.py",
        old="        return self._at < self._seen[seen]\n",
        new="        return True\n",
        breaks="A change behind the snapshot of its row's chunk is published.",
        tests=(_OF_ROWS_AND_LOG,),
    ),
    Mutant(
        name="snapshot-of-other-rows-than-those-of-the-place",
        path="sources/mysql_cdc/tasks/snapshot.py",
        old=" and not _is_changed(server, connection, seen, name)\n",
        new="\n",
        breaks="A table that was swapped before its snapshot was used is read in another one.",
        tests=(f"{_SNAPSHOTS}::test_a_table_that_is_truncated_before_its_snapshot_is_used_is_read_in_another_one",),
    ),
    Mutant(
        name="snapshot-older-than-what-was-left-to-it",
        path="sources/mysql_cdc/tasks/snapshot.py",
        old="return _includes(server, seen, start) and ",
        new="return ",
        breaks="A chunk includes all that windows of the log have left out for it.",
        tests=(f"{_SNAPSHOTS}::test_rows_that_a_new_snapshot_would_not_have_are_waited_for",),
    ),
    Mutant(
        name="snapshot-chunks-before-the-log-has-caught-up",
        path="sources/cdc/snapshot.py",
        old="if self.behind and end < order(self.behind):",
        new="if False:",
        breaks="Chunks are forgotten only when the log is read up to a place behind them.",
        tests=(_OF_ROWS_AND_LOG,),
    ),
    Mutant(
        name="snapshot-includes-transactions-that-were-open",
        path="sources/postgres_cdc/tasks/snapshot.py",
        old="return distance < 0 and self.end + distance not in self.running",
        new="return distance < 0",
        breaks="A change of a transaction that was open while a chunk was read is published.",
        tests=(
            "tests/sources/postgres_cdc/test_snapshots.py"
            "::test_a_snapshot_includes_what_was_committed_before_it_also_where_ids_wrap_around",
        ),
    ),
    Mutant(
        name="snapshot-compares-keys-by-the-operators-of-texts",
        path="sources/postgres_cdc/tasks/snapshot.py",
        old="        if not any(column.operators for column in self.key):\n",
        new="        if True:\n",
        breaks="Chunks are cut and compared in the order of the key's own type.",
        tests=(
            "tests/sources/postgres_cdc/test_snapshots.py"
            "::test_a_key_whose_operators_are_in_another_schema_is_cut_and_compared_in_its_own_order",
        ),
    ),
    Mutant(
        name="snapshot-of-an-added-table-waits-for-nothing",
        path="sources/postgres_cdc/windows.py",
        old="        while (oldest := fetch_rows(connection, READ_OPEN)[0][0]) < open_now[1]:\n",
        new="        while (oldest := open_now[1]) < open_now[1]:\n",
        breaks="A change that a publication did not have yet is in the chunk of its row.",
        tests=(
            "tests/sources/postgres_cdc/test_snapshots.py"
            "::test_the_rows_of_a_table_that_is_added_are_read_behind_the_transactions_that_changed_it_before",
        ),
    ),
    Mutant(
        name="log-publishes-what-a-savepoint-has-undone",
        path="sources/mysql_cdc/tasks/events.py",
        old="        del self._held[savepoint - self._released :]\n",
        new="",
        breaks="Changes that were rolled back to a savepoint are left out.",
        tests=(
            "tests/sources/mysql_cdc/test_windows.py"
            "::test_changes_behind_a_savepoint_that_were_rolled_back_are_left_out_also_if_the_log_has_them",
        ),
    ),
)

OF_WINDOWS: tuple[Mutant, ...] = (
    *_OF_LEDGER,
    *_OF_PLANNING,
    *_OF_CONTINUITY,
    *_OF_INTERVALS,
    *_OF_READING,
    *_OF_SOURCES,
    *_OF_SNAPSHOTS,
)
