"""Requested replays end to end: rows are replaced once, and offsets do not move."""

from __future__ import annotations

import pytest

from airflow_kafka_spark.errors import BadRecords, DataLoss, ValidationError
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.hooks.kafka.log import read_log
from airflow_kafka_spark.ledger.attempt import Ledger
from airflow_kafka_spark.sinks import PostgresSink
from airflow_kafka_spark.windows.model import OffsetRange, State, TopicPartition, Window
from tests.support.clients import find_producer
from tests.support.control import replay, skip
from tests.support.intervals import Intervals
from tests.support.late import LatePostgresSink
from tests.support.oracle import same_multiset, wait_stable
from tests.support.pipelines import row_of


def ask(action, pipeline, **options):
    # Brokers acknowledge a commit before all readers see it, and a look into the ledger does not wait for that.
    wait_stable(pipeline.kafka.connection_extra(), f"ledger-{pipeline.name}")
    with KafkaHook() as hook:
        return action(hook, pipeline.name, why="spoilt rows", who="ann", ledger_topic=f"ledger-{pipeline.name}", **options)


def spoil(pipeline, window: str = "") -> int:
    """Change the rows of a window, or of all windows; return the number of rows."""
    with pipeline.postgres.connect(autocommit=True) as connection:
        where = f"WHERE \"window\" LIKE '%{window}%'" if window else ""
        return connection.execute(f"UPDATE \"{pipeline.place}\" SET customer = 'spoilt' {where}").rowcount


def expected(pipeline):
    return [row_of(value) for *_, value in pipeline.events()]


def test_a_window_is_moved_once_more_once_though_its_operator_says_skip(table):
    with table.postgres.connect(autocommit=True) as connection:
        connection.execute(f'ALTER TABLE "{table.place}" ADD COLUMN "window" text')
    sink = PostgresSink(conn_id="warehouse", table=table.place, window_column="window")
    table.options |= {"sink": sink, "on_rerun": "skip"}
    table.produce(80)
    first = table.run("run1")
    table.produce(30)
    table.run("run2")
    group = table.committed()
    assert spoil(table) == 110
    asked = ask(replay, table, window=1)
    assert (asked.window.dag_id, asked.window.run_id, asked.window.task_id) == ("dag", "run1", "task")
    with pytest.raises(ValidationError, match="window_column"):
        table.run("run1", facts={"max_tries": 1}, sink=PostgresSink(conn_id="warehouse", table=table.place))
    again = table.run("run1", facts={"max_tries": 1})
    assert (again["replay"], again["records_read"], again["ranges"]) == (1, 80, first["ranges"])
    rows = table.rows()
    assert len(rows) == 110 and sum(row[1] == "spoilt" for row in rows) == 30, "the rows of run2 are as they were"
    assert table.committed() == group
    assert table.run("run1", facts={"max_tries": 2}) == again, "a second clear does nothing"
    assert ask(replay, table, window=2).changed
    table.run("run2", facts={"max_tries": 1})
    assert same_multiset(expected(table), table.rows()) == 110
    # Deleted records are found before anything is planned: a replay that cannot end would block all later windows.
    with KafkaHook() as hook:
        hook.delete_records({TopicPartition(table.topic, p): offset for p, offset in group.items()})
    with pytest.raises(DataLoss):
        table.run("run2", facts={"max_tries": 2}, on_rerun="replay")
    # Those that are deleted between this check and the tasks are no gap of a replay, whatever `data_loss` says.
    table.produce(5)
    table.run("run3")

    def delete() -> None:
        with KafkaHook() as hook:
            hook.delete_records({TopicPartition(table.topic, p): offset for p, offset in table.committed().items()})

    late = LatePostgresSink(conn_id="warehouse", table=table.place, window_column="window", before=delete)
    with pytest.raises(DataLoss, match="A replay would remove their rows from the sink, whatever `data_loss` says"):
        table.run("run3", facts={"max_tries": 1}, on_rerun="replay", data_loss="skip", sink=late)
    assert len(table.rows()) == 115
    ask(skip, table, running=False)
    table.produce(5)
    assert table.run("run4")["records_read"] == 5
    assert len(table.rows()) == 120


