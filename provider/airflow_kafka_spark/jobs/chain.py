"""The transforms of a pipeline as Spark expressions.

:class:`SinkChain` is for records on the way to a sink, :class:`TopicChain` for records on the way to another topic, and
:class:`SourceChain` for the rows of a source.

A chain consists of column expressions only. Spark's analyzer returns their types without reading any record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import Problem, ValidationError
from airflow_kafka_spark.formats import Json, Raw, String
from airflow_kafka_spark.formats.base import (
    CAPTURED,
    END,
    ERROR,
    GIVEN,
    LEFT_OUT,
    ORIGINAL,
    ROUTE,
    TOMBSTONE,
    Format,
    NullValues,
    Part,
    as_struct,
    make_spark_column,
)
from airflow_kafka_spark.windows.model import PackedSplits, Split

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType

    from airflow_kafka_spark.hooks.spark.hook import SparkHook
    from airflow_kafka_spark.jobs.tasks.account import Tolerance
    from airflow_kafka_spark.jobs.tasks.arrow import Program
    from airflow_kafka_spark.jobs.tasks.layout import RecordLayout
    from airflow_kafka_spark.jobs.tasks.publish import PublishTask, Sorting, TopicRules
    from airflow_kafka_spark.jobs.tasks.read import Reading, ReadTask
    from airflow_kafka_spark.sinks.kafka.sink import KafkaSink
    from airflow_kafka_spark.sinks.kafka.tasks.encode import KeyValueEncoder
    from airflow_kafka_spark.sinks.kafka.tasks.publish import Publisher
    from airflow_kafka_spark.transforms import Transform
    from airflow_kafka_spark.transforms.chain import TransformLike


SETTINGS: Mapping[str, str] = {
    # A task holds one batch in memory, and passes it to the producer.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
    "spark.sql.session.timeZone": "UTC",
}


@contextmanager
def use_sql_settings(session: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Set SQL settings for one job, and restore the former ones afterwards, because the session may be shared."""
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


MADE, BYTES = "__kafka_made_", "__kafka_bytes_"
"""Prefixes of column names: a part of the record as the transforms return it, and its encoded bytes."""


# --- records on the way to a sink ------------------------------------------------------------


class Plan:
    """A change of records, as Spark's analyzer resolves it before anything is read.

    :ivar program: the change as an Arrow program; None if Spark has to compute it.
    """

    program: Program | None

    def make_program_for(self, read: ReadTask) -> Program | None:
        """Return the program for a task that also reads, without the original parts of records that the task does not carry; None
        if Spark computes the change."""
        missing = set(ORIGINAL.values()).difference(read.schema.names)
        return self.program and self.program.drop_outputs(missing)


@dataclass(frozen=True)
class ChainPlan(Plan):
    """The plan of a chain of transforms.

    :param schema: the rows' columns.
    :param program: the chain as an Arrow program, which also passes on the carried columns; None if Spark has to compute it.
    :param unknown: the first expression that has no implementation in Arrow; empty if all have one.
    """

    schema: pa.Schema
    program: Program | None = None
    unknown: str = ""


