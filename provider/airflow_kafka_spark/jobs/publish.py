"""The driver's side of publishing: run a window as one Spark job whose tasks publish its splits, and watch it.

:class:`TopicJob` publishes records of other topics: copied, computed by SQL (:class:`SqlProjection`), or transformed
(:class:`~airflow_kafka_spark.jobs.chain.TopicChain`). :class:`SourceJob` publishes the rows of a source. It decides between the
two ways to read them: each task reads and encodes its own split, or Spark's JVM does both. Both ways write byte for byte equal
records.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from airflow_kafka_spark.errors import Problem, SparkJobFailed, SparkReadRequired, ValidationError
from airflow_kafka_spark.formats.base import (
    END,
    HEADERS,
    KEY,
    OFFSET,
    ORIGINAL,
    PARTITION,
    TIMESTAMP,
    TOMBSTONE,
    VALUE,
    Format,
    as_struct,
    make_spark_column,
)
from airflow_kafka_spark.jobs.chain import SETTINGS, Plan, use_sql_settings
from airflow_kafka_spark.jobs.watch import Watch, collect, name_split, run_per_split
from airflow_kafka_spark.jobs.write import ReadWith
from airflow_kafka_spark.sinks.kafka.sink import EncodedBySpark
from airflow_kafka_spark.transforms.chain import describe_sql_refusal
from airflow_kafka_spark.windows.codec import decode_facts, marker_from_json, result_from_json
from airflow_kafka_spark.windows.model import Marker, PackedSplits, Split, SplitResult, Window

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

    from airflow_kafka_spark.hooks.spark.hook import SparkHook
    from airflow_kafka_spark.jobs.chain import SourceChain, TopicChain
    from airflow_kafka_spark.jobs.plan_cache import PlanFile
    from airflow_kafka_spark.jobs.tasks.arrow import Program
    from airflow_kafka_spark.jobs.tasks.layout import RowLayout
    from airflow_kafka_spark.jobs.tasks.publish import PublishTask, Sorting
    from airflow_kafka_spark.jobs.tasks.read import Reading, ReadTask
    from airflow_kafka_spark.sinks.kafka.sink import KafkaSink
    from airflow_kafka_spark.sinks.kafka.tasks.encode import KeyValueEncoder
    from airflow_kafka_spark.sinks.kafka.tasks.publish import Publisher
    from airflow_kafka_spark.sources.base import RowSource

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class PublishJob(ABC):
    """The Spark job that publishes one window to a topic.

    :param spark: makes the session.
    :param window: the window.
    :param publisher: publishes a split.
    """

    spark: SparkHook
    window: Window
    publisher: Publisher
    _watch: Watch = field(init=False, repr=False)
    _doing: str = field(default="published", init=False, repr=False)

    def __post_init__(self) -> None:
        self._watch = Watch(self.spark, self.window, self._describe_progress, self._name_task)

    def run(self) -> tuple[list[Marker], list[SplitResult]]:
        """Publish the splits that are left: one Spark job, one task a split.

        :return: the markers of the published splits, and the accounts of splits that were not published because they have bad
            records that are not tolerated.
        :raises ValidationError: an expression or a transform is wrong, or columns cannot be written.
        :raises SparkJobFailed: the job failed or was cancelled.
        :raises KafkaSparkError: the error of a task.
        """
        results = self._collect_results(self.publisher)
        published = [marker_from_json(facts["marker"]) for facts in results if "marker" in facts]
        return published, [result_from_json(facts["rejected"]) for facts in results if "rejected" in facts]

    def count(self) -> list[SplitResult]:
        """Read the splits that are left and count their bad records, in a job that publishes nothing.

        :return: their accounts; empty if no record can be bad.
        :raises KafkaSparkError: as :meth:`run` does.
        """
        return [result_from_json(facts["counted"]) for facts in self._collect_results(None)]

    def cancel(self) -> None:
        """Make a running job fail, from another thread or a signal handler; without one, nothing happens."""
        self._watch.cancel()

    def _collect_results(self, publisher: Publisher | None) -> list[dict[str, Any]]:
        """Return the results of the tasks.

        :param publisher: None: records are only counted.
        """
        self._doing = "counted" if publisher is None else "published"
        task = self._make_reading_task(publisher)
        if task is not None:
            with self.spark.open_without_sql() as spark, self._watch.report_progress(spark):
                results = self._collect(run_per_split(spark, task, self.split_count))
        else:
            with self._open_session() as session, self._watch.report_progress(session):
                results = self._collect(self._make_frame(session, publisher))
        return [decode_facts(text) for text in results]

    def _collect(self, results: RDD[str] | DataFrame) -> list[str]:
        return collect(results, self.window)

    @property
    @abstractmethod
    def split_count(self) -> int:
        """The number of splits that are left."""

    @abstractmethod
    def _name_task(self, number: int) -> str:
        """Return the name of a task of the job for users."""

    @abstractmethod
    def _make_reading_task(self, publisher: Publisher | None) -> PublishTask | None:
        """Return the task that reads a split by itself; None if Spark's SQL has to take part. This is decided only here."""

    @abstractmethod
    def _open_session(self) -> AbstractContextManager[SparkSession]:
        """Open the session in which a job with SQL runs."""

    @abstractmethod
    def _make_frame(self, session: SparkSession, publisher: Publisher | None) -> RDD[str] | DataFrame:
        """Return the results of a job that needs a session: Spark's SQL runs in it, or has compiled what runs in its tasks."""

    def _describe_progress(self, tasks: int, seconds: float) -> str:
        rate = tasks / seconds if seconds else 0.0
        to_go = f", about {(self.split_count - tasks) / rate:,.0f} s to go" if rate else ""
        return f"Window {self.window}: {tasks} of {self.split_count} splits {self._doing} after {seconds:.0f} s{to_go}"


