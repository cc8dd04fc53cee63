"""Change events, their values and their Connect schemas, as Debezium's connectors write them with Connect's JsonConverter."""

from __future__ import annotations

import binascii
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from airflow_kafka_spark import __version__
from airflow_kafka_spark.errors import SourceRejected
from airflow_kafka_spark.formats.debezium.format import DELETED
from airflow_kafka_spark.sources.cdc.options import ExtractNewRecordState, SourceField, format_topic

DAY_SECONDS = 86_400
MICROS = 1_000_000


ValueConverter = Callable[[bytes], str]
"""Returns a value as a text, most often as JSON, from the bytes that a server has sent."""


class ValueRefused(ValueError):
    """Raised for a value that the chosen form cannot hold.

    :param found: the value, and what cannot hold it.
    :param action: the option that helps; "" if none does.
    """

    def __init__(self, found: str, action: str = "") -> None:
        super().__init__(found)
        self.action = action


class ColumnForm(NamedTuple):
    """The form of the texts that a server writes for the values of a column, by which Arrow makes JSON of them.

    Columns that have a form are formatted as a whole (:mod:`airflow_kafka_spark.sources.cdc.tasks.columns`).

    :param kind: ``number``: the text is JSON; ``integer``: a number that may have zeros before it; ``boolean``: ``t`` or ``f``;
        ``quoted``: a text without special characters; ``decimal``: the base64 of a number without its point, ``variable decimal``
        with its scale; ``days`` and ``instant``: their number since 1970; ``zoned`` and ``utc``: ISO 8601 in UTC, of a text with
        and without a zone; ``clock``: the time since midnight.
    :param parameter: of a decimal its scale; of ``double`` the number of digits with which each text is a number of its own; of
        ``zoned`` and ``utc`` the digits behind the seconds; of ``instant`` and ``clock`` the microseconds of the unit.
    """

    kind: Literal[
        "number", "integer", "boolean", "double", "text", "quoted", "decimal", "variable decimal", "days", "instant", "zoned",
        "utc", "clock",
    ]  # fmt: skip
    parameter: int = 0


DOUBLE_FORM, FLOAT_FORM = ColumnForm("double", 15), ColumnForm("double", 6)
"""The forms of numbers of 64 and of 32 bits."""


def make_named_schema(kind: str, name: str, **parameters: object) -> dict[str, Any]:
    """Return the Connect schema of a named type."""
    given = {key: str(value) for key, value in parameters.items() if value is not None}
    return {"type": kind, "name": name, "version": 1, **({"parameters": given} if given else {})}


def make_enum_schema(name: str, values: Sequence[str]) -> dict[str, Any]:
    """Return the schema of an enum, or of a set of an enum's values.

    :param name: ``Enum`` or ``EnumSet``.
    """
    return make_named_schema(
        "string", f"io.debezium.data.{name}", allowed=",".join(value.replace(",", "\\,") for value in values)
    )


