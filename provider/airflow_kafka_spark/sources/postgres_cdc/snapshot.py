"""Cut PostgreSQL's tables into the chunks of a snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.hooks.databases import quote
from airflow_kafka_spark.sources.cdc.snapshot import Chunks, SnapshotState
from airflow_kafka_spark.sources.cdc.tasks.snapshot import Key, TableSnapshot
from airflow_kafka_spark.sources.postgres_cdc.options import PostgresCdcOptions
from airflow_kafka_spark.sources.postgres_cdc.tasks.snapshot import snapshot_token, table_shape

if TYPE_CHECKING:
    import psycopg


def begin_snapshot(connection: psycopg.Connection[Any], options: PostgresCdcOptions) -> SnapshotState:
    """Return the state of a snapshot of which nothing is read."""
    wanted = options.named_tables
    if wanted is None:
        found = connection.execute(
            "SELECT schemaname, tablename FROM pg_catalog.pg_publication_tables WHERE pubname = %s", [options.publication]
        ).fetchall()
        wanted = frozenset((schema, table) for schema, table in found)
    tables = []
    for name in sorted(wanted):
        shape = table_shape(connection, options.publication, name)
        if shape is not None:
            tables.append(TableSnapshot(name, shape.key_names))
    return SnapshotState(tuple(tables))


@dataclass(kw_only=True)
class PostgresChunks(Chunks):
    """Cuts the next chunks.

    :param connection: a session.
    :param options: the source's options.
    """

    connection: psycopg.Connection[Any]
    options: PostgresCdcOptions

    def token(self) -> dict[str, Any]:
        """Return the token of a chunk that would be read now."""
        return snapshot_token(self.connection)

    def ends(self, table: TableSnapshot, most: int) -> list[Key] | None:
        """Return the last keys of the next chunks. See :meth:`Chunks.ends`."""
        shape = table_shape(self.connection, self.options.publication, table.table)
        if shape is None:
            return None
        shape.refuse_other_key(table.key)
        if not table.key:
            return []
        rows, columns = self.options.snapshot_chunk_rows, shape.ordering
        texts = ", ".join(f"{quote(name)}::text" for name in table.key)
        where = f"WHERE {shape.compared('>', table.upto)} " if table.upto is not None else ""
        found = self.connection.execute(
            f"SELECT {texts} FROM (SELECT {columns}, row_number() OVER (ORDER BY {columns}) AS row_of_chunk FROM "
            f"(SELECT {columns} FROM {shape.source} {where}ORDER BY {columns} LIMIT {rows * most}) AS k) AS n "
            f"WHERE row_of_chunk % {rows} = 0 ORDER BY row_of_chunk".encode()
        ).fetchall()
        return [tuple(key) for key in found]
