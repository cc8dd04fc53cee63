"""The ledger's records of one pipeline, and the state that they fold into. Keys and values are JSON, readable with ``kcat``.

Kinds of record, all keyed by pipeline so that compaction keeps the newest of each:

``["<pipeline>", "position"]``
    where the pipeline stands, and the number of its last complete window.
``["<pipeline>", "window", <number>]``
    one window: PLANNED with the attempt that works on it, later COMPLETE with its report; finally a tombstone.
``["<pipeline>", "interval", "<name>"]``
    one of its data intervals: which offsets it stands for and whether it is complete; its window has a ledger name of its own
    (:mod:`~airflow_kafka_spark.windows.interval`).
``["<pipeline>", "intervals", "<name of all as one>"]``
    many of its old intervals, which continue each other (:mod:`~airflow_kafka_spark.windows.interval_archive`).
``["<pipeline>", "split", <number>, <index>]``
    a split of the open window that is published: written in the transaction of its records, a tombstone once the window is
    complete.
``["<pipeline>", "dead", <number>]``
    which records of a window went to the dead letter topic (:mod:`~airflow_kafka_spark.windows.dead_letters`).
``["<pipeline>", "change", <number>]``
    manual changes of its offsets (:mod:`~airflow_kafka_spark.windows.changes`).
``["<pipeline>", "control", <number>]``
    control requests that may come while an attempt is running: pause, resume, replay a window. No attempt writes under these
    keys.
``["<pipeline>", "binding"]``
    who moves its windows, and where they go and come from, as its newest window was planned
    (:mod:`~airflow_kafka_spark.windows.binding`).
``[null, "group", "<group>"]``
    which pipeline has planned its first window for a consumer group: until that is complete, the group itself does not say so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from airflow_kafka_spark.windows.binding import Binding, binding_from_json, binding_to_json
from airflow_kafka_spark.windows.changes import Change, change_from_json, change_to_json
from airflow_kafka_spark.windows.codec import (
    interval_from_json,
    interval_to_json,
    marker_from_json,
    marker_to_json,
    position_from_json,
    position_to_json,
    window_from_json,
    window_to_json,
)
from airflow_kafka_spark.windows.dead_letters import DeadLetters, dead_letters_from_json, dead_letters_to_json
from airflow_kafka_spark.windows.interval import Interval, IntervalState
from airflow_kafka_spark.windows.interval_archive import IntervalArchive, Intervals, archive_from_json, archive_to_json
from airflow_kafka_spark.windows.model import (
    Landed,
    Marker,
    Published,
    State,
    TopicPartition,
    Tries,
    Window,
    add_landed,
    tries_from_json,
    tries_to_json,
)
from airflow_kafka_spark.windows.plan import Position, next_position

VERSION = 1
"""Of the records. A record of a newer version is refused, never guessed at."""
PAUSE_VERSION = 2
"""Of a pause in force: a release that knows of no pauses must not go on as if there were none."""


CONTROL = "control"
ARCHIVE = "intervals"
BINDING = "binding"
GROUP = "group"


class NewerVersion(ValueError):
    """Raised when a record was written by a later release."""


class LedgerRecord(NamedTuple):
    """A record of the ledger topic: ``value`` is None for a tombstone, ``epoch`` the leader epoch in which it was written.

    Offset and epoch are -1 where the record was not read from there.
    """

    key: bytes
    value: bytes | None
    offset: int = -1
    epoch: int = -1


@dataclass(frozen=True)
class Attempt:
    """One attempt at a window.

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
    """The ledger's record of a window.

    :param report: the report of a COMPLETE window, as JSON; while it is replayed, that of the time before.
    :param offset: where its newest record lies in the ledger partition; -1 when not read from there.
    :param first: where its first one lay: of two that want the same offsets, the one that was planned first counts. -1 where
        that is not known.
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
    """All that the ledger holds of one pipeline.

    :param position: where it stands; empty for a pipeline without a past.
    :param last_number: number of its last COMPLETE window, 0 without one.
    :param entries: its recent windows by number.
    :param exists: False when the ledger has never heard of it.
    :param markers: splits that are published, by window number and split index.
    :param intervals: its data intervals, by name.
    :param changes: what was done to its offsets by hand, by number.
    :param controls: pauses, resumes, replays and the like that were asked for, by number.
    :param dead: which records went to the dead letter topic, by window number.
    :param binding: who moves it, and where it goes, as its newest window was planned; None where that is not known.
    :param seen: the offset of its newest record that was read from the ledger partition; -1 without one.
    """

    pipeline: str
    position: Position = field(default_factory=Position)
    last_number: int = 0
    entries: Mapping[int, Entry] = field(default_factory=dict)
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
        """True if the ledger has no position for the pipeline: it has never moved a window, or was reset by ``forget``."""
        return not (self.position.offsets or self.position.source or self.last_number or self.entries)

    @property
    def forgotten(self) -> Change | None:
        """The newest ``forget`` of the pipeline; None without one."""
        found = [c for c in self.changes.values() if c.action == "forget"]
        return max(found, key=lambda c: c.number, default=None)

    @property
    def last_used(self) -> int:
        """The highest number of a window that is complete, was given up or was forgotten. Numbers up to it are never used again,
        so that followers can tell new windows by their number.
        """
        return max(self.last_number, self.forgotten.window if self.forgotten else 0)

    @property
    def published(self) -> Mapping[TopicPartition, Published] | None:
        """The records that the pipeline has published in all, including windows that were given up or forgotten; None if it
        publishes nothing, or if that is unknown.
        """
        if self.position.published is not None:
            return self.position.published
        if self.forgotten is not None and self.forgotten.published:
            return self.forgotten.published
        done = [e for _, e in sorted(self.entries.items()) if e.state is State.COMPLETE and e.window.publishes]
        found: dict[TopicPartition, Published] = {}
        for entry in done:
            found = add_landed(found, landed_of(entry))
        return found if done or any(e.window.publishes for e in self.entries.values()) else None

    @property
    def landed(self) -> dict[int, tuple[Landed, ...]]:
        """The places of the records of windows in their topics, by number: of complete windows, and of those that were given
        up.
        """
        found = {number: landed_of(e) for number, e in self.entries.items() if e.state is State.COMPLETE}
        for change in self.changes.values():
            given_up = sorted(set(change.discarded) - found.keys())
            if given_up and change.landed is not None:
                found |= {number: () for number in given_up} | {given_up[-1]: change.landed}
        return found

    @property
    def renamed_to(self) -> Change | None:
        """The change that gave the pipeline another name (``name``); None while it has this one."""
        last = max(self.changes.values(), key=lambda c: c.number, default=None)
        return last if last is not None and last.action == "rename" and self.is_blank else None

    @property
    def open_entry(self) -> Entry | None:
        """The window that is PLANNED and not COMPLETE. It is finished before another one is planned."""
        return next((e for e in self.entries.values() if e.state is State.PLANNED), None)

    def completed_by(self, run: str) -> Entry | None:
        """Return the COMPLETE window that this run planned, if the ledger still remembers it."""
        return next((e for e in self.entries.values() if e.window.run == run and e.state is State.COMPLETE), None)

    def owned(self, number: int, token: str) -> Entry | None:
        """Return the window ``number`` if the attempt with this token works on it, or has completed it; else None."""
        entry = self.entries.get(number)
        return entry if entry is not None and entry.attempt.token == token else None

    @property
    def oldest_offset(self) -> int:
        """The offset of the ledger partition from which a reader sees every remembered window and every control record that
        counts.
        """
        offsets = [*(e.offset for e in self.entries.values()), *(d.offset for d in self.dead.values())]
        asked = [c for e in self.entries.values() if e.state is State.COMPLETE and (c := self.replay_asked(e.window))]
        offsets += [c.offset for c in (self.pause, self.rebound_after(self.binding), *asked, *self.counted_resends) if c]
        # A reader that begins behind one would take the pipeline for one without intervals.
        offsets += [state.offset for state in self.intervals.recent.values()]
        offsets += [archive.offset for archive in self.intervals.archives]
        # Control requests are written beside running attempts: there may be one behind the last look.
        known = [offset for offset in offsets if offset >= 0]
        return min(known if self.seen < 0 else [*known, self.seen]) if known else -1

    @property
    def pause(self) -> Change | None:
        """The pause that is in force, with its author, time and reason; None while the pipeline is not paused."""
        found = [c for c in self.controls.values() if c.action in ("pause", "resume")]
        last = max(found, key=lambda c: c.number, default=None)
        return last if last is not None and last.action == "pause" else None

    @property
    def is_paused(self) -> bool:
        """True while the pipeline is paused: it moves no windows."""
        return self.pause is not None

    def replay_asked(self, window: Window) -> Change | None:
        """Return the request to move a complete window once more, until that has happened; then None."""
        name = Interval.of_ms(*window.interval).name if window.interval else ""
        mine = (window.number, name, window.replay)
        return next((c for c in self.controls.values() if c.action == "replay" and (c.window, c.name, c.replay) == mine), None)

    @property
    def counted_resends(self) -> tuple[Change, ...]:
        """The changes that have sent dead letters again, of windows that are remembered. Those of others count no more: their
        dead letters cannot be sent again."""
        found = [c for c in self.controls.values() if c.action == "resend"]
        return tuple(c for c in found if (c.name in self.intervals.recent if c.name else c.window in self.entries))

    def resends(self, window: int, name: str) -> tuple[Change, ...]:
        """Return the changes that have sent dead letters of a window again, the oldest first.

        :param window: number of the window.
        :param name: name of its data interval; empty without one.
        """
        found = [c for c in self.controls.values() if c.action == "resend" and (c.window, c.name) == (window, name)]
        return tuple(sorted(found, key=lambda c: c.number))

    def rebound_after(self, binding: Binding | None, window: int | None = None) -> Change | None:
        """Return the newest decision that allows another destination or another task and is younger than a binding; None without
        one.

        :param window: number of an open window that is to go there; None asks for windows yet to be planned.
        """
        since = binding.decided if binding else 0
        younger = [c for c in self.controls.values() if c.action == "rebind" and c.number > since]
        meant = [c for c in younger if window is None or c.window == window]
        return max(meant, key=lambda c: c.number, default=None)

    @property
    def decided(self) -> int:
        """The number of the newest ``rebind``; 0 without one."""
        return max((c.number for c in self.controls.values() if c.action == "rebind"), default=0)

    @property
    def history(self) -> tuple[Change, ...]:
        """All manual changes, the newest first."""
        every = (*self.changes.values(), *self.controls.values())
        return tuple(sorted(every, key=lambda c: (c.number, c.at), reverse=True))

    @property
    def claimed_position(self) -> Position:
        """The pipeline's position once its open window is complete. No other attempt moves the offsets before it."""
        entry = self.open_entry
        return self.position if entry is None or entry.window.replay else next_position(self.position, entry.window)

    @property
    def next_change(self) -> int:
        """The number of the next manual change."""
        return max((*self.changes, *self.controls), default=0) + 1


