"""The pages in a real browser on a real Airflow, whose real tasks move windows of a real Kafka."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from confluent_kafka import Producer

from airflow_kafka_spark.testing._processes import wait_until
from airflow_kafka_spark.ui.plugin import PAGE, KafkaSparkPlugin, make_pipeline_url
from tests.support.browser import Visit
from tests.support.pipelines import order
from tests.support.waiting import eventually
from tests.ui.past import AWKWARD, LEDGER
from tests.with_airflow.site import PATH

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(1800)]

IMAGES = os.environ.get("AIRFLOW_KAFKA_SPARK_IMAGES")
"""A directory: the pictures of the documentation are taken there."""

COPY, STUCK, TOPIC, DAG = "pages/copy <b>", "pages/stuck", "pages-orders", "pages"
ROWS = "rows/publish"
GATED = f"{DAG}.gated"


@dataclass
class Gate:
    """A pipeline whose task waits for the text of a file."""

    site: Any
    file: Path

    def say(self, word: str) -> None:
        self.file.with_suffix(".new").write_text(word)
        self.file.with_suffix(".new").replace(self.file)

    def produce(self, good: int, *bad: bytes) -> None:
        producer = Producer(self.site.kafka.connection_extra())
        for number, value in enumerate([*map(order, range(good)), *bad]):
            producer.produce(TOPIC, value, b"key-%d" % number, partition=number % 3)
        assert producer.flush(60) == 0


@pytest.fixture(scope="module", autouse=True)
def gate(site):
    """Two more pipelines with a past, and the gate of a third one."""
    site.kafka.create_topic(TOPIC, 3)
    site.kafka.create_topic("pages-past", 3)
    site.past.produce("pages-past", 300)
    site.past.move(COPY, 4, ["pages-past"], 20, run=f"{DAG}/manual__{{n}}/copy", group="pages-copy", lost=2)
    # It completes a window every hour, and takes nothing of what has been waiting for longer.
    site.kafka.create_topic("pages-stuck", 3)
    site.past.produce("pages-stuck", 30, hours_ago=6)
    site.past.move(STUCK, 5, ["pages-stuck"], 0, run="odd/manual__{n}/stuck", group="pages-stuck")
    target = "pages-published-with-a-name-that-is-too-long-for-a-narrow-column"
    site.kafka.create_topic(target)
    site.past.publish(ROWS, 6, target, run="odd/manual__{n}/rows", source="postgres://db.example.org:5432/shop/public/orders")
    return Gate(site, site.files / "gate")


def settle(gate: Gate) -> int:
    """Complete the window that a failed test, or an earlier try of this test, has left open; move one if no test has moved any.
    Return the number of the last window.
    """
    gate.say("go")
    answer = gate.site.login("viewer").get(f"/api/v2/dags/{DAG}/dagRuns", order_by="-run_after", limit=1)
    newest = next((run["dag_run_id"] for run in answer.json["dag_runs"]), None)
    if newest is None:
        gate.produce(30)
    if newest is None or gate.site.airflow.wait(DAG, newest, 900) != "success":
        gate.site.wait(DAG, newest := gate.site.trigger(DAG))
    return int(gate.site.value(DAG, newest, "gated")["window"])


WHOLE_TARGETS = """() => [...document.querySelectorAll('[data-target]')].every(e =>
    e.scrollWidth <= e.clientWidth && e.scrollHeight <= e.clientHeight + 1 && getComputedStyle(e).webkitLineClamp === 'none')"""
"""No target in the column Flow is cut."""

LONG_NAMES_BREAK = """() => [...document.querySelectorAll('.aks-clamp a')].every(e =>
    getComputedStyle(e).overflowWrap === 'anywhere')"""
"""A long name is broken, also in a link: otherwise it would take the width of the other columns."""

CHOSEN_TAB_IS_SEEN = """() => { const tab = document.querySelector('[role=tab][aria-selected=true]').getBoundingClientRect();
    return tab.left >= 0 && tab.right <= innerWidth; }"""
"""The chosen tab is not beside the page, where there are more tabs than fit."""


def picture(visit: Visit, name: str, height: int = 640) -> None:
    if IMAGES:
        Path(IMAGES).mkdir(parents=True, exist_ok=True)
        visit.page.wait_for_timeout(400)  # for what slides in
        size = visit.page.viewport_size
        visit.page.screenshot(path=f"{IMAGES}/{name}.png", clip={"x": 0, "y": 0, "width": size["width"], "height": height})


def row(visit: Visit, pipeline: str) -> Any:
    """Return a pipeline's row of the list."""
    found = visit.page.locator("tr[data-row]", has=visit.page.get_by_role("link", name=pipeline, exact=True))
    found.first.wait_for()
    return found.first


