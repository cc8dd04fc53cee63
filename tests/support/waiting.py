"""Waiting for something to be found."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from airflow_kafka_spark.testing._processes import wait_until

T = TypeVar("T")


def eventually(look: Callable[[], T], seconds: float = 180.0) -> T:
    """What ``look`` finds once it finds something; it is asked again until then."""
    found: list[T] = []

    def is_there() -> bool:
        found[:] = [look()]
        return bool(found[0])

    assert wait_until(is_there, seconds, every=0.1), "it did not happen in time"
    return found[0]
