"""The broker dies in the middle of a window and comes back; or it stays away."""

from __future__ import annotations

import pytest

from airflow_kafka_spark.testing import EmbeddedKafka
from tests.support.pipelines import pipeline


@pytest.fixture
def own(unique, tmp_path, request):
    """A pipeline on a broker of its own."""
    with (
        EmbeddedKafka() as kafka,
        pipeline("files", kafka, lambda: request.getfixturevalue("postgres"), unique, tmp_path) as made,
    ):
        yield made


@pytest.mark.faults
@pytest.mark.parametrize("point", ["planned", "split.mid", "job.done", "close.in_transaction"])
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
