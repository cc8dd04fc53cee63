"""Errors of the embedded servers."""

from __future__ import annotations

from airflow_kafka_spark.errors.base import KafkaSparkError


class TestingUnavailable(KafkaSparkError):
    """Raised when a package is missing that an embedded server needs.

    :param server: name of the server.
    :param package: the package.
    """

    __test__ = False

    def __init__(self, server: str, package: str) -> None:
        self.server = server
        self.package = package
        super().__init__(
            f"The embedded {server} needs the package `{package}`, which is not installed",
            action="Install it with `pip install 'airflow-provider-kafka-spark[testing]'`",
        )


class ServerInvalid(KafkaSparkError):
    """Raised when an embedded server cannot do what was requested.

    :param server: name of the server.
    :param detail: why it cannot.
    """

    def __init__(self, server: str, detail: str, expected: str = "") -> None:
        self.server, self.detail = server, detail
        super().__init__(f"The embedded {server} cannot do this: {detail}", expected=expected)


class ServerFailed(KafkaSparkError):
    """Raised when an embedded server did not start, or died.

    :param server: name of the server.
    :param detail: what happened, with the path of its log.
    """

    def __init__(self, server: str, detail: str) -> None:
        self.server, self.detail = server, detail
        super().__init__(
            f"The embedded {server} is not running: {detail}", expected="a running server", action="Read its log, named above"
        )
