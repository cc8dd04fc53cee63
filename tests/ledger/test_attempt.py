"""The ledger on a real broker: who may write, what readers see, and what is left after a kill."""

from __future__ import annotations

import itertools
import json
import random
import threading
from dataclasses import replace

import pytest
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka import TopicPartition as KafkaTopicPartition

from airflow_kafka_spark import faults
from airflow_kafka_spark.cli.definition import main
from airflow_kafka_spark.control import base as control_base
from airflow_kafka_spark.control.lifecycle import unblock
from airflow_kafka_spark.errors import Fenced, GroupOwned, KafkaRefused, LedgerUnreadable, WindowTooWide
from airflow_kafka_spark.hooks.kafka.client import ClientEvents
from airflow_kafka_spark.hooks.kafka.partitioner import choose_partition
from airflow_kafka_spark.hooks.kafka.transactions import send_offsets
from airflow_kafka_spark.ledger import attempt as ledger_attempt
from airflow_kafka_spark.ledger import topic as ledger_topic
from airflow_kafka_spark.ledger.attempt import ChangeLedger, Ledger
from airflow_kafka_spark.ledger.topic import LedgerTopic, identify_transaction, make_transactional_id, may_lose_records
from airflow_kafka_spark.windows.changes import Change
from airflow_kafka_spark.windows.interval import Interval, IntervalState
from airflow_kafka_spark.windows.interval_archive import IntervalArchive
from airflow_kafka_spark.windows.memory import (
    Attempt,
    LedgerRecord,
    WindowEntry,
    make_archive_record,
    make_change_record,
    make_dead_letters_key,
    make_group_key,
    make_group_record,
    make_interval_key,
    make_interval_record,
    make_marker_record,
    make_position_record,
    make_window_key,
    make_window_record,
)
from airflow_kafka_spark.windows.model import Marker, OffsetRange, State, TopicPartition, Window
from airflow_kafka_spark.windows.plan import Position
from airflow_kafka_spark.windows.report import Report
from tests.support.control import pause, resume


@pytest.fixture
def pipeline(unique):
    return unique("pipeline")


@pytest.fixture
def topic(kafka, unique):
    name = unique("orders")
    kafka.create_topic(name, 2)
    return name


@pytest.fixture
def ledger_topic_name(unique):
    return unique("ledger")


@pytest.fixture
def attempt(hook, pipeline, topic, ledger_topic_name):
    """Return a function that opens an attempt at the ledger of one pipeline."""
    return lambda run="run1", **options: Ledger(
        hook, pipeline, run, **{"group_id": pipeline, "topic": ledger_topic_name, "hint_topics": (topic,), **options}
    )


def window(pipeline: str, topic: str, number: int, run: str = "run1") -> Window:
    return Window(pipeline, number, (OffsetRange(topic, 0, number * 10 - 10, number * 10),), run, "", "c", {topic: "id"})


def wide(pipeline: str, topic: str, partitions: int) -> Window:
    """Return a window of many partitions with random offsets."""
    rng = random.Random(1)
    starts = [rng.randrange(10**9) for _ in range(partitions)]
    ranges = tuple(OffsetRange(topic, p, start, start + rng.randrange(10**5)) for p, start in enumerate(starts))
    return Window(pipeline, 1, ranges, "run1", "", "c", {topic: "id"})


def test_brokers_that_allow_shorter_transactions_only_are_named_with_the_setting_to_change(
    hook, attempt, pipeline, topic, ledger_topic_name, monkeypatch
):
    """The brokers' default is 900 s."""
    with attempt() as ledger:
        ledger.plan(window(pipeline, topic, 1))
    monkeypatch.setattr(ledger_attempt, "TRANSACTION_SECONDS", 1_000)
    monkeypatch.setattr(control_base, "SECONDS", 1_000)
    said = "1000 s, which is more .* Set `transaction.max.timeout.ms` of the brokers to 1000000"
    with pytest.raises(KafkaRefused, match=said) as refused, attempt():
        pass
    assert not refused.value.retryable
    with pytest.raises(KafkaRefused, match="INVALID_TRANSACTION_TIMEOUT"):
        pause(hook, pipeline, why="test", ledger_topic=ledger_topic_name)


