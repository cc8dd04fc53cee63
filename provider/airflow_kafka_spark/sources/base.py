"""What can be cut into frozen windows of rows: the contract that tables and files keep. (Kafka as a source has offsets.)

The driver calls, in this order: :meth:`RowSource.validate`; :meth:`RowSource.freeze`, once per window, whose answer is written
to the ledger before any work; :meth:`RowSource.frame`, at every attempt, with exactly the splits that were written down.
Partition ``i`` of that DataFrame is split ``i``: each is published in one Kafka transaction, under a name of its own, so that
whoever publishes it second finds that it is there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_kafka_spark.errors import Problem, SourceRejected
from airflow_kafka_spark.formats.base import Kind
from airflow_kafka_spark.windows.binding import Endpoint

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

MAX_SPLITS = 2_000
"""Of one window: its plan has to fit into one record of the ledger."""


@dataclass(frozen=True)
class Frozen:
    """A window of rows, decided once.

    :param splits: per split, what it covers (JSON). The same bounds give the same rows at every attempt, as far as the source
        itself does not change them; no row is in two splits, and no row of the window in none.
    :param position: where the source stands once the window is published (JSON); the next :meth:`RowSource.freeze` is given it.
    :param rows: how many rows were counted, None where counting would cost a pass of its own.
    :param remaining: whether the source held more than this window takes.
    """

    splits: tuple[Mapping[str, Any], ...]
    position: Mapping[str, Any]
    rows: int | None = None
    remaining: bool = False


class SplitReader(ABC):
    """Reads splits inside a Spark task, without Spark: picklable, made by :meth:`RowSource.reader`.

    :ivar columns: names of the columns, and what they hold, in order.
    """

    columns: tuple[tuple[str, Kind], ...]

    @abstractmethod
    def read(self, split: int) -> Iterator[pa.RecordBatch]:
        """The rows of a split, by its place among those the reader was made for: the same that :meth:`RowSource.frame` gives.

        :raises SourceUnavailable: the source does not answer; the split may be read again.
        :raises SourceRejected: it refuses, or holds a value that cannot be published.
        """


class RowSource(ABC):
    """Where rows come from. A frozen dataclass of options; connections are looked up when they are used, never at DAG parse."""

    template_fields: ClassVar[Sequence[str]] = ()

    @property
    @abstractmethod
    def uri(self) -> str:
        """The source without credentials, as ``postgres://host:5432/db/schema/table``. May look up the connection."""

    @property
    def asset_uri(self) -> str:
        """What identifies the source as an Airflow asset. Looks nothing up: it is asked for at DAG parse."""
        return self.uri

    def origin(self) -> Endpoint:
        """What its rows are read from: what tells whether an open window is still read where it was frozen. Without credentials.
        May look up the connection, and ask the server.

        :raises ConnectionInvalid: the connection cannot be used.
        :raises SourceUnavailable: the server cannot be reached.
        :raises SourceRejected: what is to be read is not there.
        """
        return Endpoint({"source": self.uri})

    @property
    def packages(self) -> tuple[str, ...]:
        """Maven coordinates (``group:artifact:version``) that Spark needs to read it; resolved and cached by the hook."""
        return ()

    @property
    def settings(self) -> Mapping[str, str]:
        """Spark SQL settings that decide how the source is read and cut; set on the session while it is read."""
        return {}

    @abstractmethod
    def validate(self) -> list[Problem]:
        """Everything that would keep a window from being frozen and read: options, connection, missing table or column, types
        that cannot be read. Changes nothing, needs no Spark, takes seconds at most. Never raises for what a user can cause;
        ``where`` of its problems begins with ``source``."""

    @abstractmethod
    def columns(self) -> tuple[str, ...] | None:
        """The names of the rows' columns, in order; None where only Spark can tell. Asked once :meth:`validate` found nothing."""

    @abstractmethod
    def freeze(self, position: Mapping[str, Any] | None) -> Frozen:
        """Decide the next window's end and cut it.

        :param position: where the last window ended, None for a pipeline without a past.
        :return: no splits when there is nothing new.
        :raises SourceUnavailable: the source does not answer; the task may be retried.
        :raises SourceRejected: the source is not what the options say, or is no longer what earlier windows read.
        """

    def reader(self, splits: Sequence[Mapping[str, Any]], columns: Sequence[str] | None) -> SplitReader | str:
        """How tasks read these splits by themselves, much faster than through Spark; or why only Spark can, as a clause.

        :param columns: those that are needed, None for all.
        :raises SourceUnavailable: the source does not answer.
        :raises SourceRejected: the splits can no longer be read as they were frozen.
        """
        return "it has no other way"

    def explain(self, error: BaseException) -> SourceRejected | None:
        """What Spark's error while reading says of the source, in words that help: the file, the cause. None: nothing of it."""
        return None

    @abstractmethod
    def frame(self, spark: SparkSession, splits: Sequence[Mapping[str, Any]]) -> DataFrame:
        """The rows of these splits: exactly ``len(splits)`` partitions, in the order given. Nothing is read yet.

        :raises SourceRejected: the splits can no longer be read as they were frozen (a file has changed or is gone).
        """
