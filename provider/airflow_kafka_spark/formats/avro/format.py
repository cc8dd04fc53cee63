"""Avro, with a schema that the user gives, or in Confluent's wire format with a schema registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_kafka_spark.errors import (
    AvroSchemaInvalid,
    KafkaSparkError,
    PackageMissing,
    Problem,
    SchemaUnusable,
    ValidationError,
)
from airflow_kafka_spark.errors.base import quote_names
from airflow_kafka_spark.formats import types
from airflow_kafka_spark.formats.avro.schema import (
    AvroRecord,
    AvroSchema,
    as_record,
    convert_connect_to_avro,
    derive_record,
    derive_type,
    find_column_mismatches,
    find_derivation_problems,
    find_differences,
    find_record_mismatches,
    is_full_name,
    list_columns,
    make_namespace,
    parse,
    qualify_name,
    remove_logical_types,
)
from airflow_kafka_spark.formats.base import Decoder, Part, find_column_name_problems
from airflow_kafka_spark.formats.registry import RegistryFormat, SchemaDocument, make_subject, make_wire_header

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_kafka_spark.formats.avro.tasks.encode import AvroEncoder
    from airflow_kafka_spark.hooks.tasks.registry_client import RegisteredSchema


@dataclass(frozen=True)
class Avro(RegistryFormat):
    """Avro's binary encoding. The fields of the schema's record become columns; any other type becomes one column.

    With ``schema``, values have this schema and no header. With ``registry``, values are in Confluent's wire format (a magic
    byte, the id of the writer's schema, the value), and schemas come from a schema registry. Records of all versions are read
    with the reader's schema: missing fields get its defaults, numbers are widened, fields that it does not have are left out, and
    fields are found under their aliases. All versions of the subjects are fetched before Spark starts, and tasks never ask the
    registry.

    A value that does not fit makes its record bad, with a reason. It never fails the task. The page `avro.md` of the
    documentation lists the types of columns and the bad records.

    Rows are written as records with a field per column, with the first of: the subject's latest schema (``use_latest_version``),
    ``schema``, a schema derived from the columns. A key of one column is written as that column's bare type. With a registry, the
    schema is registered or looked up before anything is published, after the registry has confirmed that it is compatible. One
    attempt uses one schema id for all its records. A value that does not fit the schema ends the split with the row and the
    column; nothing is rounded, cut off or changed to another value.

    :param schema: the schema's JSON, for values without a header; to write with a registry: the schema that is registered,
        instead of one derived from the columns. Default empty.
    :param column: the name of the column if the schema is no record; default ``value``.
    :param record_name: when writing, the name of the record that is derived from columns, with or without a namespace; default
        ``Value`` or ``Key``.
    :param record_namespace: its namespace; default the topic.
    :param writes: set by :meth:`to_write`; default False.
    :param registry: the Airflow connection of the schema registry (:class:`.SchemaRegistryHook`); default empty.
    :param subject: the subject of the schemas; default: derived from the topics by ``subject_name_strategy``.
    :param subject_name_strategy: Confluent's ``TopicNameStrategy`` (``<topic>-value``), ``RecordNameStrategy`` or
        ``TopicRecordNameStrategy``. With the last two, the record's name is that of ``reader_schema``, unless ``subject`` is
        given. Default ``TopicNameStrategy``.
    :param reader_schema: the schema that defines the columns: ``latest`` (default), a version of the subject, or a schema's
        JSON. With ``schema``: JSON.
    :param auto_register_schemas: when writing, register the schema if it is compatible. False: the schema must be registered
        already. Default True, unless ``use_latest_version`` is set.
    :param use_latest_version: write with the subject's latest schema; the columns have to fit it. Default False.
    :param normalize_schemas: treat schemas as equal that differ only in their notation; default False.
    :param topics: set by :meth:`of_topics`; default none.
    :param part: set by :meth:`of_topics`; default ``value``.
    """

    schema: str = ""
    column: str = "value"
    record_name: str = ""
    record_namespace: str = ""
    writes: bool = False

    kind: ClassVar[str] = "AVRO"
    name_option: ClassVar[str] = "reader_schema"
    schema_options: ClassVar[tuple[str, ...]] = ("schema", "use_latest_version", "record_name", "record_namespace")

    def _find_record_name(self) -> str:
        return _get_name(parse(str(self.reader_schema), "the option `reader_schema`")) if self._reader_given else ""

    @property
    def _schema_text(self) -> str:
        return self.schema

    # --- options -----------------------------------------------------------------------------------------------------

    def validate(self, where: str) -> list[Problem]:
        """Return the problems of the options and of the schemas; asks the registry if there is one."""
        if problems := super().validate(where):
            return problems
        from airflow_kafka_spark.formats.avro.tasks.row_decode import find_bad_defaults

        return [
            Problem(f"{where}.reader_schema", f"the default of field `{name}` does not have its type", "Correct the default")
            for name in find_bad_defaults(self._reader)
        ]

    def _find_option_problems(self, where: str) -> list[Problem]:
        problems = find_column_name_problems(self.column, where)
        if self.schema and self.registry:
            action = "Give `schema` for values without a header, `registry` for Confluent's wire format"
            problems.append(Problem(where, "found both of `schema` and `registry`; expected one of them", action))
        return [*problems, *self._find_registry_problems(where)]

    def _check_readable(self) -> None:
        from importlib.util import find_spec

        if find_spec("polars") is None:
            raise PackageMissing("Avro", "polars", "avro")
        self._list_columns()

    # --- reading -----------------------------------------------------------------------------------------------------

    def _load_document(self, registered: RegisteredSchema) -> SchemaDocument:
        """Return a registered schema with the schemas it refers to, each after those that it uses itself.

        :raises SchemaUnusable: the schema is of another type.
        """
        self._check_kind(registered)
        return SchemaDocument(registered.text, tuple(("", text) for text in registered.references), str(registered))

    @cached_property
    def _reader(self) -> AvroRecord:
        """The schema whose fields are the columns.

        :raises KafkaSparkError: it does not exist, or cannot be used.
        """
        return as_record(self._parse_checked(self._reader_document, "Read such values with Raw"), self.column)

    def _parse_checked(self, document: SchemaDocument, action: str) -> AvroSchema:
        """Return the schema of a document.

        :param action: the action for a type that clients write in different ways.
        :raises AvroSchemaInvalid: the schema cannot be used.
        """
        schema = _parse_document(document)
        if self.registry and schema.kind == "bytes":
            detail = "it is of type bytes, which Confluent's clients for Java and for Python write differently"
            raise AvroSchemaInvalid(document.name, detail, action)
        return schema

    def _list_columns(self) -> tuple[types.Column, ...]:
        return list_columns(self._reader, self._reader_document.name)

    def get_arrow_schema(self) -> pa.Schema:
        """Return the fields of the reader's schema; the registry is asked for it once.

        :raises KafkaSparkError: there is no such schema, or the registry does not return it.
        """
        return types.to_arrow_schema(self._list_columns())

    def make_decoder(self) -> Decoder:
        """Return a decoder that contains all schemas; the registry is asked for versions that are new since the last call.

        :raises KafkaSparkError: as :meth:`get_arrow_schema`.
        """
        from airflow_kafka_spark.formats.avro.tasks.decode import AvroDecoder

        if not self.registry:
            writer = as_record(_parse_document(SchemaDocument(self.schema, (), "the option `schema`")), self.column)
            return AvroDecoder(self._reader, {0: writer}, framed=False)
        # Columns first: the latest version is fetched once, and not again with all versions.
        reader, versions = self._reader, self._list_all_versions()
        writers = {registered.id: self._resolve_writer(registered) for registered in versions}
        return AvroDecoder(reader, writers, framed=True, known=self._describe_versions(versions))

    def _resolve_writer(self, registered: RegisteredSchema) -> AvroRecord | str:
        """Return the schema of a writer, or the reason why it cannot be used."""
        try:
            return as_record(_parse_document(self._load_document(registered)), self.column)
        except SchemaUnusable as e:
            return f"the schema of {e.what} cannot be used: {e.detail}"

    # --- writing -----------------------------------------------------------------------------------------------------

    def to_write(self, topic: str | None, part: Part) -> Avro:
        """Return this format for records that are written.

        :param topic: the topic they are written to; None if each row names its own topic.
        :param part: the part of the records that is written.
        """
        return replace(self, topics=(topic,) if topic else (), part=part, writes=True)

    def _find_writing_option_problems(self, where: str) -> list[Problem]:
        if not self.writes:
            return [Problem(where, "the topic to which Avro is written is unknown here", "Use Json, String or Raw")]
        problems = super()._find_writing_option_problems(where)
        if not is_full_name(self._derived_name):
            action = "Letters of ASCII, digits and `_`, no digit first; a namespace in such parts with dots"
            problems.append(Problem(f"{where}.record_name", f"`{self._derived_name}` is no name in Avro", action))
        return problems

    def _find_written_subject_problems(self, where: str) -> list[Problem]:
        if problems := self._find_strategy_problems(where):
            return problems
        if not self.registry or self.subject:
            return []
        if not self.topics and self.subject_name_strategy != "RecordNameStrategy":
            found = f"rows go to topics of their own, and {self.subject_name_strategy} names subjects after one"
            return [Problem(f"{where}.subject", found, "Use RecordNameStrategy, or give `subject`")]
        by_name = self.subject_name_strategy != "TopicNameStrategy" and not self.schema
        if by_name and not self.record_name and (self.use_latest_version or not self.topics):
            return [Problem(f"{where}.subject", "the record's name is unknown", "Give `subject` or `record_name`")]
        return []

    @property
    def _derived_name(self) -> str:
        """The full name of a record that is derived from columns."""
        namespace = self.record_namespace or (make_namespace(self.topics[0]) if self.topics else "")
        return qualify_name(self.record_name or self.part.capitalize(), namespace)

    def _make_subject_to_write(self, document: SchemaDocument | None) -> str:
        if self.subject:
            return self.subject
        name = self._derived_name if document is None else _get_name(_parse_document(document))
        return make_subject(self.subject_name_strategy, next(iter(self.topics), ""), self.part, name)

    def _find_derivation_problems(self, where: str, columns: Sequence[str]) -> list[Problem]:
        untyped = [types.Column(name, types.Struct(())) for name in columns]
        return [Problem(where, *problem) for problem in find_derivation_problems(untyped)]

    def _derive_schema(self, columns: Sequence[types.Column]) -> str:
        if found := list(find_derivation_problems(columns)):
            raise ValidationError([Problem(self.part, *problem) for problem in found])
        if self.part == "key" and len(columns) == 1 and not isinstance(columns[0].type, types.Struct):
            return derive_type(columns[0], self._derived_name)
        return derive_record(columns, self._derived_name)

    def _find_schema_to_write(self, document: SchemaDocument) -> AvroSchema:
        """Return the schema of a document, which can be read again once it is written.

        :raises AvroSchemaInvalid: it cannot be used.
        """
        schema = self._parse_checked(document, "Write such values with Raw, or in a record")
        if isinstance(schema, AvroRecord):
            list_columns(schema, document.name)
        return schema

    def _name_mismatches(self, document: SchemaDocument, columns: Sequence[str]) -> list[tuple[str, str]]:
        schema = self._find_schema_to_write(document)
        if not isinstance(schema, AvroRecord):
            listed = quote_names(columns)
            found = f"the schema is {schema}, which needs one column; found {listed}"
            return [(found, "Name one column")] if len(columns) != 1 else []
        fields = {f.name for f in schema.fields}
        action = "Leave the column out, or give the schema such a field"
        unknown = [(f"{schema} has no field for column `{c}`", action) for c in columns if c not in fields]
        missing = [f.name for f in schema.fields if f.name not in columns and not f.default]
        action = "Add the column, or give the field a default"
        return unknown + [(f"there is no column for field `{name}`, which has no default", action) for name in missing]

    def _find_mismatches(self, document: SchemaDocument, columns: Sequence[types.Column]) -> list[tuple[str, str]]:
        schema = self._find_schema_to_write(document)
        if isinstance(schema, AvroRecord):
            return list(find_record_mismatches(schema, columns))
        named = self._name_mismatches(document, [c.name for c in columns])
        return named or list(find_column_mismatches(schema, columns[0].type, columns[0].name))

    def _explain(self, reasons: list[str], subject: str, document: SchemaDocument) -> list[str]:
        """Return the registry's reasons; if it gives none, the differences from the latest version."""
        from airflow_kafka_spark.hooks.tasks.registry_client import UNEXPLAINED

        if reasons != [UNEXPLAINED]:
            return reasons
        try:
            latest = self._hook.get_version(subject)
            changed = find_differences(_parse_document(self._load_document(latest)), _parse_document(document))
            return [f"compared with version {latest.version}", *changed]
        except KafkaSparkError:
            return reasons

    def _make_encoder(self, document: SchemaDocument, columns: Sequence[types.Column], header: bytes) -> AvroEncoder:
        from airflow_kafka_spark.formats.avro.tasks.encode import AvroEncoder

        return AvroEncoder(self._find_schema_to_write(document), tuple(columns), header)

    def _make_encoder_for_schema(self, schema: Mapping[str, Any], what: str) -> tuple[tuple[types.Column, ...], AvroEncoder]:
        from airflow_kafka_spark.formats.avro.tasks.encode import AvroEncoder
        from airflow_kafka_spark.formats.json.connect_schema import convert_connect_columns

        columns = convert_connect_columns(schema, is_typed=False)
        if found := list(find_derivation_problems(columns)):
            raise SchemaUnusable(what, *found[0])
        text = convert_connect_to_avro(schema)
        header = make_wire_header(self._get_registered_id(SchemaDocument(text, (), what)))
        return columns, AvroEncoder(parse(remove_logical_types(text), what), columns, header)


def _parse_document(document: SchemaDocument) -> AvroSchema:
    return parse(document.text, document.name, [text for _, text in document.references])


def _get_name(schema: AvroSchema) -> str:
    return getattr(schema, "name", schema.kind)
