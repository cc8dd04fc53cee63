"""Client settings of a Kafka connection. No other module translates or filters them.

The extra of Airflow's ``kafka`` connection is a librdkafka configuration. The clients of confluent-kafka accept it nearly
unchanged. Spark's Kafka source runs the Java client, which has other names for many settings, and other forms of keys and
passwords. The functions use neither Airflow nor a Kafka client nor the network; they read certificate files.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from airflow_kafka_spark.errors import ConnectionInvalid
from airflow_kafka_spark.hooks.connections import format_setting

JAVA_PREFIX = "java."
DEFAULT_GROUP_ID = "airflow-kafka-spark"


def _split_names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Settings that a connection may hold for its other users, and that are ignored here: the window fixes the offsets, no consumer
# joins a group, and a reader never creates a topic (librdkafka's default; the Java client's is the opposite).
WINDOW_DECIDES = _split_names("""
    allow.auto.create.topics auto.commit.enable auto.commit.interval.ms auto.offset.reset enable.auto.commit
    enable.auto.offset.store group.id group.instance.id group.protocol group.protocol.type group.remote.assignor
    isolation.level offset.store.method offset.store.path offset.store.sync.interval.ms on_commit
    partition.assignment.strategy
""")

# Properties of consumers only (column C of librdkafka's table), about which a producer warns.
CONSUMER_ONLY = WINDOW_DECIDES - {"allow.auto.create.topics"} | _split_names("""
    check.crcs consume.callback.max.messages coordinator.query.interval.ms enable.partition.eof fetch.error.backoff.ms
    fetch.max.bytes fetch.message.max.bytes fetch.min.bytes fetch.queue.backoff.ms fetch.wait.max.ms heartbeat.interval.ms
    max.partition.fetch.bytes max.poll.interval.ms queued.max.messages.kbytes queued.min.messages session.timeout.ms
""")

# Properties of producers only (column P), about which a consumer warns.
PRODUCER_ONLY = _split_names("""
    acks batch.num.messages batch.size compression.codec compression.level compression.type delivery.report.only.error
    delivery.timeout.ms enable.gapless.guarantee enable.idempotence linger.ms message.send.max.retries message.timeout.ms
    partitioner produce.offset.report queue.buffering.backpressure.threshold queue.buffering.max.kbytes
    queue.buffering.max.messages queue.buffering.max.ms queuing.strategy request.required.acks request.timeout.ms retries
    sticky.partitioning.linger.ms transaction.timeout.ms transactional.id
""")

# Settings of producers that a transaction decides, and that a connection may hold for its other users.
TRANSACTION_DECIDES = _split_names("""
    acks delivery.timeout.ms enable.gapless.guarantee enable.idempotence message.timeout.ms request.required.acks
    transaction.timeout.ms transactional.id
""")

# Properties of librdkafka's internals, without a counterpart in the Java client, which are left out without a warning.
LIBRDKAFKA_ONLY = _split_names("""
    api.version.fallback.ms api.version.request api.version.request.timeout.ms broker.address.family broker.address.ttl
    broker.version.fallback builtin.features consume.callback.max.messages coordinator.query.interval.ms debug
    default.topic.config enable.partition.eof enable.random.seed enable.sparse.connections enabled_events
    error_cb fetch.error.backoff.ms
    fetch.queue.backoff.ms https.ca.location https.ca.pem internal.termination.signal log.connection.close log.queue
    log.thread.name log_cb log_level logger max.in.flight max.in.flight.requests.per.connection message.copy.max.bytes
    message.max.bytes oauth_cb plugin.library.paths queued.max.messages.kbytes queued.min.messages receive.message.max.bytes
    reconnect.backoff.jitter.ms socket.blocking.max.ms socket.keepalive.enable socket.max.fails socket.nagle.disable
    ssl.engine.id ssl.engine.location ssl.providers statistics.interval.ms stats_cb throttle_cb
    topic.metadata.propagation.max.ms topic.metadata.refresh.fast.cnt topic.metadata.refresh.fast.interval.ms
    topic.metadata.refresh.sparse
