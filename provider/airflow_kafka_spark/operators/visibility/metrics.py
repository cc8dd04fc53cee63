"""Airflow's metrics (statsd, OpenTelemetry) of a window. The names are documented in docs/monitoring.md."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

PREFIX = "kafka_spark.window."


def collect_metrics(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a report, given as JSON: name -> value."""
    found: dict[str, float] = {
        name: report[name]
        for name in ("records_read", "records_written", "records_deleted", "records_ignored", "records_rejected", "bytes", "rate")
    }
    optional = (
        "records_filtered",
        "records_routed",
        "records_removed",
        "records_out_of_interval",
        "out_of_interval_seconds",
        "source_bytes_behind",
    )
    found |= {name: report[name] for name in optional if name in report}
    found["attempts"] = report["attempts"]
    found |= {f"{step}_seconds": seconds for step, seconds in report["timings"].items()}
    found |= {f"latency_{name}_seconds": seconds for name, seconds in (report.get("latency") or {}).items()}
    consumption = report.get("consumption") or {}
    if "over" in consumption:
        found |= {"over_consumption": consumption["over"], "under_consumption": consumption["under"]}
    if (follows := report.get("follows")) is not None and follows["records"] is not None:
        missing = follows["records"] - report["records_read"]
        found |= {"over_consumption": max(-missing, 0), "under_consumption": max(missing, 0)}
    return found


def emit(report: Mapping[str, Any]) -> None:
    """Send the metrics of a report, each as a gauge tagged with its pipeline, and count the window. Never raises."""
    try:
        from airflow.sdk.observability import stats

        tags = {"pipeline": report["pipeline"]}
        for name, value in collect_metrics(report).items():
            stats.gauge(f"{PREFIX}{name}", value, tags=tags)
        stats.incr(f"{PREFIX}completed", tags=tags)
    except Exception as error:
        log.warning("The metrics of window %s of %s were not sent: %s", report.get("window"), report.get("pipeline"), error)
