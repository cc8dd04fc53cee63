"""Sort the rows of a split after all transforms: into good, bad and ignored rows, and those that go to another topic.

Runs in Spark's tasks. Imports neither Airflow nor pyspark.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.formats.base import ERROR, GIVEN, LEFT_OUT, OFFSET, ORIGINAL, ROUTE, TOMBSTONE, UNREADABLE, NullValues
from airflow_kafka_spark.formats.tasks.kernels import if_else
from airflow_kafka_spark.formats.tasks.text import format_rows_as_json
from airflow_kafka_spark.jobs.tasks.account import SplitAccount
from airflow_kafka_spark.jobs.tasks.layout import NO_VALUE, Reasons
from airflow_kafka_spark.sinks.kafka.tasks.dead_letters import ROUTED, locate_record, locate_row, make_dead_letters
from airflow_kafka_spark.sinks.kafka.tasks.encode import HEADERS
from airflow_kafka_spark.windows.model import TRANSFORMATION, VALUE_CONVERTER, BadRecord

Columns = Mapping[str, pa.Array]


class Origin(ABC):
    """Returns the original records of rows, and the position at which they were read."""

    @abstractmethod
    def get_columns_of(self, rows: pa.RecordBatch, encoded: pa.RecordBatch | None) -> Columns:
        """Return key, value, headers and timestamp of rows as they were read, as :func:`make_dead_letters` takes them.

        :param rows: rows after all transforms.
        :param encoded: the parts of the rows that could be encoded; None if encoding was not tried.
        """

    def locate(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the position at which a row was read, for the headers of a routed record.

        :param row: the columns of a batch of dead letters.
        """
        return locate_record(row)


@dataclass(frozen=True)
class RecordOrigin(Origin):
    """The origin of Kafka records.

    :param find: returns the original parts of the records of some rows; None: the rows carry them in the columns
        :data:`~airflow_kafka_spark.formats.base.ORIGINAL`.
    """

    find: Callable[[pa.RecordBatch], Columns] | None = None

    def get_columns_of(self, rows: pa.RecordBatch, encoded: pa.RecordBatch | None) -> Columns:
        if self.find is not None:
            return self.find(rows)
        return {part: rows.column(ORIGINAL[part]) for part in ("key", "value", "headers", "timestamp")}


