"""An embedded Kafka for tests and demos."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import shutil
import signal
import subprocess
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow_kafka_spark.errors import PackageMissing, ServerFailed, ServerInvalid
from airflow_kafka_spark.hooks.kafka.client import describe_temporary_error
from airflow_kafka_spark.hooks.spark.class_archive import list_java_options, make_archive_path
from airflow_kafka_spark.hooks.spark.jars import KAFKA_BROKER, find_java, resolve_jars
from airflow_kafka_spark.testing import _processes as processes
from airflow_kafka_spark.testing._processes import Embedded

if TYPE_CHECKING:
    from concurrent.futures import Future

    from confluent_kafka.admin import AdminClient, PartitionMetadata


PROTOCOLS = ("SASL_SSL", "SASL_PLAINTEXT", "SSL")
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_ITERATIONS = 4096  # the least that Kafka takes
_MODULE = "org.apache.kafka.common.security"


@dataclass(frozen=True)
class KafkaSecurity:
    """The security of an `EmbeddedKafka`'s client listener.

    Every cluster has new certificates from a certificate authority of its own, for the names ``localhost`` and ``127.0.0.1``. The
    brokers communicate with each other on another listener, in plain text on loopback.

    :param protocol: ``SASL_SSL``, ``SASL_PLAINTEXT`` or ``SSL``; default ``SASL_SSL``.
    :param users: name -> password; each may log in by every mechanism. SASL needs at least one. Default none.
    :param mechanisms: some of ``PLAIN``, ``SCRAM-SHA-256``, ``SCRAM-SHA-512``; default all three.
    :param client_certificates: with TLS, True to require a certificate of clients, too (mutual TLS); default False.
    :raises ServerInvalid: the arguments contradict each other.
    """

    protocol: str = "SASL_SSL"
    users: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    mechanisms: tuple[str, ...] = MECHANISMS
    client_certificates: bool = False

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise ServerInvalid("Kafka", f"the security protocol {self.protocol!r}", f"one of {', '.join(PROTOCOLS)}")
        if unknown := set(self.mechanisms) - set(MECHANISMS):
            raise ServerInvalid("Kafka", f"the SASL mechanism {sorted(unknown)[0]!r}", f"some of {', '.join(MECHANISMS)}")
        if self.sasl and not (self.users and self.mechanisms):
            raise ServerInvalid("Kafka", f"{self.protocol} without a user who may log in", "`users` and `mechanisms`")
        if self.client_certificates and not self.tls:
            raise ServerInvalid("Kafka", f"client certificates with {self.protocol}", "a protocol with TLS")

    @property
    def sasl(self) -> bool:
        """True if clients log in."""
        return self.protocol.startswith("SASL")

    @property
    def tls(self) -> bool:
        """True if connections are encrypted."""
        return self.protocol.endswith("SSL")

    def make_certificates(self, directory: Path) -> None:
        """Write ``ca.pem``, ``server.pem`` (key and certificate), ``client.crt`` and ``client.key``; nothing without TLS."""
        if not self.tls:
            return
        try:
            import trustme
            from cryptography.hazmat.primitives import serialization
        except ImportError as error:
            raise PackageMissing("EmbeddedKafka with TLS", error.name or "trustme", "testing") from error
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(directory / "ca.pem"))
        for name, issued in (
            ("server", authority.issue_cert("localhost", "127.0.0.1")),
            ("client", authority.issue_cert("client@localhost", common_name="client")),
        ):
            # Kafka reads only keys in PKCS#8.
            key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None).private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
            if name == "server":
                _write_secret(directory / "server.pem", key + chain)
            else:
                _write_secret(directory / "client.key", key)
                (directory / "client.crt").write_bytes(chain)

    def make_broker_properties(self, listener: str, certificates: Path) -> Iterator[tuple[str, str]]:
        """Return the broker's settings of this listener."""
        prefix = f"listener.name.{listener.lower()}."
        if self.sasl:
            yield f"{prefix}sasl.enabled.mechanisms", ",".join(self.mechanisms)
            for mechanism in self.mechanisms:
                if mechanism == "PLAIN":
                    users = " ".join(f'user_{name}="{_quote(password)}"' for name, password in self.users.items())
                    module = f"{_MODULE}.plain.PlainLoginModule required {users};"
                else:
                    module = f"{_MODULE}.scram.ScramLoginModule required;"
                yield f"{prefix}{mechanism.lower()}.sasl.jaas.config", module
        if self.tls:
            yield f"{prefix}ssl.keystore.type", "PEM"
            yield f"{prefix}ssl.keystore.location", str(certificates / "server.pem")
            yield f"{prefix}ssl.truststore.type", "PEM"
            yield f"{prefix}ssl.truststore.location", str(certificates / "ca.pem")
            yield f"{prefix}ssl.client.auth", "required" if self.client_certificates else "none"

    def make_scram_arguments(self) -> Iterator[str]:
        """Return the arguments of ``StorageTool format --add-scram``. They are salted, so that no password is in a command
        line.
        """
        for mechanism in self.mechanisms:
            if not self.sasl or not mechanism.startswith("SCRAM-SHA-"):
                continue
            digest = f"sha{mechanism.removeprefix('SCRAM-SHA-')}"
            for name, password in self.users.items():
                salt = secrets.token_bytes(16)
                salted = hashlib.pbkdf2_hmac(digest, password.encode(), salt, _ITERATIONS)
                encoded = base64.b64encode(salt).decode(), base64.b64encode(salted).decode()
                yield f'{mechanism}=[name={name},salt="{encoded[0]}",saltedpassword="{encoded[1]}",iterations={_ITERATIONS}]'

    def make_client_settings(self, user: str | None, mechanism: str | None, certificates: Path) -> dict[str, str]:
        """Return the librdkafka settings of a client; see `EmbeddedKafka.connection_extra`."""
        settings = {"security.protocol": self.protocol}
        if self.sasl:
            user = next(iter(self.users)) if user is None else user
            if user not in self.users:
                raise ServerInvalid("Kafka", f"a connection of the unknown user {user!r}", f"one of {', '.join(self.users)}")
            chosen = mechanism or self.mechanisms[-1]
            settings |= {"sasl.mechanism": chosen, "sasl.username": user, "sasl.password": self.users[user]}
        if self.tls:
            settings["ssl.ca.location"] = str(certificates / "ca.pem")
            if self.client_certificates:
                settings["ssl.certificate.location"] = str(certificates / "client.crt")
                settings["ssl.key.location"] = str(certificates / "client.key")
        return settings


