"""The options of Spark's file readers, by format: which there are, and what a files source makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.formats.ddl import Column

FORMATS = ("parquet", "json", "csv", "orc", "text")
WITH_SCHEMA = ("json", "csv")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_PARSED = _words(
    "columnNameOfCorruptRecord dateFormat enableDateTimeParsingFallback encoding charset lineSep locale mode multiLine timeZone "
    "timestampFormat timestampNTZFormat"
)
_KNOWN: Mapping[str, tuple[str, ...]] = {
    "parquet": ("datetimeRebaseMode", "int96RebaseMode"),
    "orc": (),
    "text": ("encoding", "lineSep", "wholetext"),
    "json": (
        *_PARSED,
        *_words(
            "allowBackslashEscapingAnyCharacter allowComments allowNonNumericNumbers allowNumericLeadingZeros allowSingleQuotes "
            "allowUnquotedControlChars allowUnquotedFieldNames prefersDecimal primitivesAsString"
        ),
    ),
    "csv": (
        *_PARSED,
        *_words(
            "charToEscapeQuoteEscaping comment delimiter emptyValue enforceSchema escape header ignoreLeadingWhiteSpace "
            "ignoreTrailingWhiteSpace inputBufferSize maxCharsPerColumn maxColumns nanValue negativeInf nullValue positiveInf "
            "preferDate quote sep unescapedQuoteHandling"
        ),
    ),
}
_OURS: Mapping[str, str] = {
    **dict.fromkeys(("pathglobfilter",), "Use `glob`"),
    **dict.fromkeys(("recursivefilelookup",), "Use `recursive`"),
    **dict.fromkeys(("path", "paths", "basepath", "modifiedbefore", "modifiedafter"), "The source decides which files are read"),
    **dict.fromkeys(("ignorecorruptfiles", "ignoremissingfiles"), "Files that cannot be read are an error: rows would be lost"),
    **dict.fromkeys(("inferschema", "samplingratio"), "Types would depend on what a window's files hold: give `schema`"),
    "mergeschema": "Give `schema`: all files are then read with it",
    "columnpruning": "Every column is parsed, so that no malformed one is missed",
}


def lowered(options: Mapping[str, Any]) -> dict[str, str]:
    """Options as Spark takes them: text, and names in lower case."""
    return {name.lower(): str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}


def reader_options(format: str, options: Mapping[str, Any]) -> dict[str, str]:
    """What the reader is given: a malformed record fails the read, and a CSV file's header has to name the schema's columns,
    unless the user says otherwise."""
    given = lowered(options)
    ours: dict[str, str] = {}
    if format in WITH_SCHEMA:
        ours["mode"] = "FAILFAST"
    if format == "csv" and given.get("header", "").lower() == "true":
        ours["enforceschema"] = "false"
    return {**ours, **given}


def problems(format: str, options: Mapping[str, Any], columns: tuple[Column, ...]) -> Iterator[Problem]:
    """What is wrong with the options of a format that is known.

    :param columns: those of ``schema``.
    """
    known = {name.lower(): name for name in _KNOWN[format]}
    for name in options:
        if not isinstance(name, str):
            yield Problem("source.options", f"{name!r} is not the name of an option")
        elif advice := _OURS.get(name.lower()):
            yield Problem("source.options", f"`{name}` cannot be set here", advice)
        elif name.lower() not in known:
            names = ", ".join(f"`{n}`" for n in sorted(known.values())) or "none"
            yield Problem("source.options", f"Spark's {format} reader has no option `{name}`; it has {names}")
    given = lowered({n: v for n, v in options.items() if isinstance(n, str)})
    if len(given) < len(options):
        yield Problem("source.options", "an option is given twice, in different case", "Give it once")
    yield from _contradictions(format, given, columns)


def _contradictions(format: str, given: Mapping[str, str], columns: tuple[Column, ...]) -> Iterator[Problem]:
    for name in ("multiline", "header", "wholetext", "enforceschema"):
        if given.get(name, "true").lower() not in ("true", "false"):
            yield Problem("source.options", f"`{name}` is `{given[name]}`; expected true or false")
    for one, other in (("delimiter", "sep"), ("charset", "encoding")):
        if one in given and other in given:
            yield Problem("source.options", f"`{one}` and `{other}` are two names of one option", "Give one of them")
    mode = given.get("mode", "FAILFAST").upper()
    corrupt = given.get("columnnameofcorruptrecord", "_corrupt_record")
    if format in WITH_SCHEMA and mode != "FAILFAST" and not (mode == "PERMISSIVE" and corrupt in [c.name for c in columns]):
        yield Problem(
            "source.options",
            f"`mode` is `{given['mode']}`: malformed records would be dropped, or become NULLs, and nobody would know",
            f"Leave it out (FAILFAST), or set PERMISSIVE and add `{corrupt} string` to `schema`, which then holds such records",
        )
    if given.get("wholetext", "").lower() == "true" and "linesep" in given:
        yield Problem("source.options", "`wholetext` and `lineSep` contradict each other", "Leave one of them out")
    if given.get("multiline", "").lower() == "true" and "linesep" in given and format == "json":
        yield Problem("source.options", "`multiLine` and `lineSep` contradict each other", "Leave one of them out")
