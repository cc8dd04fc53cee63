"""Writers of Parquet, ORC, JSON and CSV files from Arrow tables, and the values that a format cannot hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.orc
import pyarrow.parquet

from airflow_kafka_spark.formats.tasks.text import format_csv_header, format_csv_lines, format_json_lines

# Size of the buffer: a row group of Parquet and ORC; text is encoded in pieces that fit into the cache.
_GROUP_ROWS, _GROUP_BYTES = 500_000, 64 << 20
_TEXT_ROWS, _TEXT_BYTES = 32_768, 8 << 20


@dataclass(frozen=True)
class FileSpec:
    """The format of a sink's files, and the options of their writer.

    :param format: ``parquet``, ``json``, ``csv`` or ``orc``.
    :param compression: the codec's name; None for the format's default.
    :param partitioned: True if a task has several files open.
    :param options: the sink's options.
    """

    format: str
    compression: str | None = None
    partitioned: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def writer(self) -> type[FileWriter]:
        """The class that writes the format."""
        return _WRITERS[self.format]

    @property
    def suffix(self) -> str:
        return f".{self.format}" + (".gz" if self.compression == "gzip" and self.format in ("json", "csv") else "")

    @property
    def codec(self) -> str:
        return self.writer.codecs[self.compression]

    @property
    def group_rows(self) -> int:
        return int(self.options.get("max_rows_per_group", _GROUP_ROWS if self.format in ("parquet", "orc") else _TEXT_ROWS))

    @property
    def group_bytes(self) -> int:
        return int(self.options.get("max_bytes_per_group", _GROUP_BYTES if self.format in ("parquet", "orc") else _TEXT_BYTES))

    @property
    def max_open_files(self) -> int:
        return int(self.options.get("max_open_files", 64))

    @property
    def format_options(self) -> dict[str, Any]:
        """The options that are passed to the format's writer."""
        return {name: value for name, value in self.options.items() if name not in GENERAL_OPTIONS}

    def make_stored_schema(self, schema: pa.Schema) -> pa.Schema:
        """Return the schema of the files: timestamps in microseconds, as Spark has them.

        Members of nullable structs are nullable, since Parquet's writer takes a null struct as a null of each member.
        """
        naive = self.format == "orc" and self.options.get("timestamps", "utc") == "utc"
        return pa.schema([_make_stored_field(f, naive, False) for f in schema])

    def find_unfit(self, batch: pa.RecordBatch) -> Iterator[tuple[int, str]]:
        """Yield position and reason of the rows with values that readers would not get back from the format."""
        if self.format == "orc":
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                rows = _find(column, pa.types.is_timestamp, _is_outside_orc)
                yield from ((int(row), f"the timestamp in column `{name}` cannot be stored in ORC: {_ORC_RANGE}") for row in rows)
        elif self.format == "csv" and batch.num_columns == 1:
            rows = np.flatnonzero(batch.column(0).is_null().to_numpy(zero_copy_only=False))
            yield from ((int(row), "a null in the only column is an empty line in CSV, which readers skip") for row in rows)


GENERAL_OPTIONS = {"max_open_files", "max_rows_per_group", "max_bytes_per_group", "timestamps"}


def _find_stored_type(kind: pa.DataType, naive: bool, absent: bool) -> pa.DataType:
    """Return the type that is stored for a type.

    :param absent: True if the struct that holds it may be null.
    """
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", None if naive or not kind.tz else "UTC")
    if pa.types.is_struct(kind):
        return pa.struct([_make_stored_field(kind.field(i), naive, absent) for i in range(kind.num_fields)])
    if pa.types.is_map(kind):
        return pa.map_(_find_stored_type(kind.key_type, naive, False), _make_stored_field(kind.item_field, naive, False))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_make_stored_field(kind.value_field, naive, False))
    return kind


def _make_stored_field(item: pa.Field, naive: bool, absent: bool) -> pa.Field:
    nullable = item.nullable or absent
    return item.with_type(_find_stored_type(item.type, naive, nullable)).with_nullable(nullable)


# --- values that ORC cannot hold --------------------------------------------------------------------------------------

_ORC_RANGE = "expected whole seconds before 1970, and nothing outside of 1678 to 2262, which its readers fail on"
_ORC_FIRST, _ORC_LAST = -9_214_560_000_000_000, 9_214_646_400_000_000


def _is_outside_orc(instants: pa.Array) -> np.ndarray:
    """Return a boolean per timestamp: True if ORC cannot hold it. Java's reader rejects a file with fractions of a second before
    1970, and Arrow's reader overflows 64 bits of nanoseconds."""
    micros = pc.fill_null(instants.cast(pa.timestamp("us", instants.type.tz)).cast(pa.int64()), 0).to_numpy()
    return ((micros < 0) & (micros % 1_000_000 != 0)) | (micros < _ORC_FIRST) | (micros > _ORC_LAST)


def _find(array: pa.Array, wanted: Callable[[pa.DataType], bool], test: Callable[[pa.Array], np.ndarray]) -> np.ndarray:
    """Return the rows in which a value of a wanted type, nested at any depth, meets the test."""
    kind = array.type
    if wanted(kind):
        return np.flatnonzero(test(array))
    if pa.types.is_struct(kind):
        members = [_find(pc.struct_field(array, [i]), wanted, test) for i in range(kind.num_fields)]
        return np.unique(np.concatenate(members)) if members else np.array([], int)
    if pa.types.is_map(kind):
        array = pa.ListArray.from_arrays(array.offsets, pa.StructArray.from_arrays([array.keys, array.items], ["key", "value"]))
    elif not pa.types.is_list(kind):
        return np.array([], int)
    inner = _find(pc.list_flatten(array), wanted, test)
    return np.unique(pc.list_parent_indices(array).to_numpy()[inner])


