"""Arrow's results are equal to Spark's, value by value and type by type."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyspark
import pytest
from pyspark.errors import ArithmeticException, NumberFormatException, SparkRuntimeException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from airflow_kafka_spark.jobs.arrow import Unknown, make_program
from airflow_kafka_spark.jobs.tasks.arrow import ExpressionFailed, Program, whole_part
from airflow_kafka_spark.transforms import (
    Cast,
    Condition,
    Filter,
    InsertField,
    MaskField,
    ReplaceField,
    TopicNameMatches,
    apply_chain,
)
from tests.transforms.cases import Outcome, table_of

# Spark 3.5 makes no DataFrame of an Arrow table.
pytestmark = pytest.mark.skipif(pyspark.__version__ < "4", reason="needs PySpark 4")

NAN, INFINITE = float("nan"), float("inf")
BASE = datetime(1970, 1, 1, tzinfo=timezone.utc)

INTEGERS = [None, 0, 1, -1, 7, 127, -128, 128, 32767, -32769, 2**31 - 1, -(2**31), 2**31, 2**53 + 1, 2**63 - 1, -(2**63)]
SMALL_FLOATS = [None, 0.0, -0.0, 1.0, -0.5, 0.999, 1.5, -127.9, 128.0]
FLOATS = [*SMALL_FLOATS, 2147483647.5, -2147483648.9, 9.3e18, 2.0**63, -(2.0**63), NAN, INFINITE, -INFINITE]
TEXTS = [
    *(None, "", " ", "a", "A", "true", "TRUE", "tRuE", "ＴＲＵＥ", "false", "1", "-1", "+1", " 12 ", "\t3\n", "\x7f4", "\u00a05"),
    *("0x1", "1.5", "1e3", "9223372036854775807", "9223372036854775808", "-9223372036854775808", "-9223372036854775809"),
    *("00012", "١٢", "a%b", "a_b", "ab", "größe", "😀x", "x\ny", "orders-eu", "orders", "order", "K", "\u212a", "abc\n"),
    *("--1", "+", "-", "1 2", "x" * 150, "2147483648", "128", "-129", "9" * 5000, "-" + "0" * 5000 + "7", "+00"),
    *("0x1p3", "-0x1.8p1d", "0x1p9999", "-0x1p9999", "NaN", "-Infinity", "1e400"),
]
DATES = [None, date(1970, 1, 1), date(1969, 12, 31), date(2024, 2, 29), date(1, 1, 1), date(9999, 12, 31)]
MOMENTS = [None, BASE, *(BASE + timedelta(microseconds=n) for n in (-1, 1999, -1500001))]
DECIMALS = [None, *map(Decimal, ("0.00", "1.00", "-1.00", "0.99", "-0.01", "12345678.90", "-99999999.99"))]

SCHEMA = (
    "i8 tinyint, i16 smallint, i32 int, i64 bigint, f32 float, f64 double, d decimal(10,2), t string, u string, b boolean, "
    "day date, at timestamp, s struct<a:int,b:struct<c:string,d:bigint>>, l array<string>, m map<string,int>"
)
COMPARED = [
    *("i32, i64", "i8, 1", "f64, f32", "f64, 1.0D", "d, 1.00BD", "t, u", "t, 'a'", "b, true", "i64, f64", "d, i32", "day, day"),
    "at, at",
]
EXPRESSIONS = [
    *(pair.replace(",", f" {op}") for op in ("=", "<", "<=", ">", ">=", "<=>", "!=") for pair in COMPARED),
    *("i32 IN (1, 7, 127)", "i32 IN (1, null)", "t IN ('a', 'ab')", "NOT (i32 > 0)", "i32 > 0 AND f64 < 1.0D"),
    *("i32 > 0 OR f64 < 1.0D", "b AND i32 > 0", "b OR i32 > 0", "i32 IS NULL", "t IS NOT NULL", "s IS NULL", "s.b IS NULL"),
    *("s.b.c", "s.a", "CASE WHEN i32 > 0 THEN t WHEN i32 < 0 THEN u END", "CASE WHEN b THEN 1 WHEN i32 > 0 THEN 2 ELSE 3 END"),
    *("if(b, i32, i8)", "coalesce(t, u, 'none')", "coalesce(s.b, named_struct('c', t, 'd', i64))", "if(b, s, null)"),
    *("named_struct('x', s, 'y', i32)", "struct(i32, struct(t, null))", "concat(t, '|', u)", "substring(t, 1, 100)"),
    *(
        "substring(t, 1, 1)",
        "lower(t) = 'true'",
        "t LIKE 'a%'",
        "t LIKE 'a_b'",
        "t LIKE '%'",
        "t LIKE 'a/%'",
        "m",
        "l",
        # Arrow 16 has no `if_else` of maps: Spark computes the chain.
        *(() if pa.__version__.startswith("16.") else ("if(b, m, null)",)),
        "if(b, l, null)",
        "coalesce(l, l)",
        "t RLIKE 'a[bc]'",
    ),
    *(r"t RLIKE r'\A[+-]?[0-9]+\z'", "startswith(t, 'or')", "endswith(t, 'e')", "contains(t, 'd')", "isnan(f64)", "isnan(f32)"),
    *(
        "abs(f64)",
        "abs(d)",
        "abs(cast(i64 as double)) >= 1",
        "i64 div 1000L",
        "i64 % 7",
        "i8 % 7Y",
        "i32 % 1000",
        "try_multiply(i64, 1000L)",
        "unix_date(day)",
    ),
    *("unix_millis(at)", "unix_micros(at)", "cast(day as timestamp)", "timestamp_micros(i32)", "cast(t as binary)"),
    "CASE WHEN abs(cast(i64 as double)) < 253402300800000 THEN timestamp_millis(i64) END",
    *("cast(i64 as string)", "cast(b as string)", "cast(i8 as bigint)", "cast(i64 as double)", "cast(i64 as float)"),
    *(
        "cast(f32 as double)",
        "cast(i32 as decimal(12,2))",
        "cast(d as decimal(20,4))",
        "cast(null as string)",
        "cast(1 as bigint)",
    ),
    *(
        f"try_cast({name} as {kind})"
        for name in ("i8", "i64", "f32", "f64", "t")
        for kind in ("tinyint", "smallint", "int", "bigint")
    ),
]
EXPRESSIONS += [
    *(
        "f64 + 1",
        "f64 - f64",
        "f64 * 1.5D",
        "-f64",
        "f32 + f32",
        "d + d",
        "d - 1",
        "d * 100",
        "d * d",
        "-d",
        "i32 * 1.5",
        "d > 100",
    ),
    *("d + i32", "i32 - 2.5", "try_cast(d as decimal(8,1))", "try_cast(d as decimal(4,2))", "try_cast(d * d as decimal(10,3))"),
    *(f"try_cast(d as {kind})" for kind in ("tinyint", "smallint", "int", "bigint")),
    *("cast(d as double)", "try_cast(t as double)", "try_cast(t as decimal(10,2))", "try_cast(u as decimal(3,0))"),
    *(
        "try_cast(t as decimal(38,18))",
        "try_cast(u as decimal(2,2))",
        "cast(d as string)",
        "cast(cast(d as decimal(30,12)) as string)",
    ),
    *("upper(t)", "lower(t)", "upper('ß')", "trim(t)", "ltrim(t)", "rtrim(t)", "length(t)", "char_length(u)", "octet_length(t)"),
    *(
        "length(cast(t as binary))",
        "t BETWEEN 'a' AND 'b'",
        "i32 BETWEEN -1 AND 127",
        "nullif(t, 'a')",
        "nvl(t, u)",
        "ifnull(t, 'x')",
    ),
    *(
        "nvl2(t, u, 'x')",
        "nullif(i32, 1) BETWEEN 0 AND nullif(i64, 7)",
        "left(t, 2)",
        "left(t, 0)",
        "t || u",
        "concat_ws('-', t, u, 'x')",
    ),
    *(f"substring(t, {start}, {count})" for start in (-3, -1, 0, 1, 2, 5) for count in (0, 1, 2, 3, 200)),
    *("replace(t, 'a', 'bb')", "replace(t, 'a')", "regexp_replace(t, '[0-9]+', '#')", "regexp_replace(t, 'a%b', '')"),
    *(
        "sha2(t, 256)",
        "sha2(t, 512)",
        "sha2(u, 0)",
        "sha2(u, 224)",
        "md5(t)",
        "m['a']",
        "m.b",
        "size(l)",
        "greatest(i32, i64, 1)",
    ),
    *("least(d, 1)", "greatest(day, DATE '2000-01-01')", "least(at, TIMESTAMP '1970-01-01 00:00:00.001')", "abs(d * d)"),
    *(f"{part}(day)" for part in ("year", "quarter", "month", "day", "weekofyear", "dayofyear", "dayofweek", "weekday")),
    *(f"{part}(at)" for part in ("year", "month", "day", "hour", "minute", "second", "dayofweek", "weekday", "weekofyear")),
    *(
        f"date_trunc('{unit}', at)"
        for unit in ("year", "QUARTER", "MON", "week", "day", "hour", "minute", "second", "millisecond")
    ),
    *(
        "trunc(day, 'year')",
        "trunc(day, 'MM')",
        "trunc(day, 'week')",
        "date_add(greatest(day, DATE '1969-01-01'), -3)",
        "date_sub(greatest(day, DATE '1969-01-01'), 2S)",
        "datediff(day, day)",
    ),
    *(
        "cast(at as date)",
        "to_date(at)",
        "to_date(day)",
        "date(at)",
        "unix_seconds(at)",
        "cast(at as string)",
        "cast(day as string)",
    ),
    *(
        f"date_format({what}, '{pattern}')"
        for what in ("at", "day")
        for pattern in (
            "yyyy-MM-dd",
            "yyyyMMdd HH:mm:ss.SSS",
            "d.M.yy H:m:s",
            "yyyy-MM-dd\\'T\\'HH:mm:ss.SSSSSSXXX",
            "SS S xxx Z",
        )
    ),
]
"""Expressions that never fail for a value."""

FALLIBLE = [
    *(
        "i64 + 1",
        "i8 + 1Y",
        "i32 - i32",
        "i64 - i64",
        "i64 * i64",
        "i16 * 2S",
        "-i64",
        "-i8",
        "abs(i32)",
        "abs(i64)",
        "f64 / f32",
    ),
    *(
        "i32 / 7",
        "i64 / i32",
        "i64 % i32",
        "i8 % 0Y",
        "i64 div i32",
        "i64 div -1",
        "i64 % -1",
        "cast(i64 as int)",
        "cast(f64 as int)",
    ),
    *("cast(t as int)", "cast(t as bigint)", "cast(t as double)", "cast(t as decimal(10,2))", "cast(d as decimal(8,1))"),
    *("cast(d as decimal(4,2))", "cast(d as int)", "cast(d as tinyint)", "cast(f32 as tinyint)", "i32 + i8", "i64 * 2"),
    *("cast(d as bigint)", "cast(cast(d as decimal(20,2)) as int)", "cast(cast(d as decimal(20,2)) as bigint)"),
    *("cast(try_cast(d as decimal(2,2)) as int)", "cast(try_cast(d as decimal(18,18)) as bigint)"),
    *("CASE WHEN i32 != 0 THEN 100 / i32 ELSE -1 END", "i32 != 0 AND 100 / i32 > 2", "i32 = 0 OR 100 / i32 > 2"),
    *("if(abs(f64) < 100, cast(f64 as int), 0)", "if(i64 IS NULL, 0L, i64 + 1)", "coalesce(i8, cast(i64 as tinyint))"),
    *("CASE WHEN b THEN i64 + 1 WHEN i64 < 1000 THEN i64 * 3 END", "nullif(i64, 0) + 1 BETWEEN 0 AND 10"),
    "struct(i64 + 1, t)",
]
"""Expressions that fail for some values."""

UNKNOWN = [
    *("rand()", "initcap(t)", "try_add(i64, 1)", "cast(t as float)", "d / 3", "cast(f64 as string)", "round(f64, 1)"),
    *("t RLIKE '.*'", r"t RLIKE r'\s'", "t RLIKE '(?i)a'", r"t LIKE r'a\%'", "date_format(at, 'EEE')", "timestamp_millis(i64)"),
    "CASE WHEN abs(cast(i64 as double)) < 253402300800000 THEN null ELSE timestamp_millis(i64) END",
    *("substring(t, 1, -1)", "t LIKE 'a/%' ESCAPE '/'", "named_struct(concat('a', 'b'), i32)"),
    *(
        "size(array(i32))",
        "greatest(f64, f32)",
        "regexp_replace(t, 'a*', 'b')",
        "regexp_replace(t, '(a)', '$1')",
        "cast(t as date)",
    ),
    *("cast(d as float)", "cast(cast(1 as decimal(20,2)) * d as double)", "date_trunc(t, at)", "substring(t, i32, 1)", "m[t]"),
    *("cast(t AS interval day)", "coalesce(cast(t AS binary), X'61')", "concat(l, l)", "concat_ws(t, u, u)", "concat_ws(',', l)"),
    *("replace(t, u, 'a')", "sha2(cast(t AS binary), 1)", "size(m)", "to_date(at, 'yyyy')", "l = l", "s = s"),
    "cast(d AS decimal(38,10)) * cast(d AS decimal(38,10))",
    "-".join(["i64"] * 400),
]


@dataclass(frozen=True)
class Edges:
    """Rows in Arrow, and the same rows in Spark."""

    table: pa.Table
    frame: DataFrame


@pytest.fixture(scope="module")
def edges(spark) -> Edges:
    """Return rows in which every edge of a type stands beside many of the others."""
    chance = random.Random(7)

    def fitting(bits: int) -> Any:
        return chance.choice([n for n in INTEGERS if n is None or -(2 ** (bits - 1)) <= n < 2 ** (bits - 1)])

    def others_of(n: int) -> tuple[Any, Any]:
        return [None, [], ["a", None], TEXTS][n % 4], [None, {}, {"a": 1, "b": None}][n % 3]

    structs = [None, (None, None), (1, ("c", 2)), (fitting(32), (chance.choice(TEXTS), None))]
    rows = []
    for n in range(400):
        numbers = fitting(8), fitting(16), fitting(32), INTEGERS[n % len(INTEGERS)], chance.choice(SMALL_FLOATS)
        others = FLOATS[n % len(FLOATS)], DECIMALS[n % len(DECIMALS)], TEXTS[n % len(TEXTS)], chance.choice(TEXTS)
        moments = chance.choice([None, True, False]), chance.choice(DATES), chance.choice(MOMENTS)
        rows.append((*numbers, *others, *moments, chance.choice(structs), *others_of(n)))
    table = table_of(rows, SCHEMA)
    return Edges(table, spark.createDataFrame(table))


def in_arrow(program: Program, given: pa.Table) -> pa.Table:
    """Return a program's result for rows."""
    return pa.Table.from_batches([program(batch) for batch in given.combine_chunks().to_batches()])


