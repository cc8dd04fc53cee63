"""JSON Schemas of a registry: put together with what they refer to, read as columns, and made of columns. Pure.

Beside what :mod:`.json.json_schema` reads, Connect's own words are read and written (``connect.type`` and the titles of its
logical types), so that columns have the types they were written from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urljoin

from airflow_kafka_spark.errors import SchemaInvalid, SchemaUnusable
from airflow_kafka_spark.formats.json.json_schema import _Reader, _wrong, parse_json_schema
from airflow_kafka_spark.formats.json.logical_types import Carried, carried
from airflow_kafka_spark.formats.registry import Document
from airflow_kafka_spark.formats.types import Array, Column, DataType, Decimal, Map, Primitive, Struct, Text

LOCAL = "local-date-time"
_CONNECT, _DEBEZIUM = "org.apache.kafka.connect.data.", "io.debezium.time."
_CARRIED: Mapping[str, Carried] = {
    f"{_CONNECT}Date": carried(Primitive("date"), "days"),
    f"{_CONNECT}Timestamp": carried(Primitive("timestamp"), "millis"),
    f"{_DEBEZIUM}Date": carried(Primitive("date"), "days"),
    f"{_DEBEZIUM}Timestamp": carried(Primitive("timestamp_ntz"), "millis"),
    f"{_DEBEZIUM}MicroTimestamp": carried(Primitive("timestamp_ntz"), "micros"),
    f"{_DEBEZIUM}NanoTimestamp": carried(Primitive("timestamp_ntz"), "nanos"),
}
"""What integers are, by their titles."""
_NUMBERS = {"int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint", "float32": "float", "float64": "double"}
_CONNECT_TYPES = {name: connect for connect, name in _NUMBERS.items()}
_MAX_PRECISION, _LARGEST_SCALE = 38, 1000
_UNREADABLE = Primitive("void")


@dataclass(frozen=True)
class Field(Column):
    """A property.

    :param null: whether null is one of its values.
    :param absent: whether it may be left out.
    """

    null: bool = True
    absent: bool = True


# --- putting together ----------------------------------------------------------------------------------------------------


def bundled(document: Document) -> dict[str, Any]:
    """A schema that stands alone: what it refers to is among its ``definitions``.

    :raises SchemaUnusable: it is no JSON Schema.
    """
    root = _parsed(document.text, document.name)
    if not document.references:
        return root
    names = [name for name, _ in document.references]
    own = _moved(root, str(root.get("$id", "")), "#", names)
    definitions = dict(own.get("definitions") or {})
    for name, text in document.references:
        part = _parsed(text, f"{document.name}, of `{name}`")
        moved = _moved(part, str(part.get("$id", name)), _place(name), names)
        definitions[name] = {key: value for key, value in moved.items() if key not in ("$id", "$schema")}
    return {**own, "definitions": definitions}


def _parsed(text: str, name: str) -> dict[str, Any]:
    try:
        return dict(parse_json_schema(text))
    except SchemaInvalid as e:
        raise SchemaUnusable(name, f"{e.found}; expected {e.expected}") from None


def _place(name: str) -> str:
    return "#/definitions/" + quote(name.replace("~", "~0").replace("/", "~1"), safe="~")


def _moved(value: Any, base: str, place: str, names: Sequence[str]) -> Any:
    """A schema with its references changed to where their targets are now."""
    if isinstance(value, list):
        return [_moved(one, base, place, names) for one in value]
    if not isinstance(value, dict):
        return value
    found = {key: _moved(one, base, place, names) for key, one in value.items()}
    target = value.get("$ref")
    if isinstance(target, str):
        document, mark, fragment = target.partition("#")
        if not document:
            found["$ref"] = place + fragment if place != "#" else target
        else:
            known = next((name for name in names if name in (document, urljoin(base, document))), None)
            if known is not None:
                found["$ref"] = _place(known) + (fragment if mark else "")
    return found


# --- columns -------------------------------------------------------------------------------------------------------------


def fields_of(schema: Mapping[str, Any], what: str) -> tuple[Field, ...]:
    """The columns of the objects that a schema describes; their types may be :class:`.Carried`.

    :param what: the schema, as it stands in a sentence.
    :raises SchemaUnusable: naming the place in the schema, what was found there and what was expected.
    """
    try:
        found, _ = _ConnectReader(schema).read(schema, "#", ())
    except SchemaInvalid as e:
        raise SchemaUnusable(what, f"found {e.found.removeprefix('The schema has ')}; expected {e.expected}") from None
    if not isinstance(found, Struct):
        raise SchemaUnusable(what, f"found a schema of {found}; expected an object with `properties`")
    return tuple(field for field in found.fields if isinstance(field, Field))


class _ConnectReader(_Reader):
    """Knows Connect's words, and which properties may be null and which may be missing."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        super().__init__(document)
        self._nulls: dict[str, bool] = {}

    def read(self, schema: Any, path: str, within: tuple[str, ...]) -> tuple[DataType, bool]:
        found = super().read(schema, path, within)
        self._nulls[path] = found[1]
        return found

    def _object(self, schema: Mapping[str, Any], path: str, within: tuple[str, ...]) -> DataType:
        found = super()._object(schema, path, within)
        if not isinstance(found, Struct):
            return found
        required = set(schema.get("required") or ())
        return Struct(
            tuple(
                Field(f.name, f.type, f.nullable, f.comment, self._nulls[f"{path}/properties/{f.name}"], f.name not in required)
                for f in found.fields
            )
        )

    def _typed(self, kind: str, schema: Mapping[str, Any], path: str, within: tuple[str, ...]) -> DataType:
        said, title = schema.get("connect.type"), str(schema.get("title", ""))
        if kind == "integer" and title in _CARRIED and said in ("int32", "int64"):
            return _CARRIED[title]
        if kind in ("number", "string") and said == "bytes" and title == f"{_CONNECT}Decimal":
            scale = _scale(schema)
            if kind == "string" and scale is None:
                raise _wrong(
                    path, "a Decimal in base64 without its scale", "`connect.parameters` with a `scale` from -999 to 999"
                )
            decimal = _decimal(schema, scale or 0)
            return decimal if kind == "number" else carried(decimal, "unscaled", scale or 0)
        if kind == "string" and said == "bytes":
            return Primitive("binary")
        if kind in ("integer", "number") and str(said) in _NUMBERS:
            return Primitive(_NUMBERS[str(said)])
        if kind == "string" and schema.get("format") == LOCAL:
            return Primitive("timestamp_ntz")
        return super()._typed(kind, schema, path, within)


