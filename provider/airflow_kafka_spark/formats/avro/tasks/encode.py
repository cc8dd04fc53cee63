"""Encodes Avro inside a Spark task: whole batches with Arrow and NumPy; what does not fit is told by the reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_kafka_spark.formats.avro.schema import Record, Schema
from airflow_kafka_spark.formats.avro.tasks.pieces import joined, pieces, record_pieces, spread
from airflow_kafka_spark.formats.avro.tasks.row_encode import record_writer, writing
from airflow_kafka_spark.formats.base import Encoded, Encoder
from airflow_kafka_spark.formats.confluent import header
from airflow_kafka_spark.formats.tasks.batch_decoder import Doubt
from airflow_kafka_spark.formats.tasks.row_encoder import all_of, not_utf8
from airflow_kafka_spark.formats.text import BadValue
from airflow_kafka_spark.formats.types import Column

FEW = 512
"""So many rows are looked at together once more where a batch is in doubt: with fewer the looking costs more than it spares."""


class AvroEncoder(Encoder):
    """See :class:`airflow_kafka_spark.formats.avro.format.Avro`.

    :param schema: what values are written with: a record, whose fields are columns; or another type, which one column is.
    :param columns: the columns and their types, all of which the schema takes.
    :param schema_id: what stands before each value in Confluent's wire format; None for values without a header.
    """

    def __init__(self, schema: Schema, columns: tuple[Column, ...], schema_id: int | None = None) -> None:
        self.schema, self.columns, self.schema_id = schema, columns, schema_id
        self._header = b"" if schema_id is None else header(schema_id)
        if isinstance(schema, Record):
            self._pieces, self._write = record_pieces(schema, columns), record_writer(schema, columns)
            return
        (column,) = columns
        parts, write = pieces(schema, column.type), writing(schema, column.type)
        self._pieces, self._write = lambda rows: parts(rows[column.name]), lambda out, row: write(out, row[column.name])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.schema, self.columns, self.schema_id)

    def encode(self, rows: Mapping[str, pa.Array]) -> pa.Array:
        """The rows' values. Of a schema that is no record, a null is no value.

        :raises RowRejected: a row does not fit the schema.
        """
        columns = {c.name: rows[c.name] for c in self.columns}
        return all_of(self._encode(columns, np.ones(len(columns[self.columns[0].name]), bool)))

    def encode_struct(self, rows: pa.StructArray) -> Encoded:
        """The same of rows that are one column, with fields in the order of the columns; a null is no value."""
        present = rows.drop_null()
        columns = {c.name: present.field(n) for n, c in enumerate(self.columns)}
        return self._encode(columns, rows.is_valid().to_numpy(zero_copy_only=False))

    def _encode(self, columns: Mapping[str, pa.Array], there: np.ndarray) -> Encoded:
        """:param there: which of the rows the columns hold."""
        if not isinstance(self.schema, Record):
            ((name, column),) = columns.items()
            there = there.copy()
            there[there] = column.is_valid().to_numpy(zero_copy_only=False)
            columns = {name: column.drop_null()}
        places = np.flatnonzero(there)
        parts = list(self._divided(columns, places))
        found = parts[0] if len(parts) == 1 else _together(parts)
        if len(places) == len(there):
            return found
        there, values = there.copy(), found.values.drop_null() if found.bad else found.values
        there[[at for at, _ in found.bad]] = False
        return Encoded(spread(values, there, nulls=True), found.bad)

    def _divided(self, columns: Mapping[str, pa.Array], places: np.ndarray) -> Iterator[Encoded]:
        """All of them at once; on doubt in parts, so that a row that does not fit slows down only a few others."""
        try:
            yield Encoded(joined([self._header, *self._pieces(columns)], len(places)))
        except Doubt:
            if len(places) <= FEW:
                yield self.encode_by_reference(columns, places.tolist())
                return
            for at in range(0, len(places), FEW):
                yield from self._divided({name: c.slice(at, FEW) for name, c in columns.items()}, places[at : at + FEW])

    def encode_by_reference(self, columns: Mapping[str, pa.Array], places: Sequence[int]) -> Encoded:
        """The same one by one; tells which rows do not fit, and why.

        :param places: where each is among all rows.
        """
        made: list[bytes | None] = []
        bad: list[tuple[int, str]] = []
        for at, place in enumerate(places):
            out = bytearray(self._header)
            try:
                self._write(out, {name: column[at] for name, column in columns.items()})
                made.append(bytes(out))
            except BadValue as e:
                if not isinstance(self.schema, Record):
                    e.within(f".{self.columns[0].name}")
                made.append(None)
                bad.append((place, e.reason))
            except UnicodeDecodeError as e:
                made.append(None)
                bad.append((place, not_utf8(e)))
        return Encoded(pa.array(made, pa.binary()), tuple(bad))


def _together(parts: Sequence[Encoded]) -> Encoded:
    return Encoded(pa.concat_arrays([part.values for part in parts]), tuple(bad for part in parts for bad in part.bad))
