"""Windows of one topic become records of another: copied, filtered, computed, with new keys."""

from __future__ import annotations

import json
import logging

import pytest
from confluent_kafka import Producer

from airflow_kafka_spark.errors import BadRecords, PartitionsChanged, SparkJobFailed, SqlFailed, TopicRecreated, ValidationError
from airflow_kafka_spark.formats import Json, Raw, String
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.ledger.attempt import Ledger
from airflow_kafka_spark.operators import KafkaToKafkaOperator
from airflow_kafka_spark.transforms import Sql
from airflow_kafka_spark.windows.model import Marker
from tests.support.control import reset
from tests.support.distribution import extended
from tests.support.pipelines import SCHEMA
from tests.support.relay import decoded, make, relay
from tests.support.runs import fails_at
from tests.support.timings import check_move
from tests.support.waiting import settled

ORDERS = Json(schema=SCHEMA)


@pytest.fixture
def orders(kafka, unique, tmp_path, partitions):
    with relay(kafka, unique, tmp_path, partitions=partitions) as made:
        yield made


def test_a_copy_keeps_key_value_timestamp_and_headers_window_after_window(orders):
    orders.send(1000)
    first = orders.run("run1")
    assert (first["records_read"], first["records_written"]) == (1000, 1000)
    assert sum(part["records"] for part in first["published"]) == 1000
    check_move(first, "read", "decode", "write")
    assert orders.check() == 1000
    assert orders.run("run1") == first, "a cleared task publishes nothing and returns the same report"
    orders.send(10)
    second = orders.run("run2")
    assert (second["window"], second["records_written"]) == ("0000000002", 10)
    assert orders.run("run3")["records_written"] == 0
    assert orders.check() == 1010


def test_preserve_partitions_keeps_every_record_in_its_partition(orders):
    orders.send(300)
    orders.run(preserve_partitions=True, preserve_timestamps=False, preserve_headers=False)
    places = {(r.partition, r.key, r.value) for r in orders.read(orders.output)}
    assert places == {(r.partition, r.key, r.value) for r in orders.read(orders.topic)} and len(places) == 300


def test_a_filter_lets_bytes_alone_and_counts_what_it_leaves_out(orders):
    orders.send(1000)
    report = orders.run(value=ORDERS, filter="amount >= 500 and customer <> 'customer-3'")
    kept = lambda r: float((e := decoded(r))["amount"]) >= 500 and e["customer"] != "customer-3"  # noqa: E731
    count = orders.check(lambda r: r.content if kept(r) else None)
    check_move(report, "read", "write", "wait")
    assert 0 < count < 1000
    assert (report["records_read"], report["records_written"]) == (1000, count)


def test_columns_make_new_values_and_output_key_new_keys_which_land_where_another_producer_puts_them(orders, unique):
    orders.send(500)
    orders.run(
        value=ORDERS,
        columns={"id": "id", "cents": "cast(amount * 100 as bigint)", "place": "concat(part, '@', `at`)"},
        metadata_columns={"partition": "part", "offset": "at"},
        output_key="id",
        preserve_headers=False,
    )

    def becomes(record):
        event = decoded(record)
        new = {"id": event["id"], "cents": round(float(event["amount"]) * 100), "place": f"{record.partition}@{record.offset}"}
        return str(event["id"]).encode(), json.dumps(new, separators=(",", ":")).encode(), record.timestamp

    assert orders.check(becomes, lambda r: (r.key, r.value, r.timestamp)) == 500
    again = unique("again")
    orders.kafka.create_topic(again, 4)
    placed = {r.key: r.partition for r in orders.read(orders.output)}
    producer = Producer({**orders.kafka.connection_extra(), "partitioner": "murmur2_random"})
    for key in placed:
        producer.produce(again, b"", key)
    producer.flush(60)
    assert {r.key: r.partition for r in orders.read(again)} == placed and len(placed) == 500


EVERY_KIND = {
    "id": "id", "cents": "amount * 100", "fine": "cast(amount as decimal(20,10))", "text": "concat(customer, '\\n\\t\\\\ü\x01')",
    "at": "placed_at", "local": "cast(null as timestamp_ntz)", "day": "cast(placed_at as date)", "large": "amount > 500",
    "bytes": "cast(customer as binary)", "nothing": "if(id % 2 = 0, customer, null)", "a b": "upper(customer)",
    "third": "cast(amount as double) / 3", "nested": "struct(id, amount as `the amount`, struct(customer))",
}  # fmt: skip


