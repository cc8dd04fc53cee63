"""The ledger's records of one pipeline, and the state that they fold into. Keys and values are JSON, readable with ``kcat``.

Kinds of record, all keyed by pipeline so that compaction keeps the newest of each:

``["<pipeline>", "position"]``
    the position of the pipeline, and the number of its last complete window.
``["<pipeline>", "window", <number>]``
    a window: PLANNED with the attempt that works on it, later COMPLETE with its report; finally a tombstone.
``["<pipeline>", "interval", "<name>"]``
    a data interval: its offsets and its state. The window of the interval has a ledger name of its own
    (:mod:`~airflow_kafka_spark.windows.interval`).
``["<pipeline>", "intervals", "<name of the span>"]``
    an archive of old intervals (:mod:`~airflow_kafka_spark.windows.interval_archive`).
``["<pipeline>", "split", <number>, <index>]``
    the marker of a published split of the open window, written in the transaction of the split's records; a tombstone once the
    window is complete.
``["<pipeline>", "dead", <number>]``
    the dead letters and routed records of a window (:mod:`~airflow_kafka_spark.windows.dead_letters`).
``["<pipeline>", "change", <number>]``
    a manual change of its offsets (:mod:`~airflow_kafka_spark.windows.changes`).
``["<pipeline>", "control", <number>]``
    a control request that may come while an attempt is running: pause, resume, replay a window. No attempt writes under these
    keys.
``["<pipeline>", "binding"]``
    the task, the destination and the origin of its newest window (:mod:`~airflow_kafka_spark.windows.binding`).
``[null, "group", "<group>"]``
    the pipeline that has planned its first window for a consumer group. The metadata of the group's offsets name it only once
    that window is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timezone
from typing import Any, NamedTuple

from airflow_kafka_spark.windows.binding import Binding, binding_from_json, binding_to_json
from airflow_kafka_spark.windows.changes import Change, Forgotten, change_from_json, change_to_json
from airflow_kafka_spark.windows.codec import (
    encode_json,
    interval_from_json,
    interval_to_json,
    marker_from_json,
    marker_to_json,
    position_from_json,
    position_to_json,
    window_from_json,
    window_to_json,
)
from airflow_kafka_spark.windows.dead_letters import (
    DeadLetters,
    Runs,
    dead_letters_from_json,
    dead_letters_to_json,
    group_into_runs,
    list_run_offsets,
    unite_offsets,
)
from airflow_kafka_spark.windows.interval import NUMBER, Interval, IntervalState, find_contiguous_offsets
from airflow_kafka_spark.windows.interval_archive import IntervalArchive, Intervals, archive_from_json, archive_to_json
from airflow_kafka_spark.windows.model import (
    Landed,
    Marker,
    Published,
    State,
    TaskInstanceKey,
    TopicPartition,
    Tries,
    Window,
    add_landed,
    tries_from_json,
    tries_to_json,
)
from airflow_kafka_spark.windows.plan import Position, find_next_position, merge_positions
from airflow_kafka_spark.windows.times import parse_iso

VERSION = 1
"""Version of the records' format. A record of a newer version is refused."""
PAUSE_VERSION = 2
"""Version of the record of a pause, so that releases without pauses refuse it instead of ignoring it."""

CONTROL = "control"
INTERVAL = "interval"
ARCHIVE = "intervals"
BINDING = "binding"
GROUP = "group"


class NewerVersion(ValueError):
    """Raised when a record was written by a later release."""


class LedgerRecord(NamedTuple):
    """A record of the ledger topic. ``value`` is None for a tombstone. ``epoch`` is the leader epoch in which it was written.

    Offset and epoch are -1 if the record was not read from the topic.
    """

    key: bytes
    value: bytes | None
    offset: int = -1
    epoch: int = -1


