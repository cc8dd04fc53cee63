"""``airflow kafka-spark``: the same commands as a part of Airflow's own command line (provider info ``cli``)."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

from airflow_kafka_spark.cli.options import COMMANDS, Option

NAME = "kafka-spark"


def get_cli_commands() -> list[Any]:
    """What Airflow's command line asks a provider for."""
    from airflow.cli.cli_config import ActionCommand, GroupCommand

    commands = [
        ActionCommand(name=c.name, help=c.help, func=partial(_run, c.name), args=tuple(map(_arg, c.options))) for c in COMMANDS
    ]
    return [
        GroupCommand(
            name=NAME, help="Where pipelines of the Kafka on Spark provider stand, and moving them", subcommands=commands
        )
    ]


def _arg(option: Option) -> Any:
    from airflow.cli.cli_config import Arg

    return Arg(flags=option.flags, help=option.help.replace("%", "%%"), **option.settings)


def _run(command: str, args: argparse.Namespace) -> None:
    from airflow_kafka_spark.cli.commands import run

    args.command = command
    if code := run(args):
        sys.exit(code)
