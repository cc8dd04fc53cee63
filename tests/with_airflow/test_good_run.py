"""The whole log of a good run, as a user sees it in a terminal: ``airflow dags test`` for each operator, and the command line.

Only what a user has set is set here: Airflow's home, the DAG folder and the connections. In particular there is no
``PYSPARK_PYTHON``, and each task starts Spark as it does for users.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from airflow_kafka_spark.testing.airflow import SqliteDatabase
from tests.support.alarms import alarms
from tests.support.pipelines import COLUMNS, SCHEMA, order

pytestmark = [pytest.mark.airflow, pytest.mark.extended, pytest.mark.timeout(900)]

DAG = """
from airflow.sdk import DAG

from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.operators import KafkaToKafkaOperator, KafkaToSinkOperator, SourceToKafkaOperator
from airflow_kafka_spark.sinks import FilesSink, KafkaSink, PostgresSink
from airflow_kafka_spark.sources import JdbcSource

VALUE = Json(schema={schema!r})

with DAG({name!r}, schedule=None):
    publish = SourceToKafkaOperator(
        task_id="publish",
        source=JdbcSource(conn_id="warehouse", table={shop!r}, cursor="id"),
        sink=KafkaSink(topic="{name}-orders", auto_create=True, partitions=2, key="id", value=Json()),
    )
    copy = KafkaToKafkaOperator(
        task_id="copy",
        topics="{name}-orders",
        group_id="{name}-copy",
        value=VALUE,
        filter="id < 300",
        sink=KafkaSink(topic="{name}-copy", key="customer", auto_create=True, partitions=2),
        errors_tolerance="all",
        errors_deadletterqueue_topic_name="{name}-dead",
    )
    load = KafkaToSinkOperator(
        task_id="load",
        topics="{name}-copy",
        group_id="{name}-load",
        value=VALUE,
        sink=PostgresSink(conn_id="warehouse", table={target!r}, mode="upsert", key=["id"], auto_create=True),
    )
    archive = KafkaToSinkOperator(
        task_id="archive", topics="{name}-copy", group_id="{name}-archive", value=VALUE, sink=FilesSink(path={files!r})
    )
    publish >> copy >> load >> archive
"""


def test_the_log_of_a_good_run_of_each_operator_has_nothing_alarming(kafka, postgres, unique, tmp_path):
    name = unique("good")
    target, shop = f"{name}_target".replace("-", "_"), f"{name}_shop".replace("-", "_")
    with postgres.connect(autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {shop} ({COLUMNS}, PRIMARY KEY (id))".encode())
        rows = [json.loads(order(number)) for number in range(500)]
        connection.cursor().executemany(
            f"INSERT INTO {shop} VALUES (%(id)s, %(customer)s, %(amount)s, %(placed_at)s)".encode(), rows
        )
    (tmp_path / "dags").mkdir()
    dag = DAG.format(schema=SCHEMA, name=name, shop=shop, target=target, files=str(tmp_path / "files"))
    (tmp_path / "dags" / "good.py").write_text(dag)
    env = environment(tmp_path, kafka, postgres)
    done = command(env, "airflow", "dags", "test", name)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-6000:]
    assert alarms(log) == []
    assert log.count("Starting Spark on") == 1, "no line twice"
    with postgres.connect(autocommit=True) as connection:
        assert connection.execute(f"SELECT count(*), count(DISTINCT id) FROM {target}".encode()).fetchone() == (300, 300)

    shown = command(env, "airflow", "kafka-spark", "show", f"{name}.load")
    text = shown.stdout + shown.stderr
    assert shown.returncode == 0 and f"{name}.load" in text, text
    assert alarms(text) == []


def environment(home: Path, kafka, postgres) -> dict[str, str]:
    """Return the environment of a user with an Airflow of their own, whose database is migrated."""
    left_out = ("AIRFLOW", "PYSPARK", "SPARK", "PYTHON")
    env = {k: v for k, v in os.environ.items() if not k.startswith(left_out) or k == "PYTHONPYCACHEPREFIX"}
    database = SqliteDatabase(home)
    database.start()
    env |= {
        **database.settings,
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "True",  # the default, with which Airflow imports a module of each provider
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")]),
    }
    database.migrate(env, lambda: command(env, "airflow", "db", "migrate"))
    # In the metadata database, where users have them: the command line has to find them there.
    connections = {
        "kafka_default": json.loads(kafka.connection_json()),
        "spark_default": {"conn_type": "spark", "host": "local[2]"},
        "warehouse": {"uri": postgres.connection_uri()},
    }
    (home / "connections.json").write_text(json.dumps(connections))
    added = command(env, "airflow", "connections", "import", "connections.json")
    assert added.returncode == 0, added.stdout + added.stderr
    return env


def command(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words], env=env, cwd=env["AIRFLOW_HOME"], capture_output=True, text=True, timeout=600, check=False
    )
