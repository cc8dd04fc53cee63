"""Measure the work of a benchmark: seconds, CPU seconds and memory; and print its results as tables."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Stopwatch:
    """Measures the seconds and the CPU seconds of a block, without those for which it is paused.

    :param read_cpu: returns the CPU seconds until now; default: those of this process.
    """

    def __init__(self, read_cpu: Callable[[], float] = time.process_time) -> None:
        self._read_cpu = read_cpu
        self._begun: tuple[float, float] | None = None
        self.seconds = 0.0
        self.cpu = 0.0

    def __enter__(self) -> Stopwatch:
        self._begun = time.monotonic(), self._read_cpu()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._begun is not None
        seconds, cpu = self._begun
        self.seconds += time.monotonic() - seconds
        self.cpu += self._read_cpu() - cpu
        self._begun = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not measure what happens within. Does nothing while the stopwatch does not run."""
        running = self._begun is not None
        if running:
            self.__exit__()
        try:
            yield
        finally:
            if running:
                self.__enter__()


def tree_cpu_seconds(pid: int | None = None) -> float:
    """Return the CPU seconds of a process, of its descendants, and of those of them that have ended and were waited for.

    :param pid: the process; default: this one.
    """
    import psutil

    process, seconds = psutil.Process(pid), 0.0
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # one that has just ended: its parent counts it
            times = one.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


SERVERS = "servers"


class SparkCpuMeter:
    """Counts the CPU seconds of this process, Spark's JVM and its Python workers, and apart from them those of the servers.

    Python workers end with a job, and their parent does not count them. The processes are therefore looked at all the time. The
    time that this takes is left out.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, int, float], float] = {}
        self._looking = 0.0
        threading.Thread(target=self._watch, name="cpu", daemon=True).start()

    def seconds(self) -> float:
        """Return the seconds until now, without those of the servers."""
        return sum(seconds for role, seconds in self.seconds_by_role().items() if role != SERVERS)

    def seconds_by_role(self) -> dict[str, float]:
        """Return the seconds until now of the driver (this process), the JVM, the workers and the embedded servers."""
        self._look()
        found = {"driver": -self._looking, "JVM": 0.0, "workers": 0.0, SERVERS: 0.0}
        for (role, _, _), seconds in list(self._seconds.items()):
            found[role] += seconds
        return found

    def _watch(self) -> None:
        while True:
            self._look()
            self._looking = time.thread_time()
            time.sleep(0.1)

    def _look(self) -> None:
        import psutil

        own = psutil.Process()
        found = {own: "driver"}
        for child in own.children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # one that has just ended, or is a zombie
                words = child.cmdline()
                if any("SparkSubmit" in word for word in words):
                    found |= {child: "JVM"} | dict.fromkeys(child.children(recursive=True), "workers")
                elif any(word.endswith("_supervisor.py") for word in words):
                    found |= dict.fromkeys(child.children(recursive=True), SERVERS)
        for process, role in found.items():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                self._seconds[role, process.pid, process.create_time()] = times.user + times.system


class MemorySampler:
    """Samples the resident memory of this process and of Spark's Python workers, in megabytes."""

    def __init__(self) -> None:
        self.driver = self.worker = 0.0
        self._begun = _resident(os.getpid())
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def driver_growth(self) -> float:
        """Megabytes of this process at most, beyond those at the beginning."""
        return max(0.0, self.driver - self._begun)

    def _sample(self) -> None:
        while not self._done.wait(0.05):
            self.driver = max(self.driver, _resident(os.getpid()))
            workers = (int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal() and _is_worker(p))
            self.worker = max([self.worker, *(_resident(pid) for pid in workers)])


def peak_memory() -> float:
    """Return the most memory that this process has held, in MB. What ``getrusage`` says includes the process that started it."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def _is_worker(process: Path) -> bool:
    try:
        return b"pyspark.worker" in (process / "cmdline").read_bytes()
    except OSError:
        return False


def _resident(pid: int) -> float:
    """Return the resident memory of a process in MB; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except (OSError, IndexError):
        return 0.0


def print_title(title: str) -> None:
    """Print the title of a benchmark."""
    print(f"\n## {title}\n", flush=True)


def print_turn(name: str, found: str, *, warming_up: bool) -> None:
    """Print what one turn of a contestant has taken.

    :param warming_up: True if the turn does not count.
    """
    print(f"   {name}: {found}{' (warming up)' if warming_up else ''}", flush=True)


class Table:
    """A table in Markdown, printed row by row, so that the results of a long benchmark can be seen while it runs.

    :param columns: the headings.
    :param texts: how many of the first columns hold text; the others hold numbers, and are aligned to the right.
    """

    def __init__(self, *columns: str, texts: int = 1) -> None:
        self._print(columns)
        self._print(["---"] * texts + ["---:"] * (len(columns) - texts))

    def row(self, *cells: str) -> None:
        """Print a row."""
        self._print(cells)

    def _print(self, cells: Iterable[str]) -> None:
        print(f"| {' | '.join(cells)} |", flush=True)
