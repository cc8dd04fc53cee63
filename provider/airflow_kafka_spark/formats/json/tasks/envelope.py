"""Connect's envelopes decoded and encoded in tasks, and the defaults of a record's schema (``replace.null.with.default``).

Records of one schema begin with the same bytes, up to the payload: ``{"schema":{...},"payload":``. If a record begins like an
earlier one and ends in ``}``, the bytes between are its payload, provided that they are one JSON document, which the payload's
decoder checks. So each schema is read once and not with every record.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.formats.base import Decoded, Decoder, Encoder, Kind
from airflow_kafka_spark.formats.json.connect_schema import (
    TimestampPrecision,
    get_sql_type,
    is_optional,
    list_sql_columns,
    list_written_columns,
    map_fields_by_name,
)
from airflow_kafka_spark.formats.json.tasks.decode import JsonDecoder
from airflow_kafka_spark.formats.json.tasks.row_decode import (
    MAX_NESTING,
    describe_token,
    find_next_item,
    find_token,
    is_too_deep,
    read_key,
    skip_space,
    skip_value,
)
from airflow_kafka_spark.formats.tasks.base import FEW_RECORDS
from airflow_kafka_spark.formats.tasks.kernels import if_else
from airflow_kafka_spark.formats.tasks.text import JsonEncoder
from airflow_kafka_spark.formats.text_values import BadValue
from airflow_kafka_spark.formats.types import Array, Column, DataType, Map, Struct, to_arrow_schema, to_arrow_type

_SCHEMAS = 64
"""The number of schemas that are kept."""


@dataclass
class _PayloadReader:
    """The decoder of payloads of one schema, or the reason why they cannot be decoded.

    :param decoder: decodes them; None if they do not fit the columns.
    :param wrong: why they do not fit.
    :param optional: True if a payload may be null.
    :param fills: the defaults of the columns.
    """

    decoder: JsonDecoder | None
    wrong: str = ""
    optional: bool = True
    fills: tuple[DefaultFill | None, ...] = ()


@dataclass
class _Group:
    """The records of one schema in a batch: their positions and payloads."""

    plan: _PayloadReader
    places: list[int] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)


class EnvelopeDecoder(Decoder):
    """The decoder of :class:`~airflow_kafka_spark.formats.json.format.JsonEnvelope`.

    :param columns: the columns of the payloads.
    :param few: see :class:`.JsonDecoder`.
    :param defaults: True if the defaults of a record's schema replace nulls.
    """

    def __init__(self, columns: Sequence[Column], few: int = FEW_RECORDS, defaults: bool = False) -> None:
        self._columns, self._few, self._defaults = tuple(columns), few, defaults
        self._schema = to_arrow_schema(self._columns)
        self._plans: dict[str, _PayloadReader] = {}
        self._prefixes: dict[bytes, _PayloadReader] = {}
        self._prefix: bytes | None = None

    def __reduce__(self) -> tuple[type[EnvelopeDecoder], tuple[tuple[Column, ...], int, bool]]:
        return type(self), (self._columns, self._few, self._defaults)

    def decode(self, values: Sequence[bytes | None]) -> Decoded:
        """Decode a batch of values; :class:`.JsonEnvelope` defines their meaning."""
        return self._decode(values, row_wise=False)

    def decode_row_wise(self, values: Sequence[bytes | None]) -> Decoded:
        """Decode each record separately, with its own schema. The result is equal to that of :meth:`decode`."""
        return self._decode(values, row_wise=True)

    def _decode(self, values: Sequence[bytes | None], row_wise: bool) -> Decoded:
        groups: dict[int, _Group] = {}
        bad: dict[int, str] = {}
        nulls: list[int] = []
        for at, value in enumerate(values):
            if value is None:
                continue
            try:
                plan, payload = self._split_payload(value, row_wise)
                if len(payload) < 99 and payload.strip(b" \t\r\n") == b"null":
                    _check_null(plan)
                    nulls.append(at)
                    continue
                if plan.decoder is None:
                    raise BadValue(plan.wrong)
            except BadValue as e:
                bad[at] = e.reason
                continue
            group = groups.get(id(plan)) or groups.setdefault(id(plan), _Group(plan))
            group.places.append(at)
            group.payloads.append(payload)
        batch = self._make_rows(groups.values(), values, bad, row_wise)
        deleted = None
        if nulls:
            gone = set(nulls)
            deleted = pa.array([at in gone for at in range(len(values))], pa.bool_())
        return Decoded(batch, tuple(sorted(bad.items())), deleted)

    def _make_rows(
        self, groups: Iterable[_Group], values: Sequence[bytes | None], bad: dict[int, str], row_wise: bool
    ) -> pa.RecordBatch:
        """Return all rows in their order; reasons of bad records are added to ``bad``."""
        batches: list[pa.RecordBatch] = []
        rows: list[int | None] = [None] * len(values)
        taken = 0
        for group in groups:
            decoder = group.plan.decoder
            assert decoder is not None, "payloads without a decoder are bad records"
            decoded = decoder.decode_row_wise(group.payloads) if row_wise else decoder.decode(group.payloads)
            for n, reason in decoded.bad:
                bad[group.places[n]] = _find_reason(values[group.places[n]], reason)
            rows_of = self._fill(decoded.batch, group.plan)
            if len(group.places) == len(values):
                return rows_of
            batches.append(rows_of)
            for n, at in enumerate(group.places, taken):
                rows[at] = n
            taken += len(group.places)
        order = pa.array(rows, pa.int64())
        columns = []
        for index, f in enumerate(self._schema):
            column = pa.concat_arrays([b.column(index) for b in batches]) if batches else pa.array([], f.type)
            columns.append(column.take(order))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _fill(self, batch: pa.RecordBatch, plan: _PayloadReader) -> pa.RecordBatch:
        if not any(plan.fills):
            return batch
        columns = zip(plan.fills, batch.columns, self._schema, strict=True)
        return pa.RecordBatch.from_arrays([fill_nulls(found, array, f.type) for found, array, f in columns], schema=self._schema)

    def _split_payload(self, value: bytes, row_wise: bool) -> tuple[_PayloadReader, bytes]:
        """Return the reader for a record's schema, and its payload."""
        prefix = self._prefix
        if not row_wise and prefix is not None and value.endswith(b"}"):
            if value.startswith(prefix):
                return self._prefixes[prefix], value[len(prefix) : -1]
            for prefix, plan in self._prefixes.items():
                if value.startswith(prefix):
                    self._prefix = prefix
                    return plan, value[len(prefix) : -1]
        schema, payload, before = split_envelope(value)
        plan = self._plans.get(schema) or self._remember(schema)
        if before is not None:
            if len(self._prefixes) >= _SCHEMAS:
                self._forget_prefixes()
            self._prefixes[before], self._prefix = plan, before
        return plan, payload

    def _forget_prefixes(self) -> None:
        self._prefixes.clear()
        self._prefix = None

    def _remember(self, schema: str) -> _PayloadReader:
        if len(self._plans) >= _SCHEMAS:
            self._plans.clear()
            self._forget_prefixes()
        self._plans[schema] = plan = self._plan(schema)
        return plan

    def _plan(self, text: str) -> _PayloadReader:
        try:
            schema = json.loads(text, parse_int=NumberText, parse_float=NumberText)
        except ValueError as e:
            return _PayloadReader(None, f"its schema cannot be read: {e}")
        try:
            wire_columns = list_written_columns(self._columns, schema)
            found: tuple[DefaultFill | None, ...] = ()
            if self._defaults:
                wire_columns, found = make_default_fills(wire_columns, schema)
        except BadValue as e:
            return _PayloadReader(None, e.reason, is_optional(schema))
        columns = list_sql_columns(wire_columns) if any(found) else self._columns
        return _PayloadReader(JsonDecoder(columns, self._few, wire_columns), optional=is_optional(schema), fills=found)


