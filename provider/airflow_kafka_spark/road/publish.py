"""The driver's side of the other road: rows of a source become records of a topic, as one Spark job."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from airflow_kafka_spark.errors import SparkJobFailed
from airflow_kafka_spark.road.watch import Watch, collect
from airflow_kafka_spark.windows.codec import decode_facts, marker_from_json
from airflow_kafka_spark.windows.model import Marker, Window

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from airflow_kafka_spark.hooks.spark import SparkHook
    from airflow_kafka_spark.sinks.kafka import KafkaSink
    from airflow_kafka_spark.sinks.kafka_worker import Publisher
    from airflow_kafka_spark.sources.base import RowSource

log = logging.getLogger(__name__)

SETTINGS: Mapping[str, str] = {
    # A batch is what a task holds at once, and what it hands to the producer.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
    "spark.sql.session.timeZone": "UTC",
}


@dataclass
class PublishJob:
    """One window of rows on its way to Kafka.

    :param spark: makes the session.
    :param window: the window.
    :param source: where its rows come from.
    :param sink: how they become records.
    :param publisher: publishes a split.
    :param left: the indexes of the splits that are not published yet, ascending.
    """

    spark: SparkHook
    window: Window
    source: RowSource
    sink: KafkaSink
    publisher: Publisher
    left: tuple[int, ...]
    _watch: Watch = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._watch = Watch(self.spark, self.window, self._progress)

    def run(self) -> list[Marker]:
        """Publish the splits that are left: one Spark job, one task a split.

        :return: their markers.
        :raises SparkJobFailed: when Spark gave up, or was told to.
        :raises KafkaSparkError: what a task raised of ours.
        """
        from airflow_kafka_spark.hooks import jars
        from airflow_kafka_spark.sinks.kafka_worker import PublishTask

        assert self.window.source is not None
        bounds = [self.window.source.splits[index] for index in self.left]
        task = PublishTask(self.publisher, self.left)
        needed = tuple(map(str, jars.resolve(list(self.source.packages), exclude_bundled=True))) if self.source.packages else ()
        with (
            self.spark.session(jars=needed) as session,
            _settings(session, {**SETTINGS, **self.source.settings}),
            self._watch.over(session),
        ):
            records = self.sink.records(self.source.frame(session, bounds))
            if not self.spark.is_connect and (found := records.rdd.getNumPartitions()) != len(bounds):
                raise SparkJobFailed(str(self.window), f"the source gave {found} partitions for {len(bounds)} splits")
            try:
                results = collect(records.mapInArrow(cast(Any, task), "result string"), self.window)
            except SparkJobFailed as error:
                if error.__cause__ is not None and (explained := self.source.explain(error.__cause__)) is not None:
                    raise explained from error
                raise
        return [marker_from_json(decode_facts(result)["marker"]) for result in results]

    def cancel(self) -> None:
        """Make a running job fail, from another thread or a signal handler; without one, nothing happens."""
        self._watch.cancel()

    def _progress(self, tasks: int, seconds: float) -> str:
        rate = tasks / seconds if seconds else 0.0
        to_go = f", about {(len(self.left) - tasks) / rate:,.0f} s to go" if rate else ""
        return f"Window {self.window}: {tasks} of {len(self.left)} splits published after {seconds:.0f} s{to_go}"


@contextmanager
def _settings(session: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """SQL settings for the time of one job: the session may be shared."""
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
