"""Where a window of rows ends and how it is cut: by counting in the database, in the order of the cut columns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta, timezone
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from airflow_kafka_spark.errors import SourceRejected, SourceUnavailable
from airflow_kafka_spark.sources.base import MAX_SPLITS, Frozen
from airflow_kafka_spark.sources.jdbc.connection import read_database
from airflow_kafka_spark.sources.jdbc.database import Column, Missing, Relation, Session, Values

if TYPE_CHECKING:
    from airflow_kafka_spark.sources.jdbc.options import JdbcSettings

MAX_BYTES = 500_000
"""Of a window's splits as JSON: long text keys make for fewer splits."""


def find(source: JdbcSettings, session: Session) -> Relation:
    """:raises SourceRejected: there is no such table."""
    found = session.relation(source)
    if isinstance(found, Missing):
        raise SourceRejected(source.name, f"there is no table {found.name}{found.hint}", "Create it, or correct `table`")
    return found


def selected(source: JdbcSettings, relation: Relation) -> tuple[Column, ...]:
    """The columns to read, in their order.

    :raises SourceRejected: one is missing, or cannot be read.
    """
    names = relation.columns if source.include_columns is None else source.include_columns
    columns = [column_of(relation, name) for name in names]
    for column in columns:
        if column.problem:
            raise SourceRejected(relation.name, f"column `{column.name}` cannot be read: {column.problem}")
    return tuple(columns)


def column_of(relation: Relation, name: str) -> Column:
    """:raises SourceRejected: there is no such column."""
    try:
        return relation.columns[name]
    except KeyError:
        raise SourceRejected(
            relation.name, f"there is no column `{name}`; there are {', '.join(f'`{c}`' for c in relation.columns)}"
        ) from None


# --- the order ----------------------------------------------------------------------------------------------------------


def cut_columns(source: JdbcSettings, relation: Relation) -> tuple[str, ...]:
    """What rows are ordered by: the cursor, and behind a timestamp the key, so that rows of one timestamp can be told apart."""
    cursor, key = source.cursor_columns, tuple(source.key) or relation.key
    if source.effective_mode == "bulk":
        return key
    if source.effective_mode != "timestamp":
        return cursor
    usable = [relation.columns[name] for name in key if name in relation.columns]
    return cursor + tuple(c.name for c in usable if c.name not in cursor and c.literal and not c.nullable and c.readable)


@dataclass(frozen=True)
class Order:
    """The cut columns of a relation, and conditions on them.

    :param columns: the cut columns.
    :param names: the expressions that stand for them, quoted.
    """

    session: Session
    columns: tuple[Column, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, session: Session, relation: Relation, names: Sequence[str]) -> Order:
        """:raises SourceRejected: a column is missing."""
        columns = tuple(column_of(relation, name) for name in names)
        return cls(session, columns, tuple(session.dialect.quote(name) for name in names))

    @property
    def sql(self) -> str:
        return ", ".join(self.names)

    @property
    def texts(self) -> str:
        """The columns' values as :data:`Values`."""
        return ", ".join(self.session.dialect.text(c, name) for c, name in zip(self.columns, self.names, strict=True))

    def present(self) -> list[str]:
        """Conditions: no NULL in any of them."""
        return [f"{name} IS NOT NULL" for column, name in zip(self.columns, self.names, strict=True) if column.nullable]

    def absent(self) -> str:
        """The condition for the others, empty where there are none."""
        return " OR ".join(f"{name} IS NULL" for column, name in zip(self.columns, self.names, strict=True) if column.nullable)

    def after(self, values: Sequence[str]) -> str:
        return self.session.dialect.after(self.names, self._literals(values))

    def upto(self, values: Sequence[str]) -> str:
        return self.session.dialect.upto(self.names, self._literals(values))

    def _literals(self, values: Sequence[str]) -> list[str]:
        return [self.session.dialect.literal(column, value) for column, value in zip(self.columns, values, strict=True)]

    def split(self, split: Mapping[str, Any]) -> str:
        """The condition for a split's rows."""
        if split.get("null"):
            return self.absent() or "1 = 0"
        conditions = self.present()
        if split.get("after") is not None:
            conditions.append(self.after(split["after"]))
        conditions.append(self.upto(split["to"]))
        return " AND ".join(f"({condition})" for condition in conditions)


