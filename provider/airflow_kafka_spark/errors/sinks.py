"""Errors of records and of sinks."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping, Sequence

from airflow_kafka_spark.errors.base import RETRY, SMALLER_WINDOW, KafkaSparkError, format_command

SHOWN_DIFFERENCES = 10
"""Differences in the message of :class:`SinkDiffers`."""


class BadRecords(KafkaSparkError):
    """Raised when records cannot be decoded, transformed or written. Nothing of the window was written or committed.

    :param window: name of the window.
    :param count: number of bad records.
    :param samples: descriptions of the first bad records.
    :param by_split: True if splits are committed one by one. Then only splits with a bad record were not written.
    """

    def __init__(self, window: str, count: int, samples: Sequence[object], by_split: bool = False) -> None:
        self.window, self.count, self.samples, self.by_split = window, count, tuple(samples), by_split
        listed = "\n".join(f"  {s}" for s in self.samples)
        more = f"\n  ... and {count - len(self.samples)} more" if count > len(self.samples) else ""
        super().__init__(
            f"Window {window} holds {count} bad record{'s' if count != 1 else ''}; "
            f"{_describe_nothing(by_split)}\n{listed}{more}\n",
            action=(
                "Correct the schema, or send such records to a dead letter topic (`errors_tolerance`), and run the task again: "
                "it reads the same window"
            ),
        )


class TooManyBadRecords(KafkaSparkError):
    """Raised when a window has more bad records than ``max_errors`` allows. Nothing was written, committed or sent.

    :param window: name of the window.
    :param count: number of bad records.
    :param records: number of records.
    :param limit: largest number of bad records, or their largest fraction.
    :param samples: descriptions of the first bad records.
    :param by_split: True if splits are committed one by one. Then only splits with a bad record were not written.
    """

    def __init__(
        self, window: str, count: int, records: int, limit: float, samples: Sequence[object], by_split: bool = False
    ) -> None:
        self.window, self.count, self.records, self.limit, self.samples = window, count, records, limit, tuple(samples)
        self.by_split = by_split
        listed = "".join(f"\n  {s}" for s in self.samples)
        allowed = f"{limit!r} of them" if isinstance(limit, float) else f"{limit:,}"
        super().__init__(
            f"{count:,} of the {records:,} records of window {window} are bad; {_describe_nothing(by_split)}{listed}\n",
            expected=f"at most {allowed} (`max_errors`)",
            action="Correct the format, or the producer, or allow more, and run the task again: it reads the same window",
        )


def _describe_nothing(by_split: bool) -> str:
    return f"nothing of {'a split that holds one' if by_split else 'it'} was written or committed"


class TooManyOutOfInterval(KafkaSparkError):
    """Raised when a window has more records with timestamps outside of its data interval than ``max_out_of_interval`` allows.
    Nothing was written, committed or sent.

    :param window: name of the window.
    :param count: number of such records.
    :param records: number of records.
    :param limit: largest number of such records.
    :param seconds: the largest distance of a timestamp from the interval.
    """

    def __init__(self, window: str, count: int, records: int, limit: int, seconds: float) -> None:
        self.window, self.count, self.records, self.limit, self.seconds = window, count, records, limit, seconds
        super().__init__(
            f"{count:,} of the {records:,} records of window {window} have timestamps outside of its data interval, by up to "
            f"{seconds:,.3f} s; nothing of it was written or committed",
            expected=f"at most {limit:,} (`max_out_of_interval`)",
            action="They are late, or their producer's clock is wrong; allow more, and run the task again: it reads the same "
            "window. Topics with `message.timestamp.type=LogAppendTime` have no such records",
        )


class TooManyDeadLetters(KafkaSparkError):
    """Raised when the dead letters of one window exceed the size that can be sent at once. Nothing was sent or committed.

    :param topic: the dead letter topic; empty without one.
    :param limit: the limit in bytes.
    :param remembered: True if the ledger's record of them is too large; False if the dead letters are.
    """

    def __init__(self, topic: str, limit: int, *, remembered: bool = False) -> None:
        self.topic, self.limit, self.remembered = topic, limit, remembered
        what = "The ledger's record of a window's" if remembered else "A window's"
        super().__init__(
            f"{what} dead letters{f' (topic `{topic}`)' if topic else ''} take more than {limit / 1e6:.1f} MB",
            expected="a few bad records among many good ones",
            action="If so many records are bad, the format does not fit them: correct it. Otherwise read less at once: lower "
            f"`max_records`, and set `max_errors`. {SMALLER_WINDOW}",
        )


class TooManyRouted(KafkaSparkError):
    """Raised when the routed records of one window exceed the size that can be sent at once. Nothing was sent or committed.

    :param topic: the topic to which transforms route the records.
    :param limit: the limit in bytes.
    :param remembered: True if the ledger's record of them is too large; False if the routed records are.
    """

    def __init__(self, topic: str, limit: int, *, remembered: bool = False) -> None:
        self.topic, self.limit, self.remembered = topic, limit, remembered
        what = "The ledger's account of the records" if remembered else "The content of the records"
        super().__init__(
            f"{what} of one window that go to topic `{topic}` instead of the sink takes more than {limit / 1e6:.1f} MB",
            expected="a few records among many that go to the sink",
            action="Read less at once: lower `max_records`. For a large share move them with a pipeline of their own, "
            f"KafkaToKafkaOperator with the same condition, and leave `to` out here. {SMALLER_WINDOW}",
        )


class CountMismatch(KafkaSparkError):
    """Raised when the sink counted another number of rows than were read. Nothing was committed.

    :param window: name of the window.
    :param read: number of rows that were read for the sink.
    :param flushed: number of rows that the sink counted.
    :param by_split: True if splits are committed one by one. Then a split that an earlier attempt committed may differ, too.
    """

    def __init__(self, window: str, read: int, flushed: int, by_split: bool = False) -> None:
        self.window, self.read, self.flushed, self.by_split = window, read, flushed, by_split
        changed = (
            "Splits that an earlier attempt has committed stay as they are: if the format, a transform or another option was "
            "changed since, set it back until this window is complete; if their topic is compacted, give the connection's user "
            "DESCRIBE_CONFIGS on it. Otherwise run the task again"
        )
        super().__init__(
            f"Window {window}: the sink counted {flushed} rows",
            expected=f"the {read} rows that were read for it",
            action=f"{changed if by_split else 'Nothing was committed. Run the task again'}; if it stays, please report it with "
            "the task's log",
        )


class WindowConflict(KafkaSparkError):
    """Raised when the last window in the sink's record is not the one that this window follows.

    :param window: name of the window.
    :param command: the command that moves the records again that the sink has lost; "" (default) if it may have lost none.
    """

    def __init__(self, window: str, found: str, expected: str, command: str = "") -> None:
        self.window = window
        action = (
            "Another pipeline of the same name writes to this sink, or ledger or sink were restored from a backup: "
            "give this pipeline another name with `pipeline=`"
        )
        if command:
            action = (
                f"If the sink was restored from a backup, move the records again that it has lost: `{command}`. If another "
                "pipeline of this name writes to it, give this one a name of its own with `pipeline=`"
            )
        super().__init__(f"The sink refuses window {window}: {found}", expected=expected, action=action)


class SinkRecordMissing(WindowConflict):
    """Raised when the sink has no record of a pipeline that has committed windows to this destination.

    The sink was emptied or restored, or another store has its address: a mount that is missing, the disk of another worker. The
    window would be there without the windows before it. It was not committed.

    :param pipeline: name of the pipeline.
    :param number: number of the window, or name of the data interval.
    :param after: number of the window, or name of the data interval, that was committed to this destination.
    :param place: name of the sink's record.
    """

    def __init__(self, pipeline: str, number: int | str, after: int | str, place: str) -> None:
        of_interval = isinstance(number, str)
        self.window, self.pipeline, self.number, self.after = f"{pipeline}#{number}", pipeline, number, after
        self.place = place
        kind = "data interval" if of_interval else "window"
        expected = f"the record of window {after} or of a later one before window {number}"
        again = "clear their tasks" if of_interval else "`reset --to earliest --discard-open` instead"
        rebind = format_command("rebind", pipeline, "--not-running", "--why", "...")
        KafkaSparkError.__init__(
            self,
            f"{place} has no record of pipeline `{pipeline}`, whose {kind} {after} was committed there",
            expected=f"its record before data interval {number}" if of_interval else expected,
            action="Check the destination: whether the directory is mounted on this worker, and the database is not "
            f"another one or an older backup; then run the task again. If its record was removed on purpose: {rebind}, and run "
            f"the task again. To move all records again, {again}",
        )


class RecordElsewhere(WindowConflict):
    """Raised when the ledger does not know a pipeline, and the sink's record of it belongs to another table.

    Tables of one schema have one record of windows. Nothing was changed.

    :param pipeline: name of the pipeline in the sink.
    :param number: number of the window in the sink's record.
    :param elsewhere: the table that has its rows.
    """

    def __init__(self, pipeline: str, number: int, elsewhere: str) -> None:
        self.window, self.pipeline, self.number, self.elsewhere = f"{pipeline}#{number}", pipeline, number, elsewhere
        KafkaSparkError.__init__(
            self,
            f"The ledger does not know window {self.window}, and the sink's record of it belongs to table {elsewhere}",
            expected="a record of the table that is written now, because it shows the records in this table",
            action="To continue there, name that table again; a `rebind` may change it afterwards. To fill this table, give the "
            "operator a new `pipeline=` name and `group_id`, or the sink a `windows_table` of its own",
        )


class ForeignOffsets(WindowConflict):
    """Raised when the sink's record of a pipeline has offsets of another cluster, or of a topic that was created again.

    Such offsets do not show which records the sink has. Nothing was changed.

    :param pipeline: name of the pipeline in the sink.
    :param number: number of the window in the sink's record.
    :param known_cluster: id of the cluster in the sink's record; "" if it has none.
    :param found_cluster: id of the cluster of the connection.
    :param topics: for each topic with another id, the id in the sink's record and the id found.
    """

    def __init__(
        self, pipeline: str, number: int, known_cluster: str, found_cluster: str, topics: Mapping[str, tuple[str, str]]
    ) -> None:
        self.window, self.pipeline, self.number = f"{pipeline}#{number}", pipeline, number
        self.known_cluster, self.found_cluster, self.topics = known_cluster, found_cluster, dict(topics)
        known = [f"topic `{topic}` with id {ids[0]}" for topic, ids in sorted(topics.items())]
        found = [f"topic `{topic}` has id {ids[1]}" for topic, ids in sorted(topics.items())]
        if known_cluster and found_cluster and known_cluster != found_cluster:
            known.insert(0, f"Kafka cluster {known_cluster}")
            found.insert(0, f"the connection leads to Kafka cluster {found_cluster}")
        only = sorted(topics) or ["<topics>"]
        reset = format_command("reset", pipeline, "--to", "earliest", "--only", *only, "--group-id", "<group>", "--why", "<why>")
        KafkaSparkError.__init__(
            self,
            f"The sink's record of window {self.window} holds offsets of {', '.join(known)}; {', '.join(found)}",
            expected="offsets of the cluster and the topics that are read, because they show the records in the sink",
            action="Correct the connection if it leads to the wrong cluster. Where Kafka or the topic was created again, records "
            "that were not read before are lost; to continue with the new one, name the position: "
            f"{reset}. `forget` does not help: the sink "
            "keeps its record. A pipeline of data intervals, or a second one on another cluster, needs a `pipeline=` name of "
            "its own",
        )


AFTER_REMEDY = "then run the task again: the window is unchanged"
"""Text after the remedy of a :class:`SinkUnavailable` for which a retry alone does not help."""
_PERMISSION = "Correct the credentials, or give the user of the worker or of the connection the right to do that"
_REFUSED_BY_S3 = re.compile(r"AWS Error (ACCESS_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|UNRECOGNIZED_CLIENT)")
"""Arrow's client of S3 has one class for all errors."""
_REMEDIES = {
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: "The file system is read-only: mount it for writing, or name another directory",
    errno.ENOSPC: "Make room on the file system",
    errno.EDQUOT: "Raise the user's quota, or make room",
}


