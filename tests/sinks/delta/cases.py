"""A Delta sink under test, read by Arrow from the files that Delta's log names."""

from __future__ import annotations

import json
import os
import time
import urllib.parse
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from deltalake import DeltaTable, write_deltalake

from airflow_kafka_spark.sinks.base import Shape, Sink
from airflow_kafka_spark.sinks.delta.sink import DeltaSink
from tests.sinks.cases import Case, tree
from tests.sinks.feed import SCHEMA


class DeltaCase(Case):
    """A Delta sink on a local disk, read by deltalake: its log says which files there are, Arrow reads them."""

    prepares_commit = False

    def __init__(self, path: Path, **options: Any) -> None:
        path.parent.mkdir(parents=True)
        self.path = path
        self.sink = DeltaSink(str(path), **options)
        self.schema = SCHEMA
        if "partition_by" in options:
            self.schema = self.schema.append(pa.field("day_of_week", pa.string()))

    def read(self, *only: str) -> list[dict[str, Any]]:
        if not (self.path / "_delta_log").exists():
            return []
        found = DeltaTable(self.path).to_pyarrow_dataset()
        columns = [name for name in only or self.schema.names if name in found.schema.names]
        return found.to_table(columns=columns).cast(pa.schema([self.schema.field(n) for n in columns])).to_pylist()

    def of_others(self, *ids: int) -> None:
        """Another writer appends rows."""
        write_deltalake(self.path, pa.table({"id": pa.array(ids, pa.int64())}), mode="append", schema_mode="merge")

    def compact(self) -> None:
        """OPTIMIZE: others write all rows into other files."""
        DeltaTable(self.path).optimize.compact()

    def maintain(self) -> None:
        """OPTIMIZE, and VACUUM of all that the log does not name."""
        self.compact()
        DeltaTable(self.path).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False, full=True)

    def commits(self) -> int:
        """Return the number of versions that readers have seen."""
        return DeltaTable(self.path).version()

    def files(self) -> set[str]:
        """The files that the log names, below the table."""
        if not (self.path / "_delta_log").exists():
            return set()
        added = pa.table(DeltaTable(self.path).get_add_actions(flatten=True))
        return set(map(urllib.parse.unquote, added.column("path").to_pylist()))

    def everything(self) -> Any:
        """Return all files. An aborted split leaves the directories of its partitions, until the attempt commits or ends."""
        found = tree(self.path.parent)
        return {name: digest for name, digest in found.items() if not (self.path.parent / name).is_dir() or "=" not in name}

    def published(self) -> Any:
        """The log, the files that it names, and the records of windows."""
        named = self.files()
        seen = ("_delta_log", "_airflow/windows")
        return {name: digest for name, digest in tree(self.path).items() if name in named or name.startswith(seen)}

    def leftovers(self) -> list[str]:
        """Return files that no entry of the log has ever named. Files that were replaced stay until a VACUUM."""
        entries = (json.loads(line) for path in self.path.glob("_delta_log/*.json") for line in path.read_text().splitlines())
        named = {urllib.parse.unquote(entry["add"]["path"]) for entry in entries if "add" in entry}
        directories = {str(directory) for name in named for directory in Path(name).parents}
        known = {".", "_delta_log", "_airflow", "_airflow/windows", "_airflow/attempts"}
        return [
            name
            for name in tree(self.path)
            if name not in named | directories | known
            and not name.startswith("_airflow/windows/")
            and not (name.startswith("_delta_log/") and name.endswith(".json"))
        ]

    def age(self, days: float) -> None:
        began = time.time() - days * 86400
        for attempt in self.path.glob("_airflow/attempts/*/attempt.json"):
            os.utime(attempt, (began, began))

    def broken(self) -> tuple[Sink, Shape, set[str]]:
        file = self.path.parent / "a file"
        file.write_text("in the way")
        shape = Shape("broken", pa.schema([("id", pa.int64()), ("gap", pa.duration("us"))]))
        options = {"compression": "rar", "mode": "merge", "table_properties": {"delta.columnMapping.mode": "name"}}
        sink = DeltaSink(str(file / "orders"), partition_by=("nobody", "gap"), **options)
        where = {"sink.path", "sink.path column `gap`", "sink.partition_by", "sink.compression", "sink.mode"}
        return sink, shape, where

    def in_order(self) -> list[list[int]]:
        options = {"columns": ["id"], "partitioning": None}
        return [pa.parquet.read_table(self.path / name, **options)["id"].to_pylist() for name in sorted(self.files())]