def test_a_window_of_20_000_partitions_is_planned_closed_and_remembered(attempt, pipeline):
    planned = wide(pipeline, "orders-of-the-whole-world", 20_000)
    records = {str(r.topic_partition): r.span for r in planned.ranges}
    ends = {str(tp): end for tp, end in planned.ends.items()}
    report = Report(planned, records=records, committed=ends, group_id=pipeline).to_dict()
    with attempt() as ledger:
        ledger.plan(planned)
        ledger.close(report, {})
    with attempt("run2") as ledger:
        assert ledger.memory.entries[1].window == planned
        assert ledger.memory.entries[1].report == json.loads(json.dumps(report))
        assert ledger.memory.position.offsets == planned.ends


def test_a_window_whose_close_would_not_fit_is_refused_before_it_is_planned(hook, attempt, pipeline, ledger_topic_name):
    hook.create_topic(ledger_topic_name, 1, 1, {"cleanup.policy": "compact", "max.message.bytes": "20000"})
    with attempt() as ledger:
        with pytest.raises(WindowTooWide) as caught:
            ledger.plan(wide(pipeline, "orders", 1_000))
        assert (caught.value.partitions, caught.value.largest) == (1_000, 20_000)
        assert caught.value.size > 20_000
    with attempt() as ledger:
        assert not ledger.memory.exists
        ledger.plan(wide(pipeline, "orders", 100))


def test_a_topic_that_is_not_compressed_is_known_as_such(hook, attempt, pipeline, ledger_topic_name):
    hook.create_topic(ledger_topic_name, 1, 1, {"cleanup.policy": "compact", "compression.type": "uncompressed"})
    with attempt() as ledger, pytest.raises(WindowTooWide):
        ledger.plan(wide(pipeline, "orders", 10_000))


def test_offsets_of_many_partitions_are_committed_in_one_transaction(kafka, hook, unique, pipeline):
    """The offsets do not fit into one batch of ``__consumer_offsets``."""
    topic = unique("wide")
    kafka.create_topic(topic, 400)
    offsets = [(TopicPartition(topic, partition), 7, "m" * 3_500) for partition in range(400)]
    producer = Producer({**hook.make_producer_config(), "transactional.id": pipeline})
    producer.init_transactions(60)
    producer.begin_transaction()
    send_offsets(producer, hook.make_consumer_config(), pipeline, offsets, 30)
    found = hook.read_committed_offsets(pipeline, [tp for tp, _, _ in offsets], stable=False)
    assert not any(found.values())
    producer.commit_transaction(60)
    found = hook.read_committed_offsets(pipeline, [tp for tp, _, _ in offsets])
    assert [there.offset for there in found.values()] == [7] * 400


def committed(hook, pipeline, topic):
    return hook.read_committed_offsets(pipeline, [TopicPartition(topic, 0)])[TopicPartition(topic, 0)]


def complete_one(attempt, pipeline, topic, number):
    with attempt(f"run{number}") as ledger:
        entry = ledger.plan(window(pipeline, topic, number, f"run{number}"))
        ledger.close({"n": number}, entry.window.ends)


def test_a_plan_is_seen_by_every_later_attempt(attempt, pipeline, topic):
    with attempt() as first:
        assert not first.memory.exists
        planned = first.plan(window(pipeline, topic, 1))
    with attempt("run2") as second:
        assert second.memory.open_entry.window == planned.window
        assert second.reopen(second.memory.open_entry).attempt.number == 2


def test_close_completes_the_window_and_moves_the_group_in_one_transaction(attempt, hook, pipeline, topic):
    complete_one(attempt, pipeline, topic, 1)
    with attempt("run2") as ledger:
        assert ledger.memory.open_entry is None
        assert ledger.memory.find_completed_by("run1").report == {"n": 1}
        assert ledger.memory.position.offsets == {TopicPartition(topic, 0): 10}
    offset = committed(hook, pipeline, topic)
    assert offset.offset == 10
    assert json.loads(offset.metadata)["window"] == "0000000001"


