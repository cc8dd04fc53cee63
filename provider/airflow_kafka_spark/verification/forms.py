"""The canonical text in which two columns are compared: two texts are equal exactly if the values are equal, in any database.

Numbers are compared by value, timestamps by microsecond, floating-point numbers by bit. The text of a row joins the forms of its
columns. The checksum of a row is the beginning of the MD5 of this text. The checksum of many rows is the sum of their checksums:
it does not depend on their order, and a duplicate row changes it.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, Literal, NamedTuple

Family = Literal[
    "integer", "boolean", "decimal", "single", "double", "text", "padded", "uuid", "binary", "zoned", "local", "date", "time",
    "json", "array", "nested", "other",
]  # fmt: skip
"""Kinds of the values of a column. ``padded`` is ``char(n)``; ``other`` has a text in the notation of its database; ``nested``
are Arrow's lists, structs and maps."""

Form = Literal[
    "integer", "decimal", "numeral", "single", "double", "text", "trimmed", "uuid", "binary", "instant", "date", "time",
    "json", "jsonb",
]  # fmt: skip
"""``numeral`` is a decimal that one side holds as a text; ``jsonb`` is PostgreSQL's canonical JSON, ``json`` Python's."""

FREE_FORMS: frozenset[Form] = frozenset({"numeral", "text", "trimmed", "uuid", "binary", "time", "json", "jsonb"})
"""Forms that may be empty, as NULL is, or contain the separator. Their length in bytes is written before them."""

RANGE_FORMS: frozenset[Form] = frozenset({"integer", "decimal", "instant", "date", "binary"})
"""Forms whose values every database sorts the same way."""

CHECKSUM_DIGITS = 15
"""Number of hexadecimal digits of the MD5 that are added up: 60 bits, which fit into an integer of every database."""

CanonicalRow = tuple[str | None, ...]
"""A row's values in their forms."""


@dataclass(frozen=True)
class Comparable:
    """A column of one side.

    :param name: its name.
    :param family: the kind of its values.
    :param type: the database's name of its type.
    """

    name: str
    family: Family
    type: str


class Sums(NamedTuple):
    """The number of rows, and the sum of their checksums."""

    rows: int
    checksum: int


_WHOLE: frozenset[Family] = frozenset({"integer", "boolean"})
_EXACT: frozenset[Family] = _WHOLE | {"decimal"}
_FLOATS: frozenset[Family] = frozenset({"single", "double"})
_TIMES: frozenset[Family] = frozenset({"zoned", "local", "date"})
_TEXTS: frozenset[Family] = frozenset({"text", "padded", "other", "json", "uuid", "time"})


def find_form(source: Comparable, sink: Comparable, *, in_postgres: bool) -> Form | None:
    """Return the form in which two columns are compared; None if values of these types cannot be.

    :param in_postgres: True if both sides are PostgreSQL.
    """
    found = {source.family, sink.family}
    if found <= _EXACT:
        return "integer" if found <= _WHOLE else "decimal"
    if found <= _FLOATS | {"integer", "decimal"}:
        # A float4 that was converted to a double still has the digits of a float4.
        return "single" if "single" in found else "double"
    if found <= _TIMES:
        return "date" if found == {"date"} else "instant"
    if found == {"binary"}:
        return "binary"
    if "text" in found and found <= {"text", "integer", "decimal"}:
        # Numbers with more digits than Spark's decimal type are published as text.
        return "numeral" if found != {"text"} else "text"
    if found == {"array"}:
        return "text" if in_postgres and source.type == sink.type else None
    return _find_text_form(source, sink, in_postgres) if found <= _TEXTS else None


def _find_text_form(source: Comparable, sink: Comparable, in_postgres: bool) -> Form:
    """Return the form of columns whose values are published as text."""
    if sink.family == "json":
        return "jsonb" if in_postgres else "json"
    found = {source.family, sink.family}
    for family, form in _OF_TEXTS:
        if family in found:
            return form
    return "text"


_OF_TEXTS: tuple[tuple[Family, Form], ...] = (("uuid", "uuid"), ("time", "time"), ("padded", "trimmed"))


# --- rows -----------------------------------------------------------------------------------------------------------------


def compute_row_checksum(row: Sequence[str | None], forms: Sequence[Form]) -> int:
    """Return the checksum of a row, as the databases compute it."""
    return int(hashlib.md5(encode_row(row, forms), usedforsecurity=False).hexdigest()[:CHECKSUM_DIGITS], 16)


def encode_row(row: Sequence[str | None], forms: Sequence[Form]) -> bytes:
    """Return the text of a row in UTF-8: its values, separated by bars. NULL is empty."""
    parts = []
    for value, form in zip(row, forms, strict=True):
        encoded = b"" if value is None else value.encode()
        parts.append(b"%d:%s" % (len(encoded), encoded) if value is not None and form in FREE_FORMS else encoded)
    return b"|".join(parts)


def to_form(form: Form, value: str | float | None) -> str | None:
    """Return the form of a value whose form the database cannot compute.

    :param value: a number for ``single`` and ``double``, a text for ``json``; None for NULL.
    """
    if value is None:
        return None
    if form == "json":
        return normalize_json(str(value))
    number = float(value)
    if number != number:
        # A NaN has many bit patterns, which no query tells apart.
        number = math.nan
    return _format_single(number) if form == "single" else struct.pack(">d", number + 0.0).hex()


def _format_single(value: float) -> str:
    try:
        found = struct.pack(">f", value).hex()
    except OverflowError:
        return struct.pack(">d", value).hex()
    return "00000000" if found == "80000000" else found


def normalize_json(text: str) -> str:
    """Return a JSON text in one form: keys sorted, the last one of equal keys, numbers by value; other texts unchanged."""
    try:
        value = json.loads(text, parse_float=_parse_number, parse_int=_parse_number, object_hook=_wrap_object)
        # Escapes of halves of surrogate pairs stay escapes, because UTF-8 has no bytes for them.
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (ValueError, ArithmeticError, RecursionError):
        return text


def _wrap_object(members: dict[str, Any]) -> dict[str, Any]:
    """Return an object in a form that no number has, whatever its members are."""
    return {"object": members}


def _parse_number(text: str) -> dict[str, Any]:
    sign, digits, exponent = Decimal(text).as_tuple()
    plain = "".join(map(str, digits)).lstrip("0")
    stripped = plain.rstrip("0")
    if not stripped:
        return {"number": "0"}
    return {"number": f"{'-' if sign else ''}{stripped}e{int(exponent) + len(plain) - len(stripped)}"}


# --- what is shown ----------------------------------------------------------------------------------------------------------

_EPOCH = datetime(2000, 1, 1)


def to_report_value(form: Form, value: str | None) -> str | int | None:
    """Return a value for a report: a timestamp or a date as people write it, an integer as a number, others in their form."""
    if value is None or form not in ("instant", "date", "integer"):
        return value
    try:
        if form == "integer":
            return int(value)
        number = int.from_bytes(bytes.fromhex(value), "big", signed=True)
        return str(date(2000, 1, 1) + timedelta(days=number) if form == "date" else _EPOCH + timedelta(microseconds=number))
    except (ValueError, OverflowError):
        return value
