"""Windows of rows: their end, their splits, and the statements that read a split.

The end is found by counting in the database, in the order of the split columns. Splits are read by Spark's JDBC reader, as a
DataFrame with one partition each, or by Spark's tasks themselves.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone, tzinfo
from functools import reduce
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from airflow_kafka_spark.errors import SourceRejected, SourceUnavailable
from airflow_kafka_spark.errors.base import quote_names
from airflow_kafka_spark.formats.types import quote_with_backticks
from airflow_kafka_spark.hooks.databases import SESSION_ENDED, is_session_ended, parse_name
from airflow_kafka_spark.sources.base import MAX_SPLITS, FrozenWindow
from airflow_kafka_spark.sources.jdbc import pages
from airflow_kafka_spark.sources.jdbc.database import (
    DatabaseSession,
    MissingRelation,
    Relation,
    SourceColumn,
    SourceDatabase,
    SplitKey,
    keeps_order,
)
from airflow_kafka_spark.sources.jdbc.options import JdbcSourceOptions
from airflow_kafka_spark.windows.model import RowsAhead
from airflow_kafka_spark.windows.report import PassProgress, parse_position_progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from airflow_kafka_spark.sources.base import SplitReader


log = logging.getLogger(__name__)

AHEAD = timedelta(minutes=5)
"""Time by which clocks of writers may be ahead of the server's without a warning."""
MAX_BYTES = 500_000
"""Maximum size of a window's splits as JSON, in bytes: with long text keys, a window has fewer splits."""

HIDDEN_WRITERS = "a row that one of them commits after a row with a higher cursor would never be read"
"""The consequence of a server that hides the transactions of its writers."""
SHOW_WRITERS = (
    "Read with a connection to the server where they run. Or set `writers_timeout=0`: with a timestamp, and a `delay` longer "
    "than the longest transaction and the lag of a replica together, no row is missed; with an incrementing column, such rows are"
)
"""The action against it."""


# --- the relation -------------------------------------------------------------------------------------------------------


def look_up_relation(options: JdbcSourceOptions, session: DatabaseSession) -> Relation | MissingRelation:
    """Return the table or query that the options name, as the server describes it now."""
    if options.query is not None:
        return session.query(options.query, options.name)
    return session.find_table(*parse_name(options.table or ""))


def find_relation(options: JdbcSourceOptions, session: DatabaseSession) -> Relation:
    """Return the table or query that the options name.

    :raises SourceRejected: there is no such table.
    """
    found = look_up_relation(options, session)
    if isinstance(found, MissingRelation):
        raise SourceRejected(options.name, f"there is no table {found.name}{found.hint}", "Create it, or correct `table`")
    return found


def list_selected_columns(options: JdbcSourceOptions, relation: Relation) -> tuple[SourceColumn, ...]:
    """Return the columns to read, in their order.

    :raises SourceRejected: one is missing, or cannot be read.
    """
    names = relation.columns if options.include_columns is None else options.include_columns
    columns = [find_column(relation, name) for name in names]
    for column in columns:
        if column.problem:
            raise SourceRejected(relation.name, f"column `{column.name}` cannot be read: {column.problem}")
    return tuple(columns)


def find_column(relation: Relation, name: str) -> SourceColumn:
    """Return the column of this name.

    :raises SourceRejected: the table has no such column.
    """
    try:
        return relation.columns[name]
    except KeyError:
        raise SourceRejected(
            relation.name, f"there is no column `{name}`; there are {', '.join(f'`{c}`' for c in relation.columns)}"
        ) from None


# --- the order ----------------------------------------------------------------------------------------------------------


def list_split_columns(options: JdbcSourceOptions, relation: Relation) -> tuple[str, ...]:
    """Return the columns that order the rows: the cursor; after a timestamp also the key, which orders rows of one timestamp."""
    cursor, key = options.cursor_columns, tuple(options.key) or relation.key
    if options.effective_mode == "bulk":
        return key
    if options.effective_mode != "timestamp":
        return cursor
    usable = [relation.columns[name] for name in key if name in relation.columns]
    return cursor + tuple(c.name for c in usable if c.name not in cursor and c.literal and not c.nullable and c.readable)


