"""Wait until an upstream pipeline has completed a window."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.ledger.topic import LedgerReader
from airflow_kafka_spark.triggers import casting
from airflow_kafka_spark.triggers.base import KafkaTrigger, Sight
from airflow_kafka_spark.windows.completed import Wanted, completed

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook


class WindowWatch:
    """Looks whether a window is complete. Arguments as :class:`KafkaWindowTrigger`."""

    def __init__(
        self,
        *,
        pipeline: str,
        run: str | None = None,
        after: Any = None,
        since: Any = None,
        ledger_topic: str = "airflow-windows",
    ) -> None:
        self._problems: list[Problem] = []
        if not isinstance(pipeline, str) or not pipeline.strip():
            self._problems.append(Problem("pipeline", f"`{pipeline}` is not the name of a pipeline"))
        if run and (not isinstance(run, str) or run.count("/") < 2):
            expected = "Give it as `<dag_id>/<run_id>/<task_id>`"
            self._problems.append(Problem("run", f"`{run}` is not a task of a run", expected))
        moment = casting.instant("since", since, self._problems)
        number = casting.whole("after", after, self._problems)
        self.wanted = Wanted(run or None, number, moment.timestamp() if moment else None)
        if not self._problems and self.wanted == Wanted():
            self._problems.append(Problem("run", "nothing to wait for is given", "Give `run`, `after` or `since`"))
        self._ledger = LedgerReader(pipeline, ledger_topic)

    def problems(self) -> list[Problem]:
        return self._problems

    def look(self, hook: KafkaHook) -> Sight:
        memory = self._ledger.look(hook)
        found = completed(memory, self.wanted)
        if found is None:
            unfinished = memory.open_entry
            state = f"its last complete window is {memory.last_number}" if memory.exists else "the ledger does not know it yet"
            state += f", window {unfinished.window.number} is open" if unfinished else ""
            return Sight(False, line=f"Pipeline {memory.pipeline} has not completed {self.wanted}: {state}")
        value = {"pipeline": memory.pipeline, "window": found.window, "run": found.run, "report": dict(found.report)}
        return Sight(True, value, f"Window {found.window} of pipeline {memory.pipeline} is complete (run {found.run})")


class KafkaWindowTrigger(KafkaTrigger):
    """Fires once a pipeline has completed a window: all that is given has to hold of it.

    :param pipeline: the pipeline.
    :param run: the run that planned it, ``<dag_id>/<run_id>/<task_id>``.
    :param after: a window's number: it comes behind that.
    :param since: it was completed at or after this moment, in ISO 8601.
    :param ledger_topic: where pipelines have their ledger.
    :param options: as :class:`KafkaTrigger`.
    """

    def __init__(
        self,
        *,
        pipeline: str,
        run: str | None = None,
        after: int | str | None = None,
        since: str | datetime | None = None,
        ledger_topic: str = "airflow-windows",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.pipeline = pipeline
        self.run_id = run
        self.after = after
        self.since = since.isoformat() if isinstance(since, datetime) else since
        self.ledger_topic = ledger_topic

    def options(self) -> dict[str, Any]:
        return {
            "pipeline": self.pipeline, "run": self.run_id, "after": self.after, "since": self.since,
            "ledger_topic": self.ledger_topic,
        }  # fmt: skip

    def watch(self) -> WindowWatch:
        return WindowWatch(**self.options())