def test_the_group_is_committed_with_the_leader_epochs_of_the_window(attempt, hook, pipeline, topic):
    with attempt() as ledger:
        planned = replace(window(pipeline, topic, 1), epochs={TopicPartition(topic, 0): 0})
        ledger.plan(planned)
        ledger.close({"n": 1}, planned.ends)
    consumer = Consumer(hook.make_consumer_config(**{"group.id": pipeline}))
    (found,) = consumer.committed([KafkaTopicPartition(topic, 0)], timeout=60)
    consumer.close()
    assert (found.offset, found.leader_epoch) == (10, 0)


def test_death_inside_the_closing_transaction_leaves_neither(attempt, hook, pipeline, topic, monkeypatch):
    monkeypatch.setenv(faults.FAULT, "close.in_transaction:raise")
    monkeypatch.setattr("airflow_kafka_spark.ledger.attempt.CLOSE_TRIES", 1)
    with pytest.raises(Exception, match="fault injected"):
        complete_one(attempt, pipeline, topic, 1)
    monkeypatch.delenv(faults.FAULT)
    with attempt() as ledger:
        assert ledger.memory.open_entry.state is State.PLANNED
        assert committed(hook, pipeline, topic) is None


def test_a_failed_close_is_looked_up_and_tried_again(attempt, hook, pipeline, topic, monkeypatch, tmp_path):
    monkeypatch.setenv(faults.FAULT, "close.in_transaction:raise")
    monkeypatch.setenv(faults.ONCE, str(tmp_path / "fired"))
    complete_one(attempt, pipeline, topic, 1)
    assert (tmp_path / "fired").exists()
    assert committed(hook, pipeline, topic).offset == 10


def test_a_newer_attempt_fences_the_plan_of_an_older_one(attempt, pipeline, topic):
    with attempt() as zombie, attempt() as newer:
        with pytest.raises(Fenced):
            zombie.plan(window(pipeline, topic, 1))
        newer.plan(window(pipeline, topic, 1))


def test_a_newer_attempt_fences_the_close_of_an_older_one(attempt, hook, pipeline, topic):
    with attempt() as zombie:
        entry = zombie.plan(window(pipeline, topic, 1))
        with attempt() as newer:
            reopened = newer.reopen(newer.memory.open_entry)
            with pytest.raises(Fenced):
                zombie.verify()
            with pytest.raises(Fenced):
                zombie.close({"n": "zombie"}, entry.window.ends)
            assert committed(hook, pipeline, topic) is None
            newer.verify()
            newer.close({"n": "newer"}, reopened.window.ends)
    with attempt() as third:
        assert third.memory.find_completed_by("run1").report == {"n": "newer"}


@pytest.fixture
def hang(attempt, kafka, pipeline, topic, ledger_topic_name, unique):
    """Return a function that opens a transaction of another pipeline in this pipeline's partition of the ledger, after its
    records.
    """
    complete_one(attempt, pipeline, topic, 1)

    def open_one() -> Producer:
        with attempt() as ledger:
            partition = ledger.topic.read(pipeline).partition
        settings = {"transactional.id": unique("other"), "transaction.timeout.ms": 600_000}
        other = Producer({**kafka.connection_extra(), **settings})
        other.init_transactions(60)
        other.begin_transaction()
        other.produce(ledger_topic_name, b"{}", b'["other","window",1]', partition)
        other.flush(60)
        return other

    return open_one


@pytest.fixture
def hanging(hang):
    """A transaction of another pipeline that is open after this pipeline's first window."""
    return hang()


def test_another_pipelines_open_transaction_alone_delays_no_reader(attempt, hanging, monkeypatch):
    # Shorter than the brokers let the transaction stay open: waiting for its end would fail.
    monkeypatch.setattr(ledger_topic, "READ_SECONDS", 30.0)
    with attempt() as ledger:
        assert ledger.memory.last_number == 1
    hanging.abort_transaction(60)


def test_own_records_behind_another_pipelines_open_transaction_are_waited_for_not_looked_past(attempt, pipeline, topic, hanging):
    complete_one(attempt, pipeline, topic, 2)
    seen = []

    def look():
        with attempt("run3") as ledger:
            seen.append(ledger.memory.last_number)

    looking = threading.Thread(target=look)
    looking.start()
    looking.join(1.5)
    assert looking.is_alive(), "it read past, or gave up on, a transaction that hides its own records"
    hanging.commit_transaction(60)
    looking.join(300)
    assert seen == [2]


