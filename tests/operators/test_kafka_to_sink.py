"""What one window does, on a real broker and a real Spark, one session for all."""

from __future__ import annotations

import json
import sys

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from airflow_kafka_spark.errors import BadRecords, DataLoss, GroupOwned, OffsetsWentBack, TopicRecreated, ValidationError
from airflow_kafka_spark.formats import Json, Raw, String
from airflow_kafka_spark.hooks.kafka import KafkaHook
from airflow_kafka_spark.hooks.pipeline_rename import rename
from airflow_kafka_spark.sinks import FilesSink, PostgresSink
from tests.support.oracle import same_multiset
from tests.support.pipelines import files_rows, order
from tests.support.waiting import settled


def send(pipeline, *records, partition=0):
    """(key, value) pairs to one partition."""
    producer = Producer(pipeline.kafka.connection_extra())
    for key, value in records:
        producer.produce(pipeline.topic, value, key, partition)
    producer.flush(30)


def table_of(path):
    import pyarrow.dataset as ds

    return ds.dataset(path, format="parquet", partitioning="hive").to_table()


class TestWindows:
    def test_a_window_holds_every_committed_record_once_and_the_group_follows(self, files):
        files.produce(3000)
        report = files.run()
        assert report["records_read"] == report["records_written"] == 3000
        assert files.check() == 3000

    def test_windows_follow_each_other_without_gap_or_overlap(self, files):
        for number in range(1, 4):
            files.produce(500 * number)
            files.run(f"run{number}")
        assert [r["window"] for r in files.reports] == ["0000000001", "0000000002", "0000000003"]
        assert files.check() == 3000

    def test_a_run_that_comes_back_does_nothing_and_returns_the_same_report(self, files):
        files.produce(100)
        first = files.run()
        files.produce(100)
        assert files.run() == first
        assert len(files.rows()) == 100
        files.run("run2")
        assert files.check() == 200

    def test_max_records_caps_a_window_and_the_next_goes_on(self, files):
        files.produce(1000)
        sizes = [files.run(f"run{n}", max_records="400")["records_read"] for n in range(4)]
        assert sizes == [400, 400, 200, 0]
        assert files.check() == 1000

    def test_aborted_records_are_not_delivered_and_open_ones_wait(self, files):
        files.produce(50)
        files.produce(30, transaction="abort")
        files.produce(20, transaction="commit")
        settings = {"transactional.id": files.topic, "transaction.timeout.ms": 600_000}
        producer = Producer({**files.kafka.connection_extra(), **settings})
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce(files.topic, order(1000), b"k", 0)
        producer.flush(30)
        report = files.run()
        assert report["records_read"] == 70
        assert report["held_back"] >= 1
        assert files.check() == 70
        producer.commit_transaction(30)
        settled(files.topic)
        files.run("run2")
        assert files.check() == 71

    def test_a_window_of_nothing_but_markers_and_aborted_records_moves_the_offsets(self, files):
        files.produce(10)
        files.run()
        files.produce(20, transaction="abort")
        report = files.run("run2")
        assert report["records_read"] == 0
        assert files.check() == 10

    def test_a_partition_added_later_is_read_from_its_first_record(self, files):
        files.produce(300)
        files.run()
        files.kafka.create_partitions(files.topic, 5)
        send(files, (b"a", order(9001)), (b"b", order(9002)), partition=4)
        report = files.run("run2", starting_offsets="latest")
        assert {r["partition"]: (r["start"], r["end"]) for r in report["ranges"]}[4] == (0, 2)
        assert files.check() == 302

    def test_several_topics_and_a_pattern(self, files, unique):
        other = unique("orders")
        files.kafka.create_topic(other, 1)
        files.produce(40)
        producer = Producer(files.kafka.connection_extra())
        producer.produce(other, order(5000), b"k")
        producer.flush(30)
        assert files.run(topics=[files.topic, other])["records_read"] == 41
        pattern = f"({files.topic}|{other})"
        assert (
            files.run("run2", topics=None, topics_pattern=pattern, pipeline=files.name + "p", group_id=files.name + "p")[
                "records_read"
            ]
            == 41
        )

    def test_an_open_window_of_another_run_is_finished_first(self, files):
        files.produce(100)
        files.options["value"] = Json(schema="id int NOT NULL, missing string NOT NULL")
        with pytest.raises(BadRecords):
            files.run("run1")
        del files.options["value"]
        files.produce(50)
        report = files.run("run2")
        assert report["window"] == "0000000002"
        assert report["records_read"] == 50
        first = files.run("run1")
        assert (first["window"], first["records_read"]) == ("0000000001", 100)
        files.reports = [first, report]
        assert files.check() == 150

    def test_group_offsets_that_expired_do_not_matter(self, files):
        files.produce(100)
        files.run()
        admin = AdminClient(files.kafka.connection_extra())
        admin.delete_consumer_groups([files.name])[files.name].result(30)
        files.produce(100)
        files.run("run2")
        assert files.check() == 200

    def test_group_offsets_moved_by_hand_do_not_matter_and_are_never_set_back(self, files):
        files.produce(100)
        files.run()
        files.produce(100)
        from confluent_kafka import ConsumerGroupTopicPartitions

        admin = AdminClient(files.kafka.connection_extra())
        request = ConsumerGroupTopicPartitions(files.name, [TopicPartition(files.topic, 0, 0)])
        admin.alter_consumer_group_offsets([request])[files.name].result(30)
        files.run("run2")
        assert files.check() == 200

    def test_a_lost_ledger_is_restored_from_the_sinks_own_record(self, files, unique):
        files.produce(100)
        files.run()
        files.produce(100)
        report = files.run("run2", ledger_topic=unique("ledger"))
        assert report["window"] == "0000000002"
        assert files.check() == 200

    def test_a_pipeline_takes_a_group_over_only_from_one_that_was_renamed(self, files, tmp_path, unique):
        files.produce(100)
        files.run()
        files.produce(60)
        other, ledger = unique("other"), f"ledger-{files.name}"
        with pytest.raises(GroupOwned):
            files.run("other", pipeline=other, place=str(tmp_path / "other"))
        settled(ledger)
        with KafkaHook() as hook:
            rename(hook, files.name, other, why="the DAG has another name", ledger_topic=ledger)
        report = files.run("other", pipeline=other, place=str(tmp_path / "other"))
        assert (report["records_read"], report["window"]) == (60, "0000000002")


