"""Attempts at a lake table: their names, their notes below the table, and which of them are abandoned.

::

    <table>/airflow-<attempt>/*.parquet                     data files of an attempt; of the window once it is committed
    <table>/_airflow/attempts/<attempt>/attempt.json        an attempt has begun, and has not been cleaned up after
    <table>/_airflow/attempts/<attempt>/lock                local tables: locked for as long as the attempt's driver lives
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from airflow_kafka_spark.errors import Fenced, SinkUnavailable
from airflow_kafka_spark.sinks.base import ABANDONED_DAYS
from airflow_kafka_spark.sinks.files.directory import SWEPT_AT_ONCE, AttemptLock, pipeline_slug
from airflow_kafka_spark.sinks.lake.place import TableStore, plain
from airflow_kafka_spark.windows.codec import ranges_from_json, ranges_to_json
from airflow_kafka_spark.windows.model import Applied, SplitResult, Window

ATTEMPTS = "_airflow/attempts"
BEGUN = "attempt.json"

_MARKER = re.compile(r"(.+)-(\d{20})", re.DOTALL)


def marker_name(pipeline: str, commit: int) -> str:
    """Return the name of an attempt: of the pipeline, and of the version or snapshot that it will commit."""
    return f"{pipeline_slug(pipeline)}-{commit:020d}"


def data_directory(marker: str) -> str:
    """Return the directory of an attempt's data files."""
    return plain(f"airflow-{marker}")


def commit_metadata(window: Window, rows: int, deleted: int = 0) -> dict[str, Any]:
    """Return the window as the information of its commit has it, which the history of the table shows."""
    return {
        "pipeline": window.pipeline,
        "number": window.number,
        "replay": window.replay,
        "ranges": ranges_to_json(window.ranges),
        "rows": rows,
        "deleted": deleted,
        "cluster_id": window.cluster_id,
        "topic_ids": dict(window.topic_ids),
        "run": window.run,
    }


def recorded_window(found: Mapping[str, Any]) -> Applied:
    """Return the window that :func:`commit_metadata` describes.

    :raises KeyError: an entry is missing.
    """
    return Applied(
        found["pipeline"],
        found["number"],
        ranges_from_json(found["ranges"]),
        found["rows"],
        found.get("deleted", 0),
        replay=found["replay"],
        cluster_id=found["cluster_id"],
        topic_ids=found["topic_ids"],
    )


AddedT = TypeVar("AddedT")
RemovedT = TypeVar("RemovedT")


@dataclass(frozen=True)
class TableChange(Generic[AddedT, RemovedT]):
    """The change that one commit makes to a table.

    :param added: the files that it adds.
    :param removed: the files that it removes.
    :param written: number of rows that the window has written.
    :param deleted: number of rows that it has deleted.
    """

    added: Sequence[AddedT]
    removed: Sequence[RemovedT]
    written: int
    deleted: int = 0


def files_of(results: Sequence[SplitResult]) -> list[Mapping[str, Any]]:
    """Return the data files that the results of tasks name."""
    return [file for result in results for file in result.token.get("files", ())]


class Attempt:
    """One attempt at a window, as it is noted below the table.

    :param marker: its name.
    :param home: the table's location.
    :param data: where data files lie.
    :param directory: their directory; default one of this attempt alone.
    """

    def __init__(self, window: Window, marker: str, home: TableStore, data: TableStore, directory: str = "") -> None:
        self.window, self.marker, self.home, self.data = window, marker, home, data
        self.directory = directory or data_directory(marker)
        self._lock: AttemptLock | None = None

    def begin(self, **facts: Any) -> None:
        """Note that the attempt has begun, and create its directory of data files.

        :param facts: more to note.
        :raises OSError: the store refused it.
        """
        window, noted = self.window, f"{ATTEMPTS}/{self.marker}"
        self.home.make(noted)
        if self.home.place.is_local:
            # On a file system without locks, attempts of other pipelines are taken for dead when they are old.
            with suppress(OSError):
                self._lock = AttemptLock(Path(self.home.full(noted)))
        begun = {"pipeline": window.pipeline, "window": window.number, "replay": window.replay, "run": window.run, **facts}
        self.home.put(f"{noted}/{BEGUN}", json.dumps(begun, ensure_ascii=False))
        self.data.make(self.directory)

    def refuse_missing(self, files: Iterable[str], uri: str, suspect: str, there: Iterable[str] | None = None) -> None:
        """Refuse a commit whose files are gone.

        :param files: their paths.
        :param there: the paths of the attempt's files that are there; None: they are listed.
        :param uri: the sink's URI, for messages.
        :param suspect: what others may have run.
        :raises Fenced: a newer attempt has removed this one.
        :raises SinkUnavailable: others have removed some of the files.
        :raises OSError: the store did not answer.
        """
        if there is None:
            there = (f"{self.directory}/{info.base_name}" for info in self.data.children(self.directory))
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
        """Remove the note of the attempt, which leads to the rest of it. Never raises."""
        self.home.remove_all(f"{ATTEMPTS}/{self.marker}")

    def release(self) -> None:
        """Release the attempt's lock."""
        if self._lock is not None:
            self._lock.release()


def keep_only(data: TableStore, directory: str, files: Iterable[str]) -> None:
    """Remove all data files of an attempt but those that its commit names.

    :param files: their paths.
    :raises OSError: the store did not answer.
    """
    named = set(files)
    if not named:
        data.remove_all(directory)
        return
    for info in data.children(directory):
        if (path := f"{directory}/{info.base_name}") not in named:
            data.remove(path)


def list_attempts(store: TableStore, pipeline: str) -> tuple[list[str], list[str]]:
    """Return the markers of a table's attempts: those of a pipeline, and those of others.

    :raises SinkUnavailable: the store did not answer.
    """
    try:
        names = [info.base_name for info in store.children(ATTEMPTS)]
    except OSError as error:
        raise SinkUnavailable(store.place.uri, "looking for earlier attempts", str(error)) from error
    found = [(match[1], name) for name in names if (match := _MARKER.fullmatch(name))]
    slug = pipeline_slug(pipeline)
    return [name for owner, name in found if owner == slug], [name for owner, name in found if owner != slug]


def sweep_abandoned(store: TableStore, markers: Iterable[str], fence: Callable[[str, list[str]], object]) -> None:
    """Remove abandoned attempts.

    An attempt is abandoned :data:`.ABANDONED_DAYS` days after it began, unless its driver lives and the table is local, where
    that can be seen (a lock).

    :param markers: attempts of other pipelines.
    :param fence: removes attempts of one pipeline, so that none of them can commit afterwards.
    :raises SinkUnavailable: the store did not answer.
    """
    oldest = time.time() - ABANDONED_DAYS * 86400
    abandoned: dict[str, list[str]] = defaultdict(list)
    locks: list[AttemptLock] = []
    try:
        for marker in list(markers):
            begun = store.modified(f"{ATTEMPTS}/{marker}/{BEGUN}")
            if begun is None or begun >= oldest or len(locks) >= SWEPT_AT_ONCE:
                continue
            with suppress(OSError, ValueError, KeyError):
                if store.place.is_local:
                    locks.append(AttemptLock(Path(store.full(f"{ATTEMPTS}/{marker}"))))
                text = store.get(f"{ATTEMPTS}/{marker}/{BEGUN}") or "{}"
                abandoned[json.loads(text)["pipeline"]].append(marker)
        for pipeline, names in abandoned.items():
            fence(pipeline, names)
    except OSError as error:
        raise SinkUnavailable(store.place.uri, "looking for earlier attempts", str(error)) from error
    finally:
        for lock in locks:
            lock.release()
