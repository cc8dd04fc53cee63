"""The windows of a directory: their names, and the record that each holds of itself."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from airflow_kafka_spark.errors import SinkUnavailable, WindowConflict
from airflow_kafka_spark.sinks.files.layout import RECORD, escape, flush, pipeline_slug, window_directory
from airflow_kafka_spark.windows.continuity import refuse_other
from airflow_kafka_spark.windows.interval import parse_ledger_name
from airflow_kafka_spark.windows.model import Applied, OffsetRange, Window


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


@dataclass(frozen=True)
class FilesTable:
    """A directory whose subdirectories are windows.

    :param directory: the table's directory.
    :param window_column: the partition column that holds the windows' names.
    """

    directory: Path
    window_column: str

    def window_path(self, window: Window) -> Path:
        """The window's directory, once it is published."""
        return self.directory / window_directory(self.window_column, window)

    def record(self, window: Window) -> WindowRecord | None:
        """The whole record of a window, None when it is not published.

        :raises ForeignOffsets: a window of this number is there, of another cluster or of another topic of the same name.
        :raises WindowConflict: a window of this number is there, but of other offsets.
        """
        record = self._read_record(self.window_path(window), window.pipeline)
        if record:
            refuse_other(record.applied, window, str(self.window_path(window)))
        return record

    def newest_record(self, pipeline: str) -> WindowRecord | None:
        """The record of the newest window of a pipeline."""
        named = re.compile(re.escape(f"{escape(self.window_column)}={pipeline_slug(pipeline)}") + r"-(\d{10,})")
        try:
            with os.scandir(self.directory) as entries:
                found = [(int(name[1]), entry.path) for entry in entries if (name := named.fullmatch(entry.name))]
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SinkUnavailable(self.directory.as_uri(), "looking for the last window", str(error)) from error
        return self._read_record(Path(max(found)[1]), pipeline) if found else None

    def latest_record(self, pipeline: str) -> WindowRecord | None:
        """The record of the window that was published last, of whichever data interval of the pipeline: what comes next has to
        fit beside it.

        :param pipeline: its name, or that of one of its intervals.
        """
        family, interval = parse_ledger_name(pipeline)
        if interval is None and (newest := self.newest_record(pipeline)):
            return newest
        begins = f"{escape(self.window_column)}={pipeline_slug(family).partition('~')[0]}"
        try:
            with os.scandir(self.directory) as entries:
                found = sorted((entry.stat().st_mtime_ns, entry.path) for entry in entries if entry.name.startswith(begins))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SinkUnavailable(self.directory.as_uri(), "looking for the last window", str(error)) from error
        for _, path in reversed(found):
            # What is no window of ours, or is just being replaced, tells nothing.
            with suppress(OSError, ValueError):
                record = WindowRecord.load((Path(path) / RECORD).read_text(encoding="utf-8"))
                if parse_ledger_name(record.applied.pipeline)[0] == family:
                    return record
        return None

    def flush(self) -> None:
        """Make the names of published windows survive a power cut."""
        try:
            for directory in (self.directory, self.directory.parent):
                flush(directory)
        except OSError as error:
            raise SinkUnavailable(self.directory.as_uri(), "making published windows durable", str(error)) from error

    def _read_record(self, directory: Path, pipeline: str) -> WindowRecord | None:
        try:
            record = WindowRecord.load((directory / RECORD).read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            if not os.path.lexists(directory):
                return None
            raise WindowConflict(directory.name, f"{directory} has no {RECORD}", "the record every window has") from None
        except ValueError as error:
            raise WindowConflict(directory.name, f"{directory / RECORD} cannot be understood: {error}", "a record") from error
        except OSError as error:
            raise SinkUnavailable(self.directory.as_uri(), "reading the record of a window", str(error)) from error
        # Whoever published it may have died before it was durable, and the caller will move Kafka's offsets past it.
        self.flush()
        if record.applied.pipeline != pipeline:
            raise WindowConflict(directory.name, f"{directory} belongs to pipeline `{record.applied.pipeline}`", f"`{pipeline}`")
        return record
