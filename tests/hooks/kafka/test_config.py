"""Translating and filtering a Kafka connection's settings."""

from __future__ import annotations

import logging
import subprocess

import pytest

from airflow_kafka_spark.errors import ConnectionInvalid
from airflow_kafka_spark.hooks.kafka.config import (
    CONSUMER_ONLY,
    JAVA_NAMES,
    LIBRDKAFKA_ONLY,
    PRODUCER_ONLY,
    TRANSACTION_DECIDES,
    WINDOW_DECIDES,
    find_bootstrap_problem,
    make_admin_config,
    make_consumer_config,
    make_java_config,
    make_producer_config,
    redact_config,
)

BROKERS = {"bootstrap.servers": "b1:9092"}
SCRAM = BROKERS | {
    "security.protocol": "sasl_ssl",
    "sasl.mechanism": "SCRAM-SHA-512",
    "sasl.username": "ann",
    "sasl.password": "pw",
}


def java(**config):
    return dict(make_java_config(BROKERS | config).options)


# --- to the Java client ---


def test_plain_brokers():
    assert java() == {"bootstrap.servers": "b1:9092", "security.protocol": "PLAINTEXT", "allow.auto.create.topics": "false"}


@pytest.mark.parametrize(
    ("servers", "expected"),
    [
        ("b1:9092,b2:9093", "b1:9092,b2:9093"),
        (" b1 , b2:9093,", "b1:9092,b2:9093"),
        ("SASL_SSL://b1:9094", "b1:9094"),
        ("[::1]", "[::1]:9092"),
        ("[::1]:9094", "[::1]:9094"),
    ],
)
def test_brokers_are_written_as_the_java_client_wants_them(servers, expected):
    assert make_java_config({"bootstrap.servers": servers}).options["bootstrap.servers"] == expected
    assert make_java_config({"metadata.broker.list": servers}).options["bootstrap.servers"] == expected


@pytest.mark.parametrize(
    ("servers", "problem"),
    [
        ("http://b1:9092", "`http://b1:9092` in its `bootstrap.servers` is the address of no Kafka broker"),
        ("b1:9092, https://b2", "`https://b2` in its `bootstrap.servers` is the address of no Kafka broker"),
        ("SASL_SSL://b1:9093", "`SASL_SSL://b1:9093` in its `bootstrap.servers` has another protocol than `security.protocol`"),
        ("b1:kafka", "`b1:kafka` in its `bootstrap.servers` has `kafka` in place of a port"),
        ("[::1]:9x", "`[::1]:9x` in its `bootstrap.servers` has `9x` in place of a port"),
        ("b1:90922", "`b1:90922` in its `bootstrap.servers` has `90922` in place of a port"),
        ("b1:9092; b2:9092", "`b1:9092; b2:9092` in its `bootstrap.servers` names several addresses; commas separate them"),
        ("b1:9092 b2:9092", "`b1:9092 b2:9092` in its `bootstrap.servers` names several addresses; commas separate them"),
        *((good, "") for good in ("b1", "b1:9092,,b2", " b1 , b2:9093,", "plainText://b1:9092", "[::1]", "[::1]:9094", "::1")),
    ],
)
def test_addresses_that_librdkafka_passes_over_are_named(servers, problem):
    assert find_bootstrap_problem({"bootstrap.servers": servers}).startswith(problem)
    assert bool(find_bootstrap_problem({"metadata.broker.list": servers})) == bool(problem)


def test_without_brokers_it_is_an_error_that_names_the_connection():
    with pytest.raises(ConnectionInvalid, match="`east`.*no brokers.*bootstrap.servers"):
        make_java_config({"group.id": "x"}, conn_id="east")


@pytest.mark.parametrize(
    ("mechanism", "module"),
    [
        ("PLAIN", "org.apache.kafka.common.security.plain.PlainLoginModule"),
        ("SCRAM-SHA-256", "org.apache.kafka.common.security.scram.ScramLoginModule"),
        ("scram-sha-512", "org.apache.kafka.common.security.scram.ScramLoginModule"),
    ],
)
@pytest.mark.parametrize("name", ["sasl.mechanism", "sasl.mechanisms"])
def test_user_and_password_become_a_jaas_text(mechanism, module, name):
    options = java(**{"security.protocol": "SASL_PLAINTEXT", name: mechanism, "sasl.username": "ann", "sasl.password": " p w "})
    assert options["sasl.mechanism"] == mechanism.upper()
    assert options["sasl.jaas.config"] == f'{module} required username="ann" password=" p w ";'
    assert options["security.protocol"] == "SASL_PLAINTEXT"


