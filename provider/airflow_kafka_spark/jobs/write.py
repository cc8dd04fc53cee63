"""The driver's side of writing to a sink: decide how a window is read, run it as one Spark job, and watch it.

Only this module decides between the two ways of reading: each task reads its own frozen range with confluent-kafka,
or Spark's Kafka source. All later steps are shared.
"""

from __future__ import annotations

import json
import logging
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from airflow_kafka_spark.errors import SparkJobFailed
from airflow_kafka_spark.jobs.chain import SETTINGS, use_sql_settings
from airflow_kafka_spark.jobs.watch import Watch, collect, format_job_progress, name_split, run_per_split
from airflow_kafka_spark.windows.codec import decode_result
from airflow_kafka_spark.windows.model import OffsetRange, PackedSplits, Split, SplitResult, Window

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.hooks.spark.hook import SparkHook
    from airflow_kafka_spark.jobs.chain import SinkChain
    from airflow_kafka_spark.jobs.tasks.layout import RowLayout
    from airflow_kafka_spark.jobs.tasks.read import Reading, ReadTask
    from airflow_kafka_spark.jobs.tasks.write import OtherSink, WriteTask
    from airflow_kafka_spark.sinks.base import SplitWriter

log = logging.getLogger(__name__)

ReadWith = Literal["auto", "task", "spark"]

SPARK_SOURCE: Mapping[str, str] = {
    "kafka.max.poll.records": "10000",
    "kafka.max.partition.fetch.bytes": str(8 << 20),
    "kafka.fetch.min.bytes": str(1 << 20),
    "kafka.fetch.max.wait.ms": "100",
}
"""Settings of Spark's Kafka source under the connection's own."""


@dataclass(kw_only=True)
class SinkJob(ABC):
    """The Spark job that writes one window to a sink.

    :param spark: makes the session.
    :param window: the window.
    :param splits: its splits.
    :param reading: the options of reading.
    """

    spark: SparkHook
    window: Window
    splits: tuple[Split, ...]
    reading: Reading
    _watch: Watch = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._watch = Watch(self.spark, self.window, self._describe_progress, self._name_task)

    def _describe_progress(self, tasks: int, seconds: float) -> str:
        return format_job_progress(self.window, self.splits, tasks, seconds)

    def _name_task(self, number: int) -> str:
        """Return the name of a task of the job for users."""
        return name_split(self.splits[number])

    @abstractmethod
    def run(self, writer: SplitWriter) -> list[SplitResult]:
        """Read the window and pass it to the sink's writer: one Spark job, one action.

        :return: one result for each split, in the order of their indexes.
        :raises SparkJobFailed: the job failed or was cancelled.
        :raises KafkaSparkError: the error of a task.
        """

    def cancel(self) -> None:
        """Make a running job fail, from another thread or a signal handler; without one, nothing happens."""
        self._watch.cancel()


@dataclass(kw_only=True)
class RowJob(SinkJob):
    """Each task reads, decodes and writes its split.

    :param kafka: the cluster that is read.
    :param layout: converts records to rows.
    :param read_with: ``task``: each task reads its range itself (fastest, and needs confluent-kafka on the executors); ``spark``:
        Spark's Kafka source; ``auto``: ``task``.
    """

    kafka: KafkaHook
    layout: RowLayout
    read_with: ReadWith = "auto"

    @property
    def reads_with_spark(self) -> bool:
        """True if Spark's Kafka source reads. This is decided only here."""
        return self.read_with == "spark"

    def _name_task(self, number: int) -> str:
        # Spark's source makes partitions of its own.
        return f"task {number}" if self.reads_with_spark else super()._name_task(number)

    def run(self, writer: SplitWriter) -> list[SplitResult]:
        from airflow_kafka_spark.jobs.tasks.read import ReadTask
        from airflow_kafka_spark.jobs.tasks.write import WriteTask

        splits, tolerance = PackedSplits.of(self.splits), self.reading.tolerance
        read = ReadTask(splits, self.layout, self.reading)
        task = WriteTask(splits, self.layout.schema, writer, tolerance=tolerance, read=read, from_spark=self.reads_with_spark)
        if self.reads_with_spark:
            with self.spark.open_session(jars=self._resolve_jars()) as session, self._watch.report_progress(session):
                rows = collect(self._make_kafka_frame(session).mapInArrow(task, "result string"), self.window)
        else:
            with self.spark.open_without_sql() as spark, self._watch.report_progress(spark):
                rows = collect(run_per_split(spark, task, len(self.splits)), self.window)
        return self._complete([decode_result(row) for row in rows], task)

    def _resolve_jars(self) -> tuple[str, ...]:
        from airflow_kafka_spark.hooks.spark import jars

        return tuple(map(str, jars.resolve_jars([jars.find_spark_kafka_connector()], exclude_bundled=True)))

    def _make_kafka_frame(self, session: SparkSession) -> DataFrame:
        """Return Spark's Kafka source over exactly the window's offsets: never a subscription, never "latest"."""
        java = self.kafka.make_java_config(inline_files=not self.spark.is_local)
        options = {
            **SPARK_SOURCE,
            **{f"kafka.{name}": value for name, value in java.options.items()},
            "kafka.isolation.level": "read_committed",
            "assign": _format_by_topic(self.splits, lambda r: None),
            "startingOffsets": _format_by_topic(self.splits, lambda r: r.start),
            "endingOffsets": _format_by_topic(self.splits, lambda r: r.end),
            "failOnDataLoss": "true",
            "includeHeaders": str(self.layout.wants_headers or self.reading.keeps).lower(),
            "groupIdPrefix": f"airflow-kafka-spark-{self.window.id}",
        }
        return session.read.format("kafka").options(**options).load()

    def _complete(self, results: list[SplitResult], task: WriteTask) -> list[SplitResult]:
        """Return one result for each split. Spark's source reports nothing for a range without records, so such a split is
        written here, empty.
        """
        from airflow_kafka_spark.jobs.tasks.read import SplitRows

        found = {result.index: result for result in results}
        for split in self.splits:
            if split.index not in found:
                copy: WriteTask = pickle.loads(pickle.dumps(task))
                assert copy.read is not None
                found[split.index] = decode_result(copy.write(SplitRows(copy.read, split, ())))
        return [found[split.index] for split in self.splits]


