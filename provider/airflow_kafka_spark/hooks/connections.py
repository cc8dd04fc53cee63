"""Look up Airflow connections, with one clear error for a connection that is missing or of another type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import ConnectionInvalid

if TYPE_CHECKING:
    from airflow.sdk import Connection

GENERIC = "generic"
"""The type with which Airflow's command line stores a connection of a type that no installed provider declares."""
_SYNONYMS = {"postgresql": "postgres", "mariadb": "mysql"}


def look_up(
    conn_id: str, *types: str, option: str = "conn_id", hint: str = "", get: Callable[[str], Connection] | None = None
) -> Connection:
    """Return an Airflow connection of one of these types.

    :param conn_id: its name.
    :param types: the accepted types, the usual one first. Messages do not name :data:`GENERIC`.
    :param option: the option in which the user gave the name; default ``conn_id``.
    :param hint: text for the error if the connection is not defined: the fields that one of the first type needs; default none.
    :param get: returns a connection by its name; default: the ``get_connection`` of Airflow's hooks.
    :raises ConnectionInvalid: it is not defined, or of another type.
    """
    from airflow.providers.common.compat.sdk import BaseHook

    named = " or ".join(f"`{kind}`" for kind in types if kind != GENERIC)
    with require_connection(conn_id, f"`{types[0]}` ({hint})" if hint else named, option=option):
        connection = (get or BaseHook.get_connection)(conn_id)
    if get_connection_type(connection) not in types:
        raise ConnectionInvalid(conn_id, f"it is of type `{connection.conn_type}`", f"Use a connection of type {named}")
    require_extra(connection)
    return connection


def require_extra(connection: Connection) -> dict[str, Any]:
    """Return the extra of a connection.

    :raises ConnectionInvalid: it is a list, or another value of JSON without names.
    """
    extra: object = connection.extra_dejson
    if not isinstance(extra, dict):
        found = f"its extra is a {type(extra).__name__}; expected a JSON object"
        raise ConnectionInvalid(connection.conn_id, found, 'Write `{"name": "value"}`')
    return extra


@contextmanager
def require_connection(conn_id: str, kind: str, *, option: str) -> Iterator[None]:
    """Raise one clear error if Airflow's code in this block does not find the connection.

    :param kind: the type of connection to add, as the error names it.
    :raises ConnectionInvalid: it is not defined.
    """
    from airflow.exceptions import AirflowNotFoundException

    try:
        yield
    except AirflowNotFoundException:
        if not str(conn_id).strip():
            raise ConnectionInvalid(conn_id, f"its name in `{option}` is empty", f"Name a connection of type {kind}") from None
        action = f"Add a connection `{conn_id}` of type {kind}, or correct `{option}`"
        raise ConnectionInvalid(conn_id, "it is not defined", action) from None


def get_connection_type(connection: Connection) -> str:
    """Return the type of a connection. Synonyms (``postgresql``, ``mariadb``) are replaced by the usual name."""
    kind = connection.conn_type or ""
    return _SYNONYMS.get(kind, kind)


def format_setting(value: object) -> str:
    """Return a value of a connection's extra as Java and librdkafka write it: ``true``, not ``True``."""
    return str(value).lower() if isinstance(value, bool) else str(value)
