"""The beginning of the next window if the ledger is lost: from the sink's record, and from the group for topics that are not in
it.
"""

from __future__ import annotations

import json
from dataclasses import replace

from airflow_kafka_spark.hooks.kafka.requests import CommittedOffset
from airflow_kafka_spark.ledger.beginning import decide_beginning
from airflow_kafka_spark.windows.changes import Change, Forgotten
from airflow_kafka_spark.windows.memory import Memory, fold_records, make_change_record
from airflow_kafka_spark.windows.model import Applied, OffsetRange, TopicPartition
from airflow_kafka_spark.windows.plan import Log, PartitionLog, Position, plan_ranges

READ, LEFT_OUT = TopicPartition("read", 0), TopicPartition("left-out", 0)


def test_a_topic_that_the_sinks_last_window_has_left_out_continues_at_the_offset_of_the_group():
    """The topic's earlier records are in the sink, from windows before the last one. Only the lost ledger had that fact."""

    def begins(pipeline: str) -> dict[TopicPartition, int]:
        metadata = json.dumps({"pipeline": pipeline, "window": "0000000003", "topic_id": "L"})
        committed = {READ: CommittedOffset(20, ""), LEFT_OUT: CommittedOffset(50, metadata)}
        found = decide_beginning(Memory("p"), log, committed, group_id="g", ledger_topic="ledger", last_applied=lambda name: last)
        assert (found.decided_by, found.last_number) == ("sink", 7)
        planned = plan_ranges(log, found.position, ["left-out", "read"])
        return {r.topic_partition: r.start for r in planned.ranges}

    last = Applied("p", 7, (OffsetRange("read", 0, 10, 20),), 10, cluster_id="c", topic_ids={"read": "R"})
    ends = {READ: PartitionLog(0, 30, 30), LEFT_OUT: PartitionLog(0, 60, 60)}
    log = Log("c", {"read": "R", "left-out": "L"}, ends)
    assert begins("p") == {READ: 20, LEFT_OUT: 50}
    assert begins("another") == {READ: 20, LEFT_OUT: 0}, "what another pipeline has committed is no past of this one"


def test_windows_that_have_gone_elsewhere_since_the_last_one_in_the_sink_are_not_moved_again():
    """The sink is one of several (a templated path): the group names a later window than its record."""
    last = Applied("p", 1, (OffsetRange("read", 0, 0, 10),), 10, cluster_id="c", topic_ids={"read": "R"})
    log = Log("c", {"read": "R"}, {READ: PartitionLog(0, 40, 40)})
    for window, offset, begins in ((3, 30, 30), (3, 5, 10), (1, 10, 10)):
        metadata = json.dumps({"pipeline": "p", "window": f"{window:010d}", "topic_id": "R"})
        committed = {READ: CommittedOffset(offset, metadata)}
        found = decide_beginning(Memory("p"), log, committed, group_id="g", ledger_topic="ledger", last_applied=lambda name: last)
        assert (found.decided_by, found.last_number, found.position.offsets) == ("sink", window, {READ: begins})
    # Data intervals that the pipeline has moved since have no number.
    metadata = json.dumps({"pipeline": "p", "window": "20260101T000000Z-20260101T010000Z", "topic_id": "R"})
    committed = {READ: CommittedOffset(30, metadata)}
    found = decide_beginning(Memory("p"), log, committed, group_id="g", ledger_topic="ledger", last_applied=lambda name: last)
    assert (found.last_number, found.position.offsets) == (1, {READ: 30})


def test_a_pipeline_that_was_forgotten_begins_behind_its_windows_and_its_intervals_with_their_leader_epochs():
    """As long as the sink has a window, or the last interval. A topic that was created again since is not read from there."""

    def begins(has: str, topic_id: str = "R") -> tuple[str, dict[TopicPartition, int], dict[TopicPartition, int], bool]:
        log = Log("c", {"read": topic_id}, {READ: PartitionLog(0, 90, 90)})
        applied = {name: replace(last, pipeline=name) for name in ("p", f"p.{hour}") if name == has}
        found = decide_beginning(
            forgotten, log, {}, group_id="g", ledger_topic="ledger", last_applied=applied.get, data_loss="skip"
        )
        position = found.position
        return found.decided_by, dict(position.offsets), dict(position.epochs), found.is_beyond_sink

    hour = "20260101T000000Z-20260101T010000Z"
    last = Applied("p", 7, (OffsetRange("read", 0, 10, 20),), 10, cluster_id="c", topic_ids={"read": "R"})
    windows = Position({READ: 20}, {"read": "R"}, epochs={READ: 3})
    for end, epoch, is_beyond in ((60, 5, True), (15, 3, False)):
        moved = Forgotten(windows, Position({READ: end}, {"read": "R"}, epochs={READ: 5}), hour)
        change = Change(1, "forget", "ann", "why", "2026-01-02", window=7, forgotten=moved)
        record = make_change_record("p", change)
        forgotten = fold_records("p", [record])
        assert forgotten.forgotten == change
        assert begins("p") == ("sink", {READ: max(end, 20)}, {READ: epoch}, is_beyond)
        assert begins(f"p.{hour}") == ("sink", {READ: end}, {READ: 5}, False)
        assert begins("another") == ("starting_offsets", {}, {}, False)
    assert begins(f"p.{hour}", "S") == ("sink", {READ: 15}, {READ: 5}, False), "the position is of the old topic"
