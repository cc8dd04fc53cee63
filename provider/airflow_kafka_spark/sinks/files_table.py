"""A directory whose windows are a table: where it is, and what its windows say of themselves."""

from __future__ import annotations

import os
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import SinkUnavailable, WindowConflict
from airflow_kafka_spark.sinks.files_layout import RECORD, Record, escape, flush, pipeline_slug, window_directory
from airflow_kafka_spark.windows.continuity import refuse_other
from airflow_kafka_spark.windows.interval import parse_ledger_name
from airflow_kafka_spark.windows.model import Window

if TYPE_CHECKING:
    from airflow_kafka_spark.sinks.files_formats_worker import FileSpec

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


@dataclass(frozen=True)
class FilesTable:
    """The arguments of :class:`~airflow_kafka_spark.sinks.files.FilesSink`, which explains them, and the table they name."""

    path: str
    format: str = "parquet"
    partition_by: Sequence[str] = ()
    compression: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    window_column: str = "window"
    auto_evolve: bool = False

    def __post_init__(self) -> None:
        names = self.partition_by
        object.__setattr__(self, "partition_by", (names,) if isinstance(names, str) else tuple(names))

    @property
    def uri(self) -> str:
        """``file:///abs/path``; a path that :meth:`validate` refuses, or that is not rendered yet, is returned as it is."""
        try:
            return self.directory.as_uri() if "{{" not in self.path else self.path
        except ValueError:
            return str(self.path)

    @property
    def directory(self) -> Path:
        """The table's directory.

        :raises ValueError: ``path`` is not an absolute local path or ``file://`` URI.
        """
        text = str(self.path)
        if text.startswith("file:"):
            parts = urllib.parse.urlsplit(text)
            if parts.netloc not in ("", "localhost"):
                raise ValueError(f"`{self.path}` names the host {parts.netloc}")
            text = urllib.parse.unquote(parts.path)
        elif found := _SCHEME.match(text):
            raise ValueError(f"`{self.path}` is not on a file system: {found.group()} is not supported")
        if not os.path.isabs(text):
            raise ValueError(f"`{self.path}` is not an absolute path")
        path = Path(os.path.normpath(text))
        if path == path.parent:
            raise ValueError("the root directory cannot be a table")
        return path

    @property
    def spec(self) -> FileSpec:
        """How tasks write files."""
        from airflow_kafka_spark.sinks.files_formats_worker import FileSpec

        return FileSpec(self.format, self.compression, bool(self.partition_by), dict(self.options))

    # --- records ------------------------------------------------------------------------------------------------------

    def window_path(self, window: Window) -> Path:
        """The window's directory, once it is published."""
        return self.directory / window_directory(self.window_column, window)

    def record(self, window: Window) -> Record | None:
        """The whole record of a window, None when it is not published.

        :raises ForeignOffsets: a window of this number is there, of another cluster or of another topic of the same name.
        :raises WindowConflict: a window of this number is there, but of other offsets.
        """
        record = self._read_record(self.window_path(window), window.pipeline)
        if record:
            refuse_other(record.applied, window, str(self.window_path(window)))
        return record

    def newest_record(self, pipeline: str) -> Record | None:
        """The record of the newest window of a pipeline."""
        named = re.compile(re.escape(f"{escape(self.window_column)}={pipeline_slug(pipeline)}") + r"-(\d{10,})")
        try:
            with os.scandir(self.directory) as entries:
                found = [(int(name[1]), entry.path) for entry in entries if (name := named.fullmatch(entry.name))]
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SinkUnavailable(self.uri, "looking for the last window", str(error)) from error
        return self._read_record(Path(max(found)[1]), pipeline) if found else None

    def latest_record(self, pipeline: str) -> Record | None:
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
            raise SinkUnavailable(self.uri, "looking for the last window", str(error)) from error
        for _, path in reversed(found):
            # What is no window of ours, or is just being replaced, tells nothing.
            with suppress(OSError, ValueError):
                record = Record.load((Path(path) / RECORD).read_text(encoding="utf-8"))
                if parse_ledger_name(record.applied.pipeline)[0] == family:
                    return record
        return None

    def flush(self) -> None:
        """Make the names of published windows survive a power cut."""
        try:
            for directory in (self.directory, self.directory.parent):
                flush(directory)
        except OSError as error:
            raise SinkUnavailable(self.uri, "making published windows durable", str(error)) from error

    def _read_record(self, directory: Path, pipeline: str) -> Record | None:
        try:
            record = Record.load((directory / RECORD).read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            if not os.path.lexists(directory):
                return None
            raise WindowConflict(directory.name, f"{directory} has no {RECORD}", "the record every window has") from None
        except ValueError as error:
            raise WindowConflict(directory.name, f"{directory / RECORD} cannot be understood: {error}", "a record") from error
        except OSError as error:
            raise SinkUnavailable(self.uri, "reading the record of a window", str(error)) from error
        # Whoever published it may have died before it was durable, and the caller will move Kafka's offsets past it.
        self.flush()
        if record.applied.pipeline != pipeline:
            raise WindowConflict(directory.name, f"{directory} belongs to pipeline `{record.applied.pipeline}`", f"`{pipeline}`")
        return record
