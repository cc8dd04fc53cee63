"""Every documented example of Kafka Connect's transforms gives what the documentation says it gives."""

from __future__ import annotations

import base64
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal

import pytest
from pyspark.sql import functions as F

from airflow_kafka_spark.transforms import (
    Cast,
    DropHeaders,
    ExtractField,
    Filter,
    Flatten,
    HeaderFrom,
    HoistField,
    InsertField,
    InsertHeader,
    MaskField,
    RegexRouter,
    ReplaceField,
    TimestampConverter,
    TimestampRouter,
    TopicNameMatches,
    ValueToKey,
)
from airflow_kafka_spark.transforms.conversions import format_timestamp, parse_timestamp
from tests.transforms.cases import Case, Row, check


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def header(name: str, text: str | None) -> dict:
    return {"key": name, "value": None if text is None else b64(text)}


DAY_AND_TIME = datetime(1970, 1, 2, 0, 0, 1, 234000, tzinfo=timezone.utc)
TIMES = "yyyy MM dd HH mm ss SSS z"
RFC = "EEE, dd MMM yyyy HH:mm:ss z"


def route(name: str, regex: str, replacement: str, topic: str, expected: str) -> Case:
    return Case(name, [RegexRouter(regex, replacement)], [Row("v", topic=topic)], [{"topic": expected, "value": "v"}])


def cast(name: str, given: object, of: str, to: str, expected: object) -> Case:
    types = {"int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint", "float32": "float", "float64": "double"}
    return Case(name, [Cast(to)], [Row(given)], [{"value": expected}], value=of, types={"value": types.get(to, to)})


def moment(name: str, given: object, of: str, to: str, expected: object, kind: str, **options: str) -> Case:
    transform = TimestampConverter(to, **options)
    return Case(
        name, [transform], [Row(given), Row(None)], [{"value": expected}, {"value": None}], value=of, types={"value": kind}
    )


ROUTERS = [
    route("RegexRouter static", "foo", "bar", "foo", "bar"),
    route("RegexRouter does not match", "foo", "bar", "orig", "orig"),
    route("RegexRouter matches whole names only", "foo", "bar", "foofoo", "foofoo"),
    route("RegexRouter identity", "(.*)", "$1", "orig", "orig"),
    route("RegexRouter prefix", "(.*)", "prefix-$1", "orig", "prefix-orig"),
    route("RegexRouter suffix", "(.*)", "$1-suffix", "orig", "orig-suffix"),
    route("RegexRouter replaces the first match of a name that matches as a whole", "a|ab", "Q", "ab", "Qb"),
    route("RegexRouter replaces once", "(.+?)", "<$1>", "test", "<t>est"),
    route("RegexRouter leaves a name that matches in part", "a|ab", "Q", "abc", "abc"),
    route("RegexRouter slice", r"(.*)-(\d\d\d\d\d\d\d\d)", "$1", "index-20160117", "index"),
    Case(
        "TimestampRouter default",
        [TimestampRouter()],
        [Row("v", timestamp=datetime.fromtimestamp(1483425001, timezone.utc)), Row("v", timestamp=None)],
        [
            {"topic": "test-20170103"},
            {
                "topic": "test",
                "__kafka_error": "TimestampRouter: found a record without a timestamp, expected one to name the topic by",
            },
        ],
    ),
    Case(
        "TimestampRouter format",
        [TimestampRouter("foo-${topic}-${timestamp}", "yyyyMM")],
        [Row("v", timestamp=datetime.fromtimestamp(1483425001, timezone.utc))],
        [{"topic": "foo-test-201701"}],
    ),
    Case(
        "TimestampRouter with the year of the week, as Confluent documents it",
        [TimestampRouter("foo-${topic}-${timestamp}", "YYYYMM")],
        [Row("v", timestamp=datetime.fromtimestamp(1483425001, timezone.utc))],
        [{"topic": "foo-test-201701"}],
    ),
    route("RegexRouter with the whole match", ".*", "acme_$0", "Order", "acme_Order"),
    route("RegexRouter with a quotation that does not end", r"(a)\Q.b", "$1", "a.b", "a"),
    Case("Filter with TopicNameMatches", [Filter(predicate=TopicNameMatches("foo"))], [Row("v", topic="foo")], []),
]