@dataclass(frozen=True)
class Attempt:
    """One attempt at a window.

    :param number: number of the attempt at this window, from 1.
    :param token: random token. The attempt whose token is in the ledger owns the window.
    :param run: the run that the attempt belongs to.
    :param started_at: UTC instant, ISO 8601.
    """

    number: int
    token: str
    run: str
    started_at: str


@dataclass(frozen=True)
class WindowEntry:
    """The ledger's record of a window.

    :param report: the report of a COMPLETE window, as JSON; during a replay, the previous report.
    :param offset: offset of its newest record in the ledger partition; -1 if it was not read from there.
    :param first: offset of its first record; -1 if unknown. If two windows have some of the same offsets, the one that was
        planned first is valid.
    :param tries: Airflow's counters at the newest attempt of each run that has worked on the window, as far as they are kept.
    """

    window: Window
    state: State
    attempt: Attempt
    report: Mapping[str, Any] | None = None
    offset: int = -1
    first: int = field(default=-1, compare=False)
    tries: Mapping[str, Tries] = field(default_factory=dict)


@dataclass(frozen=True)
class Memory:
    """The state of one pipeline, folded from its records in the ledger.

    :param position: its position; empty for a new pipeline.
    :param last_number: number of its last COMPLETE window, 0 without one.
    :param entries: its recent windows, by number.
    :param exists: False if the ledger holds no record of it.
    :param markers: published splits, by window number and split index.
    :param intervals: its data intervals, by name.
    :param changes: manual changes of its offsets, by number.
    :param controls: control requests (pause, resume, replay ...), by number.
    :param dead: dead letters and routed records, by window number.
    :param binding: the binding of its newest window; None if unknown.
    :param seen: offset of the newest of these records in the ledger partition; -1 without one.
    """

    pipeline: str
    position: Position = field(default_factory=Position)
    last_number: int = 0
    entries: Mapping[int, WindowEntry] = field(default_factory=dict)
    exists: bool = False
    markers: Mapping[tuple[int, int], Marker] = field(default_factory=dict)
    intervals: Intervals = field(default_factory=Intervals)
    changes: Mapping[int, Change] = field(default_factory=dict)
    dead: Mapping[int, DeadLetters] = field(default_factory=dict)
    controls: Mapping[int, Change] = field(default_factory=dict)
    binding: Binding | None = None
    seen: int = field(default=-1, compare=False)

    @property
    def is_blank(self) -> bool:
        """True if the ledger has no position of the pipeline: it has never moved a window, or was removed by ``forget``."""
        return not (self.position.offsets or self.position.source or self.last_number or self.entries)

    @property
    def is_unknown(self) -> bool:
        """True if the ledger has at most records of changes: no window, no data interval, and no binding. The first attempt at a
        data interval binds its pipeline before it plans anything."""
        return self.is_blank and not self.intervals and self.binding is None

    @property
    def forgotten(self) -> Change | None:
        """The newest ``forget`` of the pipeline; None if it was never forgotten."""
        found = [c for c in self.changes.values() if c.action == "forget"]
        return max(found, key=lambda c: c.number, default=None)

    @property
    def forgotten_offsets(self) -> Forgotten | None:
        """The offsets that the pipeline had moved when it was forgotten last; None if it was not, or by an earlier release."""
        return self.forgotten.forgotten if self.forgotten is not None else None

    def merge_moved_offsets(self) -> Forgotten:
        """Return the offsets that the pipeline has moved, for the record of a ``forget``, those of an earlier ``forget``
        included. Offsets of topics that were created again since are left out."""
        before = self.forgotten_offsets or Forgotten()
        own = Position(self.position.offsets, self.position.topic_ids, epochs=self.position.epochs, began=self.position.began)
        done = sorted((s for s in self.intervals.spans if s.state is State.COMPLETE or s.replay), key=lambda s: s.offset)
        intervals = before.intervals
        for state in done:
            ends = {r.topic_partition: r.end for r in state.ranges if r.span}
            intervals = merge_positions(intervals, Position(ends, state.topic_ids, epochs=state.epochs))
        names = (name for name, state in self.intervals.newest_first if any(r.span for r in state.ranges))
        return Forgotten(merge_positions(before.windows, own), intervals, next(names, before.last_interval))

    @property
    def last_used(self) -> int:
        """The highest number of a window that is complete, was given up or was forgotten. Numbers up to it are never used again,
        so that followers can recognise new windows by their number.
        """
        return max(self.last_number, self.forgotten.window if self.forgotten else 0)

    @property
    def published(self) -> Mapping[TopicPartition, Published] | None:
        """Totals of what the pipeline has published, including windows that were given up or forgotten; None if it publishes
        nothing, or if they are unknown.
        """
        if self.position.published is not None:
            return self.position.published
        if self.forgotten is not None and self.forgotten.published:
            return self.forgotten.published
        done = [e for _, e in sorted(self.entries.items()) if e.state is State.COMPLETE and e.window.publishes]
        found: dict[TopicPartition, Published] = {}
        for entry in done:
            found = add_landed(found, parse_landed(entry))
        return found if done or any(e.window.publishes for e in self.entries.values()) else None

    @property
    def landed(self) -> dict[int, tuple[Landed, ...]]:
        """The offsets of published records in their topics, by window number, of complete windows and of those given up."""
        found = {number: parse_landed(e) for number, e in self.entries.items() if e.state is State.COMPLETE}
        for change in self.changes.values():
            given_up = sorted(set(change.discarded) - found.keys())
            if given_up and change.landed is not None:
                found |= {number: () for number in given_up} | {given_up[-1]: change.landed}
        return found

    @property
    def renamed_to(self) -> Change | None:
        """The change that gave the pipeline another name (``name``); None if it still has this one."""
        last = max(self.changes.values(), key=lambda c: c.number, default=None)
        return last if last is not None and last.action == "rename" and self.is_blank else None

    @property
    def open_entry(self) -> WindowEntry | None:
        """The window that is PLANNED and not COMPLETE; None without one. It is finished before another one is planned."""
        return next((e for e in self.entries.values() if e.state is State.PLANNED), None)

    def find_completed_by(self, run: str) -> WindowEntry | None:
        """Return the COMPLETE window that this run planned; None if the ledger holds no such window."""
        return next((e for e in self.entries.values() if e.window.run == run and e.state is State.COMPLETE), None)

    def find_owned(self, number: int, token: str) -> WindowEntry | None:
        """Return the window ``number`` if its newest attempt has this token, whether complete or not; otherwise None."""
        entry = self.entries.get(number)
        return entry if entry is not None and entry.attempt.token == token else None

    @property
    def oldest_offset(self) -> int:
        """The offset of the ledger partition from which a reader sees every stored window and every control request in force.

        It includes the position only once a window is complete: both are written together. It does not include markers.
        """
        offsets = [*(e.offset for e in self.entries.values()), *(d.offset for d in self.dead.values())]
        asked = [c for e in self.entries.values() if e.state is State.COMPLETE and (c := self.replay_asked(e.window))]
        offsets += [c.offset for c in (self.pause, self.find_rebind_after(self.binding), *asked, *self.counted_resends) if c]
        # A reader that begins after the records of intervals would take the pipeline for one without intervals.
        offsets += [state.offset for state in self.intervals.recent.values()]
        offsets += [archive.offset for archive in self.intervals.archives]
        # Control requests are written while attempts are running: there may be one after the last read.
        known = [offset for offset in offsets if offset >= 0]
        return min(known if self.seen < 0 else [*known, self.seen]) if known else -1

    @property
    def pause(self) -> Change | None:
        """The pause in force, with its author, time and reason; None if the pipeline is not paused."""
        found = [c for c in self.controls.values() if c.action in ("pause", "resume")]
        last = max(found, key=lambda c: c.number, default=None)
        return last if last is not None and last.action == "pause" else None

    @property
    def is_paused(self) -> bool:
        """True while the pipeline is paused: it moves no windows."""
        return self.pause is not None

    def replay_asked(self, window: Window) -> Change | None:
        """Return the request to move a complete window once more; None if it was not requested, or if it was carried out."""
        name = Interval.of_ms(*window.interval).name if window.interval else ""
        mine = (window.number, name, window.replay)
        return next((c for c in self.controls.values() if c.action == "replay" and (c.window, c.name, c.replay) == mine), None)

    @property
    def counted_resends(self) -> tuple[Change, ...]:
        """The changes that have sent dead letters again, for windows that may be replayed: those that the ledger still holds, and
        data intervals whose own record does not include the change."""
        found = [c for c in self.controls.values() if c.action == "resend"]
        return tuple(c for c in found if (not self._is_included(c) if c.name else c.window in self.entries))

    def _is_included(self, resend: Change) -> bool:
        state = self.intervals.get(resend.name)
        return state is not None and state.resends >= resend.number

    def include_resends(self, state: IntervalState) -> IntervalState:
        """Return the state of a data interval with all changes that have sent its dead letters again. The records of these may be
        removed then."""
        newer = [c for c in self.list_resends(NUMBER, state.interval.name) if c.number > state.resends]
        if not newer:
            return state
        offsets = _unite_runs(state.resent, *(change.resent for change in newer))
        resent = {tp: group_into_runs(found) for tp, found in offsets.items()}
        return replace(state, resent=resent, resends=newer[-1].number)

    def restore_dead_letters(self, state: IntervalState | None) -> Memory:
        """Return the state of a data interval's window, with the dead letters that the record of the interval has, if those of
        the window were removed.

        :param state: the interval; None if the pipeline does not have it.
        """
        if state is None or state.dead is None or NUMBER in self.dead:
            return self
        return replace(self, dead={**self.dead, NUMBER: state.dead})

    def list_resends(self, window: int, name: str) -> tuple[Change, ...]:
        """Return the changes that have sent the dead letters of a window again, the oldest first.

        :param window: number of the window.
        :param name: name of its data interval; empty without one.
        """
        found = [c for c in self.controls.values() if c.action == "resend" and (c.window, c.name) == (window, name)]
        return tuple(sorted(found, key=lambda c: c.number))

    def find_resent(self, window: Window) -> dict[TopicPartition, frozenset[int]]:
        """Return the offsets of the dead letters of a window that were sent again to the topics that they came from. Their copies
        are in other windows, so a replay of this one leaves them out."""
        name = Interval.of_ms(*window.interval).name if window.interval else ""
        state = self.intervals.get(name) if name else None
        before = [] if state is None else [state.resent]
        return _unite_runs(*before, *(change.resent for change in self.list_resends(window.number, name)))

    def find_rebind_after(self, binding: Binding | None, window: int | None = None) -> Change | None:
        """Return the newest ``rebind`` after a binding was recorded, which allows another destination or task; None without one.

        :param window: number of an open window whose binding is to change; None for windows that are not planned yet.
        """
        since = binding.decided if binding else 0
        younger = [c for c in self.controls.values() if c.action == "rebind" and c.number > since]
        meant = [c for c in younger if window is None or c.window == window]
        return max(meant, key=lambda c: c.number, default=None)

    @property
    def decided(self) -> int:
        """The number of the newest ``rebind``; 0 without one. Its record may have been removed, or lie before a short cut: then
        the binding has the number."""
        known = self.binding.decided if self.binding else 0
        return max((known, *(c.number for c in self.controls.values() if c.action == "rebind")))

    @property
    def pending_controls(self) -> tuple[Change, ...]:
        """The control requests that are in force, or that no attempt has carried out yet."""
        asked = (c for c in self.controls.values() if c.action == "replay" and self._get_replay(c) == c.replay)
        return tuple(c for c in (self.pause, self.find_rebind_after(self.binding), *asked) if c is not None)

    def _get_replay(self, asked: Change) -> int | None:
        """Return the number of replays of the window that a request names; None if the ledger does not have the window."""
        if asked.name:
            return self.intervals[asked.name].replay if asked.name in self.intervals else None
        return self.entries[asked.window].window.replay if asked.window in self.entries else None

    @property
    def history(self) -> tuple[Change, ...]:
        """All manual changes, the newest first."""
        every = (*self.changes.values(), *self.controls.values())
        return tuple(sorted(every, key=lambda c: (c.number, c.at), reverse=True))

    @property
    def claimed_position(self) -> Position:
        """The pipeline's position after its open window. Offsets before it belong to windows that are planned already."""
        entry = self.open_entry
        return self.position if entry is None or entry.window.replay else find_next_position(self.position, entry.window)

    @property
    def read_offsets(self) -> Mapping[TopicPartition, int]:
        """The offsets up to which the pipeline has read: its position, and beyond it the data intervals that are complete without
        a hole, if it has moved both. Empty without a position."""
        position = self.position
        if not position.offsets or not self.intervals:
            return position.offsets
        return find_contiguous_offsets(self.intervals.spans, position.offsets, None, position.topic_ids)

    @property
    def next_change(self) -> int:
        """The number of the next manual change."""
        return max((*self.changes, *self.controls), default=0) + 1


