"""The meaning of JSON records: each line of the table in the docstring of Json, decoded both ways."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal as D
from typing import Any

import pytest

from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.formats.json.tasks.decode import JsonDecoder

UTC = dt.timezone.utc


def decode(schema: str, *values: bytes) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Return the results of the fast path and of the reference, which must be equal."""
    columns = Json(schema).columns
    fast, reference = JsonDecoder(columns, few=0).decode(values), JsonDecoder(columns).decode_row_wise(values)
    assert repr(fast.batch.to_pylist()) == repr(reference.batch.to_pylist())
    assert fast.bad == reference.bad
    return fast.batch.to_pylist(), dict(fast.bad)


def value(data_type: str, text: str) -> Any:
    """Return the decoded value; it stands between two others, so that they cannot influence each other unnoticed."""
    rows, bad = decode(f"a {data_type}", b"{}", f'{{"a":{text}}}'.encode("utf-8", "surrogatepass"), b'{"a":null}')
    assert bad == {}
    assert [rows[0], rows[2]] == [{"a": None}] * 2
    return rows[1]["a"]


def reason(schema: str, record: bytes) -> str:
    """Return the reason why a record is bad, among good records; the record becomes a row of nulls."""
    rows, bad = decode(schema, b'{"x":1}', record, b'{"x":1}') if "NOT NULL" not in schema else decode(schema, record)
    at = len(rows) // 2
    assert list(bad) == [at]
    assert set(rows[at].values()) == {None}
    assert bad[at].isprintable()
    return bad[at]


