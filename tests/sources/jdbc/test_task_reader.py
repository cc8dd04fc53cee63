"""The two ways from a table to records, the JVM's (the reference) and the tasks' own: results are equal byte for byte."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from airflow_kafka_spark.errors import SourceRejected, SourceUnavailable
from airflow_kafka_spark.formats import Json, Raw, String
from airflow_kafka_spark.hooks.databases import APPLICATION, SESSION_ENDED
from airflow_kafka_spark.sinks.kafka.sink import KafkaSink
from airflow_kafka_spark.sources.base import SplitReader
from airflow_kafka_spark.sources.jdbc.source import JdbcSource
from airflow_kafka_spark.testing import EmbeddedKafka, EmbeddedPostgres
from airflow_kafka_spark.testing._processes import wait_until
from tests.sinks.postgres.kit import Place
from tests.sources.contract import spark_session
from tests.sources.jdbc.kit import through_json
from tests.support.oracle import committed_records
from tests.support.shop import SPLIT, shop

# Every character that JSON could treat in its own way, and neighbours of what it does.
CHARACTERS = [*map(chr, range(1, 0x180)), *"\u2028\u2029\ufeff\ufffd\ufffe\uffff\ud7ff\ue000", "𝄞", "\U0010ffff", "e\u0301"]
TEXTS = ["", "'", '"', "\\", '\\"', "\\\\n", "\\u0041", "</script>", "null", " a ", "a" * 70_000, "".join(CHARACTERS)]

# Type -> values in SQL; NULL of each comes by itself.
SERVED: dict[str, list[str]] = {
    "smallint": ["-32768", "0", "32767"],
    "integer": ["-2147483648", "2147483647"],
    "bigint": ["-9223372036854775808", "9223372036854775807"],
    "oid": ["0", "4294967295"],
    "boolean": ["true", "false"],
    "numeric(12,2)": ["0", "-0.01", "9999999999.99", "-9999999999.99", "0.10"],
    "numeric(38,0)": ["9" * 38, "-1"],
    "numeric(6,6)": ["0.000001", "0", "-0.999999"],
    "numeric(20,10)": ["0", "0.0000000001", "-0.0000001230", "0.000001", "0.0000009999", "1.0000000000", "10000000.0000000001"],
    "numeric(38,38)": ["0", "0." + "0" * 37 + "1", "-0." + "9" * 38],
    "numeric(7,7)": ["0", "0.0000001", "0.0000010"],
    "numeric": ["'NaN'", "1e-20", "1e20", "0.1234567890123456789012345678901234567890123"],
    "numeric(39,2)": ["1234567890123456789012345678901234567.89"],
    "numeric(3,-2)": ["12345"],
    "text": [],
    "varchar(5)": ["'a\"b\\c'"],
    "char(4)": ["'ab'", "''"],
    '"char"': ["'x'"],
    "bytea": ["''", "'\\x00'", "'\\x00ff27'", "'\\x" + "ab" * 100 + "'", "'\\x" + "fbff" * 60 + "'"],
    "uuid": ["'6F9619FF-8B86-D011-B42D-00C04FC964FF'"],
    "json": ["'{\"a\":  1,\n \"b\":\t\"\\u00e9\\\\\"}'"],
    "jsonb": ["'{\"a\":  1e40, \"b\": [\"\\\"\"]}'"],
    "timestamptz": [
        "'2026-03-29 02:30:00.123456+02'", "'1970-01-01 00:00:00+00'", "'1969-12-31 23:59:59.999999+00'",
        "'0001-01-01 00:00:00+00'", "'9999-12-31 23:59:59.999999+00'", "'0001-12-31 23:59:59.999999+00 BC'",
        "'4714-11-24 00:00:00+00 BC'", "'10000-01-01 00:00:00.5+00'", "'294246-12-31 23:59:59.999999+00'",
        "'1582-10-10 00:00:00+00'", "'1890-01-01 00:00:00+00'", "'0999-01-01 00:00:00.000100+00'",
        "'2001-01-01 00:00:00+00 BC'",
    ],
    "timestamp": [
        "'2026-03-29 02:30:00.1'", "'0001-01-01 00:00:00'", "'9999-12-31 23:59:59.999999'", "'0001-12-31 23:59:59.999999 BC'",
        "'4714-11-24 00:00:00 BC'", "'10000-01-01 00:00:00'", "'294246-12-31 23:59:59.999999'", "'1582-10-10 00:00:00'",
    ],
    "timestamp(3)": ["'2026-01-01 00:00:00.1239'"],
    "date": [
        "'0001-01-01'", "'9999-12-31'", "'0001-12-31 BC'", "'4714-11-24 BC'", "'10000-01-01'", "'5874897-12-31'", "'1582-10-10'",
    ],
    "time": ["'24:00:00'", "'01:02:03.000004'"],
    "interval": ["'1 year -2 days 3.5 seconds'"],
    "inet": ["'10.0.0.1/8'"],
    "money": ["12.34"],
    "int4range": ["'[1,5)'"],
    "mood": ["'it''s'"],
    "positive": ["7"],
    "label": ["'a\"b'"],
    "pair": ["ROW(1, 'a,\"b')"],
    "integer[][]": ["'{{1,2},{3,NULL}}'"],
}  # fmt: skip


def source_of(place: Place, table: str = "t", **options: Any) -> JdbcSource:
    return JdbcSource(place.conn_id, f'{place.quoted}."{table}"', **options)


Records = list[list[dict[str, Any]]]


def both(source: JdbcSource, sink: KafkaSink) -> tuple[Records, Records]:
    """The records of each split, in order: as Spark makes them, and as tasks do."""
    from pyspark.sql import functions as F

    from airflow_kafka_spark.jobs.chain import SETTINGS, use_sql_settings

    splits = through_json(source.freeze(None)).splits
    spark = spark_session()
    with use_sql_settings(spark, {**SETTINGS, **source.settings}):
        frame = sink.make_records(source.read_frame(spark, splits))
        expected: Records = [[] for _ in splits]
        for row in frame.withColumn("__part", F.spark_partition_id()).toArrow().to_pylist():
            expected[row.pop("__part")].append(row)
    reader = source.make_reader(splits, sink.columns)
    assert isinstance(reader, SplitReader), reader
    encoder = sink.make_encoder(reader.columns)
    assert not isinstance(encoder, str), encoder
    found = [[row for batch in reader.read(n) for row in encoder.encode(batch).to_pylist()] for n in range(len(splits))]
    return expected, found


def same(expected: Records, found: Records) -> int:
    """Assert that they are; how many were compared."""
    assert len(expected) == len(found)
    compared = 0
    for n, (want, have) in enumerate(zip(expected, found, strict=True)):
        assert len(want) == len(have), f"split {n}: {len(have)} records, not {len(want)}"
        for one, other in zip(want, have, strict=True):
            assert one == other, f"split {n}: {other}, not {one}"
            compared += 1
    assert compared
    return compared


def quoted(name: str) -> str:
    return '"{}"'.format(name.replace('"', '""'))


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def hostile_table(place: Place) -> tuple[dict[str, str], int]:
    """A table ``t`` of all types that tasks read: its columns' names and types, and how many rows it has."""
    place.execute("CREATE TYPE mood AS ENUM ('sad', 'it''s'); CREATE DOMAIN positive AS integer CHECK (VALUE > 0)")
    place.execute("CREATE DOMAIN label AS varchar(20); CREATE TYPE pair AS (a int, b text)")
    values = {kind: list(given) for kind, given in SERVED.items()}
    values["text"] = [*map(literal, TEXTS), *(literal(f"a{character}b") for character in CHARACTERS)]
    names = {f"{kind}: é`\\\"'\t{n}": kind for n, kind in enumerate(values)}
    columns = ", ".join(f"{quoted(name)} {kind}" for name, kind in names.items())
    place.execute(f"CREATE TABLE t (id int PRIMARY KEY, {columns})")
    depth = max(map(len, values.values()))
    for number in range(depth):
        present = [(quoted(name), values[kind][number]) for name, kind in names.items() if number < len(values[kind])]
        into, written = (", ".join(part) for part in zip(*present, strict=True))
        place.execute(f"INSERT INTO t (id, {into}) VALUES ({number}, {written})")
    return names, depth


