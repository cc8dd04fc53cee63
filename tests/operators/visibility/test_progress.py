"""A window's progress, also with a store that refuses values."""

from __future__ import annotations

from airflow_kafka_spark.hooks.task_state import find_task_state_store
from airflow_kafka_spark.operators.visibility.progress import ERROR_KEY, KEY, Progress, error_to_dict
from airflow_kafka_spark.windows.model import OffsetRange, SourcePlan, TargetTopic, Window

RANGES = tuple(OffsetRange("t", p, 100, 200 if p else 100) for p in range(5))


class Store:
    """Keeps the stored values in order; refuses all values while it is ``down``."""

    def __init__(self):
        self.published, self.down, self.asked = [], False, 0

    def set(self, key, value):
        self.asked += 1
        if self.down:
            raise RuntimeError("404 Task instance not found")
        assert key == KEY
        self.published.append(
            (value["step"], value["splits_done"], value["splits"], value["records_done"], value["records_total"])
        )


def window(**facts):
    return Window("p", 3, facts.pop("ranges", RANGES), "run", "2026-01-01T00:00:00Z", **facts)


def test_a_job_without_the_splits_that_are_published_already_counts_them_as_done():
    store = Store()
    progress = Progress(store)
    progress.begin(window(target=TargetTopic("u", "id", 1)))
    progress.begin_step("move")
    progress.on_progress(0, 3)
    progress.on_progress(2, 3)
    progress.on_success()
    assert store.published == [
        ("plan", 0, 4, 0, 400),
        ("move", 0, 4, 0, 400),
        ("move", 1, 4, 100, 400),
        ("move", 3, 4, 300, 400),
        ("commit", 4, 4, 400, 400),
    ]


def test_a_source_that_has_not_counted_its_rows_has_no_total():
    store = Store()
    progress = Progress(store)
    progress.begin(window(ranges=(), source=SourcePlan(({}, {}), {}, None, False, {})))
    progress.on_progress(1, 2)
    assert store.published == [("plan", 0, 2, 0, 0), ("plan", 1, 2, 0, 0)]


def test_a_store_that_fails_never_fails_the_window_and_is_left_alone_for_a_while(caplog):
    store = Store()
    store.down = True
    progress = Progress(store)
    progress.begin(window())
    progress.begin_step("move")
    for finished in range(9):
        progress.on_progress(finished, 9)
    progress.on_success()
    assert (store.asked, store.published) == (1, [])
    assert caplog.text.count("was not published, which does not affect the window: 404") == 1


def test_without_a_store_nothing_is_published():
    progress = Progress(find_task_state_store({}))
    progress.begin(window())
    progress.begin_step("close")


def test_of_an_error_class_time_and_first_lines_are_stored(caplog):
    kept = {}

    class Kept:
        def set(self, key, value):
            kept[key] = value

    Progress(Kept()).publish_error(ValueError("line 1\nline 2"))
    assert kept.keys() == {ERROR_KEY}
    assert (kept[ERROR_KEY]["class"], kept[ERROR_KEY]["message"], kept[ERROR_KEY]["cut"]) == (
        "ValueError",
        "line 1\nline 2",
        False,
    )
    long = error_to_dict(ValueError("\n".join(f"{n} {'x' * 500}" for n in range(50))), 7.0)
    assert (len(long["message"]), long["cut"], long["at"]) == (1500, True, 7.0)
    store = Store()
    store.down = True
    Progress(store).publish_error(ValueError("x"))
    assert "was not published for the pages" in caplog.text


def test_the_window_of_an_interval_goes_by_the_name_of_that():
    progress = Progress()
    progress.begin(Window("p.lane", 1, RANGES, "run", "", interval=(1767225600000, 1767229200000)))
    assert progress.to_dict()["name"] == "20260101T000000Z-20260101T010000Z"