def test_quotes_backslashes_and_line_ends_of_a_password_are_escaped():
    options = java(**(SCRAM | {"sasl.password": 'a"b\\c\nd;'}))
    assert options["sasl.jaas.config"].endswith('password="a\\"b\\\\c\\nd;";')


def test_a_numeric_password_of_a_json_extra_is_taken_as_text():
    assert 'password="12345"' in java(**(SCRAM | {"sasl.password": 12345}))["sasl.jaas.config"]


@pytest.mark.parametrize("name", ["sasl.username", "sasl.password"])
def test_a_missing_user_or_password_is_an_error(name):
    with pytest.raises(ConnectionInvalid, match=name):
        make_java_config({k: v for k, v in SCRAM.items() if k != name})


@pytest.mark.parametrize("mechanism", [{"sasl.mechanism": "OAUTHBEARER"}, {"sasl.mechanisms": "GSSAPI"}, {}])
def test_other_mechanisms_are_an_error_that_names_what_is_supported_and_the_way_out(mechanism):
    config = {k: v for k, v in SCRAM.items() if k != "sasl.mechanism"} | mechanism
    with pytest.raises(ConnectionInvalid, match=r"PLAIN, SCRAM-SHA-256, SCRAM-SHA-512.*java\.sasl\.jaas\.config") as caught:
        make_java_config(config)
    assert "pw" not in str(caught.value)


def test_settings_with_the_java_prefix_pass_through_and_win():
    config = BROKERS | {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "OAUTHBEARER",
        "java.sasl.jaas.config": "x.OAuthBearerLoginModule required;",
        "java.sasl.login.callback.handler.class": "x.Handler",
        "socket.timeout.ms": 1000,
        "java.request.timeout.ms": 2000,
        "sasl.oauthbearer.client.id": "me",
        "oauth_cb": print,
    }
    result = make_java_config(config)
    assert result.ignored == ()
    assert result.options == {
        "bootstrap.servers": "b1:9092",
        "allow.auto.create.topics": "false",
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.jaas.config": "x.OAuthBearerLoginModule required;",
        "sasl.login.callback.handler.class": "x.Handler",
        "request.timeout.ms": "2000",
    }


def test_the_window_decides_what_is_read_not_the_connection():
    said = {name: "x" for name in WINDOW_DECIDES}
    result = make_java_config(BROKERS | said | {f"java.{name}": "y" for name in WINDOW_DECIDES})
    assert set(result.options) == {"bootstrap.servers", "security.protocol", "allow.auto.create.topics"}
    assert result.options["allow.auto.create.topics"] == "false"
    assert set(result.ignored) == {f"java.{name}" for name in WINDOW_DECIDES}


def test_timeouts_and_sizes_get_their_java_names():
    options = java(
        **{
            "client.id": "me",
            "client.rack": "r1",
            "socket.timeout.ms": 1,
            "session.timeout.ms": 2,
            "socket.connection.setup.timeout.ms": 3,
            "metadata.max.age.ms": 4,
            "topic.metadata.refresh.interval.ms": 5,
            "fetch.message.max.bytes": 6,
            "fetch.min.bytes": 7,
            "fetch.wait.max.ms": 8,
            "connections.max.idle.ms": 0,
            "socket.receive.buffer.bytes": 0,
            "socket.send.buffer.bytes": 9,
            "check.crcs": True,
        }
    )
    assert {name: options[name] for name in options if name not in java()} == {
        "client.id": "me",
        "client.rack": "r1",
        "request.timeout.ms": "1",
        "session.timeout.ms": "2",
        "socket.connection.setup.timeout.ms": "3",
        "metadata.max.age.ms": "4",
        "max.partition.fetch.bytes": "6",
        "fetch.min.bytes": "7",
        "fetch.max.wait.ms": "8",
        "connections.max.idle.ms": "-1",
        "receive.buffer.bytes": "-1",
        "send.buffer.bytes": "9",
        "check.crcs": "true",
    }