@pytest.mark.parametrize("value", [Json(), extended(Json(schema=SCHEMA))], ids=["columns", "transforms"])
def test_what_tasks_write_in_arrow_is_byte_for_byte_what_spark_writes(orders, unique, caplog, value):
    orders.send(300)
    contents = []
    for only_spark in ("", " AND rand() >= 0"):
        output = orders.output if only_spark else unique("arrow")
        if not only_spark:
            orders.kafka.create_topic(output, 4)
        condition = f"id % 3 != 0{only_spark}"
        options = {"topic": output, "group_id": output, "pipeline": output, "value": ORDERS}
        if value.schema:
            orders.run(**options, transforms=[Sql(EVERY_KIND, filter=condition)])
        else:
            options |= {"output_key": ("id", "day"), "output_key_format": Json()}
            orders.run(**options, filter=condition, columns=EVERY_KIND)
        assert ("Spark's SQL transforms its records" in caplog.text) == bool(only_spark)
        contents.append(sorted(r.content for r in orders.read(output)))
    assert contents[0] == contents[1] and len(contents[0]) == 200


def test_sql_that_fails_for_a_record_names_it_and_nothing_of_its_split_is_published(orders):
    orders.send(90)
    wrong = {r.partition: f"{orders.topic}-{r.partition}@{r.offset}" for r in orders.read(orders.topic) if decoded(r)["id"] == 70}
    ((partition, record),) = wrong.items()
    with pytest.raises(SqlFailed, match="DIVIDE_BY_ZERO") as failed:
        orders.run(value=ORDERS, columns={"x": "100 div (id - 70)"})
    assert failed.value.record == record
    of_split = {r.content for r in orders.read(orders.topic) if r.partition == partition}
    assert not of_split.intersection(r.content for r in orders.read(orders.output))
    assert orders.run(value=ORDERS, filter="id != 70", columns={"x": "100 div (id - 70)"})["records_read"] == 90
    assert len(orders.read(orders.output)) == 89


def test_sql_that_spark_computes_and_that_fails_for_a_record_names_the_expression_and_says_that_a_retry_fails_again(orders):
    orders.send(9)
    with pytest.raises(SparkJobFailed, match="DIVIDE_BY_ZERO.*in the SQL `amount / \\(id - 7\\)`") as failed:
        orders.run(value=ORDERS, columns={"x": "amount / (id - 7)"})
    assert not failed.value.retryable
    assert failed.value.action == "Splits that are committed stay. Correct the cause first: a retry alone fails again"
    assert not isinstance(failed.value.__cause__, SparkJobFailed), "the log would show both errors"


def test_records_without_a_value_stay_so_and_pass_a_filter(orders):
    orders.records_in([(b"a", b'{"id": 1}', None), (b"b", None, None), (b"c", b'{"id": 2}', None)])
    report = orders.run(value=Json(schema="id bigint"), key=String("k"), filter="id = 1", columns={"n": "id + 1"})
    assert {(r.key, r.value) for r in orders.read(orders.output)} == {(b"a", b'{"n":2}'), (b"b", None)}
    assert (report["records_read"], report["records_written"]) == (3, 2)
    orders.records_in([(b"d", None, None)])
    assert orders.run("run2", behavior_on_null_values="ignore")["records_ignored"] == 1
    assert len(orders.read(orders.output)) == 2


def test_bad_records_are_named_and_their_partition_is_not_published(orders):
    orders.records_in([(b"a", b'{"id": 1}', None), (b"b", b"no json", None), (b"c", b'{"id": "x"}', None)])
    options = {"value": Json(schema="id bigint"), "filter": "id > 0"}
    with pytest.raises(BadRecords, match="2 bad records|2 records"):
        orders.run(**options)
    assert all(r.value == b'{"id": 1}' for r in orders.read(orders.output))
    # The window stays open. With other options it succeeds, and published records are not changed.
    assert orders.run()["records_read"] == 3
    assert orders.check() == 3


def test_all_problems_come_at_once_those_of_sql_too_and_nothing_is_touched(orders):
    orders.send(10)
    with pytest.raises(ValidationError) as found:
        orders.run(
            topic=orders.topic, columns={}, output_key="nothing", behavior_on_null_values="delete", metadata_columns=["offest"]
        )
    text = str(found.value)
    for part in ("would be read again", "offest", "delete"):
        assert part in text
    with pytest.raises(ValidationError) as found:
        orders.run(columns={}, output_key="nothing", partition="x", transaction_timeout=1_000_000)
    for part in ("they are empty", "no column `nothing`", "sink.partition", "transaction.max.timeout.ms"):
        assert part in str(found.value)
    with pytest.raises(ValidationError, match="does not exist"):
        orders.run(topic="nowhere")
    with pytest.raises(ValidationError, match="would be read again"):
        orders.run(topics=None, topics_pattern=f"{orders.topic}.*", topic=f"{orders.topic}-x", auto_create=True)
    with pytest.raises(ValidationError) as found:
        orders.run(value=ORDERS, filter="amuont > 1", columns={"x": "id +", "y": "id", "z": "nothing"})
    assert [problem.where for problem in found.value.problems] == ["filter", "columns.x", "columns.z"]
    assert orders.read(orders.output) == []
    report = orders.run(value=ORDERS)
    assert (report["window"], report["records_written"]) == ("0000000001", 10)