def _unite_runs(*parts: Mapping[TopicPartition, Runs]) -> dict[TopicPartition, frozenset[int]]:
    """Return the offsets that are in any of these runs, by partition."""
    found: dict[TopicPartition, frozenset[int]] = {}
    for part in parts:
        found = unite_offsets(found, {tp: list_run_offsets(runs) for tp, runs in part.items()})
    return found


def parse_landed(entry: WindowEntry) -> tuple[Landed, ...]:
    """Return the offsets of the records that a window has published, from its report."""
    return tuple(Landed(**part) for part in (entry.report or {}).get("published", ()))


def list_known_topic_ids(memory: Memory) -> dict[str, tuple[str, ...]]:
    """Return all ids under which a pipeline has read each topic: that of its position, and those of its data intervals in the
    order of planning. Kafka never reuses an id, so a topic with another id was created later.
    """
    in_order = sorted(memory.intervals.spans, key=lambda state: state.offset)
    found: dict[str, dict[str, None]] = {}
    for ids in (memory.position.topic_ids, *(state.topic_ids for state in in_order)):
        for topic, topic_id in ids.items():
            if topic_id:
                found.setdefault(topic, {})[topic_id] = None
    return {topic: tuple(ids) for topic, ids in found.items()}


def make_position_record(pipeline: str, position: Position, last_number: int) -> LedgerRecord:
    value = {"v": VERSION, "position": position_to_json(position), "last_number": last_number}
    return LedgerRecord(make_position_key(pipeline), encode_json(value))