CASTS = [
    cast("Cast int8", 42, "int", "int8", 42),
    cast("Cast int16", 42, "int", "int16", 42),
    cast("Cast int32", 42, "int", "int32", 42),
    cast("Cast int64", 42, "int", "int64", 42),
    cast("Cast float32", 42, "int", "float32", 42.0),
    cast("Cast float64", 42, "int", "float64", 42.0),
    cast("Cast true", 42, "int", "boolean", True),
    cast("Cast false", 0, "int", "boolean", False),
    cast("Cast string", 42, "int", "string", "42"),
    cast("Cast of the documentation", 63521704.02, "double", "string", "63521704.02"),
    cast("Cast a large float32 to string", 63521704.0, "float", "string", "63521704.0"),
    cast("Cast a very large float to string", 1e15, "double", "string", "1.0E15"),
    cast("Cast a small float to string", -0.0001, "double", "string", "-1.0E-4"),
    cast("Cast NaN to string", float("nan"), "double", "string", "NaN"),
    Case(
        "Cast fields of the documentation, in a list and in capitals",
        [Cast(["ID:STRING", "score:float64"])],
        [Row((46920, 4761))],
        [{"value": {"ID": "46920", "score": 4761.0}}],
        value="struct<ID:int,score:int>",
    ),
    cast("Cast decimal to string", Decimal(42), "decimal(10,0)", "string", "42"),
    cast("Cast timestamp to string", DAY_AND_TIME, "timestamp", "string", "1970-01-02T00:00:01.234Z"),
    cast("Cast float to int32", 42.125, "float", "int32", 42),
    cast("Cast half is false", 0.5, "double", "boolean", False),
    cast("Cast NaN is false", float("nan"), "double", "boolean", False),
    cast("Cast any other text is false", "yes", "string", "boolean", False),
    cast("Cast TRUE", "TRUE", "string", "boolean", True),
    cast("Cast null", None, "string", "int64", None),
    cast("Cast long binary", b"x" * 100, "binary", "string", base64.b64encode(b"x" * 100).decode()),
    Case(
        "Cast fields",
        [
            Cast(
                "int8:int16,int16:int32,int32:int64,int64:boolean,float32:float64,float64:boolean,boolean:int8,string:int32,"
                "bigdecimal:string,date:string,optional:int32,bytes:string"
            )
        ],
        [
            Row(
                (
                    8,
                    16,
                    32,
                    64,
                    32.0,
                    -64.0,
                    True,
                    "42",
                    Decimal(42),
                    date(1970, 1, 2),
                    None,
                    DAY_AND_TIME,
                    bytes.fromhex("FEDCBA9876543210"),
                )
            ),
            Row(None),
        ],
        [
            {
                "value": {
                    "int8": 8,
                    "int16": 16,
                    "int32": 32,
                    "int64": True,
                    "float32": 32.0,
                    "float64": True,
                    "boolean": 1,
                    "string": 42,
                    "bigdecimal": "42",
                    "date": "1970-01-02",
                    "optional": None,
                    "timestamp": "1970-01-02T00:00:01.234Z",
                    "bytes": "/ty6mHZUMhA=",
                }
            },
            {"value": None},
        ],
        value="struct<int8:tinyint,int16:smallint,int32:int,int64:bigint,float32:float,float64:double,boolean:boolean,string:string,"
        "bigdecimal:decimal(10,0),date:date,optional:float,timestamp:timestamp,bytes:binary>",
        types={
            "value": "struct<int8:smallint,int16:int,int32:bigint,int64:boolean,float32:double,float64:boolean,boolean:tinyint,"
            "string:int,bigdecimal:string,date:string,optional:int,timestamp:timestamp,bytes:string>"
        },
    ),
    Case(
        "Cast dates and times to numbers",
        [Cast({"date": "int32", "timestamp": "int64", "none": "int32"})],
        [Row((date(1970, 1, 2), datetime(1970, 1, 1, tzinfo=timezone.utc), None))],
        [{"value": {"date": 1, "timestamp": 0, "none": None}}],
        value="struct<date:date,timestamp:timestamp,none:timestamp>",
    ),
    Case(
        "Cast key",
        [Cast("int8", of="key")],
        [Row("bogus", key=42)],
        [{"key": 42, "value": "bogus"}],
        key="int",
        types={"key": "tinyint"},
    ),
]

