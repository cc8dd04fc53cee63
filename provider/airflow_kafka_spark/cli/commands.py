"""The commands: each calls one function of :mod:`airflow_kafka_spark.control`, and prints its result as text or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from airflow_kafka_spark.cli import output
from airflow_kafka_spark.errors import KafkaSparkError

if TYPE_CHECKING:
    from airflow_kafka_spark.control.base import ChangeRequest, ChangeResult
    from airflow_kafka_spark.control.pipelines import PipelineState, WindowState
    from airflow_kafka_spark.control.preview import Preview
    from airflow_kafka_spark.control.unblock import Unblocked
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.operators.from_kafka import FromKafkaOperator

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
    :return: 0; 1 if the command was refused or Kafka did not answer; 2 if the arguments are invalid. The message says why.
    """
    from airflow_kafka_spark.control.pipelines import to_json

    try:
        if (local := _LOCAL_COMMANDS.get(command)) is not None:
            result, text = local(args)
        else:
            with _stored_connections(), _hook(args) as hook:
                result, text = _COMMANDS[command](hook, args)
    except KafkaSparkError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    print(json.dumps(to_json(result), indent=2) if args.json else text)
    return OK


@contextmanager
def _stored_connections() -> Iterator[None]:
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


def _hook(args: argparse.Namespace) -> KafkaHook:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

    if not args.bootstrap_servers:
        if args.config:
            raise ValueError("--config goes with --bootstrap-servers; a connection has its own settings")
        return KafkaHook(args.kafka_conn_id)

    class DirectHook(KafkaHook):
        """Hook of the brokers that the command line names."""

        @cached_property
        def config(self) -> dict[str, Any]:
            return {"bootstrap.servers": args.bootstrap_servers, **_settings(args.config or ())}

    return DirectHook(args.bootstrap_servers)


def _settings(pairs: Sequence[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"--config takes KEY=VALUE, not `{pair}`")
    return {key.strip(): value for key, _, value in (pair.partition("=") for pair in pairs)}


def _show(hook: KafkaHook, args: argparse.Namespace) -> PipelineState:
    from airflow_kafka_spark.control.pipelines import show

    return show(hook, args.pipeline, ledger_topic=args.ledger_topic, group_id=args.group_id)


def _windows(hook: KafkaHook, args: argparse.Namespace) -> tuple[WindowState, ...]:
    from airflow_kafka_spark.control.pipelines import list_windows

    return list_windows(hook, args.pipeline, ledger_topic=args.ledger_topic, limit=args.limit)


def _plan(hook: KafkaHook, args: argparse.Namespace) -> Preview:
    from airflow_kafka_spark.control.preview import preview

    if args.dag_file:
        task = _task_of(args.dag_file, args.pipeline)
        with task.kafka:
            return task.preview()
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
    to = args.to if args.to is not None else ShiftBy(args.shift_by)
    return reset(hook, _request(args), to, only=args.only, group_id=args.group_id, discard_open=args.discard_open)


def _forget(hook: KafkaHook, args: argparse.Namespace) -> ChangeResult:
    from airflow_kafka_spark.control.forget import forget

    return forget(hook, _request(args), group_id=args.group_id, delete_group=args.delete_group, discard_open=args.discard_open)


def _pause(hook: KafkaHook, args: argparse.Namespace) -> ChangeResult:
    from airflow_kafka_spark.control.pause import pause

    return pause(hook, _request(args))


def _resume(hook: KafkaHook, args: argparse.Namespace) -> ChangeResult:
    from airflow_kafka_spark.control.pause import resume

    return resume(hook, _request(args))


def _skip(hook: KafkaHook, args: argparse.Namespace) -> ChangeResult:
    from airflow_kafka_spark.control.skip import skip

    return skip(hook, _request(args), group_id=args.group_id, running=False if args.not_running else None)


def _replay(hook: KafkaHook, args: argparse.Namespace) -> ChangeResult:
    from airflow_kafka_spark.control.replay import replay

    if (args.window is None) == (not args.interval):
        raise ValueError("replay takes either --window or --interval")
    return replay(hook, _request(args), window=args.window, name=args.interval)


def _resend(hook: KafkaHook, args: argparse.Namespace) -> ChangeResult:
    from airflow_kafka_spark.control.resend import resend

    if (args.window is None) == (not args.interval):
        raise ValueError("resend takes either --window or --interval")
    return resend(hook, _request(args), window=args.window, name=args.interval)


def _rebind(hook: KafkaHook, args: argparse.Namespace) -> ChangeResult:
    from airflow_kafka_spark.control.rebind import rebind

    return rebind(hook, _request(args), running=False if args.not_running else None)


def _rename(hook: KafkaHook, args: argparse.Namespace) -> ChangeResult:
    from airflow_kafka_spark.control.rename import rename

    return rename(hook, _request(args), args.to, group_id=args.group_id)


def _unblock(hook: KafkaHook, args: argparse.Namespace) -> Unblocked:
    from airflow_kafka_spark.control.unblock import unblock

    return unblock(hook, args.pipeline, ledger_topic=args.ledger_topic, dry_run=args.dry_run)


def _request(args: argparse.Namespace) -> ChangeRequest:
    from airflow_kafka_spark.control.base import ChangeRequest

    return ChangeRequest(args.pipeline, args.why, args.who, args.ledger_topic, args.dry_run)


def _with_text(run_command: Callable[[KafkaHook, argparse.Namespace], R], to_text: Callable[[R], str]) -> Execute:
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
    "show": _with_text(_show, output.format_state),
    "plan": _with_text(_plan, output.format_preview),
    "reset": _with_text(_reset, output.format_reset),
    "windows": _with_text(_windows, output.format_windows),
    "forget": _with_text(_forget, output.format_forget),
    "pause": _with_text(_pause, output.format_pause),
    "resume": _with_text(_resume, output.format_pause),
    "skip": _with_text(_skip, output.format_skip),
    "rename": _with_text(_rename, output.format_rename),
    "unblock": _with_text(_unblock, output.format_unblock),
    "rebind": _with_text(_rebind, output.format_rebind),
    "replay": _with_text(_replay, output.format_replay),
    "resend": _with_text(_resend, output.format_resend),
}
