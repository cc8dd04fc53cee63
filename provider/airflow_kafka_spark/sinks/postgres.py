"""PostgreSQL: windows become rows of a table, in one transaction with the sink's own record of them."""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.hooks.postgres import Name, parse_name, resolve, system_identifier
from airflow_kafka_spark.sinks.base import Guarantee, Shape, Sink, WindowWriter
from airflow_kafka_spark.sinks.postgres_settings import PostgresSettings
from airflow_kafka_spark.windows.binding import SERVER, SERVER_ID, Endpoint
from airflow_kafka_spark.windows.model import Applied, Split, Window


@dataclass(frozen=True)
class PostgresSink(PostgresSettings, Sink):
    """Writes windows into a table of PostgreSQL 12 or newer, by COPY from Spark's tasks.

    Guarantee, with ``atomic="window"``: exactly-once. Tasks load stages that nobody reads; one transaction then inserts the
    window's row into ``airflow_windows`` (only one transaction can), moves the rows into the table and drops the stages. Its
    source is that transaction: whatever is killed, retried or paused, a reader sees the window whole, once, or not at all.

    Guarantee, with ``atomic="split"``: no record twice and none missing, but while a window is written a reader may see some of
    its splits: each is one transaction with a marker row of its own.

    Both hold as long as nobody else changes what the sink remembers, and the server does not forget what it has committed
    (``fsync``; the sink insists on ``synchronous_commit`` itself).

    Columns are matched by exact name, every identifier is quoted. Values arrive as they are or the window fails.

    :param conn_id: Airflow connection of type ``postgres``; its extra takes what libpq knows (``sslmode``, ``options``, ...).
        Tasks connect with it too: certificate files have to be on the executors.
    :param table: ``table`` or ``schema.table``, as written, not folded to lower case; ``"My schema"."my.table"`` where a name
        holds a dot. Without a schema, the one the server finds.
    :param mode: ``append`` adds every record as a row; ``upsert`` inserts or updates by ``key``: within a window the highest
        offset of a key wins, and windows apply in order. Between partitions offsets say nothing about time (the higher partition
        wins): a key should always be in the same one, as it is when it is the record's key.
    :param key: the columns that name a row, for ``upsert``; they need a unique index of exactly these columns.
    :param atomic: ``window`` or ``split``, see above. ``split`` needs no stage, but for splits with rows that the table
        refuses where that is tolerated, and is faster; with ``upsert`` each partition of a window is one split.
    :param delete_enabled: a record without a value deletes the row of its key (Connect's ``delete.enabled``); ``upsert`` only.
    :param auto_create: create the table, when it is missing, with columns that fit the rows and ``key`` as primary key.
    :param auto_evolve: columns that the rows have and the table has not are added to it, nullable, before a window is loaded
        (``auto.evolve`` of Connect's JDBC sink); none is ever dropped or given another type. Without it they are refused
        before Spark starts.
    :param offset_columns: demand (or create) the columns ``__connect_topic``, ``__connect_partition`` and ``__connect_offset``.
        Where the table has them the sink fills them, and an older offset never overwrites or deletes a newer row.
    :param window_column: a text column that the sink fills with the window's name, ``<pipeline>#<number>``: what a replay of the
        window deletes before it writes the rows again, in the same transaction. An index on it makes that quick.
    :param windows_table: the sink's record of windows, in the target's schema; created on first use.
    :param splits_table: the markers of ``atomic="split"``, beside it.
    :param stage_schema: where stages are made; default the target's schema. Their names begin with ``airflow_stage_``.
    :param merge: ``overlap`` (default) moves stages into the table as they become ready, while others load: faster, and the
        transaction is open as long as the load takes; ``after`` moves them at the end. ``upsert`` always does the latter.
    :param lock_timeout: seconds to wait for a lock somebody else holds; default 60.
    :param keep_windows: rows of ``windows_table`` that are kept of a pipeline, at least 1, default 1000: the transaction that
        applies a window removes older ones, at most 1000 at a time. Replays of windows whose row is gone need a table in which
        every row has ``window_column``.
    """

    template_fields: ClassVar[Sequence[str]] = (
        "conn_id", "table", "key", "windows_table", "splits_table", "stage_schema",
        "window_column",
    )  # fmt: skip

    @property
    def takes_tombstones(self) -> bool:  # type: ignore[override]
        return self.delete_enabled

    @property
    def split_records(self) -> int:  # type: ignore[override]
        # Smaller ones where stages are moved into the table while others load: the last are moved when nothing loads any more.
        return 500_000 if self.atomic == "window" else 1_000_000

    @property
    def whole_partitions(self) -> bool:  # type: ignore[override]
        # Splits commit in any order: an older value of a key must not come after a newer one of the same partition.
        return self.mode == "upsert" and self.atomic == "split"

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee.EXACTLY_ONCE_PER_SPLIT if self.atomic == "split" else Guarantee.EXACTLY_ONCE

    @property
    def uri(self) -> str:
        """``postgres://host:port/database/schema/table``, ``public`` where the table has no schema.

        :raises ConnectionInvalid: the connection cannot be used.
        """
        server = self.server()
        host = f"[{server.host}]" if ":" in server.host else server.host
        return f"postgres://{host}:{server.port}/{_path(server.database, *self._name)}"

    @property
    def asset_uri(self) -> str:
        """``x-postgres://conn_id/schema/table``: the host is the connection's affair, and Airflow leaves x- schemes alone."""
        if "{{" in self.table or "{{" in self.conn_id:
            return f"x-postgres://{self.conn_id}/{self.table}"
        return f"x-postgres://{_path(self.conn_id, *self._name)}"

    def destination(self) -> Endpoint:
        """Server, database and table, with the schema that the server finds; the tables that remember windows and splits; and the
        mode, where splits commit by themselves: some of a window may have committed with another one. ``atomic`` and
        ``split_records`` are not part of it: an attempt compares them with the splits that are in the table already."""
        server = self.server()
        with server.session("asking where the table is of", self.table) as connection:
            name, identity = resolve(connection, *parse_name(self.table)), system_identifier(connection)
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
        """Options, connection, server, table, columns and their types, key and its index, rights. Changes nothing."""
        from airflow_kafka_spark.sinks.postgres_check import problems

        return problems(self, shape)

    def replay_problems(self) -> list[Problem]:
        """Rows that are appended need ``window_column``; an upsert needs ``offset_columns`` and must not delete."""
        where, wrong = "on_rerun", []
        if self.atomic == "split":
            wrong.append(('`atomic="split"` shows a window in pieces, and would replace it in pieces', 'Use `atomic="window"`'))
        if self.mode == "append" and not self.window_column:
            wrong.append(("appended rows do not say which window they are of", 'Set `window_column="..."` on the sink'))
        return [*(Problem(where, *why) for why in wrong), *self._guard_problems(where, "a window that is moved again")]

    def unordered_problems(self) -> list[Problem]:
        """An upsert needs ``offset_columns``, and must not delete."""
        return self._guard_problems("window", "an interval that is moved after a later one")

    def _guard_problems(self, where: str, what: str) -> list[Problem]:
        if self.mode != "upsert":
            return []
        wrong = []
        if not self.offset_columns:
            wrong.append((f"{what} would overwrite newer rows", "Set `offset_columns=True` on the sink: older offsets then lose"))
        if self.delete_enabled:
            wrong.append((f"{what} would bring back rows that were deleted since", "Leave `delete_enabled` out"))
        return [Problem(where, *why) for why in wrong]

    def last_applied(self, pipeline: str) -> Applied | None:
        """The row of ``airflow_windows`` with the pipeline's highest number.

        :raises SinkUnavailable: the server cannot be reached.
        """
        from airflow_kafka_spark.sinks import postgres_windows as record

        with self.server().session("looking for the last window of", pipeline) as connection:
            windows = self._windows(connection)
            return record.last_recorded(connection, windows, pipeline) if record.exists(connection, windows) else None

    def applied(self, window: Window) -> Applied | None:
        """The window's row of ``airflow_windows``.

        :raises ForeignOffsets: a window of this number is there, of another cluster or of another topic of the same name.
        :raises WindowConflict: a window of this number is there, but of other offsets.
        :raises SinkUnavailable: the server cannot be reached.
        """
        from airflow_kafka_spark.sinks import postgres_windows as record

        with self.server().session("looking for window", str(window)) as connection:
            windows = self._windows(connection)
            return record.recorded(connection, windows, window) if record.exists(connection, windows) else None

    def begin(self, window: Window, splits: Sequence[Split], shape: Shape) -> WindowWriter:
        """Ends the sessions of earlier attempts at this pipeline's windows and drops their stages: one that was paused and wakes
        up finds its session closed and its registry gone, and one that was killed blocks nothing.

        :raises WindowConflict: the window cannot follow the sink's last one.
        :raises SinkUnavailable: the server cannot be reached, or an earlier attempt cannot be ended (the role may end sessions of
            its own, or of all roles with ``pg_signal_backend``).
        """
        from airflow_kafka_spark.sinks.postgres_attempt import prepare
        from airflow_kafka_spark.sinks.postgres_splits import SplitsWindowWriter
        from airflow_kafka_spark.sinks.postgres_writer import StagedWindowWriter

        attempt = prepare(self, window, splits, shape)
        if self.atomic == "split":
            return SplitsWindowWriter(attempt)
        return StagedWindowWriter(attempt, overlap=self.merge == "overlap" and self.mode == "append")

    def _windows(self, connection: object) -> Name:
        schema, table = parse_name(self.table)
        return Name(resolve(connection, schema, table).schema, self.windows_table)  # type: ignore[arg-type]


def _path(*parts: str) -> str:
    return "/".join(urllib.parse.quote(part, safe="") for part in parts)
