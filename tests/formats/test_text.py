"""Lines of JSON and CSV: Python's standard parsers read back exactly the written values."""

from __future__ import annotations

import csv
import datetime as dt
import io
import json
import math
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_kafka_spark.formats.tasks.text import format_csv_header, format_csv_lines, format_json_lines
from tests.formats.budget import examples

UTC = dt.timezone.utc
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.none() | st.integers(-(2**63), 2**63 - 1),
            "text": st.none() | TEXT,
            "ratio": st.none() | st.floats(),
            "money": st.none() | st.decimals(-(10**9), 10**9, places=10),
            "at": st.none() | st.datetimes(),
            "day": st.none() | st.dates(),
            "list": st.none() | st.lists(st.none() | TEXT),
            "struct": st.none() | st.fixed_dictionaries({"a": st.none() | TEXT, "b": st.none() | st.booleans()}),
            "map": st.none() | st.dictionaries(TEXT, st.none() | st.integers(-9, 9)),
            "structs": st.none() | st.lists(st.none() | st.fixed_dictionaries({"x": st.none() | st.integers(-9, 9)})),
        }
    )
)
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("text", pa.string()),
        ("ratio", pa.float64()),
        ("money", pa.decimal128(38, 10)),
        ("at", pa.timestamp("us")),
        ("day", pa.date32()),
        ("list", pa.list_(pa.string())),
        ("struct", pa.struct([("a", pa.string()), ("b", pa.bool_())])),
        ("map", pa.map_(pa.string(), pa.int64())),
        ("structs", pa.list_(pa.struct([("x", pa.int64())]))),
    ]
)


def batch_of(rows: list[dict], schema: pa.Schema) -> pa.RecordBatch:
    rows = [{k: list(v.items()) if k == "map" and v is not None else v for k, v in row.items()} for row in rows]
    return pa.RecordBatch.from_pylist([{n: row[n] for n in schema.names} for row in rows], schema)


def in_json(name, value):
    """Return the result that Python's parser must have for a value, with fractional numbers as Decimal."""
    if isinstance(value, float):
        return str(Decimal(repr(value))).replace("nan", "NaN") if not math.isfinite(value) else Decimal(repr(value))
    if isinstance(value, (dt.datetime, dt.date)):
        return value.isoformat(timespec="microseconds") if isinstance(value, dt.datetime) else value.isoformat()
    if name == "struct":
        return {k: v for k, v in value.items() if v is not None}
    if name == "structs":
        return [v and {k: x for k, x in v.items() if x is not None} for v in value]
    return value


@settings(max_examples=examples(60), deadline=None)
@given(ROWS, st.integers(0, 5))
def test_json_lines_are_what_was_given_and_nulls_are_left_out(rows, skipped):
    """This holds for a slice, too, whose buffers begin at another place."""
    text = format_json_lines(batch_of(rows, SCHEMA).slice(skipped)).to_pybytes().decode()
    found = [json.loads(line, parse_float=Decimal) for line in text.split("\n")[:-1]]
    assert found == [{k: in_json(k, v) for k, v in row.items() if v is not None} for row in rows[skipped:]]


@settings(max_examples=examples(60), deadline=None)
@given(ROWS, st.integers(0, 5), st.sampled_from(",;\t|"))
def test_csv_lines_are_what_was_given(rows, skipped, delimiter):
    schema = pa.schema([f for f in SCHEMA if f.name in ("id", "text", "money", "at", "day")])
    text = (
        format_csv_header(schema.names, delimiter)
        + format_csv_lines(batch_of(rows, schema).slice(skipped), delimiter).to_pybytes()
    ).decode()
    header, *found = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    assert header == schema.names

    def cell(value):
        return format(value, "f") if isinstance(value, Decimal) else "" if value is None else str(in_json("", value))

    assert found == [[cell(row[n]) for n in schema.names] for row in rows[skipped:]]


def test_an_empty_text_is_not_null_in_csv():
    batch = pa.record_batch({"a": pa.array(["", None]), "b": pa.array([None, ""])})
    assert format_csv_lines(batch).to_pybytes() == b'"",\n,""\n'


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ([1.0, -0.0, 1e22, math.nan], pa.float64(), ["1.0", "-0.0", "1e+22", '"NaN"']),
        ([math.inf, -math.inf], pa.float64(), ['"Infinity"', '"-Infinity"']),
        ([0.1, 16777216.0], pa.float32(), ["0.1", "16777216.0"]),
        ([Decimal("0E-10"), Decimal("-1.5")], pa.decimal128(38, 10), ["0.0000000000", "-1.5000000000"]),
        ([dt.datetime(2026, 11, 20, 12, 34, 56, tzinfo=UTC)], pa.timestamp("us", "UTC"), ['"2026-11-20T12:34:56.000000Z"']),
        ([dt.datetime(2026, 7, 1, 12, tzinfo=UTC)], pa.timestamp("ms", "Europe/Berlin"), ['"2026-07-01T12:00:00.000000Z"']),
        ([dt.datetime(1, 1, 1)], pa.timestamp("us"), ['"0001-01-01T00:00:00.000000"']),
        ([b"\x00\xff", b""], pa.binary(), ['"AP8="', '""']),
        ([True, False], pa.bool_(), ["true", "false"]),
        ([[(1, "x")], []], pa.map_(pa.int32(), pa.string()), ['{"1":"x"}', "{}"]),
        ([{"a": None}, {"a": 1}], pa.struct([("a", pa.int8())]), ["{}", '{"a":1}']),
        (["a", "b"], pa.dictionary(pa.int8(), pa.string()), ['"a"', '"b"']),
        (["a"], pa.large_string(), ['"a"']),
        ([[1, None]], pa.list_(pa.int8(), 2), ["[1,null]"]),
        ([[1]], pa.large_list(pa.int8()), ["[1]"]),
    ],
)  # fmt: skip
def test_values_are_written_as_spark_writes_them(values, kind, expected):
    batch = pa.record_batch({"x": pa.array([*values, None], kind)})
    lines = format_json_lines(batch).to_pybytes().decode().splitlines()
    assert lines == [*(f'{{"x":{text}}}' for text in expected), "{}"]


def test_names_of_columns_are_escaped():
    batch = pa.record_batch({'a"b': pa.array([1]), "c,d\n": pa.array([2])})
    assert json.loads(format_json_lines(batch).to_pybytes()) == {'a"b': 1, "c,d\n": 2}
    assert format_csv_header(batch.schema.names) == b'"a""b","c,d\n"\n'


def test_no_rows_are_no_bytes():
    batch = pa.RecordBatch.from_pylist([], SCHEMA)
    assert format_json_lines(batch).size == 0
    assert format_csv_lines(batch.select(["id", "text"])).size == 0
