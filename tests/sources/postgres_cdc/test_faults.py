"""Changes are captured into topics and applied to a copy, while attempts at the windows are killed."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import pytest

from airflow_kafka_spark.errors import LedgerBehind, LogLost, SourceOwned
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.operators.visibility.progress import collect_metrics
from airflow_kafka_spark.transforms import Filter, TopicNameMatches
from tests.sources.postgres_cdc.shop import captured
from tests.support.control import forget, reset, skip
from tests.support.distribution import extended
from tests.support.oracle import same_multiset
from tests.support.waiting import fence_tasks, settled

IN_A_TASK = ("publish.mid", "publish.flushed", "publish.marked", "publish.committed")
POINTS = ("planned", "publish.flushed", "publish.committed", "job.done", "close.in_transaction", "cdc.advance")
# Where a window of chunks dies: records of a split are not there, are in an open transaction, or are committed; the ledger or the
# slot does not know of them. The steps between read no chunks: test_publish.py and tests/windows/test_ledger_model.py have them.
OF_CHUNKS = ("planned", "publish.mid", "publish.marked", "publish.committed", "job.done", "close.in_transaction", "cdc.advance")
ON_THE_LOG = ("publish.committed", "close.in_transaction")


@pytest.mark.extended
@pytest.mark.faults
@pytest.mark.flaky(reruns=0)
@pytest.mark.parametrize("seed", [19])
def test_a_copy_of_a_table_equals_it_after_every_drain_whatever_is_killed(kafka, postgres, unique, tmp_path, seed):
    """Random inserts, updates, deletes, changes of keys, truncates and a long transaction; every kind of kill, and a zombie."""
    with captured(kafka, postgres, unique, tmp_path, seed) as shop, postgres.connect() as long:
        assert shop.run("begin")["records_written"] == 0
        for number, point in enumerate(POINTS):
            shop.change(60)
            if number in (1, 3):  # open across two kills and a drain
                rows = f"SELECT n, 'long' FROM generate_series({1000 * number}, {1000 * number + 50}) n"
                long.execute(f"INSERT INTO {shop.table('kept')} (id, note) {rows}".encode())
            victim = shop.victim(f"run{number}", fault=point)
            code = victim.wait()
            assert victim.fired, victim.tail()
            assert code == (1 if point in IN_A_TASK else -9), victim.tail()
            shop.change(10)
            report = shop.run(f"run{number}")
            assert report["records_written"] > 0
            if number in (1, 3):
                continue
            long.commit()
            shop.drain(f"drain{number}")
            settled(shop.topic("cut"), shop.topic("kept"))
            assert shop.compare() > 0
            if number == 2:
                shop.compare_lakes("the first of the lakes")
        # A zombie wakes when the retry has published its window, and the next run has advanced the slot.
        shop.change(60)
        zombie = shop.victim("frozen", fault="publish.marked:stop", alone=True)
        zombie.wait_stopped()
        zombie.freeze()
        assert shop.run("frozen")["records_written"] > 0
        shop.change(30)
        assert shop.run("later")["records_written"] > 0
        zombie.wake()
        zombie.wait()
        assert "a newer attempt took over" in zombie.tail(), "whatever was ended of it"
        shop.drain("drain after the zombie")
        settled(shop.topic("cut"), shop.topic("kept"))
        assert shop.compare() > 0
        shop.compare_lakes("the last of the lakes")
        assert shop.run("end")["records_written"] == 0
        # Another pipeline with this slot would not get what was captured, and would advance it past what this one has read.
        other = f"{shop.name}-other"
        shop.change(20)
        with pytest.raises(SourceOwned, match=f"serves pipeline `{shop.name}`"):
            shop.run("begin", pipeline=other)
        settled(shop.topic("cut"), shop.topic("kept"), f"ledger-{shop.name}")
        with KafkaHook() as hook:
            forget(hook, shop.name, why="it is gone for good", ledger_topic=f"ledger-{shop.name}")
        assert shop.run("begin", pipeline=other)["records_written"] > 0, "it goes on where the slot stands"


@pytest.mark.faults
@pytest.mark.flaky(reruns=0)
def test_a_copy_of_a_table_that_was_read_while_it_changed_equals_it_whatever_is_killed(kafka, postgres, unique, tmp_path):
    """Windows of chunks and of the log take turns; an attempt at chunks dies, and its retry has other snapshots.
    Tasks read by themselves, or Spark does for a chain of transforms, in turn.
    """
    options = {"snapshot": "initial", "snapshot_chunk_rows": 2, "snapshot_chunks_per_window": 2}
    with captured(kafka, postgres, unique, tmp_path, 7, **options) as shop, postgres.connect() as long:
        rows = "SELECT n, 'first' FROM generate_series(2001, 2040) n"  # that no random change deletes
        shop.connection.execute(f"INSERT INTO {shop.table('kept')} (id, note) {rows}".encode())
        for number, point in enumerate(OF_CHUNKS):
            if number in (1, 4):  # open while chunks are read that do not include it
                rows = f"SELECT n, 'long' FROM generate_series({1000 * number}, {1000 * number + 5}) n"
                long.execute(f"INSERT INTO {shop.table('kept')} (id, note) {rows}".encode())
            shop.options["transforms"] = [Filter(predicate=TopicNameMatches("nothing"))] if number % 2 else []
            for kind, fault in (("chunks", point), ("log", point if point in ON_THE_LOG else None)):
                shop.change(5)
                if fault is not None:
                    victim = shop.victim(f"{kind}{number}", fault=fault)
                    code = victim.wait()
                    assert victim.fired, victim.tail()
                    assert code == (1 if fault in IN_A_TASK else -9), victim.tail()
                shop.change(5)
                report = shop.run(f"{kind}{number}")
                assert report.get("source_remaining"), "the snapshot ended before all points were reached"
            if number in (3, 6):
                long.commit()
        shop.drain("drain")
        settled(shop.topic("cut"), shop.topic("kept"))
        assert shop.compare() > 0
        assert {op for op, _, _ in shop.events("kept")} >= {"r", "u", "d"}
        shop.change(60)
        shop.drain("drain of the log")
        assert shop.compare() > 0
        assert collect_metrics(shop.run("end"))["source_bytes_behind"] == 0
        give_up_a_window_whose_slot_is_lost(shop)


def give_up_a_window_whose_slot_is_lost(shop):
    """As after a failover: the window that was planned before is refused until it is skipped. Then all rows are read again."""
    shop.snapshot |= {"snapshot": "when_needed", "snapshot_chunk_rows": 100}
    kept, ledger = shop.table("kept"), f"ledger-{shop.name}"
    shop.connection.execute(f"INSERT INTO {kept} (id, note) VALUES (901, 'planned')".encode())
    victim = shop.victim("lost", fault="planned")
    assert victim.wait() == -9 and victim.fired, victim.tail()
    shop.connection.execute(f"SELECT pg_drop_replication_slot('{shop.slot}')".encode())
    with pytest.raises(LogLost, match="the slot .* is gone"):
        shop.run("lost")
    with KafkaHook() as hook:
        skip(hook, shop.name, running=False, why="the server was replaced", ledger_topic=ledger)
    before = Counter((op, id) for op, id, _ in shop.events("kept"))
    shop.drain("all rows again")
    found = Counter((op, id) for op, id, _ in shop.events("kept")) - before
    read = sorted(id for _, id in found.elements())
    assert {op for op, _ in found} == {"r"}
    for table in (kept, shop.table("kept_copy")):
        assert sorted(id for (id,) in shop.connection.execute(f"SELECT id FROM {table}".encode())) == read


@contextmanager
def in_chunks(kafka, postgres, unique, tmp_path):
    """Yield a table of 60 rows, whose snapshot is read in a window of six chunks: more than two tasks publish until Spark notices
    that one has died."""
    options = {"snapshot": "initial", "snapshot_chunk_rows": 10, "snapshot_chunks_per_window": 6}
    with captured(kafka, postgres, unique, tmp_path, 5, **options) as shop:
        kept = shop.table("kept")
        shop.connection.execute(f"DELETE FROM {kept}".encode())
        shop.connection.execute(f"INSERT INTO {kept} (id, note) SELECT n, 'first' FROM generate_series(1, 60) n".encode())
        shop.snapshot["tables"] = [f"public.{kept}"]
        yield shop


def publish_half(shop):
    """Let an attempt at a window of chunks die. Return the keys of the rows that it has published."""
    victim = shop.victim("chunks", fault="publish.committed")
    assert victim.wait() == 1 and victim.fired, victim.tail()
    fence_tasks(shop.name, f"ledger-{shop.name}", 6)
    settled(shop.topic("kept"))
    first = {key for op, key, _ in shop.events("kept") if op == "r"}
    assert 0 < len(first) < 60, "some chunks are published, and some are not"
    return first


def change_a_row_of_each_kind(shop, first):
    """Delete a row that is published and one that is not, and change two others. Return the keys of both."""
    left, kept = set(range(2, 61)) - first, shop.table("kept")
    gone, changed = {min(first), min(left)}, {max(first), max(left)}
    shop.connection.execute(f"DELETE FROM {kept} WHERE id = ANY(%s)".encode(), [list(gone)])
    shop.connection.execute(f"UPDATE {kept} SET note = 'second' WHERE id = ANY(%s)".encode(), [list(changed)])
    return gone, changed


@pytest.mark.faults
@pytest.mark.flaky(reruns=0)
@pytest.mark.parametrize("point", [extended("job.done"), "close.in_transaction", "cdc.advance"])
def test_changes_behind_the_last_chunks_are_published_once_wherever_their_window_is_killed(
    kafka, postgres, unique, tmp_path, point
):
    """The killed attempt may have found that the log has no change behind the chunks. Changes are made before its retry."""
    with in_chunks(kafka, postgres, unique, tmp_path) as shop:
        victim = shop.victim("chunks", fault=point)
        assert victim.wait() == -9 and victim.fired, victim.tail()
        gone, changed = change_a_row_of_each_kind(shop, {2, 60})
        report = shop.run("chunks")
        assert (report["records_written"], "source_remaining" in report) == (60, point != "cdc.advance")
        shop.drain("drain")
        events = shop.events("kept")
        assert sorted(key for op, key, _ in events if op == "r") == list(range(1, 61))
        assert sorted((op, key) for op, key, _ in events if op != "r") == sorted(
            [*(("d", key) for key in gone), *(("u", key) for key in changed)]
        )
        kept, copied = (
            shop.connection.execute(f"SELECT id, note FROM {shop.table(kind)}".encode()).fetchall()
            for kind in ("kept", "kept_copy")
        )
        assert same_multiset(kept, copied) == 58


@pytest.mark.faults
@pytest.mark.flaky(reruns=0)
def test_rows_of_a_lost_window_of_chunks_that_were_deleted_since_are_deleted_after_the_reset(kafka, postgres, unique, tmp_path):
    """Who has lost the ledger does not know which chunks are published: they are read again, and no event is left out."""
    with in_chunks(kafka, postgres, unique, tmp_path) as shop:
        # The group then names a position within the snapshot.
        shop.run("begin", source={**shop.arguments["source"], "snapshot_chunk_rows": 1, "snapshot_chunks_per_window": 1})
        first = publish_half(shop) - {1}
        ledger, group = f"ledger-{shop.name}", f"ledger-{shop.name}.{shop.name}"
        settled(ledger)
        kafka.delete_topic(ledger)
        gone, changed = change_a_row_of_each_kind(shop, first)
        with pytest.raises(LedgerBehind, match="may be published in part, and is published again"):
            shop.run("next")
        with KafkaHook() as hook:
            only = [shop.topic("kept")]
            reset(hook, shop.name, f"committed:{group}", group_id=group, only=only, why="it is lost", ledger_topic=ledger)
        shop.drain("drain")
        copied = shop.connection.execute(f"SELECT id, note FROM {shop.table('kept_copy')}".encode()).fetchall()
        assert dict(copied) == {n: "second" if n in changed else "first" for n in range(1, 61) if n not in gone}


@pytest.mark.faults
@pytest.mark.flaky(reruns=0)
def test_a_window_of_chunks_that_is_given_up_is_not_read_again_and_its_rows_that_are_published_keep_their_changes(
    kafka, postgres, unique, tmp_path
):
    with in_chunks(kafka, postgres, unique, tmp_path) as shop:
        first = publish_half(shop)
        with KafkaHook() as hook:
            ledger = f"ledger-{shop.name}"
            skip(hook, shop.name, running=False, why="its rows cannot be read", ledger_topic=ledger)
        gone, changed = change_a_row_of_each_kind(shop, first)
        shop.drain("drain")
        events = shop.events("kept")
        assert sorted(key for op, key, _ in events if op == "r") == sorted(first)
        assert sorted((op, key) for op, key, _ in events if op != "r") == sorted(
            [*(("d", key) for key in gone), *(("u", key) for key in changed)]
        )
        copied = {id for (id,) in shop.connection.execute(f"SELECT id FROM {shop.table('kept_copy')}".encode()).fetchall()}
        assert copied == (first | changed) - gone
