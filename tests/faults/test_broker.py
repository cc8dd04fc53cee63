"""Brokers fail while a window is moved: answers and requests are lost, a broker restarts or dies, a timeout passes.

After each test: every row is there exactly once, for a read_committed background reader and for a reader at the end, none of the
pipeline's transactions is open, and a further attempt writes nothing.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from confluent_kafka import KafkaException

from airflow_kafka_spark.errors import KafkaSparkError, TransactionTimedOut
from airflow_kafka_spark.hooks.kafka.client import ClientEvents
from airflow_kafka_spark.hooks.kafka.config import make_consumer_config
from airflow_kafka_spark.hooks.kafka.transactions import abort, make_fencing_producer, send_offsets
from airflow_kafka_spark.sinks.kafka.tasks.publish import RecordBatches
from airflow_kafka_spark.testing import EmbeddedKafka
from airflow_kafka_spark.testing._processes import wait_until
from airflow_kafka_spark.windows.model import TopicPartition
from tests.support.distribution import extended
from tests.support.kafka_proxy import KafkaProxy, Trap, commit_of, offsets_of, records_of
from tests.support.pipelines import pipeline
from tests.support.shop import shop
from tests.support.splits import ROWS, rows, splits
from tests.support.workers import fault_in_tasks, wait_stopped, wake

ORDERS, SPLITS = 400, 2
SECONDS = 3.0


@pytest.fixture(scope="module")
def proxied():
    """A broker behind a proxy."""
    with KafkaProxy() as proxy, EmbeddedKafka(properties=proxy.properties) as kafka:
        proxy.serve(kafka)
        yield kafka, proxy


@pytest.fixture
def proxy(proxied):
    yield proxied[1]
    proxied[1].clear()
    assert proxied[1].failed is None


@pytest.fixture
def orders(proxied, postgres, unique, tmp_path):
    with shop(proxied[0], postgres, unique, tmp_path) as made, made.watched():
        made.sell(ORDERS)
        yield made


def finish(orders, run_id="run1"):
    """Run attempts until one succeeds, as Airflow does; return its report."""
    for _ in range(2):
        try:
            return orders.run(run_id)
        except KafkaSparkError as error:
            assert error.retryable
    return orders.run(run_id)


def check(orders, report, attempts=1):
    """Check that nothing is missing, doubled or open, and that the cleared task does nothing."""
    assert (report["records_written"], report["attempts"]) == (ORDERS, attempts)
    assert orders.check() == ORDERS
    assert orders.run("run1") == report
    assert orders.check() == ORDERS


@pytest.mark.faults
@pytest.mark.parametrize("loss", ["the answer", extended("the request")])
def test_a_commit_whose_answer_or_request_is_lost_with_its_connection_costs_nothing(orders, proxy, loss):
    proxy.set(Trap(commit_of(".split."), loss), Trap(commit_of(".close"), loss))
    report = orders.run("run1")
    assert proxy.sprung == 2
    check(orders, report)


@pytest.mark.faults
def test_a_commit_that_is_never_answered_is_found_in_the_ledger(orders, proxy):
    proxy.set(Trap(commit_of(".split."), "the answer", silently=True), times=1000)
    report = orders.run("run1", transaction_timeout=SECONDS)
    assert proxy.sprung >= SPLITS, "every split's"
    proxy.clear()
    check(orders, report)


@pytest.mark.faults
def test_a_commit_that_never_arrives_is_no_commit_and_the_retry_publishes(orders, proxy):
    proxy.set(Trap(commit_of(".split."), "the request", silently=True), times=1000)
    with pytest.raises(KafkaSparkError) as failure:
        orders.run("run1", transaction_timeout=SECONDS)
    # Where the job ends with its first split, the other one may not have come to its commit.
    assert failure.value.retryable and proxy.sprung
    assert orders.records(stable=False) == []
    proxy.clear()
    check(orders, orders.run("run1"), attempts=2)


@pytest.mark.faults
def test_offsets_whose_coordinator_does_not_answer_are_given_up_in_time(proxied, proxy, unique):
    config, name = proxied[0].connection_extra(), unique("offsets")
    proxied[0].create_topic(name, 1)
    producer = make_fencing_producer(config, name, 60, ClientEvents())
    producer.begin_transaction()
    proxy.set(Trap(offsets_of(name), "the request", silently=True))
    began = time.monotonic()
    with pytest.raises(KafkaException, match="_TIMED_OUT.*coordinator has not answered in 1 s"):
        send_offsets(producer, make_consumer_config(config), name, [(TopicPartition(name, 0), 0, "")], 1)
    abort(producer)
    assert time.monotonic() - began < 30 and proxy.sprung == 1
    again = make_fencing_producer(config, name, 60, ClientEvents())
    again.begin_transaction()
    send_offsets(again, make_consumer_config(config), name, [(TopicPartition(name, 0), 0, "")], 60)
    again.commit_transaction(60)


@pytest.mark.faults
def test_a_broker_that_is_killed_and_restarted_while_two_windows_are_moved_costs_nothing(
    orders, proxied, proxy, unique, tmp_path
):
    """The first time, one window is read into files and the other one sends its records. The second time, the former is closed
    and the latter commits a split.
    """
    kafka, once = proxied[0], tmp_path / "fired"

    def restart():
        kafka.kill()
        wake(worker)
        kafka.restart()

    with pipeline("files", kafka, None, unique, tmp_path) as files, ThreadPoolExecutor(1) as pool:
        files.produce(1000)
        with fault_in_tasks("split.mid:stop", once):
            reading = pool.submit(finish, files)
            worker = wait_stopped(once)
        both = threading.Barrier(2, action=restart, timeout=240)
        proxy.set(
            Trap(records_of(".split.", orders.topic), first=restart),
            Trap(commit_of(".split."), first=both.wait),
            Trap(commit_of(f"{files.name}.close"), first=both.wait),
        )
        report = finish(orders)
        reading.result(300)
        assert proxy.sprung == 3
        check(orders, report, report["attempts"])
        assert files.check() == 1000
        files.produce(100)
        files.run("run2")
        assert files.check() == 1100


@pytest.mark.faults
def test_a_split_that_outlives_its_transaction_is_not_published_and_the_error_says_what_to_do(orders, tmp_path):
    once, attempts = tmp_path / "fired", 0
    with ThreadPoolExecutor(1) as pool:
        with fault_in_tasks("publish.marked:stop", once):
            # On a busy machine it does so before that point.
            for seconds in (SECONDS, 10 * SECONDS, 100 * SECONDS):
                attempts += 1
                attempt = pool.submit(orders.run, "run1", transaction_timeout=seconds)
                assert wait_until(lambda: once.exists() or attempt.done(), 300)  # noqa: B023
                if once.exists():
                    break
            worker = wait_stopped(once)
        orders.wait_settled(400)
        wake(worker)
        with pytest.raises(TransactionTimedOut, match="transaction_timeout") as failure:
            attempt.result(300)
    assert failure.value.retryable
    check(orders, orders.run("run1"), attempts=attempts + 1)


@pytest.mark.extended
@pytest.mark.faults
def test_a_source_that_is_slower_than_the_transaction_allows_publishes_nothing_of_its_split(kafka, unique):
    with splits(kafka, unique, 1, transaction_timeout=1) as made:

        def slow():
            yield rows(0).slice(0, ROWS // 2)
            # The brokers have the transaction, and end it: its records stay, followed by a marker of its end.
            assert wait_until(lambda: any(o.high for o in made.hook.read_offsets([made.reader.topic]).values()), 120)
            made.wait_settled(120)
            yield rows(0).slice(ROWS // 2)

        with pytest.raises(TransactionTimedOut, match="transaction_timeout"):
            made.publisher.publish(0, RecordBatches(slow()))
        assert made.reader.caught_up() == []
        replace(made.publisher, transaction_timeout=60).publish(0, RecordBatches(iter([rows(0)])))
        assert made.check() == ROWS
