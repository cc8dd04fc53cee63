"""JSON by a JSON Schema, with and without the wire format: columns, rows, and what a schema refuses."""

from __future__ import annotations

import datetime
import json
import pickle
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import jsonschema
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_kafka_spark.errors import RowRejected, SchemaUnusable, ValidationError
from airflow_kafka_spark.formats import Debezium, JsonSchema
from airflow_kafka_spark.formats.json.connect_schema import list_sql_columns
from airflow_kafka_spark.formats.json.format import _apply_logical_types, _list_plain_fields
from airflow_kafka_spark.formats.json.schema import bundle_references, list_fields
from airflow_kafka_spark.formats.json.tasks.json_schema import RegisteredJsonDecoder
from airflow_kafka_spark.formats.registry import SchemaDocument, make_wire_header
from airflow_kafka_spark.formats.types import parse_ddl
from tests.formats.contract import CHECKS, Case

UTC = datetime.timezone.utc
ORDER: dict[str, Any] = {
    "title": "Order",
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0},
        "state": {"type": "string", "enum": ["NEW", "PAID"]},
        "note": {"type": ["string", "null"]},
        "amount": {"type": "number"},
        "lines": {"type": "array", "items": {"type": "object", "properties": {"sku": {"type": "string"}}, "required": ["sku"]}},
    },
    "required": ["id", "note"],
}
GOOD = b'{"id":1,"note":null,"state":"NEW","lines":[{"sku":"a"}]}'
MADE = """
a tinyint NOT NULL, b smallint, c int, d bigint, e float, f double, g boolean, h string, i binary, j date, k timestamp,
l decimal(38,6), m array<int>, n map<string,double> NOT NULL, o struct<x: int NOT NULL, y: struct<z: string>>,
p array<struct<q: decimal(3,1)>> NOT NULL, q timestamp_ntz, r varchar(3)
"""


def framed(*, checks: bool = False, known: tuple[int, ...] = (1, 2)) -> RegisteredJsonDecoder:
    """Return a decoder as it is made for a registry that has the schema."""
    text = json.dumps(ORDER)
    fields = JsonSchema(schema=ORDER)._fields
    return RegisteredJsonDecoder(
        fields, dict.fromkeys(known, text), {99: "it is of type AVRO"}, "1, 2 of `orders-value`", True, checks
    )


def written(format: JsonSchema, rows: list[dict[str, Any]], ddl: str) -> list[bytes]:
    """Return the values that tasks write for rows with these columns."""
    from airflow_kafka_spark.formats.types import to_arrow_schema

    columns = parse_ddl(ddl)
    schema = pa.schema([f.with_nullable(True) for f in to_arrow_schema(columns)])
    batch = pa.RecordBatch.from_pylist(rows, schema)
    return format.make_struct_encoder(columns).encode(dict(zip(batch.schema.names, batch.columns, strict=True))).to_pylist()


