"""The embedded Airflow itself: the order of its start, the database of its metadata, DAG files that come later, and errors when
a process dies; and a window whose triggerer or scheduler dies. These tests run last: they end both.
"""

from __future__ import annotations

import re
import signal
from contextlib import suppress

import psutil
import psycopg
import pytest

from airflow_kafka_spark.errors import ServerFailed
from airflow_kafka_spark.testing._processes import wait_until
from tests.support.lag import commit, end_of, produce
from tests.support.pipelines import Pipeline
from tests.support.waiting import eventually
from tests.with_airflow.site import find_tasks

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(900)]

LATER = """
from airflow.sdk import DAG, task

with DAG("later", schedule=None):

    @task
    def number():
        return 2

    number()
"""


def has_ended(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


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
def test_sensors_of_a_dead_triggerer_go_on_in_the_next_one_and_nothing_is_started_twice(site, airflow, kafka):
    """The records for which the sensors wait are produced while no triggerer runs."""
    kafka.create_topic("awaited", 3)
    place = str(site.files / "awaited")
    flow = Pipeline(kafka=kafka, postgres=None, kind="files", name="awaited", topic="awaited", place=place, directory=site.files)

    def count_loads() -> int:
        return airflow.api("GET", "/dags/loads/dagRuns")["total_entries"]

    def is_deferred() -> bool:
        return airflow.task("waits_and_loads", run_id, "enough")["state"] == "deferred"

    # The backlog has started its DAG before the triggerer dies.
    before = count_loads()
    commit(kafka, "loader", "watched-orders", end_of(kafka, "watched-orders"))
    produce(kafka, "watched-orders", 6)
    eventually(lambda: count_loads() > before)
    started = count_loads()
    run_id = airflow.trigger("waits_and_loads")
    assert wait_until(is_deferred, 300), airflow.account("waits_and_loads", run_id)
    triggerer = psutil.Process(airflow.pid("triggerer"))
    processes = [triggerer, *triggerer.children(recursive=True)]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert wait_until(lambda: all(map(has_ended, processes)), 60)
    flow.produce(700)
    airflow.env["AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD"] = "10"
    airflow._launch("triggerer")
    assert is_deferred()
    assert airflow.wait("waits_and_loads", run_id, 300) == "success", airflow.account("waits_and_loads", run_id)
    assert site.value("waits_and_loads", run_id, "enough")["records"] == 700
    report = site.value("waits_and_loads", run_id, "task")
    assert (report["attempts"], report["records_written"]) == (1, 700)
    flow.reports.append(report)
    assert flow.check() == 700
    assert count_loads() == started


@pytest.mark.extended
def test_a_task_that_its_dead_scheduler_has_left_behind_and_the_attempt_of_the_next_scheduler_move_the_window_once(
    site, airflow, kafka
):
    kafka.create_topic("orphaned", 3)
    place = str(site.files / "orphaned")
    flow = Pipeline(
        kafka=kafka, postgres=None, kind="files", name="orphaned", topic="orphaned", place=place, directory=site.files
    )
    flow.produce(700)
    run_id = airflow.trigger("orphaned")
    scheduler = psutil.Process(airflow.pid("scheduler"))
    stopped = list[psutil.Process]()

    def has_stopped() -> bool:
        stopped[:] = [task for task in find_tasks(scheduler).values() if task.status() == psutil.STATUS_STOPPED]
        return bool(stopped)

    assert wait_until(has_stopped, 300), airflow.account("orphaned", run_id)
    [task] = stopped
    supervisor = task.parent()
    # The supervisor would kill the task when it hears from the API server that another attempt has begun.
    supervisor.suspend()
    scheduler.kill()
    assert wait_until(lambda: has_ended(scheduler), 60)
    airflow.env["AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL"] = "5"
    airflow._launch("scheduler")
    try:
        assert airflow.wait("orphaned", run_id, 600) == "success", airflow.account("orphaned", run_id)
        report = site.value("orphaned", run_id, "task")
        assert report["attempts"] == 2
        flow.reports.append(report)
        assert flow.check() == 700
        # The task goes on until it waits for its supervisor, which then ends it.
        task.resume()
        seen = [-1.0]

        def waits() -> bool:
            seen.append(sum(task.cpu_times()[:2]))
            return seen[-1] == seen[-2] and task.status() == psutil.STATUS_SLEEPING

        assert wait_until(waits, 120, every=1.0)
        assert flow.check() == 700
        supervisor.resume()
        assert wait_until(lambda: has_ended(task), 120)
    finally:
        for process in (task, supervisor):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    assert flow.check() == 700
    run_id, state = airflow.run("orphaned", 300)
    assert state == "success", airflow.account("orphaned", run_id)


@pytest.mark.extended
def test_the_death_of_a_process_is_reported_with_its_name_and_the_end_of_its_log(airflow):
    airflow.check()
    psutil.Process(airflow.pid("scheduler")).send_signal(signal.SIGKILL)
    with pytest.raises(ServerFailed, match="its scheduler has ended by signal 9; its log .*scheduler.log ends with:\n"):
        airflow.wait("later", airflow.trigger("later"), 120)
    with pytest.raises(ServerFailed, match="its scheduler has ended by signal 9"):
        airflow.check()