def landed_of(entry: Entry) -> tuple[Landed, ...]:
    """Return where the records lie that a window has published, as its report says."""
    return tuple(Landed(**part) for part in (entry.report or {}).get("published", ()))


def known_topic_ids(memory: Memory) -> dict[str, tuple[str, ...]]:
    """Return all ids under which a pipeline has read each topic: the id of its position, and those of its data intervals in the
    order in which they were planned. Kafka never uses an id again, so a topic with another id was created since.
    """
    in_order = sorted(memory.intervals.spans, key=lambda state: state.offset)
    found: dict[str, dict[str, None]] = {}
    for ids in (memory.position.topic_ids, *(state.topic_ids for state in in_order)):
        for topic, topic_id in ids.items():
            if topic_id:
                found.setdefault(topic, {})[topic_id] = None
    return {topic: tuple(ids) for topic, ids in found.items()}


def position_record(pipeline: str, position: Position, last_number: int) -> LedgerRecord:
    value = {"v": VERSION, "position": position_to_json(position), "last_number": last_number}
    return LedgerRecord(position_key(pipeline), _dump(value))


def position_key(pipeline: str) -> bytes:
    return _dump([pipeline, "position"])


def binding_record(pipeline: str, binding: Binding) -> LedgerRecord:
    return LedgerRecord(_dump([pipeline, BINDING]), _dump({"v": VERSION, "binding": binding_to_json(binding)}))


