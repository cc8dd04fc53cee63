"""The meaning of CSV records, decoded both ways; written records are read again."""

from __future__ import annotations

import codecs
import csv
import datetime as dt
import io
import math
import random
from collections.abc import Callable, Sequence
from decimal import Decimal as D
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_kafka_spark.formats import Csv
from airflow_kafka_spark.formats.base import Kind
from airflow_kafka_spark.formats.csv.tasks.decode import CsvDecoder
from tests.formats.budget import MANY, examples, pairs
from tests.formats.contract import CHECKS, Case

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

UTC = dt.timezone.utc

CASES = {
    "csv": Case(
        Csv("id bigint NOT NULL, customer string, amount decimal(12,2), placed_at timestamp"),
        (b"1,a,12.34,2026-11-05T07:08:09Z", b"2,,-1,2026-11-05 07:08", b'3,"a ""b""\n, ",,\r\n', b"4,\xc3\xa9,,"),
        (b"x,a,1,", b",a,1,", b"", b"1,a,1", b"1,a,1,,", b'1,"a,1,', b"1,a,0.001,", b"1,\xff,1,", b"1,a,1,\n2,,,", b'1,"a"b,1,'),
    ),
    "csv of other characters": Case(
        Csv("s varchar(3), t boolean, b binary, d date", delimiter="\t", quote="'", escape="\\", null_value="NULL"),
        (b"'a\\'b'\tTRUE\taGk=\t2026-11-05", b"NULL\tNULL\tNULL\tNULL", b"''\tfalse\t''\t'2026-11-05'", b"\ttrue\tNULL\tNULL"),
        (b"'NULL'\ttrue\tNULL\tNULL", b"'a''b'\tNULL\tNULL\tNULL", b"a\tyes\tNULL\tNULL", b"NULL,NULL,NULL,NULL"),
    ),
    "csv of one column": Case(
        Csv("t timestamp", timestamp_format="dd/MM/yyyy HH:mm"), (b"", b"05/11/2026 07:08", b"\n"), (b'""', b"1")
    ),
    "csv of windows-1252": Case(
        Csv("s string, n int", encoding="windows-1252"), (b"Zo\xeb,1", b'"\x80\n",2', b"a,3"), (b"\x81,1", b"a,\xeb")
    ),
}  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_contract(case: Case, check: Callable[[Case], None]) -> None:
    assert case.format.validate("value") == []
    check(case)


def disagreement(format: Csv, values: Sequence[bytes | None]) -> str:
    """Return the differences of both implementations; even the smallest batch goes to Arrow first."""
    decoder = CsvDecoder(format.columns, format.dialect, format.timestamp_format, codecs.lookup(format.encoding).name, few=0)
    fast, reference = decoder.decode(values), decoder.decode_row_wise(values)
    fast.batch.validate(full=True)
    one, other = ([repr(row) for row in d.batch.to_pylist()] for d in (fast, reference))
    same = one == other and fast.bad == reference.bad and fast.batch.schema == reference.batch.schema
    return "" if same else f"{values!r}: {one} {fast.bad} by Arrow, {other} {reference.bad} by the reference"


def decode(format: Csv, *values: bytes) -> tuple[list[dict[str, Any]], dict[int, str]]:
    assert disagreement(format, values) == ""
    decoded = format.make_decoder().decode(values)
    return decoded.batch.to_pylist(), dict(decoded.bad)


