"""One ledger, watched: its topic is read as it grows, and the lag of its pipelines is measured in rounds.

Only looked at: no group is joined, nothing is created or committed. Whatever happens is shown as a state with the age of the
data; the watch lives on and tries again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Event, RLock, Thread
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from airflow_kafka_spark.errors import KafkaSparkError, KafkaUnavailable
from airflow_kafka_spark.hooks.kafka.client import ClientEvents
from airflow_kafka_spark.ledger.topic import PROMPT
from airflow_kafka_spark.ui.catalog import LedgerName
from airflow_kafka_spark.ui.lags import LagRounds, Measured, Stand
from airflow_kafka_spark.ui.shelf import Shelves
from airflow_kafka_spark.ui.summary import Summary, summarize
from airflow_kafka_spark.windows.lag import History, Lag, Observation, Status, Verdict, worst
from airflow_kafka_spark.windows.memory import LedgerRecord
from airflow_kafka_spark.windows.model import TopicPartition

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

log = logging.getLogger(__name__)

State = Literal["ok", "loading", "down", "missing", "empty", "unreadable"]

HOOK_SECONDS = 8.0
"""How long a request may take before the cluster counts as down."""
CHECK_SECONDS = 5.0
"""How often it is asked whether the ledger is still the same one."""
LAG_SECONDS = 10.0
RETRY_SECONDS = (2.0, 5.0, 10.0, 30.0)
BATCH = 2_000
SAMPLES = 360
"""Samples of a pipeline's lag that are kept: an hour."""
INTEREST_SECONDS = 60.0
CONSUMER = {**PROMPT, "queued.max.messages.kbytes": 16384, "queued.min.messages": 2000}


class Sample(NamedTuple):
    """The lag at one moment, seconds since the epoch."""

    at: float
    records: int
    seconds: float | None


@dataclass
class _Pulse:
    """What was seen of a pipeline's lag."""

    history: History = field(default_factory=History)
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    measured: Measured | None = None
    verdict: Verdict | None = None
    first: dict[TopicPartition, tuple[float, int | None]] = field(default_factory=dict)
    moved: int = 0

    def judge(self, lag: Lag, past: Mapping[TopicPartition, Sequence[Observation]]) -> Verdict:
        """The verdict on a lag, with what the ledger tells of the time before.

        Windows are stamped by the clocks of those who moved them, which need not agree with this one's. So of the time since the
        first look they only count as signs of life: where the pipeline stood then was seen here.
        """
        for tp, state in lag.partitions.items():
            self.first.setdefault(tp, (lag.now, state.committed))
        return worst(
            self.history.judge(lag, {tp: self._aligned(tp, seen, lag.now) for tp, seen in past.items() if tp in self.first})
        )

    def _aligned(self, tp: TopicPartition, past: Sequence[Observation], now: float) -> list[Observation]:
        since, stood = self.first[tp]
        found = []
        for seen in past:
            before = seen.time < since and (stood is None or (seen.committed or 0) <= stood)
            found.append(
                seen if before else replace(seen, time=min(max(seen.time, since), now - 0.001), committed=None, tells=False)
            )
        return found


class _Begin(Exception):
    """The ledger is another one, or was cut off: read it from its beginning."""


