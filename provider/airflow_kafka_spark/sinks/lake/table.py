"""A table of a lake as it was loaded once: what sink and writer ask of it, whatever its format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from airflow_kafka_spark.windows.model import Applied, Window

if TYPE_CHECKING:
    from airflow_kafka_spark.sinks.lake.tasks.upsert import TableFile, Upsert

REPLACED = "its rows in the files that it was written to, or in a `window_column`, which a replay replaces"
"""Text for messages: the files or the column that a replay needs."""


class TableRecord(Protocol):
    """The record of a window in a table."""

    @property
    def applied(self) -> Applied: ...


RecordT = TypeVar("RecordT", bound=TableRecord)
FileT = TypeVar("FileT")


class LoadedTable(ABC, Generic[RecordT, FileT]):
    """The table as it was loaded once. Nothing that was committed since shows in it."""

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

    @abstractmethod
    def newest(self, pipeline: str) -> RecordT | None:
        """Return the record of the window with the highest number.

        :raises WindowConflict: the table has the window's rows, but no record of it.
        :raises SinkUnavailable: the store did not answer.
        """

    @abstractmethod
    def files_of(self, window: Window, found: RecordT) -> Sequence[FileT]:
        """Return the files of a window that a replay removes.

        :param found: the record of the window.
        :raises WindowConflict: others have rewritten them, so that the window's rows are no longer in files of their own.
        """

    @abstractmethod
    def files_with(self, upsert: Upsert) -> Iterable[TableFile]:
        """Return the files that may hold a key of an upsert, by their partition values and statistics."""

    @abstractmethod
    def flush(self) -> None:
        """Make the commits durable that the table shows.

        :raises SinkUnavailable: the store did not answer.
        """

    def names_window(self, window: Window, column: str | None) -> bool:
        """Return True if a row has the name of a window in a column."""
        from airflow_kafka_spark.sinks.lake.tasks.upsert import Upsert

        if not column or column not in self.columns:
            return False
        deletion = Upsert.deletion(window, column)
        return deletion.is_met(self.files_with(deletion))
