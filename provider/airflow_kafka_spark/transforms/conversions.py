"""Conversions of types: Cast and TimestampConverter; values in text, as Connect writes them; and date patterns.

Date patterns write timestamps as texts. They are the patterns of Java's SimpleDateFormat, which Connect uses. Spark's own
patterns differ; most letters that Spark does not have are computed here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Literal, get_args

from airflow_kafka_spark.errors import Problem, ValidationError
from airflow_kafka_spark.transforms.base import KeyOrValueTransform, NullDefaultTransform, RecordSchema, rebuild_struct
from airflow_kafka_spark.transforms.options import parse_names, parse_pairs

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType


CALENDAR = "YwWuF"
"""Letters of weeks, which Spark does not know or understands otherwise. As in Java's default locale, a week begins on a Sunday,
and the first week of a year holds the 1st of January."""

_DATE_LETTERS = frozenset("GyMLdDQqEahKkHmsSVzOXxZ" + CALENDAR)
_MAX_LENGTHS = {
    **dict.fromkeys("dhHkKms", 2),
    **dict.fromkeys("GMLEQqzO", 4),
    "y": 6,
    "D": 3,
    "S": 9,
    "V": 2,
    "X": 5,
    "x": 5,
    "Z": 5,
}
_WRITE_ONLY = CALENDAR + "qQ"
_PATTERN_PART = re.compile(r"'(?:[^']|'')*'|([A-Za-z])\1*|[^A-Za-z']+")
_SEPARATOR = "\x01"
_WEEKDAYS = "mon(?:day)?|tue(?:sday)?|wed(?:nesday)?|thu(?:rsday)?|fri(?:day)?|sat(?:urday)?|sun(?:day)?"


def split_pattern(pattern: str) -> list[tuple[str, str]]:
    """Return the parts of a pattern: a letter and its repetitions, or an empty letter and a text; both as Spark writes them."""
    found = []
    for match in _PATTERN_PART.finditer(pattern):
        letter, text = match[1] or "", match[0]
        if not letter and not text.startswith("'"):
            text = re.sub(r"[#{}]+", r"'\g<0>'", text)  # reserved in Spark's patterns
        found.append((letter, "a" if letter == "a" else text))
    return found


def format_timestamp(moment: Column, pattern: str) -> Column:
    """Return a timestamp as text (UTC)."""
    from pyspark.sql import functions as F

    parts, of_spark = [], ""
    for letter, text in split_pattern(pattern):
        if not letter or letter not in CALENDAR:
            of_spark += text
            continue
        if of_spark:
            parts.append(F.date_format(moment, of_spark))
        parts.append(_format_calendar(moment, letter, len(text)))
        of_spark = ""
    if of_spark:
        parts.append(F.date_format(moment, of_spark))
    return parts[0] if len(parts) == 1 else F.concat(*parts)


def find_unreadable_letters(pattern: str) -> str:
    """Return the letters because of which a pattern cannot parse texts: a weekday anywhere but at the beginning, and some
    others."""
    letters = [letter for letter, _ in split_pattern(pattern)]
    if not any(letter not in ("", "E") for letter in letters):
        return "E"
    return "".join(sorted({c for n, c in enumerate(letters) if c and (c in _WRITE_ONLY or (c == "E" and n))}))


def parse_timestamp(text: Column, pattern: str, now: datetime | None = None) -> Column:
    """Return the timestamp of a text (UTC); null if the text does not fit the pattern.

    :param now: years of two digits are among the 80 before this time and the 20 after it; default: the current time.
    """
    from pyspark.sql import functions as F

    found = split_pattern(pattern)
    if found[0][0] == "E":  # any weekday is accepted: the date decides
        text, found = F.regexp_extract(text, rf"(?is)\A(?:{_WEEKDAYS})(.*)\z", 1), found[1:]
    text, found = _separate_fraction(text, found)
    moment = F.try_to_timestamp(text, F.lit("".join(piece for _, piece in found)))
    if ("y", "yy") not in found:
        return moment
    now = now or datetime.now(timezone.utc)
    last = F.timestamp_seconds(F.lit(int(now.replace(year=now.year + 20, day=min(now.day, 28)).timestamp())))
    return F.when(moment >= last, moment - F.make_ym_interval(F.lit(100))).otherwise(moment)


def _separate_fraction(text: Column, found: list[tuple[str, str]]) -> tuple[Column, list[tuple[str, str]]]:
    """Separate a fraction from the digits before it (``ssSSS``): Spark does not find where it begins."""
    from pyspark.sql import functions as F

    at = next((n for n, (letter, _) in enumerate(found) if letter == "S"), 0)
    first = at
    while first and found[first - 1][0] and found[first - 1][0] in "yMdHhKkmsD":
        first -= 1
    if first == at:
        return text, found
    before, digits = sum(len(piece) for _, piece in found[first:at]), len(found[at][1])
    text = F.regexp_replace(text, rf"(?<![0-9])([0-9]{{{before}}})([0-9]{{{digits}}})(?![0-9])", f"$1{_SEPARATOR}$2")
    return text, [*found[:at], ("", _SEPARATOR), *found[at:]]


def _format_calendar(moment: Column, letter: str, count: int) -> Column:
    from pyspark.sql import functions as F

    day = F.to_date(moment)
    saturday = F.date_add(day, F.lit(7) - F.dayofweek(day))  # the week belongs to the year of its Saturday
    if letter == "Y":
        year = F.year(saturday)
        return _pad(F.pmod(year, F.lit(100)) if count == 2 else year, count)
    if letter == "u":
        return _pad(F.weekday(day) + 1, count)
    if letter == "W":
        return _pad(_count_weeks(F.dayofmonth(day) + F.dayofweek(F.trunc(day, "month")) - 1), count)
    return _pad(_count_weeks(F.dayofyear(saturday) if letter == "w" else F.dayofmonth(day)), count)


def _count_weeks(days: Column) -> Column:
    """Return a number of days in weeks, rounded up."""
    from pyspark.sql import functions as F

    return F.call_function("div", days + 6, F.lit(7))


def _pad(number: Column, count: int) -> Column:
    from pyspark.sql import functions as F

    text = number.cast("string")
    return F.when(F.length(text) < count, F.lpad(text, count, "0")).otherwise(text)


def find_date_format_problems(where: str, pattern: object) -> list[Problem]:
    """Return the problems of a date pattern."""
    if not isinstance(pattern, str) or not pattern.strip():
        return [Problem(where, f"found {pattern!r}; expected a date pattern, for instance `yyyy-MM-dd HH:mm:ss`", "Give one")]
    if pattern.count("'") % 2:
        return [Problem(where, f"`{pattern}` has a quote that does not end", "Write '' for a quote")]
    found = split_pattern(pattern)
    unknown = sorted({letter for letter, _ in found if letter} - _DATE_LETTERS)
    if unknown:
        what = f"`{pattern}` has the letters {', '.join(unknown)}, which no date pattern of Spark's knows"
        return [Problem(where, what, "Put text into '...'; see Spark's datetime patterns")]
    problems = []
    for letter, text in found:
        wrong = len(text) != 2 if letter == "V" else len(text) > _MAX_LENGTHS.get(letter, len(text))
        if wrong:
            what = f"`{pattern}` has `{text}`; expected {'' if letter == 'V' else 'at most '}`{letter * _MAX_LENGTHS[letter]}`"
            problems.append(Problem(where, what, "Correct it"))
    optional = re.sub(r"[^\[\]]", "", "".join(text for letter, text in found if not letter and text[0] != "'"))
    while "[]" in optional:
        optional = optional.replace("[]", "")
    if optional:
        problems.append(Problem(where, f"`{pattern}` has a bracket without the other one", "Put text into '...'"))
    return problems


TYPES = {
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    "float32": "float",
    "float64": "double",
    "boolean": "boolean",
    "string": "string",
}
"""Spark's names of Connect's types."""

_INTEGERS = ("int8", "int16", "int32", "int64")


@dataclass(frozen=True)
class Cast(NullDefaultTransform, KeyOrValueTransform):
    """Casts fields, or a whole key or value, to other types.

    A number that becomes an integer loses its fraction; booleans are 1 and 0; a number is true unless its whole part is 0; a text
    is true if it is ``true``, in any case; dates are days and timestamps milliseconds since 1970; binaries become base64. A value
    that does not fit is the record's error (Connect truncates numbers instead). Nulls stay null.

    :param spec: field -> type, ``"id:int64,price:float64"``, a list of such pairs, or a mapping; one type casts the whole key or
        value. The types are int8, int16, int32, int64, float32, float64, boolean, string, in any case.
    """

    spec: str | Sequence[str] | Mapping[str, str]

    def validate(self, where: str) -> list[Problem]:
        problems = super().validate(where)
        known = ", ".join(TYPES)
        if not self.spec or not isinstance(self.spec, (str, Sequence, Mapping)):
            what = f"found {self.spec!r}; expected `field:type` pairs, or one type for the whole {self.of}"
            return [*problems, Problem(f"{where}.spec", what, f"The types are {known}")]
        try:
            wanted = self._parse_wanted()
        except ValueError as error:
            return [*problems, Problem(f"{where}.spec", str(error), f"The types are {known}")]
        for name, target in wanted.items():
            if target not in TYPES:
                what = f"found the type {target!r}{f' of the field `{name}`' if name else ''}; expected one of {known}"
                problems.append(Problem(f"{where}.spec", what, "Correct it"))
        return problems

    def _parse_wanted(self) -> dict[str, str]:
        """Return field -> type; an empty name stands for the whole key or value."""
        if isinstance(self.spec, Mapping):
            if "" in self.spec and len(self.spec) > 1:
                raise ValueError(f"found {self.spec!r}; expected fields, or one type for the whole {self.of}")
            return {name: str(target).lower() for name, target in self.spec.items()}
        given = parse_names(self.spec)
        if not given:
            raise ValueError(f"found {self.spec!r}; expected `field:type` pairs, or one type for the whole {self.of}")
        if len(given) == 1 and isinstance(given[0], str) and ":" not in given[0]:
            return {"": given[0].lower()}
        return {name: target.lower() for name, target in parse_pairs(given).items()}

    def make_changes(self, record: RecordSchema) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        wanted = self._parse_wanted()
        whole = F.col(self.of)
        if "" in wanted:
            had = record.get_type_of(self.of)
            new = self._cast(whole, had, wanted[""], f"the {self.of}")
            return {self.of: new, "error": self._make_error(whole, new, had, wanted[""], f"the {self.of}")}
        fields = record.require_fields(self.of, "spec", list(wanted))
        made = {n: self._cast(whole.getField(n), fields[n], target, f"the field `{n}`") for n, target in wanted.items()}
        errors = [
            self._make_error(whole.getField(n), made[n], fields[n], target, f"the field `{n}`") for n, target in wanted.items()
        ]
        all_fields = {n: made.get(n, whole.getField(n)) for n in fields}
        return {self.of: rebuild_struct(whole, all_fields), "error": F.coalesce(*errors)}

    def _make_error(self, column: Column, made: Column, had: DataType, target: str, what: str) -> Column:
        from pyspark.sql import functions as F

        failed = column.isNotNull() & made.isNull()
        return F.when(failed, F.concat(F.lit(f"{what} is "), quote_value(column, had), F.lit(f", expected {target}")))

    def _cast(self, column: Column, had: DataType, target: str, what: str) -> Column:
        """Return the value in another type; null if it does not fit.

        :raises ValidationError: there is no such cast.
        """
        from pyspark.sql import types as t

        simple = (t.NumericType, t.BooleanType, t.StringType, t.DateType, t.TimestampType, t.TimestampNTZType, t.NullType)
        if not isinstance(had, (*simple, t.BinaryType)) or (isinstance(had, t.BinaryType) and target != "string"):
            found = f"{what} is {had.simpleString()}, which cannot be cast to {target}"
            raise ValidationError([Problem("spec", found, "Cast a field of it, or write Sql(columns={...})")])
        if target == "string":
            return to_text(column, had)
        return _to_boolean(column, had) if target == "boolean" else _to_number(column, had, target)


def _convert_temporal_to_number(column: Column, had: DataType) -> tuple[Column, DataType]:
    """Return dates and times as Connect's numbers, and all other values unchanged; and the resulting type."""
    from pyspark.sql import functions as F
    from pyspark.sql import types as t

    if isinstance(had, t.DateType):
        return F.unix_date(column), t.IntegerType()
    if isinstance(had, (t.TimestampType, t.TimestampNTZType)):
        return F.unix_millis(column.cast("timestamp")), t.LongType()
    return column, had


