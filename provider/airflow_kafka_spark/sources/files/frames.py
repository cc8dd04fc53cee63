"""Files as a DataFrame of Spark, with one partition for each split; and Spark's errors about files, explained.

Bytes that are no text in a file's encoding make the row bad. Spark's readers hide such bytes: that of CSV replaces them by U+FFFD
without an error, those of text, Parquet and ORC keep them in a string that is not UTF-8, and that of JSON takes the line for
malformed. Most CSV is therefore read as ISO-8859-1, which keeps every byte, and its texts are made from these bytes again. Where
that is not possible, a text that holds U+FFFD counts as bad.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import SourceRejected, SourceUnavailable
from airflow_kafka_spark.formats.base import ERROR, UNREADABLE, is_utf8, make_spark_column
from airflow_kafka_spark.formats.types import MAX_PRECISION, DataType, Decimal, parse_ddl
from airflow_kafka_spark.sources.files.options import FilesSourceOptions
from airflow_kafka_spark.sources.files.partitions import NULL_PARTITION, PartitionColumns
from airflow_kafka_spark.sources.files.splits import (
    FileSplit,
    decode_split,
    escape_path,
    is_splittable,
    make_spark_settings,
    sort_like_spark,
    split_files,
)
from airflow_kafka_spark.sources.files.store import REPLACE_DAMAGED, FileStore, ListedFile, LocalStore, join_names
from airflow_kafka_spark.sources.files.windows import require_partition_directories

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql import types as spark_types

_BYTES = "ISO-8859-1"
_MALFORMED_JSON = "Malformed record of JSON"
_RECORD, _FILE = "__kafka_record", "__kafka_file"
_OPTIONS_OF_LINES = ("mode", "columnnameofcorruptrecord", "multiline", "linesep", "encoding", "charset")
"""Options of Spark's reader of JSON that are no options of ``from_json``, or are applied here."""
_REPLACEMENT = "\ufffd"
_METADATA = "_metadata"
"""Spark's hidden column with facts about the file of a row."""
_PARTITION_FILE = re.compile(r"path: (\S+), range: (\d+)-(\d+), partition values")
_FAILED_READ = re.compile(r"\[FAILED_READ_FILE\.(\w+)\].*?\bfile:? (\S+?)\.?\s", re.S)
_MALFORMED = re.compile(r"(Malformed records are detected in record parsing: .*?)\s*\n?Parse Mode", re.S)
_HEADER = re.compile(r"CSV header does not conform to the schema\.\s*(Header:[^\n]*)\s*(Schema:[^\n]*)")
_OTHER_COUNT = re.compile(
    r"Number of column in CSV header is not equal to number of fields in the schema:\s*(Header length[^\n]*)"
)
_CAUSE = re.compile(r"Caused by: (?:[\w.$]+(?:Exception|Error): )?([^\n]+)")
_JSON = re.compile(rf"{_MALFORMED_JSON} of file `([^`]*)`: ([^\n]*?)(?: SQLSTATE: \w+)?$", re.M)
_UNESCAPED_QUOTE = "Unescaped quote character"
_SHOWN = 300
"""Maximum number of characters of a record, and of a message of Spark, that a message shows."""
_REPLACE_FILE = (
    "If the file is wrong, do not change it, because its window is open: give the window up (`airflow kafka-spark skip`), which "
    "leaves out its rows that are not published, and put a file under another name in its place"
)
_CORRECT_RECORDS = (
    "If the file is right, correct `schema` or `options`. To publish its other rows, set the option `mode` to PERMISSIVE, and "
    f"add `_corrupt_record string` to `schema`, which then holds such records. {_REPLACE_FILE}"
)