GOOD: list[tuple[str, str, Any]] = [
    *((t, v, int(v)) for t in ("tinyint", "smallint", "int", "bigint") for v in ("0", "-0", "7", "+7", "007", "-128", "127")),
    ("bigint", "-9223372036854775808", -(2**63)),
    ("bigint", "0" * 30 + "1", 1),
    ("int", '"7"', 7),
    ("decimal(5,2)", "1", D("1.00")),
    ("decimal(5,2)", "-999.99", D("-999.99")),
    ("decimal(5,2)", "1.2300", D("1.23")),
    ("decimal(5,2)", "+.5", D("0.50")),
    ("decimal(5,2)", "1e2", D("100.00")),
    ("decimal(38,38)", "0." + "9" * 38, D("0." + "9" * 38)),
    ("decimal(38,0)", "9" * 38, D("9" * 38)),
    ("decimal(38,20)", "7.1", D("7.1").quantize(D("1e-20"))),
    ("double", "1", 1.0),
    ("double", "-0", -0.0),
    ("double", "1e-400", 0.0),
    ("double", ".5", 0.5),
    ("double", "5.", 5.0),
    ("double", "-Infinity", -math.inf),
    ("float", "0.1", 0.10000000149011612),
    ("float", "1.00000017881393432617187499", 1.0000001192092896),
    ("float", "Infinity", math.inf),
    ("string", " a ", " a "),
    ("string", '""', ""),
    ("string", '"a,""b""\r\n"', 'a,"b"\r\n'),
    ("string", "\\", "\\"),
    ("string", "é😀\u2028", "é😀\u2028"),
    ("string", "a\x00b", "a\x00b"),
    ("string", "NULL", "NULL"),
    ("varchar(3)", "abc", "abc"),
    ("boolean", "True", True),
    ("boolean", "false", False),
    ("binary", "aGk=", b"hi"),
    ("binary", '""', b""),
    ("date", "2026-11-05", dt.date(2026, 11, 5)),
    ("date", "0001-01-01", dt.date(1, 1, 1)),
    ("timestamp", "2026-11-05T07:08:09.123456Z", dt.datetime(2026, 11, 5, 7, 8, 9, 123456, UTC)),
    ("timestamp", "2026-11-05 07:08:09.1230000+02:00", dt.datetime(2026, 11, 5, 5, 8, 9, 123000, UTC)),
    ("timestamp", "2026-11-05", dt.datetime(2026, 11, 5, tzinfo=UTC)),
    ("timestamp_ntz", "2026-11-05T07:08", dt.datetime(2026, 11, 5, 7, 8)),
]  # fmt: skip

BAD: list[tuple[str, str, str]] = [
    ("bigint", "1.0", 'found "1.0", expected bigint'),
    ("bigint", " 7", 'found " 7", expected bigint'),
    ("bigint", "0x1F", "expected bigint"),
    ("bigint", '""', 'found "", expected bigint'),
    ("bigint", "٣", "expected bigint"),
    ("bigint", "1" * 5000, "expected bigint: -9223372036854775808 to 9223372036854775807"),
    ("tinyint", "128", "found 128, expected tinyint: -128 to 127"),
    ("decimal(5,2)", "1.234", "at most 2 digits after the point"),
    ("decimal(5,2)", "1000", "at most 3 digits before the point"),
    ("decimal(5,2)", "NaN", "expected decimal(5,2)"),
    ("decimal(5,2)", "1e99999999999999999999", "no decimal"),
    ("double", "1e400", "too large"),
    ("double", "nan", "expected double"),
    ("double", "inf", "expected double"),
    ("double", "0x1p3", "expected double"),
    ("double", "1_0", "expected double"),
    ("float", "1e39", "too large"),
    ("string", 'a"b', "a quote in a field without quotes, at character"),
    ("string", '"a"b', "quotes that do not end with the field"),
    ("string", '"a', "quotes that do not end with the field"),
    ("string", '"', "quotes that do not end"),
    ("string", "a\rb", "a line break outside of quotes"),
    ("string", "a\nb", "a line break outside of quotes"),
    ("varchar(3)", "abcd", 'found "abcd" (4 characters), expected varchar(3)'),
    ("boolean", "1", "expected boolean"),
    ("binary", "aGk", "base64 with padding"),
    ("date", "2026-02-29", "expected date: yyyy-MM-dd"),
    ("date", "2026-11-05T00:00:00", "expected date"),
    ("timestamp", "1790000000", "expected timestamp"),
    ("timestamp", "2026-11-05T07:08:09.1234567Z", "at most 6 digits"),
    ("timestamp", "0001-01-01T00:00:00+00:01", "the years 0001 to 9999"),
    ("timestamp_ntz", "2026-11-05T07:08:09Z", "no time zone"),
]


@pytest.mark.parametrize(("data_type", "text", "expected"), GOOD, ids=[f"{t}={v[:30]!a}" for t, v, _ in GOOD])
def test_what_a_column_takes(data_type: str, text: str, expected: Any) -> None:
    rows, bad = decode(Csv(f"a {data_type}, z int"), b",1", f"{text},2".encode(), b",3")
    assert bad == {}
    assert [row["z"] for row in rows] == [1, 2, 3]
    assert repr(rows[1]["a"]).replace("zoneinfo.ZoneInfo(key='UTC')", "datetime.timezone.utc") == repr(expected)


def test_nan() -> None:
    rows, bad = decode(Csv("a double, b float"), b"NaN,NaN")
    assert bad == {} and math.isnan(rows[0]["a"]) and math.isnan(rows[0]["b"])