# --- from topics ----------------------------------------------------------------------------


@dataclass(kw_only=True)
class TopicJob(PublishJob):
    """The Spark job that publishes one window of records of other topics.

    :param left: its splits that are not published yet.
    :param change: the copy, the SQL or the transforms that turn the records that are read into those that are published.
    :param plan: the plan of that change; None if it was not checked: the job then makes it.
    :param reading: the options of reading. Without a tolerance a split with a bad record is not published.
    """

    left: tuple[Split, ...]
    change: SqlProjection | TopicChain
    plan: TopicPlan | None
    reading: Reading

    @property
    def split_count(self) -> int:
        return len(self.left)

    def _name_task(self, number: int) -> str:
        return name_split(self.left[number])

    @contextmanager
    def _open_session(self) -> Iterator[SparkSession]:
        with self.spark.open_session() as session, use_sql_settings(session, SETTINGS):
            yield session

    def _make_reading_task(self, publisher: Publisher | None) -> PublishTask | None:
        if isinstance(self.change, SqlProjection):
            copying = self.change.make_copying_task(self.left, self._make_reading(publisher), publisher)
            if copying is not None:
                return copying
        # Counting and publishing are two jobs, and share it.
        self.plan = self.plan or find_kept_plan(self.change, self.spark)
        return self._make_changing_task(publisher, self.plan) if self.plan is not None else None

    def _make_changing_task(self, publisher: Publisher | None, plan: TopicPlan) -> PublishTask | None:
        """Return the task that reads, changes and publishes splits in Arrow; None if Spark's SQL has to change them."""
        from airflow_kafka_spark.jobs.tasks.publish import KafkaSplits, PublishTask

        reading = self._make_reading(publisher)
        read, unknown = self.change.make_read_task(self.left, reading), plan.unknown
        try:
            if (program := plan.make_program_for(read)) is not None:
                sorting = self._make_sorting(plan.records, plan.formats, reading)
                source = KafkaSplits(self.change.make_partial_read_task(read, program.columns), program)
                return PublishTask(publisher, read.splits, sorting, source)
        except EncodedBySpark as reason:
            unknown = str(reason)
        log.info("Window %s: Spark's SQL transforms its records, not each task in Arrow: no %s there", self.window, unknown)
        return None

    def _make_frame(self, session: SparkSession, publisher: Publisher | None) -> RDD[str] | DataFrame:
        from pyspark.sql.pandas.types import from_arrow_schema

        from airflow_kafka_spark.jobs.tasks.publish import PublishTask

        if self.plan is None:
            plan = plan_in_session(session, self.change)
            if (made := self._make_changing_task(publisher, plan)) is not None:
                return run_per_split(session, made, self.split_count)
        reading = self._make_reading(publisher)
        read = self.change.make_read_task(self.left, reading)
        # One row for each task: the number of its split.
        numbers = session.range(0, self.split_count, 1, self.split_count)
        records = numbers.mapInArrow(read, from_arrow_schema(read.schema))
        changed, formats = self.change.make_records(records, in_tasks=False)
        task = PublishTask(publisher, read.splits, self._make_sorting(changed.schema, formats, reading))
        return changed.mapInArrow(task, "result string")

    def _make_sorting(self, records: StructType, formats: Mapping[str, Format | None], reading: Reading) -> Sorting:
        """Return the sorting and encoding of records in tasks. A schema registry is asked.

        :param records: their columns.
        :raises EncodedBySpark: the tasks cannot encode a column.
        """
        from airflow_kafka_spark.sinks.kafka.sink import make_struct_encoders
        from airflow_kafka_spark.sinks.kafka.tasks.encode import KeyValueEncoder

        encoder = KeyValueEncoder(make_struct_encoders(records, formats.get("value"), formats.get("key")))
        return self.change.make_sorting(encoder, formats, reading)

    def _make_reading(self, publisher: Publisher | None) -> Reading:
        if self.reading.tolerance is not None and publisher is None:
            return replace(self.reading, tolerance=replace(self.reading.tolerance, keep=False))
        return self.reading


