"""Count records whose timestamps lie outside of the data interval in whose window they are.

Runs on executors: imports neither Airflow nor pyspark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


def count_out_of_interval(
    timestamps: pa.Int64Array, oldest: int, newest: int, interval: tuple[int, int] | None
) -> tuple[int, int]:
    """Return how many records lie outside of an interval, and the largest distance from it in milliseconds.

    :param timestamps: of the records, in milliseconds since the epoch. A negative one means that a record has none.
    :param oldest: the smallest of them.
    :param newest: the largest of them.
    :param interval: start and end, half-open; None for a window without an interval, outside of which nothing lies.
    """
    import pyarrow.compute as pc

    if interval is None:
        return 0, 0
    start, end = interval
    if start <= oldest and newest < end:
        return 0, 0
    outside = timestamps.filter(pc.or_(pc.less(timestamps, start), pc.greater_equal(timestamps, end)))
    outside = outside.filter(pc.greater_equal(outside, 0))
    if not len(outside):
        return 0, 0
    bounds = pc.min_max(outside).as_py()
    return len(outside), max(start - bounds["min"], bounds["max"] - end)
