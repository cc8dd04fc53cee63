"""From a table: rows that do not fit the schema become dead letters in the transaction of the other rows, or fail the window."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from airflow_kafka_spark.errors import RowsRejected, SourceRejected, SparkReadRequired, TooManyBadRecords
from airflow_kafka_spark.formats import JsonSchema, Protobuf
from airflow_kafka_spark.operators import SourceToKafkaOperator
from airflow_kafka_spark.sinks import KafkaSink
from airflow_kafka_spark.sources import FilesSource, JdbcSource
from airflow_kafka_spark.transforms import InsertField
from tests.support.dead_letters import decode_headers, letters
from tests.support.distribution import extended
from tests.support.oracle import committed_records, same_multiset
from tests.support.registry import EmbeddedRegistry
from tests.support.runs import context
from tests.support.shop import SPLIT, Shop, shop
from tests.support.unfit import KEY, VALUE, avro, check_sorted_out, plain, spoil

CONN = "schema_registry_default"
ALL = {"source": {"split_records": 5000}}
"""One split, so that nothing of the window is visible when it fails."""


@pytest.fixture
def orders(kafka, postgres, unique, tmp_path):
    with shop(kafka, postgres, unique, tmp_path, value=avro(VALUE), key_format=avro(KEY)) as made:
        yield made


def dead_of(orders: Shop) -> str:
    return f"dead-{orders.topic}"


def tolerant(orders: Shop, **more) -> dict:
    return {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead_of(orders), **more}


def published(orders: Shop) -> int:
    return len(committed_records(orders.kafka.connection_extra(), orders.topic))


def test_with_more_bad_rows_than_allowed_nothing_is_visible_else_they_are_dead_letters_and_the_others_records_of_the_schema(
    orders: Shop, registry: EmbeddedRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SCHEMA_REGISTRY_DEFAULT", registry.connection())
    formats = {"value": avro(VALUE, registry=CONN), "key_format": avro(KEY, registry=CONN)}
    reading = AvroDeserializer(SchemaRegistryClient({"url": registry.url}))
    value, key = (
        lambda found, part=part: reading(found, SerializationContext(orders.topic, part))
        for part in (MessageField.VALUE, MessageField.KEY)
    )
    orders.sell(600)
    bad = spoil(orders, null=17, large=300, key=599)
    with pytest.raises(TooManyBadRecords, match="3 of the 600 records") as raised:
        orders.run("run1", **formats, **tolerant(orders, max_errors=0.0045))
    assert [sample.partition for sample in raised.value.samples] == [0, 1, 2]
    assert published(orders) == 0 and letters(orders.kafka.connection_extra(), dead_of(orders)) == []
    report = orders.run("run1", **formats, **tolerant(orders, max_errors=0.005))
    assert check_sorted_out(orders, dead_of(orders), bad, value, key) == (597, 3)
    assert [report[f"records_{name}"] for name in ("read", "written", "rejected")] == [600, 597, 3]
    assert [(part["topic"], part["records"]) for part in report["dead_letters"]] == [(dead_of(orders), 3)]
    assert sum(part["records"] for part in report["published"]) == 597
    assert {part["topic"] for part in report["published"]} == {orders.topic}
    assert orders.run("run1", **formats, **tolerant(orders)) == report, "a cleared task does nothing; the ledger has the report"
    facts = {}
    for _, letter, _, headers in letters(orders.kafka.connection_extra(), dead_of(orders)):
        facts[json.loads(letter)["id"]] = {
            **decode_headers(headers),
            **{name: (found or b"").decode() for name, found in headers},
        }
    null = facts[17]
    assert (null["stage"], null["connector.name"], null["task.id"]) == ("VALUE_CONVERTER", orders.name, "0")
    assert null["class.name"] == "airflow_kafka_spark.formats.avro.format.Avro"
    assert null["exception.class.name"] == "airflow_kafka_spark.errors.BadRecords"
    assert null["exception.message"] == "column `customer`: found null, expected string"
    assert null["__kafka_spark.errors.window"] == f"{orders.name}#1" and not {"topic", "offset"} & null.keys()
    assert null["__kafka_spark.errors.split"] == "0" and 0 < int(null["__kafka_spark.errors.row"]) <= SPLIT
    assert null["__kafka_spark.errors.source"].endswith(orders.table)
    assert "found 1234567.89, expected decimal(6,2)" in facts[300]["exception.message"]
    late = facts[(1 << 40) + 599]
    assert late["stage"] == "KEY_CONVERTER" and late["exception.message"].startswith("key: column `id`: found 109951")


def test_without_tolerance_the_window_fails_with_the_reasons_and_is_finished_once_rows_are_mended_or_tolerated(
    orders: Shop,
) -> None:
    orders.sell(300)
    bad = spoil(orders, null=17, large=150, key=299)
    with pytest.raises(RowsRejected) as raised:
        orders.run("run1", **ALL)
    # The database chooses the order of a split's rows.
    told_all = re.sub(r"row \d+", "row N", str(raised.value))
    assert raised.value.count == 3 and f"3 rows of window {orders.name}#1 cannot become records" in told_all
    assert "row N of split 0: column `customer`: found null, expected string" in told_all
    assert "row N of split 0: column `amount`: found 1234567.89, expected decimal(6,2)" in told_all
    assert "row N of split 0: key: column `id`: found 109951" in told_all
    assert published(orders) == 0
    report = orders.run("run1", **ALL, **tolerant(orders))
    assert (report["window"], report["attempts"]) == ("0000000001", 2)
    assert check_sorted_out(orders, dead_of(orders), bad, plain(VALUE), plain(KEY)) == (297, 3)


PROTOBUF = """
syntax = "proto3";
message Order { int64 id = 1; string customer = 2; uint32 cents = 3; }
"""
JSON = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "customer": {"type": "string"},
        "cents": {"type": "integer", "connect.type": "int32"},
    },
    "required": ["id", "customer", "cents"],
}


@pytest.mark.parametrize("format", [Protobuf(schema=PROTOBUF), JsonSchema(schema=JSON)], ids=["protobuf", "json"])
def test_other_formats_and_skipping(orders: Shop, format) -> None:
    """A table with a number that is too large, and a null; keys are texts, so they are there for every letter."""
    with orders.postgres.connect(autocommit=True) as connection:
        connection.execute(f"ALTER TABLE \"{orders.table}\" ADD cents bigint NOT NULL DEFAULT 5, ADD origin text DEFAULT 'web'")
    orders.sell(100)
    with orders.postgres.connect(autocommit=True) as connection:
        connection.execute(f'UPDATE "{orders.table}" SET cents = {1 << 40} WHERE id = 7')
        connection.execute(f'UPDATE "{orders.table}" SET customer = NULL WHERE id = 8')
    columns = {"value_columns": ["id", "customer", "cents"], "headers": {"origin": "origin"}, "timestamp": "placed_at"}
    options = {"value": format, "key_format": None, **columns}
    report = orders.run("run1", **options, **tolerant(orders))
    assert [report[f"records_{name}"] for name in ("read", "written", "rejected")] == [100, 98, 2]
    keys = [key for _, _, key, _ in committed_records(orders.kafka.connection_extra(), orders.topic)]
    assert same_multiset((b"%d" % n for n in range(100) if n not in (7, 8)), keys) == 98
    found = []
    for key, value, stamp, headers in letters(orders.kafka.connection_extra(), dead_of(orders)):
        assert headers[0] == ("origin", b"web") and stamp == 1_750_000_000_000 + int(key or b"") * 1000
        assert decode_headers(headers)["class.name"].endswith(type(format).__name__)
        found.append((key, json.dumps(json.loads(value or b""))))
    expected = [
        (b"7", '{"id": 7, "customer": "customer 7", "cents": 1099511627776}'),
        (b"8", '{"id": 8, "customer": null, "cents": 5}'),
    ]
    assert same_multiset(expected, found) == 2
    if isinstance(format, JsonSchema):
        return
    with orders.postgres.connect(autocommit=True) as connection:
        connection.execute(f"INSERT INTO \"{orders.table}\" VALUES (200, NULL, 1, now(), 1), (201, 'x', 1, now(), 1)")
    skipped = orders.run("run2", **options, errors_tolerance="all", errors_skip=True)
    assert (skipped["records_written"], skipped["records_rejected"], skipped.get("dead_letters")) == (1, 1, None)
    assert len(letters(orders.kafka.connection_extra(), dead_of(orders))) == 2


@pytest.mark.parametrize(
    "transforms", [(), extended((InsertField(static_field="shop", static_value="1"),))], ids=["plain", "transforms"]
)
def test_a_row_of_a_file_that_is_not_in_its_encoding_fails_the_window_or_is_a_dead_letter(
    orders: Shop, tmp_path: Path, transforms
) -> None:
    """Spark's reader of CSV replaces such bytes by U+FFFD without an error."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_bytes("id,name\n1,Zoë\n".encode() + b"2,Zo\xeb\n3,x\n")
    source = FilesSource(str(tmp_path / "in"), "csv", schema="id bigint, name string", options={"header": True})
    options = {"pipeline": f"{orders.name}-files", "ledger_topic": orders.arguments["ledger_topic"], "transforms": transforms}
    sink = KafkaSink(orders.topic, key="id")
    operator = SourceToKafkaOperator(task_id="task", source=source, sink=sink, **options)
    with pytest.raises(RowsRejected, match="row 2 of split 0: cannot be read: column `name` of file `a.csv`: not UTF-8"):
        operator.execute(context("run1"))
    operator = SourceToKafkaOperator(task_id="task", source=source, sink=sink, **options, **tolerant(orders, max_errors=1))
    report = operator.execute(context("run1"))
    assert [report[f"records_{name}"] for name in ("read", "written", "rejected")] == [3, 2, 1]
    there = [
        (key, json.loads(value or b"")["name"])
        for _, _, key, value in committed_records(orders.kafka.connection_extra(), orders.topic)
    ]
    assert sorted(there) == [(b"1", "Zoë"), (b"3", "x")]
    [(key, letter, _, headers)] = letters(orders.kafka.connection_extra(), dead_of(orders))
    assert (key, json.loads(letter or b"")) == (b"2", {"id": 2, "name": "Zo\ufffd"})
    assert decode_headers(headers)["stage"] == "VALUE_CONVERTER"


