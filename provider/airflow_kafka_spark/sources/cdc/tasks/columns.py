"""The rows of a table as events, whole columns at a time.

A server sends the values of a column as texts. A :class:`~airflow_kafka_spark.sources.cdc.tasks.events.ColumnForm` describes how
Arrow's vectorised functions make JSON of them. Their results are equal to those of the column's converter of single values. That
converter gets columns without a form, and columns with an unusual value, such as ``infinity`` or a year of five digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.formats.tasks.kernels import if_else
from airflow_kafka_spark.formats.tasks.text import ValueTexts, format_strings, join_objects, map_values
from airflow_kafka_spark.sources.cdc.tasks.events import ColumnForm, EventFrame, TableWriter, ValueConverter, ValueRefused
from airflow_kafka_spark.sources.cdc.tasks.reader import BATCH_BYTES, SCHEMA

PIECE_ROWS, PIECE_BYTES = 32_768, 4 << 20
"""Rows, and bytes of them, that are converted at once."""


def format_events(table: TableWriter, frame: EventFrame, columns: Sequence[pa.Array]) -> Iterator[pa.RecordBatch]:
    """Yield the events of rows of a table, in batches of a few megabytes.

    :param frame: what is equal for all of them.
    :param columns: the values of each column as texts (binary), at least one row.
    :raises SourceRejected: a value cannot be written.
    """
    rows = len(columns[0])
    members = format_members(table, columns)
    size = frame.size + sum(column.nbytes for column in columns) // rows
    step = max(1, BATCH_BYTES // size)
    for start in range(0, rows, step):
        part = [(name, texts._replace(text=texts.text.slice(start, step))) for name, texts in members]
        count = min(step, rows - start)
        values = frame_objects(frame.value, part, count)
        keys = frame_objects(frame.key, [part[at] for at in table.key_indexes], count) if table.has_key else None
        yield pa.RecordBatch.from_arrays(
            [
                pa.repeat(pa.scalar(table.topic, pa.string()), count),
                pa.nulls(count, pa.binary()) if keys is None else keys.cast(pa.binary()),
                values.cast(pa.binary()),
                pa.repeat(pa.scalar(frame.timestamp, pa.int64()), count),
            ],
            schema=SCHEMA,
        )


def format_members(table: TableWriter, columns: Sequence[pa.Array]) -> list[tuple[str, ValueTexts]]:
    """Return the names of a table's columns, and their values.

    :param columns: the values of each column as texts (binary).
    :raises SourceRejected: a value cannot be written.
    """
    return [(name, _format_member(table, at, columns[at])) for at, name in enumerate(table.quoted_names)]


def frame_objects(frame: tuple[str, str], members: Sequence[tuple[str, ValueTexts]], rows: int) -> pa.Array:
    """Return the members of one object of JSON per row, between two texts, which have the braces."""
    before, after = frame
    return join_objects(members, rows, nulls=True, start=before, end=after)


def take_texts(texts: Sequence[str], which: np.ndarray) -> pa.Array | str:
    """Return one text per index; a single one if all indexes are equal. There is at least one."""
    return texts[which[0]] if (which == which[0]).all() else pa.array(texts, pa.string()).take(pa.array(which))


def put_positions(sources: Sequence[Sequence[str]], which: np.ndarray, positions: pa.Array) -> list[pa.Array | str]:
    """Return the parts of the texts that name the source of each event, to be joined: texts, and the positions between them.

    :param sources: the texts around the position, per transaction or event of the log.
    :param which: of each event, the index there.
    :param positions: of each event, its position as text.
    """
    parts: list[pa.Array | str] = []
    for texts in zip(*sources, strict=True):
        parts += [*([positions] if parts else []), take_texts(texts, which)]
    return parts


def take_ranges(data: bytes | bytearray | np.ndarray, begins: np.ndarray, ends: np.ndarray, nulls: np.ndarray) -> pa.Array:
    """Return some ranges of bytes, in their order (binary).

    :param begins: the index of the first byte of each range. No range begins before the end of the one before it.
    :param ends: the index after its last byte.
    :param nulls: True for a null in its place.
    """
    offsets = np.stack([begins, ends], axis=1).astype(np.int32).reshape(-1)
    count = len(offsets) - 1
    # An array of the ranges and of the bytes between them.
    both = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    found = both.take(pa.array(np.arange(0, count, 2)))
    return if_else(pa.array(~nulls), found, pa.scalar(None, pa.binary())) if nulls.any() else found


def _format_member(table: TableWriter, at: int, column: pa.Array) -> ValueTexts:
    """Return the values of a column.

    :raises SourceRejected: one of them cannot be written.
    """
    form, convert = table.get_conversion(at)
    try:
        return format_column(column, form, convert)
    except (ValueRefused, UnicodeDecodeError) as error:
        raise table.make_refusal(at, error) from None


def format_column(column: pa.Array, form: ColumnForm | None, convert: ValueConverter) -> ValueTexts:
    """Return the values of a column as JSON; null where they are null.

    :param column: their texts (binary).
    :param form: how they become JSON; None if only ``convert`` knows it.
    :param convert: returns the JSON of one text.
    :raises ValueRefused: a value cannot be written.
    """
    if form is not None:
        # Arrow refuses a text that is not written as it expects.
        with suppress(pa.ArrowInvalid):
            texts = column.cast(pa.string())
            if form.kind == "double":
                return ValueTexts(_format_doubles(texts, form.parameter, convert))
            return _FORMATS[form.kind](texts, form.parameter)
    return ValueTexts(map_values(column, convert))


# --- numbers ------------------------------------------------------------------------------------------------------------


def _format_integers(texts: pa.Array, _: int) -> ValueTexts:
    return ValueTexts(texts.cast(pa.int64()).cast(pa.string()))


def _format_booleans(texts: pa.Array, _: int) -> ValueTexts:
    return ValueTexts(if_else(pc.equal(texts, "t"), "true", "false"))


_WHOLE = r"^-?(?:0|[1-9][0-9]*)$"
_PART = r"^-?(?:0\.0{0,3}[1-9](?:[0-9]*[1-9])?|[1-9][0-9]*\.[0-9]*[1-9])$"
"""Numbers that Python writes without an exponent, without zeros at their end."""


def _format_doubles(texts: pa.Array, digits: int, convert: ValueConverter) -> pa.Array:
    """Return numbers as Python writes them: with a point, and with an exponent if they are large or small.

    :param digits: texts that are not longer have the digits that Python writes for the number.
    """
    is_short = pc.less_equal(pc.binary_length(texts), digits)
    if not pc.any(is_short).as_py():
        return map_values(texts.cast(pa.binary()), convert)
    is_whole = pc.match_substring_regex(texts, _WHOLE)
    is_known = pc.and_(is_short, pc.or_(is_whole, pc.match_substring_regex(texts, _PART)))
    found = if_else(is_whole, _join(texts, ".0"), texts)
    others = pc.fill_null(pc.invert(is_known), False)
    if not pc.any(others).as_py():
        return found
    return pc.replace_with_mask(found, others, map_values(texts.filter(others).cast(pa.binary()), convert))


def _format_decimals(texts: pa.Array, scale: int) -> ValueTexts:
    if scale:
        point = pc.find_substring(texts, ".")
        expected = pc.subtract(pc.binary_length(texts), scale + 1)
        if pc.any(pc.or_(pc.not_equal(point, expected), pc.less(point, 1))).as_py():
            raise pa.ArrowInvalid(f"not all decimals have {scale} digits behind the point")
    return ValueTexts(encode_integers(_remove_points(texts).cast(pa.int64())), quoted=True)


def _format_variable_decimals(texts: pa.Array, _: int) -> ValueTexts:
    point = pc.find_substring(texts, ".")
    behind = pc.subtract(pc.subtract(pc.binary_length(texts), point), 1)
    scales = if_else(pc.less(point, 0), 0, behind).cast(pa.string())
    values = encode_integers(_remove_points(texts).cast(pa.int64()))
    return ValueTexts(_join('{"scale":', scales, ',"value":"', values, '"}'))


def _remove_points(texts: pa.Array) -> pa.Array:
    return pc.replace_substring(texts, ".", "", max_replacements=1)


_ALPHABET = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", np.uint8)
_BASE64 = np.stack([np.repeat(_ALPHABET, 64), np.tile(_ALPHABET, 64)], axis=1).view(np.uint16).reshape(-1)
"""The two characters of each number of 12 bits."""
_SIZES = np.array([1 << (8 * size - 1) for size in range(1, 8)], np.int64)
"""The first numbers that need 2, 3, ... 8 bytes."""


def encode_integers(numbers: pa.Array) -> pa.Array:
    """Return the base64 of the fewest bytes, big-endian and with a sign, that hold each number; null stays null.

    :param numbers: integers of 64 bits.
    """
    rows = len(numbers)
    found = np.asarray(numbers.fill_null(0))
    size = np.searchsorted(_SIZES, found ^ (found >> 63), side="right") + 1
    groups = -(-int(size.max(initial=1)) // 3)
    data = (found << (8 - size) * 8).view(np.uint64)
    pairs = np.empty((rows, groups * 2), np.uint16)
    for at in range(groups * 2):
        bits = 52 - 12 * at
        pairs[:, at] = _BASE64[(data >> np.uint64(bits) if bits > 0 else data << np.uint64(-bits)) & np.uint64(4095)]
    characters = pairs.view(np.uint8)
    places, lengths = np.arange(groups * 4), (size + 2) // 3 * 4
    characters[places >= (size + (size + 2) // 3)[:, None]] = ord("=")
    offsets = np.zeros(rows + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    text = pa.py_buffer(characters[places < lengths[:, None]])
    encoded = pa.StringArray.from_buffers(rows, pa.py_buffer(offsets), text)
    return if_else(numbers.is_valid(), encoded, None) if numbers.null_count else encoded


# --- dates and times ----------------------------------------------------------------------------------------------------


def _format_days(texts: pa.Array, _: int) -> ValueTexts:
    return ValueTexts(texts.cast(pa.date32()).cast(pa.int32()).cast(pa.string()))


def _format_instants(texts: pa.Array, unit: int) -> ValueTexts:
    micros = texts.cast(pa.timestamp("us")).cast(pa.int64())
    if unit == 1:
        return ValueTexts(micros.cast(pa.string()))
    # Arrow's division rounds to zero.
    whole = np.asarray(micros.fill_null(0)) // unit
    return ValueTexts(pa.array(whole, pa.int64(), mask=np.asarray(micros.is_null())).cast(pa.string()))


def _format_clocks(texts: pa.Array, unit: int) -> ValueTexts:
    return _format_instants(_join("1970-01-01 ", texts), unit)


_SECOND = len("2000-01-01 00:00:00")
"""Characters of a time up to its second."""


def _format_zoned(texts: pa.Array, digits: int) -> ValueTexts:
    is_usual = pc.and_(pc.ends_with(texts, "+00"), pc.equal(pc.utf8_slice_codeunits(texts, 4, 5), "-"))
    if pc.all(is_usual).as_py() is False:
        raise pa.ArrowInvalid("not all times have years of four digits, and are in UTC")
    shown = pc.binary_replace_slice(pc.utf8_slice_codeunits(texts, 0, -len("+00")), 10, 11, "T")
    if digits:
        if pc.min(pc.binary_length(shown)).as_py() == _SECOND:
            shown = if_else(pc.equal(pc.binary_length(shown), _SECOND), _join(shown, "."), shown)
        shown = pc.ascii_rpad(shown, _SECOND + 1 + digits, "0")
    return ValueTexts(shown, zone="Z", quoted=True)


def _format_utc(texts: pa.Array, digits: int) -> ValueTexts:
    if pc.any(pc.starts_with(texts, "0000-")).as_py():
        raise pa.ArrowInvalid("not all times have a year")
    return _format_zoned(_join(texts, "+00"), digits)


def _join(*parts: pa.Array | str) -> pa.Array:
    return pc.binary_join_element_wise(*parts, "")


_FORMATS: Mapping[str, Callable[[pa.Array, int], ValueTexts]] = {
    "number": lambda texts, _: ValueTexts(texts),
    "integer": _format_integers,
    "boolean": _format_booleans,
    "text": lambda texts, _: format_strings(texts),
    "quoted": lambda texts, _: ValueTexts(texts, quoted=True),
    "decimal": _format_decimals,
    "variable decimal": _format_variable_decimals,
    "days": _format_days,
    "instant": _format_instants,
    "zoned": _format_zoned,
    "utc": _format_utc,
    "clock": _format_clocks,
}
