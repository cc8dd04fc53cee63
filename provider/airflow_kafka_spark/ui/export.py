"""The windows of a pipeline as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

from airflow_kafka_spark.ui.views import WindowView
from airflow_kafka_spark.windows.instants import iso
from airflow_kafka_spark.windows.model import State

FACTS = (
    "records_read",
    "records_written",
    "records_deleted",
    "records_rejected",
    "records_filtered",
    "records_routed",
    "records_out_of_interval",
    "out_of_interval_seconds",
    "bytes",
    "rate",
)
"""Facts of a report that have a column."""
LATENCY = ("min", "p50", "p95", "max")


def windows_csv(windows: Iterable[WindowView]) -> str:
    """Return windows as CSV (RFC 4180, UTF-8) with a header, the newest first. Instants are UTC in ISO 8601.

    A text that a spreadsheet would take for a formula begins with an apostrophe.
    """
    found = list(windows)
    steps = list(dict.fromkeys(step for w in found for step in w.report.get("timings") or () if step != "total"))
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(
        [
            *("window", "interval_start", "interval_end", "state", "replay", "attempts", "planned_at", "completed_at"),
            *FACTS,
            *(f"latency_{name}_seconds" for name in LATENCY),
            *(f"{step}_seconds" for step in steps),
            *("total_seconds", "dead_letters", "guarantee", "run", "offsets"),
        ]
    )
    writer.writerows([_cell(value) for value in _row(w, steps)] for w in found)
    return out.getvalue()


def _row(w: WindowView, steps: Iterable[str]) -> list[Any]:
    window, report = w.entry.window, w.report
    latency, timings = report.get("latency") or {}, report.get("timings") or {}
    interval = [iso(instant) for instant in window.interval] if window.interval else ["", ""]
    optional = 0 if w.entry.state is State.COMPLETE else None
    ranges = "; ".join(f"{r.topic}-{r.partition} [{r.start}, {r.end})" for r in window.ranges)
    facts = [report.get(name, optional if name.startswith("records_") else None) for name in FACTS]
    return [
        *(w.name, *interval, w.entry.state.value, window.replay, w.entry.attempt.number),
        *(window.planned_at, report.get("completed_at")),
        *facts,
        *(latency.get(name) for name in LATENCY),
        *(timings.get(step) for step in steps),
        *(timings.get("total"), sum(part.records for part in w.landed), report.get("guarantee"), window.run, ranges),
    ]


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
