"""What an Avro value means, read with the schema of its writer and shown with the one of its reader: the reference that the fast
path of :mod:`.avro.tasks.plan` has to agree with.

Plain Python, no Arrow. A pair of schemas is compiled into functions that read at a position and give the value, in the form that
``pyarrow.array(values, type)`` takes, and the next position. The rules are those of Avro's schema resolution, with one
difference in principle: a number or a text never becomes another value silently, see :class:`.Avro`.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

from airflow_kafka_spark.formats.avro.resolution import branch_for, field_for, goes_with, symbols_for
from airflow_kafka_spark.formats.avro.schema import (
    ArrayOf,
    Enum,
    Field,
    Fixed,
    Leaf,
    MapOf,
    Record,
    Schema,
    Union,
    merged,
)
from airflow_kafka_spark.formats.avro.tasks.values import Read, converting, promoting, read_long, read_string, scalar
from airflow_kafka_spark.formats.text import BadValue

_MANY = 1 << 20


class Reference:
    """Reads values of one writer.

    :param writer: the schema they were written with.
    :param reader: the schema of the columns.
    """

    def __init__(self, writer: Record, reader: Record) -> None:
        self._read = reading(writer, reader)
        self._names = [f.name for f in reader.fields]

    def read(self, value: bytes, start: int = 0) -> list[Any]:
        """One value per field of the reader.

        :param start: where in ``value`` it begins.
        :raises BadValue: it does not fit the writer's schema, or not the reader's.
        """
        try:
            row, end = self._read(value, start)
        except (IndexError, struct.error):
            raise BadValue(f"it ends too early, after {len(value)} bytes") from None
        if end != len(value):
            raise BadValue(f"{len(value) - end} of {len(value)} bytes are left after the last field")
        return [row[name] for name in self._names]


# --- a writer's type as a reader's ---------------------------------------------------------------------------------------


def reading(writer: Schema, reader: Schema) -> Read:
    """Reads values of the writer's type as the reader's; where the two do not go together, it says so of every value."""
    if isinstance(writer, Union):
        return _of_union([reading(branch, reader) for branch in writer.branches])
    if isinstance(reader, Union):
        at = branch_for(writer, reader)
        if at is None:
            return _never(writer, reader)
        return _member(reading(writer, reader.branches[at]), reader, at)
    if not goes_with(writer, reader):
        return _never(writer, reader)
    if isinstance(writer, Record):
        return _record(writer, reader)  # type: ignore[arg-type]
    if isinstance(writer, ArrayOf):
        return _array(writer, reader)  # type: ignore[arg-type]
    if isinstance(writer, MapOf):
        return _map(writer, reader)  # type: ignore[arg-type]
    if isinstance(writer, Enum):
        return _enum(writer, reader)  # type: ignore[arg-type]
    return scalar(writer, reader)  # type: ignore[arg-type]


def _never(writer: Schema, reader: Schema) -> Read:
    was, wanted = str(writer), str(reader)
    if was == wanted:
        was, wanted = f"{was} on {writer.kind}", f"{wanted} on {reader.kind}"

    def read(b: bytes, i: int) -> tuple[Any, int]:
        raise BadValue(f"it was written as {was}, expected {wanted}")

    return read


def _of_union(reads: list[Read]) -> Read:
    def read(b: bytes, i: int) -> tuple[Any, int]:
        at, i = read_long(b, i)
        if not 0 <= at < len(reads):
            raise BadValue(f"found branch {at} of a union that has {len(reads)}")
        return reads[at](b, i)

    return read


def _member(read_value: Read, union: Union, at: int) -> Read:
    """A value of one branch, as the reader's union shows it."""
    if union.branches[at].kind == "null" or len(union.present) == 1:
        return read_value
    if kind := merged(union):
        return promoting(read_value, union.branches[at].kind, kind)
    names = [f"member{n}" for n in range(len(union.present))]
    own = names[sum(b.kind != "null" for b in union.branches[:at])]
    blank = dict.fromkeys(names)

    def read(b: bytes, i: int) -> tuple[Any, int]:
        value, i = read_value(b, i)
        return {**blank, own: value}, i

    return read