def rows(visit: Visit, count: int) -> None:
    """Wait until the list has so many rows: where there was another page before, its own stay for a moment."""
    visit.page.wait_for_function(f"() => document.querySelectorAll('tr[data-row]').length === {count}")


def activity(visit: Visit, pipeline: str, wanted: str) -> Any:
    found = row(visit, pipeline).locator(f"[data-activity={wanted}]")
    found.wait_for()
    return found


def test_every_app_of_the_plugin_has_its_component(site):
    bundle = site.nobody.get("/kafka-spark/static/bundle.js").body.decode()
    for app in KafkaSparkPlugin.react_apps:
        assert f'"{app["name"]}"' in bundle
    assert next(app["url_route"] for app in KafkaSparkPlugin.react_apps if app["destination"] == "nav") == PAGE.split("/")[1]
    assert "dangerouslySetInnerHTML" not in bundle


def test_a_user_logs_in_and_sees_every_pipeline_whatever_its_name(opened, site):
    visit = opened(site.url)
    visit.go(PAGE)
    visit.see("input[name=username]")
    visit.troubles.clear()  # without a login the answer is 401
    visit.login("editor", "editor-secret")
    visit.see("tr[data-row]")
    for name in (*AWKWARD, COPY, "shop.never_ran"):
        row(visit, name)
    # Ledgers with the same problem share one line, which can be opened.
    missing = visit.see("[data-ledger-state=missing]", has_text="ledgers do not exist yet")
    assert visit.page.locator("[data-ledger-state]").count() == 1
    missing.locator("summary").click()
    assert "kafka_default/nor-this-one. There is no topic" in missing.inner_text()
    assert visit.page.locator("tr[data-row] script, tr[data-row] b").count() == 0
    assert visit.troubles == []
    visit.close()


def test_the_list_is_searched_filtered_and_sorted_and_the_address_keeps_it(people):
    visit = people("viewer")
    visit.go(PAGE)
    visit.see("tr[data-row]")
    visit.page.get_by_role("searchbox").fill("script>alert")
    rows(visit, 1)
    row(visit, "<script>alert(1)</script>")
    visit.page.wait_for_url(re.compile("q=script"))
    visit.page.reload()
    visit.see("tr[data-row]")
    assert visit.page.locator("tr[data-row]").count() == 1
    visit.page.get_by_role("searchbox").fill("nothing-like-this")
    visit.page.get_by_role("button", name="Show all").click()
    visit.page.get_by_role("button", name="Lag").click()
    visit.see("th[aria-sort=descending]")
    visit.page.wait_for_url(re.compile("sort=-lag"))

    def falling() -> bool:
        found = visit.page.eval_on_selector_all("tr [data-lag]", "found => found.map(e => Number(e.dataset.lag))")
        return len(found) > 3 and found == sorted(found, reverse=True)

    assert wait_until(falling, 120, every=0.2)
    visit.see("[data-count=UNKNOWN]").click()
    visit.page.wait_for_function(
        "() => [...document.querySelectorAll('[data-status]')].every(e => e.dataset.status === 'UNKNOWN')"
    )
    assert visit.troubles == []


