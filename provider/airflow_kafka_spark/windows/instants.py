"""Instants as Kafka has them: whole milliseconds since the epoch."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def instant_ms(instant: datetime) -> int:
    """The first whole millisecond at or after an instant, which has a time zone."""
    elapsed = instant - EPOCH
    return -(-((elapsed.days * 86_400 + elapsed.seconds) * 1_000_000 + elapsed.microseconds) // 1000)


def now_ms() -> int:
    """This instant."""
    return time.time_ns() // 1_000_000


def instant_of(milliseconds: int) -> datetime:
    """The instant, in UTC."""
    return EPOCH + timedelta(milliseconds=milliseconds)


def iso(milliseconds: int) -> str:
    """An instant as a person reads it, in UTC; one beyond the year 9999 in milliseconds, as microseconds are when somebody has
    taken them for milliseconds."""
    try:
        instant = instant_of(milliseconds)
    except OverflowError:
        return f"{milliseconds} ms since 1970"
    return instant.isoformat(timespec="milliseconds" if milliseconds % 1000 else "seconds").replace("+00:00", "Z")
