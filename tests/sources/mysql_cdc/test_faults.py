"""Changes are captured into a topic while attempts at the windows are killed."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from airflow_kafka_spark.errors import LogBehind, ValidationError
from airflow_kafka_spark.operators.visibility.progress import collect_metrics
from airflow_kafka_spark.sensors import SourceLogSensor
from airflow_kafka_spark.transforms import RegexRouter
from tests.sources.mysql_cdc.shop import CapturedTable, apply_changes, captured
from tests.support.mariadb import is_mysql, translate
from tests.support.oracle import same_multiset
from tests.support.runs import context
from tests.support.waiting import settled

IN_A_TASK = ("publish.flushed", "publish.committed")
POINTS = ("planned", *IN_A_TASK, "job.done", "close.in_transaction")


@pytest.mark.extended
@pytest.mark.faults
@pytest.mark.flaky(reruns=0)
@pytest.mark.parametrize("seed", [19])
def test_the_events_of_a_table_give_it_again_after_every_drain_whatever_is_killed(kafka, shop, unique, tmp_path, seed):
    """Random changes, of keys too, rolled back transactions, truncates, new files, a long transaction and a changed table."""
    with captured(kafka, shop, unique, tmp_path, seed) as made, shop.server.connect(autocommit=False) as long:
        assert made.run("begin")["records_written"] == 0
        for number, point in enumerate(POINTS):
            made.change(40, truncates=number != 2)
            if number == 1:  # open across two kills
                with long.cursor() as cursor:
                    cursor.execute(translate("INSERT INTO kept (id, note) SELECT -seq, 'long' FROM seq_1000_to_1100"))
            victim = made.victim(f"run{number}", fault=point)
            code = victim.wait()
            assert victim.fired, victim.tail()
            assert code == (1 if point in IN_A_TASK else -9), victim.tail()
            if number == 2:
                long.commit()
                shop.execute("ALTER TABLE kept ADD COLUMN more int DEFAULT 5 FIRST")
            made.change(10, truncates=number != 1)
            assert made.run(f"run{number}")["records_written"] > 0
            if number in (2, 4):
                made.drain(f"drain{number}")
                settled(made.topic)
                assert made.compare() > 100
        assert collect_metrics(made.run("end"))["source_bytes_behind"] == 0


@pytest.mark.faults
@pytest.mark.flaky(reruns=0)
def test_the_events_of_a_table_that_was_read_while_it_changed_give_it_again_whatever_is_killed(kafka, shop, unique, tmp_path):
    """Windows of chunks and of the log take turns; an attempt at chunks dies at each point, and its retry has others.

    Tasks read by themselves, once Spark does for a transform. Meanwhile there are changes of keys, rolled back and long
    transactions, a truncate, a new column and a rebuilt table.
    """
    options = {"snapshot": "initial", "snapshot_chunk_rows": 2, "snapshot_chunks_per_window": 2}
    rows = "INSERT INTO kept (id, note) SELECT seq, 'first' FROM seq_2001_to_2060"  # that no random change deletes
    with captured(kafka, shop, unique, tmp_path, 7, **options) as made, shop.server.connect(autocommit=False) as long:
        shop.execute(rows)
        for number, point in enumerate(POINTS):
            made.options["transforms"] = [RegexRouter(r"(.*)\.shop\.(.*)", "$1.shop.$2")] if number == 2 else []
            if number in (0, 3):  # open while chunks are read that do not include it
                with long.cursor() as cursor:
                    first = (number + 1) * 1000
                    cursor.execute(translate(f"INSERT INTO kept (id, note) SELECT -seq, 'long' FROM seq_{first}_to_{first + 5}"))
            if number == 2 or is_mysql():  # where a chunk waits for such a transaction
                long.commit()
            if number == 2:
                shop.execute("TRUNCATE TABLE kept", rows, "ALTER TABLE kept ADD COLUMN more int DEFAULT 5 FIRST")
            for kind, fault in (("chunks", point), ("log", point if point == "publish.committed" else None)):
                made.change(5, truncates=False)
                if fault is not None:
                    victim = made.victim(f"{kind}{number}", fault=fault)
                    code = victim.wait()
                    assert victim.fired, victim.tail()
                    assert code == (1 if fault.startswith("publish.") else -9), victim.tail()
                made.change(5, truncates=False)
                report = made.run(f"{kind}{number}")
                assert report.get("source_remaining"), "the snapshot ended before all points were reached"
        long.commit()
        shop.execute("ALTER TABLE kept FORCE")
        made.drain("drain")
        settled(made.topic)
        assert made.compare() > 100
        for spoil in (lost, doubled, altered):
            with pytest.raises(AssertionError):
                made.compare(spoil)
        made.change(60)
        made.drain("drain of the log")
        settled(made.topic)
        made.compare()
        check_sensor(made)


def last_change(records: list[Any]) -> int:
    return max(at for at, record in enumerate(records) if b'"op":"c"' in (record[3] or b"") or b'"op":"u"' in (record[3] or b""))


def lost(records: list[Any]) -> list[Any]:
    return [record for at, record in enumerate(records) if at != last_change(records)]


def doubled(records: list[Any]) -> list[Any]:
    first = next(at for at, record in enumerate(records) if b'"op":"r"' in (record[3] or b""))
    return [*records[: first + 1], *records[first:]]


def altered(records: list[Any]) -> list[Any]:
    at = last_change(records)
    partition, offset, key, value = records[at]
    event = json.loads(value)
    event["after"]["note"] = "another"
    return [*records[:at], (partition, offset, key, json.dumps(event).encode()), *records[at + 1 :]]


@pytest.mark.faults
@pytest.mark.flaky(reruns=0)
def test_a_copy_of_a_table_in_postgresql_equals_it_after_every_drain(kafka, shop, postgres, unique, tmp_path):
    options = {"snapshot": "initial", "snapshot_chunk_rows": 20}
    with captured(kafka, shop, unique, tmp_path, 23, **options) as made, postgres.connect(autocommit=True) as connection:
        copy = made.name.replace("-", "_")
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute(
            f"CREATE TABLE {copy} (id bigint PRIMARY KEY, note text, amount numeric(12,2), at timestamp, raw bytea)"
        )
        os.environ["AIRFLOW_CONN_WAREHOUSE"] = postgres.connection_uri()
        for number in range(3):
            made.change(60, truncates=False)
            made.drain(f"drain{number}")
            settled(made.topic)
            apply_changes(made, copy).execute(context(f"apply{number}", task_id="apply"))
            there = connection.execute(f"SELECT id, note, amount, at, encode(raw, 'hex') FROM {copy}").fetchall()
            kept = shop.rows("SELECT id, note, amount, at, LOWER(HEX(raw)) FROM kept")
            assert same_multiset(kept, there) > 10


def check_sensor(made: CapturedTable) -> None:
    """A sensor waits until the pipeline is at most so far behind, and fails when it is too far."""

    def poke(**options: Any) -> Any:
        source, ledger = made.make(made.arguments["source"]).source, f"ledger-{made.name}"
        given = {"source": source, "pipeline": made.name, "ledger_topic": ledger, **options}
        return SourceLogSensor(task_id="behind", **given).poke({})

    assert poke(at_most_bytes=1000).xcom_value["bytes_behind"] < 1000, "a few events of the server's own may be there"
    assert not poke(at_most_bytes=1000, pipeline="unknown").is_done
    made.change(20, truncates=False)
    found = poke(at_most_bytes=1000)
    assert not found.is_done and found.xcom_value["bytes_behind"] > 1000
    assert poke(at_most_bytes=1 << 30, fail_above_bytes=1 << 30).is_done
    with pytest.raises(LogBehind, match=f"pipeline `{made.name}`; expected at most 1,000"):
        poke(fail_above_bytes=1000)
    with pytest.raises(ValidationError, match="nothing to wait for"):
        poke()
    made.drain("after the sensor")
    assert poke(at_most_bytes=1000).is_done
