"""Names and places of a files sink: what a window's directory is called, where attempts write, what is left on disk when.

::

    <path>/<window column>=<pipeline>-<number>/[column=value/]<topic>-<partition>-<start>-<end>.<format>
    <path>/<window column>=<pipeline>-<number>/_window                    the sink's record of the window
    <parent>/.<name>.airflow-staging/<pipeline>-<number>-<attempt>/       an attempt, out of every reader's sight
        tasks/<task>/...                                                  what one task attempt wrote
        publish/...                                                       the window, complete; renamed into <path> in one step
        lock                                                              locked for as long as the attempt's driver lives
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from airflow_kafka_spark.windows.model import Applied, OffsetRange, Window

log = logging.getLogger(__name__)

RECORD = "_window"
"""The record's file name: hidden by its underscore from Spark and Arrow, and without an extension from ``**/*.json``."""

NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
LONGEST_NAME = 255
"""Bytes a file system takes for one name."""

TASKS = "tasks"
PUBLISH = "publish"
LOCK = "lock"

ABANDONED_DAYS = 7.0
"""So old is an attempt, at least, that another pipeline's attempt removes."""
SWEPT_AT_ONCE = 20
"""Abandoned attempts that one attempt removes at most."""

# What Spark escapes (ExternalCatalogUtils.escapePathName), and NUL, which no file system takes.
_ESCAPED = re.compile(r"""[\x00-\x1f\x7f"#%'*/:=?\\{\[\]^]""")
_REMOVED = ".removed"


def slug(name: str, longest: int) -> str:
    """``name`` where it is a safe file name, else a safe one like it with a hash: different names have different slugs.

    :param name: a pipeline or a topic.
    :param longest: characters a name may have before it is shortened.
    """
    # A leading underscore or dot would hide the file from Spark and Arrow: `_orders` is a legal topic.
    if len(name) <= longest and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        return name
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip("._-")[:longest]
    # `~` is in no safe name, so that no other name can be taken for this one.
    return f"{safe}~{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"


def pipeline_slug(pipeline: str) -> str:
    return slug(pipeline, 120)


def window_directory(column: str, window: Window) -> str:
    """The directory of a window below the sink's path."""
    return f"{escape(column)}={pipeline_slug(window.pipeline)}-{window.id}"


def file_stem(split: OffsetRange, part: int = 0) -> str:
    """A file's name without its suffix: topic, partition and offsets, and a number from the second part on."""
    stem = f"{slug(split.topic, 140)}-{split.partition}-{split.start:020d}-{split.end:020d}"
    return f"{stem}-part{part:05d}" if part else stem


def escape(text: str) -> str:
    """A partition column's name or value as Spark writes it into a path."""
    return _ESCAPED.sub(lambda found: f"%{ord(found.group()):02X}", text)


def partition_directory(column: str, value: str | None) -> str:
    """``column=value``; null, and as in Spark the empty string too, is ``__HIVE_DEFAULT_PARTITION__``."""
    return f"{escape(column)}={escape(value) if value else NULL_PARTITION}"


# --- durable steps --------------------------------------------------------------------------------------------------


def flush(path: str | Path) -> None:
    """Make a closed file, or the names in a directory, survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def exchange(one: Path, other: Path) -> None:
    """Let two directories change places, in one step: nobody sees neither, or both.

    :raises OSError: the platform or the file system cannot (``EINVAL`` or ``ENOSYS``), or one of them does not exist.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, "this platform cannot exchange two directories in one step, as a replay has to", str(other))
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        what = "this file system cannot exchange two directories in one step, as a replay has to"
        raise OSError(code, what if code == errno.EINVAL else os.strerror(code), str(other))


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def why_not_exchanged(directory: Path) -> str | None:
    """Return why directories beside this one cannot change places in one step, or None where they can.

    Tried out with two empty directories, hidden from readers and gone again when this returns: no flag of a file system says it.

    :param directory: need not exist; then its file system is that of the nearest parent that does.
    """
    place = next((parent for parent in directory.parents if parent.is_dir()), directory.parent)
    try:
        with tempfile.TemporaryDirectory(prefix=".airflow-exchange-", dir=place) as probe:
            one, other = Path(probe, "one"), Path(probe, "other")
            one.mkdir()
            other.mkdir()
            exchange(one, other)
    except OSError as error:
        return error.strerror or str(error)
    return None


def make_below(base: Path, names: Sequence[str]) -> Path:
    """Make nested directories in ``base``, never ``base`` itself: when a newer attempt took it away, this one has to notice.

    :raises FileNotFoundError: ``base`` does not exist any more.
    """
    here = base
    for name in names:
        here = here / name
        with contextlib.suppress(FileExistsError):
            os.mkdir(here)
    return here


# --- the sink's record of a window ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class WindowRecord:
    """What ``_window`` holds.

    :param applied: what was written.
    :param files: path below the window's directory, rows and bytes of each file.
    :param format: the files' format.
    :param partition_by: their partition columns.
    :param facts: who wrote it and when, for people.
    :param columns: names and types of all columns that the pipeline's windows have had; empty where that is not known.
    """

    applied: Applied
    files: tuple[Mapping[str, Any], ...] = ()
    format: str = ""
    partition_by: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)

    def dump(self) -> str:
        applied = self.applied
        return json.dumps(
            {
                "version": 1,
                "pipeline": applied.pipeline,
                "number": applied.number,
                "ranges": [[r.topic, r.partition, r.start, r.end] for r in applied.ranges],
                "rows": applied.written,
                "replay": applied.replay,
                "format": self.format,
                "partition_by": list(self.partition_by),
                "cluster_id": applied.cluster_id,
                "topic_ids": dict(applied.topic_ids),
                **self.facts,
                "columns": dict(self.columns),
                "files": [dict(f) for f in self.files],
            },
            ensure_ascii=False,
            indent=1,
        )

    @classmethod
    def load(cls, text: str) -> WindowRecord:
        """:raises ValueError: not a record of a window."""
        found = json.loads(text)
        try:
            return cls(
                Applied(
                    found["pipeline"],
                    found["number"],
                    tuple(OffsetRange(*r) for r in found["ranges"]),
                    found["rows"],
                    replay=found.get("replay", 0),
                    cluster_id=found.get("cluster_id") or "",
                    topic_ids=found.get("topic_ids") or {},
                ),
                tuple(found["files"]),
                found["format"],
                tuple(found["partition_by"]),
                columns=found.get("columns", {}),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the record of a window: {error!r}") from error


# --- staging --------------------------------------------------------------------------------------------------------


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
            with contextlib.suppress(FileNotFoundError):
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
        with contextlib.suppress(FileNotFoundError), os.scandir(self.root) as entries:
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
        with contextlib.suppress(OSError), os.scandir(self.root) as entries:
            old = (e for e in entries if named.fullmatch(e.name) and e.stat(follow_symlinks=False).st_mtime < oldest)
            for entry in list(itertools.islice(old, SWEPT_AT_ONCE)):
                with contextlib.suppress(OSError), AttemptLock(Path(entry.path)):
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
        with contextlib.suppress(OSError):
            os.rmdir(self.root)
