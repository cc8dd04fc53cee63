"""A cleared task moves its complete window again, a retried task does not. The ledger is on a real broker, and Airflow's counters
change as Airflow changes them.
"""

from __future__ import annotations

import pytest

from tests.support.dry import Dry
from tests.support.runs import Counters, fails_at


@pytest.fixture
def dry(kafka, unique, tmp_path):
    return Dry(kafka, unique, tmp_path)


@pytest.fixture
def dies():
    """Run an attempt that ends at a point of its window's life."""

    def died(attempt, point):
        with fails_at(point):
            attempt()

    return died


class Task:
    """One task of a DAG run, with Airflow's counters of it.

    :param number: the hour of its run; None moves the new records.
    """

    def __init__(self, dry: Dry, number: int | None = 0, *, retries: int = 0, **options) -> None:
        self.dry, self.number, self.options, self.airflow = dry, number, options, Counters(retries)

    def attempt(self, **options):
        given = {**self.options, **options, "retries": self.airflow.retries}
        return self.dry.attempt(self.number, facts=self.airflow.attempt(), **given)

    def replays(self, **options) -> int:
        """Run the task; return how often its window was moved again so far."""
        return self.attempt(**options)().get("replay", 0)


@pytest.mark.parametrize("number", [0, None], ids=["interval", "progress"])
def test_a_clear_replays_whatever_was_made_of_retries_since_and_a_retry_does_not(dry, number):
    dry.produce(0, 30, 70)
    task = Task(dry, number, retries=3)
    assert task.replays() == 0
    # Two retries fewer after two tries: as many are allowed as before.
    for done, retries in enumerate((2, 0, 3, 1), 1):
        task.airflow.clear(retries=retries)
        assert task.replays() == done
        assert task.replays() == done, "its worker died after the close"


def test_each_clear_replays_once_however_often_it_is_clicked_before_the_task_runs(dry):
    dry.produce(0, 30, 70)
    task = Task(dry, retries=1)
    replays = [task.replays()]
    for clicks in (1, 2, 3):
        for _ in range(clicks):
            task.airflow.clear()
        replays += [task.replays(), task.replays()]
    assert replays == [0, 1, 1, 2, 2, 3, 3]


def test_a_clear_counts_until_its_replay_is_planned_and_the_retry_of_a_replay_finishes_it(dry, dies):
    dry.produce(0, 30, 70)
    task = Task(dry, retries=3)
    assert task.replays() == 0
    for point, done in (("fenced", 1), ("planned", 2), ("close.committed", 3)):
        task.airflow.clear(retries=task.airflow.retries - 1)
        dies(task.attempt(), point)
        assert task.replays() == done


def test_a_retry_does_not_replay_because_another_task_of_its_dag_run_was_cleared(dry, dies):
    dry.produce(0, 30, 70)
    task = Task(dry, retries=2)
    dies(task.attempt(), "close.committed")
    task.airflow.clears += 1
    assert task.replays() == 0


def test_a_run_whose_window_another_run_has_finished_replays_it_when_it_is_cleared_and_not_when_it_is_retried(dry, dies):
    dry.produce(0, 30, 70)
    first = Task(dry, None, retries=1, run_id="first")
    dies(first.attempt(), "planned")
    second = Task(dry, None, retries=0, run_id="second")
    dry.produce(80)
    assert second.attempt()()["window"] == "0000000002", "it has finished the open window first"
    assert first.replays() == 0
    first.airflow.clear(retries=0)
    report = first.attempt()()
    assert (report["window"], report["replay"]) == ("0000000001", 1)
    assert second.replays() == 0
    assert dry.offsets() == {f"{dry.topic}-0": [0, 1, 2, 3]}


def test_of_two_runs_of_one_interval_each_replays_it_when_it_is_cleared(dry, dies):
    dry.produce(0, 30, 70)
    planned, finished, idle = (Task(dry, 0, retries=1, run_id=name) for name in ("planned", "finished", "idle"))
    dies(planned.attempt(), "planned")
    assert finished.replays() == 0
    assert idle.replays() == planned.replays() == finished.replays() == 0
    for done, task in enumerate((planned, finished, planned), 1):
        task.airflow.clear()
        assert task.replays() == task.replays() == done
    idle.airflow.clear()
    assert idle.replays() == 3, "it has never moved anything"


def test_an_interval_that_is_no_longer_remembered_in_detail_is_replayed_by_a_clear_and_not_by_a_retry(dry):
    dry.produce(0, 30, 70, 130, 190)
    hours = [Task(dry, number, retries=2, keep_windows=1) for number in range(3)]
    assert [task.replays() for task in hours] == [0, 0, 0]
    oldest = hours[0]
    assert oldest.replays() == 0, "a retry, though the ledger knows nothing of its attempts"
    for done in (1, 2):
        oldest.airflow.clear(retries=oldest.airflow.retries - 1)
        assert oldest.replays() == oldest.replays() == done
    assert dry.offsets() == {f"{dry.topic}-0": [0, 1, 2, 3]}
