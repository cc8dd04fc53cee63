"""One window, on a real broker and a real Spark. All tests share one session."""

from __future__ import annotations

import json

import pytest
from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ResourceType

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import (
    BadRecords,
    DataLoss,
    ForeignOffsets,
    GroupOwned,
    OffsetsWentBack,
    OldOffsetsInRows,
    TopicRecreated,
    ValidationError,
)
from airflow_kafka_spark.formats import Json, Raw, String
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.jobs import write
from airflow_kafka_spark.sinks import FilesSink, PostgresSink
from airflow_kafka_spark.transforms import Sql
from tests.support.compacting import alter_config
from tests.support.control import forget, rename, reset
from tests.support.oracle import committed_messages, same_multiset
from tests.support.pipelines import make, order
from tests.support.runs import context, fails_at
from tests.support.timings import check_move
from tests.support.waiting import eventually, settled


def send(pipeline, *records, partition=0, topic=""):
    """Send (key, value) pairs to one partition.

    :param topic: default: the pipeline's.
    """
    producer = Producer(pipeline.kafka.connection_extra())
    for key, value in records:
        producer.produce(topic or pipeline.topic, value, key, partition)
    producer.flush(60)


def types(pipeline):
    """Return the types of the timestamps of a partition's records: 0 = the producer's time, 1 = the broker's."""
    found = committed_messages(pipeline.kafka.connection_extra(), pipeline.topic)
    return [int(m.timestamp()[0] == TIMESTAMP_LOG_APPEND_TIME) for m in sorted(found, key=lambda m: m.offset())]


def leave_open(pipeline):
    """Let an attempt of run1 fail after its window is planned and before any record is read."""
    with fails_at("planned"):
        pipeline.run("run1")


def hook_of(ask):
    """Return the answer of a hook between two attempts."""
    with KafkaHook() as hook:
        return ask(hook)


def table_of(path):
    import pyarrow.dataset as ds

    return ds.dataset(path, format="parquet", partitioning="hive").to_table()


class TestWindows:
    def test_windows_hold_every_committed_record_once_without_gap_and_a_run_that_comes_back_moves_nothing(self, files):
        files.produce(900)
        first = files.run("run1", max_records="400")
        assert first["records_read"] == first["records_written"] == 400, "max_records caps a window"
        assert files.run("run1") == first, "the run came back: it returns the same report"
        assert len(files.rows()) == 400, "and moves nothing"
        assert [files.run(f"run{number}")["records_read"] for number in (2, 3)] == [500, 0]
        assert [r["window"] for r in files.reports] == ["0000000001", "0000000002", "0000000003"]
        assert files.check() == 900

    def test_aborted_records_are_not_delivered_open_ones_wait_and_markers_alone_move_the_offsets(self, files):
        files.produce(50)
        files.produce(30, transaction="abort")
        files.produce(20, transaction="commit")
        settings = {"transactional.id": files.topic, "transaction.timeout.ms": 600_000}
        producer = Producer({**files.kafka.connection_extra(), **settings})
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce(files.topic, order(1000), b"k", 0)
        producer.flush(60)
        report = files.run()
        assert report["records_read"] == 70
        assert report["held_back"] >= 1
        assert files.check(stable=False) == 70
        producer.commit_transaction(60)
        settled(files.topic)
        files.run("run2")
        assert files.check() == 71, "the record that was open came with the next window"
        files.produce(20, transaction="abort")
        assert files.run("run3")["records_read"] == 0, "nothing but markers and aborted records"
        assert files.check() == 71

    def test_several_topics_and_a_pattern_are_read_and_a_partition_added_later_from_its_first_record(self, files, unique):
        other = unique("orders")
        files.kafka.create_topic(other, 1)
        files.produce(40)
        send(files, (b"k", order(5000)), topic=other)
        assert files.run(topics=[files.topic, other])["records_read"] == 41
        files.kafka.create_partitions(files.topic, 5)
        send(files, (b"a", order(9001)), (b"b", order(9002)), partition=4)
        send(files, (b"k", order(5001)), topic=other)
        report = files.run("run2", topics=None, topics_pattern=f"({files.topic}|{other})", starting_offsets="latest")
        ranges = {(r["topic"], r["partition"]): (r["start"], r["end"]) for r in report["ranges"]}
        assert (ranges[files.topic, 4], ranges[other, 0]) == ((0, 2), (1, 2))
        assert same_multiset([*range(40), 5000, 5001, 9001, 9002], [row[0] for row in files.rows()]) == 44
        assert files.committed() == {partition: end for (topic, partition), (_, end) in ranges.items() if topic == files.topic}

    def test_an_open_window_of_another_run_is_finished_first(self, files):
        files.produce(100)
        leave_open(files)
        files.produce(50)
        report = files.run("run2")
        assert report["window"] == "0000000002"
        assert report["records_read"] == 50
        first = files.run("run1")
        assert (first["window"], first["records_read"]) == ("0000000001", 100)
        files.reports = [first, report]
        assert files.check() == 150

    def test_group_offsets_expired_or_moved_do_not_matter_and_a_lost_ledger_is_restored_from_the_sinks_record(
        self, files, unique, tmp_path
    ):
        from confluent_kafka import ConsumerGroupTopicPartitions

        admin = AdminClient(files.kafka.connection_extra())
        files.produce(100)
        files.run()
        admin.delete_consumer_groups([files.name])[files.name].result(60)
        files.produce(100)
        files.run("run2")
        assert files.check() == 200, "the group's offsets had expired"
        request = ConsumerGroupTopicPartitions(files.name, [TopicPartition(files.topic, 0, 0)])
        admin.alter_consumer_group_offsets([request])[files.name].result(60)
        files.produce(100)
        files.run("run3")
        assert files.check() == 300, "the group's offsets were moved by hand, and are never set back"
        files.produce(100)
        report = files.run("run4", ledger_topic=unique("ledger"))
        assert report["window"] == "0000000004"
        assert files.check() == 400, "the ledger was lost"

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
        """The windows run in separate processes whose Spark cannot start. Transforms are checked in the first window, and where
        there are records.
        """
        transforms = [Sql(columns={"id": "id", "customer": "upper(customer)"})]
        for number, made in enumerate(((), transforms)):
            victim = files.victim(
                f"run{number}", fault=None, jvm=True, spark_conf={"spark.serializer": "nonsense"}, transforms=made
            )
            assert victim.wait() == 0, victim.tail()
            report = victim.result()
            assert report["records_read"] == 0
            assert "Starting Spark" not in victim.log.read_text()
        wrong = [Sql(columns={"id": "nothing"})]
        assert files.run("run2", transforms=wrong)["records_read"] == 0
        files.produce(20)
        with pytest.raises(ValidationError, match="nothing"):
            files.run("run3", transforms=wrong)
        assert files.run("run3", transforms=transforms)["window"] == "0000000004"


