"""Avro schemas: read from their JSON text, and what they are as columns. Pure, cheap to import.

Names, aliases, defaults and logical types as in the specification of Avro 1.12; a logical type that does not fit the type it
stands on is passed over, as the specification wants. Records that hold themselves have no columns and are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from airflow_kafka_spark.errors import AvroSchemaInvalid
from airflow_kafka_spark.formats import types
from airflow_kafka_spark.formats.types import Array, Column, DataType, Decimal, Map, Struct, Text


@dataclass(frozen=True)
class AvroLogicalType:
    """A logical type; precision and scale are those of a decimal."""

    name: str
    precision: int = 0
    scale: int = 0

    @property
    def measures(self) -> str:
        """``date``, ``time`` or ``timestamp``; of anything else nothing."""
        return "date" if self.name == "date" else self.name.removeprefix("local-").partition("-")[0] if self.rate else ""

    @property
    def per_day(self) -> int:
        """Of a time of day: how many units a day has; of anything else 0."""
        return {"time-millis": 86_400_000, "time-micros": 86_400_000_000}.get(self.name, 0)

    @property
    def per_second(self) -> int:
        """Of a timestamp: how many units a second has; of anything else 0."""
        return self.rate if self.name.startswith(("timestamp-", "local-timestamp-")) else 0

    @property
    def rate(self) -> int:
        """Of a timestamp or a time of day: how many units a second has; of anything else 0."""
        return _PER_SECOND.get(self.name.rpartition("-")[2], 0)


@dataclass(frozen=True)
class AvroPrimitive:
    """null, boolean, int, long, float, double, bytes or string.

    :param logical: what makes it another type of column.
    :param counts: what a number counts that stays a number: two versions may count by different units.
    """

    kind: str
    logical: AvroLogicalType | None = None
    counts: AvroLogicalType | None = None

    def __str__(self) -> str:
        return _described(self.kind, self.meaning)

    @property
    def meaning(self) -> AvroLogicalType | None:
        """What is said of its values, whatever the column is."""
        return self.logical or self.counts


@dataclass(frozen=True)
class AvroFixed:
    name: str
    size: int
    aliases: tuple[str, ...] = ()
    logical: AvroLogicalType | None = None
    kind: str = "fixed"

    def __str__(self) -> str:
        return _described(f"fixed({self.size})", self.logical)


@dataclass(frozen=True)
class AvroEnum:
    name: str
    symbols: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    default: str | None = None
    kind: str = "enum"

    def __str__(self) -> str:
        return f"enum {self.name}"


@dataclass(frozen=True)
class AvroArray:
    items: AvroSchema
    kind: str = "array"

    def __str__(self) -> str:
        return f"array of {self.items}"


@dataclass(frozen=True)
class AvroMap:
    values: AvroSchema
    kind: str = "map"

    def __str__(self) -> str:
        return f"map of {self.values}"


@dataclass(frozen=True)
class AvroUnion:
    branches: tuple[AvroSchema, ...]
    kind: str = "union"

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.branches))}]"

    @property
    def present(self) -> tuple[AvroSchema, ...]:
        """All branches but null."""
        return tuple(b for b in self.branches if b.kind != "null")

    @property
    def optional(self) -> bool:
        """Whether it is a null and one other, the way Avro says that a field may be null."""
        return len(self.branches) == 2 and len(self.present) == 1


@dataclass(frozen=True)
class AvroField:
    name: str
    type: AvroSchema
    aliases: tuple[str, ...] = ()
    default: tuple[Any, ...] = ()
    """The default in JSON, alone in a tuple; empty when there is none."""


@dataclass(frozen=True)
class AvroRecord:
    name: str
    fields: tuple[AvroField, ...]
    aliases: tuple[str, ...] = ()
    kind: str = "record"

    def __str__(self) -> str:
        return f"record {self.name}"


AvroSchema: TypeAlias = AvroPrimitive | AvroFixed | AvroEnum | AvroArray | AvroMap | AvroUnion | AvroRecord

_LEAVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
_LOGICAL_OF = {
    **dict.fromkeys(("date", "time-millis"), ("int",)),
    **dict.fromkeys(("time-micros", "timestamp-millis", "timestamp-micros"), ("long",)),
    **dict.fromkeys(("local-timestamp-millis", "local-timestamp-micros"), ("long",)),
    "uuid": ("string", "fixed"),
    "decimal": ("bytes", "fixed"),
}
_DEBEZIUM = "io.debezium.time."
_CONNECT_NAMES = {
    f"{_DEBEZIUM}Date": "date",
    f"{_DEBEZIUM}Timestamp": "local-timestamp-millis",
    f"{_DEBEZIUM}MicroTimestamp": "local-timestamp-micros",
}
"""What Debezium says by the names of Connect's schemas, which Connect's converter keeps as ``connect.name``."""
_COUNTS_OF = {
    **{name: ("long", name) for name in ("timestamp-nanos", "local-timestamp-nanos")},
    f"{_DEBEZIUM}NanoTimestamp": ("long", "local-timestamp-nanos"),
    f"{_DEBEZIUM}Time": ("int", "time-millis"),
    f"{_DEBEZIUM}MicroTime": ("long", "time-micros"),
    f"{_DEBEZIUM}NanoTime": ("long", "time-nanos"),
}
"""By logical type or ``connect.name``: on which type it stands, and what its numbers count."""
_PER_SECOND = {"millis": 1000, "micros": 1_000_000, "nanos": 1_000_000_000}
_MAX_NESTING = 60


def _described(kind: str, logical: AvroLogicalType | None) -> str:
    if logical is None:
        return kind
    return f"decimal({logical.precision},{logical.scale})" if logical.name == "decimal" else logical.name


# --- from JSON -----------------------------------------------------------------------------------------------------------


def parse(text: str, what: str = "the option `schema`", references: Sequence[str] = ()) -> AvroSchema:
    """Read a schema.

    :param text: its JSON; the name of a primitive type may stand without quotes.
    :param what: which schema it is, for messages.
    :param references: texts of schemas whose names it uses, each after those that it uses itself.
    :raises AvroSchemaInvalid: it is no JSON or no Avro schema, or a record holds itself.
    """
    parser = _AvroParser(what)
    for reference in references:
        parser.schema(parser.json(reference), "", 0)
    return parser.schema(parser.json(text), "", 0)


class _AvroParser:
    def __init__(self, what: str) -> None:
        self.what = what
        self.named: dict[str, AvroSchema | None] = {}

    def fail(self, detail: str, action: str = "") -> AvroSchemaInvalid:
        return AvroSchemaInvalid(self.what, detail, action)

    def json(self, text: Any) -> Any:
        if not isinstance(text, str):
            raise self.fail(f"found a {type(text).__name__}; expected its JSON text")
        if text.strip() in _LEAVES:
            return text.strip()
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as e:
            raise self.fail(f"it is no JSON: {e}") from None

    def schema(self, value: Any, namespace: str, depth: int) -> AvroSchema:
        if depth > _MAX_NESTING:
            raise self.fail(f"types are nested more than {_MAX_NESTING} deep")
        if isinstance(value, str):
            return AvroPrimitive(value) if value in _LEAVES else self._of_name(value, namespace)
        if isinstance(value, list):
            return self._union(value, namespace, depth)
        if not isinstance(value, dict) or "type" not in value:
            raise self.fail(f"found {json.dumps(value)[:80]}; expected a type")
        kind = value["type"]
        if kind in ("record", "error", "enum", "fixed"):
            return self._named(value, namespace, depth)
        if kind == "array":
            return AvroArray(self.schema(value.get("items"), namespace, depth + 1))
        if kind == "map":
            return AvroMap(self.schema(value.get("values"), namespace, depth + 1))
        if kind in _LEAVES:
            logical = self._logical(value, kind)
            on, counts = _COUNTS_OF.get(str(value.get("logicalType", value.get("connect.name"))), ("", ""))
            return AvroPrimitive(kind, logical, AvroLogicalType(counts) if on == kind and logical is None else None)
        return self.schema(kind, namespace, depth + 1)

    def _of_name(self, name: str, namespace: str) -> AvroSchema:
        for full in (name,) if "." in name or not namespace else (f"{namespace}.{name}", name):
            if full in self.named:
                found = self.named[full]
                if found is None:
                    raise self.fail(
                        f"record `{full}` holds itself, and columns cannot", "Read the records with Raw, or with another schema"
                    )
                return found
        raise self.fail(f"the type `{name}` is not defined in it")

    def _union(self, value: list[Any], namespace: str, depth: int) -> AvroSchema:
        branches = tuple(self.schema(v, namespace, depth + 1) for v in value)
        names = [getattr(b, "name", b.kind) for b in branches]
        if not branches or any(isinstance(b, AvroUnion) for b in branches) or len(set(names)) != len(names):
            raise self.fail(f"the union {json.dumps(value)[:80]} is empty, holds a union, or holds a type twice")
        return AvroUnion(branches)

    def _named(self, value: Mapping[str, Any], outer: str, depth: int) -> AvroSchema:
        name = value.get("name")
        if not isinstance(name, str) or not name:
            raise self.fail(f"a {value['type']} has no name")
        namespace = name.rpartition(".")[0] if "." in name else value.get("namespace", outer) or ""
        full = name if "." in name or not namespace else f"{namespace}.{name}"
        if full in self.named:
            raise self.fail(f"`{full}` is defined twice")
        aliases = tuple(a if "." in a or not namespace else f"{namespace}.{a}" for a in self._aliases(value, full))
        if value["type"] == "fixed":
            size = value.get("size")
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise self.fail(f"fixed `{full}` has the size {size!r}; expected a number of bytes")
            schema: AvroSchema = AvroFixed(full, size, aliases, self._logical(value, "fixed", size))
        elif value["type"] == "enum":
            schema = self._enum(full, aliases, value)
        else:
            self.named[full] = None
            schema = self._record(full, aliases, value, namespace, depth)
        self.named[full] = schema
        return schema

    def _enum(self, full: str, aliases: tuple[str, ...], value: Mapping[str, Any]) -> AvroEnum:
        symbols, default = value.get("symbols"), value.get("default")
        if not isinstance(symbols, list) or not all(isinstance(s, str) for s in symbols) or len(set(symbols)) != len(symbols):
            raise self.fail(f"enum `{full}` has no symbols, or one twice")
        if default is not None and default not in symbols:
            raise self.fail(f"the default of enum `{full}` is not one of its symbols")
        return AvroEnum(full, tuple(symbols), aliases, default)

    def _record(self, full: str, aliases: tuple[str, ...], value: Mapping[str, Any], namespace: str, depth: int) -> AvroRecord:
        fields: list[AvroField] = []
        for f in value.get("fields") or ():
            if not isinstance(f, dict) or not isinstance(f.get("name"), str) or "type" not in f:
                raise self.fail(f"a field of `{full}` has no name or no type")
            default = (f["default"],) if "default" in f else ()
            aliases_of_field = self._aliases(f, f"{full}.{f['name']}")
            fields.append(AvroField(f["name"], self.schema(f["type"], namespace, depth + 1), aliases_of_field, default))
        if len({f.name for f in fields}) != len(fields):
            raise self.fail(f"record `{full}` has a field twice")
        return AvroRecord(full, tuple(fields), aliases)

    def _aliases(self, value: Mapping[str, Any], of: str) -> tuple[str, ...]:
        found = value.get("aliases") or []
        if not isinstance(found, list) or not all(isinstance(a, str) for a in found):
            raise self.fail(f"the aliases of `{of}` are {json.dumps(found)[:80]}; expected a list of names")
        return tuple(found)

    def _logical(self, value: Mapping[str, Any], kind: str, size: int = 0) -> AvroLogicalType | None:
        name = value.get("logicalType", _CONNECT_NAMES.get(str(value.get("connect.name"))))
        if not isinstance(name, str) or kind not in _LOGICAL_OF.get(name, ()):
            return None
        if name == "uuid" and kind == "fixed" and size != 16:
            return None
        if name != "decimal":
            return AvroLogicalType(name)
        precision, scale = value.get("precision"), value.get("scale", 0)
        if not isinstance(precision, int) or not isinstance(scale, int) or not 0 <= scale <= precision or precision < 1:
            return None
        if kind == "fixed" and 10**precision > 1 << (8 * size - 1):
            return None
        return AvroLogicalType(name, precision, scale)


# --- as columns ----------------------------------------------------------------------------------------------------------

WRAPPER_RECORD = "airflow_kafka_spark.Value"


def as_record(schema: AvroSchema, column: str) -> AvroRecord:
    """A schema whose fields are the columns: itself, or a record of one field, which has the same bytes."""
    return schema if isinstance(schema, AvroRecord) else AvroRecord(WRAPPER_RECORD, (AvroField(column, schema),))


def columns_of(schema: AvroRecord, what: str = "the option `schema`") -> tuple[types.Column, ...]:
    """The columns of a record.

    :raises AvroSchemaInvalid: something in it has no column type.
    """
    return _fields(schema, what, "")


def _fields(schema: AvroRecord, what: str, path: str) -> tuple[types.Column, ...]:
    columns: list[types.Column] = []
    seen: dict[str, str] = {}
    for f in schema.fields:
        here = f"{path}.{f.name}" if path else f.name
        other = seen.setdefault(f.name.casefold(), f.name)
        if other != f.name:
            raise AvroSchemaInvalid(
                what, f"fields `{other}` and `{here}` differ only by case, and names that do are one to Spark"
            )
        columns.append(types.Column(f.name, *_column_type(f.type, what, here)))
    if not columns:
        raise AvroSchemaInvalid(what, f"{f'the record of `{path}`' if path else 'the record'} has no fields")
    return tuple(columns)


_PLAIN = {"boolean": "boolean", "int": "int", "long": "bigint", "float": "float", "double": "double", "bytes": "binary"}


def _column_type(schema: AvroSchema, what: str, path: str) -> tuple[types.DataType, bool]:
    """The type, and whether there may be nulls."""
    if isinstance(schema, AvroUnion):
        return _union_type(schema, what, path)
    if isinstance(schema, AvroRecord):
        return types.Struct(_fields(schema, what, path)), False
    if isinstance(schema, AvroArray):
        return types.Array(*_column_type(schema.items, what, f"{path}[]")), False
    if isinstance(schema, AvroMap):
        return types.Map(types.Text(), *_column_type(schema.values, what, f"{path}[]")), False
    if isinstance(schema, AvroEnum) or (schema.logical and schema.logical.name == "uuid"):
        return types.Text(), False
    return _scalar_type(schema, what, path), False


def _scalar_type(schema: AvroPrimitive | AvroFixed, what: str, path: str) -> types.DataType:
    if schema.kind == "null" or (isinstance(schema, AvroFixed) and not schema.size):
        raise AvroSchemaInvalid(
            what, f"`{path}` is always {'null' if schema.kind == 'null' else 'empty'}, which has no column type"
        )
    if schema.logical is None:
        return types.Text() if schema.kind == "string" else types.Primitive(_PLAIN.get(schema.kind, "binary"))
    name = schema.logical.name
    if name == "decimal":
        if schema.logical.precision > 38:
            action = "To read it, give its JSON with at most 38 digits there as `reader_schema`"
            raise AvroSchemaInvalid(what, f"`{path}` is {schema}, and columns have at most 38 digits", action)
        return types.Decimal(schema.logical.precision, schema.logical.scale)
    if name.startswith("time-"):
        return types.Primitive(_PLAIN[schema.kind])
    return types.Primitive("date" if name == "date" else "timestamp_ntz" if name.startswith("local-") else "timestamp")


def merged_number_type(schema: AvroUnion) -> str:
    """``long`` or ``double`` where a union is of plain int and long, or float and double, which are one column; else nothing."""
    kinds = {b.kind for b in schema.present if getattr(b, "logical", None) is None}
    if len(schema.present) != 2 or len(kinds) != 2:
        return ""
    return "long" if kinds == {"int", "long"} else "double" if kinds == {"float", "double"} else ""


def _union_type(schema: AvroUnion, what: str, path: str) -> tuple[types.DataType, bool]:
    nullable = len(schema.present) < len(schema.branches)
    if not schema.present:
        raise AvroSchemaInvalid(what, f"`{path}` is always null, which has no column type")
    if len(schema.present) == 1:
        return _column_type(schema.present[0], what, path)[0], nullable
    if kind := merged_number_type(schema):
        return types.Primitive(_PLAIN[kind]), nullable
    members = [_column_type(b, what, f"{path}.member{i}")[0] for i, b in enumerate(schema.present)]
    return types.Struct(tuple(types.Column(f"member{i}", m) for i, m in enumerate(members))), nullable


# --- avro.derive --------------------
# An Avro schema made of columns. Pure.


NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_PRIMITIVE_SCHEMAS: dict[str, Any] = {
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


def record_from_columns(columns: Sequence[Column], name: str) -> str:
    """The JSON of a record with a field per column.

    A column that takes nulls becomes a union with null, whose default is null. Records in it are named after their fields, in the
    namespace of the record that holds them, so that no two names are the same.

    :param name: the record's full name.
    """
    return json.dumps(_record(columns, name))


def type_from_column(column: Column, name: str) -> str:
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
    return "string" if isinstance(data_type, Text) else _PRIMITIVE_SCHEMAS[data_type.name]


def _nullable(made: Any, nullable: bool) -> Any:
    return ["null", made] if nullable else made


def derivation_problems(columns: Sequence[Column], path: str = "") -> Iterator[tuple[str, str]]:
    """What keeps a schema from being made of columns: what was found, and what helps."""
    for column in columns:
        here = f"{path}.{column.name}" if path else column.name
        if not NAME.fullmatch(column.name):
            found = f"`{here}` is no name in Avro, which has letters of ASCII, digits and `_`, and no digit first"
            yield found, "Rename the column"
        yield from _type_problems(column.type, here)


def _type_problems(data_type: DataType, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(data_type, Struct):
        yield from derivation_problems(data_type.fields, path)
    elif isinstance(data_type, Array):
        yield from _type_problems(data_type.element, f"{path}[]")
    elif isinstance(data_type, Map):
        if not isinstance(data_type.key, Text):
            yield f"`{path}` is a {data_type}, and Avro's maps have strings as keys", "Make it a map<string,...>"
        yield from _type_problems(data_type.value, f"{path}[]")