def assert_same(found: pa.Table, wanted: pa.Table) -> None:
    assert found.column_names == wanted.column_names
    assert found.num_rows == wanted.num_rows > 0
    for name in wanted.column_names:
        assert found.schema.field(name).type == wanted.schema.field(name).type, name
        pairs = zip(found[name].to_pylist(), wanted[name].to_pylist(), strict=True)
        assert not [(n, ours, theirs) for n, (ours, theirs) in enumerate(pairs) if repr(ours) != repr(theirs)][:5], name


def assert_alike(made: DataFrame, given: pa.Table) -> None:
    """Check that Arrow's result for rows equals Spark's."""
    assert_same(in_arrow(make_program(made, given.schema), given), made.toArrow())


def test_every_expression_known_here_gives_what_spark_gives(edges) -> None:
    assert_alike(edges.frame.select(*(F.expr(text).alias(text) for text in dict.fromkeys(EXPRESSIONS))), edges.table)


def find_refused(program: Program, given: pa.Table, first: int = 0) -> dict[int, str]:
    """Return the numbers of the rows for which a program fails, with its reasons. Halves of rows that fail are tried again."""
    try:
        in_arrow(program, given)
    except ExpressionFailed as reason:
        if given.num_rows == 1:
            return {first: str(reason).partition(":")[0]}
        half = given.num_rows // 2
        return find_refused(program, given.slice(0, half), first) | find_refused(program, given.slice(half), first + half)
    return {}