def make_position_key(pipeline: str) -> bytes:
    return encode_json([pipeline, "position"])


def make_binding_record(pipeline: str, binding: Binding | None) -> LedgerRecord:
    """Return the record of a pipeline's binding; a tombstone for None."""
    value = None if binding is None else encode_json({"v": VERSION, "binding": binding_to_json(binding)})
    return LedgerRecord(encode_json([pipeline, BINDING]), value)


def make_group_record(group_id: str, pipeline: str) -> LedgerRecord:
    """Return the record of the pipeline that uses a consumer group or a replication slot."""
    return LedgerRecord(make_group_key(group_id), encode_json({"v": VERSION, "pipeline": pipeline}))


def make_group_key(group_id: str) -> bytes:
    return encode_json([None, GROUP, group_id])


def parse_group_owner(record: LedgerRecord) -> str | None:
    """Return the pipeline that a record of :func:`make_group_record` names; None for a tombstone.

    :raises NewerVersion: a later release wrote it.
    """
    return str(_parse_value(record, is_control=False)["pipeline"]) if record.value is not None else None


def make_window_record(entry: WindowEntry) -> LedgerRecord:
    attempt = entry.attempt
    value = {
        "v": VERSION,
        "state": entry.state.value,
        "window": window_to_json(entry.window),
        "attempt": dict(vars(attempt)),
        "report": entry.report,
        **({"first": entry.first} if entry.first >= 0 else {}),
        **({"tries": tries_to_json(entry.tries)} if entry.tries else {}),
    }
    return LedgerRecord(make_window_key(entry.window.pipeline, entry.window.number), encode_json(value))