GOOD: list[tuple[str, str, Any]] = [
    *[(t, v, int(v)) for t in ("tinyint", "smallint", "int", "bigint") for v in ("0", "-0", "7", "-128", "127")],
    ("smallint", "-32768", -32768),
    ("int", "2147483647", 2147483647),
    ("bigint", "-9223372036854775808", -9223372036854775808),
    ("bigint", "9223372036854775807", 9223372036854775807),
    ("decimal(5,2)", "1", D("1.00")),
    ("decimal(5,2)", "-999.99", D("-999.99")),
    ("decimal(5,2)", "1.2300", D("1.23")),
    ("decimal(5,2)", "-0", D("0.00")),
    ("decimal(5,2)", "1e2", D("100.00")),
    ("decimal(5,2)", "1E-2", D("0.01")),
    ("decimal(5,2)", "0.00000000000000000000000000000000000000000000", D("0.00")),
    ("decimal(5,2)", "0e99", D("0.00")),
    ("decimal(5,2)", "100e-2", D("1.00")),
    ("decimal(5,2)", '"12.34"', D("12.34")),
    ("decimal(5,2)", '"+.50"', D("0.50")),
    ("decimal(5,2)", '"5."', D("5.00")),
    ("decimal(5,2)", '"0001.5"', D("1.50")),
    ("decimal(5,2)", '"1e2"', D("100.00")),
    ("decimal(5,2)", r'"\u0031.5"', D("1.50")),
    ("decimal(38,0)", "9" * 38, D("9" * 38)),
    ("decimal(38,38)", "0." + "9" * 38, D("0." + "9" * 38)),
    ("decimal(38,10)", "0.1", D("0.1000000000")),
    ("double", "1", 1.0),
    ("double", "-0", -0.0),
    ("double", "0.1", 0.1),
    ("double", "9007199254740993", 9007199254740992.0),
    ("double", "1e-400", 0.0),
    ("double", "5e-324", 5e-324),
    ("double", "1.7976931348623157e308", 1.7976931348623157e308),
    *[(t, v.format(w), float(w)) for t in ("float", "double") for w in ("Infinity", "-Infinity") for v in ("{}", '"{}"')],
    ("float", "0.1", 0.10000000149011612),
    ("float", "16777217", 16777216.0),
    ("float", "3.4028235677973362e38", 3.4028234663852886e38),
    ("float", "1.00000017881393432617187499", 1.0000001192092896),
    ("float", "16777217.00000000000001", 16777218.0),
    ("string", '"x"', "x"),
    ("string", '""', ""),
    ("string", r'"\u00e9\n\"\/\u0000\ud83d\ude00"', 'é\n"/\x00😀'),
    ("string", '"é😀"', "é😀"),
    ("string", "1.10", "1.10"),
    ("string", "1E5", "1E5"),
    ("string", "true", "true"),
    ("string", '{ "x" : 1.10, "y": [null ] }', '{ "x" : 1.10, "y": [null ] }'),
    ("string", r'["\u0041", {}]', r'["\u0041", {}]'),
    ("varchar(3)", '"😀😀é"', "😀😀é"),
    ("boolean", "true", True),
    ("boolean", "false", False),
    ("binary", '"aGk="', b"hi"),
    ("binary", '""', b""),
    ("binary", r'"aG\u006b="', b"hi"),
    ("binary", '"+/8="', b"\xfb\xff"),
    ("date", '"2026-11-05"', dt.date(2026, 11, 5)),
    ("date", '"0001-01-01"', dt.date(1, 1, 1)),
    ("date", '"9999-12-31"', dt.date(9999, 12, 31)),
    ("date", '"2024-02-29"', dt.date(2024, 2, 29)),
    ("timestamp", '"2026-11-05"', dt.datetime(2026, 11, 5, tzinfo=UTC)),
    ("timestamp", '"2026-11-05T07"', dt.datetime(2026, 11, 5, 7, tzinfo=UTC)),
    ("timestamp", '"2026-11-05T07:08"', dt.datetime(2026, 11, 5, 7, 8, tzinfo=UTC)),
    *[
        ("timestamp", f'"2026-11-05{sep}07:08:09{z}"', dt.datetime(2026, 11, 5, 7, 8, 9, tzinfo=UTC))
        for sep in "T "
        for z in ("", "Z", "+00:00", "-0000", "+00")
    ],
    *[
        ("timestamp", f'"2026-11-05T07:08:09{z}"', dt.datetime(2026, 11, 5, 5, 8, 9, tzinfo=UTC))
        for z in ("+02:00", "+0200", "+02")
    ],
    ("timestamp", '"2026-11-05T07:08:09-05:30"', dt.datetime(2026, 11, 5, 12, 38, 9, tzinfo=UTC)),
    ("timestamp", '"2026-11-05T07:08:09.5Z"', dt.datetime(2026, 11, 5, 7, 8, 9, 500_000, tzinfo=UTC)),
    ("timestamp", '"2026-11-05T07:08:09.123456+02:00"', dt.datetime(2026, 11, 5, 5, 8, 9, 123_456, tzinfo=UTC)),
    ("timestamp", '"2026-11-05T07:08:09.123456000Z"', dt.datetime(2026, 11, 5, 7, 8, 9, 123_456, tzinfo=UTC)),
    ("timestamp", '"1969-12-31T23:59:59.999999Z"', dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)),
    ("timestamp", '"0001-01-01T00:00:00Z"', dt.datetime(1, 1, 1, tzinfo=UTC)),
    ("timestamp", '"9999-12-31T23:59:59.999999Z"', dt.datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)),
    ("timestamp", "1700000000", dt.datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)),
    ("timestamp", "-1", dt.datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)),
    ("timestamp", "253402300799", dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)),
    ("timestamp", "-62135596800", dt.datetime(1, 1, 1, tzinfo=UTC)),
    ("timestamp_ntz", '"2026-11-05"', dt.datetime(2026, 11, 5)),
    ("timestamp_ntz", '"2026-11-05 07:08:09.000001"', dt.datetime(2026, 11, 5, 7, 8, 9, 1)),
    ("array<int>", "[]", []),
    ("array<int>", "[1, null ,2]", [1, None, 2]),
    ("array<array<float>>", "[[1.5],[],null,[null]]", [[1.5], [], None, [None]]),
    ("array<struct<x:date>>", '[{"x":"2026-11-05"},{},null]', [{"x": dt.date(2026, 11, 5)}, {"x": None}, None]),
    ("map<string,int>", '{"b":1,"a":null,"":3}', [("b", 1), ("a", None), ("", 3)]),
    ("map<string,array<binary>>", '{"a":["aGk="]}', [("a", [b"hi"])]),
    ("struct<x:int,y:string>", "{}", {"x": None, "y": None}),
    ("struct<x:int,y:string>", '{"z":1,"y":"a","X":7}', {"x": None, "y": "a"}),
    ("struct<x:struct<y:int>>", '{"x":{"y":1,"x":2}}', {"x": {"y": 1}}),
]


