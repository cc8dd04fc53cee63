"""Avro schemas: parsed from JSON, read as columns, and derived from columns or from schemas of Connect.

Compatibility, too: which types can be read as which, by Avro's schema resolution, and which columns can be written as which
types.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from airflow_kafka_spark.errors import AvroSchemaInvalid
from airflow_kafka_spark.formats import types
from airflow_kafka_spark.formats.types import Array, Column, DataType, Decimal, Map, Primitive, Struct, Text


@dataclass(frozen=True)
class AvroLogicalType:
    """A logical type; only decimals have precision and scale."""

    name: str
    precision: int = 0
    scale: int = 0

    @property
    def measures(self) -> str:
        """``date``, ``time`` or ``timestamp``; empty for other types."""
        return "date" if self.name == "date" else self.name.removeprefix("local-").partition("-")[0] if self.rate else ""

    @property
    def per_day(self) -> int:
        """The units in a day of a time of day; 0 for other types."""
        return {"time-millis": 86_400_000, "time-micros": 86_400_000_000}.get(self.name, 0)

    @property
    def per_second(self) -> int:
        """The units in a second of a timestamp; 0 for other types."""
        return self.rate if self.name.startswith(("timestamp-", "local-timestamp-")) else 0

    @property
    def rate(self) -> int:
        """The units in a second of a timestamp or a time of day; 0 for other types."""
        return _PER_SECOND.get(self.name.rpartition("-")[2], 0)


@dataclass(frozen=True)
class AvroPrimitive:
    """null, boolean, int, long, float, double, bytes or string.

    :param logical: the logical type that gives the column another type.
    :param counts: the logical type of a number that stays a number as a column; two versions may count in different units.
    """

    kind: str
    logical: AvroLogicalType | None = None
    counts: AvroLogicalType | None = None

    def __str__(self) -> str:
        return _describe_type(self.kind, self.meaning)

    @property
    def meaning(self) -> AvroLogicalType | None:
        """The logical type, whether or not it changes the column's type."""
        return self.logical or self.counts


@dataclass(frozen=True)
class AvroFixed:
    name: str
    size: int
    aliases: tuple[str, ...] = ()
    logical: AvroLogicalType | None = None
    kind: str = "fixed"

    def __str__(self) -> str:
        return _describe_type(f"fixed({self.size})", self.logical)


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
        """Return the branches other than null."""
        return tuple(b for b in self.branches if b.kind != "null")

    @property
    def optional(self) -> bool:
        """True for a union of null and one other type, Avro's notation of a nullable field."""
        return len(self.branches) == 2 and len(self.present) == 1


@dataclass(frozen=True)
class AvroField:
    name: str
    type: AvroSchema
    aliases: tuple[str, ...] = ()
    default: tuple[Any, ...] = ()
    """The default in JSON as a tuple of one; empty without a default."""


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
"""Logical types by the names of Debezium's schemas, which Connect's converter keeps as ``connect.name``."""
_COUNTS_OF = {
    **{name: ("long", name) for name in ("timestamp-nanos", "local-timestamp-nanos")},
    f"{_DEBEZIUM}NanoTimestamp": ("long", "local-timestamp-nanos"),
    f"{_DEBEZIUM}Time": ("int", "time-millis"),
    f"{_DEBEZIUM}MicroTime": ("long", "time-micros"),
    f"{_DEBEZIUM}NanoTime": ("long", "time-nanos"),
}
"""Underlying type and unit of its numbers, by logical type or ``connect.name``."""
_PER_SECOND = {"millis": 1000, "micros": 1_000_000, "nanos": 1_000_000_000}
_MAX_NESTING = 60


def _describe_type(kind: str, logical: AvroLogicalType | None) -> str:
    if logical is None:
        return kind
    return f"decimal({logical.precision},{logical.scale})" if logical.name == "decimal" else logical.name


# --- from JSON -----------------------------------------------------------------------------------------------------------


def parse(text: str, what: str = "the option `schema`", references: Sequence[str] = ()) -> AvroSchema:
    """Return a schema.

    :param text: its JSON; the name of a primitive type may have no quotes.
    :param what: the schema's description in messages.
    :param references: texts of schemas whose names it uses, each after those that it uses itself.
    :raises AvroSchemaInvalid: it is no JSON or no Avro schema, or a record contains itself.
    """
    parser = _AvroParser(what)
    for reference in references:
        parser.parse_schema(parser.parse_json(reference), "", 0)
    return parser.parse_schema(parser.parse_json(text), "", 0)


