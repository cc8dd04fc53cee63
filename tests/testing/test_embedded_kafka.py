"""The embedded Kafka is a real broker, survives the faults that brokers survive, and ends with the process that started it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from airflow_kafka_spark.errors import JavaMissing, ServerFailed, ServerInvalid
from airflow_kafka_spark.testing import EmbeddedKafka, KafkaSecurity
from airflow_kafka_spark.testing import _processes as processes
from airflow_kafka_spark.testing.kafka import CHECKPOINT
from tests.testing.parents import gone

QUIET: dict[str, Any] = {"log_level": 0, "error_cb": lambda error: None}
# What the client of a cluster with a silent broker needs: the default is a minute.
IMPATIENT = {**QUIET, "socket.timeout.ms": 2000}
PASSWORDS = {"alice": "al\"i\\c-e' é;", "bob": "another"}


@dataclass(frozen=True)
class Odd:
    """A broker that was started in a thread that has ended, while another process took the first port that was chosen for it."""

    kafka: EmbeddedKafka
    taken: int


@pytest.fixture(scope="module")
def odd() -> Iterator[Odd]:
    """One start for several tests; the last of them stops it."""
    kafka = EmbeddedKafka(properties={"auto.create.topics.enable": "true", "log.retention.ms": 12345})
    with socket.socket() as taken, pytest.MonkeyPatch.context() as patch:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        chosen = processes.find_free_ports
        answers = iter([[port, *chosen(2)]])
        patch.setattr(processes, "find_free_ports", lambda count: next(answers, None) or chosen(count))
        thread = threading.Thread(target=kafka.start)
        thread.start()
        thread.join()
    assert kafka._supervisor is not None, "it did not start in its thread"
    with kafka:
        yield Odd(kafka, port)


def produce(kafka: EmbeddedKafka, topic: str, values: list[str], **settings: Any) -> None:
    producer = Producer({**kafka.connection_extra(enable_idempotence=True), **QUIET, **settings})
    for value in values:
        producer.produce(topic, value)
    assert producer.flush(180) == 0


def consume(kafka: EmbeddedKafka, topic: str, count: int) -> list[str]:
    consumer = Consumer({**kafka.connection_extra(group_id="reader", auto_offset_reset="earliest"), **QUIET})
    partitions = consumer.list_topics(topic, timeout=120).topics[topic].partitions
    consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
    values: list[str] = []
    try:
        while len(values) < count and (batch := consumer.consume(count - len(values), timeout=120)):
            values += [message.value().decode() for message in batch if not message.error()]
    finally:
        consumer.close()
    return sorted(values)


def reachable(settings: dict[str, Any], seconds: float = 60) -> bool:
    try:
        return bool(AdminClient({**QUIET, **settings}).list_topics(timeout=seconds).brokers)
    except KafkaException:
        return False


def pids_of(kafka: EmbeddedKafka, brokers: int = 1) -> list[int]:
    assert kafka._supervisor is not None
    found = [kafka._supervisor.pid, *(kafka.broker(n).pid for n in range(brokers))]
    return [pid for pid in found if pid]


# --- records and topics ---


def test_records_go_in_and_come_out(kafka: EmbeddedKafka, unique: Callable[[str], str]) -> None:
    topic = unique("orders")
    kafka.create_topic(topic, partitions=3)
    values = sorted(str(n) for n in range(1000))
    produce(kafka, topic, values)
    assert consume(kafka, topic, 1000) == values


def test_it_is_the_kafka_that_the_package_names(kafka: EmbeddedKafka) -> None:
    # The version of the jars on its class path; a client gets only version ranges of requests.
    pid = kafka.broker().pid
    assert pid is not None
    assert any("kafka_2.13-4.2.0.jar" in part for part in psutil.Process(pid).cmdline())


def test_every_partition_has_a_leader_when_create_topic_returns(kafka: EmbeddedKafka, unique: Callable[[str], str]) -> None:
    topic = unique("many")
    kafka.create_topic(topic, partitions=12, config={"cleanup.policy": "compact"})
    admin = AdminClient(kafka.connection_extra())
    partitions = admin.list_topics(topic, timeout=60).topics[topic].partitions
    assert len(partitions) == 12 and all(partition.leader == 1 for partition in partitions.values())
    assert config_of(admin, ResourceType.TOPIC, topic)["cleanup.policy"] == "compact"


def test_every_partition_serves_when_create_partitions_returns(kafka: EmbeddedKafka, unique: Callable[[str], str]) -> None:
    topic = unique("growing")
    kafka.create_topic(topic)
    for total in range(2, 30, 3):
        kafka.create_partitions(topic, total)
        failed: list[Any] = []
        producer = Producer(kafka.connection_extra(retries=0))
        producer.produce(topic, b"new", partition=total - 1, on_delivery=lambda error, _, failed=failed: failed.append(error))
        assert producer.flush(180) == 0 and failed == [None]
    with pytest.raises(KafkaException):
        kafka.create_partitions(topic, 2)


def test_a_topic_is_not_known_any_more_when_delete_topic_returns(kafka: EmbeddedKafka, unique: Callable[[str], str]) -> None:
    topic = unique("short-lived")
    kafka.create_topic(topic)
    kafka.delete_topic(topic)
    assert topic not in AdminClient(kafka.connection_extra()).list_topics(timeout=60).topics
    with pytest.raises(KafkaException):
        kafka.delete_topic(topic)


def test_a_topic_that_exists_is_refused(kafka: EmbeddedKafka, unique: Callable[[str], str]) -> None:
    topic = unique("twice")
    kafka.create_topic(topic)
    with pytest.raises(KafkaException, match="TOPIC_ALREADY_EXISTS"):
        kafka.create_topic(topic)


@dataclass(frozen=True)
class Unanswered:
    """A client whose first request about topics is carried out, while its answer is lost with its broker."""

    admin: AdminClient
    lost: set[str] = field(default_factory=set)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.admin, name)
        if name in self.lost or name not in ("create_topics", "create_partitions", "delete_topics"):
            return method

        def lose(topics: list[Any], **settings: Any) -> dict[str, Future[None]]:
            self.lost.add(name)
            answers = {}
            for topic, answer in method(topics, **settings).items():
                answer.result(60)
                answers[topic] = Future[None]()
                answers[topic].set_exception(KafkaException(KafkaError(-137)))  # confluent-kafka has no name: _DESTROY_BROKER
            return answers

        return lose


def test_a_change_of_a_topic_whose_answer_is_lost_is_requested_again(
    kafka: EmbeddedKafka, unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, topic = Unanswered(AdminClient({**kafka.connection_extra(), **QUIET})), unique("again")
    monkeypatch.setattr(kafka, "_make_admin_client", lambda: client)
    kafka.create_topic(topic)
    kafka.create_partitions(topic, 3)
    assert len(client.list_topics(topic, timeout=60).topics[topic].partitions) == 3
    kafka.delete_topic(topic)
    assert topic not in client.list_topics(timeout=60).topics
    assert client.lost == {"create_topics", "create_partitions", "delete_topics"}


def test_topics_are_not_created_by_themselves(kafka: EmbeddedKafka, unique: Callable[[str], str]) -> None:
    topic = unique("nobody-made-it")
    admin = AdminClient(kafka.connection_extra())
    admin.list_topics(topic, timeout=60)
    assert topic not in admin.list_topics(timeout=60).topics


def config_of(admin: AdminClient, kind: ResourceType, name: str) -> dict[str, str]:
    resource = ConfigResource(kind, name)
    return {key: entry.value for key, entry in admin.describe_configs([resource])[resource].result(30).items()}


def test_records_are_kept_and_transactions_work_with_few_partitions(kafka: EmbeddedKafka, unique: Callable[[str], str]) -> None:
    admin = AdminClient(kafka.connection_extra())
    config = config_of(admin, ResourceType.BROKER, "1")
    assert config["log.retention.ms"] == "-1"
    assert config["offsets.topic.num.partitions"] == config["transaction.state.log.num.partitions"] == "4"
    topic = unique("transactional")
    kafka.create_topic(topic)
    producer = Producer(kafka.connection_extra(transactional_id=unique("id")))
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce(topic, "kept")
    producer.commit_transaction(60)
    assert consume(kafka, topic, 1) == ["kept"]


@pytest.mark.extended
def test_properties_are_over_those_of_the_class(odd: Odd) -> None:
    config = config_of(AdminClient(odd.kafka.connection_extra()), ResourceType.BROKER, "1")
    assert (config["auto.create.topics.enable"], config["log.retention.ms"]) == ("true", "12345")


def test_nodes_that_share_a_checkpoint_have_ids_of_their_own(kafka: EmbeddedKafka, odd: Odd) -> None:
    nodes = [some.broker(0).data for some in (kafka, odd.kafka)]
    assert len({(node / CHECKPOINT).read_bytes() for node in nodes}) == 1
    ids = [dict(line.split("=", 1) for line in (node / "meta.properties").read_text().split() if "=" in line) for node in nodes]
    for name in ("cluster.id", "directory.id"):
        assert len({known[name] for known in ids}) == 2


# --- faults ---


def test_a_paused_broker_answers_nothing_until_it_is_resumed(kafka: EmbeddedKafka) -> None:
    kafka.pause()
    try:
        assert kafka.broker().running
        assert not reachable(kafka.connection_extra(), 1)
    finally:
        kafka.resume()
    assert reachable(kafka.connection_extra())


def test_after_kill_and_restart_ports_and_acknowledged_records_are_the_same(
    kafka: EmbeddedKafka, unique: Callable[[str], str]
) -> None:
    """The broker is killed while it is paused, is started again, and is then restarted while it runs."""
    topic, before, pids = unique("killed"), kafka.bootstrap_servers, [kafka.broker().pid]
    kafka.create_topic(topic, partitions=2)
    produce(kafka, topic, ["a", "b", "c"])
    try:
        kafka.pause()
        kafka.kill()
        assert not kafka.broker().running and not reachable(kafka.connection_extra(), 1)
        with pytest.raises(ServerFailed, match="broker 0 ended with exit code -9"):
            kafka.pause()
    finally:
        kafka.restart()
    assert kafka.bootstrap_servers == before, "after a kill"
    produce(kafka, topic, ["d"])
    assert consume(kafka, topic, 4) == ["a", "b", "c", "d"], "after a kill"
    pids.append(kafka.broker().pid)
    kafka.restart()
    assert consume(kafka, topic, 4) == ["a", "b", "c", "d"], "after a restart"
    assert kafka.bootstrap_servers == before, "after a restart"
    pids.append(kafka.broker().pid)
    assert len(set(pids)) == 3 and all(pid and gone(pid) for pid in pids[:2]), "each restart ends the broker before"


@pytest.mark.parametrize("brokers", [0, 2, 4])
def test_only_one_or_three_brokers(brokers: int) -> None:
    with pytest.raises(ServerInvalid, match="1 or 3"):
        EmbeddedKafka(brokers=brokers)


# --- life and end ---


def test_it_lives_on_when_the_thread_that_started_it_ends(odd: Odd) -> None:
    assert odd.kafka.broker().running and reachable(odd.kafka.connection_extra())


def test_another_port_is_taken_if_another_process_was_faster(odd: Odd) -> None:
    assert odd.kafka.broker().port != odd.taken and reachable(odd.kafka.connection_extra())


def test_the_end_of_a_fork_does_not_stop_it(odd: Odd) -> None:
    child = os.fork()
    if child == 0:
        # What a fork does that runs the handlers it inherited.
        odd.kafka.stop()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert odd.kafka.broker().running and reachable(odd.kafka.connection_extra())


def test_nothing_is_left_after_stop(odd: Odd) -> None:
    """test_embedded_postgres.py tests that a killed process, or one that ends without a stop, leaves nothing running."""
    kafka = odd.kafka.start()
    pids, port, directory = pids_of(kafka), kafka.broker().port, kafka.broker().directory.parent
    assert directory.is_dir()
    kafka.stop()
    kafka.stop()
    assert all(map(gone, pids)) and not directory.exists()
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", port))
    with pytest.raises(ServerFailed, match="was not started, or was stopped"):
        _ = kafka.bootstrap_servers


@pytest.mark.extended
def test_a_given_data_directory_is_kept_for_a_later_instance_and_a_broker_that_cannot_start_there_shows_its_log(
    tmp_path: Path,
) -> None:
    with EmbeddedKafka(data_dir=tmp_path / "kafka") as kafka:
        kafka.create_topic("kept")
        produce(kafka, "kept", ["a", "b"])
    with EmbeddedKafka(data_dir=tmp_path / "kafka") as kafka:
        assert consume(kafka, "kept", 2) == ["a", "b"]
        assert kafka.broker().log.is_relative_to(tmp_path)
        meta = kafka.broker().directory / "data" / "meta.properties"
    meta.write_text(meta.read_text().replace("node.id=1", "node.id=7"))
    with pytest.raises(ServerFailed, match=r"(?s)broker 0 ended with exit code 1; its log .*server\.log ends with:.*7"):
        EmbeddedKafka(data_dir=tmp_path / "kafka").start()


def test_a_port_is_not_chosen_again_soon_for_its_server_may_not_listen_yet() -> None:
    chosen = [port for _ in range(25) for port in processes.find_free_ports(4)]
    assert len(set(chosen)) == 100


def test_a_setting_that_kafka_refuses_is_reported_and_nothing_is_left() -> None:
    kafka = EmbeddedKafka(properties={"num.io.threads": 0})
    with pytest.raises(ServerFailed, match=r"num\.io\.threads"):
        kafka.start()
    assert kafka._directory is not None and not kafka._directory.exists()


def test_without_java_there_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JavaMissing, match="Java was not found"):
        EmbeddedKafka().start()


# --- connections and security ---


def test_the_airflow_connection_is_what_connection_extra_says(kafka: EmbeddedKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow.models.connection import Connection

    expected = {"bootstrap.servers": kafka.bootstrap_servers, "group.id": "orders"}
    assert kafka.connection_extra(group_id="orders") == expected
    by_json = Connection.from_json(kafka.connection_json(group_id="orders"))
    by_uri = Connection(uri=kafka.connection_uri(group_id="orders"))
    assert by_json.conn_type == by_uri.conn_type == "kafka"
    assert by_json.extra_dejson == by_uri.extra_dejson == expected


@pytest.fixture(scope="module")
def secured() -> Iterator[EmbeddedKafka]:
    with EmbeddedKafka(security=KafkaSecurity("SASL_SSL", PASSWORDS)) as kafka:
        kafka.create_topic("secret")
        yield kafka


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
@pytest.mark.parametrize("user", PASSWORDS)
def test_over_tls_the_right_password_connects_and_a_wrong_one_is_refused(
    secured: EmbeddedKafka, mechanism: str, user: str
) -> None:
    right = secured.connection_extra(user, mechanism)
    assert right["sasl.password"] == PASSWORDS[user] and right["sasl.mechanism"] == mechanism
    assert reachable(right)
    refusals: list[Any] = []
    wrong = AdminClient({**QUIET, **right, "sasl.password": "wrong", "error_cb": refusals.append})

    def refused() -> bool:
        with pytest.raises(KafkaException):
            wrong.list_topics(timeout=0.3)
        wrong.poll(0)
        return any(error.name() == "_AUTHENTICATION" for error in refusals)

    assert processes.wait_until(refused, 180)


def test_a_secured_broker_takes_and_gives_records(secured: EmbeddedKafka) -> None:
    produce(secured, "secret", ["a", "b"])
    assert consume(secured, "secret", 2) == ["a", "b"]


def test_a_secured_broker_is_not_reached_in_plain_text_nor_by_who_does_not_trust_it(secured: EmbeddedKafka) -> None:
    assert not reachable({"bootstrap.servers": secured.bootstrap_servers}, 2)
    untrusting = {key: value for key, value in secured.connection_extra().items() if key != "ssl.ca.location"}
    assert not reachable(untrusting, 2)


def test_passwords_are_in_no_repr_no_command_line_and_no_readable_file(secured: EmbeddedKafka) -> None:
    assert secured.security is not None
    broker = secured.broker()
    assert broker.pid is not None
    shown = repr(secured) + repr(secured.security) + repr(broker) + " ".join(secured.security.make_scram_arguments())
    shown += " ".join(psutil.Process(broker.pid).cmdline()) + broker.log.read_text()
    assert not any(password in shown for password in PASSWORDS.values())
    files = [path for path in broker.directory.parent.rglob("*") if path.suffix in (".properties", ".pem", ".key")]
    holding = [path for path in files if "another" in path.read_text() or "PRIVATE KEY" in path.read_text()]
    assert len(holding) == 3
    assert [path for path in holding if path.stat().st_mode & 0o077] == []


@pytest.mark.extended
def test_a_secured_broker_restarts(secured: EmbeddedKafka) -> None:
    secured.kill()
    secured.restart()
    assert reachable(secured.connection_extra("bob", "SCRAM-SHA-256"))


def test_the_settings_of_a_client_without_tls(tmp_path: Path) -> None:
    """tests/hooks/kafka/test_security.py connects by them, and with certificates of clients."""
    security = KafkaSecurity("SASL_PLAINTEXT", {"alice": "secret"}, ("SCRAM-SHA-256",))
    assert security.make_client_settings(None, None, tmp_path) == {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": "alice",
        "sasl.password": "secret",
    }


@pytest.mark.parametrize(
    "arguments",
    [
        {"protocol": "PLAINTEXT"},
        {"protocol": "SASL_SSL"},
        {"users": {"a": "b"}, "mechanisms": ("GSSAPI",)},
        {"users": {"a": "b"}, "mechanisms": ()},
        {"protocol": "SASL_PLAINTEXT", "users": {"a": "b"}, "client_certificates": True},
    ],
)
def test_security_that_contradicts_itself_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ServerInvalid):
        KafkaSecurity(**arguments)


def test_a_connection_of_an_unknown_user_is_refused(secured: EmbeddedKafka) -> None:
    with pytest.raises(ServerInvalid, match="mallory"):
        secured.connection_extra("mallory")
