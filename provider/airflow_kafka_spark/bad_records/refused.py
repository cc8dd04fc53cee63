"""Records whose rows the sink has refused: they become bad records like any other, with what they were read as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from airflow_kafka_spark.windows.model import SAMPLES, BadRecord, OffsetRange, Split, SplitResult

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook


def replaced(results: Sequence[SplitResult], again: Sequence[SplitResult]) -> list[SplitResult]:
    """Return the results of a window's splits, with those of splits that were moved once more in place of their first ones."""
    new = {result.index: result for result in again}
    return [new.get(result.index, result) for result in results]


def with_refused(
    results: Sequence[SplitResult], refused: Sequence[BadRecord], splits: Sequence[Split], hook: KafkaHook | None
) -> list[SplitResult]:
    """Return the results of a window's splits, with the records that the sink has refused among the bad ones.

    :param refused: a few.
    :param hook: where the records are read once more, since they are wanted as dead letters; None where they are only counted.
    :raises KafkaSparkError: they cannot be read any more.
    """
    if not refused:
        return list(results)
    from airflow_kafka_spark.sinks.tasks.dead_letters import joined

    by_split: dict[int, dict[int, BadRecord]] = {}
    epochs: dict[int, int] = {}
    for bad in refused:
        split = _split_of(bad, splits)
        by_split.setdefault(split.index, {})[bad.offset] = bad
        epochs[split.index] = split.epoch
    made = []
    for result in results:
        found = by_split.get(result.index)
        if not found:
            made.append(result)
            continue
        rows = int(result.token.get("rows", 0)) - len(found)
        made.append(
            replace(
                result,
                rejected=result.rejected + len(found),
                samples=tuple(sorted([*result.samples, *found.values()], key=lambda bad: bad.offset))[:SAMPLES],
                letters=joined(result.letters, _letters(found, hook, epochs[result.index]))
                if hook is not None
                else result.letters,
                token={**result.token, "rows": rows},
            )
        )
    return made


def _split_of(bad: BadRecord, splits: Sequence[Split]) -> Split:
    place = (bad.topic, bad.partition)
    return next(s for s in splits if s.range.topic_partition == place and s.range.start <= bad.offset < s.range.end)


def _letters(found: Mapping[int, BadRecord], hook: KafkaHook, epoch: int) -> bytes:
    """Return the dead letters of one split's refused records. They are read once more, since tasks do not keep what they read."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from airflow_kafka_spark.sinks.tasks.dead_letters import DeadLetterBuffer, dead_letters
    from airflow_kafka_spark.sources.kafka.tasks.read import KafkaSplitReader

    first, letters = next(iter(found.values())), DeadLetterBuffer()
    wanted = OffsetRange(first.topic, first.partition, min(found), max(found) + 1)
    offsets = pa.array(sorted(found), pa.int64())
    for records in KafkaSplitReader(hook.consumer_config(), wanted, with_headers=True, epoch=epoch):
        at = pc.indices_nonzero(pc.is_in(records.offsets, offsets)).to_pylist()
        if at:
            letters.add(dead_letters([found[records.offsets[index].as_py()] for index in at], records.originals(at)))
    return letters.to_bytes()