def test_a_pipeline_that_works_and_does_not_move_is_seen_to_stall(people):
    visit = people("viewer")
    visit.go(f"{PAGE}?status=STALL")
    row(visit, STUCK).locator("[data-status=STALL]").wait_for()
    assert "the consumer is active, but its offset stays at 0" in row(visit, STUCK).inner_text()
    # On a slow machine other pipelines of this file may stand still as well.
    visit.page.wait_for_function("() => [...document.querySelectorAll('[data-status]')].every(e => e.dataset.status === 'STALL')")
    assert visit.troubles == []


def test_a_window_runs_and_its_progress_moves(people, gate):
    visit = people("editor")
    gate.produce(997, b"no json", b'{"id": "<img src=x onerror=alert(1)>"}', b"\xff\xfe")
    visit.go(f"{PAGE}?sort=activity&q=pages")
    visit.see("tr[data-row]")
    gate.say("1/4")
    first = gate.site.trigger(DAG)
    activity(visit, GATED, "running")
    row(visit, GATED).locator("[data-progress='25']").wait_for()
    gate.say("3/4")
    row(visit, GATED).locator("[data-progress='75']").wait_for()
    picture(visit, "list")
    row(visit, GATED).get_by_role("link", name=GATED, exact=True).click()
    assert "750 of 1,000 records, 75 %" in visit.see("[data-running='1']").inner_text()
    assert visit.see("[role=progressbar]").get_attribute("aria-valuenow") == "75"
    gate.say("go")
    gate.site.wait(DAG, first)
    visit.gone("[data-running]")
    visit.see("dd [data-lag='0']")
    visit.page.get_by_role("tab", name="Windows").click()
    # Where it stands is one record of the ledger, its last window another one.
    visit.see("tr[data-row='1/1']", has_text="997")
    cells = visit.page.locator("tr[data-row='1/1'] td").all_inner_texts()
    assert cells[2:5] == ["1,000", "997", "3"]
    visit.page.get_by_role("link", name="success").click()
    visit.page.wait_for_url(re.compile(rf"/dags/{DAG}/runs/[^/]+/tasks/gated"))
    assert visit.troubles == []


def test_a_failed_window_is_finished_by_the_next_run_and_the_lag_falls_to_zero(people, gate):
    visit, number = people("editor"), settle(gate) + 1
    gate.produce(30)
    gate.say("fail")
    gate.site.wait(DAG, gate.site.trigger(DAG), "failed")
    visit.go(f"{PAGE}?q=pages")  # pipelines of other tests may have failed, too
    activity(visit, GATED, "failed")
    assert f"window {number} is open" in row(visit, GATED).inner_text()
    row(visit, GATED).locator("[data-failed-attempt='1']").get_by_role("link", name="log", exact=True).wait_for()
    row(visit, GATED).locator("[data-lag='30']").wait_for()
    # The task's own error, not only a link to its log.
    assert "RuntimeError: the gate stays shut" in row(visit, GATED).locator("[data-failed-attempt='1']").inner_text()
    visit.see("[data-count=failed]").click()
    rows(visit, 1)
    # Giving up a window takes a new attempt; a preview of it takes none.
    visit.go(make_pipeline_url(LEDGER, GATED))
    assert "the gate stays shut" in visit.see("[data-error=RuntimeError]").inner_text()
    picture(visit, "failed")
    visit.see("[data-action=skip]").click()
    visit.page.locator("[name=why]").fill("nobody needs it")
    visit.see("[data-step=plan]").click()
    assert "would be skipped" in visit.see("[data-plan=dry]").inner_text()
    visit.page.get_by_role("button", name="Cancel").click()
    gate.say("go")
    gate.site.wait(DAG, gate.site.trigger(DAG))
    visit.go(PAGE)
    activity(visit, GATED, "idle")
    row(visit, GATED).locator("[data-lag='0']").wait_for()
    assert visit.troubles == []


