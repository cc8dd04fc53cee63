"""What the brokers do not allow, or do not have."""

from __future__ import annotations

from collections.abc import Sequence

from airflow_kafka_spark.errors.base import KafkaSparkError


class KafkaRefused(KafkaSparkError):
    """The brokers answered, and the answer is no: a missing permission, a setting they do not accept.

    :param code: Kafka's name of the error, as ``TOPIC_AUTHORIZATION_FAILED``.
    :param detail: what they said.
    """

    def __init__(self, conn_id: str, doing: str, code: str, detail: str, action: str = "") -> None:
        self.conn_id = conn_id
        self.doing = doing
        self.code = code
        self.detail = detail
        super().__init__(
            f"Kafka (connection `{conn_id}`) refused while {doing}: {detail} ({code})",
            action=action or "Correct what was asked for",
        )


class TopicMissing(KafkaSparkError):
    """Topics, or partitions of them, that the cluster does not have."""

    def __init__(self, conn_id: str, topics: Sequence[str]) -> None:
        self.conn_id = conn_id
        self.topics = tuple(topics)
        names = ", ".join(f"`{t}`" for t in self.topics)
        verb = "does" if len(self.topics) == 1 else "do"
        super().__init__(
            f"{names} {verb} not exist on the cluster of connection `{conn_id}`",
            expected="topics that exist",
            action="Create them, or correct their names",
        )


class GroupHasMembers(KafkaSparkError):
    """A consumer group's offsets cannot be set because somebody consumes with this group."""

    def __init__(self, group_id: str, members: Sequence[str]) -> None:
        self.group_id = group_id
        self.members = tuple(members)
        super().__init__(
            f"Consumer group `{group_id}` has live members: {', '.join(self.members) or 'unknown'}",
            expected="a group that nobody else consumes with, since its offsets belong to the pipeline",
            action="Stop these consumers, or give the pipeline a `group_id` of its own",
        )