def group_record(group_id: str, pipeline: str, by: str) -> LedgerRecord:
    """Return the record that says which pipeline commits for a consumer group.

    :param by: the name under which it is written: the pipeline's, or that of one of its intervals.
    """
    return LedgerRecord(group_key(group_id), _dump({"v": VERSION, "pipeline": pipeline, "by": by}))


def group_key(group_id: str) -> bytes:
    return _dump([None, GROUP, group_id])


def owner_of_group(record: LedgerRecord) -> str | None:
    """Return the pipeline that a record of :func:`group_record` names; None for a tombstone.

    :raises NewerVersion: a later release wrote it.
    """
    return str(_value(record, is_control=False)["pipeline"]) if record.value is not None else None


def window_record(entry: Entry) -> LedgerRecord:
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
    return LedgerRecord(window_key(entry.window.pipeline, entry.window.number), _dump(value))


def marker_record(pipeline: str, marker: Marker) -> LedgerRecord:
    return LedgerRecord(
        marker_key(pipeline, marker.window, marker.split), _dump({"v": VERSION, "marker": marker_to_json(marker)})
    )


def interval_record(pipeline: str, state: IntervalState) -> LedgerRecord:
    return LedgerRecord(interval_key(pipeline, state.interval), _dump({"v": VERSION, **interval_to_json(state)}))


