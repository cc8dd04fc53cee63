"""The binary log of MariaDB and MySQL as frozen windows of change events."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_kafka_spark.errors import ConnectionInvalid, Problem
from airflow_kafka_spark.hooks.connections import look_up
from airflow_kafka_spark.sources.base import FrozenWindow
from airflow_kafka_spark.sources.cdc.source import LogSource
from airflow_kafka_spark.sources.jdbc.database import format_server_uri
from airflow_kafka_spark.sources.mysql_cdc.options import MySqlCdcOptions
from airflow_kafka_spark.windows.binding import SERVER, SERVER_ID, Endpoint

if TYPE_CHECKING:
    from airflow_kafka_spark.sources.jdbc.mysql import MySqlServer
    from airflow_kafka_spark.sources.mysql_cdc.windows import MySqlLogWindowPlanner


@dataclass(frozen=True)
class MySqlCdcSource(MySqlCdcOptions, LogSource):
    """Reads changes of tables from the binary log of MariaDB or MySQL (change data capture), in bounded windows.

    A window is a range of the log, which is read over the protocol of replication. Each change is an event in Debezium's form,
    with the columns ``topic``, ``key``, ``value`` (JSON, as bytes) and ``timestamp`` (of the change, milliseconds since 1970):
    ``KafkaSink(topic_column="topic", key="key", key_format=Raw(), value_columns=["value"], value=Raw())`` publishes them.

    Guarantee: each change of each transaction that commits after the start of the first window is in exactly one window, and all
    changes of a transaction are in the same one. With a snapshot, each row that was there is published once,
    followed by exactly the changes that it does not include. A window of the log is one split, so its events are published in one
    Kafka transaction, in the order of the commits.

    :param conn_id: Airflow connection of type ``mysql``, of a user with REPLICATION SLAVE and BINLOG MONITOR (MySQL: REPLICATION
        CLIENT) and SELECT on the tables. The server writes its log with ``binlog_format=ROW``, ``binlog_row_image=FULL`` and
        ``binlog_row_metadata=FULL``: MariaDB 10.5 or later, MySQL 8.0 or later. Executors use it too. Templated.
    :param topic_prefix: events of table ``database.table`` have the topic ``<topic_prefix>.<database>.<table>``, with ``_`` for
        characters that a topic's name cannot have. Templated.
    :param tables: the tables, as ``database.table`` (the connection's database if none is given); None (default): all of the
        connection's database.
    :param starting_position: where the first window begins: ``latest`` (default), the end of the log when it is frozen;
        ``earliest``, the beginning of the log; or the coordinates of a backup, as ``mysql-bin.000042:1234``. Templated.
    :param snapshot: the rows from before the first window that are published, as events ``r``. ``never`` (default):
        nothing. ``initial``: all rows of the tables, in chunks, while windows of the log go on in between; then the log.
        ``only``: as ``initial``, up to the position in the log at which all rows are read; further windows are empty.
        ``when_needed``: as ``initial``, and again whenever the log after the last window is lost; rows that were deleted in
        between get no event. Tables that are added to ``tables`` later are read, too. For tables of the engine InnoDB. On MySQL,
        each chunk locks its table for a moment, which needs the right LOCK TABLES.
    :param snapshot_chunk_rows: number of rows of a chunk, and so of a Kafka transaction; default 250,000. A table without a
        unique key that can be compared (numbers, texts, bytes, dates) is one chunk.
    :param snapshot_chunks_per_window: maximum number of chunks in a window, from 1 to 100. Each is a Spark task and a session of
        the server. Default 16. Between two such windows, the log is read.
    :param max_replica_lag: seconds that a replica of ``replica_conn_ids`` may be behind (``Seconds_Behind_Master``). While one is
        further behind, or while its replication has stopped, each chunk of a snapshot waits before its first row. Default None:
        the lag of replicas is not checked.
    :param replica_conn_ids: Airflow connections of type ``mysql`` of replicas, for ``max_replica_lag``; their users need the
        right ``SLAVE MONITOR`` (MySQL: ``REPLICATION CLIENT``). Executors use them, too. Default none.
    :param max_binlog_bytes: maximum size of a window in bytes of the log, unless a single transaction is longer; default 256 MiB.
        A window has to be published within the sink's ``transaction_timeout``.
    :param message_key_columns: table -> the columns of its key. Default: the primary key.
    :param tombstones_on_delete: True (default): a delete is followed by a record without a value.
    :param skipped_operations: operations that are left out: ``c``, ``u``, ``d``, ``t`` (truncate); default ``("t",)``, as with
        Debezium.
    :param decimal_handling_mode: ``precise`` (default): the bytes of Connect's Decimal, in base64; ``string``; ``double``, which
        rounds.
    :param time_precision_mode: ``adaptive`` (default) or ``adaptive_time_microseconds``: dates in days, TIME in microseconds,
        DATETIME in milliseconds up to precision 3 and else in microseconds; ``connect``: milliseconds. TIMESTAMP is an ISO 8601
        text in UTC either way.
    :param bigint_unsigned_handling_mode: ``long`` (default): numbers, of which those from 2^63 on are refused; ``precise``:
        Connect's Decimal.
    :param zero_date_handling_mode: the treatment of a date that is no day, as ``0000-00-00``: ``fail`` (default) fails the window
        and names the column; ``null`` writes null, except in a key, where two keys could become one: there, such a date fails
        the window, too.
    :param ignore_cascades: True accepts tables whose rows are changed by the cascades of foreign keys, which the log does not
        contain; False (default) refuses them. (The log of MySQL 9.6 and later contains them.)
    :param provide_transaction_metadata: True: the field ``transaction`` of an event names its transaction and its position in it,
        and the begin and the end of each transaction with events, with their counts, are records of the topic
        ``<topic_prefix>.transaction``; default False.
    :param unwrap: ``ExtractNewRecordState(...)``: values are rows, not events; None (default): they are events.
    :param schemas_enable: True: keys and values carry their schema, as JsonConverter with ``schemas.enable=true`` writes them;
        False (default): they do not.
    """

    template_fields: ClassVar[Sequence[str]] = ("conn_id", "topic_prefix", "tables", "starting_position")

    @property
    def uri(self) -> str:
        """``mysql://host:port/database``, without the database if the connection names none.

        :raises ConnectionInvalid: the connection cannot be used.
        """
        server = self.find_server()
        database = urllib.parse.quote(server.database, safe="")
        address = format_server_uri("mysql", server)
        return f"{address}/{database}" if database else address

    @property
    def asset_uri(self) -> str:
        """``x-mysql-cdc://conn_id/topic_prefix``: only the connection knows the host, and Airflow does not check x- schemes."""
        return f"x-mysql-cdc://{self.conn_id}/{self.topic_prefix}"

    def find_server(self) -> MySqlServer:
        """Return the server that the connection leads to.

        :raises ConnectionInvalid: the connection is not defined, of another type, or has options that mean nothing here.
        """
        import pymysql  # noqa: F401

        from airflow_kafka_spark.sources.jdbc.mysql import read_server

        return read_server(look_up(self.conn_id, "mysql"))

    def find_replicas(self) -> tuple[MySqlServer, ...]:
        """Return the servers of ``replica_conn_ids``.

        :raises ConnectionInvalid: as for :meth:`find_server`.
        """
        from airflow_kafka_spark.sources.jdbc.mysql import read_server

        return tuple(read_server(look_up(conn_id, "mysql")) for conn_id in self.replica_conn_ids)

    def _make_planner(self) -> MySqlLogWindowPlanner:
        from airflow_kafka_spark.sources.mysql_cdc.tasks.session import LogServer
        from airflow_kafka_spark.sources.mysql_cdc.windows import MySqlLogWindowPlanner

        replicas = tuple(LogServer(server) for server in self.find_replicas()) if self.max_replica_lag is not None else ()
        return MySqlLogWindowPlanner(self, LogServer(self.find_server()), replicas)

    def find_origin(self) -> Endpoint:
        """Return the server, and MySQL's ``server_uuid``; the tables and the prefix of topics."""
        windows = self._make_planner()
        with windows.server.open_session("asking which server it is") as connection:
            identity = windows.server.read_identity(connection).get("server_uuid", "")
        location = {SERVER: format_server_uri("mysql", windows.server.server), **({SERVER_ID: str(identity)} if identity else {})}
        return Endpoint(location, {"tables": ", ".join(sorted(self.tables or ())), "topic_prefix": self.topic_prefix})

    def validate(self) -> list[Problem]:
        """Return the problems of options, connection, server, its log, rights, tables and their keys."""
        from airflow_kafka_spark.sources.jdbc.source import make_missing_driver_problem
        from airflow_kafka_spark.sources.mysql_cdc.tasks.session import LogServer
        from airflow_kafka_spark.sources.mysql_cdc.validation import WAITING, MySqlLogValidation

        found = list(self.find_option_problems())
        try:
            server = self.find_server()
        except ConnectionInvalid as error:
            return [*found, Problem.of("source.conn_id", error), *WAITING]
        except ImportError as error:
            return [*found, make_missing_driver_problem(error)]
        wrong = frozenset(problem.where for problem in found)
        try:
            replicas = tuple(map(LogServer, self.find_replicas())) if "source.replica_conn_ids" not in wrong else ()
        except ConnectionInvalid as error:
            return [*found, Problem.of("source.replica_conn_ids", error), *WAITING]
        return [*found, *MySqlLogValidation(self, LogServer(server), replicas, wrong).find_problems()]

    def freeze(self, position: Mapping[str, Any] | None) -> FrozenWindow:
        """Decide the next window's end: the end of the log, or ``max_binlog_bytes`` after the last window.

        See :meth:`RowSource.freeze`.

        :raises SourceUnavailable: the server does not answer.
        :raises LogLost: the server no longer has the log after ``position``, because it was purged or reset.
        :raises SourceRejected: the server is another one.
        """
        return self._make_planner().freeze(position)
