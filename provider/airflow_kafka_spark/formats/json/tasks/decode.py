"""JSON decoded in tasks: whole batches with Arrow, everything else row by row.

A batch that Arrow reads holds one row per record for this reason. The records are joined by newlines, and two facts are checked
on the bytes: the only newlines are those between records, and each is between ``}`` and ``{``. A string cannot contain a raw
newline, and inside a JSON document ``}`` is never followed by ``{``; so every newline is outside of all documents, and no
record can end in another one. Hence each record is one or more whole documents, and if there are as many rows as records it is
exactly one. This needs no guard column or key that a record might forge.

Arrow accepts more than JSON: NUL, bytes that are not UTF-8, ``Inf``, unlimited nesting. These are searched for before it reads.
Where its result may differ from that of :mod:`.json.tasks.row_decode`, the result is checked, or the column is read as text or
as a wider type. If a check fails, the batch is divided, see :class:`.BatchDecoder`.
"""

from __future__ import annotations

import datetime
import decimal
import importlib.util
import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from operator import attrgetter, length_hint
from types import GenericAlias, ModuleType
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from airflow_kafka_spark.formats.json.connect_schema import LogicalType, get_sql_type
from airflow_kafka_spark.formats.json.tasks.row_decode import (
    MAX_NESTING,
    JsonRowReader,
    convert_variable_scale,
    is_too_deep,
    make_unscaled_conversion,
)
from airflow_kafka_spark.formats.tasks.base import (
    FEW_RECORDS,
    ArrayFunction,
    BatchDecoder,
    NeedsRowWise,
    SuspectFinder,
    check_length,
    check_within,
    check_years,
    parse_dates,
    parse_timestamps,
    refuse_nulls,
)
from airflow_kafka_spark.formats.tasks.kernels import if_else
from airflow_kafka_spark.formats.text_values import (
    MAX_DATE,
    MAX_MICRO,
    MAX_SECOND,
    MIN_DATE,
    MIN_MICRO,
    MIN_SECOND,
    BadValue,
    decode_base64,
)
from airflow_kafka_spark.formats.types import (
    INTEGER_BITS,
    Array,
    Column,
    DataType,
    Decimal,
    Map,
    Primitive,
    Struct,
    Text,
    to_arrow_schema,
    to_arrow_type,
)

_escaped_number = re.compile(rb"\\u00(?:3[0-9]|2[dDeE]|[46]5)").search
_number_begins = re.compile(rb'(?:[:,\[" \t\n\r][-+]?|\A[-+]?)[0-9.]+\Z').search
_exponent_ends = re.compile(rb"-[0-9]+(\"?)[ \t\n\r]*[,\]}]").match
_odd_infinity = re.compile(rb"Inf[ \t\n\r,\]}]").search


class JsonDecoder(BatchDecoder):
    """The decoder of :class:`~airflow_kafka_spark.formats.json.format.Json`.

    :param columns: the columns.
    :param few: up to this many records (and 64 KiB) are read row by row, which is faster than starting Arrow's reader.
    :param wire_columns: the columns with the logical types by which their values are written (:class:`.LogicalType`); None if
        values are JSON's own texts and numbers.
    """

    def __init__(self, columns: Sequence[Column], few: int = FEW_RECORDS, wire_columns: Sequence[Column] | None = None) -> None:
        self._columns = tuple(columns)
        self._wire_columns = self._columns if wire_columns is None else tuple(wire_columns)
        self._row_reader = JsonRowReader(self._wire_columns)
        self._plans: dict[tuple[bool, ...], _ArrowReader] = {}
        self._has_decimal = any(_contains(c.type, _is_a_decimal) for c in self._columns)
        self._maps = _Maps([c for c in self._wire_columns if _is_map(c.type)])
        others = [c for c in self._wire_columns if c not in self._maps.columns]
        super().__init__(
            to_arrow_schema(self._columns),
            self._row_reader.read,
            few,
            row_wise_only=any(_contains(c.type, _is_a_map) for c in others) or not self._maps.is_possible,
            suspect_finders=make_suspect_finders(self._wire_columns),
        )

    def __reduce__(self) -> tuple[type[JsonDecoder], tuple[tuple[Column, ...], int, tuple[Column, ...]]]:
        return type(self), (self._columns, self._few, self._wire_columns)

    def _read_batch(self, records: Sequence[bytes]) -> pa.RecordBatch | None:
        try:
            buffer = _join(records, self._has_decimal)
        except NeedsRowWise:
            return None
        as_numbers = tuple(self._row_reader.as_numbers)
        batch = self._read(buffer, records, as_numbers)
        if batch is None and as_numbers:
            # Timestamps may be numbers in this batch: the first record shows it.
            self.read_row_wise(records[:1], 0)
            if tuple(self._row_reader.as_numbers) != as_numbers:
                batch = self._read(buffer, records, tuple(self._row_reader.as_numbers))
        return batch

    def _read(self, buffer: bytes, records: Sequence[bytes], as_numbers: tuple[bool, ...]) -> pa.RecordBatch | None:
        if as_numbers not in self._plans:
            self._plans[as_numbers] = _ArrowReader(self._wire_columns, as_numbers)
        try:
            table = self._plans[as_numbers].read(buffer, len(records))
            # After Arrow, which has refused records whose maps are no objects, or occur twice.
            arrays = {**table, **self._maps.read(records, table)}
            return pa.RecordBatch.from_arrays([arrays[name] for name in self._schema.names], schema=self._schema)
        except (NeedsRowWise, BadValue, pa.ArrowException, OverflowError, UnicodeDecodeError):
            return None