class _AvroParser:
    def __init__(self, what: str) -> None:
        self.what = what
        self.named: dict[str, AvroSchema | None] = {}

    def fail(self, detail: str, action: str = "") -> AvroSchemaInvalid:
        return AvroSchemaInvalid(self.what, detail, action)

    def parse_json(self, text: object) -> Any:
        if not isinstance(text, str):
            raise self.fail(f"found a {type(text).__name__}; expected its JSON text")
        if text.strip() in _LEAVES:
            return text.strip()
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as e:
            action = "Give the text of the file, not its name" if text.strip().endswith((".avsc", ".json")) else ""
            raise self.fail(f"it is no JSON: {e}", action) from None

    def parse_schema(self, value: object, namespace: str, depth: int) -> AvroSchema:
        if depth > _MAX_NESTING:
            raise self.fail(f"types are nested more than {_MAX_NESTING} deep")
        if isinstance(value, str):
            return AvroPrimitive(value) if value in _LEAVES else self._find_named(value, namespace)
        if isinstance(value, list):
            return self._parse_union(value, namespace, depth)
        if not isinstance(value, dict) or "type" not in value:
            raise self.fail(f"found {json.dumps(value)[:80]}; expected a type")
        kind = value["type"]
        if kind in ("record", "error", "enum", "fixed"):
            return self._parse_named(value, namespace, depth)
        if kind == "array":
            return AvroArray(self.parse_schema(value.get("items"), namespace, depth + 1))
        if kind == "map":
            return AvroMap(self.parse_schema(value.get("values"), namespace, depth + 1))
        if kind in _LEAVES:
            logical = self._parse_logical_type(value, kind)
            on, counts = _COUNTS_OF.get(str(value.get("logicalType", value.get("connect.name"))), ("", ""))
            return AvroPrimitive(kind, logical, AvroLogicalType(counts) if on == kind and logical is None else None)
        return self.parse_schema(kind, namespace, depth + 1)

    def _find_named(self, name: str, namespace: str) -> AvroSchema:
        for full in (name,) if "." in name or not namespace else (f"{namespace}.{name}", name):
            if full in self.named:
                found = self.named[full]
                if found is None:
                    raise self.fail(
                        f"record `{full}` holds itself, and columns cannot", "Read the records with Raw, or with another schema"
                    )
                return found
        raise self.fail(f"the type `{name}` is not defined in it")

    def _parse_union(self, value: list[Any], namespace: str, depth: int) -> AvroSchema:
        branches = tuple(self.parse_schema(v, namespace, depth + 1) for v in value)
        names = [getattr(b, "name", b.kind) for b in branches]
        if not branches or any(isinstance(b, AvroUnion) for b in branches) or len(set(names)) != len(names):
            raise self.fail(f"the union {json.dumps(value)[:80]} is empty, holds a union, or holds a type twice")
        return AvroUnion(branches)

    def _parse_named(self, value: Mapping[str, Any], outer: str, depth: int) -> AvroSchema:
        name = value.get("name")
        if not isinstance(name, str) or not name:
            raise self.fail(f"a {value['type']} has no name")
        namespace = name.rpartition(".")[0] if "." in name else value.get("namespace", outer) or ""
        full = name if "." in name or not namespace else f"{namespace}.{name}"
        if full in self.named:
            raise self.fail(f"`{full}` is defined twice")
        aliases = tuple(a if "." in a or not namespace else f"{namespace}.{a}" for a in self._parse_aliases(value, full))
        if value["type"] == "fixed":
            size = value.get("size")
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise self.fail(f"fixed `{full}` has the size {size!r}; expected a number of bytes")
            schema: AvroSchema = AvroFixed(full, size, aliases, self._parse_logical_type(value, "fixed", size))
        elif value["type"] == "enum":
            schema = self._parse_enum(full, aliases, value)
        else:
            self.named[full] = None
            schema = self._parse_record(full, aliases, value, namespace, depth)
        self.named[full] = schema
        return schema

    def _parse_enum(self, full: str, aliases: tuple[str, ...], value: Mapping[str, Any]) -> AvroEnum:
        symbols, default = value.get("symbols"), value.get("default")
        if not isinstance(symbols, list) or not all(isinstance(s, str) for s in symbols) or len(set(symbols)) != len(symbols):
            raise self.fail(f"enum `{full}` has no symbols, or one twice")
        if default is not None and default not in symbols:
            raise self.fail(f"the default of enum `{full}` is not one of its symbols")
        return AvroEnum(full, tuple(symbols), aliases, default)

    def _parse_record(
        self, full: str, aliases: tuple[str, ...], value: Mapping[str, Any], namespace: str, depth: int
    ) -> AvroRecord:
        fields: list[AvroField] = []
        for f in value.get("fields") or ():
            if not isinstance(f, dict) or not isinstance(f.get("name"), str) or "type" not in f:
                raise self.fail(f"a field of `{full}` has no name or no type")
            default = (f["default"],) if "default" in f else ()
            aliases_of_field = self._parse_aliases(f, f"{full}.{f['name']}")
            fields.append(AvroField(f["name"], self.parse_schema(f["type"], namespace, depth + 1), aliases_of_field, default))
        if len({f.name for f in fields}) != len(fields):
            raise self.fail(f"record `{full}` has a field twice")
        return AvroRecord(full, tuple(fields), aliases)

    def _parse_aliases(self, value: Mapping[str, Any], of: str) -> tuple[str, ...]:
        found = value.get("aliases") or []
        if not isinstance(found, list) or not all(isinstance(a, str) for a in found):
            raise self.fail(f"the aliases of `{of}` are {json.dumps(found)[:80]}; expected a list of names")
        return tuple(found)

    def _parse_logical_type(self, value: Mapping[str, Any], kind: str, size: int = 0) -> AvroLogicalType | None:
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
    """Return a schema whose fields are the columns: the record itself, or a record with one field, which has the same bytes."""
    return schema if isinstance(schema, AvroRecord) else AvroRecord(WRAPPER_RECORD, (AvroField(column, schema),))


