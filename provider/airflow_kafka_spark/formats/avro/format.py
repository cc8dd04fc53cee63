"""Avro, with a schema of one's own or in Confluent's wire format with a schema registry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import AvroSchemaInvalid, KafkaSparkError, Problem
from airflow_kafka_spark.formats import types
from airflow_kafka_spark.formats.avro.schema import Record, as_record, columns_of, parse
from airflow_kafka_spark.formats.avro.settings import AvroSettings, parsed
from airflow_kafka_spark.formats.base import Decoder, Format, Part, as_struct
from airflow_kafka_spark.formats.raw import column_problems
from airflow_kafka_spark.formats.registry import STRATEGIES, span, subject_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column

    from airflow_kafka_spark.formats.avro.tasks.encode import AvroEncoder
    from airflow_kafka_spark.hooks.schema_registry import RegisteredSchema


@dataclass(frozen=True)
class Avro(AvroSettings, Format):
    """Avro's binary encoding; the fields of the schema's record become columns, any other type becomes one column.

    Either ``schema`` is given: values are that, without a header. Or ``registry``: values are in Confluent's wire format (a magic
    byte, the id of the writer's schema, the value), and schemas come from a schema registry. Records of different versions come
    out alike, as the reader's schema has them: missing fields have its defaults, numbers are widened, fields it does not name are
    left out, fields are found under their aliases. All versions of the subjects are fetched before Spark starts, and tasks never
    ask the registry.

    What does not fit makes a record bad, with the reason; never the task. The page `avro.md` of the documentation has the types
    of columns and all that makes a record bad.

    Written are records with a field per column, with ``schema`` or one that is made of the columns, see :mod:`.avro.writing`.
    With a registry the schema is registered, or looked up, before anything is published, and only after the registry was asked
    whether it is compatible; its id is the same for all of a window that one attempt publishes. A value that does not fit the
    schema ends the split with the row and the column; nothing is rounded, cut off or made another value.

    :param schema: the schema's JSON, for values without a header; to write with a registry: what is registered, instead of what
        would be made of the columns.
    :param registry: the Airflow connection of the schema registry (:class:`.SchemaRegistryHook`).
    :param subject: the subject of the schemas; default what the strategy says of the topics.
    :param subject_name_strategy: Confluent's ``TopicNameStrategy`` (``<topic>-value``), ``RecordNameStrategy`` or
        ``TopicRecordNameStrategy``. With the last two, the record's name is that of ``reader_schema``, unless ``subject`` is
        given.
    :param reader_schema: what columns there are: ``latest``, a version of the subject, or a schema's JSON. With ``schema``: JSON.
    :param column: the name of the column where the schema is no record.
    :param auto_register_schemas: to write: register the schema, if it is compatible. False: it has to be registered already.
        Default True, but for ``use_latest_version``.
    :param use_latest_version: to write with the subject's latest schema, whatever columns there are; they have to fit it.
    :param normalize_schemas: schemas that differ only in what means nothing are the same.
    :param record_name: the name of the record that is made of columns, with or without a namespace; default ``Value`` or ``Key``.
    :param record_namespace: its namespace; default the topic.
    :param topics: what :meth:`of_topics` has been told.
    :param part: what :meth:`of_topics` has been told.
    :param writes: what :meth:`to_write` has been told.
    """

    encodes_in_tasks = True

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
        from airflow_kafka_spark.formats.avro.tasks.row_decode import bad_defaults

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
        if self._reader_given:
            return "the option `reader_schema`"
        return "the option `schema`" if self.schema else self.__dict__.get("_chosen_name", "the registry")

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
    def _reader(self) -> Record:
        """The schema whose fields are the columns.

        :raises AvroSchemaInvalid: there is none, or it cannot be used.
        """
        if self._reader_given:
            schema = parse(str(self.reader_schema), self._reader_name)
        elif self.schema:
            schema = parse(self.schema)
        else:
            chosen = self._chosen()
            schema = parsed(chosen[0])
            # Not asked for again when all versions are.
            self.__dict__["_known"], self.__dict__["_chosen_name"] = chosen, str(chosen[0])
        if self.registry and schema.kind == "bytes":
            detail = "it is of type bytes, which Confluent's clients for Java and for Python write differently"
            raise AvroSchemaInvalid(self._reader_name, detail, "Read such values with Raw")
        return as_record(schema, self.column)

    def _chosen(self) -> tuple[RegisteredSchema, ...]:
        """The subjects' schemas that are the reader's, all the same."""
        chosen = tuple(self.hook.version(subject, self.reader_schema) for subject in self.subjects)
        if any((c.text, c.references) != (chosen[0].text, chosen[0].references) for c in chosen):
            named = " and ".join(map(str, chosen[:2]))
            raise AvroSchemaInvalid(
                named, "they are different, and columns are the same for all topics", "Give `reader_schema` as JSON"
            )
        return chosen

    # --- reading -----------------------------------------------------------------------------------------------------

    def arrow_schema(self) -> pa.Schema:
        """The fields of the reader's schema; asked of the registry once.

        :raises KafkaSparkError: there is no such schema, or the registry does not give it.
        """
        from airflow_kafka_spark.formats.types import arrow_schema

        return arrow_schema(columns_of(self._reader, self._reader_name))

    def decoder(self) -> Decoder:
        """A decoder that has all schemas with it; the registry is asked for versions that have come since.

        :raises KafkaSparkError: as :meth:`arrow_schema`.
        """
        from airflow_kafka_spark.formats.avro.tasks.decode import AvroDecoder

        if self.schema:
            return AvroDecoder(self._reader, {0: as_record(parse(self.schema), self.column)}, framed=False)
        # Records of a window may have a schema that was registered after the columns were looked at.
        known: tuple[RegisteredSchema, ...] = self.__dict__.get("_known", ())
        registered = tuple(v for s in self.subjects for v in self.hook.versions(s, known))
        self.__dict__["_known"] = registered
        writers = {r.id: self._written_with(r) for r in registered}
        versions = ", ".join(f"`{s}` (versions {span([r.version for r in registered if r.subject == s])})" for s in self.subjects)
        return AvroDecoder(self._reader, writers, framed=True, known=f"{span(list(writers))} of {versions}")

    def _written_with(self, registered: RegisteredSchema) -> Record | str:
        try:
            return as_record(parsed(registered), self.column)
        except AvroSchemaInvalid as e:
            return f"the schema of {e.what} cannot be used: {e.detail}"

    # --- writing -----------------------------------------------------------------------------------------------------

    def to_write(self, topic: str | None, part: Part) -> Avro:
        """This format for records that are written.

        :param topic: where they go; None where each row names its own topic.
        :param part: which part of a record it is for.
        """
        return replace(self, topics=(topic,) if topic else (), part=part, writes=True)

    def encoding_problems(self, where: str, columns: Sequence[str]) -> list[Problem]:
        """What keeps rows from being written, as far as the columns' names tell: options, the schema, whether the registry knows
        it or would take it. The registry is asked, and not changed."""
        from airflow_kafka_spark.formats.avro.writing import problems

        return problems(self, where, columns)

    def encode(self, columns: Sequence[str]) -> Column:
        """The rows themselves, as a struct: tasks make the bytes, with :meth:`struct_encoder`."""
        return as_struct(columns)

    def struct_encoder(self, columns: Sequence[types.Column]) -> AvroEncoder:
        """What tasks encode with; the schema is registered now, or looked up, and its id is the encoder's.

        :param columns: names and types of the columns to write, in order.
        :raises ValidationError: the columns do not fit the schema, or the registry does not take it.
        :raises KafkaSparkError: the registry does not answer, or refuses.
        """
        from airflow_kafka_spark.formats.avro.tasks.encode import AvroEncoder
        from airflow_kafka_spark.formats.avro.writing import chosen

        schema, number = chosen(self, columns)
        return AvroEncoder(schema, tuple(columns), number)
