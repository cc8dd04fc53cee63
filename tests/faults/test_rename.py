"""A DAG author renames a pipeline with an open window that its sink has taken: no record is doubled, and none is lost."""

from __future__ import annotations

import pytest

from airflow_kafka_spark.errors import GroupOwned, PipelineRenamed, WindowOpen
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from tests.support.control import rename, skip
from tests.support.distribution import extended
from tests.support.oracle import wait_stable


def ask(flow, action, *arguments, **options):
    """Give a control command for the pipeline."""
    ledger = f"ledger-{flow.name}"
    wait_stable(flow.kafka.connection_extra(), ledger)
    with KafkaHook() as hook:
        return action(hook, *arguments, why="another name", who="ann", ledger_topic=ledger, **options)


NAMED = {"pipeline": "{name}"}, {"pipeline": "{name}-renamed"}
BY_TASK = {"pipeline": None}, {"pipeline": None, "facts": {"task_id": "renamed"}}
"""Without `pipeline=`, the name is that of DAG and task."""


@pytest.mark.faults
@pytest.mark.parametrize(
    "kind, names, moved, gives_up",
    [("files", NAMED, 30, False), ("postgres", BY_TASK, 30, True), extended("postgres", NAMED, 0, False)],
    ids=["finished, then renamed", "given up, then renamed by its task", "open from the beginning"],
)
def test_a_pipeline_that_is_renamed_with_an_open_window_is_refused_until_that_is_decided(flow, kind, names, moved, gives_up):
    before, after = ({k: v.format(name=flow.name) if k == "pipeline" and v else v for k, v in n.items()} for n in names)
    old, new = (n["pipeline"] or f"dag.{n.get('facts', {}).get('task_id', 'task')}" for n in (before, after))
    if moved:
        flow.produce(moved)
        assert flow.run("run1", **before)["records_read"] == moved
    flow.produce(30)
    victim = flow.victim("run2", fault="sink.committed", **before)
    assert victim.wait() == -9 and victim.fired, victim.tail()
    assert len(flow.rows()) == moved + 30, "the sink has taken it"
    flow.produce(30)
    for run in ("run2", "run3"):
        with pytest.raises(GroupOwned, match=f"mirrors pipeline `{old}`") as refused:
            flow.run(run, **after)
        assert (refused.value.owner, refused.value.pipeline) == (old, new)
        assert f"rename {old} --to {new} --why" in str(refused.value)
    with pytest.raises(WindowOpen):
        ask(flow, rename, old, new)
    assert len(flow.rows()) == moved + 30
    if gives_up:
        # The rows that the sink has taken stay there.
        assert [window.number for window in ask(flow, skip, old, running=False).given_up] == [2]
    else:
        assert flow.run("run2", **before)["attempts"] == 2
    ask(flow, rename, old, new)
    with pytest.raises(PipelineRenamed, match=new):
        flow.run("run3", **before)
    report = flow.run("run3", **after)
    assert (report["pipeline"], report["records_read"]) == (new, 30)
    if gives_up:
        # Its window was complete in the sink, and never in the ledger.
        flow.reports[:] = [report]
    assert flow.check() == moved + 60


@pytest.mark.faults
@pytest.mark.parametrize("kind", [extended("files"), "postgres"])
def test_a_name_that_a_pipeline_had_before_can_be_given_back_to_it(flow, kind):
    """The sink's last window under that name is older than the pipeline's last window."""
    other = f"{flow.name}-other"
    for name, to in ((flow.name, other), (other, flow.name)):
        flow.produce(20)
        assert flow.run(f"run of {name}", pipeline=name)["records_read"] == 20
        ask(flow, rename, name, to)
    flow.produce(20)
    assert flow.run("last")["records_read"] == 20
    assert flow.check() == 60
