"""Windows of a table of PostgreSQL that is read by its pages (``split_by="pages"``), and the refusal of a table that changes.

A split is a range of pages. It reads the versions of rows that transactions before the pass have written. Such a version stays in
its page as long as its row is not changed, so that no other split has this row. A version that a later transaction has written is
not read: its row was changed or inserted since, and an earlier version may be published. After each window, the server counts
such versions on its pages, after the last one in the whole table. A window with such a version is not complete.

So a row is read at most once. If the last window is complete, each row that is there is read: it has been on its page since the
pass began.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from airflow_kafka_spark.errors import SourceRejected, SourceUnavailable
from airflow_kafka_spark.sources.base import MAX_SPLITS, FrozenWindow
from airflow_kafka_spark.sources.jdbc.database import DatabaseSession, Relation
from airflow_kafka_spark.sources.jdbc.options import JdbcSourceOptions
from airflow_kafka_spark.windows.report import PassProgress, parse_position_progress

log = logging.getLogger(__name__)

OLDEST_POSTGRES = 14
"""The first release that reads a range of pages without the others."""
MAX_DISTANCE = 1 << 31
"""Number of transactions after which the 32-bit ids of versions no longer tell which of two is older."""

BY_KEY = 'Read it with `split_by="key"`, which begins a new pass; give up an open window with `skip` before'


@dataclass(frozen=True)
class PagedTable:
    """A table, or a partition of a table, as it was when a pass began.

    :param oid: its id.
    :param file: the id of its file. A command that moves rows without changing them writes another file.
    :param pages: number of its pages.
    :param rows: number of its rows, as the server estimates it.
    """

    oid: int
    file: int
    pages: int
    rows: int

    def count_split_pages(self, split_records: int) -> int:
        """Return the number of pages that have about that many rows."""
        return max(1, split_records * self.pages // self.rows) if self.rows > 0 else self.pages

    def estimate_rows(self, pages: int) -> int:
        """Return the approximate number of rows on some pages."""
        return self.rows * pages // self.pages


@dataclass(frozen=True)
class PagesPass:
    """A pass over the pages of a table.

    :param number: the number of the pass.
    :param since: the id of the oldest transaction that was open when the pass began. Later versions of rows have this id or a
        higher one.
    :param tables: the tables that have rows.
    :param table: the index of the table with which the next window begins.
    :param page: the page of it with which the next window begins.
    """

    number: int
    since: int
    tables: tuple[PagedTable, ...]
    table: int = 0
    page: int = 0

    @property
    def is_complete(self) -> bool:
        """True if no page is left."""
        return self.table == len(self.tables)

    def to_json(self) -> dict[str, Any]:
        """Return the part of a position that stores the pass."""
        tables = [[table.oid, table.file, table.pages, table.rows] for table in self.tables]
        return {"since": self.since, "tables": tables, "next": [self.table, self.page]}

    @classmethod
    def from_json(cls, position: Mapping[str, Any]) -> PagesPass:
        """Return the pass that a position stores."""
        value = position["pages"]
        return cls(position["pass"], value["since"], tuple(PagedTable(*table) for table in value["tables"]), *value["next"])

    def cut(self, split_records: int, max_records: int | None) -> tuple[list[dict[str, Any]], PagesPass, int]:
        """Return the next splits, the pass behind them, and the approximate number of their rows."""
        splits: list[dict[str, Any]] = []
        index, page, rows = self.table, self.page, 0
        while index < len(self.tables) and len(splits) < MAX_SPLITS:
            table = self.tables[index]
            upto = min(table.pages, page + table.count_split_pages(split_records))
            more = table.estimate_rows(upto - page)
            if splits and max_records is not None and rows + more > max_records:
                break
            splits.append({"order": [], "pages": [table.oid, table.file, page, upto], "since": self.since})
            rows += more
            index, page = (index, upto) if upto < table.pages else (index + 1, 0)
        return splits, replace(self, table=index, page=page), rows


# --- the catalog --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _StoredTable:
    oid: int
    kind: str
    method: str
    file: int
    pages: int
    may_read: bool
    hides_rows: bool
    name: str


_TABLES = """
WITH RECURSIVE tree AS (
    SELECT {oid}::oid AS oid
    UNION SELECT i.inhrelid FROM tree JOIN pg_catalog.pg_inherits i ON i.inhparent = tree.oid)
