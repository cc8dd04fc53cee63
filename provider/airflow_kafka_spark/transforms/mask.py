"""MaskField: values that nobody shall see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import Problem, ValidationError
from airflow_kafka_spark.transforms import record as r
from airflow_kafka_spark.transforms.base import OfPart
from airflow_kafka_spark.transforms.defaults import KeepsNulls
from airflow_kafka_spark.transforms.fields import names_problems

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType

_BITS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}


@dataclass(frozen=True)
class MaskField(KeepsNulls, OfPart):
    """Fields get a value that says nothing: 0, false, an empty text or list, 1970-01-01. Nulls stay null.

    A tombstone has no fields: that is its error, as in Connect.

    :param fields: the fields.
    :param replacement: instead; for texts and numbers only.
    """

    fields: str | Sequence[str]
    replacement: str | None = None

    def validate(self, where: str) -> list[Problem]:
        problems = [*super().validate(where), *names_problems(f"{where}.fields", self.fields)]
        if self.replacement is not None and not (isinstance(self.replacement, str) and self.replacement):
            what = f"found {self.replacement!r}; expected a text that is not empty"
            problems.append(Problem(f"{where}.replacement", what, "Leave it out for an empty text, 0 and so on"))
        return problems

    def changes(self, record: r.Record) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        names = r.listed(self.fields)
        fields = record.known(self.of, "fields", names)
        masks = {name: self._mask(name, fields[name]) for name in names}
        problems = [mask for mask in masks.values() if isinstance(mask, Problem)]
        if problems:
            raise ValidationError(problems)
        whole = F.col(self.of)
        made = {name: whole.getField(name) for name in fields}
        made |= {n: F.when(made[n].isNotNull(), m) for n, m in masks.items() if not isinstance(m, Problem)}
        return {self.of: r.rebuilt(whole, made), "error": self.no_value()}

    def _mask(self, name: str, found: DataType) -> Column | Problem:
        kind = found.simpleString()
        mask = nothing_of(found) if self.replacement is None else _replaced(self.replacement, found)
        if mask is not None:
            return mask
        if self.replacement is None:
            what = f"the field `{name}` is {kind}, for which there is no mask"
            return Problem("fields", what, "Leave it out with ReplaceField(exclude=...)")
        what = f"the field `{name}` is {kind}, which cannot hold {self.replacement!r}; expected a text or a number that can"
        return Problem("replacement", what, "Mask it in a MaskField of its own")


def nothing_of(found: DataType) -> Column | None:
    """The value of a type that says nothing; None where there is none."""
    from pyspark.sql import functions as F
    from pyspark.sql import types as t

    if isinstance(found, t.MapType):
        none = F.array().cast(t.ArrayType(found.keyType)), F.array().cast(t.ArrayType(found.valueType))
        return F.map_from_arrays(*none)
    if isinstance(found, t.ArrayType):
        return F.array().cast(found)
    if isinstance(found, t.NumericType):
        return F.lit(0).cast(found)
    if isinstance(found, (t.DateType, t.TimestampType, t.TimestampNTZType)):
        return F.lit("1970-01-01").cast(found)
    return F.lit("") if isinstance(found, t.StringType) else F.lit(False) if isinstance(found, t.BooleanType) else None


def _replaced(text: str, found: DataType) -> Column | None:
    """A text in a type; None where the type cannot hold it."""
    from pyspark.sql import functions as F
    from pyspark.sql import types as t

    if isinstance(found, t.StringType):
        return F.lit(text)
    if not text.isascii() or "_" in text:  # which Python takes for numbers, but Spark does not
        return None
    try:
        if isinstance(found, t.IntegralType):
            limit = 2 ** (_BITS[found.simpleString()] - 1)
            whole = Decimal(text)
            return F.lit(str(int(whole))).cast(found) if -limit - 1 < whole < limit else None
        if isinstance(found, (t.FloatType, t.DoubleType)):
            return F.lit(repr(float(text))).cast(found)
        if isinstance(found, t.DecimalType):
            number = Decimal(text)
            fits = number == round(number, found.scale) and abs(number) < 10 ** (found.precision - found.scale)
            return F.lit(text).cast(found) if fits else None
    except (ValueError, InvalidOperation):
        return None
    return None
