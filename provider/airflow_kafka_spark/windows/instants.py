"""Conversions between datetimes, texts in ISO 8601, and Kafka's timestamps: whole milliseconds since the epoch."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def instant_ms(instant: datetime) -> int:
    """Return the first whole millisecond at or after an instant, which must have a time zone."""
    elapsed = instant - EPOCH
    return -(-((elapsed.days * 86_400 + elapsed.seconds) * 1_000_000 + elapsed.microseconds) // 1000)


def now_ms() -> int:
    """Return the current time, in milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def instant_of(milliseconds: int) -> datetime:
    """Return an instant as a datetime in UTC."""
    return EPOCH + timedelta(milliseconds=milliseconds)


def parse_iso(text: str) -> datetime:
    """Return the datetime of a text in ISO 8601, with ``Z`` for UTC, which Python 3.10 does not accept.

    :raises ValueError: the text has another form.
    """
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def iso(milliseconds: int) -> str:
    """Return an instant as ISO 8601 in UTC. An instant after the year 9999 (microseconds passed as milliseconds) is returned as a
    number of milliseconds.
    """
    try:
        instant = instant_of(milliseconds)
    except OverflowError:
        return f"{milliseconds} ms since 1970"
    return instant.isoformat(timespec="milliseconds" if milliseconds % 1000 else "seconds").replace("+00:00", "Z")