def _to_boolean(column: Column, had: DataType) -> Column:
    from pyspark.sql import functions as F
    from pyspark.sql import types as t

    if isinstance(had, (t.BooleanType, t.NullType)):
        return column.cast("boolean")
    if isinstance(had, t.StringType):
        return F.lower(column) == F.lit("true")
    column, had = _convert_temporal_to_number(column, had)
    whole = F.abs(column.cast("double") if isinstance(had, t.IntegralType) else column) >= 1
    return whole & ~F.isnan(column) if isinstance(had, (t.FloatType, t.DoubleType)) else whole


def _to_number(column: Column, had: DataType, target: str) -> Column:
    from pyspark.sql import functions as F
    from pyspark.sql import types as t

    column, had = _convert_temporal_to_number(column, had)
    made = column.try_cast(TYPES[target])
    if isinstance(had, t.StringType) and target in _INTEGERS:
        return F.when(column.rlike(r"\A[+-]?[0-9]+\z"), made)
    return made


TargetType = Literal["string", "unix", "Date", "Time", "Timestamp"]
Precision = Literal["seconds", "milliseconds", "microseconds", "nanoseconds"]

_MAX_MILLIS = 253402300800000  # the first millisecond of the year 10000, where timestamps end


@dataclass(frozen=True)
class TimestampConverter(NullDefaultTransform, KeyOrValueTransform):
    """Converts a timestamp into a text, a number since 1970 (UTC), or Spark's date or timestamp. Nulls stay null.

    The value may be a text, an integer, a date or a timestamp, according to its type. A value that cannot be read is the
    record's error.

    :param target_type: ``string``, ``unix`` (bigint), ``Date`` (date), ``Time`` (a timestamp on 1970-01-01: Spark 4.0 has no
        type for times of day) or ``Timestamp`` (timestamp).
    :param field: the field; empty (default) if the whole key or value is the timestamp.
    :param format: the pattern of texts that are read or written: one of Spark's datetime patterns (the same as Java's
        SimpleDateFormat for whole milliseconds and coarser; its week years and weeks can be written, too). Default empty.
    :param unix_precision: the unit of numbers that are read or written. Numbers that are read are truncated to milliseconds, as
        in Connect. Default ``milliseconds``.
    """

    target_type: TargetType
    field: str = ""
    format: str = ""
    unix_precision: Precision = "milliseconds"

    def validate(self, where: str) -> list[Problem]:
        problems = super().validate(where)
        for option, allowed in (("target_type", get_args(TargetType)), ("unix_precision", get_args(Precision))):
            if getattr(self, option) not in allowed:
                what = f"found {getattr(self, option)!r}; expected one of {', '.join(allowed)}"
                problems.append(Problem(f"{where}.{option}", what, "Correct it"))
        if not isinstance(self.field, str):
            problems.append(Problem(f"{where}.field", f"found {self.field!r}; expected a name, or an empty text", "Correct it"))
        if self.format or self.target_type == "string":
            problems += find_date_format_problems(f"{where}.format", self.format)
        return problems

    def make_changes(self, record: RecordSchema) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        whole = F.col(self.of)
        if not self.field:
            had = record.get_type_of(self.of)
            made = self._format_moment(self._read(whole, had, f"the {self.of}"))
            return {self.of: made, "error": self._make_error(whole, made, had, f"the {self.of}")}
        fields = record.require_fields(self.of, "field", [self.field])
        had, column = fields[self.field], whole.getField(self.field)
        made = self._format_moment(self._read(column, had, f"the field `{self.field}`"))
        all_fields = {n: made if n == self.field else whole.getField(n) for n in fields}
        return {
            self.of: rebuild_struct(whole, all_fields),
            "error": self._make_error(column, made, had, f"the field `{self.field}`"),
        }

    def _make_error(self, column: Column, made: Column, had: DataType, what: str) -> Column:
        from pyspark.sql import functions as F
        from pyspark.sql.types import StringType

        expected = f"a text like {self.format}" if isinstance(had, StringType) else f"{self.unix_precision} since 1970"
        if self.target_type == "unix":
            expected += f" that {self.unix_precision} can count"
        failed = column.isNotNull() & made.isNull()
        return F.when(failed, F.concat(F.lit(f"{what} is "), quote_value(column, had), F.lit(f", expected {expected}")))

    def _read(self, column: Column, had: DataType, what: str) -> Column:
        """Return the value as a timestamp; null if it cannot be read as one."""
        from pyspark.sql import functions as F
        from pyspark.sql import types as t

        if isinstance(had, t.StringType):
            if not self.format:
                found = f"{what} is a string, and there is no format to read it by"
                raise ValidationError([Problem("format", found, "Give one, for instance `yyyy-MM-dd HH:mm:ss`")])
            if letters := find_unreadable_letters(self.format):
                found = f"{what} is a string, which cannot be read by `{self.format}`: {', '.join(letters)}"
                raise ValidationError([Problem("format", found, "Leave these letters out; `E` may only stand at the beginning")])
            return parse_timestamp(column, self.format)
        if isinstance(had, t.IntegralType):
            millis = self._to_millis(column.cast("bigint"))
            return F.when(F.abs(millis.cast("double")) < _MAX_MILLIS, F.timestamp_millis(millis))
        if isinstance(had, (t.DateType, t.TimestampType, t.TimestampNTZType, t.NullType)):
            return column.cast("timestamp")
        found = f"{what} is {had.simpleString()}; expected a string, an integer, a date or a timestamp"
        raise ValidationError([Problem("field", found, "Name another field")])

    def _to_millis(self, column: Column) -> Column:
        from pyspark.sql import functions as F

        if self.unix_precision == "seconds":
            return F.try_multiply(column, F.lit(1000).cast("bigint"))
        per_milli = {"milliseconds": 1, "microseconds": 1000, "nanoseconds": 1000000}[self.unix_precision]
        return _divide(column, per_milli)

    def _format_moment(self, moment: Column) -> Column:
        from pyspark.sql import functions as F

        if self.target_type == "string":
            return format_timestamp(moment, self.format)
        if self.target_type == "Date":
            return F.to_date(moment)
        if self.target_type == "Time":
            micros = F.unix_micros(moment)
            return F.timestamp_micros(F.pmod(micros, F.lit(86400000000).cast("bigint")))
        if self.target_type == "Timestamp":
            return moment
        if self.unix_precision == "nanoseconds":
            return F.try_multiply(F.unix_micros(moment), F.lit(1000).cast("bigint"))
        if self.unix_precision == "microseconds":
            return F.unix_micros(moment)
        millis = F.unix_millis(moment)
        return millis if self.unix_precision == "milliseconds" else _divide(millis, 1000)


