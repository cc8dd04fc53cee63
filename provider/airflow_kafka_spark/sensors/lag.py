"""Wait until a consumer has caught up, or until a batch is worth starting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.sensors.base import KafkaSensor
from airflow_kafka_spark.windows.lag import Per

if TYPE_CHECKING:
    from airflow_kafka_spark.triggers.lag import KafkaLagTrigger

_WATCHED = (
    "group_id",
    "pipeline",
    "topics",
    "at_most_records",
    "at_most_seconds",
    "at_least_records",
    "at_least_seconds",
    "per",
    "schedule",
    "fail_on",
    "ledger_topic",
)


class KafkaLagSensor(KafkaSensor):
    """Waits until a consumer's lag is small enough, or large enough.

    Lag in records is counted from the first record that the consumer has not read to the last stable offset: an upper bound,
    since compacted and aborted records in between count, but 0 exactly when there is nothing to read; a trailing transaction
    marker is nothing. Lag in seconds is the age of that first record by its own timestamp. A group that has committed nothing,
    or whose offsets have expired, is behind by everything that is still there, and has the status ``STOP``.

    Returns the lag: ``records``, ``seconds``, ``status`` and ``reason``, ``measured_at``, and the same by partition.

    :param group_id: the consumer group whose committed offsets count.
    :param pipeline: the pipeline whose ledger counts; with ``group_id`` too, that counts until the ledger knows the pipeline.
    :param topics: a topic, or several; may be left out for a pipeline: all that it has read.
    :param at_most_records: wait until at most so many records are left.
    :param at_most_seconds: wait until the oldest of them is at most so old; given both, both have to hold.
    :param at_least_records: wait until so many records are there.
    :param at_least_seconds: wait until the oldest of them has waited so long; given both, one is enough.
    :param per: count records in ``total`` (default), or by ``partition``: at most in each, at least in one.
    :param schedule: how often the consumer runs (seconds or a ``timedelta``), so that it is not called dead in between; default
        for a pipeline: as often as it did, for a group: not known.
    :param fail_on: statuses (``WARN``, ``STALL``, ``STOP``, ``REWIND``) that are a failure, rather than waited through.
    :param ledger_topic: where pipelines have their ledger.
    :param kwargs: of :class:`~airflow_kafka_spark.sensors.base.KafkaSensor`.
    """

    template_fields: Sequence[str] = ("kafka_conn_id", *_WATCHED)

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
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
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

    def make_trigger(self, context: Mapping[str, Any], **options: Any) -> KafkaLagTrigger:
        from airflow_kafka_spark.triggers.lag import KafkaLagTrigger

        return KafkaLagTrigger(once=True, **{name: getattr(self, name) for name in _WATCHED}, **options)
