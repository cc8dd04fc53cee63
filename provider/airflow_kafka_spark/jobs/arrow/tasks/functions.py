"""Functions of Spark's SQL, computed by Arrow. ``tests/transforms/test_arrow.py`` proves that their results are equal to Spark's.

Runs in Spark's tasks: imports neither Airflow nor pyspark. Each takes the type of its result, then its arguments. An argument may
be a scalar, which is the value of all rows. Only the functions of :data:`FALLIBLE` fail because of a value, with
:class:`ExpressionFailed`, and only for values for which Spark in ANSI mode fails, too. No function fails because of a null.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from decimal import ROUND_HALF_UP, Decimal, localcontext
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.formats.base import Kind
from airflow_kafka_spark.formats.tasks.text import TextEncoder, format_plain_decimals, format_timestamps

Value = Any
"""A ``pyarrow.Array``, or a ``pyarrow.Scalar`` with the value of all rows."""
Function = Callable[..., Value]


class ExpressionFailed(Exception):
    """Raised for a value for which Spark fails in ANSI mode. The message begins with the name of Spark's error."""


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


def _make_comparison(compare: Callable[[Value, Value], Value], beside: Callable[[Value, Value], Value]) -> Function:
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


equal = _make_comparison(pc.equal, pc.and_kleene)
less = _make_comparison(pc.less, lambda left, right: _and_not(right, left))
less_or_equal = _make_comparison(pc.less_equal, lambda left, right: right)
greater = _make_comparison(pc.greater, lambda left, right: _and_not(left, right))
greater_or_equal = _make_comparison(pc.greater_equal, lambda left, right: left)


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


def _round_down(moment: Value, micros: int) -> Value:
    """Return the number of units of time since 1970, rounded down, before 1970 as well.

    :param micros: the number of microseconds of a unit.
    """
    unit, passed = pa.scalar(micros, pa.int64()), pc.cast(moment, pa.int64())
    cut = pc.divide(passed, unit)
    return pc.if_else(pc.less(passed, pc.multiply(cut, unit)), pc.subtract(cut, pa.scalar(1, pa.int64())), cut)


def milliseconds_of(_: pa.DataType, moment: Value) -> Value:
    return _round_down(moment, 1000)


def seconds_of(_: pa.DataType, moment: Value) -> Value:
    return _round_down(moment, 1_000_000)


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
        others = {row: _parse_whole(text[row].as_py()) for row in pc.indices_nonzero(pc.invert(plain)).to_pylist()}
        plain_ones = pc.cast(pc.if_else(plain, text, pa.scalar(None, text.type)), pa.int64())
        numbers = plain_ones.to_pylist()
        for row, number in others.items():
            numbers[row] = number
        wide = pa.array(numbers, pa.int64())
    else:
        wide = pc.cast(text, pa.int64())
    return wide if kind == pa.int64() else narrowed(kind, wide)


def _parse_whole(text: str) -> int | None:
    stripped = text.encode().strip(_STRIPPED)
    if not _WHOLE.fullmatch(stripped):
        return None
    digits = stripped.lstrip(b"+-0") or b"0"
    # Python refuses to read thousands of digits.
    number = int(digits) * (-1 if stripped.startswith(b"-") else 1) if len(digits) < 20 else None
    return number if number is not None and -(2**63) <= number < 2**63 else None


def _apply_per_value(kind: pa.DataType, value: Value, convert: Callable[[Any], Any]) -> Value:
    """Return the results of a Python function for the values that are not null."""
    if isinstance(value, pa.Scalar):
        return pa.scalar(convert(value.as_py()) if value.is_valid else None, kind)
    return pa.array([None if one is None else convert(one) for one in value.to_pylist()], kind)


def _has_any(where: Value) -> bool:
    """Return True if a condition is true for any row."""
    return bool(where.as_py()) if isinstance(where, pa.Scalar) else bool(where.true_count)


# --- arithmetic -------------------------------------------------------------------------------------------------------------

