"""Formats whose schemas a schema registry may keep: Confluent's wire format, subjects, and the choice of the schema to write."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from airflow_kafka_spark.errors import KafkaSparkError, Problem, RegistryRefused, SchemaInvalid, SchemaUnusable, ValidationError
from airflow_kafka_spark.formats import types
from airflow_kafka_spark.formats.base import Encoder, Format, Part, StructEncoder, as_struct, find_duplicate_problems
from airflow_kafka_spark.formats.text_values import BadValue
from airflow_kafka_spark.formats.types import Array, Column, DataType, Decimal, Map, Struct, Text

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn

    from airflow_kafka_spark.hooks.schema_registry import SchemaRegistryHook
    from airflow_kafka_spark.hooks.tasks.registry_client import RegisteredSchema, RegistryRequests

_Self = TypeVar("_Self", bound="RegistryFormat")
log = logging.getLogger(__name__)

LATEST: Literal["latest"] = "latest"
OPTION_SCHEMA = "the option `schema`"
_MAX_REFERENCE_DEPTH = 20
_MAX_PROBLEM_CHARACTERS = 1000

# --- Confluent's wire format ----------------------------------------------------------------------------------------------

HEADER_BYTES = 5
"""The magic byte 0x00 and the id of the schema, big-endian in four bytes."""

_OTHER_ENCODINGS = {
    b"\xc3\x01": "it looks like Avro's single-object encoding",
    b"Obj\x01": "it looks like an Avro file",
    b"{": "it looks like JSON without a header",
}
"""Other encodings, by the bytes they begin with."""


def make_wire_header(schema_id: int) -> bytes:
    """Return the header of values that are written with this schema."""
    return b"\0" + schema_id.to_bytes(4, "big")


def read_schema_id(value: bytes) -> int:
    """Return the schema id in a value's header.

    :raises BadValue: the value has no such header.
    """
    if len(value) < HEADER_BYTES:
        raise BadValue(f"found {len(value)} bytes, expected at least {HEADER_BYTES}: the magic byte 0x00 and the id of a schema")
    if value[0]:
        like = next((f"; {what}" for begin, what in _OTHER_ENCODINGS.items() if value.startswith(begin)), "")
        raise BadValue(f"found the first byte 0x{value[0]:02x}, expected the magic byte 0x00 of Confluent's wire format{like}")
    return int.from_bytes(value[1:HEADER_BYTES], "big")


def describe_unknown_schema_id(number: int, known: str, unusable: Mapping[int, str]) -> str:
    """Return the reason why a record with this schema id is bad.

    :param known: the ids that are known, as text.
    :param unusable: for ids whose schema cannot be used, the reason.
    """
    if number in unusable:
        return f"found schema id {number}: {unusable[number]}"
    return f"found schema id {number}, expected one of {known}"


# --- subjects -------------------------------------------------------------------------------------------------------------

SubjectNameStrategy = Literal["TopicNameStrategy", "RecordNameStrategy", "TopicRecordNameStrategy"]
STRATEGIES = ("TopicNameStrategy", "RecordNameStrategy", "TopicRecordNameStrategy")


def make_subject(strategy: str, topic: str, part: str, record: str) -> str:
    """Return the subject under which a strategy keeps the schemas of a topic's keys or values.

    :param record: the full name of the record; the topic name strategy does not use it.
    """
    if strategy == "TopicNameStrategy":
        return f"{topic}-{part}"
    return record if strategy == "RecordNameStrategy" else f"{topic}-{record}"


def format_numbers(numbers: Sequence[int]) -> str:
    """Return up to eight numbers as a list, more as the range from the smallest to the largest."""
    ordered = sorted(numbers)
    return ", ".join(map(str, ordered)) if len(ordered) <= 8 else f"{ordered[0]} to {ordered[-1]}"


# --- which columns a schema takes -----------------------------------------------------------------------------------------

INTEGER_BITS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}


def find_mismatches(columns: Sequence[Column], fields: Sequence[Column], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the reasons why columns cannot be written as the fields of a schema: each problem, and the action.

    A value is never converted to fit. This function compares types; a value that does not fit is reported with its row.

    :param columns: the columns of the rows.
    :param fields: the columns that the schema describes.
    """
    known = {f.name: f for f in fields}
    seen: set[str] = set()
    for column in columns:
        here = f"{path}{column.name}"
        if column.name in seen:
            yield f"column `{here}` is there twice", "Rename one of them"
        elif column.name not in known:
            yield f"the schema has no field for column `{here}`", "Leave the column out, or give the schema such a field"
        else:
            yield from _find_type_mismatches(column.type, known[column.name].type, here)
        seen.add(column.name)


