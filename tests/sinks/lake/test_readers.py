"""Lake tables that Spark compacts while windows arrive, read by Spark, DuckDB, polars, deltalake and pyiceberg.

The Iceberg table is in a catalog of PostgreSQL, to which Spark and the sink commit at once.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyiceberg.table import Table

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.hooks.spark import jars
from airflow_kafka_spark.sinks.delta.sink import DeltaSink
from airflow_kafka_spark.sinks.iceberg.validation import EQUALITY_DELETES_REMEDY
from airflow_kafka_spark.sources.jdbc.postgres import DRIVER
from airflow_kafka_spark.testing import EmbeddedPostgres
from tests.sinks import spark_reader
from tests.sinks.attempt import apply
from tests.sinks.delta.cases import MAPPED, DeltaCase, create_mapped_table, mapped_row, with_generated
from tests.sinks.feed import SCHEMA, Feed, Job, row
from tests.sinks.files.test_readers import from_spark
from tests.sinks.iceberg.cases import NAME, IcebergCase
from tests.sinks.lake.conftest import KINDS
from tests.sinks.oracle import same_multiset
from tests.sinks.postgres.kit import Pipeline, dead, write
from tests.support.waiting import eventually

pytestmark = pytest.mark.extended

PACKAGES = (
    "io.delta:delta-spark_2.13:4.0.0",
    "org.apache.iceberg:iceberg-spark-runtime-4.0_2.13:1.10.0",
    DRIVER,
)
EXTENSIONS = (
    "io.delta.sql.DeltaSparkSessionExtension",
    "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
)
WINDOWS = 12


@dataclass(frozen=True)
class Catalog:
    """A catalog in a database of PostgreSQL.

    :param server: the server.
    :param database: the database.
    """

    server: EmbeddedPostgres
    database: str

    @classmethod
    def create(cls, server: EmbeddedPostgres, database: str) -> Catalog:
        """Create the database."""
        with server.connect(autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{database}"')
        return cls(server, database)

    @property
    def address(self) -> str:
        """Host, port and database."""
        return f"{self.server.host}:{self.server.port}/{self.database}"

    @property
    def login(self) -> str:
        """User and password."""
        return f"{self.server.user}:{self.server.password}"

    @contextmanager
    def locked(self, spark: Future[list[Any]]) -> Iterator[Callable[[int], None]]:
        """Lock the rows of all tables, so that every commit waits until this is left.

        :param spark: the Spark that commits.
        :return: a function that waits until that many commits wait.
        """
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND wait_event_type = 'Lock'"
        dsn = self.server.dsn.rpartition("/")[0] + f"/{self.database}"

        def are_waiting(number: int) -> bool:
            assert not spark.done(), spark.result()
            with self.server.connect(autocommit=True) as looking:
                (found,) = looking.execute(waiting, [self.database]).fetchone() or (0,)
            return bool(found == number)

        with psycopg.connect(dsn) as connection:
            assert connection.execute("SELECT FROM iceberg_tables FOR UPDATE").rowcount
            yield lambda number: eventually(lambda: are_waiting(number), 60) and None


@dataclass(frozen=True)
class Filled:
    """A table of many windows that other writers have compacted meanwhile.

    :param expected: its rows.
    :param by_spark: the rows that Spark has read.
    """

    lake: DeltaCase | IcebergCase
    expected: list[dict[str, Any]]
    by_spark: list[dict[str, Any]]


@dataclass(frozen=True)
class Mapped:
    """A Delta table with column mapping and generated columns, to which Spark and the sink have written.

    :param expected: its rows.
    :param by_spark: the rows that Spark has read.
    :param agree: what Spark says of the generated columns of all rows.
    """

    expected: list[dict[str, Any]]
    by_spark: list[dict[str, Any]]
    agree: list[dict[str, Any]]


KEYED = pa.schema([("id", pa.int64()), ("v", pa.string())])


@dataclass(frozen=True)
class Deleted:
    """An upserted Iceberg table, of which Spark has deleted rows by delete files.

    :param rows: the rows that readers have found.
    :param deletes: the number of delete files before the last upsert.
    :param rewritten: the problems of another table, which had equality deletes until Spark rewrote it.
    :param flinks: its rows after one more upsert.
    """

    rows: dict[str, list[dict[str, Any]]]
    deletes: int
    rewritten: list[Problem]
    flinks: list[dict[str, Any]]


@pytest.fixture(scope="module")
def deleted(filled: tuple[dict[str, Filled], Mapped, Deleted]) -> Deleted:
    return filled[2]


@pytest.fixture(scope="module")
def mapped(filled: tuple[dict[str, Filled], Mapped, Deleted]) -> Mapped:
    return filled[1]


@pytest.fixture(scope="module")
def lakes(filled: tuple[dict[str, Filled], Mapped, Deleted]) -> dict[str, Filled]:
    return filled[0]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, postgres: EmbeddedPostgres) -> tuple[dict[str, Filled], Mapped, Deleted]:
    """Fill a table of each kind while one Spark compacts both, and two to which Spark writes, too.

    Twice Spark's compaction and a window wait for the row of the Iceberg table in its catalog, each with a commit that replaces
    the metadata that both have read: once Spark is first, once the window.
    """
    here, feed = tmp_path_factory.mktemp("lakes"), Feed(SCHEMA)
    lakes = {kind: make(here / kind / "orders") for kind, make in KINDS.items()}
    delta, iceberg = lakes["delta"], lakes["iceberg"]
    catalog = Catalog.create(postgres, f"catalog_of_{here.name}")
    iceberg.options["uri"] = f"postgresql+psycopg://{catalog.login}@{catalog.address}"
    iceberg.connect(**iceberg.options)
    settings = {
        "spark.jars": ",".join(str(path) for package in PACKAGES for path in jars.resolve_jars([package], exclude_bundled=True)),
        "spark.sql.extensions": ",".join(EXTENSIONS),
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.lake.type": "jdbc",
        "spark.sql.catalog.lake.uri": f"jdbc:postgresql://{catalog.address}",
        "spark.sql.catalog.lake.jdbc.user": postgres.user,
        "spark.sql.catalog.lake.jdbc.password": postgres.password,
        "spark.sql.catalog.lake.warehouse": iceberg.options["warehouse"],
        # A cached table would not have the windows that have arrived since.
        "spark.sql.catalog.lake.cache-enabled": "false",
        # Of a hundred rows. The defaults are 200 and 50 tasks for each look at a table.
        "spark.sql.shuffle.partitions": "2",
        "spark.databricks.delta.snapshotPartitions": "2",
        # INT96, which is the default, has other years for Arrow's readers.
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    }
    names = ("began", "again", "compacted")
    began, again, compacted = (spark_reader.Meeting(here / f"{name} here", here / f"{name} there") for name in names)
    rewrite = f"CALL lake.system.rewrite_data_files(table => '{NAME}', options => map('min-input-files', '2'))"
    compaction = (spark_reader.Statement(f"OPTIMIZE delta.`{delta.path}`"), spark_reader.Statement(rewrite))
    special = here / "mapped"
    create_mapped_table(special)
    by_others = (
        f"INSERT INTO delta.`{special}` (id, `full name`, placed_at, place, counts, ratio) "
        "SELECT -id, 'Spark', timestamp'2026-11-20 23:59:59.999999', named_struct('city', 'x', 'zip', 1), NULL, 0.5D "
        "FROM range(1, 4)"
    )
    agreement = (
        "SELECT day <=> CAST(placed_at AS DATE) AND initial <=> SUBSTRING(`full name`, 1, 1) AS agrees, count(*) AS rows "
        f"FROM delta.`{special}` GROUP BY 1"
    )
    keyed = {"mode": "upsert", "key": ["id"], "table_properties": {"write.delete.mode": "merge-on-read"}}
    upsert, upserts = replace(iceberg.sink, table="shop.deleted", **keyed), Pipeline(KEYED, "upserts")
    write(upsert, upserts, [{"id": i, "v": "old"} for i in range(6)])
    flink = replace(upsert, table="shop.flink")
    write(flink, Pipeline(KEYED, "flink"), [{"id": i, "v": "old"} for i in range(4)])
    remedy = (
        "CALL lake.system.rewrite_data_files(table => 'shop.flink', "
        "options => map('rewrite-all', 'true', 'remove-dangling-deletes', 'true'))"
    )
    requests = [
        _delete_by_value(_load(iceberg, "shop.flink"), 2),
        *[spark_reader.Statement(remedy)] * 2,
        spark_reader.Statement(by_others),
        spark_reader.Statement("DELETE FROM lake.shop.deleted WHERE id IN (1, 2)"),
        began,
        *compaction,
        again,
        *compaction,
        compacted,
        spark_reader.Statement("SELECT * FROM lake.shop.deleted"),
        spark_reader.Statement(f"OPTIMIZE delta.`{special}`"),
        spark_reader.Statement(f"SELECT * FROM delta.`{special}`"),
        spark_reader.Statement(agreement),
        spark_reader.Statement(f"SELECT * FROM delta.`{delta.path}`"),
        spark_reader.Statement(f"SELECT * FROM lake.{NAME}"),
    ]
    expected: list[dict[str, Any]] = []

    # Dates and instants of the first and the last year, and of the days that Gregory's calendar left out.
    ends = [dt.datetime(1, 1, 3), dt.datetime(9999, 12, 31, 23, 59, 59, 999999), dt.datetime(1582, 10, 10, 0, 0, 0, 1)]

    def any_year(i: int) -> dict[str, Any]:
        at = ends[i % len(ends)]
        times = {"placed_at": at.replace(tzinfo=dt.timezone.utc), "wall_clock": at, "day": at.date()}
        return {**row(i), **(times if i % 4 == 0 else {})}

    def move(job: Job) -> None:
        expected.extend(job.expected)
        for lake in lakes.values():
            apply(lake.sink, job)

    for _ in range(2):
        move(feed.next(60, 3, 0, values=any_year))
    with ThreadPoolExecutor(2) as pool:
        spark = pool.submit(spark_reader.read, requests, here, settings)
        _until(began.here, spark)
        with catalog.locked(spark) as wait_for:
            began.there.touch()
            wait_for(1)
            moving = pool.submit(move, feed.next(2, 1, 0))
            wait_for(2)
        moving.result()
        for _ in range(WINDOWS - 2):
            move(feed.next(2, 1, 0))
        lines = _write_mapped(special)
        deletes = len(_load(iceberg, "shop.deleted").inspect.delete_files())
        rewritten = flink.find_target_problems()
        write(flink, Pipeline(KEYED, "flink again"), [{"id": 1, "v": "new"}])
        write(upsert, upserts, [{"id": 2, "v": "back"}, {"id": 3, "v": "new"}])
        _until(again.here, spark)
        with catalog.locked(spark) as wait_for:
            moving = pool.submit(move, feed.next(2, 1, 0))
            wait_for(1)
            again.there.touch()
            wait_for(2)
        moving.result()
        compacted.there.touch()
        answers = spark.result()
    first, second = answers[6:8], answers[9:11]
    assert all(rows[0][0]["metrics"]["numFilesRemoved"] for rows in (first, second)), (first, second)
    assert all(rows[1][0]["rewritten_data_files_count"] for rows in (first, second)), (first, second)
    found = {kind: Filled(lakes[kind], expected, rows) for kind, rows in zip(lakes, answers[-2:], strict=True)}
    rows = {"Spark": answers[12], "pyiceberg": _load(iceberg, "shop.deleted").scan().to_arrow().to_pylist()}
    flinks = _load(iceberg, "shop.flink").scan().to_arrow().to_pylist()
    return found, Mapped(lines, answers[-4], answers[-3]), Deleted(rows, deletes, rewritten, flinks)


def _delete_by_value(table: Table, id: int) -> spark_reader.EqualityDelete:
    """Write a file that deletes a row by its id."""
    number = table.schema().find_field("id").field_id
    path = Path(table.location().removeprefix("file://")) / "data" / "deletes.parquet"
    key = pa.field("id", pa.int64(), nullable=False, metadata={"PARQUET:field_id": str(number)})
    pq.write_table(pa.table([[id]], schema=pa.schema([key])), path)
    return spark_reader.EqualityDelete("lake.shop.flink", path, number)


def _load(lake: IcebergCase, name: str) -> Table:
    """Return a table of the catalog as it is now."""
    with lake.catalog() as catalog:
        return catalog.load_table(name)


def _write_mapped(path: Path) -> list[dict[str, Any]]:
    """Append a window to rows of Spark, and upsert another, which rewrites a file of Spark. Return all rows of the table."""
    sink = DeltaSink(str(path), partition_by=["day"])
    job = Feed(MAPPED).next(30, 0, 0, values=mapped_row)
    apply(sink, job)
    at = dt.datetime(2026, 11, 20, 23, 59, 59, 999999, dt.timezone.utc)
    plain = {"full name": "Spark", "placed_at": at, "place": {"city": "x", "zip": 1}, "counts": None, "ratio": 0.5}
    changed = {"id": -1, **dict.fromkeys(MAPPED.names[1:]), "full name": "ours"}
    upsert = replace(sink, mode="upsert", key=["id"], delete_enabled=True)
    write(upsert, Pipeline(MAPPED, "upserts", tombstones=True), [changed, dead(job.ids[0])])
    return [with_generated(line) for line in [changed, *({"id": n, **plain} for n in (-2, -3)), *job.expected[1:]]]


def _until(path: Path, spark: Any) -> None:
    import time

    while not path.exists():
        assert not spark.done() or spark.result() is None, "Spark ended"
        time.sleep(0.02)


def _plain(table: pa.Table) -> list[dict[str, Any]]:
    """Return rows in the types in which they were written; polars and DuckDB return maps as lists."""
    table = table.select(SCHEMA.names)
    entries = table.column("counts").combine_chunks().to_pylist()
    rest = table.drop_columns(["counts"]).cast(pa.schema([f for f in SCHEMA if f.name != "counts"])).to_pylist()

    def pairs(value: Any) -> Any:
        items = value.items() if isinstance(value, dict) else value
        return items and sorted(tuple(item.values()) if isinstance(item, dict) else tuple(item) for item in items)

    return [{**line, "counts": pairs(value)} for line, value in zip(rest, entries, strict=True)]


def _by_polars(lake: DeltaCase | IcebergCase) -> pa.Table:
    if isinstance(lake, DeltaCase):
        return pl.scan_delta(str(lake.path)).collect().to_arrow()
    table = lake.table()
    assert table is not None
    return pl.scan_iceberg(table).collect().to_arrow()


def _by_duckdb(lake: DeltaCase | IcebergCase) -> pa.Table:
    """Return what DuckDB reads without an extension: the files that deltalake or pyiceberg name."""
    if isinstance(lake, DeltaCase):
        orders = DeltaTable(lake.path).to_pyarrow_dataset()  # noqa: F841
        return duckdb.sql("SELECT * FROM orders").to_arrow_table()
    table = lake.table()
    assert table is not None
    paths = ["/" + task.file.file_path.removeprefix("file:").lstrip("/") for task in table.scan().plan_files()]
    return duckdb.read_parquet(paths).to_arrow_table()


def _by_library(lake: DeltaCase | IcebergCase) -> pa.Table:
    if isinstance(lake, DeltaCase):
        return DeltaTable(lake.path).to_pyarrow_table()
    table = lake.table()
    assert table is not None
    return table.scan().to_arrow()


@pytest.mark.parametrize("kind", KINDS)
def test_spark_reads_every_record_once_with_its_values_after_its_own_compactions(lakes, kind):
    found = lakes[kind]
    same_multiset(found.expected, [from_spark(line, SCHEMA) for line in found.by_spark])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", [_by_polars, _by_duckdb, _by_library])
def test_other_readers_find_every_record_once_with_its_values(lakes, kind, reader):
    found = lakes[kind]
    same_multiset(found.expected, _plain(reader(found.lake)))


def test_spark_and_the_sink_write_to_one_table_with_column_mapping_and_generated_columns(mapped):
    columns = pa.schema([*MAPPED, ("day", pa.date32()), ("initial", pa.string())])
    same_multiset(mapped.expected, [from_spark(line, columns) for line in mapped.by_spark])
    assert mapped.agree == [{"agrees": True, "rows": len(mapped.expected)}]


def test_an_upsert_keeps_rows_deleted_that_spark_has_deleted_by_delete_files(deleted):
    """This includes the deleted rows of a file that the upsert rewrites."""
    assert deleted.deletes
    for reader, rows in deleted.rows.items():
        assert {row["id"]: row["v"] for row in rows} == {0: "old", 2: "back", 3: "new", 4: "old", 5: "old"}, reader
        assert len(rows) == 5, reader


def test_a_table_with_equality_deletes_is_upserted_again_after_the_remedy_that_its_problem_names(deleted):
    assert "twice if the table has no partitions" in EQUALITY_DELETES_REMEDY
    assert deleted.rewritten == []
    assert sorted((row["id"], row["v"]) for row in deleted.flinks) == [(0, "old"), (1, "new"), (3, "old")]
