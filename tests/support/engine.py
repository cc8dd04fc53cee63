"""A JVM with Spark that outlives the task attempts of a test: starting a JVM takes longer than the rest of an attempt.

An attempt that dies leaves the JVM behind. The Python workers, and in them all tasks, would have ended with a JVM of the attempt;
here they are ended as soon as the attempt is gone (:meth:`Engine.give_back`). If an attempt is frozen, like a machine that hangs,
its JVM is frozen too.

One engine belongs to this test process (:func:`use_here`): it has the process's session, and attempts use it while it is free. An
attempt that is to be frozen or to lose its JVM gets another engine (``alone``).
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
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark import faults
from tests.support import spark_daemon
from tests.support.workers import daemons, session

if TYPE_CHECKING:
    from pyspark import SparkContext

    from airflow_kafka_spark.hooks.spark.hook import SparkHook

FOUND_BY = "TEST_ENGINE"
"""The environment variable that tells an attempt where to ask for its engine."""

_engines: list[Engine] = []


class Engine:
    """A JVM that runs the Spark of one attempt at a time; it ends with this process.

    :param settings: the options of ``spark-submit``.
    :param is_own: True if this process's session is in it, too.
    """

    def __init__(self, settings: list[str], *, is_own: bool = False) -> None:
        import pyspark

        self.settings = settings
        self.is_own = is_own
        self.lent = False
        directory = Path(tempfile.mkdtemp(prefix="engine-", dir=os.environ["AIRFLOW_HOME"]))
        self.address = directory / "address"
        self.variables = Path(os.environ[spark_daemon.FILE]) if is_own else directory / "variables"
        submit = shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell"))
        self.log = directory / "log"
        with open(self.log, "w") as log:
            # It ends when its standard input does.
            self.process = subprocess.Popen(
                [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), *settings, *submit],
                env={
                    **os.environ,
                    "_PYSPARK_DRIVER_CONN_INFO_PATH": str(self.address),
                    spark_daemon.FILE: str(self.variables),
                },
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """Return the id of the JVM's process, which is also that of the session of its workers."""
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def end(self) -> str:
        """Return how the JVM has ended, and the end of its log; "" while it runs."""
        code = self.process.poll()
        return "" if code is None else f"the engine's JVM has ended with {code}:\n{self.log.read_text()[-2000:]}"

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables by which an attempt finds the engine."""
        return {FOUND_BY: str(self.address), spark_daemon.FILE: str(self.variables)}

    @property
    def kept(self) -> set[int]:
        """Return the processes that outlive an attempt: the JVM, and the daemon that forks Python workers."""
        return {self.pid} | daemons(self.pid)

    def give_back(self) -> None:
        """End what the attempt has left in the engine: every Python worker, with its tasks."""
        kept = self.kept
        for pid in session(self.pid) - kept:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in kept:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        spark_daemon.set_variables(str(self.variables), {})
        self.lent = False


def lend(*, alone: bool = False) -> Engine | None:
    """Return an engine for one attempt over the default connection, a new one if all are in use. Return None for an attempt over
    Spark Connect, or in a warm process.

    :param alone: never return the engine that has this process's session.
    """
    from pyspark import SparkContext

    from airflow_kafka_spark.hooks.spark.hook import SparkHook

    hook = SparkHook()
    if hook.is_connect or hook.keep_alive is not None:
        return None
    settings = _options(hook)
    if not alone and SparkContext._active_spark_context is None and settings == _own_options():
        SparkContext.getOrCreate()
    free = (e for e in _engines if e.is_running and not e.lent and e.settings == settings and not (alone and e.is_own))
    engine = next(free, None) or _add(settings)
    engine.lent = True
    return engine


def _options(hook: SparkHook) -> list[str]:
    return [
        "--master",
        hook.master,
        *(part for name, value in hook.make_settings().items() for part in ("--conf", f"{name}={value}")),
    ]


def _own_options() -> list[str]:
    """Return the options of this process's own engine. They do not depend on the default connection of the first test."""
    import pytest

    from airflow_kafka_spark.hooks.spark.hook import SparkHook
    from tests.support.pipelines import SPARK

    # Not by patch.dict, which empties the environment for a moment: an attempt's validation reads it meanwhile.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", SPARK)
        return _options(SparkHook())


def _add(settings: list[str], *, is_own: bool = False) -> Engine:
    engine = Engine(settings, is_own=is_own)
    _engines.append(engine)
    return engine


