"""Encoding rows as the keys, values and headers of records.

:class:`RecordEncoder` is for rows that a task has read by itself. Its records are those that
:meth:`~airflow_kafka_spark.sinks.kafka.sink.KafkaSink.records` makes in Spark, byte for byte. :class:`KeyValueEncoder` is for
rows that Spark hands over as structs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from airflow_kafka_spark.formats.base import Encoder, StructEncoder
from airflow_kafka_spark.sinks.kafka.tasks.headers import HEADERS
from airflow_kafka_spark.windows.model import KEY_CONVERTER, VALUE_CONVERTER

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
            columns["partition"] = rows[self.partition].cast(pa.int32())
        if self.timestamp is not None:
            columns["timestamp"] = _milliseconds(rows[self.timestamp])
        if self.headers:
            columns["headers"] = self._headers(rows, batch.num_rows)
        return pa.RecordBatch.from_pydict(columns)

    def _headers(self, rows: Mapping[str, pa.Array], count: int) -> pa.Array:
        values = [encoder.encode(rows) for encoder in self.headers.values()]
        there = np.stack([np.asarray(column.is_valid()) for column in values], axis=1)
        row, which = np.nonzero(there)
        taken = pa.concat_arrays(values).take(pa.array(which * count + row))
        names = pa.array(list(self.headers), pa.string()).take(pa.array(which))
        ends = np.concatenate([[0], np.cumsum(there.sum(axis=1))]).astype(np.int32)
        return pa.ListArray.from_arrays(
            pa.array(ends), pa.StructArray.from_arrays([names, taken], fields=list(HEADERS.value_type))
        )


def _milliseconds(column: pa.Array) -> pa.Array:
    """Return milliseconds since the epoch, rounded down as Spark does, also for times before 1970."""
    plain = column.cast(pa.int64())
    if not pa.types.is_timestamp(column.type):
        return plain
    whole = np.asarray(plain.fill_null(0)) // 1000
    return pa.array(whole, pa.int64(), mask=np.asarray(plain.is_null()))


@dataclass(frozen=True)
class KeyValueEncoder:
    """Encodes keys and values that arrive as structs.

    :param encoders: of ``key`` and ``value``, where these arrive as structs. The other columns stay as they are.
    """

    encoders: Mapping[str, StructEncoder]

    def encode(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, BadRows]:
        """Return the batch with keys and values in binary, and the rows that cannot be encoded: they are null in the batch."""
        found: dict[int, tuple[str, str]] = {}
        # The key first, as Connect does it: of a row whose key and value both fail, the key is reported.
        for part, stage, called in (("key", KEY_CONVERTER, "key: "), ("value", VALUE_CONVERTER, "")):
            if part not in self.encoders:
                continue
            at = batch.schema.get_field_index(part)
            made = self.encoders[part].encode_struct(batch.column(at))
            batch = batch.set_column(at, part, made.values)
            for row, reason in made.bad:
                found.setdefault(row, (stage, called + reason))
        return batch, dict(sorted(found.items()))
