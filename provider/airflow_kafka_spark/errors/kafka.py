"""Errors of Kafka: requests that the brokers refuse, topics that do not exist, and consumers."""

from __future__ import annotations

from collections.abc import Sequence

from airflow_kafka_spark.errors.base import KafkaSparkError, quote_names


class KafkaRefused(KafkaSparkError):
    """Raised when the brokers refuse a request, for example because a permission is missing or a setting is invalid.

    :param conn_id: the Airflow connection.
    :param doing: what was requested.
    :param code: Kafka's name of the error, as ``TOPIC_AUTHORIZATION_FAILED``.
    :param detail: Kafka's message.
    """

    def __init__(self, conn_id: str, doing: str, code: str, detail: str, action: str = "") -> None:
        self.conn_id = conn_id
        self.doing = doing
        self.code = code
        self.detail = detail
        super().__init__(
            f"Kafka (connection `{conn_id}`) refused while {doing}: {detail} ({code})",
            action=action or "Correct the request",
        )


class RightMissing(KafkaRefused):
    """Raised when the brokers refuse a request because the connection's user lacks a right (an ACL). A retry does not help.

    :param conn_id: the Airflow connection; "" if unknown, as in a Spark task. The operator adds it.
    :param doing: what was requested.
    :param code: Kafka's name of the error, as ``GROUP_AUTHORIZATION_FAILED``.
    :param user: the user, in words.
    :param resource: the kind of resource: ``topic``, ``group``, ``transactional id`` or ``cluster``.
    :param name: the resource's name; "" if the brokers do not name it.
    :param right: Kafka's name of the missing right, as ``Describe``; "" if unknown.
    """

    def __init__(self, conn_id: str, doing: str, code: str, user: str, resource: str, name: str, right: str) -> None:
        self.user, self.resource, self.name, self.right = user, resource, name, right
        named = f"{resource} `{name}`" if name else f"the {resource}"
        missing = f"the right {right} on {named}" if right else f"a right on {named}"
        super().__init__(
            conn_id,
            doing,
            code,
            f"{user or 'its user'} lacks {missing}",
            f"Grant {missing} to {user or 'the user'} of connection `{conn_id}`; docs/connections.md lists all rights",
        )

    def at(self, conn_id: str) -> RightMissing:
        """Return this error with the connection, if it has none."""
        if self.conn_id:
            return self
        return RightMissing(conn_id, self.doing, self.code, self.user, self.resource, self.name, self.right)


class TopicMissing(KafkaSparkError):
    """Raised when topics or partitions do not exist on the cluster.

    :param conn_id: the Airflow connection.
    :param topics: the topics or partitions.
    """

    def __init__(self, conn_id: str, topics: Sequence[str]) -> None:
        self.conn_id = conn_id
        self.topics = tuple(topics)
        names = quote_names(self.topics)
        verb = "does" if len(self.topics) == 1 else "do"
        super().__init__(
            f"{names} {verb} not exist on the cluster of connection `{conn_id}`",
            expected="topics that exist",
            action="Create them, or correct their names",
        )


class GroupHasMembers(KafkaSparkError):
    """Raised when the offsets of a consumer group cannot be set because the group has live members.

    :param group_id: the consumer group.
    :param members: its members.
    """

    def __init__(self, group_id: str, members: Sequence[str]) -> None:
        self.group_id = group_id
        self.members = tuple(members)
        super().__init__(
            f"Consumer group `{group_id}` has live members: {', '.join(self.members) or 'unknown'}",
            expected="a group without other members, since its offsets belong to the pipeline",
            action="Stop these consumers, or give the pipeline a `group_id` of its own",
        )


class ConsumerUnhealthy(KafkaSparkError):
    """Raised when a sensor waits for a consumer whose status is in ``fail_on``.

    :param consumer: the consumer, in words.
    :param status: its status, as ``STOP``.
    :param reason: reason of the status.
    :param lag: its lag, in words.
    """

    def __init__(self, consumer: str, status: str, reason: str, lag: str) -> None:
        self.consumer, self.status, self.reason, self.lag = consumer, status, reason, lag
        super().__init__(
            f"{consumer[:1].upper()}{consumer[1:]} has the status {status}: {reason}. {lag[:1].upper()}{lag[1:]}",
            expected="a consumer that works off its backlog",
            action="Find the reason, or remove the status from `fail_on`",
        )
