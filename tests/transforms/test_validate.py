"""All problems of options are reported in one error, without Spark."""

from __future__ import annotations

import subprocess
import sys

import pytest

from airflow_kafka_spark import transforms as t
from airflow_kafka_spark.transforms.chain import describe_sql_refusal
from airflow_kafka_spark.transforms.options import parse_path

FINE = [
    t.Cast("a:int8, b:string"),
    t.Cast({"a:b": "int8"}),
    t.Cast("int8", of="key"),
    t.DropHeaders("a"),
    t.ExtractField("a.b", field_syntax_version="V2"),
    t.Filter(predicate=t.RecordIsTombstone(), negate=True),
    t.Flatten(),
    t.HeaderFrom(["a", "b"], "x,x", "copy"),
    t.HoistField("a"),
    t.InsertField(topic_field="t!", static_field="s?", static_value=""),
    t.InsertHeader("h", ""),
    t.MaskField("a", "1"),
    t.RegexRouter(r"(?<name>\p{Alpha}++)-(\Q(\E)", r"$1\$"),
    t.ReplaceField(exclude="a"),
    t.ReplaceField(include=None, exclude="a", renames=None),
    t.Sql({"a": "1", "over": "'rolled over (twice)' || over || \"it's over (\"", "b": "`over` (1)"}),
    t.Sql(filter="true"),
    t.Cast("a:INT8", of="key", replace_null_with_default=False),
    t.ValueToKey("a", replace_null_with_default=False),
    t.HeaderFrom("a,a", "x,y", "copy"),
    t.InsertField(topic_field="a!!"),
    t.RegexRouter("(?<a>x)", "${a}"),
    t.TimestampConverter("string", "f", "YYYY-'W'ww u#{HH} ''"),
    t.TimestampConverter("unix"),
    t.TimestampConverter("string", "f", "yyyy-MM-dd'T'HH:mm:ss.SSSXXX"),
    t.TimestampRouter(),
    t.ValueToKey(("a",)),
    len,
]

WRONG = [
    (t.Cast(""), ["Cast.spec"]),
    (t.Cast("foo:faketype,b:array,c:int8"), ["faketype", "array"]),
    (t.Cast("foo:int8:extra"), ["foo:int8:extra"]),
    (t.Cast("foo:int8,int32"), ["'int32'"]),
    (t.Cast("a:int8", of="header"), ["Cast.of"]),
    (t.DropHeaders([]), ["DropHeaders.headers"]),
    (t.ExtractField(""), ["ExtractField.field"]),
    (t.ExtractField("`a.b", field_syntax_version="V2"), ["a backtick without its end"]),
    (t.ExtractField("a", field_syntax_version="V3"), ["V3"]),
    (t.Filter(negate=True), ["Filter.negate"]),
    (t.Filter(predicate="topic"), ["Filter.predicate"]),
    (t.Filter(predicate=t.TopicNameMatches("(")), ["Filter.predicate.pattern"]),
    (t.Filter(predicate=t.HasHeaderKey("")), ["Filter.predicate.name"]),
    (t.Filter(predicate=t.Condition(" ")), ["Filter.predicate.sql"]),
    (t.Filter(predicate=t.Condition("rank() over (order by id) = 1")), ["Filter.predicate.sql", "window function"]),
    (t.Sql({"a": "row_number() OVER\n(ORDER BY id)"}), ["Sql.columns", "window function"]),
    (t.Sql(filter="'it''s' = x AND lag(id) over(order by id) = 1"), ["Sql.filter", "window function"]),
    (t.Flatten(None), ["Flatten.delimiter"]),
    (t.HeaderFrom("a,b", "x", "mv"), ["found 1 for 2 fields", "'mv'"]),
    (t.HeaderFrom("", "", "copy"), ["HeaderFrom.fields", "HeaderFrom.headers"]),
    (t.HoistField(None), ["HoistField.field"]),
    (t.InsertField(), ["no field to insert"]),
    (t.InsertField(static_field="a"), ["InsertField.static_value"]),
    (t.InsertField(topic_field="!"), ["InsertField.topic_field"]),
    (t.InsertHeader(None, None), ["InsertHeader.header", "InsertHeader.value_literal"]),
    (t.MaskField("a,a", ""), ["`a` twice", "MaskField.replacement"]),
    (t.TimestampRouter("${topic}-${time}"), ["TimestampRouter.topic_format", "`${time}`"]),
    (t.RegexRouter("(a", "$1"), ["RegexRouter.regex"]),
    (t.RegexRouter("(a)", "$2"), ["$2", "the 1 that"]),
    (t.RegexRouter("(a)", "$"), ["RegexRouter.replacement"]),
    (t.ReplaceField(), ["neither"]),
    (t.ReplaceField(renames="a:b,c:b"), ["2 fields are renamed to `b`"]),
    (t.ReplaceField(renames="a"), ["ReplaceField.renames"]),
    (t.Sql(), ["neither"]),
    (t.Sql({}), ["Sql.columns"]),
    (t.Sql({"a": ""}, filter=""), ["Sql.columns", "Sql.filter"]),
    (t.TimestampConverter("invalid", unix_precision="invalid"), ["TimestampConverter.target_type", "unix_precision"]),
    (t.TimestampConverter("string"), ["TimestampConverter.format"]),
    (t.TimestampConverter("string", format="bad-format"), ["b, f, o, r, t"]),
    (t.TimestampConverter("string", format="HHH:mm"), ["`HHH`", "at most `HH`"]),
    (t.TimestampConverter("string", format="V"), ["expected `VV`"]),
    (t.TimestampConverter("string", format="yyyy['T'HH"), ["a bracket without the other one"]),
    (t.RegexRouter("(?<a>x)", "${b}"), ["${b}", "a group that `regex` names"]),
    (t.RegexRouter("[z-a]", "x"), ["bad character range"]),
    (t.Cast(["a:int8", "b:faketype"]), ["faketype"]),
    (t.Cast({"a": None}), ["'none'"]),
    (t.ReplaceField(exclude="a", replace_null_with_default=True), ["ReplaceField.replace_null_with_default", "no defaults"]),
    (t.Cast("int", of="k", replace_null_with_default=None), ["Cast.replace_null_with_default", "Cast.of", "'int'"]),
    (t.TimestampRouter("", "'"), ["topic_format", "timestamp_format"]),
    (t.Filter(predicate=t.RecordIsTombstone(), negate="false"), ["Filter.negate", "'false'; expected True or False"]),
    (t.Flatten(predicate="x", negate=1), ["Flatten.negate", "Flatten.predicate"]),
    (t.Cast(","), ["Cast.spec", "found ','"]),
    (t.Cast([1, "a:int8"]), ["Cast.spec", "found 1"]),
    (t.Cast({"": "int8", "a": "int8"}), ["Cast.spec", "one type for the whole value"]),
    (t.HeaderFrom(None, ["h", 5], "copy"), ["HeaderFrom.fields", "HeaderFrom.headers", "found 5"]),
    (t.ReplaceField(include=5, exclude=["a", None], renames=3), ["found 5", "found None", "ReplaceField.renames: found 3"]),
    (t.ReplaceField(include=","), ["ReplaceField.include"]),
    (t.ReplaceField(renames={"a": "", "b": 1}), ["ReplaceField.renames: found ''", "found 1"]),
    (t.ReplaceField(renames=["a:b", None]), ["found None; expected two names"]),
    (t.ValueToKey(""), ["ValueToKey.fields"]),
    (3, ["expected a transform, or a function"]),
]