def _check_null(plan: _PayloadReader) -> None:
    if not plan.optional:
        raise BadValue("its payload is null, and its schema is not optional")


def _find_reason(value: bytes | None, reason: str) -> str:
    """Return the reason why a record is bad. A problem of its envelope comes first."""
    try:
        split_envelope(value or b"")
    except BadValue as e:
        return e.reason
    return reason


def split_envelope(value: bytes) -> tuple[str, bytes, bytes | None]:
    """Return the texts of a record's schema and payload, and its beginning if all between that and a ``}`` is the payload.

    :raises BadValue: it is not one object with these two fields.
    """
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError as e:
        raise BadValue(f"not UTF-8: byte 0x{value[e.start]:02x} at position {e.start}") from None
    if is_too_deep(value):
        raise BadValue(f"objects and arrays nested more than {MAX_NESTING} deep")
    i = skip_space(text).end()
    if not text.startswith("{", i):
        raise BadValue(f"expected an object with `schema` and `payload`, found {describe_token(text, i)}")
    found: dict[str, tuple[int, int]] = {}
    try:
        i = find_token(text, i + 1)
        while text[i] != "}":
            name, start = read_key(text, i)
            if name not in ("schema", "payload") or name in found:
                what = "twice" if name in found else "beside `schema` and `payload`"
                raise BadValue(f"found {ascii(name)[:60]} {what}, expected an object with these two")
            end = skip_value(text, start)
            found[name] = (start, end)
            i = find_next_item(text, end, "}")
    except IndexError:
        raise BadValue(f"not JSON: it ends too early, after {len(text)} characters") from None
    rest = skip_space(text, i + 1).end()
    if rest != len(text):
        raise BadValue(f"expected one JSON object, found {describe_token(text, rest)} after it, at character {rest + 1}")
    if len(found) < 2:
        missing = "payload" if "schema" in found else "schema"
        raise BadValue(f"`{missing}` is missing, expected an object with `schema` and `payload`")
    start, end = found["payload"]
    in_order = found["schema"] < found["payload"] and text.endswith("}")
    before = text[:start].encode() if in_order else None
    return text[slice(*found["schema"])], text[start:end].encode(), before


