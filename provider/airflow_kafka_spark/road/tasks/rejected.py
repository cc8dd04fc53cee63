"""Records that turn out to be bad behind Spark's SQL, between two topics: told by what was carried along of them. Runs in Spark's
tasks.

Imports neither Airflow nor pyspark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from airflow_kafka_spark.road.tasks.transform_rows import OFFSET, ORIGINAL
from airflow_kafka_spark.sinks.kafka.tasks.encode import KeyValueEncoder, drop_rows
from airflow_kafka_spark.sinks.tasks.dead_letters import DeadLetterBuffer, joined
from airflow_kafka_spark.sources.kafka.tasks.read import Records
from airflow_kafka_spark.windows.model import OUTPUT, SAMPLES, BadRecord, Split, SplitResult

if TYPE_CHECKING:
    from airflow_kafka_spark.road.tasks.tolerance import Tolerance

RECORD = ("key", "value", "topic", "timestamp", "headers", "partition")
"""What a record that is sent may have."""


@dataclass
class Bad:
    """The bad records of one split: how many, the first few, and, where they are wanted, all of them as dead letters.

    :param split: which split.
    :param tolerance: what becomes of them; None: with one of them the split is not published.
    """

    split: Split
    tolerance: Tolerance | None
    count: int = 0
    _samples: list[BadRecord] = field(default_factory=list)
    _letters: DeadLetterBuffer = field(default_factory=DeadLetterBuffer)

    @property
    def ends_it(self) -> bool:
        """Return True if the split is not published, and the rest of it is only counted."""
        return self.count > 0 and self.tolerance is None

    def encoded(self, rows: pa.RecordBatch, encoder: KeyValueEncoder) -> pa.RecordBatch:
        """Return rows as records in binary. Rows that do not fit their format are left out and added to the bad records."""
        records, misfits = encoder.encode(rows)
        if misfits:
            why = [(stage + OUTPUT, f"cannot be written: {reason}") for stage, reason in misfits.values()]
            self.add(rows.take(pa.array(misfits, pa.int64())), why)
        return drop_rows(records, misfits)

    def add(self, rows: pa.RecordBatch, why: Sequence[tuple[str, str]]) -> None:
        """
        :param rows: what was made of them, and carried along.
        :param why: stage and reason of each.
        """
        topic, partition = self.split.range.topic_partition
        offsets = rows.column(rows.schema.get_field_index(OFFSET)).to_pylist()
        bad = [BadRecord(topic, partition, at, reason, stage) for at, (stage, reason) in zip(offsets, why, strict=True)]
        self.count += len(bad)
        self._samples += bad[: SAMPLES - len(self._samples)]
        if self.tolerance is not None and self.tolerance.keep:
            self.tolerance.bury(self._originals(rows), range(len(bad)), bad, self._letters)

    def account(self, read: SplitResult) -> SplitResult:
        """Return the result of the split, with its bad records.

        :param read: what is known without them.
        """
        return replace(
            read,
            rejected=read.rejected + self.count,
            samples=(*read.samples, *self._samples)[:SAMPLES],
            letters=joined(read.letters, self._letters.to_bytes()),
        )

    def _originals(self, rows: pa.RecordBatch) -> Records:
        """Return the records as they were read."""
        stamps = rows.column(ORIGINAL["timestamp"]).cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64())
        lists = {part: rows.column(ORIGINAL[part]).to_pylist() for part in ("key", "value", "headers")}
        pairs = [None if one is None else [(h["key"], h["value"]) for h in one] for one in lists["headers"]]
        place = self.split.range
        return Records(place.topic, place.partition, rows.column(OFFSET), stamps, 0, lists["key"], lists["value"], pairs)


def sent(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the columns of rows that are sent."""
    return rows.select([name for name in rows.schema.names if name in RECORD])