@dataclass(frozen=True)
class FileEncoding:
    """The encoding of files, and how their texts are checked.

    :param format: the format of the files.
    :param schema: the columns as DDL; None if the files have their own.
    :param options: the options of Spark's reader, with names in lower case.
    """

    format: str
    schema: str | None
    options: Mapping[str, str]

    @property
    def name(self) -> str:
        """The encoding's name; UTF-8 by default."""
        return self.options.get("encoding") or self.options.get("charset") or "UTF-8"

    @property
    def reader_format(self) -> str:
        """The format with which Spark reads the files."""
        return "text" if self._is_parsed_from_text else self.format

    @property
    def reader_options(self) -> dict[str, str]:
        """The options with which Spark reads the files."""
        if self._is_parsed_from_text:
            separator = {"linesep": self.options["linesep"]} if "linesep" in self.options else {}
            return {**separator, "wholetext": self.options.get("multiline", "false")}
        if not self._is_read_as_bytes:
            return dict(self.options)
        return {**{name: value for name, value in self.options.items() if name != "charset"}, "encoding": _BYTES}

    @property
    def _is_read_as_bytes(self) -> bool:
        """True for CSV in UTF-8 if nothing that the parser compares or counts depends on the encoding."""
        given = self.options
        compared = [*given.values(), *([self.schema or ""] if given.get("header", "").lower() == "true" else [])]
        return (
            self.format == "csv"
            and is_utf8(self.name)
            and given.get("multiline", "").lower() != "true"  # a byte order mark would choose the encoding
            and not given.keys() & {"locale", "maxcharspercolumn"}
            and all(map(str.isascii, compared))
        )

    @property
    def _is_parsed_from_text(self) -> bool:
        """True for JSON in UTF-8. Spark's reader of JSON ignores what follows the first value of a line, or of a whole file."""
        return self.format == "json" and is_utf8(self.name)

    @property
    def _is_replaced(self) -> bool:
        """True if the reader replaces bytes that are no text by U+FFFD."""
        return self.format == "csv" and not self._is_read_as_bytes

    @property
    def reader_schema(self) -> str | None:
        """The columns with which Spark reads the files, as DDL: decimals with more digits, of which none is rounded away unseen.

        None if the files have their own.
        """
        if self.schema is None:
            return None
        return ", ".join(str(replace(column, type=self._widen(column.type))) for column in parse_ddl(self.schema))

    def _widen(self, kind: DataType) -> DataType:
        """Return the type with which a column is read."""
        if self.format in ("json", "csv") and isinstance(kind, Decimal):
            return Decimal(MAX_PRECISION, kind.scale + MAX_PRECISION - kind.precision)
        return kind

    def make_rows(self, frame: DataFrame, added: Mapping[str, Column]) -> DataFrame:
        """Return the rows with their texts, and with the column :data:`~airflow_kafka_spark.formats.base.ERROR` if a value of
        theirs may be bad.

        :param frame: as Spark's reader made it, with :attr:`reader_format`, :attr:`reader_options` and :attr:`reader_schema`.
        :param added: further columns, made of those of ``frame``.
        """
        from pyspark.sql import functions as F

        file = F.lit("")
        if _METADATA not in frame.columns:
            file = F.concat(F.lit(" of file `"), F.col(f"{_METADATA}.file_name"), F.lit("`"))
        if self._is_parsed_from_text:
            records = F.explode(self._parse_json(F.col("value"), F.col(f"{_METADATA}.file_path"))).alias(_RECORD)
            given = [column.alias(name) for name, column in added.items()]
            frame = frame.select(records, file.alias(_FILE), *given).select(f"{_RECORD}.*", _FILE, *map(make_spark_column, added))
            file, added = F.col(_FILE), {name: make_spark_column(name) for name in added}
        types = {field.name: field.dataType for field in frame.schema.fields if field.name not in (_FILE, *added)}
        columns = {name: self._restore(make_spark_column(name), kind) for name, kind in types.items()}
        found = []
        for name, kind in types.items():
            wrong = self._find_bad(columns[name], kind)
            if wrong is not None:
                found.append(F.when(wrong, F.concat(F.lit(f"column `{name}`"), file, F.lit(f": {self._describe_bytes()}"))))
        for column in parse_ddl(self.schema) if self.schema else ():
            if (wide := self._widen(column.type)) != column.type:
                exact = columns[column.name]
                columns[column.name] = _try_cast(exact, str(column.type))
                lost = ~columns[column.name].cast(str(wide)).eqNullSafe(exact)
                shown = F.regexp_replace(exact.cast("string"), "0+$", "")
                said = (F.lit(f"column `{column.name}`"), file, F.lit(": found "), shown, F.lit(f", expected {column.type}"))
                found.append(F.when(lost, F.concat(*said)))
        rows = [column.alias(name) for name, column in {**columns, **added}.items()]
        if not found:
            return frame.select(*rows)
        # Null unless a column is named.
        return frame.select(*rows, F.concat(F.lit(UNREADABLE), F.coalesce(*found)).alias(ERROR))

    def _describe_bytes(self) -> str:
        found = f"the reader found bytes that are not {self.name}, or U+FFFD" if self._is_replaced else f"not {self.name}"
        advice = "" if self.format in ("parquet", "orc") else ". `encoding` in the source's `options` names another encoding"
        return f"{found}{advice}"

    def _parse_json(self, text: Column, path: Column) -> Column:
        """Return the records of a line, or of a whole file, as an array of structs.

        The text is parsed as a list, so that anything but a comma between two values is malformed.

        :param path: of the file, as Spark encodes it.
        """
        from pyspark.sql import functions as F

        assert self.schema is not None
        options = {name: value for name, value in self.options.items() if name not in _OPTIONS_OF_LINES}
        options["mode"] = "PERMISSIVE"  # NULL for a malformed text
        if self.options.get("multiline", "").lower() == "true":
            text = F.regexp_replace(text, "^\ufeff", "")  # Spark's reader of lines removes it
        record = f"struct<{self.reader_schema}>"
        in_list = F.concat(F.lit("["), text, F.lit("\n]"))
        # Most lines begin with a brace, and the expression costs a quarter of the time of parsing them.
        is_list = (F.substring(text, 1, 1) != "{") & text.rlike(r"^\s*\[")
        records = F.when(is_list, F.flatten(F.from_json(in_list, f"array<array<{record}>>", options))).otherwise(
            F.from_json(in_list, f"array<{record}>", options)
        )
        shown = F.substring(text, 1, _SHOWN)
        malformed: Column = F.raise_error(F.concat(F.lit(f"{_MALFORMED_JSON} of file `"), path, F.lit("`: "), shown))
        if self.options.get("mode", "").upper() == "PERMISSIVE":
            corrupt = self.options.get("columnnameofcorruptrecord", "_corrupt_record")
            fields = [(column.name, str(self._widen(column.type))) for column in parse_ddl(self.schema)]
            values = [(text if name == corrupt else F.lit(None)).cast(kind).alias(name) for name, kind in fields]
            malformed = F.struct(*values)
        no_record = F.array(F.lit(None).cast(record))
        found = F.coalesce(F.when(~_is_not_utf8(text), records), no_record)
        return F.transform(found, lambda each: F.coalesce(each, malformed))

    def _restore(self, column: Column, kind: spark_types.DataType) -> Column:
        """Return a column of the reader with the texts and bytes of the file."""
        from pyspark.sql import functions as F

        name = kind.typeName()
        if self._is_read_as_bytes and name in ("string", "binary"):
            return F.encode(column.cast("string"), _BYTES).cast(name)
        if self.format == "text" and not is_utf8(self.name):
            return F.decode(column.cast("binary"), _BYTES)
        return column

    def _find_bad(self, column: Column, kind: spark_types.DataType) -> Column | None:
        """Return the condition for values with a bad text; None if there can be none."""
        from pyspark.sql import functions as F
        from pyspark.sql.types import ArrayType, MapType, StructType

        if isinstance(kind, StructType):
            parts = [self._find_bad(column.getField(f.name), f.dataType) for f in kind.fields]
        elif isinstance(kind, ArrayType):
            parts = [self._find_bad_items(column, kind.elementType)]
        elif isinstance(kind, MapType):
            parts = [
                self._find_bad_items(F.map_keys(column), kind.keyType),
                self._find_bad_items(F.map_values(column), kind.valueType),
            ]
        else:
            parts = [self._find_bad_text(column, kind.typeName())]
        found = [part for part in parts if part is not None]
        return reduce(or_, found) if found else None

    def _find_bad_items(self, column: Column, kind: spark_types.DataType) -> Column | None:
        """Return the condition for arrays of items of a type of which one has a bad text; None if there can be none."""
        from pyspark.sql import functions as F

        if self._find_bad(F.lit(None), kind) is None:
            return None

        def is_bad(item: Column) -> Column:
            found = self._find_bad(item, kind)
            assert found is not None
            return found

        return F.coalesce(F.exists(column, is_bad), F.lit(False))

    def _find_bad_text(self, column: Column, kind: str) -> Column | None:
        from pyspark.sql import functions as F

        if self._is_replaced and kind in ("string", "binary"):
            return F.coalesce(column.cast("string").contains(_REPLACEMENT), F.lit(False))
        return None if kind != "string" or self.format == "json" else _is_not_utf8(column)


