"""Offset control end to end: a pipeline is moved, and its sink takes exactly the requested records."""

from __future__ import annotations

import json
import uuid
from collections import Counter

import pytest

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import PipelineUnknown, ValidationError, WindowConflict, WindowOpen
from airflow_kafka_spark.operators import PipelineOffsetsOperator
from airflow_kafka_spark.windows.offset_specs import ShiftBy
from tests.support.oracle import wait_stable
from tests.support.pipelines import row_of
from tests.support.relay import relay
from tests.support.runs import context


@pytest.fixture(params=["files", "table"])
def sunk(request):
    """A pipeline into files and a pipeline into a table; both append."""
    return request.getfixturevalue(request.param)


def control(pipeline, **options):
    """Run a task of PipelineOffsetsOperator in a run of its own; return its XCom value."""
    given = {"pipeline": pipeline.name, "ledger_topic": f"ledger-{pipeline.name}", **options}
    # Brokers acknowledge a commit before all readers see it, and a look into the ledger does not wait for that.
    wait_stable(pipeline.kafka.connection_extra(), given["ledger_topic"])
    found = PipelineOffsetsOperator(task_id="offsets", **given).execute(context(str(uuid.uuid4()), task_id="offsets"))
    json.dumps(found)
    return found


def values(pipeline) -> list[tuple[int, int, tuple]]:
    """Return partition, offset and row of every record of the topic."""
    return [(partition, offset, row_of(value)) for partition, offset, _, value in pipeline.events()]


def test_moved_back_records_come_twice_moved_forward_they_are_skipped_and_a_jump_without_a_reset_is_refused(sunk):
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.ledger.attempt import ChangeLedger
    from airflow_kafka_spark.windows.memory import make_position_record
    from airflow_kafka_spark.windows.plan import Position

    sunk.produce(300)
    first = sunk.run("run1")
    done = control(sunk, action="reset", shift_by="-10", why="a bad deploy", who="ann")
    assert [m["before"] - m["after"] for m in done["moves"]] == [10] * sunk.partitions
    assert sunk.committed() == {m["partition"]: m["after"] for m in done["moves"]}
    sunk.produce(30)
    second = sunk.run("run2")
    assert second["window"] == "0000000002" and second["records_read"] == 30 + 10 * sunk.partitions
    ends = {r["partition"]: r["end"] for r in first["ranges"]}
    expected = Counter(
        {row: 2 if ends[partition] - 10 <= offset < ends[partition] else 1 for partition, offset, row in values(sunk)}
    )
    assert Counter(sunk.rows()) == expected and len(expected) == 330, "what was moved back comes twice, as it was asked for"
    sunk.produce(60)
    control(sunk, action="reset", to="latest", why="nobody needs these")
    assert sunk.run("run3")["records_read"] == 0, "an empty window, of which the sink hears nothing"
    skipped = {row for *_, row in values(sunk)} - set(expected)
    sunk.produce(20)
    assert sunk.run("run4")["records_read"] == 20
    newest = {row for *_, row in values(sunk)} - set(expected) - skipped
    assert Counter(sunk.rows()) == expected + Counter(newest) and (len(skipped), len(newest)) == (60, 20)
    # The position is changed without a command, like that of a ledger restored from a backup: the sink refuses the window.
    sunk.produce(30)
    with KafkaHook() as hook, ChangeLedger(hook, sunk.name, "backup", topic=f"ledger-{sunk.name}") as ledger:
        known = ledger.memory.position
        back = Position({tp: offset - 5 for tp, offset in known.offsets.items()}, known.topic_ids, known.cluster_id)
        ledger.commit_change([make_position_record(sunk.name, back, 4)], {}, lambda topic: "", lambda memory: False)
    with pytest.raises(WindowConflict, match="was applied already"):
        sunk.run("run5")
    assert len(sunk.rows()) == 350 + 10 * sunk.partitions


def test_an_open_window_is_refused_until_its_task_has_run_again_or_it_is_given_up_which_holds_up_nothing(sunk, monkeypatch):
    def fail_once_the_sink_has_it(run: str) -> None:
        monkeypatch.setenv(faults.FAULT, "sink.committed:raise")
        with pytest.raises(Exception, match="fault injected"):
            sunk.run(run)
        monkeypatch.delenv(faults.FAULT)

    sunk.produce(60)
    fail_once_the_sink_has_it("run1")
    with pytest.raises(WindowOpen, match="run1"):
        control(sunk, action="reset", to="earliest", why="x")
    (window,) = control(sunk, action="show")["open_windows"]
    assert (window["number"], window["run"]) == (1, "dag/run1/task")
    assert control(sunk, action="plan")["begins"] == "open window"
    sunk.run("run1")
    assert sunk.check() == 60
    control(sunk, action="reset", to="earliest", why="x")
    fail_once_the_sink_has_it("run2")
    # The window is given up although the sink has taken it. The sink takes the next window nevertheless.
    done = control(sunk, action="reset", to="earliest", why="x", discard_open=True, group_id=sunk.name)
    assert [w["number"] for w in done["given_up"]] == [2]
    report = sunk.run("run3")
    assert (report["window"], report["records_read"]) == ("0000000003", 60)
    assert Counter(sunk.rows()) == Counter({row: 3 for *_, row in values(sunk)})


