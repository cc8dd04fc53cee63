"""Values, names and modes of the PostgreSQL sink. Guarantees that all sinks share are tested in contract.py."""

from __future__ import annotations

import datetime as dt
import math
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_kafka_spark.sinks.base import Guarantee
from airflow_kafka_spark.sinks.postgres.sink import PostgresSink
from airflow_kafka_spark.testing import EmbeddedPostgres
from tests.sinks.attempt import apply
from tests.sinks.oracle import same_multiset
from tests.sinks.postgres.kit import Pipeline, Place, new_place, write

UTC = dt.timezone.utc
ATOMIC = ["window", "split"]


# --- values ---------------------------------------------------------------------------------------------------------------

DAYS = [dt.date(1, 1, 1), dt.date(1969, 12, 31), dt.date(2000, 1, 1), dt.date(9999, 12, 31)]
INSTANTS = [
    dt.datetime(1, 1, 1, 0, 0, 0, 1),
    dt.datetime(1969, 12, 31, 23, 59, 59, 999_999),
    dt.datetime(1999, 12, 31, 23, 59, 59, 999_999),
    dt.datetime(2026, 3, 29, 2, 30),
    dt.datetime(9999, 12, 31, 23, 59, 59, 999_999),
]
FLOATS = [0.0, -0.0, 1.5, math.nan, math.inf, -math.inf, 5e-324, 1.7976931348623157e308]
TEXTS = ["", "plain", "it's", '"', "\\", "\\N", "\\x41", "a\tb\nc\r", "Ünï日本🎉", "NULL", "{1,2}", "x" * 1_000_000]
BYTES = [b"", b"\x00\xff\\x41'\"", bytes(range(256))]

SCALARS: list[tuple[pa.DataType, list[Any], str]] = [
    (pa.bool_(), [True, False], "boolean"),
    (pa.int8(), [-128, 0, 127], "smallint"),
    (pa.int16(), [-(2**15), 2**15 - 1], "smallint"),
    (pa.int32(), [-(2**31), 2**31 - 1], "integer"),
    (pa.int64(), [-(2**63), -1, 0, 2**63 - 1], "bigint"),
    (pa.uint8(), [0, 255], "smallint"),
    (pa.uint16(), [0, 2**16 - 1], "integer"),
    (pa.uint32(), [0, 2**32 - 1], "bigint"),
    (pa.uint64(), [0, 2**63, 2**64 - 1], "numeric(20,0)"),
    (pa.float32(), [0.0, -1.5, math.nan, math.inf, 0.10000000149011612], "real"),
    (pa.float64(), FLOATS, "double precision"),
    (pa.decimal128(12, 2), [Decimal("0.00"), Decimal("-9999999999.99"), Decimal("1.20"), Decimal("100.00")], "numeric(12,2)"),
    (pa.decimal128(38, 10), [Decimal("1234567890123456789012345678.0123456789"), Decimal("-1E-10")], "numeric(38,10)"),
    (pa.decimal128(38, 38), [Decimal("0." + "9" * 38), Decimal("-1E-38")], "numeric(38,38)"),
    (pa.decimal128(5, 0), [Decimal(10_000), Decimal(-99_999)], "numeric(5,0)"),
    (pa.decimal256(76, 30), [Decimal("9" * 46 + "." + "1" * 30), Decimal("-1E-30")], "numeric(76,30)"),
    (pa.string(), TEXTS, "text"),
    (pa.large_string(), TEXTS[:-1], "text"),
    (pa.string_view(), TEXTS[:-1], "text"),
    (pa.dictionary(pa.int32(), pa.string()), TEXTS[:3], "text"),
    (pa.binary(), BYTES, "bytea"),
    (pa.large_binary(), BYTES, "bytea"),
    (pa.binary_view(), BYTES, "bytea"),
    (pa.binary(3), [b"\x00\x01\xff"], "bytea"),
    (pa.date32(), DAYS, "date"),
    (pa.date64(), DAYS, "date"),
    (pa.timestamp("us"), INSTANTS, "timestamp without time zone"),
    (pa.timestamp("us", "UTC"), [i.replace(tzinfo=UTC) for i in INSTANTS], "timestamp with time zone"),
    (pa.timestamp("us", "Europe/Berlin"), [INSTANTS[3].replace(tzinfo=UTC)], "timestamp with time zone"),
    (pa.timestamp("ms"), [INSTANTS[1].replace(microsecond=999_000)], "timestamp without time zone"),
    (pa.timestamp("s", "UTC"), [dt.datetime(1900, 1, 1, tzinfo=UTC)], "timestamp with time zone"),
    (pa.timestamp("ns", "UTC"), [dt.datetime(2200, 1, 1, 0, 0, 0, 1, UTC)], "timestamp with time zone"),
    (pa.time64("us"), [dt.time(0), dt.time(23, 59, 59, 999_999)], "time without time zone"),
    (pa.time32("s"), [dt.time(12, 34, 56)], "time without time zone"),
    (pa.duration("us"), [dt.timedelta(0), dt.timedelta(days=-3, microseconds=7)], "interval"),
]


