"""Offset control on a real broker: what is refused, what one transaction changes, and previews."""

from __future__ import annotations

import json
import threading
import uuid
from dataclasses import replace

import pytest
from confluent_kafka import Consumer, Producer

from airflow_kafka_spark import faults
from airflow_kafka_spark.control.pipelines import list_windows, read_pipeline, show, to_json
from airflow_kafka_spark.control.preview import PlanOptions, preview_window
from airflow_kafka_spark.errors import BoundRefused, ChangeRefused, Fenced, GroupHasMembers, PipelineUnknown, WindowOpen
from airflow_kafka_spark.hooks.kafka.log import read_log
from airflow_kafka_spark.ledger.topic import make_transactional_id
from airflow_kafka_spark.windows.model import Marker, OffsetRange, SourcePlan, TargetTopic
from airflow_kafka_spark.windows.offset_specs import CommittedOffsets, ShiftBy, SpecificOffsets
from tests.support.control import forget, reset, skip
from tests.support.piped import BASE, Piped, fill


@pytest.fixture(scope="module")
def kept(kafka, hook):
    """A pipeline that no test of this file changes, and what a refusal must leave as it is."""
    name = f"kept-{uuid.uuid4().hex[:8]}"
    made = fill(Piped(kafka, hook, f"pipe-{name}", f"orders-{name}", f"ledger-{name}"))
    made.move(10, 10)
    return made, made.everything()


@pytest.fixture
def untouched(kept):
    """The pipeline that refusals share, after a window up to offset 10 of both partitions; it is compared after each test."""
    made, before = kept
    yield made
    assert made.everything() == before


