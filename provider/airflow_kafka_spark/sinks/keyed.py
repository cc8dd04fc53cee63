"""Sinks whose rows have a key: the options of upsert and delete, and what they need for replays and for windows in any order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.errors.base import quote_names

OFFSET_COLUMNS = ("__connect_topic", "__connect_partition", "__connect_offset")
"""Columns for a row's topic, partition and offset, with the names of the JDBC sink's ``pk.mode=kafka``."""
MODES = ("append", "upsert")


class KeyedOptions(Protocol):
    """The options that decide how rows meet rows of the same key."""

    @property
    def mode(self) -> str: ...

    @property
    def key(self) -> Sequence[str]: ...

    @property
    def delete_enabled(self) -> bool: ...

    @property
    def offset_columns(self) -> bool: ...


def key_problems(sink: KeyedOptions) -> Iterator[Problem]:
    """Yield what is wrong with the options in combination."""
    if sink.mode == "upsert" and not sink.key:
        yield Problem("sink.key", 'it is empty; `mode="upsert"` needs the columns that name a row', 'For instance key=["id"]')
    if sink.mode == "append" and sink.key:
        yield Problem("sink.key", 'it means nothing with `mode="append"`', 'Leave it out, or set `mode="upsert"`')
    if sink.mode == "append" and sink.delete_enabled:
        yield Problem("sink.delete_enabled", 'rows that are only appended have no key to delete by; expected `mode="upsert"`')
    repeated = sorted({name for name in sink.key if list(sink.key).count(name) > 1})
    if repeated:
        yield Problem("sink.key", f"it names {quote_names(repeated)} twice")


def guard_problems(sink: KeyedOptions, where: str, what: str) -> list[Problem]:
    """Return why rows that are written later than newer ones would leave other rows behind.

    :param where: the option that lets them.
    :param what: what is written later.
    """
    if sink.mode != "upsert":
        return []
    wrong = []
    if not sink.offset_columns:
        wrong.append((f"{what} would overwrite newer rows", "Set `offset_columns=True` on the sink: older offsets then lose"))
    if sink.delete_enabled:
        wrong.append((f"{what} would bring back rows that were deleted since", "Leave `delete_enabled` out"))
    return [Problem(where, *why) for why in wrong]
