"""Rows that a task has read by itself become records. Runs in Spark's tasks.

What comes out is what :meth:`~airflow_kafka_spark.sinks.kafka.sink.KafkaSink.records` makes in Spark, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from airflow_kafka_spark.formats.base import Encoder

_HEADERS = pa.struct([("key", pa.string()), ("value", pa.binary())])


@dataclass(frozen=True)
class RecordEncoder:
    """Makes batches for :class:`~airflow_kafka_spark.sinks.kafka.tasks.send.Sender`.

    :param key: of the keys, None for records without.
    :param value: of the values.
    :param topic: the column of the topic.
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
        """The rows as records."""
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
        return pa.ListArray.from_arrays(pa.array(ends), pa.StructArray.from_arrays([names, taken], fields=list(_HEADERS)))


def _milliseconds(column: pa.Array) -> pa.Array:
    """As Spark counts them: the whole ones before it, also for times before 1970."""
    plain = column.cast(pa.int64())
    if not pa.types.is_timestamp(column.type):
        return plain
    whole = np.asarray(plain.fill_null(0)) // 1000
    return pa.array(whole, pa.int64(), mask=np.asarray(plain.is_null()))
