"""Rows as JSON for people to read: also those that no format takes. Runs in Spark's tasks.

Nothing is refused and nothing raises: a text that is not UTF-8 has replacement characters where it is broken, and a number that
JSON has not is its name, as text.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

_Is = Callable[[pa.DataType], bool]


def shown(columns: Sequence[tuple[str, pa.Array]]) -> list[bytes]:
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