@pytest.mark.parametrize(("data_type", "text", "expected"), GOOD, ids=[f"{t}={v[:30]}" for t, v, _ in GOOD])
def test_what_a_column_takes(data_type: str, text: str, expected: Any) -> None:
    found = value(data_type, text)
    assert repr(found).replace("zoneinfo.ZoneInfo(key='UTC')", "datetime.timezone.utc") == repr(expected)


@pytest.mark.parametrize("data_type", ["float", "double"])
@pytest.mark.parametrize("text", ["NaN", '"NaN"'])
def test_nan_is_taken_bare_and_as_a_string(data_type: str, text: str) -> None:
    assert math.isnan(value(data_type, text))


BAD: list[tuple[str, str, str]] = [
    ("bigint", "1.0", "found 1.0, expected bigint"),
    ("bigint", "1e3", "found 1e3, expected bigint"),
    ("bigint", '"1"', 'found "1", expected bigint'),
    ("bigint", "true", "found true, expected bigint"),
    ("bigint", "9223372036854775808", "found 9223372036854775808, expected bigint: -9223372036854775808 to 9223372036854775807"),
    ("bigint", "1" * 5000, f"found {'1' * 60}... (5000 characters), expected bigint"),
    ("tinyint", "128", "found 128, expected tinyint: -128 to 127"),
    ("smallint", "-32769", "expected smallint"),
    ("int", "2147483648", "expected int"),
    ("int", "[1]", "found [1], expected int"),
    ("int", "{}", "found {}, expected int"),
    ("int", "NaN", "found NaN, expected int"),
    ("int", "01", "not JSON"),
    ("int", "+1", "not JSON: found '+' at character 6, expected a value"),
    ("int", "1.", "not JSON: found '.' at character 7"),
    ("int", "tru", "not JSON"),
    ("int", "nul", "not JSON"),
    ("int", "'1'", "not JSON"),
    ("int", "", "not JSON: found '}' at character 6"),
    ("decimal(5,2)", "1.234", "found 1.234, expected decimal(5,2): at most 2 digits after the point"),
    ("decimal(5,2)", "1e-3", "at most 2 digits after the point"),
    ("decimal(5,2)", "1000", "found 1000, expected decimal(5,2): at most 3 digits before the point"),
    ("decimal(5,2)", "1e3", "at most 3 digits before the point"),
    ("decimal(5,2)", "1e99999", "at most 3 digits before the point"),
    ("decimal(5,2)", '"1,5"', 'found "1,5", expected decimal(5,2), a number or a numeric string'),
    ("decimal(5,2)", '" 1"', "a numeric string"),
    ("decimal(5,2)", '"1 "', "a numeric string"),
    ("decimal(5,2)", '""', "a numeric string"),
    ("decimal(5,2)", '"."', "a numeric string"),
    ("decimal(5,2)", '"NaN"', "a numeric string"),
    ("decimal(5,2)", '"1_0"', "a numeric string"),
    ("decimal(5,2)", '"\u0661"', "a numeric string"),
    ("decimal(5,2)", "NaN", "found NaN, expected decimal(5,2)"),
    ("decimal(5,2)", "true", "found true, expected decimal(5,2)"),
    ("decimal(5,2)", '"1e99999999999999999999"', "no decimal"),
    ("decimal(38,38)", "1", "at most 0 digits before the point"),
    ("decimal(38,38)", "7", "at most 0 digits before the point"),
    ("decimal(38,37)", "1e37", "at most 1 digits before the point"),
    ("decimal(38,0)", "1" + "0" * 38, "at most 38 digits before the point"),
    ("double", "1e400", "found 1e400, expected double: it is too large"),
    ("double", '"1.5"', 'found "1.5", expected double'),
    ("double", '"INF"', 'found "INF", expected double'),
    ("double", "Inf", "not JSON"),
    ("double", "-NaN", "not JSON"),
    ("double", "true", "found true, expected double"),
    ("float", "1e39", "found 1e39, expected float: it is too large"),
    ("float", "-3.5e38", "too large"),
    ("string", r'"\ud800"', r"the lone surrogate '\ud800'"),
    ("string", r'"a\udc00b"', r"the lone surrogate '\udc00'"),
    ("string", '"\x01"', "not JSON"),
    ("string", '"\n"', "not JSON"),
    ("string", r'"\x41"', "not JSON"),
    ("string", '"a', "not JSON: Unterminated string"),
    ("varchar(3)", '"abcd"', "found abcd (4 characters), expected varchar(3)"),
    ("char(2)", "1.5", "expected varchar(2)"),
    ("boolean", '"true"', 'found "true", expected boolean'),
    ("boolean", "1", "found 1, expected boolean"),
    ("boolean", "True", "not JSON"),
    ("binary", '"aGk"', "base64 with padding"),
    ("binary", '"aGk=="', "base64 with padding"),
    ("binary", '"a Gk="', "base64 with padding"),
    ("binary", '"-_-_"', "base64 with padding"),
    ("binary", '"aGk=aGk="', "base64 with padding"),
    ("binary", '"é==="', "base64 with padding"),
    ("binary", "1", "found 1, expected binary"),
    *[
        ("date", f'"{v}"', "expected date: yyyy-MM-dd")
        for v in ("", "2026-1-5", "2026-11-05T00:00:00", " 2026-11-05", "2026-02-29", "0000-12-31", "20261105", "12026-01-01")
    ],
    ("date", "20000", "found 20000, expected date"),
    *[
        ("timestamp", f'"{v}"', "expected timestamp: yyyy-MM-dd")
        for v in (
            "",
            "2026",
            "2026-11",
            "2026-11-05T",
            "2026-11-05Z",
            "2026-11-05T7:08:09Z",
            "2026-11-05T24:00:00Z",
            "2026-11-05T07:08:60Z",
        )
    ],
    *[
        ("timestamp", f'"2026-11-05T07:08:09{v}"', "expected timestamp")
        for v in (".Z", "z", " Z", "+2:00", "+24:00", "+02:60", "UTC", ",5Z", "Z ", "+")
    ],
    ("timestamp", '"2026-02-29T00:00:00Z"', "there is no such day"),
    ("timestamp", '"0000-12-31T00:00:00Z"', "there is no such day"),
    ("timestamp", '"0001-01-01T00:00:00+00:01"', "the years 0001 to 9999"),
    ("timestamp", '"9999-12-31T23:59:59-00:01"', "the years 0001 to 9999"),
    ("timestamp", '"2026-11-05T07:08:09.1234567Z"', "at most 6 digits of a second"),
    ("timestamp", "1790000000123", "an integer is seconds since 1970, in the years 0001 to 9999"),
    ("timestamp", "-62135596801", "seconds since 1970"),
    ("timestamp", "1" * 5000, "seconds since 1970"),
    ("timestamp", "1700000000.5", "found 1700000000.5, expected timestamp"),
    ("timestamp", "true", "found true, expected timestamp"),
    ("timestamp", r'"2026-11-05\n\ud800"', r'found "2026-11-05\n\ud800", expected timestamp'),
    ("timestamp_ntz", '"2026-11-05T07:08:09Z"', "expected timestamp_ntz: no time zone"),
    ("timestamp_ntz", '"2026-11-05T07:08:09+02"', "no time zone"),
    ("timestamp_ntz", "1700000000", "found 1700000000, expected timestamp_ntz"),
    ("array<int>", "{}", "found {}, expected array<int>"),
    ("array<int>", "1", "found 1, expected array<int>"),
    ("array<int>", "[1,]", "not JSON"),
    ("array<int>", "[1 2]", "not JSON"),
    ("array<int>", "[1", "not JSON"),
    ("array<int>", '[1,2,"3"]', 'column `a[2]`: found "3", expected int'),
    ("map<string,int>", "[]", "found [], expected map<string,int>"),
    ("map<string,int>", '{"k":1,"k":2}', "column `a['k']`: found twice"),
    ("map<string,int>", '{"k":"x"}', "column `a['k']`: found \"x\", expected int"),
    ("map<string,int>", r'{"\ud800":1}', r"column `a['\ud800']`: found the lone surrogate"),
    ("struct<x:int>", "[]", "found [], expected a JSON object"),
    ("struct<x:int>", '[{"x":1}]', "expected a JSON object"),
    ("struct<x:int>", '{"x":1,"x":1}', "column `a.x`: found twice"),
    ("struct<x:int>", '{"x":1,"\\u0078":null}', "column `a.x`: found twice"),
    ("array<struct<x:array<int>>>", '[{},{"x":[1,true]}]', "column `a[1].x[1]`: found true, expected int"),
]