""")

ALL_BROKERS: Mapping[str, Any] = {"enable.sparse.connections": False}
"""Settings of a client that makes few requests and ends: it connects to each broker as soon as it knows it. A connection's own
``enable.sparse.connections`` takes precedence.

By default, librdkafka has one connection, and opens the next one 50 ms later at the earliest. When it first learns the brokers'
addresses, it closes the connection on which it asked, and the request for a coordinator may then wait for a timer of 500 ms. It
also repeats ``InitProducerId`` to one broker for ever, even if that one never answers (confluentinc/librdkafka#3848)."""

# Name in librdkafka -> name in the Java client. If two names have one counterpart, the later line takes precedence.
JAVA_NAMES = {
    "check.crcs": "check.crcs",
    "client.dns.lookup": "client.dns.lookup",
    "client.id": "client.id",
    "client.rack": "client.rack",
    "connections.max.idle.ms": "connections.max.idle.ms",
    "enable.metrics.push": "enable.metrics.push",
    "fetch.max.bytes": "fetch.max.bytes",
    "fetch.message.max.bytes": "max.partition.fetch.bytes",
    "max.partition.fetch.bytes": "max.partition.fetch.bytes",
    "fetch.min.bytes": "fetch.min.bytes",
    "fetch.wait.max.ms": "fetch.max.wait.ms",
    "heartbeat.interval.ms": "heartbeat.interval.ms",
    "max.poll.interval.ms": "max.poll.interval.ms",
    "metadata.recovery.rebootstrap.trigger.ms": "metadata.recovery.rebootstrap.trigger.ms",
    "metadata.recovery.strategy": "metadata.recovery.strategy",
    "topic.metadata.refresh.interval.ms": "metadata.max.age.ms",
    "metadata.max.age.ms": "metadata.max.age.ms",
    "reconnect.backoff.max.ms": "reconnect.backoff.max.ms",
    "reconnect.backoff.ms": "reconnect.backoff.ms",
    "retry.backoff.max.ms": "retry.backoff.max.ms",
    "retry.backoff.ms": "retry.backoff.ms",
    "session.timeout.ms": "session.timeout.ms",
    "socket.connection.setup.timeout.ms": "socket.connection.setup.timeout.ms",
    "socket.receive.buffer.bytes": "receive.buffer.bytes",
    "socket.send.buffer.bytes": "send.buffer.bytes",
    "socket.timeout.ms": "request.timeout.ms",
}

# Values for "off" and "the system's default" in librdkafka -> those of the Java client.
_OFF_IN_JAVA = {
    ("connections.max.idle.ms", "0"): "-1",
    ("receive.buffer.bytes", "0"): "-1",
    ("send.buffer.bytes", "0"): "-1",
}

_LOGIN_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}

_SECURITY = _split_names("""
    bootstrap.servers metadata.broker.list security.protocol sasl.mechanism sasl.mechanisms sasl.username sasl.password
    sasl.kerberos.service.name ssl.ca.location ssl.ca.pem ssl.certificate.location ssl.certificate.pem ssl.key.location
    ssl.key.pem ssl.key.password ssl.keystore.location ssl.keystore.password ssl.endpoint.identification.algorithm
    enable.ssl.certificate.verification
""")

_SECRET = re.compile(
    r"password|passphrase|secret|jaas|token|\.oauthbearer\.config|key\.pem|ssl\.key\.(?!location)|keystore\.key$", re.IGNORECASE
)
_PROTOCOL_PREFIX = re.compile(r"^[A-Za-z_]+://")
_PROTOCOLS = ("plaintext", "ssl", "sasl_plaintext", "sasl_ssl")


@dataclass(frozen=True)
class JavaConfig:
    """The Java client's settings for a connection, without the prefix ``kafka.`` of Spark's options.

    :param options: name -> value. It may contain passwords and keys, so it must not be logged; ``repr`` hides it.
    :param ignored: properties of the connection without a counterpart in the Java client, sorted, for a warning.
    """

    options: Mapping[str, str] = field(repr=False)
    ignored: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"JavaConfig(options={redact_config(self.options)!r}, ignored={self.ignored!r})"


