"""Where the files are: a mounted file system, or an object store by way of Airflow's ``ObjectStoragePath`` (fsspec)."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from functools import cached_property
from typing import IO, Any, TypeVar

from airflow_kafka_spark.sources.files.splits import File

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_FOR_FSSPEC = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}
_FOR_SPARK = {"s3": "s3a", "s3n": "s3a", "gcs": "gs"}
_MODIFIED = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
_BY_THE_SECOND = "LastModified"
"""S3 says it of one object in whole seconds. Servers that are more exact in listings would make the same object look changed."""
_ETAGS = ("ETag", "etag", "e_tag")
_THREADS = 16
_FEW = 50
"""Files up to which an object store is asked for each, rather than for a listing."""

T = TypeVar("T")


@dataclass(frozen=True)
class Selection:
    """Which files of a directory count.

    :param glob: what the file's own name has to match (``fnmatch``, and Spark's ``pathGlobFilter`` but for braces).
    :param recursive: whether directories below are looked into.
    """

    glob: str = "*"
    recursive: bool = False

    def takes(self, name: str) -> bool:
        """As Spark does, names that begin with ``.``, or with ``_`` and have no ``=``, are passed over, on every level; so is
        what HDFS is still copying."""
        return (
            not any(is_hidden(part) for part in name.split("/"))
            and not name.endswith("._COPYING_")
            and fnmatchcase(name.rpartition("/")[2], self.glob)
        )


def is_hidden(part: str) -> bool:
    return part.startswith(".") or (part.startswith("_") and "=" not in part)


class Store(ABC):
    """A directory, looked at by the driver."""

    @property
    @abstractmethod
    def uri(self) -> str:
        """The directory without credentials."""

    @property
    @abstractmethod
    def root(self) -> str:
        """The directory as Spark names it, not encoded."""

    @property
    def server(self) -> str:
        """Which server it is of, without credentials; empty for a mounted file system, and where only the scheme decides."""
        return ""

    @abstractmethod
    def files(self, selection: Selection) -> Iterator[File]:
        """Its files.

        :raises OSError: it is not there, or may not be listed.
        """

    @abstractmethod
    def stat(self, names: Iterable[str]) -> Mapping[str, File]:
        """What these files are now; those that are gone are left out.

        :raises OSError: as :meth:`files`.
        """

    @abstractmethod
    def open(self, name: str) -> IO[bytes]:
        """:raises OSError: the file cannot be read."""

    def reader_options(self, names: Iterable[str]) -> dict[str, str]:
        """What Spark's reader has to be told to open these files."""
        return {}

    def each(self, call: Callable[[File], T], files: Iterable[File]) -> list[T]:
        """A call for each file, several at a time, answers in order."""
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="files-source") as pool:
            return list(pool.map(call, files))


