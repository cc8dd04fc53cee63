"""The options of a verification, and the checks of them that need no server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.sinks.base import Sink
from airflow_kafka_spark.sources.jdbc.source import JdbcSource


@dataclass(frozen=True)
class VerificationOptions:
    """The arguments of :class:`~airflow_kafka_spark.operators.VerifyOperator`, which documents them."""

    source: JdbcSource
    sink: Sink | JdbcSource
    columns: Mapping[str, str] = field(default_factory=dict)
    exclude_columns: Sequence[str] = ()
    where: str = ""
    sink_where: str = ""
    chunk_rows: int = 100_000
    parallel: int = 4
    rechecks: int = 0
    recheck_delay: float = 30.0
    max_keys: int = 100
    on_difference: Literal["fail", "warn"] = "fail"

    def problems(self) -> list[Problem]:
        """Return what is wrong with these options by themselves."""
        least = {"chunk_rows": 1, "parallel": 1, "rechecks": 0, "max_keys": 1}
        found = [
            Problem(where, f"`{getattr(self, where)}` is not a whole number of at least {number}")
            for where, number in least.items()
            if getattr(self, where) < number
        ]
        if not 0 <= self.recheck_delay < 1e9:
            found.append(Problem("recheck_delay", f"it is {self.recheck_delay!r}; expected seconds, at least 0"))
        if self.on_difference not in ("fail", "warn"):
            found.append(Problem("on_difference", f"`{self.on_difference}` is not one of fail, warn"))
        return found