def make_marker_record(pipeline: str, marker: Marker) -> LedgerRecord:
    return LedgerRecord(
        make_marker_key(pipeline, marker.window, marker.split), encode_json({"v": VERSION, "marker": marker_to_json(marker)})
    )


def make_interval_record(pipeline: str, state: IntervalState) -> LedgerRecord:
    return LedgerRecord(make_interval_key(pipeline, state.interval), encode_json({"v": VERSION, **interval_to_json(state)}))


def make_archive_record(pipeline: str, archive: IntervalArchive) -> LedgerRecord:
    key = encode_json([pipeline, ARCHIVE, archive.span.interval.name])
    return LedgerRecord(key, encode_json({"v": VERSION, **archive_to_json(archive)}))


def make_interval_key(pipeline: str, interval: Interval) -> bytes:
    return encode_json([pipeline, INTERVAL, interval.name])


def make_change_record(pipeline: str, change: Change) -> LedgerRecord:
    return LedgerRecord(make_change_key(pipeline, change.number), encode_json({"v": VERSION, "change": change_to_json(change)}))


def make_change_key(pipeline: str, number: int) -> bytes:
    return encode_json([pipeline, "change", number])


def make_control_record(pipeline: str, change: Change, version: int = VERSION) -> LedgerRecord:
    return LedgerRecord(make_control_key(pipeline, change.number), encode_json({"v": version, "change": change_to_json(change)}))


