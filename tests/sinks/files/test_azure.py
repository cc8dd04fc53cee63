"""A files sink in Azure, on Azurite: run where its command ``azurite-blob`` is on the path (``npm install azurite``)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import shutil
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path

import obstore
import pyarrow as pa
import pyarrow.parquet
import pytest

from airflow_kafka_spark.hooks.object_stores import find_azure_access
from airflow_kafka_spark.sinks import window_files
from airflow_kafka_spark.sinks.files.manifest import open_manifests
from airflow_kafka_spark.sinks.files.sink import FilesSink
from airflow_kafka_spark.testing import _processes as processes
from tests.sinks.attempt import Victim, apply
from tests.sinks.feed import SCHEMA, Feed

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account that every Azurite has."""

pytestmark = pytest.mark.skipif(shutil.which("azurite-blob") is None, reason="azurite-blob is not on the path")


@pytest.fixture(scope="module")
def azurite() -> Iterator[str]:
    """Return the URL of Azurite's account."""
    directory = processes.make_own_directory("azurite")
    supervisor = processes.SupervisorClient("Azurite")
    supervisor.own(directory)
    (port,) = processes.find_free_ports(1)
    command = ["azurite-blob", "--blobPort", str(port), "--inMemoryPersistence", "--skipApiVersionCheck", "--silent"]
    supervisor.spawn(command, log=directory / "log")
    assert processes.wait_until(lambda: "successfully listens" in (directory / "log").read_text(), 180)
    yield f"http://{processes.LOOPBACK}:{port}/{ACCOUNT}"
    supervisor.close()


@pytest.fixture
def sink(azurite: str, unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> FilesSink:
    container = unique("lake")
    connection = {"conn_type": "wasb", "login": ACCOUNT, "password": KEY, "host": azurite}
    monkeypatch.setenv("AIRFLOW_CONN_AZURE", json.dumps(connection))
    date = formatdate(usegmt=True)
    path, version = f"/{ACCOUNT}/{ACCOUNT}/{container}", "2021-08-06"
    signed = f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:{version}\n{path}\nrestype:container"
    signature = base64.b64encode(hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()).decode()
    headers = {"x-ms-date": date, "x-ms-version": version, "Authorization": f"SharedKey {ACCOUNT}:{signature}"}
    headers["Content-Length"] = "0"
    request = urllib.request.Request(f"{azurite}/{container}?restype=container", None, headers, method="PUT")
    assert urllib.request.urlopen(request).status == 201
    return FilesSink(f"abfss://{container}@{ACCOUNT}.dfs.core.windows.net/lake/orders", conn_id="azure", partition_by=["flag"])


@pytest.fixture
def feed() -> Feed:
    return Feed(SCHEMA)


def ids(sink: FilesSink) -> Counter[int]:
    container = find_azure_access(sink.location.account, "azure").make_object_store(sink.location.bucket)
    found = Counter[int]()
    for uri in window_files(sink.path, "azure"):
        content = bytes(obstore.get(container, uri.partition(".windows.net/")[2]).bytes())
        found.update(pa.parquet.read_table(pa.BufferReader(content), columns=["id"])["id"].to_pylist())
    return found


def leftovers(sink: FilesSink) -> set[str]:
    store = open_manifests(sink).store
    data = {f"{sink.uri}/{path}" for path in store.list_files_below("_data")}
    return data ^ set(window_files(sink.path, "azure")) | set(store.list_files_below("_airflow"))


def test_windows_in_azure_are_there_once_and_a_replay_replaces_its_window(sink, feed):
    jobs = [feed.next() for _ in range(2)]
    assert sink.validate(feed.shape) == []
    for job in (*jobs, *jobs):
        assert apply(sink, job).ranges == job.window.ranges
    assert ids(sink) == Counter(i for job in jobs for i in job.ids)
    again = replace(jobs[0], window=replace(jobs[0].window, replay=1), rows={**jobs[0].rows, 0: []})
    assert apply(sink, again).replay == 1
    assert ids(sink) == Counter([*again.ids, *jobs[1].ids]) and leftovers(sink) == set()
    assert KEY not in repr(open_manifests(sink))


@pytest.mark.parametrize("point", ["split.flushed", "sink.in_transaction", "sink.committed"])
def test_a_killed_attempt_in_azure_is_repeated_and_leaves_nothing(sink, feed, tmp_path: Path, point):
    first, job, third = feed.next(3, 2, 1), feed.next(), feed.next(1, 1, 1)
    apply(sink, first)
    with Victim(sink, job, point, tmp_path / "victim") as victim:
        assert victim.died()
    for one in (job, third):
        apply(sink, one)
    assert ids(sink) == Counter([*first.ids, *job.ids, *third.ids]) and leftovers(sink) == set()


def test_of_many_conditional_writes_to_azure_one_succeeds(sink):
    store = open_manifests(sink).store
    with ThreadPoolExecutor(16) as pool:
        created = list(pool.map(lambda n: store.create(f"race/{n // 16}", str(n)), range(160)))
    assert sum(created) == 10
    for place in range(10):
        winners = [n for n in range(place * 16, place * 16 + 16) if created[n]]
        assert store.get(f"race/{place}") == str(winners[0]) and len(winners) == 1


def test_a_connection_to_another_account_is_a_problem(sink, feed):
    other = replace(sink, path=sink.path.replace(ACCOUNT, "another"))
    (problem,) = other.validate(feed.shape)
    assert f"leads to the storage account `{ACCOUNT}`; expected `another`" in problem.what
