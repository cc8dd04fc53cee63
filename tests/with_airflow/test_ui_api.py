"""The routes of the UI, over HTTP, of a real Airflow that watches a real ledger, for users who have logged in."""

from __future__ import annotations

import pytest

from tests.support.waiting import eventually
from tests.ui.past import AWKWARD, LEDGER
from tests.with_airflow.site import CONNECTION_SECRET

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(1200)]


def the(rows, name):
    return next((row for row in rows if row["pipeline"] == name), None)


def answered(ask):
    """Return the answer of a route that asks Kafka; one that takes longer than the route waits (503) is asked for again."""
    return eventually(lambda: (answer := ask()).status != 503 and answer)


@pytest.fixture(scope="module")
def listed(site):
    """Return the list after every ledger is read, or known to be missing, and the lag is measured."""

    def look():
        answer = site.login("viewer").get("pipelines", limit=500)
        assert answer.status == 200, answer.body
        found = the(answer.json["pipelines"], "billing/copy")
        measured = found and found["lag_records"] is not None and found["lag_seconds"]
        return answer.json if measured and all(ledger["state"] != "loading" for ledger in answer.json["ledgers"]) else None

    return eventually(look)


def test_the_list_shows_every_pipeline_with_its_state_and_lag(listed):
    found = {row["pipeline"]: row for row in listed["pipelines"]}
    assert {*AWKWARD, "billing/copy", "shop.orders", "shop.never_ran"} <= found.keys()
    copy = found["billing/copy"]
    assert (copy["ledger"], copy["dag_id"], copy["task_id"]) == (LEDGER, "billing", "copy")
    assert (copy["lag_records"], copy["status"], copy["activity"]) == (300 - 90, "OK", "idle")
    assert copy["lag_seconds"] > 0
    assert copy["lag_age"] < 300
    assert (copy["topics"], copy["group"], copy["guarantee"]) == (["ui-orders"], "ui-copy", "exactly-once")
    assert (copy["last_window"]["number"], copy["last_window"]["records_read"]) == (3, 30)
    assert (found["shop.never_ran"]["activity"], found["shop.never_ran"]["status"]) == ("new", "UNKNOWN")
    assert listed["total"] == len(listed["pipelines"])
    assert sum(listed["counts"].values()) == listed["total"]
    assert sum(listed["activities"].values()) == listed["total"]
    ledgers = {ledger["ledger"]: ledger for ledger in listed["ledgers"]}
    assert ledgers[LEDGER]["state"] == "ok"
    assert ledgers[LEDGER]["age"] < 300
    assert ledgers["kafka_default/no-such-ledger"]["state"] == "missing"


