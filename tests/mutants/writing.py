"""Mutants of the code that writes a window: the sinks, publishing to Kafka, and dead letters."""

from __future__ import annotations

from tests.mutants.model import Mutant

_BINDING = "tests/operators/test_binding.py"
_CONTRACT = "tests/sinks/test_contract.py::TestContract"
_POSTGRES_FAULTS = "tests/sinks/postgres/test_faults.py"
_POSTGRES_MODES = "tests/sinks/postgres/test_modes.py"
_FILES = "tests/sinks/files/test_sink.py"
_LAKE_UPSERT = "tests/sinks/lake/test_upsert.py"
_MANIFEST = "tests/sinks/files/test_manifest.py"
_PUBLISH = "tests/sinks/kafka/test_publish.py"

_OF_POSTGRES = (
    Mutant(
        name="postgres-window-claimed-twice",
        path="sinks/postgres/sql.py",
        old='"WHERE w.replay < excluded.replay RETURNING (xmax = 0)"',
        new='"RETURNING (xmax = 0)"',
        breaks="Only one transaction can insert the row of a window.",
        tests=(f"{_CONTRACT}::test_a_window_applied_twice_is_written_once[postgres append]",),
    ),
    Mutant(
        name="postgres-window-row-committed-first",
        path="sinks/postgres/writer.py",
        old="self.session.autocommit = False",
        new="self.session.autocommit = True",
        breaks="The row of a window and its rows are committed in one transaction.",
        tests=(
            f"{_CONTRACT}::test_a_crashed_attempt_is_repeated_and_the_window_is_there_once[postgres append-sink.in_transaction]",
        ),
    ),
    Mutant(
        name="postgres-pipeline-not-locked",
        path="sinks/postgres/writer.py",
        old="run(self.session, sql.lock(attempt.lock))",
        new="run(self.session, sql.try_lock(attempt.lock))",
        breaks="Windows of one pipeline are compared and applied one after the other.",
        tests=(f"{_POSTGRES_FAULTS}::test_windows_of_one_pipeline_are_compared_and_applied_one_after_the_other",),
    ),
    Mutant(
        name="postgres-dead-stage-kept",
        path="sinks/postgres/attempt.py",
        old="run(earlier.connection, sql.drop_tables(left[:_DROPPED_AT_ONCE]))",
        new="left = left[_DROPPED_AT_ONCE:]",
        breaks="The stages of an attempt that was replaced are dropped, so that its tasks cannot go on.",
        tests=(f"{_POSTGRES_FAULTS}::test_tasks_of_an_attempt_that_was_overtaken_are_fenced[append]",),
    ),
    Mutant(
        name="postgres-upsert-keeps-lower-offset",
        path="sinks/postgres/sql.py",
        old='s.{quote(self.offset)} DESC"',
        new='s.{quote(self.offset)}"',
        breaks="Of several records of a key in a window the one with the highest offset wins.",
        tests=(f"{_POSTGRES_MODES}::test_pieces_of_one_partition_keep_the_order_of_their_offsets",),
    ),
    Mutant(
        name="postgres-older-offset-overwrites",
        path="sinks/postgres/attempt.py",
        old="guarded=upserts and all(name in target.columns for name in sql.OFFSET_COLUMNS)",
        new="guarded=upserts and all(name in given for name in sql.OFFSET_COLUMNS)",
        breaks="An older offset never overwrites a newer one where the table has offset columns.",
        tests=(f"{_POSTGRES_MODES}::test_older_offsets_never_overwrite_newer_ones_where_the_table_has_offset_columns[window]",),
    ),
    Mutant(
        name="postgres-counts-not-compared",
        path="sinks/postgres/writer.py",
        old="raise CountMismatch(str(self.attempt.window), read, count)",
        new='log.warning("%d rows were read, and %d were counted", read, count)',
        breaks="A window whose reader and sink counted different rows is not committed.",
        tests=(f"{_POSTGRES_FAULTS}::test_counts_that_disagree_are_never_committed",),
    ),
    Mutant(
        name="postgres-record-of-another-table-counts",
        path="sinks/postgres/sink.py",
        old="if window.after == ELSEWHERE and record.find_elsewhere(connection, windows, window, name):",
        new="if False:",
        breaks="An open window that a rebind sends to another table of the schema is moved into that table.",
        tests=(
            f"{_BINDING}::test_an_open_window_goes_into_another_table_of_the_schema_once_somebody_says_so[window-sink.committed]",
        ),
    ),
    Mutant(
        name="postgres-splits-of-another-table-count",
        path="sinks/postgres/attempt.py",
        old="                run(connection, sql.delete_splits_elsewhere(markers, window.pipeline, window.number, name))\n",
        new="                pass\n",
        breaks="Splits that are in another table of the schema are written into the table that a rebind has named.",
        tests=(f"{_BINDING}::test_an_open_window_goes_into_another_table_of_the_schema_once_somebody_says_so[split-job.done]",),
    ),
    Mutant(
        name="postgres-split-marker-not-looked-for",
        path="sinks/postgres/tasks/write.py",
        old="        if (there := self._find_token(session)) is not None:\n            return there\n        # Its markers",
        new="        # Its markers",
        breaks="A split that has a marker is not written again.",
        tests=(f"{_CONTRACT}::test_a_crashed_attempt_is_repeated_and_the_window_is_there_once[postgres split-split.flushed]",),
    ),
    Mutant(
        name="postgres-split-marker-committed-first",
        path="sinks/postgres/tasks/write.py",
        old="session.run(sql.claim_split(self.splits, self.load.pipeline, self.load.number, self._marker))",
        new="""session.run(sql.claim_split(self.splits, self.load.pipeline, self.load.number, self._marker))
        session.commit()""",
        breaks="A split and its marker are committed in one transaction.",
        tests=(f"{_CONTRACT}::test_a_crashed_attempt_is_repeated_and_the_window_is_there_once[postgres split-split.mid]",),
    ),
    Mutant(
        name="postgres-split-late-task-not-refused",
        path="sinks/postgres/tasks/write.py",
        old="if session.fetch_rows(sql.select_applied_since(self.windows, self.load.pipeline, self.load.number)):",
        new="if self.load.number < 1:",
        breaks="A task of an older window writes nothing after its marker was deleted.",
        tests=(f"{_POSTGRES_FAULTS}::test_a_task_of_a_window_two_back_writes_nothing_though_its_marker_is_gone",),
    ),
)

