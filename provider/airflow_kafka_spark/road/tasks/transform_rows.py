"""What Spark's tasks do on the road with transforms: read and decode records for Spark's SQL, and write what it makes of them.

Runs on executors: imports neither Airflow nor pyspark. A last row, which every transform lets pass, carries the account of what
was read from one task to the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.formats.internal_columns import END, ERROR, ROUTE
from airflow_kafka_spark.road.columns import NO_VALUE, NullValues, gone, metadata_of, metadata_type
from airflow_kafka_spark.road.tasks.write_rows import Output, add
from airflow_kafka_spark.sinks.base import Rows
from airflow_kafka_spark.sinks.kafka.tasks.incoming import Incoming
from airflow_kafka_spark.sinks.tasks.dead_letters import HEADERS as HEADER_LIST
from airflow_kafka_spark.sinks.tasks.dead_letters import ROUTED, DeadLetterBuffer, joined
from airflow_kafka_spark.sinks.tasks.dead_letters import SCHEMA as LETTER
from airflow_kafka_spark.windows.codec import encode_error, encode_result
from airflow_kafka_spark.windows.model import (
    KEY_CONVERTER,
    SAMPLES,
    TASK_PUT,
    TRANSFORMATION,
    VALUE_CONVERTER,
    BadRecord,
    PackedSplits,
    Split,
    SplitResult,
    TopicPartition,
)

if TYPE_CHECKING:
    from airflow_kafka_spark.formats.base import Decoder
    from airflow_kafka_spark.road.arrow.tasks.program import Program
    from airflow_kafka_spark.road.tasks.tolerance import Tolerance
    from airflow_kafka_spark.sinks.base import SplitWriter
    from airflow_kafka_spark.sources.kafka.tasks.read import Records

OFFSET, ABSENT = "__kafka_offset", "__kafka_absent"
"""Columns that are carried along: where a record was read, and, behind the last transform, whether it has no value."""

ORIGINAL = {name: f"__kafka_original_{name}" for name in ("key", "value", "headers", "timestamp", "timestampType")}
"""What of the record as it was read is carried along, where somebody asks for it."""


@dataclass(frozen=True)
class RecordTask:
    """The function that Spark maps over the numbers of splits (``mapInArrow``): their records, and one row more that ends them.

    :param splits: all splits of the window.
    :param value: decodes values into the columns of ``value_schema``.
    :param key: decodes keys into those of ``key_schema``; None leaves them bytes.
    :param config: the consumer's configuration. Travels to the executors inside the pickled task only.
    :param originals: what is carried along of records as they were read, among :data:`ORIGINAL`.
    :param skip_lost: pass over records that were deleted meanwhile.
    :param patience: seconds without progress after which the broker is given up.
    :param tolerance: what becomes of records that cannot be decoded.
    :param routed: records that earlier attempts at the window have sent elsewhere: whatever they look like now, there they stay.
    :param wanted: the columns that somebody looks at, the others may be null; None: all.
    """

    splits: PackedSplits
    value: Decoder
    value_schema: pa.Schema
    key: Decoder | None
    key_schema: pa.Schema | None
    config: Mapping[str, Any] = field(repr=False)
    originals: tuple[str, ...] = ()
    skip_lost: bool = False
    patience: float = 300.0
    tolerance: Tolerance | None = None
    routed: Mapping[TopicPartition, Set[int]] = field(default_factory=dict)
    wanted: frozenset[str] | None = None

    @property
    def schema(self) -> pa.Schema:
        """Return the schema of the batches: a record frame, and the carried columns."""
        keys = pa.binary() if self.key_schema is None else _struct(self.key_schema)
        return pa.schema(
            [
                ("key", keys),
                ("value", _struct(self.value_schema)),
                *((name, metadata_type(name)) for name in ("topic", "partition", "offset", "timestamp", "headers")),
                (OFFSET, pa.int64()),
                *((ORIGINAL[name], metadata_type(name)) for name in self.originals),
                (END, pa.string()),
            ]
        )

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for at in batch.column(0).to_pylist():
                yield from self.rows(self.splits[at])

    def rows(self, split: Split) -> Iterator[pa.RecordBatch]:
        """Yield a split's records, and the row that ends them. The last row also carries an error of this package, because the
        traceback of a worker is no message for a user.
        """
        from airflow_kafka_spark.sources.kafka.tasks.read import Reader

        keep = self.tolerance is not None and self.tolerance.keep
        headers = self._wants("headers", ORIGINAL["headers"])
        keys = self.key is not None or self._wants("key", ORIGINAL["key"])
        reader = Reader(
            self.config, split.range, self.skip_lost, headers, self.patience, keys, with_messages=keep, epoch=split.epoch
        )
        result, letters = SplitResult(split.index, interval=split.interval), DeadLetterBuffer()
        try:
            for records in reader:
                away = self._away(records)
                batch, bad = self._batch(records, letters, away)
                result = replace(add(result, records, 0, bad), routed=result.routed + len(away))
                # With a bad record that is not tolerated nothing is written: the rest is only read to count what is bad.
                if batch.num_rows and not (result.rejected and self.tolerance is None):
                    yield batch
            end = encode_result(replace(result, gaps=tuple(reader.gaps), letters=letters.to_bytes()))
        except KafkaSparkError as error:
            end = encode_error(error)
        yield pa.RecordBatch.from_pylist([{END: end}], schema=self.schema)

    def _wants(self, *names: str) -> bool:
        return self.wanted is None or not self.wanted.isdisjoint(names)

    def _metadata(self, column: str, name: str, records: Records) -> pa.Array:
        return metadata_of(name, records) if self._wants(column) else pa.nulls(len(records), metadata_type(name))

    def _away(self, records: Records) -> frozenset[int]:
        """Return the places of records that were sent elsewhere before."""
        sent = self.routed.get(TopicPartition(records.topic, records.partition))
        return frozenset(i for i, offset in enumerate(records.offsets.to_pylist()) if offset in sent) if sent else frozenset()

    def _batch(
        self, records: Records, letters: DeadLetterBuffer, away: frozenset[int]
    ) -> tuple[pa.RecordBatch, Sequence[BadRecord]]:
        values = self.value.decode(records.values)
        reasons = {index: (VALUE_CONVERTER, reason) for index, reason in values.bad if index not in away}
        left_out = frozenset(values.left_out) | away
        keys: pa.Array = pa.array(records.keys or [None] * len(records), pa.binary())
        if self.key is not None:
            decoded = self.key.decode(records.keys or ())
            of_keys = {i: (KEY_CONVERTER, f"key: {reason}") for i, reason in decoded.bad if i not in left_out}
            reasons = {**of_keys, **reasons}
            keys = _struct_array(decoded.batch, [key is None for key in records.keys or ()])
        arrays = [
            keys,
            _struct_array(values.batch, gone(records, values)),
            *(self._metadata(name, name, records) for name in ("topic", "partition", "offset", "timestamp", "headers")),
            records.offsets,
            *(self._metadata(ORIGINAL[name], name, records) for name in self.originals),
            pa.nulls(len(records), pa.string()),
        ]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        at = sorted(reasons)
        bad = [BadRecord(records.topic, records.partition, records.offsets[i].as_py(), reasons[i][1], reasons[i][0]) for i in at]
        dead: Sequence[BadRecord] = bad
        if self.tolerance is not None:
            dead = self.tolerance.bury(records, at, bad, letters)
        if not (dead or left_out):
            return batch, dead
        offsets = {b.offset for b in dead}
        kept = [offset not in offsets and i not in left_out for i, offset in enumerate(records.offsets.to_pylist())]
        return batch.filter(pa.array(kept, pa.bool_())), dead


@dataclass(frozen=True)
class WriteTask:
    """The function that Spark maps over what the transforms have made: partition ``i`` is split ``splits[i]``.

    :param splits: all splits of the window.
    :param schema: the sink's columns.
    :param writer: the sink's; every call works on a copy of it, since this object is unpickled once per task.
    :param null_values: what a record without a value means.
    :param tolerance: what becomes of records that could not be transformed.
    :param names: those of the columns that arrive under others.
    """

    splits: PackedSplits
    schema: pa.Schema
    writer: SplitWriter
    null_values: NullValues
    tolerance: Tolerance | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from airflow_kafka_spark.sinks.kafka.tasks.publish import partition_id

        yield self.told(self.splits[partition_id()], Incoming(batches, from_spark=True))

    def told(self, split: Split, incoming: Incoming) -> pa.RecordBatch:
        """Write a split's records, and tell how it went."""
        try:
            told = encode_result(self._move(split, incoming))
        except KafkaSparkError as error:
            told = encode_error(error)
        return pa.RecordBatch.from_arrays([pa.array([told], pa.string())], ["result"])

    def _move(self, split: Split, incoming: Incoming) -> SplitResult:
        letters, routes, bad = DeadLetterBuffer(), DeadLetterBuffer(schema=ROUTED), _Bad()
        passed = ignored = routed = 0
        with Output(self.writer, split) as output:
            for batch in incoming:
                batch, away = parted(split, batch)
                routes.add(away)
                routed += away.num_rows
                rows, count, found = self._rows(batch)
                ignored += count
                if found is not None:
                    bad.add(split, found)
                    if self.tolerance is None:
                        output.give_up()
                    elif self.tolerance.keep:
                        letters.add(_letters(split, found))
                if self.tolerance is not None and (refused := output.unwritable(rows)):
                    rows, found = _refused(rows, batch, refused)
                    bad.add(split, found, TASK_PUT)
                    if self.tolerance.keep:
                        letters.add(_letters(split, found, TASK_PUT))
                passed += rows.batch.num_rows
                output.write(rows)
            result = incoming.result
            assert result is not None
            if self.tolerance is None and result.rejected:
                output.give_up()
            elif result.rejected or bad.count or routed or result.routed:
                output.defer()
            token = output.close()
        faults.reached("split.flushed")
        routed += result.routed
        return replace(
            result,
            ignored=ignored,
            rejected=result.rejected + bad.count,
            routed=routed,
            filtered=result.records - result.rejected - bad.count - ignored - routed - passed,
            samples=(*result.samples, *bad.samples)[:SAMPLES],
            token=token,
            letters=joined(result.letters, letters.to_bytes()),
            routes=routes.to_bytes(),
        )

    def _rows(self, batch: pa.RecordBatch) -> tuple[Rows, int, pa.RecordBatch | None]:
        """Return the rows for the sink, the number of ignored tombstones, and the bad records."""
        column = {self.names.get(name, name): found for name, found in zip(batch.schema.names, batch.columns, strict=True)}
        absent, errors = column[ABSENT], column[ERROR]
        if self.null_values == "fail":
            errors = pc.if_else(pc.and_(absent, errors.is_null()), NO_VALUE, errors)
        fine, ignored, found = errors.is_null(), 0, None
        if errors.null_count < len(errors):
            found = batch.set_column(batch.schema.get_field_index(ERROR), ERROR, errors).filter(errors.is_valid())
        if self.null_values == "ignore":
            kept = pc.and_(fine, pc.invert(absent))
            ignored, fine = pc.sum(pc.and_(fine, absent)).as_py() or 0, kept
        arrays = [_as(column[f.name], f.type) for f in self.schema]
        rows = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        tombstones = absent if self.null_values == "delete" and pc.any(absent).as_py() else None
        offsets = column[OFFSET]
        if found is not None or ignored:
            rows, offsets = rows.filter(fine), offsets.filter(fine)
            tombstones = tombstones.filter(fine) if tombstones is not None else None
        return Rows(rows, offsets, tombstones), ignored, found


