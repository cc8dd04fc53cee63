"""A sink under test: how a reader reads it, and everything that it has on disk or in a catalog."""

from __future__ import annotations

import base64
import datetime as dt
import gzip
import hashlib
import json
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset
import pyarrow.types as t

from airflow_kafka_spark.sinks.base import Guarantee, Shape, Sink
from airflow_kafka_spark.sinks.files.sink import FilesSink
from tests.sinks.feed import SCHEMA


class Case(ABC):
    """The facts that the contract suite needs of a sink. Rows are read without the sink's code.

    :ivar sink: the sink.
    :ivar schema: columns of all types that it takes.
    :ivar secrets: values that must never be in a repr.
    :ivar prepares_commit: True if ``commit`` does something before ``sink.staged``; otherwise a kill at ``job.done`` is
        equivalent.
    """

    sink: Sink
    schema: pa.Schema
    secrets: tuple[str, ...] = ()
    prepares_commit: bool = True

    @property
    def impatient(self) -> Sink:
        """Return the sink with a timeout of two seconds for another attempt's lock."""
        return self.sink

    @property
    def whole_windows(self) -> bool:
        """Return True if a reader sees a window completely or not at all."""
        return self.sink.guarantee is Guarantee.EXACTLY_ONCE

    @abstractmethod
    def read(self, *only: str) -> list[dict[str, Any]]:
        """Return every row that a reader sees, as Python's values; only the named columns, if any are named."""

    @abstractmethod
    def everything(self) -> Any:
        """Return everything that the sink has, records and leftovers included, as a value for ``==``."""

    @abstractmethod
    def published(self) -> Any:
        """Return only the visible rows and the sink's records, without leftovers."""

    @abstractmethod
    def leftovers(self) -> list[str]:
        """Return what attempts have left besides published windows and their records."""

    @abstractmethod
    def age(self, days: float) -> None:
        """Make all existing attempts look as if they had begun this many days ago."""

    @abstractmethod
    def broken(self) -> tuple[Sink, Shape, set[str]]:
        """Return a sink like this one with several mistakes, and the ``where`` of each problem that must be reported."""

    def in_order(self) -> list[list[int]] | None:
        """Return the ids of each stored run of rows, in stored order; None if the sink keeps no order."""
        return None

    def ids(self) -> list[int]:
        return [line["id"] for line in self.read("id")]

    def wanted(self, only: tuple[str, ...]) -> pa.Schema:
        """Return these columns of :attr:`schema`; all if none is named."""
        return pa.schema([self.schema.field(name) for name in only]) if only else self.schema


class FilesCase(Case):
    """A files sink, read by Arrow (JSON by Python's parser). Hidden files are skipped, as readers do."""

    prepares_commit = False

    def __init__(self, path: Path, format: str, **options: Any) -> None:
        path.parent.mkdir(parents=True)
        self.path = path
        self.sink = FilesSink(str(path), format=format, **options)
        self.schema = SCHEMA
        if format == "csv":
            nested = {"raw", "tags", "place", "counts"}
            self.schema = pa.schema([f for f in SCHEMA if f.name not in nested])
        if "partition_by" in options:
            self.schema = self.schema.append(pa.field("day_of_week", pa.string()))

    def read(self, *only: str) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        if self.sink.format == "json":
            return [line for path in self.files() for line in read_json(path, self.wanted(only))]
        return read_arrow(self.path, self.sink, self.schema, *only)

    def files(self) -> list[Path]:
        """Data files, found as readers find them."""
        found = (p for p in self.path.rglob("*") if p.is_file())
        return sorted(p for p in found if not any(part[0] in "._" for part in p.relative_to(self.path).parts))

    def everything(self) -> Any:
        return tree(self.path.parent)

    def published(self) -> Any:
        return tree(self.path)

    def leftovers(self) -> list[str]:
        published = {".", "orders"}
        beside = [name for name in tree(self.path.parent) if name.split("/")[0] not in published]
        return beside + [name for name in tree(self.path) if name != "." and not name.startswith("window=")]

    def age(self, days: float) -> None:
        began = time.time() - days * 86400
        for attempt in self.path.parent.glob(".*.airflow-staging/*"):
            os.utime(attempt, (began, began))

    def broken(self) -> tuple[Sink, Shape, set[str]]:
        file = self.path.parent / "a file"
        file.write_text("in the way")
        shape = Shape("broken", pa.schema([("id", pa.int64()), ("window", pa.string()), ("gap", pa.duration("us"))]))
        options = {"compression": "rar", "options": {"max_open_files": 0}}
        sink = FilesSink(str(file / "orders"), self.sink.format, partition_by=("nobody", "gap"), **options)
        where = {"sink.path", "sink.partition_by", "sink.compression", "sink.options", "sink.window_column"}
        return sink, shape, where

    def in_order(self) -> list[list[int]]:
        if self.sink.format == "json":
            return [[line["id"] for line in read_json(path, self.schema)] for path in self.files()]
        return [[line["id"] for line in read_arrow(path, self.sink, self.schema)] for path in self.files()]


