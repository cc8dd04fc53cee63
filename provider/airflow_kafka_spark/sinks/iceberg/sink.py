"""The Iceberg sink: each window becomes one snapshot of an Iceberg table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from airflow_kafka_spark.errors import KafkaSparkError, Problem, WindowConflict
from airflow_kafka_spark.sinks.base import Shape
from airflow_kafka_spark.sinks.iceberg.options import IcebergSinkOptions
from airflow_kafka_spark.sinks.lake.sink import LakeSink
from airflow_kafka_spark.windows.binding import SERVER, Endpoint
from airflow_kafka_spark.windows.model import ELSEWHERE, Applied, Split, Window
from airflow_kafka_spark.windows.times import get_current_milliseconds, parse_iso, to_milliseconds

if TYPE_CHECKING:
    from airflow_kafka_spark.sinks.iceberg.comparison import ComparedIcebergTable
    from airflow_kafka_spark.sinks.iceberg.snapshots import LoadedIceberg
    from airflow_kafka_spark.sinks.iceberg.writer import IcebergWindowWriter


@dataclass(frozen=True)
class IcebergSink(IcebergSinkOptions, LakeSink):
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
    :param partition_by: the partition fields of a table that is created: columns, ``bucket(N, column)``, ``truncate(N, column)``,
        ``year(column)``, ``month(column)``, ``day(column)``, ``hour(column)``. A table that exists has to be partitioned in this
        way; without this option, it may be partitioned in any way. Default: none.
    :param auto_create: True (default): namespace and table are created with the columns of the rows if they do not exist. False:
        a missing table is refused before Spark starts.
    :param auto_evolve: True: columns of the rows that the table lacks, and such members of structures, are added to it, as
        optional ones. Default False: such rows are refused before Spark starts. Numbers and texts never change their type.
    :param compression: ``none``, ``snappy``, ``gzip``, ``zstd``, ``lz4``. Default None: the table's
        ``write.parquet.compression-codec``, else ``zstd``.
    :param options: ``max_open_files`` per task if partitioned (default 64), ``max_rows_per_group`` (default 500,000) and
        ``max_bytes_per_group`` (default 64 MiB) of a row group. All others are passed to pyarrow's ``ParquetWriter``. Default:
        none.
    :param table_properties: properties of a table that is created, for instance ``write.metadata.delete-after-commit.enabled``.
        Default: none.
    :param optimize: number of windows of a pipeline after which the table's small files are joined, in a separate commit, on the
        Airflow worker. The window is committed before, and stays if the compaction fails, which is logged. Windows of data
        intervals are not counted. A replay of an appended window that was compacted needs ``window_column``. Default None: never.
    """

    template_fields: ClassVar[Sequence[str]] = ("table", "conn_id", "branch", "key", "window_column")

    @property
    def asset_uri(self) -> str:
        """``iceberg://<conn_id>/<namespace>/<table>``."""
        return self.uri

    def find_destination(self) -> Endpoint:
        """Return the catalog, the table in it, and the branch.

        :raises ConnectionInvalid: the connection cannot be used.
        """
        access = self.open().access
        return Endpoint({"table": self.table, SERVER: access.address, "catalog": access.catalog, "branch": self.branch})

    def validate(self, shape: Shape) -> list[Problem]:
        """Return the problems of options, types, catalog and table. Writes nothing."""
        from airflow_kafka_spark.sinks.iceberg.validation import find_iceberg_sink_problems

        return find_iceberg_sink_problems(self, shape)

    def find_target_problems(self) -> list[Problem]:
        """Return the problems of connection, catalog and table."""
        from airflow_kafka_spark.sinks.iceberg.validation import find_table_problems

        return find_table_problems(self)

    def find_compared_table(self) -> ComparedIcebergTable:
        """Return the branch of the table, which the task reads."""
        from airflow_kafka_spark.sinks.iceberg.comparison import ComparedIcebergTable

        return ComparedIcebergTable(self)

    @contextmanager
    def load_table(self, doing: str) -> Iterator[LoadedIceberg | None]:
        """Return the table as it is now. Leaving it closes the catalog."""
        from airflow_kafka_spark.sinks.iceberg.snapshots import LoadedIceberg

        with self.open() as lake:
            table = lake.load(doing)
            try:
                yield LoadedIceberg(table, lake, self.branch) if table is not None else None
            except KafkaSparkError:
                raise
            except Exception as error:  # each catalog and store has errors of its own
                raise lake.make_unavailable_error(doing, error) from error

    def find_applied(self, window: Window) -> Applied | None:
        """Return the record of the window, or None if it is not committed.

        The record of a data interval of long ago may have expired with its tag. Then the files of the interval show that it was
        committed, also if it is planned anew after a ``forget``.

        :raises ForeignOffsets: a window of this number is there, of another cluster or of another topic of the same name.
        :raises WindowConflict: a window of this number is there, but of other offsets; or it is unknown if it was committed.
        """
        from airflow_kafka_spark.sinks.iceberg.snapshots import INTERVAL_TAG_DAYS, WINDOW

        found, planned = super().find_applied(window), to_milliseconds(parse_iso(window.planned_at)) if window.planned_at else 0
        if found is not None or window.interval is None or window.replay or window.after == ELSEWHERE:
            return found
        oldest, earliest = get_current_milliseconds() - INTERVAL_TAG_DAYS * 86_400_000, min(planned, window.interval[1])
        if earliest >= oldest:
            return None
        with self.load_table(f"looking for files of window {window}") as table:
            if table is None or table.has_history_since(earliest):
                return None
            if rows := table.count_rows(window.pipeline):
                return Applied.of(window, rows)
        if planned >= oldest:
            return None
        what = f"it was planned at {window.planned_at}, and the snapshots since then have expired, perhaps with its own"
        error = WindowConflict(str(window), what, f"its record in a snapshot (`{WINDOW}`), or files that it has written")
        error.action = (
            "Look for its rows in the table. If they are there, set the state of the task to success. If not, "
            "`airflow kafka-spark rebind <pipeline> --not-running --why ...`, and run the task again"
        )
        raise error

    def has_lost(self, window: Window) -> bool:
        """Return True if the table has no record of a window, and has all snapshots since the window was planned."""
        if super().find_applied(window) is not None:
            return False
        with self.load_table(f"looking for window {window}") as table:
            return table is None or table.has_history_since(to_milliseconds(parse_iso(window.planned_at)))

    def begin(self, window: Window, splits: Sequence[Split], shape: Shape) -> IcebergWindowWriter:
        """Begin an attempt: create or evolve the table, and remove the files of earlier attempts.

        Before any file of an attempt is removed, a snapshot without data moves the pipeline's tag, so that the attempt
        can no longer commit.
        """
        from airflow_kafka_spark.sinks.iceberg.writer import begin_attempt

        return begin_attempt(self, window, splits, shape)
