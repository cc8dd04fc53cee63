"""Wait until a consumer has caught up, or until a batch is worth starting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.sensors.base import DEFAULT_DEFERRABLE, KafkaSensor
from airflow_kafka_spark.windows.lag import Per

if TYPE_CHECKING:
    from airflow_kafka_spark.triggers.base import Polling
    from airflow_kafka_spark.triggers.lag import KafkaLagTrigger


class KafkaLagSensor(KafkaSensor):
    """Waits until a consumer's lag is small enough, or large enough.

    The lag in records is counted from the first record that the consumer has not read to the last stable offset. It is an upper
    bound, since compacted and aborted records in between count; but it is 0 exactly if there is nothing to read: a trailing
    transaction marker does not count. The lag in seconds is the age of that first record by its own timestamp. For a group that
    has committed nothing, or whose offsets have expired, all records in the topics count, and the status is ``STOP``.

    Returns the lag: ``records``, ``seconds``, ``status`` and ``reason``, ``measured_at``, and these values by partition.

    :param group_id: consumer group whose committed offsets are compared with the topics; default None.
    :param pipeline: pipeline whose position in the ledger is compared with the topics. If ``group_id`` is given, too, the group
        is used until the ledger has the pipeline. Default None.
    :param topics: topic, or several; required for a group. Default None: for a pipeline, all topics that it has read.
    :param at_most_records: maximum number of unread records; default None.
    :param at_most_seconds: maximum age of the oldest unread record (seconds or a ``timedelta``); if both maxima are given,
        both have to hold. Default None.
    :param at_least_records: minimum number of unread records; default None.
    :param at_least_seconds: minimum age of the oldest unread record (seconds or a ``timedelta``); if both minima are given, one
        is enough. Default None.
    :param per: ``total`` (default) compares the sum of all partitions; ``partition`` compares each partition: none of them may
        exceed a maximum, and one that reaches a minimum is enough.
    :param schedule: time from one run of the consumer to the next (seconds or a ``timedelta``). A consumer that waits for its
        next run is not reported as stopped. Default for a pipeline: its usual interval, for a group: unknown.
    :param fail_on: statuses (``WARN``, ``STALL``, ``STOP``, ``REWIND``) that fail the sensor; with others it continues to wait.
        Default none.
    :param ledger_topic: topic that contains the ledger of the pipeline; default ``airflow-windows``.
    :param kafka_conn_id: Airflow connection of type ``kafka``; default ``kafka_default``.
    :param deferrable: True waits in the triggerer, False in a worker; default: Airflow's ``[operators] default_deferrable``.
    :param retry_timeout: seconds (or a ``timedelta``) for which brokers may be down before the sensor fails; default 300. At most
        ``timeout``.
    :param wait_for_topic: True waits for a topic that does not exist; default False: such a topic fails the sensor at once.
    :param kwargs: arguments of Airflow's ``BaseSensorOperator``: ``poke_interval``, ``timeout``, ``mode``, ``soft_fail`` and
        others.
    """

    template_fields: Sequence[str] = (
        "kafka_conn_id", "group_id", "pipeline", "topics", "at_most_records", "at_most_seconds", "at_least_records",
        "at_least_seconds", "per", "schedule", "fail_on", "ledger_topic",
    )  # fmt: skip

    def __init__(
        self,
        *,
        group_id: str | None = None,
        pipeline: str | None = None,
        topics: str | Sequence[str] | None = None,
        at_most_records: int | str | None = None,
        at_most_seconds: float | timedelta | str | None = None,
        at_least_records: int | str | None = None,
        at_least_seconds: float | timedelta | str | None = None,
        per: Per = "total",
        schedule: float | timedelta | str | None = None,
        fail_on: str | Sequence[str] = (),
        ledger_topic: str = "airflow-windows",
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
        self.group_id = group_id
        self.pipeline = pipeline
        self.topics = topics
        self.at_most_records = at_most_records
        self.at_most_seconds = at_most_seconds
        self.at_least_records = at_least_records
        self.at_least_seconds = at_least_seconds
        self.per = per
        self.schedule = schedule
        self.fail_on = fail_on
        self.ledger_topic = ledger_topic

    def make_trigger(self, context: Mapping[str, Any], polling: Polling) -> KafkaLagTrigger:
        from airflow_kafka_spark.triggers.lag import KafkaLagTrigger

        return KafkaLagTrigger(
            group_id=self.group_id,
            pipeline=self.pipeline,
            topics=self.topics,
            at_most_records=self.at_most_records,
            at_most_seconds=self.at_most_seconds,
            at_least_records=self.at_least_records,
            at_least_seconds=self.at_least_seconds,
            per=self.per,
            schedule=self.schedule,
            fail_on=self.fail_on,
            ledger_topic=self.ledger_topic,
            once=True,
            **asdict(polling),
        )