# --- writing --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EnvelopeEncoder(Encoder):
    """Encodes one envelope per row, as :meth:`~airflow_kafka_spark.formats.JsonEnvelope.encode` writes it.

    :param before: the text before the payload.
    :param columns: each declared column in order, and what the rows hold of it.
    :param precision: the unit of timestamps.
    """

    before: str
    columns: tuple[tuple[Column, Kind], ...]
    precision: TimestampPrecision

    def encode(self, rows: Mapping[str, pa.Array]) -> pa.Array:
        """Return the rows' envelopes."""
        kinds: list[tuple[str, Kind]] = []
        arrays: dict[str, pa.Array] = {}
        for column, kind in self.columns:
            array = rows[column.name]
            if array.null_count and not column.nullable:
                raise ValueError(f"Column `{column.name}` is null, and declared NOT NULL")
            if kind in ("zoned", "local"):
                array, kind = self._convert_instants(column.name, array), "integer"
            elif kind == "date":
                array, kind = array.cast(pa.int32()), "integer"
            elif kind == "integer":
                array = array.cast(to_arrow_type(column.type))
            kinds.append((column.name, kind))
            arrays[column.name] = array
        payload = JsonEncoder(tuple(kinds)).encode(arrays).cast(pa.string())
        return pc.binary_join_element_wise(self.before, payload, "}", "").cast(pa.binary())

    def _convert_instants(self, name: str, array: pa.Array) -> pa.Array:
        plain = array.cast(pa.int64())
        if self.precision == "micros":
            return plain
        # Rounded towards the past, as Spark does; a remainder is refused below.
        whole = array.view(pa.timestamp("us")).cast(pa.timestamp("ms"), safe=False).cast(pa.int64())
        if pc.any(pc.not_equal(pc.multiply(whole, 1000), plain)).as_py():
            raise ValueError(f"Column `{name}` holds microseconds, which Connect's Timestamp cannot hold")
        return whole


# --- defaults of the schema -----------------------------------------------------------------------------------------------


class NumberText(str):
    """A number of a schema as it was written, so that no digit of a default is lost."""


