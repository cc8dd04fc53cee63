"""Listing and opening files of a directory: on a mounted file system, or in an object store.

Columns, types and row counts come from the footers of Parquet and ORC files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any, TypeVar

from airflow_kafka_spark.errors import Problem, SourceRejected, SourceUnavailable
from airflow_kafka_spark.formats.types import MAX_PRECISION
from airflow_kafka_spark.hooks.object_stores import find_provider_problem, make_local_path, parse_scheme
from airflow_kafka_spark.windows.times import parse_iso

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from fsspec.spec import AbstractFileSystem


_FSSPEC_SCHEMES = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}
_SPARK_SCHEMES = {"s3": "s3a", "s3n": "s3a", "gcs": "gs"}
_MTIME_KEYS = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
_WHOLE_SECONDS = "LastModified"
"""Key of S3, which returns the time of a single object in whole seconds. Some servers list fractions, which are cut off:
otherwise the object would look changed."""
_ETAG_KEYS = ("ETag", "etag", "e_tag")
_THREADS = 16
_MAX_NAMED = 5
REPLACE_DAMAGED = "Replace the damaged file by a whole one of another name, or correct `format` and `schema`"
"""The action for a file that cannot be read."""
_MAX_SINGLE_REQUESTS = 50
"""Maximum number of files that are looked up one by one; more are found by a listing."""

_QUOTED = "Detail: Python exception"
"""Arrow's words before an exception of a file that it reads through Python."""

T = TypeVar("T")


@dataclass(frozen=True)
class ListedFile:
    """A file of the directory, as it was listed.

    :param name: path below the source's directory.
    :param size: bytes.
    :param mtime: modification time, microseconds since 1970.
    :param etag: the store's identifier of this version, empty if it has none.
    """

    name: str
    size: int
    mtime: int
    etag: str = ""

    @classmethod
    def of(cls, name: str, status: os.stat_result) -> ListedFile:
        """Return a file of a file system by its status."""
        return cls(name, status.st_size, status.st_mtime_ns // 1000)

    @property
    def key(self) -> tuple[int, str]:
        """The order in which files are read: oldest first, then by name."""
        return self.mtime, self.name

    @property
    def day(self) -> int:
        """The day of its modification (UTC), counted from 1970-01-01."""
        return self.mtime // 86_400_000_000

    @property
    def version(self) -> str:
        """Size, modification time and etag, for messages."""
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.mtime / 1e6))
        return f"{self.size:,} bytes of {moment}.{self.mtime % 1_000_000:06} UTC" + (f", etag {self.etag}" if self.etag else "")


def join_names(files: Sequence[ListedFile]) -> str:
    """Return the first names and the verb `has` or `have`, for messages."""
    named = ", ".join(f"`{file.name}`" for file in files[:_MAX_NAMED])
    more = f" and {len(files) - _MAX_NAMED:,} more" if len(files) > _MAX_NAMED else ""
    return f"{named}{more} {'has' if len(files) == 1 else 'have'}"


def _find_pattern_action(path: str) -> str:
    """Return the action for a path that does not exist and looks like a pattern; "" if it does not look like one."""
    return "Name the directory in `path`, and the files in it by `glob`" if re.search(r"[*?\[]", path) else ""


@dataclass(frozen=True)
class FileSelection:
    """Selects files of a directory by their names.

    :param glob: pattern of the file's own name (``fnmatch``; Spark's ``pathGlobFilter`` without braces).
    :param recursive: True if directories below are looked into.
    """

    glob: str = "*"
    recursive: bool = False

    def matches(self, name: str) -> bool:
        """Return True if a file of this path is selected.

        As in Spark, names that begin with ``.``, or with ``_`` without ``=``, are hidden on every level, as are files that HDFS
        is still copying.
        """
        return (
            not any(is_hidden(part) for part in name.split("/"))
            and not name.endswith("._COPYING_")
            and fnmatchcase(name.rpartition("/")[2], self.glob)
        )


def is_hidden(part: str) -> bool:
    """Return True if Spark ignores files and directories of this name."""
    return part.startswith(".") or (part.startswith("_") and "=" not in part)


