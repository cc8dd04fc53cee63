"""Arrow batches to lines of text, by Arrow's own vectorised functions: JSON as Spark's writer has it, and CSV (RFC 4180)."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

Encode = Callable[[pa.Array], pa.Array]

_TO_ESCAPE = r'[\x00-\x1f"\\]'
_NON_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def json_lines(batch: pa.RecordBatch) -> pa.Buffer:
    """One object per row, as Spark's JSON writer has it: nulls are left out, decimals are numbers, instants are ISO 8601 in UTC
    (with microseconds, where Spark's writer drops them), binary is base64, NaN and the infinities are texts."""
    return _bytes(_objects(batch.schema.names, batch.columns, batch.num_rows, end="}\n"))


def csv_lines(batch: pa.RecordBatch, delimiter: str = ",") -> pa.Buffer:
    """One line per row: text always in quotes, a quote doubled, null as nothing at all, everything else as in JSON."""
    cells = [_quoted_csv(c) if _is_text(c.type) else csv_text(c) for c in map(_plain, batch.columns)]
    lines = pc.binary_join_element_wise(*(pc.fill_null(c, "") for c in cells), pa.scalar(delimiter))
    return _bytes(_join(lines, "\n"))


def csv_header(names: Iterable[str], delimiter: str = ",") -> bytes:
    """The header line. Names are quoted only where they must be: Spark reads them either way, people prefer them bare."""
    special = (delimiter, '"', "\n", "\r")
    cells = ('"' + n.replace('"', '""') + '"' if any(s in n for s in special) else n for n in names)
    return (delimiter.join(cells) + "\n").encode()


def _bytes(lines: pa.Array) -> pa.Buffer:
    """The bytes of all strings of an array without nulls, one after the other; not copied."""
    if not len(lines):
        return pa.py_buffer(b"")
    width = 8 if pa.types.is_large_string(lines.type) else 4
    offsets = memoryview(lines.buffers()[1]).cast("q" if width == 8 else "i")
    first, last = offsets[lines.offset], offsets[lines.offset + len(lines)]
    return lines.buffers()[2].slice(first, last - first) if last > first else pa.py_buffer(b"")


def _join(*parts: pa.Array | str) -> pa.Array:
    """Strings side by side; null where one of them is."""
    return pc.binary_join_element_wise(*parts, "")


# --- scalars --------------------------------------------------------------------------------------------------------


def _plain(array: pa.Array) -> pa.Array:
    """The same values in the plainest type: no dictionaries, views or large and fixed variants."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _plain(array.dictionary_decode())
    if kind in (pa.large_string(), pa.string_view()):
        return array.cast(pa.string())
    if pa.types.is_fixed_size_binary(kind) or kind in (pa.large_binary(), pa.binary_view()):
        return array.cast(pa.binary())
    if pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind):
        return array.cast(pa.list_(kind.value_field))
    return array


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_null(kind)


def _strings(array: pa.Array) -> pa.Array:
    return array.cast(pa.string())


def _decimals(array: pa.Array) -> pa.Array:
    texts = _strings(array)
    # Arrow writes 0E-10 for a zero of scale 10. A number all the same, but not every CSV reader's decimal.
    tiny = pc.fill_null(pc.match_substring(texts, "E"), False)
    if not pc.any(tiny).as_py():
        return texts
    return pc.replace_with_mask(texts, tiny, pa.array([format(d, "f") for d in array.filter(tiny).to_pylist()], pa.string()))


def _floats(array: pa.Array, non_finite: str = '"{}"') -> pa.Array:
    texts = _strings(array.cast(pa.float32()) if pa.types.is_float16(array.type) else array)
    # 1 becomes 1.0, so that whoever guesses types from values sees a floating point column.
    whole = pc.invert(pc.match_substring_regex(texts, "[.en]"))
    texts = pc.if_else(whole, _join(texts, ".0"), texts)
    if pc.all(pc.is_finite(array)).as_py() is False:
        for arrow, spark in _NON_FINITE.items():
            texts = pc.if_else(pc.equal(texts, arrow), non_finite.format(spark), texts)
    return texts


def _instants(array: pa.Array) -> pa.Array:
    # Without its zone a value is in UTC already, and thirty times as fast to write.
    texts = pc.replace_substring(_strings(array.cast(pa.timestamp("us"))), " ", "T", max_replacements=1)
    return _join(texts, "Z") if array.type.tz else texts


def _base64(array: pa.Array) -> pa.Array:
    return pa.array([None if v is None else base64.b64encode(v).decode("ascii") for v in array.to_pylist()], pa.string())


def _refuse(array: pa.Array) -> pa.Array:
    raise pa.ArrowNotImplementedError(f"{array.type} as text")


_SCALARS: tuple[tuple[Callable[[pa.DataType], bool], Encode], ...] = (
    (pa.types.is_boolean, _strings),
    (pa.types.is_integer, _strings),
    (pa.types.is_decimal, _decimals),
    (pa.types.is_floating, _floats),
    (pa.types.is_null, _strings),
)
_QUOTED: tuple[tuple[Callable[[pa.DataType], bool], Encode], ...] = (
    (pa.types.is_timestamp, _instants),
    (pa.types.is_date, lambda array: _strings(array.cast(pa.date32()))),
    (pa.types.is_time, _strings),
    (pa.types.is_binary, _base64),
)


def _encoder(kind: pa.DataType, known: Iterable[tuple[Callable[[pa.DataType], bool], Encode]]) -> Encode | None:
    return next((encode for holds, encode in known if holds(kind)), None)


def csv_text(array: pa.Array) -> pa.Array:
    """What is not text, as it stands in a CSV cell."""
    if pa.types.is_floating(array.type):
        return _floats(array, non_finite="{}")
    if pa.types.is_binary(array.type):
        return _refuse(array)
    return (_encoder(array.type, (*_SCALARS, *_QUOTED)) or _refuse)(array)


def _quoted_csv(array: pa.Array) -> pa.Array:
    return _join('"', pc.replace_substring(_strings(array), '"', '""'), '"')


# --- JSON -----------------------------------------------------------------------------------------------------------

_dumps = partial(json.dumps, ensure_ascii=False)


def json_values(array: pa.Array) -> pa.Array:
    """Each value as JSON text; null stays null."""
    array = _plain(array)
    kind = array.type
    if pa.types.is_string(kind):
        return _json_strings(array)
    if pa.types.is_struct(kind):
        fields = [kind.field(i).name for i in range(kind.num_fields)]
        objects = _objects(fields, [pc.struct_field(array, [i]) for i in range(kind.num_fields)], len(array))
        return pc.if_else(pc.is_valid(array), objects, None)
    if pa.types.is_map(kind):
        entries = _join(_json_keys(array.keys), ":", pc.fill_null(json_values(array.items), "null"))
        return _nested(array, entries, "{", "}")
    if pa.types.is_list(kind):
        return _nested(array, pc.fill_null(json_values(array.values), "null"), "[", "]")
    if (encode := _encoder(kind, _SCALARS)) is not None:
        return encode(array)
    return _join('"', (_encoder(kind, _QUOTED) or _refuse)(array), '"')


def _nested(array: pa.ListArray, texts: pa.Array, start: str, end: str) -> pa.Array:
    """The texts of a list's or a map's entries, joined per list."""
    lists = pa.ListArray.from_arrays(array.offsets, texts)
    return pc.if_else(pc.is_valid(array), _join(start, pc.binary_join(lists, ","), end), None)


def _objects(names: Iterable[str], columns: Iterable[pa.Array], rows: int, end: str = "}") -> pa.Array:
    """JSON objects of the given members; members that are null are left out."""
    members = [_join(f",{_dumps(name)}:", json_values(column)) for name, column in zip(names, columns, strict=True)]
    # Not null_handling="skip": that drops a row of nothing but nulls. Each member brings its comma, the first one gives way.
    joined = pc.binary_join_element_wise(*members, "", null_handling="replace", null_replacement="") if members else None
    return _join(pc.binary_replace_slice(joined if members else pa.array([""] * rows, pa.string()), 0, 1, "{"), end)


def _json_keys(array: pa.Array) -> pa.Array:
    """Keys of maps: text, whatever they are."""
    texts = json_values(array)
    return pc.if_else(pc.starts_with(texts, '"'), texts, _join('"', texts, '"'))


def _json_strings(array: pa.Array) -> pa.Array:
    quoted = _join('"', array, '"')
    special = pc.fill_null(pc.match_substring_regex(array, _TO_ESCAPE), False)
    if not pc.any(special).as_py():
        return quoted
    return pc.replace_with_mask(quoted, special, pa.array(map(_dumps, array.filter(special).to_pylist()), pa.string()))
