"""What a FilesSource was told: its parts go by it, and need not know the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_kafka_spark.sources.files.store import store_of


@dataclass(frozen=True)
class FilesSettings:
    """The arguments of :class:`~airflow_kafka_spark.sources.files.source.FilesSource`, which explains them."""

    path: str
    format: str = "parquet"
    glob: str = "*"
    recursive: bool = False
    schema: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    split_bytes: int = 64 << 20
    max_files: int | None = None
    max_bytes: int | None = None
    min_age: float = 0.0
    on_change: str = "fail"
    allowed_lateness: float = 6 * 3600.0
    conn_id: str | None = None

    @property
    def uri(self) -> str:
        """``file:///abs/path`` or ``s3a://bucket/prefix``; a path that :meth:`validate` refuses, or that is not rendered yet, is
        returned as it is."""
        try:
            return store_of(self.path, None).uri if "{{" not in str(self.path) else self.path
        except ValueError:
            return str(self.path)
