"""Which files of a directory were read: what a pipeline remembers between windows. Pure.

Every file that was read is remembered by 16 bytes (hashes of its name and of its size, modification time and etag), which needs
no clock and no order. Only beyond :data:`REMEMBERED` files the oldest are forgotten, up to the *horizon*, a modification time and
name: what is listed at or before the horizon counts as read. The horizon stays before every file that was listed and not read,
and before the time of the listing by the allowed lateness.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_kafka_spark.sources.files.splits import File

REMEMBERED = 10_000
"""Files beyond which the oldest are forgotten: 213 KB of a ledger record."""
MOST = 15_000
"""Files that can be remembered at all: 320 KB of a ledger record."""
GONE = 1_000
"""Files beyond which those that are listed no more are forgotten."""

Key = tuple[int, str]
_ENTRY = struct.Struct(">8s4sI")


class TooMany(ValueError):
    """More files would have to be remembered than fit. ``count`` says how many."""

    def __init__(self, count: int) -> None:
        self.count = count
        super().__init__(f"{count} files would have to be remembered, at most {MOST} can be")


@dataclass(frozen=True)
class Listing:
    """A directory's files, told apart.

    :param new: not read yet, in the order of reading.
    :param young: not read yet, and too young to be.
    :param changed: read, and replaced since.
    :param read: read, and unchanged; forgotten ones included.
    :param late: how many files have appeared at or before the horizon. Files that vanished there are subtracted.
    """

    new: tuple[File, ...] = ()
    young: tuple[File, ...] = ()
    changed: tuple[File, ...] = ()
    read: tuple[File, ...] = ()
    late: int = 0


@dataclass(frozen=True)
class Memory:
    """What is known of the files read so far.

    :param entries: per hash of a name, the hash of the version that was read and its modification time in seconds.
    :param horizon: up to which file, in the order of reading, everything counts as read; None as long as nothing was forgotten.
    :param below: files that were listed at or before the horizon.
    """

    entries: Mapping[bytes, tuple[bytes, int]] = field(default_factory=dict)
    horizon: Key | None = None
    below: int = 0

    @classmethod
    def load(cls, value: Mapping[str, Any]) -> Memory:
        """:raises ValueError: it is not what :meth:`dump` wrote."""
        try:
            packed = base64.b64decode(value["files"])
            horizon = (int(value["horizon"][0]), str(value["horizon"][1])) if value["horizon"] else None
            entries = {name: (version, seconds) for name, version, seconds in _ENTRY.iter_unpack(packed)}
            return cls(entries, horizon, int(value["below"]))
        except (KeyError, TypeError, struct.error) as error:
            raise ValueError(f"not the memory of a directory: {error!r}") from error

    def dump(self) -> dict[str, Any]:
        """As JSON, of 22 bytes a file."""
        packed = b"".join(_ENTRY.pack(name, *entry) for name, entry in self.entries.items())
        horizon = list(self.horizon) if self.horizon else None
        return {"files": base64.b64encode(packed).decode(), "horizon": horizon, "below": self.below}

    def is_below(self, file: File) -> bool:
        return self.horizon is not None and file.key <= self.horizon

    def sort(self, files: Iterable[File], before: int | None) -> Listing:
        """Tell new files from those that were read.

        :param files: everything that is listed.
        :param before: the modification time (microseconds) from which files are too young; None for no limit.
        """
        found: dict[str, list[File]] = {"new": [], "young": [], "changed": [], "read": []}
        below = 0
        for file in sorted(files, key=lambda f: f.key):
            below += self.is_below(file)
            known = self.entries.get(_name(file))
            if known is not None:
                kind = "read" if known[0] == _version(file) else "changed"
            elif self.is_below(file):
                kind = "read"
            else:
                kind = "new" if before is None or file.mtime < before else "young"
            found[kind].append(file)
        kinds = {kind: tuple(of_kind) for kind, of_kind in found.items()}
        return Listing(**kinds, late=max(0, below - self.below))

    def after(self, listing: Listing, taken: tuple[File, ...], settled: int) -> Memory:
        """The memory once a window is published.

        :param listing: what :meth:`sort` answered.
        :param taken: the window's files.
        :param settled: modification time (microseconds) before which every file has been listed.
        :raises TooMany: as it says.
        """
        entries = dict(self.entries)
        for file in taken:
            entries.pop(_name(file), None)
            entries[_name(file)] = _version(file), _seconds(file)
        listed = {_name(f): f for f in (*listing.read, *listing.changed, *taken)}
        if len(entries) > GONE:
            for name in [n for n, (_, seconds) in entries.items() if n not in listed and seconds < settled // 1_000_000]:
                del entries[name]
        horizon = self.horizon
        if len(entries) > REMEMBERED:
            horizon = _advance(entries, listed, _bound(listing, taken, settled), self.horizon)
        if len(entries) > MOST:
            raise TooMany(len(entries))
        below = sum(1 for f in listed.values() if f.key <= horizon) if horizon else 0
        return Memory(entries, horizon, below)


def _bound(listing: Listing, taken: tuple[File, ...], settled: int) -> Key:
    """The key that the horizon has to stay before."""
    done = {f.name for f in taken}
    return min(((settled, ""), *(f.key for f in (*listing.new, *listing.young) if f.name not in done)))


def _advance(
    entries: dict[bytes, tuple[bytes, int]], listed: Mapping[bytes, File], bound: Key, horizon: Key | None
) -> Key | None:
    """Forget the oldest files, and say up to which."""
    excess = len(entries) - REMEMBERED
    for name, file in sorted(((n, f) for n, f in listed.items() if n in entries), key=lambda item: item[1].key):
        if not excess or file.key >= bound:
            break
        del entries[name]
        horizon = max(horizon or file.key, file.key)
        excess -= 1
    return horizon


def _name(file: File) -> bytes:
    return hashlib.blake2b(file.name.encode("utf-8", "surrogateescape"), digest_size=8).digest()


def _version(file: File) -> bytes:
    return hashlib.blake2b(f"{file.size}:{file.mtime}:{file.etag}".encode(), digest_size=4).digest()


def _seconds(file: File) -> int:
    return min(max(file.mtime // 1_000_000, 0), 2**32 - 1)
