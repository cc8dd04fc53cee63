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


class BeginningDeleted(DataLoss):
    """Nothing older than the beginning of an interval is left: what was deleted may have belonged to it.

    :param wanted: the first offset that may have.
    :param low: the first offset that is left.
    :param instant: the beginning of the interval.
    """

    def __init__(self, topic: str, partition: int, wanted: int, low: int, instant: str) -> None:
        super().__init__(topic, partition, wanted, low)
        self.instant = instant
        KafkaSparkError.__init__(
            self,
            f"Nothing of {topic}-{partition} from before {instant} is left: its offsets from {wanted} up to {low} were deleted, "
            "and may have belonged to the interval",
            expected=f"a record of before {instant}, which shows that the log still holds the interval's first ones",
            action='To go on without them set `data_loss="skip"`: they are then recorded as a gap in ledger and report. '
            "A schedule that begins after the log's oldest record loses nothing",
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


class LogTruncated(PlanError):
    """A log was cut off below what the pipeline has read, and has grown again: an unclean leader election has lost records.

    :param position: up to where the pipeline has read, or its window is planned.
    :param known_epoch: the leader epoch when it came there.
    :param end: where the log that was read ends now. Records at and behind it are others than those that were read.
    :param found_epoch: the leader epoch now.
    :param interval: where the data interval begins that was to be moved; empty for a pipeline without data intervals.
    """

    def __init__(
        self, topic: str, partition: int, position: int, known_epoch: int, end: int, found_epoch: int, interval: str = ""
    ) -> None:
        self.topic, self.partition, self.position, self.end = topic, partition, position, end
        self.known_epoch, self.found_epoch = known_epoch, found_epoch
        self.interval = interval
        decide = (
            f"To read what is there now: `python -m airflow_kafka_spark reset <pipeline> --to "
            f'\'{{"{topic}": {{"{partition}": {end}}}}}\' --why ...` (with `--discard-open` while a window is open). To go on at '
            f'{position} instead set `data_loss="skip"`: offsets {end} to {position} are then recorded as a gap'
        )
        if interval:
            decide = (
                f"What lies between {end} and {position} now belongs to no interval from {interval} on. To go on "
                f'set `data_loss="skip"`: offsets {end} to {position} are then recorded as a gap. To move what is there now in '
                'place of what was read, `replay` the intervals that had these offsets, with `data_loss="skip"`'
            )
        super().__init__(
            f"{topic}-{partition} was cut off at offset {end} and has grown again since, under leader epoch {found_epoch}: its "
            f"records from {end} on are others than those that the pipeline knows up to {position}",
            expected=f"the log up to offset {position} as leader epoch {known_epoch} had it",
            action=f"An unclean leader election has lost records in Kafka itself: compare sink and topic. {decide}",
        )


class LedgerBehind(PlanError):
    """A window of the pipeline is complete, or partly published, and its ledger does not know that: the ledger has lost its last
    records.

    :param window: number of the window that the group names.
    :param known: number of the last window that the ledger knows to be complete.
    :param to: where to go on, as `reset --to` takes it.
    """

    def __init__(self, pipeline: str, group_id: str, window: int, known: int, ledger_topic: str, to: str) -> None:
        self.pipeline, self.group_id, self.window, self.known = pipeline, group_id, window, known
        self.ledger_topic, self.to = ledger_topic, to
        super().__init__(
            f"The offsets of group `{group_id}` were committed with window {window} of pipeline `{pipeline}`, and its ledger "
            f"knows of none after {known}",
            expected=f"every window in ledger topic `{ledger_topic}`, which has lost its last records, or is an older one",
            action="To go on where that window ended: `python -m airflow_kafka_spark reset "
            f"{pipeline} --ledger-topic {ledger_topic} --group-id {group_id} --discard-open --to '{to}' --why ...`. Compare sink "
            "and topic if windows may have been moved after it. An unclean leader election does this: give the ledger topic "
            "three replicas and `min.insync.replicas=2`",
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


class PlannedMeanwhile(PlanError):
    """Another window of the pipeline was planned at the same moment, and has some of the same offsets: this one was withdrawn
    before anything was moved.

    :param window: the window that was withdrawn, or the interval.
    :param other: the one that came first.
    """

    retryable = True

    def __init__(self, pipeline: str, window: object, other: object) -> None:
        self.pipeline, self.window, self.other = pipeline, window, other
        super().__init__(
            f"{window} of pipeline `{pipeline}` was planned with offsets that {other} has, which was planned at the same moment",
            expected="offsets that are moved once",
            action="Nothing was moved. The task may simply be retried: it then plans what is left",
        )


class WindowTooWide(PlanError):
    """The ledger's topic does not take a record as large as that of this window would be once it is complete.

    :param partitions: of the window.
    :param size: bytes of that record, about, compressed as the topic has it.
    :param largest: bytes that the topic takes.
    """

    def __init__(self, window: str, partitions: int, topic: str, size: int, largest: int) -> None:
        self.window, self.partitions, self.topic, self.size, self.largest = window, partitions, topic, size, largest
        super().__init__(
            f"Window {window} has {partitions:,} partitions: the ledger's record of it would take about {size:,} bytes",
            expected=f"at most {largest:,} bytes, `max.message.bytes` of topic `{topic}`",
            action=f"Nothing was moved. Set `max.message.bytes={2 * size}` and `compression.type=producer` for topic `{topic}`, "
            "or let several pipelines read a part of the topics each",
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


class TimestampsInFuture(PlanError):
    """A record's timestamp lies in the future, and so many records follow it that where an instant begins was not found.

    :param offset: of that record.
    :param timestamp: its timestamp, milliseconds since the epoch.
    :param reached: up to which offset the records behind it were read.
    :param seconds: how long.
    """

    retryable = True

    def __init__(self, topic: str, partition: int, offset: int, timestamp: int, reached: int, seconds: float) -> None:
        self.topic, self.partition, self.offset, self.timestamp = topic, partition, offset, timestamp
        self.reached, self.seconds = reached, seconds
        super().__init__(
            f"The record at offset {offset} of {topic}-{partition} has the timestamp {timestamp} (milliseconds since 1970), "
            f"which lies in the future, and reading behind it came only to offset {reached} in {seconds:g} s",
            expected="timestamps that are not later than this moment",
            action="Mend the producer's clock, or its unit. `message.timestamp.type=LogAppendTime` on the topic lets the broker "
            "say the time, and `message.timestamp.after.max.ms` lets it refuse such records. For this topic use "
            '`window="progress"`, which asks for no timestamps',
        )


class FollowBroken(PlanError):
    """The pipeline to follow is not there, has another name, or does not publish."""

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
            action="Find who else writes to the topic, or deletes from it. To go on all the same, set "
            '`on_mismatch="warn"` for one run; or begin anew where the pipeline stands, with a window that is not compared: '
            f"`python -m airflow_kafka_spark reset {window.rpartition('#')[0]} --shift-by 0 --discard-open --why ...`. "
            'A new pipeline that is not to have what was deleted before its first run begins with `data_loss="skip"`',
        )