def _divide(column: Column, by: int) -> Column:
    """Return an exact integer division, rounded towards 0."""
    from pyspark.sql import functions as F

    if by == 1:
        return column
    divisor = F.lit(by).cast("bigint")
    return F.call_function("div", column, divisor)


INSTANT = "yyyy-MM-dd'T'HH:mm:ss.SSS'Z'"


def to_text(column: Column, type_: DataType) -> Column:
    """Return a value in text: binaries in base64, timestamps in ISO 8601 (UTC, milliseconds), nested values in JSON."""
    from pyspark.sql import functions as F
    from pyspark.sql import types as t

    if isinstance(type_, t.BinaryType):
        return F.translate(F.base64(column), "\r\n", "")  # some versions of Spark break long lines
    if isinstance(type_, (t.TimestampType, t.TimestampNTZType)):
        return F.date_format(column, INSTANT)
    if isinstance(type_, (t.ArrayType, t.MapType, t.StructType)):
        return F.to_json(column, {"ignoreNullFields": "false"})
    if isinstance(type_, (t.FloatType, t.DoubleType)):
        return _format_plain_decimal(column)
    return column.cast("string")


def _format_plain_decimal(number: Column) -> Column:
    """Return a float as Java writes it, but up to 10^15 without an exponent: ``63521704.02``, as in Connect's documentation."""
    from pyspark.sql import functions as F

    text = number.cast("string")
    # From Java's text, which has the digits that users see: the binary number itself is not exact.
    digits = F.regexp_replace(text.try_cast("decimal(38,20)").cast("string"), r"(\.[0-9]+?)0+$", "$1")
    return F.when((F.abs(number) >= 1e7) & (F.abs(number) < 1e15), digits).otherwise(text)


def quote_value(column: Column, type_: DataType) -> Column:
    """Return a value for a message, truncated to 100 characters."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import StringType

    text = F.substring(to_text(column, type_), 1, 100)
    return F.concat(F.lit('"'), text, F.lit('"')) if isinstance(type_, StringType) else text
