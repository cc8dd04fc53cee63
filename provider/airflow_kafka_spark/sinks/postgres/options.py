"""What a PostgresSink was told: its parts go by it, and need not know the sink."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from airflow_kafka_spark.sinks.postgres.server import Server


@dataclass(frozen=True)
class PostgresSettings:
    """The arguments of :class:`~airflow_kafka_spark.sinks.postgres.sink.PostgresSink`, which explains them."""

    conn_id: str
    table: str
    mode: Literal["append", "upsert"] = "append"
    key: Sequence[str] = ()
    atomic: Literal["window", "split"] = "window"
    delete_enabled: bool = False
    auto_create: bool = False
    auto_evolve: bool = False
    offset_columns: bool = False
    window_column: str | None = None
    windows_table: str = "airflow_windows"
    splits_table: str = "airflow_window_splits"
    stage_schema: str | None = None
    merge: Literal["overlap", "after"] = "overlap"
    lock_timeout: float = 60.0
    keep_windows: int = 1000

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (self.key,) if isinstance(self.key, str) else tuple(self.key))

    def server(self) -> Server:
        """:raises ConnectionInvalid: the connection is not defined, or is of no use."""
        from airflow_kafka_spark.sinks.postgres.server import read_connection

        return read_connection(self.conn_id, self.lock_timeout)
