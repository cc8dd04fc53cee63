"""The ledger, and those who are shut out of it."""

from __future__ import annotations

from airflow_kafka_spark.errors.base import KafkaSparkError


class Fenced(KafkaSparkError):
    """Another attempt of the same pipeline has taken over; this one may not write any more. Nothing is lost: that finishes."""

    retryable = True

    def __init__(self, pipeline: str, doing: str) -> None:
        self.pipeline, self.doing = pipeline, doing
        super().__init__(
            f"Pipeline `{pipeline}`: a newer attempt took over while this one was {doing}",
            expected="to be the only attempt",
            action="Nothing needs to be done: the newer attempt finishes the window. If several runs of this DAG overlap all the "
            "time, set `max_active_runs=1`",
        )


class LedgerUnreadable(KafkaSparkError):
    """The ledger topic cannot be read to its end, or holds something this version does not know."""

    retryable = True

    def __init__(self, topic: str, found: str, expected: str, action: str) -> None:
        self.topic = topic
        super().__init__(f"Ledger topic `{topic}`: {found}", expected=expected, action=action)