# --- the position -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """Where the next window begins.

    :param order: the names of the cut columns.
    :param after: the last row of the window before in this order; None: from the beginning.
    :param turn: which pass over the table it belongs to; bulk only.
    """

    order: tuple[str, ...]
    after: Values | None = None
    turn: int = 1


def start_from(source: JdbcSettings, relation: Relation, position: Mapping[str, Any] | None) -> Start:
    """:raises SourceRejected: the position is that of another table, mode or cursor."""
    order = cut_columns(source, relation)
    if not order:
        raise SourceRejected(relation.name, "it has no primary key", "Name the columns to cut it by with `key=`")
    if position is None:
        return Start(order)
    mode = source.effective_mode
    known, cursor = tuple(position["order"]), len(source.cursor_columns)
    told = (position["mode"], position.get("table"), known[:cursor])
    now = (mode, relation.name if source.query is None else None, source.cursor_columns)
    if told != now:
        was = f'mode "{told[0]}" on {_named(told[2])} of {told[1] or "a query"}'
        asked = f'"{now[0]}" on {_named(now[2])} of {now[1] or "a query"}'
        action = "Put the options back, or give the operator a new `pipeline=` name to begin anew"
        raise SourceRejected(relation.name, f"earlier windows were read in {was}, the options say {asked}", action)
    turn = position.get("pass", 1)
    if position.get("complete"):
        return Start(order, None, turn + 1)
    after = position.get("after")
    if after is None:
        return Start(order, None, turn)
    # The window before may have ended between rows that only its own order tells apart.
    return Start(known, tuple(after), turn)


def _named(columns: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in columns) or "its key"


def _position(source: JdbcSettings, relation: Relation, start: Start, after: Values | None, *, complete: bool) -> dict[str, Any]:
    bulk = source.effective_mode == "bulk"
    return {
        "mode": source.effective_mode,
        "table": relation.name if source.query is None else None,
        "order": list(start.order),
        "after": None if bulk and complete else list(after) if after else None,
        **({"pass": start.turn, "complete": complete} if bulk else {}),
    }


# --- the window ---------------------------------------------------------------------------------------------------------


def freeze(source: JdbcSettings, position: Mapping[str, Any] | None) -> Frozen:
    """See :meth:`JdbcSource.freeze`."""
    with read_database(source.conn_id).session("freezing a window") as session:
        relation = find(source, session)
        start = start_from(source, relation, position)
        order = Order.of(session, relation, start.order)
        cursor = source.effective_mode != "bulk"
        if cursor:
            _check_restart(source, session, relation, start)
        nulls = 0
        if not cursor and start.after is None and order.absent():
            ((nulls,),) = session.rows(f"SELECT count(*) FROM {relation.sql} WHERE {order.absent()}")
        end = _end(source, order, relation, start)
        if end is None:
            splits = ({"order": list(start.order), "null": True},) if nulls else ()
            return Frozen(splits, _position(source, relation, start, start.after, complete=True), nulls)
        if cursor and source.writers_timeout > 0:
            # Only now that the end is known: whoever may still insert before it has to be seen by this look.
            who = session.wait_for_writers(relation, source.writers_timeout)
            if who:
                raise SourceUnavailable(relation.name, f"waiting {source.writers_timeout:g} s for {who}", "it is still writing")
        return _cut(source, order, relation, start, end, nulls)


def _check_restart(source: JdbcSettings, session: Session, relation: Relation, start: Start) -> None:
    if start.after is None or source.effective_mode != "incrementing":
        return
    why = session.restarted(relation, column_of(relation, start.order[0]), start.after[0])
    if why:
        action = "Its new rows would never be read: give the operator a new `pipeline=` name to begin anew"
        raise SourceRejected(relation.name, why, action)


def _end(source: JdbcSettings, order: Order, relation: Relation, start: Start) -> Values | None:
    """The last row there is, None: nothing new."""
    conditions = order.present()
    if start.after is not None:
        conditions.append(order.after(start.after))
    clock = order.columns[0].clock
    if source.effective_mode.startswith("timestamp") and clock:
        instant = order.session.now() - timedelta(seconds=source.delay)
        if clock != "zoned":
            instant = instant.astimezone(ZoneInfo(source.db_timezone))
        wall = instant.replace(tzinfo=None) if clock != "zoned" else instant.astimezone(timezone.utc).replace(tzinfo=None)
        conditions.append(f"{order.names[0]} < {order.session.dialect.clock(order.columns[0], wall)}")
    downwards = ", ".join(f"{name} DESC" for name in order.names)
    # Sorted inside: beside CAST("id" AS text), which is called "id" too, ORDER BY "id" would sort texts.
    row = f"SELECT {order.sql} FROM {relation.sql}{_where(conditions)} ORDER BY {downwards} LIMIT 1"
    found = order.session.rows(f"SELECT {order.texts} FROM ({row}) AS __end")
    return tuple(found[0]) if found else None


def _cut(source: JdbcSettings, order: Order, relation: Relation, start: Start, end: Values, nulls: int) -> Frozen:
    most = source.split_records * (MAX_SPLITS - bool(nulls))
    limit = min(most, source.max_records or most)
    ranges = _Ranges(order, relation, start, end)
    unique = any(set(key) <= set(start.order) for key in relation.keys)
    find_cuts = ranges.stepped if unique and ranges.indexed else ranges.counted
    cuts = find_cuts(source.split_records, limit)
    splits, last, rows, whole = _splits(start, cuts)
    rest = 0
    if whole and rows < limit:
        rest = ranges.count(last, end)
        if rest:
            splits.append(_split(start, last, end))
            last = end
    remaining = not (whole and rows < limit) and ranges.any(last, end)
    if last is not None and not unique:
        # Rows that nothing tells apart are all taken where a cut falls between them.
        rows, rest = (ranges.count(start.after, last) if splits else 0), 0
    if nulls:
        splits.append({"order": list(start.order), "null": True})
    position = _position(source, relation, start, last, complete=not remaining)
    return Frozen(tuple(splits), position, rows + rest + nulls, remaining)


@dataclass(frozen=True)
class _Ranges:
    """Ranges of a window's rows, in the database."""

    order: Order
    relation: Relation
    start: Start
    end: Values

    @property
    def indexed(self) -> bool:
        """Whether the rows can be had in this order without sorting them."""
        columns = self.start.order
        return any(index[: len(columns)] == columns for index in self.relation.indexes)

    def stepped(self, size: int, limit: int) -> Iterator[tuple[int, Values]]:
        """Every ``size``-th row and how many there are up to it, by walking along an index from one to the next: several times
        faster than numbering the rows. They have to be told apart by their order."""
        after, taken = self.start.after, 0
        while taken < limit:
            step = min(size, limit - taken)
            row = f"SELECT {self.order.sql} FROM {self._between(after, self.end)} ORDER BY {self.order.sql}"
            found = self.order.session.rows(f"SELECT {self.order.texts} FROM ({row} LIMIT 1 OFFSET {step - 1}) AS __cut")
            if not found:
                return
            after, taken = tuple(found[0]), taken + step
            yield taken, after

    def counted(self, size: int, limit: int) -> Iterator[tuple[int, Values]]:
        """The same in one pass, which sorts and numbers all rows."""
        rows = f"SELECT {self.order.sql} FROM {self._between(self.start.after, self.end)} ORDER BY {self.order.sql} LIMIT {limit}"
        numbered = f"SELECT {self.order.sql}, row_number() OVER (ORDER BY {self.order.sql}) AS __row FROM ({rows}) AS __rows"
        found = self.order.session.rows(
            f"SELECT __row, {self.order.texts} FROM ({numbered}) AS __numbered "
            f"WHERE __row % {size} = 0 OR __row = {limit} ORDER BY __row"
        )
        for row, *values in found:
            yield row, tuple(values)

    def count(self, after: Values | None, upto: Values) -> int:
        found: int = self.order.session.rows(f"SELECT count(*) FROM {self._between(after, upto)}")[0][0]
        return found

    def any(self, after: Values | None, upto: Values) -> bool:
        return bool(self.order.session.rows(f"SELECT 1 FROM {self._between(after, upto)} LIMIT 1"))

    def _between(self, after: Values | None, upto: Values) -> str:
        lower = [self.order.after(after)] if after is not None else []
        return f"{self.relation.sql}{_where([*self.order.present(), *lower, self.order.upto(upto)])}"


def _splits(start: Start, cuts: Iterator[tuple[int, Values]]) -> tuple[list[dict[str, Any]], Values | None, int, bool]:
    """The ranges between the cuts, as many as fit into :data:`MAX_BYTES`; the last cut taken, how many rows there are up to it,
    and whether all of the cuts were taken."""
    splits: list[dict[str, Any]] = []
    after, size, rows = start.after, 0, 0
    for row, values in cuts:
        if after != values:
            split = _split(start, after, values)
            size += len(json.dumps(split))
            if size > MAX_BYTES and splits:
                return splits, after, rows, False
            splits.append(split)
        after, rows = values, row
    return splits, after, rows, True


def _split(start: Start, after: Values | None, to: Values) -> dict[str, Any]:
    return {"order": list(start.order), "to": list(to), **({"after": list(after)} if after is not None else {})}


def _where(conditions: Sequence[str]) -> str:
    return f" WHERE {' AND '.join(f'({condition})' for condition in conditions)}" if conditions else ""