def _is_not_utf8(text: Column) -> Column:
    from pyspark.sql import functions as F

    if hasattr(F, "is_valid_utf8"):
        return F.coalesce(~F.is_valid_utf8(text), F.lit(False))
    # Spark 3.5 replaces what it cannot decode.
    return F.coalesce(F.decode(text.cast("binary"), "UTF-8") != text, F.lit(False))


def _try_cast(column: Column, kind: str) -> Column:
    """Return a column as another type; NULL where that cannot hold the value."""
    # Spark 3.5 has no such method, and returns NULL unless `spark.sql.ansi.enabled` is set.
    return column.try_cast(kind) if hasattr(column, "try_cast") else column.cast(kind)


def read_frame(
    options: FilesSourceOptions, store: FileStore, spark: SparkSession, splits: Sequence[Mapping[str, Any]]
) -> DataFrame:
    """Return the rows of the splits as a DataFrame; see :meth:`RowSource.read_frame`. Changes the session's settings if needed.

    :raises SourceUnavailable: the files cannot be listed.
    :raises SourceRejected: a file is gone or has changed, or Spark would split the files in another way.
    """
    if not splits:
        raise ValueError("there is nothing to read: a window without splits has no rows")
    decoded = [decode_split(split) for split in splits]
    split_bytes = int(splits[0]["split_bytes"])  # from the split, because the options may have been edited since
    require_unchanged(store, {part.file.name: part.file for split in decoded for part in split})
    for name, value in make_session_settings(store, split_bytes).items():
        if spark.conf.get(name, None) != value:
            spark.conf.set(name, value)
    schema = ", ".join(map(str, parse_ddl(options.schema))) if options.schema is not None else None
    partitions = options.partitions
    require_partition_directories(options, (part.file.name for split in decoded for part in split))
    return SparkFileReader(store, options.format, schema, options.reader_options, split_bytes, partitions).read_frame(
        spark, decoded
    )


