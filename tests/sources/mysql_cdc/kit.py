"""An empty database of a server that writes a binary log, and windows of that log. The server is MariaDB, or MySQL."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from airflow_kafka_spark.sources import MySqlCdcSource
from airflow_kafka_spark.sources.mysql_cdc.tasks.session import LogServer
from tests.sources.postgres_cdc.kit import Windows
from tests.support.mariadb import EmbeddedMariaDB, is_mysql, translate

CONN = "maria_log"


LOG = ("--log-bin=bin", "--server-id=7", "--binlog-format=ROW", "--binlog-row-metadata=FULL", "--sync-binlog=0")


@contextmanager
def log_server() -> Iterator[EmbeddedMariaDB]:
    """A server that writes a binary log, and the connection to it."""
    with EmbeddedMariaDB(*LOG, "--innodb-flush-log-at-trx-commit=0") as started:
        os.environ[f"AIRFLOW_CONN_{CONN.upper()}"] = started.connection_uri()
        yield started
        del os.environ[f"AIRFLOW_CONN_{CONN.upper()}"]


class Binlog:
    """An empty database.

    :ivar place: the end of the log when it was created.
    """

    def __init__(self, server: EmbeddedMariaDB, connection: Any) -> None:
        self.server, self.connection = server, connection
        self.execute("DROP DATABASE shop")
        self.execute("CREATE DATABASE shop CHARACTER SET utf8mb4")
        self.execute("USE shop")
        self.place = self.end()

    def execute(self, *statements: str) -> None:
        with self.connection.cursor() as cursor:
            for statement in statements:
                if is_mysql() and statement.startswith("CREATE OR REPLACE "):
                    kind, name = statement.removeprefix("CREATE OR REPLACE ").split()[:2]
                    cursor.execute(f"DROP {kind} IF EXISTS {name}")
                    statement = statement.replace(" OR REPLACE", "")
                cursor.execute(translate(statement))

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        with self.connection.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())

    def end(self) -> str:
        """Return the end of the log."""
        return "{}:{}".format(*self.rows(self.server_log().make_status_statement(self.connection))[0][:2])

    def server_log(self) -> LogServer:
        return LogServer(MySqlCdcSource(CONN, "p").find_server())

    def source(self, **options: Any) -> MySqlCdcSource:
        """Return a source that begins where the database was created, or with a snapshot."""
        begins = {} if "snapshot" in options else {"starting_position": self.place}
        return MySqlCdcSource(CONN, **{"topic_prefix": "p", **begins, **options})

    def windows(self, **options: Any) -> Windows:
        made = Windows(self.source(**options))
        assert not (found := list(map(str, made.source.validate()))), found
        return made