@dataclass(frozen=True)
class SplitOrder:
    """The split columns of a relation, and SQL conditions on them.

    :param session: a session of the server, for its SQL.
    :param columns: the split columns.
    :param names: the quoted expressions that stand for them.
    """

    session: DatabaseSession
    columns: tuple[SourceColumn, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, session: DatabaseSession, relation: Relation, names: Sequence[str]) -> SplitOrder:
        """Return the order by these columns of the relation.

        :raises SourceRejected: a column is missing.
        """
        columns = tuple(find_column(relation, name) for name in names)
        return cls(session, columns, tuple(session.dialect.quote(name) for name in names))

    @property
    def sql(self) -> str:
        """The columns, as for ``ORDER BY``."""
        return ", ".join(self.names)

    @property
    def texts(self) -> str:
        """Expressions for the columns' values as :data:`SplitKey`."""
        return ", ".join(self.session.dialect.make_text(c, name) for c, name in zip(self.columns, self.names, strict=True))

    def make_not_null_condition(self) -> list[str]:
        """Return the conditions that no split column is NULL."""
        return [f"{name} IS NOT NULL" for column, name in zip(self.columns, self.names, strict=True) if column.nullable]

    def make_null_condition(self) -> str:
        """Return the condition that a split column is NULL; empty if none can be."""
        return " OR ".join(f"{name} IS NULL" for column, name in zip(self.columns, self.names, strict=True) if column.nullable)

    def make_after_condition(self, values: Sequence[str]) -> str:
        """Return the condition for rows after a row.

        :param values: its :data:`SplitKey`.
        """
        return self.session.dialect.make_after_condition(self.names, self._make_literals(values))

    def make_up_to_condition(self, values: Sequence[str]) -> str:
        """Return the condition for a row and the rows before it.

        :param values: its :data:`SplitKey`.
        """
        return self.session.dialect.make_up_to_condition(self.names, self._make_literals(values))

    def _make_literals(self, values: Sequence[str]) -> list[str]:
        return [self.session.dialect.make_literal(column, value) for column, value in zip(self.columns, values, strict=True)]

    def make_split_condition(self, split: Mapping[str, Any]) -> str:
        """Return the condition for the rows of a split."""
        if split.get("null"):
            return self.make_null_condition() or "1 = 0"
        conditions = self.make_not_null_condition()
        if split.get("after") is not None:
            conditions.append(self.make_after_condition(split["after"]))
        conditions.append(self.make_up_to_condition(split["to"]))
        return " AND ".join(f"({condition})" for condition in conditions)


# --- the position -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WindowStart:
    """The start of the next window.

    :param order: the names of the split columns.
    :param ordered_as: the kind of order of each of them.
    :param after: the last row of the previous window in this order; None to begin with the first row.
    :param table_pass: the number of the pass over the table; ``bulk`` only.
    :param table_id: the server's id of the table that the rows of earlier windows were read from; 0 if unknown.
    """

    order: tuple[str, ...]
    ordered_as: tuple[str, ...]
    after: SplitKey | None = None
    table_pass: int = 1
    table_id: int = 0


def resolve_window_start(options: JdbcSourceOptions, relation: Relation, position: Mapping[str, Any] | None) -> WindowStart:
    """Return the start of the window after ``position``.

    :raises SourceRejected: the position belongs to another table, mode or cursor, or to a cursor of another type.
    """
    order = list_split_columns(options, relation)
    if not order:
        raise SourceRejected(relation.name, "it has no primary key", "Name the columns to cut it by with `key=`")
    ordered_as = _list_orders(relation, order)
    if position is None:
        return WindowStart(order, ordered_as)
    _refuse_other_options(options, relation, position)
    recorded_order, table_pass = tuple(position["order"]), position.get("pass", 1)
    if position.get("complete"):
        return WindowStart(order, ordered_as, None, table_pass + 1)
    if "pages" in position:
        log.warning("%s: its pass by pages is not complete, and a new one by the key begins", relation.name)
        return WindowStart(order, ordered_as, None, table_pass + 1)
    after = position.get("after")
    if after is None:
        return WindowStart(order, ordered_as, None, table_pass)
    refuse_other_order(relation, position)
    # The previous window may have ended between rows that only its own order separates.
    orders = _list_orders(relation, recorded_order)
    return WindowStart(recorded_order, orders, tuple(after), table_pass, position.get("table_id", 0))


