"""Values with a Connect schema, as the sources of database logs write them, encoded with the schemas that they have.

Values of one schema begin with the same bytes, ``{"schema":{...},"payload":``. So the schema of a topic is read, and registered,
when it is met first, and when the table has changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from airflow_kafka_spark.errors import RowRejected, SchemaUnusable, SourceRejected, ValidationError
from airflow_kafka_spark.formats.base import Encoder, StructEncoder
from airflow_kafka_spark.formats.json.connect_schema import list_sql_columns, list_written_columns
from airflow_kafka_spark.formats.json.tasks.decode import JsonDecoder
from airflow_kafka_spark.formats.json.tasks.envelope import split_envelope
from airflow_kafka_spark.formats.text_values import BadValue
from airflow_kafka_spark.formats.types import Column

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.tasks.registry_client import RegistryClient

_SCHEMAS = 1_000
"""The number of schemas that a task keeps."""


class ConnectFormat(Protocol):
    """A format that writes values with the schemas that they have."""

    @property
    def topics(self) -> tuple[str, ...]:
        """The topic of all values, if they have one."""

    def make_encoder_for_schema(
        self, schema: Mapping[str, Any], topic: str, registry: RegistryClient
    ) -> tuple[tuple[Column, ...], StructEncoder]:
        """Return the columns of values of a Connect schema, and their encoder. The schema is registered if it is not yet."""


@dataclass
class _SchemaWriter:
    """Writes payloads of one schema to one topic.

    :param before: the bytes before the payload of a value.
    :param decoder: reads payloads.
    :param encoder: writes them.
    :ivar positions: the positions of values of a batch.
    :ivar payloads: the payloads of these values.
    """

    before: bytes
    decoder: JsonDecoder
    encoder: StructEncoder
    positions: list[int] = field(default_factory=list, init=False)
    payloads: list[bytes] = field(default_factory=list, init=False)

    def write(self, into: list[bytes | None]) -> None:
        """Write the payloads of a batch.

        :param into: the values of the batch.
        :raises RowRejected: a payload does not fit its schema.
        """
        positions, payloads = self.positions, self.payloads
        self.positions, self.payloads = [], []
        rows = self.decoder.decode(payloads)
        encoded = self.encoder.encode_struct(rows.batch.to_struct_array())
        for at, reason in (*rows.bad, *encoded.bad):
            raise RowRejected(f"row {positions[at] + 1} of a batch", reason, "Leave the table out, or write JSON")
        for position, value in zip(positions, encoded.values.to_pylist(), strict=True):
            into[position] = value


class ConnectEncoder(Encoder):
    """Encodes values in JSON that carry their schema. A null stays null.

    :param format: the format to write.
    :param column: the column of the values.
    :param topic: the column of the topics; None if all values have the topic of the format.
    :param registry: registers the schemas.
    """

    def __init__(self, format: ConnectFormat, column: str, topic: str | None, registry: RegistryClient) -> None:
        self._format, self._column, self._topic, self._registry = format, column, topic, registry
        self._latest: dict[str, _SchemaWriter] = {}
        self._known: dict[tuple[str, str], _SchemaWriter] = {}

    def __reduce__(self) -> tuple[type[ConnectEncoder], tuple[Any, ...]]:
        return type(self), (self._format, self._column, self._topic, self._registry)

    def encode(self, rows: Mapping[str, pa.Array]) -> pa.Array:
        """Return the values in the format.

        :raises SourceRejected: a schema cannot be written, or the registry does not accept it.
        :raises RowRejected: a value does not fit its schema.
        :raises KafkaSparkError: the registry does not answer.
        """
        values = rows[self._column].to_pylist()
        topics = rows[self._topic].to_pylist() if self._topic is not None else [self._format.topics[0]] * len(values)
        made: list[bytes | None] = [None] * len(values)
        writers: dict[int, _SchemaWriter] = {}
        for at, (topic, value) in enumerate(zip(topics, values, strict=True)):
            if value is None:
                continue
            writer = self._latest.get(topic)
            if writer is None or not value.startswith(writer.before):
                writer = self._latest[topic] = self._get_writer(topic, value)
            writers.setdefault(id(writer), writer)
            writer.positions.append(at)
            writer.payloads.append(value[len(writer.before) : -1])
        for writer in writers.values():
            writer.write(made)
        return pa.array(made, pa.binary())

    def _get_writer(self, topic: str, value: bytes) -> _SchemaWriter:
        """Return the writer of a value's schema."""
        text, _, before = split_envelope(value)
        assert before is not None, "the source writes the schema first"
        if (topic, text) not in self._known:
            if len(self._known) >= _SCHEMAS:
                self._known.clear()
            self._known[topic, text] = self._make_writer(topic, json.loads(text), before)
        return self._known[topic, text]

    def _make_writer(self, topic: str, schema: Mapping[str, Any], before: bytes) -> _SchemaWriter:
        try:
            columns, encoder = self._format.make_encoder_for_schema(schema, topic, self._registry)
            wire_columns = list_written_columns(columns, schema)
        except BadValue as error:
            action = "Leave the events without columns out: those of truncates by `skipped_operations`"
            raise SourceRejected(f"of topic `{topic}`", error.reason, action) from None
        except SchemaUnusable as error:
            raise SourceRejected(f"of topic `{topic}`", error.detail, error.action) from None
        except ValidationError as error:
            problem = error.problems[0]
            raise SourceRejected(f"of topic `{topic}`", problem.what, problem.action) from None
        return _SchemaWriter(before, JsonDecoder(list_sql_columns(columns), wire_columns=wire_columns), encoder)
