"""Base class of the sources of database logs, whose rows are change events."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from airflow_kafka_spark.formats.base import Kind
from airflow_kafka_spark.sources.base import FrozenWindow, RowSource
from airflow_kafka_spark.sources.cdc.options import format_topic, parse_table_name
from airflow_kafka_spark.windows.binding import SERVER

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from airflow_kafka_spark.sources.base import SplitReader

log = logging.getLogger(__name__)

COLUMNS = ("topic", "key", "value", "timestamp")
"""The columns of an event."""

WITH_SCHEMA = ("key", "value")
"""The columns whose values carry their schema with ``schemas_enable``."""


class LogWindowPlanner(Protocol):
    """Plans windows of a server's log. The methods have the contracts of the methods of :class:`RowSource` with these names."""

    def freeze(self, position: Mapping[str, Any] | None, *, may_restart: bool = True) -> FrozenWindow:
        """Return the window after ``position``.

        :param may_restart: True (default): with ``when_needed``, a lost log leads to another snapshot. False: it is refused.
        """

    def compute_position_after(
        self, splits: Sequence[Mapping[str, Any]], position: Mapping[str, Any], tokens: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Any]: ...

    def count_bytes_behind(self, position: Mapping[str, Any]) -> int | None: ...

    def make_reader(self, splits: Sequence[Mapping[str, Any]], needed: Sequence[str] | None) -> SplitReader: ...


class LogSource(RowSource):
    """Base class of the sources that read a database's log.

    :ivar schemas_enable: True if keys and values carry their schema.
    :ivar topic_prefix: the beginning of the names of topics.
    :ivar tables: the names of the captured tables; None for all.
    :cvar default_schema: the schema (or database) of names without one; "" if only the connection knows it.
    """

    schemas_enable: bool
    topic_prefix: str
    tables: Sequence[str] | None

    default_schema: ClassVar[str] = ""

    # Tasks compare the identity of the log themselves. Tables may be left out of an open window that cannot be published.
    movable: ClassVar[frozenset[str]] = frozenset({SERVER, "publication", "tables", "topic_prefix"})

    @abstractmethod
    def _make_planner(self) -> LogWindowPlanner:
        """Return the windows of the server that the connection leads to."""

    def find_columns(self) -> tuple[str, ...]:
        """Return ``topic``, ``key``, ``value`` and ``timestamp``."""
        return COLUMNS

    @property
    def named_topics(self) -> frozenset[str]:
        """The topics of the tables in ``tables`` whose schema is known."""
        names = (parse_table_name(name, self.default_schema) for name in self.tables or ())
        return frozenset(format_topic(self.topic_prefix, name) for name in names if name[0])

    @property
    def fixed_kinds(self) -> Mapping[str, Kind]:
        """The kinds of the columns of events."""
        from airflow_kafka_spark.sources.cdc.tasks import reader

        return dict(reader.COLUMNS)

    @property
    def connect_columns(self) -> tuple[str, ...]:
        """``key`` and ``value`` with ``schemas_enable``."""
        return WITH_SCHEMA if self.schemas_enable else ()

    def compute_position_after(
        self, splits: Sequence[Mapping[str, Any]], position: Mapping[str, Any], tokens: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """Return the position after a window, with the tokens of its tasks. See :meth:`RowSource.compute_position_after`."""
        return self._make_planner().compute_position_after(splits, position, tokens)

    def find_final_position(self, position: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the end of the log, if it has no changes behind the last chunks of a snapshot. See
        :meth:`RowSource.find_final_position`."""
        from airflow_kafka_spark.sources.cdc.snapshot import SnapshotState

        if not SnapshotState.from_json(position).is_read:
            return None
        frozen = self._make_planner().freeze(position, may_restart=False)
        if frozen.splits or frozen.remaining:
            return None
        log.info("The snapshot is complete: all its rows are published, and the log has no further change")
        return frozen.position

    def count_bytes_behind(self, position: Mapping[str, Any]) -> int | None:
        """Return the present number of bytes of the log after a window. See :meth:`RowSource.count_bytes_behind`."""
        return self._make_planner().count_bytes_behind(position)

    def read_frame(self, spark: SparkSession, splits: Sequence[Mapping[str, Any]]) -> DataFrame:
        """Return the events of these splits, read by Spark's Python workers; partition ``i`` is split ``i``. Its last row has
        the split's token. See :meth:`RowSource.read_frame`.
        """
        from airflow_kafka_spark.sources.cdc.tasks.reader import SCHEMA
        from airflow_kafka_spark.sources.tasks.read import make_frame

        reader = self._make_planner().make_reader(splits, None) if splits else None
        return make_frame(spark, SCHEMA, reader, len(splits))

    def make_empty_frame(self, spark: SparkSession) -> DataFrame | None:
        """Return a DataFrame without rows that has the columns of :meth:`read_frame`."""
        return self.read_frame(spark, ())

    def make_reader(self, splits: Sequence[Mapping[str, Any]], columns: Sequence[str] | None) -> SplitReader | str:
        """Return the reader with which tasks read these splits. See :meth:`RowSource.make_reader`.

        :raises SourceUnavailable: the server does not answer.
        """
        return self._make_planner().make_reader(splits, columns)
