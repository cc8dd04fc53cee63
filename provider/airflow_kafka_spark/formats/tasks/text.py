"""Arrow columns written as text, by Arrow's vectorised functions: JSON, CSV and single texts.

Two groups of callers share the writers:

* :class:`JsonEncoder`, :class:`CsvEncoder` and :class:`TextEncoder` write Kafka values from columns whose :data:`.Kind` is known.
  Their bytes are exactly those of Spark's ``to_json``, ``to_csv`` and ``CAST``; the tests compare both.
* :func:`format_json_lines`, :func:`format_csv_lines`, :func:`format_json_values` and :func:`format_rows_as_json` write columns of
  any Arrow type to files, JSON columns of a table and dead letters.

They differ in these points, because the first group has to write the bytes that Spark writes, and the second group gets more
types:

========================  ================================================  ================================================
point                     columns of a kind                                 columns of any type
========================  ================================================  ================================================
null in JSON              ``null``                                          left out (files), ``null`` (dead letters)
decimals                  texts of the database; more than 6 digits of      plain notation with all digits of the scale
                          scale: with Java's exponent
years after 9999          with a ``+``, as Java has it                      without
control characters        ``\\u001F``, as Jackson has it                    ``\\u001f``, as Python has it
floats                    as Java 19 and later has them: ``1.0E20``           with Python's exponent: ``1e+20``
nested types              JSON only                                         supported
========================  ================================================  ================================================
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.formats.base import Encoder, Kind
from airflow_kafka_spark.formats.tasks.kernels import if_else
from airflow_kafka_spark.formats.text_values import CsvDialect
from airflow_kafka_spark.windows.times import MICROSECONDS_OF_DAY

_FIRST, _LAST = -719_162, 2_932_896
"""First and last day, since 1970, of the years 1 to 9999. Arrow writes these as Spark does."""

_SHORT = {0x22: '\\"', 0x5C: "\\\\", 0x08: "\\b", 0x09: "\\t", 0x0A: "\\n", 0x0C: "\\f", 0x0D: "\\r"}
_JACKSON = {**{code: f"\\u{code:04X}" for code in range(0x20)}, **_SHORT}
_PYTHON = {**{code: f"\\u{code:04x}" for code in range(0x20)}, **_SHORT}
_UNTOUCHED = bytes(code for code in range(256) if code not in _JACKSON)

_NON_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


class ValueTexts(NamedTuple):
    """The texts of a column's values.

    :param text: one text per value, null where the value is null.
    :param zone: a constant that follows each text: ``Z`` or nothing.
    :param quoted: True if JSON puts the value in quotes.
    """

    text: pa.Array
    zone: str = ""
    quoted: bool = False

    @property
    def around(self) -> tuple[str, str]:
        """The constants before and after each text in JSON."""
        quote = '"' if self.quoted else ""
        return quote, self.zone + quote

    def as_json(self) -> pa.Array:
        """Return the values as JSON; null stays null."""
        before, after = self.around
        return _join(before, self.text, after) if before or after else self.text


# --- columns of a known kind, as Spark writes them -------------------------------------------------------------------------


@dataclass(frozen=True)
class JsonEncoder(Encoder):
    """Encodes one object per row, as :meth:`~airflow_kafka_spark.formats.Json.encode` writes it.

    :param columns: names and kinds of the columns, in order.
    """

    columns: tuple[tuple[str, Kind], ...]

    def encode(self, rows: Mapping[str, pa.Array]) -> pa.Array:
        """Return the rows' objects."""
        members = [(_quote(name, _JACKSON), _format_values(rows[name], kind)) for name, kind in self.columns]
        return join_objects(members, rows=0, nulls=True).cast(pa.binary())


