"""What the user wrote, and what it met: options, connections, Java, servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from airflow_kafka_spark.errors.base import KafkaSparkError


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a pipeline before it starts.

    :param where: the argument or connection it concerns, as the user wrote it (``topics``, ``sink.table``).
    :param what: what was found and what was expected.
    :param action: what to do.
    """

    where: str
    what: str
    action: str = ""

    def __str__(self) -> str:
        action = f" {self.action.rstrip('.')}." if self.action else ""
        return f"{self.where}: {self.what.rstrip('.')}.{action}"


class ValidationError(KafkaSparkError):
    """All problems of a pipeline at once, found before Spark starts. Nothing was changed."""

    def __init__(self, problems: Sequence[Problem], *, retryable: bool = False) -> None:
        self.problems = tuple(problems)
        self.retryable = retryable
        listed = "\n".join(f"  {n}. {p}" for n, p in enumerate(self.problems, 1))
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        super().__init__(f"{count} found before starting; nothing was read, written or committed\n{listed}")


class JavaMissing(KafkaSparkError):
    """No usable Java runtime."""

    def __init__(self, detail: str = "neither JAVA_HOME/bin/java nor java on the PATH could be run") -> None:
        super().__init__(
            f"Java was not found: {detail}",
            expected="a Java 17 or 21 runtime",
            action="Install one (for instance `apt-get install openjdk-17-jre-headless`) or set JAVA_HOME",
        )


class JarsUnavailable(KafkaSparkError):
    """Connector or broker jars could not be resolved."""

    retryable = True

    def __init__(self, coordinates: Sequence[str], detail: str) -> None:
        self.coordinates = tuple(coordinates)
        super().__init__(
            f"The jars of {', '.join(coordinates)} could not be resolved: {detail}",
            expected="a Maven repository that serves them, or a filled jar cache",
            action="Check the network or proxy, or name a directory of jars in `AIRFLOW_KAFKA_SPARK_CACHE`",
        )


class ServerFailed(KafkaSparkError):
    """An embedded server did not start, or died."""

    def __init__(self, server: str, detail: str) -> None:
        self.server = server
        super().__init__(
            f"The embedded {server} is not running: {detail}", expected="a running server", action="Read its log, named above"
        )


class ConnectionInvalid(KafkaSparkError):
    """An Airflow connection cannot be used."""

    def __init__(self, conn_id: str, detail: str, action: str = "") -> None:
        self.conn_id = conn_id
        super().__init__(f"Connection `{conn_id}`: {detail}", action=action or f"Correct the connection `{conn_id}` in Airflow")


class KafkaUnavailable(KafkaSparkError):
    """The broker did not answer in time, or refused the client."""

    retryable = True

    def __init__(self, conn_id: str, doing: str, detail: str) -> None:
        self.conn_id = conn_id
        self.doing = doing
        super().__init__(
            f"Kafka (connection `{conn_id}`) did not do what was asked while {doing}: {detail}",
            expected="an answer from the brokers",
            action="Check the brokers, `bootstrap.servers` and the credentials; the task may simply be retried",
        )
