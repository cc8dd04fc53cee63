"""The commands and their arguments, as data: argparse and Airflow's own command line are both made of it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BOUND = '"committed:<group>", "earliest", "latest", a time as ISO 8601 with a zone, or offsets as {"topic": {"0": 23}}'


@dataclass(frozen=True)
class Option:
    """One argument: what ``ArgumentParser.add_argument`` takes."""

    flags: tuple[str, ...]
    help: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Command:
    """One command."""

    name: str
    help: str
    options: tuple[Option, ...]


def _flag(name: str, text: str) -> Option:
    return Option((name,), text, {"action": "store_true"})


PLACE = (
    Option(("pipeline",), "the pipeline's name, by default <dag_id>.<task_id>"),
    Option(("--kafka-conn-id",), "Airflow connection of type kafka (default: kafka_default)", {"default": "kafka_default"}),
    Option(("--bootstrap-servers",), "brokers, in place of a connection", {"metavar": "HOST:PORT"}),
    Option(("--config",), "librdkafka setting for --bootstrap-servers", {"action": "append", "metavar": "KEY=VALUE"}),
    Option(("--ledger-topic",), "ledger topic (default: airflow-windows)", {"default": "airflow-windows"}),
    _flag("--json", "print JSON"),
)  # fmt: skip
GROUP = Option(("--group-id",), "the pipeline's group (default: what its last report names)")
WISH = (
    Option(("--why",), "what for; kept in the ledger", {"required": True}),
    Option(("--who",), "who (default: you)", {"default": ""}),
    _flag("--dry-run", "show what would happen, and change nothing"),
)
CHANGE = (GROUP, *WISH, _flag("--discard-open", "give up an open window; its sink may have taken it already"))

COMMANDS = (
    Command("show", "where a pipeline stands, and how far behind it is", (*PLACE, GROUP)),
    Command(
        "plan",
        "what its next window would be; changes nothing",
        (
            *PLACE,
            GROUP,
            Option(("--dag-file",), "its DAG file: take the options of its operator, and ask its sink", {"metavar": "FILE"}),
            Option(("--topics",), "topics that it subscribes to (default: what it has read)", {"nargs": "+", "default": []}),
            Option(("--starting-offsets",), f"as its operator says: {BOUND}"),
            Option(("--ending-offsets",), f"as its operator says: {BOUND}"),
            Option(("--max-records",), "as its operator says", {"type": int}),
            Option(("--data-loss",), "as its operator says", {"choices": ("fail", "skip"), "default": "fail"}),
        ),
    ),
    Command(
        "reset",
        "move it, and its group with it",
        (
            *PLACE,
            Option(("--to",), BOUND),
            Option(("--shift-by",), "so many offsets on, or back if negative", {"type": int, "metavar": "OFFSETS"}),
            Option(("--only",), "topics, or partitions as topic:0,2", {"nargs": "+", "default": [], "metavar": "TOPIC"}),
            *CHANGE,
        ),
    ),
    Command(
        "windows",
        "the windows it has moved",
        (*PLACE, Option(("--limit",), "at most so many (default: 20)", {"type": int, "default": 20})),
    ),
    Command(
        "forget",
        "make the ledger forget it",
        (*PLACE, *CHANGE, _flag("--delete-group", "delete its group with the offsets it has committed")),
    ),
    Command("pause", "have it move nothing until it is resumed; who is at work goes on to the end", (*PLACE, *WISH)),
    Command("resume", "let it go on, with its open window first", (*PLACE, *WISH)),
    Command(
        "skip",
        "give up its open window, or else what waits: that is not moved",
        (*PLACE, GROUP, *WISH, _flag("--not-running", "nobody is at work on the open window: Airflow says so of its task")),
    ),
    Command(
        "unblock",
        "end the transaction that somebody has left open in its partition of the ledger",
        (*PLACE, _flag("--dry-run", "only say whose it is")),
    ),
    Command(
        "rename",
        "let it go on under another name, with its group",
        (*PLACE, Option(("--to",), "its new name", {"required": True, "metavar": "NAME"}), GROUP, *WISH),
    ),
    Command(
        "rebind",
        "let its next run go elsewhere, come from elsewhere, or be another task's or deployment's; once",
        (
            *PLACE,
            *WISH,
            _flag("--not-running", "nobody is at work on an open window: Airflow says so of its task; that goes elsewhere, too"),
        ),
    ),
    Command(
        "replay",
        "ask for a complete window to be moved once more, when its task is cleared",
        (
            *PLACE,
            Option(("--window",), "its number", {"type": int}),
            Option(("--interval",), "a data interval's name, as 20260101T000000Z-20260101T010000Z", {"metavar": "NAME"}),
            *WISH,
        ),
    ),
)  # fmt: skip


def parser(prog: str = "python -m airflow_kafka_spark") -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog=prog, description="Where pipelines of the Kafka on Spark provider stand, and moving them."
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.help, description=f"{command.help[:1].upper()}{command.help[1:]}.")
        for option in command.options:
            sub.add_argument(*option.flags, help=option.help.replace("%", "%%"), **option.settings)
    return made
