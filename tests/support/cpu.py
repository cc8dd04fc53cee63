"""Measure the CPU seconds of each test, by kind of process (``make test ARGS="--measure-cpu build/cpu.json"``).

A thread of pytest's first process looks at all processes of the run twice a second. What a process used between two looks
counts for the test that its test process ran at that time, so that a shared server counts for the tests that use it. A process
that lives for less than half a second may be missed, and so is the end of any other: a fifth of the CPU seconds of a whole run.
So the CPU seconds of the machine are measured, too. Test processes are needed (``-n 1`` for a single file).
"""

from __future__ import annotations

import bisect
import json
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SECONDS = 0.5
TICKS = os.sysconf("SC_CLK_TCK")
WORKER, RUN = b"PYTEST_XDIST_WORKER=", b"PYTEST_XDIST_TESTRUNUID="

# Kinds of processes, by a part of the path of their program ...
PROGRAMS = (
    (b"chrom", "browsers"),
    (b"mariadb", "MariaDB"),
    (b"mysqld", "MariaDB"),
    (b"postgres", "PostgreSQL"),
)

# ... and those of Java and Python, by a part of their arguments.
KINDS = (
    (b"kafka.Kafka", "brokers"),
    (b"org.apache.spark", "Spark"),
    (b"java", "other JVMs"),
    (b"spark_daemon", "Python workers"),
    (b"python_daemon", "Python workers"),
    (b"pyspark", "Python workers"),
    (b"airflow", "Airflow"),
    (b"uvicorn", "Airflow"),
    (b"gunicorn", "Airflow"),
    (b"zygote", "attempts"),
)


@dataclass
class Process:
    """A process of the run: its kind, the test process it belongs to, and its CPU seconds at the last look."""

    kind: str
    worker: str
    seconds: float = 0.0


