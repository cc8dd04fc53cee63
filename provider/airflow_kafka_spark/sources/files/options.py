"""The options of FilesSource, their translation for Spark's readers, and their checks."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from airflow_kafka_spark.errors import Problem, SchemaInvalid, Unchecked
from airflow_kafka_spark.errors.base import quote_names
from airflow_kafka_spark.formats.base import find_text_encoding_problems
from airflow_kafka_spark.formats.types import Array, Column, DataType, Map, Struct, Text, parse_ddl
from airflow_kafka_spark.sources.base import find_seconds_problems
from airflow_kafka_spark.sources.files.partitions import PartitionColumns, is_partition_type
from airflow_kafka_spark.sources.files.store import open_store

OnChange = Literal["fail", "read", "ignore"]

MIN_SPLIT_BYTES = 1 << 10
FORMATS = ("parquet", "json", "csv", "orc", "text")
FORMATS_WITH_SCHEMA = ("json", "csv")


def _split_words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_PARSED = _split_words(
    "columnNameOfCorruptRecord dateFormat enableDateTimeParsingFallback encoding charset lineSep locale mode multiLine timeZone "
    "timestampFormat timestampNTZFormat"
)
_KNOWN_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "parquet": ("datetimeRebaseMode", "int96RebaseMode"),
    "orc": (),
    "text": ("encoding", "lineSep", "wholetext"),
    "json": (
        *_PARSED,
        *_split_words(
            "allowBackslashEscapingAnyCharacter allowComments allowNonNumericNumbers allowNumericLeadingZeros allowSingleQuotes "
            "allowUnquotedControlChars allowUnquotedFieldNames prefersDecimal primitivesAsString"
        ),
    ),
    "csv": (
        *_PARSED,
        *_split_words(
            "charToEscapeQuoteEscaping comment delimiter emptyValue enforceSchema escape header ignoreLeadingWhiteSpace "
            "ignoreTrailingWhiteSpace inputBufferSize maxCharsPerColumn maxColumns nanValue negativeInf nullValue positiveInf "
            "preferDate quote sep unescapedQuoteHandling"
        ),
    ),
}
_RESERVED: Mapping[str, str] = {
    **dict.fromkeys(("pathglobfilter",), "Use `glob`"),
    **dict.fromkeys(("recursivefilelookup",), "Use `recursive`"),
    **dict.fromkeys(("path", "paths", "modifiedbefore", "modifiedafter"), "The source decides which files are read"),
    "basepath": "`path` is the base; name the columns that directories give in `partition_columns`",
    **dict.fromkeys(("ignorecorruptfiles", "ignoremissingfiles"), "Files that cannot be read are an error: rows would be lost"),
    **dict.fromkeys(("inferschema", "samplingratio"), "Types would depend on what a window's files hold: give `schema`"),
    "mergeschema": "Give `schema`: all files are then read with it",
    "columnpruning": "Every column is parsed, so that no malformed one is missed",
}

_TEXT_ENCODINGS = ("utf-8", "ascii", "iso8859-1")
"""The encodings, by Python's names, in which lines of text are read. Spark looks for bytes of a line feed."""


