"""Formats whose schemas are kept elsewhere: Avro, and the schema registry."""

from __future__ import annotations

from typing import ClassVar

from airflow_kafka_spark.errors.base import KafkaSparkError


class RegistryUnavailable(KafkaSparkError):
    """The schema registry did not answer, also after its client had tried again.

    :param conn_id: the Airflow connection.
    :param doing: what was asked of it.
    """

    retryable = True

    def __init__(self, conn_id: str, url: str, doing: str, detail: str) -> None:
        self.conn_id, self.url, self.doing = conn_id, url, doing
        super().__init__(
            f"The schema registry at {url} (connection `{conn_id}`) did not answer while {doing}: {detail}",
            expected="an answer of its REST API",
            action="Check that it runs and that the address is right; the task may simply be retried",
        )


class RegistryRefused(KafkaSparkError):
    """The schema registry answered, but not what was asked for: credentials, rights, subjects, versions, compatibility.

    :param status: the HTTP status.
    :param code: the registry's own error code, or -1.
    """

    def __init__(self, conn_id: str, url: str, doing: str, detail: str, status: int, code: int = -1, action: str = "") -> None:
        self.conn_id, self.url, self.doing, self.status, self.code = conn_id, url, doing, status, code
        super().__init__(f"The schema registry at {url} (connection `{conn_id}`) refused {doing}: {detail}", action=action)


class AvroNotInstalled(KafkaSparkError):
    """A package that Avro or the registry's client needs is missing."""

    def __init__(self, package: str) -> None:
        self.package = package
        super().__init__(
            f"Avro needs the package `{package}`, which is not installed here",
            action="Install it with `pip install 'airflow-provider-kafka-spark[avro]'`, on the executors too",
        )


class SchemaUnusable(KafkaSparkError):
    """A schema cannot be used.

    :param what: which one, as it stands in a sentence (``subject `orders-value`, version 3``).
    :param detail: what is wrong with it.
    """

    noun: ClassVar[str] = "schema"

    def __init__(self, what: str, detail: str, action: str = "") -> None:
        self.what, self.detail = what, detail
        super().__init__(f"The {self.noun} of {what} cannot be used: {detail}", action=action or "Correct the schema")


class AvroSchemaInvalid(SchemaUnusable):
    """An Avro schema cannot be used."""

    noun = "Avro schema"


class ProtobufNotInstalled(KafkaSparkError):
    """A package that Protobuf needs is missing."""

    def __init__(self, package: str) -> None:
        self.package = package
        super().__init__(
            f"Protobuf needs the package `{package}`, which is not installed here",
            action="Install it with `pip install 'airflow-provider-kafka-spark[protobuf]'`, on the executors too",
        )
