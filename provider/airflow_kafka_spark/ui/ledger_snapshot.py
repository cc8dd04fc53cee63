"""Folded state of one ledger for the UI: the records of each pipeline, and a summary of each pipeline.

A record changes the state of one pipeline only. Records are stored as read and decoded on demand. Memory is bounded: the newest
windows of each pipeline are stored, older ones are only counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar
from urllib.parse import unquote

from airflow_kafka_spark.ledger.lag import parse_epoch_seconds
from airflow_kafka_spark.ui.lag_monitor import NOT_FETCHED, LagMeasurement, ReadPosition
from airflow_kafka_spark.windows.changes import Change
from airflow_kafka_spark.windows.interval import Interval, find_missing_intervals, parse_ledger_name
from airflow_kafka_spark.windows.lag import Cadence, CompletedWindow, Observation, Status, Verdict, derive_cadence
from airflow_kafka_spark.windows.memory import (
    ARCHIVE,
    CONTROL,
    PAUSE_VERSION,
    VERSION,
    LedgerRecord,
    Memory,
    NewerVersion,
    WindowEntry,
    fold_records,
)
from airflow_kafka_spark.windows.model import State, TaskInstanceKey, TopicPartition

K = TypeVar("K")
RecordKey: TypeAlias = "tuple[str | int, ...]"
"""Key of a record without the name of its pipeline, as ``("window", 7)``."""

MAX_WINDOWS = 200
"""Maximum number of windows of a pipeline that are stored; older ones are only counted."""
MAX_OTHER_RECORDS = 1_000
"""Maximum number of other records of a pipeline that are stored: splits, changes, dead letters."""
MAX_WINDOW_NUMBER = 10_000_000
"""Maximum number of a window. Records with higher ones are invalid, because the bit set of numbers would take too much memory."""
MAX_PROBLEMS = 20
"""Maximum number of unreadable records of a ledger that are listed."""

_PLANNED = re.compile(rb'"state"\s*:\s*"PLANNED"')
_COMPLETE = re.compile(rb'"state"\s*:\s*"COMPLETE"')
_COUNT = re.compile(rb'"count"\s*:\s*(\d{1,9})')
_STATE_BYTES = 80
"""Number of first bytes of a window's record that contain its state, after the version."""


class RawRecord(NamedTuple):
    """A record of the ledger, not decoded."""

    key: bytes
    value: bytes
    offset: int

    @property
    def is_open(self) -> bool:
        """True if this is the record of a window that is planned and not complete."""
        return bool(_PLANNED.search(self.value, 0, _STATE_BYTES))


