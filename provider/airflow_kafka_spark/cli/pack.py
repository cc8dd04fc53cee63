"""An archive of the Python packages that executors need, for ``spark.archives``.

The packages are copied from the environment of this process, so that executors have the driver's versions and no package index
is needed. This package is among them, for the workers of a Spark Connect server; other executors get it with each session, and
that copy takes precedence. The archive has no interpreter: its ``bin/python`` starts an interpreter of the executor with this
minor version.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tarfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from itertools import chain
from pathlib import Path

import airflow_kafka_spark
from airflow_kafka_spark.hooks.spark.tasks.executor_check import INSTEAD, PACKAGES
from airflow_kafka_spark.provider_info import is_installed

SINKS = ("delta", "files", "iceberg", "kafka", "postgres")
SOURCES = ("cdc", "files", "jdbc", "kafka", "mysql_cdc")
FORMATS = ("avro", "csv", "debezium", "json", "protobuf", "raw", "string")

_LIBPQ = ("psycopg-binary", "psycopg-c")
"""Packages of psycopg with the library libpq, which executors may lack."""
_FURTHER = {
    "json": ("msgspec",),
    "protoc": ("grpcio-tools",),
    "cdc": _LIBPQ,
    "postgres": _LIBPQ,
    # For logins with `caching_sha2_password`, and with `ed25519`.
    "mysql_cdc": ("cryptography", "pynacl"),
    # For object stores, and in S3 for `visibility="listing"`.
    "files": ("obstore", "boto3"),
}
"""Packages of a part that are added if they are installed here."""
_EXTRAS = {
    **{name: name for name in ("avro", "iceberg", "postgres", "protobuf")},
    **{"cdc": "postgres", "jdbc": "postgres", "mysql_cdc": "mysql", "registry": "avro"},
}
"""The extra that brings the packages of a part."""
_LEFT_OUT = re.compile(r"(^|/)(__pycache__|tests?|include|benchmarks)/|\.(pyc|pyi|pxd|pyx|h|hpp|a)$")
_LEVEL = 4
"""Compression level of gzip. Higher ones take minutes for compiled libraries, and save a tenth."""

_PYTHON = """#!/bin/sh
# Starts the Python of this machine with the packages of this archive.
here=$(cd "$(dirname "$0")/.." && pwd)
PYTHONPATH="$here/packages${{PYTHONPATH:+:$PYTHONPATH}}"
export PYTHONPATH
exec "${{AIRFLOW_KAFKA_SPARK_PYTHON:-python{version}}}" "$@"
"""


def pack(args: argparse.Namespace) -> tuple[dict[str, object], str]:
    """Write the archive that the command line describes.

    :return: its facts, and a text about its use.
    :raises ValueError: a package is not installed here.
    """
    names = list_distributions(_list_parts(args))
    target = Path(args.output)
    write_archive(target, names)
    found = {name: metadata.version(name) for name in names}
    size = target.stat().st_size
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    address, path = target.resolve().as_uri(), str(target.resolve())
    # Spark reads a path with a space, for instance, in its encoded form only.
    archive = path if address == f"file://{path}" else address
    listed = "\n".join(f"  {name} {version}" for name, version in found.items())
    text = (
        f"{target}: {len(found)} packages, {size / 1e6:,.0f} MB\n{listed}\n\n"
        f"In the extra of the `spark` connection, with a path that this task can read:\n"
        f'  "spark.archives": "{archive}#environment", "spark.pyspark.python": "./environment/bin/python"\n'
        f"Executors need a `python{python}` on their PATH, or its path as `spark.executorEnv.AIRFLOW_KAFKA_SPARK_PYTHON`."
    )
    return {"archive": str(target), "bytes": size, "python": python, "packages": found}, text


def _list_parts(args: argparse.Namespace) -> list[str]:
    parts = ["spark", "kafka", *args.sink, *args.source, *args.format]
    if {"cdc", "mysql_cdc"}.intersection(args.source):
        # Tasks register the schemas of tables.
        parts += ["registry"] if {"avro", "protobuf"}.intersection(args.format) else []
        parts += ["protoc"] if "protobuf" in args.format else []
    return parts


def list_distributions(parts: Iterable[str]) -> list[str]:
    """Return the distributions that parts of a task need, with all that these require, sorted.

    :param parts: keys of :data:`PACKAGES` and :data:`_FURTHER`, and formats that need nothing.
    :raises ValueError: one is not installed here.
    """
    wanted = []
    for part in dict.fromkeys(parts):
        wanted += [(name, part) for name, _ in PACKAGES.get(part, ())]
        wanted += [(name, part) for name in _FURTHER.get(part, ()) if is_installed(name)]
        if part in INSTEAD and is_installed(INSTEAD[part][0]):
            wanted.append((INSTEAD[part][0], part))
    found: set[str] = set()
    for name, part in wanted:
        if not is_installed(name):
            extra = f"[{_EXTRAS[part]}]" if part in _EXTRAS else ""
            raise ValueError(
                f"`{name}`, which executors need for {part}, is not installed here; "
                f"install `airflow-provider-kafka-spark{extra}` first"
            )
        _add_required(name, frozenset(), found)
    return sorted(found)


def _add_required(name: str, extras: frozenset[str], found: set[str]) -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    name = canonicalize_name(name)
    if (name in found and not extras) or not is_installed(name):
        return  # a requirement that is optional on this platform
    found.add(name)
    for line in metadata.requires(name) or ():
        required = Requirement(line)
        if required.marker is None or any(required.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            _add_required(required.name, frozenset(required.extras), found)


def write_archive(target: Path, names: Iterable[str]) -> None:
    """Write this package and the files of installed distributions into an archive that has ``bin/python`` and ``packages``.

    The archive appears under its name when it is complete.
    """
    partial = target.with_name(f"{target.name}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(partial, "w:gz", compresslevel=_LEVEL) as archive:
            script = _PYTHON.format(version=f"{sys.version_info.major}.{sys.version_info.minor}").encode()
            entry = tarfile.TarInfo("bin/python")
            entry.size, entry.mode = len(script), 0o755
            archive.addfile(entry, io.BytesIO(script))
            for inside, path in chain(_list_own_files(), *map(_list_files, names)):
                archive.add(path, f"packages/{inside}", recursive=False)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _list_own_files() -> Iterator[tuple[str, Path]]:
    """Yield the files of this package: their paths below `site-packages`, and their paths here."""
    package = Path(airflow_kafka_spark.__file__).parent
    for path in sorted(package.rglob("*")):
        inside = path.relative_to(package.parent).as_posix()
        if not _LEFT_OUT.search(inside) and path.is_file():
            yield inside, path


def _list_files(name: str) -> Iterator[tuple[str, Path]]:
    """Yield the importable files of a distribution: their paths below `site-packages`, and their paths here."""
    for file in metadata.distribution(name).files or ():
        inside = file.as_posix()
        path = Path(str(file.locate()))
        if not inside.startswith("../") and not _LEFT_OUT.search(inside) and path.is_file():
            yield inside, path
