"""A model of Kafka and of a sink. It is small enough to try every order of steps of several attempts.

The model runs the real code: operators/base.py and from_kafka.py, ledger/attempt.py, topic.py and interval.py, the commands of
control/, and all of windows/. Only the calls that leave the process are replaced. Each of these calls is one *step* on a
:class:`World`, which is a value. An actor is a function that gets every answer from its history. Its next step therefore depends
on its history alone, and each history is run only once. A greenlet waits for each answer. The actor continues with the first
possible answer; for each other answer, it is run again from its beginning.

:func:`explore` takes every order of steps of all actors. An attempt that is killed gets no further step; an attempt that sleeps
    and wakes gets its next step late. After every step, a fresh attempt runs alone and has to bring everything to its end.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pyarrow as pa
from airflow.providers.common.compat.sdk import AirflowSkipException
from greenlet import getcurrent, greenlet

from airflow_kafka_spark.bad_records.dead_letters import DeadLetterTopic
from airflow_kafka_spark.control import base as control_base
from airflow_kafka_spark.control import position
from airflow_kafka_spark.errors import Fenced, KafkaSparkError, WindowConflict
from airflow_kafka_spark.formats import String
from airflow_kafka_spark.hooks.kafka.requests import CommittedOffset, GroupState, PartitionOffsets, TopicDescription
from airflow_kafka_spark.ledger import attempt as ledger
from airflow_kafka_spark.ledger import boundaries as boundaries_hook
from airflow_kafka_spark.ledger import interval as interval_ledger
from airflow_kafka_spark.ledger import topic as ledger_topic
from airflow_kafka_spark.ledger.group import make_offset_metadata
from airflow_kafka_spark.ledger.topic import ALL_RECORDS, AwaitedRecords, Hint, LedgerSpan
from airflow_kafka_spark.operators import KafkaToSinkOperator, base, binding, kafka_to_sink
from airflow_kafka_spark.operators.publishing import publish_splits
from airflow_kafka_spark.sinks.base import Guarantee, Sink, WindowWriter
from airflow_kafka_spark.sinks.kafka.tasks import send as sending
from airflow_kafka_spark.sinks.kafka.tasks.dead_letters import SCHEMA, to_bytes
from airflow_kafka_spark.sinks.kafka.tasks.publish import ClaimedWindow, Publisher
from airflow_kafka_spark.windows.binding import Endpoint
from airflow_kafka_spark.windows.continuity import refuse_gap, refuse_other
from airflow_kafka_spark.windows.interval_boundaries import Boundary
from airflow_kafka_spark.windows.memory import LedgerRecord, Memory, fold_records, make_marker_record, make_window_key
from airflow_kafka_spark.windows.model import (
    Applied,
    Landed,
    Marker,
    OffsetRange,
    Split,
    SplitResult,
    TargetTopic,
    TopicPartition,
    Window,
)
from airflow_kafka_spark.windows.report import Report
from airflow_kafka_spark.windows.times import to_instant

PIPELINE, GROUP, TOPIC, LEDGER, DEAD = "p", "g", "t", "airflow-windows", "dead"
TP = TopicPartition(TOPIC, 0)
HOUR = 3_600_000
OPEN, DONE, GONE = "open", "done", "gone"
HIGH = 1 << 40
TRIES = ((base, "PLAN_TRIES"), (control_base, "TRIES"), (ledger, "TAKE_TRIES"), (interval_ledger, "BIND_TRIES"))
"""Maximum numbers of tries of the package."""
UNLIMITED = -1
Answer = Any
Eager = Callable[[str, tuple[Any, ...]], bool]
History = int


def is_eager(actor: str, step: tuple[Any, ...]) -> bool:
    """Return True for steps that are taken together with the previous step, because their answers are only a copy or are asked
    for again.
    """
    return step[0] in ("log", "committed")


class Record(NamedTuple):
    """A record of the ledger, and the state of its transaction."""

    key: bytes
    value: bytes | None
    producer: str
    state: str


class Taken(NamedTuple):
    """A window that the sink has taken, or dead letters of a window.

    :ivar pipeline: the pipeline; :data:`DEAD` for dead letters.
    :ivar has_rows: False if the sink has only its record of the window.
    :ivar left_out: offsets of which the sink has no rows, because they are dead letters.
    """

    pipeline: str
    number: int
    ranges: tuple[OffsetRange, ...]
    replay: int
    has_rows: bool = True
    left_out: tuple[int, ...] = ()

    @property
    def offsets(self) -> Iterator[int]:
        """The offsets that the sink, or the dead letter topic, has."""
        return (o for r in self.ranges for o in range(r.start, r.end) if self.has_rows and o not in self.left_out)


class World(NamedTuple):
    """Everything outside of attempts.

    :ivar log: the ledger's partition.
    :ivar epochs: of each transactional id.
    :ivar pending: a group and its offset in an open transaction, by transactional id.
    :ivar end: of the topic that is read.
    :ivar groups: the offset and metadata that each group has committed.
    :ivar taken: the windows in the sink.
    :ivar sent: records in open transactions, by transactional id.
    :ivar begun: number of attempts that have begun in the sink, by pipeline. Only the last of them can commit.
    """

    log: tuple[Record, ...] = ()
    epochs: tuple[tuple[str, int], ...] = ()
    pending: tuple[tuple[str, tuple[str, tuple[int, str]]], ...] = ()
    end: int = 2
    groups: tuple[tuple[str, tuple[int, str]], ...] = ()
    taken: tuple[Taken, ...] = ()
    sent: tuple[tuple[str, Taken], ...] = ()
    begun: tuple[tuple[str, int], ...] = ()

    @property
    def committed(self) -> list[LedgerRecord]:
        return [LedgerRecord(r.key, r.value, offset) for offset, r in enumerate(self.log) if r.state == DONE]

    def memory(self, pipeline: str = PIPELINE) -> Memory:
        return fold_records(pipeline, self.committed)

    def aborted(self, producer: str) -> World:
        """Abort the open transaction of this id."""
        log = tuple(r._replace(state=GONE) if (r.producer, r.state) == (producer, OPEN) else r for r in self.log)
        pending, sent = (tuple(p for p in found if p[0] != producer) for found in (self.pending, self.sent))
        return self._replace(log=log, pending=pending, sent=sent)

    def fenced(self, producer: str) -> World:
        epochs = dict(self.epochs)
        epochs[producer] = epochs.get(producer, 0) + 1
        return self.aborted(producer)._replace(epochs=tuple(sorted(epochs.items())))

    @property
    def moved(self) -> Counter[int]:
        """Return how often each offset is in the sink or in the dead letter topic."""
        return Counter(o for t in self.taken for o in t.offsets)


class Violation(AssertionError):
    """Raised when an order of steps breaks the guarantee of exactly once."""


# --- steps: what one call does to the world -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rules:
    """The rules that Kafka and the sink keep. Each can be switched off, to check that the model finds the violation.

    :param fences: a newer producer of an id shuts out the older producers.
    :param takes_rows_first: the sink's record of a window is never there before its rows.
    """

    fences: bool = True
    takes_rows_first: bool = True


BLOCKED = object()


def apply(world: World, step: tuple[Any, ...], rules: Rules) -> tuple[World, Answer]:
    """Run a step and return its answer; :data:`BLOCKED` if it has to wait."""
    kind, *args = step
    return _STEPS[kind](world, rules, *args)


def _fence(world: World, rules: Rules, producer: str) -> tuple[World, Answer]:
    world = (
        world.fenced(producer)
        if rules.fences
        else world._replace(epochs=tuple(sorted({**dict(world.epochs), producer: 1}.items())))
    )
    return world, dict(world.epochs)[producer]


def _produce(
    world: World, rules: Rules, producer: str, epoch: int, records: tuple[tuple[bytes, bytes | None], ...]
) -> tuple[World, Answer]:
    if dict(world.epochs)[producer] != epoch:
        return world, None
    offsets = tuple(range(len(world.log), len(world.log) + len(records)))
    return world._replace(log=world.log + tuple(Record(*r, producer, OPEN) for r in records)), offsets


def _offsets(world: World, rules: Rules, producer: str, epoch: int, group: str, offset: tuple[int, str]) -> tuple[World, Answer]:
    if dict(world.epochs)[producer] != epoch:
        return world, None
    return world._replace(pending=(*world.pending, (producer, (group, offset)))), True


def _commit(world: World, rules: Rules, producer: str, epoch: int) -> tuple[World, Answer]:
    if dict(world.epochs)[producer] != epoch:
        return world, None
    log = tuple(r._replace(state=DONE) if (r.producer, r.state) == (producer, OPEN) else r for r in world.log)
    moved = (group for name, group in world.pending if name == producer)
    groups = tuple(sorted({**dict(world.groups), **dict(moved)}.items()))
    pending, sent = (tuple(p for p in found if p[0] != producer) for found in (world.pending, world.sent))
    taken = (*world.taken, *(taken for name, taken in world.sent if name == producer))
    return world._replace(log=log, groups=groups, pending=pending, taken=taken, sent=sent), True


def _publish(
    world: World,
    rules: Rules,
    producer: str,
    epoch: int,
    pipeline: str,
    number: int,
    offset: int,
    key: bytes,
    value: bytes,
    group: tuple[str, tuple[int, str]],
) -> tuple[World, Answer]:
    """Write a record, the marker of its split and the offset of the group in one open transaction."""
    world, written = _produce(world, rules, producer, epoch, ((key, value),))
    if written is None:
        return world, None
    world = world._replace(pending=(*world.pending, (producer, group)))
    taken = Taken(pipeline, number, (OffsetRange(TOPIC, 0, offset, offset + 1),), 0)
    return world._replace(sent=(*world.sent, (producer, taken))), True


def _letters(world: World, rules: Rules, producer: str, epoch: int, offsets: tuple[int, ...]) -> tuple[World, Answer]:
    """Send dead letters in an open transaction."""
    if dict(world.epochs)[producer] != epoch:
        return world, None
    taken = Taken(DEAD, 0, tuple(OffsetRange(TOPIC, 0, o, o + 1) for o in offsets), 0)
    return world._replace(sent=(*world.sent, (producer, taken))), True


def _read(world: World, rules: Rules, start: int, mine: tuple[bytes, ...], patient: bool) -> tuple[World, Answer]:
    """Return the committed records up to the last stable offset. A reader that waits for later records is blocked."""
    stable = next((o for o, r in enumerate(world.log) if r.state == OPEN), len(world.log))
    hidden = frozenset(r.key for r in world.log[stable:] if r.state != GONE and r.key.startswith(mine)) if mine else frozenset()
    if hidden and patient:
        return world, BLOCKED
    seen = tuple((r.key, r.value, o) for o, r in enumerate(world.log[:stable]) if o >= start and r.state == DONE)
    return world, (seen, hidden)


def _log(world: World, rules: Rules) -> tuple[World, Answer]:
    return world, world.end


def _committed(world: World, rules: Rules, group: str) -> tuple[World, Answer]:
    return world, dict(world.groups).get(group)


def _sink_look(world: World, rules: Rules, pipeline: str) -> tuple[World, Answer]:
    return world, tuple(t for t in world.taken if t.pipeline == pipeline)


def _sink_begin(world: World, rules: Rules, pipeline: str) -> tuple[World, Answer]:
    number = dict(world.begun).get(pipeline, 0) + 1
    return world._replace(begun=tuple(sorted({**dict(world.begun), pipeline: number}.items()))), number


def _sink_commit(
    world: World,
    rules: Rules,
    pipeline: str,
    number: int,
    ranges: tuple[OffsetRange, ...],
    replay: int,
    moved: int,
    left_out: tuple[int, ...] = (),
    begun: int = 0,
) -> tuple[World, Answer]:
    """Commit a window by compare-and-set in one transaction, like sinks/postgres/attempt.py and files.py.

    :param left_out: offsets of records that are dead letters.
    :param begun: number of the attempt in the sink; 0 if the model leaves that out.
    """
    window = Window(pipeline, number, ranges, "", "", replay=replay, moved=moved)
    there = {t.number: t for t in world.taken if t.pipeline == pipeline}
    mine = there.pop(number, None)
    try:
        if mine is not None:
            refuse_other(applied(mine), window, "the sink")
            if mine.replay >= replay:
                return world, "there"
        if there and not replay:
            refuse_gap(applied(there[max(there)]), window, "the sink")
    except KafkaSparkError as error:
        return world, str(error)
    if begun and begun != dict(world.begun)[pipeline]:
        return world, "fenced"
    new = Taken(pipeline, number, ranges, replay, rules.takes_rows_first, left_out)
    return world._replace(taken=(*(t for t in world.taken if t is not mine), new)), "taken"


def _sink_rows(world: World, rules: Rules, pipeline: str, number: int) -> tuple[World, Answer]:
    taken = tuple(t._replace(has_rows=True) if t[:2] == (pipeline, number) else t for t in world.taken)
    return world._replace(taken=taken), True


def _sink_append(world: World, rules: Rules, pipeline: str, number: int, ranges: tuple[OffsetRange, ...]) -> tuple[World, Answer]:
    """Append rows to a sink without a record of windows."""
    return world._replace(taken=(*world.taken, Taken(pipeline, number, ranges, 0))), True


_STEPS: Mapping[str, Callable[..., tuple[World, Answer]]] = {
    "fence": _fence,
    "produce": _produce,
    "publish": _publish,
    "letters": _letters,
    "offsets": _offsets,
    "commit": _commit,
    "read": _read,
    "log": _log,
    "committed": _committed,
    "sink.look": _sink_look,
    "sink.begin": _sink_begin,
    "sink.commit": _sink_commit,
    "sink.rows": _sink_rows,
    "sink.append": _sink_append,
}


def applied(taken: Taken) -> Applied:
    return Applied(taken.pipeline, taken.number, taken.ranges, replay=taken.replay)


# --- who asks for steps -----------------------------------------------------------------------------------------------------


class Dead(BaseException):
    """Raised in an actor that gets no further answer, to end its run."""


@dataclass
class Asking:
    """The actor whose code is running.

    :param name: the actor's.
    :param answers: of the steps that it has taken.
    :param world: the world in which it takes further steps at once; None lets its greenlet wait for each answer instead.
    """

    name: str
    answers: Sequence[Answer] = ()
    world: World | None = None
    rules: Rules = Rules()
    asked: int = 0
    tokens: int = 0
    is_dead: bool = False

    def ask(self, *step: Any) -> Answer:
        if self.asked < len(self.answers):
            self.asked += 1
            return self.answers[self.asked - 1]
        if self.is_dead:
            raise Dead
        if self.world is None:
            return self._wait(step)
        self.world, answer = apply(self.world, step, self.rules)
        while answer is BLOCKED:
            # Alone in the world: brokers end what others have left open.
            self.world, answer = apply(timed_out(self.world), step, self.rules)
        return answer

    def _wait(self, step: tuple[Any, ...]) -> Answer:
        """Return the answer that :meth:`Actor.next` gives."""
        answer = getcurrent().parent.switch(step)
        if self.is_dead:
            raise Dead
        return answer

    def token(self, size: int) -> str:
        self.tokens += 1
        return f"{self.name}-{self.tokens}"


_now: Asking


def _ask(*step: Any) -> Answer:
    return _now.ask(*step)


def timed_out(world: World) -> World:
    """Return the world after the brokers have ended the transaction that was opened first."""
    return world.fenced(next(r.producer for r in world.log if r.state == OPEN))


@dataclass(frozen=True)
class Producer:
    """A producer of one transaction."""

    name: str
    epoch: int

    def begin_transaction(self) -> None:
        pass

    def commit_transaction(self, seconds: float) -> None:
        if not _ask("commit", self.name, self.epoch):
            raise Fenced(PIPELINE, "committing")

    def purge(self) -> None:
        pass

    def abort_transaction(self, seconds: float) -> None:
        """Do nothing: in the model, only a fence makes a transaction fail, and that has aborted it."""


def _produce_all(producer: Producer, topic: str, partition: int, records: Sequence[LedgerRecord], seconds: float) -> list[int]:
    offsets = _ask("produce", producer.name, producer.epoch, tuple((r.key, r.value) for r in records))
    if offsets is None:
        raise Fenced(PIPELINE, "writing")
    return list(offsets)


@lru_cache(100_000)
def _remembered(pipeline: str, records: tuple[LedgerRecord, ...]) -> Memory:
    return fold_records(pipeline, records)


def _fold_records(pipeline: str, records: Any, archives: Any = None) -> Memory:
    return _remembered(pipeline, tuple(records))


def _send_offsets(producer: Producer, config: Any, group_id: str, offsets: Any, seconds: float, epochs: Any = None) -> None:
    for _, offset, metadata in offsets:
        if not _ask("offsets", producer.name, producer.epoch, group_id, (offset, metadata)):
            raise Fenced(PIPELINE, "moving the group")


def _read_span(span: LedgerSpan, awaited: AwaitedRecords = ALL_RECORDS, kept: Any = None) -> Iterator[LedgerRecord]:
    seen, hidden = _ask("read", span.start, awaited.keys, False)
    if hidden:
        if awaited.on_hidden:
            awaited.on_hidden(hidden)
        seen, _ = _ask("read", span.start, awaited.keys, True)
    return (LedgerRecord(*record) for record in seen)


class Pool:
    """A pool that runs each function at once."""

    def __init__(self, size: int) -> None:
        self.map = map

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *args: Any) -> Any:
        found = work(*args)
        return SimpleNamespace(result=lambda: found)


class Hook:
    """The cluster: one topic of one partition, and the ledger's."""

    conn_id = "kafka_default"
    config: Mapping[str, Any] = {}  # noqa: RUF012
    consumers = None

    def make_consumer_config(self, **settings: Any) -> dict[str, Any]:
        return {}

    make_producer_config = make_consumer_config

    def close(self) -> None:
        pass

    def read_cluster_id(self) -> str:
        return "cluster"

    def count_brokers(self) -> int:
        return 1

    def describe_topics(self, names: Any, missing: str = "") -> dict[str, TopicDescription]:
        return {name: TopicDescription(name, f"id-{name}", (0,), 1, False) for name in names}

    def read_topic_config(self, names: Any) -> dict[str, dict[str, str]]:
        return {name: {"cleanup.policy": "compact"} for name in names}

    def create_topic(self, *settings: Any) -> bool:
        return False

    def read_size_settings(self, topics: Any) -> dict[str, int]:
        return {}

    def read_offsets_of_existing(self, partitions: Any) -> dict[TopicPartition, PartitionOffsets]:
        ends = {tp: _ask("log") if tp.topic == TOPIC else HIGH for tp in partitions}
        return {tp: PartitionOffsets(0, end, end) for tp, end in ends.items()}

    read_offsets = read_offsets_of_existing

    def read_committed_offsets(
        self, group: str, partitions: Any, stable: bool = True
    ) -> dict[TopicPartition, CommittedOffset | None]:
        found = _ask("committed", group)
        return {tp: CommittedOffset(*found) if found else None for tp in partitions}

    def read_group_state(self, group: str) -> GroupState:
        return GroupState(group, "Empty")


