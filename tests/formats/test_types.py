"""Spark's DDL, read without a JVM."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types as t

from airflow_kafka_spark.errors import SchemaInvalid
from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.formats.types import (
    Array,
    Column,
    Decimal,
    Map,
    Primitive,
    Struct,
    Text,
    parse_columns,
    parse_ddl,
    to_arrow_schema,
)


def one(text: str) -> Column:
    (column,) = parse_ddl(text)
    return column


@pytest.mark.parametrize(
    ("names", "arrow"),
    [
        ("tinyint byte", pa.int8()),
        ("smallint short", pa.int16()),
        ("int integer", pa.int32()),
        ("bigint long", pa.int64()),
        ("float real", pa.float32()),
        ("double", pa.float64()),
        ("decimal dec numeric", pa.decimal128(10, 0)),
        ("decimal(12) dec(12) numeric(12)", pa.decimal128(12, 0)),
        ("decimal(12,2) dec(12,2) numeric(12,2)", pa.decimal128(12, 2)),
        ("string varchar(7) char(7)", pa.string()),
        ("boolean", pa.bool_()),
        ("binary", pa.binary()),
        ("date", pa.date32()),
        ("timestamp timestamp_ltz", pa.timestamp("us", "UTC")),
        ("timestamp_ntz", pa.timestamp("us")),
        ("array<int>", pa.list_(pa.int32())),
        ("map<string,array<date>>", pa.map_(pa.string(), pa.list_(pa.date32()))),
        ("struct<a:int,b:map<string,double>>", pa.struct([("a", pa.int32()), ("b", pa.map_(pa.string(), pa.float64()))])),
    ],
)
def test_each_type_by_each_of_its_names_in_any_case(names: str, arrow: pa.DataType) -> None:
    for name in names.split():
        for spelled in (name, name.upper() if "<" not in name else name, name.title() if "<" not in name else name):
            assert to_arrow_schema(parse_ddl(f"c {spelled}")) == pa.schema([("c", arrow)])


def test_the_whole_of_it() -> None:
    columns = parse_ddl(
        """id BIGINT NOT NULL COMMENT 'it''s the \\'key\\'', customer: string, amount decimal( 12 , 2 ),
           `odd ``name``, or < not` int COMMENT "a \\"quoted\\" one" NOT NULL, tags array<string>, m map<string,int>,
           s struct<a:int, b struct<c: string NOT NULL>>, date date, `1` int"""
    )
    assert columns == (
        Column("id", Primitive("bigint"), False, "it's the 'key'"),
        Column("customer", Text()),
        Column("amount", Decimal(12, 2)),
        Column("odd `name`, or < not", Primitive("int"), False, 'a "quoted" one'),
        Column("tags", Array(Text())),
        Column("m", Map(Text(), Primitive("int"))),
        Column("s", Struct((Column("a", Primitive("int")), Column("b", Struct((Column("c", Text(), False),)))))),
        Column("date", Primitive("date")),
        Column("1", Primitive("int")),
    )
    assert pickle.loads(pickle.dumps(columns)) == columns
    assert hash(columns)


def test_not_null_is_not_nullable_in_arrow_also_inside() -> None:
    schema = to_arrow_schema(parse_ddl("a int NOT NULL, s struct<b: int NOT NULL, c: array<struct<d: int NOT NULL>>>"))
    assert schema.field("a").nullable is False
    assert schema.field("s").nullable is True
    assert schema.field("s").type.field("b").nullable is False
    assert schema.field("s").type.field("c").type.value_type.field("d").nullable is False


def test_a_struct_alone_is_the_schema() -> None:
    assert parse_ddl("struct<a:int,b:string>") == parse_ddl("a int, b string")
    assert one("struct int").name == "struct"


@pytest.mark.parametrize(
    ("text", "position", "found", "expected"),
    [
        ("", 0, "The schema is empty", "the name of a column, as in `id bigint, name string`"),
        ("   ", 3, "The schema is empty", "the name of a column"),
        ("id", 2, "the end", "a type"),
        ("id bigit", 3, "`bigit`", "perhaps `bigint`"),
        ("id foo", 3, "`foo`", "timestamp_ntz"),
        ("id INT64", 3, "`INT64`", "perhaps `bigint`"),
        ("id int8", 3, "`int8`", "perhaps `tinyint` for 8 bits, or `bigint`?"),
        ("at datetime", 3, "`datetime`", "perhaps `timestamp`"),
        (
            "a text, b datetime(6), c array<jsonb>, d foo, e int NOT",
            2,
            "`text`",
            "Further unknown types: `datetime` (perhaps `timestamp`?), `jsonb` (perhaps `string`?), `foo`",
        ),
        ('{"type": "object"}', 0, "`{`", "A text of JSON Schema goes to `Json.of_json_schema`"),
        ("id int,", 7, "the end", "the name of a column"),
        ("id int id2 int", 7, "`id2`", "`,` or the end"),
        ("id int NOT", 10, "the end", "`NULL`"),
        ("id int NULL", 7, "`NULL`", "`,` or the end"),
        ("id int COMMENT x", 15, "`x`", "in quotes"),
        ("id int COMMENT 'x", 15, "`'`", "backticks"),
        ("id int DEFAULT 3", 7, "`DEFAULT`", "`,` or the end"),
        ("order-id int", 5, "`-`", "backticks"),
        ("12 int", 0, "`12`", "backticks"),
        ("`` int", 0, "````", "the name of a column"),
        ("'a' int", 0, "`'a'`", "the name of a column"),
        ("a array", 7, "the end", "`<` after `array`"),
        ("a array<int", 11, "the end", "`>`"),
        ("a map<string>", 12, "`>`", "`,`"),
        ("a map<string,int,int>", 16, "`,`", "`>`"),
        ("a struct<>", 9, "`>`", "the name of a column"),
        ("a struct<b:int", 14, "the end", "`,` or `>`"),
        ("a bigint(20)", 8, "`(`", "`,` or the end"),
        ("a decimal(39,2)", 2, "`decimal(39,2)`", "p <= 38"),
        ("a decimal(5,6)", 2, "`decimal(5,6)`", "s <= p"),
        ("a decimal(0)", 2, "`decimal(0,0)`", "1 <= p"),
        ("a decimal()", 10, "`)`", "number of digits"),
        ("a decimal(5;2)", 11, "`;`", "a name, a type"),
        ("a decimal(5 2)", 12, "`2`", "`,` or `)`"),
        ("a varchar", 9, "the end", "`(`"),
        ("a varchar(0)", 10, "`0`", "at least 1"),
        ("a char(x)", 7, "`x`", "length"),
        ("a int, a string", 7, "`a`", "`a` is there already"),
        ("Id int, iD string", 8, "`iD`", "`Id` is there already, and Spark treats names that differ only by case as one"),
        ("s struct<a:int,A:int>", 15, "`A`", "`a` is there already"),
        ("a " + "array<" * 60 + "int" + ">" * 60, 302, "`array`", "50 deep"),
    ],
)
def test_a_mistake_is_named_with_its_place(text: str, position: int, found: str, expected: str) -> None:
    with pytest.raises(SchemaInvalid) as raised:
        parse_ddl(text)
    assert (raised.value.position, raised.value.found.partition(" at ")[0].removeprefix("The schema has ")) == (position, found)
    assert expected in raised.value.expected
    (problem,) = Json(text).validate("value")
    assert problem.where == "value.schema"
    assert found in problem.what
    assert expected in problem.what


def test_a_type_that_is_unknown_lists_the_known_ones() -> None:
    with pytest.raises(SchemaInvalid) as raised:
        parse_ddl("a interval")
    for known in ("bigint", "long", "decimal(p,s)", "timestamp_ntz", "array<...>", "varchar(n)"):
        assert known in str(raised.value)


def test_a_struct_type_of_pyspark_is_read_whole() -> None:
    schema = t.StructType(
        [
            t.StructField("id", t.LongType(), nullable=False),
            t.StructField("c", t.StringType(), metadata={"comment": "who"}),
            t.StructField("d", t.DecimalType(12, 2)),
            t.StructField("l", t.ArrayType(t.ShortType(), containsNull=False)),
            t.StructField("m", t.MapType(t.StringType(), t.ByteType(), valueContainsNull=False)),
            t.StructField("s", t.StructType([t.StructField("x.y", t.TimestampNTZType(), nullable=False)])),
            t.StructField("v", t.VarcharType(5)),
            *[
                t.StructField(k.__name__, k())
                for k in (t.DateType, t.TimestampType, t.BinaryType, t.BooleanType, t.FloatType, t.DoubleType, t.IntegerType)
            ],
        ]
    )
    columns = parse_columns(schema)
    assert columns[:6] == (
        Column("id", Primitive("bigint"), False),
        Column("c", Text(), True, "who"),
        Column("d", Decimal(12, 2)),
        Column("l", Array(Primitive("smallint"), contains_null=False)),
        Column("m", Map(Text(), Primitive("tinyint"), value_contains_null=False)),
        Column("s", Struct((Column("x.y", Primitive("timestamp_ntz"), False),))),
    )
    assert columns[6].type == Text(5)
    assert [str(c.type) for c in columns[7:]] == ["date", "timestamp", "binary", "boolean", "float", "double", "int"]
    item = Json(schema).get_arrow_schema().field("l").type.value_field
    assert item.nullable is False


@pytest.mark.parametrize(
    "schema",
    [
        t.StructType([]),
        t.StructType([t.StructField("a", t.NullType())]),
        t.StructType([t.StructField("a", t.DayTimeIntervalType())]),
        t.StructType([t.StructField("a", t.IntegerType()), t.StructField("A", t.IntegerType())]),
        t.StructType([t.StructField("", t.IntegerType())]),
        t.IntegerType(),
        {"a": "int"},
        None,
        b"a int",
    ],
)
def test_what_is_no_schema_is_a_problem(schema: object) -> None:
    (problem,) = Json(schema).validate("value")  # type: ignore[arg-type]
    assert problem.where == "value.schema"


def test_maps_need_strings_for_keys_as_json_has_no_others() -> None:
    problems = Json("m map<int,string>, s struct<l: array<map<string,map<date,int>>>>").validate("value")
    assert [p.what.partition(";")[0] for p in problems] == ["m has keys of type int", "s.l[][] has keys of type date"]


scalars = st.sampled_from(
    [
        "tinyint",
        "smallint",
        "int",
        "bigint",
        "float",
        "double",
        "string",
        "boolean",
        "binary",
        "date",
        "timestamp",
        "timestamp_ntz",
    ]
)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
primitives = scalars.map(lambda n: Text() if n == "string" else Primitive(n))
decimals = st.integers(1, 38).flatmap(lambda p: st.builds(Decimal, st.just(p), st.integers(0, p)))


def structs(inner: st.SearchStrategy) -> st.SearchStrategy:
    fields = st.lists(
        st.builds(Column, names, inner, st.booleans()), min_size=1, max_size=3, unique_by=lambda c: c.name.casefold()
    )
    return fields.map(lambda f: Struct(tuple(f)))


types = st.recursive(
    primitives | decimals | st.builds(Text, st.integers(1, 999)),
    lambda inner: st.builds(Array, inner) | st.builds(Map, st.just(Text()), inner) | structs(inner),
    max_leaves=8,
)


@given(structs(types))
def test_what_is_written_is_read_again(schema: Struct) -> None:
    assert parse_ddl(", ".join(map(str, schema.fields))) == schema.fields
    assert parse_ddl(str(schema)) == schema.fields


@given(st.text(st.sampled_from("ab int,<>():`'\"decimal12.struct array map"), max_size=40) | st.text(max_size=20))
def test_any_text_is_a_schema_or_a_clear_error(text: str) -> None:
    try:
        assert parse_ddl(text)
    except SchemaInvalid as e:
        assert 0 <= e.position <= len(text)
        assert e.expected