# --- writers ----------------------------------------------------------------------------------------------------------


class FileWriter(ABC):
    """Writes one file. Closing it finishes the file, but leaves the stream open."""

    codecs: Mapping[str | None, str]
    """The values of ``compression`` and the writer's names for them; None is the default."""
    defaults: Mapping[str, Any] = {}
    reserved: frozenset[str] = frozenset()
    """Options that the sink sets itself."""

    @abstractmethod
    def __init__(self, stream: pa.NativeFile, schema: pa.Schema, spec: FileSpec) -> None: ...

    @abstractmethod
    def write(self, table: pa.Table) -> None:
        """Append rows, as a row group or as lines."""

    @abstractmethod
    def close(self) -> None:
        """Write the end of the file."""


class ParquetFile(FileWriter):
    codecs = {None: "snappy", **{c: c for c in ("none", "snappy", "gzip", "zstd", "lz4")}}
    reserved = frozenset({"where", "schema", "filesystem", "flavor", "version", "compression", "coerce_timestamps"})

    def __init__(self, stream: pa.NativeFile, schema: pa.Schema, spec: FileSpec) -> None:
        self.writer = pyarrow.parquet.ParquetWriter(stream, schema, compression=spec.codec, **spec.format_options)

    @property
    def footer(self) -> pyarrow.parquet.FileMetaData:
        """The footer of the closed file, with its statistics."""
        return self.writer.writer.metadata

    def write(self, table: pa.Table) -> None:
        self.writer.write_table(table, row_group_size=max(table.num_rows, 1))

    def close(self) -> None:
        self.writer.close()


class OrcFile(FileWriter):
    codecs = {None: "zstd", "none": "uncompressed", **{c: c for c in ("zlib", "snappy", "lz4", "zstd")}}
    reserved = frozenset({"where", "compression"})

    def __init__(self, stream: pa.NativeFile, schema: pa.Schema, spec: FileSpec) -> None:
        # A stripe is kept in memory until it is full, and a partitioned task has many files open.
        options = {"stripe_size": (4 if spec.partitioned else 64) << 20, **spec.format_options}
        self.writer = pyarrow.orc.ORCWriter(stream, compression=spec.codec, **options)
        # A file without rows then has a schema, too.
        self.writer.write(schema.empty_table())

    def write(self, table: pa.Table) -> None:
        self.writer.write(table)

    def close(self) -> None:
        self.writer.close()


class TextFile(FileWriter):
    codecs = {None: "none", "none": "none", "gzip": "gzip"}

    def __init__(self, stream: pa.NativeFile, schema: pa.Schema, spec: FileSpec) -> None:
        self.compressed = pa.CompressedOutputStream(stream, "gzip") if spec.codec == "gzip" else None
        self.stream = self.compressed or stream

    def write(self, table: pa.Table) -> None:
        for batch in table.to_batches(max_chunksize=_TEXT_ROWS):
            self.stream.write(self.format_lines(batch))

    @abstractmethod
    def format_lines(self, batch: pa.RecordBatch) -> pa.Buffer:
        """Return the lines of a batch."""

    def close(self) -> None:
        if self.compressed is not None:
            self.compressed.close()


class JsonFile(TextFile):
    def __init__(self, stream: pa.NativeFile, schema: pa.Schema, spec: FileSpec) -> None:
        if spec.format_options:
            raise TypeError(f"unexpected {', '.join(spec.format_options)}")
        super().__init__(stream, schema, spec)

    def format_lines(self, batch: pa.RecordBatch) -> pa.Buffer:
        return format_json_lines(batch)


class CsvFile(TextFile):
    def __init__(self, stream: pa.NativeFile, schema: pa.Schema, spec: FileSpec) -> None:
        super().__init__(stream, schema, spec)
        self._begin(schema, **spec.format_options)

    def _begin(self, schema: pa.Schema, *, delimiter: str = ",", header: bool = True) -> None:
        if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n.-:' or delimiter.isalnum():
            raise ValueError(f"delimiter must be one character that no number or date contains, not {delimiter!r}")
        self.delimiter = delimiter
        if header:
            self.stream.write(format_csv_header(schema.names, delimiter))

    def format_lines(self, batch: pa.RecordBatch) -> pa.Buffer:
        return format_csv_lines(batch, self.delimiter)


_WRITERS: dict[str, type[FileWriter]] = {"parquet": ParquetFile, "json": JsonFile, "csv": CsvFile, "orc": OrcFile}


def try_writing(spec: FileSpec, schema: pa.Schema) -> str | None:
    """Write a file without rows into memory, and return the error, or None."""
    try:
        writer = spec.writer(pa.BufferOutputStream(), spec.make_stored_schema(schema), spec)
        # `empty_table()` would import pandas, which takes longer than the rest of a small window's validation.
        writer.write(pa.Table.from_batches([], spec.make_stored_schema(schema)))
        # Text writers encode types only with a row.
        if isinstance(writer, TextFile):
            writer.format_lines(pa.RecordBatch.from_arrays([pa.nulls(1, f.type) for f in schema], schema=schema))
        writer.close()
    except Exception as error:  # pyarrow raises many kinds of errors for types and options
        return f"{type(error).__name__}: {error}"
    return None