def test_without_a_login_the_api_returns_nothing(site):
    for path in ("pipelines", "pipeline", "windows", "windows.csv", "next", "dead-letters", "records"):
        answer = site.nobody.get(path, ledger=LEDGER, pipeline="billing/copy", topic="ui-orders")
        assert answer.status == 401, path
        assert answer.json["detail"]["message"]
        assert b"billing" not in answer.body
    assert site.nobody.post("actions/pause", {"ledger": LEDGER, "pipeline": "billing/copy", "why": "x"}).status == 401
    script = site.nobody.get("/kafka-spark/static/bundle.js")
    assert (script.status, script.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
    assert site.nobody.get("/kafka-spark/docs").status == 404
    assert site.nobody.get("/kafka-spark/openapi.json").status == 404


def test_the_script_is_fetched_once_and_data_is_never_kept(site, listed):
    script = site.nobody.get("/kafka-spark/static/bundle.js")
    again = site.nobody.request("GET", "/kafka-spark/static/bundle.js", **{"If-None-Match": script.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    answer = site.login("viewer").get("pipelines")
    assert answer.headers["cache-control"] == "no-store"
    for headers in (script.headers, answer.headers):
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "SAMEORIGIN"


@pytest.mark.parametrize("action", ["pause", "resume", "skip", "replay", "resend", "reset"])
def test_a_viewer_sees_and_may_not_act(site, listed, action):
    viewer = site.login("viewer")
    rows = viewer.get("pipelines", q="billing/copy").json["pipelines"]
    assert [row["may_edit"] for row in rows] == [False]
    body = {"ledger": LEDGER, "pipeline": "billing/copy", "why": "x", "to": "earliest", "window": 1, "dry_run": True}
    answer = viewer.post(f"actions/{action}", body)
    assert answer.status == 403
    assert set(answer.json["detail"]) == {"message", "found", "expected", "action"}
    assert the(site.login("editor").get("pipelines", limit=500).json["pipelines"], "billing/copy")["may_edit"] is True


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_names_are_found_by_themselves(site, listed, name):
    viewer = site.login("viewer")
    page = viewer.get("pipeline", ledger=LEDGER, pipeline=name).json
    assert page["row"]["pipeline"] == name
    assert [w["number"] for w in page["windows"]] == [2, 1]
    # Airflow has no such runs, so that their pages would not be found.
    assert [(w["dag_id"], w["run_id"], w["url"]) for w in page["windows"]] == [("odd", f"manual__{n}", None) for n in (2, 1)]
    assert viewer.get("pipelines", q=name).json["total"] >= 1
    assert "next" in viewer.get("next", ledger=LEDGER, pipeline=name).json
    answer = viewer.get("pipeline", ledger=LEDGER, pipeline=name)
    assert answer.headers["content-type"] == "application/json"


def test_filters_sorting_and_pages(site, listed):
    viewer = site.login("viewer")

    def names(**query):
        answer = viewer.get("pipelines", **query)
        assert answer.status == 200, answer.body
        return [row["pipeline"] for row in answer.json["pipelines"]]

    assert names(dag_id="billing") == ["billing/copy"]
    assert names(dag_id="shop", task_id="never_ran") == ["shop.never_ran"]
    assert names(dag_id="no-such-dag") == []
    assert names(run_id="manual__2", dag_id="billing") == ["billing/copy"]
    assert names(run_id="manual__7", dag_id="billing") == []
    assert names(q="UI-COPY") == ["billing/copy"]
    every = names(limit=500)
    assert every == sorted(every, key=str.casefold)
    assert names(limit=3) + names(limit=500, offset=3) == every
    assert names(limit=500, sort="-pipeline") == every[::-1]
    assert set(names(status="new", limit=500)) >= {"shop.never_ran"}
    by_lag = viewer.get("pipelines", sort="-lag", limit=500).json["pipelines"]
    known = [row["lag_records"] for row in by_lag if row["lag_records"] is not None]
    assert known == sorted(known, reverse=True)
    assert len(known) >= 7
    assert by_lag[-1]["lag_records"] is None
    assert viewer.get("pipelines", limit="many").status == 400


def test_a_pipeline_is_shown_whole(site, listed):
    viewer = site.login("viewer")

    def look():
        page = viewer.get("pipeline", ledger=LEDGER, pipeline="billing/copy").json
        return page if any(p["committed"] is not None for p in page["partitions"]) else None

    page = eventually(look)
    assert page["ledger"]["ledger"] == LEDGER and page["ledger"]["age"] is not None
    places = {(p["topic"], p["partition"]): p for p in page["partitions"]}
    assert [places["ui-orders", n]["position"] for n in range(3)] == [30, 30, 30]
    assert [places["ui-orders", n]["committed"] for n in range(3)] == [30, 30, 30]
    assert [places["ui-orders", n]["lag"] for n in range(3)] == [70, 70, 70]
    assert [w["number"] for w in page["windows"]] == [3, 2, 1]
    newest = page["windows"][0]
    assert newest["ranges"] == [{"topic": "ui-orders", "partition": n, "start": 20, "end": 30} for n in range(3)]
    assert (newest["state"], newest["records_read"], newest["attempts"], newest["replay"]) == ("COMPLETE", 30, 1, 0)
    assert newest["latency"] == {"min": 0.5, "p50": 1.5, "p95": 2.0, "max": 2.5}
    assert [p["number"] for p in page["series"]["windows"]] == [1, 2, 3]
    assert page["series"]["lag"][-1]["records"] == 210
    assert page["windows_total"] == 3
    older = viewer.get("windows", ledger=LEDGER, pipeline="billing/copy", before=3).json
    assert [w["number"] for w in older["windows"]] == [2, 1]
    of_run = viewer.get("windows", ledger=LEDGER, pipeline="billing/copy", run_id="manual__2").json
    assert ([w["number"] for w in of_run["windows"]], of_run["total"]) == ([2], 1)


def test_the_next_window_is_previewed(site, listed):
    found = site.login("viewer").get("next", ledger=LEDGER, pipeline="billing/copy").json["next"]
    assert (found["number"], found["begins"], found["offsets"]) == (4, "ledger", 210)
    assert len(found["ranges"]) == 3


def test_what_is_not_there_is_said_with_what_to_do(site, listed):
    viewer = site.login("viewer")
    for path in ("pipeline", "windows", "next", "dead-letters"):
        for ledger in (LEDGER, "kafka_default/other"):
            answer = viewer.get(path, ledger=ledger, pipeline="no such")
            assert answer.status == 404, path
            assert answer.json["detail"]["action"]
        assert viewer.get(path, ledger="nonsense", pipeline="x").status == 400
        assert viewer.get(path).status == 400


def test_only_records_of_the_pipelines_own_topics_are_shown(site, listed):
    viewer = site.login("viewer")
    place = {"ledger": LEDGER, "pipeline": "shop.never_ran"}
    found = viewer.get("records", **place, topic="ui-orders", partition=1, offset=0, limit=2).json
    assert (found["start"], found["end"], found["low"], found["lso"]) == (0, 2, 0, 100)
    assert [(r["offset"], r["value"]["text"]) for r in found["records"]] == [(0, '{"id": 1}'), (1, '{"id": 4}')]
    assert [record["reason"] or record["value_columns"] for record in found["records"]][0]
    last = viewer.get("records", **place, topic="ui-orders", limit=2).json
    assert [record["offset"] for record in last["records"]] == [98, 99]
    assert viewer.get("records", **place, topic="ui-orders", partition=9).status == 404
    assert viewer.get("records", **place, topic="watched-orders").status == 404
    assert viewer.get("records", **place, topic="airflow-windows").status == 404


def test_a_running_window_shows_how_far_it_is_and_a_failed_one_that_it_failed(site, listed):
    editor = site.login("editor")
    run_id = site.trigger("states")
    run = f"states/{run_id}/hold"
    site.past.move("states.held", 1, ["ui-odd"], 5, run=run, group="ui-held", leave_open=True)

    def running():
        row = the(editor.get("pipelines", dag_id="states").json["pipelines"], "states.held")
        return row if row and row["activity"] == "running" and row["running"]["fraction"] else None

    found = eventually(running)["running"]
    assert (found["number"], found["run_id"], found["task_id"], found["map_index"]) == (2, run_id, "hold", -1)
    assert (found["fraction"], found["records_total"], found["records_done"]) == (0.25, 30, 8)
    assert found["remaining_seconds"] > 20
    configuration = editor.get("pipeline", ledger=LEDGER, pipeline="states.held").json["configuration"]
    assert (configuration["operator"], configuration["of_run"]) == ("KafkaToSinkOperator", True)
    records = answered(lambda: editor.get("records", ledger=LEDGER, pipeline="states.held", topic="ui-odd"))
    assert (records.status, records.json.get("value_format")) == (200, "String"), records.body

    for action, more in (("skip", {}), ("reset", {"to": "latest"})):
        asked = {"ledger": LEDGER, "pipeline": "states.held", "why": "test", **more}
        refused = answered(lambda action=action, asked=asked: editor.post(f"actions/{action}", asked))
        assert refused.status == 409, refused.body

    (site.files / "release").touch()
    row = eventually(lambda: the(editor.get("pipelines", status="failed").json["pipelines"], "states.held"))
    assert "window 2 is open" in row["reason"]
    assert (row["failure"]["number"], row["failure"]["attempt"], row["failure"]["run"]) == (2, 1, run)
    assert row["failure"]["url"].startswith("dags/states/runs/")

    answer = editor.post("actions/replay", {"ledger": LEDGER, "pipeline": "states.held", "why": "test", "window": 1})
    assert answer.status == 200, answer.body
    assert any("was cleared" in line for line in answer.json["lines"]), answer.json
    tries = site.login("viewer").get(f"/api/v2/dags/states/dagRuns/{run_id}/taskInstances/hold")
    assert tries.json["max_tries"] >= 1

    skipped = eventually(
        lambda: (
            (a := editor.post("actions/skip", {"ledger": LEDGER, "pipeline": "states.held", "why": "test"})).status == 200 and a
        )
    )
    assert skipped.json["done"] is True
    row = eventually(
        lambda: (
            (r := the(editor.get("pipelines", dag_id="states").json["pipelines"], "states.held"))["running"] is None
            and r["activity"] != "failed"
            and r
        )
    )
    assert row["last_window"]["number"] == 1


def test_a_task_that_fails_before_it_plans_a_window_shows_its_error(site, listed):
    viewer = site.login("viewer")
    before = the(viewer.get("pipelines", dag_id="broken").json["pipelines"], "broken.load")
    assert (before["activity"], before["failure"]) == ("new", None)
    site.wait("broken", site.trigger("broken"), "failed")
    row = eventually(
        lambda: (
            (r := the(viewer.get("pipelines", dag_id="broken").json["pipelines"], "broken.load"))["activity"] == "failed" and r
        )
    )
    assert row["failure"]["error"]["class"] == "ValidationError"
    assert "ui-no-such-topic" in row["failure"]["error"]["message"]
    assert row["failure"]["url"].startswith("dags/broken/runs/")
    assert the(viewer.get("pipelines", sort="status").json["pipelines"][:5], "broken.load"), "failed pipelines come first"


def test_an_action_is_planned_first_then_done_and_remembered_with_the_user(site, listed):
    editor = site.login("editor")
    place = {"ledger": LEDGER, "pipeline": AWKWARD[0]}

    def page():
        return editor.get("pipeline", **place).json

    planned = editor.post("actions/reset", {**place, "why": "again", "to": "earliest", "dry_run": True})
    assert planned.status == 200, planned.body
    assert planned.json["done"] is False
    assert planned.json["table"]["rows"] == [[f"ui-odd-{n}", "10", "0"] for n in range(3)]
    assert page()["changes"] == []
    done = editor.post("actions/reset", {**place, "why": "again <b>", "to": {"ui-odd": {"0": 3}}, "only": ["ui-odd:0"]})
    assert (done.status, done.json["done"]) == (200, True), done.body
    (change,) = eventually(lambda: page()["changes"])
    assert (change["action"], change["who"], change["why"]) == ("reset", "editor", "again <b>")
    assert (change["before"], change["after"]) == ([["ui-odd", 0, 10]], [["ui-odd", 0, 3]])
    # The change is one record of the ledger, the position another one.
    eventually(lambda: {p["partition"]: p["position"] for p in page()["partitions"]} == {0: 3, 1: 10, 2: 10})

    assert editor.post("actions/pause", {**place, "why": "night"}).json["done"] is True
    row = eventually(lambda: (r := page()["row"])["is_paused"] and r)
    assert (row["activity"], row["pause"]["who"], row["pause"]["why"]) == ("paused", "editor", "night")
    assert editor.post("actions/resume", {**place, "why": "day"}).json["done"] is True
    eventually(lambda: page()["row"]["activity"] == "idle")


def test_what_is_no_action_is_refused_before_anything_is_asked(site, listed):
    editor = site.login("editor")
    place = {"ledger": LEDGER, "pipeline": "billing/copy", "why": "x"}
    assert editor.post("actions/destroy", place).status == 404
    assert editor.post("actions/reset", place).status == 400
    assert editor.post("actions/reset", {**place, "to": "nowhere"}).status == 400
    assert editor.post("actions/replay", place).status == 400
    assert editor.post("actions/pause", {**place, "why": "  "}).status == 400
    assert editor.post("actions/pause", {**place, "dry_run": "no"}).status == 400
    assert editor.post("actions/skip", {**place, "only": ["x"]}).status == 400
    assert editor.post("actions/pause", []).status == 400
    assert editor.post("actions/pause", {**place, "pipeline": "no such"}).status == 404
    form = editor.request(
        "POST", "/kafka-spark/api/actions/pause", b'{"why": "x"}', **{"Content-Type": "text/plain"}
    )  # what a page of another site could send
    assert form.status == 400
    assert editor.request("POST", "/kafka-spark/api/actions/pause", b"{", **{"Content-Type": "application/json"}).status == 400


def test_dead_letters_are_shown_cut_and_as_text(site, listed):
    script = b"<script>alert('x')</script>"
    site.past.bury("billing/copy", 2, "ui-dead", [(script, script), (b"\xff\x00", b"x" * 1_000_000), (None, "ä".encode() * 5000)])
    viewer = site.login("viewer")
    page = eventually(
        lambda: (p := viewer.get("pipeline", ledger=LEDGER, pipeline="billing/copy").json)["dead_letters"]["total"] == 3 and p
    )
    assert page["dead_letters"]["windows"] == [{"number": 2, "name": "2", "records": 3, "topic": "ui-dead"}]
    # Of a broker that is slow the page shows as many as came in time.
    found = eventually(
        lambda: (
            len((f := viewer.get("dead-letters", ledger=LEDGER, pipeline="billing/copy", window=2).json).get("records", ())) > 2
            and f
        )
    )
    assert found["total"] == 3
    first, second, third = found["records"]
    assert first["value"] == {"text": script.decode(), "bytes": len(script), "cut": False, "binary": False}
    assert first["headers"][0][0] == "<script>"
    assert (first["reason"], first["stage"], first["origin"]) == ("no number: <b>", "VALUE_CONVERTER", "ui-orders-0@7")
    assert second["key"] == {"text": "ff00", "bytes": 2, "cut": False, "binary": True}
    assert (len(second["value"]["text"]), second["value"]["bytes"], second["value"]["cut"]) == (4096, 1_000_000, True)
    assert (third["value"]["binary"], third["value"]["cut"], third["key"]) == (False, True, None)
    assert viewer.get("dead-letters", ledger=LEDGER, pipeline="billing/copy", window=1).json == {"records": [], "total": 0}
    one = eventually(lambda: viewer.get("dead-letters", ledger=LEDGER, pipeline="billing/copy", limit=1).json.get("records"))
    assert len(one) == 1


def test_no_answer_holds_a_secret(site, listed):
    editor = site.login("editor")
    answers = [editor.get("pipelines", limit=500)]
    for path in ("pipeline", "windows", "next", "dead-letters"):
        answers += [editor.get(path, ledger=LEDGER, pipeline=name) for name in ("billing/copy", "shop.orders", "no such")]
    answers += [editor.get("windows.csv", ledger=LEDGER, pipeline="billing/copy")]
    answers += [editor.get("records", ledger=LEDGER, pipeline="billing/copy", topic="ui-orders")]
    assert len(answers) == 15 and all(answer.status == 200 for answer in answers[-2:])
    for answer in answers:
        assert CONNECTION_SECRET.encode() not in answer.body
        assert b"sasl" not in answer.body
