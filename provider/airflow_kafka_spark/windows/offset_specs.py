"""Start and stop positions as in Flink, and the forms in which users write them.

These are descriptions only; :mod:`airflow_kafka_spark.hooks.kafka.log` resolves them to offsets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypeAlias

from airflow_kafka_spark.windows.interval import to_milliseconds
from airflow_kafka_spark.windows.model import TopicPartition

EARLIEST = -2
"""Placeholder for the first offset that is left in the log, as in Spark."""
LATEST = -1
"""Placeholder for the last stable offset, as in Spark."""

Fallback = Literal["earliest", "latest", "none"]
FALLBACKS = ("earliest", "latest", "none")
GROUP_PREFIX = "committed:"


@dataclass(frozen=True)
class CommittedOffsets:
    """The offsets that a consumer group has committed: the pipeline's own group, or another one that the pipeline takes over from
    or keeps up with.

    :param group_id: the group (``connect-<name>`` for a Kafka Connect sink); None is the pipeline's own. Default None.
    :param fallback: start in partitions without a committed offset: ``earliest``, ``latest``, or ``none``, which is an error. It
        has no effect on a stop: nothing is read from such a partition. Default ``earliest``.
    :raises ValueError: an unknown fallback, or an empty name.
    """

    group_id: str | None = None
    fallback: Fallback = "earliest"

    def __post_init__(self) -> None:
        if self.fallback not in FALLBACKS:
            raise ValueError(f"the fallback `{self.fallback}` is not one of {', '.join(FALLBACKS)}")
        if self.group_id is not None and not str(self.group_id).strip():
            raise ValueError("the name of the group is empty")


@dataclass(frozen=True)
class Earliest:
    """The first offset that is left in the log of each partition."""


@dataclass(frozen=True)
class Latest:
    """The last stable offset of each partition, at which a reader of committed records has to stop."""


@dataclass(frozen=True)
class Timestamp:
    """The first record of each partition whose timestamp is at or after an instant; the end of the log without such a record.

    Later records may have older timestamps, because timestamps need not ascend.

    :param ms: milliseconds since 1970-01-01 UTC.
    :raises ValueError: it is negative.
    """

    ms: int

    def __post_init__(self) -> None:
        if not isinstance(self.ms, int) or isinstance(self.ms, bool) or self.ms < 0:
            raise ValueError(f"`{self.ms}` is not a time in milliseconds since 1970-01-01 UTC")

    @classmethod
    def of(cls, instant: datetime) -> Timestamp:
        """Return the first millisecond at or after a datetime with a zone.

        :raises ValueError: it has no zone.
        """
        if instant.tzinfo is None:
            raise ValueError(f"`{instant}` has no time zone: add one, as in `{instant.isoformat()}Z`")
        return cls(to_milliseconds(instant))


@dataclass(frozen=True)
class SpecificOffsets:
    """One offset per partition, as Spark writes them: ``SpecificOffsets({"orders": {0: 23, 1: LATEST}})``.

    :param offsets: topic -> partition -> offset, or topic partition -> offset; :data:`EARLIEST` (-2) and :data:`LATEST` (-1)
        stand for the ends of the log. The attribute is always topic partition -> offset.
    :raises ValueError: the value has another form.
    """

    offsets: Mapping[TopicPartition, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", _flatten_offsets(self.offsets))


@dataclass(frozen=True)
class ShiftBy:
    """A move from the pipeline's position, within the log.

    :param offsets: number of offsets to move by; negative to move back.
    """

    offsets: int

    def __post_init__(self) -> None:
        if not isinstance(self.offsets, int) or isinstance(self.offsets, bool):
            raise ValueError(f"`{self.offsets}` is not a number of offsets")


Start: TypeAlias = CommittedOffsets | Earliest | Latest | Timestamp | SpecificOffsets
Stop: TypeAlias = Latest | Timestamp | SpecificOffsets | CommittedOffsets
MoveTarget: TypeAlias = Start | ShiftBy
Written: TypeAlias = Start | str | datetime | Mapping[Any, Any] | None
"""Type of the values that users may give for a start or a stop, templates included."""

_START = (
    '"committed" (the default), "committed:<group>", "earliest", "latest", "none", a datetime or ISO 8601 text with a zone, or '
    'offsets as {"topic": {"0": 23}}'
)
_TARGET = '"earliest", "latest", "committed:<group>", a datetime or ISO 8601 text with a zone, or offsets as {"topic": {"0": 23}}'
_STOP = '"latest" (the default), a datetime or ISO 8601 text with a zone, "committed:<group>", or offsets as {"topic": {"0": 23}}'


def parse_start(value: object) -> Start:
    """Return the start mode of a pipeline without a ledger.

    :param value: an instance of one of the classes above; "committed" (the committed offsets of the pipeline's group, or else
        earliest), "none" (those offsets, or else an error), "committed:<group>" (those of another group), "earliest", "latest"; a
        datetime, or a text of ISO 8601, with a zone; offsets as in Spark, ``{"orders": {"0": 23, "1": -2}}``, as a mapping or as
        JSON. None is "committed".
    :raises ValueError: any other value; the message names it and the expected forms.
    """
    if value is None:
        return CommittedOffsets()
    words: dict[str, Start] = {
        "committed": CommittedOffsets(),
        "none": CommittedOffsets(fallback="none"),
        "earliest": Earliest(),
        "latest": Latest(),
    }
    found = _parse(value, words, _START)
    if isinstance(found, ShiftBy):
        raise ValueError(f"{found} needs a position, which this pipeline does not have yet. Expected {_START}")
    return found


def parse_stop(value: object) -> Stop:
    """Return the latest end of a window.

    :param value: as for :func:`parse_start`, except "earliest" and the pipeline's own committed offsets, with which it would
        never advance. None is "latest".
    :raises ValueError: any other value.
    """
    if value is None:
        return Latest()
    found = _parse(value, {"latest": Latest()}, _STOP)
    if isinstance(found, (Earliest, ShiftBy)):
        raise ValueError(f"`{found}` is not an end. Expected {_STOP}")
    if isinstance(found, CommittedOffsets) and found.group_id is None:
        raise ValueError("a window stops at the committed offsets of another group. Name it: `committed:<group>`")
    if isinstance(found, SpecificOffsets) and EARLIEST in found.offsets.values():
        raise ValueError("-2 (earliest) is not an end. Expected offsets, or -1 for the last stable one")
    return found


def parse_target(value: object) -> MoveTarget:
    """Return the target of a command that moves a pipeline.

    :param value: as for :func:`parse_start`, or a :class:`ShiftBy`; committed offsets are those of a group that is named.
    :raises ValueError: any other value.
    """
    found = _parse(value, {"earliest": Earliest(), "latest": Latest()}, _TARGET)
    if isinstance(found, CommittedOffsets) and found.group_id is None:
        raise ValueError("the committed offsets are those of a group, which is missing. Expected `committed:<group>`")
    return found


def _parse(value: object, words: Mapping[str, Any], expected: str) -> Any:
    if isinstance(value, (CommittedOffsets, Earliest, Latest, Timestamp, SpecificOffsets, ShiftBy)):
        return value
    if isinstance(value, datetime):
        return Timestamp.of(value)
    if isinstance(value, Mapping):
        return SpecificOffsets(value)
    if not isinstance(value, str):
        raise ValueError(f"it is `{value!r}` ({type(value).__name__}). Expected {expected}")
    text = value.strip()
    if text in words:
        return words[text]
    if text.startswith(GROUP_PREFIX):
        return CommittedOffsets(text[len(GROUP_PREFIX) :].strip())
    if text.startswith("{"):
        return SpecificOffsets(_parse_json(text))
    if (instant := _parse_instant(text)) is not None:
        return Timestamp.of(instant)
    raise ValueError(f"`{value}` is not understood. Expected {expected}")


def _parse_instant(text: str) -> datetime | None:
    # Python 3.10 does not accept "Z"; Python 3.11 parses "20260101" as a date.
    if len(text) < len("2026-01-01") or text[4] != "-":
        return None
    try:
        return datetime.fromisoformat(f"{text[:-1]}+00:00" if text[-1] in "zZ" else text)
    except ValueError:
        return None


def _parse_json(text: str) -> dict[Any, Any]:
    try:
        return json.loads(text, object_pairs_hook=_make_unique)
    except json.JSONDecodeError as error:
        # Jinja writes a dict as Python does.
        hint = ". A template writes JSON with the filter `tojson`" if "'" in text else ""
        raise ValueError(f"`{text}` is not JSON: {error}{hint}") from None


def _make_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON whose names differ: of two equal names, the reader of JSON would silently take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1)
        raise ValueError(f"`{twice}` is named twice")
    return found


def _flatten_offsets(offsets: object) -> dict[TopicPartition, int]:
    example = 'Expected {"topic": {"0": 23, "1": -2}}'
    if not isinstance(offsets, Mapping) or not offsets:
        raise ValueError(f"`{offsets}` names no offsets. {example}")
    flat: dict[TopicPartition, int] = {}
    for topic, parts in offsets.items():
        if isinstance(topic, tuple) and len(topic) == 2:
            flat[TopicPartition(*topic)] = _check_offset(topic, parts)
            continue
        if not isinstance(topic, str) or not isinstance(parts, Mapping) or not parts:
            raise ValueError(f"`{topic}: {parts}` names no offsets of a topic. {example}")
        for partition, offset in parts.items():
            if not str(partition).isdecimal() or isinstance(partition, bool):
                raise ValueError(f"`{partition}` is not the number of a partition of {topic}. {example}")
            tp = TopicPartition(topic, int(partition))
            if tp in flat:
                raise ValueError(f"{tp} is named twice. {example}")
            flat[tp] = _check_offset(tp, offset)
    return dict(sorted(flat.items()))


def _check_offset(tp: tuple[str, int], offset: object) -> int:
    if not isinstance(offset, int) or isinstance(offset, bool) or offset < EARLIEST:
        raise ValueError(
            f"`{offset}` is not an offset of {TopicPartition(*tp)}. Expected a whole number, -2 (earliest) or -1 (latest)"
        )
    return offset
