"""Authentication and encryption of an embedded Kafka."""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from airflow_kafka_spark.errors import ServerInvalid, TestingUnavailable

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
        return self.protocol.startswith("SASL")

    @property
    def tls(self) -> bool:
        return self.protocol.endswith("SSL")

    def make_certificates(self, directory: Path) -> None:
        """Write ``ca.pem``, ``server.pem`` (key and certificate), ``client.crt`` and ``client.key``; nothing without TLS."""
        if not self.tls:
            return
        try:
            import trustme
            from cryptography.hazmat.primitives import serialization
        except ImportError as error:
            raise TestingUnavailable("Kafka with TLS", error.name or "trustme") from error
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

    def broker_properties(self, listener: str, certificates: Path) -> Iterator[tuple[str, str]]:
        """Return the broker's settings of this listener."""
        prefix = f"listener.name.{listener.lower()}."
        if self.sasl:
            yield f"{prefix}sasl.enabled.mechanisms", ",".join(self.mechanisms)
            for mechanism in self.mechanisms:
                if mechanism == "PLAIN":
                    users = " ".join(f'user_{name}="{_quoted(password)}"' for name, password in self.users.items())
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

    def scram_records(self) -> Iterator[str]:
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

    def client_settings(self, user: str | None, mechanism: str | None, certificates: Path) -> dict[str, str]:
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


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"')
