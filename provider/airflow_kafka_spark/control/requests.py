"""The request of a control command, and the records of requests (pause, resume, replay, rebind), which are written to the ledger
while an attempt may be running and fence no attempt.

Three things make that safe. A control has a key of its own kind, which no attempt and no reset writes. Its writer fences a
transactional id of its own kind, ``<ledger topic>.<pipeline>.control``: of two concurrent writers the second one sees the
record of the first one. An attempt that leaves a hint into the ledger sets it before everything that its last look may have
missed (:attr:`~airflow_kafka_spark.windows.memory.Memory.oldest_offset`).
"""

from __future__ import annotations

import getpass
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark import faults
from airflow_kafka_spark.control.pipelines import existing_ledger
from airflow_kafka_spark.errors import ChangeRefused, PipelineUnknown
from airflow_kafka_spark.hooks.kafka.events import ClientEvents
from airflow_kafka_spark.ledger.attempt import Ledger
from airflow_kafka_spark.ledger.open_transactions import transactional_id_of
from airflow_kafka_spark.ledger.topic import TOPIC, Found
from airflow_kafka_spark.windows.changes import Change
from airflow_kafka_spark.windows.memory import (
    CONTROL,
    PAUSE_VERSION,
    VERSION,
    LedgerRecord,
    Memory,
    control_key,
    control_prefix,
    control_record,
)

if TYPE_CHECKING:
    from confluent_kafka import Producer

    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

log = logging.getLogger(__name__)

KEEP_CONTROLS = 100
"""Controls of a pipeline that are remembered."""
SECONDS = 10
TRIES = 10
"""A try is lost only to another writer that has just succeeded."""


@dataclass(frozen=True)
class ChangeRequest:
    """The request to change a pipeline. The command line, the operator and the pages in Airflow's UI make one for each command.

    :param pipeline: name of the pipeline.
    :param why: reason of the change, which the ledger records.
    :param who: author of the change. Default: the user of this process.
    :param ledger_topic: the ledger that knows the pipeline.
    :param dry_run: True to change and fence nothing, and to return what would happen.
    :raises ChangeRefused: ``why`` is empty.
    """

    pipeline: str
    why: str
    who: str = ""
    ledger_topic: str = TOPIC
    dry_run: bool = False

    def __post_init__(self) -> None:
        if not str(self.why or "").strip():
            raise ChangeRefused("The change has no reason", expected="a few words in `why`", action="Say why")
        object.__setattr__(self, "who", str(self.who or "").strip() or _user())


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        return f"uid {os.getuid()}"


@dataclass(frozen=True)
class Beside:
    """Records that become visible together with the record of a change.

    :param doing: the action, for errors.
    :param topics: the topics that they go to, for errors.
    :param produce: produces and flushes them.
    :param seconds: how long the transaction may take.
    :param settings: further settings of the producer.
    """

    doing: str
    topics: Collection[str]
    produce: Callable[[Producer], None]
    seconds: int = SECONDS
    settings: Mapping[str, Any] = field(default_factory=dict)