class FileStore(ABC):
    """A directory that the driver lists."""

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
        """The server's address, without credentials; empty for a mounted file system."""
        return ""

    @abstractmethod
    def find_problems(self, conn_id: str | None) -> Iterator[Problem]:
        """Yield the problems that prevent listing the directory.

        :param conn_id: the source's connection.
        """

    @abstractmethod
    def list_files(self, selection: FileSelection) -> Iterator[ListedFile]:
        """Yield the selected files.

        :raises OSError: the directory does not exist, or may not be listed.
        """

    @abstractmethod
    def stat(self, names: Iterable[str]) -> Mapping[str, ListedFile]:
        """Return these files as they are now, without those that are gone.

        :raises OSError: as :meth:`list_files`.
        """

    @abstractmethod
    def open(self, name: str) -> IO[bytes]:
        """Open a file for reading.

        :raises OSError: it cannot be read.
        """

    def make_hadoop_options(self, names: Iterable[str]) -> dict[str, str]:
        """Return the options with which Spark's reader can open these files."""
        return {}

    def map_files(self, call: Callable[[ListedFile], T], files: Iterable[ListedFile]) -> list[T]:
        """Return the results of a call for each file, in order. Calls run concurrently."""
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="files-source") as pool:
            return list(pool.map(call, files))


@dataclass(frozen=True)
class LocalStore(FileStore):
    """A directory of a file system that this machine and Spark's machines have mounted."""

    directory: str

    @property
    def uri(self) -> str:
        return "file://" + urllib.parse.quote(self.directory)

    @property
    def root(self) -> str:
        return f"file:{self.directory}"

    def find_problems(self, conn_id: str | None) -> Iterator[Problem]:
        if conn_id:
            yield Problem("source.conn_id", "a mounted directory needs no connection", "Leave it out")
        directory = self.directory
        try:
            os.stat(directory)
            if not os.path.isdir(directory):
                yield Problem("source.path", f"{directory} is not a directory", "Name the directory, and the file by `glob`")
            elif not os.access(directory, os.R_OK | os.X_OK):
                yield Problem(
                    "source.path", f"{directory} cannot be listed by user {os.geteuid()}", "Give this user the right to"
                )
        except FileNotFoundError:
            action = _find_pattern_action(directory) or "Make it, mount it, or correct the path"
            yield Problem("source.path", f"{directory} does not exist", action)
        except OSError as error:
            yield Problem("source.path", f"{directory} cannot be read: {error}", "Give the worker's user the right to")

    def list_files(self, selection: FileSelection) -> Iterator[ListedFile]:
        pending = [""]
        while pending:
            below = pending.pop()
            with os.scandir(os.path.join(self.directory, below)) as entries:
                for entry in entries:
                    name = below + entry.name
                    if entry.is_dir(follow_symlinks=False):
                        if selection.recursive and not is_hidden(entry.name):
                            pending.append(f"{name}/")
                    elif selection.matches(name) and (file := self._find_file(name)):
                        yield file

    def stat(self, names: Iterable[str]) -> Mapping[str, ListedFile]:
        return {name: file for name in names if (file := self._find_file(name))}

    def open(self, name: str) -> IO[bytes]:
        return open(os.path.join(self.directory, name), "rb")

    def make_hadoop_options(self, names: Iterable[str]) -> dict[str, str]:
        if not any(":" in name for name in names):
            return {}
        # Hadoop's default local file system looks for a checksum file beside each file, and takes `a:b` in its name for a scheme.
        return {"fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem", "fs.file.impl.disable.cache": "true"}

    def _find_file(self, name: str) -> ListedFile | None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = os.stat(os.path.join(self.directory, name))
            if not stat.S_ISDIR(found.st_mode):
                return ListedFile.of(name, found)
        return None