class _LenientReader(_ConnectReader):
    """Passes over what cannot be columns."""

    def read(self, schema: Any, path: str, within: tuple[str, ...]) -> tuple[DataType, bool]:
        try:
            return super().read(schema, path, within)
        except SchemaInvalid:
            pass
        self._nulls[path] = True
        try:
            return self._object(schema if isinstance(schema, Mapping) else {}, path, within), True
        except SchemaInvalid:
            return _UNREADABLE, True


def readable_fields(schema: Mapping[str, Any]) -> tuple[Column, ...]:
    """The columns of a schema of which not all can be columns: the others, and what is within them, are of no known type."""
    found, _ = _LenientReader(schema).read(schema, "#", ())
    return found.fields if isinstance(found, Struct) else ()


def _scale(schema: Mapping[str, Any]) -> int | None:
    """The scale that a Decimal's bytes are of; None where it is not said."""
    params = schema.get("connect.parameters")
    try:
        scale = int(params["scale"]) if isinstance(params, Mapping) else None
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return scale if scale is not None and -_LARGEST_SCALE < scale < _LARGEST_SCALE else None


def _decimal(schema: Mapping[str, Any], scale: int) -> Decimal:
    params = schema.get("connect.parameters")
    try:
        precision = int(params["connect.decimal.precision"]) if isinstance(params, Mapping) else _MAX_PRECISION
    except (KeyError, TypeError, ValueError, OverflowError):
        precision = _MAX_PRECISION
    precision = min(max(precision, 1), _MAX_PRECISION)
    return Decimal(precision, min(max(scale, 0), precision))


# --- made of columns -----------------------------------------------------------------------------------------------------


def schema_of(columns: Sequence[Column], title: str) -> str:
    """A JSON Schema (draft-07) of objects with these columns, and with no others, so that later versions may have more.

    Nullable columns may be null and may be missing. What JSON does not tell apart is told in Connect's words.

    :raises SchemaUnusable: a column has no counterpart.
    """
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": title}
    return json.dumps({**head, **_object(columns, "")}, ensure_ascii=False, separators=(",", ":"))


def _object(columns: Sequence[Column], path: str) -> dict[str, Any]:
    properties = {}
    for column in columns:
        schema = _schema(column.type, f"{path}.{column.name}".lstrip("."))
        properties[column.name] = _or_null(schema, column.nullable)
    required = [c.name for c in columns if not c.nullable]
    said = {"required": required} if required else {}
    return {"type": "object", "properties": properties, **said, "additionalProperties": False}


def _or_null(schema: dict[str, Any], nullable: bool) -> dict[str, Any]:
    return {"oneOf": [{"type": "null"}, schema]} if nullable else schema


def _schema(data_type: DataType, path: str) -> dict[str, Any]:
    if isinstance(data_type, Struct):
        return _object(data_type.fields, path)
    if isinstance(data_type, Array):
        return {"type": "array", "items": _or_null(_schema(data_type.element, f"{path}[]"), data_type.contains_null)}
    if isinstance(data_type, Map):
        if data_type.key != Text():
            detail = f"column `{path}` has keys of type {data_type.key}; expected string, as JSON's names are"
            raise SchemaUnusable("the option `schema`", detail, "Declare map<string,...>")
        value = _or_null(_schema(data_type.value, f"{path}[]"), data_type.value_contains_null)
        return {"type": "object", "additionalProperties": value}
    if isinstance(data_type, Text):
        return {"type": "string", **({"maxLength": data_type.max_length} if data_type.max_length else {})}
    if isinstance(data_type, Decimal):
        params = {"scale": str(data_type.scale), "connect.decimal.precision": str(data_type.precision)}
        return {"type": "number", "title": f"{_CONNECT}Decimal", "connect.type": "bytes", "connect.parameters": params}
    name = data_type.name
    if name in _CONNECT_TYPES:
        return {"type": "number" if name in ("float", "double") else "integer", "connect.type": _CONNECT_TYPES[name]}
    return dict(_OTHERS[name])


_OTHERS: Mapping[str, Mapping[str, str]] = {
    "boolean": {"type": "boolean"},
    "binary": {"type": "string", "contentEncoding": "base64", "connect.type": "bytes"},
    "date": {"type": "string", "format": "date"},
    "timestamp": {"type": "string", "format": "date-time"},
    "timestamp_ntz": {"type": "string", "format": LOCAL},
}
