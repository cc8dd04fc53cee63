"""Publishing a split without Spark: partitions, headers, times, topics, refusals, and the marker that makes it happen once."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pyarrow as pa
import pytest
from confluent_kafka import KafkaException, Producer

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import (
    Fenced,
    KafkaRefused,
    KafkaSparkError,
    KafkaUnavailable,
    RowRejected,
    RowsCutOff,
    TopicMissing,
    TransactionTimedOut,
)
from airflow_kafka_spark.formats.base import END
from airflow_kafka_spark.hooks.kafka.client import ClientEvents
from airflow_kafka_spark.hooks.kafka.partitioner import choose_partition
from airflow_kafka_spark.hooks.kafka.transactions import find_fatal_error, is_fatal, is_fenced, make_fencing_producer
from airflow_kafka_spark.jobs.tasks.publish import SortedRecords, Sorting
from airflow_kafka_spark.ledger.attempt import Ledger, format_utc_now
from airflow_kafka_spark.sinks.kafka.sink import KafkaSink, limit_batches
from airflow_kafka_spark.sinks.kafka.tasks import send
from airflow_kafka_spark.sinks.kafka.tasks.publish import PRODUCER, Publisher, RecordBatches
from airflow_kafka_spark.windows.codec import marker_to_json
from airflow_kafka_spark.windows.model import SourcePlan, TopicPartition, Window
from tests.support.clients import open_hook
from tests.support.oracle import committed_messages
from tests.support.quotas import quotas
from tests.support.waiting import settled

PARTITIONS = 4


@pytest.fixture
def hook(kafka):
    with open_hook(kafka) as hook:
        yield hook


@pytest.fixture
def topic(kafka, unique):
    name = unique("published")
    kafka.create_topic(name, PARTITIONS)
    return name


@pytest.fixture
def ledger(hook, unique):
    name = unique("ledger")
    made = Ledger(hook, unique("pipe"), "dag/run1/task", topic=name)
    with made:
        window = Window(made.pipeline, 1, (), "dag/run1/task", format_utc_now(), source=SourcePlan(({"n": 0}, {"n": 1})))
        made.plan(window)
        yield made


@pytest.fixture
def publisher(hook, ledger, topic):
    return Publisher(
        config=hook.make_producer_config(),
        reading=hook.make_consumer_config(),
        ledger=ledger.ledger_claim,
        prefix=ledger.split_prefix,
        topic=topic,
        partitions={topic: PARTITIONS},
        transaction_timeout=60,
    )


@pytest.fixture(params=["as columns", "one by one"])
def way(request, monkeypatch):
    """Both ways in which a sender queues rows. Releases of the client that were not tried take them one by one."""
    if request.param == "one by one":
        monkeypatch.setattr(send, "find_obstacle", lambda: "it was not tried")


def batch(count: int, start: int = 0, **columns: pa.Array) -> pa.RecordBatch:
    keys = [str(n).encode() for n in range(start, start + count)]
    given = {"key": pa.array(keys, pa.binary()), "value": pa.array([b"v" + k for k in keys], pa.binary()), **columns}
    return pa.RecordBatch.from_pydict(given)


def records(kafka, topic):
    """Return committed records, in order of partition and offset."""
    found = committed_messages(kafka.connection_extra(), topic)
    return sorted(found, key=lambda m: (m.partition(), m.offset()))


def test_each_row_is_one_record_and_the_marker_holds_their_offsets(kafka, publisher, topic, way):
    marker = publisher.publish(0, RecordBatches(iter([batch(25_000), batch(5, 25_000)])))
    found = records(kafka, topic)
    assert {m.key(): m.value() for m in found} == {str(n).encode(): b"v%d" % n for n in range(25_005)}
    assert len(found) == marker.records == 25_005
    assert marker.bytes == sum(len(m.key()) + len(m.value()) for m in found)
    for part in marker.landed:
        offsets = [m.offset() for m in found if m.partition() == part.partition]
        assert (part.first, part.last, part.records) == (offsets[0], offsets[-1], len(offsets))


def test_a_split_that_is_published_is_not_published_again(kafka, publisher, topic):
    marker = publisher.publish(0, RecordBatches(iter([batch(100)])))
    assert publisher.publish(0, RecordBatches(iter([batch(100, 1000)]))) == marker
    assert len(records(kafka, topic)) == 100
    publisher.publish(1, RecordBatches(iter([batch(10, 2000)])))
    assert len(records(kafka, topic)) == 110


def test_a_split_without_rows_is_published_too(kafka, publisher, topic):
    assert publisher.publish(0, RecordBatches(iter([]))).records == 0
    assert publisher.publish(0, RecordBatches(iter([batch(5)]))).records == 0
    assert records(kafka, topic) == []


def test_a_transaction_that_is_longer_than_the_brokers_allow_is_named_with_both_remedies(publisher):
    """Validation finds it only if the user may see the brokers' settings. Their default is 900 s."""
    said = "1000 s, which is more .* `transaction.max.timeout.ms` .* or lower the sink's `transaction_timeout`"
    with pytest.raises(KafkaRefused, match=said):
        replace(publisher, transaction_timeout=1_000).publish(0, RecordBatches(iter([batch(1)])))