@dataclass
class PipelineSnapshot:
    """Records of one pipeline, including the ledgers of its data intervals.

    :param version: number of records that were added.
    """

    pipeline: str
    version: int = 0
    _window_records: dict[int, RawRecord] = field(default_factory=dict)
    _live_windows: int = 0
    _other_records: dict[RecordKey, RawRecord] = field(default_factory=dict)
    _interval_records: dict[str, RawRecord] = field(default_factory=dict)
    _complete_intervals: set[str] = field(default_factory=set)
    _known_intervals: set[str] = field(default_factory=set)
    _archived_counts: dict[str, int] = field(default_factory=dict)
    _interval_windows: dict[str, dict[RecordKey, RawRecord]] = field(default_factory=dict)
    _decoded: dict[tuple[str, int | str], tuple[int, Memory]] = field(default_factory=dict)

    # --- adding records ---

    def put(self, interval: str | None, key: RecordKey, record: LedgerRecord) -> None:
        """Add a record, or remove the one that it deletes.

        :param interval: name of the data interval whose ledger the record belongs to; None for the pipeline's own ledger.
        :param key: key of the record.
        :param record: the record; a value of None deletes.
        """
        self.version += 1
        raw = None if record.value is None else RawRecord(record.key, record.value, record.offset)
        kind = key[0]
        if interval is not None:
            self._put_interval_window(interval, key, raw)
        elif kind == "window":
            self._put_window(int(key[1]), raw)
        elif kind == "interval":
            self._put_interval(str(key[1]), raw)
        elif kind == ARCHIVE:
            self._put_archive(str(key[1]), raw)
        else:
            _put(self._other_records, key, raw, MAX_OTHER_RECORDS)

    def _put_window(self, number: int, raw: RawRecord | None) -> None:
        bit = 1 << number
        if raw is None:
            self._window_records.pop(number, None)
            self._live_windows &= ~bit
            return
        self._live_windows |= bit
        self._window_records[number] = raw
        if len(self._window_records) > MAX_WINDOWS:
            # An open window stays, however low its number is.
            closed = (n for n in sorted(self._window_records) if not self._window_records[n].is_open)
            del self._window_records[next(closed)]

    def _put_interval(self, name: str, raw: RawRecord | None) -> None:
        (self._known_intervals.discard if raw is None else self._known_intervals.add)(name)
        complete = raw is not None and bool(_COMPLETE.search(raw.value))
        (self._complete_intervals.add if complete else self._complete_intervals.discard)(name)
        _put(self._interval_records, name, raw, MAX_WINDOWS)

    def _put_archive(self, name: str, raw: RawRecord | None) -> None:
        """Count the old intervals of an archive. The pages do not list them."""
        count = _COUNT.search(raw.value, 0, _STATE_BYTES) if raw is not None else None
        if count is None:
            self._archived_counts.pop(name, None)
        else:
            self._archived_counts[name] = int(count[1])

    def _put_interval_window(self, interval: str, key: RecordKey, raw: RawRecord | None) -> None:
        records = self._interval_windows.setdefault(interval, {})
        _put(records, key, raw, MAX_WINDOWS)
        if not records:
            del self._interval_windows[interval]
        elif len(self._interval_windows) > MAX_WINDOWS:
            closed = (name for name in sorted(self._interval_windows) if not self._has_open_window(name))
            if (oldest := next(closed, None)) is not None:
                del self._interval_windows[oldest]

    def _has_open_window(self, interval: str) -> bool:
        return any(key[0] == "window" and raw.is_open for key, raw in self._interval_windows[interval].items())

    # --- reading ---

    @property
    def is_empty(self) -> bool:
        """True if every record of the pipeline was deleted."""
        records = (self._window_records, self._other_records, self._interval_windows)
        return not (any(records) or self._live_windows or self._known_intervals or self._archived_counts)

    @property
    def intervals(self) -> tuple[int, int]:
        """The number of data intervals, and the number of complete ones."""
        archived = sum(self._archived_counts.values())
        return len(self._known_intervals) + archived, len(self._complete_intervals) + archived

    @property
    def windows_total(self) -> int:
        """The number of windows in the ledger, including those that are not stored here."""
        return self._live_windows.bit_count() + len(self._known_intervals) + sum(self._archived_counts.values())

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the stored windows, the newest first."""
        return tuple(sorted(self._window_records, reverse=True))

    @property
    def interval_names(self) -> tuple[str, ...]:
        """The names of the data intervals whose windows are stored, the newest first."""
        return tuple(sorted(self._interval_windows, reverse=True))

    @property
    def open_numbers(self) -> tuple[int, ...]:
        """The numbers of the windows that are planned and not complete."""
        return tuple(number for number, raw in self._window_records.items() if raw.is_open)

    def decode_memory(self, newest: int = MAX_WINDOWS) -> Memory:
        """Return the decoded state of the pipeline, with its newest windows and all open ones.

        :param newest: number of newest windows. Default: all that are stored.
        :raises NewerVersion: a later release wrote one of the records.
        :raises ValueError: a record cannot be decoded.
        """
        return self._decode_cached(("pipeline", newest), lambda: self._make_memory(newest))

    def _make_memory(self, newest: int) -> Memory:
        numbers = {*self.numbers[:newest], *self.open_numbers}
        windows = [self._window_records[number] for number in sorted(numbers)]
        others = [raw for key, raw in self._other_records.items() if key[0] != "split" or key[1] in numbers]
        names = sorted(self._interval_records)[-newest:]
        return _parse_memory(self.pipeline, [*others, *(self._interval_records[name] for name in names), *windows])

    def get_interval_memory(self, interval: str) -> Memory:
        """Return the decoded state of one data interval.

        :param interval: name of the interval.
        :raises NewerVersion: a later release wrote one of the records.
        :raises ValueError: a record cannot be decoded.
        """
        records = self._interval_windows.get(interval, {})
        return self._decode_cached(
            ("interval", interval), lambda: _parse_memory(f"{self.pipeline}.{interval}", list(records.values()))
        )

    def list_newest_interval_memories(self, newest: int) -> list[Memory]:
        """Return the decoded states of the ``newest`` data intervals, and of all intervals with an open window."""
        names = self.interval_names
        wanted = {*names[:newest], *(name for name in names if self._has_open_window(name))}
        return [self.get_interval_memory(name) for name in sorted(wanted, reverse=True)]

    def _decode_cached(self, name: tuple[str, int | str], decode: Callable[[], Memory]) -> Memory:
        """Return a decoded state. It is decoded again once a record was added; at most :data:`MAX_WINDOWS` are cached."""
        found = self._decoded.get(name)
        if found is None or found[0] != self.version:
            if len(self._decoded) >= MAX_WINDOWS:
                self._decoded.clear()
            version = self.version
            self._decoded[name] = found = (version, decode())
        return found[1]

    def mentions(self, text: bytes) -> bool:
        """Return True if the record of a stored window contains ``text``."""
        of_intervals = (raw for records in self._interval_windows.values() for raw in records.values())
        return any(text in raw.value for raw in (*self._window_records.values(), *of_intervals))

    def clear_cache(self) -> None:
        """Drop the decoded states, which take several times the memory of the records."""
        self._decoded.clear()


def _parse_memory(pipeline: str, raw: list[RawRecord]) -> Memory:
    try:
        return fold_records(pipeline, [LedgerRecord(*record) for record in raw])
    except NewerVersion:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a record that cannot be read ({type(error).__name__})") from None


def _put(records: dict[K, RawRecord], key: K, raw: RawRecord | None, limit: int) -> None:
    """Add or delete a record. Beyond ``limit`` the oldest record is removed that is neither a position nor a control record."""
    if raw is None:
        records.pop(key, None)
        return
    records[key] = raw
    if len(records) > limit:
        for name in records:
            if not (isinstance(name, tuple) and name[0] in ("position", CONTROL)):
                del records[name]
                return


@dataclass
class LedgerSnapshot:
    """Records of all pipelines of one ledger.

    :param pipelines: by name.
    :param records: number of records that were read.
    :param problems: descriptions of the records that cannot be read, at most :data:`MAX_PROBLEMS`.
    """

    pipelines: dict[str, PipelineSnapshot] = field(default_factory=dict)
    records: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, partition: int, record: LedgerRecord) -> str | None:
        """Add a record. Return the pipeline that it changes, or None if it belongs to no pipeline."""
        self.records += 1
        try:
            name, *rest = json.loads(record.key)
        except (ValueError, TypeError):
            self._add_problem(partition, record, "its key is not a JSON list")
            return None
        if name is None:  # interval boundaries belong to topics
            return None
        if not (isinstance(name, str) and rest and _is_key(rest)):
            self._add_problem(partition, record, "its key is of an unknown kind")
            return None
        pipeline, interval = parse_ledger_name(name)
        snapshot = self.pipelines.get(pipeline)
        if snapshot is None:
            if record.value is None:
                return None
            snapshot = self.pipelines[pipeline] = PipelineSnapshot(pipeline)
        if reason := _find_unreadable_reason(record, rest[0]):
            self._add_problem(partition, record, f"of pipeline `{pipeline}`, {reason}")
        snapshot.put(interval, tuple(rest), record)
        if snapshot.is_empty:
            del self.pipelines[pipeline]
        return pipeline

    def _add_problem(self, partition: int, record: LedgerRecord, reason: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(f"partition {partition}, offset {record.offset}: {reason}")


_VERSION = re.compile(rb'^\{"v":(\d{1,6}),')


def _find_unreadable_reason(record: LedgerRecord, kind: str) -> str:
    """Return the reason why a value cannot be read; "" if it can. Only its first bytes are decoded, as most are never shown."""
    if record.value is None:
        return ""
    found = _VERSION.match(record.value)
    if found:
        version: object = int(found[1])
    else:
        try:
            version = json.loads(record.value)["v"]
        except (ValueError, TypeError, KeyError):
            return "its value is no record of a ledger"
    if not isinstance(version, int):
        return "its value is no record of a ledger"
    newest = PAUSE_VERSION if kind == CONTROL else VERSION
    return f"it is of version {version}, newer than {newest}" if version > newest else ""


def _is_key(rest: list[object]) -> bool:
    """Return True if this is a key of a kind that a ledger may contain."""
    kind, *numbers = rest
    if not isinstance(kind, str) or not all(isinstance(n, (int, str)) and not isinstance(n, bool) for n in numbers):
        return False
    if kind == "window":
        return len(numbers) == 1 and isinstance(numbers[0], int) and 0 <= numbers[0] < MAX_WINDOW_NUMBER
    return kind not in ("interval", ARCHIVE) or (len(numbers) == 1 and isinstance(numbers[0], str))


# --- summary of a pipeline ----------------------------------------------------------------------------------------------

SUMMARY_WINDOWS = 12
"""Number of newest windows that a summary covers: as many as the verdict on lag needs."""


@dataclass(frozen=True)
class PipelineSummary:
    """A row in the list of pipelines.

    :param pipeline: name of the pipeline.
    :param problem: the reason why its records cannot be read; "" if they can.
    :param read_position: its position, for the lag.
    :param last: its last complete window.
    :param open: its open window; of several data intervals the one that was started last.
    :param running_tasks: task instances that work on open windows.
    :param owner: task instance that planned the newest window.
    :param pause: the change that paused it; None while it is not paused.
    :param cadence: schedule of its runs, derived from its windows; None if unknown. The DAG's timetable takes precedence.
    :param past: earlier positions with their times, for the verdict on lag.
    :param topics: all topics that it has read.
    :param moved: number of the change that set its position by hand; 0 if its windows led there.
    :param has_source: True if it reads rows of a source instead of topics.
    :param has_intervals: True if it moves data intervals.
    :param missing: times between its newest data intervals whose records no interval has.
    """

    pipeline: str
    problem: str = ""
    read_position: ReadPosition = field(default_factory=lambda: ReadPosition({}))
    last: WindowEntry | None = None
    open: WindowEntry | None = None
    running_tasks: tuple[TaskInstanceKey, ...] = ()
    owner: TaskInstanceKey | None = None
    pause: Change | None = None
    cadence: Cadence | None = None
    past: Mapping[TopicPartition, Sequence[Observation]] = field(default_factory=dict)
    topics: tuple[str, ...] = ()
    moved: int = 0
    has_source: bool = False
    has_intervals: bool = False
    missing: tuple[Interval, ...] = ()

    def get_report_value(self, name: str, default: object = None) -> Any:
        """Return a value of the last window's report."""
        report = self.last.report if self.last and self.last.report else {}
        return report.get(name, default)