class TestWithoutSpark:
    def test_a_window_without_records_starts_no_spark(self, files):
        """In a process of its own, with a Spark that cannot start."""
        victim = files.victim(fault=None, spark_conf={"spark.master": "nonsense"})
        assert victim.wait() == 0, victim.tail()
        report = victim.result()
        assert report["records_read"] == 0
        assert "Starting Spark" not in victim.log.read_text()


class TestDataLoss:
    def delete_below(self, pipeline, offset):
        admin = AdminClient(pipeline.kafka.connection_extra())
        request = [TopicPartition(pipeline.topic, p, offset) for p in range(3)]
        for future in admin.delete_records(request).values():
            future.result(30)

    def test_records_deleted_below_the_position_fail_the_run_and_change_nothing(self, files):
        files.produce(300)
        files.run()
        before = files.committed()
        files.produce(300)
        high = {p: o for p, o, *_ in files.events()}
        self.delete_below(files, min(high.values()) - 5)
        with pytest.raises(DataLoss):
            files.run("run2")
        assert len(files.rows()) == 300
        assert files.committed() == before

    def test_or_are_recorded_as_a_gap_with_skip(self, files):
        files.produce(300)
        files.run()
        files.produce(300)
        lost_from = files.committed()
        high = {p: o for p, o, *_ in files.events()}
        self.delete_below(files, min(high.values()) - 5)
        kept = len(files.events())
        report = files.run("run2", data_loss="skip")
        assert {(g["partition"], g["start"]) for g in report["gaps"]} == set(lost_from.items())
        assert report["records_read"] == kept
        assert len(files.rows()) == 300 + kept

    def test_records_deleted_inside_a_planned_window_fail_it_until_skip_is_said(self, files):
        files.produce(600)
        victim = files.victim(fault="planned")
        assert victim.wait() == -9 and victim.fired, victim.tail()
        self.delete_below(files, 50)
        with pytest.raises(DataLoss):
            files.run()
        report = files.run(data_loss="skip")
        assert {(g["start"], g["end"]) for g in report["gaps"]} == {(0, 50)}
        assert report["records_read"] == 450
        assert files.check() == 450

    def test_a_topic_created_again_is_not_taken_for_the_old_one(self, files):
        files.produce(300)
        files.run()
        files.kafka.delete_topic(files.topic)
        files.kafka.create_topic(files.topic, 3)
        files.produce(900)
        with pytest.raises(TopicRecreated):
            files.run("run2")
        assert len(files.rows()) == 300
        report = files.run("run2", data_loss="skip")
        assert report["records_read"] == 900
        assert len(files.rows()) == 1200

    def test_a_topic_created_again_while_a_window_is_open(self, files):
        files.produce(300)
        victim = files.victim(fault="planned")
        assert victim.wait() == -9 and victim.fired, victim.tail()
        files.kafka.delete_topic(files.topic)
        files.kafka.create_topic(files.topic, 3)
        files.produce(900)
        with pytest.raises(TopicRecreated):
            files.run()
        assert files.run(data_loss="skip")["records_read"] == 0
        assert files.run("run2", data_loss="skip")["records_read"] == 900

    def test_a_log_that_went_back_is_refused(self, files, unique):
        """As after an unclean election: the ledger of a longer log, carried over by its group's offsets."""
        files.produce(30)
        producer = Producer({**files.kafka.connection_extra(), "transactional.id": unique("t")})
        producer.init_transactions(30)
        producer.begin_transaction()
        from confluent_kafka import Consumer

        consumer = Consumer({**files.kafka.connection_extra(), "group.id": files.name})
        producer.send_offsets_to_transaction([TopicPartition(files.topic, 0, 999)], consumer.consumer_group_metadata(), 30)
        producer.commit_transaction(30)
        consumer.close()
        with pytest.raises(OffsetsWentBack):
            files.run()


