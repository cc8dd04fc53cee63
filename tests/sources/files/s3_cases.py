"""The files source on a real S3 API, listed by Airflow's Amazon provider and read by Spark's S3A. Run by ``tests/test_s3.py``."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from airflow_kafka_spark.errors import SourceRejected, SourceUnavailable
from airflow_kafka_spark.hooks.spark.hook import SparkHook
from airflow_kafka_spark.operators import SourceToKafkaOperator
from airflow_kafka_spark.sources.files import store
from airflow_kafka_spark.sources.files.source import FilesSource
from tests.sources.contract import applied, by_partition, read
from tests.support import engine
from tests.support.distribution import extended
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.kafka_sinks import with_sink
from tests.support.oracle import committed_records, same_multiset
from tests.support.runs import run
from tests.support.s3 import PAGE, EmbeddedS3, spark_jars

FORMATS = ("parquet", extended("json"), extended("orc"))
GETS_ONLY = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:GetObject", "Resource": "*"}]}
NAMES = ["a b", "p%20c", "100%", "ü☃", "x[1]{a,b}*?", "h#q?r", "'\"$&;=+,", "~tilde", "col-on"]


class Broker:
    """The embedded Kafka of the process that runs these cases."""

    def connection_extra(self) -> dict[str, Any]:
        return {"bootstrap.servers": os.environ["S3_KAFKA"]}

    def connection_json(self) -> str:
        return json.dumps({"conn_type": "kafka", "extra": self.connection_extra()})

    def create_topic(self, name: str, partitions: int) -> None:
        admin = AdminClient(self.connection_extra())
        admin.create_topics([NewTopic(name, partitions)])[name].result(60)


@pytest.fixture(scope="session")
def kafka() -> Broker:
    return Broker()


@pytest.fixture(scope="session")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="session")
def spark(s3: EmbeddedS3, events: Path) -> Iterator[Any]:
    """Start Spark as an operator does, with the address and the credentials of the store from a connection."""
    engine.not_here()
    jars = os.environ["PYSPARK_SUBMIT_ARGS"].split()[1]
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--jars {','.join([jars, *map(str, spark_jars())])} pyspark-shell"
    logged = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": events.as_uri(), "spark.eventLog.compress": "false"}
    extra = {**s3.spark_settings(), **logged, "spark.driver.memory": "512m"}
    os.environ["AIRFLOW_CONN_SPARK_DEFAULT"] = json.dumps({"conn_type": "spark", "host": "local[2]", "extra": extra})
    with SparkHook().open_session() as session:
        yield session


@dataclass(frozen=True)
class Bucket:
    """A bucket of its own, and what was put under ``in/``."""

    client: Any
    name: str

    @property
    def path(self) -> str:
        return f"s3a://{self.name}/in"

    def put(self, name: str, content: bytes | str) -> None:
        body = content.encode() if isinstance(content, str) else content
        self.client.put_object(Bucket=self.name, Key=f"in/{name}", Body=body)

    def remove(self, name: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=f"in/{name}")

    def source(self, **options: Any) -> FilesSource:
        return FilesSource(self.path, **{"format": "text", "conn_id": "lake", **options})


@pytest.fixture
def bucket(s3: EmbeddedS3, unique: Callable[[str], str]) -> Bucket:
    made = Bucket(s3.client(), unique("bucket"))
    made.client.create_bucket(Bucket=made.name)
    return made


def content(format: str, ids: range) -> bytes:
    table, into = pa.table({"id": pa.array(ids, pa.int64()), "name": [f"näme {n}" for n in ids]}), io.BytesIO()
    if format == "parquet":
        pa.parquet.write_table(table, into, row_group_size=20)
    elif format == "orc":
        pa.orc.write_table(table, into)
    else:
        lines = [json.dumps(row, ensure_ascii=False) for row in table.to_pylist()]
        into.write("".join(line + "\n" for line in lines).encode())
    return into.getvalue()


def names(window: Any) -> list[str]:
    return sorted({piece[0] for split in window.splits for piece in split["files"]})


def lines(partitions: list[list[Any]]) -> Counter[str]:
    return Counter(row["value"] for rows in partitions for row in rows)


# --- windows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_each_window_has_the_new_objects_once(spark, bucket, format):
    options: dict[str, Any] = {"format": format, "glob": "part-*", "split_bytes": 1500}
    if format == "json":
        options["schema"] = "id bigint, name string"
    source = bucket.source(**options)
    bucket.put("other", "not of this pipeline")
    put, found, position = Counter(), Counter(), None
    for window in range(2):
        for part in range(3):
            ids = range(1000 * window + 100 * part, 1000 * window + 100 * part + (90 if part else 10))
            bucket.put(f"part-{window}-{part}", content(format, ids))
            put.update(ids)
        assert source.validate() == []
        frozen = source.freeze(position)
        assert names(frozen) == [f"part-{window}-{part}" for part in range(3)]
        assert frozen.rows in (None, 190)
        rows = [row for part in read(spark, source, frozen.splits) for row in part]
        dicts = [row.asDict() for row in rows]
        assert all(row["name"] == f"näme {row['id']}" for row in dicts)
        found.update(row["id"] for row in dicts)
        assert found == put and sum(found.values()) == 190 * (window + 1)
        position = json.loads(json.dumps(frozen.position))
    assert source.freeze(position).splits == ()


def make(path: str, **options: Any) -> SourceToKafkaOperator:
    source = FilesSource(path, glob="*.parquet", recursive=True, conn_id="lake", split_bytes=2000, partition_columns="day int")
    return SourceToKafkaOperator(task_id="task", source=source, **with_sink(options, key="id"))


def test_windows_become_records_once_and_no_credential_is_left_anywhere(kafka, s3, spark, bucket, events, unique, caplog):
    topic, name = unique("topic"), unique("lake")
    kafka.create_topic(topic, 3)
    os.environ["AIRFLOW_CONN_KAFKA_DEFAULT"] = kafka.connection_json()
    options = {"path": bucket.path, "topic": topic, "pipeline": name, "ledger_topic": f"ledger-{name}"}
    reports = []
    for window in (1, 2):
        for part in range(4):
            ids = range(window * 10_000 + part * 100, window * 10_000 + part * 100 + 100)
            bucket.put(f"day={window}/{part}.parquet", content("parquet", ids))
            bucket.put(f"day={window}/{part}.crc", "of no use")
        reports.append(run(make, options, f"run{window}"))
        assert run(make, options, f"run{window}") == reports[-1], "a cleared task publishes nothing"
        assert reports[-1]["records_written"] == 400
    ids = [w * 10_000 + n for w in (1, 2) for n in range(400)]
    there = committed_records(kafka.connection_extra(), topic)
    events_there = [json.loads(value) for *_, value in there]
    expected = ((n, f"näme {n}", n // 10_000) for n in ids)
    assert same_multiset(expected, ((e["id"], e["name"], e["day"]) for e in events_there)) == 800
    source = make(**options).source
    with applied(spark, source.settings):
        plan = source.read_frame(spark, source.freeze(None).splits)._jdf.queryExecution().toString()
    ledger = committed_records(kafka.connection_extra(), options["ledger_topic"])
    assert len(ledger) >= 4 and "s3a://" in plan and "s3a://" in json.dumps(reports)
    logged = "".join(path.read_text(errors="replace") for path in events.rglob("*") if path.is_file())
    assert "fs.s3a.secret.key" in logged
    texts = {"reports": repr(reports), "plan": plan, "ledger": repr(ledger), "log": caplog.text, "Spark's event log": logged}
    assert all(texts.values())
    assert [where for where, text in texts.items() if s3.credentials[1] in text] == []


def test_objects_of_any_name_are_read(spark, bucket):
    for n, name in enumerate(NAMES):
        bucket.put(f"{name}/{name}", f"{n}\n")
    for source in (bucket.source(recursive=True), replace(bucket.source(recursive=True), path=f"{bucket.path}/")):
        found = lines(read(spark, source, source.freeze(None).splits))
        assert found == Counter(map(str, range(len(NAMES))))


def test_a_name_that_spark_cannot_open_is_refused(bucket):
    bucket.put("a//b", "1\n")
    with pytest.raises(SourceRejected, match="the file 'a//b' has an empty component"):
        bucket.source(recursive=True).freeze(None)


def test_what_marks_a_directory_is_no_file(spark, bucket):
    """The consoles of stores make such objects."""
    for name in ("", "sub/"):
        bucket.put(name, b"")
    bucket.put("a", "a\n")
    bucket.put("sub/b", "b\n")
    assert names(bucket.source().freeze(None)) == ["a"]
    source = bucket.source(recursive=True)
    assert lines(read(spark, source, source.freeze(None).splits)) == Counter("ab")


def test_a_listing_of_several_pages_is_whole(spark, bucket):
    count = 2 * PAGE + 10
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: bucket.put(f"sub/{n:05}", f"{n}\n"), range(count)))
    recursive = bucket.source(recursive=True, max_files=count - 5)
    for source in (recursive, replace(recursive, path=f"{bucket.path}/sub", recursive=False)):
        first = source.freeze(None)
        second = source.freeze(json.loads(json.dumps(first.position)))
        assert (len(names(first)), first.remaining, len(names(second)), second.remaining) == (count - 5, True, 5, False)
        assert len({*names(first), *names(second)}) == count
        assert source.freeze(second.position).splits == ()
        assert lines(read(spark, source, second.splits)) == Counter(str(int(name[-5:])) for name in names(second))


# --- what changes -------------------------------------------------------------------------------------------------------


def test_an_object_replaced_between_windows_is_named(spark, bucket):
    for name in "abc":
        bucket.put(name, f"{name}1\n")
    source = bucket.source()
    first = source.freeze(None)
    bucket.put("b", "b2\n")  # of the same size, perhaps in the same second
    bucket.put("d", "d1\n")
    with pytest.raises(SourceRejected, match="`b` has changed after being read"):
        source.freeze(first.position)
    assert names(replace(source, on_change="ignore").freeze(first.position)) == ["d"]
    again = replace(source, on_change="read").freeze(first.position)
    assert lines(read(spark, source, again.splits)) == Counter(["b2", "d1"])


@pytest.mark.parametrize("single_requests", [3, 2])
def test_an_object_that_changes_after_it_was_frozen_is_found_before_it_is_read(spark, bucket, monkeypatch, single_requests):
    """Few objects are asked for one by one, many by a listing."""
    monkeypatch.setattr(store, "_MAX_SINGLE_REQUESTS", single_requests)
    count = 3
    for n in range(count):
        bucket.put(f"{n:03}", f"{n}\n")
    source = bucket.source()
    window = source.freeze(None)
    assert lines(read(spark, source, window.splits)).total() == count
    bucket.put("001", "9\n")
    with pytest.raises(SourceRejected, match="`001` has changed since the window was frozen: .* etag"):
        source.read_frame(spark, window.splits)
    bucket.remove("001")
    with pytest.raises(SourceRejected, match="`001` has vanished since the window was frozen"):
        source.read_frame(spark, window.splits)


def test_an_object_that_vanishes_while_it_is_read_is_explained(spark, bucket):
    bucket.put("a", "1\n")
    source = bucket.source()
    with applied(spark, source.settings):
        frame = source.read_frame(spark, source.freeze(None).splits)
        bucket.remove("a")
        with pytest.raises(Exception, match="FAILED_READ_FILE") as raised:
            by_partition(frame)
    explained = source.explain(raised.value)
    assert explained is not None and f"`{bucket.path}/a` cannot be read: it is gone" in str(explained)


# --- what cannot be listed ----------------------------------------------------------------------------------------------


def problem(source: FilesSource) -> str:
    [found] = source.validate()
    assert found.where == "source.path"
    return str(found)


def test_a_bucket_or_prefix_that_is_not_there_is_a_problem(bucket):
    for recursive in (False, True):
        for path in ("s3a://no-such-bucket-here", "s3a://no-such-bucket-here/in", bucket.path):
            source = replace(bucket.source(recursive=recursive), path=path)
            assert "FileNotFoundError" in problem(source) and path in problem(source)
            with pytest.raises(SourceUnavailable, match="FileNotFoundError"):
                source.freeze(None)
    bucket.put("file", "1\n")
    for recursive in (False, True):
        source = replace(bucket.source(recursive=recursive), path=f"{bucket.path}/file")
        with pytest.raises(SourceUnavailable, match="is a file: name its directory, and the file by `glob`"):
            source.freeze(None)


def test_wrong_credentials_are_a_problem_and_no_empty_window(s3, bucket):
    """This holds at the root of a bucket, too, and for a user who may read but not list."""
    bucket.put("sub/a", "1\n")
    key, secret = s3.credentials
    others = {"stranger": ("AKIAXXXXXXXXXXXXXXXX", secret), "forger": (key, secret[::-1]), "reader": s3.user("reader", GETS_ONLY)}
    for conn_id, credentials in others.items():
        os.environ[f"AIRFLOW_CONN_{conn_id.upper()}"] = s3.connection_json(credentials)
        for path in (f"s3a://{bucket.name}", bucket.path, f"{bucket.path}/sub"):
            for recursive in (False, True):
                source = replace(bucket.source(recursive=recursive), path=path, conn_id=conn_id)
                found = problem(source)
                assert "PermissionError" in found and "conn_id" in found
                assert credentials[1] not in found and credentials[0] not in found
                with pytest.raises(SourceUnavailable, match="PermissionError"):
                    source.freeze(None)


def test_a_connection_that_is_not_defined_is_a_problem(bucket):
    assert "nowhere" in problem(replace(bucket.source(), conn_id="nowhere"))


# --- a store that fails -------------------------------------------------------------------------------------------------

ENDLESS = 1_000_000
FAULTS: dict[Fault, int] = {"expired": ENDLESS, "lost": 0, "skewed": ENDLESS, "unavailable": 0}
"""The number of requests that fail after the first one."""


@pytest.mark.parametrize("format", ["parquet", extended("orc")])
def test_a_window_has_all_objects_or_is_not_frozen_whichever_request_fails(s3, bucket, format):
    """Objects whose footers cannot be read are not taken for damaged ones: nobody would try again."""
    for part in range(2):
        bucket.put(f"sub/part-{part}", content(format, range(100 * part, 100 * part + 60)))
    with FaultProxy(s3.url) as proxy:
        connection = json.loads(s3.connection_json())
        connection["extra"]["endpoint_url"] = proxy.url
        conn_id = f"faulty_{format}"  # Airflow keeps the client of a connection
        os.environ[f"AIRFLOW_CONN_{conn_id.upper()}"] = json.dumps(connection)
        source = bucket.source(format=format, recursive=True, conn_id=conn_id)
        whole = source.freeze(None)
        assert (len(names(whole)), whole.rows) == (2, 120)
        failed = Counter[str]()
        for number in range(1, len(proxy.requests) + 1):
            for fault, more in FAULTS.items():
                proxy.arm(fault, number, number + more)
                try:
                    assert source.freeze(None) == whole
                except SourceUnavailable:
                    failed[fault] += 1
        assert failed["expired"] and failed["skewed"], "these are not tried again"
