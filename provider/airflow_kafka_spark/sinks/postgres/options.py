"""The options of a PostgreSQL sink, and the checks of them that need no server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from airflow_kafka_spark.arguments import as_names
from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.hooks.databases import NAME_BYTES, parse_name
from airflow_kafka_spark.sinks.base import MODES, find_key_problems

if TYPE_CHECKING:
    from airflow_kafka_spark.sinks.postgres.server import SinkServer

_CHOICES = {"mode": MODES, "atomic": ("window", "split"), "merge": ("overlap", "after")}


@dataclass(frozen=True)
class PostgresSinkOptions:
    """The parameters of :class:`~airflow_kafka_spark.sinks.PostgresSink`, which documents them."""

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
        object.__setattr__(self, "key", as_names(self.key))

    def find_server(self) -> SinkServer:
        """Return the server that the connection leads to.

        :raises ConnectionInvalid: the connection is not defined, or cannot be used.
        """
        from airflow_kafka_spark.sinks.postgres.server import read_connection

        return read_connection(self.conn_id, self.lock_timeout if self.lock_timeout > 0 else 60.0)

    def find_problems(self) -> Iterator[Problem]:
        """Yield the problems of the options, each alone and in combination."""
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                said = " or ".join(f'"{choice}"' for choice in choices)
                yield Problem(f"sink.{name}", f"it is {getattr(self, name)!r}; expected {said}")
        try:
            parse_name(self.table)
        except ValueError as error:
            yield Problem("sink.table", str(error), 'Write `table`, `schema.table` or `"My schema"."my.table"`')
        for name in ("windows_table", "splits_table", "stage_schema"):
            value = getattr(self, name)
            if value is not None and not is_name(value):
                yield Problem(f"sink.{name}", f"{value!r} cannot be a name; expected 1 to {NAME_BYTES} bytes without NUL")
        if not self.lock_timeout > 0:
            yield Problem("sink.lock_timeout", f"it is {self.lock_timeout!r}; expected seconds, more than 0")
        if not (isinstance(self.keep_windows, int) and self.keep_windows >= 1):
            yield Problem("sink.keep_windows", f"it is {self.keep_windows!r}; expected a whole number, at least 1")
        yield from find_key_problems(self)


def is_name(name: str) -> bool:
    """Return True if PostgreSQL accepts a text as a name without cutting it."""
    return 0 < len(name.encode()) <= NAME_BYTES and "\x00" not in name
