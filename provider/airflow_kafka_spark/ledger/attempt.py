"""The ledger: a pipeline's state and its fence, in one compacted Kafka topic.

An attempt opens its pipeline's ledger in three steps. No other order is safe:

1. **fence**: ``init_transactions()`` on the pipeline's transactional ids. From now on no earlier attempt can write.
2. **read**: read the ledger to its end. It contains everything that earlier attempts have written, and nothing will be added.
3. **write**: write the plan, and later the close.

Every producer is used for ONE transaction: librdkafka has no KIP-890, so a late ``EndTxn`` of one transaction could end the next
one of the same producer. An attempt therefore fences two transactional ids, one to plan and one to close. After any error or
timeout the ledger is read again: the exception alone does not show whether a transaction was committed.
"""

from __future__ import annotations

import json
import logging
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import (
    Fenced,
    GroupHasMembers,
    GroupOwned,
    KafkaRefused,
    KafkaSparkError,
    KafkaUnavailable,
    PlanError,
    PlannedMeanwhile,
    RightMissing,
    WindowTooWide,
)
from airflow_kafka_spark.hooks.kafka.client import ClientEvents, KafkaUser, Right, find_missing_right
from airflow_kafka_spark.hooks.kafka.transactions import (
    abort,
    describe_producer_error,
    find_fatal_error,
    find_timeout_refusal,
    is_fenced,
    make_fencing_producer,
    produce_all,
    send_offsets,
)
from airflow_kafka_spark.ledger.group import make_offset_metadata, make_planned_metadata
from airflow_kafka_spark.ledger.topic import (
    OWNER,
    SMALL_RECORD_BYTES,
    TOPIC,
    WAIT_FOR_NONE,
    Hint,
    LedgerClaim,
    LedgerTopic,
    make_transactional_id,
    make_unreadable_error,
)
from airflow_kafka_spark.windows.binding import Binding, Endpoint
from airflow_kafka_spark.windows.dead_letters import DeadLetters
from airflow_kafka_spark.windows.interval import find_sharing_intervals
from airflow_kafka_spark.windows.memory import (
    BINDING,
    CONTROL,
    Attempt,
    LedgerRecord,
    Memory,
    NewerVersion,
    WindowEntry,
    make_binding_record,
    make_control_prefix,
    make_dead_letters_key,
    make_group_key,
    make_group_record,
    make_key_prefix,
    make_marker_key,
    make_position_record,
    make_window_key,
    make_window_record,
    parse_group_owner,
    parse_landed,
)
from airflow_kafka_spark.windows.model import Marker, SourcePlan, State, TopicPartition, Tries, Window, add_landed, record_tries
from airflow_kafka_spark.windows.plan import find_next_position
from airflow_kafka_spark.windows.report import make_widest_report

if TYPE_CHECKING:
    from confluent_kafka import KafkaException, Producer

    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.hooks.kafka.requests import PartitionOffsets

log = logging.getLogger(__name__)

TRANSACTION_SECONDS = 30
"""Timeout in seconds of each step of a transaction."""
COMPACT = {"compression.type": "zstd", "message.max.bytes": 256 << 20, "batch.size": 64 << 10}
"""Settings of producers that write the ledger. Records with thousands of partitions are large, but compress well. Brokers limit
the compressed size of a batch, clients the uncompressed size of a record. A large record is a batch of its own."""
CODECS = {"gzip": "gzip", "lz4": "lz4_raw", "snappy": "snappy", "uncompressed": None}
"""Arrow's names of the codecs that a topic's ``compression.type`` may set; other values keep the producer's codec."""
CLOSE_TRIES = 3
"""Maximum number of tries to write the close of a window."""
FENCE_THREADS = 8
"""Maximum number of transactional ids that are fenced concurrently."""
SPLIT = "split."
"""Prefix of a split's purpose in its transactional id, before the index of the split."""
TAKE_TRIES = 10
"""Maximum number of tries to record who uses a group or a slot. A try fails only if another attempt has tried concurrently."""
MAX_DEAD_LETTER_BYTES = 900_000
"""Maximum size in bytes of the ledger's record of a window's dead letters."""
KEEP_WINDOWS = 100
"""Default number of windows that the ledger keeps for each pipeline."""


L = TypeVar("L", bound="Ledger")


