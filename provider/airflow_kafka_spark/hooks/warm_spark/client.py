"""A task's side of a warm Spark process: find it or start it, and get a session of one's own in it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.hooks.class_archive import available_memory
from airflow_kafka_spark.hooks.spark_health import java_session_class
from airflow_kafka_spark.hooks.warm_spark.process import (
    Place,
    WarmSettings,
    WarmUnavailable,
    connect,
    environment,
    is_readable,
    open_sockets,
    private_directory,
    receive,
    send,
)

if TYPE_CHECKING:
    import socket

    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

MOST_PROCESSES = 4
"""Warm processes of one user on a host."""

START_SECONDS = 300.0
_MEMORY_NEEDED = 1 << 30


@dataclass
class Attached:
    """The warm process that this process uses. The connection is its life: when it closes, the warm process ends our jobs.

    :param key: of the settings.
    :param connection: to the warm process.
    :param session: the session in it.
    """

    key: str
    connection: socket.socket
    session: SparkSession

    @property
    def is_alive(self) -> bool:
        """Return True while the warm process keeps the connection open."""
        # It sends nothing unless it was asked.
        return not is_readable(self.connection)


_attached: Attached | None = None
_asking = threading.Lock()


def is_attached() -> bool:
    """Return True if the session of this process is one in a warm process."""
    return _attached is not None


def open_session(settings: WarmSettings, name: str) -> SparkSession:
    """Return the session of this process in the warm process with these settings, which is started if it does not run.

    :param settings: of the process.
    :param name: of the task, for the log of the process.
    :raises WarmUnavailable: it cannot be used.
    :raises JavaMissing: there is no Java.
    """
    global _attached
    if _attached is not None and _attached.key == settings.key:
        return _attached.session
    if os.environ.get("PYSPARK_PIN_THREAD", "true").lower() != "true":
        raise WarmUnavailable("PYSPARK_PIN_THREAD is set, and a warm process takes threads that are pinned")
    begun = time.monotonic()
    connection, answer, started = _enter(settings, name)
    try:
        session = _open(answer)
    except Exception as error:
        connection.close()
        _detach()
        raise WarmUnavailable(f"no session could be opened in it: {type(error).__name__}: {error}") from error
    _attached = Attached(settings.key, connection, session)
    log.info(
        "%s warm Spark process %d on %s after %.1f s (%.0f s old, %d tasks and %d jobs before this one); its log is %s",
        "Started the" if started else "Reusing the",
        answer["jvm"], settings.master, time.monotonic() - begun, answer["age"], answer["tasks"], answer["jobs"],
        Place(private_directory(), settings.key).log,
    )  # fmt: skip
    return session


def drop_dead() -> None:
    """Forget the session of a warm process that has ended, so that the next one is opened elsewhere."""
    if _attached is not None and not _attached.is_alive:
        log.warning("The warm Spark process has ended")
        _attached.connection.close()
        _detach()


def end_leftovers(session: SparkSession, group: str) -> None:
    """End jobs of a group that an earlier attempt has left in a warm process; nothing happens in a session of another kind.

    :param session: a session.
    :param group: a job group of which this process runs no job.
    :raises WarmUnavailable: they did not end.
    """
    if _attached is None or _attached.session is not session:
        return
    with _asking:
        send(_attached.connection, {"end": group})
        answer = _answer(_attached.connection)
    if answer is None:
        raise WarmUnavailable("the warm Spark process has ended")
    if "refused" in answer:
        raise WarmUnavailable(answer["refused"])
    if answer["ended"]:
        log.warning("Cancelled %d jobs that an earlier attempt has left in the warm Spark process", answer["ended"])


def _enter(settings: WarmSettings, name: str) -> tuple[socket.socket, dict[str, Any], bool]:
    """Return a connection to the warm process, its answer, and whether it was started."""
    place = Place(private_directory(), settings.key)
    if entered := _hello(place, settings, name):
        return (*entered, False)
    with place.locked():
        # Another task may have started it meanwhile.
        if entered := _hello(place, settings, name):
            return (*entered, False)
        place.socket.unlink(missing_ok=True)
        _start(place, settings)
        if entered := _hello(place, settings, name):
            return (*entered, True)
    raise WarmUnavailable(f"it ended as soon as it was started; {place.log} may tell why")


def _hello(place: Place, settings: WarmSettings, name: str) -> tuple[socket.socket, dict[str, Any]] | None:
    connection = connect(place.socket)
    if connection is None:
        return None
    try:
        send(connection, {"name": name, "keep_alive": settings.keep_alive})
        answer = _answer(connection)
    except OSError:
        answer = None
    except BaseException:
        connection.close()
        raise
    if answer is None or "refused" in answer:
        connection.close()
        if answer is not None:
            raise WarmUnavailable(answer["refused"])
        return None  # it was just ending
    return connection, answer


def _answer(connection: socket.socket) -> dict[str, Any] | None:
    connection.settimeout(START_SECONDS)
    try:
        return receive(connection)
    except TimeoutError:
        raise WarmUnavailable(f"it did not answer within {START_SECONDS:g} s") from None
    finally:
        connection.settimeout(None)


def _start(place: Place, settings: WarmSettings) -> None:
    """Start the process and wait until it listens."""
    if (others := open_sockets(place.directory, place.socket)) >= MOST_PROCESSES:
        raise WarmUnavailable(f"{others} warm processes with other settings run already, which is the most of one user on a host")
    if available_memory() < _MEMORY_NEEDED:
        raise WarmUnavailable(f"less than {_MEMORY_NEEDED >> 30} GiB of memory is free")
    log.info("Starting a warm Spark process on %s, which ends after %g s without a task", settings.master, settings.keep_alive)
    told, tell = os.pipe()
    # Not by its arguments: every user of the machine can read a command line.
    given = {
        "master": settings.master,
        "spark": settings.started,
        "keep_alive": settings.keep_alive,
        "key": settings.key,
        "directory": str(place.directory),
    }
    with open(os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600), "wb") as output:
        try:
            # It forks at once, so that the server is no child of this task; the first process ends with a return code.
            starter = subprocess.Popen(
                [sys.executable, "-m", "airflow_kafka_spark.hooks.warm_spark.server", str(tell)],
                env=environment(), start_new_session=True, pass_fds=[tell],
                stdin=subprocess.PIPE, stdout=output, stderr=output,
            )  # fmt: skip
        except OSError as error:
            os.close(told)
            raise WarmUnavailable(f"it could not be started: {error}") from error
        finally:
            os.close(tell)
    with open(told, "rb", buffering=0) as answer:
        with contextlib.suppress(BrokenPipeError):
            starter.communicate(json.dumps(given).encode())
        ready = is_readable(answer, START_SECONDS)
        said = answer.read(10_000).decode() if ready else ""
    if said != "ready":
        reason = said or (f"it did not start within {START_SECONDS:g} s" if not ready else "it ended while it started")
        raise WarmUnavailable(f"{reason}; {place.log} may tell why")


def _open(answer: dict[str, Any]) -> SparkSession:
    """Return a session of this process in the JVM that an answer describes."""
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    gateway = {"PYSPARK_GATEWAY_PORT": str(answer["port"]), "PYSPARK_GATEWAY_SECRET": str(answer["secret"])}
    os.environ |= gateway
    try:
        SparkContext._ensure_initialized()
    finally:
        for name in gateway:
            del os.environ[name]
    jvm: Any = SparkContext._jvm
    running = getattr(getattr(jvm, "org.apache.spark.SparkContext$"), "MODULE$").getActive().get()
    with _unchanged_process():
        context = SparkContext(
            conf=SparkConf(_jconf=running.conf()), gateway=SparkContext._gateway,
            jsc=jvm.JavaSparkContext.fromSparkContext(running),
        )  # fmt: skip
    # Values of accumulators would be sent to this process by the one thread that schedules all jobs, and each of them would wait
    # where this process is stopped. The warm process takes them instead.
    context._javaAccumulator = jvm.org.apache.spark.util.AccumulatorContext.get(answer["accumulator"]).get()
    classes = java_session_class(jvm)
    root = classes.getDefaultSession().get()
    session = SparkSession(context, root.newSession())
    # The session of this process must not become the default of others, which would keep it, too.
    classes.setDefaultSession(root)
    return session


@contextlib.contextmanager
def _unchanged_process() -> Iterator[None]:
    """Undo what a new ``SparkContext`` changes in this process."""
    path, handler = list(sys.path), signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        sys.path[:] = path
        # pyspark's cancels all jobs of the JVM.
        with contextlib.suppress(ValueError, TypeError):  # not the main thread
            signal.signal(signal.SIGINT, handler)


def _detach() -> None:
    """Forget the JVM: the next session of this process is a new one."""
    global _attached
    _attached = None
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    gateway = SparkContext._gateway
    context = SparkContext._active_spark_context
    if context is not None:
        context._jsc = None
        if getattr(context, "_accumulatorServer", None):
            context._accumulatorServer.shutdown()
            context._accumulatorServer = None  # type: ignore[assignment]
    SparkContext._active_spark_context = SparkContext._gateway = SparkContext._jvm = None
    SparkSession._instantiatedSession = SparkSession._activeSession = None
    if gateway is not None:
        # It is this process's alone.
        with contextlib.suppress(Exception):
            gateway.shutdown()


def _after_fork() -> None:
    """Leave the connection to the process that was forked from: its end is what the warm process waits for."""
    global _attached
    if _attached is not None:
        _attached.connection.close()
        _attached = None


os.register_at_fork(after_in_child=_after_fork)
