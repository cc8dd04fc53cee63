"""What an Avro format was told, and who asks its registry: its parts go by that, and need not know the format."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from airflow_kafka_spark.errors import AvroSchemaInvalid
from airflow_kafka_spark.formats.avro.schema import Schema, parse
from airflow_kafka_spark.formats.base import Part
from airflow_kafka_spark.formats.registry import SubjectNameStrategy

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.schema_registry import RegisteredSchema, SchemaRegistryHook


@dataclass(frozen=True)
class AvroSettings:
    """The arguments of :class:`~airflow_kafka_spark.formats.avro.format.Avro`, which explains them."""

    schema: str = ""
    registry: str = ""
    subject: str | None = None
    subject_name_strategy: SubjectNameStrategy = "TopicNameStrategy"
    reader_schema: str | int | Literal["latest"] = "latest"
    column: str = "value"
    auto_register_schemas: bool | None = None
    use_latest_version: bool = False
    normalize_schemas: bool = False
    record_name: str = ""
    record_namespace: str = ""
    topics: tuple[str, ...] = ()
    part: Part = "value"
    writes: bool = False

    @cached_property
    def hook(self) -> SchemaRegistryHook:
        """What asks the registry."""
        from airflow_kafka_spark.hooks.schema_registry import SchemaRegistryHook

        return SchemaRegistryHook(self.registry)

    def __getstate__(self) -> dict:
        # The client holds connections and a lock.
        return {name: value for name, value in self.__dict__.items() if name != "hook"}


def parsed(registered: RegisteredSchema) -> Schema:
    """:raises AvroSchemaInvalid: it is of another kind, or cannot be used."""
    if registered.kind != "AVRO":
        raise AvroSchemaInvalid(
            str(registered), f"it is of type {registered.kind}, not AVRO", "Read the topic with its own format"
        )
    return parse(registered.text, str(registered), registered.references)
