"""One attempt at one window of a Delta table, on the driver."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import Fenced, SinkUnavailable
from airflow_kafka_spark.hooks.storage import store_error
from airflow_kafka_spark.sinks.base import Shape
from airflow_kafka_spark.sinks.delta.log import DataFile, DeltaLog, PipelineVersion
from airflow_kafka_spark.sinks.delta.records import RECORD, LoadedDelta, Records
from airflow_kafka_spark.sinks.delta.table import open_table
from airflow_kafka_spark.sinks.lake.writer import LakeWindowWriter, TryCommit
from airflow_kafka_spark.sinks.storage.attempts import ATTEMPTS, TableAttempt, make_marker_name
from airflow_kafka_spark.sinks.storage.window_record import TableChange, WindowRecord, make_commit_metadata
from airflow_kafka_spark.windows.model import Applied, Split, Window

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

    from airflow_kafka_spark.sinks.delta.options import DeltaSinkOptions
    from airflow_kafka_spark.sinks.delta.tasks.data_files import DeltaSplitWriter
    from airflow_kafka_spark.sinks.lake.tasks.upsert import Merged, Upsert

log = logging.getLogger(__name__)

_CODECS: dict[str, Any] = {"none": "UNCOMPRESSED", "snappy": "SNAPPY", "gzip": "GZIP", "zstd": "ZSTD", "lz4": "LZ4_RAW"}
"""The names of codecs in Delta's own writer."""


def begin_attempt(sink: DeltaSinkOptions, window: Window, splits: Sequence[Split], shape: Shape) -> DeltaWindowWriter:
    """Begin an attempt. See :meth:`.DeltaSink.begin`."""
    records = Records(DeltaLog(sink.store))
    rows = sink.add_own_columns(shape)
    with records.log.translate_errors(f"beginning window {window}"):
        table = open_table(sink, records.log, rows.schema)
        base = records.sweep(window.pipeline)
        return DeltaWindowWriter(sink, window, splits, rows, records, base, table)


class DeltaWindowWriter(LakeWindowWriter[LoadedDelta, WindowRecord, DataFile]):
    """One attempt, made by :meth:`.DeltaSink.begin`. Its commit is the next entry of the log behind the look.

    :param base: the pipeline's transaction version when the attempt began. If another attempt of the pipeline commits or fences,
        it is another one, and this attempt commits nothing.
    """

    suspect = "VACUUM with a retention shorter than this window"

    def __init__(
        self,
        sink: DeltaSinkOptions,
        window: Window,
        splits: Sequence[Split],
        shape: Shape,
        records: Records,
        base: PipelineVersion,
        table: DeltaTable,
    ) -> None:
        self.version, self.records, self.base = base.after(window.number), records, base
        self.partition_by, self.optimize = tuple(sink.partition_by), sink.optimize
        self.properties = dict(table.metadata().configuration)
        attempt = TableAttempt(window, make_marker_name(window.pipeline, int(self.version)), records.store, records.store)
        super().__init__(sink, sink.uri, splits, shape, attempt, sink.spec(), {})

    def unavailable(self, doing: str, error: Exception | str) -> SinkUnavailable:
        return SinkUnavailable(self.uri, doing, error if isinstance(error, str) else store_error(error))

    # --- tasks ----------------------------------------------------------------------------------------------------------

    def row_schema(self) -> pa.Schema:
        return self.spec.stored(self.shape.schema)

    @property
    def filled(self) -> tuple[str, ...]:
        return tuple(name for name in self.options.key if name in self.partition_by)

    def make_data_writer(self, columns: pa.Schema | None, of_rows: bool = False) -> DeltaSplitWriter:
        import pyarrow as pa

        from airflow_kafka_spark.sinks.delta.tasks.data_files import DeltaSplitWriter, DeltaTarget, list_skipping_columns

        fields = [field for field in columns or self.shape.schema if field.name not in self.partition_by]
        file_schema = self.spec.stored(pa.schema(fields))
        statistics = list_skipping_columns(file_schema, self.properties)
        common = self.make_common_target(file_schema, of_rows)
        return DeltaSplitWriter(DeltaTarget(**common, partition_columns=self.partition_by, statistics=statistics))

    # --- commit ---------------------------------------------------------------------------------------------------------

    def load(self) -> LoadedDelta:
        table = self.records.load(self.committing)
        if table is None:
            raise self.unavailable(self.committing, "the table is gone")
        return table

    def position(self, table: LoadedDelta) -> tuple[object, object]:
        version = table.table.version()
        return version, version

    def refuse_overtaken(self, table: LoadedDelta) -> None:
        if table.version(self.window.pipeline) != self.base:
            raise Fenced(self.window.pipeline, self.committing)

    def merge(self, table: LoadedDelta, upsert: Upsert) -> Merged:
        from airflow_kafka_spark.sinks.delta.tasks.data_files import list_table_files

        store = self.records.store
        return upsert.merge(*(list_table_files(store, table.table, upsert) if upsert.events.num_rows else ((), None)))

    def prepare(self, table: LoadedDelta, change: TableChange[Mapping[str, Any], DataFile]) -> tuple[WindowRecord, TryCommit]:
        """Write the record of the window beside the attempt. The commit's transaction version names the attempt."""
        window, added = self.window, [DataFile.of(file) for file in change.added]
        applied = Applied.of(window, change.written, change.deleted)
        facts = {"run": window.run, "prepared_at": datetime.now(timezone.utc).isoformat()}
        record = WindowRecord(applied, tuple(file.recorded() for file in added), "delta", self.partition_by, facts)
        try:
            self.records.store.put(f"{ATTEMPTS}/{self.marker}/{RECORD}", record.dump())
        except FileNotFoundError as error:
            raise Fenced(window.pipeline, self.committing) from error
        metadata = make_commit_metadata(window, change.written, change.deleted)
        behind = (table.table, window.pipeline, self.version, added, change.removed, metadata)
        return record, lambda: self.records.log.try_commit(*behind)

    def is_mine(self, record: WindowRecord, table: LoadedDelta) -> bool:
        mine = f"{self.attempt.directory}/"
        return table.version(self.window.pipeline) == self.version or any(file["path"].startswith(mine) for file in record.files)

    def clean(self, record: WindowRecord, table: LoadedDelta | None) -> None:
        try:
            self.records.keep(self.window.pipeline, self.version, durable=table is None)
            self.records.finish(self.marker, record)
        except OSError as error:
            log.warning("Window %s is committed; the next attempt removes what it has left: %s", self.window, error)
            return
        if self.optimize and not self.window.replay and self.window.number % self.optimize == 0:
            self._compact()

    def _compact(self) -> None:
        """Join the table's small files. The window is committed, so that it stays if this fails."""
        from deltalake import WriterProperties

        try:
            table = self.load().table
            faults.reached("sink.compacting")
            found = table.optimize.compact(
                writer_properties=WriterProperties(compression=_CODECS[self.spec.compression or "snappy"])
            )
            faults.reached("sink.compacted")
        except Exception as error:  # deltalake and each store have errors of their own
            log.warning("Window %s is committed; its table is not compacted: %s", self.window, error)
            return
        log.info("Compacted %s: %s files instead of %s", self.uri, found["numFilesAdded"], found["numFilesRemoved"])
