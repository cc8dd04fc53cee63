"""Columns of schemas that Kafka Connect writes, and logical types of one schema for the columns of another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from airflow_kafka_spark.formats.json.connect_schema import (
    apply_writer_types,
    convert_connect_columns,
    find_logical_type,
    list_sql_columns,
    map_leaf_types,
)
from airflow_kafka_spark.formats.text_values import BadValue
from airflow_kafka_spark.formats.types import Column, DataType, Primitive, parse_ddl

CONNECT = "org.apache.kafka.connect.data"


def struct(**fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "struct", "fields": [{"field": name, **schema} for name, schema in fields.items()]}


NUMBERS = {"type": "int32", "optional": True}
WHOLE = struct(
    id={"type": "int64"},
    tags={"type": "array", "items": NUMBERS},
    counts={"type": "map", "keys": {"type": "string"}, "values": NUMBERS},
    inner=struct(name={"type": "string", "optional": True}),
    day={"type": "int32", "name": f"{CONNECT}.Date"},
    price={"type": "bytes", "name": f"{CONNECT}.Decimal", "parameters": {"scale": "2", "connect.decimal.precision": "9"}},
    large={"type": "bytes", "name": f"{CONNECT}.Decimal", "parameters": {"scale": "2"}},
)


@pytest.mark.parametrize(
    ("is_typed", "own"),
    [(True, "day date NOT NULL, price decimal(9,2) NOT NULL"), (False, "day int NOT NULL, price binary NOT NULL")],
)
def test_each_field_of_a_schema_of_connect_is_a_column(is_typed: bool, own: str) -> None:
    wanted = (
        "id bigint NOT NULL, tags array<int> NOT NULL, counts map<string,int> NOT NULL, inner struct<name: string> NOT NULL, "
        f"{own}, large binary NOT NULL"
    )
    assert convert_connect_columns(WHOLE, is_typed=is_typed) == parse_ddl(wanted)


@pytest.mark.parametrize("parameters", [{}, {"scale": "two"}, None])
def test_a_decimal_without_a_scale_is_refused(parameters: dict[str, str] | None) -> None:
    schema = struct(price={"type": "bytes", "name": f"{CONNECT}.Decimal", "parameters": parameters})
    with pytest.raises(BadValue, match="Decimal without a scale"):
        convert_connect_columns(schema, is_typed=True)


def test_a_schema_without_fields_is_refused() -> None:
    with pytest.raises(BadValue, match="no fields"):
        convert_connect_columns(struct(), is_typed=True)


def test_logical_types_of_another_schema_are_those_of_equal_columns_at_any_depth() -> None:
    columns = parse_ddl("at timestamp, list array<timestamp>, map map<string,timestamp>, inner struct<at: timestamp>, id bigint")

    def count_in(unit: Any) -> list[Column]:
        def change(leaf: DataType) -> DataType:
            return find_logical_type(leaf, unit) if leaf == Primitive("timestamp") else leaf

        return [replace(column, type=map_leaf_types(column.type, change)) for column in columns]

    millis, micros = count_in("millis"), count_in("micros")
    assert millis != micros and list_sql_columns(millis) == list(columns)
    assert apply_writer_types(millis, micros) == tuple(micros)
    assert apply_writer_types(millis, [*micros[:1], *parse_ddl("list bigint, other int")]) == (micros[0], *millis[1:])
