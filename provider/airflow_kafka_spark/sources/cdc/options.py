"""Checks of the options that all sources of a database's log have, which need no server."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args

from airflow_kafka_spark.arguments import find_choice_problems
from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.formats.debezium.format import (
    DELETED,
    OF_EVENT,
    REWRITING,
    AddedField,
    DeleteHandling,
    parse_added_fields,
)
from airflow_kafka_spark.hooks.databases import parse_name
from airflow_kafka_spark.sources.base import find_count_problems, find_lag_problems

DecimalHandling = Literal["precise", "double", "string"]
TimePrecision = Literal["adaptive", "adaptive_time_microseconds", "connect"]
Snapshot = Literal["initial", "never", "only", "when_needed"]
MOST_CHUNKS = 100
"""Maximum number of chunks in a window."""
OPERATIONS = ("c", "u", "d", "t")
"""The operations of events: create, update, delete, truncate."""
TOPIC_PREFIX = re.compile(r"[A-Za-z0-9._-]+")
_NOT_IN_TOPICS = re.compile(r"[^A-Za-z0-9._-]")


class SourceField(NamedTuple):
    """A field of ``source`` in events.

    :param name: its name.
    :param kind: its type, as Connect names it.
    :param is_nullable: True if it may be null.
    """

    name: str
    kind: str
    is_nullable: bool


@dataclass(frozen=True)
class ExtractNewRecordState:
    """Publishes rows in place of events: the value of a record is the row after the change, as Debezium's transform of this name
    makes it. Give it to a source of a database's log as ``unwrap``.

    The records are as small as the rows, and have the same keys as events. Their values have the form that they have in events.

    :param delete_tombstone_handling_mode: the records of a delete (``delete.tombstone.handling.mode``). ``tombstone`` (default):
        one without a value, which ``delete-to-tombstone`` is, too. ``rewrite``: the row before the delete, with the field
        ``__deleted``, which is ``"true"`` for it and ``"false"`` for all other rows. ``rewrite-with-tombstone``: both. ``drop``:
        none.
    :param add_fields: fields of the event that are added to the row (``add.fields``): ``op``, ``ts_ms``, ``ts_us`` and ``ts_ns``,
        and those of ``source``, as in ``["op", "table", "lsn", "source.ts_ms"]``. Their names are ``__op``, ``__table``,
        ``__lsn`` and ``__source_ts_ms``; ``"lsn:position"`` names one ``__position``. Default: none.
    :param add_fields_prefix: the beginning of their names (``add.fields.prefix``); default ``__``.
    """

    delete_tombstone_handling_mode: DeleteHandling = "tombstone"
    add_fields: Sequence[str] = ()
    add_fields_prefix: str = "__"

    @property
    def rewrites_deletes(self) -> bool:
        """True if the row before a delete is published."""
        return self.delete_tombstone_handling_mode in REWRITING

    @property
    def has_tombstones(self) -> bool:
        """True if a delete is published as a record without a value."""
        return self.delete_tombstone_handling_mode not in ("drop", "rewrite")

    @property
    def added(self) -> tuple[AddedField, ...]:
        """The fields of events that are added to rows."""
        return parse_added_fields(self.add_fields, self.add_fields_prefix)

    def find_problems(self, source_fields: Sequence[str]) -> Iterator[Problem]:
        """Yield the problems of the options.

        :param source_fields: the fields of ``source``.
        """
        where = "source.unwrap.add_fields"
        mode = self.delete_tombstone_handling_mode
        yield from find_choice_problems("source.unwrap.delete_tombstone_handling_mode", mode, get_args(DeleteHandling))
        names: object = self.add_fields
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            yield Problem(where, f"it is {names!r}; expected names", 'Write ["op", "source.ts_ms"]')
            return
        known = {"": OF_EVENT, "source": tuple(source_fields)}
        for entry, added in zip(self.add_fields, self.added, strict=True):
            if added.name not in known.get(added.outer, ()):
                action = f"Name some of {', '.join((*OF_EVENT, *source_fields))}"
                yield Problem(where, f"`{entry}` is no field of an event that can be added to a row", action)
        columns = Counter([*(added.column for added in self.added), *([DELETED] if self.rewrites_deletes else [])])
        for column, count in columns.items():
            if count > 1:
                found = f"{count} fields would have the name `{column}`"
                yield Problem(where, found, 'Name one differently, as "ts_ms:written_ms"')


class LogOptions(Protocol):
    """Options that the sources of all databases have, and that :func:`find_log_option_problems` checks. The sources document
    them."""

    @property
    def snapshot(self) -> Snapshot: ...
    @property
    def snapshot_chunk_rows(self) -> int: ...
    @property
    def snapshot_chunks_per_window(self) -> int: ...
    @property
    def max_replica_lag(self) -> float | None: ...
    @property
    def tombstones_on_delete(self) -> bool: ...
    @property
    def skipped_operations(self) -> Sequence[str]: ...
    @property
    def decimal_handling_mode(self) -> DecimalHandling: ...
    @property
    def time_precision_mode(self) -> TimePrecision: ...
    @property
    def provide_transaction_metadata(self) -> bool: ...
    @property
    def unwrap(self) -> ExtractNewRecordState | None: ...


Modes = Mapping[str, tuple[object, Sequence[str]]]
"""Per option, its value and the known values."""
Sizes = Mapping[str, tuple[object, int]]
"""Per option, its value and the smallest one that is accepted."""


def find_log_option_problems(
    options: LogOptions, sizes: Sizes, source_fields: Sequence[str], modes: Modes | None = None
) -> Iterator[Problem]:
    """Yield the problems of the options that all sources have, and of those that only one has.

    :param sizes: the sizes that only this source has.
    :param source_fields: the fields of ``source`` in its events.
    :param modes: the choices that only this source has. Default: none.
    """
    common: Modes = {
        "snapshot": (options.snapshot, get_args(Snapshot)),
        "decimal_handling_mode": (options.decimal_handling_mode, get_args(DecimalHandling)),
        "time_precision_mode": (options.time_precision_mode, get_args(TimePrecision)),
    }
    for name, (value, known) in {**common, **(modes or {})}.items():
        yield from find_choice_problems(f"source.{name}", value, known)
    yield from _find_operation_problems(options.skipped_operations)
    yield from find_count_problems(sizes)
    yield from _find_snapshot_problems(options.snapshot_chunk_rows, options.snapshot_chunks_per_window)
    yield from find_lag_problems(options.max_replica_lag)
    if options.unwrap is not None:
        yield from _find_unwrap_problems(options, options.unwrap, source_fields)


def _find_unwrap_problems(options: LogOptions, unwrap: ExtractNewRecordState, source_fields: Sequence[str]) -> Iterator[Problem]:
    given: object = unwrap
    if not isinstance(given, ExtractNewRecordState):
        yield Problem("source.unwrap", f"it is {given!r}; expected ExtractNewRecordState(...)", "Write ExtractNewRecordState()")
        return
    yield from unwrap.find_problems(source_fields)
    if not options.tombstones_on_delete:
        found = "it is False, and `unwrap` says which records a delete has"
        yield Problem("source.tombstones_on_delete", found, "Leave it out, and set `delete_tombstone_handling_mode` of `unwrap`")
    if "t" not in options.skipped_operations:
        found = "it leaves out no truncates (`t`), and with `unwrap` a truncate has no row that could be published"
        yield Problem("source.skipped_operations", found, 'Add "t", or leave out `unwrap`')
    if options.provide_transaction_metadata:
        found = "it is True, and rows have no field that names their transaction"
        yield Problem("source.provide_transaction_metadata", found, "Leave it out, or leave out `unwrap`")


def has_tombstones(options: LogOptions) -> bool:
    """Return True if a delete has a record without a value."""
    return options.tombstones_on_delete if options.unwrap is None else options.unwrap.has_tombstones


def list_skipped_operations(options: LogOptions) -> frozenset[str]:
    """Return the operations of which nothing is published."""
    is_dropped = options.unwrap is not None and options.unwrap.delete_tombstone_handling_mode == "drop"
    return frozenset({*options.skipped_operations, *(["d"] if is_dropped else [])})


def find_prefix_problems(prefix: object) -> Iterator[Problem]:
    """Yield a problem if a text cannot be the prefix of the names of topics."""
    if isinstance(prefix, str) and prefix and not TOPIC_PREFIX.fullmatch(prefix):
        action = "Use letters, digits, `.`, `_` and `-`"
        yield Problem("source.topic_prefix", f"`{prefix}` cannot begin the name of a topic", action)


def _find_snapshot_problems(chunk_rows: object, chunks: object) -> Iterator[Problem]:
    """Yield the problems of the sizes of a snapshot.

    :param chunk_rows: the option ``snapshot_chunk_rows``.
    :param chunks: the option ``snapshot_chunks_per_window``.
    """
    yield from find_count_problems({"snapshot_chunk_rows": (chunk_rows, 1), "snapshot_chunks_per_window": (chunks, 1)})
    if isinstance(chunks, int) and chunks > MOST_CHUNKS:
        found = f"it is {chunks:,}; expected at most {MOST_CHUNKS}"
        yield Problem("source.snapshot_chunks_per_window", found, "The position of the pipeline holds the chunks of a window")


def parse_table_name(name: str, schema: str) -> tuple[str, str]:
    """Return schema (or database) and name of a table.

    :param schema: the schema of a name without one.
    """
    given, table = parse_name(name)
    return given or schema, table


def format_topic(prefix: str, table: tuple[str, str]) -> str:
    """Return the topic of a table's events.

    :param table: its schema (or database) and its name.
    """
    return f"{prefix}.{_NOT_IN_TOPICS.sub('_', '.'.join(table))}"


def find_shared_topic_problems(prefix: str, tables: Iterable[tuple[str, str]]) -> Iterator[Problem]:
    """Yield the tables whose events would be in the topic of another table."""
    first: dict[str, tuple[str, str]] = {}
    for table in sorted(tables):
        other = first.setdefault(format_topic(prefix, table), table)
        if other != table:
            names, topic = [".".join(map(repr, name)) for name in (other, table)], format_topic(prefix, table)
            found = (
                f"{names[0]} and {names[1]} would have the same topic, `{topic}`, in which their rows would replace each other"
            )
            yield Problem("source.tables", found, "Rename one, or capture it by another pipeline with another `topic_prefix`")


def _find_operation_problems(skipped: Sequence[str]) -> Iterator[Problem]:
    """Yield the problems of ``skipped_operations``."""
    wrong = [op for op in skipped if op not in OPERATIONS]
    if isinstance(skipped, str) or wrong:
        found = f"it is {skipped!r}; expected operations among {', '.join(OPERATIONS)}"
        yield Problem("source.skipped_operations", found, 'Write ("t",)')


def find_table_problems(tables: object, keys: Mapping[str, Sequence[str]], schema: str) -> Iterator[Problem]:
    """Yield the problems of the names of tables and of key columns.

    :param tables: the option ``tables``.
    :param keys: the option ``message_key_columns``.
    :param schema: a schema, for examples.
    """
    if isinstance(tables, str) or (tables is not None and not tables):
        yield Problem("source.tables", f"it is {tables!r}; expected names, or None for all", f'Write ["{schema}.orders"]')
        return
    names: Mapping[str, object] = {"tables": tables or (), "message_key_columns": keys}
    for option, given in names.items():
        assert isinstance(given, (Sequence, Mapping, set, frozenset)), given
        for name in given:
            try:
                parse_name(name)
            except (ValueError, TypeError) as error:
                yield Problem(f"source.{option}", str(error), 'Write `table`, `schema.table` or `"My schema"."my.table"`')
    for name, columns in keys.items():
        if isinstance(columns, str) or not columns:
            found = f"the columns of `{name}` are {columns!r}; expected names"
            yield Problem("source.message_key_columns", found, f'Write {{"{schema}.orders": ["id"]}}')
