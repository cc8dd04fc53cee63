"""Wait until an interval is complete in Kafka."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.sensors.base import KafkaSensor

if TYPE_CHECKING:
    from airflow_kafka_spark.triggers.interval import KafkaIntervalTrigger

_TIMETABLES = (
    'Give the DAG `schedule=CronDataIntervalTimetable("0 * * * *", timezone="UTC")` or '
    "`CronTriggerTimetable(..., interval=timedelta(hours=1))`: in Airflow 3 a cron text or a timedelta makes intervals without "
    "width. Or say with `end=` what to wait for"
)


class KafkaIntervalSensor(KafkaSensor):
    """Waits until no record of an interval can come any more, as far as Kafka can tell.

    Each partition has to have passed the interval's end: it has a committed record whose timestamp is at or behind it. One that
    has none is idle once ``grace`` is over after the end, unless an open transaction may still bring records into it.

    Returns ``end``; ``offsets``, the first offset at or behind it of each partition that has passed; and the ``idle`` ones.

    :param topics: a topic, or several.
    :param end: the interval's end (a ``datetime``, text in ISO 8601, seconds since the epoch); default: that of the DAG run's
        data interval.
    :param grace: how long after the end a partition may stay silent before it counts as idle; default one minute. As long as
        records take to arrive, and clocks differ.
    :param kwargs: of :class:`~airflow_kafka_spark.sensors.base.KafkaSensor`.
    :raises ValidationError: (by ``execute``) among other things, the DAG run has no data interval, or one without width.
    """

    template_fields: Sequence[str] = ("kafka_conn_id", "topics", "end", "grace")

    def __init__(
        self,
        *,
        topics: str | Sequence[str],
        end: datetime | str | float | None = None,
        grace: timedelta | float | str = timedelta(minutes=1),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.topics = topics
        self.end = end
        self.grace = grace

    def make_trigger(self, context: Mapping[str, Any], **options: Any) -> KafkaIntervalTrigger:
        from airflow_kafka_spark.triggers.interval import IntervalWatch, KafkaIntervalTrigger

        end: Any = self.end
        problems: list[Problem] = []
        if end is None:
            end, problems = _end_of_run(context)
        if problems:
            from airflow_kafka_spark.triggers.base import raise_for

            # Together with what else is wrong: an end is put in its place, which is then not used.
            raise_for([*problems, *IntervalWatch(topics=self.topics, end=0, grace=self.grace).problems()])
        return KafkaIntervalTrigger(topics=self.topics, end=end, grace=self.grace, **options)


def _end_of_run(context: Mapping[str, Any]) -> tuple[datetime | None, list[Problem]]:
    dag_run = context.get("dag_run")
    start, end = (getattr(dag_run, f"data_interval_{side}", None) for side in ("start", "end"))
    if start is None or end is None:
        found = "this DAG run has no data interval (it was triggered by hand, by an asset, or is a partition's)"
        return None, [Problem("end", found, _TIMETABLES)]
    if start >= end:
        found = f"this DAG run's data interval has no width: it starts and ends at {end.isoformat()}"
        return None, [Problem("end", found, _TIMETABLES)]
    return end, []
