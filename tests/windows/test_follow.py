"""Records that another pipeline has published, and those of them after an offset."""

from __future__ import annotations

from dataclasses import replace

import pytest

from airflow_kafka_spark.errors import FollowBroken
from airflow_kafka_spark.windows.binding import Binding, Endpoint, Writer
from airflow_kafka_spark.windows.changes import Change, change_from_json, change_to_json
from airflow_kafka_spark.windows.codec import position_from_json, position_to_json
from airflow_kafka_spark.windows.follow import count_published_behind, find_followed_window, follow
from airflow_kafka_spark.windows.memory import Attempt, Memory, WindowEntry
from airflow_kafka_spark.windows.model import (
    FollowedWindow,
    Landed,
    Published,
    SourcePlan,
    State,
    TopicPartition,
    Window,
    add_landed,
)
from airflow_kafka_spark.windows.plan import Position

TP = TopicPartition("t", 0)


def entry(number: int, first: int, records: int) -> WindowEntry:
    window = Window("up", number, (), "run", "", source=SourcePlan(()))
    landed = Landed("t", 0, first, first + records - 1, records)
    report = {"published": [vars(landed)] if records else []}
    return WindowEntry(window, State.COMPLETE, Attempt(1, "", "", ""), report)


def upstream(*entries: WindowEntry, total: int, last: int = 0, **facts) -> Memory:
    numbers = {e.window.number: e for e in entries}
    end = max((part["last"] + 1 for e in entries for part in (e.report or {})["published"]), default=0)
    position = Position(source={}, published={TP: Published(end, total)})
    return Memory("up", position, last or max(numbers, default=0), numbers, exists=True, **facts)


@pytest.mark.parametrize(
    "start, behind",
    [(0, 109), (100, 9), (99, None), (102, 7), (103, None), (109, 0), (200, 0)],
    ids=["all", "oldest that is held", "before it", "between", "within", "end", "behind"],
)
def test_records_behind_an_offset_are_those_of_whole_windows_or_not_known(start, behind):
    found = upstream(entry(8, 100, 2), entry(9, 102, 3), entry(10, 105, 4), total=109)
    assert count_published_behind(found, found.published, TP, start) == behind


def test_a_window_that_was_given_up_lies_between_others_and_one_of_which_that_is_not_known_does_not():
    given_up = Change(1, "skip", "ann", "", "", discarded=(9,), landed=(Landed("t", 0, 102, 102, 1),))
    found = upstream(entry(8, 100, 2), entry(10, 103, 1), total=50, changes={1: given_up})
    assert count_published_behind(found, found.published, TP, 100) == 4
    found = replace(found, changes={1: replace(given_up, landed=None)})
    assert count_published_behind(found, found.published, TP, 100) is None
    assert count_published_behind(found, found.published, TP, 103) == 1, "what lies before does not matter"


def test_what_lies_in_a_topic_of_the_same_name_that_is_gone_is_not_counted():
    found = upstream(entry(1, 0, 50), entry(2, 50, 50), entry(3, 10, 5), total=105)
    assert count_published_behind(found, found.published, TP, 5) == 5
    assert add_landed({TP: Published(100, 100)}, [Landed("t", 0, 10, 14, 5)]) == {TP: Published(15, 105)}


def test_what_is_followed_never_goes_back():
    found = upstream(entry(1, 0, 3), total=3)
    followed, ends = follow(found, FollowedWindow(7, {"t": 90}), ["t"], {TP: 90})
    assert (followed.last, followed.records, ends) == (1, 0, {TP: 3}), "it counts anew"
    followed, _ = follow(found, FollowedWindow(7, {"t": 3}), ["t"], {TP: 3})
    assert (followed.first, followed.last, followed.records) == (8, 7, 0)


def test_what_older_ledgers_do_not_say_is_asked_of_the_windows_that_they_hold():
    found = replace(upstream(entry(4, 100, 2), entry(5, 102, 3), total=0), position=Position(source={}))
    assert found.published == {TP: Published(105, 5)}
    followed, _ = follow(found, position_from_json({"offsets": [], "followed": {"up": 4}}).followed["up"], ["t"], {TP: 102})
    assert (followed.first, followed.last, followed.records, followed.totals) == (5, 5, 3, {"t": 5})


def test_positions_and_changes_are_what_they_were():
    position = Position({TP: 3}, followed={"up": FollowedWindow(4, {"t": 9})}, published={TP: Published(10, 7)})
    assert position_from_json(position_to_json(position)) == position
    change = Change(
        2, "forget", "ann", "", "", discarded=(9,), window=9, landed=(Landed("t", 0, 1, 2, 2),), published={TP: Published(10, 7)}
    )
    assert change_from_json(change_to_json(change)) == change


@pytest.mark.parametrize("kind, message", [("dead_letters", "sends dead letters"), ("routes", "that a `Filter` takes out")])
def test_topics_of_records_that_do_not_count_are_refused(kind, message):
    """Otherwise no window would ever read their records, and no error would say so."""
    bound = Binding(Writer("dag", "up"), Endpoint({"topic": "t"}, {kind: "aside, t"}))
    found = upstream(entry(1, 0, 5), total=5, binding=bound)
    assert follow(found, None, ["t"], {TP: 0})[0].records == 5
    with pytest.raises(FollowBroken, match=message):
        follow(found, None, ["t", "aside"], {TP: 0})


def test_a_pipeline_that_was_renamed_is_followed_by_its_new_name_and_from_where_it_was():
    old = Memory("up", exists=True, changes={1: Change(1, "rename", "ann", "", "", name="new")})
    with pytest.raises(FollowBroken, match='follows="new"'):
        follow(old, None, ["t"], {TP: 0})
    new = replace(upstream(total=9, last=3, changes={1: Change(1, "rename", "ann", "", "", name="up")}), pipeline="new")
    assert find_followed_window(new, Position(followed={"up": FollowedWindow(2, {"t": 5})})) == FollowedWindow(2, {"t": 5})
    followed, _ = follow(new, FollowedWindow(2, {"t": 5}), ["t"], {TP: 5})
    assert (followed.pipeline, followed.first, followed.last, followed.records) == ("new", 3, 3, 4)
