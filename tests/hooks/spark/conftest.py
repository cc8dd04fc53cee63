"""Fixtures of the tests of Spark sessions."""

from __future__ import annotations

import json

import pytest

from airflow_kafka_spark.hooks.spark.hook import SparkHook


@pytest.fixture
def connect(monkeypatch):
    """A function that sets a connection of these fields, and returns its hook."""

    def make(**connection):
        monkeypatch.setenv("AIRFLOW_CONN_S", json.dumps({"conn_type": "spark", **connection}))
        return SparkHook("s")

    return make