def test_a_topic_takes_what_it_is_asked_to_take_as_well(kafka, unique, tmp_path):
    with relay(kafka, unique, tmp_path) as orders:
        orders.send(100)
        orders.run("run1")
        moves = control(orders, action="reset", to=ShiftBy(-5), why="again")["moves"]
        assert sum(m["before"] - m["after"] for m in moves) == 15
        orders.send(10)
        assert orders.run("run2")["records_read"] == 25
        copied = Counter((r.key, r.value) for r in orders.read(orders.output))
        sent = Counter((r.key, r.value) for r in orders.read(orders.topic))
        assert set(copied) == set(sent) and sum(copied.values()) == 125


def test_show_plan_and_windows_go_to_xcom_and_a_sink_still_remembers_a_pipeline_that_was_forgotten(files):
    files.produce(60)
    files.run("run1")
    files.produce(30)
    assert sum(p["lag"] for p in control(files)["partitions"]) == 30
    with pytest.raises(PipelineUnknown, match=f"there is `{files.name}`"):
        misspelt = PipelineOffsetsOperator(task_id="offsets", pipeline=f"{files.name}s", ledger_topic=f"ledger-{files.name}")
        misspelt.execute(context("manual", task_id="offsets"))
    plan = control(files, action="plan", max_records="12")
    assert (plan["number"], plan["offsets"], plan["begins"]) == (2, 12, "ledger")
    assert plan["bytes"] > 0 and plan["age"] >= 0
    (window,) = control(files, action="windows")
    assert (window["number"], window["records_written"], window["run"]) == (1, 60, "dag/run1/task")
    (asked,) = [p for p in control(files, action="reset", to="earliest", why="x", dry_run=True)["moves"] if p["partition"] == 0]
    assert asked["after"] == 0
    assert sum(p["lag"] for p in control(files)["partitions"]) == 30, "a dry run has changed nothing"
    assert control(files, action="forget", why="a new name")["records"] == 3, "position, window and binding"
    report = files.run("run2", starting_offsets="earliest")
    assert (report["window"], report["records_read"]) == ("0000000002", 30)
    assert files.check() == 90


@pytest.mark.parametrize(
    "options, where",
    [
        ({"action": "move"}, ["action"]),
        ({"pipeline": " "}, ["pipeline"]),
        ({"action": "reset"}, ["why", "to"]),
        ({"action": "reset", "why": "x", "to": "latest", "shift_by": 3}, ["to"]),
        ({"action": "reset", "why": "x", "to": "sometimes"}, ["to"]),
        ({"action": "reset", "why": "x", "shift_by": "much"}, ["shift_by"]),
        ({"action": "forget"}, ["why"]),
        ({"action": "plan", "starting_offsets": "?", "ending_offsets": "earliest", "max_records": "x"},
         ["starting_offsets", "ending_offsets", "max_records"]),
        ({"action": "windows", "limit": 0}, ["limit"]),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_is_refused_all_at_once(options, where):
    operator = PipelineOffsetsOperator(**{"task_id": "offsets", "pipeline": "p", **options})
    with pytest.raises(ValidationError) as caught:
        operator.execute(context("run1"))
    assert [p.where for p in caught.value.problems] == where


def test_a_dag_with_it_is_serialised(tmp_path):
    """Starts and targets as the UI shows them are values, too."""
    from airflow.sdk import DAG

    from airflow_kafka_spark.windows.offset_specs import CommittedOffsets, SpecificOffsets
    from tests.support.pipelines import make

    try:
        from airflow.serialization.serialized_objects import DagSerialization as Serialized
    except ImportError:
        from airflow.serialization.serialized_objects import SerializedDAG as Serialized
    with DAG("offsets", schedule=None) as dag:
        PipelineOffsetsOperator(task_id="reset", pipeline="p", action="reset", to=SpecificOffsets({"t": {0: 1}}), why="x")
        make("files", str(tmp_path), topics="t", group_id="g", starting_offsets=CommittedOffsets("connect-orders"))
    text = json.dumps(Serialized.to_dict(dag))
    assert "connect-orders" in text and " at 0x" not in text
