"""Actions of the pages, on a real broker."""

from __future__ import annotations

import pytest

from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.ui.actions import ActionContext, parse_request, perform_action
from tests.support.waiting import eventually
from tests.ui.past import Past


@pytest.fixture
def open_window(kafka, unique):
    """A pipeline with one complete window and an open one."""
    name, topic = unique("acted"), unique("acted-topic")
    kafka.create_topic(topic, 1)
    with Past(kafka) as past:
        past.produce(topic, 30)
        past.move(name, 1, [topic], 5, run=f"dag/run_{{n}}/{name}", group=name, leave_open=True)
        yield past.hook, name


def act(hook, name, action, group=None, **more):
    request = parse_request(action, {"ledger": "kafka_default/airflow-windows", "pipeline": name, "why": "test", **more})
    return perform_action(hook, request, ActionContext("airflow-windows", "ann", group, running=False))


def test_a_reset_beside_an_open_window_names_the_action_that_helps(open_window):
    hook, name = open_window
    with pytest.raises(KafkaSparkError) as refused:
        act(hook, name, "reset", to="earliest", dry_run=True)
    assert 'the button "Skip"' in refused.value.action
    assert "discard_open" not in str(refused.value)
    skipped = act(hook, name, "skip")
    assert skipped.done and skipped.title == f"Window 2 of pipeline {name} was skipped"
    # A commit is answered before readers see it, and a preview does not wait for that.
    eventually(lambda: all(found.lso == found.high for found in hook.read_offsets(["airflow-windows"]).values()))
    planned = act(hook, name, "reset", group="of-the-dag-file", to="earliest", dry_run=True)
    assert planned.lines == (f"Its group {name} moves with it",)
    assert (planned.done, planned.clear) == (False, None)
    assert len(planned.rows) == 1 and planned.rows[0][1:] == ("10", "0")
    assert planned.to_dict("more")["lines"][-1] == "more"