@dataclass(eq=False)
class CpuMeter:
    """Look at the processes of the run until :meth:`write`; a plugin of pytest's first process."""

    file: Path
    processes: dict[tuple[int, str], Process] = field(default_factory=dict)
    used: list[tuple[float, str, str, float]] = field(default_factory=list)
    tests: dict[str, list[tuple[float, float, str]]] = field(default_factory=lambda: defaultdict(list))
    starts: Counter[str] = field(default_factory=Counter)
    stop: threading.Event = field(default_factory=threading.Event)
    run: bytes = b""
    machine: tuple[float, float] = (0.0, 0.0)

    def start(self) -> None:
        """Begin to look."""
        self.machine = read_machine_seconds()
        threading.Thread(target=self._watch, daemon=True).start()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodeready(self, node: Any) -> None:
        """Note the id of this run, by which its processes differ from those of other runs on this machine."""
        self.run = RUN + node.workerinput["testrunuid"].encode()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note when which test process ran which part of a test."""
        node = getattr(report, "node", None)
        worker = "main" if node is None else node.gateway.id
        self.tests[worker].append((report.start, report.stop, report.nodeid))

    def pytest_sessionfinish(self) -> None:
        """Write what was measured."""
        self.stop.set()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self._result(), indent=1))

    def _watch(self) -> None:
        while not self.stop.wait(SECONDS):
            self._look()

    def _look(self) -> None:
        now = time.time()
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                stat = Path("/proc", pid, "stat").read_bytes().rpartition(b")")[2].split()
                known = self.processes.get((int(pid), stat[19].decode()))
                if known is None or known.kind == "other Python":  # one that is forked becomes another with `exec`
                    known = self._meet(pid, known)
                    self.processes[int(pid), stat[19].decode()] = known
            except OSError:
                continue
            # Its own time. What it has waited for was counted while that ran.
            seconds = (int(stat[11]) + int(stat[12])) / TICKS
            if known.worker and seconds > known.seconds:
                self.used.append((now, known.worker, known.kind, seconds - known.seconds))
                known.seconds = seconds

    def _meet(self, pid: str, known: Process | None) -> Process:
        environment = Path("/proc", pid, "environ").read_bytes()
        command = Path("/proc", pid, "cmdline").read_bytes()
        variables = environment.split(b"\0")
        own = bool(self.run) and self.run in variables
        worker = next((v.partition(b"=")[2].decode() for v in variables if own and v.startswith(WORKER)), "")
        if not worker and b"import sys;exec(eval(sys.stdin.readline()))" in command:
            worker, kind = self._number(pid), "test processes"
        else:
            program = command.partition(b"\0")[0]
            known_by = [*(name for part, name in PROGRAMS if part in program), *(name for part, name in KINDS if part in command)]
            kind = known_by[0] if known_by else "other Python"
        if known is None or known.kind != kind:
            self.starts[kind] += bool(worker)
        return Process(kind, worker, 0.0 if known is None else known.seconds)

    def _number(self, pid: str) -> str:
        """Return the name of a test process: pytest-xdist starts them in this order."""
        mine = str(os.getpid())
        children = Path("/proc", mine, "task", mine, "children").read_text().split()
        found = [child for child in children if b"sys.stdin.readline" in Path("/proc", child, "cmdline").read_bytes()]
        return f"gw{sorted(found, key=int).index(pid)}" if pid in found else ""

    def _result(self) -> dict[str, object]:
        tests: dict[str, Counter[str]] = defaultdict(Counter)
        for kind, nodeid, seconds in self._assigned():
            tests[nodeid][kind] += seconds
            tests[nodeid]["all"] += seconds
        spent: Counter[str] = Counter()
        for parts in self.tests.values():
            for begun, ended, nodeid in parts:
                spent[nodeid] += ended - begun
        kinds = sum((Counter(found) for found in tests.values()), Counter())
        busy, idle = (now - before for now, before in zip(read_machine_seconds(), self.machine, strict=True))
        machine = {"CPU seconds": round(busy), "cores busy": round(busy / (busy + idle), 2)}
        rounded = {name: {kind: round(value, 2) for kind, value in found.items()} for name, found in tests.items()}
        return {"machine": machine, "kinds": kinds, "starts": self.starts, "seconds": spent, "tests": rounded}

    def _assigned(self) -> Iterator[tuple[str, str, float]]:
        """Return kind, test and seconds of each measured time."""
        parts = {worker: sorted(found) for worker, found in self.tests.items()}
        for moment, worker, kind, seconds in self.used:
            at = bisect.bisect(parts.get(worker, []), (moment - SECONDS / 2, 0.0, ""))
            yield kind, parts[worker][at - 1][2] if at else "before the first test", seconds


def read_machine_seconds() -> tuple[float, float]:
    """Return the CPU seconds of all processes of the machine, and those in which its cores were idle, since its start."""
    # user, nice, system, idle, iowait, irq, softirq, steal; the rest is part of these.
    ticks = [int(word) / TICKS for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, idle


def show(file: Path) -> None:
    """Print a measurement: by kind, by directory, and the tests that used most."""
    found = json.loads(file.read_text())
    print("machine:", found["machine"])
    print({kind: round(value) for kind, value in found["kinds"].items()}, found["starts"])
    for depth, most in ((2, 40), (3, 60), (9, 120)):
        groups: dict[str, Counter[str]] = defaultdict(Counter)
        for nodeid, kinds in found["tests"].items():
            path, _, name = nodeid.partition("::")
            group = "/".join(path.split("/")[:depth]) + (f"::{name}" if depth == 9 else "")
            groups[group].update(kinds)
            groups[group]["tests"] += 1
            groups[group]["wall"] += found["seconds"].get(nodeid, 0)
        print()
        for group, kinds in sorted(groups.items(), key=lambda item: -item[1]["all"])[:most]:
            parts = ", ".join(f"{kind} {value:.0f}" for kind, value in kinds.most_common() if kind != "all" and value >= 0.5)
            print(f"{kinds['all']:7.1f}  {group}: {parts}")


if __name__ == "__main__":
    import sys

    show(Path(sys.argv[1]))