def make_session_settings(store: FileStore, split_bytes: int) -> dict[str, str]:
    """Return the SQL settings with which Spark splits as frozen, and fails on files and columns that it cannot read."""
    local = isinstance(store, LocalStore)
    return {
        **make_spark_settings(split_bytes),
        "spark.sql.files.ignoreCorruptFiles": "false",
        "spark.sql.files.ignoreMissingFiles": "false",
        "spark.sql.csv.parser.columnPruning.enabled": "false",
        "spark.sql.json.enablePartialResults": "false",
        "spark.sql.optimizer.enableJsonExpressionOptimization": "false",  # it would prune columns
        # Spark 4 takes seven encodings only, without windows-1252.
        "spark.sql.legacy.javaCharsets": "true",
        "spark.sql.sources.useV1SourceList": "avro,csv,json,kafka,orc,parquet,text",
        # Spark lists many files of an object store by a job of its own; for a local disk that is slower.
        "spark.sql.sources.parallelPartitionDiscovery.threshold": "1000000" if local else "32",
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": "64",
    }


def require_unchanged(store: FileStore, frozen: Mapping[str, ListedFile]) -> None:
    """Check that the files are as they were when the window was frozen.

    :raises SourceUnavailable: the files cannot be listed.
    :raises SourceRejected: a file is gone or has changed.
    """
    try:
        current = store.stat(frozen)
    except Exception as error:  # an object store's client has errors of its own
        raise SourceUnavailable(store.uri, "listing a window's files", f"{type(error).__name__}: {error}") from error
    gone = [file for name, file in frozen.items() if name not in current]
    changed = [file for name, file in frozen.items() if name in current and current[name] != file]
    if gone:
        raise SourceRejected(
            store.uri,
            f"{join_names(gone)} vanished since the window was frozen",
            "Put back what is missing, with its modification time, and run the task again: the window cannot be read without",
        )
    if changed:
        now = current[changed[0].name]
        raise SourceRejected(
            store.uri,
            f"{join_names(changed)} changed since the window was frozen: `{now.name}` had {changed[0].version}, and has "
            f"{now.version}",
            "Put the file back as it was, with its modification time, and run the task again. Or give the window up (`airflow "
            "kafka-spark skip`), which leaves out its rows that are not published, and give the file another name. Writers "
            "must not touch files that are listed: see `min_age`",
        )


