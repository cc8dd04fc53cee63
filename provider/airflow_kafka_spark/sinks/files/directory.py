"""The directory of a files sink: the names in it, the steps on disk that have to be atomic or durable, and the sink's record in
each window's directory.

::

    <path>/<window column>=<pipeline>-<number>/[column=value/]<topic>-<partition>-<start>-<end>.<format>
    <path>/<window column>=<pipeline>-<number>/_window                    the sink's record of the window
    <parent>/.<name>.airflow-staging/<pipeline>-<number>-<attempt>/       an attempt (``storage/staging.py``)
        publish/...                                                       the window, complete; renamed into <path> in one step
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import SinkUnavailable, WindowConflict
from airflow_kafka_spark.sinks.storage.store import escape, flush, make_pipeline_slug
from airflow_kafka_spark.sinks.storage.window_record import WindowRecord
from airflow_kafka_spark.windows.continuity import refuse_other
from airflow_kafka_spark.windows.interval import ROUTED, remove_interval
from airflow_kafka_spark.windows.model import Window

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)


RECORD = "_window"
"""The record's file name: hidden by its underscore from Spark and Arrow, and without an extension from ``**/*.json``."""

PUBLISH = "publish"


def make_window_directory(column: str, window: Window) -> str:
    """Return the name of a window's directory."""
    return f"{escape(column)}={make_pipeline_slug(window.pipeline)}-{window.id}"


# --- durable steps --------------------------------------------------------------------------------------------------


def exchange_directories(one: Path, other: Path) -> None:
    """Exchange two directories in one atomic step.

    :raises OSError: the platform or the file system cannot do that (``EINVAL`` or ``ENOSYS``), or one of them does not exist.
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


def explain_failed_exchange(directory: Path) -> str | None:
    """Return the reason why directories beside this one cannot be exchanged in one step; None if they can.

    Two empty directories, hidden from readers, are exchanged as a test and removed, because file systems have no flag for
    it.

    :param directory: need not exist; the nearest existing parent is then used.
    """
    existing = next((parent for parent in directory.parents if parent.is_dir()), directory.parent)
    try:
        with tempfile.TemporaryDirectory(prefix=".airflow-exchange-", dir=existing) as probe:
            one, other = Path(probe, "one"), Path(probe, "other")
            one.mkdir()
            other.mkdir()
            exchange_directories(one, other)
    except OSError as error:
        return error.strerror or str(error)
    return None


@dataclass(frozen=True)
class FilesTable:
    """A directory whose subdirectories are windows.

    :param directory: the table's directory.
    :param window_column: the partition column that holds the windows' names.
    """

    directory: Path
    window_column: str

    def get_window_path(self, window: Window) -> Path:
        """Return the directory that a window has once it is published."""
        return self.directory / make_window_directory(self.window_column, window)

    def read_record(self, window: Window) -> WindowRecord | None:
        """Return the record of a window, or None if it is not published.

        :raises ForeignOffsets: a window of this number is there, of another cluster or of another topic of the same name.
        :raises WindowConflict: a window of this number is there, but of other offsets.
        """
        record = self._read_record(self.get_window_path(window), window.pipeline)
        if record:
            refuse_other(record.applied, window, str(self.get_window_path(window)))
        return record

    def find_newest_record(self, pipeline: str) -> WindowRecord | None:
        """Return the record of the pipeline's window with the highest number, or None without any."""
        named = re.compile(re.escape(f"{escape(self.window_column)}={make_pipeline_slug(pipeline)}") + r"-(\d{10,})")
        try:
            with os.scandir(self.directory) as entries:
                found = [(int(name[1]), entry.path) for entry in entries if (name := named.fullmatch(entry.name))]
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SinkUnavailable(self.directory.as_uri(), "looking for the last window", error) from error
        return self._read_record(Path(max(found)[1]), pipeline) if found else None

    def find_latest_record(self, pipeline: str) -> WindowRecord | None:
        """Return the record of the window that was published last, of any data interval of the pipeline, or None without any.

        The columns of the next window are compared with it.

        :param pipeline: the pipeline's name, or the name of one of its intervals.
        """
        common = remove_interval(pipeline)
        if common == pipeline and (newest := self.find_newest_record(pipeline)):
            return newest
        # In `<pipeline>.<interval>.to.<sink>` the interval lies before the name of the sink.
        begins = f"{escape(self.window_column)}={make_pipeline_slug(common.partition(ROUTED)[0]).partition('~')[0]}"
        try:
            with os.scandir(self.directory) as entries:
                found = sorted((entry.stat().st_mtime_ns, entry.path) for entry in entries if entry.name.startswith(begins))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SinkUnavailable(self.directory.as_uri(), "looking for the last window", error) from error
        for _, path in reversed(found):
            # Skip directories that are no window of this sink, or are being replaced.
            with suppress(OSError, ValueError):
                record = WindowRecord.load((Path(path) / RECORD).read_text(encoding="utf-8"))
                if remove_interval(record.applied.pipeline) == common:
                    return record
        return None

    def flush(self) -> None:
        """Flush the names of published windows to disk."""
        try:
            for directory in (self.directory, self.directory.parent):
                flush(directory)
        except OSError as error:
            raise SinkUnavailable(self.directory.as_uri(), "making published windows durable", error) from error

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
            raise SinkUnavailable(self.directory.as_uri(), "reading the record of a window", error) from error
        # The attempt that published it may have died before flushing, and the caller is going to commit Kafka's offsets past it.
        self.flush()
        if record.applied.pipeline != pipeline:
            raise WindowConflict(directory.name, f"{directory} belongs to pipeline `{record.applied.pipeline}`", f"`{pipeline}`")
        return record


def list_column_types(schema: pa.Schema) -> dict[str, str]:
    """Return names and types of the columns, in their order."""
    return {field.name: str(field.type) for field in schema}


def merge_columns(before: Mapping[str, str], schema: pa.Schema) -> dict[str, str]:
    """Return all columns that the windows up to this one have had, in the order of their appearance."""
    return {**before, **list_column_types(schema)}
