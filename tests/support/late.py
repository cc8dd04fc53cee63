"""Sinks that call a function between the driver's look at the topics and the first split of a window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from airflow_kafka_spark.sinks import FilesSink, PostgresSink
from airflow_kafka_spark.sinks.base import Sink


@dataclass(frozen=True, kw_only=True)
class LateSink(Sink):
    """A sink that calls a function before its first split: when the sink begins, the driver has already compared the log."""

    before: Callable[[], None]

    def begin(self, window, splits, shape):
        self.before()
        return super().begin(window, splits, shape)


@dataclass(frozen=True, kw_only=True)
class LateFilesSink(LateSink, FilesSink):
    """Files."""


@dataclass(frozen=True, kw_only=True)
class LatePostgresSink(LateSink, PostgresSink):
    """A table of PostgreSQL."""
