"""The Kafka hook against a real broker."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
from airflow.providers.apache.kafka.hooks.base import KafkaBaseHook
from confluent_kafka import Consumer, Producer
from confluent_kafka import TopicPartition as KafkaTopicPartition
from confluent_kafka.admin import AdminClient

from airflow_kafka_spark.errors import ConnectionInvalid, GroupHasMembers, KafkaRefused, KafkaUnavailable, TopicMissing
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.hooks.kafka.log import read_log, warn_of_lost_transactions
from airflow_kafka_spark.hooks.kafka.requests import CommittedOffset, GroupState, PartitionOffsets
from airflow_kafka_spark.testing import EmbeddedKafka
from airflow_kafka_spark.windows.model import TopicPartition
from tests.support.waiting import eventually

SECOND = 1000


def name(prefix="t"):
    return f"{prefix}-{uuid.uuid4().hex[:12]}"


@pytest.fixture(autouse=True)
def connection(kafka, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", kafka.connection_json(group_id="somebody-else", client_id="ours"))


@pytest.fixture
def hook():
    with KafkaHook(timeout=20) as hook:
        yield hook


@pytest.fixture
def topic(kafka):
    """Create a topic of three partitions."""
    topic = name()
    kafka.create_topic(topic, 3)
    return topic


def produce(kafka, topic, partition, *timestamps):
    producer = Producer(kafka.connection_extra())
    for timestamp in timestamps:
        producer.produce(topic, value=b"v", partition=partition, timestamp=timestamp)
    assert producer.flush(60) == 0


@contextmanager
def transaction(kafka):
    """Yield a producer with an open transaction, which is aborted at the end unless the test has ended it."""
    producer = Producer(kafka.connection_extra() | {"transactional.id": name("txn"), "transaction.timeout.ms": 600_000})
    producer.init_transactions(60)
    producer.begin_transaction()
    try:
        yield producer
    except BaseException:
        producer.abort_transaction(60)
        raise


@contextmanager
def member(kafka, group, topic):
    """Yield a live member of a group, with partitions assigned."""
    consumer = Consumer(kafka.connection_extra(group_id=group, client_id="stranger"))
    assigned = []
    consumer.subscribe([topic], on_assign=lambda _, partitions: assigned.extend(partitions))
    deadline = time.monotonic() + 120
    while not assigned and time.monotonic() < deadline:
        consumer.poll(0.1)
    assert assigned
    try:
        yield consumer
    finally:
        consumer.close()


def settled(hook, partition):
    """Return the bounds of a partition once the markers of its last transaction are written: brokers answer before that."""
    deadline = time.monotonic() + 120
    while (bounds := hook.read_offsets([partition])[partition]).held_back and time.monotonic() < deadline:
        pass
    return bounds


def each(topic, *values):
    return {TopicPartition(topic, partition): value for partition, value in enumerate(values)}


# --- the cluster and its topics ---


def test_cluster_id(kafka, hook):
    assert hook.read_cluster_id() == AdminClient(kafka.connection_extra()).list_topics(timeout=60).cluster_id


def test_list_topics_leaves_out_kafkas_own_unless_asked(hook, topic):
    hook.alter_committed(name("g"), {TopicPartition(topic, 0): 0})  # so that there is an offsets topic
    assert topic in hook.list_topics()
    assert "__consumer_offsets" not in hook.list_topics()
    assert hook.list_topics(internal=True) >= {topic, "__consumer_offsets"}


def test_describe_topics(hook, topic):
    described = hook.describe_topics([topic, topic])[topic]
    assert (described.name, described.partitions, described.replication_factor, described.internal) == (
        topic,
        (0, 1, 2),
        1,
        False,
    )
    assert re.fullmatch(r"[\w-]{22}", described.topic_id)
    assert described.topic_partitions == tuple(TopicPartition(topic, p) for p in range(3))
    assert hook.describe_topics([]) == {}


def test_a_recreated_topic_has_another_id(kafka, hook, topic):
    before = hook.describe_topics([topic])[topic].topic_id
    kafka.delete_topic(topic)
    kafka.create_topic(topic, 3)
    after = hook.describe_topics([topic])[topic].topic_id
    assert before != after


def test_missing_topics_are_named_all_at_once_or_left_out(hook, topic):
    absent = sorted([name("absent"), name("absent")])
    with pytest.raises(TopicMissing) as caught:
        hook.describe_topics([topic, *absent])
    assert caught.value.topics == tuple(absent)
    assert "kafka_default" in str(caught.value)
    assert list(hook.describe_topics([topic, *absent], missing="omit")) == [topic]


def test_topic_config(kafka, hook, topic):
    compacted = name()
    kafka.create_topic(compacted, 1, {"cleanup.policy": "compact", "retention.ms": 12345})
    found = hook.read_topic_config([topic, compacted])
    assert found[topic]["cleanup.policy"] == "delete"
    assert found[topic]["max.message.bytes"] == "1048588"
    assert (found[compacted]["cleanup.policy"], found[compacted]["retention.ms"]) == ("compact", "12345")
    with pytest.raises(TopicMissing):
        hook.read_topic_config([topic, name("absent")])


def test_a_created_topic_can_be_used_at_once_and_an_existing_one_is_left_as_it_is(hook):
    topic = name()
    assert hook.create_topic(topic, 2, 1, {"cleanup.policy": "compact"}) is True
    assert hook.read_offsets([topic]) == each(topic, *[PartitionOffsets(0, 0, 0)] * 2)
    assert hook.create_topic(topic, 5, 1) is False
    assert hook.describe_topics([topic])[topic].partitions == (0, 1)
    assert hook.read_topic_config([topic])[topic]["cleanup.policy"] == "compact"
    with pytest.raises(KafkaRefused, match="TOPIC_ALREADY_EXISTS"):
        hook.create_topic(topic, exist_ok=False)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"config": {"cleanup.policy": "nonsense"}}, "INVALID_CONFIG"),
        ({"replication_factor": 9}, "INVALID_REPLICATION_FACTOR"),
        ({"name": "not a name"}, "TOPIC_EXCEPTION"),
    ],
)
def test_a_topic_the_brokers_do_not_accept_is_refused_with_their_reason(hook, arguments, code):
    with pytest.raises(KafkaRefused) as caught:
        hook.create_topic(**({"name": name()} | arguments))
    assert caught.value.code == code
    assert not caught.value.retryable


# --- offsets of the log ---


def test_offsets_of_topics_and_of_single_partitions(kafka, hook, topic):
    produce(kafka, topic, 0, 1, 2, 3)
    produce(kafka, topic, 2, 1)
    expected = each(topic, PartitionOffsets(0, 3, 3), PartitionOffsets(0, 0, 0), PartitionOffsets(0, 1, 1))
    assert hook.read_offsets([topic]) == expected
    assert hook.read_offsets([TopicPartition(topic, 2), topic]) == expected
    assert hook.read_offsets([TopicPartition(topic, 2)]) == {TopicPartition(topic, 2): PartitionOffsets(0, 1, 1)}
    assert hook.read_offsets([]) == {}


def test_deleted_records_move_the_low_watermark(kafka, hook, topic):
    produce(kafka, topic, 0, 1, 2, 3)
    produce(kafka, topic, 1, 1, 2)
    assert hook.delete_records({TopicPartition(topic, 0): 2, TopicPartition(topic, 1): -1}) == each(topic, 2, 2)
    assert hook.read_offsets([topic]) == each(
        topic, PartitionOffsets(2, 3, 3), PartitionOffsets(2, 2, 2), PartitionOffsets(0, 0, 0)
    )


def test_an_open_transaction_holds_the_last_stable_offset_back(kafka, hook, topic):
    produce(kafka, topic, 0, 1)
    with transaction(kafka) as producer:
        producer.produce(topic, b"v", partition=0)
        producer.produce(topic, b"v", partition=0)
        producer.flush(60)
        produce(kafka, topic, 0, 1)
        bounds = hook.read_offsets([topic])[TopicPartition(topic, 0)]
        assert bounds == PartitionOffsets(0, 1, 4)
        assert bounds.held_back == 3
        producer.commit_transaction(60)
    # The marker of the commit takes an offset as well.
    assert settled(hook, TopicPartition(topic, 0)) == PartitionOffsets(0, 5, 5)


def test_an_aborted_transaction_holds_nothing_back(kafka, hook, topic):
    with transaction(kafka) as producer:
        producer.produce(topic, b"v", partition=0)
        producer.flush(60)
        producer.abort_transaction(60)
    assert settled(hook, TopicPartition(topic, 0)) == PartitionOffsets(0, 2, 2)


def test_offsets_of_a_missing_topic_or_partition_are_an_error(hook, topic):
    absent = name("absent")
    with pytest.raises(TopicMissing) as caught:
        hook.read_offsets([topic, absent])
    assert caught.value.topics == (absent,)
    with pytest.raises(TopicMissing) as caught:
        hook.read_offsets([TopicPartition(topic, 0), TopicPartition(topic, 7)])
    assert caught.value.topics == (f"{topic}-7",)


def test_offsets_for_times(kafka, hook, topic):
    produce(kafka, topic, 0, 10 * SECOND, 20 * SECOND, 30 * SECOND)
    produce(kafka, topic, 1, 30 * SECOND, 10 * SECOND)
    assert hook.find_offsets_for_times([topic], 0) == each(topic, 0, 0, None)
    assert hook.find_offsets_for_times([topic], 10 * SECOND + 1) == each(topic, 1, 0, None)
    assert hook.find_offsets_for_times([topic], 20 * SECOND) == each(topic, 1, 0, None)
    assert hook.find_offsets_for_times([topic], 30 * SECOND + 1) == each(topic, None, None, None)
    assert hook.find_offsets_for_times([TopicPartition(topic, 1)], 5) == {TopicPartition(topic, 1): 0}
    with pytest.raises(ValueError, match="not negative"):
        hook.find_offsets_for_times([topic], -1)


def test_offsets_for_times_look_behind_the_last_stable_offset_only_on_request(kafka, hook, topic):
    produce(kafka, topic, 0, 10 * SECOND)
    with transaction(kafka) as producer:
        producer.produce(topic, b"v", partition=0, timestamp=20 * SECOND)
        producer.flush(60)
        partition = TopicPartition(topic, 0)
        assert hook.find_offsets_for_times([partition], 20 * SECOND)[partition] is None
        assert hook.find_offsets_for_times([partition], 20 * SECOND, isolation_level="read_uncommitted")[partition] == 1
        producer.abort_transaction(60)


def test_offsets_are_asked_for_in_batches_not_one_request_for_each_partition(kafka, monkeypatch, caplog):
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", kafka.connection_json(debug="protocol"))
    topic = name()
    kafka.create_topic(topic, 40)
    with caplog.at_level(logging.DEBUG, logger="airflow_kafka_spark.hooks.kafka.client"), KafkaHook() as hook:
        hook.read_offsets([topic])  # a new topic is asked for until its brokers have opened it
        hook.read_cluster_id()  # serves what is left in the log queue
        caplog.clear()
        assert len(hook.read_offsets([topic])) == 40
        hook.read_cluster_id()
    sent = [line for line in caplog.messages if "Sent ListOffsetsRequest" in line]
    assert 1 <= len(sent) <= 3


# --- consumer groups ---


def test_committed_offsets_with_their_texts_and_none_where_there_are_none(hook, topic):
    group = name("g")
    partitions = list(each(topic, 0, 0, 0))
    assert hook.read_committed_offsets(group, partitions) == each(topic, None, None, None)
    hook.alter_committed(group, {TopicPartition(topic, 0): 5, TopicPartition(topic, 1): CommittedOffset(7, "window 3")})
    assert hook.read_committed_offsets(group, partitions) == each(topic, CommittedOffset(5), CommittedOffset(7, "window 3"), None)
    assert hook.read_committed_offsets(group, [TopicPartition(topic, 1)]) == {
        TopicPartition(topic, 1): CommittedOffset(7, "window 3")
    }
    assert hook.read_committed_offsets(group, []) == {}
    assert hook.read_committed_offsets(name("absent"), partitions) == each(topic, None, None, None)


def unless_silent(ask, *about):
    """Return the answer; None if no broker answers within the hook's timeout."""
    with suppress(KafkaUnavailable):
        return ask(*about)


