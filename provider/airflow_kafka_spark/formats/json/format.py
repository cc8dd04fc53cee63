"""The JSON formats: ``Json`` with a declared schema, ``JsonEnvelope`` with the schema beside each value, and ``JsonSchema``.

``JsonEnvelope`` is Connect's JSON converter with ``schemas.enable=true``. ``JsonSchema`` reads Confluent's wire format with a
schema registry, or JSON with a schema that the user gives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_kafka_spark.errors import KafkaSparkError, Problem, SchemaInvalid, SchemaUnusable
from airflow_kafka_spark.formats.base import (
    DeclaredFormat,
    Decoder,
    Encoder,
    Format,
    Kind,
    as_struct,
    find_duplicate_problems,
    make_spark_column,
)
from airflow_kafka_spark.formats.json.connect_schema import (
    TimestampPrecision,
    apply_writer_types,
    connect_schema,
    list_sql_columns,
)
from airflow_kafka_spark.formats.json.schema import list_json_schema_columns, parse_json_schema
from airflow_kafka_spark.formats.registry import RegistryFormat, SchemaDocument, find_mismatches, find_name_mismatches
from airflow_kafka_spark.formats.types import (
    Array,
    Column,
    DataType,
    Map,
    SparkSchema,
    Struct,
    Text,
    parse_columns,
    quote_with_backticks,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column as SparkColumn

    from airflow_kafka_spark.formats.json.schema import Property
    from airflow_kafka_spark.formats.tasks.base import RowEncoder


@dataclass(frozen=True)
class Json(DeclaredFormat):
    """One JSON object (RFC 8259, UTF-8) per record; its fields become the columns of ``schema``.

    Values are read as by Spark 4's ``from_json`` in the time zone UTC, with one difference: no value silently becomes null or
    another value. A value that does not fit its column makes the record bad, with a reason that names the column, what was found
    and what was expected.

    ==================  ======================================================  ================================================
    column              what it takes                                           what makes the record bad
    ==================  ======================================================  ================================================
    any                 the field's value; null when it is null or missing      null or missing in a ``NOT NULL`` column
    tinyint to bigint   an integer: ``7``, ``-0``                               ``1.0``, ``1e3``, ``"7"``; out of range
    decimal(p,s)        a number or a numeric string, exactly: ``1.50``,        digits beyond the scale, unless zeros (Spark
                        ``1e2``, ``"+.5"``                                      rounds them away), or beyond the precision;
                                                                                ``"1,5"``, ``" 1"``
    float, double       a number, to the nearest; ``NaN``, ``Infinity``,        a number too large for the type (Spark makes it
                        ``-Infinity``, bare or as strings                       infinite); any other string
    string, varchar(n)  a string; of any other value its JSON text, unchanged:  more than n characters; a lone surrogate
                        ``1.10``, ``{"a": 1}`` (Spark writes the number anew:   (``"\\ud800"``)
                        ``1.1``)
    boolean             ``true``, ``false``                                     anything else
    binary              a string in base64 with padding                         anything else
    date                ``"2026-11-05"``                                        anything else (Spark cuts off a time)
    timestamp           ``"2026-11-05T07:08:09.123456Z"``: ``T`` or a space;    more digits of a second, unless zeros (Spark
                        up to 6 digits of a second; seconds and minutes may be  cuts them off); before the year 0001 or after
                        left out; ``Z``, ``+02:00``, ``+0200``, ``+02`` or      9999, so that milliseconds are not taken for
                        none, which is UTC; a day alone is its midnight; an     seconds; a number with a fraction
                        integer: seconds since 1970
    timestamp_ntz       as ``timestamp``, without a zone                        a zone; a number
    array<t>            an array                                                anything else
    map<string,t>       an object                                               anything else; a name found twice
    struct<...>         an object, read like the record itself                  anything else
    ==================  ======================================================  ================================================

    - Names are case sensitive. Fields that are not in the schema are skipped, but they must be JSON.
    - A name of the schema found twice in one object is bad (Spark takes the last).
    - Bad as a whole: anything but exactly one JSON object (an array, ``null``, nothing, two objects, further characters), a byte
      order mark, invalid UTF-8, comments, single quotes, trailing commas, objects and arrays nested more than 500 deep.
    - A record without a value is a tombstone: a row of nulls, never bad.

    Arrow decodes whole batches. These records are decoded row by row, with equal results, but some 15 times slower: bad records
    (and a few next to each), every record of a schema with a map, and records with values other than strings in string columns;
    ``"NaN"`` as a string; infinities; a decimal with a negative exponent; more than 6 digits of a second; more digits in a
    decimal than its precision, as in ``0.1000000000000`` for ``decimal(12,2)``.

    :param schema: the columns, as DDL (``"id bigint NOT NULL, amount decimal(12,2), tags array<string>"``), as a pyspark
        ``StructType``, or as a JSON Schema, a dict (see :func:`.list_json_schema_columns`; its text: :meth:`of_json_schema`). It
        is parsed at its first use, so that :meth:`validate` reports a mistake in it. Required for reading; rows are written with
        their own columns. Default empty.
    """

    schema: str | SparkSchema | Mapping[str, Any] = ""

    @classmethod
    def of_json_schema(cls, text: str) -> Json:
        """Return the format of the objects that a JSON Schema describes.

        :param text: the schema's document.
        :raises SchemaInvalid: it is not a JSON object.
        """
        return cls(parse_json_schema(text))

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the schema.

        :raises SchemaInvalid: the schema cannot be read.
        """
        return list_json_schema_columns(self.schema) if isinstance(self.schema, Mapping) else parse_columns(self.schema)

    def validate(self, where: str) -> list[Problem]:
        """Return the problems of the schema."""
        try:
            columns = self.columns
        except SchemaInvalid as e:
            return [
                Problem(
                    f"{where}.schema",
                    f"{e.found}; expected {e.expected}",
                    "Correct the schema" + ("" if isinstance(self.schema, Mapping) else "; its types are those of Spark's DDL"),
                )
            ]
        keys = [f"{path} has keys of type {key}" for column in columns for path, key in _find_odd_keys(column.type, column.name)]
        return [Problem(f"{where}.schema", f"{k}; expected string, as JSON's names are", "Declare map<string,...>") for k in keys]

    def make_decoder(self) -> Decoder:
        """Return a picklable decoder of this schema.

        :raises SchemaInvalid: the schema cannot be read.
        """
        from airflow_kafka_spark.formats.json.tasks.decode import JsonDecoder

        return JsonDecoder(self.columns)

    def find_encoding_problems(self, where: str, columns: Sequence[str]) -> list[Problem]:
        """Return a problem for each name that several columns have."""
        return find_duplicate_problems(where, columns)

    def encode(self, columns: Sequence[str]) -> SparkColumn:
        """Return one object per row with all columns in order, nulls written as ``null``: by Spark's ``to_json``, timestamps with
        microseconds and ``Z``, binary in base64, NaN and infinities as strings.
        """
        from pyspark.sql import functions as F

        # Spark's defaults would cut timestamps to milliseconds and omit null fields.
        options = {
            "ignoreNullFields": "false",
            "timeZone": "UTC",
            "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
            "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
        }
        return F.to_json(as_struct(columns), options).cast("binary")

    def make_encoder(self, columns: Sequence[tuple[str, Kind]]) -> Encoder | None:
        """Return the encoder, for every kind of column."""
        from airflow_kafka_spark.formats.tasks.text import JsonEncoder

        return JsonEncoder(tuple(columns)) if columns else None


