"""The catalog of tasks, from DAGs as Airflow itself serializes them."""

from __future__ import annotations

import json
import sys
from datetime import datetime, timezone
from uuid import uuid4

import pytest
from airflow.models import import_all_models
from airflow.models.base import Base
from airflow.models.dagrun import DagRun
from airflow.models.task_state_store import TaskStateStoreModel
from airflow.models.taskinstance import TaskInstance
from airflow.sdk import DAG
from airflow.serialization.serialized_objects import DagSerialization
from sqlalchemy import create_engine, insert
from sqlalchemy.orm import Session, configure_mappers

from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.operators import (
    KafkaToKafkaOperator,
    KafkaToSinkOperator,
    PipelineOffsetsOperator,
    SourceToKafkaOperator,
)
from airflow_kafka_spark.sinks import FilesSink, KafkaSink
from airflow_kafka_spark.sources import JdbcSource
from airflow_kafka_spark.ui.airflow_metadata import (
    Catalog,
    LedgerName,
    PipelineTask,
    TaskError,
    _list_tasks,
    read_configuration,
    read_failed_tasks,
    read_task_states,
)
from airflow_kafka_spark.windows.model import TaskInstanceKey

VALUE = Json(schema="id bigint")
LEDGER = LedgerName("kafka_default", "airflow-windows")


def tasks_of(dag):
    return {task.task_id: task for task in _list_tasks(dag.dag_id, DagSerialization.to_dict(dag))}


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
        range_ = {"starting_offsets": "earliest", "ending_offsets": {"z": {"0": 5}}}
        KafkaToKafkaOperator(task_id="copy", topics="a", group_id="g", sink=KafkaSink(topic="z"), kafka_conn_id="third", **range_)
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
    assert catalog.group_by_pipeline()[LEDGER, "d.plain"] == (found["plain"],)


def test_a_dag_that_is_not_understood_is_left_out():
    task = {"_task_module": "airflow_kafka_spark.operators.kafka_to_sink"}
    assert _list_tasks("d", {"dag": {"tasks": [{"__type": "operator", "__var": task}]}}) == ()
    assert _list_tasks("d", {}) == ()


@pytest.mark.parametrize("is_old", [False, True], ids=["with the store", "before Airflow 3.3"])
def test_task_instances_are_read_with_what_they_have_stored_and_from_an_airflow_without_a_store(is_old, monkeypatch):
    task, now = TaskInstanceKey("d", "run1", "t", 2), datetime.now(timezone.utc)
    engine = create_engine("sqlite://")
    import_all_models()
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        store = TaskStateStoreModel.__table__
        run = {"id": 1, "dag_id": "d", "run_id": "run1", "run_type": "manual", "run_after": now, "state": "running"}
        session.execute(filled(DagRun.__table__, run))
        of_task = {"dag_id": "d", "run_id": "run1", "task_id": "t", "map_index": 2}
        ended = {"state": "failed", "start_date": now, "end_date": now, "try_number": 3}
        session.execute(filled(TaskInstance.__table__, {"id": uuid4(), **of_task, **ended}))
        stored = {
            "kafka_spark.progress": {"window": 1}, "kafka_spark.configuration": {"operator": "X"},
            "kafka_spark.error": {"class": "E", "message": "why", "at": now.timestamp()},
        }  # fmt: skip
        for number, (key, value) in enumerate(stored.items()):
            row = {"id": number, **of_task, "dag_run_id": 1, "key": key, "value": json.dumps(value), "updated_at": now}
            session.execute(filled(store, row))
        if is_old:
            configure_mappers()  # which imports all models when it is done first
            monkeypatch.setitem(sys.modules, "airflow.models.task_state_store", None)
        state = read_task_states(session, [task])[task]
        assert (state.state, state.try_number) == ("failed", 3)
        failed = read_failed_tasks(session, [PipelineTask("d", "t", LEDGER, "p")])["d", "t"]
        configuration = read_configuration(session, task)
        assert read_configuration(session, task._replace(map_index=0)) == ""
    assert failed.key == task
    if is_old:
        assert (state.progress, state.error, failed.error, configuration) == (None, None, None, "")
    else:
        assert state.progress == {"window": 1} and json.loads(configuration) == {"operator": "X"}
        assert state.error == failed.error == TaskError("E", "why", now.timestamp())


def filled(table, given):
    """Return an insert with a value in each column that has to have one."""
    of_type = {str: "x", int: 0, bool: False}

    def value(column):
        try:
            return of_type.get(column.type.python_type, given.get("run_after"))
        except NotImplementedError:
            return None

    needed = {c.name: value(c) for c in table.columns if not c.nullable and c.default is None and c.name not in given}
    known = {name: each for name, each in given.items() if name in table.columns}
    return insert(table).values({**needed, **known})


@pytest.mark.parametrize("text", ["", "/", "a/", "/b", "nothing"])
def test_what_names_no_ledger_is_refused(text):
    with pytest.raises(ValueError, match="names no ledger"):
        LedgerName.parse(text)
    assert LedgerName.parse(" a/b/c ") == LedgerName("a/b", "c")