@pytest.mark.parametrize(("data_type", "text", "expected"), BAD, ids=[f"{t}={v[:30]!a}" for t, v, _ in BAD])
def test_what_makes_a_record_bad(data_type: str, text: str, expected: str) -> None:
    rows, bad = decode(Csv(f"y int, a {data_type}"), b"1,", f"2,{text}".encode(), b"3,")
    assert list(bad) == [1] and [row["y"] for row in rows] == [1, None, 3]
    assert expected in bad[1] and bad[1].startswith("column `a`") and bad[1].isprintable()


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (b"", "column `b`: missing: found 1 field, expected 2"),
        (b"1", "column `b`: missing: found 1 field, expected 2"),
        (b"1,2,3", "found 3 fields, expected 2"),
        (b"1,2\n3,4", "column `b`: found a line break outside of quotes, at character 4"),
        (b"1,2\n\n", "a line break outside of quotes"),
        (b"\xef\xbb\xbf1,2", "a byte order mark"),
        (b"1,\xff", "not UTF-8: byte 0xff at position 2"),
        (b',"2', "column `b`: found quotes"),
    ],
    ids=repr,
)
def test_what_is_not_one_line_of_these_columns_is_bad(record: bytes, expected: str) -> None:
    for values in ([record], [b"1,x", record, b"2,y"], [record, b'3,"x"', b'"4",y']):
        _, bad = decode(Csv("a int, b string"), *values)
        (reason,) = bad.values()
        assert expected in reason


def test_null_is_what_stands_without_quotes() -> None:
    rows, bad = decode(Csv("a string, b int", null_value="NA"), b"NA,NA", b'"NA",1', b",2", b'NA,"NA"')
    assert rows == [{"a": None, "b": None}, {"a": "NA", "b": 1}, {"a": "", "b": 2}, {"a": None, "b": None}]
    assert bad == {3: 'column `b`: found "NA", expected int'}
    _, bad = decode(Csv("a string NOT NULL"), b"", b'""')
    assert bad == {0: "column `a`: found a null, expected string NOT NULL"}


def test_an_escape_counts_before_quotes_and_itself() -> None:
    backslash = Csv("a string, b string", escape="\\")
    rows, bad = decode(backslash, rb'"a\"b\\",c\d', rb'"\n\x\\",', b'"a""b",', b'"a\\",')
    assert rows[:2] == [{"a": 'a"b\\', "b": "c\\d"}, {"a": "\\n\\x\\", "b": None}]
    assert list(bad) == [2, 3]


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("dd/MM/yyyy HH:mm:ss", "05/11/2026 07:08:09", dt.datetime(2026, 11, 5, 7, 8, 9, tzinfo=UTC)),
        ("yyyyMMdd", "20261105", dt.datetime(2026, 11, 5, tzinfo=UTC)),
        ("yyyy-MM-dd'T'HH:mm:ss.SSSXXX", "2026-11-05T07:08:09.120+02:00", dt.datetime(2026, 11, 5, 5, 8, 9, 120000, UTC)),
        ("yyyy-MM-dd 'o''clock' HHX", "2026-11-05 o'clock 07-01", dt.datetime(2026, 11, 5, 8, tzinfo=UTC)),
    ],
)
def test_timestamps_in_a_format_of_their_own(pattern: str, text: str, expected: dt.datetime) -> None:
    format = Csv("t timestamp", timestamp_format=pattern)
    assert format.validate("value") == []
    rows, bad = decode(format, text.encode(), b"", b"2026-11-05T07:08:09Z", text.replace("05", "31").encode())
    assert rows[0]["t"] == expected
    assert list(bad) == [2, 3] and pattern in bad[3]


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"schema": "a array<int>"}, "schema"),
        ({"schema": "a struct<b:int>"}, "schema"),
        ({"schema": "a foo"}, "schema"),
        ({"delimiter": ""}, "delimiter"),
        ({"delimiter": "||"}, "delimiter"),
        ({"delimiter": "-"}, "delimiter"),
        ({"delimiter": '"'}, "delimiter"),
        ({"delimiter": "§"}, "delimiter"),
        ({"quote": "\n"}, "quote"),
        ({"escape": None}, "escape"),
        ({"null_value": "a,b"}, "null_value"),
        ({"null_value": None}, "null_value"),
        ({"timestamp_format": "yy"}, "timestamp_format"),
        ({"timestamp_format": "HH:mm"}, "timestamp_format"),
        ({"timestamp_format": "yyyy-MM-dd[ HH]"}, "timestamp_format"),
        ({"timestamp_format": 5}, "timestamp_format"),
    ],
    ids=str,
)
def test_what_is_wrong_with_options(options: dict[str, Any], where: str) -> None:
    (problem,) = Csv(**{"schema": "a int"} | options).validate("value")
    assert problem.where == f"value.{where}"