def _find_odd_keys(data_type: DataType, path: str) -> list[tuple[str, DataType]]:
    """Return path and key type of each map whose keys are not strings."""
    if isinstance(data_type, Array):
        return _find_odd_keys(data_type.element, f"{path}[]")
    if isinstance(data_type, Struct):
        return [odd for f in data_type.fields for odd in _find_odd_keys(f.type, f"{path}.{f.name}")]
    if isinstance(data_type, Map):
        here = [] if data_type.key == Text() else [(path, data_type.key)]
        return [*here, *_find_odd_keys(data_type.value, f"{path}[]")]
    return []


_KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(("tinyint", "smallint", "int", "bigint"), "integer"),
    **{"boolean": "boolean", "string": "text", "binary": "binary", "date": "date"},
    **{"timestamp": "zoned", "timestamp_ntz": "local"},
}


@dataclass(frozen=True)
class JsonEnvelope(Format):
    """``{"schema": {...}, "payload": {...}}``: what Connect's JSON converter writes and expects with ``schemas.enable=true``.

    The payload's fields become the columns of ``schema``, by name, and are read as by :class:`.Json`. The record's own schema
    determines the notation of its values:

    =======================  ====================================================================================================
    column                   types that the record's schema may have
    =======================  ====================================================================================================
    decimal(p,s)             Connect's ``Decimal`` (the unscaled value in base64, or a number); numbers and strings without a name
    date                     Connect's and Debezium's ``Date`` (days); ``string``
    timestamp(_ntz)          Connect's ``Timestamp``, Debezium's ``Timestamp`` (milliseconds), ``MicroTimestamp``,
                             ``NanoTimestamp`` (whole microseconds); ``string``, as Debezium's ``ZonedTimestamp``
    binary                   ``bytes`` (base64)
    tinyint to bigint        integers, with and without a name: Connect's ``Time`` is milliseconds of a day
    array, map, struct       arrays, maps and structs of what these columns take; keys of maps are strings
    others                   what :class:`.Json` takes, but no ``bytes``
    =======================  ====================================================================================================

    - If the record's schema contradicts a column (``int64`` without a name for a timestamp), the record is bad.
    - A field that the record's schema does not have is null. Its defaults are used only with ``replace_null_with_default``.
    - With ``"schema": null`` the payload is read as by :class:`.Json`.
    - ``"payload": null`` is a tombstone, like a record without a value, as in Connect; it is bad if the schema is not optional.
    - Any field other than ``schema`` and ``payload`` makes the record bad, as in Connect.

    Rows are written with the columns of ``schema``, and are read back unchanged. Decimals are written as numbers,
    which Connect (2.4 and later) reads wherever its schema says ``Decimal``.

    :param schema: the columns, as for :class:`.Json`; rows to write may have fewer of them. Default empty.
    :param timestamps: the notation of timestamps: ``millis`` (default), Connect's ``Timestamp`` (a value with microseconds makes
        the job fail), or ``micros``, Debezium's ``MicroTimestamp``.
    :param replace_null_with_default: True: a field that is null or missing gets the default of the record's schema. False
        (default): it stays null. Connect's option of this name has the default true.
    """

    schema: str | SparkSchema | Mapping[str, Any] = ""
    timestamps: TimestampPrecision = "millis"
    replace_null_with_default: bool = False

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the schema.

        :raises SchemaInvalid: the schema cannot be read.
        """
        return Json(self.schema).columns

    def validate(self, where: str) -> list[Problem]:
        """Return the problems of the options."""
        problems = Json(self.schema).validate(where)
        if self.timestamps not in ("millis", "micros"):
            problems.append(Problem(f"{where}.timestamps", f"found {self.timestamps!r}; expected millis or micros"))
        if not isinstance(self.replace_null_with_default, bool):
            found = f"found {self.replace_null_with_default!r}; expected True or False"
            problems.append(Problem(f"{where}.replace_null_with_default", found))
        return problems

    def get_arrow_schema(self) -> pa.Schema:
        """Return the columns in Arrow.

        :raises SchemaInvalid: the schema cannot be read.
        """
        return Json(self.schema).get_arrow_schema()

    def make_decoder(self) -> Decoder:
        """Return a picklable decoder.

        :raises SchemaInvalid: the schema cannot be read.
        """
        from airflow_kafka_spark.formats.json.tasks.envelope import EnvelopeDecoder

        return EnvelopeDecoder(self.columns, defaults=self.replace_null_with_default)

    # --- writing ---

    def find_encoding_problems(self, where: str, columns: Sequence[str]) -> list[Problem]:
        """Return the problems of columns that cannot be written. The envelope needs their types, so the schema must have them."""
        wrong = self.validate(where)
        if wrong:
            return wrong
        known = {c.name for c in self.columns}
        missing = [c for c in columns if c not in known]
        return [
            *(Problem(f"{where}.schema", f"column `{c}` is not in it; expected the type of each", "Add it") for c in missing),
            *find_duplicate_problems(where, columns),
        ]

    def _list_written_columns(self, names: Sequence[str]) -> list[Column]:
        known = {c.name: c for c in self.columns}
        return [known[name] for name in names]

    def _make_prefix(self, columns: Sequence[Column]) -> str:
        schema = json.dumps(connect_schema(columns, self.timestamps), ensure_ascii=False, separators=(",", ":"))
        return f'{{"schema":{schema},"payload":'

    def encode(self, columns: Sequence[str]) -> SparkColumn:
        """Return one envelope per row: the columns, cast to their declared types, after the schema derived from these."""
        from pyspark.sql import functions as F

        written = self._list_written_columns(columns)
        fields = []
        for c in written:
            column = make_spark_column(c.name).cast(_format_cast_type(c.type))
            if not c.nullable:
                refused = F.raise_error(F.lit(f"Column `{c.name}` is null, and declared NOT NULL")).cast(
                    _format_cast_type(c.type)
                )
                column = F.when(column.isNull(), refused).otherwise(column)
            fields.append(self._make_value(column, c.type, c.name).alias(c.name))
        payload = F.to_json(F.struct(*fields), {"ignoreNullFields": "false"})
        return F.concat(F.lit(self._make_prefix(written)), payload, F.lit("}")).cast("binary")

    def _make_value(self, column: SparkColumn, data_type: DataType, path: str) -> SparkColumn:
        """Return the expression from which to_json writes the JSON that the schema describes."""
        from pyspark.sql import functions as F

        if isinstance(data_type, Struct):
            fields = [
                self._make_value(column.getField(f.name), f.type, f"{path}.{f.name}").alias(f.name) for f in data_type.fields
            ]
            return F.when(column.isNotNull(), F.struct(*fields))
        if isinstance(data_type, Array):
            element = data_type.element
            return F.transform(column, lambda item: self._make_value(item, element, f"{path}[]"))
        if isinstance(data_type, Map):
            value = data_type.value
            return F.transform_values(column, lambda _, item: self._make_value(item, value, f"{path}[]"))
        if str(data_type) == "date":
            return F.unix_date(column)
        if str(data_type) not in ("timestamp", "timestamp_ntz"):
            return column
        fine = F.unix_micros(column.cast("timestamp"))
        if self.timestamps == "micros":
            return fine
        refused = F.raise_error(F.lit(f"Column `{path}` holds microseconds, which Connect's Timestamp cannot hold"))
        return F.when(fine % 1000 != 0, refused.cast("bigint")).otherwise(F.unix_millis(column.cast("timestamp")))

    def make_encoder(self, columns: Sequence[tuple[str, Kind]]) -> Encoder | None:
        """Return the encoder if the kind of each column fits its declared type; None for decimals and ``varchar(n)``."""
        from airflow_kafka_spark.formats.json.tasks.envelope import EnvelopeEncoder

        try:
            written = self._list_written_columns([name for name, _ in columns])
        except (KeyError, SchemaInvalid):
            return None
        kinds = [kind for _, kind in columns]
        if not columns or [_KINDS.get(str(c.type)) for c in written] != kinds:
            return None
        return EnvelopeEncoder(self._make_prefix(written), tuple(zip(written, kinds, strict=True)), self.timestamps)


def _format_cast_type(data_type: DataType) -> str:
    """Return a type for a cast: without lengths, at which Spark would cut, and without NOT NULL."""
    if isinstance(data_type, Struct):
        fields = ",".join(f"{quote_with_backticks(f.name)}:{_format_cast_type(f.type)}" for f in data_type.fields)
        return f"struct<{fields}>"
    if isinstance(data_type, Array):
        return f"array<{_format_cast_type(data_type.element)}>"
    if isinstance(data_type, Map):
        return f"map<string,{_format_cast_type(data_type.value)}>"
    return "string" if isinstance(data_type, Text) else str(data_type)


@dataclass(frozen=True)
class JsonSchema(RegistryFormat):
    """One JSON object per record, described by a JSON Schema (draft-07 or 2020-12); its properties become the columns.

    With ``registry``, values are in Confluent's wire format (a magic byte, the id of the writer's schema, the object), and
    schemas come from a schema registry, as Confluent's serializers and Connect's ``JsonSchemaConverter`` write them. Records of
    all versions are read with the reader's schema. All versions of the subjects are fetched before Spark starts, and tasks never
    ask the registry. Without ``registry``, values are objects without a header, as :class:`.Json` reads them.

    The columns are those of :func:`.list_json_schema_columns`, with the types of Connect's keywords (``connect.type``, the titles
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

    def _find_record_name(self) -> str:
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
        return self._derive_schema(parse_columns(self.schema))

    # --- validate ----------------------------------------------------------------------------------------------------

    def _check_readable(self) -> None:
        assert self._fields is not None

    def _find_option_problems(self, where: str) -> list[Problem]:
        problems = self._find_registry_problems(where)
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
        return _parse_fields(self._reader_document)

    def get_arrow_schema(self) -> pa.Schema:
        """Return the columns of the reader's schema; the registry is asked for it once.

        :raises KafkaSparkError: there is no such schema, or the registry does not return it.
        """
        from airflow_kafka_spark.formats.types import to_arrow_schema

        return to_arrow_schema(list_sql_columns(self._fields))

    def make_decoder(self) -> Decoder:
        """Return a decoder that contains all schemas; the registry is asked for versions that are new since the last call.

        :raises KafkaSparkError: as :meth:`get_arrow_schema`.
        """
        from airflow_kafka_spark.formats.json.schema import bundle_references
        from airflow_kafka_spark.formats.json.tasks.json_schema import RegisteredJsonDecoder

        columns = _list_plain_fields(self._fields)
        if not self.registry:
            return RegisteredJsonDecoder(columns, {0: self._schema_text}, {}, "", False, self.check_values)
        versions = self._list_all_versions()
        known, unusable, others = dict[int, str](), dict[int, str](), dict[int, Sequence[Column]]()
        for registered in versions:
            try:
                document = self._load_document(registered)
                known[registered.id] = json.dumps(bundle_references(document)) if self.check_values else ""
            except SchemaUnusable as e:
                unusable[registered.id] = e.found
                continue
            written = _apply_logical_types(columns, document)
            if written != tuple(columns):
                others[registered.id] = written
        return RegisteredJsonDecoder(columns, known, unusable, self._describe_versions(versions), True, self.check_values, others)

    # --- writing -----------------------------------------------------------------------------------------------------

    def _derive_schema(self, columns: Sequence[Column]) -> str:
        from airflow_kafka_spark.formats.json.schema import make_json_schema

        return make_json_schema(columns, self.title or self.part.capitalize())

    def _find_mismatches(self, document: SchemaDocument, columns: Sequence[Column]) -> list[tuple[str, str]]:
        found = find_mismatches(columns, list_sql_columns(_parse_fields(document)))
        return [*found, *self._name_mismatches(document, [c.name for c in columns])]

    def _name_mismatches(self, document: SchemaDocument, columns: Sequence[str]) -> list[tuple[str, str]]:
        fields = _parse_fields(document)
        return find_name_mismatches(fields, columns, {f.name for f in fields if not f.absent})

    def _make_encoder(self, document: SchemaDocument, columns: Sequence[Column], header: bytes) -> RowEncoder:
        from airflow_kafka_spark.formats.json.tasks.json_schema import JsonSchemaEncoder

        return JsonSchemaEncoder(_parse_fields(document), [c.name for c in columns], header)


def _parse_fields(document: SchemaDocument) -> tuple[Property, ...]:
    from airflow_kafka_spark.formats.json.schema import bundle_references, list_fields

    return list_fields(bundle_references(document), document.name)


def _apply_logical_types(columns: Sequence[Column], document: SchemaDocument) -> tuple[Column, ...]:
    """Return columns with the logical types of a writer's schema; unchanged if that schema has no columns."""
    from airflow_kafka_spark.formats.json.schema import bundle_references, list_readable_fields

    try:
        return apply_writer_types(columns, _list_plain_fields(list_readable_fields(bundle_references(document))))
    except SchemaUnusable:
        return tuple(columns)


def _list_plain_fields(fields: Sequence[Column]) -> list[Column]:
    """Return properties as plain columns, which :class:`.JsonDecoder` takes."""
    return [Column(f.name, f.type, f.nullable, f.comment) for f in fields]
