"""Debezium's change events, flattened to rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.formats.base import Decoder, Format, Part
from airflow_kafka_spark.formats.json.connect_schema import find_logical_type, map_leaf_types
from airflow_kafka_spark.formats.json.format import Json, JsonEnvelope
from airflow_kafka_spark.formats.types import Column, DataType, Decimal, Primitive, Struct, Text, to_arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa

DeleteHandling = Literal["tombstone", "drop", "rewrite", "rewrite-with-tombstone", "delete-to-tombstone"]
"""Handling of delete events; Debezium's ``delete.tombstone.handling.mode``."""
Truncates = Literal["fail", "ignore"]
"""Handling of truncate events."""

REWRITING = ("rewrite", "rewrite-with-tombstone")
"""The modes in which a delete event becomes a row."""

_DELETING: Mapping[DeleteHandling, tuple[str, ...]] = {
    "tombstone": ("d", "none"),
    "delete-to-tombstone": ("d",),
    "rewrite-with-tombstone": ("none",),
}
"""The events that delete the row of their key, by mode: delete events (``d``) and tombstones (``none``)."""

DELETED = "__deleted"
"""The name of the column that says whether a row is deleted."""
_MODES = get_args(DeleteHandling)
OF_EVENT = ("op", "ts_ms", "ts_us", "ts_ns")
"""The fields of an event itself that can become columns."""
_OF_TRANSACTION = ("id", "total_order", "data_collection_order")
_INTEGERS = {
    *("ts_ms", "ts_us", "ts_ns", "lsn", "txId", "xmin", "pos", "row", "server_id", "thread"),
    *("total_order", "data_collection_order", "event_serial_no"),
}


class AddedField(NamedTuple):
    """A field of an event that becomes a column.

    :param outer: the struct that contains it; empty for the event itself.
    :param name: its name.
    :param column: the column's name.
    """

    outer: str
    name: str
    column: str

    @property
    def is_operation(self) -> bool:
        """True if it is the operation of the event."""
        return not self.outer and self.name == "op"


def parse_added_fields(add_fields: Sequence[str], prefix: str) -> tuple[AddedField, ...]:
    """Return the fields that become columns.

    :param add_fields: as Debezium's ``add.fields``.
    :param prefix: the beginning of the columns' names.
    """
    found = []
    for entry in add_fields:
        path, _, renamed = entry.partition(":")
        outer, dot, name = path.rpartition(".")
        if not dot:
            outer = "" if name in OF_EVENT else "transaction" if name in _OF_TRANSACTION else "source"
        found.append(AddedField(outer, name, prefix + (renamed or path.replace(".", "_"))))
    return tuple(found)