@dataclass
class LedgerWatch:
    """A ledger and what is known of it. All of it may be read by other threads, under ``lock``.

    :param name: which ledger.
    :param make_hook: makes a hook of its connection.
    :param topics_of: topics and group that DAG files name for a pipeline, of which the ledger need not know yet.
    """

    name: LedgerName
    make_hook: Callable[[str], KafkaHook]
    topics_of: Callable[[str], tuple[tuple[str, ...], str | None]] = lambda pipeline: ((), None)
    lock: RLock = field(default_factory=RLock)
    shelves: Shelves = field(default_factory=Shelves)
    summaries: dict[str, Summary] = field(default_factory=dict)
    pulses: dict[str, _Pulse] = field(default_factory=dict)
    as_of: float | None = None
    round_seconds: float = 0.0
    _state: State = "loading"
    _message: str | None = None
    _loaded: bool = False
    _changed: set[str] = field(default_factory=set)
    _stop: Event = field(default_factory=Event)
    _wake: Event = field(default_factory=Event)
    _thread: Thread | None = None
    _topic_id: str = ""
    _positions: dict[int, int] = field(default_factory=dict)
    _at_end: set[int] = field(default_factory=set)
    _rounds: LagRounds = field(default_factory=LagRounds)
    _interest: dict[str, float] = field(default_factory=dict)

    # --- for those who look ---

    @property
    def state(self) -> tuple[State, str | None]:
        """How it is, and why."""
        if self._state == "ok" and self.shelves.remarks:
            return "unreadable", f"{len(self.shelves.remarks)} records cannot be read: {self.shelves.remarks[0]}"
        if self._state == "ok" and not self.shelves.pipelines:
            return "empty", "No pipeline has moved a window yet"
        return self._state, self._message

    def age(self, now: float) -> float | None:
        """Seconds since the data is from; None when it was never read to its end."""
        return None if self.as_of is None else max(0.0, now - self.as_of)

    def mark_interest(self, pipeline: str) -> None:
        """Somebody looks at this pipeline closely: its lag is measured first, with its group, and at once."""
        with self.lock:
            known = pipeline in self._interest
            self._interest[pipeline] = time.monotonic() + INTEREST_SECONDS
        if not known:
            self._wake.set()

    def nudge(self) -> None:
        """Something was just changed: look now."""
        self._wake.set()

    # --- the thread ---

    def start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._stop = Event()
            self._thread = Thread(target=self._run, args=(self._stop,), name=f"kafka-spark-ui {self.name}", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()

    def _run(self, stop: Event) -> None:
        failures = 0
        while not stop.is_set():
            try:
                with self.make_hook(self.name.connection) as hook:
                    self._watch(hook, stop)
                failures = 0
            except _Begin:
                self._forget()
            except KafkaSparkError as error:
                self._tell("down", str(error))
                self._pause(stop, failures)
                failures += 1
            except Exception:
                log.exception("Watching ledger %s failed; it goes on", self.name)
                self._tell("down", "Something unexpected happened: the log of the api-server says more")
                self._pause(stop, failures)
                failures += 1

    def _pause(self, stop: Event, failures: int) -> None:
        stop.wait(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])

    def _tell(self, state: State, message: str | None = None) -> None:
        with self.lock:
            self._state, self._message = state, message

    def _forget(self) -> None:
        with self.lock:
            self.shelves, self.summaries, self._changed = Shelves(), {}, set()
            self._positions, self._at_end, self._loaded = {}, set(), False
            self._state, self._message = "loading", None

    def _watch(self, hook: KafkaHook, stop: Event) -> None:
        """Until it is stopped, or something is wrong."""
        partitions = self._find(hook)
        if not partitions:
            self._wait(stop, CHECK_SECONDS)
            return
        with _Reader(hook, self.name.topic, partitions, self._positions) as reader:
            self._at_end = set()
            checked, measured = time.monotonic(), 0.0
            while not stop.is_set():
                began = time.monotonic()
                self._take(reader.read(), partitions)
                if began - checked > CHECK_SECONDS:
                    if self._find(hook) != partitions:
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

    def _find(self, hook: KafkaHook) -> tuple[int, ...]:
        """The ledger's partitions; none when there is no such topic.

        :raises _Begin: it is another topic than before.
        """
        found = hook.describe_topics([self.name.topic], missing="omit").get(self.name.topic)
        if found is None:
            self._forget()
            self._topic_id = ""
            self._tell("missing", f"There is no topic `{self.name.topic}`: the first window that is moved creates it")
            self.as_of = time.time()
            return ()
        if self._topic_id and found.topic_id != self._topic_id:
            self._topic_id = found.topic_id
            raise _Begin
        self._topic_id = found.topic_id
        if self._state in ("down", "missing"):
            self._tell("ok" if self._loaded else "loading")
        return found.partitions

    def _take(self, messages: Iterable[tuple[int, LedgerRecord | None]], partitions: tuple[int, ...]) -> None:
        with self.lock:
            for partition, record in messages:
                if record is None:
                    self._at_end.add(partition)
                    continue
                self._at_end.discard(partition)
                self._positions[partition] = record.offset + 1
                if changed := self.shelves.add(partition, record):
                    self._changed.add(changed)
            if self._at_end.issuperset(partitions):
                self.as_of = time.time()
                if not self._loaded:
                    self._loaded = True
                    self._state = "ok"
                    log.info("Ledger %s is read: %d records", self.name, self.shelves.records)

    def _summarize(self) -> None:
        while self._changed:
            # A few at a time, so that nobody waits for the lock.
            with self.lock:
                for _ in range(min(20, len(self._changed))):
                    name = self._changed.pop()
                    shelf = self.shelves.pipelines.get(name)
                    if shelf is None:
                        self.summaries.pop(name, None)
                        self.pulses.pop(name, None)
                    else:
                        self.summaries[name] = summarize(shelf)

    # --- lag ---

    def _measure(self, hook: KafkaHook) -> None:
        with self.lock:
            summaries = dict(self.summaries)
            now = time.monotonic()
            self._interest = {name: until for name, until in self._interest.items() if until > now}
            interest = list(self._interest)
        stands = {name: s.stand for name, found in summaries.items() if (s := self._with_topics(found)) and _has_lag(s)}
        found = self._rounds.measure(hook, stands, interest)
        with self.lock:
            for name, measured in found.items():
                self._judge(name, measured, summaries[name])

    def _with_topics(self, summary: Summary) -> Summary:
        topics, group = self.topics_of(summary.pipeline)
        stand = summary.stand
        if summary.has_source or summary.problem or not (topics or (group and not stand.group)):
            return summary
        every = tuple(sorted({*stand.topics, *topics}))
        return replace(summary, stand=Stand(stand.offsets, stand.topic_ids, every, stand.group or group, stand.by_group))

    def _judge(self, name: str, measured: Measured, summary: Summary) -> None:
        pulse = self.pulses.setdefault(name, _Pulse())
        pulse.measured = measured
        if measured.lag is None:
            pulse.verdict = None
            return
        if summary.moved and summary.moved != pulse.moved:
            # Moved by hand: what was seen before says nothing of it.
            pulse.moved, pulse.history, pulse.first = summary.moved, History(), {}
        pulse.history.period = summary.period
        pulse.verdict = pulse.judge(measured.lag, summary.past)
        if measured.problem and pulse.verdict.status is Status.OK:
            pulse.verdict = Verdict(Status.STOP, measured.problem)
        pulse.samples.append(Sample(measured.at, measured.lag.records(), measured.seconds))


