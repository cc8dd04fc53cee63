"""The commands: each calls one function of :mod:`airflow_kafka_spark.control`, and prints its result as text or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from datetime import datetime, timezone
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from tabulate import tabulate

from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.windows.report import format_size

if TYPE_CHECKING:
    from airflow_kafka_spark.cli.listing import ListedPipeline
    from airflow_kafka_spark.control.base import ChangeRequest, ChangeResult, OpenWindow
    from airflow_kafka_spark.control.lifecycle import Unblocked
    from airflow_kafka_spark.control.pipelines import PipelineState, WindowState
    from airflow_kafka_spark.control.preview import Preview
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.operators.from_kafka import FromKafkaOperator
    from airflow_kafka_spark.windows.binding import Binding
    from airflow_kafka_spark.windows.changes import Change
    from airflow_kafka_spark.windows.model import Gap, OffsetRange


_CHANGE_TEXTS = {
    "rebind": "allowed another task, source or destination",
    "pause": "paused",
    "resume": "resumed",
    "replay": "asked for a replay of",
    "resend": "sent dead letters again, of window",
}
_NOTHING_MOVED = {"skip": "nothing was skipped"}


def format_pipelines(found: Sequence[ListedPipeline]) -> str:
    """Return a table of pipelines, and below it the reasons of each status that is not OK."""
    if not found:
        return "The ledger contains no pipeline."
    header = ("pipeline", "status", "activity", "from", "to", "window", "complete", "records", "seconds", "lag", "oldest")
    rows = [
        (
            p.pipeline,
            p.status,
            p.activity,
            p.source or "\n".join(p.topics) or "-",
            p.sink or "-",
            p.last_window or "-",
            p.completed_at or "-",
            _format_number(p.records_read),
            "-" if p.seconds is None else f"{p.seconds:.1f}",
            _format_number(p.lag_records),
            "-" if not p.lag_records or p.lag_seconds is None else _format_age(p.lag_seconds),
        )
        for p in found
    ]
    reasons = [f"{p.pipeline}: {p.reason}" for p in found if p.status != "OK" and p.reason]
    return "\n".join([format_table(header, rows), *(["", *_format_sentences(reasons)] if reasons else [])])


def format_state(state: PipelineState) -> str:
    """Return the position of a pipeline, its open windows and its latest changes."""
    windows = "1 window" if state.last_window == 1 else f"{state.last_window:,} windows"
    lines = [
        f"Pipeline {state.pipeline}, group {state.group_id or 'unknown'}: {windows} complete",
        *(
            f"Window {w.number} is open: run {w.run} planned it at {w.planned_at}, {_describe_attempts(w)}"
            for w in state.open_windows
        ),
        *_format_binding(state.binding),
    ]
    if state.paused is not None:
        lines.append(f"Paused by {state.paused.who} at {state.paused.at}: {state.paused.why}")
    if state.source is not None:
        lines.append(f"Position in its source: {json.dumps(state.source)}")
    if state.intervals[0]:
        lines.append(f"{state.intervals[1]:,} of {state.intervals[0]:,} data intervals are complete")
    if state.partitions:
        header = ("topic", "partition", "offset", "committed", "low", "last stable", "lag")
        rows = [
            (p.topic, p.partition, *map(_format_number, (p.offset, p.committed, p.low, p.lso, p.lag))) for p in state.partitions
        ]
        lines += ["", format_table(header, rows)]
    if state.changes:
        lines += [
            "",
            "Changed by hand:",
            "",
            format_table(("#", "at", "what", "who", "why"), [_format_change(c) for c in state.changes[:10]]),
        ]
    return "\n".join(lines)


def _format_change(change: Change) -> tuple[object, ...]:
    if change.action == "rename":
        was = f"renamed to {change.name}" if change.before else f"renamed from {change.name}"
        return change.number, change.at, was, change.who, change.why
    if change.action in _CHANGE_TEXTS:
        which = f" {change.name or change.window}" if change.action in ("replay", "resend") else ""
        return change.number, change.at, _CHANGE_TEXTS[change.action] + which, change.who, change.why
    what = [f"{tp}: {_format_number(change.before.get(tp))} -> {offset:,}" for tp, offset in sorted(change.after.items())]
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
            "\n".join([*_list_ranges(w.ranges), *_list_offsets(w.gaps, "lost: ", "gaps")]),
            _format_number(w.records_read),
            _format_number(w.records_written),
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
        (r.topic, r.partition, f"[{r.start}, {r.end})", f"{r.offsets:,}", format_size(r.bytes), _format_instant(r.oldest))
        for r in found.ranges
    ]
    age = "" if found.age is None else f"; its oldest record is {_format_age(found.age)} old"
    left = f"{found.held_back:,} offsets, from the first open transaction on, are left to a later window"
    held = f"\n{left}" if found.held_back else ""
    total = f"At most {found.offsets:,} records, about {format_size(found.bytes)}{age}{held}"
    table = format_table(("topic", "partition", "offset range", "at most", "about", "oldest record"), rows)
    return "\n".join([first, "", table, "", total, *_format_sentences(found.warnings)])


def format_reset(result: ChangeResult) -> str:
    """Return the result of a reset."""
    rows = [
        (
            m.topic,
            m.partition,
            _format_number(m.before),
            f"{m.after:,}",
            "" if m.wanted is None else f"the log ends there, not at {m.wanted:,}",
        )
        for m in result.moves
    ]
    lost = _format_given_up(result)
    first = (
        f"{_begin(result)} change {result.change} of pipeline {result.pipeline} and group {result.group_id}, "
        f"{_describe_author(result)}"
    )
    table = format_table(("topic", "partition", "from", "to", ""), rows)
    return "\n".join([first, *lost, "", table, *([""] if result.warnings else []), *_format_sentences(result.warnings)])


def format_forget(result: ChangeResult) -> str:
    """Return the result of forgetting a pipeline."""
    done = "Nothing was changed. It would forget" if result.dry_run else "Forgot"
    group = f", and delete group {result.group_id}" if result.group_id else ""
    first = f"{done} pipeline {result.pipeline}: {result.records:,} records of the ledger{group}. By {result.who}: {result.why}"
    return "\n".join([first, *_format_given_up(result), *_format_sentences(result.warnings)])


def _format_given_up(result: ChangeResult) -> list[str]:
    return [f"Window {window.number} is given up; its sink may have committed it already" for window in result.given_up]


def format_pause(result: ChangeResult) -> str:
    """Return the result of pausing or resuming a pipeline."""
    first = (
        f"{_begin(result)} {result.action} pipeline {result.pipeline}, {_describe_author(result)}"
        if result.changed
        else "Nothing to do."
    )
    return "\n".join([first, *_format_sentences(result.warnings)])


def format_skip(result: ChangeResult) -> str:
    """Return the result of a skip."""
    lines = [f"{_begin(result)} change {result.change} of pipeline {result.pipeline}, {_describe_author(result)}"]
    for window in result.given_up[:1]:
        lines.append(f"Window {window.number}, which run {window.run} planned, is given up after {_describe_attempts(window)}")
    rows = [(g.topic, g.partition, f"[{g.start}, {g.end})", f"{g.end - g.start:,}") for g in result.skipped]
    table = ["", format_table(("topic", "partition", "skipped", "at most"), rows), ""] if rows else []
    return "\n".join([*lines, *table, *_format_sentences(result.warnings)])


def format_unblock(found: Unblocked) -> str:
    """Return the transaction that blocked the ledger, and the result of aborting it."""
    state = "Open" if found.dry_run else "Ended" if found.ended else "Not ended"
    first = f"{state}, in partition {found.partition} of {found.ledger_topic}: {found.transaction}"
    if not found.transaction:
        first = "Nothing to do"
    return "\n".join([f"{first}.", *_format_sentences(found.warnings)])


def format_rename(result: ChangeResult) -> str:
    """Return the result of renaming a pipeline."""
    renamed = f"pipeline {result.pipeline} is called {result.renamed_to}"
    first = f"{_begin(result)} change {result.change}: {renamed}, {_describe_author(result)}"
    position = f"It continues after window {result.last_window:,}, and group {result.group_id} mirrors it"
    return "\n".join([first, f"{position}.", *_format_sentences(result.warnings)])


def format_rebind(result: ChangeResult) -> str:
    """Return the result of allowing another binding."""
    allowed = f"pipeline {result.pipeline} may get another task, source or destination"
    first = (
        f"{_begin(result)} change {result.change}: {allowed}, {_describe_author(result)}" if result.changed else "Nothing to do."
    )
    return "\n".join([first, *_format_binding(result.binding), *_format_sentences(result.warnings)])


def _format_binding(binding: Binding | None) -> list[str]:
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
    first = (
        f"{_begin(result)} change {result.change}: {which} of pipeline {result.pipeline} once more, {_describe_author(result)}"
    )
    lines = [
        first,
        "",
        *(f"  {line}" for line in _list_ranges(window.ranges)),
        "",
        *_format_sentences(result.warnings),
    ]
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
        return "\n".join([f"Nothing was sent: {what}", *_format_sentences(result.warnings)])
    total = sum(part.records for part in result.sent_again)
    first = f"{_begin(result)} change {result.change}: {total:,} {what} sent again, {_describe_author(result)}"
    table = format_table(("topic", "partition", "records"), [(p.topic, p.partition, f"{p.records:,}") for p in result.sent_again])
    return "\n".join([first, "", table, "", *_format_sentences(result.warnings)])


def _begin(result: ChangeResult) -> str:
    return "Nothing was changed. It would be:" if result.dry_run else "Done:"


def _describe_author(result: ChangeResult) -> str:
    return f"by {result.who}: {result.why}"


def _format_sentences(texts: Sequence[str]) -> list[str]:
    return [f"{text}." for text in texts]


def _describe_attempts(window: WindowState | OpenWindow) -> str:
    return f"{window.attempts} attempt{'s' if window.attempts != 1 else ''}"


def _list_ranges(ranges: Sequence[OffsetRange]) -> list[str]:
    """Return a line for each range of a window."""
    return _list_offsets(ranges) or ["rows of a source"]


def _list_offsets(parts: Sequence[OffsetRange | Gap], before: str = "", called: str = "", limit: int = 8) -> list[str]:
    """Return a line for each of the first parts of a window, and one for the number of the others.

    :param before: the beginning of each line.
    :param called: the name of the parts in the last line.
    :param limit: maximum number of parts that have a line.
    """
    more = [f"and {len(parts) - limit} more {called}".rstrip()] if len(parts) > limit else []
    return [*(f"{before}{p.topic}-{p.partition} [{p.start}, {p.end})" for p in parts[:limit]), *more]


def _format_number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _format_instant(ms: int | None) -> str:
    if ms is None:
        return "-"
    return datetime.fromtimestamp(ms / 1000, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _format_age(seconds: float) -> str:
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


R = TypeVar("R")
Execute: TypeAlias = "Callable[[KafkaHook, argparse.Namespace], tuple[object, str]]"
"""Type of a function that runs a command, and returns its result with the text that describes it."""

OK, REFUSED, USAGE = 0, 1, 2
"""Exit codes: done; refused, or Kafka did not answer; invalid arguments."""
_CONTEXT = "_AIRFLOW_PROCESS_CONTEXT"


def run(command: str, args: argparse.Namespace) -> int:
    """Run one command with parsed arguments.

    :param command: name of the command.
    :param args: its arguments.
    :return: 0; 1 if the command was refused or Kafka did not answer; 2 if the arguments are invalid. The reason is printed.
    """
    from airflow_kafka_spark.control.pipelines import to_json

    try:
        if (local := _LOCAL_COMMANDS.get(command)) is not None:
            result, text = local(args)
        else:
            with _use_stored_connections(), _make_hook(args) as hook:
                result, text = _run_on_pipeline(command, hook, args)
    except KafkaSparkError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    as_json = args.json or (command not in _LOCAL_COMMANDS and args.output == "json")
    print(json.dumps(to_json(result), indent=2) if as_json else text)
    return OK


def _run_on_pipeline(command: str, hook: KafkaHook, args: argparse.Namespace) -> tuple[Any, str]:
    from airflow_kafka_spark.control.pipelines import name_similar_pipelines

    with name_similar_pipelines(hook):
        return _COMMANDS[command](hook, args)


@contextmanager
def _use_stored_connections() -> Iterator[None]:
    """Look connections up in the metadata database, too, as Airflow's own commands do.

    Without this variable, Airflow's hooks outside of a task know only environment variables and external backends.
    """
    before = os.environ.get(_CONTEXT)
    os.environ.setdefault(_CONTEXT, "server")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_CONTEXT]


def _make_hook(args: argparse.Namespace) -> KafkaHook:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

    if not args.bootstrap_servers:
        if args.config:
            raise ValueError("--config goes with --bootstrap-servers; a connection has its own settings")
        return KafkaHook(args.kafka_conn_id)

    class DirectHook(KafkaHook):
        """Hook of the brokers that the command line names."""

        @cached_property
        def config(self) -> dict[str, Any]:
            return {"bootstrap.servers": args.bootstrap_servers, **_parse_settings(args.config or ())}

    return DirectHook(args.bootstrap_servers)


def _parse_settings(pairs: Sequence[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"--config takes KEY=VALUE, not `{pair}`")
    return {key.strip(): value for key, _, value in (pair.partition("=") for pair in pairs)}


def _list(hook: KafkaHook, args: argparse.Namespace) -> tuple[ListedPipeline, ...]:
    from airflow_kafka_spark.cli.listing import list_pipelines

    return list_pipelines(hook, args.ledger_topic)


def _show(hook: KafkaHook, args: argparse.Namespace) -> PipelineState:
    from airflow_kafka_spark.control.pipelines import show

    return show(hook, args.pipeline, ledger_topic=args.ledger_topic, group_id=args.group_id)


def _read_windows(hook: KafkaHook, args: argparse.Namespace) -> tuple[WindowState, ...]:
    from airflow_kafka_spark.control.pipelines import list_windows

    return list_windows(hook, args.pipeline, ledger_topic=args.ledger_topic, limit=args.limit)


def _plan(hook: KafkaHook, args: argparse.Namespace) -> Preview:
    from airflow_kafka_spark.control.preview import PlanOptions, preview_window

    if args.dag_file:
        task = _find_task(args.dag_file, args.pipeline)
        with task.kafka:
            return task.preview()
    options = PlanOptions(
        args.topics, args.group_id, args.starting_offsets, args.ending_offsets, args.max_records, args.data_loss
    )
    return preview_window(hook, args.pipeline, options, ledger_topic=args.ledger_topic)


def _find_task(file: str, pipeline: str) -> FromKafkaOperator:
    """Return the task of a DAG file that moves a pipeline.

    :raises ValueError: the file cannot be imported, or no task in it moves this pipeline.
    """
    try:
        from airflow.dag_processing.dagbag import DagBag
    except ImportError:  # Airflow 3.0 and 3.1
        from airflow.models.dagbag import DagBag  # type: ignore[no-redef]

    from airflow_kafka_spark.operators.from_kafka import FromKafkaOperator

    if not os.path.isfile(file):
        raise ValueError(f"{file} is a directory; expected a file" if os.path.isdir(file) else f"there is no file {file}")
    # Airflow logs to standard output, which is the command's own, as JSON for instance.
    with redirect_stdout(sys.stderr):
        bag = DagBag(file, safe_mode=False)
    tasks = [task for dag in bag.dags.values() for task in dag.tasks if isinstance(task, FromKafkaOperator)]
    names = {task.pipeline or f"{task.dag_id}.{task.task_id}": task for task in tasks}
    if pipeline not in names:
        if broken := "; ".join(str(error).strip().splitlines()[-1] for error in bag.import_errors.values()):
            raise ValueError(f"{file} cannot be imported: {broken}")
        there = f"the pipelines of its tasks: {', '.join(sorted(names)) or 'none'}"
        raise ValueError(f"no task in {file} moves pipeline `{pipeline}` from Kafka; {there}")
    return names[pipeline]


def _reset(hook: KafkaHook, args: argparse.Namespace) -> ChangeResult:
    from airflow_kafka_spark.control.position import reset
    from airflow_kafka_spark.windows.offset_specs import ShiftBy

    if (args.to is None) == (args.shift_by is None):
        raise ValueError("reset takes either --to or --shift-by")
    to = args.to if args.to is not None else ShiftBy(args.shift_by)
    return reset(hook, _make_request(args), to, only=args.only, group_id=args.group_id, discard_open=args.discard_open)


def _forget(hook: KafkaHook, args: argparse.Namespace) -> ChangeResult:
    from airflow_kafka_spark.control.lifecycle import forget

    return forget(
        hook, _make_request(args), group_id=args.group_id, delete_group=args.delete_group, discard_open=args.discard_open
    )


def _pause(hook: KafkaHook, args: argparse.Namespace) -> ChangeResult:
    from airflow_kafka_spark.control.lifecycle import pause

    return pause(hook, _make_request(args))


def _resume(hook: KafkaHook, args: argparse.Namespace) -> ChangeResult:
    from airflow_kafka_spark.control.lifecycle import resume

    return resume(hook, _make_request(args))


def _skip(hook: KafkaHook, args: argparse.Namespace) -> ChangeResult:
    from airflow_kafka_spark.control.position import skip

    return skip(hook, _make_request(args), group_id=args.group_id, running=False if args.not_running else None)


def _replay(hook: KafkaHook, args: argparse.Namespace) -> ChangeResult:
    from airflow_kafka_spark.control.replay import replay

    if (args.window is None) == (not args.interval):
        raise ValueError("replay takes either --window or --interval")
    return replay(hook, _make_request(args), window=args.window, name=args.interval)


def _resend(hook: KafkaHook, args: argparse.Namespace) -> ChangeResult:
    from airflow_kafka_spark.control.replay import resend_dead_letters

    if (args.window is None) == (not args.interval):
        raise ValueError("resend takes either --window or --interval")
    return resend_dead_letters(hook, _make_request(args), window=args.window, name=args.interval)


def _rebind(hook: KafkaHook, args: argparse.Namespace) -> ChangeResult:
    from airflow_kafka_spark.control.lifecycle import rebind

    return rebind(hook, _make_request(args), running=False if args.not_running else None)


def _rename(hook: KafkaHook, args: argparse.Namespace) -> ChangeResult:
    from airflow_kafka_spark.control.lifecycle import rename

    return rename(hook, _make_request(args), args.to, group_id=args.group_id)


def _unblock(hook: KafkaHook, args: argparse.Namespace) -> Unblocked:
    from airflow_kafka_spark.control.lifecycle import unblock

    return unblock(hook, args.pipeline, ledger_topic=args.ledger_topic, dry_run=args.dry_run)


def _make_request(args: argparse.Namespace) -> ChangeRequest:
    from airflow_kafka_spark.control.base import ChangeRequest

    return ChangeRequest(args.pipeline, args.why, args.who, args.ledger_topic, args.dry_run)


def _make_execute(run_command: Callable[[KafkaHook, argparse.Namespace], R], to_text: Callable[[R], str]) -> Execute:
    def execute(hook: KafkaHook, args: argparse.Namespace) -> tuple[object, str]:
        result = run_command(hook, args)
        return result, to_text(result)

    return execute


def _pack(args: argparse.Namespace) -> tuple[object, str]:
    from airflow_kafka_spark.cli.pack import pack

    return pack(args)


_LOCAL_COMMANDS: Mapping[str, Callable[[argparse.Namespace], tuple[object, str]]] = {"pack": _pack}
"""Commands that ask no cluster."""

_COMMANDS: Mapping[str, Execute] = {
    "list": _make_execute(_list, format_pipelines),
    "show": _make_execute(_show, format_state),
    "plan": _make_execute(_plan, format_preview),
    "reset": _make_execute(_reset, format_reset),
    "windows": _make_execute(_read_windows, format_windows),
    "forget": _make_execute(_forget, format_forget),
    "pause": _make_execute(_pause, format_pause),
    "resume": _make_execute(_resume, format_pause),
    "skip": _make_execute(_skip, format_skip),
    "rename": _make_execute(_rename, format_rename),
    "unblock": _make_execute(_unblock, format_unblock),
    "rebind": _make_execute(_rebind, format_rebind),
    "replay": _make_execute(_replay, format_replay),
    "resend": _make_execute(_resend, format_resend),
}