def test_offsets_in_an_open_transaction_are_waited_for(kafka, topic):
    group = name("g")
    partition = TopicPartition(topic, 0)
    with KafkaHook(timeout=3) as hasty, KafkaHook(timeout=60) as patient, transaction(kafka) as producer:
        patient.alter_committed(group, {partition: 1})
        # The connection is made first, so that the three seconds are not spent on it.
        assert eventually(lambda: unless_silent(hasty.read_committed_offsets, group, [partition])) == {
            partition: CommittedOffset(1)
        }
        consumer = Consumer(kafka.connection_extra(group_id=group))
        producer.send_offsets_to_transaction([KafkaTopicPartition(topic, 0, 9)], consumer.consumer_group_metadata(), 20)

        def refused():
            with pytest.raises(KafkaUnavailable) as caught:
                hasty.read_committed_offsets(group, [partition])
            # Or no broker has answered within three seconds.
            return "a transaction with offsets of this group is open" in str(caught.value) and str(caught.value)

        advice = re.search(
            "kafka-transactions.sh abort --topic (.*) --partition (.*) --start-offset ([0-9]*)", eventually(refused)
        )
        there = TopicPartition(advice[1], int(advice[2]))
        found = patient.read_offsets([there])[there]
        assert found.held_back and found.lso == int(advice[3])
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(patient.read_committed_offsets, group, [partition])
            producer.commit_transaction(60)
            assert answer.result(60) == {partition: CommittedOffset(9)}
        consumer.close()


