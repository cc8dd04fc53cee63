"""A real DAG, run three times: the first task is killed after reading its window, the second succeeds, the third fails. The tests
check what Airflow, lineage and the ledger show of it.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from urllib.parse import unquote

import pytest
from confluent_kafka import Producer

from airflow_kafka_spark.testing.airflow import SqliteDatabase
from tests.support import engine
from tests.support.pipelines import pipeline
from tests.support.runs import ROOT

pytestmark = pytest.mark.airflow

RECORDS = 3000
DAG = "visible"
TASK = f"{DAG}.task"
SETTINGS = {
    "API__BASE_URL": "http://airflow.test/prefix",
    "KAFKA_SPARK__TOPIC_URL": "http://kafka-ui.test/{connection}/topics/{topic}",
    "KAFKA_SPARK__TABLE_URL": "http://catalog.test/{scheme}/{name}",
    "KAFKA_SPARK__HISTORY_SERVER_URL": "http://history.test/",
    # After ten seconds an event would be given up: a machine may be that busy.
    "OPENLINEAGE__EXECUTION_TIMEOUT": "300",
}


@pytest.fixture(scope="module")
def seen(kafka, postgres, tmp_path_factory):
    """The state of two runs, of the pipeline, and OpenLineage's events."""
    directory = tmp_path_factory.mktemp("visible")
    numbers = itertools.count()
    with pipeline(
        "postgres", kafka, lambda: postgres, lambda prefix: f"{prefix}-{directory.name}-{next(numbers)}", directory
    ) as made:
        made.produce(RECORDS)
        producer = Producer(kafka.connection_extra())
        producer.produce(made.topic, b"{", partition=0)
        producer.flush(60)
        letters = f"{made.topic}-dead"
        options = {
            **made.arguments,
            "kind": "postgres",
            "max_records": RECORDS // 2,
            "split_records": 300,
            "errors_tolerance": "all",
            "errors_deadletterqueue_topic_name": letters,
            "max_errors": 1,
        }
        lineage, result = directory / "lineage.jsonl", directory / "result.json"
        transport = json.dumps({"type": "file", "log_file_path": str(lineage), "append": True})
        env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW__")},
            **{f"AIRFLOW__{name}": value for name, value in SETTINGS.items()},
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": str(directory),
            "AIRFLOW__OPENLINEAGE__TRANSPORT": transport,
            "AIRFLOW__OPENLINEAGE__NAMESPACE": "shop",
            "AIRFLOW_HOME": str(directory / "home"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        }
        (directory / "home").mkdir()
        metadata = SqliteDatabase(directory / "home")
        metadata.start()
        env |= metadata.settings
        migration = [sys.executable, "-m", "airflow", "db", "migrate"]
        metadata.migrate(env, lambda: subprocess.run(migration, env=env, capture_output=True, timeout=550, check=True))
        given = json.dumps(
            {
                "dag_id": DAG,
                "arguments": options,
                "fault": "job.done",
                "broker": kafka.connection_extra(),
                # Three partitions have two splits of a window each: 300 records and the rest, of which the last 100 wait.
                "gate": str(directory / "gate"),
                "records": RECORDS // 2,
                "free": RECORDS * 2 // 5,
            }
        )
        command = [sys.executable, "-m", "tests.support.visible", given, str(result)]
        spark = engine.lend()
        assert spark is not None
        try:
            done = subprocess.run(command, env=env | spark.environment, capture_output=True, text=True, timeout=550, check=False)
        finally:
            spark.give_back()
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        found = json.loads(result.read_text())
        assert found["ended_with"] == -signal.SIGKILL, done.stdout[-6000:]
        assert found["state"] == "success", done.stdout[-6000:]
        events = [json.loads(line) for line in lineage.read_text().splitlines()]
        with postgres.connect(autocommit=True) as connection:
            (rows,) = connection.execute(f'SELECT count(*) FROM "{made.place}"').fetchone()
        events = [event for event in events if event["job"]["name"] == TASK]
        server = kafka.bootstrap_servers.partition(",")[0]
        yield {**found, "made": made, "letters": letters, "lineage": events, "rows": rows, "broker": f"kafka://{server}"}


def test_nothing_of_it_kept_a_record_from_the_table(seen):
    assert seen["rows"] == RECORDS - 1


def test_links_are_there_while_a_task_runs_and_after_it_was_killed(seen):
    made, links = seen["made"], seen["first"]["links"]
    assert seen["first"]["states"] == ["running"]
    assert links["WindowLink"].startswith("http://airflow.test/prefix/")
    page = unquote(links["WindowLink"])
    assert f"kafka_default/ledger-{made.name}" in page
    assert page.endswith("window=1")
    assert links["TopicLink"] == f"http://kafka-ui.test/kafka_default/topics/{made.topic}"
    assert links["TableLink"] == f"http://catalog.test/postgres/postgres.public.{made.place}"
    assert links["DeadLettersLink"] == f"http://kafka-ui.test/kafka_default/topics/{seen['letters']}"
    assert links["SparkLink"].startswith("http://history.test/history/local-")


