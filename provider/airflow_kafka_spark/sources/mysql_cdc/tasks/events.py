"""Events of a binary log, as Debezium's connectors for MariaDB and MySQL write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, repeat
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from airflow_kafka_spark.errors import SourceRejected
from airflow_kafka_spark.formats.tasks.text import ValueTexts, join_objects
from airflow_kafka_spark.sources.cdc.tasks.events import (
    HOLE,
    MICROS,
    ChangeWriter,
    ColumnForm,
    Event,
    EventColumn,
    EventForm,
    RowValues,
    TableName,
    TableWriter,
    ValueRefused,
    format_json,
    make_source_schema,
)
from airflow_kafka_spark.sources.cdc.tasks.reader import EventRange
from airflow_kafka_spark.sources.cdc.tasks.snapshot import Key, TableSnapshot
from airflow_kafka_spark.sources.cdc.tasks.transactions import mark_begin, mark_end
from airflow_kafka_spark.sources.mysql_cdc.options import SOURCE_FIELDS
from airflow_kafka_spark.sources.mysql_cdc.tasks import binlog
from airflow_kafka_spark.sources.mysql_cdc.tasks.binlog import LogEvent, LogTable, LogUnreadable, Transactions
from airflow_kafka_spark.sources.mysql_cdc.tasks.images import ColumnImages, RowImages, find_rows, format_values, measure
from airflow_kafka_spark.sources.mysql_cdc.tasks.session import NEW_PIPELINE, Located, LogCoordinates, LogServer
from airflow_kafka_spark.sources.mysql_cdc.tasks.snapshot import MySqlChunkFilter
from airflow_kafka_spark.sources.mysql_cdc.tasks.values import (
    ColumnRefused,
    ReadColumn,
    ValueForm,
    parse_defined_table,
    parse_savepoint,
    parse_truncate,
    read_column,
    remove_prefixes,
)

HELD_BYTES = 16 << 20
"""Maximum number of bytes of a transaction that are held until its end is read."""

_CHANGES = ("INSERT", "UPDATE", "DELETE", "REPLACE", "LOAD", "WITH", "CALL")
_CALLS = re.compile(r"(?:SELECT|DO)\b", re.IGNORECASE)
"""Calls of functions, which are logged as statements if they change rows. The tables are unknown."""


@dataclass(frozen=True)
class MySqlEventForm(EventForm):
    """The form of events, and the tables that are captured.

    :param database: the connection's database.
    :param tables: the tables whose changes are captured; None for all of ``database``.
    :param values: the form of values.
    :param unreadable: per table, the columns whose values the log does not describe, and their type.
    :param is_mariadb: True if the server is MariaDB, False if it is MySQL.
    :param refuses_cascades: True if the log does not hold the changes of rows by foreign keys, and this is not accepted.
    """

    database: str = ""
    tables: frozenset[TableName] | None = None
    values: ValueForm = field(default_factory=ValueForm)
    unreadable: dict[TableName, dict[str, str]] = field(default_factory=dict, hash=False)
    is_mariadb: bool = True
    refuses_cascades: bool = False

    def takes(self, table: TableName) -> bool:
        """Return True if the changes of a table are captured."""
        return table in self.tables if self.tables is not None else table[0] == self.database


def _make_schema(is_mariadb: bool) -> dict[str, object]:
    return make_source_schema("mariadb" if is_mariadb else "mysql", SOURCE_FIELDS)


class RowPosition(NamedTuple):
    """A row of the log.

    :param position: the position at which its event begins.
    :param row: its number within the event.
    """

    position: int
    row: int


class SourceParts(NamedTuple):
    """The parts of ``source`` that all rows of an event of the log, or of a chunk, share.

    :param timestamp: milliseconds since 1970.
    :param before_database: the beginning, up to the name of the database.
    :param before_table: the text between the names of database and table.
    :param before_position: the text between the name of the table and the position.
    """

    timestamp: int = 0
    before_database: str = ""
    before_table: str = ""
    before_position: str = ""

    def format_source(self, table: MySqlTableWriter, position: int, row: int | str) -> str:
        """Return the field ``source`` as JSON."""
        database, name = table.name_parts
        return (
            f"{self.before_database}{database}{self.before_table}{name}{self.before_position}{position},"
            f'"row":{row},"thread":null,"query":null}}'
        )

    def split_source(self, table: MySqlTableWriter, position: int) -> list[str]:
        """Return the texts before and after the number of the row in the field ``source``."""
        return self.format_source(table, position, HOLE).split(HOLE)


class LogRow(NamedTuple):
    """A row of the log.

    :param text: its JSON.
    :param key: the JSON of its key.
    :param cut: its values by which the chunks of a snapshot are cut; empty for a table without a snapshot, and if one is null.
    """

    text: str
    key: str
    cut: Key = ()


class RowTexts(NamedTuple):
    """The rows of some events of a table.

    :param texts: their JSON.
    :param keys: the JSON of their keys.
    :param cuts: their values by which the chunks of a snapshot are cut, one after the other.
    :param counts: the number of rows of each event.
    """

    texts: pa.Array
    keys: pa.Array
    cuts: Iterable[Key]
    counts: Sequence[int]

    def list_rows(self) -> list[list[LogRow]]:
        """Return the rows of each event."""
        left = map(LogRow, self.texts.to_pylist(), self.keys.to_pylist(), self.cuts)
        return [list(islice(left, count)) for count in self.counts]


class RowChange(NamedTuple):
    """A change of a row.

    :param old: the row before; None for an insert.
    :param new: the row after; None for a delete.
    """

    old: LogRow | None
    new: LogRow | None


class MySqlTableWriter(TableWriter):
    """A table of the log, ready to read and write its rows.

    :param table: its columns and its key.
    :param form: the form of events.
    :param snapshot: the progress of its snapshot, whose chunks its rows are compared with; None: it has none.
    """

    def __init__(self, table: LogTable, form: MySqlEventForm, snapshot: TableSnapshot | None = None) -> None:
        name = (table.database, table.name)
        self.table = name
        self._columns: list[ReadColumn] = []
        columns = []
        unreadable = form.unreadable.get(name, {})
        key = form.keys.get(name, tuple(table.columns[at].name for at in table.key))
        for column in table.columns:
            try:
                if column.kind in (binlog.STRING, binlog.VECTOR) and (kind := unreadable.get(column.name)):
                    raise ColumnRefused(f"values of type {kind} cannot be read")
                found = read_column(column, replace(form.values, is_key=column.name in key))
            except ColumnRefused as error:
                shown = f"column `{column.name}` cannot be read: {error}"
                action = "Change the column's type, or leave the table out. The log after this change needs a new pipeline"
                raise SourceRejected(".".join(name), shown, action) from None
            self._columns.append(found)
            columns.append(EventColumn(column.name, found.schema, column.is_nullable))
        self.width, visible = len(columns), table.visible
        self._log_columns, self._values = table.columns, form.values
        self._sizes = [measure(column) for column in table.columns]
        self._headers: dict[int, bytes] = {}
        schema = _make_schema(form.is_mariadb) if form.schemas else {}
        super().__init__(name, columns[:visible], table.key, form, schema)
        self.refuse_missing_keys()
        if not self.has_key:
            action = "Name the columns of a key in `message_key_columns`, or leave the table out"
            raise SourceRejected(self.name, "it has no primary key, so that its events would have no key", action)
        self._chunk_key = self._list_chunk_key_columns(snapshot) if snapshot is not None and snapshot.bounds else []
        self.name_parts = format_json({"db": table.database})[1:-1], format_json({"table": table.name})[1:-1]

    def convert(self, at: int, raw: object) -> str:
        assert isinstance(raw, str)
        return raw

    def format_row(self, values: RowValues) -> str:
        assert isinstance(values, LogRow)
        return values.text

    def format_key(self, values: RowValues) -> str:
        assert isinstance(values, LogRow)
        return values.key

    def has_same_key(self, old: RowValues, new: RowValues) -> bool:
        assert isinstance(old, LogRow) and isinstance(new, LogRow)
        return old.key == new.key

    def _list_chunk_key_columns(self, snapshot: TableSnapshot) -> list[tuple[int, Callable[[bytes], str]]]:
        """Return index and form of each column by which the table is cut.

        :raises SourceRejected: the table had no such column when it was changed.
        """
        at = {column.name: index for index, column in enumerate(self.columns)}
        found = []
        for name, kind in zip(snapshot.key, snapshot.types, strict=True):
            column = self._columns[at[name]] if name in at else None
            if column is None or column.key is None or column.compared.split(" ") != kind.split(" ")[:2]:
                what = f"its snapshot was begun by the key ({', '.join(snapshot.key)}), and column `{name}` is not as it was"
                raise SourceRejected(self.name, what, f"Restore the key until the snapshot is complete. {NEW_PIPELINE}")
            found.append((at[name], column.key))
        return found

    def find_images(self, event: LogEvent) -> RowImages:
        """Return the rows of an event of the table.

        :raises LogUnreadable: rows do not have all columns.
        """
        # All events of a kind have equal bytes between their flags and their first row, unless a session has other settings.
        known = self._headers.get(event.kind)
        if known is not None and event.body.startswith(known, binlog.ROWS_HEADER):
            return RowImages(event.body, binlog.ROWS_HEADER + len(known))
        at = binlog.find_first_row(event, self.width)
        self._headers[event.kind] = event.body[binlog.ROWS_HEADER : at]
        return RowImages(event.body, at)

    def read_rows(self, images: Sequence[RowImages]) -> RowTexts:
        """Return the rows of some events.

        :raises SourceRejected: a value cannot be written.
        :raises LogUnreadable: a row is cut off.
        """
        columns, counts = find_rows(images, self._sizes)
        members = [(name, self._format(at, columns[at])) for at, name in enumerate(self.quoted_names)]
        count = sum(counts)
        texts = join_objects(members, count, nulls=True)
        keys = join_objects([members[at] for at in self.key_indexes], count, nulls=True)
        cuts: Iterable[Key] = repeat(())
        if self._chunk_key:
            cuts = self._read_cuts(columns, count)
        return RowTexts(texts, keys, cuts, counts)

    def _read_cuts(self, columns: Sequence[ColumnImages], count: int) -> Iterator[Key]:
        """Yield the values of each row by which the chunks of a snapshot are cut."""
        parts, nulls = list[list[str]](), np.zeros(count, bool)
        for at, text in self._chunk_key:
            found, prefix = columns[at], self._sizes[at].prefix
            places = zip((found.begins - prefix).tolist(), found.ends.tolist(), found.nulls.tolist(), strict=True)
            parts.append(["" if is_null else text(found.data[begin:end]) for begin, end, is_null in places])
            nulls |= found.nulls
        return (() if is_null else key for key, is_null in zip(zip(*parts, strict=True), nulls.tolist(), strict=True))

    def _format(self, at: int, values: ColumnImages) -> ValueTexts:
        try:
            return format_values(values, self._log_columns[at], self._columns[at], self._values)
        except (ValueRefused, UnicodeDecodeError) as error:
            raise self.make_refusal(at, error) from None

    def get_conversion(self, at: int) -> tuple[ColumnForm | None, Callable[[bytes], str]]:
        column = self._columns[at]
        return column.form, column.of_query


class ParsedRows(NamedTuple):
    """The rows of an event of the log.

    :param table: their table.
    :param rows: the changes.
    """

    table: MySqlTableWriter
    rows: list[RowChange]


class MySqlEventWriter(ChangeWriter[MySqlTableWriter, RowPosition]):
    """Turns the events of the log into events of changes, transaction by transaction.

    Events of a transaction are held until its end is read, up to :data:`HELD_BYTES`, because a transaction that the server has
    not finished after a crash is left out.

    :param server: for messages.
    :param form: their form.
    :param filter: decides which events the chunks of a snapshot include, and are left out; None leaves out none.
    """

    form: MySqlEventForm

    def __init__(self, server: LogServer, form: MySqlEventForm, filter: MySqlChunkFilter | None = None) -> None:
        super().__init__(form, "mariadb" if form.is_mariadb else "mysql")
        self._server, self._filter = server, filter
        self._transactions = Transactions()
        self._gtid = ""
        self._held: list[Event | EventRange] = []
        self._held_bytes = 0
        self._released = 0
        self._savepoints: dict[str, int] = {}  # the number of events of the transaction before each
        self._has_changes = self._is_released = False
        self._parts = SourceParts()

    @property
    def gtid(self) -> str:
        """The GTID of the last transaction; "" if there is none."""
        return self._gtid

    def write(self, located: Located, parsed: ParsedRows | EventRange | None) -> Sequence[Event | EventRange]:
        """Return the events of changes that are committed once this event of the log is read.

        :param parsed: the changes of rows of the event, or their events; None for an event without rows of a captured table.
        :raises SourceRejected: the log, or a value in it, cannot be read or written.
        """
        event = located.event
        if self._filter is not None:
            self._filter.enter(located.start)
        if (reason := binlog.UNREADABLE.get(event.kind)) is not None:
            raise self._server.make_unreadable_error(located.start, LogUnreadable(reason))
        # Most events of the log have no result, so that this is no generator.
        found: list[Event | EventRange] = []
        step = self._transactions.enter(event)
        is_end = bool(step) and step != "begin"
        if is_end:
            found += self._close(step, located)
        if event.kind in binlog.GTIDS:
            self._begin(binlog.parse_gtid(event), located)
        elif isinstance(parsed, EventRange):
            self._has_changes = True
            self._held.append(parsed)
            self._held_bytes += _get_size(parsed)
        elif parsed is not None:
            self._hold(self._make_events(located, parsed))
        elif event.kind in (binlog.QUERY, binlog.EXECUTE_LOAD_QUERY):
            found += self._handle_statement(located)
        if self._is_released or self._held_bytes > HELD_BYTES:
            self._is_released = self._transactions.is_open
            found += self._release()
        if is_end:
            found += self._write_end(step, event)
        return found

    # --- transactions ---

    def _begin(self, gtid: str, located: Located) -> None:
        self._gtid = gtid
        self._has_changes = self._is_released = False
        self._released = 0
        self._savepoints.clear()
        if self.form.transactions:
            self._hold(iter((mark_begin(gtid or f"file={located.start.file},pos={located.start.position}"),)))

    def _write_end(self, step: str, event: LogEvent) -> Sequence[Event]:
        """Return the end of a transaction whose events are published."""
        return [mark_end(event.seconds * 1000)] if step == "commit" and self.form.transactions else ()

    def _hold(self, events: Iterator[Event]) -> None:
        for event in events:
            self._held.append(event)
            self._held_bytes += _get_size(event)

    def _release(self) -> list[Event | EventRange]:
        held, self._held, self._held_bytes = self._held, [], 0
        self._released += len(held)
        return held

    def _go_back(self, name: str, located: Located) -> None:
        """Leave out the changes after a savepoint, which were rolled back. The log contains them if the transaction has also
        changed a table without transactions.

        :raises SourceRejected: some of them are published already.
        """
        savepoint = self._savepoints.get(name)
        if savepoint is None or savepoint < self._released:
            found = f"the log at {located.start}: a part of a large transaction was rolled back, and is published already"
            raise SourceRejected(self._server.where, found, NOT_SUPPORTED)
        del self._held[savepoint - self._released :]
        self._held_bytes = sum(map(_get_size, self._held))

    def _close(self, step: str, located: Located) -> list[Event | EventRange]:
        """Return the events of a transaction that has ended."""
        has_changes, self._has_changes = self._has_changes, False
        if step == "commit" or not has_changes:
            return self._release()
        if step == "abandon" and not self._is_released:
            self._release()
            return []
        found = {
            "abandon": "the server has not finished a transaction, because it crashed, and a part of it is published already",
            "rollback": "a transaction with changes of tables of several engines was rolled back in part",
            "prepare": "a transaction of tables is prepared (XA), and it is not known whether it is committed",
        }[step]
        raise SourceRejected(self._server.where, f"the log at {located.start}: {found}", NOT_SUPPORTED)

    # --- rows ---

    def _make_events(self, located: Located, parsed: ParsedRows) -> Iterator[Event]:
        self._has_changes = True
        self._describe_event(located)
        for number, (old, new) in enumerate(parsed.rows):
            position = RowPosition(located.start.position, number)
            yield from self.make_change_events(parsed.table, position, old, new, is_insert=old is None)

    def is_included(self, table: MySqlTableWriter, values: RowValues, old: RowValues | None = None) -> bool:
        """Return True if a chunk of a snapshot includes the change of a row, or will include it."""
        assert isinstance(values, LogRow)
        return self._filter is not None and self._filter.is_included(table.table, lambda _: values.cut)

    def begin_rows(self, table: LogTable, coordinates: LogCoordinates, server_id: int, now_us: int) -> MySqlTableWriter:
        """Return the writer of a table whose rows are read, not their changes.

        :param coordinates: the coordinates in the log at which they are read.
        :param server_id: of the server.
        :param now_us: the time at which they are read, microseconds since 1970.
        """
        self._parts = make_source_parts(self.of_server, now_us, "incremental", server_id, coordinates.file)
        self.timestamp = self._parts.timestamp
        return MySqlTableWriter(table, self.form)

    def _describe_event(self, located: Located) -> None:
        self._parts = self.make_event_parts(located, self._gtid)
        self.timestamp = self._parts.timestamp

    def make_event_parts(self, located: Located, gtid: str) -> SourceParts:
        """Return the parts of ``source`` that all rows of an event of the log share.

        :param gtid: the GTID of its transaction; "" if it has none.
        """
        event = located.event
        return make_source_parts(self.of_server, event.seconds * MICROS, "false", event.server_id, located.start.file, gtid)

    def make_source(self, table: MySqlTableWriter, position: RowPosition) -> str:
        return self._parts.format_source(table, *position)

    # --- statements ---

    def _handle_statement(self, located: Located) -> Iterator[Event]:
        event = located.event
        if event.kind == binlog.EXECUTE_LOAD_QUERY:
            raise self._server.make_unreadable_error(located.start, LogUnreadable("LOAD DATA is logged as a statement"))
        if self._filter is not None:
            self._filter.note_statement(event.body)
        if (savepoint := parse_savepoint(binlog.parse_query(event.body)[1])) is not None:
            goes_back, name = savepoint
            if goes_back:
                self._go_back(name, located)
            else:
                self._savepoints[name] = self._released + len(self._held)
            return
        truncated = find_truncated_table(event.body, self.form)
        if truncated is not None:
            if self._filter is None or not self._filter.is_superfluous_truncate(truncated):
                yield self._truncate(located, truncated)
        elif found := find_refusal(event.body, self.form):
            raise self._server.make_unreadable_error(located.start, LogUnreadable(found))

    def _truncate(self, located: Located, table: TableName) -> Event:
        shown = LogTable(0, *table)
        self._describe_event(located)
        return self.make_event(_Truncated(shown, self.form), RowPosition(located.start.position, 0), "t", "", "null", "null")


def make_source_parts(of_server: str, at_us: int, snapshot: str, server_id: int, file: str, gtid: str = "") -> SourceParts:
    """Return the parts of ``source`` that all rows of an event of the log, or of a chunk, share.

    :param of_server: the members that all sources share, as JSON.
    :param at_us: the time of the event, microseconds since 1970.
    :param file: the file of the log.
    :param gtid: the GTID of the transaction; "" if it has none.
    """
    timestamp, shown = at_us // 1000, f'"{gtid}"' if gtid else "null"
    return SourceParts(
        timestamp,
        before_database=f'{{{of_server},"ts_ms":{timestamp},"snapshot":"{snapshot}",',
        before_table=f',"sequence":null,"ts_us":{at_us},"ts_ns":{at_us * 1000},',
        before_position=f',"server_id":{server_id},"gtid":{shown},"file":"{file}","pos":',
    )


def _get_size(part: Event | EventRange) -> int:
    """Return the approximate size of events in bytes."""
    return part.rows * part.size if isinstance(part, EventRange) else len(part.value or b"") + 100


class _Truncated(MySqlTableWriter):
    """A table of which only the name is known."""

    def __init__(self, table: LogTable, form: MySqlEventForm) -> None:
        TableWriter.__init__(self, (table.database, table.name), (), (), form, _make_schema(form.is_mariadb))
        self.name_parts = format_json({"db": table.database})[1:-1], format_json({"table": table.name})[1:-1]


def find_truncated_table(body: bytes, form: MySqlEventForm) -> TableName | None:
    """Return the table that a QUERY event truncates, if truncates of it are published; else None."""
    database, text = binlog.parse_query(body)
    table = parse_truncate(text, database)
    return table if table is not None and "t" not in form.skipped and form.takes(table) else None


_VERSIONS = re.compile(r"\b(?:ADD|WITH)\s+SYSTEM\s+VERSIONING\b", re.IGNORECASE)
_CASCADES = re.compile(r"\bON\s+(?:DELETE|UPDATE)\s+(?:CASCADE|SET\s+(?:NULL|DEFAULT))\b", re.IGNORECASE)


def find_refusal(body: bytes, form: MySqlEventForm) -> str:
    """Return the reason why a statement (QUERY), or changes behind it, cannot be captured; "" if they can."""
    if _is_change(body, form):
        return "it has changes as statements, not as rows: `binlog_format` was not ROW"
    database, text = binlog.parse_query(body)
    table = parse_defined_table(text, database)
    if table is None or not form.takes(table):
        return ""
    if _VERSIONS.search(text):
        return f"{'.'.join(table)} gets system versioning, with which the log has rows of its history, too"
    if form.refuses_cascades and _CASCADES.search(text):
        what = "gets a foreign key that changes its rows (CASCADE, SET NULL), and the log does not hold such changes"
        return f"{'.'.join(table)} {what}. If no key of the other table has changed, set `ignore_cascades=True`"
    return ""


def _is_change(body: bytes, form: MySqlEventForm) -> bool:
    """Return True if a QUERY event may have changed rows of a captured table, which should have been logged as rows."""
    database, text = binlog.parse_query(body)
    text = remove_prefixes(text)
    if _CALLS.match(text):
        databases = {form.database} if form.tables is None else {name for name, _ in form.tables}
        return database in databases or any(name.casefold() in text.casefold() for name in databases)
    if not text[:10].upper().startswith(_CHANGES):
        return False
    if form.tables is None:
        return database == form.database or form.database.casefold() in text.casefold()
    names = "|".join(re.escape(name) for _, name in form.tables)
    return re.search(rf"(?<![\w$])(?:{names})(?![\w$])", text, re.IGNORECASE) is not None


NOT_SUPPORTED = "Such transactions cannot be captured: leave the table out, or begin with a new pipeline after these coordinates"
