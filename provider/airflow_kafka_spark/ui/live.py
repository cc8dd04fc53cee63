"""What is known at this moment, for one user: the watch's data, Airflow's tasks and the user's rights, brought together."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.ui import details, views
from airflow_kafka_spark.ui.access import Access, access_of
from airflow_kafka_spark.ui.answers import Refused, cleaned
from airflow_kafka_spark.ui.catalog import LedgerName
from airflow_kafka_spark.ui.ledgers import LedgerWatch
from airflow_kafka_spark.ui.shelf import Shelf
from airflow_kafka_spark.ui.tasks import TaskId, Tasks, read_paused, read_states
from airflow_kafka_spark.ui.views import Item, Question
from airflow_kafka_spark.ui.watcher import Watcher

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


@dataclass(frozen=True)
class Live:
    """What one user may see now.

    :param paused: every DAG there is, and whether it is paused.
    """

    watcher: Watcher
    session: Session
    access: Access
    paused: dict[str, bool]

    @classmethod
    def of(cls, user: Any, session: Session, watcher: Watcher) -> Live:
        """:raises Refused: 403, this user may see nothing of it."""
        paused = read_paused(session)
        access = access_of(user, paused)
        watcher.touch()
        return cls(watcher, session, access, paused)

    def release(self) -> None:
        """Let go of the database, before Kafka is asked: that may take its time."""
        self.session.commit()

    # --- pipelines ---

    def items(self) -> list[Item]:
        """All pipelines that the user may see."""
        found = []
        tasks = dict(self.watcher.by_pipeline)
        for name, watch in self.watcher.ledgers.items():
            with watch.lock:
                for pipeline, summary in watch.summaries.items():
                    pulse = watch.pulses.get(pipeline)
                    seen = (pulse.measured, pulse.verdict) if pulse else (None, None)
                    found.append(Item(name, pipeline, summary, *seen, tasks.pop((name, pipeline), ())))
        found += [Item(name, pipeline, tasks=named) for (name, pipeline), named in tasks.items() if name in self.watcher.ledgers]
        return [item for item in found if self.access.may_see(item.dag_ids)]

    def listing(self, question: Question, run_id: str = "") -> dict[str, Any]:
        """The answer of the list."""
        items = self.items()
        wanted = [item for item in items if views.is_wanted(item, question)]
        if run_id:
            wanted = [item for item in wanted if self._is_of_run(item, question, run_id)]
        tasks = self.tasks({task for item in wanted for task in item.running_tasks})
        now = time.time()
        answer = views.listing([views.row(item, tasks, self.access, now) for item in wanted], question)
        return {**answer, "ledgers": self.ledgers(items, now)}

    def ledgers(self, items: Iterable[Item], now: float) -> list[dict[str, Any]]:
        """All ledgers; pipelines are counted that the user may see."""
        counts: dict[LedgerName, int] = {}
        for item in items:
            counts[item.ledger] = counts.get(item.ledger, 0) + 1
        found = []
        for name, watch in self.watcher.ledgers.items():
            state, message = watch.state
            told = cleaned(message) if message else None
            found.append(views.ledger_row(name, state, told, watch.age(now), counts.get(name, 0)))
        return found

    def tasks(self, wanted: Iterable[TaskId]) -> Tasks:
        return Tasks(read_states(self.session, list(wanted)), self.paused)

    def _is_of_run(self, item: Item, question: Question, run_id: str) -> bool:
        """Whether a run has moved windows of it: by the text of the records, so that not all have to be taken apart."""
        watch = self.watcher.ledgers[item.ledger]
        begin = f"{question.dag_id or item.task[0]}/{run_id}/" + (question.task_id or "")
        needle = json.dumps(begin, ensure_ascii=False)[:-1].encode()
        with watch.lock:
            shelf = watch.shelves.pipelines.get(item.pipeline)
            return shelf is not None and shelf.mentions(needle)

    # --- one of them ---

    def find(self, ledger: str, pipeline: str) -> tuple[Item, LedgerWatch]:
        """A pipeline that the user may see.

        :raises Refused: 404, there is no such pipeline, or the user may not see it: which of both is not said.
        """
        try:
            watch = self.watcher.ledgers.get(LedgerName.parse(ledger))
        except ValueError as error:
            raise Refused(400, str(error).rstrip(".")) from None
        found = None
        if watch is not None:
            with watch.lock:
                summary, pulse = watch.summaries.get(pipeline), watch.pulses.get(pipeline)
                seen = (pulse.measured, pulse.verdict) if pulse else (None, None)
                found = Item(watch.name, pipeline, summary, *seen, self.watcher.by_pipeline.get((watch.name, pipeline), ()))
        if watch is None or found is None or not (found.summary or found.tasks) or not self.access.may_see(found.dag_ids):
            raise Refused(404, f"There is no pipeline `{pipeline}` in ledger `{ledger}` that you may see", action="See the list")
        return found, watch

    def detail(self, ledger: str, pipeline: str) -> dict[str, Any]:
        """The answer of a pipeline's page."""
        item, watch = self.find(ledger, pipeline)
        watch.mark_interest(pipeline)
        told, shelf, problem = self._windows(watch, pipeline)
        with watch.lock:
            memory = shelf.memory() if shelf and not problem else None
            samples = list(watch.pulses[pipeline].samples) if pipeline in watch.pulses else []
        shown = told[:50]
        tasks = self.tasks({*item.running_tasks, *(t.task for t in shown if t.task)})
        now = time.time()
        total, complete = shelf.intervals if shelf else (0, 0)
        return {
            "row": views.row(item, tasks, self.access, now),
            "partitions": details.partitions(item.measured, memory.position.offsets if memory else {}),
            "partitions_age": round(now - item.measured.at, 1) if item.measured else None,
            "windows": [details.win(t, tasks) for t in shown],
            "windows_total": shelf.windows_total if shelf else 0,
            "windows_kept": len(told),
            "changes": [details.change(found) for found in memory.history] if memory else [],
            "intervals": {"total": total, "complete": complete},
            "dead_letters": details.dead_letters(told),
            "series": details.series(told, samples),
        }

    def windows(self, ledger: str, pipeline: str, before: str, limit: int, of: tuple[str, str, int | None]) -> dict[str, Any]:
        """Windows of a pipeline, the newest first.

        :param before: a number or an interval; only those that come after it in this order.
        :param of: run, task and map index that planned them; "" and None for any.
        """
        _, watch = self.find(ledger, pipeline)
        told, shelf, problem = self._windows(watch, pipeline)
        if problem:
            raise Refused(409, problem)
        mine = [t for t in told if t.is_of(*of)] if any(part not in ("", None) for part in of) else told
        shown = details.before(mine, before)[: min(max(limit, 1), 200)]
        tasks = self.tasks({t.task for t in shown if t.task})
        total = len(mine) if mine is not told else shelf.windows_total if shelf else 0
        return {"windows": [details.win(t, tasks) for t in shown], "total": total}

    @staticmethod
    def _windows(watch: LedgerWatch, pipeline: str) -> tuple[list[details.Told], Shelf | None, str]:
        with watch.lock:
            shelf = watch.shelves.pipelines.get(pipeline)
            try:
                return (details.windows_of(shelf) if shelf else []), shelf, ""
            except (ValueError, KeyError, TypeError) as error:
                return [], shelf, f"The ledger holds {error}"
