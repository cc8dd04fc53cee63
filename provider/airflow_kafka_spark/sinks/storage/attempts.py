"""Attempts at a table: their names, their locks, their records below the table, and the detection of abandoned ones.

::

    <table>/airflow-<attempt>/*.parquet                     data files of an attempt; of the window once it is committed
    <table>/_airflow/attempts/<attempt>/attempt.json        an attempt has begun, and is not removed yet
    <table>/_airflow/attempts/<attempt>/lock                local tables: locked for as long as the attempt's driver lives
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_kafka_spark.errors import Fenced, SinkUnavailable
from airflow_kafka_spark.sinks.base import ABANDONED_DAYS, WindowWriter
from airflow_kafka_spark.sinks.storage.store import TableStore, make_pipeline_slug, remove_tildes
from airflow_kafka_spark.windows.model import Window

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPTS = "_airflow/attempts"
BEGUN = "attempt.json"

_MARKER = re.compile(r"(.+)-(\d{20})", re.DOTALL)


def make_marker_name(pipeline: str, commit: int) -> str:
    """Return the name of an attempt: of the pipeline, and of the version or snapshot that it will commit."""
    return f"{make_pipeline_slug(pipeline)}-{commit:020d}"


def make_data_directory(marker: str) -> str:
    """Return the directory of an attempt's data files."""
    return remove_tildes(f"airflow-{marker}")


LOCK = "lock"
SWEPT_AT_ONCE = 20
"""Maximum number of abandoned attempts that one attempt removes."""


