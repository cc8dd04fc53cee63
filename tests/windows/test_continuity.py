"""Which windows may follow each other: the comparison of a sink's compare-and-set."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_kafka_spark.errors import ForeignOffsets, SinkRecordMissing, WindowConflict
from airflow_kafka_spark.windows.codec import position_from_json, position_to_json, window_from_json, window_to_json
from airflow_kafka_spark.windows.continuity import (
    drop_recreated_topics,
    find_contradictions,
    has_same_ranges,
    refuse_foreign,
    refuse_gap,
)
from airflow_kafka_spark.windows.model import ELSEWHERE, Applied, Gap, OffsetRange, Window
from airflow_kafka_spark.windows.plan import Position, find_next_position


def window(
    number: int, *ranges: tuple[str, int, int, int], gaps: tuple[Gap, ...] = (), ids: dict[str, str] | None = None
) -> Window:
    offsets = tuple(OffsetRange(*r) for r in ranges)
    return Window("p", number, offsets, run="r", planned_at="2026-01-01T00:00:00+00:00", gaps=gaps, topic_ids=ids or {})


def applied(number: int, *ranges: tuple[str, int, int, int]) -> Applied:
    return Applied("p", number, tuple(OffsetRange(*r) for r in ranges))


BEFORE = applied(4, ("t", 0, 10, 20), ("t", 1, 0, 5))
AFTER = window(5, ("t", 0, 20, 30), ("t", 1, 5, 5))


def test_a_window_that_starts_where_the_last_one_ended_follows_it():
    assert find_contradictions(BEFORE, AFTER) == []


def test_numbers_may_have_holes_since_empty_windows_never_reach_a_sink():
    assert find_contradictions(BEFORE, replace(AFTER, number=50)) == []


def test_a_sink_without_a_record_takes_a_first_window_and_none_that_has_a_predecessor_there():
    refuse_gap(None, AFTER, "the table")
    later = replace(AFTER, after=3)
    with pytest.raises(SinkRecordMissing, match="the table has no record of pipeline `p`, whose window 3 was committed there"):
        refuse_gap(None, later, "the table")
    refuse_gap(BEFORE, later, "the table")
    refuse_gap(None, replace(later, moved=1), "the table")
    refuse_gap(None, replace(later, replay=1), "the table")


def test_the_command_that_moves_what_a_restored_sink_has_lost_is_named_with_its_offsets():
    with pytest.raises(WindowConflict) as refused:
        refuse_gap(BEFORE, window(8, ("t", 0, 35, 40), ("t", 1, 5, 9)), "the table")
    assert '`airflow kafka-spark reset p --to \'{"t": {"0": 20}}\' --discard-open --why ...`' in refused.value.action
    with pytest.raises(WindowConflict) as refused:
        refuse_gap(BEFORE, window(8, ("t", 0, 15, 40), ("t", 1, 7, 9)), "the table")
    assert "reset" not in refused.value.action


@pytest.mark.parametrize("number", [3, 4])
def test_a_window_that_is_not_newer_does_not_follow(number):
    (reason,) = find_contradictions(BEFORE, replace(AFTER, number=number))
    assert "#4" in reason and f"#{number}" in reason


def test_offsets_that_were_applied_already_are_named():
    (reason,) = find_contradictions(BEFORE, window(5, ("t", 0, 19, 30), ("t", 1, 5, 5)))
    assert "t-0" in reason and "19" in reason and "20" in reason


def test_offsets_that_would_be_left_out_are_named():
    (reason,) = find_contradictions(BEFORE, window(5, ("t", 0, 20, 30), ("t", 1, 7, 9)))
    assert "t-1" in reason and "7" in reason and "5" in reason


def test_offsets_that_went_elsewhere_or_that_windows_without_records_have_skipped_are_no_hole():
    later = window(7, ("t", 0, 25, 30), ("t", 1, 5, 5))
    assert find_contradictions(BEFORE, later)
    assert find_contradictions(BEFORE, replace(later, after=ELSEWHERE)) == []
    assert find_contradictions(BEFORE, replace(later, passed=(Gap("t", 0, 20, 22),), gaps=(Gap("t", 0, 22, 25),))) == []
    assert find_contradictions(BEFORE, replace(window(5, ("t", 0, 19, 30), ("t", 1, 5, 5)), after=ELSEWHERE))
    refuse_gap(None, replace(later, after=ELSEWHERE), "the table")
    empty = window(5, ("t", 0, 22, 22), gaps=(Gap("t", 0, 20, 22),))
    position = Position()
    for skipped in (empty.gaps, (), ()):
        position = find_next_position(position, replace(empty, gaps=skipped))
    more = replace(window(6, ("t", 0, 24, 24)), gaps=(Gap("t", 0, 22, 24), Gap("t", 1, 0, 1)))
    assert find_next_position(position, more).passed == (Gap("t", 0, 20, 24), Gap("t", 1, 0, 1))
    kept = position_from_json(position_to_json(position))
    assert (kept.passed, find_next_position(kept, later).passed) == (empty.gaps, ())
    assert window_from_json(window_to_json(replace(later, passed=kept.passed))).passed == empty.gaps


def test_every_contradiction_is_reported():
    assert len(find_contradictions(BEFORE, window(5, ("t", 0, 19, 30), ("t", 1, 7, 9)))) == 2


@pytest.mark.parametrize(
    "gaps, fine",
    [
        ((Gap("t", 0, 20, 25),), True),
        ((Gap("t", 0, 22, 25), Gap("t", 0, 20, 22)), True),
        ((Gap("t", 0, 15, 40),), True),
        ((Gap("t", 0, 20, 24),), False),
        ((Gap("t", 0, 21, 25),), False),
        ((Gap("t", 0, 20, 21), Gap("t", 0, 22, 25)), False),
        ((Gap("t", 1, 20, 25),), False),
        ((Gap("u", 0, 20, 25),), False),
    ],
    ids=["one", "two", "more than needed", "too short", "too late", "a hole between", "other partition", "other topic"],
)
def test_gaps_explain_offsets_that_were_left_out(gaps, fine):
    found = find_contradictions(BEFORE, window(5, ("t", 0, 25, 30), ("t", 1, 5, 5), gaps=gaps))
    assert (found == []) is fine


def test_a_partition_new_to_the_pipeline_may_start_anywhere():
    assert find_contradictions(BEFORE, window(5, ("t", 0, 20, 30), ("t", 1, 5, 5), ("t", 2, 77, 80), ("u", 0, 3, 4))) == []


def test_a_partition_that_is_missing_is_named_but_a_whole_topic_may_be_left_out():
    (reason,) = find_contradictions(BEFORE, window(5, ("t", 0, 20, 30)))
    assert "t-1" in reason
    assert find_contradictions(BEFORE, window(5, ("u", 0, 0, 1))) == []


def test_a_topic_that_was_created_again_starts_anew():
    again = window(5, ("t", 0, 0, 3), ("t", 1, 0, 3), ids={"t": "new"})

    def reasons(**ids):
        return find_contradictions(drop_recreated_topics(replace(BEFORE, topic_ids=ids), again), again)

    assert reasons(t="old") == []
    assert len(reasons(t="new")) == 2
    assert len(reasons()) == 2, "an unknown id excuses nothing"


@pytest.mark.parametrize("cluster, topic, fine", [
    ("c", "id", True), ("other", "id", False), ("c", "other", False), ("other", "other", False),
    ("", "id", True), ("c", "", True), ("", "other", False),
])  # fmt: skip
def test_offsets_of_another_cluster_or_topic_are_refused_and_the_error_names_both(cluster, topic, fine):
    known = replace(BEFORE, cluster_id="c", topic_ids={"t": "id", "gone": "x"})
    if fine:
        refuse_foreign(known, cluster, {"t": topic, "new": "y"})
        return
    with pytest.raises(ForeignOffsets) as caught:
        refuse_foreign(known, cluster, {"t": topic, "new": "y"})
    error = caught.value
    assert (error.known_cluster, error.found_cluster) == ("c", cluster)
    assert error.topics == ({"t": ("id", topic)} if topic == "other" else {})
    assert "other" in str(error) and "reset p --to earliest" in str(error) and "forget" in str(error)


def test_a_window_of_another_cluster_does_not_continue_the_last_one_unless_the_pipeline_was_moved():
    known = replace(BEFORE, cluster_id="c")
    refuse_gap(known, replace(AFTER, cluster_id="c"), "here")
    refuse_gap(known, AFTER, "here")
    with pytest.raises(ForeignOffsets):
        refuse_gap(known, replace(AFTER, cluster_id="d"), "here")
    refuse_gap(known, replace(AFTER, cluster_id="d", moved=1), "here")
    with pytest.raises(WindowConflict, match="here"):
        refuse_gap(known, replace(AFTER, cluster_id="d", moved=1, number=4), "here")


@pytest.mark.parametrize("start", [0, 19, 25], ids=["far back", "back", "forward"])
def test_only_a_window_that_begins_where_a_user_moved_the_pipeline_may_jump(start):
    jump = window(5, ("t", 0, start, 30), ("t", 1, 5, 5))
    assert len(find_contradictions(BEFORE, jump)) == 1
    assert find_contradictions(BEFORE, replace(jump, moved=1)) == []
    assert len(find_contradictions(BEFORE, replace(jump, moved=1, number=4))) == 1, "not even that one comes twice"


def test_same_ranges_does_not_mind_their_order():
    assert has_same_ranges(BEFORE.ranges, reversed(BEFORE.ranges))
    assert not has_same_ranges(BEFORE.ranges, BEFORE.ranges[:1])
    assert not has_same_ranges(BEFORE.ranges, AFTER.ranges)


steps = st.lists(
    st.dictionaries(st.integers(0, 4), st.tuples(st.integers(0, 50), st.integers(0, 3)), min_size=1), min_size=2, max_size=8
)


@given(steps)
def test_windows_that_tile_the_log_follow_each_other(history):
    """Partitions are only ever added, each window starts where the last one ended plus what retention took."""
    ends: dict[int, int] = {}
    last = None
    for number, moves in enumerate(history, 1):
        ranges, gaps = [], []
        for partition in sorted(set(ends) | set(moves)):
            span, lost = moves.get(partition, (0, 0))
            stood = ends.get(partition, 0)
            if lost:
                gaps.append(Gap("t", partition, stood, stood + lost))
            ranges.append(OffsetRange("t", partition, stood + lost, stood + lost + span))
            ends[partition] = ranges[-1].end
        now = Window("p", number, tuple(ranges), "r", "2026-01-01T00:00:00+00:00", gaps=tuple(gaps))
        if last is not None:
            assert find_contradictions(last, now) == []
        last = Applied("p", number, now.ranges)


@given(st.integers(0, 3), st.integers(-20, 20).filter(bool))
def test_moving_any_start_breaks_the_chain(index, by):
    before = applied(1, *(("t", p, 0, 100) for p in range(4)))
    ranges = [("t", p, 100 + (by if p == index else 0), 200) for p in range(4)]
    assert len(find_contradictions(before, window(2, *ranges))) == 1
