"""What somebody has done to a pipeline's offsets, as the ledger remembers it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from airflow_kafka_spark.windows.model import TopicPartition


@dataclass(frozen=True)
class Change:
    """One change by hand.

    :param number: from 1, within its pipeline.
    :param action: ``reset``: its position was moved; ``forget``: the ledger forgot it.
    :param who: who asked for it.
    :param why: what for.
    :param at: UTC instant, ISO 8601.
    :param before: where the pipeline stood, per partition; a partition it had not read is missing.
    :param after: where it stands now, in the partitions that were moved.
    :param discarded: numbers of the open windows that were given up.
    """

    number: int
    action: Literal["reset", "forget"]
    who: str
    why: str
    at: str
    before: Mapping[TopicPartition, int] = field(default_factory=dict)
    after: Mapping[TopicPartition, int] = field(default_factory=dict)
    discarded: tuple[int, ...] = ()


def change_to_json(change: Change) -> dict[str, Any]:
    """``before`` and ``after`` are ``[[topic, partition, offset], ...]``."""
    offsets = {name: [[*tp, offset] for tp, offset in sorted(getattr(change, name).items())] for name in ("before", "after")}
    return {**vars(change), **offsets, "discarded": list(change.discarded)}


def change_from_json(value: Mapping[str, Any]) -> Change:
    offsets = {name: {TopicPartition(t, p): offset for t, p, offset in value[name]} for name in ("before", "after")}
    return Change(**{**value, **offsets, "discarded": tuple(value["discarded"])})