def get_entry_name(entry: WindowEntry) -> str:
    """Return the name of a window: that of its data interval, else its number."""
    _, interval = parse_ledger_name(entry.window.pipeline)
    return interval or str(entry.window.number)


def find_status(summary: PipelineSummary, measured: LagMeasurement | None, verdict: Verdict | None) -> tuple[str, str]:
    """Return the status of a pipeline, and the reason.

    :param summary: the pipeline.
    :param measured: last measurement of its lag; None if there was none.
    :param verdict: verdict on its lag; None if the lag is unknown.
    """
    if summary.problem:
        return "UNKNOWN", summary.problem
    if summary.has_source:
        if summary.get_report_value("source_bytes_behind") is not None:
            return "OK", "it reads a database's log: the bytes after the last window are its lag"
        return "OK", "it reads rows: there is no lag to measure"
    if verdict is not None and verdict.status is not Status.OK and summary.missing:
        hole = summary.missing[0]
        return verdict.status.value, f"records between complete intervals were not moved: {hole}; the lag counts from there"
    if verdict is not None:
        return verdict.status.value, verdict.reason
    if summary.open is not None and (measured is None or measured.problem == NOT_FETCHED):
        return "OK", f"window {get_entry_name(summary.open)} is open; the lag is measured within seconds"
    return "UNKNOWN", measured.problem if measured else "its lag has not been measured yet"


