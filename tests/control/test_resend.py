"""Sending dead letters again, on a real broker: each exactly once to its original topic, also after a kill."""

from __future__ import annotations

import json
from datetime import datetime, timezone

import pytest
from confluent_kafka import Producer

from airflow_kafka_spark.bad_records.dead_letters import find_known_dead_letters, find_resent
from airflow_kafka_spark.control.pipelines import to_json
from airflow_kafka_spark.errors import ResendRefused, WindowOpen
from airflow_kafka_spark.hooks.kafka.log import read_log
from airflow_kafka_spark.ledger.attempt import format_utc_now
from airflow_kafka_spark.ledger.interval import IntervalLedger
from airflow_kafka_spark.operators import PipelineOffsetsOperator
from airflow_kafka_spark.windows.interval import Interval
from airflow_kafka_spark.windows.model import BadRecord, Followed, OffsetRange, SourcePlan, Window
from tests.support.control import pause, rebind, replay, resend, resume, skip
from tests.support.dead_letters import send_dead_letters
from tests.support.oracle import committed_messages
from tests.support.piped import BASE
from tests.support.runs import Victim

HEADERS = [("trace", b"7"), ("__connect.errors.of", b"another tool"), ("none", None)]


@pytest.fixture
def dead(moved):
    """Return the topic of the dead letters."""
    topic = f"{moved.topic}-dead"
    moved.kafka.create_topic(topic, 2)
    return topic


def send(moved, ledger, dead, bad, with_context=True):
    """Send these offsets of partition 1 as dead letters, as the operator does."""
    places = [BadRecord(moved.topic, 1, offset, "no number", "VALUE_CONVERTER") for offset in bad]
    record = {
        "timestamp": [BASE + 1000 * offset for offset in bad],
        "key": [b"key%d" % offset for offset in bad],
        "value": [None if offset % 2 else b"\xff%d" % offset for offset in bad],
        "headers": [HEADERS] * len(bad),
    }
    send_dead_letters(moved.hook, ledger, dead, places, context_headers=with_context, **record)


def fail(moved, dead, bad, *ends, with_context=True):
    """Move a window in which these offsets of partition 1 are dead letters."""
    with moved.ledger() as ledger:
        entry = ledger.plan(moved.window(ledger, *ends))
        send(moved, ledger, dead, bad, with_context)
        report = {"group_id": moved.name, "completed_at": format_utc_now(), "timings": {"total": 1.0}}
        ledger.close(report, entry.window.ends)
    moved.settle()


@pytest.fixture
def ask(moved):
    def asked(*, is_open=False, **options):
        """Send letters again.

        :param is_open: True if another command has left its transaction open, for whose end nothing waits.
        """
        if not is_open:
            moved.settle()
        done = resend(moved.hook, moved.name, **{"why": "mended", "who": "ann", "window": 2, **moved.place, **options})
        moved.settle()
        return done

    return asked


def came_back(moved):
    """Return the records of the topic after the first twenty of each partition."""
    found = committed_messages(moved.kafka.connection_extra(), moved.topic)
    return [(m.partition(), m.key(), m.value(), m.timestamp()[1], m.headers()) for m in found if m.offset() >= 20]


def record(offset):
    value = None if offset % 2 else b"\xff%d" % offset
    return 1, b"key%d" % offset, value, BASE + 1000 * offset, HEADERS