@pytest.mark.parametrize("present", ["all rows", "no NULL"])
def test_json_of_every_type_is_the_same(place: Place, present: str) -> None:
    """Names with everything in them, hostile values, NULL of each; without any NULL, texts are put together in another way."""
    names, depth = hostile_table(place)
    if present == "no NULL":
        # Missing values are filled with the existing ones.
        for name in map(quoted, names):
            known = f"SELECT {name} AS v, row_number() OVER () - 1 AS n, count(*) OVER () AS c FROM t WHERE {name} IS NOT NULL"
            place.execute(f"WITH k AS ({known}) UPDATE t SET {name} = k.v FROM k WHERE k.n = t.id % k.c AND t.{name} IS NULL")
            assert place.one(f"SELECT count(*) FROM t WHERE {name} IS NULL") == 0
    sink = KafkaSink("x", Json(), key=tuple(names))
    assert same(*both(source_of(place, split_records=100), sink)) == depth > 400


TEXTUAL = ["smallint", "bigint", "boolean", "numeric(12,2)", "numeric(38,0)", "text", "char(4)", "uuid", "jsonb", "timestamptz"]
TEXTUAL += ["timestamp", "timestamp(3)", "date", "interval", "numeric"]


def test_texts_as_keys_and_headers_are_the_same(place: Place) -> None:
    names, depth = hostile_table(place)
    by_kind = {kind: name for name, kind in names.items()}
    # A header has the text that the value has in the record.
    headers = {f"h{n}": by_kind[kind] for n, kind in enumerate(TEXTUAL)}
    sink = KafkaSink("x", String(), value_columns=(by_kind["timestamptz"],), key=("id",), headers=headers)
    compared = same(*both(source_of(place, split_records=300), sink))
    for kind in ("text", "bytea", "json"):
        sink = KafkaSink("x", Raw(), value_columns=(by_kind[kind],), key=(by_kind["text"],))
        compared += same(*both(source_of(place), sink))
    assert compared == depth * 4