def make_decimal_schema(scale: int, precision: int | None) -> dict[str, Any]:
    """Return the schema of Connect's Decimal.

    :param precision: None if it is unknown.
    """
    parameters = {"scale": str(scale), **({} if precision is None else {"connect.decimal.precision": str(precision)})}
    return {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal", "version": 1, "parameters": parameters}


POINT_SCHEMA: Mapping[str, Any] = {
    "type": "struct",
    "fields": [
        {"type": "double", "optional": False, "field": "x"},
        {"type": "double", "optional": False, "field": "y"},
        {"type": "bytes", "optional": True, "field": "wkb"},
        {"type": "int32", "optional": True, "field": "srid"},
    ],
    "name": "io.debezium.data.geometry.Point",
    "version": 1,
    "doc": "Geometry (POINT)",
}
"""The schema of a point in the plane."""


def format_point(x: str, y: str, wkb: bytes, srid: int | None) -> str:
    """Return a point as JSON.

    :param x: its first coordinate, as JSON.
    :param y: its second one, as JSON.
    :param wkb: the point as well-known binary.
    :param srid: the id of its spatial reference system; None without one.
    """
    return f'{{"x":{x},"y":{y},"wkb":{format_base64(wkb)},"srid":{"null" if srid is None else srid}}}'


def format_base64(raw: bytes) -> str:
    """Return bytes as JSON."""
    return f'"{binascii.b2a_base64(raw, newline=False).decode()}"'


def format_unscaled_integer(unscaled: int) -> str:
    """Return the unscaled value of a decimal as JSON: base64 of its bytes, big-endian."""
    length = (unscaled + (unscaled < 0)).bit_length() // 8 + 1
    return format_base64(unscaled.to_bytes(length, "big", signed=True))


def format_unscaled(value: Decimal, scale: int) -> str:
    """Return the unscaled value of a finite decimal as JSON; see :func:`format_unscaled_integer`."""
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    # Not by a text: Python converts at most 4300 digits of one.
    return format_unscaled_integer(int(Decimal((sign, digits, exponent + scale))))


def count_days(year: int, month: int, day: int) -> int:
    """Return the days since 1970-01-01 in the proleptic Gregorian calendar, for any year."""
    year -= month <= 2
    era, of_era = divmod(year, 400)
    of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    return era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468


def format_json(value: object) -> str:
    """Return compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


TableName = tuple[str, str]
"""Schema (or database) and name of a table."""

HOLE = "\0"
"""Marks a place in a text of JSON, which has no such character."""

OPEN_FIELD = "\1"
"""Stands before and after the name of the table in the field ``transaction``, until the events of the transaction are counted."""

RowValues = Sequence[object]
"""The values of a row, in the order of its table's columns, in a form that the source defines."""


class Event(NamedTuple):
    """A record of a change.

    :param topic: its topic, ``<prefix>.<schema>.<table>``.
    :param key: its key; None for a table without one, and for a truncate.
    :param value: its value; None for a tombstone.
    :param timestamp: the time of the change, milliseconds since 1970.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    timestamp: int


class EventFrame(NamedTuple):
    """The parts that are equal in all events of rows that were read from a table together.

    :param key: the texts before and after the members of a row's key, with the braces of their object.
    :param value: the texts before and after the members of a row, with the braces of their object.
    :param timestamp: milliseconds since 1970.
    """

    key: tuple[str, str]
    value: tuple[str, str]
    timestamp: int

    @property
    def size(self) -> int:
        """The number of characters that an event has beside its row."""
        return sum(map(len, (*self.key, *self.value)))


@dataclass(frozen=True)
class EventForm:
    """The form of the events of a source.

    :param prefix: the beginning of topics' names, and the name of the server in events.
    :param keys: per table, the columns of its key; other tables have the key that the log names.
    :param schemas: True: keys and values carry their schema.
    :param tombstones: True: each delete is followed by a record without a value.
    :param skipped: the operations that are left out (``c``, ``u``, ``d``, ``t``).
    :param transactions: True: events name their transaction, and its begin and its end are records of a separate topic.
    :param unwrap: rows are published, with these fields of events; None: events are.
    """

    prefix: str
    keys: Mapping[TableName, Sequence[str]] = field(default_factory=dict)
    schemas: bool = False
    tombstones: bool = True
    skipped: frozenset[str] = frozenset({"t"})
    transactions: bool = False
    unwrap: ExtractNewRecordState | None = None

    @property
    def writes_deletes(self) -> bool:
        """True if a delete has a record with a value."""
        return self.unwrap is None or self.unwrap.rewrites_deletes


def make_source_schema(connector: str, fields: Sequence[SourceField]) -> dict[str, Any]:
    """Return the schema of the field ``source``.

    :param connector: the package of the connector, as in ``postgresql``.
    :param fields: the fields of ``source``.
    """
    made = [
        {"type": kind, "optional": is_nullable, "field": name, **(_SNAPSHOT if name == "snapshot" else {})}
        for name, kind, is_nullable in fields
    ]
    name = f"io.debezium.connector.{connector}.Source"
    return {"type": "struct", "name": name, "version": 1, "optional": False, "field": "source", "fields": made}


_SNAPSHOT = {
    **make_enum_schema(
        "Enum", ("true", "first", "first_in_data_collection", "last_in_data_collection", "last", "false", "incremental")
    ),
    "default": "false",
}


@dataclass(frozen=True)
class EventColumn:
    """A column of a table of the log.

    :param name: its name.
    :param schema: the Connect schema of its values.
    :param is_nullable: False if it is known that it holds no null.
    """

    name: str
    schema: Mapping[str, Any]
    is_nullable: bool = True


class TableWriter(ABC):
    """A table of the log, ready to write its rows.

    :param name: its schema and name.
    :param columns: its columns.
    :param key: the indexes of the key's columns, as the log names them.
    :param form: the form of events.
    :param source: the schema of the field ``source``.
    :param primary_key: the columns of the key if neither the form nor the log names any.
    """

    def __init__(
        self,
        name: TableName,
        columns: Sequence[EventColumn],
        key: Sequence[int],
        form: EventForm,
        source: Mapping[str, Any],
        primary_key: Sequence[str] | None = None,
    ) -> None:
        self.name = ".".join(name)
        self.topic = format_topic(form.prefix, name)
        self.transaction = f"{OPEN_FIELD}{format_json(self.name)}{OPEN_FIELD}" if form.transactions else "null"
        self.columns = columns
        self.unwrap = form.unwrap
        self._added = form.unwrap.added if form.unwrap is not None else ()
        added = {each.column for each in self._added} | ({DELETED} if form.unwrap and form.unwrap.rewrites_deletes else set())
        self._equal_names = [column.name for column in columns if column.name in added]
        self._pieces = [f"{format_json(column.name)}:" for column in columns]
        self.missing_keys: tuple[str, ...] = ()
        self._key = self._list_key_columns(form.keys.get(name, None if key else primary_key), key)
        self._key_schema = self._value_schema = ""
        if form.schemas:
            self._key_schema = format_json(self._make_schema(f"{self.topic}.Key", self._key))
            make_value_schema = self._make_envelope if form.unwrap is None else self._make_row_schema
            self._value_schema = format_json(make_value_schema(source))

    def _list_key_columns(self, given: Sequence[str] | None, of_log: Sequence[int]) -> list[int]:
        if given is None:
            return list(of_log)
        at = {column.name: index for index, column in enumerate(self.columns)}
        self.missing_keys = tuple(name for name in given if name not in at)
        return [at[name] for name in given if name in at]

    def refuse_missing_keys(self) -> None:
        """Refuse a table without the columns of its key.

        :raises SourceRejected: a column is missing.
        """
        if self.missing_keys:
            name = self.missing_keys[0]
            found = f"the key of {self.name} has the column `{name}`, which the table did not have when it was changed"
            raise SourceRejected(self.name, found, "Correct `message_key_columns`, or the primary key")

    @property
    def has_key(self) -> bool:
        """True if rows have a key."""
        return bool(self._key)

    @abstractmethod
    def convert(self, at: int, raw: object) -> str:
        """Return a value as JSON.

        :param at: the index of its column.
        :raises ValueRefused: the chosen form cannot hold it.
        """

    @abstractmethod
    def get_conversion(self, at: int) -> tuple[ColumnForm | None, Callable[[bytes], str]]:
        """Return how the texts that a query returns for the values of a column become JSON: their form, None if they have none,
        and a function that converts one of them.

        :param at: the index of the column.
        """

    def format_value(self, at: int, raw: object) -> str:
        """Return a value as JSON.

        :raises SourceRejected: it cannot be written.
        """
        try:
            return self.convert(at, raw)
        except (ValueRefused, UnicodeDecodeError) as error:
            raise self.make_refusal(at, error) from None

    def make_refusal(self, at: int, error: ValueRefused | UnicodeDecodeError) -> SourceRejected:
        """Return the error of a value that cannot be written."""
        if isinstance(error, UnicodeDecodeError):
            error = ValueRefused(f"it is no text in UTF-8: {error.reason}")
        found = f"a value of column `{self.columns[at].name}` cannot be written: {error}"
        return SourceRejected(self.name, found, error.action or "Leave the table out")

    def format_row(self, values: RowValues) -> str:
        """Return a row as JSON."""
        value = self.format_value
        pieces = [piece + value(at, raw) for at, (piece, raw) in enumerate(zip(self._pieces, values, strict=True))]
        return "{" + ",".join(pieces) + "}"

    def format_key(self, values: RowValues) -> str:
        """Return a row's key as JSON; empty if the table has none."""
        if not self._key:
            return ""
        return "{" + ",".join(self._pieces[at] + self.format_value(at, values[at]) for at in self._key) + "}"

    @property
    def key_indexes(self) -> Sequence[int]:
        """The columns of the key, by index."""
        return self._key

    @property
    def quoted_names(self) -> list[str]:
        """The names of the columns as JSON."""
        return [piece[:-1] for piece in self._pieces]

    def has_same_key(self, old: RowValues, new: RowValues) -> bool:
        """Return True if both rows have the same key."""
        return all(old[at] == new[at] for at in self._key)

    def make_key_record(self, key: str) -> bytes | None:
        """Return a record's key."""
        if not key:
            return None
        return (f'{{"schema":{self._key_schema},"payload":{key}}}' if self._key_schema else key).encode()

    def make_value_record(self, value: str) -> bytes:
        """Return a record's value."""
        return (f'{{"schema":{self._value_schema},"payload":{value}}}' if self._value_schema else value).encode()

    def split_key_record(self) -> tuple[str, str]:
        """Return the texts before and after the key in a record's key. The table has a key."""
        before, _, after = (self.make_key_record(HOLE) or b"").decode().partition(HOLE)
        return before, after

    def format_record(self, op: str, before: str, after: str, source: str, transaction: str) -> str:
        """Return the value of a record that is written now, as JSON: an event, or a row with the added fields of its event.

        :param before: the old row as JSON.
        :param after: the new row as JSON.
        :param source: the field ``source`` as JSON.
        :param transaction: the field ``transaction`` as JSON.
        :raises SourceRejected: a column of the table has the name of an added field.
        """
        if self.unwrap is None:
            return format_envelope(before, after, source, transaction, op)
        row = before if op == "d" else after
        return row[:-1] + self._format_source_members(source) + self._format_last_members(op, op == "d") + "}"

    @property
    def names_operation(self) -> bool:
        """True if the value of a record names the operation."""
        return self.unwrap is None or any(added.is_operation for added in self._added)

    def _format_source_members(self, source: str) -> str:
        """Return the members of a row that are added to it, except the operation and whether it is deleted.

        :param source: the field ``source`` as JSON.
        """
        self._refuse_equal_names()
        wanted = [added for added in self._added if not added.is_operation]
        if not wanted:
            return ""
        of_source, now = json.loads(source), time.time_ns()
        of_event = {"ts_ms": now // 1_000_000, "ts_us": now // 1000, "ts_ns": now}
        found = {added.column: (of_source if added.outer else of_event)[added.name] for added in wanted}
        return f",{format_json(found)[1:-1]}"

    def _format_last_members(self, op: str, is_delete: bool) -> str:
        """Return the members of a row that name its operation, and whether it is deleted."""
        assert self.unwrap is not None
        named = [f',{format_json(added.column)}:"{op}"' for added in self._added if added.is_operation]
        deleted = f',"{DELETED}":"{format_json(is_delete)}"' if self.unwrap.rewrites_deletes else ""
        return "".join(named) + deleted

    def _refuse_equal_names(self) -> None:
        """Refuse a table of which a column has the name of an added field.

        :raises SourceRejected: there is one.
        """
        if self._equal_names:
            found = f"column `{self._equal_names[0]}` has the name of a field that `unwrap` adds to the row"
            raise SourceRejected(self.name, found, "Set `add_fields_prefix`, or another name in `add_fields`")

    def split_source_members(self, source: Sequence[str]) -> list[str]:
        """Return the texts around the positions in the part of a value that names its source: ``source`` of an event, or the
        members that are added to a row.

        :param source: the texts around the positions in ``source``.
        """
        if self.unwrap is None:
            return list(source)
        return self._format_source_members(_ANY_POSITION.join(source)).split(_ANY_POSITION)

    def split_value_record(self, has_old: bool, has_new: bool) -> list[str]:
        """Return the texts before, between and after the parts of a record's value that is written now.

        The parts of an event are the old row, the new row, ``source`` and ``op``. A row that is not there is no part. The parts
        of a row are its object without the last brace, the added members of its source, and the operation, which is empty unless
        it :attr:`names_operation`.
        """
        if self.unwrap is not None:
            last = self._format_last_members(HOLE, not has_new)
            return self.make_value_record(HOLE * (2 if self.names_operation else 3) + last + "}").decode().split(HOLE)
        old, new = (HOLE if is_there else "null" for is_there in (has_old, has_new))
        return self.make_value_record(format_envelope(old, new, HOLE, self.transaction, HOLE)).decode().split(HOLE)

    def _make_schema(self, name: str, indexes: Sequence[int], **more: object) -> dict[str, Any]:
        fields = []
        for at in indexes:
            column = self.columns[at]
            fields.append({**column.schema, "optional": column.is_nullable, "field": column.name})
        return {"type": "struct", "fields": fields, "optional": False, "name": name, **more}

    def _make_row_schema(self, source: Mapping[str, Any]) -> dict[str, Any]:
        assert self.unwrap is not None
        made = self._make_schema(f"{self.topic}.Value", range(len(self.columns)))
        if self.unwrap.rewrites_deletes:
            made["fields"].append({"type": "string", "optional": True, "field": DELETED})
        of_source = {member["field"]: member for member in source["fields"]}
        for added in self._added:
            of_event = {"type": "string" if added.name == "op" else "int64"}
            schema = of_source[added.name] if added.outer else of_event
            made["fields"].append({**schema, "optional": True, "field": added.column})
        return made

    def _make_envelope(self, source: Mapping[str, Any]) -> dict[str, Any]:
        name, every = f"{self.topic}.Value", range(len(self.columns))
        rows = [{**self._make_schema(name, every), "optional": True, "field": part} for part in ("before", "after")]
        block = [{"type": k, "optional": False, "field": n} for n, k in (("id", "string"), ("total_order", "int64"))]
        block.append({"type": "int64", "optional": False, "field": "data_collection_order"})
        of_transaction = {"type": "struct", "fields": block, "optional": True, "name": "event.block", "version": 1}
        plain = [{"type": "int64", "optional": True, "field": part} for part in ("ts_ms", "ts_us", "ts_ns")]
        op = {"type": "string", "optional": False, "field": "op"}
        fields = [*rows, source, {**of_transaction, "field": "transaction"}, op, *plain]
        return {"type": "struct", "fields": fields, "optional": False, "name": f"{self.topic}.Envelope", "version": 2}


_ANY_POSITION = str(7 * 10**17 + 1_234_567_890)
"""Stands for a position of the log in a text of JSON that is parsed."""

TableWriterT = TypeVar("TableWriterT", bound=TableWriter)
PositionT = TypeVar("PositionT")


def format_envelope(before: str, after: str, source: str, transaction: str, op: str) -> str:
    """Return the value of an event that is written now, as JSON; the parts are JSON, too, except ``op``."""
    now = time.time_ns()
    return (
        f'{{"before":{before},"after":{after},"source":{source},"transaction":{transaction},'
        f'"op":"{op}","ts_ms":{now // 1_000_000},"ts_us":{now // 1000},"ts_ns":{now}}}'
    )


class ChangeWriter(ABC, Generic[TableWriterT, PositionT]):
    """Converts changes of rows to events.

    :param form: their form.
    :param connector: the name of Debezium's connector, which is written to ``source``.
    """

    def __init__(self, form: EventForm, connector: str) -> None:
        self.form = form
        self.timestamp = 0
        self.of_server = format_json({"version": __version__, "connector": connector, "name": form.prefix})[1:-1]

    @abstractmethod
    def make_source(self, table: TableWriterT, position: PositionT) -> str:
        """Return the field ``source`` as JSON.

        :param position: of the change in the log.
        """

    def is_included(self, table: TableWriterT, values: RowValues, old: RowValues | None = None) -> bool:
        """Return True if a chunk of a snapshot includes the change of a row, or will include it. Here: False."""
        return False

    def make_event(self, table: TableWriterT, position: PositionT, op: str, key: str, before: str, after: str) -> Event:
        """Return an event for a change.

        :param key: the key as JSON; "" if there is none.
        :param before: the old row as JSON.
        :param after: the new row as JSON.
        """
        value = self._format(table, position, op, before, after)
        return Event(table.topic, table.make_key_record(key), table.make_value_record(value), self.timestamp)

    def _format(self, table: TableWriterT, position: PositionT, op: str, before: str, after: str) -> str:
        """Return the value of an event as JSON."""
        transaction = table.transaction if op != "r" else "null"
        return table.format_record(op, before, after, self.make_source(table, position), transaction)

    def make_frame(self, table: TableWriterT, position: PositionT) -> EventFrame:
        """Return the frame of the events of rows that are read from a table now.

        :param position: at which they are read.
        """
        event = self.make_event(table, position, "r", f"{{{HOLE}}}", "null", f"{{{HOLE}}}")
        key, value = ((part or b"").decode().partition(HOLE) for part in (event.key, event.value))
        return EventFrame((key[0], key[2]), (value[0], value[2]), event.timestamp)

    # --- changes ---

    def make_change_events(
        self, table: TableWriterT, position: PositionT, old: RowValues | None, new: RowValues | None, *, is_insert: bool = False
    ) -> Iterator[Event]:
        """Yield the events of a change of a row: two for a change of its key, and tombstones.

        :param old: the row before; None if the log does not hold it.
        :param new: the row after; None for a delete.
        """
        if new is None:
            assert old is not None
            yield from self._delete(table, position, old)
        elif old is None or table.has_same_key(old, new):
            yield from self._write(table, position, "c" if is_insert else "u", old, new)
        else:
            yield from self._delete(table, position, old)
            yield from self._write(table, position, "c", old, new)

    def _write(self, table: TableWriterT, position: PositionT, op: str, old: RowValues | None, new: RowValues) -> Iterator[Event]:
        if self.is_included(table, new, old):
            return
        if op == "u" and old is not None and self.is_included(table, old):
            op = "c"  # the chunk of the old row was read after the update, so that the row was not published
        if op not in self.form.skipped:
            before = table.format_row(old) if op == "u" and old is not None else "null"
            yield self.make_event(table, position, op, table.format_key(new), before, table.format_row(new))

    def _delete(self, table: TableWriterT, position: PositionT, old: RowValues) -> Iterator[Event]:
        if "d" in self.form.skipped or self.is_included(table, old):
            return
        event = self.make_event(table, position, "d", table.format_key(old), table.format_row(old), "null")
        if self.form.writes_deletes:
            yield event
        if self.form.tombstones and event.key is not None:
            yield event._replace(value=None)
