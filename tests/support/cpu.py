"""Measure the CPU seconds of each test, by kind of process (``make test ARGS="--measure-cpu build/cpu.json"``).

A thread of pytest's first process looks at all processes of the run twice a second. What a process used between two looks
counts for the test that its test process ran at that time, so that a shared server counts for the tests that use it. What a
process used after the last look, or one that was never seen, counts as "ended" when its parent has waited for it. The CPU seconds
of the machine are measured, too. Test processes are needed (``-n 1`` for a single file).
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
    """A process of the run: its kind, the test process it belongs to, and what the last look has shown: its CPU seconds, those
    of the children that it has waited for, and its parent.
    """

    kind: str = ""
    worker: str = ""
    seconds: float = 0.0
    waited: float = 0.0
    parent: int = 0


@dataclass(eq=False)
class CpuMeter:
    """Look at the processes of the run until :meth:`write`; a plugin of pytest's first process."""

    file: Path
    processes: dict[tuple[int, str], Process] = field(default_factory=dict)
    running: dict[int, Process] = field(default_factory=dict)
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
        now, before, self.running = time.time(), self.running, {}
        waited: dict[int, float] = {}
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            try:
                stat = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
                parent, begun = int(stat[1]), stat[19].decode()
                known = self.processes.setdefault((pid, begun), Process())
                # One that is forked becomes another with `exec`. Those outside of the run stay outside, except test processes.
                if not known.kind or (known.kind == "other Python" and (known.worker or parent == os.getpid())):
                    self._meet(pid, known, before.get(parent) or self.running.get(parent) or known)
            except OSError:
                continue
            self.running[pid] = known
            own, of_children = ((int(stat[n]) + int(stat[n + 1])) / TICKS for n in (11, 13))
            self._count(now, known.worker, known.kind, own - known.seconds)
            waited[pid] = of_children - known.waited
            known.seconds, known.waited, known.parent = own, of_children, parent
        # What ended processes had used until the last look, and had waited for, was counted before.
        ended = {pid: known for pid, known in before.items() if self.running.get(pid) is not known}
        for known in ended.values():
            parent = known.parent
            while parent in ended:  # it has waited for this one, and another for both
                parent = ended[parent].parent
            if parent in waited:
                waited[parent] -= known.seconds + known.waited
        for pid, seconds in waited.items():
            self._count(now, self.running[pid].worker, "ended", seconds)

    def _count(self, now: float, worker: str, kind: str, seconds: float) -> None:
        if worker and seconds > 0:
            self.used.append((now, worker, kind, seconds))

    def _meet(self, pid: int, process: Process, parent: Process) -> None:
        """Find out the kind of a process, and its test process."""
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        variables = environment.split(b"\0")
        own = bool(self.run) and self.run in variables
        worker = next((v.partition(b"=")[2].decode() for v in variables if own and v.startswith(WORKER)), "")
        if not worker and b"import sys;exec(eval(sys.stdin.readline()))" in command:
            worker, kind = self._number(pid), "test processes"
        else:
            program = command.partition(b"\0")[0]
            known_by = [*(name for part, name in PROGRAMS if part in program), *(name for part, name in KINDS if part in command)]
            kind = known_by[0] if known_by else "other Python"
        # PostgreSQL, Airflow and browsers write their titles over their environment.
        process.worker = worker or process.worker or parent.worker
        self.starts[kind] += bool(process.worker) and process.kind != kind
        process.kind = kind

    def _number(self, pid: int) -> str:
        """Return the name of a test process: pytest-xdist starts them in this order."""
        mine = str(os.getpid())
        children = Path("/proc", mine, "task", mine, "children").read_text().split()
        found = [child for child in children if b"sys.stdin.readline" in Path("/proc", child, "cmdline").read_bytes()]
        return f"gw{sorted(map(int, found)).index(pid)}" if str(pid) in found else ""

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
