"""The files sink on a real S3 API, with the credentials of an Airflow connection. Run by ``tests/test_s3.py``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pytest

from airflow_kafka_spark.errors import Fenced, SinkUnavailable
from airflow_kafka_spark.hooks.storage import s3_access
from airflow_kafka_spark.sinks import window_files
from airflow_kafka_spark.sinks.files.manifest import open_manifests
from airflow_kafka_spark.sinks.files.sink import FilesSink
from tests.sinks.attempt import Victim, apply, travelled, write_all
from tests.sinks.feed import SCHEMA, Feed
from tests.sinks.oracle import same_multiset
from tests.support.s3 import Bucket, EmbeddedS3

WIDE = SCHEMA.append(pa.field("day_of_week", pa.string()))


@dataclass(frozen=True)
class Lake:
    """A table in a bucket of its own; the objects are listed by boto3 and read by Arrow."""

    bucket: Bucket
    sink: FilesSink

    def read(self, *only: str) -> list[dict[str, Any]]:
        files = [uri.removeprefix("s3://") for uri in window_files(self.sink.path, "lake")]
        if not files:
            return []
        partitioning = pa.dataset.partitioning(pa.schema([("window", pa.string()), ("day_of_week", pa.string())]), flavor="hive")
        found = pa.dataset.dataset(
            files, format="parquet", filesystem=s3_access("lake").filesystem(), partitioning=partitioning,
            partition_base_dir=f"{self.sink.place.path}/_data",
        )  # fmt: skip
        columns = list(only or WIDE.names)
        return found.to_table(columns=columns).cast(pa.schema([WIDE.field(name) for name in columns])).to_pylist()

    def ids(self) -> Counter[int]:
        return Counter(line["id"] for line in self.read("id"))

    def data(self) -> set[str]:
        return {f"s3://{self.bucket.name}/{key}" for key in self.bucket.objects() if key.endswith(".parquet")}


@pytest.fixture
def lake(s3: EmbeddedS3, unique: Callable[[str], str]) -> Lake:
    bucket = s3.create_bucket(unique("bucket"))
    return Lake(bucket, FilesSink(f"s3://{bucket.name}/lake/orders", conn_id="lake", partition_by=["day_of_week"]))


@pytest.fixture
def feed() -> Feed:
    return Feed(WIDE)


def test_windows_are_there_once_with_their_values(lake, feed):
    jobs = [feed.next() for _ in range(2)]
    assert lake.sink.validate(feed.shape) == [] and lake.sink.last_applied(feed.pipeline) is None
    for job in (*jobs, *jobs):
        assert apply(lake.sink, job).ranges == job.window.ranges
        assert lake.sink.last_applied(feed.pipeline).number >= job.window.number
    same_multiset([line for job in jobs for line in job.expected], lake.read())
    assert lake.data() == set(window_files(lake.sink.path, "lake"))


@pytest.mark.parametrize("point", ["split.flushed", "sink.in_transaction", "sink.committed"])
def test_a_killed_attempt_is_repeated_and_leaves_nothing(lake, feed, tmp_path, point):
    first, job, third = feed.next(3, 2, 1), feed.next(), feed.next(1, 1, 1)
    apply(lake.sink, first)
    with Victim(lake.sink, job, point, tmp_path / "victim") as victim:
        assert victim.died()
    assert lake.ids() == Counter(first.ids + (job.ids if point == "sink.committed" else []))
    for one in (job, third):
        apply(lake.sink, one)
    assert lake.ids() == Counter([*first.ids, *job.ids, *third.ids])
    assert lake.data() == set(window_files(lake.sink.path, "lake"))


def test_of_two_conditional_puts_one_is_the_commit(lake, feed, tmp_path):
    """A zombie stopped before its PUT wakes behind a successor that gave up, and behind one that has committed."""
    first, job = feed.next(2, 0, 0), feed.next()
    apply(lake.sink, first)
    with Victim(lake.sink, job, "sink.in_transaction:stop", tmp_path / "one") as zombie:
        assert zombie.stopped()
        with lake.sink.begin(job.window, job.splits, job.shape):
            pass
        assert zombie.wake() == 1
    assert lake.ids() == Counter(first.ids)
    with Victim(lake.sink, job, "sink.in_transaction:stop", tmp_path / "two") as zombie:
        assert zombie.stopped()
        apply(lake.sink, job)
        zombie.wake()
    assert lake.ids() == Counter([*first.ids, *job.ids])
    assert lake.data() == set(window_files(lake.sink.path, "lake"))


def test_a_replay_replaces_its_window_and_a_late_task_leaves_no_object(lake, feed):
    jobs = [feed.next() for _ in range(2)]
    for job in jobs:
        apply(lake.sink, job)
    again = replace(jobs[0], window=replace(jobs[0].window, replay=1), rows={**jobs[0].rows, 0: []})
    with lake.sink.begin(again.window, again.splits, again.shape) as writer:
        late = travelled(writer.split_writer())
        late.open(again.splits[1])
        late.write(again.rows[1][0])
        assert writer.commit(write_all(writer, again)).replay == 1
    with pytest.raises(Fenced):
        late.close()
    late.abort()
    assert lake.ids() == Counter([*again.ids, *jobs[1].ids])
    assert lake.data() == set(window_files(lake.sink.path, "lake"))


def test_problems_are_reported_without_the_secret(lake, feed, s3):
    where = [(p.where, p.what) for p in replace(lake.sink, conn_id="nowhere").validate(feed.shape)]
    assert [w for w, _ in where] == ["sink.path"] and "nowhere" in where[0][1]
    assert [p.where for p in replace(lake.sink, path="s3://no-such-bucket-here/t").validate(feed.shape)] == ["sink.path"]
    assert [p.where for p in replace(lake.sink, visibility="rename").validate(feed.shape)] == ["sink.visibility"]
    job, secret = feed.next(), s3.credentials[1]
    with lake.sink.begin(job.window, job.splits, job.shape) as writer:
        assert secret not in repr(lake.sink) + repr(open_manifests(lake.sink)) + repr(writer.split_writer().target)
    with pytest.raises(SinkUnavailable):
        apply(replace(lake.sink, path="s3://no-such-bucket-here/t"), job)