def test_sql_fails_for_the_values_for_which_spark_fails_and_for_no_others(edges) -> None:
    spark, failed = edges.frame.sparkSession, 0
    rows, checked, ours = edges.table, {}, {}
    for number, text in enumerate(FALLIBLE):
        program = make_program(edges.frame.select(F.expr(text).alias("x")), edges.table.schema)
        assert program.fallible
        refused = find_refused(program, edges.table)
        fine = [n not in refused for n in range(edges.table.num_rows)]
        assert any(fine), text
        # Rows that Arrow refuses are null on both sides: Spark computes the others, of all expressions in one job.
        found = in_arrow(program, edges.table.filter(pa.array(fine)))["x"].combine_chunks()
        places = pa.array([sum(fine[:n]) if fine[n] else None for n in range(len(fine))], pa.int64())
        ours[f"x{number}"] = found.take(places)
        rows = rows.append_column(f"fine{number}", pa.array(fine))
        checked[f"x{number}"] = f"CASE WHEN fine{number} THEN {text} END"
        # The first row with each reason.
        for reason, n in {reason: n for n, reason in reversed(refused.items())}.items():
            with pytest.raises((ArithmeticException, NumberFormatException, SparkRuntimeException)) as spoke:
                spark.createDataFrame(edges.table.slice(n, 1)).select(F.expr(text)).toArrow()
            condition = str(spoke.value.getCondition())
            # Spark 4.2 has a condition of its own for `%`.
            condition = "DIVIDE_BY_ZERO" if condition == "REMAINDER_BY_ZERO" else condition
            assert condition.startswith(reason), (text, edges.table.slice(n, 1).to_pylist())
            failed += 1
    assert failed > 30
    made = spark.createDataFrame(rows).select(*(F.expr(text).alias(name) for name, text in checked.items())).toArrow()
    assert_same(pa.table(ours), made)


