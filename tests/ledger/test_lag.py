"""Lag, measured on a real broker."""

from __future__ import annotations

import time
from datetime import datetime, timezone

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka import TopicPartition as KafkaTopicPartition

from airflow_kafka_spark.control.pipelines import show
from airflow_kafka_spark.errors import ClusterChanged, KafkaUnavailable, PipelineUnknown, TopicMissing, ValidationError
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.ledger.attempt import Ledger
from airflow_kafka_spark.ledger.lag import LagMeter, peek_spans
from airflow_kafka_spark.ledger.topic import LedgerReader, LedgerTopic
from airflow_kafka_spark.windows.interval import Interval, IntervalState
from airflow_kafka_spark.windows.lag import BacklogHead, Status, find_worst_verdict
from airflow_kafka_spark.windows.memory import make_interval_record
from airflow_kafka_spark.windows.model import OffsetRange, State, TopicPartition, Window
from tests.support.lag import commit, consuming, delete_group, now_ms, produce, transact, transaction
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def connection(kafka, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", kafka.connection_json())


@pytest.fixture
def hook():
    with KafkaHook(timeout=20) as hook:
        yield hook


@pytest.fixture
def topic(kafka, unique):
    """Create a topic of one partition."""
    topic = unique("lag")
    kafka.create_topic(topic)
    return topic


def measured(hook, topic, group, **options):
    """Return the state of partition 0, and the status."""
    lag, verdicts = LagMeter((topic,), group, **options).measure(hook)
    return lag.partitions[TopicPartition(topic, 0)], find_worst_verdict(verdicts)


# --- groups ---


def test_seconds_are_the_age_of_the_record_at_the_committed_offset(kafka, hook, topic):
    for age in (3600, 300, 20):
        produce(kafka, topic, age=age)
    commit(kafka, topic, topic, 1)
    state, _ = measured(hook, topic, topic)
    assert (state.committed, state.end, state.records) == (1, 3, 2)
    assert 300 <= state.seconds < 3600
    commit(kafka, topic, topic, 2)
    state, _ = measured(hook, topic, topic)
    assert 20 <= state.seconds < 300


def test_the_timestamp_is_exactly_that_record_s(kafka, hook, topic):
    stamps = [produce(kafka, topic, age=age) for age in (50, 40, 30)]
    found = peek_spans(hook, {TopicPartition(topic, 0): (1, 3)})
    assert found[TopicPartition(topic, 0)].head == BacklogHead(1, stamps[1])


def test_a_record_from_the_future_is_no_negative_lag(kafka, hook, topic):
    produce(kafka, topic, age=-500)
    state, _ = measured(hook, topic, topic)
    assert (state.records, state.seconds) == (1, 0.0)


def test_a_group_that_has_read_everything_is_not_behind(kafka, hook, topic):
    produce(kafka, topic, 3, age=100)
    commit(kafka, topic, topic, 3)
    state, verdict = measured(hook, topic, topic)
    assert (state.behind, state.records, state.seconds, verdict.status) == (False, 0, 0.0, Status.OK)


@pytest.mark.parametrize("outcome", ["commit", "abort"])
def test_a_trailing_transaction_marker_is_no_lag(kafka, hook, topic, outcome):
    produce(kafka, topic, 2, age=100)
    transact(kafka, hook, topic, 3, outcome)
    commit(kafka, topic, topic, 5)
    state, _ = measured(hook, topic, topic)
    assert (state.end, state.committed) == (6, 5)
    assert (state.records, state.seconds) == (0, 0.0)


def test_an_aborted_tail_is_no_lag_and_what_comes_behind_it_is(kafka, hook, topic):
    produce(kafka, topic, 2, age=100)
    transact(kafka, hook, topic, 200, "abort")
    commit(kafka, topic, topic, 2)
    meter = LagMeter((topic,), topic)
    lag, _ = meter.measure(hook)
    assert (lag.count_records(), lag.seconds) == (0, 0.0)
    produce(kafka, topic, 4, age=60)
    lag, _ = meter.measure(hook)
    assert lag.count_records() == 4
    assert 60 <= lag.seconds < 360


def test_records_in_an_open_transaction_are_not_lag_yet(kafka, hook, topic):
    with transaction(kafka, topic, 3) as producer:
        state, _ = measured(hook, topic, topic)
        assert (state.records, state.held_back) == (0, 3)
        producer.commit_transaction(60)
        eventually(lambda: measured(hook, topic, topic)[0].records)
    assert measured(hook, topic, topic)[0].held_back == 0


def test_offsets_that_a_group_has_in_an_open_transaction_count_only_once_it_is_committed(kafka, hook, topic):
    produce(kafka, topic, 5)
    commit(kafka, topic, topic, 1)
    member = Consumer({**kafka.connection_extra(), "group.id": topic})
    with transaction(kafka, topic, 1) as producer:
        producer.send_offsets_to_transaction([KafkaTopicPartition(topic, 0, 5)], member.consumer_group_metadata(), 30)
        # A reader that waits for the transaction would get an error after the hook's timeout.
        assert measured(hook, topic, topic)[0].committed == 1
        producer.commit_transaction(60)
    eventually(lambda: measured(hook, topic, topic)[0].committed == 5)
    member.close()


def test_a_group_without_offsets_is_behind_by_all_that_is_still_there(kafka, hook, topic):
    produce(kafka, topic, 5, age=90)
    hook.delete_records({TopicPartition(topic, 0): 2})
    state, verdict = measured(hook, topic, topic)
    assert (state.committed, state.low, state.records) == (None, 2, 3)
    assert 90 <= state.seconds < 390
    assert (verdict.status, "no committed offset" in verdict.reason) == (Status.STOP, True)


def test_a_deleted_group_loses_its_offsets_and_its_status_says_so(kafka, hook, topic):
    produce(kafka, topic, 5)
    commit(kafka, topic, topic, 4)
    meter = LagMeter((topic,), topic)
    assert meter.measure(hook)[0].count_records() == 1
    delete_group(kafka, topic)
    lag, verdicts = meter.measure(hook)
    assert lag.count_records() == 5
    assert find_worst_verdict(verdicts).status is Status.STOP


def test_an_offset_below_the_low_watermark_counts_from_there_and_lost_records_are_reported(kafka, hook, topic):
    produce(kafka, topic, 10)
    commit(kafka, topic, topic, 2)
    hook.delete_records({TopicPartition(topic, 0): 6})
    state, _ = measured(hook, topic, topic)
    assert (state.records, state.lost) == (4, 4)


def test_a_live_group_catches_up_and_shows_that_it_lives(kafka, hook, topic):
    produce(kafka, topic, 20, age=5)
    meter = LagMeter((topic,), topic)
    with consuming(kafka, topic, topic, pause=0.02):
        eventually(lambda: meter.measure(hook)[0].active)
        eventually(lambda: meter.measure(hook)[0].count_records() == 0)
    assert find_worst_verdict(meter.measure(hook)[1]).status is Status.OK


def test_all_partitions_are_looked_at_by_one_consumer(kafka, hook, unique):
    topic = unique("lag")
    kafka.create_topic(topic, 12)
    stamps = [produce(kafka, topic, partition, partition, age=100 + partition) for partition in range(1, 12)]
    lag, _ = LagMeter((topic,), topic).measure(hook)
    assert lag.count_records() == sum(range(12))
    assert lag.count_records("partition") == 11
    assert lag.seconds == pytest.approx(lag.now - stamps[-1] / 1000, abs=0.01)
    ages = [lag.partitions[TopicPartition(topic, p)].seconds for p in range(1, 12)]
    assert ages == pytest.approx([lag.now - stamp / 1000 for stamp in stamps], abs=0.01)


def test_only_the_head_of_a_backlog_is_read(kafka, hook, topic):
    producer = Producer({**kafka.connection_extra(), "compression.type": "none", "batch.size": 60_000})
    for _ in range(30_000):
        producer.produce(topic, bytes(2000))
        producer.poll(0)
    producer.flush(60)
    began = time.process_time()
    assert measured(hook, topic, topic)[0].records == 30_000
    assert time.process_time() - began < 5
    meter = LagMeter((topic,), topic)
    meter.measure(hook)
    began = time.process_time()
    meter.measure(hook)
    assert time.process_time() - began < 1


def test_a_missing_topic_is_an_error(hook, unique):
    with pytest.raises(TopicMissing, match="nowhere"):
        LagMeter((unique("nowhere"),), "g").measure(hook)


def test_brokers_that_do_not_answer_are_an_error_in_time(monkeypatch, topic):
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", '{"conn_type": "kafka", "extra": {"bootstrap.servers": "127.0.0.1:1"}}')
    with KafkaHook(timeout=20) as hook, pytest.raises(KafkaUnavailable):
        LagMeter((topic,), "g").measure(hook)


# --- pipelines ---


def window(pipeline, topic, number, start, end, hook, *, cluster_id=None):
    ids = {topic: hook.describe_topics([topic])[topic].topic_id}
    return Window(
        pipeline, number, (OffsetRange(topic, 0, start, end),), f"dag/run{number}/task", "2026-01-01T00:00:00+00:00",
        cluster_id or hook.read_cluster_id(), ids,
    )  # fmt: skip


def complete(hook, pipeline, ledger_topic, planned, completed_at="2026-01-01T00:00:00+00:00"):
    with Ledger(hook, pipeline, planned.run, topic=ledger_topic) as ledger:
        ledger.plan(planned)
        ledger.close({"completed_at": completed_at, "window": planned.id}, {})


def test_a_pipeline_stands_where_its_ledger_says_not_its_group(kafka, hook, topic, unique):
    pipeline, ledger = unique("pipe"), unique("ledger")
    produce(kafka, topic, 10, age=30)
    complete(hook, pipeline, ledger, window(pipeline, topic, 1, 0, 7, hook))
    commit(kafka, topic, topic, 2)
    lag, _ = LagMeter((), topic, pipeline, ledger).measure(hook)
    assert lag.count_records() == 3
    assert lag.committed == {f"{topic}-0": 7}


def test_a_pipeline_that_the_ledger_does_not_know_stands_where_its_group_does(kafka, hook, topic, unique):
    produce(kafka, topic, 10)
    commit(kafka, topic, topic, 4)
    ledger = unique("ledger")
    assert LagMeter((topic,), topic, unique("pipe"), ledger).measure(hook)[0].count_records() == 6
    assert LagMeter((topic,), None, unique("pipe"), ledger).measure(hook)[0].count_records() == 10
    with pytest.raises(PipelineUnknown):
        LagMeter((), None, unique("pipe"), ledger).measure(hook)
    assert ledger not in hook.list_topics(), "looking has created the ledger"


def test_a_topic_created_again_is_all_new_to_a_pipeline(kafka, hook, topic, unique):
    pipeline, ledger = unique("pipe"), unique("ledger")
    produce(kafka, topic, 10)
    complete(hook, pipeline, ledger, window(pipeline, topic, 1, 0, 10, hook))
    meter = LagMeter((), None, pipeline, ledger)
    assert meter.measure(hook)[0].count_records() == 0
    kafka.delete_topic(topic)
    kafka.create_topic(topic)
    produce(kafka, topic, 3)
    assert meter.measure(hook)[0].count_records() == 3


def test_offsets_of_another_cluster_are_refused(kafka, hook, topic, unique):
    pipeline, ledger = unique("pipe"), unique("ledger")
    complete(hook, pipeline, ledger, window(pipeline, topic, 1, 0, 0, hook, cluster_id="elsewhere"))
    with pytest.raises(ClusterChanged):
        LagMeter((), None, pipeline, ledger).measure(hook)


def test_a_pipeline_of_data_intervals_stands_where_its_group_does(kafka, hook, topic, unique):
    pipeline, name = unique("pipe"), unique("ledger")
    day = Interval(datetime(2026, 1, 1, tzinfo=timezone.utc), datetime(2026, 1, 2, tzinfo=timezone.utc))
    done = make_interval_record(pipeline, IntervalState(day, State.COMPLETE, (OffsetRange(topic, 0, 0, 3),), "dag/run/task"))
    ledger = LedgerTopic(hook, name)
    ledger.ensure()
    producer = Producer(kafka.connection_extra())
    producer.produce(name, done.value, done.key, partition=ledger.find_partition(pipeline))
    assert producer.flush(60) == 0
    produce(kafka, topic, 10)
    commit(kafka, topic, topic, 3)
    assert LagMeter((), topic, pipeline, name).measure(hook)[0].count_records() == 7
    with pytest.raises(ValidationError, match="Name its consumer group"):
        LagMeter((), None, pipeline, name).measure(hook)
    # A run without an interval has moved three records, and the interval continues it: neither counts by itself.
    following = IntervalState(day, State.COMPLETE, (OffsetRange(topic, 0, 3, 7),), "dag/run/task")
    done = make_interval_record(pipeline, following)
    producer.produce(name, done.value, done.key, partition=ledger.find_partition(pipeline))
    assert producer.flush(60) == 0
    complete(hook, pipeline, name, window(pipeline, topic, 1, 0, 3, hook))
    lag, _ = LagMeter((), None, pipeline, name).measure(hook)
    assert (lag.count_records(), lag.committed) == (3, {f"{topic}-0": 7})
    (shown,) = show(hook, pipeline, ledger_topic=name).partitions
    assert (shown.offset, shown.lag) == (7, 3)


def test_a_nightly_pipeline_is_not_called_dead_until_it_has_missed_a_night(kafka, hook, topic, unique):
    pipeline, ledger = unique("pipe"), unique("ledger")
    produce(kafka, topic, 3, age=40 * 3600)
    day = 86400
    nights = [time.time() - 20 * 3600 - age * day for age in (3, 2, 1, 0)]
    for number, night in enumerate(nights, 1):
        moment = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(night))
        end = min(number - 1, 2)
        complete(hook, pipeline, ledger, window(pipeline, topic, number, max(0, end - 1), end, hook), moment)
    _, verdict = measured(hook, topic, None, pipeline=pipeline, ledger_topic=ledger)
    assert verdict.status is Status.OK, verdict
    _, verdict = measured(hook, topic, None, pipeline=pipeline, ledger_topic=ledger, schedule=3600.0)
    assert verdict.status is Status.STOP, verdict


def test_a_pipeline_s_ledger_is_read_on_from_what_was_seen(kafka, hook, topic, unique):
    pipeline, ledger = unique("pipe"), unique("ledger")
    reader = LedgerReader(pipeline, ledger)
    assert not reader.read(hook).exists
    complete(hook, pipeline, ledger, window(pipeline, topic, 1, 0, 0, hook))
    assert reader.read(hook).last_number == 1
    whole = LedgerTopic(hook, ledger)
    whole.ensure()
    assert reader.read(hook) == whole.read(pipeline).memory


def test_now_is_the_clock_of_this_machine(kafka, hook, topic):
    produce(kafka, topic)
    lag, _ = LagMeter((topic,), topic).measure(hook)
    assert abs(lag.now * 1000 - now_ms()) < 10_000
