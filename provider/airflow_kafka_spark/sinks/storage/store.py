"""The location of a table, the names of its files, and the store that holds them: a mounted file system, or an object store (S3,
GCS or Azure) with uploads that tasks begin and the driver completes.

An object of a multipart upload is invisible until the upload is completed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import urllib.parse
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark import faults
from airflow_kafka_spark.hooks.object_stores import (
    AZURE,
    S3Access,
    StoreAccess,
    describe_store_error,
    find_s3_access,
    find_store_access,
    make_local_path,
    parse_scheme,
)
from airflow_kafka_spark.windows.model import OffsetRange

if TYPE_CHECKING:
    import obstore
    import obstore.store
    import pyarrow as pa
    import pyarrow.fs


log = logging.getLogger(__name__)

_SCHEMES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "abfs": AZURE, "wasbs": AZURE, "wasb": AZURE}


LONGEST_NAME = 255
"""Maximum length of a name on a file system, in bytes."""


def to_safe_name(name: str, longest: int) -> str:
    """Return ``name`` if it is a safe file name, else a safe name with a hash. Different names have different results.

    :param name: the name of a pipeline or a topic.
    :param longest: maximum number of characters that are kept of a name.
    """
    # A leading underscore or dot would hide the file from Spark and Arrow: `_orders` is a legal topic.
    if len(name) <= longest and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        return name
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip("._-")[:longest]
    # No safe name contains `~`, so that the result differs from all of them.
    return f"{safe}~{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"


def make_pipeline_slug(pipeline: str) -> str:
    """Return the name of a pipeline in a form for names of files and directories."""
    return to_safe_name(pipeline, 120)


def make_file_stem(split: OffsetRange, part: int = 0) -> str:
    """Return a file's name without its suffix: topic, partition and offsets, and a number from the second part on."""
    stem = f"{to_safe_name(split.topic, 140)}-{split.partition}-{split.start:020d}-{split.end:020d}"
    return f"{stem}-part{part:05d}" if part else stem


def remove_tildes(name: str) -> str:
    """Return the name of a data file or its directory without ``~``, which delta-rs escapes in one place and not in another: its
    OPTIMIZE would not find the file."""
    return name.replace("~", "__")


NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"

# The characters that Spark escapes (ExternalCatalogUtils.escapePathName), and NUL, which no file system allows.
_ESCAPED = re.compile(r"""[\x00-\x1f\x7f"#%'*/:=?\\{\[\]^]""")


def escape(text: str) -> str:
    """Return a partition column's name or value as Spark writes it into a path."""
    return _ESCAPED.sub(lambda found: f"%{ord(found.group()):02X}", text)


def make_partition_directory(column: str, value: str | None) -> str:
    """Return ``column=value``. Null and, as in Spark, the empty string become ``__HIVE_DEFAULT_PARTITION__``."""
    return f"{escape(column)}={escape(value) if value else NULL_PARTITION}"


