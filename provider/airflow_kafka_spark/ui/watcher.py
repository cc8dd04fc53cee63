"""Background threads of the API server that read the ledgers and measure lag while pages are open.

:class:`LedgerWatch` follows one ledger, :class:`Watcher` starts one for each ledger. They only read: they join no consumer group,
create nothing and commit nothing. An error becomes a state of the ledger, shown with the age of the data, and they try again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Event, Lock, RLock, Thread
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from airflow_kafka_spark.errors import KafkaSparkError, KafkaUnavailable
from airflow_kafka_spark.hooks.kafka.client import ClientEvents, drop_group_refusals
from airflow_kafka_spark.ui.airflow_metadata import (
    DEFAULT_CONNECTION,
    DEFAULT_TOPIC,
    Catalog,
    CatalogReader,
    DagSchedule,
    LedgerName,
    PipelineTask,
)
from airflow_kafka_spark.ui.lag_monitor import LagMeasurement, LagMonitor, ReadPosition
from airflow_kafka_spark.ui.ledger_snapshot import LedgerSnapshot, PipelineSummary, summarize_pipeline
from airflow_kafka_spark.windows.lag import Cadence, History, Lag, Observation, Status, Unscheduled, Verdict, find_worst_verdict
from airflow_kafka_spark.windows.memory import LedgerRecord
from airflow_kafka_spark.windows.model import TopicPartition

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

log = logging.getLogger(__name__)

LedgerState: TypeAlias = Literal["ok", "loading", "down", "missing", "empty", "unreadable"]

HOOK_SECONDS = 8.0
"""Timeout of a request in seconds, after which the cluster counts as down."""
CHECK_SECONDS = 5.0
"""Seconds between two checks for a replaced ledger topic."""
LAG_SECONDS = 10.0
"""Seconds between two measurements of lag."""
RETRY_SECONDS = (2.0, 5.0, 10.0, 30.0)
"""Seconds to wait after successive failures; the last value is repeated."""
READ_BATCH = 2_000
"""Maximum number of records that one call takes from the client."""
MAX_SAMPLES = 360
"""Maximum number of samples of a pipeline's lag, for one hour."""
INTEREST_SECONDS = 60.0
"""Seconds after the last request of a pipeline's page for which its lag is measured first."""
# The consumer runs as long as pages are open. Brokers return new records at once, and wait before an empty answer, so that an
# idle ledger costs two requests per second.
CONSUMER = {
    "fetch.wait.max.ms": 500,
    "fetch.error.backoff.ms": 50,
    "queued.max.messages.kbytes": 16384,
    "queued.min.messages": 2000,
}


class LagSample(NamedTuple):
    """Lag at one moment.

    :param at: seconds since the epoch.
    :param records: lag in records.
    :param seconds: lag in seconds; None if it is unknown.
    """

    at: float
    records: int
    seconds: float | None


@dataclass
class LagTracker:
    """History of one pipeline's lag.

    :param measured: the last measurement.
    :param verdict: the last verdict; None if the lag is unknown.
    :param first: for each partition, when it was first measured and the position at that time.
    :param moved: number of the change by hand after which the history begins.
    """

    history: History = field(default_factory=History)
    samples: deque[LagSample] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    measured: LagMeasurement | None = None
    verdict: Verdict | None = None
    first: dict[TopicPartition, tuple[float, int | None]] = field(default_factory=dict)
    moved: int = 0

    def add(self, measured: LagMeasurement, summary: PipelineSummary, cadence: Cadence | None) -> None:
        """Add a measurement, and judge it.

        :param measured: the lag that was just measured.
        :param summary: the pipeline.
        :param cadence: schedule of its runs; None if unknown.
        """
        self.measured = measured
        if measured.lag is None:
            self.verdict = None
            return
        if summary.moved and summary.moved != self.moved:
            # After a manual change, earlier measurements do not apply to the new position.
            self.moved, self.history, self.first = summary.moved, History(), {}
        self.history.cadence = cadence
        self.verdict = self.judge(measured.lag, summary.past)
        if measured.problem and self.verdict.status is Status.OK:
            self.verdict = Verdict(Status.STOP, measured.problem)
        self.samples.append(LagSample(measured.at, measured.lag.count_records(), measured.seconds))

    def judge(self, lag: Lag, past: Mapping[TopicPartition, Sequence[Observation]]) -> Verdict:
        """Return the verdict on a lag.

        Windows carry the clock of the machine that moved them, which may differ from this one's. So windows since the first
        measurement count only as signs of life; the positions of that time are those that were measured here.

        :param lag: the lag that was just measured.
        :param past: earlier positions, from the ledger.
        """
        for tp, state in lag.partitions.items():
            self.first.setdefault(tp, (lag.now, state.committed))
        return find_worst_verdict(
            self.history.judge(lag, {tp: self._align(tp, seen, lag.now) for tp, seen in past.items() if tp in self.first})
        )

    def _align(self, tp: TopicPartition, past: Sequence[Observation], now: float) -> list[Observation]:
        since, first_position = self.first[tp]
        found = []
        for seen in past:
            before = seen.time < since and (first_position is None or (seen.committed or 0) <= first_position)
            found.append(
                seen if before else replace(seen, time=min(max(seen.time, since), now - 0.001), committed=None, has_offset=False)
            )
        return found


