"""Embedded servers."""

from __future__ import annotations

from airflow_kafka_spark.errors.base import KafkaSparkError


class TestingUnavailable(KafkaSparkError):
    """A package that an embedded server needs is not installed."""

    __test__ = False

    def __init__(self, server: str, package: str) -> None:
        self.server = server
        self.package = package
        super().__init__(
            f"The embedded {server} needs the package `{package}`, which is not installed",
            action="Install it with `pip install 'airflow-provider-kafka-spark[testing]'`",
        )


class ServerInvalid(KafkaSparkError):
    """What was asked of an embedded server is impossible."""

    def __init__(self, server: str, detail: str, expected: str = "") -> None:
        self.server = server
        super().__init__(f"The embedded {server} cannot do this: {detail}", expected=expected)
