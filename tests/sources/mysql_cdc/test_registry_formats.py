"""Events of MariaDB in Avro and Protobuf, with the schemas of their tables in a schema registry."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable
from datetime import date
from decimal import Decimal

import fastavro
import pytest

from airflow_kafka_spark.formats import Avro, Debezium, Protobuf
from airflow_kafka_spark.formats.avro.schema import remove_logical_types
from airflow_kafka_spark.formats.base import Format
from airflow_kafka_spark.formats.registry import read_schema_id
from airflow_kafka_spark.hooks.schema_registry import SchemaRegistryHook
from tests.sources.mysql_cdc.kit import Binlog
from tests.sources.mysql_cdc.test_values import CASES
from tests.sources.postgres_cdc.test_registry_formats import REGISTRY, Written, shown


@pytest.fixture
def hook(registry, monkeypatch) -> SchemaRegistryHook:
    monkeypatch.setenv(f"AIRFLOW_CONN_{REGISTRY.upper()}", registry.connection())
    return SchemaRegistryHook(REGISTRY)


def as_single(value: float | None) -> float | None:
    """Return a number after rounding to 32 bits."""
    return None if value is None else struct.unpack("<f", struct.pack("<f", value))[0]


def test_values_of_every_type_are_those_of_the_json_and_rows_of_a_snapshot_have_the_schema_of_the_log(
    shop: Binlog, hook: SchemaRegistryHook, unique: Callable[[str], str]
) -> None:
    names = ["id", *(f"c{n}" for n in range(len(CASES)))]
    singles = [f"c{n}" for n, case in enumerate(CASES) if case[2] == "float"]
    shop.execute("SET SESSION sql_mode = 'NO_UNSIGNED_SUBTRACTION'", "SET time_zone = '+00:00'")
    columns = ", ".join(f"{name} {case[0]}" for name, case in zip(names[1:], CASES, strict=True))
    shop.execute(f"CREATE TABLE types (id int PRIMARY KEY, {columns})")
    prefix = unique("all").replace("-", "_")
    written = Written(shop, Avro(registry=REGISTRY), prefix)
    for number in range(3):  # the third row has NULL wherever it can
        literals = [case[1][number][0] if number < len(case[1]) else "DEFAULT" for case in CASES]
        shop.execute(f"INSERT INTO types ({', '.join(names)}) VALUES ({number}, {', '.join(literals)})")
    pairs = written.next()
    pairs += Written(shop, Avro(registry=REGISTRY), prefix, begin=False, snapshot="initial").next()
    assert [json.loads(event["value"])["payload"]["op"] for event, _ in pairs] == [*"ccc", *"rrr"]
    topic = pairs[0][0]["topic"]
    for part in ("key", "value"):
        [version] = hook.list_versions(f"{topic}-{part}")
        plain = fastavro.parse_schema(json.loads(remove_logical_types(hook.get_version(f"{topic}-{part}").text)))
        for event, record in pairs:
            assert read_schema_id(record[part]) == version.id
            read = fastavro.schemaless_reader(io.BytesIO(record[part][5:]), plain, None)
            expected = json.loads(event[part])["payload"]
            if part == "value":  # JSON has the shortest text of a single, Avro its 32 bits
                expected["after"] |= {name: as_single(expected["after"][name]) for name in singles}
            assert shown(read) == expected


@pytest.mark.extended
@pytest.mark.parametrize("format", [Avro(registry=REGISTRY), Protobuf(registry=REGISTRY)], ids=["avro", "protobuf"])
def test_the_debezium_format_reads_rows_of_a_snapshot_and_changes_of_the_log_with_their_values(
    shop: Binlog, hook: SchemaRegistryHook, unique: Callable[[str], str], format: Format
) -> None:
    columns = "note varchar(50), amount decimal(12,2), day date, ratio double, raw varbinary(9)"
    shop.execute(f"CREATE TABLE t (id bigint unsigned PRIMARY KEY, {columns}, kind enum('a','b'), tags set('x','y'))")
    row = {"id": 1, "note": "ö😀", "amount": Decimal("-0.05"), "day": date(1600, 2, 29), "ratio": 0.1, "raw": b"\0\xff"}
    row |= {"kind": "b", "tags": "x,y"}
    shop.execute("INSERT INTO t VALUES (1, 'ö😀', -0.05, '1600-02-29', 0.1, x'00ff', 'b', 'x,y')")
    written = Written(shop, format, unique("read").replace("-", "_"), begin=False, snapshot="initial")
    pairs = written.next()
    shop.execute("UPDATE t SET note = NULL, amount = 9999999999.99", "ALTER TABLE t ADD COLUMN more int", "UPDATE t SET more = 7")
    pairs += written.next()
    shop.execute("UPDATE t SET id = 2", "DELETE FROM t")
    pairs += written.next()
    topic = pairs[0][0]["topic"]
    assert [record["value"] is None for _, record in pairs] == [False, False, False, False, True, False, False, True]
    decoded = Debezium(format).of_topics([topic], "value").make_decoder().decode([record["value"] for _, record in pairs])
    assert decoded.bad == () and decoded.deleted is not None
    found = [
        {name: line[name] for name in (*row, "more")}
        for line, is_deleted in zip(decoded.batch.to_pylist(), decoded.deleted.to_pylist(), strict=True)
        if not is_deleted and line["id"] is not None
    ]
    changed = {**row, "note": None, "amount": Decimal("9999999999.99"), "more": None}
    assert found == [{**row, "more": None}, changed, {**changed, "more": 7}, {**changed, "more": 7, "id": 2}]
