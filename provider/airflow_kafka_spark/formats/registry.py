"""Confluent's wire format: a magic byte, the id of the schema in four bytes, big-endian, and then the value. Pure."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from airflow_kafka_spark.errors import KafkaSparkError, Problem, RegistryRefused, SchemaInvalid, SchemaUnusable, ValidationError
from airflow_kafka_spark.formats import types
from airflow_kafka_spark.formats.base import Format, Part, as_struct
from airflow_kafka_spark.formats.json.logical_types import plain
from airflow_kafka_spark.formats.text import BadValue
from airflow_kafka_spark.formats.types import Array, Column, DataType, Decimal, Map, Struct, Text

if TYPE_CHECKING:
    from pyspark.sql import Column

    from airflow_kafka_spark.formats.tasks.row_encoder import RowEncoder
    from airflow_kafka_spark.hooks.schema_registry import RegisteredSchema, SchemaRegistryHook


HEADER = 5
_OTHERS = {
    b"\xc3\x01": "it looks like Avro's single-object encoding",
    b"Obj\x01": "it looks like an Avro file",
    b"{": "it looks like JSON without a header",
}
"""What else begins so."""
SubjectNameStrategy = Literal["TopicNameStrategy", "RecordNameStrategy", "TopicRecordNameStrategy"]
STRATEGIES = ("TopicNameStrategy", "RecordNameStrategy", "TopicRecordNameStrategy")


def header(schema_id: int) -> bytes:
    """What stands before a value of this schema."""
    return b"\0" + schema_id.to_bytes(4, "big")


def schema_id(value: bytes) -> int:
    """The id that a value names.

    :raises BadValue: it has no such header.
    """
    if len(value) < HEADER:
        raise BadValue(f"found {len(value)} bytes, expected at least {HEADER}: the magic byte 0x00 and the id of a schema")
    if value[0]:
        like = next((f"; {what}" for begin, what in _OTHERS.items() if value.startswith(begin)), "")
        raise BadValue(f"found the first byte 0x{value[0]:02x}, expected the magic byte 0x00 of Confluent's wire format{like}")
    return int.from_bytes(value[1:HEADER], "big")


def subject_of(strategy: str, topic: str, part: str, record: str) -> str:
    """The subject under which a strategy keeps the schemas of a topic's keys or values.

    :param record: the full name of the record, which all strategies but the topic's use.
    """
    if strategy == "TopicNameStrategy":
        return f"{topic}-{part}"
    return record if strategy == "RecordNameStrategy" else f"{topic}-{record}"


def span(numbers: Sequence[int]) -> str:
    """Numbers for people: all of a few, the ends of many."""
    ordered = sorted(numbers)
    return ", ".join(map(str, ordered)) if len(ordered) <= 8 else f"{ordered[0]} to {ordered[-1]}"


# --- row_values --------------------
# Which columns a field of a schema takes, for formats that write row by row. Pure.


INTEGERS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}


def misfits(columns: Sequence[Column], fields: Sequence[Column], path: str = "") -> Iterator[tuple[str, str]]:
    """Why columns cannot be written as fields, with what to do about it. A value is never written as something else: what does
    not fit by its type is told here, what does not fit by its value when its row is met.

    :param columns: of the rows.
    :param fields: of the schema.
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
            yield from _misfits(column.type, plain(known[column.name].type), here)
        seen.add(column.name)