@dataclass(frozen=True)
class CsvEncoder(Encoder):
    """Encodes one line per row, as :meth:`~airflow_kafka_spark.formats.Csv.encode` writes it.

    :param columns: names and kinds of the columns, in order.
    :param dialect: how the fields are written.
    """

    columns: tuple[tuple[str, Kind], ...]
    dialect: CsvDialect

    def encode(self, rows: Mapping[str, pa.Array]) -> pa.Array:
        """Return the rows' lines."""
        fields = [
            _quote_field(rows[name].cast(pa.string()), self.dialect)
            if kind == "text"
            else _format_bare_field(_format_values(rows[name], kind), self.dialect, may_be_empty=kind == "binary")
            for name, kind in self.columns
        ]
        return _join_records(fields, self.dialect).cast(pa.binary())


@dataclass(frozen=True)
class TextEncoder(Encoder):
    """Encodes one column as its text, as :meth:`~airflow_kafka_spark.formats.String.encode` writes it in UTF-8, or as its bytes.

    :param column: the column's name.
    :param kind: the kind of the column.
    """

    column: str
    kind: Kind

    def encode(self, rows: Mapping[str, pa.Array]) -> pa.Array:
        """Return the rows' texts; null where the column is null."""
        column = rows[self.column]
        if self.kind in ("zoned", "local"):
            # SQL casts timestamps to text without trailing zeros of the second.
            return pc.replace_substring_regex(format_timestamps(column, " "), r"\.?0+$", "").cast(pa.binary())
        if self.kind == "date":
            return _format_dates(column).cast(pa.binary())
        return column if self.kind == "binary" else column.cast(pa.string()).cast(pa.binary())


def _format_values(column: pa.Array, kind: Kind) -> ValueTexts:
    if kind == "other":
        return _format_texts(column, _SPARK)
    if kind == "text":
        return ValueTexts(_escape(column, _JACKSON), quoted=True)
    if kind == "fine decimal":
        return ValueTexts(_add_exponents(column))
    if kind in ("zoned", "local"):
        return ValueTexts(format_timestamps(column, "T"), zone="Z" if kind == "zoned" else "", quoted=True)
    if kind == "date":
        return ValueTexts(_format_dates(column), quoted=True)
    if kind == "binary":
        return ValueTexts(_encode_base64(column), quoted=True)
    return ValueTexts(column.cast(pa.string()))


# --- columns of any type ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Style:
    """The points in which JSON texts of columns of any type differ.

    :param escapes: the escape of each character that needs one.
    :param nulls: True if fields that are null are written, False if they are left out.
    :param shown: True if the text is for people: see :func:`format_rows_as_json`.
    :param sign: the text before a year after 9999.
    :param as_java: True if floats, and decimals with more than 6 digits of scale, have Java's exponents.
    """

    escapes: Mapping[int, str]
    nulls: bool = False
    shown: bool = False
    sign: str = ""
    as_java: bool = False


_FILES, _SHOWN = _Style(_PYTHON), _Style(_PYTHON, nulls=True, shown=True)
_SPARK = _Style(_JACKSON, nulls=True, sign="+", as_java=True)


def format_json_lines(batch: pa.RecordBatch) -> pa.Buffer:
    """Return one JSON object per row, as Spark's writer has it: nulls are left out, decimals are numbers, timestamps are ISO 8601
    in UTC (with microseconds, which Spark's writer drops), binary is base64, NaN and the infinities are strings.
    """
    members = [(_quote(n, _PYTHON), _format_texts(c)) for n, c in zip(batch.schema.names, batch.columns, strict=True)]
    return concatenate_texts(join_objects(members, batch.num_rows, end="}\n"))


def format_json_values(column: pa.Array) -> pa.Array:
    """Return each value as JSON, as :func:`format_json_lines` writes it; null stays null."""
    return _format_texts(column).as_json()


def format_strings(column: pa.Array) -> ValueTexts:
    """Return texts as strings of JSON, as Python writes them."""
    return ValueTexts(_escape(column, _PYTHON), quoted=True)


