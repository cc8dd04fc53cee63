"""Protobuf schemas of Connect's schemas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pb2 import DescriptorProto

from airflow_kafka_spark.errors import SchemaUnusable
from airflow_kafka_spark.formats.avro.schema import make_namespace
from airflow_kafka_spark.formats.protobuf.schema import NAME, ScalarFields
from airflow_kafka_spark.formats.types import Array, Column, Map, Struct

Numbers = Mapping[str, int]
"""The numbers of a message's fields, by name. A reserved name has the number 0; a reserved number is its own name."""


def make_message_name(schema: Mapping[str, Any]) -> str:
    """Return the full name of the message of a struct: its own, with ``_`` for what such names cannot have."""
    return make_namespace(str(schema["name"]))


def list_field_numbers(message: Descriptor) -> dict[str, Numbers]:
    """Return the numbers of the fields of a message and of those in it, by the messages' names; with those that are reserved."""
    described = DescriptorProto()
    message.CopyToProto(described)
    numbers: dict[str, int] = dict.fromkeys(described.reserved_name, 0)
    numbers |= {str(at): at for span in described.reserved_range for at in range(span.start, span.end)}
    found: dict[str, Numbers] = {message.name: numbers | {field.name: field.number for field in message.fields}}
    for inner in message.nested_types:
        found |= list_field_numbers(inner)
    return found


def convert_connect_to_proto(schema: Mapping[str, Any], columns: Iterable[Column], known: Mapping[str, Numbers]) -> str:
    """Return a proto3 file with the message of a struct's schema, and messages for the structs in it, named as these are.

    A field keeps the number that it has in an earlier version, and a number of an earlier version is not given to another
    field: by its number a reader finds a field.

    :param columns: the columns of the struct.
    :param known: the numbers of an earlier version; see :func:`list_field_numbers`.
    :raises SchemaUnusable: a column has no counterpart.
    """
    package, _, name = make_message_name(schema).rpartition(".")
    writer = _ConnectMessages(f".{package}.{name}" if package else f".{name}", known)
    body = writer.message(name, schema, list(columns))
    lines = ['syntax = "proto3";', *([f"package {package};"] if package else [])]
    lines += [f'import "{file}";' for file in writer.scalars.imports]
    return "\n".join([*lines, "", f"message {name} {{", *writer.inner, *body, "}", ""])


class _ConnectMessages:
    """Writes the fields of messages, and the messages in them, once each.

    :param outer: the full name of the outer message.
    :param known: the numbers of fields of an earlier version.
    """

    def __init__(self, outer: str, known: Mapping[str, Numbers]) -> None:
        self.scalars = ScalarFields()
        self.inner: list[str] = []
        self._outer, self._known = outer, known
        self._made: set[str] = set()

    def message(self, name: str, schema: Mapping[str, Any], columns: list[Column]) -> list[str]:
        """Return the lines of the fields of a message."""
        known = self._known.get(name, {})
        following = max(known.values(), default=0)
        lines, of_fields = [], {str(field["field"]): field for field in schema["fields"]}
        for column in columns:
            if not NAME.fullmatch(column.name):
                found = f"column `{column.name}` has a name that Protobuf does not take"
                raise SchemaUnusable(f"message {name}", found, "Rename it, or leave the table out")
            number = known.get(column.name)
            if not number:
                number = following = following + 1
            lines.append(f"  {self._field(column, of_fields[column.name])} = {number}{self._options(column)};")
        gone = {field: number for field, number in known.items() if field not in of_fields}
        names = sorted(f'"{field}"' for field in gone if not field.isdigit())
        reserved = [", ".join(map(str, sorted(filter(None, gone.values())))), ", ".join(names)]
        return [*(f"  reserved {those};" for those in reserved if those), *lines]

    def _field(self, column: Column, schema: Mapping[str, Any]) -> str:
        if isinstance(column.type, Array):
            if isinstance(column.type.element, Array | Map):
                found = f"column `{column.name}` is an array of arrays, which Protobuf has not"
                raise SchemaUnusable(f"message {self._outer}", found, "Leave the table out")
            return f"repeated {self._kind(Column(column.name, column.type.element), schema['items'])} {column.name}"
        return f"{'optional ' if column.nullable else ''}{self._kind(column, schema)} {column.name}"

    def _kind(self, column: Column, schema: Mapping[str, Any]) -> str:
        if not isinstance(column.type, Struct):
            return self.scalars.kind(column.type, column.name)[0]
        name = make_message_name(schema).rpartition(".")[2]
        if name not in self._made:
            self._made.add(name)
            lines = self.message(name, schema, list(column.type.fields))
            self.inner += [f"  message {name} {{", *(f"  {line}" for line in lines), "  }"]
        return f"{self._outer}.{name}"

    def _options(self, column: Column) -> str:
        kind = column.type.element if isinstance(column.type, Array) else column.type
        return "" if isinstance(kind, Struct) else self.scalars.kind(kind, column.name)[1]
