"""Avro, with a schema of one's own or in Confluent's wire format with a schema registry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from airflow_kafka_spark.errors import AvroSchemaInvalid, KafkaSparkError, Problem
from airflow_kafka_spark.formats.avro_schema import Record, Schema, as_record, columns_of, parse
from airflow_kafka_spark.formats.base import Decoder, Format, Part
from airflow_kafka_spark.formats.confluent import STRATEGIES, SubjectNameStrategy, subject_of
from airflow_kafka_spark.formats.raw import column_problems

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_kafka_spark.hooks.schema_registry import RegisteredSchema, SchemaRegistryHook


@dataclass(frozen=True)
class Avro(Format):
    """Avro's binary encoding; the fields of the schema's record become columns, any other type becomes one column.

    Either ``schema`` is given: values are that, without a header. Or ``registry``: values are in Confluent's wire format (a magic
    byte, the id of the writer's schema, the value), and schemas come from a schema registry. Records of different versions come
    out alike, as the reader's schema has them: missing fields have its defaults, numbers are widened, fields it does not name are
    left out, fields are found under their aliases. All versions of the subjects are fetched before Spark starts, and tasks never
    ask the registry.

    What does not fit makes a record bad, with the reason; never the task. The page `avro.md` of the documentation has the types
    of columns and all that makes a record bad.

    :param schema: the schema's JSON, for values without a header.
    :param registry: the Airflow connection of the schema registry (:class:`.SchemaRegistryHook`).
    :param subject: the subject of the schemas; default what the strategy says of the topics.
    :param subject_name_strategy: Confluent's ``TopicNameStrategy`` (``<topic>-value``), ``RecordNameStrategy`` or
        ``TopicRecordNameStrategy``. With the last two, the record's name is that of ``reader_schema``, unless ``subject`` is
        given.
    :param reader_schema: what columns there are: ``latest``, a version of the subject, or a schema's JSON. With ``schema``: JSON.
    :param column: the name of the column where the schema is no record.
    :param auto_register_schemas: for writing.
    :param use_latest_version: for writing.
    :param topics: what :meth:`of_topics` has been told.
    :param part: what :meth:`of_topics` has been told.
    """

    schema: str = ""
    registry: str = ""
    subject: str | None = None
    subject_name_strategy: SubjectNameStrategy = "TopicNameStrategy"
    reader_schema: str | int | Literal["latest"] = "latest"
    column: str = "value"
    auto_register_schemas: bool = False
    use_latest_version: bool = True
    topics: tuple[str, ...] = ()
    part: Part = "value"

    def of_topics(self, topics: Sequence[str], part: Part) -> Avro:
        """The same for these topics, which subjects are named after."""
        return replace(self, topics=tuple(topics), part=part)

    # --- what the schemas are ----------------------------------------------------------------------------------------

    def validate(self, where: str) -> list[Problem]:
        """What is wrong with the options, the schemas, or the registry, which is asked if there is one."""
        problems = self._option_problems(where)
        if problems:
            return problems
        try:
            self._check_packages()
            columns_of(self._reader, self._reader_name)
        except AvroSchemaInvalid as e:
            at = "schema" if self.schema and not self._reader_given else "reader_schema"
            return [Problem(f"{where}.{at}", f"{e.found}", e.action)]
        except KafkaSparkError as e:
            return [Problem(f"{where}.registry", e.found, e.action)]
        from airflow_kafka_spark.formats.avro_reference import bad_defaults

        bad = bad_defaults(self._reader)
        return [
            Problem(f"{where}.reader_schema", f"the default of field `{b}` is none of its type", "Correct the default")
            for b in bad
        ]

    def _option_problems(self, where: str) -> list[Problem]:
        problems = column_problems(self.column, where)
        if bool(self.schema) == bool(self.registry):
            found = "both" if self.schema else "neither"
            action = "Give `schema` for values without a header, `registry` for Confluent's wire format"
            problems.append(Problem(where, f"found {found} of `schema` and `registry`; expected one of them", action))
        if self.subject_name_strategy not in STRATEGIES:
            found = f"found {self.subject_name_strategy!r}; expected one of {', '.join(STRATEGIES)}"
            problems.append(Problem(f"{where}.subject_name_strategy", found, "Write it as Confluent's serializers do"))
        if self.registry and not problems and not self._subjects_known:
            found = (
                "no subject is known" if self.subject_name_strategy == "TopicNameStrategy" else "the record's name is not known"
            )
            problems.append(Problem(f"{where}.subject", found, "Give `subject`, or a record's JSON as `reader_schema`"))
        if isinstance(self.reader_schema, bool) or not isinstance(self.reader_schema, (str, int)):
            found = f"found {self.reader_schema!r}; expected latest, a version or a schema's JSON"
            problems.append(Problem(f"{where}.reader_schema", found, "Leave it out to read with the latest version"))
        elif self.schema and isinstance(self.reader_schema, int):
            problems.append(
                Problem(f"{where}.reader_schema", "a version is one of a registry", "Give the reader's schema as JSON")
            )
        return problems

    @staticmethod
    def _check_packages() -> None:
        from importlib.util import find_spec

        from airflow_kafka_spark.errors import AvroNotInstalled

        if find_spec("polars") is None:
            raise AvroNotInstalled("polars")

    @property
    def _reader_given(self) -> bool:
        """Whether the reader's schema is JSON of the user's."""
        return isinstance(self.reader_schema, str) and self.reader_schema not in ("latest", "")

    @property
    def _reader_name(self) -> str:
        return "the option `reader_schema`" if self._reader_given else "the option `schema`" if self.schema else "the registry"

    @property
    def _subjects_known(self) -> bool:
        if self.subject:
            return True
        return bool(self.topics) and (self.subject_name_strategy == "TopicNameStrategy" or self._reader_given)

    @cached_property
    def subjects(self) -> tuple[str, ...]:
        """The subjects whose schemas records may have.

        :raises AvroSchemaInvalid: the strategy goes by a record's name, and ``reader_schema`` is none.
        """
        if self.subject:
            return (self.subject,)
        name = ""
        if self.subject_name_strategy != "TopicNameStrategy":
            record = parse(str(self.reader_schema), self._reader_name)
            name = getattr(record, "name", record.kind)
        return tuple(dict.fromkeys(subject_of(self.subject_name_strategy, t, self.part, name) for t in self.topics))

    @cached_property
    def _hook(self) -> SchemaRegistryHook:
        from airflow_kafka_spark.hooks.schema_registry import SchemaRegistryHook

        return SchemaRegistryHook(self.registry)

    def __getstate__(self) -> dict:
        # The client holds connections and a lock.
        return {name: value for name, value in self.__dict__.items() if name != "_hook"}

    @cached_property
    def _reader(self) -> Record:
        """The schema whose fields are the columns.

        :raises AvroSchemaInvalid: there is none, or it cannot be used.
        """
        if self._reader_given:
            schema = parse(str(self.reader_schema), self._reader_name)
        elif self.schema:
            schema = parse(self.schema)
        else:
            schema = _parsed(self._chosen())
        if self.registry and schema.kind == "bytes":
            detail = "it is of type bytes, which Confluent's clients for Java and for Python write differently"
            raise AvroSchemaInvalid(self._reader_name, detail, "Read such values with Raw")
        return as_record(schema, self.column)

    def _chosen(self) -> RegisteredSchema:
        """The subjects' schema that is the reader's."""
        chosen = [self._hook.version(subject, self.reader_schema) for subject in self.subjects]
        if any((c.text, c.references) != (chosen[0].text, chosen[0].references) for c in chosen):
            named = " and ".join(map(str, chosen[:2]))
            raise AvroSchemaInvalid(
                named, "they are different, and columns are the same for all topics", "Give `reader_schema` as JSON"
            )
        return chosen[0]

    # --- reading -----------------------------------------------------------------------------------------------------

    def arrow_schema(self) -> pa.Schema:
        """The fields of the reader's schema; asked of the registry once.

        :raises KafkaSparkError: there is no such schema, or the registry does not give it.
        """
        from airflow_kafka_spark.formats.ddl import arrow_schema

        return arrow_schema(columns_of(self._reader, self._reader_name))

    def decoder(self) -> Decoder:
        """A decoder that has all schemas with it; the registry is asked for versions that have come since.

        :raises KafkaSparkError: as :meth:`arrow_schema`.
        """
        from airflow_kafka_spark.formats.avro_worker import AvroDecoder

        if self.schema:
            return AvroDecoder(self._reader, {0: as_record(parse(self.schema), self.column)}, framed=False)
        # Records of a window may have a schema that was registered after the columns were looked at.
        known: tuple[RegisteredSchema, ...] = self.__dict__.get("_known", ())
        registered = tuple(v for s in self.subjects for v in self._hook.versions(s, known))
        self.__dict__["_known"] = registered
        writers = {r.id: self._written_with(r) for r in registered}
        versions = ", ".join(
            f"`{s}` (versions {_span([r.version for r in registered if r.subject == s])})" for s in self.subjects
        )
        return AvroDecoder(self._reader, writers, framed=True, known=f"{_span(list(writers))} of {versions}")

    def _written_with(self, registered: RegisteredSchema) -> Record | str:
        try:
            return as_record(_parsed(registered), self.column)
        except AvroSchemaInvalid as e:
            return f"the schema of {e.what} cannot be used: {e.detail}"

    # --- writing -----------------------------------------------------------------------------------------------------

    def encoding_problems(self, where: str, columns: Sequence[str]) -> list[Problem]:
        """Avro is read, not yet written."""
        return [Problem(where, "Avro is read and not yet written", "Use Json, String or Raw")]


def _parsed(registered: RegisteredSchema) -> Schema:
    if registered.kind != "AVRO":
        raise AvroSchemaInvalid(
            str(registered), f"it is of type {registered.kind}, not AVRO", "Read the topic with its own format"
        )
    return parse(registered.text, str(registered), registered.references)


def _span(numbers: list[int]) -> str:
    """Numbers for people: all of a few, the ends of many."""
    ordered = sorted(numbers)
    return ", ".join(map(str, ordered)) if len(ordered) <= 8 else f"{ordered[0]} to {ordered[-1]}"