class AttemptLock:
    """A lock on an attempt. The attempt's driver holds it from beginning to end, and another process holds it while it removes
    the attempt.

    The lock is released when the process that holds it ends in any way (``flock(2)``, on NFS too).

    :param attempt: the attempt's directory.
    :raises OSError: another process holds the lock, the directory does not exist, or the file system has no locks.
    """

    def __init__(self, attempt: Path) -> None:
        self._fd = os.open(attempt / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise

    def __enter__(self) -> AttemptLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the lock. It may be called repeatedly."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class TableAttempt:
    """One attempt at a window, as it is recorded below the table.

    :param marker: its name.
    :param home: the table's location.
    :param data: the location of data files.
    :param directory: their directory; by default a directory of this attempt alone.
    """

    def __init__(self, window: Window, marker: str, home: TableStore, data: TableStore, directory: str = "") -> None:
        self.window, self.marker, self.home, self.data = window, marker, home, data
        self.directory = directory or make_data_directory(marker)
        self._lock: AttemptLock | None = None

    def begin(self, **facts: object) -> None:
        """Record that the attempt has begun, and create its directory of data files.

        :param facts: further facts for the record.
        :raises OSError: the store refused it.
        """
        window, noted = self.window, f"{ATTEMPTS}/{self.marker}"
        self.home.make(noted)
        if self.home.location.is_local:
            # On a file system without locks, old attempts of other pipelines count as dead.
            with suppress(OSError):
                self._lock = AttemptLock(Path(self.home.make_full_path(noted)))
        begun = {"pipeline": window.pipeline, "window": window.number, "replay": window.replay, "run": window.run, **facts}
        self.home.put(f"{noted}/{BEGUN}", json.dumps(begun, ensure_ascii=False))
        self.data.make(self.directory)

    def make_target(self, uri: str) -> dict[str, Any]:
        """Return the parameters of a :class:`.StoreTarget` that do not depend on the kind of table.

        :param uri: the sink's URI, for messages.
        """
        return {
            "uri": uri,
            "store": self.data,
            "home": self.home,
            "attempt": self.directory,
            "marker": self.marker,
            "pipeline": self.window.pipeline,
            "window": str(self.window),
        }

    def refuse_missing(self, files: Iterable[str], uri: str, suspect: str, there: Iterable[str] | None = None) -> None:
        """Refuse a commit whose files are gone.

        :param files: their paths.
        :param there: the paths of the attempt's files that exist; None to list them.
        :param uri: the sink's URI, for messages.
        :param suspect: the program that may have removed them, for the message.
        :raises Fenced: a newer attempt has removed this one.
        :raises SinkUnavailable: others have removed some of the files.
        :raises OSError: the store did not answer.
        """
        if there is None:
            there = self.data.list_files_below(self.directory)
        found = set(there)
        if gone := [path for path in files if path not in found]:
            if not self.home.exists(f"{ATTEMPTS}/{self.marker}/{BEGUN}"):
                raise Fenced(self.window.pipeline, f"committing window {self.window.number}")
            what = f"{len(gone)} of its files are gone, {gone[0]} the first: {suspect}?"
            raise SinkUnavailable(uri, f"committing window {self.window}", what)

    def keep_only(self, files: Iterable[str]) -> None:
        """Remove the data files that the commit does not name.

        :param files: the paths of those that it names.
        :raises OSError: the store did not answer.
        """
        keep_only(self.data, self.directory, files)

    def remove(self) -> None:
        """Remove the attempt, with its data files. Never raises."""
        self.data.remove_all(self.directory)
        self.finish()

    def finish(self) -> None:
        """Remove the record of the attempt, once all of its files are removed or committed. Never raises."""
        self.home.remove_all(f"{ATTEMPTS}/{self.marker}")

    def release(self) -> None:
        """Release the attempt's lock."""
        if self._lock is not None:
            self._lock.release()


class AttemptWindowWriter(WindowWriter):
    """Base of the writers whose attempts are recorded below the table, and whose commits may have an unknown outcome.

    :param attempt: the attempt, not begun yet.
    """

    def __init__(self, attempt: TableAttempt) -> None:
        self.attempt, self.window, self.marker = attempt, attempt.window, attempt.marker
        self.committed = False
        self.in_doubt = False
        """True if a commit was sent whose outcome is unknown."""

    def discard(self) -> None:
        """Remove the files of the attempt. Called if it has not committed and can no longer commit. Never raises."""
        self.attempt.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.in_doubt and not self.committed:
            # The commit may still arrive, and it names these files. The next attempt fences it before it removes them.
            log.warning("It is unknown if window %s was committed: the next attempt finds out", self.window)
        elif not self.committed:
            self.discard()
        self.attempt.release()


def keep_only(data: TableStore, directory: str, files: Iterable[str]) -> None:
    """Remove the data files of an attempt, except for those that its commit names.

    :param files: their paths.
    :raises OSError: the store did not answer.
    """
    named = set(files)
    if not named:
        data.remove_all(directory)
        return
    for path in data.list_files_below(directory):
        if path not in named:
            data.remove(path)
    data.remove_empty(directory)


def sweep_attempts(store: TableStore, pipeline: str, fence: Callable[[str, list[str]], T]) -> T:
    """Fence and remove all earlier attempts of a pipeline, and abandoned ones of other pipelines (:func:`.sweep_abandoned`).

    :param fence: removes attempts of one pipeline, so that none of them can commit afterwards.
    :return: the result of ``fence`` for the pipeline.
    :raises SinkUnavailable: the store did not answer.
    """
    own, others = list_attempts(store, pipeline)
    sweep_abandoned(store, others, fence)
    return fence(pipeline, own)


def list_attempts(store: TableStore, pipeline: str) -> tuple[list[str], list[str]]:
    """Return the markers of a table's attempts: those of a pipeline, and those of others.

    :raises SinkUnavailable: the store did not answer.
    """
    try:
        names = store.list_names(ATTEMPTS)
    except OSError as error:
        raise SinkUnavailable(store.location.uri, "looking for earlier attempts", error) from error
    found = [(match[1], name) for name in names if (match := _MARKER.fullmatch(name))]
    slug = make_pipeline_slug(pipeline)
    return [name for owner, name in found if owner == slug], [name for owner, name in found if owner != slug]


def sweep_abandoned(store: TableStore, markers: Iterable[str], fence: Callable[[str, list[str]], object]) -> None:
    """Remove abandoned attempts.

    An attempt is abandoned :data:`.ABANDONED_DAYS` days after it began. Below a local table, it also has to have no live driver:
    a live driver holds a lock.

    :param markers: attempts of other pipelines.
    :param fence: removes attempts of one pipeline, so that none of them can commit afterwards.
    :raises SinkUnavailable: the store did not answer.
    """
    oldest = time.time() - ABANDONED_DAYS * 86400
    abandoned: dict[str, list[str]] = defaultdict(list)
    locks: list[AttemptLock] = []
    try:
        for marker in list(markers):
            begun = store.read_modified_time(f"{ATTEMPTS}/{marker}/{BEGUN}")
            if begun is None or begun >= oldest or len(locks) >= SWEPT_AT_ONCE:
                continue
            with suppress(OSError, ValueError, KeyError):
                if store.location.is_local:
                    locks.append(AttemptLock(Path(store.make_full_path(f"{ATTEMPTS}/{marker}"))))
                text = store.get(f"{ATTEMPTS}/{marker}/{BEGUN}") or "{}"
                abandoned[json.loads(text)["pipeline"]].append(marker)
        for pipeline, names in abandoned.items():
            fence(pipeline, names)
    except OSError as error:
        raise SinkUnavailable(store.location.uri, "looking for earlier attempts", error) from error
    finally:
        for lock in locks:
            lock.release()
