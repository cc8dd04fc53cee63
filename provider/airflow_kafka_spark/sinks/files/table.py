"""The windows of a directory: their names, and the record that each holds of itself."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import SinkUnavailable, WindowConflict
from airflow_kafka_spark.sinks.files.layout import RECORD, escape, flush, pipeline_slug, window_directory
from airflow_kafka_spark.windows.continuity import refuse_other
from airflow_kafka_spark.windows.interval import parse_ledger_name
from airflow_kafka_spark.windows.model import Applied, OffsetRange, Window

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class WindowRecord:
    """The content of the file ``_window``: the sink's record of a window.

    :param applied: the window that was written.
    :param files: path below the window's directory, rows and bytes of each file.
    :param format: the format of the files.
    :param partition_by: their partition columns.
    :param facts: the run that wrote it and the time, for information.
    :param columns: names and types of all columns that the pipeline's windows have had; empty if that is not known.
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
        """Return the record that a JSON text holds.

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
        """Return the directory that a window has once it is published."""
        return self.directory / window_directory(self.window_column, window)

    def record(self, window: Window) -> WindowRecord | None:
        """Return the record of a window, or None if it is not published.

        :raises ForeignOffsets: a window of this number is there, of another cluster or of another topic of the same name.
        :raises WindowConflict: a window of this number is there, but of other offsets.
        """
        record = self._read_record(self.window_path(window), window.pipeline)
        if record:
            refuse_other(record.applied, window, str(self.window_path(window)))
        return record

    def newest_record(self, pipeline: str) -> WindowRecord | None:
        """Return the record of the pipeline's window with the highest number, or None without any."""
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
        """Return the record of the window that was published last, of any data interval of the pipeline, or None without any.

        The columns of the next window are compared with it.

        :param pipeline: the pipeline's name, or the name of one of its intervals.
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
            # Skip what is no window of this sink, or is just being replaced.
            with suppress(OSError, ValueError):
                record = WindowRecord.load((Path(path) / RECORD).read_text(encoding="utf-8"))
                if parse_ledger_name(record.applied.pipeline)[0] == family:
                    return record
        return None

    def flush(self) -> None:
        """Flush the names of published windows to disk."""
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
        # The attempt that published it may have died before flushing, and the caller is going to commit Kafka's offsets past it.
        self.flush()
        if record.applied.pipeline != pipeline:
            raise WindowConflict(directory.name, f"{directory} belongs to pipeline `{record.applied.pipeline}`", f"`{pipeline}`")
        return record


def column_types(schema: pa.Schema) -> dict[str, str]:
    """Return names and types of the columns, in their order."""
    return {field.name: str(field.type) for field in schema}


def merged_columns(before: Mapping[str, str], schema: pa.Schema) -> dict[str, str]:
    """Return all columns that the windows up to this one have had, in the order of their appearance."""
    return {**before, **column_types(schema)}
