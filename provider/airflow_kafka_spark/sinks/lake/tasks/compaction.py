"""Compaction of a lake table on the driver: the selection of files, and writing the files that replace them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa

from airflow_kafka_spark import faults
from airflow_kafka_spark.sinks.base import Rows
from airflow_kafka_spark.sinks.lake.tasks.upsert import TableFile
from airflow_kafka_spark.sinks.storage.tasks.write import StoreSplitWriter
from airflow_kafka_spark.windows.model import OffsetRange, Split

if TYPE_CHECKING:
    from airflow_kafka_spark.sinks.storage.attempts import TableAttempt

_SMALL = 0.75
"""Files smaller than this share of the target size are joined, as Spark's rewrite_data_files does."""

FileT = TypeVar("FileT")


def group_small_files(
    files: Iterable[FileT], partition: Callable[[FileT], Hashable], size: Callable[[FileT], int], target: int
) -> Iterator[list[FileT]]:
    """Yield groups of small files of one partition, none larger than the target size together.

    :param partition: returns the partition of a file.
    :param size: returns its size in bytes.
    :param target: the target size in bytes.
    """
    small: dict[Hashable, list[FileT]] = defaultdict(list)
    for file in files:
        if size(file) < _SMALL * target:
            small[partition(file)].append(file)
    for of_partition in small.values():
        group: list[FileT] = []
        total = 0
        for file in of_partition:
            if group and total + size(file) > target:
                if len(group) > 1:
                    yield group
                group, total = [], 0
            group.append(file)
            total += size(file)
        if len(group) > 1:
            yield group


@contextmanager
def run_compaction(attempt: TableAttempt, **facts: object) -> Iterator[None]:
    """Begin the attempt of a compaction, and finish it once its commit has succeeded.

    The next attempt at a window removes the files of a failed compaction.

    :param facts: further facts for the attempt's record.
    """
    try:
        attempt.begin(**facts)
        yield
        faults.reached("sink.compacted")
        attempt.finish()
    finally:
        attempt.release()


def join_files(
    writer: StoreSplitWriter[Any], files: Sequence[TableFile], rows: int | None, window: int
) -> Sequence[Mapping[str, Any]]:
    """Write the rows of files into one file.

    :param rows: the number of rows that they have; None if unknown.
    :param window: the number of the window after which it is done, for the file's name.
    :return: the files, as the writer describes them.
    :raises ValueError: another number of rows was read.
    :raises OSError: the store did not answer.
    """
    writer.open(Split(0, OffsetRange("compacted", 0, 0, window)))
    try:
        for file in files:
            for batch in file.batches(None):
                writer.write(Rows(batch, pa.array(np.zeros(batch.num_rows, np.int64))))
    except BaseException:
        writer.abort()
        raise
    token = writer.close()
    if rows is not None and token["rows"] != rows:
        raise ValueError(f"{token['rows']:,} rows were read of files that have {rows:,}")
    return list(token["files"])
