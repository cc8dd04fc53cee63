"""Rows to JSON, a batch at a time, in Arrow: byte for byte what Spark's ``to_json`` writes. Runs in Spark's tasks.

Only for types for which that holds (:data:`~airflow_kafka_spark.formats.base.Kind`); the tests run both over the same rows.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.formats.base import Encoder, Kind
from airflow_kafka_spark.formats.tasks.text import concatenated, format_dates, format_decimals, format_timestamps, map_values

_SHORT = {0x22: '\\"', 0x5C: "\\\\", 0x08: "\\b", 0x09: "\\t", 0x0A: "\\n", 0x0C: "\\f", 0x0D: "\\r"}
_ESCAPES = {**{code: f"\\u{code:04X}" for code in range(0x20)}, **_SHORT}
_UNTOUCHED = bytes(code for code in range(256) if code not in _ESCAPES)


@dataclass(frozen=True)
class JsonEncoder(Encoder):
    """One object per row, as :meth:`~airflow_kafka_spark.formats.Json.encode` has it.

    :param columns: the columns and what they hold, in order.
    """

    columns: tuple[tuple[str, Kind], ...]

    def encode(self, rows: Mapping[str, pa.Array]) -> pa.Array:
        """The rows' objects."""
        parts: list[str | pa.Array] = []
        before = "{"
        for name, kind in self.columns:
            parts.append(f'{before}"{_escaped(name)}":')
            parts += _value(rows[name], kind)
            before = ","
        parts.append("}")
        return pc.binary_join_element_wise(*merge_constants(parts), "").cast(pa.binary())


def format_unquoted(column: pa.Array, kind: Kind) -> pa.Array:
    """The text of values as JSON has them, without quotes and escapes; not for texts."""
    text, after = _TEXTS[kind](column), _AROUND.get(kind, ("", ""))[1].strip('"')
    return pc.binary_join_element_wise(text, after, "") if after else text


def merge_constants(parts: Sequence[str | pa.Array]) -> list[str | pa.Array]:
    """The same with constants that follow each other made one: each part costs a step for every row."""
    fewer: list[str | pa.Array] = []
    for part in parts:
        if isinstance(part, str) and fewer and isinstance(fewer[-1], str):
            fewer[-1] += part
        else:
            fewer.append(part)
    return fewer


def _value(column: pa.Array, kind: Kind) -> list[str | pa.Array]:
    text = _TEXTS[kind](column)
    before, after = _AROUND.get(kind, ('"', '"'))
    if not text.null_count:
        return [before, text, after]
    if before or after:
        text = pc.binary_join_element_wise(before, text, after, "")
    return [pc.fill_null(text, "null")]


def escape_strings(column: pa.Array) -> pa.Array:
    """The inside of JSON strings, as Jackson writes them: nothing is escaped that need not be."""
    found = concatenated(column).translate(None, _UNTOUCHED)
    if not found:
        return column
    # The backslash first: the others bring new ones.
    for code in sorted(set(found), key=lambda code: (code != 0x5C, code)):
        column = pc.replace_substring(column, chr(code), _ESCAPES[code])
    return column


def _escaped(text: str) -> str:
    return "".join(_ESCAPES.get(ord(character), character) for character in text)


def _base64(column: pa.Array) -> pa.Array:
    return map_values(column, lambda value: binascii.b2a_base64(value, newline=False).decode("ascii"))


def _as_text(column: pa.Array) -> pa.Array:
    return column.cast(pa.string())


def _timestamp(column: pa.Array) -> pa.Array:
    return format_timestamps(column, "T")


_TEXTS: Mapping[Kind, Callable[[pa.Array], pa.Array]] = {
    "integer": _as_text,
    "boolean": _as_text,
    "decimal": _as_text,
    "fine decimal": format_decimals,
    "text": escape_strings,
    "binary": _base64,
    "zoned": _timestamp,
    "local": _timestamp,
    "date": format_dates,
}
_AROUND: Mapping[Kind, tuple[str, str]] = {
    **dict.fromkeys(("integer", "boolean", "decimal", "fine decimal"), ("", "")),
    "zoned": ('"', 'Z"'),
}
"""What stands around values in JSON, where it is not quotes."""
