"""A files sink in Azure and in Google Cloud Storage (GCS), on emulators that have to be there.

Azure: Azurite, where `azurite-blob` is on the path (`npm install azurite`). GCS: the testbench of Google for its clients,
where `GCS_TESTBENCH` names a directory of its sources, which has a virtual environment ``.venv`` with what they import.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import shutil
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from email.utils import formatdate
from functools import partial
from pathlib import Path

import obstore
import pyarrow as pa
import pyarrow.parquet
import pytest

from airflow_kafka_spark.errors import Fenced
from airflow_kafka_spark.hooks.object_stores import find_store_access
from airflow_kafka_spark.sinks import window_files
from airflow_kafka_spark.sinks.files.manifest import open_manifests
from airflow_kafka_spark.sinks.files.sink import FilesSink
from airflow_kafka_spark.testing import _processes as processes
from tests.sinks.attempt import Victim, apply
from tests.sinks.feed import SCHEMA, Feed

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account that every Azurite has."""
TESTBENCH = os.environ.get("GCS_TESTBENCH", "")
TESTBENCH_SERVER = Path(__file__).parents[2] / "support" / "gcs_testbench.py"
"""The program. Only the Python of the testbench can import it."""

SERVERS = [
    pytest.param("azure", marks=pytest.mark.skipif(shutil.which("azurite-blob") is None, reason="azurite-blob is not there")),
    pytest.param("gcs", marks=pytest.mark.skipif(not TESTBENCH, reason="GCS_TESTBENCH names no testbench of Google")),
]


@dataclass(frozen=True)
class Server:
    """An emulator.

    :param connection: the Airflow connection to it.
    :param create: makes a container or bucket.
    :param table: the table's URI; `{}` is the container or bucket.
    :param secret: what must not be shown.
    """

    connection: dict[str, object]
    create: Callable[[str], None]
    table: str
    secret: str


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    directory = processes.make_own_directory(request.param)
    supervisor = processes.SupervisorClient(request.param)
    supervisor.own(directory)
    (port,) = processes.find_free_ports(1)
    url, log = f"http://{processes.LOOPBACK}:{port}", directory / "log"
    if request.param == "azure":
        command = ["azurite-blob", "--blobPort", str(port), "--inMemoryPersistence", "--skipApiVersionCheck", "--silent"]
        supervisor.spawn(command, log=log)
        url += f"/{ACCOUNT}"
        connection: dict[str, object] = {"conn_type": "wasb", "login": ACCOUNT, "password": KEY, "host": url}
        table = f"abfss://{{}}@{ACCOUNT}.dfs.core.windows.net/lake/orders"
        found, begun = Server(connection, partial(_create_container, url), table, KEY), "successfully listens"
    else:
        python = Path(TESTBENCH) / ".venv" / "bin" / "python"
        environment = {**os.environ, "PYTHONPATH": TESTBENCH}
        supervisor.spawn([python, TESTBENCH_SERVER, str(port)], log=log, env=environment)
        connection = {"conn_type": "google_cloud_platform", "extra": {"endpoint_url": url}}
        found, begun = Server(connection, partial(_create_bucket, url), "gs://{}/lake/orders", ""), "Running on"
    assert processes.wait_until(lambda: begun in log.read_text(), 180), log.read_text()
    yield found
    supervisor.close()


def _create_container(url: str, name: str) -> None:
    date, version = formatdate(usegmt=True), "2021-08-06"
    path = f"/{ACCOUNT}/{ACCOUNT}/{name}"
    signed = f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:{version}\n{path}\nrestype:container"
    signature = base64.b64encode(hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()).decode()
    headers = {"x-ms-date": date, "x-ms-version": version, "Authorization": f"SharedKey {ACCOUNT}:{signature}"}
    headers["Content-Length"] = "0"
    request = urllib.request.Request(f"{url}/{name}?restype=container", None, headers, method="PUT")
    assert urllib.request.urlopen(request).status == 201


def _create_bucket(url: str, name: str) -> None:
    body, kind = json.dumps({"name": name}).encode(), {"Content-Type": "application/json"}
    assert urllib.request.urlopen(urllib.request.Request(f"{url}/storage/v1/b?project=lake", body, kind)).status == 200


