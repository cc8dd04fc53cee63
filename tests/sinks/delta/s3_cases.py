"""The Delta sink on a real S3 API, with the credentials of an Airflow connection. Run by ``tests/test_s3.py``."""

from __future__ import annotations

import json
import os
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from deltalake import DeltaTable, write_deltalake

from airflow_kafka_spark.errors import Fenced, KafkaSparkError, SinkUnavailable
from airflow_kafka_spark.hooks import object_stores
from airflow_kafka_spark.hooks.object_stores import find_s3_access
from airflow_kafka_spark.sinks.delta.sink import DeltaSink
from airflow_kafka_spark.windows.binding import compare_endpoints, compare_locations
from tests.sinks.attempt import Victim, apply, repeat_killed_attempt, travelled, write_all, write_split
from tests.sinks.feed import SCHEMA, Feed
from tests.sinks.oracle import same_multiset
from tests.sinks.postgres.kit import Pipeline, dead, write
from tests.support.distribution import extended
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.s3 import Bucket, EmbeddedS3

READS_ONLY = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": ["s3:Get*", "s3:List*"], "Resource": "*"}]}
KEYED = pa.schema([("id", pa.int64()), ("v", pa.string())])
WIDE = SCHEMA.append(pa.field("day_of_week", pa.string()))


@pytest.fixture(scope="session", autouse=True)
def reader(s3: EmbeddedS3) -> None:
    """Return a connection whose user may only read."""
    os.environ["AIRFLOW_CONN_READER"] = s3.connection_json(s3.user("reads_only", READS_ONLY))


@dataclass(frozen=True)
class Lake:
    """A table in a separate bucket. deltalake reads the log, and boto3 the objects."""

    bucket: Bucket
    sink: DeltaSink

    @property
    def table(self) -> DeltaTable:
        return DeltaTable(self.sink.uri, storage_options=find_s3_access("lake").storage_options)

    def read(self) -> list[dict[str, Any]]:
        found = self.table.to_pyarrow_table()
        return found.select(WIDE.names).cast(WIDE).to_pylist()

    def ids(self) -> list[int]:
        return self.table.to_pyarrow_table(columns=["id"])["id"].to_pylist()

    def names(self) -> list[str]:
        return [key.removeprefix("lake/orders/") for key in self.bucket.objects()]

    def data(self) -> set[str]:
        return {name for name in self.names() if name.endswith(".parquet")}

    def named(self) -> set[str]:
        paths = pa.table(self.table.get_add_actions(flatten=True)).column("path").to_pylist()
        return set(map(urllib.parse.unquote, paths))

    def of_others(self, *ids: int) -> None:
        rows, options = pa.table({"id": pa.array(ids, pa.int64())}), find_s3_access("lake").storage_options
        write_deltalake(self.sink.uri, rows, mode="append", schema_mode="merge", storage_options=options)


@pytest.fixture
def lake(s3: EmbeddedS3, unique: Callable[[str], str]) -> Lake:
    bucket = s3.create_bucket(unique("bucket"))
    return Lake(bucket, DeltaSink(f"s3a://{bucket.name}/lake/orders", conn_id="lake"))


@pytest.fixture
def feed() -> Feed:
    return Feed(WIDE)


def test_windows_are_there_once_with_their_values(lake, feed):
    # Directories with awkward names: fifteen files a split, and here alone.
    lake = replace(lake, sink=replace(lake.sink, partition_by=["flag", "day_of_week"]))
    jobs = [feed.next() for _ in range(2)]
    assert lake.sink.validate(feed.shape) == [] and lake.sink.find_last_applied(feed.pipeline) is None
    for job in (*jobs, *jobs):
        assert apply(lake.sink, job).ranges == job.window.ranges
        assert lake.sink.find_last_applied(feed.pipeline).number >= job.window.number
    same_multiset([line for job in jobs for line in job.expected], lake.read())
    assert lake.data() == lake.named()
    assert not [name for name in lake.names() if name.startswith("_airflow/attempts/") and name != "_airflow/attempts/"]


@pytest.mark.parametrize("point", ["sink.in_transaction", extended("sink.committed")])
def test_a_killed_attempt_is_repeated_and_leaves_nothing(lake, feed, tmp_path, point):
    repeat_killed_attempt(lake, feed, point, tmp_path / "victim", lake.of_others)
    assert lake.data() == lake.named()


def test_a_commit_is_a_conditional_put_and_others_may_take_its_place_in_the_log(lake, feed, tmp_path):
    first, job = feed.next(2, 0, 0), feed.next()
    apply(lake.sink, first)
    with Victim(lake.sink, job, "sink.in_transaction:stop", tmp_path / "victim") as attempt:
        assert attempt.stopped()
        lake.of_others(-1)
        lake.of_others(-2)
        assert attempt.wake() == 0
    assert Counter(lake.ids()) == Counter([*first.ids, *job.ids, -1, -2])