def test_a_transaction_that_is_open_for_longer_than_brokers_allow_is_named_with_the_command_that_ends_it(
    kafka, hook, topic, caplog, monkeypatch
):
    def warned(offsets=None):
        caplog.clear()
        warn_of_lost_transactions(hook, read_log(hook, [topic]), offsets)
        return [record.getMessage() for record in caplog.records if record.name == warn_of_lost_transactions.__module__]

    produce(kafka, topic, 1, *[SECOND] * 3)
    with transaction(kafka) as producer:
        for partition, timestamp in ((0, SECOND), (1, 1_000 * SECOND)):
            producer.produce(topic, b"v", partition=partition, timestamp=timestamp)
        assert producer.flush(60) == 0
        monkeypatch.setattr("time.time", lambda: 1_899.0)
        (one,) = warned()
        assert f"--topic {topic} --partition 0 --start-offset 0" in one and "32 minutes" in one
        monkeypatch.setattr("time.time", lambda: 1_900.0)
        assert len(warned()) == 2 and f"--topic {topic} --partition 1 --start-offset 3" in caplog.text
        (one,) = warned({TopicPartition(topic, 0): 0, TopicPartition(topic, 1): 1})
        assert "--partition 0" in one, "a window gets on in the other partition"
        monkeypatch.undo()
        producer.commit_transaction(60)
    assert eventually(lambda: not warned())


