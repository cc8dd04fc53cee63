"""Staging: attempts write into a hidden directory beside the target, on the same file system, and publish from there.

::

    <parent>/.<name>.airflow-staging/<pipeline>-<number>-<attempt>/       an attempt, hidden from readers
        tasks/<task>/...                                                  what one task attempt wrote
        lock                                                              locked for as long as the attempt's driver lives
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from airflow_kafka_spark.sinks.base import ABANDONED_DAYS
from airflow_kafka_spark.sinks.storage.attempts import SWEPT_AT_ONCE, AttemptLock
from airflow_kafka_spark.sinks.storage.store import make_pipeline_slug
from airflow_kafka_spark.windows.model import Window

log = logging.getLogger(__name__)

TASKS = "tasks"


def make_below(base: Path, names: Sequence[str]) -> Path:
    """Create nested directories in ``base``, but never ``base`` itself: if a newer attempt has removed it, this has to fail.

    :raises FileNotFoundError: ``base`` does not exist any more.
    """
    here = base
    for name in names:
        here = here / name
        with suppress(FileExistsError):
            os.mkdir(here)
    return here


_REMOVED = ".removed"


@dataclass(frozen=True)
class Staging:
    """The hidden directory beside the table, on the same file system, that attempts write into.

    :param root: ``<parent>/.<name>.airflow-staging``.
    """

    root: Path

    @classmethod
    def of(cls, path: Path) -> Staging:
        """Return the staging directory of a table."""
        return cls(path.parent / f".{path.name}.airflow-staging")

    def create(self, window: Window) -> Path:
        """Create the directory of a new attempt at a window."""
        for _ in range(10):
            attempt = self.root / f"{make_pipeline_slug(window.pipeline)}-{window.id}-{uuid.uuid4().hex}"
            # Another attempt that ends at this moment may remove the empty root. Then try again.
            with suppress(FileNotFoundError):
                self.root.mkdir(parents=True, exist_ok=True)
                os.mkdir(attempt)
                os.mkdir(attempt / TASKS)
                return attempt
        raise FileNotFoundError(f"{self.root} is removed as fast as it is made")

    def list_attempts(self, pipeline: str, up_to: int) -> Iterator[Path]:
        """Yield the directories of attempts at windows of a pipeline, including those that are being removed.

        :param up_to: the highest number of a window.
        """
        named = re.compile(re.escape(make_pipeline_slug(pipeline)) + r"-(\d{10,})-[0-9a-f]{32}(?:\.removed)?")
        with suppress(FileNotFoundError), os.scandir(self.root) as entries:
            for entry in entries:
                found = named.fullmatch(entry.name)
                if found and int(found[1]) <= up_to:
                    yield Path(entry.path)

    def sweep(self, window: Window) -> None:
        """Remove the directories of attempts at this window and at earlier ones."""
        for attempt in list(self.list_attempts(window.pipeline, window.number)):
            self.discard(attempt)

    def sweep_abandoned(self) -> None:
        """Remove up to :data:`SWEPT_AT_ONCE` abandoned attempts, whose pipelines no longer run and so do not remove them.

        Guarantee: nothing that a live attempt needs is removed. An attempt is abandoned if it began more than
        :data:`.ABANDONED_DAYS` days ago and its lock is free; a live attempt holds its lock, on any machine. On a file system
        without locks nothing is removed. Never raises.
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
        """Remove an attempt. Never raises; the next attempt removes the files that are left."""
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


class StagedAttempt:
    """An attempt at a window, with its staging directory. Its beginning removes earlier attempts.

    It holds a lock until its end, so that it does not count as abandoned, however long it takes.

    :ivar directory: its directory. :data:`TASKS` in it is for the tasks.
    :param target: the directory or file that windows are published to.
    :raises OSError: a directory cannot be made.
    """

    def __init__(self, target: Path, window: Window) -> None:
        self._staging = Staging.of(target)
        self._staging.sweep(window)
        self._staging.sweep_abandoned()
        self.directory = self._staging.create(window)
        self._lock: AttemptLock | None = None
        # On a file system without locks, attempts of other pipelines are never removed, so no lock is needed.
        with suppress(OSError):
            self._lock = AttemptLock(self.directory)

    @property
    def is_fenced(self) -> bool:
        """True if a newer attempt has removed this one."""
        return not self.directory.exists()

    def leave(self) -> None:
        """Remove the attempt, and release its lock. Never raises."""
        self._staging.discard(self.directory)
        if self._lock is not None:
            self._lock.release()
