"""Connect's schemas, as its JSON converter writes them beside each value: read as columns, and derived from columns.

The logical types of Connect and Debezium are dates, timestamps and decimals that are written as numbers or base64.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from airflow_kafka_spark.formats.text_values import BadValue, shorten
from airflow_kafka_spark.formats.types import Array, Column, DataType, Decimal, Map, Primitive, Struct, Text

Representation = Literal["days", "millis", "micros", "nanos", "unscaled", "variable", "text", "iso"]
"""The notation of a value: ``days`` to ``nanos`` since 1970; ``unscaled``, a decimal's unscaled value in base64; ``variable``,
that value beside its scale; ``text``, only ISO texts; ``iso``, only ISO texts, and those without a zone may end in ``Z``.
"""

VARIABLE_SCALE_DECIMAL = (Column("scale", Primitive("int"), nullable=False), Column("value", Primitive("binary"), nullable=False))
"""The fields of Debezium's VariableScaleDecimal, for a column without a scale."""

_PER_MICRO = {"millis": (1000, 1), "micros": (1, 1), "nanos": (1, 1000)}


@dataclass(frozen=True)
class LogicalType(Primitive):
    """A date, timestamp or decimal that is written as another type.

    Dates and timestamps are also read from ISO texts, decimals from plain numbers.

    :param of: the column's type.
    :param unit: the notation of the value.
    :param scale: the scale of an unscaled decimal, as it is written.
    """

    of: DataType = Primitive("bigint")
    unit: Representation = "text"
    scale: int = 0

    @property
    def factor(self) -> tuple[int, int]:
        """Factor and divisor from a number to microseconds."""
        return _PER_MICRO[self.unit]


def find_logical_type(of: DataType, unit: Representation, scale: int = 0) -> LogicalType:
    """Return the logical type of a column's type."""
    return LogicalType(str(of), of, unit, scale)


def get_sql_type(data_type: DataType) -> DataType:
    """Return the column's own type, without logical types."""
    if isinstance(data_type, LogicalType):
        return data_type.of
    if isinstance(data_type, Array):
        return replace(data_type, element=get_sql_type(data_type.element))
    if isinstance(data_type, Map):
        return replace(data_type, value=get_sql_type(data_type.value))
    if isinstance(data_type, Struct):
        return Struct(tuple(list_sql_columns(data_type.fields)))
    return data_type


def list_sql_columns(columns: Sequence[Column]) -> list[Column]:
    """Return the columns with their own types, without logical types."""
    return [replace(c, type=get_sql_type(c.type)) for c in columns]


def apply_writer_types(wanted: Sequence[Column], sent: Sequence[Column]) -> tuple[Column, ...]:
    """Return columns with the logical types of another schema, in which the same number may have another meaning.

    :param wanted: the columns.
    :param sent: the columns of the writer's schema.
    """
    known = {c.name: c.type for c in sent}
    return tuple(replace(c, type=_apply_writer_type(c.type, known[c.name])) if c.name in known else c for c in wanted)


def _apply_writer_type(wanted: DataType, sent: DataType) -> DataType:
    if isinstance(wanted, Struct) and isinstance(sent, Struct):
        return Struct(apply_writer_types(wanted.fields, sent.fields))
    if isinstance(wanted, Array) and isinstance(sent, Array):
        return replace(wanted, element=_apply_writer_type(wanted.element, sent.element))
    if isinstance(wanted, Map) and isinstance(sent, Map):
        return replace(wanted, value=_apply_writer_type(wanted.value, sent.value))
    if isinstance(sent, LogicalType) and _describe_comparable(get_sql_type(wanted)) == _describe_comparable(sent.of):
        return find_logical_type(get_sql_type(wanted), sent.unit, sent.scale)
    return wanted


def _describe_comparable(data_type: DataType) -> str:
    if isinstance(data_type, Decimal):
        return "decimal"
    return "timestamp" if str(data_type) == "timestamp_ntz" else str(data_type)


def map_leaf_types(data_type: DataType, change: Callable[[DataType], DataType]) -> DataType:
    """Return a type whose innermost types are replaced by the results of a function."""
    if isinstance(data_type, Array):
        return replace(data_type, element=map_leaf_types(data_type.element, change))
    if isinstance(data_type, Map):
        return replace(data_type, value=map_leaf_types(data_type.value, change))
    if isinstance(data_type, Struct):
        return Struct(tuple(replace(f, type=map_leaf_types(f.type, change)) for f in data_type.fields))
    return change(data_type)