# --- both ways say the same -------------------------------------------------------------------------------------------------


def test_both_ways_agree_on_every_value_beside_others() -> None:
    for kind in {t for t, _, _ in GOOD}:
        texts = [v for t, v, _ in (*GOOD, *BAD) if t == kind] + ['""', "", " 1", "1 ", "0x1", "-1", "+1", "nan", "Inf", "T"]
        values = [f"{v},1".encode() for v in texts]
        assert disagreement(Csv(f"a {kind}, b int"), values) == ""
        for pair in pairs(values):
            assert disagreement(Csv(f"a {kind}, b int"), pair) == ""


PIECES = [b'"', b'""', b"a", b",", b"\n", b"\r", b"\\", b"\xc3\xa9", b" ", b'"a"', b'",', b',"', b"1", b"\r\n", b'\n"', b"'"]


def test_both_ways_agree_on_random_pieces() -> None:
    chance, good = random.Random(5), 0
    formats = [Csv("a string, b string"), Csv("a string, b string", escape="\\"), Csv("a string", null_value="a"),
               Csv("a string, b int", quote="'")]  # fmt: skip
    for _ in range(examples(1200)):
        values = [b"".join(chance.choices(PIECES, k=chance.randrange(7))) for _ in range(chance.randint(1, 4))]
        format = chance.choice(formats)
        assert disagreement(format, values) == ""
        good += len(values) - len(format.make_decoder().decode(values).bad)
    assert good > 200


def test_rows_are_those_of_pythons_csv() -> None:
    chance, compared = random.Random(9), 0
    for _ in range(100):
        rows = [["".join(chance.choices("ab,\"\n\r é'\\", k=chance.randrange(9))) for _ in range(3)] for _ in range(20)]
        texts = []
        for row in rows:
            out = io.StringIO(newline="")
            csv.writer(out, quoting=csv.QUOTE_ALL).writerow(row)
            texts.append(out.getvalue().encode())
        found, bad = decode(Csv("a string, b string, c string"), *texts)
        assert bad == {} and [list(row.values()) for row in found] == rows
        compared += len(rows)
    assert compared == 2000


def test_ordinary_records_go_the_fast_way_and_a_bad_one_spoils_little() -> None:
    values = [f'{n},"customer {n % 97}",{n}.50,2026-11-05T07:08:09Z'.encode() for n in range(MANY)]
    decoder = CASES["csv"].format.make_decoder()
    assert isinstance(decoder, CsvDecoder)
    assert decoder.decode(values).batch.column("id").to_pylist() == list(range(MANY))
    assert decoder.row_wise_count == 0
    values[2_222] = b'1,"'
    assert [at for at, _ in decoder.decode(values).bad] == [2_222]
    assert decoder.row_wise_count <= 64


def test_huge_fields() -> None:
    big = b'1,"' + b"x" * (40 << 20) + b'"'
    rows, bad = decode(Csv("a int, b string"), b"0,", big, b'2,"')
    assert len(rows[1]["b"]) == 40 << 20 and list(bad) == [2]


# --- writing ----------------------------------------------------------------------------------------------------------------

COLUMNS: list[tuple[str, str, Kind]] = [
    ("id", "bigint", "integer"), ("yes", "boolean", "boolean"), ("text", "string", "text"), ("raw", "binary", "binary"),
    ("at", "timestamp", "zoned"), ("local", "timestamp_ntz", "local"), ("day", "date", "date"), ("n", "decimal(5,2)", "decimal"),
    ("fine", "decimal(12,9)", "fine decimal"),
]  # fmt: skip
DDL = ", ".join(f"{name} {kind}" for name, kind, _ in COLUMNS)
MOMENT = st.datetimes(min_value=dt.datetime(1, 1, 1))
ROW = st.fixed_dictionaries(
    {
        "id": st.integers(-(2**63), 2**63 - 1), "yes": st.booleans(), "raw": st.binary(max_size=9),
        "text": st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('",\n\r\\;'), max_size=9),
        "at": MOMENT.map(lambda t: t.replace(tzinfo=UTC)), "local": MOMENT, "day": st.dates(),
        "n": st.integers(-99999, 99999).map(lambda i: D(i).scaleb(-2)),
        "fine": st.integers(-(10**12) + 1, 10**12 - 1).map(lambda i: D(i).scaleb(-9)),
    }
)  # fmt: skip
ROWS = st.lists(ROW.flatmap(lambda row: st.sets(st.sampled_from(list(row))).map(lambda n: row | dict.fromkeys(n))), max_size=9)
FORMATS = [
    Csv(DDL),
    Csv(DDL, delimiter=";", escape="\\", null_value="7"),
    Csv(DDL, delimiter="\t", quote="'", escape="'", null_value="true"),
]