@pytest.mark.parametrize("kind", [pa.int8(), pa.int16(), pa.int32(), pa.int64()], ids=str)
@pytest.mark.parametrize("precision, scale", [(18, 0), (18, 1), (18, 9), (18, 18), (10, 2), (1, 0), (1, 1), (16, 2)])
def test_decimals_of_64_bits_are_cut_off_as_larger_ones(kind, precision, scale) -> None:
    largest, chance = 10**precision - 1, random.Random(precision * 19 + scale)
    edges = [edge * 10**scale + step for bits in (7, 15, 31) for edge in (-(2**bits), 2**bits) for step in (-1, 0, 1)]
    digits = [0, 1, 9, largest, largest - 1, 10**scale, 10**scale - 1, *edges, *(chance.randint(0, largest) for _ in range(50))]
    fitting = [n for one in digits for n in (one, -one) if abs(n) <= largest]
    values = [value for n in fitting for value in (Decimal(n).scaleb(-scale), None)]
    small = pa.array(values, pa.decimal128(precision, scale))
    wide = small.cast(pa.decimal128(38, scale))  # its digits do not fit into 64 bits
    limit = 2 ** (kind.bit_width - 1)
    wholes = [None if value is None else int(value) for value in values]
    wanted = [n if n is not None and -limit <= n < limit else None for n in wholes]
    for start, length in ((0, len(values)), (1, len(values) - 3), (2, 0), (1, 1), (0, 1)):
        part = small.slice(start, length)
        assert whole_part(kind, part).equals(whole_part(kind, wide.slice(start, length)))
        assert whole_part(kind, part).equals(pa.array(wanted[start : start + length], kind))
    assert whole_part(kind, pa.nulls(3, small.type)).equals(pa.nulls(3, kind))
    assert [whole_part(kind, small[at]).as_py() for at in (2, 3)] == wanted[2:4]
    fractions = pa.array([Decimal("0.99"), None, Decimal("-0.99")], pa.decimal128(38, 38))
    assert whole_part(kind, fractions).equals(pa.array([0, None, 0], kind))


