"""The snapshot of tables, in chunks: their bounds, and the state of the snapshot in the source's position.

The chunks of one window are read concurrently, each in its own snapshot of the server, which its marker records. Before the next
chunks are planned, the log is read up to a point after all these snapshots. So the position holds the chunks of one window at
most, and the pipeline lags behind the log by the time of one window, independent of the duration of the whole snapshot.

Until a key is read, windows of the log leave out its events, because its chunk will include them.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from airflow_kafka_spark.sources.cdc.tasks.events import TableName
from airflow_kafka_spark.sources.cdc.tasks.snapshot import Key, ReadChunk, TableSnapshot, mark_caught_up
from airflow_kafka_spark.windows.model import IF_GIVEN_UP, PUBLISHED_IN_PART
from airflow_kafka_spark.windows.report import PassProgress

log = logging.getLogger(__name__)


PointT = TypeVar("PointT", int, tuple[int, int])
"""A point in a log as a value that is compared: an LSN, or binlog coordinates."""


@dataclass(frozen=True)
class SnapshotState:
    """The progress of a snapshot.

    :param tables: the tables that are not complete, in the order in which they are read.
    :param behind: a point in the log after all chunks that are read; "" if the log has caught up with them. No further chunk is
        read before that.
    :param repeats: True if rows that are not read may be published already, because a window of chunks was lost with the ledger.
        Then no event is left out, even if a chunk includes it: for a row that was deleted since, there is only its event.
    :param progress: the numbers of planned chunks and of all chunks; None for a snapshot of an earlier release.
    """

    tables: tuple[TableSnapshot, ...] = ()
    behind: str = ""
    repeats: bool = False
    progress: PassProgress | None = None

    @property
    def is_caught_up(self) -> bool:
        """True if the log has caught up with all chunks that are read, and with the point behind which the next may be read."""
        return not self.behind and not any(table.read for table in self.tables)

    @property
    def is_read(self) -> bool:
        """True if a chunk of each row is read, and the log has not caught up with all chunks."""
        return bool(self.tables) and all(table.is_read for table in self.tables)

    def advance_past_log(self, end: PointT, order: Callable[[str], PointT]) -> SnapshotState:
        """Return the state after a window of the log.

        :param end: the end of the window, as ``order`` returns it.
        :param order: returns a point in the log as a value that is compared.
        """
        if self.behind and end < order(self.behind):
            return self
        return replace(self, tables=mark_caught_up(self.tables), behind="")

    def keep_only(self, is_wanted: Callable[[TableSnapshot], bool]) -> SnapshotState:
        """Return the state without the tables that the options or the publication no longer name."""
        kept = tuple(table for table in self.tables if is_wanted(table))
        for table in self.tables:
            if table not in kept:
                log.warning("Table %s is not captured any more: the rest of its snapshot is left out", table.shown)
        return self if kept == self.tables else replace(self, tables=kept)

    def add(self, more: SnapshotState) -> SnapshotState:
        """Return the state with the tables of a new snapshot after those that are left."""
        progress = self.progress if self.tables else more.progress
        return replace(self, tables=(*self.tables, *more.tables), progress=progress)

    @property
    def filter(self) -> list[dict[str, Any]]:
        """Return the state that decides which events a window of the log leaves out; empty if it leaves out none."""
        return [] if self.repeats else [table.to_json() for table in self.tables]

    def to_json(self) -> dict[str, Any]:
        """Return the part of a position that stores the snapshot; empty once the snapshot is complete."""
        if not self.tables:
            return {}
        more: dict[str, Any] = {"repeats": True} if self.repeats else {}
        if self.progress is not None:
            more["progress"] = self.progress.to_json()
        return {"snapshot": {"behind": self.behind, "tables": [table.to_json() for table in self.tables], **more}}

    @classmethod
    def from_json(cls, position: Mapping[str, Any]) -> SnapshotState:
        """Return the state that a position stores."""
        value = position.get("snapshot") or {}
        tables = tuple(TableSnapshot.from_json(table) for table in value.get("tables", ()))
        repeats = bool(value.get("repeats") or position.get(PUBLISHED_IN_PART))
        return cls(tables, value.get("behind", ""), repeats, PassProgress.from_json(value.get("progress")))


def note_tables(named: frozenset[TableName] | None) -> dict[str, Any]:
    """Return the part of a position that stores which tables the options name, for :func:`find_added_tables`."""
    return {} if named is None else {"known": [list(table) for table in sorted(named)]}


def find_added_tables(position: Mapping[str, Any], named: frozenset[TableName] | None) -> frozenset[TableName]:
    """Return the tables that the options name now, and did not when a window was planned; none if either names no tables."""
    known = position.get("known")
    return frozenset() if named is None or known is None else named - {(schema, table) for schema, table in known}


@dataclass(kw_only=True)
class ChunkPlanner(ABC):
    """Plans the next chunks.

    :param most: maximum number of chunks in a window.
    :param chunk_rows: maximum number of rows of a chunk.
    :param bounds: the fields of a split beside its chunk: the point in the log and the log's identity.
    """

    most: int
    chunk_rows: int
    bounds: Mapping[str, Any]
    splits: list[dict[str, Any]] = field(default_factory=list, init=False)

    @abstractmethod
    def find_ends(self, table: TableSnapshot, most: int) -> list[Key] | None:
        """Return the last keys of the next chunks, without that of the table's last chunk; None if the table no longer exists.

        :param most: maximum number of keys.
        :raises SourceRejected: the table has another key than when its snapshot was begun.
        """

    @abstractmethod
    def make_token(self) -> dict[str, Any]:
        """Return the token that a chunk would have if it were read now."""

    def cut(self, state: SnapshotState) -> SnapshotState:
        """Plan the next chunks, as many as a window may have, and return the state without tables that no longer exist."""
        tables = []
        for table in state.tables:
            left = self.most - len(self.splits)
            if left > 0 and not self._cut(table, left):
                log.warning("Table %s is gone: its snapshot is left out", table.shown)
                continue
            tables.append(table)
        progress = state.progress and state.progress.add(len(self.splits), len(self.splits) * self.chunk_rows, is_bound=True)
        return replace(state, tables=tuple(tables), progress=progress)

    def _cut(self, table: TableSnapshot, most: int) -> bool:
        """Plan the next chunks of a table, and return False if the table no longer exists."""
        after, ends = table.upto, self.find_ends(table, most)
        if ends is None:
            return False
        for end in ends:
            self._add(table, after, end)
            after = end
        if len(ends) < most:
            self._add(table, after, None)
        return True

    @cached_property
    def _now(self) -> dict[str, Any]:
        """Return the token of a chunk that is given up: its present rows are left out, and later changes are published."""
        return self.make_token()

    def _add(self, table: TableSnapshot, after: Key | None, upto: Key | None) -> None:
        of_table = table.begin_again().to_json()
        ends = {"after": after and list(after), "upto": upto and list(upto)}
        self.splits.append({**of_table, IF_GIVEN_UP: self._now, **ends, **self.bounds})


def is_chunk(split: Mapping[str, Any]) -> bool:
    """Return True if a split is a chunk of a table, False if it is a part of the log."""
    return "table" in split


def advance_snapshot(
    position: Mapping[str, Any],
    splits: Sequence[Mapping[str, Any]],
    tokens: Sequence[Mapping[str, Any]],
    order: Callable[[str], PointT],
) -> Mapping[str, Any]:
    """Return a window's position with the tokens of the tasks that have read the snapshot.

    :param position: the position that was planned.
    :param order: returns a point in the log as a value that is compared.
    """
    state = SnapshotState.from_json(position)
    is_of_chunks = bool(splits) and is_chunk(splits[0])
    after = _advance_by_chunks(state, splits, tokens, order) if is_of_chunks else _advance_by_statements(state, splits, tokens)
    if after == state:
        return position
    kept = {name: value for name, value in position.items() if name not in ("snapshot", "finished")}
    return {**kept, **after.to_json()}


def _advance_by_chunks(
    state: SnapshotState,
    splits: Sequence[Mapping[str, Any]],
    tokens: Sequence[Mapping[str, Any]],
    order: Callable[[str], PointT],
) -> SnapshotState:
    """Return the state after a window of chunks.

    :param tokens: per chunk, its snapshot.
    """
    tables = {found.table: found for found in state.tables}
    points = [state.behind] if state.behind else []
    for split, token in zip(splits, tokens, strict=True):
        schema, name = split["table"]
        upto = split["upto"]
        table: TableSnapshot = tables[schema, name]
        chunk = ReadChunk(None if upto is None else tuple(upto), token["seen"])
        tables[schema, name] = replace(table, read=(*table.read, chunk))
        points.append(token["behind"])
    return replace(state, tables=tuple(tables.values()), behind=max(points, key=order))


def _advance_by_statements(
    state: SnapshotState, splits: Sequence[Mapping[str, Any]], tokens: Sequence[Mapping[str, Any]]
) -> SnapshotState:
    """Return the state after a window of the log in which tables were renamed, or were truncated and have to be read again."""
    renamed = {tuple(table) for token in tokens for table in token.get("renamed", ())}
    if renamed:
        state = replace(state, tables=tuple(replace(t, is_renamed=t.is_renamed or t.table in renamed) for t in state.tables))
    again = {tuple(table) for token in tokens for table in token.get("truncated", ())}
    if not again:
        return state
    planned = [TableSnapshot.from_json(value) for split in splits for value in split.get("snapshot", ())]
    kept = [table for table in state.tables if table.table not in again]
    restarted = [table.begin_again() for table in planned if table.table in again]
    return replace(state, tables=(*kept, *restarted))
