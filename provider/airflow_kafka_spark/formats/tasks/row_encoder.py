"""Base of the encoders that write row by row, in plain Python."""

from __future__ import annotations

import decimal
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from airflow_kafka_spark.errors import RowRejected
from airflow_kafka_spark.formats.base import Encoded, Encoder
from airflow_kafka_spark.formats.types import Decimal

UNFIT_ACTION = "Correct the row, or the schema: what does not fit is never written as something else"
"""The remedy for a row that does not fit."""


class ValueDoesNotFit(Exception):
    """Raised when a schema has no place for a value."""

    @staticmethod
    def of(path: str, found: object) -> ValueDoesNotFit:
        """Return the error with the column's path."""
        return ValueDoesNotFit(f"column `{path}`: {found}")


class RowEncoder(Encoder):
    """Encodes row by row.

    Values are Python objects, but timestamps are microseconds, and dates are days, since 1970; structs are dicts, maps are
    dicts or lists of pairs.

    :param columns: the names of the rows' columns, in order.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = tuple(columns)

    @abstractmethod
    def write(self, row: Mapping[str, Any]) -> bytes:
        """Return the bytes of one row; equal rows give equal bytes.

        :raises ValueDoesNotFit: the schema has no place for a value.
        """

    def encode(self, rows: Mapping[str, pa.Array]) -> pa.Array:
        """Return the rows' bytes.

        :raises RowRejected: a row does not fit the schema.
        """
        columns = [python_values(rows[name]) for name in self._columns]
        made = self._written([dict(zip(self._columns, row, strict=True)) for row in zip(*columns, strict=True)])
        return values_or_raise(made)

    def encode_struct(self, rows: pa.StructArray) -> Encoded:
        """Encode the rows of a struct column whose fields are in the order of the columns; a null has no value."""
        try:
            columns = [python_values(rows.field(at)) for at in range(len(self._columns))]
        except UnicodeDecodeError as e:
            if len(rows) == 1:
                return Encoded(pa.nulls(1, pa.binary()), ((0, invalid_utf8(e)),))
            apart = [self.encode_struct(rows.slice(at, 1)) for at in range(len(rows))]
            bad = ((at, reason) for at, found in enumerate(apart) for _, reason in found.bad)
            return Encoded(pa.concat_arrays([found.values for found in apart]), tuple(bad))
        there = rows.is_valid().to_pylist()
        given = zip(*columns, strict=True)
        return self._written(
            [dict(zip(self._columns, row, strict=True)) if has else None for row, has in zip(given, there, strict=True)]
        )

    def _written(self, rows: Sequence[Mapping[str, Any] | None]) -> Encoded:
        made: list[bytes | None] = []
        bad: list[tuple[int, str]] = []
        for at, row in enumerate(rows):
            try:
                made.append(None if row is None else self.write(row))
            except ValueDoesNotFit as e:
                made.append(None)
                bad.append((at, str(e)))
        return Encoded(pa.array(made, pa.binary()), tuple(bad))


def values_or_raise(found: Encoded) -> pa.Array:
    """Return the encoded values if all rows fit.

    :raises RowRejected: a row does not.
    """
    for at, reason in found.bad:
        raise RowRejected(f"row {at + 1}", reason, UNFIT_ACTION)
    return found.values


def invalid_utf8(error: UnicodeDecodeError) -> str:
    """Return the reason why a text cannot be written."""
    return f"a text is not UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start}"


def map_items(found: Mapping[Any, Any] | Sequence[tuple[Any, Any]]) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of a map."""
    return found.items() if isinstance(found, Mapping) else found


def unscaled_integer(value: decimal.Decimal, wanted: Decimal) -> int:
    """Return a decimal as an integer, in units of the last digit of its type.

    :raises ValueError: the type cannot hold it exactly.
    """
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        raise ValueError(f"found {value}, expected {wanted}")
    number, more = int("".join(map(str, digits))), exponent + wanted.scale
    found, rest = (number * 10**more, 0) if more >= 0 else divmod(number, 10**-more)
    if rest or found >= 10**wanted.precision:
        raise ValueError(f"found {value}, expected {wanted}")
    return -found if sign else found


def to_java_big_integer(number: int) -> bytes:
    """Return an integer as the bytes of Java's BigInteger: big-endian two's complement, as short as possible."""
    return number.to_bytes((number if number >= 0 else ~number).bit_length() // 8 + 1, "big", signed=True)


def python_values(column: pa.Array) -> list[Any]:
    """Return a column's values, as :class:`RowEncoder` describes them."""
    wanted = _python_type(column.type)
    return list((column if wanted.equals(column.type) else column.cast(wanted)).to_pylist())


def _python_type(found: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(found):
        return pa.int64()
    if pa.types.is_date32(found):
        return pa.int32()
    if pa.types.is_struct(found):
        return pa.struct([pa.field(f.name, _python_type(f.type), f.nullable) for f in found])
    if pa.types.is_map(found):
        return pa.map_(_python_type(found.key_type), pa.field("value", _python_type(found.item_type), found.item_field.nullable))
    if pa.types.is_list(found):
        return pa.list_(pa.field(found.value_field.name, _python_type(found.value_type), found.value_field.nullable))
    return found
