"""Protobuf decoded in tasks: messages by protobuf's own runtime, then column by column into Arrow.

There is one reader, for batches and for single records; a batch with a bad record is divided down to that record.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from airflow_kafka_spark.formats import types
from airflow_kafka_spark.formats.protobuf.schema import FieldLayout, make_pool
from airflow_kafka_spark.formats.registry import HEADER_BYTES, describe_unknown_schema_id, read_schema_id
from airflow_kafka_spark.formats.tasks.base import BatchDecoder, DecodedPart
from airflow_kafka_spark.formats.text_values import EPOCH_ORDINAL, MAX_SECOND, MIN_SECOND, BadValue
from airflow_kafka_spark.formats.types import Struct, to_arrow_schema, to_arrow_type

Path = tuple[int, ...]
Writers = Mapping[int, Mapping[Path, str]]
"""Reason why a message cannot be read, by schema id and message indexes; empty if it can be read."""

_ONE_PATH = b"\0"
_NO_VALUES: Mapping[int, str] = {}


class _SecondsAndNanos(Protocol):
    """A message of ``google.protobuf.Timestamp`` or ``Duration``."""

    seconds: int
    nanos: int


class _Date(Protocol):
    """A message of ``google.type.Date``."""

    year: int
    month: int
    day: int


class _DecimalValue(Protocol):
    """A message of ``confluent.type.Decimal``: a number in two's complement, and its scale."""

    value: bytes
    scale: int


class ProtobufDecoder(BatchDecoder):
    """The decoder of :class:`~airflow_kafka_spark.formats.protobuf.format.Protobuf`.

    :param files: the descriptor set of the reader's message.
    :param layout: the message's columns.
    :param writers: the messages that records may have; None if values have no header.
    :param unusable: ids whose schema cannot be used, and the reasons.
    :param known: ids, subjects and versions of the schemas, for messages.
    :param cut_nanoseconds: True if digits beyond the microsecond are cut off; False: they make a record bad.
    """

    def __init__(
        self,
        files: bytes,
        layout: FieldLayout,
        writers: Writers | None = None,
        unusable: Mapping[int, str] = _NO_VALUES,
        known: str = "",
        cut_nanoseconds: bool = False,
    ) -> None:
        self._files, self._layout, self._known = files, layout, known
        self._writers = None if writers is None else {number: dict(paths) for number, paths in writers.items()}
        self._unusable, self._cut = dict(unusable), cut_nanoseconds
        pool, _ = make_pool(files)
        self._parse: Callable[[bytes], Any] = GetMessageClass(pool.FindMessageTypeByName(layout.full_name)).FromString
        assert isinstance(layout.type, Struct)
        self._columns = _MessageColumns(layout, cut_nanoseconds)
        self._known_headers: set[bytes] = set()
        super().__init__(to_arrow_schema(layout.type.fields), self._read_value, few=0)

    def __reduce__(self) -> tuple[type[ProtobufDecoder], tuple[Any, ...]]:
        return type(self), (self._files, self._layout, self._writers, self._unusable, self._known, self._cut)

    def _read_batch(self, records: Sequence[bytes]) -> pa.RecordBatch | None:
        try:
            return self._make_batch(records)
        except (BadValue, pa.ArrowException, OverflowError):
            return None

    def _make_batch(self, records: Sequence[bytes]) -> pa.RecordBatch:
        parse, heads, payload = self._parse, self._known_headers, self._strip_header
        try:
            if self._writers is None:
                messages = [parse(r) for r in records]
            else:
                messages = [parse(r[HEADER_BYTES + 1 :] if r[: HEADER_BYTES + 1] in heads else payload(r)) for r in records]
        except DecodeError as e:
            raise BadValue(f"no message of type `{self._layout.full_name}`: {e}") from None
        return pa.RecordBatch.from_arrays(self._columns.convert(messages), schema=self._schema)

    def _strip_header(self, record: bytes) -> bytes:
        """Return the bytes after the header.

        :raises BadValue: the header names no message that can be read.
        """
        number = read_schema_id(record)
        assert self._writers is not None
        paths = self._writers.get(number)
        if paths is None:
            raise BadValue(describe_unknown_schema_id(number, self._known, self._unusable))
        path, at = read_message_indexes(record, HEADER_BYTES)
        wrong = paths.get(path)
        if wrong is None:
            raise BadValue(f"found message indexes {list(path)}, which the schema of id {number} does not have")
        if wrong:
            raise BadValue(f"found schema id {number}: {wrong}")
        if record[HEADER_BYTES : HEADER_BYTES + 1] == _ONE_PATH:
            self._known_headers.add(record[: HEADER_BYTES + 1])
        return record[at:]

    def read_row_wise(self, records: Sequence[bytes], start: int) -> DecodedPart:
        """Read records row by row.

        :param start: the position of the first record in the whole batch.
        """
        pieces: list[pa.RecordBatch] = []
        bad: list[tuple[int, str]] = []
        self.row_wise_count += len(records)
        for at, record in enumerate(records, start):
            try:
                pieces.append(self._make_batch([record]))
            except BadValue as e:
                bad.append((at, e.reason))
            except (pa.ArrowException, OverflowError) as e:
                bad.append((at, f"no columns: {e}"))
        return pa.Table.from_batches(pieces, self._schema).combine_chunks().to_batches()[0] if pieces else _make_empty_batch(
            self._schema
        ), bad

    def _read_value(self, value: bytes) -> list[Any]:
        return [column[0].as_py() for column in self._make_batch([value]).columns]


