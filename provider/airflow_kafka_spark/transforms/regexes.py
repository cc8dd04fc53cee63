"""Checks of Java's regular expressions, as far as that is possible without Java."""

from __future__ import annotations

import re

from airflow_kafka_spark.errors import Problem

# Errors of Python's parser that Java's raises, too. All others may concern syntax that only Java has.
_WRONG_IN_BOTH = (
    "missing )",
    "unterminated subpattern",
    "unbalanced parenthesis",
    "unterminated character set",
    "nothing to repeat",
    "bad character range",
    "min repeat greater than max repeat",
)


def regex_problems(where: str, regex: object) -> list[Problem]:
    """Return what is certainly wrong with a Java regular expression."""
    if not isinstance(regex, str) or not regex:
        return [Problem(where, f"found {regex!r}; expected a regular expression", "Correct it")]
    reason = _python_complaint(regex)
    return [Problem(where, f"`{regex}` is no regular expression: {reason}", "Correct it")] if reason else []


def java_regex_problems(where: str, regex: str) -> list[Problem]:
    """Return what Java itself says of a regular expression; nothing over Spark Connect, which has no JVM here."""
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
    """Return what is wrong with the replacement of a match: ``$1`` is a group, ``\\$`` a dollar sign."""
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


def match_whole(regex: str) -> str:
    """Return a regular expression that matches the whole text or nothing. Its groups keep their numbers."""
    return rf"{match_at_start(regex)}\z"


def match_at_start(regex: str) -> str:
    """Return a regular expression that matches only at the beginning of a text. Its groups keep their numbers."""
    quoting = [said for said in re.findall(r"\\(.)", regex, re.DOTALL) if said in "QE"]
    end = r"\E" if quoting[-1:] == ["Q"] else ""  # a quotation may last to the end
    return rf"\A(?:{regex}{end})"


def _python_complaint(regex: str) -> str:
    if r"\Q" in regex:
        return ""
    try:
        re.compile(regex)
    except re.error as error:
        return error.msg if error.msg.startswith(_WRONG_IN_BOTH) else ""
    return ""
