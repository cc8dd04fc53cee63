"""The log of a PostgreSQL database as frozen windows of change events."""

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
from airflow_kafka_spark.sources.postgres_cdc.options import DEFAULT_SCHEMA, PostgresCdcOptions
from airflow_kafka_spark.windows.binding import SERVER, SERVER_ID, Endpoint

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.databases import PostgresServer
    from airflow_kafka_spark.sources.postgres_cdc.windows import PostgresLogWindowPlanner


@dataclass(frozen=True)
class PostgresCdcSource(PostgresCdcOptions, LogSource):
    """Reads changes of tables from PostgreSQL's log (change data capture), in bounded windows.

    A window is a range of the log. Its changes are read by ``pg_logical_slot_peek_binary_changes`` over an ordinary connection,
    with the server's own plugin ``pgoutput``; nothing has to be installed there. Each change is an event in Debezium's form, with
    the columns ``topic``, ``key``, ``value`` (JSON, as bytes) and ``timestamp`` (of the commit, milliseconds since the epoch):
    ``KafkaSink(topic_column="topic", key="key", key_format=Raw(), value_columns=["value"], value=Raw())`` publishes them.

    Guarantee: each change of each transaction that commits after the slot was created is in exactly one window, and all changes
    of a transaction are in the same one. With a snapshot, each row that was there is published once, followed by exactly the
    changes that it does not include. A window is one split, so its events are published in one Kafka transaction, in the
    order of the commits. The slot is advanced to the end of a window only once the window is complete in the ledger. A
    transaction that is open at the end of a window is in a later window.

    :param conn_id: Airflow connection of type ``postgres``, of a role with REPLICATION, to a primary of release 12 or later with
        ``wal_level=logical``. Executors use it too. Templated.
    :param publication: the publication, which has to exist and to have the tables (Debezium's ``publication.name``). Templated.
    :param slot: the logical replication slot (Debezium's ``slot.name``). It is created if it is missing when the first window is
        frozen, and belongs to this pipeline alone. Drop it when the pipeline is removed: until then the server keeps its log.
        Templated.
    :param topic_prefix: events of table ``schema.table`` have the topic ``<topic_prefix>.<schema>.<table>``, with ``_`` for
        characters that a topic's name cannot have. Templated.
    :param tables: the tables, as ``schema.table`` (``public`` if no schema is given); None (default): all of the publication.
    :param snapshot: the rows from before the slot that are published, as events ``r``. ``never`` (default): nothing, and windows
        begin at the slot's position. ``initial``: all rows of the tables, in chunks, while windows of the log go on in between;
        then the log. ``only``: as ``initial``, up to the LSN at which all rows are read; then the slot is dropped, and further
        windows are empty. ``when_needed``: as ``initial``, and again whenever the log after the last window is lost; rows that
        were deleted in between get no event. Tables that are added to ``tables`` later are read, too. The role needs SELECT on
        the tables, and row security must not hide rows from it.
    :param snapshot_chunk_rows: number of rows of a chunk, and so of a Kafka transaction; default 250,000. A table without a
        primary key is one chunk.
    :param snapshot_chunks_per_window: maximum number of chunks in a window, from 1 to 100. Each is a Spark task and a session of
        the server. Default 16. Between two such windows, the log is read.
    :param max_replica_lag: seconds that a replica may be behind. While one that streams from the server is further behind, each
        chunk of a snapshot waits before its first row. The role needs ``pg_read_all_stats``. Default None: the lag of
        replicas is not checked.
    :param max_wal_bytes: maximum size of a window in bytes of the log, unless a single transaction is longer; default 256 MiB. A
        window has to be published within the sink's ``transaction_timeout``.
    :param message_key_columns: table -> the columns of its key. Default: the replica identity, which usually is the primary key;
        the primary key where the replica identity is the whole row.
    :param tombstones_on_delete: True (default): a delete is followed by a record without a value.
    :param skipped_operations: operations that are left out: ``c``, ``u``, ``d``, ``t`` (truncate); default ``("t",)``, as with
        Debezium.
    :param unavailable_value_placeholder: the text in place of a large value (TOAST) that an update has not changed, which the log
        does not hold unless the replica identity is the whole row; default ``__debezium_unavailable_value``.
    :param decimal_handling_mode: ``precise`` (default): the bytes of Connect's Decimal, in base64; ``string``; ``double``, which
        rounds.
    :param time_precision_mode: ``adaptive`` (default): dates in days, times and timestamps without zone in microseconds, or in
        milliseconds where the column has a precision up to 3; ``adaptive_time_microseconds``: as ``adaptive``, but times always
        in microseconds; ``connect``: milliseconds. Timestamps with zone are ISO 8601 texts in UTC either way.
    :param provide_transaction_metadata: True: the field ``transaction`` of an event names its transaction and its position in it,
        and the begin and the end of each transaction with events, with their counts, are records of the topic
        ``<topic_prefix>.transaction``; default False.
    :param unwrap: ``ExtractNewRecordState(...)``: values are rows, not events; None (default): they are events.
    :param schemas_enable: True: keys and values carry their schema, as JsonConverter with ``schemas.enable=true`` writes them;
        False (default): they do not.
    """

    template_fields: ClassVar[Sequence[str]] = ("conn_id", "publication", "slot", "topic_prefix", "tables")
    default_schema: ClassVar[str] = DEFAULT_SCHEMA

    @property
    def uri(self) -> str:
        """``postgres://host:port/database/slot``.

        :raises ConnectionInvalid: the connection cannot be used.
        """
        server = self.find_server()
        return f"{format_server_uri('postgres', server)}/{urllib.parse.quote(server.database, safe='')}/{self.slot}"

    @property
    def asset_uri(self) -> str:
        """``x-postgres-cdc://conn_id/slot``: only the connection knows the host, and Airflow does not check x- schemes."""
        return f"x-postgres-cdc://{self.conn_id}/{self.slot}"

    def find_server(self) -> PostgresServer:
        """Return the server that the connection leads to.

        :raises ConnectionInvalid: the connection is not defined, of another type, or has options that mean nothing here.
        """
        import psycopg  # noqa: F401

        from airflow_kafka_spark.hooks.databases import read_server

        return read_server(look_up(self.conn_id, "postgres"))

    def _make_planner(self) -> PostgresLogWindowPlanner:
        from airflow_kafka_spark.sources.postgres_cdc.windows import PostgresLogWindowPlanner

        return PostgresLogWindowPlanner(self, self.find_server())

    def find_origin(self) -> Endpoint:
        """Return server, database and slot; the publication, the tables and the prefix of topics."""
        server = self.find_server()
        windows = self._make_planner()
        with windows.slot.open_session("asking which server it is") as connection:
            from airflow_kafka_spark.hooks.databases import read_system_identifier

            identity = read_system_identifier(connection)
        location = {SERVER: format_server_uri("postgres", server), "database": server.database, "slot": self.slot}
        details = {
            "publication": self.publication,
            "tables": ", ".join(sorted(".".join(name) for name in self.named_tables or ())),
            "topic_prefix": self.topic_prefix,
        }
        return Endpoint({**location, **({SERVER_ID: identity} if identity else {})}, details)

    def get_exclusive_object(self, origin: Endpoint) -> str:
        """Return the slot. A second pipeline would not get the changes over which the first one has advanced it."""
        location = origin.place
        if "slot" not in location:
            return ""  # of another source, which the pipeline had before
        return f"slot {location.get(SERVER_ID) or location[SERVER]}/{location['database']}/{location['slot']}"

    def validate(self) -> list[Problem]:
        """Return the problems of options, connection, server, slot, publication, tables and their keys."""
        from airflow_kafka_spark.sources.jdbc.source import make_missing_driver_problem
        from airflow_kafka_spark.sources.postgres_cdc.validation import WAITING, PostgresLogValidation

        found = list(self.find_option_problems())
        try:
            server = self.find_server()
        except ConnectionInvalid as error:
            return [*found, Problem.of("source.conn_id", error), *WAITING]
        except ImportError as error:
            return [*found, make_missing_driver_problem(error)]
        return [*found, *PostgresLogValidation(self, server, frozenset(problem.where for problem in found)).find_problems()]

    def freeze(self, position: Mapping[str, Any] | None) -> FrozenWindow:
        """Decide the next window's end: the end of the log, or ``max_wal_bytes`` after the last window.

        Creates the slot for the first window if it is missing, and advances it to ``position``, whose window is complete. See
        :meth:`RowSource.freeze`.

        :raises SourceUnavailable: the server does not answer, or another program uses the slot.
        :raises SourceRejected: the slot no longer has the log after ``position``, because it is gone, lost, or was advanced; or
            the server is another one, or was failed over.
        """
        return self._make_planner().freeze(position)

    def finish_window(self, position: Mapping[str, Any]) -> None:
        """Advance the slot. See :meth:`RowSource.finish_window`."""
        self._make_planner().finish_window(position)