def batch_of(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, schema=Csv(DDL).get_arrow_schema())


def by_task(format: Csv, batch: pa.RecordBatch) -> list[bytes]:
    encoder = format.make_encoder([(name, kind) for name, _, kind in COLUMNS])
    assert encoder is not None
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    decimals = {name: columns[name].cast(pa.string()) for name in ("n", "fine")}
    # As tasks hold them: plain, with all digits.
    plain = {
        name: pa.array([None if v is None else f"{v:f}" for v in columns[name].to_pylist()], pa.string()) for name in decimals
    }
    return encoder.encode(columns | plain).to_pylist()


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ROWS, st.sampled_from(FORMATS))
def test_what_a_task_writes_is_read_again(rows: list[dict[str, Any]], format: Csv) -> None:
    batch = batch_of(rows)
    decoded = format.make_decoder().decode(by_task(format, batch))
    assert decoded.bad == ()
    assert decoded.batch.to_pylist() == batch.to_pylist()


def test_spark_writes_the_same_as_a_task(spark: SparkSession) -> None:
    values = [
        {"id": -1, "yes": True, "text": 'a"\\,;\t\n\r\'é😀\x01', "raw": b"\xff\x00" * 60, "n": D("-0.01"),
         "day": dt.date(1, 1, 1),
         "at": dt.datetime(2026, 1, 2, 3, 4, 5, 6, UTC), "local": dt.datetime(999, 1, 2), "fine": D("0.000000001")},
        {"id": 7, "yes": True, "text": "7", "raw": b"", "day": None, "n": D("7.00"), "at": None, "local": None, "fine": D("-7")},
        dict.fromkeys(name for name, _, _ in COLUMNS),
    ]  # fmt: skip
    batch = batch_of(values)
    given = spark.createDataFrame(pa.Table.from_batches([batch]))
    frame = given.selectExpr(*(f"CAST({name} AS {kind}) AS {name}" for name, kind, _ in COLUMNS))
    names = [name for name, _, _ in COLUMNS]
    found = frame.select(*(format.encode(names).alias(f"f{n}") for n, format in enumerate(FORMATS))).toArrow()
    for n, format in enumerate(FORMATS):
        assert format.find_encoding_problems("value", names) == []
        written = found.column(f"f{n}").to_pylist()
        assert written == by_task(format, batch)
        assert format.make_decoder().decode(written).batch.to_pylist() == batch.to_pylist()
    own = Csv(DDL, timestamp_format="dd.MM.yyyy, HH:mm:ss.SSSSSS")
    assert own.make_encoder([("at", "zoned")]) is None
    (line, *_) = frame.select(own.encode(["at", "text"]).alias("v")).toArrow().column("v").to_pylist()
    assert line.startswith(b'"02.01.2026, 03:04:05.000006","a""')
    with pytest.raises(Exception, match="a field of CSV holds no array"):
        frame.selectExpr("array(id) AS a").select(own.encode(["a"])).collect()


def test_other_encodings() -> None:
    """Each record is decoded by itself; what is not in the encoding is bad, and never replaced."""
    utf16 = Csv("s string, n int", encoding="UTF-16")
    rows, bad = decode(utf16, "Zoë,1".encode("utf-16"), b"\x00", "ë,2".encode("utf-16"))
    assert [row["s"] for row in rows] == ["Zoë", None, "ë"] and bad == {1: "not UTF-16: byte 0x00 at position 0"}
    assert decode(Csv("s string", encoding="cp1252"), b"Zo\xeb \x81")[1] == {0: "not CP1252: byte 0x81 at position 4"}
    [wrong] = utf16.find_encoding_problems("sink.value", ["s"])
    assert (wrong.where, wrong.what) == ("sink.value.encoding", "`UTF-16` is read, not written")
    [unknown] = Csv("s string", encoding="base64").validate("value")
    assert (unknown.where, unknown.what) == ("value.encoding", "found 'base64'; expected a text encoding that Python knows")
