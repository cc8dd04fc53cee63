"""Changes are captured into topics and applied to a copy, while attempts at the windows are killed."""

from __future__ import annotations

import pytest

from tests.sources.postgres_cdc.shop import captured
from tests.support.waiting import settled

IN_A_TASK = ("publish.mid", "publish.flushed", "publish.marked", "publish.committed")
POINTS = ("planned", "publish.flushed", "publish.committed", "job.done", "close.in_transaction", "cdc.advance")


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
        assert shop.run("end")["records_written"] == 0


@pytest.mark.faults
@pytest.mark.flaky(reruns=0)
def test_a_copy_of_a_table_that_was_read_while_it_changed_equals_it_whatever_is_killed(kafka, postgres, unique, tmp_path):
    """Chunks of a snapshot and windows of the log take turns; each dies at each point, and is read again in another snapshot."""
    options = {"snapshot": "initial", "snapshot_chunk_rows": 3, "snapshot_chunks_per_window": 2}
    with captured(kafka, postgres, unique, tmp_path, 7, **options) as shop, postgres.connect() as long:
        chunks = 0
        for number, point in enumerate((*POINTS, None, *POINTS)):
            shop.change(5)
            if number in (1, 7):  # open while chunks are read that do not include it
                rows = f"SELECT n, 'long' FROM generate_series({1000 * number}, {1000 * number + 5}) n"
                long.execute(f"INSERT INTO {shop.table('kept')} (id, note) {rows}".encode())
            if point is not None:
                victim = shop.victim(f"run{number}", fault=point)
                code = victim.wait()
                assert victim.fired, victim.tail()
                assert code == (1 if point in IN_A_TASK else -9), victim.tail()
            shop.change(5)
            chunks += shop.run(f"run{number}")["source_remaining"]
            if number in (4, 10):
                long.commit()
        shop.drain("drain")
        settled(shop.topic("cut"), shop.topic("kept"))
        assert shop.compare() > 0
        assert chunks == 13, "the snapshot ended before all points were reached"
        assert {op for op, _, _ in shop.events("kept")} >= {"r", "u", "d"}
        shop.change(60)
        shop.drain("drain of the log")
        assert shop.compare() > 0
