"""The warm process: it starts a JVM with Spark, accepts tasks, ends the jobs that they leave, and ends itself.

The first task starts ``python -m airflow_kafka_spark.hooks.spark.warm.server``, which leaves the task's process session at once.
It reads its settings from standard input, and reports through a pipe when it is ready. Other tasks may connect before, and wait
for their answers.

Each task has a gateway of its own in the JVM, with a port and a secret that are sent through the Unix socket and stored in no
file, and a tag on all jobs that it starts. When the task's connection to the socket is closed, for any reason, its jobs are
cancelled, its gateway is closed, and no further task is accepted until both is done.

Python workers and the JVM end with this process, however it ends, because the JVM reads its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.hooks.spark.warm.process import (
    STOPPED_SECONDS,
    ProcessFiles,
    is_readable,
    is_stopped,
    read_peer_credentials,
    receive_message,
    send,
)

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject, JVMView
    from pyspark.sql import SparkSession

LEFTOVER_SECONDS = 60.0
"""Maximum seconds for which jobs of an ended task may run. After that, the process accepts no further task, and ends after its
last one."""

MAX_AGE_SECONDS = 24 * 3600.0
"""Maximum age in seconds. An older process accepts no further task, and ends after its last one, because a JVM's memory grows."""

SILENCE_SECONDS = 60.0
"""A JVM that does not answer for this time is killed, one that was stopped after :data:`STOPPED_SECONDS`. Its jobs fail, and the
next task starts another process."""

GROUP, TAGS = "spark.jobGroup.id", "spark.job.tags"
"""Properties of a job: its group, and its tags."""

_POLL_SECONDS = 1.0
"""Seconds between two looks at the socket and the JVM."""
_JOBS_SECONDS = 0.05
"""Seconds between two looks at jobs that are cancelled."""
_END_SECONDS = 10.0
"""Seconds that a JVM may take to exit."""


@dataclass
class Client:
    """A connected task.

    :param number: its number among the tasks that have connected.
    :param connection: the connection to it.
    :param is_gone: True once its jobs have ended and its gateway is closed.
    """

    number: int
    connection: socket.socket
    is_gone: bool = False

    @property
    def tag(self) -> str:
        """The tag of all jobs that it starts."""
        return f"airflow-kafka-spark-task-{self.number}"

    @property
    def has_left(self) -> bool:
        """True if the task has closed its end of the connection."""
        try:
            return is_readable(self.connection) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except (OSError, ValueError):
            return True


