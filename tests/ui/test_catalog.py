"""The catalog of tasks, from DAGs as Airflow itself serializes them."""

from __future__ import annotations

import pytest
from airflow.sdk import DAG
from airflow.serialization.serialized_objects import DagSerialization

from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.operators import (
    KafkaToKafkaOperator,
    KafkaToSinkOperator,
    PipelineOffsetsOperator,
    SourceToKafkaOperator,
)
from airflow_kafka_spark.sinks import FilesSink, KafkaSink
from airflow_kafka_spark.sources import JdbcSource
from airflow_kafka_spark.ui.catalog import Catalog, LedgerName, _tasks_of

VALUE = Json(schema="id bigint")
LEDGER = LedgerName("kafka_default", "airflow-windows")


def tasks_of(dag):
    return {task.task_id: task for task in _tasks_of(dag.dag_id, DagSerialization.to_dict(dag))}


@pytest.fixture(scope="module")
def found():
    with DAG("d", schedule=None) as dag:
        common = {"value": VALUE, "sink": FilesSink(path="/tmp/x")}
        KafkaToSinkOperator(task_id="plain", topics=["a", "b"], group_id="g", max_records=7, **common)
        KafkaToSinkOperator(
            task_id="named",
            topics="a",
            group_id="g{{ ds }}",
            pipeline="my/own",
            kafka_conn_id="other",
            ending_offsets="{{ ts }}",
            **common,
        )
        KafkaToSinkOperator(task_id="templated", topics="{{ var.value.t }}", group_id="g", pipeline="p-{{ ds }}", **common)
        KafkaToSinkOperator.partial(task_id="mapped", group_id="g", **common).expand(topics=["a", "b"])
        bounds = {"starting_offsets": "earliest", "ending_offsets": {"z": {"0": 5}}}
        KafkaToKafkaOperator(task_id="copy", topics="a", group_id="g", sink=KafkaSink(topic="z"), kafka_conn_id="third", **bounds)
        SourceToKafkaOperator(
            task_id="source", source=JdbcSource(conn_id="pg", table="t", key="id"), sink=KafkaSink(topic="out", value=VALUE)
        )
        PipelineOffsetsOperator(task_id="offsets", action="show", pipeline="my/own")
    return tasks_of(dag)


def test_a_task_says_what_it_reads_and_writes(found):
    plain = found["plain"]
    assert (plain.pipeline, plain.topics, plain.group, plain.max_records) == ("d.plain", ("a", "b"), "g", 7)
    assert plain.ledger == LEDGER
    assert (plain.source, plain.sink) == ("kafka://kafka_default/a, kafka://kafka_default/b", "file:///tmp/x")
    assert found["copy"].sink == "kafka://third/z"


def test_the_connection_is_that_of_its_assets(found):
    assert found["named"].ledger.connection == "other"
    assert found["copy"].ledger.connection == "third"
    assert found["source"].ledger == LEDGER


def test_what_is_decided_when_it_runs_is_not_guessed(found):
    assert (found["named"].pipeline, found["named"].group) == ("my/own", None)
    assert (found["templated"].pipeline, found["templated"].topics) == (None, ())
    assert (found["mapped"].pipeline, found["mapped"].topics) == (None, ())


def test_where_a_window_begins_and_ends_is_known_unless_only_the_run_knows_it(found):
    plain, copy = found["plain"], found["copy"]
    assert (plain.starting_offsets, plain.ending_offsets, plain.unread) == (None, "latest", ())
    assert (copy.starting_offsets, copy.ending_offsets, copy.unread) == ("earliest", '{"z": {"0": 5}}', ())
    assert (found["named"].ending_offsets, found["named"].unread) == (None, ("ending_offsets",))


def test_tasks_that_move_nothing_are_not_in_it(found):
    assert set(found) == {"plain", "named", "templated", "mapped", "copy", "source"}
    catalog = Catalog(tuple(found.values()))
    assert [ledger.connection for ledger in catalog.ledgers] == ["kafka_default", "other", "third"]
    assert catalog.by_pipeline()[LEDGER, "d.plain"] == (found["plain"],)


def test_a_dag_that_is_not_understood_is_left_out():
    assert (
        _tasks_of("d", {"dag": {"tasks": [{"__type": "operator", "__var": {"_task_module": "airflow_kafka_spark.operators.x"}}]}})
        == ()
    )
    assert _tasks_of("d", {}) == ()


@pytest.mark.parametrize("text", ["", "/", "a/", "/b", "nothing"])
def test_what_names_no_ledger_is_refused(text):
    with pytest.raises(ValueError, match="names no ledger"):
        LedgerName.parse(text)
    assert LedgerName.parse(" a/b/c ") == LedgerName("a/b", "c")
