"""Requests to a schema registry with Confluent's REST API. Tasks that write events register the schemas of tables by them."""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import ConnectionInvalid, KafkaSparkError, PackageMissing, RegistryRefused, RegistryUnavailable
from airflow_kafka_spark.hooks.kafka.config import find_unreadable_file

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient

_SECRET = re.compile("(?i)password|secret|token|user.info|bearer.auth.custom")
_TRY_AGAIN = (408, 429)
_NOT_FOUND = 404
UNEXPLAINED = "the registry does not say why"


def _silence_http() -> None:
    """Keep the lines of single requests out of a task's log: `404` is a usual answer there, which shows that a schema is not
    registered yet. A level that the user has set stays.
    """
    for name in ("httpx", "httpx2"):
        if (logger := logging.getLogger(name)).level == logging.NOTSET:
            logger.setLevel(logging.WARNING)


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


class RegistryRequests(ABC):
    """The requests to a schema registry, and the errors of them.

    :ivar conn_id: the Airflow connection, for messages.
    """

    conn_id: str

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The configuration of Confluent's client. It contains passwords."""

    @property
    def secrets(self) -> tuple[str, ...]:
        """Passwords beside those in :attr:`config`, which no message may contain."""
        return ()

    @property
    def url(self) -> str:
        """The registry's address, for display. Credentials in it are part of the configuration."""
        return str(self.config["url"])

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
        _silence_http()
        try:
            return SchemaRegistryClient(self.config)
        except (ValueError, TypeError, OSError) as e:
            if missing := find_unreadable_file(self.config):
                # Python's SSL names no file.
                raise ConnectionInvalid(self.conn_id, missing) from None
            detail = self._scrub(str(e)) or type(e).__name__
            raise ConnectionInvalid(self.conn_id, f"the registry's client refuses it: {detail}") from None

    # --- requests ----------------------------------------------------------------------------------------------------

    def list_versions(self, subject: str, known: Sequence[RegisteredSchema] = ()) -> tuple[RegisteredSchema, ...]:
        """Return all schemas of a subject, ascending by version. Deleted ones that the registry still has are included, because
        records refer to them.

        :param known: schemas that are known already, and not requested again.
        :raises RegistryRefused: there is no such subject, or it may not be read.
        :raises RegistryUnavailable: no answer.
        """
        have = {schema.version: schema for schema in known if schema.subject == subject}
        with self._translate_errors(f"the versions of subject `{subject}`"):
            numbers = sorted(check_list(self.client.get_versions(subject, deleted=True)))
        return tuple(have[n] if n in have else self.get_version(subject, n) for n in numbers)

    def knows(self, subject: str) -> bool:
        """Return True if the subject exists.

        :raises RegistryRefused: it may not be read.
        :raises RegistryUnavailable: no answer.
        """
        try:
            with self._translate_errors(f"the versions of subject `{subject}`"):
                return bool(check_list(self.client.get_versions(subject)))
        except RegistryRefused as e:
            if e.status == _NOT_FOUND:
                return False
            raise

    def get_version(self, subject: str, version: int | str = "latest") -> RegisteredSchema:
        """Return one schema of a subject, by default the latest. Errors are those of :meth:`list_versions`."""
        with self._translate_errors(f"version {version} of subject `{subject}`"):
            if version == "latest":
                found = self.client.get_latest_version(subject)
            else:
                found = self.client.get_version(subject, int(version), deleted=True)
            number, schema_id, text = int(found.version), _check_id(found.schema_id), _check_text(found.schema.schema_str)  # type: ignore[arg-type]
        references: list[str] = []
        self._collect(found.schema.references or (), references, 0)
        return RegisteredSchema(subject, number, schema_id, text, tuple(references), found.schema.schema_type or "AVRO")

    def _collect(self, references: Sequence[Any], found: list[str], depth: int) -> None:
        for reference in references if depth < 20 else ():
            with self._translate_errors(
                f"version {reference.version} of subject `{reference.subject}`, which another schema uses"
            ):
                schema = self.client.get_version(reference.subject, reference.version, deleted=True).schema
                text = _check_text(schema.schema_str)
            self._collect(schema.references or (), found, depth + 1)
            if text not in found:
                found.append(text)

    def find_incompatibilities(self, subject: str, text: str, kind: str = "AVRO", normalize: bool = False) -> list[str]:
        """Return the reasons why a schema is incompatible with a subject, by the subject's compatibility level; empty if it is
        compatible, or if the subject does not exist yet.

        :param kind: ``AVRO``, ``JSON`` or ``PROTOBUF``.
        :param normalize: True to compare schemas in the registry's normal form, without differences of notation.
        """
        from confluent_kafka.schema_registry import Schema

        body = Schema(text, kind).to_dict()
        # This request compares as many versions as the level demands. The client's method compares one, and returns no reasons.
        path = f"compatibility/subjects/{_quote(subject)}/versions?verbose=true{'&normalize=true' if normalize else ''}"
        try:
            with self._translate_errors(f"to say whether a schema fits subject `{subject}`"):
                answer = self.client._rest_client.post(path, body=body)
                if answer["is_compatible"]:
                    return []
                return [str(m) for m in answer.get("messages") or ()] or [UNEXPLAINED]
        except RegistryRefused as e:
            if e.status == _NOT_FOUND:
                return []
            raise

    def register(self, subject: str, text: str, kind: str = "AVRO", normalize: bool = False) -> int:
        """Register a schema and return its id. A schema that is registered already keeps its id.

        :param kind: ``AVRO``, ``JSON`` or ``PROTOBUF``.
        :param normalize: True to ignore differences of notation, as ``normalize.schemas`` of Confluent's serializers.
        :raises RegistryRefused: it is not compatible with the subject's other schemas, or may not be registered.
        """
        from confluent_kafka.schema_registry import Schema

        with self._translate_errors(f"to register a schema for subject `{subject}`"):
            return _check_id(self.client.register_schema(subject, Schema(text, kind), normalize))

    def find_id_of(self, subject: str, text: str, kind: str = "AVRO", normalize: bool = False) -> int | None:
        """Return the id of a schema under a subject; None if it is not registered there. Nothing is registered.

        :param kind: ``AVRO``, ``JSON`` or ``PROTOBUF``.
        :param normalize: as for :meth:`register`.
        """
        from confluent_kafka.schema_registry import Schema

        try:
            with self._translate_errors(f"the id of a schema of subject `{subject}`"):
                return _check_id(self.client.lookup_schema(subject, Schema(text, kind), normalize).schema_id)
        except RegistryRefused as e:
            if e.status == _NOT_FOUND:
                return None
            raise

    # --- errors ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _translate_errors(self, what: str) -> Iterator[None]:
        """Raise this package's errors, without passwords, instead of the client's in this block."""
        client = self.client
        from confluent_kafka.schema_registry.error import OAuthTokenError, SchemaRegistryError

        assert client is not None
        try:
            yield
        except SchemaRegistryError as e:
            raise self._make_refusal(what, e.http_status_code, e.error_code, e.error_message) from None
        except OAuthTokenError as e:
            raise RegistryRefused(self.conn_id, self.url, what, self._scrub(str(e)), 401, action=_CREDENTIALS) from None
        except Exception as e:
            if type(e).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2"):
                detail = self._scrub(str(e)) or type(e).__name__
                raise RegistryUnavailable(self.conn_id, self.url, _describe_request(what), detail) from None
            if isinstance(e, (ValueError, KeyError, TypeError, AttributeError)):
                detail = "its answer is not that of a schema registry"
                raise RegistryRefused(self.conn_id, self.url, what, detail, 200, action=_ADDRESS) from None
            raise

    def _make_refusal(self, what: str, status: int, code: object, message: object) -> KafkaSparkError:
        number = code if isinstance(code, int) else -1
        reason = self._scrub(str(message or "without a reason"))[:500]
        if re.search(r"<!doctype html|<html", reason, re.IGNORECASE):
            reason = "it answered with a web page"
        detail = f"{reason} (HTTP {status}{f', code {number}' if number > 0 else ''})"
        if status in _TRY_AGAIN or status >= 500:
            return RegistryUnavailable(self.conn_id, self.url, _describe_request(what), detail)
        action = _CREDENTIALS if status in (401, 403) else _ADDRESS if status == _NOT_FOUND else ""
        if 300 <= status < 400:
            # The client follows no redirection.
            action = "Give the address that it redirects to, unless that is a page to log in, as host of the connection"
        return RegistryRefused(self.conn_id, self.url, what, detail, status, number, action)

    def _scrub(self, text: str) -> str:
        """Return ``text`` without the secrets of the connection."""
        secrets = {str(v) for k, v in self.config.items() if _SECRET.search(k) and v}
        secrets |= {s.partition(":")[2] for s in secrets if ":" in s} | set(self.secrets)
        for secret in sorted(filter(None, secrets), key=len, reverse=True):
            text = text.replace(secret, "***")
        return text