_OVERFLOW = "ARITHMETIC_OVERFLOW: a result does not fit into its type"
_ZERO = "DIVIDE_BY_ZERO: a divisor is 0"
_RANGE = "NUMERIC_VALUE_OUT_OF_RANGE: a number does not fit into its type"
_NO_DECIMAL = "NUMERIC_OUT_OF_SUPPORTED_RANGE: a number has more than 38 digits"
_MALFORMED = "CAST_INVALID_INPUT: a text is not a value of the type it is cast to"
_CAST_RANGE = "CAST_OVERFLOW: a number does not fit into the type it is cast to"


def _make_checked(kernel: Callable[..., Value]) -> Function:
    """Return a function of whole numbers that fails for a result that does not fit. Spark has a second name for the error."""

    def function(kind: pa.DataType, *values: Value) -> Value:
        try:
            return kernel(*values)
        except pa.ArrowInvalid:
            small = len(values) > 1 and kind in (pa.int8(), pa.int16())
            raise ExpressionFailed(f"BINARY_{_OVERFLOW}" if small else _OVERFLOW) from None

    return function


def plus(_: pa.DataType, left: Value, right: Value) -> Value:
    """Add floats, or decimals whose sum always fits."""
    return pc.add(left, right)


def minus(_: pa.DataType, left: Value, right: Value) -> Value:
    return pc.subtract(left, right)


def times(_: pa.DataType, left: Value, right: Value) -> Value:
    return pc.multiply(left, right)


def opposite(_: pa.DataType, value: Value) -> Value:
    return pc.negate(value)


def _replace_zero_divisor(value: Value, by: Value) -> Value:
    """Return divisors, null instead of 0.

    :raises ExpressionFailed: there is a 0 beside a value.
    """
    zero = pc.equal(by, pa.scalar(0, by.type))
    if _has_any(pc.and_(pc.fill_null(zero, False), pc.is_valid(value))):
        raise ExpressionFailed(_ZERO)
    return pc.if_else(pc.fill_null(zero, False), pa.scalar(None, by.type), by)


def ratio(_: pa.DataType, value: Value, by: Value) -> Value:
    """Divide floats."""
    return pc.divide(value, _replace_zero_divisor(value, by))


def whole_ratio(kind: pa.DataType, value: Value, by: Value) -> Value:
    """Divide whole numbers, rounding towards 0."""
    by = _replace_zero_divisor(value, by)
    smallest = pc.and_kleene(pc.equal(value, pa.scalar(-(2 ** _LIMITS[kind]), kind)), pc.equal(by, pa.scalar(-1, kind)))
    if _has_any(pc.fill_null(smallest, False)):
        raise ExpressionFailed(_OVERFLOW)
    return pc.divide(value, by)


def whole_remainder(kind: pa.DataType, value: Value, by: Value) -> Value:
    """Return the remainder of a division that rounds towards 0. It has the sign of the dividend."""
    by = _replace_zero_divisor(value, by)
    # Divided by -1 there is no remainder, and the quotient of the smallest number does not fit.
    by = pc.if_else(pc.equal(by, pa.scalar(-1, kind)), pa.scalar(1, kind), by)
    return pc.subtract(value, pc.multiply(pc.divide(value, by), by))


def largest(kind: pa.DataType, *values: Value) -> Value:
    """Return the largest value that is not null."""
    return pc.cast(pc.max_element_wise(*map(_remove_zone, values)), kind)


def smallest(kind: pa.DataType, *values: Value) -> Value:
    return pc.cast(pc.min_element_wise(*map(_remove_zone, values)), kind)


def _remove_zone(value: Value) -> Value:
    """Return moments in UTC without their zone, with which many of Arrow's functions do not work."""
    return pc.cast(value, pa.timestamp("us")) if pa.types.is_timestamp(value.type) else value


# --- casts of numbers and texts to numbers --------------------------------------------------------------------------------------


