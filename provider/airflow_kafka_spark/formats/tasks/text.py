"""Values to text, a batch at a time, in Arrow: byte for byte what Spark writes. Runs in Spark's tasks."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.formats.base import Encoder, Kind

_DAY = 86_400_000_000
_FIRST, _LAST = -719_162, 2_932_896
"""The days of the years 1 to 9999, counted from 1970-01-01: those that Arrow writes as everybody does."""


def map_values(column: pa.Array, convert: Callable[[Any], str]) -> pa.Array:
    """One by one, where Arrow has nothing."""
    return pa.array([None if value is None else convert(value) for value in column.to_pylist()], pa.string())


def concatenated(column: pa.Array) -> bytes:
    """All texts of a column, one behind the other."""
    offsets, data = column.buffers()[1:]
    if data is None or not len(column):
        return b""
    places = memoryview(offsets).cast("i")
    return memoryview(data)[places[column.offset] : places[column.offset + len(column)]].tobytes()


def format_dates(column: pa.Array) -> pa.Array:
    """Dates, as ``yyyy-MM-dd``."""
    plain = column.cast(pa.int32())
    if _within(plain, _FIRST, _LAST):
        return column.cast(pa.string())
    return _format_far(plain.cast(pa.int64()), "D")


def format_timestamps(column: pa.Array, between: str) -> pa.Array:
    """Timestamps to the microsecond, in UTC where they have a zone.

    :param between: what stands between date and time of day.
    """
    plain = column.cast(pa.int64())
    if not _within(plain, _FIRST * _DAY, (_LAST + 1) * _DAY - 1):
        return pc.replace_substring(_format_far(plain, "us"), "T", between)
    text = plain.cast(pa.timestamp("us")).cast(pa.string())
    return pc.binary_replace_slice(text, 10, 11, between) if between != " " else text


def _within(column: pa.Array, first: int, last: int) -> bool:
    found = pc.min_max(column).as_py()
    return found["min"] is None or (found["min"] >= first and found["max"] <= last)


def _format_far(column: pa.Array, unit: str) -> pa.Array:
    """Years with another number of digits, or before our time: Java puts a sign before those of five digits."""
    texts = np.datetime_as_string(np.asarray(column.fill_null(0)).view(f"datetime64[{unit}]")).tolist()
    signed = [text if text[0] == "-" or text.index("-") == 4 else f"+{text}" for text in texts]
    return pa.array(signed, pa.string(), mask=np.asarray(column.is_null()))


def format_decimals(column: pa.Array) -> pa.Array:
    """Decimals with more than 6 digits behind the point: Java writes the smallest of them with an exponent, as Python does."""
    if not pc.any(pc.match_substring(column, "0.000000")).as_py():
        return column
    return map_values(column, lambda text: str(Decimal(text)))


@dataclass(frozen=True)
class TextEncoder(Encoder):
    """One column's text, as :meth:`~airflow_kafka_spark.formats.String.encode` has it in UTF-8; or its bytes.

    :param column: the column's name.
    :param kind: what it holds.
    """

    column: str
    kind: Kind

    def encode(self, rows: Mapping[str, pa.Array]) -> pa.Array:
        """The rows' texts; null where the column is."""
        return _FORMATS[self.kind](rows[self.column]).cast(pa.binary())


def _format_trimmed_timestamps(column: pa.Array) -> pa.Array:
    """Timestamps as SQL casts them to text: without zeros at the end of a second."""
    return pc.replace_substring_regex(format_timestamps(column, " "), r"\.?0+$", "")


def _as_text(column: pa.Array) -> pa.Array:
    return column.cast(pa.string())


_FORMATS: Mapping[Kind, Callable[[pa.Array], pa.Array]] = {
    "integer": _as_text,
    "boolean": _as_text,
    "decimal": _as_text,
    "text": _as_text,
    "binary": lambda column: column,
    "zoned": _format_trimmed_timestamps,
    "local": _format_trimmed_timestamps,
    "date": format_dates,
}


# --- tasks.readable --------------------
# Rows as JSON for people to read: also those that no format takes. Runs in Spark's tasks.
#
# Nothing is refused and nothing raises: a text that is not UTF-8 has replacement characters where it is broken, and a number that
# JSON has not is its name, as text.
#


_Is = Callable[[pa.DataType], bool]


def rows_as_json(columns: Sequence[tuple[str, pa.Array]]) -> list[bytes]:
    """One JSON object per row.

    Decimals are numbers with all their digits, instants and wall clocks are ISO 8601, bytes are base64, structs and maps are
    objects.

    :param columns: names and values, all of one length.
    """
    count = len(columns[0][1]) if columns else 0
    return [_object((name, column[at]) for name, column in columns).encode() for at in range(count)]


def _object(fields: Any) -> str:
    return "{" + ",".join(f"{_text(name)}:{_value(value)}" for name, value in fields) + "}"


def _value(scalar: pa.Scalar) -> str:
    if not scalar.is_valid:
        return "null"
    for fits, write in _WRITERS:
        if fits(scalar.type):
            return write(scalar)
    return _text(str(scalar))


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _string(scalar: pa.Scalar) -> str:
    return _text(scalar.as_buffer().to_pybytes().decode("utf-8", "replace"))


def _float(scalar: pa.Scalar) -> str:
    value = scalar.as_py()
    if not math.isfinite(value):
        return _text({"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)])
    return str(np.float32(value)) if pa.types.is_float32(scalar.type) else repr(value)


def _moment(scalar: pa.Scalar) -> str:
    # Python's own dates end with the year 9999, and what lies beyond is a reason why a row does not fit.
    text = str(np.datetime64(scalar.value, scalar.type.unit))
    return _text(f"{text}Z" if scalar.type.tz else text)


def _map(scalar: pa.Scalar) -> str:
    entries = scalar.values
    return _object((_name(entry[0]), entry[1]) for entry in entries)


def _name(scalar: pa.Scalar) -> str:
    written = _value(scalar)
    return str(json.loads(written)) if written.startswith('"') else written


def _list(scalar: pa.Scalar) -> str:
    return "[" + ",".join(map(_value, scalar.values)) + "]"


def _bytes(scalar: pa.Scalar) -> str:
    return _text(base64.b64encode(scalar.as_py()).decode())


_types = pa.types
_WRITERS: tuple[tuple[_Is, Callable[[Any], str]], ...] = (
    (lambda t: _types.is_string(t) or _types.is_large_string(t), _string),
    (_types.is_boolean, lambda scalar: "true" if scalar.as_py() else "false"),
    (_types.is_integer, lambda scalar: str(scalar.as_py())),
    (_types.is_floating, _float),
    (_types.is_decimal, lambda scalar: format(scalar.as_py(), "f")),
    (_types.is_timestamp, _moment),
    (_types.is_date32, lambda scalar: _text(str(np.datetime64(scalar.value, "D")))),
    (lambda t: _types.is_binary(t) or _types.is_large_binary(t), _bytes),
    (_types.is_struct, lambda scalar: _object((f.name, scalar[at]) for at, f in enumerate(scalar.type))),
    (_types.is_map, _map),
    (lambda t: _types.is_list(t) or _types.is_large_list(t), _list),
)
