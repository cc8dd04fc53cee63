"""The files of a table in an object store (S3, GCS or Azure), and uploads of S3 that tasks begin and the driver completes.

An object of a multipart upload is invisible until the upload is completed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark import faults
from airflow_kafka_spark.hooks.object_stores import S3Access, StoreAccess, find_store_access, store_error
from airflow_kafka_spark.sinks.storage.store import TableLocation, TableStore

if TYPE_CHECKING:
    import obstore
    import obstore.store
    import pyarrow as pa


log = logging.getLogger(__name__)

_PART_BYTES = 8 << 20
_PARTS_AT_ONCE = 2
"""Parts of one file that are sent at the same time: a task may have many open files."""


@contextmanager
def _raise_as_os_errors() -> Iterator[None]:
    """Raise errors of the store's client as :class:`OSError`, those of a user without a right as :class:`PermissionError`."""
    from obstore.exceptions import BaseError, NotFoundError

    try:
        yield
    except FileNotFoundError:
        raise
    except NotFoundError as error:
        raise FileNotFoundError(str(store_error(error))) from error
    except BaseError as error:
        raise store_error(error) from error


@dataclass(frozen=True)
class ObjectTableStore(TableStore):
    """The files of a table in an object store.

    :param bucket_access: the address and credentials of its bucket or container.
    """

    bucket_access: StoreAccess = field(default_factory=S3Access, kw_only=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"location": self.location, "access": self.access, "bucket_access": self.bucket_access}

    @property
    def server(self) -> str:
        """The server that has the bucket, because two servers may have buckets of the same name."""
        return self.bucket_access.server

    @cached_property
    def _objects(self) -> obstore.store.ObjectStore:
        return self.bucket_access.make_object_store(self.location.bucket)

    def _key(self, path: str) -> str:
        prefix = self.location.path.partition("/")[2]
        return f"{prefix}/{path}" if path else prefix

    def put(self, path: str, content: str) -> None:
        import obstore

        with _raise_as_os_errors():
            obstore.put(self._objects, self._key(path), content.encode(), use_multipart=False)

    def create(self, path: str, content: str) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with _raise_as_os_errors():
            try:
                obstore.put(self._objects, self._key(path), content.encode(), mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    def get(self, path: str) -> str | None:
        import obstore

        with suppress(FileNotFoundError), _raise_as_os_errors():
            return bytes(obstore.get(self._objects, self._key(path)).bytes()).decode()
        return None

    def open_input(self, path: str) -> pa.NativeFile:
        import obstore
        import pyarrow as pa

        with _raise_as_os_errors():
            return pa.PythonFile(_Input(obstore.open_reader(self._objects, self._key(path))), mode="r")

    def make(self, path: str) -> None:
        """Do nothing: an object store has no directories."""

    def remove_empty(self, directory: str) -> None:
        """Do nothing: an object store has no directories."""

    def names(self, path: str) -> list[str]:
        import obstore

        begin = f"{self._key(path)}/"
        with _raise_as_os_errors():
            found = obstore.list_with_delimiter(self._objects, begin)
            paths = [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]
        return [name.removeprefix(begin).rstrip("/") for name in paths]

    def names_after(self, directory: str, name: str) -> list[str]:
        begin = f"{self._key(directory)}/"
        return [found["path"].removeprefix(begin) for found in self._list_objects(begin, f"{begin}{name}" if name else None)]

    def list_files_below(self, directory: str) -> list[str]:
        root = len(self._key("")) + 1
        return [found["path"][root:] for found in self._list_objects(f"{self._key(directory)}/")]

    def _list_objects(self, prefix: str, offset: str | None = None) -> Iterator[obstore.ObjectMeta]:
        import obstore

        with _raise_as_os_errors():
            for page in obstore.list(self._objects, prefix, offset=offset):
                yield from page

    def probe(self) -> None:
        import obstore

        with _raise_as_os_errors():
            next(iter(obstore.list(self._objects, f"{self._key('')}/", chunk_size=1)), None)

    def _head(self, path: str) -> obstore.ObjectMeta | None:
        import obstore

        with suppress(FileNotFoundError), _raise_as_os_errors():
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
            log.warning("Files below %s cannot be removed: %s", self.location.uri, error)

    def remove_all(self, path: str) -> None:
        try:
            self._delete([found["path"] for found in self._list_objects(f"{self._key(path)}/")])
        except OSError as error:
            log.warning("%s, which an earlier attempt has left, cannot be removed: %s", self.full(path), error)

    def _delete(self, keys: Sequence[str]) -> None:
        import obstore

        if keys:
            with suppress(FileNotFoundError), _raise_as_os_errors():
                obstore.delete(self._objects, keys)

    def open(self, path: str) -> pa.NativeFile:
        import obstore
        import pyarrow as pa

        with _raise_as_os_errors():
            opened = obstore.open_writer(self._objects, self._key(path), buffer_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE)
        return pa.PythonFile(_Upload(opened), mode="w")


class _Input:
    """An object as Arrow reads a file of Python.

    :param reader: of the store's client.
    """

    closed = False

    def __init__(self, reader: obstore.ReadableFile) -> None:
        self.reader = reader
        self.seek, self.tell = reader.seek, reader.tell

    def read(self, size: int | None = None) -> bytes:
        with _raise_as_os_errors():
            return bytes(self.reader.read(size))

    def close(self) -> None:
        self.closed = True


class _Upload:
    """An object that is being written, with errors that Arrow and the tasks know.

    :param writer: the client's writer.
    """

    def __init__(self, writer: obstore.WritableFile) -> None:
        self.writer = writer
        self.closed = False

    def write(self, data: bytes) -> int:
        with _raise_as_os_errors():
            return self.writer.write(data)

    def flush(self) -> None:
        """Do nothing: an object is there when it is closed."""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            with _raise_as_os_errors():
                self.writer.close()


def open_objects(location: TableLocation, conn_id: str | None) -> TableStore:
    """Return the files of a table on a file system or in any object store, with the credentials of an Airflow connection.

    :param location: the table's location.
    :param conn_id: a connection of type ``aws``, ``google_cloud_platform`` or ``wasb``; None for the credentials of the
        environment. Not used for a local table.
    :raises Exception: the connection does not exist, or gives no credentials.
    """
    if location.is_local:
        return TableStore(location)
    return ObjectTableStore(location, bucket_access=find_store_access(location.scheme, location.account, conn_id))


"""S3 takes parts from 5 MiB on, and 10,000 of them for one object."""
_AT_ONCE = 16


class UploadsGone(OSError):
    """Raised when an upload that a commit names is neither there nor completed."""


@contextmanager
def _raise_s3_as_os_errors() -> Iterator[None]:
    """Raise errors of botocore as :class:`OSError`, those of a user without a right as :class:`PermissionError`."""
    from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-not-found]

    try:
        yield
    except (BotoCoreError, ClientError) as error:
        answer = error.response.get("ResponseMetadata", {}) if isinstance(error, ClientError) else {}
        kind = PermissionError if answer.get("HTTPStatusCode") in (401, 403) else OSError
        raise kind(str(error)) from error