def _make_failing(tries: Function, message: str) -> Function:
    """Return a cast that fails where another one returns null for a value."""

    def function(kind: pa.DataType, value: Value) -> Value:
        found = tries(kind, value)
        if _has_any(pc.and_(pc.is_null(found), pc.is_valid(value))):
            raise ExpressionFailed(message)
        return found

    return function


def fitting_decimal(kind: pa.DataType, value: Value) -> Value:
    """Return ``try_cast`` of decimals to a smaller decimal type, rounded half up: null if a value does not fit."""
    rounded = pc.cast(value, pa.decimal128(38, value.type.scale))
    if value.type.scale > kind.scale:
        rounded = pc.round(rounded, kind.scale, round_mode="half_towards_infinity")
    if (digits := kind.precision - kind.scale) + value.type.scale < 38:  # else all values fit
        limit = pa.scalar(Decimal(10) ** digits, rounded.type)
        rounded = pc.if_else(pc.less(pc.abs(rounded), limit), rounded, pa.scalar(None, rounded.type))
    return pc.cast(rounded, kind)


def whole_part(kind: pa.DataType, value: Value) -> Value:
    """Return ``try_cast`` of decimals to whole numbers, rounded towards 0: null if a value does not fit."""
    limit, wide = 2 ** _LIMITS[kind], pc.cast(pc.trunc(value), pa.decimal128(38, 0), safe=False)
    low, high = pa.scalar(Decimal(-limit), wide.type), pa.scalar(Decimal(limit - 1), wide.type)
    fits = pc.and_(pc.greater_equal(wide, low), pc.less_equal(wide, high))
    return pc.cast(pc.if_else(fits, wide, pa.scalar(None, wide.type)), kind)


def as_double(kind: pa.DataType, value: Value) -> Value:
    """Return decimals of at most 15 digits as doubles. Dividend and divisor are exact, so the quotient is the nearest double."""
    if isinstance(value, pa.Scalar):
        return pa.scalar(float(value.as_py()) if value.is_valid else None, kind)
    low = np.frombuffer(value.buffers()[1], np.int64)[2 * value.offset : 2 * (value.offset + len(value)) : 2]
    made = low.astype(np.float64) / 10.0**value.type.scale
    return pa.array(made, kind, mask=np.asarray(value.is_null()))


_PLAIN_NUMBER = r"^-?[0-9]{1,15}(\.[0-9]{1,15})?$"
_DECIMAL_TEXT = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,9})?")  # with the digits of all scripts, as Java
_FLOAT_TEXT = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fFdD]?")
_HEX_TEXT = re.compile(r"([+-]?)0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)[pP][+-]?[0-9]+[fFdD]?")
_FLOAT_WORDS = {
    **dict.fromkeys(("inf", "+inf", "infinity", "+infinity"), float("inf")),
    **dict.fromkeys(("-inf", "-infinity"), -float("inf")),
    "nan": float("nan"),
}
_JAVA_SPACE = "".join(map(chr, range(0x21)))


def _split_plain(text: Value, plain: str) -> tuple[Value, list[int]]:
    """Return the texts that a regular expression matches, null instead of others, and the rows of the others."""
    matched = pc.match_substring_regex(text, plain)
    if matched.true_count + matched.null_count == len(text):
        return text, []
    others = pc.indices_nonzero(pc.invert(matched)).to_pylist()
    return pc.if_else(matched, text, pa.scalar(None, text.type)), others


def _fill_in_others(plain: pa.Array, text: pa.Array, others: list[int], parse: Callable[[str], Any]) -> pa.Array:
    if not others:
        return plain
    values = plain.to_pylist()
    for row in others:
        values[row] = parse(text[row].as_py())
    return pa.array(values, plain.type)


def float_of_text(kind: pa.DataType, text: Value) -> Value:
    """Return ``try_cast`` of texts to doubles: null for other texts."""
    if isinstance(text, pa.Scalar):
        return float_of_text(kind, pa.array([text.as_py()], text.type))[0]
    plain, others = _split_plain(text, _PLAIN_NUMBER)
    return _fill_in_others(pc.cast(plain, kind), text, others, _parse_float)