def format_csv_lines(batch: pa.RecordBatch, delimiter: str = ",") -> pa.Buffer:
    """Return one line per row: texts always in quotes, quotes doubled, null as an empty field, everything else as in JSON.

    :raises pyarrow.ArrowNotImplementedError: a column is binary or nested.
    """
    dialect = CsvDialect(delimiter)
    fields = []
    for column in map(_unwrap_values, batch.columns):
        if pa.types.is_string(column.type) or pa.types.is_null(column.type):
            fields.append(_quote_field(column.cast(pa.string()), dialect))
        else:
            texts = None if pa.types.is_binary(column.type) else _format_scalars(column, json=False)
            fields.append(_format_bare_field(texts or _refuse(column), dialect))
    return concatenate_texts(_join_records(fields, dialect, end="\n"))


def format_csv_header(names: Iterable[str], delimiter: str = ",") -> bytes:
    """Return the header line. Names are quoted only if they must be."""
    dialect = CsvDialect(delimiter)
    special = (delimiter, '"', "\n", "\r")
    cells = (dialect.quote_text(name) if any(s in name for s in special) else name for name in names)
    return (delimiter.join(cells) + "\n").encode()


def format_rows_as_json(columns: Sequence[tuple[str, pa.Array]]) -> list[bytes]:
    """Return one JSON object per row, for people. Never raises, also for rows that no format can write.

    The objects are those of :func:`format_json_lines`, with three differences: nulls are written, a text that is not UTF-8 gets
    replacement characters, and a value of a type without a form in JSON is shown as its text.

    :param columns: names and values, all of one length.
    """
    if not columns:
        return []
    members = [(_quote(name, _PYTHON), _format_texts(column, _SHOWN)) for name, column in columns]
    objects: list[bytes] = join_objects(members, len(columns[0][1]), nulls=True).cast(pa.binary()).to_pylist()
    return objects


def _format_texts(array: pa.Array, style: _Style = _FILES) -> ValueTexts:
    """Return the JSON texts of values of any type."""
    array = _unwrap_values(array)
    kind = array.type
    if pa.types.is_string(kind):
        return ValueTexts(_escape(_replace_invalid_utf8(array) if style.shown else array, style.escapes), quoted=True)
    if pa.types.is_struct(kind):
        members = [
            (_quote(kind.field(i).name, style.escapes), _format_texts(pc.struct_field(array, [i]), style))
            for i in range(kind.num_fields)
        ]
        return ValueTexts(if_else(pc.is_valid(array), join_objects(members, len(array), nulls=style.nulls), None))
    if pa.types.is_map(kind):
        items = pc.fill_null(_format_texts(array.items, style).as_json(), "null")
        return _join_nested(array, _join(_format_keys(array.keys, style), ":", items), "{", "}")
    if pa.types.is_list(kind):
        return _join_nested(array, pc.fill_null(_format_texts(array.values, style).as_json(), "null"), "[", "]")
    try:
        found = _format_scalars(array, json=True, style=style)
    except pa.ArrowInvalid:
        # A timestamp in seconds that does not fit into 64 bits of microseconds.
        if not style.shown:
            raise
        found = None
    if found is None and style.shown:
        texts = [str(scalar) if scalar.is_valid else None for scalar in array]
        return ValueTexts(_escape(pa.array(texts, pa.string()), _PYTHON), quoted=True)
    return found or _refuse(array)


def _format_scalars(array: pa.Array, json: bool, style: _Style = _FILES) -> ValueTexts | None:
    """Return the texts of values that are not nested; None for a type that has none.

    :param json: True if NaN and the infinities get the quotes that JSON needs.
    """
    kind = array.type
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind):
        return ValueTexts(array.cast(pa.string()))
    if pa.types.is_decimal(kind):
        texts = format_plain_decimals(array)
        return ValueTexts(_add_exponents(texts) if style.as_java else texts)
    if pa.types.is_floating(kind):
        return ValueTexts(_format_java_floats(array, '"') if style.as_java else _format_floats(array, '"' if json else ""))
    if pa.types.is_timestamp(kind):
        # Without its zone the value is in UTC already, and written thirty times as fast.
        text = format_timestamps(array.cast(pa.timestamp("us")), "T", sign=style.sign)
        return ValueTexts(text, zone="Z" if kind.tz else "", quoted=True)
    if pa.types.is_date(kind):
        return ValueTexts(_format_dates(array.cast(pa.date32()), sign=style.sign), quoted=True)
    if pa.types.is_time(kind):
        return ValueTexts(array.cast(pa.string()), quoted=True)
    if pa.types.is_binary(kind):
        return ValueTexts(_encode_base64(array), quoted=True)
    return None


