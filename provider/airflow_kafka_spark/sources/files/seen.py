"""The files of a directory that were read, as :class:`SeenFiles` remembers them.

Every file that was read is remembered by 16 bytes (hashes of its name and of its size, modification time and etag), which needs
no clock and no order. Beyond :data:`FORGET_ABOVE` files the oldest are forgotten, up to the *horizon*, a modification time and
name: a file at or before the horizon counts as read. The horizon stays before every file that was listed and not read, and before
the time of the listing by the allowed lateness. A file that is no longer listed may come back (a share that is mounted again): it
is remembered for :data:`DAYS_REMEMBERED` days.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from airflow_kafka_spark.sources.files.store import ListedFile

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
"""Modification time and name of a file; see :attr:`ListedFile.key`."""
_ENTRY = struct.Struct(">8s4sI")
"""A remembered file: hashes of its name and of its version, and the seconds of its modification time."""


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