def _parse_float(text: str) -> float | None:
    """Return the double of a text by the rules of Java's ``Double.valueOf``, and of Spark for the words of special values."""
    stripped = text.strip(_JAVA_SPACE)
    if _FLOAT_TEXT.fullmatch(stripped):
        return float(stripped.rstrip("fFdD"))
    if _HEX_TEXT.fullmatch(stripped):
        try:
            # Here "d" and "f" are digits before the exponent, and a suffix after it.
            return float.fromhex(stripped.rstrip("fFdD"))
        except OverflowError:
            return float(f"{stripped[0] if stripped[0] == '-' else ''}inf")
    return _FLOAT_WORDS.get(stripped.lower())


def decimal_of_text(kind: pa.DataType, text: Value) -> Value:
    """Return ``try_cast`` of texts to decimals, rounded half up: null for other texts and for numbers that do not fit."""
    if isinstance(text, pa.Scalar):
        return decimal_of_text(kind, pa.array([text.as_py()], text.type))[0]
    whole = min(kind.precision - kind.scale, 18)
    fraction = rf"(\.[0-9]{{1,{kind.scale}}})?" if kind.scale else ""
    digits = rf"^-?[0-9]{{1,{whole}}}{fraction}$" if whole else rf"^-?0{fraction}$"
    plain, others = _split_plain(text, digits)
    return _fill_in_others(pc.cast(plain, kind), text, others, lambda one: _parse_decimal(one, kind))


def decimal_of_text_or_fail(kind: pa.DataType, text: Value) -> Value:
    """Return texts as decimals, rounded half up."""
    if isinstance(text, pa.Scalar):
        return decimal_of_text_or_fail(kind, pa.array([text.as_py()], text.type))[0]
    found = decimal_of_text(kind, text)
    if found.null_count > text.null_count:
        first = text.filter(pc.and_(found.is_null(), text.is_valid()))[0].as_py()
        stripped = first.strip(_JAVA_SPACE)
        if not _DECIMAL_TEXT.fullmatch(stripped):
            raise ExpressionFailed(_MALFORMED)
        raise ExpressionFailed(_RANGE if Decimal(stripped).adjusted() < 38 else _NO_DECIMAL)
    return found


def _parse_decimal(text: str, kind: pa.DataType) -> Decimal | None:
    stripped = text.strip(_JAVA_SPACE)
    if not _DECIMAL_TEXT.fullmatch(stripped):
        return None
    with localcontext() as context:
        context.prec, context.rounding = 100, ROUND_HALF_UP
        number = Decimal(stripped)
        if number and not -100 < number.adjusted() < 100:
            return None if number.adjusted() > 0 else Decimal(0)
        rounded = number.quantize(Decimal(1).scaleb(-kind.scale, context))
        return rounded if not rounded or rounded.adjusted() < kind.precision - kind.scale else None


# --- more of texts ------------------------------------------------------------------------------------------------------------


def _make_case_change(ascii_only: Callable[[Value], Value], convert: Callable[[str], str]) -> Function:
    """Return a function that changes the case of letters. Letters that Python's Unicode does not have are unchanged."""

    def function(kind: pa.DataType, text: Value) -> Value:
        if isinstance(text, pa.Scalar):
            return _apply_per_value(kind, text, convert)
        changed, plain = ascii_only(text), pc.string_is_ascii(text)
        if plain.true_count + plain.null_count == len(text):
            return changed
        others = pc.invert(plain)
        return pc.replace_with_mask(changed, pc.fill_null(others, False), _apply_per_value(kind, text.filter(others), convert))

    return function


upper = _make_case_change(pc.ascii_upper, str.upper)
lower = _make_case_change(pc.ascii_lower, str.lower)


