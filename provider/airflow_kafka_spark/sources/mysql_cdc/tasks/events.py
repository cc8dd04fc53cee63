"""Events of a binary log, as Debezium's connectors for MariaDB and MySQL write them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from airflow_kafka_spark.errors import SourceRejected
from airflow_kafka_spark.sources.cdc.tasks.events import (
    ChangeWriter,
    Event,
    EventColumn,
    EventForm,
    TableName,
    TableWriter,
    source_schema,
)
from airflow_kafka_spark.sources.cdc.tasks.values import ValueRefused, json_text
from airflow_kafka_spark.sources.mysql_cdc.tasks import binlog
from airflow_kafka_spark.sources.mysql_cdc.tasks.binlog import LogEvent, LogTable, LogUnreadable, Transactions
from airflow_kafka_spark.sources.mysql_cdc.tasks.session import Located, LogServer
from airflow_kafka_spark.sources.mysql_cdc.tasks.values import (
    ColumnRefused,
    Read,
    ValueForm,
    read_column,
    truncated_table,
    without_comments,
)

HELD_BYTES = 16 << 20
"""Bytes of a transaction that are held back until its end is seen."""

_CHANGES = ("INSERT", "UPDATE", "DELETE", "REPLACE", "LOAD", "WITH", "CALL")


@dataclass(frozen=True)
class MysqlEventForm(EventForm):
    """The form of events, and which tables are taken.

    :param tables: the tables whose changes are taken; None: all of ``database``.
    :param values: the form of values.
    :param unreadable: per table, the columns whose values the log does not describe, and their type.
    """

    database: str = ""
    tables: frozenset[TableName] | None = None
    values: ValueForm = field(default_factory=ValueForm)
    unreadable: dict[TableName, dict[str, str]] = field(default_factory=dict, hash=False)
    is_mariadb: bool = True

    def takes(self, table: TableName) -> bool:
        """Return True if the changes of a table are taken."""
        return table in self.tables if self.tables is not None else table[0] == self.database


def _schema(is_mariadb: bool) -> dict[str, object]:
    return source_schema(
        "mariadb" if is_mariadb else "mysql",
        (
            ("version", "string", False), ("connector", "string", False), ("name", "string", False), ("ts_ms", "int64", False),
            ("snapshot", "string", True), ("db", "string", False), ("sequence", "string", True), ("ts_us", "int64", True),
            ("ts_ns", "int64", True), ("table", "string", True), ("server_id", "int64", False), ("gtid", "string", True),
            ("file", "string", False), ("pos", "int64", False), ("row", "int32", False), ("thread", "int64", True),
            ("query", "string", True),
        ),
    )  # fmt: skip


class RowPlace(NamedTuple):
    """A row of the log.

    :param position: where its event begins.
    :param row: its number within the event.
    """

    position: int
    row: int


class LogTableWriter(TableWriter):
    """A table of the log, ready to read and write its rows."""

    def __init__(self, table: LogTable, form: MysqlEventForm) -> None:
        name = (table.database, table.name)
        self._reads: list[Read] = []
        columns = []
        unreadable = form.unreadable.get(name, {})
        for column in table.columns:
            try:
                if column.kind == binlog.STRING and (kind := unreadable.get(column.name)):
                    raise ColumnRefused(f"values of type {kind} cannot be read")
                found = read_column(column, form.values)
            except ColumnRefused as error:
                shown = f"column `{column.name}` cannot be read: {error}"
                action = "Change the column's type, or leave the table out. The log behind this change needs a new pipeline"
                raise SourceRejected(".".join(name), shown, action) from None
            self._reads.append(found.read)
            columns.append(EventColumn(column.name, found.schema, column.is_nullable))
        super().__init__(name, columns, table.key, form, _schema(form.is_mariadb) if form.schemas else {})
        self.refuse_missing_keys()
        if not self.has_key:
            action = "Name the columns of a key in `message_key_columns`, or leave the table out"
            raise SourceRejected(self.name, "it has no primary key, so that its events would have no key", action)
        self._null_bytes = (len(columns) + 7) // 8
        self.place = json_text({"db": table.database})[1:-1], json_text({"table": table.name})[1:-1]

    def convert(self, at: int, raw: object) -> str:
        assert isinstance(raw, str)
        return raw

    def row(self, values: list[object]) -> str:
        pieces = [f"{piece}{value}" for piece, value in zip(self._pieces, values, strict=True)]
        return "{" + ",".join(pieces) + "}"

    def read_row(self, data: bytes, at: int) -> tuple[list[object], int]:
        """Return the values of a row as JSON, and the place behind it.

        :raises SourceRejected: a value cannot be written.
        """
        nulls = int.from_bytes(data[at : at + self._null_bytes], "little")
        at += self._null_bytes
        values: list[object] = []
        for index, read in enumerate(self._reads):
            if nulls >> index & 1:
                values.append("null")
                continue
            try:
                value, at = read(data, at)
            except ValueRefused as error:
                raise self.refused(index, error) from None
            values.append(value)
        return values, at


class LogEventWriter(ChangeWriter[LogTableWriter, RowPlace]):
    """Turns the events of the log into events of changes, transaction by transaction.

    Events of a transaction are held until its end is seen, up to :data:`HELD_BYTES`: one that the server has not finished,
    because it crashed, is left out.

    :param server: for messages.
    :param form: their form.
    """

    def __init__(self, server: LogServer, form: MysqlEventForm) -> None:
        super().__init__(form, "mariadb" if form.is_mariadb else "mysql")
        self._server, self._form = server, form
        self._transactions = Transactions()
        self._tables: dict[int, LogTableWriter | None] = {}
        self._maps: dict[int, bytes] = {}
        self._gtid = ""
        self._held: list[Event] = []
        self._held_bytes = 0
        self._has_changes = self._is_released = False
        self._file = ""
        self._event: LogEvent | None = None

    @property
    def is_between_transactions(self) -> bool:
        """True if no transaction is open."""
        return not self._transactions.is_open

    @property
    def gtid(self) -> str:
        """The GTID of the last transaction; "" if there is none."""
        return self._gtid

    def write(self, located: Located) -> Iterator[Event]:
        """Yield events of changes that are certain once this event of the log is read.

        :raises SourceRejected: the log, or a value in it, cannot be read or written.
        """
        event = located.event
        if (reason := binlog.UNREADABLE.get(event.kind)) is not None:
            raise self._server.unreadable(located.start, LogUnreadable(reason))
        step = self._transactions.enter(event)
        if step and step != "begin":
            yield from self._close(step, located)
        if event.kind in binlog.GTIDS:
            self._begin(binlog.gtid(event), located)
        elif event.kind == binlog.ROTATE:
            self._tables.clear()
            self._maps.clear()
        elif event.kind == binlog.TABLE_MAP:
            self._map(located)
        elif event.kind in binlog.ROWS:
            self._hold(self.bounded(self._rows(located)))
        elif event.kind in (binlog.QUERY, binlog.EXECUTE_LOAD_QUERY):
            yield from self._statement(located)
        if self._is_released or self._held_bytes > HELD_BYTES:
            self._is_released = self._transactions.is_open
            yield from self._release()
        if step and step != "begin":
            yield from self._ended(step, event)

    # --- transactions ---

    def _begin(self, gtid: str, located: Located) -> None:
        self._gtid = gtid
        self.begin_transaction(gtid or f"file={located.start.file},pos={located.start.position}")
        self._has_changes = self._is_released = False

    def _ended(self, step: str, event: LogEvent) -> Iterator[Event]:
        """Yield the end of a transaction whose events are published."""
        self.timestamp = event.seconds * 1000
        found = list(self.end_transaction())
        return iter(found if step == "commit" else ())

    def _hold(self, events: Iterator[Event]) -> None:
        for event in events:
            self._held.append(event)
            self._held_bytes += len(event.value or b"") + 100

    def _release(self) -> list[Event]:
        held, self._held, self._held_bytes = self._held, [], 0
        return held

    def _close(self, step: str, located: Located) -> list[Event]:
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

    # --- tables and rows ---

    def _map(self, located: Located) -> None:
        body = located.event.body
        number, *name = binlog.table_names(body)
        if self._maps.get(number) == body:
            return
        self._maps[number] = body
        self._tables[number] = None
        if self._form.takes((name[0], name[1])):
            try:
                self._tables[number] = LogTableWriter(binlog.table_map(body, self._form.is_mariadb), self._form)
            except LogUnreadable as error:
                raise self._server.unreadable(located.start, error) from None

    def _rows(self, located: Located) -> Iterator[Event]:
        event = located.event
        table = self._tables.get(binlog.rows_table(event.body))
        if table is None:
            return
        self._has_changes = True
        self._describe(event, located.start.file)
        try:
            data, at = binlog.row_images(event, len(table.columns))
        except LogUnreadable as error:
            raise self._server.unreadable(located.start, error) from None
        number = 0
        while at < len(data):
            old = new = None
            if event.kind not in binlog.WRITE_ROWS:
                old, at = table.read_row(data, at)
            if event.kind not in binlog.DELETE_ROWS:
                new, at = table.read_row(data, at)
            place = RowPlace(located.start.position, number)
            yield from self.change(table, place, old, new, is_insert=old is None)
            number += 1

    def _describe(self, event: LogEvent, file: str) -> None:
        """Prepare the parts of ``source`` that all rows of an event share."""
        self._event, self._file = event, file
        self.timestamp = event.seconds * 1000

    def source(self, table: LogTableWriter, place: RowPlace) -> str:
        assert self._event is not None
        seconds, (database, name) = self._event.seconds, table.place
        gtid = f'"{self._gtid}"' if self._gtid else "null"
        return (
            f'{{{self.of_server},"ts_ms":{seconds * 1000},"snapshot":"false",{database},"sequence":null,'
            f'"ts_us":{seconds * 1_000_000},"ts_ns":{seconds * 1_000_000_000},{name},"server_id":{self._event.server_id},'
            f'"gtid":{gtid},"file":"{self._file}","pos":{place.position},"row":{place.row},"thread":null,"query":null}}'
        )

    # --- statements ---

    def _statement(self, located: Located) -> Iterator[Event]:
        event = located.event
        if event.kind == binlog.EXECUTE_LOAD_QUERY:
            raise self._server.unreadable(located.start, LogUnreadable("LOAD DATA is logged as a statement"))
        truncated = truncates(event.body, self._form)
        if truncated is not None:
            yield from self.bounded(iter((self._truncate(located, truncated),)))
        elif is_change(event.body, self._form):
            found = "it has changes as statements, not as rows: `binlog_format` was not ROW"
            raise self._server.unreadable(located.start, LogUnreadable(found))

    def _truncate(self, located: Located, table: TableName) -> Event:
        shown = LogTable(0, *table)
        self._describe(located.event, located.start.file)
        return self.event(_Truncated(shown, self._form), RowPlace(located.start.position, 0), "t", "", "null", "null")


class _Truncated(LogTableWriter):
    """A table of which only the name is known."""

    def __init__(self, table: LogTable, form: MysqlEventForm) -> None:
        TableWriter.__init__(self, (table.database, table.name), (), (), form, _schema(form.is_mariadb))
        self.place = json_text({"db": table.database})[1:-1], json_text({"table": table.name})[1:-1]


def truncates(body: bytes, form: MysqlEventForm) -> TableName | None:
    """Return the table whose truncation a QUERY event is, if it is published; else None."""
    database, text = binlog.query(body)
    table = truncated_table(text, database)
    return table if table is not None and "t" not in form.skipped and form.takes(table) else None


def is_change(body: bytes, form: MysqlEventForm) -> bool:
    """Return True if a QUERY event may have changed rows of a table that is taken: it should have been logged as rows."""
    database, text = binlog.query(body)
    text = without_comments(text)
    if not text[:10].upper().startswith(_CHANGES):
        return False
    if form.tables is None:
        return database == form.database or form.database.casefold() in text.casefold()
    names = "|".join(re.escape(name) for _, name in form.tables)
    return re.search(rf"(?<![\w$])(?:{names})(?![\w$])", text, re.IGNORECASE) is not None


NOT_SUPPORTED = "Such transactions cannot be captured: leave the table out, or begin with a new pipeline behind this place"
