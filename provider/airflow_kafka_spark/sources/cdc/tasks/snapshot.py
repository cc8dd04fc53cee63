"""Chunks of a table's snapshot, and the events of the log that they make superfluous.

A chunk is a range of a table's key. It is read in one snapshot of the server. Its marker says which transactions this snapshot
includes. An event of the log is left out if the chunk of its row includes the event's transaction. So each row of a chunk is
followed by exactly the changes that it does not include.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from airflow_kafka_spark.sources.cdc.tasks.events import TableName

Key = tuple[str, ...]
"""The values of a row's key, as the source writes them."""


@dataclass(frozen=True)
class ReadChunk:
    """A chunk that is published.

    :param upto: the last key that belongs to it; None if it has no upper bound.
    :param seen: the transactions that its rows include, as the source writes them.
    """

    upto: Key | None
    seen: str


@dataclass(frozen=True)
class TableSnapshot:
    """The progress of the snapshot of a table.

    The table's keys are covered from below: those up to ``done``, then the chunks ``read``, then the keys that are not read.

    :param table: its schema and name.
    :param key: the columns whose values order its rows; empty: the table is one chunk.
    :param done: the last key whose chunk the log has caught up with, so that all later events are published; None without one.
    :param read: chunks that the log has not caught up with.
    :param types: per column of ``key``, the type by which its values are compared.
    :param id: the server's id of the table, which it keeps under another name; 0 if the server has none.
    :param is_renamed: True if the log has a statement that may have given the table another name.
    """

    table: TableName
    key: tuple[str, ...]
    done: Key | None = None
    read: tuple[ReadChunk, ...] = ()
    types: tuple[str, ...] = ()
    id: int = 0
    is_renamed: bool = False

    @property
    def upto(self) -> Key | None:
        """The last key that is read; None if no key is read."""
        return self.read[-1].upto if self.read else self.done

    @property
    def is_read(self) -> bool:
        """True if all keys are read."""
        return bool(self.read) and self.read[-1].upto is None

    @cached_property
    def bounds(self) -> list[Key]:
        """The keys at which chunks end: those that are done, and the chunks that are read."""
        ends = [self.done, *(chunk.upto for chunk in self.read)]
        return [end for end in ends if end is not None]

    @property
    def shown(self) -> str:
        """The table's name for messages."""
        return ".".join(self.table)

    def begin_again(self) -> TableSnapshot:
        """Return the state in which nothing is read."""
        return replace(self, done=None, read=())

    def mark_caught_up(self) -> TableSnapshot:
        """Return the state once the log has caught up with all chunks."""
        return replace(self, done=self.upto, read=())

    def to_json(self) -> dict[str, Any]:
        """Return the value for a plan or a position."""
        return {
            "table": list(self.table),
            "key": list(self.key),
            **({"types": list(self.types)} if self.types else {}),
            **({"id": self.id} if self.id else {}),
            **({"renamed": True} if self.is_renamed else {}),
            **({"done": list(self.done)} if self.done is not None else {}),
            **({"read": [{"upto": c.upto and list(c.upto), "seen": c.seen} for c in self.read]} if self.read else {}),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TableSnapshot:
        """Return the progress that :meth:`to_json` has written."""
        schema, table = value["table"]
        done = value.get("done")
        read = tuple(ReadChunk(c["upto"] and tuple(c["upto"]), c["seen"]) for c in value.get("read", ()))
        types, id, is_renamed = tuple(value.get("types", ())), value.get("id", 0), value.get("renamed", False)
        return cls((schema, table), tuple(value["key"]), None if done is None else tuple(done), read, types, id, is_renamed)


@dataclass(kw_only=True)
class ChunkFilter(ABC):
    """Decides which events of the log the chunks of a snapshot include.

    The server compares keys, because it knows their types and collations. The source asks for many keys at once, and records the
    answers with :meth:`note_chunk`.

    :param tables: tables whose snapshot is not complete, as it was when the window was planned.
    :param publishes_truncates: True if truncates are events.
    :ivar truncated: tables that have to be read again.
    """

    tables: Mapping[TableName, TableSnapshot]
    publishes_truncates: bool
    truncated: list[TableName] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._tables = dict(self.tables)
        self._chunks: dict[tuple[TableName, Key], int] = {}

    @abstractmethod
    def has_seen(self, seen: str) -> bool:
        """Return True if a chunk includes the transaction whose changes come next.

        :param seen: the transactions that the chunk includes.
        """

    def leave_to_chunk(self) -> None:  # noqa: B027
        """Called for a change of a row whose chunk is not read yet, and has to include the change. Does nothing by default."""

    def find_table(self, name: TableName) -> TableSnapshot | None:
        """Return the progress of a table; None if its snapshot is complete, or it has none."""
        return self._tables.get(name)

    def forget_chunks(self) -> None:
        """Remove the records of :meth:`note_chunk`."""
        self._chunks = {}

    def note_chunk(self, table: TableName, key: Key, ends_before: int) -> None:
        """Record how many of a table's :attr:`TableSnapshot.bounds` lie before a key."""
        self._chunks[table, key] = ends_before

    def is_included(self, name: TableName, key: Callable[[TableSnapshot], Key]) -> bool:
        """Return True if the chunk of a row includes the change of this transaction, or is not read yet and will include it.

        :param key: returns the row's key.
        """
        table = self._tables.get(name)
        if table is None:
            return False
        at = 0
        if table.bounds:
            at = self._chunks[name, key(table)]
            if table.done is not None:
                at -= 1
        if at < 0:
            return False  # the log has caught up with its chunk
        if at < len(table.read):
            return self.has_seen(table.read[at].seen)
        self.leave_to_chunk()
        return True

    def is_superfluous_truncate(self, name: TableName) -> bool:
        """Return True if no published row of a table is older than the table's truncate in this transaction.

        If some chunks are older, and others have rows from after it, a consumer that empties its table loses these: the table is
        read again.
        """
        table = self._tables.get(name)
        if table is None:
            return False
        included = [self.has_seen(chunk.seen) for chunk in table.read]
        is_stale = table.done is not None or not all(included)
        if is_stale and any(included) and self.publishes_truncates:
            self._tables[name] = table.begin_again()
            self.truncated.append(name)
        if not is_stale:
            self.leave_to_chunk()
        return not is_stale


def mark_caught_up(tables: Iterable[TableSnapshot]) -> tuple[TableSnapshot, ...]:
    """Return the state of snapshots once the log has caught up with their chunks; without tables that are complete."""
    return tuple(table.mark_caught_up() for table in tables if not table.is_read)