def test_topic_partition_and_time_are_the_same(place: Place) -> None:
    place.execute("CREATE TABLE t (id int PRIMARY KEY, topic text, part smallint, ms bigint, at timestamptz, local timestamp)")
    place.execute(
        "INSERT INTO t SELECT n, 'topic ' || n % 3, nullif(n % 4, 3), nullif(n * 1000, 5000), ts, ts AT TIME ZONE 'UTC' FROM ("
        "SELECT n, CASE WHEN n % 7 > 0 THEN '1970-01-01 00:00:00+00'::timestamptz + (n - 50) * interval '0.000333 s' END AS ts "
        "FROM generate_series(1, 100) n) AS q"
    )
    compared = 0
    for time in ("ms", "at", "local"):
        sink = KafkaSink(None, Json(), value_columns=("id",), topic_column="topic", partition="part", timestamp=time)
        compared += same(*both(source_of(place, split_records=60), sink))
    assert compared == 300


def test_random_rows_are_the_same(place: Place) -> None:
    """The rows are of all sizes, in many splits, by a composite key that contains NULL."""
    chance = random.Random(20261121)
    place.execute(
        "CREATE TABLE t (a text, b bigint, amount numeric(14,2), fine numeric(18,9), free numeric, body text, raw bytea, "
        "at timestamptz, day date, yes boolean, doc jsonb)"
    )
    alphabet = [*'abc \n\t"\\/é𝄞\x01\x7f\u2028', "\x1f"]
    rows = []
    for n in range(5000):
        body = "".join(chance.choices(alphabet, k=int(chance.expovariate(0.05))))
        amount, fine = chance.randint(-(10**13), 10**13), chance.randint(-(10 ** chance.randint(0, 17)), 10**17)
        at = f"{chance.randint(1, 9999):04}-03-01 12:00:00.{chance.randint(0, 999999):06}+00"
        row: list[Any] = [
            chance.choice("xyz\"'é"), n, f"{amount}e-2", f"{fine}e-9", f"{fine}e{chance.randint(-30, 5)}", body,
            chance.randbytes(chance.randint(0, 60)), at,
            f"{chance.randint(1, 9999):04}-12-31", chance.random() < 0.5, '{"k": "' + "x" * chance.randint(0, 9) + '"}',
        ]  # fmt: skip
        rows.append([None if chance.random() < 0.05 else value for value in row])
    with place.connection.cursor() as cursor:
        cursor.executemany("INSERT INTO t VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)", rows)
    sink = KafkaSink("x", Json(), key=("a", "b"), headers={"h": "body"}, timestamp="at")
    assert same(*both(source_of(place, key=("a", "b"), split_records=700), sink)) == 5000


