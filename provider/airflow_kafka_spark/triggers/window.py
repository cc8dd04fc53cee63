"""Wait until an upstream pipeline has completed a window."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.ledger.topic import LedgerReader
from airflow_kafka_spark.triggers.base import Count, Instant, KafkaTrigger, Polling, ProbeResult, parse_count, parse_instant
from airflow_kafka_spark.windows.completed import WindowCriteria, find_completed

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook


class WindowProbe:
    """Checks that a pipeline has completed a window. Arguments are those of :class:`KafkaWindowTrigger`."""

    def __init__(
        self,
        *,
        pipeline: str,
        run: str | None = None,
        after: Count = None,
        since: Instant = None,
        ledger_topic: str = "airflow-windows",
    ) -> None:
        self._problems: list[Problem] = []
        if not isinstance(pipeline, str) or not pipeline.strip():
            self._problems.append(Problem("pipeline", f"`{pipeline}` is not the name of a pipeline"))
        if run and (not isinstance(run, str) or run.count("/") < 2):
            expected = "Give it as `<dag_id>/<run_id>/<task_id>`"
            self._problems.append(Problem("run", f"`{run}` is not a task of a run", expected))
        moment = parse_instant("since", since, self._problems)
        number = parse_count("after", after, self._problems)
        self.wanted = WindowCriteria(run or None, number, moment.timestamp() if moment else None)
        if not self._problems and self.wanted == WindowCriteria():
            self._problems.append(Problem("run", "nothing to wait for is given", "Give `run`, `after` or `since`"))
        self._ledger = LedgerReader(pipeline, ledger_topic)

    def problems(self) -> list[Problem]:
        return self._problems

    def check(self, hook: KafkaHook) -> ProbeResult:
        memory = self._ledger.read(hook)
        found = find_completed(memory, self.wanted)
        if found is None:
            unfinished = memory.open_entry
            state = f"its last complete window is {memory.last_number}" if memory.exists else "the ledger does not know it yet"
            state += f", window {unfinished.window.number} is open" if unfinished else ""
            return ProbeResult(False, line=f"Pipeline {memory.pipeline} has not completed {self.wanted}: {state}")
        value = {"pipeline": memory.pipeline, "window": found.window, "run": found.run, "report": dict(found.report)}
        return ProbeResult(True, value, f"Window {found.window} of pipeline {memory.pipeline} is complete (run {found.run})")


class KafkaWindowTrigger(KafkaTrigger[WindowProbe]):
    """Fires once a pipeline has completed a window that meets all given conditions.

    :param pipeline: name of the pipeline.
    :param run: run that planned the window, ``<dag_id>/<run_id>/<task_id>``; default None, any run.
    :param after: lower bound of the window's number, exclusive; default None.
    :param since: earliest time of completion, a ``datetime`` or text in ISO 8601; default None.
    :param ledger_topic: topic that contains the ledger of the pipeline; default ``airflow-windows``.
    :param kafka_conn_id: Airflow connection of type ``kafka``; default ``kafka_default``.
    :param poll_interval: seconds between two checks; default 60.
    :param retry_timeout: seconds for which brokers may be down, or refuse for a temporary reason, before that is a failure;
        default 300.
    :param wait_for_topic: True waits for a topic that does not exist; default False: such a topic is a failure at once.
    :param give_up_at: time at which to stop waiting, in seconds since the epoch; None (default) never stops.
    :param silent: True retries after every failure, as a sensor's ``silent_fail`` does; default False.
    """

    def __init__(
        self,
        *,
        pipeline: str,
        run: str | None = None,
        after: int | str | None = None,
        since: str | datetime | None = None,
        ledger_topic: str = "airflow-windows",
        kafka_conn_id: str = "kafka_default",
        poll_interval: float = 60.0,
        retry_timeout: float = 300.0,
        wait_for_topic: bool = False,
        give_up_at: float | None = None,
        silent: bool = False,
    ) -> None:
        super().__init__(Polling(kafka_conn_id, poll_interval, retry_timeout, wait_for_topic, give_up_at, silent))
        self.pipeline = pipeline
        self.run_id = run
        self.after = after
        self.since = since.isoformat() if isinstance(since, datetime) else since
        self.ledger_topic = ledger_topic

    def arguments(self) -> dict[str, Any]:
        return {
            "pipeline": self.pipeline, "run": self.run_id, "after": self.after, "since": self.since,
            "ledger_topic": self.ledger_topic,
        }  # fmt: skip

    def probe(self) -> WindowProbe:
        return WindowProbe(
            pipeline=self.pipeline, run=self.run_id, after=self.after, since=self.since, ledger_topic=self.ledger_topic
        )