class Server:
    """Gives tasks access to one Spark.

    :param files: the files of the process.
    :param listening: the bound socket.
    :param session: the server's own session, which no task uses.
    :param keep_alive: seconds without a task after which the server ends. Each task may change it.
    """

    def __init__(self, files: ProcessFiles, listening: socket.socket, session: SparkSession, keep_alive: float) -> None:
        self.files, self.keep_alive = files, keep_alive
        self._listening = listening
        self._inode = files.socket.stat().st_ino
        self._context = session.sparkContext
        self._spark = self._context._jsc.sc()
        gateway = self._context._gateway
        assert gateway is not None
        self._process = gateway.proc
        self._begun = self._idle_since = time.monotonic()
        self._changed = threading.Condition()
        self._clients: list[Client] = []
        self._connected = self._tasks = 0
        self._closed = ""
        self._answered = threading.Event()
        self._problem = ""

    @property
    def jvm(self) -> int:
        """The process id of the JVM."""
        return int(self._process.pid)

    def run(self) -> str:
        """Accept tasks until there is a reason to end, and return the reason."""
        threading.Thread(target=self._ask_jvm, name="answers of the JVM", daemon=True).start()
        silence = 0.0
        while not (reason := self._find_reason_to_end()):
            polled = time.monotonic()
            if is_readable(self._listening, _POLL_SECONDS):
                self._accept()
            # One poll at a time: if this process was stopped together with the JVM, the time of the stop does not count.
            silence += min(time.monotonic() - polled, 2 * _POLL_SECONDS)
            if self._answered.is_set():
                self._answered.clear()
                silence = 0.0
            elif silence > STOPPED_SECONDS and is_stopped(self.jvm):
                return f"the JVM has not answered for {STOPPED_SECONDS:g} s: it is stopped (SIGSTOP)"
            elif silence > SILENCE_SECONDS:
                return f"the JVM has not answered for {SILENCE_SECONDS:g} s: it had no processor or memory"
        return reason

    def _ask_jvm(self) -> None:
        """Ask the JVM again and again whether Spark still runs. A stopped JVM never answers: only this thread waits for it."""
        while not self._problem:
            try:
                if self._spark.isStopped():
                    self._problem = "Spark was stopped"
            except Exception as error:
                self._problem = f"the JVM does not answer: {error}"
            self._answered.set()
            time.sleep(_POLL_SECONDS)

    def _find_reason_to_end(self) -> str:
        if self._process.poll() is not None:
            return f"the JVM has ended with {self._process.returncode}"
        if self._problem:
            return self._problem
        if not self._is_there():
            self._close("its socket is gone")
        if time.monotonic() - self._begun > MAX_AGE_SECONDS:
            self._close("it is a day old")
        with self._changed:
            if self._clients:
                return ""
            if self._closed:
                return self._closed
            if time.monotonic() - self._idle_since < self.keep_alive:
                return ""
        return self._leave()

    def _leave(self) -> str:
        """Remove the socket, unless a task is connecting, and return the reason to end."""
        with self.files.hold_lock(wait=False) as locked:
            if not locked or is_readable(self._listening):
                return ""
            self._remove_socket()
        return f"no task came for {self.keep_alive:g} s"

    def _is_there(self) -> bool:
        """Return True if the socket file belongs to this process, so that new tasks find it."""
        try:
            return self.files.socket.stat().st_ino == self._inode
        except OSError:
            return False

    def _remove_socket(self) -> None:
        # The socket may belong to a process that was started after this one.
        if self._is_there():
            self.files.socket.unlink(missing_ok=True)

    def _close(self, reason: str) -> None:
        """Accept no further task, so that the next task starts another process."""
        with self._changed:
            if self._closed:
                return
            self._closed = reason
        write_line(f"no more tasks are accepted: {reason}")
        # In a thread, because a task that waits for an answer may hold the lock.
        threading.Thread(target=self._remove_socket_locked, daemon=True).start()

    def _remove_socket_locked(self) -> None:
        with self.files.hold_lock():
            self._remove_socket()

    def _accept(self) -> None:
        connection, _ = self._listening.accept()
        if read_peer_credentials(connection)[1] != os.getuid():
            connection.close()
            return
        with self._changed:
            self._connected += 1
            client = Client(self._connected, connection)
            self._clients.append(client)
        threading.Thread(target=self._serve, args=(client,), name=client.tag, daemon=True).start()

    def _serve(self, client: Client) -> None:
        gateway = None
        try:
            hello = receive_message(client.connection)
            if hello is None:
                return
            if refused := self._wait_for_leftovers(client):
                send(client.connection, {"refused": refused})
            if refused or self._closed or self._spark.isStopped():
                # A task that gets no answer starts another process.
                return
            gateway = self._open_gateway(client, hello)
            while (request := receive_message(client.connection)) is not None:
                send(client.connection, self._end_group(client, request["end"]))
        except Exception:
            write_line(f"task {client.number}:\n{traceback.format_exc()}")
        finally:
            self._remove_client(client, gateway)

    def _open_gateway(self, client: Client, hello: dict[str, Any]) -> Any:
        # All threads of the gateway inherit these properties from this thread, so that all jobs of the task have the tag, in any
        # group.
        self._context.addJobTag(client.tag)
        self._context.setJobGroup(client.tag, str(hello["name"]), interruptOnCancel=True)
        gateway = open_gateway(self._spark, self._context._jvm)
        with self._changed:
            self.keep_alive = float(hello["keep_alive"])
            before, self._tasks = self._tasks, self._tasks + 1
        jobs = self._spark.dagScheduler().numTotalJobs()
        write_line(
            f"task {client.number} ({hello['name']}, process {read_peer_credentials(client.connection)[0]}) begins, "
            f"after {jobs} jobs"
        )
        answer = {
            "port": gateway.getListeningPort(),
            "secret": gateway.secret(),
            "accumulator": self._context._javaAccumulator.id(),
            "jvm": self.jvm,
            "age": time.monotonic() - self._begun,
            "tasks": before,
            "jobs": jobs,
        }
        try:
            send(client.connection, answer)
        except OSError:
            write_line(f"task {client.number} left before it was accepted")
        return gateway

    def _wait_for_leftovers(self, client: Client) -> str:
        """Wait until the jobs of all ended tasks have ended; return the reason if they do not."""
        with self._changed:
            # The end of a task that was killed just now may not be detected yet.
            left = [other for other in self._clients if other is not client and other.has_left]
            self._changed.wait_for(lambda: self._closed or all(other.is_gone for other in left), LEFTOVER_SECONDS + _END_SECONDS)
            return "" if self._closed or all(other.is_gone for other in left) else "jobs of an earlier task have not ended"

    def _end_group(self, client: Client, group: str) -> dict[str, Any]:
        try:
            return {"ended": end_jobs(self._spark, GROUP, group, seconds=LEFTOVER_SECONDS)}
        except TimeoutError as error:
            return {"refused": str(error)}

    def _remove_client(self, client: Client, gateway: JavaObject | None) -> None:
        """End the jobs and close the gateway that a task has left in the JVM, and remove the task."""
        try:
            if gateway is not None:
                ended = end_jobs(self._spark, TAGS, client.tag, seconds=LEFTOVER_SECONDS, gateway=gateway)
                gateway.shutdown()
                write_line(f"task {client.number} has ended" + (f", {ended} of its jobs were cancelled" if ended else ""))
        except Exception as error:
            # If the JVM is dead, so are the jobs.
            if self._process.poll() is None:
                self._close(f"task {client.number} has ended, but not all of its jobs: {error}")
        finally:
            client.connection.close()
            with self._changed:
                client.is_gone = True
                self._clients.remove(client)
                # A connection without a message was a test of the socket, not a task.
                self._idle_since = self._idle_since if gateway is None else time.monotonic()
                self._changed.notify_all()

    def end(self) -> None:
        """End the JVM, and close the connections of the tasks."""
        with contextlib.suppress(OSError):
            self._remove_socket()
            self._listening.close()
        for client in list(self._clients):
            with contextlib.suppress(OSError):
                client.connection.shutdown(socket.SHUT_RDWR)
        # Otherwise it prints a stack trace when the JVM closes the connection.
        with contextlib.suppress(Exception):
            self._context._accumulatorServer.server_close()
        end_jvm(self._process)


