"""Bad input gives one error with all problems at once, before Spark starts, and changes nothing."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient

from airflow_kafka_spark.errors import ValidationError
from airflow_kafka_spark.formats import Debezium, Json, String
from airflow_kafka_spark.hooks.spark.health import find_master_problem
from airflow_kafka_spark.sinks import FilesSink, PostgresSink
from airflow_kafka_spark.transforms import Cast, Sql
from airflow_kafka_spark.windows.offset_specs import CommittedOffsets
from tests.support.pipelines import SCHEMA, make
from tests.support.relay import relay
from tests.support.runs import context
from tests.support.shop import shop


def problems(flow: Any, **options: Any) -> dict[str, str]:
    """Return the problems of a run by argument. Assert that nothing was changed, and that no ledger topic was created."""
    admin = AdminClient(flow.kafka.connection_extra())

    def topics() -> set[str]:
        return set(admin.list_topics(timeout=60).topics) - {"__consumer_offsets"}

    before = topics()
    with pytest.raises(ValidationError) as caught:
        flow.run(**{"ledger_topic": f"another-{flow.name}", **options})
    assert topics() == before
    assert all(str(p) in str(caught.value) for p in caught.value.problems)
    return {p.where: p.what for p in caught.value.problems}


def test_all_problems_come_at_once(files):
    found = problems(
        files,
        topics=["no-such-topic", "bad name!"],
        topics_pattern="x",
        group_id="a\n",
        pipeline="myself",
        follows="myself",
        max_records="many",
        data_loss="maybe",
        read_timeout=-1,
        ledger_topic="no-such-topic",
        value=Json(schema="id bigintt"),
        sink=FilesSink("/proc/table"),
        spark_conf={"executor.cores": "4"},
        spark_conn_id="nowhere",
    )
    of_reading = {"topics", "group_id", "max_records", "data_loss", "read_timeout", "ledger_topic", "follows"}
    assert set(found) >= {*of_reading, "spark_conf", "spark_conn_id", "sink.path"}
    assert found["sink.path"].startswith("no directory can be created in /proc"), "also by root"
    assert any(where.startswith("value") for where in found)


def test_topics_or_a_pattern_are_given_and_match_what_is_there(files):
    for options in ({"topics": None}, {"topics_pattern": "orders.*"}):
        assert "topics" in problems(files, **options)["topics"], "exactly one of them"
    assert "no-such-topic" in problems(files, topics="no-such-topic")["topics"]
    assert f"; there is `{files.topic}`" in problems(files, topics=f"{files.topic}s")["topics"]
    assert "no topic matches" in problems(files, topics=None, topics_pattern="no-such-.*")["topics_pattern"]
    assert "not a regular expression" in problems(files, topics=None, topics_pattern="(")["topics_pattern"]


def test_a_master_at_which_nothing_answers_is_found_before_anything_is_planned(files, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_DOWN", json.dumps({"conn_type": "spark", "host": "spark://127.0.0.1", "port": 1}))
    found = problems(files, spark_conn_id="down")
    assert found.keys() == {"spark_conn_id"}
    assert "Nothing answers at 127.0.0.1:1" in found["spark_conn_id"] and "`down`" in found["spark_conn_id"]


def test_the_address_of_a_web_server_is_no_master():
    for master, host in (
        ("spark://http://head:7077", "http://head"),
        ("sc://https://head:15002", "https://head"),
        ("spark://LOCAL[2]:7077", "LOCAL[2]"),
    ):
        assert find_master_problem(master).startswith(f"`{host}` is no master of Spark")
    for master in ("k8s://", "k8s://https://", "k8s://https://:6443", "spark://", "sc://", "mesos://host:5050", "yarn://"):
        assert find_master_problem(master).startswith(f"`{master}` ")
    assert find_master_problem("k8s://https://host:6443") == find_master_problem("spark://a:7077,b:7077") == ""
    assert find_master_problem("spark://[::1]:7077") == find_master_problem("sc://head") == ""


@pytest.mark.parametrize("host", ["local(2)", "local[two]", "local[0]", "local:2", "yarn-client"])
def test_a_name_that_no_master_of_spark_has_is_found_before_a_jvm_starts(host):
    assert find_master_problem(host).startswith(f"`{host}` is no master of Spark; expected `local[*]`")


def test_settings_of_spark_that_the_connection_decides_are_refused_and_a_host_may_have_its_port(files, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_DOWN", json.dumps({"conn_type": "spark", "host": "127.0.0.1:1"}))
    found = problems(files, spark_conn_id="down", spark_conf={"spark.master": "local[4]"})
    assert found["spark_conf"] == "`spark.master` is the host of the connection `down`"
    assert "Nothing answers at 127.0.0.1:1: " in problems(files, spark_conn_id="down")["spark_conn_id"]


def test_a_master_with_parentheses_starts_no_spark(files, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_TYPO", json.dumps({"conn_type": "spark", "host": "local(2)"}))
    found = problems(files, spark_conn_id="typo")
    assert found.keys() == {"spark_conn_id"}
    assert "`local(2)` is no master of Spark" in found["spark_conn_id"]


def test_a_sink_that_cannot_take_intervals_in_any_order_is_found_beside_wrong_options_of_windows(table):
    sink = PostgresSink(conn_id="warehouse", table=table.place, mode="upsert", key=["id"])
    found = problems(table, sink=sink, window="interval", max_records=5)
    assert found.keys() >= {"max_records", "window"}
    assert "overwrite newer rows" in found["window"]


def test_a_misspelt_tolerance_hides_no_other_mistake_of_bad_records(files):
    given = {"errors_tolerance": "al", "errors_deadletterqueue_topic_name": "bad topic!", "max_errors": 5.5}
    assert set(problems(files, **given)) == set(given)


def test_a_template_that_renders_to_nothing_gives_no_pipeline_another_name(files):
    assert problems(files, pipeline=" ")["pipeline"] == "it is empty"
    assert problems(files, pipeline="")["pipeline"] == "it is empty"
    of_interval = "orders.20260101T000000Z-20260101T010000Z"
    assert problems(files, pipeline=of_interval)["pipeline"].endswith("of a data interval of pipeline `orders` in the ledger")
    given = {"topics": ["{{ x }}"], "group_id": "{{ x }}", "pipeline": "{{ x }}", "max_records": "{{ x }}", "max_errors": 2}
    made = make(**{**files.arguments, **given, "place": "/lake/{{ x }}", "topics_pattern": None})
    made.render_template_fields({"x": None})
    with pytest.raises(ValidationError) as caught:
        made.execute(context("run1"))
    found = {problem.where: problem.what for problem in caught.value.problems}
    assert set(found) == {*given, "sink.path"}
    assert found["sink.path"] == "`/lake/{{ x }}` renders to `/lake/None`: a value in it is None"


def test_unknown_connections_and_a_broker_or_a_java_that_is_not_there(files, monkeypatch, tmp_path):
    found = problems(files, kafka_conn_id="no_kafka", spark_conn_id="no_spark")
    assert "no_kafka" in found["kafka_conn_id"]
    assert "no_spark" in found["spark_conn_id"]
    monkeypatch.setenv("AIRFLOW_CONN_DOWN", json.dumps({"conn_type": "kafka", "extra": {"bootstrap.servers": "127.0.0.1:1"}}))
    assert "down" in problems(files, kafka_conn_id="down")["kafka_conn_id"]
    for ids, retryable in (({"kafka_conn_id": "down"}, True), ({"kafka_conn_id": "down", "spark_conn_id": "no_spark"}, False)):
        with pytest.raises(ValidationError) as caught:
            files.run(**ids)
        assert caught.value.retryable is retryable, "a retry helps if all that is wrong may be gone by then"
    with monkeypatch.context() as patched:
        patched.setenv("SPARK_HOME", str(tmp_path))
        assert "has no `bin/spark-submit`" in problems(files)["spark_conn_id"]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert "Java" in problems(files)["spark_conn_id"], "one clear sentence"
    monkeypatch.setattr("airflow_kafka_spark.operators.base.find_spec", lambda name: None)
    assert problems(files)["spark_conn_id"].startswith("pyspark is not installed here")


def test_a_live_member_of_the_group_is_named(files):
    consumer = Consumer({**files.kafka.connection_extra(), "group.id": files.name, "client.id": "stray-console-consumer"})
    joined = threading.Event()
    consumer.subscribe([files.topic], on_assign=lambda *_: joined.set())
    try:
        while not joined.is_set():
            consumer.poll(0.1)
        assert "stray-console-consumer" in problems(files)["group_id"]
    finally:
        consumer.close()
    files.produce(10)
    files.run()
    assert files.check() == 10


def test_a_table_that_is_missing_does_not_fit_or_deletes_without_a_key_and_a_password_that_is_wrong_and_does_not_show(
    table, monkeypatch
):
    assert "no_such_table" in str(problems(table, sink=PostgresSink(conn_id="warehouse", table="no_such_table")))
    with table.postgres.connect(autocommit=True) as session:
        session.execute(f'CREATE SCHEMA "{table.name}"')
        session.execute(f'CREATE TABLE "{table.name}"."only_there" (id bigint)')
    found = problems(table, sink=PostgresSink(conn_id="warehouse", table="only_there"))
    assert f'there is "{table.name}"."only_there"' in found["sink.table"], "a table of that name in another schema"
    found = problems(table, value=Json(schema="id string, customer string, amount decimal(12,2), other int"))
    assert "other" in str(found)
    assert "id" in str(found)
    sink = PostgresSink(conn_id="warehouse", table=table.place, mode="upsert", key=["id"], delete_enabled=True)
    assert "key" in problems(table, sink=sink), "a sink that deletes needs the key"
    server = table.postgres
    monkeypatch.setenv("AIRFLOW_CONN_WRONG", f"postgres://nobody:secret-word@{server.host}:{server.port}/{server.database}")
    found = str(problems(table, sink=PostgresSink(conn_id="wrong", table=table.place)))
    assert "wrong" in found
    assert "secret-word" not in found


def test_formats_and_sinks_that_are_none_columns_that_are_there_already_and_a_mapped_task_without_a_name(files):
    for wrong in ({"value": "json"}, {"key": 1}, {"sink": "table"}):
        assert set(wrong) <= set(problems(files, **wrong)), "something that is no format or sink"
    assert "key" in str(problems(files, key=String(encoding="no-such-encoding"))), "formats of keys are checked too"
    found = problems(files, topics=5, value=Debezium("json"), sink=FilesSink("relative", format="parquett"), max_records="all")
    assert set(found) >= {"topics", "value.value", "sink.path", "sink.format", "max_records"}
    assert found["topics"] == "it is `5` (int); expected a text or a list of texts or None"
    tolerant = {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": "bad topic!", "max_errors": 5.5}
    assert set(problems(files, **tolerant)) == {"errors_deadletterqueue_topic_name", "max_errors"}
    found = problems(files, value=Json(schema=SCHEMA + ", offset bigint"), metadata_columns=["offset", "nonsense"])
    assert "metadata_columns" in found
    ctx = context("run1")
    ctx["ti"].map_index = 3
    with pytest.raises(ValidationError, match="mapped"):  # it needs a pipeline's name of its own
        make(**{**files.arguments, "pipeline": None}).execute(ctx)


# --- independent checks ---


def complaints(flow: Any, **options: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return the problems of a run (by argument), and the checks that were not made (with their causes), as in the error."""
    with pytest.raises(ValidationError) as caught:
        flow.run(**options)
    error = caught.value
    assert all(str(p) in str(error) for p in (*error.problems, *error.unchecked))
    return {p.where: p.what for p in error.problems}, {p.where: p.what for p in error.unchecked}


