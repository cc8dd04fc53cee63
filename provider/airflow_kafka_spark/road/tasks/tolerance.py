"""Bad records that are tolerated: a task leaves them out, and keeps them where somebody wants them.

Runs in Spark's tasks. Imports neither Airflow nor pyspark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from airflow_kafka_spark.road.columns import Lines
from airflow_kafka_spark.sinks.tasks.dead_letters import SCHEMA
from airflow_kafka_spark.windows.model import TASK_PUT, BadRecord, TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_kafka_spark.sinks.tasks.dead_letters import DeadLetterBuffer
    from airflow_kafka_spark.sources.kafka.tasks.read import Records

SENT = "it was sent to the dead letter topic by an earlier attempt at this window"


@dataclass(frozen=True)
class Tolerance:
    """What becomes of a window's bad records.

    :param keep: whether they are wanted as dead letters, else they are only counted.
    :param sent: those that earlier attempts at the window have sent already: they stay dead, whatever they look like now.
    """

    keep: bool = True
    sent: Mapping[TopicPartition, frozenset[int]] = field(default_factory=dict)

    def take(self, records: Records, lines: Lines, letters: DeadLetterBuffer) -> Lines:
        """Return the lines without bad records, and without those that earlier attempts have sent. New bad records are added to
        the letters.

        :param records: what the lines were made of.
        """
        import pyarrow as pa

        dead = self.bury(records, lines.at, lines.bad, letters)
        if len(dead) == len(lines.bad):
            return lines
        rows, offsets = lines.rows, {bad.offset for bad in dead}
        kept = rows.filter(pa.array([offset not in offsets for offset in rows.offsets.to_pylist()], pa.bool_()))
        # What is dead is not ignored, too, though it may look like that now.
        ignored = len(records) - kept.batch.num_rows - len(dead)
        return replace(lines, rows=kept, ignored=ignored, bad=dead, at=())

    def refuse(self, records: Records, lines: Lines, refused: Mapping[int, str], letters: DeadLetterBuffer) -> Lines:
        """Return the lines without rows that the sink cannot write. Those are added to the letters.

        :param records: what the lines were made of.
        :param refused: where among the rows they are, and why.
        """
        import pyarrow as pa

        if not refused:
            return lines
        rows, places = lines.rows, {offset: at for at, offset in enumerate(records.offsets.to_pylist())}
        found = [
            BadRecord(records.topic, records.partition, rows.offsets[at].as_py(), why, TASK_PUT)
            for at, why in sorted(refused.items())
        ]
        if self.keep:
            letters.add(letters_of(records, [places[b.offset] for b in found], found))
        kept = pa.array([at not in refused for at in range(rows.batch.num_rows)], pa.bool_())
        bad = sorted([*lines.bad, *found], key=lambda record: record.offset)
        return replace(lines, rows=rows.filter(kept), bad=bad, at=())

    def bury(
        self, records: Records, at: Sequence[int], bad: Sequence[BadRecord], letters: DeadLetterBuffer
    ) -> Sequence[BadRecord]:
        """Return all dead records of a batch: those that are bad now, which are added to the letters if they are new, and those
        that were sent before.

        :param at: where among the records the bad ones are.
        """
        sent = self.sent.get(TopicPartition(records.topic, records.partition), frozenset())
        new = [(i, b) for i, b in zip(at, bad, strict=True) if b.offset not in sent]
        if self.keep and new:
            letters.add(letters_of(records, [i for i, _ in new], [b for _, b in new]))
        if not sent:
            return bad
        before = [offset for offset in records.offsets.to_pylist() if offset in sent]
        known = [BadRecord(records.topic, records.partition, offset, SENT) for offset in before]
        return tuple(sorted([*(b for _, b in new), *known], key=lambda record: record.offset))


def letters_of(records: Records, at: Sequence[int], bad: Sequence[BadRecord]) -> pa.RecordBatch:
    """Return the dead letters of bad records: the records as they were read, with the reasons.

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