def test_group_state_dead_empty_and_stable_with_its_members(kafka, hook, topic):
    group = name("g")
    assert hook.read_group_state(group) == GroupState(group, "Dead")
    hook.alter_committed(group, {TopicPartition(topic, 0): 0})
    assert hook.read_group_state(group) == GroupState(group, "Empty")
    with member(kafka, group, topic):
        state = hook.read_group_state(group)
    assert state.state == "Stable"
    assert [(m.client_id, m.topics) for m in state.members] == [("stranger", (topic,))]
    assert "127.0.0.1" in state.members[0].host
    assert eventually(lambda: hook.read_group_state(group).members == ())


def test_offsets_can_be_set_backwards(hook, topic):
    group = name("g")
    for offset in (9, 3):
        hook.alter_committed(group, {TopicPartition(topic, 0): offset})
        assert hook.read_committed_offsets(group, [TopicPartition(topic, 0)])[TopicPartition(topic, 0)] == CommittedOffset(offset)
    hook.alter_committed(group, {})


def test_offsets_of_a_group_with_live_members_cannot_be_set_and_the_error_names_the_members(kafka, hook, topic):
    group = name("g")
    with member(kafka, group, topic), pytest.raises(GroupHasMembers) as caught:
        hook.alter_committed(group, {TopicPartition(topic, 0): 1})
    assert caught.value.group_id == group
    assert re.search(rf"stranger at 127\.0\.0\.1 reading {topic}", str(caught.value))