def _is_map(data_type: DataType) -> bool:
    """Return True for a map whose values Arrow reads in one way only: neither maps nor timestamps, which may be numbers."""
    return isinstance(data_type, Map) and not _contains(data_type.value, _has_forms)


def _has_forms(data_type: DataType) -> bool:
    return isinstance(data_type, Map | LogicalType) or str(data_type) == "timestamp"


def _is_a_map(data_type: DataType) -> bool:
    return isinstance(data_type, Map)


def _is_a_decimal(data_type: DataType) -> bool:
    return isinstance(data_type, Decimal)


def _contains(data_type: DataType, is_wanted: Callable[[DataType], bool]) -> bool:
    """Return True if a type is wanted, or contains one that is."""
    if is_wanted(data_type):
        return True
    if isinstance(data_type, Array):
        return _contains(data_type.element, is_wanted)
    if isinstance(data_type, Map):
        return _contains(data_type.value, is_wanted)
    return isinstance(data_type, Struct) and any(_contains(f.type, is_wanted) for f in data_type.fields)


# --- before Arrow reads --------------------------------------------------------------------------------------------------


def _join(records: Sequence[bytes], decimals: bool) -> bytes:
    """Return the records as one buffer in which each newline separates two of them, without anything that only Arrow accepts.

    :param decimals: True if the schema has decimals.
    """
    buffer = b"\n".join(records)
    ends = _find_separators(buffer, len(records))
    if ends is None:
        # Records contain newlines. JSON treats a carriage return like a newline, also where it is not allowed.
        records = [r.replace(b"\n", b"\r").strip(b" \t\r") for r in records]
        buffer = b"\n".join(records)
        ends = _find_separators(buffer, len(records))
    if ends is None or b"\0" in buffer:
        raise NeedsRowWise
    if not buffer.isascii():
        try:
            buffer.decode("utf-8")
        except UnicodeDecodeError:
            raise NeedsRowWise from None
    if (b"I" in buffer and b"Inf" in buffer and _odd_infinity(buffer)) or (b"N" in buffer and b"-NaN" in buffer):
        raise NeedsRowWise
    if decimals and _has_negative_exponent(buffer):
        raise NeedsRowWise
    long = np.flatnonzero(np.diff(ends, prepend=-1) > 2 * MAX_NESTING)
    if any(is_too_deep(records[at]) for at in long.tolist()):
        raise NeedsRowWise
    return buffer


def _has_negative_exponent(buffer: bytes) -> bool:
    """Return True if there may be a number like ``1e-400``, also as a string: for a decimal, Arrow then reads foreign memory."""
    if b"\\" in buffer and _escaped_number(buffer):
        return True
    # Searched as single bytes, which is faster than a search for two consecutive ones.
    view = np.frombuffer(buffer, np.uint8)
    minus = np.flatnonzero(view == ord("-"))
    for at in minus[(view[minus - 1] | 0x20) == ord("e")].tolist():
        begins, ends = _number_begins(buffer[max(0, at - 64) : at - 1]), _exponent_ends(buffer, at)
        # Quotes stand on both sides or on none; with more digits than were searched that is unknown.
        if begins and ends and (len(begins[0]) > 60 or (begins[0][:1] == b'"') == (ends[1] == b'"')):
            return True
    return False


