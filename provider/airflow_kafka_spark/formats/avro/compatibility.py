"""Which type of a reader takes which of a writer, by the rules of Avro's schema resolution. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from airflow_kafka_spark.formats.avro.schema import (
    AvroArray,
    AvroEnum,
    AvroField,
    AvroFixed,
    AvroMap,
    AvroPrimitive,
    AvroRecord,
    AvroSchema,
    AvroUnion,
    merged_number_type,
)
from airflow_kafka_spark.formats.types import Array, Column, DataType, Decimal, Map, Primitive, Struct, Text

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
    """Whether values of one type can be read as another, as far as the types themselves tell. Names are looked at in unions."""
    if isinstance(writer, AvroPrimitive):
        return reader.kind in _PROMOTED[writer.kind] and _same_measure(writer, reader) and not _digits_as_text(writer, reader)
    if isinstance(writer, AvroFixed):
        return isinstance(reader, AvroFixed) and reader.size == writer.size
    return writer.kind == reader.kind


def _same_measure(writer: AvroPrimitive, reader: AvroSchema) -> bool:
    """Whether not one is a day, say, and the other an instant: both are numbers, but no number is the same as both."""
    found = {b.meaning.measures for b in (writer, reader) if isinstance(b, AvroPrimitive) and b.meaning and b.meaning.measures}
    return len(found) < 2


def _digits_as_text(writer: AvroPrimitive, reader: AvroSchema) -> bool:
    """Whether one is a decimal and the other a text: bytes become texts, but those of a number are none."""
    return any(a.kind == "string" and b.logical and b.logical.name == "decimal" for a, b in _both_ways(writer, reader))


def _both_ways(writer: AvroPrimitive, reader: AvroSchema) -> tuple[tuple[AvroPrimitive, AvroPrimitive], ...]:
    return ((writer, reader), (reader, writer)) if isinstance(reader, AvroPrimitive) else ()


def unit_ratio(writer: AvroSchema, reader: AvroSchema) -> tuple[int, int] | None:
    """By what a number is multiplied and divided that two versions count by different units, where one of these makes no column
    type of its own; None where there is no such difference."""
    if not isinstance(writer, AvroPrimitive) or not isinstance(reader, AvroPrimitive) or not (writer.counts or reader.counts):
        return None
    was, now = (b.meaning.rate if b.meaning else 0 for b in (writer, reader))
    if not was or not now or was == now:
        return None
    return (now // was, 1) if now > was else (1, was // now)


def branch_to_read(writer: AvroSchema, reader: AvroUnion) -> int | None:
    """Which branch of a reader's union takes a writer's type: one of the same type and name, then of the same type, then one that
    it is promoted to."""
    fits = [at for at, branch in enumerate(reader.branches) if is_readable_as(writer, branch)]
    same = [at for at in fits if reader.branches[at].kind == writer.kind]
    named = [at for at in same if _same_name(writer, reader.branches[at])]
    alike = [at for at in named if getattr(reader.branches[at], "logical", None) == getattr(writer, "logical", None)]
    return next(iter([*alike, *named, *same, *fits]), None)


def _same_name(writer: AvroSchema, reader: AvroSchema) -> bool:
    if not isinstance(writer, (AvroRecord, AvroEnum, AvroFixed)) or not isinstance(reader, (AvroRecord, AvroEnum, AvroFixed)):
        return True
    names = {reader.name, *reader.aliases}
    return writer.name in names or writer.name.rpartition(".")[2] in {n.rpartition(".")[2] for n in names}


def field_for(written: AvroField, writer: AvroRecord, reader: AvroRecord) -> AvroField | None:
    """The reader's field that takes a writer's: of the same name, or with that name as an alias while the writer has not both."""
    by_name = next((f for f in reader.fields if f.name == written.name), None)
    if by_name is not None:
        return by_name
    own = {f.name for f in writer.fields}
    return next((f for f in reader.fields if f.name not in own and _first_alias(f, own) == written.name), None)


def _first_alias(field: AvroField, own: set[str]) -> str | None:
    return next((a for a in field.aliases if a in own), None)


def read_symbols(writer: AvroEnum, reader: AvroEnum) -> list[str | None]:
    """What the reader sees of each symbol of the writer; None where it knows no such."""
    return [s if s in reader.symbols else reader.default for s in writer.symbols]


# --- avro.fit --------------------
# Which columns can be written as which Avro types, as far as the types tell. Pure.
#
# The reverse of what :mod:`.avro.schema` says of reading, and a little more: smaller integers go into larger ones, larger ones into
# smaller ones as long as each value fits, and a union takes a column of one of its types.
#


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


def column_mismatches(schema: AvroSchema, column: DataType, path: str) -> Iterator[tuple[str, str]]:
    """What a type cannot be written as: what was found, and what helps; nothing when it can.

    :param schema: the type in Avro.
    :param column: the column's.
    :param path: the column's name.
    """
    if isinstance(schema, AvroUnion):
        yield from _union_mismatches(schema, column, path)
    elif isinstance(schema, AvroRecord) and isinstance(column, Struct):
        yield from record_mismatches(schema, column.fields, path)
    elif isinstance(schema, AvroArray) and isinstance(column, Array):
        yield from column_mismatches(schema.items, column.element, f"{path}[]")
    elif isinstance(schema, AvroMap) and isinstance(column, Map) and isinstance(column.key, Text):
        yield from column_mismatches(schema.values, column.value, f"{path}[]")
    elif not _scalar_fits(schema, column):
        yield f"column `{path}` is {column}, and the schema has {schema}", "Cast the column, or correct the schema"


def record_mismatches(schema: AvroRecord, columns: Sequence[Column], path: str = "") -> Iterator[tuple[str, str]]:
    """The same for a record's fields and columns of their names."""
    fields = {f.name: f for f in schema.fields}
    for column in columns:
        here = f"{path}.{column.name}" if path else column.name
        if column.name not in fields:
            yield f"{schema} has no field for column `{here}`", "Leave the column out, or give the schema such a field"
        else:
            yield from column_mismatches(fields[column.name].type, column.type, here)
    there = {column.name for column in columns}
    for f in schema.fields:
        if f.name not in there and not f.default:
            here = f"{path}.{f.name}" if path else f.name
            yield f"there is no column for field `{here}`, which has no default", "Add the column, or give the field a default"