def flush(path: str | Path) -> None:
    """Flush a closed file, or the names in a directory, to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True)
class TableLocation:
    """The location of a table.

    :param scheme: ``file``, ``s3``, ``gs`` or ``abfss``.
    :param path: an absolute path, ``bucket/prefix``, or ``container@account-host/prefix``.
    """

    scheme: str
    path: str

    @classmethod
    def parse(cls, text: str, schemes: Sequence[str] = ("s3",)) -> TableLocation:
        """Return the location that a path or URI names.

        :param schemes: the object stores that are supported.
        :raises ValueError: it is neither an absolute local path, nor a ``file://`` URI, nor one of these schemes.
        """
        scheme = _SCHEMES.get(parse_scheme(text), parse_scheme(text))
        if scheme in schemes:
            parts = urllib.parse.urlsplit(text)
            if not parts.netloc or not parts.path.strip("/") or ("@" in parts.netloc) != (scheme == AZURE):
                form = "abfss://container@account.dfs.core.windows.net" if scheme == AZURE else f"{scheme}://bucket"
                raise ValueError(f"`{text}` is not of the form {form}/prefix")
            return cls(scheme, f"{parts.netloc}/{parts.path.strip('/')}")
        if scheme != "file":
            raise ValueError(f"`{text}` is in a store that is not supported: {scheme}")
        path = make_local_path(text)
        if path == os.path.dirname(path):
            raise ValueError("the root directory cannot be a table")
        return cls("file", path)

    @classmethod
    def make_uri(cls, text: object, schemes: Sequence[str] = ("s3",)) -> str:
        """Return the URI of the location that a path or URI names. A text that names none, or that is not rendered yet, is
        returned unchanged.

        :param schemes: the object stores that are supported.
        """
        try:
            return str(text) if "{{" in str(text) else cls.parse(str(text), schemes).uri
        except ValueError:
            return str(text)

    @property
    def bucket(self) -> str:
        """The bucket or container."""
        return self.path.partition("/")[0].partition("@")[0]

    @property
    def account(self) -> str:
        """The host of the storage account, which only Azure's locations name; else ""."""
        return self.path.partition("/")[0].partition("@")[2]

    @property
    def is_local(self) -> bool:
        """True for a mounted file system."""
        return self.scheme == "file"

    @property
    def directory(self) -> str:
        """The directory that a local path leads to through symbolic links; empty if there are none, and for object stores.

        If a link is changed between two attempts at a window, the location differs.
        """
        found = os.path.realpath(self.path) if self.is_local else self.path
        return found if found != self.path else ""

    @property
    def uri(self) -> str:
        """The location as a URI without credentials."""
        return Path(self.path).as_uri() if self.is_local else f"{self.scheme}://{self.path}"

    @property
    def path_or_uri(self) -> str:
        """The location as deltalake expects it: a path if it is local, else a URI."""
        return self.path if self.is_local else f"{self.scheme}://{self.path}"


