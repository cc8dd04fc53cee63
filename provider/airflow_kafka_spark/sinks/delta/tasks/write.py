"""Writing one split of a Delta table in a Spark task."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_kafka_spark.sinks.delta.tasks.statistics import columns_with_nan, file_statistics
from airflow_kafka_spark.sinks.lake.tasks.write import LakeFile, LakeSplitWriter, LakeTarget, footer_of
from airflow_kafka_spark.sinks.tasks.buffered_files import PartitionKey, partition_values


@dataclass(frozen=True, kw_only=True)
class DeltaTarget(LakeTarget):
    """The part of an attempt that tasks need. Files leave out the columns that partition the table.

    :param partition_columns: these columns.
    :param statistics: the columns that have statistics.
    """

    partition_columns: tuple[str, ...] = ()
    statistics: frozenset[str] = field(default_factory=frozenset)

    @property
    def partition_by(self) -> tuple[str, ...]:
        """The columns that partition the table."""
        return self.partition_columns


class DeltaDataFile(LakeFile):
    """A data file that knows which of its columns hold a NaN."""

    def __init__(self, target: LakeTarget, path: str) -> None:
        self.nan: set[str] = set()
        super().__init__(target, path)

    def add(self, batch: pa.RecordBatch) -> None:
        super().add(batch)
        self.nan |= columns_with_nan(batch)


class DeltaSplitWriter(LakeSplitWriter[DeltaDataFile]):
    """Writes one split into data files of a Delta table."""

    target: DeltaTarget

    def new_file(self, path: str) -> DeltaDataFile:
        return DeltaDataFile(self.target, path)

    def describe(self, file: DeltaDataFile, key: PartitionKey) -> Mapping[str, Any]:
        """Return partition values and Delta's statistics."""
        statistics = file_statistics(footer_of(file), self.schema, self.target.statistics, file.nan)
        partition = dict(zip(self.target.partition_by, key, strict=True))
        return {"partition": partition, "stats": json.dumps(statistics, ensure_ascii=False)}

    def partition_names(self, column: str, values: pa.Array) -> tuple[Sequence[str | None], np.ndarray]:
        """Return the values of a partition column as Delta's log has them. Delta takes an empty text for a null."""
        encoded = values.dictionary_encode(null_encoding="encode")
        names = [value or None for value in partition_values(encoded.dictionary)]
        return names, encoded.indices.to_numpy(zero_copy_only=False)