def trimmed(_: pa.DataType, text: Value) -> Value:
    """Remove spaces, and no other characters, from both ends."""
    return pc.utf8_trim(text, characters=" ")


def left_trimmed(_: pa.DataType, text: Value) -> Value:
    return pc.utf8_ltrim(text, characters=" ")


def right_trimmed(_: pa.DataType, text: Value) -> Value:
    return pc.utf8_rtrim(text, characters=" ")


def count_of_characters(kind: pa.DataType, text: Value) -> Value:
    return pc.cast(pc.utf8_length(text), kind)


def count_of_bytes(kind: pa.DataType, value: Value) -> Value:
    return pc.cast(pc.binary_length(value), kind)


def part(_: pa.DataType, text: Value, start: pa.Scalar, count: pa.Scalar) -> Value:
    """Return characters of a text; the first has the number 1, and negative numbers count from the end."""
    first, length = start.as_py(), count.as_py()
    begin = first - 1 if first > 0 else first
    end: int | None = begin + length
    if begin < 0 and begin + length >= 0:
        end = None
    return pc.utf8_slice_codeunits(text, begin, end)


def replaced(_: pa.DataType, text: Value, old: pa.Scalar, new: pa.Scalar) -> Value:
    return pc.replace_substring(text, old.as_py(), new.as_py())


def replaced_matches(_: pa.DataType, text: Value, pattern: pa.Scalar, new: pa.Scalar) -> Value:
    """Replace what a regular expression matches. Only for expressions that :func:`is_common` accepts and that do not match
    an empty text."""
    return pc.replace_substring_regex(text, pattern.as_py(), new.as_py())


def joined(_: pa.DataType, separator: pa.Scalar, *texts: Value) -> Value:
    """Join the texts that are not null."""
    if all(isinstance(text, pa.Scalar) for text in texts):
        return pa.scalar(separator.as_py().join(text.as_py() for text in texts if text.is_valid), pa.string())
    return pc.binary_join_element_wise(*texts, separator, null_handling="skip")


def _make_hash(name: str) -> Function:
    def function(kind: pa.DataType, value: Value) -> Value:
        return _apply_per_value(kind, value, lambda data: hashlib.new(name, data, usedforsecurity=False).hexdigest())

    return function


# --- maps and lists -------------------------------------------------------------------------------------------------------------


def entry(_: pa.DataType, value: Value, key: pa.Scalar) -> Value:
    """Return the value of a key of a map; null without the key."""
    return pc.map_lookup(value, key, "first")


def count_of_items(kind: pa.DataType, value: Value) -> Value:
    return pc.cast(pc.list_value_length(value), kind)


# --- parts of dates and moments -----------------------------------------------------------------------------------------------


def _make_moment_part(kernel: Callable[..., Value], **options: Any) -> Function:
    def function(kind: pa.DataType, value: Value) -> Value:
        return pc.cast(kernel(_remove_zone(value), **options), kind)

    return function


def day_of(kind: pa.DataType, moment: Value) -> Value:
    """Return the date (UTC) of a timestamp."""
    return pc.cast(pc.floor_temporal(_remove_zone(moment), unit="day"), kind)


def later_day(kind: pa.DataType, day: Value, days: Value) -> Value:
    return pc.cast(pc.add(pc.cast(day, pa.int32()), pc.cast(days, pa.int32())), kind)


def earlier_day(kind: pa.DataType, day: Value, days: Value) -> Value:
    return pc.cast(pc.subtract(pc.cast(day, pa.int32()), pc.cast(days, pa.int32())), kind)


def days_between(_: pa.DataType, end: Value, start: Value) -> Value:
    return pc.subtract(pc.cast(end, pa.int32()), pc.cast(start, pa.int32()))


def beginning_of(kind: pa.DataType, moment: Value, unit: pa.Scalar) -> Value:
    """Return the beginning (UTC) of the unit of time in which a date or a timestamp lies."""
    return pc.cast(pc.floor_temporal(_remove_zone(moment), unit=unit.as_py()), kind)