def test_charts_have_points_and_a_link_to_a_window_survives_a_reload(people):
    visit = people("viewer")
    visit.go(make_pipeline_url(LEDGER, GATED))
    for name in ("Records per window", "Latency", "Duration"):
        chart = visit.see(f"[data-chart='{name}']")
        assert int(chart.get_attribute("data-points")) >= 2
        chart.locator("svg").wait_for()
    assert visit.page.locator("[data-chart='Duration'] svg g g:last-child rect, [data-chart='Duration'] svg rect").count() > 6
    visit.page.locator("[data-chart='Records per window'] .aks-over").first.hover()
    visit.see("[data-chart='Records per window']", has_text="1,000")
    visit.see("[data-chart='Lag'] circle, [data-chart='Lag'] polyline")
    picture(visit, "pipeline", 800)
    visit.go(make_pipeline_url(LEDGER, COPY, 2))
    assert "manual__2" in visit.see("[data-window='2']").inner_text()
    assert "6 offsets deleted before they could be read" in visit.see("[data-lost]").inner_text()
    visit.page.reload()
    visit.see("[data-window='2']")
    visit.page.get_by_role("tab", name="Windows").focus()
    visit.page.keyboard.press("ArrowRight")
    visit.see("[data-view=partitions] svg rect")
    assert visit.page.locator("[data-view=partitions] tr[data-row]").count() == 3
    visit.page.get_by_role("tab", name="Next window").click()
    assert "[80, 100)" in visit.see("[data-view=next] tr[data-row]").inner_text()
    assert visit.troubles == []


def test_a_pipeline_of_rows_has_charts_of_its_own_and_no_action_that_is_refused(people):
    visit = people("editor")
    visit.go(make_pipeline_url(LEDGER, ROWS))
    for name in ("Rows per window", "Bytes per window", "Duration"):
        assert int(visit.see(f"[data-chart='{name}']").get_attribute("data-points")) == 6
    assert visit.page.locator("[data-chart]").count() == 3
    rows_legend = visit.page.locator("[data-chart='Rows per window'] .aks-legend").inner_text()
    assert "read" in rows_legend and "published" in rows_legend
    legend = visit.page.locator("[data-chart='Duration'] .aks-legend").inner_text()
    assert "session" in legend and "workers" in legend and "move" not in legend
    assert [button.get_attribute("data-action") for button in visit.page.locator("[data-action]").all()] == ["pause"]
    tabs = [tab.get_attribute("data-tab") for tab in visit.page.locator("[data-tab]").all()]
    assert tabs == ["charts", "windows", "records", "dead", "changes", "configuration"]
    assert "db.example.org/shop: public.orders" in visit.see("[data-pipeline]").inner_text()
    picture(visit, "source")
    assert visit.troubles == []


def test_dead_letters_are_shown_as_text(people):
    visit = people("viewer")

    def shown() -> str:
        visit.go(make_pipeline_url(LEDGER, GATED) + "&view=dead")
        visit.page.get_by_role("button", name="Look at them").click()
        visit.see("[data-dead-letter]")
        # Of a broker that is slow the page shows as many as came in time.
        few = visit.page.locator("[data-dead-letter]").count() < 3
        return "" if few else str(visit.page.locator("[data-view=dead]").inner_text())

    found = eventually(shown)
    assert visit.page.locator("[data-dead-letter]").count() == 3
    assert "<img src=x onerror=alert(1)>" in found
    assert "binary, as hex" in found
    assert f"Was {TOPIC}-" in found
    assert visit.page.locator("[data-dead-letter] img").count() == 0
    picture(visit, "dead-letters")
    assert visit.troubles == []


def plan(visit: Visit, action: str, why: str) -> str:
    """Open the dialog, enter a reason, and return the plan."""
    visit.see(f"[data-action={action}]").click()
    visit.see(f"[data-dialog={action}]")
    visit.page.locator("[name=why]").fill(why)
    visit.see("[data-step=plan]").click()
    return str(visit.see("[data-plan=dry], [data-failure]").inner_text())


def confirm(visit: Visit) -> None:
    visit.see("[data-step=confirm]").click()
    visit.see("[data-plan=done]")
    visit.page.get_by_role("button", name="Close").last.click()
    visit.gone("[data-dialog]")


