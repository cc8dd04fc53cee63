"""The commands on the command line: their output and their exit status."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Producer

from airflow_kafka_spark.cli.commands import format_replay
from airflow_kafka_spark.cli.definition import COMMANDS, main, make_parser
from airflow_kafka_spark.control.base import ChangeResult, ReplayedWindow
from airflow_kafka_spark.errors import (
    FollowedMismatch,
    GroupOwned,
    IntervalsLost,
    KafkaSparkError,
    LedgerBehind,
    PipelineInOtherLedger,
    PipelineRenamed,
    SourceOwned,
)
from airflow_kafka_spark.hooks.kafka.log import read_log
from airflow_kafka_spark.ledger.attempt import Ledger, format_utc_now
from airflow_kafka_spark.ledger.topic import TOPIC as LEDGER
from airflow_kafka_spark.windows.model import Gap, OffsetRange, TopicPartition, Window
from tests.support.clients import open_hook
from tests.support.oracle import wait_stable

PACKAGE = Path(__file__).parents[2] / "provider"
TOPIC = "command-line"
PROBE = """if True:
    import runpy, sys
    try:
        runpy.run_module("airflow_kafka_spark", run_name="__main__")
    finally:
        assert "pyspark" not in sys.modules
"""


@pytest.fixture(scope="module")
def hook(kafka):
    with open_hook(kafka) as hook:
        yield hook


@pytest.fixture
def name(kafka, hook, unique):
    """Return the name of a pipeline with one complete window, [0, 4) of 10 records."""
    name, topic = unique("pipe"), TOPIC
    hook.create_topic(topic, 1)
    if hook.read_offsets([topic])[TopicPartition(topic, 0)].high == 0:
        producer = Producer(kafka.connection_extra())
        for _ in range(10):
            producer.produce(topic, b"v" * 1000, partition=0)
        producer.flush(60)
    with Ledger(hook, name, "dag/run1/task", group_id=name) as ledger:
        log = read_log(hook, [topic])
        window = Window(name, 1, (OffsetRange(topic, 0, 0, 4),), "dag/run1/task", format_utc_now(), log.cluster_id, log.topic_ids)
        entry = ledger.plan(window)
        report = {
            "group_id": name,
            "completed_at": format_utc_now(),
            "records_read": 4,
            "records_written": 4,
            "timings": {"total": 2.0},
        }
        ledger.close(report, entry.window.ends)
    wait_stable(kafka.connection_extra(), LEDGER)
    return name


@pytest.fixture
def line(kafka, capsys):
    """Run a command; return its exit status and its output."""

    def run(*argv: str) -> tuple[int, str]:
        code = main([*argv, "--bootstrap-servers", kafka.bootstrap_servers])
        said = capsys.readouterr()
        # Brokers acknowledge a commit before all readers see it, and a look into the ledger does not wait for that.
        wait_stable(kafka.connection_extra(), LEDGER)
        return code, said.err if code else said.out

    return run


def columns(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


def test_show_is_a_table(line, name):
    code, text = line("show", name)
    assert code == 0
    assert columns(text)[0] == ["Pipeline", f"{name},", "group", f"{name}:", "1", "window", "complete"]
    assert columns(text)[-1] == [TOPIC, "0", "4", "4", "0", "10", "6"]


def test_list_shows_each_pipeline_with_its_state_and_lag(line, name):
    code, text = line("list")
    [row] = [found for found in columns(text) if found[0] == name]
    assert code == 0 and columns(text)[0][:3] == ["pipeline", "status", "activity"]
    assert row[2:6] == ["idle", TOPIC, "-", "1"] and row[7:10] == ["4", "2.0", "6"]
    assert line("pause", name, "--why", "x")[0] == 0
    code, text = line("list", "--output", "json")
    [found] = [listed for listed in json.loads(text) if listed["pipeline"] == name]
    assert (found["activity"], found["group"], found["lag_records"], found["last_window"]) == ("paused", name, 6, "1")
    code, text = line("list", "--ledger-topic", "unheard-of")
    assert code == 1 and "`unheard-of` does not exist" in text


def test_plan_prints_ranges_records_bytes_and_age(line, name):
    code, text = line("plan", name, "--max-records", "5")
    assert code == 0
    assert columns(text)[3][:7] == [TOPIC, "0", "[4,", "9)", "5", "5.0", "kB"]
    assert "At most 5 records, about 5.0 kB; its oldest record is" in text


def test_plan_names_an_open_window_whose_records_were_deleted(line, kafka, hook, unique):
    name, topic = unique("deleted"), unique("deleted")
    kafka.create_topic(topic)
    with Ledger(hook, name, "dag/run1/task", group_id=name) as ledger:
        log = read_log(hook, [topic])
        ranges = (OffsetRange(topic, 0, 5, 8),)
        ledger.plan(Window(name, 1, ranges, "dag/run1/task", format_utc_now(), log.cluster_id, log.topic_ids))
    code, text = line("plan", name)
    assert code == 0 and "[5, 8)" in text
    assert f"The log does not have the first offsets of this window in {topic}-0: records were deleted" in text
    code, text = line("forget", name, "--discard-open", "--why", "x")
    assert code == 0 and "Window 1 is given up; its sink may have committed it already" in text


def test_reset_windows_and_show_print_the_change(line, name):
    code, text = line("reset", name, "--shift-by", "-100", "--why", "reload", "--who", "ann")
    assert code == 0 and "the log ends there, not at -96" in text
    assert columns(text)[-1][:4] == [TOPIC, "0", "4", "0"]
    code, text = line("show", name)
    assert "reload" in text and "ann" in text and f"{TOPIC}-0: 4 -> 0" in text
    code, text = line("windows", name)
    assert code == 0 and columns(text)[-1][:6] == ["1", "COMPLETE", f"{TOPIC}-0", "[0,", "4)", "4"]


def test_windows_names_the_offsets_that_were_deleted_before_they_were_read(line, hook, name):
    with Ledger(hook, name, "dag/run2/task", group_id=name) as ledger:
        log = read_log(hook, [TOPIC])
        ranges = (OffsetRange(TOPIC, 0, 6, 9),)
        planned = Window(
            name, 2, ranges, "dag/run2/task", format_utc_now(), log.cluster_id, log.topic_ids, gaps=(Gap(TOPIC, 0, 4, 6),)
        )
        entry = ledger.plan(planned)
        lost = [{"topic": TOPIC, "partition": 0, "start": start, "end": end} for start, end in ((4, 6), (7, 8))]
        assert columns(line("windows", name)[1])[-2] == ["lost:", f"{TOPIC}-0", "[4,", "6)"]
        ledger.close({"completed_at": format_utc_now(), "records_read": 2, "gaps": lost}, entry.window.ends)
    _, text = line("windows", name)
    assert columns(text)[-3:-1] == [["lost:", f"{TOPIC}-0", "[4,", "6)"], ["lost:", f"{TOPIC}-0", "[7,", "8)"]]


def test_a_dry_run_says_so(line, name):
    code, text = line("reset", name, "--to", "latest", "--why", "x", "--dry-run")
    assert code == 0 and text.startswith("Nothing was changed") and "No record of" not in text
    code, text = line("reset", name, "--to", "2030-01-01T00:00:00Z", "--why", "x", "--dry-run")
    assert f"No record of {TOPIC}-0 is at or after 2030-01-01T00:00:00" in text
    code, text = line("forget", name, "--why", "x", "--dry-run")
    assert code == 0 and text.startswith("Nothing was changed")
    assert json.loads(line("show", name, "--json")[1])["partitions"][0]["offset"] == 4


def test_json_holds_the_same(line, name):
    for command in ("show", "plan", "windows"):
        code, text = line(command, name, "--json")
        found = json.loads(text)
        assert code == 0 and (found if isinstance(found, list) else found["pipeline"] == name)
    code, text = line("reset", name, "--to", json.dumps({TOPIC: {"0": 7}}), "--why", "x", "--json")
    assert [m["after"] for m in json.loads(text)["moves"]] == [7]
    code, text = line("forget", name, "--why", "x", "--json")
    assert json.loads(text)["records"] == 3


def test_pause_resume_skip_and_replay_print_their_change_and_show_lists_it(line, name):
    why = ("--why", "maintenance", "--who", "ann")
    assert line("pause", name, *why, "--dry-run")[1].startswith("Nothing was changed")
    code, text = line("pause", name, *why)
    assert code == 0 and text.startswith(f"Done: pause pipeline {name}, by ann: maintenance")
    assert line("pause", name, *why)[1].startswith("Nothing to do.\nThe pipeline is paused already: ann")
    assert "Paused by ann" in line("show", name)[1]
    assert json.loads(line("resume", name, *why, "--json")[1])["changed"]
    code, text = line("replay", name, "--window", "1", *why)
    assert code == 0 and '/api/v2/dags/dag/clearTaskInstances {"dag_run_id": "run1", "task_ids": ["task"]' in text
    code, text = line("skip", name, *why)
    assert code == 0 and f"{TOPIC}" in text and "[4, 10)" in text
    assert line("skip", name, *why)[0] == 1, "nothing waits"
    assert line("replay", name, *why)[0] == line("resend", name, *why)[0] == 2
    text = line("show", name)[1]
    assert "asked for a replay of 1" in text and "resumed" in text and f"{TOPIC}-0: 4 -> 10" in text


def test_a_replay_prints_each_range_of_its_window_in_a_line_of_its_own():
    ranges = OffsetRange("t", 0, 0, 4), OffsetRange("t", 1, 2, 3)
    window = ReplayedWindow(1, None, 0, ranges, "dag/run1/task", "dag", "run1", "task", -1)
    text = format_replay(ChangeResult("replay", "p", 1, "ann", "format", False, window=window))
    assert "\n\n  t-0 [0, 4)\n  t-1 [2, 3)\n\n" in text


def test_what_is_refused_ends_with_1_and_says_why(line, name):
    code, text = line("show", "unheard-of")
    assert code == 1 and "there is" not in text and "airflow kafka-spark list" in text
    assert f"; there is `{name}`" in line("show", f"{name}s")[1]
    code, text = line("reset", name, "--to", json.dumps({TOPIC: {"0": 11}}), "--why", "x")
    assert code == 1 and f"{TOPIC}-0 at 11, not in [0, 10]" in text
    code, text = line("resend", name, "--window", "1", "--why", "x")
    assert code == 1 and "has no dead letters" in text
    assert line("forget", name, "--why", "x")[0] == 0
    code, text = line("reset", name, "--to", "earliest", "--why", "x")
    assert code == 1 and f"has no record of a pipeline `{name}`" in text and f"there is `{name}`" not in text


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["reset", "p"],
        ["reset", "p", "--why", "x"],
        ["reset", "p", "--why", "x", "--to", "latest", "--shift-by", "1"],
        ["reset", "p", "--why", "x", "--to", "sometimes"],
        ["list", "--output", "yaml"],
        ["plan", "p", "--max-records", "0"],
        ["windows", "p", "--limit", "0"],
        ["show", "p", "--config", "nonsense"],
        ["move", "p"],
    ],
    ids=" ".join,
)
def test_what_is_not_understood_ends_with_2(kafka, capsys, argv):
    try:
        code = main([*argv, "--bootstrap-servers", kafka.bootstrap_servers] if argv else [])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert "error" in capsys.readouterr().err


def test_python_m_ends_with_the_same_codes_and_needs_no_spark(kafka, name, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(PACKAGE), "AIRFLOW_HOME": str(tmp_path)}
    ended = {}
    for pipeline in (name, "unheard-of"):
        argv = [sys.executable, "-c", PROBE, "show", pipeline, "--bootstrap-servers", kafka.bootstrap_servers]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300, check=False)
        ended[done.returncode] = done
    assert set(ended) == {0, 1}
    assert name in ended[0].stdout and "unheard-of" in ended[1].stderr and "Traceback" not in ended[1].stderr


def test_airflow_has_the_same_commands(kafka, hook, name, capsys):
    """``airflow kafka-spark show ...``, through Airflow's own parser and its providers manager."""
    from airflow.cli import cli_parser

    parser = cli_parser.get_parser()
    args = parser.parse_args(["kafka-spark", "show", name, "--json"])
    args.func(args)
    assert json.loads(capsys.readouterr().out)["pipeline"] == name
    refused = parser.parse_args(["kafka-spark", "reset", name, "--to", json.dumps({TOPIC: {"0": 11}}), "--why", "x"])
    with pytest.raises(SystemExit) as ended:
        refused.func(refused)
    assert ended.value.code == 1
    group = cli_parser.ALL_COMMANDS_DICT["kafka-spark"]
    assert [command.name for command in group.subcommands] == [command.name for command in COMMANDS]