class ManifestCase(FilesCase):
    """A files sink whose windows are published by manifests, on a local disk. Arrow reads the files that the manifests name."""

    def __init__(self, path: Path, format: str, **options: Any) -> None:
        super().__init__(path, format, visibility="manifest", **options)

    def read(self, *only: str) -> list[dict[str, Any]]:
        files = self.files()
        if self.sink.format == "json" or not files:
            return [line for path in files for line in read_json(path, self.wanted(only))]
        names = ["window", *self.sink.partition_by]
        in_path = pa.schema([pa.field(n, pa.string()) if n == "window" else self.schema.field(n) for n in names])
        partitioning = pa.dataset.partitioning(in_path, flavor="hive")
        found = pa.dataset.dataset(
            [str(file) for file in files], format=arrow_format(self.sink.format, self.schema), partitioning=partitioning,
            partition_base_dir=str(self.path / "_data"),
        )  # fmt: skip
        columns = [n for n in only or self.schema.names if n in found.schema.names]
        return found.to_table(columns=columns).cast(pa.schema([self.schema.field(n) for n in columns])).to_pylist()

    def files(self) -> list[Path]:
        """The files of the newest replay of each window."""
        newest = {found.parent: found for found in sorted(self.path.glob("_windows/*/[0-9]*/*.json"), key=lambda p: int(p.stem))}
        return sorted(self.path / file["path"] for found in newest.values() for file in json.loads(found.read_text())["files"])

    def published(self) -> Any:
        named = {os.path.relpath(file, self.path) for file in self.files()}
        return {n: digest for n, digest in tree(self.path).items() if n in named or re.match(r"_windows/[^/]*/\d", n)}

    def leftovers(self) -> list[str]:
        named = {os.path.relpath(file, self.path) for file in self.files()}
        directories = {str(parent) for name in named for parent in Path(name).parents}
        known = {".", "_data", "_airflow", "_airflow/attempts", "_windows"}
        return [n for n in tree(self.path) if n not in named | directories | known and not n.startswith("_windows/")]

    def age(self, days: float) -> None:
        began = time.time() - days * 86400
        for attempt in self.path.glob("_airflow/attempts/*/attempt.json"):
            os.utime(attempt, (began, began))

    def broken(self) -> tuple[Sink, Shape, set[str]]:
        sink, shape, where = super().broken()
        assert isinstance(sink, FilesSink)
        return replace(sink, visibility="manifest"), shape, where


def tree(path: Path) -> dict[str, str]:
    """Return every directory and file below, with a digest of its content."""
    return dict(sorted(_walk(path)))


def _walk(path: Path) -> Iterator[tuple[str, str]]:
    for here, _, files in os.walk(path):
        yield os.path.relpath(here, path), "directory"
        for name in files:
            file = os.path.join(here, name)
            yield os.path.relpath(file, path), hashlib.sha256(Path(file).read_bytes()).hexdigest()


# --- reading ------------------------------------------------------------------------------------------------------------


def read_arrow(path: Path, sink: FilesSink, schema: pa.Schema, *only: str) -> list[dict[str, Any]]:
    """Return the rows that ``pyarrow.dataset`` reads from a directory or a file; only the named columns, if any are named."""
    in_path = pa.schema([(sink.window_column, pa.string()), *(schema.field(n) for n in sink.partition_by)])
    options = {"partitioning": pa.dataset.partitioning(in_path, flavor="hive")} if path.is_dir() else {}
    found = pa.dataset.dataset(path, format=arrow_format(sink.format, schema), **options)
    columns = [n for n in only or schema.names if n in found.schema.names]
    if not columns:
        return []
    types = pa.schema([schema.field(n) for n in columns])
    # ORC has its instants without a zone and in nanoseconds: the same points in time.
    return found.to_table(columns=columns).cast(types).to_pylist()


def arrow_format(name: str, schema: pa.Schema) -> pa.dataset.FileFormat | str:
    """Return a format with the options that a reader needs; only CSV needs some."""
    if name != "csv":
        return name
    nulls = {"null_values": [""], "strings_can_be_null": True, "quoted_strings_can_be_null": False}
    convert = pa.csv.ConvertOptions(column_types=schema, **nulls)
    return pa.dataset.CsvFileFormat(pa.csv.ParseOptions(newlines_in_values=True), convert_options=convert)


_DECODER = json.JSONDecoder(parse_float=Decimal)


def read_json(path: Path, schema: pa.Schema) -> list[dict[str, Any]]:
    """Read JSON lines with Python's parser; missing fields are null."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", newline="\n") as lines:
        parsed = [_DECODER.decode(line) for line in lines]
    return [{f.name: _from_json(line.get(f.name), f.type) for f in schema} for line in parsed]


def _from_json(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if t.is_struct(kind):
        return {f.name: _from_json(value.get(f.name), f.type) for f in kind}
    if t.is_map(kind):
        return [(k, _from_json(v, kind.item_type)) for k, v in value.items()]
    if t.is_list(kind):
        return [_from_json(v, kind.value_type) for v in value]
    if t.is_timestamp(kind):
        parsed = dt.datetime.fromisoformat(value.replace("Z", "+00:00"))
        assert (parsed.tzinfo is None) == (kind.tz is None)
        return parsed
    if t.is_date(kind):
        return dt.date.fromisoformat(value)
    if t.is_binary(kind):
        return base64.b64decode(value, validate=True)
    if t.is_decimal(kind):
        assert isinstance(value, (int, Decimal)), "a number, not a text"
        return Decimal(value)
    if t.is_float32(kind):
        return pa.scalar(float(value), pa.float32()).as_py()
    return float(value) if t.is_floating(kind) else value
