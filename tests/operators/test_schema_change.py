"""The schema changes between two windows: the sink gets the new column on request, and refuses it otherwise."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest
from confluent_kafka import Producer

from airflow_kafka_spark.errors import ValidationError
from airflow_kafka_spark.formats import Avro, Json
from airflow_kafka_spark.sinks import FilesSink, PostgresSink
from airflow_kafka_spark.sinks.base import Shape
from airflow_kafka_spark.sinks.files.directory import list_column_types
from airflow_kafka_spark.sinks.files.validation import find_changed_column_problems
from airflow_kafka_spark.transforms import Condition, Filter
from tests.support.intervals import Intervals
from tests.support.oracle import same_multiset
from tests.support.pipelines import Pipeline
from tests.support.registry import serializer

OLD = {"type": "record", "name": "shop.Order", "fields": [{"name": "id", "type": "long"}, {"name": "name", "type": "string"}]}
NOTE = {
    "name": "Note",
    "type": ["null", {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}],
    "default": None,
}
NEW = {**OLD, "fields": [*OLD["fields"], NOTE]}


def test_a_name_that_differs_in_case_only_is_no_new_column(table: Pipeline, tmp_path):
    """Spark would read the two as one; neither sink adds it, nor says that it would."""
    there, other = (pa.schema([("id", pa.int64()), (name, pa.string())]) for name in ("name", "Name"))
    with table.postgres.connect(autocommit=True) as connection:
        connection.execute(f'CREATE TABLE "{table.place} cased" (id bigint, name text)')
    for evolves in (False, True):
        files = FilesSink(path=str(tmp_path / "lake"), auto_evolve=evolves)
        found = list(find_changed_column_problems(files, list_column_types(there), other))
        sink = PostgresSink(conn_id="warehouse", table=f'"{table.place} cased"', auto_evolve=evolves)
        found += sink.validate(Shape("pipeline", other))
        assert len(found) == 2 and all("`name`" in problem.what and "auto_evolve" not in problem.action for problem in found)


def test_an_interval_whose_columns_are_others_is_refused_beside_the_other_intervals(files: Pipeline):
    """Each interval has a place of its own; readers see one table."""
    intervals = Intervals(files, table=False)
    intervals.produce(0, 70, 130, 190, partition=0)
    for partition in range(1, files.partitions):
        intervals.produce(190, partition=partition)
    place, columns = files.place, "id bigint, customer string, amount decimal(12,2), placed_at timestamp"

    def sinks(**options) -> dict:
        routed = FilesSink(path=f"{place} routed", **options)
        return {"sink": FilesSink(path=place, **options), "transforms": [Filter(predicate=Condition("id < 0"), to=routed)]}

    intervals.run(1, value=Json(schema=columns), **sinks())
    for changed, message in (("id string", "found string; expected int64"), ("note string", "it is new")):
        other = f"{columns}, {changed}" if "note" in changed else columns.replace("id bigint", changed)
        with pytest.raises(ValidationError) as raised:
            intervals.run(0, value=Json(schema=other), **sinks())
        assert len(raised.value.problems) == 2 and all(message in problem.what for problem in raised.value.problems)
    wider = Json(schema=f"{columns}, note string")
    intervals.run(0, value=wider, **sinks(auto_evolve=True))
    # The record of the latest commit counts, which covers all earlier ones, for any interval.
    report = intervals.run(2, value=wider, **sinks())
    assert report["records_written"] == 1


def test_a_schema_that_got_a_field_between_two_windows_gives_the_table_a_column_on_request_only(
    table: Pipeline, registry, monkeypatch
):
    monkeypatch.setenv("AIRFLOW_CONN_SCHEMA_REGISTRY_DEFAULT", registry.connection())
    place, producer, expected = f"{table.place} evolving", Producer(table.kafka.connection_extra()), []
    avro = Avro(registry="schema_registry_default")

    def send(window: int, numbers: range) -> None:
        encode = serializer(registry.url, (OLD, NEW)[window])
        for number in numbers:
            note = Decimal(number).scaleb(-2) if window and number % 3 else None
            row = {"id": number, "name": f"n{number}", **({"Note": note} if window else {})}
            producer.produce(table.topic, encode(table.topic, row), b"%d" % number)
            expected.append((number, f"n{number}", note))
        assert producer.flush(60) == 0

    def sink(**options) -> PostgresSink:
        return PostgresSink(conn_id="warehouse", table=f'"{place}"', **options)

    send(0, range(40))
    table.run("run1", value=avro, sink=sink(auto_create=True))
    send(1, range(40, 100))
    before = table.committed()
    with pytest.raises(ValidationError) as raised:
        table.run("run2", value=avro, sink=sink())
    (problem,) = raised.value.problems
    assert "`Note`" in problem.where and "numeric(9,2)" in problem.what and "auto_evolve=True" in problem.action
    assert table.committed() == before
    table.run("run2", value=avro, sink=sink(auto_evolve=True))
    with table.postgres.connect(autocommit=True) as connection:
        rows = connection.execute(f'SELECT id, name, "Note" FROM "{place}"').fetchall()
    assert same_multiset(expected, rows) == 100
