"""The driver's side of the road between two topics: one Spark job reads partitions and publishes what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from airflow_kafka_spark.errors import Problem, ValidationError
from airflow_kafka_spark.formats.base import Format, spark_column
from airflow_kafka_spark.road.settings import SETTINGS, sql_settings
from airflow_kafka_spark.road.watch import Watch, collect
from airflow_kafka_spark.windows.codec import decode_facts, marker_from_json, result_from_json
from airflow_kafka_spark.windows.model import Marker, PackedSplits, Split, SplitResult, Window

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from airflow_kafka_spark.hooks.spark import SparkHook
    from airflow_kafka_spark.road.columns import Layout
    from airflow_kafka_spark.road.relay_shaping import Reshaping
    from airflow_kafka_spark.road.tasks.tolerance import Tolerance
    from airflow_kafka_spark.sinks.kafka.tasks.publish import Publisher


@dataclass(frozen=True)
class SqlRelay:
    """What becomes of records on their way.

    :param layout: how records become rows; with the columns that carry them on, see ``road/tasks/relay.py``.
    :param filter: a condition of Spark's SQL over a record's columns: those for which it does not hold are left out. Records
        without a value pass it: they delete, and a reader behind has to hear of it.
    :param columns: column -> expression of Spark's SQL: what the new value is made of; None leaves the value's bytes.
    :param value: how it is written.
    :param key: the columns of the new key, among the new columns, or the record's where those are left; empty leaves the key's
        bytes.
    :param key_format: how that is written.
    """

    layout: Layout
    filter: str | None = None
    columns: Mapping[str, str] | None = None
    value: Format | None = None
    key: tuple[str, ...] = ()
    key_format: Format | None = None

    @property
    def is_none(self) -> bool:
        """Return True if records stay as they are. Then no SQL runs."""
        return self.filter is None and self.columns is None and not self.key

    @property
    def may_refuse(self) -> bool:
        """Return True if a new key or value may not fit its format."""
        value, key = self.value if self.columns is not None else None, self.key_format if self.key else None
        return any(format is not None and format.encodes_in_tasks for format in (value, key))

    def results(
        self,
        numbers: DataFrame,
        splits: tuple[Split, ...],
        config: Mapping[str, Any],
        publisher: Publisher | None,
        options: Mapping[str, Any],
    ) -> DataFrame:
        """Return the frame of the tasks' results.

        :param numbers: one row a task, which split it shall read.
        :param config: the consumer's configuration.
        :param publisher: publishes a split; None: they are only counted.
        :param options: further fields of :class:`~airflow_kafka_spark.road.tasks.relay.ReadTask`.
        :raises ValidationError: the filter or an expression is wrong.
        """
        from pyspark.sql.pandas.types import from_arrow_schema

        from airflow_kafka_spark.road.tasks.relay import CopyTask, ReadTask, RelayTask
        from airflow_kafka_spark.sinks.kafka.sink import struct_encoders
        from airflow_kafka_spark.sinks.kafka.tasks.encode import KeyValueEncoder

        packed = PackedSplits.of(splits)
        read = ReadTask(packed, self.layout, config, **options)
        if self.is_none or (publisher is None and not self.may_refuse):
            # What is bad turns out when it is decoded: to count it, no SQL has to run.
            return numbers.mapInArrow(cast(Any, CopyTask(read, publisher)), "result string")
        rows = numbers.mapInArrow(cast(Any, read), from_arrow_schema(read.schema))
        records = changed(rows, self)
        written = self.value if self.columns is not None else None
        encoder = KeyValueEncoder(struct_encoders(records, written, self.key_format if self.key else None))
        task = RelayTask(packed, publisher, encoder=encoder, tolerance=options.get("tolerance"))
        return records.mapInArrow(cast(Any, task), "result string")


@dataclass
class RelayJob:
    """One window on its way from topics to a topic.

    :param spark: makes the session.
    :param window: the window.
    :param left: its splits that are not published yet.
    :param change: what becomes of records, and how they become rows for it.
    :param publisher: publishes a split.
    :param reading: the consumer's configuration.
    :param skip_lost: pass over records that were deleted meanwhile.
    :param patience: seconds without progress after which the broker is given up.
    :param tolerance: what becomes of bad records; None: a split that holds one is not published.
    """

    spark: SparkHook
    window: Window
    left: tuple[Split, ...]
    change: SqlRelay | Reshaping
    publisher: Publisher
    reading: Mapping[str, Any] = field(repr=False)
    skip_lost: bool = False
    patience: float = 300.0
    tolerance: Tolerance | None = None
    _watch: Watch = field(init=False, repr=False)
    _doing: str = field(default="published", init=False, repr=False)

    def __post_init__(self) -> None:
        self._watch = Watch(self.spark, self.window, self._progress)

    def run(self) -> tuple[list[Marker], list[SplitResult]]:
        """Publish the splits that are left: one Spark job, one task a split.

        :return: the markers of those that are published, and the accounts of those with bad records that are not tolerated, which
            are not.
        :raises ValidationError: the filter, an expression or a transform is wrong.
        :raises SparkJobFailed: when Spark gave up, or was told to.
        :raises KafkaSparkError: what a task raised of ours.
        """
        results = self._told(self.publisher)
        published = [marker_from_json(facts["marker"]) for facts in results if "marker" in facts]
        return published, [result_from_json(facts["rejected"]) for facts in results if "rejected" in facts]

    def count(self) -> list[SplitResult]:
        """Read the splits that are left and count what is bad among them: the same job, but nothing is published.

        :raises KafkaSparkError: as :meth:`run` does.
        """
        return [result_from_json(facts["counted"]) for facts in self._told(None)]

    def _told(self, publisher: Publisher | None) -> list[dict[str, Any]]:
        self._doing = "counted" if publisher is None else "published"
        with self.spark.session() as session, sql_settings(session, SETTINGS), self._watch.over(session):
            return [decode_facts(text) for text in collect(self._frame(session, publisher), self.window)]

    def cancel(self) -> None:
        """Make a running job fail, from another thread or a signal handler; without one, nothing happens."""
        self._watch.cancel()

    def _frame(self, session: SparkSession, publisher: Publisher | None) -> DataFrame:
        tolerance = self.tolerance
        if tolerance is not None and publisher is None:
            tolerance = replace(tolerance, keep=False)
        options = {"skip_lost": self.skip_lost, "patience": self.patience, "tolerance": tolerance}
        # One row a task: which split it shall read.
        numbers = session.range(0, len(self.left), 1, len(self.left))
        return self.change.results(numbers, self.left, self.reading, publisher, options)

    def _progress(self, tasks: int, seconds: float) -> str:
        return f"Window {self.window}: {tasks} of {len(self.left)} partitions {self._doing} after {seconds:.0f} s"


def changed(rows: DataFrame, change: SqlRelay) -> DataFrame:
    """Return a split's rows as records. The last row stays as it is.

    :raises ValidationError: the filter or an expression is wrong, with what Spark says of it.
    """
    from pyspark.errors import AnalysisException, ParseException
    from pyspark.sql import functions as F

    from airflow_kafka_spark.formats.internal_columns import END
    from airflow_kafka_spark.road.tasks.relay import HEADERS, KEY, PARTITION, TIMESTAMP, TOMBSTONE, VALUE
    from airflow_kafka_spark.road.tasks.transform_rows import OFFSET, ORIGINAL

    is_record = F.col(END).isNull()
    originals = [name for name in rows.columns if name in (OFFSET, *ORIGINAL.values())]
    carried = [name for name in rows.columns if name in (END, HEADERS, KEY, PARTITION, TIMESTAMP, TOMBSTONE, VALUE)]
    carried += originals
    where = "filter"
    try:
        if change.filter is not None:
            rows = rows.where(~is_record | F.col(TOMBSTONE) | F.expr(change.filter))
            _ = rows.schema  # Spark Connect says what is wrong only when it is asked
        where = "columns"
        if change.columns is not None:
            # Not computed for the row that ends a split: it holds nothing that could be computed with.
            new = [F.when(is_record & ~F.col(TOMBSTONE), F.expr(text)).alias(name) for name, text in change.columns.items()]
            kept = [spark_column(name) for name in change.key if name not in change.columns]
            rows = rows.select(*new, *kept, *carried)
            _ = rows.schema
    except (AnalysisException, ParseException) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValidationError([Problem(where, f"Spark's SQL does not understand it: {reason}", "Correct it")]) from None
    value: Column = F.col(VALUE) if VALUE in carried else F.lit(None).cast("binary")
    if change.columns is not None and change.value is not None:
        value = F.when(is_record & ~F.col(TOMBSTONE), change.value.encode(list(change.columns)))
    key = F.col(KEY) if KEY in carried else F.lit(None).cast("binary")
    if change.key and change.key_format is not None:
        key = F.when(is_record, change.key_format.encode(change.key))
    records = [key.alias("key"), value.alias("value")]
    if TIMESTAMP in carried:
        records.append(F.unix_millis(F.col(TIMESTAMP)).alias("timestamp"))
    if HEADERS in carried:
        records.append(F.col(HEADERS).alias("headers"))
    if PARTITION in carried:
        records.append(F.col(PARTITION).alias("partition"))
    return rows.select(*records, *originals, F.col(END))
