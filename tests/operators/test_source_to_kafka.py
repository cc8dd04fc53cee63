"""Windows of a table become records of a topic: counts, offsets, positions and partitions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import (
    ChangeRefused,
    ClusterChanged,
    KafkaSparkError,
    LedgerBehind,
    PipelineInOtherLedger,
    PipelineUnknown,
)
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.ledger.attempt import ChangeLedger
from airflow_kafka_spark.windows.memory import make_position_record
from tests.support.control import forget, rebind, reset
from tests.support.oracle import committed_records
from tests.support.shop import shop
from tests.support.timings import check_move


@pytest.fixture
def orders(kafka, postgres, unique, tmp_path):
    with shop(kafka, postgres, unique, tmp_path) as made:
        yield made


def test_every_row_becomes_one_record_and_the_report_holds_counts_and_first_and_last_offset_per_partition(orders):
    orders.sell(500)
    first = orders.run("run1")
    assert (first["records_read"], first["records_written"]) == (500, 500)
    assert orders.check() == 500
    found = {}
    for partition, offset, *_ in committed_records(orders.kafka.connection_extra(), orders.topic):
        found.setdefault(partition, []).append(offset)
    expected = [
        {"topic": orders.topic, "partition": p, "first": min(o), "last": max(o), "records": len(o)}
        for p, o in sorted(found.items())
    ]
    assert first["published"] == expected and len(expected) == 3
    check_move(first, "read", "decode", "write")
    again = orders.run("run1")
    assert again == first, "a cleared task publishes nothing and returns the same report"
    orders.sell(1)
    second = orders.run("run2")
    assert (second["window"], second["records_written"]) == ("0000000002", 1)
    third = orders.run("run3")
    assert third["records_written"] == 0
    assert orders.check() == 501


def test_a_split_whose_reading_breaks_off_in_the_jvm_is_not_published_in_part(orders):
    """Arrow takes a stream that breaks off for one that ends: what was handed over so far must not pass for the split."""
    orders.sell(70_000)
    with orders.postgres.connect(autocommit=True) as connection:
        connection.execute(f"UPDATE \"{orders.table}\" SET placed_at = 'infinity' WHERE id = 69990")
    whole = {"source": {"split_records": 100_000}, "read_with": "spark"}
    with pytest.raises(KafkaSparkError, match="placed_at"):
        orders.run(**whole)
    assert orders.records() == []
    with orders.postgres.connect(autocommit=True) as connection:
        connection.execute(f'UPDATE "{orders.table}" SET placed_at = now() WHERE id = 69990')
    assert orders.run(**whole)["records_written"] == 70_000
    assert orders.check() == 70_000


class TestALedgerThatIsLost:
    """The group says which window was planned and published last, with an offset of the topic that is published to, too."""

    @pytest.fixture
    def lost(self, orders):
        orders.sell(300)
        orders.run("run1")
        orders.sell(20)
        return orders

    def lose(self, orders):
        orders.wait_settled()
        orders.kafka.delete_topic(f"ledger-{orders.name}")

    def refused(self, orders, *, window: int, run: str = "run2") -> LedgerBehind:
        with pytest.raises(LedgerBehind) as refused:
            orders.run(run)
        error = refused.value
        group = f"ledger-{orders.name}.{orders.name}"
        assert (error.window, error.known, error.group_id, error.to) == (window, 0, group, f"committed:{group}")
        assert f"--to committed:{group} --only {orders.topic} " in error.action
        return error

    def command(self, orders, error, action, *arguments, **options):
        with KafkaHook() as hook:
            given = {"why": "the ledger is lost", "ledger_topic": f"ledger-{orders.name}", "group_id": error.group_id}
            return action(hook, orders.name, *arguments, **given, **options)

    def test_no_row_is_published_again_and_the_command_that_is_named_continues(self, lost):
        self.lose(lost)
        error = self.refused(lost, window=1)
        assert "in part" not in error.action
        dry = self.command(lost, error, reset, error.to, only=[lost.topic], dry_run=True)
        assert (dry.change, dry.moves, dry.group_id) == (1, (), error.group_id)
        self.command(lost, error, reset, error.to, only=[lost.topic])
        report = lost.run("run2")
        assert (report["window"], report["records_written"]) == ("0000000002", 20)
        assert lost.check() == 320
        with pytest.raises(ChangeRefused, match="names no window that the ledger does not know"):
            self.command(lost, error, reset, error.to, only=[lost.topic])

    def test_with_a_column_of_topics_the_group_names_the_window_in_one_of_them(self, orders):
        with orders.postgres.connect(autocommit=True) as connection:
            connection.execute(f"ALTER TABLE \"{orders.table}\" ADD COLUMN topic text DEFAULT '{orders.topic}'")
        orders.options |= {"topic": None, "topic_column": "topic"}
        for number, sold in enumerate((300, 20), 1):
            orders.sell(sold)
            assert orders.run(f"run{number}")["records_written"] == sold
        orders.sell(30)
        self.lose(orders)
        error = self.refused(orders, window=2, run="run3")
        self.command(orders, error, reset, error.to, only=[orders.topic])
        assert orders.run("run3")["records_written"] == 30
        assert orders.check() == 350

    def test_a_window_that_was_only_planned_is_named_as_such_and_moved_from_its_beginning(self, lost, monkeypatch):
        with monkeypatch.context() as dying:
            dying.setattr(faults, "reached", lambda point: 1 / 0 if point == "planned" else None)
            with pytest.raises(ZeroDivisionError):
                lost.run("run2")
        self.lose(lost)
        error = self.refused(lost, window=2)
        assert "Window 2 may be published in part" in error.action
        self.command(lost, error, reset, error.to, only=[lost.topic])
        assert lost.run("run2")["window"] == "0000000003"
        assert lost.check() == 320

    def test_with_another_ledger_topic_and_forgotten_with_its_group_it_publishes_all_rows_again(self, lost, unique):
        other = unique("other")
        with pytest.raises(PipelineInOtherLedger, match=f"Set `ledger_topic` to `ledger-{lost.name}`"):
            lost.run("run2", ledger_topic=other)
        self.lose(lost)
        with pytest.raises(PipelineInOtherLedger):
            lost.run("run2", ledger_topic=other)
        error = self.refused(lost, window=1)
        with pytest.raises(PipelineUnknown):
            self.command(lost, error, forget)
        self.command(lost, error, forget, delete_group=True)
        assert lost.run("run2", ledger_topic=other)["records_written"] == 320
        assert len(lost.records()) == 620

    def test_a_ledger_of_another_cluster_says_nothing_until_somebody_says_that_it_does(self, lost):
        """MirrorMaker may have copied the ledger. The copy of the topic that is published to may be behind it, or ahead."""
        name = lost.name
        lost.wait_settled()
        with KafkaHook() as hook, ChangeLedger(hook, name, "copied", topic=f"ledger-{name}") as ledger:
            elsewhere = replace(ledger.memory.position, cluster_id="another")
            ledger.commit_change([make_position_record(name, elsewhere, 1)], {}, lambda topic: "", lambda memory: False)
        for _ in range(2):
            with pytest.raises(ClusterChanged, match="another, which the ledger.*rebind <pipeline> --not-running"):
                lost.run("run2")
        assert len(lost.records()) == 300
        with KafkaHook() as hook:
            rebind(hook, name, why="both copies are complete", ledger_topic=f"ledger-{name}")
        assert lost.run("run2")["records_written"] == 20
        assert lost.run("run3")["records_written"] == 0
        assert lost.check() == 320

    def test_a_topic_that_was_created_anew_gets_all_rows(self, lost):
        self.lose(lost)
        lost.kafka.delete_topic(lost.topic)
        lost.kafka.create_topic(lost.topic, 3)
        assert lost.run("run2")["records_written"] == 320
        assert lost.check() == 320
