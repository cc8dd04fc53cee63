"""Comparisons of the rows given to a sink with the rows that a reader finds, by value."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from tests.support import oracle

_PLAIN = {str, int, bool, bytes, dt.date, type(None)}


def same_multiset(expected: Iterable[Mapping[str, Any]], found: Iterable[Mapping[str, Any]]) -> int:
    """Assert that both hold the same rows the same number of times, and at least one row. Return the number of rows.

    :raises RecordsDiffer: naming the values that differ if all rows are there by their ids, else the rows.
    """
    expected, found = list(expected), list(found)
    # Values whose texts are equal are equal, types included, and texts of rows take a tenth of the time.
    if expected and sorted(map(repr, expected)) == sorted(map(repr, found)):
        return len(expected)
    want, have = ({line.get("id"): line for line in lines} for lines in (expected, found))
    if want.keys() == have.keys() and len(want) == len(expected) == len(found):
        values = [(i, name, value, have[i].get(name)) for i, line in want.items() for name, value in line.items()]
        wrong = [(i, name, value, there) for i, name, value, there in values if frozen(value) != frozen(there)]
        if wrong:
            listed = [
                f"column `{n}` of row {i}: found {there!r:.200}, expected {value!r:.200}" for i, n, value, there in wrong[:6]
            ]
            raise oracle.RecordsDiffer(f"{len(wrong)} values differ. {'; '.join(listed)}")
    return oracle.same_multiset(map(frozen, expected), map(frozen, found))


def frozen(value: Any) -> Any:
    """Return a value to count and compare: with its type (1 is not 1.0), NaN equal to NaN, -0.0 different from 0.0, instants in
    UTC.
    """
    if type(value) in _PLAIN:
        return type(value).__name__, value
    if isinstance(value, Mapping):
        return ("struct", *sorted((k, frozen(v)) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return ("list", *map(frozen, value))
    if isinstance(value, float):
        return "float", repr(value)
    if isinstance(value, Decimal):
        return "decimal", value
    if isinstance(value, dt.datetime):
        instant = value.astimezone(dt.timezone.utc) if value.tzinfo else value
        return "instant" if value.tzinfo else "wall clock", instant.replace(tzinfo=None)
    return type(value).__name__, value
