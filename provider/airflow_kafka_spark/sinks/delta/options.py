"""The options of a Delta sink: where the table is, and how its files are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import SinkUnavailable
from airflow_kafka_spark.errors.arguments import names_of
from airflow_kafka_spark.sinks.delta.place import TablePlace, TableStore, open_store

if TYPE_CHECKING:
    from airflow_kafka_spark.sinks.files.tasks.formats import FileSpec


@dataclass(frozen=True)
class DeltaSinkOptions:
    """The parameters of :class:`~airflow_kafka_spark.sinks.DeltaSink`, which documents them."""

    path: str
    conn_id: str | None = None
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
    def place(self) -> TablePlace:
        """The table's place.

        :raises ValueError: ``path`` is neither an absolute local path, a ``file://`` nor an ``s3://`` URI.
        """
        return TablePlace.parse(self.path)

    @property
    def uri(self) -> str:
        """``file:///abs/path`` or ``s3://bucket/prefix``. A path that ``validate`` refuses, or that is not rendered yet, is
        returned as it is."""
        try:
            return self.place.uri if "{{" not in self.path else self.path
        except ValueError:
            return str(self.path)

    @property
    def store(self) -> TableStore:
        """The table's files, with the connection's credentials of this moment.

        :raises SinkUnavailable: the connection cannot be used.
        """
        try:
            return open_store(self.place, self.conn_id)
        except Exception as error:  # the Amazon provider has errors of its own
            raise SinkUnavailable(self.uri, "looking up its connection", f"{type(error).__name__}: {error}") from error

    @property
    def spec(self) -> FileSpec:
        """The codec and options that tasks write Parquet files with."""
        from airflow_kafka_spark.sinks.files.tasks.formats import FileSpec

        return FileSpec("parquet", self.compression, bool(self.partition_by), dict(self.options))
