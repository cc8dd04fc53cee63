"""Brokers that require SASL and TLS: one Airflow connection must work for librdkafka and for Spark's Java client."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import time

import pytest
from confluent_kafka import KafkaException, Producer

from airflow_kafka_spark.errors import ConnectionInvalid, KafkaUnavailable, RightMissing
from airflow_kafka_spark.hooks.kafka.client import ClientEvents
from airflow_kafka_spark.hooks.kafka.config import make_consumer_config, make_producer_config
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.hooks.kafka.requests import PartitionOffsets, read_committed_offsets
from airflow_kafka_spark.hooks.kafka.transactions import make_fencing_producer
from airflow_kafka_spark.hooks.spark.hook import SparkHook
from airflow_kafka_spark.hooks.spark.jars import find_spark_kafka_connector, resolve_jars
from airflow_kafka_spark.ledger import topic
from airflow_kafka_spark.sources.kafka.tasks.read import KafkaSplitReader
from airflow_kafka_spark.testing import EmbeddedKafka, KafkaSecurity
from airflow_kafka_spark.windows.model import OffsetRange, TopicPartition
from tests.support import oauth
from tests.support.distribution import extended

PASSWORD = 'say "it"\\ twice; #=ü,{}/*'
VALUES = [f"v{n}" for n in range(100)]


def connect(monkeypatch, extra, conn_id="secured"):
    monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps({"conn_type": "kafka", "extra": extra}))
    # A call that waits for the whole timeout would be noticed.
    return KafkaHook(conn_id, timeout=300)


def filled(security, properties=None, **settings):
    """Start a broker with this security and 100 committed records on topic `t`, written with the connection's settings."""
    kafka = EmbeddedKafka(security=security, properties=properties)
    kafka.start()
    kafka.create_topic("t", 2)
    producer = Producer({**kafka.connection_extra(**settings), "log_level": 0})
    for number, value in enumerate(VALUES):
        producer.produce("t", value, partition=number % 2)
    assert producer.flush(120) == 0
    return kafka


@pytest.fixture(scope="module")
def sasl_ssl():
    with filled(KafkaSecurity("SASL_SSL", {"ann": PASSWORD}, ("SCRAM-SHA-512",))) as kafka:
        yield kafka


@pytest.fixture(scope="module")
def sasl_plaintext():
    """A broker on which all users except eve have all rights."""
    users = {"ann": PASSWORD, "bob": "b", "eve": "e"}
    authorizer = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS;User:ann;User:bob",
    }
    with filled(KafkaSecurity("SASL_PLAINTEXT", users, ("PLAIN", "SCRAM-SHA-256")), authorizer | oauth.BROKER) as kafka:
        yield kafka


@pytest.fixture(scope="module")
def mutual_tls():
    with filled(KafkaSecurity("SSL", client_certificates=True)) as kafka:
        yield kafka


