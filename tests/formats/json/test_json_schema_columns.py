"""JSON Schema as columns."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from airflow_kafka_spark.errors import SchemaInvalid
from airflow_kafka_spark.formats import Json
from tests.formats.contract import CHECKS, Case

ORDER: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": "https://example.com/order.schema.json",
    "title": "Order",
    "type": "object",
    "required": ["id", "customer", "lines"],
    "additionalProperties": False,
    "properties": {
        "id": {"type": "integer", "minimum": 1, "description": "its number"},
        "customer": {"$ref": "#/$defs/customer"},
        "state": {"type": "string", "enum": ["new", "paid"]},
        "placed_at": {"type": ["string", "null"], "format": "date-time"},
        "day": {"type": "string", "format": "date"},
        "total": {"type": "number"},
        "paid": {"type": "boolean"},
        "lines": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/line"}},
        "notes": {"type": "object", "additionalProperties": {"type": ["string", "null"]}},
        "photo": {"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png"},
        "id2": {"oneOf": [{"type": "null"}, {"type": "string", "format": "uuid"}]},
        "kind": {"const": "order"},
        "level": {"enum": [1, 2, None]},
        "x-seen": {"type": ["integer", "number"], "x-unit": "m"},
    },
    "$defs": {
        "customer": {
            "type": "object", "properties": {"name": {"type": "string"}, "a/b~c": {"type": "integer"}}, "required": ["name"],
        },
        "line": {"properties": {"sku": {"$ref": "#/$defs/customer/properties/name"}, "n": {"allOf": [{"type": "integer"}]}}},
    },
}  # fmt: skip
DDL = (
    "id bigint NOT NULL COMMENT 'its number', customer struct<name:string NOT NULL,`a/b~c`:bigint> NOT NULL, state string, "
    "placed_at timestamp, day date, total double, paid boolean, lines array<struct<sku:string,n:bigint>> NOT NULL, "
    "notes map<string,string>, photo binary, id2 string, kind string, level bigint, `x-seen` double"
)


def test_a_schema_becomes_columns() -> None:
    columns = Json(ORDER).columns
    assert ", ".join(map(str, columns)) == ", ".join(map(str, Json(DDL).columns))
    assert columns[0].comment == "its number"
    assert Json.of_json_schema(json.dumps(ORDER)) == Json(ORDER)
    assert pickle.loads(pickle.dumps(Json(ORDER))).get_arrow_schema() == Json(ORDER).get_arrow_schema()


CASE = Case(
    Json({key: value for key, value in ORDER.items() if key != "properties"}
         | {"properties": {k: v for k, v in ORDER["properties"].items() if k != "notes"}}),
    (
        b'{"id":1,"customer":{"name":"a"},"lines":[]}',
        b'{"id":2,"customer":{"name":"b","a/b~c":7},"lines":[{"sku":"x","n":1}],"placed_at":"2026-11-05T07:08:09Z","level":2}',
        b'{"id":3,"customer":{"name":"c"},"lines":[{}],"day":"2026-11-05","state":null,"photo":"aGk=","total":1e3}',
    ),
    (b'{"customer":{"name":"a"},"lines":[]}', b'{"id":1,"customer":{},"lines":[]}', b'{"id":"1"}', b"{}",
     b'{"id":1,"customer":{"name":"a"},"lines":[null]}'),
)  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
def test_contract(check: Callable[[Case], None]) -> None:
    assert CASE.format.validate("value") == []
    check(CASE)


def of(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (of({"type": "integer", "nullable": True}), "a bigint"),
        (of({"type": "array", "items": {"type": ["integer", "null"]}}), "a array<bigint>"),
        (of({"anyOf": [{"$ref": "#/definitions/d"}, {"type": "null"}]}) | {"definitions": {"d": {"type": "string"}}}, "a string"),
        (of({"$ref": "#/definitions/a~1b%20c"}) | {"definitions": {"a/b c": {"type": "number"}}}, "a double"),
        (of({"$ref": "#/definitions/d/0"}) | {"definitions": {"d": [{"type": "number"}]}}, "a double"),
        (of({"enum": ["a", None], "title": "x"}) | {"required": ["a"]}, "a string"),
        (of({"type": "string", "format": "email", "maxLength": 5, "pattern": "x"}), "a string"),
        ({"$ref": "#/$defs/r", "$defs": {"r": of({"type": "integer"})}}, "a bigint"),
    ],
    ids=str,
)
def test_what_is_kept(schema: dict[str, Any], expected: str) -> None:
    assert ", ".join(map(str, Json(schema).columns)) == expected


@pytest.mark.parametrize(
    ("schema", "found", "place"),
    [
        (of({"type": ["string", "integer"]}), "a choice between several types", "#/properties/a"),
        (of({"oneOf": [{"type": "string"}, {"type": "integer"}]}), "a choice between several types", "#/properties/a"),
        (of({}), "a schema that allows anything", "#/properties/a"),
        (of(True), "a schema that allows anything", "#/properties/a"),
        (of({"type": "null"}), "null alone", "#/properties/a"),
        (of({"type": "int"}), "the type 'int'", "#/properties/a"),
        (of({"type": "object"}), "an object without `properties`", "#/properties/a"),
        (of({"type": "array"}), "an array without one schema", "#/properties/a"),
        (of({"type": "array", "items": [{"type": "string"}]}), "an array without one schema", "#/properties/a"),
        (of({"type": "array", "prefixItems": []}), "`prefixItems`", "#/properties/a"),
        (of({"type": "array", "items": {"not": {}}}), "`not`", "#/properties/a/items"),
        (of({"type": "string", "if": {}}), "`if`", "#/properties/a"),
        (of({"propertis": {}}), "`propertis`", "#/properties/a"),
        (of({"allOf": [{"type": "string"}, {"minLength": 1}]}), "`allOf` of several", "#/properties/a"),
        (of({"$ref": "other.json#/a"}), "`$ref` to 'other.json#/a'", "#/properties/a"),
        (of({"$ref": "#/$defs/b"}), "`$ref` to `#/$defs/b`, which does not exist", "#/properties/a"),
        (of({"$ref": "#"}), "a schema that contains it", "#/properties/a"),
        (of({"$ref": "#/$defs/b"}) | {"$defs": {"b": of({"$ref": "#/$defs/b"})}}, "that contains it", "#/$defs/b/properties/a"),
        (of({"$ref": "#/$defs/b", "type": "string"}) | {"$defs": {"b": {"type": "string"}}}, "`$ref` beside", "#/properties/a"),
        (of({"type": "string", "contentEncoding": "base32"}), "contentEncoding 'base32'", "#/properties/a"),
        (of({"enum": ["a", 1]}), "a choice between several types", "#/properties/a"),
        (of({"type": "string"}) | {"required": ["b"]}, "`b` as required", "#"),
        (of({"type": "string"}) | {"required": [{}]}, "required: [{}]", "#"),
        (of({"type": [{}]}), "the type [{}]", "#/properties/a"),
        (of({"$ref": "#/$defs/d/²"}) | {"$defs": {"d": [1, 2, 3]}}, "which does not exist", "#/properties/a"),
        ({"properties": {5: {"type": "string"}}}, "the name 5", "#/properties/5"),
        ({"properties": {"a": {"type": "string"}, "A": {"type": "string"}}}, "a name like `a`", "#/properties/A"),
        ({"type": "array", "items": {"type": "string"}}, "a schema of array<string>", "#"),
        ({}, "a schema that allows anything", "#"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_kept_is_a_problem_that_names_the_place(schema: dict[str, Any], found: str, place: str) -> None:
    (problem,) = Json(schema).validate("value")
    assert problem.where == "value.schema"
    assert found in problem.what and f"`{place}`" in problem.what and "expected" in problem.what


@pytest.mark.parametrize("text", ["", "[]", '{"a":}', "5"])
def test_what_is_no_document(text: str) -> None:
    with pytest.raises(SchemaInvalid):
        Json.of_json_schema(text)
