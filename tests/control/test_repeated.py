"""A task that changes a pipeline is killed after its change: its retry does not make the change once more."""

from __future__ import annotations

import json

import pytest

from airflow_kafka_spark.errors import PipelineUnknown
from airflow_kafka_spark.operators import PipelineOffsetsOperator
from tests.support.clients import find_producer
from tests.support.control import forget, resume
from tests.support.runs import context


@pytest.fixture
def ask(moved):
    """Return a function that runs a try of a task with ``retries=1``, and returns its XCom value."""

    def run(action, number, allowed=1, **options):
        given = {"pipeline": moved.name, "why": "a test", "kafka_conn_id": moved.hook.conn_id, **moved.place, **options}
        operator = PipelineOffsetsOperator(task_id="change", action=action, retries=1, **given)
        done = operator.execute(context("run1", try_number=number, max_tries=allowed, clears=allowed - 1))
        moved.settle()
        json.dumps(done)
        return done

    return run


def test_a_retry_neither_moves_nor_skips_again_and_a_clear_does(moved, ask):
    done = ask("reset", 1, shift_by=-3, who="ann")
    again = ask("reset", 2, shift_by=-3, who="ann")
    assert (done["changed"], again["changed"], moved.stands(), moved.committed()) == (True, False, [7, 7], [7, 7])
    assert (again["moves"], again["change"]) == (done["moves"], done["change"])
    assert "An earlier try of this task has made change 1 already" in again["warnings"][0]
    assert ask("reset", 2, shift_by=-3, dry_run=True)["moves"][0]["after"] == 4, "a preview repeats no change"
    assert ask("reset", 3, allowed=3, shift_by=-3)["changed"] and moved.stands() == [4, 4]
    assert ask("skip", 1)["changed"] and moved.stands() == [20, 20]
    # Records that came after the first try wait for the next window, and so does a window that was planned since.
    producer = find_producer(moved.kafka, moved.topic)
    producer.produce(moved.topic, b"v", partition=0)
    producer.flush(60)
    moved.open_window(21, 20)
    assert not ask("skip", 2, not_running=True)["changed"]
    assert moved.stands() == [20, 20] and moved.memory.open_entry is not None


def test_a_retry_of_a_pause_a_rename_and_a_forget_ends_as_its_first_try(moved, ask, unique):
    assert ask("pause", 1)["changed"]
    resume(moved.hook, moved.name, why="it is over", **moved.place)
    moved.settle()
    assert not ask("pause", 2)["changed"] and not moved.memory.is_paused
    to = unique("renamed")
    assert ask("rename", 1, new_name=to)["changed"]
    again = ask("rename", 2, new_name=to)
    assert (again["changed"], again["renamed_to"]) == (False, to)
    assert ask("forget", 1, pipeline=to)["changed"]
    assert not ask("forget", 2, pipeline=to)["changed"]
    with pytest.raises(PipelineUnknown):
        forget(moved.hook, to, why="by hand", **moved.place)