@pytest.mark.parametrize("text", UNKNOWN)
def test_what_is_not_known_here_is_left_to_spark(edges, text) -> None:
    with pytest.raises(Unknown):
        make_program(edges.frame.select(F.expr(text)), edges.table.schema)


def test_a_plan_that_is_no_chain_of_columns_and_filters_is_left_to_spark(edges) -> None:
    frame = edges.frame
    for made in (
        frame.drop("m").distinct(),
        frame.drop("m").unionByName(frame.drop("m")),
        frame.selectExpr("explode(l) AS x"),
        frame.limit(3),
    ):
        with pytest.raises(Unknown):
            make_program(made, edges.table.schema)


def test_a_column_that_is_not_needed_may_be_unknown(edges) -> None:
    pair = F.struct("i32", F.upper("t").alias("up")).alias("pair")
    assert_alike(edges.frame.select(pair, F.rand().alias("chance")).select("pair.i32"), edges.table)


@pytest.mark.parametrize("condition", ["i32 > 0", "b", "i32 IS NULL OR i32 IS NOT NULL", "t = 'a' AND b"])
def test_a_filter_keeps_what_spark_keeps(edges, condition) -> None:
    one = edges.frame.where(condition).select("i32", "t", "s", F.expr("coalesce(s.a, i32)").alias("x"), "f64")
    made = one.where("f64 IS NOT NULL").select("*", F.expr("s.b.c").alias("c"), F.lit("all").alias("same"))
    assert_alike(made, edges.table)