def test_splits_that_tasks_have_published_stay_when_spark_reads_the_others(
    orders: Shop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tasks read the first file. The second has a text that is not UTF-8, for which they leave the window to Spark."""
    (tmp_path / "in").mkdir()
    for name, texts in (("a", pa.array([b"a", b"b", b"c"])), ("b", pa.array([b"x", b"Zo\xeb", b"y"]))):
        pq.write_table(pa.table({"id": range(3), "name": texts.view(pa.string())}), tmp_path / "in" / name)
        os.utime(tmp_path / "in" / name, (1000, 1000))
    source, sink = FilesSource(str(tmp_path / "in"), split_bytes=1024), KafkaSink(orders.topic, key="name")
    options = {"pipeline": f"{orders.name}-files", "ledger_topic": orders.arguments["ledger_topic"]}
    with pytest.raises(SparkReadRequired):
        SourceToKafkaOperator(task_id="task", source=source, sink=sink, read_with="task", **options).execute(context("run1"))
    operator = SourceToKafkaOperator(task_id="task", source=source, sink=sink, **options)
    with caplog.at_level("INFO"), pytest.raises(RowsRejected, match="column `name` of file `b`: not UTF-8"):
        operator.execute(context("run1"))
    assert "Spark reads window" in caplog.text
    operator = SourceToKafkaOperator(
        task_id="task", source=source, sink=sink, **options, errors_tolerance="all", errors_skip=True
    )
    report = operator.execute(context("run1"))
    assert report["records_rejected"] == 1
    found = [key for _, _, key, _ in committed_records(orders.kafka.connection_extra(), orders.topic)]
    assert sorted(found) == [b"a", b"b", b"c", b"x", b"y"]


def test_texts_of_a_database_without_an_encoding_are_published_if_they_are_utf_8_and_others_are_named(
    orders: Shop, unique: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = unique("ascii").replace("-", "_")
    with orders.postgres.connect(autocommit=True) as connection:
        connection.execute(
            f"CREATE DATABASE {database} ENCODING 'SQL_ASCII' LOCALE_PROVIDER libc LOCALE 'C' TEMPLATE template0".encode()
        )
    server = {"conn_type": "postgres", "host": orders.postgres.host, "port": orders.postgres.port, "login": "postgres"}
    facts = {**server, "password": orders.postgres.password, "schema": database}
    monkeypatch.setenv("AIRFLOW_CONN_ASCII", json.dumps(facts))
    with orders.postgres.connect(dbname=database, autocommit=True) as connection:
        connection.execute("SET client_encoding = 'UTF8'")
        connection.execute("CREATE TABLE t (id bigint PRIMARY KEY, name text)")
        connection.execute("INSERT INTO t VALUES (1, 'Zoë')")
        operator = SourceToKafkaOperator(
            task_id="task", source=JdbcSource("ascii", "t", cursor="id"), sink=KafkaSink(orders.topic, key="id"),
            pipeline=f"{orders.name}-ascii", ledger_topic=orders.arguments["ledger_topic"],
        )  # fmt: skip
        assert operator.execute(context("run1"))["records_written"] == 1
        connection.execute("INSERT INTO t VALUES (2, E'Zo\\xeb')")
    with pytest.raises(SourceRejected, match="a text that is not UTF-8: .*0xeb.*SQL_ASCII") as caught:
        operator.execute(context("run2"))
    assert not caught.value.retryable
    there = committed_records(orders.kafka.connection_extra(), orders.topic)
    assert [(key, json.loads(value or b"")["name"]) for _, _, key, value in there] == [(b"1", "Zoë")]