class SinkUnavailable(KafkaSparkError):
    """Raised when the sink did not answer, or refused the connection, or cannot be written to.

    A retry alone does not help if the user lacks a right, or if a disk is read-only or full: ``retryable`` is then False.

    :param sink: URI or table of the sink.
    :param doing: what was requested.
    :param detail: the client's message, or the error of a file system or an object store.
    :param remedy: the action before a retry; default: that for an error of a file system or an object store, else none.
    """

    retryable = True

    def __init__(self, sink: str, doing: str, detail: str | OSError, remedy: str | None = None) -> None:
        self.sink, self.doing, self.detail = sink, doing, str(detail)
        refused = isinstance(detail, PermissionError) or _REFUSED_BY_S3.search(self.detail)
        remedy = remedy or (_PERMISSION if refused else _REMEDIES.get(getattr(detail, "errno", None) or 0))
        self.retryable = remedy is None
        action = RETRY if remedy is None else f"{remedy}; {AFTER_REMEDY}"
        super().__init__(f"Sink {sink} failed while {doing}: {detail}", action=action)


class SinkRejected(KafkaSparkError):
    """Raised when the sink refuses a window: a value that does not fit, a constraint, or a permission. Nothing was committed.

    :param sink: URI or table of the sink.
    :param window: name of the window.
    :param detail: the sink's message.
    :param samples: descriptions of the first records concerned, if they are known.
    """

    def __init__(self, sink: str, window: str, detail: str, action: str = "", samples: Sequence[object] = ()) -> None:
        self.sink, self.window, self.detail, self.samples = sink, window, detail, tuple(samples)
        listed = "".join(f"\n  {s}" for s in self.samples)
        super().__init__(
            f"Sink {sink} refuses window {window}: {detail}{listed}" + ("\n" if listed else ""),
            action=action or "Correct the target, or the records, and run the task again: it moves the same window",
        )