HOOK = Hook()


@dataclass(frozen=True)
class ModelSink(Sink):
    """A sink that takes a window whole, once, and keeps a record of it. A sink with another URI has its own record."""

    guarantee = Guarantee.EXACTLY_ONCE
    uri: str = "model://sink"

    def find_destination(self) -> Endpoint:
        return Endpoint({"sink": self.uri})

    def _key(self, pipeline: str) -> str:
        return pipeline if self.uri == ModelSink.uri else f"{pipeline} in {self.uri}"

    def validate(self, shape: Any) -> list[Any]:
        return []

    def find_replay_problems(self) -> list[Any]:
        return []

    def find_last_applied(self, pipeline: str) -> Applied | None:
        found = _ask("sink.look", self._key(pipeline))
        return applied(max(found, key=lambda t: t.number)) if found else None

    def find_applied(self, window: Window) -> Applied | None:
        for taken in _ask("sink.look", self._key(window.pipeline)):
            if taken.number == window.number:
                refuse_other(applied(taken), window, "the sink")
                return applied(taken) if taken.replay >= window.replay else None
        return None

    def begin(self, window: Any, splits: Any, shape: Any) -> Any:
        return ModelWriter(self, window, _ask("sink.begin", self._key(window.pipeline)))

    def commit(self, window: Window, left_out: tuple[int, ...] = (), begun: int = 0) -> None:
        """See :meth:`~airflow_kafka_spark.sinks.base.WindowWriter.commit`.

        :param left_out: offsets of bad records.
        :param begun: number of the attempt in the sink; 0 (default) leaves that out of the model.
        """
        facts = (self._key(window.pipeline), window.number)
        outcome = _ask("sink.commit", *facts, window.ranges, window.replay, window.moved, left_out, begun)
        if outcome == "fenced":
            raise Fenced(window.pipeline, "committing")
        if outcome not in ("taken", "there"):
            raise WindowConflict(str(window), outcome, "")
        if outcome == "taken" and not _now.rules.takes_rows_first:
            _ask("sink.rows", *facts)