def test_where_directories_cannot_be_exchanged_a_replay_is_refused_before_it_is_planned(files, monkeypatch):
    """A file system like NFS. Windows are planned and closed in the ledger only, because refusals need no Spark."""
    # The kernel rejects an unknown flag with the error of a file system that does not support the real flag.
    monkeypatch.setattr("airflow_kafka_spark.sinks.files.directory._RENAME_EXCHANGE", 1 << 20)
    files.produce(30)
    cleared = {"max_tries": 1}
    with KafkaHook() as hook:
        options = {"group_id": files.name, "topic": f"ledger-{files.name}"}
        log = read_log(hook, [files.topic])
        ranges = tuple(OffsetRange(*tp, there.low, there.high) for tp, there in sorted(log.partitions.items()))
        window = Window(files.name, 1, ranges, "dag/run1/task", "", log.cluster_id, log.topic_ids)
        with Ledger(hook, files.name, window.run, **options) as ledger:
            entry = ledger.plan(window)
            ledger.close({"group_id": files.name}, window.ends)

        def known():
            wait_stable(files.kafka.connection_extra(), options["topic"])
            with Ledger(hook, files.name, "look", **options) as ledger:
                return ledger.memory.entries[1]

        with pytest.raises(ValidationError, match="in one step"):
            files.run("run2", on_rerun="replay")
        ask(replay, files, window=1)
        with pytest.raises(ValidationError, match="in one step"):
            files.run("run1", facts=cleared)
        assert (known().state, known().attempt) == (State.COMPLETE, entry.attempt)
        # One that is open already, as when the table was moved to another file system meanwhile.
        with Ledger(hook, files.name, "dag/run1/task", **options) as ledger:
            opened = ledger.replay(ledger.memory.entries[1])
        for run in ("run1", "run2"):
            with pytest.raises(ValidationError, match=f"skip {files.name}"):
                files.run(run, facts=cleared)
        assert known().attempt == opened.attempt, "it was not taken up"
        assert [w.number for w in ask(skip, files, running=False).given_up] == [1]
        assert known().state is State.COMPLETE


def test_an_interval_is_moved_once_more_by_its_name(table):
    intervals = Intervals(table, table=True)
    table.options["on_rerun"] = "skip"
    intervals.fill()
    reports = [intervals.run(number) for number in (0, 1)]
    _, second = sorted(intervals.rows())
    assert spoil(table, second) > 5
    assert ask(replay, table, name=second).changed
    assert intervals.run(1)["replay"] == 1
    assert intervals.run(1, cleared=1)["replay"] == 1, "a second clear does nothing"
    assert intervals.check(reports) > 10


def test_a_poisoned_window_is_skipped_and_the_next_one_continues_with_nothing_doubled(table):
    table.produce(60)
    table.run("run1")
    before = table.committed()
    table._produced += 1
    producer = find_producer(table.kafka, table.topic)
    producer.produce(table.topic, b"no json", b"poison", 0)
    assert producer.flush(60) == 0
    table.produce(20)
    with pytest.raises(BadRecords):
        table.run("run2")
    done = ask(skip, table, running=False)
    assert ([(w.number, w.attempts) for w in done.given_up], done.skipped_offsets) == ([(2, 1)], 21)
    assert table.committed() == {m.partition: m.after for m in done.moves} != before
    table.produce(40)
    report = table.run("run2")
    assert (report["window"], report["records_read"]) == ("0000000003", 40)
    skipped = {(g.partition, offset) for g in done.skipped for offset in range(g.start, g.end)}
    kept = [row_of(value) for partition, offset, _, value in table.events() if (partition, offset) not in skipped]
    assert same_multiset(kept, table.rows()) == 100