@dataclass(frozen=True)
class ObjectStore(FileStore):
    """A prefix of an object store, or any other file system that fsspec knows.

    :param path: with its scheme.
    :param conn_id: the Airflow connection with the credentials, None for those of the environment.
    """

    path: str
    conn_id: str | None = None

    @cached_property
    def _place(self) -> tuple[AbstractFileSystem, str]:
        """The file system, and the directory's path in it."""
        import fsspec
        from airflow.sdk import ObjectStoragePath

        if self.conn_id:
            from airflow.providers.common.compat.sdk import BaseHook

            # For an undefined connection the Amazon provider would use no credentials, and might well be let in somewhere else.
            BaseHook.get_connection(self.conn_id)
        scheme, _, rest = self.path.partition("://")
        place: Any = ObjectStoragePath(f"{_FSSPEC_SCHEMES.get(scheme, scheme)}://{rest.rstrip('/')}", conn_id=self.conn_id)
        try:
            fs = place.fs
        except ValueError as error:  # no installed Airflow provider serves this scheme
            if self.conn_id:
                raise ValueError(f"{error}: no installed Airflow provider makes use of `conn_id` for {scheme}://") from error
            fs = fsspec.filesystem(scheme)
        return fs, fs._strip_protocol(str(place.path))

    @property
    def uri(self) -> str:
        return self._with_scheme(lambda scheme: scheme)

    @property
    def server(self) -> str:
        """The address, or the account, that its client was made for."""
        fs, _ = self._place
        of_client = getattr(fs, "client_kwargs", None) or {}
        named = (getattr(fs, "endpoint_url", None), of_client.get("endpoint_url"), getattr(fs, "account_name", None))
        address = str(next(filter(None, named), ""))
        # Never empty, because a given address and a missing one are two servers.
        return re.sub(r"^[a-z]+://", "", address).rpartition("@")[2].rstrip("/") or "default"

    @property
    def root(self) -> str:
        return self._with_scheme(lambda scheme: _SPARK_SCHEMES.get(scheme, scheme))

    def _with_scheme(self, rename: Callable[[str], str]) -> str:
        scheme, _, rest = self.path.rstrip("/").partition("://")
        host, slash, path = rest.partition("/")
        if not scheme.startswith("abfs"):  # where the container comes before the @
            host = host.rpartition("@")[2]
        return f"{rename(scheme)}://{host}{slash}{path}"

    def find_problems(self, conn_id: str | None) -> Iterator[Problem]:
        scheme = self.path.partition("://")[0]
        kind, package = _FSSPEC_SCHEMES.get(scheme, scheme), "`apache-airflow-providers-amazon[s3fs]`"
        if missing := find_provider_problem("source.conn_id", kind, conn_id, package):
            yield missing
            return
        try:
            next(iter(self.list_files(FileSelection())), None)
        except Exception as error:  # an object store's client has errors of its own
            detail = f"{type(error).__name__}: {error}"
            action = "Check path, `conn_id` and its rights"
            if isinstance(error, FileNotFoundError):
                action = _find_pattern_action(self.path) or action
            yield Problem("source.path", f"{self.uri} cannot be listed: {detail}", action)

    def list_files(self, selection: FileSelection) -> Iterator[ListedFile]:
        for name, file in self._list_objects(recursive=selection.recursive):
            if selection.matches(name):
                yield file

    def stat(self, names: Iterable[str]) -> Mapping[str, ListedFile]:
        names = tuple(names)
        if len(names) > _MAX_SINGLE_REQUESTS:
            wanted = set(names)
            found = self._list_objects(recursive=any("/" in name for name in names))
            return {name: file for name, file in found if name in wanted}
        fs, base = self._place
        fs.invalidate_cache()

        def stat_one(name: str) -> ListedFile | None:
            try:
                return parse_info(name, fs.info(f"{base}/{name}"))
            except FileNotFoundError:
                return None

        with ThreadPoolExecutor(_THREADS) as pool:
            return {file.name: file for file in pool.map(stat_one, names) if file}

    def open(self, name: str) -> IO[bytes]:
        fs, base = self._place
        opened: IO[bytes] = fs.open(f"{base}/{name}", "rb")
        return opened

    def _list_objects(self, *, recursive: bool) -> Iterator[tuple[str, ListedFile]]:
        fs, base = self._place
        fs.invalidate_cache()
        for info in _list_recursively(fs, base) if recursive else fs.ls(base, detail=True):
            name = str(info["name"])[len(base) :].removeprefix("/")
            if info.get("type") != "file" or name.endswith("/"):
                continue
            if name:
                yield name, parse_info(name, info)
            elif not str(info["name"]).endswith("/"):  # such an object only marks the directory
                raise NotADirectoryError(f"{self.uri} is a file: name its directory, and the file by `glob`")


