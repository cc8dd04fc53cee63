"""What a ledger holds of all its pipelines, kept as it came and folded record by record: a record changes one pipeline only.

Memory is bounded: of each pipeline the newest windows are kept, the older ones are only counted. Records are taken apart when
somebody looks, not when they come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from airflow_kafka_spark.windows.interval import parse_ledger_name
from airflow_kafka_spark.windows.memory import (
    ARCHIVE,
    CONTROL,
    PAUSE_VERSION,
    VERSION,
    LedgerRecord,
    Memory,
    NewerVersion,
    remember,
)

KEEP = 200
"""Windows of a pipeline that are kept whole; older ones are counted."""
KEEP_OTHERS = 1_000
"""Records of a pipeline of every other kind: splits, changes, dead letters ..."""
MOST_NUMBER = 10_000_000
"""A window's number beyond this is no number of ours."""
REMARKS = 20
"""Unreadable records of a ledger that are told one by one."""

_PLANNED = re.compile(rb'"state"\s*:\s*"PLANNED"')
_COMPLETE = re.compile(rb'"state"\s*:\s*"COMPLETE"')
_COUNT = re.compile(rb'"count"\s*:\s*(\d{1,9})')
_STATE_BYTES = 80
"""The state comes first in a window's record, behind the version."""


class Kept(NamedTuple):
    """A record as it came."""

    key: bytes
    value: bytes
    offset: int

    @property
    def is_open(self) -> bool:
        return bool(_PLANNED.search(self.value, 0, _STATE_BYTES))


