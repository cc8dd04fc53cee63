"""Moments as texts, by the patterns of Java's SimpleDateFormat that Connect has, as far as Spark can be made to follow them."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column

CALENDAR = "YwWuF"
"""Letters that Spark does not know, or takes for something else. A week begins on a Sunday, the first one has the 1st of January,
as in Java's default locale."""

_NOT_READ = CALENDAR + "qQ"
_PIECE = re.compile(r"'(?:[^']|'')*'|([A-Za-z])\1*|[^A-Za-z']+")
_GAP = "\x01"
_DAYS = "mon(?:day)?|tue(?:sday)?|wed(?:nesday)?|thu(?:rsday)?|fri(?:day)?|sat(?:urday)?|sun(?:day)?"


def pieces(pattern: str) -> list[tuple[str, str]]:
    """What a pattern consists of: a letter and how often it stands there, or no letter and a text, as Spark has it."""
    found = []
    for match in _PIECE.finditer(pattern):
        letter, text = match[1] or "", match[0]
        if not letter and not text.startswith("'"):
            text = re.sub(r"[#{}]+", r"'\g<0>'", text)  # reserved by Spark
        found.append((letter, "a" if letter == "a" else text))
    return found


def written(moment: Column, pattern: str) -> Column:
    """A timestamp as text (UTC)."""
    from pyspark.sql import functions as F

    parts, of_spark = [], ""
    for letter, text in pieces(pattern):
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


def unreadable(pattern: str) -> str:
    """The letters by which no text can be read: a weekday only stands at the beginning, others nowhere."""
    letters = [letter for letter, _ in pieces(pattern)]
    if not any(letter not in ("", "E") for letter in letters):
        return "E"
    return "".join(sorted({c for n, c in enumerate(letters) if c and (c in _NOT_READ or (c == "E" and n))}))


def read(text: Column, pattern: str, now: datetime | None = None) -> Column:
    """The timestamp that a text tells (UTC); null where it tells none.

    :param now: years of two digits are among the 80 before it and the 20 behind it; default is the present.
    """
    from pyspark.sql import functions as F

    found = pieces(pattern)
    if found[0][0] == "E":  # that it is a weekday counts, which one does not: the date says that
        text, found = F.regexp_extract(text, rf"(?is)\A(?:{_DAYS})(.*)\z", 1), found[1:]
    text, found = _apart(text, found)
    moment = F.try_to_timestamp(text, F.lit("".join(piece for _, piece in found)))
    if ("y", "yy") not in found:
        return moment
    now = now or datetime.now(timezone.utc)
    last = F.timestamp_seconds(F.lit(int(now.replace(year=now.year + 20, day=min(now.day, 28)).timestamp())))
    return F.when(moment >= last, moment - F.make_ym_interval(F.lit(100))).otherwise(moment)


def _apart(text: Column, found: list[tuple[str, str]]) -> tuple[Column, list[tuple[str, str]]]:
    """A fraction that follows other digits (``ssSSS``), away from them: Spark does not see where it begins."""
    from pyspark.sql import functions as F

    at = next((n for n, (letter, _) in enumerate(found) if letter == "S"), 0)
    first = at
    while first and found[first - 1][0] and found[first - 1][0] in "yMdHhKkmsD":
        first -= 1
    if first == at:
        return text, found
    before, digits = sum(len(piece) for _, piece in found[first:at]), len(found[at][1])
    text = F.regexp_replace(text, rf"(?<![0-9])([0-9]{{{before}}})([0-9]{{{digits}}})(?![0-9])", f"$1{_GAP}$2")
    return text, [*found[:at], ("", _GAP), *found[at:]]


def _calendar(moment: Column, letter: str, count: int) -> Column:
    from pyspark.sql import functions as F

    day = F.to_date(moment)
    saturday = F.date_add(day, F.lit(7) - F.dayofweek(day))  # its year is the week's
    if letter == "Y":
        year = F.year(saturday)
        return _padded(F.pmod(year, F.lit(100)) if count == 2 else year, count)
    if letter == "u":
        return _padded(F.weekday(day) + 1, count)
    if letter == "W":
        return _padded(_weeks(F.dayofmonth(day) + F.dayofweek(F.trunc(day, "month")) - 1), count)
    return _padded(_weeks(F.dayofyear(saturday) if letter == "w" else F.dayofmonth(day)), count)


def _weeks(days: Column) -> Column:
    """How many weeks so many days have begun."""
    from pyspark.sql import functions as F

    return F.call_function("div", days + 6, F.lit(7))


def _padded(number: Column, count: int) -> Column:
    from pyspark.sql import functions as F

    text = number.cast("string")
    return F.when(F.length(text) < count, F.lpad(text, count, "0")).otherwise(text)
