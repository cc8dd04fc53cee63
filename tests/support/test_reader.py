"""The background reader fails on a lost, doubled, swapped or misplaced record, and if it read nothing."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer

from airflow_kafka_spark.testing._processes import wait_until
from tests.support.oracle import committed_records
from tests.support.reader import Reader, same_log

GOOD = [(0, 0, b"a", b"1"), (0, 1, b"b", b"2"), (1, 0, b"c", b"3"), (0, 3, b"d", b"4")]


def test_the_same_log_passes_whatever_the_order_of_partitions():
    assert same_log(GOOD, sorted(GOOD)) == 4


@pytest.mark.parametrize(
    "found",
    [
        GOOD[1:],
        [*GOOD, GOOD[3]],
        [*GOOD, (0, 4, b"d", b"4")],
        [(0, 0, b"b", b"2"), (0, 1, b"a", b"1"), *GOOD[2:]],
        [GOOD[1], GOOD[0], *GOOD[2:]],
        [],
    ],
    ids=["one lost", "one handed over twice", "one written twice", "two swapped", "two out of order", "all lost"],
)
def test_a_damaged_log_is_red(found):
    with pytest.raises(AssertionError):
        same_log(GOOD, found)


def test_comparing_nothing_is_red():
    with pytest.raises(AssertionError, match="nothing was compared"):
        same_log([], [])


def test_the_reader_sees_what_is_committed_and_notices_what_hides_the_rest(kafka, unique):
    topic = unique("read")
    kafka.create_topic(topic, 2)

    def write(count: int, end: str) -> Producer:
        producer = Producer({**kafka.connection_extra(), "transactional.id": unique("writer")})
        producer.init_transactions(60)
        producer.begin_transaction()
        for number in range(count):
            producer.produce(topic, str(number).encode(), partition=number % 2)
        producer.flush(60)
        if end:
            getattr(producer, f"{end}_transaction")(30)
        return producer

    with Reader(kafka.connection_extra(), topic) as reader:
        write(10, "commit")
        assert wait_until(lambda: reader.count == 10, 180), "it reads while it is not asked"
        write(7, "abort")
        write(10, "commit")
        assert same_log(committed_records(kafka.connection_extra(), topic), reader.caught_up()) == 20
        hanging = write(2, "")
        with pytest.raises(AssertionError, match="waited for to come to"):
            reader.caught_up(1)
        hanging.abort_transaction(60)
        assert len(reader.caught_up()) == 20
