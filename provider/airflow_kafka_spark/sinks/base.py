"""The contract of sinks, which write windows.

The driver calls :meth:`Sink.validate`, :meth:`Sink.find_applied` (if the window is there already, the rest is skipped) and
:meth:`Sink.begin`, in this order. Spark's tasks then call the :class:`SplitWriter` of the :class:`WindowWriter`, perhaps several
times for one split. At last the driver calls :meth:`WindowWriter.commit`. Until ``commit`` returns, a reader of the sink sees
nothing of the window; afterwards all of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from airflow_kafka_spark.arguments import OptionsType
from airflow_kafka_spark.errors import KafkaSparkError, Problem, SinkUnavailable
from airflow_kafka_spark.errors.base import quote_names
from airflow_kafka_spark.windows.binding import Endpoint
from airflow_kafka_spark.windows.model import ELSEWHERE, Applied, BadRecord, OffsetRange, Split, SplitResult, Window

if TYPE_CHECKING:
    import pyarrow as pa
    from typing_extensions import Self


ABANDONED_DAYS = 7.0
"""Minimum age of an attempt that an attempt of another pipeline removes: its own pipeline no longer runs."""


class Guarantee(str, Enum):
    """The guarantee of a sink to its readers."""

    EXACTLY_ONCE = "exactly-once"
    """No record of a window is lost or doubled. A reader sees the whole window or nothing of it."""

    EXACTLY_ONCE_PER_SPLIT = "exactly-once, split by split"
    """No record is lost or doubled. While a window is written, a reader may see some of its splits."""

    EXACTLY_ONCE_PER_FILE = "exactly-once, file by file"
    """No record is lost or doubled. While a window is committed, a reader may see some of its files. The others follow in
    any case."""

    AT_LEAST_ONCE = "at-least-once"
    """Records may be there twice after a failure."""

    @property
    def by_split(self) -> bool:
        """True if splits are committed one by one, so that readers may see a part of a failed window."""
        return self is Guarantee.EXACTLY_ONCE_PER_SPLIT


@dataclass(frozen=True)
class Shape:
    """The rows that a sink will get, described before anything is read.

    :param pipeline: the pipeline's name.
    :param schema: the Arrow schema of the rows, in column order: the value's columns, then the key's, then metadata columns.
    :param has_tombstones: True if records without a value arrive as tombstones (see :class:`Rows`).
    :param tolerates: True if the sink has to leave out rows that it refuses, and to report them
        (:meth:`WindowWriter.find_refused_records`).
    """

    pipeline: str
    schema: pa.Schema
    has_tombstones: bool = False
    tolerates: bool = False


@dataclass(frozen=True)
class Rows:
    """A batch of rows of one split, in offset order.

    :param batch: the rows, in the schema of the :class:`Shape`.
    :param offsets: each row's Kafka offset (int64, ascending); topic and partition are the split's.
    :param tombstones: None if the batch has no tombstones, else a boolean per row. True: the record has no value, so only the
        key's columns and the metadata columns are set.
    """

    batch: pa.RecordBatch
    offsets: pa.Int64Array
    tombstones: pa.BooleanArray | None = None

    def filter(self, kept: pa.BooleanArray) -> Rows:
        """Return the rows for which ``kept`` is True."""
        tombstones = self.tombstones.filter(kept) if self.tombstones is not None else None
        return Rows(self.batch.filter(kept), self.offsets.filter(kept), tombstones)


class SplitWriter(ABC):
    """Writes one split inside a Spark task. The :class:`WindowWriter` makes it, Spark pickles it, the task opens it.

    Several tasks may write the same split, even at the same time (retry, speculation, a zombie job). Each task writes to
    its own files or stage, or the second task yields to the first one.
    """

    @abstractmethod
    def open(self, split: Split) -> None:
        """Begin a split. Called once per task attempt, before the first :meth:`write`."""

    def find_unwritable(self, rows: Rows) -> Mapping[int, str]:
        """Return the rows that no target of this kind can hold: their positions in the batch, with the reasons.

        Called before :meth:`write` if bad records are tolerated; :meth:`write` then gets the other rows.
        """
        return {}

    def defer(self) -> None:  # noqa: B027
        """Leave committing the split to the driver (:meth:`WindowWriter.list_deferred`).

        Called if the split has records that are not for this sink and have not been sent elsewhere yet. Only writers that
        commit splits by themselves need it. It may be called again.
        """

    @abstractmethod
    def write(self, rows: Rows) -> None:
        """Write the next rows of the split."""

    @abstractmethod
    def close(self) -> Mapping[str, Any]:
        """Flush the split. When this returns, its rows are durable, though not yet visible.

        :return: the token that :meth:`WindowWriter.commit` gets (JSON). ``rows`` in it is the number of rows that the sink
            counted.
        """

    @abstractmethod
    def abort(self) -> None:
        """Remove everything that was written of the split. Called instead of :meth:`close`; never raises."""


class WindowWriter(ABC):
    """One attempt at writing one window, on the driver. A context manager: leaving it without :meth:`commit` discards
    everything."""

    @abstractmethod
    def make_split_writer(self) -> SplitWriter:
        """Return a picklable writer for the tasks. It may hold passwords, but never shows them in its repr."""

    def list_deferred(self, results: Sequence[SplitResult]) -> Sequence[Split]:
        """Return the splits that tasks could not commit by themselves, because the sink refuses some of their rows or
        :meth:`SplitWriter.defer` was called.

        Called once, when all splits are read, and only where the :class:`Shape` tolerates bad records. These splits are then read
        again for a new :meth:`make_split_writer`; their new results replace the old ones.

        :param results: as for :meth:`commit`.
        """
        return ()

    def find_refused_records(self, results: Sequence[SplitResult]) -> Sequence[BadRecord]:
        """Return the records that the sink refuses; :meth:`commit` leaves them out.

        Called once, before dead letters are sent, and only where the :class:`Shape` tolerates bad records.

        :param results: as for :meth:`commit`.
        """
        return ()

    @abstractmethod
    def commit(self, results: Sequence[SplitResult]) -> Applied:
        """Make the window visible, together with the sink's own record of it, in one atomic step.

        If another attempt was faster, its window is left as it is and its record is returned.

        :param results: one result per split of the window, in the order of their indexes, none rejected.
        :raises WindowConflict: this window does not follow the sink's last window of the pipeline.
        :raises ForeignOffsets: the sink's last window is of another cluster.
        """

    def list_kept_ranges(self) -> Sequence[OffsetRange]:
        """Return the offsets of splits that tasks of an earlier attempt have committed, and that this attempt does not have,
        because their topic is gone. Called after :meth:`commit`.
        """
        return ()

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


LEAVE_ROWS = 'Leave the rows as they are: set `on_rerun="skip"`, or do not clear the task'
"""The action for a replay that would not replace the rows of its window."""


def make_unknown_window_problem(replay: Window, uri: str) -> Problem:
    """Return the problem of a replay of a window that the sink has no record of: its rows cannot be distinguished from others."""
    found = f"{uri} has no record of window {replay}, so that a replay would not replace its rows, but add them again"
    return Problem("on_rerun", found, LEAVE_ROWS)


def find_unknown_window_problems(sink: Sink, replay: Window) -> list[Problem]:
    """Return the problem of a replay in a sink that has no record of the window in this target; none if it has one."""
    first = replace(replay, replay=0, after=ELSEWHERE)
    return [] if sink.find_applied(first) is not None else [make_unknown_window_problem(replay, sink.uri)]


def make_rewritten_window_problem(error: KafkaSparkError) -> Problem:
    """Return the problem of a replay whose rows were rewritten by other programs."""
    return Problem.of("on_rerun", error, LEAVE_ROWS)


class Sink(metaclass=OptionsType):
    """A destination of windows. A frozen dataclass of options; connections are looked up when they are used, never at DAG
    parse."""

    template_fields: ClassVar[Sequence[str]] = ()
    used_by: ClassVar[str] = "KafkaToSinkOperator"
    """The operators that take it, for messages."""

    @property
    def takes_tombstones(self) -> bool:
        """True if a record without a value deletes a row in this sink."""
        return False

    @property
    def split_records(self) -> int:
        """The default size of a split, in offsets."""
        return 1_000_000

    @property
    def whole_partitions(self) -> bool:
        """True if each partition of a window has to be one split: splits commit one by one, and the order of records counts."""
        return False

    @property
    @abstractmethod
    def guarantee(self) -> Guarantee:
        """The guarantee of this sink with these options."""

    @property
    @abstractmethod
    def uri(self) -> str:
        """The target's URI without credentials, query and fragment, for instance ``postgres://host:5432/db/schema/table``.
        May look up the connection."""

    @property
    def asset_uri(self) -> str:
        """The URI that identifies the target as an Airflow asset. Its last part names the sink if a filter routes records to it.
        Read at DAG parse, so it must not look up the connection."""
        return self.uri

    def find_destination(self) -> Endpoint:
        """Return the location to which the rows and the sink's record of windows are written, without credentials.

        An open window may only be written to the destination for which it was planned, so destinations are compared. May look up
        the connection and ask the server.

        :raises ConnectionInvalid: the connection cannot be used.
        :raises SinkUnavailable: the server cannot be reached.
        """
        return Endpoint({"sink": self.uri})

    @abstractmethod
    def validate(self, shape: Shape) -> list[Problem]:
        """Return all problems that would prevent writing a window of this shape: a missing table, types that do not fit, a
        missing right.

        Changes nothing, needs no Spark and takes seconds at most. Never raises for an error that a user can cause.
        """

    def find_target_problems(self) -> list[Problem]:
        """Return the problems that can be found without knowing the rows: of connection, server, target and rights.

        Called instead of :meth:`validate` if the columns of the rows are not known because of another problem, and before a
        :class:`ComparedTable` is read. Default: none.
        """
        return []

    def find_replay_problems(self) -> list[Problem]:
        """Return the reasons why this sink, with these options, cannot replace the rows of a window that it has applied.

        Called before a replay is planned, and before an open one is resumed. Changes nothing.
        """
        return [Problem("on_rerun", "this sink cannot replace the rows of a window", 'Set `on_rerun="skip"`')]

    def find_window_replay_problems(self, replay: Window) -> list[Problem]:
        """Return the reasons why the rows of one window cannot be replaced, although this sink can replace rows.

        See :meth:`find_replay_problems`. The rows of the window, or its record, are not where a replay looks for them. Empty if
        the sink has applied this replay already.

        Called before a replay is planned, and before an open one is resumed. Changes nothing. Default: none.

        :param replay: the replay, with its number.
        :raises SinkUnavailable: the server cannot be reached.
        """
        return []

    def find_unordered_problems(self) -> list[Problem]:
        """Return the reasons why the result would differ if windows were applied in another order than that of their offsets, as
        data intervals may be. Empty if the order does not matter.
        """
        return []

    def find_topics_in_rows(self, window: Window, topics: Collection[str]) -> list[str]:
        """Return those of some topics whose offsets are in rows of the target, if an upsert compares them with the offsets of new
        records (``offset_columns``). Default: none.

        Called before a window is planned whose topics were created again, or belong to another cluster, so that offsets of the
        old topics are meaningless.

        :param window: the window that is going to be planned.
        :raises SinkUnavailable: the target cannot be read.
        """
        return []

    def find_last_windows(self, topics: Collection[str]) -> Mapping[str, Applied]:
        """Return the last window of each of some topics that any pipeline has written into the target, if an upsert compares the
        offsets in rows with those of new records (``offset_columns``). Default: none.

        Called before a pipeline reads topics for the first time: the rows may have offsets of earlier topics of these names.

        :raises SinkUnavailable: the target cannot be read.
        """
        return {}

    def find_compared_table(self) -> ComparedTable | SqlTable | None:
        """Return the target as ``VerifyOperator`` compares it with a source. Default: None, it cannot be compared.

        Asks no server: problems of options, connection and target belong to :meth:`ComparedTable.find_problems` and
        :meth:`find_target_problems`.
        """
        return None

    @abstractmethod
    def find_last_applied(self, pipeline: str) -> Applied | None:
        """Return the newest window of this pipeline in the sink's own record, with the ids of its cluster and topics.

        A pipeline whose ledger is lost continues after this window if these ids have not changed.
        """

    @abstractmethod
    def find_applied(self, window: Window) -> Applied | None:
        """Return the sink's record of this window, or None if it is not applied. A replay counts as a window of its own.

        :raises ForeignOffsets: a window of this number is there, of another cluster or of another topic of the same name.
        :raises WindowConflict: a window of this number is there, but of other offsets.
        """

    def has_lost(self, window: Window) -> bool:
        """Return True if the sink has lost its record of a window that was committed to it. A record that may have expired is not
        lost."""
        return self.find_applied(window) is None

    @abstractmethod
    def begin(self, window: Window, splits: Sequence[Split], shape: Shape) -> WindowWriter:
        """Begin an attempt at this window.

        Removes the rows that earlier attempts at it have left. Earlier attempts that are still running can only commit this
        window, or nothing.
        """


# --- comparison with a source -----------------------------------------------------------------------------------------

ReadPiece = Callable[[], "Iterator[pa.RecordBatch]"]
"""Reads a part of a table."""


@dataclass(frozen=True)
class SqlTable:
    """A table of PostgreSQL, MariaDB or MySQL. The server computes its checksums.

    :param conn_id: the Airflow connection of the server, as that of a ``JdbcSource``.
    :param table: its name, as that of a ``JdbcSource``.
    """

    conn_id: str
    table: str


class ComparedTable(ABC):
    """A table, or files, that the task reads in Arrow batches to compare the rows. The Arrow types of the columns decide which
    values are equal.

    Each method reads the newest version. :meth:`load_schema`, :meth:`read_pieces` and the pieces may raise any error:
    :meth:`make_unavailable_error` converts those that are not of this package.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the table for messages, its URI for instance, without credentials. Raises nothing."""

    def find_problems(self, condition: str) -> list[Problem]:
        """Return the reasons why the rows cannot be compared, although the target can be written.

        Default: a condition is refused. A table that applies conditions returns an empty list: an invalid condition is found
        when the first piece is read, before the comparison.

        :param condition: ``sink_where``; empty for all rows.
        """
        if not condition:
            return []
        action = 'Leave `where` out, or give `sink_where=""` if the sink has only rows that meet it'
        return [Problem("sink_where", "rows of this sink cannot be chosen by a condition", action)]

    @abstractmethod
    def load_schema(self) -> pa.Schema | None:
        """Return the columns; None if there is no table."""

    @abstractmethod
    def read_pieces(self, columns: Sequence[str], condition: str) -> Iterator[ReadPiece]:
        """Yield functions that read the table in pieces, each row in exactly one. Each step of a comparison calls it again.

        Pieces are read in threads, several at a time, some after the last one was yielded. One that fails may be read again.

        :param columns: the columns that are compared. Batches may have other columns, too.
        :param condition: the condition that rows have to meet; empty for all rows.
        """

    def make_unavailable_error(self, doing: str, error: Exception) -> SinkUnavailable:
        """Return the error to raise for an error of the store. Its message has no credentials.

        :param doing: for the message.
        """
        return SinkUnavailable(self.name, doing, f"{type(error).__name__}: {error}")


# --- rows with a key --------------------------------------------------------------------------------------------------

OFFSET_COLUMNS = ("__connect_topic", "__connect_partition", "__connect_offset")
"""Columns for a row's topic, partition and offset, with the names of the JDBC sink's ``pk.mode=kafka``."""
MODES = ("append", "upsert")
"""The values of ``mode``."""


class KeyedOptions(Protocol):
    """The options that decide the treatment of rows with equal keys."""

    @property
    def mode(self) -> str: ...

    @property
    def key(self) -> Sequence[str]: ...

    @property
    def delete_enabled(self) -> bool: ...

    @property
    def offset_columns(self) -> bool: ...


def find_key_problems(sink: KeyedOptions) -> Iterator[Problem]:
    """Yield the problems of combinations of these options."""
    if sink.mode == "upsert" and not sink.key:
        yield Problem("sink.key", 'it is empty; `mode="upsert"` needs the columns that name a row', 'For instance key=["id"]')
    if sink.mode == "append" and sink.key:
        yield Problem("sink.key", 'it means nothing with `mode="append"`', 'Leave it out, or set `mode="upsert"`')
    if sink.mode == "append" and sink.delete_enabled:
        yield Problem("sink.delete_enabled", 'rows that are only appended have no key to delete by; expected `mode="upsert"`')
    repeated = sorted({name for name in sink.key if list(sink.key).count(name) > 1})
    if repeated:
        yield Problem("sink.key", f"it names {quote_names(repeated)} twice")


class KeyedSink(Sink):
    """A sink whose rows may have a key (:class:`KeyedOptions`), with the checks of upserts in replays and in windows of any
    order.
    """

    mode: str
    key: Sequence[str]
    delete_enabled: bool
    offset_columns: bool

    @property
    def takes_tombstones(self) -> bool:
        """True with ``delete_enabled``."""
        return self.delete_enabled

    def find_replay_problems(self) -> list[Problem]:
        """Return the reasons why windows cannot be replayed: an upsert would overwrite newer rows (no ``offset_columns``), or
        would restore deleted ones (``delete_enabled``).
        """
        return self._find_order_problems("on_rerun", "a window that is moved again")

    def find_unordered_problems(self) -> list[Problem]:
        """Return the reasons why windows cannot be applied in any order: ``upsert`` needs ``offset_columns`` and must not
        delete.
        """
        return self._find_order_problems("window", "an interval that is moved after a later one")

    def _find_order_problems(self, where: str, what: str) -> list[Problem]:
        """Return the reasons why an upsert of older rows after newer ones would change the result.

        :param where: the option that allows it.
        :param what: the rows that are written later, as a noun.
        """
        if self.mode != "upsert":
            return []
        wrong = []
        if not self.offset_columns:
            wrong.append((f"{what} would overwrite newer rows", "Set `offset_columns=True` on the sink: older offsets then lose"))
        if self.delete_enabled:
            wrong.append((f"{what} would bring back rows that were deleted since", "Leave `delete_enabled` out"))
        return [Problem(where, *why) for why in wrong]