OF_READING = {
    "topics": "no-such-topic",
    "group_id": " ",
    "max_records": "many",
    "data_loss": "maybe",
    "errors_tolerance": "some",
    "starting_offsets": "sometime",
}
UNKNOWN_FIELD = [Sql({"x": "no_such_field"})]


def test_eight_mistakes_on_the_way_to_a_table_are_named_at_once_with_the_checks_that_they_prevent(table):
    sink = PostgresSink(conn_id="warehouse", table="no_such_table", mode="upsert", key=["nothing"])
    found, unchecked = complaints(table, **OF_READING, sink=sink, transforms=UNKNOWN_FIELD)
    assert set(found) == {*OF_READING, "sink.table", "transforms[0] Sql"}
    assert unchecked == {"sink columns": "transforms[0] Sql", "sink.key": "sink.table"}
    # Rows are known without transforms, so the key is compared with them, and the table's index waits for the table.
    found, unchecked = complaints(table, **OF_READING, sink=sink)
    assert "no column `nothing`" in found.pop("sink.key")
    assert set(found) == {*OF_READING, "sink.table"}
    assert unchecked == {"sink.table columns": "sink.table", "sink.key": "sink.table"}
    # Nor does a format that is wrong hide a wrong table or a wrong transform.
    wrong = {"value": Json(schema="id bigintt"), "metadata_columns": ["offset"], "transforms": [Cast("a:faketype")]}
    found, unchecked = complaints(table, sink=sink, **wrong)
    assert [where.partition(" ")[0].partition(".")[0] for where in found] == ["value", "transforms[0]", "sink"]
    assert set(unchecked) == {"metadata_columns", "transforms", "sink columns", "sink.key"}


