"""Events in Avro and Protobuf, with the schemas of their tables in a schema registry."""

from __future__ import annotations

import io
import json
import math
import pickle
from typing import Any

import fastavro
import pytest

from airflow_kafka_spark.errors import SourceRejected, Unchecked
from airflow_kafka_spark.formats import Avro, Debezium, Protobuf, Raw
from airflow_kafka_spark.formats.avro.schema import make_namespace, remove_logical_types
from airflow_kafka_spark.formats.base import Format
from airflow_kafka_spark.formats.registry import read_schema_id
from airflow_kafka_spark.hooks.schema_registry import SchemaRegistryHook
from airflow_kafka_spark.hooks.spark.hook import SparkHook
from airflow_kafka_spark.operators import KafkaToSinkOperator, SourceToKafkaOperator
from airflow_kafka_spark.operators.binding import Run
from airflow_kafka_spark.sinks import KafkaSink, PostgresSink
from airflow_kafka_spark.sources import ExtractNewRecordState
from airflow_kafka_spark.transforms import RegexRouter
from tests.sources.postgres_cdc.kit import Windows, log_of
from tests.sources.postgres_cdc.test_events import CASES, b64
from tests.support.oracle import committed_records, same_multiset
from tests.support.pipelines import SPARK, create_ledger
from tests.support.runs import context

REGISTRY = "registry_of_tables"


@pytest.fixture
def hook(registry, monkeypatch) -> SchemaRegistryHook:
    monkeypatch.setenv(f"AIRFLOW_CONN_{REGISTRY.upper()}", registry.connection())
    return SchemaRegistryHook(REGISTRY)


def sink(format: Format) -> KafkaSink:
    return KafkaSink(topic_column="topic", key="key", key_format=format, value_columns=["value"], value=format)


