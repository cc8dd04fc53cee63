"""The pipelines of a ledger with their state, as the pages in Airflow's UI list them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.control.pipelines import find_ledger
from airflow_kafka_spark.errors import TopicMissing
from airflow_kafka_spark.ledger.topic import TOPIC, WAIT_FOR_NONE
from airflow_kafka_spark.ui.lag_monitor import MAX_GROUPS, LagMeasurement, LagMonitor
from airflow_kafka_spark.ui.ledger_snapshot import (
    LedgerSnapshot,
    PipelineSummary,
    find_status,
    format_endpoint,
    get_entry_name,
    summarize_pipeline,
)
from airflow_kafka_spark.ui.watcher import LagTracker
from airflow_kafka_spark.windows.lag import Unscheduled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook


@dataclass(frozen=True)
class ListedPipeline:
    """A pipeline in the list.

    :param pipeline: its name.
    :param status: OK, WARN, STALL, STOP, REWIND or UNKNOWN, as on the pages. When a run is due is derived from the windows, not
        from the DAG's timetable.
    :param reason: the reason of the status.
    :param activity: ``paused``; ``open`` if a window is planned and not complete, because its task runs or has died; ``new``
        without a window; else ``idle``.
    :param group: its consumer group; None if it is not known.
    :param topics: the topics that it has read.
    :param source: the source of its rows; None if it reads topics.
    :param sink: where its last window went; None without one.
    :param last_window: number or data interval of its last complete window; None without one. The following fields are those of
        this window.
    :param completed_at: UTC instant at which it was completed, ISO 8601.
    :param records_read: records or rows that it has read.
    :param seconds: its duration.
    :param rate: its records per second.
    :param lag_records: records in the topics that are not moved yet; None if that is not known.
    :param lag_seconds: age of the oldest of them; None if it is not known.
    """

    pipeline: str
    status: str
    reason: str
    activity: str
    group: str | None
    topics: tuple[str, ...]
    source: str | None
    sink: str | None
    last_window: str | None
    completed_at: str | None
    records_read: int | None
    seconds: float | None
    rate: float | None
    lag_records: int | None
    lag_seconds: float | None


def list_pipelines(hook: KafkaHook, ledger_topic: str = TOPIC) -> tuple[ListedPipeline, ...]:
    """Return all pipelines of a ledger, by name. Nothing is fenced, created or changed, and Airflow's database is not read.

    :param hook: the cluster.
    :param ledger_topic: the ledger.
    :raises TopicMissing: there is no such topic.
    """
    topic = find_ledger(hook, ledger_topic)
    if topic is None:
        error = TopicMissing(hook.conn_id, [ledger_topic])
        error.action = "Correct the name of the ledger topic; the first window of a pipeline creates it"
        raise error
    snapshot = LedgerSnapshot()
    for partition in topic.partitions:
        for record in topic.read_newest(partition, 0, (b"",), WAIT_FOR_NONE):
            snapshot.add(partition, record)
    summaries = {name: summarize_pipeline(found) for name, found in sorted(snapshot.pipelines.items())}
    measured = _measure_lags(hook, summaries)
    return tuple(_describe(summary, measured.get(name)) for name, summary in summaries.items())


def _measure_lags(hook: KafkaHook, summaries: Mapping[str, PipelineSummary]) -> dict[str, LagMeasurement]:
    """Return the lag of each pipeline that reads topics and has a position."""
    positions = {
        name: found.read_position
        for name, found in summaries.items()
        if not (found.has_source or found.problem) and (found.read_position.offsets or found.read_position.by_group)
    }
    monitor, measured = LagMonitor(), dict[str, LagMeasurement]()
    # A round asks for the offsets of so many groups, those first that it has not asked for.
    for _ in range(0, max(1, sum(position.by_group for position in positions.values())), MAX_GROUPS):
        measured = monitor.measure(hook, positions)
    return measured


def _describe(summary: PipelineSummary, measured: LagMeasurement | None) -> ListedPipeline:
    verdict = None
    if measured is not None:
        tracker = LagTracker()
        tracker.add(measured, summary, Unscheduled() if summary.pause else summary.cadence)
        verdict = tracker.verdict
    status, reason = find_status(summary, measured, verdict)
    last, report = summary.last, summary.get_report_value
    timings: Mapping[str, Any] = report("timings") or {}
    activity = "paused" if summary.pause else "open" if summary.open else "idle" if last or summary.problem else "new"
    return ListedPipeline(
        summary.pipeline,
        status,
        reason,
        activity,
        summary.read_position.group,
        summary.topics,
        format_endpoint(report("source")),
        format_endpoint(report("sink")),
        get_entry_name(last) if last else None,
        report("completed_at"),
        report("records_read"),
        timings.get("total"),
        report("rate"),
        measured.lag.count_records() if measured and measured.lag else None,
        measured.seconds if measured and measured.lag else None,
    )
