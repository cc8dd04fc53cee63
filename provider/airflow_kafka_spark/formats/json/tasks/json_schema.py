"""JSON with a JSON Schema in tasks: decoded after Confluent's header, and written row by row as the schema requires."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_kafka_spark.formats import types
from airflow_kafka_spark.formats.base import Decoded, Decoder
from airflow_kafka_spark.formats.json.connect_schema import LogicalType, list_sql_columns
from airflow_kafka_spark.formats.json.schema import Property
from airflow_kafka_spark.formats.json.tasks.decode import JsonDecoder
from airflow_kafka_spark.formats.registry import (
    HEADER_BYTES,
    INTEGER_BITS,
    describe_unknown_schema_id,
    make_wire_header,
    read_schema_id,
)
from airflow_kafka_spark.formats.tasks.base import (
    RowEncoder,
    ValueDoesNotFit,
    list_map_items,
    to_java_big_integer,
    to_unscaled,
)
from airflow_kafka_spark.formats.text_values import MAX_DATE, MAX_MICRO, MIN_DATE, MIN_MICRO, BadValue
from airflow_kafka_spark.formats.types import Array, Column, DataType, Map, Struct, Text

_MAX_MESSAGE = 300
_NONE: Mapping[int, Sequence[Column]] = {}


class RegisteredJsonDecoder(Decoder):
    """The decoder of :class:`~airflow_kafka_spark.formats.json.format.JsonSchema`.

    :param wire_columns: the columns with their logical types.
    :param known: the schemas that records may have, by id; for values without a header that of id 0.
    :param unusable: ids whose schema cannot be used, and the reasons.
    :param span: ids, subjects and versions of the schemas, for messages.
    :param framed: True if values begin with a header.
    :param checks: True if values are checked against the schema they were written with.
    :param others: for ids whose records write the columns with other logical types, the columns with these.
    """

    def __init__(
        self,
        wire_columns: Sequence[Column],
        known: Mapping[int, str],
        unusable: Mapping[int, str],
        span: str,
        framed: bool,
        checks: bool,
        others: Mapping[int, Sequence[Column]] = _NONE,
    ) -> None:
        self._given = (tuple(wire_columns), dict(known), dict(unusable), span, framed, checks, dict(others))
        self._known, self._unusable, self._span, self._framed, self._checks = known, unusable, span, framed, checks
        self._json = JsonDecoder(list_sql_columns(wire_columns), wire_columns=wire_columns)
        self._others = {
            make_wire_header(n): JsonDecoder(list_sql_columns(columns), wire_columns=columns) for n, columns in others.items()
        }
        self._known_headers: set[bytes] = set()
        self._validators: dict[int, Callable[[bytes], str]] = {}

    def __reduce__(self) -> tuple[type[RegisteredJsonDecoder], tuple[Any, ...]]:
        return type(self), self._given

    def decode(self, values: Sequence[bytes | None]) -> Decoded:
        """Decode a batch of values."""
        bad: dict[int, str] = {}
        texts = self._strip_headers(values, bad) if self._framed else list(values)
        decoded = self._json.decode(texts) if not self._others else self._read_by_writer(values, texts)
        bad.update(decoded.bad)
        if self._checks:
            decoded = self._check_values(decoded, values, texts, bad)
        return replace(decoded, bad=tuple(sorted(bad.items())))

    def _read_by_writer(self, values: Sequence[bytes | None], texts: Sequence[bytes | None]) -> Decoded:
        """Return the rows, each record read with the logical types of its own schema."""
        groups: dict[JsonDecoder, list[int]] = {}
        for at, value in enumerate(values):
            groups.setdefault(self._others.get((value or b"")[:HEADER_BYTES], self._json), []).append(at)
        batches, bad, places = [], dict[int, str](), list[int]()
        for decoder, group in groups.items():
            decoded = decoder.decode([texts[at] for at in group])
            batches.append(decoded.batch)
            bad.update((group[at], reason) for at, reason in decoded.bad)
            places += group
        if not batches:
            return self._json.decode([])
        rows = pa.Table.from_batches(batches).take(np.argsort(places)).combine_chunks()
        return Decoded(rows.to_batches()[0], tuple(sorted(bad.items())))

    def _strip_headers(self, values: Sequence[bytes | None], bad: dict[int, str]) -> list[bytes | None]:
        """Return the bytes after the headers; None for a record whose schema is unknown."""
        heads, found = self._known_headers, list[bytes | None]()
        for at, value in enumerate(values):
            if value is not None and value[:HEADER_BYTES] not in heads:
                try:
                    self._admit(value)
                except BadValue as e:
                    bad[at] = e.reason
                    value = None
            found.append(None if value is None else value[HEADER_BYTES:])
        return found

    def _admit(self, value: bytes) -> None:
        number = read_schema_id(value)
        if number not in self._known:
            raise BadValue(describe_unknown_schema_id(number, self._span, self._unusable))
        self._known_headers.add(value[:HEADER_BYTES])

    def _check_values(
        self, decoded: Decoded, values: Sequence[bytes | None], texts: Sequence[bytes | None], bad: dict[int, str]
    ) -> Decoded:
        wrong = []
        for at, text in enumerate(texts):
            if text is None or at in bad:
                continue
            number = read_schema_id(values[at] or b"") if self._framed else 0
            if reason := self._make_validator(number)(text):
                bad[at] = reason
                wrong.append(at)
        if not wrong:
            return decoded
        keep = np.ones(len(values), bool)
        keep[wrong] = False
        rows = pa.array(np.arange(len(values)), mask=~keep)
        taken = [column.take(rows) for column in decoded.batch.columns]
        return replace(decoded, batch=pa.RecordBatch.from_arrays(taken, schema=decoded.batch.schema))

    def _make_validator(self, number: int) -> Callable[[bytes], str]:
        if number not in self._validators:
            self._validators[number] = _make_validator(json.loads(self._known[number]))
        return self._validators[number]


def _make_validator(schema: Mapping[str, Any]) -> Callable[[bytes], str]:
    from jsonschema.exceptions import best_match
    from jsonschema.validators import validator_for

    validator = validator_for(schema)(schema)

    def find_error(text: bytes) -> str:
        try:
            error = best_match(validator.iter_errors(json.loads(text)))
        except Exception as e:  # noqa: BLE001 - what a schema's patterns and references do with a value is not ours
            return f"it cannot be checked by its schema: {type(e).__name__}: {str(e)[:_MAX_MESSAGE]}"
        if error is None:
            return ""
        place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in error.absolute_path).lstrip(".")
        return (f"column `{place}`: " if place else "") + f"the schema refuses it: {error.message[:_MAX_MESSAGE]}"

    return find_error


# --- writing --------------------------------------------------------------------------------------------------------------


_MOST_NANOS = ((1 << 63) - 1) // 1000
_Write = Callable[[Any], str]
"""Returns the JSON of a value; raises ValueError."""


class JsonSchemaEncoder(RowEncoder):
    """The encoder of :class:`~airflow_kafka_spark.formats.json.format.JsonSchema`.

    :param fields: the properties of the schema.
    :param columns: the names of the rows' columns, all of them properties.
    :param header: the bytes before each object.
    """

    def __init__(self, fields: Sequence[Property], columns: Sequence[str], header: bytes) -> None:
        super().__init__(columns)
        self._given, self._header = tuple(fields), header
        known = {f.name: f for f in fields}
        self._object = _make_object_writer([known[name] for name in columns], "")

    def __reduce__(self) -> tuple[type[JsonSchemaEncoder], tuple[Any, ...]]:
        return type(self), (self._given, self._columns, self._header)

    def write(self, row: Mapping[str, Any]) -> bytes:
        """Return the header and the object of one row."""
        try:
            return self._header + self._object(row).encode()
        except UnicodeEncodeError as e:
            raise ValueDoesNotFit(f"no UTF-8: {e}") from None


def _make_object_writer(fields: Sequence[Column], path: str) -> Callable[[Mapping[str, Any]], str]:
    parts = [(f.name, json.dumps(f.name, ensure_ascii=False) + ":", _make_writer(f.type, f"{path}{f.name}"), f) for f in fields]

    def write_object(row: Mapping[str, Any]) -> str:
        found = []
        for name, begin, write, field in parts:
            value = row.get(name)
            if value is not None:
                try:
                    found.append(begin + write(value))
                except ValueError as e:
                    raise ValueDoesNotFit.of(f"{path}{name}", e) from None
            elif getattr(field, "null", field.nullable):
                found.append(begin + "null")
            elif not field.nullable:
                raise ValueDoesNotFit.of(f"{path}{name}", "it is null, and the schema requires it")
        return "{" + ",".join(found) + "}"

    return write_object


def _make_writer(data_type: DataType, path: str) -> _Write:
    if isinstance(data_type, Struct):
        return _make_object_writer(data_type.fields, f"{path}.")
    if isinstance(data_type, Array):
        write = _make_nullable_writer(_make_writer(data_type.element, f"{path}[]"), data_type.contains_null)
        return lambda found: "[" + ",".join(map(write, found)) + "]"
    if isinstance(data_type, Map):
        of_map = _make_nullable_writer(_make_writer(data_type.value, f"{path}[]"), data_type.value_contains_null)
        return lambda found: "{" + ",".join(f"{_write_string(key)}:{of_map(value)}" for key, value in list_map_items(found)) + "}"
    if isinstance(data_type, LogicalType):
        return _LOGICAL_WRITERS[data_type.unit](data_type)
    if isinstance(data_type, types.Decimal):
        wanted = data_type
        return lambda value: _write_number(Decimal(value), wanted)
    if isinstance(data_type, Text):
        return _write_string
    if data_type.name in INTEGER_BITS:
        limit = 1 << (INTEGER_BITS[data_type.name] - 1)
        return lambda value: _write_integer(value, limit)
    return _SCALAR_WRITERS[data_type.name]


def _make_nullable_writer(write: _Write, nullable: bool) -> _Write:
    def write_nullable(value: object) -> str:
        if value is None and not nullable:
            raise ValueError("it holds a null, which the schema does not allow there")
        return "null" if value is None else write(value)

    return write_nullable


def _write_string(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _write_integer(value: int, limit: int) -> str:
    if not -limit <= value < limit:
        raise ValueError(f"found {value}, expected {-limit} to {limit - 1}")
    return str(value)


def _write_double(value: float) -> str:
    if not math.isfinite(value):
        raise ValueError(f"found {value}, which JSON cannot hold")
    return repr(float(value))


def _write_float(value: float) -> str:
    _write_double(value)
    return str(np.float32(value))


def _write_number(value: Decimal, wanted: types.Decimal) -> str:
    to_unscaled(value, wanted)
    return format(value, "f")


def _write_base64(value: bytes) -> str:
    return f'"{base64.b64encode(value).decode()}"'


def _write_day(value: int) -> str:
    if not MIN_DATE <= value <= MAX_DATE:
        raise ValueError(f"found day {value} after 1970, expected one in the years 1 to 9999")
    return f'"{np.datetime64(value, "D")}"'


def _write_clock(value: int, zone: str) -> str:
    if not MIN_MICRO <= value <= MAX_MICRO:
        raise ValueError(f"found {value} µs after 1970, expected a time in the years 1 to 9999")
    return f'"{np.datetime64(value, "us")}{zone}"'


def _make_days_writer(_: LogicalType) -> _Write:
    def write_days(value: int) -> str:
        _write_day(value)
        return str(value)

    return write_days


def _make_millis_writer(_: LogicalType) -> _Write:
    def write_millis(value: int) -> str:
        _write_clock(value, "")
        if value % 1000:
            raise ValueError("it holds microseconds, which Connect's and Debezium's Timestamp cannot hold")
        return str(value // 1000)

    return write_millis


def _make_micros_writer(_: LogicalType) -> _Write:
    def write_micros(value: int) -> str:
        _write_clock(value, "")
        return str(value)

    return write_micros


def _make_nanos_writer(_: LogicalType) -> _Write:
    def write_nanos(value: int) -> str:
        if abs(value) > _MOST_NANOS:
            raise ValueError(f"found {value} µs after 1970, expected a time in the years 1678 to 2261: nanoseconds are 64 bits")
        return str(value * 1000)

    return write_nanos


def _make_unscaled_writer(kind: LogicalType) -> _Write:
    assert isinstance(kind.of, types.Decimal)
    sent = types.Decimal(kind.of.precision, kind.scale)
    return lambda value: _write_base64(to_java_big_integer(to_unscaled(Decimal(value), sent)))


_LOGICAL_WRITERS: Mapping[str, Callable[[LogicalType], _Write]] = {
    "days": _make_days_writer,
    "millis": _make_millis_writer,
    "micros": _make_micros_writer,
    "nanos": _make_nanos_writer,
    "unscaled": _make_unscaled_writer,
}
_SCALAR_WRITERS: Mapping[str, _Write] = {
    "float": _write_float,
    "double": _write_double,
    "boolean": lambda value: "true" if value else "false",
    "binary": _write_base64,
    "date": _write_day,
    "timestamp": lambda value: _write_clock(value, "Z"),
    "timestamp_ntz": lambda value: _write_clock(value, ""),
}