class _LedgerReplaced(Exception):
    """Raised when the ledger topic was replaced or truncated: it has to be read from its beginning."""


@dataclass
class LedgerWatch:
    """A thread that reads one ledger and measures the lag of its pipelines. Other threads read the attributes under ``lock``.

    :param name: the ledger.
    :param make_hook: returns a hook of a connection.
    :param topics_of: returns the topics and the group that the DAG files name for a pipeline.
    :param schedule_of: returns the schedule of a pipeline's DAG; None if no DAG file names the pipeline.
    :param snapshot: the records of the ledger.
    :param summaries: summary of each pipeline.
    :param lag_trackers: lag of each pipeline.
    :param as_of: time at which the ledger was last read to its end, seconds since the epoch; None if it never was.
    :param round_seconds: duration of the last measurement of lag.
    """

    name: LedgerName
    make_hook: Callable[[str], KafkaHook]
    topics_of: Callable[[str], tuple[tuple[str, ...], str | None]] = lambda pipeline: ((), None)
    schedule_of: Callable[[str], DagSchedule | None] = lambda pipeline: None
    lock: RLock = field(default_factory=RLock)
    snapshot: LedgerSnapshot = field(default_factory=LedgerSnapshot)
    summaries: dict[str, PipelineSummary] = field(default_factory=dict)
    lag_trackers: dict[str, LagTracker] = field(default_factory=dict)
    as_of: float | None = None
    round_seconds: float = 0.0
    _state: LedgerState = "loading"
    _message: str | None = None
    _loaded: bool = False
    _changed: set[str] = field(default_factory=set)
    _stop: Event = field(default_factory=Event)
    _wake: Event = field(default_factory=Event)
    _thread: Thread | None = None
    _topic_id: str = ""
    _positions: dict[int, int] = field(default_factory=dict)
    _at_end: set[int] = field(default_factory=set)
    _lag_monitor: LagMonitor = field(default_factory=LagMonitor)
    _interest: dict[str, float] = field(default_factory=dict)

    # --- for requests ---

    @property
    def state(self) -> tuple[LedgerState, str | None]:
        """The state of the ledger, and the reason for it."""
        if self._state == "ok" and self.snapshot.problems:
            return "unreadable", f"{len(self.snapshot.problems)} records cannot be read: {self.snapshot.problems[0]}"
        if self._state == "ok" and not self.snapshot.pipelines:
            return "empty", "No pipeline has moved a window yet"
        return self._state, self._message

    @property
    def is_read(self) -> bool:
        """True if the ledger was read to its end, or does not exist, so that its pipelines are known."""
        return self.as_of is not None or self._state == "missing"

    def compute_age(self, now: float) -> float | None:
        """Return the age of the data in seconds; None if the ledger was never read to its end.

        :param now: seconds since the epoch.
        """
        return None if self.as_of is None else max(0.0, now - self.as_of)

    def compute_outage(self, now: float) -> float | None:
        """Return the seconds since the ledger was last read, if it cannot be reached now; None if it can, or was never read.

        :param now: seconds since the epoch.
        """
        return self.compute_age(now) if self._state == "down" else None

    def mark_interest(self, pipeline: str) -> None:
        """Record that the page of this pipeline is open. Its lag, with its group, is measured now, and first in later rounds."""
        with self.lock:
            known = pipeline in self._interest
            self._interest[pipeline] = time.monotonic() + INTEREST_SECONDS
        if not known:
            self._wake.set()

    def refresh(self) -> None:
        """Measure lag now, after a change."""
        self._wake.set()

    # --- the thread ---

    def start(self) -> None:
        """Start the thread if it does not run."""
        if self._thread is None or not self._thread.is_alive():
            self._stop = Event()
            self._thread = Thread(target=self._run, args=(self._stop,), name=f"kafka-spark-ui {self.name}", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread. It ends after the request that it is waiting for."""
        self._stop.set()
        self._wake.set()

    def _run(self, stop: Event) -> None:
        failures = 0
        while not stop.is_set():
            try:
                with self.make_hook(self.name.connection) as hook:
                    self._watch(hook, stop)
                failures = 0
            except _LedgerReplaced:
                self._clear()
            except KafkaSparkError as error:
                self._set_state("down", str(error))
                self._pause(stop, failures)
                failures += 1
            except Exception:
                log.exception("Reading ledger %s failed; it is tried again", self.name)
                self._set_state("down", "An unexpected error occurred: see the log of the API server")
                self._pause(stop, failures)
                failures += 1

    def _pause(self, stop: Event, failures: int) -> None:
        stop.wait(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])

    def _set_state(self, state: LedgerState, message: str | None = None) -> None:
        with self.lock:
            self._state, self._message = state, message

    def _clear(self) -> None:
        with self.lock:
            self.snapshot, self.summaries, self._changed = LedgerSnapshot(), {}, set()
            self._positions, self._at_end, self._loaded = {}, set(), False
            self._state, self._message = "loading", None

    def _watch(self, hook: KafkaHook, stop: Event) -> None:
        """Read the ledger and measure lag until the thread is stopped, the ledger topic changes, or an error occurs."""
        partitions = self._describe(hook)
        if not partitions:
            self._wait(stop, CHECK_SECONDS)
            return
        with _LedgerConsumer(hook, self.name.topic, partitions, self._positions) as reader:
            self._at_end = set()
            checked, measured = time.monotonic(), 0.0
            while not stop.is_set():
                began = time.monotonic()
                self._add(reader.read(), partitions)
                if began - checked > CHECK_SECONDS:
                    if self._describe(hook) != partitions:
                        return
                    checked = began
                if not self._loaded:
                    continue
                self._summarize()
                if self._wake.is_set() or began - measured > LAG_SECONDS:
                    self._wake.clear()
                    self._measure(hook)
                    self.round_seconds, measured = time.monotonic() - began, began

    def _wait(self, stop: Event, seconds: float) -> None:
        if not stop.is_set():
            self._wake.wait(seconds)
            self._wake.clear()

    def _describe(self, hook: KafkaHook) -> tuple[int, ...]:
        """Return the partitions of the ledger; an empty tuple if the topic does not exist.

        :raises _LedgerReplaced: the topic was deleted and created again.
        """
        found = hook.describe_topics([self.name.topic], missing="omit").get(self.name.topic)
        if found is None:
            self._clear()
            self._topic_id = ""
            self._set_state("missing", f"There is no topic `{self.name.topic}`. The first window of a pipeline creates it")
            self.as_of = time.time()
            return ()
        if self._topic_id and found.topic_id != self._topic_id:
            self._topic_id = found.topic_id
            raise _LedgerReplaced
        self._topic_id = found.topic_id
        if self._state in ("down", "missing"):
            self._set_state("ok" if self._loaded else "loading")
        return found.partitions

    def _add(self, messages: Iterable[tuple[int, LedgerRecord | None]], partitions: tuple[int, ...]) -> None:
        with self.lock:
            for partition, record in messages:
                if record is None:
                    self._at_end.add(partition)
                    continue
                self._at_end.discard(partition)
                self._positions[partition] = record.offset + 1
                if changed := self.snapshot.add(partition, record):
                    self._changed.add(changed)
            if self._at_end.issuperset(partitions):
                self.as_of = time.time()
                if not self._loaded:
                    self._loaded = True
                    self._state = "ok"
                    log.info("Ledger %s is read: %d records", self.name, self.snapshot.records)

    def _summarize(self) -> None:
        while self._changed:
            # A few at a time, so that requests do not wait long for the lock.
            with self.lock:
                for _ in range(min(20, len(self._changed))):
                    name = self._changed.pop()
                    pipeline = self.snapshot.pipelines.get(name)
                    if pipeline is None:
                        self.summaries.pop(name, None)
                        self.lag_trackers.pop(name, None)
                    else:
                        self.summaries[name] = summarize_pipeline(pipeline)

    # --- lag ---

    def _measure(self, hook: KafkaHook) -> None:
        with self.lock:
            summaries = dict(self.summaries)
            now = time.monotonic()
            self._interest = {name: until for name, until in self._interest.items() if until > now}
            interest = list(self._interest)
        positions = {name: p for name, found in summaries.items() if (p := self._find_position(found)) is not None}
        found = self._lag_monitor.measure(hook, positions, interest)
        with self.lock:
            for name, measured in found.items():
                summary = summaries[name]
                self.lag_trackers.setdefault(name, LagTracker()).add(measured, summary, self._find_cadence(summary))

    def _find_position(self, summary: PipelineSummary) -> ReadPosition | None:
        """Return the position of a pipeline, with the facts of its DAG file; None if it has no lag."""
        if summary.has_source or summary.problem:
            return None
        position, (topics, group) = summary.read_position, self.topics_of(summary.pipeline)
        position = replace(position, topics=tuple(sorted({*position.topics, *topics})), group=position.group or group)
        if not (position.offsets or (position.by_group and position.group)):
            return None
        schedule = self.schedule_of(summary.pipeline) if position.by_group else None
        due_until = schedule.find_due_end(time.time()) if schedule else None
        return position if due_until is None else replace(position, due_until=int(due_until * 1000))

    def _find_cadence(self, summary: PipelineSummary) -> Cadence | None:
        """Return the schedule of a pipeline: the timetable of its DAG, or else the one derived from its windows."""
        if summary.pause is not None:
            return Unscheduled()
        schedule = self.schedule_of(summary.pipeline)
        return (schedule.cadence if schedule else None) or summary.cadence


class _LedgerConsumer:
    """Consumer of all partitions of a ledger, without a group.

    :param positions: offsets to begin at. A partition that is not named is read from its first record.
    """

    def __init__(self, hook: KafkaHook, topic: str, partitions: tuple[int, ...], positions: dict[int, int]) -> None:
        import confluent_kafka

        self._hook, self._topic = hook, topic
        self._events = ClientEvents(hook.config.get("error_cb"))
        settings = {**CONSUMER, "error_cb": self._events.on_error}
        self._consumer = confluent_kafka.Consumer(hook.make_consumer_config(**settings), logger=self._events)
        begin = confluent_kafka.OFFSET_BEGINNING
        starts = [confluent_kafka.TopicPartition(topic, p, positions.get(p, begin)) for p in partitions]
        self._consumer.assign(starts)

    def __enter__(self) -> _LedgerConsumer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._consumer.close()

    def read(self) -> list[tuple[int, LedgerRecord | None]]:
        """Return the next records with their partitions, after at most half a second. None marks the end of a partition."""
        import confluent_kafka

        hook = self._hook
        # The whole half second, unless there are very many: what is shown is made anew after each call.
        messages = drop_group_refusals(
            self._consumer.consume(READ_BATCH, 0.5), hook.config, f"reading ledger {self._topic}", conn_id=hook.conn_id
        )
        found: list[tuple[int, LedgerRecord | None]] = []
        for message in messages:
            error, partition, offset = message.error(), message.partition(), message.offset()
            if error is None:
                found.append((partition, LedgerRecord(message.key() or b"", message.value(), offset)))
            elif error.code() == confluent_kafka.KafkaError._PARTITION_EOF:
                found.append((partition, None))
            elif error.name() in ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE", "UNKNOWN_TOPIC_OR_PART", "UNKNOWN_TOPIC_ID"):
                raise _LedgerReplaced
            elif not error.retriable() and error.name() not in ("_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT"):
                raise KafkaUnavailable(self._hook.conn_id, f"reading ledger {self._topic}", error.str())
        return found


# --- all ledgers --------------------------------------------------------------------------------------------------------

IDLE_SECONDS = 300.0
"""Seconds after the last request at which the threads end. The next request restarts them where they were."""
CATALOG_SECONDS = 10.0
"""Seconds between two reads of the catalog."""
FIRST_SECONDS = 3.0
"""Maximum seconds that the first request waits for the catalog, because the page would be empty without it."""


def make_hook(conn_id: str) -> KafkaHook:
    """Return a hook with a short timeout."""
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

    return KafkaHook(conn_id, timeout=HOOK_SECONDS)


def read_catalog(reader: CatalogReader) -> Catalog:
    """Return the catalog from Airflow's database."""
    from airflow.utils.session import create_session

    with create_session() as session:
        return reader.read(session)


def read_configured_ledgers() -> tuple[LedgerName, ...]:
    """Return the ledgers of the option ``[kafka_spark] ledgers``: ``<kafka_conn_id>/<ledger_topic>``, separated by commas.

    An invalid name is logged and left out.
    """
    from airflow.configuration import conf

    found = []
    for text in str(conf.get("kafka_spark", "ledgers", fallback="") or "").split(","):
        if text.strip():
            try:
                found.append(LedgerName.parse(text))
            except ValueError as error:
                log.warning("[kafka_spark] ledgers: %s", error)
    return tuple(found)


@dataclass
class Watcher:
    """A thread that reads the catalog, and a :class:`LedgerWatch` for each ledger. All threads end when no page is open.

    :param catalog_of: reads the catalog.
    :param configured: returns the ledgers that Airflow's configuration names.
    :param hook_of: returns a hook of a connection.
    :param idle_seconds: time after the last request at which the threads end.
    :param catalog: the tasks that move windows.
    :param ledgers: the ledgers that are watched.
    :param by_pipeline: the tasks of each pipeline.
    :param problem: the reason why the catalog could not be read; None if it was.
    """

    catalog_of: Callable[[CatalogReader], Catalog] = read_catalog
    configured: Callable[[], tuple[LedgerName, ...]] = read_configured_ledgers
    hook_of: Callable[[str], KafkaHook] = make_hook
    idle_seconds: float = IDLE_SECONDS
    catalog: Catalog = field(default_factory=Catalog)
    ledgers: dict[LedgerName, LedgerWatch] = field(default_factory=dict)
    by_pipeline: dict[tuple[LedgerName, str], tuple[PipelineTask, ...]] = field(default_factory=dict)
    problem: str | None = None
    _reader: CatalogReader = field(default_factory=CatalogReader)
    _last_request: float = 0.0
    _lock: Lock = field(default_factory=Lock)
    _first: Event = field(default_factory=Event)
    _wake: Event = field(default_factory=Event)
    _thread: Thread | None = None
    _ended: bool = False

    def request_received(self) -> None:
        """Start the threads if they do not run. The first call waits a moment for the catalog; no call waits for Kafka."""
        self._last_request = time.monotonic()
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._ended = False
                self._thread = Thread(target=self._run, name="kafka-spark-ui", daemon=True)
                self._thread.start()
        self._first.wait(FIRST_SECONDS)

    def stop(self) -> None:
        """End all threads."""
        self._ended = True
        self._wake.set()

    @property
    def is_watching(self) -> bool:
        """True while the threads run."""
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._ended and time.monotonic() - self._last_request < self.idle_seconds:
                self._refresh()
                self._first.set()
                self._wake.wait(min(CATALOG_SECONDS, self.idle_seconds))
        finally:
            with self._lock:
                for ledger in self.ledgers.values():
                    ledger.stop()

    def _refresh(self) -> None:
        try:
            self.catalog = self.catalog_of(self._reader)
            self.by_pipeline = self.catalog.group_by_pipeline()
            self.problem = None
        except Exception:
            # The database may be unavailable for a while: the previous catalog is shown meanwhile.
            log.exception("Reading the serialized DAGs failed; it is tried again")
            self.problem = "Airflow's database does not answer"
        wanted = {*self.catalog.ledgers, *self.configured()} or {LedgerName(DEFAULT_CONNECTION, DEFAULT_TOPIC)}
        for name in self.ledgers.keys() - wanted:
            self.ledgers[name].stop()
        kept = {name: ledger for name, ledger in self.ledgers.items() if name in wanted}
        new = {
            name: LedgerWatch(name, self.hook_of, self._make_topic_finder(name), self._make_schedule_finder(name))
            for name in wanted - kept.keys()
        }
        # The object is replaced, never changed, because requests read it without a lock.
        self.ledgers = dict(sorted({**kept, **new}.items()))
        for ledger in self.ledgers.values():
            ledger.start()

    def _make_topic_finder(self, name: LedgerName) -> Callable[[str], tuple[tuple[str, ...], str | None]]:
        def find_topics(pipeline: str) -> tuple[tuple[str, ...], str | None]:
            tasks = self.by_pipeline.get((name, pipeline), ())
            return tasks[0].topics if tasks else (), tasks[0].group if tasks else None

        return find_topics

    def _make_schedule_finder(self, name: LedgerName) -> Callable[[str], DagSchedule | None]:
        def find_schedule(pipeline: str) -> DagSchedule | None:
            tasks = self.by_pipeline.get((name, pipeline), ())
            return self.catalog.schedules.get(tasks[0].dag_id) if tasks else None

        return find_schedule


_watcher: Watcher | None = None
_lock = Lock()


def get_watcher() -> Watcher:
    """Return the watcher of this process."""
    global _watcher
    with _lock:
        if _watcher is None:
            _watcher = Watcher()
        return _watcher