@dataclass(frozen=True)
class ModelWriter(WindowWriter):
    """Commits a window with dead letters."""

    sink: ModelSink
    window: Window
    begun: int

    def __enter__(self) -> ModelWriter:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def make_split_writer(self) -> Any:
        return None

    def commit(self, results: Sequence[SplitResult]) -> Applied:
        left_out = tuple(offset for result in results for offset in result.token["bad"])
        self.sink.commit(self.window, left_out, self.begun)
        return Applied(self.window.pipeline, self.window.number, self.window.ranges, replay=self.window.replay)


class ModelOperator(KafkaToSinkOperator):
    """The real operator, except for the parts that need Spark or Airflow's servers."""

    log = logging.getLogger("tests.ledger_model")
    takes = False
    asks = False

    def find_all_problems(self, run: Any) -> list[Any]:
        return []

    def show(self, context: Any, run: Any) -> None:
        self.run_now = run

    def make_records_check(self, run: Any) -> None:
        """Return without starting Spark."""

    def refuse_lost_records(self, ledger: Any, found: Any) -> None:
        """Ask where the test wants it: no sink of the model loses a record, and each question doubles the number of orders."""
        if self.asks:
            super().refuse_lost_records(ledger, found)

    @contextmanager
    def publish_progress(self, window: Window) -> Iterator[None]:
        yield

    def open_ledger(self, run: Any) -> Any:
        ledger = super().open_ledger(run)
        if not self.takes:
            ledger.exclusive_of = lambda origin: ""
        return ledger

    def resolve(self) -> tuple[str, ...]:
        return (TOPIC,)

    def move(self, window: Window, ledger: Any) -> Report:
        # In the order of KafkaToSinkOperator.move, without what no rule depends on: the records, dead letters, other sinks.
        ledger.verify()
        self.check(window)
        ledger.verify()
        self.sink.commit(window)
        return Report(window, records_read=window.span)