def test_a_pause_is_believed_only_once_it_is_known_that_no_open_transaction_hides_its_end(
    attempt, hook, pipeline, hang, ledger_topic_name
):
    pause(hook, pipeline, why="test", ledger_topic=ledger_topic_name)
    other = hang()
    resume(hook, pipeline, why="test", ledger_topic=ledger_topic_name)
    peeking = attempt("run2")
    thread = threading.Thread(target=peeking.peek)
    thread.start()
    thread.join(1.5)
    assert thread.is_alive(), "it took the pipeline for paused"
    other.abort_transaction(60)
    thread.join(300)
    assert not peeking.parent_memory.is_paused


def test_an_open_transaction_that_stays_is_an_error_with_advice(attempt, pipeline, topic, hanging, monkeypatch):
    complete_one(attempt, pipeline, topic, 2)
    monkeypatch.setattr(ledger_topic, "READ_SECONDS", 1.0)
    with pytest.raises(LedgerUnreadable, match="find-hanging") as refused, attempt():
        pass
    for said in ("pipeline `other`", "window 1", "--start-offset", "unblock other"):
        assert said in str(refused.value), "whose it is, and what ends it"
    hanging.abort_transaction(60)


@pytest.fixture
def open_split(hook, kafka, pipeline, ledger_topic_name):
    """Send a split's marker into the partition of the pipeline's ledger, in a transaction that is left open."""

    def open_one(owner: str, number: int, split: int) -> Producer:
        place = LedgerTopic(hook, ledger_topic_name)
        assert place.find_existing()
        settings = {"transactional.id": make_transactional_id(ledger_topic_name, owner, f"split.{split}")}
        producer = Producer({**kafka.connection_extra(), **settings, "transaction.timeout.ms": 600_000})
        producer.init_transactions(60)
        producer.begin_transaction()
        key, value = make_marker_record(owner, Marker(number, split))[:2]
        producer.produce(ledger_topic_name, value, key, place.read(pipeline).partition)
        producer.flush(60)
        return producer

    return open_one


@pytest.fixture
def left_open(attempt, pipeline, topic, open_split, unique):
    """A split of another pipeline whose task hangs between its marker and its commit, in the same partition of the ledger."""
    complete_one(attempt, pipeline, topic, 1)
    other = unique("other")
    producer = open_split(other, 7, 3)
    complete_one(attempt, pipeline, topic, 2)
    return other, producer


def test_the_open_transaction_of_an_own_dead_split_delays_no_failure_and_a_hidden_newer_attempt_is_seen(
    attempt, pipeline, topic, open_split, unique, monkeypatch
):
    monkeypatch.setattr(ledger_topic, "ABORT_AFTER_SECONDS", 1.0)
    with attempt() as ledger:
        ledger.plan(window(pipeline, topic, 1))
        own = open_split(pipeline, 1, 0)
        ledger.verify()
        # If the reader had waited for it, it would be aborted by now.
        own.commit_transaction(60)
        open_split(unique("other"), 1, 0)
        with attempt() as newer:
            newer.reopen(newer.memory.open_entry)
            with pytest.raises(Fenced):
                ledger.verify()


def test_a_transaction_that_another_pipeline_has_left_open_is_ended_before_long(attempt, left_open, monkeypatch, caplog):
    other, producer = left_open
    monkeypatch.setattr(ledger_topic, "ABORT_AFTER_SECONDS", 1.0)
    with caplog.at_level("WARNING"), attempt("run3") as ledger:
        assert ledger.memory.last_number == 2
    assert f"pipeline `{other}` (split 3 of window 7)" in caplog.text
    with pytest.raises(KafkaException):
        producer.commit_transaction(60)