FIELDS = [
    Case(
        "ExtractField",
        [ExtractField("magic", of="key")],
        [Row(key=(42,)), Row()],
        [{"key": 42}, {"key": None}],
        key="struct<magic:int>",
    ),
    Case(
        "ExtractField path",
        [ExtractField("magic.foo", of="key", field_syntax_version="V2")],
        [Row(key=((42,),))],
        [{"key": 42}],
        key="struct<magic:struct<foo:int>>",
    ),
    Case(
        "ExtractField of the documentation",
        [ExtractField("id")],
        [Row((42, 3.5)), Row(None)],
        [{"value": 42}, {"value": None}],
        value="struct<id:int,cost:double>",
    ),
    Case("HoistField", [HoistField("magic", of="key")], [Row(key=42)], [{"key": {"magic": 42}}], key="int"),
    Case(
        "HoistField of a null",
        [HoistField("line")],
        [Row("foo"), Row(None)],
        [{"value": {"line": "foo"}}, {"value": {"line": None}}],
    ),
    Case(
        "HoistField and InsertField of the documentation",
        [HoistField("line"), InsertField(static_field="data_source", static_value="test-file-source")],
        [Row("foo"), Row("bar"), Row("hello world")],
        [{"value": {"line": line, "data_source": "test-file-source"}} for line in ("foo", "bar", "hello world")],
    ),
    Case(
        "InsertField",
        [
            InsertField(
                topic_field="topic_field!",
                partition_field="partition_field",
                offset_field="offset_field?",
                timestamp_field="timestamp_field?",
                static_field="instance_id",
                static_value="my-instance-id",
            )
        ],
        [Row((42,)), Row(None), Row((None,), timestamp=None)],
        [
            {
                "value": {
                    "magic": 42,
                    "topic_field": "test",
                    "partition_field": 0,
                    "offset_field": 7,
                    "timestamp_field": "1970-01-01T00:00:00.789Z",
                    "instance_id": "my-instance-id",
                }
            },
            {"value": None},
            {
                "value": {
                    "magic": None,
                    "topic_field": "test",
                    "partition_field": 0,
                    "offset_field": 7,
                    "timestamp_field": None,
                    "instance_id": "my-instance-id",
                }
            },
        ],
        value="struct<magic:bigint>",
    ),
    Case(
        "InsertField into the key of a tombstone",
        [InsertField(topic_field="topic_field!", timestamp_field="t!", of="key")],
        [Row(key=(42,)), Row(), Row(key=(1,), timestamp=None)],
        [
            {"key": {"magic": 42, "topic_field": "test", "t": "1970-01-01T00:00:00.789Z"}, "value": None},
            {"key": None, "value": None},
            {"__kafka_error": "InsertField: found a record without a timestamp, expected one for `t`"},
        ],
        key="struct<magic:bigint>",
    ),
    Case(
        "ReplaceField exclude and rename",
        [ReplaceField(exclude="dont", renames="abc:xyz,foo:bar")],
        [Row(("whatever", 42, True, "etc")), Row(None)],
        [{"value": {"xyz": 42, "bar": True, "etc": "etc"}}, {"value": None}],
        value="struct<dont:string,abc:int,foo:boolean,etc:string>",
    ),
    Case(
        "ReplaceField include and rename",
        [ReplaceField(include=["abc", "foo"], renames={"abc": "xyz", "foo": "bar"})],
        [Row(("whatever", 42, True, "etc"))],
        [{"value": {"xyz": 42, "bar": True}}],
        value="struct<dont:string,abc:int,foo:boolean,etc:string>",
    ),
    Case(
        "ReplaceField exclude wins",
        [ReplaceField(include="a,b", exclude="b")],
        [Row((1, 2, 3))],
        [{"value": {"a": 1}}],
        value="struct<a:int,b:int,c:int>",
    ),
    Case(
        "ReplaceField swaps names",
        [ReplaceField(renames="a:b,b:a", of="key")],
        [Row(key=(1, 2))],
        [{"key": {"b": 1, "a": 2}}],
        key="struct<a:int,b:int>",
    ),
    Case(
        "ValueToKey",
        [ValueToKey("a,b")],
        [Row((1, 2, 3)), Row(None, key="old")],
        [
            {"key": {"a": 1, "b": 2}, "value": {"a": 1, "b": 2, "c": 3}},
            {"key": None, "__kafka_error": "ValueToKey: found a null value (a tombstone), expected a struct"},
        ],
        value="struct<a:int,b:int,c:int>",
        types={"key": "struct<a:int,b:int>"},
    ),
    Case(
        "Flatten",
        [Flatten()],
        [Row((((8, True, "stringy", b"bytes"),),)), Row((None,)), Row(None)],
        [
            {"value": {"A.B.int8": 8, "A.B.boolean": True, "A.B.string": "stringy", "A.B.bytes": b64("bytes")}},
            {"value": {"A.B.int8": None, "A.B.boolean": None, "A.B.string": None, "A.B.bytes": None}},
            {"value": None},
        ],
        value="struct<A:struct<B:struct<int8:tinyint,boolean:boolean,string:string,bytes:binary>>>",
    ),
    Case(
        "Flatten with a delimiter, and arrays as they are",
        [Flatten("_")],
        [Row((42, ("x", [(("lfg",),)])))],
        [{"value": {"id": 42, "content_name": "x", "content_foo": [{"baz": {"lfg": "lfg"}}]}}],
        value="struct<id:int,content:struct<name:string,foo:array<struct<baz:struct<lfg:string>>>>>",
    ),
    Case("Flatten key", [Flatten(of="key")], [Row(key=((12,),))], [{"key": {"A.B": 12}}], key="struct<A:struct<B:int>>"),
    Case(
        "MaskField",
        [MaskField("bool,byte,short,int,long,float,double,string,date,timestamp,decimal,array,map,none")],
        [
            Row(
                (
                    42,
                    True,
                    1,
                    2,
                    3,
                    4,
                    5.0,
                    6.0,
                    "55.121.20.20",
                    date(2020, 1, 1),
                    DAY_AND_TIME,
                    Decimal(42),
                    [1, 2],
                    {"a": "b"},
                    None,
                )
            ),
            Row(None),
        ],
        [
            {
                "value": {
                    "magic": 42,
                    "bool": False,
                    "byte": 0,
                    "short": 0,
                    "int": 0,
                    "long": 0,
                    "float": 0.0,
                    "double": 0.0,
                    "string": "",
                    "date": "1970-01-01",
                    "timestamp": "1970-01-01T00:00:00.000Z",
                    "decimal": 0,
                    "array": [],
                    "map": {},
                    "none": None,
                }
            },
            {"value": None, "__kafka_error": "MaskField: found a null value (a tombstone), expected a struct"},
        ],
        value="struct<magic:int,bool:boolean,byte:tinyint,short:smallint,int:int,long:bigint,float:float,double:double,string:string,"
        "date:date,timestamp:timestamp,decimal:decimal(10,0),array:array<int>,map:map<string,string>,none:string>",
    ),
    Case(
        "MaskField with a replacement",
        [MaskField("ssn", "***-***"), MaskField("byte", "123.9"), MaskField(["long", "double", "decimal"], "123")],
        [Row(("1-2", 1, 2, 3.0, Decimal(1), None))],
        [{"value": {"ssn": "***-***", "byte": 123, "long": 123, "double": 123.0, "decimal": 123.0, "none": None}}],
        value="struct<ssn:string,byte:tinyint,long:bigint,double:double,decimal:decimal(5,1),none:string>",
    ),
]

