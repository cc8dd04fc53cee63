"""Manual changes of a pipeline (reset, skip, pause, replay ...), as the ledger remembers them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from airflow_kafka_spark.windows.model import Landed, Published, TopicPartition

Action = Literal["reset", "forget", "skip", "pause", "resume", "replay", "resend", "rebind", "rename"]

_SERIALIZED = ("number", "action", "who", "why", "at")
_OF_REPLAYS = ("window", "name", "replay")
_ABOUT_A_WINDOW = ("replay", "resend", "rebind", "rename", "forget")


@dataclass(frozen=True)
class Change:
    """One manual change of a pipeline.

    :param number: from 1, within its pipeline.
    :param action: ``reset``: its position was moved; ``skip``: it was moved on, past an open window or past what waited;
        ``forget``: the ledger forgot it; ``pause`` and ``resume``: whether it may move windows; ``replay``: a window is to be
        moved once more; ``resend``: the dead letters of a window were sent again to the topics that they came from; ``rebind``:
        another destination or another task is allowed; ``rename``: it has another name.
    :param who: who asked for it.
    :param why: what for.
    :param at: UTC instant, ISO 8601.
    :param before: where the pipeline stood, per partition; a partition it had not read is missing.
    :param after: where it stands now, in the partitions that were moved.
    :param discarded: numbers of the open windows that were given up.
    :param landed: where records lie that the open windows had published before they were given up; None where that is not known.
        Of ``resend``: where the dead letters lie that were sent again.
    :param published: of ``forget``: what the pipeline had published in all.
    :param window: of ``replay`` and ``resend``: the window's number; of ``rebind``: that of an open window which may go
        elsewhere, too; of ``forget``: that of the last window, whose number is not used again; else 0.
    :param name: of ``replay`` and ``resend``: the data interval's name, empty for a window of progress; of ``rename``: its
        other name.
    :param replay: of ``replay``: how often the window had been replayed before.
    :param offset: where it lies in the ledger partition; -1 when not read from there. Not part of what is compared.
    """

    number: int
    action: Action
    who: str
    why: str
    at: str
    before: Mapping[TopicPartition, int] = field(default_factory=dict)
    after: Mapping[TopicPartition, int] = field(default_factory=dict)
    discarded: tuple[int, ...] = ()
    window: int = 0
    name: str = ""
    replay: int = 0
    landed: tuple[Landed, ...] | None = None
    published: Mapping[TopicPartition, Published] = field(default_factory=dict)
    offset: int = field(default=-1, compare=False)


def change_to_json(change: Change) -> dict[str, Any]:
    """Return a change as JSON. ``before`` and ``after`` are ``[[topic, partition, offset], ...]``. Facts that only some actions
    have are left out of the others, because older releases do not know them.
    """
    offsets = {name: [[*tp, offset] for tp, offset in sorted(getattr(change, name).items())] for name in ("before", "after")}
    asked = {name: getattr(change, name) for name in _OF_REPLAYS} if change.action in _ABOUT_A_WINDOW else {}
    facts = {
        **({"landed": landed_to_json(change.landed)} if change.landed is not None else {}),
        **({"published": published_to_json(change.published)} if change.published else {}),
    }
    return {**{n: getattr(change, n) for n in _SERIALIZED}, **offsets, "discarded": list(change.discarded), **asked, **facts}


def change_from_json(value: Mapping[str, Any], offset: int = -1) -> Change:
    """Return the change that the ledger holds as JSON.

    :param offset: where it was read.
    """
    offsets = {name: {TopicPartition(t, p): offset for t, p, offset in value[name]} for name in ("before", "after")}
    known = {f.name for f in fields(Change)}
    facts = {name: fact for name, fact in value.items() if name in known}
    told = {
        "discarded": tuple(value["discarded"]),
        "landed": landed_from_json(value["landed"]) if "landed" in value else None,
        "published": published_from_json(value.get("published", ())),
    }
    return Change(**{**facts, **offsets, **told, "offset": offset})


def landed_to_json(parts: Iterable[Landed]) -> list[list[Any]]:
    """Return ``[[topic, partition, first, last, records], ...]``."""
    return [[p.topic, p.partition, p.first, p.last, p.records] for p in parts]


def landed_from_json(value: Iterable[Sequence[Any]]) -> tuple[Landed, ...]:
    return tuple(Landed(*part) for part in value)


def published_to_json(published: Mapping[TopicPartition, Published]) -> list[list[Any]]:
    """Return ``[[topic, partition, end, records], ...]``."""
    return [[*tp, found.end, found.records] for tp, found in sorted(published.items())]


def published_from_json(value: Iterable[Sequence[Any]]) -> dict[TopicPartition, Published]:
    return {TopicPartition(topic, partition): Published(end, records) for topic, partition, end, records in value}