def make_control_key(pipeline: str, number: int) -> bytes:
    return encode_json([pipeline, CONTROL, number])


def make_control_prefix(pipeline: str) -> bytes:
    """Return the prefix of the keys of a pipeline's control requests."""
    return encode_json([pipeline, CONTROL])[:-1] + b","


def make_dead_letters_record(pipeline: str, dead: DeadLetters) -> LedgerRecord:
    return LedgerRecord(
        make_dead_letters_key(pipeline, dead.window), encode_json({"v": VERSION, "dead": dead_letters_to_json(dead)})
    )


def make_dead_letters_key(pipeline: str, number: int) -> bytes:
    return encode_json([pipeline, "dead", number])


def make_marker_key(pipeline: str, number: int, split: int) -> bytes:
    return encode_json([pipeline, "split", number, split])


def make_split_prefix(pipeline: str, number: int) -> bytes:
    """Return the prefix of the keys of a window's markers."""
    return encode_json([pipeline, "split", number])[:-1] + b","


def make_window_key(pipeline: str, number: int) -> bytes:
    return encode_json([pipeline, "window", number])


ParsedRecords = dict[LedgerRecord, IntervalState | IntervalArchive]
"""Type of a cache of the data intervals and archives that records hold."""


def fold_records(pipeline: str, records: Iterable[LedgerRecord], parsed: ParsedRecords | None = None) -> Memory:
    """Return the state of one pipeline, folded from the records of a ledger partition.

    :param records: the records, the oldest first.
    :param parsed: cache of intervals and archives, which is read and extended, so that a reader that folds repeatedly parses each
        of them once. Default None: no cache.
    :raises NewerVersion: a later release wrote a record of this pipeline.
    :raises ValueError: a record of this pipeline cannot be decoded.
    """
    newest: dict[tuple[Any, ...], tuple[dict[str, Any], int]] = {}
    intervals: dict[str, IntervalState] = {}
    archives: dict[str, IntervalArchive] = {}
    kept = {} if parsed is None else parsed
    exists, seen, mine = False, -1, make_key_prefix(pipeline)
    for record in records:
        if not record.key.startswith(mine):
            continue
        exists, seen = True, max(seen, record.offset)
        key = tuple(json.loads(record.key)[1:])
        if record.value is None:
            newest.pop(key, None)
            if key[0] == INTERVAL:
                intervals.pop(key[1], None)
            elif key[0] == ARCHIVE:
                archives.pop(key[1], None)
        elif key[0] == INTERVAL:
            intervals[key[1]] = _parse_interval(record, kept)
        elif key[0] == ARCHIVE:
            archives[key[1]] = _parse_archive(record, kept)
        else:
            newest[key] = _parse_value(record, is_control=key[0] == CONTROL), record.offset

    def list_values(kind: str) -> list[tuple[tuple[Any, ...], dict[str, Any], int]]:
        return [(key[1:], value, offset) for key, (value, offset) in newest.items() if key[0] == kind]

    position = next((value for _, value, _ in list_values("position")), None)
    binding = next((value for _, value, _ in list_values(BINDING)), None)
    return Memory(
        pipeline,
        position=position_from_json(position["position"]) if position else Position(),
        last_number=position["last_number"] if position else 0,
        entries={number: _parse_entry(value, offset) for (number,), value, offset in list_values("window")},
        exists=exists,
        markers={split: marker_from_json(value["marker"]) for split, value, _ in list_values("split")},
        intervals=Intervals(intervals, archives.values()),
        changes={number: change_from_json(value["change"], offset) for (number,), value, offset in list_values("change")},
        dead={number: dead_letters_from_json(number, value["dead"], offset) for (number,), value, offset in list_values("dead")},
        controls={number: change_from_json(value["change"], offset) for (number,), value, offset in list_values(CONTROL)},
        binding=binding_from_json(binding["binding"]) if binding else None,
        seen=seen,
    )


