"""Every error this package raises on purpose, in one hierarchy.

Each message says what was found, what was expected and what to do; the facts it was built from are attributes, so that a
callback or a retry policy can look at them. ``retryable`` tells whether the same task may succeed when it runs again
without anybody changing anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class KafkaSparkError(Exception):
    """Base of all errors of this package.

    :param found: what was found, a whole sentence without its full stop.
    :param expected: what was expected instead.
    :param action: what the reader can do about it.
    """

    retryable: bool = False

    def __init__(self, found: str, *, expected: str = "", action: str = "") -> None:
        self.found = found
        self.expected = expected
        self.action = action
        sentences = [found, f"Expected {expected}" if expected else "", action]
        super().__init__(" ".join(f"{s.rstrip('.')}." for s in sentences if s))

    def __reduce__(self) -> tuple:
        # Subclasses take facts rather than sentences: without this, an error raised in a Spark task could not travel.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[KafkaSparkError], args: tuple, facts: dict) -> KafkaSparkError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(facts)
    return error


# --- what the user wrote, and what it met ---------------------------------------------------------------------------


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


# --- Kafka ------------------------------------------------------------------------------------------------------------


class KafkaRefused(KafkaSparkError):
    """The brokers answered, and the answer is no: a missing permission, a setting they do not accept.

    :param code: Kafka's name of the error, as ``TOPIC_AUTHORIZATION_FAILED``.
    """

    def __init__(self, conn_id: str, doing: str, code: str, detail: str, action: str = "") -> None:
        self.conn_id = conn_id
        self.doing = doing
        self.code = code
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


# --- planning: what Kafka holds no longer fits what the pipeline remembers ---------------------------------------------


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
            'record, set `data_loss="skip"` for one run, or give the operator a new `pipeline=` name',
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
            action="Correct `bootstrap.servers`, or give the operator a new `pipeline=` name for the new cluster",
        )


# --- the ledger -------------------------------------------------------------------------------------------------------


class Fenced(KafkaSparkError):
    """Another attempt of the same pipeline has taken over; this one may not write any more. Nothing is lost: that finishes."""

    retryable = True

    def __init__(self, pipeline: str, doing: str) -> None:
        self.pipeline, self.doing = pipeline, doing
        super().__init__(
            f"Pipeline `{pipeline}`: a newer attempt took over while this one was {doing}",
            expected="to be the only attempt",
            action="Nothing needs to be done: the newer attempt finishes the window. If several runs of this DAG overlap all the "
            "time, set `max_active_runs=1`",
        )


class LedgerUnreadable(KafkaSparkError):
    """The ledger topic cannot be read to its end, or holds something this version does not know."""

    retryable = True

    def __init__(self, topic: str, found: str, expected: str, action: str) -> None:
        self.topic = topic
        super().__init__(f"Ledger topic `{topic}`: {found}", expected=expected, action=action)


# --- records and sinks --------------------------------------------------------------------------------------------------


class BadRecords(KafkaSparkError):
    """Records that could not be decoded. Nothing of the window was written or committed."""

    def __init__(self, window: str, count: int, samples: Sequence[object]) -> None:
        self.window, self.count, self.samples = window, count, tuple(samples)
        listed = "\n".join(f"  {s}" for s in self.samples)
        more = f"\n  ... and {count - len(self.samples)} more" if count > len(self.samples) else ""
        super().__init__(
            f"Window {window} holds {count} bad record{'s' if count != 1 else ''}; nothing of it was written or committed\n"
            f"{listed}{more}\n",
            action="Correct the schema, or the producer, and run the task again: it reads the same window",
        )


class CountMismatch(KafkaSparkError):
    """Reader and sink disagree about how many rows there are. Nothing was committed."""

    def __init__(self, window: str, read: int, flushed: int) -> None:
        self.window, self.read, self.flushed = window, read, flushed
        super().__init__(
            f"Window {window}: the sink counted {flushed} rows",
            expected=f"the {read} rows that were read for it",
            action="Nothing was committed. Run the task again; if it stays, please report it with the task's log",
        )


class WindowConflict(KafkaSparkError):
    """The sink remembers another last window than the one this window follows."""

    def __init__(self, window: str, found: str, expected: str) -> None:
        self.window = window
        super().__init__(
            f"The sink refuses window {window}: {found}",
            expected=expected,
            action="Another pipeline of the same name writes to this sink, or ledger or sink were restored from a backup: "
            "give this pipeline a name of its own with `pipeline=`",
        )


class SinkUnavailable(KafkaSparkError):
    """The sink did not answer, or refused."""

    retryable = True

    def __init__(self, sink: str, doing: str, detail: str) -> None:
        self.sink, self.doing = sink, doing
        super().__init__(
            f"Sink {sink} failed while {doing}: {detail}", action="The task may simply be retried: the window is unchanged"
        )


class SinkRejected(KafkaSparkError):
    """The sink answered, and the answer is no: a value that does not fit, a constraint, a missing right. Nothing was committed.

    :param sink: the sink's URI or table.
    :param window: the window.
    :param detail: what the sink says.
    :param samples: the first few of the records it concerns, where they are known.
    """

    def __init__(self, sink: str, window: str, detail: str, action: str = "", samples: Sequence[object] = ()) -> None:
        self.sink, self.window, self.detail, self.samples = sink, window, detail, tuple(samples)
        listed = "".join(f"\n  {s}" for s in self.samples)
        super().__init__(
            f"Sink {sink} refuses window {window}: {detail}{listed}" + ("\n" if listed else ""),
            action=action or "Correct the target, or what the records hold, and run the task again: it moves the same window",
        )


class SparkJobFailed(KafkaSparkError):
    """The Spark job that moves a window failed; nothing was committed."""

    retryable = True

    def __init__(self, window: str, detail: str) -> None:
        self.window = window
        super().__init__(
            f"The Spark job of window {window} failed: {detail}", action="Nothing was committed; the task may be retried"
        )


# --- embedded servers -----------------------------------------------------------------------------------------------


class TestingUnavailable(KafkaSparkError):
    """A package that an embedded server needs is not installed."""

    __test__ = False

    def __init__(self, server: str, package: str) -> None:
        self.server = server
        self.package = package
        super().__init__(
            f"The embedded {server} needs the package `{package}`, which is not installed",
            action="Install it with `pip install 'airflow-provider-kafka-spark[testing]'`",
        )


class ServerInvalid(KafkaSparkError):
    """What was asked of an embedded server is impossible."""

    def __init__(self, server: str, detail: str, expected: str = "") -> None:
        self.server = server
        super().__init__(f"The embedded {server} cannot do this: {detail}", expected=expected)


# --- formats ------------------------------------------------------------------------------------------------------------


class SchemaInvalid(KafkaSparkError):
    """A format's schema cannot be read.

    :param schema: the schema's text.
    :param position: where in it, in characters from 0.
    :param found: what was found there.
    """

    def __init__(self, schema: str, position: int, found: str, expected: str) -> None:
        self.schema = schema
        self.position = position
        before = schema[max(0, position - 30) : position]
        where = f"at character {position + 1}, after `{before}`" if before else "at its beginning"
        super().__init__(
            f"The schema has {found} {where}", expected=expected, action="Correct it; the types are those of Spark's DDL"
        )


# --- sources of rows --------------------------------------------------------------------------------------------------


class SourceUnavailable(KafkaSparkError):
    """The source did not answer, or refused."""

    retryable = True

    def __init__(self, source: str, doing: str, detail: str) -> None:
        self.source, self.doing = source, doing
        super().__init__(
            f"Source {source} failed while {doing}: {detail}", action="The task may simply be retried: the window is unchanged"
        )


class SourceRejected(KafkaSparkError):
    """The source is not what the options say, or no longer what the window was frozen from.

    :param source: its URI, table or path.
    :param detail: what was found.
    """

    def __init__(self, source: str, detail: str, action: str = "") -> None:
        self.source, self.detail = source, detail
        super().__init__(f"Source {source}: {detail}", action=action)


class RowRejected(KafkaSparkError):
    """A row of a source cannot become a record. Nothing of its split was committed.

    :param row: which one, within its split.
    :param detail: what is wrong with it.
    """

    def __init__(self, row: str, detail: str, action: str = "") -> None:
        self.row, self.detail = row, detail
        super().__init__(f"{row[:1].upper()}{row[1:]} of the split cannot become a record: {detail}", action=action)


class TransactionTimedOut(KafkaSparkError):
    """A split took longer than its transaction may take, so the brokers have aborted that. Nothing of the split was committed."""

    retryable = True

    def __init__(self, pipeline: str, doing: str, seconds: float, limit: float) -> None:
        self.pipeline, self.seconds, self.limit = pipeline, seconds, limit
        super().__init__(
            f"Pipeline `{pipeline}`: the brokers aborted the transaction, because {doing} took {seconds:.0f} s",
            expected=f"at most {limit:g} s, which is `transaction_timeout`",
            action="Raise `transaction_timeout` (the brokers allow `transaction.max.timeout.ms`) or make splits smaller. Nothing "
            "of the split was published, the task may be retried",
        )


class RowsCutOff(KafkaSparkError):
    """Spark has stopped handing rows to a task before the end of its split. Nothing of the split is committed.

    :param known: False where it could not be found out, as with a release of pyspark that was never tested.
    """

    retryable = True

    def __init__(self, known: bool = True) -> None:
        self.known = known
        found = (
            "Spark stopped in the middle of a split" if known else "It cannot be told whether Spark gave a task all of its rows"
        )
        action = "See Spark's own error" if known else "Use a release of pyspark that this package is tested with"
        super().__init__(found, expected="all rows of the split", action=action)


class PartitionsChanged(PlanError):
    """A topic has another number of partitions than when the window was planned: keys would be placed elsewhere."""

    def __init__(self, topic: str, planned: int, found: int) -> None:
        self.topic, self.planned, self.partitions = topic, planned, found
        super().__init__(
            f"Topic `{topic}` has {found} partitions",
            expected=f"{planned}, as when the window was planned",
            action="Set `allow_new_partitions=True` to go on: keys may then be in other partitions than their earlier records",
        )


# --- windows that belong to a data interval ---------------------------------------------------------------------------


class IntervalOverlaps(PlanError):
    """Two intervals of one pipeline share instants: their records would be moved twice."""

    def __init__(self, pipeline: str, interval: object, other: object) -> None:
        self.pipeline, self.interval, self.other = pipeline, interval, other
        super().__init__(
            f"Interval {interval} of pipeline `{pipeline}` overlaps {other}, which has been planned already",
            expected="intervals that follow each other",
            action="After a change of schedule give the operator a new `pipeline=` name, and begin where the old one ends",
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


# --- windows that follow another pipeline's ---------------------------------------------------------------------------


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


# --- where windows begin and stop, and offset control -------------------------------------------------------------------


class BoundRefused(PlanError):
    """Offsets to begin or to stop at that do not fit the topics."""


class ResetRefused(KafkaSparkError):
    """A pipeline's offsets cannot be changed as asked; nothing was changed."""