def test_a_reset_is_shown_first_and_done_when_confirmed(people):
    visit = people("editor")
    visit.go(make_pipeline_url(LEDGER, COPY))
    visit.see("[data-action=reset]").click()
    visit.see("[data-step=plan]").click()
    assert "Say why" in visit.see(".aks-warn").inner_text()
    visit.page.locator("[name=to]").select_option("offsets")
    visit.page.locator("[name=offsets]").fill('{"pages-past": {"0": 7}}')
    visit.page.locator("[name=why]").fill("bad deploy <i>")
    visit.see("[data-step=plan]").click()
    said = visit.see("[data-plan=dry]").inner_text()
    assert "would be moved" in said
    assert re.search(r"pages-past-0\s+80\s+7", said)
    picture(visit, "reset", 800)
    confirm(visit)
    visit.page.get_by_role("tab", name=re.compile("Changes 1")).click()
    shown = visit.see("[data-view=changes] tr[data-row]").inner_text()
    assert "bad deploy <i>" in shown
    assert "pages-past-0: 7" in shown
    assert "editor" in shown
    assert visit.troubles == []


def test_a_pipeline_is_paused_and_resumed(people):
    visit = people("editor")
    visit.go(make_pipeline_url(LEDGER, COPY))
    assert "would be paused" in plan(visit, "pause", "maintenance")
    confirm(visit)
    assert "maintenance" in visit.see("[data-pause]").inner_text()
    visit.see("[data-activity=paused]")
    assert "would be resumed" in plan(visit, "resume", "done")
    confirm(visit)
    visit.gone("[data-pause]")
    assert visit.troubles == []


@pytest.mark.extended
def test_several_pipelines_are_paused_and_resumed_at_once(people, gate):
    visit, _ = people("editor"), settle(gate)
    for action, done in (("pause", "paused"), ("resume", "idle")):
        visit.go(f"{PAGE}?q=pages")
        for name in (COPY, GATED):
            row(visit, name).get_by_role("checkbox").check()
        visit.see("[data-selected='2']")
        visit.see(f"[data-bulk={action}]").click()
        visit.see(f"[data-dialog=bulk-{action}]")
        visit.page.locator("[name=why]").fill("the night")
        visit.see("[data-step=plan]").click()
        visit.page.wait_for_function("() => document.querySelectorAll('[data-dialog] tr[data-row]').length === 2")
        visit.see("[data-step=confirm]", has_text=f"{action} 2 pipelines")
        picture(visit, f"bulk-{action}")
        assert visit.page.locator("[data-plan=dry]").inner_text().count(f"would be {action}d") == 2
        visit.see("[data-step=confirm]").click()
        shown = visit.see("[data-plan=done]").inner_text()
        assert all(f"Pipeline {name} is {action}d" in shown for name in (COPY, GATED))
        visit.page.get_by_role("button", name="Close").last.click()
        visit.gone("[data-dialog]")
        visit.gone("[data-selected]")
        for name in (COPY, GATED):
            activity(visit, name, done)
    assert visit.troubles == []


def test_the_configuration_and_the_records_of_a_topic_are_shown(people, site):
    visit = people("viewer")
    visit.go(make_pipeline_url(LEDGER, GATED) + "&view=configuration")
    shown = visit.see("[data-configuration=Gated]").inner_text()
    assert "exactly-once" in shown and "kafka_default" in shown and "pages-dead" in shown and "Json(" in shown
    visit.page.get_by_role("tab", name="Records").click()
    visit.page.locator("[name=topic]").select_option(TOPIC)
    visit.page.locator("[name=offset]").fill("5")
    visit.see("[data-look=records]").click()
    visit.see(f"[data-records='{TOPIC}-0']")
    assert [
        f'"id": {number}' in visit.see(f"[data-record='{number // 3}'] [data-decoded=value]").inner_text() for number in (0, 9)
    ]
    picture(visit, "records")
    visit.page.get_by_role("button", name="Later").click()
    visit.see("[data-record='25']")
    visit.page.get_by_role("tab", name="Windows").click()
    with visit.page.expect_download() as download:
        visit.see("[data-export=csv]").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[0].startswith("window,") and len(lines) > 2 and lines[-1].startswith("1,")
    assert visit.troubles == []


