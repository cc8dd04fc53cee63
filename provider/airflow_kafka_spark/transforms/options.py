"""Parse and check the options of transforms and predicates, and regular expressions for Java."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from airflow_kafka_spark.errors import Problem, ValidationError


def parse_names(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return names that are given as Connect writes them (``a,b``), or in a list."""
    if isinstance(names, str):
        return tuple(name.strip() for name in names.split(",") if name.strip())
    return tuple(names)


def parse_pairs(given: str | Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Return pairs that are given as Connect writes them (``a:b,c:d``), in a list, or in a mapping.

    :raises ValueError: a pair has no colon, or more than one; the message names it.
    """
    if isinstance(given, Mapping):
        return dict(given)
    if not isinstance(given, (str, Sequence)):
        raise ValueError(f"found {given!r}; expected pairs of names")
    found = {}
    for pair in parse_names(given):
        left, colon, right = pair.partition(":") if isinstance(pair, str) else ("", "", "")
        if not (left.strip() and colon and right.strip()) or ":" in right:
            raise ValueError(f"found {pair!r}; expected two names with one colon between")
        found[left.strip()] = right.strip()
    return found


def find_name_problems(where: str, name: object, expected: str = "a name") -> list[Problem]:
    """Return the problems of an option that has to be a text that is not empty."""
    if isinstance(name, str) and name.strip():
        return []
    return [Problem(where, f"found {name!r}; expected {expected}", "Correct it")]


_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`[^`]*`""", re.DOTALL)
_WINDOW_FUNCTION = re.compile(r"\bover\s*\(", re.IGNORECASE)


def find_sql_problems(where: str, text: object, expected: str) -> list[Problem]:
    """Return the problems of an expression in Spark's SQL that are found without Spark.

    A window function is one of them: Spark would move the records out of their splits, whose counts would be wrong.
    """
    problems = find_name_problems(where, text, expected)
    if not problems and _WINDOW_FUNCTION.search(_QUOTED.sub("''", str(text))):
        found = "found a window function (`OVER`); expected an expression that is computed for each record alone"
        return [Problem(where, found, "Leave it out: records are processed one by one")]
    return problems


def find_names_problems(where: str, names: object, *, twice: bool = False, what: str = "fields") -> list[Problem]:
    """Return the problems of a list of names that must not be empty.

    :param twice: True if a name may occur twice.
    :param what: the word for the named things, for the message.
    """
    if not isinstance(names, (str, Sequence)) or not (found := parse_names(names)):
        return [Problem(where, f"found {names!r}; expected at least one name", f"Name {what}")]
    problems = [p for name in found for p in find_name_problems(where, name)]
    if problems or twice:
        return problems
    doubles = sorted(name for name, count in Counter(found).items() if count > 1)
    return [Problem(where, f"found `{name}` twice; expected each name once", "Leave one out") for name in doubles]


def require_unique(option: str, names: Iterable[str], action: str) -> None:
    """Check that no name occurs twice.

    :raises ValidationError: some do; names them.
    """
    doubles = [name for name, count in Counter(names).items() if count > 1]
    if doubles:
        raise ValidationError(
            [Problem(option, f"there would be `{name}` twice; expected each name once", action) for name in doubles]
        )


def parse_path(text: str) -> list[str]:
    """Return the names of a path in Connect's syntax V2.

    Dots separate names. A name in backticks may hold dots; ``\\``` before a dot is a backtick within the name.

    :raises ValueError: a backtick is not closed.
    """
    names, at = [], 0
    while at < len(text):
        if text[at] != "`":
            end = text.find(".", at)
            end = len(text) if end < 0 else end
            names.append(text[at:end])
        else:
            name, end = _parse_quoted_name(text, at + 1)
            names.append(name)
        at = end + 1
    return [*names, ""] if text.endswith(".") else names


def _parse_quoted_name(text: str, start: int) -> tuple[str, int]:
    """Return the name that a backtick before ``start`` opens, and the index of the dot after it, or of the text's end."""
    name, at = "", start
    while (end := text.find("`", at)) >= 0:
        last = end == len(text) - 1
        escaped = text[end - 1] == "\\" and end > start
        if last and not escaped:
            return name + text[start:end], len(text)
        if not last and text[end + 1] == "." and not escaped:
            return name + text[start:end], end + 1
        if not last and text[end + 1] == ".":
            name, start = name + text[start : end - 1] + "`", end + 1
        at = end + 1
    raise ValueError(f"found a backtick without its end in `{text}`; expected pairs")


# --- regular expressions ------------------------------------------------------------------------------------------------

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


def find_regex_problems(where: str, regex: object) -> list[Problem]:
    """Return the problems of a regular expression that Java refuses for certain."""
    if not isinstance(regex, str) or not regex:
        return [Problem(where, f"found {regex!r}; expected a regular expression", "Correct it")]
    reason = _find_python_complaint(regex)
    return [Problem(where, f"`{regex}` is no regular expression: {reason}", "Correct it")] if reason else []


def find_java_regex_problems(where: str, regex: str) -> list[Problem]:
    """Return the problems that Java finds in a regular expression; an empty list with Spark Connect, which has no JVM in this
    process."""
    from pyspark.sql import SparkSession

    java = getattr(SparkSession.getActiveSession(), "_jvm", None)
    if java is None:
        return []
    try:
        getattr(java, "java.util.regex.Pattern").compile(regex)
    except Exception as error:
        said = str(getattr(error, "java_exception", error)).partition("\n")[0].rpartition("Exception: ")[2]
        return [Problem(where, f"`{regex}` is no regular expression: {said}", "Correct it")]
    return []


def find_replacement_problems(where: str, regex: object, replacement: object) -> list[Problem]:
    """Return the problems of the replacement of a match: ``$1`` is a group, ``\\$`` a dollar sign."""
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


def _find_python_complaint(regex: str) -> str:
    if r"\Q" in regex:
        return ""
    try:
        re.compile(regex)
    except re.error as error:
        return error.msg if error.msg.startswith(_WRONG_IN_BOTH) else ""
    return ""