def _list_recursively(fs: AbstractFileSystem, base: str) -> Iterator[Mapping[str, Any]]:
    """Yield every file below the directory, by one listing if the store has no directories.

    :raises OSError: as :meth:`FileStore.list_files`. (fsspec's own walk leaves out directories that it cannot list: their files
        would be mistaken for removed ones.)
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


def parse_info(name: str, info: Mapping[str, Any]) -> ListedFile:
    """Return a file from fsspec's description."""
    key = next((key for key in _MTIME_KEYS if info.get(key) is not None), None)
    modified = _to_microseconds(info[key]) if key else 0
    if key == _WHOLE_SECONDS:
        modified -= modified % 1_000_000
    etag = next((str(info[key]) for key in _ETAG_KEYS if info.get(key)), "")
    return ListedFile(name, int(info.get("size") or 0), modified, etag.strip('"'))


def _to_microseconds(mtime: str | datetime | float) -> int:
    if isinstance(mtime, str):
        mtime = parse_iso(mtime)
    if isinstance(mtime, datetime):
        mtime = mtime if mtime.tzinfo else mtime.replace(tzinfo=timezone.utc)
        whole = int(mtime.replace(microsecond=0).timestamp())
        return whole * 1_000_000 + mtime.microsecond
    return round(float(mtime) * 1_000_000)


def open_store(path: str, conn_id: str | None) -> FileStore:
    """Return the store of a directory. Nothing is looked up yet.

    :raises ValueError: it is neither an absolute path nor a URI.
    """
    text = str(path)
    if parse_scheme(text) != "file":
        if not re.match(r"[^/]*://[^/]+", text):
            raise ValueError(f"`{text}` is neither an absolute path nor a URI such as s3a://bucket/prefix")
        return ObjectStore(text, conn_id)
    return LocalStore(make_local_path(text))


_MOST_SHOWN = 8


@dataclass(frozen=True)
class FileFooter:
    """The footer of a file.

    :param columns: names and types, in order; the types as Arrow names them, with one name for types that Spark reads as one
        type.
    :param rows: the number of rows.
    :param schema: the columns in Arrow's types.
    :param unreadable: names and types of the columns that Spark cannot read; default none.
    """

    columns: tuple[tuple[str, str], ...]
    rows: int
    schema: pa.Schema
    unreadable: tuple[tuple[str, str], ...] = ()


_UNCHECKED_CODECS = (".lz4", ".snappy")
_BZIP2 = b"BZh"


def require_readable_compression(store: FileStore, files: Sequence[ListedFile]) -> None:
    """Check that Hadoop would notice damage of the compressed texts: it takes files that are not bzip2 for empty ones.

    :raises SourceRejected: it would not.
    :raises SourceUnavailable: a file is gone, or cannot be opened.
    """
    for file in files:
        if file.name.lower().endswith(_UNCHECKED_CODECS):
            suffix = os.path.splitext(file.name)[1]
            raise SourceRejected(
                store.uri,
                f"Spark reads compressed files such as `{file.name}` ({suffix}) in Hadoop's own form only, and takes any other "
                "form, and the place where a file was cut off, for the end of the rows",
                "Compress such files with gzip or bzip2",
            )
    packed = [file for file in files if file.name.lower().endswith(".bz2")]
    for file, start in zip(packed, store.map_files(lambda file: _read_start(store, file), packed), strict=True):
        if not start.startswith(_BZIP2):
            detail = f"`{file.name}` is not a bzip2 file, and Spark would read no row of it"
            raise SourceRejected(store.uri, detail, "Give it a name without `.bz2`, or replace the damaged file by a whole one")


def _read_start(store: FileStore, file: ListedFile) -> bytes:
    try:
        with store.open(file.name) as opened:
            return opened.read(len(_BZIP2))
    except Exception as error:  # an object store's client has errors of its own
        raise SourceUnavailable(store.uri, f"reading {file.name}", f"{type(error).__name__}: {error}") from error