class TestReset:
    def test_it_moves_position_and_group_and_says_who_and_why(self, moved):
        before, places = [10, 10], [
            ("earliest", [2, 0]),
            ("latest", [20, 20]),
            (ShiftBy(-3), [17, 17]),
            ("2025-06-15T15:06:45Z", [5, 5]),
            (ShiftBy(4), [9, 9]),
            ("2030-01-01T00:00:00Z", [20, 20]),
        ]  # fmt: skip
        for number, (to, after) in enumerate(places, 1):
            done = moved.reset(to, f"reload {number}", who="ann")
            assert any("No record of" in warning for warning in done.warnings) == (to == "2030-01-01T00:00:00Z")
            assert [m.after for m in done.moves] == moved.stands() == moved.committed() == after
            assert [m.before for m in done.moves] == before
            changes = {change.number: change for change in show(moved.hook, moved.name, **moved.place).changes}
            change = changes[number]
            assert len(changes) == number and (change.action, change.who, change.why) == ("reset", "ann", f"reload {number}")
            assert (list(change.before.values()), list(change.after.values())) == (before, after)
            before = after

    def test_the_next_window_says_that_it_begins_there_and_no_later_one(self, moved):
        moved.reset(ShiftBy(-5))
        assert moved.open_window(12, 12).moved == 1
        with moved.ledger() as ledger:
            entry = ledger.reopen(ledger.memory.open_entry)
            assert (entry.window.moved, [r.start for r in entry.window.ranges]) == (1, [5, 5])
            ledger.close({"group_id": moved.name}, entry.window.ends)
        assert moved.open_window(13, 13).moved == 0

    def test_a_shift_goes_no_further_than_the_log_and_says_so(self, moved):
        done = moved.reset(ShiftBy(-9))
        assert [(m.after, m.wanted) for m in done.moves] == [(2, 1), (1, None)]
        done = moved.reset(ShiftBy(100))
        assert [(m.after, m.wanted) for m in done.moves] == [(20, 102), (20, 101)]

    def test_named_offsets_move_their_partitions_alone(self, moved):
        moved.reset(SpecificOffsets({moved.topic: {1: 3}}))
        assert moved.stands() == moved.committed() == [10, 3]

    def test_only_some_partitions_named_once_twice_or_as_text(self, moved):
        one = f"{moved.topic}:1"
        for to, only, after in (("latest", [one], 20), ("earliest", [one, one], 0), ("latest", one, 20)):
            moved.reset(to, only=only)
            assert moved.stands() == moved.committed() == [10, after]

    def test_to_another_groups_offsets(self, moved, unique):
        other = unique("connect-orders")
        moved.hook.alter_committed(other, {moved.tp(0): 4, moved.tp(1): 6})
        moved.reset(f"committed:{other}")
        assert moved.stands() == moved.committed() == [4, 6]

    def test_another_group_that_has_committed_nothing_is_refused(self, untouched, unique):
        with pytest.raises(BoundRefused, match=f"`misspelt` has no committed offset in {untouched.topic}-0"):
            untouched.reset("committed:misspelt")
        with pytest.raises(Exception, match=f"no committed offset to begin at for {untouched.topic}-0"):
            untouched.reset(CommittedOffsets(unique("nobody"), "none"))

    def test_the_group_of_another_consumer_is_neither_moved_nor_deleted(self, untouched, unique):
        """It was named by mistake, in place of `committed:<group>` or of the pipeline's own group."""
        other = unique("connect-orders")
        untouched.hook.alter_committed(other, {untouched.tp(0): 4})
        for dry_run in (True, False):
            place = {**untouched.place, "group_id": other, "dry_run": dry_run, "why": "x"}
            with pytest.raises(ChangeRefused, match=f"has group `{untouched.name}`, not `{other}`.*committed:{other}"):
                reset(untouched.hook, untouched.name, "earliest", **place)
            with pytest.raises(ChangeRefused, match=f"has group `{untouched.name}`"):
                skip(untouched.hook, untouched.name, **place)
            for pipeline in (untouched.name, "misspelt"):
                with pytest.raises(ChangeRefused, match=f"`{pipeline}` has committed none of the offsets of group `{other}`"):
                    forget(untouched.hook, pipeline, delete_group=True, **place)
        found = untouched.hook.read_committed_offsets(other, [untouched.tp(0)])[untouched.tp(0)]
        assert (found.offset, found.metadata) == (4, "")

    def test_offsets_outside_the_log_are_refused_with_the_numbers(self, untouched):
        with pytest.raises(BoundRefused) as caught:
            untouched.reset({untouched.topic: {"0": 1, "1": 21}})
        assert f"{untouched.topic}-0 at 1, not in [2, 20]" in str(caught.value)
        assert f"{untouched.topic}-1 at 21, not in [0, 20]" in str(caught.value)

    def test_partitions_that_it_does_not_read_are_refused(self, untouched):
        with pytest.raises(BoundRefused, match="reads no"):
            untouched.reset({"other": {"0": 1}})
        with pytest.raises(BoundRefused, match="reads no"):
            untouched.reset("earliest", only=["other"])
        for unfinished in (f"{untouched.topic}:", f"{untouched.topic}:0,"):
            with pytest.raises(ValueError, match=f"`{unfinished}` names no partitions"):
                untouched.reset("earliest", only=[unfinished])

    def test_without_a_reason_nothing_is_changed(self, untouched):
        with pytest.raises(ChangeRefused, match="no reason"):
            untouched.reset("earliest", why=" ")

    def test_a_pipeline_that_the_ledger_does_not_know_is_moved_where_its_topics_and_group_are_named(self, piped):
        """This is the state after Kafka was created anew; the sink may still have a record of windows."""
        with pytest.raises(PipelineUnknown):
            piped.reset("earliest", only=[piped.topic])
        with pytest.raises(PipelineUnknown):
            piped.reset("earliest", group_id=piped.name)
        done = piped.reset("earliest", only=[piped.topic], group_id=piped.name)
        assert [(m.before, m.after) for m in done.moves] == [(None, 2), (None, 0)]
        assert piped.stands() == piped.committed() == [2, 0]
        position = piped.memory.position
        assert (position.moved, position.cluster_id) == (1, piped.hook.read_cluster_id()) and position.topic_ids[piped.topic]

    def test_an_open_window_is_refused_and_its_attempt_is_not_disturbed(self, moved):
        with moved.ledger() as at_work:
            entry = at_work.plan(moved.window(at_work, 15, 15))
            with pytest.raises(WindowOpen) as caught:
                moved.reset("earliest")
            assert entry.window.run in str(caught.value) and str(entry.window) in str(caught.value)
            assert "Run the task again, which finishes the window" in str(caught.value)
            at_work.close({"group_id": moved.name}, entry.window.ends)
        assert moved.stands() == [15, 15]

    def test_unless_it_is_given_up_and_then_its_number_is_not_used_again(self, moved):
        target = TargetTopic("copy", "id", 2)
        number = moved.open_window(15, 15, target=target).number
        with moved.ledger() as at_work:
            at_work.reopen(at_work.memory.open_entry)
            done = moved.reset(ShiftBy(-10), discard_open=True)
            assert tuple(w.number for w in done.given_up) == (number,) == (2,)
            with pytest.raises(Fenced):
                at_work.close({}, {})
        memory = moved.memory
        assert memory.open_entry is None and not memory.markers
        assert (memory.last_number, moved.stands(), moved.committed()) == (2, [2, 0], [2, 0])
        assert moved.open_window(11, 11).number == 3

    def test_tasks_of_a_window_that_is_given_up_cannot_publish_any_more(self, moved):
        """A task of it sleeps with its transaction open, its marker in the ledger."""
        from airflow_kafka_spark.windows.memory import make_marker_record

        window = moved.open_window(15, 15, target=TargetTopic("copy", "id", 2))
        identity = make_transactional_id(moved.ledger_topic, moved.name, "split.1")
        task = Producer({**moved.kafka.connection_extra(), "transactional.id": identity})
        task.init_transactions(60)
        task.begin_transaction()
        partition = read_pipeline(moved.hook, moved.name, moved.ledger_topic).partition
        record = make_marker_record(moved.name, Marker(window.number, 1))
        task.produce(moved.ledger_topic, record.value, record.key, partition)
        task.flush(60)
        reset(moved.hook, moved.name, "earliest", why="a test", discard_open=True, **moved.place)
        with pytest.raises(Exception, match=r"(?i)fenced|epoch|abort"):
            task.commit_transaction(60)
        memory = moved.memory
        assert not memory.markers and memory.open_entry is None and moved.stands() == [2, 0]

    def test_what_a_task_publishes_meanwhile_is_not_published_again_by_the_next_window(self, moved, monkeypatch):
        """The task commits its split, and the group's offset with it, just before it would be fenced."""
        from airflow_kafka_spark.control import position
        from airflow_kafka_spark.hooks.kafka.transactions import send_offsets
        from airflow_kafka_spark.windows.memory import make_marker_record

        window = moved.open_window(15, 15, target=TargetTopic("copy", "id", 2))
        identity = make_transactional_id(moved.ledger_topic, moved.name, "split.1")
        partition = read_pipeline(moved.hook, moved.name, moved.ledger_topic).partition
        fence = position.fence_splits

        def publish_then_fence(ledger, windows):
            task = Producer({**moved.kafka.connection_extra(), "transactional.id": identity})
            task.init_transactions(60)
            task.begin_transaction()
            record = make_marker_record(moved.name, Marker(window.number, 1))
            task.produce(moved.ledger_topic, record.value, record.key, partition)
            send_offsets(task, moved.kafka.connection_extra(), moved.name, [(moved.tp(1), 15, "")], 60)
            task.flush(60)
            task.commit_transaction(60)
            fence(ledger, windows)

        monkeypatch.setattr(position, "fence_splits", publish_then_fence)
        done = moved.reset(f"committed:{moved.name}", discard_open=True)
        assert [m.after for m in done.moves] == moved.stands() == moved.committed() == [10, 15]

    def test_a_first_window_that_is_too_large_is_given_up_and_the_next_one_begins_where_it_began(self, piped):
        """The group has committed nothing, and the window does not begin with the first records."""
        with piped.ledger() as ledger:
            ranges = tuple(OffsetRange(piped.topic, partition, 5, 20) for partition in range(2))
            ledger.plan(replace(piped.window(ledger, 20, 20), ranges=ranges))
        done = piped.reset(f"committed:{piped.name}", group_id=piped.name, discard_open=True)
        assert [m.after for m in done.moves] == piped.stands() == piped.committed() == [5, 5]

    def test_the_first_window_given_up_leaves_the_others_where_it_would_have_begun(self, piped):
        piped.open_window(5, 5)
        with pytest.raises(ChangeRefused, match="which group"):
            piped.reset("latest", discard_open=True)
        piped.reset("latest", only=[f"{piped.topic}:0"], discard_open=True, group_id=piped.name)
        assert piped.stands() == [20, 0]

    def test_live_members_of_the_group_are_refused(self, moved):
        before = moved.everything()
        ready, done = threading.Event(), threading.Event()

        def consume():
            consumer = Consumer({**moved.kafka.connection_extra(), "group.id": moved.name, "auto.offset.reset": "latest"})
            consumer.subscribe([moved.topic], on_assign=lambda *_: ready.set())
            while not done.is_set():
                consumer.poll(0.1)
            consumer.close()

        thread = threading.Thread(target=consume)
        thread.start()
        try:
            assert ready.wait(60)
            with pytest.raises(GroupHasMembers):
                moved.reset("earliest")
            assert moved.everything() == before
        finally:
            done.set()
            thread.join(30)

    def test_a_dry_run_shows_from_and_to_and_changes_nothing(self, moved):
        before = moved.everything()
        with moved.ledger() as at_work:
            done = moved.reset("earliest", dry_run=True)
            assert [(m.before, m.after) for m in done.moves] == [(10, 2), (10, 0)]
            assert done.dry_run and moved.everything() == before
            at_work.plan(moved.window(at_work, 11, 11))

    def test_a_failure_inside_the_transaction_changes_nothing(self, moved, monkeypatch):
        before = moved.stands(), moved.committed()
        monkeypatch.setenv(faults.FAULT, "change.in_transaction:raise")
        with pytest.raises(Exception, match="fault injected"):
            moved.reset("earliest")
        monkeypatch.delenv(faults.FAULT)
        assert (moved.stands(), moved.committed()) == before
        assert not moved.memory.changes

    def test_an_attempt_that_was_about_to_plan_is_shut_out(self, moved):
        with moved.ledger() as about_to_plan:
            moved.reset("earliest")
            with pytest.raises(Fenced):
                about_to_plan.plan(moved.window(about_to_plan, 20, 20))
        assert moved.stands() == [2, 0]

    def test_a_recreated_topic_is_moved_as_a_whole(self, moved):
        window = moved.open_window(12, 12)
        moved.kafka.delete_topic(moved.topic)
        lost = f"Topic `{moved.topic}` was deleted since this window was planned"
        assert lost in preview_window(moved.hook, moved.name, **moved.place).warnings[0]
        with pytest.raises(ChangeRefused, match=f"Topic `{moved.topic}` .* does not exist any more"):
            moved.reset("earliest", discard_open=True)
        moved.kafka.create_topic(moved.topic, 2)
        assert lost in preview_window(moved.hook, moved.name, **moved.place).warnings[0]
        assert skip(moved.hook, moved.name, running=False, why="x", **moved.place).given_up[0].number == window.number
        moved.settle()
        with pytest.raises(ChangeRefused, match="no position to shift from"):
            moved.reset(ShiftBy(1))
        with pytest.raises(ChangeRefused, match="all of its partitions"):
            moved.reset("earliest", only=[f"{moved.topic}:0"])
        moved.reset("earliest")
        position = moved.memory.position
        assert position.topic_ids == read_log(moved.hook, [moved.topic]).topic_ids
        assert moved.stands() == [0, 0]

    def test_the_short_cut_of_the_group_leads_to_the_new_position(self, moved):
        moved.move(12, 12)
        moved.reset(ShiftBy(-5))
        with moved.ledger() as ledger:
            assert ledger.hint is not None
            assert (ledger.memory.position.moved, sorted(ledger.memory.position.offsets.values())) == (1, [7, 7])

    def test_a_pipeline_that_reads_rows_has_no_offsets_to_move(self, piped):
        with piped.ledger() as ledger:
            ledger.plan(piped.window(ledger, source=SourcePlan(({"n": 1},), {"cursor": 5})))
        with pytest.raises(ChangeRefused, match="reads rows"):
            piped.reset("earliest", discard_open=True)


