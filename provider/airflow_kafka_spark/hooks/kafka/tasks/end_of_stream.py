"""Check that a Python task has received all of its rows from Spark. It runs in Spark's tasks, without Airflow and pyspark.

If the source of a task's rows fails in the JVM (a broken database connection, a truncated file), Spark closes the stream, and
Arrow treats a closed stream as a complete one: the task gets fewer rows without an error. The job fails later, but a task that
commits by itself would have committed a part. After the last row of a complete stream, Spark writes ``END_OF_STREAM``; after a
truncated one it writes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from io import BufferedReader
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
    frame = sys._getframe()
    while frame is not None:
        stream = frame.f_locals.get(_STREAM)
        if isinstance(stream, BufferedReader) and frame.f_globals.get("__name__") in (_WORKER, "__main__"):
            return stream
        frame = frame.f_back  # type: ignore[assignment]
    return None