def test_dead_letters_are_sent_again_once_as_they_were_read_to_where_they_came_from(moved, dead, ask):
    fail(moved, dead, [10, 11, 13], 15, 15)
    fail(moved, dead, [17], 18, 18)
    other = Producer(moved.kafka.connection_extra())
    other.produce(dead, b"of another pipeline", headers=[("__connect.errors.topic", moved.topic)])
    other.flush(60)
    before = moved.everything()
    plan = ask(dry_run=True)
    assert (plan.changed, [(p.topic, p.partition, p.records) for p in plan.sent_again]) == (True, [(moved.topic, 1, 3)])
    assert moved.everything() == before and came_back(moved) == []

    with moved.ledger() as at_work:
        done = ask()
        at_work.plan(moved.window(at_work, 19, 19))
    assert (done.changed, done.change, done.sent_of) == (True, plan.change, "2")
    assert came_back(moved) == [record(offset) for offset in (10, 11, 13)]
    again = ask()
    assert not again.changed and "sent again already: ann did so at" in again.warnings[0]
    assert ask(window=3).changed
    assert came_back(moved) == [record(offset) for offset in (10, 11, 13, 17)]
    assert [(c.action, c.window, c.who) for c in moved.memory.history] == [("resend", 3, "ann"), ("resend", 2, "ann")]
    json.dumps(to_json([done, moved.memory.history]))


def test_dead_letters_of_a_data_interval_are_sent_again_once(moved, dead, ask):
    hour = Interval(datetime(2026, 1, 1, tzinfo=timezone.utc), datetime(2026, 1, 1, 1, tzinfo=timezone.utc))
    fail(moved, dead, [10], 12, 12)
    with IntervalLedger(moved.hook, moved.name, "run-hour", hour, topic=moved.ledger_topic) as ledger:
        log, ranges = read_log(moved.hook, [moved.topic]), tuple(OffsetRange(moved.topic, p, 12, 16) for p in range(2))
        bounds = (hour.start_ms, hour.end_ms)
        ledger.plan(
            Window(ledger.pipeline, 1, ranges, ledger.run, format_utc_now(), log.cluster_id, log.topic_ids, interval=bounds)
        )
        send(moved, ledger, dead, [13, 14])
        ledger.close({"completed_at": format_utc_now()}, {})
    # A letter of another window between them is left alone.
    assert ask(window=None, name=hour.name).sent_of == hour.name
    assert came_back(moved) == [record(13), record(14)]
    assert not ask(window=None, name=f"{moved.name}.{hour.name}").changed
    assert ask().changed and len(came_back(moved)) == 3


def test_a_resend_is_remembered_as_long_as_its_window_however_many_changes_follow(moved, dead, ask, monkeypatch):
    monkeypatch.setattr("airflow_kafka_spark.control.base.KEEP_CONTROLS", 2)
    fail(moved, dead, [12], 15, 15)
    assert ask().changed
    assert replay(moved.hook, moved.name, window=2, why="x", **moved.place).changed
    moved.settle()
    assert rebind(moved.hook, moved.name, why="x", **moved.place).changed
    moved.settle()
    for turn in range(3):
        (resume if turn % 2 else pause)(moved.hook, moved.name, why="x", **moved.place)
        moved.settle()
    memory = moved.memory
    assert len(memory.controls) == 5 and [c.window for c in memory.counted_resends] == [2]
    # So are requests that were not carried out yet.
    assert [c.action for c in memory.pending_controls] == ["pause", "rebind", "replay"]
    # An attempt begins to read at that record or before it.
    assert memory.oldest_offset <= memory.counted_resends[0].offset
    assert not ask().changed and len(came_back(moved)) == 1


def victim(moved, tmp_path, fault):
    options = {"task_id": "offsets", "action": "resend", "pipeline": moved.name, "why": "a crash", "window": 2}
    given = {**options, "kafka_conn_id": "kafka_control", **moved.place}
    return Victim(PipelineOffsetsOperator, given, "manual", fault=fault, once=tmp_path / "fault")


def test_killed_inside_its_transaction_nothing_was_sent_and_a_repetition_sends_each_once(moved, dead, ask, tmp_path):
    fail(moved, dead, [10, 14], 15, 15)
    killed = victim(moved, tmp_path, "control.in_transaction")
    assert killed.wait() != 0 and killed.fired
    assert ask(why="again", is_open=True).changed
    assert came_back(moved) == [record(10), record(14)]
    assert [c.why for c in moved.memory.history] == ["again"]


