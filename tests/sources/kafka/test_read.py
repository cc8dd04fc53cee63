"""Reading one frozen range on a real broker: exactly its committed records, with markers and aborted records between and after
them.
"""

from __future__ import annotations

import ctypes
import os

import pytest
from confluent_kafka import Producer, cimpl

from airflow_kafka_spark.errors import DataLoss, HeaderNameInvalid, KafkaUnavailable, LogCorrupt, OffsetsWentBack
from airflow_kafka_spark.hooks.kafka import config as kafka_config
from airflow_kafka_spark.sources.kafka.tasks import read as task_reader
from airflow_kafka_spark.sources.kafka.tasks.read import KafkaSplitReader
from airflow_kafka_spark.windows.model import Gap, OffsetRange, TopicPartition
from tests.support.clients import open_hook
from tests.support.oracle import wait_stable
from tests.support.quotas import quotas


@pytest.fixture
def topic(kafka, unique):
    name = unique("reader")
    kafka.create_topic(name, 1)
    return name


@pytest.fixture
def config(kafka):
    return kafka_config.make_consumer_config(kafka.connection_extra())


@pytest.fixture
def hook(kafka):
    with open_hook(kafka, "kafka_reader") as hook:
        yield hook


def produce(kafka, topic, values, *, end=None, unique=None):
    """Produce plain records, or one transaction that ends with ``commit``, ``abort`` or stays open (None with ``unique``)."""
    producer = Producer({**kafka.connection_extra(), **({"transactional.id": unique("txn")} if unique else {})})
    if unique:
        producer.init_transactions(60)
        producer.begin_transaction()
    for value in values:
        producer.produce(topic, value, b"key", 0)
    producer.flush(60)
    if end:
        getattr(producer, f"{end}_transaction")(30)
        # Brokers answer before the marker is in the log, and what comes next would come before it.
        assert wait_stable(kafka.connection_extra(), topic)
    return producer


def read(config, topic, start, end, **options):
    reader = KafkaSplitReader(config, OffsetRange(topic, 0, start, end), **options)
    batches = list(reader)
    offsets = [o for b in batches for o in b.offsets.to_pylist()]
    assert offsets == sorted(set(offsets))
    return [v for b in batches for v in b.values], offsets, reader


def test_exactly_the_range_is_read_in_offset_order(kafka, config, topic):
    produce(kafka, topic, [b"%d" % i for i in range(100)])
    values, offsets, _ = read(config, topic, 10, 90)
    assert values == [b"%d" % i for i in range(10, 90)]
    assert offsets == list(range(10, 90))


def test_a_range_with_a_marker_between_its_records_is_read_to_its_end_and_not_beyond(kafka, config, topic, unique):
    """The range has fewer records than offsets: the client also returns a record after the range."""
    produce(kafka, topic, [b"%d" % i for i in range(5)], end="commit", unique=unique)
    produce(kafka, topic, [b"%d" % i for i in range(6, 10)])
    values, offsets, _ = read(config, topic, 0, 7)
    assert (values, offsets) == ([b"%d" % i for i in (0, 1, 2, 3, 4, 6)], [0, 1, 2, 3, 4, 6])


def test_records_that_a_disk_has_changed_are_refused(kafka, config, topic):
    for value in (b"before", b"amount=100", b"behind"):
        produce(kafka, topic, [value])
    (log,) = kafka._files.glob(f"**/{topic}-0/*.log")
    content = log.read_bytes()
    with log.open("r+b") as file:
        file.seek(content.index(b"amount=100"))
        file.write(b"amount=900")
    with pytest.raises(LogCorrupt, match=f"{topic}-0 cannot be read at offset 1: .*failed CRC32C check"):
        read(config, topic, 0, 3)


def test_a_header_whose_name_is_not_utf_8_is_refused_with_its_record_and_does_not_matter_where_headers_are_not_read(
    kafka, config, topic
):
    produce(kafka, topic, [b"before"])
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    library = ctypes.CDLL(cimpl.__file__)
    client = ctypes.c_void_p.from_address(id(producer) + object.__basicsize__)
    end, of_topic, of_partition, of_value, of_header = 0, 1, 3, 4, 9  # rd_kafka_vtype_t
    parts = [of_topic, topic.encode(), of_partition, 0, of_value, b"value", ctypes.c_size_t(5)]
    parts += [of_header, b"n\xff", b"x", ctypes.c_ssize_t(1), end]
    assert library.rd_kafka_producev(client, *parts) == 0
    assert producer.flush(30) == 0
    assert read(config, topic, 0, 2)[0] == [b"before", b"value"]
    with pytest.raises(HeaderNameInvalid, match=f"{topic}-0 at offset 1 has a header whose name is not UTF-8"):
        list(KafkaSplitReader(config, OffsetRange(topic, 0, 0, 2), with_headers=True))


def test_an_empty_range_sends_no_request(topic):
    assert list(KafkaSplitReader({"bootstrap.servers": "127.0.0.1:1"}, OffsetRange(topic, 0, 5, 5))) == []


def test_ranges_larger_than_a_batch_come_in_several(kafka, config, topic, monkeypatch):
    monkeypatch.setattr(task_reader, "BATCH_RECORDS", 7)
    produce(kafka, topic, [b"%d" % i for i in range(50)])
    batches = list(KafkaSplitReader(config, OffsetRange(topic, 0, 0, 50)))
    assert [len(b) for b in batches] == [7] * 7 + [1]


