"""Task attempts in one warm Spark process (``keep_alive``), each in a separate process; attempts and the warm JVM die.

After each test: every record is in the sink exactly once, and no code of a dead attempt is running in the warm process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal

import pytest

from airflow_kafka_spark.testing import EmbeddedKafka, KafkaSecurity
from airflow_kafka_spark.testing._processes import wait_until
from tests.support import warm, workers
from tests.support.pipelines import QUICK_JVM, pipeline
from tests.support.relay import relay
from tests.support.shop import shop

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def started():
    """The JVMs that attempts have used; they are ended after the last test."""
    found: set[int] = set()
    yield found
    for jvm in found:
        warm.end(jvm)


@pytest.fixture
def keep_alive(monkeypatch):
    """Let attempts from here on use the warm process of this file; called when the pipelines exist."""

    def use(duration="120s", **settings):
        extra = {"spark.driver.memory": "512m", "spark.driver.extraJavaOptions": QUICK_JVM, **warm.extra(duration), **settings}
        connection = {"conn_type": "spark", "host": "local[2]", "extra": extra}
        monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(connection))

    return use


@pytest.fixture
def files(kafka, unique, tmp_path, request):
    with pipeline("files", kafka, lambda: request.getfixturevalue("postgres"), unique, tmp_path) as made:
        yield made


def ran(attempt, started):
    """Return the JVM of an attempt that has succeeded."""
    assert attempt.wait() == 0, attempt.tail()
    jvm = warm.jvm_of(attempt.log)
    assert jvm, attempt.tail()
    started.add(jvm)
    return jvm


def test_windows_of_every_kind_move_once_in_one_process_that_stays_between_their_tasks(
    files, kafka, postgres, unique, tmp_path, keep_alive, started
):
    with shop(kafka, postgres, unique, tmp_path / "shop") as orders, relay(kafka, unique, tmp_path / "relay") as records:
        (tmp_path / "shop").mkdir()
        (tmp_path / "relay").mkdir()
        files.produce(300)
        orders.sell(300)
        records.send(300)
        keep_alive()
        jvms = set()
        for made in (files, orders, records):
            attempt = made.victim("run1", fault=None)
            jvms.add(ran(attempt, started))
            if made is files:
                files.reports.append(attempt.result())
        assert "Reusing the warm Spark process" in attempt.log.read_text()
        assert len(jvms) == 1
        assert (files.check(), orders.check(), records.check()) == (300, 300, 300)


def test_two_tasks_run_in_one_process_at_the_same_time(files, kafka, unique, tmp_path, keep_alive, started):
    (tmp_path / "relay").mkdir()
    with relay(kafka, unique, tmp_path / "relay") as records:
        files.produce(300)
        records.send(300)
        keep_alive()
        slow = files.victim("run1", fault="split.mid:stop")
        slow.wait_stopped()
        quick = records.victim("run1", fault=None)
        assert ran(quick, started) == warm.jvm_of(slow.log)
        assert records.check() == 300
        workers.wake(workers.wait_stopped(slow.once, above=warm.jvm_of(slow.log)))
        ran(slow, started)
        files.reports.append(slow.result())
        assert files.check() == 300


def test_the_jobs_of_a_killed_task_are_cancelled_before_its_retry_begins(files, keep_alive, started):
    files.produce(300)
    keep_alive()
    victim = files.victim("run1", fault="split.mid:stop")
    victim.wait_stopped()
    jvm = warm.jvm_of(victim.log)
    worker = workers.wait_stopped(victim.once, above=jvm)
    victim.end()
    retry = files.victim("run1", fault=None)
    assert ran(retry, started) == jvm
    log = warm.server_log(retry.log)
    assert 0 < log.index("TaskKilled") < log.index("1 of its jobs were cancelled") < log.rindex(" begins, after")
    files.reports.append(retry.result())
    assert files.check() == 300
    # A worker that was stopped in the middle of a split ends instead of continuing with it.
    workers.wake(worker)
    assert wait_until(lambda: not warm.is_running(worker), 180)
    assert files.check() == 300


def test_a_task_whose_warm_process_dies_fails_and_its_retry_starts_another_one(files, keep_alive, started):
    files.produce(300)
    keep_alive()
    victim = files.victim("run1", fault="split.mid:stop")
    victim.wait_stopped()
    jvm = warm.jvm_of(victim.log)
    os.kill(jvm, signal.SIGKILL)
    assert victim.wait() == 1, victim.tail()
    retry = files.victim("run1", fault=None)
    assert ran(retry, started) != jvm
    files.reports.append(retry.result())
    assert files.check() == 300


def test_a_warm_process_whose_jvm_or_server_is_stopped_is_replaced_within_seconds(files, keep_alive, started):
    files.produce(100)
    keep_alive()
    before = files.victim("run1", fault=None)
    jvm = ran(before, started)
    files.reports.append(before.result())
    logged = ("ended before it accepted this task: the JVM has not answered for 15 s", "Killing the warm Spark process")
    for number, said in enumerate(logged, 2):
        files.produce(100)
        stopped = warm.server_of(jvm) if number == 3 else jvm
        os.kill(stopped, signal.SIGSTOP)
        attempt = files.victim(f"run{number}", fault=None)
        used = ran(attempt, started)
        assert used != jvm
        assert said in attempt.log.read_text()
        assert wait_until(lambda: not any(map(warm.is_running, (jvm, stopped))), 60)  # noqa: B023 - called within the loop
        files.reports.append(attempt.result())
        jvm = used
    assert files.check() == 300


def test_a_warm_process_without_tasks_ends_by_itself(files, keep_alive, started):
    files.produce(100)
    # The last task says how long. Its process had other tasks before, or is a new one.
    keep_alive("1s")
    attempt = files.victim("run1", fault=None)
    jvm = ran(attempt, started)
    assert wait_until(lambda: not warm.is_running(jvm), 180)
    assert "no task came for 1 s" in warm.server_log(attempt.log)


@pytest.mark.extended
@pytest.mark.parametrize("read_with", ["task", "spark"])
def test_a_certificate_that_is_replaced_on_disk_is_read_by_the_next_task_of_a_warm_process(
    unique, tmp_path, monkeypatch, keep_alive, started, read_with
):
    """The brokers do not trust the certificate that takes the place of the first one while a window is moved."""
    names = {"ssl.certificate.location": "client.crt", "ssl.key.location": "client.key"}
    security, other, used = KafkaSecurity("SSL", client_certificates=True), tmp_path / "other", tmp_path / "used"
    security.make_certificates(other)
    used.mkdir()
    with EmbeddedKafka(security=security) as kafka:
        trusted = kafka.connection_extra()
        with pipeline("files", kafka, no_postgres, unique, tmp_path, read_with=read_with) as made:
            extra = {**trusted, **{setting: str(used / name) for setting, name in names.items()}}
            monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", json.dumps({"conn_type": "kafka", "extra": extra}))
            keep_alive()
            for setting, name in names.items():
                shutil.copy(trusted[setting], used / name)
            made.produce(300)
            jvm = ran(made.victim("run0", fault=None), started)
            made.produce(300)
            attempt = made.victim("run1", fault="planned:stop")
            attempt.wait_stopped()
            for name in names.values():
                shutil.copy(other / name, used / name)
            attempt.wake()
            assert attempt.wait() == 1
            assert re.search("bad.certificate", attempt.log.read_text())
            for setting, name in names.items():
                shutil.copy(trusted[setting], used / name)
            assert ran(made.victim("run1", fault=None), started) == jvm
            assert sorted(row[0] for row in made.rows()) == list(range(600))


def no_postgres():
    raise AssertionError("files need no server")
