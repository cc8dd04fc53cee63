"""Records of windows, as sinks keep them beside the files of a table or in its commits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from airflow_kafka_spark.windows.codec import ranges_from_json, ranges_to_json
from airflow_kafka_spark.windows.model import Applied, OffsetRange, SplitResult, Window


@dataclass(frozen=True)
class WindowRecord:
    """The content of the file ``_window``: the sink's record of a window.

    :param applied: the window that was written.
    :param files: path below the window's directory, rows and bytes of each file.
    :param format: the format of the files.
    :param partition_by: their partition columns.
    :param facts: the run that wrote it and the time, for information.
    :param columns: names and types of all columns that the pipeline's windows have had; empty if unknown.
    """

    applied: Applied
    files: tuple[Mapping[str, Any], ...] = ()
    format: str = ""
    partition_by: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)

    def dump(self) -> str:
        """Return the record as JSON."""
        applied = self.applied
        return json.dumps(
            {
                "version": 1,
                "pipeline": applied.pipeline,
                "number": applied.number,
                "ranges": [[r.topic, r.partition, r.start, r.end] for r in applied.ranges],
                "rows": applied.written,
                "deleted": applied.deleted,
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
        """Return the record from JSON.

        :raises ValueError: the text is not the record of a window.
        """
        found = json.loads(text)
        try:
            return cls(
                Applied(
                    found["pipeline"],
                    found["number"],
                    tuple(OffsetRange(*r) for r in found["ranges"]),
                    found["rows"],
                    found.get("deleted", 0),
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


def make_commit_metadata(window: Window, rows: int, deleted: int = 0) -> dict[str, Any]:
    """Return the window in the form of the information of its commit, which the history of the table shows."""
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


def parse_recorded_window(found: Mapping[str, Any]) -> Applied:
    """Return the window that :func:`make_commit_metadata` describes.

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


def list_files(results: Sequence[SplitResult]) -> list[Mapping[str, Any]]:
    """Return the data files that the results of tasks name."""
    return [file for result in results for file in result.token.get("files", ())]