@dataclass(frozen=True)
class TopicPlan(Plan):
    """The plan of a change of records that are published.

    :param records: the columns of the records that are published. Keys and values that change are structs.
    :param formats: the formats of the parts that change.
    :param program: the change as an Arrow program; None if Spark has to compute it.
    :param unknown: the first expression that has no implementation in Arrow; empty if all have one.
    """

    records: StructType
    formats: Mapping[str, Format | None]
    program: Program | None = None
    unknown: str = ""

    def remove_schemas(self) -> TopicPlan:
        """Return the plan with formats that have loaded no schemas."""
        return replace(self, formats={part: format and replace(cast(Any, format)) for part, format in self.formats.items()})

    def use_formats(self, given: Mapping[str, Format | None]) -> TopicPlan:
        """Return the plan with these formats in place of equal ones, because they may have loaded schemas."""
        known = [format for format in given.values() if format is not None]
        formats = {part: next((g for g in known if g == format), format) for part, format in self.formats.items()}
        return replace(self, formats=formats)


def check_change(change: SqlProjection | TopicChain, spark: SparkHook) -> TopicPlan:
    """Let Spark analyze SQL or transforms, and return the plan, so that the job need not do it again. No record is read, and no
    schema is registered. Spark is not started if a task has analyzed an equal change before (``plan_cache.py``).

    :raises ValidationError: an expression or a transform is wrong, or its result cannot be written.
    :raises KafkaSparkError: a schema registry does not answer.
    """
    from airflow_kafka_spark.sinks.kafka.sink import can_encode_in_tasks

    # Its name is found before a session is started, which may add settings.
    file = _find_plan_file(change, spark)
    if (kept := _load_plan(file, change)) is not None:
        return kept
    with spark.open_session() as session, use_sql_settings(session, SETTINGS):
        plan = plan_in_session(session, change)
    encodings = plan.formats.get("value"), plan.formats.get("key")
    if file is not None and plan.program is not None and can_encode_in_tasks(plan.records, *encodings):
        file.keep(plan.remove_schemas())
    return plan


