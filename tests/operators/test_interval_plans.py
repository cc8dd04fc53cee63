"""Offsets of data intervals beside other windows of their pipeline: each offset is moved once, in any order of planning."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from functools import partial

import pytest

from airflow_kafka_spark.errors import BeginningDeleted, IntervalCut, IntervalOverlaps, IntervalsLost, IntervalsOpen
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.windows.interval import Interval
from airflow_kafka_spark.windows.model import TopicPartition
from tests.support.control import forget
from tests.support.dry import Dry
from tests.support.intervals import BEGIN, hour
from tests.support.oracle import wait_stable


@pytest.fixture
def dry(kafka, unique, tmp_path):
    return Dry(kafka, unique, tmp_path)


def ranges(report):
    return [(r["topic"][-1], r["start"], r["end"]) for r in report["ranges"]]


class TestATopicThatJoins:
    def test_it_begins_at_its_first_record_in_its_first_interval_and_the_group_continues(self, dry):
        dry.produce(0, 30, 70, 130, 190, 250, 310)
        for number in range(3):
            dry.run(number)
        joined = dry.add_topic("b")
        dry.produce(-100, 5, 65, 125, 200, 260, 310, topic=joined)
        assert ranges(dry.run(3)) == [("a", 4, 5), ("b", 0, 5)]
        dry.run(1, cleared=1)
        assert ranges(dry.run(4)) == [("a", 5, 6), ("b", 5, 6)]
        assert dry.offsets() == {f"{dry.topic}-0": [*range(6)], f"{joined}-0": [*range(6)]}
        assert dry.committed(dry.topic, joined) == {f"{dry.topic}-0": 6, f"{joined}-0": 6}

    def test_intervals_that_are_backfilled_later_leave_what_was_taken_up(self, dry):
        dry.produce(0, 70, 130, 190, 250)
        dry.run(3)
        joined = dry.add_topic("b")
        dry.produce(5, 65, 125, 185, 245, topic=joined)
        # Backwards: hour 3 was planned without the topic, and hour 2 begins at its first record.
        assert ranges(dry.run(2)) == [("a", 2, 3), ("b", 0, 3)]
        assert ranges(dry.run(0)) == [("a", 0, 1), ("b", 1, 1)]
        dry.run(1)
        dry.produce(320, topic=joined)
        dry.produce(320)
        assert ranges(dry.run(4)) == [("a", 4, 5), ("b", 3, 5)]
        assert dry.offsets() == {f"{dry.topic}-0": [0, 1, 2, 3, 4], f"{joined}-0": [0, 1, 2, 3, 4]}
        assert dry.committed(dry.topic, joined) == {f"{dry.topic}-0": 5, f"{joined}-0": 5}

    def test_two_intervals_that_take_it_up_at_the_same_moment_do_so_once(self, dry):
        dry.produce(0, 70, 130, 190)
        dry.run(0)
        joined = dry.add_topic("b")
        dry.produce(5, 65, 125, 185, topic=joined)
        assert ranges(dry.run(1, between=dry.attempt(2))) == [("a", 1, 2), ("b", 2, 2)]
        assert dry.offsets() == {f"{dry.topic}-0": [0, 1, 2], f"{joined}-0": [0, 1, 2]}


class TestBesideProgress:
    """Runs of the same pipeline without a data interval."""

    def test_an_interval_leaves_what_an_open_progress_window_has(self, dry):
        dry.produce(0, 10, 20, 70, 80, 90)
        dry.killed(fault="close.begin")
        assert dry.offsets() == {f"{dry.topic}-0": [*range(6)]}
        assert dry.run(0)["records_read"] == 0
        dry.run()
        dry.produce(95, 190)
        assert [dry.run(number)["records_read"] for number in (1, 2)] == [1, 0]
        assert dry.offsets() == {f"{dry.topic}-0": [*range(7)]}

    def test_an_interval_that_waited_for_its_end_leaves_what_was_moved_meanwhile(self, dry):
        now = datetime.now(timezone.utc)
        minutes = (now - BEGIN).total_seconds() / 60
        dry.produce(*(minutes - before for before in (9, 8, 7, 6)))

        def waiting():
            dry.run()
            # Now it is decided where the interval ends.
            dry.produce(minutes + 0.01)

        report = dry.run(interval=(now - timedelta(minutes=10), now), grace=600, waiting=waiting)
        assert report["records_read"] == 0
        assert dry.offsets() == {f"{dry.topic}-0": [*range(4)]}

    @pytest.mark.parametrize("ending", ["complete", "killed"])
    def test_an_interval_planned_at_the_same_moment_as_a_progress_window_that_came_first(self, dry, ending):
        dry.produce(0, 10, 70, 130)
        progress = dry.run if ending == "complete" else lambda: dry.killed(fault="close.begin")
        assert ranges(dry.run(0, between=progress)) == [("a", 4, 4)]
        dry.run()
        assert dry.offsets() == {f"{dry.topic}-0": [0, 1, 2, 3]}

    def test_a_progress_window_planned_at_the_same_moment_as_an_interval_that_came_first(self, dry):
        dry.produce(0, 10, 70, 130)
        assert ranges(dry.run(between=dry.attempt(0))) == [("a", 2, 4)]
        assert dry.offsets() == {f"{dry.topic}-0": [0, 1, 2, 3]}

    def test_a_group_that_another_client_has_moved_forward_does_not_move_the_first_progress_window(self, dry):
        dry.produce(0, 10, 70, 80, 130, 140, 150)
        for number in (0, 1):
            dry.run(number)
        with KafkaHook() as hook:
            hook.alter_committed(dry.name, {TopicPartition(dry.topic, 0): 6})
        assert ranges(dry.run()) == [("a", 4, 7)]
        assert dry.offsets() == {f"{dry.topic}-0": [*range(7)]}

    def test_an_interval_before_a_progress_window_that_only_the_group_knows_is_refused(self, dry):
        dry.produce(0, 10, 70, 80, 130)
        for number in (0, 1, None):
            dry.run(number)
        dry.produce(140, 190)
        lost = f"lost-{dry.name}"
        with pytest.raises(IntervalsLost, match="up to window 1, which its ledger does not know"):
            dry.run(2, ledger_topic=lost)
        assert ranges(dry.run(3, ledger_topic=lost)) == [("a", 6, 7)], "it begins behind the group's offset"

    def test_a_progress_window_behind_intervals_of_a_topic_that_was_created_again(self, dry):
        """The position belongs to the old topic, and the intervals to the new one."""
        dry.produce(*range(9))
        dry.run(run_id="before")
        dry.kafka.delete_topic(dry.topic)
        dry.kafka.create_topic(dry.topic, 1)
        dry.produce(70, 80, *range(130, 140))
        assert ranges(dry.run(1, data_loss="skip")) == [("a", 0, 2)]
        assert ranges(dry.run(run_id="after", data_loss="skip")) == [("a", 2, 12)]

    def test_a_progress_window_is_not_planned_past_an_interval_that_is_open(self, dry):
        dry.produce(0, 10, 70, 130)
        dry.run(0)
        dry.killed(1, fault="planned")
        with pytest.raises(IntervalsOpen):
            dry.run()
        dry.run(1)
        dry.run()
        assert dry.offsets() == {f"{dry.topic}-0": [0, 1, 2, 3]}

    @pytest.mark.faults
    def test_an_interval_whose_attempt_was_killed_before_it_gave_way_does_so_in_the_retry(self, dry):
        dry.produce(0, 10, 70, 130)
        dry.killed(0, fault="plan.written", between=dry.attempt())
        assert ranges(dry.run(0)) == [("a", 4, 4)]
        assert dry.offsets() == {f"{dry.topic}-0": [0, 1, 2, 3]}

    @pytest.mark.faults
    def test_a_progress_window_whose_attempt_was_killed_before_it_gave_way_does_so_in_the_retry(self, dry):
        dry.produce(0, 10, 70, 130)
        dry.killed(fault="plan.written", between=dry.attempt(0))
        assert ranges(dry.run()) == [("a", 2, 4)]
        assert dry.offsets() == {f"{dry.topic}-0": [0, 1, 2, 3]}

    @pytest.mark.faults
    def test_a_progress_window_that_came_first_and_was_killed_before_it_looked_keeps_its_offsets(self, dry):
        dry.produce(0, 10, 70, 130)
        dry.killed(fault="plan.written")
        assert ranges(dry.run(0)) == [("a", 4, 4)]
        assert ranges(dry.run()) == [("a", 0, 4)]
        assert dry.offsets() == {f"{dry.topic}-0": [0, 1, 2, 3]}

    def test_a_pipeline_that_continues_with_progress_windows_does_not_forget_its_intervals(self, dry):
        dry.produce(0, 10, 70, 130, 190)
        dry.run()
        dry.produce(200, 260)
        dry.run(3)
        dry.run(4)
        # Its group's offsets now carry a short cut into the ledger.
        assert ranges(dry.run(window="progress", run_id="later")) == [("a", 7, 7)]
        assert dry.offsets() == {f"{dry.topic}-0": [*range(7)]}

    def test_a_pipeline_that_was_forgotten_with_its_group_moves_nothing_again_that_its_sink_has(self, dry):
        def forgotten(**options):
            wait_stable(dry.kafka.connection_extra(), f"ledger-{dry.name}")
            options = {"why": "a test", "ledger_topic": f"ledger-{dry.name}", "group_id": dry.name, **options}
            with KafkaHook() as hook:
                forget(hook, dry.name, **{"delete_group": True, **options})

        run = partial(dry.run, recorded=True)
        dry.produce(0, 10, 70)
        assert ranges(run(starting_offsets=json.dumps({dry.topic: {"0": 1}}))) == [("a", 1, 3)]
        dry.produce(80, 130, 190)
        assert ranges(run(1)) == [("a", 3, 4)]
        forgotten(delete_group=False)
        with pytest.raises(IntervalsLost, match="--delete-group"):
            run(0)
        forgotten()
        # An interval leaves out what windows have moved, and a window what intervals and windows have moved.
        dry.produce(140, 200)
        assert ranges(run(0)) == [("a", 0, 1)], "it was before the first window"
        forgotten()
        assert ranges(run(2)) == [("a", 4, 5)]
        assert ranges(run(run_id="second")) == [("a", 5, 8)]
        dry.produce(205, 250, 260)
        forgotten()
        assert ranges(run(3)) == [("a", 8, 9)]
        assert ranges(run(run_id="third")) == [("a", 9, 11)]
        dry.killed(run_id="fourth", fault="close.begin", recorded=True)
        forgotten(discard_open=True)
        assert dry.offsets() == {f"{dry.topic}-0": [*range(11)]}
        # Without the sink's record, it begins anew.
        dry.moved.unlink()
        assert ranges(run(run_id="fifth")) == [("a", 0, 11)]

    def test_intervals_before_the_first_progress_window_are_moved_or_refused(self, dry):
        dry.produce(0, 10, 70, 80)
        assert ranges(dry.run(starting_offsets="latest")) == [("a", 4, 4)]
        dry.produce(90, 100)
        assert ranges(dry.run(run_id="second")) == [("a", 4, 6)]
        dry.produce(110, 130)
        assert ranges(dry.run(0)) == [("a", 0, 2)]
        # Hour 1 has records on both sides of the progress windows, which one window cannot have.
        with pytest.raises(IntervalCut) as refused:
            dry.run(1)
        assert (refused.value.start, refused.value.began, refused.value.position) == (2, 4, 6)
        assert ranges(dry.run(1, data_loss="skip")) == [("a", 6, 7)]
        assert ranges(dry.run(2)) == [("a", 7, 8)]
        assert dry.offsets() == {f"{dry.topic}-0": [0, 1, 4, 5, 6, 7]}


class TestOverlaps:
    @pytest.mark.faults
    def test_an_interval_that_overlaps_and_whose_attempt_was_killed_before_it_withdrew_does_so_in_the_retry(self, dry):
        dry.produce(0, 10, 70, 130)
        dry.killed(0, length=2, fault="plan.written", between=dry.attempt(0))
        with pytest.raises(IntervalOverlaps):
            dry.run(0, length=2)
        assert dry.run(1)["records_read"] == 1, "it was withdrawn"
        assert dry.offsets() == {f"{dry.topic}-0": [0, 1, 2]}

    def test_one_that_came_first_is_kept_by_its_retry_though_another_one_was_planned_since(self, dry):
        dry.produce(0, 10, 70, 130)
        dry.killed(0, length=2, fault="plan.written")
        with pytest.raises(IntervalOverlaps):
            dry.run(0)
        assert dry.run(0, length=2)["records_read"] == 3
        assert dry.offsets() == {f"{dry.topic}-0": [0, 1, 2]}


def test_a_time_that_the_schedule_leaves_out_is_named_and_a_run_by_hand_moves_its_records(dry, caplog):
    """In local time, intervals of 24 hours overlap when summer time begins, and leave an hour out when it ends."""
    dry.produce(0, 70, 130, 190, 250)
    for number in (0, 1, 3):
        dry.run(number)
    named = [record.getMessage() for record in caplog.records if "No interval of pipeline" in record.getMessage()]
    assert len(named) == 1 and str(Interval(*hour(2))) in named[0]
    assert dry.committed() == {f"{dry.topic}-0": 2}
    with pytest.raises(IntervalOverlaps, match="trigger a run by hand with the data interval that is left"):
        dry.run(2, length=2)
    dry.run(2)
    assert dry.offsets() == {f"{dry.topic}-0": [0, 1, 2, 3]}
    assert dry.committed() == {f"{dry.topic}-0": 4}


def test_a_backfill_of_records_that_retention_has_removed_fails_or_reports_the_gap_and_the_group_passes_over_it(dry):
    dry.produce(0, 10, 70, 80, 130, 190)
    with KafkaHook("kafka_default") as hook:
        hook.delete_records({TopicPartition(dry.topic, 0): 3})
    for number in (0, 1):
        with pytest.raises(BeginningDeleted):
            dry.run(number)
    report = dry.run(0, data_loss="skip")
    assert (ranges(report), report["gaps"]) == ([("a", 3, 3)], [{"topic": dry.topic, "partition": 0, "start": 0, "end": 3}])
    dry.run(1, data_loss="skip")
    dry.run(2)
    assert dry.offsets() == {f"{dry.topic}-0": [3, 4]}
    assert dry.committed() == {f"{dry.topic}-0": 5}


class TestALedgerThatIsLost:
    @pytest.fixture
    def lost(self, dry):
        """Two hours were moved, and the end of the second was decided before two more records came, the first of them late."""
        dry.produce(0, 30, 70)
        assert [dry.run(number)["records_read"] for number in (0, 1)] == [2, 1]
        dry.produce(100, 130)
        dry.kafka.delete_topic(f"ledger-{dry.name}")
        return dry

    def test_the_next_interval_begins_where_the_group_stands_whatever_its_boundary_is_now(self, lost):
        assert ranges(lost.run(2)) == [("a", 3, 5)]
        assert lost.offsets() == {f"{lost.topic}-0": [*range(5)]}
        assert lost.committed() == {f"{lost.topic}-0": 5}

    @pytest.mark.parametrize(("number", "length"), [(0, 1), (0, 3), (1, 2)])
    def test_an_interval_before_the_group_is_refused(self, lost, number, length):
        with pytest.raises(IntervalsLost) as refused:
            lost.run(number, length=length)
        error = refused.value
        assert (error.group_id, error.offset, error.start) == (lost.name, 3, 2 * (number > 0))
        assert error.named == Interval(*hour(1))
        assert lost.offsets() == {f"{lost.topic}-0": [*range(3)]}
