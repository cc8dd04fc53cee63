"""Which records of a batch are likely to be bad: a quick look at each, where Arrow has refused the batch as a whole.

Only a guess: whoever is suspected goes to the reference, which decides, and whoever is not goes to Arrow once more. So a wrong
guess costs time and changes nothing. With one bad record in a hundred it is the difference between reading a batch twice and
taking it apart down to single records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from airflow_kafka_spark.formats.ddl import Column, DataType, Decimal, Primitive, Text
from airflow_kafka_spark.formats.json_carried import Carried

Screen = Callable[[Sequence[bytes]], list[int]]
"""Takes records, gives the places of those that are suspected."""

_DECIMAL = r"^\s*[-+]?[0-9.]+([eE][-+]?[0-9]+)?\s*$"
_TIME = r"^\s*[0-9]{4}-[0-9]"
_TIMES = frozenset({"timestamp", "timestamp_ntz", "date"})
_NUMBERS = {"tinyint": int, "smallint": int, "int": int, "bigint": int, "boolean": bool}


def screen(columns: Sequence[Column]) -> Screen | None:
    """What looks at records of these columns; None where msgspec is not installed, which comes with Airflow."""
    try:
        import msgspec
    except ImportError:
        return None
    fields = [(f"f{at}", _expected(c.type, msgspec), None) for at, c in enumerate(columns)]
    names = {f"f{at}": c.name for at, c in enumerate(columns)}
    try:
        record = msgspec.defstruct("Record", fields, rename=names)
        look = msgspec.json.Decoder(record).decode
    except (TypeError, ValueError):  # names that a Struct cannot have
        look = msgspec.json.Decoder(msgspec.defstruct("Record", [])).decode

    def suspects(records: Sequence[bytes]) -> list[int]:
        found = []
        for at, value in enumerate(records):
            try:
                look(value)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                found.append(at)
        return found

    return suspects


def _expected(data_type: DataType, msgspec: Any) -> Any:
    if isinstance(data_type, Carried):
        return msgspec.Raw
    if isinstance(data_type, Text):
        return str | None
    if isinstance(data_type, Decimal):
        return Annotated[str, msgspec.Meta(pattern=_DECIMAL)] | int | float | None
    if isinstance(data_type, Primitive) and data_type.name in _TIMES:
        return Annotated[str, msgspec.Meta(pattern=_TIME)] | int | float | None
    if isinstance(data_type, Primitive) and data_type.name in _NUMBERS:
        return _NUMBERS[data_type.name] | None
    return msgspec.Raw