def archive_record(pipeline: str, archive: IntervalArchive) -> LedgerRecord:
    key = _dump([pipeline, ARCHIVE, archive.span.interval.name])
    return LedgerRecord(key, _dump({"v": VERSION, **archive_to_json(archive)}))


def interval_key(pipeline: str, interval: Interval) -> bytes:
    return _dump([pipeline, "interval", interval.name])


def change_record(pipeline: str, change: Change) -> LedgerRecord:
    return LedgerRecord(change_key(pipeline, change.number), _dump({"v": VERSION, "change": change_to_json(change)}))


def change_key(pipeline: str, number: int) -> bytes:
    return _dump([pipeline, "change", number])


def control_record(pipeline: str, change: Change, version: int = VERSION) -> LedgerRecord:
    return LedgerRecord(control_key(pipeline, change.number), _dump({"v": version, "change": change_to_json(change)}))


def control_key(pipeline: str, number: int) -> bytes:
    return _dump([pipeline, CONTROL, number])


def control_prefix(pipeline: str) -> bytes:
    """Return the bytes that the keys of a pipeline's control records begin with."""
    return _dump([pipeline, CONTROL])[:-1] + b","


def dead_record(pipeline: str, dead: DeadLetters) -> LedgerRecord:
    return LedgerRecord(dead_key(pipeline, dead.window), _dump({"v": VERSION, "dead": dead_letters_to_json(dead)}))


def dead_key(pipeline: str, number: int) -> bytes:
    return _dump([pipeline, "dead", number])


def marker_key(pipeline: str, number: int, split: int) -> bytes:
    return _dump([pipeline, "split", number, split])