@pytest.mark.parametrize(("data_type", "text", "expected"), BAD, ids=[f"{t}={v[:30]}" for t, v, _ in BAD])
def test_what_makes_a_record_bad(data_type: str, text: str, expected: str) -> None:
    found = reason(f"a {data_type}", f'{{"a":{text}}}'.encode("utf-8", "surrogatepass"))
    assert expected in found
    assert found.startswith("column `a") or "not JSON" in found


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (b"", "expected a JSON object, found nothing"),
        (b"  \n", "expected a JSON object, found nothing"),
        (b"null", "expected a JSON object, found null"),
        (b"5", "expected a JSON object, found 5"),
        (b'"x"', 'expected a JSON object, found "x"'),
        (b'[{"a":1}]', 'expected a JSON object, found [{"a":1}]'),
        (b'\xef\xbb\xbf{"a":1}', r"expected a JSON object, found '\ufeff'"),
        (b'{"a":1}{"a":2}', 'expected one JSON object, found {"a":2} after it, at character 8'),
        (b'{"a":1}\n{"a":2}', 'found {"a":2} after it'),
        (b'{"a":1},{"a":2}', "found ',' after it"),
        (b'{"a":1} null', "found null after it"),
        (b'{"a":1}x', "found 'x' after it"),
        (b'{"a":1}\x00', r"found '\x00' after it"),
        (b'{"a":1,}', "not JSON: found '}' at character 8, expected another value after `,`"),
        (b'{"a":1,,}', "not JSON: found ',' at character 8, expected a name in double quotes"),
        (b"{'a':1}", "expected a name in double quotes"),
        (b"{a:1}", "expected a name in double quotes"),
        (b'{"a" 1}', "expected `:`"),
        (b'{"a":1 "b":2}', "expected `,` or `}`"),
        (b'{"a":1', "not JSON: it ends too early, after 6 characters"),
        (b"{", "ends too early"),
        (b'{"a":1]', "expected `,` or `}`"),
        (b'{"a":1/*x*/}', "expected `,` or `}`"),
        (b'{"a":1 //x\n}', "expected `,` or `}`"),
        (b'{"z":[1,}', "not JSON"),
        (b'{"z":"\xff"}', "not UTF-8: byte 0xff at position 6"),
        (b'{"z":"\xed\xa0\x80"}', "not UTF-8"),
        (b'{"\xc3":1}', "not UTF-8"),
        (b'{"z":"\x1f"}', "not JSON"),
        (b'{"z":Inf}', "not JSON"),
        (b'{"z":-NaN}', "not JSON"),
        (b'{"z":1e}', "not JSON"),
        (b'{"a":1,"z":nulL}', "not JSON"),
        (b'{"a":1,"a":1}', "column `a`: found twice in one object, expected once"),
        (b'{"a":null,"\\u0061":null}', "column `a`: found twice in one object, expected once"),
        (b'\xc2\xa0{"a":1}', "expected a JSON object"),
        (b'{\x0c"a":1}', "not JSON"),
        (b'{"z":' + b"[" * 500 + b"]" * 500 + b"}", "nested more than 500 deep"),
        (b'{"z":' * 501 + b"1" + b"}" * 501, "nested more than 500 deep"),
        (b"[" * 2_000_000, "nested more than 500 deep"),
        (b'{"a":' * 400_000, "nested more than 500 deep"),
    ],
    ids=lambda v: repr(v)[:40] if isinstance(v, bytes) else "",
)
def test_what_is_not_exactly_one_json_object_is_bad(record: bytes, expected: str) -> None:
    assert expected in reason("a bigint", record)


