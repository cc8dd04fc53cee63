"""Values as JSON in Debezium's form, and their Connect schemas."""

from __future__ import annotations

import binascii
import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, NamedTuple

DAY_SECONDS = 86_400
MICROS = 1_000_000


class ValueRefused(ValueError):
    """Raised for a value that the chosen form cannot hold.

    :param found: the value, and what cannot hold it.
    :param action: the option that helps; "" if none does.
    """

    def __init__(self, found: str, action: str = "") -> None:
        super().__init__(found)
        self.action = action


class ColumnForm(NamedTuple):
    """The form of the texts that a server writes for the values of a column, by which Arrow makes JSON of them.

    Columns that have a form are formatted as a whole (:mod:`airflow_kafka_spark.sources.cdc.tasks.columns`).

    :param kind: ``number``: the text is JSON; ``integer``: a number that may have zeros before it; ``boolean``: ``t`` or ``f``;
        ``quoted``: a text without special characters; ``decimal``: the base64 of a number without its point, ``variable decimal``
        with its scale; ``days`` and ``instant``: their number since 1970; ``zoned`` and ``utc``: ISO 8601 in UTC, of a text with
        and without a zone; ``clock``: the time since midnight.
    :param parameter: of a decimal its scale; of ``double`` the number of digits with which each text is a number of its own; of
        ``zoned`` and ``utc`` the digits behind the seconds; of ``instant`` and ``clock`` the microseconds of the unit.
    """

    kind: Literal[
        "number", "integer", "boolean", "double", "text", "quoted", "decimal", "variable decimal", "days", "instant", "zoned",
        "utc", "clock",
    ]  # fmt: skip
    parameter: int = 0


DOUBLE_FORM, FLOAT_FORM = ColumnForm("double", 15), ColumnForm("double", 6)
"""Of numbers of 64 bits, and of 32 bits."""


def make_named_schema(kind: str, name: str, **parameters: Any) -> dict[str, Any]:
    """Return the Connect schema of a named type."""
    given = {key: str(value) for key, value in parameters.items() if value is not None}
    return {"type": kind, "name": name, "version": 1, **({"parameters": given} if given else {})}


def make_enum_schema(name: str, values: Sequence[str]) -> dict[str, Any]:
    """Return the schema of an enum, or of a set of an enum's values.

    :param name: ``Enum`` or ``EnumSet``.
    """
    return make_named_schema(
        "string", f"io.debezium.data.{name}", allowed=",".join(value.replace(",", "\\,") for value in values)
    )


def make_decimal_schema(scale: int, precision: int | None) -> dict[str, Any]:
    """Return the schema of Connect's Decimal.

    :param precision: None if it is unknown.
    """
    parameters = {"scale": str(scale), **({} if precision is None else {"connect.decimal.precision": str(precision)})}
    return {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal", "version": 1, "parameters": parameters}


POINT_SCHEMA: Mapping[str, Any] = {
    "type": "struct",
    "fields": [
        {"type": "double", "optional": False, "field": "x"},
        {"type": "double", "optional": False, "field": "y"},
        {"type": "bytes", "optional": True, "field": "wkb"},
        {"type": "int32", "optional": True, "field": "srid"},
    ],
    "name": "io.debezium.data.geometry.Point",
    "version": 1,
    "doc": "Geometry (POINT)",
}
"""The schema of a point in the plane."""


def format_point(x: str, y: str, wkb: bytes, srid: int | None) -> str:
    """Return a point as JSON.

    :param x: its first coordinate, as JSON.
    :param y: its second one, as JSON.
    :param wkb: the point as well-known binary.
    :param srid: the id of its spatial reference system; None without one.
    """
    return f'{{"x":{x},"y":{y},"wkb":{format_base64(wkb)},"srid":{"null" if srid is None else srid}}}'


def format_base64(raw: bytes) -> str:
    """Return bytes as JSON."""
    return f'"{binascii.b2a_base64(raw, newline=False).decode()}"'


def format_unscaled_integer(unscaled: int) -> str:
    """Return the unscaled value of a decimal as JSON: base64 of its bytes, big-endian."""
    length = (unscaled + (unscaled < 0)).bit_length() // 8 + 1
    return format_base64(unscaled.to_bytes(length, "big", signed=True))


def format_unscaled(value: Decimal, scale: int) -> str:
    """Return the unscaled value of a finite decimal as JSON; see :func:`format_unscaled_integer`."""
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    # Not by a text: Python converts at most 4300 digits of one.
    return format_unscaled_integer(int(Decimal((sign, digits, exponent + scale))))


def count_days(year: int, month: int, day: int) -> int:
    """Return the days since 1970-01-01 in the proleptic Gregorian calendar, for any year."""
    year -= month <= 2
    era, of_era = divmod(year, 400)
    of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    return era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468


def format_json(value: object) -> str:
    """Return compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
