"""Bad records: Connect's ``errors.tolerance`` and dead letter queue (KIP-298) as options of an operator."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, ClassVar, Literal

from airflow_kafka_spark.arguments import find_choice_problems
from airflow_kafka_spark.errors import (
    KafkaRefused,
    KafkaSparkError,
    Problem,
    TooManyBadRecords,
    Unchecked,
    ValidationError,
)
from airflow_kafka_spark.windows.model import TOPIC_NAME, SplitResult, TopicPartition, Window, select_first_bad_records

if TYPE_CHECKING:
    from airflow_kafka_spark.bad_records.dead_letters import DeadLetterTopic
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.windows.dead_letters import DeadLetters

log = logging.getLogger(__name__)

SHOWN = 5
"""Maximum number of bad records that a log line or an error shows."""


@dataclass(frozen=True)
class ErrorOptions:
    """Handling of bad records by an operator.

    :param tolerance: ``none`` (default): a bad record fails the window, and nothing of it is committed; ``all``: the other
        records are committed.
    :param topic: with ``all``, the topic that bad records go to (``errors_deadletterqueue_topic_name``); default None.
    :param replication_factor: number of replicas of the topic if it is created; default -1, the brokers' default.
    :param context_headers: True (default): dead letters carry headers with their origin and their error.
    :param skip: with ``all`` and without a topic: bad records are only counted, and lost; default False.
    :param most: maximum of bad records of a window (``max_errors``): a number, or a share of its records below 1; None (default):
        no maximum.
    """

    ARGUMENTS: ClassVar[Mapping[str, str]] = {
        "tolerance": "errors_tolerance",
        "topic": "errors_deadletterqueue_topic_name",
        "replication_factor": "errors_deadletterqueue_topic_replication_factor",
        "context_headers": "errors_deadletterqueue_context_headers_enable",
        "skip": "errors_skip",
        "most": "max_errors",
    }
    """The operator's arguments, by field."""
    CHECKED: ClassVar[frozenset[str]] = frozenset({"most"})
    """Fields whose types :meth:`find_problems` checks itself."""

    tolerance: Literal["none", "all"] = "none"
    topic: str | None = None
    replication_factor: int = -1
    context_headers: bool = True
    skip: bool = False
    most: int | float | None = None

    def __post_init__(self) -> None:
        # A template may render to an empty text.
        if self.topic == "":
            object.__setattr__(self, "topic", None)

    @property
    def tolerates(self) -> bool:
        """True if bad records do not fail a window."""
        return self.tolerance == "all"

    # --- validate ---

    def find_problems(self) -> list[Problem]:
        """Return the problems of these options, without asking a server."""
        if unknown := find_choice_problems("errors_tolerance", self.tolerance, ("none", "all")):
            of_topic = _find_name_problems("errors_deadletterqueue_topic_name", self.topic) if self.topic else []
            return [*unknown, *of_topic, *self._find_limit_problems()]
        if not self.tolerates:
            given = {"errors_deadletterqueue_topic_name": self.topic, "errors_skip": self.skip or None, "max_errors": self.most}
            found = "no bad record is tolerated (`errors_tolerance` is `none`)"
            return [Problem(n, found, 'Set `errors_tolerance="all"`') for n, v in given.items() if v is not None]
        return [*self._find_topic_problems(), *self._find_limit_problems()]

    def has_too_many(self, count: int, records: int) -> bool:
        """Return True if a window has more bad records than ``most``. A share is exact: 29 of 100 are not more than 0.29."""
        if self.most is None:
            return False
        return count > (self.most if isinstance(self.most, int) else Decimal(repr(float(self.most))) * records)

    def _find_topic_problems(self) -> list[Problem]:
        where = "errors_deadletterqueue_topic_name"
        if self.topic and self.skip:
            found = "bad records are sent to a topic, so that none is left out"
            return [Problem("errors_skip", found, f"Give one of it and `{where}`")]
        if not self.topic and not self.skip:
            action = "Name a topic, or set `errors_skip=True` to drop bad records, and only count them"
            return [Problem(where, "bad records would be lost silently", action)]
        found_wrong = _find_name_problems(where, self.topic) if self.topic else []
        factor = self.replication_factor
        if self.topic and (isinstance(factor, bool) or not isinstance(factor, int) or (factor < 1 and factor != -1)):
            found = f"`{factor!r}` is not a number of replicas; expected a whole number from 1, or -1 for the brokers' default"
            found_wrong.append(Problem("errors_deadletterqueue_topic_replication_factor", found))
        return found_wrong

    def _find_limit_problems(self) -> list[Problem]:
        most = self.most
        if most is None:
            return []
        is_count = isinstance(most, int) and not isinstance(most, bool) and most >= 0
        if not is_count and not (isinstance(most, float) and 0 < most < 1):
            found = f"`{most!r}` is neither a whole number of at least 0 nor a share between 0 and 1"
            return [Problem("max_errors", found, "Give a number (`0`: none, `100`), or a share (`0.01`: one of a hundred)")]
        return []

    def find_server_problems(self, hook: KafkaHook, read: Sequence[str]) -> list[Problem]:
        """Return the problems of the dead letter topic that the brokers know of.

        :param read: the topics that are read, and the ledger.
        """
        if not self.tolerates or not self.topic:
            return []
        return find_topic_problems(hook, "errors_deadletterqueue_topic_name", self.topic, read)

    # --- move ---

    def accept(self, window: Window, results: Sequence[SplitResult], *, by_split: bool = False) -> None:
        """Log the bad records of a window, or fail it if there are too many.

        :param by_split: True if splits without bad records are committed separately, and may be committed already.
        :raises TooManyBadRecords: there are more than ``max_errors``.
        """
        count, records = sum(r.rejected for r in results), sum(r.records for r in results)
        if not count:
            return
        samples = select_first_bad_records(results, SHOWN)
        if self.most is not None and self.has_too_many(count, records):
            raise TooManyBadRecords(str(window), count, records, self.most, samples, by_split)
        log.warning(
            "%s of the %s records of window %s are bad, and %s:\n%s%s",
            f"{count:,}",
            f"{records:,}",
            window,
            f"go to topic {self.topic}" if self.topic else "are left out",
            "\n".join(f"  {sample}" for sample in samples),
            f"\n  ... and {count - len(samples):,} more" if count > len(samples) else "",
        )

    def make_dead_letter_topic(self, hook: KafkaHook, pipeline: str, classes: Mapping[str, str]) -> DeadLetterTopic | None:
        """Return the dead letter topic; None without one.

        :param classes: the class of the format, transform or sink, by the stage at which a record failed.
        """
        if not self.tolerates or not self.topic:
            return None
        from airflow_kafka_spark.bad_records.dead_letters import DeadLetterTopic
        from airflow_kafka_spark.sinks.kafka.tasks.dead_letters import Envelope

        envelope = Envelope(pipeline, classes, self.context_headers)
        return DeadLetterTopic(hook, self.topic, self.replication_factor, envelope)