def _refuse(array: pa.Array) -> ValueTexts:
    raise pa.ArrowNotImplementedError(f"{array.type} as text")


def _unwrap_values(array: pa.Array) -> pa.Array:
    """Return the values in a basic type, instead of dictionaries, views, and large or fixed-size variants."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _unwrap_values(array.dictionary_decode())
    if kind in (pa.large_string(), pa.string_view()):
        return array.cast(pa.string())
    if pa.types.is_fixed_size_binary(kind) or kind in (pa.large_binary(), pa.binary_view()):
        return array.cast(pa.binary())
    if pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind):
        return array.cast(pa.list_(kind.value_field))
    return array


def _replace_invalid_utf8(array: pa.Array) -> pa.Array:
    """Return texts with replacement characters where they are not UTF-8."""
    try:
        array.validate(full=True)
        return array
    except pa.ArrowInvalid:
        return map_values(array.cast(pa.binary()), lambda value: value.decode("utf-8", "replace"))


# --- rows -------------------------------------------------------------------------------------------------------------------


def join_objects(
    members: Sequence[tuple[str, ValueTexts]], rows: int, nulls: bool = False, start: str = "{", end: str = "}"
) -> pa.Array:
    """Return one JSON object per row.

    :param members: names, in quotes, and values.
    :param rows: the number of rows, for objects without members.
    :param nulls: True if members that are null are written, False if they are left out.
    :param start: the text up to the brace that opens the object; more than the brace only with ``nulls``.
    :param end: the text from the brace that closes it on.
    """
    if not members:
        return pa.array([start + end] * rows, pa.string())
    # Where the first member may be left out, each member begins with a comma, and the first comma is replaced.
    comma_first = not nulls and members[0][1].text.null_count > 0
    parts: list[str | pa.Array] = []
    separator = "," if comma_first else start
    for name, value in members:
        before, after = value.around
        if not value.text.null_count:
            parts += [f"{separator}{name}:{before}", value.text, after]
        elif nulls:
            parts += [f"{separator}{name}:", pc.fill_null(value.as_json(), "null")]
        else:
            parts.append(pc.fill_null(_join(f"{separator}{name}:{before}", value.text, after), ""))
        separator = ","
    if comma_first:
        return _join(pc.binary_replace_slice(_join(*_merge_constants(parts)), 0, 1, "{"), end)
    return _join(*_merge_constants([*parts, end]))


def _join_nested(array: pa.ListArray, texts: pa.Array, start: str, end: str) -> ValueTexts:
    """Return the texts of the entries of lists or maps, joined per list."""
    lists = pa.ListArray.from_arrays(array.offsets, texts)
    return ValueTexts(if_else(pc.is_valid(array), _join(start, pc.binary_join(lists, ","), end), None))


def _format_keys(array: pa.Array, style: _Style) -> pa.Array:
    """Return the keys of maps as JSON strings; keys may be of any type."""
    texts = _format_texts(array, style).as_json()
    return if_else(pc.starts_with(texts, '"'), texts, _join('"', texts, '"'))


def _join_records(fields: Sequence[list[str | pa.Array]], dialect: CsvDialect, end: str = "") -> pa.Array:
    """Return one CSV record per row."""
    parts = [part for n, field in enumerate(fields) for part in ([dialect.delimiter, *field] if n else field)]
    return _join(*_merge_constants([*parts, end] if end else parts))


def _quote_field(text: pa.Array, dialect: CsvDialect) -> list[str | pa.Array]:
    quote, escape = dialect.quote, dialect.escape
    if not dialect.doubled:
        text = pc.replace_substring(text, escape, escape * 2)
    text = pc.replace_substring(text, quote, escape + quote)
    return [pc.fill_null(_join(quote, text, quote), dialect.null)] if text.null_count else [quote, text, quote]


def _format_bare_field(value: ValueTexts, dialect: CsvDialect, may_be_empty: bool = False) -> list[str | pa.Array]:
    text = _join(value.text, value.zone) if value.zone else value.text
    # A value that reads like a null is quoted.
    if (dialect.null or may_be_empty) and pc.any(like_null := pc.equal(text, dialect.null)).as_py():
        text = if_else(like_null, dialect.quote_text(dialect.null), text)
    return [pc.fill_null(text, dialect.null) if text.null_count else text]


def _merge_constants(parts: Sequence[str | pa.Array]) -> list[str | pa.Array]:
    """Return the parts with consecutive constants merged, since each part costs a step for every row."""
    fewer: list[str | pa.Array] = []
    for part in parts:
        if isinstance(part, str) and fewer and isinstance(fewer[-1], str):
            fewer[-1] += part
        else:
            fewer.append(part)
    return fewer


def _join(*parts: pa.Array | str) -> pa.Array:
    """Concatenate strings; null where one of them is null."""
    return pc.binary_join_element_wise(*parts, "")


def concatenate_texts(texts: pa.Array) -> pa.Buffer:
    """Return the bytes of all texts of a column, one after the other, without a copy. They include the bytes of null values."""
    offsets, data = texts.buffers()[1:]
    if data is None or not len(texts):
        return pa.py_buffer(b"")
    places = memoryview(offsets).cast("i")
    first, last = places[texts.offset], places[texts.offset + len(texts)]
    return data.slice(first, last - first)


# --- values -----------------------------------------------------------------------------------------------------------------


def map_values(column: pa.Array, convert: Callable[[Any], str]) -> pa.Array:
    """Return the texts of a column's values, converted one by one in Python."""
    return pa.array([None if value is None else convert(value) for value in column.to_pylist()], pa.string())


