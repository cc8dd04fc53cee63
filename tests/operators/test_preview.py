"""A preview shows the window that the next run moves, also if the sink has a later window than the ledger."""

from __future__ import annotations

import json

import pytest

from airflow_kafka_spark.cli.definition import main
from airflow_kafka_spark.control.pipelines import list_windows, read_pipeline
from airflow_kafka_spark.control.preview import PlanOptions, preview_window
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from tests.support.control import forget
from tests.support.oracle import wait_stable

DAG_FILE = """
from airflow.sdk import DAG
from tests.support.pipelines import make

with DAG("dag", schedule=None):
    make(**{arguments!r})
"""


@pytest.fixture
def hook(files):
    with KafkaHook() as hook:
        yield hook


def ranges(window):
    return sorted((r.partition, r.start, r.end) for r in window.ranges)


def settle(files):
    wait_stable(files.kafka.connection_extra(), f"ledger-{files.name}")


def test_a_sink_that_remembers_more_than_the_ledger_decides_for_run_and_preview(files, hook, tmp_path, capsys):
    ledger = {"ledger_topic": f"ledger-{files.name}"}
    files.produce(90)
    files.run("run1")
    settle(files)
    (moved,) = list_windows(hook, files.name, **ledger)
    forget(hook, files.name, why="a test", group_id=files.name, delete_group=True, **ledger)
    files.produce(60)
    settle(files)
    assert read_pipeline(hook, files.name, f"ledger-{files.name}").memory.is_blank

    unasked = preview_window(hook, files.name, PlanOptions([files.topic], files.name), **ledger)
    assert unasked.begins == "starting_offsets" and {r.start for r in unasked.ranges} == {0}
    assert "sink was not asked" in unasked.warnings[0] and f"plan {files.name} --dag-file FILE" in unasked.warnings[1]

    found = files.make(**files.arguments).preview()
    assert (found.begins, found.number, found.warnings) == ("sink", 2, ())
    assert [(r.partition, r.start) for r in found.ranges] == [(r.partition, r.end) for r in moved.ranges]

    dag_file = tmp_path / "flow.py"
    dag_file.write_text(DAG_FILE.format(arguments=files.arguments))
    assert main(["plan", files.name, "--dag-file", str(dag_file)]) == 0
    output = capsys.readouterr().out
    assert "would begin at the position of its sink" in output and "60 records" in output
    assert main(["plan", files.name, "--dag-file", str(dag_file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pipeline"] == files.name, "Airflow's log is not part of it"
    assert main(["plan", "another", "--dag-file", str(dag_file)]) == 2
    assert f"the pipelines of its tasks: {files.name}" in capsys.readouterr().err

    report = files.run("run2")
    settle(files)
    (run,) = list_windows(hook, files.name, **ledger)
    assert (ranges(run), run.number, report["records_read"]) == (ranges(found), found.number, 60)


def test_after_a_move_by_hand_the_sink_decides_the_number_only(files, hook):
    ledger = {"ledger_topic": f"ledger-{files.name}"}
    files.produce(30)
    files.run("run1")
    settle(files)
    from tests.support.control import reset

    reset(hook, files.name, "earliest", why="a test", **ledger)
    settle(files)
    unasked = preview_window(hook, files.name, **ledger)
    assert unasked.begins == "ledger" and "counts from that number" in unasked.warnings[0]
    found = files.make(**files.arguments).preview()
    assert (ranges(found), found.warnings) == (ranges(unasked), ())
    files.run("run2")
    settle(files)
    run = list_windows(hook, files.name, limit=1, **ledger)[0]
    assert (ranges(run), run.number) == (ranges(found), found.number)