def end_jobs(spark: JavaObject, name: str, value: str, *, seconds: float, gateway: JavaObject | None = None) -> int:
    """Cancel all jobs with a property, and wait until none of their tasks runs any more.

    :param spark: the JVM's ``SparkContext``.
    :param name: :data:`GROUP` or :data:`TAGS`.
    :param value: the group, or one of the tags.
    :param seconds: timeout.
    :param gateway: a gateway of :func:`open_gateway`, whose connections have to be closed, too, because a call in one of them may
        still start a job.
    :return: the number of jobs that were found.
    :raises TimeoutError: some of them still run.
    """
    deadline = time.monotonic() + seconds
    found: set[int] = set()
    while True:
        connected = gateway is not None and _count_connections(gateway) > 0
        jobs = {int(job.jobId()) for job in _list_active_jobs(spark, name, value)}
        found |= jobs
        if jobs and name == TAGS:
            spark.cancelJobsWithTag(value)
        elif jobs:
            spark.cancelJobGroup(value)
        if not (connected or jobs or any(_list_task_sets(spark, name, value))):
            return len(found)
        if time.monotonic() > deadline:
            raise TimeoutError(f"jobs {sorted(found)} did not end within {seconds:g} s")
        time.sleep(_JOBS_SECONDS)


def open_gateway(spark: JavaObject, jvm: JVMView) -> JavaObject:
    """Return a new gateway to a JVM (``Py4JServer``), with a port and a secret of its own, whose connections can be counted."""
    gateway = getattr(jvm, "org.apache.spark.api.python.Py4JServer")(spark.conf())
    # The gateway removes closed connections from its list only if it is registered as its own listener.
    server = _get_java_server(gateway)
    server.addListener(server)
    gateway.start()
    return gateway