def test_setting_offsets_of_a_missing_topic_is_an_error(hook):
    with pytest.raises(TopicMissing):
        hook.alter_committed(name("g"), {TopicPartition(name("absent"), 0): 1})


# --- the connection ---


def test_the_hook_is_one_of_the_official_connection_type():
    assert issubclass(KafkaHook, KafkaBaseHook)
    assert (KafkaHook.conn_type, KafkaHook.conn_name_attr) == ("kafka", "kafka_conn_id")
    assert KafkaHook("east").conn_id == KafkaHook("east").kafka_config_id == "east"


def test_one_client_per_hook_and_a_new_one_after_close(kafka, monkeypatch):
    hook = KafkaHook()
    client = hook.get_conn
    hook.read_cluster_id()
    assert hook.get_conn is client
    hook.close()
    hook.close()
    assert hook.read_cluster_id()
    assert hook.get_conn is not client
    hook.close()


def test_clients_made_from_its_settings_work(kafka, hook, topic):
    producer = Producer(hook.make_producer_config(**{"transactional.id": name("txn")}))
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce(topic, b"hello", partition=0)
    producer.commit_transaction(60)
    settled(hook, TopicPartition(topic, 0))
    consumer = Consumer(hook.make_consumer_config())
    consumer.assign([KafkaTopicPartition(topic, 0, 0)])
    first, end = consumer.poll(20), consumer.poll(20)
    assert first.value() == b"hello"
    assert end.error().name() == "_PARTITION_EOF"
    consumer.close()
    assert hook.make_java_config().options["bootstrap.servers"] == kafka.bootstrap_servers


def test_settings_that_java_has_no_counterpart_for_are_logged(kafka, monkeypatch, caplog):
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", kafka.connection_json(ssl_crl_location="/x", debug=""))
    with caplog.at_level(logging.INFO):
        assert KafkaHook().make_java_config().ignored == ("ssl.crl.location",)
    assert "connection kafka_default: ssl.crl.location" in caplog.text


def test_connection_test_of_the_ui(kafka, hook):
    expected = f"Connected to Kafka cluster {hook.read_cluster_id()}, brokers: {kafka.bootstrap_servers}."
    assert hook.test_connection() == (True, expected)
    assert KafkaHook("undefined").test_connection()[0] is False


# --- what goes wrong ---


def use(monkeypatch, conn_id, **extra):
    monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps({"conn_type": "kafka", "extra": extra}))
    # A call that waits for the whole timeout would be noticed.
    return KafkaHook(conn_id, timeout=300)


EVERY_CALL = [
    lambda hook: hook.read_cluster_id(),
    lambda hook: hook.list_topics(),
    lambda hook: hook.describe_topics(["x"], missing="omit"),
    lambda hook: hook.read_topic_config(["x"]),
    lambda hook: hook.read_offsets([TopicPartition("x", 0)]),
    lambda hook: hook.find_offsets_for_times([TopicPartition("x", 0)], 0),
    lambda hook: hook.read_committed_offsets("g", [TopicPartition("x", 0)]),
    lambda hook: hook.read_group_state("g"),
    lambda hook: hook.alter_committed("g", {TopicPartition("x", 0): 0}),
    lambda hook: hook.create_topic("x"),
    lambda hook: hook.delete_records({TopicPartition("x", 0): 0}),
]


def noise(capfd):
    """Return the lines that librdkafka has logged, without those about brokers of other tests, which may end at any time."""
    said = "".join(capfd.readouterr()).splitlines()
    return [line for line in said if "rdkafka" in line and not re.search(r"127\.0\.0\.1:\d\d+", line)]


def test_the_address_of_a_web_server_is_named_at_once_and_no_retry_is_advised(monkeypatch, capfd):
    for call in EVERY_CALL:
        with pytest.raises(ConnectionInvalid, match=r"`web`: `http://b1:9092`.*`host:port`") as caught:
            call(use(monkeypatch, "web", **{"bootstrap.servers": "http://b1:9092"}))
        assert not caught.value.retryable
    assert noise(capfd) == []


