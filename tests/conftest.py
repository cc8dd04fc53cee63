"""Servers that the whole run shares, and the environment that Airflow and Spark need when they are first imported."""

from __future__ import annotations

import os
import sys
import tempfile

os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="airflow-kafka-spark-home-")
os.environ["AIRFLOW__CORE__UNIT_TEST_MODE"] = "True"
os.environ["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
os.environ["PYSPARK_PYTHON"] = sys.executable

# Hundreds of processes import the same modules: where Python shall leave no bytecode beside them, it is kept elsewhere.
# Before Airflow is imported, which takes four seconds to compile.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    from airflow_kafka_spark.hooks.spark.jars import find_cache_directory

    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(find_cache_directory() / "bytecode")
    sys.dont_write_bytecode = False

import contextlib
import gc
import importlib.metadata
import importlib.util
import itertools
import shutil
import socket
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from airflow_kafka_spark.testing import EmbeddedKafka, EmbeddedPostgres
from tests.support import crashes, distribution
from tests.support.cpu import CpuMeter
from tests.support.progress import LongTests
from tests.support.registry import EmbeddedRegistry

# Their assertions show values, as those of test modules do.
pytest.register_assert_rewrite("tests.formats.contract", "tests.sinks.contract", "tests.sources.contract")

_RUN = uuid.uuid4().hex[:6]
_counter = itertools.count(1)

# How long an example takes says more of the machine than of the code. `make test` tries the same examples each time, so that a
# change is judged by what it changes; `make soak` looks for new ones first (`--hypothesis-profile=search`).
settings.register_profile("search", settings(deadline=None, suppress_health_check=[HealthCheck.too_slow]))
settings.register_profile("repeat", settings(settings.get_profile("search"), derandomize=True))
settings.load_profile("repeat")


# Processes that are started below this one look for garbage less often.
_AT_START = str(Path(__file__).with_name("support") / "at_start")
if _AT_START not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_AT_START, os.environ.get("PYTHONPATH")]))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--measure-cpu", metavar="FILE", help="write the CPU seconds of each test, by kind of process, into FILE")
    parser.addoption("--extended", action="store_true", help="run the tests that are marked `extended`, too")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if (file := config.getoption("measure_cpu")) and not os.environ.get("PYTEST_XDIST_WORKER"):
        meter = CpuMeter(config.invocation_params.dir / file)
        config.pluginmanager.register(meter)
        meter.start()

    crashes.keep_crashes()
    if not os.environ.get("PYTEST_XDIST_WORKER"):
        config.pluginmanager.register(LongTests())

    from airflow_kafka_spark.hooks.kafka import requests as kafka_requests
    from airflow_kafka_spark.ledger import topic as ledger_topic

    # A single broker knows at once which topics are missing. Every new ledger is missing at first, and was asked for over two
    # seconds.
    kafka_requests.SPREAD_SECONDS = 0.2
    # Hundreds of tests have a separate ledger. Each partition costs the broker files, and each read a request.
    ledger_topic.PARTITIONS = 2

    # Nothing that is imported for the tests is garbage, and looking for some takes a fifth of the time of collecting them.
    gc.disable()
    if getattr(config.option, "numprocesses", None) and not config.option.collectonly:
        if config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.markexpr:
            _make_archives_meanwhile()
        _compile_once(config.args)

    # pytest-rerunfailures reports each test to the first process in small messages, which TCP would hold back for 40 ms.
    if (connection := getattr(getattr(config, "failures_db", None), "sock", None)) is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _make_archives_meanwhile() -> None:
    """Begin to make the archives of classes, if they are missing, while this process compiles on another core and tests are
    collected. Test processes wait for them (:func:`_prepare_spark`)."""
    maker = subprocess.Popen(
        [sys.executable, "-m", "tests.support.archive"], cwd=Path(__file__).parents[1], start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    # The process is not waited for; setting the return code suppresses Python's warning about that.
    maker.returncode = 0


def _compile_once(tests: list[str]) -> None:
    """Compile the modules that the tests import, if they are not compiled yet: otherwise all test processes would do it."""
    import airflow

    if not os.path.exists(importlib.util.cache_from_source(airflow.__file__)):
        collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *tests]
        subprocess.run(collect, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave extended tests out unless they are asked for, mark the tests that need servers, forbid a second try after a kill, and
    put long tests first."""
    if not distribution.wants_extended(config):
        extended = [item for item in items if item.get_closest_marker("extended")]
        config.hook.pytest_deselected(items=extended)
        items[:] = [item for item in items if not item.get_closest_marker("extended")]
    for item in items:
        if distribution.SERVERS.intersection(getattr(item, "fixturenames", ())) or item.nodeid.startswith(
            distribution.SERVER_TESTS
        ):
            item.add_marker(pytest.mark.servers)
        # The Makefile lets a few failed tests run twice. What is asserted after a kill is asserted once.
        if item.nodeid.startswith("tests/faults/"):
            item.add_marker(pytest.mark.flaky(reruns=0))
    distribution.order(items)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failed test at once: a whole run takes minutes, and reports failures only at its end."""
    if report.failed and not os.environ.get("PYTEST_XDIST_WORKER"):
        print(f"\n{report.nodeid} failed ({report.when})", file=sys.__stdout__, flush=True)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Prepare what every JVM of this run shares, unless the run needs no servers."""
    # What was imported and collected stays until the end: looking through it again and again takes a tenth of the time.
    gc.freeze()
    gc.enable()
    # After each 700 objects, as is Python's default, the rest takes twice the time.
    gc.set_threshold(50_000)
    if any(item.get_closest_marker("servers") for item in session.items) and not session.config.option.collectonly:
        _prepare_spark(several=bool(os.environ.get("PYTEST_XDIST_WORKER")))


def _prepare_spark(*, several: bool) -> None:
    """Let every Spark of this process start from an archive of its classes, know Kafka and the databases, and fork its Python
    workers from tests.support.spark_daemon. Any test may be the one that starts the JVM of the process.

    :param several: make a missing archive, which takes about twenty seconds and is worth it only if many JVMs follow.
    """
    from airflow_kafka_spark.errors import KafkaSparkError
    from airflow_kafka_spark.hooks.spark import jars
    from airflow_kafka_spark.sources.jdbc.postgres import DRIVER
    from tests.support import archive, engine, spark_daemon

    archive.use(make=several)
    os.environ[spark_daemon.FILE] = os.path.join(os.environ["AIRFLOW_HOME"], "worker-variables")
    options = ["--conf", "spark.python.daemon.module=tests.support.spark_daemon"]
    if importlib.metadata.version("pyspark").startswith("3."):
        # Spark 3 hands a worker to the next task that was killed while it was idle, as the engine does between two attempts.
        options += ["--conf", "spark.python.worker.reuse=false"]
    found = []
    for package in (jars.find_spark_kafka_connector(), DRIVER):
        with contextlib.suppress(KafkaSparkError):  # without Java, a network or this release: the tests that need it say so
            found += jars.resolve_jars([package], exclude_bundled=True)
    if found:
        options = ["--jars", ",".join(map(str, found)), *options]
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"{' '.join(options)} pyspark-shell"
    engine.use_here()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the results of the soak program, and the failures of tests that passed when they were repeated."""
    for report in (*terminalreporter.stats.get("passed", ()), *terminalreporter.stats.get("failed", ())):
        for line in (value for name, value in report.user_properties if name == "soak"):
            terminalreporter.line(line)
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"failed once: {report.nodeid}", sep="_")
        terminalreporter.line(str(report.longrepr))
    for worker, text in crashes.read_crashes().items():
        terminalreporter.section(f"crashed: {worker}", sep="_")
        terminalreporter.line(text)


