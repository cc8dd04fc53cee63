"""A check of the packages of an executor, made in each of its Python workers before a task is unpickled there.

A task is pickled together with the packages that it needs and the driver's versions of them. A worker that has the driver's own
environment is not checked. This module imports only the standard library.
"""

from __future__ import annotations

import functools
import importlib.util
import pickle
import platform
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, TypeVar

from airflow_kafka_spark import __version__

T = TypeVar("T")

DISTRIBUTION = "airflow-provider-kafka-spark"

PACKAGES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "spark": (("pyarrow", "pyarrow"), ("pandas", "pandas")),
    "kafka": (("confluent-kafka", "confluent_kafka"),),
    "postgres": (("adbc-driver-postgresql", "adbc_driver_postgresql"), ("adbc-driver-manager", "adbc_driver_manager")),
    "jdbc": (("adbc-driver-postgresql", "adbc_driver_postgresql"), ("adbc-driver-manager", "adbc_driver_manager")),
    "cdc": (("psycopg", "psycopg"),),
    "mysql_cdc": (("pymysql", "pymysql"),),
    "avro": (("polars", "polars"),),
    "protobuf": (("protobuf", "google.protobuf"),),
    "iceberg": (("pyiceberg", "pyiceberg"),),
    "object-stores": (("obstore", "obstore"),),
    "uploads": (("boto3", "boto3"),),
    "registry": (
        ("attrs", "attr"),
        ("authlib", "authlib"),
        ("cachetools", "cachetools"),
        ("certifi", "certifi"),
        ("httpx2", "httpx2"),
    ),
}
"""Packages that each part of a task needs on an executor, as (distribution, module)."""

INSTEAD: Mapping[str, tuple[str, str]] = {"postgres": ("psycopg", "psycopg")}
"""Packages that replace all packages of a part."""

_PARTS = (
    ("airflow_kafka_spark.sinks.postgres.", "postgres"),
    ("airflow_kafka_spark.sources.jdbc.tasks.", "jdbc"),
    ("airflow_kafka_spark.sources.postgres_cdc.tasks.", "cdc"),
    ("airflow_kafka_spark.sources.mysql_cdc.tasks.", "mysql_cdc"),
    ("airflow_kafka_spark.formats.avro.tasks.decode", "avro"),
    ("airflow_kafka_spark.formats.protobuf.", "protobuf"),
    ("airflow_kafka_spark.sinks.iceberg.tasks.", "iceberg"),
    # Classes, because other objects of their modules need no package.
    ("ObjectTableStore", "object-stores"),
    ("UploadsSplitWriter", "uploads"),
    ("RegistryClient", "registry"),
)


class ExecutorLacks(ImportError):
    """Raised in a Python worker that cannot run a task of this package."""


@dataclass(frozen=True)
class Package:
    """A package that a task needs.

    :param name: the distribution.
    :param module: the module that is imported from it.
    :param minimum: the oldest version that this package supports; "" for any.
    :param driver: the driver's version; "" if it is not installed there.
    :param part: the part of a task that needs it, a key of :data:`PACKAGES`.
    :param below: the version from which on this package does not support it; "" (default) for none.
    """

    name: str
    module: str
    minimum: str
    driver: str
    part: str
    below: str = ""

    @property
    def is_there(self) -> bool:
        """True if it can be imported in this process."""
        try:
            return importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:
            return False

    def find_obstacle(self) -> str:
        """Return the reason why this process cannot use the package; "" if it can."""
        on_driver = f"driver: {self.driver}" if self.driver else "not on the driver either"
        if not self.is_there:
            return f"{self.name} is missing ({on_driver})"
        found = find_installed_version(self.name)
        if found and self.minimum and _parse_version(found) < _parse_version(self.minimum):
            return f"{self.name} is {found}, older than {self.minimum} ({on_driver})"
        if found and self.below and _parse_version(found) >= _parse_version(self.below):
            return f"{self.name} is {found}, not older than {self.below} ({on_driver})"
        return ""


@dataclass(frozen=True)
class Requirements:
    """The requirements of a task for the Python worker that unpickles it.

    :param packages: the packages.
    :param version: the driver's version of this package.
    :param environment: the driver's host and the prefix of its Python.
    """

    packages: tuple[Package, ...]
    version: str
    environment: tuple[str, str]

    @classmethod
    def of(cls, parts: Iterable[str]) -> Requirements:
        """Return the requirements of parts of a task, with the driver's versions.

        :param parts: keys of :data:`PACKAGES`.
        """
        ranges = find_supported_versions()
        found = [
            Package(
                name, module, ranges.get(name, ("", ""))[0], find_installed_version(name), part, ranges.get(name, ("", ""))[1]
            )
            for part in ("spark", *sorted(set(parts) - {"spark"}))
            for name, module in (*PACKAGES[part], *((INSTEAD[part],) if part in INSTEAD else ()))
        ]
        return cls(tuple(found), __version__, describe_host_and_prefix())

    def find_obstacles(self) -> list[str]:
        """Return the reasons why this process cannot run the task, one for each package."""
        lacks: list[str] = []
        for part in dict.fromkeys(package.part for package in self.packages):
            found = {(p.name, p.module): p.find_obstacle() for p in self.packages if p.part == part}
            instead = found.pop(INSTEAD[part], "none") if part in INSTEAD else "none"
            if instead:
                lacks += filter(None, found.values())
        if self.version != __version__:
            lacks.append(f"{DISTRIBUTION} is {__version__} (driver: {self.version})")
        return list(dict.fromkeys(lacks))

    @functools.cache  # noqa: B019 - one value, or a few, for the life of a Python worker
    def check(self) -> None:
        """Compare the packages of this process with what a task needs, once.

        :raises ExecutorLacks: names everything that is missing or too old.
        """
        if self.environment != describe_host_and_prefix() and (lacks := self.find_obstacles()):
            # This becomes the last line of the traceback, which the driver parses.
            raise ExecutorLacks(f"on executor {socket.gethostname()}, {_describe_python()}, {'; '.join(lacks)}")


