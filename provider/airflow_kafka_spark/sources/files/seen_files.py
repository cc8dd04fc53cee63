"""The files of a directory that a pipeline has read, as it remembers them between windows. Pure.

Every file that was read is remembered by 16 bytes (hashes of its name and of its size, modification time and etag), which needs
no clock and no order. Beyond :data:`FORGET_ABOVE` files the oldest are forgotten, up to the *horizon*, a modification time and
name: a file at or before the horizon counts as read. The horizon stays before every file that was listed and not read, and before
the time of the listing by the allowed lateness.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_kafka_spark.sources.files.store import ListedFile

FORGET_ABOVE = 10_000
"""Number of files above which the oldest are forgotten: 213 KB of a ledger record."""
MAX_REMEMBERED = 15_000
"""Number of files that can be remembered at all: 320 KB of a ledger record."""
KEEP_REMOVED = 1_000
"""Number of files above which files that are no longer listed are forgotten."""

FileKey = tuple[int, str]
_ENTRY = struct.Struct(">8s4sI")


class TooManyFiles(ValueError):
    """Raised when more files would have to be remembered than fit.

    :ivar count: how many.
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
    :param late: how many more files than before lie at or before the horizon.
    """

    new: tuple[ListedFile, ...] = ()
    young: tuple[ListedFile, ...] = ()
    changed: tuple[ListedFile, ...] = ()
    read: tuple[ListedFile, ...] = ()
    late: int = 0


@dataclass(frozen=True)
class SeenFiles:
    """The files that were read so far.

    :param entries: per hash of a name, the hash of the version that was read and its modification time in seconds.
    :param horizon: the last file, in the order of reading, up to which all files count as read; None if nothing was forgotten.
    :param below: how many files were listed at or before the horizon.
    """

    entries: Mapping[bytes, tuple[bytes, int]] = field(default_factory=dict)
    horizon: FileKey | None = None
    below: int = 0

    @classmethod
    def load(cls, value: Mapping[str, Any]) -> SeenFiles:
        """Return what :meth:`dump` wrote.

        :raises ValueError: it is something else.
        """
        try:
            packed = base64.b64decode(value["files"])
            horizon = (int(value["horizon"][0]), str(value["horizon"][1])) if value["horizon"] else None
            entries = {name: (version, seconds) for name, version, seconds in _ENTRY.iter_unpack(packed)}
            return cls(entries, horizon, int(value["below"]))
        except (KeyError, TypeError, struct.error) as error:
            raise ValueError(f"not the memory of a directory: {error!r}") from error

    def dump(self) -> dict[str, Any]:
        """Return it as JSON, with 22 bytes per file."""
        packed = b"".join(_ENTRY.pack(name, *entry) for name, entry in self.entries.items())
        horizon = list(self.horizon) if self.horizon else None
        return {"files": base64.b64encode(packed).decode(), "horizon": horizon, "below": self.below}

    def is_below(self, file: ListedFile) -> bool:
        """Return True if the file lies at or before the horizon."""
        return self.horizon is not None and file.key <= self.horizon

    def classify(self, files: Iterable[ListedFile], before: int | None) -> DirectoryListing:
        """Sort the listed files into new, young, changed and read ones.

        :param files: all files that are listed.
        :param before: the modification time (microseconds) from which files are too young; None for no limit.
        """
        found: dict[str, list[ListedFile]] = {"new": [], "young": [], "changed": [], "read": []}
        below = 0
        for file in sorted(files, key=lambda f: f.key):
            below += self.is_below(file)
            known = self.entries.get(_name_hash(file))
            if known is not None:
                kind = "read" if known[0] == _version_hash(file) else "changed"
            elif self.is_below(file):
                kind = "read"
            else:
                kind = "new" if before is None or file.mtime < before else "young"
            found[kind].append(file)
        kinds = {kind: tuple(of_kind) for kind, of_kind in found.items()}
        return DirectoryListing(**kinds, late=max(0, below - self.below))

    def after_window(self, listing: DirectoryListing, taken: tuple[ListedFile, ...], settled: int) -> SeenFiles:
        """Return the files that are read once a window is published.

        :param listing: from :meth:`classify`.
        :param taken: the window's files.
        :param settled: modification time (microseconds) before which every file has been listed.
        :raises TooManyFiles: more than :data:`MAX_REMEMBERED` files would have to be remembered.
        """
        entries = dict(self.entries)
        for file in taken:
            entries.pop(_name_hash(file), None)
            entries[_name_hash(file)] = _version_hash(file), _seconds(file)
        listed = {_name_hash(f): f for f in (*listing.read, *listing.changed, *taken)}
        if len(entries) > KEEP_REMOVED:
            for name in [n for n, (_, seconds) in entries.items() if n not in listed and seconds < settled // 1_000_000]:
                del entries[name]
        horizon = self.horizon
        if len(entries) > FORGET_ABOVE:
            horizon = _forget_oldest(entries, listed, _horizon_bound(listing, taken, settled), self.horizon)
        if len(entries) > MAX_REMEMBERED:
            raise TooManyFiles(len(entries))
        below = sum(1 for f in listed.values() if f.key <= horizon) if horizon else 0
        return SeenFiles(entries, horizon, below)


def _horizon_bound(listing: DirectoryListing, taken: tuple[ListedFile, ...], settled: int) -> FileKey:
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


def _name_hash(file: ListedFile) -> bytes:
    return hashlib.blake2b(file.name.encode("utf-8", "surrogateescape"), digest_size=8).digest()


def _version_hash(file: ListedFile) -> bytes:
    return hashlib.blake2b(f"{file.size}:{file.mtime}:{file.etag}".encode(), digest_size=4).digest()


def _seconds(file: ListedFile) -> int:
    return min(max(file.mtime // 1_000_000, 0), 2**32 - 1)