def find_name_mismatches(fields: Sequence[Column], columns: Sequence[str], required: Collection[str]) -> list[tuple[str, str]]:
    """Return the reasons why columns of these names cannot be written as the fields of a schema: each problem, and the action.

    :param required: the names of the fields that need a column.
    """
    known = {f.name for f in fields}
    action = "Leave the column out, or give the schema such a field"
    unknown = [(f"the schema has no field for column `{c}`", action) for c in columns if c not in known]
    missing = [f.name for f in fields if f.name in required and f.name not in columns]
    return unknown + [(f"there is no column for field `{name}`, which is required", "Add the column") for name in missing]


def _find_type_mismatches(found: DataType, wanted: DataType, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(found, Struct) and isinstance(wanted, Struct):
        yield from find_mismatches(found.fields, wanted.fields, f"{path}.")
    elif isinstance(found, Array) and isinstance(wanted, Array):
        yield from _find_type_mismatches(found.element, wanted.element, f"{path}[]")
    elif isinstance(found, Map) and isinstance(wanted, Map):
        yield from _find_type_mismatches(found.key, wanted.key, f"{path} (its keys)")
        yield from _find_type_mismatches(found.value, wanted.value, f"{path}[]")
    elif not _accepts(wanted, found):
        yield f"column `{path}` is of type {found}, and its field takes {wanted}", "Cast the column, or change the schema"


def _accepts(wanted: DataType, found: DataType) -> bool:
    if isinstance(found, Text):
        return isinstance(wanted, Text)
    if isinstance(wanted, Decimal):
        if isinstance(found, Decimal):
            return found.scale <= wanted.scale and found.precision - found.scale <= wanted.precision - wanted.scale
        # The field of a uint64: negative numbers are reported with their rows.
        return str(found) in INTEGER_BITS and (wanted.precision - wanted.scale >= 19 or str(found) != "bigint")
    if str(found) in INTEGER_BITS:
        return str(wanted) in INTEGER_BITS or (str(wanted) == "double" and str(found) != "bigint")
    return str(found) == str(wanted) or (str(found), str(wanted)) == ("float", "double")


# --- the formats ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SchemaDocument:
    """The text of a schema with the schemas that it refers to.

    :param text: the schema.
    :param references: name and text of each schema it refers to.
    :param name: the schema's description in messages.
    """

    text: str
    references: tuple[tuple[str, str], ...] = ()
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class RegistryFormat(Format):
    """Base of the formats whose schemas a registry may keep; its subclasses define what a schema is.

    :param registry: the Airflow connection of the schema registry (:class:`.SchemaRegistryHook`); default empty.
    :param subject: the subject of the schemas; default: derived from the topics by ``subject_name_strategy``.
    :param subject_name_strategy: Confluent's ``TopicNameStrategy`` (``<topic>-value``), ``RecordNameStrategy`` or
        ``TopicRecordNameStrategy``; default ``TopicNameStrategy``.
    :param reader_schema: the schema that defines the columns: ``latest`` (default), a version of the subject, or a schema's text.
    :param auto_register_schemas: when writing, register the schema if it is compatible. False: the schema must be registered
        already. Default True, unless ``use_latest_version`` is set.
    :param use_latest_version: write with the subject's latest schema; the columns have to fit it. Default False.
    :param normalize_schemas: treat schemas as equal that differ only in their notation; default False.
    :param topics: set by :meth:`of_topics`; default none.
    :param part: set by :meth:`of_topics`; default ``value``.
    """

    registry: str = ""
    subject: str | None = None
    subject_name_strategy: SubjectNameStrategy = "TopicNameStrategy"
    reader_schema: str | int | Literal["latest"] = LATEST
    auto_register_schemas: bool | None = None
    use_latest_version: bool = False
    normalize_schemas: bool = False
    topics: tuple[str, ...] = ()
    part: Part = "value"

    kind: ClassVar[str]
    """The schema type, as the registry names it."""
    name_option: ClassVar[str]
    """The option that determines the name of the records to read."""

    def of_topics(self: _Self, topics: Sequence[str], part: Part) -> _Self:
        """Return this format for these topics, from which subjects are derived."""
        return replace(self, topics=tuple(topics), part=part)

    @abstractmethod
    def _find_record_name(self) -> str:
        """Return the full name of the records to read, for the strategies that use it; empty if it is unknown."""

    @property
    def _has_schema(self) -> bool:
        """Return True if the option ``schema`` is given. Each format has this option, with its own types."""
        return bool(getattr(self, "schema", ""))

    @property
    @abstractmethod
    def _schema_text(self) -> str:
        """Return the text of the option ``schema``, or of the schema derived from it; empty if it is not given.

        :raises SchemaInvalid: the schema is given as columns that cannot be read.
        """

    def __getstate__(self) -> dict[str, Any]:
        # The hook's client holds connections and a lock.
        return {name: value for name, value in self.__dict__.items() if name != "_hook"}

    # --- options -----------------------------------------------------------------------------------------------------

    def validate(self, where: str) -> list[Problem]:
        """Return the problems of the options and of the schemas; asks the registry if there is one."""
        try:
            problems = self._find_option_problems(where)
            if not problems:
                self._check_readable()
            return problems
        except KafkaSparkError as e:
            return [self._find_problem_of(where, e)]

    @abstractmethod
    def _find_option_problems(self, where: str) -> list[Problem]:
        """Return the problems of the options for reading, without asking the registry."""

    @abstractmethod
    def _check_readable(self) -> None:
        """Check that there are columns to read.

        :raises KafkaSparkError: the schemas are not available, or they have no columns.
        """

    def _find_strategy_problems(self, where: str) -> list[Problem]:
        if self.subject_name_strategy in STRATEGIES:
            return []
        found = f"found {self.subject_name_strategy!r}; expected one of {', '.join(STRATEGIES)}"
        return [Problem(f"{where}.subject_name_strategy", found, "Write it as Confluent's serializers do")]

    def _find_subject_problems(self, where: str, nameless: str) -> list[Problem]:
        """Return the problems of the options that determine subjects.

        :param nameless: the problem when subjects are named after topics, and no topic is known.
        """
        problems = self._find_strategy_problems(where)
        if not problems and self.registry and not self._subjects_known:
            by_topic = self.subject_name_strategy == "TopicNameStrategy"
            found = nameless if by_topic else "the record's name is unknown"
            action = "Give `subject`" if by_topic else f"Give `subject` or `{self.name_option}`"
            problems = [Problem(f"{where}.subject", found, action)]
        return problems

    def _find_registry_problems(self, where: str) -> list[Problem]:
        """Return the problems of the options of this class for reading."""
        problems = self._find_subject_problems(where, "the subject is unknown")
        if isinstance(self.reader_schema, bool) or not isinstance(self.reader_schema, (str, int)):
            found = f"found {self.reader_schema!r}; expected latest, a version or a schema's text"
            problems.append(Problem(f"{where}.reader_schema", found, "Leave it out to read with the latest version"))
        elif not self.registry and isinstance(self.reader_schema, int):
            problems.append(Problem(f"{where}.reader_schema", "a version is one of a registry", "Give the schema's text"))
        if not self.registry and not self._has_schema:
            action = "Give `schema` for values without a header, `registry` for Confluent's wire format"
            problems.append(Problem(where, "found neither of `schema` and `registry`; expected one of them", action))
        return problems

    def _find_problem_of(self, where: str, error: KafkaSparkError) -> Problem:
        if isinstance(error, SchemaInvalid):
            return Problem(f"{where}.schema", f"{error.found}; expected {error.expected}", error.action)
        option = "reader_schema" if self._reader_given else "registry" if self.registry else "schema"
        return Problem.of(f"{where}.{option}", error)

    @property
    def _subjects_known(self) -> bool:
        if self.subject:
            return True
        return bool(self.topics) and (self.subject_name_strategy == "TopicNameStrategy" or bool(self._find_record_name()))

    @property
    def _reader_given(self) -> bool:
        """Return True if ``reader_schema`` is the text of a schema."""
        return isinstance(self.reader_schema, str) and self.reader_schema not in (LATEST, "")

    @cached_property
    def subjects(self) -> tuple[str, ...]:
        """The subjects whose schemas records may have."""
        if self.subject:
            return (self.subject,)
        name = "" if self.subject_name_strategy == "TopicNameStrategy" else self._find_record_name()
        return tuple(dict.fromkeys(make_subject(self.subject_name_strategy, t, self.part, name) for t in self.topics))

    # --- the schemas of the registry ---------------------------------------------------------------------------------

    @cached_property
    def _hook(self) -> SchemaRegistryHook:
        from airflow_kafka_spark.hooks.schema_registry import SchemaRegistryHook

        return SchemaRegistryHook(self.registry)

    def _load_document(self, registered: RegisteredSchema) -> SchemaDocument:
        """Return a registered schema with the schemas it refers to, by name.

        :raises SchemaUnusable: the schema is of another type.
        """
        self._check_kind(registered)
        references: dict[str, str] = {}
        if registered.references:
            self._collect_references(registered.subject, registered.version, references, 0)
        return SchemaDocument(registered.text, tuple(references.items()), str(registered))

    def _check_kind(self, registered: RegisteredSchema) -> None:
        if registered.kind != self.kind:
            detail = f"it is of type {registered.kind}, not {self.kind}"
            raise SchemaUnusable(str(registered), detail, "Read the topic with its own format")

    def _collect_references(self, subject: str, version: int, found: dict[str, str], depth: int) -> None:
        with self._hook._translate_errors(f"version {version} of subject `{subject}`"):
            schema = self._hook.client.get_version(subject, version, deleted=True).schema
        for reference in schema.references or () if depth < _MAX_REFERENCE_DEPTH else ():
            name, of, number = str(reference.name), str(reference.subject), int(reference.version or 0)
            if name not in found:
                found[name] = self._hook.get_version(of, number).text
                self._collect_references(of, number, found, depth + 1)

    @cached_property
    def _reader_document(self) -> SchemaDocument:
        """The schema that defines the columns; the registry is asked for it once.

        :raises KafkaSparkError: it does not exist, or the registry does not return it.
        """
        if self._reader_given:
            return SchemaDocument(str(self.reader_schema), (), "the option `reader_schema`")
        if self.registry:
            return self._load_document(self._find_reader_version())
        return SchemaDocument(self._schema_text, (), OPTION_SCHEMA)

    def _find_reader_version(self) -> RegisteredSchema:
        """Return the registered schema that defines the columns.

        :raises SchemaUnusable: the subjects of several topics have different ones.
        """
        chosen = tuple(self._hook.get_version(subject, self.reader_schema) for subject in self.subjects)
        if any((c.text, c.references) != (chosen[0].text, chosen[0].references) for c in chosen):
            named = " and ".join(map(str, chosen[:2]))
            detail = "they are different, and all topics need equal columns"
            raise SchemaUnusable(named, detail, "Give the text of one as `reader_schema`")
        self.__dict__["_known"] = chosen
        return chosen[0]

    def _list_all_versions(self) -> tuple[RegisteredSchema, ...]:
        """Return all schemas that records may have; the registry is asked for those that are new since the last call."""
        known: tuple[RegisteredSchema, ...] = self.__dict__.get("_known", ())
        found = tuple(v for s in self.subjects for v in self._hook.list_versions(s, known))
        self.__dict__["_known"] = found
        return found

    def _describe_versions(self, versions: Sequence[RegisteredSchema]) -> str:
        """Return ids, subjects and versions for a message."""
        of = ", ".join(
            f"`{s}` (versions {format_numbers([v.version for v in versions if v.subject == s])})" for s in self.subjects
        )
        return f"{format_numbers([v.id for v in versions])} of {of}"

    # --- the schema to write -----------------------------------------------------------------------------------------

    @abstractmethod
    def _derive_schema(self, columns: Sequence[types.Column]) -> str:
        """Return the text of a schema derived from columns.

        :raises SchemaUnusable: a column has no counterpart.
        """

    @abstractmethod
    def _find_mismatches(self, document: SchemaDocument, columns: Sequence[types.Column]) -> list[tuple[str, str]]:
        """Return the reasons why columns cannot be written with a schema: each problem, and the action.

        :raises SchemaUnusable: the schema cannot be written with.
        """

    @abstractmethod
    def _name_mismatches(self, document: SchemaDocument, columns: Sequence[str]) -> list[tuple[str, str]]:
        """Return the mismatches that the names of the columns alone show, as :meth:`_find_mismatches` does."""

    @abstractmethod
    def _make_encoder(self, document: SchemaDocument, columns: Sequence[types.Column], header: bytes) -> StructEncoder:
        """Return the encoder of rows.

        :param header: the bytes before every value.
        """

    @property
    def _derives_schema(self) -> bool:
        """Return True if the schema to write is derived from the columns."""
        return not self._has_schema and not self.use_latest_version

    def find_encoding_problems(self, where: str, columns: Sequence[str]) -> list[Problem]:
        """Return the problems of writing rows that options, schema and column names show.

        Asks the registry if it has the schema or would accept it, and changes nothing there.
        """
        problems = self._find_writing_option_problems(where) or find_duplicate_problems(where, columns)
        if problems or not columns:
            return problems or [Problem(where, "there is no column to write", "Name some")]
        try:
            if self._derives_schema:
                # The schema follows from the types, which are not known yet: only check that the registry answers.
                found = self._find_derivation_problems(where, columns)
                if not found:
                    self._hook.knows(self._make_subject_to_write(None))
                return found
            document, number = self._get_given_schema()
            found = [Problem(where, *mismatch) for mismatch in self._name_mismatches(document, columns)]
            return found or (self._find_registration_problems(where, document) if self.registry and number is None else [])
        except KafkaSparkError as e:
            at = "schema" if isinstance(e, SchemaUnusable) and self._has_schema else "registry" if self.registry else "schema"
            return [Problem.of(f"{where}.{at}", e)]

    def _find_derivation_problems(self, where: str, columns: Sequence[str]) -> list[Problem]:
        """Return the reasons why no schema can be derived from columns of these names."""
        return []

    def _find_writing_option_problems(self, where: str) -> list[Problem]:
        """Return the problems of the options for writing, without asking the registry."""
        problems = []
        if not self.registry and not self._has_schema:
            action = "Give `registry`, or `schema` for values without a header, which no reader could decode without it"
            problems.append(Problem(where, "found neither `schema` nor `registry`", action))
        problems += self._find_written_subject_problems(where)
        if self.use_latest_version and (self.auto_register_schemas or self._has_schema):
            other = "schema" if self._has_schema else "auto_register_schemas"
            problems.append(Problem(f"{where}.use_latest_version", f"it is there beside `{other}`", "Leave one of them out"))
        if self._derives_schema and self.auto_register_schemas is False:
            action = "Give the registered schema as `schema`, or set `use_latest_version=True`"
            found = "a schema that is made of columns has to be registered"
            problems.append(Problem(f"{where}.auto_register_schemas", found, action))
        return problems

    def _find_written_subject_problems(self, where: str) -> list[Problem]:
        problems = self._find_subject_problems(where, "no topic is known")
        if not problems and self.registry and len(self.subjects) != 1:
            problems = [Problem(f"{where}.subject", f"there are {len(self.subjects)}; expected one", "Give `subject`")]
        return problems

    def _make_subject_to_write(self, document: SchemaDocument | None) -> str:
        """Return the subject of the schema to write.

        :param document: the schema; None while it is unknown.
        """
        (subject,) = self.subjects
        return subject

    def _get_given_schema(self) -> tuple[SchemaDocument, int | None]:
        """Return the schema to write that does not depend on the columns, and its id if it is registered."""
        if not self.use_latest_version:
            return SchemaDocument(self._schema_text, (), OPTION_SCHEMA), None
        latest = self._hook.get_version(self._make_subject_to_write(None), LATEST)
        return self._load_document(latest), latest.id

    def _find_registration_problems(self, where: str, document: SchemaDocument) -> list[Problem]:
        """Return the problem of a schema that is not registered and cannot be."""
        subject, normalize = self._make_subject_to_write(document), self.normalize_schemas
        if self._hook.find_id_of(subject, document.text, self.kind, normalize) is not None:
            return []
        if self.auto_register_schemas is False:
            found = f"the schema of {document.name} is not registered for subject `{subject}`"
            return [Problem(f"{where}.schema", found, "Register it, or set `auto_register_schemas=True`")]
        reasons = self._hook.find_incompatibilities(subject, document.text, self.kind, normalize)
        if not reasons:
            return []
        explained = "; ".join(self._explain(reasons, subject, document))
        found = f"subject `{subject}` does not take the schema of {document.name}: {explained}"
        action = "Make the change a compatible one, or change the subject's compatibility"
        return [Problem(f"{where}.schema", found[:_MAX_PROBLEM_CHARACTERS], action)]

    def _explain(self, reasons: list[str], subject: str, document: SchemaDocument) -> list[str]:
        """Return the registry's reasons against a schema; without any, reasons that are found here."""
        return reasons

    def encode(self, columns: Sequence[str]) -> SparkColumn:
        """Return the rows themselves as a struct; tasks encode them with :meth:`make_struct_encoder`."""
        return as_struct(columns)

    @property
    def encodes_in_tasks(self) -> bool:
        """True: tasks make the bytes, not :meth:`encode`."""
        return True

    def find_column_problems(self, columns: Sequence[types.Column]) -> list[Problem]:
        """Return the problems that prevent writing rows of these columns. Asks the registry, and changes nothing there.

        :param columns: names and types of the columns to write, in order.
        :raises KafkaSparkError: the registry does not answer, or a schema is missing.
        """
        document, number = self._find_schema_for(columns)
        problems = self._find_column_problems(document, columns)
        if problems or not self.registry or number is not None:
            return problems
        return self._find_registration_problems(self.part, document)

    def _find_schema_for(self, columns: Sequence[types.Column]) -> tuple[SchemaDocument, int | None]:
        """Return the schema to write rows of these columns with, and its id if it is registered."""
        if not self._derives_schema:
            return self._get_given_schema()
        return SchemaDocument(self._derive_schema(columns), (), f"the columns of the {self.part}"), None

    def _find_column_problems(self, document: SchemaDocument, columns: Sequence[types.Column]) -> list[Problem]:
        return [Problem(self.part, *mismatch) for mismatch in dict.fromkeys(self._find_mismatches(document, columns))]

    def make_struct_encoder(self, columns: Sequence[types.Column]) -> StructEncoder:
        """Return the encoder that tasks use. The schema is registered, or looked up, before this method returns.

        :param columns: names and types of the columns to write, in order.
        :raises ValidationError: the columns do not fit the schema, or the registry does not accept it.
        :raises KafkaSparkError: the registry does not answer, or refuses.
        """
        document, number = self._find_schema_for(columns)
        if problems := self._find_column_problems(document, columns):
            raise ValidationError(problems)
        if not self.registry:
            return self._make_encoder(document, columns, b"")
        return self._make_encoder(
            document, columns, make_wire_header(self._get_registered_id(document) if number is None else number)
        )

    def _get_registered_id(self, document: SchemaDocument) -> int:
        """Return the id of a schema, which is registered if it is not yet.

        :raises ValidationError: the registry does not accept it.
        """
        if problems := self._find_registration_problems(self.part, document):
            raise ValidationError(problems)
        subject, normalize = self._make_subject_to_write(document), self.normalize_schemas
        number = self._hook.find_id_of(subject, document.text, self.kind, normalize)
        if number is None:
            try:
                number = self._hook.register(subject, document.text, self.kind, normalize)
            except RegistryRefused as e:
                raise ValidationError([Problem(f"{self.part}.schema", e.found, e.action)]) from None
            log.info("Registered the schema of %s for subject `%s`: id %d", document.name, subject, number)
        return number

    # --- values that have a schema -----------------------------------------------------------------------------------

    schema_options: ClassVar[tuple[str, ...]] = ()
    """The options that determine a schema or its name; empty if values with a schema cannot be written."""

    @property
    def takes_connect_schemas(self) -> bool:
        """True if values are written with the schemas that they have."""
        return bool(self.schema_options)

    def find_connect_problems(self, where: str) -> list[Problem]:
        """Return the problems of writing values that have a schema. Asks the registry if it answers."""
        found = "each value has the schema of its table"
        given = [name for name in self.schema_options if getattr(self, name)]
        problems = [Problem(f"{where}.{name}", found, "Leave it out") for name in given]
        problems += self._find_strategy_problems(where)
        if not self.registry:
            unread = "without a registry no reader has the schemas of tables"
            problems.append(Problem(f"{where}.registry", unread, "Give `registry`"))
        if not problems:
            try:
                self._hook.knows(self.subject or next(iter(self.topics), "") or "airflow-kafka-spark")
            except KafkaSparkError as error:
                problems.append(Problem.of(f"{where}.registry", error))
        return problems

    def make_connect_encoder(self, column: str, topic: str | None) -> Encoder | None:
        """Return the encoder of values that have a schema. Tasks ask the registry, and register the schemas."""
        from airflow_kafka_spark.formats.json.tasks.connect_encoder import ConnectEncoder

        return ConnectEncoder(self, column, topic, self._hook.make_task_client())

    def make_encoder_for_schema(
        self: _Self, schema: Mapping[str, Any], topic: str, registry: RegistryRequests
    ) -> tuple[tuple[Column, ...], StructEncoder]:
        """Return the columns of values of a Connect schema, and their encoder. The schema is registered if it is not yet.

        Called in tasks.

        :param schema: of a struct.
        :param topic: the topic to which the values are written.
        :param registry: the registry.
        :raises BadValue: the schema has no fields.
        :raises SchemaUnusable: the format has no counterpart of it.
        :raises ValidationError: the registry does not accept it.
        """
        made = self.of_topics((topic,), self.part)
        made.__dict__["_hook"] = registry
        return made._make_encoder_for_schema(schema, f"`{topic}`")

    def _make_encoder_for_schema(self, schema: Mapping[str, Any], what: str) -> tuple[tuple[Column, ...], StructEncoder]:
        """Return the columns of values of a Connect schema, and their encoder; see :meth:`make_encoder_for_schema`.

        :param what: the topic, in words.
        """
        raise NotImplementedError(f"{type(self).__name__} does not write values that have a schema")