def split_prefix(pipeline: str, number: int) -> bytes:
    """Return the bytes that the keys of a window's markers begin with."""
    return _dump([pipeline, "split", number])[:-1] + b","


def window_key(pipeline: str, number: int) -> bytes:
    return _dump([pipeline, "window", number])


def remember(
    pipeline: str, records: Iterable[LedgerRecord], archives: dict[LedgerRecord, IntervalArchive] | None = None
) -> Memory:
    """Fold the records of a ledger partition, oldest first, into what they say of one pipeline.

    :param archives: the archives of records that were folded before. They are used again, and those of other records are added:
        a reader that looks several times then holds each of them once. Default None: nothing is kept.
    :raises NewerVersion: for a record of this pipeline that a later release wrote.
    :raises ValueError: for a record of this pipeline that cannot be read.
    """
    newest: dict[tuple[Any, ...], tuple[dict[str, Any], int]] = {}
    archived: dict[tuple[Any, ...], LedgerRecord] = {}
    kept = {} if archives is None else archives
    exists, seen, mine = False, -1, key_prefix(pipeline)
    for record in records:
        if not record.key.startswith(mine):
            continue
        exists, seen = True, max(seen, record.offset)
        key = tuple(json.loads(record.key)[1:])
        if record.value is None:
            newest.pop(key, None)
            archived.pop(key, None)
        elif key[0] == ARCHIVE:
            archived[key] = record
            if record not in kept:
                kept[record] = archive_from_json(_value(record, is_control=False), record.offset)
        else:
            newest[key] = _value(record, is_control=key[0] == CONTROL), record.offset

    def of(kind: str) -> list[tuple[tuple[Any, ...], dict[str, Any], int]]:
        return [(key[1:], value, offset) for key, (value, offset) in newest.items() if key[0] == kind]

    position = next((value for _, value, _ in of("position")), None)
    binding = next((value for _, value, _ in of(BINDING)), None)
    return Memory(
        pipeline,
        position=position_from_json(position["position"]) if position else Position(),
        last_number=position["last_number"] if position else 0,
        entries={number: _entry(value, offset) for (number,), value, offset in of("window")},
        exists=exists,
        markers={split: marker_from_json(value["marker"]) for split, value, _ in of("split")},
        intervals=Intervals(
            {name: interval_from_json(value, offset) for (name,), value, offset in of("interval")},
            [kept[record] for record in archived.values()],
        ),
        changes={number: change_from_json(value["change"], offset) for (number,), value, offset in of("change")},
        dead={number: dead_letters_from_json(number, value["dead"], offset) for (number,), value, offset in of("dead")},
        controls={number: change_from_json(value["change"], offset) for (number,), value, offset in of(CONTROL)},
        binding=binding_from_json(binding["binding"]) if binding else None,
        seen=seen,
    )


def _value(record: LedgerRecord, *, is_control: bool) -> dict[str, Any]:
    assert record.value is not None
    value: dict[str, Any] = json.loads(record.value)
    if value["v"] > (PAUSE_VERSION if is_control else VERSION):
        raise NewerVersion(f"a record of version {value['v']} at offset {record.offset}")
    return value


def _entry(value: Mapping[str, Any], offset: int) -> Entry:
    return Entry(
        window=window_from_json(value["window"]),
        state=State(value["state"]),
        # A fact that this release does not know is passed over.
        attempt=Attempt(**{f.name: value["attempt"][f.name] for f in fields(Attempt)}),
        report=value.get("report"),
        offset=offset,
        # The first attempt's first record does not know where it lies.
        first=value.get("first", offset if value["attempt"]["number"] == 1 else -1),
        tries=tries_from_json(value.get("tries", {})),
    )


def key_prefix(pipeline: str) -> bytes:
    """Return the bytes that all keys of a pipeline begin with, and no key of another pipeline."""
    return _dump([pipeline])[:-1] + b","


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