def test_what_is_not_exact_is_left_to_spark(place: Place) -> None:
    """A column of such a type is refused only if it is needed."""
    for kind in ("real", "double precision", "integer[]", "text[]"):
        place.execute("DROP TABLE IF EXISTS t")
        place.execute(f'CREATE TABLE t (id int PRIMARY KEY, "not exact" {kind})')
        place.execute("INSERT INTO t (id) VALUES (1)")
        source = source_of(place)
        assert source.make_reader(source.freeze(None).splits, None) == f"column `not exact` is of type {kind}"
    sink = KafkaSink("x", Json(), value_columns=("id",), key=("id",))
    assert same(*both(source, sink)) == 1


def test_what_a_format_is_not_sure_of_is_left_to_spark() -> None:
    sink = KafkaSink("x", String(), value_columns=("a",), key=("k",))
    assert "`k`" in str(sink.make_encoder([("k", "fine decimal"), ("a", "text")]))
    assert "Spark only" in str(sink.make_encoder([("k", "text"), ("a", "binary")]))
    utf16 = KafkaSink("x", String(encoding="UTF-16"), value_columns=("a",))
    assert "Spark only" in str(utf16.make_encoder([("a", "text")]))
    dated = KafkaSink("x", Json(), timestamp="a")
    assert "`a`" in str(dated.make_encoder([("a", "date")]))


def test_days_before_the_first_year_are_the_same_in_an_array(place: Place) -> None:
    place.execute("CREATE TABLE t (id int PRIMARY KEY, day date, days date[], at timestamptz, times timestamptz[])")
    place.execute("INSERT INTO t (id, day, at) VALUES (1, '0002-12-31 BC', '0002-12-31 23:59:59.5+00 BC')")
    place.execute("UPDATE t SET days = ARRAY[day], times = ARRAY[at]")
    source = source_of(place)
    records = KafkaSink("x", Json()).make_records(source.read_frame(spark_session(), source.freeze(None).splits))
    value = json.loads(records.collect()[0]["value"])
    assert (value["days"], value["times"]) == ([value["day"]], [value["at"]])


UNHELD = [
    ("timestamptz", "infinity", 'column "a {b}\'s" holds infinity'),
    ("timestamp", "-infinity", 'column "a {b}\'s" holds -infinity'),
    ("date", "infinity", 'column "a {b}\'s" holds infinity'),
    ("timestamptz", "294276-12-31 23:59:59+00", 'column "a {b}\'s" holds 294276'),
    ("timestamp", "294247-01-10 04:00:54.775808", 'column "a {b}\'s" holds 294247'),
    ("numeric(5,2)", "NaN", 'column "a {b}\'s" holds NaN'),
    ("numeric(9,8)", "NaN", 'column "a {b}\'s" holds NaN'),
]


def test_what_spark_cannot_hold_is_refused_here_too(place: Place) -> None:
    for kind, value, message in UNHELD:
        place.execute(f'DROP TABLE IF EXISTS t; CREATE TABLE t (id int PRIMARY KEY, "a {{b}}\'s" {kind})')
        place.execute(f"INSERT INTO t VALUES (1, '{value}')")
        source = source_of(place)
        reader = source.make_reader(source.freeze(None).splits, None)
        assert isinstance(reader, SplitReader)
        with pytest.raises(SourceRejected) as raised:
            list(reader.read(0))
        assert str(raised.value).startswith(f'Source {place.quoted}."t": {message}') and "Correct the row" in str(raised.value)