def find_kept_plan(change: SqlProjection | TopicChain, spark: SparkHook) -> TopicPlan | None:
    """Return the plan of an equal change that an earlier task has kept; None if no task has kept one. Spark is not started.

    :raises ValidationError: the result cannot be written with the formats' schemas of today.
    :raises KafkaSparkError: a schema registry does not answer.
    """
    return _load_plan(_find_plan_file(change, spark), change)


def _find_plan_file(change: SqlProjection | TopicChain, spark: SparkHook) -> PlanFile | None:
    from airflow_kafka_spark.jobs.plan_cache import PlanFile

    return PlanFile.find(spark, (type(change).__name__, change.definition), _make_whole_read_task(change).schema)


def _load_plan(file: PlanFile | None, change: SqlProjection | TopicChain) -> TopicPlan | None:
    if file is None or not isinstance(kept := file.load(), TopicPlan):
        return None
    plan = kept.use_formats(change.written_formats)
    _refuse_unwritable(plan.records, plan.formats)
    return plan


def plan_in_session(session: SparkSession, change: SqlProjection | TopicChain) -> TopicPlan:
    """Return the plan of a change, as :func:`check_change`, from Spark's analysis."""
    from pyspark.errors import AnalysisException
    from pyspark.sql.pandas.types import from_arrow_schema

    from airflow_kafka_spark.jobs.arrow import Unknown, make_program
    from airflow_kafka_spark.sinks.kafka.sink import can_encode_in_tasks

    read = _make_whole_read_task(change)
    empty = session.createDataFrame([], from_arrow_schema(read.schema))
    changed, formats = change.make_records(empty, in_tasks=True)
    columns = changed.schema
    _refuse_unwritable(columns, formats)
    try:
        plan = TopicPlan(columns, formats, make_program(changed, read.schema))
    except Unknown as reason:
        plan = TopicPlan(columns, formats, unknown=str(reason))
    if plan.program is None or not can_encode_in_tasks(columns, formats.get("value"), formats.get("key")):
        try:
            _ = change.make_records(empty, in_tasks=False)[0].schema
        except AnalysisException as error:
            found = f"the columns cannot be written in its format. {describe_sql_refusal(error)}"
            raise ValidationError([Problem("sink", found, "Choose another format, or cast the columns")]) from None
    return plan


def _make_whole_read_task(change: SqlProjection | TopicChain) -> ReadTask:
    """Return a task with all columns that a job may carry."""
    from airflow_kafka_spark.jobs.tasks.account import Tolerance
    from airflow_kafka_spark.jobs.tasks.read import Reading

    return change.make_read_task((), Reading(tolerance=Tolerance()))


def _refuse_unwritable(records: StructType, formats: Mapping[str, Format | None]) -> None:
    """Refuse records whose keys or values cannot be written in their formats. Asks a registry, and changes nothing there.

    :raises ValidationError: some cannot be written.
    :raises KafkaSparkError: a schema registry does not answer.
    """
    from airflow_kafka_spark.sinks.kafka.sink import find_struct_problems

    problems = [p for part in ("value", "key") for p in _find_type_problems(part, records[part].dataType)]
    if problems := problems or find_struct_problems(records, formats.get("value"), formats.get("key")):
        raise ValidationError(problems)


def _find_type_problems(part: str, found: DataType) -> list[Problem]:
    """Return the columns of a new key or value that have no type."""
    nulls = [f.name for f in getattr(found, "fields", ()) if f.dataType.typeName() == "void"]
    what, action = "it is NULL for each record, so it has no type", "Give it one, as `cast(NULL AS string)`"
    return [Problem(f"columns.{name}" if part == "value" else f"sink.key `{name}`", what, action) for name in nulls]


