"""A pipeline under test: a topic of orders, an operator, a sink of one kind, and the check that the sink has each order once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.hooks.kafka.config import ALL_BROKERS
from airflow_kafka_spark.operators import KafkaToSinkOperator
from airflow_kafka_spark.sinks import DeltaSink, FilesSink, IcebergSink
from airflow_kafka_spark.testing import EmbeddedKafka, EmbeddedPostgres
from tests.support import warm
from tests.support.archive import HUGE_PAGES
from tests.support.clients import find_producer
from tests.support.oracle import committed_records, same_multiset, windows_tile
from tests.support.runs import Attempts
from tests.support.waiting import eventually, settled

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.fs import FileSystem

    from tests.support.s3 import EmbeddedS3

COLUMNS = "id bigint, customer text, amount numeric(12,2), placed_at timestamptz"
SCHEMA = "id bigint, customer string, amount decimal(12,2), placed_at timestamp"
KINDS = ("files", "postgres", "postgres-split")
STORE_KINDS = ("s3-manifest", "s3-listing", "s3-delta", "s3-iceberg")
"""Kinds of pipelines whose sink lies in a bucket (:mod:`tests.support.s3`)."""
CATALOGS = {"iceberg": "lake", "s3-iceberg": "store_lake"}
"""The connections of Iceberg catalogs, by kind of pipeline."""
QUICK_JVM = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto {HUGE_PAGES}"
SPARK = json.dumps(
    {
        "conn_type": "spark",
        "host": "local[2]",
        "extra": {
            "spark.driver.memory": "512m",
            "spark.driver.extraJavaOptions": QUICK_JVM,
            **warm.extra(warm.EVERYWHERE),
        },
    }
)


def create_ledger(kafka: EmbeddedKafka, pipeline: str) -> None:
    """Create the ledger topic of one pipeline under test, with one partition.

    The operators would create it with eight, which costs the broker several times as much.
    """
    kafka.create_topic(f"ledger-{pipeline}", 1, config={"cleanup.policy": "compact"})


def make(kind: str, place: str, **options: Any) -> KafkaToSinkOperator:
    """Build the operator, in this process or another."""
    return KafkaToSinkOperator(**{"task_id": "task", "value": Json(schema=SCHEMA), "sink": make_sink(kind, place), **options})


def make_sink(kind: str, place: str) -> Any:
    if kind == "files":
        return FilesSink(path=place)
    if kind == "manifest":
        return FilesSink(path=place, visibility="manifest")
    if kind == "delta":
        return DeltaSink(place)
    if kind == "delta-upsert":
        return DeltaSink(place, mode="upsert", key="id")
    if kind == "s3-manifest":
        return FilesSink(path=place, conn_id="store", visibility="manifest")
    if kind == "s3-listing":
        return FilesSink(path=place, conn_id="store", visibility="listing")
    if kind == "s3-delta":
        return DeltaSink(place, conn_id="store")
    if kind in CATALOGS:
        return IcebergSink("shop.orders", CATALOGS[kind])
    from airflow_kafka_spark.sinks import PostgresSink

    if kind == "postgres-upsert":
        return PostgresSink(conn_id="warehouse", table=place, mode="upsert", key=["id"])
    return PostgresSink(conn_id="warehouse", table=place, atomic="split" if kind == "postgres-split" else "window")


def order(number: int) -> bytes:
    event = {
        "id": number,
        "customer": f"customer-{number % 97}",
        "amount": f"{number % 1000}.{number % 100:02d}",
        "placed_at": datetime.fromtimestamp(1_750_000_000 + number, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    return json.dumps(event, separators=(",", ":")).encode()


def row_of(value: bytes) -> tuple[int, str, str, int]:
    event = json.loads(value)
    placed_at = datetime.fromisoformat(event["placed_at"].replace("Z", "+00:00"))
    return event["id"], event["customer"], event["amount"], int(placed_at.timestamp())


@dataclass(kw_only=True)
class Pipeline(Attempts):
    """One pipeline, from its topic to its sink.

    :param kind: one of :data:`KINDS` or :data:`STORE_KINDS`, ``manifest``, ``delta``, ``delta-upsert``, ``iceberg`` or
        ``postgres-upsert``.
    :param partitions: the number of partitions of its topic.
    """

    make = staticmethod(make)

    kafka: EmbeddedKafka
    postgres: EmbeddedPostgres | None
    kind: str
    name: str
    topic: str
    place: str
    partitions: int = 3
    reports: list[dict[str, Any]] = field(default_factory=list)
    _produced: int = 0

    # --- events ---

    def produce(self, count: int, *, transaction: str | None = None) -> None:
        """Produce more orders; ``transaction`` is ``commit`` or ``abort``."""
        if transaction:
            settings = {**ALL_BROKERS, **self.kafka.connection_extra(), "transactional.id": f"{self.topic}-{self._produced}"}
            producer = Producer(settings)
            producer.init_transactions(60)
            producer.begin_transaction()
        else:
            producer = find_producer(self.kafka, self.topic)
        for number in range(self._produced, self._produced + count):
            producer.produce(self.topic, order(number), str(number).encode())
        self._produced += count
        assert producer.flush(180) == 0
        if transaction:
            getattr(producer, f"{transaction}_transaction")(30)
            settled(self.topic, seconds=120)

    def begin(self, count: int) -> tuple[Producer, range]:
        """Write more orders to every partition, in a transaction that is left open.

        :return: the producer that can end it, and the numbers of its orders.
        """
        numbers = range(self._produced, self._produced + count)
        settings: dict[str, Any] = {"transactional.id": f"{self.topic}-{self._produced}", "transaction.timeout.ms": 900_000}
        settings |= {"log_level": 0, "error_cb": lambda error: None}  # the broker may be killed meanwhile
        producer = Producer({**ALL_BROKERS, **self.kafka.connection_extra(), **settings})
        producer.init_transactions(60)
        producer.begin_transaction()
        partitions = len(producer.list_topics(self.topic, timeout=60).topics[self.topic].partitions)
        for number in numbers:
            producer.produce(self.topic, order(number), str(number).encode(), number % partitions)
        self._produced += count
        assert producer.flush(180) == 0
        return producer, numbers

    # --- runs ---

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "kind": self.kind, "place": self.place, "topics": self.topic, "group_id": self.name, "pipeline": self.name,
            "ledger_topic": f"ledger-{self.name}", **self.options,
        }  # fmt: skip

    def run(self, run_id: str = "run1", **options: Any) -> dict[str, Any]:
        """Run one task attempt in this process, and return its report."""
        report = super().run(run_id, **options)
        if not self.reports or self.reports[-1]["window"] != report["window"] or "interval" in report:
            self.reports.append(report)
        return report

    # --- what is there now ---

    def rows(self) -> list[tuple[int, str, str, int]]:
        """Return the rows that a reader of the sink sees."""
        if self.kind == "files":
            return files_rows(self.place)
        if self.kind == "manifest":
            return manifest_rows(self.place)
        if self.kind.startswith("delta"):
            return delta_rows(self.place)
        if self.kind in CATALOGS:
            return iceberg_rows(CATALOGS[self.kind])
        if self.kind in STORE_KINDS:
            return store_rows(self.kind, self.place)
        assert self.postgres is not None
        with self.postgres.connect(autocommit=True) as connection:
            found = connection.execute(
                f'SELECT id, customer, amount::text, extract(epoch FROM placed_at)::bigint FROM "{self.place}"'
            ).fetchall()
        return [tuple(row) for row in found]

    def events(self, *, stable: bool = True) -> list[tuple[int, int, bytes | None, bytes | None]]:
        """Return every committed record of the topic.

        :param stable: False where a transaction is open on purpose, which is not to be waited for.
        """
        return committed_records(self.kafka.connection_extra(), self.topic, stable=stable)

    def committed(self, *, stable: bool = True) -> dict[int, int]:
        """Return the group's committed offset of each partition; -1001 if there is none.

        :param stable: wait until no transaction is open over it, because a commit is answered before the group's partition knows
            of it. False returns the offset before an open transaction.
        """
        level = "read_committed" if stable else "read_uncommitted"
        # Not the admin client: it ends the process when the group's coordinator is not ready (librdkafka 2.16).
        settings = {**ALL_BROKERS, **self.kafka.connection_extra(), "group.id": self.name, "isolation.level": level}
        consumer = Consumer(settings)

        def look() -> list[TopicPartition]:
            try:
                found = consumer.committed(partitions, 10)
            except KafkaException:
                return []
            return [] if any(p.error for p in found) else found

        try:
            partitions = [
                TopicPartition(self.topic, p) for p in consumer.list_topics(self.topic, timeout=60).topics[self.topic].partitions
            ]
            return {p.partition: p.offset for p in eventually(look)}
        finally:
            consumer.close()

    def check(self, *, stable: bool = True) -> int:
        """Check that every committed record of the topic is in the sink exactly once, and that the group's offsets are the end of
        the last window.

        :param stable: as for :meth:`events`.
        """
        events = self.events(stable=stable)
        compared = same_multiset((row_of(value) for *_, value in events if value is not None), self.rows())
        ends = {r["partition"]: r["end"] for r in self.reports[-1]["ranges"]}
        assert self.committed() == ends
        if len(self.reports) > 1:
            windows_tile(report["ranges"] for report in self.reports)
        return compared


def files_rows(path: str) -> list[tuple[int, str, str, int]]:
    import pyarrow.dataset as ds

    if not Path(path).exists():
        return []
    table = ds.dataset(path, format="parquet", partitioning="hive").to_table()
    return _rows_of(table) if "id" in table.column_names else []


def manifest_rows(path: str) -> list[tuple[int, str, str, int]]:
    """Return the rows of the files that the manifests of complete windows name, of each window those of its newest replay."""
    from pyarrow.fs import LocalFileSystem

    return _manifest_rows_of(LocalFileSystem(), path)


def _manifest_rows_of(files: FileSystem, path: str) -> list[tuple[int, str, str, int]]:
    import pyarrow.parquet as pq
    from pyarrow.fs import FileSelector

    newest: dict[str, Path] = {}
    for found in files.get_file_info(FileSelector(f"{path}/_windows", allow_not_found=True, recursive=True)):
        place = Path(found.path)
        if place.stem.isdigit() and place.suffix == ".json" and place.parent.name.isdigit():
            key = str(place.parent)
            newest[key] = max(newest.get(key, place), place, key=lambda path: int(path.stem))
    named = [file["path"] for found in newest.values() for file in json.loads(files.open_input_file(str(found)).read())["files"]]
    return [row for file in named for row in _rows_of(pq.ParquetFile(files.open_input_file(f"{path}/{file}")).read())]


def delta_rows(path: str, options: dict[str, str] | None = None) -> list[tuple[int, str, str, int]]:
    from deltalake import DeltaTable

    if not DeltaTable.is_deltatable(path, options):
        return []
    return _rows_of(DeltaTable(path, storage_options=options).to_pyarrow_table())


def iceberg_rows(conn_id: str = "lake") -> list[tuple[int, str, str, int]]:
    from pyiceberg.catalog import load_catalog

    with load_catalog(conn_id, **json.loads(os.environ[f"AIRFLOW_CONN_{conn_id.upper()}"])["extra"]) as catalog:
        if not catalog.namespace_exists("shop") or not catalog.table_exists("shop.orders"):
            return []
        return _rows_of(catalog.load_table("shop.orders").scan().to_arrow())


def store_rows(kind: str, place: str) -> list[tuple[int, str, str, int]]:
    """Return the rows of a sink in the store of the connection `store`, read by Arrow and deltalake alone."""
    import pyarrow.dataset as ds
    from pyarrow.fs import FileSelector, S3FileSystem

    store = json.loads(os.environ["AIRFLOW_CONN_STORE"])
    key, secret, url = store["login"], store["password"], store["extra"]["endpoint_url"]
    if kind == "s3-delta":
        names = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, "AWS_ENDPOINT_URL": url, "AWS_REGION": "us-east-1"}
        return delta_rows(place, {**names, "AWS_ALLOW_HTTP": "true"})
    files = S3FileSystem(access_key=key, secret_key=secret, endpoint_override=url, region="us-east-1")
    path = place.removeprefix("s3://")
    if kind == "s3-manifest":
        return _manifest_rows_of(files, path)
    # Hidden directories are not part of the table.
    found = files.get_file_info(FileSelector(path, allow_not_found=True, recursive=True))
    hidden = ("_", ".")
    seen = [f.path for f in found if f.is_file and not any(p.startswith(hidden) for p in f.path[len(path) + 1 :].split("/"))]
    return _rows_of(ds.dataset(seen, format="parquet", filesystem=files).to_table()) if seen else []


def _rows_of(table: pa.Table) -> list[tuple[int, str, str, int]]:
    columns = [table[name].to_pylist() for name in ("id", "customer", "amount", "placed_at")]
    return [(i, c, str(a), int(p.timestamp())) for i, c, a, p in zip(*columns, strict=True)]


@contextmanager
def pipeline(
    kind: str,
    kafka: EmbeddedKafka,
    postgres: Callable[[], EmbeddedPostgres],
    unique: Callable[[str], str],
    directory: Path,
    store: EmbeddedS3 | None = None,
    partitions: int = 3,
    **options: Any,
) -> Iterator[Pipeline]:
    """A new topic, a new sink, and connections to both in the environment.

    :param store: the store of :data:`STORE_KINDS`.
    :param partitions: how many the topic has.
    """
    name, topic = unique("pipe"), unique("orders")
    kafka.create_topic(topic, partitions)
    create_ledger(kafka, name)
    os.environ["AIRFLOW_CONN_KAFKA_DEFAULT"] = kafka.connection_json()
    os.environ["AIRFLOW_CONN_SPARK_DEFAULT"] = SPARK
    place, server = str(directory / "table"), None
    if kind in STORE_KINDS:
        assert store is not None
        bucket = store.create_bucket(unique("bucket").replace("_", "-").lower())
        place = f"s3://{bucket.name}/table"
        os.environ["AIRFLOW_CONN_STORE"] = store.connection_json()
        if kind in CATALOGS:
            key, secret = store.credentials
            access = {"s3.endpoint": store.url, "s3.access-key-id": key, "s3.secret-access-key": secret, "s3.region": "us-east-1"}
            extra = {"type": "sql", "uri": f"sqlite:///{directory}/catalog.db", "warehouse": f"s3://{bucket.name}/warehouse"}
            os.environ["AIRFLOW_CONN_STORE_LAKE"] = json.dumps({"conn_type": "iceberg", "extra": extra | access})
    elif kind == "iceberg":
        extra = {"type": "sql", "uri": f"sqlite:///{directory}/catalog.db", "warehouse": f"file://{directory}/warehouse"}
        os.environ["AIRFLOW_CONN_LAKE"] = json.dumps({"conn_type": "iceberg", "extra": extra})
    elif kind not in ("files", "manifest", "delta", "delta-upsert"):
        server, place = postgres(), unique("orders")
        os.environ["AIRFLOW_CONN_WAREHOUSE"] = server.connection_uri()
        key = ", PRIMARY KEY (id)" if kind == "postgres-upsert" else ""
        with server.connect(autocommit=True) as connection:
            connection.execute(f'CREATE TABLE "{place}" ({COLUMNS}{key})')
    made = Pipeline(
        kafka=kafka, postgres=server, kind=kind, name=name, topic=topic, place=place, partitions=partitions, directory=directory,
        options=options,
    )  # fmt: skip
    try:
        yield made
    finally:
        made.end_victims()