OTHER = [header("other", "x")]
HEADER_CASES = [
    Case(
        "InsertHeader behind others",
        [InsertHeader("inserted", "inserted-value")],
        [Row("v", headers=[("existing", b"existing-value")]), Row(None)],
        [
            {"headers": [header("existing", "existing-value"), header("inserted", "inserted-value")], "value": "v"},
            {"headers": [header("inserted", "inserted-value")], "value": None},
        ],
    ),
    Case(
        "InsertHeader beside one of the same name",
        [InsertHeader("existing", "inserted-value")],
        [Row("v", headers=[("existing", b"existing-value")])],
        [{"headers": [header("existing", "existing-value"), header("existing", "inserted-value")]}],
    ),
    Case(
        "InsertHeader literals",
        [InsertHeader("byte", "1"), InsertHeader("none", "null"), InsertHeader("quoted", r'"a \" b"')],
        [Row("v")],
        [{"headers": [header("byte", "1"), header("none", None), header("quoted", 'a " b')]}],
    ),
    Case(
        "DropHeaders",
        [DropHeaders("to-drop")],
        [
            Row("v", headers=[("to-drop", b"1"), ("other", b"x"), ("to-drop", b"2")]),
            Row("v", headers=[("other", b"x")]),
            Row(None, headers=None),
        ],
        [{"headers": OTHER}, {"headers": OTHER}, {"headers": None}],
    ),
    Case(
        "HeaderFrom move",
        [HeaderFrom("id,ts", "record_id,event_timestamp", "move")],
        [Row((24, 1626102708861, "John Smith"), headers=[("other", b"x")]), Row(None, headers=[("other", b"x")])],
        [
            {
                "value": {"name": "John Smith"},
                "headers": [*OTHER, header("record_id", "24"), header("event_timestamp", "1626102708861")],
            },
            {
                "value": None,
                "headers": OTHER,
                "__kafka_error": "HeaderFrom: found a null value (a tombstone), expected a struct",
            },
        ],
        value="struct<id:int,ts:bigint,name:string>",
    ),
    Case(
        "HeaderFrom copy",
        [HeaderFrom("id,ts", "record_id,event_timestamp", "copy", of="key")],
        [Row("v", key=(11, None, "Harry"))],
        [
            {
                "key": {"id": 11, "ts": None, "name": "Harry"},
                "headers": [header("record_id", "11"), header("event_timestamp", None)],
            }
        ],
        key="struct<id:int,ts:bigint,name:string>",
    ),
    Case(
        "HeaderFrom one field for two headers, and structures with nulls in them",
        [HeaderFrom("n,n,s", "one,other,s", "move")],
        [Row((12345678.5, (1, None)))],
        [{"value": {}, "headers": [header("one", "12345678.5"), header("other", "12345678.5"), header("s", '{"a":1,"b":null}')]}],
        value="struct<n:double,s:struct<a:int,b:string>>",
    ),
    Case(
        "HeaderFrom types",
        [HeaderFrom(["b", "t", "f", "s", "a"], ["b", "t", "f", "s", "a"], "copy")],
        [Row((b"\xfe\xdc", DAY_AND_TIME, True, "text", [1, 2]))],
        [
            {
                "headers": [
                    header("b", "/tw="),
                    header("t", "1970-01-02T00:00:01.234Z"),
                    header("f", "true"),
                    header("s", "text"),
                    header("a", "[1,2]"),
                ]
            }
        ],
        value="struct<b:binary,t:timestamp,f:boolean,s:string,a:array<int>>",
    ),
]

