"""Decide which tests run, in which order, and the test process that runs each."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# Fixtures that start a server or a JVM, and directories whose tests start servers themselves.
SERVERS = {"kafka", "mariadb", "postgres", "registry", "several_brokers", "site", "spark"}
SERVER_TESTS = (
    "tests/faults/",
    "tests/soak/",
    "tests/testing/",
    "tests/with_airflow/",
    "tests/test_demo.py",
    "tests/test_package.py",
)

# Tests that take long come first, so that no process is left alone with one at the end.
LONG = (
    "tests/with_airflow/",
    "tests/test_demo.py",
    "tests/soak/",
    "tests/transforms/",
    "tests/faults/",
    "tests/control/",
    "tests/operators/",
    "tests/sources/",
    "tests/sinks/",
)

# Directories and files whose tests share a server, an Airflow or a venv of their own. One test process runs all of each.
TOGETHER = {
    "tests/with_airflow", "tests/transforms",
    "tests/test_package.py", "tests/testing/test_embedded_kafka.py",
    "tests/triggers/test_base.py",
    "tests/faults/test_broker.py", "tests/faults/test_cluster.py",
    "tests/faults/test_three_brokers.py", "tests/faults/test_warm_spark.py",
    "tests/formats/avro/test_avro_write.py", "tests/formats/json/test_json_spark.py",
    "tests/hooks/test_connections.py",
    "tests/hooks/kafka/test_hook.py", "tests/hooks/kafka/test_security.py",
    "tests/operators/test_log_truncated.py", "tests/operators/test_rights.py",
    "tests/operators/test_spark_connect.py",
    "tests/operators/visibility/test_operator.py",
    "tests/sinks/files/test_readers.py", "tests/sinks/lake/test_readers.py",
    "tests/verification",
}  # fmt: skip

# Files of one directory that share a Spark with another time zone (`jdbc_spark`). One test process runs both.
OTHER_ZONE = ("tests/sources/jdbc/test_mysql.py", "tests/sources/jdbc/test_reading.py")

# Tests with an attempt that sleeps while another one works: each needs a second engine (tests/support/engine.py), which is a JVM.
# One test process runs all of them.
TWO_ENGINES = (
    "tests/soak/",
    "tests/faults/test_zombie.py",
    "tests/faults/test_dead_letters.py::test_a_zombie_",
    "tests/faults/test_kafka_to_kafka.py::test_a_zombie_",
    "tests/faults/test_publish.py::test_a_zombie_",
    "tests/faults/test_publish.py::test_a_late_task_",
    "tests/sources/postgres_cdc/test_faults.py::test_a_copy_of_a_table_equals_it_after_every_drain_",
)

# Tests with a schema registry, which takes more than four seconds of CPU time to start, and the others of a directory that starts
# MariaDB for one of them.
WITH_REGISTRY = (
    "tests/operators/test_avro_write.py",
    "tests/operators/test_formats.py",
    "tests/operators/test_schema_change.py",
    "tests/operators/test_source_tolerance.py",
    "tests/operators/test_wire_formats.py",
    "tests/sources/mysql_cdc/",
    "tests/sources/postgres_cdc/test_registry_formats.py",
    "tests/sources/postgres_cdc/test_topics.py",
    "tests/hooks/test_schema_registry.py",
)

# Tests that use neither the broker nor the Spark of their test process: pure functions, databases, and servers that a test starts
# for itself. The last test process runs them beside the others, which often wait for a broker or for Spark. Long ones come first.
WITHOUT_BROKER = (
    "tests/testing/",
    "tests/sinks/test_contract.py",
    "tests/test_s3.py",
    "tests/hooks/spark/test_class_archive.py",
    "tests/hooks/spark/test_jars.py",
    "tests/test_package.py",
    "tests/sinks/postgres/",
    "tests/sinks/files/test_sink.py",
    "tests/verification/",
    "tests/windows/",
    "tests/formats/json/test_json_paths.py",
    "tests/formats/csv/test_csv.py",
    "tests/formats/",
    "tests/sources/jdbc/test_windows.py",
    "tests/sources/jdbc/test_validation.py",
    "tests/sinks/lake/test_lake.py",
    "tests/sinks/delta/test_sink.py",
    "tests/sinks/iceberg/test_sink.py",
    "tests/sources/postgres_cdc/test_events.py",
    "tests/sources/postgres_cdc/test_pgoutput.py",
    "tests/sources/postgres_cdc/test_validation.py",
    "tests/hooks/kafka/test_partitioner.py",
    "tests/hooks/spark/test_hook.py",
    "tests/mutants/",
    "tests/jobs/",
    "tests/test_docs.py",
    "tests/test_signatures.py",
)

# Tests that wait more than they work, for timeouts of brokers above all. The last test process but one runs them beside the
# others: in several processes at the same time they leave the cores idle. Those that take longest come first.
WAITING = (
    "tests/sensors/",
    "tests/operators/test_log_truncated.py",
    "tests/faults/test_three_brokers.py",
    "tests/triggers/",
    "tests/hooks/kafka/",
    "tests/faults/test_broker.py",
    "tests/operators/visibility/test_operator.py",
    "tests/ledger/",
)

# From this number of test processes on, the last one runs the tests without a broker, the one before it those that wait.
SEVERAL = 4


def wants_extended(config: pytest.Config) -> bool:
    """Return True if tests run that are marked ``extended``: with ``--extended``, or if the command line names single tests or
    this marker."""
    named = any("::" in argument for argument in config.args)
    return bool(config.option.extended or "extended" in config.option.markexpr or named)


def extended(*values: Any) -> Any:
    """Return a value of a parameter, or the values of several, with which a test is an extended one."""
    return pytest.param(*values, marks=pytest.mark.extended)


def place(nodeid: str, starts: tuple[str, ...]) -> int:
    """Return the number of the first of `starts` with which a test's id begins; ``len(starts)`` if none does."""
    return next((number for number, start in enumerate(starts) if nodeid.startswith(start)), len(starts))


