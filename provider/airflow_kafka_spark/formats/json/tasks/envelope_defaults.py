"""Defaults of a record's own schema, in place of the nulls of its payload: Connect's ``replace.null.with.default``.

Runs in Spark's tasks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.formats.json.envelope_schema import named_fields
from airflow_kafka_spark.formats.json.logical_types import plain, plain_columns
from airflow_kafka_spark.formats.json.tasks.decode import JsonDecoder
from airflow_kafka_spark.formats.text import BadValue
from airflow_kafka_spark.formats.types import Array, Column, DataType, Map, Struct, arrow_type


class Number(str):
    """A number of a schema, as it was written: no digit of a default is lost."""


@dataclass(frozen=True)
class Filling:
    """What stands in for nulls of a value, and of its parts.

    :param default: of the value itself, an array of one; None: a null stays one.
    :param parts: of a struct's fields in order, of an array's elements or a map's values.
    """

    default: pa.Array | None = None
    parts: tuple[Filling | None, ...] = ()

    def of(self, array: pa.Array, wanted: pa.DataType) -> pa.Array:
        """The values without the nulls that have a default.

        :param wanted: their type: what may not be null is null in none of them any more.
        """
        if self.parts:
            array = self._inner(array, wanted)
        if self.default is not None and array.null_count:
            array = pc.if_else(array.is_null(), self.default[0], array)
        return array

    def _inner(self, array: pa.Array, wanted: pa.DataType) -> pa.Array:
        gone = array.is_null() if array.null_count else None
        if pa.types.is_struct(wanted):
            fields = zip(self.parts, array.flatten(), wanted, strict=True)
            return pa.StructArray.from_arrays(
                [filled(part, values, f.type) for part, values, f in fields], fields=list(wanted), mask=gone
            )
        (part,) = self.parts
        if pa.types.is_map(wanted):
            items = filled(part, array.items, wanted.item_type)
            return pa.MapArray.from_arrays(_starts(array), array.keys, items, type=wanted)
        return pa.ListArray.from_arrays(_starts(array), filled(part, array.values, wanted.value_type), type=wanted)


def filled(filling: Filling | None, array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """The values, those that are null by their defaults."""
    return array if filling is None else filling.of(array, wanted)


def _starts(array: pa.Array) -> pa.Array:
    """Where each list begins, and the last one ends; null where there is none, which is how lists are made of parts."""
    if not array.null_count:
        return array.offsets
    gone = pa.concat_arrays([array.is_null(), pa.array([False])])
    return pc.if_else(gone, pa.scalar(None, pa.int32()), array.offsets)


def fillings(columns: Sequence[Column], schema: Any) -> tuple[tuple[Column, ...], tuple[Filling | None, ...]]:
    """The columns as a payload may leave them, and what then stands in for their nulls.

    :param columns: with what carries them, by the schema.
    :param schema: the record's, of a struct, in which numbers are :class:`Number`; None says nothing.
    :raises BadValue: a default is none of what its field holds.
    """
    known = named_fields(schema or {})
    lenient, found = [], []
    for column in columns:
        try:
            data_type, filling = _filling(column.type, known.get(column.name, {}))
        except BadValue as e:
            raise e.within(f".{column.name}") from None
        lenient.append(replace(column, type=data_type, nullable=column.nullable or _stands_in(filling)))
        found.append(filling)
    return tuple(lenient), tuple(found)


def _filling(data_type: DataType, schema: Mapping[str, Any]) -> tuple[DataType, Filling | None]:
    parts: tuple[Filling | None, ...] = ()
    wanted = arrow_type(plain(data_type))
    if isinstance(data_type, Struct):
        fields, parts = fillings(data_type.fields, schema)
        data_type = Struct(fields)
    elif isinstance(data_type, Array):
        element, part = _filling(data_type.element, schema.get("items") or {})
        data_type, parts = Array(element, data_type.contains_null or _stands_in(part)), (part,)
    elif isinstance(data_type, Map):
        value, part = _filling(data_type.value, schema.get("values") or {})
        data_type, parts = Map(data_type.key, value, data_type.value_contains_null or _stands_in(part)), (part,)
    inner = Filling(parts=parts) if any(parts) else None
    if schema.get("default") is None:
        return data_type, inner
    return data_type, Filling(filled(inner, _decoded(data_type, schema["default"]), wanted), parts if inner else ())


def _stands_in(filling: Filling | None) -> bool:
    """Whether the value itself is not null any more."""
    return filling is not None and filling.default is not None


def _decoded(data_type: DataType, default: Any) -> pa.Array:
    """A default, which is written as a payload would be."""
    column = Column("default", data_type)
    try:
        text = _json({"default": default})
    except RecursionError:
        raise BadValue("its schema's default is nested too deep") from None
    decoded = JsonDecoder(plain_columns([column]), carried=[column]).decode([text.encode()])
    if decoded.bad:
        raise BadValue(f"its schema's default does not fit: {decoded.bad[0][1]}")
    return decoded.batch.column(0)


def _json(value: Any) -> str:
    """What was read, with its numbers as they were written."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{_json(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_json, value)) + "]"
    return str(value) if isinstance(value, Number) else json.dumps(value)
