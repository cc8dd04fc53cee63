"""What columns a message has: its descriptor read once, as values that travel to tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from airflow_kafka_spark.errors import SchemaUnusable
from airflow_kafka_spark.formats.protobuf.schema import is_map, is_repeated, is_required, type_name
from airflow_kafka_spark.formats.types import Array, Column, DataType, Decimal, Map, Primitive, Struct, Text

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor

Conversion = Literal["plain", "unsigned", "enum", "message", "timestamp", "duration", "date", "decimal", "wrapper", "json"]
"""How a value of one field becomes a column's: as it is; a uint64; by its symbol; by its fields; seconds and nanoseconds; a
length of time; year, month and day; Confluent's Decimal; the one field of a wrapper; the JSON of a Struct or a Value."""

_MAX_NESTING = 50
_PLAIN: Mapping[str, DataType] = {
    **dict.fromkeys(("INT32", "SINT32", "SFIXED32"), Primitive("int")),
    **dict.fromkeys(("INT64", "SINT64", "SFIXED64", "UINT32", "FIXED32"), Primitive("bigint")),
    "FLOAT": Primitive("float"),
    "DOUBLE": Primitive("double"),
    "BOOL": Primitive("boolean"),
    "STRING": Text(),
    "BYTES": Primitive("binary"),
}
_BOUNDS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("INT32", "SINT32", "SFIXED32"), (-(1 << 31), (1 << 31) - 1)),
    **dict.fromkeys(("UINT32", "FIXED32"), (0, (1 << 32) - 1)),
}
_WRAPPERS = {
    f"google.protobuf.{name}Value"
    for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
}
_JSON = {f"google.protobuf.{name}" for name in ("Struct", "Value", "ListValue")}
_WELL_KNOWN: Mapping[str, tuple[Conversion, DataType]] = {
    "google.protobuf.Timestamp": ("timestamp", Primitive("timestamp")),
    "google.protobuf.Duration": ("duration", Primitive("bigint")),
    "google.type.Date": ("date", Primitive("date")),
}


@dataclass(frozen=True)
class FieldLayout:
    """A field of a message, or the key, the value or an element of one.

    :param name: the field's name.
    :param how: how one value becomes a column's.
    :param type: the type of one value.
    :param nullable: whether the field may be absent; else it has a default, or is required.
    :param many: a list, a map, or one.
    :param fields: of a message.
    :param inner: of a wrapper, its value; of a map, its keys and its values.
    :param symbols: of an enum, by number.
    :param numbers: of a message, those of its fields.
    :param bounds: of an integer, the least and the greatest.
    :param full_name: of a message, its own.
    :param choice: the name of the ``oneof`` that it is in with others.
    """

    name: str
    how: Conversion
    type: DataType
    nullable: bool = False
    many: Literal["", "list", "map"] = ""
    fields: tuple[FieldLayout, ...] = ()
    inner: tuple[FieldLayout, ...] = ()
    symbols: tuple[tuple[int, str], ...] = ()
    numbers: frozenset[int] = frozenset()
    bounds: tuple[int, int] | None = None
    full_name: str = ""
    choice: str = ""

    @property
    def column(self) -> Column:
        """The column of this field."""
        if self.many == "list":
            return Column(self.name, Array(self.type, contains_null=False), nullable=False)
        if self.many == "map":
            key, value = self.inner
            return Column(self.name, Map(key.type, value.type, value_contains_null=False), nullable=False)
        return Column(self.name, self.type, self.nullable)


