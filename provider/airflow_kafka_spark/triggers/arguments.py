"""Parsing arguments of sensors and triggers. Templates render every value to text."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from airflow_kafka_spark.errors import Problem

Count = int | str | None
"""A number of records or windows; a template may render it to text."""

Duration = float | timedelta | str | None
"""Seconds or a ``timedelta``; a template may render it to text."""

Instant = datetime | str | float | None
"""A ``datetime``, text in ISO 8601, or seconds since the epoch."""

_RENDERED_NONE = ("", "none")


def parse_count(where: str, value: Count, problems: list[Problem]) -> int | None:
    """Return a whole number of at least 0; None for None and for a template that rendered nothing.

    Here and below a value that is none of these adds a problem, and None is returned.
    """
    if value is None or _rendered_nothing(value):
        return None
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    problems.append(Problem(where, f"`{value}` is not a whole number of at least 0"))
    return None


def parse_seconds(where: str, value: Duration, problems: list[Problem]) -> float | None:
    """Return seconds of at least 0; None for None and for a template that rendered nothing."""
    if value is None or _rendered_nothing(value):
        return None
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = -1.0
        if 0 <= number < float("inf"):
            return number
    problems.append(Problem(where, f"`{value}` is not a number of seconds or a timedelta of at least 0"))
    return None


def parse_instant(where: str, value: Instant, problems: list[Problem]) -> datetime | None:
    """Return an instant, in UTC if it has no zone; None for None and for a template that rendered nothing."""
    if value is None or _rendered_nothing(value):
        return None
    found: datetime | None = None
    try:
        if isinstance(value, datetime):
            found = value
        elif isinstance(value, str) and not value.strip().replace(".", "", 1).isdecimal():
            found = datetime.fromisoformat(value.strip().replace("Z", "+00:00"))
        elif not isinstance(value, bool):
            found = datetime.fromtimestamp(float(value), timezone.utc)
    except (TypeError, ValueError, OverflowError, OSError):
        found = None
    if found is None:
        problems.append(Problem(where, f"`{value}` is not a moment", "Give a datetime, or text as `2026-01-31T00:00:00+00:00`"))
        return None
    return found if found.tzinfo else found.replace(tzinfo=timezone.utc)


def choice_problems(where: str, value: str, known: tuple[str, ...]) -> list[Problem]:
    """Return a problem if the value is not one of these."""
    return [] if value in known else [Problem(where, f"`{value}` is not one of {', '.join(known)}")]


def _rendered_nothing(value: object) -> bool:
    return isinstance(value, str) and value.strip().lower() in _RENDERED_NONE
