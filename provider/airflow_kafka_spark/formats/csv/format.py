"""CSV records with declared columns."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import Problem, SchemaInvalid
from airflow_kafka_spark.formats.base import (
    DeclaredFormat,
    Decoder,
    Encoder,
    Kind,
    find_text_encoding_problems,
    is_utf8,
    make_spark_column,
)
from airflow_kafka_spark.formats.text_values import CsvDialect, make_timestamp_reader
from airflow_kafka_spark.formats.types import Array, Column, Map, SparkSchema, Struct, parse_columns, quote_with_backticks

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn

_RESERVED = "+-./:=_"
"""Characters of unquoted values besides letters and digits."""


@dataclass(frozen=True)
class Csv(DeclaredFormat):
    """One line of CSV (RFC 4180) per record; its fields become the columns of ``schema``, by position. There is no header.

    The options have the names and meanings of Spark's for CSV, but no value silently becomes null or another value: a value
    that does not fit its column makes the record bad, with a reason that names the column.

    ==================  ============================================================  ==========================================
    column              what it takes                                                 what makes the record bad
    ==================  ============================================================  ==========================================
    any                 the field's text; null when it is ``null_value``, unquoted    null in a ``NOT NULL`` column
    tinyint to bigint   ``7``, ``-0``, ``+7``, ``007``                                ``1.0``, ``1e3``, ``" 7"``; out of range
    decimal(p,s)        exactly: ``1.50``, ``+.5``, ``1e2``                           digits beyond the scale, unless zeros, or
                                                                                      beyond the precision; ``1,5``
    float, double       a number, to the nearest; ``NaN``, ``Infinity``,              a number too large for the type
                        ``-Infinity``
    string, varchar(n)  any text                                                      more than n characters
    boolean             ``true``, ``false`` in any case                               anything else
    binary              base64 with padding                                           anything else
    date                ``2026-11-05``                                                anything else
    timestamp           as in :class:`.Json`, or in ``timestamp_format``;             anything else, numbers too; more than 6
                        without a zone it is UTC                                      digits of a second, unless zeros
    timestamp_ntz       as in :class:`.Json`, without a zone                          anything else
    ==================  ============================================================  ==========================================

    - Spaces belong to the fields. A field of any type may be in quotes, but a null never is: ``""`` is an empty text.
    - Quotes stand around a whole field, and are doubled within; delimiters and line breaks may stand within them.
    - Bad as a whole: more or fewer fields than columns; a quote within a field without quotes, or anything between a closing
      quote and the delimiter; line breaks outside of quotes, but for one at the end; a byte order mark; bytes that
      are not in the encoding.
    - A record without a value is a tombstone: a row of nulls, never bad. An empty record is one empty field.

    Written values are read back unchanged: texts are always in quotes, nulls and all other values never. Arrow decodes whole
    batches. These records are decoded row by row, with equal results: bad records (and a few next to each), and records with NUL,
    with an escape other than the quote, with ``+7`` or ``.5``, or with instants of which only some have a zone.

    :param schema: the columns in the order of the fields, as DDL or as a pyspark ``StructType``; no arrays, maps and structs.
        Required to read; rows are written with their own columns. Default empty.
    :param delimiter: the character between fields; default ``,``.
    :param quote: the character around fields; default ``"``.
    :param escape: the character before a quote within quotes: the quote itself (default, as in RFC 4180), or for instance a
        backslash, as in Spark.
    :param null_value: the unquoted text of a null; default empty.
    :param timestamp_format: the pattern of ``timestamp`` columns: ``yyyy``, ``MM``, ``dd``, ``HH``, ``mm``, ``ss``, ``S`` (up to
        nine), ``X`` to ``XXX`` (a zone, in UTC ``Z``), texts in single quotes. Parts that the pattern leaves out are not
        written. Default None: ``2026-11-05T07:08:09.123456Z``.
    :param encoding: the encoding of records that are read, known to Python (``ISO-8859-1``, ``UTF-16``, ...); default ``UTF-8``,
        the only one that is written.
    """

    schema: str | SparkSchema = ""
    delimiter: str = ","
    quote: str = '"'
    escape: str = '"'
    null_value: str = ""
    timestamp_format: str | None = None
    encoding: str = "UTF-8"

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the schema.

        :raises SchemaInvalid: the schema cannot be read.
        """
        return parse_columns(self.schema)

    @property
    def dialect(self) -> CsvDialect:
        """The delimiter, quotes and null of this format."""
        return CsvDialect(self.delimiter, self.quote, self.escape, self.null_value)

    def validate(self, where: str) -> list[Problem]:
        """Return the problems of the schema and the options."""
        problems = self._find_option_problems(where)
        try:
            columns = self.columns
        except SchemaInvalid as e:
            found = f"{e.found}; expected {e.expected}"
            return [Problem(f"{where}.schema", found, "Correct the schema; its types are those of Spark's DDL"), *problems]
        nested = [c for c in columns if isinstance(c.type, Array | Map | Struct)]
        action = "Leave it out, or use Json"
        return [*(Problem(f"{where}.schema", f"a field holds no {c.type}, as `{c.name}` is", action) for c in nested), *problems]

    def _find_option_problems(self, where: str) -> list[Problem]:
        problems = []
        characters = {"delimiter": self.delimiter, "quote": self.quote, "escape": self.escape}
        for name, found in characters.items():
            if not (isinstance(found, str) and len(found) == 1 and found.isascii()) or found in "\r\n\0":
                problems.append(Problem(f"{where}.{name}", f"found {found!r}; expected one ASCII character, no line break"))
            elif found.isalnum() or found in _RESERVED:
                problems.append(Problem(f"{where}.{name}", f"found {found!r}; expected none that numbers and dates may hold"))
        if not problems and self.delimiter in (self.quote, self.escape):
            problems.append(Problem(f"{where}.delimiter", f"it is {self.delimiter!r}, as quote or escape are; expected another"))
        null = self.null_value
        if not isinstance(null, str):
            problems.append(Problem(f"{where}.null_value", f"found {null!r}; expected a text"))
        elif not problems and any(c in null for c in (self.delimiter, self.quote, self.escape, "\r", "\n", "\0")):
            found = f"found {null!r}; expected a text without delimiters, quotes, escapes and line breaks"
            problems.append(Problem(f"{where}.null_value", found))
        if self.timestamp_format is not None:
            try:
                make_timestamp_reader(self.timestamp_format)
            except (ValueError, TypeError) as e:
                found = f"found {e}; expected yyyy MM dd HH mm ss, S, X and texts in single quotes"
                problems.append(Problem(f"{where}.timestamp_format", found, "Leave it out for ISO 8601"))
        return [*problems, *find_text_encoding_problems(where, self.encoding)]

    def make_decoder(self) -> Decoder:
        """Return a picklable decoder.

        :raises SchemaInvalid: the schema cannot be read.
        """
        from airflow_kafka_spark.formats.csv.tasks.decode import CsvDecoder

        return CsvDecoder(self.columns, self.dialect, self.timestamp_format, codecs.lookup(self.encoding).name)

    def find_encoding_problems(self, where: str, columns: Sequence[str]) -> list[Problem]:
        """Return the problems of the options; all columns are accepted, but arrays, maps and structs fail the job."""
        empty = [] if columns else [Problem(where, "there is no column to write", "Name some")]
        problems = [*empty, *self._find_option_problems(where)]
        if not find_text_encoding_problems(where, self.encoding) and not is_utf8(self.encoding):
            problems.append(Problem(f"{where}.encoding", f"`{self.encoding}` is read, not written", "Leave it out"))
        return problems

    def encode(self, columns: Sequence[str]) -> SparkColumn:
        """Return one line per row with all columns in order, without a line break: texts in quotes, everything else as in JSON
        without quotes, ``null_value`` for nulls. A row with an array, a map or a struct makes the job fail.
        """
        from pyspark.sql import functions as F

        return F.concat_ws(self.delimiter, *map(self._format_field, columns)).cast("binary")

    def _format_field(self, name: str) -> SparkColumn:
        from pyspark.sql import functions as F

        column, kind = make_spark_column(name), F.expr(f"typeof({quote_with_backticks(name)})")
        options = {
            "timeZone": "UTC",
            "timestampFormat": self.timestamp_format or "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
            "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
        }
        # The value in {"v":...}, without the quotes of a value that is no text.
        json = F.to_json(F.struct(column.alias("v")), options)
        text = F.btrim(F.substring(json, F.lit(6), F.length(json) - 6), F.lit('"'))
        own = F.lit(bool(self.timestamp_format)) & (kind == "timestamp")
        text = F.when(own | (text == self.null_value), self._quote(text)).otherwise(text)
        nested = F.raise_error(F.concat(F.lit(f"column `{name}`: a field of CSV holds no "), kind)).cast("string")
        return (
            F.when(kind.rlike("^(array|map|struct|variant)"), nested)
            .when(column.isNull(), F.lit(self.null_value))
            .when(kind.startswith("string"), self._quote(column.cast("string")))
            .otherwise(text)
        )

    def _quote(self, text: SparkColumn) -> SparkColumn:
        from pyspark.sql import functions as F

        if self.escape != self.quote:
            text = F.replace(text, F.lit(self.escape), F.lit(self.escape * 2))
        inside = F.replace(text, F.lit(self.quote), F.lit(self.escape + self.quote))
        return F.concat(F.lit(self.quote), inside, F.lit(self.quote))

    def make_encoder(self, columns: Sequence[tuple[str, Kind]]) -> Encoder | None:
        """Return the encoder; None for floats, and for timestamps in a format of their own."""
        from airflow_kafka_spark.formats.tasks.text import CsvEncoder

        kinds = [kind for _, kind in columns]
        if not columns or "other" in kinds or (self.timestamp_format and "zoned" in kinds):
            return None
        return CsvEncoder(tuple(columns), self.dialect)
