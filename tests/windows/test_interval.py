"""Intervals: their names, and how far they are complete without a gap."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_kafka_spark.windows.interval import (
    Interval,
    IntervalState,
    exclude_other_intervals,
    find_contiguous_offsets,
    find_missing_intervals,
    find_overlapping,
    find_topic_start,
)
from airflow_kafka_spark.windows.memory import fold_records, make_interval_record
from airflow_kafka_spark.windows.model import Gap, OffsetRange, State, TopicPartition

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
NEW_YEAR = datetime(2026, 1, 1, tzinfo=timezone.utc)


def hour(number: int, length: int = 1) -> Interval:
    return Interval(NEW_YEAR + timedelta(hours=number), NEW_YEAR + timedelta(hours=number + length))


def done(number: int, *ranges: tuple[int, int], state: State = State.COMPLETE) -> IntervalState:
    """``done(3, (start, end), ...)``: one range per partition."""
    return IntervalState(hour(number), state, tuple(OffsetRange("t", p, *r) for p, r in enumerate(ranges)))


class TestInterval:
    def test_an_interval_is_half_open_and_in_utc(self):
        berlin = ZoneInfo("Europe/Berlin")
        night = Interval(datetime(2026, 3, 29, 0, tzinfo=berlin), datetime(2026, 3, 30, 0, tzinfo=berlin))
        assert night.end_ms - night.start_ms == 23 * 3_600_000, "the night of the change to summer time has 23 hours"
        assert str(night) == "[2026-03-28T23:00:00Z, 2026-03-29T22:00:00Z)"
        assert night.name == "20260328T230000Z-20260329T220000Z"

    def test_the_hour_that_comes_twice_is_two_intervals(self):
        berlin = ZoneInfo("Europe/Berlin")
        first = datetime(2026, 10, 25, 2, tzinfo=berlin)
        second, third = datetime(2026, 10, 25, 2, fold=1, tzinfo=berlin), datetime(2026, 10, 25, 3, tzinfo=berlin)
        one, two = Interval(first, second), Interval(second, third)
        assert one.end == two.start
        assert one.name != two.name
        assert not one.overlaps(two)

    def test_instants_are_whole_milliseconds_as_timestamps_of_records_are(self):
        made = Interval(NEW_YEAR + timedelta(microseconds=1), NEW_YEAR + timedelta(seconds=1))
        assert made.start_ms - Interval(NEW_YEAR, made.end).start_ms == 1
        assert Interval.of_ms(made.start_ms, made.end_ms) == made

    @pytest.mark.parametrize("end", [NEW_YEAR, NEW_YEAR - timedelta(hours=1)])
    def test_an_empty_interval_is_refused(self, end):
        with pytest.raises(ValueError, match="start < end"):
            Interval(NEW_YEAR, end)

    def test_an_instant_without_a_time_zone_is_refused(self):
        with pytest.raises(ValueError, match="without a time zone"):
            Interval(datetime(2026, 1, 1), NEW_YEAR)

    def test_names_sort_as_intervals_do(self):
        intervals = [hour(n, length) for n in range(30) for length in (1, 2)]
        assert sorted(intervals, key=lambda i: i.name) == sorted(intervals)

    def test_overlapping_names_only_the_others_that_share_instants(self):
        known = [done(0, (0, 1)), done(1, (1, 2)), done(2, (2, 3))]
        assert find_overlapping(hour(1), known) == []
        assert [k.interval for k in find_overlapping(hour(1, 2), known)] == [hour(1), hour(2)]


class TestContiguous:
    def test_the_group_follows_the_intervals_that_are_complete_without_a_hole(self):
        known = [done(0, (0, 10)), done(1, (10, 20)), done(3, (30, 40))]
        assert find_contiguous_offsets(known, {T0: 0}) == {T0: 20}

    def test_an_interval_that_is_not_complete_is_a_hole(self):
        known = [done(0, (0, 10)), done(1, (10, 20), state=State.PLANNED), done(2, (20, 30))]
        assert find_contiguous_offsets(known, {T0: 0}) == {T0: 10}

    def test_an_interval_without_records_is_no_hole(self):
        assert find_contiguous_offsets([done(0, (0, 10)), done(2, (10, 15))], {T0: 0}) == {T0: 15}

    def test_it_never_goes_back(self):
        assert find_contiguous_offsets([done(0, (0, 10))], {T0: 500}) == {T0: 500}

    def test_what_an_interval_has_passed_over_because_it_was_deleted_is_no_hole(self):
        known = [done(0, (0, 10)), replace(done(1, (15, 20)), gaps=(Gap("t", 0, 10, 15),)), done(2, (20, 30))]
        assert find_contiguous_offsets(known, {T0: 0}) == {T0: 30}
        record = make_interval_record("p", known[1])
        assert fold_records("p", [record]).intervals[hour(1).name].gaps == known[1].gaps

    def test_one_partition_that_lags_holds_the_others(self):
        assert find_contiguous_offsets([done(1, (5, 10), (7, 9))], {T0: 5, T1: 6}) == {T0: 5, T1: 6}

    def test_a_schedule_begins_with_its_first_interval_whatever_lies_before_it(self):
        known = [done(5, (100, 110)), done(6, (110, 120))]
        assert find_contiguous_offsets(known, {T0: 0}) == {T0: 0}
        assert find_contiguous_offsets(known, {T0: 0}, NEW_YEAR + timedelta(hours=5)) == {T0: 120}
        assert find_contiguous_offsets(known, {T0: 0}, NEW_YEAR + timedelta(hours=4, minutes=30)) == {T0: 120}
        assert find_contiguous_offsets(known[1:], {T0: 0}, NEW_YEAR + timedelta(hours=5)) == {T0: 0}

    def test_offsets_of_a_topic_that_was_created_anew_since_do_not_count(self):
        old = [replace(k, topic_ids={"t": "old"}) for k in (done(0, (0, 10)), done(1, (10, 20)))]
        new = replace(done(2, (0, 5)), topic_ids={"t": "new"})
        assert find_contiguous_offsets([*old, new], {T0: 0}, NEW_YEAR, {"t": "new"}) == {T0: 5}
        assert find_contiguous_offsets([*old, new], {T0: 0}, NEW_YEAR, {"t": "old"}) == {T0: 20}
        assert find_contiguous_offsets(old, {T0: 0}, NEW_YEAR, {"t": "new"}) == {T0: 0}

    def test_a_partition_that_came_later_is_part_of_it(self):
        assert find_contiguous_offsets([done(0, (0, 10)), done(1, (10, 20), (0, 7))], {T0: 0, T1: 0}) == {T0: 20, T1: 7}

    @given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.data())
    def test_in_whatever_order_intervals_complete_it_ends_at_the_first_hole(self, sizes, data):
        ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
        known = [done(n, (end - size, end)) for n, (size, end) in enumerate(zip(sizes, ends, strict=True))]
        order = data.draw(st.permutations(range(len(sizes))))
        complete: list[IntervalState] = []
        reached = {T0: 0}
        for number in order:
            complete.append(known[number])
            before, reached = reached[T0], find_contiguous_offsets(complete, reached)
            there = {k.interval for k in complete}
            hole = next((ends[n] - sizes[n] for n in range(len(sizes)) if sizes[n] and hour(n) not in there), ends[-1])
            assert before <= reached[T0] == hole


class TestMissing:
    def test_times_between_intervals_whose_records_no_interval_has_are_missing(self):
        known = [done(0, (0, 5)), done(1, (5, 9)), done(3, (12, 20)), done(7, (21, 30))]
        assert find_missing_intervals(reversed(known)) == (hour(2), hour(4, 3))
        assert find_missing_intervals([]) == find_missing_intervals(known[:2]) == ()

    def test_a_time_without_records_is_not_missing(self):
        assert find_missing_intervals([done(0, (0, 5), (0, 2)), done(9, (5, 9), (2, 2))]) == ()

    def test_offsets_of_a_topic_that_was_recreated_are_not_compared(self):
        first, later = (replace(done(n, (10 * n, 10 * n + 5)), topic_ids={"t": str(n)}) for n in (0, 2))
        assert find_missing_intervals([first, later]) == ()
        assert find_missing_intervals([first, replace(later, topic_ids={"t": "0"})]) == (hour(1),)

    def test_an_interval_within_a_span_leaves_no_hole_behind_it(self):
        span = replace(done(0, (0, 50)), interval=hour(0, 10), leading=timedelta(hours=1))
        assert find_missing_intervals([span, done(3, (15, 20)), done(10, (50, 55))]) == ()


class TestATopicThatJoins:
    def state(self, number: int, **ends: tuple[int, int]) -> IntervalState:
        """``state(3, a=(start, end))``: one range per topic."""
        ranges = tuple(OffsetRange(topic, 0, *span) for topic, span in ends.items())
        return IntervalState(hour(number), State.COMPLETE, ranges, topic_ids={topic: f"id-{topic}" for topic in ends})

    def test_a_topic_that_every_interval_has_is_taken_up_at_the_start(self):
        assert find_topic_start("a", "id-a", hour(1), []) == hour(1).start
        assert find_topic_start("a", "id-a", hour(1), [self.state(0, a=(0, 5))]) == hour(1).start

    def test_a_topic_that_no_interval_has_is_taken_up_at_its_first_record(self):
        assert find_topic_start("b", "id-b", hour(1), [self.state(0, a=(0, 5))]) is None
        assert find_topic_start("b", "id-b", hour(0), [self.state(0, a=(0, 5))]) == hour(0).start, "its own earlier plan"

    def test_a_topic_that_was_replaced_is_another_one(self):
        assert find_topic_start("a", "other", hour(1), [self.state(0, a=(0, 5))]) is None
        assert find_topic_start("a", "", hour(1), [self.state(0, a=(0, 5))]) == hour(1).start

    def test_intervals_directly_before_that_do_not_have_it_are_made_up_for(self):
        known = [self.state(0, a=(0, 5), b=(0, 2)), self.state(1, a=(5, 6)), self.state(2, a=(6, 7))]
        assert find_topic_start("b", "id-b", hour(3), known) == hour(1).start
        assert find_topic_start("b", "id-b", hour(4), known) == hour(4).start

    @given(st.data())
    def test_in_whatever_order_intervals_are_planned_and_whenever_a_topic_joins_each_offset_is_in_one(self, data):
        count = data.draw(st.integers(1, 6))
        ends = [data.draw(st.integers(0, 3))]
        for _ in range(count + 1):
            ends.append(ends[-1] + data.draw(st.integers(0, 3)))
        order = data.draw(st.permutations(range(count)))
        joins = data.draw(st.integers(0, count))
        known: list[IntervalState] = []
        for turn, number in enumerate([*order, count]):
            if turn < joins:
                known.append(self.state(number, a=(number, number + 1)))
                continue
            begin = find_topic_start("b", "id-b", hour(number), known)
            start = 0 if begin is None else ends[round((begin - NEW_YEAR) / timedelta(hours=1))]
            natural = (OffsetRange("b", 0, start, ends[number + 1]),)
            (left,) = exclude_other_intervals(natural, {"b": "id-b"}, known)
            known.append(self.state(number, a=(number, number + 1), b=(left.start, left.end)))
        moved = sorted(o for k in known for r in k.ranges if r.topic == "b" for o in range(r.start, r.end))
        assert moved == [*range(0 if joins else ends[0], ends[-1])]
        group = find_contiguous_offsets(known, {TopicPartition("a", 0): 0, TopicPartition("b", 0): 0 if joins else ends[0]})
        assert group == {TopicPartition("a", 0): count + 1, TopicPartition("b", 0): ends[-1]}
