"""Uploads of S3 that tasks begin and the driver completes: an object of a multipart upload is invisible until it is completed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark import faults
from airflow_kafka_spark.hooks.storage import S3Access
from airflow_kafka_spark.sinks.storage.objects import ObjectTableStore
from airflow_kafka_spark.sinks.storage.store import TableStore

if TYPE_CHECKING:
    import pyarrow as pa

_PART_BYTES = 8 << 20
"""S3 takes parts from 5 MiB on, and 10,000 of them for one object."""
_AT_ONCE = 16


class UploadsGone(OSError):
    """Raised when an upload that a commit names is neither there nor completed."""


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raise errors of botocore as :class:`OSError`."""
    from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-not-found]

    try:
        yield
    except (BotoCoreError, ClientError) as error:
        raise OSError(str(error)) from error


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
        return f"{self.store.place.path.partition('/')[2]}/{path}"

    def _named(self, path: str) -> dict[str, str]:
        return {"Bucket": self.store.place.bucket, "Key": self._key(path)}

    def pending(self, directory: str) -> dict[str, str]:
        """Return the uploads below a directory that are neither completed nor aborted: their paths by id.

        :raises OSError: the store did not answer.
        """
        found, root = {}, len(self._key(""))
        with _os_errors():
            pages = self.client.get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=self.store.place.bucket, Prefix=f"{self._key(directory)}/"):
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
        with _os_errors():
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
        """Abort uploads. Never raises; a rule of the bucket removes what is left.

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
        with _os_errors():
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
        with _os_errors():
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
