"""Bytes to columns, and columns to bytes: the contract every format keeps (Connect calls it a converter)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.formats.types import backticked

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column

    from airflow_kafka_spark.formats import types

Kind = Literal["integer", "boolean", "text", "binary", "decimal", "fine decimal", "zoned", "local", "date"]
"""What a column holds that a task reads by itself: integers; booleans; texts; bytes; decimals, as texts in plain notation with
all digits of their scale, which for fine ones is more than 6; timestamps in microseconds, with zone (UTC) and without; dates."""

Part = Literal["key", "value"]


@dataclass(frozen=True)
class Decoded:
    """A batch of decoded values.

    :param batch: one row per value, in the order given; a row that is bad, or whose value is None, has nulls.
    :param bad: position and reason of each value that could not be decoded, ascending; empty when all is well.
    :param deleted: None when no value says so, else a boolean per value: True = it says that its row is gone, and stands for a
        record without a value.
    :param left_out: positions of values that are no row and delete none, ascending.
    """

    batch: pa.RecordBatch
    bad: tuple[tuple[int, str], ...] = ()
    deleted: pa.BooleanArray | None = None
    left_out: tuple[int, ...] = ()


@dataclass(frozen=True)
class Encoded:
    """A batch of encoded keys or values.

    :param values: one per row, in the order given, in binary; null where a row has none, and where it is bad.
    :param bad: position and reason of each row that cannot be written, ascending; empty when all is well.
    """

    values: pa.Array
    bad: tuple[tuple[int, str], ...] = ()


class Decoder(ABC):
    """Decodes inside a Spark task: picklable, made by :meth:`Format.decoder`."""

    @abstractmethod
    def decode(self, values: Sequence[bytes | None]) -> Decoded:
        """Decode many values at once.

        A None (a tombstone) is a row of nulls and never bad. Never raises for what a value holds.
        """


class Encoder(ABC):
    """Encodes inside a Spark task: picklable, made by :meth:`Format.encoder`."""

    @abstractmethod
    def encode(self, rows: Mapping[str, pa.Array]) -> pa.Array:
        """Keys or values of rows, in binary: exactly the bytes that :meth:`Format.encode` makes of them in Spark.

        :param rows: the rows' columns.
        """


class StructEncoder(Protocol):
    """Encodes what Spark hands over: picklable, made by :meth:`Format.struct_encoder`."""

    def encode_struct(self, rows: pa.StructArray) -> Encoded:
        """Keys or values of rows that are one column; of a null, nothing. Never raises for what a row holds."""


class Format(ABC):
    """How the bytes of a key or a value become columns. A frozen dataclass of options."""

    decodes_null: bool = False
    """True when a record without a value is an ordinary row of this format (a null column), not a tombstone."""

    @property
    def encodes_in_tasks(self) -> bool:
        """Whether :meth:`encode` gives the rows themselves, and a task makes the bytes, by :meth:`struct_encoder`."""
        return False

    def of_topics(self, topics: Sequence[str], part: Part) -> Format:
        """This format for records of these topics: where a schema registry keeps schemas by topic, it is told which.

        :param topics: the topics that are read, or the one that is written.
        :param part: which part of a record it is for.
        """
        return self

    @abstractmethod
    def validate(self, where: str) -> list[Problem]:
        """What is wrong with the options; ``where`` names the operator's argument (``value``, ``key``)."""

    @abstractmethod
    def arrow_schema(self) -> pa.Schema:
        """The columns this format yields."""

    @abstractmethod
    def decoder(self) -> Decoder:
        """What a task uses to decode."""

    # --- writing ---

    def to_write(self, topic: str | None, part: Part) -> Format:
        """This format for records that are written.

        :param topic: where they go; None where each row names its own topic.
        :param part: which part of a record it is for.
        """
        return self.of_topics((topic,) if topic else (), part)

    def encoding_problems(self, where: str, columns: Sequence[str]) -> list[Problem]:
        """What keeps rows from being written in this format.

        :param where: the operator's argument (``value``, ``key``).
        :param columns: the names of the columns to write, in order.
        """
        return [Problem(where, f"{type(self).__name__} does not write", "Use Json, String or Raw")]

    def encode(self, columns: Sequence[str]) -> Column:
        """A Spark expression of type binary that makes one key or value of a row.

        What it writes, :meth:`decoder` reads again as the same values. A null where nothing is to be written.

        :param columns: the names of the columns to write, in order.
        """
        raise NotImplementedError(f"{type(self).__name__} does not write")

    def struct_encoder(self, columns: Sequence[types.Column]) -> StructEncoder:
        """What tasks encode rows of these columns with, where :attr:`encodes_in_tasks`. Called once an attempt, before anything
        is read; whatever has to be asked or decided for it is so now.

        :param columns: names and types of the columns to write, in order.
        :raises KafkaSparkError: they cannot be written.
        """
        raise NotImplementedError(f"{type(self).__name__} encodes in Spark")

    def encoder(self, columns: Sequence[tuple[str, Kind]]) -> Encoder | None:
        """What a task encodes with that reads by itself; None where it would not be sure to make the same bytes.

        :param columns: names and kinds of the columns to write, in order.
        """
        return None


def spark_column(name: str) -> Column:
    """A column by exactly this name, whatever it holds."""
    from pyspark.sql import functions as F

    return F.col(backticked(name))


def as_struct(columns: Sequence[str]) -> Column:
    """Columns as one, under their names."""
    from pyspark.sql import functions as F

    return F.struct(*(spark_column(name).alias(name) for name in columns))


def single_column_problems(where: str, columns: Sequence[str], format: Format) -> list[Problem]:
    """What is wrong with the columns of a format that holds one."""
    if len(columns) == 1:
        return []
    listed = ", ".join(f"`{c}`" for c in columns) or "none"
    return [Problem(where, f"{type(format).__name__} holds one column, found {listed}", "Name one column, or use Json")]


def duplicate_problems(where: str, columns: Sequence[str]) -> list[Problem]:
    """Return a problem for each name that several columns have."""
    twice = sorted({c for c in columns if list(columns).count(c) > 1})
    return [Problem(where, f"column `{c}` is there twice", "Rename one of them") for c in twice]


def column_name_problems(column: str, where: str) -> list[Problem]:
    """Return what is wrong with the option ``column``, the name of a format's only column."""
    if isinstance(column, str) and column:
        return []
    found = f"found {column!r}; expected a column's name"
    return [Problem(f"{where}.column", found, "Give it a name, or leave it out: it is `value` then")]