def test_a_command_says_whose_transaction_is_open_and_ends_it(
    attempt, hook, pipeline, left_open, ledger_topic_name, kafka, capsys
):
    other, producer = left_open
    place = ["--bootstrap-servers", kafka.bootstrap_servers, "--ledger-topic", ledger_topic_name]
    assert main(["unblock", pipeline, "--dry-run", *place]) == 0
    assert "Open, in partition" in (output := capsys.readouterr().out) and f"pipeline `{other}` (split 3 of window 7)" in output
    assert main(["unblock", pipeline, *place]) == 0
    assert "Ended" in capsys.readouterr().out
    with attempt("run3") as ledger:
        assert ledger.memory.last_number == 2
    with pytest.raises(KafkaException):
        producer.commit_transaction(60)
    assert main(["unblock", pipeline, *place]) == 0
    assert "Nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["position", "claim", "new name"])
def test_the_open_transaction_of_a_command_that_has_died_is_ended_by_the_command_for_that(
    attempt, hook, pipeline, topic, ledger_topic_name, kind
):
    complete_one(attempt, pipeline, topic, 1)
    with ChangeLedger(hook, pipeline, "reset", topic=ledger_topic_name) as ledger:
        entry = ledger.memory.entries[1]
        producer = ledger._closer if kind == "claim" else ledger._planner
        records = {
            "position": [make_position_record(pipeline, ledger.memory.position, 1)],
            "claim": [make_window_record(replace(entry, state=State.PLANNED))],
            "new name": [make_change_record("other", Change(1, "rename", "ann", "why", "at", {}, {}, name=pipeline))],
        }
        producer.begin_transaction()
        ledger.send(producer, records[kind])
    dead = unblock(hook, pipeline, ledger_topic=ledger_topic_name)
    assert dead.ended and not dead.warnings
    with pytest.raises(KafkaException):
        producer.commit_transaction(60)


def test_a_member_that_joins_the_group_meanwhile_cannot_keep_a_flushed_window_open(attempt, hook, kafka, pipeline, topic):
    """Brokers accept transactional offsets for a group with members. Only before a window starts, members are an error."""
    with attempt() as ledger:
        entry = ledger.plan(window(pipeline, topic, 1))
        consumer = Consumer({**kafka.connection_extra(), "group.id": pipeline, "enable.auto.commit": False})
        try:
            joined = threading.Event()
            consumer.subscribe([topic], on_assign=lambda *_: joined.set())
            while not joined.is_set():
                consumer.poll(0.1)
            ledger.close({}, entry.window.ends)
        finally:
            consumer.close()
    assert committed(hook, pipeline, topic).offset == 10


def test_a_record_of_a_newer_version_is_refused(attempt, kafka, pipeline, topic, ledger_topic_name):
    complete_one(attempt, pipeline, topic, 1)
    with attempt() as ledger:
        partition = ledger.topic.read(pipeline).partition
    producer = Producer(kafka.connection_extra())
    producer.produce(ledger_topic_name, json.dumps({"v": 99}).encode(), make_window_key(pipeline, 2), partition)
    producer.flush(60)
    with pytest.raises(LedgerUnreadable, match="version 99"), attempt():
        pass


def test_a_newer_record_of_the_owner_of_a_group_is_refused(attempt, kafka, pipeline, ledger_topic_name):
    with attempt() as ledger:
        partition = ledger.topic.find_partition(pipeline)  # the group has the pipeline's name here
        producer = Producer(kafka.connection_extra())
        producer.produce(ledger_topic_name, json.dumps({"v": 99}).encode(), make_group_key(pipeline), partition)
        producer.flush(60)
        with pytest.raises(LedgerUnreadable, match=f"group `{pipeline}` has a record of version 99"):
            ledger.find_other_owner(pipeline)


def test_the_owner_of_a_group_is_found_after_the_ledger_topic_got_more_partitions(
    attempt, kafka, hook, pipeline, topic, ledger_topic_name
):
    names = (f"{pipeline}-group-{number}" for number in itertools.count())
    group = next(name for name in names if choose_partition(name.encode(), 40) > 0)
    hook.create_topic(ledger_topic_name, 1, 1, {"cleanup.policy": "compact"})
    with attempt(group_id=group) as ledger:
        ledger.plan(window(pipeline, topic, 1))
    kafka.create_partitions(ledger_topic_name, 40)
    other = Ledger(hook, f"{pipeline}-other", "run2", group_id=group, topic=ledger_topic_name)
    with other as ledger:
        assert ledger.topic.find_partition(group) > 0, "the owner's record is in partition 0"
        assert ledger.find_other_owner(group) == pipeline
        with pytest.raises(GroupOwned, match=f"mirrors pipeline `{pipeline}`"):
            ledger.refuse_taken()