class DeadLetterOperator(ModelOperator):
    """Moves a window with dead letters by the real code; only the job is replaced. Attempts may disagree which records are bad,
    as with different schemas."""

    bad: frozenset[int] = frozenset()

    def move(self, window: Window, ledger: Any) -> Report:
        return KafkaToSinkOperator.move(self, window, ledger)

    def make_dead_letter_topic(self, pipeline: str) -> DeadLetterTopic:
        return DeadLetterTopic(HOOK, DEAD, -1, SimpleNamespace(make_records=lambda letters: letters))  # type: ignore[arg-type]

    def make_job(self, window: Window, splits: Any, shape: Any, tolerance: Any, *args: Any, **kwargs: Any) -> Any:
        sent = tolerance.sent.get(TP, frozenset())
        return SimpleNamespace(run=lambda writer: [_make_result(split, self.bad | sent) for split in splits])


@lru_cache(1000)
def _make_result(split: Split, bad: frozenset[int]) -> SplitResult:
    """Return the account of a split as tasks give it. The letters that were sent before are among the letters."""
    mine = sorted(bad & set(range(split.range.start, split.range.end)))
    letters = pa.Table.from_pylist([{"topic": TOPIC, "partition": 0, "offset": o} for o in mine], SCHEMA)
    rows = split.range.span - len(mine)
    found = to_bytes(letters) if mine else b""
    return SplitResult(split.index, split.range.span, rejected=len(mine), letters=found, token={"rows": rows, "bad": mine})