def _count_connections(gateway: JavaObject) -> int:
    server = _get_java_server(gateway)
    declared = server.getClass()
    while declared.getSimpleName() != "GatewayServer":
        declared = declared.getSuperclass()
    field = declared.getDeclaredField("connections")
    field.setAccessible(True)
    return int(field.get(server).size())


def _get_java_server(gateway: JavaObject) -> JavaObject:
    return gateway.server().getJavaServer()


def _list_active_jobs(spark: JavaObject, name: str, value: str) -> Iterator[JavaObject]:
    return (job for job in _convert_scala_list(spark.dagScheduler().activeJobs()) if _has(job.properties(), name, value))


def _list_task_sets(spark: JavaObject, name: str, value: str) -> Iterator[JavaObject]:
    """Return the task sets that have not ended. The task set of a cancelled job is included until its last task has ended."""
    return (tasks for tasks in _list_queued(spark.taskScheduler().rootPool()) if _has(tasks.taskSet().properties(), name, value))


def _list_queued(pool: JavaObject) -> Iterator[JavaObject]:
    for one in pool.schedulableQueue().toArray():
        if one.getClass().getSimpleName() == "Pool":
            yield from _list_queued(one)
        else:
            yield one


def _convert_scala_list(collection: JavaObject) -> list[JavaObject]:
    iterator, found = collection.toSeq().iterator(), []
    while iterator.hasNext():
        found.append(iterator.next())
    return found


def _has(properties: JavaObject | None, name: str, value: str) -> bool:
    found = properties.getProperty(name) if properties is not None else None
    return found is not None and value in (found.split(",") if name == TAGS else [found])


def end_jvm(process: subprocess.Popen[bytes]) -> None:
    """End a JVM that pyspark has started; kill it if it does not exit in time."""
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
    with contextlib.suppress(Exception):
        process.wait(_END_SECONDS)
    if process.poll() is None:
        process.kill()


def write_line(text: str) -> None:
    """Write a line to the log of the process."""
    print(f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} warm Spark: {text}", flush=True)


def start_spark(master: str, settings: dict[str, str]) -> SparkSession:
    """Return a session in a new JVM."""
    from pyspark.sql import SparkSession

    builder: Any = SparkSession.builder.master(master).appName("airflow-kafka-spark (warm)")
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def main() -> None:
    """Run the server with the settings in standard input. The argument is the descriptor of the pipe for the report."""
    given = json.load(sys.stdin)
    write_end = int(sys.argv[1])
    if os.fork():
        # The task waits for this process to exit; the forked one is no child of the task.
        os._exit(0)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.set_inheritable(write_end, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    files = ProcessFiles(Path(given["directory"]), given["key"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    code, server = 1, None
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(files.socket))
            listening.listen(100)
            server = Server(files, listening, start_spark(given["master"], given["spark"]), given["keep_alive"])
            write_line(f"process {os.getpid()} has started JVM {server.jvm} on {given['master']}")
            _report(write_end, "ready")
            os.close(write_end)
            write_line(f"ends: {server.run()}")
        code = 0
    except SystemExit:
        code = 0
    except BaseException as error:
        traceback.print_exc()
        _report(write_end, f"{type(error).__name__}: {error}")
    finally:
        if server is not None:
            server.end()
        # Threads that wait for tasks would prevent Python from exiting.
        os._exit(code)


def _report(pipe: int, text: str) -> None:
    with contextlib.suppress(OSError):  # the task has ended; the server continues to serve other tasks
        os.write(pipe, text.encode()[:1000])


if __name__ == "__main__":
    main()
