"""What Avro is written with: which schema, under which subject, and the id it has there. Runs on the driver.

The schema is, in this order: the latest of the subject (``use_latest_version``); the one given as ``schema``; one that is made of
the columns (:mod:`.avro.schema`). A key of one column is that column's bare type, as ``String`` writes it bare; everything else
is a record.

What is known by the names of the columns is checked before Spark starts (:func:`problems`). Their types are known once Spark has
been asked, which is before anything is read: :func:`chosen` then checks them, and only if all is well changes the registry.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from airflow_kafka_spark.errors import AvroSchemaInvalid, KafkaSparkError, Problem, RegistryRefused, ValidationError
from airflow_kafka_spark.formats.avro.compatibility import differences, misfits, misfits_of_record
from airflow_kafka_spark.formats.avro.schema import (
    Record,
    Schema,
    columns_of,
    full_name,
    is_full_name,
    namespace_of,
    parse,
    record_of,
    refused,
    type_of,
)
from airflow_kafka_spark.formats.avro.settings import AvroSettings, parsed
from airflow_kafka_spark.formats.registry import STRATEGIES, subject_of
from airflow_kafka_spark.formats.types import Column, Struct

log = logging.getLogger(__name__)

_SHOWN = 1000
_BARE_BYTES = "it is of type bytes, which Confluent's clients for Java and for Python write differently"


@dataclass(frozen=True)
class Written:
    """A schema to write with.

    :param schema: the schema.
    :param text: its JSON, where it is not one of the registry's; else empty.
    :param name: which one it is, for messages.
    :param number: its id, where it is one of the registry's.
    """

    schema: Schema
    text: str
    name: str
    number: int | None = None


# --- before Spark starts -------------------------------------------------------------------------------------------------


def problems(avro: AvroSettings, where: str, columns: Sequence[str]) -> list[Problem]:
    """See :meth:`.Avro.encoding_problems`."""
    found = _option_problems(avro, where)
    if found:
        return found
    if _is_derived(avro):
        plain = [Column(name, Struct(())) for name in columns]
        found = [Problem(where, what, action) for what, action in refused(plain)]
        # Whether it would take the schema is known with the types; whether it answers, now.
        return found or _asked(avro, where, lambda: _reached(avro))
    return _asked(avro, where, lambda: _schema_problems(avro, where, columns))


def _option_problems(avro: AvroSettings, where: str) -> list[Problem]:
    found = []
    if not avro.writes:
        found.append(Problem(where, "nobody says to which topic Avro is written here", "Use Json, String or Raw"))
    if not avro.registry and not avro.schema:
        action = "Give `registry`, or `schema` for values without a header, which nobody could read without knowing it"
        found.append(Problem(where, "found neither `schema` nor `registry`", action))
    if avro.use_latest_version and (avro.auto_register_schemas or avro.schema):
        other = "schema" if avro.schema else "auto_register_schemas"
        found.append(Problem(f"{where}.use_latest_version", f"it is there beside `{other}`", "Leave one of them out"))
    if avro.subject_name_strategy not in STRATEGIES:
        what = f"found {avro.subject_name_strategy!r}; expected one of {', '.join(STRATEGIES)}"
        found.append(Problem(f"{where}.subject_name_strategy", what, "Write it as Confluent's serializers do"))
    if _is_derived(avro) and not avro.schema and avro.auto_register_schemas is False:
        action = "Give the registered schema as `schema`, or set `use_latest_version=True`"
        found.append(Problem(f"{where}.auto_register_schemas", "a schema that is made of columns has to be registered", action))
    if not is_full_name(_record_name(avro)):
        action = "Letters of ASCII, digits and `_`, no digit first; a namespace in such parts with dots"
        found.append(Problem(f"{where}.record_name", f"`{_record_name(avro)}` is no name in Avro", action))
    return found or _subject_problems(avro, where)


def _subject_problems(avro: AvroSettings, where: str) -> list[Problem]:
    if not avro.registry or avro.subject:
        return []
    if not avro.topics and avro.subject_name_strategy != "RecordNameStrategy":
        found = f"rows go to topics of their own, and {avro.subject_name_strategy} names subjects after one"
        return [Problem(f"{where}.subject", found, "Use RecordNameStrategy, or give `subject`")]
    by_name = avro.subject_name_strategy != "TopicNameStrategy" and not avro.schema
    if by_name and not avro.record_name and (avro.use_latest_version or not avro.topics):
        return [Problem(f"{where}.subject", "the record's name is not known", "Give `subject` or `record_name`")]
    return []


def _is_derived(avro: AvroSettings) -> bool:
    return not avro.schema and not avro.use_latest_version


def _asked(avro: AvroSettings, where: str, ask: Callable[[], list[Problem]]) -> list[Problem]:
    try:
        return ask()
    except AvroSchemaInvalid as e:
        at = "registry" if avro.use_latest_version else "schema"
        return [Problem(f"{where}.{at}", e.found, e.action)]
    except KafkaSparkError as e:
        return [Problem(f"{where}.registry", e.found, e.action)]


def _reached(avro: AvroSettings) -> list[Problem]:
    avro.hook.knows(_subject(avro, _record_name(avro)))
    return []


def _schema_problems(avro: AvroSettings, where: str, columns: Sequence[str]) -> list[Problem]:
    written = _written(avro)
    found = [Problem(where, *what) for what in _name_misfits(written.schema, columns)]
    if found or not avro.registry or written.number is not None or _known_id(avro, written) is not None:
        return found
    return _registry_problems(avro, where, written)


def _name_misfits(schema: Schema, columns: Sequence[str]) -> list[tuple[str, str]]:
    if not isinstance(schema, Record):
        listed = ", ".join(f"`{c}`" for c in columns)
        return [(f"the schema is {schema}, which one column is, found {listed}", "Name one column")] if len(columns) != 1 else []
    fields = {f.name for f in schema.fields}
    action = "Leave the column out, or give the schema such a field"
    unknown = [(f"{schema} has no field for column `{c}`", action) for c in columns if c not in fields]
    lacking = [f.name for f in schema.fields if f.name not in columns and not f.default]
    action = "Add the column, or give the field a default"
    return unknown + [(f"there is no column for field `{name}`, which has no default", action) for name in lacking]


# --- once the columns' types are known -----------------------------------------------------------------------------------


def chosen(avro: AvroSettings, columns: Sequence[Column]) -> tuple[Schema, int | None]:
    """The schema that these columns are written with, and its id, None without a registry. Registers it where that is wanted.

    :raises ValidationError: the columns do not fit it, or the registry does not take it; nothing was changed.
    :raises AvroSchemaInvalid: it cannot be used.
    :raises KafkaSparkError: the registry does not answer, or refuses.
    """
    if _is_derived(avro) and (found := list(refused(columns))):
        raise ValidationError([Problem(avro.part, *what) for what in found])
    written = _derived(avro, columns) if _is_derived(avro) else _written(avro)
    if found := list(_misfits(written.schema, columns)):
        raise ValidationError([Problem(avro.part, *what) for what in found])
    if not avro.registry or written.number is not None:
        return written.schema, written.number
    if (number := _known_id(avro, written)) is not None:
        return written.schema, number
    if wrong := _registry_problems(avro, avro.part, written):
        raise ValidationError(wrong)
    return written.schema, _register(avro, written)


def _misfits(schema: Schema, columns: Sequence[Column]) -> Sequence[tuple[str, str]]:
    if isinstance(schema, Record):
        return list(misfits_of_record(schema, columns))
    return _name_misfits(schema, [c.name for c in columns]) or list(misfits(schema, columns[0].type, columns[0].name))


def _derived(avro: AvroSettings, columns: Sequence[Column]) -> Written:
    name = _record_name(avro)
    if avro.part == "key" and len(columns) == 1 and not isinstance(columns[0].type, Struct):
        text, what = type_of(columns[0], name), f"the key's column `{columns[0].name}`"
    else:
        text, what = record_of(columns, name), f"the columns of the {avro.part}"
    return Written(_usable(avro, parse(text, what), what), text, what)


def _written(avro: AvroSettings) -> Written:
    """The schema that does not depend on the columns."""
    if avro.use_latest_version:
        latest = avro.hook.version(_subject(avro, _record_name(avro)))
        return Written(_usable(avro, parsed(latest), str(latest)), "", str(latest), latest.id)
    what = "the option `schema`"
    return Written(_usable(avro, parse(avro.schema, what), what), avro.schema, what)


def _usable(avro: AvroSettings, schema: Schema, what: str) -> Schema:
    """:raises AvroSchemaInvalid: what is written with it could not be read again."""
    if isinstance(schema, Record):
        columns_of(schema, what)
    elif avro.registry and schema.kind == "bytes":
        raise AvroSchemaInvalid(what, _BARE_BYTES, "Write such values with Raw, or in a record")
    return schema


def _record_name(avro: AvroSettings) -> str:
    namespace = avro.record_namespace or (namespace_of(avro.topics[0]) if avro.topics else "")
    return full_name(avro.record_name or avro.part.capitalize(), namespace)


# --- the registry --------------------------------------------------------------------------------------------------------


def _subject(avro: AvroSettings, name: str) -> str:
    return avro.subject or subject_of(avro.subject_name_strategy, next(iter(avro.topics), ""), avro.part, name)


def _subject_for(avro: AvroSettings, schema: Schema) -> str:
    return _subject(avro, getattr(schema, "name", schema.kind))


def _registry_problems(avro: AvroSettings, where: str, written: Written) -> list[Problem]:
    """Whether the registry would take a schema that it does not know."""
    subject = _subject_for(avro, written.schema)
    if avro.auto_register_schemas is False:
        action = "Register it, or set `auto_register_schemas=True`"
        return [Problem(f"{where}.schema", f"the schema of {written.name} is not registered for subject `{subject}`", action)]
    wrong = avro.hook.incompatibilities(subject, written.text, normalize=avro.normalize_schemas)
    if not wrong:
        return []
    found = (
        f"subject `{subject}` does not take the schema of {written.name}: {'; '.join(_explained(avro, subject, wrong, written))}"
    )
    return [Problem(f"{where}.schema", found[:_SHOWN], "Make the change a compatible one, or change the subject's compatibility")]


def _known_id(avro: AvroSettings, written: Written) -> int | None:
    return avro.hook.id_of(_subject_for(avro, written.schema), written.text, normalize=avro.normalize_schemas)


def _explained(avro: AvroSettings, subject: str, told: list[str], written: Written) -> list[str]:
    """What the registry tells; of one that tells nothing, the differences from the latest version."""
    from airflow_kafka_spark.hooks.schema_registry import NOT_TOLD

    if told != [NOT_TOLD]:
        return told
    try:
        latest = avro.hook.version(subject)
        return [f"compared with version {latest.version}", *differences(parsed(latest), written.schema)]
    except KafkaSparkError:
        return told


def _register(avro: AvroSettings, written: Written) -> int:
    """Register a schema that is not yet."""
    subject = _subject_for(avro, written.schema)
    try:
        number = avro.hook.register(subject, written.text, normalize=avro.normalize_schemas)
    except RegistryRefused as e:
        raise ValidationError([Problem(f"{avro.part}.schema", e.found, e.action)]) from None
    log.info("Registered the schema of %s for subject `%s`: id %d", written.name, subject, number)
    return number
