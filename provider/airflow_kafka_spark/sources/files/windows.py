"""Windows of files. A window is the new files of a directory, from the oldest: those that are not among :class:`SeenFiles`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from airflow_kafka_spark.errors import SourceRejected, SourceUnavailable
from airflow_kafka_spark.formats.types import parse_ddl
from airflow_kafka_spark.sources.base import MAX_SPLITS, FrozenWindow
from airflow_kafka_spark.sources.files.conversions import require_unchanged_values
from airflow_kafka_spark.sources.files.options import FilesSourceOptions
from airflow_kafka_spark.sources.files.partitions import list_partition_directories
from airflow_kafka_spark.sources.files.seen import MAX_REMEMBERED, DirectoryListing, SeenFiles, TooManyFiles
from airflow_kafka_spark.sources.files.splits import (
    compute_encoded_size,
    encode_split,
    find_unreadable_reason,
    is_splittable,
    split_files,
)
from airflow_kafka_spark.sources.files.store import (
    FileFooter,
    FileSelection,
    FileStore,
    ListedFile,
    join_names,
    read_footers,
    require_readable_columns,
    require_readable_compression,
    require_same_columns,
)

log = logging.getLogger(__name__)

MAX_PLAN_BYTES = 400_000
"""Maximum size of a window's splits as JSON, in bytes: about 4,000 files with names of the usual length."""
MAX_FILES = 5_000
"""Maximum number of files in a window."""
CLOCK_TOLERANCE = 300
"""Seconds by which the clock of the store may be ahead of that of this worker."""
FORMATS_WITH_FOOTER = ("parquet", "orc")
"""The formats whose files name their columns, types and numbers of rows."""


def list_selected_files(options: FilesSourceOptions, store: FileStore) -> list[ListedFile]:
    """Return the files that the options select now.

    :raises SourceUnavailable: the directory cannot be listed.
    :raises SourceRejected: Spark could not open one of the files.
    """
    files = _list_selected(options, store, FileSelection(options.glob, options.recursive))
    below = store.root.partition(":")[2]
    for file in files:
        if reason := find_unreadable_reason(f"{below}/{file.name}"):
            raise SourceRejected(options.uri, f"the file {file.name!r} {reason}, and Spark cannot open it", "Rename it")
    return files


def require_partition_directories(options: FilesSourceOptions, names: Iterable[str]) -> None:
    """Check that the directories of files give the partition columns.

    :param names: of the files.
    :raises SourceRejected: they do not.
    """
    if options.partition_columns is None:
        return
    for name in names:
        try:
            options.partitions.parse(name)
        except ValueError as error:
            advice = "Correct `partition_columns`, or read the files of each layout by a pipeline of its own, with another `path`"
            raise SourceRejected(options.uri, f"`{name}`: {error}", advice) from error


