"""An Iceberg sink under test, read by pyiceberg."""

from __future__ import annotations

import datetime as dt
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestContent, ManifestWriter, ManifestWriterV2
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.table import Table
from pyiceberg.table.update.snapshot import _FastAppendFiles
from pyiceberg.typedef import Record

from airflow_kafka_spark.sinks.base import Shape, Sink
from airflow_kafka_spark.sinks.iceberg.sink import IcebergSink
from tests.sinks.cases import Case, tree
from tests.sinks.feed import SCHEMA

NAME = "shop.orders"


class _DeleteManifestWriter(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


class _AppendDeletes(_FastAppendFiles):
    """A snapshot that adds delete files."""

    def new_manifest_writer(self, spec: PartitionSpec) -> ManifestWriter:
        output = self.new_manifest_output()
        return _DeleteManifestWriter(spec, self.schema(), output, self._snapshot_id, self._compression)


def delete_by_value(table: Table, id: int) -> None:
    """Delete a row as Flink does: by a file that holds its key."""
    path, number = f"{table.location()}/data/deletes-{id}.parquet", table.schema().find_field("id").field_id
    key = pa.field("id", pa.int64(), nullable=False, metadata={"PARQUET:field_id": str(number)})
    local = path.removeprefix("file://")
    pyarrow.parquet.write_table(pa.table([[id]], schema=pa.schema([key])), local)
    bound = {number: id.to_bytes(8, "little")}
    file = DataFile.from_args(
        content=DataFileContent.EQUALITY_DELETES,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=1,
        file_size_in_bytes=os.path.getsize(local),
        value_counts={number: 1},
        lower_bounds=bound,
        upper_bounds=bound,
        equality_ids=[number],
    )
    file.spec_id = table.spec().spec_id
    with table.transaction() as transaction:
        appended = transaction.update_snapshot().fast_append()
        appended.__class__ = _AppendDeletes
        with appended:
            appended.append_data_file(file)


class IcebergCase(Case):
    """An Iceberg sink with a SQL catalog in SQLite and files on a local disk: pyiceberg names the files."""

    prepares_commit = False

    secrets = ("hush hush",)

    def __init__(self, path: Path, **options: Any) -> None:
        path.mkdir(parents=True)
        self.path = path
        self.options = {"type": "sql", "uri": f"sqlite:///{path}/catalog.db", "warehouse": f"file://{path}/warehouse"}
        # Not used for local files, but tasks get it.
        self.options["s3.secret-access-key"] = self.secrets[0]
        self.conn_id = f"lake_{os.getpid()}_{abs(hash(str(path)))}"
        self.connect(**self.options)
        self.sink = IcebergSink(NAME, self.conn_id, **options)
        self.schema = SCHEMA
        if "partition_by" in options:
            self.schema = self.schema.append(pa.field("day_of_week", pa.string()))

    def connect(self, **extra: str) -> None:
        """Set these options in the sink's connection."""
        connection = {"conn_type": "iceberg", "extra": {"name": "lake", **extra}}
        os.environ[f"AIRFLOW_CONN_{self.conn_id.upper()}"] = json.dumps(connection)

    @contextmanager
    def catalog(self) -> Iterator[Catalog]:
        """Return the catalog as another client opens it."""
        catalog = load_catalog("lake", **self.options)
        try:
            yield catalog
        finally:
            catalog.close()

    def table(self) -> Table | None:
        """Return the newest version of the table; its files can be read after the catalog is closed."""
        with self.catalog() as catalog:
            try:
                return catalog.load_table(NAME)
            except (NoSuchTableError, NoSuchNamespaceError):
                return None

    def read(self, *only: str) -> list[dict[str, Any]]:
        table = self.table()
        if table is None or table.current_snapshot() is None:
            return []
        there = [field.name for field in table.schema().fields]
        columns = [name for name in only or self.schema.names if name in there]
        found = table.scan(selected_fields=tuple(columns)).to_arrow().select(columns)
        return found.cast(pa.schema([self.schema.field(n) for n in columns])).to_pylist()

    def of_others(self, *ids: int) -> None:
        """Append rows as another writer does."""
        with self.catalog() as catalog:
            table = catalog.load_table(NAME)
            columns = {f.name: pa.nulls(len(ids), f.type) for f in table.schema().as_arrow()} | {"id": pa.array(ids, pa.int64())}
            table.append(pa.table(columns, schema=table.schema().as_arrow()))

    def delete(self, id: int) -> None:
        """Delete a row as another writer does."""
        with self.catalog() as catalog:
            catalog.load_table(NAME).delete(f"id = {id}")

    def delete_by_value(self, id: int) -> None:
        """Delete a row as Flink does: by a file that holds its key."""
        with self.catalog() as catalog:
            delete_by_value(catalog.load_table(NAME), id)

    def compact(self) -> None:
        """Write all rows into other files as another writer does."""
        with self.catalog() as catalog:
            table = catalog.load_table(NAME)
            table.overwrite(table.scan().to_arrow())

    def maintain(self) -> None:
        """Write all rows into other files, and expire all snapshots that neither a branch nor a tag names."""
        self.compact()
        self.expire()

    def expire(self) -> None:
        """Expire all snapshots that neither a branch nor a tag names."""
        with self.catalog() as catalog:
            table = catalog.load_table(NAME)
            table.maintenance.expire_snapshots().older_than(dt.datetime.now() + dt.timedelta(days=1)).commit()

    def commits(self) -> int:
        """Return the number of snapshots that readers have seen."""
        table = self.table()
        return len(table.history()) if table is not None else 0

    def files(self, every: bool = False) -> set[str]:
        """Return the data files of the table, below the warehouse.

        :param every: the files of all snapshots, and their manifests.
        """
        table, found = self.table(), set()
        for snapshot in table.snapshots() if table is not None else ():
            if every:
                found |= {snapshot.manifest_list, *(m.manifest_path for m in snapshot.manifests(table.io))}
            if every or snapshot == table.current_snapshot():
                for manifest in snapshot.manifests(table.io):
                    found |= {e.data_file.file_path for e in manifest.fetch_manifest_entry(table.io)}
        return {path.removeprefix(f"file://{self.path}/warehouse/") for path in found}

    def everything(self) -> Any:
        table = self.table()
        return table and table.metadata_location, tree(self.path / "warehouse")

    def published(self) -> Any:
        table = self.table()
        named = self.files(every=True)
        return table and table.metadata_location, {n: d for n, d in tree(self.path / "warehouse").items() if n in named}

    def leftovers(self) -> list[str]:
        named = self.files(every=True)
        known = {".", "shop", "shop/orders", *(f"shop/orders/{n}" for n in ("data", "metadata", "_airflow", "_airflow/attempts"))}
        directories = {name.rpartition("/")[0] for name in named}
        return [
            name
            for name in tree(self.path / "warehouse")
            # A metadata file of a commit that was refused has no name that leads to its attempt.
            if name not in named | directories | known and not name.endswith(".metadata.json")
        ]

    def age(self, days: float) -> None:
        began = time.time() - days * 86400
        for attempt in self.path.glob("warehouse/shop/orders/_airflow/attempts/*/attempt.json"):
            os.utime(attempt, (began, began))

    def broken(self) -> tuple[Sink, Shape, set[str]]:
        shape = Shape("broken", pa.schema([("id", pa.int64()), ("gap", pa.duration("us"))]))
        options = {"compression": "rar", "mode": "merge", "table_properties": {"format-version": "3"}}
        sink = IcebergSink("orders", self.conn_id, partition_by=("nobody", "gap", "log(id)"), **options)
        where = {"sink.table", "sink.table column `gap`", "sink.partition_by", "sink.compression", "sink.mode"}
        return sink, shape, where | {"sink.table_properties"}

    def in_order(self) -> list[list[int]]:
        paths = [self.path / "warehouse" / name for name in sorted(self.files())]
        return [pyarrow.parquet.ParquetFile(path).read(["id"])["id"].to_pylist() for path in paths]
