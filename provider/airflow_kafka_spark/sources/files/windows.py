"""Where a window of files ends and how it is split: the new files of a directory, from the oldest."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from airflow_kafka_spark.errors import SourceRejected, SourceUnavailable
from airflow_kafka_spark.sources.base import MAX_SPLITS, FrozenWindow
from airflow_kafka_spark.sources.files.options import FilesSourceOptions
from airflow_kafka_spark.sources.files.schema import read_footers, require_same_columns
from airflow_kafka_spark.sources.files.seen_files import MAX_REMEMBERED, DirectoryListing, SeenFiles, TooManyFiles
from airflow_kafka_spark.sources.files.splits import (
    encode_split,
    encoded_size,
    is_splittable,
    split_files,
    unreadable_reason,
)
from airflow_kafka_spark.sources.files.store import FileSelection, FileStore, ListedFile, join_names

MAX_PLAN_BYTES = 400_000
"""The most that a window's splits take as JSON: about 4,000 files with names of the usual length."""
MAX_FILES = 5_000
"""The most files of one window."""
FORMATS_WITH_FOOTER = ("parquet", "orc")


def list_files(options: FilesSourceOptions, store: FileStore) -> list[ListedFile]:
    """Return the files that the options select now.

    :raises SourceUnavailable: the directory cannot be listed.
    :raises SourceRejected: Spark could not open one of the files.
    """
    try:
        files = list(store.files(FileSelection(options.glob, options.recursive)))
    except Exception as error:  # an object store's client has errors of its own
        raise SourceUnavailable(options.uri, "listing files", f"{type(error).__name__}: {error}") from error
    below = store.root.partition(":")[2]
    for file in files:
        if reason := unreadable_reason(f"{below}/{file.name}"):
            raise SourceRejected(options.uri, f"the file {file.name!r} {reason}, and Spark cannot open it", "Rename it")
    return files


