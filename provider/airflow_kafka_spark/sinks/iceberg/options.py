"""The options of an Iceberg sink: its catalog and its table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from airflow_kafka_spark.sinks.lake.options import LakeSinkOptions

if TYPE_CHECKING:
    from pyiceberg.table import Table

    from airflow_kafka_spark.sinks.iceberg.catalog import IcebergTable
    from airflow_kafka_spark.sinks.storage.tasks.formats import FileSpec

MAIN = "main"
"""The branch that readers of a table see."""
_CODECS = {"uncompressed": "none"}


@dataclass(frozen=True)
class IcebergSinkOptions(LakeSinkOptions):
    """The parameters of :class:`~airflow_kafka_spark.sinks.IcebergSink`, which documents them."""

    table: str
    conn_id: str = "iceberg_default"
    branch: str = MAIN

    @property
    def uri(self) -> str:
        """``iceberg://<conn_id>/<namespace>/<table>``."""
        return f"iceberg://{self.conn_id}/{self.table.replace('.', '/')}"

    def open(self) -> IcebergTable:
        """Return the table in its catalog, with the present options of the connection. Leaving it closes the catalog.

        :raises ConnectionInvalid: the connection cannot be used.
        """
        from airflow_kafka_spark.sinks.iceberg.catalog import IcebergTable, find_catalog_access

        return IcebergTable(find_catalog_access(self.conn_id), self.table, self.uri)

    def make_table_spec(self, table: Table) -> FileSpec:
        """Return the codec and options that tasks write Parquet files with.

        :param table: its properties name a codec where the sink's options do not.
        """
        codec = self.compression or table.properties.get("write.parquet.compression-codec", "zstd").lower()
        # As Iceberg stores decimals, unless the option is set.
        options = {"store_decimal_as_integer": True, **self.options}
        partitioned = bool(table.spec().fields)
        return replace(self.make_spec(), compression=_CODECS.get(codec, codec), partitioned=partitioned, options=options)
