"""Functions of Arrow in whose place tasks call those of this module, because Arrow's are wrong in some supported releases."""

from __future__ import annotations

from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

Argument: TypeAlias = "pa.Array | pa.ChunkedArray | pa.Scalar | str | bool | int | None"

_NULLS_ARE_SAFE = int(pa.__version__.partition(".")[0]) >= 24

_HAVE_OFFSETS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)


def if_else(condition: Argument, left: Argument, right: Argument) -> pa.Array:
    """Return ``left`` where the condition is true, ``right`` where it is false, and null where it is null.

    Before Arrow 24, Arrow's function returns wrong texts and bytes for a null scalar beside a slice of an array (arrow GH-49410).
    An array of nulls takes the place of such a scalar.
    """
    if not _NULLS_ARE_SAFE:
        left, right = _spread_null(left, right), _spread_null(right, left)
    return pc.if_else(condition, left, right)


def _spread_null(value: Argument, beside: Argument) -> Argument:
    """Return an array of nulls in place of a null scalar beside texts or bytes, and any other value unchanged."""
    is_null = value is None or (isinstance(value, pa.Scalar) and not value.is_valid)
    if is_null and isinstance(beside, (pa.Array, pa.ChunkedArray)) and any(test(beside.type) for test in _HAVE_OFFSETS):
        return pa.nulls(len(beside), beside.type)
    return value


__all__ = ["if_else"]
