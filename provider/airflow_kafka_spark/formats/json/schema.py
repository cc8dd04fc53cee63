"""JSON Schema (draft-07 and 2020-12): read as columns, bundled with the schemas it refers to, and derived from columns.

Types, names and nulls are kept. Rules about values (``minimum``, ``pattern``, the members of an ``enum``, ...) are not checked
here; a schema in which the type of a column depends on the record is refused. :func:`list_fields` and
:func:`make_json_schema` also use Connect's keywords (``connect.type`` and the titles of its logical types), so that
columns keep the types they were written from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote, urljoin

from airflow_kafka_spark.errors import SchemaInvalid, SchemaUnusable
from airflow_kafka_spark.errors.base import find_similar_name
from airflow_kafka_spark.formats.json.connect_schema import LogicalType, find_logical_type
from airflow_kafka_spark.formats.registry import SchemaDocument
from airflow_kafka_spark.formats.types import Array, Column, DataType, Decimal, Map, Primitive, Struct, Text

_MAX_NESTING = 50
_NOTES = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "nullable", "$comment", "$id", "id"),
    *("$schema", "$anchor", "$vocabulary", "definitions", "$defs", "contentMediaType", "contentSchema"),
}
_UNCHECKED = {
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern"),
    *("minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains", "minProperties", "maxProperties"),
    *("propertyNames", "dependentRequired"),
}
_READ = {
    *("type", "properties", "required", "additionalProperties", "unevaluatedProperties", "items", "format", "enum", "const"),
    *("$ref", "anyOf", "oneOf", "allOf", "contentEncoding"),
}
_REFUSED = {
    *("not", "if", "then", "else", "patternProperties", "prefixItems", "additionalItems", "unevaluatedItems"),
    *("dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
}
_KNOWN = _NOTES | _UNCHECKED | _READ | _REFUSED
_FORMATS: Mapping[str, DataType] = {"date": Primitive("date"), "date-time": Primitive("timestamp")}
_PLAIN: Mapping[str, DataType] = {"integer": Primitive("bigint"), "number": Primitive("double"), "boolean": Primitive("boolean")}


def parse_json_schema(text: str) -> Mapping[str, Any]:
    """Return the document of a JSON Schema.

    :raises SchemaInvalid: the text is not a JSON object.
    """
    try:
        found = json.loads(text)
    except ValueError as e:
        position = getattr(e, "pos", 0)
        raise SchemaInvalid(text, position, f"no JSON ({getattr(e, 'msg', e)})", "a JSON Schema") from None
    if not isinstance(found, dict):
        raise SchemaInvalid(text, 0, f"a {type(found).__name__}", "a JSON Schema, which is an object")
    return found


def list_json_schema_columns(schema: Mapping[str, Any]) -> tuple[Column, ...]:
    """Return the columns of the objects that a JSON Schema describes: its ``properties``, in order.

    ======================================================  =======================================================
    schema                                                  column
    ======================================================  =======================================================
    ``integer``, ``number``, ``boolean``                    bigint, double, boolean
    ``string``                                              string; of format ``date`` date, ``date-time``
                                                            timestamp; of ``contentEncoding: base64`` binary
    ``enum``, ``const`` without a type                      that of its members, which is one
    ``object`` with ``properties``                          struct
    ``object`` with ``additionalProperties: {schema}``      map<string, that>
    ``array`` with ``items``                                array<that>
    ``["string", "null"]``, ``anyOf`` with ``null``,        nullable
    ``nullable: true``, or not in ``required``
    ``$ref`` to ``#/...``, ``allOf`` of one                 that of the referenced schema
    ======================================================  =======================================================

    :raises SchemaInvalid: naming the place in the schema, what was found there and what was expected.
    """
    if schema and not schema.keys() & {"type", "$ref"} and all(isinstance(kind, str) for kind in schema.values()):
        expected = 'JSON Schema, as {"type": "object", "properties": {...}}, or columns as a text, as "id bigint, name string"'
        raise _make_invalid_error("#", "names with types", expected)
    reader = _SchemaReader(schema)
    found, nullable = reader.read(schema, "#", ())
    if not isinstance(found, Struct):
        raise _make_invalid_error("#", f"a schema of {found}", "an object with `properties`")
    return found.fields


def _make_invalid_error(path: str, found: str, expected: str) -> SchemaInvalid:
    return SchemaInvalid("", None, f"{found} at `{path}`", expected)


class _SchemaReader:
    """Reads the types of a document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document
        self._resource = document

    def read(self, schema: object, path: str, within: tuple[str, ...]) -> tuple[DataType, bool]:
        """Return the type that a schema describes, and True if null is one of its values.

        :param path: the path of the schema in the document.
        :param within: the references through which it was reached.
        """
        if not isinstance(schema, Mapping):
            what = "a schema that allows anything" if schema is True else f"{schema!r}"
            raise _make_invalid_error(path, what, "a schema with a type")
        if path.count("/") > 2 * _MAX_NESTING or len(within) > _MAX_NESTING:
            raise _make_invalid_error(path[:60], "a schema", f"types nested at most {_MAX_NESTING} deep")
        _check_keywords(schema, path)
        outer = self._resource
        if path != "#" and "$ref" not in schema and not str(schema.get("$id", "#")).startswith("#"):
            # `#/...` in a schema with an `$id` of its own is a place in that schema.
            self._resource = schema
        try:
            return self._read_checked(schema, path, within)
        finally:
            self._resource = outer

    def _read_checked(self, schema: Mapping[str, Any], path: str, within: tuple[str, ...]) -> tuple[DataType, bool]:
        nullable = schema.get("nullable") is True
        for keyword in ("$ref", "allOf", "anyOf", "oneOf"):
            if keyword in schema:
                # Other keywords beside it do not describe types, as Connect's `connect.index` beside each `oneOf` with null.
                beside = sorted(_READ & set(schema) - {keyword, "type" if keyword != "$ref" else ""})
                if beside:
                    raise _make_invalid_error(path, f"`{keyword}` beside `{beside[0]}`", f"`{keyword}` alone")
                found, may_be_null = getattr(self, f"_{keyword.lstrip('$')}")(schema[keyword], path, within)
                return found, nullable or may_be_null
        kind, may_be_null = _find_type(schema, path)
        return self._read_typed(kind, schema, path, within), nullable or may_be_null

    def _ref(self, target: object, path: str, within: tuple[str, ...]) -> tuple[DataType, bool]:
        if not isinstance(target, str) or not target.startswith("#") or (target != "#" and not target.startswith("#/")):
            raise _make_invalid_error(path, f"`$ref` to {target!r}", "a reference within the document, as `#/$defs/name`")
        if target in within or target == "#":
            raise _make_invalid_error(path, f"`$ref` to `{target}`, a schema that contains it,", "types that end")
        for document in (self._resource, self.document):
            try:
                found = _find_target(document, target)
            except LookupError:
                continue
            outer, self._resource = self._resource, document
            try:
                return self.read(found, target, (*within, target))
            finally:
                self._resource = outer
        raise _make_invalid_error(path, f"`$ref` to `{target}`, which does not exist,", "a reference within the document")

    def _allOf(self, schemas: object, path: str, within: tuple[str, ...]) -> tuple[DataType, bool]:  # noqa: N802 - the keyword
        if not isinstance(schemas, Sequence) or len(schemas) != 1:
            raise _make_invalid_error(path, "`allOf` of several schemas", "one of them, which has all")
        return self.read(schemas[0], f"{path}/allOf/0", within)

    def _anyOf(self, schemas: object, path: str, within: tuple[str, ...]) -> tuple[DataType, bool]:  # noqa: N802 - the keyword
        branches = list(enumerate(schemas)) if isinstance(schemas, Sequence) and not isinstance(schemas, str) else []
        typed = [(n, s) for n, s in branches if not (isinstance(s, Mapping) and s.get("type") == "null")]
        if len(typed) != 1:
            raise _make_invalid_error(path, "a choice between several types", "one type, and perhaps null")
        ((n, schema),) = typed
        found, nullable = self.read(schema, f"{path}/anyOf/{n}", within)
        return found, nullable or len(branches) > 1

    _oneOf = _anyOf

    def _read_typed(self, kind: str, schema: Mapping[str, Any], path: str, within: tuple[str, ...]) -> DataType:
        if kind == "object":
            return self._read_object(schema, path, within)
        if kind == "array":
            if not isinstance(schema.get("items"), Mapping):
                raise _make_invalid_error(path, "an array without one schema for its items", "`items`, the schema of each item")
            element, nullable = self.read(schema["items"], f"{path}/items", within)
            return Array(element, nullable)
        if kind in _PLAIN:
            return _PLAIN[kind]
        if schema.get("contentEncoding") == "base64":
            return Primitive("binary")
        if "contentEncoding" in schema:
            raise _make_invalid_error(path, f"contentEncoding {schema['contentEncoding']!r}", "base64")
        return _FORMATS.get(str(schema.get("format")), Text())

    def _read_object(self, schema: Mapping[str, Any], path: str, within: tuple[str, ...]) -> DataType:
        properties, others = schema.get("properties"), schema.get("additionalProperties")
        if not properties and isinstance(others, Mapping) and others:
            value, nullable = self.read(others, f"{path}/additionalProperties", within)
            return Map(Text(), value, nullable)
        if not isinstance(properties, Mapping) or not properties:
            raise _make_invalid_error(
                path, "an object without `properties`", "its fields, or one schema for all as `additionalProperties`"
            )
        required = schema.get("required") or ()
        if isinstance(required, str) or not isinstance(required, Sequence) or not all(isinstance(n, str) for n in required):
            raise _make_invalid_error(path, f"required: {required!r}", "a list of names, beside `properties`")
        unknown = [name for name in required if name not in properties]
        if unknown:
            raise _make_invalid_error(path, f"`{unknown[0]}` as required", "names of its `properties`")
        fields, seen = [], dict[str, str]()
        for name, of_field in properties.items():
            here = f"{path}/properties/{name}"
            if not isinstance(name, str):
                raise _make_invalid_error(here, f"the name {name!r}", "a text, as JSON's names are")
            other = seen.setdefault(name.casefold(), name)
            if not name or other != name:
                raise _make_invalid_error(
                    here, f"a name like `{other}`" if name else "no name", "names that differ by more than case"
                )
            data_type, nullable = self.read(of_field, here, within)
            comment = of_field.get("description", "") if isinstance(of_field, Mapping) else ""
            fields.append(Column(name, data_type, nullable or name not in required, str(comment)))
        return Struct(tuple(fields))