def test_a_ledger_topic_that_is_not_compacted_or_takes_small_records_only_is_refused(attempt, hook, kafka, unique):
    name = unique("plain")
    kafka.create_topic(name, 1, {"cleanup.policy": "delete"})
    with pytest.raises(LedgerUnreadable, match="cleanup.policy"), attempt(topic=name):
        pass
    hook.create_topic(tiny := unique("tiny"), 1, 1, {"cleanup.policy": "compact", "max.message.bytes": "200"})
    with pytest.raises(LedgerUnreadable, match="its max.message.bytes is 200.*at least 16,384") as caught, attempt(topic=tiny):
        pass
    assert not caught.value.retryable


def test_old_windows_are_forgotten(attempt, pipeline, topic):
    for number in range(1, 6):
        with attempt(f"run{number}", keep_windows=2) as ledger:
            ledger.close({}, ledger.plan(window(pipeline, topic, number, f"run{number}")).window.ends)
    with attempt() as ledger:
        assert sorted(ledger.memory.entries) == [4, 5]
        assert ledger.memory.last_number == 5


def test_a_replay_that_is_too_old_by_now_is_complete_and_forgotten_by_the_next_window(attempt, pipeline, topic):
    for number in range(1, 4):
        with attempt(f"run{number}") as ledger:
            ledger.close({}, ledger.plan(window(pipeline, topic, number, f"run{number}")).window.ends)
    with attempt("run1") as ledger:
        ledger.replay(ledger.memory.entries[1])
    with attempt("run1", keep_windows=1) as ledger:
        ledger.reopen(ledger.memory.open_entry)
        ledger.close({"n": 1}, {})
    with attempt("run1", keep_windows=1) as ledger:
        done = ledger.find_completed("run1")
        assert (done.window.replay, done.report) == (1, {"n": 1}), "its run would plan a new window"
        ledger.close({}, ledger.plan(window(pipeline, topic, 4, "run4")).window.ends)
    with attempt() as ledger:
        assert sorted(ledger.memory.entries) == [4]


def counted(monkeypatch) -> list[int]:
    """Count the records that are read from a ledger."""
    read, original = [0], ledger_topic.read_span

    def counting(*args):
        for record in original(*args):
            read[0] += 1
            yield record

    monkeypatch.setattr(ledger_topic, "read_span", counting)
    return read


def write_history(kafka, name, partition, pipeline, topic, first, last, keep=100):
    """Return the records of ``last - first + 1`` windows in the ledger, as the ledger writes them."""
    producer = Producer({**kafka.connection_extra(), "linger.ms": 50, "queue.buffering.max.messages": 1_000_000})

    def send(record: LedgerRecord) -> None:
        producer.produce(name, record.value, record.key, partition)

    for number in range(first, last + 1):
        entry = WindowEntry(window(pipeline, topic, number, f"run{number}"), State.PLANNED, Attempt(1, "t", f"run{number}", ""))
        send(make_window_record(entry))
        send(make_window_record(WindowEntry(entry.window, State.COMPLETE, entry.attempt, {"n": number})))
        send(make_position_record(pipeline, Position(entry.window.ends, {topic: "id"}, "c"), number))
        if number > keep:
            send(LedgerRecord(make_window_key(pipeline, number - keep), None))
    producer.flush(60)


