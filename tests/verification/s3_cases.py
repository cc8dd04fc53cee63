"""A table of PostgreSQL against copies in S3. Run by ``tests/test_s3.py``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from airflow_kafka_spark.sinks import DeltaSink, FilesSink, IcebergSink
from airflow_kafka_spark.sinks.base import Sink
from tests.sinks.postgres.kit import Pipeline, Place, write
from tests.support.distribution import extended
from tests.support.s3 import EmbeddedS3
from tests.verification.test_verify import named, verify

COPIED = pa.schema([("id", pa.int64()), ("v", pa.string())])


@pytest.fixture(params=["delta", extended("iceberg"), "files"])
def sink(
    request: pytest.FixtureRequest,
    s3: EmbeddedS3,
    unique: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Sink:
    bucket, (key, secret) = s3.create_bucket(unique("bucket")).name, s3.credentials
    if request.param == "delta":
        return DeltaSink(f"s3://{bucket}/orders", conn_id="lake", partition_by=["v"])
    if request.param == "files":
        return FilesSink(f"s3://{bucket}/orders", conn_id="lake", visibility="manifest")
    access = {"region": "us-east-1", "access-key-id": key, "secret-access-key": secret, "endpoint": s3.url}
    extra = {"name": "lake", "type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"s3://{bucket}/lake"}
    extra |= {f"s3.{name}": value for name, value in access.items()}
    monkeypatch.setenv("AIRFLOW_CONN_CATALOG", json.dumps({"conn_type": "iceberg", "extra": extra}))
    return IcebergSink("shop.orders", "catalog")


def test_rows_that_a_copy_in_s3_lacks_or_has_otherwise_are_found(sink: Sink, place: Place) -> None:
    place.connection.execute(b"CREATE TABLE s (id bigint PRIMARY KEY, v text)")
    place.connection.execute(b"INSERT INTO s SELECT n, 'v/' || n % 3 FROM generate_series(1, 300) n")
    rows, pipeline = [{"id": n, "v": f"v/{n % 3}"} for n in range(1, 301)], Pipeline(COPIED)
    for part in (rows[:200], rows[200:]):
        write(sink, pipeline, part)
    assert verify(place, sink=sink, chunk_rows=70)["equal"]
    place.connection.execute(b"UPDATE s SET v = NULL WHERE id = 7")
    place.connection.execute(b"DELETE FROM s WHERE id = 250")
    assert named(verify(place, sink=sink, chunk_rows=70, on_difference="warn")) == [
        {"kind": "different", "key": {"id": 7}, "columns": ["v"]},
        {"kind": "extra", "key": {"id": 250}},
    ]
