"""Every order of the steps of two attempts and one command: each offset is in the sink exactly once, or a user has given it up.

See :mod:`tests.support.ledger_model`: a kill after every step and an attempt that sleeps and wakes are among these orders.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from airflow_kafka_spark.bad_records import dead_letters
from airflow_kafka_spark.errors import (
    BindingChanged,
    ChangeRefused,
    GroupOwned,
    IntervalOverlaps,
    PipelineRenamed,
    SinkRecordMissing,
    SourceChanged,
)
from airflow_kafka_spark.ledger.attempt import ChangeLedger, Ledger
from airflow_kafka_spark.ledger.interval import IntervalLedger
from airflow_kafka_spark.ledger.topic import Hint
from airflow_kafka_spark.operators.from_kafka import FromKafkaOperator
from airflow_kafka_spark.operators.kafka_to_sink import SinkMove
from airflow_kafka_spark.sinks.kafka.tasks import dead_letters as letters_of_tasks
from airflow_kafka_spark.windows.memory import Memory
from airflow_kafka_spark.windows.report import Report
from tests.support import ledger_model
from tests.support.control import forget, pause, rebind, rename, replay, reset, resume, skip
from tests.support.ledger_model import (
    DEAD,
    GROUP,
    HOOK,
    PIPELINE,
    ModelOperator,
    ModelSink,
    Rules,
    Violation,
    World,
    attempt,
    each_once,
    explore,
    modelled,
    run_alone,
    stopped,
)

FIRST, ONE, OTHER, LAST = (partial(attempt, run) for run in ("first", "one", "other", "last"))
HOUR = partial(attempt, "hour", hour=0)
NEXT_HOUR = partial(attempt, "next-hour", hour=1)
BESIDE, LAST_BESIDE = (partial(attempt, run, beside=True) for run in ("one", "last"))
CLEARED = partial(attempt, "first", max_tries=1, on_rerun="replay")
DISJOINT = {
    "records": 0,
    "timeouts": 0,
    "at_once": lambda actor, step: step[0] in ("log", "committed", "fence", "sink.look", "offsets", "commit"),
}
"""An interval and a progress window have transactional ids of their own, and names of their own in the sink: what counts is the
order of what they write and of what they read in the ledger."""
BESIDE_COMMANDS = {"records": 0, "timeouts": 0}
FIRST_HOUR = "19700101T000000Z-19700101T010000Z"
COMMAND = {"why": "a test", "who": "somebody"}
SKIP = partial(skip, HOOK, PIPELINE, group_id=GROUP, running=False, **COMMAND)
RESET = partial(reset, HOOK, PIPELINE, "latest", group_id=GROUP, discard_open=True, **COMMAND)
REPLAY = partial(replay, HOOK, PIPELINE, window=1, **COMMAND)
RENAME = partial(rename, HOOK, PIPELINE, "renamed", group_id=GROUP, **COMMAND)
FORGET = partial(forget, HOOK, PIPELINE, discard_open=True, **COMMAND)
REBIND = partial(rebind, HOOK, PIPELINE, running=False, **COMMAND)
ELSEWHERE = partial(attempt, "other", uri="model://elsewhere")
PUBLISHED, LAST_PUBLISHED = (partial(attempt, run, publishes=True) for run in ("one", "last"))
RENAMED, LAST_RENAMED = (partial(attempt, run, pipeline="renamed") for run in ("one", "last"))
PAUSE, RESUME = (partial(command, HOOK, PIPELINE, **COMMAND) for command in (pause, resume))


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def model():
    with modelled():
        yield


def one_window() -> World:
    """Window 1 is complete, and there is one more record."""
    return run_alone(World(end=1), FIRST, "first")._replace(end=2)


def open_window() -> World:
    """Window 2 is planned, and its attempt is dead."""
    return stopped(one_window(), ONE, "dead", "commit")


def taken_window() -> World:
    """The sink has window 2, too, and its attempt is dead."""
    return stopped(one_window(), ONE, "dead", "sink.commit")


def two_splits() -> World:
    """Window 1 is published, and there are two more records, each of which will be a split."""
    return run_alone(World(end=1), partial(attempt, "first", publishes=True), "first")._replace(end=3)


def half_published() -> World:
    """The attempt at window 2 has died with the transaction of its first split open."""
    return stopped(two_splits(), PUBLISHED, "dead", "publish")


def first_published_in_part() -> World:
    """The attempt at window 1 has died after the second of its three splits."""
    return stopped(World(end=3), PUBLISHED, "dead", "commit", times=3)


def one_hour() -> World:
    """The first hour is complete, and the next one is over."""
    return run_alone(World(), HOUR, "hour")._replace(end=4)


# --- the promise is kept ----------------------------------------------------------------------------------------------------


def test_two_tries_of_a_new_pipeline(model):
    found = explore(World(end=1), {"A": ONE, "B": ONE}, [ONE, LAST])
    assert found.ends["A"].keys() >= {"done", "Fenced"}
    assert found.states > 1_000


def test_two_runs_meet_an_open_window(model):
    explore(open_window(), {"A": ONE, "B": OTHER}, [ONE, LAST], records=0)


def test_two_tries_of_a_window_that_the_sink_has_taken(model):
    explore(taken_window(), {"A": ONE, "B": ONE}, [ONE, LAST], records=0)


@pytest.mark.parametrize("world", [open_window, taken_window], ids=["planned", "taken"])
@pytest.mark.parametrize("command", [SKIP, RESET], ids=["skip", "reset"])
def test_a_window_is_given_up_while_an_attempt_is_at_work_on_it(model, world, command):
    records = int(command is RESET and world is open_window)
    found = explore(world(), {"A": ONE, "command": command}, [ONE, LAST], records=records)
    assert found.ends["command"]["done"]


@pytest.mark.parametrize("world", [open_window, taken_window], ids=["planned", "taken"])
def test_a_pipeline_is_forgotten_while_an_attempt_is_at_work(model, world):
    found = explore(world(), {"A": ONE, "forget": FORGET}, [ONE, LAST], records=0)
    assert found.ends["forget"]["done"]


def test_two_tries_of_a_window_that_is_published_split_by_split(model):
    explore(two_splits(), {"A": PUBLISHED, "B": PUBLISHED}, [PUBLISHED, LAST_PUBLISHED], records=0, timeouts=0)


def test_a_first_window_that_is_published_in_part(model):
    explore(first_published_in_part(), {"A": PUBLISHED}, [PUBLISHED, LAST_PUBLISHED], records=0, timeouts=0)


def published_as_said(world: World) -> None:
    """The change that gives a window up says how many of its records are there, and no more of them come."""
    for change in world.memory().changes.values():
        said = sum(part.records for part in change.landed or ())
        assert said == sum(1 for taken in world.taken if taken.number in change.discarded), f"discarded: {change.discarded}"


def test_a_window_that_is_published_in_part_is_given_up_while_attempts_are_at_work_on_it(model):
    found = explore(
        half_published(), {"A": PUBLISHED, "skip": SKIP}, [PUBLISHED, LAST_PUBLISHED], records=0, check=published_as_said
    )
    assert found.ends["skip"]["done"]


def test_a_pipeline_is_paused_while_an_attempt_is_at_work(model):
    found = explore(open_window(), {"A": ONE, "pause": PAUSE}, [RESUME, ONE, LAST], records=0)
    assert "AirflowSkipException" in found.ends["A"]


def replayed_at_most_once(world: World) -> None:
    assert max(taken.replay for taken in world.taken if taken.number == 1) <= 1


def test_a_replay_is_asked_for_while_an_attempt_is_at_work(model):
    found = explore(
        one_window()._replace(end=1),
        {"A": partial(attempt, "first", max_tries=1), "replay": REPLAY},
        [partial(attempt, "first", max_tries=1), LAST],
        check=replayed_at_most_once,
    )
    assert found.ends["replay"]["done"]


def test_two_tries_of_a_cleared_task(model):
    explore(one_window()._replace(end=1), {"A": CLEARED, "B": CLEARED}, [CLEARED, LAST], records=0, check=replayed_at_most_once)


def test_an_interval_beside_a_progress_window(model):
    explore(one_hour(), {"A": NEXT_HOUR, "B": BESIDE}, [NEXT_HOUR, LAST_BESIDE], **DISJOINT)


def finish_hours() -> None:
    """Move the remaining offsets by hours, unless a longer interval has them."""
    for hour in (1, 2):
        with suppress(IntervalOverlaps):
            attempt(f"last-{hour}", hour=hour)


LONG = partial(attempt, "long", hour=1, length=2)


@pytest.mark.parametrize("finish", [[NEXT_HOUR, LONG], [LONG, NEXT_HOUR]], ids=["the hour first", "the longer one first"])
def test_two_intervals_that_overlap(model, finish):
    def retried(act):
        def run() -> None:
            with suppress(IntervalOverlaps):
                act()

        return run

    world = one_hour()._replace(end=6)
    found = explore(world, {"A": NEXT_HOUR, "B": LONG}, [*map(retried, finish), finish_hours], **DISJOINT)
    assert all(found.ends[name].keys() >= {"done", "IntervalOverlaps"} for name in "AB")


def test_two_tries_of_an_interval(model):
    explore(one_hour(), {"A": NEXT_HOUR, "B": NEXT_HOUR}, [NEXT_HOUR, LAST_BESIDE], records=0)


def test_intervals_are_paused_while_one_is_moved(model):
    found = explore(one_hour(), {"A": NEXT_HOUR, "pause": PAUSE}, [RESUME, NEXT_HOUR, LAST_BESIDE], **BESIDE_COMMANDS)
    assert "AirflowSkipException" in found.ends["A"]


def test_intervals_are_forgotten_while_one_is_planned_and_moved(model):
    explore(one_hour(), {"A": NEXT_HOUR, "forget": FORGET}, [HOUR, NEXT_HOUR, LAST_BESIDE], **BESIDE_COMMANDS)


def replayed_hour(world: World) -> None:
    assert world.moved[0] == world.moved[1] == 1
    assert max(taken.replay for taken in world.taken) <= 1


def test_an_interval_is_asked_for_once_more_while_it_is_moved_once_more(model):
    again = partial(attempt, "hour", hour=0, max_tries=1)
    ask = partial(replay, HOOK, PIPELINE, name=FIRST_HOUR, **COMMAND)
    explore(one_hour()._replace(end=2), {"A": again, "ask": ask}, [again, LAST_BESIDE], check=replayed_hour, **BESIDE_COMMANDS)


def test_an_interval_finds_the_record_of_the_one_before_while_that_one_is_moved_once_more(model):
    """The interval is not refused as one whose sink has lost its record (:class:`SinkRecordMissing`)."""
    next_hour = partial(attempt, "next-hour", hour=1, asks=True)
    again = partial(attempt, "hour", hour=0, max_tries=1, on_rerun="replay")
    looks = {
        **DISJOINT,
        "switches": 2,
        "at_once": lambda actor, step: step[0] != "sink.look" and DISJOINT["at_once"](actor, step),
    }
    found = explore(one_hour(), {"A": again, "B": next_hour}, [again, next_hour, LAST_BESIDE], check=replayed_hour, **looks)
    assert found.ends["B"].keys() >= {"done"} and "SinkRecordMissing" not in found.ends["B"]
    lost = one_hour()
    assert lost.taken
    with pytest.raises(SinkRecordMissing, match="has no record of pipeline"):
        run_alone(lost._replace(taken=()), next_hour, "next-hour")


def test_an_old_interval_is_moved_once_more_while_the_records_of_its_window_are_removed(model):
    next_hour = partial(attempt, "next-hour", hour=1, keep_windows=1)
    again = partial(attempt, "hour", hour=0, max_tries=1, on_rerun="replay", keep_windows=1)
    found = explore(
        one_hour(),
        {"A": next_hour, "B": again},
        [again, next_hour, LAST_BESIDE],
        check=replayed_hour,
        **BESIDE_COMMANDS,
        switches=2,
    )
    assert found.ends["A"]["done"] and found.ends["B"]["done"]


def finish_wherever() -> None:
    """Move the remaining offsets to the place that the pipeline is bound to."""
    for run in (ONE, ELSEWHERE, LAST, partial(attempt, "last", uri="model://elsewhere")):
        with suppress(BindingChanged):
            run()


def test_an_open_window_is_allowed_another_sink_while_an_attempt_asks_for_that(model):
    found = explore(open_window(), {"A": ELSEWHERE, "rebind": REBIND}, [finish_wherever], records=0)
    assert found.ends["A"].keys() >= {"done", "DestinationChanged"}


def given_up_window() -> World:
    """Window 1 was given up with its record, the only one."""
    return run_alone(stopped(World(end=1), ONE, "dead", "commit"), SKIP, "skip")


def asked_for_is_moved(world: World) -> None:
    was_asked_for = any(change.action == "reset" for change in world.memory().changes.values())
    assert world.moved[0] == was_asked_for


def test_a_pipeline_is_moved_back_while_attempts_are_at_work(model):
    back = partial(reset, HOOK, PIPELINE, "earliest", group_id=GROUP, **COMMAND)
    found = explore(given_up_window(), {"A": ONE, "back": back}, [ONE, LAST], records=0, check=asked_for_is_moved)
    assert found.ends["back"]["done"]


def finish_rename() -> None:
    """Give the pipeline its new name once its window is complete, unless it has this name already."""
    with suppress(PipelineRenamed):
        ONE()
    with suppress(ChangeRefused, PipelineRenamed):
        RENAME()


@pytest.mark.parametrize(
    "attempts", [{"A": ONE}, {"A": RENAMED}, {"A": ONE, "B": RENAMED}], ids=["the old name", "the new name", "both"]
)
def test_a_pipeline_is_renamed_while_attempts_are_at_work(model, attempts):
    found = explore(one_window(), {**attempts, "rename": RENAME}, [finish_rename, LAST_RENAMED], records=0)
    assert found.ends["rename"]["done"]


def is_own(actor: str, step: tuple[Any, ...]) -> bool:
    """Return True for a step that no other actor sees, because the pipelines of all actors have only groups in common."""
    kind, *args = step
    if kind in ("fence", "produce"):
        return not args[0].endswith((".owner", ".binding"))
    return kind not in ("commit", "sink.commit", "read") or (kind == "read" and args[1][0].startswith(b'["%s' % actor.encode()))


TAKES = {"records": 0, "timeouts": 0, "at_once": is_own, "switches": 4}


def taker(pipeline: str, run: str, group: str, hour: int | None = None):
    """Return an attempt at a window of a pipeline that records who uses its group, and may be refused the group."""

    def run_it() -> None:
        attempt(f"{pipeline}/{run}", pipeline=pipeline, group=group, hour=hour, takes=True)

    return run_it


def refused(act):
    """Return an attempt that may be refused the group. A window that was planned with it then stays open."""

    def run() -> None:
        with suppress(GroupOwned, SourceChanged):
            act()

    return run


def each_its_own(world: World, groups: int):
    """Return the condition that from here on, no more pipelines move records than there are groups for them."""
    before = {taken[:2] for taken in world.taken}

    def enough(world: World) -> None:
        users = {taken.pipeline.partition(".")[0] for taken in world.taken if taken[:2] not in before}
        assert len(users) <= groups, f"{sorted(users)} have moved records with {groups} groups"

    return enough


def an_hour_of_a_group() -> World:
    """The first hour is complete, and its attempt has died before it has moved its group. The next hour is over."""
    with patch.object(IntervalLedger, "follow", lambda *args: {}):
        return run_alone(World(), taker("p", "0", "g", 0), "p")._replace(end=4)


def compete(world: World, acts: dict[str, Any], finish=(), groups: int = 1, **options: Any):
    """Explore pipelines of which some need the same group.

    :param finish: the last actions; by default, each act once more.
    """
    finish = [*map(refused, finish or acts.values())]
    found = explore(world, acts, finish, always=each_its_own(world, groups), **{**TAKES, **options})
    assert all(found.ends[name].keys() >= {"done", "GroupOwned"} for name in "pq"), found.ends
    return found


def test_two_new_pipelines_with_one_group(model):
    compete(World(end=1), {"p": taker("p", "1", "g"), "q": taker("q", "1", "g")})


def test_a_pipeline_gets_another_group_while_a_new_one_begins_with_it(model):
    world = run_alone(World(end=1), taker("p", "1", "g"), "p")._replace(end=2)
    compete(world, {"p": taker("p", "2", "other"), "q": taker("q", "1", "other")})


def test_a_window_with_another_group_is_given_up_while_a_new_pipeline_begins_with_it(model):
    world = run_alone(World(end=1), taker("p", "1", "g"), "p")._replace(end=2)
    p, q = taker("p", "2", "other"), taker("q", "1", "other")
    compete(world, {"p": p, "q": q, "skip": partial(skip, HOOK, "p", running=False, **COMMAND)}, [p, q])


def test_intervals_get_another_group_while_a_new_pipeline_begins_with_it(model):
    compete(an_hour_of_a_group(), {"p": taker("p", "1", "other", 1), "q": taker("q", "1", "other")})


def test_intervals_come_back_to_their_group_while_a_new_pipeline_begins_with_it(model):
    def two_others() -> None:
        taker("r", "1", "other")()
        taker("q", "1", "g")()

    p = taker("p", "1", "other", 1)
    compete(an_hour_of_a_group(), {"p": p, "q": two_others}, [p, taker("p", "1", "g", 1), two_others], groups=2, switches=3)


def tolerant(run: str, *bad: int, **options: Any):
    """Return an attempt with a dead letter topic.

    :param bad: offsets of the records that it finds bad.
    """
    return partial(attempt, run, bad=bad, **options)


TWO_SCHEMAS = {"A": tolerant("one", 0), "B": tolerant("one", 1)}
"""Attempts at one window of two records, each of which finds another one bad."""
NONE_BAD = [tolerant("one"), tolerant("last")]
LETTERS = {"records": 0, "timeouts": 0}


def letters_sent() -> World:
    """Window 2 has two records. The first was sent as a dead letter, and the attempt is dead."""
    return stopped(one_window()._replace(end=3), tolerant("one", 1), "dead", "commit", times=2)


def test_two_tries_of_a_window_with_dead_letters(model):
    found = explore(World(end=2), TWO_SCHEMAS, NONE_BAD, **LETTERS)
    assert found.ends["A"].keys() >= {"done", "Fenced"}


@pytest.mark.parametrize("command", [SKIP, RESET], ids=["skip", "reset"])
def test_a_window_with_dead_letters_is_given_up_while_an_attempt_is_at_work_on_it(model, command):
    found = explore(letters_sent(), {"A": tolerant("one", 2), "command": command}, NONE_BAD, **LETTERS)
    assert found.ends["command"]["done"]


def test_a_pipeline_is_forgotten_whose_open_window_has_sent_dead_letters(model):
    done = []
    world = run_alone(letters_sent(), lambda: done.append(FORGET()), "forget")
    assert "Dead letters and routed records of window 2 were sent already" in done[0].warnings[0]
    assert run_alone(world, tolerant("one", 1), "one").moved == {0: 1, 1: 2, 2: 1}


def test_an_interval_with_dead_letters_beside_a_progress_window(model):
    hour, beside = tolerant("next-hour", 2, hour=1), tolerant("one", 3, beside=True)
    finish = [tolerant("next-hour", hour=1), tolerant("last", beside=True)]
    explore(one_hour(), {"A": hour, "B": beside}, finish, **DISJOINT, switches=3)


def test_two_tries_of_a_cleared_task_with_dead_letters(model):
    """A replay sends no letter again that the window has sent, and later replays find others bad."""

    def each_letter_once(world: World) -> None:
        letters = Counter(o for taken in world.taken if taken.pipeline == DEAD for o in taken.offsets)
        assert letters[0] == 1 and max(letters.values()) == 1

    def cleared(*bad: int):
        return tolerant("first", *bad, max_tries=1, on_rerun="replay")

    world = run_alone(World(end=2), tolerant("first", 0), "first")
    acts = {"A": cleared(0), "B": cleared(0, 1)}
    explore(world, acts, [cleared(0), tolerant("last")], **LETTERS, always=each_letter_once)


# --- a rule is taken away, and it is noticed -----------------------------------------------------------------------------------


def test_a_hint_that_leads_behind_markers(model):
    hint = property(lambda ledger: Hint(ledger.topic.topic_id, ledger._partition, ledger.memory.oldest_offset))
    for always in (None, partial(each_once, hints=False)):
        patches = [patch.object(Ledger, "claim_hint", hint)]
        given = {"records": 0, "timeouts": 0, "always": always}
        text = noticed(first_published_in_part(), {"A": PUBLISHED}, [PUBLISHED, LAST_PUBLISHED], patches=patches, **given)
        assert ("doubled" if always else "from the hint of group") in text


def noticed(*args, patches=(), **options) -> str:
    """Return the failures that the model finds without a rule."""
    with modelled(*patches), pytest.raises(Violation) as caught:
        explore(*args, **options)
    return str(caught.value)


def test_without_a_fence(model):
    assert noticed(one_window(), {"A": ONE, "B": ONE}, [ONE, LAST], rules=Rules(fences=False))


def test_looking_before_the_fence(model):
    def look_first(ledger):
        ledger.hint = ledger.hint or ledger._find_hint()
        ledger._planner = ledger._closer = None
        memory = ledger.read()
        ledger._planner, ledger._closer = ledger._fence("plan"), ledger._fence("close")
        return memory

    patches = [patch.object(Ledger, "_fence_and_read", look_first)]
    assert noticed(one_window(), {"A": ONE, "B": ONE}, [ONE, LAST], patches=patches)


def test_the_sink_says_that_it_has_a_window_before_it_has_its_rows(model):
    text = noticed(one_window(), {"A": ONE}, [ONE, LAST], rules=Rules(takes_rows_first=False))
    assert "not in the sink" in text or "never moved" in text


def test_closing_before_the_sink_has_committed(model):
    def move(self, window, ledger):
        ledger.verify()
        ledger.close({}, self.list_offsets_to_commit(window))
        self.sink.commit(window)
        return Report(window)

    patches = [patch.object(ModelOperator, "move", move), patch.object(FromKafkaOperator, "close", lambda *args: args[-1])]
    assert "not in the sink" in noticed(one_window(), {"A": ONE}, [ONE, LAST], patches=patches)


def test_an_open_window_is_not_finished_first(model):
    patches = [patch.object(Memory, "open_entry", property(lambda memory: None))]
    assert noticed(one_window(), {"A": ONE}, [ONE, LAST], patches=patches)


def test_a_sink_that_takes_what_it_has_taken(model):
    def commit(self, window):
        ledger_model._ask("sink.append", window.pipeline, window.number, window.ranges)

    patches = [patch.object(ModelSink, "find_applied", lambda *args: None), patch.object(ModelSink, "commit", commit)]
    assert "doubled" in noticed(one_window(), {"A": ONE}, [ONE, LAST], patches=patches)


def test_a_number_that_was_given_up_is_used_again(model):
    def planned_again(self, ledger, run):
        window = FromKafkaOperator.plan(self, ledger, run)
        return window if not window.moved else type(window)(**{**vars(window), "number": window.number - 1})

    patches = [patch.object(ModelOperator, "plan", planned_again)]
    assert "cannot be finished" in noticed(taken_window(), {"skip": SKIP}, [LAST], patches=patches)


@pytest.mark.parametrize("rule", [(Ledger, "fence_splits"), (ChangeLedger, "take_over")], ids=lambda rule: rule[1])
def test_tasks_of_a_window_that_is_given_up_continue(model, rule):
    patches = [patch.object(*rule, lambda *args: None)]
    with modelled(*patches), pytest.raises(AssertionError, match="discarded"):
        explore(half_published(), {"A": PUBLISHED, "skip": SKIP}, [LAST_PUBLISHED], records=0, check=published_as_said)


def test_a_task_publishes_its_split_without_a_look(model):
    patches = [patch.object(ledger_model.Publisher, "find_marker", lambda *args: None)]
    text = noticed(two_splits(), {"A": PUBLISHED, "B": PUBLISHED}, [PUBLISHED, LAST_PUBLISHED], records=0, patches=patches)
    assert "doubled" in text


@pytest.mark.parametrize("first", [NEXT_HOUR, BESIDE], ids=["interval", "progress"])
def test_offsets_that_others_have_are_not_looked_at_again_after_the_claim(model, first):
    blind = IntervalLedger if first is NEXT_HOUR else Ledger
    patches = [patch.object(blind, "_withdraw_if_overlapping", lambda self, entry: None)]
    text = noticed(one_hour(), {"A": NEXT_HOUR, "B": BESIDE}, [NEXT_HOUR, LAST_BESIDE], **DISJOINT, patches=patches)
    assert "doubled" in text


def test_an_attempt_does_not_ask_whether_the_sink_has_its_window(model):
    """This is harmless, because the sink compares and takes nothing twice."""
    with patch.object(ModelSink, "find_applied", lambda *args: None):
        explore(taken_window(), {"A": ONE}, [ONE, LAST], records=0)


def test_dead_letters_are_sent_once_more_by_a_retry(model):
    patches = [patch.object(letters_of_tasks, "drop_sent", lambda letters, sent: letters)]
    assert "doubled: {0: 2}" in noticed(World(end=2), {"A": tolerant("one", 0)}, NONE_BAD, **LETTERS, patches=patches)


def test_the_sink_commits_before_dead_letters_are_sent():
    def run(self):
        with ExitStack() as opened:
            writer, others = self.operator.sink.begin(self.window, self.splits, self.shape), self._begin_other_sinks(opened)
            self._fill_sinks(writer, others)
            applied = writer.commit(self.results)
            self._send_elsewhere(others)
        return self._report(applied, others, [])

    patches = [patch.object(SinkMove, "run", run)]
    assert "[0] are not in the sink" in noticed(World(end=2), {"A": tolerant("one", 0)}, NONE_BAD, **LETTERS, patches=patches)


@pytest.mark.parametrize(
    "rule",
    [
        (SinkMove, "_find_applied_meanwhile", lambda self: None),
        (dead_letters, "find_known_dead_letters", dead_letters.find_kept_dead_letters),
    ],
    ids=lambda rule: rule[1],
)
def test_an_attempt_does_not_know_what_the_one_before_has_decided(rule):
    assert "doubled" in noticed(World(end=2), TWO_SCHEMAS, NONE_BAD, **LETTERS, patches=[patch.object(*rule)])