def test_reading_the_ledger_does_not_grow_with_the_age_of_the_pipeline(
    attempt, kafka, pipeline, topic, ledger_topic_name, monkeypatch
):
    complete_one(attempt, pipeline, topic, 1)
    with attempt() as ledger:
        partition = ledger.topic.read(pipeline).partition
    read = counted(monkeypatch)
    costs = []
    for first, last in ((2, 299), (301, 10_000)):
        write_history(kafka, ledger_topic_name, partition, pipeline, topic, first, last)
        complete_one(attempt, pipeline, topic, last + 1)  # writes the short cut into the group's offsets
        read[0] = 0
        with attempt("look") as ledger:
            assert ledger.memory.last_number == last + 1
            assert len(ledger.memory.entries) == 100
        costs.append(read[0])
    assert 0 < costs[1] <= costs[0] + 10, f"records read after 300 and after 10 001 windows: {costs}"
    assert costs[1] < 1000


def test_expired_group_offsets_cost_only_the_short_cut(attempt, hook, pipeline, topic):
    for number in (1, 2, 3):
        complete_one(attempt, pipeline, topic, number)
    with attempt("other", group_id=pipeline + "-never-committed") as ledger:
        assert ledger.hint is None
        assert ledger.memory.last_number == 3


def test_a_pipeline_is_found_when_partitions_were_added_to_the_ledger(attempt, hook, kafka, topic, unique):

    name = unique("grown")
    kafka.create_topic(name, 1, {"cleanup.policy": "compact"})
    pipelines = [unique("p") for _ in range(6)]
    for pipeline in pipelines:
        with Ledger(hook, pipeline, "run", topic=name) as ledger:
            ledger.close({}, ledger.plan(window(pipeline, topic, 1)).window.ends)
    kafka.create_partitions(name, 7)
    for pipeline in pipelines:
        with Ledger(hook, pipeline, "run", topic=name) as ledger:
            assert ledger.memory.last_number == 1
            ledger.close({}, ledger.plan(window(pipeline, topic, 2)).window.ends)
        with Ledger(hook, pipeline, "run", topic=name) as ledger:
            assert ledger.memory.last_number == 2


LOST = "<method 'flush' of 'cimpl.Producer' objects> returned NULL without setting an exception"


@pytest.mark.parametrize("lost", [False, True], ids=["error", "error that the client has lost"])
@pytest.mark.parametrize("step", ["plan", "close"])
def test_an_attempt_fenced_inside_its_transaction_knows_it_and_does_not_fence_back(
    attempt, pipeline, topic, monkeypatch, step, lost
):
    with attempt() as zombie:
        original, newer = zombie.send, attempt()

        def overtaken(producer, records):
            monkeypatch.undo()
            newer.__enter__()
            try:
                return original(producer, records)
            except (KafkaException, SystemError):
                if not lost:
                    raise
                zombie._events = ClientEvents()
                raise SystemError(LOST) from None

        if step == "close":
            zombie.plan(window(pipeline, topic, 1))
        monkeypatch.setattr(zombie, "send", overtaken)
        with pytest.raises(Fenced):
            zombie.plan(window(pipeline, topic, 1)) if step == "plan" else zombie.close({}, {})
        entry = newer.plan(window(pipeline, topic, 1)) if step == "plan" else newer.reopen(newer.memory.open_entry)
        newer.close({}, entry.window.ends)


def test_what_an_older_attempt_writes_until_it_is_fenced_is_seen(attempt, pipeline, topic, monkeypatch):
    """The older attempt completes its window just before the newer one fences it."""
    with attempt() as older:
        entry = older.plan(window(pipeline, topic, 1))
        newer = attempt()
        fence = newer._fence

        def completed_before(purpose, **settings):
            if purpose == "close":
                older.close({"n": "older"}, entry.window.ends)
            return fence(purpose, **settings)

        monkeypatch.setattr(newer, "_fence", completed_before)
        with newer:
            assert newer.memory.open_entry is None
            assert newer.memory.find_completed_by("run1").report == {"n": "older"}


def test_pipelines_of_two_ledger_topics_with_dots_do_not_fence_each_other(hook, unique):
    first, pipeline = unique("team"), unique("orders")
    with (
        Ledger(hook, pipeline, "run", topic=f"{first}.daily") as one,
        Ledger(hook, f"daily.{pipeline}", "run", topic=first) as other,
    ):
        for ledger in (one, other):
            ledger.close({}, ledger.plan(window(ledger.pipeline, "t", 1)).window.ends)