class UploadStore:
    """The uploads below a table in S3.

    :param store: the table.
    """

    def __init__(self, store: TableStore) -> None:
        assert isinstance(store, ObjectTableStore) and isinstance(store.bucket_access, S3Access)
        self.store, self.access = store, store.bucket_access

    @cached_property
    def client(self) -> Any:
        """The client of S3, for all threads."""
        return self.access.client()

    def _key(self, path: str) -> str:
        return f"{self.store.location.path.partition('/')[2]}/{path}"

    def _named(self, path: str) -> dict[str, str]:
        return {"Bucket": self.store.location.bucket, "Key": self._key(path)}

    def pending(self, directory: str) -> dict[str, str]:
        """Return the uploads below a directory that are neither completed nor aborted: their paths by id.

        :raises OSError: the store did not answer.
        """
        found, root = {}, len(self._key(""))
        with _raise_s3_as_os_errors():
            pages = self.client.get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=self.store.location.bucket, Prefix=f"{self._key(directory)}/"):
                for upload in page.get("Uploads", ()):
                    found[upload["UploadId"]] = upload["Key"][root:]
        return found

    def complete(self, files: Sequence[Mapping[str, Any]]) -> None:
        """Complete the uploads of a commit, in any order. Those that are completed already are left as they are.

        :param files: path, upload and parts of each.
        :raises UploadsGone: an upload is gone, and its object is not there.
        :raises OSError: the store did not answer.
        """
        client = self.client

        def one(item: tuple[int, Mapping[str, Any]]) -> None:
            number, file = item
            faults.reached(f"upload.{number}.completing")
            self._complete(client, file)
            faults.reached(f"upload.{number}.completed")

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(one, enumerate(files)))

    def _complete(self, client: Any, file: Mapping[str, Any]) -> None:
        from botocore.exceptions import ClientError

        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(file["parts"], 1)]
        with _raise_s3_as_os_errors():
            try:
                client.complete_multipart_upload(
                    **self._named(file["path"]), UploadId=file["upload"], MultipartUpload={"Parts": parts}
                )
            except ClientError as error:
                # Others may have completed it. Its object's name is of this task attempt alone.
                if file["upload"] in self.pending(file["path"].rpartition("/")[0]):
                    raise
                if self.store.exists(file["path"]):
                    return
                what = f"the upload of {self.store.full(file['path'])} was aborted after its window was committed"
                raise UploadsGone(what) from error

    def abort(self, uploads: Mapping[str, str]) -> None:
        """Abort uploads. Never raises; a rule of the bucket removes the rest.

        :param uploads: as :meth:`pending` returns them.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        for upload, path in uploads.items():
            with suppress(BotoCoreError, ClientError):
                self.client.abort_multipart_upload(**self._named(path), UploadId=upload)

    def open(self, path: str) -> PendingUpload:
        """Begin an upload.

        :raises OSError: the store refused it.
        """
        client = self.client
        with _raise_s3_as_os_errors():
            upload = client.create_multipart_upload(**self._named(path))["UploadId"]
        return PendingUpload(client, {**self._named(path), "UploadId": upload})


class PendingUpload:
    """A file that is sent in parts. Closing it sends the last part, and completes nothing.

    :param client: the client of S3.
    :param named: bucket, key and id of the upload.
    """

    def __init__(self, client: Any, named: Mapping[str, str]) -> None:
        self.client, self.named = client, named
        self.parts: list[str] = []
        self.size = 0
        self.closed = False
        self._waiting = bytearray()

    @property
    def id(self) -> str:
        """The id of the upload."""
        return self.named["UploadId"]

    def write(self, data: bytes) -> int:
        self._waiting += data
        self.size += len(data)
        while len(self._waiting) >= _PART_BYTES:
            self._send(bytes(self._waiting[:_PART_BYTES]))
            del self._waiting[:_PART_BYTES]
        return len(data)

    def flush(self) -> None:
        """Do nothing: parts are sent when they are full."""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            if self._waiting or not self.parts:
                self._send(bytes(self._waiting))
            self._waiting.clear()

    def _send(self, content: bytes) -> None:
        with _raise_s3_as_os_errors():
            sent = self.client.upload_part(**self.named, PartNumber=len(self.parts) + 1, Body=content)
        self.parts.append(sent["ETag"])

    def abort(self) -> None:
        """Remove what was sent. Never raises."""
        from botocore.exceptions import BotoCoreError, ClientError

        self.closed = True
        with suppress(BotoCoreError, ClientError):
            self.client.abort_multipart_upload(**self.named)

    def stream(self) -> pa.NativeFile:
        """Return the file as Arrow writes to it."""
        import pyarrow as pa

        return pa.PythonFile(self, mode="w")
