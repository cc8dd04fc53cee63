"""Chunks of a table's snapshot: how they are opened, which transactions they have seen, and the chunks of keys of the log.

A chunk is read in a transaction of its own, and the snapshot of that transaction (``pg_current_snapshot()``) says exactly which
transactions its rows include.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import SourceRejected, SourceUnavailable
from airflow_kafka_spark.hooks.databases import fetch_rows, quote, quote_literal
from airflow_kafka_spark.sources.cdc.tasks.snapshot import ChunkFilter, Key, TableSnapshot
from airflow_kafka_spark.sources.jdbc.database import SAME_ORDER
from airflow_kafka_spark.sources.postgres_cdc.tasks.pgoutput import (
    UNCHANGED,
    BeginMessage,
    ChangeMessage,
    Message,
    RelationColumn,
    RelationMessage,
)
from airflow_kafka_spark.sources.postgres_cdc.tasks.session import NEW_PIPELINE, SlotServer, format_lsn, parse_lsn

if TYPE_CHECKING:
    import psycopg

VISIBLE_SECONDS = 60.0
"""Seconds to wait until sessions see a transaction whose commit is in the log already."""

_HALF, _WHOLE = 1 << 31, 1 << 32


@dataclass(frozen=True)
class VisibleTransactions:
    """The transactions that a snapshot includes: those before ``end``, except the ``running`` ones.

    :param end: the first 64-bit transaction id that was not assigned.
    :param running: the ids below it that were not complete.
    """

    end: int
    running: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> VisibleTransactions:
        """Return the value of PostgreSQL's text ``xmin:xmax:xip_list``."""
        _, end, running = text.split(":")
        return cls(int(end), frozenset(int(xid) for xid in running.split(",") if xid))

    def include(self, xid: int) -> bool:
        """Return True if the snapshot includes a committed transaction.

        :param xid: its 32-bit id. Ids wrap around; that of a transaction in the log is less than half of them away.
        """
        distance = (xid - self.end + _HALF) % _WHOLE - _HALF
        return distance < 0 and self.end + distance not in self.running


def find_snapshot_function(connection: psycopg.Connection[Any]) -> str:
    """Return the call of the function that returns the snapshot. PostgreSQL 12 has it under an older name."""
    of_release = "pg_current_snapshot" if connection.info.server_version >= 130000 else "txid_current_snapshot"
    return f"pg_catalog.{of_release}()::text"


# --- the catalog --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeyColumn:
    """A column by which rows are ordered.

    :param name: its name.
    :param type: the name of its type, for a cast.
    :param collation: ``COLLATE ...`` if it has another one than the database.
    :param operators: the spelling of ``<``, ``<=``, ``>`` and ``>=`` of its order if they are not those of ``pg_catalog``, as for
        ``citext``, which `>` without its schema would compare as a text.
    """

    name: str
    type: str
    collation: str
    operators: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def order(self) -> str:
        """The kind of its order. A column whose type has changed has its values in the same order if this stays the same."""
        return f"{SAME_ORDER.get(self.type, self.type)}{self.collation}"

    def cast(self, text: str) -> str:
        """Return an expression of a text as a value of the column."""
        return f"({text}::{self.type}{self.collation})"


