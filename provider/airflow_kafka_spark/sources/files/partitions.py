"""Columns that directories give, in the layout of Hive and Spark: ``day=2026-11-01/region=eu/part-0.parquet``.

Imports neither Airflow nor pyspark, because tasks need it, too.
"""

from __future__ import annotations

import datetime as dt
import re
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from airflow_kafka_spark.formats.base import Kind
from airflow_kafka_spark.formats.types import INTEGER_BITS, Column, DataType, Primitive, Text, parse_ddl

NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
"""The text of a NULL."""

PartitionValue: TypeAlias = str | int | bool | dt.date | None

_INTEGER = re.compile(r"-?[0-9]+")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


@dataclass(frozen=True)
class PartitionColumns:
    """Names and types of the columns that the directories of files give.

    :param ddl: the columns in Spark's DDL, in the order of their directories; empty if there are none.
    """

    ddl: str = ""

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The columns, in the order of their directories."""
        return parse_ddl(self.ddl) if self.ddl else ()

    @property
    def kinds(self) -> tuple[tuple[str, Kind], ...]:
        """Names and kinds of the columns."""
        return tuple((column.name, _find_kind(column.type)) for column in self.columns)

    def parse(self, file: str) -> tuple[PartitionValue, ...]:
        """Return the values for the rows of a file, in the order of the columns.

        :param file: path of the file below the source's directory.
        :raises ValueError: its directories have other columns, or a value of another type.
        """
        found = list_partition_directories(file)
        names, wanted = [unescape(name) for name, _ in found], [column.name for column in self.columns]
        if names != wanted:
            shown = "/".join(f"{name}=" for name in names) or "none of the form `column=value`"
            expected = "/".join(f"{name}=" for name in wanted)
            raise ValueError(f"its directories are {shown}, and `partition_columns` expect {expected}")
        return tuple(_parse(text, column) for (_, text), column in zip(found, self.columns, strict=True))

    def list_spellings(self, files: Iterable[str]) -> list[set[str]]:
        """Return, for each column, the forms of its name in the paths of files; characters may be escaped there."""
        spellings: list[set[str]] = [set() for _ in self.columns]
        for directory in {file.rpartition("/")[0] for file in files} if self.columns else ():
            for found, (name, _) in zip(spellings, list_partition_directories(f"{directory}/"), strict=True):
                found.add(name)
        return spellings


def list_partition_directories(file: str) -> list[tuple[str, str]]:
    """Return name and value, as they are written, of each directory ``column=value`` on the way to a file."""
    parts = (part.partition("=") for part in file.split("/")[:-1])
    return [(name, value) for name, equals, value in parts if name and equals]


def unescape(text: str) -> str:
    """Return a name or a value of a path without escapes such as ``%20``.

    :raises ValueError: escapes are not UTF-8.
    """
    return urllib.parse.unquote(text, errors="strict")


def is_partition_type(kind: DataType) -> bool:
    """Return True if a partition column may have this type: a text, an integer, a boolean or a date."""
    return kind == Text() or (isinstance(kind, Primitive) and kind.name in (*INTEGER_BITS, "boolean", "date"))


def _find_kind(kind: DataType) -> Kind:
    if isinstance(kind, Text):
        return "text"
    if str(kind) == "boolean":
        return "boolean"
    return "date" if str(kind) == "date" else "integer"


def _parse(written: str, column: Column) -> PartitionValue:
    if written == NULL_PARTITION:
        return None
    text, kind = unescape(written), str(column.type)
    if kind == "string":
        return text
    if kind == "boolean" and text in ("true", "false"):
        return text == "true"
    if kind == "date" and _DATE.fullmatch(text):
        return dt.date.fromisoformat(text)
    if kind in INTEGER_BITS and _INTEGER.fullmatch(text):
        value, bound = int(text), 1 << INTEGER_BITS[kind] - 1
        if -bound <= value < bound:
            return value
    raise ValueError(f"its directory `{column.name}={written}` has no {kind}")
