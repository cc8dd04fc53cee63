"""The broker dies in the middle of a window and is restarted, or stays down."""

from __future__ import annotations

import pytest

from airflow_kafka_spark.testing import EmbeddedKafka
from tests.support.pipelines import pipeline


@pytest.fixture(scope="module")
def broker():
    """A broker that the tests of this file may kill."""
    with EmbeddedKafka() as kafka:
        yield kafka


@pytest.fixture
def own(broker, unique, tmp_path, request):
    """A pipeline on that broker."""
    with pipeline("files", broker, lambda: request.getfixturevalue("postgres"), unique, tmp_path) as made:
        yield made


@pytest.mark.faults
@pytest.mark.parametrize("point", ["split.mid", "close.in_transaction"])
def test_a_broker_killed_and_restarted_during_a_window_costs_nothing(own, point):
    own.produce(1000)
    attempt = own.victim("run1", fault=f"{point}:stop")
    attempt.wait_stopped()
    own.kafka.kill()
    attempt.wake()
    own.kafka.restart()
    attempt.wait()
    own.run("run1")
    assert own.check() == 1000
    own.produce(100)
    own.run("run2")
    assert own.check() == 1100
