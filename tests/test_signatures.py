"""Public constructors as ``help()``, an IDE and an API reference show them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable
from enum import Enum
from importlib import import_module

import pytest
from airflow.providers.common.compat.sdk import BaseOperator

from airflow_kafka_spark import errors
from airflow_kafka_spark.bad_records.options import ErrorOptions
from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.hooks.schema_registry import SchemaRegistryHook
from airflow_kafka_spark.hooks.spark.hook import SparkConnectHook, SparkHook
from airflow_kafka_spark.operators import KafkaToKafkaOperator, KafkaToSinkOperator, SourceToKafkaOperator
from airflow_kafka_spark.operators.options import (
    FollowOptions,
    LedgerOptions,
    ReadOptions,
    RecordOptions,
    SparkOptions,
    WindowOptions,
)
from airflow_kafka_spark.sensors import KafkaIntervalSensor, KafkaLagSensor, KafkaWindowSensor
from airflow_kafka_spark.sinks import DeltaSink, IcebergSink
from airflow_kafka_spark.sinks.iceberg.hooks import IcebergHook
from airflow_kafka_spark.sources.jdbc.hooks import MySqlHook, PostgresHook
from airflow_kafka_spark.testing import EmbeddedAirflow, EmbeddedKafka, EmbeddedPostgres, KafkaSecurity
from airflow_kafka_spark.triggers import KafkaIntervalTrigger, KafkaLagTrigger, KafkaWindowTrigger
from airflow_kafka_spark.windows.offset_specs import CommittedOffsets

PACKAGES = ("operators", "sensors", "sinks", "sources", "formats", "transforms")


def public_classes() -> list[type]:
    modules = [import_module(f"airflow_kafka_spark.{name}") for name in PACKAGES]
    found = {getattr(module, name): None for module in modules for name in module.__all__}
    return [
        each
        for each in found
        if inspect.isclass(each)
        and each.__module__.startswith("airflow_kafka_spark.")
        and not inspect.isabstract(each)
        and not issubclass(each, Enum)
    ]


CLASSES = public_classes()
GROUPS = (ErrorOptions, FollowOptions, LedgerOptions, ReadOptions, RecordOptions, SparkOptions, WindowOptions)
ALSO = [
    *(KafkaHook, SparkHook, SparkConnectHook, SchemaRegistryHook, IcebergHook, MySqlHook, PostgresHook),
    *GROUPS,
    *(CommittedOffsets, KafkaIntervalTrigger, KafkaLagTrigger, KafkaWindowTrigger),
    *(EmbeddedAirflow, EmbeddedKafka, EmbeddedPostgres, KafkaSecurity),
]
"""Public classes outside of these packages."""

ERRORS = [each for name in errors.__all__ if issubclass(each := getattr(errors, name), KafkaSparkError)]
OF_AIRFLOW = [each for each in CLASSES if issubclass(each, BaseOperator)]
OWN = [each for each in CLASSES if each not in OF_AIRFLOW]


MOVING = (KafkaToSinkOperator, KafkaToKafkaOperator, SourceToKafkaOperator)
"""The operators that move windows. Each shows all parameters, so that most of them stand in two or three constructors."""

SENSORS = (KafkaIntervalSensor, KafkaLagSensor, KafkaWindowSensor)
TRIGGERS = (KafkaIntervalTrigger, KafkaLagTrigger, KafkaWindowTrigger)
OF_EACH = {"topics", "pipeline"}
"""Parameters of sensors and triggers that are required in one class and not in another."""

OWN_MEANING = {
    *("sink", "value", "metadata_columns", "behavior_on_null_values", "max_records", "read_with", "transforms"),
    *("errors_tolerance", "errors_deadletterqueue_topic_name", "errors_skip", "max_errors", "kwargs"),
}
"""Parameters that mean something else in each operator, and that each describes in its own words."""

LAKES = (DeltaSink, IcebergSink)
OF_LAKES = {"conn_id", "partition_by", "auto_create", "auto_evolve", "compression", "table_properties"}
"""Parameters that say what is special of Delta or Iceberg."""

NUMBER = re.compile(r"\b(int|float|timedelta|Count|Duration)\b")
UNIT = re.compile(
    r"seconds|timedelta|bytes|MB|characters|digits|levels"
    r"|number|sessions|records|rows|offsets|windows|partitions|replica|port|version",
    re.IGNORECASE,
)


def name_of(cls: type) -> str:
    return cls.__name__


def ours(cls: type) -> list[type]:
    """The class and those of this package that it inherits from."""
    return [each for each in cls.__mro__ if each.__module__.startswith("airflow_kafka_spark.")]


def parameters(cls: type) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(cls).parameters)


def description(cls: type, name: str) -> str:
    """The text that describes a parameter, of the class itself or of the next one that it inherits from."""
    found = (re.search(rf":param {name}:(.*?)(?=\n\s*:\w+|\n\s*\n|\Z)", inspect.getdoc(each) or "", re.S) for each in ours(cls))
    return next((match[1] for match in found if match), "")


def documented(*classes: type) -> set[str]:
    """The parameters that docstrings describe."""
    return set(re.findall(r":param (\w+):", "\n".join(each.__dict__.get("__doc__") or "" for each in classes)))


def test_there_are_many_public_classes() -> None:
    assert len(OF_AIRFLOW) == 9 and len(OWN) > 30


def failures(check: Callable[[type], Collection[str]], classes: Iterable[type]) -> dict[str, Collection[str]]:
    """Return the findings of a check by class; thousands of tests of microseconds each would take a minute."""
    return {cls.__name__: found for cls in classes if (found := check(cls))}


def test_no_constructor_takes_parameters_that_it_does_not_show() -> None:
    def hidden(cls: type) -> list[str]:
        return [p.name for p in parameters(cls).values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]

    assert failures(hidden, OWN) == {}


@pytest.mark.parametrize("cls", OF_AIRFLOW, ids=name_of)
def test_an_operator_hides_nothing_but_the_parameters_of_airflows_own(cls: type) -> None:
    """A parameter of a class in between is either shown, or given by the public class, so that a second value is an error."""
    shown = parameters(cls)
    between = {n for each in ours(cls)[1:] if "__init__" in vars(each) for n in inspect.signature(each.__init__).parameters}
    required = {name: None for name, p in shown.items() if p.default is p.empty and p.kind is p.KEYWORD_ONLY}
    for name in between - shown.keys() - {"self", "kwargs"}:
        with pytest.raises(TypeError, match=f"multiple values for keyword argument '{name}'"):
            cls(**{"task_id": "task", **required, name: None})
    assert set(cls.template_fields) <= shown.keys()  # type: ignore[attr-defined]


def test_one_docstring_of_an_operator_describes_every_parameter() -> None:
    assert failures(lambda cls: parameters(cls).keys() - documented(cls), OF_AIRFLOW) == {}


def test_every_parameter_of_an_operator_has_a_type() -> None:
    assert failures(lambda cls: [p.name for p in parameters(cls).values() if p.annotation is p.empty], OF_AIRFLOW) == {}


def test_every_parameter_is_described_where_it_is_defined() -> None:
    assert failures(lambda cls: parameters(cls).keys() - documented(*ours(cls)), OWN) == {}


def test_a_docstring_says_the_default_of_every_parameter_that_has_one() -> None:
    def unsaid(cls: type) -> list[str]:
        optional = [name for name, parameter in parameters(cls).items() if parameter.default is not parameter.empty]
        return [name for name in optional if "default" not in description(cls, name).lower()]

    assert failures(unsaid, [*CLASSES, *ALSO]) == {}


@pytest.mark.parametrize(
    ("classes", "own"),
    [(MOVING, OWN_MEANING), (SENSORS, OF_EACH), (TRIGGERS, OF_EACH), (LAKES, OF_LAKES)],
    ids=["operators", "sensors", "triggers", "lakes"],
)
def test_classes_that_share_a_parameter_describe_it_in_the_same_words(classes: tuple[type, ...], own: set[str]) -> None:
    def texts(name: str) -> set[str]:
        return {" ".join(description(cls, name).split()) for cls in classes if name in parameters(cls)}

    assert {name for cls in classes for name in parameters(cls) if len(texts(name)) > 1} == own


def test_operators_and_groups_of_options_agree_on_types_and_defaults() -> None:
    """A constructor hands its parameters on to groups by position, so nothing else compares the two."""
    different: dict[str, object] = {}
    compared = 0
    for group in GROUPS:
        names = getattr(group, "ARGUMENTS", {})
        for field, parameter in parameters(group).items():
            name = names.get(field, field)
            for cls in MOVING:
                shown = parameters(cls).get(name)
                if shown is None:
                    continue
                compared += 1
                if shown.annotation != parameter.annotation:
                    different[f"{cls.__name__}.{name}"] = shown.annotation
                elif parameter.default is not parameter.empty and shown.default != parameter.default:
                    different[f"{cls.__name__}.{name}"] = shown.default
    assert compared > 60
    assert different == {
        # Raw is the default of a copy, a deletion is not a record, and a share of a window is one transaction.
        "KafkaToKafkaOperator.value": "Format | None",
        "KafkaToKafkaOperator.behavior_on_null_values": "Literal['write', 'ignore', 'fail'] | None",
        "KafkaToKafkaOperator.max_records": 10_000_000,
    }


def test_a_docstring_names_the_unit_of_every_number() -> None:
    def unsaid(cls: type) -> list[str]:
        numbers = [
            n for n, p in parameters(cls).items() if re.search(r"\b(int|float|timedelta|Count|Duration)\b", str(p.annotation))
        ]
        return [name for name in numbers if not UNIT.search(description(cls, name))]

    assert failures(unsaid, [*CLASSES, *ALSO]) == {}


def test_hooks_groups_of_options_and_errors_describe_every_parameter() -> None:
    def undescribed(cls: type) -> set[str]:
        constructors = [inspect.getdoc(vars(each)["__init__"]) or "" for each in ours(cls) if "__init__" in vars(each)]
        described = documented(*ours(cls)) | set(re.findall(r":param (\w+):", "\n".join(constructors)))
        return parameters(cls).keys() - described - {"args", "kwargs"}

    assert failures(undescribed, [*ALSO, *ERRORS]) == {}