def _misfits(found: DataType, wanted: DataType, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(found, Struct) and isinstance(wanted, Struct):
        yield from misfits(found.fields, wanted.fields, f"{path}.")
    elif isinstance(found, Array) and isinstance(wanted, Array):
        yield from _misfits(found.element, wanted.element, f"{path}[]")
    elif isinstance(found, Map) and isinstance(wanted, Map):
        yield from _misfits(found.key, wanted.key, f"{path} (its keys)")
        yield from _misfits(found.value, wanted.value, f"{path}[]")
    elif not _taken(found, wanted):
        yield f"column `{path}` is of type {found}, and its field takes {wanted}", "Cast the column, or change the schema"


def _taken(found: DataType, wanted: DataType) -> bool:
    if isinstance(found, Text):
        return isinstance(wanted, Text)
    if isinstance(wanted, Decimal):
        if isinstance(found, Decimal):
            return found.scale <= wanted.scale and found.precision - found.scale <= wanted.precision - wanted.scale
        # Of a uint64: numbers below 0 are told with their rows.
        return str(found) in INTEGERS and (wanted.precision - wanted.scale >= 19 or str(found) != "bigint")
    if str(found) in INTEGERS:
        return str(wanted) in INTEGERS or (str(wanted) == "double" and str(found) != "bigint")
    return str(found) == str(wanted) or (str(found), str(wanted)) == ("float", "double")


# --- registry --------------------
# What formats in Confluent's wire format share: subjects, the schemas of a registry, and which of them is written.


_Self = TypeVar("_Self", bound="Registered")
log = logging.getLogger(__name__)

_MAX_DEPTH, _SHOWN = 20, 1000
GIVEN = "the option `schema`"
LATEST: Literal["latest"] = "latest"


@dataclass(frozen=True)
class Document:
    """A schema and what it refers to.

    :param text: the schema.
    :param references: the texts of the schemas that it refers to, by the names by which it does.
    :param name: which one it is, as it stands in a sentence.
    """

    text: str
    references: tuple[tuple[str, str], ...] = ()
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Registered(Format):
    """A format whose schemas a registry may keep. Its subclasses say what a schema is.

    :param registry: the Airflow connection of the schema registry (:class:`.SchemaRegistryHook`).
    :param subject: the subject of the schemas; default what the strategy says of the topics.
    :param subject_name_strategy: Confluent's ``TopicNameStrategy`` (``<topic>-value``), ``RecordNameStrategy`` or
        ``TopicRecordNameStrategy``.
    :param reader_schema: what columns there are: ``latest``, a version of the subject, or a schema's text.
    :param auto_register_schemas: to write: register the schema, if it is compatible. False: it has to be registered already.
        Default True, but for ``use_latest_version``.
    :param use_latest_version: to write with the subject's latest schema, whatever columns there are; they have to fit it.
    :param normalize_schemas: schemas that differ only in what means nothing are the same.
    :param topics: what :meth:`of_topics` has been told.
    :param part: what :meth:`of_topics` has been told.
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
    """The registry's word for it."""

    def of_topics(self: _Self, topics: Sequence[str], part: Part) -> _Self:
        """The same for these topics, which subjects are named after."""
        return replace(self, topics=tuple(topics), part=part)

    @abstractmethod
    def _record_name(self) -> str:
        """The full name that all strategies but the topic's go by; empty where it is not known."""

    @property
    @abstractmethod
    def _has_own(self) -> bool:
        """Whether there is a schema of one's own, the option ``schema``."""

    @property
    @abstractmethod
    def _own(self) -> str:
        """The text of the schema of one's own, to write and, without a registry, to read with; empty without one.

        :raises SchemaInvalid: columns that it is made of cannot be read.
        """

    def __getstate__(self) -> dict[str, Any]:
        # The client holds connections and a lock.
        return {name: value for name, value in self.__dict__.items() if name != "_hook"}

    # --- options -----------------------------------------------------------------------------------------------------

    def validate(self, where: str) -> list[Problem]:
        """What is wrong with the options, the schemas, or the registry, which is asked if there is one."""
        problems = self._option_problems(where)
        if problems:
            return problems
        try:
            self._check_readable()
        except KafkaSparkError as e:
            return [self._told(where, e)]
        return []

    @abstractmethod
    def _option_problems(self, where: str) -> list[Problem]:
        """What is wrong with the options to read, asking nobody."""

    @abstractmethod
    def _check_readable(self) -> None:
        """:raises KafkaSparkError: schemas cannot be had, or not be read by."""

    def _subject_problems(self, where: str, nameless: str) -> list[Problem]:
        """:param nameless: what is told of subjects that are named after topics, where none is known."""
        if self.subject_name_strategy not in STRATEGIES:
            found = f"found {self.subject_name_strategy!r}; expected one of {', '.join(STRATEGIES)}"
            return [Problem(f"{where}.subject_name_strategy", found, "Write it as Confluent's serializers do")]
        if self.registry and not self._subjects_known:
            by_topic = self.subject_name_strategy == "TopicNameStrategy"
            found = nameless if by_topic else "the name of the records is not known"
            return [Problem(f"{where}.subject", found, "Give `subject`" + ("" if by_topic else ", or say the name"))]
        return []

    def _registry_problems(self, where: str) -> list[Problem]:
        """What is wrong with the options, asking nobody."""
        problems = self._subject_problems(where, "no subject is known")
        if isinstance(self.reader_schema, bool) or not isinstance(self.reader_schema, (str, int)):
            found = f"found {self.reader_schema!r}; expected latest, a version or a schema's text"
            problems.append(Problem(f"{where}.reader_schema", found, "Leave it out to read with the latest version"))
        elif not self.registry and isinstance(self.reader_schema, int):
            problems.append(Problem(f"{where}.reader_schema", "a version is one of a registry", "Give the schema's text"))
        if not self.registry and not self._has_own:
            action = "Give `schema` for values without a header, `registry` for Confluent's wire format"
            problems.append(Problem(where, "found neither `schema` nor `registry`; expected one of them", action))
        return problems

    def _told(self, where: str, error: KafkaSparkError) -> Problem:
        if isinstance(error, SchemaInvalid):
            return Problem(f"{where}.schema", f"{error.found}; expected {error.expected}", error.action)
        option = "reader_schema" if self._reader_given else "registry" if self.registry else "schema"
        return Problem(f"{where}.{option}", error.found, error.action)

    @property
    def _subjects_known(self) -> bool:
        if self.subject:
            return True
        return bool(self.topics) and (self.subject_name_strategy == "TopicNameStrategy" or bool(self._record_name()))

    @property
    def _reader_given(self) -> bool:
        """Whether the reader's schema is a text of the user's."""
        return isinstance(self.reader_schema, str) and self.reader_schema not in (LATEST, "")

    @cached_property
    def subjects(self) -> tuple[str, ...]:
        """The subjects whose schemas records may have."""
        if self.subject:
            return (self.subject,)
        name = "" if self.subject_name_strategy == "TopicNameStrategy" else self._record_name()
        return tuple(dict.fromkeys(subject_of(self.subject_name_strategy, t, self.part, name) for t in self.topics))

    # --- the registry ------------------------------------------------------------------------------------------------

    @cached_property
    def _hook(self) -> SchemaRegistryHook:
        from airflow_kafka_spark.hooks.schema_registry import SchemaRegistryHook

        return SchemaRegistryHook(self.registry)

    def _document(self, registered: RegisteredSchema) -> Document:
        """A registered schema with what it refers to, by name.

        :raises SchemaUnusable: it is of another kind.
        """
        if registered.kind != self.kind:
            detail = f"it is of type {registered.kind}, not {self.kind}"
            raise SchemaUnusable(str(registered), detail, "Read the topic with its own format")
        found: dict[str, str] = {}
        if registered.references:
            self._collect(registered.subject, registered.version, found, 0)
        return Document(registered.text, tuple(found.items()), str(registered))

    def _collect(self, subject: str, version: int, found: dict[str, str], depth: int) -> None:
        with self._hook._asking(f"version {version} of subject `{subject}`"):
            schema = self._hook.client.get_version(subject, version, deleted=True).schema
        for reference in schema.references or () if depth < _MAX_DEPTH else ():
            name, of, number = str(reference.name), str(reference.subject), int(reference.version or 0)
            if name not in found:
                found[name] = self._hook.version(of, number).text
                self._collect(of, number, found, depth + 1)

    def _chosen(self) -> RegisteredSchema:
        """The subjects' schema that is the reader's.

        :raises SchemaUnusable: the subjects of several topics have different ones.
        """
        chosen = [self._hook.version(subject, self.reader_schema) for subject in self.subjects]
        if any((c.text, c.references) != (chosen[0].text, chosen[0].references) for c in chosen):
            named = " and ".join(map(str, chosen[:2]))
            detail = "they are different, and columns are the same for all topics"
            raise SchemaUnusable(named, detail, "Give the text of one as `reader_schema`")
        return chosen[0]

    def _all_versions(self) -> tuple[RegisteredSchema, ...]:
        """All schemas that records may have; asked for are those that have come since the last time."""
        known: tuple[RegisteredSchema, ...] = self.__dict__.get("_known", ())
        found = tuple(v for s in self.subjects for v in self._hook.versions(s, known))
        self.__dict__["_known"] = found
        return found

    def _known_as(self, versions: Sequence[RegisteredSchema]) -> str:
        """Those, as they stand in a sentence."""
        of = ", ".join(f"`{s}` (versions {span([v.version for v in versions if v.subject == s])})" for s in self.subjects)
        return f"{span([v.id for v in versions])} of {of}"

    # --- what is written ---------------------------------------------------------------------------------------------

    @abstractmethod
    def _made_of(self, columns: Sequence[types.Column]) -> str:
        """The text of a schema that is made of columns.

        :raises SchemaUnusable: one has no counterpart.
        """

    @abstractmethod
    def _fields_to_write(self, document: Document) -> Sequence[types.Column]:
        """The columns that a schema takes.

        :raises SchemaUnusable: it cannot be written with.
        """

    @abstractmethod
    def _lacking(self, fields: Sequence[types.Column], columns: Sequence[str]) -> list[str]:
        """The fields without which nothing can be written, and for which there is no column."""

    @abstractmethod
    def _encoder(self, document: Document, columns: Sequence[str], prefix: bytes) -> RowEncoder:
        """What writes rows with a schema.

        :param prefix: what stands before every value.
        """

    @property
    def _is_made(self) -> bool:
        """Whether the schema to write with is made of the columns."""
        return not self._has_own and not self.use_latest_version

    def encoding_problems(self, where: str, columns: Sequence[str]) -> list[Problem]:
        """What keeps rows from being written, as far as the columns' names tell: options, the schema, whether the registry knows
        it or would take it. The registry is asked, and not changed."""
        problems = self._writing_option_problems(where)
        if problems:
            return problems
        twice = sorted({c for c in columns if list(columns).count(c) > 1})
        problems = [Problem(where, f"column `{c}` is there twice", "Rename one of them") for c in twice]
        if problems or not columns:
            return problems or [Problem(where, "there is no column to write", "Name some")]
        try:
            if self._is_made:
                # Whether it would take the schema is known with the types; whether it answers, now.
                self._hook.knows(self._subject_to_write)
                return []
            document, number = self._chosen_to_write()
            found = [Problem(where, *told) for told in self._name_misfits(document, columns)]
            return found or (self._refusals(where, document) if self.registry and number is None else [])
        except KafkaSparkError as e:
            at = "schema" if isinstance(e, SchemaUnusable) and self._has_own else "registry" if self.registry else "schema"
            return [Problem(f"{where}.{at}", e.found, e.action)]

    def _writing_option_problems(self, where: str) -> list[Problem]:
        problems = []
        if not self.registry and not self._has_own:
            action = "Give `registry`, or `schema` for values without a header, which nobody could read without knowing it"
            problems.append(Problem(where, "found neither `schema` nor `registry`", action))
        subject = self._subject_problems(where, "no topic is known")
        problems += subject
        if not subject and self.registry and len(self.subjects) != 1:
            problems.append(Problem(f"{where}.subject", f"there are {len(self.subjects)}; expected one", "Give `subject`"))
        if self.use_latest_version and (self.auto_register_schemas or self._has_own):
            other = "schema" if self._has_own else "auto_register_schemas"
            problems.append(Problem(f"{where}.use_latest_version", f"it is there beside `{other}`", "Leave one of them out"))
        if self._is_made and self.auto_register_schemas is False:
            action = "Give the registered schema as `schema`, or set `use_latest_version=True`"
            found = "a schema that is made of columns has to be registered"
            problems.append(Problem(f"{where}.auto_register_schemas", found, action))
        return problems

    @property
    def _subject_to_write(self) -> str:
        (subject,) = self.subjects
        return subject

    def _chosen_to_write(self) -> tuple[Document, int | None]:
        """The schema that does not depend on the columns, and its id where it is the registry's."""
        if not self.use_latest_version:
            return Document(self._own, (), GIVEN), None
        latest = self._hook.version(self._subject_to_write, LATEST)
        return self._document(latest), latest.id

    def _name_misfits(self, document: Document, columns: Sequence[str]) -> list[tuple[str, str]]:
        fields = self._fields_to_write(document)
        known = {f.name for f in fields}
        action = "Leave the column out, or give the schema such a field"
        unknown = [(f"the schema has no field for column `{c}`", action) for c in columns if c not in known]
        lacking = self._lacking(fields, columns)
        return unknown + [(f"there is no column for field `{name}`, which is required", "Add the column") for name in lacking]

    def _refusals(self, where: str, document: Document) -> list[Problem]:
        """Whether the registry knows a schema, or would take it."""
        subject, normalize = self._subject_to_write, self.normalize_schemas
        if self._hook.id_of(subject, document.text, self.kind, normalize) is not None:
            return []
        if self.auto_register_schemas is False:
            found = f"the schema of {document.name} is not registered for subject `{subject}`"
            return [Problem(f"{where}.schema", found, "Register it, or set `auto_register_schemas=True`")]
        wrong = self._hook.incompatibilities(subject, document.text, self.kind, normalize)
        found = f"subject `{subject}` does not take the schema of {document.name}: {'; '.join(wrong)}"
        action = "Make the change a compatible one, or change the subject's compatibility"
        return [Problem(f"{where}.schema", found[:_SHOWN], action)] if wrong else []

    def encode(self, columns: Sequence[str]) -> Column:
        """The rows themselves, as a struct: tasks make the bytes, with :meth:`struct_encoder`."""
        return as_struct(columns)

    @property
    def encodes_in_tasks(self) -> bool:
        """Tasks make the bytes, and not :meth:`encode`."""
        return True

    def struct_encoder(self, columns: Sequence[types.Column]) -> RowEncoder:
        """What tasks encode with; the schema is registered now, or looked up, and its id is the encoder's.

        :param columns: names and types of the columns to write, in order.
        :raises ValidationError: the columns do not fit the schema, or the registry does not take it.
        :raises KafkaSparkError: the registry does not answer, or refuses.
        """
        names = [c.name for c in columns]
        if self._is_made:
            document, number = Document(self._made_of(columns), (), f"the columns of the {self.part}"), None
        else:
            document, number = self._chosen_to_write()
        found = [*misfits(columns, self._fields_to_write(document)), *self._name_misfits(document, names)]
        if found:
            raise ValidationError([Problem(self.part, *told) for told in dict.fromkeys(found)])
        return self._encoder(document, names, self._prefix(document, number))

    def _prefix(self, document: Document, number: int | None) -> bytes:
        """What stands before each value."""
        if not self.registry:
            return b""
        return header(self._registered(document) if number is None else number)

    def _registered(self, document: Document) -> int:
        if wrong := self._refusals(self.part, document):
            raise ValidationError(wrong)
        subject, normalize = self._subject_to_write, self.normalize_schemas
        number = self._hook.id_of(subject, document.text, self.kind, normalize)
        if number is None:
            try:
                number = self._hook.register(subject, document.text, self.kind, normalize)
            except RegistryRefused as e:
                raise ValidationError([Problem(f"{self.part}.schema", e.found, e.action)]) from None
            log.info("Registered the schema of %s for subject `%s`: id %d", document.name, subject, number)
        return number


def unknown_id(number: int, known: str, unusable: Mapping[int, str]) -> str:
    """Why a record of this id is bad."""
    if number in unusable:
        return f"found schema id {number}: {unusable[number]}"
    return f"found schema id {number}, expected one of {known}"
