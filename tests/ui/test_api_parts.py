"""The parts of the API, without a server: permissions, actions, responses, the script, previews and the list."""

from __future__ import annotations

import subprocess
import sys

import pytest

from airflow_kafka_spark.errors import ChangeRefused, KafkaUnavailable, PipelineUnknown
from airflow_kafka_spark.ui.access import Access
from airflow_kafka_spark.ui.actions import parse_request
from airflow_kafka_spark.ui.app import read_bundle
from airflow_kafka_spark.ui.previews import format_bytes_preview, run_with_timeout
from airflow_kafka_spark.ui.responses import RequestRefused, find_status, redact_text
from airflow_kafka_spark.ui.views import ListQuery, list_page

EVERY = dict(readable=frozenset("ab"), editable=frozenset("a"), known=frozenset("abc"), sees_pages=True, edits_all=False)


def test_who_may_read_a_dag_sees_its_pipelines_and_who_may_edit_it_changes_them():
    access = Access(**EVERY)
    assert [access.may_see([dag]) for dag in "abc"] == [True, True, False]
    assert [access.may_edit([dag]) for dag in "abc"] == [True, False, False]
    # Of two DAGs that name one pipeline all have to be the user's to edit.
    assert (access.may_see(["a", "c"]), access.may_edit(["a", "b"])) == (True, False)


def test_a_pipeline_of_no_dag_is_seen_with_the_pages_and_changed_by_who_may_edit_all():
    access = Access(**EVERY)
    assert (access.may_see(["elsewhere"]), access.may_see([]), access.may_edit([])) == (True, True, False)
    assert Access(**{**EVERY, "edits_all": True}).may_edit(["elsewhere"]) is True
    assert Access(**{**EVERY, "edits_all": True, "sees_pages": False}).may_edit([]) is False


def test_the_plugin_loads_nothing_heavy():
    code = (
        "import sys; import airflow_kafka_spark.ui.plugin as p; heavy = {'fastapi', 'sqlalchemy', 'confluent_kafka', 'pyspark'}"
    )
    code += "; before = set(sys.modules); p.LazyApp(); print(sorted(heavy & set(sys.modules) - {'sqlalchemy'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_the_script_is_all_files_in_the_order_of_their_names_in_one_scope(tmp_path):
    (tmp_path / "20_b.js").write_text("const b = a + 1;")
    (tmp_path / "10_a.js").write_text("const a = 1;\n\n")
    first = read_bundle(tmp_path)
    assert first.body.decode().splitlines() == [
        "(() => {", "'use strict';", "// 10_a.js", "const a = 1;", "", "// 20_b.js", "const b = a + 1;", "", "})();",
    ]  # fmt: skip
    assert read_bundle(tmp_path) is first
    (tmp_path / "30_c.js").write_text("const c = 1;")
    assert read_bundle(tmp_path).etag != first.etag


def test_texts_are_cut_and_bytes_are_hex():
    assert format_bytes_preview(None) is None
    assert format_bytes_preview(b"") == {"text": "", "bytes": 0, "cut": False, "binary": False}
    # The limit falls into the middle of a character.
    found = format_bytes_preview(b"a" + "ä".encode() * 9000)
    assert (len(found["text"]), found["bytes"], found["cut"], found["binary"]) == (4096, 18001, True, False)
    found = format_bytes_preview("\N{PILE OF POO}".encode() * 5000, most=10)
    assert (found["text"], found["cut"]) == ("\N{PILE OF POO}" * 10, True)
    found = format_bytes_preview(b"\x00" * 10_000)
    assert (len(found["text"]), found["cut"], found["binary"]) == (4096, True, True)
    assert format_bytes_preview(b"ab\xff")["text"] == "6162ff"


def test_an_error_without_its_secrets():
    redacted = redact_text("sasl.password=hunter2, postgres://bob:hunter2@host/db and token: hunter2")
    assert "hunter2" not in redacted
    assert "@host/db" in redacted


def test_what_kafka_does_not_answer_is_503_and_what_is_refused_409():
    assert find_status(KafkaUnavailable("c", "doing", "why")) == 503
    assert find_status(PipelineUnknown("p", "t")) == 404
    assert find_status(ChangeRefused("x")) == 409


def test_no_request_waits_longer_than_allowed():
    from threading import Event

    forever = Event()
    with pytest.raises(RequestRefused) as refused:
        run_with_timeout(forever.wait, "This", seconds=0.1)
    forever.set()
    assert refused.value.status == 503


@pytest.mark.parametrize(
    ("action", "body", "status"),
    [
        ("pause", None, 400),
        ("pause", {"ledger": "a/b", "pipeline": "p"}, 400),
        ("pause", {"ledger": "a/b", "pipeline": "p", "why": "x" * 1001}, 400),
        ("pause", {"ledger": "a/b", "pipeline": 7, "why": "x"}, 400),
        ("reset", {"ledger": "a/b", "pipeline": "p", "why": "x", "to": 7}, 400),
        ("reset", {"ledger": "a/b", "pipeline": "p", "why": "x", "to": "latest", "only": "orders"}, 400),
        ("replay", {"ledger": "a/b", "pipeline": "p", "why": "x", "window": True}, 400),
        ("resend", {"ledger": "a/b", "pipeline": "p", "why": "x"}, 400),
        ("forget", {"ledger": "a/b", "pipeline": "p", "why": "x"}, 404),
    ],
)
def test_invalid_requests_are_refused(action, body, status):
    with pytest.raises(RequestRefused) as refused:
        parse_request(action, body)
    assert refused.value.status == status


def test_unknown_values_come_last_whichever_way_round():
    common = dict(
        dag_id=None, task_id=None, group=None, source=None, sink=None, ledger="k/l", topics=[], status="OK", activity="idle"
    )
    rows = [{**common, "pipeline": name, "lag_records": lag} for name, lag in (("a", None), ("b", 1), ("c", 5))]

    def names(**query):
        return [row["pipeline"] for row in list_page(rows, ListQuery(**query))["pipelines"]]

    assert names(sort="lag") == ["b", "c", "a"]
    assert names(sort="-lag") == ["c", "b", "a"]
    assert names(sort="nonsense") == ["a", "b", "c"]
    assert names(status="STOP") == []
    assert names(status="stop,idle", limit=2) == ["a", "b"]
    assert names(offset=-5, limit=0) == ["a"]
    assert list_page(rows, ListQuery(status="STOP"))["counts"]["OK"] == 3