def make_java_config(config: Mapping[str, Any], *, conn_id: str = "kafka_default", inline_files: bool = False) -> JavaConfig:
    """Return the Java client's settings for Spark's Kafka source, translated from a librdkafka configuration.

    Covered: brokers, PLAIN, SCRAM-SHA-256 and SCRAM-SHA-512, TLS with PEM files or texts or a PKCS#12 keystore, client id and
    rack, timeouts, backoffs, buffer and fetch sizes. Keys that begin with ``java.`` are the Java client's own settings. They are
    passed on without the prefix, and take precedence over the translation; OAUTHBEARER and GSSAPI are configured in this way.
    Settings that the window decides (``group.id``, ``auto.offset.reset``, ``isolation.level`` ...) are never passed on, not even
    with the prefix.

    :param config: the extra of the ``kafka`` connection.
    :param conn_id: the connection's name, for the error message.
    :param inline_files: True to put the text of ``ssl.ca.location`` into the options instead of its path, for executors on
        machines without that file. The client's certificate and key are always passed as text, because the Java client needs
        both in one store.
    :raises ConnectionInvalid: the Java client does not support the configuration: verification of certificates is switched off,
        the mechanism is not listed above, one half of a key pair is missing, or a file is unreadable.
    """
    by_hand = {
        key[len(JAVA_PREFIX) :]: format_setting(value).strip() for key, value in config.items() if key.startswith(JAVA_PREFIX)
    }
    source = _Source(config, by_hand, conn_id)
    options = {"bootstrap.servers": _read_bootstrap_servers(source), "allow.auto.create.topics": "false"}
    for name, java_name in JAVA_NAMES.items():
        if name in config:
            value = format_setting(config[name]).strip()
            options[java_name] = _OFF_IN_JAVA.get((java_name, value), value)
    options |= _make_security_options(source, inline_files)
    options |= {name: value for name, value in by_hand.items() if name not in WINDOW_DECIDES}
    return JavaConfig(options, _list_ignored(config, by_hand))


def make_consumer_config(config: Mapping[str, Any], **overrides: object) -> dict[str, Any]:
    """Return the settings of a confluent-kafka ``Consumer`` that reads frozen offset ranges.

    Four settings are fixed: no auto commit, ``auto.offset.reset=error``, read_committed, and partition EOF events. Checksums of
    records are checked unless the connection sets ``check.crcs``, as in the Java client. Settings of producers, of groups and of
    the Java client are left out, so that librdkafka logs no warnings about them.

    :param config: the extra of the ``kafka`` connection.
    :param overrides: settings that take precedence over the connection's, as ``**{"group.id": "x"}``. By default, and if it is
        blank, ``group.id`` is a group that no consumer joins or commits to.
    :raises ValueError: an override contradicts one of the fixed settings.
    """
    forced = {
        "enable.auto.commit": False,
        "auto.offset.reset": "error",
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
    }
    for name, value in forced.items():
        if name in overrides and format_setting(overrides[name]).strip() != format_setting(value):
            raise ValueError(f"`{name}` of a window's consumer is always {value!r}, not {overrides[name]!r}")
    # A blank group would end the whole process in confluent-kafka, before the check of `group_id` can name it.
    group = str(overrides.get("group.id", ""))
    group = group if group.partition("\0")[0].strip() else DEFAULT_GROUP_ID
    given = {"check.crcs": True} | _remove_settings(config, PRODUCER_ONLY | WINDOW_DECIDES)
    return given | overrides | {"group.id": group} | forced


def make_producer_config(config: Mapping[str, Any], **overrides: object) -> dict[str, Any]:
    """Return the settings of a confluent-kafka ``Producer``: those of the connection without those of consumers, of the Java
    client, and of transactions.

    :param config: the extra of the ``kafka`` connection. Its ``transactional.id`` is left out, because producers that share an id
        fence each other. So are ``acks`` and ``enable.idempotence``, with which there would be no transactions, and its timeouts,
        which are those of the window.
    :param overrides: settings that take precedence over the connection's, as ``**{"transactional.id": "x"}``.
    """
    return _remove_settings(config, CONSUMER_ONLY | TRANSACTION_DECIDES) | overrides


