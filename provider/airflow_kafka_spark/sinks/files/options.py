"""The options of a files sink: where the table is, and how its files are written."""

from __future__ import annotations

import os
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors.arguments import names_of
from airflow_kafka_spark.sinks.files.directory import FilesTable

if TYPE_CHECKING:
    from airflow_kafka_spark.sinks.files.tasks.formats import FileSpec

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


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

    def __post_init__(self) -> None:
        object.__setattr__(self, "partition_by", names_of(self.partition_by))

    @property
    def uri(self) -> str:
        """``file:///abs/path``. A path that ``validate`` refuses, or that is not rendered yet, is returned as it is."""
        try:
            return self.directory.as_uri() if "{{" not in self.path else self.path
        except ValueError:
            return str(self.path)

    @property
    def directory(self) -> Path:
        """The table's directory.

        :raises ValueError: ``path`` is not an absolute local path or ``file://`` URI.
        """
        text = str(self.path)
        if text.startswith("file:"):
            parts = urllib.parse.urlsplit(text)
            if parts.netloc not in ("", "localhost"):
                raise ValueError(f"`{self.path}` names the host {parts.netloc}")
            text = urllib.parse.unquote(parts.path)
        elif found := _SCHEME.match(text):
            raise ValueError(f"`{self.path}` is not on a file system: {found.group()} is not supported")
        if not os.path.isabs(text):
            raise ValueError(f"`{self.path}` is not an absolute path")
        path = Path(os.path.normpath(text))
        if path == path.parent:
            raise ValueError("the root directory cannot be a table")
        return path

    @property
    def spec(self) -> FileSpec:
        """The format, codec and options that tasks write files with."""
        from airflow_kafka_spark.sinks.files.tasks.formats import FileSpec

        return FileSpec(self.format, self.compression, bool(self.partition_by), dict(self.options))

    @property
    def table(self) -> FilesTable:
        """The table that ``path`` names.

        :raises ValueError: ``path`` is not an absolute local path or ``file://`` URI.
        """
        return FilesTable(self.directory, self.window_column)