@pytest.mark.parametrize(
    "record",
    [
        b'{"a":1}',
        b' \t\r\n{ "a"\n:\r\n1\t}\n',
        b'{"z":"x","a":1,"z":{"a":"y","z":[{"a":{}}]}}',
        b'{"\\u0061":1,"A":"other","b":NaN,"c":[-Infinity,Infinity]}',
        b'{"z":"\\ud800","a":1,"\\udc00":1}',
        b'{"z":1e400,"a":1,"y":' + b"1" * 5000 + b"}",
        '{"é\\u0000":"\x7f\u2028😀","a":1}'.encode(),
        b'{"a":1,"z":"Inf, NaN] -NaN} //"}',
        b'{"z":' + b"[" * 499 + b"]" * 499 + b',"a":1}',
        b'{"z":"' + b"[{" * 5000 + b'","a":1}',
        b'{"z":[' + b"[]," * 5000 + b'{}],"a":1}',
        b'{"z":"' + b"x" * 3_000_000 + b'","a":1}',
    ],
    ids=lambda v: repr(v)[:40],
)
def test_fields_that_are_not_in_the_schema_are_passed_over(record: bytes) -> None:
    rows, bad = decode("a bigint", b'{"a":0}', record, b'{"a":2}')
    assert bad == {}
    assert [r["a"] for r in rows] == [0, 1, 2]