CASES = {
    "plain": Case(
        JsonSchema(schema=ORDER),
        (GOOD, b'{"id":2,"note":"n","amount":1.5}'),
        (b"", b"{}", b'{"id":"x"}', b'{"id":1,"lines":[{}]}'),
    ),
    "checked": Case(
        JsonSchema(schema=ORDER, check_values=True), (GOOD,), (b"", b'{"id":-1,"note":null}', b'{"id":1,"note":null,"state":"X"}')
    ),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_contract(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


def test_headers_that_are_wrong_are_reported_and_the_rest_is_read() -> None:
    decoder = framed()
    good = make_wire_header(2) + GOOD
    wrong = {
        b"": "found 0 bytes, expected at least 5",
        b"{" + good[1:]: "found the first byte 0x7b, expected the magic byte 0x00 of Confluent's wire format; it looks like JSON",
        b"\xc3\x01" + good: "it looks like Avro's single-object encoding",
        make_wire_header(3) + GOOD: "found schema id 3, expected one of 1, 2 of `orders-value`",
        make_wire_header(99) + GOOD: "found schema id 99: it is of type AVRO",
        make_wire_header(1): "",
        make_wire_header(1) + b'{"id":1.5}': "column `id`",
    }
    for decode in (decoder.decode, pickle.loads(pickle.dumps(decoder)).decode):
        found = decode([good, *wrong, None, *[good] * 3000])
        assert [at for at, _ in found.bad] == list(range(1, 1 + len(wrong)))
        assert all(said in reason for (_, reason), said in zip(found.bad, wrong.values(), strict=True))
        rows = found.batch.to_pylist()
        assert rows[0] == rows[-1] == {"id": 1, "state": "NEW", "note": None, "amount": None, "lines": [{"sku": "a"}]}
        assert all(set(row.values()) == {None} for row in rows[1 : len(wrong) + 2])


def test_values_are_checked_only_where_that_is_asked_for() -> None:
    values = [
        make_wire_header(1) + b'{"id":-1,"note":null}',
        make_wire_header(1) + b'{"id":1,"note":null,"state":"GONE"}',
        make_wire_header(1) + GOOD,
        None,
    ]
    assert framed().decode(values).bad == ()
    found = framed(checks=True).decode(values)
    assert found.bad == (
        (0, "column `id`: the schema refuses it: -1 is less than the minimum of 0"),
        (1, "column `state`: the schema refuses it: 'GONE' is not one of ['NEW', 'PAID']"),
    )
    assert [row["id"] for row in found.batch.to_pylist()] == [None, None, 1, None]


CONNECT = "org.apache.kafka.connect.data."


def test_connects_own_words_say_the_types_of_columns() -> None:
    properties = {
        "small": {"type": "integer", "connect.type": "int16"},
        "real": {"type": "number", "connect.type": "float32"},
        "day": {"type": "integer", "title": f"{CONNECT}Date", "connect.type": "int32"},
        "at": {"oneOf": [{"type": "null"}, {"type": "integer", "title": f"{CONNECT}Timestamp", "connect.type": "int64"}]},
        "raw": {"type": "string", "connect.type": "bytes"},
        "price": {"type": "string", "title": f"{CONNECT}Decimal", "connect.type": "bytes", "connect.parameters": {"scale": "2"}},
        "exact": {
            "type": "number",
            "title": f"{CONNECT}Decimal",
            "connect.type": "bytes",
            "connect.parameters": {"scale": "1", "connect.decimal.precision": "5"},
        },
    }
    format = JsonSchema(schema={"type": "object", "properties": properties})
    kinds = [str(f.type) for f in format.get_arrow_schema()]
    assert kinds == ["int16", "float", "date32[day]", "timestamp[us, tz=UTC]", "binary", "decimal128(38, 2)", "decimal128(5, 1)"]
    text = b'{"small":-1,"real":0.1,"day":20000,"at":1700000000123,"raw":"AP8=","price":"BNI=","exact":-1.5}'
    (row,) = format.make_decoder().decode([text]).batch.to_pylist()
    at = datetime.datetime(2023, 11, 14, 22, 13, 20, 123000, UTC)
    assert list(row.values())[2:] == [datetime.date(2024, 10, 4), at, b"\0\xff", Decimal("12.34"), Decimal("-1.5")]
    columns = "small smallint, real float, day date, at timestamp, raw binary, price decimal(38,2), exact decimal(5,1)"
    assert json.loads(written(format, [row], columns)[0]) == json.loads(text)
    with pytest.raises(RowRejected, match="`at`: it holds microseconds"):
        written(format, [{**row, "at": at.replace(microsecond=1)}], columns)


def test_a_schema_is_read_as_connects_converter_registers_it() -> None:
    def optional(index: int, schema: dict[str, Any]) -> dict[str, Any]:
        return {"connect.index": index, "oneOf": [{"type": "null"}, schema]}

    debezium = "io.debezium.time."
    row = {
        "id": {"type": "integer", "connect.index": 0, "connect.type": "int64"},
        "name": optional(1, {"type": "string"}),
        "day": optional(2, {"type": "integer", "title": f"{debezium}Date", "connect.version": 1, "connect.type": "int32"}),
        "at": optional(
            3, {"type": "integer", "title": f"{debezium}MicroTimestamp", "connect.version": 1, "connect.type": "int64"}
        ),
        "coarse": optional(
            4, {"type": "integer", "title": f"{debezium}Timestamp", "connect.version": 1, "connect.type": "int64"}
        ),
        "fine": optional(
            5, {"type": "integer", "title": f"{debezium}NanoTimestamp", "connect.version": 1, "connect.type": "int64"}
        ),
    }
    after = optional(1, {"type": "object", "title": "s.t.Value", "properties": row})
    op = {"type": "string", "connect.index": 3}
    events = {"type": "object", "title": "s.t.Envelope", "connect.version": 1, "properties": {"after": after, "op": op}}
    text = b'{"after":{"id":1,"name":null,"day":1,"at":7,"coarse":7,"fine":7000},"op":"c"}'
    decoded = Debezium(JsonSchema(schema=events)).make_decoder().decode([text])
    start = datetime.datetime(1970, 1, 1)
    fine, coarse = start.replace(microsecond=7), start.replace(microsecond=7000)
    (found,) = decoded.batch.to_pylist()
    assert found == {"id": 1, "name": None, "day": datetime.date(1970, 1, 2), "at": fine, "coarse": coarse, "fine": fine}
    columns = "id bigint, name string, day date, at timestamp_ntz, coarse timestamp_ntz, fine timestamp_ntz"
    table = JsonSchema(schema={"type": "object", "properties": row})
    assert json.loads(written(table, [found], columns)[0]) == json.loads(text)["after"]
    with pytest.raises(RowRejected, match="the years 1678 to 2261"):
        written(table, [found | {"fine": start.replace(year=2300)}], columns)
    with pytest.raises(RowRejected, match="`coarse`: it holds microseconds"):
        written(table, [found | {"coarse": fine}], columns)


def test_a_number_means_what_the_schema_says_that_it_was_written_with() -> None:
    def price(scale: int, **more: Any) -> dict[str, Any]:
        said = {"title": f"{CONNECT}Decimal", "connect.type": "bytes", "connect.parameters": {"scale": str(scale)}}
        return {"type": "object", "properties": {"n": {"type": "number", "connect.type": "float64"}, "p": said | more}}

    latest, before, plain = price(4, type="string"), price(2, type="string"), price(2, type="number")
    columns = _list_plain_fields(JsonSchema(schema=latest)._fields)
    others = {
        n: _apply_logical_types(columns, SchemaDocument(json.dumps(schema), (), "it"))
        for n, schema in ((1, before), (2, plain), (3, latest))
    }
    assert others[3] == others[2] == tuple(columns) != others[1]
    decoder = RegisteredJsonDecoder(columns, dict.fromkeys((1, 2, 3), ""), {}, "", True, False, {1: others[1]})
    values = [
        make_wire_header(1) + b'{"n":1,"p":"AJY="}',
        make_wire_header(2) + b'{"n":2,"p":1.5}',
        make_wire_header(3) + b'{"n":3,"p":"AJY="}',
    ]
    values = [*values, None, make_wire_header(1) + b'{"n":4,"p":"1.50"}', make_wire_header(9), *values * 100]
    for one in (decoder, pickle.loads(pickle.dumps(decoder))):
        found = one.decode(values)
        read = [(row["n"], row["p"]) for row in found.batch.to_pylist()]
        three = [(1.0, Decimal("1.5")), (2.0, Decimal("1.5")), (3.0, Decimal("0.015"))]
        assert read == [*three, *[(None, None)] * 3, *three * 100]
        assert [at for at, _ in found.bad] == [4, 5] and "schema id 9" in found.bad[1][1]
    assert decoder.decode([]).batch.num_rows == 0


def base64_decimal(scale: Any) -> dict[str, Any]:
    said = {} if scale is None else {"connect.parameters": {"scale": scale}}
    return {"type": "string", "title": f"{CONNECT}Decimal", "connect.type": "bytes", **said}


@pytest.mark.parametrize(
    ("scale", "kind", "text", "expected"),
    [("-2", "decimal(38,0)", "Bw==", "700"), ("40", "decimal(38,38)", "ZA==", "1E-38"), ("2", "decimal(38,2)", "Bw==", "0.07")],
)
def test_a_decimal_in_base64_is_of_the_scale_that_is_said_whatever_scale_its_column_has(
    scale: str, kind: str, text: str, expected: str
) -> None:
    format = JsonSchema(schema={"type": "object", "properties": {"a": base64_decimal(scale)}})
    assert [str(f.type) for f in list_sql_columns(format._fields)] == [kind]
    value = b'{"a":"%s"}' % text.encode()
    found = format.make_decoder().decode([value])
    assert found.bad == () and found.batch.to_pylist() == [{"a": Decimal(expected)}]
    assert written(format, found.batch.to_pylist(), f"a {kind}") == [value]


@pytest.mark.parametrize("scale", [None, "x", "1000", [], {}, float("inf")])
def test_a_decimal_in_base64_without_its_scale_is_no_column(scale: Any) -> None:
    (problem,) = JsonSchema(schema={"type": "object", "properties": {"a": base64_decimal(scale)}}).validate("value")
    assert "a Decimal in base64 without its scale" in problem.what and "#/properties/a" in problem.what


def test_what_connects_words_cannot_mean_is_passed_over() -> None:
    properties = {
        "a": {"type": "integer", "connect.type": []},
        "b": {
            "type": "number",
            "title": f"{CONNECT}Decimal",
            "connect.type": "bytes",
            "connect.parameters": {"connect.decimal.precision": "0"},
        },
    }
    format = JsonSchema(schema={"type": "object", "properties": properties})
    assert [str(f.type) for f in format.get_arrow_schema()] == ["int64", "decimal128(1, 0)"]


def test_a_number_means_what_its_version_says_though_other_properties_of_it_cannot_be_columns() -> None:
    """Two digits once, four now: ``AMg=`` is 2.00 or 0.0200."""

    def version(scale: str, **more: Any) -> dict[str, Any]:
        inner = {"type": "object", "properties": {"price": base64_decimal(scale), **more}}
        return {
            "type": "object",
            "properties": {"price": base64_decimal(scale), "o": inner, "l": {"type": "array", "items": inner}},
        }

    columns = _list_plain_fields(JsonSchema(schema=version("4"))._fields)
    value = make_wire_header(7) + b'{"price":"AMg=","o":{"price":"AMg="},"l":[{"price":"AMg="}]}'
    older: list[dict[str, Any]] = [version("2", any={}), version("2", x={"type": ["string", "integer"]}), version("2")]
    older[2] |= {"if": {}}
    for schema in older:
        others = {7: _apply_logical_types(columns, SchemaDocument(json.dumps(schema), (), "it"))}
        found = RegisteredJsonDecoder(columns, {7: ""}, {}, "7", True, False, others).decode([value])
        two = {"price": Decimal("2.0000")}
        assert found.bad == () and found.batch.to_pylist() == [{**two, "o": two, "l": [two]}]


def test_what_cannot_be_checked_is_bad_and_never_raises() -> None:
    properties = {"a": {"type": "number", "multipleOf": 0.5}, "b": {"type": "string", "pattern": r"^\p{L}+$"}}
    decoder = JsonSchema(schema={"type": "object", "properties": properties}, check_values=True).make_decoder()
    values = [b'{"a":NaN}', b'{"b":"x"}', b'{"c":' + b"1" * 5000 + b"}", b'{"a":1.5}']
    found = decoder.decode(values)
    assert [at for at, _ in found.bad] == [0, 1, 2]
    assert all("it cannot be checked by its schema" in reason for _, reason in found.bad)


def test_what_may_be_null_is_null_and_what_may_be_missing_is_left_out() -> None:
    rows = [{"id": 1, "note": None, "state": None, "amount": 0.5}, {"id": 2, "note": "x", "state": "NEW", "amount": None}]
    values = written(JsonSchema(schema=ORDER), rows, "id int, note string, state string, amount float")
    assert values == [b'{"id":1,"note":null,"amount":0.5}', b'{"id":2,"note":"x","state":"NEW"}']
    for value in values:
        jsonschema.validate(json.loads(value), ORDER)
    with pytest.raises(RowRejected, match="Row 1 of the split.*`id`: it is null, and the schema requires it"):
        written(JsonSchema(schema=ORDER), [{"id": None, "note": None}], "id int, note string")


ROW: dict[str, Any] = {
    **{
        "a": -128,
        "b": 5,
        "c": 6,
        "d": -(2**63),
        "e": 0.5,
        "f": 1e300,
        "g": False,
        "h": 'é"\\\n\0😀',
        "i": b"\0\xff",
        "m": [1, None],
    },
    **{
        "j": datetime.date(1, 1, 1),
        "k": datetime.datetime(9999, 12, 31, 23, 59, 59, 999999, UTC),
        "n": [("k", 1.5), ("é", None)],
    },
    **{
        "l": Decimal("-12345678901234567890123456789012.345678"),
        "o": {"x": 1, "y": {"z": None}},
        "p": [{"q": Decimal("-9.9")}, None],
    },
    **{"q": datetime.datetime(2026, 11, 5, 7, 8), "r": "xyz"},
}


def test_a_schema_made_of_columns_gives_their_values_back_and_validates_them() -> None:
    format = JsonSchema(schema=MADE)
    assert format.validate("value") == []
    nulls = {**dict.fromkeys(ROW), "a": 1, "n": [], "p": []}
    values = written(format, [ROW, nulls], MADE)
    found = format.make_decoder().decode(values)
    assert (found.batch.to_pylist(), found.bad) == ([ROW, nulls], ())
    schema = json.loads(format._schema_text)
    jsonschema.Draft7Validator.check_schema(schema)
    for value in values:
        jsonschema.validate(json.loads(value), schema)
    again = [str(c) for c in list_sql_columns(list_fields(schema, "it"))]
    assert again == [str(c) for c in parse_ddl(MADE.replace("varchar(3)", "string"))]


times = st.datetimes(datetime.datetime(1, 1, 1), datetime.datetime(9999, 12, 31)).map(lambda t: t.replace(tzinfo=UTC))
RANDOM = st.fixed_dictionaries(
    {
        **{"d": st.integers(-(2**63), 2**63 - 1), "f": st.none() | st.floats(allow_nan=False, allow_infinity=False)},
        **{"e": st.none() | st.floats(width=32, allow_nan=False, allow_infinity=False), "h": st.none() | st.text()},
        **{"i": st.none() | st.binary(), "j": st.none() | st.dates(), "k": st.none() | times},
        **{"l": st.none() | st.decimals(-(10**20), 10**20, places=6), "m": st.none() | st.lists(st.none() | st.integers(-9, 9))},
    }
)


@settings(max_examples=60, deadline=None)
@given(st.lists(RANDOM, min_size=1, max_size=4), st.binary(max_size=3))
def test_random_rows_come_back_and_damaged_ones_never_raise(rows: list[dict[str, Any]], damage: bytes) -> None:
    ddl = "d bigint, f double, e float, h string, i binary, j date, k timestamp, l decimal(38,6), m array<int>"
    format = JsonSchema(schema=ddl)
    values = written(format, rows, ddl)
    found = format.make_decoder().decode([*values, *(v[: len(v) // 2] + damage for v in values)])
    assert found.batch.num_rows == 2 * len(rows)
    for row, back in zip(rows, found.batch.to_pylist()[: len(rows)], strict=True):
        assert row == back
    assert all(at >= len(rows) for at, _ in found.bad)


def test_a_value_that_json_or_the_schema_has_not_ends_with_row_and_column() -> None:
    good = {"a": 1, "n": [], "p": []}
    for change, message in (
        ({"f": float("nan")}, "`f`: found nan, which JSON cannot hold"),
        ({"e": float("-inf")}, "`e`: found -inf"),
        ({"a": None}, "`a`: it is null"),
    ):
        format = JsonSchema(schema=MADE)
        with pytest.raises(RowRejected, match=f"Row 2 of the split cannot become a record: column {message}"):
            written(format, [good, {**good, **change}], MADE)


def test_a_null_that_only_openapi_allows_is_left_out_where_that_is_possible() -> None:
    lax = {"type": "integer", "nullable": True}
    either = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    properties = {"a": lax, "b": either, "c": lax, "d": {"oneOf": [{"type": "null"}, lax]}, "e": {"$ref": "#/definitions/lax"}}
    properties |= {"f": {"oneOf": [{"type": "null"}, either]}, "g": {"anyOf": [{"type": "null"}, either]}}
    schema = {"type": "object", "properties": properties, "required": ["c"], "definitions": {"lax": lax}}
    format, names = JsonSchema(schema=schema), "abcdefg"
    (made,) = written(format, [dict.fromkeys(names)], ", ".join(f"{name} bigint" for name in names))
    # Null is refused by a choice of one of two schemas that both accept it.
    assert made == b'{"b":null,"c":null,"d":null,"g":null}'
    jsonschema.validate({**json.loads(made), "c": 1}, schema)
    assert format.make_decoder().decode([b'{"a":null,"c":null}']).bad == ()


def test_references_in_a_schema_with_an_id_of_its_own_are_places_in_that_schema() -> None:
    properties = {"p": {"$ref": "#/definitions/kind"}, "q": {"$ref": "#/definitions/flag"}, "r": {"$ref": "#/definitions/kinds"}}
    inner = {"$id": "http://example.org/inner.json", "type": "object", "properties": properties}
    inner["definitions"] = {"kind": {"type": "integer"}}
    outer = {"kind": {"type": "string"}, "flag": {"type": "boolean"}, "inner": inner}
    # A place that only the whole document has: what it refers to are places in the document, too.
    outer["kinds"] = {"type": "array", "items": {"$ref": "#/definitions/kind"}}
    properties = {"a": {"$ref": "#/definitions/inner"}, "b": {"$ref": "#/definitions/kind"}}
    fields = list_fields({"type": "object", "properties": properties, "definitions": outer}, "it")
    assert [str(c) for c in list_sql_columns(fields)] == ["a struct<p:bigint,q:boolean,r:array<string>>", "b string"]


def test_columns_that_do_not_fit_the_schema_are_reported_before_anything_is_written() -> None:
    format = JsonSchema(schema=ORDER).to_write("orders", "value")
    assert format.find_encoding_problems("value", ["id", "note"]) == []
    texts = [p.what for p in format.find_encoding_problems("value", ["id", "more"])]
    assert any("`more`" in t for t in texts) and any("`note`, which is required" in t for t in texts)
    with pytest.raises(ValidationError) as error:
        format.make_struct_encoder(parse_ddl("id double, note string, amount decimal(3,1), lines array<struct<sku: int>>"))
    for part in ("`id` is of type double", "`amount`", "`lines[].sku`"):
        assert part in str(error.value)


def test_a_schema_is_put_together_with_those_it_refers_to() -> None:
    root = {
        "$id": "http://example.org/order.json",
        "type": "object",
        "properties": {
            "price": {"$ref": "money.json"},
            "same": {"$ref": "http://example.org/money.json#/definitions/units"},
            "own": {"$ref": "#/definitions/flag"},
            "named alike": {"$ref": "#/definitions/money.json"},
        },
        "definitions": {"flag": {"type": "boolean"}, "money.json": {"type": "string"}},
    }
    money = {
        "$id": "http://example.org/money.json",
        "type": "object",
        "properties": {"units": {"$ref": "#/definitions/units"}},
        "definitions": {"units": {"type": "integer"}},
    }
    whole = bundle_references(
        SchemaDocument(
            json.dumps(root), (("money.json", json.dumps(money)), ("http://example.org/money.json", json.dumps(money))), "it"
        )
    )
    assert [str(c) for c in list_sql_columns(list_fields(whole, "it"))] == [
        "price struct<units:bigint>",
        "same bigint",
        "own boolean",
        "`named alike` string",
    ]
    jsonschema.validate({"price": {"units": 1}, "same": 2, "own": True}, whole)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"price": {"units": "1"}}, whole)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, "neither"),
        ({"schema": "{"}, "no JSON"),
        ({"schema": {"type": "string"}}, "an object with `properties`"),
        ({"schema": {"type": "object", "properties": {"a": {"type": ["string", "integer"]}}}}, "#/properties/a"),
        ({"schema": "a map<int,int>"}, "as JSON's names are"),
        ({"schema": "a whatever"}, "value.schema"),
        ({"schema": ORDER, "reader_schema": 3}, "a version is one of a registry"),
        ({"registry": "sr"}, "the subject is unknown"),
        (
            {"registry": "sr", "topics": ("t",), "subject_name_strategy": "RecordNameStrategy"},
            "the record's name is unknown",
        ),
    ],
)
def test_wrong_options_are_reported(options: dict[str, Any], found: str) -> None:
    assert found in " ".join(map(str, JsonSchema(**options).validate("value")))


def test_arguments_that_exclude_each_other_are_reported() -> None:
    with pytest.raises(SchemaUnusable, match="of `money.json`"):
        bundle_references(SchemaDocument("{}", (("money.json", "["),), "it"))