class TestRecords:
    def test_bad_records_fail_the_window_naming_the_first_few_and_commit_nothing(self, files):
        files.produce(300)
        send(files, (b"k", b"not json"), (b"k", b'{"id":"x"}'), partition=1)
        with pytest.raises(BadRecords) as caught:
            files.run()
        assert caught.value.count == 2
        assert [(s.topic, s.partition) for s in caught.value.samples] == [(files.topic, 1)] * 2
        offsets = [s.offset for s in caught.value.samples]
        assert offsets[1] == offsets[0] + 1
        assert str(offsets[0]) in str(caught.value)
        assert files.rows() == []
        assert set(files.committed().values()) == {-1001}

    def test_a_tombstone_is_bad_ignored_or_written_as_the_user_says(self, files):
        send(files, (b"a", order(1)), (b"b", None), (b"c", order(2)))
        with pytest.raises(BadRecords, match="no value"):
            files.run()
        report = files.run(behavior_on_null_values="ignore")
        assert (report["records_read"], report["records_written"], report["records_ignored"]) == (3, 2, 1)
        send(files, (b"d", None))
        report = files.run("run2", behavior_on_null_values="write")
        assert report["records_written"] == 1

    def test_key_headers_timestamp_topic_partition_and_offset_are_columns(self, files, tmp_path):
        producer = Producer(files.kafka.connection_extra())
        producer.produce(files.topic, b'{"id":1}', b"7", 2, timestamp=1_700_000_000_123, headers=[("trace", b"x"), ("n", None)])
        producer.flush(30)
        files.run(
            value=Json(schema="id bigint"),
            key=String(column="k"),
            metadata_columns={
                "topic": "topic",
                "partition": "part",
                "offset": "off",
                "timestamp": "ts",
                "timestampType": "tt",
                "headers": "h",
                "value": "raw",
            },
        )
        (row,) = table_of(files.place).drop_columns(["window"]).to_pylist()
        assert row.pop("ts").timestamp() == 1_700_000_000.123
        assert row == {
            "id": 1, "k": "7", "topic": files.topic, "part": 2, "off": 0, "tt": 0, "raw": b'{"id":1}',
            "h": [{"key": "trace", "value": b"x"}, {"key": "n", "value": None}],
        }  # fmt: skip

    def test_raw_values_pass_as_they_are_null_ones_too(self, files):
        send(files, (b"a", b"\x00\xff"), (b"b", None), (None, b""))
        files.run(value=Raw())
        assert same_multiset([b"\x00\xff", None, b""], table_of(files.place)["value"].to_pylist()) == 3

    def test_both_ways_of_reading_give_the_same(self, files, tmp_path):
        """In a process of its own: Spark's Kafka source needs its jars when the session starts."""
        files.produce(2000)
        files.produce(100, transaction="abort")
        send(files, (b"k", order(77_777)), partition=2)
        files.run(metadata_columns=["offset", "partition", "timestamp", "headers"])
        other = {
            "read_with": "spark",
            "place": str(tmp_path / "spark"),
            "pipeline": files.name + "-spark",
            "group_id": files.name + "-spark",
        }
        victim = files.victim(fault=None, metadata_columns=["offset", "partition", "timestamp", "headers"], **other)
        assert victim.wait() == 0, victim.tail()
        here, there = (table_of(p).drop_columns(["window"]).to_pylist() for p in (files.place, other["place"]))
        assert same_multiset(map(repr, here), map(repr, there)) == 2001
        assert victim.result()["records_read"] == 2001
        assert same_multiset(files_rows(files.place), files_rows(other["place"])) == 2001


