"""The driver's side of the road with transforms: tasks read, Spark's SQL transforms, tasks write; one Spark job, no shuffle."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from airflow_kafka_spark.errors import Problem, ValidationError
from airflow_kafka_spark.formats.base import Format, spark_column
from airflow_kafka_spark.road.columns import NullValues
from airflow_kafka_spark.road.job import SinkJob
from airflow_kafka_spark.road.settings import SETTINGS, sql_settings
from airflow_kafka_spark.road.watch import collect
from airflow_kafka_spark.windows.codec import decode_result
from airflow_kafka_spark.windows.model import PackedSplits, Split, SplitResult, TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

    from airflow_kafka_spark.hooks.spark import SparkHook
    from airflow_kafka_spark.road.arrow.tasks.program import Program
    from airflow_kafka_spark.road.tasks.transform_rows import RecordTask
    from airflow_kafka_spark.sinks.base import SplitWriter
    from airflow_kafka_spark.transforms import Transform

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What Spark says of a chain of transforms, before anything is read.

    :param schema: the rows' columns.
    :param program: what the chain is in Arrow, with all that may be carried past it; None where Spark has to compute it.
    :param unknown: what of it is not known in Arrow.
    """

    schema: pa.Schema
    program: Program | None = None
    unknown: str = ""

    def program_for(self, read: RecordTask) -> Program | None:
        """Return the program for a task that reads, without the columns that the task does not carry; None without a program."""
        from airflow_kafka_spark.road.tasks.transform_rows import ORIGINAL

        missing = set(ORIGINAL.values()).difference(read.schema.names)
        return self.program and self.program.without(missing)


@dataclass(frozen=True)
class Shaping:
    """How records become rows where transforms are on the way.

    The rows' columns: those of the value, then those of the key where it is a struct (a column that both have is taken from the
    key), then metadata columns; a value that is no struct is the column ``value``.

    :param value: decodes values.
    :param key: decodes keys; None leaves them bytes.
    :param transforms: in the order in which they apply.
    :param metadata: what of a record goes into which column: ``key`` and ``value`` as they were read, everything else as the
        transforms have left it.
    :param null_values: what a record means that has no value behind the transforms.
    """

    value: Format
    key: Format | None
    transforms: tuple[Transform, ...]
    metadata: tuple[tuple[str, str], ...]
    null_values: NullValues
    _plans: list[Plan] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def routes(self) -> tuple[str, ...]:
        """Return the topics that transforms send records to instead of the sink."""
        return tuple(dict.fromkeys(t.routes_to for t in self.transforms if t.routes_to))

    def reading(self, splits: Sequence[Split], config: Mapping[str, Any], **options: Any) -> RecordTask:
        """Return the task that reads.

        :param options: further fields of :class:`~airflow_kafka_spark.road.tasks.transform_rows.RecordTask`.
        """
        from airflow_kafka_spark.road.tasks.transform_rows import RecordTask

        tolerance = options.get("tolerance")
        kept = self.routes or (tolerance is not None and tolerance.keep)
        letters = ("key", "value", "headers", "timestamp") if kept else ()
        asked = tuple(name for name, _ in self.metadata if name in ("key", "value", "timestampType"))
        return RecordTask(
            PackedSplits.of(splits),
            self.value.decoder(),
            self.value.arrow_schema(),
            self.key.decoder() if self.key else None,
            self.key.arrow_schema() if self.key else None,
            config,
            tuple(dict.fromkeys([*letters, *asked])),
            **options,
        )

    def shaped(self, records: DataFrame) -> DataFrame:
        """Return the transformed rows: the sink's columns first, then the carried ones.

        :raises ValidationError: a transform does not fit, or columns of the result have one name.
        """
        from pyspark.sql import functions as F

        from airflow_kafka_spark.road.tasks.transform_rows import ABSENT
        from airflow_kafka_spark.transforms import apply_chain

        frame = apply_chain(records, self.transforms)
        columns = self._columns(frame)
        absent = F.col("value").isNull().alias(ABSENT)
        carried = [spark_column(name) for name in frame.columns if name.startswith("__kafka_")]
        return frame.select(*(column.alias(name) for name, column in columns.items()), absent, *carried)

    def _columns(self, frame: DataFrame) -> dict[str, Column]:
        from pyspark.sql import functions as F
        from pyspark.sql.types import StructType

        from airflow_kafka_spark.road.tasks.transform_rows import ABSENT, ORIGINAL
        from airflow_kafka_spark.transforms.record import PARTS

        types = {f.name: f.dataType for f in frame.schema}
        value = types["value"]
        names = [f.name for f in value] if isinstance(value, StructType) else []
        columns = {name: F.col("value").getField(name) for name in names} or {"value": F.col("value")}
        key = types["key"]
        if isinstance(key, StructType):
            columns |= {f.name: F.col("key").getField(f.name) for f in key}
        for name, column in self.metadata:
            if column in columns:
                found = f"column `{column}` is there already, behind the transforms"
                raise ValidationError([Problem("metadata_columns", found, f'Name it otherwise: {{"{name}": "kafka_{name}"}}')])
            columns[column] = F.col(ORIGINAL[name] if name in ("key", "value", "timestampType") else name)
        asked = [column for _, column in self.metadata]
        for column in sorted({ABSENT, *types}.difference(PARTS).intersection(columns)):
            where = "metadata_columns" if column in asked else "transforms"
            found = f"there is a column `{column}`, as what is carried past transforms is called"
            raise ValidationError([Problem(where, found, "Name it otherwise, a field by ReplaceField")])
        return columns

    def plan(self, spark: SparkHook) -> Plan:
        """Return the plan of the chain. Spark is asked once, and reads nothing for it.

        :raises ValidationError: a transform does not fit what comes to it.
        """
        if not self._plans:
            with spark.session() as session, sql_settings(session, SETTINGS):
                self._plans.append(self._plan(session))
        return self._plans[0]

    def _plan(self, session: SparkSession) -> Plan:
        import pyarrow as pa
        from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

        from airflow_kafka_spark.road.arrow.catalyst import Unknown, program_of
        from airflow_kafka_spark.road.tasks.transform_rows import ABSENT, ORIGINAL

        read = replace(self.reading((), {}), originals=tuple(ORIGINAL))
        made = self.shaped(session.createDataFrame([], from_arrow_schema(read.schema)))
        names, types = made.columns[: made.columns.index(ABSENT)], to_arrow_schema(made.schema)
        schema = pa.schema([types.field(name) for name in names])
        try:
            return Plan(schema, program_of(made, read.schema))
        except Unknown as reason:
            return Plan(schema, unknown=str(reason))