def _make_empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)


def read_message_indexes(record: bytes, at: int) -> tuple[Path, int]:
    """Return the indexes of the message of a record in its schema, and the position after them: Confluent's zigzag varints.

    :raises BadValue: there are no message indexes.
    """
    if record[at : at + 1] == _ONE_PATH:
        return (0,), at + 1
    count, at = _read_varint(record, at)
    if not 0 < count <= 100:
        raise BadValue(f"found {count} message indexes, expected 1 to 100")
    path = []
    for _ in range(count):
        index, at = _read_varint(record, at)
        path.append(index)
    return tuple(path), at


def _read_varint(record: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        if at >= len(record) or shift > 28:
            raise BadValue(f"found message indexes that do not end, in {len(record)} bytes")
        byte = record[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), at
        shift += 7


# --- messages to columns -------------------------------------------------------------------------------------------------

_FieldConvert = Callable[[Sequence[Any]], pa.Array]
"""Converts the values of a field, as protobuf returns them, to an array; raises BadValue."""


class _MessageColumns:
    """The columns of a message's fields."""

    def __init__(self, message: FieldLayout, cut: bool) -> None:
        self._numbers = message.numbers
        self._names = {f.name for f in message.fields}
        self._fields = [(f.name, _make_field_conversion(f, cut)) for f in message.fields]

    def convert(self, messages: Sequence[Any]) -> list[pa.Array]:
        """Return one array per field."""
        for message in messages:
            unknown = UnknownFieldSet(message)
            if len(unknown):
                self._check(message, unknown)
            # Called on the class, since a field may have the name of a method.
            if not type(message).IsInitialized(message):
                raise BadValue(f"found no `{type(message).FindInitializationErrors(message)[0]}`, which is required")
        arrays = []
        for name, convert in self._fields:
            try:
                arrays.append(convert(messages))
            except BadValue as e:
                raise e.prepend(f".{name}") from None
            except UnicodeDecodeError as e:
                raise BadValue(f"not UTF-8: byte 0x{e.object[e.start]:02x} at position {e.start}").prepend(f".{name}") from None
        return arrays

    def _check(self, message: Message, unknown: UnknownFieldSet) -> None:
        """Check unknown fields: those that the schema does not have are skipped, those that it has with another type are bad."""
        for field in unknown:
            if field.field_number in self._numbers:
                known = type(message).DESCRIPTOR.fields_by_number[field.field_number]
                what = f"the number {field.data}" if field.wire_type == 0 and known.enum_type else "a value of another type"
                raise BadValue(f"found {what}, which the schema does not have").prepend(f".{known.name}")


def _make_field_conversion(node: FieldLayout, cut: bool) -> Callable[[Sequence[Any]], pa.Array]:
    get = attrgetter(node.name)
    if node.many == "map":
        return _make_map_conversion(node, get, cut)
    convert = _make_value_conversion(node, cut)
    if node.many == "list":
        wanted = to_arrow_type(node.column.type)

        def convert_lists(messages: Sequence[Any]) -> pa.Array:
            found = list(map(get, messages))
            return pa.ListArray.from_arrays(_compute_offsets(found), convert(list(chain.from_iterable(found))), type=wanted)

        return convert_lists
    if not node.nullable:
        return lambda messages: convert(list(map(get, messages)))
    name = node.name

    def convert_optional(messages: Sequence[Any]) -> pa.Array:
        there = [type(m).HasField(m, name) for m in messages]
        if all(there):
            return convert(list(map(get, messages)))
        found = convert([get(m) for m, has in zip(messages, there, strict=True) if has])
        present = np.array(there, bool)
        return found.take(pa.array(np.cumsum(present) - 1, mask=~present))

    return convert_optional


def _compute_offsets(found: Sequence[Any]) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(np.fromiter(map(len, found), np.int64, len(found)))]), pa.int32())


def _make_map_conversion(node: FieldLayout, get: Callable[[Any], Any], cut: bool) -> Callable[[Sequence[Any]], pa.Array]:
    keys, values = (_make_value_conversion(part, cut) for part in node.inner)
    wanted = to_arrow_type(node.column.type)

    def convert_maps(messages: Sequence[Any]) -> pa.Array:
        found = list(map(get, messages))
        # Sorted, so that a retry returns what the first attempt returned.
        order = [sorted(one) for one in found]
        flat = [one[key] for one, names in zip(found, order, strict=True) for key in names]
        keyed = keys(list(chain.from_iterable(order)))
        array = pa.MapArray.from_arrays(_compute_offsets(found), keyed, values(flat))
        return array if array.type.equals(wanted) else array.cast(wanted)

    return convert_maps