def list_columns(schema: AvroRecord, what: str = "the option `schema`") -> tuple[types.Column, ...]:
    """Return the columns of a record.

    :raises AvroSchemaInvalid: a type in it has no column type.
    """
    return _list_fields(schema, what, "")


def _list_fields(schema: AvroRecord, what: str, path: str) -> tuple[types.Column, ...]:
    columns: list[types.Column] = []
    seen: dict[str, str] = {}
    for f in schema.fields:
        here = f"{path}.{f.name}" if path else f.name
        other = seen.setdefault(f.name.casefold(), f.name)
        if other != f.name:
            raise AvroSchemaInvalid(
                what, f"fields `{other}` and `{here}` differ only by case, and Spark treats such names as one"
            )
        columns.append(types.Column(f.name, *_find_column_type(f.type, what, here)))
    if not columns:
        raise AvroSchemaInvalid(what, f"{f'the record of `{path}`' if path else 'the record'} has no fields")
    return tuple(columns)


_PLAIN = {"boolean": "boolean", "int": "int", "long": "bigint", "float": "float", "double": "double", "bytes": "binary"}


def _find_column_type(schema: AvroSchema, what: str, path: str) -> tuple[types.DataType, bool]:
    """Return the column type of a schema, and True if it may be null."""
    if isinstance(schema, AvroUnion):
        return _find_union_type(schema, what, path)
    if isinstance(schema, AvroRecord):
        return types.Struct(_list_fields(schema, what, path)), False
    if isinstance(schema, AvroArray):
        return types.Array(*_find_column_type(schema.items, what, f"{path}[]")), False
    if isinstance(schema, AvroMap):
        return types.Map(types.Text(), *_find_column_type(schema.values, what, f"{path}[]")), False
    if isinstance(schema, AvroEnum) or (schema.logical and schema.logical.name == "uuid"):
        return types.Text(), False
    return _find_scalar_type(schema, what, path), False


def _find_scalar_type(schema: AvroPrimitive | AvroFixed, what: str, path: str) -> types.DataType:
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


def merge_number_types(schema: AvroUnion) -> str:
    """Return ``long`` for a union of plain int and long, ``double`` for one of float and double, since these are one column; else
    an empty string.
    """
    kinds = {b.kind for b in schema.present if getattr(b, "logical", None) is None}
    if len(schema.present) != 2 or len(kinds) != 2:
        return ""
    return "long" if kinds == {"int", "long"} else "double" if kinds == {"float", "double"} else ""