@pytest.fixture(scope="module")
def spark(tmp_path_factory):
    connection = {"conn_type": "spark", "host": "local[1]"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIRFLOW_CONN_SPARK_SECURITY", json.dumps(connection))
        jars = tuple(map(str, resolve_jars([find_spark_kafka_connector()], exclude_bundled=True)))
        with SparkHook("spark_security").open_session(jars=jars) as session:
            yield session
    # Its connections are closed after pytest has closed the log they report to.
    logging.getLogger("py4j").setLevel(logging.WARNING)


def read(spark, options):
    """Return the records that Spark's Kafka source reads with these settings of the Java client."""
    reader = (
        spark.read.format("kafka").option("subscribe", "t").option("startingOffsets", "earliest").option("failOnDataLoss", "true")
    )
    for key, value in options.items():
        reader = reader.option(f"kafka.{key}", value)
    return sorted((row.value.decode() for row in reader.load().select("value").collect()), key=lambda value: int(value[1:]))


def served(hook):
    """Check that the connection works for librdkafka."""
    offsets = hook.read_offsets(["t"])
    return offsets == {TopicPartition("t", p): PartitionOffsets(0, 50, 50) for p in (0, 1)}


def test_scram_over_tls_serves_librdkafka_and_spark(sasl_ssl, spark, monkeypatch):
    hook = connect(monkeypatch, sasl_ssl.connection_extra())
    java = hook.make_java_config()
    assert served(hook)
    assert java.ignored == ()
    assert read(spark, java.options) == VALUES


def test_certificate_authorities_as_text_serve_librdkafka_and_spark(sasl_ssl, spark, monkeypatch):
    extra = sasl_ssl.connection_extra()
    location = extra.pop("ssl.ca.location")
    with open(location) as file:
        extra["ssl.ca.pem"] = file.read()
    hook = connect(monkeypatch, extra)
    assert served(hook)
    assert read(spark, hook.make_java_config().options) == VALUES
    extra = sasl_ssl.connection_extra()
    options = connect(monkeypatch, extra).make_java_config(inline_files=True).options
    assert location not in str(options)
    assert read(spark, options) == VALUES


@pytest.mark.extended
@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
def test_sasl_in_plain_text_serves_librdkafka_and_spark(sasl_plaintext, spark, monkeypatch, mechanism):
    hook = connect(monkeypatch, sasl_plaintext.connection_extra(mechanism=mechanism))
    assert served(hook)
    assert read(spark, hook.make_java_config().options) == VALUES


@pytest.mark.parametrize("key", ["as it is", extended("traditional"), extended("encrypted"), "traditional and encrypted"])
def test_mutual_tls_with_pem_files_serves_librdkafka_and_spark(mutual_tls, spark, monkeypatch, tmp_path, key):
    extra = mutual_tls.connection_extra()
    if key != "as it is":
        converted = tmp_path / "client.key"
        how = {
            "traditional": ["ec", "-in", extra["ssl.key.location"]],
            "encrypted": ["pkcs8", "-topk8", "-in", extra["ssl.key.location"], "-passout", "pass:key pass"],
            "traditional and encrypted": ["ec", "-in", extra["ssl.key.location"], "-aes256", "-passout", "pass:key pass"],
        }[key]
        subprocess.run(["openssl", *how, "-out", str(converted)], check=True, capture_output=True)
        extra["ssl.key.location"] = str(converted)
        if "encrypted" in key:
            extra["ssl.key.password"] = "key pass"
    hook = connect(monkeypatch, extra)
    assert served(hook)
    assert read(spark, hook.make_java_config().options) == VALUES


def test_a_pkcs12_keystore_serves_librdkafka_and_spark(mutual_tls, spark, monkeypatch, tmp_path):
    extra = mutual_tls.connection_extra()
    certificate, key = extra.pop("ssl.certificate.location"), extra.pop("ssl.key.location")
    store = tmp_path / "client.p12"
    command = [
        "openssl",
        "pkcs12",
        "-export",
        "-in",
        certificate,
        "-inkey",
        key,
        "-passout",
        "pass:store pass",
        "-out",
        str(store),
    ]
    subprocess.run(command, check=True, capture_output=True)
    hook = connect(monkeypatch, extra | {"ssl.keystore.location": str(store), "ssl.keystore.password": "store pass"})
    assert served(hook)
    assert read(spark, hook.make_java_config().options) == VALUES


def test_java_settings_by_hand_serve_spark(sasl_ssl, spark, monkeypatch):
    extra = sasl_ssl.connection_extra()
    options = connect(monkeypatch, extra).make_java_config().options
    by_hand = {f"java.{name}": options[name] for name in ("sasl.mechanism", "sasl.jaas.config")}
    hook = connect(monkeypatch, extra | {"sasl.mechanism": "OAUTHBEARER"} | by_hand)
    assert read(spark, hook.make_java_config().options) == VALUES


def read_in_task(spark, config):
    """Return the records that a Spark task reads with librdkafka."""
    readers = [KafkaSplitReader(make_consumer_config(config), OffsetRange("t", p, 0, 50)) for p in (0, 1)]
    values = spark.sparkContext.parallelize(readers, 1).flatMap(lambda reader: [v for part in reader for v in part.values])
    return sorted((value.decode() for value in values.collect()), key=lambda value: int(value[1:]))


def test_oauth_by_a_function_and_by_oidc_serves_librdkafka_here_and_in_sparks_tasks_and_sparks_source(
    sasl_plaintext, spark, monkeypatch
):
    monkeypatch.setenv("AIRFLOW__APACHE_KAFKA__CALLBACK_ALLOWLIST", "tests.support.oauth.make_token")
    module = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
    common = {
        "bootstrap.servers": sasl_plaintext.bootstrap_servers,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "java.sasl.mechanism": "OAUTHBEARER",
        "java.sasl.jaas.config": f'{module} required unsecuredLoginStringClaim_sub="ann";',
    }
    by_function = {"oauth_cb": "tests.support.oauth.make_token", "sasl.oauthbearer.config": "ann"}
    with oauth.serve_tokens() as endpoint:
        oidc = {"method": "oidc", "client.id": "ann", "client.secret": "hush", "token.endpoint.url": endpoint}
        by_oidc = {f"sasl.oauthbearer.{name}": value for name, value in oidc.items()}
        for way in (by_function, by_oidc):
            hook = connect(monkeypatch, common | way)
            assert served(hook)
            assert read_in_task(spark, hook.config) == VALUES
        assert read(spark, hook.make_java_config().options) == VALUES
        hook = connect(monkeypatch, common | by_oidc | {"sasl.oauthbearer.client.secret": "nonsense"})
        done, said = hook.test_connection()
        assert not done and "nonsense" not in said, said


def refused(hook, capfd):
    """Return the error of a connection that the brokers refuse: raised soon, not retryable, without further logs or secrets."""
    started = time.monotonic()
    with pytest.raises(ConnectionInvalid) as caught:
        hook.read_offsets(["t"])
    assert time.monotonic() - started < 100
    assert caught.value.conn_id == hook.conn_id
    assert not caught.value.retryable
    captured = "".join(capfd.readouterr())
    # Without lines about brokers of other tests: a client may report their end at any time.
    ours, any_broker = hook.config["bootstrap.servers"], re.compile(r"127\.0\.0\.1:\d+")
    noise = [line for line in captured.splitlines() if "rdkafka" in line and (ours in line or not any_broker.search(line))]
    assert noise == []
    assert "nonsense" not in captured + str(caught.value)
    return str(caught.value)


def test_a_wrong_password_is_one_clear_error_within_seconds(sasl_ssl, sasl_plaintext, monkeypatch, capfd):
    wrong = {"sasl.password": "nonsense"}
    said = refused(connect(monkeypatch, sasl_ssl.connection_extra() | wrong), capfd)
    assert "`secured`" in said
    assert "user `ann` (SCRAM-SHA-512 over SASL_SSL)" in said
    assert "invalid credentials" in said
    said = refused(connect(monkeypatch, sasl_plaintext.connection_extra(mechanism="PLAIN") | wrong), capfd)
    assert "Invalid username or password" in said
    assert "nonsense" not in said


def test_a_reader_of_the_ledger_whose_password_was_changed_meanwhile_gives_up_within_seconds(sasl_plaintext, monkeypatch):
    """The hook that has found out where the ledger ends was logged in then."""
    monkeypatch.setattr(topic, "READ_SECONDS", 600.0)
    hook = connect(monkeypatch, sasl_plaintext.connection_extra(mechanism="PLAIN") | {"sasl.password": "nonsense"})
    config = hook.make_consumer_config(**topic.PROMPT)
    started = time.monotonic()
    with pytest.raises(KafkaUnavailable, match="reading t-0: .*Invalid username or password") as caught:
        list(topic.read_span(topic.LedgerSpan(config, TopicPartition("t", 0), 0, 50)))
    assert time.monotonic() - started < 60
    assert "nonsense" not in str(caught.value)


def test_a_task_whose_password_was_changed_meanwhile_gives_up_within_seconds(sasl_plaintext):
    """It reads with a new client, and fences with another one. The driver's own connections stay."""
    config = {**sasl_plaintext.connection_extra(), "sasl.password": "changed-since"}
    began = time.monotonic()
    with pytest.raises(KafkaUnavailable, match=r"reading t-0\[0,50\).*invalid credentials") as reading:
        list(KafkaSplitReader(make_consumer_config(config), OffsetRange("t", 0, 0, 50)))
    with pytest.raises(KafkaException, match="invalid credentials") as fencing:
        make_fencing_producer(make_producer_config(config), "any", 60, ClientEvents())
    assert time.monotonic() - began < 30, "the reader's patience is 300 s, the producer's is 60 s"
    assert "changed-since" not in f"{reading.value} {fencing.value}"


def test_committed_offsets_are_refused_within_seconds_if_the_password_was_changed_meanwhile(sasl_plaintext, monkeypatch):
    right = sasl_plaintext.connection_extra(mechanism="PLAIN")
    hook = connect(monkeypatch, right)
    hook.read_cluster_id()
    started = time.monotonic()
    with pytest.raises(ConnectionInvalid, match="Invalid username or password"):
        read_committed_offsets(hook._calls, right | {"sasl.password": "nonsense"}, "g", [TopicPartition("t", 0)], stable=True)
    assert time.monotonic() - started < 60


def test_a_mechanism_the_brokers_do_not_have_is_one_clear_error_within_seconds(sasl_plaintext, monkeypatch, capfd):
    said = refused(connect(monkeypatch, sasl_plaintext.connection_extra() | {"sasl.mechanism": "SCRAM-SHA-512"}), capfd)
    assert "Unsupported SASL mechanism" in said
    assert "PLAIN" in said


def test_an_unknown_certificate_authority_is_one_clear_error_within_seconds(sasl_ssl, monkeypatch, capfd):
    extra = sasl_ssl.connection_extra()
    del extra["ssl.ca.location"]
    assert "ssl.ca.location" in refused(connect(monkeypatch, extra), capfd)


def test_a_missing_client_certificate_is_one_clear_error_within_seconds(mutual_tls, monkeypatch, capfd):
    extra = mutual_tls.connection_extra()
    del extra["ssl.certificate.location"], extra["ssl.key.location"]
    said = refused(connect(monkeypatch, extra), capfd)
    assert "client's certificate" in said
    assert "SSL alert" in said


def test_no_secret_reaches_the_log(sasl_ssl, monkeypatch, caplog):
    with (
        caplog.at_level(logging.DEBUG, logger="airflow_kafka_spark"),
        connect(monkeypatch, sasl_ssl.connection_extra(debug="all")) as hook,
    ):
        hook.read_cluster_id()
        repr(hook.make_java_config())
        assert PASSWORD not in repr(hook.make_java_config())
        hook.read_cluster_id()
    assert "librdkafka" in caplog.text
    assert "say" not in caplog.text


def test_a_missing_permission_is_an_error_that_names_the_user_and_never_an_empty_answer(sasl_plaintext, monkeypatch):
    hook = connect(monkeypatch, sasl_plaintext.connection_extra("eve", "PLAIN"))
    calls = {
        "TOPIC_AUTHORIZATION_FAILED": [
            lambda: hook.describe_topics(["t"], missing="omit"),
            lambda: hook.read_topic_config(["t"]),
            lambda: hook.read_offsets([TopicPartition("t", 0)]),
            lambda: hook.create_topic("other"),
            lambda: hook.alter_committed("g", {TopicPartition("t", 0): 1}),
        ],
        "GROUP_AUTHORIZATION_FAILED": [
            lambda: hook.read_committed_offsets("g", [TopicPartition("t", 0)]),
            lambda: hook.read_group_state("g"),
        ],
    }
    for code, failing in calls.items():
        for call in failing:
            with pytest.raises(RightMissing, match="Grant the right .* to user `eve`") as caught:
                call()
            assert (caught.value.code, caught.value.conn_id) == (code, "secured") and caught.value.rights
            assert f"{caught.value.resource} `{caught.value.name}`" in str(caught.value)
            assert caught.value.name in ("t", "g", "other")