def test_good_options_have_no_problems() -> None:
    assert t.find_chain_problems(FINE) == []


@pytest.mark.parametrize(("transform", "words"), WRONG, ids=lambda given: str(given)[:60])
def test_a_wrong_option_is_named(transform, words) -> None:
    text = "\n".join(map(str, t.find_chain_problems([transform])))
    for word in words:
        assert word in text


def test_all_problems_of_a_chain_are_reported_at_once_with_their_places() -> None:
    found = t.find_chain_problems([transform for transform, _ in WRONG], "smt")
    places = {problem.where.split(" ")[0] for problem in found}
    assert places == {f"smt[{index}]" for index in range(len(WRONG))}
    assert len(found) > len(WRONG)


def test_a_chain_has_to_be_a_list() -> None:
    assert "expected a list" in str(t.find_chain_problems(t.Flatten())[0])


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("a.b", ["a", "b"]),
        ("a.", ["a", ""]),
        ("`a.b`.c", ["a.b", "c"]),
        ("a.`b.c`", ["a", "b.c"]),
        ("`a`b`.c", ["a`b", "c"]),
        (r"`a\`.b`.c", ["a`.b", "c"]),
        ("ab`c", ["ab`c"]),
    ],
)
def test_paths_are_read_as_connect_reads_them(text, names) -> None:
    assert parse_path(text) == names


def test_importing_transforms_imports_no_pyspark() -> None:
    check = "t.find_chain_problems([t.Cast('a:int8')])"
    code = f"import sys, airflow_kafka_spark.transforms as t; {check}; print('pyspark' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"


def test_reasons_of_spark_name_no_column_of_ours_and_no_place_in_the_sql() -> None:
    columns = "`id`, `__kafka_end`, `name`, `__kafka_key`"
    said = f"[UNRESOLVED_COLUMN] `x` cannot be resolved. Did you mean one of the following? [{columns}]. SQLSTATE: 42703"
    message = describe_sql_refusal(ValueError(f"{said}; line 1 pos 0;\n'Project"))
    assert message == f"Spark's SQL does not understand it: {said.replace(columns, '`id`, `name`')}"
