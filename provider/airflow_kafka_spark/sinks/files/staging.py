"""The directories that attempts write into, beside the table and out of its readers' sight, and how leftovers are removed."""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from airflow_kafka_spark.sinks.files.layout import TASKS, pipeline_slug
from airflow_kafka_spark.windows.model import Window

log = logging.getLogger(__name__)

LOCK = "lock"
ABANDONED_DAYS = 7.0
"""Minimum age of an attempt that an attempt of another pipeline removes."""
SWEPT_AT_ONCE = 20
"""Maximum number of abandoned attempts that one attempt removes."""
_REMOVED = ".removed"


class AttemptLock:
    """Who holds it works on an attempt: the attempt's driver from its beginning to its end, or whoever clears it away.

    The lock goes with the process that holds it, however that ends (``flock(2)``, on NFS too).

    :param attempt: its directory.
    :raises OSError: another process holds the lock, the directory is gone, or the file system has no locks.
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
        """May be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True)
class Staging:
    """Where attempts write: a hidden directory beside the sink's, on the same file system, so that a rename publishes.

    :param root: ``<parent>/.<name>.airflow-staging``.
    """

    root: Path

    @classmethod
    def beside(cls, path: Path) -> Staging:
        return cls(path.parent / f".{path.name}.airflow-staging")

    def create(self, window: Window) -> Path:
        """A directory for a new attempt at a window."""
        for _ in range(10):
            attempt = self.root / f"{pipeline_slug(window.pipeline)}-{window.id}-{uuid.uuid4().hex}"
            # An attempt that ends at this moment removes the root when it is empty: then once more.
            with suppress(FileNotFoundError):
                self.root.mkdir(parents=True, exist_ok=True)
                os.mkdir(attempt)
                os.mkdir(attempt / TASKS)
                return attempt
        raise FileNotFoundError(f"{self.root} is removed as fast as it is made")

    def attempts(self, pipeline: str, up_to: int) -> Iterator[Path]:
        """Directories of attempts at windows of a pipeline, those being removed included.

        :param up_to: the last window's number to look for.
        """
        named = re.compile(re.escape(pipeline_slug(pipeline)) + r"-(\d{10,})-[0-9a-f]{32}(?:\.removed)?")
        with suppress(FileNotFoundError), os.scandir(self.root) as entries:
            for entry in entries:
                found = named.fullmatch(entry.name)
                if found and int(found[1]) <= up_to:
                    yield Path(entry.path)

    def sweep(self, window: Window) -> None:
        """Remove what is left of attempts at this window, and at those before it."""
        for attempt in list(self.attempts(window.pipeline, window.number)):
            self.discard(attempt)

    def sweep_abandoned(self) -> None:
        """Remove up to :data:`SWEPT_AT_ONCE` attempts of pipelines that nobody runs any more, which nobody else sweeps away.

        Guarantee: nothing that a live attempt needs is removed. Only attempts count that began more than :data:`ABANDONED_DAYS`
        days ago, and whose lock nobody holds: an attempt holds it for as long as it lives, on whatever machine. Where the file
        system has no locks, nothing is removed. Never raises.
        """
        named = re.compile(r".+-\d{10,}-[0-9a-f]{32}(?:\.removed)?", re.DOTALL)
        oldest = time.time() - ABANDONED_DAYS * 86400
        with suppress(OSError), os.scandir(self.root) as entries:
            old = (e for e in entries if named.fullmatch(e.name) and e.stat(follow_symlinks=False).st_mtime < oldest)
            for entry in list(itertools.islice(old, SWEPT_AT_ONCE)):
                with suppress(OSError), AttemptLock(Path(entry.path)):
                    log.info("Removing %s: it was abandoned", entry.path)
                    self.discard(Path(entry.path))

    def discard(self, attempt: Path) -> None:
        """Remove an attempt. Never raises: what stays is litter, and the next attempt tries again."""
        removed = attempt if attempt.name.endswith(_REMOVED) else attempt.with_name(attempt.name + _REMOVED)
        try:
            # Renamed before anything in it is deleted: an attempt that still lives must find all of its files or none,
            # or it could publish what is left.
            os.rename(attempt, removed)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("The leftover %s of an earlier attempt cannot be removed: %s", attempt, error)
            return
        shutil.rmtree(removed, ignore_errors=True)
        with suppress(OSError):
            os.rmdir(self.root)