def test_a_topic_created_again_while_it_is_read_fails_the_window_before_the_sink_takes_it(files, monkeypatch):
    files.produce(300)

    def create_again(point):
        if point == "job.done":
            files.kafka.delete_topic(files.topic)
            files.kafka.create_topic(files.topic, files.partitions)
            files.produce(900)

    with monkeypatch.context() as patch:
        patch.setattr(faults, "reached", create_again)
        with pytest.raises(TopicRecreated):
            files.run()
    assert files.rows() == []
    assert set(files.committed().values()) == {-1001}


class TestDataLoss:
    def delete_below(self, pipeline, offset):
        admin = AdminClient(pipeline.kafka.connection_extra())
        request = [TopicPartition(pipeline.topic, p, offset) for p in range(pipeline.partitions)]
        for future in admin.delete_records(request).values():
            future.result(60)

    def recreate(self, pipeline):
        pipeline.kafka.delete_topic(pipeline.topic)
        pipeline.kafka.create_topic(pipeline.topic, pipeline.partitions)

    def test_records_deleted_below_the_position_fail_the_run_and_change_nothing_or_are_a_gap_with_skip(self, files):
        files.produce(300)
        files.run()
        before = files.committed()
        files.produce(300)
        high = {p: o for p, o, *_ in files.events()}
        self.delete_below(files, min(high.values()) - 5)
        kept = len(files.events())
        with pytest.raises(DataLoss):
            files.run("run2")
        assert len(files.rows()) == 300
        assert files.committed() == before
        report = files.run("run2", data_loss="skip")
        assert {(g["partition"], g["start"]) for g in report["gaps"]} == set(before.items())
        assert report["records_read"] == kept
        assert len(files.rows()) == 300 + kept

    def test_what_windows_without_records_have_skipped_is_no_hole_in_the_sinks_record(self, files):
        files.produce(30)
        files.run(keep_windows=1)
        for number in (2, 3):
            files.produce(30)
            self.delete_below(files, -1)
            report = files.run(f"run{number}", data_loss="skip", keep_windows=1)
            assert (report["records_read"], len(report["gaps"])) == (0, files.partitions)
        assert files.run("run4", keep_windows=1)["gaps"] == []
        files.produce(20)
        report = files.run("run5", keep_windows=1)
        assert (report["records_read"], report["gaps"]) == (20, [])
        assert len(set(files.rows())) == len(files.rows()) == 50

    def test_records_deleted_inside_a_planned_window_fail_it_until_skip_is_said(self, files):
        files.produce(600)
        leave_open(files)
        self.delete_below(files, 50)
        with pytest.raises(DataLoss):
            files.run()
        report = files.run(data_loss="skip")
        assert {(g["start"], g["end"]) for g in report["gaps"]} == {(0, 50)}
        left = 600 - 50 * files.partitions
        assert report["records_read"] == left
        assert files.check() == left

    def test_a_topic_created_again_is_not_taken_for_the_old_one(self, files):
        files.produce(300)
        files.run()
        self.recreate(files)
        files.produce(900)
        with pytest.raises(TopicRecreated):
            files.run("run2")
        assert len(files.rows()) == 300
        report = files.run("run2", data_loss="skip")
        assert report["records_read"] == 900
        assert len(files.rows()) == 1200

    def test_records_of_a_topic_created_again_do_not_lose_against_the_offsets_of_the_old_one(self, table):
        """An upsert with ``offset_columns`` ignores records with lower offsets than those in the row of their key."""
        name, ledger = table.place, {"ledger_topic": f"ledger-{table.name}"}
        with table.postgres.connect(autocommit=True) as connection:
            connection.execute(
                f'ALTER TABLE "{name}" ADD PRIMARY KEY (id), ADD COLUMN "__connect_topic" text, '
                'ADD COLUMN "__connect_partition" integer, ADD COLUMN "__connect_offset" bigint'
            )
        sink = PostgresSink(conn_id="warehouse", table=name, mode="upsert", key="id", offset_columns=True)

        def produce(*versions):
            send(table, *[(b"1", json.dumps(json.loads(order(1)) | {"customer": version}).encode()) for version in versions])

        def ask(statement):
            with table.postgres.connect(autocommit=True) as connection:
                found = connection.execute(statement)
                return found.fetchall() if found.description else []

        clear = f'UPDATE "{name}" SET "__connect_topic" = NULL, "__connect_partition" = NULL, "__connect_offset" = NULL'
        produce(*(f"old-{number}" for number in range(5)))
        table.run(sink=sink)
        self.recreate(table)
        produce("new")
        with pytest.raises(OldOffsetsInRows, match=f"`{table.topic}`.*Set `__connect_topic`"):
            table.run("run2", sink=sink, data_loss="skip")
        ask(clear)
        assert table.run("run2", sink=sink, data_loss="skip")["records_written"] == 1
        produce("newer")
        assert table.run("run3", sink=sink)["records_written"] == 1, "rows with offsets of the present topic are no obstacle"
        # Ledger and topic are gone, and the position is set by hand.
        for topic in (table.topic, f"ledger-{table.name}"):
            table.kafka.delete_topic(topic)
        table.kafka.create_topic(table.topic, table.partitions)
        produce("newest")
        said = {"only": [table.topic], "group_id": table.name, "why": "Kafka is another one", **ledger}
        hook_of(lambda hook: reset(hook, table.name, "earliest", **said))
        with pytest.raises(OldOffsetsInRows):
            table.run("run4", sink=sink)
        ask(clear)
        table.run("run4", sink=sink)
        assert ask(f'SELECT customer FROM "{name}"') == [("newest",)]
        # Pipelines under new names have read no earlier topic, but their table has.
        self.recreate(table)
        produce("of another")
        others = [{"sink": sink, "pipeline": f"{table.name}.{n}", "group_id": f"{table.name}.{n}"} for n in (1, 2)]
        with pytest.raises(OldOffsetsInRows, match=f"`{table.topic}`"):
            table.run("run5", **others[0])
        ask(clear)
        assert table.run("run5", **others[0])["records_written"] == 1
        assert table.run("run6", **others[1])["records_read"] == 1, "the rows have offsets of the present topic"
        assert ask(f'SELECT customer FROM "{name}"') == [("of another",)]

    def test_kafka_created_anew_is_not_read_from_where_the_sink_had_the_old_one(self, files):
        """The ledger and the topic were lost and are created anew; the sink still has its record."""
        files.produce(300)
        files.run()
        old = hook_of(lambda hook: hook.describe_topics([files.topic])[files.topic].topic_id)
        for topic in (files.topic, f"ledger-{files.name}"):
            files.kafka.delete_topic(topic)
        files.kafka.create_topic(files.topic, files.partitions)
        files.produce(900)
        new = hook_of(lambda hook: hook.describe_topics([files.topic])[files.topic].topic_id)
        with pytest.raises(ForeignOffsets) as caught:
            files.run("run2")
        assert caught.value.topics == {files.topic: (old, new)}
        assert f"reset {files.name} --to earliest --only {files.topic}" in str(caught.value)
        ledger = {"ledger_topic": f"ledger-{files.name}"}
        said = {"only": [files.topic], "group_id": files.name, "why": "Kafka is another one", **ledger}
        hook_of(lambda hook: reset(hook, files.name, "earliest", **said))
        report = files.run("run2")
        assert (report["records_read"], report["window"]) == (900, "0000000002")
        # Forgetting the pipeline changes nothing: the sink's record is there, and is right.
        hook_of(lambda hook: forget(hook, files.name, why="a test", **ledger))
        files.produce(60)
        assert files.run("run3")["records_read"] == 60
        assert len(files.rows()) == 300 + 900 + 60

    def test_a_topic_created_again_while_a_window_is_open(self, files):
        files.produce(300)
        leave_open(files)
        self.recreate(files)
        files.produce(900)
        with pytest.raises(TopicRecreated):
            files.run()
        report = files.run(data_loss="skip")
        gaps = {(gap["topic"], gap["partition"], gap["start"], gap["end"]) for gap in report["gaps"]}
        assert report["records_read"] == 0
        assert gaps == {(r["topic"], r["partition"], r["start"], r["end"]) for r in report["ranges"]}
        assert files.run("run2", data_loss="skip")["records_read"] == 900

    def test_splits_of_a_topic_that_is_gone_stay_in_the_table_and_are_no_gap(self, table):
        table.produce(30)
        sink = PostgresSink(conn_id="warehouse", table=table.place, atomic="split")
        with fails_at("job.done"):
            table.run(sink=sink)
        self.recreate(table)
        report = table.run(sink=sink, data_loss="skip")
        assert (report["records_written"], report["gaps"], len(table.rows())) == (30, [], 30)

    def test_a_log_that_went_back_is_refused(self, files, unique):
        """The ledger has offsets of a longer log, from the group, as after an unclean election."""
        files.produce(30)
        producer = Producer({**files.kafka.connection_extra(), "transactional.id": unique("t")})
        producer.init_transactions(60)
        producer.begin_transaction()
        from confluent_kafka import Consumer

        consumer = Consumer({**files.kafka.connection_extra(), "group.id": files.name})
        producer.send_offsets_to_transaction([TopicPartition(files.topic, 0, 999)], consumer.consumer_group_metadata(), 30)
        producer.commit_transaction(60)
        consumer.close()
        with pytest.raises(OffsetsWentBack):
            files.run()


