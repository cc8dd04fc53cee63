"""Which columns a field of a schema takes, for formats that write row by row. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from airflow_kafka_spark.formats.json.logical_types import plain
from airflow_kafka_spark.formats.types import Array, Column, DataType, Decimal, Map, Struct, Text

INTEGERS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}


def misfits(columns: Sequence[Column], fields: Sequence[Column], path: str = "") -> Iterator[tuple[str, str]]:
    """Why columns cannot be written as fields, with what to do about it. A value is never written as something else: what does
    not fit by its type is told here, what does not fit by its value when its row is met.

    :param columns: of the rows.
    :param fields: of the schema.
    """
    known = {f.name: f for f in fields}
    seen: set[str] = set()
    for column in columns:
        here = f"{path}{column.name}"
        if column.name in seen:
            yield f"column `{here}` is there twice", "Rename one of them"
        elif column.name not in known:
            yield f"the schema has no field for column `{here}`", "Leave the column out, or give the schema such a field"
        else:
            yield from _misfits(column.type, plain(known[column.name].type), here)
        seen.add(column.name)


def _misfits(found: DataType, wanted: DataType, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(found, Struct) and isinstance(wanted, Struct):
        yield from misfits(found.fields, wanted.fields, f"{path}.")
    elif isinstance(found, Array) and isinstance(wanted, Array):
        yield from _misfits(found.element, wanted.element, f"{path}[]")
    elif isinstance(found, Map) and isinstance(wanted, Map):
        yield from _misfits(found.key, wanted.key, f"{path} (its keys)")
        yield from _misfits(found.value, wanted.value, f"{path}[]")
    elif not _taken(found, wanted):
        yield f"column `{path}` is of type {found}, and its field takes {wanted}", "Cast the column, or change the schema"


def _taken(found: DataType, wanted: DataType) -> bool:
    if isinstance(found, Text):
        return isinstance(wanted, Text)
    if isinstance(wanted, Decimal):
        if isinstance(found, Decimal):
            return found.scale <= wanted.scale and found.precision - found.scale <= wanted.precision - wanted.scale
        # Of a uint64: numbers below 0 are told with their rows.
        return str(found) in INTEGERS and (wanted.precision - wanted.scale >= 19 or str(found) != "bigint")
    if str(found) in INTEGERS:
        return str(wanted) in INTEGERS or (str(wanted) == "double" and str(found) != "bigint")
    return str(found) == str(wanted) or (str(found), str(wanted)) == ("float", "double")
