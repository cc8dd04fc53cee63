"""Spark's SQL settings under which rows become records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS: Mapping[str, str] = {
    # A batch is what a task holds at once, and what it hands to the producer.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
    "spark.sql.session.timeZone": "UTC",
}


SMALL_RECORDS = 50_000
"""Records of a window per core, up to which a task may have several splits."""
SMALL_TASKS = 4
"""Tasks per core of such a window."""


def spark_tasks(session: SparkSession, splits: int, records: int, *, is_connect: bool) -> int:
    """Return the number of Spark tasks for the splits of a window: one a split, or four a core if the window is small.

    Each split is still read, written and committed by itself: what is saved is a Spark task for each.

    :param records: the largest number of records that the window can have.
    :param is_connect: the session is a client, which does not know the cores.
    """
    if is_connect:
        return splits
    cores = session.sparkContext.defaultParallelism
    return min(splits, SMALL_TASKS * cores) if records <= SMALL_RECORDS * cores else splits


@contextmanager
def sql_settings(session: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Set SQL settings for the time of one job, since the session may be shared."""
    before = {name: session.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        session.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                session.conf.unset(name)
            else:
                session.conf.set(name, old)
