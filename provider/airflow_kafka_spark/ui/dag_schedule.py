"""The schedule of a DAG: the runs of its timetable, for the verdict on lag and for the data intervals that are due.

Instants are seconds since the epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.windows.cadence import Cadence, Timetabled, Unscheduled

if TYPE_CHECKING:
    from airflow.timetables.base import DagRunInfo, Timetable

log = logging.getLogger(__name__)

MAX_STEPS = 3
"""Maximum number of runs that are computed to find the first one after an instant. Timetables that do not align need one more."""


@dataclass(frozen=True)
class DagSchedule:
    """The schedule of a DAG, from Airflow's database.

    :param is_paused: True if the DAG is paused.
    :param next_run: time of the next run; None if none is planned, as for a DAG that only assets or users trigger.
    :param next_interval: start and end of the data interval of that run; None if it has none.
    :param timetable: its timetable; None if this process cannot load it.
    :param end: its ``end_date``; None if it has none.
    """

    is_paused: bool = False
    next_run: float | None = None
    next_interval: tuple[float, float] | None = None
    timetable: Timetable | None = None
    end: float | None = None

    @property
    def cadence(self) -> Cadence | None:
        """Return the times at which runs are due; None if unknown, or if the DAG runs all the time."""
        if self.is_paused or self.next_run is None:
            return Unscheduled()
        if self.timetable is None or not self.timetable.periodic:
            return None
        return Timetabled(self.run_after)

    def run_after(self, instant: float) -> float | None:
        """Return the time at which the first run after an instant is due; None if no further run is planned."""
        info = self._next(instant)
        found = [] if info is None else [info.run_after.timestamp()]
        if self.next_run is not None and self.next_run > instant:
            found.append(self.next_run)
        return min(found, default=None)

    def due_until(self, now: float) -> float | None:
        """Return the end of the last data interval whose run is due; None if the runs have no data intervals.

        After the DAG's end no interval is due.
        """
        if self.next_run is not None and self.next_run > now:
            interval = _with_length(self.next_interval)
        else:
            interval = _data_interval(self._next(now))
        if interval is None:
            return None
        last = self._end_of_last_interval()
        return interval[0] if last is None else min(interval[0], last)

    def _end_of_last_interval(self) -> float | None:
        """Return the end of the last data interval that begins before the DAG's end; None if no end limits them."""
        behind = None if self.end is None else _data_interval(self._next(self.end))
        if behind is None:
            return None
        start, last = behind[0] - 2 * (behind[1] - behind[0]), None
        for _ in range(2 * MAX_STEPS):
            info = self._next(start, latest=self.end)
            if info is None or (found := _data_interval(info)) is None:
                break
            start, last = info.run_after.timestamp(), found[1]
        return last

    def _next(self, instant: float, latest: float | None = None) -> DagRunInfo | None:
        """Return the first run after an instant, according to the timetable; None if no run follows, or if the timetable fails.

        :param latest: the end of the DAG, which Airflow passes to the timetable; None for no end.
        """
        if self.timetable is None:
            return None
        import pendulum
        from airflow.timetables.base import DagRunInfo, TimeRestriction

        at = pendulum.from_timestamp(instant)
        end = None if latest is None else pendulum.from_timestamp(latest)
        restriction = TimeRestriction(earliest=None, latest=end, catchup=True)
        try:
            interval = self.timetable.infer_manual_data_interval(run_after=at)
            last = DagRunInfo(run_after=at, data_interval=interval, partition_date=None, partition_key=None)
            for _ in range(MAX_STEPS):
                info = self.timetable.next_dagrun_info_v2(last_dagrun_info=last, restriction=restriction)
                if info is None or info.run_after.timestamp() > instant:
                    return info
                last = info
        except Exception:
            # A timetable may be the user's own code, so any error is possible.
            log.debug("Timetable %s does not tell its next run", type(self.timetable).__name__, exc_info=True)
        return None


def _data_interval(info: DagRunInfo | None) -> tuple[float, float] | None:
    """Return start and end of the data interval of a run; None if it has none, or one without a length."""
    data = info.data_interval if info else None
    return _with_length((data.start.timestamp(), data.end.timestamp()) if data else None)


def _with_length(interval: tuple[float, float] | None) -> tuple[float, float] | None:
    """Return an interval; None if it has no length, as that of a timetable without data intervals."""
    return interval if interval and interval[0] < interval[1] else None


def end_of(data: Mapping[str, Any]) -> float | None:
    """Return the ``end_date`` of a serialized DAG; None if it has none."""
    end = data.get("dag", {}).get("end_date")
    return float(end) if isinstance(end, (int, float)) else None


def timetable_of(data: Mapping[str, Any]) -> Timetable | None:
    """Return the timetable of a serialized DAG; None if this process cannot load it, as one of a plugin that is missing here."""
    from airflow.serialization.decoders import decode_timetable

    try:
        return decode_timetable(data["dag"]["timetable"])
    except Exception:
        log.debug("The timetable of a DAG cannot be loaded", exc_info=True)
        return None
