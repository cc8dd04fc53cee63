"""The planner. It is pure, so it is tested with many random logs and without a broker."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_kafka_spark.errors import ClusterChanged, DataLoss, LogTruncated, OffsetsWentBack, PartitionsVanished, TopicRecreated
from airflow_kafka_spark.windows.codec import position_from_json, position_to_json, window_from_json, window_to_json
from airflow_kafka_spark.windows.model import Gap, OffsetRange, TopicPartition, Window
from airflow_kafka_spark.windows.plan import (
    Log,
    PartitionLog,
    Position,
    check_readable,
    find_lost_topics,
    find_next_position,
    find_unread_gaps,
    limit_ranges,
    make_splits,
    make_whole_splits,
    plan_ranges,
)

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


def log(**bounds: tuple[int, int, int]) -> Log:
    """``log(p0=(low, lso, high), p1=...)`` of topic t."""
    return Log("cluster", {"t": "id-1"}, {TopicPartition("t", int(name[1:])): PartitionLog(*b) for name, b in bounds.items()})


def at(**offsets: int) -> Position:
    return Position({TopicPartition("t", int(name[1:])): o for name, o in offsets.items()}, {"t": "id-1"}, "cluster")


def window(*ranges: OffsetRange, number: int = 1) -> Window:
    return Window("p", number, ranges, "r", "", "cluster", {"t": "id-1"})


class TestWhereAWindowBegins:
    def test_a_new_pipeline_begins_at_the_given_offsets(self):
        planned = plan_ranges(log(p0=(0, 10, 10), p1=(3, 9, 9)), Position(), ["t"], starts={T0: 7, T1: 9})
        assert planned.ranges == (OffsetRange("t", 0, 7, 10), OffsetRange("t", 1, 9, 9))

    def test_a_start_that_was_deleted_is_a_loss(self):
        with pytest.raises(DataLoss):
            plan_ranges(log(p0=(5, 10, 10)), Position(), ["t"], starts={T0: 2})

    def test_a_pipeline_with_a_past_continues_from_there(self):
        planned = plan_ranges(log(p0=(0, 10, 10)), at(p0=4), ["t"], starts={T0: 9})
        assert planned.ranges == (OffsetRange("t", 0, 4, 10),)

    def test_a_partition_added_later_is_read_from_earliest(self):
        planned = plan_ranges(log(p0=(0, 10, 10), p1=(2, 9, 9)), at(p0=10), ["t"], starts={T1: 8})
        assert planned.ranges == (OffsetRange("t", 0, 10, 10), OffsetRange("t", 1, 2, 9))


class TestWhereAWindowEnds:
    def test_it_ends_at_the_last_stable_offset_and_reports_the_records_that_are_held_back(self):
        planned = plan_ranges(log(p0=(0, 6, 10)), Position(), ["t"])
        assert planned.ranges == (OffsetRange("t", 0, 0, 6),)
        assert planned.held_back == 4

    def test_it_ends_at_the_given_stops_and_counts_no_records_behind_them_as_held_back(self):
        planned = plan_ranges(log(p0=(0, 6, 10), p1=(0, 6, 10)), Position(), ["t"], stops={T0: 4, T1: 8})
        assert planned.ranges == (OffsetRange("t", 0, 0, 4), OffsetRange("t", 1, 0, 6))
        assert planned.held_back == 2

    @given(st.integers(0, 20), st.integers(0, 40))
    def test_a_stop_before_the_start_gives_an_empty_range_never_an_inverted_one(self, start, stop):
        (found,) = plan_ranges(log(p0=(0, 20, 20)), at(p0=start), ["t"], stops={T0: stop}).ranges
        assert (found.start, found.end) == (start, max(start, min(stop, 20)))

    @given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.integers(1, 3000))
    def test_max_records_is_never_exceeded_and_always_makes_progress(self, spans, limit):
        ranges = [OffsetRange("t", i, 5, 5 + span) for i, span in enumerate(spans)]
        capped = limit_ranges(ranges, limit)
        assert sum(r.span for r in capped) == min(limit, sum(spans))
        assert all(c.start == r.start and c.end <= r.end for c, r in zip(capped, ranges, strict=True))


class TestWhatIsRefused:
    def test_records_deleted_before_they_were_read(self):
        with pytest.raises(DataLoss) as caught:
            plan_ranges(log(p0=(5, 10, 10)), at(p0=2), ["t"])
        assert (caught.value.wanted, caught.value.low) == (2, 5)
        assert "from offset 2 up to 5 were deleted before they were read" in str(caught.value)

    def test_records_deleted_in_several_partitions_are_all_counted(self):
        every = log(p0=(5, 10, 10), p1=(0, 10, 10), p2=(7, 9, 9))
        with pytest.raises(DataLoss, match=r"of t-0 from offset 2 up to 5, and records of 1 other partition, were deleted"):
            plan_ranges(every, at(p0=2, p1=2, p2=2), ["t"])

    def test_unless_skip_records_them_as_a_gap(self):
        planned = plan_ranges(log(p0=(5, 10, 10)), at(p0=2), ["t"], data_loss="skip")
        assert planned.ranges == (OffsetRange("t", 0, 5, 10),)
        assert [(g.start, g.end) for g in planned.gaps] == [(2, 5)]

    def test_a_log_that_ends_before_the_position(self):
        with pytest.raises(OffsetsWentBack):
            plan_ranges(log(p0=(0, 8, 8)), at(p0=9), ["t"])

    @pytest.mark.parametrize("found", [{}, {"p0": (0, 10, 10)}])
    def test_fewer_partitions_than_the_pipeline_has_read(self, found):
        with pytest.raises(PartitionsVanished):
            plan_ranges(log(**found), at(p0=1, p1=1), ["t"])

    def test_a_topic_deleted_and_created_again_even_when_its_offsets_look_right(self):
        with pytest.raises(TopicRecreated):
            plan_ranges(replace(log(p0=(0, 50, 50)), topic_ids={"t": "id-2"}), at(p0=9), ["t"])

    def test_unless_skip_begins_the_new_topic_at_its_earliest_record(self):
        found = replace(log(p0=(1, 50, 50)), topic_ids={"t": "id-2"})
        planned = plan_ranges(found, at(p0=9, p1=9), ["t"], data_loss="skip")
        assert planned.ranges == (OffsetRange("t", 0, 1, 50),)

    @pytest.mark.parametrize(
        ("topic_id", "action"), [("id-1", "restored with another cluster id"), ("id-2", "a new `pipeline=` name")]
    )
    def test_another_cluster(self, topic_id, action):
        with pytest.raises(ClusterChanged, match=action):
            plan_ranges(log(p0=(0, 10, 10)), replace(at(p0=1), cluster_id="other", topic_ids={"t": topic_id}), ["t"])


class TestReadingAPlannedWindow:
    planned = window(OffsetRange("t", 0, 2, 8))

    def test_passes_while_everything_is_there(self):
        check_readable(self.planned, log(p0=(2, 8, 9)), "fail")

    def test_refuses_deleted_records_but_not_with_skip(self):
        with pytest.raises(DataLoss):
            check_readable(self.planned, log(p0=(3, 8, 9)), "fail")
        check_readable(self.planned, log(p0=(3, 8, 9)), "skip")

    def test_refuses_a_log_that_went_back(self):
        with pytest.raises(OffsetsWentBack):
            check_readable(self.planned, log(p0=(0, 7, 7)), "skip")

    def test_a_recreated_topic_is_refused_and_with_skip_lost(self):
        found = replace(log(p0=(0, 90, 90)), topic_ids={"t": "id-2"})
        with pytest.raises(TopicRecreated):
            check_readable(self.planned, found, "fail")
        check_readable(self.planned, found, "skip")
        assert find_lost_topics(self.planned, found) == ("t",)
        assert make_splits(self.planned, 100, without=("t",)) == ()


RANGES = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(0, 500), st.integers(0, 500)),
    max_size=6,
    unique_by=lambda r: r[:2],
).map(lambda rows: tuple(OffsetRange(t, p, s, s + n) for t, p, s, n in sorted(rows)))


@given(RANGES, st.integers(1, 400))
def test_splits_tile_the_window_without_gap_or_overlap(ranges, max_span):
    splits = make_splits(window(*ranges), max_span)
    offsets = [(s.range.topic, s.range.partition, o) for s in splits for o in range(s.range.start, s.range.end)]
    assert len(offsets) == len(set(offsets)) == sum(r.span for r in ranges)
    assert set(offsets) == {(r.topic, r.partition, o) for r in ranges for o in range(r.start, r.end)}
    assert [s.index for s in splits] == list(range(len(splits)))
    assert all(0 < s.range.span <= max(1, 1.5 * max_span) for s in splits)
    assert splits == make_splits(window(*ranges), max_span)


@st.composite
def histories(draw):
    """A log that grows, is truncated at its beginning, and gains partitions; seen at several moments."""
    steps, low, high, partitions = [], {}, {}, draw(st.integers(1, 3))
    for _ in range(draw(st.integers(1, 8))):
        partitions = min(6, partitions + draw(st.integers(0, 1)))
        for p in range(partitions):
            high[p] = high.get(p, 0) + draw(st.integers(0, 30))
            low[p] = draw(st.integers(low.get(p, 0), high[p]))
        before = steps[-1].partitions if steps else {}
        bounds = {}
        for p in range(partitions):
            seen = before.get(TopicPartition("t", p))
            lso = max(draw(st.integers(max(low[p], high[p] - 3), high[p])), seen.lso if seen else 0)  # it never goes back
            bounds[f"p{p}"] = (low[p], lso, high[p])
        steps.append(log(**bounds))
    return steps


@given(histories(), st.one_of(st.none(), st.integers(1, 40)))
def test_windows_tile_the_log_with_no_gap_but_the_recorded_ones_and_no_overlap(steps, limit):
    position, covered, lost = Position(), {}, {}
    for number, step in enumerate(steps, 1):
        planned = plan_ranges(step, position, ["t"], data_loss="skip", max_records=limit)
        assert planned == plan_ranges(step, position, ["t"], data_loss="skip", max_records=limit)
        for gap in planned.gaps:
            lost.setdefault((gap.topic, gap.partition), []).append((gap.start, gap.end))
        for r in planned.ranges:
            covered.setdefault(r.topic_partition, []).append((r.start, r.end))
        position = find_next_position(position, window(*planned.ranges, number=number))
    compared = 0
    for tp, ranges in covered.items():
        pieces = sorted(ranges + lost.get(tp, []))
        for (_, end), (start, _) in zip(pieces, pieces[1:], strict=False):
            assert end == start, f"{tp}: {pieces}"
            compared += 1
        assert position.offsets[tp] == pieces[-1][1]
    assert compared >= sum(len(r) - 1 for r in covered.values())


class TestAPipelineThatWasMovedByHand:
    def test_says_so_until_a_window_has_reached_the_sink(self):
        moved = replace(at(p0=3), moved=2)
        empty = find_next_position(moved, replace(window(OffsetRange("t", 0, 3, 3)), moved=2))
        assert empty.moved == 2, "a sink has seen nothing of an empty window"
        assert find_next_position(empty, replace(window(OffsetRange("t", 0, 3, 4)), moved=2)).moved == 0


class TestALogThatWasCutOffAndHasGrownAgain:
    """Offset 10 was reached under leader epoch 3. The log of that epoch now ends at 6, under epoch 5."""

    cut = Log("cluster", {"t": "id-1"}, {T0: PartitionLog(0, 20, 20, 5)}, {T0: 6})
    position = replace(at(p0=10), epochs={T0: 3})

    def test_it_is_refused_with_the_facts(self):
        with pytest.raises(LogTruncated) as refused:
            plan_ranges(self.cut, self.position, ["t"])
        error = refused.value
        assert (error.position, error.known_epoch, error.end, error.found_epoch) == (10, 3, 6, 5)
        assert "data_loss" in str(error) and "reset" in str(error)

    def test_with_skip_it_is_a_gap_and_the_window_begins_where_the_pipeline_stands(self):
        planned = plan_ranges(self.cut, self.position, ["t"], data_loss="skip")
        assert (planned.ranges, planned.gaps) == ((OffsetRange("t", 0, 10, 20),), (Gap("t", 0, 6, 10),))

    def test_what_retention_has_removed_meanwhile_is_no_part_of_the_gap(self):
        log = replace(self.cut, partitions={T0: PartitionLog(8, 20, 20, 5)})
        assert plan_ranges(log, self.position, ["t"], data_loss="skip").gaps == (Gap("t", 0, 8, 10),)
        log = replace(self.cut, partitions={T0: PartitionLog(10, 20, 20, 5)})
        assert plan_ranges(log, self.position, ["t"]).gaps == (), "nothing of it can be read"

    def test_a_log_that_ends_where_the_pipeline_stands_or_behind_it_is_no_loss(self):
        assert plan_ranges(replace(self.cut, diverged={T0: 10}), self.position, ["t"]).gaps == ()

    def test_a_planned_window_is_refused_only_where_it_reads(self):
        planned = replace(window(OffsetRange("t", 0, 4, 10)), epochs={T0: 3})
        with pytest.raises(LogTruncated):
            check_readable(planned, self.cut, "fail")
        check_readable(planned, self.cut, "skip")
        check_readable(window(OffsetRange("t", 0, 10, 10)), self.cut, "fail")
        check_readable(window(OffsetRange("t", 0, 2, 6)), self.cut, "fail")

    def test_the_position_has_the_epochs_of_the_window_and_an_end_of_unknown_epoch_has_none(self):
        position = replace(at(p0=10, p1=7), epochs={T0: 3, T1: 2})
        known = find_next_position(position, replace(window(OffsetRange("t", 0, 10, 12)), epochs={T0: 5}))
        assert known.epochs == {T0: 5, T1: 2}
        assert find_next_position(position, window(OffsetRange("t", 0, 10, 12))).epochs == {T1: 2}

    def test_records_of_the_ledger_hold_epochs_and_older_records_have_none(self):
        planned = replace(window(OffsetRange("t", 0, 4, 10), OffsetRange("t", 1, 0, 3)), epochs={T1: 3})
        assert window_from_json(window_to_json(planned)) == planned
        position = replace(at(p0=10, p1=7), epochs={T0: 0})
        assert position_from_json(position_to_json(position)) == position
        assert "epochs" not in position_to_json(at(p0=10)) and position_from_json(position_to_json(at(p0=10))).epochs == {}


def test_each_split_carries_the_leader_epoch_with_which_its_partition_was_planned():
    planned = replace(window(OffsetRange("t", 0, 0, 40), OffsetRange("t", 1, 5, 15)), epochs={T0: 7})
    splits = make_splits(planned, 10)
    assert {(split.range.partition, split.epoch) for split in splits} == {(0, 7), (1, -1)}
    assert [split.epoch for split in make_whole_splits(planned)] == [7, -1]


def test_what_was_not_read_of_a_window_is_a_gap_in_each_partition():
    planned = window(OffsetRange("t", 0, 5, 20), OffsetRange("t", 1, 0, 4), OffsetRange("t", 2, 3, 3))
    read = [OffsetRange("t", 0, 12, 20), OffsetRange("t", 0, 5, 8)]
    assert find_unread_gaps(planned, read) == (Gap("t", 0, 8, 12), Gap("t", 1, 0, 4))
    assert find_unread_gaps(planned, planned.ranges) == ()


def test_the_position_keeps_where_the_first_window_began_until_its_topic_is_another_one():
    first = replace(window(OffsetRange("t", 0, 4, 10), OffsetRange("t", 1, 0, 3)), began={T0: 4})
    assert window_from_json(window_to_json(first)) == first
    position = find_next_position(Position(), first)
    position = find_next_position(position, window(OffsetRange("t", 0, 10, 12)))
    assert position.began == {T0: 4} and position_from_json(position_to_json(position)) == position
    again = replace(window(OffsetRange("t", 0, 0, 1)), topic_ids={"t": "another"})
    assert find_next_position(replace(position, topic_ids={"t": "one"}), again).began == {}
