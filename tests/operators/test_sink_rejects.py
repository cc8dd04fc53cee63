"""Rows that the table refuses become dead letters like any other bad record, and the others are committed without them."""

from __future__ import annotations

import json

import pytest
from confluent_kafka import Producer

from airflow_kafka_spark.errors import SinkRejected, TooManyBadRecords
from airflow_kafka_spark.sinks import PostgresSink
from airflow_kafka_spark.transforms import Condition, Filter
from tests.support.dead_letters import letters, told
from tests.support.oracle import same_multiset
from tests.support.pipelines import Pipeline, order, row_of

REFUSED = {
    "id": "no json",  # cannot be decoded
    "customer": "a\u0000b",  # no place in PostgreSQL
    "amount": "9999999999.00",  # overflows the column
    "placed_at": "1999-12-31T00:00:00Z",  # the table's own rule
}


def produce(flow: Pipeline, count: int) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
    """Orders, of which every tenth has something that is refused: those, with their keys, and the others."""
    producer, bad, good = Producer(flow.kafka.connection_extra()), [], []
    for number in range(count):
        key, value, headers = b"%d" % number, order(number), [("trace", b"\x00\xff"), ("trace", None)]
        if number % 10 == 9:
            name = list(REFUSED)[number // 10 % len(REFUSED)]
            value = b"no json" if name == "id" else json.dumps({**json.loads(value), name: REFUSED[name]}).encode()
            bad.append((key, value))
        else:
            good.append(value)
        producer.produce(flow.topic, value, key, number % 3, headers=headers, timestamp=1_700_000_000_000 + number)
    assert producer.flush(60) == 0
    return bad, good


@pytest.fixture
def strict(table: Pipeline) -> Pipeline:
    """A pipeline into a table with rules of its own."""
    with table.postgres.connect(autocommit=True) as connection:
        connection.execute(
            f"ALTER TABLE \"{table.place}\" ADD CONSTRAINT recent CHECK (placed_at > '2000-01-01'), "
            "ALTER COLUMN amount TYPE numeric(6,2)"
        )
    return table


@pytest.mark.parametrize("routed", [False, True], ids=["plain", "transformed"])
def test_rows_that_the_table_refuses_become_dead_letters_as_they_were_read(strict: Pipeline, routed: bool):
    dead, away = f"dead-{strict.topic}", f"away-{strict.topic}"
    options = {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead}
    if routed:
        options["transforms"] = [Filter(predicate=Condition("id % 10 = 4"), to=away)]
    bad, good = produce(strict, 200)
    with pytest.raises(TooManyBadRecords) as raised:
        strict.run("run1", **options, max_errors=len(bad) - 1)
    assert raised.value.count == 20 and strict.rows() == []
    report = strict.run("run1", **options, max_errors=len(bad))
    rows = [row_of(value) for value in good]
    assert same_multiset([r for r in rows if not (routed and r[0] % 10 == 4)], strict.rows()) == (160 if routed else 180)
    there = letters(strict.kafka.connection_extra(), dead)
    assert same_multiset(bad, [(key, value) for key, value, *_ in there]) == 20 == report["records_rejected"]
    reasons: dict[str, set[str]] = {}
    for key, _, timestamp, headers in there:
        facts = told(headers)
        assert timestamp == 1_700_000_000_000 + int(key) and headers[:2] == [("trace", b"\x00\xff"), ("trace", None)]
        name = list(REFUSED)[int(key) // 10 % len(REFUSED)]
        reasons.setdefault(name, set()).add(facts["exception.message"])
        assert facts["stage"] == ("VALUE_CONVERTER" if name == "id" else "TASK_PUT")
        assert facts["class.name"].endswith("Json" if name == "id" else "PostgresSink")
    assert "NUL" in str(reasons["customer"]) and "overflow" in str(reasons["amount"]) and "recent" in str(reasons["placed_at"])
    assert (report["records_written"], report.get("records_routed", 0)) == ((160, 20) if routed else (180, 0))
    assert strict.run("run1", **options) == report


def test_without_a_topic_they_are_left_out_when_that_is_said_and_split_by_split_they_fail_the_window(strict: Pipeline):
    _, good = produce(strict, 80)
    skip = {"errors_tolerance": "all", "errors_skip": True}
    sink = PostgresSink(conn_id="warehouse", table=strict.place, atomic="split")
    with pytest.raises(SinkRejected):
        strict.run("run1", **skip, sink=sink)
    with strict.postgres.connect(autocommit=True) as connection:
        connection.execute(f'TRUNCATE "{strict.place}", airflow_window_splits')
    report = strict.run("run1", **skip)
    assert same_multiset([row_of(value) for value in good], strict.rows()) == 72 == report["records_written"]
    assert report["records_rejected"] == 8
