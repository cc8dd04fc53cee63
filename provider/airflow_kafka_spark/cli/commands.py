"""What the commands do, and how they show it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.cli.options import parser
from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.table import render

if TYPE_CHECKING:
    from airflow_kafka_spark.control.pipelines import PipelineState, WindowState
    from airflow_kafka_spark.control.preview import Preview
    from airflow_kafka_spark.control.result import ChangeResult
    from airflow_kafka_spark.control.unblock import Unblocked
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.operators.from_kafka import FromKafkaOperator
    from airflow_kafka_spark.windows.binding import Binding
    from airflow_kafka_spark.windows.changes import Change
    from airflow_kafka_spark.windows.model import OffsetRange

OK, REFUSED, USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    :param argv: its arguments; default those of this process.
    :return: 0; 1 when it was refused, or Kafka did not do it, and the message says why; 2 when it was not understood.
    """
    return run(parser().parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """Run one command whose arguments are parsed; see :func:`main`."""
    from airflow_kafka_spark.control.pipelines import to_json

    try:
        with _hook(args) as hook:
            found = _RUN[args.command](hook, args)
    except KafkaSparkError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    print(json.dumps(to_json(found), indent=2) if args.json else _SHOW[args.command](found))
    return OK


def _hook(args: argparse.Namespace) -> KafkaHook:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

    if not args.bootstrap_servers:
        if args.config:
            raise ValueError("--config goes with --bootstrap-servers; a connection has its own settings")
        return KafkaHook(args.kafka_conn_id)

    class DirectHook(KafkaHook):
        """The brokers that the command line names."""

        @cached_property
        def config(self) -> dict[str, Any]:
            return {"bootstrap.servers": args.bootstrap_servers, **_settings(args.config or ())}

    return DirectHook(args.bootstrap_servers)


def _settings(pairs: Sequence[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"--config takes KEY=VALUE, not `{pair}`")
    return {key.strip(): value for key, _, value in (pair.partition("=") for pair in pairs)}


# --- run ------------------------------------------------------------------------------------------------------------------


def _show(hook: KafkaHook, args: argparse.Namespace) -> PipelineState:
    from airflow_kafka_spark.control.pipelines import show

    return show(hook, args.pipeline, ledger_topic=args.ledger_topic, group_id=args.group_id)


def _windows(hook: KafkaHook, args: argparse.Namespace) -> tuple[WindowState, ...]:
    from airflow_kafka_spark.control.pipelines import windows

    return windows(hook, args.pipeline, ledger_topic=args.ledger_topic, limit=args.limit)


def _plan(hook: KafkaHook, args: argparse.Namespace) -> Preview:
    from airflow_kafka_spark.control.preview import preview

    if args.dag_file:
        task = _task_of(args.dag_file, args.pipeline)
        with task.kafka:
            return task.preview()
    if args.max_records is not None and args.max_records < 1:
        raise ValueError(f"--max-records takes a number of at least 1, not {args.max_records}")
    return preview(
        hook,
        args.pipeline,
        ledger_topic=args.ledger_topic,
        topics=args.topics,
        group_id=args.group_id,
        starting_offsets=args.starting_offsets,
        ending_offsets=args.ending_offsets,
        max_records=args.max_records,
        data_loss=args.data_loss,
    )


def _task_of(file: str, pipeline: str) -> FromKafkaOperator:
    """Return the task of a DAG file that moves a pipeline.

    :raises ValueError: the file cannot be imported, or no task in it moves this pipeline.
    """
    try:
        from airflow.dag_processing.dagbag import DagBag
    except ImportError:  # Airflow 3.0 and 3.1
        from airflow.models.dagbag import DagBag  # type: ignore[no-redef]

    from airflow_kafka_spark.operators.from_kafka import FromKafkaOperator

    bag = DagBag(file, safe_mode=False)
    tasks = [task for dag in bag.dags.values() for task in dag.tasks if isinstance(task, FromKafkaOperator)]
    names = {task.pipeline or f"{task.dag_id}.{task.task_id}": task for task in tasks}
    if pipeline not in names:
        broken = "; ".join(str(error).strip().splitlines()[-1] for error in bag.import_errors.values())
        there = ", ".join(sorted(names)) or broken or "none"
        raise ValueError(f"no task in {file} moves pipeline `{pipeline}` from Kafka; there is: {there}")
    return names[pipeline]


def _reset(hook: KafkaHook, args: argparse.Namespace) -> ChangeResult:
    from airflow_kafka_spark.control.reset import reset
    from airflow_kafka_spark.windows.offset_specs import ShiftBy

    if (args.to is None) == (args.shift_by is None):
        raise ValueError("reset takes either --to or --shift-by")
    return reset(
        hook,
        args.pipeline,
        args.to if args.to is not None else ShiftBy(args.shift_by),
        why=args.why,
        who=args.who,
        only=args.only,
        ledger_topic=args.ledger_topic,
        group_id=args.group_id,
        discard_open=args.discard_open,
        dry_run=args.dry_run,
    )


def _forget(hook: KafkaHook, args: argparse.Namespace) -> ChangeResult:
    from airflow_kafka_spark.control.forget import forget

    return forget(
        hook,
        args.pipeline,
        why=args.why,
        who=args.who,
        ledger_topic=args.ledger_topic,
        group_id=args.group_id,
        delete_group=args.delete_group,
        discard_open=args.discard_open,
        dry_run=args.dry_run,
    )


def _pause(hook: KafkaHook, args: argparse.Namespace) -> ChangeResult:
    from airflow_kafka_spark.control.pause import pause

    return pause(hook, args.pipeline, **_wish(args))


def _resume(hook: KafkaHook, args: argparse.Namespace) -> ChangeResult:
    from airflow_kafka_spark.control.pause import resume

    return resume(hook, args.pipeline, **_wish(args))


def _skip(hook: KafkaHook, args: argparse.Namespace) -> ChangeResult:
    from airflow_kafka_spark.control.skip import skip

    running = False if args.not_running else None
    return skip(hook, args.pipeline, group_id=args.group_id, running=running, **_wish(args))


def _replay(hook: KafkaHook, args: argparse.Namespace) -> ChangeResult:
    from airflow_kafka_spark.control.replay import replay

    if (args.window is None) == (not args.interval):
        raise ValueError("replay takes either --window or --interval")
    return replay(hook, args.pipeline, window=args.window, name=args.interval, **_wish(args))


def _rebind(hook: KafkaHook, args: argparse.Namespace) -> ChangeResult:
    from airflow_kafka_spark.control.rebind import rebind

    return rebind(hook, args.pipeline, running=False if args.not_running else None, **_wish(args))


def _rename(hook: KafkaHook, args: argparse.Namespace) -> ChangeResult:
    from airflow_kafka_spark.control.rename import rename

    return rename(hook, args.pipeline, args.to, group_id=args.group_id, **_wish(args))


def _unblock(hook: KafkaHook, args: argparse.Namespace) -> Unblocked:
    from airflow_kafka_spark.control.unblock import unblock

    return unblock(hook, args.pipeline, ledger_topic=args.ledger_topic, dry_run=args.dry_run)


def _wish(args: argparse.Namespace) -> dict[str, Any]:
    return {"why": args.why, "who": args.who, "ledger_topic": args.ledger_topic, "dry_run": args.dry_run}


_RUN: dict[str, Any] = {
    "show": _show,
    "plan": _plan,
    "reset": _reset,
    "windows": _windows,
    "forget": _forget,
    "pause": _pause,
    "resume": _resume,
    "skip": _skip,
    "rename": _rename,
    "unblock": _unblock,
    "rebind": _rebind,
    "replay": _replay,
}


# --- show it --------------------------------------------------------------------------------------------------------------


def _table_of_state(state: PipelineState) -> str:
    lines = [
        f"Pipeline {state.pipeline}, group {state.group_id or 'unknown'}: {state.last_window:,} windows complete",
        *(f"Window {w.number} is open: run {w.run} planned it at {w.planned_at}, {_attempts(w)}" for w in state.open_windows),
        *_bound(state.binding),
    ]
    if state.paused is not None:
        lines.append(f"Paused by {state.paused.who} at {state.paused.at}: {state.paused.why}")
    if state.source is not None:
        lines.append(f"Its source stands at {json.dumps(state.source)}")
    if state.intervals[0]:
        lines.append(f"{state.intervals[1]:,} of {state.intervals[0]:,} data intervals are complete")
    if state.partitions:
        header = ("topic", "partition", "offset", "committed", "low", "last stable", "lag")
        rows = [(p.topic, p.partition, *map(_number, (p.offset, p.committed, p.low, p.lso, p.lag))) for p in state.partitions]
        lines += ["", render(header, rows)]
    if state.changes:
        lines += [
            "",
            "Changed by hand:",
            "",
            render(("#", "at", "what", "who", "why"), [_line_of(c) for c in state.changes[:10]]),
        ]
    return "\n".join(lines)


def _line_of(change: Change) -> tuple[object, ...]:
    if change.action == "rename":
        was = f"renamed to {change.name}" if change.before else f"renamed from {change.name}"
        return change.number, change.at, was, change.who, change.why
    if change.action in _SAID:
        which = f" {change.name or change.window}" if change.action == "replay" else ""
        return change.number, change.at, _SAID[change.action] + which, change.who, change.why
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


def _table_of_windows(found: Sequence[WindowState]) -> str:
    if not found:
        return "The ledger remembers no window."
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
    return render(header, rows)


def _table_of_preview(found: Preview) -> str:
    if found.run:
        first = f"Window {found.number} of {found.pipeline} is open: run {found.run} planned it, and it is finished first"
    else:
        first = f"Window {found.number} of {found.pipeline} would begin where its {found.begins} says"
    rows = [
        (r.topic, r.partition, f"[{r.start}, {r.end})", f"{r.offsets:,}", _size(r.bytes), _instant(r.oldest))
        for r in found.ranges
    ]
    age = "" if found.age is None else f"; its oldest record is {_age(found.age)} old"
    held = f"\n{found.held_back:,} offsets behind an open transaction are left to a later one" if found.held_back else ""
    total = f"At most {found.offsets:,} records, about {_size(found.bytes)}{age}{held}"
    table = render(("topic", "partition", "offset range", "at most", "about", "oldest record"), rows)
    return "\n".join([first, "", table, "", total, *_sentences(found.warnings)])


def _table_of_reset(done: ChangeResult) -> str:
    rows = [
        (
            m.topic,
            m.partition,
            _number(m.before),
            f"{m.after:,}",
            "" if m.wanted is None else f"the log ends there, not at {m.wanted:,}",
        )
        for m in done.moves
    ]
    said = "Nothing was changed. It would be" if done.dry_run else "Done:"
    lost = [f"Window {window.number} is given up; its sink may have taken it already" for window in done.given_up]
    first = f"{said} change {done.change} of pipeline {done.pipeline} and group {done.group_id}, by {done.who}: {done.why}"
    return "\n".join([first, *lost, "", render(("topic", "partition", "from", "to", ""), rows)])  # fmt: skip


def _table_of_forgotten(done: ChangeResult) -> str:
    said = "Nothing was changed. It would forget" if done.dry_run else "Forgot"
    group = f", and delete group {done.group_id}" if done.group_id else ""
    return f"{said} pipeline {done.pipeline}: {done.records:,} records of the ledger{group}. By {done.who}: {done.why}"


def _text_of_pause(done: ChangeResult) -> str:
    first = (
        f"{_begun(done)} {done.action} pipeline {done.pipeline}, by {done.who}: {done.why}" if done.changed else "Nothing to do."
    )
    return "\n".join([first, *_sentences(done.warnings)])


def _table_of_skip(done: ChangeResult) -> str:
    lines = [f"{_begun(done)} change {done.change} of pipeline {done.pipeline}, by {done.who}: {done.why}"]
    for window in done.given_up[:1]:
        lines.append(f"Window {window.number}, which run {window.run} planned, is given up after {window.attempts} attempts")
    rows = [(g.topic, g.partition, f"[{g.start}, {g.end})", f"{g.end - g.start:,}") for g in done.skipped]
    table = ["", render(("topic", "partition", "skipped", "at most"), rows), ""] if rows else []
    return "\n".join([*lines, *table, *_sentences(done.warnings)])


def _text_of_unblocked(found: Unblocked) -> str:
    done = "Open" if found.dry_run else "Ended" if found.ended else "Not ended"
    first = f"{done}, in partition {found.partition} of {found.ledger_topic}: {found.holder}" if found.holder else "Nothing to do"
    return "\n".join([f"{first}.", *_sentences(found.warnings)])


def _text_of_rename(done: ChangeResult) -> str:
    renamed = f"pipeline {done.pipeline} is called {done.renamed_to}"
    first = f"{_begun(done)} change {done.change}: {renamed}, by {done.who}: {done.why}"
    stands = f"It goes on after window {done.last_window:,}, and group {done.group_id} mirrors it"
    return "\n".join([first, f"{stands}.", *_sentences(done.warnings)])


def _text_of_rebind(done: ChangeResult) -> str:
    first = f"{_begun(done)} change {done.change}: pipeline {done.pipeline} may be bound anew, by {done.who}: {done.why}"
    return "\n".join([first if done.changed else "Nothing to do.", *_bound(done.binding), *_sentences(done.warnings)])


def _bound(binding: Binding | None) -> list[str]:
    if binding is None:
        return []
    ends = (("Goes to", binding.destination), ("Comes from", binding.origin))
    told = [(said, end.facts) for said, end in ends]
    return [
        f"Moved by {binding.writer}",
        *(f"{said} {', '.join(f'{what} {value}' for what, value in facts.items())}" for said, facts in told if facts),
    ]


def _table_of_replay(done: ChangeResult) -> str:
    window = done.window
    assert window is not None, "a replay names its window"
    which = f"interval {window.interval}" if window.interval else f"window {window.number}"
    first = f"{_begun(done)} change {done.change}: {which} of pipeline {done.pipeline} once more, by {done.who}: {done.why}"
    lines = [first, "", f"  {_ranges(window.ranges)}", "", *_sentences(done.warnings)]
    if window.dag_id:
        task = [window.task_id, window.map_index] if window.map_index >= 0 else window.task_id
        asked = {"dag_run_id": window.run_id, "task_ids": [task]}
        body = json.dumps({**asked, "only_failed": False, "dry_run": False})
        lines += ["", f"In Airflow's UI, or by its API: POST /api/v2/dags/{window.dag_id}/clearTaskInstances {body}"]
    return "\n".join(lines)


def _begun(done: Any) -> str:
    return "Nothing was changed. It would be:" if done.dry_run else "Done:"


def _sentences(told: Sequence[str]) -> list[str]:
    return [f"{sentence}." for sentence in told]


_SAID = {
    "rebind": "allowed another destination or task",
    "pause": "paused",
    "resume": "resumed",
    "replay": "asked for a replay of",
}
_NOTHING_MOVED = {"skip": "nothing was skipped"}

_SHOW: dict[str, Any] = {
    "show": _table_of_state,
    "plan": _table_of_preview,
    "reset": _table_of_reset,
    "windows": _table_of_windows,
    "forget": _table_of_forgotten,
    "pause": _text_of_pause,
    "resume": _text_of_pause,
    "skip": _table_of_skip,
    "rename": _text_of_rename,
    "unblock": _text_of_unblocked,
    "rebind": _text_of_rebind,
    "replay": _table_of_replay,
}


def _attempts(window: WindowState) -> str:
    return f"{window.attempts} attempt{'s' if window.attempts != 1 else ''}"


def _ranges(ranges: Sequence[OffsetRange], limit: int = 8) -> str:
    lines = [f"{r.topic}-{r.partition} [{r.start}, {r.end})" for r in ranges[:limit]]
    return "\n".join([*lines, *([f"and {len(ranges) - limit} more"] if len(ranges) > limit else [])]) or "rows of a source"


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _size(count: int | None) -> str:
    if count is None:
        return "?"
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def _instant(ms: int | None) -> str:
    if ms is None:
        return "-"
    return datetime.fromtimestamp(ms / 1000, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _age(seconds: float) -> str:
    for unit, factor in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.1f} {unit}"
    return f"{seconds:.1f} s"
