"""Kafka sinks from the flat options of tests. The tests vary these options one by one and send them to other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from airflow_kafka_spark.sinks import KafkaSink

OF_ROWS = {field.name: field.name for field in fields(KafkaSink)}
"""The sink's fields, by the names of the options of a pipeline that publishes rows."""

OF_RECORDS = {name: name for name in OF_ROWS if name not in ("value", "key", "key_format")} | {
    "output_value": "value",
    "output_key": "key",
    "output_key_format": "key_format",
}
"""Between topics ``value`` and ``key`` are those of the records that are read."""


def with_sink(options: Mapping[str, Any], names: Mapping[str, str] = OF_ROWS, **defaults: Any) -> dict[str, Any]:
    """Return the options with those of the sink gathered in ``sink``.

    :param names: the sink's field, by the name of the option.
    :param defaults: fields of the sink that the options may replace.
    """
    sink = {names[name]: value for name, value in options.items() if name in names}
    return {**{k: v for k, v in options.items() if k not in names}, "sink": KafkaSink(**{**defaults, **sink})}