@dataclass(frozen=True)
class WindowPlanner:
    """Decides which files are a window, and its splits.

    :param options: the source's options.
    :param store: the store of its directory.
    """

    options: FilesSourceOptions
    store: FileStore

    def freeze(self, position: Mapping[str, Any] | None) -> FrozenWindow:
        """Return the window behind ``position``; see :meth:`RowSource.freeze`."""
        now = time.time()
        seen = self._seen_files(position)
        before = int((now - self.options.min_age) * 1e6) if self.options.min_age else None
        files = list_files(self.options, self.store)
        listing = self._handle_changed(seen.classify((f for f in files if f.size), before))
        self._refuse_late(listing, seen)
        taken, splits = self._take(listing.new)
        if not taken:
            return FrozenWindow((), self._position(seen))
        rows = self._count_rows(taken)
        lateness = self.options.allowed_lateness
        try:
            seen = seen.after_window(listing, taken, int((now - lateness) * 1e6))
        except TooManyFiles as error:
            raise self._rejected(
                f"{error.count:,} files arrived within the allowed lateness of {lateness:,.0f} s",
                f"Lower `allowed_lateness`, which lets all but {MAX_REMEMBERED:,} be forgotten; or have fewer and larger files "
                "written",
            ) from error
        return FrozenWindow(splits, self._position(seen), rows, remaining=len(taken) < len(listing.new))

    def _rejected(self, detail: str, action: str) -> SourceRejected:
        return SourceRejected(self.options.uri, detail, action)

    def _position(self, seen: SeenFiles) -> dict[str, Any]:
        return {
            "version": 1,
            "source": self.options.uri,
            "glob": self.options.glob,
            "recursive": self.options.recursive,
            **seen.dump(),
        }

    def _seen_files(self, position: Mapping[str, Any] | None) -> SeenFiles:
        if not position:
            return SeenFiles()
        if position.get("version") != 1:
            raise self._rejected(f"the position is of version {position.get('version')}, not 1", "Use the release that wrote it")
        if position.get("source") != self.options.uri:
            raise self._rejected(
                f"this pipeline has read {position.get('source')} so far, and its position says nothing about another directory",
                "Give the operator a new `pipeline=` name for the other directory",
            )
        try:
            seen = SeenFiles.load(position)
        except ValueError as error:
            advice = "Give the operator a new `pipeline=` name"
            raise self._rejected(f"the position cannot be understood: {error}", advice) from error
        if seen.horizon and (position["glob"], position["recursive"]) != (self.options.glob, self.options.recursive):
            raise self._rejected(
                f"it was read with `glob={position['glob']!r}` and `recursive={position['recursive']}` so far, and so many files "
                "that old ones which only the new options select would be taken for read",
                "Set them back, or give the operator a new `pipeline=` name",
            )
        return seen

    def _handle_changed(self, listing: DirectoryListing) -> DirectoryListing:
        """Apply ``on_change`` to changed files."""
        if not listing.changed or self.options.on_change == "ignore":
            return listing
        if self.options.on_change == "read":
            new = sorted((*listing.new, *listing.changed), key=lambda f: f.key)
            return replace(listing, new=tuple(new), changed=())
        raise self._rejected(
            f"{join_names(listing.changed)} changed after being read: size, modification time or etag is another",
            'Write changed data to a file of a new name. Set `on_change="read"` for one run to publish all rows of what changed '
            'once more, or "ignore" to leave it',
        )

    def _refuse_late(self, listing: DirectoryListing, seen: SeenFiles) -> None:
        if listing.late and seen.horizon:
            newest = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seen.horizon[0] / 1e6))
            raise self._rejected(
                f"{listing.late} files have appeared with modification times up to {newest} UTC, where all files count as read",
                "Find them by what the file system knows of their arrival (`find -newerct`), and give them a new modification "
                "time (`touch`): they are then read. If files like these are expected, raise `allowed_lateness`",
            )

    def _take(self, new: Sequence[ListedFile]) -> tuple[tuple[ListedFile, ...], tuple[dict[str, Any], ...]]:
        """Return as many of the new files, from the oldest, as fit into a window; and their splits."""
        most, size = 0, 0
        for file in new[: min(MAX_FILES, self.options.max_files or MAX_FILES)]:
            size += file.size
            if self.options.max_bytes and size > self.options.max_bytes and most:
                break
            most += 1
        fits, too_many = 0, most + 1
        splits: tuple[dict[str, Any], ...] = ()
        while too_many - fits > 1:
            count = most if too_many > most else (fits + too_many) // 2
            tried = self._splits(new[:count])
            if len(tried) <= MAX_SPLITS and encoded_size(tried) <= MAX_PLAN_BYTES:
                fits, splits = count, tried
            else:
                too_many = count
        if most and not fits:
            raise self._rejected(
                f"`{new[0].name}` of {new[0].size:,} bytes makes more than {MAX_SPLITS:,} splits of "
                f"{self.options.split_bytes:,} bytes, the most that a window's plan can hold",
                "Raise `split_bytes`, or have smaller files written",
            )
        return tuple(new[:fits]), splits

    def _splits(self, files: Sequence[ListedFile]) -> tuple[dict[str, Any], ...]:
        options = self.options.normalized_options
        whole = {f.name for f in files if not is_splittable(f.name, self.options.format, options)}
        return tuple(
            encode_split(split, self.options.split_bytes) for split in split_files(files, self.options.split_bytes, whole)
        )

    def _count_rows(self, files: Sequence[ListedFile]) -> int | None:
        """Return the number of rows, from the files' footers, whose columns must agree; None if the format has no footers."""
        if self.options.format not in FORMATS_WITH_FOOTER:
            return None
        found = read_footers(self.store, self.options.format, files)
        if self.options.schema is None:
            require_same_columns(self.options.uri, files, found)
        return sum(footer.rows for footer in found)
