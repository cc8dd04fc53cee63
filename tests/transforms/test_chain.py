"""Rules for all transforms: predicates, rows that end a split, tombstones, errors, and the limits of a user's code."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from pyspark.sql import functions as F

from airflow_kafka_spark.errors import ValidationError
from airflow_kafka_spark.transforms import (
    Cast,
    ColumnTransform,
    Condition,
    DropHeaders,
    ExtractField,
    Filter,
    Flatten,
    HasHeaderKey,
    HeaderFrom,
    HoistField,
    InsertField,
    InsertHeader,
    MaskField,
    Python,
    RecordIsTombstone,
    RegexRouter,
    ReplaceField,
    Sql,
    TimestampConverter,
    TimestampRouter,
    TopicNameMatches,
    Transform,
    ValueToKey,
    apply_chain,
)
from tests.transforms.cases import THE_END, Case, Row, check

ORDER = "struct<id:int,amount:string>"


@dataclass(frozen=True)
class Shout(Transform):
    """A transform of a user."""

    def apply(self, frame):
        return frame.withColumn("value", F.col("value").withField("amount", F.upper("value.amount")))


@dataclass(frozen=True)
class Numbered(ColumnTransform):
    """A transform of a user by columns, with its own errors."""

    def make_changes(self, record):
        return {"key": F.col("value").getField("id"), "error": F.when(F.col("value.id") < 0, F.lit("found a negative id"))}


def in_batches(frame):
    """A function that runs in Python, in batches."""
    return frame.mapInArrow(lambda batches: batches, frame.schema)


# Names that SQL would read otherwise.
ODD = "struct<`a.b`:string,`c``d`:int,`größe x`:string,`select`:struct<`ü.ö`:string>>"

CASES = [
    Case(
        "the end of a split passes all transforms as it was",
        [
            Cast("id:int8"),
            InsertField(topic_field="t!", static_field="s", static_value="x"),
            MaskField("amount"),
            ReplaceField(renames="s:source"),
            InsertHeader("h", "1"),
            HeaderFrom("id", "id", "copy"),
            DropHeaders("h"),
            ValueToKey("id"),
            RegexRouter("(.*)", "$1-x"),
            TimestampRouter(),
            Flatten(),
            Sql({"id": "id", "none": "assert_true(id is not null)"}, filter="assert_true(id is not null) is null"),
            HoistField("line"),
            Filter(predicate=Condition("line.id = 2")),
        ],
        [Row((1, "a")), Row((2, "b"), mine="carried"), THE_END],
        [
            {
                "value": {"line": {"id": 1, "none": None}},
                "key": {"id": 1},
                "topic": "test-x-19700101",
                "headers": [{"key": "id", "value": "MQ=="}],
                "__kafka_end": None,
            },
            {
                "key": None,
                "value": None,
                "topic": None,
                "partition": None,
                "offset": None,
                "timestamp": None,
                "headers": None,
                "__kafka_end": "account",
            },
        ],
        value=ORDER,
    ),
    Case(
        "the end of a split is not a tombstone, and no filter drops it",
        [
            Filter(predicate=RecordIsTombstone()),
            Filter(predicate=TopicNameMatches("test"), negate=True),
            Filter(predicate=HasHeaderKey("h"), negate=True),
            Filter(predicate=Condition("id = 1"), negate=True),
            Sql(filter="id = 1"),
        ],
        [Row((1, "a"), headers=[("h", b"1")]), Row(None), Row((1, "b")), Row((2, "c"), headers=[("h", b"1")]), THE_END],
        [{"value": {"id": 1, "amount": "a"}}, {"__kafka_end": "account"}],
        value=ORDER,
    ),
    Case(
        "Filter without a predicate drops all records",
        [Filter()],
        [Row((1, "a")), Row(None), THE_END],
        [{"__kafka_end": "account"}],
        value=ORDER,
    ),
    Case(
        "what does not meet the predicate keeps what it had, and lacks what is new",
        [
            InsertField(topic_field="t", predicate=Condition("id > 1")),
            ReplaceField(exclude="amount", predicate=Condition("id > 2")),
        ],
        [Row((1, "a")), Row((2, "b")), Row((3, "c")), Row(None)],
        [
            {"value": {"id": 1, "t": None, "amount": "a"}},
            {"value": {"id": 2, "t": "test", "amount": "b"}},
            {"value": {"id": 3, "t": "test", "amount": None}},
            {"value": None},
        ],
        value=ORDER,
    ),
    Case(
        "negate turns every predicate around",
        [
            InsertHeader("not-foo", "1", predicate=TopicNameMatches("fo+"), negate=True),
            InsertHeader("no-header", "1", predicate=HasHeaderKey("h"), negate=True),
            ValueToKey("id", predicate=RecordIsTombstone(), negate=True),
            InsertHeader("unknown-or-small", "1", predicate=Condition("id > 1"), negate=True),
        ],
        [Row((1, "a"), topic="foo"), Row((2, "b"), topic="xfoo", headers=[("h", b"1")]), Row(None, headers=None)],
        [
            {"key": {"id": 1}, "headers": [{"key": "no-header", "value": "MQ=="}, {"key": "unknown-or-small", "value": "MQ=="}]},
            {"key": {"id": 2}, "headers": [{"key": "h", "value": "MQ=="}, {"key": "not-foo", "value": "MQ=="}]},
            {
                "key": None,
                "value": None,
                "headers": [{"key": name, "value": "MQ=="} for name in ("not-foo", "no-header", "unknown-or-small")],
            },
        ],
        value=ORDER,
        key="struct<id:int>",
    ),
    Case(
        "SQL reaches fields by name, and the record's parts whatever the fields are called",
        [
            Sql(
                {
                    "topic": "topic",
                    "timestamp": "timestamp",
                    "where": "concat(record.topic, '/', partition, '/', offset)",
                    "k": "key",
                }
            ),
            InsertHeader(
                "met", "1", predicate=Condition("timestamp = 5 AND record.timestamp < '1970-01-02' AND `where` LIKE 'test/%'")
            ),
        ],
        [Row(("field", 5), key="k")],
        [
            {
                "value": {"topic": "field", "timestamp": 5, "where": "test/0/7", "k": "k"},
                "headers": [{"key": "met", "value": "MQ=="}],
            }
        ],
        value="struct<topic:string,timestamp:int>",
    ),
    Case(
        "a value that is no struct has no fields, but SQL reaches it",
        [Sql({"line": "value"}, filter="value LIKE 'h%'")],
        [Row("hello"), Row("world"), Row(None)],
        [{"value": {"line": "hello"}}, {"value": None}],
    ),
    Case(
        "what cannot be cast is the record's error, and later transforms leave it alone",
        [
            Cast("amount:int8"),
            Sql({"id": "id", "twice": "assert_true(amount is not null)", "a": "amount"}),
            InsertHeader("later", "1"),
            RegexRouter(".*", "elsewhere"),
            Filter(predicate=Condition("a is null")),
            Python(in_batches),
        ],
        [Row((1, "12")), Row((2, "300"), key="k"), Row((3, "1.5")), Row((4, "x" * 200)), Row((5, " 7")), THE_END],
        [
            {"topic": "elsewhere", "value": {"id": 1, "twice": None, "a": 12}, "headers": [{"key": "later", "value": "MQ=="}]},
            {"topic": "test", "key": "k", "headers": None, "__kafka_error": 'Cast: the field `amount` is "300", expected int8'},
            {"topic": "test", "__kafka_error": 'Cast: the field `amount` is "1.5", expected int8'},
            {"topic": "test", "__kafka_error": f'Cast: the field `amount` is "{"x" * 100}", expected int8'},
            {"topic": "test", "__kafka_error": 'Cast: the field `amount` is " 7", expected int8'},
            {"__kafka_end": "account"},
        ],
        value=ORDER,
    ),
    Case(
        "numbers that do not fit are errors, never cut off",
        [Cast("n:int32,d:int8")],
        [Row((2**31 - 1, 127.9)), Row((2**31, 1.0)), Row((1, float("nan"))), Row((1, 1e300))],
        [
            {"value": {"n": 2**31 - 1, "d": 127}},
            {"__kafka_error": "Cast: the field `n` is 2147483648, expected int32"},
            {"__kafka_error": "Cast: the field `d` is NaN, expected int8"},
            {"__kafka_error": "Cast: the field `d` is 1.0E300, expected int8"},
        ],
        value="struct<n:bigint,d:double>",
    ),
    Case(
        "what is no moment is the record's error",
        [
            TimestampConverter("Timestamp", "text", "yyyy-MM-dd"),
            TimestampConverter("unix", "number", unix_precision="nanoseconds"),
        ],
        [Row(("2020-02-30", 0)), Row(("2020-02-29", 10)), Row(("2020-02-29T00:00", 0))],
        [
            {"__kafka_error": 'TimestampConverter: the field `text` is "2020-02-30", expected a text like yyyy-MM-dd'},
            {"value": {"text": "2020-02-29T00:00:00.000Z", "number": 0}},
            {"__kafka_error": 'TimestampConverter: the field `text` is "2020-02-29T00:00", expected a text like yyyy-MM-dd'},
        ],
        value="struct<text:string,number:bigint>",
    ),
    Case(
        "numbers beyond all calendars are the record's error",
        [TimestampConverter("Date", unix_precision="seconds")],
        [Row(2**62), Row(-(2**62)), Row(0)],
        [
            {"__kafka_error": f"TimestampConverter: the value is {2**62}, expected seconds since 1970"},
            {"__kafka_error": f"TimestampConverter: the value is -{2**62}, expected seconds since 1970"},
            {"value": "1970-01-01"},
        ],
        value="bigint",
    ),
    Case(
        "names with dots, backticks, spaces and umlauts are names",
        [
            Cast({"a.b": "int32", "c`d": "string"}),
            MaskField(["größe x"], "ß"),
            HeaderFrom(["c`d"], ["h.`ü"], "move"),
            ValueToKey(["a.b"]),
            InsertField(static_field="neu.é", static_value="1", predicate=Condition("`a.b` = 5 AND `select`.`ü.ö` = 'x'")),
            ReplaceField(renames={"größe x": "g:`.`"}),
            Flatten("/"),
        ],
        [Row(("5", 6, "8", ("x",)))],
        [
            {
                "key": {"a.b": 5},
                "value": {"a.b": 5, "g:`.`": "ß", "select/ü.ö": "x", "neu.é": "1"},
                "headers": [{"key": "h.`ü", "value": "Ng=="}],
            }
        ],
        value=ODD,
    ),
    Case(
        "paths to fields with odd names",
        [ExtractField("select.`ü.ö`", field_syntax_version="V2")],
        [Row(("5", 6, "8", ("x",))), Row(("5", 6, "8", None))],
        [{"value": "x"}, {"value": None}],
        value=ODD,
    ),
    Case(
        "transforms of a user's own have predicates, errors and ends as ours do",
        [
            Shout(predicate=Condition("id > 1")),
            Numbered(),
            lambda frame: frame.withColumn("headers", F.array(F.struct(F.lit("h").alias("key"), F.lit(b"1").alias("value")))),
            Python(in_batches, predicate=Condition("id = 1")),
        ],
        [Row((1, "a")), Row((2, "b")), Row((-3, "c")), Row(None), THE_END],
        [
            {"value": {"id": 1, "amount": "a"}, "key": 1, "headers": [{"key": "h", "value": "MQ=="}]},
            {"value": {"id": 2, "amount": "B"}, "key": 2, "headers": [{"key": "h", "value": "MQ=="}]},
            {"headers": None, "__kafka_error": "Numbered: found a negative id"},
            {"value": None, "key": None, "headers": [{"key": "h", "value": "MQ=="}]},
            {"value": None, "key": None, "headers": None, "__kafka_end": "account"},
        ],
        value=ORDER,
        types={"key": "int"},
    ),
    Case(
        "a function may tell errors itself",
        [lambda frame: frame.withColumn("__kafka_error", F.when(F.col("value.id") == 2, "mine: found 2, expected less"))],
        [Row((1, "a")), Row((2, "b"))],
        [{"value": {"id": 1, "amount": "a"}}, {"__kafka_error": "mine: found 2, expected less"}],
        value=ORDER,
    ),
    Case(
        "a move of all fields leaves a struct without any",
        [HeaderFrom("id,amount", "i,a", "move")],
        [Row((1, "a"))],
        [{"value": {}}],
        value=ORDER,
    ),
    Case(
        "no transform changes nothing", [], [Row("v", key="k"), THE_END], [{"key": "k", "value": "v"}, {"__kafka_end": "account"}]
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_this_holds_in_a_chain(case, outcomes) -> None:
    check(case, outcomes[case.name])


@pytest.fixture(scope="module")
def orders(spark):
    return Case("", [], [Row((n, "1")) for n in range(4)] + [THE_END], [], value="struct<id:int,amount:string>").frame(spark)


@pytest.mark.parametrize(
    ("transforms", "words"),
    [
        (
            [InsertHeader("h", "1"), Cast("nope:int8,neither:int8")],
            ["transforms[1] Cast.spec", "`nope`", "`neither`", "`amount`"],
        ),
        ([Cast("int8")], ["transforms[0] Cast.spec", "struct<id:int,amount:string>"]),
        ([ExtractField("x")], ["ExtractField.field", "`x`"]),
        ([ExtractField("id", of="key")], ["found a key of type string"]),
        (
            [ReplaceField("a", exclude="b", renames="c:d")],
            ["ReplaceField.include", "ReplaceField.exclude", "ReplaceField.renames"],
        ),
        ([ReplaceField(renames="id:amount")], ["`amount` twice"]),
        ([InsertField(topic_field="id")], ["InsertField.of", "`id` twice"]),
        ([MaskField("id", "text")], ["MaskField.replacement", "`id` is int"]),
        ([MaskField("id", str(2**31))], ["MaskField.replacement"]),
        ([MaskField("id", "1_000")], ["MaskField.replacement", "cannot hold '1_000'"]),
        ([MaskField("id", "1e999999999")], ["MaskField.replacement"]),
        ([MaskField("id", "inf")], ["MaskField.replacement"]),
        ([MaskField("id", "nan")], ["MaskField.replacement"]),
        ([TimestampConverter("unix", "amount", "YYYY-MM-dd")], ["TimestampConverter.format", "cannot be read", "Y"]),
        ([TimestampConverter("unix", "amount", "dd EEE")], ["TimestampConverter.format", "`E` may only stand at the beginning"]),
        ([Filter(predicate=TopicNameMatches(r"\p{Foo}"))], ["Filter.predicate.pattern", "no regular expression: Unknown"]),
        ([InsertField(topic_field="id!")], ["`id` twice"]),
        ([HoistField("a"), MaskField("a")], ["transforms[1] MaskField.fields", "no mask"]),
        ([TimestampConverter("unix", "amount")], ["TimestampConverter.format"]),
        ([HoistField("a"), TimestampConverter("unix", "a")], ["TimestampConverter.field", "an integer, a date"]),
        ([Cast("id:string", predicate=Condition("id = 1"))], ["Cast.predicate", "`value.id` is string", "int in the others"]),
        ([Filter(predicate=Condition("nope = 1"))], ["transforms[0] Filter", "nope"]),
        ([Filter(predicate=Condition("amount"))], ["transforms[0] Filter.predicate", "it is string; expected a condition"]),
        ([Sql(filter="amount")], ["transforms[0] Sql.filter", "it is string; expected a condition"]),
        ([Sql({"a": "1 +"})], ["transforms[0] Sql", "PARSE_SYNTAX_ERROR"]),
        ([Sql({"a": "count(*)"})], ["transforms[0] Sql: found an aggregate"]),
        ([Sql({"a": "id", "b": "max(id)"})], ["transforms[0] Sql: found an aggregate"]),
        ([lambda frame: frame.select("key", "value")], ["`topic` is gone", "`__kafka_mine` is gone", "`__kafka_end` is gone"]),
        ([lambda frame: frame.withColumn("more", F.lit(1))], ["`more` is new"]),
        ([lambda frame: frame.withColumn("offset", F.lit("x"))], ["`offset` has become string; expected bigint"]),
        ([lambda frame: None], ["found NoneType; expected that it returns a DataFrame"]),
        ([lambda frame: frame.nope], ["nope"]),
        ([lambda frame: 1 / 0], ["it raised ZeroDivisionError: division by zero"]),
    ],
)
def test_expressions_that_the_types_do_not_allow_are_reported_before_the_job(orders, transforms, words) -> None:
    with pytest.raises(ValidationError) as caught:
        apply_chain(orders, transforms)
    for word in words:
        assert word in str(caught.value)


def test_a_frame_that_holds_no_records_is_reported_at_once(orders) -> None:
    with pytest.raises(ValidationError, match=r"(?s)no column `topic`.*a column `more`.*`offset` is int; expected bigint"):
        apply_chain(orders.drop("topic").withColumn("more", F.lit(1)).withColumn("offset", F.lit(1)), [])


@pytest.mark.parametrize(
    "function",
    [
        lambda frame: frame.where("value.id <> 2"),
        lambda frame: frame.where("value.id is null"),
        lambda frame: frame.unionAll(frame),
        lambda frame: frame.repartition(3, "offset", "value"),
        lambda frame: frame.orderBy(F.col("value.id").desc()),
        lambda frame: frame.dropDuplicates(["offset"]),
        lambda frame: frame.withColumn("headers", F.explode(F.array("headers", "headers"))),
    ],
    ids=["where", "where only the end is left", "union", "repartition", "orderBy", "dropDuplicates", "explode"],
)
def test_a_function_that_leaves_out_adds_or_moves_records_fails_the_job(orders, function) -> None:
    with pytest.raises(Exception, match="left out, added or moved records"):
        apply_chain(orders, [function]).collect()


def test_columns_that_are_known_to_be_null_only_are_taken_as_what_they_should_be(orders) -> None:
    frame = orders.withColumn("headers", F.lit(None)).withColumn("key", F.lit(None)).withColumn("timestamp", F.lit(None))
    made = apply_chain(frame, [InsertHeader("h", "1"), ValueToKey("id", predicate=Condition("id = 1"))])
    rows = made.where("__kafka_end is null").select("key.id", F.size("headers").alias("headers"), "timestamp").collect()
    assert [tuple(row) for row in rows] == [(None, 1, None), (1, 1, None), (None, 1, None), (None, 1, None)]