def test_large_records_come_in_batches_of_bounded_bytes(kafka, config, topic, monkeypatch):
    monkeypatch.setattr(task_reader, "BATCH_BYTES", 1 << 20)
    monkeypatch.setattr(task_reader, "BATCH_RECORDS", 10)
    produce(kafka, topic, [bytes(300_000)] * 40)
    sizes = [sum(map(len, b.values)) for b in KafkaSplitReader(config, OffsetRange(topic, 0, 0, 40))]
    assert sum(sizes) == 40 * 300_000
    assert max(sizes[1:]) <= (1 << 20) + 300_000, "only the first batch does not know yet how large records are"


def test_aborted_records_are_not_read_and_markers_do_not_stop_it(kafka, config, topic, unique):
    produce(kafka, topic, [b"a"], end="commit", unique=unique)  # 0, marker 1
    produce(kafka, topic, [b"x", b"x"], end="abort", unique=unique)  # 2, 3, marker 4
    produce(kafka, topic, [b"b"], end="commit", unique=unique)  # 5, marker 6
    assert read(config, topic, 0, 7)[:2] == ([b"a", b"b"], [0, 5])
    assert read(config, topic, 1, 5)[:2] == ([], [])  # markers and aborted records alone
    assert read(config, topic, 6, 7)[:2] == ([], [])  # nothing but a marker at the end of the log
    assert read(config, topic, 0, 4)[:2] == ([b"a"], [0])


def test_an_open_transaction_behind_the_end_does_not_matter(kafka, config, topic, unique):
    produce(kafka, topic, [b"a", b"b"])
    producer = produce(kafka, topic, [b"open"], unique=unique)
    assert read(config, topic, 0, 2)[0] == [b"a", b"b"]
    producer.abort_transaction(60)


def test_keys_timestamps_headers_and_tombstones_come_along(kafka, config, topic):
    producer = Producer(kafka.connection_extra())
    producer.produce(topic, None, b"k", 0, timestamp=1_700_000_000_123, headers=[("h", b"1"), ("h", None)])
    producer.produce(topic, b"", None, 0, timestamp=1_700_000_000_124)
    producer.flush(60)
    (batch,) = KafkaSplitReader(config, OffsetRange(topic, 0, 0, 2), with_headers=True)
    assert list(batch.keys) == [b"k", None]
    assert list(batch.values) == [None, b""]
    assert batch.timestamps.to_pylist() == [1_700_000_000_123, 1_700_000_000_124]
    assert list(batch.headers) == [[("h", b"1"), ("h", None)], None]


def test_records_deleted_before_they_are_read_are_an_error(kafka, hook, config, topic):
    produce(kafka, topic, [b"%d" % i for i in range(20)])
    hook.delete_records({TopicPartition(topic, 0): 12})
    with pytest.raises(DataLoss) as caught:
        read(config, topic, 5, 20)
    assert (caught.value.wanted, caught.value.low) == (5, 12)


def test_or_a_gap_that_is_reported(kafka, hook, config, topic):
    produce(kafka, topic, [b"%d" % i for i in range(20)])
    hook.delete_records({TopicPartition(topic, 0): 12})
    values, offsets, reader = read(config, topic, 5, 20, skip_lost=True)
    assert offsets == list(range(12, 20))
    assert reader.gaps == [Gap(topic, 0, 5, 12)]
    values, offsets, reader = read(config, topic, 5, 10, skip_lost=True)
    assert values == []
    assert reader.gaps == [Gap(topic, 0, 5, 10)]


def test_a_log_that_ends_before_the_range_is_an_error_not_a_short_window(kafka, config, topic):
    produce(kafka, topic, [b"a"] * 3)
    with pytest.raises((OffsetsWentBack, KafkaUnavailable)):
        read(config, topic, 0, 9, patience=2.0)


def test_no_broker_is_an_error_after_the_patience(topic):
    config = kafka_config.make_consumer_config({"bootstrap.servers": "127.0.0.1:1"})
    with pytest.raises(KafkaUnavailable, match="nothing came for 2 s"):
        read(config, topic, 0, 9, patience=2.0)


def test_a_quota_that_is_too_small_for_a_batch_is_named_and_a_larger_one_delays_the_records_only(kafka, unique, config, topic):
    """A broker answers with no records while they would exceed the quota, which is compared with the rate of ten seconds."""
    values = [os.urandom(100_000) for _ in range(6)]
    producer = Producer({**kafka.connection_extra(), "linger.ms": 1000, "batch.size": 900_000})
    for value in values:
        producer.produce(topic, value, b"key", 0)
    producer.flush(60)
    config |= {"client.id": unique("client")}
    with quotas(kafka, config["client.id"], consumer_byte_rate=50_000):
        with pytest.raises(
            KafkaUnavailable, match="nothing came for 4 s at offset 0; the brokers delay their answers, because of a"
        ) as failure:
            read(config, topic, 0, 6, patience=4.0)
        assert "Raise `consumer_byte_rate`" in str(failure.value)
    with quotas(kafka, config["client.id"], consumer_byte_rate=70_000):
        assert read(config, topic, 0, 6, patience=60.0)[0] == values
