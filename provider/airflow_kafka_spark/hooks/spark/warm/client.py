"""A task's side of a warm Spark process: find or start the process, and open a session in it."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.hooks.spark.class_archive import find_available_memory
from airflow_kafka_spark.hooks.spark.health import get_java_session_class
from airflow_kafka_spark.hooks.spark.warm.process import (
    STOPPED_SECONDS,
    ProcessFiles,
    WarmSettings,
    WarmUnavailable,
    connect,
    count_open_sockets,
    is_readable,
    is_stopped,
    list_process_environment,
    make_private_directory,
    read_peer_credentials,
    receive_message,
    remove_old_logs,
    send,
)

if TYPE_CHECKING:
    import socket

    from pyspark import SparkContext
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

MAX_PROCESSES = 4
"""Maximum number of warm processes of one user on a host."""

START_SECONDS = 300.0
"""Maximum seconds for the start of a warm process, and for its answer."""
_MEMORY_NEEDED = 1 << 30
_POLL_SECONDS = 1.0


@dataclass
class WarmConnection:
    """The warm process that this process uses. When the connection is closed, the warm process ends the jobs of this process.

    :param key: key of the settings.
    :param connection: connection to the warm process.
    :param session: session in the warm process.
    """

    key: str
    connection: socket.socket
    session: SparkSession

    @functools.cached_property
    def sql_session(self) -> SparkSession:
        """The session, prepared for SQL.

        The JVM of Spark 4 keeps each session that has used SQL for as long as it lives (0.3 MB): a cleaner that waits for the
        end of the session's manager of artifacts refers to that manager. Closing the manager removes the cleaner. It has no
        artifacts yet, and remains usable.
        """
        with contextlib.suppress(Exception):  # Spark 3.5 has no such manager
            self.session._jsparkSession.artifactManager().close()
        return self.session

    @property
    def is_alive(self) -> bool:
        """True while the warm process keeps the connection open."""
        # The warm process sends nothing without a request, so a readable connection is a closed one.
        return not is_readable(self.connection)


_attached: WarmConnection | None = None
_asking = threading.Lock()


def is_attached() -> bool:
    """Return True if this process uses a session in a warm process."""
    return _attached is not None


def open_warm_session(settings: WarmSettings, name: str) -> SparkSession:
    """Return the session of this process in the warm process with these settings, which is started if it does not run.

    :param settings: settings of the warm process.
    :param name: name of the task, for the log of the warm process.
    :raises WarmUnavailable: the warm process cannot be used.
    :raises JavaMissing: there is no Java.
    """
    global _attached
    if _attached is not None and _attached.key == settings.key:
        return _attached.session
    if os.environ.get("PYSPARK_PIN_THREAD", "true").lower() != "true":
        raise WarmUnavailable("PYSPARK_PIN_THREAD is set, and a warm process takes threads that are pinned")
    begun = time.monotonic()
    try:
        connection, answer, started = _enter(settings, name)
    except OSError as error:  # a directory that is full or read-only
        raise WarmUnavailable(f"its files cannot be used: {error}") from error
    try:
        session = _open(answer)
    except Exception as error:
        connection.close()
        _detach()
        raise WarmUnavailable(f"no session could be opened in it: {type(error).__name__}: {error}") from error
    _attached = WarmConnection(settings.key, connection, session)
    log.info(
        "%s warm Spark process %d on %s after %.1f s (%.0f s old, %d tasks and %d jobs before this one); its log is %s",
        "Started the" if started else "Reusing the",
        answer["jvm"], settings.master, time.monotonic() - begun, answer["age"], answer["tasks"], answer["jobs"],
        ProcessFiles(make_private_directory(), settings.key).log,
    )  # fmt: skip
    return session


def detach_if_ended() -> None:
    """Remove the session of a warm process that has ended, so that the next one is opened in another process."""
    if _attached is not None and not _attached.is_alive:
        log.warning("The warm Spark process has ended")
        detach()


def detach() -> str:
    """Remove the session in a warm process, so that the next one of this process is a new one.

    :return: the path of the log of the warm process; "" if this process used none.
    """
    if _attached is None:
        return ""
    used = ProcessFiles(make_private_directory(), _attached.key)
    _attached.connection.close()
    _detach()
    return str(used.log)


def get_session() -> SparkSession | None:
    """Return the session of this process in a warm process, for SQL; None if this process uses none."""
    return None if _attached is None else _attached.sql_session


def end_leftovers(context: SparkContext, group: str) -> None:
    """End jobs of a group that an earlier attempt has left in a warm process; do nothing for a context of another kind.

    :param context: a context.
    :param group: a job group without jobs of this process.
    :raises WarmUnavailable: the jobs did not end.
    """
    if _attached is None or _attached.session.sparkContext is not context:
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
    """Return a connection to the warm process, its answer, and True if this call has started it."""
    files = ProcessFiles(make_private_directory(), settings.key)
    if entered := _greet(files, settings, name):
        return (*entered, False)
    with files.hold_lock():
        # Another task may have started the process meanwhile.
        if entered := _greet(files, settings, name):
            return (*entered, False)
        files.socket.unlink(missing_ok=True)
        _start(files, settings)
        if entered := _greet(files, settings, name):
            return (*entered, True)
    raise WarmUnavailable(f"it ended as soon as it was started; {files.log} may contain the reason")


def _greet(files: ProcessFiles, settings: WarmSettings, name: str) -> tuple[socket.socket, dict[str, Any]] | None:
    connection = connect(files.socket)
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
        log.info("The warm Spark process has ended before it accepted this task%s", _read_reason(files))
        return None
    return connection, answer


def _read_reason(files: ProcessFiles) -> str:
    """Return the reason for which a process has ended, as the end of a sentence; "" if it was killed."""
    with contextlib.suppress(OSError):
        # The next process of these settings overwrites the log.
        found = re.findall(r"warm Spark: ends: (.+)", files.log.read_text(errors="replace"))
        return f": {found[-1]}" if found else ""
    return ""


def _answer(connection: socket.socket) -> dict[str, Any] | None:
    """Return the answer of the warm process; None if it has ended, or was stopped and is killed."""
    try:
        if not _wait_for_answer(connection):
            return None
        connection.settimeout(START_SECONDS)
        return receive_message(connection)
    except TimeoutError:
        raise WarmUnavailable(f"it did not answer within {START_SECONDS:g} s") from None
    finally:
        connection.settimeout(None)


def _wait_for_answer(connection: socket.socket) -> bool:
    """Wait until the warm process answers or ends, and return True. If it was stopped, kill it and return False.

    :raises TimeoutError: it does not answer within :data:`START_SECONDS`.
    """
    pid, stopped = read_peer_credentials(connection)[0], 0.0
    deadline = time.monotonic() + START_SECONDS
    while not is_readable(connection, _POLL_SECONDS):
        stopped = stopped + _POLL_SECONDS if is_stopped(pid) else 0.0
        if stopped >= STOPPED_SECONDS:
            log.warning("Killing the warm Spark process: its server %d has been stopped (SIGSTOP) for %g s", pid, STOPPED_SECONDS)
            # It leads the group of its JVM, which may be stopped, too, and would not notice its end.
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
            return False
        if time.monotonic() > deadline:
            raise TimeoutError
    return True


def _start(files: ProcessFiles, settings: WarmSettings) -> None:
    """Start the process and wait until it listens."""
    if (others := count_open_sockets(files.directory, files.socket)) >= MAX_PROCESSES:
        raise WarmUnavailable(f"{others} warm processes with other settings run already, the maximum for one user on a host")
    if find_available_memory() < _MEMORY_NEEDED:
        raise WarmUnavailable(f"less than {_MEMORY_NEEDED >> 30} GiB of memory is free")
    remove_old_logs(files.directory)
    log.info("Starting a warm Spark process on %s, which ends after %g s without a task", settings.master, settings.keep_alive)
    # Passed through standard input, because every user of the machine can read a command line.
    given = {
        "master": settings.master,
        "spark": settings.started,
        "keep_alive": settings.keep_alive,
        "key": settings.key,
        "directory": str(files.directory),
    }
    with open(os.open(files.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600), "wb") as output:
        read_end, write_end = os.pipe()
        try:
            # The process forks at once, so that the server is no child of this task, and then exits.
            starter = subprocess.Popen(
                [sys.executable, "-m", "airflow_kafka_spark.hooks.spark.warm.server", str(write_end)],
                env=list_process_environment(), start_new_session=True, pass_fds=[write_end],
                stdin=subprocess.PIPE, stdout=output, stderr=output,
            )  # fmt: skip
        except OSError as error:
            os.close(read_end)
            raise WarmUnavailable(f"it could not be started: {error}") from error
        finally:
            os.close(write_end)
    with open(read_end, "rb", buffering=0) as answer:
        with contextlib.suppress(BrokenPipeError):
            starter.communicate(json.dumps(given).encode())
        ready = is_readable(answer, START_SECONDS)
        said = answer.read(10_000).decode() if ready else ""
    if said != "ready":
        reason = said or (f"it did not start within {START_SECONDS:g} s" if not ready else "it ended while it started")
        raise WarmUnavailable(f"{reason}; {files.log} may contain the reason")


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
    with _restore_process():
        context = SparkContext(
            conf=SparkConf(_jconf=running.conf()), gateway=SparkContext._gateway,
            jsc=jvm.JavaSparkContext.fromSparkContext(running),
        )  # fmt: skip
    # The values of accumulators go to the warm process instead of this one: the thread that schedules all jobs sends them, and
    # would block all tasks while this process is stopped.
    context._javaAccumulator = getattr(jvm, "org.apache.spark.util.AccumulatorContext").get(answer["accumulator"]).get()
    classes = get_java_session_class(jvm)
    root = classes.getDefaultSession().get()
    session = SparkSession(context, root.newSession())
    # The session of this process must not become the JVM's default session, which other tasks would get.
    classes.setDefaultSession(root)
    return session


@contextlib.contextmanager
def _restore_process() -> Iterator[None]:
    """Undo what a new ``SparkContext`` changes in this process."""
    path, handler = list(sys.path), signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        sys.path[:] = path
        # Restore the handler, because pyspark's cancels all jobs of the JVM.
        with contextlib.suppress(ValueError, TypeError):  # not the main thread
            signal.signal(signal.SIGINT, handler)


def _detach() -> None:
    """Remove the JVM from pyspark's state, so that the next session of this process is a new one."""
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
        # The gateway belongs to this process only.
        with contextlib.suppress(Exception):
            gateway.shutdown()


def _close_after_fork() -> None:
    """Close this process's copy of the connection after a fork: the warm process detects the end of a task by its closing."""
    global _attached
    if _attached is not None:
        _attached.connection.close()
        _attached = None


os.register_at_fork(after_in_child=_close_after_fork)
