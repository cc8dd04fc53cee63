"""Values of all types in PostgreSQL and MariaDB against the copies that a pipeline writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from airflow_kafka_spark.errors import SourceRejected
from airflow_kafka_spark.sources import JdbcSource
from tests.sinks.postgres.kit import Place
from tests.support.mariadb import is_mysql
from tests.verification.conftest import MARIA
from tests.verification.test_verify import named, verify

Types = Sequence[tuple[str, str, Sequence[tuple[str, str]], str]]

# Type in the source, type in the sink, SQL of values that are equal there, and of another value in the sink.
POSTGRES: Types = [
    ("smallint", "bigint", [("-7", "-7")], "8"),
    ("boolean", "boolean", [("true", "true"), ("false", "false")], "NULL"),
    ("boolean", "integer", [("true", "1"), ("false", "0")], "2"),
    ("numeric(12,2)", "numeric", [("1.50", "1.5"), ("100", "100.000"), ("-0.05", "-0.0500"), ("0", "0.00")], "1.51"),
    ("numeric", "text", [("1.50", "'1.50'"), ("'NaN'", "'NaN'")], "'1.51'"),
    ("integer", "numeric(10,2)", [("100", "100"), ("0", "0")], "100.01"),
    ("real", "double precision", [("0.1", "0.1"), ("3e38", "3e38"), ("'NaN'", "'NaN'")], "0.2"),
    ("float8", "double precision", [("0.1", "0.1"), ("'-Infinity'", "'-Infinity'"), ("0", "'-0'")], "0.10000000000000002"),
    ("float8", "double precision", [("'Infinity'::float8 - 'Infinity'", "'NaN'")], "0"),
    ("float8", "real", [("3.4028234663852886e38", "3.4028234663852886e38"), ("-1e-40", "-1e-40"), ("1e-50", "0")], "1e38"),
    ("text", "varchar(20)", [("''", "''"), ("'a|b'", "'a|b'"), ("'é𝄞'", "'é𝄞'"), ("'x '", "'x '")], "'x'"),
    ("char(4)", "text", [("'ab'", "'ab  '")], "'abc'"),
    ("bytea", "bytea", [("'\\x00ff'", "'\\x00ff'"), ("''", "''")], "'\\x00'"),
    ("uuid", "text", [("'6f9619ff-8b86-d011-b42d-00c04fc964ff'", "'6F9619FF-8B86-D011-B42D-00C04FC964FF'")], "''"),
    ("json", "jsonb", [('\'{"b": 1, "a":  2}\'', '\'{"a": 2, "b": 1}\'')], "'{}'"),
    ("jsonb", "text", [("'{\"a\":1}'", "'{\"a\": 1}'")], "'{}'"),
    (
        "timestamptz",
        "timestamp",
        [("'2026-03-29 02:30:00.123456+02'", "'2026-03-29 00:30:00.123456'"), ("'infinity'", "'infinity'")],
        "'2026-03-29 00:30:00.123457'",
    ),
    ("timestamp", "timestamptz", [("'0001-01-01 00:00:00.5'", "'0001-01-01 00:00:00.5+00'")], "'2026-01-01 00:00:00+00'"),
    ("date", "date", [("'0044-03-15 BC'", "'0044-03-15 BC'"), ("'2011-12-30'", "'2011-12-30'")], "'2011-12-31'"),
    ("date", "timestamp", [("'2011-12-30'", "'2011-12-30'")], "'2011-12-30 00:00:01'"),
    ("time", "text", [("'01:02:03.5'", "'01:02:03.500000'"), ("'10:00:00'", "'10:00:00'")], "'01:02:03'"),
    ("interval", "text", [("'1 year -2 days'", "'1 year -2 days'")], "''"),
    ("inet", "inet", [("'10.0.0.1/8'", "'10.0.0.1/8'")], "'10.0.0.1'"),
    ("text[]", "text[]", [("ARRAY['a,b', NULL, '']", "ARRAY['a,b', NULL, '']")], "'{}'"),
    ("money", "text", [("12.34::numeric::money", "'$12.34'")], "''"),
]

MARIADB: Types = [
    ("tinyint", "smallint", [("-128", "-128")], "0"),
    ("tinyint(1)", "boolean", [("1", "true"), ("0", "false")], "NULL"),
    ("bigint unsigned", "numeric(20,0)", [("18446744073709551615", "18446744073709551615")], "1"),
    ("decimal(12,4)", "numeric(12,4)", [("1.5", "1.5"), ("-100", "-100"), ("0.0001", "0.0001")], "1.5001"),
    ("decimal(65,30)", "text", [("1234.1", "'1234.100000000000000000000000000000'")], "''"),
    ("float", "real", [("0.1", "0.1"), ("16777216", "16777216"), ("-0.5", "-0.5")], "0.2"),
    ("float", "double precision", [("0.1", "0.1")], "0.2"),
    ("double", "double precision", [("0.1", "0.1"), ("1.7976931348623157e308", "1.7976931348623157e308")], "0.2"),
    ("bit(1)", "boolean", [("b'1'", "true"), ("b'0'", "false")], "NULL"),
    ("bit(5)", "bigint", [("b'10001'", "17")], "16"),
    ("varchar(20)", "text", [("'é𝄞''|'", "'é𝄞''|'"), ("''", "''"), ("'x '", "'x '")], "NULL"),
    ("varchar(20) CHARACTER SET latin1", "text", [("'éß'", "'éß'")], "'eß'"),
    ("char(4)", "text", [("'ab'", "'ab'")], "'ab '"),
    ("json", "jsonb", [('\'{"b": 1.50, "a": [null, "é"]}\'', '\'{"a": [null, "é"], "b": 1.5}\'')], "'{}'"),
    ("enum('z','a')", "text", [("'z'", "'z'"), ("'a'", "'a'")], "'0'"),
    ("set('a','b')", "text", [("'a,b'", "'a,b'")], "'a'"),
    ("binary(3)", "bytea", [("X'00FF'", "'\\x00ff00'")], "'\\x00ff'"),
    ("longblob", "bytea", [("X'00FF27'", "'\\x00ff27'"), ("''", "''")], "NULL"),
    ("date", "date", [("'0001-01-01'", "'0001-01-01'"), ("'9999-12-31'", "'9999-12-31'")], "'1999-12-31'"),
    ("datetime(6)", "timestamp", [("'1999-12-31 23:59:59.999999'", "'1999-12-31 23:59:59.999999'")], "'2000-01-01'"),
    ("datetime", "timestamp", [("'0001-01-01 00:00:00'", "'0001-01-01'")], "'0001-01-01 00:00:00.000001'"),
    (
        "timestamp(6) NULL",
        "timestamptz",
        [("'2026-03-29 02:30:00.123456'", "'2026-03-29 02:30:00.123456+00'")],
        "'2026-03-29 02:30+00'",
    ),
    ("time(3)", "text", [("'-837:59:59.120'", "'-837:59:59.12'"), ("'10:00:00'", "'10:00:00.000'")], "'10:00:01'"),
    ("year", "integer", [("2026", "2026")], "26"),
]
if not is_mysql():
    MARIADB += [
        ("uuid", "uuid", [("'6f9619ff-8b86-d011-b42d-00c04fc964ff'", "'6f9619ff-8b86-d011-b42d-00c04fc964ff'")], "NULL"),
        ("inet6", "text", [("'::1'", "'::1'")], "'::2'"),
        ("longtext", "json", [("'1'", "'1.0'"), (r"""'"\\ud800"'""", r"""'"\ud800"'""")], """'{"number":"1e0"}'"""),
    ]


def depth(types: Types) -> int:
    return max(len(values) for _, _, values, _ in types)


def rows_of(types: Types, side: int) -> list[str]:
    """Return the rows as SQL; the last row is NULL in all columns."""
    return [
        ", ".join([str(n), *(values[n][side] if n < len(values) else "NULL" for _, _, values, _ in types)])
        for n in range(depth(types) + 1)
    ]


def columns_of(types: Types, side: int) -> str:
    return "id int PRIMARY KEY, " + ", ".join(f"c{n} {kinds[side]}" for n, kinds in enumerate(types))


def make_sink(place: Place, types: Types) -> None:
    place.connection.execute("SET TimeZone = 'UTC'")
    place.connection.execute(f"CREATE TABLE t ({columns_of(types, 1)})".encode())
    for row in rows_of(types, 1):
        place.connection.execute(f"INSERT INTO t VALUES ({row})".encode())


def check(place: Place, source: JdbcSource, types: Types) -> None:
    """Check that both tables are equal, and that a changed value and a NULL are found in each column."""
    found = verify(place, source=source, on_difference="warn")
    assert named(found) == [] and found["sink_rows"] == depth(types) + 1
    changes = ", ".join(f"c{n} = {other}" for n, (_, _, _, other) in enumerate(types))
    place.connection.execute(f"UPDATE t SET {changes} WHERE id = 0".encode())
    changed = verify(place, source=source, on_difference="warn")
    names = [f"c{n}" for n in range(len(types))]
    assert named(changed) == [{"kind": "different", "key": {"id": 0}, "columns": names}]
    # A number that is copied as a text, and a binary value: their forms may be empty, as that of NULL is.
    for n, (kind, copy, _, _) in enumerate(types):
        if copy != "bytea" and (kind[:7], copy) not in (("numeric", "text"), ("decimal", "text")):
            continue
        place.connection.execute(f"UPDATE t SET c{n} = '' WHERE id = {depth(types)}".encode())
        emptied = verify(place, source=source, on_difference="warn", where="id > 0")
        assert {tuple(found["columns"]) for found in named(emptied)} == {(f"c{n}",)}
        place.connection.execute(f"UPDATE t SET c{n} = NULL WHERE id = {depth(types)}".encode())


def test_values_of_all_types_of_postgresql_are_equal_to_their_copies_and_changed_ones_are_found(place: Place) -> None:
    place.connection.execute("SET lc_monetary = 'C'")
    place.connection.execute(f"CREATE TABLE s ({columns_of(POSTGRES, 0)})".encode())
    for row in rows_of(POSTGRES, 0):
        place.connection.execute(f"INSERT INTO s VALUES ({row})".encode())
    make_sink(place, POSTGRES)
    check(place, JdbcSource(place.conn_id, f"{place.quoted}.s"), POSTGRES)


def test_values_of_all_types_of_mariadb_are_equal_to_their_copies_and_changed_ones_are_found(place: Place, maria: Any) -> None:
    maria.execute(f"CREATE TABLE s ({columns_of(MARIADB, 0)})")
    for row in rows_of(MARIADB, 0):
        maria.execute(f"INSERT INTO s VALUES ({row})")
    make_sink(place, MARIADB)
    check(place, JdbcSource(MARIA, "s"), MARIADB)
    without = [f"c{n}" for n, (kind, *_) in enumerate(MARIADB) if kind in ("float", "double", "json")]
    found = verify(place, source=JdbcSource(MARIA, "s"), exclude_columns=without, on_difference="warn")
    assert found["different"] == 1, "the databases compute all sums"
    place.connection.execute("DELETE FROM t WHERE id = 0")
    found = verify(place, source=JdbcSource(MARIA, "s"), exclude_columns=without, on_difference="warn")
    assert named(found) == [{"kind": "missing", "key": {"id": 0}}]


def test_values_that_are_too_long_for_functions_of_mariadb_are_never_equal_unread(place: Place, maria: Any, mariadb: Any) -> None:
    for table, letter in (("s", "x"), ("t", "y")):
        maria.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, a longtext, b longtext, raw longblob)")
        maria.execute(f"INSERT INTO {table} VALUES (1, REPEAT('x', 9000), REPEAT('{letter}', 9000), REPEAT('{letter}', 9000))")
    sides: dict[str, Any] = {"source": JdbcSource(MARIA, "s"), "sink": JdbcSource(MARIA, "t"), "on_difference": "warn"}
    maria.execute("SELECT @@GLOBAL.max_allowed_packet")
    ((limit,),) = maria.fetchall()
    maria.execute("SET GLOBAL max_allowed_packet = 16384")
    try:
        # The text of a row is longer than the limit, those of its values are not.
        found = verify(place, **sides, exclude_columns=["raw"])
        assert named(found) == [{"kind": "different", "key": {"id": 1}, "columns": ["b"]}]
        with pytest.raises(SourceRejected, match="`raw` has more bytes than half of the server's `max_allowed_packet`"):
            verify(place, **sides, exclude_columns=["a", "b"])
        maria.execute("UPDATE t SET b = (SELECT b FROM s)")
        assert verify(place, **sides, exclude_columns=["raw"])["equal"]
    finally:
        maria.execute(f"SET GLOBAL max_allowed_packet = {limit}")