def test_null_or_missing_in_a_not_null_column_is_bad() -> None:
    assert reason("a bigint NOT NULL", b'{"a":null}') == "column `a`: found null, expected bigint NOT NULL"
    assert reason("a bigint NOT NULL", b"{}") == "column `a`: missing, expected bigint NOT NULL"
    nested = "x int, s struct<a: int NOT NULL>, l array<struct<b: string NOT NULL>>, NULL string, `NOT NULL` int"
    rows, bad = decode(
        nested, b'{"s":{}}', b'{"s":null}', b'{"s":{"a":1}}', b'{"l":[null,{"b":""}]}', b'{"l":[{"b":""},{"b":null}]}', b"{}"
    )
    assert bad == {0: "column `s.a`: missing, expected int NOT NULL", 4: "column `l[1].b`: found null, expected string NOT NULL"}
    assert rows[2]["s"] == {"a": 1}
    assert rows[3]["l"] == [None, {"b": ""}]


def test_names_are_case_sensitive_and_may_hold_anything() -> None:
    schema = 'id int, `a.b` int, `q"` int, `é` int, ```` int'
    rows, bad = decode(schema, b'{"ID":9,"a.b":1,"a":{"b":9},"q\\"":2,"\\u00e9":3,"`":4}', b'{"id":5,"`":null}')
    assert bad == {}
    assert rows[0] == {"id": None, "a.b": 1, 'q"': 2, "é": 3, "`": 4}
    assert rows[1]["id"] == 5


def test_a_reason_shows_the_beginning_of_what_was_found_on_one_line() -> None:
    found = reason("a int", b'{"a":"' + b"x" * 1_000_000 + b'"}')
    assert found == f'column `a`: found "{"x" * 59}... (1000002 characters), expected int'
    assert "\n" not in reason("d date", b'{"d":"2026\\n\\u001b[31m\\ud800"}')