TimestampPrecision = Literal["millis", "micros"]

_CONNECT, _DEBEZIUM = "org.apache.kafka.connect.data.", "io.debezium.time."
_VARIABLE = "io.debezium.data.VariableScaleDecimal"
_ISO = (f"{_DEBEZIUM}IsoDate", f"{_DEBEZIUM}IsoTimestamp")
_UNITS: Mapping[str, Representation] = {
    f"{_CONNECT}Date": "days",
    f"{_CONNECT}Timestamp": "millis",
    f"{_DEBEZIUM}Date": "days",
    f"{_DEBEZIUM}Timestamp": "millis",
    f"{_DEBEZIUM}MicroTimestamp": "micros",
    f"{_DEBEZIUM}NanoTimestamp": "nanos",
}
_WRITTEN = {
    "tinyint": "int8", "smallint": "int16", "int": "int32", "bigint": "int64", "float": "float", "double": "double",
    "boolean": "boolean", "binary": "bytes",
}  # fmt: skip


def list_written_columns(columns: Sequence[Column], schema: Mapping[str, Any] | None) -> tuple[Column, ...]:
    """Return the columns with the logical types in which they are written by a record's schema.

    :param schema: the envelope's ``schema``, parsed; None leaves the columns as they are.
    :raises BadValue: the schema contradicts a column.
    """
    if schema is None:
        return tuple(columns)
    if _find_kind(schema) != "struct":
        raise BadValue(f"its schema is of type {_find_kind(schema)}, expected struct")
    return _list_fields(columns, schema)


def is_optional(schema: object) -> bool:
    """Return True if the payload may be null."""
    return schema is None or (isinstance(schema, dict) and schema.get("optional") is True)


def _find_kind(schema: object) -> str:
    kind = schema.get("type") if isinstance(schema, dict) else None
    if not isinstance(kind, str):
        raise BadValue(f"its schema has {shorten(json.dumps(schema))}, expected a type of Connect")
    return kind


def _list_fields(columns: Sequence[Column], schema: Mapping[str, Any]) -> tuple[Column, ...]:
    known = map_fields_by_name(schema)
    found = []
    for column in columns:
        try:
            found.append(replace(column, type=_find_type(column.type, known[column.name])) if column.name in known else column)
        except BadValue as e:
            raise e.prepend(f".{column.name}") from None
    return tuple(found)