@dataclass(frozen=True)
class MessageLayout:
    """Reads descriptors.

    :param what: the schema, as it stands in a sentence.
    :param recursive_fields_max_depth: how often a message may stand within itself, as Spark counts: 1 leaves such fields out, 2
        has them once; None refuses them.
    """

    what: str
    recursive_fields_max_depth: int | None = None

    def message(self, message: Descriptor) -> FieldLayout:
        """A whole message.

        :raises SchemaUnusable: it cannot be columns.
        """
        node = self._message(message, (), message.name)
        if node is None:
            raise self._wrong(f"message `{message.full_name}` has no fields", "Read such values with Raw")
        return node

    def _wrong(self, detail: str, action: str = "") -> SchemaUnusable:
        return SchemaUnusable(self.what, detail, action)

    def _message(self, message: Descriptor, within: tuple[str, ...], name: str) -> FieldLayout | None:
        """None where there is nothing in it that may be a column."""
        if len(within) >= _MAX_NESTING:
            raise self._wrong(f"messages are nested more than {_MAX_NESTING} deep")
        here = (*within, message.full_name)
        found, seen = [], dict[str, str]()
        for field in message.fields:
            node = self._field(field, here)
            if node is None:
                continue
            other = seen.setdefault(node.name.casefold(), node.name)
            if other != node.name:
                raise self._wrong(f"message `{message.full_name}` has `{other}` and `{node.name}`, which are one to Spark")
            found.append(node)
        if not found:
            return None
        struct = Struct(tuple(node.column for node in found))
        numbers = frozenset(field.number for field in message.fields)
        return FieldLayout(name, "message", struct, fields=tuple(found), numbers=numbers, full_name=message.full_name)

    def _field(self, field: FieldDescriptor, within: tuple[str, ...]) -> FieldLayout | None:
        if is_map(field):
            entry = field.message_type
            key, value = (self._value(entry.fields_by_name[part], within) for part in ("key", "value"))
            if key is None or value is None:
                return None
            return FieldLayout(field.name, "plain", value.type, many="map", inner=(key, value))
        node = self._value(field, within)
        if node is None or is_repeated(field):
            return node and replace(node, many="list", nullable=False)
        has_default = field.has_default_value and type_name(field) not in ("MESSAGE", "GROUP")
        oneof = field.containing_oneof
        choice = oneof.name if oneof is not None and len(oneof.fields) > 1 else ""
        nullable = bool(field.has_presence) and not is_required(field) and not has_default
        return replace(node, nullable=nullable, choice=choice)

    def _value(self, field: FieldDescriptor, within: tuple[str, ...]) -> FieldLayout | None:
        kind = type_name(field)
        if kind in _PLAIN:
            return FieldLayout(field.name, "plain", _PLAIN[kind], bounds=_BOUNDS.get(kind))
        if kind in ("UINT64", "FIXED64"):
            return FieldLayout(field.name, "unsigned", Decimal(20, 0))
        if kind == "ENUM":
            symbols = tuple((number, value.name) for number, value in field.enum_type.values_by_number.items())
            return FieldLayout(field.name, "enum", Text(), symbols=symbols)
        message = field.message_type
        name = message.full_name
        if name in _WELL_KNOWN:
            how, data_type = _WELL_KNOWN[name]
            return FieldLayout(field.name, how, data_type, full_name=name)
        if name in _WRAPPERS:
            inner = self._value(message.fields_by_name["value"], within)
            assert inner is not None
            return FieldLayout(field.name, "wrapper", inner.type, inner=(inner,), full_name=name)
        if name in _JSON:
            return FieldLayout(field.name, "json", Text(), full_name=name)
        if name == "confluent.type.Decimal" and (decimal := _decimal(field)) is not None:
            return FieldLayout(field.name, "decimal", decimal, full_name=name)
        if (times := within.count(name)) and self.recursive_fields_max_depth is None:
            raise self._wrong(
                f"message `{name}` holds itself, by `{field.full_name}`",
                "Say with `recursive_fields_max_depth` how deep to read: 1 leaves the field out, 2 has it once",
            )
        if times and times >= (self.recursive_fields_max_depth or 0):
            return None
        return self._message(message, within, field.name)


def _decimal(field: FieldDescriptor) -> Decimal | None:
    """Digits of a Decimal, where Connect's way of saying so is there: parameters of the field's ``confluent.field_meta``."""
    from google.protobuf.message_factory import GetMessageClass

    pool = field.file.pool
    try:
        extension = pool.FindExtensionByName("confluent.field_meta")
    except KeyError:
        return None
    options = GetMessageClass(extension.containing_type).FromString(field.GetOptions().SerializeToString())
    params = dict(options.Extensions[extension].params)
    try:
        precision, scale = int(params["precision"]), int(params["scale"])
    except (KeyError, ValueError):
        return None
    return Decimal(precision, scale) if 1 <= precision <= 38 and 0 <= scale <= precision else None
