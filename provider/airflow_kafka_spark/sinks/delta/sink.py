"""The Delta sink: each window becomes one commit of a Delta table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from airflow_kafka_spark.errors import Problem, WindowConflict
from airflow_kafka_spark.sinks.base import Guarantee, KeyedSink, Shape, rewritten_window, unknown_window
from airflow_kafka_spark.sinks.delta.log import DeltaLog
from airflow_kafka_spark.sinks.delta.options import DeltaSinkOptions
from airflow_kafka_spark.windows.binding import SERVER, Endpoint
from airflow_kafka_spark.windows.continuity import refuse_other
from airflow_kafka_spark.windows.model import Applied, Split, Window

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from airflow_kafka_spark.sinks.delta.writer import DeltaWindowWriter


@dataclass(frozen=True)
class DeltaSink(DeltaSinkOptions, KeyedSink):
    """Appends each window to a Delta table, or upserts it by key, in one commit.

    Guarantee: exactly-once. Spark's tasks write Parquet files into the table's directory; the driver commits them, once, together
    with the window's number as the pipeline's transaction version in Delta's log. Each commit is refused if anything was
    committed since the log was read, so an attempt that was overtaken commits nothing. Other writers may append at any
    time, and OPTIMIZE and VACUUM may run. Spark, DuckDB, polars and every other reader of Delta see whole windows only.

    :param path: the table's directory: an absolute path, a ``file://`` URI or ``s3://bucket/prefix`` (``s3a://`` too). The
        Airflow worker and all of Spark's executors have to reach it. Templated.
    :param conn_id: the Airflow connection of type ``aws`` with the credentials of S3. Default None: those of the environment, on
        worker and executors. Not used for local paths. Templated.
    :param mode: ``append`` (default) adds every record as a row. ``upsert`` inserts or updates by ``key``: within a window the
        highest offset of a key wins, and windows apply in order. Between partitions offsets say nothing about time (the higher
        partition wins), so a key should always be in the same partition, as it is if it is the record's key.
    :param key: the columns that identify a row, for ``upsert``: integers, strings, dates, timestamps, decimals, booleans or
        binaries. Default none. Templated.
    :param delete_enabled: True: a record without a value deletes the row of its key (Connect's ``delete.enabled``); ``upsert``
        only. Default False.
    :param offset_columns: True: the table has the columns ``__connect_topic``, ``__connect_partition`` and ``__connect_offset``,
        which the sink fills, and an older offset never overwrites or deletes a newer row. Default False.
    :param window_column: a text column that the sink fills with the window's name, ``<pipeline>#<number>``. If others
        have rewritten the files of an appended window, a replay finds its rows by this column. Default None: no such column.
        Templated.
    :param partition_by: columns that partition the table. They may be booleans, integers, decimals, dates and strings; Delta
        takes an empty string for a null. Default: none.
    :param auto_create: True (default): the table is created with the columns of the rows if it does not exist. False: that is
        refused before Spark starts.
    :param auto_evolve: True: columns of the rows that the table lacks are added to it, as nullable ones. Default False: such rows
        are refused before Spark starts. A column never changes its type.
    :param compression: ``none``, ``snappy`` (default), ``gzip``, ``zstd``, ``lz4``.
    :param options: ``max_open_files`` per task if partitioned (default 64), ``max_rows_per_group`` (default 500,000) and
        ``max_bytes_per_group`` (default 64 MiB) of a row group. All others are passed to pyarrow's ``ParquetWriter``. Default:
        none.
    :param table_properties: properties of a table that is created, for instance ``delta.logRetentionDuration``. Default: none.
    """

    template_fields: ClassVar[Sequence[str]] = ("path", "conn_id", "key", "window_column")

    @property
    def guarantee(self) -> Guarantee:
        """Exactly-once."""
        return Guarantee.EXACTLY_ONCE

    @property
    def asset_uri(self) -> str:
        """The table's ``file://`` or ``s3://`` URI."""
        return self.uri

    def destination(self) -> Endpoint:
        """Return the table, and the server that is asked for it: two servers may have buckets of one name."""
        server = self.store.server
        return Endpoint({"table": self.uri, **({SERVER: server} if server else {})})

    def validate(self, shape: Shape) -> list[Problem]:
        """Return the problems of options, types, table and rights. Writes nothing."""
        from airflow_kafka_spark.sinks.delta.validation import delta_sink_problems

        return delta_sink_problems(self, shape)

    def target_problems(self) -> list[Problem]:
        """Return the problems of place, connection and table."""
        from airflow_kafka_spark.sinks.delta.validation import table_problems

        return table_problems(self)

    def replay_problems(self) -> list[Problem]:
        """Return why windows cannot be replayed: the table takes no removals (``delta.appendOnly``), or an upsert would overwrite
        newer rows (no ``offset_columns``) or bring deleted ones back (``delete_enabled``)."""
        from airflow_kafka_spark.sinks.delta.validation import removal_problems

        return [*removal_problems(self), *super().replay_problems()]

    def window_replay_problems(self, replay: Window) -> list[Problem]:
        """Return a problem if the table has no record of the window, or if others have rewritten its files and no row names the
        window in ``window_column``. An upsert finds the rows by their keys."""
        if self.upserts:
            return []
        from airflow_kafka_spark.sinks.delta.records import Records
        from airflow_kafka_spark.sinks.delta.writer import replaced_files

        delta_log = DeltaLog(self.store)
        table = delta_log.load(f"looking for window {replay}")
        try:
            found = Records(delta_log).find(table, replay.pipeline, replay.number) if table is not None else None
            if table is None or found is None:
                return [unknown_window(replay, self.uri)]
            if found.applied.replay < replay.replay:
                replaced_files(table, replay, found)
        except WindowConflict as error:
            return [] if table is not None and self._names_window(table, replay) else [rewritten_window(error)]
        return []

    def _names_window(self, table: DeltaTable, window: Window) -> bool:
        """Return True if a row of the table names a window in ``window_column``."""
        from airflow_kafka_spark.sinks.delta.tasks.data_files import table_files
        from airflow_kafka_spark.sinks.lake.tasks.upsert import Upsert

        if not self.window_column or self.window_column not in (field.name for field in table.schema().fields):
            return False
        deletion = Upsert.deletion(window, self.window_column)
        return deletion.is_met(table_files(table, deletion)[0])

    def last_applied(self, pipeline: str) -> Applied | None:
        """Return the window with the highest number that the pipeline's transaction version names.

        :raises WindowConflict: the table has no record of that window.
        """
        from airflow_kafka_spark.sinks.delta.records import Records

        delta_log = DeltaLog(self.store)
        table = delta_log.load("looking for the last window")
        newest = delta_log.version(table, pipeline).newest if table is not None else 0
        if table is None or not newest:
            return None
        found = Records(delta_log).find(table, pipeline, newest)
        if found is None:
            name = f"{pipeline}#{newest}"
            raise WindowConflict(name, f"{self.uri} has its rows, but no record of its offsets", "a record in `_airflow`")
        return found.applied

    def applied(self, window: Window) -> Applied | None:
        """Return the record of the window, or None if it is not committed.

        :raises ForeignOffsets: a window of this number is there, of another cluster or of another topic of the same name.
        :raises WindowConflict: a window of this number is there, but of other offsets.
        """
        from airflow_kafka_spark.sinks.delta.records import Records

        delta_log = DeltaLog(self.store)
        table = delta_log.load(f"looking for window {window}")
        if table is None:
            return None
        found = Records(delta_log).find(table, window.pipeline, window.number)
        if found is None:
            return None
        refuse_other(found.applied, window, self.uri)
        return found.applied if found.applied.replay >= window.replay else None

    def begin(self, window: Window, splits: Sequence[Split], shape: Shape) -> DeltaWindowWriter:
        """Begin an attempt: create or evolve the table, and remove what earlier attempts have left.

        Before anything of an attempt is removed, a commit without data takes the pipeline's transaction version further, so that
        the attempt can commit nothing any more.
        """
        from airflow_kafka_spark.sinks.delta.writer import begin_attempt

        return begin_attempt(self, window, splits, shape)
