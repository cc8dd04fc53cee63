"""Archives of loaded classes: a JVM that starts with an archive needs little more than half the CPU time.

Spark has an archive (`airflow_kafka_spark.hooks.spark.class_archive`), and so has the embedded Kafka, which finds its archive
itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from confluent_kafka import Consumer, KafkaException, Producer

from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.hooks.spark import class_archive
from airflow_kafka_spark.hooks.spark.class_archive import SparkClassArchive, is_whole, publish_archive
from airflow_kafka_spark.testing import EmbeddedKafka
from airflow_kafka_spark.testing.kafka import JVM_OPTIONS
from airflow_kafka_spark.testing.kafka import find_class_archive as kafka_archive

HUGE_PAGES = "-XX:+UseTransparentHugePages"
"""Saves a JVM that lives long a twentieth of its CPU time: the kernel makes 512 pages of memory at once."""

# These JVMs live too briefly to profit from the better compiler.
_SHORT = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def use(*, make: bool) -> None:
    """Let all Sparks and Kafkas that are started from here on use the archives.

    :param make: make missing archives first, which takes about twenty seconds.
    """
    options = _SHORT
    # Without Java, or a network, the tests that need it say so; on a machine that takes too long, all do without.
    with contextlib.suppress(KafkaSparkError, OSError, subprocess.SubprocessError):
        if make:
            with ThreadPoolExecutor(2) as makers:
                made = [makers.submit(_make_for_kafka), makers.submit(_make_for_spark)]
            for maker in made:
                maker.result()
        archive = SparkClassArchive.find()
        if archive is not None:
            options = " ".join([_SHORT, *archive.make_java_options()])
    os.environ |= {"SPARK_SUBMIT_OPTS": options, "SPARK_LAUNCHER_OPTS": _SHORT}


def _make_for_spark() -> None:
    """Make the archive in a separate process, so that Spark is not started in this one."""
    archive = SparkClassArchive.find()
    if archive is None or is_whole(archive.file):
        return
    subprocess.run(
        [sys.executable, "-m", class_archive.__name__], env={**os.environ, "SPARK_SUBMIT_OPTS": _SHORT}, timeout=300, check=False,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _make_for_kafka() -> None:
    """Make the archive of a broker that has handled each kind of request. The broker writes the archive when it ends."""
    training = EmbeddedKafka()
    training._prepare()
    with publish_archive(kafka_archive(training._java, training._jars), wait=True) as written:
        if written is None:
            return
        with EmbeddedKafka(jvm_options=(*JVM_OPTIONS, f"-XX:ArchiveClassesAtExit={written}", "-Xlog:disable")) as kafka:
            with contextlib.suppress(KafkaException):
                _use_a_little(kafka)
            broker = kafka.broker().process
            assert broker is not None
            broker.end(stop_signal=signal.SIGTERM, seconds=120)


def _use_a_little(kafka: EmbeddedKafka) -> None:
    kafka.create_topic("trained", 2, {"cleanup.policy": "compact"})
    producer = Producer({**kafka.connection_extra(), "transactional.id": "trained", "log_level": 0})
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce("trained", b"value", b"key")
    producer.commit_transaction(60)
    consumer = Consumer({**kafka.connection_extra(), "group.id": "trained", "auto.offset.reset": "earliest"})
    consumer.subscribe(["trained"])
    if consumer.poll(60) is not None:
        consumer.commit(asynchronous=False)
    consumer.close()


if __name__ == "__main__":
    use(make=True)