class ModelSender:
    """Sends dead letters in one step."""

    def __init__(self, producer: Producer, *args: Any, **kwargs: Any) -> None:
        self.producer = producer

    def send(self, letters: pa.Table) -> None:
        self.offsets = tuple(letters["offset"].to_pylist())

    def flush(self) -> tuple[Landed, ...]:
        if not _ask("letters", self.producer.name, self.producer.epoch, self.offsets):
            raise Fenced(PIPELINE, "sending dead letters")
        return (Landed(DEAD, 0, min(self.offsets), max(self.offsets), len(self.offsets)),)


class PublishingOperator(ModelOperator):
    """Publish a window record by record: each record is a split with its own transaction, as between topics."""

    def plan(self, ledger: Any, run: Any) -> Window:
        return replace(super().plan(ledger, run), target=TargetTopic("out", "id-out", 1))

    def find_applied(self, window: Window) -> None:
        return None

    def check(self, window: Window) -> None:
        pass

    def move(self, window: Window, ledger: Any) -> Report:
        offsets = [o for r in window.ranges for o in range(r.start, r.end)]
        splits = range(len(offsets))

        def publish(left: tuple[int, ...]) -> None:
            for index in left:
                publish_one(ledger, window, index, offsets[index])

        publish_splits(ledger, window, splits, publish)
        return Report(window, records_read=window.span)


def publish_one(ledger: Any, window: Window, split: int, offset: int) -> None:
    """Fence, read and write like ``Publisher.publish``. A task that finds itself fenced ends."""
    place = ledger.ledger_claim
    name = f"{ledger.split_prefix}{split}"
    epoch = _ask("fence", name)
    claimed = ClaimedWindow(place)
    awaited = AwaitedRecords((make_window_key(window.pipeline, window.number),))
    claimed.read_on(lambda start: _read_span(LedgerSpan({}, TP, start, HIGH), awaited), HIGH)
    publisher = SimpleNamespace(ledger=place, _read_memory=claimed.fold_memory, _format_step=str)
    if Publisher.find_marker(publisher, split) is not None:  # type: ignore[arg-type]
        return
    marker = Marker(window.number, split, (Landed("out", 0, offset, offset, 1),), 1)
    record = make_marker_record(window.pipeline, marker)
    # There is one partition, so that its offset is moved by the close. Of the offset that a split commits, the hint counts here.
    group = ledger.group_id, (window.ranges[0].start, make_offset_metadata(window, TOPIC, ledger.claim_hint))
    if not _ask("publish", name, epoch, window.pipeline, window.number, offset, record.key, record.value, group):
        raise Fenced(PIPELINE, "publishing")
    if not _ask("commit", name, epoch):
        raise Fenced(PIPELINE, "publishing")