class TestForget:
    def test_only_the_record_of_this_change_is_left(self, moved):
        moved.reset("earliest")
        moved.move(5, 5)
        done = forget(moved.hook, moved.name, why="retired", who="ann", **moved.place)
        assert done.records == 4, "the position, two windows and a change"
        memory = moved.memory
        assert memory.is_blank and not memory.entries
        (change,) = memory.changes.values()
        assert (change.action, change.number, change.who, list(change.before.values())) == ("forget", 2, "ann", [5, 5])
        assert moved.committed() == [5, 5], "its group was not asked for"

    def test_the_groups_offsets_go_if_asked_for(self, moved):
        forget(moved.hook, moved.name, why="retired", delete_group=True, **moved.place)
        assert moved.committed() == [None, None]

    def test_an_open_window_is_refused_unless_given_up(self, moved):
        moved.open_window(15, 15)
        with pytest.raises(WindowOpen):
            forget(moved.hook, moved.name, why="x", **moved.place)
        done = forget(moved.hook, moved.name, why="x", discard_open=True, **moved.place)
        assert [w.number for w in done.given_up] == [2]

    def test_a_dry_run_counts_and_changes_nothing(self, untouched):
        done = forget(untouched.hook, untouched.name, why="x", dry_run=True, delete_group=True, **untouched.place)
        assert done.records == 2

    def test_a_pipeline_that_is_not_known_is_not_forgotten(self, moved):
        forget(moved.hook, moved.name, why="x", **moved.place)
        moved.settle()
        for action in (forget, lambda *a, **k: reset(*a, "earliest", **k)):
            with pytest.raises(PipelineUnknown):
                action(moved.hook, moved.name, why="x", **moved.place)