def _parse_value(record: LedgerRecord, *, is_control: bool) -> dict[str, Any]:
    assert record.value is not None
    value: dict[str, Any] = json.loads(record.value)
    if value["v"] > (PAUSE_VERSION if is_control else VERSION):
        raise NewerVersion(f"a record of version {value['v']} at offset {record.offset}")
    return value


def _parse_interval(record: LedgerRecord, parsed: ParsedRecords) -> IntervalState:
    found = parsed.get(record)
    if not isinstance(found, IntervalState):
        found = parsed[record] = interval_from_json(_parse_value(record, is_control=False), record.offset)
    return found


def is_archive_key(key: bytes, prefixes: tuple[bytes, ...]) -> bool:
    """Return True if a key is that of an archive.

    :param prefixes: prefixes of keys (:func:`make_key_prefix`), one of which the key has.
    """
    kind = encode_json(ARCHIVE) + b","
    return any(key.startswith(prefix) and key.startswith(kind, len(prefix)) for prefix in prefixes)


def parse_archive_record(record: LedgerRecord) -> IntervalArchive | None:
    """Return the archive that a record holds; None if a later release wrote it."""
    try:
        return _parse_archive(record, {})
    except NewerVersion:
        return None


def _parse_archive(record: LedgerRecord, parsed: ParsedRecords) -> IntervalArchive:
    found = parsed.get(record)
    if not isinstance(found, IntervalArchive):
        found = parsed[record] = archive_from_json(_parse_value(record, is_control=False), record.offset)
    return found


def _parse_entry(value: Mapping[str, Any], offset: int) -> WindowEntry:
    return WindowEntry(
        window=window_from_json(value["window"]),
        state=State(value["state"]),
        # Fields that this release does not know are ignored.
        attempt=Attempt(**{f.name: value["attempt"][f.name] for f in fields(Attempt)}),
        report=value.get("report"),
        offset=offset,
        # The first record of a window cannot contain its own offset.
        first=value.get("first", offset if value["attempt"]["number"] == 1 else -1),
        tries=tries_from_json(value.get("tries", {})),
    )


