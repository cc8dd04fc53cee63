"""The oracles fail on a lost, doubled or swapped record, and if they compared nothing."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer

from tests.support.oracle import RecordsDiffer, committed_records, same_multiset, wait_stable, windows_tile

GOOD = [("a", 1), ("b", 2), ("c", 3)]


def test_equal_multisets_pass_in_any_order():
    assert same_multiset(GOOD, reversed(GOOD)) == 3


@pytest.mark.parametrize(
    "found",
    [GOOD[1:], [*GOOD, GOOD[0]], [("a", 1), ("b", 3), ("c", 2)], [("a", 1), ("a", 1), ("c", 3)], []],
    ids=["one lost", "one doubled", "two swapped values", "one lost and one doubled", "all lost"],
)
def test_a_damaged_history_is_red(found):
    with pytest.raises(RecordsDiffer):
        same_multiset(GOOD, found)


def test_comparing_nothing_is_red():
    with pytest.raises(AssertionError, match="nothing was compared"):
        same_multiset([], [])


def ranges(*bounds):
    return [[{"topic": "t", "partition": 0, "start": start, "end": end}] for start, end in bounds]


def test_windows_that_join_pass():
    assert windows_tile(ranges((0, 5), (5, 5), (5, 9))) == 2


@pytest.mark.parametrize("bounds", [[(0, 5), (6, 9)], [(0, 5), (4, 9)], [(0, 5)]], ids=["gap", "overlap", "nothing compared"])
def test_windows_that_do_not_join_are_red(bounds):
    with pytest.raises(AssertionError):
        windows_tile(ranges(*bounds))


def test_committed_records_are_found_at_once_and_an_open_transaction_is_reported(kafka, unique):
    topic, config = unique("stable"), kafka.connection_extra()
    kafka.create_topic(topic, 3)
    for turn in range(1, 21):
        producer = Producer({**config, "transactional.id": topic})
        producer.init_transactions(60)
        producer.begin_transaction()
        for number in range(6):
            producer.produce(topic, b"%d" % number, partition=number % 3)
        if turn == 20:
            producer.flush(60)
            assert not wait_stable(config, topic, 0.5)
            assert len(committed_records(config, topic, stable=False)) == 6 * (turn - 1)
        producer.commit_transaction(60)
        assert len(committed_records(config, topic)) == 6 * turn