@dataclass(frozen=True)
class PostgresTableShape:
    """A table as it is now.

    :param relation: its columns, as the log describes them.
    :param source: the table for a ``FROM`` clause: without the tables that inherit from it, and with its partitions.
    :param key: the columns that order its rows, those of its replica identity; empty if it has no key.
    :param row_filter: the publication's condition, as SQL; "" without one.
    """

    relation: RelationMessage
    source: str
    key: tuple[KeyColumn, ...]
    row_filter: str

    @property
    def key_names(self) -> tuple[str, ...]:
        """The names of the columns that order its rows."""
        return tuple(column.name for column in self.key)

    @property
    def ordering(self) -> str:
        """The columns that order its rows, for an ``ORDER BY``."""
        return ", ".join(quote(column.name) for column in self.key)

    @property
    def orders(self) -> tuple[str, ...]:
        """The kinds of the orders of these columns."""
        return tuple(column.order for column in self.key)

    def compare_key(self, operator: str, key: Sequence[str]) -> str:
        """Return a condition that compares a row's key with another one.

        :param operator: ``>`` or ``<=``.
        """
        values = [column.cast(quote_literal(value)) for column, value in zip(self.key, key, strict=True)]
        return self.compare([quote(column.name) for column in self.key], operator, values)

    def compare(self, left: Sequence[str], operator: str, right: Sequence[str]) -> str:
        """Return a condition that compares two keys in the order of the rows.

        :param left: per column of the key an expression; ``right`` the same.
        :param operator: ``<``, ``<=`` or ``>``.
        """
        if not any(column.operators for column in self.key):
            return f"ROW({', '.join(left)}) {operator} ROW({', '.join(right)})"
        parts = list(zip(self.key, left, right, strict=True))
        column, mine, other = parts.pop()
        condition = f"{mine} {column.operators.get(operator, operator)} {other}"
        strict = operator[0]
        for column, mine, other in reversed(parts):
            at_least, more = (column.operators.get(name, name) for name in (f"{strict}=", strict))
            condition = f"{mine} {at_least} {other} AND ({mine} {more} {other} OR ({condition}))"
        return f"({condition})"

    def refuse_other_key(self, planned: Sequence[str], orders: Sequence[str]) -> None:
        """Refuse a key that is not the key by which the table was cut so far.

        :param orders: the kinds of the orders of its columns; empty in a snapshot of an earlier release.
        :raises SourceRejected: the table has another key.
        """
        if self.key_names != tuple(planned) or (orders and self.orders != tuple(orders)):
            now, was = (
                ", ".join(f"{name} ({of})" for name, of in zip_longest(names, by, fillvalue="")) or "none"
                for names, by in ((self.key_names, self.orders), (planned, orders))
            )
            shown = f"{self.relation.schema}.{self.relation.table}"
            found = f"its key is {now}, and its snapshot was begun by {was}"
            raise SourceRejected(shown, found, f"Restore the key until the snapshot is complete. {NEW_PIPELINE}")


_SHAPE = (
    "SELECT c.oid::bigint, c.relkind::text, c.relreplident::text, a.attname::text, a.atttypid::bigint, a.atttypmod, "
    "array_position((i.indkey::int2[])[0:i.indnkeyatts - 1], a.attnum), pg_catalog.format_type(a.atttypid, -1), "
    "CASE WHEN a.attcollation NOT IN (0, 100) THEN pg_catalog.format('%%I.%%I', m.nspname, l.collname) END, a.attgenerated::text "
    "FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
    "JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped "
    "LEFT JOIN pg_catalog.pg_index i ON i.indrelid = c.oid AND i.indimmediate AND "
    "CASE c.relreplident WHEN 'i' THEN i.indisreplident ELSE i.indisprimary END "
    "LEFT JOIN pg_catalog.pg_collation l ON l.oid = a.attcollation "
    "LEFT JOIN pg_catalog.pg_namespace m ON m.oid = l.collnamespace "
    "WHERE n.nspname = %s AND c.relname = %s AND c.relkind IN ('r', 'p') ORDER BY a.attnum"
)


def read_table_shape(connection: psycopg.Connection[Any], publication: str, table: Sequence[str]) -> PostgresTableShape | None:
    """Return the present definition of a table; None if the publication has no table of this name.

    :param publication: the publication, which may leave out columns and rows.
    :param table: schema and name.
    """
    schema, name = table
    found = connection.execute(_SHAPE, [schema, name]).fetchall()
    if not found:
        return None
    published = _read_published(connection, publication, schema, name)
    if published is None:
        return None
    oid, kind, identity = found[0][:3]
    names, row_filter = published
    operators = _read_operators(connection, [row[4] for row in found if row[6] is not None])
    columns, key = [], []
    for _, _, _, column, type_oid, modifier, position, type_name, collation, generated in found:
        is_left_out = names is not None and column not in names
        if is_left_out or (generated and connection.info.server_version < 180000):
            continue
        columns.append(RelationColumn(column, identity == "f" or position is not None, type_oid, modifier))
        if position is not None:
            ordered = f" COLLATE {collation}" if collation else ""
            key.append((position, KeyColumn(column, type_name, ordered, operators.get(type_oid, {}))))
    relation = RelationMessage(oid, schema, name, identity, tuple(columns))
    quoted = f"{quote(schema)}.{quote(name)}"
    return PostgresTableShape(relation, quoted if kind == "p" else f"ONLY {quoted}", tuple(c for _, c in sorted(key)), row_filter)


FIRST_USER_OID = 16384
"""The first OID of types that are not built in."""