_OF_FILES = (
    Mutant(
        name="files-record-published-first",
        path="sinks/files/sink.py",
        old="            os.rename(self.attempt / PUBLISH, target)\n",
        new="""            os.mkdir(target)
            for name in (RECORD, *sorted(set(os.listdir(self.attempt / PUBLISH)) - {RECORD})):
                os.rename(self.attempt / PUBLISH / name, target / name)
""",
        breaks="A window's directory becomes visible whole, by one rename.",
        tests=(f"{_FILES}::test_files_are_durable_before_they_are_published_and_names_after",),
    ),
    Mutant(
        name="files-window-replaced-unchecked",
        path="sinks/files/sink.py",
        old="if self.window.replay and target.exists():",
        new="if target.exists():",
        breaks="Publishing a window fails where another attempt has published it meanwhile.",
        tests=(f"{_FILES}::test_a_window_that_is_published_just_before_the_rename_stays_as_it_is",),
    ),
    Mutant(
        name="files-record-not-flushed",
        path="sinks/files/sink.py",
        old="for path in (publish / RECORD, *directories):",
        new="for path in directories:",
        breaks="Everything of a window is durable before it is published.",
        tests=(f"{_FILES}::test_files_are_durable_before_they_are_published_and_names_after",),
    ),
    Mutant(
        name="files-data-not-flushed",
        path="sinks/files/tasks/write.py",
        old="        super().finish()\n        flush(self.path)\n",
        new="        super().finish()\n",
        breaks="The files of a split are durable before the driver gets their names.",
        tests=(f"{_FILES}::test_files_are_durable_before_they_are_published_and_names_after",),
    ),
)

_OF_OBJECTS = (
    Mutant(
        name="files-entry-of-the-log-replaced",
        path="sinks/storage/store.py",
        old="os.link(temporary, target)",
        new="os.replace(temporary, target)",
        breaks="Of several attempts that commit under one number of the log, one does.",
        tests=(
            f"{_MANIFEST}::test_a_write_that_arrives_after_its_attempt_has_given_up_is_excluded_by_the_fence_or_is_the_window",
        ),
    ),
    Mutant(
        name="files-entry-of-the-log-in-a-store-replaced",
        path="sinks/storage/store.py",
        old='mode="create"',
        new='mode="overwrite"',
        breaks="Of several attempts that commit under one number of the log in an object store, one does.",
        tests=("tests/test_s3.py::test_all_cases_of_an_object_store",),
    ),
    Mutant(
        name="files-earlier-attempts-not-fenced",
        path="sinks/files/manifest.py",
        old="if any(parse_sequence(marker) > newest.sequence for marker in left):",
        new="if not left:",
        breaks="An attempt commits nothing once a later one has begun.",
        tests=(f"{_MANIFEST}::test_an_attempt_that_begins_later_fences_the_earlier_one_which_commits_nothing",),
    ),
)

