"""The files sink on a real S3 API, with the credentials of an Airflow connection. Run by ``tests/test_s3.py``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pytest

from airflow_kafka_spark.errors import Fenced, SinkUnavailable
from airflow_kafka_spark.hooks.object_stores import find_s3_access
from airflow_kafka_spark.sinks import DeltaSink, window_files
from airflow_kafka_spark.sinks.base import Guarantee
from airflow_kafka_spark.sinks.files.manifest import open_manifests
from airflow_kafka_spark.sinks.files.sink import FilesSink
from tests.sinks.attempt import Victim, apply, repeat_killed_attempt, travelled, write_all
from tests.sinks.feed import SCHEMA, Feed
from tests.sinks.oracle import same_multiset
from tests.support.distribution import extended
from tests.support.documents import read_code
from tests.support.s3 import Bucket, EmbeddedS3

WIDE = SCHEMA.append(pa.field("day_of_week", pa.string()))


@dataclass(frozen=True)
class Lake:
    """A table in a separate bucket. boto3 lists the objects, and Arrow reads them."""

    bucket: Bucket
    sink: FilesSink

    def read(self, *only: str) -> list[dict[str, Any]]:
        files = [uri.removeprefix("s3://") for uri in window_files(self.sink.path, "lake")]
        if not files:
            return []
        in_path = pa.schema([("window", pa.string()), *(WIDE.field(name) for name in self.sink.partition_by)])
        partitioning = pa.dataset.partitioning(in_path, flavor="hive")
        found = pa.dataset.dataset(
            files, format="parquet", filesystem=find_s3_access("lake").make_filesystem(), partitioning=partitioning,
            partition_base_dir=f"{self.sink.location.path}/_data",
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
    return Lake(bucket, FilesSink(f"s3://{bucket.name}/lake/orders", conn_id="lake"))


@pytest.fixture
def feed() -> Feed:
    return Feed(WIDE)


def test_windows_are_there_once_with_their_values(lake, feed):
    # Directories with awkward names: five files a split, and here alone.
    lake = replace(lake, sink=replace(lake.sink, partition_by=["day_of_week"]))
    jobs = [feed.next() for _ in range(2)]
    assert lake.sink.validate(feed.shape) == [] and lake.sink.find_last_applied(feed.pipeline) is None
    for job in (*jobs, *jobs):
        assert apply(lake.sink, job).ranges == job.window.ranges
        assert lake.sink.find_last_applied(feed.pipeline).number >= job.window.number
    same_multiset([line for job in jobs for line in job.expected], lake.read())
    assert lake.data() == set(window_files(lake.sink.path, "lake"))


@pytest.mark.parametrize("point", ["sink.in_transaction", extended("sink.committed")])
def test_a_killed_attempt_is_repeated_and_leaves_nothing(lake, feed, tmp_path, point):
    repeat_killed_attempt(lake, feed, point, tmp_path / "victim")
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


def test_of_many_conditional_writes_at_the_same_moment_one_succeeds(lake):
    store = open_manifests(lake.sink).store
    with ThreadPoolExecutor(16) as pool:
        created = list(pool.map(lambda n: store.create(f"race/{n // 16}", str(n)), range(96)))
    assert sum(created) == 6
    for place in range(6):
        (winner,) = (n for n in range(place * 16, place * 16 + 16) if created[n])
        assert store.get(f"race/{place}") == str(winner)


def test_a_replay_replaces_its_window_and_a_late_task_leaves_no_object(lake, feed):
    jobs = [feed.next() for _ in range(2)]
    for job in jobs:
        apply(lake.sink, job)
    again = replace(jobs[0], window=replace(jobs[0].window, replay=1), rows={**jobs[0].rows, 0: []})
    with lake.sink.begin(again.window, again.splits, again.shape) as writer:
        late = travelled(writer.make_split_writer())
        late.open(again.splits[1])
        late.write(again.rows[1][0])
        assert writer.commit(write_all(writer, again)).replay == 1
    with pytest.raises(Fenced):
        late.close()
    late.abort()
    assert lake.ids() == Counter([*again.ids, *jobs[1].ids])
    assert lake.data() == set(window_files(lake.sink.path, "lake"))


# --- readers that list ---------------------------------------------------------------------------------------------------


@pytest.fixture
def listed(lake: Lake) -> Lake:
    return Lake(lake.bucket, replace(lake.sink, visibility="listing"))


def listed_rows(lake: Lake, *only: str) -> list[dict[str, Any]]:
    """Return the rows of a reader that lists the table and skips hidden names, as Spark and Arrow do."""
    in_path = pa.schema([("window", pa.string()), *((name, pa.string()) for name in lake.sink.partition_by)])
    partitioning = pa.dataset.partitioning(in_path, flavor="hive")
    found = pa.dataset.dataset(
        lake.sink.location.path, format="parquet", filesystem=find_s3_access("lake").make_filesystem(), partitioning=partitioning
    )
    columns = list(only or [name for name in WIDE.names if name not in lake.sink.partition_by])
    return found.to_table(columns=columns).to_pylist() if found.files else []


def listed_ids(lake: Lake) -> Counter[int]:
    return Counter(row["id"] for row in listed_rows(lake, "id"))


def uploads(lake: Lake) -> list[dict[str, str]]:
    found = lake.bucket.client.list_multipart_uploads(Bucket=lake.bucket.name)
    return [{"Key": upload["Key"], "UploadId": upload["UploadId"]} for upload in found.get("Uploads", ())]


def test_a_listing_shows_each_window_once_and_nothing_before_its_commit(listed, feed):
    listed = replace(listed, sink=replace(listed.sink, partition_by=["flag"]))
    jobs = [feed.next() for _ in range(2)]
    assert listed.sink.validate(feed.shape) == [] and listed.sink.guarantee is Guarantee.EXACTLY_ONCE_PER_FILE
    with listed.sink.begin(jobs[0].window, jobs[0].splits, jobs[0].shape) as writer:
        results = write_all(writer, jobs[0])
        assert listed.data() == set() and len(uploads(listed)) > 2
        writer.commit(results)
    for job in (*jobs, *jobs):
        assert apply(listed.sink, job).ranges == job.window.ranges
    wanted = [{name: value for name, value in line.items() if name != "flag"} for job in jobs for line in job.expected]
    same_multiset(wanted, listed_rows(listed))
    assert listed.data() == set(window_files(listed.sink.path, "lake")) and uploads(listed) == []
    assert [problem.where for problem in listed.sink.find_replay_problems()] == ["on_rerun"]
    problems = [problem for problem in replace(listed.sink, visibility="manifest").validate(feed.shape)]
    assert [problem.where for problem in problems] == ["sink.visibility"] and "published by `listing`" in problems[0].what


POINTS = ["sink.in_transaction", extended("upload.0.completing"), "upload.2.completed", extended("sink.committed")]


@pytest.mark.parametrize("point", POINTS)
def test_a_commit_that_was_begun_is_carried_on_whenever_its_attempt_dies(listed, feed, tmp_path, point):
    first, job, third = feed.next(3, 2, 1), feed.next(), feed.next(1, 1, 1)
    apply(listed.sink, first)
    with Victim(listed.sink, job, point, tmp_path / "victim") as victim:
        assert victim.died()
    begun = point in POINTS[1:]
    assert set(listed_ids(listed).values()) == {1}
    assert (listed.sink.find_applied(job.window) is not None) is begun
    assert listed_ids(listed) == Counter(first.ids + (job.ids if begun else []))
    for one in (job, third):
        apply(listed.sink, one)
    assert listed_ids(listed) == Counter([*first.ids, *job.ids, *third.ids])
    assert listed.data() == set(window_files(listed.sink.path, "lake")) and uploads(listed) == []


@pytest.mark.extended
def test_a_zombie_completes_no_upload_that_no_commit_names(listed, feed, tmp_path):
    first, job, second, third = feed.next(2, 0, 0), feed.next(), feed.next(), feed.next(1, 0, 0)
    apply(listed.sink, first)
    with Victim(listed.sink, job, "sink.in_transaction:stop", tmp_path / "one") as zombie:
        assert zombie.stopped()
        apply(listed.sink, job)
        zombie.wake()
    assert listed_ids(listed) == Counter([*first.ids, *job.ids])
    with Victim(listed.sink, second, "upload.1.completing:stop", tmp_path / "two") as zombie:
        assert zombie.stopped()
        assert listed.sink.find_applied(second.window).written == len(second.expected)
        apply(listed.sink, third)
        assert zombie.wake() == 0
    assert listed_ids(listed) == Counter(i for one in (first, job, second, third) for i in one.ids)
    assert uploads(listed) == []


@pytest.mark.extended
def test_an_upload_that_was_aborted_behind_its_commit_is_named_and_its_window_can_be_written_again(listed, feed, tmp_path):
    first, job, s3 = feed.next(2, 0, 0), feed.next(), listed.bucket.client
    apply(listed.sink, first)
    with Victim(listed.sink, job, "upload.0.completing", tmp_path / "victim") as victim:
        assert victim.died()
    aborted = uploads(listed)
    for upload in aborted:
        s3.abort_multipart_upload(Bucket=listed.bucket.name, **upload)
    with pytest.raises(SinkUnavailable, match="was aborted after its window was committed. Remove the newest entry"):
        apply(listed.sink, job)
    directory = aborted[0]["Key"].rpartition("/")[0]
    newest = max(key for key in listed.bucket.objects() if "/log/0" in key)
    for key in [newest, *(key for key in listed.bucket.objects() if key.startswith(f"{directory}/"))]:
        s3.delete_object(Bucket=listed.bucket.name, Key=key)
    apply(listed.sink, job)
    assert listed_ids(listed) == Counter([*first.ids, *job.ids])


def test_a_late_task_leaves_no_upload(listed, feed):
    job = feed.next()
    with listed.sink.begin(job.window, job.splits, job.shape) as writer:
        late = travelled(writer.make_split_writer())
        late.open(job.splits[1])
        writer.commit(write_all(writer, job))
    late.write(job.rows[1][0])
    with pytest.raises(Fenced):
        late.close()
    late.abort()
    assert listed_ids(listed) == Counter(job.ids) and uploads(listed) == []


def test_problems_are_reported_without_the_secret(lake, feed, s3, unique, monkeypatch):
    where = [(p.where, p.what) for p in replace(lake.sink, conn_id="nowhere").validate(feed.shape)]
    assert [w for w, _ in where] == ["sink.conn_id"] and "nowhere" in where[0][1]
    (missing,) = replace(lake.sink, path="s3://no-such-bucket-here/t").validate(feed.shape)
    assert missing.where == "sink.path" and missing.what.endswith(
        "cannot be listed: the store answered 404 Not Found (NoSuchBucket, The specified bucket does not exist) to GET "
        f"{s3.url}/no-such-bucket-here"
    )
    allowed = {"Effect": "Allow", "Action": ["s3:ListBucket", "s3:GetObject"], "Resource": "*"}
    reader = s3.user(unique("reader"), {"Version": "2012-10-17", "Statement": [allowed]})
    monkeypatch.setenv("AIRFLOW_CONN_READER", s3.connection_json(reader))
    (refused,) = replace(lake.sink, conn_id="reader", visibility="listing").validate(feed.shape)
    assert "ListMultipartUploads operation: Access Denied" in refused.what, "found before anything is written"
    with pytest.raises(
        SinkUnavailable, match=r"403 Forbidden \(AccessDenied, .* the right to do that; then run the task"
    ) as said:
        apply(replace(lake.sink, conn_id="reader"), feed.next())
    assert not said.value.retryable and "\n" not in str(said.value)
    bare = json.dumps({**json.loads(s3.connection_json()), "extra": {"endpoint_url": s3.url.partition("://")[2]}})
    monkeypatch.setenv("AIRFLOW_CONN_BARE", bare)
    (bare_host,) = replace(lake.sink, conn_id="bare").validate(feed.shape)
    assert bare_host.where == "sink.conn_id" and "expected a URL" in bare_host.what
    assert [p.where for p in replace(lake.sink, visibility="rename").validate(feed.shape)] == ["sink.visibility"]
    job, secret = feed.next(), s3.credentials[1]
    with lake.sink.begin(job.window, job.splits, job.shape) as writer:
        assert secret not in repr(lake.sink) + repr(open_manifests(lake.sink)) + repr(writer.make_split_writer().target)
    with pytest.raises(SinkUnavailable):
        apply(replace(lake.sink, path="s3://no-such-bucket-here/t"), job)


def test_the_policy_in_the_documentation_is_enough(lake, listed, feed, s3, unique, monkeypatch):
    """An attempt that was given up is removed by the next one, so that rights to delete and to abort are used, too."""
    rights = json.loads(read_code("connections.md", "json").replace(":::lake", f":::{lake.bucket.name}"))
    # Amazon asks for it of each object that a request deletes, moto of the bucket.
    rights["Statement"][0]["Action"].append("s3:DeleteObject")
    monkeypatch.setenv("AIRFLOW_CONN_LOADER", s3.connection_json(s3.user(unique("loader"), rights)))
    job = feed.next(2, 1, 0)
    delta = DeltaSink(f"s3://{lake.bucket.name}/delta/orders", conn_id="loader")
    for sink in (lake.sink, replace(listed.sink, path=f"s3://{lake.bucket.name}/lake/listed"), delta):
        own = replace(sink, conn_id="loader")
        assert own.validate(feed.shape) == []
        with own.begin(job.window, job.splits, job.shape) as writer:
            write_all(writer, job)
        assert apply(own, job).ranges == job.window.ranges
    assert uploads(lake) == [] and not [key for key in lake.bucket.objects() if key.endswith("/attempt.json")]