def map_fields_by_name(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of a struct's fields by name."""
    fields = schema.get("fields")
    return {str(f.get("field")): f for f in fields if isinstance(f, dict)} if isinstance(fields, list) else {}


def _find_type(wanted: DataType, schema: Any) -> DataType:
    kind, name = _find_kind(schema), schema.get("name")
    if isinstance(wanted, Struct | Array | Map):
        return _find_nested_type(wanted, kind, schema)
    if isinstance(wanted, Decimal) and name == f"{_CONNECT}Decimal":
        return find_logical_type(wanted, "unscaled", _read_scale(schema))
    if isinstance(wanted, Decimal) and name == _VARIABLE and kind == "struct":
        return find_logical_type(wanted, "variable")
    if str(wanted) in ("date", "timestamp", "timestamp_ntz"):
        return _find_temporal_type(wanted, kind, name, schema)
    if kind == "bytes" and (str(wanted) != "binary"):
        raise _make_mismatch(wanted, schema)
    if str(wanted) == "binary" and kind != "bytes":
        raise _make_mismatch(wanted, schema)
    return wanted


def _find_nested_type(wanted: Struct | Array | Map, kind: str, schema: Mapping[str, Any]) -> DataType:
    if kind != {Struct: "struct", Array: "array", Map: "map"}[type(wanted)]:
        raise _make_mismatch(wanted, schema)
    if isinstance(wanted, Struct):
        return Struct(_list_fields(wanted.fields, schema))
    if isinstance(wanted, Array):
        return replace(wanted, element=_find_type(wanted.element, schema.get("items")))
    if _find_kind(schema.get("keys")) != "string":
        raise BadValue(f"its schema has a map with keys of type {_find_kind(schema.get('keys'))}, expected string")
    return replace(wanted, value=_find_type(wanted.value, schema.get("values")))


def _find_temporal_type(wanted: DataType, kind: str, name: object, schema: Mapping[str, Any]) -> DataType:
    unit = _UNITS.get(str(name))
    if kind == "string":
        return find_logical_type(wanted, "iso" if name in _ISO and str(wanted) != "timestamp" else "text")
    if unit is None or (unit == "days") != (str(wanted) == "date"):
        raise _make_mismatch(wanted, schema)
    return find_logical_type(wanted, unit)


def _read_scale(schema: Mapping[str, Any]) -> int:
    try:
        scale = int((schema.get("parameters") or {})["scale"])
    except (KeyError, TypeError, ValueError):
        raise BadValue("its schema has a Decimal without a scale, expected the parameter `scale`") from None
    if not -1000 < scale < 1000:
        raise BadValue(f"its schema has a Decimal of scale {scale}, which no column can have")
    return scale


def _make_mismatch(wanted: DataType, schema: Mapping[str, Any]) -> BadValue:
    name = schema.get("name")
    return BadValue(
        f"its schema says {schema['type']}{f' ({name})' if name else ''}, expected what a column of type {wanted} takes"
    )


# --- writing --------------------------------------------------------------------------------------------------------------


def connect_schema(columns: Sequence[Column], precision: TimestampPrecision) -> dict[str, Any]:
    """Return the schema of rows with these columns."""
    return _describe_written_type(Struct(tuple(columns)), False, precision)


def _describe_written_type(data_type: DataType, optional: bool, precision: TimestampPrecision) -> dict[str, Any]:
    found: dict[str, Any]
    if isinstance(data_type, Struct):
        fields = [_describe_written_type(f.type, f.nullable, precision) | {"field": f.name} for f in data_type.fields]
        found = {"type": "struct", "fields": fields}
    elif isinstance(data_type, Array):
        found = {"type": "array", "items": _describe_written_type(data_type.element, data_type.contains_null, precision)}
    elif isinstance(data_type, Map):
        values = _describe_written_type(data_type.value, data_type.value_contains_null, precision)
        found = {"type": "map", "keys": {"type": "string", "optional": False}, "values": values}
    elif isinstance(data_type, Decimal):
        parameters = {"scale": str(data_type.scale), "connect.decimal.precision": str(data_type.precision)}
        found = {"type": "bytes", "name": f"{_CONNECT}Decimal", "version": 1, "parameters": parameters}
    elif isinstance(data_type, Text):
        found = {"type": "string"}
    else:
        found = _describe_written_primitive(data_type, precision)
    return found | {"optional": optional}


def _describe_written_primitive(data_type: Primitive, precision: TimestampPrecision) -> dict[str, Any]:
    if data_type.name == "date":
        return {"type": "int32", "name": f"{_CONNECT}Date", "version": 1}
    if data_type.name in ("timestamp", "timestamp_ntz"):
        name = f"{_CONNECT}Timestamp" if precision == "millis" else f"{_DEBEZIUM}MicroTimestamp"
        return {"type": "int64", "name": name, "version": 1}
    return {"type": _WRITTEN[data_type.name]}


# --- columns of a schema --------------------------------------------------------------------------------------------------


_PRIMITIVES: Mapping[str, DataType] = {
    **{kind: Primitive(name) for name, kind in _WRITTEN.items()},
    "string": Text(),
}


def convert_connect_columns(schema: Mapping[str, Any], *, is_typed: bool) -> tuple[Column, ...]:
    """Return a column per field of a struct's schema.

    :param is_typed: True: Connect's and Debezium's dates, timestamps and decimals are columns of these types, if a column has
        enough digits; False: they are the numbers and bytes of the schema.
    :raises BadValue: the schema is not that of a struct, or has no fields.
    """
    fields = map_fields_by_name(schema)
    if not fields:
        raise BadValue("its schema has no fields, expected those of a table")
    return tuple(Column(name, _convert_connect_type(field, is_typed), is_optional(field)) for name, field in fields.items())


def _convert_connect_type(schema: Mapping[str, Any], is_typed: bool) -> DataType:
    kind, name = _find_kind(schema), str(schema.get("name"))
    if kind == "struct":
        return Struct(convert_connect_columns(schema, is_typed=is_typed))
    if kind == "array":
        items = schema["items"]
        return Array(_convert_connect_type(items, is_typed), is_optional(items))
    if kind == "map":
        values = schema["values"]
        return Map(Text(), _convert_connect_type(values, is_typed), is_optional(values))
    if is_typed and name == f"{_CONNECT}Decimal":
        scale, precision = _read_scale(schema), int(schema["parameters"].get("connect.decimal.precision", 99))
        if 0 <= scale <= precision <= 38:
            return Decimal(precision, scale)
    elif is_typed and name in _UNITS:
        return Primitive("date" if _UNITS[name] == "days" else "timestamp")
    return _PRIMITIVES[kind]
