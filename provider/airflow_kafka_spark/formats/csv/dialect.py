"""The dialect of CSV records: delimiter, quotes, nulls and the patterns of timestamps."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from airflow_kafka_spark.formats.text import (
    BadValue,
    parse_micros,
    shorten,
)

FromField = Callable[[str], Any]
"""Returns the column's value of a field's text; raises :class:`.BadValue`."""

_PARTS = {"yyyy": "[0-9]{4}", "X": "Z|[-+][0-9]{2}(?:[0-9]{2})?", "XX": "Z|[-+][0-9]{4}", "XXX": "Z|[-+][0-9]{2}:[0-9]{2}"}
_PARTS |= dict.fromkeys(("MM", "dd", "HH", "mm", "ss"), "[0-9]{2}")
_PATTERN = re.compile(r"'((?:[^']|'')*)'|(([A-Za-z])\3*)|([^A-Za-z'\[\]{}#\"\\])", re.S)


@dataclass(frozen=True)
class CsvDialect:
    """The characters of a CSV record.

    :param delimiter: the character between fields.
    :param quote: the character around fields.
    :param escape: the character before a quote within quotes; the quote itself if quotes are doubled.
    :param null: the unquoted text of a null.
    """

    delimiter: str = ","
    quote: str = '"'
    escape: str = '"'
    null: str = ""

    @property
    def doubled(self) -> bool:
        """True if a quote within quotes is doubled."""
        return self.escape == self.quote

    def quoted(self, text: str) -> str:
        """Return a text in quotes."""
        if not self.doubled:
            text = text.replace(self.escape, self.escape * 2)
        return f"{self.quote}{text.replace(self.quote, self.escape + self.quote)}{self.quote}"


# --- values ---------------------------------------------------------------------------------------------------------------


def timestamp_reader(pattern: str) -> FromField:
    """Return the reader of timestamps in a Java pattern: ``yyyy MM dd HH mm ss``, up to nine ``S``, ``X`` to ``XXX``, texts in
    single quotes; without a zone it is UTC.

    :raises ValueError: the pattern has something else, one part twice, or no day.
    """
    if '"' in pattern or "\\" in pattern:
        raise ValueError("a double quote or a backslash")
    expression, seen, i = "", set(), 0
    while i < len(pattern):
        match = _PATTERN.match(pattern, i)
        if match is None:
            raise ValueError(f"`{pattern[i]}` at character {i + 1}")
        literal, letters, _, other = match.groups()
        if letters is not None:
            name = "S" if set(letters) == {"S"} and len(letters) <= 9 else "X" if letters in ("X", "XX", "XXX") else letters
            part = f"[0-9]{{{len(letters)}}}" if name == "S" else _PARTS.get(letters)
            if part is None or name in seen:
                raise ValueError(f"`{letters}` at character {i + 1}")
            seen.add(name)
            expression += f"(?P<{name}>{part})"
        else:
            expression += re.escape(other if other is not None else literal.replace("''", "'") or "'")
        i = match.end()
    if not {"yyyy", "MM", "dd"} <= seen:
        raise ValueError("no yyyy, MM and dd")
    fullmatch = re.compile(expression, re.S).fullmatch

    def convert(found: str) -> int:
        match = fullmatch(found)
        try:
            if match is None:
                raise BadValue("")
            part = {"HH": "00", "mm": "00", "ss": "00", "S": "0", "X": ""} | match.groupdict()
            day = f"{part['yyyy']}-{part['MM']}-{part['dd']}"
            return parse_micros(f"{day}T{part['HH']}:{part['mm']}:{part['ss']}.{part['S']}{part['X']}", "timestamp", zoned=True)
        except BadValue:
            raise BadValue(f'found "{shorten(found)}", expected timestamp: {pattern}') from None

    return convert