def format_endpoint(uri: str | None, asset: str = "") -> str | None:
    """Return a source or a sink as users name it: ``connection: table``.

    :param uri: URIs separated by ``", "``. Those of a report contain the server and the database instead of the connection.
    :param asset: URI of the asset in the DAG file, which contains the connection. It is used if it names the same table.
    :return: ``warehouse: public.orders``; without an asset ``db.example.org/shop: public.orders``; a directory or an unknown URI
        unchanged; None if ``uri`` is empty.
    """
    if not uri:
        return None
    if ", " in uri:
        names = [str(format_endpoint(part)) for part in uri.split(", ")]
        prefix = names[0].partition(": ")[0] + ": "
        same = prefix != names[0] + ": " and all(name.startswith(prefix) for name in names)
        return prefix + ", ".join(name.removeprefix(prefix) for name in names) if same else ", ".join(names)
    scheme, separator, rest = uri.partition("://")
    if scheme in ("postgres", "mysql") and asset.startswith("x-"):
        # Both URIs end in the schema and the table. A log of MariaDB or MySQL is that of the whole server.
        table = asset.partition("://")[2].partition("/")[2]
        if table and (rest.endswith(f"/{table}") or asset.startswith("x-mysql-cdc:")):
            return format_endpoint(asset)
    place, *path = (unquote(part) for part in rest.split("/"))
    if scheme in ("kafka", "iceberg", "x-postgres", "x-postgres-cdc", "x-mysql-cdc", "x-jdbc") and place and path:
        return f"{place}: {'.'.join(path)}"
    if scheme in ("postgres", "mysql"):
        server = "/".join([place.rpartition("@")[2].partition(":")[0], *path[:1]])
        return f"{server}: {'.'.join(path[1:])}" if path[1:] else server
    return unquote(rest) if scheme == "file" and separator else uri


