"""What a JdbcSource was told, and what that comes to: its parts go by it, and need not know the source."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Mode = Literal["bulk", "incrementing", "timestamp", "timestamp+incrementing"]


@dataclass(frozen=True)
class JdbcSettings:
    """The arguments of :class:`~airflow_kafka_spark.sources.jdbc.source.JdbcSource`, which explains them."""

    conn_id: str
    table: str | None = None
    query: str | None = None
    mode: Mode | None = None
    cursor: str | None = None
    incrementing_column: str | None = None
    timestamp_column: str | None = None
    delay: float = 0.0
    db_timezone: str = "UTC"
    validate_non_null: bool = True
    key: Sequence[str] = ()
    include_columns: Sequence[str] | None = None
    split_records: int = 250_000
    max_records: int | None = None
    writers_timeout: float = 60.0
    fetchsize: int = 10_000

    def __post_init__(self) -> None:
        for name in ("key", "include_columns"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))

    # --- what the options come to ---

    @property
    def effective_mode(self) -> Mode:
        """``mode``, or what the columns given imply."""
        if self.mode is not None:
            return self.mode
        named = (("timestamp", self.timestamp_column), ("incrementing", self.incrementing))
        return "+".join(mode for mode, column in named if column) or "bulk"  # type: ignore[return-value]

    @property
    def incrementing(self) -> str | None:
        """The incrementing column, by whichever name it was given."""
        return self.incrementing_column or self.cursor

    @property
    def cursor_columns(self) -> tuple[str, ...]:
        """The columns a window's end is a value of, none for ``bulk``."""
        columns = {"timestamp": self.timestamp_column, "incrementing": self.incrementing}
        return tuple(columns[part] or "" for part in self.effective_mode.split("+") if part in columns)

    @property
    def name(self) -> str:
        """``schema.table`` as it was given, or a name for the query made from its text."""
        if self.query is not None:
            return f"query-{hashlib.sha256(self.query.encode()).hexdigest()[:12]}"
        return self.table or ""