def test_offsets_that_do_not_fit_the_topics_are_named_beside_other_mistakes_unless_no_window_needs_them(files):
    of_all = {str(partition): 0 for partition in range(files.partitions)}
    start, end = {files.topic: {**of_all, "7": 5}}, {files.topic: {"0": 5}}
    bounds = {"starting_offsets": start, "ending_offsets": end}
    wrong = {"max_records": "many", "data_loss": "maybe", "value": Json(schema="id bigintt")}
    found, unchecked = complaints(files, **bounds, **wrong)
    assert set(found) == {*bounds, "max_records", "data_loss", "value.schema"}
    assert unchecked == {"sink columns": "value.schema"}
    assert f"{files.topic}-7, which is not read (expected partitions of the subscribed topics)" in found["starting_offsets"]
    assert f"No offset is given to stop at for {files.topic}-1" in found["ending_offsets"]
    found, _ = complaints(files, starting_offsets={files.topic: {**of_all, "1": 5}}, ending_offsets={"other": of_all})
    assert f"{files.topic}-1 at 5, not in [0, 0]" in found["starting_offsets"]
    assert f"for {files.topic}-0" in found["ending_offsets"]
    found, _ = complaints(files, starting_offsets=CommittedOffsets("nobody", "none"), follows=" ", on_mismatch="never")
    assert "Group `nobody` has no committed offset" in found["starting_offsets"] and "on_mismatch" in found
    # A sink may know the pipeline, and then nothing begins at `starting_offsets`.
    found, unchecked = complaints(files, **bounds, sink=FilesSink("relative"))
    assert set(found) == {"ending_offsets", "sink.path"} and unchecked == {"starting_offsets": "sink"}
    found, unchecked = complaints(files, topics="no-such-topic", **bounds)
    assert set(found) == {"topics"} and unchecked == dict.fromkeys(bounds, "topics")
    found, unchecked = complaints(files, kafka_conn_id="nowhere", **bounds)
    assert set(found) == {"kafka_conn_id"} and unchecked == dict.fromkeys(["topics", "group_id", *bounds], "kafka_conn_id")
    # A pipeline that has a position begins there.
    files.produce(9)
    files.run()
    files.run("run2", starting_offsets=start)
    assert files.check() == 9
    found, _ = complaints(files, facts={}, **bounds, run_id="run3")
    assert set(found) == {"ending_offsets"}
    # A complete window is reported, regardless of the present arguments.
    files.run("run2", **bounds)


