"""The contract of all formats: bytes to columns, and columns to bytes. Kafka Connect calls a format a converter."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from airflow_kafka_spark.arguments import OptionsType
from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.errors.base import quote_names
from airflow_kafka_spark.formats import types

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column


METADATA = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")
"""The metadata columns of a record, as Spark's Kafka source names them; ``key`` and ``value`` are the raw bytes."""

OFFSET = "__kafka_offset"
"""The offset of a record. For a row of a source: the number of the row in its split, from 1."""

TOMBSTONE = "__kafka_tombstone"
"""True for a record without a value, or with a value that deletes its row."""

ORIGINAL = {name: f"__kafka_original_{name}" for name in ("key", "value", "headers", "timestamp", "timestampType")}
"""The parts of a record as they were read. They are carried past the transforms if a dead letter or an option needs them."""

GIVEN = {name: f"__kafka_given_{name}" for name in ("key", "value", "timestamp", "headers")}
"""The parts of a source's row before all transforms, carried past these if a dead letter or a filter needs them. The key is bytes
if it could be encoded, otherwise a struct, like the value."""

CAPTURED = "__kafka_captured_"
"""The beginning of the names of columns that hold the rows for other sinks; the sink's number follows, from 0."""

KEY, VALUE, TIMESTAMP, HEADERS, PARTITION = (f"__kafka_{name}" for name in ("key", "value", "timestamp", "headers", "partition"))
"""The parts of a record that is copied, carried past Spark's SQL."""

END = "__kafka_end"
"""Null in all rows of a split that was read from Kafka, except the last one. That row is no record: it holds the account of the
split, or the error that ended the reading.
"""

ERROR = "__kafka_error"
"""The reason why a record could not be transformed, or why a source's row could not be read; null otherwise."""

UNREADABLE = "cannot be read: "
"""The beginning of the reason why a source's row could not be read."""

ROUTE = "__kafka_route"
"""The topic that a record goes to instead of the sink, and the reason, as JSON; null if it goes to the sink. Only present if a
transform of the chain routes records.
"""

LEFT_OUT = "__kafka_left_out"
"""True for a row that a filter has removed, if such rows stay in the frame to be counted. Only present where the frame is built
that way; elsewhere removed rows are gone.
"""


def get_metadata_type(name: str) -> pa.DataType:
    """Return the Arrow type of one of :data:`METADATA`."""
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


Kind = Literal["integer", "boolean", "text", "binary", "connect", "decimal", "fine decimal", "zoned", "local", "date", "other"]
"""Kinds of columns that tasks read without Spark: integers; booleans; texts; bytes; bytes that are a value with its schema, as
Connect's JSON converter writes them ("connect"); decimals, as texts in plain notation with all digits of their scale ("fine
decimal" if the scale is more than 6); timestamps in microseconds, with a zone (UTC) or local; dates; floats and nested values,
which only JSON holds.
"""

_KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(("tinyint", "smallint", "int", "bigint"), "integer"),
    "boolean": "boolean", "binary": "binary", "date": "date", "timestamp": "zoned", "timestamp_ntz": "local",
}  # fmt: skip


def find_kind(data_type: types.DataType) -> Kind:
    """Return the kind of a column of a type."""
    if isinstance(data_type, types.Decimal):
        return "decimal" if data_type.scale <= 6 else "fine decimal"
    if isinstance(data_type, types.Text):
        return "text"
    return _KINDS.get(data_type.name, "other") if isinstance(data_type, types.Primitive) else "other"


Part = Literal["key", "value"]
"""The part of a record that a format is for."""

NullValues = Literal["fail", "ignore", "write", "delete"]
"""Handling of records without a value (tombstones): they are bad records, are left out, become rows, or delete the row of their
key.
"""


@dataclass(frozen=True)
class Decoded:
    """A batch of decoded values.

    :param batch: one row per value, in their order; the row of a value that is bad or None holds nulls.
    :param bad: position and reason of each value that could not be decoded, ascending.
    :param deleted: a boolean per value, True if the value marks its row as deleted, like a record without a value; None if no
        value does.
    :param left_out: positions of values that are neither a row nor a delete, ascending.
    """

    batch: pa.RecordBatch
    bad: tuple[tuple[int, str], ...] = ()
    deleted: pa.BooleanArray | None = None
    left_out: tuple[int, ...] = ()


