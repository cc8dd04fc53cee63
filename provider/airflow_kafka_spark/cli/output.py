"""Results of the commands as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from tabulate import tabulate

from airflow_kafka_spark.windows.report import format_size

if TYPE_CHECKING:
    from airflow_kafka_spark.control.base import ChangeResult
    from airflow_kafka_spark.control.pipelines import PipelineState, WindowState
    from airflow_kafka_spark.control.preview import Preview
    from airflow_kafka_spark.control.unblock import Unblocked
    from airflow_kafka_spark.windows.binding import Binding
    from airflow_kafka_spark.windows.changes import Change
    from airflow_kafka_spark.windows.model import OffsetRange

_CHANGE_TEXTS = {
    "rebind": "allowed another task, source or destination",
    "pause": "paused",
    "resume": "resumed",
    "replay": "asked for a replay of",
    "resend": "sent dead letters again, of window",
}
_NOTHING_MOVED = {"skip": "nothing was skipped"}


def format_state(state: PipelineState) -> str:
    """Return the position of a pipeline, its open windows and its latest changes."""
    windows = "1 window" if state.last_window == 1 else f"{state.last_window:,} windows"
    lines = [
        f"Pipeline {state.pipeline}, group {state.group_id or 'unknown'}: {windows} complete",
        *(f"Window {w.number} is open: run {w.run} planned it at {w.planned_at}, {_attempts(w)}" for w in state.open_windows),
        *_binding_lines(state.binding),
    ]
    if state.paused is not None:
        lines.append(f"Paused by {state.paused.who} at {state.paused.at}: {state.paused.why}")
    if state.source is not None:
        lines.append(f"Position in its source: {json.dumps(state.source)}")
    if state.intervals[0]:
        lines.append(f"{state.intervals[1]:,} of {state.intervals[0]:,} data intervals are complete")
    if state.partitions:
        header = ("topic", "partition", "offset", "committed", "low", "last stable", "lag")
        rows = [(p.topic, p.partition, *map(_number, (p.offset, p.committed, p.low, p.lso, p.lag))) for p in state.partitions]
        lines += ["", format_table(header, rows)]
    if state.changes:
        lines += [
            "",
            "Changed by hand:",
            "",
            format_table(("#", "at", "what", "who", "why"), [_change_row(c) for c in state.changes[:10]]),
        ]
    return "\n".join(lines)


def _change_row(change: Change) -> tuple[object, ...]:
    if change.action == "rename":
        was = f"renamed to {change.name}" if change.before else f"renamed from {change.name}"
        return change.number, change.at, was, change.who, change.why
    if change.action in _CHANGE_TEXTS:
        which = f" {change.name or change.window}" if change.action in ("replay", "resend") else ""
        return change.number, change.at, _CHANGE_TEXTS[change.action] + which, change.who, change.why
    what = [f"{tp}: {_number(change.before.get(tp))} -> {offset:,}" for tp, offset in sorted(change.after.items())]
    more = [f"and {len(what) - 8} more"] if len(what) > 8 else []
    lost = [f"window {n} was given up" for n in change.discarded]
    return (
        change.number,
        change.at,
        "\n".join([*what[:8], *more, *lost] or [_NOTHING_MOVED.get(change.action, "forgotten")]),
        change.who,
        change.why,
    )


def format_windows(found: Sequence[WindowState]) -> str:
    """Return a table of windows."""
    if not found:
        return "The ledger contains no window of this pipeline."
    header = ("window", "state", "offset ranges", "read", "written", "seconds", "attempts", "complete", "run")
    rows = [
        (
            f"{w.number}{' (moved by hand)' if w.moved else ''}",
            w.state,
            _ranges(w.ranges),
            _number(w.records_read),
            _number(w.records_written),
            "-" if w.seconds is None else f"{w.seconds:.1f}",
            w.attempts,
            w.completed_at or "-",
            w.run,
        )
        for w in found
    ]
    return format_table(header, rows)


def format_preview(found: Preview) -> str:
    """Return the next window of a pipeline."""
    if found.run:
        first = f"Window {found.number} of {found.pipeline} is open: run {found.run} planned it, and it is completed first"
    else:
        first = f"Window {found.number} of {found.pipeline} would begin at the position of its {found.begins}"
    rows = [
        (r.topic, r.partition, f"[{r.start}, {r.end})", f"{r.offsets:,}", format_size(r.bytes), _instant(r.oldest))
        for r in found.ranges
    ]
    age = "" if found.age is None else f"; its oldest record is {_age(found.age)} old"
    held = f"\n{found.held_back:,} offsets behind an open transaction are left to a later window" if found.held_back else ""
    total = f"At most {found.offsets:,} records, about {format_size(found.bytes)}{age}{held}"
    table = format_table(("topic", "partition", "offset range", "at most", "about", "oldest record"), rows)
    return "\n".join([first, "", table, "", total, *_sentences(found.warnings)])


def format_reset(result: ChangeResult) -> str:
    """Return the result of a reset."""
    rows = [
        (
            m.topic,
            m.partition,
            _number(m.before),
            f"{m.after:,}",
            "" if m.wanted is None else f"the log ends there, not at {m.wanted:,}",
        )
        for m in result.moves
    ]
    lost = [f"Window {window.number} is given up; its sink may have committed it already" for window in result.given_up]
    first = (
        f"{_begin(result)} change {result.change} of pipeline {result.pipeline} and group {result.group_id}, {_author(result)}"
    )
    return "\n".join([first, *lost, "", format_table(("topic", "partition", "from", "to", ""), rows)])


def format_forget(result: ChangeResult) -> str:
    """Return the result of forgetting a pipeline."""
    done = "Nothing was changed. It would forget" if result.dry_run else "Forgot"
    group = f", and delete group {result.group_id}" if result.group_id else ""
    return f"{done} pipeline {result.pipeline}: {result.records:,} records of the ledger{group}. By {result.who}: {result.why}"


def format_pause(result: ChangeResult) -> str:
    """Return the result of pausing or resuming a pipeline."""
    first = (
        f"{_begin(result)} {result.action} pipeline {result.pipeline}, {_author(result)}" if result.changed else "Nothing to do."
    )
    return "\n".join([first, *_sentences(result.warnings)])


def format_skip(result: ChangeResult) -> str:
    """Return the result of a skip."""
    lines = [f"{_begin(result)} change {result.change} of pipeline {result.pipeline}, {_author(result)}"]
    for window in result.given_up[:1]:
        lines.append(f"Window {window.number}, which run {window.run} planned, is given up after {window.attempts} attempts")
    rows = [(g.topic, g.partition, f"[{g.start}, {g.end})", f"{g.end - g.start:,}") for g in result.skipped]
    table = ["", format_table(("topic", "partition", "skipped", "at most"), rows), ""] if rows else []
    return "\n".join([*lines, *table, *_sentences(result.warnings)])


def format_unblock(found: Unblocked) -> str:
    """Return the transaction that blocked the ledger, and the result of aborting it."""
    state = "Open" if found.dry_run else "Ended" if found.ended else "Not ended"
    first = f"{state}, in partition {found.partition} of {found.ledger_topic}: {found.transaction}"
    if not found.transaction:
        first = "Nothing to do"
    return "\n".join([f"{first}.", *_sentences(found.warnings)])


def format_rename(result: ChangeResult) -> str:
    """Return the result of renaming a pipeline."""
    renamed = f"pipeline {result.pipeline} is called {result.renamed_to}"
    first = f"{_begin(result)} change {result.change}: {renamed}, {_author(result)}"
    position = f"It goes on after window {result.last_window:,}, and group {result.group_id} mirrors it"
    return "\n".join([first, f"{position}.", *_sentences(result.warnings)])


def format_rebind(result: ChangeResult) -> str:
    """Return the result of allowing another binding."""
    allowed = f"pipeline {result.pipeline} may get another task, source or destination"
    first = f"{_begin(result)} change {result.change}: {allowed}, {_author(result)}" if result.changed else "Nothing to do."
    return "\n".join([first, *_binding_lines(result.binding), *_sentences(result.warnings)])


def _binding_lines(binding: Binding | None) -> list[str]:
    if binding is None:
        return []
    ends = (("Goes to", binding.destination), ("Comes from", binding.origin))
    lines = [f"Moved by {binding.writer}"]
    for verb, end in ends:
        if end.facts:
            lines.append(f"{verb} {', '.join(f'{what} {value}' for what, value in end.facts.items())}")
    return lines


def format_replay(result: ChangeResult) -> str:
    """Return the result of requesting a replay, with the request that clears the task."""
    window = result.window
    assert window is not None, "a replay names its window"
    which = f"interval {window.interval}" if window.interval else f"window {window.number}"
    first = f"{_begin(result)} change {result.change}: {which} of pipeline {result.pipeline} once more, {_author(result)}"
    lines = [first, "", f"  {_ranges(window.ranges)}", "", *_sentences(result.warnings)]
    if window.dag_id:
        task = [window.task_id, window.map_index] if window.map_index >= 0 else window.task_id
        task_instance = {"dag_run_id": window.run_id, "task_ids": [task]}
        body = json.dumps({**task_instance, "only_failed": False, "dry_run": False})
        lines += [
            "",
            f"Clear the task in Airflow's UI, or by its API: POST /api/v2/dags/{window.dag_id}/clearTaskInstances {body}",
        ]
    return "\n".join(lines)


def format_resend(result: ChangeResult) -> str:
    """Return the result of sending dead letters again."""
    what = f"dead letters of window {result.sent_of} of pipeline {result.pipeline}"
    if not result.changed:
        return "\n".join([f"Nothing was sent: {what}", *_sentences(result.warnings)])
    total = sum(part.records for part in result.sent_again)
    first = f"{_begin(result)} change {result.change}: {total:,} {what} sent again, {_author(result)}"
    table = format_table(("topic", "partition", "records"), [(p.topic, p.partition, f"{p.records:,}") for p in result.sent_again])
    return "\n".join([first, "", table, "", *_sentences(result.warnings)])


def _begin(result: ChangeResult) -> str:
    return "Nothing was changed. It would be:" if result.dry_run else "Done:"


def _author(result: ChangeResult) -> str:
    return f"by {result.who}: {result.why}"


def _sentences(texts: Sequence[str]) -> list[str]:
    return [f"{text}." for text in texts]


def _attempts(window: WindowState) -> str:
    return f"{window.attempts} attempt{'s' if window.attempts != 1 else ''}"


def _ranges(ranges: Sequence[OffsetRange], limit: int = 8) -> str:
    lines = [f"{r.topic}-{r.partition} [{r.start}, {r.end})" for r in ranges[:limit]]
    return "\n".join([*lines, *([f"and {len(ranges) - limit} more"] if len(ranges) > limit else [])]) or "rows of a source"


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _instant(ms: int | None) -> str:
    if ms is None:
        return "-"
    return datetime.fromtimestamp(ms / 1000, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _age(seconds: float) -> str:
    for unit, factor in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.1f} {unit}"
    return f"{seconds:.1f} s"


# --- tables ------------------------------------------------------------------------------------------------------------


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table, indented by two blanks. A cell may contain several lines.

    Columns of numbers are aligned to the right. Cells are printed unchanged: numbers keep their separators and digits.

    :param header: names of the columns.
    :param rows: cells, one per column.
    """
    align = ["right" if rows and all(_is_number(row[i]) for row in rows) else "left" for i in range(len(header))]
    cells = [[str(cell) for cell in row] for row in rows]
    table = tabulate(cells, header, tablefmt="simple", disable_numparse=True, colalign=align if rows else None)
    return "\n".join(f"  {line}".rstrip() for line in table.splitlines())


def _is_number(cell: object) -> bool:
    return str(cell).replace(",", "").replace("/s", "").strip().isdecimal()