def test_eight_mistakes_between_two_topics_are_named_at_once_with_the_checks_that_they_prevent(kafka, unique, tmp_path):
    with relay(kafka, unique, tmp_path) as flow:
        orders = {"value": Json(schema=SCHEMA), "transforms": UNKNOWN_FIELD, "topic": "nowhere", "transaction_timeout": 0}
        found, unchecked = complaints(flow, **OF_READING, **orders)
        assert set(found) == {*OF_READING, "sink.topic", "sink.transaction_timeout", "transforms[0] Sql"}
        assert set(unchecked) == {"transforms"}
        found, unchecked = complaints(flow, **{**orders, "value": Json(schema="id bigintt")})
        assert {"sink.topic", "sink.transaction_timeout"} < set(found)
        assert unchecked["transforms"].startswith("value")
        sql = {"filter": "amuont > 1", "columns": {"a": "id +", "b": "row_number() over (order by id)"}}
        found, unchecked = complaints(flow, **OF_READING, value=Json(schema=SCHEMA), **sql)
        assert set(found) == {*OF_READING, "columns.b"} and unchecked == {"filter and columns": "columns.b"}
        del sql["columns"]["b"]
        found, unchecked = complaints(flow, **OF_READING, value=Json(schema=SCHEMA), **sql, output_key="nothing")
        assert set(found) == {*OF_READING, "filter", "columns.a", "sink.key"} and not unchecked
        assert "amuont" in found["filter"]
        found, _ = complaints(flow, topic=flow.arguments["ledger_topic"])
        assert found["sink.topic"].endswith("is the ledger of pipelines (`ledger_topic`)")
        found, _ = complaints(flow, topic=unique("new"), auto_create=True, partitions=1, preserve_partitions=True)
        assert "has 1 partitions, and topics with 3 are read" in found["preserve_partitions"]
        found, _ = complaints(flow, topics="orders-*", group_id=" ")
        assert "topics_pattern" not in found and set(found) == {"topics", "group_id"}, "no broker is asked for such a name"
        # A template may render to nothing.
        for options in ({}, {"preserve_partitions": True}):
            assert set(complaints(flow, topic="", **options)[0]) == {"sink.topic"}


