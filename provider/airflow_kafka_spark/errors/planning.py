"""Errors of planning: the content of Kafka differs from the ledger's records, or from the options."""

from __future__ import annotations

from collections.abc import Sequence

from airflow_kafka_spark.errors.base import KafkaSparkError, format_command


class PlanError(KafkaSparkError):
    """Raised when a window cannot be planned, or when a planned window can no longer be read. Nothing was changed."""


class BoundRefused(PlanError):
    """Raised when starting or ending offsets do not fit the topics."""


class TopicRecreated(PlanError):
    """Raised when a topic was deleted and created again. Its offsets refer to other records now.

    :param topic: the topic.
    :param known_id: its id when the pipeline read it.
    :param found_id: its id now; "" if it was not created again.
    :param action: the action, if the window is replayed, or if it is published to this topic; "" for a topic that is read.
    """

    def __init__(self, topic: str, known_id: str, found_id: str, action: str = "") -> None:
        self.topic, self.known_id, self.found_id = topic, known_id, found_id
        decide = (
            "Records of the old topic that were not read yet are lost. To continue with the new one from its earliest "
            'record, set `data_loss="skip"` for one run, or give the operator a new `pipeline=` name and `group_id`'
        )
        happened = "deleted and created again" if found_id else "deleted"
        there = f"id {found_id}" if found_id else "no such topic"
        super().__init__(
            f"Topic `{topic}` was {happened}: the pipeline knows id {known_id}, the broker has {there}",
            expected="the topic with the known id",
            action=action or decide,
        )


class OldOffsetsInRows(PlanError):
    """Raised when an upsert would ignore new records, because the target's rows have offsets of an earlier topic or cluster.

    :param sink: URI of the sink.
    :param topics: the topics that these rows name.
    :param columns: the columns for topic, partition and offset.
    """

    def __init__(self, sink: str, topics: Sequence[str], columns: Sequence[str]) -> None:
        self.sink, self.topics = sink, tuple(topics)
        named = ", ".join(f"`{topic}`" for topic in self.topics)
        super().__init__(
            f"Rows of {sink} have offsets of an earlier topic {named}, which was deleted and created again, or is of another "
            "cluster. Records of the present topic would be ignored, because their offsets are lower",
            expected="no rows with offsets of an earlier topic",
            action=f"Set {', '.join(f'`{name}`' for name in columns)} to NULL in the rows of this topic, and run the task again",
        )


class PartitionsVanished(PlanError):
    """Raised when the brokers report fewer partitions than the pipeline has read, although partitions can only be added.

    :param topic: the topic.
    :param known: number of partitions that the pipeline has read.
    :param partitions: number of partitions now.
    """

    retryable = True

    def __init__(self, topic: str, known: int, partitions: int) -> None:
        self.topic, self.known, self.partitions = topic, known, partitions
        super().__init__(
            f"Topic `{topic}` has {partitions} partitions",
            expected=f"at least the {known} this pipeline has read",
            action="This is usually a broker answering from stale metadata; retry, and check the cluster if it stays",
        )


class DataLoss(PlanError):
    """Raised when retention or DeleteRecords removed records before the pipeline read them.

    :param topic: the topic.
    :param partition: the partition.
    :param wanted: the next offset to read.
    :param low: the first offset of the log.
    :param action: the action, if the window is replayed; "" if its records are read for the first time.
    :param others: the number of other partitions that have lost records, too; default 0.
    """

    def __init__(self, topic: str, partition: int, wanted: int, low: int, action: str = "", *, others: int = 0) -> None:
        self.topic, self.partition, self.wanted, self.low = topic, partition, wanted, low
        before = "the window is replayed" if action else "they were read"
        more = f", and records of {others} other partition{'' if others == 1 else 's'}," if others else ""
        decide = 'To continue without them set `data_loss="skip"`: they are then recorded as a gap in ledger and report'
        super().__init__(
            f"Records of {topic}-{partition} from offset {wanted} up to {low}{more} were deleted before {before}",
            expected=f"offset {wanted} still in the log",
            action=action or decide,
        )