@dataclass(frozen=True)
class SinkChain:
    """The conversion of records to rows by a chain of transforms.

    The columns of the rows are the fields of the value, then the fields of the key if it is a struct, then metadata columns. If
    key and value have a column of the same name, the key's is used. A value that is no struct becomes the column ``value``.

    :param value: decodes values.
    :param key: decodes keys; None: keys stay bytes.
    :param transforms: in the order in which they apply.
    :param metadata: column names by the part of a record that they hold. ``key`` and ``value`` hold the bytes that were read, all
        other parts their state after the transforms.
    :param null_values: handling of records that have no value after the transforms.
    """

    value: Format
    key: Format | None
    transforms: tuple[Transform, ...]
    metadata: tuple[tuple[str, str], ...]
    null_values: NullValues
    _plans: list[ChainPlan] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def routes(self) -> tuple[str, ...]:
        """The topics that transforms send records to instead of the sink."""
        return tuple(dict.fromkeys(t.routes_to for t in self.transforms if t.routes_to))

    def make_read_task(self, splits: Sequence[Split], reading: Reading) -> ReadTask:
        """Return the task that reads splits.

        :param splits: the splits.
        :param reading: the options of reading.
        """
        from airflow_kafka_spark.jobs.tasks.read import ReadTask

        return ReadTask(PackedSplits.of(splits), self._make_layout(bool(self.routes) or reading.keeps), reading)

    def make_partial_read_task(self, read: ReadTask, columns: frozenset[str]) -> ReadTask:
        """Return a task of :meth:`make_read_task` that fills only some columns. The others are null."""
        from airflow_kafka_spark.jobs.tasks.layout import RecordLayout

        assert isinstance(read.layout, RecordLayout)
        return replace(read, layout=replace(read.layout, wanted=columns))

    def _make_layout(self, kept: bool) -> RecordLayout:
        """Return the layout that makes a record frame of records.

        :param kept: True if dead letters or routed records need the bytes that were read.
        """
        from airflow_kafka_spark.jobs.tasks.layout import RecordLayout

        letters = ("key", "value", "headers", "timestamp") if kept else ()
        asked = tuple(name for name, _ in self.metadata if name in ("key", "value", "timestampType"))
        return RecordLayout(
            self.value.make_decoder(),
            self.value.get_arrow_schema(),
            self.key.make_decoder() if self.key else None,
            self.key.get_arrow_schema() if self.key else None,
            tuple(dict.fromkeys([*letters, *asked])),
        )

    def apply(self, records: DataFrame) -> DataFrame:
        """Return the transformed rows: the sink's columns first, then the carried ones.

        :raises ValidationError: a transform does not fit, or columns of the result have one name.
        """
        from pyspark.sql import functions as F

        from airflow_kafka_spark.transforms import apply_chain

        transforms = self._with_captures()
        if transforms != self.transforms:
            records = records.select("*", F.lit(False).alias(LEFT_OUT))
        frame = apply_chain(records, transforms)
        columns = self._make_columns(frame)
        absent = F.col("value").isNull().alias(TOMBSTONE)
        carried = [make_spark_column(name) for name in frame.columns if name.startswith("__kafka_")]
        return frame.select(*(column.alias(name) for name, column in columns.items()), absent, *carried)

    def _with_captures(self) -> tuple[Transform, ...]:
        """Return the transforms with each ``Filter(to=<sink>)`` as a transform that puts that sink's rows into a column."""
        from airflow_kafka_spark.transforms.routing import Capture, Filter

        made: list[Transform] = []
        number = 0
        for transform in self.transforms:
            if isinstance(transform, Filter) and transform.captured_by is not None:
                column = f"{CAPTURED}{number}"
                made.append(Capture(column, self._make_captured_row, predicate=transform.predicate, negate=transform.negate))
                number += 1
            else:
                made.append(transform)
        return tuple(made)

    def _make_captured_row(self, frame: DataFrame) -> dict[str, Column]:
        from pyspark.sql import functions as F

        return {**self._make_columns(frame), TOMBSTONE: F.col("value").isNull()}

    def _make_columns(self, frame: DataFrame) -> dict[str, Column]:
        from pyspark.sql import functions as F
        from pyspark.sql.types import StructType

        from airflow_kafka_spark.transforms.base import PARTS

        types = {f.name: f.dataType for f in frame.schema}
        value = types["value"]
        names = [f.name for f in value] if isinstance(value, StructType) else []
        columns = {name: F.col("value").getField(name) for name in names} or {"value": F.col("value")}
        key = types["key"]
        if isinstance(key, StructType):
            columns |= {f.name: F.col("key").getField(f.name) for f in key}
        for name, column in self.metadata:
            if column in columns:
                found = f"column `{column}` is there already, after the transforms"
                raise ValidationError([Problem("metadata_columns", found, f'Name it otherwise: {{"{name}": "kafka_{name}"}}')])
            columns[column] = F.col(ORIGINAL[name] if name in ("key", "value", "timestampType") else name)
        asked = [column for _, column in self.metadata]
        for column in sorted({TOMBSTONE, *types}.difference(PARTS).intersection(columns)):
            where = "metadata_columns" if column in asked else "transforms"
            found = f"there is a column `{column}`, as what is carried past transforms is called"
            raise ValidationError([Problem(where, found, "Name it otherwise, a field by ReplaceField")])
        return columns

    def plan(self, spark: SparkHook) -> ChainPlan:
        """Return the plan of the chain, from one analysis by Spark, which reads no record. Spark is not started if a task has
        analyzed an equal chain before (``plan_cache.py``).

        :raises ValidationError: a transform does not fit its input.
        """
        if not self._plans:
            self._plans.append(self._find_plan(spark))
        return self._plans[0]

    @property
    def definition(self) -> tuple[object, ...]:
        """Everything that the plan depends on besides the columns that are read."""
        return self.value, self.key, self.transforms, self.metadata, self.null_values

    def _find_plan(self, spark: SparkHook) -> ChainPlan:
        from airflow_kafka_spark.jobs.plan_cache import PlanFile
        from airflow_kafka_spark.jobs.tasks.read import Reading, ReadTask

        layout = replace(self._make_layout(kept=False), originals=tuple(ORIGINAL))
        schema = ReadTask(PackedSplits.of(()), layout, Reading()).schema
        file = PlanFile.find(spark, ("sink", self.definition), schema)
        if file is not None and isinstance(kept := file.load(), ChainPlan):
            return kept
        with spark.open_session() as session, use_sql_settings(session, SETTINGS):
            made = self._plan(session, schema)
        if file is not None and made.program is not None:
            file.keep(made)
        return made

    def _plan(self, session: SparkSession, read: pa.Schema) -> ChainPlan:
        """Return the plan, which Spark analyzes.

        :param read: the columns that are read.
        """
        import pyarrow as pa
        from pyspark.sql.pandas.types import from_arrow_schema

        from airflow_kafka_spark.jobs.arrow import Unknown, make_arrow_schema, make_program

        made = self.apply(session.createDataFrame([], from_arrow_schema(read)))
        names, types = made.columns[: made.columns.index(TOMBSTONE)], make_arrow_schema(made.schema)
        schema = pa.schema([types.field(name) for name in names])
        try:
            return ChainPlan(schema, make_program(made, read))
        except Unknown as reason:
            return ChainPlan(schema, unknown=str(reason))