OF_SQL: dict[str, tuple[dict[str, object], str]] = {
    "an empty filter": ({"filter": " "}, "expected a condition"),
    "a filter that is no condition": ({"filter": "amount"}, "amount"),
    "an aggregate": ({"filter": "count(1) > 1"}, "count(1) > 1"),
    "a window function": ({"columns": {"x": "row_number() OVER (ORDER BY id)"}}, "window function"),
    "rows of an array": ({"columns": {"x": "explode(array(1, 2))"}}, '"explode(array(1, 2))"'),
    "a column without a type": ({"columns": {"x": "NULL"}}, "no type"),
    "two names that differ in case": ({"columns": {"x": "id", "X": "id"}}, "ignores case"),
    "a number as raw bytes": ({"columns": {"x": "id"}, "output_value": Raw()}, "cannot be written"),
    "another format that does not fit": ({"value": Json(schema="id bigint"), "output_value": Raw()}, "cannot be written"),
}


def test_sql_that_spark_refuses_is_named_before_a_window_is_planned(orders, unique):
    orders.send(10)
    target = unique("target")
    for options, expected in OF_SQL.values():
        with pytest.raises(ValidationError) as found:
            orders.run(**{"value": ORDERS, "topic": target, "auto_create": True, **options})
        assert expected in str(found.value) and "__kafka" not in str(found.value), options
    with KafkaHook() as kafka:
        ledger = Ledger(kafka, orders.name, "another", group_id=orders.name, topic=orders.arguments["ledger_topic"])
        ledger.peek()
        assert ledger.memory.open_entry is None
        assert target not in kafka.list_topics()
    # Spark's own log of such errors is a Java stack trace.
    assert not logging.getLogger("SQLQueryContextLogger").isEnabledFor(logging.ERROR)


def test_records_without_a_key_are_not_copied_to_a_compacted_topic_which_is_named_before_a_window_is_planned(orders, unique):
    orders.kafka.create_topic(compacted := unique("compacted"), 2, config={"cleanup.policy": "compact"})
    orders.records_in([(b"k", b"{}", None), (None, b"{}", None)])
    message = rf"sink.key: topic `{compacted}` is compacted .* without a key, as {orders.topic}-\d@\d is"
    with pytest.raises(ValidationError, match=message):
        orders.run(topic=compacted)
    report = orders.run(topic=compacted, value=Json(schema="id bigint"), filter="id > 1")
    assert (report["window"], report["attempts"], report["records_filtered"]) == ("0000000001", 1, 2), "no other was planned"


def test_a_text_with_the_word_over_is_no_window_function(orders):
    orders.send(10)
    report = orders.run(value=ORDERS, columns={"id": "id", "over": "'paid over (cash)'"}, filter='customer <> "over ("')
    assert report["records_written"] == 10


def test_a_target_with_more_partitions_than_planned_is_refused(orders):
    orders.send(300)
    with fails_at("planned"):
        orders.run("run1")
    orders.kafka.create_partitions(orders.output, 6)
    with pytest.raises(PartitionsChanged):
        orders.run("run1")
    assert orders.read(orders.output) == []
    orders.run("run1", allow_new_partitions=True)
    assert orders.check() == 300


def test_splits_that_are_published_after_the_ledger_was_read_are_no_lost_ledger(orders, monkeypatch):
    orders.send(300)
    with fails_at("job.done"):
        orders.run("run1")
    now, looks = Ledger.read_published, []

    def published(ledger: Ledger) -> dict[int, Marker]:
        looks.append(now(ledger))
        return looks[-1] if len(looks) > 1 else {}

    monkeypatch.setattr(Ledger, "read_published", published)
    assert orders.run("run1")["records_written"] == 300
    assert orders.check() == 300 and len(looks) > 1