TEXT_MAPS = (
    b'{"id":1,"m":{"a":"x","b":null},"n":{}}', b'{"id":2}', b'{"id":3,"m":null}', '{"id":4,"m":{"\\u00fc":"é\\n"}}'.encode(),
    b'{"id":5,"\\u006d":{"q":"w"}}', b' {"id":6,"m" : { "a" : "b" } } ', b'{"id":7,"m":{"":""}}', b'{"id":8,"M":{"a":"b"}}',
)  # fmt: skip
OTHER_MAPS = (
    b'{"id":1,"m":{"a":1}}', b'{"id":1,"m":{"a":true}}', b'{"id":1,"m":{"a":{"b":1}}}', b'{"id":1,"m":[]}', b'{"id":1,"m":"x"}',
    b'{"id":1,"m":{"a":"1","a":"2"}}', b'{"id":1,"m":{"a\\u0062":"1","ab":"2"}}', b'{"id":1,"m":{"a":"x"},"m":{"a":"y"}}',
    b'{"id":1,"m":{"\\ud800":"x"}}', b'{"id":1,"m":{"a":"\\ud800"}}', b'{"id":1,"m":{"a":"b",}}', b'{"id":1,"m":{"a":"\t"}}',
    b'{"id":1,"m":{"a":1e400}}', b'{"id":1,"z":NaN,"m":{"a":"b"}}', b'{"id":1,"x":-Infinity,"m":{"k":"v"}}',
    b'{"id":1,"m":{"a":"b"}}{"id":2}', b'[]', b"null", b"",
)  # fmt: skip


TOKENS = (
    "1", "-2", "3.5", "1e3", "1e-400", "9223372036854775808", '"x"', '"4"', '"aGk="', '"2024-02-29"', "true", "null", "{}", "[]",
    "NaN", '{"a":1,"b":"z"}', '{"a":1,"a":2}', "[1,2]", "[1.5,null]", '"\\ud800"', '1 ,\n "k2" : 7', '1,"k":2',
    '1,"\\u006b":2', "Infinity",
)  # fmt: skip
"""JSON texts, which stand for the value of the first name in a map."""
KINDS = (
    "string", "varchar(2)", "int", "bigint", "double", "boolean", "decimal(5,2)", "decimal(38,20)", "date", "timestamp", "binary",
    "array<double>", "struct<a: int, b: string>", "struct<a: int NOT NULL>", "map<string,int>",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_maps_mean_in_batches_what_they_mean_row_by_row(kind):
    decoder = JsonDecoder(Json(schema=f"id bigint, m map<string,{kind}>").columns, few=0)
    texts = [f'{{"id":{at},"m":{{"k":{token}}}}}'.encode() for at, token in enumerate(TOKENS)]
    good = [text for text in texts if not decoder.decode_row_wise([text]).bad]
    for records in (texts, good, *([*good[:2], text, *good[2:4]] for text in texts)):
        found, expected = decoder.decode(records), decoder.decode_row_wise(records)
        assert repr(found.batch.to_pylist()) == repr(expected.batch.to_pylist()) and found.bad == expected.bad


def test_maps_of_texts_are_read_in_batches_and_mean_what_they_mean_row_by_row():
    columns = Json(schema="id bigint, m map<string,string>, n map<string,string>").columns
    whole = JsonDecoder(columns, few=0)
    assert whole.decode(TEXT_MAPS).batch.equals(whole.decode_row_wise(TEXT_MAPS).batch)
    decoder = JsonDecoder(columns, few=0)
    assert decoder.decode(TEXT_MAPS).batch.num_rows == len(TEXT_MAPS) and decoder.row_wise_count == 0
    for other in OTHER_MAPS:
        records = (*TEXT_MAPS[:4], other, *TEXT_MAPS[4:])
        found, expected = decoder.decode(records), decoder.decode_row_wise(records)
        assert found.batch.equals(expected.batch) and found.bad == expected.bad, other