def _union_mismatches(schema: AvroUnion, column: DataType, path: str) -> Iterator[tuple[str, str]]:
    if len(schema.present) == 1:
        yield from column_mismatches(schema.present[0], column, path)
    elif not is_member_struct(schema, column) and branch_to_write(schema, column) is None:
        action = "Cast the column to one of them, or make it a struct<member0,...> as it is read"
        yield f"column `{path}` is {column}, and the schema has {schema}", action


def is_member_struct(schema: AvroUnion, column: DataType) -> bool:
    """Whether a column has the form in which a union of several types is read: a struct with a member for each."""
    if not isinstance(column, Struct) or merged_number_type(schema):
        return False
    if [f.name for f in column.fields] != [f"member{n}" for n in range(len(schema.present))]:
        return False
    return all(not any(column_mismatches(b, f.type, f.name)) for b, f in zip(schema.present, column.fields, strict=True))


def branch_to_write(schema: AvroUnion, column: DataType) -> int | None:
    """Which type of a union a column is written as: the widest of numbers, else the first that takes it."""
    wide = merged_number_type(schema)
    fits = [at for at, b in enumerate(schema.branches) if b.kind != "null" and not any(column_mismatches(b, column, ""))]
    return next(iter([*(at for at in fits if schema.branches[at].kind == wide), *fits]), None)


def _scalar_fits(schema: AvroSchema, column: DataType) -> bool:
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


def differences(old: AvroSchema, new: AvroSchema, path: str = "") -> list[str]:
    """What is not the same in two versions of a schema, and may be why they are not compatible."""
    if isinstance(old, AvroRecord) and isinstance(new, AvroRecord):
        return _differences_of_records(old, new, path)
    if isinstance(old, AvroArray) and isinstance(new, AvroArray):
        return differences(old.items, new.items, f"{path}[]")
    if isinstance(old, AvroMap) and isinstance(new, AvroMap):
        return differences(old.values, new.values, f"{path}[]")
    if isinstance(old, AvroUnion) and isinstance(new, AvroUnion) and old.optional and new.optional:
        return differences(old.present[0], new.present[0], path)
    return [] if old == new else [f"{f'`{path}`' if path else 'it'} was {old}, is {new}"]


def _differences_of_records(old: AvroRecord, new: AvroRecord, path: str) -> list[str]:
    before, after = ({f.name: f for f in r.fields} for r in (old, new))
    found = [] if old.name == new.name else [f"{f'`{path}`' if path else 'it'} was {old}, is {new}"]
    for name in dict.fromkeys([*before, *after]):
        here = f"{path}.{name}" if path else name
        if name in before and name in after:
            found += differences(before[name].type, after[name].type, here)
        else:
            which, word = (before, "gone") if name in before else (after, "new")
            found.append(f"`{here}` is {word}{'' if which[name].default else ', and has no default'}")
    return found