@dataclass(frozen=True)
class RowOrigin(Origin):
    """The origin of a source's rows. A row has no bytes yet, so a dead letter has the row as JSON.

    :param source: the source's URI.
    :param window: the window.
    """

    source: str = ""
    window: str = ""

    def get_columns_of(self, rows: pa.RecordBatch, encoded: pa.RecordBatch | None) -> Columns:
        names, count = rows.schema.names, rows.num_rows
        if GIVEN["value"] in names:
            given = {part: rows.column(column) for part, column in GIVEN.items()}
            key = given["key"] if _is_binary(given["key"]) else pa.nulls(count, pa.binary())
        else:
            nothing = {"timestamp": pa.nulls(count, pa.int64()), "headers": pa.nulls(count, HEADERS)}
            given = nothing | {part: rows.column(part) for part in GIVEN if part in names}
            key = (encoded if encoded is not None else rows).column("key")
            key = key if _is_binary(key) else pa.nulls(count, pa.binary())
        return {**given, "key": key, "value": _format_rows(given["key"], given["value"])}

    def locate(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return locate_row(self.source, self.window, row)


@dataclass(frozen=True)
class Sorter:
    """Sorts the rows of one split, and counts all rows that are not good in its account.

    :param account: the split's account.
    :param origin: the origin of its rows.
    :param null_values: handling of records without a value; None if they were handled before, or for rows of a source.
    """

    account: SplitAccount
    origin: Origin = field(default_factory=RecordOrigin)
    null_values: NullValues | None = None

    def sort(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Return the good rows of a batch, and the records that a filter sends elsewhere, in the schema :data:`ROUTED`.

        The routed ones are not counted yet.
        """
        rows, routed = self._separate(batch)
        return self._drop_left_out(self._drop_errors(rows)), routed

    def refuse(self, rows: pa.RecordBatch, refused: Reasons, encoded: pa.RecordBatch | None = None) -> pa.RecordBatch:
        """Count the rows that cannot be written as bad, and return the others.

        :param refused: the positions of the rows, with stage and reason.
        :param encoded: the parts of all rows that could be encoded; None if they were not encoded.
        """
        if not refused:
            return rows
        at = pa.array(refused, pa.int64())
        self._add_bad(rows.take(at), list(refused.values()), encoded.take(at) if encoded is not None else None)
        return drop_rows(rows, refused)

    def _separate(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        routes = batch.column(ROUTE) if ROUTE in batch.schema.names else None
        if routes is None or routes.null_count == len(routes):
            return batch, _NONE_ROUTED
        found = batch.filter(routes.is_valid())
        targets = [json.loads(text) for text in found.column(ROUTE).to_pylist()]
        letters = self._make_letters(found, [(TRANSFORMATION, reason) for _, reason in targets], None)
        topics = pa.array([topic for topic, _ in targets], pa.string())
        return batch.filter(routes.is_null()), pa.RecordBatch.from_arrays([*letters.columns, topics], schema=ROUTED)

    def _drop_errors(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        names = rows.schema.names
        errors = rows.column(ERROR) if ERROR in names else None
        if self.null_values == "fail" and TOMBSTONE in names:
            missing = rows.column(TOMBSTONE)
            if errors is None:
                errors = pa.nulls(rows.num_rows, pa.string())
            errors = if_else(pc.and_(missing, errors.is_null()), NO_VALUE, errors)
        if errors is None or errors.null_count == len(errors):
            return rows
        why = [(_find_stage(reason), reason) for reason in errors.drop_null().to_pylist()]
        self._add_bad(rows.filter(errors.is_valid()), why, None)
        return rows.filter(errors.is_null())

    def _drop_left_out(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        if LEFT_OUT in rows.schema.names:
            rows = rows.filter(pc.invert(rows.column(LEFT_OUT)))
        if self.null_values == "ignore" and TOMBSTONE in rows.schema.names:
            missing = rows.column(TOMBSTONE)
            if count := missing.true_count:
                self.account.add_ignored(count)
                rows = rows.filter(pc.invert(missing))
        return rows

    def _add_bad(self, rows: pa.RecordBatch, why: list[tuple[str, str]], encoded: pa.RecordBatch | None) -> None:
        self.account.add_bad(self._make_bad_records(rows, why), lambda: self._make_letters(rows, why, encoded))

    def _make_bad_records(self, rows: pa.RecordBatch, why: list[tuple[str, str]]) -> list[BadRecord]:
        offsets = rows.column(OFFSET).to_pylist()
        return [
            BadRecord(*self.account.topic_partition, at, reason, stage) for at, (stage, reason) in zip(offsets, why, strict=True)
        ]

    def _make_letters(self, rows: pa.RecordBatch, why: list[tuple[str, str]], encoded: pa.RecordBatch | None) -> pa.RecordBatch:
        return make_dead_letters(self._make_bad_records(rows, why), self.origin.get_columns_of(rows, encoded))


# Not by from_pylist: it imports pandas.
_NONE_ROUTED = pa.RecordBatch.from_arrays([pa.nulls(0, kind) for kind in ROUTED.types], schema=ROUTED)


def drop_rows(rows: pa.RecordBatch, positions: Mapping[int, object]) -> pa.RecordBatch:
    """Return the rows of a batch without those at the given positions."""
    if not positions:
        return rows
    return rows.filter(pa.array([at not in positions for at in range(rows.num_rows)], pa.bool_()))


def _find_stage(reason: str) -> str:
    """Return the stage at which a row turned out to be bad."""
    return VALUE_CONVERTER if reason == NO_VALUE or reason.startswith(UNREADABLE) else TRANSFORMATION


def _is_binary(column: pa.Array) -> bool:
    return pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)


def _format_rows(keys: pa.Array, values: pa.Array) -> pa.Array:
    """Return rows as JSON: the columns of the value, and those columns of the key that the value does not have. A binary value
    stays unchanged."""
    if not pa.types.is_struct(values.type):
        return values
    columns = [(f.name, values.field(at)) for at, f in enumerate(values.type)]
    if pa.types.is_struct(keys.type):
        known = {name for name, _ in columns}
        columns += [(f.name, keys.field(at)) for at, f in enumerate(keys.type) if f.name not in known]
    return pa.array(format_rows_as_json(columns), pa.binary())
