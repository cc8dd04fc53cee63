"""The options of MySqlCdcSource, and the checks of them that need no server."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.sources.cdc.options import (
    DecimalHandling,
    ExtractNewRecordState,
    Modes,
    Snapshot,
    SourceField,
    TimePrecision,
    find_log_option_problems,
    find_prefix_problems,
    find_table_problems,
)

UnsignedHandling = Literal["long", "precise"]
ZeroDateHandling = Literal["fail", "null"]
MIN_BINLOG_BYTES = 1 << 16

SOURCE_FIELDS: tuple[SourceField, ...] = (
    SourceField("version", "string", False), SourceField("connector", "string", False), SourceField("name", "string", False),
    SourceField("ts_ms", "int64", False), SourceField("snapshot", "string", True), SourceField("db", "string", False),
    SourceField("sequence", "string", True), SourceField("ts_us", "int64", True), SourceField("ts_ns", "int64", True),
    SourceField("table", "string", True), SourceField("server_id", "int64", False), SourceField("gtid", "string", True),
    SourceField("file", "string", False), SourceField("pos", "int64", False), SourceField("row", "int32", False),
    SourceField("thread", "int64", True), SourceField("query", "string", True),
)  # fmt: skip
"""The fields of ``source`` in events."""
_COORDINATES = re.compile(r"latest|earliest|[^:/\\]+\.\d+:\d+")


@dataclass(frozen=True)
class MySqlCdcOptions:
    """The arguments of :class:`~airflow_kafka_spark.sources.mysql_cdc.source.MySqlCdcSource`, which documents them."""

    conn_id: str
    topic_prefix: str
    tables: Sequence[str] | None = None
    starting_position: str = "latest"
    snapshot: Snapshot = "never"
    snapshot_chunk_rows: int = 250_000
    snapshot_chunks_per_window: int = 16
    max_replica_lag: float | None = None
    replica_conn_ids: Sequence[str] = ()
    max_binlog_bytes: int = 256 << 20
    message_key_columns: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)
    tombstones_on_delete: bool = True
    skipped_operations: Sequence[str] = ("t",)
    decimal_handling_mode: DecimalHandling = "precise"
    time_precision_mode: TimePrecision = "adaptive"
    bigint_unsigned_handling_mode: UnsignedHandling = "long"
    zero_date_handling_mode: ZeroDateHandling = "fail"
    ignore_cascades: bool = False
    provide_transaction_metadata: bool = False
    unwrap: ExtractNewRecordState | None = None
    schemas_enable: bool = False

    def find_option_problems(self) -> Iterator[Problem]:
        """Yield the problems of the options, without asking the server."""
        prefix: object = self.topic_prefix
        if not isinstance(prefix, str) or not prefix:
            yield Problem("source.topic_prefix", f"it is {prefix!r}; expected a name")
        yield from find_prefix_problems(prefix)
        given: object = self.starting_position
        if not isinstance(given, str) or not _COORDINATES.fullmatch(given):
            action = 'Write "latest", "earliest" or coordinates such as "mysql-bin.000042:4"'
            yield Problem("source.starting_position", f"it is {given!r}; expected coordinates in the log", action)
        modes: Modes = {
            "bigint_unsigned_handling_mode": (self.bigint_unsigned_handling_mode, get_args(UnsignedHandling)),
            "zero_date_handling_mode": (self.zero_date_handling_mode, get_args(ZeroDateHandling)),
        }
        sizes = {"max_binlog_bytes": (self.max_binlog_bytes, MIN_BINLOG_BYTES)}
        yield from find_log_option_problems(self, sizes, [field.name for field in SOURCE_FIELDS], modes)
        if (self.max_replica_lag is None) == bool(self.replica_conn_ids) or isinstance(self.replica_conn_ids, str):
            found = f"it is {self.replica_conn_ids!r}, beside `max_replica_lag={self.max_replica_lag!r}`; expected both or none"
            yield Problem("source.replica_conn_ids", found, 'Write ["replica"]: a primary does not know the lag of its replicas')
        if self.snapshot in ("initial", "only", "when_needed") and given != "latest":
            found = f"it is {given!r}, and the log of a snapshot begins where it is taken"
            yield Problem("source.starting_position", found, 'Leave it out, or set `snapshot="never"`')
        yield from find_table_problems(self.tables, self.message_key_columns, "shop")
