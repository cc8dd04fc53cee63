"""The URLs of links."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from airflow_kafka_spark.formats import Raw
from airflow_kafka_spark.operators import KafkaToKafkaOperator, KafkaToSinkOperator, PipelineOffsetsOperator
from airflow_kafka_spark.operators.visibility.links import (
    ALL,
    Links,
    TopicLink,
    WindowLink,
    make_pipeline_page,
    make_table_page,
    make_topic_page,
)
from airflow_kafka_spark.provider_info import get_provider_info
from airflow_kafka_spark.sinks import FilesSink, KafkaSink


@pytest.fixture
def set_option(monkeypatch):
    return lambda name, value: monkeypatch.setenv(f"AIRFLOW__{name.upper()}", value)


def test_names_are_quoted_in_an_address(set_option):
    set_option("kafka_spark__topic_url", "http://ui/{connection}/{topic}?x={other}")
    assert make_topic_page("k/1", "a b&c") == "http://ui/k%2F1/a%20b%26c?x={other}"
    set_option("kafka_spark__table_url", "http://catalog/{scheme}/{name}/{table}")
    assert (
        make_table_page("postgres://host:5432/db/public/my%20table") == "http://catalog/postgres/db.public.my%20table/my%20table"
    )
    assert make_table_page("file:///data/orders") == "http://catalog/file/data.orders/orders"


def test_without_an_address_in_the_configuration_there_is_no_link():
    assert make_topic_page("kafka_default", "orders") is None
    assert make_table_page("file:///data") is None


def test_a_page_of_a_pipeline_begins_with_airflows_own_address(set_option):
    assert make_pipeline_page("kafka_default", "airflow-windows", "p<1>").startswith("/")
    set_option("api__base_url", "https://airflow.example.org/team/")
    page = make_pipeline_page("kafka_default", "airflow-windows", "p<1>", "7")
    assert page.startswith("https://airflow.example.org/team/plugin/")
    assert "<" not in page


def test_every_operator_has_its_links_and_airflow_knows_each():
    window = KafkaToSinkOperator(task_id="w", topics="t", group_id="g", value=Raw(), sink=FilesSink("/tmp/x"))
    relay = KafkaToKafkaOperator(task_id="r", topics="t", group_id="g", sink=KafkaSink(topic="u"))
    offsets = PipelineOffsetsOperator(task_id="o", pipeline="p")
    assert [link.name for link in window.operator_extra_links] == [link.name for link in relay.operator_extra_links]
    assert [link.name for link in window.operator_extra_links] == ["Window", "Topic", "Table", "Dead letters", "Spark UI"]
    assert [type(link) for link in offsets.operator_extra_links] == [WindowLink]
    classes = {f"{type(link).__module__}.{type(link).__name__}" for link in ALL}
    assert classes == set(get_provider_info()["extra-links"])
    assert len({link.xcom_key for link in ALL}) == len(ALL)
    key = SimpleNamespace()
    assert [link.get_link(window, ti_key=key) for link in window.operator_extra_links] == [""] * 5


def test_a_link_that_cannot_be_pushed_fails_nothing(caplog):
    def refuse(key, value):
        raise OSError("no supervisor")

    links = Links(SimpleNamespace(xcom_push=refuse))
    links.show(TopicLink, "http://t")
    links.show(WindowLink, None)
    assert links.known == {TopicLink().xcom_key: "http://t"}
    assert "The link `Topic` was not pushed: no supervisor" in caplog.text