def test_eight_mistakes_on_the_way_from_a_table_are_named_at_once_with_the_checks_that_they_prevent(
    kafka, postgres, unique, tmp_path
):
    with shop(kafka, postgres, unique, tmp_path) as flow:
        wrong = {
            "topic": "nowhere",
            "transaction_timeout": 0,
            "errors_tolerance": "some",
            "read_with": "nobody",
            "pipeline": "\n",
        }
        places = {"sink.topic", "sink.transaction_timeout", "errors_tolerance", "read_with", "pipeline"}
        more = {"producer_config": {"acks": "1"}, "keep_windows": 0}
        found, unchecked = complaints(flow, **wrong, **more, transforms=UNKNOWN_FIELD)
        assert set(found) == {*places, "sink.producer_config", "keep_windows", "transforms[0] Sql"}
        assert set(unchecked) == {"transforms"}
        # Transforms get records, which need the columns that the sink makes them of.
        found, unchecked = complaints(flow, **wrong, timestamp="nothing", partition="nobody", transforms=UNKNOWN_FIELD)
        assert set(found) == {*places, "sink.timestamp", "sink.partition"}
        assert unchecked == {"transforms": "sink.partition"}
        # A wrong key of the source hides neither its other columns nor those that the sink uses.
        source = {"cursor": None, "key": "nothing", "include_columns": ["id", "amount", "customer"]}
        found, unchecked = complaints(flow, **wrong, key="missing", source=source, transforms=UNKNOWN_FIELD)
        assert set(found) == {*places, "source.key", "sink.key"}
        assert unchecked == {"transforms": "source.key"}
        found, unchecked = complaints(flow, source={**source, "query": "SELECT 1"}, key="missing")
        assert set(found) == {"source"} and unchecked["sink columns"] == "source"
        found, _ = complaints(flow, topic=flow.arguments["ledger_topic"])
        assert found["sink.topic"].endswith("is the ledger of pipelines (`ledger_topic`)")
        found, unchecked = complaints(flow, **{**wrong, "topic": "no where"}, table="no_such_table", source=source)
        assert set(found) == {*places, "source.table"} and "cannot be a topic's name" in found["sink.topic"]
        assert unchecked == {
            "source.include_columns": "source.table",
            "source.key": "source.table",
            "sink columns": "source.table",
        }