class Written:
    """The windows of a log, and their events in JSON and in another format.

    :param begin: True: the first window is read at once.
    """

    def __init__(self, log: Any, format: Format, prefix: str, *, begin: bool = True, **options: Any) -> None:
        self.source = log.source(schemas_enable=True, topic_prefix=prefix, **options)
        self.windows, self.sink = Windows(self.source), sink(format)
        if begin:
            self.windows.next()

    def next(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return the events of the next window, as the source wrote them and as records."""
        window = self.windows.freeze()
        reader = self.source.make_reader(window.splits, None)
        assert not isinstance(reader, str)
        encoder = self.sink.make_encoder(reader.columns)
        assert not isinstance(encoder, str)
        encoder = pickle.loads(pickle.dumps(encoder))
        found = [
            pair for batch in reader.read(0) for pair in zip(batch.to_pylist(), encoder.encode(batch).to_pylist(), strict=True)
        ]
        self.windows.tokens[0] = reader.get_token(0)
        self.windows.close(window)
        return found


def shown(value: Any) -> Any:
    """Return a value that fastavro has read as the source writes it in JSON."""
    if isinstance(value, bytes):
        return b64(value)
    if isinstance(value, dict):
        return {name: shown(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [shown(inner) for inner in value]
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


def test_values_of_every_type_are_those_of_the_json_and_schemas_are_those_of_debezium_with_avroconverter(place, hook, unique):
    place.execute("CREATE TYPE mood AS ENUM ('sad', 'happy'); CREATE DOMAIN amount AS numeric(8,2)")
    columns = ", ".join(f"c{n} {case[0]}" for n, case in enumerate(CASES))
    place.execute(f"CREATE TABLE types (id int PRIMARY KEY, {columns})")
    prefix = unique("all").replace("-", "_")
    with log_of(place, "types") as log:
        written = Written(log, Avro(registry=REGISTRY), prefix)
        place.execute(f"INSERT INTO types VALUES (1, {', '.join(case[1] for case in CASES)})")
        place.execute("DELETE FROM types")
        pairs = written.next()
    assert len(pairs) == 3 and pairs[2][1]["value"] is None
    topic = pairs[0][0]["topic"]
    for part in ("key", "value"):
        registered = hook.get_version(f"{topic}-{part}")
        plain = fastavro.parse_schema(json.loads(remove_logical_types(registered.text)))
        for event, record in pairs[:2]:
            assert read_schema_id(record[part]) == registered.id
            read = fastavro.schemaless_reader(io.BytesIO(record[part][5:]), plain, None)
            assert shown(read) == json.loads(event[part])["payload"]
    envelope = json.loads(registered.text)
    namespace = make_namespace(topic)
    assert (envelope["namespace"], envelope["name"]) == (namespace, "Envelope")
    before, after = envelope["fields"][0]["type"][1], envelope["fields"][1]["type"][1]
    assert (before["namespace"], before["name"], after) == (namespace, "Value", f"{namespace}.Value")
    types = {field["name"]: field["type"][-1] for field in before["fields"]}
    at = {kind: f"c{n}" for n, (kind, *_) in enumerate(CASES)}
    assert types[at["timestamp"]] == {
        "type": "long", "connect.version": 1, "connect.name": "io.debezium.time.MicroTimestamp"
    }  # fmt: skip
    assert types[at["numeric(10,2)"]] == {
        "type": "bytes", "logicalType": "decimal", "scale": 2, "precision": 10, "connect.version": 1,
        "connect.parameters": {"scale": "2", "connect.decimal.precision": "10"},
        "connect.name": "org.apache.kafka.connect.data.Decimal",
    }  # fmt: skip
    assert envelope["connect.name"] == f"{topic}.Envelope"


@pytest.mark.parametrize("format", [Avro(registry=REGISTRY), Protobuf(registry=REGISTRY)], ids=["avro", "protobuf"])
def test_a_changed_table_has_another_version_within_a_window_and_all_are_read_with_the_last_one(place, hook, unique, format):
    prefix = unique("changed").replace("-", "_")
    place.execute("CREATE TABLE t (id int PRIMARY KEY, note text, size int)")
    with log_of(place, "t") as log:
        written = Written(log, format, prefix)
        place.execute("INSERT INTO t VALUES (1, 'a', 1)")
        place.execute("ALTER TABLE t ADD COLUMN more text; INSERT INTO t VALUES (2, 'b', 2, 'x')")
        place.execute("ALTER TABLE t DROP COLUMN note; INSERT INTO t VALUES (3, 3, 'y')")
        place.execute("ALTER TABLE t ADD COLUMN last text; INSERT INTO t VALUES (4, 4, 'z', 'l')")
        pairs = written.next()
    topic = pairs[0][0]["topic"]
    versions = hook.list_versions(f"{topic}-value")
    assert len(versions) == 4
    assert [read_schema_id(record["value"]) for _, record in pairs] == [version.id for version in versions]
    decoded = Debezium(format).of_topics([topic], "value").make_decoder().decode([record["value"] for _, record in pairs])
    assert decoded.bad == ()
    assert decoded.batch.select(["id", "size", "more", "last"]).to_pylist() == [
        {"id": 1, "size": 1, "more": None, "last": None},
        {"id": 2, "size": 2, "more": "x", "last": None},
        {"id": 3, "size": 3, "more": "y", "last": None},
        {"id": 4, "size": 4, "more": "z", "last": "l"},
    ]


@pytest.mark.parametrize("format", [Avro(registry=REGISTRY), Protobuf(registry=REGISTRY)], ids=["avro", "protobuf"])
def test_a_column_that_is_added_is_compatible_and_another_type_is_refused_by_the_registry(place, hook, unique, format):
    place.execute("CREATE TABLE t (id int PRIMARY KEY, size int)")
    with log_of(place, "t") as log:
        written = Written(log, format, unique("refused").replace("-", "_"))
        place.execute("INSERT INTO t VALUES (1, 1)")
        subject = f"{written.next()[0][0]['topic']}-value"
        hook.client.set_compatibility(subject, "BACKWARD")
        place.execute("ALTER TABLE t ADD COLUMN more text; INSERT INTO t VALUES (2, 2, 'x')")
        assert len(written.next()) == 1
        place.execute("ALTER TABLE t ALTER COLUMN size TYPE text; INSERT INTO t VALUES (3, 'three', 'x')")
        with pytest.raises(SourceRejected, match=f"subject `{subject}` does not take the schema") as refused:
            written.next()
        assert "change the subject's compatibility" in str(refused.value)
        assert len(hook.list_versions(subject)) == 2


def test_what_cannot_be_written_with_the_schemas_of_tables_is_found_before_anything_is_read(place, hook):
    with log_of(place) as log:
        found: dict[str, str] = {}
        given = sink(Avro(registry=REGISTRY, record_name="Order"))
        operator = SourceToKafkaOperator(task_id="t", source=log.source(), sink=given, read_with="spark")
        problems = [
            *operator._find_schema_problems(),
            *given.find_problems(log.source().find_columns(), connect=("key", "value")),
        ]
        found = {problem.where: str(problem) for problem in problems}
    assert sorted(found) == ["read_with", "sink.key_format.record_name", "sink.value.record_name", "source.schemas_enable"]
    assert sink(Avro()).find_problems(("topic", "key", "value"), connect=("key", "value"))[0].where == "sink.value.registry"
    assert sink(Raw()).find_problems(("topic", "key", "value"), connect=("key", "value")) == []


@pytest.mark.parametrize("format", [Avro(registry=REGISTRY), Protobuf(registry=REGISTRY)], ids=["avro", "protobuf"])
def test_transforms_tolerated_errors_and_rows_that_spark_reads_are_refused_before_spark_starts(
    kafka, place, hook, monkeypatch, format
):
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", kafka.connection_json())
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", SPARK)
    started: list[object] = []
    monkeypatch.setattr(SparkHook, "open_session", lambda *given, **settings: started.append(given))
    place.execute("CREATE TABLE t (id int PRIMARY KEY)")
    refused = {
        "transforms": {"transforms": [RegexRouter(regex="a", replacement="b")]},
        "errors_tolerance": {"errors_tolerance": "all", "errors_skip": True},
        "read_with": {"read_with": "spark"},
    }
    with log_of(place, "t") as log:
        source = log.source(schemas_enable=True)
        for where, options in refused.items():
            operator = SourceToKafkaOperator(task_id="t", source=source, sink=sink(format), **options)
            found = operator.find_all_problems(Run.of(context("run", task_id="t")))
            said = {problem.where: problem.what for problem in found if not isinstance(problem, Unchecked)}
            assert list(said) == [where] and "schemas of their tables" in said[where]
    assert not started


ADDED = ("op", "source.lsn")


@pytest.mark.parametrize(
    ("format", "unwrap"),
    [
        pytest.param(Avro(registry=REGISTRY), None, id="avro"),
        pytest.param(Avro(registry=REGISTRY), ExtractNewRecordState(add_fields=ADDED), id="rows"),
        pytest.param(Protobuf(registry=REGISTRY), None, id="protobuf", marks=pytest.mark.extended),
        pytest.param(Protobuf(registry=REGISTRY), ExtractNewRecordState(), id="protobuf rows", marks=pytest.mark.extended),
    ],
)
def test_a_copy_of_a_table_made_of_its_snapshot_and_its_changes_equals_it(
    kafka, place, hook, unique, monkeypatch, format, unwrap
):
    prefix = unique("cdc").replace("-", "_")
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", kafka.connection_json())
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", SPARK)
    create_ledger(kafka, prefix)
    columns = "note text, amount numeric(12,2), local timestamp, day date, flag boolean, ratio float8, raw bytea"
    for table in ("orders", "copy"):
        place.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, {columns})")
    place.execute(
        "INSERT INTO orders SELECT n, 'nö ' || n, n / 7.0, timestamp '0099-12-31 23:59:59.5', date '1900-01-01' + n, n % 2 = 0, "
        "n / 3.0, '\\x00ff' FROM generate_series(1, 20) n"
    )
    with log_of(place, "orders") as log:
        source = log.source(topic_prefix=prefix, schemas_enable=True, snapshot="initial", snapshot_chunk_rows=7, unwrap=unwrap)
        [topic] = {f"{prefix}.{''.join(c if c.isalnum() or c in '._-' else '_' for c in place.schema)}.orders"}
        kafka.create_topic(topic, 2)
        ledger = {"ledger_topic": f"ledger-{prefix}"}
        capture = SourceToKafkaOperator(task_id="capture", source=source, sink=sink(format), pipeline=prefix, **ledger)
        assert capture.execute(context("chunks", task_id="capture"))["records_written"] == 20
        for change in (
            "INSERT INTO orders (id) VALUES (21)",
            "UPDATE orders SET amount = -amount WHERE id < 5",
            "UPDATE orders SET id = 100 WHERE id = 1",
            "DELETE FROM orders WHERE id BETWEEN 6 AND 9",
        ):
            place.execute(change)
        # A delete has an event and a tombstone, or the tombstone alone.
        written = 1 + 4 + 3 + 8 if unwrap is None else 1 + 4 + 2 + 4
        assert capture.execute(context("log", task_id="capture"))["records_written"] == written
        copied = KafkaToSinkOperator(
            task_id="copy",
            topics=[topic],
            group_id=f"{prefix}-copy",
            key=format,
            value=Debezium(format, add_fields=ADDED) if unwrap is None else format,
            sink=PostgresSink(
                place.conn_id, f"{place.quoted}.copy", mode="upsert", key=["id"], delete_enabled=True, auto_evolve=True
            ),
            pipeline=f"{prefix}-copy",
            **ledger,
        )
        copied.execute(context("run", task_id="copy"))
    sent = committed_records(kafka.connection_extra(), topic)
    assert sum(value is None for *_, value in sent) == 5
    names = "id, note, amount, local, day, flag, ratio, raw"
    rows, copy = (place.rows(f"SELECT {names} FROM {table}") for table in ("orders", "copy"))
    assert same_multiset(rows, copy) == len(rows) == 17
