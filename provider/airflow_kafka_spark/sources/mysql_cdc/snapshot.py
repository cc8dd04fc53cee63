"""Cut MariaDB's tables into the chunks of a snapshot."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from airflow_kafka_spark.sources.cdc.snapshot import Chunks, SnapshotState
from airflow_kafka_spark.sources.cdc.tasks.events import TableName
from airflow_kafka_spark.sources.cdc.tasks.snapshot import Key, TableSnapshot
from airflow_kafka_spark.sources.mysql_cdc.tasks.catalog import DIALECT, table_shape
from airflow_kafka_spark.sources.mysql_cdc.tasks.session import LogServer, rows, sql_text
from airflow_kafka_spark.sources.mysql_cdc.tasks.snapshot import SESSION, chunk_token, literals, take_snapshot, typed
from airflow_kafka_spark.sources.mysql_cdc.tasks.values import ValueForm
from airflow_kafka_spark.windows.pass_progress import PassProgress


def begin_snapshot(
    server: LogServer, connection: Any, form: ValueForm, names: Iterable[TableName], chunk_rows: int
) -> SnapshotState:
    """Return the state of a snapshot of which nothing is read.

    :param names: the tables; those that do not exist are left out.
    :param chunk_rows: how many rows a chunk has.
    """
    found = ((name, table_shape(server, connection, name, form)) for name in sorted(names))
    tables = tuple(TableSnapshot(name, shape.key, types=shape.types) for name, shape in found if shape is not None)
    estimates = {table.table: _estimated_rows(connection, table.table) for table in tables}
    return SnapshotState(tables, progress=PassProgress.begin(time.time(), estimates, chunk_rows))


def _estimated_rows(connection: Any, name: TableName) -> int:
    schema, table = map(sql_text, name)
    query = f"SELECT table_rows FROM information_schema.tables WHERE table_schema = {schema} AND table_name = {table}"
    return int(rows(connection, query)[0][0] or 0)


@dataclass(kw_only=True)
class MysqlChunks(Chunks):
    """Cuts the next chunks.

    :param server: the server.
    :param connection: a session.
    :param rows: how many rows a chunk has.
    :param form: the form of values.
    """

    server: LogServer
    connection: Any
    rows: int

    @property
    def chunk_rows(self) -> int:
        """How many rows a chunk has at most."""
        return self.rows

    form: ValueForm

    def __post_init__(self) -> None:
        for statement in SESSION:
            rows(self.connection, statement)

    def token(self) -> dict[str, Any]:
        """Return the token of a chunk that would be read now."""
        place = take_snapshot(self.connection)
        rows(self.connection, "ROLLBACK")
        return chunk_token(place)

    def ends(self, table: TableSnapshot, most: int) -> list[Key] | None:
        """Return the last keys of the next chunks. See :meth:`Chunks.ends`."""
        shape = table_shape(self.server, self.connection, table.table, self.form)
        if shape is None:
            return None
        shape.refuse_other_key(table.key, table.types)
        names = [DIALECT.quote(name) for name in table.key]
        ordering, found, after = ", ".join(names), list[Key](), table.upto
        texts = ", ".join(DIALECT.text(typed(kind), name) for kind, name in zip(table.types, names, strict=True))
        while table.key and len(found) < most:
            where = f"WHERE {DIALECT.after(names, literals(table.types, after))} " if after is not None else ""
            query = f"SELECT {texts} FROM {shape.source} {where}ORDER BY {ordering} LIMIT {self.rows - 1}, 1"
            last = rows(self.connection, query)
            if not last:
                break
            after = tuple(str(value) for value in last[0])
            found.append(after)
        return found