def test_a_setting_without_a_counterpart_is_reported_once_unless_it_is_not_needed():
    result = make_java_config(
        BROKERS | {"ssl.crl.location": "x", "queued.min.messages": 5, "debug": "all", "acks": 1, "made.up": 1}
    )
    assert result.ignored == ("made.up", "ssl.crl.location")
    assert not {"queued.min.messages", "debug", "acks", "made.up", "ssl.crl.location"} & result.options.keys()


def test_the_tables_do_not_contradict_each_other():
    tables = [WINDOW_DECIDES, PRODUCER_ONLY, JAVA_NAMES.keys()]
    assert not [a & b for a in tables for b in tables if a is not b and a & b]
    assert not LIBRDKAFKA_ONLY & (WINDOW_DECIDES | PRODUCER_ONLY | JAVA_NAMES.keys())


# --- TLS ---


@pytest.fixture(scope="module")
def pem(tmp_path_factory):
    """Return a certificate, and its key in every form that OpenSSL writes."""
    folder = tmp_path_factory.mktemp("pem")

    def openssl(*args):
        subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True)

    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "pkcs8.pem", "-out", "cert.pem", "-subj", "/CN=x")
    openssl("rsa", "-in", "pkcs8.pem", "-traditional", "-out", "traditional.pem")
    openssl("rsa", "-in", "pkcs8.pem", "-traditional", "-aes256", "-passout", "pass:pw", "-out", "traditional-encrypted.pem")
    openssl("pkcs8", "-in", "pkcs8.pem", "-topk8", "-passout", "pass:pw", "-out", "pkcs8-encrypted.pem")
    openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "ec.pem")
    return folder


def ssl(**config):
    return java(**{"security.protocol": "ssl"}, **config)


def test_certificate_authorities_by_path_by_text_or_put_in(pem):
    location = str(pem / "cert.pem")
    text = (pem / "cert.pem").read_text()
    by_path = ssl(**{"ssl.ca.location": location})
    assert (by_path["ssl.truststore.type"], by_path["ssl.truststore.location"]) == ("PEM", location)
    by_text = ssl(**{"ssl.ca.pem": text})
    assert (by_text["ssl.truststore.type"], by_text["ssl.truststore.certificates"]) == ("PEM", text.strip())
    put_in = make_java_config(BROKERS | {"security.protocol": "ssl", "ssl.ca.location": location}, inline_files=True).options
    assert put_in["ssl.truststore.certificates"] == text
    assert "ssl.truststore.location" not in put_in


@pytest.mark.parametrize("config", [{}, {"ssl.ca.location": "probe"}])
def test_without_named_authorities_java_uses_its_own(config):
    assert not [name for name in ssl(**config) if "truststore" in name]


@pytest.mark.parametrize("key", ["pkcs8", "traditional", "traditional-encrypted", "pkcs8-encrypted", "ec"])
def test_every_form_of_a_client_key_becomes_a_key_that_java_reads(pem, key):
    options = ssl(
        **{
            "ssl.certificate.location": str(pem / "cert.pem"),
            "ssl.key.location": str(pem / f"{key}.pem"),
            "ssl.key.password": "pw",
        }
    )
    assert options["ssl.keystore.type"] == "PEM"
    assert options["ssl.keystore.certificate.chain"] == (pem / "cert.pem").read_text()
    assert options["ssl.keystore.key"].startswith("-----BEGIN PRIVATE KEY-----")
    assert "ssl.key.password" not in options


def test_client_certificate_and_key_as_texts(pem):
    options = ssl(**{"ssl.certificate.pem": (pem / "cert.pem").read_text(), "ssl.key.pem": (pem / "pkcs8.pem").read_text()})
    assert options["ssl.keystore.key"] == (pem / "pkcs8.pem").read_text().strip()


@pytest.mark.parametrize("password", ["", "wrong"])
def test_a_wrong_key_password_is_an_error_without_the_password(pem, password):
    with pytest.raises(ConnectionInvalid, match="cannot be decrypted") as caught:
        ssl(
            **{
                "ssl.certificate.location": str(pem / "cert.pem"),
                "ssl.key.location": str(pem / "pkcs8-encrypted.pem"),
                "ssl.key.password": password,
            }
        )
    assert "wrong" not in str(caught.value)


def test_half_a_key_pair_is_an_error(pem):
    with pytest.raises(ConnectionInvalid, match="certificate but no client key"):
        ssl(**{"ssl.certificate.location": str(pem / "cert.pem")})


