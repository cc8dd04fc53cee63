"""The tasks that share a warm Spark process, and the refused ones. No JVM is started for them."""

from __future__ import annotations

import gc
import os
import socket
import tempfile

import pytest

from airflow_kafka_spark.errors import ConnectionInvalid
from airflow_kafka_spark.hooks.spark.warm import client
from airflow_kafka_spark.hooks.spark.warm.process import (
    ProcessFiles,
    WarmSettings,
    WarmUnavailable,
    connect,
    count_open_sockets,
    list_process_environment,
    make_private_directory,
    parse_duration,
    remove_old_logs,
)
from airflow_kafka_spark.testing._processes import wait_until
from tests.sources.contract import spark_session


@pytest.fixture
def private(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return make_private_directory()


def settings(**given):
    return WarmSettings(**{"master": "local[2]", "spark": {"spark.driver.memory": "1g"}, "keep_alive": 60.0, **given})


@pytest.mark.parametrize("value, seconds", [("90s", 90), ("10m", 600), ("2h", 7200), ("24h", 86_400), (" 1s ", 1)])
def test_a_duration_is_a_number_with_a_unit(value, seconds):
    assert parse_duration(value) == seconds


@pytest.mark.parametrize("value", ["10", "10 m", "-1m", "0s", "25h", "1d", "1.5h", "ten", 600, True])
def test_a_duration_that_is_none_is_refused_with_an_example(connect, value):
    with pytest.raises(ConnectionInvalid, match=r"keep_alive.*no such duration.*10m"):
        _ = connect(host="local", extra={"keep_alive": value}).keep_alive


@pytest.mark.parametrize("connection", [{"host": "spark://head"}, {"conn_type": "spark_connect", "host": "head"}])
def test_a_master_that_is_not_local_is_refused(connect, connection):
    with pytest.raises(ConnectionInvalid, match="or use a local master"):
        _ = connect(**connection, extra={"keep_alive": "10m"}).keep_alive


@pytest.mark.parametrize("extra", [{}, {"keep_alive": None}, {"keep_alive": False}, {"keep_alive": ""}])
def test_without_keep_alive_each_task_has_a_spark_of_its_own(connect, extra):
    assert connect(host="local", extra=extra).keep_alive is None


def test_tasks_share_a_process_only_if_all_that_matters_is_the_same(monkeypatch, tmp_path):
    key = settings().key
    assert settings().key == key
    assert settings(keep_alive=5.0).key == key
    monkeypatch.setenv("AIRFLOW_CTX_DAG_ID", "another")
    monkeypatch.setenv("AIRFLOW_CONN_OTHER", "postgres://u:p@h/d")
    assert settings().key == key
    others = [settings(master="local[3]"), settings(spark={"spark.driver.memory": "2g"}), settings(spark={"spark.jars": "x.jar"})]
    keys = {key, *(other.key for other in others)}
    monkeypatch.setenv("AWS_PROFILE", "another")
    keys.add(settings().key)
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.syspath_prepend(str(tmp_path))
    keys.add(settings().key)
    monkeypatch.chdir(tmp_path)
    keys.add(settings().key)
    jar = tmp_path / "own.jar"
    for content in (b"1", b"12"):
        jar.write_bytes(content)
        keys.add(settings(spark={"spark.jars": f"hdfs://host/x.jar,file://{jar}"}).key)
    monkeypatch.setattr("airflow_kafka_spark.hooks.spark.warm.process.__version__", "another")
    keys.add(settings().key)
    assert len(keys) == 10


def test_connections_and_the_context_of_a_task_do_not_reach_the_process(monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_OTHER", "postgres://u:secret@h/d")
    monkeypatch.setenv("AIRFLOW_CTX_DAG_ID", "d")
    monkeypatch.setenv("KEPT", "1")
    found = list_process_environment()
    assert found["KEPT"] == "1"
    assert not [name for name in found if name.startswith(("AIRFLOW_CONN_", "AIRFLOW_CTX_"))]


def test_secrets_of_the_settings_are_in_no_repr():
    assert "geheim" not in repr(settings(spark={"spark.my.secret": "geheim"}))


def test_the_directory_is_the_users_alone(private):
    assert private.stat().st_mode & 0o777 == 0o700
    private.chmod(0o755)
    with pytest.raises(WarmUnavailable, match="only this user"):
        make_private_directory()


def test_what_a_process_that_died_has_left_is_removed_and_does_not_count(private):
    gone, there = ProcessFiles(private, "gone"), ProcessFiles(private, "there")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(gone.socket))
    gone.log.touch()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(there.socket))
        listening.listen(1)
        assert connect(gone.socket) is None
        assert count_open_sockets(private, private / "own.socket") == 1
    assert not gone.socket.exists()
    assert not gone.log.exists()


def test_logs_of_processes_that_ended_a_week_ago_are_removed(private):
    old, recent, running = (ProcessFiles(private, name) for name in ("old", "recent", "running"))
    for files in (old, recent, running):
        files.log.touch()
    running.socket.touch()
    for files in (old, running):
        os.utime(files.log, (1, 1))
    with old.hold_lock():
        remove_old_logs(private)
        assert old.log.exists()
    remove_old_logs(private)
    assert {path.name for path in private.iterdir()} == {"recent.log", "running.log", "running.socket"}


def test_the_number_of_processes_is_limited(private, monkeypatch):
    monkeypatch.setattr(client, "MAX_PROCESSES", 0)
    with pytest.raises(WarmUnavailable, match="0 warm processes with other settings"):
        client.open_warm_session(settings(), "task")


def test_a_task_that_cannot_use_the_process_starts_its_own_and_logs_why(connect, private, monkeypatch, caplog):
    monkeypatch.setattr(client, "MAX_PROCESSES", 0)
    made = connect(host="local", extra={"keep_alive": "10m"})
    with monkeypatch.context() as alone:
        # Another test may have started a Spark in this process.
        alone.setattr("pyspark.SparkContext._active_spark_context", None)
        assert made._open_warm(made.make_settings()) is None
        assert "so that this task starts its own: 0 warm processes" in caplog.text
        # The lock cannot be written, as on a file system that is full or read-only.
        key = WarmSettings("local", {"spark.python.task.killTimeout": "100ms", **made.make_settings()}, 600.0).key
        (private / f"{key}.lock").unlink()
        (private / f"{key}.lock").mkdir()
        assert made._open_warm(made.make_settings()) is None
    assert "so that this task starts its own: its files cannot be used" in caplog.text


@pytest.mark.servers
def test_the_session_of_a_task_does_not_stay_in_the_jvm():
    """Spark 4 would keep it as long as the JVM lives."""
    spark = spark_session()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        session = client.WarmConnection("k", ours, spark.newSession()).sql_session
        assert session.sql("SELECT 1").collect() == [(1,)]
        jvm = spark._jvm
        kept = getattr(jvm, "java.lang.ref.WeakReference")(session._jsparkSession)
        del session
        spark.newSession()  # pyspark itself refers to the newest session

        def is_gone():
            gc.collect()
            getattr(jvm, "java.lang.System").gc()
            return kept.refersTo(None)

        assert wait_until(is_gone, 60)


def test_a_process_that_was_forked_does_not_keep_the_connection_open(monkeypatch):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monkeypatch.setattr(client, "_attached", client.WarmConnection("k", ours, None))
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        ours.close()
        theirs.settimeout(10)
        assert theirs.recv(1) == b""
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)
        monkeypatch.setattr(client, "_attached", None)
