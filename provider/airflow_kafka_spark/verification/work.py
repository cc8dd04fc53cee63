"""The work of a verification: statements side by side, repeated where a server does not answer; and its progress."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import TypeVar

from airflow_kafka_spark.errors import KafkaSparkError, SinkUnavailable, SourceUnavailable

log = logging.getLogger(__name__)

A = TypeVar("A")
B = TypeVar("B")

PATIENCE = (1.0, 5.0, 30.0)
"""Seconds to wait before a statement is repeated whose server did not answer."""
LOG_SECONDS = 30.0
AHEAD = 4
"""Pieces of work that wait, per piece that is worked at."""


class Cancelled(KafkaSparkError):
    """Raised within a verification that its task has stopped."""


@dataclass
class Work:
    """Does pieces of work side by side.

    :param parallel: how many at a time.
    :param stopped: set when the task is stopped.
    """

    parallel: int
    stopped: Event = field(default_factory=Event)

    def each(self, do: Callable[[A], B], pieces: Iterable[A]) -> Iterator[tuple[A, B]]:
        """Yield the pieces with their results, in their order. Only a few pieces are taken ahead.

        :raises KafkaSparkError: the error of the first piece that has failed, once those at work have ended.
        """
        waiting: deque[tuple[A, Future[B]]] = deque()
        failed = Event()

        def attempt(piece: A) -> B:
            if failed.is_set():
                raise Cancelled("A piece of work before this one has failed")
            return self.patiently(lambda: do(piece))

        with ThreadPoolExecutor(self.parallel, "verify") as pool:
            try:
                for piece in pieces:
                    waiting.append((piece, pool.submit(attempt, piece)))
                    while len(waiting) >= self.parallel * AHEAD or (waiting and waiting[0][1].done()):
                        done, future = waiting.popleft()
                        yield done, future.result()
                while waiting:
                    done, future = waiting.popleft()
                    yield done, future.result()
            finally:
                failed.set()

    def patiently(self, do: Callable[[], B]) -> B:
        """Return a result; a server that does not answer is asked again, a few times.

        :raises SourceUnavailable: it did not answer; as ``SinkUnavailable``.
        """
        for seconds in PATIENCE:
            self._check()
            try:
                return do()
            except (SourceUnavailable, SinkUnavailable) as error:
                log.warning("%s Asked again in %g s.", error.found, seconds)
                self.wait(seconds)
        return do()

    def wait(self, seconds: float) -> None:
        """Wait, unless the task is stopped."""
        self.stopped.wait(seconds)
        self._check()

    def _check(self) -> None:
        if self.stopped.is_set():
            raise Cancelled("The task was stopped")


@dataclass
class ProgressLog:
    """Logs the share of rows that is compared, and how long the others will take, twice a minute.

    :param total: how many rows there are, as the server estimates it; 0 if it does not.
    :param done: how many were compared by earlier attempts.
    """

    total: int
    done: int = 0

    def __post_init__(self) -> None:
        self._began, self._at_begin = time.monotonic(), self.done
        self._next = self._began + LOG_SECONDS

    def add(self, rows: int) -> None:
        """Count rows that are compared."""
        self.done += rows
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LOG_SECONDS
            log.info("%s", self)

    @property
    def remaining_seconds(self) -> float | None:
        """The time that the other rows will take at the present rate; None if their number is not known."""
        rows, seconds = self.done - self._at_begin, time.monotonic() - self._began
        return (self.total - self.done) * seconds / rows if rows and self.total > self.done else None

    def __str__(self) -> str:
        known = f" of about {self.total:,}" if self.total > self.done else ""
        left = self.remaining_seconds
        return f"Compared {self.done:,}{known} rows" + (f"; about {left / 60:.0f} min remain" if left is not None else "")