def read_footers(store: FileStore, format: str, files: Sequence[ListedFile]) -> list[FileFooter]:
    """Return the footers of the files.

    :param format: ``parquet`` or ``orc``.
    :raises SourceRejected: a file is not of this format, or is damaged.
    :raises SourceUnavailable: a file is gone, or cannot be opened.
    """
    return store.map_files(lambda file: _read_footer(store, format, file), files)


def _read_footer(store: FileStore, format: str, file: ListedFile) -> FileFooter:
    with translate_footer_errors(store, format, file), store.open(file.name) as opened:
        return _read_parquet_footer(opened) if format == "parquet" else _read_orc_footer(opened)


@contextlib.contextmanager
def translate_footer_errors(store: FileStore, format: str, file: ListedFile) -> Iterator[None]:
    """Raise errors about the footer of a file as those of the source."""
    try:
        yield
    except Exception as error:  # an object store's client has errors of its own
        if not _is_of_content(error):
            detail = f"{type(error).__name__}: {error}"
            raise SourceUnavailable(store.uri, f"reading the footer of {file.name}", detail) from error
        raise SourceRejected(
            store.uri,
            f"`{file.name}` ({file.size} bytes) is not a readable {format} file: {error}",
            "Replace or remove it. If it is still being written, let its writer rename it into the directory when it is "
            "complete, or set `min_age`",
        ) from error


def _is_of_content(error: Exception) -> bool:
    """Return True for an error of Arrow about the bytes of a file, False for one of the store.

    Arrow raises some of them as ``OSError``. Those of a system or a store have a number, or are of a subclass, or Arrow quotes
    them.
    """
    import pyarrow as pa

    if isinstance(error, OSError):
        return type(error) is OSError and error.errno is None and _QUOTED not in str(error)
    return isinstance(error, pa.ArrowException | ValueError) and _QUOTED not in str(error)


def _read_parquet_footer(opened: object) -> FileFooter:
    import pyarrow.parquet as pq

    with pq.ParquetFile(opened) as file:
        of_parquet = {column.path: column.physical_type for column in map(file.schema.column, range(len(file.schema)))}
        # Spark reads an INT96 as an instant, Arrow as a time without a zone.
        columns = ((n, _INSTANT if of_parquet.get(n) == "INT96" else kind) for n, kind in _list_columns(file.schema_arrow))
        return FileFooter(tuple(columns), file.metadata.num_rows, file.schema_arrow, tuple(_list_unreadable(file.schema)))


_INSTANT = "timestamp[UTC]"


def _list_unreadable(schema: pq.ParquetSchema) -> Iterator[tuple[str, str]]:
    """Yield name and logical type of the columns for which Spark has no type. Arrow shows some others in the same way."""
    for at in range(len(schema)):
        column = schema.column(at)
        kind, details = column.logical_type.type, json.loads(column.logical_type.to_json())
        is_fine = kind not in ("UUID", "TIME", "FLOAT16") and not (kind == "DECIMAL" and column.precision > MAX_PRECISION)
        if not is_fine or (kind == "TIMESTAMP" and details.get("timeUnit") == "nanoseconds"):
            unit = f" in {details['timeUnit']}" if "timeUnit" in details else ""
            digits = f" of {column.precision} digits" if kind == "DECIMAL" else ""
            yield column.path.partition(".")[0], f"{kind}{unit}{digits}"


def require_readable_columns(
    source: str, files: Sequence[ListedFile], found: Sequence[FileFooter], wanted: Container[str] | None
) -> None:
    """Check that Spark can read the columns of all files.

    :param source: the source's URI, for the message.
    :param wanted: the columns that are read; None for all.
    :raises SourceRejected: it cannot.
    """
    for file, footer in zip(files, found, strict=True):
        if not footer.columns:
            raise SourceRejected(source, f"`{file.name}` has no columns", "Remove it, or leave it out by `glob`")
        names = [name for name, _ in footer.columns]
        if len(set(map(str.lower, names))) < len(names):
            alike = next(n for at, n in enumerate(names) if n.lower() in map(str.lower, names[:at]))
            what = f"Spark cannot read `{file.name}`, whose column `{alike}` has the name of another one, apart from case"
            raise SourceRejected(source, what, "Let its writer give each column a name of its own")
        for name, kind in footer.unreadable:
            if wanted is None or name in wanted:
                what = f"Spark cannot read column `{name}` of `{file.name}`, which is {kind}"
                action = "Let its writer choose a text, microseconds or fewer digits; or give `schema`, and leave the column out"
                raise SourceRejected(source, what, action)


