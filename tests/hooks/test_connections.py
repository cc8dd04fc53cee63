"""Whoever looks an Airflow connection up says the same of one that is missing or of another type."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from airflow_kafka_spark.errors import ConnectionInvalid
from airflow_kafka_spark.hooks.kafka import KafkaHook
from airflow_kafka_spark.hooks.spark import SparkHook
from airflow_kafka_spark.sinks import PostgresSink
from airflow_kafka_spark.sources import JdbcSource

LOOKS: dict[str, Callable[[str], Any]] = {
    "kafka": lambda conn_id: KafkaHook(conn_id).config,
    "spark": lambda conn_id: SparkHook(conn_id).connection,
    "sink": lambda conn_id: PostgresSink(conn_id, "t").server(),
    "source": lambda conn_id: JdbcSource(conn_id, "t").database(),
}
TYPES = {"kafka": "`kafka`", "spark": "`spark`", "sink": "`postgres`", "source": "`postgres` or `mysql`"}
OPTIONS = {"kafka": "kafka_conn_id", "spark": "spark_conn_id"}


@pytest.mark.parametrize("who", LOOKS)
def test_one_that_is_not_defined_is_named_with_what_to_add(who: str) -> None:
    add = f"Add a connection `nowhere` of type {TYPES[who]}.*, or correct `{OPTIONS.get(who, 'conn_id')}`"
    with pytest.raises(ConnectionInvalid, match=f"`nowhere`: it is not defined.*{add}"):
        LOOKS[who]("nowhere")


@pytest.mark.parametrize("who", ["spark", "sink", "source"])
def test_one_of_another_type_is_named_with_its_type(monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_ELSEWHERE", "http://u:s3cr3t@example.org")
    with pytest.raises(ConnectionInvalid, match=f"it is of type `http`.*Use a connection of type {TYPES[who]}") as caught:
        LOOKS[who]("elsewhere")
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "address"),
    [("postgresql", "postgres://db:5432/shop"), ("postgres", "postgres://db:5432/shop"), ("mariadb", "mysql://db:3306/shop")],
)
def test_a_type_goes_by_several_names(monkeypatch: pytest.MonkeyPatch, kind: str, address: str) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", f'{{"conn_type": "{kind}", "host": "db", "schema": "shop"}}')
    assert re.fullmatch(f"{address}.*", JdbcSource("shop", "orders").uri)