def _quote(text: str, escapes: Mapping[int, str]) -> str:
    return '"' + "".join(escapes.get(ord(character), character) for character in text) + '"'


def _escape(column: pa.Array, escapes: Mapping[int, str]) -> pa.Array:
    """Return the inside of JSON strings, with only the escapes that JSON requires.

    :param escapes: the escape of each character that needs one.
    """
    found = concatenate_texts(column).to_pybytes().translate(None, _UNTOUCHED)
    if not found:
        return column
    # Backslashes first, since the other escapes add some.
    for code in sorted(set(found), key=lambda code: (code != 0x5C, code)):
        column = pc.replace_substring(column, chr(code), escapes[code])
    return column


def _encode_base64(column: pa.Array) -> pa.Array:
    return map_values(column, lambda value: binascii.b2a_base64(value, newline=False).decode("ascii"))


def format_plain_decimals(decimals: pa.Array) -> pa.Array:
    """Return decimals as texts in plain notation, with all digits of their scale."""
    return _remove_exponents(decimals.cast(pa.string()), decimals)


def _remove_exponents(texts: pa.Array, decimals: pa.Array) -> pa.Array:
    """Return texts of decimals in plain notation. Arrow writes 0E-10 for a zero of scale 10, which not every CSV reader takes."""
    tiny = pc.fill_null(pc.match_substring(texts, "E"), False)
    if not pc.any(tiny).as_py():
        return texts
    return pc.replace_with_mask(texts, tiny, map_values(decimals.filter(tiny), lambda value: format(value, "f")))


def _add_exponents(texts: pa.Array) -> pa.Array:
    """Return texts of decimals with more than 6 digits after the point. Java writes the smallest of them with an exponent, as
    Python does.
    """
    if not pc.any(pc.match_substring(texts, "0.000000")).as_py():
        return texts
    return map_values(texts, lambda text: str(Decimal(text)))


