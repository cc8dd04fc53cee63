"""The options of a DAG author, and all their problems in one error, before Spark starts."""

from __future__ import annotations

import json
import re

import pytest

from airflow_kafka_spark.errors import PartitionsChanged, RowRejected, SparkJobFailed, TopicRecreated, ValidationError
from airflow_kafka_spark.formats import Json, Raw, String
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.operators import SourceToKafkaOperator
from airflow_kafka_spark.sinks import KafkaSink
from airflow_kafka_spark.sources import FilesSource
from airflow_kafka_spark.transforms import Filter
from tests.support.dead_letters import letters
from tests.support.kafka_sinks import with_sink
from tests.support.oracle import committed_records, same_multiset
from tests.support.runs import fails_at, run
from tests.support.shop import shop


@pytest.fixture
def orders(kafka, postgres, unique, tmp_path):
    with shop(kafka, postgres, unique, tmp_path) as made:
        yield made


def problems(orders, **options) -> dict[str, str]:
    with pytest.raises(ValidationError) as raised:
        orders.run("run1", **options)
    return {problem.where: str(problem) for problem in raised.value.problems}


WRONG = [
    ({"topic": "nowhere-at-all"}, "sink.topic", "does not exist"),
    ({"topic": None}, "sink.topic", "none is given"),
    ({"topic_column": "customer"}, "sink.topic", "both are given"),
    ({"producer_config": {"bootstrap.servers": "b:1"}}, "sink.producer_config", "other brokers than `kafka_conn_id`"),
    ({"key": "nothing"}, "sink.key", "no column `nothing`.*id, customer, amount, placed_at"),
    ({"key": ["id", "customer"], "key_format": String()}, "sink.key", "holds one column"),
    ({"value": Raw()}, "sink.value", "Raw holds one column"),
    ({"value_columns": ["id", "id"]}, "sink.value", "`id` is there twice"),
    ({"headers": {"h": "nothing"}}, "sink.headers", "no column `nothing`"),
    ({"timestamp": "nothing"}, "sink.timestamp", "no column"),
    ({"partition": "nothing"}, "sink.partition", "no column"),
    ({"transaction_timeout": 100_000}, "sink.transaction_timeout", "transaction.max.timeout.ms"),
    ({"transaction_timeout": 0}, "sink.transaction_timeout", "not a number of seconds"),
    ({"producer_config": {"transactional.id": "x"}}, "sink.producer_config", "set by the operator itself"),
    ({"producer_config": {"acks": "1"}}, "sink.producer_config", "loses records"),
    ({"producer_config": {"linger": 5}}, "sink.producer_config", 'No such configuration property: "linger"'),
    (
        {"producer_config": {"linger.ms": "5ms"}},
        "sink.producer_config",
        "`linger.ms` is `5ms`, not a whole number of milliseconds",
    ),
    ({"topic": "never-made", "auto_create": True, "topic_config": {"nonsense": "1"}}, "sink.auto_create", "nonsense"),
    ({"topic": "never-made", "auto_create": True, "replication_factor": 99}, "sink.auto_create", "INVALID_REPLICATION_FACTOR"),
    ({"partitions": 0}, "sink.partitions", "expected a whole number from 1, or -1"),
    ({"conn_id": "other", "producer_config": {"acks": "1"}}, "sink.producer_config", "loses records"),
    ({"source": {"cursor": "nothing"}}, "source.cursor", "nothing"),
    ({"table": "no_such_table"}, "source.table", "no_such_table"),
    ({"pipeline": "\n"}, "pipeline", ".*"),
    ({"errors_tolerance": "some"}, "errors_tolerance", "not one of none, all"),
    ({"errors_tolerance": "all"}, "errors_deadletterqueue_topic_name", "lost silently"),
    ({"max_errors": 1}, "max_errors", "no bad record is tolerated"),
    ({"errors_tolerance": "all", "errors_skip": True, "max_errors": 1.5}, "max_errors", "neither a whole number"),
]


def test_what_is_wrong_is_said_before_anything_starts_and_all_of_it_at_once(orders):
    for options, where, match in WRONG:
        found = problems(orders, **options)
        assert re.search(match, found.get(where, "")), (options, found)
    compacted = f"compacted-{orders.name}"
    orders.kafka.create_topic(compacted, 1, config={"cleanup.policy": "compact", "max.message.bytes": "500"})
    assert "is compacted" in problems(orders, topic=compacted, key=None)["sink.key"]
    planned = {"topic": "never-made", "auto_create": True, "topic_config": {"cleanup.policy": "compact,delete"}}
    assert "is compacted" in problems(orders, **planned, key=None)["sink.key"]
    with KafkaHook("kafka_default") as hook:
        assert KafkaSink(topic=compacted).make_producer_config(hook)["batch.size"] == 500
    # Neither dead letters nor removed records may go to the topic of good rows or to the ledger.
    for topic, expected in ((orders.topic, "is the topic of good rows"), (f"ledger-{orders.name}", "is its ledger")):
        found = problems(orders, errors_tolerance="all", errors_deadletterqueue_topic_name=topic)
        assert expected in found["errors_deadletterqueue_topic_name"]
        assert expected in problems(orders, transforms=[Filter(to=topic)])["transforms[0] Filter.to"]
    found = problems(orders, key="nothing", transaction_timeout=100_000, source={"cursor": "nothing"}, topic="nowhere-at-all")
    assert {"sink.transaction_timeout", "sink.topic", "source.cursor"} <= found.keys()
    assert committed_records(orders.kafka.connection_extra(), orders.topic) == []


