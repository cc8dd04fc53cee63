"""Change events as Debezium's PostgreSQL connector writes them with Connect's JsonConverter."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any, NamedTuple

from airflow_kafka_spark import __version__
from airflow_kafka_spark.errors import SourceRejected
from airflow_kafka_spark.sources.postgres_cdc.options import DecimalHandling, TimePrecision
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
from airflow_kafka_spark.sources.postgres_cdc.tasks.snapshot import SnapshotFilter
from airflow_kafka_spark.sources.postgres_cdc.tasks.values import (
    Convert,
    UserType,
    ValueRefused,
    ValueTypes,
    json_text,
)

TableName = tuple[str, str]
"""Schema and name of a table."""


class Event(NamedTuple):
    """A record of a change.

    :param topic: its topic, ``<prefix>.<schema>.<table>``.
    :param key: its key; None for a table without one, and for a truncate.
    :param value: its value; None for a tombstone.
    :param timestamp: the time of the commit, milliseconds since 1970.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    timestamp: int


@dataclass(frozen=True)
class EventOptions:
    """The form of events; options have Debezium's names.

    :param prefix: the beginning of topics' names, and the name of the server in events.
    :param database: the database.
    :param tables: the tables whose changes are taken; None: all that the publication has.
    :param keys: per table, the columns of its key; other tables have their replica identity as key.
    :param schemas: True: keys and values carry their schema.
    :param tombstones: True: each delete is followed by a record without a value.
    :param skipped: the operations that are left out (``c``, ``u``, ``d``, ``t``).
    """

    prefix: str
    database: str
    tables: frozenset[TableName] | None = None
    keys: Mapping[TableName, Sequence[str]] = field(default_factory=dict)
    schemas: bool = False
    tombstones: bool = True
    skipped: frozenset[str] = frozenset({"t"})
    placeholder: str = "__debezium_unavailable_value"
    decimals: DecimalHandling = "precise"
    times: TimePrecision = "adaptive"


_NOT_IN_TOPICS = re.compile(r"[^A-Za-z0-9._-]")

_SOURCE_SCHEMA = {
    "type": "struct",
    "name": "io.debezium.connector.postgresql.Source",
    "optional": False,
    "field": "source",
    "fields": [
        {"type": kind, "optional": optional, "field": name}
        for name, kind, optional in (
            ("version", "string", False), ("connector", "string", False), ("name", "string", False), ("ts_ms", "int64", False),
            ("snapshot", "string", True), ("db", "string", False), ("sequence", "string", True), ("ts_us", "int64", True),
            ("ts_ns", "int64", True), ("schema", "string", False), ("table", "string", False), ("txId", "int64", True),
            ("lsn", "int64", True), ("xmin", "int64", True),
        )
    ],
}  # fmt: skip