@dataclass(frozen=True)
class SparkFileReader:
    """Reads files with Spark, split as they were frozen.

    :param store: the store of the files.
    :param format: of the files.
    :param schema: DDL; None for the types in the files.
    :param options: of the reader, with names in lower case.
    :param split_bytes: the split size with which the splits were frozen.
    :param partitions: the columns that directories give.
    """

    store: FileStore
    format: str
    schema: str | None
    options: Mapping[str, str]
    split_bytes: int
    partitions: PartitionColumns

    def read_frame(self, spark: SparkSession, splits: Sequence[FileSplit]) -> DataFrame:
        """Return a DataFrame with exactly one partition per split, in this order.

        :raises SourceRejected: Spark does not find the files, cannot take their types, or cuts them in another way.
        """
        files = list({part.file.name: part.file for split in splits for part in split}.values())
        if self._split(files) == tuple(splits):
            # These are all splits of a window: with the settings, Spark splits the files in this way.
            frame = self._load(spark, files)
            self._require_same_splits(frame, splits)
            return self._make_rows(frame, files)
        frames = [self._read_split(spark, split) for split in splits]
        return reduce(lambda left, right: left.union(right), frames)

    @property
    def _encoding(self) -> FileEncoding:
        return FileEncoding(self.format, self.schema, self.options)

    def _split(self, files: Sequence[ListedFile]) -> tuple[FileSplit, ...]:
        whole = {f.name for f in files if not is_splittable(f.name, self.format, self.options)}
        return split_files(files, self.split_bytes, whole)

    def _load(self, spark: SparkSession, files: Sequence[ListedFile]) -> DataFrame:
        # In the order that split_files() takes them: Spark keeps it among slices of one length.
        names = [file.name for file in sort_like_spark(files)]
        options = {**self._encoding.reader_options, **self.store.make_hadoop_options(names)}
        encoding = self._encoding
        reader = spark.read.format(encoding.reader_format).options(**options)
        if encoding.reader_schema and encoding.reader_format == self.format:
            reader = reader.schema(encoding.reader_schema)
        try:
            return reader.load([escape_path(f"{self.store.root}/{name}") for name in names])
        except Exception as error:
            if (explained := explain_read_error(self.store.uri, error)) is not None:
                raise explained from error
            raise

    def _read_split(self, spark: SparkSession, split: FileSplit) -> DataFrame:
        """Return one split alone. A slice of a file is found by reading the whole file: Spark's readers take no range."""
        frames = []
        if whole := [part.file for part in split if part.is_whole]:
            frames.append(self._make_rows(self._load(spark, whole), whole))
        for part in split:
            if not part.is_whole:
                frame = self._load(spark, [part.file])
                there = frame.where(frame["_metadata.file_block_start"] == part.start)
                frames.append(self._make_rows(there, [part.file]))
        return reduce(lambda left, right: left.union(right), frames).coalesce(1)

    def _make_rows(self, frame: DataFrame, files: Sequence[ListedFile]) -> DataFrame:
        """Return the rows of files, with the columns that their directories give."""
        return self._encoding.make_rows(frame, self._make_partition_columns(files))

    def _make_partition_columns(self, files: Sequence[ListedFile]) -> dict[str, Column]:
        from pyspark.sql import functions as F

        def decode(text: Column) -> Column:
            return F.url_decode(F.regexp_replace(text, r"\+", "%2B"))

        made = {}
        for column, names in zip(
            self.partitions.columns, self.partitions.list_spellings(file.name for file in files), strict=True
        ):
            # Spark encodes the paths of files once more. The last directory of the name counts: others are above the source's.
            spelled = "|".join(rf"\Q{name}\E" for name in sorted(names))
            written = F.regexp_extract(decode(F.col(f"{_METADATA}.file_path")), rf"(?s)^.*/(?:{spelled})=([^/]*)/", 1)
            value = decode(F.regexp_replace(written, "%(?![0-9A-Fa-f]{2})", "%25"))
            made[column.name] = F.when(written != NULL_PARTITION, value).cast(str(column.type))
        return made

    def _require_same_splits(self, frame: DataFrame, splits: Sequence[FileSplit]) -> None:
        """Check how Spark has split the files. A server behind Spark Connect cannot be asked.

        :raises SourceRejected: in another way than they were frozen.
        """
        if type(frame).__module__.startswith("pyspark.sql.connect"):
            return
        partitions: Any = frame._jdf.queryExecution().toRdd().partitions()
        describe: Any = getattr(frame.sparkSession._jvm, "scala.runtime.ScalaRunTime").stringOf
        found = [
            [
                (urllib.parse.unquote(path), int(start), int(end))
                for path, start, end in _PARTITION_FILE.findall(describe(p.files()))
            ]
            for p in partitions
        ]
        expected = [[(p.file.name, p.start, p.start + p.length) for p in split] for split in splits]
        same = len(found) == len(expected) and all(
            len(there) == len(here)
            and all(t[1:] == h[1:] and t[0].endswith(f"/{h[0]}") for t, h in zip(there, here, strict=True))
            for there, here in zip(found, expected, strict=True)
        )
        if not same:
            raise SourceRejected(
                self.store.uri,
                f"Spark cuts the files of this window into {len(found)} partitions, which are not the {len(expected)} splits "
                "they were frozen as",
                "Either a file has just been changed, or this Spark packs files in another way than 4.0: please report it",
            )


