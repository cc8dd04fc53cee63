"""The contract of formats, over all of them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable

import pytest

from airflow_kafka_spark.formats import Avro, Csv, Debezium, Format, Json, Protobuf, Raw, String
from tests.formats.contract import CHECKS, Case

CASES = {
    "json": Case(
        Json("id bigint NOT NULL, customer string, amount decimal(12,2), placed_at timestamp"),
        (
            b'{"id":1,"customer":"a","amount":"12.34","placed_at":"2026-11-05T07:08:09Z"}',
            b'{"id":2,"customer":null,"amount":-1,"placed_at":1790000000}',
            b' {"id":3, "else": [1, {"id": 4}]}\n',
        ),
        (b'{"id":"x"}', b'{"customer":"a"}', b"", b'{"id":1}{"id":2}', b'{"id":1,"amount":0.001}'),
    ),
    "json nested": Case(
        Json(
            "f float, b binary, d date, n timestamp_ntz, l array<struct<x: int NOT NULL, y: array<string>>>, s struct<`a.b`: "
            "struct<c: tinyint>, v: varchar(2)>, t boolean NOT NULL"
        ),
        (
            b'{"t":true}',
            b'{"t":false,"f":0.1,"b":"aGk=","d":"2026-11-05","n":"2026-11-05T07:08","l":[],"s":{}}',
            b'{"t":true,"l":[{"x":1,"y":null},null,{"x":2,"y":["a",null]}],"s":{"a.b":{"c":7},"v":"xy"}}',
            b'{"t":true,"f":NaN,"l":null,"s":{"a.b":null}}',
        ),
        (b'{"t":true,"l":[{"y":[]}]}', b'{"t":null}', b'{"t":true,"s":{"v":"xyz"}}', b'{"t":true,"b":"aGk"}'),
    ),
    "json map": Case(
        Json("id int, m map<string, struct<x: decimal(5,1)>> NOT NULL"),
        (b'{"id":1,"m":{}}', b'{"m":{"a":{"x":1},"b":null,"":{"x":"2.5"}}}'),
        (b'{"m":{"a":1}}', b'{"m":[]}', b'{"m":{"a":null,"a":null}}', b"{}"),
    ),
    "csv": Case(
        Csv("id bigint NOT NULL, customer string, amount decimal(12,2), placed_at timestamp"),
        (b"1,a,12.34,2026-11-05T07:08:09Z", b'2,"a ""b"", c",-1,', b"3,,,2026-11-05 07:08\n"),
        (b"x,a,1,", b",a,1,", b"1,a", b"1,a,0.001,", b'1,"a,1,'),
    ),
    "avro": Case(
        Avro(
            schema='{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}, '
            '{"name": "customer", "type": ["null", "string"]}]}'
        ),
        (b"\x02\x00", b"\x04\x02\x02a", b"\x80\x01\x02\x00"),
        (b"", b"\x02", b"\x02\x04", b"\x02\x00\x00", b"\x02\x02\x02\xff"),
    ),
    "debezium": Case(
        Debezium(Json("id bigint NOT NULL, customer string")),
        (
            b'{"before":null,"after":{"id":1,"customer":"a"},"op":"c"}',
            b'{"before":{"id":1},"after":{"id":1,"customer":null},"op":"u"}',
            b'{"before":null,"after":{"id":2},"op":"r"}',
        ),
        (b'{"after":{"customer":"a"},"op":"c"}', b'{"op":"x"}', b"[]", b""),
    ),
    "raw": Case(Raw(), (b"", b"a", b"\x00\xff" * 100)),
    "raw key": Case(Raw(column="key"), (b"k",)),
    "string": Case(String(), (b"", b"text", "é😀".encode(), b"\x00"), (b"\xff", b"a\xed\xa0\x80", b"\xc3")),
    "string latin": Case(String(column="key", encoding="iso-8859-1"), (b"", b"\xe9", b"a")),
    "string utf-16": Case(String(encoding="UTF-16-LE"), ("é😀".encode("utf-16-le"), b""), (b"\x00", b"\x00\xd8")),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_contract(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_these_options_have_no_problems(case: Case) -> None:
    assert case.format.validate("value") == []


def test_only_json_takes_a_missing_value_for_a_tombstone() -> None:
    assert (Json("a int").decodes_null, Raw().decodes_null, String().decodes_null) == (False, True, True)


def test_importing_formats_is_cheap() -> None:
    code = "import sys; from airflow_kafka_spark import formats; print({'pyarrow', 'numpy', 'pyspark'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("format", "package", "extra"),
    [
        (CASES["avro"].format, "polars", "avro"),
        (Protobuf(schema='syntax = "proto3"; message Order { int64 id = 1; }'), "grpc_tools", "protobuf"),
    ],
    ids=["avro", "protobuf"],
)
def test_a_missing_package_is_a_problem_that_names_the_extra(
    format: Format, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a))
    (problem,) = format.validate("value")
    assert f"pip install 'airflow-provider-kafka-spark[{extra}]'`, on the executors too" in str(problem)
