"""The base of the sinks of lake tables: what a table's own record of windows answers."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from airflow_kafka_spark.errors import Problem, WindowConflict
from airflow_kafka_spark.sinks.base import Guarantee, KeyedSink, rewritten_window, unknown_window
from airflow_kafka_spark.sinks.lake.options import LakeSinkOptions
from airflow_kafka_spark.sinks.lake.table import LoadedTable
from airflow_kafka_spark.windows.continuity import refuse_other
from airflow_kafka_spark.windows.model import Applied, Window


@dataclass(frozen=True)
class LakeSink(LakeSinkOptions, KeyedSink):
    """A sink whose windows are commits of a table: one commit has the rows of a window and its record."""

    @property
    def guarantee(self) -> Guarantee:
        """Exactly-once."""
        return Guarantee.EXACTLY_ONCE

    @abstractmethod
    def look(self, doing: str) -> AbstractContextManager[LoadedTable[Any, Any] | None]:
        """Return the table as it is now; None if there is no table. Leaving it closes its connections.

        :param doing: for messages.
        :raises SinkUnavailable: catalog or store did not answer.
        """

    def window_replay_problems(self, replay: Window) -> list[Problem]:
        """Return a problem if the table has no record of the window, or if others have rewritten its files, and no row names the
        window in ``window_column``. An upsert finds the rows by their keys."""
        if self.upserts:
            return []
        with self.look(f"looking for window {replay}") as table:
            if table is None:
                return [unknown_window(replay, self.uri)]
            try:
                found = table.find(replay.pipeline, replay.number)
                if found is None:
                    return [] if table.names_window(replay, self.window_column) else [unknown_window(replay, self.uri)]
                if found.applied.replay < replay.replay:
                    table.files_of(replay, found)
            except WindowConflict as error:
                return [] if table.names_window(replay, self.window_column) else [rewritten_window(error)]
        return []

    def last_applied(self, pipeline: str) -> Applied | None:
        """Return the window of the pipeline with the highest number that the table's record has.

        :raises WindowConflict: the record is missing, or cannot be understood.
        """
        with self.look("looking for the last window") as table:
            newest = table.newest(pipeline) if table is not None else None
        return newest.applied if newest is not None else None

    def applied(self, window: Window) -> Applied | None:
        """Return the record of the window, or None if it is not committed. The commit is durable when this returns.

        :raises ForeignOffsets: a window of this number is there, of another cluster or of another topic of the same name.
        :raises WindowConflict: a window of this number is there, but of other offsets.
        """
        with self.look(f"looking for window {window}") as table:
            found = table.find(window.pipeline, window.number) if table is not None else None
            if table is None or found is None:
                return None
            refuse_other(found.applied, window, self.uri)
            if found.applied.replay < window.replay:
                return None
            # The attempt may have died before its commit was durable, and the caller commits Kafka's offsets past it.
            table.flush()
            return found.applied
