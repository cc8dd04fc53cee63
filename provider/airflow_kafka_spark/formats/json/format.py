"""JSON records with a declared schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import Problem, SchemaInvalid
from airflow_kafka_spark.formats.base import DeclaredFormat, Decoder, Encoder, Kind, as_struct, duplicate_problems
from airflow_kafka_spark.formats.json.schema import columns_of_json_schema, parse_json_schema
from airflow_kafka_spark.formats.types import Array, Column, DataType, Map, SparkSchema, Struct, Text, columns_of

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn


@dataclass(frozen=True)
class Json(DeclaredFormat):
    """One JSON object (RFC 8259, UTF-8) per record; its fields become the columns of ``schema``.

    Values are read as by Spark 4's ``from_json`` in the time zone UTC, with one difference: no value silently becomes null or
    another value. A value that does not fit its column makes the record bad, with a reason that names the column, what was found
    and what was expected.

    ==================  ======================================================  ================================================
    column              what it takes                                           what makes the record bad
    ==================  ======================================================  ================================================
    any                 the field's value; null when it is null or missing      null or missing in a ``NOT NULL`` column
    tinyint to bigint   an integer: ``7``, ``-0``                               ``1.0``, ``1e3``, ``"7"``; out of range
    decimal(p,s)        a number or a numeric string, exactly: ``1.50``,        digits beyond the scale, unless zeros (Spark
                        ``1e2``, ``"+.5"``                                      rounds them away), or beyond the precision;
                                                                                ``"1,5"``, ``" 1"``
    float, double       a number, to the nearest; ``NaN``, ``Infinity``,        a number too large for the type (Spark makes it
                        ``-Infinity``, bare or as strings                       infinite); any other string
    string, varchar(n)  a string; of any other value its JSON text exactly as   more than n characters; a lone surrogate
                        it stands: ``1.10``, ``{"a": 1}`` (Spark writes it      (``"\\ud800"``)
                        anew: ``1.1``)
    boolean             ``true``, ``false``                                     anything else
    binary              a string in base64 with padding                         anything else
    date                ``"2026-11-05"``                                        anything else (Spark cuts off a time)
    timestamp           ``"2026-11-05T07:08:09.123456Z"``: ``T`` or a space;    more digits of a second, unless zeros (Spark
                        up to 6 digits of a second; seconds and minutes may be  cuts them off); before the year 0001 or after
                        left out; ``Z``, ``+02:00``, ``+0200``, ``+02`` or      9999, so that milliseconds are not taken for
                        none, which is UTC; a day alone is its midnight; an     seconds; a number with a fraction
                        integer: seconds since 1970
    timestamp_ntz       the same, without a zone                                a zone; a number
    array<t>            an array                                                anything else
    map<string,t>       an object                                               anything else; a name found twice
    struct<...>         an object, read like the record itself                  anything else
    ==================  ======================================================  ================================================

    - Names are case sensitive. Fields that are not in the schema are skipped, but they must be JSON.
    - A name of the schema found twice in one object is bad (Spark takes the last).
    - Bad as a whole: anything but exactly one JSON object (an array, ``null``, nothing, two objects, further characters), a byte
      order mark, invalid UTF-8, comments, single quotes, trailing commas, objects and arrays nested more than 500 deep.
    - A record without a value is a tombstone: a row of nulls, never bad.

    Arrow decodes whole batches. These records are decoded row by row, with equal results, but some 15 times slower: bad records
    (and a few next to each), every record of a schema with a map, and records with values other than strings in string columns;
    ``"NaN"`` as a string; infinities; a decimal with a negative exponent; more than 6 digits of a second; more digits in a
    decimal than its precision, as in ``0.1000000000000`` for ``decimal(12,2)``.

    :param schema: the columns, as DDL (``"id bigint NOT NULL, amount decimal(12,2), tags array<string>"``), as a pyspark
        ``StructType``, or as a JSON Schema, a dict (see :func:`.columns_of_json_schema`; its text: :meth:`of_json_schema`). It is
        parsed at its first use, so that :meth:`validate` reports a mistake in it. Required for reading; rows are written with
        their own columns. Default empty.
    """

    schema: str | SparkSchema | Mapping[str, Any] = ""

    @classmethod
    def of_json_schema(cls, text: str) -> Json:
        """Return the format of the objects that a JSON Schema describes.

        :param text: the schema's document.
        :raises SchemaInvalid: it is not a JSON object.
        """
        return cls(parse_json_schema(text))

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the schema.

        :raises SchemaInvalid: the schema cannot be read.
        """
        return columns_of_json_schema(self.schema) if isinstance(self.schema, Mapping) else columns_of(self.schema)

    def validate(self, where: str) -> list[Problem]:
        """Return the problems of the schema."""
        try:
            columns = self.columns
        except SchemaInvalid as e:
            return [
                Problem(
                    f"{where}.schema",
                    f"{e.found}; expected {e.expected}",
                    "Correct the schema" + ("" if isinstance(self.schema, Mapping) else "; its types are those of Spark's DDL"),
                )
            ]
        keys = [f"{path} has keys of type {key}" for column in columns for path, key in _odd_keys(column.type, column.name)]
        return [Problem(f"{where}.schema", f"{k}; expected string, as JSON's names are", "Declare map<string,...>") for k in keys]

    def decoder(self) -> Decoder:
        """Return a picklable decoder of this schema.

        :raises SchemaInvalid: the schema cannot be read.
        """
        from airflow_kafka_spark.formats.json.tasks.decode import JsonDecoder

        return JsonDecoder(self.columns)

    def encoding_problems(self, where: str, columns: Sequence[str]) -> list[Problem]:
        """Return a problem for each name that several columns have."""
        return duplicate_problems(where, columns)

    def encode(self, columns: Sequence[str]) -> SparkColumn:
        """Return one object per row with all columns in order, nulls written as ``null``: by Spark's ``to_json``, timestamps with
        microseconds and ``Z``, binary in base64, NaN and infinities as strings.
        """
        from pyspark.sql import functions as F

        # Spark's defaults would cut timestamps to milliseconds and omit null fields.
        options = {
            "ignoreNullFields": "false",
            "timeZone": "UTC",
            "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
            "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
        }
        return F.to_json(as_struct(columns), options).cast("binary")

    def encoder(self, columns: Sequence[tuple[str, Kind]]) -> Encoder | None:
        """Return the encoder, for every kind of column."""
        from airflow_kafka_spark.formats.tasks.text import JsonEncoder

        return JsonEncoder(tuple(columns)) if columns else None


def _odd_keys(data_type: DataType, path: str) -> list[tuple[str, DataType]]:
    """Return path and key type of each map whose keys are not strings."""
    if isinstance(data_type, Array):
        return _odd_keys(data_type.element, f"{path}[]")
    if isinstance(data_type, Struct):
        return [odd for f in data_type.fields for odd in _odd_keys(f.type, f"{path}.{f.name}")]
    if isinstance(data_type, Map):
        here = [] if data_type.key == Text() else [(path, data_type.key)]
        return [*here, *_odd_keys(data_type.value, f"{path}[]")]
    return []
