"""Writing one split in a Spark task, into Parquet files in the table's directory that no commit names yet."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_kafka_spark.errors import Fenced, SinkUnavailable
from airflow_kafka_spark.sinks.base import Rows
from airflow_kafka_spark.sinks.delta.place import ATTEMPTS, BEGUN, TableStore, plain
from airflow_kafka_spark.sinks.delta.tasks.statistics import columns_with_nan, file_statistics
from airflow_kafka_spark.sinks.files.directory import file_stem, flush
from airflow_kafka_spark.sinks.files.tasks.formats import FileSpec
from airflow_kafka_spark.sinks.tasks.buffered_files import BufferedFile, BufferedFilesWriter, PartitionKey, partition_values
from airflow_kafka_spark.windows.model import Split


@dataclass(frozen=True)
class DeltaTarget:
    """The part of an attempt that tasks need.

    :param store: the table's files.
    :param attempt: the name of the attempt's directory of data files.
    :param marker: the name of the attempt below ``_airflow/attempts``. It is removed when the attempt has ended.
    :param pipeline: the pipeline's name.
    :param window: the window, for messages.
    :param schema: the rows' schema.
    :param partition_by: columns that partition the table, which the files leave out.
    :param spec: how files are written.
    :param statistics: the columns that have statistics.
    """

    store: TableStore
    attempt: str
    marker: str
    pipeline: str
    window: str
    schema: pa.Schema
    partition_by: tuple[str, ...]
    spec: FileSpec
    statistics: frozenset[str] = field(default_factory=frozenset)

    @property
    def file_schema(self) -> pa.Schema:
        """The schema of the files: all columns that do not partition the table."""
        return self.spec.stored(pa.schema([f for f in self.schema if f.name not in self.partition_by]))


class _OpenDataFile(BufferedFile):
    """A data file of the table."""

    def __init__(self, store: TableStore, path: str, spec: FileSpec, schema: pa.Schema) -> None:
        self.store, self.path = store, path
        self.nan: set[str] = set()
        super().__init__(store.open(path), spec, schema)

    def add(self, batch: pa.RecordBatch) -> None:
        super().add(batch)
        self.nan |= columns_with_nan(batch)

    def finish(self) -> None:
        super().finish()
        if self.store.place.is_local:
            flush(self.store.full(self.path))

    def drop(self) -> None:
        super().drop()
        self.store.remove(self.path)


class DeltaSplitWriter(BufferedFilesWriter):
    """Writes one split into files of this task attempt alone. The driver commits the files of the task attempt whose result
    Spark returns, and removes the others.

    :param target: where and how to write.
    """

    def __init__(self, target: DeltaTarget) -> None:
        self.target: DeltaTarget = target
        self.token = ""

    def __repr__(self) -> str:
        return f"DeltaSplitWriter({self.target.window}, {self.target.store.place.uri}/{self.target.attempt})"

    def __getstate__(self) -> dict[str, Any]:
        return {"target": self.target, "token": ""}

    def open(self, split: Split) -> None:
        """Begin a split.

        :raises Fenced: a newer attempt at the window has removed this attempt.
        :raises SinkUnavailable: the table's directory cannot be read on this machine.
        """
        self.begin_split(split)
        self.token = uuid.uuid4().hex
        self._refuse_ended()

    def close(self) -> Mapping[str, Any]:
        """Finish all files.

        :return: ``rows``, the task's ``token`` and its ``files``: path below the table, rows, bytes, partition values and Delta's
            statistics of each.
        :raises Fenced: a newer attempt at the window has removed this attempt.
        """
        try:
            self.finish_all()
            if self.target.store.place.is_local:
                flush(self.target.store.full(self.target.attempt))
        except OSError as error:
            raise self.failed(error) from error
        # Whoever removes the attempt may have listed its files before this one was there.
        self._refuse_ended()
        self.token = ""
        return {"rows": self.rows, "files": self.finished}

    def abort(self) -> None:
        if self.token:
            self.drop_all()
            for file in self.finished:
                self.target.store.remove(file["path"])
            self.token = ""

    # --- files --------------------------------------------------------------------------------------------------------

    def open_file(self, key: PartitionKey, part: int) -> _OpenDataFile:
        target = self.target
        # Partition values are in the log only. In a path they would have to be escaped twice.
        number = len(self.finished) + len(self.files)
        path = f"{target.attempt}/{plain(file_stem(self.split.range, number))}-{self.token}.parquet"
        return _OpenDataFile(target.store, path, target.spec, self.schema)

    def finish_file(self, file: _OpenDataFile, key: PartitionKey) -> Mapping[str, Any]:
        file.finish()
        footer = file.writer.footer  # type: ignore[attr-defined]
        statistics = file_statistics(footer, self.schema, self.target.statistics, file.nan)
        return {
            "path": file.path,
            "rows": file.rows,
            "bytes": self.target.store.filesystem.get_file_info(self.target.store.full(file.path)).size,
            "partition": dict(zip(self.target.partition_by, key, strict=True)),
            "stats": json.dumps(statistics, ensure_ascii=False),
        }

    def partition_names(self, column: str, values: pa.Array) -> tuple[Sequence[str | None], np.ndarray]:
        """Return the values of a partition column as Delta's log has them. Delta takes an empty text for a null."""
        encoded = values.dictionary_encode(null_encoding="encode")
        names = [value or None for value in partition_values(encoded.dictionary)]
        return names, encoded.indices.to_numpy(zero_copy_only=False)

    def unwritable(self, rows: Rows) -> Mapping[int, str]:
        """Parquet holds every value of the types that ``validate`` lets pass."""
        return {}

    def failed(self, error: OSError) -> Exception:
        doing = f"writing split {self.split.index} ({self.split.range})"
        if isinstance(error, FileNotFoundError):
            self._refuse_ended()
        return SinkUnavailable(self.target.store.place.uri, doing, str(error))

    def _refuse_ended(self) -> None:
        target = self.target
        doing = f"writing split {self.split.index} ({self.split.range})"
        try:
            if target.store.exists(f"{ATTEMPTS}/{target.marker}/{BEGUN}"):
                return
            there = target.store.exists("_delta_log")
        except OSError as error:
            raise SinkUnavailable(target.store.place.uri, doing, str(error)) from error
        if there:
            raise Fenced(target.pipeline, doing)
        shared = "the Airflow worker and all of Spark's executors must share the file system"
        raise SinkUnavailable(target.store.place.uri, doing, f"there is no table here; {shared}")