@pytest.mark.parametrize("name", ["ssl.ca.location", "ssl.certificate.location", "ssl.key.location"])
def test_an_unreadable_file_is_an_error_that_names_it(pem, name):
    with pytest.raises(ConnectionInvalid, match=f"{name}.*nowhere.*No such file"):
        ssl(**{name: str(pem / "nowhere")})
    with pytest.raises(ConnectionInvalid, match=f"{name}.*cannot be read"):
        ssl(**{name: str(pem)})


def test_a_pkcs12_keystore_stays_one():
    options = ssl(**{"ssl.keystore.location": "/k.p12", "ssl.keystore.password": "pw"})
    assert {n: v for n, v in options.items() if "keystore" in n} == {
        "ssl.keystore.type": "PKCS12",
        "ssl.keystore.location": "/k.p12",
        "ssl.keystore.password": "pw",
    }


@pytest.mark.parametrize(("said", "expected"), [("none", ""), ("https", "https"), ("HTTPS", "https")])
def test_endpoint_identification(said, expected):
    assert ssl(**{"ssl.endpoint.identification.algorithm": said})["ssl.endpoint.identification.algorithm"] == expected


@pytest.mark.parametrize("value", [False, "false", "0"])
def test_verification_switched_off_is_an_error_since_java_cannot(value):
    with pytest.raises(ConnectionInvalid, match=r"enable.ssl.certificate.verification.*ssl.ca.location"):
        ssl(**{"enable.ssl.certificate.verification": value})
    assert ssl(**{"enable.ssl.certificate.verification": value, "java.ssl.engine.factory.class": "x.Trusting"})
    assert java(**{"enable.ssl.certificate.verification": value})  # without TLS it says nothing


def test_a_store_by_hand_replaces_the_translated_one(pem):
    options = ssl(**{"ssl.ca.location": "/nowhere", "java.ssl.truststore.location": "/t.jks", "java.ssl.truststore.type": "JKS"})
    assert {n: v for n, v in options.items() if "truststore" in n} == {
        "ssl.truststore.location": "/t.jks",
        "ssl.truststore.type": "JKS",
    }


# --- to confluent-kafka's clients ---

# One value that librdkafka accepts for every property that belongs to one kind of client.
_VALUES = {
    "acks": -1,
    "request.required.acks": -1,
    "compression.type": "none",
    "compression.codec": "none",
    "enable.auto.commit": False,
    "auto.commit.enable": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "earliest",
    "group.protocol": "classic",
    "group.protocol.type": "consumer",
    "isolation.level": "read_committed",
    "partition.assignment.strategy": "range",
    "partitioner": "murmur2",
    "queuing.strategy": "fifo",
    "offset.store.method": "broker",
    "offset.store.path": "/nowhere",
    "max.poll.interval.ms": 300000,
    "session.timeout.ms": 45000,
    "heartbeat.interval.ms": 3000,
    "message.timeout.ms": 300000,
    "delivery.timeout.ms": 300000,
    "transaction.timeout.ms": 60000,
    "sticky.partitioning.linger.ms": 10,
    "enable.gapless.guarantee": False,
    "enable.idempotence": True,
    "delivery.report.only.error": False,
    "produce.offset.report": False,
    "check.crcs": True,
    "enable.partition.eof": False,
    "queue.buffering.backpressure.threshold": 1,
    "fetch.max.bytes": 52428800,
    "compression.level": -1,
    "allow.auto.create.topics": True,
    "group.remote.assignor": None,
    "on_commit": print,
}


@pytest.fixture
def everything():
    """A connection that sets every property of consumers and of producers."""
    names = CONSUMER_ONLY | PRODUCER_ONLY | WINDOW_DECIDES | {"java.sasl.jaas.config"}
    config = {name: _VALUES.get(name, 1000) for name in sorted(names)}
    return {"bootstrap.servers": "127.0.0.1:1"} | {name: value for name, value in config.items() if value is not None}


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.fixture
def warnings_of(capfd):
    """Return the log lines of librdkafka about the settings of a new client."""

    def make(kind, config):
        handler = Lines()
        logger = logging.Logger("librdkafka")
        logger.addHandler(handler)
        client = kind(config, logger=logger)
        client.poll(0.2)
        del client
        captured = capfd.readouterr()
        return [line for line in handler.lines + (captured.out + captured.err).splitlines() if "CONFWARN" in line]

    return make


