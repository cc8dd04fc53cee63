"""Decoding batches of Kafka records into rows.

:class:`RowLayout` makes the rows for a sink or for Spark's SQL: the columns of value and key, and metadata columns.
:class:`RecordLayout` makes the records for transforms: key and value as one column each.

Runs in Spark's tasks, and on the driver to look up the schema. Imports neither Airflow nor pyspark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from airflow_kafka_spark.formats.base import OFFSET, ORIGINAL, TOMBSTONE, NullValues, get_metadata_type
from airflow_kafka_spark.windows.model import KEY_CONVERTER, VALUE_CONVERTER

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_kafka_spark.formats.base import Decoded, Decoder, Format
    from airflow_kafka_spark.sources.kafka.tasks.read import KafkaRecords

NO_VALUE = 'it has no value (a tombstone); set `behavior_on_null_values` to "ignore" or "write", or let the sink delete'

Reasons = Mapping[int, tuple[str, str]]
"""Bad records of a batch: position in the batch -> stage and reason."""


@dataclass(frozen=True)
class DecodedRecords:
    """A decoded batch of records.

    :param rows: one row for each record, also for those that are bad or ignored.
    :param bad: the records that cannot be decoded.
    :param ignored: the positions of records that are neither rows nor deletes, or tombstones that are to be ignored.
    """

    rows: pa.RecordBatch
    bad: Reasons
    ignored: Set[int]


class Layout(Protocol):
    """The conversion of the records that a task reads to rows."""

    @property
    def row_schema(self) -> pa.Schema:
        """The schema of the rows."""

    @property
    def wants_headers(self) -> bool:
        """True if the headers of records are needed."""

    @property
    def wants_keys(self) -> bool:
        """True if the keys of records are needed."""

    def decode(self, records: KafkaRecords) -> DecodedRecords:
        """Return a batch of records as rows in :attr:`row_schema`."""


@dataclass(frozen=True)
class RowLayout:
    """The conversion of a record's parts to the columns of a row.

    :param schema: all columns: the value's, then the key's, then metadata.
    :param value: decodes values.
    :param value_names: the value's columns.
    :param key: decodes keys, or None. A column that key and value both have is taken from the key, because an upsert or a delete
        uses the key, and a tombstone has only the key.
    :param key_names: the key's columns.
    :param metadata: column names by the part of a record that they hold, of
        :data:`~airflow_kafka_spark.formats.base.METADATA`.
    :param null_values: handling of records without a value.
    """

    schema: pa.Schema
    value: Decoder
    value_names: tuple[str, ...]
    key: Decoder | None
    key_names: tuple[str, ...]
    metadata: tuple[tuple[str, str], ...]
    null_values: NullValues

    @classmethod
    def of(cls, value: Format, key: Format | None, metadata: tuple[tuple[str, str], ...], null_values: NullValues) -> RowLayout:
        """Return the layout of the columns of two formats, and of metadata columns."""
        import pyarrow as pa

        of_value, of_key = value.get_arrow_schema(), key.get_arrow_schema() if key else pa.schema([])
        by_name: dict[str, pa.Field] = {f.name: f for f in of_value}
        by_name |= {f.name: f for f in of_key}
        by_name |= {column: pa.field(column, get_metadata_type(name)) for name, column in metadata}
        if null_values in ("write", "delete"):
            by_name = {name: f.with_nullable(True) for name, f in by_name.items()}
        return cls(
            schema=pa.schema(list(by_name.values())),
            value=value.make_decoder(),
            value_names=tuple(of_value.names),
            key=key.make_decoder() if key else None,
            key_names=tuple(of_key.names),
            metadata=metadata,
            null_values=null_values,
        )

    @property
    def row_schema(self) -> pa.Schema:
        """:attr:`schema`, all columns nullable, with the offset and the flag of tombstones."""
        import pyarrow as pa

        carried = [] if OFFSET in self.schema.names else [pa.field(OFFSET, pa.int64())]
        return pa.schema([*(f.with_nullable(True) for f in self.schema), *carried, pa.field(TOMBSTONE, pa.bool_())])

    @property
    def wants_headers(self) -> bool:
        return any(name == "headers" for name, _ in self.metadata)

    @property
    def wants_keys(self) -> bool:
        return self.key is not None or any(name == "key" for name, _ in self.metadata)

    def decode(self, records: KafkaRecords) -> DecodedRecords:
        import pyarrow as pa

        decoded = self.value.decode(records.values)
        bad = {at: (VALUE_CONVERTER, reason) for at, reason in decoded.bad}
        columns = dict(zip(self.value_names, decoded.batch.columns, strict=True))
        # They are neither rows nor deletes, so their keys may have another form.
        ignored = set(decoded.left_out)
        if self.key is not None:
            keys = self.key.decode(records.keys or ())
            bad = {at: (KEY_CONVERTER, f"key: {reason}") for at, reason in keys.bad if at not in ignored} | bad
            columns |= dict(zip(self.key_names, keys.batch.columns, strict=True))
        absent = find_tombstones(records, decoded)
        nulls = [i for i, dead in enumerate(absent) if dead and i not in ignored] if absent is not None else []
        if self.null_values == "fail":
            bad |= dict.fromkeys(nulls, (VALUE_CONVERTER, NO_VALUE))
        elif self.null_values == "ignore":
            ignored.update(i for i in nulls if i not in bad)
        for name, column in self.metadata:
            columns[column] = make_metadata_column(name, records)
        columns[OFFSET] = records.offsets
        flags = absent if nulls and self.null_values == "delete" else None
        columns[TOMBSTONE] = pa.array(flags, pa.bool_()) if flags is not None else pa.repeat(False, len(records))
        schema = self.row_schema
        return DecodedRecords(pa.RecordBatch.from_arrays([columns[n] for n in schema.names], schema=schema), bad, ignored)


@dataclass(frozen=True)
class RecordLayout:
    """Turns the parts of a record into the columns of a record frame, which transforms change.

    :param value: decodes values into the columns of ``value_schema``.
    :param value_schema: the columns of a value.
    :param key: decodes keys into the columns of ``key_schema``; None: keys stay bytes.
    :param key_schema: the columns of a key.
    :param originals: the parts of records that are carried along unchanged, of
        :data:`~airflow_kafka_spark.formats.base.ORIGINAL`.
    :param wanted: the columns that are used; others may be null. None: all.
    """

    value: Decoder
    value_schema: pa.Schema
    key: Decoder | None
    key_schema: pa.Schema | None
    originals: tuple[str, ...] = ()
    wanted: frozenset[str] | None = None

    @property
    def row_schema(self) -> pa.Schema:
        """The schema of a record frame, with the columns that are carried along."""
        import pyarrow as pa

        keys = pa.binary() if self.key_schema is None else _make_struct_type(self.key_schema)
        return pa.schema(
            [
                ("key", keys),
                ("value", _make_struct_type(self.value_schema)),
                *((name, get_metadata_type(name)) for name in ("topic", "partition", "offset", "timestamp", "headers")),
                (OFFSET, pa.int64()),
                *((ORIGINAL[name], get_metadata_type(name)) for name in self.originals),
            ]
        )

    @property
    def wants_headers(self) -> bool:
        return self._wants("headers", ORIGINAL["headers"])

    @property
    def wants_keys(self) -> bool:
        return self.key is not None or self._wants("key", ORIGINAL["key"])

    def decode(self, records: KafkaRecords) -> DecodedRecords:
        import pyarrow as pa

        values = self.value.decode(records.values)
        bad = {at: (VALUE_CONVERTER, reason) for at, reason in values.bad}
        ignored = frozenset(values.left_out)
        keys: pa.Array = pa.array(records.keys or [None] * len(records), pa.binary())
        if self.key is not None:
            decoded = self.key.decode(records.keys or ())
            bad = {at: (KEY_CONVERTER, f"key: {reason}") for at, reason in decoded.bad if at not in ignored} | bad
            keys = _make_struct_array(decoded.batch, [key is None for key in records.keys or ()])
        arrays = [
            keys,
            _make_struct_array(values.batch, find_tombstones(records, values)),
            *(self._make_metadata(name, name, records) for name in ("topic", "partition", "offset", "timestamp", "headers")),
            records.offsets,
            *(self._make_metadata(ORIGINAL[name], name, records) for name in self.originals),
        ]
        return DecodedRecords(pa.RecordBatch.from_arrays(arrays, schema=self.row_schema), bad, ignored)

    def _wants(self, *names: str) -> bool:
        return self.wanted is None or not self.wanted.isdisjoint(names)

    def _make_metadata(self, column: str, name: str, records: KafkaRecords) -> pa.Array:
        import pyarrow as pa

        return make_metadata_column(name, records) if self._wants(column) else pa.nulls(len(records), get_metadata_type(name))


def find_tombstones(records: KafkaRecords, decoded: Decoded) -> list[bool] | None:
    """Return a boolean per record: True if it has no value, or a value that marks a delete (``Decoded.deleted``). None if all
    records have values."""
    if decoded.deleted is None:
        return [value is None for value in records.values] if None in records.values else None
    return [value is None or dead for value, dead in zip(records.values, decoded.deleted.to_pylist(), strict=True)]


def make_metadata_column(name: str, records: KafkaRecords) -> pa.Array:
    """Return a metadata column of records."""
    import pyarrow as pa

    n = len(records)
    if name in ("key", "value"):
        return pa.array(records.keys if name == "key" else records.values, pa.binary())
    if name == "offset":
        return records.offsets
    if name == "timestampType":
        return records.timestamp_types
    if name == "timestamp":
        return records.timestamps.cast(pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC"))
    if name == "headers":
        from airflow_kafka_spark.sources.kafka.tasks.read import make_header_column

        return make_header_column(records.headers) if records.headers is not None else pa.nulls(n, get_metadata_type(name))
    constant = {"topic": records.topic, "partition": records.partition}[name]
    return pa.repeat(pa.scalar(constant, get_metadata_type(name)), n)


def _make_struct_type(schema: pa.Schema) -> pa.StructType:
    import pyarrow as pa

    return pa.struct([f.with_nullable(True) for f in schema])


def _make_struct_array(batch: pa.RecordBatch, missing: Sequence[bool] | None) -> pa.StructArray:
    """Return a column of structs, with nulls for missing ones."""
    import pyarrow as pa

    mask = pa.array(missing, pa.bool_()) if missing is not None else None
    return pa.StructArray.from_arrays(batch.columns, fields=list(_make_struct_type(batch.schema)), mask=mask)