@dataclass(frozen=True)
class FilesSourceOptions:
    """The arguments of :class:`~airflow_kafka_spark.sources.files.source.FilesSource`, which documents them."""

    path: str
    format: str = "parquet"
    glob: str = "*"
    recursive: bool = False
    schema: str | None = None
    partition_columns: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    split_bytes: int = 64 << 20
    max_files: int | None = None
    max_bytes: int | None = None
    min_age: float = 0.0
    on_change: OnChange = "fail"
    allowed_lateness: float = 6 * 3600.0
    conn_id: str | None = None

    @property
    def uri(self) -> str:
        """``file:///abs/path`` or ``s3a://bucket/prefix``; the path itself while it is a template, or if it is invalid."""
        try:
            return open_store(self.path, None).uri if "{{" not in str(self.path) else self.path
        except ValueError:
            return str(self.path)

    @property
    def partitions(self) -> PartitionColumns:
        """The columns that directories give."""
        return PartitionColumns(self.partition_columns or "")

    @property
    def normalized_options(self) -> dict[str, str]:
        """``options`` as Spark takes them: values as text, names in lower case."""
        return _normalize_options(self.options)

    @property
    def reader_options(self) -> dict[str, str]:
        """The options that Spark's reader gets.

        Unless ``options`` say otherwise, a malformed record fails the read, and a CSV header has to name the columns of
        ``schema``.
        """
        given = self.normalized_options
        defaults: dict[str, str] = {}
        if self.format in FORMATS_WITH_SCHEMA:
            defaults["mode"] = "FAILFAST"
        if self.format == "csv" and given.get("header", "").lower() == "true":
            defaults["enforceschema"] = "false"
        if self.format == "csv":
            # Spark's default keeps all quotes of a value in which one is not escaped.
            defaults["unescapedquotehandling"] = "RAISE_ERROR"
        return {**defaults, **given}

    # --- validation ---

    def find_option_problems(self) -> list[Problem]:
        """Return the problems of the options, and of a directory that cannot be listed."""
        columns: tuple[Column, ...] = ()
        found = [*self._find_path_problems(), *self._find_number_problems(), *self._find_choice_problems()]
        is_known = self.format in FORMATS
        try:
            columns = parse_ddl(self.schema) if self.schema is not None else ()
        except TypeError:
            found.append(Problem("source.schema", f"it is {self.schema!r}; expected columns as Spark DDL, such as `id bigint`"))
        except SchemaInvalid as error:
            found.append(Problem("source.schema", str(error)))
        else:
            found += self._find_schema_problems(columns) if is_known else ()
        found += self._find_partition_problems([column.name for column in columns])
        if is_known:
            return [*found, *self._find_reader_option_problems(columns)]
        return [*found, *([Unchecked("source.options", "source.format")] if self.options else [])]

    def _find_path_problems(self) -> Iterator[Problem]:
        try:
            store = open_store(self.path, self.conn_id)
        except ValueError as error:
            yield Problem("source.path", str(error), "Name a directory, as an absolute path or as a URI")
            return
        yield from store.find_problems(self.conn_id)

    def _find_number_problems(self) -> Iterator[Problem]:
        whole = (
            ("split_bytes", self.split_bytes, MIN_SPLIT_BYTES),
            ("max_files", self.max_files, 1),
            ("max_bytes", self.max_bytes, 1),
        )
        for name, value, least in whole:
            if name != "split_bytes" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 62:
                yield Problem(f"source.{name}", f"it is {value!r}; expected a whole number from {least:,}")
        yield from find_seconds_problems({"min_age": self.min_age, "allowed_lateness": self.allowed_lateness})

    def _find_choice_problems(self) -> Iterator[Problem]:
        if self.format not in FORMATS:
            yield Problem("source.format", f"`{self.format}` is not known; expected one of {', '.join(FORMATS)}")
        if self.on_change not in get_args(OnChange):
            allowed = ", ".join(get_args(OnChange))
            yield Problem("source.on_change", f"`{self.on_change}` is not known; expected one of {allowed}")
        glob: object = self.glob
        if not isinstance(glob, str) or not glob or "/" in glob:
            advice = "To look into directories below set `recursive=True`"
            yield Problem("source.glob", f"{glob!r} is not a pattern of file names (`*`, `?`, `[...]`)", advice)

    def _find_schema_problems(self, columns: tuple[Column, ...]) -> Iterator[Problem]:
        if self.schema is None:
            if self.format in FORMATS_WITH_SCHEMA:
                yield Problem(
                    "source.schema",
                    f"{self.format} files have no types of their own, and guessed ones would change from window to window",
                    "Give the columns as Spark DDL, for instance `id bigint, name string, placed_at timestamp`",
                )
            return
        if self.format == "text":
            yield Problem("source.schema", "lines of text have one column, `value string`", "Leave `schema` out")
        for column in columns:
            if any(isinstance(kind, Text) and kind.max_length for kind in _list_nested_types(column.type)):
                yield Problem(
                    "source.schema", f"`{column.name}` is {column.type}, which Spark's readers do not take", "Use string"
                )
            if self.format == "csv" and isinstance(column.type, (Array, Map, Struct)):
                yield Problem("source.schema", f"`{column.name}` is {column.type}, which csv cannot hold", "Read it as string")

    def _find_partition_problems(self, names: Sequence[str]) -> Iterator[Problem]:
        """Yield the problems of `partition_columns`.

        :param names: the columns of `schema`.
        """
        if self.partition_columns is None:
            return
        where = "source.partition_columns"
        if not isinstance(self.partition_columns, str):
            yield Problem(where, f"it is {self.partition_columns!r}; expected columns as Spark DDL, such as `day date`")
            return
        try:
            columns = self.partitions.columns
        except SchemaInvalid as error:
            yield Problem(where, str(error))
            return
        if not columns:
            yield Problem(where, "it names no column", "Leave it out")
        if columns and not self.recursive:
            yield Problem(where, "directories below `path` are not read", "Set `recursive=True`")
        in_files = {name.lower() for name in (*names, *(("value",) if self.format == "text" else ()))}
        for column in columns:
            if not is_partition_type(column.type):
                found = f"`{column.name}` is {column.type}; expected string, an integer, boolean or date"
                yield Problem(where, found, "Use string")
            if column.name.lower() in in_files:
                found = f"`{column.name}` is a column of the files, too"
                yield Problem(where, found, "Leave it out of `schema`, or of `partition_columns`")

    def _find_reader_option_problems(self, columns: tuple[Column, ...]) -> Iterator[Problem]:
        known = {name.lower(): name for name in _KNOWN_OPTIONS[self.format]}
        for name in self.options:
            if not isinstance(name, str):
                yield Problem("source.options", f"{name!r} is not the name of an option")
            elif advice := _RESERVED.get(name.lower()):
                yield Problem("source.options", f"`{name}` cannot be set here", advice)
            elif name.lower() not in known:
                names = quote_names(sorted(known.values())) or "none"
                yield Problem("source.options", f"Spark's {self.format} reader has no option `{name}`; it has {names}")
        given = _normalize_options({n: v for n, v in self.options.items() if isinstance(n, str)})
        if len(given) < len(self.options):
            yield Problem("source.options", "an option is given twice, in different case", "Give it once")
        yield from _find_contradicting_options(self.format, given, columns)


