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
"""Bytes a file system takes for one name."""

TASKS = "tasks"
PUBLISH = "publish"

# What Spark escapes (ExternalCatalogUtils.escapePathName), and NUL, which no file system takes.
_ESCAPED = re.compile(r"""[\x00-\x1f\x7f"#%'*/:=?\\{\[\]^]""")


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
        with suppress(FileExistsError):
            os.mkdir(here)
    return here