MIDNIGHT = "1970-01-02T00:00:00.000Z"
TIME_ONLY = "1970-01-01T00:00:01.234Z"
BOTH = "1970-01-02T00:00:01.234Z"
MOMENTS = [
    moment("Timestamp to Timestamp", DAY_AND_TIME, "timestamp", "Timestamp", BOTH, "timestamp"),
    moment("Timestamp to Date", DAY_AND_TIME, "timestamp", "Date", "1970-01-02", "date"),
    moment("Timestamp to Time", DAY_AND_TIME, "timestamp", "Time", TIME_ONLY, "timestamp"),
    moment("Timestamp to unix", DAY_AND_TIME, "timestamp", "unix", 86401234, "bigint"),
    moment("Timestamp to string", DAY_AND_TIME, "timestamp", "string", "1970 01 02 00 00 01 234 UTC", "string", format=TIMES),
    moment("Date to Timestamp", date(1970, 1, 2), "date", "Timestamp", MIDNIGHT, "timestamp"),
    moment("unix to Timestamp", 86401234, "bigint", "Timestamp", BOTH, "timestamp"),
    moment("string to Timestamp", "1970 01 02 00 00 01 234 UTC", "string", "Timestamp", BOTH, "timestamp", format=TIMES),
    moment("micros to Timestamp", 86401234567, "bigint", "Timestamp", BOTH, "timestamp", unix_precision="microseconds"),
    moment("nanos to Timestamp", 86401234567890, "bigint", "Timestamp", BOTH, "timestamp", unix_precision="nanoseconds"),
    moment(
        "seconds to Timestamp", 86401, "bigint", "Timestamp", "1970-01-02T00:00:01.000Z", "timestamp", unix_precision="seconds"
    ),
    moment(
        "string to micros",
        "1970 01 02 00 00 01 234 UTC",
        "string",
        "unix",
        86401234000,
        "bigint",
        format=TIMES,
        unix_precision="microseconds",
    ),
    moment(
        "string to nanos",
        "1970 01 02 00 00 01 234 UTC",
        "string",
        "unix",
        86401234000000,
        "bigint",
        format=TIMES,
        unix_precision="nanoseconds",
    ),
    moment(
        "string to seconds",
        "1970 01 02 00 00 01 234 UTC",
        "string",
        "unix",
        86401,
        "bigint",
        format=TIMES,
        unix_precision="seconds",
    ),
    moment(
        "before 1970 to seconds", -1500, "bigint", "string", "1969-12-31 23:59:58.500", "string", format="yyyy-MM-dd HH:mm:ss.SSS"
    ),
    moment("the year of a week", 1483425001864, "bigint", "string", "201701", "string", format="YYYYMM"),
    moment("day and month names", "Tue, 03 jan 2017 06:30:01 GMT", "string", "unix", 1483425001000, "bigint", format=RFC),
    moment("two digits of a year", "25/04/99", "string", "Date", "1999-04-25", "date", format="dd/MM/yy"),
    moment(
        "a fraction behind digits", "20170103063001864", "string", "unix", 1483425001864, "bigint", format="yyyyMMddHHmmssSSS"
    ),
    Case(
        "no weekday where one is expected",
        [TimestampConverter("Date", format=RFC)],
        [Row("Foo, 03 Jan 2017 06:30:01 GMT")],
        [{"__kafka_error": f'TimestampConverter: the value is "Foo, 03 Jan 2017 06:30:01 GMT", expected a text like {RFC}'}],
    ),
    Case(
        "TimestampConverter field",
        [TimestampConverter("Timestamp", "ts")],
        [Row((86401234, "test")), Row((None, "test")), Row(None)],
        [{"value": {"ts": BOTH, "other": "test"}}, {"value": {"ts": None, "other": "test"}}, {"value": None}],
        value="struct<ts:bigint,other:string>",
        types={"value": "struct<ts:timestamp,other:string>"},
    ),
    Case(
        "TimestampConverter key",
        [TimestampConverter("Timestamp", of="key")],
        [Row(key=DAY_AND_TIME)],
        [{"key": BOTH}],
        key="timestamp",
    ),
    Case(
        "TimestampConverter of the documentation",
        [TimestampConverter("string", "event_date", "yyyy-MM-dd")],
        [Row((1556204536000,))],
        [{"value": {"event_date": "2019-04-25"}}],
        value="struct<event_date:bigint>",
    ),
]