def test_pipelines_race_for_the_entries_of_the_log_and_each_window_is_there_once(lake):
    feeds = [Feed(KEYED.remove(1), f"shop.pipeline{n}", first_id=1000 * n) for n in range(3)]
    sink, jobs = replace(lake.sink), [[feed.next(1, 0, 0) for _ in range(2)] for feed in feeds]
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(lambda own: [apply(sink, job) for job in own], jobs))
    assert Counter(lake.ids()) == Counter(i for own in jobs for job in own for i in job.ids)
    assert lake.table.version() >= 6


def test_a_zombie_commits_nothing_behind_its_successor_nor_behind_one_that_gave_up(lake, feed, tmp_path):
    first, job = feed.next(2, 0, 0), feed.next()
    apply(lake.sink, first)
    with Victim(lake.sink, job, "sink.in_transaction:stop", tmp_path / "one") as zombie:
        assert zombie.stopped()
        with lake.sink.begin(job.window, job.splits, job.shape):
            pass
        assert zombie.wake() == 1
    assert sorted(lake.ids()) == sorted(first.ids)
    with Victim(lake.sink, job, "sink.in_transaction:stop", tmp_path / "two") as zombie:
        assert zombie.stopped()
        apply(lake.sink, job)
        zombie.wake()
    assert Counter(lake.ids()) == Counter([*first.ids, *job.ids])
    assert lake.data() == lake.named()


def test_a_late_task_of_an_attempt_that_has_ended_leaves_no_object(lake, feed):
    job = feed.next()
    with lake.sink.begin(job.window, job.splits, job.shape) as writer:
        late = travelled(writer.make_split_writer())
        late.open(job.splits[0])
        late.write(job.rows[0][0])
        writer.commit(write_all(writer, job))
    with pytest.raises(Fenced):
        late.close()
    late.abort()
    with pytest.raises(Fenced):
        write_split(travelled(writer.make_split_writer()), job.splits[0], job.rows[0])
    assert lake.data() == lake.named()


ALL = os.environ.get("STORE_FAULTS") == "all"
"""True: each request fails in each way, in minutes. False: every twentieth, in one of them."""
FAULTS: dict[Fault, int] = {"skewed": 1_000_000, "expired": 1_000_000, "lost": 0, "unavailable": 0}
"""The number of requests that fail after the first one."""


@pytest.fixture
def faulty(lake: Lake, s3: EmbeddedS3) -> Iterator[tuple[FaultProxy, DeltaSink]]:
    """The sink behind a proxy, with a checkpoint at every fifth window: without one, each look reads the whole log."""
    with FaultProxy(s3.url) as proxy:
        connection = json.loads(s3.connection_json())
        connection["extra"]["endpoint_url"] = proxy.url
        os.environ["AIRFLOW_CONN_FAULTY"] = json.dumps(connection)
        properties = {"delta.checkpointInterval": "5"}
        yield proxy, replace(lake.sink, conn_id="faulty", table_properties=properties)