def _format_floats(array: pa.Array, quote: str) -> pa.Array:
    """Return numbers; NaN and the infinities as Spark names them.

    :param quote: the text around NaN and the infinities.
    """
    texts = (array.cast(pa.float32()) if pa.types.is_float16(array.type) else array).cast(pa.string())
    # 1 becomes 1.0, so that readers that infer types see a floating point column.
    whole = pc.invert(pc.match_substring_regex(texts, "[.en]"))
    texts = if_else(whole, _join(texts, ".0"), texts)
    if pc.all(pc.is_finite(array)).as_py() is False:
        for arrow, spark in _NON_FINITE.items():
            texts = if_else(pc.equal(texts, arrow), f"{quote}{spark}{quote}", texts)
    return texts


def _format_java_floats(array: pa.Array, quote: str) -> pa.Array:
    """Return numbers as Java 19 and later has them: the fewest digits that identify the value, with an exponent below 0.001 and
    from 10 million on. Earlier versions of Java write other digits of the same number for a few values.

    :param quote: the text around NaN and the infinities.
    """
    texts, size = _format_floats(array, quote), pc.abs(array)
    low, high = pa.scalar(1e-3, array.type), pa.scalar(1e7, array.type)
    exponent = pc.and_(pc.is_finite(array), pc.or_(pc.less(size, low), pc.greater_equal(size, high)))
    exponent = pc.fill_null(pc.and_(exponent, pc.not_equal(size, pa.scalar(0, array.type))), False)
    if not pc.any(exponent).as_py():
        return texts
    shortest = texts.filter(exponent)
    return pc.replace_with_mask(texts, exponent, map_values(shortest, _add_java_exponent))


def _add_java_exponent(text: str) -> str:
    sign, digits, exponent = Decimal(text).as_tuple()
    assert isinstance(exponent, int)
    shown = "".join(map(str, digits)).rstrip("0") or "0"
    at = exponent + len(digits) - 1
    return f"{'-' if sign else ''}{shown[0]}.{shown[1:] or '0'}E{at}"


def _format_dates(column: pa.Array, sign: str = "+") -> pa.Array:
    """Return dates as ``yyyy-MM-dd``.

    :param sign: the text before a year after 9999.
    """
    plain = column.cast(pa.int32())
    if _is_within(plain, _FIRST, _LAST):
        return column.cast(pa.string())
    return _format_far(plain.cast(pa.int64()), "D", sign)


def format_timestamps(column: pa.Array, between: str, sign: str = "+") -> pa.Array:
    """Return timestamps to the microsecond, in UTC if they have a zone.

    :param column: microseconds since 1970.
    :param between: the separator of date and time of day.
    :param sign: the text before a year after 9999.
    """
    plain = column.cast(pa.int64())
    if not _is_within(plain, _FIRST * MICROSECONDS_OF_DAY, (_LAST + 1) * MICROSECONDS_OF_DAY - 1):
        return pc.replace_substring(_format_far(plain, "us", sign), "T", between)
    text = plain.cast(pa.timestamp("us")).cast(pa.string())
    return pc.binary_replace_slice(text, 10, 11, between) if between != " " else text


def _is_within(column: pa.Array, first: int, last: int) -> bool:
    found = pc.min_max(column).as_py()
    return found["min"] is None or (found["min"] >= first and found["max"] <= last)


def _format_far(column: pa.Array, unit: str, sign: str) -> pa.Array:
    """Return dates or timestamps outside of the years 1 to 9999."""
    texts = np.datetime_as_string(np.asarray(column.fill_null(0)).view(f"datetime64[{unit}]")).tolist()
    signed = [text if text[0] == "-" or text.index("-") == 4 else f"{sign}{text}" for text in texts]
    return pa.array(signed, pa.string(), mask=np.asarray(column.is_null()))
