"""The options of PostgresCdcSource, and the checks of them that need no server."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.hooks.postgres import parse_name

Snapshot = Literal["initial", "never", "only", "when_needed"]
DecimalHandling = Literal["precise", "double", "string"]
TimePrecision = Literal["adaptive", "connect"]
OPERATIONS = ("c", "u", "d", "t")
TOPIC_PREFIX = re.compile(r"[A-Za-z0-9._-]+")
MIN_WAL_BYTES = 1 << 16
MOST_CHUNKS = 100


@dataclass(frozen=True)
class PostgresCdcOptions:
    """The arguments of :class:`~airflow_kafka_spark.sources.postgres_cdc.source.PostgresCdcSource`, which documents them."""

    conn_id: str
    publication: str
    slot: str
    topic_prefix: str
    tables: Sequence[str] | None = None
    snapshot: Snapshot = "never"
    snapshot_chunk_rows: int = 100_000
    snapshot_chunks_per_window: int = 16
    max_wal_bytes: int = 256 << 20
    message_key_columns: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)
    tombstones_on_delete: bool = True
    skipped_operations: Sequence[str] = ("t",)
    unavailable_value_placeholder: str = "__debezium_unavailable_value"
    decimal_handling_mode: DecimalHandling = "precise"
    time_precision_mode: TimePrecision = "adaptive"
    schemas_enable: bool = False

    def option_problems(self) -> Iterator[Problem]:
        """Yield what is wrong with the options, without asking the server."""
        for name in ("publication", "slot", "topic_prefix"):
            value: object = getattr(self, name)
            if not isinstance(value, str) or not value:
                yield Problem(f"source.{name}", f"it is {value!r}; expected a name")
        if isinstance(self.slot, str) and self.slot and not re.fullmatch(r"[a-z0-9_]{1,63}", self.slot):
            action = "Use lower-case letters, digits and underscores, at most 63"
            yield Problem("source.slot", f"`{self.slot}` is no name that PostgreSQL takes for a slot", action)
        if isinstance(self.topic_prefix, str) and self.topic_prefix and not TOPIC_PREFIX.fullmatch(self.topic_prefix):
            action = "Use letters, digits, `.`, `_` and `-`"
            yield Problem("source.topic_prefix", f"`{self.topic_prefix}` cannot begin the name of a topic", action)
        yield from self._choice_problems()
        least = {"max_wal_bytes": MIN_WAL_BYTES, "snapshot_chunk_rows": 1, "snapshot_chunks_per_window": 1}
        for name, smallest in least.items():
            size: Any = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < smallest:
                yield Problem(f"source.{name}", f"it is {size!r}; expected a whole number from {smallest:,}")
        if isinstance(self.snapshot_chunks_per_window, int) and self.snapshot_chunks_per_window > MOST_CHUNKS:
            found = f"it is {self.snapshot_chunks_per_window:,}; expected at most {MOST_CHUNKS}"
            yield Problem("source.snapshot_chunks_per_window", found, "The position of the pipeline holds the chunks of a window")
        yield from self._table_problems()

    def _choice_problems(self) -> Iterator[Problem]:
        choices = {
            "snapshot": (self.snapshot, get_args(Snapshot)),
            "decimal_handling_mode": (self.decimal_handling_mode, get_args(DecimalHandling)),
            "time_precision_mode": (self.time_precision_mode, get_args(TimePrecision)),
        }
        for name, (value, known) in choices.items():
            if value not in known:
                yield Problem(f"source.{name}", f"it is {value!r}; expected one of {', '.join(known)}")
        wrong = [op for op in self.skipped_operations if op not in OPERATIONS]
        if isinstance(self.skipped_operations, str) or wrong:
            found = f"it is {self.skipped_operations!r}; expected operations among {', '.join(OPERATIONS)}"
            yield Problem("source.skipped_operations", found, 'Write ("t",)')

    def _table_problems(self) -> Iterator[Problem]:
        given: object = self.tables
        if isinstance(given, str) or (self.tables is not None and not self.tables):
            yield Problem("source.tables", f"it is {given!r}; expected names, or None for all", 'Write ["public.orders"]')
            return
        for option, names in (("tables", self.tables or ()), ("message_key_columns", self.message_key_columns)):
            for name in names:
                try:
                    parse_name(name)
                except (ValueError, TypeError) as error:
                    yield Problem(f"source.{option}", str(error), 'Write `table`, `schema.table` or `"My schema"."my.table"`')
        for name, columns in self.message_key_columns.items():
            if isinstance(columns, str) or not columns:
                found = f"the columns of `{name}` are {columns!r}; expected names"
                yield Problem("source.message_key_columns", found, 'Write {"public.orders": ["id"]}')

    @property
    def named_tables(self) -> frozenset[tuple[str, str]] | None:
        """Schema and name of each table of ``tables``; None: all of the publication. Without a schema, ``public``."""
        return None if self.tables is None else frozenset(full_name(name) for name in self.tables)


def full_name(name: str) -> tuple[str, str]:
    """Return schema and name of a table; the schema is ``public`` if none is given."""
    schema, table = parse_name(name)
    return schema or "public", table