class TestRecords:
    def test_bad_records_fail_the_window_naming_the_first_few_and_tombstones_are_bad_ignored_or_written(self, files):
        files.produce(300)
        send(files, (b"k", b"not json"), (b"k", b'{"id":"x"}'))
        send(files, (b"gone", None), partition=1)
        with pytest.raises(BadRecords) as caught:
            files.run()
        assert caught.value.count == 3
        assert [(s.topic, s.partition) for s in caught.value.samples] == [(files.topic, p) for p in (0, 0, 1)]
        offsets = [s.offset for s in caught.value.samples]
        assert offsets[1] == offsets[0] + 1
        assert str(offsets[0]) in str(caught.value) and "no value" in str(caught.value)
        assert files.rows() == [], "nothing is committed"
        assert set(files.committed().values()) == {-1001}
        report = files.run(behavior_on_null_values="ignore", errors_tolerance="all", errors_skip=True)
        assert [report[f"records_{name}"] for name in ("read", "written", "ignored", "rejected")] == [303, 300, 1, 2]
        send(files, (b"d", None))
        report = files.run("run2", behavior_on_null_values="write")
        assert report["records_written"] == 1

    def test_both_ways_of_reading_give_the_same_columns_with_key_headers_timestamp_topic_partition_and_offset(
        self, files, tmp_path
    ):
        files.produce(300)
        files.produce(20, transaction="abort")
        producer = Producer(files.kafka.connection_extra())
        headers = [("trace", b"x"), ("n", None)]
        producer.produce(files.topic, order(77_777), b"7", 1, timestamp=1_700_000_000_123, headers=headers)
        assert producer.flush(60) == 0
        names = {
            "topic": "topic", "partition": "part", "offset": "off", "timestamp": "ts", "timestampType": "tt", "headers": "h",
            "value": "raw",
        }  # fmt: skip
        options = {"key": String(column="k"), "metadata_columns": names}
        files.run(**options)
        other = {"place": str(tmp_path / "spark"), "pipeline": f"{files.name}-spark", "group_id": f"{files.name}-spark"}
        files.run(**options, **other, read_with="spark")
        here, there = (table_of(place).drop_columns(["window"]).to_pylist() for place in (files.place, other["place"]))
        assert same_multiset(map(repr, here), map(repr, there)) == 301
        (row,) = (row for row in here if row["id"] == 77_777)
        assert row.pop("ts").timestamp() == 1_700_000_000.123
        found = {name: row[name] for name in ("k", "topic", "part", "tt", "raw", "h")}
        assert found == {
            "k": "7", "topic": files.topic, "part": 1, "tt": 0, "raw": order(77_777),
            "h": [{"key": "trace", "value": b"x"}, {"key": "n", "value": None}],
        }  # fmt: skip
        assert (1, row["off"], order(77_777)) in [(p, o, value) for p, o, _, value in files.events()]

    @pytest.mark.parametrize("partitions", [1])
    @pytest.mark.parametrize("way", ["tasks", "spark"])
    def test_each_record_has_the_type_of_its_own_timestamp(self, files, way):
        for kind in ("CreateTime", "LogAppendTime", "CreateTime"):
            changed = {"message.timestamp.type": kind}
            alter_config(AdminClient(files.kafka.connection_extra()), ResourceType.TOPIC, files.topic, changed)
            send(files, (b"a", b""))
            eventually(lambda kind=kind: send(files, (b"a", b"")) or types(files)[-1] == (kind == "LogAppendTime"))
        names = {"timestampType": "kind", "offset": "at"}
        files.run(value=Raw(), metadata_columns=names, **({"read_with": "spark"} if way == "spark" else {}))
        found = sorted((row["at"], row["kind"]) for row in table_of(files.place).to_pylist())
        assert [kind for _, kind in found] == types(files)

    def test_raw_values_pass_as_they_are_null_ones_too(self, files):
        send(files, (b"a", b"\x00\xff"), (b"b", None), (None, b""))
        files.run(value=Raw())
        assert same_multiset([b"\x00\xff", None, b""], table_of(files.place)["value"].to_pylist()) == 3