def _make_text_function(kind: Kind) -> Function:
    encoder = TextEncoder("it", kind)

    def function(wanted: pa.DataType, value: Value) -> Value:
        if isinstance(value, pa.Scalar):
            return function(wanted, pa.array([value.as_py()], value.type))[0]
        return pc.cast(encoder.encode({"it": value}), wanted)

    return function


date_text, moment_text, local_text = _make_text_function("date"), _make_text_function("zoned"), _make_text_function("local")


_PATTERN_PART = re.compile(r"'((?:[^']|'')*)'|([A-Za-z])\2*|[^A-Za-z']")
_SLICES = {
    "yyyy": (0, 4), "yy": (2, 4), "MM": (5, 7), "M": (5, 7), "dd": (8, 10), "d": (8, 10), "HH": (11, 13), "H": (11, 13),
    "mm": (14, 16), "m": (14, 16), "ss": (17, 19), "s": (17, 19), **{"S" * n: (20, 20 + n) for n in range(1, 7)},
}  # fmt: skip
_UTC = {"X": "Z", "XX": "Z", "XXX": "Z", "x": "+00", "xx": "+0000", "xxx": "+00:00", "Z": "+0000"}


def parse_pattern(pattern: str) -> list[str | tuple[str, int, int]] | None:
    """Return the parts of a pattern of Java for dates: texts, and letters with the part of ``yyyy-MM-dd HH:mm:ss.SSSSSS`` that
    they mean; None for a pattern with other letters."""
    parts: list[str | tuple[str, int, int]] = []
    for found in _PATTERN_PART.finditer(pattern):
        text, quoted = found.group(), found.group(1)
        if quoted is not None:
            parts.append(quoted.replace("''", "'") or "'")
        elif text in _UTC:
            parts.append(_UTC[text])
        elif text in _SLICES:
            parts.append((text, *_SLICES[text]))
        elif found.group(2) or text in "[]{}#":
            return None
        else:
            parts.append(text)
    return parts if "".join(found.group() for found in _PATTERN_PART.finditer(pattern)) == pattern else None


def formatted(kind: pa.DataType, moment: Value, pattern: pa.Scalar) -> Value:
    """Return timestamps (UTC) in a pattern for which :func:`parse_pattern` gives parts."""
    if isinstance(moment, pa.Scalar):
        return formatted(kind, pa.array([moment.as_py()], moment.type), pattern)[0]
    parts = parse_pattern(pattern.as_py()) or []
    # Without a zone, and to the microsecond.
    whole = format_timestamps(_remove_zone(moment), " ")
    usual = pc.match_substring_regex(whole, r"^[0-9]{4}-")
    made = _format_in_pattern(pc.if_else(usual, whole, pa.scalar(None, whole.type)), parts)
    if usual.true_count + usual.null_count == len(whole):
        return made
    unusual = pc.fill_null(pc.invert(usual), False)
    return pc.replace_with_mask(
        made, unusual, _apply_per_value(kind, whole.filter(unusual), lambda text: _format_far_in_pattern(text, parts))
    )


def _format_in_pattern(texts: pa.Array, parts: list[str | tuple[str, int, int]]) -> pa.Array:
    made = []
    for found in parts:
        if isinstance(found, str):
            made.append(pa.scalar(found, texts.type))
            continue
        letters, start, end = found
        digits = pc.utf8_slice_codeunits(texts, start, end)
        made.append(pc.replace_substring_regex(digits, "^0", "") if len(letters) == 1 and letters != "S" else digits)
    return pc.binary_join_element_wise(*made, pc.utf8_slice_codeunits(texts, 0, 0), pa.scalar("", texts.type))


