"""Delta's log as the sink uses it: a read, and a commit that is refused if anything was committed since that read.

Delta keeps one *transaction version* for each application id, also in checkpoints, where the entries of old commits are removed.
The sink's id is ``airflow:<pipeline>``. Each commit of the pipeline sets another version (:class:`PipelineVersion`), which names
the attempt that made it. deltalake refuses a version that was set since its handle was loaded, but a handle that is loaded later
may set the same version again. So the sink never relies on it: a commit is tried once, for the log entry after the one that was
read (``max_commit_retries=0``). If anything was committed in between, that entry exists, and the sink reads the log again.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import SinkUnavailable
from airflow_kafka_spark.hooks.object_stores import describe_store_error
from airflow_kafka_spark.sinks.storage.store import TableStore, flush

if TYPE_CHECKING:
    from deltalake import DeltaTable

LOG = "_delta_log"
"""The directory of the log, below the table."""

METADATA = "airflow"
"""The key of a window's record in the information of its commit."""

_NONCE_BITS, _COUNT_BITS = 16, 14


@dataclass(frozen=True)
class PipelineVersion:
    """The transaction version of a pipeline: a 63 bit number that grows with each commit of the pipeline.

    :param newest: the highest number of a window that is applied.
    :param count: commits since that window: replays, and attempts that fenced others.
    :param nonce: of the attempt that committed.
    """

    newest: int
    count: int
    nonce: int

    @classmethod
    def unpack(cls, value: int | None) -> PipelineVersion:
        """Return the parts of a number; None is the version before the first commit."""
        if value is None:
            return cls(0, 0, 0)
        high = value >> _NONCE_BITS
        return cls(high >> _COUNT_BITS, high & ((1 << _COUNT_BITS) - 1), value & ((1 << _NONCE_BITS) - 1))

    def __int__(self) -> int:
        return (self.newest << _COUNT_BITS | self.count) << _NONCE_BITS | self.nonce

    def make_next(self, number: int | None = None) -> PipelineVersion:
        """Return the version of the commit after this one.

        :param number: the window that it applies; None for a fence.
        """
        nonce = secrets.randbelow(1 << _NONCE_BITS)
        if number is not None and number > self.newest:
            return PipelineVersion(number, 0, nonce)
        if self.count + 1 >> _COUNT_BITS:
            raise OverflowError(f"{self.count:,} attempts since window {self.newest}")
        return PipelineVersion(self.newest, self.count + 1, nonce)


@dataclass(frozen=True)
class DataFile:
    """A file of a commit, as a task reports it.

    :param path: below the table.
    :param bytes: its size.
    :param rows: number of rows.
    :param partition: the values of the partition columns.
    :param stats: Delta's statistics as JSON; "" if they are not known.
    """

    path: str
    bytes: int
    rows: int
    partition: Mapping[str, str | None]
    stats: str = ""

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> DataFile:
        """Return the file that a token or a record names."""
        return cls(value["path"], value["bytes"], value["rows"], value.get("partition", {}), value.get("stats", ""))

    def make_record(self) -> dict[str, Any]:
        """Return the file in the form of the sink's record."""
        return {"path": self.path, "bytes": self.bytes, "rows": self.rows, "partition": dict(self.partition)}


_UPGRADE = "Upgrade `deltalake` on the Airflow worker, or use a table without that feature"


@dataclass(frozen=True)
class DeltaLog:
    """The log of one table.

    :param store: the table's files.
    """

    store: TableStore

    @contextmanager
    def translate_errors(self, doing: str) -> Iterator[None]:
        """Raise errors of deltalake and of the store as :class:`SinkUnavailable`. A loaded handle still sends requests.

        :param doing: for messages.
        """
        from deltalake.exceptions import DeltaError

        try:
            yield
        except (DeltaError, OSError) as error:
            remedy = _UPGRADE if ": Unsupported: " in str(error) else None
            raise SinkUnavailable(self.store.location.uri, doing, describe_store_error(error), remedy) from error

    def load(self, doing: str) -> DeltaTable | None:
        """Return a new handle on the newest version, or None if there is no table.

        :param doing: for messages.
        :raises SinkUnavailable: the log cannot be read.
        """
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        options = dict(self.store.storage_options)
        with self.translate_errors(doing), suppress(TableNotFoundError):
            return DeltaTable(self.store.location.path_or_uri, storage_options=options, without_files=False)
        return None

    def read_version(self, table: DeltaTable, pipeline: str) -> PipelineVersion:
        """Return the pipeline's transaction version."""
        return PipelineVersion.unpack(table.transaction_version(make_app_id(pipeline)))

    def try_commit(
        self,
        table: DeltaTable,
        pipeline: str,
        version: PipelineVersion,
        added: Sequence[DataFile] = (),
        removed: Sequence[DataFile] = (),
        metadata: Mapping[str, Any] | None = None,
        rewrites: bool = False,
    ) -> Exception | None:
        """Try one commit, after the version of the table that the handle shows.

        :param rewrites: True if the rows of ``added`` are those of ``removed``. Readers of changes ignore such a commit.
        :return: None if it is committed. After an error the outcome is unknown: read the log again.
        """
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import DeltaError
        from deltalake.transaction import AddAction, RemoveAction

        now = int(time.time() * 1000)
        actions: list[AddAction | RemoveAction] = [
            RemoveAction(file.path, not rewrites, now, file.bytes, dict(file.partition)) for file in removed
        ]
        actions += [AddAction(file.path, file.bytes, dict(file.partition), now, not rewrites, file.stats) for file in added]
        properties = CommitProperties(
            custom_metadata={METADATA: dict(metadata or {})},
            max_commit_retries=0,
            app_transactions=[Transaction(make_app_id(pipeline), int(version), now)],
        )
        partition_by, behind = table.metadata().partition_columns, table.version()
        try:
            table.create_write_transaction(actions, "append", table.schema(), partition_by, commit_properties=properties)
            self._flush_entry(behind + 1)
        except (DeltaError, OSError) as error:
            return error
        return None

    def _flush_entry(self, version: int) -> None:
        """Make an entry durable. In S3 it is durable as soon as it is written.

        :raises OSError: it cannot be flushed.
        """
        if self.store.location.is_local:
            directory = Path(self.store.make_full_path(LOG))
            flush(directory / f"{version:020d}.json")
            flush(directory)

    def flush_recent(self) -> None:
        """Make all entries durable that were written in the last hour. An attempt that died has written one of them.

        :raises OSError: they cannot be flushed.
        """
        if self.store.location.is_local:
            directory, oldest = Path(self.store.make_full_path(LOG)), time.time() - 3600
            with os.scandir(directory) as entries:
                recent = [e.path for e in entries if e.name.endswith(".json") and e.stat().st_mtime > oldest]
            for path in (*recent, str(directory)):
                flush(path)


def make_app_id(pipeline: str) -> str:
    """Return the application id of a pipeline in Delta's log."""
    return f"airflow:{pipeline}"
