"""Text in one column."""

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
    column_name_problems,
    single_column_problems,
    spark_column,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column


@dataclass(frozen=True)
class String(Format):
    """The record's text as one string column; a record without a value is a null. Bytes that are no text in this encoding are
    bad, never replaced.

    :param column: the column's name.
    :param encoding: a text encoding that Python knows: ``UTF-8``, ``ISO-8859-1``, ``UTF-16``, ...
    """

    column: str = "value"
    encoding: str = "UTF-8"

    decodes_null = True

    def validate(self, where: str) -> list[Problem]:
        """What is wrong with the options; an empty list when nothing is."""
        problems = column_name_problems(self.column, where)
        try:
            # Looking it up is not enough: base64 and rot13 are codecs too, but make no text of bytes.
            b" ".decode(self.encoding)
        except UnicodeDecodeError:
            pass
        except (LookupError, TypeError, ValueError):
            problems.append(
                Problem(
                    f"{where}.encoding",
                    f"found {self.encoding!r}; expected a text encoding that Python knows",
                    "Write for instance UTF-8",
                )
            )
        return problems

    def arrow_schema(self) -> pa.Schema:
        """One nullable string column."""
        import pyarrow as pa

        return pa.schema([pa.field(self.column, pa.string())])

    def decoder(self) -> Decoder:
        """A picklable decoder."""
        return StringDecoder(self)

    def encoding_problems(self, where: str, columns: Sequence[str]) -> list[Problem]:
        """It holds one column, of any type that has a text."""
        known = codecs.lookup(self.encoding).name in _WRITTEN
        wrong = [] if known else [Problem(f"{where}.encoding", f"`{self.encoding}` is not written", "Use UTF-8")]
        return [*single_column_problems(where, columns, self), *wrong]

    def encode(self, columns: Sequence[str]) -> Column:
        """The column's text: what Spark's cast to string gives, timestamps in the time zone UTC."""
        from pyspark.sql import functions as F

        text = spark_column(columns[0]).cast("string")
        name = codecs.lookup(self.encoding).name
        return text.cast("binary") if name == "utf-8" else F.encode(text, _WRITTEN[name])

    def encoder(self, columns: Sequence[tuple[str, Kind]]) -> Encoder | None:
        """In UTF-8, for what has the same text whatever Spark's settings are."""
        from airflow_kafka_spark.formats.tasks.text import TextEncoder

        ((column, kind),) = columns
        if kind in ("binary", "fine decimal") or codecs.lookup(self.encoding).name != "utf-8":
            return None
        return TextEncoder(column, kind)


_WRITTEN = {"utf-8": "UTF-8", "iso8859-1": "ISO-8859-1", "ascii": "US-ASCII", "utf-16": "UTF-16"}
"""Encodings that Spark writes, by Python's names."""


@dataclass(frozen=True)
class StringDecoder(Decoder):
    """See :class:`String`."""

    format: String

    def decode(self, values: Sequence[bytes | None]) -> Decoded:
        """The values' text."""
        import pyarrow as pa

        bad: list[tuple[int, str]] = []
        texts: list[bytes | None] | Sequence[bytes | None] = values
        try:
            if codecs.lookup(self.format.encoding).name != "utf-8":
                raise pa.ArrowInvalid
            # Arrow checks the text, all of it at once.
            column = pa.array(texts, pa.binary()).cast(pa.string())
        except pa.ArrowInvalid:
            column = pa.array([self._utf8(i, v, bad) for i, v in enumerate(values)], pa.binary()).cast(pa.string())
        return Decoded(pa.RecordBatch.from_arrays([column], schema=self.format.arrow_schema()), tuple(bad))

    def _utf8(self, position: int, value: bytes | None, bad: list[tuple[int, str]]) -> bytes | None:
        """One value as UTF-8; None, with the reason noted, when it is no text."""
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