def _write_secret(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)


def _quote(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"')


CHECKPOINT = "bootstrap.checkpoint"
"""Name of the file in which Kafka's formatter stores the features of a release."""


@dataclass(frozen=True)
class Broker:
    """One node of an `EmbeddedKafka`.

    :param number: its number (0, 1, 2), as for `EmbeddedKafka.kill`.
    :param node_id: Kafka's ``node.id``, which is ``number + 1``.
    :param port: port of the listener for clients, on 127.0.0.1.
    :param internal_port: port of the listener for the other brokers.
    :param controller_port: port of the controller's listener.
    :param directory: directory of its data, settings and log.
    :param process: its process; None (default) before the first start.
    """

    number: int
    node_id: int
    port: int
    internal_port: int
    controller_port: int
    directory: Path
    process: processes.ServerProcess | None = None

    @property
    def log(self) -> Path:
        """The log file."""
        return self.directory / "server.log"

    @property
    def pid(self) -> int | None:
        """The process id; None before the first start."""
        return self.process.pid if self.process else None

    @property
    def running(self) -> bool:
        """True if its process exists, also if it is paused."""
        return self.process is not None and self.process.running

    @property
    def settings_file(self) -> Path:
        """The file with the settings of the node."""
        return self.directory / "server.properties"

    @property
    def data(self) -> Path:
        """The directory of the log."""
        return self.directory / "data"

    @property
    def formatted(self) -> bool:
        """True once the directory of the log is formatted."""
        return (self.data / "meta.properties").exists()


def plan_brokers(directory: Path, count: int) -> list[Broker]:
    """Return nodes with directories below the given one, on ports that are free now."""
    ports = processes.find_free_ports(3 * count)
    return [
        Broker(n, n + 1, ports[3 * n], ports[3 * n + 1], ports[3 * n + 2], directory / f"broker-{n + 1}") for n in range(count)
    ]


def make_settings(
    broker: Broker, brokers: Sequence[Broker], security: KafkaSecurity | None, certificates: Path
) -> dict[str, Any]:
    """Return the settings of a node; see `EmbeddedKafka` for those that differ from Kafka's defaults."""
    listeners = {"CLIENT": broker.port} | ({"INTERNAL": broker.internal_port} if security else {})
    addresses = [f"{name}://{processes.LOOPBACK}:{port}" for name, port in listeners.items()]
    protocol = security.protocol if security else "PLAINTEXT"
    count, enough = len(brokers), min(2, len(brokers))
    settings: dict[str, Any] = {
        "process.roles": "broker,controller",
        "node.id": broker.node_id,
        "controller.quorum.voters": ",".join(f"{b.node_id}@{processes.LOOPBACK}:{b.controller_port}" for b in brokers),
        "listeners": ",".join([*addresses, f"CONTROLLER://{processes.LOOPBACK}:{broker.controller_port}"]),
        "advertised.listeners": ",".join(addresses),
        "listener.security.protocol.map": f"CLIENT:{protocol},INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "INTERNAL" if security else "CLIENT",
        "controller.listener.names": "CONTROLLER",
        "log.dirs": broker.data,
        "num.network.threads": 2,
        "num.io.threads": 4,
        "auto.create.topics.enable": "false",
        "default.replication.factor": count,
        "min.insync.replicas": enough,
        "offsets.topic.num.partitions": 4,
        "offsets.topic.replication.factor": count,
        "transaction.state.log.num.partitions": 4,
        "transaction.state.log.replication.factor": count,
        "transaction.state.log.min.isr": enough,
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": 1000,
        "share.coordinator.state.topic.num.partitions": 1,
        "share.coordinator.state.topic.replication.factor": count,
        "share.coordinator.state.topic.min.isr": enough,
        "group.initial.rebalance.delay.ms": 0,
        "log.retention.ms": -1,
        # A killed broker may register again only when its old session has expired. A single broker has no successor, so its
        # timeout only has to cover the pauses of a busy machine.
        "broker.heartbeat.interval.ms": 1000 if count == 1 else 400,
        "broker.session.timeout.ms": 5000 if count == 1 else 3000,
    }
    if count == 1:
        # A controller writes a no-op record twice a second for its followers. Without followers, it would be half of the CPU time
        # of an idle broker.
        settings["metadata.max.idle.interval.ms"] = 0
    if security:
        settings |= dict(security.make_broker_properties("CLIENT", certificates))
    return settings


def write_settings(
    broker: Broker, brokers: Sequence[Broker], security: KafkaSecurity | None, certificates: Path, own: Mapping[str, Any]
) -> None:
    """Write a node's settings file, readable by its owner only, because it may contain passwords."""
    settings = make_settings(broker, brokers, security, certificates) | dict(own)
    broker.directory.mkdir(parents=True, exist_ok=True)
    broker.settings_file.touch(mode=0o600)
    lines = [f"{name}={_escape(str(value))}\n" for name, value in settings.items()]
    broker.settings_file.write_text("".join(lines), encoding="ascii")


def find_cluster_id(brokers: Sequence[Broker]) -> str:
    """Return the id of the cluster that these nodes were formatted for, or else a new one."""
    for broker in brokers:
        with suppress(OSError):
            text = (broker.data / "meta.properties").read_text(encoding="utf-8")
            if found := re.search(r"^cluster\.id=(\S+)", text, re.MULTILINE):
                return found[1]
    return _make_random_id()


def _make_random_id() -> str:
    """Return a random id in Kafka's form, without a leading hyphen, which Kafka's tools would parse as an option."""
    return urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")


def format_storage(
    commands: Sequence[tuple[Broker, list[str]]], cluster: str, security: KafkaSecurity | None, template: Path | None = None
) -> None:
    """Format the storage of new nodes concurrently.

    :param commands: the nodes, each with a Java command line up to the main class.
    :param template: path of a checkpoint that Kafka has written for other nodes of this release without users. With it no JVM is
        started, which takes a second of CPU time for each node. A missing one is written. None: Kafka formats each node.
    :raises ServerFailed: a node could not be formatted.
    """
    scram = [part for record in security.make_scram_arguments() for part in ("--add-scram", record)] if security else []
    if template is not None and template.exists():
        for broker, _ in commands:
            _format_from(template, broker, cluster)
        return
    running = [
        subprocess.Popen(
            [*java, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(broker.settings_file), *scram],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for broker, java in commands
    ]
    ended = [(process.communicate()[0], process.returncode) for process in running]
    for output, code in ended:
        if code:
            raise ServerFailed("Kafka", f"its storage could not be formatted: {output.strip()[-2000:]}")
    if template is not None and commands:
        template.parent.mkdir(parents=True, exist_ok=True)
        written = template.with_name(f"{template.name}.{uuid.uuid4().hex}")
        shutil.copyfile(commands[0][0].data / CHECKPOINT, written)
        written.rename(template)


def _format_from(template: Path, broker: Broker, cluster: str) -> None:
    """Write the files of `kafka-storage format`: the checkpoint, which is equal for all nodes of a release, and the ids."""
    broker.data.mkdir(parents=True)
    shutil.copyfile(template, broker.data / CHECKPOINT)
    ids = {"cluster.id": cluster, "directory.id": _make_random_id(), "node.id": broker.node_id, "version": 1}
    # Written last, because a node with this file counts as formatted.
    text = "".join(f"{name}={value}\n" for name, value in ids.items())
    (broker.data / "meta.properties").write_text(text, encoding="ascii")


def find_storage_template(java: Path, jars: Sequence[Path]) -> Path:
    """Return the path of the checkpoint of nodes of this release in the cache of jars. The file need not exist.

    :param java: the executable.
    :param jars: the class path.
    """
    return make_archive_path("kafka-storage", java, jars).with_suffix(".checkpoint")


def find_class_archive(java: Path, jars: Sequence[Path]) -> Path:
    """Return the path of the archive of Kafka's classes (`airflow_kafka_spark.hooks.spark.class_archive`), which may not exist.

    With an archive a broker starts with half the CPU time.

    :param java: the executable.
    :param jars: the class path.
    """
    return make_archive_path("kafka", java, jars)


def _escape(value: str) -> str:
    """Return a value escaped for a Java properties file, which is read as Latin-1."""
    units = value.replace("\\", "\\\\").encode("utf-16-be")
    codes = (int.from_bytes(units[n : n + 2], "big") for n in range(0, len(units), 2))
    return "".join(chr(code) if 32 <= code < 127 else f"\\u{code:04x}" for code in codes)


# An implementation of Kafka's logging interface, because Kafka's own artifact has none.
_LOGGING = "org.apache.logging.log4j:log4j-slf4j-impl:2.25.3"
JVM_OPTIONS = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
_START_SECONDS = 180.0
"""Seconds to wait until the brokers serve."""
_TOPIC_SECONDS = 120.0
"""Seconds to wait until a topic is created, changed or deleted."""


class EmbeddedKafka(Embedded):
    """A real Kafka 4.2 (KRaft) on free ports of the loopback interface.

    Use it as a context manager, or by `start` and `stop`. The brokers end with this process, however that ends: by `stop`, at
    exit, or because it was killed. Each broker is a controller, too. Jars are fetched once
    (`airflow_kafka_spark.hooks.spark.jars`).

    The settings suit a small machine. They differ from Kafka's defaults in these points: topics are not created automatically;
    records are kept without limit unless the topic sets ``retention.ms`` (so that records with old timestamps stay); a silent
    broker counts as dead after 3 s, a single one after 5 s; brokers look for expired transactions every second.

    :param brokers: 1 or 3. With 3, topics have three replicas and need two in sync. Default 1.
    :param data_dir: directory of data, settings and logs. It is kept, and a later instance uses the data in it. Default: a
        temporary directory, removed by `stop`.
    :param properties: broker settings that take precedence over those of this class; default none.
    :param security: authentication and encryption of clients; default: none, plain text.
    :param jvm_options: Java options of every broker; default: a heap of 512 MB.
    :raises ServerInvalid: neither 1 nor 3 brokers.
    :raises JavaMissing: (by `start`) there is no Java 17 or newer.
    :raises JarsUnavailable: (by `start`) Kafka's jars are not cached and could not be fetched.
    :raises ServerFailed: (by `start`) a broker did not start; the message has the end of its log.
    """

    software = "Kafka"

    def __init__(
        self,
        brokers: int = 1,
        data_dir: Path | str | None = None,
        properties: Mapping[str, Any] | None = None,
        security: KafkaSecurity | None = None,
        *,
        jvm_options: Sequence[str] = JVM_OPTIONS,
    ) -> None:
        if brokers not in (1, 3):
            raise ServerInvalid("Kafka", f"{brokers} brokers", "1 or 3")
        super().__init__(data_dir)
        self.security = security
        self._count = brokers
        self._properties = dict(properties or {})
        self._jvm_options = tuple(jvm_options)
        self._brokers: list[Broker] = []
        self._admin_client: AdminClient | None = None
        self._metadata_error = ""
        self._paused: set[int] = set()
        self._java = Path()
        self._jars: tuple[Path, ...] = ()

    def __repr__(self) -> str:
        where = self.bootstrap_servers if self._brokers else "not started"
        return f"<EmbeddedKafka {where}{f' {self.security.protocol}' if self.security else ''}>"

    # --- start and stop ---

    def _prepare(self) -> None:
        self._java = find_java()
        self._jars = tuple(resolve_jars([KAFKA_BROKER, _LOGGING]))
        if self.security:
            self.security.make_certificates(self._certificates)

    def _begin(self, *, last_attempt: bool) -> bool:
        self._prepare_brokers()
        return self._start_all(last_attempt=last_attempt)

    def _shut_down(self) -> None:
        self._admin_client = None
        if self._given_directory is not None:
            for broker in self._brokers:
                with suppress(ServerFailed):
                    # Three controllers that leave one by one lose their quorum and cannot shut down cleanly; a single one can.
                    self._end(broker, signal.SIGTERM if self._count == 1 else signal.SIGKILL)

    # --- connections ---

    @property
    def bootstrap_servers(self) -> str:
        """``host:port`` of every broker's listener for clients, separated by commas."""
        return ",".join(f"{processes.LOOPBACK}:{broker.port}" for broker in self._get_brokers())

    def connection_extra(self, user: str | None = None, mechanism: str | None = None, **settings: object) -> dict[str, Any]:
        """Return the extra of an Airflow connection of type ``kafka``, which is also a librdkafka configuration.

        :param user: with SASL, one of the users of ``security``; default the first.
        :param mechanism: with SASL, one of the mechanisms of ``security``; default the last.
        :param settings: further settings of librdkafka, with underscores instead of dots (``group_id="orders"``).
        """
        extra: dict[str, Any] = {"bootstrap.servers": self.bootstrap_servers}
        if self.security:
            extra |= self.security.make_client_settings(user, mechanism, self._certificates)
        return extra | {name.replace("_", "."): value for name, value in settings.items()}

    def connection_json(self, user: str | None = None, mechanism: str | None = None, **settings: object) -> str:
        """Return the Airflow connection as JSON, for an ``AIRFLOW_CONN_...`` variable. Arguments as `connection_extra`."""
        return json.dumps({"conn_type": "kafka", "extra": self.connection_extra(user, mechanism, **settings)})

    def connection_uri(self, user: str | None = None, mechanism: str | None = None, **settings: object) -> str:
        """Return the Airflow connection as a URI. Arguments as `connection_extra`."""
        return f"kafka://?__extra__={quote(json.dumps(self.connection_extra(user, mechanism, **settings)), safe='')}"

    # --- topics ---

    def create_topic(
        self, name: str, partitions: int = 1, config: Mapping[str, Any] | None = None, *, replication: int | None = None
    ) -> None:
        """Create a topic and wait until every partition of it has a leader that serves it.

        :param replication: number of replicas; default one for each broker.
        :raises KafkaException: the topic exists, or its name or config is invalid.
        """
        from confluent_kafka.admin import NewTopic

        topic = NewTopic(
            name,
            num_partitions=partitions,
            replication_factor=replication or self._count,
            config={key: str(value) for key, value in (config or {}).items()},
        )
        self._change_topic(
            name, "created", "TOPIC_ALREADY_EXISTS", lambda admin: admin.create_topics([topic], operation_timeout=30)
        )
        if not processes.wait_until(lambda: self._is_led(name, partitions), _TOPIC_SECONDS):
            raise ServerFailed("Kafka", f"the topic {name} was created, but has no leaders after {_TOPIC_SECONDS:.0f} s")

    def create_partitions(self, name: str, total: int) -> None:
        """Add partitions to a topic, and wait until every one of them has a leader that serves it.

        :param total: the new number of partitions.
        :raises KafkaException: the topic has as many already, or does not exist.
        """
        from confluent_kafka.admin import NewPartitions

        partitions = NewPartitions(name, total)
        self._change_topic(
            name, "extended", "INVALID_PARTITIONS", lambda admin: admin.create_partitions([partitions], operation_timeout=30)
        )
        if not processes.wait_until(lambda: self._is_led(name, total), _TOPIC_SECONDS):
            raise ServerFailed(
                "Kafka", f"the topic {name} has no leaders for its {total} partitions after {_TOPIC_SECONDS:.0f} s"
            )

    def delete_topic(self, name: str) -> None:
        """Delete a topic and wait until the brokers do not know it any more.

        :raises KafkaException: the topic does not exist.
        """
        self._change_topic(
            name, "deleted", "UNKNOWN_TOPIC_OR_PART", lambda admin: admin.delete_topics([name], operation_timeout=30)
        )

        def is_gone() -> bool:
            # A broker that does not answer does not show that the topic is deleted.
            metadata = self._read_metadata()  # of all topics: a broker may create one that is asked for by name
            return metadata is not None and name not in metadata.topics

        if not processes.wait_until(is_gone, _TOPIC_SECONDS):
            raise ServerFailed("Kafka", f"the topic {name} is still there {_TOPIC_SECONDS:.0f} s after it was deleted")

    def _change_topic(self, name: str, change: str, done: str, request: Callable[[AdminClient], dict[str, Future[None]]]) -> None:
        """Send a request that changes a topic, again after each temporary error.

        :param change: what the request does to the topic, in the past participle.
        :param done: name of the error that answers a request whose work is done already. It counts as success if an earlier
            request had no answer, because that one may have done the work.
        :raises KafkaException: the brokers refuse the request.
        :raises ServerFailed: there were only temporary errors for 120 s.
        """
        from confluent_kafka import KafkaException

        errors: list[str] = []

        def has_succeeded() -> bool:
            try:
                request(self._make_admin_client())[name].result(_TOPIC_SECONDS)
            except KafkaException as failed:
                error = failed.args[0]
                if errors and error.name() == done:
                    return True
                # The controller needs a moment to count a broker as alive that was paused or has just started.
                if not describe_temporary_error(error) and "currently fenced" not in error.str():
                    raise
                errors.append(error.str())
                return False
            return True

        if not processes.wait_until(has_succeeded, _TOPIC_SECONDS):
            raise ServerFailed("Kafka", f"the topic {name} is not {change} after {_TOPIC_SECONDS:.0f} s: {errors[-1]}")

    # --- faults ---

    def broker(self, number: int = 0) -> Broker:
        """Return a broker in its present state."""
        return self._get_brokers()[number]

    def kill(self, number: int = 0) -> None:
        """Kill a broker (SIGKILL), and wait for its end. Its data are kept."""
        self._end(self.broker(number), signal.SIGKILL)

    def pause(self, number: int = 0) -> None:
        """Pause a broker (SIGSTOP): its connections stay open without answers. Of 3 brokers, the others take over after 3 s."""
        broker = self.broker(number)
        if broker.process is None or not broker.process.pause():
            raise self._make_failure(broker)
        self._paused.add(number)

    def resume(self, number: int = 0) -> None:
        """Continue a paused broker (SIGCONT)."""
        self._send_signal(number, signal.SIGCONT)
        self._paused.discard(number)

    def restart(self, number: int = 0) -> None:
        """Start a broker again, on its ports and data, and return when it serves and is in sync. A running one is ended first.

        All acknowledged records are kept, because a killed process loses nothing that it has passed to the operating system. Of 3
        brokers, two have to run for a cluster: restarting the first of them returns at once.
        """
        broker = self.broker(number)
        self._end(broker, signal.SIGTERM)
        self._launch(number)
        serving = [b.number for b in self._brokers if b.running and b.number not in self._paused]
        if 2 * len(serving) > self._count and (broken := self._find_first_broken(serving)):
            raise self._make_failure(broken)

    # --- internals ---

    @property
    def _certificates(self) -> Path:
        return self._files / "tls"

    def _get_brokers(self) -> list[Broker]:
        if self._supervisor is None:
            raise ServerFailed("Kafka", "it was not started, or was stopped")
        return self._brokers

    def _prepare_brokers(self) -> None:
        """Choose ports, write every broker's settings, and format the storage of those that are new."""
        self._brokers = plan_brokers(self._files, self._count)
        for broker in self._brokers:
            write_settings(broker, self._brokers, self.security, self._certificates, self._properties)
        fresh = [broker for broker in self._brokers if not broker.formatted]
        # The template fits only nodes without users and with the default directory of the log.
        is_plain = self.security is None and not {"log.dirs", "metadata.log.dir"} & self._properties.keys()
        template = find_storage_template(self._java, self._jars) if is_plain else None
        commands = [(broker, self._make_command(broker)) for broker in fresh]
        format_storage(commands, find_cluster_id(self._brokers), self.security, template)

    def _make_command(self, broker: Broker) -> list[str]:
        logging = Path(__file__).with_name("log4j2.properties")
        archive = list_java_options(find_class_archive(self._java, self._jars))
        return [
            *(str(self._java), *archive, *self._jvm_options, f"-Dlog4j2.configurationFile={logging}"),
            *("-cp", ":".join(map(str, self._jars))),
        ]

    def _launch(self, number: int) -> None:
        assert self._supervisor is not None
        broker = self._brokers[number]
        command = [*self._make_command(broker), "kafka.Kafka", str(broker.settings_file)]
        self._brokers[number] = replace(broker, process=self._supervisor.spawn(command, log=broker.log))
        self._paused.discard(number)

    def _start_all(self, *, last_attempt: bool) -> bool:
        """Start all nodes. Return False if another process took one of the ports first and there is another attempt."""
        for broker in self._brokers:
            self._launch(broker.number)
        broken = self._find_first_broken(range(self._count))
        if broken is None:
            return True
        if last_attempt or not any("Address already in use" in processes.read_tail(broker.log, 200) for broker in self._brokers):
            raise self._make_failure(broken)
        for broker in self._brokers:
            self._end(broker, signal.SIGKILL)
            broker.log.unlink(missing_ok=True)
        return False

    def _find_first_broken(self, numbers: Sequence[int]) -> Broker | None:
        """Wait until these brokers, which are all that run, are in the cluster and in sync, and lead the partitions that only
        they hold.

        :return: None; or a broker that has ended, or the first one if the time is over.
        """
        brokers = [self._brokers[number] for number in numbers]
        wanted = {broker.node_id for broker in brokers}
        self._admin_client = None

        def is_settled(partition: PartitionMetadata) -> bool:
            replicas = wanted & set(partition.replicas)
            if partition.leader < 0:
                # The only replica with all records may be on a broker that does not run.
                return replicas != set(partition.replicas)
            return replicas <= set(partition.isrs)

        def is_serving() -> bool:
            metadata = self._read_metadata()
            if metadata is None or not wanted <= set(metadata.brokers) or metadata.controller_id < 0:
                return False
            return all(is_settled(partition) for topic in metadata.topics.values() for partition in topic.partitions.values())

        def find_ended() -> Broker | None:
            return next((broker for broker in brokers if not broker.running), None)

        done = processes.wait_until(lambda: find_ended() is not None or is_serving(), _START_SECONDS)
        return find_ended() or (None if done else brokers[0])

    def _make_failure(self, broker: Broker) -> ServerFailed:
        code = broker.process.exit_code if broker.process else None
        what = (
            f"does not serve after {_START_SECONDS:.0f} s{self._metadata_error}"
            if code is None
            else f"ended with exit code {code}"
        )
        # A start that fails removes the temporary directory.
        log = processes.keep_log(broker.log, "kafka") if self._starting and not self._given_directory else broker.log
        return ServerFailed("Kafka", f"broker {broker.number} {what}; its log {log} ends with:\n{processes.read_tail(log)}\n")

    def _make_admin_client(self) -> AdminClient:
        if self._admin_client is None:
            from confluent_kafka.admin import AdminClient

            ports = [broker.internal_port if self.security else broker.port for broker in self._get_brokers()]
            settings: dict[str, Any] = {
                "bootstrap.servers": ",".join(f"{processes.LOOPBACK}:{port}" for port in ports),
                "reconnect.backoff.max.ms": 200,
                "log_level": 0,
                "error_cb": lambda error: None,
            }
            self._admin_client = AdminClient(settings)
        return self._admin_client

    def _read_metadata(self, topic: str | None = None) -> Any:
        """Return the metadata of the cluster.

        :param topic: the only topic to request, because a broker that has run hundreds of tests has thousands of partitions.
        """
        from confluent_kafka import KafkaException

        try:
            return self._make_admin_client().list_topics(topic, timeout=2)
        except KafkaException as error:
            self._metadata_error = f" ({error.args[0].str()})"
            # A client that has learned an advertised address at which nothing answers yet may keep to it for minutes. A new one
            # begins at the broker's own port.
            self._admin_client = None
            return None

    def _is_led(self, name: str, partitions: int) -> bool:
        metadata = self._read_metadata(name)
        topic = metadata.topics.get(name) if metadata is not None else None
        if topic is None or len(topic.partitions) < partitions or any(p.leader < 0 for p in topic.partitions.values()):
            return False
        return self._is_served(name, topic.partitions)

    def _is_served(self, name: str, partitions: Iterable[int]) -> bool:
        """Return True if the leaders of these partitions accept records. A broker is reported as leader a moment before it is
        one. Records that are sent in between are refused and sent again, possibly after later ones.
        """
        from confluent_kafka import KafkaException, TopicPartition
        from confluent_kafka.admin import OffsetSpec

        wanted = {TopicPartition(name, partition): OffsetSpec.earliest() for partition in partitions}
        try:
            for future in self._make_admin_client().list_offsets(wanted, request_timeout=5).values():
                future.result(60)
        except KafkaException:
            return False
        return True

    def _end(self, broker: Broker, stop_signal: int) -> None:
        if broker.process is not None:
            broker.process.end(stop_signal=stop_signal, seconds=15)

    def _send_signal(self, number: int, what: int) -> None:
        broker = self.broker(number)
        if broker.process is None or not broker.process.signal(what):
            raise self._make_failure(broker)
