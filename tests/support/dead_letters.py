"""Bad records among good records, and the check that each record is either in the sink or a dead letter, exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from confluent_kafka import Producer

from airflow_kafka_spark.bad_records.dead_letters import DeadLetterTopic
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.ledger.attempt import Ledger
from airflow_kafka_spark.sinks.kafka.tasks.dead_letters import Envelope, make_dead_letters, to_bytes
from airflow_kafka_spark.windows.dead_letters import DeadLetters
from airflow_kafka_spark.windows.model import BadRecord, SplitResult
from tests.support.oracle import committed_messages, committed_records, same_multiset
from tests.support.pipelines import Pipeline, order, row_of

BAD = (b"no json", b'{"id": "seven"}', b"", b"\xff\xfe\x00", b'{"id": 1} {"id": 2}', b"[]")
PREFIX = "__connect.errors."


def is_bad(value: bytes | None) -> bool:
    return value in BAD


def produce_mixed(flow: Pipeline, count: int, every: int, *, first: int = 0) -> int:
    """Produce ``count`` orders in all partitions, and after each ``every`` orders a bad record with headers. Return the number
    of bad records.
    """
    producer, bad = Producer(flow.kafka.connection_extra()), 0
    for number in range(first, first + count):
        producer.produce(flow.topic, order(number), b"%d" % number, number % flow.partitions)
        if number % every == every - 1:
            value = BAD[bad % len(BAD)]
            headers = [("trace", b"%d" % number), ("trace", None), ("bytes", b"\x00\xff")]
            producer.produce(
                flow.topic,
                value,
                b"bad-%d" % number,
                number % flow.partitions,
                headers=headers,
                timestamp=1_700_000_000_000 + number,
            )
            bad += 1
    assert producer.flush(60) == 0
    return bad


def send_dead_letters(
    hook: KafkaHook,
    ledger: Ledger,
    topic: str,
    places: Sequence[BadRecord],
    *,
    context_headers: bool = True,
    **columns: list[Any],
) -> DeadLetters:
    """Send records as dead letters of the claimed window, as the operator does.

    :param columns: ``timestamp``, ``key``, ``value`` and ``headers`` of the records. Default: nulls.
    """
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    types = {"timestamp": pa.int64(), "key": pa.binary(), "value": pa.binary(), "headers": headers}
    record = {name: pa.array(columns.get(name, [None] * len(places)), kind) for name, kind in types.items()}
    found = to_bytes(pa.Table.from_batches([make_dead_letters(places, record)]))
    target = DeadLetterTopic(hook, topic, -1, Envelope(ledger.parent_pipeline, {}, context_headers))
    sent = target.send([SplitResult(0, letters=found, rejected=len(places))], ledger)
    assert sent is not None
    return sent


def letters(config: dict[str, Any], topic: str) -> list[tuple[bytes | None, bytes | None, int, list[tuple[str, bytes | None]]]]:
    """Return every committed record of a topic: (key, value, timestamp, headers)."""
    return [(m.key(), m.value(), m.timestamp()[1], m.headers() or []) for m in committed_messages(config, topic)]


def decode_headers(headers: list[tuple[str, bytes | None]]) -> dict[str, str]:
    """Return the values of Connect's headers by name."""
    return {name.removeprefix(PREFIX): (value or b"").decode() for name, value in headers if name.startswith(PREFIX)}


def check_sorted_out(flow: Pipeline, topic: str, others: Sequence[tuple] = ()) -> tuple[int, int]:
    """Check that good records are in the sink and bad records are dead letters, each exactly once. Return the numbers of both.

    :param others: further rows of the sink.
    """
    events = committed_records(flow.kafka.connection_extra(), flow.topic)
    expected = [row_of(value) for *_, value in events if value is not None and not is_bad(value)]
    good = same_multiset([*expected, *others], flow.rows())
    there = []
    for key, value, _, headers in letters(flow.kafka.connection_extra(), topic):
        facts = decode_headers(headers)
        there.append((int(facts["partition"]), int(facts["offset"]), key, value))
    return good, same_multiset((event for event in events if is_bad(event[3])), there)