def _read_orc_footer(opened: object) -> FileFooter:
    from pyarrow import orc

    file = orc.ORCFile(opened)
    schema = file.schema
    unreadable = ((field.name, kind) for field in schema if (kind := _find_unreadable_orc_type(field.type)))
    return FileFooter(_list_columns(schema), file.nrows, schema, tuple(unreadable))


def _find_unreadable_orc_type(kind: pa.DataType) -> str:
    """Return the name of a type, or of one within it, for which Spark has none; "" if Spark reads the type."""
    import pyarrow as pa

    if pa.types.is_timestamp(kind):
        return "TIMESTAMP_INSTANT" if kind.tz else ""
    if pa.types.is_union(kind):
        return "UNIONTYPE"
    inner = []
    if pa.types.is_struct(kind):
        inner = [field.type for field in kind]
    elif pa.types.is_map(kind):
        inner = [kind.key_type, kind.item_type]
    elif pa.types.is_list(kind):
        inner = [kind.value_type]
    return next(filter(None, map(_find_unreadable_orc_type, inner)), "")


def _list_columns(schema: pa.Schema) -> tuple[tuple[str, str], ...]:
    return tuple((field.name, _format_type(field.type)) for field in schema)


def _format_type(kind: pa.DataType) -> str:
    """Return the name of a type, one name for types that Spark reads as one type."""
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(kind):
        return _format_type(kind.value_type)
    if types.is_map(kind):
        return f"map<{_format_type(kind.key_type)},{_format_type(kind.item_type)}>"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return f"list<{_format_type(kind.value_type)}>"
    if types.is_struct(kind):
        return f"struct<{','.join(f'{field.name}:{_format_type(field.type)}' for field in kind)}>"
    if types.is_timestamp(kind):
        return _INSTANT if kind.tz else "timestamp[no zone]"
    if types.is_large_string(kind) or types.is_string(kind):
        return "string"
    if types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return "binary"
    return str(kind)


def require_same_columns(source: str, files: Sequence[ListedFile], found: Sequence[FileFooter]) -> None:
    """Check that all files have the same columns, in any order.

    :param source: the source's URI, for the message.
    :raises SourceRejected: they do not; the message shows the differences.
    """
    by_columns: dict[frozenset[tuple[str, str]], list[ListedFile]] = {}
    for file, footer in zip(files, found, strict=True):
        by_columns.setdefault(frozenset(footer.columns), []).append(file)
    if len(by_columns) == 1:
        return
    (columns, usual), (others, odd) = sorted(by_columns.items(), key=lambda item: -len(item[1]))[:2]
    raise SourceRejected(
        source,
        f"the files of this window have {len(by_columns)} different schemas. `{odd[0].name}` ({len(odd)} of {len(files)} files) "
        f"differs from `{usual[0].name}` ({len(usual)} files): {_describe_difference(dict(columns), dict(others))}",
        "Give `schema`, which all files are then read with (missing columns become NULL), or read the files of each kind by a "
        "pipeline of its own, with another `glob`",
    )


def _describe_difference(usual: dict[str, str], odd: dict[str, str]) -> str:
    lacks = [f"it lacks `{name}` {kind}" for name, kind in sorted(usual.items()) if name not in odd]
    adds = [f"it adds `{name}` {kind}" for name, kind in sorted(odd.items()) if name not in usual]
    other = [f"its `{n}` is {odd[n]}, not {usual[n]}" for n in sorted(usual) if n in odd and odd[n] != usual[n]]
    differences = [*other, *lacks, *adds]
    more = len(differences) - _MOST_SHOWN
    return "; ".join(differences[:_MOST_SHOWN]) + (f"; and {more} more differences" if more > 0 else "")
