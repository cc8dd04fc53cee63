"""Archives of old intervals give the answers that the single intervals would give."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from airflow_kafka_spark.windows import interval_archive
from airflow_kafka_spark.windows.interval import (
    Interval,
    IntervalState,
    exclude_other_intervals,
    find_contiguous_offsets,
    find_epochs_at,
    find_overlapping,
    find_sharing_intervals,
    find_topic_start,
)
from airflow_kafka_spark.windows.interval_archive import ARCHIVE_AFTER, IntervalArchive, Intervals, group_into_archives
from airflow_kafka_spark.windows.memory import fold_records, list_known_topic_ids, make_archive_record, make_interval_record
from airflow_kafka_spark.windows.model import Gap, OffsetRange, State, TopicPartition, Tries

NEW_YEAR = datetime(2026, 1, 1, tzinfo=timezone.utc)


def hour(number: int, length: int = 1) -> Interval:
    return Interval(NEW_YEAR + timedelta(hours=number), NEW_YEAR + timedelta(hours=number + length))


def chain(first: int, count: int) -> list[IntervalState]:
    """Return intervals of one partition that continue each other."""
    ranges = {n: OffsetRange("t", 0, n * 10, (n + 1) * 10) for n in range(first, first + count)}
    return [
        IntervalState(hour(n), State.COMPLETE, (r,), f"run-{n}", topic_ids={"t": "id"}, forgotten=True, offset=n)
        for n, r in ranges.items()
    ]


def split(states: list[IntervalState]) -> Intervals:
    """Return the intervals as the ledger has them after it has archived as many as possible."""
    made = group_into_archives(states)
    gone = {state.interval.name for _, members in made for state in members}
    return Intervals({s.interval.name: s for s in states if s.interval.name not in gone}, [archive for archive, _ in made])


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(interval_archive, "ARCHIVE_AFTER", 0)


def test_the_window_of_an_interval_has_its_leader_epochs_from_its_record_and_from_an_archive():
    """A replay compares them: without them, it would write records that took the place of those that were moved."""
    epochs = {TopicPartition("t", 0): 7}
    states = [replace(state, epochs=epochs) for state in chain(0, 4)]
    for kept in (states, [replace(state, epochs={}) for state in states]):
        single = fold_records("p", [make_interval_record("p", kept[0])]).intervals.get(hour(0).name)
        archived = split(kept).get(hour(0).name)
        for found in (single, archived):
            assert found is not None and found.make_window("p").epochs == kept[0].epochs
    # A window behind them compares that of their end.
    states[-1] = replace(states[-1], epochs={TopicPartition("t", 0): 8})
    ((archive, _),) = group_into_archives(states)
    read = fold_records("p", [make_archive_record("p", archive)]).intervals.spans
    assert find_epochs_at(read, {TopicPartition("t", 0): 40}) == {TopicPartition("t", 0): 8}
    assert find_epochs_at(read, {TopicPartition("t", 0): 30}) == {}, "of its middle only the archive's members know"


def test_old_intervals_are_archived_once_there_are_many(monkeypatch):
    monkeypatch.setattr(interval_archive, "ARCHIVE_AFTER", ARCHIVE_AFTER)
    assert group_into_archives(chain(0, ARCHIVE_AFTER)) == []
    ((archive, members),) = group_into_archives(chain(0, ARCHIVE_AFTER + 1))
    assert archive.count == len(members) == ARCHIVE_AFTER + 1
    assert archive.span.interval == hour(0, ARCHIVE_AFTER + 1)
    assert archive.span.ranges == (OffsetRange("t", 0, 0, 10 * (ARCHIVE_AFTER + 1)),)


def test_an_archive_gives_back_each_interval_as_it_was():
    states = [
        replace(s, replay=n, tries={s.run: Tries(n, 2, 1)}, gaps=(Gap("t", 0, s.ranges[0].start, s.ranges[0].start),))
        for n, s in enumerate(chain(0, 9))
    ]
    known = split(states)
    assert not known.recent
    assert dict(known) == {s.interval.name: s for s in states}
    assert len(known) == known.complete == 9
    assert known[hour(4).name] == states[4]
    assert [state for _, state in known.newest_first] == states[::-1]
    assert hour(9).name not in known
    assert "no name" not in known


def test_a_record_of_its_own_counts_before_an_archive():
    again = replace(chain(4, 1)[0], state=State.PLANNED, replay=1)
    known = Intervals({again.interval.name: again}, split(chain(0, 9)).archives)
    assert known[again.interval.name] is again
    assert (len(known), known.complete) == (9, 9)
    assert sum(1 for _ in known.values()) == 9
    assert dict(known.newest_first)[again.interval.name] is again


@pytest.mark.parametrize(
    ("broken", "parts"),
    [
        (lambda s: replace(s, interval=Interval(s.interval.start + timedelta(minutes=1), s.interval.end)), [5, 5]),
        (lambda s: replace(s, ranges=(OffsetRange("t", 0, 53, 60),)), [5, 5]),
        (lambda s: replace(s, ranges=(OffsetRange("t", 0, 55, 60),), gaps=(Gap("t", 0, 50, 55),)), [10]),
        (lambda s: replace(s, ranges=(OffsetRange("t", 0, 57, 60),), gaps=(Gap("t", 0, 50, 55),)), [5, 1, 4]),
        (lambda s: replace(s, ranges=(OffsetRange("t", 0, 50, 50),)), [6, 4]),
    ],
    ids=["a hole in time", "a hole in the offsets", "a gap", "a gap and a hole", "no records"],
)
def test_an_archive_knows_its_holes(broken, parts):
    states = chain(0, 10)
    states[5] = broken(states[5])
    ((archive, _),) = group_into_archives(states)
    assert archive.count == 10
    assert archive.has_holes == (archive.as_one.parts is not None) == (len(parts) > 1)
    if archive.has_holes:
        assert [part.interval.start for part in archive.as_one.parts()] == [
            states[sum(parts[:n])].interval.start for n in range(len(parts))
        ]


@pytest.mark.parametrize(
    "broken",
    [
        lambda s: replace(s, topic_ids={"t": "another"}),
        lambda s: replace(s, ranges=(*s.ranges, OffsetRange("u", 0, 0, 0))),
    ],
    ids=["another topic", "one more topic"],
)
def test_other_topics_end_an_archive(broken):
    states = chain(0, 10)
    states[5] = broken(states[5])
    assert [archive.count for archive, _ in group_into_archives(states)] == [5, 4]


def test_the_group_passes_holes_in_time_without_taking_archives_apart(monkeypatch):
    states = [
        replace(state, interval=Interval(state.interval.start, state.interval.start + timedelta(minutes=30)))
        for state in chain(0, 20)
    ]
    ((archive, _),) = group_into_archives(states)
    (read,) = fold_records("p", [make_archive_record("p", archive)._replace(offset=3)]).intervals.archives
    assert read.has_holes and read.only_in_time
    monkeypatch.setattr(interval_archive, "unpack_values", None)
    assert find_contiguous_offsets([read.as_one], {TopicPartition("t", 0): 0}) == {TopicPartition("t", 0): 200}


def test_few_intervals_are_not_worth_an_archive():
    assert group_into_archives(chain(0, 3)) == []


def test_no_archive_is_made_around_another_one():
    old = [archive for archive, _ in group_into_archives(chain(20, 10))]
    assert [archive.count for archive, _ in group_into_archives(chain(0, 5) + chain(40, 6), old)] == [5, 6]
    assert [archive.count for archive, _ in group_into_archives(chain(0, 2) + chain(40, 6), old)] == [6]
    assert group_into_archives(chain(22, 6), old) == [], "those that are moved once more"


@pytest.mark.parametrize("length", [timedelta(hours=1), timedelta(minutes=15)], ids=["an hour a day", "a quarter of an hour"])
def test_intervals_of_a_schedule_with_holes_are_archived(length, monkeypatch):
    """One interval a day, whose archive is taken apart only by what touches it."""
    days = 365
    states = []
    for day in range(days):
        interval = Interval(hour(24 * day).start, hour(24 * day).start + length)
        ranges = tuple(OffsetRange("t", p, day * 100, day * 100 + 10) for p in range(50))
        states.append(IntervalState(interval, State.COMPLETE, ranges, "run", topic_ids={"t": "id"}, offset=day))
    monkeypatch.setattr(interval_archive, "ARCHIVE_AFTER", ARCHIVE_AFTER)
    known = Intervals()
    for state in states:
        recent = {**known.recent, state.interval.name: state}
        made = group_into_archives(recent.values(), known.archives)
        gone = {member.interval.name for _, members in made for member in members}
        kept = {name: found for name, found in recent.items() if name not in gone}
        known = Intervals(kept, (*known.archives, *(archive for archive, _ in made)))
    assert (len(known), len(known.recent), len(known.archives)) == (days, days % (ARCHIVE_AFTER + 1), 3)
    taken_apart = []
    unpack = interval_archive.unpack_values
    monkeypatch.setattr(interval_archive, "unpack_values", lambda text: taken_apart.append(1) or unpack(text))
    new = hour(24 * days)
    assert not find_overlapping(new, known.spans)
    assert not list(find_sharing_intervals([OffsetRange("t", 0, days * 100, days * 100 + 10)], {"t": "id"}, known.spans))
    assert find_topic_start("t", "id", new, known.spans) == new.start
    assert not taken_apart
    assert find_contiguous_offsets(known.spans, {TopicPartition("t", p): 0 for p in range(50)}, topic_ids={"t": "id"}) == {
        TopicPartition("t", p): 10 for p in range(50)
    }
    assert len(taken_apart) == 1, "the one that holds what comes next"
    assert find_overlapping(hour(24 * 200), known.spans) == [states[200]] * (length < timedelta(hours=1))
    assert find_overlapping(hour(24 * 200 + 5), known.spans) == []


def test_an_archive_fits_into_a_record(monkeypatch):
    states = chain(10, 20)
    monkeypatch.setattr(interval_archive, "MAX_BYTES", 5 * len(json.dumps(interval_archive.interval_to_json(states[0]))))
    assert {archive.count for archive, _ in group_into_archives(states)} == {5}


def test_the_ledger_remembers_archives():
    states = chain(0, 30)
    made = group_into_archives(states[:20])
    records = [make_archive_record("p", archive)._replace(offset=70 + n) for n, (archive, _) in enumerate(made)]
    records += [make_interval_record("p", state)._replace(offset=90) for state in states[20:]]
    memory = fold_records("p", records)
    assert dict(memory.intervals) == {s.interval.name: s for s in states}
    assert memory.oldest_offset == 20, "the first record of the oldest interval that has one of its own"
    assert list_known_topic_ids(memory) == {"t": ("id",)}
    assert fold_records("p", records[:1]).oldest_offset == 70, "a reader that begins behind it would miss it"
    assert (
        fold_records("p", [*records, make_archive_record("p", made[0][0])._replace(value=None, offset=99)]).intervals.archives
        == ()
    )


HOURS = st.lists(
    st.tuples(
        st.sampled_from(["go on", "go on", "go on", "go on", "miss an hour", "miss offsets", "empty", "other id"]),
        st.integers(0, 3),
    ),
    min_size=4,
    max_size=24,
)


def _states(steps: list[tuple[str, int]]) -> list[IntervalState]:
    """Two partitions, of which the second is created after some hours."""
    found, at, place, topic_id = [], 0, {0: 5, 1: 0}, "id-0"
    for number, (step, records) in enumerate(steps):
        at += 2 if step == "miss an hour" else 1
        topic_id = f"id-{number}" if step == "other id" else topic_id
        ranges = []
        for partition in (0, 1) if number > 6 else (0,):
            start = place[partition] + (4 if step == "miss offsets" else 0)
            place[partition] = end = start + (0 if step == "empty" else records + partition)
            ranges.append(OffsetRange("t", partition, start, end))
        found.append(IntervalState(hour(at), State.COMPLETE, tuple(ranges), f"r{at}", topic_ids={"t": topic_id}, offset=number))
    return found


# Hours without records, then a hole in the offsets, are not one piece: their archive would let the group pass over the hole.
@example([("go on", 0)] * 3 + [("miss offsets", 0)], 0, 1, 0, 1, 0, 1, -1)
# A partition that is new in the seventh hour and does not begin with its first record.
@example([("go on", 1)] * 7 + [("miss offsets", 1)] + [("go on", 1)] * 3, 0, 1, 0, 1, 0, 1, -1)
# An archive of two hours, and an interval of the same two hours.
@example([("go on", 0)] * 12 + [("miss an hour", 0)] * 4 + [("go on", 0)], 21, 2, 0, 1, 0, 0, 0)
@example([("go on", 0)] * 4, 1, 4, 0, 1, 0, 0, -1)
@settings(max_examples=150)
@given(
    HOURS,
    st.integers(0, 30),
    st.integers(1, 4),
    st.integers(0, 60),
    st.integers(1, 9),
    st.integers(0, 40),
    st.integers(0, 30),
    st.integers(-1, 23),
)
def test_spans_answer_as_the_intervals_one_by_one(steps, start, length, offset, count, committed, first, late):
    """:param late: which of the intervals is moved once the others are archived; -1 for none."""
    states = _states(steps)
    spans = split([state for number, state in enumerate(states) if number != late]).spans + tuple(states[late : late + 1])
    assume(late < len(states))
    mine, topic_ids = hour(start, length), {"t": states[-1].topic_ids["t"]}
    assume(mine not in [s.interval for s in states])
    wanted = [OffsetRange("t", partition, offset, offset + count) for partition in (0, 1)]
    assert bool(find_overlapping(mine, spans)) == bool([s for s in states if s.interval.overlaps(mine)])
    assert bool(list(find_sharing_intervals(wanted, topic_ids, spans))) == bool(
        list(find_sharing_intervals(wanted, topic_ids, states))
    )
    assert split(states).complete == len(states)
    assert exclude_other_intervals(wanted, topic_ids, spans) == exclude_other_intervals(wanted, topic_ids, states)
    if not find_overlapping(mine, states):
        assert find_topic_start("t", topic_ids["t"], mine, spans) == find_topic_start("t", topic_ids["t"], mine, states)
    # The group stands where it stands once old intervals are archived: it has followed them as far as it goes.
    position = {TopicPartition("t", p): committed for p in (0, 1)}
    for begin in (None, hour(first).start):
        reached = find_contiguous_offsets(states, position, begin, topic_ids)
        assert find_contiguous_offsets(spans, reached, begin, topic_ids) == reached


def test_an_archive_says_how_it_was_made():
    archive = IntervalArchive.of(chain(0, 5))
    value = json.loads(make_archive_record("p", archive).value or b"")
    assert (value["count"], value["span"]["ranges"]) == (5, [["t", 0, 0, 50]])
    assert "packed" not in repr(archive)


def test_a_reader_that_looks_again_holds_each_archive_once_and_notices_another_one_in_its_place():
    (one, _), (other, _) = group_into_archives(chain(0, 10))[0], group_into_archives(chain(0, 9))[0]
    same_key = make_archive_record("p", one)
    first = same_key._replace(offset=5)
    kept = {}
    memory = fold_records("p", [first], kept)
    assert fold_records("p", [first], kept).intervals.archives[0] is memory.intervals.archives[0]
    again = first._replace(value=make_archive_record("p", other).value)
    assert [archive.count for archive in fold_records("p", [again], kept).intervals.archives] == [9]
    gone = first._replace(value=None, offset=6)
    assert not fold_records("p", [first, gone], kept).intervals
