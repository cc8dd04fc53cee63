"""A cluster of three brokers, of which some or all die: while a split is published, or while a hook sends requests.

The tests share the cluster, and restart its brokers at their ends.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from airflow_kafka_spark.errors import KafkaSparkError, LogTruncated
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.hooks.kafka.requests import CommittedOffset, PartitionOffsets
from airflow_kafka_spark.sources.kafka.tasks.read import KafkaSplitReader
from airflow_kafka_spark.testing import EmbeddedKafka
from airflow_kafka_spark.testing._processes import wait_until
from airflow_kafka_spark.windows.model import OffsetRange, TopicPartition
from tests.faults.test_broker import ORDERS, check, finish
from tests.support.pipelines import order, pipeline, row_of
from tests.support.shop import shop
from tests.support.workers import fault_in_tasks, wait_stopped, wake
from tests.testing.test_embedded_kafka import IMPATIENT, QUIET, consume, gone, pids_of, produce

pytestmark = pytest.mark.usefixtures("several_brokers")


@pytest.fixture(scope="module")
def three():
    with EmbeddedKafka(3) as kafka:
        yield kafka
        pids = pids_of(kafka, 3)
    assert all(map(gone, pids)), "nothing is left of it"


def coordinator_of(kafka, transactional_id):
    """Return the broker that leads the partition of the transaction log that the Java hash code of a transactional id gives."""
    log = "__transaction_state"
    partitions = AdminClient(kafka.connection_extra()).list_topics(log, timeout=60).topics[log].partitions
    code = 0
    for character in transactional_id:
        code = (31 * code + ord(character)) & 0xFFFFFFFF
    leader = partitions[(code & 0x7FFFFFFF) % len(partitions)].leader
    return next(number for number in range(3) if kafka.broker(number).node_id == leader)


@pytest.mark.faults
def test_every_call_of_a_hook_answers_while_the_broker_that_coordinates_a_splits_transaction_is_dead(
    three, postgres, unique, tmp_path, monkeypatch
):
    monkeypatch.setenv("AIRFLOW_CONN_CLUSTER", three.connection_json())
    topics, group, once = [unique("asked") for _ in range(2)], unique("g"), tmp_path / "fired"
    with (
        KafkaHook("cluster", timeout=120) as hook,
        shop(three, postgres, unique, tmp_path, source={"split_records": ORDERS}) as orders,
        orders.watched(),
    ):
        for topic in topics:
            assert hook.create_topic(topic, 3) is True
            assert hook.read_offsets([topic]) == {TopicPartition(topic, n): PartitionOffsets(0, 0, 0) for n in range(3)}
        partition = TopicPartition(topics[0], 0)
        hook.alter_committed(group, {partition: 3})
        orders.sell(ORDERS)
        with ThreadPoolExecutor(1) as pool:
            with fault_in_tasks("publish.flushed:stop", once):
                attempt = pool.submit(orders.run, "run1")
                worker = wait_stopped(once)
            # The only split is the first.
            killed = coordinator_of(three, f"{orders.arguments['ledger_topic']}.{orders.name}.split.0")
            # The broker that librdkafka would continue to ask; each answer names another one.
            assert wait_until(lambda: hook.get_conn.list_topics(timeout=60).controller_id == three.broker(killed).node_id, 120)
            three.kill(killed)
            wake(worker)
            assert len(hook.read_offsets(topics)) == 6
            assert hook.read_committed_offsets(group, [partition]) == {partition: CommittedOffset(3)}
            hook.alter_committed(group, {partition: 4})
            assert hook.read_group_state(group).state == "Empty"
            assert {topic for topic in hook.list_topics() if topic.startswith("asked-")} == set(topics)
            assert hook.read_topic_config([topics[1]])[topics[1]]["cleanup.policy"] == "delete"
            assert hook.read_cluster_id()
            try:
                report = attempt.result(240)
            except KafkaSparkError as error:
                assert error.retryable
                report = finish(orders)
        check(orders, report, report["attempts"])
        three.restart(killed)
        check(orders, report, report["attempts"])


def partition_of(kafka, topic):
    """Return the first partition as the brokers know it; None while they do not answer."""
    try:
        return AdminClient(kafka.connection_extra()).list_topics(topic, timeout=5).topics[topic].partitions[0]
    except Exception:
        return None


def send(kafka, topic, numbers):
    producer = Producer({**kafka.connection_extra(), "linger.ms": 0})
    for number in numbers:
        producer.produce(topic, order(number), b"k", 0)
    assert producer.flush(120) == 0


@pytest.mark.extended
@pytest.mark.faults
def test_records_that_an_unclean_leader_election_loses_are_named_and_what_grows_in_their_place_is_not_taken_for_them(
    three, unique, tmp_path
):
    with pipeline("files", three, None, unique, tmp_path) as flow:
        flow.topic = unique("unclean")
        config = {"min.insync.replicas": 1, "unclean.leader.election.enable": "true"}
        three.create_topic(flow.topic, 1, config, replication=2)
        send(three, flow.topic, range(10))
        assert flow.run("run1")["records_read"] == 10

        first = partition_of(three, flow.topic)
        numbers = {three.broker(number).node_id: number for number in range(3)}
        leader, (follower,) = first.leader, set(first.replicas) - {first.leader}
        three.kill(numbers[follower])
        assert wait_until(lambda: (now := partition_of(three, flow.topic)) and now.isrs == [leader], 180)
        send(three, flow.topic, range(10, 20))
        assert flow.run("run2")["records_read"] == 10
        epoch = flow_epoch(flow)

        three.kill(numbers[leader])
        three.restart(numbers[follower])
        assert wait_until(lambda: (now := partition_of(three, flow.topic)) and now.leader == follower, 180)
        send(three, flow.topic, range(100, 130))

        with pytest.raises(LogTruncated) as refused:
            flow.run("run3")
        error = refused.value
        assert (error.topic, error.partition, error.position, error.end) == (flow.topic, 0, 20, 10)
        with KafkaHook() as hook, pytest.raises(LogTruncated) as refused:
            # A task whose window was planned before the election.
            list(KafkaSplitReader(hook.make_consumer_config(), OffsetRange(flow.topic, 0, 5, 20), epoch=epoch))
        assert (refused.value.position, refused.value.end, refused.value.known_epoch) == (20, 10, epoch)
        assert sorted(flow.rows()) == [row_of(order(n)) for n in range(20)]

        report = flow.run("run3", data_loss="skip")
        lost = {"topic": flow.topic, "partition": 0, "start": 10, "end": 20}
        assert (report["records_read"], report["gaps"]) == (20, [lost])
        assert sorted(flow.rows()) == sorted(row_of(order(n)) for n in (*range(20), *range(110, 130)))
        three.restart(numbers[leader])
        assert flow.run("run4")["records_read"] == 0


def flow_epoch(flow):
    """Return the leader epoch that the ledger holds with the pipeline's position."""
    from airflow_kafka_spark.control.pipelines import read_pipeline

    with KafkaHook() as hook:
        (epoch,) = read_pipeline(hook, flow.name, f"ledger-{flow.name}").memory.position.epochs.values()
    return epoch


@pytest.mark.extended
@pytest.mark.slow
def test_three_brokers_survive_the_pause_of_one_and_the_kill_of_all(three, unique):
    """The other tests kill one of them."""
    topic = unique("replicated")
    three.create_topic(topic, partitions=3)
    expected = [str(n) for n in range(200)]
    three.pause(1)
    produce(three, topic, expected, **IMPATIENT)
    three.resume(1)
    assert wait_until(lambda: in_sync(three, topic), 180)
    # All at the same time, like a power failure: the first broker alone is no cluster, and restart does not wait for one.
    for number in range(3):
        three.kill(number)
    for number in range(3):
        three.restart(number)
    assert consume(three, topic, 200) == sorted(expected)


def in_sync(kafka, topic):
    partitions = AdminClient({**kafka.connection_extra(), **QUIET}).list_topics(topic, timeout=60).topics[topic].partitions
    return all(len(partition.isrs) == 3 for partition in partitions.values())
