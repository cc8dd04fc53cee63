"""What a task of another sink's job notes: which records its rows were made of. Imports neither Airflow nor pyspark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from airflow_kafka_spark.sinks.base import Rows, SplitWriter
from airflow_kafka_spark.windows.model import Split
from airflow_kafka_spark.windows.offset_set import OffsetSet

TAKEN, REFUSED = "captured", "captured_refused"
"""What a token says beside what the sink's writer tells: offsets of the rows that were written, and of those that cannot be."""


@dataclass
class CapturingWriter(SplitWriter):
    """Hands rows to a sink's writer, and notes their offsets.

    :param writer: the sink's; None where that has the window already: then rows are only noted.
    """

    writer: SplitWriter | None
    _taken: OffsetSet = field(default_factory=OffsetSet, init=False, repr=False)
    _refused: OffsetSet = field(default_factory=OffsetSet, init=False, repr=False)

    def open(self, split: Split) -> None:
        self._taken, self._refused = OffsetSet(), OffsetSet()
        if self.writer is not None:
            self.writer.open(split)

    def unwritable(self, rows: Rows) -> Mapping[int, str]:
        found = self.writer.unwritable(rows) if self.writer is not None else {}
        self._refused.add(rows.offsets.take(pa.array(sorted(found), pa.int64())).to_pylist())
        return found

    def write(self, rows: Rows) -> None:
        self._taken.add(rows.offsets.to_pylist())
        if self.writer is not None:
            self.writer.write(rows)

    def close(self) -> Mapping[str, Any]:
        token = self.writer.close() if self.writer is not None else {"rows": len(self._taken)}
        return {**token, TAKEN: self._taken.to_text(), REFUSED: self._refused.to_text()}

    def abort(self) -> None:
        if self.writer is not None:
            self.writer.abort()
