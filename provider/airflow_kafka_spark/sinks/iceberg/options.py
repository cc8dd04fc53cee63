"""The options of an Iceberg sink: which table of which catalog, and how its files are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors.arguments import names_of

if TYPE_CHECKING:
    from airflow_kafka_spark.sinks.files.tasks.formats import FileSpec
    from airflow_kafka_spark.sinks.iceberg.catalog import IcebergTable

MAIN = "main"
"""The branch that readers of a table see."""
_CODECS = {"uncompressed": "none"}


@dataclass(frozen=True)
class IcebergSinkOptions:
    """The parameters of :class:`~airflow_kafka_spark.sinks.IcebergSink`, which documents them."""

    table: str
    conn_id: str = "iceberg_default"
    branch: str = MAIN
    mode: str = "append"
    partition_by: Sequence[str] = ()
    auto_create: bool = True
    auto_evolve: bool = False
    compression: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    table_properties: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "partition_by", names_of(self.partition_by))

    @property
    def uri(self) -> str:
        """``iceberg://<conn_id>/<namespace>/<table>``."""
        return f"iceberg://{self.conn_id}/{self.table.replace('.', '/')}"

    def open(self) -> IcebergTable:
        """Return the table in its catalog, with the connection's options of this moment. Leaving it closes the catalog.

        :raises ConnectionInvalid: the connection cannot be used.
        """
        from airflow_kafka_spark.sinks.iceberg.catalog import IcebergTable, catalog_access

        return IcebergTable(catalog_access(self.conn_id), self.table, self.uri)

    def spec(self, properties: Mapping[str, str], partitioned: bool) -> FileSpec:
        """Return the codec and options that tasks write Parquet files with.

        :param properties: the table's properties, which name a codec where the sink's options do not.
        """
        from airflow_kafka_spark.sinks.files.tasks.formats import FileSpec

        codec = self.compression or properties.get("write.parquet.compression-codec", "zstd").lower()
        # As Iceberg has decimals, unless the option says otherwise.
        options = {"store_decimal_as_integer": True, **self.options}
        return FileSpec("parquet", _CODECS.get(codec, codec), partitioned, options)