class SparkJobFailed(KafkaSparkError):
    """Raised when the Spark job of a window failed.

    :param window: name of the window.
    :param detail: Spark's message.
    :param by_split: True if splits are committed one by one, so that some of them may be committed; False (default): nothing is.
    :param retryable: False if a task has raised an error that a retry alone does not end, as a value that the sink refuses;
        default True.
    :param cancelled: True if the job was cancelled because Airflow ended the task; default False.
    """

    retryable = True

    def __init__(
        self, window: str, detail: str, by_split: bool = False, *, retryable: bool = True, cancelled: bool = False
    ) -> None:
        self.window, self.detail, self.by_split, self.retryable = window, detail, by_split, retryable
        self.cancelled = cancelled
        committed = "Splits that are committed stay" if by_split else "Nothing was committed"
        retry = "The task may be retried" if retryable else "Correct the cause first: a retry alone fails again"
        super().__init__(f"The Spark job of window {window} failed: {detail}", action=f"{committed}. {retry}")


class SinkDiffers(KafkaSparkError):
    """Raised when the rows of a sink differ from those of its source.

    :param sink: URI of the sink.
    :param source: URI of the source.
    :param summary: the number of rows that differ, by kind of difference.
    :param differences: the first of them, with their keys.
    """

    def __init__(self, sink: str, source: str, summary: str, differences: Sequence[object]) -> None:
        self.sink, self.source, self.summary, self.differences = sink, source, summary, tuple(differences)
        listed = "".join(f"\n  {difference}" for difference in self.differences[:SHOWN_DIFFERENCES])
        more = len(self.differences) - SHOWN_DIFFERENCES
        listed += f"\n  ... and {more} more in the XCom `verification`" if more > 0 else ""
        super().__init__(
            f"The rows of {sink} differ from those of {source}: {summary}{listed}" + ("\n" if listed else ""),
            expected="equal rows",
            action="Let the pipeline move the rest, or compare only rows that no longer change (`where`). If rows still differ, "
            "replay the windows that had them; where a sink refuses that (docs/intervals.md) and upserts, move the pipeline back "
            "with `airflow kafka-spark reset`; or correct the table",
        )