@pytest.mark.parametrize("atomic", ATOMIC)
def test_values_of_every_scalar_type_arrive_as_they_are(place: Place, driver: str, atomic: str):
    """One column per type, created by the sink; and lists of each of them."""
    schema = pa.schema([("n", pa.int64())])
    columns: dict[str, tuple[pa.DataType, list[Any], str]] = {}
    for at, (kind, values, created) in enumerate(SCALARS):
        columns[f"c{at} {kind}"] = (kind, [*values, None], created)
        if not pa.types.is_dictionary(kind):
            short = [v if v not in TEXTS[-1:] else "" for v in values]
            columns[f"l{at} {kind}"] = (pa.list_(kind), [[*short, None], [], None, [short[0]]], f"{created}[]")
    for name, (kind, _, _) in columns.items():
        schema = schema.append(pa.field(name, kind))
    count = max(len(values) for _, values, _ in columns.values())
    expected = [{"n": i, **{name: values[i % len(values)] for name, (_, values, _) in columns.items()}} for i in range(count)]
    apply(place.sink(auto_create=True, atomic=atomic), Pipeline(schema).job(expected[:5], expected[5:]))
    found = place.connection.execute("SELECT * FROM t ORDER BY n")
    assert [d.name for d in found.description] == schema.names
    compared = 0
    for line, row in zip(expected, found.fetchall(), strict=True):
        for field, value in zip(schema, row, strict=True):
            assert _same(value, line[field.name], field.type), (field, value, line[field.name])
            compared += 1
    assert compared == count * len(schema) > 500
    types = dict(place.rows("SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = 't'::regclass"))
    assert {name: types[name] for name in columns} == {name: created for name, (_, _, created) in columns.items()}


def _same(found: Any, expected: Any, kind: pa.DataType) -> bool:
    if isinstance(expected, list):
        return len(found) == len(expected) and all(_same(f, e, kind.value_type) for f, e in zip(found, expected, strict=True))
    if isinstance(expected, float):
        as_is = repr(found) == repr(expected)
        # psycopg reads `real` as the shortest decimal that stands for it.
        return as_is if not pa.types.is_float32(kind) else repr(pa.scalar(found, kind).as_py()) == repr(expected)
    if pa.types.is_uint64(kind) and expected is not None:
        return type(found) is Decimal and found == expected
    return type(found) is type(expected) and found == expected


@pytest.mark.parametrize(
    "release, scalars, arrays",
    [("1.13.0", True, True), ("1.13.0rc1", True, True), ("2.0", True, True), ("1.12.9", True, False), ("1.11.0", False, False)],
)
def test_releases_of_adbc_that_write_wrong_values_are_not_used(
    release: str, scalars: bool, arrays: bool, monkeypatch: pytest.MonkeyPatch
):
    from airflow_kafka_spark.sinks.postgres.tasks import write as load

    monkeypatch.setattr(load, "version", lambda name: release)
    assert (load.can_use_adbc(arrays=False), load.can_use_adbc(arrays=True)) == (scalars, arrays)