def _has_lag(summary: Summary) -> bool:
    stand = summary.stand
    return not summary.has_source and bool(stand.offsets or (stand.by_group and stand.group))


class _Reader:
    """Reads all partitions of a ledger on and on, without a group.

    :param positions: where to begin; a partition that is not named begins at its first record.
    """

    def __init__(self, hook: KafkaHook, topic: str, partitions: tuple[int, ...], positions: dict[int, int]) -> None:
        import confluent_kafka

        self._hook, self._topic = hook, topic
        self._events = ClientEvents(hook.config.get("error_cb"))
        settings = {**CONSUMER, "error_cb": self._events.on_error}
        self._consumer = confluent_kafka.Consumer(hook.consumer_config(**settings), logger=self._events)
        begin = confluent_kafka.OFFSET_BEGINNING
        starts = [confluent_kafka.TopicPartition(topic, p, positions.get(p, begin)) for p in partitions]
        self._consumer.assign(starts)

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._consumer.close()

    def read(self) -> list[tuple[int, LedgerRecord | None]]:
        """What has come, after half a second at the latest; None for a record is the end of its partition."""
        import confluent_kafka

        messages: list[Any] = self._consumer.consume(BATCH, timeout=0.5)
        found: list[tuple[int, LedgerRecord | None]] = []
        for message in messages:
            error = message.error()
            if error is None:
                found.append((message.partition(), LedgerRecord(message.key() or b"", message.value(), message.offset())))
            elif error.code() == confluent_kafka.KafkaError._PARTITION_EOF:
                found.append((message.partition(), None))
            elif error.name() in ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE", "UNKNOWN_TOPIC_OR_PART", "UNKNOWN_TOPIC_ID"):
                raise _Begin
            elif not error.retriable() and error.name() not in ("_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT"):
                raise KafkaUnavailable(self._hook.conn_id, f"reading ledger {self._topic}", error.str())
        return found