SUGGESTED = [
    GroupOwned("my pipe", "g's", "the owner's"),
    GroupOwned("my pipe", "g's", "the owner's", "windows"),
    SourceOwned("my pipe", "postgres://x", "the owner's", "windows"),
    PipelineInOtherLedger("my pipe", "windows", "others"),
    PipelineRenamed("my pipe", "its name", "ann", "2026"),
    LedgerBehind("my pipe", "g's", 3, 1, "windows", '{"orders": {"0": 7}}', ["orders", "sold"]),
    IntervalsLost("my pipe", "g's", "2026", "2026", "orders-0", 1, 2, "windows"),
    FollowedMismatch("my pipe#1", "other", 1, 2),
]


@pytest.mark.parametrize("error", SUGGESTED, ids=lambda error: type(error).__name__)
def test_commands_that_errors_suggest_can_be_pasted_into_a_shell(error: KafkaSparkError) -> None:
    commands = re.findall(r"`airflow kafka-spark ([^`]+)`", str(error))
    parsed = [make_parser().parse_args(shlex.split(command)) for command in commands]
    assert parsed and {args.pipeline for args in parsed} <= {"my pipe", "the owner's"}
    assert {args.group_id for args in parsed if getattr(args, "group_id", None)} <= {"g's", "others.my pipe"}