def test_a_link_leads_to_the_window_that_the_run_has_moved_itself(seen):
    # It had to finish window 1 before.
    assert seen["second"]["links"]["WindowLink"].endswith("window=2")
    assert seen["second"]["states"] == ["success"]
    assert set(seen["second"]["links"]) == set(seen["first"]["links"])


def test_progress_is_published_at_each_step_and_while_the_job_runs(seen):
    for window in (1, 2):
        states = [t for t in seen["history"] if t["window"] == window]
        assert list(dict.fromkeys(t["step"] for t in states)) == ["plan", "move", "commit", "close"]
        done = [t["splits_done"] for t in states]
        assert done == sorted(done)
        # The first window has a second attempt in the same Spark, which lists the tasks of the first attempt, too.
        assert {t["splits"] for t in states[-3:]} == {done[-1]} == {6}
        assert {t["records_total"] for t in states} == {RECORDS // 2}
        assert [t["records_done"] for t in states] == sorted(t["records_done"] for t in states)
        assert (states[0]["records_done"], states[-1]["records_done"]) == (0, RECORDS // 2)
        half_way = [t for t in states if 0 < t["splits_done"] < t["splits"]]
        assert half_way
        assert all(t["records_done"] == RECORDS // 2 * t["splits_done"] // t["splits"] for t in half_way)
        assert all(t["started_at"] <= t["updated_at"] for t in states)


def test_progress_of_a_killed_task_stays_where_it_was(seen):
    (left,) = seen["first"]["progress"]
    assert (left["window"], left["name"], left["step"]) == (1, "1", "commit")
    (last,) = seen["second"]["progress"]
    assert (last["window"], last["step"]) == (2, "close")


def test_the_event_of_an_asset_carries_window_ranges_and_counts(seen):
    assert seen["first"]["events"] == seen["third"]["events"] == []
    (extra,) = seen["second"]["events"]
    assert extra["window"] == "0000000002"
    assert sum(r["end"] - r["start"] for r in extra["ranges"]) == extra["records_read"] == RECORDS // 2
    assert {r["topic"] for r in extra["ranges"]} == {seen["made"].topic}
    assert extra["records_written"] + extra["records_rejected"] == RECORDS // 2


def read_event(seen, state):
    """Return the last of OpenLineage's events of the task, and its inputs and outputs by name."""
    event = [e for e in seen["lineage"] if e["eventType"] == state][-1]
    return event, {d["name"]: d for d in event["inputs"]}, {d["name"]: d for d in event["outputs"]}


def test_lineage_names_topics_and_tables_before_and_offsets_and_counts_afterwards(seen):
    made = seen["made"]
    table = f"postgres.public.{made.place}"
    _, inputs, outputs = read_event(seen, "START")
    assert (set(inputs), set(outputs)) == ({made.topic}, {table, seen["letters"]})
    event, inputs, outputs = read_event(seen, "COMPLETE")
    assert event["job"]["namespace"] == "shop"
    assert (set(inputs), set(outputs)) == ({made.topic}, {table, seen["letters"]})
    assert inputs[made.topic]["namespace"] == outputs[seen["letters"]]["namespace"] == seen["broker"]
    assert outputs[table]["namespace"].startswith("postgres://127.0.0.1:")
    (extra,) = seen["second"]["events"]
    read = inputs[made.topic]["inputFacets"]
    ranges = [{k: v for k, v in r.items() if k != "topic"} for r in extra["ranges"]]
    assert read["kafkaSpark_offsets"]["partitions"] == ranges
    assert read["inputStatistics"]["rowCount"] == RECORDS // 2
    assert outputs[table]["outputFacets"]["outputStatistics"]["rowCount"] == extra["records_written"] > 0
    columns = outputs[table]["facets"]["schema"]["fields"]
    assert [column["name"] for column in columns] == ["id", "customer", "amount", "placed_at"]
    dead = outputs[seen["letters"]]["outputFacets"]
    assert dead["outputStatistics"]["rowCount"] == extra["records_rejected"]
    window = event["run"]["facets"]["kafkaSpark_window"]
    assert (window["pipeline"], window["window"]) == (made.name, "0000000002")


def test_lineage_of_a_failed_window_holds_the_planned_offsets(seen):
    event, inputs, outputs = read_event(seen, "FAIL")
    (read,) = inputs.values()
    partitions = read["inputFacets"]["kafkaSpark_offsets"]["partitions"]
    assert sum(p["end"] - p["start"] for p in partitions) == 3, "one that was left, and two bad ones"
    assert all("outputStatistics" not in d["outputFacets"] for d in outputs.values())
    assert event["run"]["facets"]["kafkaSpark_window"]["window"] == "0000000003"
