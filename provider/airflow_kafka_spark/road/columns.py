"""From records to the sink's rows: decoded values, decoded keys, and the metadata columns the user asked for.

Runs in Spark's tasks; on the driver only to know the schema. Imports neither Airflow nor pyspark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from airflow_kafka_spark.windows.model import KEY_CONVERTER, VALUE_CONVERTER, BadRecord

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_kafka_spark.formats.base import Decoded, Decoder, Format
    from airflow_kafka_spark.sinks.base import Rows
    from airflow_kafka_spark.sources.kafka.tasks.read import Records

NullValues = Literal["fail", "ignore", "write", "delete"]

METADATA = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")
"""What a record has beside its decoded value, as Spark's Kafka source names it; ``key`` and ``value`` are the raw bytes."""


def metadata_type(name: str) -> pa.DataType:
    import pyarrow as pa

    return {
        "key": pa.binary(),
        "value": pa.binary(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "timestamp": pa.timestamp("us", "UTC"),
        "timestampType": pa.int32(),
        "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    }[name]


@dataclass(frozen=True)
class Layout:
    """How a record's parts become the columns of a row.

    :param schema: all columns: the value's, then the key's, then metadata.
    :param value: decodes values.
    :param key: decodes keys, or None. A column that key and value both have is taken from the key: that is what an upsert or a
        delete is keyed by, and the only part a tombstone has.
    :param key_names: the key's columns.
    :param metadata: what of :data:`METADATA` goes into which column.
    :param null_values: what a record without a value means.
    """

    schema: pa.Schema
    value: Decoder
    value_names: tuple[str, ...]
    key: Decoder | None
    key_names: tuple[str, ...]
    metadata: tuple[tuple[str, str], ...]
    null_values: NullValues

    @classmethod
    def of(cls, value: Format, key: Format | None, metadata: tuple[tuple[str, str], ...], null_values: NullValues) -> Layout:
        """Return the layout of the columns of two formats, and of metadata columns."""
        import pyarrow as pa

        of_value, of_key = value.arrow_schema(), key.arrow_schema() if key else pa.schema([])
        by_name: dict[str, pa.Field] = {f.name: f for f in of_value}
        by_name |= {f.name: f for f in of_key}
        by_name |= {column: pa.field(column, metadata_type(name)) for name, column in metadata}
        if null_values in ("write", "delete"):
            by_name = {name: f.with_nullable(True) for name, f in by_name.items()}
        return cls(
            schema=pa.schema(list(by_name.values())),
            value=value.decoder(),
            value_names=tuple(of_value.names),
            key=key.decoder() if key else None,
            key_names=tuple(of_key.names),
            metadata=metadata,
            null_values=null_values,
        )

    @property
    def wants_headers(self) -> bool:
        return any(name == "headers" for name, _ in self.metadata)

    @property
    def wants_keys(self) -> bool:
        return self.key is not None or any(name == "key" for name, _ in self.metadata)

    def rows(self, records: Records) -> Lines:
        """Decode a batch. Bad and ignored records are left out of the rows."""
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        from airflow_kafka_spark.sinks.base import Rows

        decoded = self.value.decode(records.values)
        bad, bad_keys = dict(decoded.bad), set()
        columns = dict(zip(self.value_names, decoded.batch.columns, strict=True))
        # No rows, and no deletes: their keys may be of another kind.
        left_out = set(decoded.left_out)
        if self.key is not None:
            keys = self.key.decode(records.keys or ())
            bad_keys = {index for index, _ in keys.bad if index not in bad and index not in left_out}
            bad |= {index: f"key: {reason}" for index, reason in keys.bad if index in bad_keys}
            columns |= dict(zip(self.key_names, keys.batch.columns, strict=True))
        absent = gone(records, decoded)
        nulls = [i for i, dead in enumerate(absent) if dead and i not in left_out] if absent is not None else []
        if self.null_values == "fail":
            bad |= dict.fromkeys(nulls, NO_VALUE)
            bad_keys.difference_update(nulls)
        for name, column in self.metadata:
            columns[column] = metadata_of(name, records)
        arrays = [columns[name] for name in self.schema.names]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        offsets, tombstones = records.offsets, None
        if nulls and self.null_values == "delete":
            tombstones = pa.array(absent, pa.bool_())
        ignored = left_out.union(i for i in nulls if self.null_values == "ignore" and i not in bad)
        if bad or ignored:
            places = np.ones(len(records), bool)
            places[[*bad, *ignored]] = False
            kept = pa.array(places)
            batch, offsets = batch.filter(kept), offsets.filter(kept)
            tombstones = tombstones.filter(kept) if tombstones is not None else None
        if tombstones is not None and not pc.any(tombstones).as_py():
            tombstones = None
        at = sorted(bad)
        return Lines(Rows(batch, offsets, tombstones), len(ignored), self._bad_records(records, at, bad, bad_keys), at)

    def _bad_records(
        self, records: Records, at: Sequence[int], reasons: Mapping[int, str], keys: set[int]
    ) -> tuple[BadRecord, ...]:
        return tuple(
            BadRecord(
                records.topic,
                records.partition,
                records.offsets[index].as_py(),
                reasons[index],
                KEY_CONVERTER if index in keys else VALUE_CONVERTER,
            )
            for index in at
        )


def gone(records: Records, decoded: Decoded) -> list[bool] | None:
    """Return which records have no value, or one that marks a delete (``Decoded.deleted``); None if there are none."""
    if decoded.deleted is None:
        return [value is None for value in records.values] if None in records.values else None
    return [value is None or dead for value, dead in zip(records.values, decoded.deleted.to_pylist(), strict=True)]


def metadata_of(name: str, records: Records) -> pa.Array:
    """Return a metadata column of records."""
    import pyarrow as pa

    n = len(records)
    if name in ("key", "value"):
        return pa.array(records.keys if name == "key" else records.values, pa.binary())
    if name == "offset":
        return records.offsets
    if name == "timestamp":
        return records.timestamps.cast(pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC"))
    if name == "headers":
        return pa.array(
            [None if h is None else [{"key": k, "value": v} for k, v in h] for h in records.headers or [None] * n],
            metadata_type(name),
        )
    constant = {"topic": records.topic, "partition": records.partition, "timestampType": records.timestamp_type}[name]
    return pa.repeat(pa.scalar(constant, metadata_type(name)), n)


NO_VALUE = 'it has no value (a tombstone); set `behavior_on_null_values` to "ignore" or "write", or let the sink delete'


@dataclass(frozen=True)
class Lines:
    """A decoded batch: the rows for the sink, how many tombstones were ignored, and what was bad.

    :param at: where among the records the bad ones are.
    """

    rows: Rows
    ignored: int
    bad: Sequence[BadRecord]
    at: Sequence[int] = ()
