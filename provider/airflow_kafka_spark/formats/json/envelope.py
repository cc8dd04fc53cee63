"""JSON with the schema beside each value: Connect's JSON converter with ``schemas.enable=true``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import Problem, SchemaInvalid
from airflow_kafka_spark.formats.base import Decoder, Encoder, Format, Kind, duplicate_problems, spark_column
from airflow_kafka_spark.formats.json.connect_schema import TimestampPrecision, connect_schema
from airflow_kafka_spark.formats.json.format import Json
from airflow_kafka_spark.formats.types import Array, Column, DataType, Map, SparkSchema, Struct, Text, backticked

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column as SparkColumn

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
    column                   what the record's schema may say
    =======================  ====================================================================================================
    decimal(p,s)             Connect's ``Decimal`` (the unscaled value in base64, or a number); numbers and strings without a name
    date                     Connect's and Debezium's ``Date`` (days); ``string``
    timestamp,               Connect's ``Timestamp``, Debezium's ``Timestamp`` (milliseconds), ``MicroTimestamp``,
    timestamp_ntz            ``NanoTimestamp`` (whole microseconds); ``string``, as Debezium's ``ZonedTimestamp``
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
    :param timestamps: how timestamps are written: ``millis`` (default), Connect's ``Timestamp`` (a value with microseconds makes
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

    def arrow_schema(self) -> pa.Schema:
        """Return the columns in Arrow.

        :raises SchemaInvalid: the schema cannot be read.
        """
        return Json(self.schema).arrow_schema()

    def decoder(self) -> Decoder:
        """Return a picklable decoder.

        :raises SchemaInvalid: the schema cannot be read.
        """
        from airflow_kafka_spark.formats.json.tasks.envelope import EnvelopeDecoder

        return EnvelopeDecoder(self.columns, defaults=self.replace_null_with_default)

    # --- writing ---

    def encoding_problems(self, where: str, columns: Sequence[str]) -> list[Problem]:
        """Return why columns cannot be written: the envelope needs their types, so the schema must have them."""
        wrong = self.validate(where)
        if wrong:
            return wrong
        known = {c.name for c in self.columns}
        missing = [c for c in columns if c not in known]
        return [
            *(Problem(f"{where}.schema", f"column `{c}` is not in it; expected the type of each", "Add it") for c in missing),
            *duplicate_problems(where, columns),
        ]

    def _written(self, names: Sequence[str]) -> list[Column]:
        known = {c.name: c for c in self.columns}
        return [known[name] for name in names]

    def _before(self, columns: Sequence[Column]) -> str:
        schema = json.dumps(connect_schema(columns, self.timestamps), ensure_ascii=False, separators=(",", ":"))
        return f'{{"schema":{schema},"payload":'

    def encode(self, columns: Sequence[str]) -> SparkColumn:
        """Return one envelope per row: the columns, cast to their declared types, after the schema derived from these."""
        from pyspark.sql import functions as F

        written = self._written(columns)
        fields = []
        for c in written:
            column = spark_column(c.name).cast(_cast_type(c.type))
            if not c.nullable:
                refused = F.raise_error(F.lit(f"Column `{c.name}` is null, and declared NOT NULL")).cast(_cast_type(c.type))
                column = F.when(column.isNull(), refused).otherwise(column)
            fields.append(self._value(column, c.type, c.name).alias(c.name))
        payload = F.to_json(F.struct(*fields), {"ignoreNullFields": "false"})
        return F.concat(F.lit(self._before(written)), payload, F.lit("}")).cast("binary")

    def _value(self, column: SparkColumn, data_type: DataType, path: str) -> SparkColumn:
        """Return the expression from which to_json writes the JSON that the schema describes."""
        from pyspark.sql import functions as F

        if isinstance(data_type, Struct):
            fields = [self._value(column.getField(f.name), f.type, f"{path}.{f.name}").alias(f.name) for f in data_type.fields]
            return F.when(column.isNotNull(), F.struct(*fields))
        if isinstance(data_type, Array):
            element = data_type.element
            return F.transform(column, lambda item: self._value(item, element, f"{path}[]"))
        if isinstance(data_type, Map):
            value = data_type.value
            return F.transform_values(column, lambda _, item: self._value(item, value, f"{path}[]"))
        if str(data_type) == "date":
            return F.unix_date(column)
        if str(data_type) not in ("timestamp", "timestamp_ntz"):
            return column
        fine = F.unix_micros(column.cast("timestamp"))
        if self.timestamps == "micros":
            return fine
        refused = F.raise_error(F.lit(f"Column `{path}` holds microseconds, which Connect's Timestamp has not"))
        return F.when(fine % 1000 != 0, refused.cast("bigint")).otherwise(F.unix_millis(column.cast("timestamp")))

    def encoder(self, columns: Sequence[tuple[str, Kind]]) -> Encoder | None:
        """Return the encoder if the kind of each column fits its declared type; None for decimals and ``varchar(n)``."""
        from airflow_kafka_spark.formats.json.tasks.envelope import EnvelopeEncoder

        try:
            written = self._written([name for name, _ in columns])
        except (KeyError, SchemaInvalid):
            return None
        kinds = [kind for _, kind in columns]
        if not columns or [_KINDS.get(str(c.type)) for c in written] != kinds:
            return None
        return EnvelopeEncoder(self._before(written), tuple(zip(written, kinds, strict=True)), self.timestamps)


def _cast_type(data_type: DataType) -> str:
    """Return a type for a cast: without lengths, at which Spark would cut, and without NOT NULL."""
    if isinstance(data_type, Struct):
        fields = ",".join(f"{backticked(f.name)}:{_cast_type(f.type)}" for f in data_type.fields)
        return f"struct<{fields}>"
    if isinstance(data_type, Array):
        return f"array<{_cast_type(data_type.element)}>"
    if isinstance(data_type, Map):
        return f"map<string,{_cast_type(data_type.value)}>"
    return "string" if isinstance(data_type, Text) else str(data_type)
