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
    """A lock on an attempt. Its driver holds it from beginning to end, and a process that removes the attempt while it does so.

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
        """Release the lock. May be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True)
class Staging:
    """The hidden directory beside the table, on the same file system, that attempts write into.

    :param root: ``<parent>/.<name>.airflow-staging``.
    """

    root: Path

    @classmethod
    def beside(cls, path: Path) -> Staging:
        """Return the staging directory of a table."""
        return cls(path.parent / f".{path.name}.airflow-staging")

    def create(self, window: Window) -> Path:
        """Create the directory of a new attempt at a window."""
        for _ in range(10):
            attempt = self.root / f"{pipeline_slug(window.pipeline)}-{window.id}-{uuid.uuid4().hex}"
            # Another attempt that ends at this moment may remove the empty root. Then try again.
            with suppress(FileNotFoundError):
                self.root.mkdir(parents=True, exist_ok=True)
                os.mkdir(attempt)
                os.mkdir(attempt / TASKS)
                return attempt
        raise FileNotFoundError(f"{self.root} is removed as fast as it is made")

    def attempts(self, pipeline: str, up_to: int) -> Iterator[Path]:
        """Yield the directories of attempts at windows of a pipeline, including those that are being removed.

        :param up_to: the highest number of a window.
        """
        named = re.compile(re.escape(pipeline_slug(pipeline)) + r"-(\d{10,})-[0-9a-f]{32}(?:\.removed)?")
        with suppress(FileNotFoundError), os.scandir(self.root) as entries:
            for entry in entries:
                found = named.fullmatch(entry.name)
                if found and int(found[1]) <= up_to:
                    yield Path(entry.path)

    def sweep(self, window: Window) -> None:
        """Remove the directories of attempts at this window and at earlier ones."""
        for attempt in list(self.attempts(window.pipeline, window.number)):
            self.discard(attempt)

    def sweep_abandoned(self) -> None:
        """Remove up to :data:`SWEPT_AT_ONCE` abandoned attempts, whose pipelines no longer run and so do not remove them.

        Guarantee: nothing that a live attempt needs is removed. Only attempts count that began more than :data:`ABANDONED_DAYS`
        days ago and whose lock is free: an attempt holds it for as long as it lives, on any machine. On a file system without
        locks nothing is removed. Never raises.
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
        """Remove an attempt. Never raises; the next attempt removes what is left."""
        removed = attempt if attempt.name.endswith(_REMOVED) else attempt.with_name(attempt.name + _REMOVED)
        try:
            # Rename it before deleting anything in it. An attempt that is still running must find all of its files or none;
            # otherwise it could publish a part of them.
            os.rename(attempt, removed)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("The leftover %s of an earlier attempt cannot be removed: %s", attempt, error)
            return
        shutil.rmtree(removed, ignore_errors=True)
        with suppress(OSError):
            os.rmdir(self.root)
