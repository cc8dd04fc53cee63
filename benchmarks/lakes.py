"""Kafka -> lake tables: appends beside our Parquet sink and Spark's own, upserts beside Spark's MERGE, commits behind many
windows, and a window of many files.

Spark's own appends and merges are at-least-once: a retry repeats them.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import events
from benchmarks.bench import SCHEMA, Stand, compare, operate, plain_spark, stand
from benchmarks.measure import Stopwatch, Table, print_title
from tests.sinks.attempt import write_all
from tests.sinks.feed import SCHEMA as SCHEMA_OF_ALL
from tests.sinks.feed import Feed

PACKAGES = (
    "io.delta:delta-spark_2.13:4.0.0",
    "org.apache.iceberg:iceberg-spark-runtime-4.0_2.13:1.10.0",
    "org.xerial:sqlite-jdbc:3.50.3.0",
)
UPDATES = "updates"
SUMMARY: list[tuple[str, str]] = []
"""The lines of the summary: a ratio or a time by its name, and its value."""
STEP = 11
"""Every so many keys of the table are upserted, and a part of them is new."""


def run(directory: Path, records: int, rounds: int, windows: int, files: int) -> None:
    """Measure all of it.

    :param records: of an append. An upsert has an eighth of that, into a table of ten times its rows.
    :param windows: number of windows behind which commits are measured.
    :param files: number of files of one window.
    """
    SUMMARY.clear()
    _commits(directory / "commits", windows)
    _many_files(directory / "files", files)
    with _stand(records, rounds, directory) as made:
        _appends(made)
        _upserts(made)
    print("\n## Summary\n\n| | |\n| --- | ---: |")
    for line in SUMMARY:
        print(f"| {' | '.join(line)} |", flush=True)


@contextmanager
def _stand(records: int, rounds: int, directory: Path) -> Iterator[Stand]:
    warehouse = directory / "warehouse"
    warehouse.mkdir()
    catalog = f"sqlite:///{warehouse}/catalog.db"
    extra = {"type": "sql", "name": "lake", "uri": catalog, "warehouse": f"file://{warehouse}"}
    os.environ["AIRFLOW_CONN_LAKE"] = json.dumps({"conn_type": "iceberg", "extra": extra})
    settings = {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension,"
        "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.lake.type": "jdbc",
        "spark.sql.catalog.lake.uri": f"jdbc:{catalog.replace(':///', ':')}",
        "spark.sql.catalog.lake.warehouse": f"file://{warehouse}",
    }
    with stand(records, rounds, directory, packages=PACKAGES, settings=settings) as made:
        yield made


def _new(stand: Stand, name: str) -> str:
    place = stand.directory / name
    shutil.rmtree(place, ignore_errors=True)
    return str(place)


def _table(stand: Stand, name: str) -> str:
    """Return the name of a table of the Iceberg catalog, which no longer exists."""
    with stand.put_aside():
        stand.spark.sql("CREATE NAMESPACE IF NOT EXISTS lake.shop")
        stand.spark.sql(f"DROP TABLE IF EXISTS lake.shop.{name} PURGE")
    return f"shop.{name}"


# --- appends --------------------------------------------------------------------------------------------------------------


def _appends(stand: Stand) -> None:
    from airflow_kafka_spark.sinks import DeltaSink, FilesSink, IcebergSink

    def spark_iceberg(turn: int) -> None:
        table = f"lake.{_table(stand, 'plain')}"
        stand.spark.sql(f"CREATE TABLE {table} ({SCHEMA}) USING iceberg")
        plain_spark(stand).writeTo(table).append()

    parquet, delta, iceberg = (
        "KafkaToSinkOperator, FilesSink",
        "KafkaToSinkOperator, DeltaSink",
        "KafkaToSinkOperator, IcebergSink",
    )
    of_delta, of_iceberg = 'Spark, write.format("delta")', "Spark, Iceberg append"
    contestants: dict[str, Callable[[int], None]] = {
        parquet: lambda turn: _done(operate(stand, "append-files", turn, FilesSink(_new(stand, "files")))),
        delta: lambda turn: _done(operate(stand, "append-delta", turn, DeltaSink(_new(stand, "delta")))),
        of_delta: lambda turn: plain_spark(stand).write.format("delta").save(_new(stand, "plain")),
        iceberg: lambda turn: _done(operate(stand, "append-iceberg", turn, IcebergSink(_table(stand, "ours"), "lake"))),
        of_iceberg: spark_iceberg,
    }
    compare(stand, "Kafka -> lake, append", contestants, base=parquet)
    for name, sink, own in (("DeltaSink", delta, of_delta), ("IcebergSink", iceberg, of_iceberg)):
        SUMMARY.append((f"{name}, append: records/s, times those of FilesSink", f"{stand.ratio(sink):.2f}"))
        SUMMARY.append((f"{name}, append: times those of Spark's own", f"{stand.ratio(sink) / stand.ratio(own):.2f}"))
    for source in (f"delta.`{stand.directory}/delta`", "lake.shop.ours"):
        _check(stand, source, stand.records)


def _done(report: object) -> None:
    """Drop a report."""


def _check(stand: Stand, source: str, rows: int) -> None:
    found = stand.spark.sql(f"SELECT count(*), count(DISTINCT id) FROM {source}").collect()[0]
    assert tuple(found) == (rows, rows), f"{source} holds {found}"


# --- upserts --------------------------------------------------------------------------------------------------------------


def _upserts(stand: Stand) -> None:
    from airflow_kafka_spark.sinks import DeltaSink, IcebergSink

    count = stand.records // 8
    rows = count * 10
    new = sum(1 for n in range(count) if n * STEP >= rows)
    stand.kafka.create_topic(UPDATES, 4)
    events.produce(stand.kafka.connection_extra(), 0, count, UPDATES, step=STEP)
    place = str(stand.directory / "merged")
    tables = {name: _table(stand, name) for name in ("merged_ours", "merged_spark")}
    made = stand.spark.range(0, rows).selectExpr(
        "id",
        "concat('customer-', id % 50000) AS customer",
        "CAST(id % 900 AS decimal(12,2)) AS amount",
        "timestamp_seconds(1750000000 + id) AS placed_at",
    )
    for name, table in tables.items():
        made.write.format("delta").save(f"{place}/{name}")
        made.writeTo(f"lake.{table}").create()

    def merge(turn: int, target: str) -> None:
        plain_spark(stand, UPDATES).createOrReplaceTempView("updates")
        stand.spark.sql(
            f"MERGE INTO {target} t USING updates u ON t.id = u.id WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
        )

    def upsert(turn: int, name: str, sink: Any) -> None:
        operate(stand, name, turn, sink, topic=UPDATES, records=count)

    delta, iceberg = (
        DeltaSink(f"{place}/merged_ours", mode="upsert", key="id"),
        IcebergSink(tables["merged_ours"], "lake", mode="upsert", key="id"),
    )
    of_delta, of_iceberg = "Spark, MERGE into Delta", "Spark, MERGE into Iceberg"
    ours = {"KafkaToSinkOperator, DeltaSink, upsert": delta, "KafkaToSinkOperator, IcebergSink, upsert": iceberg}
    contestants: dict[str, Callable[[int], None]] = {
        of_delta: lambda turn: merge(turn, f"delta.`{place}/merged_spark`"),
        of_iceberg: lambda turn: merge(turn, f"lake.{tables['merged_spark']}"),
        **{name: partial(upsert, name=name[-20:], sink=sink) for name, sink in ours.items()},
    }
    compare(stand, f"Upsert of {count:,} rows into {rows:,}", contestants, base=of_delta, records=count)
    for name, sink, own in zip(("DeltaSink", "IcebergSink"), ours, (of_delta, of_iceberg), strict=True):
        SUMMARY.append(
            (f"{name}, upsert: records/s, times those of Spark's MERGE", f"{stand.ratio(sink) / stand.ratio(own):.2f}")
        )
    for source in (*(f"delta.`{place}/{name}`" for name in tables), *(f"lake.{table}" for table in tables.values())):
        _check(stand, source, rows + new)


# --- commits --------------------------------------------------------------------------------------------------------------


def _sinks(directory: Path, **options: Any) -> dict[str, Any]:
    from airflow_kafka_spark.sinks import DeltaSink, IcebergSink

    directory.mkdir()
    extra = {"type": "sql", "uri": f"sqlite:///{directory}/catalog.db", "warehouse": f"file://{directory}"}
    os.environ["AIRFLOW_CONN_LAKE"] = json.dumps({"conn_type": "iceberg", "extra": extra})
    return {"DeltaSink": DeltaSink(f"{directory}/delta", **options), "IcebergSink": IcebergSink("shop.orders", "lake", **options)}


def _commits(directory: Path, windows: int) -> None:
    """Measure the driver's part of a window with one small file: the look, the beginning of an attempt, and the commit.

    The windows before are made without tasks: each is an entry of Delta's log with a file, or a snapshot of Iceberg's metadata.
    """
    print_title(f"A commit behind {windows:,} windows")
    table = Table("sink", "windows before", "commit, s", "all of the driver, s", "CPU s")
    for name, sink in _sinks(directory).items():
        feed = Feed(SCHEMA_OF_ALL)
        for before in (0, windows):
            if before:
                _FILL[name](sink, before)
            measured = [_window(sink, feed) for _ in range(10)]
            commit, all_of_it, cpu = (statistics.median(column) for column in zip(*measured, strict=True))
            table.row(name, f"{before:,}", *(f"{value:.3f}" for value in (commit, all_of_it, cpu)))
        SUMMARY.append((f"{name}, commit behind {windows:,} windows", f"{commit:.2f} s"))
        SUMMARY.append((f"{name}, all of the driver's part behind {windows:,} windows", f"{all_of_it:.2f} s, CPU {cpu:.2f} s"))


def _window(sink: Any, feed: Feed) -> tuple[float, float, float]:
    """Return the seconds of the commit, those of all of the driver's part of a window, and its CPU seconds."""
    job = feed.next(1, 0, 0)
    with Stopwatch() as driver:
        assert sink.find_applied(job.window) is None
        with sink.begin(job.window, job.splits, job.shape) as writer:
            with driver.paused():
                results = write_all(writer, job)
            with Stopwatch() as commit:
                writer.commit(results)
    return commit.seconds, driver.seconds, driver.cpu