def test_a_task_of_an_attempt_that_was_taken_over_publishes_nothing(kafka, hook, ledger, publisher, topic):
    with Ledger(hook, ledger.pipeline, "dag/run1/task", topic=ledger.topic.name) as newer:
        newer.reopen(newer.memory.open_entry)
        with pytest.raises(Fenced):
            publisher.publish(0, RecordBatches(iter([batch(100)])))
        newer.read_published()
        newer.close({}, {})
    with pytest.raises(Fenced):
        publisher.publish(0, RecordBatches(iter([batch(100)])))
    assert records(kafka, topic) == []


def test_a_task_that_is_fenced_in_the_middle_takes_the_marker_of_the_one_that_fenced_it(kafka, publisher, topic):
    """Spark's speculation: the same split twice at once."""

    def rows():
        yield batch(100)
        assert publisher.publish(0, RecordBatches(iter([batch(100)]))).records == 100
        yield batch(100, 100)

    assert publisher.publish(0, RecordBatches(rows())).records == 100
    assert len(records(kafka, topic)) == 100


def test_the_error_of_a_fenced_producer_is_found_when_the_client_has_lost_it(kafka, topic, unique):
    config, id = {**PRODUCER, **kafka.connection_extra()}, unique("id")
    older = make_fencing_producer(config, id, 30, ClientEvents())
    older.begin_transaction()
    make_fencing_producer(config, id, 30, ClientEvents())
    older.produce(topic, b"late", partition=0)
    with pytest.raises(KafkaException):
        older.flush(60)
    lost = SystemError("<method 'flush' of 'cimpl.Producer' objects> returned NULL without setting an exception")
    assert is_fatal(lost) and not is_fenced(lost, ClientEvents())
    assert is_fenced(find_fatal_error(older, lost), ClientEvents())


def test_keys_are_placed_as_the_java_client_places_them(kafka, publisher, topic, unique):
    """librdkafka's murmur2 partitioner is Java's, and decides on its own."""
    keys = [unique("key").encode() * (n % 7) + bytes([n % 256]) for n in range(500)]
    other = unique("oracle")
    kafka.create_topic(other, PARTITIONS)
    oracle = Producer({**kafka.connection_extra(), "partitioner": "murmur2"})
    for key in keys:
        oracle.produce(other, b"", key)
    oracle.flush(60)
    publisher.publish(0, RecordBatches(iter([batch(500, key=pa.array(keys, pa.binary()))])))
    expected, found = ({m.key(): m.partition() for m in records(kafka, name)} for name in (other, topic))
    assert found == expected and len(set(found.values())) == PARTITIONS