def summarize_pipeline(snapshot: PipelineSnapshot) -> PipelineSummary:
    """Return the summary of a pipeline. A record that cannot be read is reported in ``problem``; this function never raises."""
    try:
        memory = snapshot.decode_memory(SUMMARY_WINDOWS)
        intervals = snapshot.list_newest_interval_memories(SUMMARY_WINDOWS) if snapshot.interval_names else []
        return _make_summary(snapshot.pipeline, memory, intervals)
    except NewerVersion as error:
        problem = f"the ledger holds {error}: upgrade airflow-provider-kafka-spark to the release that wrote it"
        return PipelineSummary(snapshot.pipeline, problem)
    except (ValueError, KeyError, TypeError) as error:
        return PipelineSummary(snapshot.pipeline, f"the ledger holds {error}")
    finally:
        snapshot.clear_cache()


def _make_summary(pipeline: str, memory: Memory, intervals: Sequence[Memory]) -> PipelineSummary:
    entries = [*memory.entries.values(), *(entry for interval in intervals for entry in interval.entries.values())]
    timed = ((parse_completion_time(e), e.window.number, e) for e in entries if _has_completion_time(e))
    complete = sorted(timed, key=lambda item: item[:2])
    unfinished = [e for e in entries if e.state is State.PLANNED]
    newest = max(entries, key=lambda e: (e.attempt.started_at, e.window.planned_at), default=None)
    cadence = derive_cadence(CompletedWindow(at, e.window.run, e.window.interval) for at, _, e in complete)
    last = complete[-1][2] if complete else None
    has_source = memory.position.source is not None or any(e.window.source for e in entries)
    ranges = {r.topic for e in entries[-2:] for r in e.window.ranges}
    topics = tuple(sorted({*ranges, *(tp.topic for tp in memory.position.offsets)}))
    by_group = bool(memory.intervals) and not memory.position.offsets
    group = next((str(e.report["group_id"]) for _, _, e in reversed(complete) if e.report and e.report.get("group_id")), None)
    ids = memory.position.topic_ids or (newest.window.topic_ids if newest else {})
    open_entry = max(unfinished, key=lambda e: e.attempt.started_at, default=None)
    offsets = {} if has_source else memory.read_offsets
    if not (offsets or has_source or memory.intervals) and open_entry is not None:
        # Only the first window is planned: the pipeline has read up to where it begins.
        offsets = {r.topic_partition: r.start for r in open_entry.window.ranges}
    read_position = ReadPosition(offsets, ids, () if has_source else topics, group, by_group)
    tasks = (TaskInstanceKey.parse(e.attempt.run) for e in unfinished)
    return PipelineSummary(
        pipeline,
        read_position=read_position,
        last=last,
        open=open_entry,
        running_tasks=tuple(dict.fromkeys(task for task in tasks if task)),
        owner=TaskInstanceKey.parse(newest.window.run) if newest else None,
        pause=memory.pause,
        cadence=cadence,
        past={}
        if memory.position.moved
        else _collect_past_positions([e for _, _, e in complete], unfinished, ids, in_order=not by_group),
        topics=topics,
        moved=memory.position.moved,
        has_source=has_source,
        has_intervals=bool(memory.intervals),
        missing=find_missing_intervals(memory.intervals.spans),
    )


