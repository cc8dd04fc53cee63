"""Windows of files: their end and their splits. A window is the new files of a directory, from the oldest.

**Files that were read** (:class:`SeenFiles`). Every file that was read is remembered by 16 bytes (hashes of its name and of its
size, modification time and etag), which needs no clock and no order. Beyond :data:`FORGET_ABOVE` files the oldest are
forgotten, up to the *horizon*, a modification time and name: a file at or before the horizon counts as read. The horizon stays
before every file that was listed and not read, and before the time of the listing by the allowed lateness. A file that is no
longer listed may come back (a share that is mounted again): it is remembered for :data:`DAYS_REMEMBERED` days.

**Splits.** A window's files are split exactly as Spark's file sources split them, so that Spark reads the splits that were
frozen. Spark orders the slices of files by length, longest first, and fills partitions with them one after the other
(``FilePartition.getFilePartitions``). With :func:`make_spark_settings` the outcome depends on order and sizes of the files only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
import struct
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from airflow_kafka_spark.errors import SourceRejected, SourceUnavailable
from airflow_kafka_spark.formats.types import parse_ddl
from airflow_kafka_spark.sources.base import MAX_SPLITS, FrozenWindow
from airflow_kafka_spark.sources.files.options import FilesSourceOptions
from airflow_kafka_spark.sources.files.partitions import list_partition_directories
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

FORGET_ABOVE = 10_000
"""Number of files above which the oldest are forgotten: 213 KB of a ledger record."""
MAX_REMEMBERED = 15_000
"""Number of files that can be remembered at all: 320 KB of a ledger record."""
KEEP_REMOVED = 1_000
"""Number of files above which files are forgotten that have not been listed for :data:`DAYS_REMEMBERED` days."""
DAYS_REMEMBERED = 7
"""Number of days for which a file that is no longer listed is remembered, unless :data:`FORGET_ABOVE` is reached."""
ANY_DAY = -(2**31)
"""Key of the count of a position that does not distinguish days."""

FileKey = tuple[int, str]
_ENTRY = struct.Struct(">8s4sI")


class TooManyFiles(ValueError):
    """Raised when more files would have to be remembered than fit.

    :ivar count: number of files.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        super().__init__(f"{count} files would have to be remembered, at most {MAX_REMEMBERED} can be")