@dataclass(frozen=True)
class Encoded:
    """A batch of encoded keys or values.

    :param values: one binary value per row, in their order; null for a row that has no value or is bad.
    :param bad: position and reason of each row that cannot be written, ascending.
    """

    values: pa.Array
    bad: tuple[tuple[int, str], ...] = ()


class Decoder(ABC):
    """Decodes values inside a Spark task. Picklable; created by :meth:`Format.make_decoder`."""

    @abstractmethod
    def decode(self, values: Sequence[bytes | None]) -> Decoded:
        """Decode a batch of values; never raises because of a value.

        :param values: the values; None (a tombstone) becomes a row of nulls and is never bad.
        """


class Encoder(ABC):
    """Encodes rows inside a Spark task. Picklable; created by :meth:`Format.make_encoder`."""

    @abstractmethod
    def encode(self, rows: Mapping[str, pa.Array]) -> pa.Array:
        """Return the keys or values of rows in binary, with exactly the bytes that :meth:`Format.encode` produces in Spark.

        :param rows: the columns of the rows.
        """


class StructEncoder(Protocol):
    """Encodes rows that Spark passes as structs. Picklable; created by :meth:`Format.make_struct_encoder`."""

    def encode_struct(self, rows: pa.StructArray) -> Encoded:
        """Encode the rows of a struct column; a null has no value. Never raises because of a row."""


class Format(metaclass=OptionsType):
    """A conversion of the bytes of a key or a value to columns, and back. Subclasses are frozen dataclasses of options."""

    decodes_null: bool = False
    """True if a record without a value is an ordinary row of this format (a null column) and not a tombstone."""

    @property
    def encodes_in_tasks(self) -> bool:
        """True if :meth:`encode` returns the rows themselves, and tasks encode them with :meth:`make_struct_encoder`."""
        return False

    def of_topics(self, topics: Sequence[str], part: Part) -> Format:
        """Return this format for records of these topics; schema registries keep schemas by topic.

        :param topics: the topics that are read, or the one that is written.
        :param part: the part of the records that this format is for.
        """
        return self

    @abstractmethod
    def validate(self, where: str) -> list[Problem]:
        """Return the problems of the options.

        :param where: the operator's argument (``value``, ``key``).
        """

    @abstractmethod
    def get_arrow_schema(self) -> pa.Schema:
        """Return the columns of this format."""

    @abstractmethod
    def make_decoder(self) -> Decoder:
        """Return the decoder for tasks."""

    # --- writing ---

    def to_write(self, topic: str | None, part: Part) -> Format:
        """Return this format for records that are written.

        :param topic: the topic they are written to; None if each row names its own topic.
        :param part: the part of the records that is written.
        """
        return self.of_topics((topic,) if topic else (), part)

    def find_encoding_problems(self, where: str, columns: Sequence[str]) -> list[Problem]:
        """Return the problems that prevent writing rows in this format.

        :param where: the operator's argument (``value``, ``key``).
        :param columns: the names of the columns to write, in order.
        """
        return [Problem(where, f"{type(self).__name__} does not write", "Use Json, String or Raw")]

    def encode(self, columns: Sequence[str]) -> Column:
        """Return a Spark expression of type binary: one key or value per row, null for a row without one.

        :meth:`make_decoder` decodes it to equal values.

        :param columns: the names of the columns to write, in order.
        """
        raise NotImplementedError(f"{type(self).__name__} does not write")

    def find_column_problems(self, columns: Sequence[types.Column]) -> list[Problem]:
        """Return the problems that prevent writing rows of these columns, if :attr:`encodes_in_tasks`. Asks a registry, and
        changes nothing there.

        :param columns: names and types of the columns to write, in order.
        :raises KafkaSparkError: the registry does not answer, or a schema is missing.
        """
        return []

    def make_struct_encoder(self, columns: Sequence[types.Column]) -> StructEncoder:
        """Return the encoder for tasks, if :attr:`encodes_in_tasks`. Called once per attempt before anything is read; a registry
        is asked, and schemas are registered, during this call.

        :param columns: names and types of the columns to write, in order.
        :raises KafkaSparkError: they cannot be written.
        """
        raise NotImplementedError(f"{type(self).__name__} encodes in Spark")

    def make_encoder(self, columns: Sequence[tuple[str, Kind]]) -> Encoder | None:
        """Return the encoder of tasks that read without Spark; None if it could not guarantee the bytes that Spark writes.

        :param columns: names and kinds of the columns to write, in order.
        """
        return None

    # --- writing values that have a schema ---

    @property
    def takes_connect_schemas(self) -> bool:
        """True if :meth:`make_connect_encoder` writes values with the schemas that they have."""
        return False

    def find_connect_problems(self, where: str) -> list[Problem]:
        """Return the problems that prevent writing values with a Connect schema, if :attr:`takes_connect_schemas`.

        :param where: the operator's argument (``value``, ``key``).
        """
        return []

    def make_connect_encoder(self, column: str, topic: str | None) -> Encoder | None:
        """Return the encoder of a column of the kind "connect"; by default its bytes are written as those of any column.

        :param column: the name of the column.
        :param topic: the column with the topic of each row; None if all rows have the topic of this format.
        """
        return self.make_encoder([(column, "binary")])