def remember_classes() -> None:
    """Let Py4J ask the JVM only once for each class and static method.

    PySpark asks for both at each use of a function, in two of four requests: a window with transforms makes a thousand.
    """
    from py4j.java_gateway import JavaClass, JavaMember, JVMView

    def keep(owner: type, kept: type) -> None:
        find = owner.__getattr__

        def __getattr__(self: Any, name: str) -> Any:
            found = find(self, name)
            if isinstance(found, kept):
                vars(self)[name] = found
            return found

        owner.__getattr__ = __getattr__  # type: ignore[attr-defined]

    keep(JVMView, JavaClass)
    keep(JavaClass, JavaMember)


def use_here() -> None:
    """Run the Spark of this process in its own engine, whichever test starts Spark; :func:`not_here` undoes that."""
    from pyspark import SparkConf, SparkContext

    remember_classes()
    get_or_create = SparkContext.getOrCreate

    def enter(conf: SparkConf | None = None) -> SparkContext:
        with SparkContext._lock:
            if SparkContext._active_spark_context is None:
                engine = next((e for e in _engines if e.is_own and e.is_running), None) or _add(_own_options(), is_own=True)
                try:
                    gateway, jvm = _connect(engine.address)
                finally:
                    _forget_address()  # what this process starts has a Spark of its own
                gateway.proc = engine.process
                _make_context(gateway, jvm)
        return get_or_create(conf)

    enter.__wrapped__ = get_or_create  # type: ignore[attr-defined]
    SparkContext.getOrCreate = enter  # type: ignore[method-assign]


def not_here() -> None:
    """Let this process start its Spark as other processes do: with its own settings, and with its log in the output."""
    from pyspark import SparkContext

    SparkContext.getOrCreate = SparkContext.getOrCreate.__wrapped__  # type: ignore[method-assign]


def take() -> None:
    """Use the engine in the attempt's process. If the engine has other settings, the attempt starts its own Spark."""
    from airflow_kafka_spark.hooks.spark.hook import SparkHook

    remember_classes()
    address, start = Path(os.environ[FOUND_BY]), SparkHook._start_context

    def enter(hook: SparkHook, jars: tuple[str, ...]) -> SparkContext:
        _enter(address, {"spark.master": hook.master, **hook.make_settings()}, jars)
        return start(hook, jars)

    SparkHook._start_context = enter  # type: ignore[method-assign]


def _enter(address: Path, settings: dict[str, str], jars: tuple[str, ...]) -> None:
    from pyspark import SparkConf, SparkContext

    gateway, jvm = _connect(address)
    running = _running(jvm)
    conf = SparkConf(_jvm=jvm) if running is None else SparkConf(_jconf=running.conf())
    there = {Path(jar).name for jar in (conf.get("spark.jars") or "").split(",")}
    # Spark puts its own Java options before those that were given.
    same = all((conf.get(name) or "").endswith(value) for name, value in settings.items() if not name.startswith("spark.sql."))
    if not same or not there >= {Path(jar).name for jar in jars}:
        gateway.close()
        SparkContext._gateway = SparkContext._jvm = None
        _forget_address()
        return
    if running is not None:
        running.cancelAllJobs()
        jvm.SparkSession.clearDefaultSession()
    _make_context(gateway, jvm)
    # The attempt's faults are its tasks' faults, too.
    faulty = {name: os.environ[name] for name in (faults.FAULT, faults.ONCE) if name in os.environ}
    spark_daemon.set_variables(os.environ[spark_daemon.FILE], faulty)


def _connect(address: Path) -> tuple[Any, Any]:
    """Wait for an engine's address, and return this process's gateway to it and its JVM."""
    from pyspark import SparkContext
    from pyspark.serializers import UTF8Deserializer, read_int

    deadline = time.monotonic() + 120
    while not address.exists():
        assert time.monotonic() < deadline, "the engine does not start"
        time.sleep(0.02)
    with address.open("rb") as file:
        os.environ |= {"PYSPARK_GATEWAY_PORT": str(read_int(file)), "PYSPARK_GATEWAY_SECRET": UTF8Deserializer().loads(file)}
    SparkContext._ensure_initialized()
    return SparkContext._gateway, SparkContext._jvm


def _forget_address() -> None:
    for name in ("PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET"):
        os.environ.pop(name, None)


def _running(jvm: Any) -> Any:
    """Return the context of the JVM; None if it has none yet."""
    active = getattr(getattr(jvm, "org.apache.spark.SparkContext$"), "MODULE$").getActive()
    return active.get() if active.isDefined() else None


def _make_context(gateway: Any, jvm: Any) -> None:
    """Use the Spark context of the JVM in this process. It is created if the JVM has none."""
    from pyspark import SparkConf, SparkContext

    running = _running(jvm)
    conf = SparkConf(_jvm=jvm) if running is None else SparkConf(_jconf=running.conf())
    SparkContext(conf=conf, gateway=gateway, jsc=None if running is None else jvm.JavaSparkContext.fromSparkContext(running))