SELECT c.oid::bigint, c.relkind::text, coalesce(a.amname::text, ''), coalesce(pg_catalog.pg_relation_filenode(c.oid)::bigint, 0),
    CASE WHEN c.relkind IN ('r', 'm') THEN
        pg_catalog.pg_relation_size(c.oid) / pg_catalog.current_setting('block_size')::bigint ELSE 0 END,
    pg_catalog.has_table_privilege(c.oid, 'SELECT'), pg_catalog.row_security_active(c.oid),
    pg_catalog.quote_ident(n.nspname) || '.' || pg_catalog.quote_ident(c.relname)
FROM tree JOIN pg_catalog.pg_class c ON c.oid = tree.oid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_catalog.pg_am a ON a.oid = c.relam ORDER BY c.oid
"""


def _list_stored(session: DatabaseSession, relation: Relation) -> list[_StoredTable]:
    """Return the table with its partitions, or the tables that inherit from it."""
    return [_StoredTable(*row) for row in session.fetch_rows(_TABLES.format(oid=relation.table_id))]


def find_pages_obstacle(session: DatabaseSession, relation: Relation, release: int) -> str:
    """Return the reason why a table cannot be read by its pages, as a clause; empty if it can.

    :param release: of the server, as 14.
    """
    if release < OLDEST_POSTGRES:
        return f"the server is PostgreSQL {release}; expected {OLDEST_POSTGRES} or newer"
    for table in _list_stored(session, relation):
        if table.hides_rows:
            return f"row security hides rows of {table.name} from the role"
        if table.kind == "p":
            continue
        if table.kind not in ("r", "m") or table.method != "heap":
            return f"{table.name} has no pages of its own; expected a table, a partitioned table or a materialized view"
        if not table.may_read:
            return f"the role may not read {table.name}: it needs SELECT on each partition"
    return ""


# --- windows ------------------------------------------------------------------------------------------------------------

_OPEN = (
    "SELECT pg_catalog.pg_snapshot_xmin(s)::text::bigint, pg_catalog.pg_snapshot_xmax(s)::text::bigint "
    "FROM pg_catalog.pg_current_snapshot() AS s"
)
"""Returns the oldest transaction that is open, and the first one that has not begun."""


def freeze_pages(
    options: JdbcSourceOptions, session: DatabaseSession, relation: Relation, position: Mapping[str, Any] | None
) -> FrozenWindow:
    """Return the window after a position.

    :param position: of the last window of this table; None for the first one.
    :raises SourceRejected: the table has other files than when the pass began.
    :raises SourceUnavailable: a transaction is open for longer than ``writers_timeout``.
    """
    is_begun = position is not None and not position.get("complete") and "pages" in position
    if position is None or not is_begun:
        current = _begin_pass(options, session, relation, position)
    else:
        current = PagesPass.from_json(position)
        _refuse_other_files(session, relation, current)
    splits, behind, rows = current.cut(options.split_records, options.max_records)
    after: dict[str, Any] = {
        "mode": options.effective_mode,
        "table": relation.name,
        "order": [],
        "ordered_as": [],
        "after": None,
        "pass": current.number,
        "complete": behind.is_complete,
        "pages": behind.to_json(),
    }
    progress = parse_position_progress(position) if position is not None and is_begun else None
    if progress is None and not behind.is_complete:
        progress = PassProgress.begin(time.time(), (sum(table.rows for table in current.tables),), options.split_records)
    if progress is not None:
        after["progress"] = progress.add(len(splits), rows, is_bound=True, is_complete=behind.is_complete).to_json()
    return FrozenWindow(tuple(splits), after, remaining=not behind.is_complete)


def _begin_pass(
    options: JdbcSourceOptions, session: DatabaseSession, relation: Relation, position: Mapping[str, Any] | None
) -> PagesPass:
    if position is not None and not position.get("complete"):
        log.warning("%s: its pass by the key is not complete, and a new one by pages begins", relation.name)
    ((_, reached),) = session.fetch_rows(_OPEN)
    deadline, pause = time.monotonic() + options.writers_timeout, 0.005
    # Rows that are there have lower ids than this one, also those of subtransactions, whose ids no snapshot has.
    while (since := session.fetch_rows(_OPEN)[0][0]) < reached:
        if time.monotonic() >= deadline:
            if not options.writers_timeout:
                break
            doing = f"waiting {options.writers_timeout:g} s for the transactions that were open when a pass by pages begins"
            raise SourceUnavailable(relation.name, doing, f"transaction {since} is still open")
        time.sleep(pause)
        pause = min(pause * 2, 0.25)
    # The sizes after `since`, so that the pages have all versions of earlier transactions.
    tables = [
        PagedTable(table.oid, table.file, table.pages, session.estimate_rows(f"ONLY {table.name}"))
        for table in _list_stored(session, relation)
        if table.pages
    ]
    return PagesPass((position or {}).get("pass", 0) + 1, since, tuple(tables))


def _refuse_other_files(session: DatabaseSession, relation: Relation, current: PagesPass) -> None:
    """Refuse a table whose rows may have been moved.

    :raises SourceRejected: a table or partition has another file, is missing, or has rows and was empty when the pass began.
    """
    now, was = _list_stored(session, relation), {table.oid: table.file for table in current.tables}
    same = {table.oid for table in now if was.get(table.oid) == table.file}
    if same != was.keys() or any(table.pages and table.oid not in was for table in now):
        found = "since the pass by pages began, it or a partition was rewritten, truncated, filled, attached or detached"
        raise SourceRejected(relation.name, f"{found}: rows would be read again, or never", BY_KEY)
    ((_, reached),) = session.fetch_rows(_OPEN)
    if reached - current.since >= MAX_DISTANCE:
        found = f"the pass by pages began {reached - current.since:,} transactions ago; expected fewer than {MAX_DISTANCE:,}"
        raise SourceRejected(relation.name, f"{found}: changed rows can no longer be told from others", BY_KEY)


# --- reading ------------------------------------------------------------------------------------------------------------


def make_changed_condition(version: str, since: int) -> str:
    """Return the condition that a version of a row is of a transaction after the beginning of the pass.

    A version that is older by more than two billion transactions has an id that seems to lie in the future.

    :param version: the expression of its ``xmin``.
    """
    return f"pg_catalog.age({version}) BETWEEN 0 AND (SELECT pg_catalog.age('{since % (1 << 32)}'::pg_catalog.xid))"


def make_pages_condition(place: str, first: int, upto: int) -> str:
    """Return the condition that a row is on the pages ``[first, upto)``.

    :param place: the expression of its ``ctid``.
    """
    return f"{place} >= '({first},0)'::pg_catalog.tid AND {place} < '({upto},0)'::pg_catalog.tid"


def make_split_condition(split: Mapping[str, Any]) -> str:
    """Return the condition for the rows of a split, among the rows of its table with ``ctid`` as k0 and ``xmin`` as k1."""
    oid, file, first, upto = split["pages"]
    unchanged = f"NOT ({make_changed_condition('k1', split['since'])})"
    return f"{make_pages_condition('k0', first, upto)} AND {unchanged} AND pg_catalog.pg_relation_filenode({oid}) = {file}"


def find_names(session: DatabaseSession, relation: Relation, splits: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    """Return the names, for a FROM clause, of the tables that the splits read.

    :raises SourceRejected: a table is gone, or has another file.
    """
    stored = {table.oid: table for table in _list_stored(session, relation)}
    for split in splits:
        oid, file, *_ = split["pages"]
        if oid not in stored or stored[oid].file != file:
            shown = stored[oid].name if oid in stored else f"a partition (its id was {oid})"
            found = f"since the pass by pages began, {shown} was rewritten, truncated, detached or dropped"
            raise SourceRejected(relation.name, f"{found}: rows would be read again, or never", BY_KEY)
    return {oid: f"ONLY {table.name}" for oid, table in stored.items()}


# --- after a window -----------------------------------------------------------------------------------------------------


def refuse_changed_rows(
    session: DatabaseSession, relation: Relation, splits: Sequence[Mapping[str, Any]], position: Mapping[str, Any]
) -> None:
    """Refuse a window if rows of its pages were inserted or updated since the pass began; after the last one, rows of the table.

    :param splits: of the window, which are published.
    :param position: of the window.
    :raises SourceRejected: there is such a row, or rows may have been moved.
    """
    current = PagesPass.from_json(position)
    _refuse_other_files(session, relation, current)
    changed = make_changed_condition("xmin", current.since)
    if current.is_complete:
        # In one statement, so that no row moves between two partitions unseen.
        statements = iter([f"SELECT count(*) FROM {relation.sql} WHERE {changed}"])
    else:
        statements = _count_changed(find_names(session, relation, splits), changed, splits)
    rows = sum(session.fetch_rows(statement)[0][0] for statement in statements)
    if rows:
        found = f"{rows:,} of its rows were inserted or updated since the pass by pages began"
        raise SourceRejected(relation.name, f"{found}; a row that is updated may be read twice, or never", BY_KEY)


def _count_changed(names: Mapping[int, str], changed: str, splits: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for oid, found in groupby((split["pages"] for split in splits), key=lambda pages: pages[0]):
        ranges = list(found)
        pages = make_pages_condition("ctid", ranges[0][2], ranges[-1][3])
        yield f"SELECT count(*) FROM {names[oid]} WHERE {pages} AND {changed}"
