"""What somebody wants of a pipeline while it may be at work: written to the ledger beside whoever works, and disturbing nobody.

Three things make that safe. A control has a key of its own kind, which no attempt and no reset writes. Who writes one fences a
transactional id of its own kind, ``<ledger topic>.<pipeline>.control``, so that of two who press at once the second sees what the
first has done. And whoever leaves a short cut into the ledger leaves it before everything that its last look may have missed
(:attr:`~airflow_kafka_spark.windows.memory.Memory.oldest_offset`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark import faults
from airflow_kafka_spark.control.pipelines import existing_ledger, open_entries
from airflow_kafka_spark.errors import PipelineUnknown, ResetRefused
from airflow_kafka_spark.hooks.kafka.client import ClientEvents
from airflow_kafka_spark.ledger.attempt import Ledger
from airflow_kafka_spark.ledger.open_transactions import transactional_id_of
from airflow_kafka_spark.ledger.topic import Found
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
from airflow_kafka_spark.windows.model import State

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

log = logging.getLogger(__name__)

KEEP_CONTROLS = 100
"""How many controls of a pipeline are remembered."""
SECONDS = 10
TRIES = 10
"""Each of them loses only against somebody else who has just written one."""


@dataclass(frozen=True)
class OpenWindow:
    """A window that is planned and not complete: somebody may be at work on it.

    :param window: its name.
    :param number: its number.
    :param run: the run that planned it.
    :param planned_at: UTC instant, ISO 8601.
    """

    window: str
    number: int
    run: str
    planned_at: str


class Controls(Ledger):
    """Where controls of a pipeline are written. Not to be entered: that would fence its attempts."""

    def tell(self, decide: Callable[[Memory], Change | None]) -> Change | None:
        """Write what ``decide`` makes of what the ledger holds, in one Kafka transaction of a record or two.

        Guarantee: it is written whole or not at all; between its look and its commit nobody else writes a control of this
        pipeline. Attempts, resets and their transactions are not fenced.

        :param decide: None for nothing to do; asked again when somebody else was faster.
        :return: what was written, None when there was nothing to do.
        :raises KafkaUnavailable: it cannot be written; what became of it is not known only if the brokers do not say so.
        """
        failure: Exception | None = None
        sent: Change | None = None
        for _ in range(TRIES):
            self._events = ClientEvents(self.hook.config.get("error_cb"))
            settings: dict[str, Any] = {"transaction.timeout.ms": SECONDS * 1000, "message.timeout.ms": SECONDS * 1000}
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
                self.send(producer, _records(memory, change))
                faults.reached("control.in_transaction")
                producer.commit_transaction(SECONDS)
                return change
            except Exception as error:
                # What became of it is known once the next producer has fenced this one, and has looked.
                failure, sent = self.translated(error, f"writing what was asked for ({change.action})"), change
                log.warning("Writing change %d of pipeline %s failed: %s", change.number, self.pipeline, failure)
        assert failure is not None
        raise failure

    def _find(self) -> Found:
        """Waits only for controls that an open transaction hides: whoever is at work may take as long as he likes."""
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
    old = [n for n in sorted(memory.controls) if n <= change.number - KEEP_CONTROLS and (pause is None or n != pause.number)]
    return [
        *ended,
        control_record(pipeline, change, PAUSE_VERSION if change.action == "pause" else VERSION),
        *(LedgerRecord(control_key(pipeline, number), None) for number in old),
    ]


def refuse_lanes(memory: Memory) -> None:
    """:raises ResetRefused: this is not a pipeline, but one of its data intervals."""
    for entry in memory.entries.values():
        if entry.window.interval is not None:
            raise ResetRefused(
                f"`{memory.pipeline}` is a data interval of a pipeline",
                expected="the name of the pipeline",
                action="Leave out what comes after the last dot",
            )


def open_windows(memory: Memory) -> tuple[OpenWindow, ...]:
    """Windows and data intervals that are planned and not complete."""
    entries = [OpenWindow(str(e.window), e.window.number, e.window.run, e.window.planned_at) for e in open_entries(memory)]
    lanes = [s for _, s in sorted(memory.intervals.recent.items()) if s.state is State.PLANNED]
    return (*entries, *(OpenWindow(s.interval.lane(memory.pipeline), 1, s.run, "") for s in lanes))


def controls(hook: KafkaHook, pipeline: str, ledger_topic: str) -> Controls:
    """Where controls of this pipeline are written."""
    return Controls(hook, pipeline, "", topic=ledger_topic)
