"""Errors of formats and of the schema registry."""

from __future__ import annotations

from typing import ClassVar

from airflow_kafka_spark.errors.base import KafkaSparkError


class RegistryUnavailable(KafkaSparkError):
    """Raised when the schema registry did not answer, after the retries of its client.

    :param conn_id: the Airflow connection.
    :param url: address of the registry.
    :param doing: what was requested.
    :param detail: the client's message.
    """

    retryable = True

    def __init__(self, conn_id: str, url: str, doing: str, detail: str) -> None:
        self.conn_id, self.url, self.doing, self.detail = conn_id, url, doing, detail
        super().__init__(
            f"The schema registry at {url} (connection `{conn_id}`) did not answer while {doing}: {detail}",
            expected="an answer of its REST API",
            action="Check that it runs and that the address is right; the task may simply be retried",
        )


class RegistryRefused(KafkaSparkError):
    """Raised when the schema registry refuses a request: credentials, permissions, subjects, versions, or compatibility.

    :param conn_id: the Airflow connection.
    :param url: address of the registry.
    :param doing: what was requested.
    :param detail: the registry's message.
    :param status: the HTTP status.
    :param code: the registry's own error code, or -1.
    """

    def __init__(self, conn_id: str, url: str, doing: str, detail: str, status: int, code: int = -1, action: str = "") -> None:
        self.conn_id, self.url, self.doing, self.detail, self.status, self.code = conn_id, url, doing, detail, status, code
        super().__init__(f"The schema registry at {url} (connection `{conn_id}`) refused {doing}: {detail}", action=action)


class SchemaInvalid(KafkaSparkError):
    """Raised when the schema of a format cannot be parsed.

    :param schema: text of the schema.
    :param position: position of the error in the text, in characters from 0; None if ``found`` names it.
    :param found: what was found there.
    :param expected: what was expected there.
    """

    def __init__(self, schema: str, position: int | None, found: str, expected: str) -> None:
        self.schema = schema
        self.position = position
        if position is None:
            what = f"The schema has {found}"
        elif not schema.strip():
            what = "The schema is empty"
        else:
            before = schema[max(0, position - 30) : position]
            where = f"at character {position + 1}, after `{before}`" if before else "at its beginning"
            what = f"The schema has {found} {where}"
        super().__init__(what, expected=expected, action="Correct it; the types are those of Spark's DDL")


class SchemaUnusable(KafkaSparkError):
    """Raised when a schema cannot be used.

    :param what: the schema, as the object of a sentence (``subject `orders-value`, version 3``).
    :param detail: the reason why it cannot be used.
    """

    noun: ClassVar[str] = "schema"

    def __init__(self, what: str, detail: str, action: str = "") -> None:
        self.what, self.detail = what, detail
        super().__init__(f"The {self.noun} of {what} cannot be used: {detail}", action=action or "Correct the schema")


class AvroSchemaInvalid(SchemaUnusable):
    """Raised when an Avro schema cannot be used."""

    noun = "Avro schema"
