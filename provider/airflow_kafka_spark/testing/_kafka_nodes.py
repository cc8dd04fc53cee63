"""The nodes of an embedded Kafka: their ports and directories, their settings, and their storage."""

from __future__ import annotations

import re
import shutil
import subprocess
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airflow_kafka_spark.errors import ServerFailed
from airflow_kafka_spark.hooks.class_archive import archive_file
from airflow_kafka_spark.testing import _processes as processes
from airflow_kafka_spark.testing.security import KafkaSecurity

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
        return self.directory / "server.properties"

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def formatted(self) -> bool:
        return (self.data / "meta.properties").exists()


def plan_brokers(directory: Path, count: int) -> list[Broker]:
    """Return nodes with directories below the given one, on ports that are free now."""
    ports = processes.free_ports(3 * count)
    return [
        Broker(n, n + 1, ports[3 * n], ports[3 * n + 1], ports[3 * n + 2], directory / f"broker-{n + 1}") for n in range(count)
    ]


def settings_of(broker: Broker, brokers: Sequence[Broker], security: KafkaSecurity | None, certificates: Path) -> dict[str, Any]:
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
        settings |= dict(security.broker_properties("CLIENT", certificates))
    return settings


def write_settings(
    broker: Broker, brokers: Sequence[Broker], security: KafkaSecurity | None, certificates: Path, own: Mapping[str, Any]
) -> None:
    """Write a node's settings file, readable by its owner only, because it may contain passwords."""
    settings = settings_of(broker, brokers, security, certificates) | dict(own)
    broker.directory.mkdir(parents=True, exist_ok=True)
    broker.settings_file.touch(mode=0o600)
    lines = [f"{name}={_escaped(str(value))}\n" for name, value in settings.items()]
    broker.settings_file.write_text("".join(lines), encoding="ascii")


def cluster_id(brokers: Sequence[Broker]) -> str:
    """Return the id of the cluster that these nodes were formatted for, or else a new one."""
    for broker in brokers:
        with suppress(OSError):
            text = (broker.data / "meta.properties").read_text(encoding="utf-8")
            if found := re.search(r"^cluster\.id=(\S+)", text, re.MULTILINE):
                return found[1]
    return _random_id()


def _random_id() -> str:
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
    scram = [part for record in security.scram_records() for part in ("--add-scram", record)] if security else []
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
    ids = {"cluster.id": cluster, "directory.id": _random_id(), "node.id": broker.node_id, "version": 1}
    # Written last, because a node with this file counts as formatted.
    text = "".join(f"{name}={value}\n" for name, value in ids.items())
    (broker.data / "meta.properties").write_text(text, encoding="ascii")


def storage_template(java: Path, jars: Sequence[Path]) -> Path:
    """Return the path of the checkpoint of nodes of this release in the cache of jars. The file need not exist.

    :param java: the executable.
    :param jars: the class path.
    """
    return archive_file("kafka-storage", java, jars).with_suffix(".checkpoint")


def class_archive(java: Path, jars: Sequence[Path]) -> Path:
    """Return the path of the archive of Kafka's classes (`airflow_kafka_spark.hooks.class_archive`), which may not exist.

    With an archive a broker starts with half the CPU time.

    :param java: the executable.
    :param jars: the class path.
    """
    return archive_file("kafka", java, jars)


def _escaped(value: str) -> str:
    """Return a value escaped for a Java properties file, which is read as Latin-1."""
    units = value.replace("\\", "\\\\").encode("utf-16-be")
    codes = (int.from_bytes(units[n : n + 2], "big") for n in range(0, len(units), 2))
    return "".join(chr(code) if 32 <= code < 127 else f"\\u{code:04x}" for code in codes)
