"""Events of PostgreSQL's log, as Debezium's PostgreSQL connector writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any, NamedTuple

from airflow_kafka_spark.errors import SourceRejected
from airflow_kafka_spark.sources.cdc.options import DecimalHandling, TimePrecision
from airflow_kafka_spark.sources.cdc.tasks.events import (
    HOLE,
    ChangeWriter,
    ColumnForm,
    Event,
    EventColumn,
    EventForm,
    RowValues,
    TableName,
    TableWriter,
    ValueConverter,
    ValueRefused,
    format_base64,
    format_json,
    make_source_schema,
)
from airflow_kafka_spark.sources.cdc.tasks.transactions import mark_begin, mark_end
from airflow_kafka_spark.sources.postgres_cdc.options import SOURCE_FIELDS
from airflow_kafka_spark.sources.postgres_cdc.tasks.pgoutput import (
    UNCHANGED,
    BeginMessage,
    ChangeMessage,
    CommitMessage,
    Message,
    RelationMessage,
    TruncateMessage,
    Tuple,
)
from airflow_kafka_spark.sources.postgres_cdc.tasks.session import NEW_PIPELINE
from airflow_kafka_spark.sources.postgres_cdc.tasks.snapshot import PostgresChunkFilter
from airflow_kafka_spark.sources.postgres_cdc.tasks.values import UserType, ValueTypes


class KeyedTable(NamedTuple):
    """A table whose key the options name, as it is now.

    :param is_partitioned: True if it is partitioned, and published as its root. Each partition has its own replica identity.
    :param not_null: the columns that hold no null.
    """

    is_partitioned: bool = False
    not_null: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PostgresEventForm(EventForm):
    """The form of events and of their values, and the tables that are captured.

    :param decimals: the form of decimals (``decimal_handling_mode``).
    :param times: the form of times (``time_precision_mode``).
    :param database: the database.
    :param tables: the tables whose changes are captured; None for all of the publication.
    :param primary_keys: the columns of primary keys in their order, which the log does not name.
    :param keyed: the tables of ``keys``.
    :param placeholder: the text in place of a value that the server has not sent (``unavailable_value_placeholder``).
    """

    decimals: DecimalHandling = "precise"
    times: TimePrecision = "adaptive"
    database: str = ""
    tables: frozenset[TableName] | None = None
    primary_keys: Mapping[TableName, Sequence[str]] = field(default_factory=dict, hash=False)
    keyed: Mapping[TableName, KeyedTable] = field(default_factory=dict, hash=False)
    placeholder: str = "__debezium_unavailable_value"


_SOURCE_SCHEMA = make_source_schema("postgresql", SOURCE_FIELDS)


class PostgresTableWriter(TableWriter):
    """A relation of the log, ready to write its rows.

    :param relation: the table, as the log describes it.
    :param form: the form of events.
    :param types: the converters of values.
    :ivar is_taken: True if changes of the table are captured.
    :ivar needs_full: True if the key of an old row is known only if the log has the whole row.
    :ivar source: the members of ``source`` that name the table, as JSON.
    """

    def __init__(self, relation: RelationMessage, form: PostgresEventForm, types: ValueTypes) -> None:
        self.relation = relation
        name = (relation.schema, relation.table)
        self.is_taken = form.tables is None or name in form.tables
        converted = self._converted = [types.find_converter(column.type_oid, column.modifier) for column in relation.columns]
        self._converts: list[ValueConverter] = [value.convert for value in converted]
        self._unavailable = [_make_placeholder(value.schema, form.placeholder) for value in converted]
        # With the replica identity FULL every column is flagged.
        flagged = [at for at, column in enumerate(relation.columns) if column.is_key] if relation.identity != "f" else []
        # The log names them in the order of the table. The key keeps its order when the replica identity becomes FULL.
        primary_key = tuple(form.primary_keys.get(name, ()))
        names = [relation.columns[at].name for at in flagged]
        if set(names) == set(primary_key):
            flagged = [flagged[names.index(column)] for column in primary_key]
        known = form.keyed.get(name, KeyedTable())
        filled = {*names, *primary_key, *known.not_null.intersection(form.keys.get(name, ()))}
        columns = [
            EventColumn(c.name, value.schema, c.name not in filled) for c, value in zip(relation.columns, converted, strict=True)
        ]
        super().__init__(name, columns, flagged, form, _SOURCE_SCHEMA, primary_key or None)
        self._of_primary_key = frozenset(at for at, column in enumerate(relation.columns) if column.name in primary_key)
        self._is_partitioned = known.is_partitioned or name not in form.keys
        # An identity of before, or that of a partition which is published as its root, may lack columns of old rows.
        self.needs_full = name in form.keys and (relation.identity == "f" or not set(self._key) <= set(flagged))
        if self.is_taken:
            self.refuse_missing_keys()
        self.source = format_json({"schema": relation.schema, "table": relation.table})[1:-1]

    def refuse_missing_values(self, old: Tuple | None, is_full: bool) -> None:
        """Refuse a change if the log does not hold the key of the row before the change.

        :param old: None if the log does not hold it, because its replica identity has not changed.
        :param is_full: True if it should have all columns. That of a partition which is published as its root may not have them.
        :raises SourceRejected: a column is missing.
        """
        if old is None:
            missing = self._key if self.needs_full else ()
        else:
            missing = [at for at in self._key if old[at] is None and (not is_full or self._may_lack(at, old))]
        if missing:
            name = self.columns[missing[0]].name
            found = f"the log does not hold column `{name}` of the key of a row: the replica identity was not FULL"
            action = f"ALTER TABLE ... REPLICA IDENTITY FULL, for each partition, too. {NEW_PIPELINE}"
            raise SourceRejected(self.name, found, action)

    def _may_lack(self, at: int, old: Tuple) -> bool:
        """Return True if the log may not hold a null of an old row that should have all columns.

        A partition that has another replica identity than its root logs the columns of that only, usually the primary key.
        """
        if not self._is_partitioned:
            return False
        of_key = self._of_primary_key
        return at in of_key or all(value is None for other, value in enumerate(old) if other not in of_key)

    def refuse_missing_key(self) -> None:
        """Raise the error of a table without a key.

        :raises SourceRejected: always.
        """
        found = "it had no key when a row was changed, so that the event would have no key"
        action = "Give it a primary key, or name its key in `message_key_columns`"
        if self.relation.identity == "f":
            found = "its key is not known: the publication does not have the table any more, or it has no primary key"
            action = "Undo this, or name the other tables in `tables`"
        raise SourceRejected(self.name, found, f"{action}. {NEW_PIPELINE}")

    def convert(self, at: int, raw: object) -> str:
        if raw is None:
            return "null"
        if raw is UNCHANGED:
            if self.unwrap is not None:
                # A reader of rows cannot see that a value is missing, and would replace the one that it has.
                found = "an update has not changed it, and the log does not hold it"
                action = "ALTER TABLE ... REPLICA IDENTITY FULL for later changes, and publish this window without `unwrap`"
                raise ValueRefused(found, action)
            return self._unavailable[at]
        assert isinstance(raw, bytes)
        return self._converts[at](raw)

    def format_row(self, values: RowValues) -> str:
        converts, special = self._converts, self.convert
        try:
            pieces = [
                piece + (converts[at](raw) if type(raw) is bytes else special(at, raw))
                for at, (piece, raw) in enumerate(zip(self._pieces, values, strict=True))
            ]
        except (ValueRefused, UnicodeDecodeError):
            return super().format_row(values)  # raises an error that names the column
        return f"{{{','.join(pieces)}}}"

    def get_conversion(self, at: int) -> tuple[ColumnForm | None, ValueConverter]:
        return self._converted[at].form, self._converts[at]


def _make_placeholder(schema: Mapping[str, Any], placeholder: str) -> str:
    """Return the placeholder of a value that the server has not sent, in the type of its column."""
    kind = schema["type"]
    if kind == "bytes" and "name" not in schema:
        return format_base64(placeholder.encode())
    if kind == "array":
        return f"[{_make_placeholder(schema['items'], placeholder)}]"
    return encode_basestring(placeholder) if kind == "string" else "null"


class TransactionParts(NamedTuple):
    """The parts that all events of a transaction, or of a chunk, share.

    :param begin: the transaction's first message; None before the first one, and for a chunk.
    :param timestamp: milliseconds since 1970.
    :param before_lsn: the beginning of ``source``, up to the LSN.
    :param before_table: the text between the LSN and the names of schema and table.
    :param after_table: the text between these and the LSN again.
    """

    begin: BeginMessage | None = None
    timestamp: int = 0
    before_lsn: str = ""
    before_table: str = ""
    after_table: str = ""

    def format_source(self, table: PostgresTableWriter, lsn: str) -> str:
        """Return the field ``source`` as JSON."""
        return f'{self.before_lsn}{lsn}{self.before_table}{table.source}{self.after_table}{lsn},"xmin":null}}'

    def split_source(self, table: PostgresTableWriter) -> list[str]:
        """Return the texts before, between and after the two LSNs in the field ``source``."""
        return self.format_source(table, HOLE).split(HOLE)


class PostgresEventWriter(ChangeWriter[PostgresTableWriter, int]):
    """Turns the messages of a log window into events.

    :param form: their form.
    :param start: the window's first LSN. A transaction is in the window if the record of its commit begins at it or later.
    :param end: the window's end: that record begins before it.
    :param user_types: types that are not built in, by OID.
    :param filter: decides which events the chunks of a snapshot include, and are left out; None leaves out none.
    :param money_digits: number of decimal places of `money`.
    :ivar filter: the filter; None while changes are written that no chunk includes.
    :ivar last: the last transaction of the window; None until one has begun.
    :ivar parts: what events share from now on.
    """

    form: PostgresEventForm

    def __init__(
        self,
        form: PostgresEventForm,
        start: int,
        end: int,
        user_types: Mapping[int, UserType],
        filter: PostgresChunkFilter | None = None,
        money_digits: int = 2,
    ) -> None:
        super().__init__(form, "postgresql")
        self._start, self._end = start, end
        self.filter = filter
        self._types = ValueTypes(form.decimals, form.times, user_types, money_digits)
        self._tables: dict[int, PostgresTableWriter] = {}
        self.parts = TransactionParts()
        self.last: BeginMessage | None = None
        self._of_database = format_json(form.database)
        self._last = 0

    @property
    def is_past(self) -> bool:
        """True once a transaction after the window has begun. Transactions come in the order of their commits."""
        return self.parts.begin is not None and self.parts.begin.commit_lsn >= self._end

    @property
    def is_inside(self) -> bool:
        """True if the window has the transaction whose changes come next."""
        return self.parts.begin is not None and self._start <= self.parts.begin.commit_lsn < self._end

    def find_table(self, oid: int) -> PostgresTableWriter | None:
        """Return a table of the log; None if no message has described it."""
        return self._tables.get(oid)

    def takes_rows(self, table: PostgresTableWriter, has_old: bool, has_new: bool) -> bool:
        """Return True if changes with these rows of a captured table are events that need nothing but the rows."""
        needs_old = table.needs_full and not has_old
        operations = ("u" if has_new else "d",) if has_old else ("c", "u")
        return table.has_key and not needs_old and self.form.skipped.isdisjoint(operations)

    @contextmanager
    def enter_earlier_transaction(
        self, parts: TransactionParts, table: PostgresTableWriter | None, *, is_filtered: bool = False
    ) -> Iterator[None]:
        """Write changes of an earlier transaction, in which a table may have been another one.

        :param table: the table; None: all tables are as they are now.
        :param is_filtered: True if no chunk includes the changes; False: the filter decides.
        """
        now, tables, filter = self.parts, {} if table is None else {table.relation.oid: table}, self.filter
        present = {oid: self._tables[oid] for oid in tables}
        self.parts, self.timestamp = parts, parts.timestamp
        self._tables |= tables
        if is_filtered:
            self.filter = None
        self.enter_filter(parts)
        try:
            yield
        finally:
            self.parts, self.timestamp = now, now.timestamp
            self._tables |= present
            self.filter = filter
            self.enter_filter(now)

    def enter_filter(self, parts: TransactionParts) -> None:
        """Tell the filter, if there is one, the transaction of the changes about which it is asked next."""
        if self.filter is not None and parts.begin is not None:
            self.filter.enter(parts.begin)

    def write(self, lsn: int, message: Message) -> Iterator[Event]:
        """Yield the events of a message.

        :raises SourceRejected: a value cannot be written.
        """
        if self.note(message):
            yield from self.mark(message)
        elif self.is_inside and isinstance(message, TruncateMessage):
            yield from self._truncate(lsn, message)
        elif self.is_inside and isinstance(message, ChangeMessage):
            yield from self._make_events(lsn, message)

    def mark(self, message: Message) -> Iterator[Event]:
        """Yield the mark of the beginning or the end of a transaction of the window, if its records are published."""
        begin = self.parts.begin
        if not self.form.transactions or not self.is_inside or begin is None:
            return
        if isinstance(message, BeginMessage):
            yield mark_begin(f"{begin.xid}:{begin.commit_lsn}")
        elif isinstance(message, CommitMessage):
            yield mark_end(self.timestamp)

    def note(self, message: Message) -> bool:
        """Record the beginning or the end of a transaction, or the definition of a table. Return False for another message."""
        if isinstance(message, BeginMessage):
            self._enter(message)
        elif isinstance(message, CommitMessage):
            self._last = self.parts.begin.commit_lsn if self.parts.begin else 0
        elif isinstance(message, RelationMessage):
            self._tables[message.oid] = PostgresTableWriter(message, self.form, self._types)
        else:
            return False
        return True

    def begin_rows(self, relation: RelationMessage, now_us: int) -> PostgresTableWriter:
        """Return the writer of a table whose rows are read, not their changes.

        :param now_us: the time at which they are read, microseconds since 1970.
        """
        self._describe(None, now_us, "incremental", "null")
        return PostgresTableWriter(relation, self.form, self._types)

    def _enter(self, begin: BeginMessage) -> None:
        if self._start <= begin.commit_lsn < self._end:
            self.last = begin
        self._describe(begin, begin.commit_us, "false", str(begin.xid))
        self.enter_filter(self.parts)

    def _describe(self, begin: BeginMessage | None, at_us: int, snapshot: str, xid: str) -> None:
        """Prepare the parts that all events of a transaction, or of a chunk, share."""
        self.timestamp = at_us // 1000
        last = f'\\"{self._last}\\"' if self._last else "null"
        details = f'"ts_ms":{self.timestamp},"snapshot":"{snapshot}","db":{self._of_database}'
        self.parts = TransactionParts(
            begin,
            self.timestamp,
            before_lsn=f'{{{self.of_server},{details},"sequence":"[{last},\\"',
            before_table=f'\\"]","ts_us":{at_us},"ts_ns":{at_us * 1000},',
            after_table=f',"txId":{xid},"lsn":',
        )

    def make_source(self, table: PostgresTableWriter, lsn: int) -> str:
        return self.parts.format_source(table, str(lsn))

    def _make_events(self, lsn: int, change: ChangeMessage) -> Iterator[Event]:
        table, old, new = self._tables[change.relation], change.old, change.new
        if not table.is_taken:
            return
        if not table.has_key:
            table.refuse_missing_key()
        if change.op != "I":
            table.refuse_missing_values(old, change.is_full)
        if old is not None and new is not None:
            # A value of the new row that was not sent is that of the old one, if the log holds it.
            new = [old[at] if value is UNCHANGED and old[at] is not None else value for at, value in enumerate(new)]
        yield from self.make_change_events(table, lsn, old, new, is_insert=change.op == "I")

    def is_included(self, table: PostgresTableWriter, values: RowValues, old: RowValues | None = None) -> bool:
        """Return True if a chunk of a snapshot includes the change of a row, or will include it."""
        return self.filter is not None and self.filter.includes(table.relation, values, old)

    def _truncate(self, lsn: int, truncate: TruncateMessage) -> Iterator[Event]:
        if "t" in self.form.skipped:
            return
        for oid in truncate.relations:
            table = self._tables[oid]
            if table.is_taken and not (
                self.filter is not None and self.filter.is_superfluous_truncate((table.relation.schema, table.relation.table))
            ):
                yield self.make_event(table, lsn, "t", "", "null", "null")