class BeginningDeleted(DataLoss):
    """Raised when the log contains nothing from before a data interval: deleted records may have belonged to the interval.

    :param topic: the topic.
    :param partition: the partition.
    :param wanted: the first offset that may have belonged to the interval.
    :param low: the first offset of the log.
    :param instant: the beginning of the interval.
    """

    def __init__(self, topic: str, partition: int, wanted: int, low: int, instant: str) -> None:
        super().__init__(topic, partition, wanted, low)
        self.instant = instant
        KafkaSparkError.__init__(
            self,
            f"{topic}-{partition} contains nothing from before {instant}: its offsets from {wanted} up to {low} were deleted, "
            "and may have belonged to the interval",
            expected=f"a record from before {instant}, which shows that the log still contains the interval's first records",
            action='To continue without them set `data_loss="skip"`: they are then recorded as a gap in ledger and report. '
            "A schedule that begins after the log's oldest record loses nothing",
        )


class IntervalCut(PlanError):
    """Raised when a data interval has records before and after those that windows without an interval have moved. One window has
    one range of each partition, so it cannot have both.

    :param topic: the topic.
    :param partition: the partition.
    :param start: the first offset of the interval.
    :param began: the offset at which the first window without an interval began.
    :param position: the offset that these windows have reached.
    """

    def __init__(self, topic: str, partition: int, start: int, began: int, position: int) -> None:
        self.topic, self.partition = topic, partition
        self.start, self.began, self.position = start, began, position
        super().__init__(
            f"{topic}-{partition}: windows without an interval began at offset {began}, within the interval, and have reached "
            f"{position}: the interval's records from {start} up to {began} were not moved",
            expected="an interval that these windows have not divided",
            action='To move the rest of the interval without these records, set `data_loss="skip"` for one run: they are then '
            "recorded as a gap. To move them, too, read the interval with another pipeline, into another table",
        )


class OffsetsWentBack(PlanError):
    """Raised when a log ends before the position that the pipeline has reached.

    :param topic: the topic.
    :param partition: the partition.
    :param position: the position of the pipeline.
    :param end: the end of the log.
    """

    retryable = True

    def __init__(self, topic: str, partition: int, position: int, end: int) -> None:
        self.topic, self.partition, self.position, self.end = topic, partition, position, end
        super().__init__(
            f"{topic}-{partition} ends at offset {end}",
            expected=f"an end at or after {position}, which this pipeline has already reached",
            action="A stale broker answer goes away on retry; after an unclean leader election records were lost in Kafka "
            "itself: compare sink and topic, then start a new `pipeline=`",
        )


class LogCorrupt(PlanError):
    """Raised when records of a log do not have the checksum with which they were produced.

    :param topic: the topic.
    :param partition: the partition.
    :param offset: the first offset that cannot be read.
    :param detail: the client's message.
    """

    def __init__(self, topic: str, partition: int, offset: int, detail: str) -> None:
        self.topic, self.partition, self.offset, self.detail = topic, partition, offset, detail
        super().__init__(
            f"{topic}-{partition} cannot be read at offset {offset}: {detail}",
            expected="records as they were produced",
            action="The disk of the partition's leader, or the network, has changed them. Check that disk, make a replica "
            "whose log is sound the leader, or restore the log",
        )


class HeaderNameInvalid(PlanError):
    """Raised when the name of a record's header is not UTF-8. Clients in C can write such names.

    :param topic: the topic.
    :param partition: the partition.
    :param offset: of the record.
    """

    def __init__(self, topic: str, partition: int, offset: int) -> None:
        self.topic, self.partition, self.offset = topic, partition, offset
        super().__init__(
            f"the record {topic}-{partition} at offset {offset} has a header whose name is not UTF-8",
            expected="names of headers in UTF-8, as Kafka's protocol defines them",
            action="Let the producer correct its names. For the records that are there, read no headers: "
            "`preserve_headers=False` of a KafkaToKafkaOperator, no transform or column that needs `headers`",
        )


