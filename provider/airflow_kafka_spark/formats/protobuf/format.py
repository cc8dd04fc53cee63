"""Protobuf, with a schema that the user gives, or in Confluent's wire format with a schema registry."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from airflow_kafka_spark.errors import PackageMissing, Problem, SchemaUnusable
from airflow_kafka_spark.formats.base import Decoder
from airflow_kafka_spark.formats.registry import (
    RegistryFormat,
    SchemaDocument,
    find_mismatches,
    find_name_mismatches,
    make_wire_header,
)
from airflow_kafka_spark.formats.types import Column, SparkSchema, Struct, parse_columns

if TYPE_CHECKING:
    import pyarrow as pa
    from google.protobuf.descriptor import Descriptor

    from airflow_kafka_spark.formats.protobuf.schema import FieldLayout
    from airflow_kafka_spark.formats.tasks.base import RowEncoder
    from airflow_kafka_spark.hooks.tasks.registry_client import RegisteredSchema

_IS_PROTO = re.compile(r"\{|^\s*(?:syntax|edition)\s*=").search
"""Distinguishes the text of a ``.proto`` file from columns in DDL."""


@dataclass(frozen=True)
class Protobuf(RegistryFormat):
    """One Protobuf message per record; its fields become the columns.

    With ``schema`` alone, values are messages without a header. With ``registry``, values are in Confluent's wire format (a magic
    byte, the id of the writer's schema, the indexes of the message in it, the message), and schemas come from a schema registry.
    Records of all versions are read with the reader's schema: a missing field gets its default, or null if the field may be
    absent. All versions of the subjects are fetched and compiled before Spark starts, and tasks never ask the registry. If a
    field of a version would be misread, the records of this version are bad.

    The page `protobuf.md` of the documentation lists the types of columns and the bad records.

    :param schema: the text of a ``.proto`` file; or a descriptor set, bytes written by ``protoc --include_imports
        --descriptor_set_out``, of which the last file is used; or, to write, columns as DDL or a pyspark ``StructType``, from
        which a schema is derived. With ``registry`` it is only the schema to write; records are read with the registry's
        schemas. Default empty.
    :param message: the name of the message, with or without its package; default the first of the file.
    :param recursive_fields_max_depth: the number of levels to which a message that contains itself is read, as in Spark: 1 leaves
        such fields out, 2 reads them once, and so on. None (default) refuses such messages.
    :param nanoseconds: digits beyond the microsecond: ``fail`` (default) makes the record bad, ``cut`` leaves them out.
    """

    schema: str | bytes | SparkSchema = ""
    message: str = ""
    recursive_fields_max_depth: int | None = None
    nanoseconds: Literal["fail", "cut"] = "fail"

    kind: ClassVar[str] = "PROTOBUF"
    name_option: ClassVar[str] = "message"
    schema_options: ClassVar[tuple[str, ...]] = ("schema", "use_latest_version", "message")

    def _find_record_name(self) -> str:
        return self.message

    @cached_property
    def _schema_text(self) -> str:
        if isinstance(self.schema, bytes):
            return ""
        if isinstance(self.schema, str) and (not self.schema.strip() or _IS_PROTO(self.schema)):
            return self.schema
        return self._derive_schema(parse_columns(self.schema))

    # --- validate ----------------------------------------------------------------------------------------------------

    def _check_readable(self) -> None:
        _check_packages()
        assert self._layout is not None

    def _find_option_problems(self, where: str) -> list[Problem]:
        problems = self._find_registry_problems(where)
        return [*problems, *self._find_own_option_problems(where)]

    def _find_own_option_problems(self, where: str) -> list[Problem]:
        problems = []
        if self.registry and isinstance(self.schema, bytes) and self.schema:
            found = "a registry keeps texts, found a descriptor set"
            problems.append(Problem(f"{where}.schema", found, "Give the text of the .proto file"))
        depth = self.recursive_fields_max_depth
        if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= 10):
            problems.append(Problem(f"{where}.recursive_fields_max_depth", f"found {depth!r}; expected None, or 1 to 10"))
        if self.nanoseconds not in ("fail", "cut"):
            problems.append(Problem(f"{where}.nanoseconds", f"found {self.nanoseconds!r}; expected fail or cut"))
        return problems

    # --- reading -----------------------------------------------------------------------------------------------------

    @cached_property
    def _files(self) -> bytes:
        """The descriptor set of the reader's schema."""
        given = not (self._reader_given or self.registry)
        return self.schema if given and isinstance(self.schema, bytes) else _compile_document(self._reader_document)

    @cached_property
    def _layout(self) -> FieldLayout:
        """The reader's message.

        :raises KafkaSparkError: the message is not found, or has no columns.
        """
        return self._read_layout(self._files, "the reader's message")

    def _read_layout(self, files: bytes, what: str) -> FieldLayout:
        from airflow_kafka_spark.formats.protobuf.schema import MessageLayout, find_message

        return MessageLayout(what, self.recursive_fields_max_depth).describe_message(find_message(files, self.message, what))

    def get_arrow_schema(self) -> pa.Schema:
        """Return the fields of the reader's message; the registry is asked for it once.

        :raises KafkaSparkError: there is no such schema, or the registry does not return it.
        """
        from airflow_kafka_spark.formats.types import to_arrow_schema

        assert isinstance(self._layout.type, Struct)
        return to_arrow_schema(self._layout.type.fields)

    def make_decoder(self) -> Decoder:
        """Return a decoder that contains all schemas; the registry is asked for versions that are new since the last call.

        :raises KafkaSparkError: as :meth:`get_arrow_schema`.
        """
        from airflow_kafka_spark.formats.protobuf.tasks.decode import ProtobufDecoder

        cut = self.nanoseconds == "cut"
        if not self.registry:
            return ProtobufDecoder(self._files, self._layout, cut_nanoseconds=cut)
        versions = self._list_all_versions()
        writers, unusable = self._resolve_writers(versions)
        return ProtobufDecoder(self._files, self._layout, writers, unusable, self._describe_versions(versions), cut)

    def _resolve_writers(
        self, versions: Sequence[RegisteredSchema]
    ) -> tuple[dict[int, Mapping[tuple[int, ...], str]], dict[int, str]]:
        """Return the messages that can be read, by schema id, and for other ids the reason why their schema cannot be used."""
        from airflow_kafka_spark.formats.protobuf.schema import compile_schemas, find_message

        reader = find_message(self._files, self.message, "the reader's message")
        documents, unusable = dict[int, SchemaDocument](), dict[int, str]()
        for registered in versions:
            try:
                documents[registered.id] = self._load_document(registered)
            except SchemaUnusable as e:
                unusable[registered.id] = e.found
        writers = dict[int, Mapping[tuple[int, ...], str]]()
        for number, files in zip(documents, compile_schemas(list(documents.values())), strict=True):
            try:
                if isinstance(files, SchemaUnusable):
                    raise files
                writers[number] = _find_unreadable_messages(files, reader)
            except SchemaUnusable as e:
                unusable[number] = e.found
        return writers, unusable

    # --- writing -----------------------------------------------------------------------------------------------------

    def _find_writing_option_problems(self, where: str) -> list[Problem]:
        problems = [*super()._find_writing_option_problems(where), *self._find_own_option_problems(where)]
        if not problems:
            try:
                _check_packages()
            except PackageMissing as e:
                return [Problem(where, e.found, e.action)]
        return problems

    def _derive_schema(self, columns: Sequence[Column]) -> str:
        from airflow_kafka_spark.formats.protobuf.schema import derive_proto

        return derive_proto(columns, self.message or self.part.capitalize())

    def _find_message_to_write(self, document: SchemaDocument) -> tuple[bytes, FieldLayout]:
        given = isinstance(self.schema, bytes) and not self.registry
        files = self.schema if given and isinstance(self.schema, bytes) else _compile_document(document)
        return files, self._read_layout(files, document.name)

    def _list_fields_to_write(self, document: SchemaDocument) -> Sequence[Column]:
        return [node.column for node in self._find_message_to_write(document)[1].fields]

    def _find_mismatches(self, document: SchemaDocument, columns: Sequence[Column]) -> list[tuple[str, str]]:
        found = find_mismatches(columns, self._list_fields_to_write(document))
        return [*found, *self._name_mismatches(document, [c.name for c in columns])]

    def _name_mismatches(self, document: SchemaDocument, columns: Sequence[str]) -> list[tuple[str, str]]:
        # A field without a column is written as its default.
        return find_name_mismatches(self._list_fields_to_write(document), columns, required=())

    def _make_encoder(self, document: SchemaDocument, columns: Sequence[Column], header: bytes) -> RowEncoder:
        from airflow_kafka_spark.formats.protobuf.schema import list_messages
        from airflow_kafka_spark.formats.protobuf.tasks.encode import ProtobufEncoder, make_message_header

        files, layout = self._find_message_to_write(document)
        if header:
            path = next(path for path, message in list_messages(files) if message.full_name == layout.full_name)
            header = make_message_header(header, path)
        return ProtobufEncoder(files, layout, [c.name for c in columns], header)

    def find_connect_problems(self, where: str) -> list[Problem]:
        """Return the problems of writing values that have a schema, and a package that is missing."""
        try:
            _check_packages()
        except PackageMissing as e:
            return [Problem(where, e.found, e.action)]
        return super().find_connect_problems(where)

    def _make_encoder_for_schema(self, schema: Mapping[str, Any], what: str) -> tuple[tuple[Column, ...], RowEncoder]:
        from airflow_kafka_spark.formats.json.connect_schema import convert_connect_columns
        from airflow_kafka_spark.formats.protobuf.schema import (
            convert_connect_to_proto,
            find_message,
            list_field_numbers,
            make_message_name,
        )

        columns, named = convert_connect_columns(schema, is_typed=True), replace(self, message=make_message_name(schema))
        named.__dict__["_hook"] = self._hook
        document = SchemaDocument(convert_connect_to_proto(schema, columns, {}), (), what)
        subject = named._make_subject_to_write(document)
        is_registered = self._hook.find_id_of(subject, document.text, self.kind, self.normalize_schemas) is not None
        if not is_registered and self._hook.knows(subject):
            latest = named._load_document(self._hook.get_version(subject))
            numbers = list_field_numbers(find_message(_compile_document(latest), named.message, latest.name))
            document = SchemaDocument(convert_connect_to_proto(schema, columns, numbers), (), what)
        return columns, named._make_encoder(document, columns, make_wire_header(named._get_registered_id(document)))


def _check_packages() -> None:
    from importlib.util import find_spec

    for package, module in (("protobuf", "google.protobuf"), ("grpcio-tools", "grpc_tools")):
        try:
            found = find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise PackageMissing("Protobuf", package, "protobuf")


@lru_cache(maxsize=32)
def _compile_document(document: SchemaDocument) -> bytes:
    """Return the compiled schema. Cached, since fields, message and indexes are read from it separately, and each would start
    protoc.
    """
    from airflow_kafka_spark.formats.protobuf.schema import compile_schemas

    (files,) = compile_schemas([document])
    if isinstance(files, SchemaUnusable):
        raise files
    return files


def _find_unreadable_messages(files: bytes, reader: Descriptor) -> dict[tuple[int, ...], str]:
    """Return for each message of a writer's schema, by its indexes, the reason why it cannot be read; empty if it can."""
    from airflow_kafka_spark.formats.protobuf.schema import find_incompatibility, list_messages

    found = {}
    for path, message in list_messages(files):
        if message.full_name != reader.full_name:
            found[path] = f"the record is a `{message.full_name}`, expected `{reader.full_name}`"
        else:
            found[path] = find_incompatibility(message, reader)
    return found
