"""A JVM with Spark in it that outlives the task attempts of a test: starting one takes longer than all else that an attempt does.

An attempt that dies leaves it behind. What would have ended with a JVM of its own, the Python workers and in them every task, is
ended as soon as the attempt is gone (:meth:`Engine.give_back`). An attempt that is frozen, a machine that hangs, freezes it too.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from airflow_kafka_spark import faults
from tests.support import spark_daemon
from tests.support.workers import daemons, session

FOUND_BY = "TEST_ENGINE"
"""The environment variable that tells an attempt where to ask for its engine."""

_engines: list[Engine] = []


class Engine:
    """A JVM that runs the Spark of one attempt at a time; it ends with this process.

    :param settings: the options of ``spark-submit``.
    """

    def __init__(self, settings: list[str]) -> None:
        import pyspark

        self.settings = settings
        self.lent = False
        directory = Path(tempfile.mkdtemp(prefix="engine-", dir=os.environ["AIRFLOW_HOME"]))
        self.address = directory / "address"
        submit = shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell"))
        with open(directory / "log", "w") as log:
            # It ends when its standard input does.
            self._process = subprocess.Popen(
                [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), *settings, *submit],
                env={
                    **os.environ,
                    "_PYSPARK_DRIVER_CONN_INFO_PATH": str(self.address),
                    spark_daemon.FILE: str(_variables(self.address)),
                },
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """Its process, and the session of its workers."""
        return self._process.pid

    @property
    def usable(self) -> bool:
        return not self.lent and self._process.poll() is None

    @property
    def kept(self) -> set[int]:
        """Its processes that outlive an attempt: the JVM, and the daemon that forks Python workers."""
        return {self.pid} | daemons(self.pid)

    def give_back(self) -> None:
        """End what its attempt has left in it: every Python worker, and in them every task."""
        kept = self.kept
        for pid in session(self.pid) - kept:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in kept:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.lent = False


def _variables(address: Path) -> Path:
    """The file from which the engine's Python workers get their variables."""
    return address.with_name("variables")


def lend() -> Engine | None:
    """An engine for one attempt over the default connection, a new one where all are lent; None for one over Spark Connect,
    or in a warm process."""
    from airflow_kafka_spark.hooks.spark import SparkHook

    hook = SparkHook()
    if hook.is_connect or hook.keep_alive is not None:
        return None
    settings = ["--master", hook.master]
    settings += [part for name, value in hook.settings().items() for part in ("--conf", f"{name}={value}")]
    engine = next((engine for engine in _engines if engine.usable and engine.settings == settings), None)
    if engine is None:
        engine = Engine(settings)
        _engines.append(engine)
    engine.lent = True
    return engine


def take() -> None:
    """In the attempt's process: its Spark will be that of the engine; one of its own where the engine's has other settings."""
    from airflow_kafka_spark.hooks.spark import SparkHook

    address, start = Path(os.environ[FOUND_BY]), SparkHook._start

    def enter(hook: SparkHook, jars: tuple[str, ...]) -> Any:
        if not hook.is_connect:
            _enter(address, {"spark.master": hook.master, **hook.settings()}, jars)
        return start(hook, jars)

    SparkHook._start = enter  # type: ignore[method-assign]


def _enter(address: Path, settings: dict[str, str], jars: tuple[str, ...]) -> None:
    from pyspark import SparkConf, SparkContext
    from pyspark.serializers import UTF8Deserializer, read_int

    deadline = time.monotonic() + 120
    while not address.exists():
        assert time.monotonic() < deadline, "the engine does not start"
        time.sleep(0.02)
    with address.open("rb") as told:
        os.environ |= {"PYSPARK_GATEWAY_PORT": str(read_int(told)), "PYSPARK_GATEWAY_SECRET": UTF8Deserializer().loads(told)}
    SparkContext._ensure_initialized()
    gateway, jvm = SparkContext._gateway, SparkContext._jvm
    assert gateway is not None and jvm is not None
    running = getattr(getattr(jvm, "org.apache.spark.SparkContext$"), "MODULE$").getActive()
    conf = SparkConf(_jconf=running.get().conf()) if running.isDefined() else SparkConf(_jvm=jvm)
    there = {Path(jar).name for jar in (conf.get("spark.jars") or "").split(",")}
    # Spark puts its own Java options before those that were given.
    same = all((conf.get(name) or "").endswith(value) for name, value in settings.items() if not name.startswith("spark.sql."))
    if not same or not there >= {Path(jar).name for jar in jars}:
        gateway.close()
        SparkContext._gateway = SparkContext._jvm = None
        del os.environ["PYSPARK_GATEWAY_PORT"], os.environ["PYSPARK_GATEWAY_SECRET"]
        return
    context = None
    if running.isDefined():
        context = jvm.JavaSparkContext.fromSparkContext(running.get())
        context.sc().cancelAllJobs()
        jvm.SparkSession.clearDefaultSession()
    SparkContext(conf=conf, gateway=gateway, jsc=context)
    # The attempt's faults are its tasks' faults, too.
    faulty = {name: os.environ[name] for name in (faults.FAULT, faults.ONCE) if name in os.environ}
    spark_daemon.set_variables(str(_variables(address)), faulty)