def _refuse_other_options(options: JdbcSourceOptions, relation: Relation, position: Mapping[str, Any]) -> None:
    """Refuse a position of other options.

    :raises SourceRejected: it belongs to another table, mode or cursor.
    """
    recorded = (position["mode"], position.get("table"), tuple(position["order"])[: len(options.cursor_columns)])
    now = (options.effective_mode, relation.name if options.query is None else None, options.cursor_columns)
    if recorded != now:
        was = f'mode "{recorded[0]}" on {_format_names(recorded[2])} of {recorded[1] or "a query"}'
        asked = f'"{now[0]}" on {_format_names(now[2])} of {now[1] or "a query"}'
        action = "Put the options back, or give the operator a new `pipeline=` name to start over"
        raise SourceRejected(relation.name, f"earlier windows were read in {was}, the options say {asked}", action)


def _list_orders(relation: Relation, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(find_column(relation, name).ordered_as for name in names)


def refuse_other_order(relation: Relation, recorded: Mapping[str, Any]) -> None:
    """Refuse a position or a split if its columns now order the rows in another way, as ``text`` orders 10 before 9.

    :param recorded: the position or the split. Those of earlier releases do not say how their columns ordered the rows.
    :raises SourceRejected: a column is gone, or has another type, so that rows would be read again, or never.
    """
    names = tuple(recorded["order"])
    if gone := [name for name in names if name not in relation.columns]:
        found = f"there is no column {quote_names(gone)} any more, by which earlier windows were cut"
        raise SourceRejected(relation.name, found, "Put it back, or give the operator a new `pipeline=` name to start over")
    for name, was, now in zip(names, recorded.get("ordered_as", ()), _list_orders(relation, names), strict=False):
        if not keeps_order(was, now):
            found = f"column `{name}` is of type {relation.columns[name].type}, which orders rows as {now or 'nothing'}"
            raise SourceRejected(
                relation.name,
                f"{found}; expected the order of {was}, in which earlier windows were read: rows would be read again, or never",
                f"Change the type of `{name}` back, or give the operator a new `pipeline=` name to start over",
            )


def _format_names(columns: Sequence[str]) -> str:
    return quote_names(columns) or "its key"


def _make_position(
    options: JdbcSourceOptions, relation: Relation, start: WindowStart, after: SplitKey | None, *, complete: bool
) -> dict[str, Any]:
    bulk = options.effective_mode == "bulk"
    return {
        "mode": options.effective_mode,
        "table": relation.name if options.query is None else None,
        "order": list(start.order),
        "ordered_as": list(start.ordered_as),
        "after": None if bulk and complete else list(after) if after else None,
        **({"pass": start.table_pass, "complete": complete} if bulk else {}),
        **({"table_id": start.table_id} if start.table_id else {}),
    }


# --- the window ---------------------------------------------------------------------------------------------------------


def freeze_window(options: JdbcSourceOptions, database: SourceDatabase, position: Mapping[str, Any] | None) -> FrozenWindow:
    """Decide the window after ``position``; see :meth:`RowSource.freeze`."""
    with database.open_session("freezing a window") as session:
        relation = find_relation(options, session)
        if options.split_by == "pages":
            if position is not None:
                _refuse_other_options(options, relation, position)
            return pages.freeze_pages(options, session, relation, position)
        start = resolve_window_start(options, relation, position)
        order = SplitOrder.of(session, relation, start.order)
        has_cursor = options.effective_mode != "bulk"
        if options.waits_for_writers and (hidden := session.find_hidden_writers(relation)):
            raise SourceRejected(relation.name, f"{hidden}: {HIDDEN_WRITERS}", SHOW_WRITERS)
        if has_cursor:
            _check_sequence(options, session, relation, start)
            _refuse_nulls(options, session, relation)
        now = session.read_clock() if options.effective_mode.startswith("timestamp") else None
        ahead = _find_rows_ahead(options, order, relation, now) if now is not None else None
        nulls = 0
        if not has_cursor and start.after is None and order.make_null_condition():
            ((nulls,),) = session.fetch_rows(f"SELECT count(*) FROM {relation.sql} WHERE {order.make_null_condition()}")
        end = _find_end(options, order, relation, start, now)
        if has_cursor:
            _refuse_last_value(options, order, relation, end)
            start = _check_identity(order, relation, start, found_rows=end is not None)
        else:
            warn_of_new_table(relation, start.table_id)
            start = replace(start, table_id=relation.table_id)
        if end is None:
            splits = (_make_null_split(start),) if nulls else ()
            position = _make_position(options, relation, start, start.after, complete=True)
            return FrozenWindow(splits, position, nulls, ahead=ahead)
        if options.waits_for_writers:
            # Only now that the end is known: this must see every transaction that may still insert before the end.
            writers = session.wait_for_writers(relation, options.writers_timeout)
            if writers:
                raise SourceUnavailable(
                    relation.name, f"waiting {options.writers_timeout:g} s for {writers}", "it is still writing"
                )
        frozen = _split_window(options, order, relation, start, end, nulls)
        return replace(frozen, ahead=ahead) if has_cursor else _add_progress(options, session, relation, start, position, frozen)


def _add_progress(
    options: JdbcSourceOptions,
    session: DatabaseSession,
    relation: Relation,
    start: WindowStart,
    position: Mapping[str, Any] | None,
    frozen: FrozenWindow,
) -> FrozenWindow:
    """Return a window of a pass with the progress of the pass, if it takes several windows."""
    earlier = parse_position_progress(position) if position is not None and start.after is not None else None
    if earlier is None and not frozen.remaining:
        return frozen
    if earlier is None:
        rows = session.estimate_rows(relation.sql) if options.query is None else 0
        earlier = PassProgress.begin(time.time(), (rows,), options.split_records)
    progress = earlier.add(len(frozen.splits), frozen.rows or 0, is_complete=not frozen.remaining)
    return replace(frozen, position={**frozen.position, "progress": progress.to_json()})


def _refuse_nulls(options: JdbcSourceOptions, session: DatabaseSession, relation: Relation) -> None:
    """Refuse a query with rows whose cursor is NULL, which no window would read. Of a table, the catalog says whether its columns
    take NULL, so the validation has refused it.

    :raises SourceRejected: there are such rows, and ``validate_non_null`` is set.
    """
    if options.query is None or not options.validate_non_null:
        return
    names = options.cursor_columns
    condition = SplitOrder.of(session, relation, names).make_null_condition()
    rows = session.fetch_rows(f"SELECT count(*) FROM {relation.sql} WHERE {condition}")[0][0] if condition else 0
    if rows:
        found = f"{rows:,} of its rows have NULL in {quote_names(names)}; rows without a cursor are never read"
        action = f"Leave them out (`WHERE {names[0]} IS NOT NULL`), or accept that with `validate_non_null=False`"
        raise SourceRejected(relation.name, found, action)


def _find_rows_ahead(options: JdbcSourceOptions, order: SplitOrder, relation: Relation, now: datetime) -> RowsAhead | None:
    """Return the rows whose timestamps are later than the server's clock by more than :data:`AHEAD`, and log a warning of them;
    None without any. They wait until then, so that a wrong timestamp may hide a row for years.

    :param now: the time of that clock.
    """
    column, name = order.columns[0], order.names[0]
    if not column.clock:
        return None
    zone = timezone.utc if column.clock == "zoned" else ZoneInfo(options.db_timezone)
    wall = (now + AHEAD).astimezone(zone).replace(tzinfo=None)
    dialect = order.session.dialect
    rows = f"SELECT count(*) AS n, max({name}) AS m FROM {relation.sql} WHERE {name} > {dialect.make_clock_literal(column, wall)}"
    ((count, largest),) = order.session.fetch_rows(f"SELECT n, {dialect.make_text(column, 'm')} FROM ({rows}) AS __ahead")
    if not count:
        return None
    log.warning(
        "%s: %s rows have a `%s` in the future, up to %s, and wait until then. Correct them if their timestamps are wrong",
        relation.name, f"{count:,}", column.name, largest,
    )  # fmt: skip
    return RowsAhead(int(count), str(largest))


def _check_sequence(options: JdbcSourceOptions, session: DatabaseSession, relation: Relation, start: WindowStart) -> None:
    if start.after is None or options.effective_mode != "incrementing":
        return
    reason = session.explain_sequence_reset(relation, find_column(relation, start.order[0]), start.after[0])
    if reason:
        action = "Its new rows would never be read: give the operator a new `pipeline=` name to start over"
        raise SourceRejected(relation.name, reason, action)


def _refuse_last_value(options: JdbcSourceOptions, order: SplitOrder, relation: Relation, end: SplitKey | None) -> None:
    """Refuse an incrementing cursor that is at a value after which none comes.

    :raises SourceRejected: the window's last row has such a value.
    """
    column = order.columns[0]
    if options.effective_mode != "incrementing" or end is None or not (column.clock or column.ordered_as == "number"):
        return
    if end[0].lower() in ("nan", "infinity"):
        found = f"`{column.name}` of a row is {end[0]}; rows that are inserted later would come before it, and never be read"
        raise SourceRejected(relation.name, found, "Correct the row, or leave it out with `query=`")


def warn_of_new_table(relation: Relation, table_id: int) -> None:
    """Log a warning if a pass or an open window continues with another table of the same name.

    :param table_id: the id of the table with which it began; 0 if unknown.
    """
    if table_id and relation.table_id not in (0, table_id):
        log.warning(
            "%s: the table was created again (its id was %s and is %s) since rows were read. The rest is read from the new one",
            relation.name, table_id, relation.table_id,
        )  # fmt: skip


def _check_identity(order: SplitOrder, relation: Relation, start: WindowStart, *, found_rows: bool) -> WindowStart:
    """Return the start with the id of the table that the window reads.

    :param found_rows: True if the window has rows.
    :raises SourceRejected: the table was created again, and all of its rows lie before the start, where none would be read.
    """
    if not relation.table_id or start.table_id in (0, relation.table_id):
        return replace(start, table_id=relation.table_id)
    assert start.after is not None
    there = f"the table was created again (its id was {start.table_id} and is {relation.table_id})"
    upto = ", ".join(start.after)
    rest = _format_where([*order.make_not_null_condition(), order.make_after_condition(start.after)])
    if not found_rows and not order.session.fetch_rows(f"SELECT 1 FROM {relation.sql}{rest} LIMIT 1"):
        last = _find_last_row(order, relation, order.make_not_null_condition())
        # An empty table may still be filled. The id stays that of the table whose rows were read.
        if last is None:
            return start
        if last != start.after:
            found = f"{there}, and its last row is at {', '.join(last)}; rows up to {upto} were read before"
            action = "Its rows would never be read: give the operator a new `pipeline=` name to start over"
            raise SourceRejected(relation.name, found, action)
    log.warning("%s: %s. Rows up to %s count as read", relation.name, there, upto)
    return replace(start, table_id=relation.table_id)


def _find_end(
    options: JdbcSourceOptions, order: SplitOrder, relation: Relation, start: WindowStart, now: datetime | None
) -> SplitKey | None:
    """Return the last row after ``start``; None if no row follows it.

    :param now: the time of the server's clock, for windows with a timestamp.
    """
    conditions = order.make_not_null_condition()
    if start.after is not None:
        conditions.append(order.make_after_condition(start.after))
    clock = order.columns[0].clock
    if now is not None and clock:
        instant = now - timedelta(seconds=options.delay)
        wall = find_lowest_clock(instant, timezone.utc if clock == "zoned" else ZoneInfo(options.db_timezone))
        wall = _round_down(wall, order.columns[0].clock_digits)
        conditions.append(f"{order.names[0]} < {order.session.dialect.make_clock_literal(order.columns[0], wall)}")
    return _find_last_row(order, relation, conditions)


def _round_down(wall: datetime, digits: int) -> datetime:
    """Return a time without the digits of a second's fraction that a column does not hold. Until such a unit of time is over,
    rows may still get its timestamp, also rows that come before others of it in the order of the window."""
    unit = 10 ** (6 - digits)
    return wall.replace(microsecond=wall.microsecond // unit * unit)


def find_lowest_clock(instant: datetime, zone: tzinfo) -> datetime:
    """Return the lowest time that a clock of this zone shows from an instant on: that of the instant, or, in the hour before the
    clock is set back, the time to which it is set back. Rows that are written in the second of these hours have lower timestamps
    than those of the first, and would lie before the cursor.

    :param instant: an instant with a time zone.
    :return: a time without a time zone.
    """
    shown = instant.astimezone(zone)
    offset = shown.utcoffset()
    # The second time has `fold=1`. Where clocks are put forward, no instant shows the time that both values of `fold` name.
    if shown.fold or shown.replace(fold=1).utcoffset() == offset:
        return shown.replace(tzinfo=None)
    before, behind = instant, instant + timedelta(days=1)
    while behind - before > timedelta(microseconds=1):
        middle = before + (behind - before) / 2
        before, behind = (middle, behind) if middle.astimezone(zone).utcoffset() == offset else (before, middle)
    return behind.astimezone(zone).replace(tzinfo=None)


def _find_last_row(order: SplitOrder, relation: Relation, conditions: Sequence[str]) -> SplitKey | None:
    """Return the split columns of the last row that meets all conditions; None if no row does."""
    downwards = ", ".join(f"{name} DESC" for name in order.names)
    # Sorted in a subquery: beside CAST("id" AS text), which is called "id" too, ORDER BY "id" would sort texts.
    row = f"SELECT {order.sql} FROM {relation.sql}{_format_where(conditions)} ORDER BY {downwards} LIMIT 1"
    found = order.session.fetch_rows(f"SELECT {order.texts} FROM ({row}) AS __end")
    return tuple(found[0]) if found else None


def _split_window(
    options: JdbcSourceOptions, order: SplitOrder, relation: Relation, start: WindowStart, end: SplitKey, nulls: int
) -> FrozenWindow:
    most = options.split_records * (MAX_SPLITS - bool(nulls))
    limit = min(most, options.max_records or most)
    ranges = _RangeQueries(order, relation, start, end)
    unique = not relation.has_children and any(set(key) <= set(start.order) for key in relation.keys)
    find_bounds = ranges.number_rows
    if unique and ranges.indexed:
        order.session.prefer_indexes()
        find_bounds = ranges.step_along_index
    bounds = find_bounds(options.split_records, limit)
    splits, last, rows, whole = _make_splits_between(start, bounds)
    rest = 0
    if whole and rows < limit:
        rest = ranges.count(last, end)
        if rest:
            splits.append(_make_split(start, last, end))
            last = end
    remaining = not (whole and rows < limit) and ranges.has_rows(last, end)
    if last is not None and not unique:
        # Rows of equal split columns are all taken if a bound falls between them.
        rows, rest = (ranges.count(start.after, last) if splits else 0), 0
    if nulls:
        splits.append(_make_null_split(start))
    position = _make_position(options, relation, start, last, complete=not remaining)
    return FrozenWindow(tuple(splits), position, rows + rest + nulls, remaining)


@dataclass(frozen=True)
class _RangeQueries:
    """Queries for ranges of a window's rows. A range begins behind its first bound, and includes its second one.

    :param end: the last row of the window.
    """

    order: SplitOrder
    relation: Relation
    start: WindowStart
    end: SplitKey

    @property
    def indexed(self) -> bool:
        """True if an index gives the rows in this order without sorting."""
        columns = self.start.order
        return not self.relation.has_children and any(index[: len(columns)] == columns for index in self.relation.indexes)

    def step_along_index(self, size: int, limit: int) -> Iterator[tuple[int, SplitKey]]:
        """Yield every ``size``-th row, and the number of rows up to it, by one step along an index for each.

        This is several times faster than numbering the rows. No two rows may have equal split columns.
        """
        after, taken = self.start.after, 0
        while taken < limit:
            step = min(size, limit - taken)
            row = f"SELECT {self.order.sql} FROM {self._make_range(after, self.end)} ORDER BY {self.order.sql}"
            found = self.order.session.fetch_rows(f"SELECT {self.order.texts} FROM ({row} LIMIT 1 OFFSET {step - 1}) AS __cut")
            if not found:
                return
            after, taken = tuple(found[0]), taken + step
            yield taken, after

    def number_rows(self, size: int, limit: int) -> Iterator[tuple[int, SplitKey]]:
        """Yield every ``size``-th row, and its number, by one query that sorts and numbers all rows."""
        rows = (
            f"SELECT {self.order.sql} FROM {self._make_range(self.start.after, self.end)} ORDER BY {self.order.sql} LIMIT {limit}"
        )
        numbered = f"SELECT {self.order.sql}, row_number() OVER (ORDER BY {self.order.sql}) AS __row FROM ({rows}) AS __rows"
        found = self.order.session.fetch_rows(
            f"SELECT __row, {self.order.texts} FROM ({numbered}) AS __numbered "
            f"WHERE MOD(__row, {size}) = 0 OR __row = {limit} ORDER BY __row"
        )
        for row, *values in found:
            yield row, tuple(values)

    def count(self, after: SplitKey | None, upto: SplitKey) -> int:
        """Return the number of rows of a range."""
        found: int = self.order.session.fetch_rows(f"SELECT count(*) FROM {self._make_range(after, upto)}")[0][0]
        return found

    def has_rows(self, after: SplitKey | None, upto: SplitKey) -> bool:
        """Return True if a range has a row."""
        return bool(self.order.session.fetch_rows(f"SELECT 1 FROM {self._make_range(after, upto)} LIMIT 1"))

    def _make_range(self, after: SplitKey | None, upto: SplitKey) -> str:
        lower = [self.order.make_after_condition(after)] if after is not None else []
        conditions = [*self.order.make_not_null_condition(), *lower, self.order.make_up_to_condition(upto)]
        return f"{self.relation.sql}{_format_where(conditions)}"


def _make_splits_between(
    start: WindowStart, bounds: Iterator[tuple[int, SplitKey]]
) -> tuple[list[dict[str, Any]], SplitKey | None, int, bool]:
    """Return the splits between the bounds, as many as fit into :data:`MAX_BYTES`; the last bound that was taken; the number of
    rows up to it; and True if all bounds were taken.
    """
    splits: list[dict[str, Any]] = []
    after, size, rows = start.after, 0, 0
    for row, values in bounds:
        if after != values:
            split = _make_split(start, after, values)
            size += len(json.dumps(split))
            if size > MAX_BYTES and splits:
                return splits, after, rows, False
            splits.append(split)
        after, rows = values, row
    return splits, after, rows, True


def _make_split(start: WindowStart, after: SplitKey | None, to: SplitKey) -> dict[str, Any]:
    cut_by = {"order": list(start.order), "ordered_as": list(start.ordered_as)}
    table = {"table_id": start.table_id} if start.table_id else {}
    return {**cut_by, **table, "to": list(to), **({"after": list(after)} if after is not None else {})}


def _make_null_split(start: WindowStart) -> dict[str, Any]:
    return {"order": list(start.order), "null": True}


def _format_where(conditions: Sequence[str]) -> str:
    return f" WHERE {' AND '.join(f'({condition})' for condition in conditions)}" if conditions else ""


def read_frame(
    options: JdbcSourceOptions, database: SourceDatabase, spark: SparkSession, splits: Sequence[Mapping[str, Any]]
) -> DataFrame:
    """Return the rows of the splits as a DataFrame; see :meth:`RowSource.read_frame`.

    :raises SourceUnavailable: the server does not answer, or has ended Spark's session.
    """
    with database.open_session("reading the catalog") as session:
        relation = find_relation(options, session)
        columns = list_selected_columns(options, relation)
        parts = make_split_selects(session, relation, columns, splits)
        selects = [(select, [condition for _, condition in found]) for select, found in groupby(parts, key=itemgetter(0))]
        selects = selects or [(select_statement(session, relation, columns, ()), [])]
    reader = database.make_reader_options(options.fetchsize, options.limits)
    properties = {
        **reader.options,
        "driver": reader.driver,
        # Spark compares texts as bytes, the database by a collation. So Spark must not push its conditions down.
        "pushDownPredicate": "false",
    }
    try:
        frames = [
            spark.read.jdbc(reader.url, database.escape_question_marks(select), predicates=conditions, properties=properties)
            for select, conditions in selects
        ]
    except Exception as error:  # of the JVM, or of a server of Spark Connect
        if is_session_ended(str(error)):
            raise SourceUnavailable(database.server.where, "asking for the types of its columns", SESSION_ENDED) from error
        raise
    # Spark does not escape quotes in names of columns: its statements only ever name these numbered ones.
    values = [f"{column.spark.format(c=f'c{n}')} AS {quote_with_backticks(column.name)}" for n, column in enumerate(columns)]
    # Partitions of a union are those of its parts, in their order.
    return reduce(lambda some, more: some.unionAll(more), frames).selectExpr(*values)


def make_split_reader(
    options: JdbcSourceOptions, database: SourceDatabase, splits: Sequence[Mapping[str, Any]], needed: Sequence[str] | None
) -> SplitReader | str:
    """Return the reader with which tasks read the splits, by the conditions of :func:`read_frame`; see
    :meth:`RowSource.make_reader`.
    """
    with database.open_session("reading the catalog") as session:
        if obstacle := session.find_task_read_obstacle():
            return obstacle
        relation = find_relation(options, session)
        columns = [column for column in list_selected_columns(options, relation) if needed is None or column.name in needed]
        for column in columns:
            if column.kind is None:
                return f"column `{column.name}` is of type {column.type}"
        parts = make_split_selects(session, relation, [replace(column, select=column.task) for column in columns], splits)
    values = ", ".join(f"c{n}" for n in range(len(columns)))
    statements = [f"SELECT {values} FROM {select} WHERE {condition}" for select, condition in parts]
    return database.make_split_reader(relation.name, columns, statements, options.limits)


def _find_common_order(relation: Relation, splits: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    orders = {tuple(split["order"]) for split in splits}
    if len(orders) > 1:
        raise SourceRejected(relation.name, f"its splits are cut by different columns: {sorted(orders)}")
    for split in splits:
        refuse_other_order(relation, split)
    return next(iter(orders), ())


def select_statement(session: DatabaseSession, relation: Relation, columns: Sequence[SourceColumn], order: Sequence[str]) -> str:
    """Return the derived table that is read: the values as c0, c1, ... and the unchanged split columns as k0, k1, ..."""
    quote = session.dialect.quote
    return _select_from(session, relation.sql, columns, [quote(find_column(relation, name).name) for name in order])


def _select_from(session: DatabaseSession, table: str, columns: Sequence[SourceColumn], keys: Sequence[str]) -> str:
    values = [f"{column.select.format(c=session.dialect.quote(column.name))} AS c{n}" for n, column in enumerate(columns)]
    return f"(SELECT {', '.join([*values, *(f'{key} AS k{n}' for n, key in enumerate(keys))])} FROM {table}) AS __source"


def make_split_selects(
    session: DatabaseSession, relation: Relation, columns: Sequence[SourceColumn], splits: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """Return per split the derived table that is read, and the condition for the split's rows in it."""
    if any("pages" in split for split in splits):
        names = pages.find_names(session, relation, splits)
        tables = [_select_from(session, names[split["pages"][0]], columns, ["ctid", "xmin"]) for split in splits]
        return list(zip(tables, map(pages.make_split_condition, splits), strict=True))
    order = _find_common_order(relation, splits)
    warn_of_new_table(relation, next((split["table_id"] for split in splits if "table_id" in split), 0))
    select = select_statement(session, relation, columns, order)
    return [(select, condition) for condition in make_split_conditions(session, relation, order, splits)]


def refuse_changed_table(
    options: JdbcSourceOptions, database: SourceDatabase, splits: Sequence[Mapping[str, Any]], position: Mapping[str, Any]
) -> None:
    """Refuse a window of pages whose rows have changed since the pass began; see :meth:`RowSource.check_published`."""
    if "pages" not in position:
        return
    with database.open_session("looking for rows that have changed since the pass by pages began") as session:
        pages.refuse_changed_rows(session, find_relation(options, session), splits, position)


def make_split_conditions(
    session: DatabaseSession, relation: Relation, order: Sequence[str], splits: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return per split the condition for its rows in :func:`select_statement`."""
    columns = tuple(find_column(relation, name) for name in order)
    aliased = SplitOrder(session, columns, tuple(f"k{n}" for n in range(len(order))))
    return [aliased.make_split_condition(split) for split in splits]