@pytest.fixture
def sink(server: Server, unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> FilesSink:
    bucket = unique("lake")
    server.create(bucket)
    monkeypatch.setenv("AIRFLOW_CONN_STORE", json.dumps(server.connection))
    return FilesSink(server.table.format(bucket), conn_id="store", partition_by=["flag"])


@pytest.fixture
def feed() -> Feed:
    return Feed(SCHEMA)


def ids(sink: FilesSink) -> Counter[int]:
    place = sink.location
    objects = find_store_access(place.scheme, place.account, "store").make_object_store(place.bucket)
    found = Counter[int]()
    for uri in window_files(sink.path, "store"):
        path = uri.partition("://")[2].partition("/")[2]
        content = bytes(obstore.get(objects, path).bytes())
        found.update(pa.parquet.read_table(pa.BufferReader(content), columns=["id"])["id"].to_pylist())
    return found


def leftovers(sink: FilesSink) -> set[str]:
    store = open_manifests(sink).store
    data = {f"{sink.uri}/{path}" for path in store.list_files_below("_data")}
    return data ^ set(window_files(sink.path, "store")) | set(store.list_files_below("_airflow"))


def test_windows_are_there_once_and_a_replay_replaces_its_window(sink, feed, server):
    jobs = [feed.next() for _ in range(2)]
    assert sink.validate(feed.shape) == []
    for job in (*jobs, *jobs):
        assert apply(sink, job).ranges == job.window.ranges
    assert ids(sink) == Counter(i for job in jobs for i in job.ids)
    again = replace(jobs[0], window=replace(jobs[0].window, replay=1), rows={**jobs[0].rows, 0: []})
    assert apply(sink, again).replay == 1
    assert ids(sink) == Counter([*again.ids, *jobs[1].ids]) and leftovers(sink) == set()
    assert not server.secret or server.secret not in repr(open_manifests(sink))


@pytest.mark.parametrize("point", ["split.flushed", "sink.in_transaction", "sink.committed"])
def test_a_killed_attempt_is_repeated_and_leaves_nothing(sink, feed, tmp_path: Path, point):
    first, job, third = feed.next(3, 2, 1), feed.next(), feed.next(1, 1, 1)
    apply(sink, first)
    with Victim(sink, job, point, tmp_path / "victim") as victim:
        assert victim.died()
    for one in (job, third):
        apply(sink, one)
    assert ids(sink) == Counter([*first.ids, *job.ids, *third.ids]) and leftovers(sink) == set()


def test_a_zombie_that_wakes_after_its_successor_changes_nothing(sink, feed, tmp_path: Path):
    job = feed.next()
    with Victim(sink, job, "sink.in_transaction:stop", tmp_path / "victim") as zombie:
        assert zombie.stopped()
        with sink.begin(job.window, job.splits, job.shape):
            pass
        assert zombie.wake() == 1 and Fenced.__name__ in zombie.log.read_text()
    assert ids(sink) == Counter()
    apply(sink, job)
    assert ids(sink) == Counter(job.ids) and leftovers(sink) == set()


def test_a_file_of_several_parts_is_whole(sink):
    store = open_manifests(sink).store
    content = os.urandom(20 << 20)
    with store.open("_data/large") as stream:
        for at in range(0, len(content), 3 << 20):
            stream.write(content[at : at + (3 << 20)])
    assert store.open_input("_data/large").read() == content


def test_of_many_conditional_writes_one_succeeds(sink):
    store = open_manifests(sink).store
    with ThreadPoolExecutor(16) as pool:
        created = list(pool.map(lambda n: store.create(f"race/{n // 16}", str(n)), range(160)))
    assert sum(created) == 10
    for place in range(10):
        winners = [n for n in range(place * 16, place * 16 + 16) if created[n]]
        assert store.get(f"race/{place}") == str(winners[0]) and len(winners) == 1


def test_a_connection_to_another_account_is_a_problem(sink, feed):
    if not sink.location.account:
        pytest.skip("only Azure's locations name an account")
    other = replace(sink, path=sink.path.replace(ACCOUNT, "another"))
    (problem,) = other.validate(feed.shape)
    assert f"leads to the storage account `{ACCOUNT}`; expected `another`" in problem.what
