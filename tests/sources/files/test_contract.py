"""The files source: the contract in all formats, what is new, what is refused, how it is cut."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet
import pytest
from pyspark.sql import Row

from airflow_kafka_spark.sources.files.source import FilesSource
from tests.sources.contract import RowSourceCase, RowSourceContract, SplitsContract

SCHEMA = "id bigint, name string"


def rows_of(ids: range) -> list[dict[str, Any]]:
    return [{"id": n, "name": f"näme {n}"} for n in ids]


def write_parquet(path: Path, ids: range) -> None:
    pa.parquet.write_table(pa.Table.from_pylist(rows_of(ids)), path, row_group_size=20)


def write_orc(path: Path, ids: range) -> None:
    pa.orc.write_table(pa.Table.from_pylist(rows_of(ids)), path)


def write_json(path: Path, ids: range) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows_of(ids)), encoding="utf-8")


def write_csv(path: Path, ids: range) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["id", "name"])
        writer.writeheader()
        writer.writerows(rows_of(ids))


def write_text(path: Path, ids: range) -> None:
    path.write_text("".join(f"{n} näme\n" for n in ids), encoding="utf-8")


def write_gzip(path: Path, ids: range) -> None:
    with gzip.open(path.with_name(path.name + ".gz"), "wt", compresslevel=0, encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows_of(ids))


Write = Callable[[Path, range], None]
KINDS: dict[str, tuple[Write, dict[str, Any]]] = {
    "parquet": (write_parquet, {}),
    "orc": (write_orc, {}),
    "json": (write_json, {"schema": SCHEMA}),
    "csv": (write_csv, {"schema": SCHEMA, "options": {"header": True}}),
    "text": (write_text, {}),
    "json-gzip": (write_gzip, {"schema": SCHEMA}),
    "parquet-schema": (write_parquet, {"schema": SCHEMA}),
}


class FilesCase(RowSourceCase):
    """A directory that is filled with three small files and one that is as large as the three."""

    def __init__(self, directory: Path, kind: str) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.write, options = KINDS[kind]
        self.format = kind.partition("-")[0]
        options = {"format": self.format, "split_bytes": 1500, **options}
        self.source = FilesSource(str(directory), **options)
        self.limited = FilesSource(str(directory), max_files=2, **options)
        self.next = 0

    def add(self, rows: int) -> list[int]:
        first, sixth = self.next, rows // 6
        bounds = [0, sixth, 2 * sixth, 3 * sixth, rows]
        for start, end in zip(bounds, bounds[1:], strict=False):
            self.file(f"part-{first + start:06}.{self.format}", range(first + start, first + end))
        return list(range(first, first + rows))

    def file(self, name: str, ids: range) -> Path:
        path = self.directory / name
        self.write(path, ids)
        self.next = max(self.next, ids.stop)
        return path

    def identity(self, row: Row) -> int:
        if self.format == "text":
            number, name = row["value"].split(" ")
            assert name == "näme"
            return int(number)
        assert row["name"] == f"näme {row['id']}"
        return row["id"]


class TestFilesSource(RowSourceContract):
    @pytest.fixture(params=["parquet", "json"])
    def case(self, request, tmp_path):
        return FilesCase(tmp_path / "in", request.param)


class TestSplitsOfOtherFiles(SplitsContract):
    """The choice of a window's files does not depend on their format."""

    @pytest.fixture(params=[kind for kind in KINDS if kind not in ("parquet", "json")])
    def case(self, request, tmp_path):
        return FilesCase(tmp_path / "in", request.param)