def _find_target(document: Mapping[str, Any], target: str) -> object:
    """Return the schema to which a reference within a document points.

    :raises LookupError: it does not exist.
    """
    found: Any = document
    for step in target.split("/")[1:]:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Sequence) and not isinstance(found, str) and step.isdecimal() and step.isascii() and len(step) < 10:
            found = found[int(step)]
        elif isinstance(found, Mapping):
            found = found[step]
        else:
            raise LookupError(target)
    return found


def _check_keywords(schema: Mapping[str, Any], path: str) -> None:
    for keyword in schema:
        if keyword in _REFUSED:
            raise _make_invalid_error(path, f"`{keyword}`", "a schema whose types do not depend on the record")
        # Schemas may have keywords of their own, so that only a likely typing error is refused.
        meant = "" if keyword in _KNOWN else find_similar_name(str(keyword), _KNOWN, likeness=0.85)
        if meant:
            raise _make_invalid_error(path, f"`{keyword}`", f"`{meant}`, perhaps")


def _find_type(schema: Mapping[str, Any], path: str) -> tuple[str, bool]:
    """Return the one type of a schema besides null, and True if null is allowed, too."""
    given = schema.get("type")
    kinds = [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence) else []
    members = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else None
    if not kinds and members is not None:
        names: Mapping[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
        kinds = sorted({names.get(type(m), "object") for m in members})
    if not kinds and "properties" in schema:
        kinds = ["object"]
    if not kinds and "items" in schema:
        kinds = ["array"]
    if not all(isinstance(k, str) for k in kinds):
        raise _make_invalid_error(path, f"the type {given!r}", "names of types")
    rest = [k for k in kinds if k != "null"]
    if sorted(rest) == ["integer", "number"]:
        rest = ["number"]
    if len(rest) != 1:
        found = "a choice between several types" if rest else "null alone" if kinds else "a schema that allows anything"
        raise _make_invalid_error(path, found, "one type, and perhaps null")
    if rest[0] not in ("string", "object", "array", *_PLAIN):
        raise _make_invalid_error(path, f"the type {rest[0]!r}", "string, integer, number, boolean, object, array or null")
    nullable = "null" in kinds and (members is None or None in members)
    return rest[0], nullable


# --- schemas of a registry ------------------------------------------------------------------------------------------------


LOCAL = "local-date-time"
_CONNECT, _DEBEZIUM = "org.apache.kafka.connect.data.", "io.debezium.time."
_LOGICAL_TYPES: Mapping[str, LogicalType] = {
    f"{_CONNECT}Date": find_logical_type(Primitive("date"), "days"),
    f"{_CONNECT}Timestamp": find_logical_type(Primitive("timestamp"), "millis"),
    f"{_DEBEZIUM}Date": find_logical_type(Primitive("date"), "days"),
    f"{_DEBEZIUM}Timestamp": find_logical_type(Primitive("timestamp_ntz"), "millis"),
    f"{_DEBEZIUM}MicroTimestamp": find_logical_type(Primitive("timestamp_ntz"), "micros"),
    f"{_DEBEZIUM}NanoTimestamp": find_logical_type(Primitive("timestamp_ntz"), "nanos"),
}
"""The meaning of integers, by title."""
_NUMBERS = {"int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint", "float32": "float", "float64": "double"}
_CONNECT_TYPES = {name: connect for connect, name in _NUMBERS.items()}
_MAX_PRECISION, _LARGEST_SCALE = 38, 1000
_UNREADABLE = Primitive("void")


@dataclass(frozen=True)
class Property(Column):
    """A property of an object.

    :param null: True if null is one of its values.
    :param absent: True if it may be missing.
    """

    null: bool = True
    absent: bool = True


# --- bundling ------------------------------------------------------------------------------------------------------------


def bundle_references(document: SchemaDocument) -> dict[str, Any]:
    """Return a self-contained schema, with the schemas that it refers to among its ``definitions``.

    :raises SchemaUnusable: it is no JSON Schema.
    """
    root = _parse_schema(document.text, document.name)
    if not document.references:
        return root
    places = dict[str, str]()
    for name, _ in document.references:
        place = name
        # A definition of the schema may have the name of a reference.
        while place in (root.get("definitions") or ()):
            place += "'"
        places[name] = place
    own = _relocate_references(root, str(root.get("$id", "")), "#", places)
    definitions = dict(own.get("definitions") or {})
    for name, text in document.references:
        part = _parse_schema(text, f"{document.name}, of `{name}`")
        moved = _relocate_references(part, str(part.get("$id", name)), _make_pointer(places[name]), places)
        definitions[places[name]] = {key: value for key, value in moved.items() if key not in ("$id", "$schema")}
    return {**own, "definitions": definitions}


def _parse_schema(text: str, name: str) -> dict[str, Any]:
    try:
        return dict(parse_json_schema(text))
    except SchemaInvalid as e:
        raise SchemaUnusable(name, f"{e.found}; expected {e.expected}") from None


def _make_pointer(name: str) -> str:
    return "#/definitions/" + quote(name.replace("~", "~0").replace("/", "~1"), safe="~")


def _relocate_references(value: object, base: str, place: str, places: Mapping[str, str]) -> Any:
    """Return a schema whose references point to the new places of their targets.

    :param places: the names among the ``definitions``, by the names of references.
    """
    if isinstance(value, list):
        return [_relocate_references(one, base, place, places) for one in value]
    if not isinstance(value, dict):
        return value
    found = {key: _relocate_references(one, base, place, places) for key, one in value.items()}
    target = value.get("$ref")
    if isinstance(target, str):
        document, mark, fragment = target.partition("#")
        if not document:
            found["$ref"] = place + fragment if place != "#" else target
        else:
            known = next((name for name in places if name in (document, urljoin(base, document))), None)
            if known is not None:
                found["$ref"] = _make_pointer(places[known]) + (fragment if mark else "")
    return found


# --- columns -------------------------------------------------------------------------------------------------------------


def list_fields(schema: Mapping[str, Any], what: str) -> tuple[Property, ...]:
    """Return the columns of the objects that a schema describes; their types may be :class:`.LogicalType`.

    :param what: the schema's description in messages.
    :raises SchemaUnusable: with the place in the schema, what was found there and what was expected.
    """
    try:
        found, _ = _ConnectSchemaReader(schema).read(schema, "#", ())
    except SchemaInvalid as e:
        raise SchemaUnusable(what, f"found {e.found.removeprefix('The schema has ')}; expected {e.expected}") from None
    if not isinstance(found, Struct):
        raise SchemaUnusable(what, f"found a schema of {found}; expected an object with `properties`")
    return tuple(field for field in found.fields if isinstance(field, Property))


class _ConnectSchemaReader(_SchemaReader):
    """Reads also Connect's keywords, and for each property whether it may be null or missing."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        super().__init__(document)
        self._nulls: dict[str, bool] = {}

    def read(self, schema: object, path: str, within: tuple[str, ...]) -> tuple[DataType, bool]:
        # `nullable` is a keyword of OpenAPI. Validators of JSON Schema do not know it, and refuse null.
        lax = isinstance(schema, Mapping) and schema.get("nullable") is True
        stated = {key: value for key, value in schema.items() if key != "nullable"} if isinstance(schema, Mapping) else schema
        found, may_be_null = super().read(stated, path, within)
        self._nulls[path] = self._is_null_valid(stated, path, may_be_null)
        return found, lax or may_be_null

    def _is_null_valid(self, schema: object, path: str, may_be_null: bool) -> bool:
        """Return True if validators accept null: not because of a `nullable` behind a reference or in a choice, and not if two
        schemas of `oneOf` do.

        :param may_be_null: True if the column may be null.
        """
        if not isinstance(schema, Mapping):
            return may_be_null
        if "$ref" in schema:
            return self._nulls[schema["$ref"]]
        if "allOf" in schema:
            return self._nulls[f"{path}/allOf/0"]
        choice = schema.get("anyOf", schema.get("oneOf"))
        if choice is None:
            return may_be_null
        # Schemas of null alone are not read.
        accepting = sum(self._nulls.get(f"{path}/anyOf/{n}", True) for n in range(len(choice)))
        return accepting == 1 if "anyOf" not in schema else accepting > 0

    def _read_object(self, schema: Mapping[str, Any], path: str, within: tuple[str, ...]) -> DataType:
        found = super()._read_object(schema, path, within)
        if not isinstance(found, Struct):
            return found
        required = set(schema.get("required") or ())
        fields = []
        for f in found.fields:
            absent = f.name not in required
            null = self._nulls[f"{path}/properties/{f.name}"] or (f.nullable and not absent)
            fields.append(Property(f.name, f.type, f.nullable, f.comment, null, absent))
        return Struct(tuple(fields))

    def _read_typed(self, kind: str, schema: Mapping[str, Any], path: str, within: tuple[str, ...]) -> DataType:
        said, title = schema.get("connect.type"), str(schema.get("title", ""))
        if kind == "integer" and title in _LOGICAL_TYPES and said in ("int32", "int64"):
            return _LOGICAL_TYPES[title]
        if kind in ("number", "string") and said == "bytes" and title == f"{_CONNECT}Decimal":
            scale = _read_scale(schema)
            if kind == "string" and scale is None:
                raise _make_invalid_error(
                    path, "a Decimal in base64 without its scale", "`connect.parameters` with a `scale` from -999 to 999"
                )
            decimal = _make_decimal(schema, scale or 0)
            return decimal if kind == "number" else find_logical_type(decimal, "unscaled", scale or 0)
        if kind == "string" and said == "bytes":
            return Primitive("binary")
        if kind in ("integer", "number") and str(said) in _NUMBERS:
            return Primitive(_NUMBERS[str(said)])
        if kind == "string" and schema.get("format") == LOCAL:
            return Primitive("timestamp_ntz")
        return super()._read_typed(kind, schema, path, within)


class _LenientReader(_ConnectSchemaReader):
    """Skips types that cannot be columns."""

    def read(self, schema: object, path: str, within: tuple[str, ...]) -> tuple[DataType, bool]:
        try:
            return super().read(schema, path, within)
        except SchemaInvalid:
            pass
        self._nulls[path] = True
        try:
            return self._read_object(schema if isinstance(schema, Mapping) else {}, path, within), True
        except SchemaInvalid:
            return _UNREADABLE, True


def list_readable_fields(schema: Mapping[str, Any]) -> tuple[Column, ...]:
    """Return the columns of a schema in which some types cannot be columns. The types of these columns are unknown."""
    found, _ = _LenientReader(schema).read(schema, "#", ())
    return found.fields if isinstance(found, Struct) else ()


def _read_scale(schema: Mapping[str, Any]) -> int | None:
    """Return the scale of a Decimal in bytes; None if the schema does not state it."""
    params = schema.get("connect.parameters")
    try:
        scale = int(params["scale"]) if isinstance(params, Mapping) else None
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return scale if scale is not None and -_LARGEST_SCALE < scale < _LARGEST_SCALE else None


def _make_decimal(schema: Mapping[str, Any], scale: int) -> Decimal:
    params = schema.get("connect.parameters")
    try:
        precision = int(params["connect.decimal.precision"]) if isinstance(params, Mapping) else _MAX_PRECISION
    except (KeyError, TypeError, ValueError, OverflowError):
        precision = _MAX_PRECISION
    precision = min(max(precision, 1), _MAX_PRECISION)
    return Decimal(precision, min(max(scale, 0), precision))


# --- derived from columns ------------------------------------------------------------------------------------------------


def make_json_schema(columns: Sequence[Column], title: str) -> str:
    """Return a JSON Schema (draft-07) of objects with these columns, and with no others, so that later versions may add some.

    Nullable columns may be null and may be missing. Types that JSON cannot distinguish are described by Connect's keywords.

    :raises SchemaUnusable: a column has no counterpart.
    """
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": title}
    return json.dumps({**head, **_build_object(columns, "")}, ensure_ascii=False, separators=(",", ":"))


def _build_object(columns: Sequence[Column], path: str) -> dict[str, Any]:
    properties = {}
    for column in columns:
        schema = _build_schema(column.type, f"{path}.{column.name}".lstrip("."))
        properties[column.name] = _allow_null(schema, column.nullable)
    required = [c.name for c in columns if not c.nullable]
    said = {"required": required} if required else {}
    return {"type": "object", "properties": properties, **said, "additionalProperties": False}


def _allow_null(schema: dict[str, Any], nullable: bool) -> dict[str, Any]:
    return {"oneOf": [{"type": "null"}, schema]} if nullable else schema


def _build_schema(data_type: DataType, path: str) -> dict[str, Any]:
    if isinstance(data_type, Struct):
        return _build_object(data_type.fields, path)
    if isinstance(data_type, Array):
        return {"type": "array", "items": _allow_null(_build_schema(data_type.element, f"{path}[]"), data_type.contains_null)}
    if isinstance(data_type, Map):
        if data_type.key != Text():
            detail = f"column `{path}` has keys of type {data_type.key}; expected string, as JSON's names are"
            raise SchemaUnusable("the option `schema`", detail, "Declare map<string,...>")
        value = _allow_null(_build_schema(data_type.value, f"{path}[]"), data_type.value_contains_null)
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
