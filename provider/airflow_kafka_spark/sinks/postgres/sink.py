"""The PostgreSQL sink: windows become rows of a table, in one transaction with the sink's own record of them."""

from __future__ import annotations

import urllib.parse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.hooks.databases import (
    Name,
    fetch_rows,
    parse_name,
    quote,
    quote_literal,
    read_system_identifier,
    resolve_table,
)
from airflow_kafka_spark.sinks.base import OFFSET_COLUMNS, Guarantee, KeyedSink, Shape, SqlTable, WindowWriter
from airflow_kafka_spark.sinks.postgres.options import PostgresSinkOptions
from airflow_kafka_spark.windows.binding import SERVER, SERVER_ID, Endpoint
from airflow_kafka_spark.windows.model import ELSEWHERE, Applied, Split, Window

if TYPE_CHECKING:
    import psycopg


@dataclass(frozen=True)
class PostgresSink(PostgresSinkOptions, KeyedSink):
    """Writes windows into a table of PostgreSQL 12 or newer, by COPY from Spark's tasks.

    Guarantee, with ``atomic="window"``: exactly-once. Tasks load stages that no reader sees. One transaction then inserts the
    window's row into ``airflow_windows`` (only one transaction can), moves the rows into the table and drops the stages. So
    a reader sees the whole window, once, or nothing of it, whichever process is killed, retried or paused.

    Guarantee, with ``atomic="split"``: no record is there twice and none is missing. While a window is written, a reader may see
    some of its splits: each is committed by a transaction of its own, together with a marker.

    Both guarantees require that no other program changes the sink's own tables, and that the server keeps what it has committed
    (``fsync``; the sink sets ``synchronous_commit`` itself).

    Columns are matched by exact name, and every identifier is quoted. A value arrives as it is, or the window fails.

    :param conn_id: Airflow connection of type ``postgres``. Its extra takes the options of libpq (``sslmode``, ``options``, ...).
        Tasks connect with it, too, so certificate files have to be on the executors. Templated.
    :param table: ``table`` or ``schema.table``, as written, not folded to lower case; ``"My schema"."my.table"`` if a name
        contains a dot. Without a schema, the server's search path decides. Templated.
    :param mode: ``append`` (default) adds every record as a row. ``upsert`` inserts or updates by ``key``: within a window the
        highest offset of a key wins, and windows apply in order. Offsets of different partitions cannot be compared in time (the
        higher partition wins), so a key should always be in one partition, as it is if it is the record's key.
    :param key: the columns that identify a row, for ``upsert``. They need a unique index on exactly these columns. Default
        none. Templated.
    :param atomic: ``window`` (default) or ``split``, see above. ``split`` is faster and needs no stage, except for splits with
        rows that the table refuses, where that is tolerated. With ``upsert`` each partition of a window is one split.
    :param delete_enabled: True: a record without a value deletes the row of its key (Connect's ``delete.enabled``); ``upsert``
        only. Default False.
    :param auto_create: True: create the table if it is missing, with columns that fit the rows and ``key`` as primary key.
        Default False.
    :param auto_evolve: True: columns that the rows have and the table lacks are added to it, nullable, before a window is loaded
        (``auto.evolve`` of Connect's JDBC sink). No column is ever dropped or given another type. Default False: such rows are
        refused before Spark starts.
    :param offset_columns: True: require (or create) the columns ``__connect_topic``, ``__connect_partition`` and
        ``__connect_offset``. If the table has them, the sink fills them anyway, and an older offset never overwrites or deletes a
        newer row. Default False.
    :param window_column: a text column that the sink fills with the window's name, ``<pipeline>#<number>``. A replay deletes the
        rows with that name before it writes them again, in the same transaction; an index on the column makes that fast. Default
        None: no such column. Templated.
    :param windows_table: the sink's record of windows, in the target's schema; created on first use. Default
        ``airflow_windows``. Templated.
    :param splits_table: the markers of ``atomic="split"``, in the same schema; default ``airflow_window_splits``. Templated.
    :param stage_schema: the schema of stages; default the target's schema. Their names begin with ``airflow_stage_``. Templated.
    :param merge: ``overlap`` (default) moves stages into the table as they become ready, while others load. This is faster, and
        keeps the transaction open for as long as the load takes. ``after`` moves them at the end, as ``upsert`` always does.
    :param lock_timeout: seconds to wait for a lock that another session holds; default 60.
    :param keep_windows: number of rows of ``windows_table`` that are kept for a pipeline, at least 1; default 1000. The
        transaction that applies a window removes older ones, at most 1000 at a time. A replay of a window whose row is gone needs
        a table in which every row has ``window_column``.
    """

    template_fields: ClassVar[Sequence[str]] = (
        "conn_id", "table", "key", "windows_table", "splits_table", "stage_schema",
        "window_column",
    )  # fmt: skip

    @property
    def split_records(self) -> int:
        """500,000 offsets with ``atomic="window"``, else 1,000,000."""
        # Smaller splits with stages: they are moved into the table while others load, the last ones when nothing loads any more.
        return 500_000 if self.atomic == "window" else 1_000_000

    @property
    def whole_partitions(self) -> bool:
        """True for an upsert whose splits commit one by one."""
        # Splits commit in any order, and an older value of a key must not be written after a newer one of the same partition.
        return self.mode == "upsert" and self.atomic == "split"

    @property
    def guarantee(self) -> Guarantee:
        """Exactly-once, split by split with ``atomic="split"``."""
        return Guarantee.EXACTLY_ONCE_PER_SPLIT if self.atomic == "split" else Guarantee.EXACTLY_ONCE

    @property
    def uri(self) -> str:
        """``postgres://host:port/database/schema/table``, with ``public`` if ``table`` names no schema.

        :raises ConnectionInvalid: the connection cannot be used.
        """
        server = self.find_server()
        host = f"[{server.host}]" if ":" in server.host else server.host
        return f"postgres://{host}:{server.port}/{_make_path(server.database, *self._name)}"

    @property
    def asset_uri(self) -> str:
        """``x-postgres://conn_id/schema/table``. It has no host, since that needs the connection; Airflow does not interpret
        schemes that begin with ``x-``."""
        if "{{" in self.table or "{{" in self.conn_id:
            return f"x-postgres://{self.conn_id}/{self.table}"
        return f"x-postgres://{_make_path(self.conn_id, *self._name)}"

    def find_destination(self) -> Endpoint:
        """Return server, database and table, with the schema that the server finds, and the tables of windows and splits.

        With ``atomic="split"`` the mode is part of it: some splits of a window may have been committed with another mode.
        ``atomic`` and ``split_records`` are not: an attempt compares them with the splits that are in the table already.
        """
        server = self.find_server()
        with server.open_session("asking where the table is of", self.table) as connection:
            name, identity = resolve_table(connection, *parse_name(self.table)), read_system_identifier(connection)
        place = {SERVER: f"{server.host}:{server.port}", "database": server.database, "table": f"{name.schema}.{name.table}"}
        mode = self.mode if self.atomic == "split" else ""
        details = {"windows_table": self.windows_table, "splits_table": self.splits_table, "mode": mode}
        return Endpoint({**place, **({SERVER_ID: identity} if identity else {})}, details)

    @property
    def _name(self) -> tuple[str, str]:
        try:
            schema, table = parse_name(self.table)
        except ValueError:
            schema, table = None, self.table
        return schema or "public", table

    def validate(self, shape: Shape) -> list[Problem]:
        """Return the problems of options, connection, server, table, columns and their types, key and its index, and rights.

        Changes nothing.
        """
        from airflow_kafka_spark.sinks.postgres.validation import find_postgres_sink_problems

        return find_postgres_sink_problems(self, shape)

    def find_target_problems(self) -> list[Problem]:
        """Return the problems of options, connection, server, table, the key's index, and rights."""
        from airflow_kafka_spark.sinks.postgres.validation import find_postgres_sink_problems

        return find_postgres_sink_problems(self, None)

    def find_compared_table(self) -> SqlTable:
        """Return the table, whose checksums the server computes."""
        return SqlTable(self.conn_id, self.table)

    def find_replay_problems(self) -> list[Problem]:
        """Return the reasons why windows cannot be replayed: ``append`` needs ``window_column``; ``upsert`` needs
        ``offset_columns`` and must not delete.
        """
        where, wrong = "on_rerun", []
        if self.atomic == "split":
            wrong.append(('`atomic="split"` shows a window in pieces, and would replace it in pieces', 'Use `atomic="window"`'))
        if self.mode == "append" and not self.window_column:
            wrong.append(("appended rows do not name their window", 'Set `window_column="..."` on the sink'))
        return [*(Problem(where, *why) for why in wrong), *super().find_replay_problems()]

    def find_topics_in_rows(self, window: Window, topics: Collection[str]) -> list[str]:
        """Return the topics that rows name in the column for topics, if the table has all columns for offsets.

        :raises SinkUnavailable: the server cannot be reached.
        """
        from airflow_kafka_spark.sinks.postgres.server import read_table

        if self.mode != "upsert":
            return []
        with self.find_server().open_session("looking for rows of", ", ".join(sorted(topics))) as connection:
            name = resolve_table(connection, *parse_name(self.table))
            table = read_table(connection, name)
            if table is None or not all(column in table.columns for column in OFFSET_COLUMNS):
                return []
            column = quote(OFFSET_COLUMNS[0])
            query = f"SELECT EXISTS (SELECT 1 FROM {name} WHERE {column} = "
            return [topic for topic in sorted(topics) if fetch_rows(connection, f"{query}{quote_literal(topic)})")[0][0]]

    def find_last_windows(self, topics: Collection[str]) -> Mapping[str, Applied]:
        """Return the newest row of ``airflow_windows`` for each of some topics, of any pipeline that writes into this table.

        :raises SinkUnavailable: the server cannot be reached.
        """
        from airflow_kafka_spark.sinks.postgres import attempt as record

        if self.mode != "upsert" or not topics:
            return {}
        with self.find_server().open_session("looking for windows of", ", ".join(sorted(topics))) as connection:
            name, windows = self._resolve_tables(connection)
            return record.find_last_records_of(connection, windows, name, topics) if record.has_table(connection, windows) else {}

    def find_last_applied(self, pipeline: str) -> Applied | None:
        """Return the row of ``airflow_windows`` with the pipeline's highest number.

        :raises SinkUnavailable: the server cannot be reached.
        """
        from airflow_kafka_spark.sinks.postgres import attempt as record

        with self.find_server().open_session("looking for the last window of", pipeline) as connection:
            name, windows = self._resolve_tables(connection)
            is_there = record.has_table(connection, windows)
            return record.find_last_record(connection, windows, pipeline, target=name) if is_there else None

    def find_applied(self, window: Window) -> Applied | None:
        """Return the window's row of ``airflow_windows``.

        :raises ForeignOffsets: a window of this number is there, of another cluster or of another topic of the same name.
        :raises WindowConflict: a window of this number is there, but of other offsets.
        :raises SinkUnavailable: the server cannot be reached.
        """
        from airflow_kafka_spark.sinks.postgres import attempt as record

        with self.find_server().open_session("looking for window", str(window)) as connection:
            name, windows = self._resolve_tables(connection)
            if not record.has_table(connection, windows):
                return None
            if window.after == ELSEWHERE and record.find_elsewhere(connection, windows, window, name):
                return None
            return record.find_record(connection, windows, window)

    def begin(self, window: Window, splits: Sequence[Split], shape: Shape) -> WindowWriter:
        """Begin an attempt: end the sessions of earlier attempts at this pipeline's windows and drop their stages.

        An attempt that was paused and continues finds its session closed and its registry gone. A killed attempt blocks
        nothing.

        :raises WindowConflict: the window cannot follow the sink's last one.
        :raises SinkUnavailable: the server cannot be reached, or an earlier attempt cannot be ended (the role may end sessions of
            its own, or of all roles with ``pg_signal_backend``).
        """
        from airflow_kafka_spark.sinks.postgres.attempt import prepare_attempt
        from airflow_kafka_spark.sinks.postgres.writer import SplitsWindowWriter, StagedWindowWriter

        attempt = prepare_attempt(self, window, splits, shape)
        if self.atomic == "split":
            return SplitsWindowWriter(attempt)
        return StagedWindowWriter(attempt, overlap=self.merge == "overlap" and self.mode == "append")

    def _resolve_tables(self, connection: psycopg.Connection) -> tuple[Name, Name]:
        """Return the names of the target and of the table of windows in its schema."""
        name = resolve_table(connection, *parse_name(self.table))
        return name, Name(name.schema, self.windows_table)


def _make_path(*parts: str) -> str:
    return "/".join(urllib.parse.quote(part, safe="") for part in parts)