def make_key_prefix(pipeline: str) -> bytes:
    """Return the prefix that all keys of a pipeline have, and no key of another pipeline."""
    return encode_json([pipeline])[:-1] + b","


@dataclass(frozen=True)
class WindowCriteria:
    """The criteria for a window that a sensor waits for. A window has to meet all that are given.

    :param run: the run that planned it, ``<dag_id>/<run_id>/<task_id>``. Runs of two DAGs match if their ids contain the same
        moment: ``scheduled__2026-01-01T00:00:00+00:00`` and ``manual__2026-01-01T00:00:00+00:00_x7Qa`` do.
    :param after: lower bound of its number, exclusive.
    :param since: lower bound of its completion time, inclusive, in seconds since the epoch.
    """

    run: str | None = None
    after: int | None = None
    since: float | None = None

    def __str__(self) -> str:
        parts = (
            f"planned by run {self.run}" if self.run else "",
            f"numbered above {self.after}" if self.after is not None else "",
            f"completed since {datetime.fromtimestamp(self.since, timezone.utc).isoformat()}" if self.since is not None else "",
        )
        return "a window " + " and ".join(part for part in parts if part)


@dataclass(frozen=True)
class Completed:
    """A complete window that meets the criteria.

    :param window: its number within the pipeline as text; for a window of a data interval, the name of the interval.
    :param run: the run that planned it.
    :param report: its report; empty if the ledger holds none for it.
    """

    window: str
    run: str
    report: Mapping[str, Any]


def find_completed(memory: Memory, wanted: WindowCriteria) -> Completed | None:
    """Return the newest complete window that matches, or None.

    :param memory: the pipeline's state in the ledger. Windows that it no longer contains are not found.
    """
    for entry in sorted(memory.entries.values(), key=lambda e: e.window.number, reverse=True):
        if entry.state is State.COMPLETE and entry.report is not None and _is_wanted(entry, wanted):
            return Completed(entry.window.id, entry.window.run, entry.report)
    if wanted.run and wanted.after is None and wanted.since is None:
        for name, state in memory.intervals.newest_first:
            if state.state is State.COMPLETE and is_same_run(state.run, wanted.run):
                return Completed(name, state.run, {})
    return None


def _is_wanted(entry: WindowEntry, wanted: WindowCriteria) -> bool:
    if wanted.run is not None and not is_same_run(entry.window.run, wanted.run):
        return False
    if wanted.after is not None and entry.window.number <= wanted.after:
        return False
    return wanted.since is None or _parse_completion_time(entry) >= wanted.since


def _parse_completion_time(entry: WindowEntry) -> float:
    text = str((entry.report or {}).get("completed_at") or "")
    return parse_iso(text).timestamp() if text else 0.0


_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT[0-9:.]+(?:Z|[+-]\d\d:?\d\d)?")


def is_same_run(known: str, wanted: str) -> bool:
    """Return True if two names denote one run, or runs of two DAGs for the same moment."""
    if known == wanted:
        return True
    one, other = TaskInstanceKey.parse(known), TaskInstanceKey.parse(wanted)
    if one is None or other is None or one._replace(run_id=other.run_id) != other:
        return False
    moment = _parse_moment(one.run_id)
    return moment is not None and moment == _parse_moment(other.run_id)


def _parse_moment(run_id: str) -> datetime | None:
    """Return the moment in the id of a run; None if the id contains none."""
    found = _MOMENT.search(run_id)
    try:
        moment = parse_iso(found.group()) if found else None
    except ValueError:
        return None
    return moment.replace(tzinfo=timezone.utc) if moment and moment.tzinfo is None else moment