def test_dead_letters_are_sent_again_once(people):
    visit = people("editor")
    visit.go(make_pipeline_url(LEDGER, GATED) + "&view=dead")
    assert "3 dead letters of window 1" in plan(visit, "resend", "the format is mended")
    picture(visit, "resend", 800)
    confirm(visit)
    visit.see("[data-view=dead]", has_text="sent again by editor")
    assert "No dead letters are left to send again" in plan(visit, "resend", "once more")
    visit.page.get_by_role("button", name="Cancel").click()
    # The pipeline is to read them. Lag counts offsets, also that of the transaction's end.
    visit.see("dd [data-lag]:not([data-lag='0'])")
    assert visit.troubles == []


def test_what_is_refused_says_what_to_do(people):
    visit = people("editor")
    visit.go(make_pipeline_url(LEDGER, COPY))
    visit.see("[data-action=replay]").click()
    visit.page.locator("[name=window]").fill("99")
    visit.page.locator("[name=why]").fill("once more")
    visit.see("[data-step=plan]").click()
    assert "99" in visit.see("[data-failure]").inner_text()
    assert visit.page.locator("[data-step=confirm]").count() == 0
    # It is refused by 409, and by no other status.
    assert [trouble.rsplit(" ", 1)[1] for trouble in visit.troubles] == ["409"]


@pytest.mark.extended
def test_a_window_is_replayed(people, gate):
    visit, _ = people("editor"), settle(gate)
    visit.go(make_pipeline_url(LEDGER, GATED, 1))
    visit.see("[data-window='1']").get_by_role("button", name="Replay this window").click()
    assert visit.page.locator("[name=window]").input_value() == "1"
    visit.page.locator("[name=why]").fill("the table was truncated")
    visit.see("[data-step=plan]").click()
    assert "would be moved once more" in visit.see("[data-plan=dry]").inner_text()
    visit.see("[data-step=confirm]").click()
    assert "was cleared" in visit.see("[data-plan=done]").inner_text()
    visit.page.get_by_role("button", name="Close").last.click()
    visit.page.locator("tr[data-row='1/1']", has_text="replay 1").filter(has_not_text="PLANNED").wait_for()
    assert visit.troubles == []


def test_a_viewer_may_look_and_sees_why_actions_are_refused(people):
    visit = people("viewer")
    visit.go(make_pipeline_url(LEDGER, COPY))
    assert "right to edit its DAG" in visit.see("[data-may-edit=false]").inner_text()
    assert visit.page.locator("[data-action]").count() == 4
    assert visit.page.get_by_role("checkbox").count() == 0
    assert visit.page.locator("[data-action]:not([disabled])").count() == 0
    assert visit.troubles == []


@pytest.mark.extended
def test_pages_fit_their_width_in_light_and_dark(opened, people, site, gate):
    settle(gate)
    visits = {"light": people("viewer"), "dark": opened(site.url, width=390, theme="dark", cookies=site.cookies("viewer"))}
    views = {PAGE: "tr[data-row]"}
    views |= {
        f"{make_pipeline_url(LEDGER, GATED)}&view={v}": f"[data-view={v}] :is(svg, tr)"
        for v in ("charts", "windows", "partitions")
    }
    for theme, visit in visits.items():
        for number, (path, shown) in enumerate(views.items()):
            visit.go(path)
            for width, height in ((390, 800), (1280, 800)):
                visit.page.set_viewport_size({"width": width, "height": height})
                visit.see(shown)
                assert wait_until(visit.fits, 60), (theme, width, path)
                assert visit.page.evaluate(WHOLE_TARGETS), (theme, width, path)
                assert visit.page.evaluate(LONG_NAMES_BREAK), (theme, width, path)
                name = {(0, 390): f"list-390-{theme}", (2, 1280): f"windows-{theme}"}.get((number, width))
                if name and name != "windows-light":
                    picture(visit, name)
        visit.page.set_viewport_size({"width": 390, "height": 800})
        visit.go(f"{make_pipeline_url(LEDGER, GATED)}&view=configuration")
        visit.see("[data-view=configuration] tr[data-row]")
        visit.page.wait_for_function(CHOSEN_TAB_IS_SEEN)
        visit.page.set_viewport_size({"width": 1280, "height": 800})
        assert visit.page.evaluate("() => document.documentElement.classList.contains('dark')") == (theme == "dark")
        assert visit.troubles == []
    visits["dark"].close()