@dataclass(kw_only=True)
class ChainJob(SinkJob):
    """A job with transforms. Tasks read, transform and write in Arrow if Arrow's results are equal to those of Spark's SQL; else
    Spark's SQL runs between reading and writing. :meth:`run` also raises ValidationError if a transform does not fit the records.

    :param chain: converts records to rows.
    :param schema: the rows' columns, as in the sink's :class:`.Shape`.
    :param others: the sinks that the chain's filters send rows to, in the order of these filters.
    """

    chain: SinkChain
    schema: pa.Schema
    others: tuple[OtherSink, ...] = ()

    def run(self, writer: SplitWriter) -> list[SplitResult]:
        with self.spark.open_without_sql() as spark, self._watch.report_progress(spark):
            results = self._collect_results(spark, writer)
        found = sorted((decode_result(text) for text in results), key=lambda result: result.index)
        if [result.index for result in found] != [split.index for split in self.splits]:
            returned = f"{len(found)} of {len(self.splits)} splits have returned a result"
            cause = "a function among the transforms left out or moved records. Leave records out with Filter or Sql"
            raise SparkJobFailed(str(self.window), f"{returned}: {cause}", retryable=False)
        return found

    def _collect_results(self, spark: SparkContext | SparkSession, writer: SplitWriter) -> list[str]:
        """Return the results of the tasks.

        :param spark: Spark, which is started.
        """
        from airflow_kafka_spark.jobs.tasks.write import WriteTask

        read = self.chain.make_read_task(self.splits, self.reading)
        write = WriteTask(read.splits, self.schema, writer, self.chain.null_values, self.reading.tolerance, others=self.others)
        plan = self.chain.plan(self.spark)
        program = plan.make_program_for(read)
        if program is not None:
            read = self.chain.make_partial_read_task(read, program.columns)
            task = replace(write, read=read, program=program)
            return collect(run_per_split(spark, task, len(self.splits)), self.window)
        line = "Window %s: Spark's SQL transforms its records, not each task in Arrow: no %s there"
        log.info(line, self.window, plan.unknown)
        with self.spark.open_session() as session, use_sql_settings(session, SETTINGS):
            return collect(self._make_frame(session, read, write), self.window)

    def _make_frame(self, session: SparkSession, read: ReadTask, write: WriteTask) -> DataFrame:
        """Return the results of tasks that read, of Spark's SQL, and of tasks that write."""
        from pyspark.sql.pandas.types import from_arrow_schema

        # One row for each task: the number of its split.
        numbers = session.range(0, len(self.splits), 1, len(self.splits))
        records = numbers.mapInArrow(read, from_arrow_schema(read.schema))
        rows = self.chain.apply(records)
        # In the name of a column that it maps, Spark takes a dot as a path; Flatten makes names with dots.
        plain = [name if name.startswith("__kafka_") else f"column{n}" for n, name in enumerate(rows.columns)]
        write = replace(write, names=dict(zip(plain, rows.columns, strict=True)))
        return rows.toDF(*plain).mapInArrow(write, "result string")


def _format_by_topic(splits: Sequence[Split], value: Callable[[OffsetRange], int | None]) -> str:
    """Return JSON for Spark's source: ``{"topic": {"0": offset}}``, or ``{"topic": [0]}`` if ``value`` returns None."""
    topics: dict[str, dict[str, Any]] = {}
    for split in splits:
        topics.setdefault(split.range.topic, {})[str(split.range.partition)] = value(split.range)
    if all(v is None for partitions in topics.values() for v in partitions.values()):
        return json.dumps({topic: sorted(map(int, partitions)) for topic, partitions in topics.items()})
    return json.dumps(topics)
