"""Rows to Protobuf in tasks: Python values to messages, and these to bytes."""

from __future__ import annotations

import datetime
import decimal
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf import json_format
from google.protobuf.message import EncodeError
from google.protobuf.message_factory import GetMessageClass

from airflow_kafka_spark.formats import types
from airflow_kafka_spark.formats.protobuf.schema import FieldLayout, make_pool
from airflow_kafka_spark.formats.tasks.base import (
    RowEncoder,
    ValueDoesNotFit,
    list_map_items,
    to_java_big_integer,
    to_unscaled,
)
from airflow_kafka_spark.formats.text_values import EPOCH_ORDINAL

_MIN_DAY, _MAX_DAY = 1 - EPOCH_ORDINAL, datetime.date.max.toordinal() - EPOCH_ORDINAL
T = TypeVar("T")
_Set = Callable[[Any], Any]
"""Returns the argument of a message's constructor for a column's value; raises the errors that _UNFIT lists."""

_UNFIT = (ValueError, TypeError, ArithmeticError, EncodeError, json_format.ParseError)


class ProtobufEncoder(RowEncoder):
    """The encoder of :class:`~airflow_kafka_spark.formats.protobuf.format.Protobuf`.

    :param files: the descriptor set.
    :param layout: the message.
    :param columns: the names of the rows' columns, all of them fields of the message.
    :param header: the bytes before each message.
    """

    def __init__(self, files: bytes, layout: FieldLayout, columns: Sequence[str], header: bytes) -> None:
        super().__init__(columns)
        self._files, self._layout, self._header = files, layout, header
        self._pool, _ = make_pool(files)
        self._class = GetMessageClass(self._pool.FindMessageTypeByName(layout.full_name))
        known = {node.name: node for node in layout.fields}
        self._message = self._make_fields([known[name] for name in columns])

    def __reduce__(self) -> tuple[type[ProtobufEncoder], tuple[Any, ...]]:
        return type(self), (self._files, self._layout, self._columns, self._header)

    def write(self, row: Mapping[str, Any]) -> bytes:
        """Return the header and the message of one row."""
        try:
            message = self._class(**self._message(row))
            # Called on the class, since a field may have the name of the method.
            return self._header + bytes(self._class.SerializeToString(message, deterministic=True))
        except _UNFIT as e:
            raise ValueDoesNotFit(str(e)) from None

    def _make_fields(self, nodes: Sequence[FieldLayout], path: str = "") -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        setters = [
            (node.name, self._make_field(node, f"{path}{node.name}"), node.nullable, f"{path}{node.name}") for node in nodes
        ]
        names = {node.name for node in nodes}
        choices = {choice: [n.name for n in nodes if n.choice == choice] for choice in sorted({n.choice for n in nodes} - {""})}

        def make_fields(row: Mapping[str, Any]) -> dict[str, Any]:
            found = {}
            for name, convert, nullable, place in setters:
                value = row.get(name)
                if value is None:
                    if name in row and not nullable:
                        raise ValueDoesNotFit.of(place, "it is null, and its field cannot be null")
                    continue
                try:
                    found[name] = convert(value)
                except _UNFIT as e:
                    raise ValueDoesNotFit.of(place, e) from None
            for choice, members in choices.items():
                there = [name for name in members if name in found]
                if len(there) > 1:
                    raise ValueDoesNotFit.of(
                        path + there[1], f"it is set beside `{there[0]}`, and only one field of the oneof `{choice}` can be"
                    )
            if not row.keys() <= names:
                raise ValueDoesNotFit.of(f"{path}{min(row.keys() - names)}", "the message has no such field")
            return found

        return make_fields

    def _make_field(self, node: FieldLayout, path: str) -> _Set:
        if node.many == "map":
            keys, values = (self._make_value(part, path) for part in node.inner)
            return lambda found: {
                keys(_check_present(key)): values(_check_present(value)) for key, value in list_map_items(found)
            }
        convert = self._make_value(node, path)
        if node.many == "list":
            return lambda found: [convert(_check_present(value)) for value in found]
        return convert

    def _make_value(self, node: FieldLayout, path: str) -> _Set:
        if not node.full_name:
            return _make_scalar_conversion(node)
        made = GetMessageClass(self._pool.FindMessageTypeByName(node.full_name))
        if node.how == "message":
            fields = self._make_fields(node.fields, f"{path}.")
            return lambda value: made(**fields(value))
        if node.how == "wrapper":
            inner = _make_scalar_conversion(node.inner[0])
            return lambda value: made(value=inner(value))
        if node.how == "json":
            return lambda value: json_format.ParseDict(_parse_json(value), made())
        if node.how == "decimal":
            assert isinstance(node.type, types.Decimal)
            wanted = node.type
            return lambda value: made(**_convert_decimal(value, wanted))
        parts = _PARTS[node.how]
        return lambda value: made(**parts(value))