_FENCED = "tests/sinks/lake/test_lake.py::test_an_attempt_that_was_fenced_commits_nothing_though_all_its_files_are_there"

_OF_LAKES = (
    Mutant(
        name="delta-overtaken-attempt-commits",
        path="sinks/delta/writer.py",
        old="if table.read_version(self.window.pipeline) != self.base:",
        new="if self.base is None:",
        breaks="An attempt commits nothing once another one of its pipeline has committed to the Delta table, or fenced.",
        tests=(f"{_FENCED}[delta]",),
    ),
    Mutant(
        name="iceberg-overtaken-attempt-commits",
        path="sinks/iceberg/writer.py",
        old="        if state.tag != self.base:\n            raise Fenced(self.window.pipeline, self.committing)\n",
        new="",
        breaks="An attempt commits nothing once another one of its pipeline has committed to the Iceberg table, or fenced.",
        tests=(f"{_FENCED}[iceberg]",),
    ),
    Mutant(
        name="lake-commit-whose-answer-was-lost-is-repeated",
        path="sinks/lake/writer.py",
        old="if found.applied.replay >= window.replay:",
        new="if found.applied.replay > window.replay:",
        breaks="A window that is in the table is not committed again.",
        tests=("tests/sinks/iceberg/test_sink.py::test_a_commit_whose_answer_was_lost_is_looked_up_and_not_repeated",),
    ),
    Mutant(
        name="lake-files-of-a-commit-in-doubt-removed",
        path="sinks/lake/writer.py",
        old="self.in_doubt, tried = True, seen",
        new="self.in_doubt, tried = False, seen",
        breaks="The files of a commit whose outcome is not known stay.",
        tests=("tests/sinks/lake/test_lake.py::test_files_of_a_commit_whose_outcome_is_not_known_stay",),
    ),
    Mutant(
        name="lake-upsert-first-event-wins",
        path="sinks/lake/tasks/rewrite.py",
        old='aggregate([(_ROW, "max")]).column(f"{_ROW}_max")',
        new='aggregate([(_ROW, "min")]).column(f"{_ROW}_min")',
        breaks="Of several records of a key in a window the last one is in the table.",
        tests=(f"{_LAKE_UPSERT}::test_the_last_offset_of_a_key_wins_within_and_between_windows",),
    ),
    Mutant(
        name="lake-upsert-older-offset-overwrites",
        path="sinks/lake/tasks/rewrite.py",
        old="lost[matches.row[matches.newer]] = True",
        new="lost[matches.row[matches.newer]] = False",
        breaks="An older offset never overwrites a newer one where the rows of a lake table hold their offsets.",
        tests=(f"{_LAKE_UPSERT}::test_older_offsets_never_overwrite_newer_ones_where_rows_hold_their_offsets",),
    ),
)

_OF_ROUTING = (
    Mutant(
        name="routed-records-not-compared-with-those-that-are-committed",
        path="operators/routed_sinks.py",
        old="is_other = digest != known.digest if known else records != there",
        new="is_other = False",
        breaks="A record that another sink of a window has committed does not go into the operator's own sink as well.",
        tests=(
            "tests/faults/test_capturing.py"
            "::test_killed_between_the_commits_of_the_two_sinks_the_retry_finishes_and_nothing_else_would_do",
        ),
    ),
)

_OF_VERIFICATION = (
    Mutant(
        name="verification-compares-counts-only",
        path="verification/comparison.py",
        old="        if source != sink:\n            self.differing.append(chunk)",
        new="        if source.rows != sink.rows:\n            self.differing.append(chunk)",
        breaks="A row that has another value in the copy is found.",
        tests=("tests/verification/test_verify.py::test_rows_that_are_missing_extra_or_different_are_counted_and_named",),
    ),
)

