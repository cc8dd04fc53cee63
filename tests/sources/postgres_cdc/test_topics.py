"""Captured events in other topics and other formats: routed, and in Avro with a schema registry."""

from __future__ import annotations

import json

import pytest

from airflow_kafka_spark.errors import TopicMissing
from airflow_kafka_spark.formats import Avro, Debezium, JsonEnvelope, Raw
from airflow_kafka_spark.operators import KafkaToKafkaOperator, KafkaToSinkOperator, SourceToKafkaOperator
from airflow_kafka_spark.sinks import KafkaSink, PostgresSink
from airflow_kafka_spark.sources.cdc.options import format_topic
from airflow_kafka_spark.transforms import RegexRouter
from tests.sources.postgres_cdc.kit import log_of
from tests.support.oracle import committed_records, same_multiset
from tests.support.pipelines import SPARK, create_ledger
from tests.support.runs import context

REGISTRY = "registry_of_events"
COLUMNS = (
    "note text, amount numeric(12,2), at timestamptz, local timestamp, day date, flag boolean, ratio float8, raw bytea, "
    "tags text[]"
)
ROW = (
    "id bigint, note string, amount decimal(12,2), at timestamp, local timestamp_ntz, day date, flag boolean, ratio double, "
    "raw binary, tags array<string>"
)
EVENT = (
    f"before struct<{ROW}>, after struct<{ROW}>, source struct<schema string, table string, lsn bigint>, op string, ts_ms bigint"
)


def test_the_error_of_a_missing_topic_names_the_topics_of_all_tables_that_are_missing(kafka, place, unique, monkeypatch):
    name = unique("cdc")
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", kafka.connection_json())
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", SPARK)
    create_ledger(kafka, name)
    for table in ("a", "b", "c"):
        place.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY); INSERT INTO {table} VALUES (1)")
    topics = [format_topic(name, (place.schema, table)) for table in ("a", "b", "c")]
    kafka.create_topic(topics[1], 1)
    with log_of(place, "a", "b", "c") as log:
        capture = SourceToKafkaOperator(
            task_id="capture",
            source=log.source(topic_prefix=name, snapshot="initial"),
            sink=KafkaSink(topic_column="topic", key="key", key_format=Raw(), value_columns=["value"], value=Raw()),
            pipeline=name,
            ledger_topic=f"ledger-{name}",
        )
        with pytest.raises(TopicMissing) as failed:
            capture.execute(context("run1", task_id="capture"))
        assert failed.value.topics == (topics[0], topics[2])
        for topic in failed.value.topics:
            kafka.create_topic(topic, 1)
        capture.execute(context("run2", task_id="capture"))
    sent = [record for topic in topics for record in committed_records(kafka.connection_extra(), topic)]
    assert len(sent) == 3, "the window that failed is finished by the next run"


def test_events_are_routed_and_written_in_avro_and_a_copy_that_is_made_of_them_equals_the_table(
    kafka, postgres, place, registry, unique, monkeypatch
):
    """From a snapshot and the log to a routed topic, on to one in Avro, tombstones included, and into a table by the format
    Debezium. The snapshot's last chunk is read behind changes of its rows.
    """
    name = unique("cdc")
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", kafka.connection_json())
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", SPARK)
    monkeypatch.setenv(f"AIRFLOW_CONN_{REGISTRY.upper()}", registry.connection())
    for topic in (f"{name}-orders", f"{name}-avro"):
        kafka.create_topic(topic, 2)
    create_ledger(kafka, name)
    for table in ("orders", "copy"):
        place.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, {COLUMNS})")
    with log_of(place, "orders") as log:
        ledger = {"ledger_topic": f"ledger-{name}"}
        captured = SourceToKafkaOperator(
            task_id="capture",
            source=log.source(
                topic_prefix=name, schemas_enable=True, snapshot="initial", snapshot_chunk_rows=2, snapshot_chunks_per_window=2
            ),
            sink=KafkaSink(topic_column="topic", key="key", key_format=Raw(), value_columns=["value"], value=Raw()),
            transforms=[RegexRouter(r"(.*?)\..*\.(.*)", "$1-$2")],
            pipeline=name,
            **ledger,
        )
        in_avro = KafkaToKafkaOperator(
            task_id="avro",
            topics=[f"{name}-orders"],
            group_id=f"{name}-avro",
            value=JsonEnvelope(EVENT),
            sink=KafkaSink(f"{name}-avro", value=Avro(registry=REGISTRY)),
            pipeline=f"{name}-avro",
            **ledger,
        )
        copied = KafkaToSinkOperator(
            task_id="copy",
            topics=[f"{name}-avro"],
            group_id=f"{name}-copy",
            key=JsonEnvelope("id bigint"),
            value=Debezium(Avro(registry=REGISTRY), add_fields=["op", "source.lsn"]),
            sink=PostgresSink(
                place.conn_id, f"{place.quoted}.copy", mode="upsert", key=["id"], delete_enabled=True, auto_evolve=True
            ),
            pipeline=f"{name}-copy",
            **ledger,
        )
        place.execute("INSERT INTO orders (id, note) SELECT n, 'first' FROM generate_series(-6, -1) n")
        chunks = captured.execute(context("chunks", task_id="capture"))
        assert (chunks["records_written"], chunks["source_remaining"]) == (4, True)
        # Of the chunks that are read and of the one that is not: an update and a delete of each.
        place.execute("UPDATE orders SET note = 'second' WHERE id IN (-6, -1)")
        place.execute("DELETE FROM orders WHERE id IN (-5, -2)")
        assert captured.execute(context("log", task_id="capture"))["records_written"] == 3
        last = captured.execute(context("last chunk", task_id="capture"))
        assert last["records_written"] == 1
        assert not {"source_remaining", "source_progress"} & set(last), "the log has no change behind the last chunk"
        changes = (
            "INSERT INTO orders SELECT n, 'nö ' || n, n / 7.0, timestamptz '2026-01-01 00:00:00.000001+00' + n * interval '1 h', "
            "timestamp '0099-12-31 23:59:59.5', date '1900-01-01' + n, n % 2 = 0, n / 3.0, '\\x00ff', ARRAY['a', NULL] "
            "FROM generate_series(1, 20) n",
            "INSERT INTO orders (id) VALUES (21)",
            "UPDATE orders SET amount = -amount WHERE id < 5",
            "UPDATE orders SET id = 100 WHERE id = 1",
            "DELETE FROM orders WHERE id BETWEEN 6 AND 9",
        )
        for change in changes:
            place.execute(change)
        assert captured.execute(context("run", task_id="capture"))["records_written"] == 20 + 1 + 8 + 3 + 8
        assert in_avro.execute(context("run", task_id="avro"))["records_written"] == 8 + 40
        copied.execute(context("run", task_id="copy"))
    sent = committed_records(kafka.connection_extra(), f"{name}-avro")
    assert sum(value is None for *_, value in sent) == 6
    assert {value[0] for *_, value in sent if value is not None} == {0}
    assert {json.loads(key)["payload"]["id"] for _, _, key, _ in sent} == {*range(-6, 0), *range(1, 22), 100} - {-2}
    names = "id, note, amount, at, local, day, flag, ratio, raw, tags::text"
    rows, copy = (place.connection.execute(f"SELECT {names} FROM {table}".encode()).fetchall() for table in ("orders", "copy"))
    assert same_multiset(rows, copy) == len(rows) == 4 + 17
