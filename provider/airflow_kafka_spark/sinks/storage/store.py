"""The location of a table, the names of its files, and the store that holds them: a mounted file system, or an object store."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import urllib.parse
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.hooks.object_stores import AZURE, S3Access, find_s3_access, make_local_path, parse_scheme
from airflow_kafka_spark.windows.model import OffsetRange

if TYPE_CHECKING:
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
    def uri_of(cls, text: object, schemes: Sequence[str] = ("s3",)) -> str:
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

        return self.access.filesystem() if self.access else pyarrow.fs.LocalFileSystem()

    @property
    def storage_options(self) -> Mapping[str, str]:
        """The options of deltalake."""
        return self.access.storage_options if self.access else {}

    @property
    def server(self) -> str:
        """The server of S3 that has the table, because two servers may have buckets of the same name; "" for a local table."""
        return self.access.server if self.access else ""

    def full(self, path: str) -> str:
        """Return a path in the form of :attr:`filesystem`."""
        return f"{self.location.path}/{path}"

    def put(self, path: str, content: str) -> None:
        """Write a small file in one step, durably. A file of this name is replaced.

        :raises OSError: the store refused it.
        """
        if not self.location.is_local:
            with self.filesystem.open_output_stream(self.full(path)) as stream:
                stream.write(content.encode())
            return
        target = Path(self.full(path))
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
        target = Path(self.full(path))
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

    def names_after(self, directory: str, name: str) -> list[str]:
        """Return the names of the files in a directory that sort after a name, in their order.

        In an object store the names before it are not listed.

        :raises OSError: the store did not answer.
        """
        with suppress(FileNotFoundError):
            return sorted(found for found in os.listdir(self.full(directory)) if found > name and not found.startswith("."))
        return []

    def probe(self) -> None:
        """Ask the store for one name below the table. This is one request, regardless of the number of files.

        :raises OSError: the bucket does not exist, or may not be listed.
        """
        self.names("")

    def list_files_below(self, directory: str) -> list[str]:
        """Return the paths of all files in a directory and in those within it.

        :raises OSError: the store did not answer.
        """
        import pyarrow.fs

        selector = pyarrow.fs.FileSelector(self.full(directory), allow_not_found=True, recursive=True)
        found = self.filesystem.get_file_info(selector)
        return [info.path.removeprefix(self.full("")) for info in found if info.type == pyarrow.fs.FileType.File]

    def get(self, path: str) -> str | None:
        """Return the content of a small file, or None if it does not exist.

        :raises OSError: the store did not answer.
        """
        try:
            with self.filesystem.open_input_stream(self.full(path)) as stream:
                return stream.read().decode()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def open_input(self, path: str) -> pa.NativeFile:
        """Open a file for reading.

        :raises OSError: the store did not answer, or there is no such file.
        """
        return self.filesystem.open_input_file(self.full(path))

    def make(self, path: str) -> None:
        """Create a directory on a file system. S3 has no directories.

        :raises OSError: it cannot be created.
        """
        if self.location.is_local:
            os.makedirs(self.full(path), exist_ok=True)

    def make_within(self, path: str) -> None:
        """Create a directory within one that exists, on a file system. S3 has no directories.

        :raises OSError: it cannot be created, or the directory around it is gone.
        """
        if self.location.is_local:
            with suppress(FileExistsError):
                os.mkdir(self.full(path))

    def names(self, path: str) -> list[str]:
        """Return the names of the entries of a directory; an empty list if it does not exist.

        :raises OSError: the store did not answer.
        """
        import pyarrow.fs

        selector = pyarrow.fs.FileSelector(self.full(path), allow_not_found=True)
        return [info.base_name for info in self.filesystem.get_file_info(selector)]

    def exists(self, path: str) -> bool:
        """Return True if there is a file or directory of this name.

        :raises OSError: the store did not answer.
        """
        import pyarrow.fs

        return self.filesystem.get_file_info(self.full(path)).type != pyarrow.fs.FileType.NotFound

    def modified(self, path: str) -> float | None:
        """Return the time at which a file was written, in seconds since 1970; None if it does not exist.

        :raises OSError: the store did not answer.
        """
        mtime = self.filesystem.get_file_info(self.full(path)).mtime_ns
        return None if mtime is None else mtime / 1e9

    def size(self, path: str) -> int:
        """Return the number of bytes of a file that was written.

        :raises OSError: the store did not answer.
        """
        return int(self.filesystem.get_file_info(self.full(path)).size)

    def remove(self, path: str) -> None:
        """Remove a file. Never raises."""
        with suppress(OSError):
            self.filesystem.delete_file(self.full(path))

    def remove_files(self, paths: Sequence[str]) -> None:
        """Remove files. Never raises."""
        for path in paths:
            self.remove(path)

    def remove_all(self, path: str) -> None:
        """Remove a directory and everything in it. Never raises; the next attempt removes the rest."""
        try:
            self.filesystem.delete_dir(self.full(path))
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("%s, which an earlier attempt has left, cannot be removed: %s", self.full(path), error)

    def remove_empty(self, directory: str) -> None:
        """Remove a directory and those within it if they hold no file. S3 has no directories. Never raises."""
        if self.location.is_local:
            for path, _, _ in os.walk(self.full(directory), topdown=False):
                with suppress(OSError):
                    os.rmdir(path)

    def open(self, path: str) -> pa.NativeFile:
        """Open a new file for writing.

        :raises OSError: it cannot be written.
        """
        import pyarrow as pa

        if self.location.is_local:
            return pa.OSFile(self.full(path), "wb")
        return self.filesystem.open_output_stream(self.full(path))


def open_store(location: TableLocation, conn_id: str | None) -> TableStore:
    """Return the files of a table, with the credentials of an Airflow connection.

    :param location: the table's location.
    :param conn_id: a connection of type ``aws``; None for the credentials of the environment. Not used for a local table.
    :raises Exception: the connection does not exist, or gives no credentials.
    """
    return TableStore(location) if location.is_local else TableStore(location, find_s3_access(conn_id))
