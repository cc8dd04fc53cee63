"""Planning: what Kafka holds no longer fits what the pipeline remembers, or what was asked for."""

from __future__ import annotations

from airflow_kafka_spark.errors.base import KafkaSparkError


class PlanError(KafkaSparkError):
    """A window could not be planned, or a planned one can no longer be read; nothing was changed."""


class TopicRecreated(PlanError):
    """A topic was deleted and created again: its offsets mean other records now."""

    def __init__(self, topic: str, known_id: str, found_id: str) -> None:
        self.topic, self.known_id, self.found_id = topic, known_id, found_id
        super().__init__(
            f"Topic `{topic}` was deleted and created again: the pipeline knows id {known_id}, the broker has id {found_id}",
            expected="the topic this pipeline has read so far",
            action="Records of the old topic that were not read yet are lost. To go on with the new one from its earliest "
            'record, set `data_loss="skip"` for one run, or give the operator a new `pipeline=` name and `group_id`',
        )


class PartitionsVanished(PlanError):
    """The broker names fewer partitions than the pipeline has read: partitions can only be added."""

    retryable = True

    def __init__(self, topic: str, known: int, partitions: int) -> None:
        self.topic, self.known, self.partitions = topic, known, partitions
        super().__init__(
            f"Topic `{topic}` has {partitions} partitions",
            expected=f"at least the {known} this pipeline has read",
            action="This is usually a broker answering from stale metadata; retry, and check the cluster if it stays",
        )


class DataLoss(PlanError):
    """Retention (or DeleteRecords) removed records before they were read."""

    def __init__(self, topic: str, partition: int, wanted: int, low: int) -> None:
        self.topic, self.partition, self.wanted, self.low = topic, partition, wanted, low
        super().__init__(
            f"Records of {topic}-{partition} from offset {wanted} up to {low} were deleted before they were read",
            expected=f"offset {wanted} still in the log",
            action='To go on without them set `data_loss="skip"`: they are then recorded as a gap in ledger and report',
        )


class OffsetsWentBack(PlanError):
    """The log ends before the position the pipeline has reached."""

    retryable = True

    def __init__(self, topic: str, partition: int, position: int, end: int) -> None:
        self.topic, self.partition, self.position, self.end = topic, partition, position, end
        super().__init__(
            f"{topic}-{partition} ends at offset {end}",
            expected=f"an end at or after {position}, which this pipeline has already reached",
            action="A stale broker answer goes away on retry; after an unclean leader election records were lost in Kafka "
            "itself: compare sink and topic, then start a new `pipeline=`",
        )


class ClusterChanged(PlanError):
    """The connection leads to another Kafka cluster, whose offsets mean other records."""

    def __init__(self, known_id: str, found_id: str) -> None:
        self.known_id, self.found_id = known_id, found_id
        super().__init__(
            f"The connection leads to Kafka cluster {found_id}",
            expected=f"cluster {known_id}, whose offsets this pipeline remembers",
            action="Correct `bootstrap.servers`, or give the operator a new `pipeline=` name and `group_id` for the new cluster",
        )


class IntervalOverlaps(PlanError):
    """Two intervals of one pipeline share instants: their records would be moved twice."""

    def __init__(self, pipeline: str, interval: object, other: object) -> None:
        self.pipeline, self.interval, self.other = pipeline, interval, other
        super().__init__(
            f"Interval {interval} of pipeline `{pipeline}` overlaps {other}, which has been planned already",
            expected="intervals that follow each other",
            action="After a change of schedule give the operator a new `pipeline=` name and `group_id`, and "
            "begin where the old one ends",
        )


class IntervalNotOver(PlanError):
    """An interval ends in the future: its records are not all there."""

    retryable = True

    def __init__(self, pipeline: str, interval: object) -> None:
        self.pipeline, self.interval = pipeline, interval
        super().__init__(
            f"Interval {interval} of pipeline `{pipeline}` is not over yet",
            expected="an interval that ends now, or in the past",
            action="Run it once it is over; see to the clock of this machine if it is",
        )


class IntervalsOpen(PlanError):
    """A progress window would have to begin in the middle of intervals that are not complete, or pass over some."""

    def __init__(self, pipeline: str, interval: object, state: str) -> None:
        self.pipeline, self.interval = pipeline, interval
        super().__init__(
            f"Pipeline `{pipeline}` cannot go on from where its intervals end: {interval} is {state}, and not all before it are "
            "complete",
            expected="intervals that are complete without a hole",
            action="Run the intervals that are missing first",
        )


class FollowBroken(PlanError):
    """The pipeline to follow is not there, or too far ahead."""

    def __init__(self, pipeline: str, detail: str, action: str) -> None:
        self.pipeline, self.detail = pipeline, detail
        super().__init__(f"Pipeline `{pipeline}` cannot be followed: {detail}", action=action)


class NotYetStable(PlanError):
    """Records that are to be read lie behind an open transaction."""

    retryable = True

    def __init__(self, partition: str, stable: int, end: int) -> None:
        self.partition, self.stable, self.end = partition, stable, end
        super().__init__(
            f"{partition} can be read up to offset {stable} only, an open transaction begins there",
            expected=f"what was published, up to {end}",
            action="The task may simply be retried once that transaction has ended",
        )


class FollowedMismatch(KafkaSparkError):
    """Not exactly what the followed pipeline has published. Nothing was committed.

    :param published: records it counts.
    :param read: records found between the window's ends: more, when somebody else writes to the topic too.
    """

    def __init__(self, window: str, pipeline: str, published: int, read: int) -> None:
        self.window, self.pipeline, self.published, self.read = window, pipeline, published, read
        kind = "over-consumption" if read > published else "under-consumption"
        super().__init__(
            f"Window {window} holds {read:,} records ({kind} of {abs(read - published):,})",
            expected=f"the {published:,} that pipeline `{pipeline}` published",
            action='Find who else writes to the topic, or deletes from it; `on_mismatch="warn"` goes on all the same',
        )