def _normalize_options(options: Mapping[str, Any]) -> dict[str, str]:
    return {name.lower(): str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}


def _find_contradicting_options(format: str, given: Mapping[str, str], columns: tuple[Column, ...]) -> Iterator[Problem]:
    yield from _find_encoding_problems(format, given)
    for name in ("multiline", "header", "wholetext", "enforceschema"):
        if given.get(name, "true").lower() not in ("true", "false"):
            yield Problem("source.options", f"`{name}` is `{given[name]}`; expected true or false")
    for one, other in (("delimiter", "sep"), ("charset", "encoding")):
        if one in given and other in given:
            yield Problem("source.options", f"`{one}` and `{other}` are two names of one option", "Give one of them")
    mode = given.get("mode", "FAILFAST").upper()
    corrupt = given.get("columnnameofcorruptrecord", "_corrupt_record")
    if (
        format in FORMATS_WITH_SCHEMA
        and mode != "FAILFAST"
        and not (mode == "PERMISSIVE" and corrupt in [c.name for c in columns])
    ):
        yield Problem(
            "source.options",
            f"`mode` is `{given['mode']}`: malformed records would be dropped, or become NULLs, without a message",
            f"Leave it out (FAILFAST), or set PERMISSIVE and add `{corrupt} string` to `schema`, which then holds such records",
        )
    if given.get("wholetext", "").lower() == "true" and "linesep" in given:
        yield Problem("source.options", "`wholetext` and `lineSep` contradict each other", "Leave one of them out")
    if given.get("multiline", "").lower() == "true" and "linesep" in given and format == "json":
        yield Problem("source.options", "`multiLine` and `lineSep` contradict each other", "Leave one of them out")


def _find_encoding_problems(format: str, given: Mapping[str, str]) -> Iterator[Problem]:
    encoding = given.get("encoding", given.get("charset", "UTF-8"))
    if unknown := find_text_encoding_problems("source.options", encoding):
        yield from unknown
    elif format == "text" and codecs.lookup(encoding).name not in _TEXT_ENCODINGS:
        found = f"`encoding` is `{encoding}`; lines of text are decoded from UTF-8 or ISO-8859-1 only"
        yield Problem("source.options", found, 'Convert the files, or read them with `format="csv"`')
    elif (
        codecs.lookup(encoding).name.startswith(("utf-16", "utf-32"))
        and given.get("multiline", "").lower() != "true"
        and "linesep" not in given
    ):
        found = f"`encoding` is `{encoding}`: Spark looks for bytes of a line feed, which are others there"
        yield Problem("source.options", found, "Set `multiLine` to True, or `lineSep`")


def _list_nested_types(kind: DataType) -> Iterator[DataType]:
    """Yield the type and all types in it."""
    yield kind
    if isinstance(kind, Array):
        yield from _list_nested_types(kind.element)
    elif isinstance(kind, Map):
        yield from _list_nested_types(kind.key)
        yield from _list_nested_types(kind.value)
    elif isinstance(kind, Struct):
        for field in kind.fields:
            yield from _list_nested_types(field.type)
