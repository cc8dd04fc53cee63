"""Records that do not meet a condition go to another sink, in the same window: each record is in one sink, exactly once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NoReturn

import pytest
from confluent_kafka import Producer

from airflow_kafka_spark.errors import (
    BadRecords,
    DestinationChanged,
    SinkRejected,
    SparkUnavailable,
    TooManyBadRecords,
    ValidationError,
)
from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.hooks.spark.hook import SparkHook
from airflow_kafka_spark.operators import KafkaToSinkOperator
from airflow_kafka_spark.sinks import FilesSink, PostgresSink
from airflow_kafka_spark.transforms import Condition, Filter, RecordIsTombstone, Sql
from tests.operators.test_binding import decide
from tests.support.dead_letters import decode_headers, is_bad, letters, produce_mixed
from tests.support.intervals import Intervals
from tests.support.oracle import same_multiset
from tests.support.pipelines import COLUMNS, SCHEMA, Pipeline, files_rows, order, row_of

ORDER = {name: name for name in ("id", "customer", "amount", "placed_at")}


def second_table(flow: Pipeline, columns: str = COLUMNS, **options) -> PostgresSink:
    """Return a second table in the pipeline's database."""
    sink = PostgresSink(conn_id="warehouse", table=f"other_{flow.place}", **options)
    with flow.postgres.connect(autocommit=True) as connection:
        connection.execute(f'CREATE TABLE "{sink.table}" ({columns})')
    return sink


def table_rows(flow: Pipeline, table: str) -> list[tuple]:
    query = f'SELECT id, customer, amount::text, extract(epoch FROM placed_at)::bigint FROM "{table}"'
    with flow.postgres.connect(autocommit=True) as connection:
        return [tuple(row) for row in connection.execute(query).fetchall()]


def orders(flow: Pipeline) -> list[tuple[int, str, str, int]]:
    return [row_of(value) for *_, value in flow.events() if value is not None and not is_bad(value)]


def split(rows: list[tuple], takes) -> tuple[list[tuple], list[tuple]]:
    """Return the records that the filter removes, and the others."""
    return [row for row in rows if takes(row)], [row for row in rows if not takes(row)]


