"""The Delta sink: each window becomes one commit of a Delta table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.sinks.base import Shape
from airflow_kafka_spark.sinks.delta.log import DeltaLog
from airflow_kafka_spark.sinks.delta.options import DeltaSinkOptions
from airflow_kafka_spark.sinks.lake.sink import LakeSink
from airflow_kafka_spark.windows.binding import SERVER, Endpoint
from airflow_kafka_spark.windows.model import Split, Window

if TYPE_CHECKING:
    from airflow_kafka_spark.sinks.delta.comparison import ComparedDeltaTable
    from airflow_kafka_spark.sinks.delta.records import LoadedDelta
    from airflow_kafka_spark.sinks.delta.writer import DeltaWindowWriter


@dataclass(frozen=True)
class DeltaSink(DeltaSinkOptions, LakeSink):
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
        highest offset of a key wins, and windows apply in order. Offsets of different partitions cannot be compared in time (the
        higher partition wins), so a key should always be in one partition, as it is if it is the record's key.
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
    :param auto_create: True (default): the table is created with the columns of the rows if it does not exist. False: a missing
        table is refused before Spark starts.
    :param auto_evolve: True: columns of the rows that the table lacks, and such members of structures, are added to it, as
        nullable ones. Default False: such rows are refused before Spark starts. Numbers and texts never change their type.
    :param compression: ``none``, ``snappy`` (default), ``gzip``, ``zstd``, ``lz4``.
    :param options: ``max_open_files`` per task if partitioned (default 64), ``max_rows_per_group`` (default 500,000) and
        ``max_bytes_per_group`` (default 64 MiB) of a row group. All others are passed to pyarrow's ``ParquetWriter``. Default:
        none.
    :param table_properties: properties of a table that is created, for instance ``delta.logRetentionDuration``. Default: none.
    :param optimize: number of windows of a pipeline after which the table's small files are joined, in a separate commit, on the
        Airflow worker. The window is committed before, and stays if the compaction fails, which is logged. Windows of data
        intervals are not counted. A replay of an appended window that was compacted needs ``window_column``. Default None: never.
    """

    template_fields: ClassVar[Sequence[str]] = ("path", "conn_id", "key", "window_column")

    @property
    def asset_uri(self) -> str:
        """The table's ``file://`` or ``s3://`` URI."""
        return self.uri

    def find_destination(self) -> Endpoint:
        """Return the table, and its server, because two servers may have buckets of one name."""
        server = self.store.server
        return Endpoint({"table": self.uri, **({SERVER: server} if server else {})}, {"directory": self.location.directory})

    def validate(self, shape: Shape) -> list[Problem]:
        """Return the problems of options, types, table and rights. Writes nothing."""
        from airflow_kafka_spark.sinks.delta.validation import find_delta_sink_problems

        return find_delta_sink_problems(self, shape)

    def find_target_problems(self) -> list[Problem]:
        """Return the problems of location, connection and table."""
        from airflow_kafka_spark.sinks.delta.validation import find_table_problems

        return find_table_problems(self)

    def find_compared_table(self) -> ComparedDeltaTable:
        """Return the table, which the task reads."""
        from airflow_kafka_spark.sinks.delta.comparison import ComparedDeltaTable

        return ComparedDeltaTable(self)

    def find_replay_problems(self) -> list[Problem]:
        """Return the reasons why windows cannot be replayed: the table allows no removals (``delta.appendOnly``), or an upsert
        would overwrite newer rows (no ``offset_columns``) or restore deleted ones (``delete_enabled``).
        """
        from airflow_kafka_spark.sinks.delta.validation import find_removal_problems

        return [*find_removal_problems(self), *super().find_replay_problems()]

    @contextmanager
    def load_table(self, doing: str) -> Iterator[LoadedDelta | None]:
        """Return the table as it is now."""
        from airflow_kafka_spark.sinks.delta.records import Records

        log = DeltaLog(self.store)
        with log.translate_errors(doing):
            yield Records(log).load(doing)

    def begin(self, window: Window, splits: Sequence[Split], shape: Shape) -> DeltaWindowWriter:
        """Begin an attempt: create or evolve the table, and remove the files of earlier attempts.

        Before any file of an attempt is removed, a commit without data increases the pipeline's transaction version, so that
        the attempt can no longer commit.
        """
        from airflow_kafka_spark.sinks.delta.writer import begin_attempt

        return begin_attempt(self, window, splits, shape)
