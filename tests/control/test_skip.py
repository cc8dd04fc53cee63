"""Skips of a window or of waiting records on a real broker: complete or not at all, and never during an attempt."""

from __future__ import annotations

import json

import pytest

from airflow_kafka_spark import faults
from airflow_kafka_spark.control.pipelines import to_json
from airflow_kafka_spark.errors import AttemptAtWork, ChangeRefused, Fenced
from airflow_kafka_spark.windows.model import SourcePlan
from tests.support.control import skip


@pytest.fixture
def ask(moved):
    def asked(**options):
        moved.settle()
        done = skip(moved.hook, moved.name, **{"why": "poison", "who": "ann", **moved.place, **options})
        moved.settle()
        return done

    return asked


def memory_of(piped):
    return piped.memory


def test_the_open_window_is_given_up_and_the_next_one_begins_at_its_frozen_ends(moved, ask):
    window = moved.open_window(15, 12)
    done = ask(running=False)
    assert [(w.number, w.run, w.attempts) for w in done.given_up] == [(window.number, window.run, 1)]
    assert done.skipped_offsets == 7
    assert [(g.partition, g.start, g.end) for g in done.skipped] == [(0, 10, 15), (1, 10, 12)]
    memory = memory_of(moved)
    assert (memory.open_entry, moved.stands(), moved.committed()) == (None, [15, 12], [15, 12])
    (change,) = memory.history
    assert (change.action, change.who, change.why, change.discarded) == ("skip", "ann", "poison", (window.number,))
    assert [sorted(at.values()) for at in (change.before, change.after)] == [[10, 10], [12, 15]]
    following = moved.open_window(20, 20)
    assert (following.number, following.moved, [r.start for r in following.ranges]) == (3, 1, [15, 12])
    json.dumps(to_json(done))


def test_without_an_open_window_what_waits_is_skipped_and_then_nothing_waits(moved, ask):
    done = ask()
    assert (done.given_up, done.skipped_offsets, moved.stands(), moved.committed()) == ((), 20, [20, 20], [20, 20])
    before = moved.everything()
    with pytest.raises(ChangeRefused, match="no records are waiting"):
        ask()
    assert moved.everything() == before


def test_a_window_that_an_attempt_works_on_or_may_work_on_is_refused_and_not_disturbed(moved, ask):
    with moved.ledger() as at_work:
        entry = at_work.plan(moved.window(at_work, 15, 15))
        for running in (True, None):
            with pytest.raises(AttemptAtWork) as caught:
                ask(running=running)
            assert entry.window.run in str(caught.value) and entry.attempt.started_at in str(caught.value)
            result = ask(running=running, dry_run=True)
            assert (result.dry_run, result.skipped_offsets) == (True, 10) and entry.attempt.started_at in result.warnings[-1]
        at_work.close({"group_id": moved.name}, entry.window.ends)
    assert moved.stands() == [15, 15] and not memory_of(moved).history


def test_an_attempt_that_was_at_work_nevertheless_is_shut_out(moved, ask):
    with moved.ledger() as at_work:
        entry = at_work.plan(moved.window(at_work, 15, 15))
        ask(running=False)
        with pytest.raises(Fenced):
            at_work.close({"group_id": moved.name}, entry.window.ends)
    assert moved.stands() == moved.committed() == [15, 15]


def test_a_replay_that_is_given_up_is_complete_again_and_nothing_moves(moved, ask):
    moved.move(15, 15)
    with moved.ledger() as ledger:
        ledger.replay(ledger.memory.entries[1])
    done = ask(running=False)
    assert ([w.number for w in done.given_up], done.skipped_offsets, done.moves) == ([1], 0, ())
    memory = memory_of(moved)
    assert (memory.open_entry, sorted(memory.entries), memory.last_number) == (None, [1, 2], 2)
    assert moved.stands() == moved.committed() == [15, 15]
    assert moved.open_window(20, 20).moved == 0


def test_the_rows_of_a_source_are_given_up_with_their_window_and_what_waits_only_the_source_knows(piped):
    plan = SourcePlan(({"from": 0},), {"id": 70})
    piped.open_window(source=plan)
    done = skip(piped.hook, piped.name, why="x", running=False, **piped.place)
    piped.settle()
    memory = memory_of(piped)
    assert (done.group_id, memory.position.source, memory.last_number, memory.open_entry) == (None, {"id": 70}, 1, None)
    with pytest.raises(ChangeRefused, match="only the source knows"):
        skip(piped.hook, piped.name, why="x", **piped.place)


def test_a_failure_inside_the_transaction_changes_nothing(moved, ask, monkeypatch):
    moved.open_window(15, 15)
    before = moved.stands(), moved.committed()
    monkeypatch.setenv(faults.FAULT, "change.in_transaction:raise")
    with pytest.raises(Exception, match="fault injected"):
        ask(running=False)
    monkeypatch.delenv(faults.FAULT)
    memory = memory_of(moved)
    assert (moved.stands(), moved.committed()) == before and memory.open_entry and not memory.history
