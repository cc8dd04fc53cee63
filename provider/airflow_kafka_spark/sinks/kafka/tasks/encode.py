"""Encoding rows as the keys, values and headers of records.

:class:`RecordEncoder` is for rows that a task has read by itself. Its records are those that
:meth:`~airflow_kafka_spark.sinks.kafka.sink.KafkaSink.make_records` makes in Spark, byte for byte. :class:`KeyValueEncoder` is
for rows that Spark passes as structs. Headers are handled as Arrow arrays for many records at once, because a dead letter has ten
headers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.formats.base import Encoded, Encoder, StructEncoder
from airflow_kafka_spark.formats.tasks.kernels import if_else
from airflow_kafka_spark.formats.tasks.text import format_plain_decimals
from airflow_kafka_spark.windows.model import KEY_CONVERTER, VALUE_CONVERTER

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def extend_headers(headers: pa.ListArray, facts: Mapping[str, Any]) -> pa.ListArray:
    """Return the headers of records, each followed by one header for each fact.

    :param headers: an array of type :data:`HEADERS`; null for a record without headers.
    :param facts: header name -> an array with a value for each record, or one value for all of them.
    """
    count, width = len(headers), len(facts)
    own_names, own_values = headers.flatten().flatten()
    own = len(own_names)
    # The position at which each record's facts begin: after its own headers and everything before them.
    ends = np.cumsum(_compute_lengths(headers)) + np.arange(count) * width
    places = ends[:, None] + np.arange(width)
    names = np.empty(own + count * width, np.int64)
    names[places] = own + np.arange(width)
    values = np.empty(len(names), np.int64)
    values[places] = own + np.arange(width) * count + np.arange(count)[:, None]
    kept = np.ones(len(names), bool)
    kept[places] = False
    names[kept] = values[kept] = np.arange(own)
    pairs = [
        pa.concat_arrays([own_names, pa.array(facts, pa.string())]).take(pa.array(names)),
        pa.concat_arrays([own_values, *(_to_binary(value, count) for value in facts.values())]).take(pa.array(values)),
    ]
    offsets = pa.array(np.concatenate([[0], ends + width]), pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(pairs, fields=list(HEADERS.value_type)), type=HEADERS)


def list_pairs(headers: pa.ListArray) -> list[list[tuple[str, bytes | None]]]:
    """Return the headers of each record in the client's form.

    :param headers: lists of structs with a ``key`` and a ``value``; null for a record without headers.
    """
    each = headers.flatten()
    pairs = list(zip(*(pc.struct_field(each, name).to_pylist() for name in ("key", "value")), strict=True))
    return [pairs[start:end] for start, end in pairwise([0, *np.cumsum(_compute_lengths(headers)).tolist()])]


def _compute_lengths(headers: pa.ListArray) -> np.ndarray:
    return np.asarray(pc.list_value_length(headers).fill_null(0), np.int64)


def _to_binary(value: pa.Array | object, count: int) -> pa.Array:
    if isinstance(value, pa.Array):
        return value.cast(pa.string()).cast(pa.binary())
    return pa.repeat(pa.scalar(str(value).encode(), pa.binary()), count)


BadRows = Mapping[int, tuple[str, str]]
"""Rows of a batch that cannot be encoded: position in the batch -> stage and reason."""


@dataclass(frozen=True)
class RecordEncoder:
    """Encodes the columns of a source as records for :class:`~airflow_kafka_spark.sinks.kafka.tasks.send.Sender`.

    :param key: the encoder of the keys, None for records without a key.
    :param value: the encoder of the values.
    :param topic: the column that names the topic.
    :param partition: the column of the partition.
    :param timestamp: the column of the record's time.
    :param headers: header name -> encoder of its values.
    """

    key: Encoder | None
    value: Encoder
    topic: str | None = None
    partition: str | None = None
    timestamp: str | None = None
    headers: Mapping[str, Encoder] = field(default_factory=dict)

    def encode(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows as records, in their order."""
        rows = dict(zip(batch.schema.names, batch.columns, strict=True))
        columns = {
            "key": self.key.encode(rows) if self.key is not None else pa.nulls(batch.num_rows, pa.binary()),
            "value": self.value.encode(rows),
        }
        if self.topic is not None:
            columns["topic"] = rows[self.topic]
        if self.partition is not None:
            columns["partition"] = rows[self.partition].cast(pa.int64())
        if self.timestamp is not None:
            columns["timestamp"] = _to_milliseconds(rows[self.timestamp])
        if self.headers:
            columns["headers"] = self._encode_headers(rows, batch.num_rows)
        return pa.RecordBatch.from_pydict(columns)

    def _encode_headers(self, rows: Mapping[str, pa.Array], count: int) -> pa.Array:
        values = [encoder.encode(rows) for encoder in self.headers.values()]
        there = np.stack([np.asarray(column.is_valid()) for column in values], axis=1)
        row, which = np.nonzero(there)
        taken = pa.concat_arrays(values).take(pa.array(which * count + row))
        names = pa.array(list(self.headers), pa.string()).take(pa.array(which))
        ends = np.concatenate([[0], np.cumsum(there.sum(axis=1))]).astype(np.int32)
        return pa.ListArray.from_arrays(
            pa.array(ends), pa.StructArray.from_arrays([names, taken], fields=list(HEADERS.value_type))
        )


def _to_milliseconds(column: pa.Array) -> pa.Array:
    """Return milliseconds since the epoch, rounded down as Spark does, also for times before 1970."""
    plain = column.cast(pa.int64())
    if not pa.types.is_timestamp(column.type):
        return plain
    whole = np.asarray(plain.fill_null(0)) // 1000
    return pa.array(whole, pa.int64(), mask=np.asarray(plain.is_null()))


@dataclass(frozen=True)
class ColumnEncoder:
    """Encodes the fields of structs as Spark would encode columns.

    :param encoder: encodes the fields. Decimals are passed as texts in plain notation.
    """

    encoder: Encoder

    def encode_struct(self, rows: pa.StructArray) -> Encoded:
        """Return the encoded rows; null for a struct that is null. No row is refused."""
        columns = {f.name: _remove_decimals(column) for f, column in zip(rows.type, rows.flatten(), strict=True)}
        values = self.encoder.encode(columns)
        return Encoded(if_else(rows.is_valid(), values, None) if rows.null_count else values)


def _remove_decimals(column: pa.Array) -> pa.Array:
    return format_plain_decimals(column) if pa.types.is_decimal(column.type) else column


@dataclass(frozen=True)
class KeyValueEncoder:
    """Encodes keys and values that arrive as structs.

    :param encoders: the encoders of ``key`` and ``value``, if these arrive as structs. Other columns stay unchanged.
    """

    encoders: Mapping[str, StructEncoder]

    def encode(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, BadRows]:
        """Return the batch with keys and values in binary, and the rows that cannot be encoded, which are null in the batch."""
        found: dict[int, tuple[str, str]] = {}
        # The key first, as in Connect: if key and value of a row both fail, the key is reported.
        for part, stage, called in (("key", KEY_CONVERTER, "key: "), ("value", VALUE_CONVERTER, "")):
            if part not in self.encoders:
                continue
            at = batch.schema.get_field_index(part)
            made = self.encoders[part].encode_struct(batch.column(at))
            batch = batch.set_column(at, part, made.values)
            for row, reason in made.bad:
                found.setdefault(row, (stage, called + reason))
        return batch, dict(sorted(found.items()))