class LogTruncated(PlanError):
    """Raised when a log was truncated below the position of the pipeline and has grown again, by an unclean leader election.

    :param topic: the topic.
    :param partition: the partition.
    :param position: the position of the pipeline, or the end of its planned window.
    :param known_epoch: the leader epoch at that position when the pipeline read it.
    :param end: the offset at which the log was truncated. Records from this offset on are not those that were read.
    :param found_epoch: the leader epoch now.
    :param interval: beginning of the data interval that was to be moved; empty for a pipeline without data intervals.
    :param is_open: True if a planned window was to be read. Some of its records may be committed already.
    :param action: the action, if the window is replayed; "" if its records are read for the first time.
    """

    def __init__(
        self,
        topic: str,
        partition: int,
        position: int,
        known_epoch: int,
        end: int,
        found_epoch: int,
        interval: str = "",
        is_open: bool = False,
        action: str = "",
    ) -> None:
        self.topic, self.partition, self.position, self.end = topic, partition, position, end
        self.known_epoch, self.found_epoch = known_epoch, found_epoch
        self.interval, self.is_open = interval, is_open
        reset = f'`airflow kafka-spark reset <pipeline> --to \'{{"{topic}": {{"{partition}": {end}}}}}\' --why ...`'
        gap = f'set `data_loss="skip"`: offsets {end} to {position} are then recorded as a gap'
        decide = f"To read the present records: {reset}. To continue at {position} instead {gap}"
        if is_open:
            decide = f"To complete the planned window without them {gap}. To read the present records afterwards: {reset}"
        if interval:
            decide = (
                f"The records between {end} and {position} now belong to no interval from {interval} on. To continue "
                f'set `data_loss="skip"`: offsets {end} to {position} are then recorded as a gap. To move the present '
                "records, too, run a task with another `pipeline` and `group_id` once, without `window`, whose "
                "`starting_offsets` and `ending_offsets` are these two offsets (-1 for other partitions)"
            )
        super().__init__(
            f"{topic}-{partition} was cut off at offset {end} and has grown again since, under leader epoch {found_epoch}: its "
            f"records from {end} on are not those that the pipeline knows up to {position}",
            expected=f"the log up to offset {position} as leader epoch {known_epoch} had it",
            action=f"An unclean leader election has lost records in Kafka itself: compare sink and topic. {action or decide}",
        )


class LedgerBehind(PlanError):
    """Raised when the consumer group or a published split proves a window that the ledger does not know.

    The ledger has lost its last records.

    :param pipeline: name of the pipeline.
    :param group_id: the consumer group.
    :param window: number of the window that the group names.
    :param known: number of the last complete window in the ledger.
    :param ledger_topic: the ledger topic.
    :param to: the position to continue from, as an argument of ``reset --to``.
    :param only: the topics that ``reset --only`` has to name; default none.
    """

    def __init__(
        self, pipeline: str, group_id: str, window: int, known: int, ledger_topic: str, to: str, only: Sequence[str] = ()
    ) -> None:
        self.pipeline, self.group_id, self.window, self.known = pipeline, group_id, window, known
        self.ledger_topic, self.to = ledger_topic, to
        options = ["--ledger-topic", ledger_topic, "--group-id", group_id, "--discard-open", "--to", to]
        options += ["--only", *only] if only else []
        super().__init__(
            f"The offsets of group `{group_id}` were committed with window {window} of pipeline `{pipeline}`, and its ledger "
            f"has no window after {known}",
            expected=f"every window in ledger topic `{ledger_topic}`, which has lost its last records, or is an older one",
            action=f"To continue after that window: {format_command('reset', pipeline, *options, '--why', '...')}. "
            "Compare sink and topic if windows may have been moved after it. An unclean leader election does this: give the "
            "ledger topic three replicas and `min.insync.replicas=2`",
        )


class IntervalsLost(PlanError):
    """Raised when the consumer group names an interval, or a window without one, that the ledger does not know, and another
    interval begins before its offsets.

    The ledger has lost windows, and that interval may be among them: to move it could write its records twice.

    :param pipeline: name of the pipeline.
    :param group_id: the consumer group.
    :param named: the interval that the group names, or the number of the window.
    :param interval: the interval that was to be planned.
    :param place: topic and partition in which it begins before the group's offset.
    :param start: the offset at which it begins there.
    :param offset: the group's offset.
    :param ledger_topic: the ledger topic.
    :param what: ``interval`` (default) or ``window``.
    """

    def __init__(
        self,
        pipeline: str,
        group_id: str,
        named: object,
        interval: object,
        place: str,
        start: int,
        offset: int,
        ledger_topic: str,
        what: str = "interval",
    ) -> None:
        self.pipeline, self.group_id, self.named, self.interval = pipeline, group_id, named, interval
        self.place, self.start, self.offset, self.ledger_topic = place, start, offset, ledger_topic
        options = ("--ledger-topic", ledger_topic, "--delete-group", "--group-id", group_id, "--why", "...")
        super().__init__(
            f"Group `{group_id}` has followed pipeline `{pipeline}` up to {what} {named}, which its ledger does not know. "
            f"Interval {interval} begins at offset {start} of {place}, and the group is at {offset}: it may have been moved",
            expected=f"the interval in ledger topic `{ledger_topic}`, or in the sink",
            action="Compare sink and topic. If its records are there, mark the task as successful. If they are not, remove what "
            f"the group says, and clear the task: {format_command('forget', pipeline, *options)}. If "
            "`ledger_topic` was changed, set it back",
        )


