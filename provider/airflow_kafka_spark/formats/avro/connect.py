"""Avro schemas of Connect's schemas, with the names and properties that Confluent's AvroConverter writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from airflow_kafka_spark.formats.avro.schema import make_namespace, qualify_name

_TYPES = {
    **dict.fromkeys(("int8", "int16", "int32"), "int"),
    **{"int64": "long", "float": "float", "double": "double", "boolean": "boolean", "string": "string", "bytes": "bytes"},
}
_CONNECT = "org.apache.kafka.connect.data."
_LOGICAL = {f"{_CONNECT}Date": "date", f"{_CONNECT}Time": "time-millis", f"{_CONNECT}Timestamp": "timestamp-millis"}
_DEFAULT_PRECISION = 64
"""The precision of a decimal whose schema has none, as in AvroConverter."""


def convert_connect_to_avro(schema: Mapping[str, Any]) -> str:
    """Return the JSON of the Avro schema of a Connect schema.

    Structs are records of the same name, with ``_`` for what Avro's names cannot have. An optional field is a union with null.
    The names of logical types are properties (``connect.name``); those of Connect itself are logical types of Avro, too.
    """
    return json.dumps(_AvroWriter().type(schema))


def remove_logical_types(text: str) -> str:
    """Return an Avro schema without its logical types, which has the same bytes."""
    return json.dumps(_remove_logical_types(json.loads(text)))


def _remove_logical_types(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_remove_logical_types(branch) for branch in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: value for name, value in schema.items() if name != "logicalType" and not name.startswith("connect.")}
    for name in ("type", "items", "values"):
        if name in kept:
            kept[name] = _remove_logical_types(kept[name])
    if "fields" in kept:
        kept["fields"] = [_remove_logical_types(field) for field in kept["fields"]]
    return kept


class _AvroWriter:
    """Writes types. A record is written once, and named where it is used again."""

    def __init__(self) -> None:
        self._records: set[str] = set()

    def type(self, schema: Mapping[str, Any]) -> Any:
        """Return a type that holds no null."""
        kind, more = schema["type"], _list_properties(schema)
        if kind == "struct":
            return self._record(schema, more)
        if kind == "array":
            return {"type": "array", "items": self._optional(schema["items"]), **more}
        if kind == "map":
            return {"type": "map", "values": self._optional(schema["values"]), **more}
        if kind in ("int8", "int16"):
            more = {"connect.type": kind, **more}
        return {"type": _TYPES[kind], **more} if more else _TYPES[kind]

    def _record(self, schema: Mapping[str, Any], more: Mapping[str, Any]) -> Any:
        namespace, _, name = make_namespace(str(schema.get("name") or "ConnectDefault")).rpartition(".")
        full = qualify_name(name, namespace)
        if full in self._records:
            return full
        self._records.add(full)
        fields = [self._field(field) for field in schema["fields"]]
        return {"type": "record", "name": name, **({"namespace": namespace} if namespace else {}), "fields": fields, **more}

    def _field(self, field: Mapping[str, Any]) -> dict[str, Any]:
        made = {"name": field["field"], "type": self._optional(field)}
        if "default" in field:
            return {**made, "default": field["default"]}
        return {**made, "default": None} if field.get("optional") else made

    def _optional(self, schema: Mapping[str, Any]) -> Any:
        made = self.type(schema)
        if not schema.get("optional"):
            return made
        # The type of the default is the first one of a union.
        return [made, "null"] if schema.get("default") is not None else ["null", made]


def _list_properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties by which a Connect schema is recognised."""
    name, parameters = schema.get("name"), schema.get("parameters") or {}
    found: dict[str, Any] = {}
    if name == f"{_CONNECT}Decimal":
        precision = int(parameters.get("connect.decimal.precision", _DEFAULT_PRECISION))
        found = {"logicalType": "decimal", "scale": int(parameters["scale"]), "precision": precision}
    elif name in _LOGICAL:
        found = {"logicalType": _LOGICAL[name]}
    if schema.get("version") is not None:
        found["connect.version"] = schema["version"]
    if parameters:
        found["connect.parameters"] = dict(parameters)
    if name:
        found["connect.name"] = name
    return found