# --- records on the way to another topic ----------------------------------------------------


@dataclass(frozen=True)
class TopicChain:
    """Transforms of records that are published to another topic, and the encoding of their results.

    A key or a value that no transform changes keeps its bytes. Other keys and values are encoded by the given formats, by default
    as Connect does: structs as JSON, numbers and texts as text, bytes unchanged.

    :param chain: decodes records, and has the transforms.
    :param topics: the rules for records whose topic a transform changes.
    :param value: the format of values; None: the default of their type.
    :param key: the format of keys; None: the default of their type.
    :param timestamps: True if records keep the timestamp that they have after the transforms.
    :param headers: True if they keep their headers.
    :param partitions: True if they keep the number of their partition.
    :param pipeline: the pipeline's name, for records that a filter sends elsewhere.
    """

    chain: SinkChain
    topics: TopicRules
    value: Format | None = None
    key: Format | None = None
    timestamps: bool = True
    headers: bool = True
    partitions: bool = False
    pipeline: str = ""

    @property
    def definition(self) -> tuple[object, ...]:
        """Everything that the plan depends on besides the columns that are read."""
        return (*self.chain.definition, self.value, self.key, self.timestamps, self.headers, self.partitions)

    @property
    def written_formats(self) -> Mapping[str, Format | None]:
        """The formats that are given for the parts of records that the transforms may change."""
        return {"value": self.value, "key": self.key}

    def make_read_task(self, splits: tuple[Split, ...], reading: Reading) -> ReadTask:
        """Return the task that reads splits."""
        return self.chain.make_read_task(splits, reading)

    def make_partial_read_task(self, read: ReadTask, columns: frozenset[str]) -> ReadTask:
        """Return a task of :meth:`make_read_task` that fills only some columns. The others are null."""
        return self.chain.make_partial_read_task(read, columns)

    def make_sorting(self, encoder: KeyValueEncoder, formats: Mapping[str, Format | None], reading: Reading) -> Sorting:
        """Return the sorting and encoding of the records of :meth:`make_records` in tasks."""
        from airflow_kafka_spark.jobs.tasks.publish import Sorting

        topics = self.topics if "topic" in formats else None
        return Sorting(encoder, reading.tolerance, self.chain.null_values, topics, self.pipeline)

    def make_records(self, frame: DataFrame, *, in_tasks: bool) -> tuple[DataFrame, Mapping[str, Format | None]]:
        """Return the frame of the records that are published, with the columns that distinguish good records from bad ones, and
        the parts that the transforms may have changed, with their formats if they have one.

        :param in_tasks: True: a key or value that has changed stays a struct, which tasks encode.
        :raises ValidationError: a transform does not fit.
        """
        from pyspark.sql import functions as F

        frame, changed = transform_frame(frame, self.chain.transforms)
        kept = [name for name in frame.columns if not name.startswith(MADE)]
        columns = [F.col(MADE + "value").isNull().alias(TOMBSTONE), *map(make_spark_column, kept)]
        fine = F.col(END).isNull() & F.col(ERROR).isNull()
        if ROUTE in kept:
            fine = fine & F.col(ROUTE).isNull()
        formats: dict[str, Format | None] = dict.fromkeys(changed)
        encodings = (
            PartEncoding("value", "sink.value", self.value, self.chain.value),
            PartEncoding("key", "sink.key_format", self.key, self.chain.key),
        )
        for encoding in encodings:
            part = encoding.part
            if part in changed:
                frame, formats[part] = encode_part(frame, encoding, fine, in_tasks=in_tasks)
            columns.append(F.col(BYTES + part if part in changed else ORIGINAL[part]).alias(part))
        if "topic" in changed:
            columns.append(F.col(MADE + "topic").alias("topic"))
        if self.timestamps:
            columns.append(F.unix_millis(F.col(MADE + "timestamp")).alias("timestamp"))
        if self.headers:
            columns.append(F.col(MADE + "headers").alias("headers"))
        if self.partitions:
            columns.append(F.col(MADE + "partition").alias("partition"))
        return frame.select(*columns), formats


