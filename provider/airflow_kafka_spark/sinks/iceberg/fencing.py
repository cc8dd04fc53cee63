"""Fencing earlier attempts at a table, so that they can no longer commit, and removing what they have left.

::

    <metadata>/<first half of an id>-*.avro               manifests of an attempt

The name of an attempt ends with the id of the snapshot that it is going to commit.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_kafka_spark.sinks.iceberg.catalog import IcebergTable
from airflow_kafka_spark.sinks.iceberg.snapshots import (
    FENCED,
    PipelineSnapshots,
    is_referenced,
    list_data_files,
    list_metadata_files,
    make_commit,
    make_manifest_prefix,
    make_snapshot_id,
    tag_name,
)
from airflow_kafka_spark.sinks.storage.attempts import ATTEMPTS, BEGUN, keep_only, make_data_directory, sweep_attempts

if TYPE_CHECKING:
    from pyiceberg.table import Table

log = logging.getLogger(__name__)

_TRIES = 100


@dataclass(frozen=True)
class Attempts:
    """The attempts at one table.

    :param lake: the table.
    """

    lake: IcebergTable

    def sweep(self, pipeline: str) -> int | None:
        """Fence and remove all earlier attempts of a pipeline, and abandoned ones of other pipelines.

        :return: the snapshot that the pipeline's tag names, behind which the new attempt commits.
        :raises SinkUnavailable: catalog or store did not answer.
        """
        store = self.lake.store(self.lake.loaded("looking for earlier attempts"))
        return sweep_attempts(store, pipeline, self.fence)

    def fence(self, pipeline: str, markers: Iterable[str]) -> int | None:
        """Remove ended attempts of a pipeline.

        A snapshot without data takes the pipeline's tag further, so that none of them can commit. No branch gets it. It is left
        out if all of them have committed or were overtaken.

        :param markers: their names, listed before this is called.
        :return: the snapshot that the tag names afterwards.
        :raises SinkUnavailable: catalog or store did not answer.
        """
        left = set(markers)
        waiting: set[str] = set()
        error: Exception | None = None
        fence = make_snapshot_id()
        for _ in range(_TRIES):
            table = self.lake.loaded("looking for earlier attempts")
            state = PipelineSnapshots.of(table.metadata, pipeline)
            committed = {marker for marker in left if table.snapshot_by_id(parse_snapshot_id(marker)) is not None}
            for marker in committed:
                self.finish(table, marker)
            left -= committed
            bases = {marker: self._base(table, marker) for marker in left}
            # The tag never returns to a snapshot that it has left.
            if state.tag == fence or all(base not in (None, state.tag or 0) for base in bases.values()):
                for marker in left:
                    self.remove(table, marker, sure=marker in waiting)
                return state.tag
            # The fence requires that the tag is still where it was when they began.
            waiting = {marker for marker, base in bases.items() if base == (state.tag or 0)}
            try:
                summary = {**state.summary(pipeline), FENCED: " ".join(sorted(left))}
                commit = make_commit(table, fence, summary, None, tag_name(pipeline))
                error = self.lake.try_commit(table, commit.requirements, commit.updates)
            except Exception as failed:  # each catalog and store has errors of its own
                error = failed
        raise self.lake.unavailable("fencing earlier attempts", error or "")

    def finish(self, table: Table, marker: str) -> None:
        """Remove what a committed attempt has left: files of tasks whose result was not used, and its note. Never raises; the
        next attempt removes what is left.

        :param table: the table, loaded after the commit.
        """
        directory, snapshot_id = make_data_directory(marker), parse_snapshot_id(marker)
        data = self.lake.data_store(table)
        try:
            files = list_data_files(table, [table.snapshot_by_id(snapshot_id)], directory)
            keep_only(data, directory, (f"{directory}/{file.file_path.rpartition('/')[2]}" for file in files))
            self._remove_manifests(table, snapshot_id)
        except Exception as error:  # each store has errors of its own
            log.warning("Files that attempt %s has left are not removed: %s", marker, self.lake.access.hidden(str(error)))
            return
        self.lake.store(table).remove_all(f"{ATTEMPTS}/{marker}")

    def remove(self, table: Table, marker: str, sure: bool = False) -> None:
        """Remove an attempt that can no longer commit. Never raises; the next attempt removes what is left.

        :param sure: True if it is known that it has not committed. Else its files are kept if a snapshot names one of them:
            it has committed, and its snapshot has expired since.
        """
        directory = make_data_directory(marker)
        try:
            if sure or not is_referenced(table, directory):
                self.lake.data_store(table).remove_all(directory)
                self._remove_manifests(table, parse_snapshot_id(marker))
        except Exception as error:  # each store has errors of its own
            log.warning("Attempt %s is not removed: %s", marker, self.lake.access.hidden(str(error)))
            return
        # The note goes last: without it, nothing would find the rest.
        self.lake.store(table).remove_all(f"{ATTEMPTS}/{marker}")

    def _base(self, table: Table, marker: str) -> int | None:
        """Return the snapshot that the pipeline's tag named when an attempt began, 0 if there was no tag; None if unknown."""
        try:
            text = self.lake.store(table).get(f"{ATTEMPTS}/{marker}/{BEGUN}")
            return int(json.loads(text)["base"]) if text else None
        except (ValueError, KeyError, TypeError):
            return None
        except OSError as error:
            raise self.lake.unavailable("looking for earlier attempts", error) from error

    def _remove_manifests(self, table: Table, snapshot_id: int) -> None:
        """Remove the manifests that were written for tries of a commit that failed."""
        named = list_metadata_files(table, snapshot_id)
        store = self.lake.metadata_store(table)
        begins = make_manifest_prefix(snapshot_id)
        kept = {path.rpartition("/")[2] for path in named or ()}
        for name in store.names(""):
            if name.startswith(begins) and name not in kept:
                store.remove(name)


def parse_snapshot_id(marker: str) -> int:
    """Return the id of the snapshot that an attempt commits."""
    return int(marker.rpartition("-")[2])
