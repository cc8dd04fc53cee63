"""JSON with a JSON Schema, in Confluent's wire format with a schema registry, or with a schema of one's own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_kafka_spark.errors import KafkaSparkError, Problem, SchemaUnusable
from airflow_kafka_spark.formats.base import Decoder
from airflow_kafka_spark.formats.json.connect_schema import sql_columns, with_writer_types
from airflow_kafka_spark.formats.registry import RegistryFormat, SchemaDocument, mismatches, name_mismatches
from airflow_kafka_spark.formats.types import Column, SparkSchema, columns_of

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_kafka_spark.formats.json.schema import Property
    from airflow_kafka_spark.formats.tasks.row_encoder import RowEncoder


@dataclass(frozen=True)
class JsonSchema(RegistryFormat):
    """One JSON object per record, described by a JSON Schema (draft-07 or 2020-12); its properties become the columns.

    With ``registry``, values are in Confluent's wire format (a magic byte, the id of the writer's schema, the object), and
    schemas come from a schema registry, as Confluent's serializers and Connect's ``JsonSchemaConverter`` write them. Records of
    all versions are read with the reader's schema. All versions of the subjects are fetched before Spark starts, and tasks never
    ask the registry. Without ``registry``, values are objects without a header, as :class:`.Json` reads them.

    The columns are those of :func:`.columns_of_json_schema`, with the types of Connect's keywords (``connect.type``, the titles
    of its Decimal, Date and Timestamp). Values are read as :class:`.Json` reads them.

    :param schema: a JSON Schema, as a dict or as its text; or, to write, columns as DDL or a pyspark ``StructType``, from which
        one is derived. With ``registry`` it is only the schema to write; records are read with the registry's schemas. Default
        empty.
    :param title: the name of the records, which all strategies but the topic's use; default the title of the schema. It is also
        the title of a schema derived from columns; default there ``Value`` or ``Key``.
    :param check_values: True: values are also checked for the rules of the schema they were written with (``minimum``,
        ``pattern``, the members of an ``enum``, ...); a record that violates one is bad. Some 100 times slower; needs the
        package ``jsonschema`` on the executors. Default False.
    """

    schema: str | Mapping[str, Any] | SparkSchema = ""
    title: str = ""
    check_values: bool = False

    kind: ClassVar[str] = "JSON"
    name_option: ClassVar[str] = "title"

    def _record_name(self) -> str:
        if self.title:
            return self.title
        try:
            text = str(self.reader_schema) if self._reader_given else self._schema_text
            return str(json.loads(text).get("title", "")) if text else ""
        except (ValueError, AttributeError, KafkaSparkError):
            return ""

    @cached_property
    def _schema_text(self) -> str:
        if isinstance(self.schema, Mapping):
            return json.dumps(self.schema, ensure_ascii=False, separators=(",", ":"))
        if isinstance(self.schema, str) and (not self.schema.strip() or self.schema.lstrip()[0] == "{"):
            return self.schema.strip()
        return self._schema_from_columns(columns_of(self.schema))

    # --- validate ----------------------------------------------------------------------------------------------------

    def _check_readable(self) -> None:
        assert self._fields is not None

    def _option_problems(self, where: str) -> list[Problem]:
        problems = self._registry_problems(where)
        if self.check_values:
            from importlib.util import find_spec

            if find_spec("jsonschema") is None:
                found = "it needs the package `jsonschema`, which is not installed here"
                problems.append(Problem(f"{where}.check_values", found, "Install it, on the executors too"))
        return problems

    # --- reading -----------------------------------------------------------------------------------------------------

    @cached_property
    def _fields(self) -> tuple[Property, ...]:
        """The columns of the reader's schema.

        :raises KafkaSparkError: there is no schema, or it has no columns.
        """
        return _fields_of(self._reader_document)

    def arrow_schema(self) -> pa.Schema:
        """Return the columns of the reader's schema; the registry is asked for it once.

        :raises KafkaSparkError: there is no such schema, or the registry does not return it.
        """
        from airflow_kafka_spark.formats.types import arrow_schema

        return arrow_schema(sql_columns(self._fields))

    def decoder(self) -> Decoder:
        """Return a decoder that contains all schemas; the registry is asked for versions that are new since the last call.

        :raises KafkaSparkError: as :meth:`arrow_schema`.
        """
        from airflow_kafka_spark.formats.json.schema import bundle_references
        from airflow_kafka_spark.formats.json.tasks.json_schema import RegisteredJsonDecoder

        columns = _plain_fields(self._fields)
        if not self.registry:
            return RegisteredJsonDecoder(columns, {0: self._schema_text}, {}, "", False, self.check_values)
        versions = self._all_versions()
        known, unusable, others = dict[int, str](), dict[int, str](), dict[int, Sequence[Column]]()
        for registered in versions:
            try:
                document = self._document(registered)
                known[registered.id] = json.dumps(bundle_references(document)) if self.check_values else ""
            except SchemaUnusable as e:
                unusable[registered.id] = e.found
                continue
            written = _as_written(columns, document)
            if written != tuple(columns):
                others[registered.id] = written
        return RegisteredJsonDecoder(columns, known, unusable, self._describe_versions(versions), True, self.check_values, others)

    # --- writing -----------------------------------------------------------------------------------------------------

    def _schema_from_columns(self, columns: Sequence[Column]) -> str:
        from airflow_kafka_spark.formats.json.schema import json_schema_from_columns

        return json_schema_from_columns(columns, self.title or self.part.capitalize())

    def _mismatches(self, document: SchemaDocument, columns: Sequence[Column]) -> list[tuple[str, str]]:
        found = mismatches(columns, sql_columns(_fields_of(document)))
        return [*found, *self._name_mismatches(document, [c.name for c in columns])]

    def _name_mismatches(self, document: SchemaDocument, columns: Sequence[str]) -> list[tuple[str, str]]:
        fields = _fields_of(document)
        return name_mismatches(fields, columns, {f.name for f in fields if not f.absent})

    def _encoder(self, document: SchemaDocument, columns: Sequence[Column], header: bytes) -> RowEncoder:
        from airflow_kafka_spark.formats.json.tasks.json_schema import JsonSchemaEncoder

        return JsonSchemaEncoder(_fields_of(document), [c.name for c in columns], header)


def _fields_of(document: SchemaDocument) -> tuple[Property, ...]:
    from airflow_kafka_spark.formats.json.schema import bundle_references, fields_of

    return fields_of(bundle_references(document), document.name)


def _as_written(columns: Sequence[Column], document: SchemaDocument) -> tuple[Column, ...]:
    """Return columns with the logical types of a writer's schema; unchanged if that schema has no columns."""
    from airflow_kafka_spark.formats.json.schema import bundle_references, readable_fields

    try:
        return with_writer_types(columns, _plain_fields(readable_fields(bundle_references(document))))
    except SchemaUnusable:
        return tuple(columns)


def _plain_fields(fields: Sequence[Column]) -> list[Column]:
    """Return properties as plain columns, which :class:`.JsonDecoder` takes."""
    return [Column(f.name, f.type, f.nullable, f.comment) for f in fields]
