"""The driver's side of the other road: rows of a source become records of a topic, as one Spark job.

This is the one place that decides between the two ways to get there: each task reading and encoding its own split, or Spark's JVM
doing both. Byte for byte they write the same records; a task publishes them alike.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from airflow_kafka_spark.errors import Problem, SparkJobFailed, ValidationError
from airflow_kafka_spark.road.job import ReadWith
from airflow_kafka_spark.road.settings import SETTINGS, sql_settings
from airflow_kafka_spark.road.watch import Watch, collect
from airflow_kafka_spark.windows.codec import decode_facts, marker_from_json, result_from_json
from airflow_kafka_spark.windows.model import Marker, SplitResult, Window

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from airflow_kafka_spark.hooks.spark import SparkHook
    from airflow_kafka_spark.road.publish_shaping import RowShaping
    from airflow_kafka_spark.road.tasks.publish import ReadAndPublishTask
    from airflow_kafka_spark.sinks.kafka.sink import KafkaSink
    from airflow_kafka_spark.sinks.kafka.tasks.publish import Publisher
    from airflow_kafka_spark.sources.base import RowSource

log = logging.getLogger(__name__)


@dataclass
class PublishJob:
    """One window of rows on its way to Kafka.

    :param spark: makes the session.
    :param window: the window.
    :param source: where its rows come from.
    :param sink: how they become records.
    :param publisher: publishes a split.
    :param left: the indexes of the splits that are not published yet, ascending.
    :param read_with: ``task``: tasks read and encode their splits themselves (fastest; what reads has to be on the executors);
        ``spark``: the JVM does; ``auto``: ``task`` where that is certain to make the same records, else ``spark``.
    :param shaping: the transforms between them: then the JVM reads; None where there are none.
    """

    spark: SparkHook
    window: Window
    source: RowSource
    sink: KafkaSink
    publisher: Publisher
    left: tuple[int, ...]
    read_with: ReadWith = "auto"
    shaping: RowShaping | None = None
    _watch: Watch = field(init=False, repr=False)
    _doing: str = field(default="published", init=False, repr=False)

    def __post_init__(self) -> None:
        self._watch = Watch(self.spark, self.window, self._progress)

    def run(self) -> tuple[list[Marker], list[SplitResult]]:
        """Publish the splits that are left: one Spark job, one task a split.

        :return: the markers of those that are published, and the accounts of those with rows that do not fit their format and are
            not tolerated, which are not.
        :raises ValidationError: tasks were to read, and cannot; or columns cannot be written.
        :raises SparkJobFailed: when Spark gave up, or was told to.
        :raises KafkaSparkError: what a task raised of ours.
        """
        results = self._told(self.publisher)
        published = [marker_from_json(facts["marker"]) for facts in results if "marker" in facts]
        return published, [result_from_json(facts["rejected"]) for facts in results if "rejected" in facts]

    def count(self) -> list[SplitResult]:
        """Read the splits that are left and count the bad rows: the same job, but nothing is published.

        :return: their accounts; none where every row fits, whatever it holds.
        :raises KafkaSparkError: as :meth:`run` does.
        """
        if self.shaping is None and not self.sink.may_refuse:
            return []
        return [result_from_json(facts["counted"]) for facts in self._told(None)]

    def _told(self, publisher: Publisher | None) -> list[dict[str, Any]]:
        assert self.window.source is not None
        self._doing = "counted" if publisher is None else "published"
        bounds = [self.window.source.splits[index] for index in self.left]
        task = self._reading_task(bounds) if publisher is not None else None
        with reading(self.spark, self.source, by_spark=task is None) as session, self._watch.over(session):
            frame = self._read_by_spark(session, bounds, publisher) if task is None else self._read_by_tasks(session, task)
            try:
                results = collect(frame, self.window)
            except SparkJobFailed as error:
                if error.__cause__ is not None and (explained := self.source.explain(error.__cause__)) is not None:
                    raise explained from error
                raise
        return [decode_facts(result) for result in results]

    def _reading_task(self, bounds: Sequence[Mapping[str, Any]]) -> ReadAndPublishTask | None:
        """Return the task that reads a split by itself; None if Spark has to read. No other place decides this."""
        if self.read_with == "spark" or self.shaping is not None:
            return None
        reader = self.source.reader(bounds, self.sink.columns)
        encoder = reader if isinstance(reader, str) else self.sink.encoder(reader.columns)
        if isinstance(reader, str) or isinstance(encoder, str):
            if self.read_with == "task":
                found = f"tasks cannot read {self.source.uri} by themselves: {encoder}"
                raise ValidationError([Problem("read_with", found, 'Use "auto"')])
            log.info("Spark reads window %s, not each task by itself: %s", self.window, encoder)
            return None
        from airflow_kafka_spark.road.tasks.publish import ReadAndPublishTask

        return ReadAndPublishTask(reader, encoder, self.publisher, self.left)

    def _read_by_tasks(self, session: SparkSession, task: ReadAndPublishTask) -> DataFrame:
        # One row a task: which split it shall read.
        return session.range(0, len(self.left), 1, len(self.left)).mapInArrow(cast(Any, task), "result string")

    def _read_by_spark(
        self, session: SparkSession, bounds: Sequence[Mapping[str, Any]], publisher: Publisher | None
    ) -> DataFrame:
        from airflow_kafka_spark.sinks.kafka.sink import struct_encoders
        from airflow_kafka_spark.sinks.kafka.tasks.encode import KeyValueEncoder
        from airflow_kafka_spark.sinks.kafka.tasks.publish import PublishTask

        rows = self.source.frame(session, bounds)
        if self.shaping is not None:
            policy = publisher.bad_record_policy if publisher is not None else None
            records = self.shaping.records(rows, keep=policy is not None and policy.topic is not None)
            task: PublishTask = self.shaping.task(records, publisher, self.left)
        else:
            records = self.sink.records(rows)
            encoders = struct_encoders(records, self.sink.value_writer, self.sink.key_writer if self.sink.key_columns else None)
            task = PublishTask(publisher, self.left, KeyValueEncoder(encoders))
        if not self.spark.is_connect and (found := records.rdd.getNumPartitions()) != len(bounds):
            raise SparkJobFailed(str(self.window), f"the source gave {found} partitions for {len(bounds)} splits")
        return records.mapInArrow(cast(Any, task), "result string")

    def cancel(self) -> None:
        """Make a running job fail, from another thread or a signal handler; without one, nothing happens."""
        self._watch.cancel()

    def _progress(self, tasks: int, seconds: float) -> str:
        rate = tasks / seconds if seconds else 0.0
        to_go = f", about {(len(self.left) - tasks) / rate:,.0f} s to go" if rate else ""
        return f"Window {self.window}: {tasks} of {len(self.left)} splits {self._doing} after {seconds:.0f} s{to_go}"


@contextmanager
def reading(spark: SparkHook, source: RowSource, *, by_spark: bool = True) -> Iterator[SparkSession]:
    """Open a session in which a source is read.

    :param by_spark: Spark reads it, not each task by itself.
    """
    settings = {**SETTINGS, **source.settings} if by_spark else SETTINGS
    with spark.session(jars=_jars(spark, source) if by_spark else ()) as session, sql_settings(session, settings):
        yield session


def _jars(spark: SparkHook, source: RowSource) -> tuple[str, ...]:
    from airflow_kafka_spark.hooks import jars

    if spark.is_connect or not source.packages:  # a server that is only connected to has its own, and Java
        return ()
    return tuple(map(str, jars.resolve(list(source.packages), exclude_bundled=True)))
