"""What can be said of Java's regular expressions and date patterns without Java."""

from __future__ import annotations

import re

from airflow_kafka_spark.errors import Problem

# Complaints of Python's that Java has as well; all others may be about what only Java knows.
_WRONG_IN_BOTH = (
    "missing )",
    "unterminated subpattern",
    "unbalanced parenthesis",
    "unterminated character set",
    "nothing to repeat",
)

_DATE_LETTERS = frozenset("GyMLdDQqEFahKkHmsSVzOXxZ")


def regex_problems(where: str, regex: object) -> list[Problem]:
    """What is certainly wrong with a regular expression of Java's."""
    if not isinstance(regex, str) or not regex:
        return [Problem(where, f"found {regex!r}; expected a regular expression", "Correct it")]
    reason = _complaint(regex)
    return [Problem(where, f"`{regex}` is no regular expression: {reason}", "Correct it")] if reason else []


def replacement_problems(where: str, regex: object, replacement: object) -> list[Problem]:
    """What is wrong with what replaces a match: ``$1`` is a group, ``\\$`` a dollar sign."""
    if not isinstance(replacement, str):
        return [Problem(where, f"found {replacement!r}; expected a text", "Correct it")]
    bare = re.sub(r"\\.", "", replacement, flags=re.DOTALL)
    if bare.endswith("\\") or re.search(r"\$(?![0-9{])", bare):
        return [Problem(where, f"found {replacement!r}; `$` needs a group's number, `\\` a character", r"Write \$ or \\")]
    try:
        groups = re.compile(str(regex)).groups
    except re.error:
        return []
    missing = [n for n in re.findall(r"\$([0-9])", bare) if int(n) > groups]
    return [Problem(where, f"found ${n}; expected a group of the {groups} that `regex` has", "Correct it") for n in missing]


def whole_match(regex: str) -> str:
    """A regular expression that matches the whole text or nothing; its groups keep their numbers."""
    return rf"\A(?:{regex})\z"


def date_format_problems(where: str, pattern: object) -> list[Problem]:
    """What is wrong with a date pattern of Spark's."""
    if not isinstance(pattern, str) or not pattern.strip():
        return [Problem(where, f"found {pattern!r}; expected a date pattern, for instance `yyyy-MM-dd HH:mm:ss`", "Give one")]
    if pattern.count("'") % 2:
        return [Problem(where, f"`{pattern}` has a quote that does not end", "Write '' for a quote")]
    bare = re.sub(r"'[^']*'", "", pattern)
    unknown = sorted({c for c in bare if c.isascii() and c.isalpha()} - _DATE_LETTERS)
    if not unknown:
        return []
    what = f"`{pattern}` has the letters {', '.join(unknown)}, which no date pattern of Spark's knows"
    return [Problem(where, what, "Put text into '...'; see Spark's datetime patterns")]


def _complaint(regex: str) -> str:
    if r"\Q" in regex:
        return ""
    try:
        re.compile(regex)
    except re.error as error:
        return error.msg if error.msg.startswith(_WRONG_IN_BOTH) else ""
    return ""