@dataclass(frozen=True)
class DirectoryListing:
    """The listed files of a directory, sorted into new, young, changed and read ones.

    :param new: not read yet, in the order of reading.
    :param young: not read yet, and younger than ``min_age``.
    :param changed: read, and replaced since.
    :param read: read, and unchanged; forgotten ones included.
    :param late: number of files at or before the horizon, beyond those of the previous listing. They are counted by day, so that
        old files that were removed do not make up for files that came late.
    :param below: number of files at or before the horizon, by the day of their modification (UTC).
    """

    new: tuple[ListedFile, ...] = ()
    young: tuple[ListedFile, ...] = ()
    changed: tuple[ListedFile, ...] = ()
    read: tuple[ListedFile, ...] = ()
    late: int = 0
    below: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SeenFiles:
    """The files that were read so far.

    :param entries: per hash of a name, the hash of the version that was read and its modification time in seconds.
    :param horizon: the last file, in the order of reading, up to which all files count as read; None if nothing was forgotten.
    :param below: number of files that were listed at or before the horizon, by the day of their modification (UTC).
    :param gone: number of files that are no longer listed, by the day (UTC) of the first window without them. They are the first
        ones of ``entries``, in the order of these days.
    """

    entries: Mapping[bytes, tuple[bytes, int]] = field(default_factory=dict)
    horizon: FileKey | None = None
    below: Mapping[int, int] = field(default_factory=dict)
    gone: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def load(cls, value: Mapping[str, Any]) -> SeenFiles:
        """Return the files from the text that :meth:`dump` has returned.

        :raises ValueError: the text has another form.
        """
        try:
            packed = base64.b64decode(value["files"])
            horizon = (int(value["horizon"][0]), str(value["horizon"][1])) if value["horizon"] else None
            entries = {name: (version, seconds) for name, version, seconds in _ENTRY.iter_unpack(packed)}
            below = value["below"]
            by_day = [(ANY_DAY, below)] if isinstance(below, int) else below
            return cls(entries, horizon, _load_counts(by_day), _load_counts(value.get("gone", ())))
        except (KeyError, TypeError, struct.error) as error:
            raise ValueError(f"not the memory of a directory: {error!r}") from error

    def dump(self) -> dict[str, Any]:
        """Return these files as JSON, with 22 bytes per file."""
        packed = b"".join(_ENTRY.pack(name, *entry) for name, entry in self.entries.items())
        horizon = list(self.horizon) if self.horizon else None
        below, gone = ([list(pair) for pair in sorted(counts.items())] for counts in (self.below, self.gone))
        files = base64.b64encode(packed).decode()
        return {"files": files, "horizon": horizon, "below": below, **({"gone": gone} if gone else {})}

    def is_below(self, file: ListedFile) -> bool:
        """Return True if the file lies at or before the horizon."""
        return self.horizon is not None and file.key <= self.horizon

    def classify(self, files: Iterable[ListedFile], before: int | None) -> DirectoryListing:
        """Sort the listed files into new, young, changed and read ones.

        :param files: all files that are listed.
        :param before: the modification time (microseconds) from which files are too young; None for no limit.
        """
        found: dict[str, list[ListedFile]] = {"new": [], "young": [], "changed": [], "read": []}
        below: Counter[int] = Counter()
        for file in sorted(files, key=lambda f: f.key):
            if self.is_below(file):
                below[file.day] += 1
            known = self.entries.get(_hash_name(file))
            if known is not None:
                kind = "read" if known[0] == _hash_version(file) else "changed"
            elif self.is_below(file):
                kind = "read"
            else:
                kind = "new" if before is None or file.mtime < before else "young"
            found[kind].append(file)
        kinds = {kind: tuple(of_kind) for kind, of_kind in found.items()}
        late = sum(max(0, count - self.below.get(day, 0)) for day, count in below.items()) - self.below.get(ANY_DAY, 0)
        return DirectoryListing(**kinds, late=max(0, late), below=below)

    def add_window(
        self,
        listing: DirectoryListing,
        taken: tuple[ListedFile, ...],
        settled: int,
        today: int,
        unselected: Callable[[], Iterable[ListedFile]] = tuple,
    ) -> SeenFiles:
        """Return the files that are read once a window is published.

        :param listing: from :meth:`classify`.
        :param taken: the window's files.
        :param settled: modification time (microseconds) before which every file has been listed.
        :param today: day of the listing, in days since the epoch (UTC).
        :param unselected: lists files that are not in ``listing`` because other options selected them. Default: there are none.
        :raises TooManyFiles: more than :data:`MAX_REMEMBERED` files would have to be remembered.
        """
        entries = dict(self.entries)
        for file in taken:
            entries.pop(_hash_name(file), None)
            entries[_hash_name(file)] = _hash_version(file), _round_to_seconds(file)
        listed = {_hash_name(f): f for f in (*listing.read, *listing.changed, *taken)}
        gone = self._find_gone(entries, listed, today, unselected)
        for name, since in list(gone.items()):
            is_old = len(entries) > KEEP_REMOVED and since <= today - DAYS_REMEMBERED
            if (is_old or len(entries) > FORGET_ABOVE) and entries[name][1] < settled // 1_000_000:
                del entries[name], gone[name]
        entries = {**{name: entries[name] for name in gone}, **entries}
        horizon = self.horizon
        if len(entries) > FORGET_ABOVE:
            horizon = _forget_oldest(entries, listed, _find_horizon_bound(listing, taken, settled), self.horizon)
        if len(entries) > MAX_REMEMBERED:
            raise TooManyFiles(len(entries))
        below = Counter(file.day for file in listed.values() if horizon and file.key <= horizon)
        return SeenFiles(entries, horizon, below, Counter(gone.values()))

    def _find_gone(
        self,
        entries: Collection[bytes],
        listed: Collection[bytes],
        today: int,
        unselected: Callable[[], Iterable[ListedFile]],
    ) -> dict[bytes, int]:
        """Return the files that are no longer listed, with the day of the first window without each, the oldest day first."""
        days = (day for day, count in sorted(self.gone.items()) for _ in range(count))
        known = dict(zip(self.entries, days, strict=False))
        missing = [name for name in entries if name not in listed]
        there = {_hash_name(f) for f in unselected()} if missing else set()
        gone = {name: known.get(name, today) for name in missing if name not in there}
        return dict(sorted(gone.items(), key=lambda item: item[1]))


