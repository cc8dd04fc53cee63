"""Sessions from connections: the settings that a connection gives, mostly without starting Spark."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from airflow_kafka_spark.errors import ConnectionInvalid, SparkUnavailable
from airflow_kafka_spark.hooks.spark.health import find_first_line, find_master_problem
from airflow_kafka_spark.hooks.spark.hook import _QUICK_START, SECRETS, EarlyStart, SparkHook, _redirect_errors_to_output


@pytest.mark.parametrize(
    "connection, master",
    [
        ({"host": "local[2]"}, "local[2]"),
        ({}, "local[*]"),
        ({"host": "spark://head", "port": 7077}, "spark://head:7077"),
        ({"host": "head", "port": 7077}, "spark://head:7077"),
        ({"host": "localhost", "port": 7078}, "spark://localhost:7078"),
        ({"host": "local-head"}, "spark://local-head:7077"),
        ({"host": "yarn"}, "yarn"),
        ({"host": "k8s://https://cluster", "port": 6443}, "k8s://https://cluster:6443"),
        ({"conn_type": "spark_connect", "host": "head"}, "sc://head:15002"),
        ({"conn_type": "spark_connect", "host": "sc://head", "port": 1234}, "sc://head:1234"),
    ],
)
def test_the_master_of_each_official_connection_type(connect, connection, master):
    hook = connect(**connection)
    assert hook.master == master
    assert hook.is_connect == master.startswith("sc://")
    assert hook.is_local == master.startswith("local")
    assert find_master_problem(master) == ""


def test_settings_are_ours_then_the_connections_then_the_operators(connect):
    hook = connect(host="local", extra={"spark.driver.memory": "3g", "spark.ui.enabled": True, "queue": "x"})
    hook.conf = {"spark.driver.memory": "4g"}
    settings = hook.make_settings()
    assert settings["spark.driver.memory"] == "4g"
    assert settings["spark.ui.enabled"] == "true"
    assert settings["spark.sql.session.timeZone"] == "UTC"
    assert "queue" not in settings


def test_java_options_of_the_connection_come_beside_ours(connect):
    options = connect(host="local", extra={"spark.driver.extraJavaOptions": "-Dx=y"}).make_settings()[
        "spark.driver.extraJavaOptions"
    ]
    assert "log4j2.properties" in options
    assert options.endswith("-Dx=y")


@pytest.mark.parametrize("given", ["", "-Xshare:auto -XX:Tier4InvocationThreshold=1"])
def test_a_local_jvm_starts_with_few_compilations_unless_that_is_switched_off(connect, given):
    hook = connect(host="local", extra={"spark.driver.extraJavaOptions": given})
    options = hook._make_quick_start_options(hook.make_settings()["spark.driver.extraJavaOptions"])
    assert set(_QUICK_START) <= set(options)
    assert any(option.startswith("-XX:SharedArchiveFile") for option in options) <= (given == "")
    assert connect(host="local", extra={"class_archive": False})._make_quick_start_options("") == ()
    assert connect(host="spark://head")._make_quick_start_options("") == ()


def test_a_token_is_in_no_address_that_is_shown(connect):
    # Tokens in base64 end with `=`, which pyspark takes for the end of a name.
    hook = connect(conn_type="spark_connect", host="head", login="me", password="geheim;==", extra={"use_ssl": True})
    assert "geheim" not in hook.master
    assert hook._remote == "sc://head:15002/;user_id=me;token=geheim%3B%3D%3D;use_ssl=true"
    assert hook._remove_secrets("refused: geheim;==, geheim%3B%3D%3D") == "refused: ***, ***"
    hook = connect(conn_type="spark_connect", host="sc://head:15002/;token=geheim;x-a=b", login="me")
    assert hook.master == "sc://head:15002"
    assert hook._remote == "sc://head:15002/;token=geheim;x-a=b;user_id=me"
    assert hook._remove_secrets("refused: geheim") == "refused: ***"


@pytest.mark.parametrize(
    "status, said",
    [
        ("UNAUTHENTICATED", "the server does not accept the token, the password of the connection (No entry)"),
        ("PERMISSION_DENIED", "No entry (PERMISSION_DENIED)"),
    ],
)
def test_the_answer_of_a_connect_server_that_refuses_a_client_is_named(status, said):
    def refuse(_request, call):
        call.abort(grpc.StatusCode[status], "No entry")

    refusing = grpc.method_handlers_generic_handler("spark", {"Config": grpc.unary_unary_rpc_method_handler(refuse)})
    server = grpc.server(ThreadPoolExecutor(1), handlers=[refusing])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/spark/Config")(b"", timeout=60)
    finally:
        server.stop(None)
    assert find_first_line(refused.value) == said


def test_a_spark_connect_server_has_a_host(connect):
    expected = "is no master of Spark; expected the host of a Spark Connect server"
    assert find_master_problem(connect(conn_type="spark_connect").master) == f"`sc://:15002` {expected}"


@pytest.mark.parametrize("key", ["kafka.sasl.jaas.config", "kafka.ssl.keystore.key", "my.secret", "kafka.ssl.key.password"])
def test_secrets_are_redacted_by_their_names(key):
    assert re.search(SECRETS, key)


def test_an_unknown_connection_or_one_of_another_type_is_named(connect):
    with pytest.raises(ConnectionInvalid, match="nowhere"):
        _ = SparkHook("nowhere").master
    with pytest.raises(ConnectionInvalid, match="type `http`"):
        _ = connect(conn_type="http", host="x").master


def test_what_a_jvm_writes_to_standard_error_is_no_error_of_the_task(capfd):
    before = set(threading.enumerate())
    wrote = "import sys; print('WARNING: Using incubator modules: x\\nout of memory', file=sys.stderr)"
    with _redirect_errors_to_output():
        subprocess.run([sys.executable, "-c", wrote], check=True)
    for copying in set(threading.enumerate()) - before:
        copying.join(30)
    print("of the task", file=sys.stderr)
    out, err = capfd.readouterr()
    # A Kafka client of an earlier test may write, too.
    lines = [line for line in out.splitlines() if not line.startswith("%")]
    assert (lines, err.strip()) == (["out of memory"], "of the task")


# --- a session that a thread starts beside the validation ---


@pytest.fixture
def started():
    return []


@pytest.fixture
def start(started):
    def make():
        started.append(threading.current_thread())
        return "session"

    return make


def test_a_session_that_is_needed_is_started_in_another_thread_and_waited_for(start, started):
    go, decided = threading.Event(), threading.Event()

    def slow():
        decided.set()
        assert go.wait(60)
        return start()

    early = EarlyStart(slow, lambda: True)
    assert decided.wait(60)
    go.set()
    assert early.wait_for_result() == "session"
    assert started != [threading.current_thread()]


@pytest.mark.parametrize("answer", [lambda: False, lambda: 1 / 0])
def test_nothing_is_started_for_a_window_without_records_or_one_that_cannot_be_foreseen(start, started, answer):
    early = EarlyStart(start, answer)
    early._thread.join(60)
    assert early.wait_for_result() is None
    assert started == []


@pytest.mark.parametrize("end", ["give_up", "wait_for_result"])
def test_a_start_that_has_not_begun_when_the_validation_fails_or_the_session_is_wanted_never_begins(start, started, end):
    go = threading.Event()
    early = EarlyStart(start, lambda: go.wait(60))
    getattr(early, end)()
    go.set()
    early._thread.join(60)
    assert early.wait_for_result() is None
    assert started == []


def test_the_error_of_the_start_is_raised_where_the_session_is_wanted():
    begun = threading.Event()

    def fails():
        begun.set()
        raise SparkUnavailable("spark_default", "local[2]", "no memory")

    early = EarlyStart(fails, lambda: True)
    assert begun.wait(60)
    with pytest.raises(SparkUnavailable, match="no memory"):
        early.wait_for_result()


def test_calls_of_java_recognise_numpys_values_without_pandas():
    """The import of pandas would take a third of the CPU time of a small window in a warm process."""
    code = """if True:
        import sys
        import airflow_kafka_spark.jobs.publish, airflow_kafka_spark.jobs.write
        from airflow_kafka_spark.hooks.spark import hook
        import numpy as np
        from py4j.protocol import INPUT_CONVERTER

        def found(value):
            names = [type(c).__name__ for c in INPUT_CONVERTER if c.can_convert(value)]
            return names[0] if names else None

        hook._avoid_pandas()
        values = ("text", np.int64(1), np.array([1]))
        ours = [found(value) for value in values]
        assert "pandas" not in sys.modules
        print(ours)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[None, 'ScalarConverter', 'ArrayConverter']"


def test_a_connect_client_logs_nothing_although_airflow_enables_all_loggers():
    code = """if True:
        import logging.config
        from airflow_kafka_spark.hooks.spark import hook
        from pyspark.sql.connect.logging import logger

        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
        print(logger.isEnabledFor(logging.WARNING))
        hook._silence_clients()
        print(logger.isEnabledFor(logging.WARNING))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["True", "False"]