class DeclaredFormat(Format):
    """A format whose columns the user declares, in its option ``schema``."""

    @property
    @abstractmethod
    def columns(self) -> tuple[types.Column, ...]:
        """The columns of the schema.

        :raises SchemaInvalid: the schema cannot be read.
        """

    def get_arrow_schema(self) -> pa.Schema:
        """Return the columns in Arrow. ``NOT NULL`` columns are not nullable, although the rows of tombstones and of bad records
        hold nulls there too.

        :raises SchemaInvalid: the schema cannot be read.
        """
        return types.to_arrow_schema(self.columns)


def make_spark_column(name: str) -> Column:
    """Return the column of exactly this name, which may have any characters."""
    from pyspark.sql import functions as F

    return F.col(types.quote_with_backticks(name))


def as_struct(columns: Sequence[str]) -> Column:
    """Return the columns as one struct column."""
    from pyspark.sql import functions as F

    return F.struct(*(make_spark_column(name).alias(name) for name in columns))


def find_single_column_problems(where: str, columns: Sequence[str], format: Format) -> list[Problem]:
    """Return the problems of the columns to write, for a format that writes one."""
    if len(columns) == 1:
        return []
    listed = quote_names(columns) or "none"
    return [Problem(where, f"{type(format).__name__} holds one column, found {listed}", "Name one column, or use Json")]


def find_duplicate_problems(where: str, columns: Sequence[str]) -> list[Problem]:
    """Return a problem for each name that several columns have."""
    twice = sorted({c for c in columns if list(columns).count(c) > 1})
    return [Problem(where, f"column `{c}` is there twice", "Rename one of them") for c in twice]


def find_column_name_problems(column: str, where: str) -> list[Problem]:
    """Return the problems of the option ``column``, the name of a format's only column."""
    if isinstance(column, str) and column:
        return []
    found = f"found {column!r}; expected a column's name"
    return [Problem(f"{where}.column", found, "Give it a name, or leave it out: it is `value` then")]


def is_utf8(encoding: str) -> bool:
    """Return True if an encoding is UTF-8, under any of its names; False if Python does not know the name."""
    try:
        return codecs.lookup(encoding).name == "utf-8"
    except LookupError:
        return False


def find_text_encoding_problems(where: str, encoding: str) -> list[Problem]:
    """Return the problem of the option ``encoding``.

    :param where: the argument that has the option.
    """
    try:
        # codecs.lookup is not enough: base64 and rot13 are codecs, too, but do not decode bytes to text.
        b" ".decode(encoding)
    except UnicodeDecodeError:
        pass
    except (LookupError, TypeError, ValueError):
        found = f"found {encoding!r}; expected a text encoding that Python knows"
        return [Problem(f"{where}.encoding", found, "Write for instance UTF-8")]
    return []