def test_an_expression_does_not_fail_for_rows_that_a_filter_before_it_removes(edges) -> None:
    """Most texts are no integers; the first filter leaves those that are. The second one reads a column that may fail."""
    one = edges.frame.where("t IN ('1', '-1', '00012', '2147483648')").selectExpr("CAST(t AS BIGINT) AS n", "i32", "t", "f64")
    two = one.where("n < 100").select("*", F.expr("if(n > 0, CAST(t AS INT), CAST(n AS INT))").alias("x"))
    program = make_program(two, edges.table.schema)
    assert program.fallible and in_arrow(program, edges.table).num_rows > 10
    assert_alike(two.where("i32 IS NOT NULL").select("n", "x", F.expr("x + 1").alias("more"), "f64"), edges.table)


def test_a_filter_that_keeps_nothing_leaves_empty_columns(edges) -> None:
    made = edges.frame.where("i32 < 0 AND i32 > 0").select("s", F.lit(1).alias("one"))
    found = in_arrow(make_program(made, edges.table.schema), edges.table)
    assert (edges.table.num_rows > 0, found.num_rows, found.column_names) == (True, 0, ["s", "one"])


def test_the_cases_of_all_transforms_that_run_in_arrow_come_out_alike(outcomes: dict[str, Outcome]) -> None:
    known = {name: outcome for name, outcome in outcomes.items() if outcome.program is not None}
    assert len(known) > 35
    for name, outcome in known.items():
        found, wanted = in_arrow(outcome.program, outcome.given), outcome.made
        if wanted.num_rows:
            assert_same(found, wanted)
        else:
            assert found.num_rows == 0, name


RECORDS = (
    "key binary, value struct<id:bigint,t:string>, topic string, partition int, offset bigint, timestamp timestamp, "
    "headers array<struct<key:string,value:binary>>"
)


@pytest.mark.parametrize("pattern", [r"orders\..*", "orders.*", r".*\.eu-[0-9]+", "(orders|.)[.]eu.*"])
def test_names_of_topics_are_matched_in_arrow_as_in_spark(spark, pattern) -> None:
    topics = ["orders", "orders.eu", "orders.eu-1", "ordersxeu", "xorders.eu", "a.eu-12", ".", "", None]
    given = table_of([(None, None, topic, 0, 0, None, None) for topic in topics], RECORDS)
    assert_alike(apply_chain(spark.createDataFrame(given), [Filter(predicate=TopicNameMatches(pattern), negate=True)]), given)


def test_a_program_grows_with_the_length_of_its_chain_and_not_faster(spark) -> None:
    """Every transform names what the one before has made many times over."""
    small = Filter(predicate=Condition("id < 0"))
    insert = InsertField(static_field="x", static_value="y")
    five = [Cast(spec="id:int64"), MaskField(fields="t"), insert, ReplaceField(exclude="x"), small]
    given = table_of([], RECORDS)

    def size(times: int) -> int:
        return len(make_program(apply_chain(spark.createDataFrame(given), five * times), given.schema).nodes)

    once = size(1)
    assert 20 < once < size(4) < 5 * once