def test_keys_headers_times_and_columns_are_those_asked_for_and_a_topic_is_created_on_request(orders, unique):
    orders.sell(30)
    topic = unique("made")
    orders.run(
        topic=topic, auto_create=True, partitions=5, topic_config={"retention.ms": "123456789"},
        key=["customer", "id"], headers={"who": "customer"}, timestamp="placed_at", value=Json(), value_columns=["amount", "id"],
    )  # fmt: skip
    config = orders.kafka.connection_extra()
    found = {json.loads(record[1])["id"]: record for record in letters(config, topic)}
    assert len(found) == 30
    # The record's time is the row's, not this moment.
    own = (1_750_000_007_000, [("who", b"customer 7")])
    assert found[7] == (b'{"customer":"customer 7","id":7}', b'{"amount":7.07,"id":7}', *own)
    with KafkaHook() as hook:
        assert len(hook.describe_topics([topic])[topic].partitions) == 5
        assert hook.read_topic_config([topic])[topic]["retention.ms"] == "123456789"


def test_columns_of_partition_and_time_that_hold_neither_are_named_before_a_window_is_planned(orders):
    orders.sell(3)
    with pytest.raises(ValidationError) as found:
        orders.run(partition="placed_at", timestamp="customer")
    assert [(p.where, "expected" in p.what) for p in found.value.problems] == [("sink.partition", True), ("sink.timestamp", True)]
    with pytest.raises(ValidationError, match=r"sink.topic_column: column `id` holds integers; expected a text"):
        orders.run(topic=None, topic_column="id")
    # Nothing was planned, so the position is that of a new pipeline.
    assert orders.run(partition=None, timestamp="placed_at")["window"] == "0000000001"
    with orders.postgres.connect(autocommit=True) as session:
        session.execute(f'ALTER TABLE "{orders.table}" ADD COLUMN score double precision')
    orders.sell(3)
    # Floating point numbers are read by Spark only, which knows the other columns then.
    with pytest.raises(ValidationError, match=r"sink.partition: column `customer` holds texts; expected an integer"):
        orders.run("run2", partition="customer", timestamp="placed_at")
    # No number is cut to one that a partition has.
    with orders.postgres.connect(autocommit=True) as session:
        session.execute(f'UPDATE "{orders.table}" SET score = 1.5')
    with pytest.raises(SparkJobFailed, match=r"column `score` holds 1.5; expected the number of a partition"):
        orders.run("run2", partition="score")
    with orders.postgres.connect(autocommit=True) as session:
        session.execute(f'ALTER TABLE "{orders.table}" ALTER score TYPE bigint USING 4294967297')
    with pytest.raises(RowRejected, match=r"asks for partition 4294967297, and topic"):
        orders.run("run2", partition="score")


def test_a_topic_with_more_partitions_than_planned_is_refused_unless_that_is_allowed_and_one_that_was_created_anew(orders):
    def fail(run: str, point: str) -> None:
        with fails_at(point):
            orders.run(run)

    orders.sell(500)
    fail("run1", "job.done")
    orders.kafka.create_partitions(orders.topic, 6)
    with pytest.raises(PartitionsChanged, match="allow_new_partitions"):
        orders.run("run1")
    orders.run("run1", allow_new_partitions=True)
    assert orders.check() == 500
    orders.sell(10)
    fail("run2", "planned")
    orders.kafka.delete_topic(orders.topic)
    orders.kafka.create_topic(orders.topic, 3)
    with pytest.raises(TopicRecreated):
        orders.run("run2")


def test_files_are_published_each_row_once(kafka, postgres, unique, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    place = tmp_path / "files"
    place.mkdir()
    with shop(kafka, postgres, unique, tmp_path) as orders:
        for number in range(3):
            ids = range(number * 100, number * 100 + 100)
            pq.write_table(pa.table({"id": list(ids), "name": [f"n{i}" for i in ids]}), place / f"{number}.parquet")
            if number != 1:
                report = run(make_files, {"place": str(place), **_own(orders)}, f"run{number}")
                assert report["records_written"] == (100 if number == 0 else 200)
        found = [value for *_, value in committed_records(kafka.connection_extra(), orders.topic)]
        assert same_multiset([json.dumps({"id": i, "name": f"n{i}"}, separators=(",", ":")).encode() for i in range(300)], found)


def _own(orders) -> dict[str, str]:
    return {"topic": orders.topic, "pipeline": orders.name, "ledger_topic": f"ledger-{orders.name}"}


def make_files(place: str, **options) -> SourceToKafkaOperator:
    return SourceToKafkaOperator(task_id="task", source=FilesSource(path=place), **with_sink(options, key="id"))