class TestReport:
    def test_the_report_describes_the_window_is_on_the_asset_event_and_no_record_comes_to_the_driver(self, files, monkeypatch):
        sizes, decode = [], write.decode_result
        monkeypatch.setattr(write, "decode_result", lambda text: sizes.append(len(text)) or decode(text))
        files.produce(3000)
        operator, ctx = make(**files.arguments), context("run1")
        report = operator.execute(ctx)
        assert report["window"] == "0000000001"
        assert sum(r["records"] for r in report["ranges"]) == report["records_read"] == 3000
        assert report["bytes"] == sum(len(v) for *_, v in files.events()), "keys are not read here"
        assert set(report["timings"]) >= {"fence", "plan", "move", "total"}
        check_move(report, "read", "decode", "write")
        assert report["rate"] > 0
        assert report["guarantee"] == "exactly-once"
        assert report["min_timestamp"] <= report["max_timestamp"]
        assert report["committed"] == {f"{files.topic}-{p}": o for p, o in files.committed().items()}
        json.dumps(report)
        (asset,) = operator.outlets
        assert ctx["outlet_events"][asset].extra == report, "the event of the outlet asset carries it"
        assert [a.uri for a in operator.inlets] == [f"kafka://kafka_default/{files.topic}"]
        # A thousand records make one split, which returns one small result.
        assert len(sizes) == files.partitions and max(sizes) < 5000

    def test_a_template_in_the_sink_is_rendered(self, files, tmp_path):
        operator = make(**{**files.arguments, "sink": FilesSink(path=str(tmp_path) + "/{{ name }}")})
        operator.render_template_fields({"name": "rendered"})
        assert operator.sink.path == f"{tmp_path}/rendered"


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
        return [split.range.span for split in operator.make_splits(window)]

    def test_each_partition_is_one_split_when_rows_are_updated_and_split_records_is_refused(self, table):
        assert self.splits(table, mode="upsert", key=["id"]) == [5_000_000] * 2
        assert len(self.splits(table)) == 10, "rows that are only added have no order"
        with pytest.raises(ValidationError, match="each partition has to be one"):
            table.run(sink=PostgresSink(conn_id="warehouse", table=table.place, mode="upsert", key=["id"], atomic="split"),
                      split_records=100)  # fmt: skip
