"""The embedded Airflow itself: the order of its start, the database of its metadata, DAG files that come later, and errors when
a process dies. These tests run last: they end the scheduler.
"""

from __future__ import annotations

import re
import signal

import psutil
import psycopg
import pytest

from airflow_kafka_spark.errors import ServerFailed
from airflow_kafka_spark.testing._processes import wait_until

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(900)]

LATER = """
from airflow.sdk import DAG, task

with DAG("later", schedule=None):

    @task
    def number():
        return 2

    number()
"""


@pytest.fixture(scope="module")
def airflow(site):
    """Airflow with a dag-processor, which the other tests do not need, a file that comes later, and one with an error."""
    airflow = site.airflow
    (airflow.dags_folder / "unreadable.py").write_text("import no_module_of_this_name\nfrom airflow.sdk import DAG\n")
    (airflow.dags_folder / "later.py").write_text(LATER)
    airflow._launch("dag-processor")
    return airflow


@pytest.mark.extended
def test_files_that_come_later_are_read_and_the_metadata_is_in_postgresql(airflow, postgres):
    started: list[str] = []

    def is_known() -> bool:
        try:
            started.append(airflow.trigger("later"))
        except ServerFailed:
            return False
        return True

    assert wait_until(is_known, 300, every=0.5), airflow.log("dag-processor").read_text()[-3000:]
    assert airflow.wait("later", started[0]) == "success"
    assert airflow.xcom("later", started[0], "number") == 2
    url = airflow.env["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"].replace("+psycopg", "")
    assert f":{postgres.port}/" in url
    with psycopg.connect(url) as connection:
        found = connection.execute("SELECT run_id, state FROM dag_run WHERE dag_id = 'later'").fetchall()
    assert found == [(started[0], "success")]


@pytest.mark.extended
def test_a_missing_dag_is_reported_with_the_files_that_cannot_be_imported(airflow):
    def refusal() -> str:
        with pytest.raises(ServerFailed) as caught:
            airflow.trigger("unreadable")
        return str(caught.value)

    # The dag-processor reports the file when it has parsed it.
    assert wait_until(lambda: "no_module_of_this_name" in refusal(), 120)
    assert "it has no DAG `unreadable`. These files cannot be imported:" in refusal()


@pytest.mark.extended
def test_the_api_server_answers_before_the_scheduler_starts(airflow):
    started = {name: psutil.Process(airflow.pid(name)).create_time() for name in ("api-server", "scheduler", "triggerer")}
    text = airflow.log("api-server").read_text()
    assert "startup complete" in text.lower() or "running on" in text.lower(), text[-2000:]
    assert started["api-server"] < min(started["scheduler"], started["triggerer"])
    assert not re.search("Connection refused", airflow.log("scheduler").read_text())


@pytest.mark.extended
def test_the_death_of_a_process_is_reported_with_its_name_and_the_end_of_its_log(airflow):
    airflow.check()
    psutil.Process(airflow.pid("scheduler")).send_signal(signal.SIGKILL)
    with pytest.raises(ServerFailed, match="its scheduler has ended by signal 9; its log .*scheduler.log ends with:\n"):
        airflow.wait("later", airflow.trigger("later"), 120)
    with pytest.raises(ServerFailed, match="its scheduler has ended by signal 9"):
        airflow.check()
