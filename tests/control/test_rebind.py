"""Rebinding a pipeline on a real broker: once, never for a window that is being moved, and seen by the next attempt."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from confluent_kafka import KafkaError, KafkaException

from airflow_kafka_spark.cli.definition import main
from airflow_kafka_spark.control.pipelines import read_pipeline, show, to_json
from airflow_kafka_spark.errors import AttemptAtWork, ChangeRefused, Fenced, GroupOwned, PipelineUnknown
from airflow_kafka_spark.ledger import attempt
from airflow_kafka_spark.ledger.attempt import Ledger
from airflow_kafka_spark.ledger.group import find_group_owner
from airflow_kafka_spark.ledger.interval import IntervalLedger
from airflow_kafka_spark.operators.binding import decide_binding
from airflow_kafka_spark.windows.binding import Binding, Endpoint, Writer
from airflow_kafka_spark.windows.interval import Interval
from airflow_kafka_spark.windows.model import Window
from airflow_kafka_spark.windows.offset_specs import ShiftBy
from tests.support.control import rebind, rename, reset, skip

TASK = Writer("dag", "task", deployment="prod")


def bound_to(place: str, decided: int = 0) -> Binding:
    return Binding(TASK, Endpoint({"path": place}), decided=decided)


def move(piped, *ends, binding=None, **options):
    """Complete a window that is bound."""
    with piped.ledger(**options) as ledger:
        if binding is not None:
            ledger.bind(lambda whole: binding)
        entry = ledger.plan(piped.window(ledger, *ends, binding=binding))
        ledger.close({"group_id": piped.name}, entry.window.ends)
    piped.settle()


@pytest.fixture
def ask(piped):
    def asked(**options):
        piped.settle()
        done = rebind(piped.hook, piped.name, **{"why": "x", "who": "ann", **piped.place, **options})
        piped.settle()
        return done

    return asked


@pytest.mark.parametrize("kept", [1, 100])
def test_what_a_pipeline_is_bound_to_is_seen_through_every_short_cut_and_after_a_reset(piped, kept):
    move(piped, 5, 5, binding=bound_to("a"), keep_windows=kept)
    for end in (6, 7, 8):
        # A window of a release without bindings.
        move(piped, end, end, keep_windows=kept)
        with piped.ledger() as ledger:
            assert ledger.hint is not None and ledger.memory.binding == bound_to("a")
    piped.reset(ShiftBy(-2))
    with piped.ledger() as ledger:
        assert ledger.memory.binding == bound_to("a")
    assert show(piped.hook, piped.name, **piped.place).binding == bound_to("a")


def test_it_counts_until_a_window_is_bound_anew(piped, ask):
    move(piped, 5, 5, binding=bound_to("a"), keep_windows=1)
    done = ask()
    assert (done.change, done.changed, done.binding) == (1, True, bound_to("a"))
    again = ask()
    assert (again.change, again.changed) == (1, False) and "already" in again.warnings[0]
    for _ in range(3):
        # Even if much is forgotten meanwhile.
        move(piped, *([piped.stands()[0] + 1] * 2), keep_windows=1)
    with piped.ledger() as ledger:
        assert ledger.memory.find_rebind_after(ledger.memory.binding).number == 1
    move(piped, *([piped.stands()[0] + 1] * 2), binding=bound_to("b", decided=1), keep_windows=1)
    memory = piped.memory
    assert memory.binding == bound_to("b", decided=1) and memory.find_rebind_after(memory.binding) is None
    for _ in range(3):
        # Short cuts lead past the record of the rebind, but a later reader may begin before it.
        with piped.ledger() as ledger:
            made = decide_binding(piped.name, ledger.memory, bound_to("b"), is_free=False)
        move(piped, *([piped.stands()[0] + 1] * 2), binding=made, keep_windows=1)
    assert piped.memory.find_rebind_after(piped.memory.binding) is None, "it was used"
    assert ask().change == 2
    json.dumps(to_json(done))


def test_an_open_window_may_go_elsewhere_only_if_no_attempt_works_on_it(piped, ask):
    piped.open_window(5, 5, binding=bound_to("a"))
    before = piped.everything()
    for running in (None, True):
        with pytest.raises(AttemptAtWork):
            ask(running=running)
    assert ask(running=False, dry_run=True).dry_run and piped.everything() == before
    done = ask(running=False)
    assert [o.number for o in done.open_windows] == [1]
    memory = piped.memory
    assert memory.find_rebind_after(bound_to("a"), window=1).number == 1
    assert memory.find_rebind_after(bound_to("a"), window=2) is None


def test_without_a_reason_or_a_pipeline_nothing_is_changed(piped, ask, moved):
    with pytest.raises(ChangeRefused, match="no reason"):
        ask(why="")
    with pytest.raises(PipelineUnknown):
        rebind(piped.hook, "unheard-of", why="x", **piped.place)
    assert not piped.memory.controls


def test_the_command_says_what_it_was_bound_to(piped, capsys):
    move(piped, 5, 5, binding=bound_to("a"))
    place = ["--bootstrap-servers", piped.kafka.bootstrap_servers, "--ledger-topic", piped.ledger_topic]
    assert main(["rebind", piped.name, "--why", "it moves", *place]) == 0
    output = capsys.readouterr().out
    assert "task `dag.task` of deployment `prod`" in output and "Goes to path a" in output and "it moves" in output
    assert main(["show", piped.name, *place]) == 0
    assert "Goes to path a" in capsys.readouterr().out


def interval_ledger(piped, hour, run):
    interval = Interval.of_ms(hour * 3_600_000, (hour + 1) * 3_600_000)
    return IntervalLedger(piped.hook, piped.name, run, interval, topic=piped.ledger_topic)


def test_of_intervals_that_bind_a_pipeline_at_once_only_one_does_and_the_others_see_it(piped):
    with Ledger(piped.hook, "x", "x", topic=piped.ledger_topic):
        pass  # so that the ledger is there

    def bind(hour):
        def decide(whole):
            if whole.binding is not None and whole.binding.destination.place != {"path": str(hour)}:
                raise ChangeRefused(f"bound to {whole.binding.destination.place['path']}")
            return bound_to(str(hour))

        with interval_ledger(piped, hour, f"run{hour}") as ledger:
            try:
                ledger.bind(decide)
            except (ChangeRefused, Fenced) as error:
                return str(error)
            bounds = (ledger.interval.start_ms, ledger.interval.end_ms)
            ledger.plan(Window(ledger.pipeline, 1, (), f"run{hour}", "", interval=bounds, binding=bound_to(str(hour))))
            return ""

    with ThreadPoolExecutor(4) as pool:
        refusals = list(pool.map(bind, range(4)))
    piped.settle()
    (won,) = [hour for hour, refused in enumerate(refusals) if not refused]
    memory = read_pipeline(piped.hook, piped.name, piped.ledger_topic).memory
    assert memory.binding.destination.place == {"path": str(won)}
    assert [text for text in refusals if text] == [f"bound to {won}."] * 3


class Failing:
    """A producer whose commit fails with an error that leaves its outcome open, before or after the commit."""

    def __init__(self, producer, *, is_committed):
        self._producer, self._is_committed = producer, is_committed

    def __getattr__(self, name):
        return getattr(self._producer, name)

    def commit_transaction(self, seconds):
        if self._is_committed:
            self._producer.commit_transaction(seconds)
        raise KafkaException(KafkaError(KafkaError.UNKNOWN))


@pytest.mark.parametrize("is_committed", [True, False], ids=["committed", "left open"])
@pytest.mark.parametrize("purpose", ["binding", "owner"])
def test_a_binding_and_an_owner_whose_outcome_is_unknown_are_read_again(piped, monkeypatch, purpose, is_committed):
    real, failed = attempt.make_fencing_producer, []

    def fencing_producer(config, name, *arguments):
        producer = real(config, name, *arguments)
        if not name.endswith(f".{purpose}") or failed:
            return producer
        failed.append(name)
        return Failing(producer, is_committed=is_committed)

    monkeypatch.setattr(attempt, "make_fencing_producer", fencing_producer)
    binding = Binding(TASK, origin=Endpoint(details={"group": piped.name}))
    with interval_ledger(piped, 0, "run") as ledger:
        ledger.bind(lambda whole: binding)
        bounds = (ledger.interval.start_ms, ledger.interval.end_ms)
        ledger.plan(Window(ledger.pipeline, 1, (), "run", "", interval=bounds, binding=binding))
        assert failed and ledger.parent_memory.binding.owns
        assert ledger.find_other_owner(piped.name) is None
    with Ledger(piped.hook, "other", "x", topic=piped.ledger_topic) as other:
        assert other.find_other_owner(piped.name) == piped.name


def plan_with(piped, pipeline, slot, decided=0, close=True):
    """Plan the next window of a pipeline that reads a slot, as the operator does; optionally close it."""
    binding = Binding(TASK, origin=Endpoint({"slot": slot}), decided=decided)
    with Ledger(piped.hook, pipeline, f"run of {slot}", topic=piped.ledger_topic) as ledger:
        ledger.exclusive_of = lambda origin: origin.place.get("slot", "")
        if (entry := ledger.memory.open_entry) is not None:
            entry = ledger.reopen(entry)
        else:
            ledger.bind(lambda whole: binding)
            ledger.refuse_taken()
            window = Window(pipeline, ledger.memory.last_used + 1, (), f"run of {slot}", "", binding=binding)
            entry = ledger.plan(window)
        if close:
            ledger.close({}, {})
    piped.settle()
    return entry


def test_a_slot_that_a_pipeline_has_got_by_a_rebind_is_its_own_and_the_one_that_it_had_is_free(piped):
    one, two, three = (f"{piped.name}-{n}" for n in (1, 2, 3))
    plan_with(piped, one, "a")
    plan_with(piped, one, "b", decided=1)
    plan_with(piped, two, "a")
    for _ in range(2):
        with pytest.raises(GroupOwned, match=f"`b` mirrors pipeline `{one}`"):
            plan_with(piped, three, "b")
        with pytest.raises(GroupOwned, match=f"`a` mirrors pipeline `{two}`"):
            plan_with(piped, one, "a", decided=2)
    memory = read_pipeline(piped.hook, one, piped.ledger_topic).memory
    assert (memory.last_number, memory.open_entry, memory.binding.origin.place) == (2, None, {"slot": "b"})
    assert plan_with(piped, one, "b", decided=2).window.number == 3


def test_a_command_moves_the_group_of_the_newest_window_and_none_that_another_pipeline_uses(piped):
    def plan(pipeline, group, close):
        binding = Binding(TASK, origin=Endpoint(details={"group": group}))
        with Ledger(piped.hook, pipeline, f"run at {group}", topic=piped.ledger_topic, group_id=group) as ledger:
            ledger.bind(lambda whole: binding)
            window = replace(piped.window(ledger, 5, 5), pipeline=pipeline, binding=binding)
            ledger.plan(window)
            if close:
                ledger.close({"group_id": group}, window.ends)
        piped.settle()

    one, two, first, second = (f"{piped.name}-{n}" for n in ("p", "q", "g", "g2"))
    plan(one, first, close=True)
    plan(one, second, close=False)
    piped.hook.delete_group(first)  # as if the window had committed no offsets
    plan(two, first, close=True)
    with pytest.raises(GroupOwned, match=f"`{first}` mirrors pipeline `{two}`"):
        reset(piped.hook, one, "latest", group_id=first, discard_open=True, why="a slip", **piped.place)
    done = skip(piped.hook, one, running=False, why="it is in the way", **piped.place)
    assert done.group_id == second
    with Ledger(piped.hook, two, "next", topic=piped.ledger_topic, group_id=first) as ledger:
        assert ledger.find_other_owner(first) is None
    assert find_group_owner(two, piped.hook.read_committed_offsets(first, [piped.tp(0)])) is None


def test_the_ledger_knows_a_group_of_a_pipeline_that_was_renamed_by_its_new_name(piped):
    move(piped, 5, 5)
    rename(piped.hook, piped.name, f"{piped.name}-2", why="the DAG has another name", **piped.place)
    piped.settle()
    for pipeline, owner in (("another", f"{piped.name}-2"), (f"{piped.name}-2", None)):
        with Ledger(piped.hook, pipeline, "x", topic=piped.ledger_topic) as ledger:
            assert ledger.find_other_owner(piped.name) == owner


def test_of_two_new_pipelines_that_take_a_slot_at_once_the_one_that_records_it_first_keeps_it(piped, monkeypatch):
    one, two = f"{piped.name}-1", f"{piped.name}-2"
    take = Ledger._take

    def overtaken(ledger, name):
        monkeypatch.setattr(Ledger, "_take", take)
        plan_with(piped, two, "a", close=False)
        return take(ledger, name)

    monkeypatch.setattr(Ledger, "_take", overtaken)
    with pytest.raises(GroupOwned, match=f"mirrors pipeline `{two}`"):
        plan_with(piped, one, "a")
    with Ledger(piped.hook, one, "x", topic=piped.ledger_topic) as ledger:
        assert ledger.memory.is_blank and ledger.memory.binding is None, "its window is withdrawn"
    assert plan_with(piped, two, "a").attempt.number == 2
    assert plan_with(piped, one, "b").window.number == 1


def test_a_pipeline_whose_attempt_was_killed_before_it_recorded_its_slot_does_so_in_the_retry_or_is_refused(piped, monkeypatch):
    one, two, three = (f"{piped.name}-{n}" for n in (1, 2, 3))
    with monkeypatch.context() as killed:
        killed.setattr(Ledger, "_take", lambda ledger, name: None)
        for name, slot in ((one, "a"), (two, "b")):
            plan_with(piped, name, slot, close=False)
    plan_with(piped, one, "a", close=False)
    plan_with(piped, three, "b")
    with pytest.raises(GroupOwned, match=f"`a` mirrors pipeline `{one}`"):
        plan_with(piped, f"{piped.name}-4", "a")
    with pytest.raises(GroupOwned, match=f"`b` mirrors pipeline `{three}`"):
        plan_with(piped, two, "b")
    assert plan_with(piped, one, "a").attempt.number == 3
