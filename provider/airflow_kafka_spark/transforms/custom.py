"""Transforms that users write themselves: in Spark's SQL, or as a Python function of a frame."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from airflow_kafka_spark.errors import KafkaSparkError, Problem, ValidationError
from airflow_kafka_spark.transforms.base import SCOPE, ColumnTransform, RecordSchema, Transform, require_boolean
from airflow_kafka_spark.transforms.options import find_name_problems, find_sql_problems

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


@dataclass(frozen=True)
class Sql(ColumnTransform):
    """Computes a new value with Spark's SQL, leaves records out, or both. A tombstone stays one, and is not left out.

    The expressions name fields and parts of a record like those of
    :class:`~airflow_kafka_spark.transforms.predicates.Condition`. Each record is processed by itself: aggregates and window
    functions (``OVER``) are refused. An error in an expression (a cast, an overflow) fails the job:
    ``try_cast``, ``try_divide`` and the like give null instead.

    :param columns: field -> expression: the fields of the new value, in order; None (default) keeps the value.
    :param filter: a condition on the record before ``columns``: records for which it does not hold are left out; default None.
    """

    over_fields: ClassVar[bool] = True

    columns: Mapping[str, str] | None = None
    filter: str | None = None

    def validate(self, where: str) -> list[Problem]:
        problems = super().validate(where)
        if self.columns is None and self.filter is None:
            return [*problems, Problem(where, "found neither `columns` nor `filter`; expected one", "Give one, or both")]
        if self.filter is not None:
            problems += find_sql_problems(f"{where}.filter", self.filter, "a condition, for instance `amount > 10`")
        if self.columns is None:
            return problems
        if not isinstance(self.columns, Mapping) or not self.columns:
            what = f"found {self.columns!r}; expected fields and their expressions"
            return [*problems, Problem(f"{where}.columns", what, 'Write for instance {"cents": "amount * 100"}')]
        for name, text in self.columns.items():
            problems += find_name_problems(f"{where}.columns", name)
            problems += find_sql_problems(f"{where}.columns", text, f"an expression for `{name}`")
        return problems

    def apply_guarded(self, frame: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        if self.filter is not None:
            require_boolean(frame, F.expr(self.filter), "filter")
        return super().apply_guarded(frame)

    def make_changes(self, record: RecordSchema) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        has_value = F.col(SCOPE).getField("value").isNotNull()
        made = {}
        if self.columns is not None:
            new = F.struct(*(F.expr(text).alias(name) for name, text in self.columns.items()))
            made["value"] = F.when(has_value, new)
        if self.filter is not None:
            # Not written with `or`, so that the condition is not computed for a tombstone.
            made["keep"] = F.when(has_value, F.expr(self.filter)).otherwise(F.lit(True))
        return made


@dataclass(frozen=True)
class Python(Transform):
    """Applies a function of a record frame, with the contract of :meth:`Transform.apply`: one row for each row, in place.

    The function may use all of Spark, but must neither leave records out (``Filter`` and ``Sql`` do) nor join, group, sort or
    repartition: the job detects that, and fails. It has to keep all columns, and may set ``__kafka_error``.

    :param function: called once, on the driver, when the job is planned.
    """

    function: Callable[[DataFrame], DataFrame]

    @property
    def name(self) -> str:
        called = getattr(self.function, "__name__", "")
        return f"Python({called})" if called else "Python"

    def validate(self, where: str) -> list[Problem]:
        problems = super().validate(where)
        if isinstance(self.function, type):
            what = (
                f"found the class `{self.function.__name__}`; expected an instance of a transform, or a function of a DataFrame"
            )
            problems.append(Problem(where, what, f"Write `{self.function.__name__}(...)`"))
        elif not callable(self.function):
            what = f"found {self.function!r}; expected a transform, or a function of a DataFrame"
            problems.append(Problem(where, what, "Write for instance Cast('id:int64')"))
        return problems

    def apply(self, frame: DataFrame) -> DataFrame:
        from pyspark.errors import AnalysisException, ParseException

        try:
            return self.function(frame)
        except (AnalysisException, ParseException, KafkaSparkError):
            raise
        except Exception as error:
            reason = f"it raised {type(error).__name__}: {error}"
            raise ValidationError([Problem("function", reason, "Correct the function")]) from error