@dataclass(frozen=True)
class DefaultFill:
    """The defaults of a value and of its parts.

    :param default: the value's default, an array of one; None: a null stays null.
    :param parts: those of a struct's fields in order, of an array's elements or of a map's values.
    """

    default: pa.Array | None = None
    parts: tuple[DefaultFill | None, ...] = ()

    def fill(self, array: pa.Array, wanted: pa.DataType) -> pa.Array:
        """Return the values with nulls replaced by defaults.

        :param wanted: their type; a part that may not be null holds no null afterwards.
        """
        if self.parts:
            array = self._fill_inner(array, wanted)
        if self.default is not None and array.null_count:
            array = if_else(array.is_null(), self.default[0], array)
        return array

    def _fill_inner(self, array: pa.Array, wanted: pa.DataType) -> pa.Array:
        gone = array.is_null() if array.null_count else None
        if pa.types.is_struct(wanted):
            fields = zip(self.parts, array.flatten(), wanted, strict=True)
            return pa.StructArray.from_arrays(
                [fill_nulls(part, values, f.type) for part, values, f in fields], fields=list(wanted), mask=gone
            )
        (part,) = self.parts
        if pa.types.is_map(wanted):
            items = fill_nulls(part, array.items, wanted.item_type)
            return pa.MapArray.from_arrays(_read_starts(array), array.keys, items, type=wanted)
        return pa.ListArray.from_arrays(_read_starts(array), fill_nulls(part, array.values, wanted.value_type), type=wanted)


def fill_nulls(filling: DefaultFill | None, array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Return the values with nulls replaced by defaults, if there are any."""
    return array if filling is None else filling.fill(array, wanted)


def _read_starts(array: pa.Array) -> pa.Array:
    """Return the offsets of lists, null where a list is null, as Arrow builds lists from parts."""
    if not array.null_count:
        return array.offsets
    gone = pa.concat_arrays([array.is_null(), pa.array([False])])
    return if_else(gone, pa.scalar(None, pa.int32()), array.offsets)


def make_default_fills(
    columns: Sequence[Column], schema: Mapping[str, Any] | None
) -> tuple[tuple[Column, ...], tuple[DefaultFill | None, ...]]:
    """Return the columns as a payload may leave them, and the defaults that replace their nulls.

    :param columns: the columns with their logical types.
    :param schema: the schema of the record's struct, in which numbers are :class:`NumberText`; None has no defaults.
    :raises BadValue: a default does not fit its field.
    """
    known = map_fields_by_name(schema or {})
    lenient, found = [], []
    for column in columns:
        try:
            data_type, filling = _make_default_fill(column.type, known.get(column.name, {}))
        except BadValue as e:
            raise e.prepend(f".{column.name}") from None
        lenient.append(replace(column, type=data_type, nullable=column.nullable or _has_default(filling)))
        found.append(filling)
    return tuple(lenient), tuple(found)


def _make_default_fill(data_type: DataType, schema: Mapping[str, Any]) -> tuple[DataType, DefaultFill | None]:
    parts: tuple[DefaultFill | None, ...] = ()
    wanted = to_arrow_type(get_sql_type(data_type))
    if isinstance(data_type, Struct):
        fields, parts = make_default_fills(data_type.fields, schema)
        data_type = Struct(fields)
    elif isinstance(data_type, Array):
        element, part = _make_default_fill(data_type.element, schema.get("items") or {})
        data_type, parts = Array(element, data_type.contains_null or _has_default(part)), (part,)
    elif isinstance(data_type, Map):
        value, part = _make_default_fill(data_type.value, schema.get("values") or {})
        data_type, parts = Map(data_type.key, value, data_type.value_contains_null or _has_default(part)), (part,)
    inner = DefaultFill(parts=parts) if any(parts) else None
    if schema.get("default") is None:
        return data_type, inner
    return data_type, DefaultFill(
        fill_nulls(inner, _decode_default(data_type, schema["default"]), wanted), parts if inner else ()
    )


def _has_default(filling: DefaultFill | None) -> bool:
    """Return True if the value itself is never null after filling."""
    return filling is not None and filling.default is not None


def _decode_default(data_type: DataType, default: object) -> pa.Array:
    """Return a default, which is written as in a payload, as an array of one."""
    column = Column("default", data_type)
    try:
        text = _format_json({"default": default})
    except RecursionError:
        raise BadValue("its schema's default is nested too deep") from None
    decoded = JsonDecoder(list_sql_columns([column]), wire_columns=[column]).decode([text.encode()])
    if decoded.bad:
        raise BadValue(f"its schema's default does not fit: {decoded.bad[0][1]}")
    return decoded.batch.column(0)


def _format_json(value: object) -> str:
    """Return parsed JSON as text, with numbers as they were written."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{_format_json(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_format_json, value)) + "]"
    return str(value) if isinstance(value, NumberText) else json.dumps(value)
