"""What the ledger holds of one pipeline, and the shape of its records: keys and values are JSON that ``kcat`` shows as it is.

Three kinds of record, all keyed by pipeline so that compaction keeps the newest of each:

``["<pipeline>", "position"]``
    where the pipeline stands, and the number of its last complete window.
``["<pipeline>", "window", <number>]``
    one window: PLANNED with the attempt that works on it, later COMPLETE with its report; finally a tombstone.
``["<pipeline>", "split", <number>, <index>]``
    a split of the open window that is published: written in the transaction of its records, a tombstone once the window is
    complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from airflow_kafka_spark.windows.codec import (
    marker_from_json,
    marker_to_json,
    position_from_json,
    position_to_json,
    window_from_json,
    window_to_json,
)
from airflow_kafka_spark.windows.model import Marker, State, Window
from airflow_kafka_spark.windows.plan import Position

VERSION = 1
"""Of the records. A record of a newer version is refused, never guessed at."""


class NewerVersion(ValueError):
    """A record was written by a later release."""


class LedgerRecord(NamedTuple):
    """A record of the ledger topic: ``value`` is None for a tombstone."""

    key: bytes
    value: bytes | None
    offset: int = -1


@dataclass(frozen=True)
class Attempt:
    """One try at a window.

    :param number: from 1.
    :param token: unguessable; whose token is in the ledger owns the window.
    :param run: the run it belongs to.
    :param started_at: UTC instant, ISO 8601.
    """

    number: int
    token: str
    run: str
    started_at: str


@dataclass(frozen=True)
class Entry:
    """A window as the ledger knows it.

    :param report: the report of a COMPLETE window, as JSON.
    :param offset: where its newest record lies in the ledger partition; -1 when not read from there.
    """

    window: Window
    state: State
    attempt: Attempt
    report: Mapping[str, Any] | None = None
    offset: int = -1


@dataclass(frozen=True)
class Memory:
    """Everything the ledger holds of one pipeline.

    :param position: where it stands; empty for a pipeline without a past.
    :param last_number: number of its last COMPLETE window, 0 without one.
    :param entries: its recent windows by number.
    :param exists: False when the ledger has never heard of it.
    :param markers: splits that are published, by window number and split index.
    """

    pipeline: str
    position: Position = field(default_factory=Position)
    last_number: int = 0
    entries: Mapping[int, Entry] = field(default_factory=dict)
    exists: bool = False
    markers: Mapping[tuple[int, int], Marker] = field(default_factory=dict)

    @property
    def open_entry(self) -> Entry | None:
        """The window that is PLANNED and not COMPLETE; it is finished before anything else is planned."""
        return next((e for e in self.entries.values() if e.state is State.PLANNED), None)

    def completed_by(self, run: str) -> Entry | None:
        """The COMPLETE window that this run planned, if it is still remembered."""
        return next((e for e in self.entries.values() if e.window.run == run and e.state is State.COMPLETE), None)

    def owned(self, number: int, token: str) -> Entry | None:
        """The window ``number`` while the attempt with this token is the one that works on it, or has completed it; else None."""
        entry = self.entries.get(number)
        return entry if entry is not None and entry.attempt.token == token else None

    @property
    def oldest_offset(self) -> int:
        """Where a reader of the ledger partition has to begin to see every remembered window."""
        return min((e.offset for e in self.entries.values() if e.offset >= 0), default=-1)


def position_record(pipeline: str, position: Position, last_number: int) -> LedgerRecord:
    value = {"v": VERSION, "position": position_to_json(position), "last_number": last_number}
    return LedgerRecord(_dump([pipeline, "position"]), _dump(value))


def window_record(entry: Entry) -> LedgerRecord:
    attempt = entry.attempt
    value = {
        "v": VERSION,
        "state": entry.state.value,
        "window": window_to_json(entry.window),
        "attempt": {"number": attempt.number, "token": attempt.token, "run": attempt.run, "started_at": attempt.started_at},
        "report": entry.report,
    }
    return LedgerRecord(window_key(entry.window.pipeline, entry.window.number), _dump(value))


def marker_record(pipeline: str, marker: Marker) -> LedgerRecord:
    return LedgerRecord(
        marker_key(pipeline, marker.window, marker.split), _dump({"v": VERSION, "marker": marker_to_json(marker)})
    )


def marker_key(pipeline: str, number: int, split: int) -> bytes:
    return _dump([pipeline, "split", number, split])


def window_key(pipeline: str, number: int) -> bytes:
    return _dump([pipeline, "window", number])


def remember(pipeline: str, records: Iterable[LedgerRecord]) -> Memory:
    """Fold the records of a ledger partition, oldest first, into what they say of one pipeline.

    :raises NewerVersion: for a record of this pipeline that a later release wrote.
    :raises ValueError: for a record of this pipeline that cannot be read.
    """
    position, last_number, exists = Position(), 0, False
    entries: dict[int, Entry] = {}
    markers: dict[tuple[int, int], Marker] = {}
    mine = key_prefix(pipeline)
    for record in records:
        if not record.key.startswith(mine):
            continue
        exists = True
        kind, *number = json.loads(record.key)[1:]
        if record.value is None:
            if kind == "window":
                entries.pop(number[0], None)
            elif kind == "split":
                markers.pop(tuple(number), None)
            continue
        value = json.loads(record.value)
        if value["v"] > VERSION:
            raise NewerVersion(f"a record of version {value['v']} at offset {record.offset}")
        if kind == "position":
            position, last_number = position_from_json(value["position"]), value["last_number"]
        elif kind == "window":
            entry = Entry(
                window=window_from_json(value["window"]),
                state=State(value["state"]),
                attempt=Attempt(**value["attempt"]),
                report=value.get("report"),
                offset=record.offset,
            )
            entries[entry.window.number] = entry
        elif kind == "split":
            markers[tuple(number)] = marker_from_json(value["marker"])
    return Memory(pipeline, position, last_number, entries, exists, markers)


def key_prefix(pipeline: str) -> bytes:
    """What all keys of a pipeline begin with, and no other pipeline's."""
    return _dump([pipeline])[:-1] + b","


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