@dataclass(frozen=True)
class LocalStore(Store):
    """A directory of a file system that this machine and Spark's have mounted."""

    directory: str

    @property
    def uri(self) -> str:
        return "file://" + urllib.parse.quote(self.directory)

    @property
    def root(self) -> str:
        return f"file:{self.directory}"

    def files(self, selection: Selection) -> Iterator[File]:
        pending = [""]
        while pending:
            below = pending.pop()
            with os.scandir(os.path.join(self.directory, below)) as entries:
                for entry in entries:
                    name = below + entry.name
                    if entry.is_dir(follow_symlinks=False):
                        if selection.recursive and not is_hidden(entry.name):
                            pending.append(f"{name}/")
                    elif selection.takes(name) and (file := self._file(name)):
                        yield file

    def stat(self, names: Iterable[str]) -> Mapping[str, File]:
        return {name: file for name in names if (file := self._file(name))}

    def open(self, name: str) -> IO[bytes]:
        return open(os.path.join(self.directory, name), "rb")

    def reader_options(self, names: Iterable[str]) -> dict[str, str]:
        if not any(":" in name for name in names):
            return {}
        # Hadoop's usual local file system looks for a checksum file beside each, and takes `a:b` in its name for a scheme.
        return {"fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem", "fs.file.impl.disable.cache": "true"}

    def _file(self, name: str) -> File | None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = os.stat(os.path.join(self.directory, name))
            if not stat.S_ISDIR(found.st_mode):
                return File(name, found.st_size, found.st_mtime_ns // 1000)
        return None


@dataclass(frozen=True)
class ObjectStore(Store):
    """A prefix of an object store, or any other file system that fsspec knows.

    :param path: with its scheme.
    :param conn_id: the Airflow connection with the credentials, None for what the environment has.
    """

    path: str
    conn_id: str | None = None

    @cached_property
    def _place(self) -> tuple[Any, str]:
        import fsspec
        from airflow.sdk import ObjectStoragePath

        if self.conn_id:
            from airflow.providers.common.compat.sdk import BaseHook

            # Of one that is not defined the Amazon provider makes nobody, who may well be let in somewhere else.
            BaseHook.get_connection(self.conn_id)
        scheme, _, rest = self.path.partition("://")
        place: Any = ObjectStoragePath(f"{_FOR_FSSPEC.get(scheme, scheme)}://{rest.rstrip('/')}", conn_id=self.conn_id)
        try:
            fs = place.fs
        except ValueError as error:  # no Airflow provider serves this scheme, and only one could make use of a connection
            if self.conn_id:
                raise ValueError(f"{error}: no installed Airflow provider makes use of `conn_id` for {scheme}://") from error
            fs = fsspec.filesystem(scheme)
        return fs, fs._strip_protocol(str(place.path))

    @property
    def uri(self) -> str:
        return self._under(lambda scheme: scheme)

    @property
    def server(self) -> str:
        """The address, or the account, that its client was made for."""
        fs, _ = self._place
        of_client = getattr(fs, "client_kwargs", None) or {}
        named = (getattr(fs, "endpoint_url", None), of_client.get("endpoint_url"), getattr(fs, "account_name", None))
        address = str(next(filter(None, named), ""))
        return re.sub(r"^[a-z]+://", "", address).rpartition("@")[2].rstrip("/")

    @property
    def root(self) -> str:
        return self._under(lambda scheme: _FOR_SPARK.get(scheme, scheme))

    def _under(self, rename: Callable[[str], str]) -> str:
        scheme, _, rest = self.path.rstrip("/").partition("://")
        host, slash, path = rest.partition("/")
        if not scheme.startswith("abfs"):  # there it is the container that comes before the @
            host = host.rpartition("@")[2]
        return f"{rename(scheme)}://{host}{slash}{path}"

    def files(self, selection: Selection) -> Iterator[File]:
        for name, file in self._listed(recursive=selection.recursive):
            if selection.takes(name):
                yield file

    def stat(self, names: Iterable[str]) -> Mapping[str, File]:
        names = tuple(names)
        if len(names) > _FEW:
            wanted = set(names)
            found = self._listed(recursive=any("/" in name for name in names))
            return {name: file for name, file in found if name in wanted}
        fs, base = self._place
        fs.invalidate_cache()

        def one(name: str) -> File | None:
            try:
                return _file(name, fs.info(f"{base}/{name}"))
            except FileNotFoundError:
                return None

        with ThreadPoolExecutor(_THREADS) as pool:
            return {file.name: file for file in pool.map(one, names) if file}

    def open(self, name: str) -> IO[bytes]:
        fs, base = self._place
        opened: IO[bytes] = fs.open(f"{base}/{name}", "rb")
        return opened

    def _listed(self, *, recursive: bool) -> Iterator[tuple[str, File]]:
        fs, base = self._place
        fs.invalidate_cache()
        for info in _below(fs, base) if recursive else fs.ls(base, detail=True):
            name = str(info["name"])[len(base) :].removeprefix("/")
            if info.get("type") != "file" or name.endswith("/"):
                continue
            if name:
                yield name, _file(name, info)
            elif not str(info["name"]).endswith("/"):  # else it only marks the directory
                raise NotADirectoryError(f"{self.uri} is a file: name its directory, and the file by `glob`")


def _below(fs: Any, base: str) -> Iterator[Mapping[str, Any]]:
    """Every file below, in one listing where the store has no directories.

    :raises OSError: as :meth:`Store.files`. (fsspec's own walk leaves out what it cannot list, and those files would be taken for
        removed ones.)
    """
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    if isinstance(fs, AsyncFileSystem):
        is_flat = type(fs)._find is not AsyncFileSystem._find
    else:
        is_flat = type(fs).find is not AbstractFileSystem.find
    if is_flat:
        found = fs.find(base, detail=True)
        yield from found.values() if found else fs.ls(base, detail=True)
        return
    pending = [base]
    while pending:
        for info in fs.ls(pending.pop(), detail=True):
            if info.get("type") != "directory":
                yield info
            elif not is_hidden(str(info["name"]).rstrip("/").rpartition("/")[2]):
                pending.append(str(info["name"]))


def _file(name: str, info: Mapping[str, Any]) -> File:
    key = next((key for key in _MODIFIED if info.get(key) is not None), None)
    modified = _microseconds(info[key]) if key else 0
    if key == _BY_THE_SECOND:
        modified -= modified % 1_000_000
    etag = next((str(info[key]) for key in _ETAGS if info.get(key)), "")
    return File(name, int(info.get("size") or 0), modified, etag.strip('"'))


def _microseconds(moment: Any) -> int:
    if isinstance(moment, str):
        moment = datetime.fromisoformat(moment.replace("Z", "+00:00"))
    if isinstance(moment, datetime):
        moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
        whole = int(moment.replace(microsecond=0).timestamp())
        return whole * 1_000_000 + moment.microsecond
    return round(float(moment) * 1_000_000)


def store_of(path: str, conn_id: str | None) -> Store:
    """Where a path leads.

    :raises ValueError: it is neither an absolute path nor a URI.
    """
    text = str(path)
    scheme = _SCHEME.match(text)
    if scheme and scheme[1].lower() != "file":
        if not re.match(r"[^/]*://[^/]+", text):
            raise ValueError(f"`{text}` is neither an absolute path nor a URI such as s3a://bucket/prefix")
        return ObjectStore(text, conn_id)
    if scheme:
        parts = urllib.parse.urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise ValueError(f"`{text}` names the host {parts.netloc}")
        # urlsplit takes ? and # for what they are in a URI; in a file's they must be encoded.
        text = urllib.parse.unquote(parts.path)
    if not os.path.isabs(text):
        raise ValueError(f"`{path}` is not an absolute path")
    return LocalStore(os.path.normpath(text))
