"""A window that follows another pipeline reads exactly the records that this has published: published = read = in the sink."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest
from confluent_kafka import Producer

from airflow_kafka_spark.errors import FollowBroken, FollowedMismatch, ValidationError
from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.operators import KafkaToSinkOperator
from airflow_kafka_spark.sinks import FilesSink
from tests.support.oracle import same_multiset
from tests.support.pipelines import files_rows
from tests.support.runs import fails_at, run
from tests.support.shop import shop

SCHEMA = "id bigint, customer string, amount decimal(12,2), placed_at timestamp"


@pytest.fixture
def orders(kafka, postgres, unique, tmp_path):
    with shop(kafka, postgres, unique, tmp_path) as made:
        yield made


def make(place: str, **options) -> KafkaToSinkOperator:
    return KafkaToSinkOperator(task_id="load", value=Json(schema=SCHEMA), sink=FilesSink(path=place), **options)


def load(orders, run_id: str, **options) -> dict:
    own = {
        "place": str(orders.directory / "lake"), "topics": orders.topic, "group_id": f"{orders.name}-load",
        "pipeline": f"{orders.name}-load", "ledger_topic": f"ledger-{orders.name}", "follows": orders.name,
    }  # fmt: skip
    return run(make, {**own, **options}, run_id)


def stray(orders, count: int) -> None:
    """Let another producer write to the topic."""
    producer = Producer(orders.kafka.connection_extra())
    for number in range(count):
        producer.produce(orders.topic, b'{"id": -1}', str(number).encode())
    producer.flush(60)


def test_it_reads_whole_windows_none_that_is_not_complete_and_their_counts_agree(orders):
    orders.sell(300)
    orders.run("run1")
    first = load(orders, "run1")
    assert first["records_read"] == first["records_written"] == 300
    assert first["follows"] == {"pipeline": orders.name, "first": 1, "last": 1, "records": 300}
    orders.sell(20)
    with fails_at("job.done"):
        orders.run("run2")
    assert load(orders, "run2")["records_read"] == 0, "not the splits of the open window, which are there already"
    orders.run("run2")
    orders.sell(30)
    orders.run("run3")
    third = load(orders, "run3")
    assert (third["records_read"], third["follows"]["first"], third["follows"]["last"]) == (50, 2, 3)
    rows = [(i, c, a, f"{p}") for i, c, a, p in files_rows(str(orders.directory / "lake"))]
    expected = [(i, c, a, f"{1_750_000_000 + i}") for i, c, a, _ in orders.rows()]
    assert same_multiset(expected, rows) == 350


def test_records_of_another_producer_are_over_consumption_and_nothing_is_committed(orders):
    orders.sell(100)
    stray(orders, 7)
    orders.run("run1")
    with pytest.raises(FollowedMismatch, match="over-consumption of 7") as raised:
        load(orders, "run1")
    assert (raised.value.published, raised.value.read) == (100, 107)
    assert files_rows(str(orders.directory / "lake")) == []
    assert load(orders, "run1", on_mismatch="warn")["records_read"] == 107


def test_deleted_records_are_under_consumption(orders):
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

    orders.sell(100)
    orders.run("run1")
    with KafkaHook() as hook:
        hook.delete_records({tp: offsets.lso for tp, offsets in hook.read_offsets([orders.topic]).items()})
    with pytest.raises(FollowedMismatch, match="under-consumption of 100"):
        load(orders, "run1")


def by_hand(change, orders, **options):
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from tests.support.oracle import wait_stable

    wait_stable(orders.kafka.connection_extra(), f"ledger-{orders.name}")
    with KafkaHook() as hook:
        change(hook, orders.name, why="a test", ledger_topic=f"ledger-{orders.name}", **options)


def test_a_window_that_was_given_up_and_a_pipeline_that_was_forgotten_are_followed_nevertheless(orders):
    from tests.support.control import forget, skip

    orders.sell(40)
    orders.run("run1")
    assert load(orders, "run1")["records_read"] == 40
    orders.sell(10)
    with fails_at("job.done"):
        orders.run("run2")
    by_hand(skip, orders, running=False)
    second = load(orders, "run2")
    assert (second["records_read"], second["follows"]["records"]) == (10, 10), "they were published, and stay in the topic"
    by_hand(forget, orders)
    orders.run("run3")
    third = load(orders, "run3")
    assert (third["records_read"], third["follows"]["records"]) == (50, 50), "all rows again, because somebody asked for it"
    rows = [(i, c, a, _iso(p)) for i, c, a, p in files_rows(str(orders.directory / "lake"))]
    assert same_multiset(orders.records(), rows) == 100


def _iso(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def test_a_pipeline_that_is_not_there_and_one_that_publishes_nothing_are_refused_and_windows_that_were_forgotten_count(orders):
    orders.sell(10)
    orders.run("run1")
    with pytest.raises(FollowBroken, match="the ledger has no record of it"):
        load(orders, "run1", follows="nobody")
    load(orders, "run1")
    with pytest.raises(FollowBroken, match="does not publish"):
        load(orders, "run1", follows=f"{orders.name}-load", pipeline="third", group_id="third")
    with pytest.raises(ValidationError, match="as large as"):
        load(orders, "run2", max_records=5)
    for number in (2, 3):
        orders.sell(5)
        orders.run(f"run{number}", keep_windows=2)
    late = load(orders, "run1", pipeline="late", group_id="late", place=str(orders.directory / "late"))
    assert (late["records_read"], late["follows"]["records"]) == (20, 20)