def _find_separators(buffer: bytes, count: int) -> np.ndarray | None:
    """Return the end of each record, if every newline stands between ``}`` and ``{`` and their number is right; else None."""
    view = np.frombuffer(buffer, np.uint8)
    if len(view) < 2 or view[0] != ord("{") or view[-1] != ord("}"):
        return None
    newlines = np.flatnonzero(view == ord("\n"))
    if len(newlines) != count - 1 or (view[newlines - 1] != ord("}")).any() or (view[newlines + 1] != ord("{")).any():
        return None
    return np.append(newlines, len(view))


# --- maps, which Arrow does not read -------------------------------------------------------------------------------------

_pairs = json.JSONDecoder(object_pairs_hook=tuple).decode
_no_name_of_struct = re.compile(r'["\\\x00-\x1f]').search


class _Maps:
    """Reads columns that are maps, from records that Arrow has read as JSON.

    :param columns: the columns, top-level ones.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = tuple(columns)

    @property
    def is_possible(self) -> bool:
        """True if there is nothing to read, or msgspec is installed and can find columns of these names in records."""
        has_msgspec = importlib.util.find_spec("msgspec") is not None
        return not self.columns or (has_msgspec and not any(_no_name_of_struct(column.name) for column in self.columns))

    @cached_property
    def _find(self) -> Callable[[bytes], Any]:
        """The function that finds the maps of a record, as JSON."""
        import msgspec

        return msgspec.json.Decoder(_make_struct_type(self.columns, msgspec, lambda *_: msgspec.Raw)).decode

    @cached_property
    def _values_of(self) -> Callable[[bytes], list[dict[str, Any] | None]]:
        """The function that reads a JSON array of maps, whose values stay JSON."""
        import msgspec

        return msgspec.json.Decoder(list[dict[str, msgspec.Raw] | None]).decode

    @cached_property
    def _texts_of(self) -> Callable[[bytes], list[dict[str, Any] | None]]:
        """The function that reads a JSON array of maps of texts."""
        import msgspec

        return msgspec.json.Decoder(list[dict[str, str | None] | None]).decode

    @cached_property
    def _readers(self) -> dict[str, _ArrowReader]:
        """The readers of the values, by column."""
        maps = {c.name: c.type for c in self.columns if isinstance(c.type, Map)}
        return {name: _ArrowReader([Column("v", m.value, m.value_contains_null)], ()) for name, m in maps.items()}

    def read(self, records: Sequence[bytes], read: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
        """Return the maps by name of their column.

        :param records: the records.
        :param read: the columns as Arrow has read them.
        :raises NeedsRowWise: a value may be of another type, or a name occurs twice in a map.
        """
        if not self.columns:
            return {}
        with _refuse_undecodable():
            rows = list(map(self._find, records))
        return {
            column.name: self._make_array([getattr(row, f"f{at}") or b"null" for row in rows], column, read[column.name])
            for at, column in enumerate(self.columns)
        }

    def _make_array(self, found: Sequence[Any], column: Column, read: pa.Array) -> pa.Array:
        assert isinstance(column.type, Map)
        wanted, is_text = to_arrow_type(column.type), column.type.value == Text()
        buffer = b"[%b]" % b",".join(found)
        with _refuse_undecodable():
            maps = [one or {} for one in (self._texts_of if is_text else self._values_of)(buffer)]
        names = list(chain.from_iterable(maps))
        values: list[Any] = list(chain.from_iterable(map(dict.values, maps)))
        nulls = values.count(None)
        if nulls and not column.type.value_contains_null:
            raise NeedsRowWise
        quotes = 2 * (len(values) - nulls) if is_text else b"".join(values).count(b'"')
        if _has_a_name_twice(buffer, 2 * len(names) + quotes, found):
            raise NeedsRowWise
        items = pa.array(values, pa.string()) if is_text else self._read_values(values, column.name, wanted.item_type)
        ends = np.cumsum([0, *map(len, maps)], dtype=np.int32)
        made = pa.MapArray.from_arrays(pa.array(ends), pa.array(names, wanted.key_type), items, type=wanted)
        return made if not read.null_count else if_else(read.is_valid(), made, pa.scalar(None, wanted))

    def _read_values(self, raw: Sequence[Any], name: str, wanted: pa.DataType) -> pa.Array:
        """Return values that Arrow reads, each as a record of its own."""
        if not raw:
            return pa.array([], wanted)
        lines = b"\n".join([b'{"v":%b}' % bytes(value).replace(b"\n", b" ") for value in raw])
        return self._readers[name].read(lines, len(raw))["v"]


def _has_a_name_twice(buffer: bytes, quotes: int, maps: Sequence[Any]) -> bool:
    """Return True if a map has a name twice. msgspec keeps the last one.

    :param buffer: the maps, as JSON.
    :param quotes: the number of quotes of the names and values that msgspec has kept.
    :param maps: the maps one by one, as JSON.
    """
    if b"\\" not in buffer:
        # No text contains a quote.
        return buffer.count(b'"') != quotes
    found = (_pairs(str(one, "utf-8")) or () for one in maps)
    return any(len({name for name, _ in pairs}) < len(pairs) for pairs in found)


@contextmanager
def _refuse_undecodable() -> Iterator[None]:
    """Raise NeedsRowWise where msgspec refuses a text."""
    import msgspec

    try:
        yield
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise NeedsRowWise from None


# --- reading, and the checks afterwards -----------------------------------------------------------------------------------


class _ArrowReader:
    """Reads buffers of one schema with Arrow: a column as its own type if Arrow reads it identically, else as text or as a wider
    type.

    :param columns: the columns. Of maps it reads only that they are objects.
    :param as_numbers: for each timestamp and each logical type, in order, True if its values are numbers.
    """

    def __init__(self, columns: Sequence[Column], as_numbers: Sequence[bool]) -> None:
        self._as_numbers = iter(as_numbers)
        compiled = [self._read_column(c.type, c.nullable) for c in columns]
        self._restore = [(c.name, restore) for c, (_, restore) in zip(columns, compiled, strict=True)]
        read_schema = pa.schema([pa.field(c.name, read_type) for c, (read_type, _) in zip(columns, compiled, strict=True)])
        self._parse = pj.ParseOptions(explicit_schema=read_schema, unexpected_field_behavior="ignore")

    def read(self, buffer: bytes, count: int) -> dict[str, pa.Array]:
        """Return the columns by name; a map as a struct without fields.

        :param count: number of records in the buffer.
        """
        options = pj.ReadOptions(use_threads=False, block_size=len(buffer) + 1)
        table = pj.read_json(pa.BufferReader(buffer), read_options=options, parse_options=self._parse)
        if table.num_rows != count:
            raise NeedsRowWise
        arrays = {}
        for name, restore in self._restore:
            column = table.column(name)
            arrays[name] = restore(column.chunk(0) if column.num_chunks == 1 else column.combine_chunks())
        return arrays

    def _read_column(self, data_type: DataType, nullable: bool) -> tuple[pa.DataType, ArrayFunction]:
        read_type, restore = self._read_type(data_type)
        return read_type, restore if nullable else refuse_nulls(restore)

    def _read_type(self, data_type: DataType) -> tuple[pa.DataType, ArrayFunction]:
        if isinstance(data_type, Struct):
            return self._read_struct(data_type)
        if isinstance(data_type, Array):
            return self._read_array(data_type)
        if isinstance(data_type, Map):
            return pa.struct([]), _keep_unchanged
        if isinstance(data_type, Decimal):
            return _make_decimal_conversion(data_type)
        if isinstance(data_type, LogicalType):
            return _make_logical_conversion(data_type, next(self._as_numbers))
        if isinstance(data_type, Text):
            return pa.string(), _keep_unchanged if data_type.max_length is None else check_length(data_type.max_length)
        assert isinstance(data_type, Primitive)
        if data_type.name == "timestamp":
            return (pa.int64(), _convert_seconds) if next(self._as_numbers) else (to_arrow_type(data_type), check_years)
        return _READ_AS.get(data_type.name) or (to_arrow_type(data_type), _keep_unchanged)

    def _read_struct(self, data_type: Struct) -> tuple[pa.DataType, ArrayFunction]:
        compiled = [self._read_column(f.type, True) for f in data_type.fields]
        wanted = to_arrow_type(get_sql_type(data_type))
        read_type = pa.struct([pa.field(f.name, t) for f, (t, _) in zip(data_type.fields, compiled, strict=True)])

        def restore(array: pa.Array) -> pa.Array:
            valid = array.is_valid()
            children = []
            for index, (field, (_, restore_child)) in enumerate(zip(data_type.fields, compiled, strict=True)):
                child = restore_child(array.field(index))
                if not field.nullable and pc.any(pc.and_(child.is_null(), valid)).as_py():
                    raise NeedsRowWise
                children.append(child)
            return pa.StructArray.from_arrays(children, fields=list(wanted), mask=array.is_null())

        return read_type, restore

    def _read_array(self, data_type: Array) -> tuple[pa.DataType, ArrayFunction]:
        element, restore_element = self._read_column(data_type.element, data_type.contains_null)
        wanted = to_arrow_type(get_sql_type(data_type))

        def restore(array: pa.Array) -> pa.Array:
            if array.offset:
                raise NeedsRowWise
            values = restore_element(array.values)
            return pa.ListArray.from_arrays(
                array.offsets, values, type=wanted, mask=array.is_null() if array.null_count else None
            )

        return pa.list_(pa.field("item", element)), restore


def _keep_unchanged(array: pa.Array) -> pa.Array:
    return array


def _make_decimal_conversion(data_type: Decimal) -> tuple[pa.DataType, ArrayFunction]:
    wanted = to_arrow_type(data_type)
    if data_type.precision + data_type.scale <= 38:
        return wanted, _check_digits
    # Arrow rescales decimals without checking for overflow; 256 bits cannot overflow.
    return pa.decimal256(data_type.precision, data_type.scale), lambda array: _check_digits(array).cast(wanted)


def _check_digits(array: pa.Array) -> pa.Array:
    # Arrow has checked the digits as written, not those of the rescaled number.
    array.validate(full=True)
    return array


def _make_logical_conversion(kind: LogicalType, number: bool) -> tuple[pa.DataType, ArrayFunction]:
    """Return the type as which Arrow reads a logical type, and the conversion to the column."""
    wanted = to_arrow_type(kind.of)
    if kind.unit == "unscaled":
        assert isinstance(kind.of, Decimal)
        if number:
            return _make_decimal_conversion(kind.of)
        convert = make_unscaled_conversion(kind)
        return pa.string(), lambda array: pa.array([None if v is None else convert(v) for v in array.to_pylist()], wanted)
    if kind.unit == "variable":
        return _VARIABLE, lambda array: pa.array([_parse_variable_decimal(v, kind) for v in array.to_pylist()], wanted)
    if kind.unit == "iso":
        return pa.string(), _make_zulu_conversion(str(kind.of))
    if not number:
        return (pa.string(), _READ_AS[str(kind.of)][1]) if str(kind.of) in _READ_AS else (wanted, check_years)
    if kind.unit == "days":
        return pa.int64(), _convert_days
    times, per = kind.factor

    def restore(array: pa.Array) -> pa.Array:
        check_within(array, -(-MIN_MICRO * per // times), MAX_MICRO * per // times)
        whole = pc.divide(array, per)
        if per > 1 and not pc.all(pc.equal(pc.multiply(whole, per), array)).as_py():
            raise NeedsRowWise
        return pc.multiply(whole, times).cast(wanted)

    return pa.int64(), restore


_VARIABLE = pa.struct([("scale", pa.int32()), ("value", pa.string())])


def _parse_variable_decimal(found: dict[str, Any] | None, kind: LogicalType) -> decimal.Decimal | None:
    if found is None:
        return None
    if found["scale"] is None or found["value"] is None:
        raise NeedsRowWise
    return convert_variable_scale(decode_base64(found["value"]), found["scale"], kind)


def _make_zulu_conversion(name: str) -> ArrayFunction:
    """Return the conversion of texts that may end in ``Z``: days, or times with at least minutes."""
    _, change = _READ_AS[name]
    pattern = "^(....-..-..)Z$" if name == "date" else "^(.*[0-9]:[0-9].*)Z$"
    return lambda array: change(pc.replace_substring_regex(array, pattern, "\\1"))


def _convert_days(array: pa.Array) -> pa.Array:
    check_within(array, MIN_DATE, MAX_DATE)
    return array.cast(pa.int32()).cast(pa.date32())


def _convert_seconds(array: pa.Array) -> pa.Array:
    check_within(array, MIN_SECOND, MAX_SECOND)
    return pc.multiply(array, 1_000_000).cast(pa.timestamp("us", "UTC"))


def _check_finite(array: pa.Array) -> pa.Array:
    # Arrow reads numbers that are too large as infinite, like written infinities.
    if pc.any(pc.is_inf(array)).as_py():
        raise NeedsRowWise
    return array


def _decode_base64_text(array: pa.Array) -> pa.Array:
    return pa.array([None if v is None else decode_base64(v) for v in array.to_pylist()], pa.binary())


_READ_AS: dict[str, tuple[pa.DataType, ArrayFunction]] = {
    "float": (pa.float32(), _check_finite),
    "double": (pa.float64(), _check_finite),
    "date": (pa.string(), parse_dates),
    "timestamp_ntz": (pa.string(), parse_timestamps),
    "binary": (pa.string(), _decode_base64_text),
}


# --- which records are probably bad ---------------------------------------------------------------------------------------


_31 = r"(?:0[1-9]|[12][0-9]|3[01])"
_DAY = rf"[0-9]{{4}}-(?:(?:0[13578]|1[02])-{_31}|(?:0[469]|11)-(?!31){_31}|02-(?!3){_31})"
_CLOCK = r"[T ](?:[01][0-9]|2[0-3])(?::[0-5][0-9](?::[0-5][0-9](?:\.[0-9]{1,6}0*)?)?)?"
_ZONE = r"(?:Z|[-+](?:[01][0-9]|2[0-3])(?::?[0-5][0-9])?)"
_NOTATIONS = {
    "date": rf'"{_DAY}"',
    "timestamp": rf'"{_DAY}(?:{_CLOCK}{_ZONE}?)?"|-?[0-9]{{1,12}}',
    "timestamp_ntz": rf'"{_DAY}(?:{_CLOCK})?"',
    "float": r'-?[0-9.]+(?:[eE][-+]?[0-9]+)?|-?Infinity|NaN|"(?:-?Infinity|NaN)"',
    "double": r'-?[0-9.]+(?:[eE][-+]?[0-9]+)?|-?Infinity|NaN|"(?:-?Infinity|NaN)"',
    "binary": r'"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"',
}
"""The notations of a type's values, as regular expressions."""


