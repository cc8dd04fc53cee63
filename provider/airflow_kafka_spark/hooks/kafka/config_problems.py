"""Settings of a connection that librdkafka refuses or misreads, all of them at once and without a broker."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from airflow_kafka_spark.errors.base import find_similar_name
from airflow_kafka_spark.hooks.kafka.client import ClientEvents
from airflow_kafka_spark.hooks.kafka.config import (
    CONSUMER_ONLY,
    JAVA_NAMES,
    JAVA_PREFIX,
    LIBRDKAFKA_ONLY,
    PRODUCER_ONLY,
    TRANSACTION_DECIDES,
    WINDOW_DECIDES,
    make_consumer_config,
    make_producer_config,
)

_NUMERIC = re.compile(r"(\.|^)(ms|k?bytes|messages|size|cnt|retries|connection)$")
"""The end of the name of a setting that is a number."""
_NUMBER = re.compile(r"\s*[+-]?([0-9]+(\.[0-9]+)?|0x[0-9a-fA-F]+)\s*")
_NAMED = re.compile(r'["`]([a-z][a-z0-9._]+)["`=]')
"""A setting in a message of librdkafka."""
_ALIASES = (
    ("compression.codec", "compression.type"),
    ("queue.buffering.max.ms", "linger.ms"),
    ("message.send.max.retries", "retries"),
    ("max.in.flight", "max.in.flight.requests.per.connection"),
    ("max.partition.fetch.bytes", "fetch.message.max.bytes"),
    ("metadata.broker.list", "bootstrap.servers"),
)
"""Names of one setting, of which librdkafka's messages may have the other one."""


def find_setting_problems(config: Mapping[str, Any]) -> list[str]:
    """Return the settings that a client would refuse, or read as another number, as parts of a sentence.

    Clients of both kinds are made without brokers, so that none connects. Addresses and security are left to the first client
    that connects, except for unknown names beside other problems. Nothing is made for a connection that has only these.

    :param config: the extra of the ``kafka`` connection.
    """
    given = {name: value for name, value in config.items() if _is_checked(name)}
    if not given:
        return []
    from confluent_kafka import Consumer, Producer

    def configure_consumer(sound: Mapping[str, Any]) -> dict[str, Any]:
        return make_consumer_config(sound, **{"group.id": "airflow-kafka-spark"})

    def configure_producer(sound: Mapping[str, Any]) -> dict[str, Any]:
        return make_producer_config(sound, **{"transactional.id": "airflow-kafka-spark"})

    problems = _list_problems(given, [(Consumer, configure_consumer), (Producer, configure_producer)])
    return problems + (_list_unknown_names(config.keys() - given.keys()) if problems else [])


def _list_unknown_names(names: Iterable[str]) -> list[str]:
    """Return the names of settings that librdkafka does not know, as parts of a sentence. Their values are not looked at."""
    from confluent_kafka import Producer

    asked = sorted(name for name in names if name.startswith(("sasl.", "ssl.", "security.")))
    refused = {name: reason for name in asked for reason in _find_refused(Producer, {name: "x"}, {name: "x"}).values()}
    return [reason for reason in refused.values() if "No such configuration property" in reason]


def find_producer_problems(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings that a transactional producer would refuse, or read as another number, as parts of a sentence.

    A producer is made, which connects to no broker.

    :param settings: settings that a producer gets unchanged, those of security included.
    """
    if not settings:
        return []
    from confluent_kafka import Producer

    return _list_problems(settings, [(Producer, lambda sound: {**sound, "transactional.id": "airflow-kafka-spark"})])


def _list_problems(
    given: Mapping[str, Any], clients: Iterable[tuple[Callable[..., Any], Callable[[Mapping[str, Any]], dict[str, Any]]]]
) -> list[str]:
    """Return the problems of settings, in the order of their names.

    :param clients: the classes of clients that get the settings, each with a function that returns the client's configuration.
    """
    problems = {name: found for name, value in given.items() if (found := _find_misread_number(name, value))}
    sound = {name: value for name, value in given.items() if name not in problems}
    for make, configure in clients:
        problems |= _find_refused(make, configure(sound), given)
    return [problems[name] for name in sorted(problems)]


def _is_checked(name: str) -> bool:
    is_apart = name.startswith((JAVA_PREFIX, "sasl.", "ssl.", "security.", "enable.sasl.", "enable.ssl.", "https.", "plugin."))
    is_address = name in ("bootstrap.servers", "metadata.broker.list")
    return not (is_apart or is_address or name in WINDOW_DECIDES | TRANSACTION_DECIDES or name.endswith("_cb") or name == "debug")


def _find_misread_number(name: str, value: object) -> str:
    """Return the problem of a number with a unit, which librdkafka reads up to the unit; "" without one."""
    if not isinstance(value, str) or not _NUMERIC.search(name) or _NUMBER.fullmatch(value):
        return ""
    unit = "milliseconds" if name.endswith(".ms") else "bytes" if name.endswith(".bytes") else ""
    return f"`{name}` is `{value}`, not a whole number{f' of {unit}' if unit else ''}"


def _find_refused(make: Callable[..., Any], settings: dict[str, Any], given: Mapping[str, Any]) -> dict[str, str]:
    """Return the given settings that a client refuses, with its reasons. Each is removed before the next one is looked for.

    :param given: the settings of the connection. The client has further ones, and may refuse these because of one of the given.
    """
    from confluent_kafka import KafkaException

    found: dict[str, str] = {}
    while True:
        try:
            client = make(dict(settings), logger=ClientEvents())
        except (KafkaException, TypeError, ValueError) as error:
            reason = (error.args[0].str() if isinstance(error, KafkaException) else str(error)).strip()
            name = next((known for known in _list_named(reason) if known in settings and known in given), "")
            found[name] = f"{re.sub('^Failed to create (producer|consumer): ', '', reason)}{_describe_name(name, reason)}"
            if not name:
                return found
            del settings[name]
            continue
        if hasattr(client, "close"):
            client.close()
        return found


def _describe_name(name: str, reason: str) -> str:
    """Return the name of a setting if a message has another one for it, and a similar one for a name that is unknown."""
    if "No such configuration property" in reason:
        similar = find_similar_name(name, CONSUMER_ONLY | PRODUCER_ONLY | LIBRDKAFKA_ONLY | JAVA_NAMES.keys())
        return f" (perhaps `{similar}`?)" if similar else ""
    return "" if not name or name in reason else f" (`{name}`)"


def _list_named(reason: str) -> list[str]:
    """Return the settings that a message names, each followed by its other names."""
    named = _NAMED.findall(reason)
    return [name for found in named for name in (found, *(n for names in _ALIASES if found in names for n in names))]
