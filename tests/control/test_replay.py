"""Requests for replays on a real broker: recorded, without disturbing an attempt, and refused for windows without a replay."""

from __future__ import annotations

import json

import pytest

from airflow_kafka_spark.control.pipelines import to_json
from airflow_kafka_spark.control.replay import IN_PIECES
from airflow_kafka_spark.errors import DataLoss, ReplayRefused, WindowOpen
from airflow_kafka_spark.sinks.base import Guarantee
from airflow_kafka_spark.windows.model import TargetTopic
from tests.support.control import replay


@pytest.fixture
def ask(moved):
    def asked(**options):
        moved.settle()
        done = replay(moved.hook, moved.name, **{"why": "spoilt rows", "who": "ann", **moved.place, **options})
        moved.settle()
        return done

    return asked


def memory_of(piped):
    return piped.memory


@pytest.mark.parametrize("run_id", ["manual__2026-01-01T00:00:00+00:00", "a run/with slashes"])
def test_what_is_asked_for_names_the_task_to_clear_and_counts_until_the_window_was_moved_again(moved, ask, run_id):
    moved.run = 7
    with moved.ledger(f"dag/{run_id}/load/3") as ledger:
        window = moved.window(ledger, 15, 15)
        window = type(window)(**{**vars(window), "run": ledger.run})
        entry = ledger.plan(window)
        with pytest.raises(WindowOpen):
            ask(window=2)
        ledger.close({"group_id": moved.name}, entry.window.ends)
    with moved.ledger() as at_work:
        done = ask(window=2)
        at_work.plan(moved.window(at_work, 17, 17))
    task = done.window.dag_id, done.window.run_id, done.window.task_id, done.window.map_index
    assert task == ("dag", run_id, "load", 3)
    assert (done.changed, done.window.number, done.window.replay) == (True, 2, 0)
    assert [(r.start, r.end) for r in done.window.ranges] == [(10, 15)] * 2
    again = ask(window=2)
    assert (again.changed, again.change) == (False, done.change) and "requested already" in again.warnings[0]
    memory = memory_of(moved)
    assert memory.replay_asked(window).who == "ann" and memory.replay_asked(memory.entries[1].window) is None
    with moved.ledger() as ledger:
        assert ledger.hint is not None
        ledger.close({}, ledger.reopen(ledger.memory.open_entry).window.ends)
    with moved.ledger() as ledger:
        replayed = ledger.replay(ledger.memory.entries[2]).window
        assert ledger.memory.replay_asked(replayed) is None
    json.dumps(to_json([done, memory_of(moved).history]))


def test_a_dry_run_changes_nothing(moved, ask):
    moved.move(15, 15)
    before = moved.everything()
    assert ask(window=2, dry_run=True).changed and moved.everything() == before


def test_what_cannot_be_moved_once_more_is_refused(moved, ask):
    with pytest.raises(ReplayRefused, match="remembers no window 9.*windows 1 to 1"):
        ask(window=9)
    with pytest.raises(ReplayRefused, match="no data interval `2026`"):
        ask(name="2026")
    with pytest.raises(ValueError, match="either"):
        ask()
    with pytest.raises(DataLoss):
        ask(window=1)
    moved.open_window(11, 11, target=TargetTopic("copy", "id", 2))
    with moved.ledger() as ledger:
        ledger.close({"group_id": moved.name}, ledger.reopen(ledger.memory.open_entry).window.ends)
    with pytest.raises(ReplayRefused, match="parts of its windows"):
        ask(window=2)
    assert Guarantee.EXACTLY_ONCE_PER_SPLIT.value == IN_PIECES
    assert not memory_of(moved).history