class PipelineUnknown(ResetRefused):
    """The ledger holds nothing of a pipeline of this name."""

    def __init__(self, pipeline: str, ledger_topic: str) -> None:
        self.pipeline, self.ledger_topic = pipeline, ledger_topic
        super().__init__(
            f"Ledger topic `{ledger_topic}` holds nothing of a pipeline `{pipeline}`",
            expected="the name of a pipeline that has run, by default `<dag_id>.<task_id>`",
            action="Correct the name, or the ledger topic. Where a new pipeline begins is said by its `starting_offsets`",
        )


class WindowOpen(ResetRefused):
    """A window of the pipeline is planned and not complete: somebody may be working on it.

    :param run: the run that planned it.
    """

    def __init__(self, window: str, run: str, planned_at: str) -> None:
        self.window, self.run, self.planned_at = window, run, planned_at
        super().__init__(
            f"Window {window} is open: run `{run}` planned it at {planned_at}, and it is not complete",
            expected="a pipeline that has no open window",
            action="Run the task again, which finishes the window, and then repeat this. Or give it up with `discard_open`: if "
            "its sink has taken it already, its records stay there",
        )


# --- sensors ----------------------------------------------------------------------------------------------------------


class ConsumerUnwell(KafkaSparkError):
    """A consumer that is waited for has a status that the user does not want to wait through.

    :param status: as ``STOP``.
    """

    def __init__(self, consumer: str, status: str, reason: str, lag: str) -> None:
        self.consumer, self.status, self.reason = consumer, status, reason
        super().__init__(
            f"{consumer[:1].upper()}{consumer[1:]} has the status {status}: {reason}. {lag[:1].upper()}{lag[1:]}",
            expected="a consumer that works the backlog off",
            action="See why it does not, or take the status out of `fail_on`",
        )
