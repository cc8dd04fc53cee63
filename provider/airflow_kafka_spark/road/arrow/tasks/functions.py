"""Functions of Spark's SQL, computed by Arrow. ``tests/transforms/test_arrow.py`` proves that their results are equal to Spark's.

Runs in Spark's tasks: imports neither Airflow nor pyspark. Each takes the type of its result, then its arguments. An argument may
be a scalar, which is the value of all rows. No function fails because of a value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

Value = Any
"""A ``pyarrow.Array``, or a ``pyarrow.Scalar`` with the value of all rows."""
Function = Callable[..., Value]


def is_null(_: pa.DataType, value: Value) -> Value:
    # A scalar is a condition for the whole batch.
    if isinstance(value, pa.Array) and value.null_count in (0, len(value)):
        return pa.scalar(bool(value.null_count))
    return pc.is_null(value)


def both(_: pa.DataType, left: Value, right: Value) -> Value:
    return pc.and_kleene(left, right)


def either(_: pa.DataType, left: Value, right: Value) -> Value:
    return pc.or_kleene(left, right)


def negated(_: pa.DataType, value: Value) -> Value:
    return pc.invert(value)


def _compared(compare: Callable[[Value, Value], Value], beside: Callable[[Value, Value], Value]) -> Function:
    """Compare floats as Spark does: NaN equals NaN, and is larger than every other number (SPARK-9079).

    :param beside: returns the rows for which the comparison is true in addition to Arrow's result, from whether each operand is
        NaN. Nulls stay null.
    """

    def function(_: pa.DataType, left: Value, right: Value) -> Value:
        found = compare(left, right)
        if pa.types.is_floating(left.type):
            found = pc.or_(found, pc.fill_null(beside(pc.is_nan(left), pc.is_nan(right)), False))
        return found

    return function


def _and_not(one: Value, other: Value) -> Value:
    return pc.and_kleene(one, pc.invert(other))


equal = _compared(pc.equal, pc.and_kleene)
less = _compared(pc.less, lambda left, right: _and_not(right, left))
less_or_equal = _compared(pc.less_equal, lambda left, right: right)
greater = _compared(pc.greater, lambda left, right: _and_not(left, right))
greater_or_equal = _compared(pc.greater_equal, lambda left, right: left)


def equal_or_both_null(kind: pa.DataType, left: Value, right: Value) -> Value:
    nulls = pc.and_(pc.is_null(left), pc.is_null(right))
    return pc.or_(nulls, pc.fill_null(equal(kind, left, right), False))


def one_of(kind: pa.DataType, value: Value, *among: Value) -> Value:
    if not pa.types.is_floating(value.type) and all(isinstance(other, pa.Scalar) and other.is_valid for other in among):
        known = pc.is_in(value, value_set=pa.array([other.as_py() for other in among], value.type))
        return pc.if_else(pc.is_null(value), pa.scalar(None, kind), known)
    found: Value = pa.scalar(False)
    for other in among:
        found = pc.or_kleene(found, equal(kind, value, other))
    return found


def concat(kind: pa.DataType, *values: Value) -> Value:
    """Concatenate texts; the result is null if one of them is null."""
    return pc.binary_join_element_wise(*values, pa.scalar("", kind), null_handling="emit_null")


def beginning(_: pa.DataType, text: Value, count: pa.Scalar) -> Value:
    """Return the first characters of a text."""
    return pc.utf8_slice_codeunits(text, 0, count.as_py())


# --- texts ----------------------------------------------------------------------------------------------------------------


def is_true_text(_: pa.DataType, text: Value) -> Value:
    """Return True if a text in lower case is ``true``. No other characters have these four letters as their lower case."""
    return pc.equal(pc.ascii_lower(text), pa.scalar("true", text.type))


def is_like(_: pa.DataType, text: Value, pattern: pa.Scalar) -> Value:
    return pc.match_like(text, pattern.as_py())


def matches(_: pa.DataType, text: Value, pattern: pa.Scalar) -> Value:
    """Return True if a regular expression is found in a text. Only for expressions that :func:`is_common` accepts."""
    return pc.match_substring_regex(text, pattern.as_py())


def contains(_: pa.DataType, text: Value, part: pa.Scalar) -> Value:
    return pc.match_substring(text, part.as_py())


def starts_with(_: pa.DataType, text: Value, part: pa.Scalar) -> Value:
    return pc.starts_with(text, part.as_py())


def ends_with(_: pa.DataType, text: Value, part: pa.Scalar) -> Value:
    return pc.ends_with(text, part.as_py())


_COMMON = re.compile(
    r"(?:[A-Za-z0-9_ ,:;=@#%&/<>~!'\"-]"  # letters without a special meaning
    r"|\\[Azdw.-]"
    r"|\[\^?[A-Za-z0-9_ .+-]+\]"
    r"|(?:\(\?:|[()|])"
    r"|(?<![*+?}(|])(?:[*+?]|\{[0-9]{1,3}\}))*"  # no quantifier after a quantifier, which has another meaning in Java
)


def is_common(pattern: str) -> bool:
    """Return True if a regular expression matches the same texts in Java and in RE2. Few do, because of line ends and Unicode."""
    return _COMMON.fullmatch(pattern) is not None


# --- numbers and moments ------------------------------------------------------------------------------------------------------


def is_nan(_: pa.DataType, value: Value) -> Value:
    # The result is not null for a null value.
    return pc.fill_null(pc.is_nan(value), False)


def magnitude(_: pa.DataType, value: Value) -> Value:
    return pc.abs(value)


def divided(_: pa.DataType, value: Value, by: pa.Scalar) -> Value:
    """Divide whole numbers, rounding towards 0."""
    return pc.divide(value, by)


def remainder(_: pa.DataType, value: Value, by: pa.Scalar) -> Value:
    """Return the remainder of a division that rounds towards 0. It has the sign of the dividend."""
    return pc.subtract(value, pc.multiply(pc.divide(value, by), by))


def multiplied(kind: pa.DataType, value: Value, by: pa.Scalar) -> Value:
    """Return ``try_multiply`` by a positive whole number: null if the result does not fit."""
    limit = (2 ** _LIMITS[kind] - 1) // by.as_py()
    fits = pc.and_(pc.greater_equal(value, pa.scalar(-limit, kind)), pc.less_equal(value, pa.scalar(limit, kind)))
    return pc.multiply(pc.if_else(fits, value, pa.scalar(None, kind)), by)


def number_of(kind: pa.DataType, moment: Value) -> Value:
    """Return the days of a date, or the microseconds of a timestamp, since 1970."""
    return pc.cast(moment, kind)


_MICROS = pa.scalar(1000, pa.int64())


def milliseconds_of(_: pa.DataType, moment: Value) -> Value:
    """Return milliseconds since 1970, rounded down, before 1970 as well."""
    micros = pc.cast(moment, pa.int64())
    cut = pc.divide(micros, _MICROS)
    below = pc.less(micros, pc.multiply(cut, _MICROS))
    return pc.if_else(below, pc.subtract(cut, pa.scalar(1, pa.int64())), cut)


def moment_of(kind: pa.DataType, micros: Value) -> Value:
    return pc.cast(pc.cast(micros, pa.int64()), kind)


def moment_of_milliseconds(kind: pa.DataType, millis: Value) -> Value:
    """Return timestamps of numbers that are known to be in range. Results of an overflow are not used by the caller."""
    return pc.cast(pc.multiply(millis, _MICROS), kind)


def midnight_of(kind: pa.DataType, date: Value) -> Value:
    """Return the timestamp (UTC) at which a date begins."""
    return pc.cast(pc.cast(pc.cast(date, pa.timestamp("s")), pa.timestamp("us")), kind)


# --- casts ----------------------------------------------------------------------------------------------------------------


def widened(kind: pa.DataType, value: Value) -> Value:
    """Return numbers in a type that can hold all of their values, or that rounds them as the JVM does."""
    return pc.cast(value, kind, safe=False)


def as_text(kind: pa.DataType, value: Value) -> Value:
    """Return whole numbers, booleans and texts as text."""
    return pc.cast(value, kind)


def as_bytes(kind: pa.DataType, value: Value) -> Value:
    return pc.cast(value, kind)


_LIMITS = {pa.int8(): 7, pa.int16(): 15, pa.int32(): 31, pa.int64(): 63}


def narrowed(kind: pa.DataType, value: Value) -> Value:
    """Return ``try_cast`` of whole numbers to a smaller type: null if a value does not fit."""
    limit = 2 ** _LIMITS[kind]
    low, high = pa.scalar(-limit, value.type), pa.scalar(limit - 1, value.type)
    fits = pc.and_(pc.greater_equal(value, low), pc.less_equal(value, high))
    return pc.cast(pc.if_else(fits, value, pa.scalar(None, value.type)), kind)


def cut_off(kind: pa.DataType, value: Value) -> Value:
    """Return ``try_cast`` of floats to whole numbers, rounded towards 0: null for NaN and for values that do not fit."""
    limit = 2 ** _LIMITS[kind]
    low, high = float(-limit), float(limit - 1)
    value = pc.cast(value, pa.float64())
    fits = pc.and_(pc.less_equal(pc.floor(value), high), pc.greater_equal(pc.ceil(value), low))
    # The largest bigint is no double; the next double counts as the limit.
    largest = pc.and_(fits, pc.greater_equal(value, float(limit)))
    small = pc.and_(fits, pc.less(value, float(limit)))
    cut = pc.cast(pc.trunc(pc.if_else(small, value, pa.scalar(None, pa.float64()))), kind)
    return pc.if_else(pc.fill_null(largest, False), pa.scalar(limit - 1, kind), cut)


_PLAIN = r"^-?[0-9]{1,18}$"
# Spark strips white space and control characters from both ends, byte by byte (UTF8String.trimAll).
_STRIPPED = bytes([*range(0x21), 0x7F])
_WHOLE = re.compile(rb"[+-]?[0-9]+")


def whole_number(kind: pa.DataType, text: Value) -> Value:
    """Return ``try_cast`` of texts to whole numbers: null for other texts and for too large ones (UTF8String.toLongExact)."""
    if isinstance(text, pa.Scalar):
        return whole_number(kind, pa.array([text.as_py()], text.type))[0]
    plain = pc.match_substring_regex(text, _PLAIN)
    if plain.true_count + plain.null_count < len(text):
        others = {row: _parsed(text[row].as_py()) for row in pc.indices_nonzero(pc.invert(plain)).to_pylist()}
        plain_ones = pc.cast(pc.if_else(plain, text, pa.scalar(None, text.type)), pa.int64())
        numbers = plain_ones.to_pylist()
        for row, number in others.items():
            numbers[row] = number
        wide = pa.array(numbers, pa.int64())
    else:
        wide = pc.cast(text, pa.int64())
    return wide if kind == pa.int64() else narrowed(kind, wide)


def _parsed(text: str) -> int | None:
    stripped = text.encode().strip(_STRIPPED)
    if not _WHOLE.fullmatch(stripped):
        return None
    digits = stripped.lstrip(b"+-0") or b"0"
    # Python refuses to read thousands of digits.
    number = int(digits) * (-1 if stripped.startswith(b"-") else 1) if len(digits) < 20 else None
    return number if number is not None and -(2**63) <= number < 2**63 else None


FUNCTIONS: Mapping[str, Any] = {
    function.__name__: function
    for function in (
        is_null, both, either, negated, equal_or_both_null, one_of, concat, beginning,
        is_true_text, is_like, matches, contains, starts_with, ends_with,
        is_nan, magnitude, divided, remainder, multiplied, number_of, milliseconds_of, moment_of,
        moment_of_milliseconds, midnight_of, cut_off, widened, as_text, as_bytes, narrowed, whole_number,
    )
} | {
    "equal": equal,
    "less": less,
    "less_or_equal": less_or_equal,
    "greater": greater,
    "greater_or_equal": greater_or_equal,
}  # fmt: skip
