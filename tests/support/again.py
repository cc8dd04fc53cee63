"""A task that continues in its process after its Spark has ended, like a process that moves window after window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow_kafka_spark.errors import SparkUnavailable
from airflow_kafka_spark.operators import KafkaToSinkOperator
from tests.support.pipelines import make


class Again:
    """Run a window until Spark ends in the middle of it, then the same window again, then the next window on a stopped context.

    :param options: those of :func:`tests.support.pipelines.make`.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._operator: KafkaToSinkOperator | None = None

    def execute(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message about the JVM that ended, and the reports of both windows."""
        from pyspark import SparkContext

        said = ""
        try:
            self._run(context)
        except SparkUnavailable as error:
            said = str(error)
        again = self._run(context)
        running: Any = SparkContext._active_spark_context
        running._jsc.sc().stop()
        context["ti"].run_id = "run2"
        return {"said": said, "reports": [again, self._run(context)]}

    def _run(self, context: Mapping[str, Any]) -> dict[str, Any]:
        self._operator = make(**self._options)
        return self._operator.execute(context)

    def on_kill(self) -> None:
        """Call the operator's ``on_kill`` as Airflow does."""
        if self._operator is not None:
            self._operator.on_kill()