@dataclass(frozen=True)
class RegistryClient(RegistryRequests):
    """The client of a task. Picklable; it holds passwords, which its ``repr`` leaves out.

    :param conn_id: the Airflow connection, for messages.
    :param given: the configuration of Confluent's client.
    """

    conn_id: str
    given: dict[str, Any] = field(repr=False, hash=False)

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of Confluent's client."""
        return self.given

    def __getstate__(self) -> dict[str, Any]:
        # Confluent's client holds connections and a lock.
        return {name: value for name, value in self.__dict__.items() if name != "client"}


_CREDENTIALS = "Correct login and password of the connection, or what the user may do in the registry"
_ADDRESS = "Check the name of the subject, and that the address leads to the registry's REST API"


def _describe_request(what: str) -> str:
    return f"being asked {what}" if what.startswith("to ") else f"being asked for {what}"


def _check_id(number: object) -> int:
    """Return the id of a schema in an answer.

    :raises ValueError: the answer has no id, or one that does not fit into the header of a record.
    """
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 31:
        raise ValueError(f"found {number!r}, expected the id of a schema")
    return number


def _check_text(text: object) -> str:
    """Return the text of a schema in an answer.

    :raises ValueError: the answer has no text.
    """
    if not isinstance(text, str) or not text:
        raise ValueError(f"found {text!r}, expected a schema")
    return text


def check_list(answer: object) -> list[Any]:
    """Return an answer that is a list.

    :raises ValueError: it is not a list.
    """
    if not isinstance(answer, list):
        raise ValueError(f"found {answer!r}, expected a list")
    return answer


def _quote(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")
