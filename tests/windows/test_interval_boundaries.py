"""Boundaries: windows tile the log for any proposals in any order."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_kafka_spark.errors import BeginningDeleted, DataLoss
from airflow_kafka_spark.windows import interval_boundaries as boundaries
from airflow_kafka_spark.windows.interval_boundaries import (
    Boundary,
    BoundaryArchive,
    InstantInLog,
    archive_from_record,
    archive_to_record,
    boundary_from_record,
    boundary_to_record,
    find_last_expired_boundary,
    find_removable_boundaries,
    fit_proposal,
    make_boundary_prefix,
    plan_interval_ranges,
    propose_boundary,
    resolve_proposals,
    select_near_boundaries,
    to_archive,
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
    return plan_interval_ranges(["t"], {"t": one}, {"t": other}, current, position or Position(), data_loss)


class TestSettle:
    def test_the_first_proposal_counts(self):
        assert resolve_proposals([at(100, p0=5), at(100, p0=7)])[100].offsets == {0: 5}

    def test_a_boundary_decided_late_stays_between_those_that_are_there(self):
        # 200 was decided at the end of the log, before a late record of 150 came to offset 9.
        settled = resolve_proposals([at(100, p0=3), at(200, p0=8), at(150, p0=9), at(120, p0=1)])
        assert {instant: b.offsets[0] for instant, b in sorted(settled.items())} == {100: 3, 120: 3, 150: 8, 200: 8}

    def test_a_partition_that_a_later_boundary_does_not_know_stands_at_its_beginning(self):
        settled = resolve_proposals([at(300, p0=9), at(200, p0=5, p1=4), at(400, p0=12, p1=6)])
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
        settled = resolve_proposals(proposals)
        for count in range(len(proposals)):
            earlier = resolve_proposals(proposals[:count])
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

    @given(st.data())
    def test_settling_is_what_looking_at_every_other_boundary_gave_and_is_idempotent(self, data):
        proposals = data.draw(random_proposals(most=30))
        settled = resolve_proposals(proposals)
        assert settled == settle_by_looking_at_all(proposals)
        assert list(settled) == list(dict.fromkeys(p.instant for p in proposals)), "in the order of the log"
        assert resolve_proposals(settled.values()) == settled
        assert resolve_proposals([*proposals, *data.draw(st.permutations(proposals))]) == settled

    def test_settling_months_of_hours_of_fifty_partitions_takes_no_time(self):
        offsets = [{p: n * 10 + p for p in range(50)} for n in range(4_000)]
        # Backfilled: in the order of the instants the neighbours would always be at the end.
        order = [*range(0, 4_000, 2), *range(3_999, 0, -2)]
        begun = time.process_time()
        settled = resolve_proposals(Boundary("t", "id", n, offsets[n]) for n in order)
        assert time.process_time() - begun < 10, "more than a minute, when each was compared with all others"
        assert all(settled[n].offsets == offsets[n] for n in order)


class TestPrune:
    def test_what_lies_before_the_first_record_that_is_left_is_not_needed_but_for_the_last_of_it(self):
        proposals = [at(instant, p0=offset) for instant, offset in ((100, 1), (200, 4), (300, 6), (400, 9))]
        assert find_removable_boundaries((), proposals, "id", {0: 6}).proposals == [1, 0]
        assert find_removable_boundaries((), proposals, "id", {0: 5}).proposals == [0]
        assert find_removable_boundaries((), proposals, "id", {0: 0}).proposals == []
        assert find_removable_boundaries((), proposals, "id", {}).proposals == []

    def test_a_partition_that_still_has_records_keeps_the_boundaries_of_all(self):
        proposals = [at(instant, p0=offset, p1=offset) for instant, offset in ((100, 1), (200, 4), (300, 6), (400, 9))]
        assert find_removable_boundaries((), proposals, "id", {0: 9, 1: 4}).proposals == [0]

    def test_what_came_second_and_what_is_of_a_topic_that_was_replaced_is_not_needed(self):
        old = [replace(at(100, p0=500), topic_id="old"), replace(at(200, p0=600), topic_id="old")]
        proposals = [*old, at(100, p0=1), at(200, p0=3), at(100, p0=2)]
        assert find_removable_boundaries((), proposals, "id", {0: 0}).proposals == [4, 1, 0]
        assert find_removable_boundaries((), proposals, "old", {0: 700}).proposals == [0], (
            "a stale answer: the topic that is there now is not known to it"
        )

    def test_what_holds_another_boundary_in_its_place_is_needed(self):
        # 300 was looked up at 30, though 100 had been decided at 50, and 200 came later.
        proposals = [at(100, p0=50), at(300, p0=30), at(200, p0=40)]
        assert find_removable_boundaries((), proposals, "id", {0: 50}).proposals == [2]
        assert resolve_proposals(proposals[:2])[300].offsets == {0: 50}

    @given(st.data())
    def test_at_every_moment_of_the_removal_and_whatever_is_proposed_meanwhile_what_is_needed_stays(self, data):
        proposals = data.draw(random_proposals(most=20))
        partitions = sorted({p for b in proposals for p in b.offsets})
        lows = {p: data.draw(st.integers(0, 40)) for p in partitions}
        settled, removed = resolve_proposals(proposals), find_removable_boundaries((), proposals, "id", lows).proposals
        horizon = find_last_expired_boundary(settled, lows)
        later = data.draw(random_proposals(most=6))
        for count in range(len(removed) + 1):
            left = [p for n, p in enumerate(proposals) if n not in removed[:count]]
            now = resolve_proposals(left)
            assert all(settled[instant] == boundary for instant, boundary in now.items())
            assert horizon is None or {i for i in settled if i >= horizon.instant} <= now.keys()
            # A proposal may have been made without seeing the removal, and still come after it in the log.
            with_all, with_rest = resolve_proposals([*proposals, *later]), resolve_proposals([*left, *later])
            after = [i for i in with_all if horizon is None or i > horizon.instant]
            assert all(_stands(with_rest[i], lows) == _stands(with_all[i], lows) for i in after)
            # What is asked for once more lies below what is left.
            before = [b for i, b in with_rest.items() if horizon is not None and i < horizon.instant]
            assert all(b.offsets.get(p, 0) <= low for b in before for p, low in lows.items())
        assert find_removable_boundaries((), [p for n, p in enumerate(proposals) if n not in removed], "id", lows).proposals == []


class TestArchives:
    """Old boundaries, many in one record, keep their offsets."""

    @pytest.fixture(autouse=True)
    def soon(self, monkeypatch):
        monkeypatch.setattr(boundaries, "ARCHIVE_AFTER", 3)
        monkeypatch.setattr(boundaries, "UNARCHIVED", 2)
        monkeypatch.setattr(boundaries, "MAX_ARCHIVE_BYTES", 250)

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    def test_at_every_moment_of_archiving_and_whatever_is_proposed_meanwhile_all_boundaries_stand_where_they_stood(self, data):
        proposals = data.draw(random_proposals(most=24))
        partitions = sorted({p for b in proposals for p in b.offsets})
        lows = {p: data.draw(st.integers(0, 40)) for p in partitions}
        settled = resolve_proposals(proposals)
        # Two that archive know the log as far as it was when they read it.
        archives: list[BoundaryArchive] = []
        left = proposals
        for _ in range(2):
            seen = data.draw(st.integers(0, len(left)))
            archives += to_archive(select_near_boundaries(archives, (p.instant for p in left[:seen]), {}), left[:seen])
            held = {b.instant for archive in archives for b in archive.boundaries}
            removed = data.draw(st.sets(st.sampled_from([n for n, p in enumerate(left) if p.instant in held] or [-1])))
            left = [p for n, p in enumerate(left) if n not in removed]
        read = [archive_from_record(*archive_to_record(archive, f"{n}"), n) for n, archive in enumerate(archives)]
        assert read == archives
        assert [a.boundaries for a in read] == [a.boundaries for a in archives]
        for wanted in ([], [data.draw(st.integers(0, 12))], range(13)):
            now = resolve_proposals([*select_near_boundaries(read, [*wanted, *(p.instant for p in left)], lows), *left])
            assert all(stand_alike(now[instant], settled[instant], partitions) for instant in now)
            assert {i for i in wanted if i in settled} <= now.keys()
            gone = find_last_expired_boundary(settled, lows)
            assert (gone.instant if gone else None) == (
                found.instant if (found := find_last_expired_boundary(now, lows)) else None
            )
            # The next proposals get the offsets that they would have got.
            later = at(data.draw(st.integers(0, 12)), **{f"p{p}": data.draw(st.integers(0, 40)) for p in partitions})
            near = select_near_boundaries(read, [later.instant, *(p.instant for p in left)], lows)
            with_all = resolve_proposals([*proposals, later])
            assert stand_alike(resolve_proposals([*near, *left, later])[later.instant], with_all[later.instant], partitions)
        # Removing what is not needed leaves the others where they are.
        gone_too = find_removable_boundaries(read, left, "id", lows).archives
        rest = [archive for n, archive in enumerate(read) if n not in gone_too]
        horizon = find_last_expired_boundary(settled, lows)
        now = resolve_proposals([*select_near_boundaries(rest, range(13), lows), *left])
        assert all(stand_alike(now[i], b, partitions) for i, b in settled.items() if horizon is None or i >= horizon.instant)

    def test_a_year_of_hours_is_looked_up_without_taking_it_apart(self):
        archives = [
            BoundaryArchive.of([at(n, **{f"p{p}": n for p in range(50)}) for n in range(begin, begin + 500)])
            for begin in range(0, 17_500, 500)
        ]
        singles = [at(n, **{f"p{p}": n for p in range(50)}) for n in range(17_500, 17_700)]
        near = select_near_boundaries(archives, [17_699, 17_700, *(b.instant for b in singles)], {})
        assert [b.instant for b in near] == [17_499]
        assert not any("boundaries" in vars(archive) for archive in archives)
        found = select_near_boundaries(archives, [3_250], dict.fromkeys(range(50), 3_000))
        assert [b.instant for b in found] == [3_000, 3_249, 3_250, 3_251], "and the last that has nothing before it"
        assert sum("boundaries" in vars(archive) for archive in archives) <= 2

    def test_archives_of_a_topic_that_was_replaced_are_not_needed(self):
        old = BoundaryArchive.of([replace(at(n, p0=n), topic_id="old") for n in range(3)])
        new = BoundaryArchive.of([at(n, p0=n) for n in range(3)])
        assert find_removable_boundaries([old, new, new], [], "id", {0: 0}).archives == [0, 2], "and one that was written twice"
        assert find_removable_boundaries([old], [], "id", {0: 0}).archives == [], "a stale answer, perhaps"


def stand_alike(one: Boundary, other: Boundary, partitions: Iterable[int]) -> bool:
    """A partition that a boundary does not know stands at its beginning."""
    return all(one.offsets.get(p, 0) == other.offsets.get(p, 0) for p in partitions)


def _stands(boundary: Boundary, partitions: Mapping[int, int]) -> list[int]:
    return [boundary.offsets.get(p, 0) for p in partitions]


@st.composite
def random_proposals(draw: st.DrawFn, most: int) -> list[Boundary]:
    """Return proposals for a few instants, in any order, with offsets in any order; the number of partitions only grows."""
    found, partitions = [], 1
    for _ in range(draw(st.integers(0, most))):
        partitions = min(3, partitions + draw(st.sampled_from([0, 0, 0, 1])))
        offsets = {p: draw(st.integers(0, 40)) for p in range(partitions)}
        found.append(Boundary("t", "id", draw(st.integers(0, 12)), offsets))
    return found


def settle_by_looking_at_all(proposals: Sequence[Boundary]) -> dict[int, Boundary]:
    """Define settling by a quadratic reference: each proposal stays between all boundaries that counted before it."""
    settled: dict[int, Boundary] = {}
    for proposal in proposals:
        if proposal.instant in settled:
            continue
        earlier = [b for instant, b in settled.items() if instant < proposal.instant]
        later = [b for instant, b in settled.items() if instant > proposal.instant]
        offsets = {}
        for partition in sorted({*proposal.offsets, *(p for b in earlier for p in b.offsets)}):
            highest = min((b.offsets.get(partition, 0) for b in later), default=None)
            lowest = max((b.offsets.get(partition, 0) for b in earlier), default=0)
            offset = max(proposal.offsets.get(partition, 0), lowest)
            offsets[partition] = offset if highest is None else min(offset, highest)
        settled[proposal.instant] = replace(proposal, offsets=offsets)
    return settled


class RandomLog:
    """One partition: offsets with their timestamps, the first offset that is left, and the end."""

    def __init__(self) -> None:
        self.stamps: dict[int, int] = {}
        self.low = self.end = 0

    def write(self, stamps: list[int]) -> None:
        for stamp in stamps:
            self.stamps[self.end] = stamp
            self.end += 1

    def first(self, instant: int) -> int:
        """Return the answer of ListOffsets; the end if there is no such record."""
        return next((o for o, stamp in self.stamps.items() if o >= self.low and stamp >= instant), self.end)


def covers(window, partition: int) -> tuple[int, int] | None:
    """Return the offsets of a partition that a window accounts for, gaps included."""
    r = next((r for r in window.ranges if r.partition == partition), None)
    gap = next((g for g in window.gaps if g.partition == partition), None)
    return None if r is None else (gap.start if gap else r.start, r.end)


class TestWhatWasDeletedBeforeItWasDecided:
    """If the beginning of the log was deleted, it is unknown whether the deleted records were older than an instant."""

    def propose(self, instant: int, found: int, low: int, *settled: Boundary, now: int = 1000) -> Boundary:
        at_instant = InstantInLog("t", "id", instant, {0: found}, {0: low})
        return propose_boundary(at_instant, {b.instant: b for b in settled}, by="a test", now=now)

    def test_an_older_record_that_is_left_shows_where_the_instant_lies(self):
        assert not self.propose(100, found=7, low=5).earliest

    def test_a_log_that_has_lost_nothing_shows_it_as_well(self):
        assert not self.propose(100, found=0, low=0).earliest

    def test_otherwise_it_may_lie_anywhere_before_what_is_left(self):
        assert self.propose(100, found=5, low=5).earliest == {0: 0}
        assert self.propose(100, 5, 5, at(50, p0=3)).earliest == {0: 3}

    def test_an_earlier_boundary_at_the_beginning_of_what_is_left_shows_it_unless_it_is_not_known_itself(self):
        assert not self.propose(100, 5, 5, at(50, p0=5)).earliest
        unknown = self.propose(50, found=5, low=5, now=1000)
        assert self.propose(100, 5, 5, unknown).earliest == {0: 0}

    def test_what_was_deleted_before_the_instant_came_was_older(self):
        unknown = self.propose(50, found=5, low=5, now=60)
        assert not self.propose(100, 5, 5, unknown).earliest

    @given(st.data())
    def test_where_timestamps_ascend_the_place_in_the_whole_log_is_never_outside_of_what_is_said(self, data):
        whole, low, now = RandomLog(), 0, 0
        settled: dict[int, Boundary] = {}
        places: dict[int, int] = {}
        for _ in range(data.draw(st.integers(1, 15))):
            now += data.draw(st.integers(0, 20))
            match data.draw(st.sampled_from(["write", "write", "delete", "ask", "ask"])):
                case "write":
                    last = max(whole.stamps.values(), default=0)
                    whole.write(sorted(data.draw(st.lists(st.integers(last, now), max_size=5))))
                case "delete":
                    low = data.draw(st.integers(low, whole.end))
                case "ask":
                    instant = data.draw(st.integers(max(settled, default=-1) + 1, max(settled, default=0) + 30))
                    if instant > now:
                        continue
                    first = next((o for o, stamp in whole.stamps.items() if stamp >= instant), whole.end)
                    found = next((o for o, stamp in whole.stamps.items() if o >= low and stamp >= instant), whole.end)
                    settled[instant] = fit_proposal(self.propose(instant, found, low, *settled.values(), now=now), settled)
                    places[instant] = max(first, *places.values(), 0)
                    boundary = settled[instant]
                    assert boundary.earliest.get(0, boundary.offsets[0]) <= places[instant] <= boundary.offsets[0]

    def test_an_interval_whose_records_may_have_been_deleted_has_lost_them(self):
        settled: dict[int, Boundary] = {}
        for instant in (100, 200, 300):
            settled[instant] = self.propose(instant, 5 if instant < 300 else 7, 5, *settled.values())
        for one, other, end in ((100, 200, 5), (200, 300, 7)):
            with pytest.raises(BeginningDeleted, match="t-0 contains nothing from before 1970-01-01"):
                between(settled[one], settled[other], log(p0=(5, 9)))
            planned = between(settled[one], settled[other], log(p0=(5, 9)), data_loss="skip")
            assert (planned.ranges, planned.gaps) == ((OffsetRange("t", 0, 5, end),), (Gap("t", 0, 0, 5),))
        # Its later known offsets do not change when more records are deleted.
        with pytest.raises(BeginningDeleted):
            between(settled[100], settled[200], log(p0=(8, 9)))

    def test_what_progress_windows_have_moved_was_not_lost(self):
        one, other = self.propose(100, found=5, low=5), at(200, p0=7)
        position = Position({T0: 5}, {"t": "id"})
        assert between(one, other, log(p0=(5, 9)), position).ranges == (OffsetRange("t", 0, 5, 7),)
        with pytest.raises(BeginningDeleted) as caught:
            between(one, other, log(p0=(5, 9)), Position({T0: 3}, {"t": "id"}))
        assert caught.value.wanted == 3


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
    def test_a_boundary_that_was_written_before_it_was_known_what_was_deleted_can_be_read(self):
        key, _ = boundary_to_record(at(1, p0=3), "token")
        assert boundary_from_record(key, b'{"v":1,"topic_id":"id","offsets":[[0,3]],"by":""}') == at(1, p0=3)
        decided = replace(at(1, p0=3), earliest={0: 1}, decided_at=5)
        assert boundary_from_record(*boundary_to_record(decided, "token")) == decided

    def test_a_boundary_is_read_as_it_was_written_and_its_key_is_no_pipelines(self):
        boundary = Boundary("t", "id", 123, {0: 5, 1: 7}, "dag/run/task")
        key, value = boundary_to_record(boundary, "token")
        assert boundary_from_record(key, value) == boundary
        assert key.startswith(make_boundary_prefix("t"))
        assert not key.startswith(make_boundary_prefix("t2"))
        assert key != boundary_to_record(boundary, "other")[0], "compaction must not drop the first one"

    def test_a_boundary_and_an_archive_of_a_later_release_are_refused(self):
        key, value = boundary_to_record(at(1, p0=3), "token")
        newer = value.replace(b'"v":%d' % boundaries.VERSION, b'"v":%d' % (boundaries.VERSION + 1))
        with pytest.raises(ValueError, match=f"version {boundaries.VERSION + 1}"):
            boundary_from_record(key, newer)
        with pytest.raises(ValueError, match=f"version {boundaries.VERSION + 1}"):
            archive_from_record(b'[null,"boundaries","t","1"]', newer, 0)