def _make_value_conversion(node: FieldLayout, cut: bool) -> _FieldConvert:
    wanted = to_arrow_type(node.type)
    if node.how == "message":
        columns, fields = _MessageColumns(node, cut), list(wanted)
        return lambda values: pa.StructArray.from_arrays(columns.convert(values), fields=fields)
    if node.how == "wrapper":
        (inner,) = node.inner
        convert, get = _make_value_conversion(inner, cut), attrgetter("value")
        return lambda values: convert(list(map(get, values)))
    if node.how == "unsigned":
        return lambda values: pa.array(values, pa.uint64()).cast(wanted)
    if node.how == "enum":
        return _make_enum_conversion(node.symbols)
    if node.how == "decimal":
        assert isinstance(node.type, types.Decimal)
        decimal = node.type
        return lambda values: pa.array([_convert_decimal(v, decimal) for v in values], wanted)
    if node.how in _CONVERT:
        change = _CONVERT[node.how]
        return lambda values: pa.array([change(v, cut) for v in values], pa.int64()).cast(wanted)
    if node.how == "date":
        return lambda values: pa.array([_convert_date(v) for v in values], pa.int32()).cast(wanted)
    if node.how == "json":
        return lambda values: pa.array([_format_json(v) for v in values], wanted)
    if isinstance(node.type, types.Text):
        return _convert_texts
    return lambda values: pa.array(values, wanted)


def _convert_texts(values: Sequence[Any]) -> pa.Array:
    try:
        return pa.array(values, pa.string())
    except pa.ArrowInvalid:
        # protobuf does not check the texts of proto2, and returns bytes for those that are not UTF-8.
        odd = next((v for v in values if isinstance(v, bytes)), b"")
        raise BadValue(f"not UTF-8: {odd[:20]!r}") from None


def _make_enum_conversion(numbered: Sequence[tuple[int, str]]) -> _FieldConvert:
    symbols = dict[int, str]()
    for number, name in numbered:
        # Of several symbols with one number the first counts, as in Protobuf's own JSON.
        symbols.setdefault(number, name)

    def convert(values: Sequence[Any]) -> pa.Array:
        try:
            return pa.array([symbols[v] for v in values], pa.string())
        except KeyError as e:
            listed = ", ".join(f"{name} ({number})" for number, name in list(symbols.items())[:20])
            raise BadValue(f"found the number {e.args[0]}, expected one of {listed}") from None

    return convert


def _compute_micros(seconds: int, nanos: int, cut: bool) -> int:
    if nanos % 1000 and not cut:
        raise BadValue(f'found {nanos} nanoseconds, expected whole microseconds; nanoseconds="cut" leaves the rest out')
    return seconds * 1_000_000 + nanos // 1000


def _convert_timestamp(value: _SecondsAndNanos, cut: bool) -> int:
    seconds, nanos = value.seconds, value.nanos
    if not MIN_SECOND <= seconds <= MAX_SECOND or not 0 <= nanos < 1_000_000_000:
        raise BadValue(f"found {seconds} s and {nanos} ns after 1970, expected a time in the years 1 to 9999")
    return _compute_micros(seconds, nanos, cut)


def _convert_duration(value: _SecondsAndNanos, cut: bool) -> int:
    seconds, nanos = value.seconds, value.nanos
    if abs(seconds) > 315_576_000_000 or abs(nanos) > 999_999_999 or (seconds and nanos and (seconds < 0) != (nanos < 0)):
        raise BadValue(f"found {seconds} s and {nanos} ns, expected a length of time within 10 000 years")
    # Digits are cut off towards zero.
    return _compute_micros(seconds, nanos, cut) if nanos >= 0 else -_compute_micros(-seconds, -nanos, cut)


_CONVERT: Mapping[str, Callable[[_SecondsAndNanos, bool], int]] = {"timestamp": _convert_timestamp, "duration": _convert_duration}


def _convert_date(value: _Date) -> int:
    try:
        return datetime.date(value.year, value.month, value.day).toordinal() - EPOCH_ORDINAL
    except (ValueError, OverflowError):
        raise BadValue(f"found year {value.year}, month {value.month}, day {value.day}, expected a day of the calendar") from None


def _convert_decimal(value: _DecimalValue, wanted: types.Decimal) -> Decimal:
    shown = f"a number of {len(value.value)} bytes and scale {value.scale}"
    if len(value.value) > 64 or abs(value.scale) > 100:
        raise BadValue(f"found {shown}, expected {wanted}")
    unscaled, more = int.from_bytes(value.value, "big", signed=True), wanted.scale - value.scale
    quotient, rest = (unscaled * 10**more, 0) if more >= 0 else divmod(unscaled, 10**-more)
    if rest or abs(quotient) >= 10**wanted.precision:
        raise BadValue(f"found {unscaled}e{-value.scale}, expected {wanted}")
    return Decimal((quotient < 0, tuple(map(int, str(abs(quotient)))), -wanted.scale))


def _format_json(value: Message) -> str:
    import json

    try:
        return json.dumps(json_format.MessageToDict(value), ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    except (json_format.SerializeToJsonError, ValueError, RecursionError) as e:
        raise BadValue(f"no JSON: {e}") from None
