"""TimestampConverter: moments in other forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from airflow_kafka_spark.errors import Problem, ValidationError
from airflow_kafka_spark.transforms import moments
from airflow_kafka_spark.transforms import record as r
from airflow_kafka_spark.transforms.base import OfPart
from airflow_kafka_spark.transforms.defaults import KeepsNulls
from airflow_kafka_spark.transforms.patterns import date_format_problems
from airflow_kafka_spark.transforms.texts import shown

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType

TargetType = Literal["string", "unix", "Date", "Time", "Timestamp"]
Precision = Literal["seconds", "milliseconds", "microseconds", "nanoseconds"]

_LIMIT = 253402300800000  # the first millisecond of the year 10000: what is beyond cannot be a timestamp


@dataclass(frozen=True)
class TimestampConverter(KeepsNulls, OfPart):
    """A moment in another form: a text, a number since 1970 (UTC), or Spark's date or timestamp. Nulls stay null.

    What comes may be a text, an integer, a date or a timestamp: its type says which. What cannot be read is the record's error.

    :param target_type: ``string``, ``unix`` (bigint), ``Date`` (date), ``Time`` (a timestamp on 1970-01-01: Spark 4.0 has no
        type for times of day) or ``Timestamp`` (timestamp).
    :param field: the field; empty where the whole key or value is the moment.
    :param format: a datetime pattern of Spark's (for whole milliseconds, seconds and coarser the same as Java's
        SimpleDateFormat, whose week years and weeks are written, too): how a text is read, and how one is written.
    :param unix_precision: what numbers count, read and written. Read numbers are cut to milliseconds, as in Connect.
    """

    target_type: TargetType
    field: str = ""
    format: str = ""
    unix_precision: Precision = "milliseconds"

    def validate(self, where: str) -> list[Problem]:
        problems = super().validate(where)
        for option, allowed in (("target_type", get_args(TargetType)), ("unix_precision", get_args(Precision))):
            if getattr(self, option) not in allowed:
                what = f"found {getattr(self, option)!r}; expected one of {', '.join(allowed)}"
                problems.append(Problem(f"{where}.{option}", what, "Correct it"))
        if not isinstance(self.field, str):
            problems.append(Problem(f"{where}.field", f"found {self.field!r}; expected a name, or an empty text", "Correct it"))
        if self.format or self.target_type == "string":
            problems += date_format_problems(f"{where}.format", self.format)
        return problems

    def changes(self, record: r.Record) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        whole = F.col(self.of)
        if not self.field:
            had = record.type_of(self.of)
            made = self._written(self._read(whole, had, f"the {self.of}"))
            return {self.of: made, "error": self._error(whole, made, had, f"the {self.of}")}
        fields = record.known(self.of, "field", [self.field])
        had, column = fields[self.field], whole.getField(self.field)
        made = self._written(self._read(column, had, f"the field `{self.field}`"))
        all_fields = {n: made if n == self.field else whole.getField(n) for n in fields}
        return {self.of: r.rebuilt(whole, all_fields), "error": self._error(column, made, had, f"the field `{self.field}`")}

    def _error(self, column: Column, made: Column, had: DataType, what: str) -> Column:
        from pyspark.sql import functions as F
        from pyspark.sql.types import StringType

        expected = f"a text like {self.format}" if isinstance(had, StringType) else f"{self.unix_precision} since 1970"
        if self.target_type == "unix":
            expected += f" that {self.unix_precision} can count"
        failed = column.isNotNull() & made.isNull()
        return F.when(failed, F.concat(F.lit(f"{what} is "), shown(column, had), F.lit(f", expected {expected}")))

    def _read(self, column: Column, had: DataType, what: str) -> Column:
        """The moment as a timestamp; null where it is none."""
        from pyspark.sql import functions as F
        from pyspark.sql import types as t

        if isinstance(had, t.StringType):
            if not self.format:
                found = f"{what} is a string, and there is no format to read it by"
                raise ValidationError([Problem("format", found, "Give one, for instance `yyyy-MM-dd HH:mm:ss`")])
            if letters := moments.unreadable(self.format):
                found = f"{what} is a string, which cannot be read by `{self.format}`: {', '.join(letters)}"
                raise ValidationError([Problem("format", found, "Leave these letters out; `E` may only stand at the beginning")])
            return moments.read(column, self.format)
        if isinstance(had, t.IntegralType):
            millis = self._millis(column.cast("bigint"))
            return F.when(F.abs(millis.cast("double")) < _LIMIT, F.timestamp_millis(millis))
        if isinstance(had, (t.DateType, t.TimestampType, t.TimestampNTZType, t.NullType)):
            return column.cast("timestamp")
        found = f"{what} is {had.simpleString()}; expected a string, an integer, a date or a timestamp"
        raise ValidationError([Problem("field", found, "Name another field")])

    def _millis(self, column: Column) -> Column:
        from pyspark.sql import functions as F

        if self.unix_precision == "seconds":
            return F.try_multiply(column, F.lit(1000).cast("bigint"))
        per_milli = {"milliseconds": 1, "microseconds": 1000, "nanoseconds": 1000000}[self.unix_precision]
        return _div(column, per_milli)

    def _written(self, moment: Column) -> Column:
        from pyspark.sql import functions as F

        if self.target_type == "string":
            return moments.written(moment, self.format)
        if self.target_type == "Date":
            return F.to_date(moment)
        if self.target_type == "Time":
            micros = F.unix_micros(moment)
            return F.timestamp_micros(F.pmod(micros, F.lit(86400000000).cast("bigint")))
        if self.target_type == "Timestamp":
            return moment
        if self.unix_precision == "nanoseconds":
            return F.try_multiply(F.unix_micros(moment), F.lit(1000).cast("bigint"))
        if self.unix_precision == "microseconds":
            return F.unix_micros(moment)
        millis = F.unix_millis(moment)
        return millis if self.unix_precision == "milliseconds" else _div(millis, 1000)


def _div(column: Column, by: int) -> Column:
    """Whole numbers divided, towards 0, exactly."""
    from pyspark.sql import functions as F

    if by == 1:
        return column
    divisor = F.lit(by).cast("bigint")
    return F.call_function("div", column, divisor)
