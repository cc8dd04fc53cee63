"""Bad input gives one error with all problems at once, before Spark starts, and changes nothing."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient

from airflow_kafka_spark.errors import ValidationError
from airflow_kafka_spark.formats import Json, String
from airflow_kafka_spark.sinks import PostgresSink
from tests.support.pipelines import SCHEMA


def problems(flow: Any, **options: Any) -> dict[str, str]:
    """What a run complains of: where -> what. Asserts that nothing was changed, the ledger topic not even created."""
    admin = AdminClient(flow.kafka.connection_extra())

    def topics() -> set[str]:
        return set(admin.list_topics(timeout=30).topics) - {"__consumer_offsets"}

    before = topics()
    with pytest.raises(ValidationError) as caught:
        flow.run(**options)
    assert topics() == before
    assert all(str(p) in str(caught.value) for p in caught.value.problems)
    return {p.where: p.what for p in caught.value.problems}


def test_all_problems_come_at_once(files):
    found = problems(
        files,
        topics=["no-such-topic", "bad name!"],
        topics_pattern="x",
        group_id=" ",
        max_records="many",
        data_loss="maybe",
        value=Json(schema="id bigintt"),
        spark_conn_id="nowhere",
    )
    assert set(found) >= {"topics", "group_id", "max_records", "data_loss", "spark_conn_id"}
    assert any(where.startswith("value") for where in found)


@pytest.mark.parametrize("options", [{"topics": None}, {"topics_pattern": "orders.*"}], ids=["neither", "both"])
def test_exactly_one_of_topics_and_pattern(files, options):
    assert "topics" in problems(files, **options)["topics"]


def test_an_unknown_topic_is_named(files):
    assert "no-such-topic" in problems(files, topics="no-such-topic")["topics"]


def test_a_pattern_that_matches_nothing_or_is_none(files):
    assert "no topic matches" in problems(files, topics=None, topics_pattern="no-such-.*")["topics_pattern"]
    assert "not a regular expression" in problems(files, topics=None, topics_pattern="(")["topics_pattern"]


def test_unknown_connections(files):
    found = problems(files, kafka_conn_id="no_kafka", spark_conn_id="no_spark")
    assert "no_kafka" in found["kafka_conn_id"]
    assert "no_spark" in found["spark_conn_id"]


def test_a_broker_that_is_not_there(files, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_DOWN", json.dumps({"conn_type": "kafka", "extra": {"bootstrap.servers": "127.0.0.1:1"}}))
    assert "down" in problems(files, kafka_conn_id="down")["kafka_conn_id"]


def test_no_java_is_one_clear_sentence(files, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert "Java" in problems(files)["spark_conn_id"]


def test_a_live_member_of_the_group_is_named(files):
    consumer = Consumer({**files.kafka.connection_extra(), "group.id": files.name, "client.id": "stray-console-consumer"})
    joined = threading.Event()
    consumer.subscribe([files.topic], on_assign=lambda *_: joined.set())
    try:
        while not joined.is_set():
            consumer.poll(0.1)
        assert "stray-console-consumer" in problems(files)["group_id"]
    finally:
        consumer.close()
    files.produce(10)
    files.run()
    assert files.check() == 10


def test_a_missing_table_and_a_schema_that_does_not_fit(table):
    assert "no_such_table" in str(problems(table, sink=PostgresSink(conn_id="warehouse", table="no_such_table")))
    found = problems(table, value=Json(schema="id string, customer string, amount decimal(12,2), other int"))
    assert "other" in str(found)
    assert "id" in str(found)


def test_a_wrong_password_of_the_sink_does_not_show_it(table, monkeypatch):
    server = table.postgres
    monkeypatch.setenv("AIRFLOW_CONN_WRONG", f"postgres://nobody:secret-word@{server.host}:{server.port}/{server.database}")
    found = str(problems(table, sink=PostgresSink(conn_id="wrong", table=table.place)))
    assert "wrong" in found
    assert "secret-word" not in found


def test_columns_that_are_there_already(files):
    found = problems(files, value=Json(schema=SCHEMA + ", offset bigint"), metadata_columns=["offset", "nonsense"])
    assert "metadata_columns" in found


def test_a_sink_that_deletes_needs_the_key(table):
    sink = PostgresSink(conn_id="warehouse", table=table.place, mode="upsert", key=["id"], delete_enabled=True)
    assert "key" in problems(table, sink=sink)


@pytest.mark.parametrize("wrong", [{"value": "json"}, {"key": 1}, {"sink": "table"}], ids=["value", "key", "sink"])
def test_something_that_is_no_format_or_sink(files, wrong):
    assert set(wrong) <= set(problems(files, **wrong))


def test_a_mapped_task_needs_a_pipeline_name_of_its_own(files):
    from tests.support.pipelines import make
    from tests.support.runs import context

    ctx = context("run1")
    ctx["ti"].map_index = 3
    with pytest.raises(ValidationError, match="mapped"):
        make(**{**files.arguments, "pipeline": None}).execute(ctx)


def test_formats_of_keys_are_checked_too(files):
    assert "key" in str(problems(files, key=String(encoding="no-such-encoding")))
