"""The embedded Airflow alone: the order of its start, the database of its metadata, and the errors when a process dies."""

from __future__ import annotations

import re
import signal
import time

import psutil
import psycopg
import pytest

from airflow_kafka_spark.errors import ServerFailed
from airflow_kafka_spark.testing import EmbeddedAirflow, EmbeddedPostgres
from airflow_kafka_spark.testing._processes import wait_until
from airflow_kafka_spark.testing.airflow import SqliteDatabase

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(900)]

DAG = """
from airflow.sdk import DAG, task

with DAG("{name}", schedule=None):

    @task
    def number():
        return {number}

    number()
"""


@pytest.fixture(scope="module")
def airflow(postgres: EmbeddedPostgres, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dags")
    (folder / "first.py").write_text(DAG.format(name="first", number=1))
    (folder / "broken.py").write_text("import no_module_of_this_name\nfrom airflow.sdk import DAG\n")
    settings = {"AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "1"}
    with EmbeddedAirflow(folder, metadata=postgres, env=settings, home=tmp_path_factory.mktemp("home")) as made:
        yield made


def test_dags_are_there_at_once_files_that_come_later_are_read_and_the_metadata_is_in_postgresql(airflow, postgres):
    run_id, state = airflow.run("first")
    assert (state, airflow.xcom("first", run_id, "number")) == ("success", 1)
    (airflow.dags_folder / "later.py").write_text(DAG.format(name="later", number=2))
    deadline = time.monotonic() + 300
    while True:
        try:
            run_id = airflow.trigger("later")
            break
        except ServerFailed:
            assert time.monotonic() < deadline, airflow.log("dag-processor").read_text()[-3000:]
            time.sleep(0.5)
    assert airflow.wait("later", run_id) == "success"
    url = airflow.env["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"].replace("+psycopg", "")
    assert f":{postgres.port}/" in url
    with psycopg.connect(url) as connection:
        found = connection.execute("SELECT dag_id, state FROM dag_run ORDER BY dag_id").fetchall()
    assert found == [("first", "success"), ("later", "success")]


def test_a_missing_dag_is_reported_with_the_files_that_cannot_be_imported(airflow):
    def refusal() -> str:
        with pytest.raises(ServerFailed) as caught:
            airflow.trigger("broken")
        return str(caught.value)

    # The dag-processor reports the file when it has parsed it.
    assert wait_until(lambda: "no_module_of_this_name" in refusal(), 120)
    assert "it has no DAG `broken`. These files cannot be imported:" in refusal()


def test_the_api_server_answers_before_the_scheduler_starts(airflow):
    started = {name: psutil.Process(airflow.pid(name)).create_time() for name in ("api-server", "scheduler", "dag-processor")}
    text = airflow.log("api-server").read_text()
    assert "startup complete" in text.lower() or "running on" in text.lower(), text[-2000:]
    assert started["api-server"] < min(started["scheduler"], started["dag-processor"])
    assert not re.search("Connection refused", airflow.log("scheduler").read_text())


def test_the_death_of_a_process_is_reported_with_its_name_and_the_end_of_its_log(airflow):
    airflow.check()
    run_id = airflow.trigger("first")
    airflow.wait("first", run_id)
    psutil.Process(airflow.pid("scheduler")).send_signal(signal.SIGKILL)
    with pytest.raises(ServerFailed, match="its scheduler has ended by signal 9; its log .*scheduler.log ends with:\n"):
        airflow.wait("first", airflow.trigger("first"), 120)
    with pytest.raises(ServerFailed, match="its scheduler has ended by signal 9"):
        airflow.check()


def test_sqlite_begins_as_a_copy_of_one_that_was_migrated_before(tmp_path, monkeypatch):
    monkeypatch.setenv("AIRFLOW_KAFKA_SPARK_CACHE", str(tmp_path / "cache"))
    migrated = []
    for home in (tmp_path / "one", tmp_path / "two"):
        home.mkdir()
        database = SqliteDatabase(home)
        database.start()
        database.migrate({}, lambda home=home: migrated.append(home) or (home / "airflow.db").touch())
        assert (home / "airflow.db").exists()
    assert migrated == [tmp_path / "one"]
    again = SqliteDatabase(tmp_path / "two")
    again.start()
    again.migrate({}, lambda: migrated.append("again"))
    assert migrated[1:] == ["again"], "a database that is kept is brought up to date by Airflow"
