"""Date patterns: timestamps as texts, by the patterns of Java's SimpleDateFormat that Connect uses.

Spark's own patterns differ: what Spark does not know is computed here, as far as possible.
"""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import Problem

if TYPE_CHECKING:
    from pyspark.sql import Column


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


def pattern_parts(pattern: str) -> list[tuple[str, str]]:
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
    for letter, text in pattern_parts(pattern):
        if not letter or letter not in CALENDAR:
            of_spark += text
            continue
        if of_spark:
            parts.append(F.date_format(moment, of_spark))
        parts.append(_calendar(moment, letter, len(text)))
        of_spark = ""
    if of_spark:
        parts.append(F.date_format(moment, of_spark))
    return parts[0] if len(parts) == 1 else F.concat(*parts)


def unreadable_letters(pattern: str) -> str:
    """Return the letters that keep a pattern from reading texts: a weekday may only be the first, some others may not occur."""
    letters = [letter for letter, _ in pattern_parts(pattern)]
    if not any(letter not in ("", "E") for letter in letters):
        return "E"
    return "".join(sorted({c for n, c in enumerate(letters) if c and (c in _WRITE_ONLY or (c == "E" and n))}))


def parse_timestamp(text: Column, pattern: str, now: datetime | None = None) -> Column:
    """Return the timestamp of a text (UTC); null if the text does not fit the pattern.

    :param now: years of two digits are among the 80 before it and the 20 behind it; default: the current time.
    """
    from pyspark.sql import functions as F

    found = pattern_parts(pattern)
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


def _calendar(moment: Column, letter: str, count: int) -> Column:
    from pyspark.sql import functions as F

    day = F.to_date(moment)
    saturday = F.date_add(day, F.lit(7) - F.dayofweek(day))  # the week belongs to the year of its Saturday
    if letter == "Y":
        year = F.year(saturday)
        return _padded(F.pmod(year, F.lit(100)) if count == 2 else year, count)
    if letter == "u":
        return _padded(F.weekday(day) + 1, count)
    if letter == "W":
        return _padded(_weeks(F.dayofmonth(day) + F.dayofweek(F.trunc(day, "month")) - 1), count)
    return _padded(_weeks(F.dayofyear(saturday) if letter == "w" else F.dayofmonth(day)), count)


def _weeks(days: Column) -> Column:
    """Return the number of weeks that so many days have begun."""
    from pyspark.sql import functions as F

    return F.call_function("div", days + 6, F.lit(7))


def _padded(number: Column, count: int) -> Column:
    from pyspark.sql import functions as F

    text = number.cast("string")
    return F.when(F.length(text) < count, F.lpad(text, count, "0")).otherwise(text)


def date_format_problems(where: str, pattern: object) -> list[Problem]:
    """Return what is wrong with a date pattern."""
    if not isinstance(pattern, str) or not pattern.strip():
        return [Problem(where, f"found {pattern!r}; expected a date pattern, for instance `yyyy-MM-dd HH:mm:ss`", "Give one")]
    if pattern.count("'") % 2:
        return [Problem(where, f"`{pattern}` has a quote that does not end", "Write '' for a quote")]
    found = pattern_parts(pattern)
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
