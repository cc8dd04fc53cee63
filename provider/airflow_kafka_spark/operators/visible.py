"""What others see of a window's task: links in Airflow's UI, progress while it runs, and lineage."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import BaseOperator, BaseOperatorLink

from airflow_kafka_spark.operators import links
from airflow_kafka_spark.operators.progress import Progress, store_of, window_name
from airflow_kafka_spark.road.watch import followed_by

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from pyspark.sql import SparkSession

    from airflow_kafka_spark.operators.run import Run
    from airflow_kafka_spark.windows.model import Window

log = logging.getLogger(__name__)


class VisibleOperator(BaseOperator):
    """An operator that lets others see what it does.

    Guarantee: none of it fails a window.
    """

    operator_extra_links: Collection[BaseOperatorLink] = links.ALL

    sink: Any
    kafka_conn_id: str
    ledger_topic: str

    # What a task finds out while it runs; an operator in a DAG file has none of it.
    links: links.Links | None = None
    progress: Progress = Progress()
    window_now: Window | None = None
    reported: Mapping[str, Any] | None = None
    run_now: Run | None = None

    def show(self, context: Mapping[str, Any], run: Run) -> None:
        """The task begins: what is known of its links, and where its progress goes."""
        self.run_now = run
        self.links = shown = links.Links(context.get("ti"))
        self.progress = Progress(store_of(context), self._show_session)
        letters = getattr(self, "errors_deadletterqueue_topic_name", None)
        _try(lambda: shown.tell(links.WindowLink, self._page()))
        _try(lambda: shown.tell(links.TopicLink, links.topic_page(self.kafka_conn_id, self._topics_now()[0])))
        _try(lambda: shown.tell(links.TableLink, links.table_page(getattr(self, "source", self.sink).uri)))
        if letters:
            _try(lambda: shown.tell(links.DeadLettersLink, links.topic_page(self.kafka_conn_id, letters) or self._page()))

    @contextmanager
    def seen(self, window: Window) -> Iterator[None]:
        """A window is planned; in here it is brought to its end, and its progress is told."""
        self.window_now = window
        shown = self.links
        if shown is not None:
            _try(lambda: shown.tell(links.WindowLink, self._page(window_name(window))))
        self.progress.begin(window)
        with followed_by(self.progress):
            yield

    def _show_session(self, session: SparkSession) -> None:
        shown = self.links
        if shown is not None:
            _try(lambda: shown.tell(links.SparkLink, links.spark_page(session)))

    def _page(self, window: str | None = None) -> str:
        assert self.run_now is not None
        return links.pipeline_page(self.kafka_conn_id, self.ledger_topic, self.pipeline_name(self.run_now), window)

    @abstractmethod
    def pipeline_name(self, run: Run) -> str:
        """The name under which the ledger knows the pipeline."""

    def _topics_now(self) -> list[str]:
        """The topics as they are named, on Kafka's side of the window; none for a pattern or a column."""
        subscription = getattr(self, "subscription", None)
        topics = subscription.topics if subscription else (self.sink.topic,)
        return [str(topic) for topic in topics if topic]

    # --- lineage ---

    def get_openlineage_facets_on_start(self) -> OperatorLineage:
        """What OpenLineage is told before the window is planned: where it comes from and where it goes."""
        from airflow_kafka_spark.operators.lineage import lineage

        return lineage(self)

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> OperatorLineage:
        """And afterwards: the same with the window's offsets and counts."""
        from airflow_kafka_spark.operators.lineage import lineage

        return lineage(self, window=self.window_now, report=self.reported, with_schema=True)

    def get_openlineage_facets_on_failure(self, task_instance: Any) -> OperatorLineage:
        """Or, of a window that failed: the offsets that were planned, if it came so far."""
        from airflow_kafka_spark.operators.lineage import lineage

        return lineage(self, window=self.window_now)


def _try(tell: Callable[[], object]) -> None:
    """A link that cannot be made is none: what keeps it from being made fails the task by itself, and is told there."""
    try:
        tell()
    except Exception as error:
        log.debug("No link: %s", error)