class TestReport:
    def test_the_report_tells_window_ranges_counts_bytes_timings_and_rate(self, files):
        files.produce(500)
        report = files.run()
        assert report["window"] == "0000000001"
        assert sum(r["records"] for r in report["ranges"]) == 500
        assert report["bytes"] == sum(len(v) for *_, v in files.events()), "keys are not read here"
        assert set(report["timings"]) >= {"fence", "plan", "move", "total"}
        assert report["rate"] > 0
        assert report["guarantee"] == "exactly-once"
        assert report["min_timestamp"] <= report["max_timestamp"]
        assert report["committed"] == {f"{files.topic}-{p}": o for p, o in files.committed().items()}
        json.dumps(report)

    def test_it_is_on_the_event_of_the_outlet_asset(self, files):
        from tests.support.pipelines import make
        from tests.support.runs import context

        files.produce(10)
        operator, ctx = make(**files.arguments), context("run1")
        report = operator.execute(ctx)
        (asset,) = operator.outlets
        assert ctx["outlet_events"][asset].extra == report
        assert [a.uri for a in operator.inlets] == [f"kafka://kafka_default/{files.topic}"]

    def test_a_template_in_the_sink_is_rendered(self, files, tmp_path):
        from tests.support.pipelines import make

        operator = make(**{**files.arguments, "sink": FilesSink(path=str(tmp_path) + "/{{ name }}")})
        operator.render_template_fields({"name": "rendered"})
        assert operator.sink.path == f"{tmp_path}/rendered"


def test_memory_of_the_driver_does_not_hold_records(files):
    """What comes back to the driver is one small result per split."""
    from airflow_kafka_spark.road import job

    files.produce(5000)
    sizes = []
    original = job.decode_result
    job.decode_result = lambda text: sizes.append(sys.getsizeof(text)) or original(text)
    try:
        files.run(split_records=500)
    finally:
        job.decode_result = original
    assert len(sizes) >= 9
    assert max(sizes) < 5000


class TestUpsertSplitBySplit:
    """Splits are taken in any order, so a partition is one split: else an older value of a key could come after a newer one."""

    def splits(self, table, **options):
        from airflow_kafka_spark.operators import KafkaToSinkOperator
        from airflow_kafka_spark.windows.model import OffsetRange, Window

        sink = PostgresSink(conn_id="warehouse", table=table.place, atomic="split", **options)
        operator = KafkaToSinkOperator(
            task_id="task", topics=table.topic, group_id=table.name, value=Json(schema="id bigint"), sink=sink
        )
        window = Window("p", 1, tuple(OffsetRange(table.topic, p, 0, 5_000_000) for p in range(2)), "run", "now")
        return [split.range.span for split in operator.splits(window)]

    def test_each_partition_is_one_split_when_rows_are_updated(self, table):
        assert self.splits(table, mode="upsert", key=["id"]) == [5_000_000] * 2
        assert len(self.splits(table)) == 10, "rows that are only added have no order"

    def test_split_records_is_refused(self, table):
        with pytest.raises(ValidationError, match="each partition has to be one"):
            table.run(sink=PostgresSink(conn_id="warehouse", table=table.place, mode="upsert", key=["id"], atomic="split"),
                      split_records=100)  # fmt: skip