def queue_of(nodeid: str) -> str:
    """Return the name of the queue of a test, by its id: ``"without broker"``, ``"waiting"`` or ``"others"``."""
    if place(nodeid, WITHOUT_BROKER) < len(WITHOUT_BROKER):
        return "without broker"
    return "waiting" if place(nodeid, WAITING) < len(WAITING) else "others"


def order(items: list[pytest.Item]) -> None:
    """Sort tests in place: those that need a broker or Spark before those that do not, long ones first in each group."""
    places: dict[str, tuple[int, int, int]] = {}
    for item in items:
        if (file := item.nodeid.partition("::")[0]) not in places:
            alone = queue_of(file) == "without broker"
            places[file] = (place(file, WITHOUT_BROKER) if alone else -1, place(file, WAITING), place(file, LONG))
    items.sort(key=lambda item: places[item.nodeid.partition("::")[0]])


class Together(LoadScopeScheduling):  # type: ignore[misc]
    """Give each test to the next free process, and keep those tests together that :data:`TOGETHER`, :data:`TWO_ENGINES`,
    :data:`WITH_REGISTRY` and :data:`OTHER_ZONE` name.

    Of :data:`SEVERAL` processes or more, the last one runs :data:`WITHOUT_BROKER`: its tests keep the cores busy while others
    wait, and it starts neither a broker nor Spark. The process before it runs :data:`WAITING`. A process that has finished its
    own tests takes tests of the others.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        groups = (*TWO_ENGINES, *WITH_REGISTRY, *OTHER_ZONE)
        lists = (*SERVER_TESTS, *LONG, *TOGETHER, *groups, *WITHOUT_BROKER, *WAITING)
        moved = [name for name in lists if not (config.rootpath / name.partition("::")[0]).exists()]
        assert not moved, f"{Path(__file__).name} names what is not there (any more): {moved}"
        config.option.loadscopereorder = False  # in the order of `order`
        super().__init__(config, log)
        self._queues: dict[str, deque[str]] = {}

    def _split_scope(self, nodeid: str) -> str:
        for group in (TWO_ENGINES, WITH_REGISTRY, OTHER_ZONE):
            if place(nodeid, group) < len(group):
                return group[0]
        file = nodeid.partition("::")[0]
        directory = file.rpartition("/")[0]
        return directory if directory in TOGETHER else file if file in TOGETHER else nodeid

    def _assign_work_unit(self, node: Any) -> None:
        if not self._queues:
            self._queues = {name: deque() for name in ("others", "waiting", "without broker")}
            for scope in self.workqueue:
                self._queues[queue_of(scope)].append(scope)
        own = "others"
        if self.numnodes >= SEVERAL:
            own = {self.numnodes - 1: "without broker", self.numnodes - 2: "waiting"}.get(int(node.gateway.id[2:]), own)
        for queue in (self._queues[own], *self._queues.values()):
            while queue:
                if (scope := queue.popleft()) in self.workqueue:
                    self.workqueue.move_to_end(scope, last=False)
                    return super()._assign_work_unit(node)
        super()._assign_work_unit(node)  # what a process that has died left

    def remove_node(self, node: Any) -> str | None:
        """Return the test during which a process died, or None, and give the others what it has left.

        The class above gives out finished tests of that process once more, too. A process that is given only finished tests does
        not report a test again, so it is given no others, and the run never ends.
        """
        units = self.assigned_work[node]
        fatal = next((test for tests in units.values() for test, finished in tests.items() if not finished), None)
        left = {unit: [test for test in tests if not tests[test] and test != fatal] for unit, tests in units.items()}
        self.assigned_work[node] = {unit: dict.fromkeys(tests, False) for unit, tests in left.items() if tests}
        super().remove_node(node)
        return fatal
