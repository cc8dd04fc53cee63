"""Data intervals of a fixed length on a schedule of local time: when the clock changes, two overlap, or none has an hour."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from airflow_kafka_spark.windows.interval import Interval
from airflow_kafka_spark.windows.times import format_instant, to_milliseconds

if TYPE_CHECKING:
    from airflow.timetables.base import Timetable

log = logging.getLogger(__name__)

DAYS_AHEAD = 370
"""Number of days that are searched for changes of the clock."""
MAX_STEPS = 1_000
"""Maximum number of runs of a schedule that are looked at around a change."""


def warn_of_clock_changes(dag: Any, now: datetime) -> None:
    """Log a warning if data intervals of a DAG's schedule overlap, or leave a hole, at a change of the clock within a year.

    The later one of two overlapping intervals is refused, and the records of a hole wait for a run by hand.
    """
    try:
        found = list(find_uneven_intervals(dag.timetable, now))
    except Exception:
        # A timetable may be the user's own code, and older releases of Airflow have other ones.
        log.debug("The intervals of the schedule are not known in advance", exc_info=True)
        return
    if found:
        log.warning(
            "The data intervals of this DAG have a fixed length, and its schedule has a local time: %s. Use "
            '`CronDataIntervalTimetable`, whose intervals follow each other, or `timezone="UTC"`',
            "; ".join(_describe(*pair) for pair in found),
        )


def find_uneven_intervals(timetable: Any, now: datetime) -> Iterator[tuple[Interval, Interval]]:
    """Yield pairs of successive intervals of a schedule that overlap, or leave a hole that the schedule has on no other day.

    :param timetable: the timetable of a DAG.
    :param now: the changes of the clock in the year after this instant are looked at.
    """
    if not (getattr(timetable, "interval", None) or getattr(timetable, "_interval", None)):
        return
    core = _load_timetable(timetable)
    facts = core.serialize()
    zone, length = facts.get("timezone"), facts.get("interval")
    if not isinstance(zone, str) or not length:
        return
    around = 4 * timedelta(seconds=float(length)) + timedelta(hours=1)
    for change, shift in _find_clock_changes(ZoneInfo(zone), now):
        pairs = list(pairwise(_list_intervals(core, change - around, change + around)))
        uneven = [pair for pair in pairs if abs(pair[1].start - pair[0].end) == abs(shift)]
        if len(uneven) == 1 < len(pairs):
            yield uneven[0]


def _describe(earlier: Interval, later: Interval) -> str:
    if later.start < earlier.end:
        return f"{earlier} and {later} overlap, so that the second one will be refused"
    end, start = (format_instant(to_milliseconds(instant)) for instant in (earlier.end, later.start))
    return f"no interval has the records between {end} and {start}"


def _load_timetable(timetable: Any) -> Timetable:
    """Return the timetable that knows its runs. Since Airflow 3.2, that of a DAG file only has the arguments."""
    try:
        from airflow.serialization.encoders import coerce_to_core_timetable
    except ImportError:
        return timetable
    return coerce_to_core_timetable(timetable)


def _find_clock_changes(zone: ZoneInfo, now: datetime) -> Iterator[tuple[datetime, timedelta]]:
    """Yield the instants at which the clock of a zone changes, exact to the minute, and by how much it does."""

    def get_offset(instant: datetime) -> timedelta:
        return instant.astimezone(zone).utcoffset() or timedelta()

    days = [now.astimezone(timezone.utc) + timedelta(days=number) for number in range(DAYS_AHEAD)]
    for before, after in pairwise(days):
        if get_offset(before) == get_offset(after):
            continue
        shift = get_offset(after) - get_offset(before)
        while after - before > timedelta(minutes=1):
            middle = before + (after - before) / 2
            before, after = (middle, after) if get_offset(middle) == get_offset(before) else (before, middle)
        yield after, shift


def _list_intervals(core: Timetable, start: datetime, end: datetime) -> Iterator[Interval]:
    """Yield the intervals of the runs between two instants."""
    import pendulum
    from airflow.timetables.base import TimeRestriction

    restriction = TimeRestriction(earliest=pendulum.instance(start), latest=pendulum.instance(end), catchup=True)
    last = None
    for _ in range(MAX_STEPS):
        info = core.next_dagrun_info(last_automated_data_interval=last, restriction=restriction)
        if info is None or (last := info.data_interval) is None or last.start >= last.end:
            return
        yield Interval(last.start, last.end)
