"""The statistics of a Parquet file as Delta's log holds them, taken from the file's footer.

Readers skip files by them, so a bound that is not sure is left out, or widened.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Set
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

LONGEST_TEXT = 32
"""Characters of a text that are kept, as Spark does."""
_EXACT_DIGITS = 15
_LAST_CHARACTER = "\U0010ffff"


def file_statistics(
    footer: pyarrow.parquet.FileMetaData, schema: pa.Schema, columns: Set[str], unbounded: Set[str]
) -> dict[str, Any]:
    """Return ``numRecords``, ``minValues``, ``maxValues`` and ``nullCount`` of a file.

    :param footer: the file's footer.
    :param schema: the file's columns.
    :param columns: the columns that have statistics.
    :param unbounded: columns that hold a NaN, which Parquet's bounds leave out and which is greater than all other numbers.
    """
    lows: dict[str, Any] = {}
    highs: dict[str, Any] = {}
    nulls: dict[str, Any] = {}
    paths = [footer.schema.column(index).path for index in range(footer.num_columns)]
    for index, dotted in enumerate(paths):
        path = dotted.split(".")
        kind = _leaf_type(schema, path)
        # A column `a.b` and the member `b` of a column `a` have the same path.
        if kind is None or path[0] not in columns or paths.count(dotted) > 1:
            continue
        chunks = [footer.row_group(group).column(index) for group in range(footer.num_row_groups)]
        found = [chunk.statistics for chunk in chunks if chunk.num_values]
        if any(one is None or not one.has_null_count for one in found):
            continue
        _put(nulls, path, sum(one.null_count for one in found))
        filled = [one for one, chunk in zip(found, (c for c in chunks if c.num_values), strict=True) if one.num_values]
        if not filled or not all(one.has_min_max for one in filled) or path[0] in unbounded:
            continue
        low, high = _bounds(kind, filled)
        if low is not None and high is not None:
            _put(lows, path, low)
            _put(highs, path, high)
    return {"numRecords": footer.num_rows, "minValues": lows, "maxValues": highs, "nullCount": nulls}


def columns_with_nan(batch: pa.RecordBatch) -> set[str]:
    """Return the columns of floating point numbers, at any depth, that hold a NaN or are nested."""
    found = set()
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_floating(column.type):
            if pc.any(pc.is_nan(column)).as_py():
                found.add(name)
        elif "float" in str(column.type) or "double" in str(column.type):
            found.add(name)
    return found


def _leaf_type(schema: pa.Schema, path: list[str]) -> pa.DataType | None:
    """Return the type of a column that is not within a list or a map, else None."""
    index = schema.get_field_index(path[0])
    if index < 0:
        return None
    kind = schema.field(index).type
    for name in path[1:]:
        if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return None
        kind = kind.field(kind.get_field_index(name)).type
    return None if pa.types.is_nested(kind) else kind


def _put(into: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        into = into.setdefault(name, {})
    into[path[-1]] = value


def _bounds(kind: pa.DataType, found: Iterable[Any]) -> tuple[Any, Any]:
    """Return the bounds of a column as JSON has them; None for one that is not sure."""
    if pa.types.is_binary(kind) or pa.types.is_boolean(kind) or pa.types.is_large_binary(kind):
        return None, None
    if pa.types.is_decimal(kind) and kind.precision > _EXACT_DIGITS:
        return None, None
    try:
        low, high = min(one.min for one in found), max(one.max for one in found)
    except (OverflowError, ValueError, TypeError):  # an instant outside of Python's years
        return None, None
    return _low(low), _high(high)


def _low(value: Any) -> Any:
    if isinstance(value, str):
        return value[:LONGEST_TEXT]
    if isinstance(value, dt.datetime):
        return _instant(value - dt.timedelta(microseconds=value.microsecond % 1000))
    return _plain(value)


def _high(value: Any) -> Any:
    if isinstance(value, str):
        if len(value) <= LONGEST_TEXT:
            return value
        return None if value[LONGEST_TEXT] == _LAST_CHARACTER else value[:LONGEST_TEXT] + _LAST_CHARACTER
    if isinstance(value, dt.datetime):
        over = value.microsecond % 1000
        try:
            return _instant(value + dt.timedelta(microseconds=1000 - over if over else 0))
        except OverflowError:
            return None
    return _plain(value)


def _instant(value: dt.datetime) -> str:
    text = value.replace(tzinfo=None).isoformat(timespec="milliseconds")
    return text + "Z" if value.tzinfo else text


def _plain(value: Any) -> Any:
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value) if value % 1 else int(value)
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return None  # JSON has no such number
    return value if isinstance(value, (int, float)) else None


def skipping_columns(schema: pa.Schema, configuration: Mapping[str, str]) -> frozenset[str]:
    """Return the columns that have statistics, as the table's properties say; the first 32 by default.

    :param schema: the table's columns without those it is partitioned by.
    :param configuration: the table's properties.
    """
    if named := configuration.get("delta.dataSkippingStatsColumns"):
        return frozenset(name.strip().strip("`").partition(".")[0] for name in named.split(","))
    try:
        count = int(configuration.get("delta.dataSkippingNumIndexedCols", 32))
    except ValueError:
        count = 32
    return frozenset(schema.names if count < 0 else schema.names[:count])