class _RelationWriter:
    """A relation of the log, ready to write its rows."""

    def __init__(self, relation: RelationMessage, options: EventOptions, types: ValueTypes) -> None:
        self.relation = relation
        self.name = f"{relation.schema}.{relation.table}"
        self.topic = f"{options.prefix}.{_NOT_IN_TOPICS.sub('_', self.name)}"
        self.columns = relation.columns
        self.is_taken = options.tables is None or (relation.schema, relation.table) in options.tables
        self._converted = [types.of(column.type_oid, column.modifier) for column in relation.columns]
        self._pieces = [f"{json_text(column.name)}:" for column in relation.columns]
        self._converts: list[Convert] = [converted.convert for converted in self._converted]
        self._unavailable = [_unavailable(c.schema, options.placeholder) for c in self._converted]
        self._key = self._key_columns(relation, options)
        source = {"schema": relation.schema, "table": relation.table}
        self.source = json_text(source)[1:-1]
        self._key_schema = self._value_schema = ""
        if options.schemas:
            self._key_schema = json_text(self._schema(f"{self.topic}.Key", self._key))
            self._value_schema = json_text(self._envelope())

    def _key_columns(self, relation: RelationMessage, options: EventOptions) -> list[int]:
        given = options.keys.get((relation.schema, relation.table))
        if given is not None:
            at = {column.name: index for index, column in enumerate(relation.columns)}
            missing = [name for name in given if name not in at]
            if missing and self.is_taken:
                found = f"the key of {self.name} has the column `{missing[0]}`, which the table had not when it was changed"
                raise SourceRejected(self.name, found, "Correct `message_key_columns`, or the primary key")
            return [at[name] for name in given if name in at]
        if relation.identity == "f":
            return []  # every column is flagged; the primary key is among `keys`
        return [index for index, column in enumerate(relation.columns) if column.is_key]

    def value(self, at: int, raw: object) -> str:
        """Return a value as JSON."""
        if raw is None:
            return "null"
        if raw is UNCHANGED:
            return self._unavailable[at]
        assert isinstance(raw, bytes)
        try:
            return self._converts[at](raw)
        except ValueRefused as error:
            found = f"a value of column `{self.columns[at].name}` cannot be written: {error}"
            action = 'Set `decimal_handling_mode="string"`' if "decimal" in str(error) else "Leave the table out"
            raise SourceRejected(self.name, found, action) from None

    def row(self, values: Tuple) -> str:
        """Return a row as JSON."""
        value = self.value
        pieces = [piece + value(at, raw) for at, (piece, raw) in enumerate(zip(self._pieces, values, strict=True))]
        return "{" + ",".join(pieces) + "}"

    def key_of(self, values: Tuple) -> str:
        """Return a row's key as JSON; empty if the table has none."""
        if not self._key:
            return ""
        return "{" + ",".join(self._pieces[at] + self.value(at, values[at]) for at in self._key) + "}"

    def same_key(self, old: Tuple, new: Tuple) -> bool:
        """Return True if both rows have the same key."""
        return all(new[at] is UNCHANGED or old[at] == new[at] for at in self._key)

    def key_record(self, key: str) -> bytes | None:
        """Return a record's key."""
        if not key:
            return None
        return (f'{{"schema":{self._key_schema},"payload":{key}}}' if self._key_schema else key).encode()

    def value_record(self, value: str) -> bytes:
        """Return a record's value."""
        return (f'{{"schema":{self._value_schema},"payload":{value}}}' if self._value_schema else value).encode()

    def _schema(self, name: str, indexes: Sequence[int], **more: Any) -> dict[str, Any]:
        fields = [
            {**self._converted[at].schema, "optional": at not in self._key, "field": self.columns[at].name} for at in indexes
        ]
        return {"type": "struct", "fields": fields, "optional": False, "name": name, **more}

    def _envelope(self) -> dict[str, Any]:
        name, every = f"{self.topic}.Value", range(len(self.columns))
        rows = [{**self._schema(name, every), "optional": True, "field": part} for part in ("before", "after")]
        block = [{"type": k, "optional": False, "field": n} for n, k in (("id", "string"), ("total_order", "int64"))]
        block.append({"type": "int64", "optional": False, "field": "data_collection_order"})
        of_transaction = {"type": "struct", "fields": block, "optional": True, "name": "event.block", "version": 1}
        plain = [{"type": "int64", "optional": True, "field": part} for part in ("ts_ms", "ts_us", "ts_ns")]
        op = {"type": "string", "optional": False, "field": "op"}
        fields = [*rows, _SOURCE_SCHEMA, {**of_transaction, "field": "transaction"}, op, *plain]
        return {"type": "struct", "fields": fields, "optional": False, "name": f"{self.topic}.Envelope", "version": 2}


def _unavailable(schema: Mapping[str, Any], placeholder: str) -> str:
    """Return the placeholder of a value that the server has not sent, in the type of its column."""
    kind = schema["type"]
    if kind == "bytes" and "name" not in schema:
        import base64

        return f'"{base64.b64encode(placeholder.encode()).decode()}"'
    if kind == "array":
        return f"[{_unavailable(schema['items'], placeholder)}]"
    return encode_basestring(placeholder) if kind == "string" else "null"


