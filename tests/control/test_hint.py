"""Attempts that read the ledger from the hint in the group's offsets see all records that concern them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from airflow_kafka_spark.hooks.kafka.client import ClientEvents
from airflow_kafka_spark.hooks.kafka.transactions import make_fencing_producer, send_offsets
from airflow_kafka_spark.ledger.attempt import Ledger
from airflow_kafka_spark.ledger.group import make_offset_metadata
from airflow_kafka_spark.windows.memory import make_marker_record
from airflow_kafka_spark.windows.model import Landed, Marker, TargetTopic
from tests.support.control import forget, pause, rename, resume
from tests.support.piped import Piped

TARGET = TargetTopic("out", "id", 1)


def publish_split(piped: Piped, ledger: Ledger, split: int) -> None:
    """Write a marker and commit a partition's offset in one transaction, as the task of a split between topics does."""
    window, claim, tp = ledger.claimed.window, ledger.ledger_claim, piped.tp(split)
    producer = make_fencing_producer(piped.hook.make_producer_config(), f"{ledger.split_prefix}{split}", 30, ClientEvents())
    producer.begin_transaction()
    metadata = make_offset_metadata(window, tp.topic, ledger.claim_hint)
    send_offsets(producer, piped.hook.make_consumer_config(), piped.name, [(tp, window.ends[tp], metadata)], 30)
    record = make_marker_record(window.pipeline, Marker(window.number, split, (Landed("out", 0, split, split, 1),)))
    producer.produce(claim.topic, record.value, record.key, claim.partition)
    producer.commit_transaction(60)


def is_new(piped: Piped) -> None:
    """Return True if the pipeline has no records yet."""


def was_reset(piped: Piped) -> None:
    piped.open_window(4, 4, target=TARGET)
    piped.reset("earliest", discard_open=True, group_id=piped.name)


def was_renamed(piped: Piped) -> None:
    piped.move(4, 4)
    before, piped.name = piped.name, f"{piped.name}-renamed"
    rename(piped.hook, before, to=piped.name, why="a test", **piped.place)


def was_forgotten(piped: Piped) -> None:
    with piped.ledger() as ledger:
        window = ledger.plan(piped.window(ledger, 4, 4, target=TARGET)).window
        ledger.close({"published": [vars(Landed("out", 0, 0, 7, 8))]}, window.ends)
    piped.settle()
    forget(piped.hook, piped.name, why="a test", **piped.place)


@pytest.mark.parametrize("before", [is_new, was_reset, was_renamed, was_forgotten])
def test_later_attempts_at_a_first_window_see_what_the_first_attempt_saw_and_published(piped, before: Callable[[Piped], None]):
    """Each task commits a hint with its split. It must lead neither behind a position nor behind markers."""
    before(piped)
    if before is not is_new:
        piped.settle()
        pause(piped.hook, piped.name, why="a test", **piped.place)
        resume(piped.hook, piped.name, why="a test", **piped.place)
    piped.settle()
    with piped.ledger() as ledger:
        ledger.plan(piped.window(ledger, 10, 10, target=TARGET))
        publish_split(piped, ledger, 1)
        piped.settle()
    with piped.ledger() as ledger:
        ledger.reopen(ledger.memory.open_entry)
        publish_split(piped, ledger, 0)
        piped.settle()
    with piped.ledger() as ledger:
        assert ledger.hint is not None
        everything = ledger.topic.read(piped.name).memory
        assert ledger.memory == everything
        assert sorted(ledger.memory.markers) == [(everything.open_entry.window.number, split) for split in (0, 1)]
        assert ledger.memory.published == everything.published