def _find_union_type(schema: AvroUnion, what: str, path: str) -> tuple[types.DataType, bool]:
    nullable = len(schema.present) < len(schema.branches)
    if not schema.present:
        raise AvroSchemaInvalid(what, f"`{path}` is always null, which has no column type")
    if len(schema.present) == 1:
        return _find_column_type(schema.present[0], what, path)[0], nullable
    if kind := merge_number_types(schema):
        return types.Primitive(_PLAIN[kind]), nullable
    members = [_find_column_type(b, what, f"{path}.member{i}")[0] for i, b in enumerate(schema.present)]
    return types.Struct(tuple(types.Column(f"member{i}", m) for i, m in enumerate(members))), nullable


# --- derived from columns -------------------------------------------------------------------------------------------------


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


def qualify_name(name: str, namespace: str) -> str:
    """Return a name with its namespace; a name with dots has one already."""
    return name if "." in name or not namespace else f"{namespace}.{name}"


def is_full_name(name: str) -> bool:
    """Return True if a name is valid in Avro: ASCII letters, digits and ``_``, in parts separated by dots."""
    return all(NAME.fullmatch(part) for part in name.split("."))


def make_namespace(topic: str) -> str:
    """Return the namespace for a topic; characters that Avro does not allow become ``_``."""
    parts = (re.sub("[^A-Za-z0-9_]", "_", part) for part in topic.split("."))
    return ".".join(part if part and not part[0].isdigit() else f"_{part}" for part in parts)


def derive_record(columns: Sequence[Column], name: str) -> str:
    """Return the JSON of a record with a field per column.

    A nullable column becomes a union with null whose default is null. Inner records are named after their fields, in the
    namespace of the record around them, so that all names are different.

    :param name: the record's full name.
    """
    return json.dumps(_build_record(columns, name))


def derive_type(column: Column, name: str) -> str:
    """Return the JSON of the bare type of one column, which never holds a null.

    :param name: the full name of a record in it.
    """
    namespace, _, last = name.rpartition(".")
    return json.dumps(_build_type(column.type, namespace, last))


def _build_record(columns: Sequence[Column], name: str) -> dict[str, Any]:
    fields = []
    for column in columns:
        made: dict[str, Any] = {
            "name": column.name,
            "type": _make_nullable(_build_type(column.type, name, column.name), column.nullable),
        }
        if column.nullable:
            made["default"] = None
        if column.comment:
            made["doc"] = column.comment
        fields.append(made)
    namespace, _, last = name.rpartition(".")
    return {"type": "record", "name": last, **({"namespace": namespace} if namespace else {}), "fields": fields}


def _build_type(data_type: DataType, namespace: str, name: str) -> Any:
    if isinstance(data_type, Struct):
        return _build_record(data_type.fields, qualify_name(name, namespace))
    if isinstance(data_type, Array):
        return {
            "type": "array",
            "items": _make_nullable(_build_type(data_type.element, namespace, name), data_type.contains_null),
        }
    if isinstance(data_type, Map):
        return {
            "type": "map",
            "values": _make_nullable(_build_type(data_type.value, namespace, name), data_type.value_contains_null),
        }
    if isinstance(data_type, Decimal):
        return {"type": "bytes", "logicalType": "decimal", "precision": data_type.precision, "scale": data_type.scale}
    return "string" if isinstance(data_type, Text) else _PRIMITIVE_SCHEMAS[data_type.name]


def _make_nullable(made: object, nullable: bool) -> Any:
    return ["null", made] if nullable else made


