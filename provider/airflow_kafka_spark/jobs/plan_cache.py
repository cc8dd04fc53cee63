"""Plans of transforms and SQL, kept in files for later tasks.

Spark analyzes a chain before its first record is read. That takes a core two to four seconds in a new JVM, and half a second in a
warm one. Its result, the Arrow program that tasks run, depends on the chain, on the columns that are read, on Spark's settings
and on the installed software only. A task whose chain was analyzed before with all of these equal reads the program from a file,
and needs no SQL session.

The files lie below ``plans`` in the cache directory (`find_cache_directory`), some kilobytes each. The name of a file is a digest
of everything that the plan depends on, so that any change leads to another file. Only programs that run in Arrow are kept. A
chain has no file if its results may change although its text does not: functions and classes of the user, SQL with variables, or
with dates such as ``DATE 'today'``, which Spark replaces while it analyzes.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import functools
import hashlib
import logging
import os
import pickle
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_kafka_spark import __version__
from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.hooks.spark.class_archive import compute_age
from airflow_kafka_spark.hooks.spark.jars import find_cache_directory, read_pyspark_version
from airflow_kafka_spark.hooks.spark.warm.process import list_changes

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_kafka_spark.hooks.spark.hook import SparkHook

log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[1]
# What plans are made of: a plan of other code is another plan, even if the version of the package is equal, as in a checkout.
_SOURCES = ("formats", "jobs", "transforms")
_DIGEST = hashlib.sha256
_PLAIN = (bool, int, float, bytes, decimal.Decimal, datetime.date, datetime.datetime, datetime.timedelta)
_MAX_FILES = 500
"""Number of files that stay when a new one is written: those that were used last."""

# Spark replaces these words when it parses `DATE 'today'`, and variables (`${env:HOME}`) in all SQL.
_CHANGING = re.compile(r"\b(now|today|tomorrow|yesterday)\b|\$\{", re.IGNORECASE)
_ESCAPED_CHARACTER = re.compile(r"\\[uU0-9]")


@dataclass(frozen=True)
class PlanFile:
    """The file of a plan, which need not exist.

    :param path: its path.
    """

    path: Path

    @classmethod
    def find(cls, spark: SparkHook, definition: object, schema: pa.Schema) -> PlanFile | None:
        """Return the file of the plan of a chain; None if this chain, or this Spark, has none.

        :param spark: Spark, which is not started.
        :param definition: everything that the plan depends on besides: options, formats and transforms.
        :param schema: the columns that are read.
        """
        facts = spark.find_analysis_facts()
        if facts is None:
            return None
        digest = _DIGEST()
        try:
            for part in (*_list_software(), *facts, schema.serialize().to_pybytes().hex(), *_describe(definition)):
                digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
            return cls(find_cache_directory() / "plans" / f"{digest.hexdigest()[:40]}.plan")
        except (_Undescribed, KafkaSparkError, OSError, RuntimeError) as reason:  # the user may have no home directory
            log.debug("The plan of this chain is not kept: %s", reason)
            return None

    def load(self) -> object:
        """Return the plan; None if the file does not exist, is damaged, or belongs to another user."""
        try:
            with open(self.path, "rb") as file:
                if os.fstat(file.fileno()).st_uid not in (os.getuid(), 0):
                    # To unpickle a file runs code that it names.
                    return None
                found = file.read()
            size = _DIGEST().digest_size
            if _DIGEST(found[size:]).digest() != found[:size]:
                return None
            plan: object = pickle.loads(found[size:])
        except Exception:
            return None
        with contextlib.suppress(OSError):  # a cache that others fill
            os.utime(self.path)
        return plan

    def keep(self, plan: object) -> None:
        """Write the plan. Nothing happens if the cache cannot be written."""
        data = pickle.dumps(plan)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.path.parent, prefix=".making-", delete=False) as file:
                try:
                    file.write(_DIGEST(data).digest() + data)
                    file.close()
                    os.replace(file.name, self.path)
                except BaseException:
                    os.unlink(file.name)
                    raise
            self._remove_oldest()
        except OSError as error:
            log.debug("The plan of this chain is not kept: %s", error)

    def _remove_oldest(self) -> None:
        by_age = sorted((compute_age(file), file) for file in self.path.parent.iterdir())
        for _, file in by_age[_MAX_FILES:]:
            file.unlink(missing_ok=True)


@functools.cache
def _list_software() -> tuple[str, ...]:
    """Return the versions of the libraries, and a text for each module of this package that takes part in a plan, which changes
    with the module."""
    import pyarrow as pa

    return (
        __version__,
        read_pyspark_version(),
        pa.__version__,
        *(change for source in _SOURCES for change in list_changes(_PACKAGE / source, "**/*.py")),
    )


class _Undescribed(Exception):
    """Raised for a part of a chain whose behavior its text does not determine."""


def _describe(value: object) -> Iterator[str]:
    """Yield texts that differ for values that make different plans.

    :raises _Undescribed: the value is a function, of a class of the user, or a text with which results change.
    """
    from airflow_kafka_spark.sinks.base import Sink

    kind = type(value)
    yield f"{kind.__module__}.{kind.__qualname__}"
    if value is None or kind in _PLAIN:
        yield repr(value)
    elif isinstance(value, str):
        if _CHANGING.search(value.replace("\\", "")) or _ESCAPED_CHARACTER.search(value):
            raise _Undescribed("a text has a variable, a name of a day that Spark replaces, or an escaped character")
        yield f"{len(value)} {value}"
    elif not isinstance(value, Sink):  # rows are set aside for a sink, whichever it is
        parts = list(_list_parts(value))
        yield str(len(parts))
        for part in parts:
            yield from _describe(part)


def _list_parts(value: object) -> Iterable[object]:
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, AbstractSet):
        return sorted(value, key=repr)
    kind = type(value)
    if is_dataclass(value) and kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return [(field.name, getattr(value, field.name)) for field in fields(value) if field.compare]
    raise _Undescribed(f"{kind.__module__}.{kind.__qualname__} is not described by its text")
