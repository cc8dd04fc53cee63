"""From an Airflow connection of type ``postgres`` to sessions of the server, and from the server's errors to ours."""

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
from airflow_kafka_spark.sinks import postgres_sql as sql

if TYPE_CHECKING:
    import psycopg


@dataclass(frozen=True)
class Server(PostgresServer):
    """The same, as a sink uses it.

    :param lock_timeout: seconds a session waits for another one's lock.
    """

    lock_timeout: float = 60.0

    def connect(self, application_name: str = APPLICATION) -> psycopg.Connection:
        """A new session in autocommit mode, with settings of its own (:func:`postgres_sql.session_settings`)."""
        import psycopg

        # Prepared statements would outlive the stages they were prepared for.
        connection = psycopg.connect(self.named(application_name), autocommit=True, prepare_threshold=None)
        try:
            run(connection, sql.session_settings(self.lock_timeout))
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def session(self, doing: str, window: str) -> Iterator[psycopg.Connection]:
        """A session whose errors become ours.

        :param doing: what it is for.
        :param window: the window, or the pipeline, that it is for.
        :raises SinkUnavailable: the server cannot be reached, or broke off.
        :raises SinkRejected: it refused.
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
        """An error of psycopg or ADBC as one of ours: refused for good, or worth another try."""
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
"""PostgreSQL's own errors, by class: a code of another one is what a function has chosen (``ERRCODE``)."""


def is_refusal(error: BaseException) -> bool:
    """Whether it is about what rows hold: a value, a constraint, a text too long for its index, or what a function of a trigger
    raises by itself (class P0, 38, or a code of its own)."""
    state = getattr(error, "sqlstate", None) or ""
    is_chosen = len(state) == 5 and state.isalnum() and not _KNOWN.fullmatch(state)
    return is_chosen or state[:2] in ("22", "23", "38", "P0") or state == "54000"


def read_connection(conn_id: str, lock_timeout: float = 60.0) -> Server:
    """Look an Airflow connection up.

    :raises ConnectionInvalid: it is not defined, of another type, or has options that mean nothing here.
    """
    return Server(**vars(read_server(look_up(conn_id, "postgres"))), lock_timeout=lock_timeout)


def pipeline_key(windows: Name, pipeline: str) -> str:
    """12 hex digits that name a pipeline among all that share a database."""
    return hashlib.sha256(f"{windows}\0{pipeline}".encode()).hexdigest()[:12]


def lock_key(*parts: str) -> int:
    """The number of an advisory lock."""
    return int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:8], "big", signed=True)


def message_of(error: BaseException) -> str:
    """What the server says, in one line."""
    diagnosis = getattr(error, "diag", None)
    if diagnosis is None or not diagnosis.message_primary:
        # ADBC puts the server's words between its own and the statement.
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