class Ledger:
    """One attempt of one pipeline at its ledger. A context manager: entering it fences earlier attempts and reads the ledger;
    leaving it drops the producers.

    Guarantee: while this attempt is the newest, no other attempt writes to the pipeline's ledger or moves its group's offsets
    through it. As soon as a newer attempt has fenced, the broker refuses the writes of this one (KIP-98).

    :param hook: the cluster.
    :param pipeline: the pipeline's name.
    :param run: the run that this attempt belongs to.
    :param group_id: the consumer group whose offsets mirror the position; None for a pipeline without a group.
    :param topic: name of the ledger topic.
    :param keep_windows: number of windows that are kept; older ones are tombstoned.
    :param replication_factor: replication factor of the ledger topic if it has to be created; -1 is the brokers' default.
    :param hint_topics: topics whose committed offsets may contain a :class:`Hint`.
    :param tries: Airflow's counters of the run's task, stored with the window.
    :param beside_intervals: True if data intervals of this pipeline may be planned concurrently.
    """

    def __init__(
        self,
        hook: KafkaHook,
        pipeline: str,
        run: str,
        *,
        group_id: str | None = None,
        topic: str = TOPIC,
        keep_windows: int = KEEP_WINDOWS,
        replication_factor: int = -1,
        hint_topics: Sequence[str] = (),
        tries: Tries = Tries(),  # noqa: B008 - a frozen value
        beside_intervals: bool = False,
    ) -> None:
        self.hook = hook
        self.pipeline = self.parent_pipeline = pipeline
        self.run = run
        self.group_id = group_id
        self.topic = LedgerTopic(hook, topic, replication_factor)
        self.keep_windows = keep_windows
        self.hint_topics = tuple(hint_topics)
        self.tries = tries
        self.beside_intervals = beside_intervals
        self.memory = Memory(pipeline)
        self.hint: Hint | None = None
        self._partition = 0
        self.plan_offsets: Mapping[TopicPartition, int] = {}
        """Offsets of the group to commit with the plan of a source's window. Their metadata name the window."""
        self.exclusive_of: Callable[[Endpoint], str] = lambda origin: origin.details.get("group", "")
        """Returns the name of what only one pipeline may use, from a pipeline's origin: its consumer group (default), or a
        replication slot. Empty: any number of pipelines may use it."""
        self.owned: Callable[[str, str], PlanError] = partial(GroupOwned, self.parent_pipeline)
        """Returns the error if another pipeline uses the group or the slot. Called with its name and the other pipeline."""
        self._bound_before: Binding | None = None
        self._entry: WindowEntry | None = None
        self._bound: Binding | None = None
        self._events = ClientEvents()
        self._planner: Producer | None = None
        self._closer: Producer | None = None

    # --- fence, then read ---

    def peek(self) -> None:
        """Read the ledger without fencing and without waiting, so that records in open transactions are missing. The result may
        be used to decide that there is nothing to do, not to write. If the pipeline seems paused, the ledger is read again, and
        open transactions that may contain the end of the pause are awaited."""
        if not self.topic.find_existing():
            return
        self._peek()
        if self.parent_memory.is_paused:
            self.peek_controls()

    def peek_controls(self) -> None:
        """Read the ledger without fencing, and await open transactions that may contain control requests, as a ``rebind``."""
        self._peek((make_control_prefix(self.parent_pipeline),))

    def _peek(self, wait_for: tuple[bytes, ...] = WAIT_FOR_NONE) -> None:
        """Read the ledger without fencing.

        :param wait_for: prefixes of keys. If an open transaction may contain records with such keys, its end is awaited. Default:
            none.
        """
        topic = self.topic
        self.hint = self._find_hint()
        self.memory = Memory(self.pipeline)
        if self.hint and self.hint.topic_id == topic.topic_id and self.hint.partition in topic.partitions:
            self.memory = topic.read_partition(self.pipeline, self.hint.partition, self.hint.offset, wait_for=wait_for).memory
        if not self.memory.exists:
            found = topic.read_without_waiting(self.pipeline, wait_for)
            self.memory = found.memory

    @property
    def parent_memory(self) -> Memory:
        """The state of the whole pipeline in the ledger: pauses, requested replays, binding. A data interval returns that of its
        pipeline."""
        return self.memory

    def __enter__(self: L) -> L:
        self.topic.ensure()
        self._fence_and_read()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._planner = self._closer = None

    def _fence_and_read(self) -> Memory:
        """Fence both ids, then read the ledger. If only one were fenced, a transaction of the other could still be written."""
        self._events = ClientEvents(self.hook.config.get("error_cb"))
        self._fence_both()
        self.hint = self.hint or self._find_hint()
        return self.read()

    def _fence_both(self) -> None:
        with ThreadPoolExecutor(2) as pool:
            planner, closer = pool.submit(self._fence, "plan"), pool.submit(self._fence, "close")
            self._planner, self._closer = planner.result(), closer.result()

    def _fence(self, purpose: str, *, compact: bool = True, **settings: str | int) -> Producer:
        return self._fence_as(make_transactional_id(self.topic.name, self.pipeline, purpose), compact=compact, **settings)

    def _fence_as(self, transactional_id: str, *, compact: bool = True, **settings: str | int) -> Producer:
        from confluent_kafka import KafkaException

        config = self.hook.make_producer_config(
            **{
                "transaction.timeout.ms": TRANSACTION_SECONDS * 1000,
                "message.timeout.ms": TRANSACTION_SECONDS * 1000,
                "linger.ms": 0,
                **(COMPACT if compact else {}),
                **settings,
            }
        )
        try:
            return make_fencing_producer(config, transactional_id, TRANSACTION_SECONDS, self._events)
        except (KafkaException, RightMissing) as error:
            doing, seconds = "fencing earlier attempts", int(config["transaction.timeout.ms"]) / 1000
            refused = find_timeout_refusal(error, self.hook.conn_id, doing, seconds)
            raise refused or self.translate(error, doing) from None

    def fence_splits(self, count: int) -> None:
        """Fence the tasks of earlier attempts that may still publish a split of this pipeline; the brokers abort their open
        transactions.

        Call it after :meth:`plan` or :meth:`reopen`: a task of an earlier attempt that starts later reads that claim, and stops.

        :param count: number of splits of the window.
        """
        with ThreadPoolExecutor(min(count, FENCE_THREADS)) as pool:
            # list() raises the error of any of them here.
            list(pool.map(self._fence_split, range(count)))

    def _fence_split(self, index: int) -> None:
        self._fence(f"{SPLIT}{index}")

    def fence_dead_letters(self, **settings: str | int) -> Producer:
        """Return a producer for dead letters, and fence attempts that may still send some for this pipeline; their open
        transactions are aborted. Read the ledger before anything is sent with the producer.

        :param settings: further settings of the producer.
        """
        return self._fence("dead", compact=False, **settings)

    def fence_controls(self) -> None:
        """Fence commands that may still write a control request of this pipeline, and end their transactions. Such a command then
        tries again, and reads the claim of this attempt. Read the ledger afterwards."""
        self._fence_as(make_transactional_id(self.topic.name, self.parent_pipeline, CONTROL))

    def _find_hint(self) -> Hint | None:
        """Return the hint that the last close left in the metadata of the group's committed offsets."""
        if not self.group_id or not self.hint_topics:
            return None
        described = self.hook.describe_topics(self.hint_topics, missing="omit")
        partitions = [tp for topic in described.values() for tp in topic.topic_partitions]
        # Not stable: an open transaction of a dead attempt would be awaited, and it is fenced only after the ledger is read.
        committed = self.hook.read_committed_offsets(self.group_id, partitions, stable=False)
        hints = (Hint.from_metadata(offset.metadata, self.pipeline) for offset in committed.values() if offset)
        return next(filter(None, hints), None)

    def read(self) -> Memory:
        """Read the ledger, and return the present state of this pipeline."""
        found = self.topic.read(self.pipeline, self.hint, self._end_hidden_splits)
        self.memory, self._partition = found.memory, found.partition
        return self.memory

    def _end_hidden_splits(self, keys: frozenset[bytes]) -> None:
        """Fence the ids under which a dead attempt has left records in an open transaction. This aborts the transaction, so that
        no reader waits for its timeout."""
        for key in sorted(keys):
            kind, *number = json.loads(key)[1:]
            if kind == "split":
                self._fence_split(number[-1])
            elif kind == "dead":
                self.fence_dead_letters()
            elif kind in (CONTROL, BINDING):
                self._fence_as(make_transactional_id(self.topic.name, self.parent_pipeline, kind))

    def find_completed(self, run: str) -> WindowEntry | None:
        """Return the COMPLETE window of this run; None if the ledger holds no such window."""
        return self.memory.find_completed_by(run)

    # --- write ---

    def bind(self, decide: Callable[[Memory], Binding]) -> Binding:
        """Return the binding of the pipeline for the next window that is planned or reopened. It is written with the plan.

        :param decide: returns the binding from the state of the whole pipeline; raises an error if another one is in force.
        """
        self._bound_before = self.memory.binding
        self._bound = self._with_ownership(decide(self.memory))
        return self._bound

    def _with_ownership(self, binding: Binding) -> Binding:
        """Return a binding with ``owns`` of the pipeline's present one, if both have the same group or slot."""
        return replace(binding, owns=self._owns(self._get_exclusive_object(binding), self.parent_memory.binding))

    def _owns(self, name: str, binding: Binding | None) -> bool:
        """Return True if a binding says that the pipeline has recorded its use of a group or a slot."""
        return binding is not None and binding.owns and self._get_exclusive_object(binding) == name

    @property
    def bound(self) -> Binding | None:
        """The binding of the window that is being planned; None before :meth:`bind`."""
        return self._bound

    def refuse_taken(self) -> None:
        """Refuse a group or a slot of the next window that another pipeline uses.

        :raises GroupOwned, SourceOwned: another pipeline uses it.
        """
        name = self._get_exclusive_object(self._bound)
        if name and not self._owns(name, self._bound) and (owner := self.find_other_owner(name)) is not None:
            raise self.owned(name, owner)

    def find_other_owner(self, name: str) -> str | None:
        """Return another pipeline that uses a group or a slot; None without one, or if it was forgotten, or if it has another
        group or slot by now.

        :param name: of the group or the slot.
        """
        return self._find_other_owner(self._read_recorded_owner(name), name)

    def _find_other_owner(self, owner: str | None, name: str) -> str | None:
        """Return another pipeline that uses a group or a slot.

        :param owner: the recorded one; None without one.
        :param name: of the group or the slot.
        """
        while owner is not None and owner != self.parent_pipeline:
            # Its records are committed before the one that names it, but an open transaction before them may hide them.
            there = self.topic.read_without_waiting(owner, (make_key_prefix(owner),)).memory
            if (renamed := there.renamed_to) is not None:
                owner = renamed.name
                continue
            is_gone = there.is_blank and not there.intervals
            is_elsewhere = there.binding is not None and self.exclusive_of(there.binding.origin) != name
            return None if is_gone or is_elsewhere else owner
        return None

    def _read_recorded_owner(self, name: str) -> str | None:
        """Return the pipeline that has recorded that it uses a group or a slot; None if there is none."""
        topic, key = self.topic, make_group_key(name)

        def read(partition: int, bounds: PartitionOffsets) -> LedgerRecord | None:
            records = topic.read_newest(partition, 0, (key,), (key,), bounds=bounds)
            return next((record for record in records if record.key == key and record.value is not None), None)

        record = topic.find(name, read, lambda found: found is not None)
        try:
            return parse_group_owner(record) if record is not None else None
        except NewerVersion as error:
            raise make_unreadable_error(topic.name, f"group `{name}` has {error}", "records") from None

    def _get_exclusive_object(self, binding: Binding | None) -> str:
        return self.exclusive_of(binding.origin) if binding is not None else self.group_id or ""

    def _take(self, name: str) -> str | None:
        """Record that this pipeline uses a group or a slot, unless another one does, or unless its binding says so already.

        Two pipelines that do so at once fence each other: the later one reads what the earlier one has written. Call it after the
        claim, so that a pipeline that finds the record finds the window of this one, too; and before anything is moved.

        :param name: of the group or the slot; empty for none.
        :return: the other pipeline that uses it; None if this one does now.
        """
        if not name or self._owns(name, self._bound or self.parent_memory.binding):
            return None
        failure: KafkaSparkError | None = None
        for again in range(TAKE_TRIES):
            wait_for_others(again)
            producer = self._fence_as(make_transactional_id(self.topic.name, name, OWNER))
            recorded = self._read_recorded_owner(name)
            if (owner := self._find_other_owner(recorded, name)) is not None:
                return owner
            # Another attempt of this pipeline may have recorded it, or this one, if the outcome of its commit was unknown.
            if recorded == self.parent_pipeline or (failure := self._record_owner(producer, name)) is None:
                self._remember_ownership(name)
                return None
        assert failure is not None
        raise failure

    def _record_owner(self, producer: Producer, name: str) -> KafkaSparkError | None:
        """Write that this pipeline uses a group or a slot. Return the error if that failed, or if its outcome is unknown."""
        try:
            producer.begin_transaction()
            record = make_group_record(name, self.parent_pipeline)
            produce_all(producer, self.topic.name, self.topic.find_partition(name), [record], TRANSACTION_SECONDS)
            producer.commit_transaction(TRANSACTION_SECONDS)
        except Exception as error:
            failure = self.translate(error, f"recording who uses `{name}`", producer=producer)
            if isinstance(failure, RightMissing):
                raise failure from error
            return failure
        return None

    def _remember_ownership(self, name: str) -> None:
        """Let the binding say that the pipeline has recorded its group or slot. It is written when the window is closed."""
        binding = self._bound or self.memory.binding
        if binding is not None and self._get_exclusive_object(binding) == name:
            self._bound = replace(binding, owns=True)

    def plan(self, window: Window) -> WindowEntry:
        """Write the plan of a window. Once this returns, every later attempt reads this plan and no other.

        :raises Fenced: a newer attempt has taken over.
        :raises PlannedMeanwhile: a data interval with some of these offsets was planned first; the window is withdrawn.
        :raises WindowTooWide: its COMPLETE record would be too large for the ledger topic; nothing was written.
        :raises GroupOwned, SourceOwned: another pipeline has begun to use the group or the slot at the same moment; the window is
            withdrawn.
        """
        self.refuse_too_wide(window)
        entry = self._claim(WindowEntry(window, State.PLANNED, self._make_attempt(1)))
        faults.reached("plan.written")
        if self.beside_intervals or self.memory.intervals:
            # After the claim: intervals that are planned later read this window, and those planned earlier are read here.
            self.read()
            self._withdraw_if_overlapping(entry)
        name = self._get_exclusive_object(self._bound)
        if (owner := self._take(name)) is not None:
            self._withdraw()
            raise self.owned(name, owner)
        return entry

    def refuse_too_wide(self, window: Window) -> None:
        """Refuse a window whose close could not be written after the sink has committed. The records of a close grow with the
        window's partitions; the COMPLETE record is the largest of them.

        :raises WindowTooWide: the COMPLETE record would be too large for the ledger topic.
        """
        from airflow_kafka_spark.hooks.kafka.hook import DEFAULT_LARGEST

        report = make_widest_report(window, self.group_id or "").to_dict()
        value = make_window_record(WindowEntry(window, State.COMPLETE, self._make_attempt(1), report)).value or b""
        if len(value) <= SMALL_RECORD_BYTES:
            return
        try:
            settings = self.hook.read_topic_config([self.topic.name])[self.topic.name]
        except KafkaRefused:
            settings = {}
        largest = int(settings.get("max.message.bytes") or DEFAULT_LARGEST)
        size = _estimate_compressed_size(value, settings.get("compression.type", ""))
        if size > largest:
            raise WindowTooWide(str(window), len(window.ranges), self.topic.name, size, largest)

    def reopen(self, entry: WindowEntry) -> WindowEntry:
        """Take over a window that an earlier attempt planned and did not complete.

        :raises PlannedMeanwhile: as for :meth:`plan`; the earlier attempt died before this check.
        :raises GroupOwned, SourceOwned: another pipeline uses the group or the slot; the window stays open.
        """
        self._withdraw_if_overlapping(entry)
        name = self._get_exclusive_object(entry.window.binding)
        entry = self._claim(replace(entry, attempt=self._make_attempt(entry.attempt.number + 1)))
        # The earlier attempt may have died before it recorded the use of the group or slot.
        if (owner := self._take(name)) is not None:
            raise self.owned(name, owner)
        return entry

    def _withdraw_if_overlapping(self, entry: WindowEntry) -> None:
        """Withdraw a window if a data interval that was planned earlier has some of its offsets. None of its records was moved,
        because moving starts after this check."""
        window = entry.window
        if window.replay:
            return
        before = (state for state in self.memory.intervals.spans if state.offset < entry.first)
        for state, _ in find_sharing_intervals(window.ranges, window.topic_ids, before):
            self._withdraw()
            raise PlannedMeanwhile(self.parent_pipeline, f"Window {window.number}", f"interval {state.interval}")

    def _withdraw(self) -> None:
        """Withdraw the claimed or reopened window, and the binding that it was planned with."""
        entry = self.memory.open_entry
        assert entry is not None
        bindings = [make_binding_record(self.pipeline, self._find_binding_before())] if self._bound is not None else []
        self.withdraw(LedgerRecord(make_window_key(self.pipeline, entry.window.number), None), *bindings)

    def _find_binding_before(self) -> Binding | None:
        """Return the binding of the pipeline before the window that is being planned; None if it had none."""
        before = self._bound_before
        if before is None or self._get_exclusive_object(before) == self._get_exclusive_object(self._bound):
            return before
        # Meanwhile, another pipeline may have begun to use the group or the slot that this one had.
        return replace(before, owns=False)

    def withdraw(self, *records: LedgerRecord) -> None:
        """Remove a window that was planned, and of which nothing was moved.

        :param records: tombstones of its records, and the records that take their place.
        """
        producer, self._closer = self._closer, None
        assert producer is not None, "one ledger withdraws one window"
        try:
            producer.begin_transaction()
            self.send(producer, records)
            producer.commit_transaction(TRANSACTION_SECONDS)
        except Exception as error:
            # If this attempt has not removed the window, the next one reads it and withdraws it.
            raise self.translate(error, "withdrawing a plan", producer=producer) from error

    def replay(self, entry: WindowEntry) -> WindowEntry:
        """Reopen a COMPLETE window with its offsets, so that the sink replaces its rows. Position and group do not move."""
        window = replace(entry.window, replay=entry.window.replay + 1)
        return self._claim(replace(entry, window=window, state=State.PLANNED, attempt=self._make_attempt(1)))

    def _make_attempt(self, number: int) -> Attempt:
        return Attempt(number, secrets.token_hex(8), self.run, format_utc_now())

    def make_companion_records(self, entry: WindowEntry) -> list[LedgerRecord]:
        """Return further records to write with those of a window: the binding of the pipeline. They are written again with each
        window, because readers start after older ones."""
        binding = self._bound or self.memory.binding
        return [make_binding_record(self.pipeline, binding)] if binding else []

    def _claim(self, entry: WindowEntry) -> WindowEntry:
        producer, self._planner = self._planner, None
        assert producer is not None, "one ledger plans one window"
        entry = replace(entry, tries=record_tries(entry.tries, self.run, self.tries, keep=entry.window.run))
        try:
            producer.begin_transaction()
            offsets = self.send(producer, [make_window_record(entry), *self.make_companion_records(entry)])
            if self.group_id and self.plan_offsets:
                window, position = entry.window, self.memory.position.source
                planned = partial(make_planned_metadata, window, position=position)
                self._send_offsets(producer, self.group_id, self.plan_offsets, planned)
            producer.commit_transaction(TRANSACTION_SECONDS)
        except Exception as error:
            self._resolve_claim(error, entry, producer)
            offsets = [self.memory.entries[entry.window.number].offset]
        is_first = entry.first < 0 and entry.attempt.number == 1
        entry = replace(entry, offset=offsets[0], first=offsets[0] if is_first else entry.first)
        # A new pipeline has no earlier records, so readers may start at this offset.
        seen = self.memory.seen if self.memory.seen >= 0 else entry.offset
        binding = self._bound or self.memory.binding
        entries = {**self.memory.entries, entry.window.number: entry}
        self.memory = replace(self.memory, entries=entries, exists=True, binding=binding, seen=seen)
        self._entry = entry
        return entry

    def _resolve_claim(self, error: Exception, entry: WindowEntry, producer: Producer) -> None:
        """Read the ledger after a transaction whose outcome is unknown, and raise the error unless the plan was written."""
        failure = self.translate(error, "writing the plan", producer=producer)
        if isinstance(failure, Fenced):
            raise failure from None
        log.warning("Writing the plan of window %s failed (%s): reading the ledger, which may have it", entry.window, failure)
        if self._fence_and_read().find_owned(entry.window.number, entry.attempt.token) is None:
            raise failure from error

    @property
    def attempts(self) -> int:
        """Number of attempts that have worked on the claimed window, including this one."""
        return self.claimed.attempt.number

    @property
    def split_prefix(self) -> str:
        """The prefix of the transactional ids of splits, before the index of the split."""
        return make_transactional_id(self.topic.name, self.pipeline, SPLIT)

    @property
    def ledger_claim(self) -> LedgerClaim:
        """The place in the ledger where the tasks of the claimed window write their markers, and from which they read records
        since the claim."""
        return LedgerClaim(
            self.topic.name,
            self._partition,
            self.claimed.offset,
            self.pipeline,
            self.claimed.window.number,
            self.claimed.attempt.token,
        )

    @property
    def claim_hint(self) -> Hint:
        """The hint for later attempts while the claimed window is open: they begin to read at the offset where this attempt
        began.

        :attr:`~airflow_kafka_spark.windows.memory.Memory.oldest_offset` is too high before the window is closed: it lies after
        the markers of earlier attempts, and after the position if the pipeline has no complete window.
        """
        topic_id, partition, read_from = self.topic.topic_id, self._partition, self.hint
        if read_from and (read_from.topic_id, read_from.partition) == (topic_id, partition):
            return read_from
        return Hint(topic_id, partition, 0)

    @property
    def claimed(self) -> WindowEntry:
        """The window that this attempt works on."""
        assert self._entry is not None
        return self._entry

    def move_source(self, source: SourcePlan) -> None:
        """Replace what the claimed window says of its source, which is written when the window is closed.

        :param source: the plan, with the position after the window, and whether the source holds more. The position follows from
            the markers of all splits and from the source's log. Only that of the attempt that closes the window counts.
        """
        self._entry = replace(self.claimed, window=replace(self.claimed.window, source=source))

    def read_as_owner(self) -> Memory:
        """Read the ledger, and return the state of the pipeline if this attempt still owns the claimed window.

        :raises Fenced: a newer attempt has claimed the window, or has completed it.
        """
        mine = self.read().find_owned(self.claimed.window.number, self.claimed.attempt.token)
        if mine is None or mine.state is not self.claimed.state:
            raise Fenced(self.pipeline, f"working on window {self.claimed.window.number}")
        return self.memory

    @property
    def largest_dead_letters(self) -> int:
        """Maximum size in bytes of the record of the window's dead letters. By default a topic takes records of 1 MiB."""
        return MAX_DEAD_LETTER_BYTES

    def remember_dead_letters(self, dead: DeadLetters) -> None:
        """Add dead letters that were just sent to the state in memory, without reading the ledger again."""
        self.memory = replace(self.memory, dead={**self.memory.dead, dead.window: dead})

    def read_published(self) -> dict[int, Marker]:
        """Return the markers of the published splits of the claimed window, by index. Call it once no other attempt can publish.

        :raises Fenced: a newer attempt has claimed the window, or has completed it.
        """
        number, found = self.claimed.window.number, self.read_as_owner()
        return {split: marker for (window, split), marker in found.markers.items() if window == number}

    def verify(self) -> None:
        """Read the ledger to check that this attempt still owns its window. This is cheap, but not atomic.

        The check only saves a zombie from useless work; correctness comes from the refusal of its commit and its close. Open
        transactions are awaited only if they may contain records of the window itself. A transaction of a dead task of this
        attempt is not: it ends when the next attempt fences it, and it hides no claim, because a claim comes after the fences.

        :raises Fenced: a newer attempt has claimed the window, or has completed it.
        """
        claimed = self.claimed
        own = (make_window_key(self.pipeline, claimed.window.number),)
        # Records before the claim are not needed here.
        found = self.topic.read_partition(self.pipeline, self._partition, max(claimed.offset, 0), wait_for=own).memory
        if found.find_owned(claimed.window.number, claimed.attempt.token) is None:
            raise Fenced(self.pipeline, f"working on window {claimed.window.number}")

    def close(self, report: Mapping[str, Any], offsets: Mapping[TopicPartition, int]) -> None:
        """Complete the window: its COMPLETE record, the new position and the group's offsets, in one Kafka transaction (KIP-98).

        Call it after the sink has committed. Either all of it is written, or nothing.

        :param report: the window's report, as JSON.
        :param offsets: offsets that the group commits: the frozen end of each partition.
        :raises Fenced: a newer attempt has taken over, and will complete the window.
        :raises GroupHasMembers: the broker refuses the offsets, because the group has members.
        """
        entry = replace(self.claimed, state=State.COMPLETE, report=report)
        for tries in range(1, CLOSE_TRIES + 1):
            producer, self._closer = self._closer, None
            assert producer is not None, "one ledger closes one window"
            try:
                self._close_once(producer, entry, offsets)
                return
            except Exception as error:
                failure = self.translate(error, "closing the window", producer=producer)
                if isinstance(failure, (Fenced, GroupHasMembers, RightMissing)) or tries == CLOSE_TRIES:
                    raise failure from error
                log.warning("Closing window %s failed (try %d of %d): %s", entry.window, tries, CLOSE_TRIES, failure)
            # The outcome is unknown. Fence before reading: only then can that transaction no longer be committed.
            found = self._fence_and_read().find_owned(entry.window.number, entry.attempt.token)
            if found is None:
                raise Fenced(self.pipeline, "closing the window")
            if found.state is State.COMPLETE:
                return

    def _close_once(self, producer: Producer, entry: WindowEntry, offsets: Mapping[TopicPartition, int]) -> None:
        window = entry.window
        # The position already includes a window that is replayed.
        position = self.memory.position if window.replay else find_next_position(self.memory.position, window)
        if window.publishes:
            position = replace(position, published=add_landed(self.memory.published or {}, parse_landed(entry)))
        last_number = max(self.memory.last_number, window.number)
        # If `keep_windows` was lowered, a replayed window may be too old by now: a tombstone would follow its record.
        forgotten = [n for n in self.memory.entries if n <= last_number - self.keep_windows and n != window.number]
        records = [
            make_window_record(entry),
            *self.make_companion_records(entry),
            make_position_record(self.pipeline, position, last_number),
            *(LedgerRecord(make_window_key(self.pipeline, number), None) for number in sorted(forgotten)),
            *(LedgerRecord(make_marker_key(self.pipeline, *split), None) for split in sorted(self.memory.markers)),
            *(
                LedgerRecord(make_dead_letters_key(self.pipeline, number), None)
                for number in sorted(forgotten)
                if number in self.memory.dead
            ),
        ]
        producer.begin_transaction()
        written = self.send(producer, records)
        entries = {n: e for n, e in self.memory.entries.items() if n not in forgotten}
        entries[window.number] = replace(entry, offset=written[0])
        dead = {n: d for n, d in self.memory.dead.items() if n not in forgotten}
        memory = replace(self.memory, position=position, last_number=last_number, entries=entries, markers={}, dead=dead)
        hint = Hint(self.topic.topic_id, self._partition, memory.oldest_offset)
        if self.group_id and offsets:
            self._send_offsets(
                producer, self.group_id, offsets, lambda topic: make_offset_metadata(window, topic, hint), window.epochs
            )
        faults.reached("close.in_transaction")
        producer.commit_transaction(TRANSACTION_SECONDS)
        self.memory, self.hint = memory, hint

    def send(self, producer: Producer, records: Sequence[LedgerRecord]) -> list[int]:
        """Produce and flush records to the pipeline's partition, and return their offsets."""
        return produce_all(producer, self.topic.name, self._partition, records, TRANSACTION_SECONDS)

    def _send_offsets(
        self,
        producer: Producer,
        group_id: str,
        offsets: Mapping[TopicPartition, int],
        metadata: Callable[[str], str],
        epochs: Mapping[TopicPartition, int] | None = None,
    ) -> None:
        """Send the group's offsets in the producer's transaction.

        :param metadata: returns the metadata of a topic's committed offsets.
        :param epochs: the leader epochs of the offsets, if known.
        """
        committed = [(tp, offset, metadata(tp.topic)) for tp, offset in sorted(offsets.items())]
        send_offsets(producer, self.hook.make_consumer_config(), group_id, committed, TRANSACTION_SECONDS, epochs)

    # --- errors ---

    def translate(
        self, error: BaseException, doing: str, topic: str = "", *, producer: Producer | None = None
    ) -> KafkaSparkError:
        """Return this package's error for one of the attempt's producers. If the brokers have refused its transaction, abort it:
        readers of the ledger's partition, also those of other pipelines, would otherwise wait for its timeout.

        A transaction whose outcome is unknown (:class:`~airflow_kafka_spark.errors.KafkaUnavailable`) is not aborted. librdkafka
        refuses to abort one whose commit has begun, and brokers that do not answer would only delay the error. The next attempt
        ends it when it fences the id, or the brokers do after :data:`TRANSACTION_SECONDS`.

        :param doing: the failed action, for the message.
        :param topic: the topic that was written; default: the ledger topic.
        :param producer: the producer, if its transaction is over. It is asked for an error that the client has lost. An attempt
            that did not know that it is fenced would fence the newer attempt.
        """
        failure = self._translate(error, doing, topic or self.topic.name, producer)
        if producer is not None and isinstance(failure, (RightMissing, GroupHasMembers, KafkaRefused)):
            abort(producer)
        return failure

    def _translate(self, error: BaseException, doing: str, topic: str, producer: Producer | None) -> KafkaSparkError:
        from confluent_kafka import KafkaException

        if isinstance(error, RightMissing):
            return error.name_connection(self.hook.conn_id)
        if isinstance(error, KafkaSparkError):
            return error
        if producer is not None:
            error = find_fatal_error(producer, error)
        if is_fenced(error, self._events):
            return Fenced(self.pipeline, doing)
        if not isinstance(error, KafkaException):
            return KafkaUnavailable(self.hook.conn_id, doing, str(error))
        return self._translate_kafka(error, doing, topic)

    def _translate_kafka(self, error: KafkaException, doing: str, topic: str) -> KafkaSparkError:
        from confluent_kafka import KafkaError

        cause = error.args[0]
        if cause.code() in (KafkaError.UNKNOWN_MEMBER_ID, KafkaError.ILLEGAL_GENERATION, KafkaError.FENCED_INSTANCE_ID):
            members = self.hook.read_group_state(self.group_id or "").members
            return GroupHasMembers(self.group_id or "", [str(m) for m in members])
        rights = [Right("topic", "Write", topic), Right("group", "Read", self.group_id or "")]
        user = KafkaUser.of(self.hook.config, self.hook.conn_id)
        if missing := find_missing_right(cause, user, doing, rights, events=self._events):
            return missing
        if cause.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            action = f"Raise `max.message.bytes` of topic `{topic}`"
            return KafkaRefused(self.hook.conn_id, doing, cause.name(), f"a record is too large for topic `{topic}`", action)
        return KafkaUnavailable(self.hook.conn_id, doing, describe_producer_error(error))