def test_to_a_table_a_directory_and_a_topic_beside_dead_letters_each_record_is_in_one_place(table: Pipeline, tmp_path):
    topic, dead = f"away-{table.topic}", f"dead-{table.topic}"
    other, directory = second_table(table, f"{COLUMNS}, n bigint"), FilesSink(path=str(tmp_path / "rare"))
    with table.postgres.connect(autocommit=True) as connection:
        for place in (other.table, table.place):
            connection.execute(f'ALTER TABLE "{place}" ADD CONSTRAINT few CHECK (id % 50 <> 9)')
    bad = produce_mixed(table, 600, 40)
    # Not even a staging table can hold this value, and it belongs to the other table.
    producer = Producer(table.kafka.connection_extra())
    producer.produce(table.topic, json.dumps({**json.loads(order(1407)), "customer": "a\0b"}).encode(), b"nul", 0)
    producer.flush(60)
    transforms = [
        Filter(predicate=Condition("id % 11 = 0"), to=topic),
        Sql(columns={**ORDER, "n": "nullif(id % 7, 3)"}),
        # Null for some: a condition that does not hold.
        Filter(predicate=Condition("n > 1"), negate=True, to=other),
        Filter(predicate=Condition("customer = 'customer-5'"), to=directory),
        Filter(predicate=Condition("n = 6")),
        Sql(columns=ORDER),
    ]
    options = {"transforms": transforms, "errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead}
    rows = orders(table)
    to_topic, rows = split(rows, lambda row: row[0] % 11 == 0)
    to_other, rows = split(rows, lambda row: row[0] % 7 in (0, 1, 3))
    to_files, rows = split(rows, lambda row: row[1] == "customer-5")
    dropped, rows = split(rows, lambda row: row[0] % 7 == 6)
    refused, to_other = split(to_other, lambda row: row[0] % 50 == 9 or "\0" in row[1])
    refused_too, rows = split(rows, lambda row: row[0] % 50 == 9)
    assert len(refused) > 2 and len(refused_too) > 2 and any(row[0] % 7 == 3 for row in to_other)
    letters_expected = bad + len(refused) + len(refused_too)
    with pytest.raises(TooManyBadRecords) as raised:
        table.run("run1", **options, max_errors=letters_expected - 1)
    assert raised.value.count == letters_expected and table.rows() == table_rows(table, other.table) == []
    report = table.run("run1", **options, max_errors=letters_expected)
    assert same_multiset(rows, table.rows()) == report["records_written"] > 100
    assert same_multiset(to_other, table_rows(table, other.table)) > 200
    assert same_multiset(to_files, files_rows(directory.path)) > 2
    there = letters(table.kafka.connection_extra(), topic)
    assert same_multiset(to_topic, [row_of(value) for _, value, *_ in there]) > 50
    found = letters(table.kafka.connection_extra(), dead)
    put = [row_of(value) for _, value, _, headers in found if decode_headers(headers)["stage"] == "TASK_PUT"]
    assert same_multiset([*refused, *refused_too], put) == len(found) - bad
    assert report["captured"] == [
        {"sink": other.uri, "records": len(to_other)},
        {"sink": directory.uri, "records": len(to_files)},
    ]
    assert report["records_routed"] == len(to_topic) + len(to_other) + len(to_files)
    assert report["records_rejected"] == letters_expected == sum(part["records"] for part in report["dead_letters"])
    assert report["records_filtered"] == len(dropped)
    names = ("written", "filtered", "rejected", "routed")
    assert report["records_read"] == 601 + bad == sum(report[f"records_{name}"] for name in names)
    assert table.run("run1", **options) == report
    assert table.committed() == {r["partition"]: r["end"] for r in report["ranges"]}


def test_records_without_a_value_and_all_that_is_left_are_captured_and_windows_continue_when_a_filter_was_away(
    files: Pipeline, tmp_path
):
    def rows(path: str) -> list[tuple]:
        import pyarrow.dataset as ds

        found = ds.dataset(path, format="parquet", partitioning="hive").to_table() if Path(path).exists() else None
        return [] if found is None else list(zip(*(found[name].to_pylist() for name in ("id", "key")), strict=True))

    gone, rest = FilesSink(path=str(tmp_path / "gone")), FilesSink(path=str(tmp_path / "rest"))
    producer = Producer(files.kafka.connection_extra())
    capture = [Filter(predicate=RecordIsTombstone(), to=gone), Filter(predicate=Condition("id < 3")), Filter(to=rest)]
    options = {"metadata_columns": ["key"], "behavior_on_null_values": "ignore"}

    def window(first: int, transforms: list) -> dict:
        for number in range(first, first + 10):
            producer.produce(files.topic, order(number), b"%d" % number, number % files.partitions)
            producer.produce(files.topic, None, b"gone-%d" % number, number % files.partitions)
        assert producer.flush(60) == 0
        return files.run(f"run-{first}", transforms=transforms, **options)

    reports = [window(0, capture), window(10, []), window(20, capture)]
    assert [report.get("records_routed", 0) for report in reports] == [17, 0, 20]
    assert reports[1]["records_ignored"] == 10 and reports[0]["records_filtered"] == 3
    kept = [number for number in range(30) if number < 10 or number >= 20]
    assert same_multiset([(None, b"gone-%d" % number) for number in kept], rows(gone.path)) == 20
    assert same_multiset([(number, b"%d" % number) for number in kept if number >= 3], rows(rest.path)) == 17
    assert same_multiset([(number, b"%d" % number) for number in range(10, 20)], rows(files.place)) == 10


def test_a_replay_replaces_what_both_sinks_have_and_sends_no_record_to_a_topic_twice(table: Pipeline):
    away, marked = f"away-{table.topic}", {"window_column": "window"}
    other = second_table(table, f'{COLUMNS}, "window" text', **marked)
    with table.postgres.connect(autocommit=True) as connection:
        connection.execute(f'ALTER TABLE "{table.place}" ADD COLUMN "window" text')
    table.options |= {"sink": PostgresSink(conn_id="warehouse", table=table.place, **marked), "on_rerun": "replay"}

    def taking(every: int) -> list[Filter]:
        other_table = Filter(predicate=Condition(f"id % {every} <> 0"), negate=True, to=other)
        return [Filter(predicate=Condition("id % 10 = 3"), to=away), other_table]

    table.produce(60)
    table.run("run1", transforms=taking(4))
    table.produce(40)
    table.run("run2", transforms=taking(4))
    with table.postgres.connect(autocommit=True) as connection:
        for place in (table.place, other.table):
            connection.execute(f"UPDATE \"{place}\" SET customer = 'spoilt' WHERE id < 60")
    # Other records are for the other table now.
    report = table.run("run1", facts={"max_tries": 1}, transforms=taking(5))
    assert (report["replay"], report["captured"][0]["records"], report["records_routed"]) == (1, 12, 18)
    sent, rest = split(orders(table), lambda row: row[0] % 10 == 3)
    assert same_multiset(sent, [row_of(value) for _, value, *_ in letters(table.kafka.connection_extra(), away)]) == 10
    took, kept = split(rest, lambda row: row[0] % (5 if row[0] < 60 else 4) == 0)
    assert same_multiset(took, table_rows(table, other.table)) == 22
    assert same_multiset(kept, table.rows()) == 68
    plain = [Filter(predicate=Condition("id > 0"), to=PostgresSink(conn_id="warehouse", table=other.table))]
    with pytest.raises(ValidationError, match=r"Filter\.to: .*window_column"):
        table.run("run1", facts={"max_tries": 2}, transforms=plain)


def test_a_condition_that_is_another_each_time_neither_loses_nor_doubles_a_record(files: Pipeline, tmp_path):
    other, third = (FilesSink(path=str(tmp_path / name)) for name in ("other", "third"))
    files.produce(500)
    report = files.run("run1", transforms=[Filter(predicate=Condition("rand() < 0.4"), to=sink) for sink in (other, third)])
    parts = [files_rows(other.path), files_rows(third.path), files.rows()]
    assert same_multiset(orders(files), [row for part in parts for row in part]) == 500 and min(map(len, parts)) > 50
    assert [found["records"] for found in report["captured"]] == [len(part) for part in parts[:2]]


@pytest.mark.extended
def test_intervals_in_any_order_and_one_of_them_again_are_in_both_sinks_once(files: Pipeline, tmp_path):
    intervals, other = Intervals(files, table=False), FilesSink(path=str(tmp_path / "other"))
    intervals.fill()
    files.options |= {"transforms": [Filter(predicate=Condition("id % 3 = 0"), to=other)], "keep_windows": 1}
    reports = [intervals.run(1), intervals.run(0), intervals.run(1, cleared=1)]
    assert [report.get("replay", 0) for report in reports] == [0, 0, 1]
    reached = {(r["partition"], offset) for report in reports for r in report["ranges"] for offset in range(r["start"], r["end"])}
    rows = [row_of(value) for partition, offset, _, value in files.events() if (partition, offset) in reached]
    took, kept = split(rows, lambda row: row[0] % 3 == 0)
    assert same_multiset(took, files_rows(other.path)) == sum(report["records_routed"] for report in reports[:2])
    assert same_multiset(kept, files.rows()) == sum(report["records_written"] for report in reports[:2])
    # The records of the first interval's window are removed, and the filter has got another sink since.
    elsewhere = FilesSink(path=str(tmp_path / "elsewhere"))
    files.options["transforms"] = [Filter(predicate=Condition("id % 3 = 0"), to=elsewhere)]
    decide(files)
    later = intervals.run(2)["records_routed"]
    with pytest.raises(DestinationChanged, match=f"filter 1 path `{other.uri}`"):
        intervals.run(0, cleared=1)
    assert len(files_rows(elsewhere.path)) == later > 0


def test_a_row_that_either_sink_refuses_or_a_bad_record_leaves_both_as_they_were(table: Pipeline, tmp_path):
    other = second_table(table, f"{COLUMNS}, CHECK (id <> 8)")
    transforms = [Filter(predicate=Condition("id % 2 = 0"), to=other)]
    table.produce(20)
    with pytest.raises(SinkRejected, match=f"{other.table}.*\n.*violates check"):
        table.run("run1", transforms=transforms)
    with table.postgres.connect(autocommit=True) as connection:
        connection.execute(f'ALTER TABLE "{other.table}" DROP CONSTRAINT "{other.table}_id_check"')
        connection.execute(f'ALTER TABLE "{table.place}" ADD CONSTRAINT few CHECK (id <> 9)')
    with pytest.raises(SinkRejected, match=f"/{table.place}.*\n.*few"):
        table.run("run1", transforms=transforms)
    assert table.rows() == table_rows(table, other.table) == []
    # No sink has taken a row, so the filter may change.
    transforms = [Filter(predicate=Condition("id % 3 = 0"), to=other)]
    report = table.run("run1", transforms=transforms)
    took, kept = split(orders(table), lambda row: row[0] % 3 == 0)
    assert same_multiset(took, table_rows(table, other.table)) == 7 == report["records_routed"]
    assert same_multiset(kept, table.rows()) == 13
    produce_mixed(table, 10, 5, first=100)
    with pytest.raises(BadRecords, match=f"{table.name}#2 holds 2 bad records"):
        table.run("run2", transforms=transforms)
    assert len(table.rows()) == 13


def test_sinks_that_would_not_do_are_refused_all_at_once_and_before_anything_is_read(table: Pipeline, tmp_path, monkeypatch):
    own, place = PostgresSink(conn_id="warehouse", table=table.place), f"other_{table.place}"
    sinks = (
        own,
        PostgresSink(conn_id="warehouse", table=place),
        PostgresSink(conn_id="warehouse", table=place, atomic="split"),
        PostgresSink(conn_id="warehouse", table=f"{place}_2", mode="upsert", key="id", delete_enabled=True),
    )
    transforms = [*(Filter(predicate=Condition("id > 1"), to=sink) for sink in sinks), Filter(to=7), Filter(to=own, reason="why")]
    with pytest.raises(ValidationError) as raised:
        table.run("run1", transforms=transforms, on_rerun="replay")
    found: dict[str, str] = {}
    for problem in raised.value.problems:
        found[problem.where] = f"{found.get(problem.where, '')}\n{problem}"
    says = {
        0: ["own sink"],
        1: ["window_column"],
        2: ["too", 'atomic="window"'],
        3: ["key=", "offset_columns"],
        4: ["a sink, or"],
    }
    for number, texts in says.items():
        assert all(text in found[f"transforms[{number}] Filter.to"] for text in texts)
    assert "no topic whose records could contain it" in found["transforms[5] Filter.reason"]
    # The other table is asked about the columns behind the transforms before the filter, and no others.
    second_table(table, "id bigint, n int")
    chain = [Sql(columns={"id": "id", "n": "upper(customer)"}), Filter(to=sinks[1]), Sql(columns={"id": "id"})]
    with pytest.raises(ValidationError, match=r"transforms\[1\] Filter\.to\.table column `n`: .*has integer"):
        table.run("run1", transforms=chain)
    split_sink = PostgresSink(conn_id="warehouse", table=table.place, atomic="split")
    with pytest.raises(ValidationError, match="shows parts of a window"):
        table.run("run1", transforms=chain, sink=split_sink)

    def is_down(*_: object) -> NoReturn:
        raise SparkUnavailable("spark_default", "local[*]", "it does not start")

    # A Spark that does not start hides no wrong sink, and is not asked twice.
    monkeypatch.setattr(SparkHook, "open_session", is_down)
    absent = PostgresSink(conn_id="warehouse", table=f"{place}_3")
    for own_table, wrong in ((table.place, set()), (f"{table.place}_2", {"sink.table"})):
        sink = PostgresSink(conn_id="warehouse", table=own_table)
        with pytest.raises(ValidationError) as raised:
            table.run("run1", sink=sink, transforms=[Filter(predicate=Condition("id > 1"), to=absent)])
        assert [p.where for p in raised.value.problems].count("spark_conn_id") == 1
        assert {p.where for p in raised.value.problems} == {"spark_conn_id", "transforms[0] Filter.to.table"} | wrong


def test_sinks_that_are_one_place_under_two_names_are_refused(table: Pipeline, tmp_path, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_SAME_WAREHOUSE", os.environ["AIRFLOW_CONN_WAREHOUSE"])
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    sinks = (
        PostgresSink(conn_id="same_warehouse", table=table.place),
        PostgresSink(conn_id="warehouse", table=f'"public"."{table.place}"'),
        FilesSink(path=str(tmp_path / "there")),
        FilesSink(path=str(tmp_path / "link")),
        FilesSink(path=str(tmp_path / "elsewhere")),
    )
    with pytest.raises(ValidationError) as raised:
        table.run("run1", transforms=[Filter(predicate=Condition(f"id = {n}"), to=sink) for n, sink in enumerate(sinks)])
    found = {problem.where: problem.what for problem in raised.value.problems}
    assert sorted(found) == [f"transforms[{number}] Filter.to" for number in (0, 1, 3)]
    assert "same place as x-postgres://warehouse/" in found["transforms[0] Filter.to"]
    assert found["transforms[3] Filter.to"].endswith("/there, that of transforms[2] Filter")


def test_other_sinks_are_outlets_and_their_templates_are_rendered(tmp_path):
    def operator(**options) -> KafkaToSinkOperator:
        transforms = [Filter(to="topic"), Filter(to=FilesSink(**options))]
        sink = PostgresSink(conn_id="warehouse", table="orders")
        return KafkaToSinkOperator(
            task_id="task", topics="t", group_id="g", value=Json(schema=SCHEMA), sink=sink, transforms=transforms
        )

    made = operator(path=str(tmp_path / "rare"))
    assert [asset.uri for asset in made.outlets] == ["x-postgres://warehouse/public/orders", (tmp_path / "rare").as_uri()]
    made = operator(path=f"{tmp_path}/{{{{ ds }}}}")
    assert len(made.outlets) == 1
    made.render_template_fields({"ds": "2026-01-01"})
    assert [sink.path for sink in made.sinks[1:]] == [f"{tmp_path}/2026-01-01"]
    assert made.transforms[0] == Filter(to="topic")
