"""Bytes without interpretation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.formats.base import (
    Decoded,
    Decoder,
    Encoder,
    Format,
    Kind,
    column_name_problems,
    single_column_problems,
    spark_column,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column


@dataclass(frozen=True)
class Raw(Format):
    """The record's bytes as one binary column. No record is ever bad; a record without a value is a null.

    :param column: the column's name; default ``value``.
    """

    column: str = "value"

    decodes_null = True

    def validate(self, where: str) -> list[Problem]:
        """Return the problems of the options."""
        return column_name_problems(self.column, where)

    def arrow_schema(self) -> pa.Schema:
        """Return one nullable binary column."""
        import pyarrow as pa

        return pa.schema([pa.field(self.column, pa.binary())])

    def decoder(self) -> Decoder:
        """Return a picklable decoder."""
        return RawDecoder(self)

    def encoding_problems(self, where: str, columns: Sequence[str]) -> list[Problem]:
        """Return the problems of the columns: it writes one, of type binary or string."""
        return single_column_problems(where, columns, self)

    def encode(self, columns: Sequence[str]) -> Column:
        """Return the column's bytes."""
        return spark_column(columns[0]).cast("binary")

    def encoder(self, columns: Sequence[tuple[str, Kind]]) -> Encoder | None:
        """Return the encoder of bytes and texts; None for other kinds."""
        from airflow_kafka_spark.formats.tasks.text import TextEncoder

        ((column, kind),) = columns
        return TextEncoder(column, kind) if kind in ("binary", "text") else None


@dataclass(frozen=True)
class RawDecoder(Decoder):
    """The decoder of :class:`Raw`."""

    format: Raw

    def decode(self, values: Sequence[bytes | None]) -> Decoded:
        """Return the values themselves."""
        import pyarrow as pa

        return Decoded(pa.RecordBatch.from_arrays([pa.array(values, pa.binary())], schema=self.format.arrow_schema()))
