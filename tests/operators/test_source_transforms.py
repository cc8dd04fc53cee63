"""From a table, through transforms, to a topic: each row's result is there once, and all other rows are accounted for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import pytest

from airflow_kafka_spark.errors import RowRejected, RowsRejected, SourceRejected, TooManyBadRecords, ValidationError
from airflow_kafka_spark.formats import Json, Raw, String
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.operators import SourceToKafkaOperator
from airflow_kafka_spark.sinks import FilesSink, KafkaSink
from airflow_kafka_spark.sources import FilesSource
from airflow_kafka_spark.transforms import (
    Cast,
    Condition,
    DropHeaders,
    ExtractField,
    Filter,
    Flatten,
    HeaderFrom,
    HoistField,
    InsertField,
    InsertHeader,
    MaskField,
    RegexRouter,
    ReplaceField,
    Sql,
    TimestampConverter,
    TimestampRouter,
    ValueToKey,
)
from tests.support.clients import open_hook
from tests.support.control import skip
from tests.support.dead_letters import decode_headers, letters
from tests.support.oracle import same_multiset
from tests.support.pipelines import SPARK, create_ledger
from tests.support.runs import context
from tests.support.shop import Shop, shop
from tests.support.unfit import avro, plain


@pytest.fixture
def orders(kafka, postgres, unique, tmp_path):
    with shop(kafka, postgres, unique, tmp_path) as made:
        yield made


def sent(orders: Shop, topic: str = "") -> list[Any]:
    """Return key, value, timestamp and headers of the records that a read_committed reader sees."""
    return letters(orders.kafka.connection_extra(), topic or orders.topic)


def spoil(orders: Shop, *ids: int) -> None:
    with orders.postgres.connect(autocommit=True) as connection:
        for number in ids:
            connection.execute(f"UPDATE \"{orders.table}\" SET customer = 'nobody' WHERE id = {number}")


CHAIN = [
    Filter(predicate=Condition("id % 10 = 3")),
    Cast("amount:string"),
    MaskField("customer", replacement="****", predicate=Condition("id % 2 = 0")),
    ReplaceField(renames={"placed_at": "at", "amount": "price"}),
    TimestampConverter("unix", "at", unix_precision="seconds"),
    InsertField(static_field="shop", static_value="north", topic_field="was", timestamp_field="stamp"),
    ValueToKey("id,customer"),
    HeaderFrom("shop", "shop", "move"),
    InsertHeader("version", "2"),
    DropHeaders("gone"),
    HoistField("order"),
    Flatten(),
    RegexRouter("(.*)", "$1-rare", predicate=Condition("`order.id` % 100 = 7")),
]


def expected(orders: Shop, topic: str) -> dict[int, tuple]:
    found = {}
    for id, customer, amount, _ in orders.rows():
        if id % 10 == 3:
            continue
        name, at = "****" if id % 2 == 0 else customer, 1_750_000_000 + id
        value = {
            "order.id": id,
            "order.customer": name,
            "order.price": amount,
            "order.at": at,
            "order.was": topic,
            "order.stamp": f"{datetime.fromtimestamp(at, timezone.utc):%Y-%m-%dT%H:%M:%S}.000000Z",
        }
        headers = [("source", b"%d" % id), ("shop", b"north"), ("version", b"2")]
        found[id] = (json.dumps({"id": id, "customer": name}), json.dumps(value), at * 1000, json.dumps(str(headers)))
    return found


def test_the_topic_holds_what_a_chain_makes_of_each_row_exactly_once(orders: Shop) -> None:
    rare = f"{orders.topic}-rare"
    orders.kafka.create_topic(rare, 2)
    options = {"transforms": CHAIN, "headers": {"source": "id", "gone": "id"}, "timestamp": "placed_at"}
    for number, count in enumerate((400, 200)):
        orders.sell(count)
        report = orders.run(f"run{number}", **options)
        counts = [report[f"records_{name}"] for name in ("read", "written", "filtered", "rejected")]
        assert counts == [count, count * 9 // 10, count // 10, 0]
    assert orders.run("run1", **options) == report, "a cleared task does nothing"
    wanted, compared = expected(orders, orders.topic), 0
    for topic, picked in ((orders.topic, lambda id: id % 100 != 7), (rare, lambda id: id % 100 == 7)):
        found = [
            (json.dumps(json.loads(key)), json.dumps(json.loads(body)), stamp, json.dumps(str(headers)))
            for key, body, stamp, headers in sent(orders, topic)
        ]
        compared += same_multiset([record for id, record in wanted.items() if picked(id)], found)
    assert compared == 540
    assert sum(part["records"] for part in report["published"]) == 180


ORDER = {"id": 7, "customer": "customer 7", "amount": 7.07}
LONG_KEY = avro({"type": "record", "name": "K", "fields": [{"name": "id", "type": "long"}]})


BEHIND: list[tuple[dict[str, Any], list[Any], bytes | None, Any]] = [
    (
        {"key_format": Json()},
        [Cast("id:string"), ExtractField("id", of="key"), HoistField("n", of="key")],
        b'{"n":7}',
        {**ORDER, "id": "7"},
    ),
    (
        {"key": None},
        [ValueToKey("id"), Sql({"id": "id", "double": "amount * 2"}), lambda frame: frame],
        b'{"id":7}',
        {"id": 7, "double": 14.14},
    ),
    ({"key": None}, [ValueToKey("id"), ExtractField("id", of="key"), ReplaceField(include="amount")], b"7", {"amount": 7.07}),
    ({"key": None, "value": String()}, [ExtractField("customer")], None, b"customer 7"),
    (
        {"key": ["id", "customer"]},
        [InsertField(static_field="v", static_value="1", of="key")],
        b'{"id":7,"customer":"customer 7","v":"1"}',
        ORDER,
    ),
    (
        {"key_format": LONG_KEY, "key": None, "value": Raw()},
        [ValueToKey("id"), Sql({"b": "encode(customer, 'UTF-8')"}), ExtractField("b")],
        b"\x0e",
        b"customer 7",
    ),
    ({"key": "customer"}, [lambda frame: frame.withColumn("key", frame.value.id)], b"7", ORDER),
]


def test_keys_and_values_are_written_as_they_are_behind_the_transforms(orders: Shop, unique) -> None:
    orders.sell(8)
    for options, transforms, key, value in BEHIND:
        topic = unique("behind")
        orders.kafka.create_topic(topic, 1)
        columns = {"value_columns": ["id", "customer", "amount"]}
        report = orders.run("run1", **{**columns, **options}, transforms=transforms, topic=topic, pipeline=topic)
        assert report["records_written"] == 8
        found = [(key, body if isinstance(value, bytes) else json.loads(body)) for key, body, _, _ in sent(orders, topic)]
        assert len(found) == 8 and found.count((key, value)) == 1, (options, found)


DATED = [
    Sql({"id": "id", "day": "CASE WHEN customer = 'nobody' THEN 'never' ELSE '2025-01-02' END"}),
    TimestampConverter("unix", "day", "yyyy-MM-dd"),
]
ONE_SPLIT = {"source": {"split_records": 5000}}
HUGE = (1 << 40) + 1
SMALL = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "int"}, {"name": "day", "type": "long"}]}


def test_a_row_that_cannot_be_transformed_or_written_fails_the_window_or_becomes_a_dead_letter_as_the_source_gave_it(
    orders: Shop,
) -> None:
    orders.sell(500)
    spoil(orders, 17, 400)
    value, bad = avro(SMALL), {17, 400, HUGE}
    with orders.postgres.connect(autocommit=True) as connection:
        connection.execute(f'UPDATE "{orders.table}" SET id = {HUGE} WHERE id = 300')
    dead, transforms = f"dead-{orders.topic}", [Filter(predicate=Condition("id % 5 = 1")), *DATED]
    options = {"transforms": transforms, "value": value, "headers": {"h": "customer"}, "timestamp": "placed_at", **ONE_SPLIT}
    with pytest.raises(RowsRejected, match="cannot become records") as raised:
        orders.run("run1", **options)
    assert raised.value.count == len(bad) and "TimestampConverter: " in str(raised.value) and sent(orders) == []
    tolerant = {
        **options,
        "errors_tolerance": "all",
        "errors_deadletterqueue_topic_name": dead,
        "source": {"split_records": 5000},
    }
    with pytest.raises(TooManyBadRecords, match=f"{len(bad)} of the 500 records"):
        orders.run("run1", **tolerant, max_errors=len(bad) - 1)
    assert sent(orders) == [] == letters(orders.kafka.connection_extra(), dead)
    report = orders.run("run1", **tolerant, max_errors=len(bad))
    counts = [report[f"records_{name}"] for name in ("read", "written", "filtered", "rejected")]
    assert counts == [500, 400 - len(bad), 100, len(bad)]
    assert sum(part["records"] for part in report["dead_letters"]) == len(bad)
    read = json.loads if isinstance(value, Json) else plain(SMALL)
    found = [(read(body or b"")["id"], read(body or b"")["day"]) for _, body, _, _ in sent(orders)]
    rows = {row[0]: row for row in orders.rows()}
    assert same_multiset([(id, 1_735_776_000_000) for id in rows if id % 5 != 1 and id not in bad], found) == 400 - len(bad)
    shown = []
    for key, body, stamp, headers in letters(orders.kafka.connection_extra(), dead):
        row = json.loads(body or b"", parse_float=str)
        shown.append((row["id"], row["customer"], row["amount"], row["placed_at"]))
        facts = decode_headers(headers)
        stage = "VALUE_CONVERTER" if row["id"] == HUGE else "TRANSFORMATION"
        assert facts["stage"] == stage and key == b"%d" % row["id"]
        assert (
            headers[0] == ("h", row["customer"].encode())
            and stamp == 1_750_000_000_000 + (row["id"] if row["id"] < 500 else 300) * 1000
        )
        if stage == "TRANSFORMATION":
            assert facts["class.name"] == "airflow_kafka_spark.transforms" and "never" in facts["exception.message"]
    assert same_multiset([rows[id] for id in bad], shown) == len(bad)


MISFITS: list[tuple[dict[str, Any], str, str]] = [
    ({"transforms": [Cast("nothing:int32")]}, "transforms[0] Cast.spec", "no field `nothing`"),
    ({"transforms": [ReplaceField(exclude="id"), Sql({"x": "id"})]}, "transforms[1] Sql", "does not understand"),
    ({"transforms": [Cast("id:nothing")]}, "transforms[0] Cast.spec", "nothing"),
    ({"transforms": [Filter(to=FilesSink(path="/nowhere"))]}, "transforms[0] Filter.to", "KafkaToSinkOperator"),
    ({"transforms": [InsertField(offset_field="at")]}, "transforms[0] InsertField.offset_field", "no offset"),
    ({"transforms": [TimestampRouter()]}, "transforms[0] TimestampRouter", "`timestamp` column"),
    ({"transforms": Cast("id:int32")}, "transforms", "in a list"),
    ({"transforms": [Cast("id:int32")], "read_with": "task"}, "read_with", "the JVM reads the source"),
    ({"transforms": [ExtractField("customer")], "value": avro(SMALL)}, "sink.value", "field `day`"),
    ({"transforms": [Cast("id:int32")], "value": Raw()}, "sink.value", "holds one column"),
    ({"transforms": [lambda frame: frame.where("false"), Sql({"x": "no_such"})]}, "transforms[1] Sql", "no_such"),
]  # fmt: skip


def test_transforms_that_do_not_fit_are_reported_before_a_window_is_planned(orders: Shop) -> None:
    orders.sell(3)
    for options, where, match in MISFITS:
        with pytest.raises(ValidationError) as raised:
            orders.run("run1", **options)
        by_argument = {problem.where: str(problem) for problem in raised.value.problems}
        assert list(by_argument) == [where] and match in by_argument[where], (options, by_argument)
    assert orders.run("run2")["window"] == "0000000001", "nothing was planned"
    assert orders.check() == 3


def test_what_a_filter_takes_out_goes_to_its_topic_as_the_source_gave_it(orders: Shop, unique) -> None:
    """This includes rows that could not be written or transformed later: that is not necessary."""
    rare, dead = unique("rare"), unique("dead")
    orders.sell(500)
    spoil(orders, 7, 8)
    with orders.postgres.connect(autocommit=True) as connection:
        connection.execute(f'UPDATE "{orders.table}" SET id = {HUGE} WHERE id = 17')
    away = Filter(predicate=Condition("id % 10 = 7"), to=rare, reason="it ends in 7")
    transforms = [Filter(predicate=Condition("id % 10 = 3")), away, *DATED]
    options = {"transforms": transforms, "value": avro(SMALL), "headers": {"h": "customer"}, "timestamp": "placed_at"}
    tolerated = {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead}
    report = orders.run("run1", **options, **tolerated)
    counts = [report[f"records_{name}"] for name in ("read", "written", "filtered", "routed", "rejected")]
    assert counts == [500, 399, 50, 50, 1]
    assert sum(part["records"] for part in report["routed"]) == 50
    rows, read = {row[0]: row for row in orders.rows()}, plain(SMALL)
    found = [read(body or b"")["id"] for _, body, _, _ in sent(orders)]
    assert same_multiset([id for id in rows if id % 10 not in (3, 7) and id != 8], found) == 399
    shown, places = [], set()
    for key, body, stamp, headers in sent(orders, rare):
        row = json.loads(body or b"", parse_float=str)
        shown.append((row["id"], row["customer"], row["amount"], row["placed_at"]))
        facts = {name.rpartition(".")[2]: (value or b"").decode() for name, value in headers[1:]}
        assert key == b"%d" % row["id"] and headers[0] == ("h", row["customer"].encode())
        assert stamp == 1_750_000_000_000 + (17 if row["id"] == HUGE else row["id"]) * 1000
        assert (facts["pipeline"], facts["reason"], facts["source"]) == (orders.name, "it ends in 7", report["source"])
        places.add((facts["window"], int(facts["split"]), int(facts["row"])))
    assert same_multiset([row for id, row in rows.items() if id % 10 == 7], shown) == 50
    assert len(places) == 50 and {window for window, _, _ in places} == {f"{orders.name}#1"}


def test_no_record_goes_to_the_ledger_and_a_topic_has_to_be_there(orders: Shop) -> None:
    orders.sell(3)
    with pytest.raises(RowRejected, match=r"(?i)row \d+ of split \d+.* is the ledger, the dead letter topic"):
        orders.run("run1", transforms=[RegexRouter(".*", f"ledger-{orders.name}", predicate=Condition("id = 1"))])
    with pytest.raises(Exception, match="no-such-topic"):
        orders.run("run1", transforms=[RegexRouter(".*", "no-such-topic", predicate=Condition("id = 1"))])
    assert sent(orders) == []
    with KafkaHook() as hook:
        assert not hook.describe_topics(["no-such-topic"], missing="omit")
    assert orders.run("run1")["attempts"] == 3 and orders.check() == 3


def test_the_window_of_a_malformed_file_is_finished_with_such_lines_in_a_topic_of_their_own_or_given_up(
    kafka, unique, tmp_path, monkeypatch
):
    """As the pages and the error say it: the file is not touched, or it is added under another name."""
    name, files = unique("malformed"), tmp_path / "in"
    files.mkdir()
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", kafka.connection_json())
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", SPARK)
    kafka.create_topic(name, 1)
    create_ledger(kafka, name)

    def publish(run_id: str, schema: str = "id bigint, amount int", transforms: Sequence[Any] = (), **options: str) -> None:
        SourceToKafkaOperator(
            task_id="task",
            pipeline=name,
            ledger_topic=f"ledger-{name}",
            source=FilesSource(str(files), format="csv", schema=schema, options={"header": True, **options}),
            sink=KafkaSink(topic=name, key="id", value=Json()),
            transforms=transforms,
        ).execute(context(run_id))

    (files / "a.csv").write_text("id,amount\n1,10\n2,many\n")
    with pytest.raises(SourceRejected, match="To publish its other rows.* under another name"):
        publish("run1")
    apart = [
        Filter(predicate=Condition("_corrupt_record IS NOT NULL"), to=f"{name}-malformed", reason="a malformed line"),
        ReplaceField(exclude="_corrupt_record"),
    ]
    publish("run2", "id bigint, amount int, _corrupt_record string", apart, mode="PERMISSIVE")
    (files / "b.csv").write_text("id,sum\n3,30\n")
    with pytest.raises(SourceRejected, match="header.* under another name"):
        publish("run3")
    (files / "b.csv").write_text("id,amount\n3,30\n")
    with pytest.raises(SourceRejected, match="changed since.* give the file another name"):
        publish("run4")
    with open_hook(kafka) as hook:
        skip(hook, name, running=False, why="b.csv is wrong", ledger_topic=f"ledger-{name}")
    (files / "b.csv").rename(files / "b-2.csv")
    publish("run5")
    extra = kafka.connection_extra()
    assert [json.loads(value) for _, value, *_ in letters(extra, name)] == [{"id": 1, "amount": 10}, {"id": 3, "amount": 30}]
    assert [json.loads(value)["_corrupt_record"] for _, value, *_ in letters(extra, f"{name}-malformed")] == ["2,many"]