def test_records_without_a_key_go_round(kafka, publisher, topic):
    publisher.publish(0, RecordBatches(iter([batch(10, key=pa.nulls(10, pa.binary())) for _ in range(PARTITIONS)])))
    found = records(kafka, topic)
    assert len(found) == 40 and {m.partition() for m in found} == set(range(PARTITIONS))
    assert all(m.key() is None for m in found)


def test_headers_and_timestamps_are_those_of_the_columns(kafka, publisher, topic):
    pairs = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    headers = pa.array([[{"key": "a", "value": b"1"}, {"key": "b", "value": b""}], [], None], pairs)
    publisher.publish(
        0, RecordBatches(iter([batch(3, headers=headers, timestamp=pa.array([1_750_000_000_123, 5, None], pa.int64()))]))
    )
    found = {m.key(): m for m in records(kafka, topic)}
    assert found[b"0"].headers() == [("a", b"1"), ("b", b"")]
    assert found[b"1"].headers() is None and found[b"2"].headers() is None
    assert found[b"0"].timestamp()[1] == 1_750_000_000_123 and found[b"1"].timestamp()[1] == 5
    assert found[b"2"].timestamp()[1] > 1_700_000_000_000


def test_a_partition_column_decides_and_null_leaves_it_to_the_key(kafka, publisher, topic):
    column = pa.array([n % PARTITIONS for n in range(50)] + [None] * 50, pa.int32())
    publisher.publish(0, RecordBatches(iter([batch(100, partition=column)])))
    found = {int(m.key()): m.partition() for m in records(kafka, topic)}
    assert [found[n] for n in range(50)] == [n % PARTITIONS for n in range(50)]
    assert [found[n] for n in range(50, 100)] == [choose_partition(str(n).encode(), PARTITIONS) for n in range(50, 100)]


def test_rows_of_many_batches_keep_their_order_in_each_partition(kafka, publisher, topic, way):
    times = pa.array(range(1_750_000_000_000, 1_750_000_003_000), pa.int64())
    publisher.publish(0, RecordBatches(iter([batch(3000), batch(1, 3000), batch(2, 3001), batch(3000, 3003, timestamp=times)])))
    found = records(kafka, topic)
    for partition in range(PARTITIONS):
        keys = [int(m.key()) for m in found if m.partition() == partition]
        assert keys == sorted(keys)
    assert sorted(int(m.key()) for m in found) == list(range(6003))
    stamps = {int(m.key()): m.timestamp()[1] for m in found}
    assert [stamps[n] for n in range(3003, 6003)] == times.to_pylist()


def test_a_queue_that_is_smaller_than_a_batch_loses_doubles_and_moves_no_row(kafka, publisher, topic, way):
    small = replace(publisher, config={**publisher.config, "queue.buffering.max.messages": 300})
    assert small.publish(0, RecordBatches(iter([batch(5000), batch(5000, 5000)]))).records == 10_000
    found = records(kafka, topic)
    assert sorted(int(m.key()) for m in found) == list(range(10_000))
    for partition in range(PARTITIONS):
        keys = [int(m.key()) for m in found if m.partition() == partition]
        assert keys == sorted(keys)


def test_a_topic_column_decides(kafka, publisher, topic, unique):
    other = unique("other")
    kafka.create_topic(other, 2)
    names = pa.array([topic if n % 3 else other for n in range(90)])
    marker = replace(publisher, topic=None).publish(0, RecordBatches(iter([batch(90, topic=names)])))
    assert (len(records(kafka, topic)), len(records(kafka, other))) == (60, 30)
    assert {part.topic for part in marker.landed} == {topic, other}


