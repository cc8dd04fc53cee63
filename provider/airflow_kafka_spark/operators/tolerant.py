"""What becomes of bad records: what operators share that may do without them."""

from __future__ import annotations

from typing import Any, Literal

from airflow_kafka_spark.operators.base import WindowOperator
from airflow_kafka_spark.operators.tolerance import ErrorOptions
from airflow_kafka_spark.windows.binding import Endpoint


class TolerantOperator(WindowOperator):
    """Connect's ``errors.*`` as arguments.

    :param errors_tolerance: ``none`` (default) or ``all``.
    :param errors_deadletterqueue_topic_name: with ``all``, the topic that bad records go to.
    :param errors_deadletterqueue_topic_replication_factor: of a topic that is created; default -1, the brokers' default.
    :param errors_deadletterqueue_context_headers_enable: whether dead letters carry Connect's headers (KIP-298); default True.
    :param errors_skip: with ``all`` and without a topic: bad records are left out for good, and only counted.
    :param max_errors: how many records of a window may be bad: a number, or a share of its records below 1; None: any.
    """

    def __init__(
        self,
        *,
        errors_tolerance: Literal["none", "all"] = "none",
        errors_deadletterqueue_topic_name: str | None = None,
        errors_deadletterqueue_topic_replication_factor: int = -1,
        errors_deadletterqueue_context_headers_enable: bool = True,
        errors_skip: bool = False,
        max_errors: int | float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.errors_tolerance = errors_tolerance
        self.errors_deadletterqueue_topic_name = errors_deadletterqueue_topic_name
        self.errors_deadletterqueue_topic_replication_factor = errors_deadletterqueue_topic_replication_factor
        self.errors_deadletterqueue_context_headers_enable = errors_deadletterqueue_context_headers_enable
        self.errors_skip = errors_skip
        self.max_errors = max_errors

    def destinations(self) -> Endpoint:
        """Its sink's, and the topic that bad records go to."""
        return super().destinations() | Endpoint(details={"dead_letters": self.errors.topic or ""})

    @property
    def errors(self) -> ErrorOptions:
        """What becomes of bad records."""
        return ErrorOptions(
            self.errors_tolerance,
            self.errors_deadletterqueue_topic_name or None,
            self.errors_deadletterqueue_topic_replication_factor,
            self.errors_deadletterqueue_context_headers_enable,
            self.errors_skip,
            self.max_errors,
        )
