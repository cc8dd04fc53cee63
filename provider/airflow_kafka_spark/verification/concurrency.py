"""Runs the statements of a verification concurrently, retries them if a server does not answer, and logs the progress."""

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

RETRY_SECONDS = (1.0, 5.0, 30.0)
"""Seconds to wait before the retries of a statement whose server did not answer."""
LOG_SECONDS = 30.0
"""Seconds between two log lines about the progress."""
AHEAD = 4
"""Number of queued pieces of work per running piece."""


class Cancelled(KafkaSparkError):
    """Raised within a verification when its task is stopped."""


@dataclass
class ConcurrentWork:
    """Runs pieces of work concurrently.

    :param parallel: maximum number of concurrent pieces.
    :param stopped: set when the task is stopped.
    """

    parallel: int
    stopped: Event = field(default_factory=Event)

    def map_concurrently(self, do: Callable[[A], B], pieces: Iterable[A]) -> Iterator[tuple[A, B]]:
        """Yield each piece with its result, in the given order. Only a few pieces are taken in advance.

        :raises KafkaSparkError: the error of the first piece that has failed, after the running ones have ended.
        """
        waiting: deque[tuple[A, Future[B]]] = deque()
        failed = Event()

        def attempt(piece: A) -> B:
            if failed.is_set():
                raise Cancelled("A piece of work before this one has failed")
            return self.run_with_retries(lambda: do(piece))

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

    def run_with_retries(self, do: Callable[[], B]) -> B:
        """Return the result of ``do``, which is retried a few times if a server does not answer.

        :raises SourceUnavailable, SinkUnavailable: the server did not answer.
        """
        for seconds in RETRY_SECONDS:
            self._check()
            try:
                return do()
            except (SourceUnavailable, SinkUnavailable) as error:
                if not error.retryable:
                    raise
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
    """Logs the share of compared rows and the remaining time, twice a minute.

    :param total: the number of rows that the server estimates; 0 if it is unknown.
    :param done: the number of rows that earlier attempts have compared.
    """

    total: int
    done: int = 0

    def __post_init__(self) -> None:
        self._began, self._at_begin = time.monotonic(), self.done
        self._next = self._began + LOG_SECONDS

    def add(self, rows: int) -> None:
        """Count compared rows."""
        self.done += rows
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LOG_SECONDS
            log.info("%s", self)

    @property
    def remaining_seconds(self) -> float | None:
        """The remaining time at the present rate; None if the number of rows is unknown."""
        rows, seconds = self.done - self._at_begin, time.monotonic() - self._began
        return (self.total - self.done) * seconds / rows if rows and self.total > self.done else None

    def __str__(self) -> str:
        known = f" of about {self.total:,}" if self.total > self.done else ""
        left = self.remaining_seconds
        return f"Compared {self.done:,}{known} rows" + (f"; about {left / 60:.0f} min remain" if left is not None else "")
