"""Schema registries with Confluent's REST API, from an Airflow connection of type ``schema_registry``."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from airflow.providers.common.compat.sdk import BaseHook

from airflow_kafka_spark.errors import ConnectionInvalid, KafkaSparkError, RegistryUnavailable
from airflow_kafka_spark.hooks.connections import TEST_SECONDS, look_up, name_other_server_at
from airflow_kafka_spark.hooks.tasks.registry_client import RegistryClient, RegistryRequests, check_list

if TYPE_CHECKING:
    from airflow.sdk import Connection

CONNECTION_TYPE = "schema_registry"
DEFAULT_PORT = 8081
_DEFAULTS: dict[str, Any] = {"timeout": 30, "max.retries": 3, "retries.wait.ms": 500, "retries.max.wait.ms": 5000}
_NUMBERS = ("timeout", "max.retries", "retries.wait.ms", "retries.max.wait.ms", "cache.capacity", "cache.latest.ttl.sec")


class SchemaRegistryHook(RegistryRequests, BaseHook):
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
        config["url"], user_info = self._split_credentials(extra.get("url") or self._make_address(connection))
        if (connection.login or connection.password) and "basic.auth.user.info" not in config:
            config["basic.auth.user.info"] = f"{connection.login or ''}:{connection.password or ''}"
        if user_info and config.setdefault("basic.auth.user.info", user_info) != user_info:
            raise ConnectionInvalid(self.conn_id, "it has one login in its address and another one beside it", "Remove one")
        for name in _NUMBERS:
            if isinstance(value := config.get(name), str):
                try:
                    config[name] = float(value) if "." in value else int(value)
                except ValueError:
                    raise ConnectionInvalid(self.conn_id, f"`{name}` is {value!r} in its extra; expected a number") from None
        return config

    def _split_credentials(self, url: str) -> tuple[str, str]:
        """Return the addresses without credentials, and the first ones as ``login:password``; empty without any.

        The client's library would log addresses with their passwords.

        :raises ConnectionInvalid: they have characters that end them, or end the address.
        """
        addresses, found = [], []
        for address in re.split(r",\s*(?=https?://)", str(url)):
            scheme, separator, rest = address.partition("://")
            user_info, at, host = rest.rpartition("@")
            if re.search(r"[/?#@,\s]", user_info):
                action = "Encode it (`@` is %40, `/` %2F, `,` %2C), or give login and password as those of the connection"
                raise ConnectionInvalid(self.conn_id, "a character before the `@` of its address has to be encoded", action)
            addresses.append(f"{scheme}{separator}{host}" if at else address)
            found += [":".join(unquote(part) for part in user_info.partition(":")[::2])] if at else []
        return ",".join(addresses), next(iter(found), "")

    def _make_address(self, connection: Connection) -> str:
        host = (connection.host or "").rstrip("/")
        if not host:
            raise ConnectionInvalid(
                self.conn_id, "it has no host", "Give the registry's address as host, or as `url` in the extra"
            )
        scheme, _, rest = host.rpartition("://")
        name, slash, path = rest.partition("/")
        # The host may have the port already, as in the address of a browser.
        port = connection.port or (None if scheme else DEFAULT_PORT)
        is_complete = port is None or re.search(r":\d+$", name) is not None
        return f"{scheme or connection.schema or 'http'}://{name}{'' if is_complete else f':{port}'}{slash}{path}"

    @property
    def secrets(self) -> tuple[str, ...]:
        """The password of the connection."""
        return (self.connection.password,) if self.connection.password else ()

    def make_task_client(self) -> RegistryClient:
        """Return the client with which tasks ask the registry.

        :raises ConnectionInvalid: the connection cannot be used.
        """
        return RegistryClient(self.conn_id, self.config)

    def test_connection(self) -> tuple[bool, str]:
        """Return True if the registry answers within ten seconds, otherwise False, and a message for Airflow's UI."""
        try:
            once = type(self)(self.conn_id)
            once.config.update({"max.retries": 0, "timeout": min(float(once.config["timeout"]), TEST_SECONDS)})
            with once._translate_errors("its subjects"):
                check_list(once.client.get_subjects(limit=1))
        except RegistryUnavailable as e:
            return False, name_other_server_at(str(e), once.url.split(",")[0])
        except KafkaSparkError as e:
            return False, str(e)
        return True, f"The schema registry at {self.url} answers"

    def __repr__(self) -> str:
        return f"{type(self).__name__}(conn_id={self.conn_id!r})"