def test_no_call_returns_anything_when_no_broker_can_be_reached(monkeypatch, capfd):
    hook = use(monkeypatch, "closed", **{"bootstrap.servers": "127.0.0.1:1"})

    def failure(call):
        started, used = time.monotonic(), use(monkeypatch, "closed", **{"bootstrap.servers": "127.0.0.1:1"})
        # The second call comes as soon as the first one: sensors ask again with the hook that they have.
        for _ in range(2):
            with pytest.raises(KafkaUnavailable, match="`closed`.*127.0.0.1:1.*Connection refused") as caught:
                call(used)
            assert caught.value.retryable
        return time.monotonic() - started

    with ThreadPoolExecutor(len(EVERY_CALL)) as pool:
        assert max(pool.map(failure, EVERY_CALL)) < 100
    hook.close()
    assert noise(capfd) == []


def test_an_unknown_host_is_an_error_within_seconds(monkeypatch):
    started = time.monotonic()
    with pytest.raises(KafkaUnavailable, match=r"Failed to resolve 'no-such-host\.invalid:9092'"):
        use(monkeypatch, "dns", **{"bootstrap.servers": "no-such-host.invalid:9092"}).read_cluster_id()
    assert time.monotonic() - started < 100


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, r"bootstrap\.servers"),
        ({"bootstrap.servers": "127.0.0.1:1", "no.such.thing": 1}, r"no\.such\.thing"),
        (
            {
                "bootstrap.servers": "127.0.0.1:1",
                "sesion.timeout.ms": 6000,
                "session.timeout.ms": "6s",
                "compression.type": "gzp",
                "max.in.flight": 50,
                "retries": "no",
                "enable.idempotence": False,
                "sasl.pasword": "s3cr3t",
                "ssl.ca.location": "/a/file/that/the/client/looks/for",
            },
            r'"gzp" .*\(`compression.type`\).*`max.in.flight` must be set <= 5.*`retries` is `no`, not a whole number; '
            r".*sesion.timeout.ms.*perhaps `session.timeout.ms`.*`session.timeout.ms` is `6s`, not a whole number of "
            r'milliseconds; No such configuration property: "sasl.pasword"\.',
        ),
        ({"bootstrap.servers": "127.0.0.1:1", "error_cb": "os.system"}, "Add it to `callback_allowlist`"),
        ({"bootstrap.servers": ["127.0.0.1:1"]}, 'is of type list; expected a text. Write "broker1:9092,broker2:9092"'),
        ({"bootstrap.servers": "127.0.0.1:1", "oauth_cb": "no_such.token"}, "cannot be imported: .*no_such.*Spark's executors"),
        (
            {"bootstrap.servers": "b-1.c2.kafka.eu-west-1.amazonaws.com:9098", "sasl.mechanism": "OAUTHBEARER"},
            "cannot be imported: .*aws_msk_iam_sasl_signer",
        ),
    ],
)
def test_an_unusable_extra_is_an_error_that_names_the_connection(monkeypatch, extra, message):
    monkeypatch.setenv("AIRFLOW__APACHE_KAFKA__CALLBACK_ALLOWLIST", "no_such.token")
    with pytest.raises(ConnectionInvalid, match=f"`broken`.*{message}"):
        use(monkeypatch, "broken", **extra).read_cluster_id()


def test_an_undefined_connection_is_an_error_that_says_so():
    with pytest.raises(ConnectionInvalid, match="`undefined`.*not defined.*type `kafka`"):
        KafkaHook("undefined").read_cluster_id()


def test_a_client_with_the_wrong_protocol_gets_an_error_that_names_the_protocol(kafka, monkeypatch):
    hook = use(monkeypatch, "tls", **{"bootstrap.servers": kafka.bootstrap_servers, "security.protocol": "SSL"})
    # The client words it by what comes in first (bytes, or the end of the connection), and by how far the handshake is then.
    expected = "SSL handshake failed.*PLAINTEXT broker listener|SSL.*another `security.protocol`"
    with pytest.raises(KafkaUnavailable, match=expected):
        hook.read_cluster_id()


def test_the_connections_own_error_callback_is_still_called(monkeypatch):
    heard = []
    hook = use(monkeypatch, "closed", **{"bootstrap.servers": "127.0.0.1:1"})
    hook.config["error_cb"] = heard.append
    with pytest.raises(KafkaUnavailable):
        hook.read_cluster_id()
    assert "_TRANSPORT" in {error.name() for error in heard}


