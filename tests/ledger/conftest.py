from __future__ import annotations

import pytest

from airflow_kafka_spark.hooks.kafka.hook import KafkaHook


@pytest.fixture(scope="module")
def hook(kafka):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIRFLOW_CONN_KAFKA_LEDGER", kafka.connection_json())
        with KafkaHook("kafka_ledger") as hook:
            yield hook