def make_suspect_finders(columns: Sequence[Column]) -> tuple[SuspectFinder, ...]:
    """Return the suspect finders for records of these columns, the faster one first.

    The first has msgspec read each record as the types of the columns, which is faster than Arrow. It refuses some notations
    that are valid here but not in RFC 3339, and it accepts decimals with too many digits. The second compares such values with
    their valid notations.
    """
    return _LazyFinder(columns, _find_by_type), _LazyFinder(columns, _find_by_notation)


class _LazyFinder:
    """A suspect finder that is built when it is first used; without msgspec, which Airflow requires, it finds nothing.

    :param columns: the columns of the records.
    :param make: builds it.
    """

    def __init__(self, columns: Sequence[Column], make: Callable[[Sequence[Column], ModuleType], SuspectFinder]) -> None:
        self._columns, self._make = columns, make

    def __call__(self, records: Sequence[bytes]) -> Sequence[int]:
        return self._suspects(records)

    @cached_property
    def _suspects(self) -> SuspectFinder:
        try:
            import msgspec
        except ImportError:
            return lambda records: []
        try:
            return self._make(self._columns, msgspec)
        except (TypeError, ValueError):  # names that a Struct cannot have
            return _find_by_type((), msgspec)


def _find_by_type(columns: Sequence[Column], msgspec: ModuleType) -> SuspectFinder:
    parse = msgspec.json.Decoder(_make_struct_type(columns, msgspec, _find_checked_type)).decode
    refused = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

    def find_suspects(records: Sequence[bytes]) -> list[int]:
        found: list[int] = []
        left = iter(records)
        while length_hint(left):
            try:
                # One call for all records: a line of Python per record would take a fifth of the time.
                deque(map(parse, left), maxlen=0)
            except refused:
                found.append(len(records) - length_hint(left) - 1)
        return found

    return find_suspects


