"""Spark with executors in separate processes. A driver process has one session for several windows. A small standalone cluster
has two workers with different addresses.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from airflow_kafka_spark.hooks.spark.class_archive import SparkClassArchive, list_java_options
from airflow_kafka_spark.testing import _processes as processes
from tests.support.pipelines import QUICK_JVM
from tests.support.runs import ROOT, run
from tests.support.workers import fault_in_tasks

_ANSWER = "ANSWER "

OURS = {"spark.executorEnv.PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
"""The setting by which executors of :func:`standalone` find the modules of this environment, those of tests among them."""


def quick_jvm() -> str:
    """Return the options of Java for masters, workers and executors: those of :data:`QUICK_JVM`, and the archive of classes."""
    archive = SparkClassArchive.find()
    # The method of the archive returns none here: this process's own options name the archive already.
    return " ".join([QUICK_JVM, *(list_java_options(archive.file) if archive else ())])


def connection(master: str, **settings: str) -> str:
    """The Airflow connection of a cluster on this machine."""
    extra = {
        "spark.driver.memory": "512m",
        "spark.driver.extraJavaOptions": QUICK_JVM,
        "spark.executor.extraJavaOptions": quick_jvm(),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
    }
    if master.startswith("local"):
        # Workers get their faults from this daemon, as those of this process do.
        extra["spark.python.daemon.module"] = "tests.support.spark_daemon"
    return json.dumps({"conn_type": "spark", "host": master, "extra": {**extra, **settings}})


class Driver:
    """A process that runs task attempts, one after the other, in one Spark session. A context manager.

    :param spark: the Spark connection, as JSON.
    :param directory: the directory of its log and of the files that the executors write.
    """

    def __init__(self, spark: str, directory: Path) -> None:
        self._log = directory / "driver.log"
        directory.mkdir(parents=True, exist_ok=True)
        self._environment = {"AIRFLOW_CONN_SPARK_DEFAULT": spark}
        own = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        if "local-cluster" in spark:
            own["SPARK_HOME"] = str(_home_of_links(directory / "spark"))
        with open(self._log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.cluster"], env={**os.environ, **self._environment, **own}, cwd=ROOT,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
            )  # fmt: skip
        self._answers: Queue[str] = Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)

    def start(
        self,
        make: Any,
        options: dict[str, Any],
        run_id: str,
        fault: tuple[str, Path] | None = None,
        *,
        spark: str | None = None,
    ) -> None:
        """Begin an attempt; :meth:`result` waits for its end.

        :param fault: the fault of the first task that reaches a point, and the file that notes it.
        :param spark: the Spark connection from here on; default: the previous connection. The session of a cluster ends with its
            window.
        """
        connections = {name: value for name, value in os.environ.items() if name.startswith("AIRFLOW_CONN_")}
        if spark is not None:
            self._environment["AIRFLOW_CONN_SPARK_DEFAULT"] = spark
        order = (make, options, run_id, {**connections, **self._environment}, fault)
        assert self.process.stdin is not None
        self.process.stdin.write(pickle.dumps(order).hex() + "\n")
        self.process.stdin.flush()

    def result(self, seconds: float = 400) -> dict[str, Any]:
        """Return the report of the attempt.

        :raises AssertionError: the attempt failed.
        """
        answer = self._answer(seconds)
        assert "report" in answer, f"{answer['error']}:\n{processes.read_tail(self._log, 40)}"
        return answer["report"]

    def error(self, seconds: float = 400) -> str:
        """Return the class and the message of the error that ended the attempt.

        :raises AssertionError: the attempt succeeded.
        """
        answer = self._answer(seconds)
        assert "error" in answer, answer
        return answer["error"]

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(self._answers.get(timeout=seconds))
        except Empty:
            raise AssertionError(f"no answer after {seconds} s:\n{processes.read_tail(self._log, 40)}") from None
        return answer

    def _listen(self) -> None:
        assert self.process.stdout is not None
        # Spark writes there too.
        for line in self.process.stdout:
            if line.startswith(_ANSWER):
                self._answers.put(line[len(_ANSWER) :])
        self._answers.put(json.dumps({"error": "the driver has ended"}))


def _home_of_links(home: Path) -> Path:
    """Return a copy of Spark's home, made of links: executors of `local-cluster` write below Spark's home."""
    import pyspark

    home.mkdir(parents=True)
    for entry in Path(pyspark.__file__).parent.iterdir():
        (home / entry.name).symlink_to(entry)
    return home


@contextlib.contextmanager
def standalone(directory: Path) -> Iterator[str]:
    """Start a master and two workers of one core, each on its own loopback address: Spark runs a task's copy only on another
    host.

    Executors find no module of this environment, unless the Python that the driver names has it, or :data:`OURS` names its
    directory. A worker's work folder is ``directory``/1 or 2, and the folder ``bin`` below that is the first entry of its
    executors' PATH. A worker that receives SIGPWR is decommissioned.

    :return: the master's URL.
    """
    import pyspark

    start = Path(pyspark.__file__).parent / "bin" / "spark-class"
    (port,) = processes.find_free_ports(1)
    url = f"spark://127.0.0.1:{port}"
    supervisor = processes.SupervisorClient("Spark")
    try:
        for name, host, work in (
            ("master.Master", "127.0.0.1", None),
            ("worker.Worker", "127.0.0.1", directory / "1"),
            ("worker.Worker", "127.0.0.2", directory / "2"),
        ):
            arguments = ["--port", str(port)]
            environment = {
                **os.environ,
                "SPARK_LOCAL_IP": host,
                "SPARK_DAEMON_MEMORY": "256m",
                "SPARK_DAEMON_JAVA_OPTS": f"{quick_jvm()} -Dspark.decommission.enabled=true",
            }
            environment.pop("PYTHONPATH", None)
            if work is not None:
                environment["PATH"] = os.pathsep.join([str(work / "bin"), environment["PATH"]])
                arguments = ["--cores", "1", "--memory", "1g", "--work-dir", str(work), url]
            command = [start, f"org.apache.spark.deploy.{name}", "--host", host, "--webui-port", "0", *arguments]
            supervisor.spawn(command, log=directory / "cluster.log", env=environment)
        log = directory / "cluster.log"
        # One that is not answered at once registers again.
        registered = re.compile(r"Registering worker (127[.\d]+)")
        up = processes.wait_until(lambda: len(set(registered.findall(log.read_text()))) == 2, 300, every=0.1)
        assert up, processes.read_tail(log, 30)
        yield url
    finally:
        supervisor.close()


def _launch_jvm() -> None:
    """Start the JVM of all applications, with the settings that need its start: they are defaults of every later application."""
    from pyspark import SparkConf, SparkContext

    extra = json.loads(os.environ["AIRFLOW_CONN_SPARK_DEFAULT"])["extra"]
    conf = SparkConf(loadDefaults=False)
    for name in ("spark.driver.memory", "spark.driver.extraJavaOptions"):
        conf.set(name, extra[name])
    SparkContext._ensure_initialized(conf=conf)


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    for number, line in enumerate(sys.stdin):
        make, options, run_id, environment, fault = pickle.loads(bytes.fromhex(line))
        os.environ.update(environment)
        if number == 0:
            _launch_jvm()
        try:
            with fault_in_tasks(*fault) if fault else contextlib.nullcontext():
                answer = {"report": run(make, options, run_id)}
        except Exception as error:
            logging.exception("The attempt failed")
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(_ANSWER + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
