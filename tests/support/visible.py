"""An operator in a DAG that Airflow runs in a separate process, which writes down what others see of the operator.

``python -m tests.support.visible <options as JSON> <file for the result>``. In the first run, the task is killed at a named point
(in a forked process). The second run succeeds. The third run finds two more bad records.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from airflow_kafka_spark import faults
from tests.support import engine


def history(gate: Path) -> list[dict[str, Any]]:
    """Collect the values that are written to the task state store from now on, in order.

    :param gate: a file that is created when some splits of a window, and not all, are done.
    """
    from airflow import settings
    from sqlalchemy import event

    stored: list[dict[str, Any]] = []

    @event.listens_for(settings.engine, "before_cursor_execute")
    def seen(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if "task_state_store" not in statement or not statement.lstrip().upper().startswith(("INSERT", "UPDATE")):
            return
        values = parameters.values() if isinstance(parameters, dict) else parameters
        # An upsert has it twice.
        found = [json.loads(v) for v in dict.fromkeys(v for v in values if isinstance(v, str) and '"splits_done"' in v)]
        stored.extend(found)
        if any(0 < value["splits_done"] < value["splits"] for value in found):
            gate.touch()
        elif any(value["step"] == "close" for value in found):
            gate.unlink(missing_ok=True)

    return stored


def facts_of(dag_id: str, run_id: str) -> dict[str, Any]:
    """Return the rows of a run in Airflow's tables."""
    from airflow.models.asset import AssetEvent
    from airflow.models.taskinstance import TaskInstance
    from airflow.models.xcom import XComModel
    from airflow.utils.session import create_session
    from sqlalchemy import select, text

    with create_session() as session:
        xcoms = session.execute(
            select(XComModel.key, XComModel.value).where(XComModel.dag_id == dag_id, XComModel.run_id == run_id)
        ).all()
        states = session.scalars(select(TaskInstance.state).where(TaskInstance.dag_id == dag_id, TaskInstance.run_id == run_id))
        progress = session.execute(
            text(
                "SELECT s.value FROM task_state_store s JOIN dag_run r ON r.id = s.dag_run_id "
                "WHERE r.dag_id = :dag AND r.run_id = :run AND s.key = 'kafka_spark.progress'"
            ),
            {"dag": dag_id, "run": run_id},
        ).scalars()
        events = session.execute(
            select(AssetEvent.extra).where(AssetEvent.source_dag_id == dag_id, AssetEvent.source_run_id == run_id)
        ).scalars()
        links = {key.removeprefix("_link_"): value for key, value in xcoms if key.startswith("_link_")}
        return {
            "links": links,
            "states": [str(state) for state in states],
            "progress": [json.loads(value) if isinstance(value, str) else value for value in progress],
            "events": [dict(extra) for extra in events],
        }


def main(options: dict[str, Any], result: Path) -> None:
    from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db
    from airflow.models.dagbundle import DagBundleModel
    from airflow.models.dagrun import DagRun
    from airflow.sdk import DAG
    from airflow.utils.session import create_session
    from confluent_kafka import Producer
    from sqlalchemy import select

    from airflow_kafka_spark.jobs import watch
    from tests.support.gated import GatedJson
    from tests.support.pipelines import SCHEMA, make

    gate = Path(options["gate"])
    # The last splits wait until progress of the first ones was published. However fast they are, it is seen.
    value = GatedJson(SCHEMA, gate=str(gate), records=options["records"], free=options["free"])
    watch.POLL_SECONDS = 0.05
    engine.take()
    with DAG(options["dag_id"], schedule=None, start_date=datetime(2026, 1, 1, tzinfo=timezone.utc)) as dag:
        make(**options["arguments"], value=value)
    with create_session() as session:
        session.add(DagBundleModel(name="testing"))
    bag = DagBag(dag_folder=os.devnull, bundle_name="testing")
    bag.bag_dag(dag)
    sync_bag_to_db(bag, "testing", None)

    found: dict[str, Any] = {}
    stored = history(gate)
    pid = os.fork()
    if pid == 0:
        os.environ |= {faults.FAULT: options["fault"], faults.ONCE: str(result.with_suffix(".fired"))}
        dag.test(logical_date=datetime(2026, 1, 1, tzinfo=timezone.utc))
        os._exit(0)
    found["ended_with"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    gate.unlink()
    run = dag.test(logical_date=datetime(2026, 1, 2, tzinfo=timezone.utc))
    found |= {"state": str(run.state), "history": list(stored)}
    producer = Producer(options["broker"])
    for _ in range(2):
        producer.produce(options["arguments"]["topics"], b"{", partition=0)
    producer.flush(60)
    dag.test(logical_date=datetime(2026, 1, 3, tzinfo=timezone.utc))
    with create_session() as session:
        first, second, third = session.scalars(
            select(DagRun.run_id).where(DagRun.dag_id == dag.dag_id).order_by(DagRun.logical_date)
        )
    found |= {name: facts_of(dag.dag_id, each) for name, each in (("first", first), ("second", second), ("third", third))}
    result.write_text(json.dumps(found, default=str))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
