"""Spark's Python workers: check that a task has received all of its rows, and keep freed memory.

If the source of a task's rows fails in the JVM (a broken database connection, a truncated file), Spark closes the stream, and
Arrow treats a closed stream as a complete one: the task gets fewer rows without an error. The job fails later, but a task that
commits by itself would have committed a part. After the last row of a complete stream, Spark writes ``END_OF_STREAM``; after a
truncated one it writes nothing.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from functools import cache
from io import BufferedReader
from types import FrameType
from typing import TypeVar

from airflow_kafka_spark.errors import RowsCutOff

T = TypeVar("T")

_STREAM = "infile"
"""Name of the variable for the input stream, in the function of pyspark's worker that runs a task."""
_WORKER = "pyspark.worker"


def require_end_of_stream(batches: Iterator[T]) -> Iterator[T]:
    """Yield the batches. Raise an error if the stream ends without the marker that Spark writes after the last row.

    :param batches: the argument of a function of ``mapInArrow``.
    :raises RowsCutOff: the stream is truncated, or cannot be checked.
    """
    yield from batches
    stream = _find_stream()
    if stream is None or not stream.peek(1):
        raise RowsCutOff(known=stream is not None)


def _find_stream() -> BufferedReader | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        stream = frame.f_locals.get(_STREAM)
        if isinstance(stream, BufferedReader) and frame.f_globals.get("__name__") in (_WORKER, "__main__"):
            return stream
        frame = frame.f_back
    return None


_MALLOC_SETTINGS = {
    "MALLOC_ARENA_MAX": (-8, 1),
    "MALLOC_TRIM_THRESHOLD_": (-1, 256 << 20),
    "MALLOC_MMAP_THRESHOLD_": (-3, 32 << 20),
}
"""Environment variables of glibc, with the numbers of their parameters (``malloc.h``) and the values that are set here."""


@cache
def keep_freed_memory() -> bool:
    """Let this process use freed memory again, instead of returning it to the system. Return False where that cannot be set.

    The threads of librdkafka allocate what the main thread frees, some megabytes with each fetch. glibc returns that to the
    system each time, and gets it back page by page: a fifth of the CPU time of reading and decoding. Therefore all threads share
    one arena here, and up to 256 MB of freed memory are kept. Settings in the environment have precedence.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    return all([mallopt(number, value) == 1 for name, (number, value) in _MALLOC_SETTINGS.items() if name not in os.environ])
