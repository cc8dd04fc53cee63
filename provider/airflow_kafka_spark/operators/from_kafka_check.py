"""Everything that would keep a window from being read from Kafka, found before anything is read or written."""

from __future__ import annotations

import json
from ast import literal_eval
from collections.abc import Iterator, Mapping
from typing import Any

from airflow_kafka_spark.errors import KafkaSparkError, Problem, TopicMissing
from airflow_kafka_spark.operators.base import problem_from
from airflow_kafka_spark.operators.bounds import bound_problems
from airflow_kafka_spark.operators.intervals import interval_of, interval_problem, option_problems
from airflow_kafka_spark.operators.run import Run
from airflow_kafka_spark.windows.latency import parse_counts

_CHOICES = {"data_loss": ("fail", "skip"), "read_with": ("auto", "task", "spark"), "on_mismatch": ("fail", "warn")}


def argument_problems(operator: Any, run: Run) -> list[Problem]:
    """What is wrong with the arguments, without asking anybody."""
    problems = [
        *operator.subscription.validate(),
        *_option_problems(operator),
        *bound_problems(operator),
        *option_problems(operator),
    ]
    try:
        upstream_counts(operator.upstream_counts)
    except ValueError as error:
        problems.append(Problem("upstream_counts", str(error), 'Give {"2026-01-01T00:00:00Z": 500, ...}, or JSON of it'))
    if operator.window == "interval" and operator.on_missing_interval == "fail" and interval_of(run) is None:
        problems.append(interval_problem(run))
    return problems


def _option_problems(operator: Any) -> Iterator[Problem]:
    for where, known in _CHOICES.items():
        if (value := getattr(operator, where)) not in known:
            yield Problem(where, f"`{value}` is not one of {', '.join(known)}")
    if not isinstance(operator.group_id, str) or not operator.group_id.strip():
        yield Problem("group_id", f"`{operator.group_id}` is not the name of a consumer group")
    if operator.follows and operator.max_records is not None:
        yield Problem("max_records", "a window that follows another pipeline is as large as what that published")
    numbers = {
        "max_records": max_records(operator.max_records),
        "split_records": operator.split_records,
        "keep_windows": operator.keep_windows,
    }
    for where, value in numbers.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            yield Problem(where, f"`{value}` is not a whole number of at least 1")


def kafka_problems(operator: Any) -> list[Problem]:
    """What the brokers say: topics that are missing, a group that somebody consumes with."""
    try:
        return [*_topic_problems(operator), *_group_problems(operator)]
    except KafkaSparkError as error:
        return [problem_from("kafka_conn_id", error)]


def _topic_problems(operator: Any) -> Iterator[Problem]:
    subscription, hook = operator.subscription, operator.kafka
    if subscription.topics:
        missing = sorted(set(subscription.topics) - set(hook.describe_topics(subscription.topics, missing="omit")))
        if missing:
            yield problem_from("topics", TopicMissing(hook.conn_id, missing))
    elif subscription.pattern and not subscription.validate() and not operator.resolve():
        yield Problem("topics_pattern", f"no topic matches `{subscription.pattern}`", "Create one, or correct the pattern")


def _group_problems(operator: Any) -> Iterator[Problem]:
    group = operator.group_id
    if isinstance(group, str) and group.strip() and (members := operator.kafka.group_state(group).members):
        listed = ", ".join(map(str, members))
        action = "Stop them, or use a group of this pipeline's own"
        yield Problem("group_id", f"group `{group}` has live members: {listed}", action)


def max_records(given: Any) -> Any:
    """Templates render to text."""
    if isinstance(given, str) and given.strip().isdecimal():
        return int(given)
    return None if given == "" else given


def upstream_counts(given: Mapping[Any, int] | str | None) -> dict[int, int] | None:
    """An upstream count by milliseconds since the epoch; templates render to the text of a mapping, Python's or JSON's.

    :raises ValueError: it cannot be understood.
    """
    if isinstance(given, str):
        try:
            given = literal_eval(given) if given.strip().startswith("{'") else json.loads(given or "null")
        except SyntaxError:
            raise ValueError(f"`{given}` is no mapping") from None
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ValueError(f"`{given}` is no mapping")
    return parse_counts(given)