@pytest.mark.extended
def test_a_window_is_there_once_whichever_request_fails(lake, faulty):
    (proxy, sink), feed = faulty, Feed(KEYED.remove(1))
    jobs = [feed.next(1, 0, 0) for _ in range(2)]
    for job in jobs:
        proxy.arm(None)
        apply(sink, job)
    errors = Counter[str]()
    for number in range(1, len(proxy.requests) + 1):
        for kind, (fault, more) in enumerate(FAULTS.items()):
            if not ALL and (number % 20 or number // 20 % len(FAULTS) != kind):
                continue
            jobs.append(feed.next(1, 0, 0))
            proxy.arm(fault, number, number + more)
            try:
                apply(sink, jobs[-1])
            except KafkaSparkError as error:
                assert isinstance(error, SinkUnavailable), (fault, number, proxy.failed[0])
                errors[fault] += 1
            proxy.arm(None)
            assert apply(sink, jobs[-1]).ranges == jobs[-1].window.ranges
    assert len(jobs) > 4 and (errors["expired"] or errors["skewed"])
    assert sorted(lake.ids()) == sorted(i for job in jobs for i in job.ids)
    apply(sink, feed.next(1, 0, 0))
    data = {name for name in lake.data() if not name.startswith("_delta_log/")}
    assert data == lake.named(), "the last attempt has removed what earlier ones could not"


@pytest.mark.extended
def test_an_entry_of_the_log_whose_write_is_in_conflict_is_tried_again(lake, faulty):
    (proxy, sink), jobs = faulty, [Feed(KEYED.remove(1)).next(1, 0, 0)]
    apply(sink, jobs[0])
    job = Feed(KEYED.remove(1), "another", first_id=1).next(1, 0, 0)
    proxy.arm_at(lambda request: request.startswith("PUT") and "/_delta_log/0" in request, "conflict")
    assert apply(sink, job).ranges == job.window.ranges
    assert len(proxy.failed) == 1
    assert sorted(lake.ids()) == [0, 1]


@pytest.mark.extended
def test_a_store_that_slows_its_clients_down_is_waited_for(lake, faulty):
    (proxy, sink), feed = faulty, Feed(KEYED.remove(1))
    jobs = [feed.next(1, 0, 0) for _ in range(2)]
    apply(sink, jobs[0])
    proxy.arm("slow down", 1, 1_000_000, every=6)
    apply(sink, jobs[1])
    assert len(proxy.failed) > 2
    proxy.arm(None)
    assert sorted(lake.ids()) == sorted(i for job in jobs for i in job.ids)


@pytest.mark.extended
def test_a_store_that_stays_unavailable_ends_the_attempt_with_its_answer(lake, faulty, monkeypatch):
    (proxy, sink), job = faulty, Feed(KEYED.remove(1)).next(1, 0, 0)
    monkeypatch.setattr(object_stores, "_RETRIES", {"max_retries": 1, "retry_timeout": timedelta(seconds=60)})
    proxy.arm("unavailable", 1, 1_000_000)
    with pytest.raises(SinkUnavailable) as error:
        apply(sink, job)
    message = str(error.value)
    assert "503 Service Unavailable" in message and "retried" in message
    assert message.isprintable(), "neither colours nor lines of a terminal"
    assert len(proxy.failed) == 2, "the options of retries reach deltalake's client"
    proxy.arm(None)
    assert apply(sink, job).ranges == job.window.ranges


def test_a_replay_replaces_its_window(lake, feed):
    jobs = [feed.next() for _ in range(2)]
    for job in jobs:
        apply(lake.sink, job)
    again = replace(jobs[0], window=replace(jobs[0].window, replay=1), rows={**jobs[0].rows, 0: []})
    assert lake.sink.find_replay_problems() == []
    assert apply(lake.sink, again).replay == 1
    assert Counter(lake.ids()) == Counter([*again.ids, *jobs[1].ids])


@pytest.mark.extended
def test_an_upsert_that_dies_is_repeated_and_deletes_and_updates_once(lake, tmp_path):
    sink = replace(lake.sink, mode="upsert", key="id", delete_enabled=True)
    pipeline = Pipeline(KEYED, tombstones=True)
    write(sink, pipeline, [{"id": i, "v": "old"} for i in range(4)])
    job = pipeline.job([dead(0), {"id": 1, "v": "new"}], [{"id": 9, "v": "more"}])
    with Victim(sink, job, "sink.in_transaction", tmp_path / "victim") as victim:
        assert victim.died()
    lake.of_others(9, 77)
    applied = apply(sink, job)
    assert (applied.written, applied.deleted) == (2, 1)
    found = Counter((line["id"], line["v"]) for line in lake.table.to_pyarrow_table(columns=["id", "v"]).to_pylist())
    assert found == Counter([(1, "new"), (2, "old"), (3, "old"), (9, "more"), (77, None)])
    assert lake.named() <= lake.data()


@pytest.mark.extended
def test_a_zombie_of_an_upsert_changes_nothing_behind_its_successor(lake, tmp_path):
    sink = replace(lake.sink, mode="upsert", key="id")
    pipeline = Pipeline(KEYED)
    write(sink, pipeline, [{"id": i, "v": "old"} for i in range(3)])
    job = pipeline.job([{"id": 1, "v": "zombie"}])
    with Victim(sink, job, "sink.in_transaction:stop", tmp_path / "zombie") as zombie:
        assert zombie.stopped()
        apply(sink, job)
        write(sink, pipeline, [{"id": 1, "v": "newest"}])
        zombie.wake()
    found = Counter((line["id"], line["v"]) for line in lake.table.to_pyarrow_table(columns=["id", "v"]).to_pylist())
    assert found == Counter({(0, "old"): 1, (1, "newest"): 1, (2, "old"): 1})


def test_problems_are_reported_without_the_secret(lake, feed):
    where = [(p.where, p.what) for p in replace(lake.sink, conn_id="nowhere").validate(feed.shape)]
    assert [w for w, _ in where] == ["sink.conn_id"] and "nowhere" in where[0][1]
    assert replace(lake.sink, path="s3://no-such-bucket-here/t").validate(feed.shape)
    reader = replace(lake.sink, conn_id="reader")
    job = feed.next()
    with pytest.raises(SinkUnavailable, match="the store answered 403 Forbidden") as said:
        apply(reader, job)
    assert not said.value.retryable and "\n" not in str(said.value)
    there = lake.sink.find_destination()
    assert there.place["server"].startswith("127.0.0.1:")
    amazon = replace(lake.sink, conn_id=None).find_destination()
    assert [d.what for d in compare_endpoints(amazon, there)] == [d.what for d in compare_locations(there, amazon)] == ["server"]
    secret = find_s3_access("lake").secret_key
    with lake.sink.begin(job.window, job.splits, job.shape) as writer:
        assert secret not in repr(lake.sink) + repr(lake.sink.store) + repr(writer.make_split_writer().target)


def test_a_table_that_spark_has_written_to_is_refused(lake, feed):
    apply(lake.sink, feed.next(1, 0, 0))
    entry = b'{"commitInfo":{"timestamp":1,"operation":"WRITE","engineInfo":"Apache-Spark/4.0.0 Delta-Lake/4.0.0"}}\n'
    version = lake.table.version() + 1
    lake.bucket.client.put_object(Bucket=lake.bucket.name, Key=f"lake/orders/_delta_log/{version:020d}.json", Body=entry)
    (problem,) = lake.sink.validate(feed.shape)
    assert "Apache-Spark" in problem.what
