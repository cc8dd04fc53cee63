"""The contract of a source of rows (tables, files). A window of rows is frozen once, and every attempt reads equal rows.

The driver calls, in this order: :meth:`RowSource.validate`; :meth:`RowSource.freeze` once per window, whose result is written to
the ledger before any work; :meth:`RowSource.read_frame` at every attempt, with exactly the splits in the ledger. Partition ``i``
of that DataFrame is split ``i``. Each split is published in one Kafka transaction, under its own transactional id, so that a
second attempt finds that it is published.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_kafka_spark.arguments import OptionsType
from airflow_kafka_spark.errors import Problem, SourceRejected
from airflow_kafka_spark.formats.base import Kind
from airflow_kafka_spark.windows.binding import SERVER, Endpoint

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from airflow_kafka_spark.windows.model import RowsAhead

MAX_SPLITS = 2_000
"""Maximum number of splits of a window, because its plan has to fit into one record of the ledger."""


def find_seconds_problems(options: Mapping[str, object]) -> Iterator[Problem]:
    """Yield the options of a source that are not a number of seconds, at least 0.

    :param options: the values, by the name of the option.
    """
    for name, seconds in options.items():
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e9:
            yield Problem(f"source.{name}", f"it is {seconds!r}; expected seconds, at least 0")


def find_count_problems(counts: Mapping[str, tuple[object, int]]) -> Iterator[Problem]:
    """Yield the options of a source that are not whole numbers, or are too small.

    :param counts: the value, and the smallest one that is accepted, by the name of the option.
    """
    for name, (count, least) in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            yield Problem(f"source.{name}", f"it is {count!r}; expected a whole number of at least {least:,}")


def find_lag_problems(lag: object) -> Iterator[Problem]:
    """Yield the problem of the option ``max_replica_lag``, which may be None."""
    return find_seconds_problems({} if lag is None else {"max_replica_lag": lag})


@dataclass(frozen=True)
class FrozenWindow:
    """A window of rows, which is decided once.

    :param splits: per split, its bounds (JSON). Unless the source's rows change, the same bounds give the same rows at every
        attempt. Each row of the window is in exactly one split.
    :param position: the source's position once the window is published (JSON), for the next :meth:`RowSource.freeze`.
    :param rows: the number of rows; None if they would have to be counted in a separate pass.
    :param remaining: True if the source held more rows than this window takes.
    :param ahead: the rows that wait because of their timestamps; None without any.
    """

    splits: tuple[Mapping[str, Any], ...]
    position: Mapping[str, Any]
    rows: int | None = None
    remaining: bool = False
    ahead: RowsAhead | None = None


class SplitReader(ABC):
    """Reads splits inside a Spark task, without Spark. Picklable; made by :meth:`RowSource.make_reader`.

    :ivar columns: names of the columns and the kinds of their values, in order.
    """

    columns: tuple[tuple[str, Kind], ...]

    @abstractmethod
    def read(self, split: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a split: those of its partition of :meth:`RowSource.read_frame`.

        :param split: the index of the split among those that the reader was made for.
        :raises SourceUnavailable: the source does not answer; the split may be read again.
        :raises SourceRejected: the source refuses, or holds a value that cannot be published.
        """

    def get_token(self, split: int) -> Mapping[str, Any]:
        """Return the facts about a split that was read which :meth:`RowSource.compute_position_after` needs (JSON).

        The token is part of the split's marker, so it is the token of the task whose rows are published. Called once :meth:`read`
        is exhausted. Default: nothing.

        :param split: the index of the split, as for :meth:`read`.
        """
        return {}


