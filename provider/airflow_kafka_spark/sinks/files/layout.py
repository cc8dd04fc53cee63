"""The names of directories and files of a files sink, and the steps on disk that have to be atomic or durable.

::

    <path>/<window column>=<pipeline>-<number>/[column=value/]<topic>-<partition>-<start>-<end>.<format>
    <path>/<window column>=<pipeline>-<number>/_window                    the sink's record of the window
    <parent>/.<name>.airflow-staging/<pipeline>-<number>-<attempt>/       an attempt, hidden from readers
        tasks/<task>/...                                                  what one task attempt wrote
        publish/...                                                       the window, complete; renamed into <path> in one step
        lock                                                              locked for as long as the attempt's driver lives
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from airflow_kafka_spark.windows.model import OffsetRange, Window

RECORD = "_window"
"""The record's file name: hidden by its underscore from Spark and Arrow, and without an extension from ``**/*.json``."""

NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
LONGEST_NAME = 255
"""Maximum length of a name on a file system, in bytes."""

TASKS = "tasks"
PUBLISH = "publish"

# The characters that Spark escapes (ExternalCatalogUtils.escapePathName), and NUL, which no file system allows.
_ESCAPED = re.compile(r"""[\x00-\x1f\x7f"#%'*/:=?\\{\[\]^]""")


def slug(name: str, longest: int) -> str:
    """Return ``name`` if it is a safe file name, else a safe one with a hash. Different names have different slugs.

    :param name: the name of a pipeline or a topic.
    :param longest: how many characters of a name are kept.
    """
    # A leading underscore or dot would hide the file from Spark and Arrow: `_orders` is a legal topic.
    if len(name) <= longest and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        return name
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip("._-")[:longest]
    # No safe name contains `~`, so that the result differs from all of them.
    return f"{safe}~{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"


def pipeline_slug(pipeline: str) -> str:
    return slug(pipeline, 120)


def window_directory(column: str, window: Window) -> str:
    """Return the name of a window's directory."""
    return f"{escape(column)}={pipeline_slug(window.pipeline)}-{window.id}"


def file_stem(split: OffsetRange, part: int = 0) -> str:
    """Return a file's name without its suffix: topic, partition and offsets, and a number from the second part on."""
    stem = f"{slug(split.topic, 140)}-{split.partition}-{split.start:020d}-{split.end:020d}"
    return f"{stem}-part{part:05d}" if part else stem


def escape(text: str) -> str:
    """Return a partition column's name or value as Spark writes it into a path."""
    return _ESCAPED.sub(lambda found: f"%{ord(found.group()):02X}", text)


def partition_directory(column: str, value: str | None) -> str:
    """Return ``column=value``. Null and, as in Spark, the empty string become ``__HIVE_DEFAULT_PARTITION__``."""
    return f"{escape(column)}={escape(value) if value else NULL_PARTITION}"


# --- durable steps --------------------------------------------------------------------------------------------------


def flush(path: str | Path) -> None:
    """Flush a closed file, or the names in a directory, to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def exchange(one: Path, other: Path) -> None:
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


def why_not_exchanged(directory: Path) -> str | None:
    """Return why directories beside this one cannot be exchanged in one step, or None if they can.

    Tries it with two empty directories, which are hidden from readers and removed again: file systems have no flag that says it.

    :param directory: need not exist; its file system is then that of the nearest parent that does.
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
    """Create nested directories in ``base``, but never ``base`` itself: if a newer attempt has removed it, this has to fail.

    :raises FileNotFoundError: ``base`` does not exist any more.
    """
    here = base
    for name in names:
        here = here / name
        with suppress(FileExistsError):
            os.mkdir(here)
    return here
