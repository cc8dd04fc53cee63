"""Records become rows: which formats, which columns, and what a record without a value means."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.formats.base import Format
from airflow_kafka_spark.operators.from_kafka import FromKafkaOperator
from airflow_kafka_spark.road.columns import METADATA, NullValues

if TYPE_CHECKING:
    from airflow_kafka_spark.road.columns import Layout


class DecodingOperator(FromKafkaOperator):
    """The columns of an operator that reads from Kafka: those of ``value``, then those of ``key`` (a column both have is taken
    from the key), then ``metadata_columns``.

    :param value: how values are decoded.
    :param key: how keys are decoded; None leaves them.
    :param metadata_columns: what else of a record becomes a column: names among ``key``, ``value`` (raw bytes), ``topic``,
        ``partition``, ``offset``, ``timestamp``, ``timestampType``, ``headers``; as a list, or as a mapping name -> column.
    :param behavior_on_null_values: what a record without a value means.
    """

    def __init__(
        self,
        *,
        value: Format,
        key: Format | None = None,
        metadata_columns: Sequence[str] | Mapping[str, str] = (),
        behavior_on_null_values: NullValues | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.value = value
        self.key = key
        self.metadata_columns = metadata_columns
        self.behavior_on_null_values = behavior_on_null_values

    # --- what a concrete operator says ---

    @property
    @abstractmethod
    def null_values(self) -> NullValues:
        """What a record without a value means, once the default is known."""

    @abstractmethod
    def null_value_problems(self) -> list[Problem]:
        """What is wrong with that."""

    # --- 1. validate ---

    def decoding_problems(self) -> list[Problem]:
        """What is wrong with formats and columns, without asking anybody."""
        value, key = self.formats
        formats = [*value.validate("value"), *(key.validate("key") if key else ())]
        return formats or [*self._column_problems(), *self.null_value_problems()]

    def _column_problems(self) -> list[Problem]:
        problems = [
            Problem("metadata_columns", f"`{name}` is not one of {', '.join(METADATA)}")
            for name, _ in self.metadata
            if name not in METADATA
        ]
        value, key = self.formats
        taken = set(value.arrow_schema().names) | set(key.arrow_schema().names if key else ())
        for name, column in self.metadata:
            if column in taken:
                problems.append(
                    Problem(
                        "metadata_columns",
                        f"column `{column}` is there already",
                        f'Name it otherwise: {{"{name}": "kafka_{name}"}}',
                    )
                )
            taken.add(column)
        return problems

    # --- what the parts are made of ---

    @cached_property
    def formats(self) -> tuple[Format, Format | None]:
        """How values and keys of the topics that are read are decoded."""
        given = [f for f in (self.value, self.key) if f is not None]
        if all(type(f).of_topics is Format.of_topics for f in given):
            return self.value, self.key
        topics = self.subscription.topics or self.resolve()
        return self.value.of_topics(topics, "value"), self.key.of_topics(topics, "key") if self.key else None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        columns = self.metadata_columns
        return tuple(columns.items()) if isinstance(columns, Mapping) else tuple((name, name) for name in columns)

    def layout(self) -> Layout:
        """How records become rows."""
        from airflow_kafka_spark.road.columns import Layout

        return Layout.of(*self.formats, self.metadata, self.null_values)