@dataclass
class Shelf:
    """What the ledger holds of one pipeline and of its lanes.

    :param version: grows with every record.
    """

    pipeline: str
    version: int = 0
    _windows: dict[int, Kept] = field(default_factory=dict)
    _live: int = 0
    _others: dict[tuple[Any, ...], Kept] = field(default_factory=dict)
    _intervals: dict[str, Kept] = field(default_factory=dict)
    _complete: set[str] = field(default_factory=set)
    _known: set[str] = field(default_factory=set)
    _archived: dict[str, int] = field(default_factory=dict)
    _lanes: dict[str, dict[tuple[Any, ...], Kept]] = field(default_factory=dict)
    _cache: dict[Any, tuple[int, Any]] = field(default_factory=dict)

    # --- taking records in ---

    def put(self, lane: str | None, key: tuple[Any, ...], record: LedgerRecord) -> None:
        """:param key: without the pipeline: ``("window", 7)``."""
        self.version += 1
        kept = None if record.value is None else Kept(record.key, record.value, record.offset)
        kind = key[0]
        if lane is not None:
            self._put_lane(lane, key, kept)
        elif kind == "window":
            self._put_window(key[1], kept)
        elif kind == "interval":
            self._put_interval(key[1], kept)
        elif kind == ARCHIVE:
            self._put_archive(key[1], kept)
        else:
            _put(self._others, key, kept, KEEP_OTHERS)

    def _put_window(self, number: int, kept: Kept | None) -> None:
        bit = 1 << number
        if kept is None:
            self._windows.pop(number, None)
            self._live &= ~bit
            return
        self._live |= bit
        self._windows[number] = kept
        if len(self._windows) > KEEP:
            # The one that is worked on is never let go of, however old its number is.
            del self._windows[next(n for n in sorted(self._windows) if not self._windows[n].is_open)]

    def _put_interval(self, name: str, kept: Kept | None) -> None:
        (self._known.discard if kept is None else self._known.add)(name)
        complete = kept is not None and bool(_COMPLETE.search(kept.value))
        (self._complete.add if complete else self._complete.discard)(name)
        _put(self._intervals, name, kept, KEEP)

    def _put_archive(self, name: str, kept: Kept | None) -> None:
        """Count the old intervals of an archive: nobody looks at them one by one here."""
        count = _COUNT.search(kept.value, 0, _STATE_BYTES) if kept is not None else None
        if count is None:
            self._archived.pop(name, None)
        else:
            self._archived[name] = int(count[1])

    def _put_lane(self, lane: str, key: tuple[Any, ...], kept: Kept | None) -> None:
        records = self._lanes.setdefault(lane, {})
        _put(records, key, kept, KEEP)
        if not records:
            del self._lanes[lane]
        elif len(self._lanes) > KEEP:
            closed = [name for name in sorted(self._lanes) if not any(_is_open(r) for r in self._lanes[name].items())]
            if closed:
                del self._lanes[closed[0]]

    # --- what is there ---

    @property
    def is_empty(self) -> bool:
        return not (self._windows or self._live or self._others or self._known or self._archived or self._lanes)

    @property
    def intervals(self) -> tuple[int, int]:
        """How many data intervals it knows, and how many of them are complete."""
        archived = sum(self._archived.values())
        return len(self._known) + archived, len(self._complete) + archived

    @property
    def windows_total(self) -> int:
        """How many windows the ledger holds, those that are not kept here included."""
        return self._live.bit_count() + len(self._known) + sum(self._archived.values())

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the windows that are kept, the newest first."""
        return tuple(sorted(self._windows, reverse=True))

    @property
    def lanes(self) -> tuple[str, ...]:
        """The intervals whose windows are kept, the newest first."""
        return tuple(sorted(self._lanes, reverse=True))

    @property
    def open_numbers(self) -> tuple[int, ...]:
        return tuple(number for number, kept in self._windows.items() if kept.is_open)

    def memory(self, newest: int = KEEP) -> Memory:
        """What the pipeline remembers, with so many of its newest windows and with all that are open.

        :raises NewerVersion: a later release wrote one of its records.
        :raises ValueError: a record cannot be read.
        """
        return self._cached(("memory", newest), lambda: self._memory(newest))

    def _memory(self, newest: int) -> Memory:
        numbers = {*self.numbers[:newest], *self.open_numbers}
        windows = [self._windows[number] for number in sorted(numbers)]
        others = [kept for key, kept in self._others.items() if key[0] != "split" or key[1] in numbers]
        names = sorted(self._intervals)[-newest:]
        return _remembered(self.pipeline, [*others, *(self._intervals[name] for name in names), *windows])

    def lane(self, interval: str) -> Memory:
        """What it remembers of one data interval.

        :raises NewerVersion: as :meth:`memory`, and ``ValueError``.
        """
        name = f"{self.pipeline}.{interval}"
        return self._cached(("lane", interval), lambda: _remembered(name, list(self._lanes.get(interval, {}).values())))

    def newest_lanes(self, newest: int) -> list[Memory]:
        """The memories of so many of its newest data intervals, and of all whose window is open."""
        names = self.lanes
        wanted = {*names[:newest], *(n for n in names if any(_is_open(r) for r in self._lanes[n].items()))}
        return [self.lane(name) for name in sorted(wanted, reverse=True)]

    def _cached(self, what: Any, make: Any) -> Any:
        """Kept until the next record comes; a handful of answers only."""
        found = self._cache.get(what)
        if found is None or found[0] != self.version:
            if len(self._cache) >= KEEP:
                self._cache.clear()
            version = self.version
            self._cache[what] = found = (version, make())
        return found[1]

    def mentions(self, text: bytes) -> bool:
        """Whether one of its windows has this text in its record."""
        lanes = (kept for records in self._lanes.values() for kept in records.values())
        return any(text in kept.value for kept in (*self._windows.values(), *lanes))

    def forget_answers(self) -> None:
        """Let go of what was taken apart: it takes several times the memory of the records."""
        self._cache.clear()


def _remembered(pipeline: str, kept: list[Kept]) -> Memory:
    try:
        return remember(pipeline, [LedgerRecord(*record) for record in kept])
    except NewerVersion:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a record that cannot be read ({type(error).__name__})") from None


def _put(records: dict[Any, Kept], key: Any, kept: Kept | None, most: int) -> None:
    if kept is None:
        records.pop(key, None)
        return
    records[key] = kept
    if len(records) > most:
        for name in records:
            if name[0] not in ("position", CONTROL):
                del records[name]
                return


def _is_open(record: tuple[tuple[Any, ...], Kept]) -> bool:
    key, kept = record
    return key[0] == "window" and kept.is_open


@dataclass
class Shelves:
    """What a ledger holds of all pipelines.

    :param remarks: records that cannot be read, in words; at most :data:`REMARKS`.
    """

    pipelines: dict[str, Shelf] = field(default_factory=dict)
    records: int = 0
    remarks: list[str] = field(default_factory=list)

    def add(self, partition: int, record: LedgerRecord) -> str | None:
        """Take a record in: the pipeline that it changes, None when it belongs to none."""
        self.records += 1
        try:
            name, *rest = json.loads(record.key)
        except (ValueError, TypeError):
            self._remark(partition, record, "its key is no JSON list")
            return None
        if name is None:  # boundaries belong to topics
            return None
        if not (isinstance(name, str) and rest and _is_key(rest)):
            self._remark(partition, record, "its key is of no kind that is known")
            return None
        family, lane = parse_ledger_name(name)
        shelf = self.pipelines.get(family)
        if shelf is None:
            if record.value is None:
                return None
            shelf = self.pipelines[family] = Shelf(family)
        if reason := _unreadable(record, rest[0]):
            self._remark(partition, record, f"of pipeline `{family}`, {reason}")
        shelf.put(lane, tuple(rest), record)
        if shelf.is_empty:
            del self.pipelines[family]
        return family

    def _remark(self, partition: int, record: LedgerRecord, reason: str) -> None:
        if len(self.remarks) < REMARKS:
            self.remarks.append(f"partition {partition}, offset {record.offset}: {reason}")

    def __iter__(self) -> Iterator[Shelf]:
        return iter(list(self.pipelines.values()))


_VERSION = re.compile(rb'^\{"v":(\d{1,6}),')


def _unreadable(record: LedgerRecord, kind: str) -> str:
    """Why a value cannot be read, "" if it can: by its first bytes, since the whole of it is taken apart only when needed."""
    if record.value is None:
        return ""
    found = _VERSION.match(record.value)
    if found:
        version: Any = int(found[1])
    else:
        try:
            version = json.loads(record.value)["v"]
        except (ValueError, TypeError, KeyError):
            return "its value is no record of a ledger"
    if not isinstance(version, int):
        return "its value is no record of a ledger"
    newest = PAUSE_VERSION if kind == CONTROL else VERSION
    return f"it is of version {version}, newer than {newest}" if version > newest else ""


def _is_key(rest: list[Any]) -> bool:
    kind, *numbers = rest
    if not isinstance(kind, str) or not all(isinstance(n, (int, str)) and not isinstance(n, bool) for n in numbers):
        return False
    if kind == "window":
        return len(numbers) == 1 and isinstance(numbers[0], int) and 0 <= numbers[0] < MOST_NUMBER
    return kind not in ("interval", ARCHIVE) or (len(numbers) == 1 and isinstance(numbers[0], str))