def test_a_server_that_goes_away_is_worth_another_try_and_the_password_is_nowhere(place: Place) -> None:
    place.execute("CREATE TABLE t (id int PRIMARY KEY, x text)")
    place.execute("INSERT INTO t SELECT n, repeat('x', 1000) FROM generate_series(1, 20000) n")
    secret = "s3cr3t&p%40ss"
    with place.connect_as_new_role(secret) as role:
        place.execute(f"GRANT USAGE ON SCHEMA {place.quoted} TO {role}; GRANT SELECT ON t TO {role}")
        source = source_of(place)
        reader = source.make_reader(source.freeze(None).splits, None)
        assert isinstance(reader, SplitReader)
        batches = reader.read(0)
        assert next(batches).num_rows
        place.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'")
        with pytest.raises(SourceUnavailable, match=SESSION_ENDED) as broken:
            list(batches)
        place.execute(f"REVOKE SELECT ON t FROM {role}")
        with pytest.raises(SourceRejected, match="permission denied") as refused:
            list(reader.read(0))
        place.execute(f"ALTER ROLE {role} NOLOGIN")
        with pytest.raises((SourceRejected, SourceUnavailable), match="not permitted to log in") as closed:
            list(reader.read(0))
        said = [repr(reader), *(str(error.value) for error in (broken, refused, closed))]
        assert not any(secret in text for text in said)


def test_a_process_reads_its_splits_in_one_session_as_long_as_that_answers(place: Place) -> None:
    place.execute("CREATE TABLE t (id int PRIMARY KEY)")
    place.execute("INSERT INTO t SELECT generate_series(1, 40)")
    with place.connect_as_new_role("secret") as role:
        place.execute(f"GRANT USAGE ON SCHEMA {place.quoted} TO {role}; GRANT SELECT ON t TO {role}")
        of_role = f"SELECT pid FROM pg_stat_activity WHERE usename = '{role}' AND application_name = '{APPLICATION}'"

        def read(**options: Any) -> list[int]:
            """Read all splits, and return the sessions that are left."""
            source = source_of(place, split_records=10, **options)
            splits = source.freeze(None).splits
            reader = source.make_reader(splits, None)
            assert isinstance(reader, SplitReader)
            found = [value for at in range(len(splits)) for batch in reader.read(at) for value in batch.column(0).to_pylist()]
            assert sorted(found) == list(range(1, 41)) and len(splits) == 4
            return [pid for (pid,) in place.rows(of_role)]

        # A source with a limit leaves no session behind, whose lock others would wait for.
        assert read(max_sessions=1) == []
        (first,) = read()
        assert read() == [first]
        place.execute(f"SELECT pg_terminate_backend({first}, 5000)")
        (second,) = read()
        assert second != first
        idle = place.rows(f"SELECT state, backend_xmin FROM pg_stat_activity WHERE pid = {second}")
        assert idle in ([("idle", None)], [])  # it holds no snapshot
        assert wait_until(lambda: not place.rows(of_role), 60)


def test_through_the_operator_both_ways_publish_the_same(
    kafka: EmbeddedKafka, postgres: EmbeddedPostgres, unique: Callable[[str], str], tmp_path: Path
) -> None:
    """Key, value, partition, and the order of each split's records."""
    found: list[dict[tuple[int, int], list[tuple[bytes | None, bytes | None]]]] = []
    for how in ("task", "spark"):
        with shop(kafka, postgres, unique, tmp_path, read_with=how) as orders:
            orders.sell(2 * SPLIT)
            assert orders.run()["records_written"] == 2 * SPLIT
            assert orders.check() == 2 * SPLIT
            places: dict[tuple[int, int], list[tuple[bytes | None, bytes | None]]] = {}
            for partition, _, key, value in sorted(committed_records(kafka.connection_extra(), orders.topic)):
                places.setdefault((partition, int(key or b"") // SPLIT), []).append((key, value))
            found.append(places)
    assert found[0] == found[1]
    assert len(found[0]) == 3 * 2


def test_tasks_that_are_to_read_and_cannot_are_refused(
    kafka: EmbeddedKafka, postgres: EmbeddedPostgres, unique: Callable[[str], str], tmp_path: Path
) -> None:
    with shop(kafka, postgres, unique, tmp_path, read_with="task") as orders:
        with postgres.connect(autocommit=True) as connection:
            connection.execute(f'ALTER TABLE "{orders.table}" ADD COLUMN share real')
        orders.sell(1)
        with pytest.raises(Exception, match="`share` is of type real"):
            orders.run()