class _Pickling(threading.local):
    is_nested = False


_pickling = _Pickling()


class CheckedOnExecutors:
    """Base class of tasks (frozen dataclasses) that are unpickled only in processes with the packages that they need."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The parts (:data:`PACKAGES`) that this task needs in addition to those of the modules that it refers to."""
        return ()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if _pickling.is_nested:
            return _make, (type(self), self.__dict__)
        from pyspark import cloudpickle

        _pickling.is_nested = True
        try:
            pickled = cloudpickle.dumps((type(self), self.__dict__))
        finally:
            _pickling.is_nested = False
        return load, (Requirements.of({*self.needs, *find_parts(pickled)}), pickled)


def load(needs: Requirements, pickled: bytes) -> Any:
    """Return the unpickled task.

    :raises ExecutorLacks: this process cannot run it.
    """
    needs.check()
    return _make(*pickle.loads(pickled))


def _make(kind: type[T], state: Mapping[str, Any]) -> T:
    task = object.__new__(kind)
    task.__dict__.update(state)
    return task


def find_parts(pickled: bytes) -> set[str]:
    """Return the parts (:data:`PACKAGES`) whose modules a pickled object refers to."""
    return {part for module, part in _PARTS if module.encode() in pickled}


@functools.cache
def find_installed_version(name: str) -> str:
    """Return the version of an installed distribution; "" if it is not installed or has no metadata."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


@functools.cache
def find_supported_versions() -> Mapping[str, tuple[str, str]]:
    """Return the oldest supported version of each package that this package requires, and the first one that is too new; "" for
    none. They are read from its metadata. Of several ranges of a package, the widest counts.
    """
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, tuple[str, str]] = {}
    for line in lines:
        name = re.match(r"[\w.-]+", line)
        wanted = line.partition(";")[0]
        least, most = re.search(r">=\s*([\d.]+)", wanted), re.search(r"<\s*([\d.]+)", wanted)
        if name and least:
            first, last = found.get(name[0].lower(), (least[1], most[1] if most else ""))
            end = max(last, most[1], key=_parse_version) if last and most else ""
            found[name[0].lower()] = min(first, least[1], key=_parse_version), end
    return found


def describe_host_and_prefix() -> tuple[str, str]:
    """Return the host and the prefix of this Python."""
    return socket.gethostname(), sys.prefix


def _describe_python() -> str:
    return f"Python {platform.python_version()} at {sys.executable}"


def _parse_version(version: str) -> tuple[int, ...]:
    return tuple(map(int, [*re.findall(r"\d+", version.partition("+")[0]), "0", "0"][:3]))


_LACKS = re.compile(r"ExecutorLacks: (.+)")
_MODULE = re.compile(r"No module named '([\w.]+)'")
_VERSIONS = re.compile(r"Python in worker has different version:? \(?(\d+[.,] ?\d+)\)? than that in driver:? (\d+\.\d+)")
_PROGRAM = re.compile(r'Cannot run program "([^"]+)"')
_LIBPQ = "no pq wrapper available"
"""The error of psycopg without libpq. Its next line names a module that is optional."""
_INTERPRETER = re.compile(r"bin/python: (?:line )?\d+: exec: ([^\n]+): [^:\n]+")
"""Pattern of the error of the shell script that starts Python in an archive of ``pack``, if the interpreter is missing."""


def explain(text: str) -> str:
    """Return the reason why an executor could not run a task, from the text of Spark's error; "" for any other failure."""
    if found := _LACKS.search(text):
        return found[1].strip()
    if found := _VERSIONS.search(text):
        worker, driver = (part.replace(", ", ".").replace(",", ".") for part in found.groups())
        return f"an executor has Python {worker} (driver: {driver})"
    if found := _PROGRAM.search(text):
        return f"an executor has no Python at `{found[1]}`"
    if found := _INTERPRETER.search(text):
        return f"an executor has no Python `{found[1]}`, which the archive of `spark.archives` starts"
    if _LIBPQ in text:
        return "psycopg finds no library `libpq` on an executor (`psycopg-binary` has one)"
    if found := _MODULE.search(text):
        return f"a Python worker of an executor finds no module `{found[1]}`"
    return ""
