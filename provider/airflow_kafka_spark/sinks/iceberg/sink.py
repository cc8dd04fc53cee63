"""The Iceberg sink: each window becomes one snapshot of an Iceberg table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from airflow_kafka_spark.errors import Problem, WindowConflict
from airflow_kafka_spark.sinks.base import Guarantee, KeyedSink, Shape, rewritten_window, unknown_window
from airflow_kafka_spark.sinks.iceberg.options import IcebergSinkOptions
from airflow_kafka_spark.windows.binding import SERVER, Endpoint
from airflow_kafka_spark.windows.continuity import refuse_other
from airflow_kafka_spark.windows.model import Applied, Split, Window

if TYPE_CHECKING:
    from pyiceberg.table import Table

    from airflow_kafka_spark.sinks.iceberg.writer import IcebergWindowWriter


@dataclass(frozen=True)
class IcebergSink(IcebergSinkOptions, KeyedSink):
    """Appends each window to an Iceberg table, or upserts it by key, in one commit.

    Guarantee: exactly-once. Spark's tasks write Parquet files with the table's column ids; the driver commits them, once, as one
    snapshot whose summary holds the window, and sets the tag ``airflow.<pipeline>`` to it in the same commit. The commit is
    refused if branch or tag have changed since the table was loaded, so an attempt that was overtaken commits nothing.
    Other writers may append at any time, and rewrite_data_files, expire_snapshots and remove_orphan_files may run. Every reader
    of Iceberg sees whole windows only.

    :param table: the table: its namespace and its name, joined by dots. Templated.
    :param conn_id: the Airflow connection of type ``iceberg`` with the catalog: its host is the catalog's URI, its login and
        password are those of the catalog, and its extra holds the other options of pyiceberg's ``load_catalog`` (``type``,
        ``warehouse``, ``s3.region``). SQL, REST, Glue and Hive catalogs are accepted; Hadoop catalogs are refused. Default
        ``iceberg_default``. Templated.
    :param branch: the branch that gets the windows. Default ``main``, which readers see. Another one is created from ``main`` if
        it does not exist; readers see its windows once the branch is published (write, audit, publish). Templated.
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
    :param partition_by: how a table that is created is partitioned: columns, ``bucket(N, column)``, ``truncate(N, column)``,
        ``year(column)``, ``month(column)``, ``day(column)``, ``hour(column)``. A table that exists has to be partitioned in this
        way; if nothing is named, it may be partitioned in any way. Default: none.
    :param auto_create: True (default): namespace and table are created with the columns of the rows if they do not exist. False:
        that is refused before Spark starts.
    :param auto_evolve: True: columns of the rows that the table lacks are added to it, as optional ones. Default False: such rows
        are refused before Spark starts. A column never changes its type.
    :param compression: ``none``, ``snappy``, ``gzip``, ``zstd``, ``lz4``. Default None: as the table's
        ``write.parquet.compression-codec`` says, else ``zstd``.
    :param options: ``max_open_files`` per task if partitioned (default 64), ``max_rows_per_group`` (default 500,000) and
        ``max_bytes_per_group`` (default 64 MiB) of a row group. All others are passed to pyarrow's ``ParquetWriter``. Default:
        none.
    :param table_properties: properties of a table that is created, for instance ``write.metadata.delete-after-commit.enabled``.
        Default: none.
    """

    template_fields: ClassVar[Sequence[str]] = ("table", "conn_id", "branch", "key", "window_column")

    @property
    def guarantee(self) -> Guarantee:
        """Exactly-once."""
        return Guarantee.EXACTLY_ONCE

    @property
    def asset_uri(self) -> str:
        """``iceberg://<conn_id>/<namespace>/<table>``."""
        return self.uri

    def destination(self) -> Endpoint:
        """Return the catalog, the table in it, and the branch.

        :raises ConnectionInvalid: the connection cannot be used.
        """
        access = self.open().access
        return Endpoint({"table": self.table, SERVER: access.address, "branch": self.branch})

    def validate(self, shape: Shape) -> list[Problem]:
        """Return the problems of options, types, catalog and table. Writes nothing."""
        from airflow_kafka_spark.sinks.iceberg.validation import iceberg_sink_problems

        return iceberg_sink_problems(self, shape)

    def target_problems(self) -> list[Problem]:
        """Return the problems of connection, catalog and table."""
        from airflow_kafka_spark.sinks.iceberg.validation import table_problems

        return table_problems(self)

    def window_replay_problems(self, replay: Window) -> list[Problem]:
        """Return a problem if the table has no record of the window, or if others have rewritten its files and no row names the
        window in ``window_column``. An upsert finds the rows by their keys."""
        from airflow_kafka_spark.sinks.iceberg.snapshots import PipelineSnapshots
        from airflow_kafka_spark.sinks.iceberg.writer import replaced_files

        if self.upserts:
            return []
        doing = f"looking for window {replay}"
        with self.open() as lake:
            table = lake.load(doing)
            try:
                found = PipelineSnapshots.of(table.metadata, replay.pipeline).find(replay.number) if table is not None else None
                if table is None or found is None:
                    named = table is not None and self._names_window(table, replay)
                    return [] if named else [unknown_window(replay, self.uri)]
                if found.applied.replay < replay.replay:
                    replaced_files(table, self.branch, replay, found)
            except WindowConflict as error:
                return [] if table is not None and self._names_window(table, replay) else [rewritten_window(error)]
            except Exception as error:  # each catalog and store has errors of its own
                raise lake.unavailable(doing, error) from error
        return []

    def _names_window(self, table: Table, window: Window) -> bool:
        """Return True if a row of the branch names a window in ``window_column``."""
        from airflow_kafka_spark.sinks.iceberg.tasks.data_files import table_files
        from airflow_kafka_spark.sinks.lake.tasks.upsert import Upsert

        column = self.window_column
        if not column or column not in (field.name for field in table.schema().fields):
            return False
        deletion = Upsert.deletion(window, column)
        return deletion.is_met(table_files(table, self.branch, deletion, {column: column}))

    def last_applied(self, pipeline: str) -> Applied | None:
        """Return the window with the highest number that the pipeline's snapshots name.

        :raises WindowConflict: a record cannot be understood.
        """
        from airflow_kafka_spark.sinks.iceberg.snapshots import PipelineSnapshots

        with self.open() as lake:
            table = lake.load("looking for the last window")
            newest = PipelineSnapshots.of(table.metadata, pipeline).newest if table is not None else None
        return newest.applied if newest is not None else None

    def applied(self, window: Window) -> Applied | None:
        """Return the record of the window, or None if it is not committed.

        :raises ForeignOffsets: a window of this number is there, of another cluster or of another topic of the same name.
        :raises WindowConflict: a window of this number is there, but of other offsets.
        """
        from airflow_kafka_spark.sinks.iceberg.snapshots import PipelineSnapshots

        with self.open() as lake:
            table = lake.load(f"looking for window {window}")
            if table is None:
                return None
            found = PipelineSnapshots.of(table.metadata, window.pipeline).find(window.number)
            if found is None:
                return None
            refuse_other(found.applied, window, self.uri)
            if found.applied.replay < window.replay:
                return None
            # The attempt may have died before its metadata was durable, and the caller commits Kafka's offsets past it.
            lake.flush(table, table.metadata_location)
            return found.applied

    def begin(self, window: Window, splits: Sequence[Split], shape: Shape) -> IcebergWindowWriter:
        """Begin an attempt: create or evolve the table, and remove what earlier attempts have left.

        Before anything of an attempt is removed, a snapshot without data takes the pipeline's tag further, so that the attempt
        can commit nothing any more.
        """
        from airflow_kafka_spark.sinks.iceberg.writer import begin_attempt

        return begin_attempt(self, window, splits, shape)