class RowSource(metaclass=OptionsType):
    """A source of rows: a frozen dataclass of options. Connections are looked up when they are used, never at DAG parse."""

    template_fields: ClassVar[Sequence[str]] = ()
    movable: ClassVar[frozenset[str]] = frozenset({SERVER})
    """Facts of :meth:`find_origin` that a ``rebind`` may change while a window is open: the splits of the window are parts of the
    same rows afterwards. Default: the address of the server."""
    used_by: ClassVar[str] = "SourceToKafkaOperator"
    """The operators that take it, for messages."""

    @property
    @abstractmethod
    def uri(self) -> str:
        """The source without credentials, as ``postgres://host:5432/db/schema/table``. May look up the connection."""

    @property
    def asset_uri(self) -> str:
        """The URI of the source as an Airflow asset. Read at DAG parse, so it must not look up the connection."""
        return self.uri

    def find_origin(self) -> Endpoint:
        """Return the location from which rows are read, without credentials. An open window is read only from the location where
        it was frozen.

        May look up the connection, and ask the server.

        :raises ConnectionInvalid: the connection cannot be used.
        :raises SourceUnavailable: the server cannot be reached.
        :raises SourceRejected: the table or directory does not exist.
        """
        return Endpoint({"source": self.uri})

    def get_exclusive_object(self, origin: Endpoint) -> str:
        """Return the name of the object that only one pipeline may read, because reading advances it (a replication slot). Empty
        (default): any number of pipelines may read the source.

        :param origin: the result of :meth:`find_origin`.
        """
        return ""

    @property
    def fixed_kinds(self) -> Mapping[str, Kind]:
        """The kinds of the columns, by name, if they do not depend on a table; empty (default) if they do."""
        return {}

    @property
    def may_be_unreadable(self) -> bool:
        """True if a row may be bad before it is changed or written: see :meth:`read_frame`."""
        return False

    @property
    def packages(self) -> tuple[str, ...]:
        """Maven coordinates (``group:artifact:version``) that Spark needs to read it; resolved and cached by the hook."""
        return ()

    @property
    def settings(self) -> Mapping[str, str]:
        """Spark SQL settings that decide how the source is read and split; set on the session while it is read."""
        return {}

    @abstractmethod
    def validate(self) -> list[Problem]:
        """Return all problems that would prevent a window from being frozen and read: of options and connection, a missing table
        or column, types that cannot be read.

        Changes nothing, needs no Spark, and takes seconds at most. Never raises for an error that a user can cause. ``where`` of
        each problem begins with ``source``.
        """

    @abstractmethod
    def find_columns(self) -> tuple[str, ...] | None:
        """Return the names of the rows' columns, in order; None if only Spark can find them.

        Called only if :meth:`validate` has found nothing.
        """

    @abstractmethod
    def freeze(self, position: Mapping[str, Any] | None) -> FrozenWindow:
        """Decide the next window's end, and its splits.

        :param position: of the last window's :class:`FrozenWindow`, None for the first window of a pipeline.
        :return: a window without splits if there is nothing new.
        :raises SourceUnavailable: the source does not answer; the task may be retried.
        :raises SourceRejected: the source does not fit the options, or the position of earlier windows.
        """

    @property
    def connect_columns(self) -> tuple[str, ...]:
        """The columns whose values carry their schema, as Connect's JSON converter writes them; default none."""
        return ()

    def compute_position_after(
        self, splits: Sequence[Mapping[str, Any]], position: Mapping[str, Any], tokens: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """Return the source's position after a window whose splits are published; default: the frozen position.

        Also called for a window that was given up (``skip``), before the next one is frozen.

        :param splits: of the window.
        :param position: of the window's :class:`FrozenWindow`.
        :param tokens: per split, its reader's token (:meth:`SplitReader.get_token`). For a split that was given up unpublished,
            ``if_given_up`` of its bounds; by default nothing.
        """
        return position

    def find_final_position(self, position: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the position at which the source ends, if it holds no row after a window whose splits are published; None
        (default) if it may hold some.

        The published window then ends at this position, so that no further run is needed to learn that nothing is left. Called
        before the window is complete, only if more rows were expected behind it when it was frozen.

        :param position: behind the published window, from :meth:`compute_position_after`.
        :raises SourceUnavailable: the source does not answer.
        :raises SourceRejected: the source does not fit the options, or the position.
        """
        return None

    def check_published(self, splits: Sequence[Mapping[str, Any]], position: Mapping[str, Any]) -> None:  # noqa: B027
        """Make sure that the published splits of a window have the rows that the source promises; nothing by default. Called
        before the window is complete.

        :param splits: of the window.
        :param position: of the window's :class:`FrozenWindow`.
        :raises SourceUnavailable: the source does not answer.
        :raises SourceRejected: rows may be published twice, or not at all.
        """

    def count_bytes_behind(self, position: Mapping[str, Any]) -> int | None:
        """Return the present number of bytes of the source's log after a window; None (default) if the source is not a log.

        :param position: of the window.
        :raises SourceUnavailable: the source does not answer.
        :raises SourceRejected: the source no longer has the log after the window, or is another one.
        """
        return None

    def finish_window(self, position: Mapping[str, Any]) -> None:  # noqa: B027
        """Do the work of the source that follows a complete window; nothing by default. Called when the ledger says COMPLETE.

        This call is missing if the attempt dies just before it, so :meth:`freeze` has to do the same work. Never raises.

        :param position: of the window.
        """

    def make_empty_frame(self, spark: SparkSession) -> DataFrame | None:
        """Return a DataFrame without rows that has the columns of :meth:`read_frame`; None (default) if only splits show them.

        Called only if :meth:`validate` has found nothing.

        :raises SourceUnavailable: the source does not answer.
        """
        return None

    def make_reader(self, splits: Sequence[Mapping[str, Any]], columns: Sequence[str] | None) -> SplitReader | str:
        """Return the reader with which tasks read these splits by themselves, much faster than through Spark; or the reason why
        only Spark can read them, as a clause.

        :param columns: the needed columns, None for all.
        :raises SourceUnavailable: the source does not answer.
        :raises SourceRejected: the splits can no longer be read as they were frozen.
        """
        return "it has no other way"

    def explain(self, error: BaseException) -> SourceRejected | None:
        """Return the file and the cause of an error that Spark has raised while reading; None if it does not concern the
        source."""
        return None

    @abstractmethod
    def read_frame(self, spark: SparkSession, splits: Sequence[Mapping[str, Any]]) -> DataFrame:
        """Return the rows of these splits, in exactly ``len(splits)`` partitions, in the given order. Nothing is read yet.

        A source for which Spark has no reader uses :func:`~airflow_kafka_spark.sources.tasks.read.make_frame`.

        If the frame has the column :data:`~airflow_kafka_spark.formats.base.END`, the last row of each partition is
        no row of the source: it has the split's result with its token (``windows/codec.py``), or an error. If it has the column
        :data:`~airflow_kafka_spark.formats.base.ERROR`, the rows in which that is not null are bad.

        :raises SourceRejected: the splits can no longer be read as they were frozen (a file has changed or is gone).
        """
