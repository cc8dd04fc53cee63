"""Reading with Spark: each split is a partition, values of all types are equal, and no secret is visible."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime, timezone
from decimal import Decimal
from math import inf, nan

import pytest

from airflow_kafka_spark.errors import SourceRejected
from airflow_kafka_spark.hooks.databases import quote
from airflow_kafka_spark.sources.base import SplitReader
from airflow_kafka_spark.sources.jdbc.postgres import LOCK_CLASS, MICROS, MICROS_BEFORE_14
from airflow_kafka_spark.sources.jdbc.source import JdbcSource
from tests.sinks.postgres.kit import Place
from tests.sources.jdbc.kit import Types, check_types, depth, source_of, through_json, type_names, windows
from tests.sources.jdbc.spark_process import JdbcSpark
from tests.support.waiting import eventually


@pytest.fixture
def spark(jdbc_spark: JdbcSpark) -> JdbcSpark:
    return jdbc_spark


def utc(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=timezone.utc)  # type: ignore[misc,arg-type]


# The values as SQL.
TYPES: Types = [
    ("smallint", "smallint", [("-32768", -32768), ("32767", 32767)]),
    ("integer", "int", [("-2147483648", -(2**31))]),
    ("bigint", "bigint", [("-9223372036854775808", -(2**63)), ("9223372036854775807", 2**63 - 1)]),
    ("real", "float", [("1.5", 1.5), ("'NaN'", nan), ("'-Infinity'", -inf)]),
    ("double precision", "double", [("0.1", 0.1), ("5e-324", 5e-324), ("'NaN'", nan), ("'Infinity'", inf)]),
    ("boolean", "boolean", [("true", True), ("false", False)]),
    ("oid", "bigint", [("4294967295", 2**32 - 1)]),
    (
        "numeric",
        "string",
        [
            ("0.1234567890123456789012345678901234567890123", "0.1234567890123456789012345678901234567890123"),
            ("'NaN'", "NaN"),
            ("1.50", "1.50"),
        ],
    ),
    (
        "numeric(38, 10)",
        "decimal(38,10)",
        [("-9999999999999999999999999999.9999999999", Decimal("-9999999999999999999999999999.9999999999"))],
    ),
    ("numeric(12, 0)", "decimal(12,0)", [("999999999999", Decimal(999999999999))]),
    ("numeric(39, 2)", "string", [("1234567890123456789012345678901234567.89", "1234567890123456789012345678901234567.89")]),
    ("numeric(2, 5)", "string", [("0.00012", "0.00012")]),
    ("numeric(3, -2)", "string", [("12345", "12300")]),
    ("money", "string", [("12.34", "$12.34")]),
    ("text", "string", [("''", ""), ("E'a\\nb\\\\\"''é𝄞'", "a\nb\\\"'é𝄞")]),
    ("varchar(3)", "string", [("'abc'", "abc")]),
    ("char(4)", "string", [("'ab'", "ab  ")]),
    ("bpchar", "string", [("'ab '", "ab ")]),
    ("char(4)[]", "array<string>", [("'{ab,NULL}'", ["ab  ", None])]),
    ("padded[]", "array<string>", [("'{ab}'", ["ab  "])]),
    ('"char"', "string", [("'x'", "x")]),
    ("name", "string", [("'x'", "x")]),
    ("bytea", "binary", [("'\\x00ff27'", b"\x00\xff'"), ("''", b"")]),
    ("uuid", "string", [("'6F9619FF-8B86-D011-B42D-00C04FC964FF'", "6f9619ff-8b86-d011-b42d-00c04fc964ff")]),
    ("json", "string", [("'{\"a\":  1}'", '{"a":  1}')]),
    ("jsonb", "string", [("'{\"a\":  1e400}'", '{"a": 1' + "0" * 400 + "}")]),
    (
        "timestamptz",
        "timestamp",
        [
            ("'2026-03-29 02:30:00.123456+02'", utc(2026, 3, 29, 0, 30, 0, 123456)),
            ("'0001-01-01 00:00:00.000001+00'", utc(1, 1, 1, 0, 0, 0, 1)),
            ("'9999-12-31 23:59:59.999999+00'", utc(9999, 12, 31, 23, 59, 59, 999999)),
            ("'1582-10-10 00:00:00+00'", utc(1582, 10, 10)),
            ("'1890-01-01 00:00:00+00'", utc(1890, 1, 1)),
            ("'1969-12-31 23:59:59.999999+00'", utc(1969, 12, 31, 23, 59, 59, 999999)),
        ],
    ),
    (
        "timestamp",
        "timestamp_ntz",
        [
            ("'2026-03-29 02:30:00.123456'", datetime(2026, 3, 29, 2, 30, 0, 123456)),
            ("'0001-01-01 00:00:00.000001'", datetime(1, 1, 1, 0, 0, 0, 1)),
            ("'9999-12-31 23:59:59.999999'", datetime(9999, 12, 31, 23, 59, 59, 999999)),
            ("'1582-10-10 00:00:00'", datetime(1582, 10, 10)),
            ("'1893-04-01 00:03:00'", datetime(1893, 4, 1, 0, 3)),
        ],
    ),
    ("timestamp(3)", "timestamp_ntz", [("'2026-01-01 00:00:00.1239'", datetime(2026, 1, 1, 0, 0, 0, 124000))]),
    (
        "date",
        "date",
        [
            ("'0001-01-01'", date(1, 1, 1)),
            ("'9999-12-31'", date(9999, 12, 31)),
            ("'1582-10-10'", date(1582, 10, 10)),
            ("'2011-12-30'", date(2011, 12, 30)),
        ],
    ),
    ("time", "string", [("'24:00:00'", "24:00:00"), ("'01:02:03.000004'", "01:02:03.000004")]),
    ("timetz", "string", [("'01:02:03+05:30'", "01:02:03+05:30")]),
    ("interval", "string", [("'1 year -2 days 3.5 seconds'", "1 year -2 days +00:00:03.5")]),
    ("inet", "string", [("'10.0.0.1/8'", "10.0.0.1/8")]),
    ("macaddr", "string", [("'08:00:2b:01:02:03'", "08:00:2b:01:02:03")]),
    ("bit(3)", "string", [("B'101'", "101")]),
    ("point", "string", [("'(1.5,2)'", "(1.5,2)")]),
    ("int4range", "string", [("'[1,5)'", "[1,5)")]),
    ("tsvector", "string", [("'a b'", "'a' 'b'")]),
    ("mood", "string", [("'it''s'", "it's")]),
    ("positive", "int", [("7", 7)]),
    ("pair", "string", [("ROW(1, 'a,b')", '(1,"a,b")')]),
    ("integer[]", "array<int>", [("'{1,NULL,-3}'", [1, None, -3]), ("'{}'", [])]),
    ("bigint[]", "array<bigint>", [("'{9223372036854775807}'", [2**63 - 1])]),
    ("smallint[]", "array<smallint>", [("'{1,2}'", [1, 2])]),
    ("boolean[]", "array<boolean>", [("'{t,f,NULL}'", [True, False, None])]),
    ("real[]", "array<float>", [("'{1.5}'", [1.5])]),
    ("double precision[]", "array<double>", [("'{0.1,Infinity}'", [0.1, inf])]),
    ("text[]", "array<string>", [("ARRAY['a,b', '', NULL, 'NULL', E'\"\\\\{}']", ["a,b", "", None, "NULL", '"\\{}'])]),
    ("varchar(5)[]", "array<string>", [("'{a,b}'", ["a", "b"])]),
    ("numeric[]", "array<string>", [("'{1.10,NaN}'", ["1.10", "NaN"])]),
    (
        "numeric(10,2)[]",
        "array<decimal(10,2)>",
        [("'{1.1,NULL,-99999999.99}'", [Decimal("1.10"), None, Decimal("-99999999.99")])],
    ),
    ("uuid[]", "array<string>", [("'{6f9619ff-8b86-d011-b42d-00c04fc964ff}'", ["6f9619ff-8b86-d011-b42d-00c04fc964ff"])]),
    ("bytea[]", "array<binary>", [("ARRAY['\\x00ff'::bytea, NULL, '']", [b"\x00\xff", None, b""])]),
    ("jsonb[]", "array<string>", [('ARRAY[\'{"a": "b,c"}\'::jsonb]', ['{"a": "b,c"}'])]),
    (
        "timestamptz[]",
        "array<timestamp>",
        [
            (
                "ARRAY['2026-03-29 02:30:00.123456+02', NULL, '0001-01-01 00:00:00+00', "
                "'9999-12-31 23:59:59.999999+00']::timestamptz[]",
                [utc(2026, 3, 29, 0, 30, 0, 123456), None, utc(1, 1, 1), utc(9999, 12, 31, 23, 59, 59, 999999)],
            ),
        ],
    ),
    (
        "timestamp[]",
        "array<timestamp_ntz>",
        [("ARRAY['2026-03-29 02:30:00.5', NULL]::timestamp[]", [datetime(2026, 3, 29, 2, 30, 0, 500000), None])],
    ),
    ("date[]", "array<date>", [("ARRAY['0001-01-01', NULL, '9999-12-31']::date[]", [date(1, 1, 1), None, date(9999, 12, 31)])]),
    ("mood[]", "array<string>", [("ARRAY['sad']::mood[]", ["sad"])]),
    ("integer[][]", "string", [("'{{1,2},{3,NULL}}'", "[[1,2],[3,null]]")]),
]


def test_every_type_survives_by_value(place: Place, spark: JdbcSpark) -> None:
    """This includes NULL of each type, and a JVM whose time zone has skipped hours and days of another calendar."""
    place.execute("CREATE TYPE mood AS ENUM ('sad', 'it''s'); CREATE DOMAIN positive AS integer CHECK (VALUE > 0)")
    place.execute("CREATE TYPE pair AS (a int, b text); CREATE DOMAIN padded AS char(4)")
    names = [quote(name) for name in type_names(TYPES)]
    columns = ", ".join(f"{name} {kind}" for name, (kind, _, _) in zip(names, TYPES, strict=True))
    place.execute(f"CREATE TABLE t (id int PRIMARY KEY, {columns})")
    for number in range(depth(TYPES)):
        present = [(name, values[number][0]) for name, (_, _, values) in zip(names, TYPES, strict=True) if number < len(values)]
        into, written = (", ".join(part) for part in zip(*present, strict=True))
        place.execute(f"INSERT INTO t (id, {into}) VALUES ({number}, {written})")
    place.execute(f"INSERT INTO t (id) VALUES ({depth(TYPES)})")
    source = source_of(place, cursor="id", split_records=2)
    assert source.validate() == []
    check_types(spark.read(source, source.freeze(None).splits), TYPES)


def test_both_ways_to_count_microseconds_agree(place: Place) -> None:
    """Older servers need the second way."""
    place.execute("CREATE TABLE t (at timestamptz)")
    series = "generate_series(0, 119950) n"
    place.execute(
        f"INSERT INTO t SELECT '0001-01-01 00:00:00.000001+00'::timestamptz + n * interval '1 month 1.000001 s' FROM {series}"
    )
    place.execute(
        "INSERT INTO t VALUES ('9999-12-31 23:59:59.999999+00'), ('1969-12-31 23:59:59.999999+00'), ('4713-01-01 00:00:00 BC')"
    )
    for cast in ("timestamptz", "timestamp"):
        expressions = [text.format(c=f"at::{cast}") for text in (MICROS, MICROS_BEFORE_14)]
        assert place.one(f"SELECT count(*) FROM t WHERE {expressions[0]} <> {expressions[1]}") == 0
    assert place.one("SELECT count(*) FROM t") == 119954


UNHELD = [
    ("timestamptz", "infinity", 'column "a {b}\'s" holds infinity'),
    ("timestamp", "-infinity", 'column "a {b}\'s" holds -infinity'),
    ("date", "infinity", 'column "a {b}\'s" holds infinity'),
    ("timestamptz[]", "{infinity}", 'column "a {b}\'s" holds infinity'),
    ("date[]", "{infinity}", 'column "a {b}\'s" holds infinity'),
    ("integer[]", "{{1,2},{3,4}}", 'column "a {b}\'s" holds an array of more than one dimension: 2'),
    ("numeric(5,2)", "NaN", 'column "a {b}\'s" holds NaN'),
    ("numeric(5,2)[]", "{NaN}", 'column "a {b}\'s" holds NaN'),
]


def test_what_spark_cannot_hold_is_refused_and_named(place: Place, spark: JdbcSpark) -> None:
    for kind, value, message in UNHELD:
        place.execute(f'DROP TABLE IF EXISTS t; CREATE TABLE t (id int PRIMARY KEY, "a {{b}}\'s" {kind})')
        place.execute(f"INSERT INTO t VALUES (1, '{value}')")
        source = source_of(place)
        assert source.validate() == []
        error = spark.read(source, source.freeze(None).splits).error
        assert message in error, kind
        explained = source.explain(RuntimeError(error))
        assert explained is not None and f"{message}. Correct the row" in str(explained), kind


def test_partition_i_is_split_i(place: Place, spark: JdbcSpark) -> None:
    """The order is the given one, for all, some or none of the splits, and at each attempt."""
    place.execute('CREATE TABLE t (a text COLLATE "C", b int, n int PRIMARY KEY)')
    place.execute(
        "INSERT INTO t SELECT CASE WHEN n % 7 > 0 THEN chr(65 + n % 3) || '''' END, n % 5, n FROM generate_series(1, 100) n"
    )
    source = source_of(place, key=("a", "b"), include_columns=["n"], split_records=9)
    frozen = through_json(source.freeze(None))
    answer = spark.read(source, frozen.splits)
    assert len(answer.parts) == len(frozen.splits)
    assert sorted(row["n"] for part in answer.parts for row in part) == list(range(1, 101))
    assert {row["n"] % 7 for row in answer.parts[-1]} == {0}
    ids = [sorted(row["n"] for row in part) for part in answer.parts]
    some = spark.read(source, [frozen.splits[3], frozen.splits[0]])
    assert [sorted(row["n"] for row in part) for part in some.parts] == [ids[3], ids[0]]
    assert spark.read(source, []).parts == ()
    assert spark.read(source, []).types == {"n": "int"}


def test_tasks_wait_while_max_sessions_sessions_read(place: Place, spark: JdbcSpark) -> None:
    place.execute("CREATE TABLE t (id int PRIMARY KEY)")
    place.execute("INSERT INTO t SELECT generate_series(1, 40)")
    source = source_of(place, split_records=10, max_sessions=2)
    assert source.validate() == []
    splits = source.freeze(None).splits
    reader = source.make_reader(splits, None)
    assert isinstance(reader, SplitReader)
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_try_advisory_lock%' AND pid <> pg_backend_pid()"
    with place.server.connect(autocommit=True) as other, ThreadPoolExecutor(2) as pool:
        other.execute(f"SELECT pg_advisory_lock({LOCK_CLASS}, slot) FROM generate_series(1, 2) slot".encode())
        by_task = pool.submit(lambda: sum(batch.num_rows for n in range(4) for batch in reader.read(n)))
        by_spark = pool.submit(spark.read, source, splits)
        assert eventually(lambda: place.rows(f"{waiting} AND state = 'active'")[0][0] >= 2)
        assert not by_task.done() and not by_spark.done()
        # The one that is free suffices for all tasks, one after the other.
        other.execute(f"SELECT pg_advisory_unlock({LOCK_CLASS}, 2)".encode())
        assert by_task.result(120) == 40
        answer = by_spark.result(120)
    assert not answer.error and sorted(row["id"] for part in answer.parts for row in part) == list(range(1, 41))
    held = f"SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = {LOCK_CLASS}"
    assert eventually(lambda: place.rows(held) == [(0,)])


def test_windows_in_a_row_give_each_row_once_through_spark(place: Place, spark: JdbcSpark) -> None:
    place.execute("CREATE TABLE t (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), n int, at timestamptz NOT NULL)")
    place.execute(
        "INSERT INTO t (n, at) SELECT n, date_trunc('hour', now()) - n % 3 * interval '1 day' FROM generate_series(1, 60) n"
    )
    source = source_of(place, timestamp_column="at", delay=7200, max_records=25, split_records=6, include_columns=["n"])
    place.execute("UPDATE t SET at = at - interval '3 h'")
    found = [row["n"] for frozen in windows(source) for part in spark.read(source, frozen.splits).parts for row in part]
    assert sorted(found) == list(range(1, 61))


def test_a_query_is_read_by_spark(place: Place, spark: JdbcSpark) -> None:
    place.execute("CREATE TABLE t (id int PRIMARY KEY)")
    place.execute("INSERT INTO t SELECT generate_series(1, 10)")
    place.execute('CREATE VIEW "v?" AS SELECT * FROM t')
    marks = "'{\"?\": 1}'::jsonb ? '?' AND '{}'::jsonb ?| ARRAY[E'\\'?', $a$'?$a$, '''?'] IS FALSE /* ? */"
    query = f'WITH x AS (SELECT id, \'a\' AS "User" FROM {place.quoted}."v?" WHERE {marks}) SELECT * FROM x -- the ? end'
    source = JdbcSource(place.conn_id, query=query, cursor="id", split_records=4)
    answer = spark.read(source, source.freeze(None).splits)
    assert [[row["id"] for row in part] for part in answer.parts] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    assert answer.types == {"id": "int", "User": "string"}


def test_the_password_is_nowhere_to_be_seen(place: Place, spark: JdbcSpark) -> None:
    """Plans, logs, errors and the event log, which the Spark UI shows, do not contain the password."""
    secret = "s3cr3t&p%40ss"
    place.execute("CREATE TABLE t (id int PRIMARY KEY)")
    place.execute("INSERT INTO t VALUES (1)")
    with place.connect_as_new_role(secret) as role:
        place.execute(f"GRANT USAGE ON SCHEMA {place.quoted} TO {role}; GRANT SELECT ON t TO {role}")
        source = source_of(place)
        splits = source.freeze(None).splits
        good = spark.read(source, splits)
        place.execute(f"REVOKE SELECT ON t FROM {role}")
        bad = spark.read(source, splits)
        assert good.parts == ([{"id": 1}],)
        assert "permission denied" in bad.error

        def written() -> str:
            """Return all traces once Spark has reported the end of both reads."""
            text = spark.traces
            started, ended = (text.count(f"SparkListenerSQLExecution{which}") for which in ("Start", "End"))
            return text if text.count(place.schema.rpartition('"')[2]) > 1 and started == ended else ""

        traces = eventually(written)
        assert "JDBCRelation" in traces
        said = [
            traces,
            good.plan,
            bad.error,
            repr(source),
            source.uri,
            repr(source.find_database()),
            repr(source.find_database().make_reader_options(1, source.limits)),
        ]
        assert not any(secret in text for text in said)


def test_a_column_that_is_gone_is_reported_before_spark_reads(place: Place, spark: JdbcSpark) -> None:
    place.execute("CREATE TABLE t (id int PRIMARY KEY, x int)")
    place.execute("INSERT INTO t VALUES (1, 1)")
    source = source_of(place, include_columns=["id", "x"])
    splits = source.freeze(None).splits
    place.execute("ALTER TABLE t DROP COLUMN x")
    assert "there is no column `x`" in spark.read(source, splits).error
    with pytest.raises(SourceRejected):
        source.find_columns()
