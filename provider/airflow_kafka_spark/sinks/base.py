"""What can take a window whole: the contract every sink keeps.

The driver calls, in this order: :meth:`Sink.validate`, :meth:`Sink.applied` (skip if there), :meth:`Sink.begin`; Spark's tasks
call the :class:`SplitWriter` of the :class:`WindowWriter`, perhaps several times for one split; then the driver calls
:meth:`WindowWriter.commit`. Until ``commit`` returns, a reader of the sink sees nothing of the window; afterwards all of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.windows.binding import Endpoint
from airflow_kafka_spark.windows.model import Applied, BadRecord, Split, SplitResult, Window

if TYPE_CHECKING:
    import pyarrow as pa
    from typing_extensions import Self


class Guarantee(str, Enum):
    """What a reader of the sink may rely on."""

    EXACTLY_ONCE = "exactly-once"
    """No record of a window twice, none missing, and the window is seen whole or not at all."""

    EXACTLY_ONCE_PER_SPLIT = "exactly-once, split by split"
    """No record twice, none missing; while the window is being written a reader may see some of its splits."""

    AT_LEAST_ONCE = "at-least-once"
    """Records may be seen twice after a failure."""

    @property
    def by_split(self) -> bool:
        """Whether splits are committed one by one: some of a window may be there although it fails."""
        return self is Guarantee.EXACTLY_ONCE_PER_SPLIT


@dataclass(frozen=True)
class Shape:
    """What flows into a sink: known before anything is read.

    :param pipeline: the pipeline's name.
    :param schema: the Arrow schema of the rows, in column order: the value's columns, then the key's, then metadata columns.
    :param has_tombstones: True when records without a value arrive as tombstones (see :class:`Rows`).
    :param tolerates: True when the sink may leave rows out that it refuses, and is to tell which (:meth:`WindowWriter.refused`).
    """

    pipeline: str
    schema: pa.Schema
    has_tombstones: bool = False
    tolerates: bool = False


@dataclass(frozen=True)
class Rows:
    """A batch of one split on its way into the sink, in offset order.

    :param batch: the rows; its schema is the :class:`Shape`'s.
    :param offsets: each row's Kafka offset (int64, ascending); topic and partition are the split's.
    :param tombstones: None when there are none in this batch, else a boolean per row: True = the record has no value, so only
        the key's columns and the metadata columns are set.
    """

    batch: pa.RecordBatch
    offsets: pa.Int64Array
    tombstones: pa.BooleanArray | None = None

    def filter(self, kept: pa.BooleanArray) -> Rows:
        """Some of them."""
        tombstones = self.tombstones.filter(kept) if self.tombstones is not None else None
        return Rows(self.batch.filter(kept), self.offsets.filter(kept), tombstones)


class SplitWriter(ABC):
    """Writes one split inside a Spark task. Made by :class:`WindowWriter`, pickled, opened in the task.

    The same split may be written by several tasks, also at once (retry, speculation, a zombie job): each writes a place of its
    own, or the second yields to the first.
    """

    @abstractmethod
    def open(self, split: Split) -> None:
        """Begin one split. Called once per task attempt, before the first :meth:`write`."""

    def refusals(self, rows: Rows) -> Mapping[int, str]:
        """Rows that cannot be written whatever the target says: where in the batch they are, and why. Asked before
        :meth:`write`, which then gets the others, where bad records are tolerated."""
        return {}

    def put_off(self) -> None:  # noqa: B027
        """Some of the split's records are not for this sink, and it is not decided yet what becomes of them. A writer that would
        commit the split by itself leaves that to the driver now (:meth:`WindowWriter.put_off`). May be called again."""

    @abstractmethod
    def write(self, rows: Rows) -> None:
        """Take the next rows of the split."""

    @abstractmethod
    def close(self) -> Mapping[str, Any]:
        """Flush: when this returns, the split's rows are durable, though not yet visible.

        :return: what :meth:`WindowWriter.commit` needs to know of them (JSON), among it ``rows``: how many the sink counted.
        """

    @abstractmethod
    def abort(self) -> None:
        """Leave nothing behind of this split; called instead of :meth:`close`, never raises."""


class WindowWriter(ABC):
    """One attempt at writing one window, on the driver: a context manager.

    Leaving it without :meth:`commit` discards everything.
    """

    @abstractmethod
    def split_writer(self) -> SplitWriter:
        """A picklable writer for the tasks. May hold passwords; never has them in its repr."""

    def put_off(self, results: Sequence[SplitResult]) -> Sequence[Split]:
        """Splits that could not be written as the others were, since the sink refuses some of their rows, or
        :meth:`SplitWriter.put_off` was called, of a :class:`Shape` that tolerates it: asked once, as soon as all are read. They
        are read once more, for a :meth:`split_writer` that is asked for after this, and what is told of them then counts.

        :param results: as for :meth:`commit`.
        """
        return ()

    def refused(self, results: Sequence[SplitResult]) -> Sequence[BadRecord]:
        """The records that the sink refuses, of a :class:`Shape` that tolerates it: asked once, before it is decided what becomes
        of bad records. They are not among what :meth:`commit` makes visible.

        :param results: as for :meth:`commit`.
        """
        return ()

    @abstractmethod
    def commit(self, results: Sequence[SplitResult]) -> Applied:
        """Make the window visible, together with the sink's own record of it, in one atomic step.

        If another attempt was faster, that window is left as it is and what it wrote is returned.

        :param results: one result per split of the window, in the order of their indexes, none rejected.
        :raises WindowConflict: the sink's last window of this pipeline is not the one this window follows.
        :raises ForeignOffsets: it is of another cluster.
        """

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class Sink(ABC):
    """Where windows go. A frozen dataclass of options; connections are looked up when they are used, never at DAG parse."""

    template_fields: ClassVar[Sequence[str]] = ()
    takes_tombstones: bool = False
    """True when a record without a value is a delete for this sink."""
    split_records: int = 1_000_000
    """Offsets per split, about, where nobody says otherwise."""
    whole_partitions: bool = False
    """True when each partition of a window has to be one split: splits are taken one by one, and the order of records counts."""

    @property
    @abstractmethod
    def guarantee(self) -> Guarantee:
        """What this sink promises with these options."""

    @property
    @abstractmethod
    def uri(self) -> str:
        """The target without credentials, as ``postgres://host:5432/db/schema/table``. May look up the connection."""

    @property
    def asset_uri(self) -> str:
        """What identifies the target as an Airflow asset. Looks nothing up: it is asked for at DAG parse."""
        return self.uri

    def destination(self) -> Endpoint:
        """Where its rows, and its own record of windows, land: what tells whether an open window still goes where it was planned
        to go. Without credentials. May look up the connection, and ask the server.

        :raises ConnectionInvalid: the connection cannot be used.
        :raises SinkUnavailable: the server cannot be reached.
        """
        return Endpoint({"sink": self.uri})

    @abstractmethod
    def validate(self, shape: Shape) -> list[Problem]:
        """Everything that would keep a window of this shape from being written: missing table, types that do not fit, no right to
        write. Changes nothing, needs no Spark, takes seconds at most. Returns an empty list when all is well; never raises for
        what a user can cause."""

    def replay_problems(self) -> list[Problem]:
        """Why this sink, with these options and where it is, cannot replace the rows of a window it has taken, as a replay does.
        Asked before a replay is planned, and before one that is open is taken up again. Leaves everything as it is."""
        return [Problem("on_rerun", "this sink cannot replace what it has taken", 'Set `on_rerun="skip"`')]

    def unordered_problems(self) -> list[Problem]:
        """Why windows that are taken in any order, as intervals may be, would not leave what they leave in theirs."""
        return []

    @abstractmethod
    def last_applied(self, pipeline: str) -> Applied | None:
        """The newest window of this pipeline the sink remembers, with the ids of its cluster and topics: where a pipeline goes on
        when its ledger is lost, if these are still the same."""

    @abstractmethod
    def applied(self, window: Window) -> Applied | None:
        """The sink's record of exactly this window, or None; of a replay, once that has been taken.

        :raises ForeignOffsets: a window of this number is there, of another cluster or of another topic of the same name.
        :raises WindowConflict: a window of this number is there, but of other offsets.
        """

    @abstractmethod
    def begin(self, window: Window, splits: Sequence[Split], shape: Shape) -> WindowWriter:
        """An attempt at this window. Leftovers of earlier attempts at it are cleared away, and earlier attempts that still live
        can no longer commit something else than this window."""