HOUR = Interval.of_ms(0, 3_600_000)
OF_HOUR = [f"l.{HOUR.make_ledger_name('p')}.plan", f"l.{HOUR.make_ledger_name('p')}.close"]
PLANNED = WindowEntry(Window("p", 2, (), "run", ""), State.PLANNED, Attempt(1, "t", "run", ""))


@pytest.mark.parametrize(
    ("record", "ids"),
    [
        (make_window_record(PLANNED), ["l.p.plan", "l.p.close"]),
        (make_window_record(replace(PLANNED, state=State.COMPLETE)), ["l.p.plan", "l.p.close"]),
        (LedgerRecord(make_window_key("p", 2), None), ["l.p.plan", "l.p.close"]),
        (LedgerRecord(make_window_key(HOUR.make_ledger_name("p"), 1), None), [*OF_HOUR, "l.p.group", "l.p.plan"]),
        (make_position_record("p", Position(), 1), ["l.p.plan", "l.p.close"]),
        (make_change_record("p", Change(1, "reset", "ann", "why", "at", {}, {})), ["l.p.plan", "l.p.close"]),
        (
            make_change_record("p", Change(1, "rename", "ann", "why", "at", {}, {}, name="o")),
            ["l.p.plan", "l.p.close", "l.o.plan"],
        ),
        (make_marker_record("p", Marker(2, 5)), ["l.p.split.5"]),
        (LedgerRecord(make_dead_letters_key("p", 2), b"{}"), ["l.p.dead"]),
        (make_interval_record("p", IntervalState(HOUR, State.PLANNED, ())), OF_HOUR),
        (make_interval_record("p", IntervalState(HOUR, State.COMPLETE, ())), OF_HOUR),
        (LedgerRecord(make_interval_key("p", HOUR), None), [*OF_HOUR, "l.p.plan", "l.p.close", "l.p.group"]),
        (make_interval_record("p", IntervalState(HOUR, State.COMPLETE, (), forgotten=True)), ["l.p.group"]),
        (make_archive_record("p", IntervalArchive.of([IntervalState(HOUR, State.COMPLETE, ())])), ["l.p.group"]),
        (LedgerRecord(b'["p","control",3]', b"{}"), ["l.p.control"]),
        (LedgerRecord(b'["p","binding"]', b"{}"), ["l.p.binding"]),
        (LedgerRecord(b'["p","binding"]', None), ["l.p.plan", "l.p.close", "l.p.binding"]),
        (make_group_record("g", "p"), ["l.g.owner"]),
        (LedgerRecord(make_group_key("g"), b'{"v":1,"pipeline":"p","by":"p.x"}'), ["l.p.x.plan"]),
        (LedgerRecord(b"not ours", b"{}"), []),
        (LedgerRecord(b"", None), []),
    ],
)
def test_a_record_shows_under_which_transactional_ids_it_may_have_been_written(record, ids):
    assert list(identify_transaction(record, 0).list_ids("l")) == ids


@pytest.mark.parametrize(
    "replicas, in_sync, brokers, found",
    [
        (1, 1, 1, ""),
        (3, 2, 3, ""),
        (1, 2, 3, "replication factor 1 on a cluster of 3 brokers"),
        (3, 1, 3, "`min.insync.replicas=1` on a cluster of 3 brokers"),
        (2, 1, 2, "Expected 2 replicas"),
    ],
)
def test_a_ledger_that_one_broker_can_lose_is_warned_of_where_there_are_others(replicas, in_sync, brokers, found):
    warning = may_lose_records("ledger", replicas, in_sync, brokers)
    assert found in warning and bool(warning) == bool(found)


def test_what_a_ledger_topic_may_lose_is_looked_up_when_it_is_opened(kafka, hook, unique, monkeypatch, caplog):
    name = unique("ledger")
    kafka.create_topic(name, 1, config={"cleanup.policy": "compact"})
    LedgerTopic(hook, name).ensure()
    assert hook.count_brokers() == 1 and "replication factor" not in caplog.text
    monkeypatch.setattr(hook, "count_brokers", lambda: 3)
    LedgerTopic(hook, name).ensure()
    assert "replication factor 1 on a cluster of 3 brokers" in caplog.text
