"""Running an operator: in this process, on a warm Spark session, or in a separate process that may be killed or stopped.

In each case, the operator and the servers are real. Only Airflow's scheduler is left out (tests/with_airflow has it).
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import sys
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from airflow_kafka_spark import faults
from tests.support import engine, spark_daemon, warm, workers
from tests.support.zygote import Forked

ROOT = Path(__file__).parents[2]


class OutletEvents(defaultdict[Any, SimpleNamespace]):
    """The events of outlets, by their URI: assets of Airflow 3.0 cannot be keys."""

    def __getitem__(self, outlet: Any) -> SimpleNamespace:
        return super().__getitem__(getattr(outlet, "uri", outlet))


@contextlib.contextmanager
def fails_at(point: str) -> Iterator[None]:
    """Raise an error at a point of a window, which ends the block."""
    import pytest  # attempts in processes of their own import this module, too

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match=f"fault injected at {point}"):
        patch.setenv(faults.FAULT, f"{point}:raise")
        yield


def context(
    run_id: str,
    *,
    dag_id: str = "dag",
    task_id: str = "task",
    interval: tuple[datetime, datetime] | None = None,
    max_tries: int = 0,
    try_number: int = 0,
    clears: int | None = None,
    map_index: int = -1,
) -> dict[str, Any]:
    """Return the part of Airflow's context that a window needs.

    :param interval: the DAG run's data interval.
    :param max_tries: higher after the task was cleared, unchanged in a retry.
    :param try_number: of the attempt; 0 if the test does not depend on it.
    :param clears: how often tasks of the DAG run were cleared.
    """
    start, end = interval or (None, None)
    place = {"dag_id": dag_id, "run_id": run_id, "task_id": task_id, "map_index": map_index}
    ti = SimpleNamespace(**place, max_tries=max_tries, try_number=try_number)
    dag_run = SimpleNamespace(data_interval_start=start, data_interval_end=end, clear_number=clears)
    return {"ti": ti, "dag_run": dag_run, "outlet_events": OutletEvents(SimpleNamespace)}


@dataclass
class Counters:
    """Airflow's counters of one task instance, changed as Airflow 3.3 changes them (``schedule_tis``, ``clear_task_instances``).

    :param retries: the ``retries`` of the task.
    """

    retries: int = 0
    number: int = 0
    allowed: int = -1
    clears: int = 0

    def __post_init__(self) -> None:
        self.allowed = self.retries

    @property
    def may_retry(self) -> bool:
        return self.number <= self.allowed and self.retries > 0

    def attempt(self) -> dict[str, int]:
        """Begin the next try, and return the arguments of :func:`context` for it."""
        self.number += 1
        return {"try_number": self.number, "max_tries": self.allowed, "clears": self.clears}

    def clear(self, *, retries: int | None = None) -> None:
        """Clear the task, which is not running.

        :param retries: a new value of ``retries`` that the DAG author has set; None keeps the value.
        """
        self.retries = self.retries if retries is None else retries
        self.allowed = self.number + self.retries
        self.clears += 1


def run(make: Any, options: dict[str, Any], run_id: str, **facts: Any) -> dict[str, Any]:
    """Build the operator and execute it in this process, as one task attempt of the run ``run_id``.

    :param facts: further arguments of :func:`context`.
    """
    return make(**options).execute(context(run_id, **facts))


class Victim:
    """A task attempt in a separate process session, which dies or stops at a named point.

    :param make: a module-level function that builds the operator.
    :param options: its arguments, picklable.
    :param fault: ``<point>`` or ``<point>:stop``; None runs to the end.
    :param once: the file that notes that the fault has fired.
    :param jvm: True if its Spark is a JVM that dies with it, and not an existing engine (``tests.support.engine``).
    :param alone: True if its engine must not have this process's session, so that it may be frozen.
    :param facts: further arguments of :func:`context`.
    """

    def __init__(
        self,
        make: Any,
        options: dict[str, Any],
        run_id: str,
        *,
        fault: str | None,
        once: Path,
        jvm: bool = True,
        alone: bool = False,
        **facts: Any,
    ) -> None:
        self.once = once
        self._engine = None if jvm else engine.lend(alone=alone)
        self._end_of_engine = ""
        self._is_warm = warm.is_on()
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "AIRFLOW__CORE__UNIT_TEST_MODE": "True"}
        if fault:
            env |= {faults.FAULT: fault, faults.ONCE: str(once)}
        if self._engine is not None:
            env |= self._engine.environment
        payload = pickle.dumps((make, options, run_id, facts)).hex()
        self.log = once.with_suffix(".log")
        self.process = Forked(payload, env, self.log)

    @property
    def fired(self) -> bool:
        return self.once.exists()

    def wait(self, seconds: float = 240) -> int:
        """Wait until the process has ended, by itself or by the fault; return its return code."""
        code = self.process.wait(seconds)
        self._part()
        return code

    def wait_stopped(self, seconds: float = 240) -> None:
        """Wait until the process, or a worker of it, has stopped itself."""
        assert self.stops(seconds), f"it ended instead of stopping:\n{self.tail()}"

    def stops(self, seconds: float = 240) -> bool:
        """Return True once the process, or a worker of it, has stopped itself; False if the process has ended instead."""
        import time

        deadline = time.monotonic() + seconds
        while not (self.fired and any(workers.state(pid) in "Tt" for pid in self._session() | self._warm_session())):
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < deadline, f"it did not stop:\n{self.tail()}"
            time.sleep(0.02)
        return True

    def freeze(self) -> None:
        """Stop all processes of the attempt, with its JVM and workers. A warm Spark process keeps running: then only the task
        hangs.
        """
        assert self._engine is None or not self._engine.is_own, "this process's own Spark would be frozen: `alone=True`"
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Continue all processes that have stopped, with workers in a warm Spark process."""
        self._signal(signal.SIGCONT)
        for pid in self._warm_session():
            workers.wake(pid)

    def end(self) -> None:
        """Kill all processes that are left."""
        self._signal(signal.SIGKILL)
        self.process.wait(120)
        self._part()

    def result(self) -> dict[str, Any]:
        """Return the report of an attempt that has succeeded."""
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("REPORT ")]
        assert lines, self.tail()
        return json.loads(lines[-1][len("REPORT ") :])

    def tail(self) -> str:
        """Return the end of the log, and why the engine has ended if it has."""
        return self.log.read_text()[-3000:] + self._end_of_engine

    def _part(self) -> None:
        if self._engine is not None:
            self._engine.give_back()
            self._end_of_engine = self._engine.end
            self._engine = None
        if self._is_warm:
            spark_daemon.set_variables(os.environ[spark_daemon.FILE], {})

    def _signal(self, number: int) -> None:
        spared = self._engine.kept if self._engine is not None and number == signal.SIGKILL else set()
        for pid in self._session() - spared:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _session(self) -> set[int]:
        """Return all processes of the attempt: Python workers have their own process group, but the session of their JVM."""
        lent = set() if self._engine is None else workers.session(self._engine.pid)
        return workers.session(self.process.pid) | lent

    def _warm_session(self) -> set[int]:
        """Return the processes of the warm Spark that the attempt uses; they outlive the attempt."""
        jvm = warm.jvm_of(self.log) if self._is_warm else None
        try:
            return set() if jvm is None else workers.session(os.getsid(jvm))
        except ProcessLookupError:
            return set()