# --- rows of a source ----------------------------------------------------------------------


@dataclass(frozen=True)
class SourceChain:
    """Transforms of the records that a source's rows become.

    The first transform gets the record that the sink's options make of a row: ``value`` is a struct of the row's columns, ``key``
    is the value of one column or a struct of several, and ``topic``, ``partition``, ``timestamp`` and ``headers`` are those of
    the record to publish. The result of the last transform is written.

    :param transforms: in the order in which they apply.
    :param sink: converts rows to records, and encodes them.
    :param reserved: topics that no record is sent to.
    :param pipeline: the pipeline's name, for rows that a filter sends elsewhere.
    :param source: the source's URI, for the headers of these records.
    :param window: the window, for the headers of these records.
    """

    transforms: tuple[TransformLike, ...]
    sink: KafkaSink
    reserved: tuple[str, ...] = ()
    pipeline: str = ""
    source: str = ""
    window: str = ""

    def check(self, rows: DataFrame) -> None:
        """Refuse transforms that do not fit the rows. Spark analyses the plan, and reads nothing. No schema is registered.

        :param rows: of the source.
        :raises ValidationError: a transform does not fit its input, or the result cannot be written.
        :raises KafkaSparkError: a schema registry does not answer.
        """
        from airflow_kafka_spark.sinks.kafka.sink import find_struct_problems

        if problems := find_struct_problems(
            self.make_records(rows, keep=False).schema, self.sink.value_writer, self.sink.key_writer
        ):
            raise ValidationError(problems)

    def make_records(self, rows: DataFrame, *, keep: bool) -> DataFrame:
        """Return the frame that tasks publish: keys and values in binary, or as structs if tasks encode them, and the columns
        that the account needs.

        :param keep: True if bad rows become dead letters.
        :raises ValidationError: as :meth:`check`.
        """
        from pyspark.sql import functions as F

        from airflow_kafka_spark.transforms.chain import list_chain_routes

        routed = bool(list_chain_routes(self.transforms))
        given = {GIVEN[name]: column for name, column in self._list_letter_columns(rows).items()} if keep or routed else {}
        ends = {END: F.col(END)} if END in rows.columns else {}
        errors = {ERROR: F.col(ERROR)} if ERROR in rows.columns else {}
        made, changed = transform_frame(self._make_record_frame(rows, {**given, **ends, **errors}), self.transforms)
        aside = F.col(ERROR).isNotNull() | F.col(ROUTE).isNotNull() if routed else F.col(ERROR).isNotNull()
        fine = ~aside & ~F.col(LEFT_OUT)
        if ends:
            fine = fine & F.col(END).isNull()
        encodings = (
            PartEncoding("value", "sink.value", self.sink.value_writer),
            PartEncoding("key", "sink.key_format", self._choose_key_format(changed)),
        )
        for encoding in encodings:
            part = encoding.part
            if part == "key" and not self.sink.key_columns and "key" not in changed:
                made = made.withColumn(BYTES + part, F.lit(None).cast("binary"))
                continue
            made, _ = encode_part(made, encoding, fine)
        # Dead letters and routed records need the row before the transforms. If tasks encode, any row may still become a dead
        # letter.
        wanted = F.lit(True) if self._encodes_in_tasks(changed) else aside
        columns = [F.when(wanted, F.col(name)).alias(name) for name in given]
        columns += [
            F.col(ERROR),
            F.col(LEFT_OUT),
            *([F.col(ROUTE)] if routed else []),
            *map(F.col, ends),
            *(F.col(BYTES + part).alias(part) for part in ("key", "value")),
        ]
        if self.sink.topic_column or "topic" in changed:
            columns.append(F.col(MADE + "topic").alias("topic"))
        if self.sink.partition or "partition" in changed:
            columns.append(F.col(MADE + "partition").alias("partition"))
        if self.sink.timestamp or "timestamp" in changed:
            columns.append(F.unix_millis(F.col(MADE + "timestamp")).alias("timestamp"))
        if self.sink.headers or "headers" in changed:
            columns.append(F.col(MADE + "headers").alias("headers"))
        return made.select(*columns)

    def make_task(
        self, records: DataFrame, publisher: Publisher | None, left: tuple[int, ...], tolerance: Tolerance | None
    ) -> PublishTask:
        """Return the task that publishes the records, or only counts them.

        :raises KafkaSparkError: the columns cannot be written.
        """
        from airflow_kafka_spark.jobs.tasks.publish import PublishTask, Sorting, TopicRules
        from airflow_kafka_spark.jobs.tasks.sort import RowOrigin
        from airflow_kafka_spark.sinks.kafka.sink import make_struct_encoders
        from airflow_kafka_spark.sinks.kafka.tasks.encode import KeyValueEncoder

        encoder = KeyValueEncoder(make_struct_encoders(records.schema, self.sink.value_writer, self.sink.key_writer))
        origin, topics = RowOrigin(self.source, self.window), TopicRules(self.reserved)
        sorting = Sorting(encoder, tolerance, topics=topics, pipeline=self.pipeline, origin=origin)
        return PublishTask(publisher, left, sorting)

    # --- the record that the options make of a row ---

    def _make_record_frame(self, rows: DataFrame, more: Mapping[str, Column]) -> DataFrame:
        from pyspark.sql import functions as F

        sink = self.sink
        parts: dict[str, Any] = {
            "key": self._make_key_column(),
            "value": as_struct(self._list_value_columns(rows)),
            "topic": sink.make_topic_column(),
            "partition": sink.make_partition_column(),
            # It gets one when it is written.
            "offset": F.lit(None).cast("bigint"),
            "timestamp": F.timestamp_millis(sink.make_timestamp_column(rows)),
            "headers": self._make_headers_column(),
            LEFT_OUT: F.lit(False),
            **more,
        }
        return rows.select(*(column.alias(name) for name, column in parts.items()))

    def _make_key_column(self) -> Column:
        from pyspark.sql import functions as F

        if not self.sink.key_columns:
            return F.lit(None)
        return make_spark_column(self.sink.key_columns[0]) if self._is_bare else as_struct(self.sink.key_columns)

    @property
    def _is_bare(self) -> bool:
        """True if the key's format writes the value of a single key column, not a struct of one field."""
        return len(self.sink.key_columns) == 1 and isinstance(self.sink.key_writer, (String, Raw))

    def _make_headers_column(self) -> Column:
        from pyspark.sql import functions as F

        from airflow_kafka_spark.transforms.base import FIXED

        return (self.sink.make_headers_column() if self.sink.headers else F.array()).cast(FIXED["headers"])

    def _list_value_columns(self, rows: DataFrame) -> Sequence[str]:
        return tuple(self.sink.value_columns or (name for name in rows.columns if name not in (END, ERROR)))

    def _choose_key_format(self, changed: frozenset[str]) -> Format | None:
        """Return the format of keys; None if a transform makes the keys and no format is given, so that their type decides."""
        if self.sink.key_format is not None or (self.sink.key_columns and "key" not in changed):
            return self.sink.key_writer
        return None

    def _encodes_in_tasks(self, changed: frozenset[str]) -> bool:
        key = self._choose_key_format(changed)
        return self.sink.value_writer.encodes_in_tasks or (key is not None and key.encodes_in_tasks)

    def _list_letter_columns(self, rows: DataFrame) -> dict[str, Column]:
        """Return the columns of a dead letter: the row before all transforms."""
        from pyspark.sql import functions as F

        sink = self.sink
        key: Column = F.lit(None).cast("binary")
        if sink.key_columns:
            key = as_struct(sink.key_columns) if sink.key_writer.encodes_in_tasks else sink.key_writer.encode(sink.key_columns)
        return {
            "key": key,
            "value": as_struct(self._list_value_columns(rows)),
            "timestamp": sink.make_timestamp_column(rows),
            "headers": self._make_headers_column(),
        }