def _list_selected(options: FilesSourceOptions, store: FileStore, selection: FileSelection) -> list[ListedFile]:
    try:
        return list(store.list_files(selection))
    except Exception as error:  # an object store's client has errors of its own
        raise SourceUnavailable(options.uri, "listing files", f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class WindowPlanner:
    """Decides the files of a window, and its splits.

    :param options: the source's options.
    :param store: the store of its directory.
    """

    options: FilesSourceOptions
    store: FileStore

    def freeze(self, position: Mapping[str, Any] | None) -> FrozenWindow:
        """Return the window after ``position``; see :meth:`RowSource.freeze`."""
        now = time.time()
        seen = self._read_seen_files(position)
        before = int((now - self.options.min_age) * 1e6) if self.options.min_age else None
        files = list_selected_files(self.options, self.store)
        reselected = self._is_reselected(position)
        listing = self._handle_changed(seen.classify((f for f in files if f.size), before))
        self._refuse_late(listing, seen)
        self._refuse_of_the_future(listing, now)
        taken, splits = self._take(listing.new)
        if not taken:
            return FrozenWindow((), self._make_position(replace(seen, below=listing.below), reselected))
        self._warn_of_directories(taken)
        require_partition_directories(self.options, [file.name for file in taken])
        if self.options.format not in FORMATS_WITH_FOOTER:
            require_readable_compression(self.store, taken)
        rows = self._count_rows(taken)
        lateness = self.options.allowed_lateness
        try:
            unselected = self._list_every_file if reselected else tuple
            seen = seen.add_window(listing, taken, int((now - lateness) * 1e6), int(now // 86_400), unselected)
        except TooManyFiles as error:
            raise self._make_rejection(
                f"{error.count:,} files arrived within the allowed lateness of {lateness:,.0f} s",
                f"Lower `allowed_lateness`, which lets all but {MAX_REMEMBERED:,} be forgotten; or have fewer and larger files "
                "written",
            ) from error
        return FrozenWindow(splits, self._make_position(seen, reselected), rows, remaining=len(taken) < len(listing.new))

    def _make_rejection(self, detail: str, action: str) -> SourceRejected:
        return SourceRejected(self.options.uri, detail, action)

    def _is_reselected(self, position: Mapping[str, Any] | None) -> bool:
        """Return True if files were read that the present options may not select."""
        if not position:
            return False
        selection = (self.options.glob, self.options.recursive)
        return bool(position.get("reselected")) or (position["glob"], position["recursive"]) != selection

    def _list_every_file(self) -> list[ListedFile]:
        """Return the files that any options may select.

        :raises SourceUnavailable: the directory cannot be listed.
        """
        return _list_selected(self.options, self.store, FileSelection(recursive=True))

    def _make_position(self, seen: SeenFiles, reselected: bool) -> dict[str, Any]:
        return {
            "version": 1,
            "source": self.options.uri,
            "glob": self.options.glob,
            "recursive": self.options.recursive,
            **({"reselected": True} if reselected else {}),
            **seen.dump(),
        }

    def _read_seen_files(self, position: Mapping[str, Any] | None) -> SeenFiles:
        if not position:
            return SeenFiles()
        if position.get("version") != 1:
            raise self._make_rejection(
                f"the position is of version {position.get('version')}, not 1", "Use the release that wrote it"
            )
        if position.get("source") != self.options.uri:
            raise self._make_rejection(
                f"this pipeline has read {position.get('source')} so far, and its position says nothing about another directory",
                "Give the operator a new `pipeline=` name for the other directory",
            )
        try:
            seen = SeenFiles.load(position)
        except ValueError as error:
            advice = "Give the operator a new `pipeline=` name"
            raise self._make_rejection(f"the position cannot be understood: {error}", advice) from error
        if seen.horizon and (position["glob"], position["recursive"]) != (self.options.glob, self.options.recursive):
            raise self._make_rejection(
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
        raise self._make_rejection(
            f"{join_names(listing.changed)} changed after being read: size, modification time or etag differs",
            'Write changed data to a file of a new name. Set `on_change="read"` for one run to publish all rows of what changed '
            'once more, or "ignore" to leave it',
        )

    def _refuse_late(self, listing: DirectoryListing, seen: SeenFiles) -> None:
        if listing.late and seen.horizon:
            newest = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seen.horizon[0] / 1e6))
            raise self._make_rejection(
                f"{listing.late} files have appeared with modification times up to {newest} UTC, where all files count as read",
                "Find them by what the file system knows of their arrival (`find -newerct`), and give them a new modification "
                "time (`touch`): they are then read. If files like these are expected, raise `allowed_lateness`",
            )

    def _refuse_of_the_future(self, listing: DirectoryListing, now: float) -> None:
        """Refuse a file that ``min_age`` would leave for later windows until a time to come."""
        ahead = [file for file in listing.young if file.mtime / 1e6 > now + CLOCK_TOLERANCE]
        if ahead:
            raise self._make_rejection(
                f"{join_names(ahead)} a modification time in the future (`{ahead[0].name}`: {ahead[0].version}), and would not "
                f"be read before that time, because of `min_age={self.options.min_age:g}`",
                "Correct the clock that has set it, and give the file a new modification time (`touch`); or leave `min_age` out",
            )

    def _warn_of_directories(self, files: Sequence[ListedFile]) -> None:
        if self.options.partition_columns is None and (
            named := next((file.name for file in files if list_partition_directories(file.name)), None)
        ):
            log.warning(
                "%s: directories such as that of `%s` give no columns: `partition_columns` is not set", self.options.uri, named
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
            tried = self._make_splits(new[:count])
            if len(tried) <= MAX_SPLITS and compute_encoded_size(tried) <= MAX_PLAN_BYTES:
                fits, splits = count, tried
            else:
                too_many = count
        if most and not fits:
            raise self._make_rejection(
                f"`{new[0].name}` of {new[0].size:,} bytes makes more than {MAX_SPLITS:,} splits of "
                f"{self.options.split_bytes:,} bytes, the most that a window's plan can hold",
                "Raise `split_bytes`, or have smaller files written",
            )
        return tuple(new[:fits]), splits

    def _make_splits(self, files: Sequence[ListedFile]) -> tuple[dict[str, Any], ...]:
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
        self._refuse_partition_columns_in_files(files, found)
        wanted = None if self.options.schema is None else parse_ddl(self.options.schema)
        named = None if wanted is None else {column.name for column in wanted}
        require_readable_columns(self.options.uri, files, found, named)
        if wanted is None:
            require_same_columns(self.options.uri, files, found)
        else:
            require_unchanged_values(self.options.uri, self.options.format, files, found, wanted)
        return sum(footer.rows for footer in found)

    def _refuse_partition_columns_in_files(self, files: Sequence[ListedFile], found: Sequence[FileFooter]) -> None:
        if self.options.schema is not None:
            return  # and `schema` has none of them
        given = {column.name.lower() for column in self.options.partitions.columns}
        for file, footer in zip(files, found, strict=True):
            if twice := next((name for name, _ in footer.columns if name.lower() in given), None):
                raise self._make_rejection(
                    f"`{file.name}` has the column `{twice}`, which its directory gives, too",
                    "Leave it out of `partition_columns` to read the file's column; or give `schema` without it, to read the "
                    "directory's",
                )
