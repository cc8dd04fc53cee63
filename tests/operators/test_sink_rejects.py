"""Rows that the table refuses become dead letters like other bad records, and the other rows are committed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from confluent_kafka import Producer

from airflow_kafka_spark.errors import BadRecords, CountMismatch, SinkRejected, TooManyBadRecords
from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.sinks import FilesSink, PostgresSink
from airflow_kafka_spark.transforms import Condition, Filter
from tests.support.dead_letters import decode_headers, letters
from tests.support.distribution import extended
from tests.support.oracle import same_multiset
from tests.support.pipelines import SCHEMA, Pipeline, order, row_of

REFUSED = {
    "id": "no json",  # cannot be decoded
    "customer": "a\u0000b",  # no place in PostgreSQL
    "amount": "9999999999.00",  # overflows the column
    "placed_at": "1999-12-31T00:00:00Z",  # the table's own rule
}


def produce(flow: Pipeline, count: int) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
    """Produce orders, of which the table refuses every tenth. Return the refused orders with their keys, and the others."""
    producer, bad, good = Producer(flow.kafka.connection_extra()), [], []
    for number in range(count):
        key, value, headers = b"%d" % number, order(number), [("trace", b"\x00\xff"), ("trace", None)]
        if number % 10 == 9:
            name = list(REFUSED)[number // 10 % len(REFUSED)]
            value = b"no json" if name == "id" else json.dumps({**json.loads(value), name: REFUSED[name]}).encode()
            bad.append((key, value))
        else:
            good.append(value)
        producer.produce(flow.topic, value, key, number % flow.partitions, headers=headers, timestamp=1_700_000_000_000 + number)
    assert producer.flush(60) == 0
    return bad, good


@pytest.fixture
def strict(table: Pipeline) -> Pipeline:
    """A pipeline into a table with constraints."""
    with table.postgres.connect(autocommit=True) as connection:
        connection.execute(
            f"ALTER TABLE \"{table.place}\" ADD CONSTRAINT recent CHECK (placed_at > '2000-01-01'), "
            "ALTER COLUMN amount TYPE numeric(6,2)"
        )
    return table


CASES = {"plain": (False, "window"), "transformed, split by split": (True, "split")}


@pytest.mark.parametrize("routed, atomic", CASES.values(), ids=CASES)
def test_rows_that_the_table_refuses_become_dead_letters_as_they_were_read_or_are_left_out_when_that_is_said(
    strict: Pipeline, routed: bool, atomic: Any
):
    dead, away = f"dead-{strict.topic}", f"away-{strict.topic}"
    sink = PostgresSink(conn_id="warehouse", table=strict.place, atomic=atomic)
    tolerant = {"sink": sink, "errors_tolerance": "all"}
    options = {**tolerant, "errors_deadletterqueue_topic_name": dead}
    if routed:
        options["transforms"] = [Filter(predicate=Condition("id % 10 = 4"), to=away)]
    bad, good = produce(strict, 200)
    with pytest.raises(TooManyBadRecords) as raised:
        strict.run("run1", **options, max_errors=len(bad) - 1)
    assert raised.value.count == 20 and strict.rows() == []
    report = strict.run("run1", **options, max_errors=len(bad))
    rows = [row for row in map(row_of, good) if not (routed and row[0] % 10 == 4)]
    assert same_multiset(rows, strict.rows()) == (160 if routed else 180)
    there = letters(strict.kafka.connection_extra(), dead)
    assert same_multiset(bad, [(key, value) for key, value, *_ in there]) == 20 == report["records_rejected"]
    reasons: dict[str, set[str]] = {}
    for key, _, timestamp, headers in there:
        facts = decode_headers(headers)
        assert timestamp == 1_700_000_000_000 + int(key) and headers[:2] == [("trace", b"\x00\xff"), ("trace", None)]
        name = list(REFUSED)[int(key) // 10 % len(REFUSED)]
        reasons.setdefault(name, set()).add(facts["exception.message"])
        assert facts["stage"] == ("VALUE_CONVERTER" if name == "id" else "TASK_PUT")
        assert facts["class.name"].endswith("Json" if name == "id" else "PostgresSink")
    assert "NUL" in str(reasons["customer"]) and "overflow" in str(reasons["amount"]) and "recent" in str(reasons["placed_at"])
    assert (report["records_written"], report.get("records_routed", 0)) == ((160, 20) if routed else (180, 0))
    assert strict.run("run1", **options) == report
    # Without a topic.
    _, more = produce(strict, 80)
    report = strict.run("run2", **tolerant, errors_skip=True)
    assert same_multiset([*rows, *map(row_of, more)], strict.rows()) == len(rows) + 72
    assert [report[f"records_{name}"] for name in ("read", "written", "rejected")] == [80, 72, 8]


def test_split_by_split_nothing_of_a_split_is_there_before_it_is_decided_what_becomes_of_its_bad_records(table: Pipeline):
    """A user can then correct the format after too many bad records."""
    dead, sink = f"dead-{table.topic}", PostgresSink(conn_id="warehouse", table=table.place, atomic="split")
    options = {"sink": sink, "errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead}
    send(table, [(n, "c", "1.00" if n % 10 else "1.50") for n in range(50)], [(n, "c", "2.00") for n in range(50, 100)])
    whole = Json(schema=SCHEMA.replace("amount decimal(12,2)", "amount int"))
    with pytest.raises(TooManyBadRecords) as raised:
        table.run("run1", **options, max_errors=4, value=whole)
    assert raised.value.count > 4 and all(row[0] >= 50 for row in table.rows())
    report = table.run("run1", **options, max_errors=4)
    rows = [row_of(value) for _, _, _, value in table.events()]
    assert same_multiset(rows, table.rows()) == 100 == report["records_written"] and report["records_rejected"] == 0
    assert table.run("run1", **options) == report


def send(flow: Pipeline, *partitions: Sequence[tuple[int, str, str]]) -> None:
    """Send orders with these ids, customers and amounts."""
    producer = Producer(flow.kafka.connection_extra())
    for partition, orders in enumerate(partitions):
        for number, customer, amount in orders:
            value = {**json.loads(order(number)), "customer": customer, "amount": amount}
            producer.produce(flow.topic, json.dumps(value).encode(), b"%d" % number, partition)
    assert producer.flush(60) == 0


RULES = """
CREATE FUNCTION "{0} rule"() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
IF NEW.amount = 13 THEN RAISE EXCEPTION 'unlucky'; END IF; RETURN NULL; END $$;
CREATE TRIGGER rule AFTER INSERT OR UPDATE ON "{0}" FOR EACH ROW EXECUTE FUNCTION "{0} rule"();
ALTER TABLE "{0}" ADD PRIMARY KEY (id), ADD CONSTRAINT "{0} one" UNIQUE (customer), ADD CONSTRAINT small CHECK (amount < 100);
INSERT INTO "{0}" VALUES (1000, 'c60', 1, now())
"""


@pytest.mark.parametrize("partitions", [3])
@pytest.mark.parametrize("mode", ["append", extended("upsert")])
def test_split_by_split_only_splits_with_refused_rows_wait_until_it_is_decided_what_becomes_of_these(table: Pipeline, mode: Any):
    dead, options = f"dead-{table.topic}", {"mode": mode, "key": ["id"] if mode == "upsert" else []}
    options = {"sink": PostgresSink(conn_id="warehouse", table=table.place, atomic="split", **options)}
    with table.postgres.connect(autocommit=True) as connection:
        connection.execute(RULES.format(table.place))
    first, second, third = ([(n, f"c{n}", "1.00") for n in range(start, start + 40)] for start in (0, 40, 80))
    # Refused: by a customer that is there (60), by a rule, by a trigger.
    second[30:32] = [(70, "c70", "100.00"), (71, "c71", "13.00")]
    # One of these two, whichever comes first.
    first[7], third[9] = (200, "both", "1.00"), (201, "both", "1.00")
    send(table, first, second, third)
    tolerant = {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead, **options}
    with pytest.raises(TooManyBadRecords) as raised:
        table.run("run1", **tolerant, max_errors=3)
    assert raised.value.count == 4
    # No letter was sent, and the waiting splits have no rows in the table: the second split, and one of the others.
    there = {row[0] for row in table.rows()}
    assert there == {1000, *(n for n, *_ in (first if 200 in there else third))}
    if mode == "append":
        with pytest.raises(SinkRejected):
            table.run("run1", **options)
    report = table.run("run1", **tolerant, max_errors=4)
    facts = {int(key): decode_headers(headers) for key, _, _, headers in letters(table.kafka.connection_extra(), dead)}
    (late,) = {200, 201} - there
    assert facts.keys() == {60, 70, 71, late} and {fact["stage"] for fact in facts.values()} == {"TASK_PUT"}
    for number, reason in {60: "one", 70: "small", 71: "unlucky", late: "both"}.items():
        assert reason in facts[number]["exception.message"]
    sent = [(number, customer) for number, customer, _ in [*first, *second, *third] if number not in facts]
    assert same_multiset([*sent, (1000, "c60")], [row[:2] for row in table.rows()]) == 117
    assert (report["records_read"], report["records_written"], report["records_rejected"]) == (120, 116, 4)
    assert table.run("run1", **tolerant) == report


def test_rows_that_files_cannot_hold_become_dead_letters(files: Pipeline):
    """A timestamp that readers of ORC fail on, and a directory with too long a name; also behind transforms."""
    send(files, [(n, "c" * 300 if n == 7 else f"c{n}", "1.00") for n in range(20)])
    producer = Producer(files.kafka.connection_extra())
    producer.produce(files.topic, json.dumps({**json.loads(order(30)), "placed_at": "1200-01-01T00:00:00Z"}).encode(), b"30", 1)
    assert producer.flush(60) == 0
    for name, transforms in (("plain", []), ("transformed", [lambda frame: frame])):
        dead, sink = f"{name}-{files.topic}", FilesSink(path=f"{files.place}-{name}", format="orc", partition_by=["customer"])
        options = {"sink": sink, "transforms": transforms, "pipeline": f"{name}-{files.name}", "group_id": f"{name}-{files.name}"}
        if not transforms:
            with pytest.raises(BadRecords):
                files.run("run1", **options)
        report = files.run("run1", **options, errors_tolerance="all", errors_deadletterqueue_topic_name=dead)
        assert (report["records_read"], report["records_written"], report["records_rejected"]) == (21, 19, 2)
        found = {key: decode_headers(headers) for key, _, _, headers in letters(files.kafka.connection_extra(), dead)}
        assert found.keys() == {b"7", b"30"} and {fact["stage"] for fact in found.values()} == {"TASK_PUT"}
        assert {fact["class.name"] for fact in found.values()} == {"airflow_kafka_spark.sinks.files.sink.FilesSink"}
        assert "255 bytes" in found[b"7"]["exception.message"] and "ORC" in found[b"30"]["exception.message"]


ODD_RULES = """
CREATE FUNCTION "{0} odd"() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
IF NEW.amount = 13 THEN RAISE EXCEPTION 'unlucky' USING ERRCODE = 'U0013'; END IF;
IF NEW.amount = 14 THEN RETURN NULL; END IF; RETURN NEW; END $$;
CREATE TRIGGER odd BEFORE INSERT OR UPDATE ON "{0}" FOR EACH ROW EXECUTE FUNCTION "{0} odd"();
CREATE INDEX ON "{0}" (customer);
ALTER TABLE "{0}" ADD PRIMARY KEY (id), ADD FOREIGN KEY (parent) REFERENCES "{0}" DEFERRABLE INITIALLY DEFERRED
"""


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_what_else_a_table_may_refuse_and_that_rows_may_refer_to_later_ones(table: Pipeline, monkeypatch, mode: Any):
    from airflow_kafka_spark.sinks.postgres import writer

    dead = f"dead-{table.topic}"
    sink = PostgresSink(conn_id="warehouse", table=table.place, mode=mode, key=["id"] if mode == "upsert" else [])
    options: dict[str, Any] = {"sink": sink, "value": Json(schema=f"{SCHEMA}, parent bigint")}
    with table.postgres.connect(autocommit=True) as connection:
        connection.execute(f'ALTER TABLE "{table.place}" ADD parent bigint')
        connection.execute(ODD_RULES.format(table.place))
    producer, long = Producer(table.kafka.connection_extra()), "".join(map(chr, range(0x4E00, 0x4E00 + 9000)))
    orders = [(1, "c", "1", 5), (2, "c", "13", 1), (3, long, "1", 1), (4, "c", "1", 99), (5, "c", "1", None), (6, "c", "1", 1)]
    for number, customer, amount, parent in orders:
        value = {**json.loads(order(number)), "customer": customer, "amount": amount, "parent": parent}
        producer.produce(table.topic, json.dumps(value).encode(), b"%d" % number, 0)
    assert producer.flush(60) == 0
    tolerant = {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead}
    if mode == "append":
        monkeypatch.setattr(writer, "MAX_REFUSED", 2)
        with pytest.raises(SinkRejected, match="more than 2 of its rows are refused"):
            table.run("run1", **options, **tolerant)
        monkeypatch.undo()
    report = table.run("run1", **options, **tolerant)
    reasons = {
        int(key): decode_headers(headers)["exception.message"]
        for key, _, _, headers in letters(table.kafka.connection_extra(), dead)
    }
    assert reasons.keys() == {2, 3, 4} and report["records_rejected"] == 3
    assert "unlucky" in reasons[2] and "index row" in reasons[3] and "foreign key" in reasons[4]
    assert sorted(row[0] for row in table.rows()) == [1, 5, 6]
    if mode == "append":
        # Neither written nor refused: the row would be lost silently.
        send(table, [(7, "c", "14.00")])
        with pytest.raises(SinkRejected, match="1 rows became 0.*triggers"):
            table.run("run2", **options, **tolerant)


@pytest.mark.parametrize("partitions", [3])
def test_a_window_of_splits_that_fails_reports_the_splits_that_may_be_there_and_keeps_them(table: Pipeline):
    producer = Producer(table.kafka.connection_extra())
    for partition, value in enumerate((order(1), order(2), b"no json")):
        producer.produce(table.topic, value, b"key", partition)
    assert producer.flush(60) == 0
    sink, dead = PostgresSink(conn_id="warehouse", table=table.place, atomic="split"), f"dead-{table.topic}"
    tolerant = {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead}
    for options, error in (({}, BadRecords), ({**tolerant, "max_errors": 0}, TooManyBadRecords)):
        with pytest.raises(error, match="nothing of a split that holds one was written or committed"):
            table.run("run1", sink=sink, **options)
        assert len(table.rows()) == 2
    # A stricter format cannot turn rows that are in the table into dead letters.
    with pytest.raises(CountMismatch, match="counted 2 rows.*format.* was changed since, set it back"):
        table.run("run1", sink=sink, **tolerant, value=Json(schema=SCHEMA.replace("customer string", "customer varchar(3)")))
    report = table.run("run1", sink=sink, **tolerant)
    assert (report["records_written"], report["records_rejected"], len(table.rows())) == (2, 1, 2)
    assert [value for _, value, *_ in letters(table.kafka.connection_extra(), dead)] == [b"no json"]