@pytest.mark.parametrize("kind", ["Consumer", "Producer", "AdminClient"])
def test_no_client_gets_settings_that_librdkafka_warns_about(kind, everything, warnings_of):
    import confluent_kafka
    from confluent_kafka.admin import AdminClient

    make = {"Consumer": confluent_kafka.Consumer, "Producer": confluent_kafka.Producer, "AdminClient": AdminClient}[kind]
    config = {"Consumer": make_consumer_config, "Producer": make_producer_config, "AdminClient": make_admin_config}[kind](
        everything
    )
    said = [line for line in warnings_of(make, config) if "will be ignored" in line]
    assert said == []


def test_unfiltered_settings_do_make_librdkafka_warn(warnings_of):
    from confluent_kafka import Producer

    assert warnings_of(Producer, {"bootstrap.servers": "127.0.0.1:1", "fetch.min.bytes": 5})


def test_a_consumer_never_commits_by_itself_never_resets_and_reads_committed_records(everything):
    config = make_consumer_config(everything, **{"group.id": "g", "client.id": "c"})
    assert config["enable.auto.commit"] is False
    assert config["auto.offset.reset"] == "error"
    assert config["isolation.level"] == "read_committed"
    assert config["enable.partition.eof"] is True
    assert (config["group.id"], config["client.id"]) == ("g", "c")
    assert "allow.auto.create.topics" not in config
    for blank in ({}, {"group.id": ""}, {"group.id": " \n"}, {"group.id": "\0g"}):
        assert make_consumer_config(everything, **blank)["group.id"] == "airflow-kafka-spark", (
            "confluent-kafka aborts the process"
        )


@pytest.mark.parametrize(
    "override", [{"enable.auto.commit": True}, {"auto.offset.reset": "latest"}, {"isolation.level": "read_uncommitted"}]
)
def test_an_override_cannot_change_that(override):
    with pytest.raises(ValueError, match=next(iter(override))):
        make_consumer_config(BROKERS, **override)
    assert make_consumer_config(BROKERS, **{"enable.auto.commit": "false"})["enable.auto.commit"] is False


def test_a_producer_gets_what_the_caller_gives_and_nothing_of_the_connection_that_transactions_decide(everything):
    assert make_producer_config(everything | {"transactional.id": "theirs", "acks": 0}).keys().isdisjoint(TRANSACTION_DECIDES)
    config = make_producer_config(everything, **{"transactional.id": "t", "linger.ms": 50})
    assert (config["transactional.id"], config["linger.ms"], config["batch.size"]) == ("t", 50, 1000)


def test_security_reaches_every_client():
    for make in (make_consumer_config, make_producer_config, make_admin_config):
        assert make(SCRAM | {"java.x": 1}).items() >= SCRAM.items()
        assert "java.x" not in make(SCRAM | {"java.x": 1})


# --- secrets ---


def test_secrets_are_redacted():
    config = {
        "bootstrap.servers": "b1:9092",
        "sasl.username": "ann",
        "sasl.password": "s",
        "ssl.key.password": "s",
        "ssl.key.pem": "s",
        "ssl.key.location": "/k",
        "ssl.keystore.password": "s",
        "ssl.keystore.key": "s",
        "kafka.ssl.keystore.key": "s",
        "java.sasl.jaas.config": "s",
        "sasl.oauthbearer.client.secret": "s",
        "sasl.oauthbearer.config": "s",
        "sasl.oauthbearer.assertion.private.key.passphrase": "s",
        "sasl.oauthbearer.assertion.private.key.pem": "s",
    }
    shown = redact_config(config)
    assert [name for name, value in shown.items() if value != "***"] == ["bootstrap.servers", "sasl.username", "ssl.key.location"]
    assert config["sasl.password"] == "s"


def test_the_repr_of_translated_settings_shows_no_secret(pem):
    config = SCRAM | {
        "ssl.certificate.location": str(pem / "cert.pem"),
        "ssl.key.location": str(pem / "ec.pem"),
        "sasl.password": "hunter2",
    }
    shown = repr(make_java_config(config))
    assert "hunter2" not in shown
    assert "PRIVATE KEY" not in shown
    assert "b1:9092" in shown
