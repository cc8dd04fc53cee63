"""Sessions of the server that an Airflow connection of type ``postgres`` leads to, and the translation of its errors."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import KafkaSparkError, SinkRejected, SinkUnavailable
from airflow_kafka_spark.hooks.connections import look_up
from airflow_kafka_spark.hooks.postgres import APPLICATION, Name, PostgresServer, read_server, run
from airflow_kafka_spark.sinks.postgres import sql

if TYPE_CHECKING:
    import psycopg


@dataclass(frozen=True)
class SinkServer(PostgresServer):
    """The server of a sink.

    :param lock_timeout: seconds that a session waits for another one's lock.
    """

    lock_timeout: float = 60.0

    def connect(self, application_name: str = APPLICATION) -> psycopg.Connection:
        """Open a session in autocommit mode, with the parameters of ``sql.session_settings``."""
        import psycopg

        # No prepared statements: they would outlive the stages that they refer to.
        connection = psycopg.connect(self.named(application_name), autocommit=True, prepare_threshold=None)
        try:
            run(connection, sql.session_settings(self.lock_timeout))
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def session(self, doing: str, window: str) -> Iterator[psycopg.Connection]:
        """Open a session whose errors are raised as errors of this package.

        :param doing: what the session is for, in messages.
        :param window: the window, or the pipeline, in messages.
        :raises SinkUnavailable: the server cannot be reached, or the connection broke.
        :raises SinkRejected: the server refused a statement.
        """
        import psycopg

        try:
            connection = self.connect()
            try:
                yield connection
            finally:
                connection.close()
        except psycopg.Error as error:
            raise self.explain(error, window, f"{doing} {window}") from self.cause(error)

    def explain(self, error: BaseException, window: str, doing: str, target: str = "") -> KafkaSparkError:
        """Translate an error of psycopg or ADBC: :class:`SinkRejected` if trying again would fail again, else
        :class:`SinkUnavailable`."""
        state = getattr(error, "sqlstate", None) or ""
        detail = self.scrub(message_of(error))
        place = target or self.where
        if state == "55P03":
            detail += (
                f" after {self.lock_timeout:g} s: another session holds a lock on what this one needs. "
                f"Sessions of this pipeline have an application_name that begins with `{APPLICATION}`, see pg_stat_activity"
            )
        if state == "55000" or state[:2] in ("42", "44", "0A", "0L", "28") or is_refusal(error):
            return SinkRejected(place, window, detail, _action(state))
        return SinkUnavailable(place, doing, detail)


_KNOWN = re.compile(r"(0[0-389ABFLPZ]|10|2[0-8BDF]|3[489BDF]|4[024]|5[34578]|72|F0|HV|P0|XX)...")
"""The classes of PostgreSQL's own error codes. Other codes were chosen by a function (``ERRCODE``)."""


def is_refusal(error: BaseException) -> bool:
    """Return True if the error is about the content of rows: a value, a constraint, a text too long for its index, or an error
    that a trigger's function raises (class P0 or 38, or a code of its own)."""
    state = getattr(error, "sqlstate", None) or ""
    is_chosen = len(state) == 5 and state.isalnum() and not _KNOWN.fullmatch(state)
    return is_chosen or state[:2] in ("22", "23", "38", "P0") or state == "54000"


def read_connection(conn_id: str, lock_timeout: float = 60.0) -> SinkServer:
    """Return the server of an Airflow connection.

    :param lock_timeout: seconds that its sessions wait for locks.
    :raises ConnectionInvalid: the connection is not defined, of another type, or has options that are not known.
    """
    return SinkServer(**vars(read_server(look_up(conn_id, "postgres"))), lock_timeout=lock_timeout)


def pipeline_key(windows: Name, pipeline: str) -> str:
    """Return 12 hex digits that identify a pipeline among all that share a database."""
    return hashlib.sha256(f"{windows}\0{pipeline}".encode()).hexdigest()[:12]


def lock_key(*parts: str) -> int:
    """Return the number of an advisory lock."""
    return int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:8], "big", signed=True)


def message_of(error: BaseException) -> str:
    """Return the server's message in one line."""
    diagnosis = getattr(error, "diag", None)
    if diagnosis is None or not diagnosis.message_primary:
        # ADBC puts the server's message between its own words and the statement.
        text = " ".join(str(error).split())
        said = re.search(r"(?:ERROR|FATAL): (.*?)(?: (?:LINE \d+: .*?)?\^? ?Query was: .*| ?[.] SQLSTATE: \w+)?$", text)
        return said[1] if said else text
    parts = [diagnosis.message_primary]
    if diagnosis.column_name and f'"{diagnosis.column_name}"' not in parts[0]:
        parts.append(f"column `{diagnosis.column_name}`")
    parts += [part for part in (diagnosis.message_detail, diagnosis.context) if part]
    return "; ".join(" ".join(part.split()).rstrip(".") for part in parts)


def _action(state: str) -> str:
    if state == "23505":
        return 'For rows that replace earlier ones use `mode="upsert"` with `key=`; else the records hold a key twice'
    if state == "42501":
        return "Grant the connection's role what is missing"
    return ""
