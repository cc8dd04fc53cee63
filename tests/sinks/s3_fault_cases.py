"""The files sink on a store that fails at each request in turn. Run by ``tests/test_s3.py``."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet
import pytest

from airflow_kafka_spark.errors import KafkaSparkError, SinkUnavailable
from airflow_kafka_spark.hooks.object_stores import find_s3_access
from airflow_kafka_spark.sinks import window_files
from airflow_kafka_spark.sinks.files.sink import FilesSink
from airflow_kafka_spark.windows.model import TopicPartition
from tests.sinks.attempt import apply
from tests.sinks.feed import SCHEMA, Feed
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.s3 import Bucket, EmbeddedS3

ALL = os.environ.get("STORE_FAULTS") == "all"
"""True: every request fails in every way, in minutes. False: the first request of each kind fails in one of these ways."""

PLACES = (TopicPartition("orders", 0),)
"""One partition, so that a window has few requests: each of them takes two windows."""
ENDLESS = 1_000_000
FAULTS: dict[Fault, int] = {"lost": 0, "expired": ENDLESS, "unavailable": 0, "skewed": ENDLESS}
"""The number of requests that fail after the first one."""


@dataclass(frozen=True)
class Place:
    """A table behind the proxy, which readers read directly."""

    proxy: FaultProxy
    bucket: Bucket
    sink: FilesSink
    feed: Feed

    def read(self) -> Counter[int]:
        filesystem, files = find_s3_access("lake").make_filesystem(), sorted(self.named())
        tables = [pa.parquet.read_table(f"{self.bucket.name}/{file}", filesystem=filesystem, columns=["id"]) for file in files]
        return Counter(i for table in tables for i in table["id"].to_pylist())

    def named(self) -> set[str]:
        """Return the data files that readers see."""
        return {uri.partition(f"{self.bucket.name}/")[2] for uri in window_files(self.sink.uri, "lake")}

    def leftovers(self) -> set[str]:
        objects = self.bucket.objects()
        data = {key for key in objects if key.endswith(".parquet")}
        uploads = self.bucket.client.list_multipart_uploads(Bucket=self.bucket.name).get("Uploads", ())
        pending = {upload["Key"] for upload in uploads if upload["Key"].endswith(".parquet")}
        return data ^ self.named() | pending | {key for key in objects if "attempts/" in key}


@pytest.fixture(scope="module")
def proxy(s3: EmbeddedS3) -> Iterator[FaultProxy]:
    with FaultProxy(s3.url) as started:
        connection = json.loads(s3.connection_json())
        connection["extra"]["endpoint_url"] = started.url
        os.environ["AIRFLOW_CONN_FAULTY"] = json.dumps(connection)
        yield started


@pytest.fixture(params=["manifest", "listing"] if ALL else ["manifest"])
def place(proxy: FaultProxy, s3: EmbeddedS3, unique: Callable[[str], str], request: pytest.FixtureRequest) -> Place:
    proxy.arm(None)
    bucket = s3.create_bucket(unique("bucket"))
    sink = FilesSink(f"s3://{bucket.name}/lake", conn_id="faulty", visibility=request.param)
    place = Place(proxy, bucket, sink, Feed(SCHEMA, places=PLACES))
    apply(sink, place.feed.next(1))
    return place


def test_a_window_is_there_once_whichever_request_fails(place):
    """Each way of failing at each request; then the attempt is repeated, as Airflow does."""
    place.proxy.arm(None)
    apply(place.sink, place.feed.next(1))
    moved, errors = 2, Counter[str]()
    for number, wanted in place.proxy.failures(FAULTS, ALL):
        for fault in wanted:
            more = FAULTS[fault]
            job, moved = place.feed.next(1), moved + 1
            place.proxy.arm(fault, number, number + more)
            try:
                apply(place.sink, job)
            except KafkaSparkError as error:
                assert isinstance(error, SinkUnavailable), (fault, number, place.proxy.failed[0])
                errors[fault] += 1
            place.proxy.arm(None)
            assert apply(place.sink, job).ranges == job.window.ranges
    found = place.read()
    assert (set(found.values()), len(found)) == ({1}, moved)
    assert errors["expired"] and errors["skewed"], "these are not tried again"
    # The last attempt removes what earlier ones could not.
    apply(place.sink, place.feed.next(1))
    assert place.leftovers() == set()


@pytest.mark.extended
@pytest.mark.parametrize("fault", ["slow down", "too many"])
def test_a_store_that_slows_its_clients_down_is_waited_for(place, fault):
    job = place.feed.next(1)
    place.proxy.arm(fault, 1, ENDLESS, every=3)
    apply(place.sink, job)
    assert len(place.proxy.failed) > 5
    place.proxy.arm(None)
    assert set(place.read().values()) == {1}


@pytest.mark.parametrize("fault", ["lost", "conflict"])
def test_a_conditional_put_whose_answer_is_lost_is_recognised_as_the_own_one_and_one_in_conflict_is_tried_again(place, fault):
    """Amazon answers 409 while another such request for the object is under way, which need not succeed."""
    job = place.feed.next(1)
    part = "/log/000"
    place.proxy.arm_at(lambda request: request.startswith("PUT") and part in request, fault)
    assert apply(place.sink, job).ranges == job.window.ranges
    assert len(place.proxy.failed) == 1 and part in place.proxy.failed[0]
    place.proxy.arm(None)
    assert set(place.read().values()) == {1} and len(place.read()) == 2
