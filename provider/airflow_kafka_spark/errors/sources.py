"""Sources of rows, and their way to Kafka."""

from __future__ import annotations

from collections.abc import Sequence

from airflow_kafka_spark.errors.base import KafkaSparkError
from airflow_kafka_spark.errors.planning import PlanError


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


class RowsRejected(RowRejected):
    """Rows of a source do not fit the format that they were to be written in. Nothing of their splits was committed.

    :param window: the window.
    :param count: how many there are.
    :param samples: the first of them.
    """

    def __init__(self, window: str, count: int, samples: Sequence[object]) -> None:
        self.window, self.count, self.samples = window, count, tuple(samples)
        self.row, _, self.detail = str(self.samples[0]).partition(": ")
        listed = "\n".join(f"  {s}" for s in self.samples)
        more = f"\n  ... and {count - len(self.samples):,} more" if count > len(self.samples) else ""
        one = f"A row of window {window} cannot become a record"
        rows = f"{count:,} rows of window {window} cannot become records" if count != 1 else one
        KafkaSparkError.__init__(
            self,
            f"{rows}; nothing of a split that holds one was published\n{listed}{more}",
            action="Correct the rows, or the schema, and run the task again: it goes on with what is not published. What does "
            'not fit is never written as something else; `errors_tolerance="all"` does without it',
        )


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
            action="Set `allow_new_partitions=True` on the sink to go on: keys may then move to other partitions than before",
        )


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
