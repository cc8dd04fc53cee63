"""Decodes JSON records inside a Spark task: whole batches by Arrow, what does not fit there record by record.

Why a batch that Arrow reads holds one row per record. The records are joined by newlines, and two things are checked on the
bytes: the only newlines are those between records, and each stands between ``}`` and ``{``. A string cannot hold a raw newline,
and inside a JSON document ``}`` is never followed by ``{``; so every newline is outside of all documents, and no record can end
in another one. Hence each record is one or more whole documents, and when there are as many rows as records it is exactly one.
This needs no guard column or key that a record might forge.

What Arrow takes beyond JSON (NUL, bytes that are not UTF-8, ``Inf``, endless nesting) is looked for before it reads; where it
may mean something else than :mod:`.json.tasks.row_wise`, its answer is checked, or the column is read as text or as a wider type.
On any doubt the batch is divided, until the doubtful records stand nearly alone, and the reference decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from airflow_kafka_spark.formats.json.logical_types import MAX_DATE, Carried, plain, unscaled, variable
from airflow_kafka_spark.formats.json.tasks.row_wise import Reference
from airflow_kafka_spark.formats.json.tasks.suspects import screens
from airflow_kafka_spark.formats.tasks.batch_decoder import FEW_RECORDS, Change, DividingDecoder, Doubt, never_null
from airflow_kafka_spark.formats.text import (
    MAX_MICRO,
    MAX_NESTING,
    MAX_SECOND,
    MIN_DATE,
    MIN_MICRO,
    MIN_SECOND,
    BadValue,
    from_base64,
    too_deep,
)
from airflow_kafka_spark.formats.types import (
    Array,
    Column,
    DataType,
    Decimal,
    Map,
    Primitive,
    Struct,
    Text,
    arrow_schema,
    arrow_type,
)

_escaped_number = re.compile(rb"\\u00(?:3[0-9]|2[dDeE]|[46]5)").search
_number_begins = re.compile(rb'(?:[:,\[" \t\n\r][-+]?|\A[-+]?)[0-9.]+\Z').search
_exponent_ends = re.compile(rb"-[0-9]+(\"?)[ \t\n\r]*[,\]}]").match
_odd_infinity = re.compile(rb"Inf[ \t\n\r,\]}]").search

"""From what Arrow's JSON reader gave to the column's own type; raises :class:`.Doubt` when the meaning might be another one."""


class JsonDecoder(DividingDecoder):
    """See :class:`airflow_kafka_spark.formats.json.format.Json`.

    :param columns: the schema.
    :param few: up to this many records (and 64 KiB) the reference is faster than starting Arrow's reader.
    :param carried: the same columns with what their values are carried by (:class:`.Carried`); None where JSON's own texts and
        numbers are meant.
    """

    def __init__(self, columns: Sequence[Column], few: int = FEW_RECORDS, carried: Sequence[Column] | None = None) -> None:
        self._columns = tuple(columns)
        self._carried = self._columns if carried is None else tuple(carried)
        self._reference = Reference(self._carried)
        self._plans: dict[tuple[bool, ...], _Plan] = {}
        self._has_decimal = any(_has(Decimal, c.type) for c in self._columns)
        super().__init__(
            arrow_schema(self._columns),
            self._reference.read,
            few,
            only_reference=any(_has(Map, c.type) for c in self._columns),
            screens=screens(self._carried),
        )

    def __reduce__(self) -> tuple[type[JsonDecoder], tuple[tuple[Column, ...], int, tuple[Column, ...]]]:
        return type(self), (self._columns, self._few, self._carried)

    def _by_arrow(self, records: Sequence[bytes]) -> pa.RecordBatch | None:
        try:
            buffer = _join(records, self._has_decimal)
        except Doubt:
            return None
        epochs = tuple(self._reference.epochs)
        batch = self._read(buffer, len(records), epochs)
        if batch is None and epochs:
            # Timestamps may come as numbers here: the first record tells.
            self.read_by_reference(records[:1], 0)
            if tuple(self._reference.epochs) != epochs:
                batch = self._read(buffer, len(records), tuple(self._reference.epochs))
        return batch

    def _read(self, buffer: bytes, count: int, epochs: tuple[bool, ...]) -> pa.RecordBatch | None:
        if epochs not in self._plans:
            self._plans[epochs] = _Plan(self._carried, epochs)
        try:
            return self._plans[epochs].read(buffer, count, self._schema)
        except (Doubt, BadValue, pa.ArrowException, OverflowError, UnicodeDecodeError):
            return None


def _has(kind: type, data_type: DataType) -> bool:
    """Whether a type is of this kind, or holds one that is."""
    if isinstance(data_type, Array):
        return _has(kind, data_type.element)
    return isinstance(data_type, kind) or (isinstance(data_type, Struct) and any(_has(kind, f.type) for f in data_type.fields))


# --- before Arrow reads --------------------------------------------------------------------------------------------------


def _join(records: Sequence[bytes], decimals: bool) -> bytes:
    """The records as one buffer, in which each newline separates two of them and nothing stands that Arrow takes beyond JSON.

    :param decimals: whether the schema has some.
    """
    buffer = b"\n".join(records)
    ends = _separators(buffer, len(records))
    if ends is None:
        # Newlines of their own: to JSON a carriage return means the same, also where it is forbidden.
        records = [r.replace(b"\n", b"\r").strip(b" \t\r") for r in records]
        buffer = b"\n".join(records)
        ends = _separators(buffer, len(records))
    if ends is None or b"\0" in buffer:
        raise Doubt
    if not buffer.isascii():
        try:
            buffer.decode("utf-8")
        except UnicodeDecodeError:
            raise Doubt from None
    if (b"I" in buffer and b"Inf" in buffer and _odd_infinity(buffer)) or (b"N" in buffer and b"-NaN" in buffer):
        raise Doubt
    if decimals and _has_negative_exponent(buffer):
        raise Doubt
    long = np.flatnonzero(np.diff(ends, prepend=-1) > 2 * MAX_NESTING)
    if any(too_deep(records[at]) for at in long.tolist()):
        raise Doubt
    return buffer


def _has_negative_exponent(buffer: bytes) -> bool:
    """Whether there may be a number like ``1e-400``, as a string too: for a decimal, Arrow then reads memory not its own."""
    if b"\\" in buffer and _escaped_number(buffer):
        return True
    # Looked for as single bytes: faster than Python finds two in a row.
    view = np.frombuffer(buffer, np.uint8)
    minus = np.flatnonzero(view == ord("-"))
    for at in minus[(view[minus - 1] | 0x20) == ord("e")].tolist():
        begins, ends = _number_begins(buffer[max(0, at - 64) : at - 1]), _exponent_ends(buffer, at)
        # Quotes stand on both sides or on none; when there are more digits than looked at, that is not known.
        if begins and ends and (len(begins[0]) > 60 or (begins[0][:1] == b'"') == (ends[1] == b'"')):
            return True
    return False


def _separators(buffer: bytes, count: int) -> np.ndarray | None:
    """Where each record ends, when every newline stands between ``}`` and ``{`` and there are as many as there must be."""
    view = np.frombuffer(buffer, np.uint8)
    if len(view) < 2 or view[0] != ord("{") or view[-1] != ord("}"):
        return None
    newlines = np.flatnonzero(view == ord("\n"))
    if len(newlines) != count - 1 or (view[newlines - 1] != ord("}")).any() or (view[newlines + 1] != ord("{")).any():
        return None
    return np.append(newlines, len(view))


# --- reading, and what is checked afterwards -----------------------------------------------------------------------------


class _Plan:
    """How Arrow reads a schema: a column as its own type where Arrow means the same, else as text or as a wider type.

    :param columns: the schema, without maps.
    :param epochs: for each timestamp and each value that is carried, in order, whether it comes as a number.
    """

    def __init__(self, columns: Sequence[Column], epochs: Sequence[bool]) -> None:
        self._epochs = iter(epochs)
        compiled = [self._column(c.type, c.nullable) for c in columns]
        self._restore = [(c.name, restore) for c, (_, restore) in zip(columns, compiled, strict=True)]
        read_schema = pa.schema([pa.field(c.name, read_type) for c, (read_type, _) in zip(columns, compiled, strict=True)])
        self._parse = pj.ParseOptions(explicit_schema=read_schema, unexpected_field_behavior="ignore")

    def read(self, buffer: bytes, count: int, schema: pa.Schema) -> pa.RecordBatch:
        options = pj.ReadOptions(use_threads=False, block_size=len(buffer) + 1)
        table = pj.read_json(pa.BufferReader(buffer), read_options=options, parse_options=self._parse)
        if table.num_rows != count:
            raise Doubt
        arrays = []
        for name, restore in self._restore:
            column = table.column(name)
            arrays.append(restore(column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()))
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _column(self, data_type: DataType, nullable: bool) -> tuple[pa.DataType, Change]:
        read_type, restore = self._typed(data_type)
        return read_type, restore if nullable else never_null(restore)

    def _typed(self, data_type: DataType) -> tuple[pa.DataType, Change]:
        if isinstance(data_type, Struct):
            return self._struct(data_type)
        if isinstance(data_type, Array):
            return self._array(data_type)
        if isinstance(data_type, Decimal):
            return _decimal(data_type)
        if isinstance(data_type, Carried):
            return _carried(data_type, next(self._epochs))
        if isinstance(data_type, Text):
            return pa.string(), _same if data_type.max_length is None else _at_most(data_type.max_length)
        assert isinstance(data_type, Primitive)
        if data_type.name == "timestamp":
            return (pa.int64(), _from_seconds) if next(self._epochs) else (arrow_type(data_type), _in_years)
        return _READ_AS.get(data_type.name) or (arrow_type(data_type), _same)

    def _struct(self, data_type: Struct) -> tuple[pa.DataType, Change]:
        compiled = [self._column(f.type, True) for f in data_type.fields]
        wanted = arrow_type(plain(data_type))
        read_type = pa.struct([pa.field(f.name, t) for f, (t, _) in zip(data_type.fields, compiled, strict=True)])

        def restore(array: pa.Array) -> pa.Array:
            valid = array.is_valid()
            children = []
            for index, (field, (_, restore_child)) in enumerate(zip(data_type.fields, compiled, strict=True)):
                child = restore_child(array.field(index))
                if not field.nullable and pc.any(pc.and_(child.is_null(), valid)).as_py():
                    raise Doubt
                children.append(child)
            return pa.StructArray.from_arrays(children, fields=list(wanted), mask=array.is_null())

        return read_type, restore

    def _array(self, data_type: Array) -> tuple[pa.DataType, Change]:
        element, restore_element = self._column(data_type.element, data_type.contains_null)
        wanted = arrow_type(plain(data_type))

        def restore(array: pa.Array) -> pa.Array:
            if array.offset:
                raise Doubt
            values = restore_element(array.values)
            return pa.ListArray.from_arrays(
                array.offsets, values, type=wanted, mask=array.is_null() if array.null_count else None
            )

        return pa.list_(pa.field("item", element)), restore


def _same(array: pa.Array) -> pa.Array:
    return array


def _within(array: pa.Array, low: int, high: int) -> None:
    """Raises unless all values, as their integers, lie in the range."""
    kind = {32: pa.int32(), 64: pa.int64()}[array.type.bit_width]
    ends = pc.min_max(array.view(kind))
    smallest, largest = ends["min"].as_py(), ends["max"].as_py()
    if smallest is not None and not low <= smallest <= largest <= high:
        raise Doubt


def _decimal(data_type: Decimal) -> tuple[pa.DataType, Change]:
    wanted = arrow_type(data_type)
    if data_type.precision + data_type.scale <= 38:
        return wanted, _fitting
    # Arrow rescales what was written without looking whether the product overflows: in 256 bits it does not.
    return pa.decimal256(data_type.precision, data_type.scale), lambda array: _fitting(array).cast(wanted)


def _fitting(array: pa.Array) -> pa.Array:
    # Arrow has counted the digits that were written, not those of the rescaled number.
    array.validate(full=True)
    return array


def _carried(kind: Carried, number: bool) -> tuple[pa.DataType, Change]:
    """A value that another type carries."""
    wanted = arrow_type(kind.of)
    if kind.unit == "unscaled":
        assert isinstance(kind.of, Decimal)
        if number:
            return _decimal(kind.of)
        convert = unscaled(kind)
        return pa.string(), lambda array: pa.array([None if v is None else convert(v) for v in array.to_pylist()], wanted)
    if kind.unit == "variable":
        return _VARIABLE, lambda array: pa.array([_variable(v, kind) for v in array.to_pylist()], wanted)
    if kind.unit == "iso":
        return pa.string(), _without_zulu(str(kind.of))
    if not number:
        return (pa.string(), _READ_AS[str(kind.of)][1]) if str(kind.of) in _READ_AS else (wanted, _in_years)
    if kind.unit == "days":
        return pa.int64(), _from_days
    times, per = kind.factor

    def restore(array: pa.Array) -> pa.Array:
        _within(array, -(-MIN_MICRO * per // times), MAX_MICRO * per // times)
        whole = pc.divide(array, per)
        if per > 1 and not pc.all(pc.equal(pc.multiply(whole, per), array)).as_py():
            raise Doubt
        return pc.multiply(whole, times).cast(wanted)

    return pa.int64(), restore


_VARIABLE = pa.struct([("scale", pa.int32()), ("value", pa.string())])


def _variable(found: dict[str, Any] | None, kind: Carried) -> Any:
    if found is None:
        return None
    if found["scale"] is None or found["value"] is None:
        raise Doubt
    return variable(from_base64(found["value"]), found["scale"], kind)


def _without_zulu(name: str) -> Change:
    """Of texts that may end in ``Z``: days, or times to the minute at least."""
    _, change = _READ_AS[name]
    pattern = "^(....-..-..)Z$" if name == "date" else "^(.*[0-9]:[0-9].*)Z$"
    return lambda array: change(pc.replace_substring_regex(array, pattern, "\\1"))


def _from_days(array: pa.Array) -> pa.Array:
    _within(array, MIN_DATE, MAX_DATE)
    return array.cast(pa.int32()).cast(pa.date32())


def _at_most(length: int) -> Change:
    def checked(array: pa.Array) -> pa.Array:
        longest = pc.max(pc.utf8_length(array)).as_py()
        if longest is not None and longest > length:
            raise Doubt
        return array

    return checked


def _in_years(array: pa.Array) -> pa.Array:
    _within(array, MIN_MICRO, MAX_MICRO)
    return array


def _from_seconds(array: pa.Array) -> pa.Array:
    _within(array, MIN_SECOND, MAX_SECOND)
    return pc.multiply(array, 1_000_000).cast(pa.timestamp("us", "UTC"))


def _from_wall_clock(array: pa.Array) -> pa.Array:
    return _in_years(array.cast(pa.timestamp("us")))


def _from_date(array: pa.Array) -> pa.Array:
    dates = array.cast(pa.date32())
    _within(dates, MIN_DATE, 1 << 30)
    return dates


def _finite(array: pa.Array) -> pa.Array:
    # To Arrow, too large a number is infinite; which ones were written so it does not tell.
    if pc.any(pc.is_inf(array)).as_py():
        raise Doubt
    return array


def _from_base64_text(array: pa.Array) -> pa.Array:
    return pa.array([None if v is None else from_base64(v) for v in array.to_pylist()], pa.binary())


_READ_AS: dict[str, tuple[pa.DataType, Change]] = {
    "float": (pa.float32(), _finite),
    "double": (pa.float64(), _finite),
    "date": (pa.string(), _from_date),
    "timestamp_ntz": (pa.string(), _from_wall_clock),
    "binary": (pa.string(), _from_base64_text),
}