_OF_PUBLISHING = (
    Mutant(
        name="publish-fenced-by-a-late-task-is-the-end",
        path="operators/publishing.py",
        old="            ledger.verify()\n            if tries",
        new="            raise\n            if tries",
        breaks="An attempt that still owns its window publishes a split that a late task of an earlier attempt has fenced.",
        tests=(
            "tests/faults/test_publish.py"
            "::test_a_late_task_that_fences_a_split_of_the_newer_attempt_publishes_nothing_and_the_newer_attempt_does",
        ),
    ),
    Mutant(
        name="publish-topics-of-records-not-compared",
        path="operators/publishing.py",
        old='if found[topic] not in (known, "")]',
        new="if False]",
        breaks="Records that are gone with a topic beside the target of an open window are not left out silently.",
        tests=(
            f"{_BINDING}::test_records_of_an_open_window_that_are_gone_with_a_topic_beside_its_target_are_not_left_out_silently",
        ),
    ),
    Mutant(
        name="publish-reset-before-the-fences",
        path="control/position.py",
        old="                move, group = plan_reset(found.memory)\n",
        new="                pass\n",
        breaks="A partition that a task publishes while its window is given up is not published again.",
        tests=(
            "tests/control/test_reset.py::TestReset"
            "::test_what_a_task_publishes_meanwhile_is_not_published_again_by_the_next_window",
        ),
    ),
    Mutant(
        name="publish-marker-before-records",
        path="sinks/kafka/tasks/publish.py",
        old="        producer.begin_transaction()\n        # A record that was read",
        new="""        producer.begin_transaction()
        self._mark(producer, Marker(self.ledger.number, split))
        producer.commit_transaction(self.transaction_timeout)
        producer.begin_transaction()
        # A record that was read""",
        breaks="A split has a marker only if its records are committed.",
        tests=(f"{_PUBLISH}::test_a_row_that_cannot_be_a_record_is_named_and_nothing_of_its_split_is_committed",),
    ),
    Mutant(
        name="publish-marker-after-records",
        path="sinks/kafka/tasks/publish.py",
        old="            self._mark(producer, marker)\n",
        new="""            producer.commit_transaction(self.transaction_timeout)
            producer.begin_transaction()
            self._mark(producer, marker)
""",
        breaks="A split whose records are committed has a marker.",
        tests=(
            "tests/faults/test_publish.py::test_killed_then_retried_and_cleared_every_row_is_published_exactly_once[publish.marked]",
        ),
    ),
    Mutant(
        name="publish-marker-not-looked-for",
        path="sinks/kafka/tasks/publish.py",
        old="return memory.markers.get((self.ledger.number, split))",
        new="return None",
        breaks="A split that has a marker is not published again.",
        tests=(f"{_PUBLISH}::test_a_split_that_is_published_is_not_published_again",),
    ),
    Mutant(
        name="publish-open-marker-believed",
        path="sinks/kafka/tasks/publish.py",
        old="read_span(LedgerSpan(config, tp, start, high), AwaitedRecords(mine, abort=self._end))",
        new="read_span(LedgerSpan(config, tp, start, high).make_uncommitted(start), AwaitedRecords(mine, abort=self._end))",
        breaks="A marker in a transaction that was aborted does not count.",
        tests=(f"{_PUBLISH}::test_a_marker_that_was_never_committed_does_not_count",),
    ),
    Mutant(
        name="publish-old-ledger-believed",
        path="sinks/kafka/tasks/publish.py",
        old="if next(records, None) == last:",
        new="if next(records, None) is not None:",
        breaks="What a process has read of the ledger counts only as long as its log is the same.",
        tests=(
            "tests/sinks/kafka/test_claimed_window.py::test_looks_that_continue_say_the_same_as_one_that_begins_at_the_claim",
        ),
    ),
    Mutant(
        name="publish-since-not-read",
        path="sinks/kafka/tasks/publish.py",
        old="                self._take(records)\n                return\n",
        new="                return\n",
        breaks="A process that has looked before sees a newer claim.",
        tests=("tests/sinks/kafka/test_claimed_window.py::test_a_process_that_has_looked_before_sees_a_newer_claim",),
    ),
    Mutant(
        name="publish-row-without-room-left-out",
        path="sinks/kafka/tasks/send.py",
        old="            start += queued.count\n",
        new="            start += queued.count + (queued.error is not None)\n",
        breaks="A row for which the client's queue has no room is sent when it has.",
        tests=(f"{_PUBLISH}::test_a_queue_that_is_smaller_than_a_batch_loses_doubles_and_moves_no_row[as columns]",),
    ),
    Mutant(
        name="publish-queued-rows-sent-again",
        path="librdkafka/tasks/produce.py",
        old="return QueuedRecords(begin - start + first, ",
        new="return QueuedRecords(max(0, begin - start + first - 1), ",
        breaks="Rows that are in the client's queue are not queued again.",
        tests=(f"{_PUBLISH}::test_a_queue_that_is_smaller_than_a_batch_loses_doubles_and_moves_no_row[as columns]",),
    ),
    Mutant(
        name="publish-last-rows-first",
        path="sinks/kafka/tasks/send.py",
        old="        self._produce_some(ordered, firsts)\n        if is_other.any()",
        new="        self._produce_some(ordered, firsts | lasts)\n        lasts = {}\n        if is_other.any()",
        breaks="The rows of a partition are sent in their order.",
        tests=(f"{_PUBLISH}::test_rows_of_many_batches_keep_their_order_in_each_partition[as columns]",),
    ),
    Mutant(
        name="publish-split-not-fenced",
        path="sinks/kafka/tasks/publish.py",
        old='f"{self.prefix}{split}", FENCE_SECONDS',
        new='f"{self.prefix}{split}.{time.monotonic_ns()}", FENCE_SECONDS',
        breaks="Of two tasks that publish the same split one is refused by the brokers.",
        tests=(f"{_PUBLISH}::test_a_task_that_is_fenced_in_the_middle_takes_the_marker_of_the_one_that_fenced_it",),
    ),
    Mutant(
        name="kafka-to-kafka-offsets-not-sent",
        path="sinks/kafka/tasks/publish.py",
        old="send_offsets(producer, self.reading, self.consumed.group_id, offsets, self.transaction_timeout)",
        new="del offsets",
        breaks="The group's offset of a partition moves in the transaction of its records.",
        tests=("tests/faults/test_kafka_to_kafka.py::test_output_and_consumed_offset_of_a_partition_move_together",),
    ),
    Mutant(
        name="kafka-to-kafka-offset-one-too-far",
        path="operators/kafka_to_kafka.py",
        old="(tp, ends[tp], make_offset_metadata(window, tp.topic, hint))",
        new="(tp, ends[tp] + 1, make_offset_metadata(window, tp.topic, hint))",
        breaks="The group's offset of a partition is the end of what was published.",
        tests=("tests/operators/test_kafka_to_kafka.py::test_a_copy_keeps_key_value_timestamp_and_headers_window_after_window",),
    ),
    Mutant(
        name="kafka-to-kafka-account-not-demanded",
        path="sinks/kafka/tasks/publish.py",
        old="        if ends_itself and self.result is None:\n            raise RowsCutOff\n",
        new="",
        breaks="A split is published only with the account of everything that was read for it.",
        tests=(f"{_PUBLISH}::test_a_split_whose_account_does_not_arrive_is_not_published",),
    ),
    Mutant(
        name="kafka-to-kafka-nothing-is-an-empty-split",
        path="jobs/tasks/publish.py",
        old="            if self.result is None:\n                raise RowsCutOff\n",
        new="            self.result = self.result or account.result()\n",
        breaks="A split of which nothing arrives, not even its account, is not published as an empty one.",
        tests=(f"{_PUBLISH}::test_a_split_of_which_nothing_arrives_is_not_published",),
    ),
)