def _record(writer: Record, reader: Record) -> Read:
    steps: list[tuple[str, Read, bool]] = []
    taken: set[str] = set()
    for written in writer.fields:
        field = field_for(written, writer, reader)
        if field is None:
            bare = without_logical(written.type)
            steps.append((written.name, reading(bare, bare), False))
        else:
            taken.add(field.name)
            steps.append((field.name, reading(written.type, field.type), True))
    missing = [f for f in reader.fields if f.name not in taken]
    defaults = {f.name: default_of(f) for f in missing if f.default}
    lacking = [f for f in missing if not f.default]

    def read(b: bytes, i: int) -> tuple[dict[str, Any], int]:
        for f in lacking:
            raise BadValue(f"the writer's schema has no such field, expected {f.type}").within(f".{f.name}")
        row = dict(defaults)
        for name, read_value, wanted in steps:
            try:
                value, i = read_value(b, i)
            except BadValue as e:
                raise e.within(f".{name}") from None
            except (IndexError, struct.error):
                raise BadValue(f"it ends too early, after {len(b)} bytes").within(f".{name}") from None
            if wanted:
                row[name] = value
        return row, i

    return read


def _blocks(b: bytes, i: int, smallest: int) -> tuple[int, int]:
    """The number of items of the next block, and where they begin."""
    count, i = read_long(b, i)
    if count < 0:
        count = -count
        _, i = read_long(b, i)
    if count > (len(b) - i if smallest else _MANY):
        raise BadValue(f"found a block of {count} items where {len(b) - i} bytes are left")
    return count, i


