"""The base of the sinks of lake tables, and a table as it was loaded once: the answers that its own record of windows gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from airflow_kafka_spark.errors import Problem, WindowConflict
from airflow_kafka_spark.sinks.base import (
    OFFSET_COLUMNS,
    Guarantee,
    KeyedSink,
    make_rewritten_window_problem,
    make_unknown_window_problem,
)
from airflow_kafka_spark.sinks.lake.options import LakeSinkOptions
from airflow_kafka_spark.windows.continuity import refuse_other
from airflow_kafka_spark.windows.model import Applied, Window

if TYPE_CHECKING:
    from airflow_kafka_spark.sinks.lake.tasks.rewrite import TableFile, Upsert


REPLACED = "its rows in the files that it was written to, or in a `window_column`, which a replay replaces"
"""Text for messages: the files or the column that a replay needs."""


class TableRecord(Protocol):
    """The record of a window in a table."""

    @property
    def applied(self) -> Applied: ...


RecordT = TypeVar("RecordT", bound=TableRecord)
LoadedFileT = TypeVar("LoadedFileT")


class LoadedTable(ABC, Generic[RecordT, LoadedFileT]):
    """The table as it was loaded once, without later commits."""

    @property
    @abstractmethod
    def columns(self) -> Sequence[str]:
        """The names of its columns."""

    @abstractmethod
    def find(self, pipeline: str, number: int) -> RecordT | None:
        """Return the record of the newest replay of a window; None if it is not applied, or if its record has expired.

        :raises WindowConflict: the record cannot be understood.
        :raises SinkUnavailable: the store did not answer.
        """

    def find_window(self, window: Window) -> RecordT | None:
        """Return the record of a window in this target, as :meth:`find`. If a ``rebind`` has given it this target, a record of
        the earlier target does not count, although one table may have both."""
        return self.find(window.pipeline, window.number)

    @abstractmethod
    def find_newest(self, pipeline: str) -> RecordT | None:
        """Return the record of the window with the highest number.

        :raises WindowConflict: the table has the window's rows, but no record of it.
        :raises SinkUnavailable: the store did not answer.
        """

    @abstractmethod
    def list_windows(self) -> Iterator[Applied]:
        """Yield the windows of all pipelines that the table's commits name, the newest commit first, as far as they are kept.

        :raises WindowConflict: a record cannot be understood.
        :raises SinkUnavailable: the store did not answer.
        """

    @abstractmethod
    def list_files_of(self, window: Window, found: RecordT) -> Sequence[LoadedFileT]:
        """Return the files of a window that a replay removes.

        :param found: the record of the window.
        :raises WindowConflict: others have rewritten them, so that files hold the window's rows together with other rows.
        """

    @abstractmethod
    def find_files_with(self, upsert: Upsert) -> Iterable[TableFile]:
        """Return the files that may hold a key of an upsert, by their partition values and statistics."""

    @abstractmethod
    def flush(self) -> None:
        """Make the commits durable that the table shows.

        :raises SinkUnavailable: the store did not answer.
        """

    def names_window(self, window: Window, column: str | None) -> bool:
        """Return True if a row has the name of a window in a column."""
        return bool(column) and self.has_row(window, str(column), str(window))

    def has_row(self, window: Window, column: str, text: str) -> bool:
        """Return True if a row has a text in a column.

        :param window: the window, for messages.
        """
        from airflow_kafka_spark.sinks.lake.tasks.rewrite import Upsert

        if column not in self.columns:
            return False
        deletion = Upsert.make_deletion(window, column, text)
        return deletion.is_met(self.find_files_with(deletion))


@dataclass(frozen=True)
class LakeSink(LakeSinkOptions, KeyedSink):
    """A sink whose windows are commits of a table: one commit has the rows of a window and its record."""

    @property
    def guarantee(self) -> Guarantee:
        """Exactly-once."""
        return Guarantee.EXACTLY_ONCE

    @abstractmethod
    def load_table(self, doing: str) -> AbstractContextManager[LoadedTable[Any, Any] | None]:
        """Return the table as it is now; None if there is no table. Leaving it closes its connections.

        :param doing: for messages.
        :raises SinkUnavailable: catalog or store did not answer.
        """

    def find_window_replay_problems(self, replay: Window) -> list[Problem]:
        """Return a problem if the table has no record of the window, or if others have rewritten its files, and no row names the
        window in ``window_column``. An upsert finds the rows by their keys."""
        if self.upserts:
            return []
        with self.load_table(f"looking for window {replay}") as table:
            if table is None:
                return [make_unknown_window_problem(replay, self.uri)]
            try:
                found = table.find_window(replay)
                if found is None:
                    return (
                        [] if table.names_window(replay, self.window_column) else [make_unknown_window_problem(replay, self.uri)]
                    )
                if found.applied.replay < replay.replay:
                    table.list_files_of(replay, found)
            except WindowConflict as error:
                return [] if table.names_window(replay, self.window_column) else [make_rewritten_window_problem(error)]
        return []

    def find_topics_in_rows(self, window: Window, topics: Collection[str]) -> list[str]:
        """Return the topics that rows name in the column for topics, if ``offset_columns`` is set."""
        if not (self.upserts and self.offset_columns):
            return []
        with self.load_table(f"looking for rows of {', '.join(sorted(topics))}") as table:
            column = OFFSET_COLUMNS[0]
            return [topic for topic in sorted(topics) if table is not None and table.has_row(window, column, topic)]

    def find_last_windows(self, topics: Collection[str]) -> Mapping[str, Applied]:
        """Return the window of each of some topics that any pipeline has committed last, if ``offset_columns`` is set."""
        if not (self.upserts and self.offset_columns and topics):
            return {}
        found: dict[str, Applied] = {}
        with self.load_table(f"looking for windows of {', '.join(sorted(topics))}") as table:
            for applied in table.list_windows() if table is not None else ():
                found |= dict.fromkeys((applied.topic_ids.keys() & topics) - found.keys(), applied)
                if len(found) == len(topics):
                    break
        return found

    def find_last_applied(self, pipeline: str) -> Applied | None:
        """Return the window of the pipeline with the highest number that the table's record has.

        :raises WindowConflict: the record is missing, or cannot be understood.
        """
        with self.load_table("looking for the last window") as table:
            newest = table.find_newest(pipeline) if table is not None else None
        return newest.applied if newest is not None else None

    def find_applied(self, window: Window) -> Applied | None:
        """Return the record of the window, or None if it is not committed. The commit is durable when this returns.

        :raises ForeignOffsets: a window of this number is there, of another cluster or of another topic of the same name.
        :raises WindowConflict: a window of this number is there, but of other offsets.
        """
        with self.load_table(f"looking for window {window}") as table:
            found = table.find_window(window) if table is not None else None
            if table is None or found is None:
                return None
            refuse_other(found.applied, window, self.uri)
            if found.applied.replay < window.replay:
                return None
            # The attempt may have died before its commit was durable, and the caller commits Kafka's offsets past it.
            table.flush()
            return found.applied
