"""The options of a Delta sink, and the location of its table."""

from __future__ import annotations

import re
from dataclasses import dataclass

from airflow_kafka_spark.errors import ConnectionInvalid, SinkUnavailable
from airflow_kafka_spark.sinks.lake.options import LakeSinkOptions
from airflow_kafka_spark.sinks.storage.store import TableLocation, TableStore, open_store

_MISREAD = re.compile(r"%[0-9A-Fa-f]{2}|[\\\[\]^|\x00-\x1f\x7f]")
"""Characters of a path that deltalake 1.6 misreads: as an escape or as a separator, or it refuses the path."""


@dataclass(frozen=True)
class DeltaSinkOptions(LakeSinkOptions):
    """The parameters of :class:`~airflow_kafka_spark.sinks.DeltaSink`, which documents them."""

    path: str
    conn_id: str | None = None

    @property
    def location(self) -> TableLocation:
        """The table's location.

        :raises ValueError: ``path`` is neither an absolute local path, a ``file://`` nor an ``s3://`` URI, or one that deltalake
            cannot open.
        """
        found = TableLocation.parse(self.path)
        if misread := _MISREAD.search(found.path):
            raise ValueError(f"`{found.path}` has {misread[0]!r} in it, which deltalake reads as something else")
        return found

    @property
    def uri(self) -> str:
        """``file:///abs/path`` or ``s3://bucket/prefix``; see :meth:`.TableLocation.make_uri`."""
        return TableLocation.make_uri(self.path)

    @property
    def store(self) -> TableStore:
        """The table's files, with the present credentials of the connection.

        :raises ConnectionInvalid: the connection does not exist, or is of another type.
        :raises SinkUnavailable: the connection cannot be used.
        """
        try:
            return open_store(self.location, self.conn_id)
        except ConnectionInvalid:
            raise
        except Exception as error:  # the Amazon provider has errors of its own
            raise SinkUnavailable(self.uri, "looking up its connection", f"{type(error).__name__}: {error}") from error
