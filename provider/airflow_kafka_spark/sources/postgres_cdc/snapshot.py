"""The snapshot of tables, in chunks: where they are cut, and what a source remembers of them.

Chunks of one window are read side by side, each in a snapshot of its own, which its marker records. Before the next chunks are
cut, the log is read up to a place behind all these snapshots. So the position holds the chunks of one window at most, and the
slot lags behind by the time of one window, however long the whole snapshot takes.

Until a key is read, its events are left out of windows of the log: its chunk will include them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.hooks.postgres import quote
from airflow_kafka_spark.sources.postgres_cdc.options import PostgresCdcOptions
from airflow_kafka_spark.sources.postgres_cdc.tasks.session import format_lsn, parse_lsn
from airflow_kafka_spark.sources.postgres_cdc.tasks.snapshot import (
    Key,
    ReadChunk,
    TableShape,
    TableSnapshot,
    caught_up,
    snapshot_token,
    table_shape,
)
from airflow_kafka_spark.windows.model import IF_GIVEN_UP, PUBLISHED_IN_PART

if TYPE_CHECKING:
    import psycopg

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SnapshotState:
    """The progress of a snapshot.

    :param tables: the tables that are not complete, in the order in which they are read.
    :param lsn: an LSN behind all chunks that are read; 0: the log has caught up with them.
    :param repeats: True if rows that are not read may be published already, because a window of chunks was lost with the ledger.
        Then no event is left out, although a chunk includes it: of a row that was deleted since, only its event is left.
    """

    tables: tuple[TableSnapshot, ...] = ()
    lsn: int = 0
    repeats: bool = False

    @property
    def is_caught_up(self) -> bool:
        """True if no chunk waits for the log."""
        return not any(table.read for table in self.tables)

    def after_log(self, end: int) -> SnapshotState:
        """Return the state behind a window of the log."""
        return replace(self, tables=caught_up(self.tables), lsn=0) if end >= self.lsn else self

    @property
    def filter(self) -> list[dict[str, Any]]:
        """Return what decides which events a window of the log leaves out; empty if none."""
        return [] if self.repeats else [table.to_json() for table in self.tables]

    def to_json(self) -> dict[str, Any]:
        """Return what a position holds of it; nothing once the snapshot is complete."""
        if not self.tables:
            return {}
        repeats = {"repeats": True} if self.repeats else {}
        return {"snapshot": {"lsn": format_lsn(self.lsn), "tables": [table.to_json() for table in self.tables], **repeats}}

    @classmethod
    def from_json(cls, position: Mapping[str, Any]) -> SnapshotState:
        """Return the state that a position holds."""
        value = position.get("snapshot") or {}
        lsn = parse_lsn(value["lsn"]) if value else 0
        repeats = bool(value.get("repeats") or position.get(PUBLISHED_IN_PART))
        return cls(tuple(TableSnapshot.from_json(table) for table in value.get("tables", ())), lsn, repeats)


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


@dataclass
class Chunks:
    """Cuts the next chunks.

    :param connection: a session.
    :param options: the source's options.
    :param bounds: what the splits have beside the chunk: the place and the identity of the log.
    """

    connection: psycopg.Connection[Any]
    options: PostgresCdcOptions
    bounds: Mapping[str, Any]
    splits: list[dict[str, Any]] = field(default_factory=list)

    def cut(self, state: SnapshotState) -> SnapshotState:
        """Cut the next chunks, as many as a window may have, and return the state without tables that are gone."""
        tables = []
        for table in state.tables:
            left = self.options.snapshot_chunks_per_window - len(self.splits)
            if left > 0 and not self._cut(table, left):
                log.warning("Table %s is gone: its snapshot is left out", table.shown)
                continue
            tables.append(table)
        return replace(state, tables=tuple(tables))

    @cached_property
    def _now(self) -> dict[str, Any]:
        """Return the note of a chunk that is given up: its rows are left out as they are now, and later changes are published."""
        return snapshot_token(self.connection)

    def _cut(self, table: TableSnapshot, most: int) -> bool:
        """Cut the next chunks of a table, and return False if it is gone."""
        shape = table_shape(self.connection, self.options.publication, table.table)
        if shape is None:
            return False
        shape.refuse_other_key(table.key)
        after, ends = table.upto, self._ends(table, shape, most)
        for end in ends:
            self._add(table, after, end)
            after = end
        if len(ends) < most:
            self._add(table, after, None)
        return True

    def _ends(self, table: TableSnapshot, shape: TableShape, most: int) -> list[Key]:
        """Return the last keys of the next chunks; none of the chunk that has the table's end."""
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

    def _add(self, table: TableSnapshot, after: Key | None, upto: Key | None) -> None:
        of_chunk = {"table": list(table.table), "key": list(table.key), IF_GIVEN_UP: self._now}
        ends = {"after": after and list(after), "upto": upto and list(upto)}
        self.splits.append({**of_chunk, **ends, **self.bounds})


def after_chunks(state: SnapshotState, splits: Sequence[Mapping[str, Any]], tokens: Sequence[Mapping[str, Any]]) -> SnapshotState:
    """Return the state behind a window of chunks.

    :param tokens: per chunk, its snapshot.
    """
    tables, lsn = {table.table: table for table in state.tables}, state.lsn
    for split, token in zip(splits, tokens, strict=True):
        name = tuple(split["table"])
        upto = split["upto"]
        chunk = ReadChunk(None if upto is None else tuple(upto), token["seen"])
        table = tables[name]
        tables[name] = replace(table, read=(*table.read, chunk))
        lsn = max(lsn, parse_lsn(token["lsn"]))
    return replace(state, tables=tuple(tables.values()), lsn=lsn)


def after_truncates(
    state: SnapshotState, splits: Sequence[Mapping[str, Any]], tokens: Sequence[Mapping[str, Any]]
) -> SnapshotState:
    """Return the state behind a window of the log in which tables were truncated that have to be read anew."""
    again = {tuple(table) for token in tokens for table in token.get("truncated", ())}
    if not again:
        return state
    planned = [TableSnapshot.from_json(value) for split in splits for value in split.get("snapshot", ())]
    kept = [table for table in state.tables if table.table not in again]
    anew = [TableSnapshot(table.table, table.key) for table in planned if table.table in again]
    return replace(state, tables=(*kept, *anew))
