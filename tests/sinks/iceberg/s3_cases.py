"""The Iceberg sink with a Glue catalog and files in S3, both served by moto. Run by ``tests/test_s3.py``.

moto's Glue replaces a table without comparing the version in the request. Concurrent commits are therefore not tested here.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table

from airflow_kafka_spark.errors import KafkaSparkError, SinkUnavailable
from airflow_kafka_spark.sinks.iceberg.sink import IcebergSink
from tests.sinks.attempt import Victim, apply, repeat_killed_attempt
from tests.sinks.feed import SCHEMA, Feed, replayed
from tests.sinks.oracle import same_multiset
from tests.sinks.postgres.kit import Pipeline, dead, write
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.s3 import Bucket, EmbeddedS3

KEYED = pa.schema([("id", pa.int64()), ("v", pa.string())])


@dataclass(frozen=True)
class Lake:
    """A table in a separate bucket and a separate database of Glue, read by pyiceberg; boto3 lists the objects."""

    bucket: Bucket
    options: dict[str, str]
    sink: IcebergSink

    def table(self) -> Table:
        with load_catalog("lake", **self.options) as catalog:
            return catalog.load_table(self.sink.table)

    def read(self, *only: str) -> list[dict[str, Any]]:
        found = self.table().scan().to_arrow()
        return found.select(list(only)).to_pylist() if only else found.select(SCHEMA.names).cast(SCHEMA).to_pylist()

    def ids(self) -> list[int]:
        return [line["id"] for line in self.read("id")]

    def of_others(self, *ids: int) -> None:
        with load_catalog("lake", **self.options) as catalog:
            table = catalog.load_table(self.sink.table)
            schema = table.schema().as_arrow()
            columns = {f.name: pa.nulls(len(ids), f.type) for f in schema} | {"id": pa.array(ids, pa.int64())}
            table.append(pa.table(columns, schema=schema))

    def leftovers(self) -> list[str]:
        """Return objects that neither a snapshot names nor the catalog has written."""
        table = self.table()
        named = {path for snapshot in table.snapshots() for path in _files(table, snapshot)}
        there = [f"s3://{self.bucket.name}/{key}" for key in self.bucket.objects()]
        return [name for name in there if name not in named and not name.endswith((".metadata.json", "/"))]


def _files(table: Table, snapshot: Any) -> set[str]:
    manifests = snapshot.manifests(table.io)
    entries = [entry.data_file.file_path for manifest in manifests for entry in manifest.fetch_manifest_entry(table.io)]
    return {snapshot.manifest_list, *(manifest.manifest_path for manifest in manifests), *entries}


@pytest.fixture
def lake(s3: EmbeddedS3, unique: Callable[[str], str]) -> Lake:
    bucket, (key, secret) = s3.create_bucket(unique("bucket")), s3.credentials
    access = {"region": "us-east-1", "access-key-id": key, "secret-access-key": secret, "endpoint": s3.url}
    options = {f"{service}.{name}": value for service in ("glue", "s3") for name, value in access.items()}
    options |= {"type": "glue", "warehouse": f"s3://{bucket.name}/lake"}
    database = unique("db").replace("-", "_")
    os.environ["AIRFLOW_CONN_GLUE"] = json.dumps({"conn_type": "iceberg", "extra": {"name": "lake", **options}})
    return Lake(bucket, options, IcebergSink(f"{database}.orders", "glue"))


def test_windows_are_there_once_with_their_values_and_a_replay_replaces_its_own(lake):
    feed = Feed(SCHEMA)
    jobs = [feed.next() for _ in range(2)]
    assert lake.sink.validate(feed.shape) == [] and lake.sink.find_last_applied(feed.pipeline) is None
    for job in (*jobs, *jobs):
        assert apply(lake.sink, job).ranges == job.window.ranges
    same_multiset([line for job in jobs for line in job.expected], lake.read())
    again = replayed(jobs[0], first=5)
    apply(lake.sink, again)
    assert Counter(lake.ids()) == Counter([*again.ids, *jobs[1].ids])
    assert lake.leftovers() == []


@pytest.mark.extended
@pytest.mark.parametrize("point", ["sink.in_transaction", "sink.committed"])
def test_a_killed_attempt_is_repeated_and_leaves_nothing(lake, tmp_path, point):
    repeat_killed_attempt(lake, Feed(SCHEMA), point, tmp_path / "victim", lake.of_others)
    assert lake.leftovers() == []


@pytest.mark.extended
def test_an_upsert_deletes_and_updates_once_and_a_zombie_of_it_changes_nothing(lake, tmp_path):
    sink, pipeline = replace(lake.sink, mode="upsert", key="id", delete_enabled=True), Pipeline(KEYED, tombstones=True)
    write(sink, pipeline, [{"id": i, "v": "old"} for i in range(4)])
    job = pipeline.job([dead(0), {"id": 1, "v": "new"}])
    with Victim(sink, job, "sink.in_transaction:stop", tmp_path / "zombie") as zombie:
        assert zombie.stopped()
        apply(sink, job)
        write(sink, pipeline, [{"id": 0, "v": "back"}, {"id": 1, "v": "newest"}])
        zombie.wake()
    rows = Counter((line["id"], line["v"]) for line in lake.read("id", "v"))
    assert rows == Counter({(0, "back"): 1, (1, "newest"): 1, (2, "old"): 1, (3, "old"): 1})
    assert lake.leftovers() == []


ALL = os.environ.get("STORE_FAULTS") == "all"
"""True: each request to Glue and S3 fails in each way, in minutes. False: every thirtieth, in one of them."""
ENDLESS = 1_000_000
FAULTS: dict[Fault, int] = {"lost": 0, "expired": ENDLESS, "unavailable": 0, "skewed": ENDLESS}
"""The number of requests that fail after the first one."""


@pytest.mark.extended
def test_a_window_is_there_once_whichever_request_to_glue_or_s3_fails(lake, s3):
    with FaultProxy(s3.url) as proxy:
        behind = {name: proxy.url if name.endswith(".endpoint") else value for name, value in lake.options.items()}
        behind |= {"glue.max-retries": "1"}
        os.environ["AIRFLOW_CONN_GLUE"] = json.dumps({"conn_type": "iceberg", "extra": {"name": "lake", **behind}})
        feed, jobs = Feed(SCHEMA), []
        for _ in range(2):
            proxy.arm(None)
            apply(lake.sink, feed.next(1, 0, 0))
        count, errors = len(proxy.requests), 0
        for number in range(1, count + 1):
            for kind, (fault, more) in enumerate(FAULTS.items()):
                if not ALL and (number % 30 or number // 30 % len(FAULTS) != kind):
                    continue
                jobs.append(feed.next(1, 0, 0))
                proxy.arm(fault, number, number + more)
                try:
                    apply(lake.sink, jobs[-1])
                except KafkaSparkError as error:
                    assert isinstance(error, SinkUnavailable), (fault, number, proxy.failed[0])
                    errors += 1
                proxy.arm(None)
                assert apply(lake.sink, jobs[-1]).ranges == jobs[-1].window.ranges
        assert errors and len(jobs) >= count // 30 > 0
        proxy.arm("slow down", 1, ENDLESS, every=8)
        apply(lake.sink, feed.next(1, 0, 0))
        assert len(proxy.failed) > 2, "a store that slows its clients down is waited for"
        proxy.arm(None)
        apply(lake.sink, feed.next(1, 0, 0))
        assert Counter(lake.ids()) == Counter(range(len(jobs) + 4))
        assert lake.leftovers() == [], "the last attempt has removed what earlier ones could not"


def test_a_table_that_cannot_be_reached_is_reported_without_the_secret(lake):
    wrong = {**lake.options, "glue.endpoint": "http://127.0.0.1:1", "glue.max-retries": "1"}
    os.environ["AIRFLOW_CONN_GLUE"] = json.dumps({"conn_type": "iceberg", "extra": {"name": "lake", **wrong}})
    problems = [str(problem) for problem in lake.sink.find_target_problems()]
    assert len(problems) == 1 and "Could not connect" in problems[0] and lake.options["s3.secret-access-key"] not in problems[0]
    with pytest.raises(SinkUnavailable):
        lake.sink.find_last_applied("p")
    elsewhere = {**lake.options, "warehouse": "s3://no-such-bucket-here/lake"}
    os.environ["AIRFLOW_CONN_GLUE"] = json.dumps({"conn_type": "iceberg", "extra": {"name": "lake", **elsewhere}})
    (problem,) = lake.sink.find_target_problems()
    assert problem.where == "sink.conn_id" and "there is no such bucket" in problem.what, "before a window is planned"
