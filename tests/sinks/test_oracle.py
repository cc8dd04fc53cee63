"""The oracle for rows fails on a lost, doubled or swapped row, on another type, and if it compared nothing."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal

import pytest

from tests.sinks.feed import row
from tests.sinks.oracle import frozen, same_multiset

GOOD = [row(i) for i in range(60)]


def swapped(name: str) -> list[dict]:
    one, other = GOOD[12], GOOD[13]
    return [*GOOD[:12], one | {name: other[name]}, other | {name: one[name]}, *GOOD[14:]]


def test_the_same_rows_in_another_order_pass_and_are_counted():
    assert same_multiset(GOOD, [dict(reversed(line.items())) for line in reversed(GOOD)]) == 60


@pytest.mark.parametrize(
    "found",
    [GOOD[1:], [*GOOD, GOOD[7]], [GOOD[1], *GOOD[1:]], swapped("id"), *(swapped(n) for n in ("name", "placed_at", "tags")), []],
    ids=["lost", "doubled", "lost and doubled", "swapped ids", "swapped names", "swapped instants", "swapped lists", "all lost"],
)
def test_a_damaged_table_is_red(found):
    with pytest.raises(AssertionError):
        same_multiset(GOOD, found)


def test_comparing_nothing_is_red():
    with pytest.raises(AssertionError, match="nothing was compared"):
        same_multiset([], [])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (1, Decimal(1)),
        (0.0, -0.0),
        ("", None),
        ("a", b"a"),
        ([], None),
        (math.nan, None),
        (dt.datetime(2026, 1, 1), dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)),
        (dt.date(2026, 1, 1), dt.datetime(2026, 1, 1)),
        (Decimal("1234567890123456789012345678.0123456789"), Decimal("1234567890123456789012345678.0123456788")),
        ({"a": 1}, {"a": 1, "b": None}),
    ],
)
def test_values_that_only_look_alike_are_different(one, other):
    with pytest.raises(AssertionError):
        same_multiset([{"id": 1, "x": one}], [{"id": 1, "x": other}])


def test_values_that_only_look_different_are_alike():
    east = dt.timezone(dt.timedelta(hours=2))
    assert frozen(math.nan) == frozen(float("nan"))
    assert frozen(Decimal("1.10")) == frozen(Decimal("1.1"))
    assert frozen(dt.datetime(2026, 1, 1, 2, tzinfo=east)) == frozen(dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc))
