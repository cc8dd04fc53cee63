"""Writing one split in a Spark task, into hidden data files of an object store that no manifest names yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_kafka_spark.sinks.base import Rows
from airflow_kafka_spark.sinks.files.directory import file_stem
from airflow_kafka_spark.sinks.files.tasks.write import directory_names, misplaced_reason, unfit_rows
from airflow_kafka_spark.sinks.lake.tasks.write import LakeFile, LakeSplitWriter, LakeTarget
from airflow_kafka_spark.sinks.tasks.buffered_files import PartitionKey


@dataclass(frozen=True, kw_only=True)
class ObjectsTarget(LakeTarget):
    """The part of an attempt that tasks need. Files leave out the columns that become directories.

    :param directories: these columns.
    :param attempt_id: the part of a file's name that says which attempt has written it.
    """

    directories: tuple[str, ...] = ()
    attempt_id: str = ""

    @property
    def partition_by(self) -> tuple[str, ...]:
        """The columns that become directories."""
        return self.directories


class ObjectsSplitWriter(LakeSplitWriter[LakeFile]):
    """Writes one split into data files whose names hold the attempt and the task attempt."""

    target: ObjectsTarget

    def unwritable(self, rows: Rows) -> Mapping[int, str]:
        """Return rows with a value that the format cannot hold, or that is too long for the name of a directory."""
        return unfit_rows(self.target.spec, self.target.file_schema, self.target.directories, rows)

    def open_file(self, key: PartitionKey, part: int) -> LakeFile:
        name = f"{file_stem(self.split.range, part)}-{self.target.attempt_id}-{self.token[:12]}{self.target.spec.suffix}"
        directory = "/".join([self.target.attempt, *key])
        self.target.store.make(directory)
        return self.new_file(f"{directory}/{name}")

    def new_file(self, path: str) -> LakeFile:
        return LakeFile(self.target, path)

    def describe(self, file: LakeFile, key: PartitionKey) -> Mapping[str, Any]:
        """Return nothing more: the directories of a file hold its partition values."""
        return {}

    def partition_names(self, column: str, values: pa.Array) -> tuple[Sequence[str], np.ndarray]:
        """Return the directories of a partition column's values, and the index of the directory of each row."""
        return directory_names(column, values)

    def misplaced(self, key: PartitionKey) -> str:
        return misplaced_reason(key)
