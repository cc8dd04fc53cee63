"""What can be said of Java's regular expressions and date patterns without Java."""

from __future__ import annotations

import re

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.transforms.moments import CALENDAR, pieces

# Complaints of Python's that Java has as well; all others may be about what only Java knows.
_WRONG_IN_BOTH = (
    "missing )",
    "unterminated subpattern",
    "unbalanced parenthesis",
    "unterminated character set",
    "nothing to repeat",
    "bad character range",
    "min repeat greater than max repeat",
)

_DATE_LETTERS = frozenset("GyMLdDQqEahKkHmsSVzOXxZ" + CALENDAR)
_AT_MOST = {**dict.fromkeys("dhHkKms", 2), **dict.fromkeys("GMLEQqzO", 4), "y": 6, "D": 3, "S": 9, "V": 2, "X": 5, "x": 5, "Z": 5}


def regex_problems(where: str, regex: object) -> list[Problem]:
    """What is certainly wrong with a regular expression of Java's."""
    if not isinstance(regex, str) or not regex:
        return [Problem(where, f"found {regex!r}; expected a regular expression", "Correct it")]
    reason = _complaint(regex)
    return [Problem(where, f"`{regex}` is no regular expression: {reason}", "Correct it")] if reason else []


def java_problems(where: str, regex: str) -> list[Problem]:
    """What Java itself says of a regular expression, where Spark runs beside us (not over Spark Connect)."""
    from pyspark.sql import SparkSession

    java = getattr(SparkSession.getActiveSession(), "_jvm", None)
    if java is None:
        return []
    try:
        java.java.util.regex.Pattern.compile(regex)
    except Exception as error:
        said = str(getattr(error, "java_exception", error)).partition("\n")[0].rpartition("Exception: ")[2]
        return [Problem(where, f"`{regex}` is no regular expression: {said}", "Correct it")]
    return []


def replacement_problems(where: str, regex: object, replacement: object) -> list[Problem]:
    """What is wrong with what replaces a match: ``$1`` is a group, ``\\$`` a dollar sign."""
    if not isinstance(replacement, str):
        return [Problem(where, f"found {replacement!r}; expected a text", "Correct it")]
    bare = re.sub(r"\\.", "", replacement, flags=re.DOTALL)
    if bare.endswith("\\") or re.search(r"\$(?![0-9{])", bare):
        return [Problem(where, f"found {replacement!r}; `$` needs a group's number, `\\` a character", r"Write \$ or \\")]
    named = set(re.findall(r"\(\?<([A-Za-z][A-Za-z0-9]*)>", str(regex)))
    for name in re.findall(r"\$\{([^}]*)\}?", bare):
        if name not in named:
            action = "Correct it; groups are named by `(?<name>...)`"
            return [Problem(where, f"found ${{{name}}}; expected a group that `regex` names", action)]
    try:
        groups = re.compile(str(regex)).groups
    except re.error:
        return []
    missing = [n for n in re.findall(r"\$([0-9])", bare) if int(n) > groups]
    return [Problem(where, f"found ${n}; expected a group of the {groups} that `regex` has", "Correct it") for n in missing]


def whole_match(regex: str) -> str:
    """A regular expression that matches the whole text or nothing; its groups keep their numbers."""
    return rf"{match_at_beginning(regex)}\z"


def match_at_beginning(regex: str) -> str:
    """A regular expression that matches at the beginning of a text only; its groups keep their numbers."""
    quoting = [said for said in re.findall(r"\\(.)", regex, re.DOTALL) if said in "QE"]
    end = r"\E" if quoting[-1:] == ["Q"] else ""  # a quotation may go on to the end
    return rf"\A(?:{regex}{end})"


def date_format_problems(where: str, pattern: object) -> list[Problem]:
    """What is wrong with a date pattern, as :func:`~airflow_kafka_spark.transforms.moments.written` takes it."""
    if not isinstance(pattern, str) or not pattern.strip():
        return [Problem(where, f"found {pattern!r}; expected a date pattern, for instance `yyyy-MM-dd HH:mm:ss`", "Give one")]
    if pattern.count("'") % 2:
        return [Problem(where, f"`{pattern}` has a quote that does not end", "Write '' for a quote")]
    found = pieces(pattern)
    unknown = sorted({letter for letter, _ in found if letter} - _DATE_LETTERS)
    if unknown:
        what = f"`{pattern}` has the letters {', '.join(unknown)}, which no date pattern of Spark's knows"
        return [Problem(where, what, "Put text into '...'; see Spark's datetime patterns")]
    problems = []
    for letter, text in found:
        wrong = len(text) != 2 if letter == "V" else len(text) > _AT_MOST.get(letter, len(text))
        if wrong:
            what = f"`{pattern}` has `{text}`; expected {'' if letter == 'V' else 'at most '}`{letter * _AT_MOST[letter]}`"
            problems.append(Problem(where, what, "Correct it"))
    optional = re.sub(r"[^\[\]]", "", "".join(text for letter, text in found if not letter and text[0] != "'"))
    while "[]" in optional:
        optional = optional.replace("[]", "")
    if optional:
        problems.append(Problem(where, f"`{pattern}` has a bracket without the other one", "Put text into '...'"))
    return problems


def _complaint(regex: str) -> str:
    if r"\Q" in regex:
        return ""
    try:
        re.compile(regex)
    except re.error as error:
        return error.msg if error.msg.startswith(_WRONG_IN_BOTH) else ""
    return ""
