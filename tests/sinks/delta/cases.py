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
from tests.sinks.feed import SCHEMA, row


class DeltaCase(Case):
    """A Delta sink on a local disk, read by deltalake: its log names the files, and Arrow reads them."""

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
        """Append rows as another writer does."""
        write_deltalake(self.path, pa.table({"id": pa.array(ids, pa.int64())}), mode="append", schema_mode="merge")

    def delete(self, id: int) -> None:
        """Delete a row as another writer does."""
        DeltaTable(self.path).delete(f"id = {id}")

    def compact(self) -> None:
        """Run OPTIMIZE: write all rows into other files as another writer does."""
        DeltaTable(self.path).optimize.compact()

    def maintain(self) -> None:
        """Run OPTIMIZE, and VACUUM of all files that the log does not name."""
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
        """Return the log, the files that it names, and the records of windows."""
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


# --- tables as Spark creates them -----------------------------------------------------------------------------------------

MAPPED = pa.schema(
    [
        ("id", pa.int64()),
        ("full name", pa.string()),
        ("placed_at", pa.timestamp("us", "UTC")),
        ("place", pa.struct([("city", pa.string()), ("zip", pa.int32())])),
        ("counts", pa.map_(pa.string(), pa.int64())),
        ("ratio", pa.float64()),
    ]
)
"""The columns of rows for :func:`create_mapped_table`."""


def create_mapped_table(path: Path) -> None:
    """Write the first entry of the log of a table that Spark would create with these statements:

    ``CREATE TABLE (..., day DATE GENERATED ALWAYS AS (CAST(placed_at AS DATE)), initial STRING GENERATED ALWAYS AS (...))
    PARTITIONED BY (day) TBLPROPERTIES ('delta.columnMapping.mode' = 'name')``. The columns have other names in its files.
    """

    def column(number: int, name: str, kind: Any, **facts: str) -> dict[str, Any]:
        mapping = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": f"col-{number}"}
        return {"name": name, "type": kind, "nullable": True, "metadata": mapping | facts}

    columns = [
        *(column(1, "id", "long"), column(2, "full name", "string"), column(3, "placed_at", "timestamp")),
        column(4, "place", {"type": "struct", "fields": [column(5, "city", "string"), column(6, "zip", "integer")]}),
        column(7, "counts", {"type": "map", "keyType": "string", "valueType": "long", "valueContainsNull": True}),
        column(8, "ratio", "double"),
        column(9, "day", "date", **{"delta.generationExpression": "CAST(placed_at AS DATE)"}),
        column(10, "initial", "string", **{"delta.generationExpression": "SUBSTRING(`full name`, 1, 1)"}),
    ]
    metadata = {
        "id": "a-table",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": columns}),
        "partitionColumns": ["day"],
        "configuration": {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "10"},
        "createdTime": 1,
    }
    protocol = {"minReaderVersion": 2, "minWriterVersion": 5}
    entry = [{"commitInfo": {"timestamp": 1, "operation": "CREATE TABLE"}}, {"protocol": protocol}, {"metaData": metadata}]
    (path / "_delta_log").mkdir(parents=True)
    (path / "_delta_log" / f"{0:020d}.json").write_text("\n".join(map(json.dumps, entry)) + "\n")


def mapped_row(i: int) -> dict[str, Any]:
    """Return a row of :data:`MAPPED`."""
    return {**row(i), "full name": row(i)["name"]}


def with_generated(line: dict[str, Any]) -> dict[str, Any]:
    """Return a row of :data:`MAPPED` as the table has it."""
    at, name = line["placed_at"], line["full name"]
    return {**line, "day": at and at.date(), "initial": name if name is None else name[:1]}


def read_mapped_table(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a mapped table, without its generated columns, under the names that its files have."""
    table, physical = DeltaTable(path), pa.schema([(f"col-{n}", f.type) for n, f in zip((1, 2, 3, 4, 7, 8), MAPPED, strict=True)])
    member = {"city": "col-5", "zip": "col-6"}
    lines = []
    for file in map(urllib.parse.unquote, pa.table(table.get_add_actions(flatten=True)).column("path").to_pylist()):
        for line in pa.parquet.read_table(path / file, partitioning=None).to_pylist():
            found = {name: line[there] for name, there in zip(MAPPED.names, physical.names, strict=True)}
            place = found["place"]
            lines.append({**found, "place": place and {name: place[there] for name, there in member.items()}})
    return lines
