"""Records and sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from airflow_kafka_spark.errors.base import KafkaSparkError


class BadRecords(KafkaSparkError):
    """Records that could not be decoded. Nothing of the window was written or committed.

    :param by_split: whether splits are committed one by one: then that goes for those that hold one.
    """

    def __init__(self, window: str, count: int, samples: Sequence[object], by_split: bool = False) -> None:
        self.window, self.count, self.samples = window, count, tuple(samples)
        listed = "\n".join(f"  {s}" for s in self.samples)
        more = f"\n  ... and {count - len(self.samples)} more" if count > len(self.samples) else ""
        super().__init__(
            f"Window {window} holds {count} bad record{'s' if count != 1 else ''}; {_nothing(by_split)}\n{listed}{more}\n",
            action="Correct the schema, or the producer, and run the task again: it reads the same window",
        )


class TooManyBadRecords(KafkaSparkError):
    """More bad records than ``max_errors`` allows. Nothing of the window was written or committed, and no dead letter sent.

    :param by_split: as for :class:`BadRecords`.
    """

    def __init__(
        self, window: str, count: int, records: int, limit: float, samples: Sequence[object], by_split: bool = False
    ) -> None:
        self.window, self.count, self.records, self.limit, self.samples = window, count, records, limit, tuple(samples)
        listed = "".join(f"\n  {s}" for s in self.samples)
        allowed = f"{limit!r} of them" if isinstance(limit, float) else f"{limit:,}"
        super().__init__(
            f"{count:,} of the {records:,} records of window {window} are bad; {_nothing(by_split)}{listed}\n",
            expected=f"at most {allowed} (`max_errors`)",
            action="Correct the format, or the producer, or allow more, and run the task again: it reads the same window",
        )


def _nothing(by_split: bool) -> str:
    return f"nothing of {'a split that holds one' if by_split else 'it'} was written or committed"


class TooManyDeadLetters(KafkaSparkError):
    """The dead letters of one window are more than can be handled at once. Nothing was sent or committed.

    :param limit: in bytes.
    :param remembered: whether it is the ledger's memory of them that is too large.
    """

    def __init__(self, topic: str, limit: int, *, remembered: bool = False) -> None:
        self.topic, self.limit, self.remembered = topic, limit, remembered
        what = "The ledger's memory of a window's" if remembered else "A window's"
        super().__init__(
            f"{what} dead letters{f' (topic `{topic}`)' if topic else ''} take more than {limit / 1e6:.1f} MB",
            expected="a few bad records among many good ones",
            action="If so many records are bad the format is not theirs: correct it. Else read less at once: lower "
            "`max_records`, and set `max_errors`",
        )


class TooManyRouted(KafkaSparkError):
    """The records of one window that transforms route elsewhere are more than can be handled at once. Nothing was sent or
    committed.

    :param limit: in bytes.
    :param remembered: whether it is the ledger's memory of them that is too large.
    """

    def __init__(self, topic: str, limit: int, *, remembered: bool = False) -> None:
        self.topic, self.limit, self.remembered = topic, limit, remembered
        what = "What the ledger remembers of the records" if remembered else "What is in the records"
        super().__init__(
            f"{what} of one window that go to topic `{topic}` instead of the sink takes more than {limit / 1e6:.1f} MB",
            expected="a few records among many that go to the sink",
            action="Read less at once: lower `max_records`. For a large share move them with a pipeline of their own, "
            "KafkaToKafkaOperator with the same condition, and leave `to` out here",
        )


class CountMismatch(KafkaSparkError):
    """Reader and sink disagree about how many rows there are. Nothing was committed.

    :param by_split: whether splits are committed one by one: then they disagree also where a split that an earlier attempt has
        committed would have other rows now.
    """

    def __init__(self, window: str, read: int, flushed: int, by_split: bool = False) -> None:
        self.window, self.read, self.flushed = window, read, flushed
        changed = (
            "Splits that an earlier attempt has committed stay as they are: if the format, a transform or another option was "
            "changed since, set it back until this window is complete; if their topic is compacted, give the connection's user "
            "DESCRIBE_CONFIGS on it. Else run the task again"
        )
        super().__init__(
            f"Window {window}: the sink counted {flushed} rows",
            expected=f"the {read} rows that were read for it",
            action=f"{changed if by_split else 'Nothing was committed. Run the task again'}; if it stays, please report it with "
            "the task's log",
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


class ForeignOffsets(WindowConflict):
    """The sink's record of a pipeline holds offsets of another Kafka cluster, or of a topic that was deleted and created again:
    they do not say which records of this one the sink has. Nothing was changed.

    :param pipeline: the pipeline's name, as the sink knows it.
    :param number: the number of the window that the sink's record is of.
    :param known_cluster: the id of the cluster in the sink's record; "" where it does not say.
    :param found_cluster: the id of the cluster that the connection leads to.
    :param topics: per topic whose id is another one, the id in the sink's record and the one found.
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
        named = " ".join(sorted(topics)) or "<topics>"
        KafkaSparkError.__init__(
            self,
            f"The sink's record of window {self.window} holds offsets of {', '.join(known)}; {', '.join(found)}",
            expected="offsets of the cluster and the topics that are read, since they tell which records the sink has",
            action="Correct the connection if it leads to the wrong cluster. Where Kafka or the topic was created anew, records "
            "that were not read before are lost; to go on with the new one, say where: `python -m airflow_kafka_spark reset "
            f"{pipeline} --to earliest --only {named} --group-id <group> --why <why>`. `forget` decides nothing here: the sink "
            "goes on remembering. A pipeline of data intervals, or a second one on another cluster, needs a `pipeline=` name of "
            "its own",
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
