from __future__ import annotations

import pickle
import pickletools
from dataclasses import replace

import pytest

from airflow_kafka_spark.windows.codec import position_from_json, position_to_json, window_from_json, window_to_json
from airflow_kafka_spark.windows.model import Gap, OffsetRange, PackedSplits, Split, SplitResult, TopicPartition, Window
from airflow_kafka_spark.windows.plan import Position
from airflow_kafka_spark.windows.report import describe_ranges, sum_up

WINDOW = Window(
    "p", 7, (OffsetRange("t", 0, 5, 9), OffsetRange("t", 1, 3, 3)), "dag/run/task",
    "2026-01-01T00:00:00.000Z", "cluster", {"t": "id"},
    (Gap("t", 0, 2, 5),), 4,
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


def test_a_report_adds_up_what_the_tasks_tell():
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