# --- keys and values as bytes --------------------------------------------------------------


def transform_frame(frame: DataFrame, transforms: Sequence[TransformLike]) -> tuple[DataFrame, frozenset[str]]:
    """Return the result of a chain on a record frame, and the names of the parts that the chain may have changed.

    :return: the parts, under names that begin with :data:`MADE` because fields of a value may have the plain names, and the
        carried columns.
    :raises ValidationError: a transform does not fit its input; the message has its position.
    """
    from pyspark.sql import functions as F

    from airflow_kafka_spark.transforms import apply_chain

    changed: set[str] = set()
    frame = apply_chain(frame, transforms, changed=changed)
    kept = [name for name in frame.columns if name.startswith("__kafka_")]
    named = ("key", "value", "topic", "partition", "timestamp", "headers")
    return frame.select(*(F.col(name).alias(MADE + name) for name in named), *map(make_spark_column, kept)), frozenset(changed)


@dataclass(frozen=True)
class PartEncoding:
    """The format in which a key or a value is written.

    :param part: the key or the value.
    :param where: the operator's argument that sets the format, for errors.
    :param format: the format; None: the default of Connect for its type: a struct as JSON, a number or a text as text, bytes
        unchanged.
    :param read: the format in which the part was read. If the part is still one column of bytes or text, it is written in this
        format. Default: it was not read.
    """

    part: Part
    where: str
    format: Format | None
    read: Format | None = None