def find_derivation_problems(columns: Sequence[Column], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the reasons why no schema can be derived from columns: each problem, and the action."""
    for column in columns:
        here = f"{path}.{column.name}" if path else column.name
        if not NAME.fullmatch(column.name):
            found = f"`{here}` is no name in Avro, which has letters of ASCII, digits and `_`, and no digit first"
            yield found, "Rename the column"
        yield from _find_type_problems(column.type, here)


def _find_type_problems(data_type: DataType, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(data_type, Struct):
        yield from find_derivation_problems(data_type.fields, path)
    elif isinstance(data_type, Array):
        yield from _find_type_problems(data_type.element, f"{path}[]")
    elif isinstance(data_type, Map):
        if not isinstance(data_type.key, Text):
            yield f"`{path}` is a {data_type}, and Avro's maps have strings as keys", "Make it a map<string,...>"
        yield from _find_type_problems(data_type.value, f"{path}[]")


_PROMOTED = {
    "int": ("int", "long", "float", "double"),
    "long": ("long", "float", "double"),
    "float": ("float", "double"),
    "double": ("double",),
    "string": ("string", "bytes"),
    "bytes": ("bytes", "string"),
    "boolean": ("boolean",),
    "null": ("null",),
}


def is_readable_as(writer: AvroSchema, reader: AvroSchema) -> bool:
    """Return True if values of one type can be read as another, as far as the types themselves show. Names matter in unions
    only.
    """
    if isinstance(writer, AvroPrimitive):
        return (
            reader.kind in _PROMOTED[writer.kind]
            and _has_same_measure(writer, reader)
            and not _is_decimal_and_text(writer, reader)
        )
    if isinstance(writer, AvroFixed):
        return isinstance(reader, AvroFixed) and reader.size == writer.size
    return writer.kind == reader.kind


def _has_same_measure(writer: AvroPrimitive, reader: AvroSchema) -> bool:
    """Return False if, for instance, one type is a date and the other a timestamp: the same number means different things."""
    found = {b.meaning.measures for b in (writer, reader) if isinstance(b, AvroPrimitive) and b.meaning and b.meaning.measures}
    return len(found) < 2


def _is_decimal_and_text(writer: AvroPrimitive, reader: AvroSchema) -> bool:
    """Return True if one type is a decimal and the other a string: bytes can be read as text, but not the bytes of a number."""
    return any(a.kind == "string" and b.logical and b.logical.name == "decimal" for a, b in _list_both_directions(writer, reader))


def _list_both_directions(writer: AvroPrimitive, reader: AvroSchema) -> tuple[tuple[AvroPrimitive, AvroPrimitive], ...]:
    return ((writer, reader), (reader, writer)) if isinstance(reader, AvroPrimitive) else ()


def find_unit_ratio(writer: AvroSchema, reader: AvroSchema) -> tuple[int, int] | None:
    """Return factor and divisor between the units of two versions if one of them has no column type of its own; else None."""
    if not isinstance(writer, AvroPrimitive) or not isinstance(reader, AvroPrimitive) or not (writer.counts or reader.counts):
        return None
    was, now = (b.meaning.rate if b.meaning else 0 for b in (writer, reader))
    if not was or not now or was == now:
        return None
    return (now // was, 1) if now > was else (1, was // now)


def find_branch_to_read(writer: AvroSchema, reader: AvroUnion) -> int | None:
    """Return the branch of a reader's union for a writer's type: of the same type and name, else of the same type, else one to
    which it is promoted.
    """
    fits = [at for at, branch in enumerate(reader.branches) if is_readable_as(writer, branch)]
    same = [at for at in fits if reader.branches[at].kind == writer.kind]
    named = [at for at in same if _has_same_name(writer, reader.branches[at])]
    alike = [at for at in named if getattr(reader.branches[at], "logical", None) == getattr(writer, "logical", None)]
    return next(iter([*alike, *named, *same, *fits]), None)


def _has_same_name(writer: AvroSchema, reader: AvroSchema) -> bool:
    if not isinstance(writer, (AvroRecord, AvroEnum, AvroFixed)) or not isinstance(reader, (AvroRecord, AvroEnum, AvroFixed)):
        return True
    names = {reader.name, *reader.aliases}
    return writer.name in names or writer.name.rpartition(".")[2] in {n.rpartition(".")[2] for n in names}


def find_reader_field(written: AvroField, writer: AvroRecord, reader: AvroRecord) -> AvroField | None:
    """Return the reader's field for a writer's: of the same name, or with that name as an alias if the writer has no field for
    both.
    """
    by_name = next((f for f in reader.fields if f.name == written.name), None)
    if by_name is not None:
        return by_name
    own = {f.name for f in writer.fields}
    return next((f for f in reader.fields if f.name not in own and _find_first_alias(f, own) == written.name), None)


def _find_first_alias(field: AvroField, own: set[str]) -> str | None:
    return next((a for a in field.aliases if a in own), None)


def read_symbols(writer: AvroEnum, reader: AvroEnum) -> list[str | None]:
    """Return the reader's symbol for each symbol of the writer; None if the reader has none."""
    return [s if s in reader.symbols else reader.default for s in writer.symbols]


# --- which columns can be written as which types --------------------------------------------------------------------------


_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_TAKES = {
    "boolean": ("boolean",),
    "int": _INTEGERS,
    "long": _INTEGERS,
    "float": ("float",),
    "double": ("float", "double"),
    "bytes": ("binary",),
    "fixed": ("binary",),
}


def find_column_mismatches(schema: AvroSchema, column: DataType, path: str) -> Iterator[tuple[str, str]]:
    """Yield the reasons why a column cannot be written as a type: each problem, and the action.

    :param schema: the Avro type.
    :param column: the column's type.
    :param path: the column's path.
    """
    if isinstance(schema, AvroUnion):
        yield from _find_union_mismatches(schema, column, path)
    elif isinstance(schema, AvroRecord) and isinstance(column, Struct):
        yield from find_record_mismatches(schema, column.fields, path)
    elif isinstance(schema, AvroArray) and isinstance(column, Array):
        yield from find_column_mismatches(schema.items, column.element, f"{path}[]")
    elif isinstance(schema, AvroMap) and isinstance(column, Map) and isinstance(column.key, Text):
        yield from find_column_mismatches(schema.values, column.value, f"{path}[]")
    elif not _fits_scalar(schema, column):
        yield f"column `{path}` is {column}, and the schema has {schema}", "Cast the column, or correct the schema"


def find_record_mismatches(schema: AvroRecord, columns: Sequence[Column], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the reasons why columns cannot be written as the fields of a record, as :func:`find_column_mismatches` does."""
    fields = {f.name: f for f in schema.fields}
    for column in columns:
        here = f"{path}.{column.name}" if path else column.name
        if column.name not in fields:
            yield f"{schema} has no field for column `{here}`", "Leave the column out, or give the schema such a field"
        else:
            yield from find_column_mismatches(fields[column.name].type, column.type, here)
    there = {column.name for column in columns}
    for f in schema.fields:
        if f.name not in there and not f.default:
            here = f"{path}.{f.name}" if path else f.name
            yield f"there is no column for field `{here}`, which has no default", "Add the column, or give the field a default"


def _find_union_mismatches(schema: AvroUnion, column: DataType, path: str) -> Iterator[tuple[str, str]]:
    if len(schema.present) == 1:
        yield from find_column_mismatches(schema.present[0], column, path)
    elif not is_member_struct(schema, column) and find_branch_to_write(schema, column) is None:
        action = "Cast the column to one of them, or make it a struct<member0,...> as it is read"
        yield f"column `{path}` is {column}, and the schema has {schema}", action


def is_member_struct(schema: AvroUnion, column: DataType) -> bool:
    """Return True if a column has the form in which a union of several types is read: a struct with one field per type."""
    if not isinstance(column, Struct) or merge_number_types(schema):
        return False
    if [f.name for f in column.fields] != [f"member{n}" for n in range(len(schema.present))]:
        return False
    return all(not any(find_column_mismatches(b, f.type, f.name)) for b, f in zip(schema.present, column.fields, strict=True))


def find_branch_to_write(schema: AvroUnion, column: DataType) -> int | None:
    """Return the branch of a union as which a column is written: the widest number, else the first type that accepts it."""
    wide = merge_number_types(schema)
    fits = [at for at, b in enumerate(schema.branches) if b.kind != "null" and not any(find_column_mismatches(b, column, ""))]
    return next(iter([*(at for at in fits if schema.branches[at].kind == wide), *fits]), None)


def _fits_scalar(schema: AvroSchema, column: DataType) -> bool:
    if isinstance(schema, AvroEnum):
        return isinstance(column, Text)
    if not isinstance(schema, (AvroPrimitive, AvroFixed)) or schema.kind == "null":
        return False
    name = schema.logical.name if schema.logical else ""
    if name == "decimal":
        return isinstance(column, Decimal)
    if name == "uuid" or (schema.kind == "string" and not name):
        return isinstance(column, Text)
    if not isinstance(column, Primitive):
        return False
    if name == "date":
        return column.name == "date"
    if "timestamp" in name:
        return column.name == ("timestamp_ntz" if name.startswith("local-") else "timestamp")
    return column.name in _TAKES.get(schema.kind, ())


def find_differences(old: AvroSchema, new: AvroSchema, path: str = "") -> list[str]:
    """Return the differences of two versions of a schema that may make them incompatible."""
    if isinstance(old, AvroRecord) and isinstance(new, AvroRecord):
        return _find_record_differences(old, new, path)
    if isinstance(old, AvroArray) and isinstance(new, AvroArray):
        return find_differences(old.items, new.items, f"{path}[]")
    if isinstance(old, AvroMap) and isinstance(new, AvroMap):
        return find_differences(old.values, new.values, f"{path}[]")
    if isinstance(old, AvroUnion) and isinstance(new, AvroUnion) and old.optional and new.optional:
        return find_differences(old.present[0], new.present[0], path)
    return [] if old == new else [f"{f'`{path}`' if path else 'it'} was {old}, is {new}"]


def _find_record_differences(old: AvroRecord, new: AvroRecord, path: str) -> list[str]:
    before, after = ({f.name: f for f in r.fields} for r in (old, new))
    found = [] if old.name == new.name else [f"{f'`{path}`' if path else 'it'} was {old}, is {new}"]
    for name in dict.fromkeys([*before, *after]):
        here = f"{path}.{name}" if path else name
        if name in before and name in after:
            found += find_differences(before[name].type, after[name].type, here)
        else:
            which, word = (before, "gone") if name in before else (after, "new")
            found.append(f"`{here}` is {word}{'' if which[name].default else ', and has no default'}")
    return found


_CONNECT_TYPES = {
    **dict.fromkeys(("int8", "int16", "int32"), "int"),
    **{"int64": "long", "float": "float", "double": "double", "boolean": "boolean", "string": "string", "bytes": "bytes"},
}
_CONNECT = "org.apache.kafka.connect.data."
_CONNECT_LOGICAL_TYPES = {f"{_CONNECT}Date": "date", f"{_CONNECT}Time": "time-millis", f"{_CONNECT}Timestamp": "timestamp-millis"}
_DEFAULT_PRECISION = 64
"""The precision of a decimal whose schema has none, as in AvroConverter."""


def convert_connect_to_avro(schema: Mapping[str, Any]) -> str:
    """Return the JSON of the Avro schema of a Connect schema.

    Structs are records of the same name, with ``_`` for what Avro's names cannot have. An optional field is a union with null.
    The names of logical types are properties (``connect.name``); those of Connect itself are logical types of Avro, too.
    """
    return json.dumps(_AvroWriter().make_type(schema))


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

    def make_type(self, schema: Mapping[str, Any]) -> Any:
        """Return a type that holds no null."""
        kind, more = schema["type"], _list_properties(schema)
        if kind == "struct":
            return self._write_record(schema, more)
        if kind == "array":
            return {"type": "array", "items": self._write_optional(schema["items"]), **more}
        if kind == "map":
            return {"type": "map", "values": self._write_optional(schema["values"]), **more}
        if kind in ("int8", "int16"):
            more = {"connect.type": kind, **more}
        return {"type": _CONNECT_TYPES[kind], **more} if more else _CONNECT_TYPES[kind]

    def _write_record(self, schema: Mapping[str, Any], more: Mapping[str, Any]) -> Any:
        namespace, _, name = make_namespace(str(schema.get("name") or "ConnectDefault")).rpartition(".")
        full = qualify_name(name, namespace)
        if full in self._records:
            return full
        self._records.add(full)
        fields = [self._write_field(field) for field in schema["fields"]]
        return {"type": "record", "name": name, **({"namespace": namespace} if namespace else {}), "fields": fields, **more}

    def _write_field(self, field: Mapping[str, Any]) -> dict[str, Any]:
        made = {"name": field["field"], "type": self._write_optional(field)}
        if "default" in field:
            return {**made, "default": field["default"]}
        return {**made, "default": None} if field.get("optional") else made

    def _write_optional(self, schema: Mapping[str, Any]) -> Any:
        made = self.make_type(schema)
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
    elif name in _CONNECT_LOGICAL_TYPES:
        found = {"logicalType": _CONNECT_LOGICAL_TYPES[name]}
    if schema.get("version") is not None:
        found["connect.version"] = schema["version"]
    if parameters:
        found["connect.parameters"] = dict(parameters)
    if name:
        found["connect.name"] = name
    return found