class ChangeLedger(Ledger):
    """The ledger of a pipeline for one manual change: of its offsets, of its name, or of all records.

    Guarantee: no attempt plans or closes a window between this ledger's read and its change, nor afterwards from a state that it
    has read before the change.

    An attempt and a change that fence concurrently may each get one of the two ids. Therefore the change fences the id of plans
    first, and is written under it: while this ledger has that id, no attempt can claim a window from an earlier state, and an
    attempt that has claimed one before was fenced from closing it.
    """

    def _fence_both(self) -> None:
        self._planner = self._fence("plan")
        self._closer = self._fence("close")

    def take_over(self, entries: Sequence[WindowEntry]) -> None:
        """Claim open windows, as a newer attempt does. Tasks that read the ledger from now on find another owner, and publish
        nothing. The fences of splits alone would not stop a task that starts after them.

        The claim is written under the id of closes, because :meth:`commit_change` uses that of plans. If the change fails after
        this, the next attempt reopens the window.

        :param entries: the windows.
        :raises Fenced: an attempt of the pipeline has taken over meanwhile.
        """
        if not entries:
            return
        producer, self._closer = self._closer, None
        assert producer is not None, "one ledger takes over once"
        try:
            producer.begin_transaction()
            claimed = (replace(entry, attempt=self._make_attempt(entry.attempt.number + 1)) for entry in entries)
            self.send(producer, [make_window_record(entry) for entry in claimed])
            producer.commit_transaction(TRANSACTION_SECONDS)
        except Exception as error:
            raise self.translate(error, "taking over an open window", producer=producer) from error

    def commit_change(
        self,
        records: Sequence[LedgerRecord],
        offsets: Mapping[TopicPartition, int],
        metadata: Callable[[str], str],
        is_done: Callable[[Memory], bool],
        beside: Mapping[int, Sequence[LedgerRecord]] | None = None,
    ) -> None:
        """Write records and the group's offsets in one Kafka transaction.

        :param metadata: returns the metadata of a topic's committed offsets.
        :param is_done: returns True if the state of the pipeline includes the change; called if the outcome is unknown.
        :param beside: further records, by partition of the ledger topic.
        :raises Fenced: an attempt of the pipeline has taken over meanwhile; nothing was changed.
        """
        producer, self._planner = self._planner, None
        assert producer is not None, "one ledger commits one change"
        try:
            producer.begin_transaction()
            self.send(producer, records)
            for partition, others in (beside or {}).items():
                produce_all(producer, self.topic.name, partition, others, TRANSACTION_SECONDS)
            if self.group_id and offsets:
                self._send_offsets(producer, self.group_id, offsets, metadata)
            faults.reached("change.in_transaction")
            producer.commit_transaction(TRANSACTION_SECONDS)
        except Exception as error:
            failure = self.translate(error, "changing the pipeline's offsets", producer=producer)
            if isinstance(failure, (Fenced, GroupHasMembers)) or not is_done(self._fence_and_read()):
                raise failure from error


def wait_for_others(again: int) -> None:
    """Wait for a random time before a further try. Writers that try again at the same moment would keep fencing each other.

    :param again: number of tries before; 0 does not wait.
    """
    if again:
        time.sleep(random.random() * min(0.05 * 2**again, 2.0))


def _estimate_compressed_size(value: bytes, kind: str) -> int:
    """Return the approximate size of a record in the ledger topic, in bytes.

    :param kind: the topic's ``compression.type``.
    """
    import pyarrow

    codec = CODECS.get(kind, "zstd")
    size = len(pyarrow.compress(value, codec=codec, asbytes=True)) if codec else len(value)
    # Reserve for counts and times that are not known yet, and for the frame of the batch.
    return size + size // 20 + 1_000


def format_utc_now() -> str:
    """Return the current instant in ISO 8601, with milliseconds and ``Z``."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