def _make_scalar_conversion(node: FieldLayout) -> _Set:
    """Return the conversion of a value that is no message; the message's constructor checks its type."""
    if node.how == "enum":
        symbols = {name: number for number, name in node.symbols}
        return lambda value: _convert_symbol(value, symbols)
    if node.how == "unsigned":
        return lambda value: _check_within(int(value), 0, (1 << 64) - 1)
    kind = str(node.type)
    if node.how == "plain" and node.bounds:
        low, high = node.bounds
        return lambda value: _check_within(value, low, high)
    return _AS.get(kind, _keep_unchanged)


_AS: Mapping[str, _Set] = {"float": float, "double": float, "binary": bytes}


def _keep_unchanged(value: T) -> T:
    return value


def _check_within(value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise ValueError(f"found {value}, expected {low} to {high}")
    return value


def _check_present(value: T | None) -> T:
    if value is None:
        raise ValueError("it holds a null, and lists and maps of Protobuf have none")
    return value


def _convert_symbol(value: str, symbols: Mapping[str, int]) -> int:
    if value not in symbols:
        raise ValueError(f"found `{value}`, expected one of {', '.join(list(symbols)[:20])}")
    return symbols[value]


def _parse_json(text: str) -> Any:
    """Return the value of JSON whose numbers and names a ``google.protobuf.Value`` keeps: its numbers are doubles."""
    return json.loads(
        text,
        parse_int=_parse_whole_number,
        parse_float=_parse_number,
        parse_constant=_parse_number,
        object_pairs_hook=_make_object,
    )


def _parse_whole_number(text: str) -> float:
    found = _parse_number(text)
    if int(found) != int(text):
        raise ValueError(f"found {text[:40]}, which a double cannot hold exactly")
    return found


def _parse_number(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(f"found {text[:40]}, which is no number of JSON, or too large for a double")
    return found


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"found the name `{next(n for n in names if names.count(n) > 1)}` twice in one object")
    return found


def _convert_timestamp(micros: int) -> dict[str, int]:
    seconds, rest = divmod(micros, 1_000_000)
    if not _MIN_DAY * 86_400 <= seconds < (_MAX_DAY + 1) * 86_400:
        raise ValueError(f"found {micros} µs after 1970, expected a time in the years 1 to 9999")
    return {"seconds": seconds, "nanos": rest * 1000}


def _convert_duration(micros: int) -> dict[str, int]:
    seconds, rest = divmod(abs(micros), 1_000_000)
    if seconds > 315_576_000_000:
        raise ValueError(f"found {micros} µs, expected a length of time within 10 000 years")
    sign = -1 if micros < 0 else 1
    return {"seconds": sign * seconds, "nanos": sign * rest * 1000}


def _convert_date(day: int) -> dict[str, int]:
    date = datetime.date.fromordinal(_check_within(day, _MIN_DAY, _MAX_DAY) + EPOCH_ORDINAL)
    return {"year": date.year, "month": date.month, "day": date.day}


_PARTS: Mapping[str, Callable[[int], dict[str, int]]] = {
    "timestamp": _convert_timestamp,
    "duration": _convert_duration,
    "date": _convert_date,
}


def _convert_decimal(value: decimal.Decimal, wanted: types.Decimal) -> dict[str, Any]:
    return {
        "value": to_java_big_integer(to_unscaled(decimal.Decimal(value), wanted)),
        "precision": wanted.precision,
        "scale": wanted.scale,
    }


def make_message_header(prefix: bytes, path: Sequence[int]) -> bytes:
    """Return the header of a message in Confluent's wire format.

    :param prefix: the magic byte and the schema id.
    :param path: the message's indexes.
    """
    return prefix + (b"\0" if tuple(path) == (0,) else b"".join(map(_encode_varint, (len(path), *path))))


def _encode_varint(number: int) -> bytes:
    number <<= 1  # zigzag of numbers that are never negative
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])
