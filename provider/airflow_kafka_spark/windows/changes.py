"""Manual changes of a pipeline (reset, skip, pause, replay ...), as the ledger stores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from airflow_kafka_spark.windows.codec import (
    landed_from_json,
    landed_to_json,
    position_from_json,
    position_to_json,
    published_from_json,
    published_to_json,
)
from airflow_kafka_spark.windows.dead_letters import Runs, decode_offsets, encode_offsets
from airflow_kafka_spark.windows.model import Landed, Published, TopicPartition, Tries
from airflow_kafka_spark.windows.plan import Position

Action = Literal["reset", "forget", "skip", "pause", "resume", "replay", "resend", "rebind", "rename"]

_SERIALIZED = ("number", "action", "who", "why", "at")
_OF_REPLAYS = ("window", "name", "replay")
_ABOUT_A_WINDOW = ("replay", "resend", "rebind", "rename", "forget")


@dataclass(frozen=True)
class Forgotten:
    """The offsets that a pipeline had moved before its records were removed from the ledger. Its sink may still have them.

    :param windows: its position by windows without a data interval.
    :param intervals: the ends of its complete data intervals.
    :param last_interval: name of the last data interval with records; empty without one.
    """

    windows: Position = field(default_factory=Position)
    intervals: Position = field(default_factory=Position)
    last_interval: str = ""


@dataclass(frozen=True)
class Change:
    """One manual change of a pipeline.

    :param number: number of the change within its pipeline, from 1.
    :param action: ``reset``: its position was moved; ``skip``: its position was moved forward, past an open window or past
        records that were waiting; ``forget``: its ledger was removed; ``pause`` and ``resume``: it may no longer, or again, move
        windows; ``replay``: a window is to be moved once more; ``resend``: the dead letters of a window were sent again to the
        topics that they came from; ``rebind``: another destination or another task is allowed; ``rename``: it has another name.
    :param who: user or program that requested it.
    :param why: reason that was given.
    :param at: UTC instant, ISO 8601.
    :param before: position before the change, by partition; without partitions that the pipeline had not read.
    :param after: position after the change, in the partitions that were moved.
    :param discarded: numbers of the open windows that were given up.
    :param landed: offsets of the records that the open windows had published before they were given up; None if unknown. For
        ``resend``: offsets of the dead letters that were sent again.
    :param published: for ``forget``: totals of what the pipeline had published.
    :param forgotten: for ``forget``: the offsets that the pipeline had moved; None if unknown.
    :param resent: for ``resend``: offsets of the records that were sent again, in the partitions that they came from.
    :param window: for ``replay`` and ``resend``: number of the window; for ``rebind``: number of an open window that may change
        its binding, too; for ``forget``: number of the last window, which is not used again; otherwise 0.
    :param name: for ``replay`` and ``resend``: name of the data interval, empty for a window without one; for ``rename``: the
        other name.
    :param replay: for ``replay``: number of earlier replays of the window.
    :param run: run of the Airflow task that requested it, ``<dag_id>/<run_id>/<task_id>``; empty for other requests.
    :param tries: Airflow's counters of that task; None for other requests.
    :param offset: offset of its record in the ledger partition; -1 if it was not read from there. It is not compared.
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
    forgotten: Forgotten | None = None
    resent: Mapping[TopicPartition, Runs] = field(default_factory=dict)
    run: str = ""
    tries: Tries | None = None
    offset: int = field(default=-1, compare=False)

    @property
    def sentence(self) -> str:
        """The change as one sentence: the person, the time and the reason."""
        return f"{self.who} did so at {self.at}: {self.why}"


def change_to_json(change: Change) -> dict[str, Any]:
    """Return a change as JSON. ``before`` and ``after`` are ``[[topic, partition, offset], ...]``.

    Fields that an action does not use are left out, because older releases do not know them.
    """
    offsets = {name: [[*tp, offset] for tp, offset in sorted(getattr(change, name).items())] for name in ("before", "after")}
    asked = {name: getattr(change, name) for name in _OF_REPLAYS} if change.action in _ABOUT_A_WINDOW else {}
    facts = {
        **({"landed": landed_to_json(change.landed)} if change.landed is not None else {}),
        **({"published": published_to_json(change.published)} if change.published else {}),
        **({"forgotten": _forgotten_to_json(change.forgotten)} if change.forgotten is not None else {}),
        **({"resent": encode_offsets(change.resent)} if change.resent else {}),
        **({"run": change.run} if change.run else {}),
        **({"tries": change.tries.to_json()} if change.tries is not None else {}),
    }
    return {**{n: getattr(change, n) for n in _SERIALIZED}, **offsets, "discarded": list(change.discarded), **asked, **facts}


def change_from_json(value: Mapping[str, Any], offset: int = -1) -> Change:
    """Return the change that a record of the ledger contains.

    :param offset: offset of the record.
    """
    offsets = {name: {TopicPartition(t, p): offset for t, p, offset in value[name]} for name in ("before", "after")}
    known = {f.name for f in fields(Change)}
    facts = {name: fact for name, fact in value.items() if name in known}
    parsed = {
        "discarded": tuple(value["discarded"]),
        "landed": landed_from_json(value["landed"]) if "landed" in value else None,
        "published": published_from_json(value.get("published", ())),
        "forgotten": _forgotten_from_json(value["forgotten"]) if "forgotten" in value else None,
        "resent": decode_offsets(value.get("resent", ())),
        "tries": Tries(*value["tries"]) if "tries" in value else None,
    }
    return Change(**{**facts, **offsets, **parsed, "offset": offset})


def _forgotten_to_json(forgotten: Forgotten) -> dict[str, Any]:
    positions = {name: position_to_json(getattr(forgotten, name)) for name in ("windows", "intervals")}
    return {**positions, "last_interval": forgotten.last_interval}


def _forgotten_from_json(value: Mapping[str, Any]) -> Forgotten:
    return Forgotten(position_from_json(value["windows"]), position_from_json(value["intervals"]), value["last_interval"])
