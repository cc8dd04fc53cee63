"""Kafka as a source: the topics that a subscription includes now, and which of them are compacted."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import KafkaRefused, Problem
from airflow_kafka_spark.hooks.kafka.log import read_records
from airflow_kafka_spark.windows.model import TOPIC_NAME

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

log = logging.getLogger(__name__)

_SAMPLED, _SAMPLE_SECONDS = 20, 10.0
"""The most partitions, and seconds, for a look at the newest records."""
_NAMES = "Use letters, digits, `.`, `_` and `-`, at most 249 of them"
_PATTERN_INSTEAD = "Give a regular expression as `topics_pattern`, in which `.*` stands for any text"
_LIST_INSTEAD = "A template renders to a text: give the output of the task itself, as `topics=task.output`"


def _explain_name(name: str) -> str:
    """Return the action for a text that is no name of a topic."""
    return _LIST_INSTEAD if name.startswith(("[", "'")) else _PATTERN_INSTEAD if "*" in name else _NAMES


@dataclass(frozen=True)
class Subscription:
    """The topics that a pipeline reads: exactly one of names and pattern, as for a Connect sink.

    :param topics: a topic's name, or several.
    :param pattern: a regular expression that the whole name has to match (``topics.regex``). Kafka's internal topics and the
        ledger never match.
    """

    topics: tuple[str, ...] = ()
    pattern: str | None = None

    @classmethod
    def of(cls, topics: str | Sequence[str] | None, pattern: str | None) -> Subscription:
        """Return the subscription of an operator's arguments ``topics``, which may be a text separated by commas, and
        ``topics_pattern``. It may be invalid."""
        given: list[object] = (
            [topics] if isinstance(topics, str) or not isinstance(topics or (), Iterable) else list(topics or ())
        )
        # A value that is no text becomes a text that is no topic's name, so that `validate` reports it.
        names = [item if isinstance(item, str) else f"{item!r} ({type(item).__name__})" for item in given]
        # Connect's `topics` is a comma separated list.
        return cls(tuple(name.strip() for item in names for name in item.split(",") if name.strip()), pattern or None)

    def validate(self) -> list[Problem]:
        """Return the problems that can be found without asking Kafka."""
        if self.topics and self.pattern:
            return [Problem("topics", "both `topics` and `topics_pattern` are given", "Give exactly one of them")]
        if not self.topics and not self.pattern:
            return [Problem("topics", "neither `topics` nor `topics_pattern` is given", "Give exactly one of them")]
        problems = [
            Problem("topics", f"`{t}` cannot be a topic's name", _explain_name(t))
            for t in self.topics
            if not TOPIC_NAME.fullmatch(t)
        ]
        if len(set(self.topics)) < len(self.topics):
            problems.append(Problem("topics", "a topic is named twice", "Name each topic once"))
        if self.pattern:
            try:
                re.compile(self.pattern)
            except re.error as error:
                what = f"`{self.pattern}` is not a regular expression: {error}"
                problems.append(Problem("topics_pattern", what, "Correct it; `.*` stands for any text"))
        return problems

    def matches(self, topic: str) -> bool:
        """Return True if the subscription includes a topic. A pattern has to be valid."""
        return topic in self.topics or bool(self.pattern and re.fullmatch(self.pattern, topic))

    def resolve(self, hook: KafkaHook, *, without: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the topics that the subscription includes now, sorted.

        :param without: topics a pattern never matches.
        """
        if not self.pattern:
            return tuple(sorted(self.topics))
        matches = re.compile(self.pattern).fullmatch
        return tuple(sorted(t for t in hook.list_topics() if matches(t) and t not in without))

    def __str__(self) -> str:
        return f"topics matching `{self.pattern}`" if self.pattern else ", ".join(self.topics)


def find_compacted_topics(hook: KafkaHook, topics: Collection[str]) -> frozenset[str]:
    """Return those topics whose records Kafka may remove from the middle of their log (``cleanup.policy``). A topic whose
    settings the connection's user may not see is left out with a warning."""
    if not topics:
        return frozenset()
    try:
        settings = hook.read_topic_config(sorted(topics))
    except KafkaRefused as error:
        log.warning("It is unknown if topics are compacted: the right DESCRIBE_CONFIGS on them is missing: %s", error.found)
        return frozenset()
    return frozenset(topic for topic, found in settings.items() if "compact" in found.get("cleanup.policy", ""))


def find_record_without_key(hook: KafkaHook, topics: Collection[str]) -> str:
    """Return a record without a key among the newest ones of topics, as ``orders-0@17``; "" if none of these is without.

    One or two records of each of up to 20 partitions are read.

    :raises KafkaSparkError: Kafka does not answer, or the user may not read a topic.
    """
    bounds = {partition: found for partition, found in hook.read_offsets(topics).items() if found.lso > found.low}
    newest = {partition: (max(found.low, found.lso - 2), found.lso) for partition, found in sorted(bounds.items())[:_SAMPLED]}
    if not newest:
        return ""
    with closing(read_records(hook, newest, "reading the keys of newest records", seconds=_SAMPLE_SECONDS)) as messages:
        return next((f"{m.topic()}-{m.partition()}@{m.offset()}" for m in messages if m.key() is None), "")
