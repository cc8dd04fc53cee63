"""Transforms of headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.transforms.base import (
    FIXED,
    ColumnTransform,
    KeyOrValueTransform,
    NullDefaultTransform,
    RecordSchema,
    rebuild_struct,
)
from airflow_kafka_spark.transforms.conversions import to_text
from airflow_kafka_spark.transforms.options import find_name_problems, find_names_problems, parse_names

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType


@dataclass(frozen=True)
class DropHeaders(ColumnTransform):
    """Removes all headers of these names.

    :param headers: their names.
    """

    headers: str | Sequence[str]

    def validate(self, where: str) -> list[Problem]:
        return [*super().validate(where), *find_names_problems(f"{where}.headers", self.headers)]

    def changes(self, record: RecordSchema) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        names = list(parse_names(self.headers))
        return {"headers": F.filter("headers", lambda header: ~header.getField("key").isin(names))}


@dataclass(frozen=True)
class InsertHeader(ColumnTransform):
    """Appends a header, even if there is one of the same name.

    :param header: its name.
    :param value_literal: its value, a text that is written in UTF-8. ``null`` is a header without a value; of a text in double
        quotes, the inner text is written.
    """

    header: str
    value_literal: str

    def validate(self, where: str) -> list[Problem]:
        problems = [*super().validate(where), *find_name_problems(f"{where}.header", self.header)]
        if not isinstance(self.value_literal, str):
            what = f"found {self.value_literal!r}; expected a text"
            problems.append(Problem(f"{where}.value_literal", what, "Write it as a text"))
        return problems

    def changes(self, record: RecordSchema) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        text: str | None = self.value_literal
        if text == "null":
            text = None
        elif text is not None and len(text) > 1 and text[0] == text[-1] == '"':
            text = text[1:-1].replace(r"\"", '"')
        return {"headers": _append_headers([(self.header, F.lit(text).cast("string").cast("binary"))])}


@dataclass(frozen=True)
class HeaderFrom(NullDefaultTransform, KeyOrValueTransform):
    """Appends fields of the key or value as headers.

    A header's value is the field's value in text, as Connect's ``SimpleHeaderConverter`` writes it: numbers and texts unchanged,
    binaries in base64, timestamps in ISO 8601, structures in JSON; null stays null. A tombstone has no fields, which is an error
    of the record, as in Connect.

    :param fields: the fields; one may become several headers.
    :param headers: the headers' names, in the same order.
    :param operation: ``move`` takes the fields out of the key or value, ``copy`` leaves them.
    """

    fields: str | Sequence[str]
    headers: str | Sequence[str]
    operation: Literal["copy", "move"]

    def validate(self, where: str) -> list[Problem]:
        wrong = find_names_problems(f"{where}.fields", self.fields, twice=True)
        wrong += find_names_problems(f"{where}.headers", self.headers, twice=True, what="headers")
        problems = [*super().validate(where), *wrong]
        if not wrong and len(parse_names(self.headers)) != len(parse_names(self.fields)):
            what = f"found {len(parse_names(self.headers))} for {len(parse_names(self.fields))} fields; expected one for each"
            problems.append(Problem(f"{where}.headers", what, "Name a header for each field"))
        if self.operation not in ("copy", "move"):
            what = f'found {self.operation!r}; expected "copy" or "move"'
            problems.append(Problem(f"{where}.operation", what, "Correct it"))
        return problems

    def changes(self, record: RecordSchema) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        names = parse_names(self.fields)
        fields: dict[str, DataType] = record.require_fields(self.of, "fields", names)
        whole = F.col(self.of)
        new = [
            (header, to_text(whole.getField(name), fields[name]).cast("binary"))
            for name, header in zip(names, parse_names(self.headers), strict=True)
        ]
        # A record without key or value keeps its headers.
        made = {
            "headers": F.when(whole.isNotNull(), _append_headers(new)).otherwise(F.col("headers")),
            "error": self.make_missing_value_error(),
        }
        if self.operation == "move":
            made[self.of] = rebuild_struct(whole, {n: whole.getField(n) for n in fields if n not in names})
        return made


def _append_headers(new: Sequence[tuple[str, Column]]) -> Column:
    """Return the record's headers, followed by further ones."""
    from pyspark.sql import functions as F

    kind = FIXED["headers"]
    more = F.array(*(F.struct(F.lit(name).alias("key"), value.alias("value")) for name, value in new))
    return F.concat(F.coalesce(F.col("headers"), F.array().cast(kind)), more.cast(kind))