_OPERATORS = (
    "WITH RECURSIVE base AS ("
    "SELECT oid AS declared, oid, typbasetype, typtype FROM pg_catalog.pg_type WHERE oid = ANY(%s::oid[]) "
    "UNION ALL SELECT b.declared, t.oid, t.typbasetype, t.typtype FROM base b JOIN pg_catalog.pg_type t ON t.oid = b.typbasetype "
    "WHERE b.typtype = 'd') "
    "SELECT b.declared::bigint, o.amopstrategy, pg_catalog.format('OPERATOR(%%I.%%s)', n.nspname, p.oprname) FROM base b "
    "JOIN pg_catalog.pg_opclass c ON c.opcintype = b.oid AND c.opcdefault "
    "JOIN pg_catalog.pg_am m ON m.oid = c.opcmethod AND m.amname = 'btree' "
    "JOIN pg_catalog.pg_amop o ON o.amopfamily = c.opcfamily AND o.amoplefttype = b.oid AND o.amoprighttype = b.oid "
    "JOIN pg_catalog.pg_operator p ON p.oid = o.amopopr JOIN pg_catalog.pg_namespace n ON n.oid = p.oprnamespace "
    "WHERE n.nspname <> 'pg_catalog'"
)
_STRATEGIES = {1: "<", 2: "<=", 4: ">=", 5: ">"}


def _read_operators(connection: psycopg.Connection[Any], types: Sequence[int]) -> dict[int, dict[str, str]]:
    """Return the operators of the order of some types, for those types whose operators are not built in."""
    own = sorted({oid for oid in types if oid >= FIRST_USER_OID})
    operators: dict[int, dict[str, str]] = {}
    for oid, strategy, operator in connection.execute(_OPERATORS, [own]).fetchall() if own else ():
        if strategy in _STRATEGIES:
            operators.setdefault(oid, {})[_STRATEGIES[strategy]] = operator
    return operators


def _read_published(
    connection: psycopg.Connection[Any], publication: str, schema: str, name: str
) -> tuple[frozenset[str] | None, str] | None:
    """Return the columns of a table that the publication has (None: all), and its condition on rows; None if it does not have the
    table."""
    parts = "attnames::text[], rowfilter" if connection.info.server_version >= 150000 else "NULL::text[], NULL::text"
    found = connection.execute(
        f"SELECT {parts} FROM pg_catalog.pg_publication_tables WHERE pubname = %s AND schemaname = %s AND tablename = %s",
        [publication, schema, name],
    ).fetchone()
    return None if found is None else (frozenset(found[0]) if found[0] else None, found[1] or "")


# --- opening a chunk ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PostgresOpenChunk:
    """A chunk in the transaction that reads it.

    :param shape: the table.
    :param seen: the transactions that the rows include, as PostgreSQL writes a snapshot.
    :param lsn: an LSN after the commits of all these transactions.
    :param now_us: the time of the snapshot, microseconds since 1970.
    """

    shape: PostgresTableShape
    seen: str
    lsn: int
    now_us: int


def open_chunk(connection: psycopg.Connection[Any], publication: str, chunk: Mapping[str, Any]) -> PostgresOpenChunk:
    """Take the snapshot in which a chunk is read; the connection is in a transaction with REPEATABLE READ.

    The table is locked before, as any SELECT does it (ACCESS SHARE): TRUNCATE and ALTER TABLE show in older snapshots, too.

    :param chunk: a split.
    :raises SourceRejected: the table is gone, or is another one, or has another key.
    """
    schema, table = chunk["table"]
    connection.execute(f"LOCK TABLE {quote(schema)}.{quote(table)} IN ACCESS SHARE MODE".encode())
    seen, lsn, now_us, block = fetch_rows(
        connection,
        f"SELECT {find_snapshot_function(connection)}, pg_catalog.pg_current_wal_insert_lsn()::text, "
        "(extract(epoch FROM pg_catalog.clock_timestamp()) * 1000000)::bigint, current_setting('wal_block_size')::int",
    )[0]
    shape = read_table_shape(connection, publication, (schema, table))
    if shape is None:
        action = "Add it again; or give up this window with `skip`, which leaves out its rows of other tables, too"
        raise SourceRejected(f"{schema}.{table}", f"it is no table of the publication `{publication}` any more", action)
    if chunk.get("id") not in (None, shape.relation.oid):
        action = "Give the table its name back; or give up this window with `skip`: then all rows of the other one are read"
        raise SourceRejected(f"{schema}.{table}", "another table has its name since the window was planned", action)
    shape.refuse_other_key(chunk["key"], chunk.get("types", ()))
    return PostgresOpenChunk(shape, seen, _compute_end(parse_lsn(lsn), block), now_us)


PAGE_HEADER = 40
"""Maximum size in bytes of the header of a page of the log."""


