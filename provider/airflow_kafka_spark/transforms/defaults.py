"""What Connect's transforms do with a null for which a schema has a default."""

from __future__ import annotations

from dataclasses import dataclass, field

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.transforms.base import ByColumns


@dataclass(frozen=True)
class KeepsNulls(ByColumns):
    """A transform to which Connect gives ``replace.null.with.default``: here a null stays null.

    :param replace_null_with_default: only False, which is Connect's word for that: columns have no defaults.
    """

    replace_null_with_default: bool = field(default=False, kw_only=True)

    def validate(self, where: str) -> list[Problem]:
        problems = super().validate(where)
        if self.replace_null_with_default is not False:
            what = f"found {self.replace_null_with_default!r}; expected False, since Spark's columns have no defaults"
            action = 'Fill in what you want, for instance by Sql({"a": "coalesce(a, 0)"})'
            problems.append(Problem(f"{where}.replace_null_with_default", what, action))
        return problems