@dataclass(kw_only=True)
class ShapingJob(SinkJob):
    """Tasks read, transform and write, in Arrow, where that gives what Spark's SQL would; else that stands between reading and
    writing. :meth:`run` also raises ValidationError: a transform does not fit.

    :param shaping: how records become rows.
    :param schema: the rows' columns, as the sink was told.
    :param routed: records that earlier attempts at the window have sent elsewhere: there they stay.
    """

    shaping: Shaping
    schema: pa.Schema
    routed: Mapping[TopicPartition, Set[int]] = field(default_factory=dict)

    def run(self, writer: SplitWriter) -> list[SplitResult]:
        with self.spark.session() as session, sql_settings(session, SETTINGS), self._watch.over(session):
            told = collect(self._frame(session, writer), self.window)
        return sorted((decode_result(text) for text in told), key=lambda result: result.index)

    def _frame(self, session: SparkSession, writer: SplitWriter) -> DataFrame:
        from pyspark.sql.pandas.types import from_arrow_schema

        from airflow_kafka_spark.road.tasks.transform_rows import ShapingTask, WriteTask

        read = self.shaping.reading(
            self.splits,
            self.kafka.consumer_config(),
            skip_lost=self.skip_lost,
            patience=self.patience,
            tolerance=self.tolerance,
            routed=self.routed,
        )
        # One row a task: which split it shall read.
        numbers = session.range(0, len(self.splits), 1, len(self.splits))
        write = WriteTask(read.splits, self.schema, writer, self.shaping.null_values, self.tolerance)
        plan = self.shaping.plan(self.spark)
        program = plan.program_for(read)
        if program is not None:
            task = ShapingTask(replace(read, wanted=program.columns), program, write)
            return numbers.mapInArrow(cast(Any, task), "result string")
        told = "Window %s: Spark's SQL transforms its records, not each task in Arrow: no %s there"
        log.info(told, self.window, plan.unknown)
        records = numbers.mapInArrow(cast(Any, read), from_arrow_schema(read.schema))
        shaped = self.shaping.shaped(records)
        # Spark takes a dot in the name of a column that it maps for a path, and Flatten makes such names.
        plain = [name if name.startswith("__kafka_") else f"column{n}" for n, name in enumerate(shaped.columns)]
        write = replace(write, names=dict(zip(plain, shaped.columns, strict=True)))
        return shaped.toDF(*plain).mapInArrow(cast(Any, write), "result string")
