"""Boundaries: whatever is proposed, in whatever order, windows tile the log."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_kafka_spark.errors import DataLoss
from airflow_kafka_spark.windows.boundaries import (
    Boundary,
    boundary_from_record,
    boundary_prefix,
    boundary_to_record,
    interval_ranges,
    settle,
)
from airflow_kafka_spark.windows.model import Gap, OffsetRange, TopicPartition
from airflow_kafka_spark.windows.plan import Log, PartitionLog, Position

T0 = TopicPartition("t", 0)


def at(instant: int, **offsets: int) -> Boundary:
    """``at(100, p0=5)``"""
    return Boundary("t", "id", instant, {int(name[1:]): offset for name, offset in offsets.items()})


def log(**bounds: tuple[int, int]) -> Log:
    """``log(p0=(low, end))``"""
    return Log("c", {"t": "id"}, {TopicPartition("t", int(n[1:])): PartitionLog(b[0], b[1], b[1]) for n, b in bounds.items()})


def between(one: Boundary, other: Boundary, current: Log, position: Position | None = None, data_loss="fail"):
    return interval_ranges(["t"], {"t": one}, {"t": other}, current, position or Position(), data_loss)


class TestSettle:
    def test_the_first_proposal_counts(self):
        assert settle([at(100, p0=5), at(100, p0=7)])[100].offsets == {0: 5}

    def test_a_boundary_decided_late_stays_between_those_that_are_there(self):
        # 200 was decided at the end of the log, before a late record of 150 came to offset 9.
        settled = settle([at(100, p0=3), at(200, p0=8), at(150, p0=9), at(120, p0=1)])
        assert {instant: b.offsets[0] for instant, b in sorted(settled.items())} == {100: 3, 120: 3, 150: 8, 200: 8}

    def test_a_partition_that_a_later_boundary_does_not_know_stands_at_its_beginning(self):
        settled = settle([at(300, p0=9), at(200, p0=5, p1=4), at(400, p0=12, p1=6)])
        assert settled[200].offsets == {0: 5, 1: 0}
        assert settled[400].offsets == {0: 12, 1: 6}

    @given(st.data())
    def test_whatever_is_proposed_in_whatever_order_offsets_ascend_with_instants_and_windows_tile(self, data):
        """Logs that grow, get partitions, lose their oldest records, have gaps where markers or compacted records were, and hold
        timestamps out of order; instants asked for in any order, and twice."""
        logs: dict[int, RandomLog] = {0: RandomLog()}
        proposals: list[Boundary] = []
        for _ in range(data.draw(st.integers(1, 14))):
            match data.draw(st.sampled_from(["write", "write", "mark", "ask", "ask", "ask", "grow", "truncate"])):
                case "write":
                    logs[data.draw(st.sampled_from(sorted(logs)))].write(data.draw(st.lists(st.integers(0, 60), max_size=6)))
                case "mark":
                    logs[data.draw(st.sampled_from(sorted(logs)))].end += data.draw(st.integers(1, 3))
                case "truncate":
                    chosen = logs[data.draw(st.sampled_from(sorted(logs)))]
                    chosen.low = data.draw(st.integers(chosen.low, chosen.end))
                case "grow" if len(logs) < 3:
                    logs[len(logs)] = RandomLog()
                case "ask":
                    instant = data.draw(st.integers(0, 6)) * 10
                    proposals.append(Boundary("t", "id", instant, {p: found.first(instant) for p, found in logs.items()}))
        settled = settle(proposals)
        for count in range(len(proposals)):
            earlier = settle(proposals[:count])
            assert all(settled[instant] == b for instant, b in earlier.items()), "what was decided has changed"
        current = Log(
            "c", {"t": "id"}, {TopicPartition("t", p): PartitionLog(found.low, found.end, found.end) for p, found in logs.items()}
        )
        windows = [between(settled[a], settled[b], current, data_loss="skip") for a, b in pairwise(sorted(settled))]
        assert windows == [between(settled[a], settled[b], current, data_loss="skip") for a, b in pairwise(sorted(settled))]
        for partition, found in logs.items():
            covered = [covers(window, partition) for window in windows]
            bounds = [span for span in covered if span is not None]
            assert all(end == start for (_, end), (start, _) in pairwise(bounds)), bounds
            read = [r for w in windows for r in w.ranges if r.partition == partition]
            assert all(r.span == 0 or r.start >= found.low for r in read), "a record that is gone would be read"
            kept = [o for o in found.stamps if bounds and bounds[0][0] <= o < bounds[-1][1] and o >= found.low]
            assert all(sum(r.start <= o < r.end for r in read) == 1 for o in kept), "a record in no window, or in two"


class RandomLog:
    """One partition: offsets with their timestamps, the first that is left, and the end."""

    def __init__(self) -> None:
        self.stamps: dict[int, int] = {}
        self.low = self.end = 0

    def write(self, stamps: list[int]) -> None:
        for stamp in stamps:
            self.stamps[self.end] = stamp
            self.end += 1

    def first(self, instant: int) -> int:
        """As ListOffsets answers; the end where there is no such record."""
        return next((o for o, stamp in self.stamps.items() if o >= self.low and stamp >= instant), self.end)


def covers(window, partition: int) -> tuple[int, int] | None:
    """What a window accounts for of a partition, gaps included."""
    r = next((r for r in window.ranges if r.partition == partition), None)
    gap = next((g for g in window.gaps if g.partition == partition), None)
    return None if r is None else (gap.start if gap else r.start, r.end)


class TestRanges:
    def test_a_partition_that_came_after_the_start_is_read_from_its_first_record(self):
        assert between(at(1, p0=3), at(2, p0=5, p1=4), log(p0=(0, 9), p1=(0, 9))).ranges == (
            OffsetRange("t", 0, 3, 5), OffsetRange("t", 1, 0, 4),
        )  # fmt: skip

    def test_records_deleted_before_they_were_read_fail_or_are_a_gap(self):
        with pytest.raises(DataLoss):
            between(at(1, p0=3), at(2, p0=8), log(p0=(5, 9)))
        planned = between(at(1, p0=3), at(2, p0=8), log(p0=(5, 9)), data_loss="skip")
        assert planned.ranges == (OffsetRange("t", 0, 5, 8),)
        assert planned.gaps == (Gap("t", 0, 3, 5),)

    def test_an_interval_without_offsets_has_lost_nothing(self):
        assert between(at(1, p0=3), at(2, p0=3), log(p0=(5, 9))).ranges == (OffsetRange("t", 0, 3, 3),)

    def test_what_progress_windows_have_moved_is_not_moved_again(self):
        position = Position({T0: 5}, {"t": "id"})
        assert between(at(1, p0=3), at(2, p0=8), log(p0=(0, 9)), position).ranges == (OffsetRange("t", 0, 5, 8),)
        assert between(at(1, p0=1), at(2, p0=4), log(p0=(0, 9)), position).ranges == (OffsetRange("t", 0, 5, 5),)

    def test_what_was_moved_of_another_topic_of_that_name_counts_for_nothing(self):
        position = Position({T0: 5}, {"t": "another"})
        assert between(at(1, p0=3), at(2, p0=8), log(p0=(0, 9)), position).ranges == (OffsetRange("t", 0, 3, 8),)


class TestRecords:
    def test_a_boundary_is_read_as_it_was_written_and_its_key_is_no_pipelines(self):
        boundary = Boundary("t", "id", 123, {0: 5, 1: 7}, "dag/run/task")
        key, value = boundary_to_record(boundary, "token")
        assert boundary_from_record(key, value) == boundary
        assert key.startswith(boundary_prefix("t"))
        assert not key.startswith(boundary_prefix("t2"))
        assert key != boundary_to_record(boundary, "other")[0], "compaction must not drop the first one"