@pytest.mark.parametrize("scale", [2, 9])
def test_decimals_with_any_groups_of_zeros_arrive_as_they_are(place: Place, driver: str, scale: int):
    """ADBC 1.11 read these wrong: digits come in groups of four, and groups of zeros are left out."""
    groups = [
        f"{a}{b}{c}{d}" for a in ("1", "10000") for b in ("0000", "7000") for c in ("0000", "0001") for d in ("0000", "0100")
    ]
    expected = [{"n": Decimal(f"{sign}{g}.{f[:scale]}")} for sign in ("", "-") for g in groups
                for f in ("000000000", "100000000", "000100000", "010000001")]  # fmt: skip
    schema = pa.schema([("n", pa.decimal128(38, scale))])
    write(place.sink(auto_create=True), Pipeline(schema), expected)
    assert same_multiset(expected, ({"n": n} for (n,) in place.rows("SELECT n FROM t"))) == 128


def test_digits_below_a_microsecond_are_cut(place: Place):
    schema = pa.schema([("at", pa.timestamp("ns")), ("clock", pa.time64("ns"))])
    job = Pipeline(schema).job([{}])
    batch = pa.RecordBatch.from_arrays([pa.array([1_999], pa.timestamp("ns")), pa.array([1_999], pa.time64("ns"))], schema=schema)
    object.__setattr__(job.rows[0][0], "batch", batch)
    apply(place.sink(auto_create=True), job)
    assert place.rows("SELECT * FROM t") == [(dt.datetime(1970, 1, 1, 0, 0, 0, 1), dt.time(0, 0, 0, 1))]


@pytest.mark.parametrize("atomic", ATOMIC)
def test_structs_and_maps_arrive_as_json(place: Place, driver: str, atomic: str):
    kind = pa.struct(
        [("a b", pa.int64()), ("d", pa.decimal128(30, 5)), ("t", pa.timestamp("us", "UTC")), ("l", pa.list_(pa.string()))]
    )
    schema = pa.schema(
        [("n", pa.int64()), ("s", kind), ("m", pa.map_(pa.string(), kind)), ("ll", pa.list_(pa.list_(pa.int32())))]
    )
    struct = {
        "a b": 2**62,
        "d": Decimal("12345678901234567890.12345"),
        "t": dt.datetime(2026, 1, 2, tzinfo=UTC),
        "l": ['"\\\u2028', None],
    }
    rows = [{"n": 1, "s": struct, "m": [("k\n", struct), ("x", None)], "ll": [[1, None], None, []]}, {"n": 2}]
    apply(place.sink(auto_create=True, atomic=atomic), Pipeline(schema).job(rows))
    values = """s->>'a b', s->>'d', (s->>'t')::timestamptz, s->'l'->>0, s->'l'->1, m->E'k\\n'->>'d', m ? 'x', ll"""
    query = f"SELECT n, {values} FROM t ORDER BY n"
    big = "12345678901234567890.12345"
    first, second = place.rows(query)
    assert first == (1, str(2**62), big, dt.datetime(2026, 1, 2, tzinfo=UTC), '"\\\u2028', None, big, True, [[1, None], None, []])
    assert second == (2, *[None] * 8)
    assert place.rows("SELECT s IS NULL, m IS NULL FROM t WHERE n = 2") == [(True, True)]