def _format_far_in_pattern(text: str, parts: list[str | tuple[str, int, int]]) -> str:
    """Return a timestamp outside of the years 1 to 9999, whose year has a sign."""
    at = text.index("-", 1)
    year, rest = text[:at], text[at:]
    ends = {"yyyy": year, "yy": year[-2:]}
    made = []
    for found in parts:
        if isinstance(found, str):
            made.append(found)
        elif found[0] in ends:
            made.append(ends[found[0]])
        else:
            digits = rest[found[1] - 4 : found[2] - 4]
            made.append(digits.removeprefix("0") if len(found[0]) == 1 and found[0] != "S" else digits)
    return "".join(made)


def decimal_text(_: pa.DataType, value: Value) -> Value:
    """Return decimals in plain notation, with all digits of their scale."""
    return (
        format_plain_decimals(pa.array([value.as_py()], value.type))[0]
        if isinstance(value, pa.Scalar)
        else format_plain_decimals(value)
    )


FUNCTIONS: Mapping[str, Any] = {
    function.__name__: function
    for function in (
        is_null, both, either, negated, equal_or_both_null, one_of, concat,
        is_true_text, is_like, matches, contains, starts_with, ends_with,
        is_nan, magnitude, divided, remainder, multiplied, number_of, milliseconds_of, moment_of,
        moment_of_milliseconds, midnight_of, cut_off, widened, as_text, as_bytes, narrowed, whole_number,
        plus, minus, times, opposite, ratio, whole_ratio, whole_remainder, largest, smallest,
        fitting_decimal, whole_part, as_double, float_of_text, decimal_of_text, decimal_of_text_or_fail,
        trimmed, left_trimmed, right_trimmed, count_of_characters, count_of_bytes, part, replaced, replaced_matches, joined,
        entry, count_of_items, day_of, seconds_of, later_day, earlier_day, days_between, beginning_of, decimal_text, formatted,
    )
} | {
    "equal": equal,
    "less": less,
    "less_or_equal": less_or_equal,
    "greater": greater,
    "greater_or_equal": greater_or_equal,
    "upper": upper,
    "lower": lower,
    "date_text": date_text,
    "moment_text": moment_text,
    "local_text": local_text,
    "md5": _make_hash("md5"),
    "sha224": _make_hash("sha224"),
    "sha256": _make_hash("sha256"),
    "sha384": _make_hash("sha384"),
    "sha512": _make_hash("sha512"),
    "year": _make_moment_part(pc.year),
    "quarter": _make_moment_part(pc.quarter),
    "month": _make_moment_part(pc.month),
    "week": _make_moment_part(pc.iso_week),
    "day_of_month": _make_moment_part(pc.day),
    "day_of_year": _make_moment_part(pc.day_of_year),
    "day_of_week": _make_moment_part(pc.day_of_week, count_from_zero=False, week_start=7),
    "week_day": _make_moment_part(pc.day_of_week, count_from_zero=True, week_start=1),
    "hour": _make_moment_part(pc.hour),
    "minute": _make_moment_part(pc.minute),
    "second": _make_moment_part(pc.second),
    "plus_or_fail": _make_checked(pc.add_checked),
    "minus_or_fail": _make_checked(pc.subtract_checked),
    "times_or_fail": _make_checked(pc.multiply_checked),
    "opposite_or_fail": _make_checked(pc.negate_checked),
    "magnitude_or_fail": _make_checked(pc.abs_checked),
    "narrowed_or_fail": _make_failing(narrowed, _CAST_RANGE),
    "cut_off_or_fail": _make_failing(cut_off, _CAST_RANGE),
    "whole_number_or_fail": _make_failing(whole_number, _MALFORMED),
    "fitting_decimal_or_fail": _make_failing(fitting_decimal, _RANGE),
    "whole_part_or_fail": _make_failing(whole_part, _CAST_RANGE),
    "float_of_text_or_fail": _make_failing(float_of_text, _MALFORMED),
}  # fmt: skip

FALLIBLE = frozenset({"ratio", "whole_ratio", "whole_remainder", *(name for name in FUNCTIONS if name.endswith("_or_fail"))})
"""Functions that fail for some values."""
