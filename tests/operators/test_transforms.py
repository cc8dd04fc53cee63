"""Transforms between format and sink: the sink holds the result of each record, exactly once."""

from __future__ import annotations

import logging
from dataclasses import replace

import pyarrow.dataset as ds
import pytest
from confluent_kafka import Producer

from airflow_kafka_spark.errors import BadRecords, SparkJobFailed, ValidationError
from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.transforms import (
    Cast,
    Condition,
    Filter,
    Flatten,
    HoistField,
    InsertField,
    RecordIsTombstone,
    RegexRouter,
    ReplaceField,
    Sql,
)
from tests.support.dead_letters import decode_headers, is_bad, letters, produce_mixed
from tests.support.oracle import same_multiset
from tests.support.pipelines import Pipeline, row_of


def found(flow: Pipeline, *columns: str) -> list[tuple]:
    table = ds.dataset(flow.place, format="parquet", partitioning="hive").to_table()
    return list(zip(*(table[name].to_pylist() for name in columns), strict=True))


def good(flow: Pipeline) -> list[tuple]:
    return [(p, o, *row_of(v)) for p, o, _, v in flow.events() if v is not None and not is_bad(v)]


def test_the_sink_holds_what_the_transforms_made_of_each_record_exactly_once(files: Pipeline):
    transforms = [
        ReplaceField(exclude="placed_at", renames="customer:buyer"),
        InsertField(offset_field="at", partition_field="of", topic_field="origin"),
        RegexRouter(regex="orders-(.*)", replacement="routed-$1"),
        Filter(predicate=Condition("id % 10 = 3")),
        Sql(columns={"id": "id", "buyer": "upper(buyer)", "twice": "amount * 2", "at": "at", "of": "of", "origin": "origin"}),
    ]
    files.produce(500)
    report = files.run("run1", transforms=transforms, metadata_columns={"topic": "route"})
    expected = [
        (
            i,
            customer.upper(),
            f"{round(float(amount) * 200) / 100:.2f}",
            o,
            p,
            files.topic,
            files.topic.replace("orders-", "routed-"),
        )
        for p, o, i, customer, amount, _ in good(files)
        if i % 10 != 3
    ]
    rows = [(*row[:2], f"{row[2]:.2f}", *row[3:]) for row in found(files, "id", "buyer", "twice", "at", "of", "origin", "route")]
    assert same_multiset(expected, rows) == 450
    assert (report["records_read"], report["records_written"], report["records_filtered"]) == (500, 450, 50)


def test_a_record_that_cannot_be_transformed_fails_the_window_or_becomes_a_dead_letter_as_it_was_read(files: Pipeline):
    dead = f"dead-{files.topic}"
    undecodable = produce_mixed(files, 120, 10)
    # customer-<number> is no number: 120 orders, of which those of customer-0 to -9 are cut to a digit.
    cut = Sql(columns={"id": "id", "digit": "if(id % 97 < 10, right(customer, 1), customer)"})
    transforms = [cut, Cast(spec="digit:int32")]
    with pytest.raises(BadRecords):
        files.run("run1", transforms=transforms)
    assert files.rows() == []
    options = {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead}
    report = files.run("run1", transforms=transforms, **options)
    expected = [(i, i % 97) for *_, i, _, _, _ in good(files) if i % 97 < 10]
    assert same_multiset(expected, found(files, "id", "digit")) == 20
    assert (report["records_written"], report["records_rejected"]) == (20, 100 + undecodable)
    there = letters(files.kafka.connection_extra(), dead)
    stages = [decode_headers(headers)["stage"] for *_, headers in there]
    assert (stages.count("TRANSFORMATION"), stages.count("VALUE_CONVERTER")) == (100, undecodable)
    left = {event[:2] for event in good(files) if event[2] % 97 >= 10}
    bad = {(p, o) for p, o, _, v in files.events() if is_bad(v)}
    places = [(int(decode_headers(headers)["partition"]), int(decode_headers(headers)["offset"])) for *_, headers in there]
    assert same_multiset([*left, *bad], places) == 100 + undecodable
    originals = {(p, o): (k, v) for p, o, k, v in files.events()}
    for place, (key, value, _, headers) in zip(places, there, strict=True):
        assert originals[place] == (key, value)
        if decode_headers(headers)["stage"] == "TRANSFORMATION":
            assert decode_headers(headers)["exception.message"].startswith("Cast: ")
        else:
            assert headers[0][0] == "trace", "headers are carried along"


@pytest.mark.extended
def test_what_is_transformed_in_arrow_comes_out_as_what_spark_transforms_and_names_with_dots_reach_the_sink(
    files: Pipeline, caplog
):
    """Read one topic twice: with a chain that Arrow computes, and with a further function, which only Spark can call."""
    caplog.set_level(logging.INFO, "airflow_kafka_spark.jobs.write")
    undecodable = produce_mixed(files, 300, 10)
    away = f"away-{files.topic}"
    transforms = [
        ReplaceField(exclude="placed_at", renames="customer:buyer"),
        InsertField(offset_field="at", partition_field="of", topic_field="origin", timestamp_field="when"),
        Filter(predicate=Condition("id % 7 = 3 AND origin LIKE 'orders%'")),
        Sql(
            columns={"id": "id", "text": "if(id > 280, buyer, '12')", "at": "at", "of": "of", "origin": "origin", "when": "when"}
        ),
        Cast(spec="text:int32,of:string"),
        Filter(predicate=Condition("id > 270 AND text IS NOT NULL"), to=away),
        # Flatten puts dots into names.
        HoistField("order"),
        Flatten(),
    ]
    names = [f"order.{name}" for name in ("id", "text", "at", "of", "origin", "when")]
    runs = []
    for turn, chain in enumerate([transforms, [*transforms, lambda frame: frame]]):
        dead = f"dead{turn}-{files.topic}"
        flow = replace(files, name=f"{files.name}-{turn}", place=f"{files.place}-{turn}", reports=[])
        options = {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead, "transforms": chain}
        report = flow.run("run1", **options)
        there = [
            (k, v, t, decode_headers(h)["exception.message"]) for k, v, t, h in letters(files.kafka.connection_extra(), dead)
        ]
        counts = {name: report[f"records_{name}"] for name in ("read", "written", "rejected", "filtered", "routed")}
        runs.append((found(flow, *names), there, counts))
    assert same_multiset(runs[0][0], runs[1][0]) > 200
    assert same_multiset(runs[0][1], runs[1][1]) > undecodable > 0
    assert runs[0][2] == runs[1][2] and runs[0][2]["filtered"] > 30 and runs[0][2]["routed"] > 5
    (told_once,) = [record.getMessage() for record in caplog.records if record.name.endswith("jobs.write")]
    assert told_once.startswith(f"Window {files.name}-1#1: Spark's SQL transforms its records")


