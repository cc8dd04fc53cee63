from __future__ import annotations

import pickle
import pickletools
import random
from dataclasses import replace

import pytest

from airflow_kafka_spark.windows.codec import position_from_json, position_to_json, window_from_json, window_to_json
from airflow_kafka_spark.windows.model import (
    MAX_RUNS,
    Gap,
    Landed,
    OffsetRange,
    PackedSplits,
    Split,
    SplitResult,
    TaskInstanceKey,
    TopicPartition,
    Tries,
    Window,
    record_tries,
    tries_from_json,
    tries_to_json,
)
from airflow_kafka_spark.windows.plan import Position
from airflow_kafka_spark.windows.report import describe_ranges, describe_window, sum_up
from tests.support.runs import Counters

WINDOW = Window(
    "p", 7, (OffsetRange("t", 0, 5, 9), OffsetRange("t", 1, 3, 3)), "dag/run/task",
    "2026-01-01T00:00:00.000Z", "cluster", {"t": "id"},
    (Gap("t", 0, 2, 5),), 4, lost_topic_ids=("id of a topic",),
)  # fmt: skip


@pytest.mark.parametrize("start, end", [(-1, 3), (4, 3)])
def test_an_inverted_or_negative_range_cannot_be_made(start, end):
    with pytest.raises(ValueError, match="0 <= start <= end"):
        OffsetRange("t", 0, start, end)


def test_the_commit_is_the_frozen_end_not_the_last_record():
    assert WINDOW.ends == {TopicPartition("t", 0): 9, TopicPartition("t", 1): 3}


def test_a_window_is_empty_when_no_range_covers_an_offset():
    assert not WINDOW.is_empty
    assert Window("p", 1, (OffsetRange("t", 0, 5, 5),), "", "").is_empty


def test_window_ids_sort_as_numbers_do():
    ids = [Window("p", n, (), "", "").id for n in (9, 10, 99, 100)]
    assert ids == sorted(ids)


def test_a_window_survives_json():
    assert window_from_json(window_to_json(WINDOW)) == WINDOW


def test_a_position_survives_json():
    position = Position({TopicPartition("a/ü", 1): 2}, {"a/ü": "x"}, "c")
    assert position_from_json(position_to_json(position)) == position


def test_a_report_adds_up_what_the_tasks_report():
    results = [
        SplitResult(0, records=3, bytes=30, ignored=1, min_timestamp=5, max_timestamp=7),
        SplitResult(1, records=2, bytes=20, min_timestamp=4, max_timestamp=4),
        SplitResult(2),
    ]
    splits = {0: OffsetRange("t", 0, 5, 8), 1: OffsetRange("t", 0, 8, 9), 2: OffsetRange("t", 1, 3, 4)}
    report = replace(sum_up(WINDOW, results, None, splits), timings={"total": 2.0})
    assert (report.records_read, report.bytes, report.records_ignored) == (5, 50, 1)
    assert (report.min_timestamp, report.max_timestamp) == (4, 7)
    assert report.to_dict()["ranges"][0] == {"topic": "t", "partition": 0, "start": 5, "end": 9, "records": 5}
    assert report.rate == 2.5
    assert "5 records read" in report.line and "3 offsets lost" in report.line
    letters = tuple(Landed("dead", n, 0, 0, 1) for n in range(2))
    assert "1 record read" in replace(report, records_read=1).line
    assert "1 dead letter," in replace(report, dead_letters=letters[:1]).line
    assert "2 dead letters," in replace(report, dead_letters=letters).line
    one = replace(WINDOW, ranges=(OffsetRange("t", 0, 5, 6),))
    assert describe_window(one).endswith("(at most 1 record)")


def test_many_ranges_are_summed_up_for_the_log():
    assert describe_ranges([OffsetRange("t", p, 0, 10) for p in range(20)]) == "20 partitions, 200 offsets"