def parse_completion_time(entry: WindowEntry) -> float:
    """Return the completion time of a window in seconds since the epoch; 0 if unknown."""
    return _parse_instant(str((entry.report or {}).get("completed_at") or ""))


def parse_start_time(entry: WindowEntry) -> float:
    """Return the start of the newest attempt at a window in seconds since the epoch; 0 if unknown."""
    return _parse_instant(entry.attempt.started_at)


def _parse_instant(text: str) -> float:
    """Return an instant in seconds since the epoch; 0 if the text is not an instant."""
    try:
        return parse_epoch_seconds(text)
    except ValueError:
        return 0.0


def _has_completion_time(entry: WindowEntry) -> bool:
    return entry.state is State.COMPLETE and entry.report is not None and parse_completion_time(entry) > 0


def _collect_past_positions(
    complete: Sequence[WindowEntry], unfinished: Sequence[WindowEntry], ids: Mapping[str, str], *, in_order: bool
) -> dict[TopicPartition, list[Observation]]:
    """Return earlier positions, for the verdict on lag.

    A manual change must not look like a pipeline that went back. So windows from before a reset are left out, and replays count
    without a position. The newest attempt at an open window is a sign of life, too.

    :param ids: topic ids of the current position.
    :param in_order: True if each window continues the previous one; False for data intervals, which need not.
    """
    moved = max((e.window.number for e in complete if e.window.moved), default=0)
    past: dict[TopicPartition, list[Observation]] = {}
    for entry in complete:
        has_offset = in_order and not entry.window.replay
        for tp, end in entry.window.ends.items():
            # Offsets of a topic that was recreated refer to other records.
            same = entry.window.topic_ids.get(tp.topic, "") in ("", ids.get(tp.topic, ""))
            if same and entry.window.number >= moved:
                seen = Observation(parse_completion_time(entry), end if has_offset else None, active=True, has_offset=has_offset)
                past.setdefault(tp, []).append(seen)
    for entry in unfinished:
        if (started := parse_start_time(entry)) > 0:
            for tp in entry.window.ends:
                past.setdefault(tp, []).append(Observation(started, None, active=True, has_offset=False))
    return past