def pytest_unconfigure() -> None:
    # pytest and Python look for garbage once more, in all that the tests have left: two seconds of each process.
    gc.freeze()
    shutil.rmtree(os.environ["AIRFLOW_HOME"], ignore_errors=True)
    if not os.environ.get("PYTEST_XDIST_WORKER"):
        shutil.rmtree(os.environ[crashes.DIRECTORY], ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return what gives each test to a process."""
    return distribution.Together(config, log)


@pytest.fixture(scope="session")
def kafka() -> Iterator[EmbeddedKafka]:
    """One broker for the whole run. A test that kills or pauses it restores it."""
    from airflow_kafka_spark.testing.kafka import JVM_OPTIONS
    from tests.support.archive import HUGE_PAGES

    with EmbeddedKafka(jvm_options=(*JVM_OPTIONS, HUGE_PAGES)) as server:
        yield server


@pytest.fixture
def several_brokers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the time in which several brokers may not yet know a new topic: missing topics are asked for again for so long."""
    monkeypatch.setattr("airflow_kafka_spark.hooks.kafka.requests.SPREAD_SECONDS", 1.0)


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    """One server for the whole run, without autovacuum: it might hold a lock when a test expects none."""
    # Tests drop their slots; a slot that remains would keep all WAL.
    log = {"wal_level": "logical", "max_replication_slots": 20, "max_wal_senders": 5, "max_prepared_transactions": 5}
    with EmbeddedPostgres(settings={"autovacuum": False, **log}) as server:
        yield server


@pytest.fixture(scope="session")
def registry() -> Iterator[EmbeddedRegistry]:
    """One schema registry for the whole run."""
    with EmbeddedRegistry() as server:
        yield server


@pytest.fixture
def unique() -> Callable[[str], str]:
    """Return a name that no other test uses: ``unique("orders")`` -> ``orders-3f2a1c-7``."""
    return lambda prefix: f"{prefix}-{_RUN}-{next(_counter)}"