def test_splits_are_the_same_when_they_were_packed_and_a_task_unpickles_few_objects():
    def splits(count):
        return tuple(Split(n, OffsetRange(f"t{n % 3}", n % 7, (1 << 50) + n, (1 << 50) + 2 * n), n % 5 - 1) for n in range(count))

    def operations(count):
        return len(list(pickletools.genops(pickle.dumps(PackedSplits.of(splits(count))))))

    for count in (0, 1, 800):
        packed = pickle.loads(pickle.dumps(PackedSplits.of(splits(count))))
        assert (len(packed), tuple(packed)) == (count, splits(count))
    assert packed[799] == splits(800)[799]
    with pytest.raises(IndexError):
        packed[800]
    assert operations(800) == operations(20)
    assert len(pickle.dumps(packed)) < 800 * 33


def begun(task: Counters) -> Tries:
    """Return the task's next try."""
    facts = task.attempt()
    return Tries(facts["try_number"], facts["max_tries"], facts["clears"])


def test_in_any_history_of_a_task_a_retry_is_no_clear_and_a_clear_is_one():
    """Tries, retries and clears of one task; ``retries`` is changed between two series of tries, and other tasks of the DAG run
    are cleared at any time."""
    rng, compared = random.Random(7), 0
    for _ in range(4_000):
        task = Counters(rng.randrange(4))
        known, cleared = begun(task), False
        for _ in range(8):
            task.clears += rng.randrange(3) == 0
            if not task.may_retry or rng.randrange(3) == 0:
                task.clear(retries=rng.randrange(4))
                cleared = True
            now = begun(task)
            assert now.was_cleared_since(known, task.retries) is cleared, (known, now, task)
            compared += cleared
            if rng.randrange(2):
                known, cleared = now, False
    assert compared > 5_000


@pytest.mark.parametrize("clears", [0, -1])
def test_a_clear_that_leaves_the_tries_as_they_were_is_known_by_what_retries_is_now(clears):
    """Three retries were allowed, and two are now: the clear adds one."""
    known, now = Tries(1, 3, clears), Tries(2, 3, clears + 1 if clears >= 0 else -1)
    assert now.was_cleared_since(known, retries=2) and not now.was_cleared_since(known, retries=3)


def test_lowering_retries_while_a_retry_waits_is_no_clear():
    assert not Tries(2, 3, 5).was_cleared_since(Tries(1, 3, 5), retries=2)


def test_a_task_that_is_cleared_while_it_runs_is_retried():
    assert not Tries(2, 1, 1).was_cleared_since(Tries(1, 1, 0), retries=1)


def test_counters_keep_their_values_on_the_way_through_the_ledger():
    tries = {"dag/run1/task": Tries(3, 4, 1), "dag/run2/task": Tries()}
    assert tries_from_json(tries_to_json(tries)) == tries


def test_the_counters_of_the_newest_runs_are_kept_and_those_of_the_one_that_planned_the_window():
    known = {}
    for number in range(20):
        known = record_tries(known, f"run{number}", Tries(number), keep="run3")
    assert list(known) == ["run3", *(f"run{number}" for number in range(20 - MAX_RUNS, 20))]
    assert record_tries(known, "run3", Tries(9), keep="run3")["run3"] == Tries(9)


@pytest.mark.parametrize(
    ("run", "task"),
    [
        ("d/r/t", TaskInstanceKey("d", "r", "t")),
        ("d/r/t/3", TaskInstanceKey("d", "r", "t", 3)),
        ("d/a/b/c/t", TaskInstanceKey("d", "a/b/c", "t")),
        ("d/a/b/t/0", TaskInstanceKey("d", "a/b", "t", 0)),
        ("reset by somebody", None),
        ("", None),
    ],
)
def test_a_run_names_its_task(run, task):
    assert TaskInstanceKey.parse(run) == task
    assert task is None or task.run == run


def test_the_address_of_a_task_is_quoted():
    assert TaskInstanceKey("d", "manual__2026-01-01T00:00:00+00:00", "g.t", 2).url == (
        "dags/d/runs/manual__2026-01-01T00%3A00%3A00%2B00%3A00/tasks/g.t/mapped/2"
    )