class TestLooking:
    def test_an_unknown_pipeline_is_said_and_no_ledger_is_made(self, hook, moved, unique):
        absent = unique("no-ledger")
        for look in (show, list_windows, preview_window, lambda *a, **k: reset(*a, "earliest", why="x", **k)):
            with pytest.raises(PipelineUnknown):
                look(hook, moved.name, ledger_topic=absent)
            with pytest.raises(PipelineUnknown):
                look(hook, "unheard-of", ledger_topic=moved.ledger_topic)
        assert absent not in hook.list_topics()

    def test_show_prints_position_lag_group_and_open_windows(self, moved):
        state = show(moved.hook, moved.name, **moved.place)
        found = [(p.partition, p.offset, p.low, p.lso, p.committed, p.lag) for p in state.partitions]
        assert found == [(0, 10, 2, 20, 10, 10), (1, 10, 0, 20, 10, 10)]
        assert (state.group_id, state.last_window, state.open_windows) == (moved.name, 1, ())
        moved.open_window(15, 15)
        (window,) = show(moved.hook, moved.name, **moved.place).open_windows
        assert (window.number, window.state, window.completed_at) == (2, "PLANNED", None)
        json.dumps(to_json(state))

    def test_windows_come_last_first(self, moved):
        moved.move(12, 15)
        found = list_windows(moved.hook, moved.name, **moved.place)
        assert [(w.number, w.state, w.records_read) for w in found] == [(2, "COMPLETE", 7), (1, "COMPLETE", 20)]
        assert [w.number for w in list_windows(moved.hook, moved.name, limit=1, **moved.place)] == [2]

    def test_reading_disturbs_no_attempt(self, moved):
        with moved.ledger() as at_work:
            for look in (show, list_windows, preview_window):
                look(moved.hook, moved.name, **moved.place)
            at_work.plan(moved.window(at_work, 11, 11))

    def test_plan_returns_ranges_records_bytes_and_age_of_the_next_window(self, moved):
        before = moved.everything()
        found = preview_window(moved.hook, moved.name, **moved.place)
        assert [(r.start, r.end, r.bytes, r.oldest) for r in found.ranges] == [(10, 20, 1000, BASE + 10_000)] * 2
        assert (found.number, found.begins, found.offsets, found.bytes, found.run) == (2, "ledger", 20, 2000, None)
        assert found.age > 0
        assert moved.everything() == before
        capped = preview_window(
            moved.hook, moved.name, PlanOptions(ending_offsets="2025-06-15T15:06:55Z", max_records=4), **moved.place
        )
        assert [(r.start, r.end) for r in capped.ranges] == [(10, 12)] * 2

    def test_plan_of_a_window_that_is_open_is_that_window(self, moved):
        window = moved.open_window(15, 10)
        found = preview_window(moved.hook, moved.name, **moved.place)
        assert (found.number, found.begins, found.run) == (window.number, "open window", window.run)
        assert [(r.start, r.end) for r in found.ranges] == [(10, 15), (10, 10)]

    def test_plan_of_a_new_pipeline_says_where_it_would_begin(self, moved, unique):
        options = PlanOptions([moved.topic], unique("new"), "2025-06-15T15:06:58Z")
        found = preview_window(moved.hook, unique("new"), options, **moved.place)
        assert ([(r.start, r.end) for r in found.ranges], found.begins) == ([(18, 20)] * 2, "starting_offsets")
        options = PlanOptions([moved.topic], moved.name)
        of_group = preview_window(moved.hook, moved.name, options, **{**moved.place, "ledger_topic": unique("lost")})
        assert ([r.start for r in of_group.ranges], of_group.begins, of_group.number) == ([10, 10], "group", 2)
