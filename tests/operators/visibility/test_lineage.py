"""OpenLineage events, by the names of its specification; `test_visible.py` reads those of a real DAG run."""

from __future__ import annotations

import json

import pytest

from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.operators import KafkaToKafkaOperator, KafkaToSinkOperator, SourceToKafkaOperator
from airflow_kafka_spark.operators.visibility.lineage import get_broker, parse_dataset
from airflow_kafka_spark.sinks import FilesSink, KafkaSink
from airflow_kafka_spark.sources import FilesSource, JdbcSource
from airflow_kafka_spark.transforms import Filter
from airflow_kafka_spark.windows.dead_letters import Captured
from airflow_kafka_spark.windows.model import Landed, OffsetRange, Window
from airflow_kafka_spark.windows.report import Report


@pytest.fixture(autouse=True)
def connections(monkeypatch):
    extra = {"bootstrap.servers": "PLAINTEXT://one:9093, two:9093", "sasl.password": "s3cr3t"}
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", json.dumps({"conn_type": "kafka", "extra": extra}))
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", "postgres://me:s3cr3t@db/shop")


@pytest.mark.parametrize(
    "uri, namespace, name",
    [
        ("postgres://db:5432/shop/public/my%20orders", "postgres://db:5432", "shop.public.my orders"),
        ("mysql://db:3306/shop/orders", "mysql://db:3306", "shop.orders"),
        ("file:///data/my%20orders", "file", "/data/my orders"),
        ("s3a://bucket/some/path/", "s3://bucket", "some/path"),
        ("s3a://bucket", "s3://bucket", "/"),
    ],
)
def test_names_are_those_of_the_specification(uri, namespace, name):
    assert parse_dataset(uri) == (namespace, name)


@pytest.mark.parametrize("servers", ["one:9092,two:9092", "one", "SASL_SSL://one:9092"])
def test_a_cluster_is_named_by_its_first_broker(servers):
    assert get_broker(servers) == "kafka://one:9092"


def test_from_a_table_to_a_topic():
    operator = SourceToKafkaOperator(
        task_id="t", source=JdbcSource("shop", "orders"), sink=KafkaSink(topic="orders", value=Json(), key="id")
    )
    lineage = operator.make_openlineage()
    assert [(d.namespace, d.name) for d in lineage.inputs] == [("postgres://db:5432", "shop.public.orders")]
    assert [(d.namespace, d.name) for d in lineage.outputs] == [("kafka://one:9093", "orders")]
    assert not lineage.run_facets
    window = Window("p", 1, (), "run", "2026-01-01T00:00:00Z")
    landed = (Landed("orders", 0, 5, 9, 4), Landed("orders", 1, 0, 2, 2))
    report = Report(window, records_read=6, records_written=6, published=landed, source="postgres://db:5432/shop/public/orders")
    lineage = operator.make_openlineage(window=window, report={**report.to_dict(), "published": [vars(part) for part in landed]})
    (written,) = lineage.outputs
    assert written.outputFacets["outputStatistics"].rowCount == 6
    assert written.outputFacets["kafkaSpark_offsets"].partitions == [
        {"partition": 0, "first": 5, "last": 9, "records": 4},
        {"partition": 1, "first": 0, "last": 2, "records": 2},
    ]
    assert lineage.inputs[0].inputFacets["inputStatistics"].rowCount == 6
    assert "s3cr3t" not in str(lineage)


def test_between_topics():
    operator = KafkaToKafkaOperator(task_id="t", topics=["a", "b"], group_id="g", sink=KafkaSink(topic="c"))
    lineage = operator.make_openlineage()
    assert [d.name for d in lineage.inputs] == ["a", "b"]
    assert [d.name for d in lineage.outputs] == ["c"]
    window = Window("p", 1, (OffsetRange("a", 0, 3, 7), OffsetRange("b", 0, 0, 0)), "run", "2026-01-01T00:00:00Z")
    lineage = operator.make_openlineage(window=window)
    assert lineage.inputs[0].inputFacets["kafkaSpark_offsets"].partitions == [{"partition": 0, "start": 3, "end": 7}]
    assert lineage.run_facets["kafkaSpark_window"].window == "0000000001"


def test_other_sinks_of_a_window_are_outputs_too():
    transforms = [Filter(to="topic"), Filter(to=FilesSink("/data/rare"))]
    sink = FilesSink("/data/out")
    operator = KafkaToSinkOperator(task_id="t", topics="a", group_id="g", value=Json(), sink=sink, transforms=transforms)
    report = Report(Window("p", 1, (), "run", ""), records_written=6, captured=(Captured(0, "rare", "file:///data/rare", 4, ""),))
    lineage = operator.make_openlineage(window=report.window, report=report.to_dict())
    assert [(d.name, d.outputFacets["outputStatistics"].rowCount) for d in lineage.outputs] == [
        ("/data/out", 6),
        ("/data/rare", 4),
    ]
    assert [d.name for d in operator.make_openlineage().outputs] == ["/data/out", "/data/rare"]


def test_from_files():
    operator = SourceToKafkaOperator(task_id="t", source=FilesSource("/data/in", "json"), sink=KafkaSink(topic="t", value=Json()))
    assert [(d.namespace, d.name) for d in operator.make_openlineage().inputs] == [("file", "/data/in")]