@pytest.mark.parametrize(
    "columns, error, match",
    [
        ({"partition": pa.array([0, 1, 9], pa.int32())}, RowRejected, "Row 3 .*partition 9.*0 to 3"),
        ({"topic": pa.array(["{topic}", None, "{topic}"])}, RowRejected, "topic is null"),
        ({"topic": pa.array(["{topic}", "nowhere-at-all", "{topic}"])}, TopicMissing, "nowhere-at-all"),
        ({"timestamp": pa.array([-2, None, 0], pa.int64())}, RowRejected, "Row 3 .*first millisecond of 1970"),
        ({"timestamp": pa.array([1, -1, 0], pa.int64())}, RowRejected, "Row 2 .*last millisecond of 1969"),
        ({"partition": pa.array([0, 1 << 32, 1], pa.int64())}, RowRejected, "Row 2 .*partition 4294967296.*0 to 3"),
        ({"value": pa.array([b"x", b"y" * 2_000_000, b"z"], pa.binary())}, RowRejected, "Row 2 .*message.max.bytes"),
    ],
)
def test_a_row_that_cannot_be_a_record_is_named_and_nothing_of_its_split_is_committed(
    kafka, hook, publisher, topic, columns, error, match, way
):
    if "topic" in columns:
        columns = {"topic": pa.array([name and name.format(topic=topic) for name in columns["topic"].to_pylist()])}
    with pytest.raises(error, match=match):
        publisher.publish(0, RecordBatches(iter([batch(3, **columns)])))
    assert records(kafka, topic) == []
    # What was aborted lies behind no open transaction, and the split can still be published.
    settled(topic)
    assert publisher.publish(0, RecordBatches(iter([batch(3)]))).records == 3


@pytest.mark.parametrize(
    "config, said",
    [
        ({"max.message.bytes": "1500"}, "max.message.bytes.*\\(row 1 is the largest: 3,001 bytes\\)"),
        ({"message.timestamp.before.max.ms": "1000"}, "before.max.ms"),
        ({"cleanup.policy": "compact"}, "keys where it is compacted \\(row 2 is the first without one\\)"),
    ],
)
def test_a_record_that_its_topic_does_not_take_is_no_fault_of_the_brokers_and_nothing_is_committed(
    kafka, hook, publisher, unique, config, said
):
    """A retry alone does not help, so the error does not recommend one. Random bytes, because batches are compressed."""
    strict = unique("strict")
    kafka.create_topic(strict, 1, config=config)
    rows = batch(
        3,
        key=pa.array([b"k", None, None], pa.binary()),
        value=pa.array([os.urandom(3000)] * 3, pa.binary()),
        timestamp=pa.array([1_700_000_000_000] * 3),
    )
    publisher = replace(publisher, topic=strict, partitions={strict: 1}, conn_id="kafka_here")
    with pytest.raises(KafkaRefused, match=f"kafka_here.*sending rows to topic `{strict}`.*{said}"):
        publisher.publish(0, RecordBatches(iter([rows])))
    assert records(kafka, strict) == []


def test_a_refused_record_ends_the_split_at_once_although_others_wait_behind_it(kafka, hook, publisher, unique, way):
    """Only the first and the last record of a partition are watched."""
    strict = unique("strict")
    kafka.create_topic(strict, 1, config={"max.message.bytes": "2000"})
    values = [b"small"] * 50 + [os.urandom(5000)] + [b"small"] * 50
    publisher = replace(publisher, topic=strict, partitions={strict: 1}, transaction_timeout=30)
    publisher = replace(publisher, config=limit_batches(publisher.config, hook, strict))
    said = f"sending rows to topic `{strict}`.*max.message.bytes.*row 51 is the largest"
    with pytest.raises(KafkaRefused, match=said):
        publisher.publish(0, RecordBatches(iter([batch(101, value=pa.array(values, pa.binary()))])))
    settled(strict)
    assert records(kafka, strict) == []