def _fill_delta(sink: Any, windows: int) -> None:
    """Commit windows of another pipeline, whose files are not read."""
    from airflow_kafka_spark.sinks.delta.log import DataFile, DeltaLog, PipelineVersion

    log, version = DeltaLog(sink.store), PipelineVersion.unpack(None)
    table = log.load("filling")
    assert table is not None
    for number in range(1, windows + 1):
        version = version.make_next(number)
        file = DataFile(f"airflow-other-{number:020d}/orders-0-{number:020d}.parquet", 10_000, 100, {}, '{"numRecords": 100}')
        assert log.try_commit(table, "other", version, [file], metadata={"pipeline": "other", "number": number}) is None
        table.update_incremental()


def _fill_iceberg(sink: Any, windows: int) -> None:
    """Put copies of the newest snapshot into the table's metadata, as windows that were applied long ago."""
    with sink.open() as lake:
        path = Path(lake.load_newest("filling").metadata_location.removeprefix("file://"))
    metadata = json.loads(path.read_text())
    newest, oldest = metadata["snapshots"][-1], metadata["snapshot-log"][0]["timestamp-ms"]
    record = json.loads(newest["summary"]["airflow.window"])
    copies = []
    for number in range(windows):
        own = 1_000_000 + number
        summary = {**newest["summary"], "airflow.window": json.dumps({**record, "number": -number, "snapshot": own})}
        copies.append({**newest, "snapshot-id": own, "sequence-number": 1, "timestamp-ms": oldest, "summary": summary})
    metadata["snapshots"] = [*copies, *metadata["snapshots"]]
    made = [{"snapshot-id": copy["snapshot-id"], "timestamp-ms": oldest} for copy in copies]
    metadata["snapshot-log"] = [*made, *metadata["snapshot-log"]]
    path.write_text(json.dumps(metadata))


_FILL: dict[str, Callable[[Any, int], None]] = {"DeltaSink": _fill_delta, "IcebergSink": _fill_iceberg}


def _many_files(directory: Path, files: int) -> None:
    from dataclasses import replace

    import pyarrow as pa

    from airflow_kafka_spark.sinks.base import Rows

    print_title(f"A window of {files:,} files")
    table = Table("sink", "write, s", "commit, s", "CPU s")
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    for name, sink in _sinks(directory, partition_by=("id",)).items():
        job = Feed(schema).next(1, 0, 0)
        batch = pa.RecordBatch.from_arrays([pa.array(range(files)), pa.array(["x"] * files)], schema=schema)
        rows = Rows(batch, pa.array(range(files), pa.int64()))
        job = replace(job, rows={**dict.fromkeys(job.rows, ()), 0: [rows]})
        with sink.begin(job.window, job.splits, job.shape) as writer:
            with Stopwatch() as write:
                results = write_all(writer, job)
            with Stopwatch() as commit:
                assert writer.commit(results).written == files
        table.row(name, f"{write.seconds:.2f}", f"{commit.seconds:.2f}", f"{write.cpu + commit.cpu:.2f}")
