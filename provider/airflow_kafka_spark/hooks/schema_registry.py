"""Schema registries with Confluent's REST API, from an Airflow connection of type ``schema_registry``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import BaseHook

from airflow_kafka_spark.errors import ConnectionInvalid, KafkaSparkError, PackageMissing, RegistryRefused, RegistryUnavailable
from airflow_kafka_spark.hooks.connections import look_up

if TYPE_CHECKING:
    from airflow.sdk import Connection
    from confluent_kafka.schema_registry import SchemaRegistryClient

CONNECTION_TYPE = "schema_registry"
DEFAULT_PORT = 8081
_DEFAULTS: dict[str, Any] = {"timeout": 30, "max.retries": 3, "retries.wait.ms": 500, "retries.max.wait.ms": 5000}
_NUMBERS = ("timeout", "max.retries", "retries.wait.ms", "retries.max.wait.ms", "cache.capacity", "cache.latest.ttl.sec")
_SECRET = re.compile("(?i)password|secret|token|user.info|bearer.auth.custom")
_TRY_AGAIN = (408, 429)
_NOT_FOUND = 404
NOT_TOLD = "the registry does not say why"


@dataclass(frozen=True)
class RegisteredSchema:
    """A schema of the registry.

    :param id: the id that records written with the schema contain.
    :param text: its JSON.
    :param references: texts of the schemas that it refers to, each after those that it refers to itself.
    :param kind: ``AVRO``, ``JSON`` or ``PROTOBUF``.
    """

    subject: str
    version: int
    id: int
    text: str
    references: tuple[str, ...] = ()
    kind: str = "AVRO"

    def __str__(self) -> str:
        return f"subject `{self.subject}`, version {self.version}"


class SchemaRegistryHook(BaseHook):
    """A client of a schema registry.

    The connection has the registry's address as host (``registry`` or ``https://registry/path``), port (8081 if the host has no
    scheme) and schema (``http``, the default, or ``https``), login and password for basic authentication, and all other settings
    in its extra by the names of Confluent's client: ``url`` (several separated by commas), ``basic.auth.user.info``,
    ``ssl.ca.location``, ``ssl.certificate.location``, ``ssl.key.location``, ``bearer.auth.credentials.source``, ``proxy``, ...
    A request without an answer is repeated ``max.retries`` times (3), with pauses that double from ``retries.wait.ms`` (500).
    Each try takes at most ``timeout`` seconds (30).

    :param conn_id: the Airflow connection; default ``schema_registry_default``.
    """

    conn_name_attr = "conn_id"
    default_conn_name = "schema_registry_default"
    conn_type = CONNECTION_TYPE
    hook_name = "Schema registry"

    def __init__(self, conn_id: str = default_conn_name) -> None:
        super().__init__()
        self.conn_id = conn_id

    @cached_property
    def connection(self) -> Connection:
        """:raises ConnectionInvalid: it is not defined or of another type."""
        return look_up(
            self.conn_id, CONNECTION_TYPE, option="registry", hint="host: the registry's address", get=self.get_connection
        )

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration of the client. It contains passwords.

        :raises ConnectionInvalid: the connection cannot be used.
        """
        connection = self.connection
        extra = connection.extra_dejson
        config = {**_DEFAULTS, **extra}
        config["url"] = extra.get("url") or self._address(connection)
        if (connection.login or connection.password) and "basic.auth.user.info" not in config:
            config["basic.auth.user.info"] = f"{connection.login or ''}:{connection.password or ''}"
        for name in _NUMBERS:
            if isinstance(value := config.get(name), str):
                try:
                    config[name] = float(value) if "." in value else int(value)
                except ValueError:
                    raise ConnectionInvalid(self.conn_id, f"`{name}` is {value!r} in its extra; expected a number") from None
        return config

    def _address(self, connection: Connection) -> str:
        host = (connection.host or "").rstrip("/")
        if not host:
            raise ConnectionInvalid(
                self.conn_id, "it has no host", "Give the registry's address as host, or as `url` in the extra"
            )
        if "://" not in host:
            return f"{connection.schema or 'http'}://{host}:{connection.port or DEFAULT_PORT}"
        scheme, _, rest = host.partition("://")
        name, slash, path = rest.partition("/")
        return f"{scheme}://{name}{f':{connection.port}' if connection.port else ''}{slash}{path}"

    @property
    def url(self) -> str:
        """The registry's address without credentials, for display."""
        return re.sub(r"//[^/@,]*@", "//", str(self.config["url"]))

    @cached_property
    def client(self) -> SchemaRegistryClient:
        """Confluent's own client.

        :raises ConnectionInvalid: the client does not accept the configuration.
        :raises PackageMissing: a package that it needs is missing.
        """
        try:
            from confluent_kafka.schema_registry import SchemaRegistryClient
        except ImportError as e:
            raise PackageMissing("The schema registry", e.name or "confluent-kafka[schemaregistry]", "avro") from None
        try:
            return SchemaRegistryClient(self.config)
        except (ValueError, TypeError, OSError) as e:
            detail = self._scrubbed(str(e)) or type(e).__name__
            raise ConnectionInvalid(self.conn_id, f"the registry's client refuses it: {detail}") from None

    # --- requests ----------------------------------------------------------------------------------------------------

    def versions(self, subject: str, known: Sequence[RegisteredSchema] = ()) -> tuple[RegisteredSchema, ...]:
        """Return all schemas of a subject, ascending by version. Deleted ones that the registry still has are included, because
        records refer to them.

        :param known: schemas that are known already, and not requested again.
        :raises RegistryRefused: there is no such subject, or it may not be read.
        :raises RegistryUnavailable: no answer.
        """
        have = {schema.version: schema for schema in known if schema.subject == subject}
        with self._asking(f"the versions of subject `{subject}`"):
            numbers = sorted(self.client.get_versions(subject, deleted=True))
        return tuple(have[n] if n in have else self.version(subject, n) for n in numbers)

    def knows(self, subject: str) -> bool:
        """Return True if the subject exists.

        :raises RegistryRefused: it may not be read.
        :raises RegistryUnavailable: no answer.
        """
        try:
            with self._asking(f"the versions of subject `{subject}`"):
                return bool(self.client.get_versions(subject))
        except RegistryRefused as e:
            if e.status == _NOT_FOUND:
                return False
            raise

    def version(self, subject: str, version: int | str = "latest") -> RegisteredSchema:
        """Return one schema of a subject, by default the latest. Errors are those of :meth:`versions`."""
        with self._asking(f"version {version} of subject `{subject}`"):
            if version == "latest":
                found = self.client.get_latest_version(subject)
            else:
                found = self.client.get_version(subject, int(version), deleted=True)
        references: list[str] = []
        self._collect(found.schema.references or (), references, 0)
        return RegisteredSchema(
            subject,
            int(found.version or 0),
            int(found.schema_id or 0),
            found.schema.schema_str or "",
            tuple(references),
            found.schema.schema_type or "AVRO",
        )

    def _collect(self, references: Sequence[Any], found: list[str], depth: int) -> None:
        for reference in references if depth < 20 else ():
            with self._asking(f"version {reference.version} of subject `{reference.subject}`, which another schema uses"):
                schema = self.client.get_version(reference.subject, reference.version, deleted=True).schema
            self._collect(schema.references or (), found, depth + 1)
            text = schema.schema_str or ""
            if text not in found:
                found.append(text)

    def incompatibilities(self, subject: str, text: str, kind: str = "AVRO", normalize: bool = False) -> list[str]:
        """Return the reasons why a schema is incompatible with a subject, by the subject's compatibility level; empty if it is
        compatible, or if the subject does not exist yet.

        :param kind: ``AVRO``, ``JSON`` or ``PROTOBUF``.
        :param normalize: True to compare schemas in the registry's normal form, without differences of notation.
        """
        from confluent_kafka.schema_registry import Schema

        body = Schema(text, kind).to_dict()
        # This request compares as many versions as the level demands. The client's method compares one, and returns no reasons.
        path = f"compatibility/subjects/{_quoted(subject)}/versions?verbose=true{'&normalize=true' if normalize else ''}"
        try:
            with self._asking(f"whether a schema fits subject `{subject}`"):
                answer = self.client._rest_client.post(path, body=body)
        except RegistryRefused as e:
            if e.status == _NOT_FOUND:
                return []
            raise
        if answer.get("is_compatible"):
            return []
        return [str(m) for m in answer.get("messages") or ()] or [NOT_TOLD]

    def register(self, subject: str, text: str, kind: str = "AVRO", normalize: bool = False) -> int:
        """Register a schema and return its id. A schema that is registered already keeps its id.

        :param kind: ``AVRO``, ``JSON`` or ``PROTOBUF``.
        :param normalize: True to ignore differences of notation, as ``normalize.schemas`` of Confluent's serializers.
        :raises RegistryRefused: it is not compatible with the subject's other schemas, or may not be registered.
        """
        from confluent_kafka.schema_registry import Schema

        with self._asking(f"to register a schema for subject `{subject}`"):
            return int(self.client.register_schema(subject, Schema(text, kind), normalize))

    def id_of(self, subject: str, text: str, kind: str = "AVRO", normalize: bool = False) -> int | None:
        """Return the id of a schema under a subject; None if it is not registered there. Nothing is registered.

        :param kind: ``AVRO``, ``JSON`` or ``PROTOBUF``.
        :param normalize: as for :meth:`register`.
        """
        from confluent_kafka.schema_registry import Schema

        try:
            with self._asking(f"for the id of a schema of subject `{subject}`"):
                found = self.client.lookup_schema(subject, Schema(text, kind), normalize)
        except RegistryRefused as e:
            if e.status == _NOT_FOUND:
                return None
            raise
        return int(found.schema_id or 0)

    def test_connection(self) -> tuple[bool, str]:
        """Return True if the registry answers within ten seconds, otherwise False, and a message for Airflow's UI."""
        try:
            once = type(self)(self.conn_id)
            once.config.update({"max.retries": 0, "timeout": min(float(once.config["timeout"]), 10)})
            with once._asking("its subjects"):
                once.client.get_subjects(limit=1)
        except KafkaSparkError as e:
            return False, str(e)
        return True, f"The schema registry at {self.url} answers"

    # --- errors ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Raise this package's errors, without passwords, instead of the client's in this block."""
        client = self.client
        from confluent_kafka.schema_registry.error import OAuthTokenError, SchemaRegistryError

        assert client is not None
        try:
            yield
        except SchemaRegistryError as e:
            raise self._refused(what, e.http_status_code, e.error_code, e.error_message) from None
        except OAuthTokenError as e:
            raise RegistryRefused(self.conn_id, self.url, what, self._scrubbed(str(e)), 401, action=_CREDENTIALS) from None
        except Exception as e:
            if type(e).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2"):
                detail = self._scrubbed(str(e)) or type(e).__name__
                raise RegistryUnavailable(self.conn_id, self.url, f"being asked for {what}", detail) from None
            if isinstance(e, (ValueError, KeyError, TypeError, AttributeError)):
                detail = "it answered something that a schema registry does not"
                raise RegistryRefused(self.conn_id, self.url, what, detail, 200, action=_ADDRESS) from None
            raise

    def _refused(self, what: str, status: int, code: object, message: object) -> KafkaSparkError:
        number = code if isinstance(code, int) else -1
        reason = self._scrubbed(str(message or "without a reason"))[:500]
        detail = f"{reason} (HTTP {status}{f', code {number}' if number > 0 else ''})"
        if status in _TRY_AGAIN or status >= 500:
            return RegistryUnavailable(self.conn_id, self.url, f"being asked for {what}", detail)
        action = _CREDENTIALS if status in (401, 403) else _ADDRESS if status == _NOT_FOUND else ""
        return RegistryRefused(self.conn_id, self.url, what, detail, status, number, action)

    def _scrubbed(self, text: str) -> str:
        """Return ``text`` without the secrets of the connection."""
        secrets = {str(v) for k, v in self.config.items() if _SECRET.search(k) and v}
        secrets |= {s.partition(":")[2] for s in secrets if ":" in s} | {self.connection.password or ""}
        secrets |= set(re.findall(r"//[^/@,]*:([^/@,]*)@", str(self.config["url"])))
        for secret in sorted(filter(None, secrets), key=len, reverse=True):
            text = text.replace(secret, "***")
        return text

    def __repr__(self) -> str:
        return f"{type(self).__name__}(conn_id={self.conn_id!r})"


_CREDENTIALS = "Correct login and password of the connection, or what the user may do in the registry"
_ADDRESS = "Check the name of the subject, and that the address leads to the registry's REST API"


def _quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")
