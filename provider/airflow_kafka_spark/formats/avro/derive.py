"""An Avro schema made of columns. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from airflow_kafka_spark.formats.types import Array, Column, DataType, Decimal, Map, Struct, Text

NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_LEAVES: dict[str, Any] = {
    **dict.fromkeys(("tinyint", "smallint", "int"), "int"),
    "bigint": "long",
    "float": "float",
    "double": "double",
    "boolean": "boolean",
    "binary": "bytes",
    "date": {"type": "int", "logicalType": "date"},
    "timestamp": {"type": "long", "logicalType": "timestamp-micros"},
    "timestamp_ntz": {"type": "long", "logicalType": "local-timestamp-micros"},
}


def full_name(name: str, namespace: str) -> str:
    """A name with its namespace; one that has dots is full already."""
    return name if "." in name or not namespace else f"{namespace}.{name}"


def is_full_name(name: str) -> bool:
    """Whether it is one as Avro has them: letters of ASCII, digits and ``_``, in parts between dots."""
    return all(NAME.fullmatch(part) for part in name.split("."))


def namespace_of(topic: str) -> str:
    """A namespace named after a topic: what Avro does not allow in it becomes ``_``."""
    parts = (re.sub("[^A-Za-z0-9_]", "_", part) for part in topic.split("."))
    return ".".join(part if part and not part[0].isdigit() else f"_{part}" for part in parts)


def record_of(columns: Sequence[Column], name: str) -> str:
    """The JSON of a record with a field per column.

    A column that takes nulls becomes a union with null, whose default is null. Records in it are named after their fields, in the
    namespace of the record that holds them, so that no two names are the same.

    :param name: the record's full name.
    """
    return json.dumps(_record(columns, name))


def type_of(column: Column, name: str) -> str:
    """The JSON of the bare type of one column, which never holds a null.

    :param name: the full name of a record in it.
    """
    namespace, _, last = name.rpartition(".")
    return json.dumps(_type(column.type, namespace, last))


def _record(columns: Sequence[Column], name: str) -> dict[str, Any]:
    fields = []
    for column in columns:
        made: dict[str, Any] = {"name": column.name, "type": _nullable(_type(column.type, name, column.name), column.nullable)}
        if column.nullable:
            made["default"] = None
        if column.comment:
            made["doc"] = column.comment
        fields.append(made)
    namespace, _, last = name.rpartition(".")
    return {"type": "record", "name": last, **({"namespace": namespace} if namespace else {}), "fields": fields}


def _type(data_type: DataType, namespace: str, name: str) -> Any:
    if isinstance(data_type, Struct):
        return _record(data_type.fields, full_name(name, namespace))
    if isinstance(data_type, Array):
        return {"type": "array", "items": _nullable(_type(data_type.element, namespace, name), data_type.contains_null)}
    if isinstance(data_type, Map):
        return {"type": "map", "values": _nullable(_type(data_type.value, namespace, name), data_type.value_contains_null)}
    if isinstance(data_type, Decimal):
        return {"type": "bytes", "logicalType": "decimal", "precision": data_type.precision, "scale": data_type.scale}
    return "string" if isinstance(data_type, Text) else _LEAVES[data_type.name]


def _nullable(made: Any, nullable: bool) -> Any:
    return ["null", made] if nullable else made


def refused(columns: Sequence[Column], path: str = "") -> Iterator[tuple[str, str]]:
    """What keeps a schema from being made of columns: what was found, and what helps."""
    for column in columns:
        here = f"{path}.{column.name}" if path else column.name
        if not NAME.fullmatch(column.name):
            found = f"`{here}` is no name in Avro, which has letters of ASCII, digits and `_`, and no digit first"
            yield found, "Rename the column"
        yield from _refused_in(column.type, here)


def _refused_in(data_type: DataType, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(data_type, Struct):
        yield from refused(data_type.fields, path)
    elif isinstance(data_type, Array):
        yield from _refused_in(data_type.element, f"{path}[]")
    elif isinstance(data_type, Map):
        if not isinstance(data_type.key, Text):
            yield f"`{path}` is a {data_type}, and Avro's maps have strings as keys", "Make it a map<string,...>"
        yield from _refused_in(data_type.value, f"{path}[]")
