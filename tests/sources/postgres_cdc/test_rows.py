"""Rows of a snapshot, read by COPY: their values, and whole columns of them as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from airflow_kafka_spark.sources.cdc.tasks.columns import format_column
from airflow_kafka_spark.sources.postgres_cdc.tasks import read as reading
from airflow_kafka_spark.sources.postgres_cdc.tasks.read import read_chunk_rows
from airflow_kafka_spark.sources.postgres_cdc.tasks.session import SESSION
from airflow_kafka_spark.sources.postgres_cdc.tasks.snapshot import PostgresTableShape, read_table_shape
from airflow_kafka_spark.sources.postgres_cdc.tasks.values import ValueTypes
from tests.sinks.postgres.kit import Place
from tests.sources.postgres_cdc.kit import log_of

ORDINARY = 300
"""Rows with values that whole columns are formatted with."""

_MICROS = "(random() * 3e17 - 6e16)::bigint"
_INSTANT = f"'epoch'::timestamp + {_MICROS} * interval '1 microsecond'"
_ZONED = f"'epoch'::timestamptz + {_MICROS} * interval '1 microsecond'"
_TEXT = "(SELECT string_agg(chr(1 + (random() * 600)::int + n * 0), '' ORDER BY s) FROM generate_series(1, 20) s)"
# type, an expression of ordinary values, and unusual ones
TYPES: list[tuple[str, str, list[str]]] = [
    ("boolean", "random() < 0.5", []),
    ("smallint", "(random() * 60000 - 30000)::int", []),
    ("int", "(random() * 4e9 - 2e9)::int", []),
    ("bigint", "(random() * 1.8e19 - 9e18)::bigint", []),
    ("oid", "(random() * 4e9)::bigint::oid", []),
    ("text", _TEXT, [r"E'\uFEFF'", "''", r"'\N'", r"'\.'", r"E'\r\n'", r"E'\x1f'", "'\"'", "'\U0001f600'"]),
    ("varchar(30)", "n::text", ["''"]),
    ("char(5)", "chr(97 + n % 26)", ["''"]),
    ("uuid", "gen_random_uuid()", []),
    ("json", "json_build_object('a', n, 'b', chr(34))", ["'null'"]),
    ("jsonb", "jsonb_build_object('a', n, 'b', chr(10))", ["'[]'"]),
    ("real", "n::real / 8", ["random()", "'NaN'", "'Infinity'", "-0.0", "1e-5", "1e6", "3.4028235e38", "16777216"]),
    ("double precision", "n::double precision / 16", ["random()", "'NaN'", "-0.0", "1e15", "1e16", "1e-4", "1e-5", "2 ^ (-44)"]),
    ("numeric(12,2)", "random() * 2e10 - 1e10", ["0", "-0.01"]),
    ("numeric(9)", "random() * 2e9 - 1e9", ["0"]),
    ("numeric(3,3)", "random() - 0.5", ["0.5"]),
    ("numeric(4,-2)", "random() * 1e5", ["0"]),
    ("numeric(30,4)", "(random() * 1e14)::numeric", ["-12345678901234567890123456.7891"]),
    ("numeric", "round((random() * 1e6)::numeric, n % 7)", ["1e30", "1e-30", "100.00", "0.000"]),
    ("date", f"({_INSTANT})::date", ["'infinity'", "'-infinity'", "'0044-03-15 BC'", "'20000-01-01'", "'0001-01-01'"]),
    ("timestamp", _INSTANT, ["'infinity'", "'-infinity'", "'0044-03-15 BC'", "'20000-01-01'", "'0001-01-01'"]),
    ("timestamp(0)", _INSTANT, ["'infinity'"]),
    ("timestamp(3)", _INSTANT, ["'1969-12-31 23:59:59.999'"]),
    ("timestamp(4)", _INSTANT, ["'1969-12-31 23:59:59.9999'"]),
    ("timestamptz", _ZONED, ["'infinity'", "'0044-03-15 BC'", "'20000-01-01'", "'2026-01-01 00:00:00+00'"]),
    ("timestamptz(0)", _ZONED, ["'infinity'"]),
    ("timestamptz(3)", _ZONED, ["'2026-01-01 00:00:00.5+00'"]),
    ("time", f"({_INSTANT})::time", ["'24:00:00'", "'00:00:00'"]),
    ("time(3)", f"({_INSTANT})::time", ["'23:59:59.999'"]),
    ("timetz", f"({_ZONED})::timetz", ["'24:00:00+05:30'"]),
    ("interval", f"{_MICROS} % 1000000000 * interval '1 microsecond'", ["'1 year -3 days'"]),
    ("money", "n * 1.5", ["-1234.5"]),
    ("bytea", "decode(md5(n::text), 'hex')", ["''"]),
    ("bit(1)", "(n % 2)::int::bit", []),
    ("bit(12)", "n::int::bit(12)", []),
    ("int[]", "ARRAY[n, NULL, -n]", ["'{}'", "'[0:1]={1,2}'"]),
    ("text[]", "ARRAY[n::text, 'a,b']", ["ARRAY['a\"b', NULL]"]),
    ("int4range", "int4range(n::int, n::int + 3)", ["'empty'"]),
    ("point", "point(n, n / 2)", []),
    ("inet", "'10.0.0.1'::inet + n", ["'10.0.0.1/8'"]),
]  # fmt: skip
BY_VALUE = ("numeric(4,-2)", "timetz", "interval", "money", "bytea", "bit(1)", "bit(12)", "int[]", "text[]", "point")
"""The types that are formatted value by value."""

FORMS = (
    ValueTypes("precise", "adaptive"), ValueTypes("string", "connect"), ValueTypes("double", "adaptive_time_microseconds"),
)  # fmt: skip


@pytest.fixture
def table(place: Place) -> Iterator[tuple[psycopg.Connection[Any], PostgresTableShape]]:
    """A table of all types in a session with the settings of tasks: ordinary values, unusual ones, and nulls in between."""
    columns = ", ".join(f"c{at} {kind}" for at, (kind, _, _) in enumerate(TYPES))
    place.execute(f"CREATE TABLE many (id int PRIMARY KEY, {columns})")
    ordinary = ", ".join(f"CASE WHEN n % 10 > 0 THEN {found} END" for _, found, _ in TYPES)
    place.execute(f"INSERT INTO many SELECT n, {ordinary} FROM generate_series(1, {ORDINARY}) n")
    for at, (kind, _, unusual) in enumerate(TYPES):
        for number, literal in enumerate(unusual):
            place.execute(f"INSERT INTO many (id, c{at}) VALUES ({1000 + at * 100 + number}, ({literal})::{kind})")
    with log_of(place, "many") as log, place.server.connect(autocommit=True) as connection:
        connection.execute(SESSION)
        shape = read_table_shape(connection, log.name, (place.schema, "many"))
        assert shape is not None
        yield connection, shape


def read(connection: psycopg.Connection[Any], shape: PostgresTableShape) -> list[pa.Array]:
    pieces = list(read_chunk_rows(connection, {"after": None, "upto": None}, shape))
    return [pa.concat_arrays(parts) for parts in zip(*pieces, strict=True)]


def fail(raw: bytes) -> NoReturn:
    raise AssertionError(f"{raw!r} was converted by itself")


def test_whole_columns_become_the_json_that_single_values_become(table):
    connection, shape = table
    ids, *columns = read(connection, shape)
    is_ordinary = pc.less_equal(ids.cast(pa.int32()), ORDINARY)
    wrong = {}
    for types in FORMS:
        for (kind, _, _), column, array in zip(TYPES, shape.relation.columns[1:], columns, strict=True):
            found = types.find_converter(column.type_oid, column.modifier)
            expected = [None if raw is None else found.convert(raw) for raw in array.to_pylist()]
            whole = format_column(array, found.form, found.convert).as_json().to_pylist()
            wrong |= {(types.decimals, kind, a): b for a, b in zip(whole, expected, strict=True) if a != b}
            if kind not in BY_VALUE and not (types.decimals == "double" and kind.startswith("numeric")):
                ordinary = format_column(array.filter(is_ordinary), found.form, fail).as_json()
                assert ordinary == pa.array(expected, pa.string()).filter(is_ordinary)
            assert None in expected
    assert wrong == {}


def test_values_are_those_that_the_server_writes_however_they_are_cut_into_pieces(table, monkeypatch):
    connection, shape = table
    at = next(index for index, (kind, _, _) in enumerate(TYPES) if kind == "text") + 1
    expected = [row[0] for row in connection.execute(f"SELECT c{at - 1} FROM {shape.source}".encode())]
    texts = [None if raw is None else raw.decode() for raw in read(connection, shape)[at].to_pylist()]
    assert texts == expected and {"", None, "\ufeff", "\\.", "\r\n"} <= set(texts)
    alone = replace(shape, relation=replace(shape.relation, columns=(shape.relation.columns[at],)))
    for name, size in (("PIECE_ROWS", 1), ("PIECE_ROWS", 7), ("PIECE_BYTES", 50)):
        monkeypatch.setattr(reading, name, size)
        assert [None if raw is None else raw.decode() for raw in read(connection, alone)[0].to_pylist()] == expected


def test_an_error_of_the_server_behind_some_rows_is_raised(table):
    connection, shape = table
    with pytest.raises(psycopg.errors.DivisionByZero):
        read(connection, replace(shape, row_filter="1 / (id - 250) < 10"))
    assert connection.execute("SELECT 1").fetchone() == (1,)
