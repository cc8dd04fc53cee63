"""A topic loses records between two attempts at a window, by compaction or by retention. Committed records stay in the sink and
keep their counts; all other records are moved as they are in the topic now.
"""

from __future__ import annotations

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from airflow_kafka_spark.errors import ValidationError
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.sinks import FilesSink
from airflow_kafka_spark.transforms import Condition, Filter
from tests.support.compacting import PARTITIONS, RECORDS, compact, send
from tests.support.control import skip
from tests.support.oracle import same_multiset
from tests.support.pipelines import files_rows, order, row_of
from tests.support.relay import relay
from tests.support.waiting import fence_tasks, settled


def produce(flow, first=0):
    send(flow.kafka.connection_extra(), flow.topic, first)


def compacted(flow, rounds=1):
    compact(flow.kafka.connection_extra(), flow.topic, lambda: len(flow.events()), rounds)


def by_place(flow):
    """Return the topic's records by partition and offset."""
    return {(partition, offset): row_of(value) for partition, offset, _, value in flow.events()}


def died_between_splits(flow):
    """Attempt 1, which dies when its first split is committed. Return the offsets of the records that are then in the table."""
    victim = flow.victim("run1", fault="split.flushed")
    assert victim.wait() != 0 and victim.fired, victim.tail()
    query = "SELECT partition, start_offset, end_offset FROM airflow_window_splits WHERE pipeline = %s AND number > 0"
    with flow.postgres.connect(autocommit=True) as connection:
        found = connection.execute(query, (flow.name,)).fetchall()
    there = {(partition, offset) for partition, start, end in found for offset in range(start, end)}
    assert 0 < len(there) < len(flow.events())
    assert len(flow.rows()) == len(there)
    return there


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["postgres-split"])
def test_splits_that_were_committed_before_a_compaction_stay_and_count_as_they_did(flow, kind):
    flow.options["split_records"] = 10
    produce(flow)
    before = by_place(flow)
    there = died_between_splits(flow)
    compacted(flow)
    now = by_place(flow)
    report = flow.run("run1")
    window = {place: row for place, row in before.items() if place in there or place in now}
    assert same_multiset(window.values(), flow.rows()) == len(window) < len(before)
    removed = len(there - now.keys())
    assert removed and (report["attempts"], report["records_removed"]) == (2, removed)
    assert report["records_read"] == report["records_written"] == len(window)
    assert flow.committed() == dict.fromkeys(range(PARTITIONS), RECORDS)
    assert flow.run("run1") == report
    assert flow.run("run2")["records_read"] == PARTITIONS, "those that came last"
    assert len(flow.rows()) == len(window) + PARTITIONS


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["postgres-split"])
def test_records_of_committed_splits_that_retention_deletes_are_no_gap(flow, kind):
    flow.options |= {"split_records": 10, "data_loss": "skip"}
    flow.produce(120)
    before = by_place(flow)
    there = died_between_splits(flow)
    # The first split of the table, and half of the next split.
    partition, start = min(there)
    low = min(start + 15, sum(p == partition for p, _ in before))
    place = TopicPartition(flow.topic, partition, low)
    admin = AdminClient(flow.kafka.connection_extra())
    admin.delete_records([place])[place].result(60)
    deleted = {(p, offset) for p, offset in before if p == partition and offset < low}
    report = flow.run("run1")
    window = {place: row for place, row in before.items() if place not in deleted - there}
    assert same_multiset(window.values(), flow.rows()) == report["records_read"] == len(window)
    assert report["records_removed"] == len(deleted & there)
    gaps = {(g["partition"], offset) for g in report["gaps"] for offset in range(g["start"], g["end"])}
    assert gaps == deleted - there


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["files"])
def test_a_window_that_is_taken_whole_is_read_again_after_a_compaction_and_so_is_its_replay(flow, kind):
    flow.options["on_rerun"] = "replay"
    produce(flow)
    first = by_place(flow)
    assert flow.run("run1")["records_read"] == len(first)
    produce(flow, first=PARTITIONS * RECORDS)
    victim = flow.victim("run2", fault="job.done")
    assert victim.wait() == -9 and victim.fired, victim.tail()
    compacted(flow, rounds=2)
    parts = [[], [], []]
    for (_, offset), row in by_place(flow).items():
        parts[offset // RECORDS].append(row)
    report = flow.run("run2")
    assert report["records_read"] == len(parts[1]) < PARTITIONS * RECORDS and "records_removed" not in report
    assert same_multiset([*first.values(), *parts[1]], flow.rows())
    replayed = flow.run("run1", facts={"max_tries": 1})
    assert (replayed["replay"], replayed["records_read"]) == (1, len(parts[0]))
    assert same_multiset([*parts[0], *parts[1]], flow.rows())


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["files"])
def test_where_another_sink_has_records_that_compaction_removed_the_error_names_the_command_that_continues(flow, kind, tmp_path):
    """The ledger holds only their digest, which does not show whether the transforms were changed, too."""
    other = FilesSink(path=str(tmp_path / "other"))
    flow.options["transforms"] = [Filter(predicate=Condition("id % 5 = 0"), to=other)]
    produce(flow)
    victim = flow.victim("run1", fault="sink.committed")
    assert victim.wait() == -9 and victim.fired, victim.tail()
    taken = files_rows(other.path)
    compacted(flow)
    with pytest.raises(ValidationError, match=f"compaction of {flow.topic} has removed.*skip {flow.name} --not-running"):
        flow.run("run1")
    with KafkaHook() as hook:
        options = {"group_id": flow.name, "ledger_topic": f"ledger-{flow.name}"}
        skip(hook, flow.name, running=False, why="compacted", who="ann", **options)
    assert flow.run("run2")["records_read"] == PARTITIONS
    assert same_multiset([*taken, row_of(order(10_000))], files_rows(other.path)) and len(flow.rows()) == PARTITIONS - 1


@pytest.mark.faults
def test_partitions_that_were_published_before_a_compaction_are_not_read_again(kafka, unique, tmp_path):
    with relay(kafka, unique, tmp_path) as made:
        send(kafka.connection_extra(), made.topic)
        before = made.read(made.topic)
        victim = made.victim("run1", fault="publish.committed")
        assert victim.wait() != 0 and victim.fired, victim.tail()
        fence_tasks(made.name, made.arguments["ledger_topic"], PARTITIONS)
        settled(made.output)
        there = {record.value for record in made.read(made.output)}
        assert there, "nothing was published before the kill"
        compact(kafka.connection_extra(), made.topic, lambda: len(made.read(made.topic)))
        left = {(record.partition, record.offset) for record in made.read(made.topic)}
        report = made.run("run1")
        settled(made.output)
        expected = [r for r in before if r.value in there or (r.partition, r.offset) in left]
        compared = same_multiset([r.content for r in expected], [r.content for r in made.read(made.output)])
        # On a slow machine all partitions may be published before Spark notices that a worker is dead.
        assert compared < len(before) or len(there) == len(before)
        assert report["records_read"] == report["records_written"] == len(expected)
        assert made.run("run2")["records_read"] == PARTITIONS
