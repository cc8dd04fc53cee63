"""The files of a table in an object store: S3, GCS or Azure."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.hooks.storage import S3Access, StoreAccess, store_access
from airflow_kafka_spark.sinks.storage.store import TablePlace, TableStore

if TYPE_CHECKING:
    import obstore
    import obstore.store
    import pyarrow as pa

log = logging.getLogger(__name__)

_PART_BYTES = 8 << 20
_PARTS_AT_ONCE = 2
"""Parts of one file that are sent at the same time: a task may have many open files."""


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raise errors of the store's client as :class:`OSError`."""
    from obstore.exceptions import BaseError, NotFoundError

    try:
        yield
    except FileNotFoundError:
        raise
    except NotFoundError as error:
        raise FileNotFoundError(str(error)) from error
    except BaseError as error:
        raise OSError(str(error)) from error


@dataclass(frozen=True)
class ObjectTableStore(TableStore):
    """The files of a table in an object store.

    :param bucket_access: how its bucket or container is reached.
    """

    bucket_access: StoreAccess = field(default_factory=S3Access, kw_only=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"place": self.place, "access": self.access, "bucket_access": self.bucket_access}

    @property
    def server(self) -> str:
        """The server that has the bucket, because two servers may have buckets of the same name."""
        return self.bucket_access.server

    @cached_property
    def _objects(self) -> obstore.store.ObjectStore:
        return self.bucket_access.object_store(self.place.bucket)

    def _key(self, path: str) -> str:
        prefix = self.place.path.partition("/")[2]
        return f"{prefix}/{path}" if path else prefix

    def put(self, path: str, content: str) -> None:
        import obstore

        with _os_errors():
            obstore.put(self._objects, self._key(path), content.encode(), use_multipart=False)

    def create(self, path: str, content: str) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with _os_errors():
            try:
                obstore.put(self._objects, self._key(path), content.encode(), mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    def get(self, path: str) -> str | None:
        import obstore

        with suppress(FileNotFoundError), _os_errors():
            return bytes(obstore.get(self._objects, self._key(path)).bytes()).decode()
        return None

    def make(self, path: str) -> None:
        """Do nothing: an object store has no directories."""

    def remove_empty(self, directory: str) -> None:
        """Do nothing: an object store has no directories."""

    def names(self, path: str) -> list[str]:
        import obstore

        begin = f"{self._key(path)}/"
        with _os_errors():
            found = obstore.list_with_delimiter(self._objects, begin)
            paths = [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]
        return [name.removeprefix(begin).rstrip("/") for name in paths]

    def names_after(self, directory: str, name: str) -> list[str]:
        begin = f"{self._key(directory)}/"
        return [found["path"].removeprefix(begin) for found in self._listed(begin, f"{begin}{name}" if name else None)]

    def files_below(self, directory: str) -> list[str]:
        root = len(self._key("")) + 1
        return [found["path"][root:] for found in self._listed(f"{self._key(directory)}/")]

    def _listed(self, prefix: str, offset: str | None = None) -> Iterator[obstore.ObjectMeta]:
        import obstore

        with _os_errors():
            for page in obstore.list(self._objects, prefix, offset=offset):
                yield from page

    def probe(self) -> None:
        import obstore

        with _os_errors():
            next(iter(obstore.list(self._objects, f"{self._key('')}/", chunk_size=1)), None)

    def _head(self, path: str) -> obstore.ObjectMeta | None:
        import obstore

        with suppress(FileNotFoundError), _os_errors():
            return obstore.head(self._objects, self._key(path))
        return None

    def exists(self, path: str) -> bool:
        return self._head(path) is not None

    def modified(self, path: str) -> float | None:
        found = self._head(path)
        return found["last_modified"].timestamp() if found else None

    def size(self, path: str) -> int:
        found = self._head(path)
        if found is None:
            raise FileNotFoundError(f"{self.full(path)} is not there")
        return found["size"]

    def remove(self, path: str) -> None:
        with suppress(OSError):
            self._delete([self._key(path)])

    def remove_files(self, paths: Sequence[str]) -> None:
        """Remove files, in S3 a thousand by each request. Never raises."""
        try:
            self._delete([self._key(path) for path in paths])
        except OSError as error:
            log.warning("Files below %s cannot be removed: %s", self.place.uri, error)

    def remove_all(self, path: str) -> None:
        try:
            self._delete([found["path"] for found in self._listed(f"{self._key(path)}/")])
        except OSError as error:
            log.warning("%s, which an earlier attempt has left, cannot be removed: %s", self.full(path), error)

    def _delete(self, keys: Sequence[str]) -> None:
        import obstore

        if keys:
            with suppress(FileNotFoundError), _os_errors():
                obstore.delete(self._objects, keys)

    def open(self, path: str) -> pa.NativeFile:
        import obstore
        import pyarrow as pa

        with _os_errors():
            opened = obstore.open_writer(self._objects, self._key(path), buffer_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE)
        return pa.PythonFile(_Upload(opened), mode="w")


class _Upload:
    """An object that is being written, with errors that Arrow and the tasks know.

    :param writer: the client's writer.
    """

    def __init__(self, writer: obstore.WritableFile) -> None:
        self.writer = writer
        self.closed = False

    def write(self, data: bytes) -> int:
        with _os_errors():
            return self.writer.write(data)

    def flush(self) -> None:
        """Do nothing: an object is there when it is closed."""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            with _os_errors():
                self.writer.close()


def open_objects(place: TablePlace, conn_id: str | None) -> TableStore:
    """Return the files of a table on a file system or in any object store, with the credentials of an Airflow connection.

    :param place: where the table is.
    :param conn_id: a connection of type ``aws``, ``google_cloud_platform`` or ``wasb``; None for the credentials of the
        environment. Not used for a local table.
    :raises Exception: the connection does not exist, or gives no credentials.
    """
    if place.is_local:
        return TableStore(place)
    return ObjectTableStore(place, bucket_access=store_access(place.scheme, place.account, conn_id))