class ClusterChanged(PlanError):
    """Raised when the connection leads to another Kafka cluster, whose offsets refer to other records.

    :param known_id: id of the cluster that the pipeline has read, or has published to.
    :param found_id: id of the cluster of the connection.
    :param action: the action; default: to read the new cluster with a new pipeline.
    """

    def __init__(self, known_id: str, found_id: str, action: str = "") -> None:
        self.known_id, self.found_id = known_id, found_id
        super().__init__(
            f"The connection leads to Kafka cluster {found_id}",
            expected=f"cluster {known_id}, which the ledger of this pipeline names",
            action=action
            or "Correct `bootstrap.servers`, or give the operator a new `pipeline=` name and `group_id` for the new cluster",
        )


class IntervalOverlaps(PlanError):
    """Raised when two data intervals of one pipeline overlap. Records in both would be moved twice.

    :param pipeline: name of the pipeline.
    :param interval: the interval that was to be planned.
    :param other: the interval that was planned earlier.
    """

    def __init__(self, pipeline: str, interval: object, other: object) -> None:
        self.pipeline, self.interval, self.other = pipeline, interval, other
        super().__init__(
            f"Interval {interval} of pipeline `{pipeline}` overlaps {other}, which has been planned already",
            expected="intervals that follow each other",
            action="After a change of schedule give the operator a new `pipeline=` name and `group_id`, and begin where the old "
            "one ends. A `CronTriggerTimetable` with an `interval` of a day in local time overlaps when summer time begins: use "
            "`CronDataIntervalTimetable`, and trigger a run by hand with the data interval that is left",
        )


class PlannedMeanwhile(PlanError):
    """Raised when another window with some of the same offsets was planned at the same time. This window was withdrawn.

    :param pipeline: name of the pipeline.
    :param window: the window or data interval that was withdrawn.
    :param other: the window or data interval that was planned first.
    """

    retryable = True

    def __init__(self, pipeline: str, window: object, other: object) -> None:
        self.pipeline, self.window, self.other = pipeline, window, other
        super().__init__(
            f"{window} of pipeline `{pipeline}` was planned with offsets of {other}, which was planned at the same moment",
            expected="offsets that no other window has",
            action="Nothing was moved. The task may simply be retried: it then plans the remaining offsets",
        )


