"""Pipelines without Spark: windows are planned, claimed and closed as always, and "moved" by noting their offsets in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from airflow_kafka_spark import faults
from airflow_kafka_spark.formats import String
from airflow_kafka_spark.operators import KafkaToSinkOperator
from airflow_kafka_spark.sinks import FilesSink
from airflow_kafka_spark.windows.model import Applied, OffsetRange
from airflow_kafka_spark.windows.report import Report
from tests.support.clients import find_producer
from tests.support.intervals import BEGIN, hour
from tests.support.runs import Victim
from tests.support.runs import run as run_here

MINUTE_MS = 60_000
BEGIN_MS = round(BEGIN.timestamp() * 1000)


class DryOperator(KafkaToSinkOperator):
    """Move a window by noting its offsets once, like a sink that has a record of its windows.

    :param between: called once, after the plan is made and before it is written.
    :param waiting: called once, when the task waits for the end of its interval.
    :param recorded: True if the sink's record is asked where a pipeline without a position begins; default False.
    """

    def __init__(
        self,
        *,
        moved: Path,
        between: Callable[[], object] | None = None,
        waiting: Callable[[], object] | None = None,
        recorded: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(task_id="task", value=String(), sink=FilesSink(path=str(moved.parent / "nothing")), **kwargs)
        self.moved, self.between, self.waiting, self.recorded = moved, between, waiting, recorded

    def find_all_problems(self, run):
        return []

    def plan(self, ledger, run):
        window = super().plan(ledger, run)
        between, self.between = self.between, None
        if between:
            # The fault is this attempt's.
            wanted = os.environ.pop(faults.FAULT, None)
            between()
            if wanted:
                os.environ[faults.FAULT] = wanted
        return window

    def pause(self, seconds):
        waiting, self.waiting = self.waiting, None
        if waiting and seconds:
            waiting()
        super().pause(seconds)

    def refuse_lost_records(self, ledger, found):
        """Do nothing: this sink has no record of windows."""

    def find_applied(self, window):
        there = window.number in [applied.number for applied in self._list_applied(window.pipeline)]
        return Applied(window.pipeline, window.number, window.ranges) if there else None

    def read_record_of_sink(self, pipeline):
        return max(self._list_applied(pipeline), key=lambda applied: applied.number, default=None) if self.recorded else None

    def _list_applied(self, pipeline):
        for line in self.moved.read_text().splitlines() if self.moved.exists() else ():
            name, number, ranges = line.split(" ", 2)
            if name == pipeline:
                yield Applied(name, int(number), tuple(OffsetRange(*r) for r in json.loads(ranges)))

    def move(self, window, ledger):
        self.check(window)
        ledger.verify()
        ranges = [[r.topic, r.partition, r.start, r.end] for r in window.ranges]
        with self.moved.open("a") as file:
            file.write(f"{window.pipeline} {window.number} {json.dumps(ranges)}\n")
        return Report(window, records_read=window.span)


class Dry:
    """One pipeline of data intervals. Its runs without an interval move the new records."""

    def __init__(self, kafka: Any, unique: Callable[[str], str], directory: Path) -> None:
        os.environ["AIRFLOW_CONN_KAFKA_DEFAULT"] = kafka.connection_json()
        self.kafka, self.name, self.prefix = kafka, unique("dry"), unique("orders")
        self.moved = directory / "moved"
        self.victims: list[Victim] = []
        self.topic = self.add_topic("a")

    def add_topic(self, letter: str, partitions: int = 1) -> str:
        name = f"{self.prefix}-{letter}"
        self.kafka.create_topic(name, partitions)
        return name

    def produce(self, *minutes: float, topic: str | None = None, partition: int = 0) -> None:
        """Produce one record for each number, that many minutes after the beginning."""
        topic = topic or self.topic
        producer = find_producer(self.kafka, topic)
        for minute in minutes:
            producer.produce(topic, b"v", None, partition, timestamp=BEGIN_MS + round(minute * MINUTE_MS))
        assert producer.flush(60) == 0

    def attempt(
        self,
        number: int | None = None,
        *,
        length: int = 1,
        interval: Any = None,
        cleared: int = 0,
        run_id: str = "manual",
        facts: dict[str, Any] | None = None,
        **options: Any,
    ) -> partial[Any]:
        """Run one attempt at an hour, or, without an hour, at the new records. Return its report. Other processes may call it,
        too.

        :param run_id: of a run without an interval, or of another run of the same interval.
        :param facts: further arguments of :func:`~tests.support.runs.context`.
        """
        interval = interval or (None if number is None else hour(number, length))
        facts = {"interval": interval, "max_tries": cleared, **(facts or {})}
        run_id = run_id if interval is None or run_id != "manual" else f"run-{number}-{length}"
        given = {
            "topics_pattern": f"{self.prefix}-.*", "group_id": self.name, "pipeline": self.name, "window": "interval", "grace": 0,
            "on_missing_interval": "progress", "ledger_topic": f"ledger-{self.name}", "moved": self.moved,
        }  # fmt: skip
        return partial(run_here, DryOperator, {**given, **options}, run_id, **facts)

    def run(self, number: int | None = None, **options: Any) -> Any:
        """Run the attempt in this process."""
        return self.attempt(number, **options)()

    def killed(self, number: int | None = None, *, fault: str, **options: Any) -> None:
        """Run the attempt in a separate process, which dies by SIGKILL at ``fault``."""
        asked = self.attempt(number, **options)
        make, arguments, run_id = asked.args
        once = self.moved.with_name(f"fault-{len(self.victims)}")
        self.victims.append(Victim(make, arguments, run_id, fault=fault, once=once, **asked.keywords))
        assert (self.victims[-1].wait(), self.victims[-1].fired) == (-9, True), self.victims[-1].tail()

    def offsets(self) -> dict[str, list[int]]:
        """Return the moved offsets, by topic and partition, ascending. An offset that was moved twice is there twice."""
        found: dict[str, list[int]] = {}
        for line in self.moved.read_text().splitlines() if self.moved.exists() else ():
            for topic, partition, start, end in json.loads(line.split(" ", 2)[2]):
                found.setdefault(f"{topic}-{partition}", []).extend(range(start, end))
        return {place: sorted(offsets) for place, offsets in found.items() if offsets}

    def committed(self, *topics: str) -> dict[str, int]:
        from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

        with KafkaHook("kafka_default") as hook:
            places = [tp for t in hook.describe_topics(topics or (self.topic,)).values() for tp in t.topic_partitions]
            return {str(tp): there.offset for tp, there in hook.read_committed_offsets(self.name, places).items() if there}
