"""Transactional producers: the state after a failed fencing."""

from __future__ import annotations

import traceback

import pytest
from confluent_kafka import KafkaException, Producer

from airflow_kafka_spark.hooks.kafka.client import ClientEvents
from airflow_kafka_spark.hooks.kafka.transactions import make_fencing_producer


def test_a_producer_that_could_not_fence_is_not_held_by_its_error():
    with pytest.raises(KafkaException) as refused:
        make_fencing_producer({"bootstrap.servers": "127.0.0.1:1"}, "id", 0.1, ClientEvents())
    frames = [frame for frame, _ in traceback.walk_tb(refused.tb)]
    assert frames[-1].f_code.co_name == make_fencing_producer.__name__
    assert not [name for frame in frames for name, value in frame.f_locals.items() if isinstance(value, Producer)]