def test_tombstones_delete_behind_transforms_and_may_be_left_out(table: Pipeline):
    from airflow_kafka_spark.sinks import PostgresSink

    with table.postgres.connect(autocommit=True) as connection:
        connection.execute(f'ALTER TABLE "{table.place}" ADD PRIMARY KEY (id)')
    sink = PostgresSink(conn_id="warehouse", table=table.place, mode="upsert", key=["id"], delete_enabled=True)
    producer = Producer(table.kafka.connection_extra())
    for number in range(30):
        value = b'{"id": %d, "customer": "c", "amount": "1.00", "placed_at": "2026-01-01T00:00:00Z", "more": 1}' % number
        producer.produce(table.topic, value, b'{"id": %d}' % number, 0)
    for number in range(0, 30, 3):
        producer.produce(table.topic, None, b'{"id": %d}' % number, 0)
    producer.flush(60)
    options = {
        "sink": sink,
        "key": Json(schema="id bigint"),
        "value": Json(schema="id bigint, customer string, amount decimal(12,2), placed_at timestamp, more int"),
    }
    report = table.run("run1", transforms=[ReplaceField(exclude="more")], **options)
    assert sorted(row[0] for row in table.rows()) == [n for n in range(30) if n % 3]
    producer.produce(table.topic, None, b'{"id": 1}', 0)
    producer.flush(60)
    dropped = [ReplaceField(exclude="more"), Filter(predicate=RecordIsTombstone())]
    report = table.run("run2", transforms=dropped, **options)
    assert (report["records_filtered"], len(table.rows())) == (1, 20)


def test_all_transforms_that_do_not_fit_are_reported_at_once_before_the_window_is_planned(files: Pipeline):
    files.produce(3)
    with pytest.raises(ValidationError) as raised:
        files.run("run1", transforms=[Cast(spec="id:colour"), RegexRouter(regex="(", replacement="x")])
    assert [p.where.partition(" ")[0] for p in raised.value.problems] == ["transforms[0]", "transforms[1]"]
    with pytest.raises(ValidationError, match=r"transforms\[0\] Sql: .*`nothing` cannot be resolved"):
        files.run("run1", transforms=[Sql(columns={"x": "nothing"})])
    with pytest.raises(ValidationError, match="tasks read the topics themselves"):
        files.run("run1", transforms=[ReplaceField(exclude="id")], read_with="spark")
    with pytest.raises(ValidationError, match="`offset` is there already"):
        files.run("run1", transforms=[InsertField(offset_field="offset")], metadata_columns=["offset"])
    with pytest.raises(ValidationError, match=r"metadata_columns: there is a column `__kafka_offset`, as what is carried"):
        files.run("run1", transforms=[ReplaceField(exclude="id")], metadata_columns={"offset": "__kafka_offset"})
    with pytest.raises(ValidationError, match=r"transforms: there is a column `__kafka_error`, as what is carried"):
        files.run("run1", transforms=[ReplaceField(renames="id:__kafka_error")])
    assert set(files.committed().values()) == {-1001}


def test_a_function_that_leaves_rows_out_or_moves_them_to_other_splits_fails_the_window_and_nothing_is_committed(files: Pipeline):
    files.produce(9)
    for function in (lambda frame: frame.where("false"), lambda frame: frame.orderBy("value.id")):
        with pytest.raises(SparkJobFailed, match=r"left out(, added)? or moved records.*Filter") as raised:
            files.run("run1", transforms=[function])
        assert not raised.value.retryable
    assert set(files.committed().values()) == {-1001}
    # The window is still open, and loses nothing.
    files.run("run1")
    assert files.check() == 9


def test_a_retry_after_a_crash_transforms_the_same_records_and_sends_no_letter_again(files: Pipeline, monkeypatch):
    from airflow_kafka_spark import faults

    dead = f"dead-{files.topic}"
    bad = produce_mixed(files, 60, 10)
    options = {
        "transforms": [Sql(columns={"id": "id", "n": "id"}), Cast(spec="n:int8")],
        "errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead, "max_errors": 0.5,
    }  # fmt: skip
    monkeypatch.setenv(faults.FAULT, "dead.committed:raise")
    with pytest.raises(RuntimeError):
        files.run("run1", **options)
    monkeypatch.undo()
    report = files.run("run1", **options)
    assert same_multiset([(i, i) for _, _, i, *_ in good(files)], found(files, "id", "n")) == 60
    assert len(letters(files.kafka.connection_extra(), dead)) == bad == report["records_rejected"]
