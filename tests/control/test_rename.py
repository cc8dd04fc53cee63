"""A group mirrors one pipeline, and a renamed pipeline continues at its position, on a real broker."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from functools import partial

import pytest

from airflow_kafka_spark import faults
from airflow_kafka_spark.cli.definition import main
from airflow_kafka_spark.control.pipelines import read_pipeline, to_json
from airflow_kafka_spark.control.preview import PlanOptions, preview_window
from airflow_kafka_spark.errors import ChangeRefused, Fenced, GroupOwned, PipelineRenamed, PipelineUnknown, WindowOpen
from airflow_kafka_spark.ledger.attempt import Ledger
from airflow_kafka_spark.ledger.interval import IntervalLedger
from airflow_kafka_spark.ledger.lag import LagMeter
from airflow_kafka_spark.operators.binding import Run, decide_binding, make_writer
from airflow_kafka_spark.triggers import WindowProbe
from airflow_kafka_spark.windows.binding import Binding
from airflow_kafka_spark.windows.interval import Interval
from airflow_kafka_spark.windows.memory import Memory
from tests.support.control import forget, pause, rebind, rename, replay, reset, skip
from tests.support.pipelines import make
from tests.support.runs import Victim

RUN = Run("dag", "run1", "task")
HOUR = datetime(2025, 6, 15, 15, tzinfo=timezone.utc)


@pytest.fixture
def named(moved, tmp_path):
    """A window of a pipeline of any name, planned by the operator itself, with the group of the one that has moved."""

    def planned(name, **options):
        given = {"topics": moved.topic, "group_id": moved.name, "pipeline": name, "kafka_conn_id": moved.hook.conn_id}
        operator = make("files", str(tmp_path / "table"), **{**given, **moved.place, **options})
        with operator.open_ledger(RUN) as ledger:
            ledger.bind(lambda whole: decide_binding(name, whole, Binding(make_writer(RUN)), is_free=False))
            return operator.plan(ledger, RUN)

    return planned


def ask(piped, to, **options):
    piped.settle()
    done = rename(piped.hook, piped.name, to, **{"why": "x", "who": "ann", **piped.place, **options})
    piped.settle()
    return done


def test_a_second_pipeline_does_not_begin_where_the_group_of_the_first_one_stands(moved, named, unique):
    other = unique("other")
    with pytest.raises(GroupOwned, match=f"mirrors pipeline `{moved.name}`") as refused:
        named(other)
    assert (refused.value.owner, refused.value.group_id) == (moved.name, moved.name)
    for said in ("group_id", "rename", "forget", f'pipeline="{moved.name}"'):
        assert said in str(refused.value)
    with pytest.raises(GroupOwned):
        named(other, starting_offsets="earliest")
    with pytest.raises(GroupOwned):
        preview_window(moved.hook, other, PlanOptions([moved.topic], moved.name), **moved.place)
    assert [(r.start, r.end) for r in named(other, group_id=unique("own")).ranges] == [(2, 20), (0, 20)]
    assert [r.start for r in named(moved.name).ranges] == [10, 10]


def test_an_interval_does_not_use_the_group_of_another_pipeline_either(moved, unique, tmp_path):
    other = unique("other")
    run = Run("dag", "run1", "task", interval=(HOUR, HOUR.replace(hour=HOUR.hour + 1)))
    given = {"topics": moved.topic, "group_id": moved.name, "pipeline": other, "kafka_conn_id": moved.hook.conn_id, **moved.place}
    operator = make("files", str(tmp_path / "table"), **given, window="interval", grace=0)
    with operator.open_ledger(run) as ledger, pytest.raises(GroupOwned):
        operator.plan(ledger, run)


def test_the_short_cut_of_another_pipeline_is_not_followed(moved):
    """If both pipelines are in one partition of the ledger, that short cut would lead past records that this one needs."""
    ledger = Ledger(moved.hook, "another", "run", group_id=moved.name, topic=moved.ledger_topic, hint_topics=(moved.topic,))
    with ledger:
        assert ledger.hint is None
    with moved.ledger() as ledger:
        assert ledger.hint is not None


def test_once_what_it_mirrored_is_forgotten_with_it_a_group_is_free(moved, named, unique):
    other = unique("other")
    forget(moved.hook, moved.name, why="x", **moved.place)
    moved.settle()
    with pytest.raises(GroupOwned):
        named(other)
    forget(moved.hook, moved.name, why="x", delete_group=True, group_id=moved.name, **moved.place)
    assert [r.start for r in named(other).ranges] == [2, 0]


def test_a_renamed_pipeline_continues_where_it_stood_and_is_refused_under_its_old_name(moved, named, unique):
    to = unique("renamed")
    done = ask(moved, to, dry_run=True)
    assert done.dry_run and moved.stands() == [10, 10]
    done = ask(moved, to)
    assert (done.renamed_to, done.last_window, done.group_id, done.change) == (to, 1, moved.name, done.change)
    json.dumps(to_json(done))
    window = named(to)
    assert window.number == 2 and [r.start for r in window.ranges] == [10, 10]
    assert moved.committed() == [10, 10]
    assert [c.name for c in read_pipeline(moved.hook, to, moved.ledger_topic).memory.history] == [moved.name]
    with pytest.raises(PipelineRenamed, match=f"is called `{to}` since .* by ann"):
        named(moved.name)
    with pytest.raises(PipelineRenamed):
        named(moved.name, group_id=unique("own"))
    waiting = LagMeter((moved.topic,), pipeline=moved.name, ledger_topic=moved.ledger_topic)
    for wait in (WindowProbe(pipeline=moved.name, after=0, **moved.place).check, waiting.measure):
        with pytest.raises(PipelineRenamed, match=f"Name `{to}` here, too"):
            wait(moved.hook)
    for change in (pause, skip, rebind, partial(reset, to="earliest"), partial(rename, to="x"), partial(replay, window=1)):
        with pytest.raises(PipelineRenamed, match=f"Name `{to}` here, too"):
            change(moved.hook, moved.name, why="x", **moved.place)
    forget(moved.hook, moved.name, why="the name is free again", **moved.place)
    moved.settle()
    assert [r.start for r in named(moved.name, group_id=unique("own")).ranges] == [2, 0]


def test_an_open_window_is_finished_under_its_old_name(moved, named, unique):
    """The sink has recorded a window under the old name. Under another name, it would apply the window again."""
    to = unique("renamed")
    window = moved.open_window(15, 15)
    with pytest.raises(GroupOwned):
        named(to)
    with pytest.raises(WindowOpen, match=str(window)):
        ask(moved, to)
    with moved.ledger("retry") as ledger:
        entry = ledger.reopen(ledger.memory.open_entry)
        ledger.close({"group_id": moved.name}, entry.window.ends)
    ask(moved, to)
    assert [r.start for r in named(to).ranges] == [15, 15]


def test_so_is_the_very_first_one_of_which_the_group_knows_nothing_yet(piped, unique, tmp_path):
    to = unique("renamed")
    given = {
        "topics": piped.topic,
        "group_id": piped.name,
        "kafka_conn_id": piped.hook.conn_id,
        "data_loss": "skip",
        **piped.place,
    }

    def plan(name, **facts):
        operator = make("files", str(tmp_path / "table"), **given, pipeline=name, **facts)
        run = Run("dag", "run1", "task", interval=(HOUR, HOUR.replace(hour=HOUR.hour + 1)))
        with operator.open_ledger(run) as ledger:
            window = operator.plan(ledger, run)
            ledger.plan(window)
            return window

    assert plan(piped.name).number == 1 and piped.committed() == [None, None]
    for facts in ({}, {"window": "interval", "grace": 0}):
        with pytest.raises(GroupOwned, match=piped.name):
            plan(to, **facts)
    forget(piped.hook, piped.name, why="x", discard_open=True, **piped.place)
    piped.settle()
    assert plan(to, window="interval", grace=0).interval is not None
    piped.settle()
    with pytest.raises(GroupOwned, match=to):
        plan(unique("third"))


def test_what_cannot_be_renamed_is_refused_and_nothing_changes(moved, unique):
    taken = unique("taken")
    with Ledger(moved.hook, taken, "run", group_id=unique("own"), topic=moved.ledger_topic) as ledger:
        ledger.plan(moved.window(ledger, 5, 5).__class__(taken, 1, (), "run", ""))
    before = moved.everything()
    with pytest.raises(ChangeRefused, match="already has a pipeline"):
        ask(moved, taken)
    of_interval = "x.20260101T000000Z-20260101T010000Z"
    for wrong, why in (
        ("", "cannot be a pipeline's name"),
        (moved.name, "this name already"),
        (of_interval, "interval of pipeline `x`"),
    ):
        with pytest.raises(ChangeRefused, match=why):
            ask(moved, wrong)
    with pytest.raises(ChangeRefused, match="no reason"):
        ask(moved, "x", why="")
    with pytest.raises(PipelineUnknown):
        rename(moved.hook, "unheard-of", "x", why="x", **moved.place)
    assert moved.everything() == before
    pause(moved.hook, moved.name, why="x", **moved.place)
    with pytest.raises(ChangeRefused, match="is paused"):
        ask(moved, "x")


def test_a_pipeline_of_intervals_keeps_its_name(piped):
    interval = Interval.of_ms(0, 3_600_000)
    with IntervalLedger(piped.hook, piped.name, "run", interval, topic=piped.ledger_topic) as ledger:
        window = piped.window(ledger, 5, 5, interval=(0, 3_600_000))
        entry = ledger.plan(window.__class__(**{**vars(window), "pipeline": ledger.pipeline}))
        ledger.close({}, {})
        assert entry.window.number == 1
    with pytest.raises(ChangeRefused, match=f'pipeline="{piped.name}"'):
        ask(piped, "x")


def test_an_attempt_under_the_old_name_and_a_rename_shut_each_other_out(moved, unique):
    to = unique("renamed")
    with moved.ledger() as at_work:
        ask(moved, to)
        with pytest.raises(Fenced):
            at_work.plan(moved.window(at_work, 15, 15))


def killed(**options):
    """Return the operator that renames a pipeline; the test kills its task."""
    from airflow_kafka_spark.operators import PipelineOffsetsOperator

    return PipelineOffsetsOperator(task_id="rename", action="rename", why="x", kafka_conn_id="kafka_control", **options)


def test_killed_inside_its_transaction_nothing_is_renamed(moved, named, unique, tmp_path):
    to = unique("renamed")
    options = {"pipeline": moved.name, "new_name": to, **moved.place}
    dead = Victim(killed, options, "manual", fault="change.in_transaction", once=tmp_path / "fault")
    assert dead.wait() != 0 and dead.fired
    assert faults.FAULT not in __import__("os").environ
    assert [r.start for r in named(moved.name).ranges] == [10, 10]
    moved.settle()
    assert read_pipeline(moved.hook, moved.name, moved.ledger_topic).memory.renamed_to is None
    ask(moved, to)
    assert [r.start for r in named(to).ranges] == [10, 10]


def test_the_command_says_where_it_continues(moved, unique, capsys):
    place = ["--bootstrap-servers", moved.kafka.bootstrap_servers, "--ledger-topic", moved.ledger_topic]
    to = unique("renamed")
    assert main(["rename", moved.name, "--to", to, "--why", "the DAG has another name", *place]) == 0
    assert f"is called {to}" in (output := capsys.readouterr().out) and "after window 1" in output
    moved.settle()
    assert main(["show", to, *place]) == 0
    assert f"renamed from {moved.name}" in capsys.readouterr().out
    assert isinstance(read_pipeline(moved.hook, to, moved.ledger_topic).memory, Memory)
