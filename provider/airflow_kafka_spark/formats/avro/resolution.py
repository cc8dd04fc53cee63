"""Which type of a reader takes which of a writer, by the rules of Avro's schema resolution. Pure."""

from __future__ import annotations

from airflow_kafka_spark.formats.avro.schema import Enum, Field, Fixed, Leaf, Record, Schema, Union

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


def goes_with(writer: Schema, reader: Schema) -> bool:
    """Whether values of one type can be read as another, as far as the types themselves tell. Names are looked at in unions."""
    if isinstance(writer, Leaf):
        return reader.kind in _PROMOTED[writer.kind] and _measure_alike(writer, reader) and not _digits_as_text(writer, reader)
    if isinstance(writer, Fixed):
        return isinstance(reader, Fixed) and reader.size == writer.size
    return writer.kind == reader.kind


def _measure_alike(writer: Leaf, reader: Schema) -> bool:
    """Whether not one is a day, say, and the other an instant: both are numbers, but no number is the same as both."""
    found = {b.meaning.measures for b in (writer, reader) if isinstance(b, Leaf) and b.meaning and b.meaning.measures}
    return len(found) < 2


def _digits_as_text(writer: Leaf, reader: Schema) -> bool:
    """Whether one is a decimal and the other a text: bytes become texts, but those of a number are none."""
    return any(a.kind == "string" and b.logical and b.logical.name == "decimal" for a, b in _both_ways(writer, reader))


def _both_ways(writer: Leaf, reader: Schema) -> tuple[tuple[Leaf, Leaf], ...]:
    return ((writer, reader), (reader, writer)) if isinstance(reader, Leaf) else ()


def recounted(writer: Schema, reader: Schema) -> tuple[int, int] | None:
    """By what a number is multiplied and divided that two versions count by different units, where one of these makes no column
    type of its own; None where there is no such difference."""
    if not isinstance(writer, Leaf) or not isinstance(reader, Leaf) or not (writer.counts or reader.counts):
        return None
    was, now = (b.meaning.rate if b.meaning else 0 for b in (writer, reader))
    if not was or not now or was == now:
        return None
    return (now // was, 1) if now > was else (1, was // now)


def branch_for(writer: Schema, reader: Union) -> int | None:
    """Which branch of a reader's union takes a writer's type: one of the same type and name, then of the same type, then one that
    it is promoted to."""
    fits = [at for at, branch in enumerate(reader.branches) if goes_with(writer, branch)]
    same = [at for at in fits if reader.branches[at].kind == writer.kind]
    named = [at for at in same if _same_name(writer, reader.branches[at])]
    alike = [at for at in named if getattr(reader.branches[at], "logical", None) == getattr(writer, "logical", None)]
    return next(iter([*alike, *named, *same, *fits]), None)


def _same_name(writer: Schema, reader: Schema) -> bool:
    if not isinstance(writer, (Record, Enum, Fixed)) or not isinstance(reader, (Record, Enum, Fixed)):
        return True
    names = {reader.name, *reader.aliases}
    return writer.name in names or writer.name.rpartition(".")[2] in {n.rpartition(".")[2] for n in names}


def field_for(written: Field, writer: Record, reader: Record) -> Field | None:
    """The reader's field that takes a writer's: of the same name, or with that name as an alias while the writer has not both."""
    by_name = next((f for f in reader.fields if f.name == written.name), None)
    if by_name is not None:
        return by_name
    own = {f.name for f in writer.fields}
    return next((f for f in reader.fields if f.name not in own and _first_alias(f, own) == written.name), None)


def _first_alias(field: Field, own: set[str]) -> str | None:
    return next((a for a in field.aliases if a in own), None)


def symbols_for(writer: Enum, reader: Enum) -> list[str | None]:
    """What the reader sees of each symbol of the writer; None where it knows no such."""
    return [s if s in reader.symbols else reader.default for s in writer.symbols]