def _load_counts(value: Iterable[Sequence[Any]]) -> dict[int, int]:
    return {int(day): int(count) for day, count in value}


def _find_horizon_bound(listing: DirectoryListing, taken: tuple[ListedFile, ...], settled: int) -> FileKey:
    """Return the key that the horizon has to stay before."""
    done = {f.name for f in taken}
    return min(((settled, ""), *(f.key for f in (*listing.new, *listing.young) if f.name not in done)))


def _forget_oldest(
    entries: dict[bytes, tuple[bytes, int]], listed: Mapping[bytes, ListedFile], bound: FileKey, horizon: FileKey | None
) -> FileKey | None:
    """Remove the oldest files from ``entries`` and return the new horizon."""
    excess = len(entries) - FORGET_ABOVE
    for name, file in sorted(((n, f) for n, f in listed.items() if n in entries), key=lambda item: item[1].key):
        if not excess or file.key >= bound:
            break
        del entries[name]
        horizon = max(horizon or file.key, file.key)
        excess -= 1
    return horizon


def _hash_name(file: ListedFile) -> bytes:
    return hashlib.blake2b(file.name.encode("utf-8", "surrogateescape"), digest_size=8).digest()


def _hash_version(file: ListedFile) -> bytes:
    return hashlib.blake2b(f"{file.size}:{file.mtime}:{file.etag}".encode(), digest_size=4).digest()


