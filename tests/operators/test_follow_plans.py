"""Windows that follow another pipeline, and the counts that they are compared with. After any manual change of either pipeline,
the next runs continue, and read each published record once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import Producer

from airflow_kafka_spark.control.pipelines import read_pipeline
from airflow_kafka_spark.errors import FollowBroken, FollowedMismatch
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.ledger.attempt import Ledger, format_utc_now
from airflow_kafka_spark.windows.memory import make_marker_record
from airflow_kafka_spark.windows.model import Landed, Marker, SourcePlan, TopicPartition, Window, merge_landed
from airflow_kafka_spark.windows.offset_specs import ShiftBy
from tests.support.clients import find_producer
from tests.support.control import forget, reset, skip
from tests.support.dry import DryOperator
from tests.support.oracle import wait_stable
from tests.support.runs import run


class Following(DryOperator):
    """Counts each offset as a record: without transactions, no offset is a marker."""

    def move(self, window, ledger):
        self.check_followed(window, window.span)
        return super().move(window, ledger)


class Pair:
    """A pipeline that publishes rows, and a pipeline that follows it."""

    def __init__(self, kafka, hook, unique, directory) -> None:
        self.kafka, self.hook = kafka, hook
        self.name, self.topic, self.ledger_topic = unique("publish"), unique("sold"), unique("ledger")
        self.moved, self.runs = directory / "moved", 0
        kafka.create_topic(self.topic, 2)

    # --- upstream ---

    def produce(self, *counts: int) -> tuple[Landed, ...]:
        producer = find_producer(self.kafka, self.topic)
        landed: list[Landed] = []

        def done(error, message) -> None:
            assert error is None
            landed.append(Landed(self.topic, message.partition(), message.offset(), message.offset(), 1))

        for partition, count in enumerate(counts):
            for _ in range(count):
                producer.produce(self.topic, b"v", None, partition, on_delivery=done)
        assert producer.flush(60) == 0
        return merge_landed(landed)

    def publish(self, *counts: int, dies: bool = False, **options) -> None:
        """Publish this many records to each partition, as one window.

        :param dies: after its split was published, and before the window is complete.
        """
        self.runs += 1
        with Ledger(self.hook, self.name, f"publish{self.runs}", topic=self.ledger_topic, **options) as ledger:
            number = ledger.memory.last_used + 1
            window = Window(
                self.name, number, (), f"publish{self.runs}", format_utc_now(), source=SourcePlan(({"n": 1},), {"at": number})
            )
            ledger.plan(window)
            landed = self.produce(*counts)
            record, place = make_marker_record(self.name, Marker(number, 0, landed)), ledger.ledger_claim
            producer = Producer(self.kafka.connection_extra())
            producer.produce(self.ledger_topic, record.value, record.key, place.partition)
            assert producer.flush(60) == 0
            if not dies:
                ledger.read_published()
                ledger.close({"published": [vars(part) for part in landed]}, {})
        self.settle()

    # --- downstream ---

    def load(self, *, again: bool = False, **options) -> dict:
        """Run the pipeline that follows.

        :param again: repeat the last run.
        """
        self.runs += not again
        given = {
            "topics": self.topic, "group_id": f"{self.name}-load", "pipeline": f"{self.name}-load", "follows": self.name,
            "ledger_topic": self.ledger_topic, "moved": self.moved,
        }  # fmt: skip
        report = run(Following, {**given, **options}, f"load{self.runs}")
        self.settle()
        return report

    def loaded(self, **options) -> tuple[int, int, int, int | None]:
        """Return the records that a run has read, and the first and last window of the other pipeline with their records."""
        report = self.load(**options)
        followed = report["follows"]
        return report["records_read"], followed["first"], followed["last"], followed["records"]

    # --- by hand ---

    def settle(self) -> None:
        wait_stable(self.kafka.connection_extra(), self.ledger_topic)

    def by_hand(self, change, *arguments, of: str = "", **options):
        self.settle()
        pipeline = f"{self.name}{of}"
        done = change(self.hook, pipeline, *arguments, why="a test", ledger_topic=self.ledger_topic, **options)
        self.settle()
        return done

    def followed(self) -> int:
        memory = read_pipeline(self.hook, f"{self.name}-load", self.ledger_topic).memory
        return memory.position.followed[self.name].number


@pytest.fixture
def pair(kafka, unique, tmp_path, monkeypatch) -> Iterator[Pair]:
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", kafka.connection_json())
    with KafkaHook("kafka_default") as hook:
        yield Pair(kafka, hook, unique, tmp_path)


class TestUpstream:
    """Changes of the pipeline that is followed."""

    @pytest.mark.parametrize("is_behind", [False, True], ids=["followed until then", "not followed yet"])
    def test_a_window_that_was_given_up_counts_with_the_records_that_it_had_published(self, pair, is_behind):
        pair.publish(3, 2)
        before = 5
        if not is_behind:
            assert pair.loaded() == (5, 1, 1, 5)
            before = 0
        pair.publish(4, 0, dies=True)
        pair.by_hand(skip, running=False)
        (change,) = read_pipeline(pair.hook, pair.name, pair.ledger_topic).memory.history
        assert (change.discarded, [part.records for part in change.landed or ()]) == ((2,), [4])
        assert pair.loaded() == (before + 4, 1 if is_behind else 2, 2, before + 4)
        pair.publish(1, 1)
        assert pair.loaded() == (2, 3, 3, 2)

    def test_a_pipeline_that_was_forgotten_publishes_again_and_all_of_it_is_read(self, pair):
        pair.publish(20, 20)
        pair.by_hand(forget)
        assert pair.loaded() == (40, 1, 1, 40), "what was complete when it was forgotten, is not lost to those who follow it"
        pair.publish(20, 20)
        assert pair.loaded() == (40, 2, 2, 40), "numbers go on: a new window is not taken for the one before"
        pair.publish(5, 0, dies=True)
        pair.by_hand(forget, discard_open=True)
        pair.publish(20, 20)
        assert pair.loaded() == (45, 3, 4, 45)
        assert pair.loaded() == (0, 5, 4, 0) and pair.followed() == 4

    def test_windows_that_the_ledger_no_longer_holds_count_nevertheless(self, pair):
        pair.publish(1, 0)
        assert pair.loaded() == (1, 1, 1, 1)
        for count in (2, 3, 4, 5):
            pair.publish(count, count, keep_windows=2)
        assert pair.loaded() == (28, 2, 5, 28)
        pair.publish(1, 1, keep_windows=2)
        pair.produce(1)
        pair.publish(1, 0, keep_windows=2)
        with pytest.raises(FollowedMismatch, match="over-consumption of 1") as caught:
            pair.load()
        assert (caught.value.published, caught.value.read) == (3, 4)
        assert "--shift-by 0 --discard-open" in str(caught.value)


class TestDownstream:
    """Changes of the pipeline that follows."""

    def test_a_new_pipeline_begins_at_its_starting_offsets(self, pair):
        for count in (2, 3, 4, 5):
            pair.publish(count, count, keep_windows=2)
        assert pair.loaded(pipeline="all", group_id="all") == (28, 1, 4, 28), "windows that were forgotten are counted"
        later = {"pipeline": "later", "group_id": "later", "starting_offsets": "latest"}
        assert pair.loaded(**later) == (0, 5, 4, 0)
        boundary = {"starting_offsets": {pair.topic: {"0": 5, "1": 9}}, "pipeline": "boundary", "group_id": "boundary"}
        assert pair.loaded(**boundary) == (14, 3, 4, 14)
        middle = {"starting_offsets": {pair.topic: {"0": 6, "1": 9}}, "pipeline": "middle", "group_id": "middle"}
        assert pair.loaded(**middle) == (13, 3, 4, None), "a window that begins within one is not compared"
        pair.publish(1, 1)
        for options in (later, boundary, middle):
            assert pair.loaded(**options) == (2, 5, 5, 2)

    def test_deleted_records_are_missing_until_it_is_said_that_they_may_be(self, pair):
        pair.publish(4, 4)
        pair.hook.delete_records({TopicPartition(pair.topic, 0): 2})
        with pytest.raises(FollowedMismatch, match="under-consumption of 2"):
            pair.load()
        assert pair.loaded(data_loss="skip") == (6, 1, 1, None)
        pair.publish(1, 1)
        assert pair.loaded() == (2, 2, 2, 2)

    def test_moved_by_hand_it_reads_what_was_published_from_there_on(self, pair):
        for count in (2, 3, 4):
            pair.publish(count, count, keep_windows=1)
        assert pair.loaded() == (18, 1, 3, 18)
        pair.by_hand(reset, "earliest", of="-load")
        assert pair.loaded()[0] == 18, "the same once more, because somebody asked for it"
        pair.publish(5, 5, keep_windows=1)
        pair.publish(6, 6, keep_windows=1)
        pair.by_hand(skip, of="-load")
        assert pair.loaded() == (0, 6, 5, 0)
        pair.publish(1, 1)
        assert pair.loaded() == (2, 6, 6, 2)

    def test_a_mismatch_is_passed_over_with_either_command(self, pair):
        pair.publish(2, 2)
        pair.produce(1)
        pair.publish(1, 1)
        with pytest.raises(FollowedMismatch, match="over-consumption"):
            pair.load()
        assert pair.load(again=True, on_mismatch="warn")["records_read"] == 7
        pair.produce(1)
        pair.publish(1, 1)
        with pytest.raises(FollowedMismatch, match="over-consumption"):
            pair.load()
        pair.by_hand(reset, ShiftBy(0), of="-load", discard_open=True)
        assert pair.load()["records_read"] == 3
        pair.publish(1, 1)
        assert pair.loaded() == (2, 4, 4, 2)

    def test_after_a_run_that_follows_no_pipeline_it_continues_there(self, pair):
        pair.publish(2, 2)
        assert pair.loaded() == (4, 1, 1, 4)
        pair.publish(3, 3)
        assert pair.load(follows=None)["records_read"] == 6
        assert pair.loaded() == (0, 3, 2, 0)
        pair.publish(1, 1)
        assert pair.loaded() == (2, 3, 3, 2)

    def test_forgotten_it_continues_where_its_group_stands(self, pair):
        for count in (2, 3):
            pair.publish(count, count, keep_windows=1)
        assert pair.loaded() == (10, 1, 2, 10)
        pair.by_hand(forget, of="-load")
        pair.publish(4, 4, keep_windows=1)
        assert pair.loaded() == (8, 3, 3, 8)


def test_a_pipeline_that_is_not_there_and_one_that_publishes_nothing_are_refused(pair):
    pair.publish(1, 1)
    pair.load()
    with pytest.raises(FollowBroken, match="the ledger has no record of it"):
        pair.load(follows="nobody")
    with pytest.raises(FollowBroken, match="does not publish"):
        pair.load(follows=f"{pair.name}-load", pipeline="third", group_id="third")
