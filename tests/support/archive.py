"""Classes as a JVM has them once they are loaded, in files: a start with one takes little more than half the CPU time.

The files are class data sharing archives of Java's own, kept in the cache of jars; where one does not fit, Java does without.
There is one for Spark, and one for the embedded Kafka, which finds it by itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from confluent_kafka import Consumer, KafkaException, Producer

from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.hooks import jars
from airflow_kafka_spark.testing import EmbeddedKafka
from airflow_kafka_spark.testing._kafka_nodes import class_archive
from airflow_kafka_spark.testing.kafka import JVM_OPTIONS

# Short lives: what a better compiler would gain, they do not see.
_SHORT = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_TRAINING = """
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
session = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1").getOrCreate()
rows = session.range(0, 100, 1, 2).selectExpr("id", "from_json('{\\"n\\": 1}', 'n int').n AS n", "cast(id AS string) AS text")
rows.filter("id > 2").mapInArrow(lambda batches: batches, "id long, n int, text string").collect()
"""


def use(*, make: bool) -> None:
    """Let all Sparks and Kafkas that are started from here on be quick to start.

    :param make: make the archives where there are none yet, which takes some twenty seconds.
    """
    options = _SHORT
    # Without Java, or a network, the tests that need it say so; on a machine that takes too long, all do without.
    with contextlib.suppress(KafkaSparkError, OSError, subprocess.SubprocessError):
        archive = _path()
        if make:
            with _alone(archive), ThreadPoolExecutor(2) as makers:
                made = makers.submit(_make_for_kafka)
                _make(archive)
            made.result()
        if archive.exists():
            options += f" -XX:SharedArchiveFile={archive} -Xlog:cds=off -Xlog:cds+dynamic=off"
    os.environ |= {"SPARK_SUBMIT_OPTS": options, "SPARK_LAUNCHER_OPTS": _SHORT}


@contextlib.contextmanager
def _alone(archive: Path) -> Iterator[None]:
    """Let one test process make archives while the others wait for it."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with open(archive.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _path() -> Path:
    """Its place, named by all that it depends on."""
    java = jars.find_java().resolve()
    facts = [java, (java.parents[1] / "release").read_text(), _TRAINING]
    for jar in sorted(jars.pyspark_jars().iterdir()):
        facts += [jar, jar.stat().st_size, jar.stat().st_mtime_ns]
    name = hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()[:16]
    return jars.cache_directory() / "archives" / f"spark-{name}.jsa"


def _make(archive: Path) -> None:
    if archive.exists():
        return
    mine = _begun(archive)
    options = f"{_SHORT} -XX:ArchiveClassesAtExit={mine} -Xlog:disable"
    # Java writes it when it ends, which is after Python has; it holds the other end of this pipe until then.
    subprocess.run(
        [sys.executable, "-c", _TRAINING], env={**os.environ, "SPARK_SUBMIT_OPTS": options}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False,
    )  # fmt: skip
    if mine.exists():
        mine.rename(archive)


def _make_for_kafka() -> None:
    """Of a broker that has done a little of everything, written when it ends."""
    training = EmbeddedKafka()
    training._prepare()
    archive = class_archive(training._java, training._jars)
    if archive.exists():
        return
    mine = _begun(archive)
    with EmbeddedKafka(jvm_options=(*JVM_OPTIONS, f"-XX:ArchiveClassesAtExit={mine}", "-Xlog:disable")) as kafka:
        with contextlib.suppress(KafkaException):
            _use_a_little(kafka)
        broker = kafka.broker().process
        assert broker is not None
        broker.end(polite=signal.SIGTERM, seconds=120)
    if mine.exists():
        mine.rename(archive)


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


def _begun(archive: Path) -> Path:
    """Where it is written before it is whole."""
    return archive.with_suffix(f".{os.getpid()}")
