"""Chains of transforms that tasks compute in Arrow: a program over record batches, and the functions that it calls.

Runs in Spark's tasks: imports neither Airflow nor pyspark. :class:`Program` computes columns when they are needed. No struct is
built between two transforms: the program works on the fields, and builds only the structs of its results. If a condition has one
value for a whole batch, which is the usual case ("no error so far"), only the branch that it selects is computed.

The functions are those of Spark's SQL, named after their results as SQL's are, and ``tests/transforms/test_arrow.py`` proves that
their results are equal to Spark's.
Each takes the type of its result, then its arguments. An argument may be a scalar, which is the value of all rows. No function
fails because of a null. Those of :data:`FALLIBLE` fail because of a value, with :class:`ExpressionFailed`, and only for values
for which Spark in ANSI mode fails, too. They are computed only for the rows that need them, as in Spark: the rows of their
branch, those that a filter keeps, and those for which the left side of AND and OR does not decide. In other rows their arguments
count as null.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Decimal, localcontext
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.errors import SqlFailed
from airflow_kafka_spark.formats.base import OFFSET, Kind
from airflow_kafka_spark.formats.tasks.kernels import if_else
from airflow_kafka_spark.formats.tasks.text import TextEncoder, format_plain_decimals, format_timestamps

Value: TypeAlias = "pa.Array | pa.Scalar"
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

    def compare_values(_: pa.DataType, left: Value, right: Value) -> Value:
        found = compare(left, right)
        if pa.types.is_floating(left.type):
            found = pc.or_(found, pc.fill_null(beside(pc.is_nan(left), pc.is_nan(right)), False))
        return found

    return compare_values


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
        return if_else(pc.is_null(value), pa.scalar(None, kind), known)
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
    return pc.multiply(if_else(fits, value, pa.scalar(None, kind)), by)


def number_of(kind: pa.DataType, moment: Value) -> Value:
    """Return the days of a date, or the microseconds of a timestamp, since 1970."""
    return pc.cast(moment, kind)


def _round_down(moment: Value, micros: int) -> Value:
    """Return the number of units of time since 1970, rounded down, before 1970 as well.

    :param micros: the number of microseconds of a unit.
    """
    unit, passed = pa.scalar(micros, pa.int64()), pc.cast(moment, pa.int64())
    cut = pc.divide(passed, unit)
    return if_else(pc.less(passed, pc.multiply(cut, unit)), pc.subtract(cut, pa.scalar(1, pa.int64())), cut)


def milliseconds_of(_: pa.DataType, moment: Value) -> Value:
    return _round_down(moment, 1000)


def seconds_of(_: pa.DataType, moment: Value) -> Value:
    return _round_down(moment, 1_000_000)


def moment_of(kind: pa.DataType, micros: Value) -> Value:
    return pc.cast(pc.cast(micros, pa.int64()), kind)


def moment_of_milliseconds(kind: pa.DataType, millis: Value) -> Value:
    """Return timestamps of numbers that are known to be in range. Results of an overflow are not used by the caller."""
    return pc.cast(pc.multiply(millis, pa.scalar(1000, pa.int64())), kind)


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
    return pc.cast(if_else(fits, value, pa.scalar(None, value.type)), kind)


def cut_off(kind: pa.DataType, value: Value) -> Value:
    """Return ``try_cast`` of floats to whole numbers, rounded towards 0: null for NaN and for values that do not fit."""
    limit = 2 ** _LIMITS[kind]
    low, high = float(-limit), float(limit - 1)
    value = pc.cast(value, pa.float64())
    fits = pc.and_(pc.less_equal(pc.floor(value), high), pc.greater_equal(pc.ceil(value), low))
    # The largest bigint is no double; the next double counts as the limit.
    largest = pc.and_(fits, pc.greater_equal(value, float(limit)))
    small = pc.and_(fits, pc.less(value, float(limit)))
    cut = pc.cast(pc.trunc(if_else(small, value, pa.scalar(None, pa.float64()))), kind)
    return if_else(pc.fill_null(largest, False), pa.scalar(limit - 1, kind), cut)


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
        plain_ones = pc.cast(if_else(plain, text, pa.scalar(None, text.type)), pa.int64())
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

    def compute(kind: pa.DataType, *values: Value) -> Value:
        try:
            return kernel(*values)
        except pa.ArrowInvalid:
            small = len(values) > 1 and kind in (pa.int8(), pa.int16())
            raise ExpressionFailed(f"BINARY_{_OVERFLOW}" if small else _OVERFLOW) from None

    return compute


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
    return if_else(pc.fill_null(zero, False), pa.scalar(None, by.type), by)


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
    by = if_else(pc.equal(by, pa.scalar(-1, kind)), pa.scalar(1, kind), by)
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

    def cast(kind: pa.DataType, value: Value) -> Value:
        found = tries(kind, value)
        if _has_any(pc.and_(pc.is_null(found), pc.is_valid(value))):
            raise ExpressionFailed(message)
        return found

    return cast


def fitting_decimal(kind: pa.DataType, value: Value) -> Value:
    """Return ``try_cast`` of decimals to a smaller decimal type, rounded half up: null if a value does not fit."""
    rounded = pc.cast(value, pa.decimal128(38, value.type.scale))
    if value.type.scale > kind.scale:
        rounded = pc.round(rounded, kind.scale, round_mode="half_towards_infinity")
    if (digits := kind.precision - kind.scale) + value.type.scale < 38:  # else all values fit
        limit = pa.scalar(Decimal(10) ** digits, rounded.type)
        rounded = if_else(pc.less(pc.abs(rounded), limit), rounded, pa.scalar(None, rounded.type))
    return pc.cast(rounded, kind)


def _read_digits(value: pa.Array) -> np.ndarray:
    """Return decimals of at most 18 digits as whole numbers, without their point. Those of nulls are undefined."""
    return np.frombuffer(value.buffers()[1], np.int64)[2 * value.offset : 2 * (value.offset + len(value)) : 2]


def whole_part(kind: pa.DataType, value: Value) -> Value:
    """Return ``try_cast`` of decimals to whole numbers, rounded towards 0: null if a value does not fit."""
    if value.type.precision == value.type.scale:
        # Arrow cannot round decimals that have no digit before their point.
        return if_else(pc.is_valid(value), pa.scalar(0, kind), pa.scalar(None, kind))
    if isinstance(value, pa.Array) and value.type.precision <= 18:
        # Their digits fit into 64 bits, which Arrow divides ten times as fast as 128.
        nulls = np.asarray(value.is_null()) if value.null_count else None
        digits = pa.array(_read_digits(value), pa.int64(), mask=nulls)
        whole = pc.divide(digits, pa.scalar(10**value.type.scale, pa.int64()))
        return whole if kind == pa.int64() else narrowed(kind, whole)
    limit, wide = 2 ** _LIMITS[kind], pc.cast(pc.trunc(value), pa.decimal128(38, 0), safe=False)
    low, high = pa.scalar(Decimal(-limit), wide.type), pa.scalar(Decimal(limit - 1), wide.type)
    fits = pc.and_(pc.greater_equal(wide, low), pc.less_equal(wide, high))
    return pc.cast(if_else(fits, wide, pa.scalar(None, wide.type)), kind)


def as_double(kind: pa.DataType, value: Value) -> Value:
    """Return decimals of at most 15 digits as doubles. Dividend and divisor are exact, so the quotient is the nearest double."""
    if isinstance(value, pa.Scalar):
        return pa.scalar(float(value.as_py()) if value.is_valid else None, kind)
    made = _read_digits(value).astype(np.float64) / 10.0**value.type.scale
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
    return if_else(matched, text, pa.scalar(None, text.type)), others


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

    def change_case(kind: pa.DataType, text: Value) -> Value:
        if isinstance(text, pa.Scalar):
            return _apply_per_value(kind, text, convert)
        changed, plain = ascii_only(text), pc.string_is_ascii(text)
        if plain.true_count + plain.null_count == len(text):
            return changed
        others = pc.invert(plain)
        return pc.replace_with_mask(changed, pc.fill_null(others, False), _apply_per_value(kind, text.filter(others), convert))

    return change_case


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
    def compute_hash(kind: pa.DataType, value: Value) -> Value:
        return _apply_per_value(kind, value, lambda data: hashlib.new(name, data, usedforsecurity=False).hexdigest())

    return compute_hash


# --- maps and lists -------------------------------------------------------------------------------------------------------------


def entry(_: pa.DataType, value: Value, key: pa.Scalar) -> Value:
    """Return the value of a key of a map; null without the key."""
    return pc.map_lookup(value, key, "first")


def count_of_items(kind: pa.DataType, value: Value) -> Value:
    return pc.cast(pc.list_value_length(value), kind)


# --- parts of dates and moments -----------------------------------------------------------------------------------------------


def _make_moment_part(kernel: Callable[..., Value], **options: Any) -> Function:
    def extract(kind: pa.DataType, value: Value) -> Value:
        return pc.cast(kernel(_remove_zone(value), **options), kind)

    return extract


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

    def format_values(wanted: pa.DataType, value: Value) -> Value:
        if isinstance(value, pa.Scalar):
            return format_values(wanted, pa.array([value.as_py()], value.type))[0]
        return pc.cast(encoder.encode({"it": value}), wanted)

    return format_values


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
    made = _format_in_pattern(if_else(usual, whole, pa.scalar(None, whole.type)), parts)
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


COLUMN, LITERAL, FIELD, STRUCT, CASE, KEPT, CALL = "column", "literal", "field", "struct", "case", "kept", "call"


@dataclass(frozen=True)
class Node:
    """One step of a program. The meaning of ``args`` and ``data`` depends on ``kind``:

    - ``column``: ``data`` names a column of the batch.
    - ``literal``: ``data`` is the value.
    - ``field``: the field number ``data`` of a struct.
    - ``struct``: ``args`` are the values of its fields, and last a boolean that is true if the struct is null.
    - ``case``: ``args`` are condition, value, condition, value ..., and last the value if no condition is true.
    - ``kept``: the rows of an earlier step that filter number ``data`` has kept.
    - ``call``: the function ``data`` of :data:`~airflow_kafka_spark.jobs.tasks.arrow.FUNCTIONS`.

    :param type: of the value.
    """

    kind: str
    type: pa.DataType
    args: tuple[int, ...] = ()
    data: Any = None


@dataclass(frozen=True)
class Program:
    """A program that computes columns of a record batch and removes rows.

    :param nodes: the steps. Each one follows those that it uses.
    :param outputs: the node of each resulting column, by the column's name.
    :param filters: the nodes of filters, in their order. Rows stay for which all of them are true.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, int], ...]
    filters: tuple[int, ...] = ()

    @property
    def columns(self) -> frozenset[str]:
        """Return the columns that the program reads."""
        return frozenset(node.data for node in self.nodes if node.kind == COLUMN)

    @cached_property
    def fallible(self) -> frozenset[int]:
        """Return the nodes that may fail because of a value, and those that use them."""
        found: set[int] = set()
        for at, node in enumerate(self.nodes):
            if (node.kind == CALL and node.data in FALLIBLE) or not found.isdisjoint(node.args):
                found.add(at)
        return frozenset(found)

    def drop_outputs(self, names: Collection[str]) -> Program:
        """Return the program without some outputs, and without the nodes that only they need."""
        outputs = [(name, at) for name, at in self.outputs if name not in names]
        wanted, asked = set[int](), [*(at for _, at in outputs), *self.filters]
        while asked:
            at = asked.pop()
            if at not in wanted:
                wanted.add(at)
                asked += self.nodes[at].args
        number = {at: index for index, at in enumerate(sorted(wanted))}
        nodes = [replace(self.nodes[at], args=tuple(number[arg] for arg in self.nodes[at].args)) for at in number]
        filters = tuple(number[at] for at in self.filters)
        return Program(tuple(nodes), tuple((name, number[at]) for name, at in outputs), filters)

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the columns of a batch.

        :raises ExpressionFailed: the program fails for a value.
        """
        return _Evaluation(self, batch).run()

    def run(self, batches: Iterable[pa.RecordBatch], place: object) -> Iterator[pa.RecordBatch]:
        """Yield the columns of the batches of a split.

        :param place: the topic and partition of the split, for the message.
        :raises SqlFailed: the program fails for a record. The first such record of its batch is named.
        """
        for batch in batches:
            try:
                made = self(batch)
            except ExpressionFailed as refused:
                raise SqlFailed(f"{place}@{self._find_first_refused(batch)}", str(refused)) from None
            yield made

    def _find_first_refused(self, batch: pa.RecordBatch) -> int:
        while batch.num_rows > 1:
            half = batch.slice(0, batch.num_rows // 2)
            try:
                self(half)
                batch = batch.slice(half.num_rows)
            except ExpressionFailed:
                batch = half
        return int(batch.column(batch.schema.get_field_index(OFFSET))[0].as_py())

    def run_over_nulls(self, schema: pa.Schema) -> None:
        """Run all branches of the program over nulls.

        :param schema: the schema of the batches.
        :raises pyarrow.ArrowException: Arrow has no function for a type.
        """
        nulls = [pa.nulls(2, f.type) for f in schema]
        _Evaluation(self, pa.RecordBatch.from_arrays(nulls, schema.names), all_branches=True).run()


class _Evaluation:
    """The evaluation of a program over one batch."""

    def __init__(self, program: Program, batch: pa.RecordBatch, *, all_branches: bool = False) -> None:
        self._all_branches = all_branches
        self._program = program
        self._given = batch
        self._values: dict[int, Value] = {}
        self._kept: dict[int, pa.Array | None] = {}
        self._counts: dict[int, int] = {0: batch.num_rows}

    def run(self) -> pa.RecordBatch:
        count = self._count(len(self._program.filters))
        names = [name for name, _ in self._program.outputs]
        arrays = [self._make_column(node, count) for _, node in self._program.outputs]
        return pa.RecordBatch.from_arrays(arrays, names)

    def _make_column(self, node: int, count: int) -> pa.Array:
        value = self._get_value(node)
        return pa.repeat(value, count) if isinstance(value, pa.Scalar) else value

    def _get_value(self, at: int, rows: pa.Array | None = None) -> Value:
        """Return the value of a node.

        :param rows: the rows that need it; None: all. Only nodes that may fail use it: in other rows their value is not used.
        """
        if at not in self._program.fallible:
            rows = None
        if rows is not None:
            return self._compute(self._program.nodes[at], rows)
        found = self._values.get(at)
        if found is None:
            found = self._values[at] = self._compute(self._program.nodes[at], None)
        return found

    def _compute(self, node: Node, rows: pa.Array | None) -> Value:
        if node.kind == CASE:
            return self._compute_case(node, rows)
        if node.kind == COLUMN:
            return self._given.column(self._given.schema.get_field_index(node.data))
        if node.kind == LITERAL:
            return pa.scalar(node.data, node.type)
        if node.kind == FIELD:
            return pc.struct_field(self._get_value(node.args[0], rows), [node.data])
        if node.kind == KEPT:
            return self._filter_kept(node, rows)
        if node.kind == STRUCT:
            return self._make_struct(node, rows)
        return self._call(node, rows)

    def _call(self, node: Node, rows: pa.Array | None) -> Value:
        if node.data in ("both", "either") and node.args[1] in self._program.fallible:
            left = self._get_value(node.args[0], rows)
            # The left side decides if it is false, or true: then the right side is not computed.
            undecided = pc.fill_null(left if node.data == "both" else pc.invert(left), True)
            if isinstance(undecided, pa.Scalar):
                if not undecided.as_py():
                    return left
            elif not self._all_branches:
                rows = undecided if rows is None else pc.and_(rows, undecided)
            return FUNCTIONS[node.data](node.type, left, self._get_value(node.args[1], rows))
        values = [self._get_value(arg, rows) for arg in node.args]
        if rows is None or node.data not in FALLIBLE:
            return FUNCTIONS[node.data](node.type, *values)
        first = values[0]
        return FUNCTIONS[node.data](node.type, if_else(rows, first, pa.scalar(None, first.type)), *values[1:])

    def _compute_case(self, node: Node, rows: pa.Array | None) -> Value:
        *pairs, last = node.args
        open_branches: list[tuple[pa.Array, int, pa.Array | None]] = []
        for condition, value in zip(pairs[::2], pairs[1::2], strict=True):
            holds = self._get_value(condition, rows)
            if self._all_branches:
                open_branches.append((holds, value, None))
                continue
            if isinstance(holds, pa.Scalar):
                if holds.as_py():
                    last = value
                    break
                continue
            trues = holds.true_count
            if trues == len(holds):
                last = value
                break
            if trues:
                holds = pc.fill_null(holds, False)
                open_branches.append((holds, value, holds if rows is None else pc.and_(rows, holds)))
                rows = pc.invert(holds) if rows is None else pc.and_not(rows, holds)
        otherwise = self._get_value(last, rows)
        # From the last branch to the first, because the first true condition decides. A condition that is null is not true.
        made = otherwise
        for holds, value, within in reversed(open_branches):
            made = if_else(pc.fill_null(holds, False), self._get_value(value, within), made)
        return made

    def _make_struct(self, node: Node, rows: pa.Array | None) -> Value:
        *fields, null = (self._get_value(arg, rows) for arg in node.args)
        lengths = {len(value) for value in (*fields, null) if isinstance(value, pa.Array)}
        if not lengths:
            values = dict(zip((f.name for f in node.type), (f.as_py() for f in fields), strict=True))
            return pa.scalar(None if null.as_py() else values, node.type)
        (count,) = lengths
        arrays = [pa.repeat(value, count) if isinstance(value, pa.Scalar) else value for value in fields]
        if isinstance(null, pa.Scalar):
            null = pa.repeat(null, count) if null.as_py() else None
        return pa.StructArray.from_arrays(arrays, fields=list(node.type), mask=null)

    # --- filters ---

    def _filter_kept(self, node: Node, rows: pa.Array | None) -> Value:
        """Return the rows of an earlier node that a filter keeps."""
        of = node.args[0]
        if of not in self._program.fallible:
            value = self._get_value(of)
            mask = None if isinstance(value, pa.Scalar) else self._find_mask(node.data)
            return value if mask is None else value.filter(mask)
        mask = self._find_mask(node.data)
        if mask is None:
            return self._get_value(of, rows)
        mask = pc.fill_null(mask, False)
        value = self._get_value(of, mask if rows is None else pc.replace_with_mask(mask, mask, rows))
        return value if isinstance(value, pa.Scalar) else value.filter(mask)

    def _find_mask(self, number: int) -> pa.Array | None:
        """Return the rows that a filter keeps of those that reach it; None if it keeps all."""
        if number not in self._kept:
            holds = self._get_value(self._program.filters[number])
            if isinstance(holds, pa.Scalar):
                mask = None if holds.as_py() else pa.repeat(pa.scalar(False), self._count(number))
            else:
                mask = None if holds.true_count == len(holds) else holds
            self._kept[number] = mask
        return self._kept[number]

    def _count(self, filters: int) -> int:
        """Return the number of rows after this many filters."""
        if filters not in self._counts:
            mask = self._find_mask(filters - 1)
            self._counts[filters] = self._count(filters - 1) if mask is None else mask.true_count
        return self._counts[filters]