@pytest.fixture(scope="module")
def fragile():
    """A separate broker that the test may kill."""
    with EmbeddedKafka() as kafka:
        kafka.create_topic("t")
        yield kafka


# Run in a separate process, because the fault would end the process.
STRESS = """
import random, sys, threading, time
from airflow_kafka_spark.errors import KafkaUnavailable
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.windows.model import TopicPartition
from tests.support.waiting import eventually

p = TopicPartition("t", 0)
answers, silences = [], []

def ask(seed):
    rng = random.Random(seed)
    hook = KafkaHook("fragile", timeout=rng.choice([0.3, 1, 2]))
    calls = [
        lambda: hook.read_committed_offsets("g", [p]),
        lambda: hook.read_group_state("g"),
        lambda: hook.alter_committed(f"g{seed}", {p: 1}),
        lambda: hook.read_offsets(["t"]),
        lambda: hook.read_topic_config(["t"]),
    ]
    while not stop.is_set():
        try:
            rng.choice(calls)()
            answers.append(seed)
        except KafkaUnavailable:
            silences.append(seed)

stop = threading.Event()
threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
for thread in threads:
    thread.start()
eventually(lambda: answers)
print("started", flush=True)
sys.stdin.read()
stop.set()
for thread in threads:
    thread.join()
print(len(answers), len(silences))
"""


@pytest.mark.extended
@pytest.mark.faults
def test_no_call_ends_the_process_when_a_broker_dies_and_comes_back(fragile):
    environment = os.environ | {"AIRFLOW_CONN_FRAGILE": fragile.connection_json()}
    command = [sys.executable, "-c", STRESS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as process:
        try:
            assert "started\n" in process.stdout  # reads lines until then
            for _ in range(3):
                fragile.kill()
                fragile.restart()
            output, _ = process.communicate("", timeout=240)
        finally:
            process.kill()
    assert process.returncode == 0
    answers, silences = map(int, output.splitlines()[-1].split())
    assert answers > 0
    assert silences > 0


@pytest.mark.faults
def test_a_broker_that_hangs_is_an_error_after_the_timeout(fragile, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_FRAGILE", fragile.connection_json())
    with KafkaHook("fragile", timeout=2) as hook:
        assert eventually(lambda: unless_silent(hook.read_offsets, ["t"]))
        fragile.pause()
        try:
            started = time.monotonic()
            with pytest.raises(KafkaUnavailable):
                hook.read_offsets(["t"])
            assert 1.5 < time.monotonic() - started < 100
            with pytest.raises(KafkaUnavailable):
                hook.list_topics()
        finally:
            fragile.resume()
        assert eventually(lambda: unless_silent(hook.list_topics)) == {"t"}


@pytest.mark.faults
def test_a_hook_that_was_connected_waits_for_a_broker_that_restarts(fragile, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_FRAGILE", fragile.connection_json())
    with KafkaHook("fragile", timeout=200) as hook, ThreadPoolExecutor(1) as pool:
        assert hook.read_offsets(["t"]) == each("t", PartitionOffsets(0, 0, 0))
        fragile.kill()
        answer = pool.submit(hook.read_offsets, ["t"])
        fragile.restart()
        assert answer.result(200) == each("t", PartitionOffsets(0, 0, 0))


@pytest.mark.extended
@pytest.mark.faults
def test_a_hook_that_was_connected_reports_why_no_broker_answers(fragile, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_FRAGILE", fragile.connection_json())
    with KafkaHook("fragile", timeout=10) as hook:
        assert eventually(lambda: unless_silent(hook.read_cluster_id))
        fragile.kill()
        try:
            with pytest.raises(KafkaUnavailable, match="Connection refused|Disconnected"):
                hook.read_committed_offsets("g", [TopicPartition("t", 0)])
        finally:
            fragile.restart()


def test_a_connection_of_another_type_without_brokers_is_named_with_its_type(monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE", "postgres://etl@db/dwh")
    with pytest.raises(ConnectionInvalid, match="of type `postgres`, and its extra names no brokers. Use a connection of type"):
        _ = KafkaHook("warehouse").config