def _find_by_notation(columns: Sequence[Column], msgspec: ModuleType) -> SuspectFinder:
    parse = msgspec.json.Decoder(_make_struct_type(columns, msgspec, _find_raw_type)).decode
    refused = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
    checks = [(attrgetter(f"f{at}"), re.compile(form).fullmatch) for at, form in _list_notations(columns)]

    def find_suspects(records: Sequence[bytes]) -> list[int]:
        found, rows, places = [], [], []
        for at, value in enumerate(records):
            try:
                rows.append(parse(value))
                places.append(at)
            except refused:
                found.append(at)
        for value_of, fits in checks:
            found += [at for at, value in zip(places, map(value_of, rows), strict=True) if value and not fits(value)]
        return sorted(set(found))

    return find_suspects


def _make_struct_type(columns: Sequence[Column], msgspec: ModuleType, type_of: Callable[[DataType, Any], Any]) -> Any:
    """Return the msgspec class for one record."""
    fields = []
    for at, column in enumerate(columns):
        kind = type_of(column.type, msgspec)
        # Raw accepts nulls, and is not allowed in unions.
        nullable = kind if kind is msgspec.Raw else kind | None
        fields.append((f"f{at}", nullable, None) if column.nullable else (f"f{at}", kind))
    names = {f"f{at}": column.name for at, column in enumerate(columns)}
    return msgspec.defstruct("Record", fields, rename=names, kw_only=True, gc=False)


