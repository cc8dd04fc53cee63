"""Pausing and resuming on a real broker: also during attempts, completely or not at all, and seen by the next attempt."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from airflow_kafka_spark.control.pipelines import read_pipeline, show, to_json
from airflow_kafka_spark.errors import ChangeRefused, PipelineUnknown
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.operators import PipelineOffsetsOperator
from airflow_kafka_spark.windows.offset_specs import ShiftBy
from tests.support.control import forget, pause, reset, resume
from tests.support.runs import Victim


@pytest.fixture
def ask(moved):
    """Pause or resume the pipeline, with the reason "x"."""

    def asked(action, **options):
        moved.settle()
        done = action(moved.hook, moved.name, **{"why": "x", **moved.place, **options})
        moved.settle()
        return done

    return asked


def memory_of(piped):
    return piped.memory


def test_a_pause_is_recorded_with_who_and_why_and_so_is_its_end(moved, ask):
    done = ask(pause, why="the warehouse moves", who="ann")
    assert (done.changed, done.change, done.paused_by, done.open_windows) == (True, 1, None, ())
    state = show(moved.hook, moved.name, **moved.place)
    assert (state.paused.who, state.paused.why) == ("ann", "the warehouse moves")
    ended = ask(resume, who="bob")
    assert (ended.changed, ended.change, ended.paused_by) == (True, 2, state.paused)
    state = show(moved.hook, moved.name, **moved.place)
    assert state.paused is None
    assert [(c.number, c.action, c.who) for c in state.changes] == [(2, "resume", "bob"), (1, "pause", "ann")]
    assert (moved.stands(), moved.committed()) == ([10, 10], [10, 10])
    json.dumps([to_json(done), to_json(ended), to_json(state)])


def test_pausing_twice_or_resuming_what_is_not_paused_changes_nothing_and_says_so(moved, ask):
    assert ask(resume).warnings == ("The pipeline is not paused",)
    first = ask(pause, who="ann")
    before = moved.everything()
    again = ask(pause, who="bob")
    assert (again.changed, again.change, again.paused_by.who) == (False, first.change, "ann")
    assert again.warnings[0].startswith("The pipeline is paused already: ann did so at")
    end = moved.everything()
    ask(resume)
    assert not ask(resume).changed
    assert len(memory_of(moved).controls) == 2 and end[1] == before[1]


def test_a_dry_run_says_what_would_happen_and_changes_nothing(moved, ask):
    before = moved.everything()
    done = ask(pause, dry_run=True)
    assert (done.dry_run, done.changed, done.change) == (True, True, 1)
    assert not memory_of(moved).is_paused and moved.everything() == before


def test_without_a_reason_or_a_pipeline_nothing_is_changed(moved, ask, unique):
    with pytest.raises(ChangeRefused, match="no reason"):
        ask(pause, why=" ")
    with pytest.raises(PipelineUnknown):
        pause(moved.hook, "unheard-of", why="x", **moved.place)
    with pytest.raises(PipelineUnknown):
        pause(moved.hook, moved.name, why="x", ledger_topic=unique("no-ledger"))
    assert not memory_of(moved).controls


def test_an_attempt_at_work_is_not_disturbed(moved, ask):
    with moved.ledger() as at_work:
        assert not ask(pause).open_windows
        entry = at_work.plan(moved.window(at_work, 15, 15))
        done = ask(resume)
        assert [(o.number, o.run) for o in done.open_windows] == [(2, entry.window.run)]
        assert str(entry.window) in done.warnings[0]
        ask(pause)
        at_work.close({"group_id": moved.name}, entry.window.ends)
    assert (moved.stands(), memory_of(moved).is_paused) == ([15, 15], True)


@pytest.mark.parametrize("kept", [1, 100])
def test_a_pause_in_the_middle_of_a_window_is_seen_through_the_short_cut_that_the_window_leaves(piped, kept):
    """The very first window, and a later one, of which nothing but themselves is remembered."""
    for end in (5, 10):
        with piped.ledger(keep_windows=kept) as at_work:
            entry = at_work.plan(piped.window(at_work, end, end))
            pause(piped.hook, piped.name, why="x", **piped.place)
            at_work.close({"group_id": piped.name}, entry.window.ends)
        piped.settle()
        looking = piped.ledger()
        looking.peek()
        assert looking.hint is not None and looking.memory.is_paused
        with piped.ledger() as ledger:
            assert ledger.hint is not None and ledger.memory.is_paused
        resume(piped.hook, piped.name, why="x", **piped.place)
        with piped.ledger() as ledger:
            assert not ledger.memory.is_paused


def test_the_short_cut_moves_on_after_a_pause_is_over(moved, ask):
    ask(pause)
    ask(resume)
    hints = []
    for end in (11, 12, 13):
        with moved.ledger(keep_windows=1) as ledger:
            hints.append(ledger.hint.offset)
            ledger.close({"group_id": moved.name}, ledger.plan(moved.window(ledger, end, end)).window.ends)
    assert hints[0] < hints[1] < hints[2]


def test_of_many_who_press_at_once_each_sees_what_the_one_before_has_done(moved):
    def press(number):
        with KafkaHook(moved.hook.conn_id) as hook:
            if number == 3:
                return reset(hook, moved.name, ShiftBy(-2), why="a reset", **moved.place)
            return (pause if number % 2 else resume)(hook, moved.name, why=str(number), **moved.place)

    pause(moved.hook, moved.name, why="first", **moved.place)
    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(press, range(6)))
    memory = memory_of(moved)
    actions = [memory.controls[n].action for n in sorted(memory.controls)]
    assert actions == ["pause", "resume"] * (len(actions) // 2) + ["pause"] * (len(actions) % 2)
    assert len(actions) == 1 + sum(d.changed for n, d in enumerate(done) if n != 3)
    assert memory.is_paused == (actions[-1] == "pause")
    assert [c.action for c in memory.changes.values()] == ["reset"] and moved.stands() == moved.committed() == [8, 8]


def victim(moved, tmp_path, fault):
    options = {
        "task_id": "offsets",
        "action": "pause",
        "pipeline": moved.name,
        "why": "a crash",
        "kafka_conn_id": "kafka_control",
    }
    return Victim(PipelineOffsetsOperator, {**options, **moved.place}, "manual", fault=fault, once=tmp_path / "fault")


def test_killed_inside_its_transaction_a_pause_has_not_happened_and_delays_no_attempt(moved, ask, tmp_path):
    dead = victim(moved, tmp_path, "control.in_transaction")
    assert dead.wait() != 0 and dead.fired
    assert not read_pipeline(moved.hook, moved.name, moved.ledger_topic).memory.is_paused
    # An attempt finds the open transaction, and ends it.
    with moved.ledger() as ledger:
        assert not ledger.memory.is_paused
        ledger.plan(moved.window(ledger, 12, 12))
    assert ask(pause).change == 1
    assert [c.why for c in memory_of(moved).controls.values()] == ["x"]


def test_one_that_resumes_inside_its_transaction_sees_what_was_done_meanwhile(moved, tmp_path):
    zombie = victim(moved, tmp_path, "control.in_transaction:stop")
    try:
        zombie.wait_stopped()
        assert pause(moved.hook, moved.name, why="x", who="ann", **moved.place).changed
        zombie.wake()
        assert zombie.wait() == 0, zombie.tail()
        found = zombie.result()
        assert (found["changed"], found["paused_by"]["who"]) == (False, "ann")
        assert [c.who for c in memory_of(moved).controls.values()] == ["ann"]
    finally:
        zombie.end()


def test_forgetting_a_pipeline_forgets_that_it_was_paused(moved, ask):
    ask(pause)
    forget(moved.hook, moved.name, why="x", **moved.place)
    memory = memory_of(moved)
    assert not memory.is_paused and [(c.number, c.action) for c in memory.history] == [(2, "forget")]