def test_one_that_resumes_inside_its_transaction_sends_nothing_a_second_time(moved, dead, ask, tmp_path):
    fail(moved, dead, [10, 14], 15, 15)
    zombie = victim(moved, tmp_path, "control.in_transaction:stop")
    try:
        zombie.wait_stopped()
        assert ask(is_open=True).changed
        zombie.wake()
        assert zombie.wait() == 0, zombie.tail()
        assert zombie.result()["changed"] is False
        assert came_back(moved) == [record(10), record(14)]
    finally:
        zombie.end()


def test_a_replay_that_has_begun_shuts_out_a_resend_that_resumes_inside_its_transaction(moved, dead, ask, tmp_path):
    fail(moved, dead, [10, 14], 15, 15)
    zombie = victim(moved, tmp_path, "control.in_transaction:stop")
    try:
        zombie.wait_stopped()
        with moved.ledger() as ledger:
            entry = ledger.replay(ledger.memory.entries[2])
            assert find_known_dead_letters(ledger) is not None and find_resent(ledger) == {}
            zombie.wake()
            assert zombie.wait() != 0 and "WindowOpen" in zombie.tail(), zombie.tail()
            assert came_back(moved) == []
            # The replay finds both records good.
            ledger.close({"completed_at": format_utc_now(), "replay": 1}, {})
        assert entry.window.replay == 1
        with pytest.raises(ResendRefused, match="replay 1 has left out none"):
            ask()
    finally:
        zombie.end()
    # A later replay leaves out one of them without sending a letter: only this one is sent again.
    with moved.ledger() as ledger:
        ledger.replay(ledger.memory.entries[2])
        send(moved, ledger, dead, [14])
        ledger.close({"completed_at": format_utc_now(), "replay": 2}, {})
    assert ask().changed and came_back(moved) == [record(14)]
    assert not ask().changed
    # A replay that was given up may have changed the rows, or not.
    with moved.ledger() as ledger:
        ledger.replay(ledger.memory.entries[2])
        send(moved, ledger, dead, [11])
    moved.settle()
    skip(moved.hook, moved.name, why="x", running=False, **moved.place)
    moved.settle()
    assert not ask().changed and came_back(moved) == [record(14)], "11 may be a row"


def test_what_cannot_be_sent_again_is_refused_and_nothing_is_sent(moved, dead, ask):
    fail(moved, dead, [12], 15, 15, with_context=False)
    with pytest.raises(ResendRefused, match="None of the 1 dead letters .* was found.*context_headers_enable"):
        ask()
    with pytest.raises(ResendRefused, match="Window 1 .* has no dead letters"):
        ask(window=1)
    with pytest.raises(ResendRefused, match="remembers no window 9.*windows 1 to 2"):
        ask(window=9)
    with pytest.raises(ResendRefused, match="no data interval `2026`"):
        ask(window=None, name="2026")
    with pytest.raises(ValueError, match="either"):
        ask(window=None)
    with moved.ledger() as ledger:
        ledger.plan(moved.window(ledger, 16, 16, follows=Followed("upstream", 1, 1, 2)))
        ledger.close({"completed_at": format_utc_now()}, {})
    with pytest.raises(ResendRefused, match="follows `upstream`"):
        ask()
    moved.open_window(17, 17)
    with pytest.raises(WindowOpen):
        ask(window=4)
    assert came_back(moved) == [] and not moved.memory.history


def test_rows_of_a_source_are_not_sent_again(moved, dead, ask):
    with moved.ledger() as ledger:
        entry = ledger.plan(moved.window(ledger, 11, 11, source=SourcePlan(({"from": 1},))))
        ledger.close({"completed_at": format_utc_now(), "dead_letters": []}, entry.window.ends)
    with pytest.raises(ResendRefused, match="reads rows from a source"):
        ask()
