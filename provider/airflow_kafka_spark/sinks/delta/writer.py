"""One attempt at one window of a Delta table, on the driver."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import Fenced, SinkUnavailable
from airflow_kafka_spark.hooks.object_stores import describe_store_error
from airflow_kafka_spark.sinks.base import OFFSET_COLUMNS, Shape
from airflow_kafka_spark.sinks.delta.log import DataFile, DeltaLog, PipelineVersion
from airflow_kafka_spark.sinks.delta.records import RECORD, LoadedDelta, Records
from airflow_kafka_spark.sinks.delta.table import (
    find_changed_column,
    find_text_length,
    make_file_schema,
    open_table,
    read_columns,
)
from airflow_kafka_spark.sinks.lake.writer import LakeWindowWriter, TryCommit
from airflow_kafka_spark.sinks.storage.attempts import ATTEMPTS, TableAttempt, make_marker_name
from airflow_kafka_spark.sinks.storage.window_record import TableChange, WindowRecord, make_commit_metadata
from airflow_kafka_spark.windows.model import Applied, Split, Window

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

    from airflow_kafka_spark.sinks.delta.options import DeltaSinkOptions
    from airflow_kafka_spark.sinks.delta.tasks.data_files import DeltaSplitWriter
    from airflow_kafka_spark.sinks.lake.tasks.rewrite import Merged, Upsert

log = logging.getLogger(__name__)


def begin_attempt(sink: DeltaSinkOptions, window: Window, splits: Sequence[Split], shape: Shape) -> DeltaWindowWriter:
    """Begin an attempt. See :meth:`.DeltaSink.begin`."""
    records = Records(DeltaLog(sink.store))
    rows = sink.add_own_columns(shape)
    with records.log.translate_errors(f"beginning window {window}"):
        table = open_table(sink, records.log, rows.schema)
        base = records.sweep(window.pipeline)
        return DeltaWindowWriter(sink, window, splits, rows, records, base, table)


class DeltaWindowWriter(LakeWindowWriter[LoadedDelta, WindowRecord, DataFile]):
    """One attempt, made by :meth:`.DeltaSink.begin`. Its commit is the log entry after the one that it has read.

    :param base: the pipeline's transaction version when the attempt began. If another attempt of the pipeline commits or fences,
        the version changes, and this attempt commits nothing.
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
        from airflow_kafka_spark.sinks.delta.tasks.data_files import list_generated_columns

        self.sink, self.uri = sink, sink.uri
        self.version, self.records, self.base = base.make_next(window.number), records, base
        self.partition_by = tuple(sink.partition_by)
        self.properties = dict(table.metadata().configuration)
        self.columns = read_columns(table)
        self.layout, self.table_id = _read_layout(table), table.metadata().id
        try:
            self.generated = tuple(list_generated_columns(self.columns))
        except ValueError as error:
            raise self.make_unavailable_error(f"beginning window {window}", str(error)) from error
        attempt = TableAttempt(window, make_marker_name(window.pipeline, int(self.version)), records.store, records.store)
        super().__init__(sink, sink.uri, splits, shape, attempt, sink.make_spec(), {})

    def make_unavailable_error(self, doing: str, error: Exception | str) -> SinkUnavailable:
        return SinkUnavailable(self.uri, doing, error if isinstance(error, str) else describe_store_error(error))

    # --- tasks ----------------------------------------------------------------------------------------------------------

    def make_row_schema(self) -> pa.Schema:
        return self.spec.make_stored_schema(make_file_schema(self.spec.make_stored_schema(self.shape.schema), self.columns))

    @property
    def filled(self) -> tuple[str, ...]:
        return tuple(name for name in self.options.key if name in self.partition_by)

    @property
    def lengths(self) -> Mapping[str, int]:
        # Rows get the columns of their origin later.
        of_rows = {*self.shape.schema.names} - {*OFFSET_COLUMNS, self.options.window_column}
        found = {column.name: find_text_length(column) for column in self.columns if column.name in of_rows}
        return {name: length for name, length in found.items() if length is not None}

    def make_data_writer(
        self, columns: pa.Schema | None = None, *, of_rows: bool = False, attempt: TableAttempt | None = None
    ) -> DeltaSplitWriter:
        """Return a writer of data files.

        :param columns: the table's columns; None: the columns of the window's rows.
        :param of_rows: True if the rows do not have the columns of their origin yet.
        :param attempt: the attempt that writes; None: this one.
        """
        import pyarrow as pa

        from airflow_kafka_spark.sinks.delta.tasks.data_files import (
            DeltaSplitWriter,
            DeltaTarget,
            find_physical_name,
            is_mapped,
            list_skipping_columns,
            make_written_schema,
        )

        table = self.columns if columns is None else columns
        written = columns or [*self.make_row_schema(), *(column.field for column in self.generated)]
        file_schema = self.spec.make_stored_schema(pa.schema([field for field in written if field.name not in self.partition_by]))
        physical = {field.name: find_physical_name(field) for field in table}
        statistics = frozenset(physical[name] for name in list_skipping_columns(file_schema, self.properties) if name in physical)
        return DeltaSplitWriter(
            DeltaTarget(
                **self.make_common_target(file_schema, of_rows, attempt),
                partition_columns=self.partition_by,
                partition_fields=tuple(physical[name] for name in self.partition_by),
                statistics=statistics,
                mapped=make_written_schema(file_schema, table) if is_mapped(table) else None,
                generated=self.generated,
            )
        )

    # --- commit ---------------------------------------------------------------------------------------------------------

    def load(self) -> LoadedDelta:
        table = self.records.load(self.committing)
        if table is None:
            raise self.make_unavailable_error(self.committing, "the table is gone")
        return table

    def get_position(self, table: LoadedDelta) -> tuple[object, object]:
        version = table.table.version()
        return version, version

    def refuse_overtaken(self, table: LoadedDelta) -> None:
        if table.table.metadata().id != self.table_id:
            # Its log knows no version of the pipeline, so that this attempt would seem to be overtaken.
            what = "the table was dropped and created again while the window was written: the next attempt writes for the new one"
            raise self.make_unavailable_error(self.committing, what)
        if table.read_version(self.window.pipeline) != self.base:
            raise Fenced(self.window.pipeline, self.committing)
        self._refuse_changed(table.table)

    def _refuse_changed(self, table: DeltaTable) -> None:
        """Refuse a commit to a table that others have changed so that the files of this attempt do not fit.

        Delta's own writers refuse any change of the table's metadata between their read and their commit.
        """
        from airflow_kafka_spark.sinks.delta.validation import find_problems_of

        if _read_layout(table) == self.layout:
            return
        written = [*self.make_row_schema().names, *(column.field.name for column in self.generated)]
        changed = find_changed_column(self.columns, read_columns(table), written)
        found = [problem.what for problem in find_problems_of(self.sink, table)]
        found += [f"its column `{changed}` is another one"] if changed else []
        if found:
            what = f"others have changed the table while the window was written: {'; '.join(found)}"
            raise self.make_unavailable_error(self.committing, what)

    def merge(self, table: LoadedDelta, upsert: Upsert) -> Merged:
        from airflow_kafka_spark.sinks.delta.tasks.data_files import list_table_files

        if not upsert.events.num_rows:
            return upsert.merge((), self.make_data_writer)
        files, columns = list_table_files(self.records.store, table.table, upsert)
        return upsert.merge(files, lambda: self.make_data_writer(columns))

    def prepare(self, table: LoadedDelta, change: TableChange[Mapping[str, Any], DataFile]) -> tuple[WindowRecord, TryCommit]:
        """Write the record of the window beside the attempt. The commit's transaction version names the attempt."""
        window, added = self.window, [DataFile.of(file) for file in change.added]
        applied = Applied.of(window, change.written, change.deleted)
        facts = {"run": window.run, "prepared_at": datetime.now(timezone.utc).isoformat()}
        record = WindowRecord(applied, tuple(file.make_record() for file in added), "delta", self.partition_by, facts)
        try:
            self.records.store.put(f"{ATTEMPTS}/{self.marker}/{RECORD}", record.dump())
        except FileNotFoundError as error:
            raise Fenced(window.pipeline, self.committing) from error
        metadata = make_commit_metadata(window, change.written, change.deleted)
        behind = (table.table, window.pipeline, self.version, added, change.removed, metadata)
        return record, lambda: self.records.log.try_commit(*behind)

    def is_mine(self, record: WindowRecord, table: LoadedDelta) -> bool:
        mine = f"{self.attempt.directory}/"
        return table.read_version(self.window.pipeline) == self.version or any(
            file["path"].startswith(mine) for file in record.files
        )

    def clean(self, record: WindowRecord, table: LoadedDelta | None) -> None:
        try:
            self.records.keep(self.window.pipeline, self.version, durable=table is None)
            self.records.finish(self.marker, record)
        except OSError as error:
            log.warning("Window %s is committed; the next attempt removes the files that it has left: %s", self.window, error)
            return
        self.optimize()

    def compact(self) -> tuple[int, int]:
        """Join small files in a separate attempt, which increases the pipeline's transaction version. Its commit is tried
        once.

        deltalake's OPTIMIZE is not used, because it repeats its commit after that of another OPTIMIZE: rows of files that both
        have joined are then in the table twice.
        """
        from airflow_kafka_spark.sinks.delta.tasks.data_files import list_small_files
        from airflow_kafka_spark.sinks.lake.tasks import rewrite

        table, pipeline, store = self.load(), self.window.pipeline, self.records.store
        groups, schema = list_small_files(store, table.table)
        if not groups:
            return 0, 0
        if table.read_version(pipeline) != self.version:
            raise Fenced(pipeline, "compacting")
        self._refuse_changed(table.table)
        version = self.version.make_next()
        attempt = TableAttempt(self.window, make_marker_name(pipeline, int(version)), store, store)
        with rewrite.run_compaction(attempt):
            added: list[DataFile] = []
            for group in groups:
                known = [file.file.rows for file in group]
                rows = sum(known) if all(known) else None
                joined = rewrite.join_files(self.make_data_writer(schema, attempt=attempt), group, rows, self.window.number)
                added += [DataFile.of(file) for file in joined]
            removed = [file.file for group in groups for file in group]
            faults.reached("sink.compacting")
            facts = {"pipeline": pipeline, "compacted": len(removed)}
            error = self.records.log.try_commit(table.table, pipeline, version, added, removed, facts, rewrites=True)
            if error is not None:
                raise error
        return len(removed), len(added)


def _read_layout(table: DeltaTable) -> tuple[object, ...]:
    """Return what others may change of a table without its files: columns, partitions, properties and protocol."""
    metadata, protocol = table.metadata(), table.protocol()
    features = (protocol.writer_features or (), protocol.reader_features or ())
    versions = (protocol.min_reader_version, protocol.min_writer_version)
    return table.schema().to_json(), metadata.partition_columns, metadata.configuration, versions, *map(frozenset, features)
