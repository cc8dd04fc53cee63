"""Which records of a batch are likely to be bad: a quick look at each, where Arrow has refused the batch as a whole.

Only a guess: whoever is suspected goes to the reference, which decides, and whoever is not goes to Arrow once more. So a wrong
guess costs time and changes nothing. With one bad record in a hundred it is the difference between reading a batch twice and
taking it apart down to single records.

There are two looks. The first has msgspec read each record as the column's types, which takes less time than Arrow does; it is
wrong about forms that our meaning takes and RFC 3339 does not, and sees no decimal with too many digits. The second leaves such
values as they were written, and compares them with what may be written there.
"""

from __future__ import annotations

import datetime
import decimal
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from operator import attrgetter, length_hint
from typing import Annotated, Any, Literal

from airflow_kafka_spark.formats.json.logical_types import Carried
from airflow_kafka_spark.formats.types import Array, Column, DataType, Decimal, Map, Primitive, Struct, Text

Screen = Callable[[Sequence[bytes]], list[int]]
"""Takes records, gives the places of those that are suspected, ascending."""

_BITS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_31 = r"(?:0[1-9]|[12][0-9]|3[01])"
_DAY = rf"[0-9]{{4}}-(?:(?:0[13578]|1[02])-{_31}|(?:0[469]|11)-(?!31){_31}|02-(?!3){_31})"
_CLOCK = r"[T ](?:[01][0-9]|2[0-3])(?::[0-5][0-9](?::[0-5][0-9](?:\.[0-9]{1,6}0*)?)?)?"
_ZONE = r"(?:Z|[-+](?:[01][0-9]|2[0-3])(?::?[0-5][0-9])?)"
_WRITTEN = {
    "date": rf'"{_DAY}"',
    "timestamp": rf'"{_DAY}(?:{_CLOCK}{_ZONE}?)?"|-?[0-9]{{1,12}}',
    "timestamp_ntz": rf'"{_DAY}(?:{_CLOCK})?"',
    "float": r'-?[0-9.]+(?:[eE][-+]?[0-9]+)?|-?Infinity|NaN|"(?:-?Infinity|NaN)"',
    "double": r'-?[0-9.]+(?:[eE][-+]?[0-9]+)?|-?Infinity|NaN|"(?:-?Infinity|NaN)"',
    "binary": r'"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"',
}
"""How a value of a type is written."""


def screens(columns: Sequence[Column]) -> tuple[Screen, ...]:
    """What looks at records of these columns, the quicker look first."""
    return _Look(columns, _quick_look), _Look(columns, _close_look)


class _Look:
    """One look, made when it is asked for the first time; without msgspec, which comes with Airflow, it suspects nobody.

    :param columns: of the records.
    :param make: makes it.
    """

    def __init__(self, columns: Sequence[Column], make: Callable[[Sequence[Column], Any], Screen]) -> None:
        self._columns, self._make = columns, make

    def __call__(self, records: Sequence[bytes]) -> list[int]:
        return self._suspects(records)

    @cached_property
    def _suspects(self) -> Screen:
        try:
            import msgspec
        except ImportError:
            return lambda records: []
        try:
            return self._make(self._columns, msgspec)
        except (TypeError, ValueError):  # names that a Struct cannot have
            return _quick_look((), msgspec)


def _quick_look(columns: Sequence[Column], msgspec: Any) -> Screen:
    look = msgspec.json.Decoder(_record(columns, msgspec, _expected)).decode
    refused = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

    def suspects(records: Sequence[bytes]) -> list[int]:
        found: list[int] = []
        left = iter(records)
        while length_hint(left):
            try:
                # No line of Python around each record: that would be a fifth of the time.
                deque(map(look, left), maxlen=0)
            except refused:
                found.append(len(records) - length_hint(left) - 1)
        return found

    return suspects


def _close_look(columns: Sequence[Column], msgspec: Any) -> Screen:
    look = msgspec.json.Decoder(_record(columns, msgspec, _as_written)).decode
    refused = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
    checks = [(attrgetter(f"f{at}"), re.compile(form).fullmatch) for at, form in _forms(columns)]

    def suspects(records: Sequence[bytes]) -> list[int]:
        found, rows, places = [], [], []
        for at, value in enumerate(records):
            try:
                rows.append(look(value))
                places.append(at)
            except refused:
                found.append(at)
        for value_of, fits in checks:
            found += [at for at, value in zip(places, map(value_of, rows), strict=True) if value and not fits(value)]
        return sorted(set(found))

    return suspects


def _record(columns: Sequence[Column], msgspec: Any, type_of: Callable[[DataType, Any], Any]) -> Any:
    """The class that one record is read as."""
    fields = []
    for at, column in enumerate(columns):
        kind = type_of(column.type, msgspec)
        # Raw takes a null as it is, and takes nothing in a union.
        nullable = kind if kind is msgspec.Raw else kind | None
        fields.append((f"f{at}", nullable, None) if column.nullable else (f"f{at}", kind))
    names = {f"f{at}": column.name for at, column in enumerate(columns)}
    return msgspec.defstruct("Record", fields, rename=names, kw_only=True, gc=False)


def _expected(data_type: DataType, msgspec: Any) -> Any:
    """As what the first look reads a value."""
    if isinstance(data_type, Carried | Map):
        return msgspec.Raw
    if isinstance(data_type, Struct):
        return _record(data_type.fields, msgspec, _expected)
    if isinstance(data_type, Array):
        element = _expected(data_type.element, msgspec)
        nullable = element if element is msgspec.Raw or not data_type.contains_null else element | None
        return list[nullable]  # type: ignore[valid-type]
    if isinstance(data_type, Text):
        most = msgspec.Meta(max_length=data_type.max_length)
        return Annotated[str, most] | int | float | bool | list | dict
    if isinstance(data_type, Decimal):
        return decimal.Decimal
    if data_type.name in _BITS:
        limit = 1 << _BITS[data_type.name] - 1
        return Annotated[int, msgspec.Meta(ge=-limit, le=limit - 1)]
    return {
        "boolean": bool,
        "float": float | Literal["NaN", "Infinity", "-Infinity"],
        "double": float | Literal["NaN", "Infinity", "-Infinity"],
        "date": datetime.date,
        "timestamp": datetime.datetime | int,
        "timestamp_ntz": Annotated[datetime.datetime, msgspec.Meta(tz=False)],
        "binary": str,
    }[data_type.name]


def _as_written(data_type: DataType, msgspec: Any) -> Any:
    """As what the second look reads a value."""
    return msgspec.Raw if _form(data_type) or not isinstance(data_type, Primitive | Text) else _expected(data_type, msgspec)


def _forms(columns: Sequence[Column]) -> Iterator[tuple[int, bytes]]:
    """How values of a column are written, where the second look leaves them as they are."""
    for at, column in enumerate(columns):
        if form := _form(column.type):
            yield at, f"{form}|null".encode() if column.nullable else form.encode()


def _form(data_type: DataType) -> str | None:
    if isinstance(data_type, Decimal):
        before, after = data_type.precision - data_type.scale, data_type.scale
        digits = rf"0*[0-9]{{0,{before}}}(?:\.[0-9]{{0,{after}}}0*)?|[0-9.]+[eE][-+]?[0-9]+"
        return rf'"[-+]?(?:{digits})"|-?(?:{digits})'
    return _WRITTEN.get(data_type.name) if isinstance(data_type, Primitive) and not isinstance(data_type, Carried) else None
