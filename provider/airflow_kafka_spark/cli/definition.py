"""The commands and their arguments, for ``airflow kafka-spark`` and for ``python -m airflow_kafka_spark``.

Both are made of Airflow's own descriptions of commands. Airflow finds :func:`get_cli_commands` through the provider info.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from airflow.cli.cli_config import ActionCommand, Arg, GroupCommand, positive_int

from airflow_kafka_spark.cli.pack import FORMATS, SINKS, SOURCES

NAME = "kafka-spark"
HELP = "Show and change the positions of pipelines of the Kafka on Spark provider"

OFFSETS = '"committed:<group>", "earliest", "latest", an instant in ISO 8601 with a zone, or offsets as {"topic": {"0": 23}}'

JSON = Arg(("--json",), help="print JSON", action="store_true")
LEDGER = (
    Arg(("--kafka-conn-id",), help="Airflow connection of type kafka (default: kafka_default)", default="kafka_default"),
    Arg(("--bootstrap-servers",), help="brokers, instead of a connection", metavar="HOST:PORT"),
    Arg(("--config",), help="librdkafka setting for --bootstrap-servers", action="append", metavar="KEY=VALUE"),
    Arg(("--ledger-topic",), help="ledger topic (default: airflow-windows)", default="airflow-windows"),
    Arg(("-o", "--output"), help="form of the output (default: table)", choices=("table", "json"), default="table"),
    JSON,
)
PIPELINE = (Arg(("pipeline",), help="name of the pipeline; by default <dag_id>.<task_id>"), *LEDGER)
GROUP = Arg(("--group-id",), help="consumer group of the pipeline (default: that of its last report)")
DRY_RUN = Arg(("--dry-run",), help="show what would be changed, and change nothing", action="store_true")
CHANGE = (
    Arg(("--why",), help="reason of the change; the ledger records it", required=True),
    Arg(("--who",), help="author of the change (default: the user of this process)", default=""),
    DRY_RUN,
)
DISCARD_OPEN = Arg(
    ("--discard-open",), help="give up an open window, even if its sink may have committed it already", action="store_true"
)
OF_WINDOW = (
    Arg(("--window",), help="number of the window", type=int),
    Arg(
        ("--interval",),
        help="name of a data interval, as 20260101T000000Z-20260101T010000Z; instead of --window",
        metavar="NAME",
    ),
)
NOT_RUNNING = Arg(
    ("--not-running",), help="confirm that no task works on the open window; check its task in Airflow", action="store_true"
)


def _make_runner(name: str) -> Callable[[argparse.Namespace], None]:
    def run_command(args: argparse.Namespace) -> None:
        from airflow_kafka_spark.cli.commands import run

        if code := run(name, args):
            sys.exit(code)

    return run_command


def _make_command(name: str, text: str, *args: Arg) -> ActionCommand:
    return ActionCommand(name=name, help=text, func=_make_runner(name), args=args, description=f"{text}.")


COMMANDS = (
    _make_command("list", "List the pipelines of a ledger with their state and their lag", *LEDGER),
    _make_command("show", "Show the position of a pipeline and its lag", *PIPELINE, GROUP),
    _make_command(
        "plan",
        "Show the next window of a pipeline, without changing anything",
        *PIPELINE,
        GROUP,
        Arg(
            ("--dag-file",),
            help="DAG file of the pipeline: use the options of its operator, and query its sink",
            metavar="FILE",
        ),
        Arg(("--topics",), help="topics of the operator (default: those that the pipeline has read)", nargs="+", default=[]),
        Arg(("--starting-offsets",), help=f"starting_offsets of the operator: {OFFSETS}"),
        Arg(("--ending-offsets",), help=f"ending_offsets of the operator: {OFFSETS}"),
        Arg(("--max-records",), help="max_records of the operator", type=positive_int(allow_zero=False)),
        Arg(("--data-loss",), help="data_loss of the operator (default: fail)", choices=("fail", "skip"), default="fail"),
    ),
    _make_command(
        "reset",
        "Move a pipeline and its consumer group to other offsets",
        *PIPELINE,
        Arg(("--to",), help=f"new position: {OFFSETS}. For example: --to 2026-01-01T00:00:00Z, or --to committed:connect-orders"),
        Arg(
            ("--shift-by",),
            help="number of offsets to move the position forward, or backward if negative; instead of --to",
            type=int,
            metavar="OFFSETS",
        ),
        Arg(
            ("--only",),
            help="topics, or partitions as topic:0,2 (default: all)",
            nargs="+",
            default=[],
            metavar="TOPIC",
        ),
        GROUP,
        *CHANGE,
        DISCARD_OPEN,
    ),
    _make_command(
        "windows",
        "List the windows of a pipeline",
        *PIPELINE,
        Arg(("--limit",), help="largest number of windows (default: 20)", type=positive_int(allow_zero=False), default=20),
    ),
    _make_command(
        "forget",
        "Remove a pipeline from the ledger",
        *PIPELINE,
        GROUP,
        *CHANGE,
        DISCARD_OPEN,
        Arg(("--delete-group",), help="delete its consumer group with the committed offsets", action="store_true"),
    ),
    _make_command("pause", "Let a pipeline move nothing until it is resumed; a running attempt continues", *PIPELINE, *CHANGE),
    _make_command("resume", "Let a paused pipeline continue, with its open window first", *PIPELINE, *CHANGE),
    _make_command(
        "skip", "Give up the open window of a pipeline, or else skip its backlog", *PIPELINE, GROUP, *CHANGE, NOT_RUNNING
    ),
    _make_command(
        "unblock",
        "End a transaction that another client has left open in the ledger's partition of a pipeline",
        *PIPELINE,
        DRY_RUN,
    ),
    _make_command(
        "rename",
        "Let a pipeline continue under another name, with its consumer group",
        *PIPELINE,
        Arg(("--to",), help="the new name", required=True, metavar="NAME"),
        GROUP,
        *CHANGE,
    ),
    _make_command(
        "rebind",
        "Allow the next run of a pipeline another task, source, destination or deployment; once",
        *PIPELINE,
        *CHANGE,
        NOT_RUNNING,
    ),
    _make_command(
        "replay",
        "Request that a complete window is moved once more when its task is cleared",
        *PIPELINE,
        *OF_WINDOW,
        *CHANGE,
    ),
    _make_command(
        "resend",
        "Send the dead letters of a complete window again to the topics that they came from, once",
        *PIPELINE,
        *OF_WINDOW,
        *CHANGE,
    ),
    _make_command(
        "pack",
        "Write an archive of the Python packages that executors need, for spark.archives",
        Arg(("--source",), help="sources of the pipelines (default: kafka)", nargs="+", choices=SOURCES, default=["kafka"]),
        Arg(("--sink",), help="sinks of the pipelines (default: files)", nargs="+", choices=SINKS, default=["files"]),
        Arg(("--format",), help="formats of the pipelines (default: json)", nargs="+", choices=FORMATS, default=["json"]),
        Arg(("-o", "--output"), help="archive to write (default: env.tar.gz)", default="env.tar.gz", metavar="FILE"),
        JSON,
    ),
)


def get_cli_commands() -> list[GroupCommand]:
    """Return the commands for Airflow's command line."""
    return [GroupCommand(name=NAME, help=HELP, subcommands=COMMANDS)]


def make_parser(prog: str = "python -m airflow_kafka_spark") -> argparse.ArgumentParser:
    """Return the parser for ``python -m airflow_kafka_spark``.

    :param prog: name of the program in the help.
    """
    parser = argparse.ArgumentParser(prog=prog, description=f"{HELP}.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.description)
        for arg in command.args:
            arg.add_to_parser(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    :param argv: its arguments. Default: those of this process.
    :return: 0; 1 if the command was refused or Kafka did not answer; 2 if the arguments are invalid. The reason is printed.
    """
    from airflow_kafka_spark.cli.commands import run

    args = make_parser().parse_args(argv)
    return run(args.command, args)
