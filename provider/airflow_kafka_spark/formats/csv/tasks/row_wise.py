"""CSV."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from airflow_kafka_spark.formats.csv.dialect import CsvDialect, FromField, timestamp_reader
from airflow_kafka_spark.formats.text import NO_FINITE, BadValue, day_number, from_base64, micros, nearest, short, to_decimal
from airflow_kafka_spark.formats.types import Column, DataType, Decimal, Text

_integer = re.compile(r"[-+]?[0-9]+", re.A).fullmatch
_number = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", re.A).fullmatch
_BITS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}


class CsvRowReader:
    """Reads records of one schema.

    :param columns: the columns, in the order of the fields.
    :param dialect: how the fields stand in a record.
    :param timestamp_format: see :func:`timestamp_reader`.
    """

    def __init__(self, columns: Sequence[Column], dialect: CsvDialect, timestamp_format: str | None = None) -> None:
        self._columns = tuple(columns)
        self._dialect = dialect
        self._converts = [field_reader(c.type, timestamp_format) for c in columns]
        q, e, d = (re.escape(c) for c in (dialect.quote, dialect.escape, dialect.delimiter))
        inside = f"[^{q}]*(?:{q}{q}[^{q}]*)*" if dialect.doubled else f"[^{q}{e}]*(?:{e}.[^{q}{e}]*)*"
        self._field = re.compile(f"(?:{q}({inside}){q}|([^{q}{d}\r\n]*))({d}|\\Z)", re.S).match
        # An escape before anything but a quote or another escape is a character like others.
        self._unescape = re.compile(f"{e}([{q}{e}])").sub

    def read(self, value: bytes) -> list[Any]:
        """One value per column of one record.

        :raises BadValue: the record is not one line of CSV, has more or fewer fields, or a field does not fit its column.
        """
        try:
            text = value.decode("utf-8")
        except UnicodeDecodeError as e:
            raise BadValue(f"not UTF-8: byte 0x{value[e.start]:02x} at position {e.start}") from None
        if text.startswith("\ufeff"):
            raise BadValue("it begins with a byte order mark, expected the first field")
        fields = self._fields(text[:-2] if text.endswith("\r\n") else text.removesuffix("\n"))
        if len(fields) > len(self._columns):
            raise BadValue(f"found {len(fields)} fields, expected {len(self._columns)}")
        if len(fields) < len(self._columns):
            missing = self._columns[len(fields)]
            raise BadValue(f"missing: found {_count(len(fields))}, expected {len(self._columns)}").within(f".{missing.name}")
        row = []
        for found, column, convert in zip(fields, self._columns, self._converts, strict=True):
            try:
                if found is None and not column.nullable:
                    raise BadValue(f"found a null, expected {column.type} NOT NULL")
                row.append(None if found is None else convert(found))
            except BadValue as e:
                raise e.within(f".{column.name}") from None
        return row

    def _fields(self, text: str) -> list[str | None]:
        """The fields' texts; None for a null."""
        dialect, i = self._dialect, 0
        fields: list[str | None] = []
        while True:
            match = self._field(text, i)
            if match is None:
                raise self._refused(text, i, len(fields))
            quoted, bare, end = match.groups()
            if quoted is None:
                fields.append(None if bare == dialect.null else bare)
            else:
                fields.append(self._unescape(r"\1", quoted) if dialect.escape in quoted else quoted)
            i = match.end()
            if not end:
                return fields

    def _refused(self, text: str, i: int, field: int) -> BadValue:
        quote = self._dialect.quote
        if not text.startswith(quote, i):
            stop = re.compile(f"[{re.escape(quote)}\r\n]").search(text, i)
            assert stop is not None
            what = "a quote in a field without quotes" if stop.group() == quote else "a line break outside of quotes"
            error = BadValue(f"found {what}, at character {stop.start() + 1}")
        else:
            # Whether the quote is never closed, or something stands behind the closing one.
            error = BadValue(
                "found quotes that do not end with the field, expected a closing quote before the delimiter or the end"
            )
        return error.within(f".{self._columns[field].name}") if field < len(self._columns) else error


def _count(fields: int) -> str:
    return "1 field" if fields == 1 else f"{fields} fields"


def field_reader(data_type: DataType, timestamp_format: str | None = None) -> FromField:
    """What makes a value of a field's text."""
    if isinstance(data_type, Text):
        return _text(data_type)
    if isinstance(data_type, Decimal):
        return lambda found: to_decimal(found, data_type)
    name = str(data_type)
    if name in _BITS:
        return _whole(name)
    if name in ("float", "double"):
        return _floating(name)
    if name == "timestamp" and timestamp_format:
        return timestamp_reader(timestamp_format)
    return {
        "boolean": _boolean,
        "binary": from_base64,
        "date": day_number,
        "timestamp": lambda found: micros(found, name, zoned=True),
        "timestamp_ntz": lambda found: micros(found, name, zoned=False),
    }[name]


def _text(data_type: Text) -> FromField:
    limit = data_type.max_length

    def convert(found: str) -> str:
        if limit is not None and len(found) > limit:
            raise BadValue(f'found "{short(found)}" ({len(found)} characters), expected {data_type}')
        return found

    return convert


def _whole(name: str) -> FromField:
    low, high = -(1 << _BITS[name] - 1), (1 << _BITS[name] - 1) - 1

    def convert(found: str) -> int:
        if not _integer(found):
            raise BadValue(f'found "{short(found)}", expected {name}')
        digits = found.lstrip("+-").lstrip("0") or "0"
        number = int(digits) if len(digits) <= 20 else high + 1
        number = -number if found[0] == "-" and len(digits) <= 20 else number
        if not low <= number <= high:
            raise BadValue(f"found {short(found)}, expected {name}: {low} to {high}")
        return number

    return convert


def _floating(name: str) -> FromField:
    def convert(found: str) -> float:
        if found in NO_FINITE:
            return NO_FINITE[found]
        if not _number(found):
            raise BadValue(f'found "{short(found)}", expected {name}')
        return nearest(found, name, single=name == "float")

    return convert


def _boolean(found: str) -> bool:
    if found in ("true", "false"):
        return found == "true"
    lower = found.lower() if found.isascii() else ""
    if lower not in ("true", "false"):
        raise BadValue(f'found "{short(found)}", expected boolean: true or false')
    return lower == "true"