@pytest.mark.parametrize("atomic", ATOMIC)
def test_values_become_the_target_s_own_types(place: Place, driver: str, atomic: str):
    """The types have no Arrow type, or are narrower or wider than the values that are sent."""
    place.execute("CREATE TYPE mood AS ENUM ('sad', 'happy')")
    place.execute("CREATE DOMAIN short AS varchar(5) CHECK (VALUE <> 'never')")
    place.execute("CREATE DOMAIN document AS jsonb")
    columns = [
        ("v", "varchar(5)", pa.string(), "12345", "12345"),
        ("c", "char(5)", pa.string(), "ab", "ab   "),
        ("u", "uuid", pa.string(), "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
        ("jb", "jsonb", pa.string(), '{"b": 1, "a": [1.10]}', '{"a": [1.10], "b": 1}'),
        ("j", "json", pa.string(), '{"b":  1}', '{"b":  1}'),
        ("e", "mood", pa.string(), "happy", "happy"),
        ("i", "inet", pa.string(), "10.0.0.1/8", "10.0.0.1/8"),
        ("d1", "short", pa.string(), "12345", "12345"),
        ("d2", "document", pa.string(), "[1]", "[1]"),
        ("r", "int4range", pa.string(), "[1,5)", "[1,5)"),
        ("s", "smallint", pa.int64(), -32768, "-32768"),
        ("n", "numeric", pa.decimal128(12, 2), Decimal("1.20"), "1.20"),
        ("n2", "numeric(20,4)", pa.decimal128(12, 2), Decimal("1.20"), "1.2000"),
        ("n3", "numeric", pa.int64(), 2**63 - 1, str(2**63 - 1)),
        ("f", "double precision", pa.float32(), 0.5, "0.5"),
        ("tz", "timestamptz", pa.timestamp("us"), dt.datetime(2026, 7, 1, 12), "2026-07-01 12:00:00+00"),
        ("ts", "timestamp", pa.timestamp("us", "UTC"), dt.datetime(2026, 7, 1, 12, tzinfo=UTC), "2026-07-01 12:00:00"),
        ("t3", "timestamp(3)", pa.timestamp("us"), dt.datetime(2026, 7, 1, 12, 0, 0, 1499), "2026-07-01 12:00:00.001"),
        ("dd", "timestamptz", pa.date32(), dt.date(2026, 7, 1), "2026-07-01 00:00:00+00"),
        (
            "ua",
            "uuid[]",
            pa.list_(pa.string()),
            ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"],
            "{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}",
        ),
        ("va", "varchar(5)[]", pa.list_(pa.string()), ["12345"], "{12345}"),
        ("la", "jsonb", pa.list_(pa.int64()), [1, None], "[1, null]"),
        ("lt", "json", pa.list_(pa.string()), ['"'], '["\\""]'),
        ("st", "text", pa.struct([("a", pa.int64())]), {"a": 1}, '{"a":1}'),
        ("no", "integer", pa.null(), None, None),
    ]
    place.execute("SET TimeZone = 'UTC'")
    place.execute(f"CREATE TABLE t ({', '.join(f'{name} {kind}' for name, kind, *_ in columns)})")
    schema = pa.schema([(name, kind) for name, _, kind, _, _ in columns])
    sink, pipeline = place.sink(atomic=atomic), Pipeline(schema)
    assert sink.validate(pipeline.shape) == []
    write(sink, pipeline, [{name: value for name, _, _, value, _ in columns}, {}])
    found = place.rows(f"SELECT {', '.join(f'{name}::text' for name, *_ in columns)} FROM t ORDER BY v")
    assert found[0] == tuple(expected if name != "c" else "ab" for name, _, _, _, expected in columns)
    assert found[1] == (None,) * len(columns)


text = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=40)
ROW = st.fixed_dictionaries(
    {
        "i": st.none() | st.integers(-(2**63), 2**63 - 1),
        "t": st.none() | text,
        "b": st.none() | st.binary(max_size=40),
        "n": st.none() | st.integers(-(10**38) + 1, 10**38 - 1).map(lambda i: Decimal((i < 0, tuple(map(int, str(abs(i)))), -9))),
        "f": st.none() | st.floats(),
        "at": st.none() | st.datetimes(timezones=st.just(UTC)),
        "d": st.none() | st.dates(),
        "ts": st.none() | st.lists(st.none() | text, max_size=4),
        "ns": st.none() | st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), max_size=4),
    }
)


