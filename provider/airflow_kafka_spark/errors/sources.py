"""Errors of sources of rows and of publishing rows to Kafka, of formats and of the schema registry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from airflow_kafka_spark.errors.base import RETRY, SMALLER_WINDOW, KafkaSparkError
from airflow_kafka_spark.errors.planning import PlanError


class SourceUnavailable(KafkaSparkError):
    """Raised when the source did not answer, or refused the connection.

    :param source: URI, table or path of the source.
    :param doing: what was requested.
    :param detail: the client's message.
    """

    retryable = True

    def __init__(self, source: str, doing: str, detail: str) -> None:
        self.source, self.doing, self.detail = source, doing, detail
        super().__init__(f"Source {source} failed while {doing}: {detail}", action=RETRY)


class SourceRejected(KafkaSparkError):
    """Raised when the source does not fit the options, or no longer fits the window that was planned from it.

    :param source: URI, table or path of the source.
    :param detail: what was found.
    """

    def __init__(self, source: str, detail: str, action: str = "") -> None:
        self.source, self.detail = source, detail
        super().__init__(f"Source {source}: {detail}", action=action)


class SparkReadRequired(SourceRejected):
    """Raised with ``read_with="task"`` when a task cannot read rows of a source as Spark does. With ``"auto"`` Spark reads the
    window then. Nothing of the task's split was committed.

    :param source: URI of the source.
    :param detail: what was found.
    """

    def __init__(self, source: str, detail: str) -> None:
        super().__init__(source, f"only Spark reads this as it was written: {detail}", 'Use `read_with="auto"`')


class LogLost(SourceRejected):
    """Raised when a database no longer has the log after the last window, so that changes may be missing."""


class LogBehind(KafkaSparkError):
    """Raised by a sensor when too much of a database's log lies after the last window of a pipeline.

    :param pipeline: the pipeline.
    :param behind: bytes of the log after its last complete window.
    :param most: the bytes from which on the sensor fails.
    """

    def __init__(self, pipeline: str, behind: int, most: int) -> None:
        self.pipeline, self.behind, self.most = pipeline, behind, most
        found = f"{behind:,} bytes of the log lie after the last window of pipeline `{pipeline}`; expected at most {most:,}"
        super().__init__(
            found, action="Let the pipeline run, or run more often: the database keeps its log for it, or removes it"
        )


class RowRejected(KafkaSparkError):
    """Raised when a row of a source cannot be converted to a record. Nothing of its split was committed.

    :param row: the row within its split, in words.
    :param detail: the reason.
    """

    def __init__(self, row: str, detail: str, action: str = "") -> None:
        self.row, self.detail = row, detail
        super().__init__(f"{row[:1].upper()}{row[1:]} of the split cannot become a record: {detail}", action=action)


class SqlFailed(KafkaSparkError):
    """Raised when an SQL expression fails for a record. Nothing of its split was committed.

    :param record: the first such record, as ``topic-partition@offset``.
    :param detail: the name of Spark's error, and its reason.
    """

    def __init__(self, record: str, detail: str) -> None:
        self.record, self.detail = record, detail
        super().__init__(
            f"SQL fails for record {record}: {detail}",
            action="Correct the expression and retry. `try_cast`, `try_add` and `try_divide` give null in place of an error, and "
            "a Filter before the expression leaves such records out",
        )


class RowsRejected(RowRejected):
    """Raised when rows of a source do not fit the format. Nothing of their splits was committed.

    :param window: name of the window.
    :param count: number of such rows.
    :param samples: descriptions of the first such rows.
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
            action="Correct the rows, or the schema, and run the task again: it continues with the other splits. A row that "
            'does not fit is never written as something else; `errors_tolerance="all"` leaves such rows out',
        )


class TransactionTimedOut(KafkaSparkError):
    """Raised when the brokers aborted the transaction of a split because it took too long. Nothing of the split was committed.

    :param pipeline: name of the pipeline.
    :param doing: the step that took too long.
    :param seconds: the time that it took, in seconds.
    :param limit: the maximum duration of a transaction, in seconds.
    """

    retryable = True

    def __init__(self, pipeline: str, doing: str, seconds: float, limit: float) -> None:
        self.pipeline, self.doing, self.seconds, self.limit = pipeline, doing, seconds, limit
        super().__init__(
            f"Pipeline `{pipeline}`: the brokers aborted the transaction, because {doing} took {seconds:.0f} s",
            expected=f"at most {limit:g} s, which is `transaction_timeout`",
            action="Raise `transaction_timeout`, and the brokers' `transaction.max.timeout.ms` if that is shorter. Nothing of "
            "the split was published, the task may be retried. Smaller splits (`split_records`, `max_records`) help later "
            f"windows. {SMALLER_WINDOW}; a window of rows keeps its splits",
        )


class RowsCutOff(KafkaSparkError):
    """Raised when Spark stopped passing rows to a task before the end of its split. Nothing of the split was committed.

    :param known: False if that could not be determined, as with a release of pyspark that was not tested.
    """

    retryable = True

    def __init__(self, known: bool = True) -> None:
        self.known = known
        found = (
            "Spark stopped in the middle of a split"
            if known
            else "It cannot be determined whether Spark gave a task all of its rows"
        )
        own = "See Spark's own error. A function among the transforms must not leave rows out: Filter and Sql may"
        action = own if known else "Use a release of pyspark that this package is tested with"
        super().__init__(found, expected="all rows of the split", action=action)


class PartitionsChanged(PlanError):
    """Raised when a topic has another number of partitions than when the window was planned.

    Keys would go to other partitions than their earlier records.

    :param topic: the topic.
    :param planned: number of partitions when the window was planned.
    :param found: number of partitions now.
    """

    def __init__(self, topic: str, planned: int, found: int) -> None:
        self.topic, self.planned, self.partitions = topic, planned, found
        super().__init__(
            f"Topic `{topic}` has {found} partitions",
            expected=f"{planned}, as when the window was planned",
            action="Set `allow_new_partitions=True` on the sink to continue: keys may then move to other partitions than before",
        )


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
            action="Check that it runs and that the address is right, and then run the task again",
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