def _find_checked_type(data_type: DataType, msgspec: ModuleType) -> Any:
    """Return the type as which the first finder reads a value."""
    if isinstance(data_type, LogicalType | Map):
        return msgspec.Raw
    if isinstance(data_type, Struct):
        return _make_struct_type(data_type.fields, msgspec, _find_checked_type)
    if isinstance(data_type, Array):
        element = _find_checked_type(data_type.element, msgspec)
        nullable = element if element is msgspec.Raw or not data_type.contains_null else element | None
        return GenericAlias(list, (nullable,))
    if isinstance(data_type, Text):
        most = msgspec.Meta(max_length=data_type.max_length)
        return Annotated[str, most] | int | float | bool | list | dict
    if isinstance(data_type, Decimal):
        return decimal.Decimal
    if data_type.name in INTEGER_BITS:
        limit = 1 << INTEGER_BITS[data_type.name] - 1
        return Annotated[int, msgspec.Meta(ge=-limit, le=limit - 1)]
    return {
        "boolean": bool,
        "float": float | Literal["NaN", "Infinity", "-Infinity"],
        "double": float | Literal["NaN", "Infinity", "-Infinity"],
        "date": datetime.date,
        "timestamp": datetime.datetime | int,
        "timestamp_ntz": Annotated[datetime.datetime, msgspec.Meta(tz=False)],
        "binary": str,
    }[data_type.name]


def _find_raw_type(data_type: DataType, msgspec: ModuleType) -> Any:
    """Return the type as which the second finder reads a value."""
    return (
        msgspec.Raw
        if _find_notation(data_type) or not isinstance(data_type, Primitive | Text)
        else _find_checked_type(data_type, msgspec)
    )


def _list_notations(columns: Sequence[Column]) -> Iterator[tuple[int, bytes]]:
    """Yield position and notation of each column whose values the second finder compares as text."""
    for at, column in enumerate(columns):
        if form := _find_notation(column.type):
            yield at, f"{form}|null".encode() if column.nullable else form.encode()


def _find_notation(data_type: DataType) -> str | None:
    if isinstance(data_type, Decimal):
        before, after = data_type.precision - data_type.scale, data_type.scale
        digits = rf"0*[0-9]{{0,{before}}}(?:\.[0-9]{{0,{after}}}0*)?|[0-9.]+[eE][-+]?[0-9]+"
        return rf'"[-+]?(?:{digits})"|-?(?:{digits})'
    return _NOTATIONS.get(data_type.name) if isinstance(data_type, Primitive) and not isinstance(data_type, LogicalType) else None