@pytest.mark.parametrize(
    "options", [{}, {"atomic": "split"}, {"mode": "upsert", "key": ["k"]}], ids=["append", "split", "upsert"]
)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(lines=st.lists(ROW, min_size=1, max_size=60))
def test_any_values_arrive_as_they_are(postgres: EmbeddedPostgres, unique: Callable[[str], str], options: Any, lines: list[Any]):
    schema = pa.schema(
        [("k", pa.int64()), ("i", pa.int64()), ("t", pa.string()), ("b", pa.binary()), ("n", pa.decimal128(38, 9))]
        + [("f", pa.float64()), ("at", pa.timestamp("us", "UTC")), ("d", pa.date32())]
        + [("ts", pa.list_(pa.string())), ("ns", pa.list_(pa.int64()))]
    )
    expected = [{"k": k, **line} for k, line in enumerate(lines)]
    with new_place(postgres, unique("any")) as place:
        write(place.sink(auto_create=True, **options), Pipeline(schema), expected[::2], expected[1::2])
        found = place.connection.execute("SELECT * FROM t").fetchall()
    assert same_multiset(expected, (dict(zip(schema.names, row, strict=True)) for row in found)) == len(lines)


def test_the_oracle_is_red_on_one_lost_one_doubled_and_one_swapped_row(place: Place):
    """Check an assumption of the tests above on a real table."""
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    expected = [{"id": i, "name": f"name {i}"} for i in range(50)]
    write(place.sink(auto_create=True), Pipeline(schema), expected)
    place.execute("CREATE TABLE kept AS TABLE t")

    def found() -> list[dict[str, Any]]:
        return [{"id": i, "name": n} for i, n in place.rows("SELECT * FROM t")]

    assert same_multiset(expected, found()) == 50
    for damage in (
        "DELETE FROM t WHERE id = 7",
        "INSERT INTO t SELECT * FROM t WHERE id = 7",
        "UPDATE t SET name = CASE id WHEN 7 THEN 'name 8' ELSE 'name 7' END WHERE id IN (7, 8)",
        "TRUNCATE t",
    ):
        place.execute(damage)
        with pytest.raises(AssertionError):
            same_multiset(expected, found())
        place.execute("TRUNCATE t; INSERT INTO t TABLE kept")
        assert same_multiset(expected, found()) == 50


# --- names ----------------------------------------------------------------------------------------------------------------

AWKWARD = [
    "user",
    "order",
    'Select "x"',
    "é",
    "a.b",
    "semi; DROP TABLE t; --",
    "per%cent %s",
    "new\nline",
    "{}",
    "$1",
    " blank ",
    "x" * 63,
]


@pytest.mark.parametrize(
    "table, options",
    [
        ("user", {}),
        ('Select "x"', {"atomic": "split"}),
        ("t; DROP TABLE t", {"mode": "upsert"}),
        ("Ünï cödé", {}),
        ("per%cent{}", {"atomic": "split"}),
        ("x" * 63, {"mode": "upsert"}),
    ],
)
def test_identifiers_are_just_names(place: Place, driver: str, options: dict[str, Any], table: str):
    """A column called `user` must not become the session's user, nor anything else a statement."""
    schema = pa.schema([("id", pa.int64()), *((name, pa.string()) for name in AWKWARD), ("doc", pa.struct([("a", pa.string())]))])
    key = {"key": ["id", AWKWARD[2]]} if options.get("mode") else {}
    sink = place.sink('"' + table.replace('"', '""') + '"', auto_create=True, offset_columns=True, **options, **key)
    pipeline = Pipeline(schema, "a 'pipeline'; \\ \"%s\"", topic="to.pic-1")
    expected = [{"id": i, **{name: f"{i} of {name}" for name in AWKWARD}, "doc": {"a": "'"}} for i in range(20)]
    assert sink.validate(pipeline.shape) == []
    write(sink, pipeline, expected[:10], expected[10:])
    assert sink.validate(pipeline.shape) == []
    assert table in place.tables()
    quoted = '"' + table.replace('"', '""') + '"'
    cursor = place.connection.execute(f"SELECT * FROM {quoted}".encode())
    found = [dict(zip([d.name for d in cursor.description], row, strict=True)) for row in cursor]
    origins = Counter(
        (line.pop("__connect_topic"), line.pop("__connect_partition"), line.pop("__connect_offset")) for line in found
    )
    assert same_multiset(expected, found) == 20
    assert origins == Counter(("to.pic-1", p, o) for p in range(2) for o in range(10))
    assert sink.find_last_applied(pipeline.shape.pipeline).written == 20


