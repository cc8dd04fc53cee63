"""Answers of an object store as a files source reads them, without a store (``s3_cases.py`` has one)."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from importlib.util import find_spec
from types import SimpleNamespace

from airflow_kafka_spark.sources.files.source import FilesSource
from airflow_kafka_spark.sources.files.store import ObjectStore, parse_info


def test_an_object_is_the_same_in_a_listing_that_is_more_exact_than_the_answer_about_it():
    """MinIO and Ceph list milliseconds; what S3 says of one object is an HTTP date."""
    listed = {"LastModified": datetime(2026, 1, 1, 12, 0, 7, 345_000, timezone.utc), "size": 3, "ETag": '"x"'}
    asked = {**listed, "LastModified": datetime(2026, 1, 1, 12, 0, 7, 0, timezone.utc)}
    assert parse_info("a", listed) == parse_info("a", asked)
    assert parse_info("a", listed).mtime == 1_767_268_807_000_000
    later = {**listed, "LastModified": datetime(2026, 1, 1, 12, 0, 8, 0, timezone.utc)}
    assert parse_info("a", later) != parse_info("a", listed)


def test_other_stores_keep_their_fractions_of_a_second():
    assert parse_info("a", {"updated": "2026-01-01T12:00:07.345Z", "size": 3}).mtime == 1_767_268_807_345_000


def test_a_connection_that_no_provider_makes_use_of_is_a_problem(monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_LAKE", json.dumps({"conn_type": "generic"}))
    [found] = FilesSource("memory://lake/in", format="text", conn_id="lake").validate()
    assert "no installed Airflow provider makes use of `conn_id` for memory://" in str(found)
    if find_spec("airflow.providers.amazon") is None:
        [found] = FilesSource("s3a://lake/in", format="text", conn_id="lake").validate()
        assert found.where == "source.conn_id" and "apache-airflow-providers-amazon[s3fs]" in found.action


def test_a_connection_that_is_not_defined_is_a_problem():
    [found] = FilesSource("memory://lake/in", format="text", conn_id="not_defined").validate()
    assert "not_defined" in str(found) and "conn_id" in str(found)


def test_two_object_stores_with_buckets_of_one_name_are_two_places(monkeypatch):
    def store(**client):
        monkeypatch.setattr(ObjectStore, "_place", (SimpleNamespace(**client), "lake/in"))
        return FilesSource("s3a://lake/in", format="text", conn_id="lake").find_origin().place

    assert store(endpoint_url="http://user:secret@minio:9000/") == {"path": "s3a://lake/in", "server": "minio:9000"}
    assert store(endpoint_url=None, client_kwargs={"endpoint_url": "https://ceph"})["server"] == "ceph"
    assert store(account_name="prod")["server"] == "prod"
    assert store()["server"] == "default", "a server that is given is another one"