class FixedBoundaries:
    """Boundaries in which instants stand for offsets: each hour has two."""

    def __init__(self, *args: Any) -> None:
        pass

    def decide(self, topics: Any, instants: Any, read_log: Any, **options: Any) -> dict[str, dict[int, Boundary]]:
        found = {i: Boundary(TOPIC, f"id-{TOPIC}", i, {0: 2 * i // HOUR}) for i in instants}
        return {topic: found for topic in topics}


def attempt(
    run_id: str,
    *,
    hour: int | None = None,
    length: int = 1,
    beside: bool = False,
    max_tries: int = 0,
    on_rerun: str | None = "skip",
    pipeline: str = PIPELINE,
    group: str = GROUP,
    takes: bool = False,
    uri: str = "model://sink",
    publishes: bool = False,
    asks: bool = False,
    keep_windows: int = 100,
    bad: Sequence[int] | None = None,
) -> None:
    """One attempt of a task, from beginning to end.

    :param hour: the data interval of its run, as an hour of the epoch; None moves what is new.
    :param length: of the interval, in hours.
    :param beside: the pipeline has intervals, too.
    :param group: the consumer group.
    :param takes: who uses the group is recorded, and checked; False leaves that out of the model.
    :param uri: of the sink.
    :param publishes: the window is published split by split.
    :param asks: the sink is asked whether it has the latest complete interval.
    :param keep_windows: number of windows that the ledger keeps.
    :param bad: offsets of records that become dead letters; None (default) leaves dead letters out of the model.
    """
    found_bad = None if bad is None else frozenset(bad)
    key = (beside or hour is not None, on_rerun, pipeline, group, takes, uri, publishes, asks, keep_windows, found_bad)
    if key not in _OPERATORS:
        window = {"window": "interval", "on_missing_interval": "progress", "grace": 0} if key[0] else {}
        errors = {} if found_bad is None else {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": DEAD}
        made = (PublishingOperator if publishes else ModelOperator if found_bad is None else DeadLetterOperator)(
            task_id="task", topics=TOPIC, group_id=group, pipeline=pipeline, value=String(), sink=ModelSink(uri),
            on_rerun=on_rerun, ledger_topic=LEDGER, keep_windows=keep_windows, **window, **errors,
        )  # fmt: skip
        made.__dict__["kafka"] = HOOK
        made.takes, made.asks = takes, asks
        if isinstance(made, DeadLetterOperator) and found_bad is not None:
            made.bad = found_bad
        _OPERATORS[key] = made
    start, end = (to_instant(hour * HOUR), to_instant((hour + length) * HOUR)) if hour is not None else (None, None)
    ti = SimpleNamespace(dag_id="dag", run_id=run_id, task_id="task", map_index=-1, max_tries=max_tries)
    dag_run = SimpleNamespace(data_interval_start=start, data_interval_end=end)
    # Runs of actors take turns, and an operator keeps what it reports.
    copy(_OPERATORS[key]).execute({"ti": ti, "dag_run": dag_run, "outlet_events": defaultdict(SimpleNamespace)})


_OPERATORS: dict[Any, ModelOperator] = {}


@contextmanager
def modelled(*more: Any) -> Iterator[None]:
    """Replace the calls that leave the process; ``more`` are further patches."""
    frozen = "2026-01-01T00:00:00.000Z"

    def fencing_producer(config: Any, name: str, *args: Any) -> Producer:
        return Producer(name, _ask("fence", name))

    patches = [
        patch.object(ledger, "make_fencing_producer", fencing_producer),
        patch.object(ledger, "produce_all", _produce_all),
        patch.object(ledger, "send_offsets", _send_offsets),
        patch.object(ledger, "ThreadPoolExecutor", Pool),
        patch.object(ledger, "secrets", SimpleNamespace(token_hex=lambda size: _now.token(size))),
        patch.object(ledger_topic, "read_span", _read_span),
        patch.object(ledger_topic, "fold_records", _fold_records),
        patch.object(boundaries_hook, "Boundaries", FixedBoundaries),
        patch.object(sending, "Sender", ModelSender),
        # Records of one partition stand for partitions.
        patch.object(position, "count_splits", lambda window: window.span),
        patch.object(base, "emit", lambda report: None),
        # The clock of the model stands still.
        patch.object(kafka_to_sink, "get_current_milliseconds", lambda: 0),
        patch.object(base.Stopwatch, "stop", lambda watch: {}),
        patch.object(binding, "get_deployment", lambda: ""),
        *(patch.object(m, "format_utc_now", lambda: frozen) for m in (ledger, control_base)),
        # Who loses against somebody else tries again; twice shows what happens then.
        # Nobody is at work meanwhile.
        *(patch.object(m, "wait_for_others", lambda again: None) for m in (ledger, interval_ledger, control_base)),
        *(patch.object(m, name, 2) for m, name in ((base, "PLAN_TRIES"), (control_base, "TRIES"))),
        patch.object(control_base, "_find_user", lambda: "somebody"),
        *more,
    ]
    for p in patches:
        p.start()
    try:
        yield
    finally:
        for p in reversed(patches):
            p.stop()


Act = Callable[[], object]


def run_alone(world: World, act: Act, name: str, rules: Rules = Rules()) -> World:  # noqa: B008
    """Run an actor without interruptions, and return the world afterwards."""
    global _now
    _now = Asking(name, world=world, rules=rules)
    act()
    assert _now.world is not None
    return _now.world


def stopped(world: World, act: Act, name: str, kind: str, times: int = 1) -> World:
    """Return the world after an actor has died right after a step of this kind.

    :param times: the number of such steps that it takes. Default: 1.
    """
    global _now
    _now = _Stopping(name, world=world, last=kind, left=times)
    with suppress(Dead):
        act()
    assert _now.world is not None
    return _now.world


@dataclass
class _Stopping(Asking):
    last: str = ""
    left: int = 1

    def ask(self, *step: Any) -> Answer:
        answer = super().ask(*step)
        self.left -= step[0] == self.last
        if not self.left:
            raise Dead
        return answer


# --- every order ------------------------------------------------------------------------------------------------------------


@dataclass
class Actor:
    """An actor, and its next step after each history.

    :ivar steps: the step that comes after a history; None if the actor has ended.
    :ivar waiting: the run that waits for its next answer after a history.
    """

    name: str
    act: Act
    parents: list[tuple[History, Answer]] = field(default_factory=lambda: [(-1, None)])
    children: dict[tuple[History, Answer], History] = field(default_factory=dict)
    steps: dict[History, tuple[Any, ...] | None] = field(default_factory=dict)
    waiting: dict[History, tuple[greenlet, Asking]] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)

    def next(self, history: History, rules: Rules) -> tuple[Any, ...] | None:
        """Return the actor's next step; None if it has ended."""
        global _now
        if history not in self.steps:
            parent, answer = self.parents[history]
            if parent in self.waiting:
                run, _now = self.waiting.pop(parent)
                step = run.switch(answer)
            else:
                run, _now = greenlet(self._run), Asking(self.name, self._answers(history), rules=rules)
                step = run.switch()
            if step is not None:
                self.waiting[history] = run, _now
            self.steps[history] = step
        return self.steps[history]

    def end(self) -> None:
        """End the runs that wait for an answer."""
        global _now
        for run, _now in self.waiting.values():
            _now.is_dead = True
            run.switch()
        self.waiting.clear()

    def _run(self) -> None:
        try:
            self.act()
            self.ends["done"] += 1
        except (KafkaSparkError, AirflowSkipException) as error:
            self.ends[type(error).__name__] += 1
        except Dead:
            pass

    def _answers(self, history: History) -> list[Answer]:
        answers = []
        while history:
            history, answer = self.parents[history]
            answers.append(answer)
        return answers[::-1]

    def after(self, history: History, answer: Answer) -> History:
        key = (history, answer)
        if key not in self.children:
            self.children[key] = len(self.parents)
            self.parents.append(key)
        return self.children[key]


@dataclass(frozen=True)
class Explored:
    """The result of a search.

    :param states: the number of different states.
    :param worlds: the number of different worlds; a fresh attempt was made after each.
    :param ends: per actor, how its runs ended.
    """

    states: int
    worlds: int
    ends: Mapping[str, Mapping[str, int]]


class _Worlds:
    """All worlds by number, and the result of each step on each world. Each result is computed once, even if many orders lead to
    it.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.all: list[World] = []
        self.plain: set[World] = set()
        self._numbers: dict[World, int] = {}
        self._steps: dict[tuple[Any, ...], int] = {}
        self._done: dict[tuple[int, int], tuple[int, Answer]] = {}

    def number(self, world: World) -> int:
        if world not in self._numbers:
            self._numbers[world] = len(self.all)
            self.all.append(world)
        return self._numbers[world]

    def is_new(self, world: int) -> bool:
        """Return True if this state was not seen before. The number of times that an id was fenced is not compared: it affects no
        later step.
        """
        plain = self.all[world]._replace(epochs=())
        known = plain in self.plain
        self.plain.add(plain)
        return not known

    def apply(self, world: int, step: tuple[Any, ...]) -> tuple[int, Answer]:
        key = (world, self._steps.setdefault(step, len(self._steps)))
        if key not in self._done:
            then, answer = apply(self.all[world], step, self.rules)
            self._done[key] = self.number(then), answer
        return self._done[key]


def explore(
    world: World,
    actors: Mapping[str, Act],
    finish: Sequence[Act],
    *,
    records: int = 1,
    timeouts: int = 1,
    switches: int = UNLIMITED,
    at_once: Eager = is_eager,
    rules: Rules = Rules(),  # noqa: B008
    check: Callable[[World], None] | None = None,
    always: Callable[[World], None] | None = None,
) -> Explored:
    """Every order of the actors' steps.

    :param world: how it begins.
    :param finish: what is done at last, one after the other and by nobody disturbed, after each step.
    :param records: how many records are written to the topic meanwhile.
    :param timeouts: how often the brokers end a transaction that somebody waits for. Who waits beyond that gets no further.
    :param switches: how often another actor goes on than the one before. Default: as often as it can be.
    :param at_once: returns True for a step that is taken at once with the one before, as it cannot meet other actors.
    :param check: a further condition for the world in which everything is finished.
    :param always: a condition for each world, in place of those of one pipeline (:func:`each_once`).
    :raises Violation: the promise is broken, with the steps that led there.
    """
    worlds = _Worlds(rules)
    came_from: dict[Any, tuple[Any, Any]] = {}
    with _running(actors) as everyone:
        begin = (worlds.number(world), (0,) * len(everyone), (records, timeouts, -1, switches))
        pending = [_settled(begin, everyone, worlds, at_once)]
        seen = {pending[0]}
        while pending:
            state = pending.pop()
            now, histories, (left, patience, last, turns) = state
            if worlds.is_new(now):
                trail = partial(_trail, state, came_from)
                _check_always(worlds.all[now], always or each_once, trail)
                _finish(worlds.all[now], finish, rules, check, always, trail)
            following: list[tuple[Any, Any]] = []
            if left:
                more = worlds.all[now]._replace(end=worlds.all[now].end + 1)
                following.append(("a record is written", (worlds.number(more), histories, (left - 1, patience, last, turns))))
            for index, actor in enumerate(everyone):
                step = actor.next(histories[index], rules)
                is_switch = turns != UNLIMITED and index != last
                if step is None or (is_switch and turns == 0):
                    continue
                then, answer = worlds.apply(now, step)
                if answer is BLOCKED:
                    if patience:
                        ended = worlds.number(timed_out(worlds.all[now]))
                        limits = (left, patience - 1, last, turns)
                        following.append((f"the brokers end what {actor.name} waits for", (ended, histories, limits)))
                    continue
                moved = (*histories[:index], actor.after(histories[index], answer), *histories[index + 1 :])
                limits = (left, patience, index if turns != UNLIMITED else last, turns - is_switch)
                following.append(((actor.name, step), (then, moved, limits)))
            for label, new in following:
                new = _settled(new, everyone, worlds, at_once)
                if new not in seen:
                    seen.add(new)
                    came_from[new] = (state, label)
                    pending.append(new)
        return Explored(len(seen), len(worlds.plain), {actor.name: dict(actor.ends) for actor in everyone})


@contextmanager
def _running(actors: Mapping[str, Act]) -> Iterator[list[Actor]]:
    """Yield the actors. At the end, none of their runs waits any longer."""
    everyone = [Actor(name, act) for name, act in actors.items()]
    try:
        yield everyone
    finally:
        for actor in everyone:
            actor.end()


def _settled(state: Any, everyone: Sequence[Actor], worlds: _Worlds, at_once: Eager) -> Any:
    """Return the state after all steps that are taken together with the one before."""
    world, histories, left = state
    found = []
    for actor, history in zip(everyone, histories, strict=True):
        while (step := actor.next(history, worlds.rules)) is not None and at_once(actor.name, step):
            then, answer = worlds.apply(world, step)
            if answer is BLOCKED:
                break
            world = then
            history = actor.after(history, answer)
        found.append(history)
    return world, tuple(found), left


def _check_always(world: World, always: Callable[[World], None], trail: Callable[[], str]) -> None:
    try:
        always(world)
    except AssertionError as error:
        raise Violation(f"{error}\n{trail()}") from error


def each_once(world: World, hints: bool = True) -> None:
    """Assert that no offset is in the sink twice, and that no offset before a group's offset is missing.

    :param hints: False leaves out :func:`hints_hide_nothing`.
    """
    doubled = {offset: times for offset, times in world.moved.items() if times > 1}
    assert not doubled, f"doubled: {doubled}"
    for name, (offset, _) in world.groups:
        missing = [o for o in range(offset) if o not in world.moved and o not in given_up(world)]
        assert not missing, f"group {name} is at {offset}, and {missing} are not in the sink"
    if hints:
        hints_hide_nothing(world)


def hints_hide_nothing(world: World) -> None:
    """Assert that a reader who begins at the hint of a group sees all records that an attempt needs."""
    for group, (_, metadata) in world.groups:
        pipeline = json.loads(metadata)["pipeline"]
        if (hint := Hint.from_metadata(metadata, pipeline)) is None:
            continue
        everything = _remembered(pipeline, tuple(world.committed))
        seen = _remembered(pipeline, tuple(record for record in world.committed if record.offset >= hint.offset))
        for what in ("position", "last_used", "published", "open_entry", "markers", "pause", "binding"):
            found, expected = getattr(seen, what), getattr(everything, what)
            assert found == expected, f"from the hint of group {group}, {what} is {found}, and it is {expected}"


def given_up(world: World) -> set[int]:
    """Return the offsets that a user has asked to skip."""
    changes = world.memory().changes.values()
    return {o for c in changes for tp, end in c.after.items() for o in range(c.before.get(tp, 0), end)}


def _finish(world: World, finish: Sequence[Act], rules: Rules, check: Any, always: Any, trail: Callable[[], str]) -> None:
    try:
        for number, act in enumerate(finish):
            world = run_alone(world, act, f"last-{number}", rules)
    except (KafkaSparkError, AirflowSkipException) as error:
        raise Violation(f"it cannot be finished: {type(error).__name__}: {error}\n{trail()}") from error
    _check_always(world, always or each_once, trail)
    missing = [o for o in range(world.end) if o not in world.moved and o not in given_up(world)]
    if missing:
        raise Violation(f"never moved: {missing}\n{trail()}")
    if check:
        check(world)


def _describe_step(what: str | tuple[str, tuple[Any, ...]]) -> str:
    if isinstance(what, str):
        return what
    name, (kind, *args) = what
    if kind == "produce":
        return f"{name}: produce as {args[0]} {[k.decode() + ('' if v else ' gone') for k, v in args[2]]}"
    return f"{name}: " + " ".join(str(a) for a in (kind, *args) if not isinstance(a, tuple))


def _trail(state: Any, came_from: Mapping[Any, tuple[Any, Any]]) -> str:
    lines = []
    while state in came_from:
        state, what = came_from[state]
        lines.append(_describe_step(what))
    return "\n".join(reversed(lines))
