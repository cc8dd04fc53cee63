"""Bad records that are tolerated: a task leaves them out, and keeps them where somebody wants them.

Runs in Spark's tasks. Imports neither Airflow nor pyspark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from airflow_kafka_spark.road.columns import Lines
from airflow_kafka_spark.sinks.dead_letters_worker import SCHEMA
from airflow_kafka_spark.windows.model import BadRecord, TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_kafka_spark.sinks.dead_letters_worker import Letters
    from airflow_kafka_spark.sources.kafka_worker import Records

SENT = "it was sent to the dead letter topic by an earlier attempt at this window"


@dataclass(frozen=True)
class Tolerance:
    """What becomes of a window's bad records.

    :param keep: whether they are wanted as dead letters, else they are only counted.
    :param sent: those that earlier attempts at the window have sent already: they stay dead, whatever they look like now.
    """

    keep: bool = True
    sent: Mapping[TopicPartition, frozenset[int]] = field(default_factory=dict)

    def take(self, records: Records, lines: Lines, letters: Letters) -> Lines:
        """The lines without what is dead already; bad ones go to the letters.

        :param records: what the lines were made of.
        """
        sent = self.sent.get(TopicPartition(records.topic, records.partition))
        if not sent:
            if self.keep:
                letters.add(letters_of(records, lines.at, lines.bad))
            return lines
        new = [(at, bad) for at, bad in zip(lines.at, lines.bad, strict=True) if bad.offset not in sent]
        if self.keep:
            letters.add(letters_of(records, [at for at, _ in new], [bad for _, bad in new]))
        return self._without(records, lines, sent, [bad for _, bad in new])

    def _without(self, records: Records, lines: Lines, sent: frozenset[int], new: list[BadRecord]) -> Lines:
        import pyarrow as pa

        rows = lines.rows
        offsets = rows.offsets.to_pylist()
        kept = pa.array([offset not in sent for offset in offsets], pa.bool_())
        tombstones = rows.tombstones.filter(kept) if rows.tombstones is not None else None
        rows = replace(rows, batch=rows.batch.filter(kept), offsets=rows.offsets.filter(kept), tombstones=tombstones)
        dead = [offset for offset in records.offsets.to_pylist() if offset in sent]
        known = [BadRecord(records.topic, records.partition, offset, SENT) for offset in dead]
        bad = sorted([*new, *known], key=lambda record: record.offset)
        return replace(lines, rows=rows, bad=tuple(bad), at=())


def letters_of(records: Records, at: Sequence[int], bad: Sequence[BadRecord]) -> pa.RecordBatch:
    """Bad records as they were read, and why they are bad.

    :param at: where among the records they are.
    """
    import pyarrow as pa

    originals = [records.original(index) for index in at]
    columns = {
        "topic": [records.topic] * len(at),
        "partition": [records.partition] * len(at),
        "offset": [b.offset for b in bad],
        "timestamp": records.timestamps.take(pa.array(at, pa.int64())),
        "key": [key for key, _, _ in originals],
        "value": [value for _, value, _ in originals],
        "headers": [[{"key": n, "value": v} for n, v in headers] if headers else None for _, _, headers in originals],
        "stage": [b.stage for b in bad],
        "reason": [b.reason for b in bad],
    }
    return pa.RecordBatch.from_pydict(columns, schema=SCHEMA)