def test_topics_take_what_their_limits_allow_however_large_batches_and_the_marker_are(kafka, hook, publisher, unique):
    small, large = unique("small"), unique("large")
    kafka.create_topic(small, 60, config={"max.message.bytes": "2000"})
    kafka.create_topic(large, 1, config={"max.message.bytes": "3000000"})
    names, values = [small] * 1200 + [large], [os.urandom(200) for _ in range(1200)] + [os.urandom(2_000_000)]
    rows = batch(1201, topic=pa.array(names), value=pa.array(values, pa.binary()))
    config = KafkaSink(topic_column="topic").make_producer_config(hook)
    # Only tasks know the topics of a column, so that users may have to limit batches.
    with pytest.raises(KafkaRefused, match=f"topic `{small}`.*204 bytes.. If it takes that, lower the producer's `batch.size`"):
        replace(publisher, config=config, topic=None, partitions={}).publish(0, RecordBatches(iter([rows])))
    limited = replace(publisher, config=limit_batches(config, hook, small), topic=None, partitions={})
    assert len(json.dumps(marker_to_json(limited.publish(0, RecordBatches(iter([rows])))))) > 2000
    assert len(records(kafka, small)) == 1200 and len(records(kafka, large)) == 1


def test_a_topic_that_is_deleted_while_it_is_written_is_named(kafka, publisher, topic):
    def deleting():
        yield batch(10)
        kafka.delete_topic(topic)
        yield batch(10)

    with pytest.raises(KafkaUnavailable, match=f"topic `{topic}`: Broker: Unknown topic"):
        replace(publisher, transaction_timeout=3).publish(0, RecordBatches(deleting()))


@pytest.mark.parametrize("timestamps", [False, True], ids=["as columns", "one by one"])
def test_a_split_that_a_quota_delays_for_longer_than_its_transaction_may_take_names_the_quota(
    kafka, publisher, topic, unique, timestamps
):
    """Records that are sent as columns are awaited by the transaction, others also by their callbacks."""
    client = unique("client")
    values = pa.array([os.urandom(1000) for _ in range(1000)], pa.binary())
    columns = {"timestamp": pa.array([1_750_000_000_000] * 1000, pa.int64())} if timestamps else {}
    throttled = replace(publisher, config={**publisher.config, "client.id": client, "batch.size": 20_000}, transaction_timeout=4)
    with (
        quotas(kafka, client, producer_byte_rate=10_000),
        pytest.raises(KafkaSparkError, match="because of a quota of") as failure,
    ):
        throttled.publish(0, RecordBatches(iter([batch(1000, value=values, **columns)])))
    assert isinstance(failure.value, (KafkaUnavailable, TransactionTimedOut))
    assert "`transaction_timeout`" in failure.value.action
    settled(topic)
    assert records(kafka, topic) == []
    assert throttled.publish(0, RecordBatches(iter([batch(1000, value=values, **columns)]))).records == 1000


def test_a_marker_that_was_never_committed_does_not_count(kafka, publisher, topic, monkeypatch):
    """A task dies with its records and its marker sent; Spark runs it again within the same attempt."""

    def dies(point):
        if point == "publish.marked":
            raise ZeroDivisionError

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(faults, "reached", dies)
        publisher.publish(0, RecordBatches(iter([batch(100)])))
    assert publisher.publish(0, RecordBatches(iter([batch(100)]))).records == 100
    assert len(records(kafka, topic)) == 100


def test_a_split_whose_account_does_not_arrive_is_not_published(kafka, publisher, topic):
    """The last row, with the account of the reading stage, is missing: that stage has failed in the middle."""
    rows = batch(100, **{END: pa.nulls(100, pa.string())})
    with pytest.raises(RowsCutOff):
        publisher.publish(0, RecordBatches(iter([rows])))
    assert records(kafka, topic) == []


def test_a_split_of_which_nothing_arrives_is_not_published(kafka, publisher, topic):
    """A filter lets the account pass, so no rows at all are no empty split."""
    with pytest.raises(RowsCutOff):
        publisher.publish(0, SortedRecords(iter([]), index=0, topic_partition=TopicPartition("orders", 0), sorting=Sorting()))
