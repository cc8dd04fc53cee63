"""Cast: fields of other types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import Problem, ValidationError
from airflow_kafka_spark.transforms import record as r
from airflow_kafka_spark.transforms.base import OfPart
from airflow_kafka_spark.transforms.defaults import KeepsNulls
from airflow_kafka_spark.transforms.texts import as_text, shown

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType

TYPES = {
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    "float32": "float",
    "float64": "double",
    "boolean": "boolean",
    "string": "string",
}
"""Connect's types, as Spark names them."""

_INTEGERS = ("int8", "int16", "int32", "int64")


@dataclass(frozen=True)
class Cast(KeepsNulls, OfPart):
    """Casts fields, or a whole key or value, to other types.

    Numbers lose their fraction on the way to an integer; booleans are 1 and 0; a number is true unless its whole part is 0; a
    text is true when it is ``true``, in any case; dates are days and timestamps milliseconds since 1970; binaries become base64.
    What does not fit is the record's error (Connect cuts numbers off instead). Nulls stay null.

    :param spec: field -> type, ``"id:int64,price:float64"``, a list of such pairs, or a mapping; one type casts the whole key or
        value. The types are int8, int16, int32, int64, float32, float64, boolean, string, in any case.
    """

    spec: str | Sequence[str] | Mapping[str, str]

    def validate(self, where: str) -> list[Problem]:
        problems = super().validate(where)
        known = ", ".join(TYPES)
        if not self.spec or not isinstance(self.spec, (str, Sequence, Mapping)):
            what = f"found {self.spec!r}; expected `field:type` pairs, or one type for the whole {self.of}"
            return [*problems, Problem(f"{where}.spec", what, f"The types are {known}")]
        try:
            wanted = self._wanted()
        except ValueError as error:
            return [*problems, Problem(f"{where}.spec", str(error), f"The types are {known}")]
        for name, target in wanted.items():
            if target not in TYPES:
                what = f"found the type {target!r}{f' of the field `{name}`' if name else ''}; expected one of {known}"
                problems.append(Problem(f"{where}.spec", what, "Correct it"))
        return problems

    def _wanted(self) -> dict[str, str]:
        """Field -> type; the whole key or value is the field without a name."""
        if isinstance(self.spec, Mapping):
            if "" in self.spec and len(self.spec) > 1:
                raise ValueError(f"found {self.spec!r}; expected fields, or one type for the whole {self.of}")
            return {name: str(target).lower() for name, target in self.spec.items()}
        given = r.listed(self.spec)
        if not given:
            raise ValueError(f"found {self.spec!r}; expected `field:type` pairs, or one type for the whole {self.of}")
        if len(given) == 1 and isinstance(given[0], str) and ":" not in given[0]:
            return {"": given[0].lower()}
        return {name: target.lower() for name, target in r.pairs(given).items()}

    def changes(self, record: r.Record) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        wanted = self._wanted()
        whole = F.col(self.of)
        if "" in wanted:
            had = record.type_of(self.of)
            new = self._cast(whole, had, wanted[""], f"the {self.of}")
            return {self.of: new, "error": self._error(whole, new, had, wanted[""], f"the {self.of}")}
        fields = record.known(self.of, "spec", list(wanted))
        made = {n: self._cast(whole.getField(n), fields[n], target, f"the field `{n}`") for n, target in wanted.items()}
        errors = [self._error(whole.getField(n), made[n], fields[n], target, f"the field `{n}`") for n, target in wanted.items()]
        all_fields = {n: made.get(n, whole.getField(n)) for n in fields}
        return {self.of: r.rebuilt(whole, all_fields), "error": F.coalesce(*errors)}

    def _error(self, column: Column, made: Column, had: DataType, target: str, what: str) -> Column:
        from pyspark.sql import functions as F

        failed = column.isNotNull() & made.isNull()
        return F.when(failed, F.concat(F.lit(f"{what} is "), shown(column, had), F.lit(f", expected {target}")))

    def _cast(self, column: Column, had: DataType, target: str, what: str) -> Column:
        """The value in another type; null where it does not fit.

        :raises ValidationError: there is no such cast.
        """
        from pyspark.sql import types as t

        simple = (t.NumericType, t.BooleanType, t.StringType, t.DateType, t.TimestampType, t.TimestampNTZType, t.NullType)
        if not isinstance(had, (*simple, t.BinaryType)) or (isinstance(had, t.BinaryType) and target != "string"):
            found = f"{what} is {had.simpleString()}, which cannot be cast to {target}"
            raise ValidationError([Problem("spec", found, "Cast a field of it, or write Sql(columns={...})")])
        if target == "string":
            return as_text(column, had)
        return _to_boolean(column, had) if target == "boolean" else _to_number(column, had, target)


def _number(column: Column, had: DataType) -> tuple[Column, DataType]:
    """Dates and times as the numbers that they are in Connect; everything else as it is."""
    from pyspark.sql import functions as F
    from pyspark.sql import types as t

    if isinstance(had, t.DateType):
        return F.unix_date(column), t.IntegerType()
    if isinstance(had, (t.TimestampType, t.TimestampNTZType)):
        return F.unix_millis(column.cast("timestamp")), t.LongType()
    return column, had


def _to_boolean(column: Column, had: DataType) -> Column:
    from pyspark.sql import functions as F
    from pyspark.sql import types as t

    if isinstance(had, (t.BooleanType, t.NullType)):
        return column.cast("boolean")
    if isinstance(had, t.StringType):
        return F.lower(column) == F.lit("true")
    column, had = _number(column, had)
    whole = F.abs(column.cast("double") if isinstance(had, t.IntegralType) else column) >= 1
    return whole & ~F.isnan(column) if isinstance(had, (t.FloatType, t.DoubleType)) else whole


def _to_number(column: Column, had: DataType, target: str) -> Column:
    from pyspark.sql import functions as F
    from pyspark.sql import types as t

    column, had = _number(column, had)
    made = column.try_cast(TYPES[target])
    if isinstance(had, t.StringType) and target in _INTEGERS:
        return F.when(column.rlike(r"\A[+-]?[0-9]+\z"), made)
    return made
