"""Formats without a schema: bytes without interpretation, and text as one column."""

from __future__ import annotations

import codecs
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
    find_column_name_problems,
    find_single_column_problems,
    find_text_encoding_problems,
    is_utf8,
    make_spark_column,
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
        return find_column_name_problems(self.column, where)

    def get_arrow_schema(self) -> pa.Schema:
        """Return one nullable binary column."""
        import pyarrow as pa

        return pa.schema([pa.field(self.column, pa.binary())])

    def make_decoder(self) -> Decoder:
        """Return a picklable decoder."""
        return RawDecoder(self)

    def find_encoding_problems(self, where: str, columns: Sequence[str]) -> list[Problem]:
        """Return the problems of the columns: this format writes one column of type binary or string."""
        return find_single_column_problems(where, columns, self)

    def encode(self, columns: Sequence[str]) -> Column:
        """Return the column's bytes."""
        return make_spark_column(columns[0]).cast("binary")

    def make_encoder(self, columns: Sequence[tuple[str, Kind]]) -> Encoder | None:
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

        return Decoded(pa.RecordBatch.from_arrays([pa.array(values, pa.binary())], schema=self.format.get_arrow_schema()))


@dataclass(frozen=True)
class String(Format):
    """The record's text as one string column; a record without a value is a null. Bytes that are not valid in the encoding make
    the record bad; they are never replaced.

    :param column: the column's name; default ``value``.
    :param encoding: a text encoding known to Python (``UTF-8``, ``ISO-8859-1``, ``UTF-16``, ...); default ``UTF-8``.
    """

    column: str = "value"
    encoding: str = "UTF-8"

    decodes_null = True

    def validate(self, where: str) -> list[Problem]:
        """Return the problems of the options."""
        return [*find_column_name_problems(self.column, where), *find_text_encoding_problems(where, self.encoding)]

    def get_arrow_schema(self) -> pa.Schema:
        """Return one nullable string column."""
        import pyarrow as pa

        return pa.schema([pa.field(self.column, pa.string())])

    def make_decoder(self) -> Decoder:
        """Return a picklable decoder."""
        return StringDecoder(self)

    def find_encoding_problems(self, where: str, columns: Sequence[str]) -> list[Problem]:
        """Return the problems of the columns and the encoding. This format writes one column of any type that has a text."""
        known = codecs.lookup(self.encoding).name in _WRITTEN
        wrong = [] if known else [Problem(f"{where}.encoding", f"`{self.encoding}` is not written", "Use UTF-8")]
        return [*find_single_column_problems(where, columns, self), *wrong]

    def encode(self, columns: Sequence[str]) -> Column:
        """Return the column's text as Spark's cast to string produces it, with timestamps in UTC."""
        from pyspark.sql import functions as F

        text = make_spark_column(columns[0]).cast("string")
        name = codecs.lookup(self.encoding).name
        return text.cast("binary") if name == "utf-8" else F.encode(text, _WRITTEN[name])

    def make_encoder(self, columns: Sequence[tuple[str, Kind]]) -> Encoder | None:
        """Return the encoder for UTF-8, of kinds whose text does not depend on Spark's settings; None for others."""
        from airflow_kafka_spark.formats.tasks.text import TextEncoder

        ((column, kind),) = columns
        if kind in ("binary", "fine decimal", "other") or not is_utf8(self.encoding):
            return None
        return TextEncoder(column, kind)


_WRITTEN = {"utf-8": "UTF-8", "iso8859-1": "ISO-8859-1", "ascii": "US-ASCII", "utf-16": "UTF-16"}
"""The encodings that Spark can write, by Python's names."""


@dataclass(frozen=True)
class StringDecoder(Decoder):
    """The decoder of :class:`String`."""

    format: String

    def decode(self, values: Sequence[bytes | None]) -> Decoded:
        """Return the texts of the values."""
        import pyarrow as pa

        bad: list[tuple[int, str]] = []
        texts: list[bytes | None] | Sequence[bytes | None] = values
        try:
            if not is_utf8(self.format.encoding):
                raise pa.ArrowInvalid
            # Arrow checks all texts at once.
            column = pa.array(texts, pa.binary()).cast(pa.string())
        except pa.ArrowInvalid:
            column = pa.array([self._to_utf8(i, v, bad) for i, v in enumerate(values)], pa.binary()).cast(pa.string())
        return Decoded(pa.RecordBatch.from_arrays([column], schema=self.format.get_arrow_schema()), tuple(bad))

    def _to_utf8(self, position: int, value: bytes | None, bad: list[tuple[int, str]]) -> bytes | None:
        """Return one value as UTF-8, or None if it is not valid in the encoding; the reason is added to ``bad``."""
        if value is None:
            return None
        try:
            return value.decode(self.format.encoding).encode("utf-8")
        except UnicodeEncodeError as e:
            reason = f"it holds the lone surrogate {ascii(e.object[e.start])}, which is no character"
        except UnicodeDecodeError as e:
            reason = f"byte 0x{value[e.start] if e.start < len(value) else 0:02x} at position {e.start}: {e.reason}"
        bad.append((position, f"column `{self.format.column}`: not {self.format.encoding}, {reason}"))
        return None
