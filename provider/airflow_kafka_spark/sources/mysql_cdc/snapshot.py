"""Cut MariaDB's tables into the chunks of a snapshot."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from airflow_kafka_spark.sources.cdc.snapshot import Chunks, SnapshotState
from airflow_kafka_spark.sources.cdc.tasks.events import TableName
from airflow_kafka_spark.sources.cdc.tasks.snapshot import Key, TableSnapshot
from airflow_kafka_spark.sources.mysql_cdc.tasks.catalog import DIALECT, table_shape
from airflow_kafka_spark.sources.mysql_cdc.tasks.session import LogServer, rows
from airflow_kafka_spark.sources.mysql_cdc.tasks.snapshot import SESSION, chunk_token, literals, take_snapshot, typed
from airflow_kafka_spark.sources.mysql_cdc.tasks.values import ValueForm


def begin_snapshot(server: LogServer, connection: Any, form: ValueForm, names: Iterable[TableName]) -> SnapshotState:
    """Return the state of a snapshot of which nothing is read.

    :param names: the tables; those that do not exist are left out.
    """
    found = ((name, table_shape(server, connection, name, form)) for name in sorted(names))
    tables = tuple(TableSnapshot(name, shape.key, types=shape.types) for name, shape in found if shape is not None)
    return SnapshotState(tables)


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