def make_admin_config(config: Mapping[str, Any], **overrides: object) -> dict[str, Any]:
    """Return the settings of a confluent-kafka ``AdminClient``: those of the connection without those of consumers, producers and
    Java.

    :param config: the extra of the ``kafka`` connection.
    :param overrides: settings that take precedence over the connection's.
    """
    return _remove_settings(config, CONSUMER_ONLY | PRODUCER_ONLY | {"allow.auto.create.topics"}) | overrides


def redact_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy for display: passwords, private keys, tokens and JAAS texts are replaced by ``***``.

    :param config: settings of either client, with or without ``java.`` or ``kafka.`` prefixes.
    """
    return {name: "***" if _SECRET.search(name) else value for name, value in config.items()}


def find_unreadable_file(config: Mapping[str, Any]) -> str:
    """Return the setting of a client that names a missing or unreadable file, as a clause with the reason; "" without one."""
    for name in sorted(name for name in config if name.startswith("ssl.") and name.endswith(".location")):
        path = Path(str(config[name]))
        try:
            if not path.is_dir():
                path.open("rb").close()
        except OSError as error:
            if str(path) != "probe":  # librdkafka looks for the certificates of the system
                return f"its `{name}` is {path}, which cannot be read on {socket.gethostname()}: {error.strerror}"
    return ""


def describe_identity(config: Mapping[str, Any]) -> str:
    """Return user, mechanism and protocol of a client, for error messages. They contain no secrets."""
    protocol = str(config.get("security.protocol", "plaintext")).upper()
    if protocol.startswith("SASL"):
        mechanism = config.get("sasl.mechanism") or config.get("sasl.mechanisms") or "GSSAPI"
        return f"user `{config.get('sasl.username', '')}` ({mechanism} over {protocol})"
    return "the client's certificate (SSL)" if protocol == "SSL" else "the anonymous user (PLAINTEXT)"


@dataclass(frozen=True)
class _Source:
    """The settings of a connection, as they are translated for Java.

    :param config: the settings for librdkafka.
    :param by_hand: the settings for Java that the connection gives itself (``java.``), without this prefix.
    :param conn_id: the connection, for messages.
    """

    config: Mapping[str, Any]
    by_hand: Mapping[str, str]
    conn_id: str

    def get(self, *names: str) -> str:
        """Return the first of these properties that is set, as text."""
        return next((format_setting(self.config[name]).strip() for name in names if self.config.get(name) not in (None, "")), "")

    def is_set_in_java(self, prefix: str) -> bool:
        """Return True if the connection itself gives a setting for Java with this prefix."""
        return any(name.startswith(prefix) for name in self.by_hand)

    def make_invalid_error(self, detail: str, action: str) -> ConnectionInvalid:
        """Return the error for the connection."""
        return ConnectionInvalid(self.conn_id, detail, action)


def _remove_settings(config: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names and not name.startswith(JAVA_PREFIX)}


def _list_ignored(config: Mapping[str, Any], by_hand: Mapping[str, str]) -> tuple[str, ...]:
    silent = WINDOW_DECIDES | PRODUCER_ONLY | LIBRDKAFKA_ONLY | _SECURITY | JAVA_NAMES.keys()
    unheard = {
        name
        for name in config
        if name not in silent and not name.startswith((JAVA_PREFIX, "sasl.oauthbearer.", "sasl.kerberos."))
    }
    return tuple(sorted(unheard | {JAVA_PREFIX + name for name in by_hand if name in WINDOW_DECIDES}))


def find_bootstrap_problem(config: Mapping[str, Any]) -> str:
    """Return the problem of an address in ``bootstrap.servers``, as the end of a sentence; "" without one.

    librdkafka does not raise for such an address. It logs a line, passes over all addresses from there on, and its requests time
    out.
    """
    protocol = format_setting(config.get("security.protocol", "plaintext")).lower()
    for server in format_setting(config.get("bootstrap.servers") or config.get("metadata.broker.list") or "").split(","):
        prefix, _, address = server.strip().rpartition("://")
        shown = f"`{server.strip()}` in its `bootstrap.servers`"
        if prefix and prefix.lower() not in _PROTOCOLS:
            return f"{shown} is the address of no Kafka broker"
        if prefix and prefix.lower() != protocol:
            return f"{shown} has another protocol than `security.protocol`, which is `{protocol}`"
        if re.search(r"[\s;|]", address):
            return f"{shown} names several addresses; commas separate them"
        host, colon, port = address.rpartition(":")
        is_ipv6_without_port = address.endswith("]") or (":" in host and not host.endswith("]"))
        if colon and not is_ipv6_without_port and not (port.isdecimal() and 0 < int(port) < 1 << 16):
            return f"{shown} has `{port}` in place of a port"
    return ""


def _read_bootstrap_servers(source: _Source) -> str:
    servers = source.get("bootstrap.servers", "metadata.broker.list")
    if not servers and not source.by_hand.get("bootstrap.servers"):
        raise source.make_invalid_error(
            "its extra names no brokers",
            f'Set `bootstrap.servers` in the extra of `{source.conn_id}`, as {{"bootstrap.servers": "host:9092"}}',
        )
    return ",".join(_format_host_port(server.strip()) for server in servers.split(",") if server.strip())


def _format_host_port(server: str) -> str:
    # librdkafka accepts an address with a protocol, or without a port. The Java client does not.
    server = _PROTOCOL_PREFIX.sub("", server)
    has_port = server.rpartition("]")[2].startswith(":") if server.startswith("[") else ":" in server
    return server if has_port else f"{server}:9092"


def _make_security_options(source: _Source, inline_files: bool) -> dict[str, str]:
    protocol = source.by_hand.get("security.protocol", source.get("security.protocol") or "plaintext").upper()
    options = {"security.protocol": protocol}
    if protocol.startswith("SASL_"):
        options |= _make_sasl_options(source)
    if protocol.endswith("SSL"):
        options |= _make_truststore_options(source, inline_files) | _make_keystore_options(source)
        algorithm = source.get("ssl.endpoint.identification.algorithm")
        if algorithm:
            options["ssl.endpoint.identification.algorithm"] = "" if algorithm.lower() == "none" else algorithm.lower()
    return options


def _make_sasl_options(source: _Source) -> dict[str, str]:
    mechanism = source.get("sasl.mechanisms", "sasl.mechanism").upper()
    service = source.get("sasl.kerberos.service.name")
    by_hand = {"sasl.mechanism": mechanism} if mechanism else {}
    if service:
        by_hand["sasl.kerberos.service.name"] = service
    if source.by_hand.keys() & {"sasl.mechanism", "sasl.jaas.config"}:
        return by_hand
    if mechanism not in _LOGIN_MODULES:
        raise source.make_invalid_error(
            f"SASL mechanism `{mechanism or 'GSSAPI (the default)'}` cannot be translated for Spark's Java client, "
            f"only {', '.join(_LOGIN_MODULES)} can",
            f"Set `sasl.mechanism` to one of these, or add the Java client's own settings to the extra of `{source.conn_id}` "
            "with the prefix `java.`, for instance `java.sasl.mechanism` and `java.sasl.jaas.config`",
        )
    missing = [name for name in ("sasl.username", "sasl.password") if source.config.get(name) in (None, "")]
    if missing:
        raise source.make_invalid_error(
            f"SASL mechanism `{mechanism}` needs {' and '.join(f'`{m}`' for m in missing)}",
            f"Set it in the extra of `{source.conn_id}`",
        )
    # Not by _text, because blanks at both ends belong to the password.
    user, password = (_quote_for_jaas(str(source.config[name])) for name in ("sasl.username", "sasl.password"))
    return {
        "sasl.mechanism": mechanism,
        "sasl.jaas.config": f"{_LOGIN_MODULES[mechanism]} required username={user} password={password};",
    }


def _quote_for_jaas(value: str) -> str:
    # The Java client parses JAAS texts with a StreamTokenizer: backslashes escape, and a line end would close the quotes.
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'


def _make_truststore_options(source: _Source, inline_files: bool) -> dict[str, str]:
    verify = source.get("enable.ssl.certificate.verification").lower()
    if verify in ("false", "f", "0") and "ssl.engine.factory.class" not in source.by_hand:
        raise source.make_invalid_error(
            "`enable.ssl.certificate.verification` is false, which Spark's Java client cannot do",
            "Name the brokers' certificate authority in `ssl.ca.location` instead; if only the host name does not match, set "
            "`ssl.endpoint.identification.algorithm` to `none`",
        )
    location, pem = source.get("ssl.ca.location"), source.get("ssl.ca.pem")
    if source.is_set_in_java("ssl.truststore.") or location.lower() == "probe" or not (location or pem):
        return {}  # the user's own store, or the JVM's default one
    if pem or inline_files:
        return {
            "ssl.truststore.type": "PEM",
            "ssl.truststore.certificates": pem or read_pem(location, "ssl.ca.location", source.make_invalid_error),
        }
    read_pem(location, "ssl.ca.location", source.make_invalid_error)
    return {"ssl.truststore.type": "PEM", "ssl.truststore.location": location}


def _make_keystore_options(source: _Source) -> dict[str, str]:
    if source.is_set_in_java("ssl.keystore."):
        return {}
    chain = source.get("ssl.certificate.pem") or read_pem(
        source.get("ssl.certificate.location"), "ssl.certificate.location", source.make_invalid_error
    )
    key = source.get("ssl.key.pem") or read_pem(source.get("ssl.key.location"), "ssl.key.location", source.make_invalid_error)
    if bool(chain) != bool(key):
        found, missing = ("certificate", "key") if chain else ("key", "certificate")
        raise source.make_invalid_error(
            f"it has a client {found} but no client {missing}",
            f"Set `ssl.{missing}.location` or `ssl.{missing}.pem` as well, or neither of the two pairs",
        )
    if chain:
        password = str(source.config.get("ssl.key.password") or "")
        return {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.certificate.chain": chain,
            "ssl.keystore.key": to_pkcs8(key, password, source.make_invalid_error),
        }
    location = source.get("ssl.keystore.location")
    if not location:
        return {}
    password = str(source.config.get("ssl.keystore.password") or "")
    return {"ssl.keystore.type": "PKCS12", "ssl.keystore.location": location, "ssl.keystore.password": password}


# --- PEM texts for the Java client --------------------------------------------------------------------------------------

Invalid = Callable[[str, str], ConnectionInvalid]


def read_pem(path: str, name: str, invalid: Invalid) -> str:
    """Return the text of a PEM file; "" for an empty path.

    :param path: the file, or "".
    :param name: the property that contains the path.
    :param invalid: returns the error to raise, from a description of the problem and its remedy.
    :raises ConnectionInvalid: the file cannot be read, or contains no PEM text.
    """
    if not path:
        return ""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise invalid(
            f"`{name}` names `{path}`, which cannot be read: {error.strerror}", "Name a readable PEM file on this machine"
        ) from None
    if "-----BEGIN " not in text:
        raise invalid(
            f"`{name}` names `{path}`, which is not a PEM file", "Convert it, for instance with `openssl x509 -outform pem`"
        )
    return text


def to_pkcs8(pem: str, password: str, invalid: Invalid) -> str:
    """Return a private key as unencrypted PKCS#8, the only form that the Java client reads with every version of Java.

    OpenSSL, and so librdkafka, also reads the traditional forms (``BEGIN RSA PRIVATE KEY``) and encrypted keys. The result is as
    secret as the encrypted key together with its password, which would be passed on otherwise.

    :param pem: the text of the key.
    :param password: its password, or "".
    :param invalid: returns the error to raise, from a description of the problem and its remedy.
    :raises ConnectionInvalid: the key cannot be decrypted with this password.
    """
    if "-----BEGIN PRIVATE KEY-----" in pem:
        return pem
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    encrypted = "ENCRYPTED" in pem
    try:
        key = serialization.load_pem_private_key(pem.encode(), password.encode() if encrypted and password else None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        detail = (
            "its client key cannot be decrypted with `ssl.key.password`"
            if encrypted
            else "its client key is not a readable PEM private key"
        )
        raise invalid(detail, "Check `ssl.key.location` or `ssl.key.pem`, and `ssl.key.password`") from None
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()).decode()