def test_beside_a_dag_a_run_a_task_and_a_task_instance_are_its_own(people, gate):
    visit = people("viewer")
    runs = gate.site.login("viewer").get(f"/api/v2/dags/{DAG}/dagRuns", order_by="run_after").json["dag_runs"]
    run_id = runs[0]["dag_run_id"]
    routes = {app["destination"]: app["url_route"] for app in KafkaSparkPlugin.react_apps}
    visit.go(f"dags/{DAG}/plugin/{routes['dag']}")
    row(visit, GATED)
    row(visit, COPY)
    rows(visit, 2)
    picture(visit, "dag")
    visit.go(f"dags/waits/plugin/{routes['dag']}")
    visit.see("text=No pipeline here")
    visit.go(f"dags/{DAG}/runs/{run_id}/plugin/{routes['dag_run']}")
    row(visit, GATED)
    rows(visit, 1)
    # From a run's page to a task's, and from there to a task instance's, Airflow itself would ask for a task instance of no run.
    visit.go(f"dags/{DAG}/tasks/gated/plugin/{routes['task']}", load=True)
    visit.see(f"[data-pipeline='{GATED}']")
    visit.go(f"dags/{DAG}/runs/{run_id}/tasks/gated/plugin/{routes['task_instance']}", load=True)
    visit.see("tr[data-row='1/1']")
    rows(visit, 1)
    assert visit.troubles == []


def addresses(visit: Visit) -> list[str]:
    """Go from the list to a pipeline, and see where its page is and its link to the DAG leads; what of ours was asked for."""
    asked: list[str] = []
    visit.page.on("request", lambda request: asked.append(request.url))
    visit.go(PAGE, load=True)
    row(visit, COPY).get_by_role("link", name=COPY, exact=True).click()
    visit.see("[data-view=charts] svg")
    assert visit.page.url.startswith(f"{visit.url}/{PAGE}?")
    link = visit.page.get_by_role("link", name=DAG, exact=True).first.get_attribute("href")
    assert link == f"{urlsplit(visit.url).path}/dags/{DAG}"
    assert visit.troubles == []
    ours = [url for url in asked if "kafka-spark/" in url]
    assert len(ours) > 2
    return ours


def test_below_a_path_of_its_host_every_address_has_the_path_once(people, site):
    assert site.url.endswith(PATH)
    found = addresses(people("editor"))
    assert all(url.startswith(f"{site.url}/kafka-spark/") and url.count(PATH) == 1 for url in found)


def test_at_the_root_of_its_host_no_address_has_a_path(opened, site):
    """The browser puts the path in front of what is asked for, and takes it out of what the page says of its base."""
    root = site.url.removesuffix(PATH)
    visit = opened(root, cookies=[*site.cookies("editor"), *site.cookies("editor", root)])

    def through_the_path(route: Any) -> None:
        address = route.request.url.replace(root, site.url)
        if route.request.resource_type != "document":
            return route.continue_(url=address)
        page = route.fetch(url=address)
        base = f'<base href="{PATH}/"'
        assert base in page.text()
        return route.fulfill(response=page, body=page.text().replace(base, '<base href="/"'))

    visit.page.route("**", through_the_path)
    assert all(url.startswith(f"{root}/kafka-spark/") and PATH not in url for url in addresses(visit))
    visit.close()
