"""Check that Spark has handed a Python task all of its rows. Runs in Spark's tasks: imports neither Airflow nor pyspark.

When what feeds a task fails in the JVM (a database connection that breaks, a file that ends too early), Spark closes the stream,
and Arrow takes a closed stream for one that has ended: the task sees fewer rows and a clean end. The job fails all the same, but
a task that commits by itself would have committed a part. Behind the last row of all Spark writes ``END_OF_STREAM``; behind one
that was cut off there is nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from io import BufferedReader
from typing import TypeVar

from airflow_kafka_spark.errors import RowsCutOff

T = TypeVar("T")

_STREAM = "infile"
"""The name of the stream that pyspark's worker reads, in the function that runs a task."""
_WORKER = "pyspark.worker"


def require_end_of_stream(batches: Iterator[T]) -> Iterator[T]:
    """Yield the batches. Raise an error if the stream ends without the word that Spark writes behind the last row.

    :param batches: what Spark gave to a function of ``mapInArrow``.
    :raises RowsCutOff: Spark has stopped in the middle, or may have.
    """
    yield from batches
    stream = _stream()
    if stream is None or not stream.peek(1):
        raise RowsCutOff(known=stream is not None)


def _stream() -> BufferedReader | None:
    frame = sys._getframe()
    while frame is not None:
        stream = frame.f_locals.get(_STREAM)
        if isinstance(stream, BufferedReader) and frame.f_globals.get("__name__") in (_WORKER, "__main__"):
            return stream
        frame = frame.f_back  # type: ignore[assignment]
    return None