_OF_DEAD_LETTERS = (
    Mutant(
        name="dead-letters-forgotten",
        path="bad_records/dead_letters.py",
        old="(offset,) = ledger.send(producer, [record])",
        new="offset = record.offset",
        breaks="The ledger remembers which records became dead letters.",
        tests=("tests/operators/test_dead_letters.py::test_what_was_dead_stays_dead_when_the_format_is_mended_before_the_retry",),
    ),
    Mutant(
        name="dead-letters-committed-before-the-note",
        path="bad_records/dead_letters.py",
        old="            record = self._make_record(dead, ledger, outputs)\n",
        new="""            producer.commit_transaction(SECONDS)
            producer.begin_transaction()
            record = self._make_record(dead, ledger, outputs)
""",
        breaks="Dead letters and the ledger's record of them are committed in one transaction.",
        tests=(
            "tests/faults/test_dead_letters.py::"
            "test_killed_then_retried_and_cleared_each_record_is_in_the_sink_or_a_dead_letter_exactly_once"
            "[postgres-dead.in_transaction]",
        ),
    ),
    Mutant(
        name="dead-letters-beside-an-applied-window",
        path="operators/kafka_to_sink.py",
        old="        return self.operator.find_applied(self.window)\n\n    def _send_elsewhere",
        new="        return None\n\n    def _send_elsewhere",
        breaks="An attempt that has begun looks whether the one before has committed the window, before it sends dead letters.",
        tests=("tests/windows/test_ledger_model.py::test_two_tries_of_a_window_with_dead_letters",),
    ),
)

OF_WRITING: tuple[Mutant, ...] = (
    *_OF_POSTGRES,
    *_OF_FILES,
    *_OF_OBJECTS,
    *_OF_LAKES,
    *_OF_PUBLISHING,
    *_OF_DEAD_LETTERS,
    *_OF_ROUTING,
    *_OF_VERIFICATION,
)
