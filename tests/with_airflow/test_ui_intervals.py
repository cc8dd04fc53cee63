"""A pipeline of data intervals in the pages: a real Airflow moves them, out of order, and one of them twice."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import pytest
from confluent_kafka import Producer

from airflow_kafka_spark.ui.plugin import make_pipeline_url
from tests.support.waiting import eventually
from tests.ui.past import LEDGER

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(1800)]

DAG, TOPIC = "hours", "ui-hours"
PIPELINE = f"{DAG}.load"
LATE = 12
BEGIN = (datetime.now(timezone.utc) - timedelta(hours=6)).replace(minute=0, second=0, microsecond=0)


def hour(number):
    return BEGIN + timedelta(hours=number)


def name_of(number):
    return "-".join(f"{hour(n):%Y%m%dT%H%M%SZ}" for n in (number, number + 1))


@pytest.fixture(scope="module")
def hours(site):
    """Ten records in each of four hours, one of them late; runs of the second and then of the first hour."""
    site.kafka.create_topic(TOPIC, 2)
    producer = Producer(site.kafka.connection_extra())
    for number in range(40):
        # This record comes after a record of the second hour, with a timestamp of the first one.
        written = hour(0 if number == LATE else number // 10) + timedelta(minutes=number % 10)
        at = int(written.timestamp() * 1000)
        producer.produce(TOPIC, json.dumps({"id": number}).encode(), partition=number % 2, timestamp=at)
    assert producer.flush(60) == 0
    runs = {}
    for number in (1, 0):
        start, end = hour(number).isoformat(), hour(number + 1).isoformat()
        runs[number] = site.trigger(DAG, logical_date=start, data_interval_start=start, data_interval_end=end)
        site.wait(DAG, runs[number])
    return runs


def _page(site):
    answer = site.login("viewer").get("pipeline", ledger=LEDGER, pipeline=PIPELINE)
    return answer.json if answer.status == 200 else {"windows": []}


def test_intervals_are_the_windows_of_their_pipeline_whatever_their_order(site, hours):
    # A run may have ended before the pages have heard of it: of its window, and of its interval.
    def read_page():
        page = _page(site)
        whole = [window["state"] for window in page["windows"]] == ["COMPLETE"] * 2
        return page if whole and page["intervals"]["complete"] == 2 else None

    page = eventually(read_page)
    assert [window["name"] for window in page["windows"]] == [name_of(1), name_of(0)]
    assert page["intervals"] == {"total": 2, "complete": 2, "missing": []}
    for number, window in ((1, page["windows"][0]), (0, page["windows"][1])):
        assert [datetime.fromisoformat(at) for at in window["interval"]] == [hour(number), hour(number + 1)]
        assert (window["state"], window["records_read"], window["run_id"]) == ("COMPLETE", 10, hours[number])
    late = [(window["records_out_of_interval"], window["out_of_interval_seconds"]) for window in page["windows"]]
    assert late == [(1, 58 * 60.0), (0, None)]
    names = [row["pipeline"] for row in site.login("viewer").get("pipelines", dag_id=DAG).json["pipelines"]]
    assert names == [PIPELINE]
    # Both hours are complete, and so is the group: what is left are the two hours behind them.
    assert eventually(lambda: _page(site).get("row", {}).get("lag_records") == 20)
    refused = site.login("viewer").get("next", ledger=LEDGER, pipeline=PIPELINE).json["refused"]
    assert "data intervals" in refused


def test_an_interval_is_replayed_from_its_page(site, hours, lake, people):
    visit = people("editor")
    visit.go(make_pipeline_url(LEDGER, PIPELINE, name_of(0)))
    window = visit.see(f"[data-window='{name_of(0)}']")
    assert hours[0] in window.inner_text()
    window.get_by_role("button", name="Replay this window").click()
    visit.page.locator("[name=why]").fill("once more")
    visit.see("[data-step=plan]").click()
    assert name_of(0) in visit.see("[data-plan=dry]").inner_text()
    visit.see("[data-step=confirm]").click()
    visit.see("[data-plan=done]")
    assert visit.troubles == []
    assert eventually(lambda: [w["replay"] for w in _page(site)["windows"]] == [0, 1], 600)
    site.wait(DAG, hours[0])
    import pyarrow.dataset as ds

    found = ds.dataset(str(lake / "hours"), format="parquet", partitioning="hive").to_table(columns=["id"])["id"].to_pylist()
    assert sorted(found) == list(range(20))


@pytest.mark.extended
def test_an_interval_that_was_left_out_is_named_and_its_page_has_what_intervals_have(site, hours, people):
    start, end = hour(3).isoformat(), hour(4).isoformat()
    site.wait(DAG, site.trigger(DAG, logical_date=start, data_interval_start=start, data_interval_end=end))
    left_out = [f"{hour(number):%Y-%m-%dT%H:%M:%SZ}" for number in (2, 3)]
    assert eventually(lambda: _page(site).get("intervals", {}).get("missing")) == [left_out]
    visit = people("viewer")
    visit.go(make_pipeline_url(LEDGER, PIPELINE) + "&view=windows")
    # A day is not repeated, except at midnight.
    named = visit.see("[data-missing='1']").inner_text()
    assert f"{hour(2):%H:%M} – " in named and f"{hour(3):%H:%M}" in named and "were not moved" in named
    first = visit.page.locator("tr[data-row] td").first.inner_text()
    assert f"{hour(3):%H:%M} – " in first
    assert "ui-hours-0 [" in visit.see("tr[data-row]").inner_text()
    visit.see("tr[data-row]", has_text="1 record outside of the interval, by up to 58 min")
    assert visit.page.locator("[data-tab=next]").count() == 0
    # Latencies of hours have an axis of hours.
    visit.page.get_by_role("tab", name="Charts").click()
    assert "(hours)" in visit.see("[data-chart=Latency]").inner_text()
    visit.page.get_by_role("tab", name="Partitions").click()
    visit.see("[data-view=partitions] rect[fill*=blue]")
    assert "Position" not in visit.see("[data-view=partitions] thead").inner_text()
    visit.page.set_viewport_size({"width": 390, "height": 800})
    assert visit.fits()
    visit.page.set_viewport_size({"width": 1280, "height": 800})
    assert visit.troubles == []