def encode_part(frame: DataFrame, encoding: PartEncoding, fine: Column, *, in_tasks: bool = False) -> tuple[DataFrame, Format]:
    """Return the frame of :func:`transform_frame` with the bytes of a key or a value, and the format that they have.

    :param encoding: the key or the value, and its format.
    :param fine: a condition; True for the rows that are written.
    :param in_tasks: True: there is a struct in place of the bytes, which tasks encode in this format.
    :raises ValidationError: the part cannot be written in this format.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, MapType, StructType

    part = encoding.part
    whole, found = F.col(MADE + part), frame.schema[MADE + part].dataType
    names = found.names if isinstance(found, StructType) else [part]
    if isinstance(found, (ArrayType, MapType)):
        what = f"after the transforms the {part} is {found.simpleString()}; expected fields, or one number, text or binary"
        raise ValidationError([Problem("transforms", what, "Give it a name with HoistField")])
    writer = encoding.format or _find_default_format(found, encoding.read)
    if problems := writer.find_encoding_problems(encoding.where, names):
        raise ValidationError(problems)
    before = [make_spark_column(name) for name in frame.columns]
    fields: list[Column] = [whole.getField(n).alias(n) for n in names] if isinstance(found, StructType) else [whole.alias(part)]
    # In two steps: the first makes each field a column of its own name, to which `encode` refers.
    written = F.when(fine & whole.isNotNull(), as_struct(names) if in_tasks else writer.encode(names))
    return frame.select(*before, *fields).select(*before, written.alias(BYTES + part)), writer


def _find_default_format(found: DataType, read: Format | None) -> Format:
    """Return the default format of Connect for a type."""
    from pyspark.sql.types import BinaryType, StructType

    if isinstance(found, StructType):
        return read if isinstance(read, (Raw, String)) and found.names == [read.column] else Json()
    return Raw() if isinstance(found, BinaryType) else String()