@dataclass(frozen=True)
class Debezium(Format):
    """A change event of Debezium (``before``, ``after``, ``source``, ``op``, ``ts_ms``) as a row, as Debezium's own
    ``ExtractNewRecordState`` flattens it; options have its names.

    ======  ===================  ===========================================================================================
    ``op``  the event            the result
    ======  ===================  ===========================================================================================
    c, u    insert, update       a row of ``after``
    r       read of a snapshot   a row of ``after``
    d       delete               ``tombstone``: a delete of its key, as a record without a value; ``rewrite``: a row of
                                 ``before`` with ``__deleted``; ``drop``: nothing; the others: see below
    t       truncate             bad, since no sink here truncates; nothing with ``truncates="ignore"``
    m       logical message      nothing
    other   or none              bad: no change event
    ======  ===================  ===========================================================================================

    Debezium sends a tombstone after each delete event (``tombstones.on.delete``). With ``tombstone``, this record repeats the
    delete, without an effect; in a compacted topic, which no longer has the event, it is the delete itself. ``drop`` and
    ``rewrite`` drop it; ``rewrite-with-tombstone`` is ``rewrite`` that keeps it, ``delete-to-tombstone`` is ``tombstone`` that
    drops it. A sink that deletes needs the columns of the key: ``key=Json("id bigint")``, or ``key=JsonEnvelope(...)``.

    :param value: the format of the events, with the columns of the rows: ``Json(schema)``, or ``JsonEnvelope(schema)`` if the
        connector writes schemas (``schemas.enable=true``). For other formats, the columns of the format are those of the events.
    :param delete_tombstone_handling_mode: conversion of a delete event, see above; default ``tombstone``. With ``rewrite`` and
        ``rewrite-with-tombstone`` all columns are nullable, as ``before`` may have the key alone, and ``__deleted`` is
        ``"true"`` or ``"false"``.
    :param add_fields: fields of the event that become columns: ``"op"`` as ``__op``, ``"source.ts_ms"`` as ``__source_ts_ms``,
        ``"table"`` (of ``source``) as ``__table``; ``"lsn:position"`` as ``__position``. Times, positions and numbers are
        bigint, everything else is a string. Default none.
    :param add_fields_prefix: the prefix of the names of these columns; default ``__``.
    :param truncates: conversion of a truncate event: ``fail`` (default) makes it bad, ``ignore`` skips it.
    :param timestamps: for ``Json``, the notation of ``date`` and timestamp columns. ``text`` (default): ISO 8601, and numbers are
        bad (``time.precision.mode=isostring``, which writes ``Z`` after values without a zone); ``millis``, ``micros`` or
        ``nanos``: also numbers, of days in dates, of milliseconds, microseconds or nanoseconds (whole microseconds) in
        timestamps (``connect``, ``adaptive`` or ``microseconds``, ``nanoseconds``).
    :param decimals: for ``Json``, the notation of decimals: ``text`` (default), numbers or numeric strings
        (``decimal.handling.mode=double`` or ``string``);
        ``unscaled``: numbers, base64 of the unscaled value with the scale of the column, or an object of scale and value
        (``precise``).
    :param unavailable_value_placeholder: the text that the connector writes in place of a value which the log does not hold: an
        update has not changed it, and PostgreSQL stores it out of line (``unavailable.value.placeholder``). An event that has it
        in a text, in bytes or in a list of texts is bad, because the row would lose its value. Default:
        ``__debezium_unavailable_value``, the connector's own. None: such a text is a value like others.
    """

    value: Format
    delete_tombstone_handling_mode: DeleteHandling = "tombstone"
    add_fields: Sequence[str] = ()
    add_fields_prefix: str = "__"
    truncates: Truncates = "fail"
    timestamps: Literal["text", "millis", "micros", "nanos"] = "text"
    decimals: Literal["text", "unscaled"] = "text"
    unavailable_value_placeholder: str | None = "__debezium_unavailable_value"

    def of_topics(self, topics: Sequence[str], part: Part) -> Format:
        """Return this format with the format of its events for these topics."""
        # `validate` reports a value that is no format.
        return replace(self, value=self.value.of_topics(topics, part)) if isinstance(self.value, Format) else self

    @property
    def added(self) -> tuple[AddedField, ...]:
        """The fields that become columns."""
        return parse_added_fields(self.add_fields, self.add_fields_prefix)

    @property
    def _rewrites(self) -> bool:
        """True if delete events become rows of ``before``."""
        return self.delete_tombstone_handling_mode in REWRITING

    # --- validate ---

    def validate(self, where: str) -> list[Problem]:
        """Return the problems of the options."""
        if not isinstance(self.value, Format) or isinstance(self.value, Debezium):
            return [
                Problem(f"{where}.value", f"found {self.value!r}; expected Json or JsonEnvelope", "Name the format of the events")
            ]
        options = {
            "delete_tombstone_handling_mode": (self.delete_tombstone_handling_mode, _MODES),
            "truncates": (self.truncates, ("fail", "ignore")),
            "timestamps": (self.timestamps, ("text", "millis", "micros", "nanos")),
            "decimals": (self.decimals, ("text", "unscaled")),
        }
        problems = [
            Problem(f"{where}.{name}", f"found {found!r}; expected one of {', '.join(known)}")
            for name, (found, known) in options.items()
            if found not in known
        ]
        placeholder = self.unavailable_value_placeholder
        if placeholder is not None and (not isinstance(placeholder, str) or not placeholder):
            problems.append(Problem(f"{where}.unavailable_value_placeholder", f"found {placeholder!r}; expected a text, or None"))
        problems += [*self._find_field_problems(where), *self.value.validate(f"{where}.value")]
        return problems or self._find_column_problems(where)

    def _find_field_problems(self, where: str) -> list[Problem]:
        if not isinstance(self.add_fields, (list, tuple)) or not all(isinstance(f, str) for f in self.add_fields):
            return [Problem(f"{where}.add_fields", f"found {self.add_fields!r}; expected names", 'Write ("op", "source.ts_ms")')]
        known = ("", "source", "transaction")
        action = 'Write for instance "op", "table" or "source.ts_ms"'
        return [
            Problem(f"{where}.add_fields", f"found {entry!r}; expected a field of the event, of source or of transaction", action)
            for entry, (outer, name, _) in zip(self.add_fields, self.added, strict=True)
            if outer not in known or not name or (not outer and name not in OF_EVENT)
        ]

    def _find_column_problems(self, where: str) -> list[Problem]:
        import pyarrow as pa

        problems = []
        if not isinstance(self.value, Json | JsonEnvelope):
            events = self.value.get_arrow_schema()
            found = events.field("after").type if "after" in events.names else None
            if "op" not in events.names or found is None or not pa.types.is_struct(found):
                what = f"its columns are {', '.join(events.names)}; expected those of change events: op, after, ..."
                return [Problem(f"{where}.value", what, "Name the format of Debezium's events")]
            if self._rewrites and _find_field_types(events, "before") != _find_field_types(events, "after"):
                return [Problem(f"{where}.value", "its `before` lacks fields of `after`, which `rewrite` needs")]
            paths = {(outer, name) for outer, name, _ in self.added}
            missing = [".".join(filter(None, p)) for p in sorted(paths) if _find_field(events, *p) is None]
            problems = [Problem(f"{where}.add_fields", f"the events have no `{path}`") for path in missing]
            if problems:
                return problems
        names = self.get_arrow_schema().names
        for name in sorted({n for n in names if names.count(n) > 1}):
            problems.append(Problem(f"{where}.add_fields", f"column `{name}` is there already", "Set `add_fields_prefix`"))
        return problems

    # --- reading ---

    def list_event_columns(self) -> tuple[Column, ...]:
        """Return the columns that are read of an event in JSON, with their logical types."""
        assert isinstance(self.value, Json | JsonEnvelope)
        row = [replace(c, type=map_leaf_types(c.type, self._find_wire_type)) for c in self.value.columns]
        columns = [Column("op", Text()), Column("after", Struct(tuple(row)))]
        if self._rewrites:
            columns.append(Column("before", Struct(tuple(replace(c, nullable=True) for c in row))))
        nested: dict[str, dict[str, Column]] = {}
        for outer, name, _ in self.added:
            column = Column(name, Primitive("bigint") if name in _INTEGERS else Text())
            if outer:
                nested.setdefault(outer, {})[name] = column
            elif name != "op" and column not in columns:
                columns.append(column)
        return (*columns, *(Column(outer, Struct(tuple(fields.values()))) for outer, fields in nested.items()))

    def _find_wire_type(self, data_type: DataType) -> DataType:
        if not isinstance(self.value, Json):
            return data_type
        if isinstance(data_type, Decimal):
            return find_logical_type(data_type, "unscaled", data_type.scale) if self.decimals == "unscaled" else data_type
        if str(data_type) == "timestamp" or (str(data_type) == "timestamp_ntz" and self.timestamps != "text"):
            return find_logical_type(data_type, self.timestamps)
        if str(data_type) in ("date", "timestamp_ntz"):
            return find_logical_type(data_type, "iso" if self.timestamps == "text" else "days")
        return data_type

    def make_event_schema(self) -> pa.Schema:
        """Return the Arrow schema of events."""
        from airflow_kafka_spark.formats.json.connect_schema import list_sql_columns

        if isinstance(self.value, Json | JsonEnvelope):
            return to_arrow_schema(list_sql_columns(self.list_event_columns()))
        return self.value.get_arrow_schema()

    def get_arrow_schema(self) -> pa.Schema:
        """Return the columns of rows, then those of ``add_fields``, then ``__deleted``.

        :raises SchemaInvalid: the format's schema cannot be read.
        """
        import pyarrow as pa

        events, rewrite = self.make_event_schema(), self._rewrites
        fields = [f.with_nullable(True) if rewrite else f for f in events.field("after").type]
        for outer, name, column in self.added:
            found = _find_field(events, outer, name)
            assert found is not None
            fields.append(pa.field(column, found.type))
        return pa.schema([*fields, *([pa.field(DELETED, pa.string())] if rewrite else [])])

    def make_decoder(self) -> Decoder:
        """Return a picklable decoder.

        :raises SchemaInvalid: the format's schema cannot be read.
        """
        from airflow_kafka_spark.formats.debezium.tasks.decode import DebeziumDecoder
        from airflow_kafka_spark.formats.json.connect_schema import list_sql_columns

        if isinstance(self.value, Json | JsonEnvelope):
            columns = self.list_event_columns()
            if isinstance(self.value, Json):
                from airflow_kafka_spark.formats.json.tasks.decode import JsonDecoder

                events: Decoder = JsonDecoder(list_sql_columns(columns), wire_columns=columns)
            else:
                from airflow_kafka_spark.formats.json.tasks.envelope import EnvelopeDecoder

                events = EnvelopeDecoder(columns, defaults=self.value.replace_null_with_default)
        else:
            events = self.value.make_decoder()
        mode = self.delete_tombstone_handling_mode
        return DebeziumDecoder(
            events,
            self.get_arrow_schema(),
            self.added,
            rewrites=mode in REWRITING,
            deleting=_DELETING.get(mode, ()),
            ignores_truncates=self.truncates == "ignore",
            placeholder=self.unavailable_value_placeholder,
        )


def _find_field_types(events: pa.Schema, name: str) -> dict[str, pa.DataType] | None:
    """Return names and types of the fields of a struct in events."""
    import pyarrow as pa

    kind = events.field(name).type if name in events.names else None
    return {f.name: f.type for f in kind} if kind is not None and pa.types.is_struct(kind) else None


def _find_field(events: pa.Schema, outer: str, name: str) -> pa.Field | None:
    """Return a field of events, or of a struct in them."""
    import pyarrow as pa

    if not outer:
        return events.field(name) if name in events.names else None
    kind = events.field(outer).type if outer in events.names else None
    if kind is None or not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
        return None
    return kind.field(name)