@dataclass(frozen=True)
class SqlProjection:
    """A filter and expressions of Spark's SQL over records.

    :param layout: makes rows of records, with the columns that carry a record past the SQL (``formats/base.py``).
    :param filter: a condition of Spark's SQL over a record's columns; records for which it is not true are left out. Records
        without a value always pass, because readers of the topic need them as deletes.
    :param columns: column of the new value -> expression of Spark's SQL; None leaves the value's bytes.
    :param value: the format of the new value.
    :param key: the columns of the new key, of the new columns or of the record's if ``columns`` is None; empty keeps the key's
        bytes.
    :param key_format: the format of the new key.
    """

    layout: RowLayout
    filter: str | None = None
    columns: Mapping[str, str] | None = None
    value: Format | None = None
    key: tuple[str, ...] = ()
    key_format: Format | None = None

    @property
    def definition(self) -> tuple[object, ...]:
        """Everything that the plan depends on besides the columns that are read."""
        return self.filter, self.columns, self.value, self.key, self.key_format

    @property
    def written_formats(self) -> Mapping[str, Format | None]:
        """The formats of the new value and the new key."""
        return {"value": self.value, "key": self.key_format}

    @property
    def is_identity(self) -> bool:
        """True if all records stay unchanged, so that no SQL runs."""
        return self.filter is None and self.columns is None and not self.key

    @property
    def may_refuse(self) -> bool:
        """True if a new key or value may not fit its format."""
        value, key = self.value if self.columns is not None else None, self.key_format if self.key else None
        return any(format is not None and format.encodes_in_tasks for format in (value, key))

    def make_copying_task(self, splits: tuple[Split, ...], reading: Reading, publisher: Publisher | None) -> PublishTask | None:
        """Return the task that reads and publishes splits without SQL; None if SQL changes records.

        :param publisher: publishes a split; None: they are only counted.
        """
        from airflow_kafka_spark.jobs.tasks.publish import KafkaSplits, PublishTask, Sorting

        # Records turn out to be bad when they are decoded, so counting them needs no SQL.
        if not (self.is_identity or (publisher is None and not self.may_refuse)):
            return None
        read = self.make_read_task(splits, reading)
        return PublishTask(publisher, read.splits, Sorting(tolerance=reading.tolerance), KafkaSplits(read))

    def make_read_task(self, splits: tuple[Split, ...], reading: Reading) -> ReadTask:
        """Return the task that reads splits."""
        from airflow_kafka_spark.jobs.tasks.read import ReadTask

        return ReadTask(PackedSplits.of(splits), self.layout, reading)

    def make_partial_read_task(self, read: ReadTask, columns: frozenset[str]) -> ReadTask:
        """Return the whole task, because the columns of a value are decoded together."""
        return read

    def make_sorting(self, encoder: KeyValueEncoder, formats: Mapping[str, Format | None], reading: Reading) -> Sorting:
        """Return the sorting and encoding of the records of :meth:`make_records` in tasks."""
        from airflow_kafka_spark.jobs.tasks.publish import Sorting

        return Sorting(encoder, reading.tolerance)

    def make_records(self, rows: DataFrame, *, in_tasks: bool) -> tuple[DataFrame, Mapping[str, Format | None]]:
        """Return a split's rows as records, and the formats of the parts that change. The last row is unchanged.

        :param rows: the rows that tasks read.
        :param in_tasks: True: keys and values that change are structs, which the tasks encode; False: Spark encodes them if it
            can.
        :raises ValidationError: the filter or an expression is wrong; the message has Spark's reason.
        """
        from pyspark.sql import functions as F

        is_record = F.col(END).isNull()
        # The original columns are needed only for a record that cannot be written.
        needed = (OFFSET, *ORIGINAL.values()) if self.may_refuse else ()
        originals = [name for name in rows.columns if name in needed]
        carried = [name for name in rows.columns if name in (END, HEADERS, KEY, PARTITION, TIMESTAMP, TOMBSTONE, VALUE)]
        carried += originals
        rows = self._compute(rows, carried)
        value: Column = F.col(VALUE) if VALUE in carried else F.lit(None).cast("binary")
        if self.columns is not None and self.value is not None:
            made = as_struct(list(self.columns)) if in_tasks else self.value.encode(list(self.columns))
            value = F.when(is_record & ~F.col(TOMBSTONE), made)
        key = F.col(KEY) if KEY in carried else F.lit(None).cast("binary")
        if self.key and self.key_format is not None:
            key = F.when(is_record, as_struct(self.key) if in_tasks else self.key_format.encode(self.key))
        records = [key.alias("key"), value.alias("value")]
        if TIMESTAMP in carried:
            records.append(F.unix_millis(F.col(TIMESTAMP)).alias("timestamp"))
        if HEADERS in carried:
            records.append(F.col(HEADERS).alias("headers"))
        if PARTITION in carried:
            records.append(F.col(PARTITION).alias("partition"))
        formats = {"value": self.value if self.columns is not None else None, "key": self.key_format if self.key else None}
        return rows.select(*records, *originals, F.col(END)), formats

    def _compute(self, rows: DataFrame, carried: Sequence[str]) -> DataFrame:
        """Return the rows that the filter lets pass, with the new columns.

        :param carried: the columns that SQL does not change.
        :raises ValidationError: the filter or columns are wrong; the message has Spark's reason for each of them.
        """
        from pyspark.sql import functions as F

        is_record = F.col(END).isNull()
        problems: list[Problem] = []
        # A filter is checked by itself, so that Spark's reason names nothing that the user has not written.
        text = self.filter or ""
        if text and _try_sql("filter", lambda: rows.where(F.expr(text)), problems) is not None:
            rows = rows.where(~is_record | F.col(TOMBSTONE) | F.expr(text))
        if (columns := self.columns) is not None:
            # Not computed for the row that ends a split, because its columns are empty.
            def select(names: Iterable[str]) -> DataFrame:
                new = [F.when(is_record & ~F.col(TOMBSTONE), F.expr(columns[name])).alias(name) for name in names]
                return rows.select(*new, *(make_spark_column(name) for name in self.key if name not in columns), *carried)

            found: list[Problem] = []
            if (made := _try_sql("columns", lambda: select(columns), found)) is not None:
                rows = made
            else:
                wrong: list[Problem] = []
                for name in columns:
                    _try_sql(f"columns.{name}", partial(select, [name]), wrong)
                problems += wrong or found
        if problems:
            raise ValidationError(problems)
        return rows