def refuse_renamed(connection: psycopg.Connection[Any], table: TableSnapshot) -> None:
    """Refuse a snapshot whose table was renamed. A table whose name is not in the catalog has to have been dropped.

    :raises SourceRejected: the table has another name now.
    """
    found = connection.execute(
        "SELECT n.nspname, c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
        "WHERE c.oid = %s::oid AND (n.nspname, c.relname) <> (%s, %s)",
        [table.id, *table.table],
    ).fetchone()
    if found is not None:
        what = f"it is {'.'.join(found)} now, and its snapshot is not complete: its other rows would never be read"
        raise SourceRejected(table.shown, what, f"Give it its name back until the snapshot is complete. {NEW_PIPELINE}")


def _compute_end(lsn: int, block: int) -> int:
    """Return the end of the last record before the LSN at which the next record is inserted.

    At the beginning of a page, that LSN lies after the page's header, which the log reaches with the next record only.
    """
    into = lsn % block
    return lsn - into if into <= PAGE_HEADER else lsn


# --- events that a chunk includes ---------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class PostgresChunkFilter(ChunkFilter):
    """Decides which events of the log the chunks of a snapshot include.

    Keys are compared by the server: :meth:`look_ahead` asks for many at once.

    :param server: the server, for messages.
    :param connection: a session, in which queries may run while the log is read.
    :param publication: the publication.
    """

    server: SlotServer
    connection: psycopg.Connection[Any]
    publication: str

    def __post_init__(self) -> None:
        super().__post_init__()
        self._relations: dict[int, RelationMessage] = {}
        self._key_indexes: dict[int, tuple[RelationMessage, Sequence[int]]] = {}
        self._seen = {chunk.seen: VisibleTransactions.parse(chunk.seen) for t in self.tables.values() for chunk in t.read}
        self._xid = 0
        self._visible: VisibleTransactions | None = None

    # --- keys ---

    def define(self, relation: RelationMessage) -> None:
        """Record the definition of a table, which holds for the changes behind it."""
        self._relations[relation.oid] = relation

    def watches(self, oid: int) -> bool:
        """Return True if chunks may include changes of a table that the log has defined."""
        relation = self._relations.get(oid)
        return relation is not None and self.find_table((relation.schema, relation.table)) is not None

    def is_moved(self, relation: RelationMessage, change: ChangeMessage) -> bool:
        """Return True if an update gives a row another key, by which the row may belong to another chunk."""
        table = self.find_table((relation.schema, relation.table))
        if table is None or not table.bounds or change.old is None or change.new is None:
            return False
        old, new = (self._read_key(table, relation, values, change.old) for values in (change.old, change.new))
        return old != new

    def look_ahead(self, messages: Iterable[Message]) -> None:
        """Find the chunks of the keys of some messages, which :meth:`includes` is asked about next."""
        keys: dict[tuple[str, str], dict[Key, None]] = {}
        for message in messages:
            if isinstance(message, RelationMessage):
                self.define(message)
            elif isinstance(message, ChangeMessage):
                relation = self._relations[message.relation]
                table = self.find_table((relation.schema, relation.table))
                if table is None or not table.bounds:
                    continue
                for values in (message.old, message.new):
                    if values is not None:
                        keys.setdefault(table.table, {})[self._read_key(table, relation, values, message.old)] = None
        self.forget_chunks()
        for name, wanted in keys.items():
            if (table := self.find_table(name)) is not None:
                self._find(table, list(wanted))

    def _read_key(
        self, table: TableSnapshot, relation: RelationMessage, values: Sequence[object], old: Sequence[object] | None
    ) -> Key:
        key = []
        for name, at in zip(table.key, self._find_key_indexes(table, relation), strict=True):
            value = values[at]
            if value is UNCHANGED and old is not None:
                value = old[at]
            if not isinstance(value, bytes):
                found = f"the log does not hold the value of key column `{name}` of a row that was changed"
                raise SourceRejected(table.shown, found, f"ALTER TABLE {table.shown} REPLICA IDENTITY FULL. {NEW_PIPELINE}")
            key.append(value.decode())
        return tuple(key)

    def _find_key_indexes(self, table: TableSnapshot, relation: RelationMessage) -> Sequence[int]:
        """Return the indexes of the columns of a snapshot's key in the rows of the log.

        :raises SourceRejected: a column is missing.
        """
        known = self._key_indexes.get(relation.oid)
        if known is None or known[0] is not relation:
            at = {column.name: index for index, column in enumerate(relation.columns)}
            for name in table.key:
                if name not in at:
                    key = ", ".join(table.key)
                    found = f"its snapshot was begun by the key ({key}), and its rows have no column `{name}` any more"
                    raise SourceRejected(table.shown, found, f"Restore the key until the snapshot is complete. {NEW_PIPELINE}")
            known = self._key_indexes[relation.oid] = relation, [at[name] for name in table.key]
        return known[1]

    def _find(self, table: TableSnapshot, keys: list[Key]) -> None:
        """Record the number of ends of chunks before each key."""
        shape = read_table_shape(self.connection, self.publication, table.table)
        if shape is None:
            refuse_renamed(self.connection, table)
            # It was dropped, or left the publication: the next window will leave it out of the snapshot. Its changes up to then
            # are events.
            del self._tables[table.table]
            return
        shape.refuse_other_key(table.key, table.types)
        names = [f"c{n}" for n in range(len(table.key))]
        arrays = ", ".join(["%s::text[]"] * len(names))
        values = ", ".join(f"{column.cast(f'u.{name}')} AS {name}" for name, column in zip(names, shape.key, strict=True))
        ends, given = ([f"{of}.{name}" for name in names] for of in ("e", "k"))
        # Each text is cast once, not for each comparison.
        query = (
            f"WITH e AS MATERIALIZED (SELECT {values} FROM unnest({arrays}) AS u({', '.join(names)})), k AS MATERIALIZED "
            f"(SELECT {values}, number FROM unnest({arrays}) WITH ORDINALITY AS u({', '.join(names)}, number)) "
            f"SELECT (SELECT count(*) FROM e WHERE {shape.compare(ends, '<', given)}) FROM k ORDER BY k.number"
        )
        parameters = [list(column) for part in (table.bounds, keys) for column in zip(*part, strict=True)]
        counts = self.connection.execute(query.encode(), parameters).fetchall()
        for key, (count,) in zip(keys, counts, strict=True):
            self.note_chunk(table.table, key, count)

    # --- transactions ---

    def enter(self, begin: BeginMessage) -> None:
        """Record the transaction whose changes come next."""
        self._xid = begin.xid

    def includes(self, relation: RelationMessage, values: Sequence[object], old: Sequence[object] | None = None) -> bool:
        """Return True if the chunk of a row includes the change of this transaction, or is not read yet and will include it.

        :param values: the row.
        :param old: the old row, for a key that is stored out of line.
        """
        return self.is_included((relation.schema, relation.table), lambda table: self._read_key(table, relation, values, old))

    def has_seen(self, seen: str) -> bool:
        """Return True if a chunk includes the transaction of :meth:`enter`. See :meth:`ChunkFilter.has_seen`."""
        return self._seen[seen].include(self._xid)

    def leave_to_chunk(self) -> None:
        """Wait until chunks that are read from now on include the transaction."""
        self._wait_until_visible()

    def _wait_until_visible(self) -> None:
        """Wait until sessions see this transaction, so that chunks which are read later include it.

        Its commit is in the log, so this takes moments only, unless the commit waits for a synchronous standby.

        :raises SourceUnavailable: the transaction is not visible after :data:`VISIBLE_SECONDS`.
        """
        deadline = time.monotonic() + VISIBLE_SECONDS
        while not self._sees_transaction():
            text = fetch_rows(self.connection, f"SELECT {find_snapshot_function(self.connection)}")[0][0]
            self._visible = VisibleTransactions.parse(text)
            if self._sees_transaction():
                return
            if time.monotonic() > deadline:
                detail = f"its commit was written {VISIBLE_SECONDS:.0f} s ago, and waits for a synchronous standby"
                raise SourceUnavailable(self.server.server.where, f"waiting for transaction {self._xid}", detail)
            time.sleep(0.02)

    def _sees_transaction(self) -> bool:
        """Return True if the last snapshot that was asked for includes the transaction of :meth:`enter`."""
        return self._visible is not None and self._visible.include(self._xid)


def make_chunk_token(opened: PostgresOpenChunk) -> dict[str, Any]:
    """Return the token of a chunk that was read."""
    return {"seen": opened.seen, "behind": format_lsn(opened.lsn)}


def make_snapshot_token(connection: psycopg.Connection[Any]) -> dict[str, Any]:
    """Return the token of a chunk that would be read now."""
    seen, lsn, block = fetch_rows(
        connection,
        f"SELECT {find_snapshot_function(connection)}, pg_catalog.pg_current_wal_insert_lsn()::text, "
        "current_setting('wal_block_size')::int",
    )[0]
    return {"seen": seen, "behind": format_lsn(_compute_end(parse_lsn(lsn), block))}
