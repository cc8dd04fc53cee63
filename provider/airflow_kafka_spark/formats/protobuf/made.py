"""A ``.proto`` made of columns. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from airflow_kafka_spark.errors import SchemaUnusable
from airflow_kafka_spark.formats.types import Array, Column, DataType, Decimal, Map, Primitive, Struct, Text

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WHAT = "the option `schema`"
_TYPES = {
    **dict.fromkeys(("tinyint", "smallint", "int"), "int32"),
    "bigint": "int64",
    "float": "float",
    "double": "double",
    "boolean": "bool",
    "binary": "bytes",
    "timestamp": "google.protobuf.Timestamp",
    "date": "google.type.Date",
}
_IMPORTS = {
    "google.protobuf.Timestamp": ("google/protobuf/timestamp.proto",),
    "google.type.Date": ("google/type/date.proto",),
    "confluent.type.Decimal": ("confluent/meta.proto", "confluent/type/decimal.proto"),
}


def proto_of(columns: Sequence[Column], message: str) -> str:
    """A proto3 file with one message whose fields are these columns, numbered from 1 in their order.

    Nullable columns are ``optional``; lists and maps, which Protobuf has no null of, are not.

    :param message: the message's full name.
    :raises SchemaUnusable: a column has no counterpart.
    """
    package, _, name = message.rpartition(".")
    maker = _Maker()
    body = maker.message(name, columns, "")
    imports = sorted({file for used in maker.used for file in _IMPORTS[used]})
    lines = ['syntax = "proto3";', *([f"package {package};"] if package else []), *(f'import "{file}";' for file in imports)]
    return "\n".join([*lines, "", *body, ""])


class _Maker:
    """Goes through columns."""

    def __init__(self) -> None:
        self.used: set[str] = set()

    def message(self, name: str, columns: Sequence[Column], path: str) -> list[str]:
        inner: list[str] = []
        fields = []
        for number, column in enumerate(columns, 1):
            here = f"{path}.{column.name}" if path else column.name
            if not _NAME.fullmatch(column.name):
                raise SchemaUnusable(_WHAT, f"column `{here}` has a name that Protobuf does not take", "Rename it")
            label, kind, options = self._field(column, here, inner)
            fields.append(f"  {label}{kind} {column.name} = {number}{options};")
        return [f"message {name} {{", *(f"  {line}" for line in inner), *fields, "}"]

    def _field(self, column: Column, path: str, inner: list[str]) -> tuple[str, str, str]:
        data_type = column.type
        if isinstance(data_type, Array):
            if isinstance(data_type.element, Array | Map):
                raise _none(path, data_type, "Put the inner one into a struct")
            return "repeated ", *self._one(data_type.element, column.name, path, inner)
        if isinstance(data_type, Map):
            if str(data_type.key) not in ("string", "int", "bigint", "boolean", "smallint", "tinyint"):
                raise _none(path, data_type, "Keys are strings, integers or booleans")
            if isinstance(data_type.value, Array | Map | Decimal):
                raise _none(path, data_type, "Put the value into a struct")
            key, _ = self._one(data_type.key, column.name, path, inner)
            value, options = self._one(data_type.value, column.name, path, inner)
            return "", f"map<{key}, {value}>", options
        kind, options = self._one(data_type, column.name, path, inner)
        return "optional " if column.nullable else "", kind, options

    def _one(self, data_type: DataType, name: str, path: str, inner: list[str]) -> tuple[str, str]:
        if isinstance(data_type, Text):
            return "string", ""
        if isinstance(data_type, Decimal):
            self.used.add("confluent.type.Decimal")
            params = {"precision": data_type.precision, "scale": data_type.scale}
            said = ", ".join(f'{{ key: "{key}", value: "{value}" }}' for key, value in params.items())
            return "confluent.type.Decimal", f" [(confluent.field_meta) = {{ params: [{said}] }}]"
        if isinstance(data_type, Struct):
            message = "".join(part[:1].upper() + part[1:] for part in name.split("_")) or "Inner"
            # As protoc tells them apart: a nested message has the scope of its field's siblings.
            inner += self.message(f"{message}Value", data_type.fields, path)
            return f"{message}Value", ""
        if not isinstance(data_type, Primitive) or data_type.name not in _TYPES:
            raise _none(path, data_type, "Declare it timestamp" if str(data_type) == "timestamp_ntz" else "Declare another type")
        kind = _TYPES[data_type.name]
        if kind in _IMPORTS:
            self.used.add(kind)
        return kind, ""


def _none(path: str, data_type: DataType, action: str) -> SchemaUnusable:
    return SchemaUnusable(_WHAT, f"column `{path}` is of type {data_type}, which Protobuf has not", action)