def _try_sql(where: str, make: Callable[[], DataFrame], problems: list[Problem]) -> DataFrame | None:
    """Return a frame that SQL makes. If Spark refuses the SQL, add its reason to the problems and return None."""
    from pyspark.errors import AnalysisException, ParseException

    try:
        made = make()
        _ = made.schema  # Spark Connect analyzes only on request
    except (AnalysisException, ParseException) as error:
        problems.append(Problem(where, describe_sql_refusal(error), "Correct it"))
        return None
    return made


# --- from a source --------------------------------------------------------------------------


@dataclass(kw_only=True)
class SourceJob(PublishJob):
    """The Spark job that publishes one window of a source's rows.

    :param source: the source.
    :param sink: makes records of rows.
    :param left: the indexes of the splits that are not published yet, ascending.
    :param read_with: ``task``: tasks read and encode their splits themselves (fastest; the source's driver has to be installed on
        the executors). ``spark``: the JVM does. ``auto``: ``task`` if that is certain to make equal records, else ``spark``.
    :param chain: the transforms between source and sink, with which the JVM reads; None without transforms.
    """

    source: RowSource
    sink: KafkaSink
    left: tuple[int, ...]
    read_with: ReadWith = "auto"
    chain: SourceChain | None = None

    @property
    def split_count(self) -> int:
        return len(self.left)

    def _name_task(self, number: int) -> str:
        return f"split {self.left[number]}"

    @property
    def _bounds(self) -> list[Mapping[str, Any]]:
        assert self.window.source is not None
        return [self.window.source.splits[index] for index in self.left]

    def count(self) -> list[SplitResult]:
        can_be_bad = self.chain is not None or self.sink.may_refuse or self.source.may_be_unreadable
        return super().count() if can_be_bad else []

    def _collect_results(self, publisher: Publisher | None) -> list[dict[str, Any]]:
        try:
            return super()._collect_results(publisher)
        except SparkReadRequired as required:
            if self.read_with == "task":
                raise
            # Splits that were published meanwhile are found by their markers.
            log.info("Spark reads window %s, not each task by itself. %s", self.window, required.detail)
            self.read_with = "spark"
            return super()._collect_results(publisher)

    def _open_session(self) -> AbstractContextManager[SparkSession]:
        return open_session_for(self.spark, self.source)

    def _collect(self, results: RDD[str] | DataFrame) -> list[str]:
        try:
            return super()._collect(results)
        except SparkJobFailed as error:
            if error.__cause__ is not None and (explained := self.source.explain(error.__cause__)) is not None:
                raise explained from error
            raise

    def _make_reading_task(self, publisher: Publisher | None) -> PublishTask | None:
        if publisher is None or self.read_with == "spark" or self.chain is not None:
            return None
        reader = self.source.make_reader(self._bounds, self.sink.columns)
        encoder = reader if isinstance(reader, str) else self.sink.make_encoder(reader.columns)
        if isinstance(reader, str) or isinstance(encoder, str):
            if self.read_with == "task":
                found = f"tasks cannot read {self.source.uri} by themselves: {encoder}"
                raise ValidationError([Problem("read_with", found, 'Use "auto"')])
            log.info("Spark reads window %s, not each task by itself: %s", self.window, encoder)
            return None
        from airflow_kafka_spark.jobs.tasks.publish import EncodedSplits, PublishTask

        return PublishTask(publisher, self.left, source=EncodedSplits(reader, encoder))

    def _make_frame(self, session: SparkSession, publisher: Publisher | None) -> DataFrame:
        from airflow_kafka_spark.jobs.tasks.account import Tolerance
        from airflow_kafka_spark.jobs.tasks.publish import PublishTask, Sorting
        from airflow_kafka_spark.jobs.tasks.sort import RowOrigin
        from airflow_kafka_spark.sinks.kafka.sink import make_struct_encoders
        from airflow_kafka_spark.sinks.kafka.tasks.encode import KeyValueEncoder

        rows = self.source.read_frame(session, self._bounds)
        policy = publisher.bad_record_policy if publisher is not None else None
        tolerance = Tolerance(keep=policy.topic is not None) if policy is not None else None
        if self.chain is not None:
            records = self.chain.make_records(rows, keep=tolerance is not None and tolerance.keep)
            task = self.chain.make_task(records, publisher, self.left, tolerance)
        else:
            records = self.sink.make_records(rows)
            encoders = make_struct_encoders(
                records.schema, self.sink.value_writer, self.sink.key_writer if self.sink.key_columns else None
            )
            task = PublishTask(publisher, self.left, Sorting(KeyValueEncoder(encoders), tolerance, origin=RowOrigin()))
        if not self.spark.is_connect and (found := records.rdd.getNumPartitions()) != len(self.left):
            raise SparkJobFailed(str(self.window), f"the source gave {found} partitions for {len(self.left)} splits")
        return records.mapInArrow(task, "result string")


@contextmanager
def open_session_for(spark: SparkHook, source: RowSource) -> Iterator[SparkSession]:
    """Open a session in which Spark reads a source."""
    with (
        spark.open_session(jars=_list_jars(spark, source)) as session,
        use_sql_settings(session, {**SETTINGS, **source.settings}),
    ):
        yield session


def _list_jars(spark: SparkHook, source: RowSource) -> tuple[str, ...]:
    from airflow_kafka_spark.hooks.spark import jars

    if spark.is_connect or not source.packages:  # a remote server has jars and a Java of its own
        return ()
    return tuple(map(str, jars.resolve_jars(list(source.packages), exclude_bundled=True)))
