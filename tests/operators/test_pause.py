"""A paused pipeline moves nothing, running attempts are not disturbed, and after resuming the open window is finished."""

from __future__ import annotations

import pytest
from airflow.providers.common.compat.sdk import AirflowSkipException

from airflow_kafka_spark.control.pipelines import read_pipeline, show
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.sinks import PostgresSink
from tests.support.control import pause, resume
from tests.support.intervals import Intervals
from tests.support.oracle import wait_stable
from tests.support.relay import relay
from tests.support.runs import fails_at


def ask(action, pipeline, **options):
    # Brokers acknowledge a commit before all readers see it, and a look into the ledger does not wait for that.
    wait_stable(pipeline.kafka.connection_extra(), f"ledger-{pipeline.name}")
    with KafkaHook() as hook:
        return action(
            hook, pipeline.name, why="the warehouse moves", who="ann", ledger_topic=f"ledger-{pipeline.name}", **options
        )


def state_of(pipeline):
    wait_stable(pipeline.kafka.connection_extra(), f"ledger-{pipeline.name}")
    with KafkaHook() as hook:
        return show(hook, pipeline.name, ledger_topic=f"ledger-{pipeline.name}")


def test_a_window_that_is_at_work_is_finished_and_the_next_run_is_skipped_until_it_is_resumed(table):
    table.produce(200)
    at_work = table.victim("run1", fault="sink.staged:stop")
    at_work.wait_stopped()
    assert [o.number for o in ask(pause, table).open_windows] == [1]
    with pytest.raises(AirflowSkipException, match=r"paused since .* by ann: the warehouse moves.*stays as it was planned"):
        table.run("run2")
    at_work.wake()
    assert at_work.wait() == 0, at_work.tail()
    first = at_work.result()
    assert (first["attempts"], first["records_written"]) == (1, 200), "nobody has taken the window over"
    table.produce(50)
    with pytest.raises(AirflowSkipException):
        table.run("run2")
    assert table.run("run1") == first, "a complete window is reported while the pipeline is paused, too"
    ask(resume, table)
    assert table.run("run2")["records_read"] == 50
    assert table.check() == 250


def test_a_window_whose_task_failed_stays_as_it_was_planned_and_is_finished_after_resuming(table):
    table.produce(100)
    with fails_at("sink.staged"):
        table.run("run1")
    ask(pause, table)
    (before,) = state_of(table).open_windows
    table.produce(70)
    # A paused pipeline's task does not fail, even if the sink has a problem meanwhile.
    for run in ("run1", "run2"):
        with pytest.raises(AirflowSkipException):
            table.run(run, sink=PostgresSink(conn_id="warehouse", table="is_gone"))
    (after,) = state_of(table).open_windows
    assert after == before and not table.rows()
    ask(resume, table)
    report = table.run("run1")
    assert (report["records_read"], report["attempts"]) == (100, before.attempts + 1)
    assert [(r["start"], r["end"]) for r in report["ranges"]] == [(r.start, r.end) for r in before.ranges]
    assert table.run("run2")["records_read"] == 70
    assert table.check() == 170


def test_the_intervals_of_a_paused_pipeline_wait_all_of_them(files):
    intervals = Intervals(files, table=False)
    intervals.fill()
    reports = [intervals.run(0)]
    ask(pause, files)
    for number in (1, 2):
        with pytest.raises(AirflowSkipException, match="clear this task then"):
            intervals.run(number)
    assert intervals.run(0) == reports[0]
    wait_stable(files.kafka.connection_extra(), f"ledger-{files.name}")
    with KafkaHook() as hook:
        memory = read_pipeline(hook, files.name, f"ledger-{files.name}").memory
    assert len(memory.intervals) == 1 and memory.is_paused
    ask(resume, files)
    assert intervals.check([*reports, *(intervals.run(number) for number in (2, 1))]) > 10


def test_what_is_published_to_kafka_waits_as_well(kafka, unique, tmp_path):
    with relay(kafka, unique, tmp_path) as made:
        made.send(60)
        made.run("run1")
        ask(pause, made)
        made.send(40)
        with pytest.raises(AirflowSkipException):
            made.run("run2")
        ask(resume, made)
        assert made.run("run2")["records_read"] == 40
