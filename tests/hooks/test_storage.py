from __future__ import annotations

from airflow_kafka_spark.hooks.storage import S3Access


def test_no_secret_is_shown():
    access = S3Access("http://localhost:1", "eu-west-1", "AKIA", "the secret", "the token")
    assert "the secret" not in repr(access) and "the token" not in repr(access)