def _find_name_problems(where: str, topic: str) -> list[Problem]:
    if isinstance(topic, str) and TOPIC_NAME.fullmatch(topic):
        return []
    return [Problem(where, f"`{topic}` is not a valid topic name", "Use letters, digits, `.`, `_` and `-`, at most 249 of them")]


def find_topic_problems(
    hook: KafkaHook, where: str, topic: str, taken: Sequence[str], what: str = "dead letters"
) -> list[Problem]:
    """Return the problems that prevent sending records to a topic.

    :param where: the argument that names the topic.
    :param taken: topics that are not allowed: those that are read, and the ledger.
    :param what: the records, for the message.
    """
    if wrong := _find_name_problems(where, topic):
        return wrong
    if topic in taken:
        return [Problem(where, f"`{topic}` is read by this pipeline, or is its ledger", "Name another topic")]
    try:
        there, lacking = hook.check_topics({topic: ("Describe", "Write", "DescribeConfigs", "Create")})
        if lacking:
            return [Problem.of(where, lacking[topic])]
        policy = hook.read_topic_config([topic])[topic].get("cleanup.policy", "") if there else ""
    except KafkaRefused as error:
        return [Problem.of(where, error)]
    except KafkaSparkError as error:
        return [Problem.of("kafka_conn_id", error), Unchecked(where, "kafka_conn_id")]
    if "compact" in policy:
        return [Problem(where, f"`{topic}` is compacted: {what} of one key would replace each other", "Name another")]
    return []


def refuse_forgotten(window: Window, known: DeadLetters | None, *, has_dead_letters: bool, has_routes: bool) -> None:
    """Refuse a window whose earlier attempt has sent records to topics, if this attempt would move these records again because
    its options have changed.

    :param known: the records that the earlier attempt has sent.
    :param has_dead_letters: True if the options still name a dead letter topic.
    :param has_routes: True if a transform still routes to a topic.
    :raises ValidationError: this attempt would not leave them out.
    """
    problems = []
    if known and known.list_sent(window.replay) and not has_dead_letters:
        found = f"an earlier attempt at window {window} has sent bad records to topic `{known.topic}`"
        action = "Keep a dead letter topic until this window is complete"
        problems.append(Problem("errors_deadletterqueue_topic_name", found, action))
    if known and known.list_routed(window.replay) and not has_routes:
        found = f"an earlier attempt at window {window} has sent records elsewhere by a Filter with `to`"
        problems.append(Problem("transforms", found, "Keep such a Filter until this window is complete"))
    if problems:
        raise ValidationError(problems)


def make_resent_problem(window: Window, resent: Mapping[TopicPartition, Collection[int]]) -> Problem:
    """Return the problem of a replay that would move dead letters although they were sent again to the topics that they came
    from.

    :param resent: offsets of these records.
    """
    found = f"{sum(map(len, resent.values())):,} dead letters of window {window} were sent again, and are in later windows"
    return Problem("errors_tolerance", found, 'Set "all", with which a replay leaves them out')


def find_route_problems(
    hook: KafkaHook, routes: Mapping[str, str], errors: ErrorOptions, taken: Callable[[str], Sequence[str]]
) -> list[Problem]:
    """Return the problems that prevent sending records to the topics that a ``Filter`` names.

    :param routes: these topics, by the argument that names each.
    :param taken: returns the topics that are not allowed.
    """
    problems = []
    for where, topic in routes.items():
        if topic == errors.topic and errors.tolerates:
            problems.append(Problem(where, f"`{topic}` is the dead letter topic, too", "Name another topic"))
        elif not _find_name_problems(where, topic):  # the transform names one that cannot be
            problems += find_topic_problems(hook, where, topic, taken(topic), "records")
    return problems


def find_target_clashes(
    target: str | None, errors: ErrorOptions, routes: Mapping[str, str], what: str = "records"
) -> list[Problem]:
    """Return dead letter and routing topics that are the topic of the good records, too.

    :param target: the topic of the good records.
    :param routes: the topics that transforms send records to, by the argument that names each.
    :param what: the word for records in the message.
    """
    aside = {"errors_deadletterqueue_topic_name": errors.topic, **routes}
    found = f"`{target}` is the topic of good {what}"
    return [Problem(where, found, "Name another topic") for where, topic in aside.items() if topic and topic == target]