def explain_read_error(source: str, error: BaseException) -> SourceRejected | None:
    """Return the file that an error of a Spark job concerns, and the cause; None if it concerns no file.

    :param source: the source's URI.
    :param error: as pyspark raised it.
    """
    text = str(error)
    failed = _FAILED_READ.search(text)
    if failed is None:
        if json := _JSON.search(text):
            detail = f"`{urllib.parse.unquote(json[1])}` cannot be read: {_MALFORMED_JSON}: {json[2][:_SHOWN]}"
            return SourceRejected(source, detail, _CORRECT_RECORDS)
        if "[PATH_NOT_FOUND]" in text:
            return SourceRejected(
                source,
                f"Spark does not find files that this worker sees: {text.splitlines()[0][:_SHOWN]}",
                "Mount the directory on Spark's machines too, or run both on the same",
            )
        return None
    kind, name = failed[1], urllib.parse.unquote(failed[2])
    if header := _HEADER.search(text):
        detail, action = (
            f"its header is not the schema's: {header[1]}. {header[2]}",
            f"If the file is right, correct the order in `schema`. {_REPLACE_FILE}",
        )
    elif count := _OTHER_COUNT.search(text):
        detail = f"its header has another number of columns than the schema: {count[1].strip()}"
        action = f"If the file is right, correct `schema`, or the option `delimiter`. {_REPLACE_FILE}"
    elif malformed := _MALFORMED.search(text):
        detail = malformed[1][:_SHOWN]
        action = _CORRECT_RECORDS
    elif _UNESCAPED_QUOTE in text:
        detail = "a quoted value holds a quote that is not escaped"
        action = (
            "Set the option `escape` to '\"' if quotes are doubled, as in RFC 4180, and `multiLine` if values hold line feeds"
        )
    elif kind == "FILE_NOT_EXIST":
        detail, action = "it is gone", "Put it back, or give the operator a new `pipeline=` name"
    else:
        causes = _CAUSE.findall(text)
        detail = (causes[-1] if causes else text)[:_SHOWN]
        action = REPLACE_DAMAGED
    return SourceRejected(source, f"`{name}` cannot be read: {detail}", action)