@dataclass(frozen=True)
class TableStore:
    """The files of a table, on a file system or in S3 by Arrow. Paths are relative to it.

    :param location: the table's location.
    :param access: the address and credentials of S3; None for a local table.
    """

    location: TableLocation
    access: S3Access | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"location": self.location, "access": self.access}

    @cached_property
    def filesystem(self) -> pyarrow.fs.FileSystem:
        """The file system of Arrow that holds the table."""
        import pyarrow.fs

        return self.access.make_filesystem() if self.access else pyarrow.fs.LocalFileSystem()

    @property
    def storage_options(self) -> Mapping[str, str]:
        """The options of deltalake."""
        return self.access.storage_options if self.access else {}

    @property
    def server(self) -> str:
        """The server of S3 that has the table, because two servers may have buckets of the same name; "" for a local table."""
        return self.access.server if self.access else ""

    def make_full_path(self, path: str) -> str:
        """Return a path in the form of :attr:`filesystem`."""
        return f"{self.location.path}/{path}"

    def put(self, path: str, content: str) -> None:
        """Write a small file in one step, durably. A file of this name is replaced.

        :raises OSError: the store refused it.
        """
        if not self.location.is_local:
            with self.filesystem.open_output_stream(self.make_full_path(path)) as stream:
                stream.write(content.encode())
            return
        target = Path(self.make_full_path(path))
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        try:
            temporary.write_text(content, encoding="utf-8")
            flush(temporary)
            os.rename(temporary, target)
            flush(target.parent)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def create(self, path: str, content: str) -> bool:
        """Write a small file in one step, durably, unless there is one of this name (``link(2)``, in an object store
        ``If-None-Match: *`` or ``x-goog-if-generation-match: 0``).

        :return: False if the file exists. In an object store it may be this file, written by a request whose answer was lost.
        :raises OSError: the store refused it, or it is unknown if it was written.
        """
        target = Path(self.make_full_path(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        try:
            temporary.write_text(content, encoding="utf-8")
            flush(temporary)
            os.link(temporary, target)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        flush(target.parent)
        return True

    def list_names_after(self, directory: str, name: str) -> list[str]:
        """Return the names of the files in a directory that sort after a name, in their order.

        In an object store the names before it are not listed.

        :raises OSError: the store did not answer.
        """
        with suppress(FileNotFoundError):
            return sorted(
                found for found in os.listdir(self.make_full_path(directory)) if found > name and not found.startswith(".")
            )
        return []

    def probe(self) -> None:
        """Ask the store for one name below the table. This is one request, regardless of the number of files.

        :raises OSError: the bucket does not exist, or may not be listed.
        """
        self.list_names("")

    def list_files_below(self, directory: str) -> list[str]:
        """Return the paths of all files in a directory and in those within it.

        :raises OSError: the store did not answer.
        """
        import pyarrow.fs

        selector = pyarrow.fs.FileSelector(self.make_full_path(directory), allow_not_found=True, recursive=True)
        found = self.filesystem.get_file_info(selector)
        return [info.path.removeprefix(self.make_full_path("")) for info in found if info.type == pyarrow.fs.FileType.File]

    def get(self, path: str) -> str | None:
        """Return the content of a small file, or None if it does not exist.

        :raises OSError: the store did not answer.
        """
        try:
            with self.filesystem.open_input_stream(self.make_full_path(path)) as stream:
                return stream.read().decode()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def open_input(self, path: str) -> pa.NativeFile:
        """Open a file for reading.

        :raises OSError: the store did not answer, or there is no such file.
        """
        return self.filesystem.open_input_file(self.make_full_path(path))

    def make(self, path: str) -> None:
        """Create a directory on a file system. S3 has no directories.

        :raises OSError: it cannot be created.
        """
        if self.location.is_local:
            os.makedirs(self.make_full_path(path), exist_ok=True)

    def make_within(self, path: str) -> None:
        """Create a directory within one that exists, on a file system. S3 has no directories.

        :raises OSError: it cannot be created, or the directory around it is gone.
        """
        if self.location.is_local:
            with suppress(FileExistsError):
                os.mkdir(self.make_full_path(path))

    def list_names(self, path: str) -> list[str]:
        """Return the names of the entries of a directory; an empty list if it does not exist.

        :raises OSError: the store did not answer.
        """
        import pyarrow.fs

        selector = pyarrow.fs.FileSelector(self.make_full_path(path), allow_not_found=True)
        return [info.base_name for info in self.filesystem.get_file_info(selector)]

    def exists(self, path: str) -> bool:
        """Return True if there is a file or directory of this name.

        :raises OSError: the store did not answer.
        """
        import pyarrow.fs

        return self.filesystem.get_file_info(self.make_full_path(path)).type != pyarrow.fs.FileType.NotFound

    def read_modified_time(self, path: str) -> float | None:
        """Return the time at which a file was written, in seconds since 1970; None if it does not exist.

        :raises OSError: the store did not answer.
        """
        mtime = self.filesystem.get_file_info(self.make_full_path(path)).mtime_ns
        return None if mtime is None else mtime / 1e9

    def read_size(self, path: str) -> int:
        """Return the number of bytes of a file that was written.

        :raises OSError: the store did not answer.
        """
        return int(self.filesystem.get_file_info(self.make_full_path(path)).size)

    def remove(self, path: str) -> None:
        """Remove a file. Never raises."""
        with suppress(OSError):
            self.filesystem.delete_file(self.make_full_path(path))

    def remove_files(self, paths: Sequence[str]) -> None:
        """Remove files. Never raises."""
        for path in paths:
            self.remove(path)

    def remove_all(self, path: str) -> None:
        """Remove a directory and everything in it. Never raises; the next attempt removes the rest."""
        try:
            self.filesystem.delete_dir(self.make_full_path(path))
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("%s, which an earlier attempt has left, cannot be removed: %s", self.make_full_path(path), error)

    def remove_empty(self, directory: str) -> None:
        """Remove a directory and those within it if they hold no file. S3 has no directories. Never raises."""
        if self.location.is_local:
            for path, _, _ in os.walk(self.make_full_path(directory), topdown=False):
                with suppress(OSError):
                    os.rmdir(path)

    def open(self, path: str) -> pa.NativeFile:
        """Open a new file for writing.

        :raises OSError: it cannot be written.
        """
        import pyarrow as pa

        if self.location.is_local:
            return pa.OSFile(self.make_full_path(path), "wb")
        return self.filesystem.open_output_stream(self.make_full_path(path))


def open_store(location: TableLocation, conn_id: str | None) -> TableStore:
    """Return the files of a table, with the credentials of an Airflow connection.

    :param location: the table's location.
    :param conn_id: a connection of type ``aws``; None for the credentials of the environment. Not used for a local table.
    :raises Exception: the connection does not exist, or gives no credentials.
    """
    return TableStore(location) if location.is_local else TableStore(location, find_s3_access(conn_id))


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
        raise FileNotFoundError(str(describe_store_error(error))) from error
    except BaseError as error:
        raise describe_store_error(error) from error


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

    def _make_key(self, path: str) -> str:
        prefix = self.location.path.partition("/")[2]
        return f"{prefix}/{path}" if path else prefix

    def put(self, path: str, content: str) -> None:
        import obstore

        with _raise_as_os_errors():
            obstore.put(self._objects, self._make_key(path), content.encode(), use_multipart=False)

    def create(self, path: str, content: str) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with _raise_as_os_errors():
            try:
                obstore.put(self._objects, self._make_key(path), content.encode(), mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    def get(self, path: str) -> str | None:
        import obstore

        with suppress(FileNotFoundError), _raise_as_os_errors():
            return bytes(obstore.get(self._objects, self._make_key(path)).bytes()).decode()
        return None

    def open_input(self, path: str) -> pa.NativeFile:
        import obstore
        import pyarrow as pa

        with _raise_as_os_errors():
            return pa.PythonFile(_Input(obstore.open_reader(self._objects, self._make_key(path))), mode="r")

    def make(self, path: str) -> None:
        """Do nothing: an object store has no directories."""

    def remove_empty(self, directory: str) -> None:
        """Do nothing: an object store has no directories."""

    def list_names(self, path: str) -> list[str]:
        import obstore

        begin = f"{self._make_key(path)}/"
        with _raise_as_os_errors():
            found = obstore.list_with_delimiter(self._objects, begin)
            paths = [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]
        return [name.removeprefix(begin).rstrip("/") for name in paths]

    def list_names_after(self, directory: str, name: str) -> list[str]:
        begin = f"{self._make_key(directory)}/"
        return [found["path"].removeprefix(begin) for found in self._list_objects(begin, f"{begin}{name}" if name else None)]

    def list_files_below(self, directory: str) -> list[str]:
        root = len(self._make_key("")) + 1
        return [found["path"][root:] for found in self._list_objects(f"{self._make_key(directory)}/")]

    def _list_objects(self, prefix: str, offset: str | None = None) -> Iterator[obstore.ObjectMeta]:
        import obstore

        with _raise_as_os_errors():
            for page in obstore.list(self._objects, prefix, offset=offset):
                yield from page

    def probe(self) -> None:
        import obstore

        with _raise_as_os_errors():
            next(iter(obstore.list(self._objects, f"{self._make_key('')}/", chunk_size=1)), None)

    def _fetch_head(self, path: str) -> obstore.ObjectMeta | None:
        import obstore

        with suppress(FileNotFoundError), _raise_as_os_errors():
            return obstore.head(self._objects, self._make_key(path))
        return None

    def exists(self, path: str) -> bool:
        return self._fetch_head(path) is not None

    def read_modified_time(self, path: str) -> float | None:
        found = self._fetch_head(path)
        return found["last_modified"].timestamp() if found else None

    def read_size(self, path: str) -> int:
        found = self._fetch_head(path)
        if found is None:
            raise FileNotFoundError(f"{self.make_full_path(path)} is not there")
        return found["size"]

    def remove(self, path: str) -> None:
        with suppress(OSError):
            self._delete([self._make_key(path)])

    def remove_files(self, paths: Sequence[str]) -> None:
        """Remove files, in S3 a thousand by each request. Never raises."""
        try:
            self._delete([self._make_key(path) for path in paths])
        except OSError as error:
            log.warning("Files below %s cannot be removed: %s", self.location.uri, error)

    def remove_all(self, path: str) -> None:
        try:
            self._delete([found["path"] for found in self._list_objects(f"{self._make_key(path)}/")])
        except OSError as error:
            log.warning("%s, which an earlier attempt has left, cannot be removed: %s", self.make_full_path(path), error)

    def _delete(self, keys: Sequence[str]) -> None:
        import obstore

        if keys:
            with suppress(FileNotFoundError), _raise_as_os_errors():
                obstore.delete(self._objects, keys)

    def open(self, path: str) -> pa.NativeFile:
        import obstore
        import pyarrow as pa

        with _raise_as_os_errors():
            opened = obstore.open_writer(
                self._objects, self._make_key(path), buffer_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE
            )
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
            # Arrow also writes buffers of its own, whose bytes are signed.
            return self.writer.write(memoryview(data).cast("B"))

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
    from botocore.exceptions import BotoCoreError, ClientError

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
        return self.access.make_client()

    def _make_key(self, path: str) -> str:
        return f"{self.store.location.path.partition('/')[2]}/{path}"

    def _make_arguments(self, path: str) -> dict[str, str]:
        return {"Bucket": self.store.location.bucket, "Key": self._make_key(path)}

    def list_pending(self, directory: str) -> dict[str, str]:
        """Return the uploads below a directory that are neither completed nor aborted: their paths by id.

        :raises OSError: the store did not answer.
        """
        found, root = {}, len(self._make_key(""))
        with _raise_s3_as_os_errors():
            pages = self.client.get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=self.store.location.bucket, Prefix=f"{self._make_key(directory)}/"):
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

        def complete_one(item: tuple[int, Mapping[str, Any]]) -> None:
            number, file = item
            faults.reached(f"upload.{number}.completing")
            self._complete(client, file)
            faults.reached(f"upload.{number}.completed")

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(complete_one, enumerate(files)))

    def _complete(self, client: Any, file: Mapping[str, Any]) -> None:
        from botocore.exceptions import ClientError

        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(file["parts"], 1)]
        with _raise_s3_as_os_errors():
            try:
                client.complete_multipart_upload(
                    **self._make_arguments(file["path"]), UploadId=file["upload"], MultipartUpload={"Parts": parts}
                )
            except ClientError as error:
                # Others may have completed it. Its object's name is of this task attempt alone.
                if file["upload"] in self.list_pending(file["path"].rpartition("/")[0]):
                    raise
                if self.store.exists(file["path"]):
                    return
                what = f"the upload of {self.store.make_full_path(file['path'])} was aborted after its window was committed"
                raise UploadsGone(what) from error

    def abort(self, uploads: Mapping[str, str]) -> None:
        """Abort uploads. Never raises; a rule of the bucket removes the rest.

        :param uploads: as :meth:`list_pending` returns them.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        for upload, path in uploads.items():
            with suppress(BotoCoreError, ClientError):
                self.client.abort_multipart_upload(**self._make_arguments(path), UploadId=upload)

    def open(self, path: str) -> PendingUpload:
        """Begin an upload.

        :raises OSError: the store refused it.
        """
        client = self.client
        with _raise_s3_as_os_errors():
            upload = client.create_multipart_upload(**self._make_arguments(path))["UploadId"]
        return PendingUpload(client, {**self._make_arguments(path), "UploadId": upload})


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

    def open_stream(self) -> pa.NativeFile:
        """Return the file as Arrow writes to it."""
        import pyarrow as pa

        return pa.PythonFile(self, mode="w")