@dataclass(kw_only=True)
class Attempts(ABC):
    """A pipeline under test, and the task attempts at it.

    :cvar make: a module-level function that builds the operator of :attr:`arguments`.
    :param directory: the directory for logs of attempts in separate processes, and for notes that a fault has fired.
    :param options: further arguments of every attempt.
    """

    make: ClassVar[Callable[..., Any]]

    directory: Path
    options: dict[str, Any] = field(default_factory=dict)
    _victims: list[Victim] = field(default_factory=list)

    @property
    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the operator, :attr:`options` included."""

    def run(self, run_id: str = "run1", *, facts: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        """Run one task attempt in this process, and return its report.

        :param facts: further arguments of :func:`context`.
        """
        return run(self.make, {**self.arguments, **options}, run_id, **facts or {})

    def victim(
        self,
        run_id: str = "run1",
        *,
        fault: str | None,
        facts: dict[str, Any] | None = None,
        jvm: bool = False,
        alone: bool = False,
        **options: Any,
    ) -> Victim:
        """Start one task attempt in a separate process, which dies or stops at ``fault``.

        :param jvm: as for :class:`Victim`.
        :param alone: as for :class:`Victim`.
        """
        once = self.directory / f"fault-{len(self._victims)}"
        arguments = {**self.arguments, **options}
        self._victims.append(Victim(self.make, arguments, run_id, fault=fault, once=once, jvm=jvm, alone=alone, **facts or {}))
        return self._victims[-1]

    @property
    def count(self) -> int:
        """Return the number of attempts in separate processes so far."""
        return len(self._victims)

    def tails(self, since: int) -> list[str]:
        """Return the ends of the logs of these attempts, without the first ones.

        :param since: the number of attempts that are left out.
        """
        return [victim.tail() for victim in self._victims[since:]]

    def end_victims(self) -> None:
        for victim in self._victims:
            victim.end()