@pytest.mark.parametrize(
    "written, parts",
    [
        ("orders", (None, "orders")),
        ("sales.orders", ("sales", "orders")),
        ("Sales.Orders", ("Sales", "Orders")),
        ('"My Schema"."t.able"', ("My Schema", "t.able")),
        ('sales."a""b"', ("sales", 'a"b')),
        (" sales . orders ", ("sales", "orders")),
    ],
)
def test_tables_are_named_as_written(written: str, parts: tuple):
    from airflow_kafka_spark.hooks.databases import parse_name

    assert parse_name(written) == parts


@pytest.mark.parametrize("written", ["", " ", ".", "a.b.c", "a.", ".b", '"a', 'a"b', '""', '"a"b', "a\x00b"])
def test_what_names_no_table_is_refused(written: str):
    from airflow_kafka_spark.hooks.databases import parse_name

    with pytest.raises(ValueError):
        parse_name(written)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(value=text | st.text(alphabet="'\\\"; -%$\n", max_size=20), strict=st.booleans())
def test_literals_and_identifiers_are_read_back_as_they_are(postgres: EmbeddedPostgres, value: str, strict: bool):
    from airflow_kafka_spark.hooks.databases import quote, quote_literal

    with postgres.connect(autocommit=True) as connection:
        connection.execute(f"SET standard_conforming_strings = {'on' if strict else 'off'}")
        assert connection.execute(f"SELECT {quote_literal(value)}".encode()).fetchone() == (value,)
        if 0 < len(value.encode()) <= 63:
            cursor = connection.execute(f"SELECT 1 AS {quote(value)}".encode())
            assert cursor.description[0].name == value


# --- as a value --------------------------------------------------------------------------------------------------------------


def test_guarantees_are_those_of_atomic():
    assert PostgresSink("c", "t").guarantee is Guarantee.EXACTLY_ONCE
    assert PostgresSink("c", "t", atomic="split").guarantee is Guarantee.EXACTLY_ONCE_PER_SPLIT


def test_uris_name_the_table_and_no_password(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE", "postgres://me:s3cret@db.example:5433/shop")
    sink = PostgresSink("warehouse", 'sales."Order items"')
    assert sink.uri == "postgres://db.example:5433/shop/sales/Order%20items"
    assert sink.asset_uri == "x-postgres://warehouse/sales/Order%20items"
    assert PostgresSink("warehouse", "t").asset_uri == "x-postgres://warehouse/public/t"
    assert "{{ params.table }}" in PostgresSink("warehouse", "{{ params.table }}").asset_uri
    assert "s3cret" not in repr(sink) + repr(sink.find_server()) + str(sink.find_server())


def test_asset_uris_pass_airflow_unchanged():
    from airflow.sdk import Asset

    uri = PostgresSink("warehouse", "sales.orders").asset_uri
    assert Asset(uri=uri).uri == uri


def test_importing_the_sink_loads_no_driver():
    import subprocess
    import sys

    code = (
        "import sys, airflow_kafka_spark.sinks.postgres.sink; "
        "print([m for m in ('psycopg', 'pyarrow', 'airflow', 'adbc_driver_manager') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_a_key_may_be_given_as_one_name_or_a_list():
    assert PostgresSink("c", "t", mode="upsert", key="id") == PostgresSink("c", "t", mode="upsert", key=["id"])
    assert hash(PostgresSink("c", "t", key=["id"])) == hash(PostgresSink("c", "t", key=("id",)))