CASES = [*ROUTERS, *CASTS, *FIELDS, *HEADER_CASES, *MOMENTS]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_documented_example_gives_the_documented_result(case, outcomes) -> None:
    check(case, outcomes[case.name])


WRITTEN = [
    "YYYYMM",
    "YY-ww",
    "Y",
    "u EEE",
    "W",
    "F",
    "WW/FF w",
    "hh:mm aa",
    "d.M.y H:m:s.SSS",
    "YYYY'Y'''",
    "yyyy#{MM}",
    "D k K G z X",
]


def test_moments_are_written_as_java_writes_them(spark) -> None:
    first = datetime(2015, 12, 20, 12, 5, tzinfo=timezone.utc)
    days = [first + timedelta(days=3 * n, milliseconds=n * 3600007) for n in range(130)]
    frame = spark.createDataFrame([(day,) for day in days], "at timestamp").coalesce(1)
    found = frame.select(*(format_timestamp(F.col("at"), pattern) for pattern in WRITTEN)).collect()
    java = spark._jvm.java
    for number, pattern in enumerate(WRITTEN):
        simple = java.text.SimpleDateFormat(pattern, java.util.Locale.US)
        simple.setTimeZone(java.util.TimeZone.getTimeZone("UTC"))
        wanted = [simple.format(java.util.Date(round(day.timestamp() * 1000))) for day in days]
        assert [row[number] for row in found] == wanted, pattern


def test_years_of_two_digits_are_among_the_80_before_and_the_20_behind(spark) -> None:
    frame = spark.createDataFrame([(text,) for text in ("31.12.45", "23.11.46", "29.02.60", "29.02.00")], "t string").coalesce(1)
    now = datetime(2026, 11, 22, tzinfo=timezone.utc)
    found = frame.select(F.year(parse_timestamp(F.col("t"), "dd.MM.yy", now))).collect()
    assert [row[0] for row in found] == [2045, 1946, 1960, 2000]
