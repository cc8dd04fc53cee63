"""The options of PostgresCdcSource, and the checks of them that need no server."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.sources.cdc.options import (
    DecimalHandling,
    ExtractNewRecordState,
    Snapshot,
    SourceField,
    TimePrecision,
    find_log_option_problems,
    find_prefix_problems,
    find_table_problems,
    parse_table_name,
)

MIN_WAL_BYTES = 1 << 16

DEFAULT_SCHEMA = "public"
"""The schema of names of tables without one."""

SOURCE_FIELDS: tuple[SourceField, ...] = (
    SourceField("version", "string", False), SourceField("connector", "string", False), SourceField("name", "string", False),
    SourceField("ts_ms", "int64", False), SourceField("snapshot", "string", True), SourceField("db", "string", False),
    SourceField("sequence", "string", True), SourceField("ts_us", "int64", True), SourceField("ts_ns", "int64", True),
    SourceField("schema", "string", False), SourceField("table", "string", False), SourceField("txId", "int64", True),
    SourceField("lsn", "int64", True), SourceField("xmin", "int64", True),
)  # fmt: skip
"""The fields of ``source`` in events."""


@dataclass(frozen=True)
class PostgresCdcOptions:
    """The arguments of :class:`~airflow_kafka_spark.sources.postgres_cdc.source.PostgresCdcSource`, which documents them."""

    conn_id: str
    publication: str
    slot: str
    topic_prefix: str
    tables: Sequence[str] | None = None
    snapshot: Snapshot = "never"
    snapshot_chunk_rows: int = 250_000
    snapshot_chunks_per_window: int = 16
    max_replica_lag: float | None = None
    max_wal_bytes: int = 256 << 20
    message_key_columns: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)
    tombstones_on_delete: bool = True
    skipped_operations: Sequence[str] = ("t",)
    unavailable_value_placeholder: str = "__debezium_unavailable_value"
    decimal_handling_mode: DecimalHandling = "precise"
    time_precision_mode: TimePrecision = "adaptive"
    provide_transaction_metadata: bool = False
    unwrap: ExtractNewRecordState | None = None
    schemas_enable: bool = False

    def find_option_problems(self) -> Iterator[Problem]:
        """Yield the problems of the options, without asking the server."""
        for name in ("publication", "slot", "topic_prefix"):
            value: object = getattr(self, name)
            if not isinstance(value, str) or not value:
                yield Problem(f"source.{name}", f"it is {value!r}; expected a name")
        if isinstance(self.slot, str) and self.slot and not re.fullmatch(r"[a-z0-9_]{1,63}", self.slot):
            action = "Use lower-case letters, digits and underscores, at most 63"
            yield Problem("source.slot", f"`{self.slot}` is no name that PostgreSQL takes for a slot", action)
        yield from find_prefix_problems(self.topic_prefix)
        sizes = {"max_wal_bytes": (self.max_wal_bytes, MIN_WAL_BYTES)}
        yield from find_log_option_problems(self, sizes, [field.name for field in SOURCE_FIELDS])
        yield from find_table_problems(self.tables, self.message_key_columns, DEFAULT_SCHEMA)

    @property
    def named_tables(self) -> frozenset[tuple[str, str]] | None:
        """Schema and name of each table of ``tables``, by default in :data:`DEFAULT_SCHEMA`; None for all of the publication."""
        return None if self.tables is None else frozenset(parse_table_name(name, DEFAULT_SCHEMA) for name in self.tables)