@pytest.mark.parametrize("partitions", [3])
def test_the_third_attempt_at_a_first_window_sees_the_splits_of_the_first_one(orders, monkeypatch):
    """The second attempt commits its splits with a hint at the ledger, from which the third one reads."""
    orders.send(300)
    with monkeypatch.context() as some:
        some.setattr(KafkaToKafkaOperator, "_find_unpublished", lambda self, window, ledger, left: (1, 2))
        with pytest.raises(SparkJobFailed, match="split 0"):
            orders.run("run1")
    with fails_at("job.done"):
        orders.run("run1")
    assert orders.run("run1")["records_written"] == 300
    assert orders.check() == 300


def test_max_records_bounds_a_window_windows_tile_and_the_order_of_each_key_is_kept(orders):
    orders.send(1000)
    counts = [orders.run(f"run{n}", max_records=700)["records_read"] for n in range(3)]
    assert counts == [700, 300, 0]
    assert orders.check() == 1000
    of_key: dict = {}
    for record in orders.read(orders.output):
        of_key.setdefault(record.key, []).append(decoded(record)["id"])
    assert len(of_key) == 97 and all(ids == sorted(ids) for ids in of_key.values())


def test_a_sink_window_may_follow_it(orders, tmp_path):
    from airflow_kafka_spark.operators import KafkaToSinkOperator
    from airflow_kafka_spark.sinks import FilesSink
    from tests.support.runs import run

    orders.send(400)
    report = orders.run(value=ORDERS, filter="id < 100")
    follower = run(
        lambda **o: KafkaToSinkOperator(task_id="load", **o),
        {
            "topics": orders.output, "group_id": f"{orders.name}-load", "pipeline": f"{orders.name}-load", "value": ORDERS,
            "sink": FilesSink(path=str(tmp_path / "out")), "follows": orders.name,
            "ledger_topic": orders.arguments["ledger_topic"],
        },
        "run1",
    )  # fmt: skip
    assert follower["follows"]["records"] == follower["records_written"] == report["records_written"] == 100


def test_what_was_published_of_a_topic_that_is_gone_counts(orders):
    orders.send(300)
    with fails_at("job.done"):
        orders.run("run1")
    orders.kafka.delete_topic(orders.topic)
    orders.kafka.create_topic(orders.topic, orders.partitions)
    with pytest.raises(TopicRecreated, match=r"(\d) of \1 partitions of window .* are published already: they stay"):
        orders.run("run1")
    report = orders.run("run1", data_loss="skip")
    assert (report["records_read"], report["records_written"]) == (300, 300)
    assert sum(part["records"] for part in report["published"]) == 300, "a pipeline that follows reads them"
    assert report["gaps"] == []
    orders.send(30)
    with fails_at("planned"):
        orders.run("run2", data_loss="skip")
    orders.kafka.delete_topic(orders.topic)
    orders.kafka.create_topic(orders.topic, orders.partitions)
    report = orders.run("run2", data_loss="skip")
    assert report["records_read"] == 0
    assert sum(gap["end"] - gap["start"] for gap in report["gaps"]) == 30


def test_the_partitions_of_a_window_that_were_not_published_begin_the_next_window_once_it_is_given_up(orders):
    """`TransactionTimedOut` gives this advice, because an open window keeps its splits."""
    numbers = {"value": ORDERS, "columns": {"id": "id"}}
    orders.send(30)
    orders.run("run1", **numbers)
    orders.send(60)
    orders.records_in([(b"customer-1", b"no json", None)])
    with pytest.raises(BadRecords):
        orders.run("run2", **numbers)
    settled(orders.output, ledger := orders.arguments["ledger_topic"])
    assert 30 < len(orders.read(orders.output)) < 90
    place = {"ledger_topic": ledger, "discard_open": True, "why": "its splits are too large"}
    with KafkaHook() as hook:
        reset(hook, orders.name, f"committed:{orders.name}", **place)
    report = orders.run("run3", **numbers, max_records=1000, errors_tolerance="all", errors_skip=True)
    assert (report["window"], report["records_rejected"]) == ("0000000003", 1)
    settled(orders.output)
    assert sorted(decoded(record)["id"] for record in orders.read(orders.output)) == [*range(90)]


def test_a_ledger_that_is_lost_continues_where_the_group_stands(orders, unique):
    orders.send(200)
    orders.run("run1")
    orders.send(50)
    report = orders.run("run2", ledger_topic=unique("other-ledger"))
    assert report["records_read"] == 50
    assert orders.check() == 250


def test_topic_and_topics_are_the_assets_of_the_task(orders):
    operator = make(**orders.arguments)
    assert [a.uri for a in operator.inlets] == [f"kafka://kafka_default/{orders.topic}"]
    assert [a.uri for a in operator.outlets] == [f"kafka://kafka_default/{orders.output}"]
