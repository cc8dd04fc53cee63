"""The options of a files sink: the location of its table, and the form of its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from airflow_kafka_spark.arguments import as_names
from airflow_kafka_spark.hooks.object_stores import OBJECT_STORES
from airflow_kafka_spark.sinks.files.directory import FilesTable
from airflow_kafka_spark.sinks.storage.store import TableLocation

if TYPE_CHECKING:
    from airflow_kafka_spark.sinks.storage.tasks.formats import FileSpec


@dataclass(frozen=True)
class FilesSinkOptions:
    """The parameters of :class:`~airflow_kafka_spark.sinks.FilesSink`, which documents them."""

    path: str
    format: str = "parquet"
    partition_by: Sequence[str] = ()
    compression: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    window_column: str = "window"
    auto_evolve: bool = False
    visibility: Literal["rename", "manifest", "listing"] | None = None
    conn_id: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "partition_by", as_names(self.partition_by))

    @property
    def uri(self) -> str:
        """``file:///abs/path``, or a URI such as ``s3://bucket/prefix``; see :meth:`.TableLocation.make_uri`."""
        return TableLocation.make_uri(self.path, OBJECT_STORES)

    @property
    def location(self) -> TableLocation:
        """The location of the table.

        :raises ValueError: ``path`` is not an absolute local path, a ``file://`` URI or that of an object store.
        """
        return TableLocation.parse(str(self.path), OBJECT_STORES)

    @property
    def directory(self) -> Path:
        """The table's directory.

        :raises ValueError: ``path`` is not an absolute local path or ``file://`` URI.
        """
        location = self.location
        if not location.is_local:
            raise ValueError(f"`{self.path}` is not on a file system")
        return Path(location.path)

    @property
    def renames(self) -> bool:
        """True if a window is published by renaming its directory, False if by an entry in a log.

        :raises ValueError: ``path`` names no table.
        """
        return self.visibility == "rename" or (self.visibility is None and self.location.is_local)

    @property
    def spec(self) -> FileSpec:
        """The format, codec and options that tasks write files with."""
        from airflow_kafka_spark.sinks.storage.tasks.formats import FileSpec

        return FileSpec(self.format, self.compression, bool(self.partition_by), dict(self.options))

    @property
    def table(self) -> FilesTable:
        """The table that ``path`` names, where windows are published by renaming their directories.

        :raises ValueError: ``path`` is not an absolute local path or ``file://`` URI.
        """
        return FilesTable(self.directory, self.window_column)