class EventWriter:
    """Turns the messages of a log window into events.

    :param options: their form.
    :param start: the window's first LSN. A transaction is in the window if the record of its commit begins at it or later.
    :param end: the LSN behind the window: that record begins before it.
    :param user_types: types that are not built in, by OID.
    :param filter: leaves out what the chunks of a snapshot include; None: nothing is left out.
    """

    def __init__(
        self,
        options: EventOptions,
        start: int,
        end: int,
        user_types: Mapping[int, UserType],
        filter: SnapshotFilter | None = None,
    ) -> None:
        self._options = options
        self._start, self._end = start, end
        self._filter = filter
        self._types = ValueTypes(options.decimals, options.times, user_types)
        self._tables: dict[int, _RelationWriter] = {}
        self._begin: BeginMessage | None = None
        self._timestamp = 0
        self._of_server = json_text({"version": __version__, "connector": "postgresql", "name": options.prefix})[1:-1]
        self._of_database = json_text(options.database)
        self._before_lsn = self._before_table = self._after_table = ""
        self._last = 0
        self._handlers = {ChangeMessage: self._change, TruncateMessage: self._truncate}

    @property
    def is_past(self) -> bool:
        """Return True once a transaction behind the window has begun: transactions come in the order of their commits."""
        return self._begin is not None and self._begin.commit_lsn >= self._end

    def write(self, lsn: int, message: Message) -> Iterator[Event]:
        """Yield the events of a message.

        :raises SourceRejected: a value cannot be written.
        """
        if isinstance(message, RelationMessage):
            self._tables[message.oid] = _RelationWriter(message, self._options, self._types)
        elif isinstance(message, BeginMessage):
            self._enter(message)
        elif isinstance(message, CommitMessage):
            self._last = self._begin.commit_lsn if self._begin else 0
        elif self._begin is not None and self._start <= self._begin.commit_lsn < self._end:
            yield from self._handlers[type(message)](lsn, message)  # type: ignore[operator]

    def read_rows(self, relation: RelationMessage, values: Iterable[Tuple], lsn: int, now_us: int) -> Iterator[Event]:
        """Yield the events of rows that were read from a table.

        :param relation: the table.
        :param lsn: the place of the log at which they were read.
        :param now_us: the time at which they were read, microseconds since 1970.
        :raises SourceRejected: a value cannot be written.
        """
        table = _RelationWriter(relation, self._options, self._types)
        self._describe(now_us, "incremental", "null")
        for row in values:
            yield self._event(table, lsn, "r", table.key_of(row), "null", table.row(row))

    def _enter(self, begin: BeginMessage) -> None:
        self._begin = begin
        self._describe(begin.commit_us, "false", str(begin.xid))
        if self._filter is not None:
            self._filter.enter(begin)

    def _describe(self, at_us: int, snapshot: str, xid: str) -> None:
        """Prepare the parts of ``source`` that all events of a transaction, or of a chunk, share."""
        self._timestamp = at_us // 1000
        last = f'\\"{self._last}\\"' if self._last else "null"
        place = f'"ts_ms":{self._timestamp},"snapshot":"{snapshot}","db":{self._of_database}'
        self._before_lsn = f'{{{self._of_server},{place},"sequence":"[{last},\\"'
        self._before_table = f'\\"]","ts_us":{at_us},"ts_ns":{at_us * 1000},'
        self._after_table = f',"txId":{xid},"lsn":'

    def _source(self, table: _RelationWriter, lsn: int) -> str:
        return f'{self._before_lsn}{lsn}{self._before_table}{table.source}{self._after_table}{lsn},"xmin":null}}'

    def _event(self, table: _RelationWriter, lsn: int, op: str, key: str, before: str, after: str) -> Event:
        now = time.time_ns()
        value = (
            f'{{"before":{before},"after":{after},"source":{self._source(table, lsn)},"transaction":null,"op":"{op}",'
            f'"ts_ms":{now // 1_000_000},"ts_us":{now // 1000},"ts_ns":{now}}}'
        )
        return Event(table.topic, table.key_record(key), table.value_record(value), self._timestamp)

    def _change(self, lsn: int, change: ChangeMessage) -> Iterator[Event]:
        table, old, new = self._tables[change.relation], change.old, change.new
        if not table.is_taken:
            return
        if new is None:
            assert old is not None
            yield from self._delete(table, lsn, old)
            return
        if old is not None and change.is_full:
            # A value of the new row that was not sent is that of the old one.
            new = [kept if value is UNCHANGED else value for kept, value in zip(old, new, strict=True)]
        if old is None or table.same_key(old, new):
            yield from self._write(table, lsn, "c" if change.op == "I" else "u", old, new)
        else:
            yield from self._delete(table, lsn, old)
            yield from self._write(table, lsn, "c", old, new)

    def _write(self, table: _RelationWriter, lsn: int, op: str, old: Tuple | None, new: Tuple) -> Iterator[Event]:
        if self._is_included(table, new, old):
            return
        if op == "u" and old is not None and self._is_included(table, old):
            op = "c"  # the chunk of the old row was read behind the update, so that the row was not published
        if op not in self._options.skipped:
            before = table.row(old) if op == "u" and old is not None else "null"
            yield self._event(table, lsn, op, table.key_of(new), before, table.row(new))

    def _delete(self, table: _RelationWriter, lsn: int, old: Tuple) -> Iterator[Event]:
        if "d" in self._options.skipped or self._is_included(table, old):
            return
        event = self._event(table, lsn, "d", table.key_of(old), table.row(old), "null")
        yield event
        if self._options.tombstones and event.key is not None:
            yield event._replace(value=None)

    def _is_included(self, table: _RelationWriter, values: Tuple, old: Tuple | None = None) -> bool:
        """Return True if a chunk of a snapshot includes the change of a row, or will."""
        return self._filter is not None and self._filter.includes(table.relation, values, old)

    def _truncate(self, lsn: int, truncate: TruncateMessage) -> Iterator[Event]:
        if "t" in self._options.skipped:
            return
        for oid in truncate.relations:
            table = self._tables[oid]
            if table.is_taken and not (self._filter is not None and self._filter.is_superfluous_truncate(table.relation)):
                yield self._event(table, lsn, "t", "", "null", "null")