class WindowTooWide(PlanError):
    """Raised when the ledger's record of a window would be larger than the ledger topic allows.

    :param window: name of the window.
    :param partitions: number of its partitions.
    :param topic: the ledger topic.
    :param size: estimated size of the record, compressed, in bytes.
    :param largest: largest size that the topic allows, in bytes.
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
    """Raised when a data interval ends in the future. Not all of its records exist yet.

    :param pipeline: name of the pipeline.
    :param interval: the interval.
    """

    retryable = True

    def __init__(self, pipeline: str, interval: object) -> None:
        self.pipeline, self.interval = pipeline, interval
        super().__init__(
            f"Interval {interval} of pipeline `{pipeline}` is not over yet",
            expected="an interval that ends now, or in the past",
            action="Run it once the interval is over. If it is over, correct the clock of this machine",
        )


class IntervalsOpen(PlanError):
    """Raised when a progress window would begin between incomplete data intervals, or skip one.

    :param pipeline: name of the pipeline.
    :param interval: the first incomplete interval.
    :param state: its state.
    """

    def __init__(self, pipeline: str, interval: object, state: str) -> None:
        self.pipeline, self.interval, self.state = pipeline, interval, state
        super().__init__(
            f"Pipeline `{pipeline}` cannot continue after its intervals: {interval} is {state}, and not all before it are "
            "complete",
            expected="intervals that are complete without a gap",
            action="Run the intervals that are missing first",
        )


class ProgressWindowOpen(PlanError):
    """Raised when a run whose progress window is open would move its data interval, because ``window`` was changed before its
    retry. No interval has the records of that window.

    :param pipeline: name of the pipeline.
    :param window: the open window.
    :param run: the run that planned it.
    """

    def __init__(self, pipeline: str, window: object, run: str) -> None:
        self.pipeline, self.window, self.run = pipeline, str(window), run
        super().__init__(
            f'Progress window {window} of run `{run}` is open, and this run has `window="interval"`, which leaves out the '
            "records of that window",
            expected="a change of `window` without an open window",
            action='Set `window="progress"`, and run the task again, which finishes the window; then change it. To give the '
            f"window up: {format_command('skip', pipeline, '--not-running', '--why', '...')}",
        )


class TimestampsInFuture(PlanError):
    """Raised when a record's timestamp is in the future, and the first record of an instant was not found after it in time.

    :param topic: the topic.
    :param partition: the partition.
    :param offset: offset of the record.
    :param timestamp: its timestamp, milliseconds since the epoch.
    :param reached: the offset up to which the following records were read.
    :param seconds: the time that was spent on reading.
    """

    retryable = True

    def __init__(self, topic: str, partition: int, offset: int, timestamp: int, reached: int, seconds: float) -> None:
        self.topic, self.partition, self.offset, self.timestamp = topic, partition, offset, timestamp
        self.reached, self.seconds = reached, seconds
        super().__init__(
            f"The record at offset {offset} of {topic}-{partition} has the timestamp {timestamp} (milliseconds since 1970), "
            f"which lies in the future, and reading after it reached only offset {reached} in {seconds:g} s",
            expected="timestamps that are not later than this moment",
            action="Correct the producer's clock, or its unit. `message.timestamp.type=LogAppendTime` on the topic lets the "
            "broker set the time, and `message.timestamp.after.max.ms` lets it refuse such records. For this topic use "
            '`window="progress"`, which asks for no timestamps',
        )


class FollowBroken(PlanError):
    """Raised when the pipeline to follow does not exist, was renamed, or does not publish records that count to a topic.

    :param pipeline: name of the pipeline to follow.
    :param detail: the reason why it cannot be followed.
    """

    def __init__(self, pipeline: str, detail: str, action: str) -> None:
        self.pipeline, self.detail = pipeline, detail
        super().__init__(f"Pipeline `{pipeline}` cannot be followed: {detail}", action=action)


class NotYetStable(PlanError):
    """Raised when an open transaction hides records that are to be read.

    :param partition: the topic and partition.
    :param stable: the last stable offset.
    :param end: the offset up to which records are to be read.
    """

    retryable = True

    def __init__(self, partition: str, stable: int, end: int) -> None:
        self.partition, self.stable, self.end = partition, stable, end
        super().__init__(
            f"{partition} can be read up to offset {stable} only: an open transaction begins there",
            expected=f"the published records, up to {end}",
            action="Run the task again when that transaction has ended",
        )


class FollowedMismatch(KafkaSparkError):
    """Raised when a window does not contain exactly the records that the followed pipeline published. Nothing was committed.

    :param window: name of the window.
    :param pipeline: name of the followed pipeline.
    :param published: number of records that it published.
    :param read: number of records in the window. It is larger if another producer writes to the topic, too.
    """

    def __init__(self, window: str, pipeline: str, published: int, read: int) -> None:
        self.window, self.pipeline, self.published, self.read = window, pipeline, published, read
        kind = "over-consumption" if read > published else "under-consumption"
        super().__init__(
            f"Window {window} holds {read:,} records ({kind} of {abs(read - published):,})",
            expected=f"the {published:,} that pipeline `{pipeline}` published",
            action="Find the other producer of the topic, or the program that deletes its records. To continue regardless, set "
            '`on_mismatch="warn"` for one run. Or start over at the present position, with a window that is not compared: '
            f"{format_command('reset', window.rpartition('#')[0], '--shift-by', 0, '--discard-open', '--why', '...')}. "
            'A new pipeline that may leave out records that were deleted before its first run begins with `data_loss="skip"`',
        )
