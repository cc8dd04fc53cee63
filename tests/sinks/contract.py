"""The contract of :mod:`airflow_kafka_spark.sinks.base`, sentence by sentence, for every sink.

A new sink gets a :class:`~tests.sinks.cases.Case` and is named in ``conftest.py``. It has to pass these tests.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import pickle
import sys
import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pyarrow as pa
import pytest
from airflow.sdk import Asset

from airflow_kafka_spark.errors import ForeignOffsets, KafkaSparkError, Problem, WindowConflict
from airflow_kafka_spark.sinks.base import Guarantee, Rows, SplitWriter, WindowWriter
from airflow_kafka_spark.windows.model import Applied, OffsetRange
from tests.sinks.attempt import Victim, apply, result_of, travelled, write_all, write_split
from tests.sinks.cases import Case
from tests.sinks.feed import Feed, Job, recut, replayed, rows_of
from tests.sinks.oracle import same_multiset
from tests.support.distribution import extended
from tests.support.waiting import eventually

every_format = pytest.mark.every_format
"""Marks tests of what is in the files. The formats share all else, so one of them stands for all in the other tests."""

every_writer = pytest.mark.every_writer
"""Marks tests of what a task holds in memory, which depends on how it writes."""

POINTS = ("split.mid", "split.flushed", "job.done", "sink.staged", "sink.in_transaction", "sink.committed")
ZOMBIES = ("split.mid", "sink.staged", "sink.in_transaction", *map(extended, ("split.flushed", "job.done", "sink.committed")))


def record_of(job: Job) -> Applied:
    """Return the facts of a window that a sink must record."""
    window = job.window
    ids = {"cluster_id": window.cluster_id, "topic_ids": window.topic_ids}
    return Applied(window.pipeline, window.number, window.ranges, len(job.expected), replay=window.replay, **ids)


class SinkContract:
    """The guarantees of every sink."""

    # --- values -------------------------------------------------------------------------------------------------------

    @every_format
    def test_values_of_all_types_come_back_as_they_were(self, case: Case, feed: Feed) -> None:
        job = feed.next(200, 150, 3)
        apply(case.sink, job)
        assert same_multiset(job.expected, case.read()) == 353

    def test_unicode_in_values_and_in_the_names_of_pipelines(self, case: Case) -> None:
        names = ["Zürich.日本", "Zürich.日本 ", "a/b", "A/B", "a_b"]
        jobs = [Feed(case.schema, pipeline=name, first_id=n * 1000).next(3, 2, 1) for n, name in enumerate(names)]
        for job in jobs:
            assert apply(case.sink, job) == record_of(job)
        assert [case.sink.find_last_applied(job.window.pipeline) for job in jobs] == [record_of(job) for job in jobs]
        same_multiset([line for job in jobs for line in job.expected], case.read())

    @every_format
    def test_the_rows_of_a_split_stay_in_offset_order(self, case: Case, feed: Feed) -> None:
        apply(case.sink, feed.next(500, 300, 100))
        runs = case.in_order()
        if runs is None:
            pytest.skip("this sink keeps no order")
        assert sum(map(len, runs)) == 900
        assert all(run == sorted(run) for run in runs)

    @every_writer
    def test_a_split_of_many_rows_in_bounded_memory(self, case: Case, feed: Feed) -> None:
        size, rows, batch = 7_500, 36_000, 400
        job = feed.next(0, 0, 0)
        split = job.splits[0]
        fields = {"id", "name", "flag", "day_of_week"} & set(case.schema.names)
        process, high = psutil.Process(), 0
        with case.sink.begin(job.window, job.splits, job.shape) as writer:
            task = travelled(writer.make_split_writer())
            task.open(split)
            task.write(rows_of(case.schema, [{n: None for n in case.schema.names} | {"id": -1, "name": "x"}], [0]))
            before = process.memory_info().rss
            for first in range(0, rows - 1, batch):
                ids = range(first, min(first + batch, rows - 1))
                arrays = {
                    "id": pa.array(ids, pa.int64()),
                    "name": pa.array([f"{i:09d}" * (size // 9) for i in ids]),
                    "flag": pa.array([i % 2 == 0 for i in ids]),
                    "day_of_week": pa.array([f"day {i % 7}" for i in ids]),
                }
                columns = [arrays[f.name] if f.name in fields else pa.nulls(len(ids), f.type) for f in case.schema]
                task.write(_rows(pa.RecordBatch.from_arrays(columns, schema=case.schema), ids))
                high = max(high, process.memory_info().rss)
            results = [result_of(split, rows, task.close())]
            results += [write_split(writer.make_split_writer(), other, []) for other in job.splits[1:]]
            assert writer.commit(results).written == rows
        assert Counter(case.ids()) == Counter(range(-1, rows - 1))
        assert high - before < 220 << 20, f"{rows * size >> 20} MiB of rows took {high - before >> 20} MiB of memory"

    # --- whole or not at all ------------------------------------------------------------------------------------------

    def test_nothing_is_visible_before_commit(self, case: Case, feed: Feed) -> None:
        first, second = feed.next(), feed.next()
        apply(case.sink, first)
        before = case.ids()
        with case.sink.begin(second.window, second.splits, second.shape) as writer:
            results = write_all(writer, second)
            assert case.sink.find_applied(second.window) is None
            assert case.sink.find_last_applied(second.window.pipeline) == record_of(first)
            if case.whole_windows:
                assert case.ids() == before
            writer.commit(results)
            same_multiset(first.expected + second.expected, case.read())
        same_multiset(first.expected + second.expected, case.read())

    def test_a_polling_reader_sees_windows_in_a_row_one_after_the_other_and_whole(self, case: Case, feed: Feed) -> None:
        jobs = [feed.next(30, 20, 25) for _ in range(5)]
        of_window = {i: job.window.number for job in jobs for i in job.ids}
        apply(case.sink, jobs[0])
        seen: list[Counter[int]] = []
        failed: list[BaseException] = []
        written, looked = threading.Event(), threading.Condition()

        def poll() -> None:
            try:
                while not written.is_set():
                    look = Counter(of_window[i] for i in case.ids())
                    with looked:
                        seen.append(look)
                        looked.notify()
            except BaseException as error:
                with looked:
                    failed.append(error)
                    looked.notify()

        reader = threading.Thread(target=poll)
        reader.start()
        try:
            for job in jobs[1:]:
                assert apply(case.sink, job) == record_of(job)
                with looked:
                    # One of the next two reads begins after this window is committed.
                    wanted = len(seen) + 2
                    looked.wait_for(lambda wanted=wanted: failed or len(seen) >= wanted)  # type: ignore[misc]
        finally:
            written.set()
            reader.join()
        assert not failed, failed
        assert len({len(look) for look in seen}) > 3, "the reader has to look in between"
        assert all(sorted(look) == list(range(1, len(look) + 1)) for look in seen), "a window before the one it follows"
        if case.whole_windows:
            assert {count for look in seen for count in look.values()} == {75}
        assert case.leftovers() == []
        assert same_multiset([line for job in jobs for line in job.expected], case.read()) == 375

    def test_rows_and_the_record_of_a_window_appear_in_one_step(self, case: Case, feed: Feed) -> None:
        """A kill leaves what others see at this moment. So a reader and another attempt look before a line of ``commit`` is run,
        in window after window. A binary search finds the line before which the record is there for the first time.
        """
        if not case.whole_windows:
            pytest.skip("this sink commits splits or files by themselves")
        jobs = [feed.next()]
        apply(case.sink, jobs[0])

        looks: list[bool] = []

        def commit(line: int) -> tuple[int, bool]:
            """Commit the next window. Return the number of lines, and if the record was there before that line, or at the end."""
            job = feed.next(4, 3, 2)
            seen: list[tuple[int, bool, int]] = []

            def count_rows() -> int:
                return len(set(job.ids) & set(case.ids()))

            def look() -> None:
                seen.append((count_rows(), case.sink.find_applied(job.window) is not None, count_rows()))

            with case.sink.begin(job.window, job.splits, job.shape) as writer:
                results = write_all(writer, job)
                with before_line(line, look, beside=type(case.sink)) as count:
                    assert writer.commit(results) == record_of(job)
            jobs.append(job)
            for rows, has_record, rows_then in seen:
                found = f"before line {line} of commit(), {rows} of 9 rows are visible"
                assert rows in (0, 9), found
                assert has_record or not rows, f"{found} without a record of the window: a retry would add them again"
                assert rows_then == 9 or not has_record, f"{found}, and the record of the window is: a retry would not add them"
            looks.extend(has_record for _, has_record, _ in seen)
            return count(), line > count() or any(has_record for _, has_record, _ in seen)

        last, _ = commit(0)
        # Some windows run more lines than others: work that a sink does now and then.
        without, having = 0, 4 * last
        while having - without > 1:
            line = (without + having) // 2
            without, having = (without, line) if commit(line)[1] else (line, having)
        assert set(looks) == {False, True}, "the window appears within commit()"
        same_multiset([line for job in jobs for line in job.expected], case.read())

    def test_leaving_without_commit_leaves_nothing(self, case: Case, feed: Feed) -> None:
        first, second = feed.next(), feed.next()
        apply(case.sink, first)
        before = case.everything()
        with contextlib.suppress(ZeroDivisionError), case.sink.begin(second.window, second.splits, second.shape) as writer:
            unfinished = travelled(writer.make_split_writer())
            unfinished.open(second.splits[0])
            unfinished.write(second.rows[0][0])
            if case.whole_windows:
                write_all(writer, second)
            unfinished.abort()
            raise ZeroDivisionError
        assert case.leftovers() == []
        assert case.everything() == before

    def test_an_aborted_split_leaves_nothing_and_never_raises(self, case: Case, feed: Feed) -> None:
        job = feed.next()
        with case.sink.begin(job.window, job.splits, job.shape) as writer:
            begun = case.everything()
            task = travelled(writer.make_split_writer())
            task.open(job.splits[0])
            for rows in job.rows[0]:
                task.write(rows)
            task.abort()
            assert case.everything() == begun
            task.abort()
            travelled(writer.make_split_writer()).abort()

    # --- once ---------------------------------------------------------------------------------------------------------

    def test_a_window_applied_twice_is_written_once(self, case: Case, feed: Feed) -> None:
        job = feed.next()
        assert apply(case.sink, job) == record_of(job)
        before = case.everything()
        assert apply(case.sink, job) == record_of(job)
        assert case.everything() == before
        # Even without a question to the sink first.
        with case.sink.begin(job.window, job.splits, job.shape) as writer:
            assert writer.commit(write_all(writer, job)) == record_of(job)
        assert case.everything() == before
        same_multiset(job.expected, case.read())

    @pytest.mark.parametrize("winner", [0, 1])
    def test_the_same_split_written_by_two_writers_is_there_once(self, case: Case, feed: Feed, winner: int) -> None:
        job = feed.next()
        with case.impatient.begin(job.window, job.splits, job.shape) as writer:
            results = []
            for split in job.splits:
                tasks = [travelled(writer.make_split_writer()) for _ in range(2)]
                tokens: list[Any] = [None, None]
                with contextlib.suppress(KafkaSparkError):
                    for task in tasks:
                        task.open(split)
                    for rows in job.rows[split.index]:
                        for task in tasks:
                            task.write(rows)
                    tokens[1 - winner] = tasks[1 - winner].close()
                if tokens[1 - winner] is None:
                    tasks[1 - winner].abort()
                tokens[winner] = tasks[winner].close()
                results.append(result_of(split, sum(r.batch.num_rows for r in job.rows[split.index]), tokens[winner]))
            assert writer.commit(results) == record_of(job)
        same_multiset(job.expected, case.read())

    def test_a_split_still_being_written_by_a_second_writer_at_commit_changes_nothing(self, case: Case, feed: Feed) -> None:
        job = feed.next()
        with case.impatient.begin(job.window, job.splits, job.shape) as writer:
            slow = travelled(writer.make_split_writer())
            slow.open(job.splits[0])
            slow.write(job.rows[0][0])
            writer.commit(write_all(writer, job))
        after = case.everything()
        with contextlib.suppress(KafkaSparkError):
            for rows in job.rows[0][1:]:
                slow.write(rows)
            slow.close()
        slow.abort()
        assert case.everything() == after
        same_multiset(job.expected, case.read())

    def test_two_attempts_at_once_write_it_once(self, case: Case, feed: Feed) -> None:
        """Each attempt begins, then takes two more steps, in every order: write, commit."""
        jobs = [feed.next()]
        apply(case.sink, jobs[0])
        for order in sorted(set(itertools.permutations("AABB"))):
            job = feed.next()
            jobs.append(job)
            with contextlib.ExitStack() as stack:
                writers = [stack.enter_context(case.sink.begin(job.window, job.splits, job.shape)) for _ in "AB"]
                attempts = {name: _attempt(writer, job) for name, writer in zip("AB", writers, strict=True)}
                finished = []
                for name in order:
                    # The overtaken attempt may fail, with an error of this package.
                    with contextlib.suppress(KafkaSparkError, StopIteration):
                        finished.append(next(attempts[name]))
            done = [f for f in finished if f is not None]
            assert done, f"{order}: one of them must get through"
            assert all(f == record_of(job) for f in done), order
            assert apply(case.sink, job) == record_of(job), order
            assert sorted(case.ids()) == sorted(i for job in jobs for i in job.ids), order
        same_multiset([line for job in jobs for line in job.expected], case.read())

    def test_a_late_task_of_an_overtaken_attempt_writes_nothing(self, case: Case, feed: Feed) -> None:
        """The late task has not begun when the newer attempt begins, so that it has no session and no files that could be
        removed. It has the splits of the window, or other ones.
        """
        jobs = [feed.next()]
        apply(case.sink, jobs[0])
        for turn, cuts in (("first", (0.25, 0.75)), ("between", ()), ("last", ()), ("last", (0.25, 0.75))):
            job = feed.next()
            jobs.append(job)
            older, newer = recut(job, *cuts), recut(job, 0.5)
            with contextlib.ExitStack() as stack:
                overtaken = stack.enter_context(case.sink.begin(older.window, older.splits, older.shape))
                late = [travelled(overtaken.make_split_writer()) for _ in older.splits]
                writer = stack.enter_context(case.sink.begin(newer.window, newer.splits, newer.shape))
                results = []
                for split in newer.splits:
                    if (turn, split.index) in (("first", 0), ("between", len(newer.splits) // 2)):
                        _come_late(late, older)
                    results.append(write_split(travelled(writer.make_split_writer()), split, newer.rows[split.index]))
                if turn == "last":
                    _come_late(late, older)
                assert writer.commit(results) == record_of(job), turn
            assert apply(case.sink, older) == record_of(job), turn
            assert sorted(case.ids()) == sorted(i for job in jobs for i in job.ids), turn
        same_multiset([line for job in jobs for line in job.expected], case.read())

    # --- crashes ------------------------------------------------------------------------------------------------------

    @pytest.mark.faults
    @pytest.mark.parametrize("point", POINTS)
    def test_a_crashed_attempt_is_repeated_and_the_window_is_there_once(
        self, case: Case, feed: Feed, point: str, tmp_path: Path
    ) -> None:
        _skip_twin(case, point)
        first, job, third = feed.next(), feed.next(), feed.next()
        apply(case.sink, first)
        with Victim(case.sink, job, point, tmp_path / "victim") as victim:
            fired = victim.died()
        if not fired:
            pytest.skip(f"this sink has nothing to do at {point}")
        visible = set(case.ids()) - set(first.ids)
        if case.whole_windows:
            assert visible == (set(job.ids) if point == "sink.committed" else set())
        assert apply(case.sink, job) == record_of(job)
        same_multiset(first.expected + job.expected, case.read())
        before = case.everything()
        assert apply(case.sink, job) == record_of(job)
        assert case.everything() == before, "a further retry writes nothing"
        with case.sink.begin(third.window, third.splits, third.shape):
            pass
        assert case.leftovers() == [], "leftovers are removed by the next begin"
        same_multiset(first.expected + job.expected, case.read())

    @pytest.mark.faults
    @pytest.mark.parametrize("point", ZOMBIES)
    def test_a_paused_zombie_that_resumes_after_the_retry_changes_nothing(
        self, case: Case, feed: Feed, point: str, tmp_path: Path
    ) -> None:
        _skip_twin(case, point)
        first, job = feed.next(), feed.next()
        apply(case.sink, first)
        with Victim(case.sink, job, f"{point}:stop", tmp_path / "victim") as zombie:
            if not zombie.stopped():
                pytest.skip(f"this sink has nothing to do at {point}")
            assert apply(case.sink, job) == record_of(job)
            same_multiset(first.expected + job.expected, case.read())
            before = case.published()
            zombie.wake()
            same_multiset(first.expected + job.expected, case.read())
            assert case.published() == before

    @pytest.mark.faults
    def test_a_paused_zombie_that_resumes_two_windows_later_changes_nothing(self, case: Case, feed: Feed, tmp_path: Path) -> None:
        jobs = [feed.next() for _ in range(3)]
        with Victim(case.sink, jobs[0], "sink.staged:stop", tmp_path / "victim") as zombie:
            assert zombie.stopped()
            for job in jobs:
                assert apply(case.sink, job) == record_of(job)
            before = case.published()
            zombie.wake()
            assert case.published() == before
        same_multiset([line for job in jobs for line in job.expected], case.read())

    @pytest.mark.faults
    def test_leftovers_of_a_crashed_attempt_are_removed_by_the_next_begin(self, case: Case, feed: Feed, tmp_path: Path) -> None:
        job = feed.next()
        with Victim(case.sink, job, "sink.staged", tmp_path / "victim") as victim:
            assert victim.died()
        if case.whole_windows:
            assert case.leftovers(), "there must be something to remove"
        with case.sink.begin(job.window, job.splits, job.shape):
            pass
        assert case.leftovers() == []

    @pytest.mark.faults
    def test_what_an_abandoned_pipeline_left_is_removed_by_another_one_and_nothing_that_lives(
        self, case: Case, tmp_path: Path
    ) -> None:
        names = ("abandoned", "alive", "another")
        abandoned, alive, another = (Feed(case.schema, pipeline=name, first_id=n * 1000) for n, name in enumerate(names))
        with Victim(case.sink, abandoned.next(), "sink.staged", tmp_path / "victim") as victim:
            assert victim.died()
        left = set(case.leftovers())
        job, others = alive.next(), []

        def pass_by() -> set[str]:
            others.append(another.next(3, 0, 2))
            apply(case.sink, others[-1])
            return set(case.leftovers())

        with case.sink.begin(job.window, job.splits, job.shape) as writer:
            results = write_all(writer, job)
            begun = set(case.leftovers()) - left
            assert pass_by() == left | begun, "nothing is old enough"
            case.age(8)
            # A server may take a moment to notice that a client was killed.
            litter = {name for name in left if not any(kept.startswith(f"{name}/") for kept in begun)}
            eventually(lambda: not litter & pass_by(), 30, f"another pipeline leaves what is abandoned: {sorted(litter)}")
            assert begun <= set(case.leftovers()), "what lives stays, however old it is"
            assert writer.commit(results) == record_of(job)
        # Splits that commit by themselves were committed before the kill.
        if case.whole_windows:
            same_multiset([line for j in (job, *others) for line in j.expected], case.read())

    # --- what the sink remembers --------------------------------------------------------------------------------------

    def test_applied_and_last_applied_return_the_committed_window(self, case: Case, feed: Feed) -> None:
        jobs = [feed.next(), feed.next(), feed.next()]
        assert case.sink.find_last_applied(feed.pipeline) is None
        assert case.sink.find_applied(jobs[0].window) is None
        for n, job in enumerate(jobs):
            apply(case.sink, job)
            assert [case.sink.find_applied(j.window) for j in jobs] == [*map(record_of, jobs[: n + 1]), *[None] * (2 - n)]
            assert case.sink.find_last_applied(feed.pipeline) == record_of(job)
        assert case.sink.find_last_applied("another") is None
        assert case.sink.find_last_applied(feed.pipeline[:-1]) is None

    def test_an_empty_window_is_remembered(self, case: Case, feed: Feed) -> None:
        jobs = [feed.empty(), feed.next(), feed.empty(), feed.next()]
        for job in jobs:
            assert apply(case.sink, job) == record_of(job)
            assert case.sink.find_last_applied(feed.pipeline) == record_of(job)
        same_multiset(jobs[1].expected + jobs[3].expected, case.read())

    @every_format
    def test_windows_with_splits_that_hold_no_record(self, case: Case, feed: Feed) -> None:
        jobs = [feed.next(0, 7, 0), feed.next(0, 0, 0), feed.next(1, 0, 2)]
        for job in jobs:
            assert apply(case.sink, job) == record_of(job)
        same_multiset(jobs[0].expected + jobs[2].expected, case.read())

    @every_format
    def test_a_batch_without_rows_is_written_as_nothing(self, case: Case, feed: Feed) -> None:
        job = feed.next(3, 0, 0)
        nothing = rows_of(case.schema, [], [])
        rows = {0: [nothing, *job.rows[0], nothing], 1: [nothing], 2: []}
        assert apply(case.sink, Job(job.window, job.splits, job.shape, rows)) == record_of(job)
        same_multiset(job.expected, case.read())

    def test_a_window_that_does_not_follow_the_last_one_is_a_conflict(self, case: Case, feed: Feed) -> None:
        jobs = [feed.next() for _ in range(5)]
        for job in jobs[1:3]:
            apply(case.sink, job)
        before = case.everything()
        wrong = {
            "a hole": jobs[4],
            "an overlap": _shifted(jobs[3], start=-3),
            "an older window": jobs[0],
            "other offsets of the same window": _shifted(jobs[2], end=5),
        }
        for what, job in wrong.items():
            with pytest.raises(WindowConflict) as caught:
                apply(case.sink, job)
            assert str(job.window) in str(caught.value), what
            if case.whole_windows:
                assert case.everything() == before, what
            assert case.sink.find_last_applied(feed.pipeline).number == 3, what

    def test_a_window_of_another_cluster_or_topic_is_not_taken_for_this_one_though_its_ranges_are_equal(
        self, case: Case, feed: Feed
    ) -> None:
        first, job = feed.next(), feed.next()
        apply(case.sink, first)
        apply(case.sink, job)
        before = case.everything()
        others: tuple[dict[str, Any], ...] = ({"cluster_id": "another"}, {"topic_ids": {"orders": "another"}})
        for ids in others:
            foreign = replace(job, window=replace(job.window, **ids))
            with pytest.raises(ForeignOffsets) as caught:
                case.sink.find_applied(foreign.window)
            assert (caught.value.pipeline, caught.value.number) == (feed.pipeline, 2)
            assert caught.value.known_cluster == "cluster" and "another" in str(caught.value)
            # Even without a question to the sink first.
            with pytest.raises(ForeignOffsets), case.sink.begin(foreign.window, foreign.splits, foreign.shape) as writer:
                writer.commit(write_all(writer, foreign))
            assert case.sink.find_last_applied(feed.pipeline) == record_of(job)
            if case.whole_windows:
                assert case.everything() == before
        same_multiset(first.expected + job.expected, case.read())

    def test_a_window_of_another_cluster_follows_only_after_the_pipeline_was_moved(self, case: Case, feed: Feed) -> None:
        first, second = feed.next(), feed.next()
        apply(case.sink, first)
        topic_ids = {topic: f"another {topic}" for topic in second.window.topic_ids}
        foreign = replace(second, window=replace(second.window, cluster_id="another", topic_ids=topic_ids))
        with pytest.raises(ForeignOffsets):
            apply(case.sink, foreign)
        moved = replace(foreign, window=replace(foreign.window, moved=1))
        assert apply(case.sink, moved) == record_of(moved)
        same_multiset(first.expected + second.expected, case.read())

    def test_a_record_that_knows_no_ids_is_compared_by_its_ranges(self, case: Case, feed: Feed) -> None:
        """Records of older versions of a sink have no ids."""
        unknown = {"cluster_id": "", "topic_ids": {}}
        first, second = feed.next(), feed.next()
        without = replace(first, window=replace(first.window, **unknown))
        assert apply(case.sink, without) == record_of(without)
        assert case.sink.find_applied(first.window) == record_of(without)
        assert apply(case.sink, second) == record_of(second)
        same_multiset(first.expected + second.expected, case.read())

    def test_two_pipelines_share_a_target(self, case: Case) -> None:
        names = ["orders", "orders-0000000001", "orders "]
        feeds = [Feed(case.schema, pipeline=name, first_id=n * 100_000) for n, name in enumerate(names)]
        jobs = [feed.next() for feed in feeds]
        begun = [feed.next() for feed in feeds]
        for job in jobs:
            assert apply(case.sink, job) == record_of(job)
        # Side by side: no sink removes attempts of the others as leftovers.
        with contextlib.ExitStack() as stack:
            writers = [stack.enter_context(case.sink.begin(j.window, j.splits, j.shape)) for j in begun]
            results = [write_all(writer, job) for writer, job in zip(writers, begun, strict=True)]
            for writer, job, result in zip(writers, begun, results, strict=True):
                assert writer.commit(result) == record_of(job)
        same_multiset([line for job in jobs + begun for line in job.expected], case.read())

    def test_to_ask_whether_it_can_replay_leaves_everything_as_it_is(self, case: Case, feed: Feed) -> None:
        before = case.everything()
        asked = case.sink.find_replay_problems()
        assert case.everything() == before
        apply(case.sink, feed.next())
        before = case.everything()
        assert case.sink.find_replay_problems() == asked
        assert case.everything() == before
        assert all(problem.where == "on_rerun" and problem.action for problem in asked)

    def test_a_replay_replaces_the_rows_of_its_window_once(self, case: Case, feed: Feed) -> None:
        if case.sink.find_replay_problems():
            pytest.skip("this sink replaces no rows")
        jobs = [feed.next() for _ in range(3)]
        for job in jobs:
            apply(case.sink, job)
        again = replayed(jobs[1], first=5)
        assert 0 < len(again.ids) < len(jobs[1].ids)
        assert case.sink.find_applied(again.window) is None
        assert case.sink.find_window_replay_problems(again.window) == []
        with case.sink.begin(again.window, again.splits, again.shape) as writer:
            results = write_all(writer, again)
            if case.whole_windows:
                assert Counter(case.ids()) == Counter(i for job in jobs for i in job.ids), "the old rows stay until the commit"
            assert writer.commit(results) == record_of(again)
        before = case.everything()
        for job in (again, jobs[1]):
            assert apply(case.sink, job) == record_of(again), "the replay is the newest version of its window"
        assert case.everything() == before
        assert case.sink.find_last_applied(feed.pipeline) == record_of(jobs[2])
        same_multiset([line for job in (jobs[0], again, jobs[2]) for line in job.expected], case.read())
        # The next window follows the last one, and the window can be replayed again, with all of its rows.
        fourth, twice = feed.next(), replayed(jobs[1], replay=2)
        for job in (fourth, twice):
            assert apply(case.sink, job) == record_of(job)
        same_multiset([line for job in (*jobs, fourth) for line in job.expected], case.read())
        assert case.leftovers() == []

    # --- before it starts ---------------------------------------------------------------------------------------------

    def test_validate_finds_nothing_where_all_is_well_and_changes_nothing(self, case: Case, feed: Feed) -> None:
        before = case.everything()
        assert case.sink.validate(feed.shape) == []
        assert case.everything() == before
        apply(case.sink, feed.next())
        before = case.everything()
        assert case.sink.validate(feed.shape) == []
        assert case.everything() == before

    @every_format
    def test_validate_reports_several_problems_at_once_and_changes_nothing(self, case: Case) -> None:
        sink, shape, where = case.broken()
        before = case.everything()
        problems = sink.validate(shape)
        assert case.everything() == before
        assert {p.where for p in problems} >= where, problems
        assert len(problems) >= len(where) >= 2
        assert all(isinstance(p, Problem) and p.what for p in problems)
        known = {p.where for p in sink.find_target_problems()}
        assert known, "some can be found without the rows"
        assert known <= {p.where for p in problems} and case.everything() == before

    @every_format
    def test_a_split_writer_is_picklable_and_shows_no_password(self, case: Case, feed: Feed) -> None:
        job = feed.next()
        with case.sink.begin(job.window, job.splits, job.shape) as writer:
            task = writer.make_split_writer()
            shown = (task, travelled(task), writer, case.sink, case.sink.uri, case.sink.asset_uri, case.sink.find_destination())
            texts = [repr(x) + str(x) for x in shown]
            assert not [secret for secret in case.secrets for text in texts if secret in text]
            assert pickle.dumps(pickle.loads(pickle.dumps(task)))

    def test_its_uri_is_an_asset_of_its_own_and_ends_with_the_name_of_the_target(self, case: Case) -> None:
        uri = case.sink.asset_uri
        assert Asset(uri=uri).uri == uri, "Airflow would change it, so that several targets might be one asset"
        parts = urllib.parse.urlsplit(uri)
        # Airflow drops a fragment. A sink that a filter names is known by the last part of the path.
        assert parts.scheme and not parts.query and not parts.fragment
        assert urllib.parse.unquote(parts.path.rpartition("/")[2])
        assert case.sink.find_destination() == pickle.loads(pickle.dumps(case.sink)).find_destination()

    def test_a_sink_is_a_frozen_value_that_travels(self, case: Case) -> None:
        assert pickle.loads(pickle.dumps(case.sink)) == case.sink
        assert isinstance(case.sink.guarantee, Guarantee)
        assert hash(case.sink) == hash(case.sink)
        assert all(hasattr(case.sink, name) for name in case.sink.template_fields)
        with pytest.raises(AttributeError):
            case.sink.anything = 1  # type: ignore[attr-defined]


@contextlib.contextmanager
def before_line(number: int, look: Callable[[], None], beside: type) -> Iterator[Callable[[], int]]:
    """Call a function before a line of this package, or of the modules beside a class, is run in this thread.

    :param number: the number of the line among those that are run, from 1; 0 for none.
    :return: a function that returns the number of lines that were run.
    """
    places = tuple({str(Path(inspect.getfile(each)).parent) for each in (WindowWriter, beside)})
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if event == "call":
            return trace if frame.f_code.co_filename.startswith(places) else None
        if event == "line":
            count += 1
            if count == number:
                sys.settrace(None)
                try:
                    look()
                finally:
                    sys.settrace(trace)
        return trace

    sys.settrace(trace)
    try:
        yield lambda: count
    finally:
        sys.settrace(before)


def _skip_twin(case: Case, point: str) -> None:
    """Skip a kill at ``job.done`` if the sink is then in the state of ``sink.staged``."""
    if point == "job.done" and not case.prepares_commit:
        pytest.skip("commit() of this sink begins with `sink.staged`")


def _rows(batch: pa.RecordBatch, ids: range) -> Rows:
    return Rows(batch, pa.array([i + 1 for i in ids], pa.int64()))


def _come_late(tasks: list[SplitWriter], job: Job) -> None:
    """Let the tasks of an attempt write their splits, as far as they can."""
    for task, split in zip(tasks, job.splits, strict=True):
        with contextlib.suppress(KafkaSparkError):
            write_split(task, split, job.rows[split.index])


def _attempt(writer: WindowWriter, job: Job) -> Iterator[Applied | None]:
    """Run the steps of an attempt: write, then commit."""
    results = write_all(writer, job)
    yield None
    yield writer.commit(results)


def _shifted(job: Job, start: int = 0, end: int = 0) -> Job:
    """Return equal rows with other offsets."""
    ranges = tuple(OffsetRange(r.topic, r.partition, r.start + start, r.end + end) for r in job.window.ranges)
    splits = tuple(replace(s, range=r) for s, r in zip(job.splits, ranges, strict=True))
    return replace(job, window=replace(job.window, ranges=ranges), splits=splits)