class ControlLedger(Ledger):
    """Writes the control requests of a pipeline. Do not enter it as a context: that would fence the pipeline's attempts."""

    def write(self, decide: Callable[[Memory], Change | None], beside: Beside | None = None) -> Change | None:
        """Write what ``decide`` makes of what the ledger holds, in one Kafka transaction of a record or two.

        Guarantee: it is written whole or not at all; between its look and its commit no other writer writes a control of this
        pipeline. Attempts, resets and their transactions are not fenced.

        :param decide: None for nothing to do; called again if another writer was faster.
        :param beside: produces further records of the change in the same transaction.
        :return: the change that was written; None if nothing had to be done.
        :raises KafkaUnavailable: it cannot be written; what became of it is not known only if the brokers do not say so.
        """
        failure: Exception | None = None
        sent: Change | None = None
        for _ in range(TRIES):
            self._events = ClientEvents(self.hook.config.get("error_cb"))
            seconds = beside.seconds if beside is not None else SECONDS
            settings: dict[str, Any] = {"transaction.timeout.ms": seconds * 1000, "message.timeout.ms": seconds * 1000}
            settings |= beside.settings if beside is not None else {}
            producer = self._fence_as(transactional_id_of(self.topic.name, self.pipeline, CONTROL), **settings)
            memory = self._find().memory
            if sent is not None and memory.controls.get(sent.number) == sent:
                return sent
            if failure is not None and not _lost(failure):
                raise failure
            if (change := decide(memory)) is None:
                return None
            try:
                producer.begin_transaction()
                if beside is not None:
                    self._produce(producer, beside)
                # The record goes last: until the transaction ends, no reader gets past it in the ledger's partition.
                self.send(producer, _records(memory, change))
                faults.reached("control.in_transaction")
                producer.commit_transaction(seconds)
                return change
            except Exception as error:
                # What became of it is known once the next producer has fenced this one, and has looked.
                failure, sent = self.translated(error, f"writing what was asked for ({change.action})"), change
                log.warning("Writing change %d of pipeline %s failed: %s", change.number, self.pipeline, failure)
        assert failure is not None
        raise failure

    def _produce(self, producer: Producer, beside: Beside) -> None:
        try:
            beside.produce(producer)
        except Exception as error:
            raise self.translated(error, beside.doing, "`, `".join(sorted(beside.topics))) from error

    def _find(self) -> Found:
        """Read the ledger. Only control records that an open transaction hides are waited for; an attempt at work may take as
        long as it needs."""
        topic = existing_ledger(self.hook, self.topic.name)
        if topic is None:
            raise PipelineUnknown(self.pipeline, self.topic.name)
        self.topic = topic
        mine = (control_prefix(self.pipeline),)
        found = topic.glance(self.pipeline, mine)
        self._partition = found.partition
        return found


def _lost(failure: Exception) -> bool:
    from airflow_kafka_spark.errors import Fenced

    return isinstance(failure, Fenced)


def _records(memory: Memory, change: Change) -> list[LedgerRecord]:
    pipeline, pause = memory.pipeline, memory.pause
    # The pause that ends is history, which older releases may pass over. It comes first: who sees it sees its end.
    ended = [control_record(pipeline, pause)] if change.action == "resume" and pause is not None else []
    kept = {control.number for control in (pause, *memory.counted_resends) if control is not None}
    old = [n for n in sorted(memory.controls) if n <= change.number - KEEP_CONTROLS and n not in kept]
    return [
        *ended,
        control_record(pipeline, change, PAUSE_VERSION if change.action == "pause" else VERSION),
        *(LedgerRecord(control_key(pipeline, number), None) for number in old),
    ]


def refuse_intervals(memory: Memory) -> None:
    """Refuse a command that names a data interval instead of its pipeline.

    :raises ChangeRefused: this is not a pipeline, but one of its data intervals.
    """
    for entry in memory.entries.values():
        if entry.window.interval is not None:
            raise ChangeRefused(
                f"`{memory.pipeline}` is a data interval of a pipeline",
                expected="the name of the pipeline",
                action="Leave out what comes after the last dot",
            )


def request_change(
    hook: KafkaHook,
    memory: Memory,
    request: ChangeRequest,
    decide: Callable[[Memory], Change | None],
    beside: Beside | None = None,
) -> tuple[Change | None, Memory]:
    """Write a control request, unless it has been made already or this is a dry run.

    :param memory: the ledger as it was just read, without fencing. What ``decide`` refuses of it leaves nothing behind.
    :param request: what was asked for; a dry run writes nothing.
    :param decide: returns the change to write, from what the ledger holds; None where there is nothing to do.
    :param beside: further records of the change, which become visible with it.
    :return: the change, None where there was nothing to do; and the memory that it was decided on.
    :raises KafkaUnavailable: it cannot be written.
    """
    seen = memory

    def remember(found: Memory) -> Change | None:
        nonlocal seen
        seen = found
        return decide(found)

    change = remember(memory)
    if not request.dry_run:
        change = ControlLedger(hook, memory.pipeline, "", topic=request.ledger_topic).write(remember, beside)
    return change, seen
