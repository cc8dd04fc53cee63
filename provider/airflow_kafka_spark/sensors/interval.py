"""Wait until an interval is complete in Kafka."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.sensors.base import DEFAULT_DEFERRABLE, KafkaSensor

if TYPE_CHECKING:
    from airflow_kafka_spark.triggers.base import Instant, Polling
    from airflow_kafka_spark.triggers.interval import KafkaIntervalTrigger

_TIMETABLES = (
    'Give the DAG `schedule=CronDataIntervalTimetable("0 * * * *", timezone="UTC")` or '
    "`CronTriggerTimetable(..., interval=timedelta(hours=1))`: in Airflow 3 a cron text or a timedelta makes intervals without "
    "width. Or say with `end=` what to wait for"
)


class KafkaIntervalSensor(KafkaSensor):
    """Waits until no more records of an interval are expected in Kafka.

    A partition has passed the interval's end once it has a committed record whose timestamp is at or after the end. A partition
    without one is idle once ``grace`` is over after the end, unless an open transaction may still add records. The sensor
    succeeds when every partition has passed or is idle.

    Returns ``end``; ``offsets``, the first offset at or after the end of each partition that has passed; and the ``idle`` ones.

    :param topics: topic, or several.
    :param end: end of the interval: a ``datetime``, text in ISO 8601, or seconds since the epoch; default: the end of the DAG
        run's data interval.
    :param grace: seconds (or a ``timedelta``) after the end from which a partition without a record at or after the end counts as
        idle; default 60. It should cover the delay of records and the difference of clocks.
    :param kafka_conn_id: Airflow connection of type ``kafka``; default ``kafka_default``.
    :param deferrable: True waits in the triggerer, False in a worker; default: Airflow's ``[operators] default_deferrable``.
    :param retry_timeout: seconds (or a ``timedelta``) for which brokers may be down before the sensor fails; default 300. At most
        ``timeout``.
    :param wait_for_topic: True waits for a topic that does not exist; default False: such a topic fails the sensor at once.
    :param kwargs: arguments of Airflow's ``BaseSensorOperator``: ``poke_interval``, ``timeout``, ``mode``, ``soft_fail`` and
        others.
    :raises ValidationError: (by ``execute``) among other things, the DAG run has no data interval, or one without width.
    """

    template_fields: Sequence[str] = ("kafka_conn_id", "topics", "end", "grace")

    def __init__(
        self,
        *,
        topics: str | Sequence[str],
        end: datetime | str | float | None = None,
        grace: timedelta | float | str = timedelta(minutes=1),
        kafka_conn_id: str = "kafka_default",
        deferrable: bool = DEFAULT_DEFERRABLE,
        retry_timeout: float | timedelta = 300.0,
        wait_for_topic: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            kafka_conn_id=kafka_conn_id,
            deferrable=deferrable,
            retry_timeout=retry_timeout,
            wait_for_topic=wait_for_topic,
            **kwargs,
        )
        self.topics = topics
        self.end = end
        self.grace = grace

    def make_trigger(self, context: Mapping[str, Any], polling: Polling) -> KafkaIntervalTrigger:
        from airflow_kafka_spark.triggers.interval import IntervalProbe, KafkaIntervalTrigger

        end: Instant = self.end
        problems: list[Problem] = []
        if end is None:
            end, problems = _end_of_run(context)
        if problems:
            from airflow_kafka_spark.triggers.base import raise_problems

            # Report all problems at once: the end of 0 is a placeholder for the missing one, and is not used.
            raise_problems([*problems, *IntervalProbe(topics=self.topics, end=0, grace=self.grace).problems()])
        return KafkaIntervalTrigger(topics=self.topics, end=end, grace=self.grace, **asdict(polling))


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
