"""The options of JdbcSource, and the checks of them that need no server."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal, get_args
from zoneinfo import ZoneInfo

from airflow_kafka_spark.arguments import as_names
from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.errors.base import quote_names
from airflow_kafka_spark.hooks.databases import parse_name
from airflow_kafka_spark.sources.base import find_count_problems, find_lag_problems, find_seconds_problems

if TYPE_CHECKING:
    from airflow_kafka_spark.sources.jdbc.database import ReadLimits

ReadMode = Literal["bulk", "incrementing", "timestamp", "timestamp+incrementing"]
SplitBy = Literal["key", "pages"]


@dataclass(frozen=True)
class JdbcSourceOptions:
    """The arguments of :class:`~airflow_kafka_spark.sources.jdbc.source.JdbcSource`, which documents them."""

    conn_id: str
    table: str | None = None
    query: str | None = None
    mode: ReadMode | None = None
    cursor: str | None = None
    incrementing_column: str | None = None
    timestamp_column: str | None = None
    delay: float = 0.0
    db_timezone: str = "UTC"
    validate_non_null: bool = True
    key: Sequence[str] = ()
    split_by: SplitBy = "key"
    include_columns: Sequence[str] | None = None
    split_records: int = 250_000
    max_records: int | None = None
    writers_timeout: float = 60.0
    fetchsize: int = 10_000
    max_sessions: int | None = None
    max_replica_lag: float | None = None

    def __post_init__(self) -> None:
        for name in ("key", "include_columns"):
            object.__setattr__(self, name, as_names(getattr(self, name)))

    # --- derived values ---

    @property
    def effective_mode(self) -> ReadMode:
        """``mode``, or the mode that the given columns imply."""
        if self.mode is not None:
            return self.mode
        if self.timestamp_column:
            return "timestamp+incrementing" if self.incrementing else "timestamp"
        return "incrementing" if self.incrementing else "bulk"

    @property
    def incrementing(self) -> str | None:
        """The incrementing column, given as ``incrementing_column`` or as ``cursor``."""
        return self.incrementing_column or self.cursor

    @property
    def cursor_columns(self) -> tuple[str, ...]:
        """The columns whose values define the end of a window; none for ``bulk``."""
        columns = {"timestamp": self.timestamp_column, "incrementing": self.incrementing}
        return tuple(columns[part] or "" for part in self.effective_mode.split("+") if part in columns)

    @property
    def waits_for_writers(self) -> bool:
        """True if transactions that are writing the table are waited for when a window is frozen."""
        return self.effective_mode != "bulk" and self.writers_timeout > 0

    @property
    def cursor_options(self) -> tuple[tuple[str, str, str | None], ...]:
        """Per part of a mode that needs a cursor: the part, the option that names its column, and that column."""
        return (
            ("timestamp", "timestamp_column", self.timestamp_column),
            ("incrementing", "incrementing_column" if self.incrementing_column else "cursor", self.incrementing),
        )

    @property
    def limits(self) -> ReadLimits:
        """The conditions under which a session of a task may read."""
        from airflow_kafka_spark.sources.jdbc.database import ReadLimits

        return ReadLimits(self.max_sessions, self.max_replica_lag)

    @property
    def name(self) -> str:
        """``schema.table`` as given, or a name for the query, made from its text."""
        if self.query is not None:
            return f"query-{hashlib.sha256(self.query.encode()).hexdigest()[:12]}"
        return self.table or ""

    # --- validation ---

    def find_option_problems(self) -> list[Problem]:
        """Return the problems of the options, without asking the server."""
        return list(
            chain(self.find_relation_problems(), self._find_mode_problems(), self._list_problems(), self._find_number_problems())
        )

    def find_relation_problems(self) -> Iterator[Problem]:
        """Yield the problems of ``table`` and ``query``."""
        if (self.table is None) == (self.query is None):
            given = "both are given" if self.table is not None else "neither is given"
            yield Problem("source", f"{given}; expected either `table` or `query`", "Name a table, or write a query")
        elif self.query is not None and not self.query.strip().rstrip(";"):
            yield Problem("source.query", "it is empty; expected a SELECT")
        elif self.table is not None:
            try:
                parse_name(self.table)
            except ValueError as error:
                yield Problem("source.table", str(error), 'Write `table`, `schema.table` or `"My schema"."my.table"`')

    def _find_mode_problems(self) -> Iterator[Problem]:
        mode = self.effective_mode
        if mode not in get_args(ReadMode):
            yield Problem("source.mode", f"it is {mode!r}; expected one of {', '.join(get_args(ReadMode))}")
            return
        if self.cursor and self.incrementing_column and self.cursor != self.incrementing_column:
            what = f"it is `{self.cursor}`, and `incrementing_column` is `{self.incrementing_column}`; both are the same option"
            yield Problem("source.cursor", what, "Leave one of them out")
        for part, option, value in self.cursor_options:
            if part in mode.split("+") and not value:
                yield Problem(f"source.{option}", f'it is empty; `mode="{mode}"` needs it')
            if part not in mode.split("+") and value:
                yield Problem(f"source.{option}", f'it is `{value}`, which means nothing with `mode="{mode}"`', "Leave it out")
        if self.timestamp_column and self.timestamp_column == self.incrementing:
            what = f"`{self.timestamp_column}` is the incrementing column too"
            yield Problem("source.timestamp_column", what, "Name another column, or leave one of them out")
        if self.key and "incrementing" in mode:
            yield Problem("source.key", f'rows are cut by the cursor with `mode="{mode}"`', "Leave it out")
        yield from self._find_split_by_problems()
        if self.delay and "timestamp" not in mode:
            yield Problem(
                "source.delay", f'it means nothing with `mode="{mode}"`; expected a timestamp to wait for', "Leave it out"
            )

    def _find_split_by_problems(self) -> Iterator[Problem]:
        if self.split_by not in get_args(SplitBy):
            yield Problem("source.split_by", f"it is {self.split_by!r}; expected one of {', '.join(get_args(SplitBy))}")
        if self.split_by != "pages":
            return
        if self.effective_mode != "bulk":
            yield Problem(
                "source.split_by", f'it is `pages`, and `mode="{self.effective_mode}"`; expected `bulk`', "Leave it out"
            )
        if self.query is not None:
            yield Problem("source.split_by", "it is `pages`, and a query has no pages; expected `table`", "Leave it out")
        if self.key:
            yield Problem("source.key", 'it means nothing with `split_by="pages"`', "Leave it out")

    def _list_problems(self) -> Iterator[Problem]:
        for option, names in (("key", self.key), ("include_columns", self.include_columns or ())):
            twice = sorted({str(name) for name in names if list(names).count(name) > 1})
            if twice:
                yield Problem(f"source.{option}", f"it names {quote_names(twice)} twice")
        if self.include_columns is not None and not self.include_columns:
            yield Problem("source.include_columns", "it is empty; expected columns, or None for all")
        try:
            ZoneInfo(self.db_timezone)
        except (ValueError, OSError, KeyError, TypeError):
            yield Problem("source.db_timezone", f"{self.db_timezone!r} is not a time zone; expected one as `Europe/Berlin`")

    def _find_number_problems(self) -> Iterator[Problem]:
        counts = {"split_records": self.split_records, "fetchsize": self.fetchsize}
        limits = {"max_records": self.max_records, "max_sessions": self.max_sessions}
        given = {**counts, **{option: limit for option, limit in limits.items() if limit is not None}}
        yield from find_count_problems({option: (count, 1) for option, count in given.items()})
        yield from find_seconds_problems({"delay": self.delay, "writers_timeout": self.writers_timeout})
        yield from find_lag_problems(self.max_replica_lag)
