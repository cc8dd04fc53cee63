"""The rows of the log's events, whole columns at a time.

An event has its rows one after the other, without their sizes. So the rows of many events are found together: the first one of
each, then the second one, and so on. Then the values of a column in all rows become JSON at once. Columns of types without such a
function, and columns with an unusual value, such as a zero date, are read value by value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.formats.tasks.text import ValueTexts, format_timestamps
from airflow_kafka_spark.sources.cdc.tasks.columns import encode_integers, format_column, take_ranges
from airflow_kafka_spark.sources.cdc.tasks.events import DAY_SECONDS, DOUBLE_FORM, MICROS
from airflow_kafka_spark.sources.mysql_cdc.tasks import binlog
from airflow_kafka_spark.sources.mysql_cdc.tasks.binlog import LogColumn, LogUnreadable
from airflow_kafka_spark.sources.mysql_cdc.tasks.values import FRACTIONS, ReadColumn, ValueForm, list_decimal_groups

MOST_DIGITS = 18
"""The digits of a decimal that always fit into 64 bits."""


class RowImages(NamedTuple):
    """The rows of an event.

    :param body: its body.
    :param at: the index of the first row.
    """

    body: bytes
    at: int


class ValueSize(NamedTuple):
    """The size of a column's values in the log.

    :param bytes: of each value; 0 if they have different sizes.
    :param prefix: bytes of the size that precedes each value.
    """

    bytes: int
    prefix: int


def measure(column: LogColumn) -> ValueSize:
    """Return the size of a column's values. The column is one that can be read."""
    kind, meta = column.kind, column.meta
    if kind in _SIZES:
        return ValueSize(_SIZES[kind], 0)
    if kind in _SIZES_BEFORE_FRACTION:
        return ValueSize(_SIZES_BEFORE_FRACTION[kind] + FRACTIONS[meta[0]][0], 0)
    if kind == binlog.NEWDECIMAL:
        return ValueSize(sum(count for count, _ in list_decimal_groups(meta[0], meta[1])), 0)
    if kind == binlog.BIT:
        return ValueSize((meta[1] * 8 + meta[0] + 7) // 8, 0)
    if kind in (binlog.ENUM, binlog.SET):
        return ValueSize(meta[1], 0)
    if kind in (binlog.BLOB, binlog.GEOMETRY, binlog.JSON, binlog.VECTOR):
        return ValueSize(0, meta[0])
    return ValueSize(0, 1 if column.width < 256 else 2)


_SIZES = {
    binlog.TINY: 1, binlog.SHORT: 2, binlog.INT24: 3, binlog.LONG: 4, binlog.LONGLONG: 8, binlog.FLOAT: 4, binlog.DOUBLE: 8,
    binlog.YEAR: 1, binlog.DATE: 3,
}  # fmt: skip
_SIZES_BEFORE_FRACTION = {binlog.TIME2: 3, binlog.DATETIME2: 5, binlog.TIMESTAMP2: 4}


@dataclass(frozen=True)
class ColumnImages:
    """The values of a column in some rows.

    :param data: the bytes of the rows, with some more behind them.
    :param begins: the index of the first byte of each value.
    :param ends: the index after its last byte.
    :param nulls: True for a null.
    """

    data: bytes
    begins: np.ndarray
    ends: np.ndarray
    nulls: np.ndarray

    def get_bytes(self, index: int, count: int) -> np.ndarray:
        """Return some bytes of each value.

        :param index: of the first one, in the value.
        """
        found: np.ndarray = np.frombuffer(self.data, np.uint8)[(self.begins + index)[:, None] + np.arange(count)]
        return found

    def read_numbers(self, first: int, size: int, *, is_big: bool = False, is_signed: bool = False) -> np.ndarray:
        """Return a part of each value as a number of 64 bits.

        :param first: the index of its first byte in the value.
        :param size: its size in bytes.
        :param is_big: True if the first byte is the highest one.
        :param is_signed: True if the highest bit is the sign.
        """
        found = np.zeros((len(self.begins), 8), np.uint8)
        part = self.get_bytes(first, size)
        found[:, :size] = part[:, ::-1] if is_big else part
        numbers = found.view("<i8").reshape(-1)
        unused = 64 - 8 * size
        return numbers << unused >> unused if is_signed and unused else numbers

    def make_array(self, numbers: np.ndarray) -> pa.Array:
        """Return numbers, one for each value, with the nulls."""
        return pa.array(numbers, mask=self.nulls if self.nulls.any() else None)


class FoundRows(NamedTuple):
    """The rows of some events.

    :param columns: the values of each column.
    :param counts: the number of rows of each event.
    """

    columns: list[ColumnImages]
    counts: list[int]


def find_rows(images: Sequence[RowImages], sizes: Sequence[ValueSize]) -> FoundRows:
    """Return the rows of some events of a table, in their order.

    :param images: of the events.
    :param sizes: of the table's columns.
    :raises LogUnreadable: a row is cut off.
    """
    null_bytes = (len(sizes) + 7) // 8
    # Behind the last row are some bytes, so that the parts of a null can be read there.
    data = b"".join((*(image.body[image.at :] for image in images), bytes(null_bytes + 16)))
    raw = np.frombuffer(data, np.uint8)
    lengths = np.array([len(image.body) - image.at for image in images], np.int64)
    stops = np.cumsum(lengths)
    at = stops - lengths
    left = np.flatnonzero(lengths)
    owners, begins, ends, nulls = list[np.ndarray](), list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    try:
        while len(left) or not owners:
            found = _find_values(raw, at[left], sizes, null_bytes)
            owners.append(left)
            for parts, part in zip((begins, ends, nulls), found, strict=True):
                parts.append(part)
            at[left] = found[1][-1]
            if (at[left] > stops[left]).any():
                raise LogUnreadable("a row is cut off")
            left = left[at[left] < stops[left]]
    except IndexError:
        raise LogUnreadable("a row is cut off") from None
    first, last, missing = (np.concatenate(parts, axis=1) for parts in (begins, ends, nulls))
    order = np.argsort(first[0], kind="stable")
    columns = [ColumnImages(data, *(part[index][order] for part in (first, last, missing))) for index in range(len(sizes))]
    return FoundRows(columns, np.bincount(np.concatenate(owners), minlength=len(images)).tolist())


def _find_values(
    raw: np.ndarray, at: np.ndarray, sizes: Sequence[ValueSize], null_bytes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return begin, end and whether it is null of each value in one row of each event, per column.

    :param at: where each of these rows begins.
    """
    bits = np.unpackbits(raw[at[:, None] + np.arange(null_bytes)], axis=1, bitorder="little")
    nulls = bits[:, : len(sizes)].T.astype(bool)
    begins, ends = (np.empty((len(sizes), len(at)), np.int64) for _ in range(2))
    at = at + null_bytes
    for index, (size, prefix) in enumerate(sizes):
        begin, length = at + prefix, np.full(len(at), size, np.int64)
        for byte in range(prefix):
            length += raw[at + byte].astype(np.int64) << 8 * byte
        begins[index] = np.where(nulls[index], at, begin)
        at = ends[index] = np.where(nulls[index], at, begin + length)
    return begins, ends, nulls


# --- values -------------------------------------------------------------------------------------------------------------


class UnusualValue(ValueError):
    """Raised by a function of whole columns for a value that it cannot write."""


def format_values(values: ColumnImages, column: LogColumn, reading: ReadColumn, form: ValueForm) -> ValueTexts:
    """Return the values of a column as JSON; null where they are null.

    :param column: the column, and ``reading`` of its values.
    :raises ValueRefused: a value cannot be written.
    """
    size, prefix = measure(column)
    if prefix:
        texts = take_ranges(values.data, values.begins, values.ends, values.nulls)
        if reading.of_log is not None:
            return format_column(texts, None, reading.of_log)
        return format_column(texts, reading.form, reading.of_query)
    try:
        if column.kind in _FORMATS:
            return _FORMATS[column.kind](values, column, form)
        if size <= 2:
            return _format_distinct(values, size, reading)
    except UnusualValue:
        pass
    return _read_one_by_one(values, reading)


def _read_one_by_one(values: ColumnImages, reading: ReadColumn) -> ValueTexts:
    data, read = values.data, reading.read
    found = zip(values.begins.tolist(), values.nulls.tolist(), strict=True)
    return ValueTexts(pa.array([None if is_null else read(data, begin)[0] for begin, is_null in found], pa.string()))


def _format_distinct(values: ColumnImages, size: int, reading: ReadColumn) -> ValueTexts:
    """Read each distinct value once, as of an ENUM."""
    numbers = values.read_numbers(0, size)[~values.nulls]
    distinct, which = np.unique(numbers, return_inverse=True)
    texts = pa.array([reading.read(number.to_bytes(size, "little"), 0)[0] for number in distinct.tolist()], pa.string())
    places = np.zeros(len(values.nulls), np.int64)
    places[~values.nulls] = which
    return ValueTexts(texts.take(values.make_array(places)))


def _format_integers(values: ColumnImages, column: LogColumn, form: ValueForm) -> ValueTexts:
    numbers = values.read_numbers(0, _SIZES[column.kind], is_signed=not column.is_unsigned)
    if column.kind == binlog.LONGLONG and column.is_unsigned:
        if (numbers[~values.nulls] < 0).any():
            raise UnusualValue
        if form.unsigned == "precise":
            return ValueTexts(encode_integers(values.make_array(numbers)), quoted=True)
    return ValueTexts(values.make_array(numbers).cast(pa.string()))


def _format_doubles(values: ColumnImages, column: LogColumn, form: ValueForm) -> ValueTexts:
    numbers = values.make_array(values.read_numbers(0, 8).view("<f8"))
    return format_column(numbers.cast(pa.string()).cast(pa.binary()), DOUBLE_FORM, lambda raw: repr(float(raw)))


def _format_decimals(values: ColumnImages, column: LogColumn, form: ValueForm) -> ValueTexts:
    precision, scale = column.meta
    if precision > MOST_DIGITS or form.decimals != "precise":
        raise UnusualValue
    unscaled, at = np.zeros(len(values.begins), np.int64), 0
    is_negative = values.get_bytes(0, 1)[:, 0] < 0x80
    for count, digits in list_decimal_groups(precision, scale):
        if count:
            part = values.read_numbers(at, count, is_big=True)
            if not at:
                part ^= 1 << 8 * count - 1
            part = np.where(is_negative, part ^ (1 << 8 * count) - 1, part)
            unscaled = unscaled * 10**digits + part
            at += count
    return ValueTexts(encode_integers(values.make_array(np.where(is_negative, -unscaled, unscaled))), quoted=True)


def _format_days(values: ColumnImages, column: LogColumn, form: ValueForm) -> ValueTexts:
    packed = values.read_numbers(0, 3)
    return ValueTexts(values.make_array(_count_days(values, packed >> 9, packed >> 5 & 15, packed & 31)).cast(pa.string()))


def _format_times(values: ColumnImages, column: LogColumn, form: ValueForm) -> ValueTexts:
    millis = form.times == "connect" or column.meta[0] <= 3
    packed = values.read_numbers(0, 5, is_big=True) - 0x8000000000
    months = packed >> 22
    days = _count_days(values, months // 13, months % 13, packed >> 17 & 31)
    seconds = days * DAY_SECONDS + (packed >> 12 & 31) * 3600 + (packed >> 6 & 63) * 60 + (packed & 63)
    found = seconds * MICROS + _read_fraction(values, 5, column)
    return ValueTexts(values.make_array(found // 1000 if millis else found).cast(pa.string()))


def _format_instants(values: ColumnImages, column: LogColumn, form: ValueForm) -> ValueTexts:
    seconds, digits = values.read_numbers(0, 4, is_big=True), column.meta[0]
    found = seconds * MICROS + _read_fraction(values, 4, column)
    if (found[~values.nulls] == 0).any():
        raise UnusualValue
    text = format_timestamps(values.make_array(found).cast(pa.timestamp("us")), "T")
    shown = len("2000-01-01T00:00:00") + (digits + 1 if digits else 0)
    return ValueTexts(pc.utf8_slice_codeunits(text, 0, shown), zone="Z", quoted=True)


def _read_fraction(values: ColumnImages, first: int, column: LogColumn) -> np.ndarray:
    """Return the microseconds behind the second."""
    size, unit = FRACTIONS[column.meta[0]]
    return values.read_numbers(first, size, is_big=True) * unit


def _count_days(values: ColumnImages, year: np.ndarray, month: np.ndarray, day: np.ndarray) -> np.ndarray:
    """Return the days since 1970.

    :raises UnusualValue: one of them is no day.
    """
    month_of = ((year - 1970) * 12 + month - 1).astype("datetime64[M]")
    days = month_of.astype("datetime64[D]") + (day - 1)
    is_day = (month >= 1) & (month <= 12) & (day >= 1) & (days.astype("datetime64[M]") == month_of)
    if not (is_day | values.nulls).all():
        raise UnusualValue
    found: np.ndarray = days.astype(np.int64)
    return found


_FORMATS: Mapping[int, Callable[[ColumnImages, LogColumn, ValueForm], ValueTexts]] = {
    **dict.fromkeys((binlog.TINY, binlog.SHORT, binlog.INT24, binlog.LONG, binlog.LONGLONG), _format_integers),
    binlog.DOUBLE: _format_doubles,
    binlog.NEWDECIMAL: _format_decimals,
    binlog.DATE: _format_days,
    binlog.DATETIME2: _format_times,
    binlog.TIMESTAMP2: _format_instants,
}
