"""Options as users and templates write them, which render everything to text: cast, or named as a problem."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

from airflow_kafka_spark.errors import Problem

_NONE = ("", "none")


def whole(where: str, value: Any, problems: list[Problem]) -> int | None:
    """A whole number of at least 0; None for nothing, an empty text included."""
    if value is None or _is_nothing(value):
        return None
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    problems.append(Problem(where, f"`{value}` is not a whole number of at least 0"))
    return None


def seconds(where: str, value: Any, problems: list[Problem]) -> float | None:
    """Seconds of at least 0, from a number or a ``timedelta``; None for nothing, an empty text included."""
    if value is None or _is_nothing(value):
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


def instant(where: str, value: Any, problems: list[Problem]) -> datetime | None:
    """A moment, from a ``datetime``, a text in ISO 8601 or seconds since the epoch; without a zone it is UTC."""
    if value is None or _is_nothing(value):
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


def one_of(where: str, value: Any, known: tuple[str, ...]) -> list[Problem]:
    return [] if value in known else [Problem(where, f"`{value}` is not one of {', '.join(known)}")]


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that are None."""
    return {name: value for name, value in options.items() if value is not None}


def _is_nothing(value: Any) -> bool:
    return isinstance(value, str) and value.strip().lower() in _NONE