def _array(writer: ArrayOf, reader: ArrayOf) -> Read:
    read_item, smallest = reading(writer.items, reader.items), smallest_size(writer.items)

    def read(b: bytes, i: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        while True:
            count, i = _blocks(b, i, smallest)
            if not count:
                return items, i
            for _ in range(count):
                try:
                    item, i = read_item(b, i)
                except BadValue as e:
                    raise e.within(f"[{len(items)}]") from None
                items.append(item)
            if len(items) > _MANY and not smallest:
                raise BadValue(f"found an array of more than {_MANY} items without bytes")

    return read


def _map(writer: MapOf, reader: MapOf) -> Read:
    read_item = reading(writer.values, reader.values)

    def read(b: bytes, i: int) -> tuple[list[tuple[str, Any]], int]:
        entries: dict[str, Any] = {}
        while True:
            count, i = _blocks(b, i, 1)
            if not count:
                return list(entries.items()), i
            for _ in range(count):
                key, i = read_string(b, i)
                try:
                    entries[key], i = read_item(b, i)
                except BadValue as e:
                    raise e.within(f"[{key!r}]") from None

    return read


def without_logical(schema: Schema) -> Schema:
    """The bare type: what a field that nobody reads has to fit."""
    if isinstance(schema, Record):
        return replace(schema, fields=tuple(replace(f, type=without_logical(f.type)) for f in schema.fields))
    if isinstance(schema, ArrayOf):
        return ArrayOf(without_logical(schema.items))
    if isinstance(schema, MapOf):
        return MapOf(without_logical(schema.values))
    if isinstance(schema, Union):
        return Union(tuple(map(without_logical, schema.branches)))
    return replace(schema, logical=None) if isinstance(schema, (Leaf, Fixed)) else schema


def _enum(writer: Enum, reader: Enum) -> Read:
    seen = symbols_for(writer, reader)

    def read(b: bytes, i: int) -> tuple[str, int]:
        at, i = read_long(b, i)
        if not 0 <= at < len(seen):
            raise BadValue(f"found symbol {at} of {writer}, which has {len(seen)}")
        symbol = seen[at]
        if symbol is None:
            raise BadValue(f"found `{writer.symbols[at]}`, expected one of {', '.join(reader.symbols)}")
        return symbol, i

    return read


# --- defaults and sizes --------------------------------------------------------------------------------------------------


class BadDefault(Exception):
    """A default does not fit its field.

    :param name: the field.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def default_of(field: Field) -> Any:
    """The value of a field that the writer does not have.

    :raises BadDefault: the default is none of the field's type.
    """
    try:
        return _default(field.type, field.default[0])
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, BadValue):
        raise BadDefault(field.name) from None


def _default(schema: Schema, value: Any) -> Any:
    if isinstance(schema, Union):
        return _default_of_union(schema, value)
    if isinstance(schema, Record):
        return {f.name: _default(f.type, value[f.name]) if f.name in value else default_of(f) for f in schema.fields}
    if isinstance(schema, ArrayOf):
        if not isinstance(value, list):
            raise TypeError
        return [_default(schema.items, v) for v in value]
    if isinstance(schema, MapOf):
        return [(k.encode().decode(), _default(schema.values, v)) for k, v in value.items()]
    if isinstance(schema, Enum):
        if value not in schema.symbols:
            raise ValueError
        return value
    return _default_scalar(schema, value)


def _default_of_union(schema: Union, value: Any) -> Any:
    # The first branch by the specification up to 1.11, any since.
    for at, branch in enumerate(schema.branches):
        try:
            found = _default(branch, value)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, BadValue, BadDefault):
            continue
        return _member(_constant(found), schema, at)(b"", 0)[0]
    raise ValueError


def _constant(value: Any) -> Read:
    return lambda b, i: (value, i)


_BITS = {"int": 31, "long": 63}
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "int": (int,),
    "long": (int,),
    "float": (int, float, str),
    "double": (int, float, str),
    "bytes": (str,),
    "string": (str,),
    "fixed": (str,),
}


def _default_scalar(schema: Leaf | Fixed, json_value: Any) -> Any:
    if not isinstance(json_value, _JSON_TYPES[schema.kind]) or (isinstance(json_value, bool) and schema.kind != "boolean"):
        raise TypeError
    value: Any = json_value
    if schema.kind in _BITS and not -(1 << _BITS[schema.kind]) <= value < 1 << _BITS[schema.kind]:
        raise ValueError
    if schema.kind == "string":
        value.encode()
    if schema.kind in ("float", "double"):
        value = float(value)
        if schema.kind == "float":
            struct.pack("<f", value)
    if schema.kind in ("bytes", "fixed"):
        value = value.encode("latin-1")
        if isinstance(schema, Fixed) and len(value) != schema.size:
            raise ValueError
    change = converting(None, schema.logical, isinstance(schema, Fixed))
    return change(value) if change else value


def bad_defaults(schema: Schema, path: str = "") -> list[str]:
    """The fields, with their paths, whose defaults do not fit them."""
    if isinstance(schema, Union):
        return [bad for b in schema.branches for bad in bad_defaults(b, path)]
    if isinstance(schema, (ArrayOf, MapOf)):
        return bad_defaults(schema.items if isinstance(schema, ArrayOf) else schema.values, f"{path}[]")
    found: list[str] = []
    for f in schema.fields if isinstance(schema, Record) else ():
        here = f"{path}.{f.name}" if path else f.name
        try:
            if f.default:
                default_of(f)
        except BadDefault:
            found.append(here)
        found += bad_defaults(f.type, here)
    return found


def smallest_size(schema: Schema) -> int:
    """The fewest bytes a value can have."""
    if isinstance(schema, Record):
        return sum(smallest_size(f.type) for f in schema.fields)
    if isinstance(schema, Fixed):
        return schema.size
    return {"null": 0, "float": 4, "double": 8}.get(schema.kind, 1)