def _round_to_seconds(file: ListedFile) -> int:
    return min(max(file.mtime // 1_000_000, 0), 2**32 - 1)


SPLITTABLE = ("parquet", "orc")
_UNSPLITTABLE_CODECS = (".gz", ".deflate", ".snappy", ".lz4", ".zst")
"""Suffixes, in any case, of compressed text that Hadoop can read from its beginning only. (``.bz2`` files can be split.)"""
_GLOB_CHARACTERS = re.compile(r"[{}\[\]*?\\]")
_MAX_FILES_OF_SPLIT = 64
"""Maximum number of files in a split: the cost of opening a file counts as one split divided by this number."""


@dataclass(frozen=True)
class FileSlice:
    """The bytes ``[start, start + length)`` of a file."""

    file: ListedFile
    start: int
    length: int

    @property
    def is_whole(self) -> bool:
        return self.length == self.file.size


FileSplit = tuple[FileSlice, ...]
"""The slices that one Spark partition reads, in its order."""


def is_splittable(name: str, format: str, options: Mapping[str, str]) -> bool:
    """Return True if Spark can begin to read the file in its middle.

    :param options: the reader's, with names in lower case.
    """
    if format in SPLITTABLE:
        return True
    whole = {"json": "multiline", "csv": "multiline", "text": "wholetext"}[format]
    return options.get(whole, "").lower() != "true" and not name.lower().endswith(_UNSPLITTABLE_CODECS)


def split_files(files: Iterable[ListedFile], split_bytes: int, unsplittable: Collection[str] = ()) -> tuple[FileSplit, ...]:
    """Return Spark's partitions for these files, in Spark's order.

    :param files: of at least a byte each, in any order.
    :param split_bytes: the length of the longest slice.
    :param unsplittable: names of files that are not cut.
    """
    slices: list[FileSlice] = []
    for file in sort_like_spark(files):
        step = file.size if file.name in unsplittable else split_bytes
        slices += [FileSlice(file, start, min(step, file.size - start)) for start in range(0, file.size, step)]
    slices.sort(key=lambda s: -s.length)  # stable, as Spark's: slices of one length stay in the order of their files
    splits: list[FileSplit] = []
    split: list[FileSlice] = []
    filled = 0
    for part in slices:
        if filled + part.length > split_bytes and split:
            splits.append(tuple(split))
            split, filled = [], 0
        filled += part.length + compute_open_cost(split_bytes)
        split.append(part)
    return (*splits, tuple(split)) if split else tuple(splits)


def sort_like_spark(files: Iterable[ListedFile]) -> list[ListedFile]:
    """Return the files in the order in which Spark lists them: paths that look like a pattern come first, then the oldest."""
    return sorted(files, key=lambda f: (_GLOB_CHARACTERS.search(f.name) is None, f.key))


def escape_path(path: str) -> str:
    """Return a path in which Spark takes no character for a part of a pattern.

    (The option ``__globPaths__`` exists for this. With it off, Spark 4.0 reads all files as often as there are such paths.)
    """
    return _GLOB_CHARACTERS.sub(r"\\\g<0>", path)


def find_unreadable_reason(path: str) -> str | None:
    """Return the reason why Spark cannot open a file; None if it can.

    :param path: without its scheme.
    """
    try:
        path.encode()
    except UnicodeEncodeError:
        return "is not UTF-8"
    if "//" in path.lstrip("/"):  # names of objects may have such components
        return "has an empty component in its path"
    # Hadoop looks such paths up component by component, and takes the text before the colon for a scheme.
    return "has both a `:` and one of `{}[]*?\\` in its path" if ":" in path and _GLOB_CHARACTERS.search(path) else None


def compute_open_cost(split_bytes: int) -> int:
    """Return the number of bytes that the opening of a file counts as."""
    return max(1, split_bytes // _MAX_FILES_OF_SPLIT)


def make_spark_settings(split_bytes: int) -> dict[str, str]:
    """Return the settings with which Spark splits as :func:`split_files` does."""
    return {
        "spark.sql.files.maxPartitionBytes": str(split_bytes),
        "spark.sql.files.openCostInBytes": str(compute_open_cost(split_bytes)),
        # Otherwise the splits would depend on the number of cores.
        "spark.sql.files.minPartitionNum": "1",
        "spark.sql.files.maxPartitionNum": str(2**31 - 1),
    }


# --- as JSON -------------------------------------------------------------------------------------------------------------


def encode_split(split: FileSplit, split_bytes: int) -> dict[str, Any]:
    """Return a split as JSON: ``{"files": [[name, start, length, size, mtime(, etag)], ...], "split_bytes": n}``."""
    files = []
    for part in split:
        name, size, mtime, etag = astuple(part.file)
        files.append([name, part.start, part.length, size, mtime, *([etag] if etag else [])])
    return {"files": files, "split_bytes": split_bytes}


def decode_split(split: Mapping[str, Any]) -> FileSplit:
    """Return the split from the value of :func:`encode_split`."""
    return tuple(
        FileSlice(ListedFile(name, size, mtime, *etag), start, length)
        for name, start, length, size, mtime, *etag in split["files"]
    )


def compute_encoded_size(splits: Sequence[Mapping[str, Any]]) -> int:
    """Return the size of the splits as JSON, in bytes."""
    return len(json.dumps(list(splits)))


MAX_PLAN_BYTES = 400_000
"""Maximum size of a window's splits as JSON, in bytes: about 4,000 files with names of the usual length."""
MAX_FILES = 5_000
"""Maximum number of files in a window."""
CLOCK_TOLERANCE = 300
"""Seconds by which the clock of the store may be ahead of that of this worker."""
FORMATS_WITH_FOOTER = ("parquet", "orc")


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
        named = None if self.options.schema is None else {column.name for column in parse_ddl(self.options.schema)}
        require_readable_columns(self.options.uri, files, found, named)
        if named is None:
            require_same_columns(self.options.uri, files, found)
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
