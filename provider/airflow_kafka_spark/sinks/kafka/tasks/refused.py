"""What the brokers say for good of records that are sent: no retry helps, a setting does. Runs in Spark's tasks, too."""

from __future__ import annotations

from typing import Any

from airflow_kafka_spark.errors import KafkaRefused

_VALIDATES = (
    "See what {topic} validates, and let it take such records: timestamps as old, or as new, as theirs "
    "(`message.timestamp.before.max.ms`, `.after.max.ms`; or `message.timestamp.type=LogAppendTime`), keys where it is compacted"
)

HELP = {
    "MSG_SIZE_TOO_LARGE": "Raise `max.message.bytes` of {topic}",
    "INVALID_TIMESTAMP": _VALIDATES,
    "INVALID_RECORD": _VALIDATES,
    # The others of a batch with such a record.
    "_INVALID_DIFFERENT_RECORD": _VALIDATES,
    "POLICY_VIOLATION": _VALIDATES,
    "TOPIC_AUTHORIZATION_FAILED": "Grant the connection's user WRITE and DESCRIBE on {topic}",
}
"""By Kafka's name of the error, what helps."""

AFTERWARDS = "The task may then be retried: it goes on with the same window"


def refused(error: Any, conn_id: str, called: str, topic: str | None = None) -> KafkaRefused | None:
    """An error as what it is; None where it is not about records, and a retry may help.

    :param error: the client's ``KafkaError``.
    :param called: what is sent, in the plural.
    :param topic: where to; None where that is not known.
    """
    if error.name() not in HELP:
        return None
    where = f"topic `{topic}`" if topic else "the topic"
    action = f"{HELP[error.name()].format(topic=where)}. {AFTERWARDS}"
    return KafkaRefused(conn_id, f"sending {called} to {where}", error.name(), error.str(), action)