@dataclass(frozen=True)
class ShapingTask:
    """The function that Spark maps over the numbers of splits, where a program does what the transforms say: one step for Spark.

    :param read: reads and decodes a split, and does not fail, since it tells an error in its last row.
    :param program: makes rows of records.
    :param write: hands them to the sink's writer.
    """

    read: RecordTask
    program: Program
    write: WriteTask

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for at in batch.column(0).to_pylist():
                split = self.read.splits[at]
                yield self.write.told(split, Incoming(map(self.program, self.read.rows(split))))


@dataclass
class _Bad:
    """Records that could not be transformed."""

    count: int = 0
    samples: list[BadRecord] = field(default_factory=list)

    def add(self, split: Split, found: pa.RecordBatch, stage: str = "") -> None:
        self.count += found.num_rows
        for row in found.select([OFFSET, ERROR]).slice(0, SAMPLES - len(self.samples)).to_pylist():
            self.samples.append(
                BadRecord(split.range.topic, split.range.partition, row[OFFSET], row[ERROR], stage or _stage(row[ERROR]))
            )


def _stage(reason: str) -> str:
    return VALUE_CONVERTER if reason == NO_VALUE else TRANSFORMATION


def parted(split: Split, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Return the rows that stay in a batch, and those that a filter sends elsewhere, in the schema :data:`ROUTED`."""
    at = batch.schema.get_field_index(ROUTE)
    routes = batch.column(at) if at >= 0 else None
    if routes is None or routes.null_count == len(routes):
        return batch, _NONE
    found = batch.filter(routes.is_valid())
    topics, reasons = told_of(found.column(at))
    letters = _letters(split, found.set_column(found.schema.get_field_index(ERROR), ERROR, reasons))
    return batch.filter(routes.is_null()), pa.RecordBatch.from_arrays([*letters.columns, topics], schema=ROUTED)


_NONE = pa.RecordBatch.from_pylist([], schema=ROUTED)


def told_of(routes: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return the targets of routed records, and the reasons.

    :param routes: of :data:`ROUTE`, none of them null.
    """
    told = [json.loads(text) for text in routes.to_pylist()]
    return tuple(pa.array([pair[at] for pair in told], pa.string()) for at in range(2))


def _refused(rows: Rows, batch: pa.RecordBatch, refused: Mapping[int, str]) -> tuple[Rows, pa.RecordBatch]:
    """Return the rows without those that the sink cannot write, and the refused ones with the reasons."""
    at = sorted(refused)
    found = batch.filter(pc.is_in(batch.column(batch.schema.get_field_index(OFFSET)), rows.offsets.take(pa.array(at))))
    reasons = pa.array([refused[index] for index in at], pa.string())
    kept = pa.array([index not in refused for index in range(rows.batch.num_rows)], pa.bool_())
    return rows.filter(kept), found.set_column(found.schema.get_field_index(ERROR), ERROR, reasons)


def _letters(split: Split, found: pa.RecordBatch, stage: str = "") -> pa.RecordBatch:
    """Return the dead letters of rows, from the carried columns."""
    count, column = found.num_rows, dict(zip(found.schema.names, found.columns, strict=True))
    stamps = column[ORIGINAL["timestamp"]].cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64())
    arrays = [
        pa.repeat(split.range.topic, count),
        pa.repeat(pa.scalar(split.range.partition, pa.int32()), count),
        column[OFFSET],
        stamps,
        column[ORIGINAL["key"]].cast(pa.binary()),
        column[ORIGINAL["value"]].cast(pa.binary()),
        _as(column[ORIGINAL["headers"]], HEADER_LIST),
        pa.array([stage or _stage(reason) for reason in column[ERROR].to_pylist()], pa.string()),
        column[ERROR].cast(pa.string()),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=LETTER)


def _as(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Return a column that came through Spark in the announced type. Names within lists, and large types, may differ."""
    return column if column.type.equals(wanted) else column.cast(wanted)


def _struct(schema: pa.Schema) -> pa.StructType:
    return pa.struct([f.with_nullable(True) for f in schema])


def _struct_array(batch: pa.RecordBatch, missing: Sequence[bool] | None) -> pa.StructArray:
    """Return a column of structs, null where one is missing."""
    mask = pa.array(missing, pa.bool_()) if missing is not None else None
    return pa.StructArray.from_arrays(batch.columns, fields=list(_struct(batch.schema)), mask=mask)
