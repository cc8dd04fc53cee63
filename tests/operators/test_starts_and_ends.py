"""The start of an operator's first window and the ends of its windows, on a real broker, into a real sink."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer

from airflow_kafka_spark.errors import GroupOwned, ValidationError
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.hooks.kafka.log import read_log
from airflow_kafka_spark.operators.from_kafka import resolve_starting_offsets
from airflow_kafka_spark.windows.model import TopicPartition
from airflow_kafka_spark.windows.offset_specs import CommittedOffsets
from tests.support.pipelines import files_rows, make, order, row_of
from tests.support.relay import relay
from tests.support.runs import context

BASE = 1_750_000_000_000
PER_PARTITION = 20


@pytest.fixture
def partitions():
    return 3


@pytest.fixture
def filled(files):
    """Produce twenty records in each partition, a second apart: offset n is at BASE + n seconds."""
    producer = Producer(files.kafka.connection_extra())
    for number in range(3 * PER_PARTITION):
        partition, offset = divmod(number, PER_PARTITION)
        producer.produce(files.topic, order(number), b"k", partition, timestamp=BASE + 1000 * offset)
    producer.flush(60)
    return files


def commit(pipeline, offsets: dict[int, int], group: str | None = None) -> str:
    """Commit offsets like another kind of consumer: Connect, Flink, or a console consumer."""
    group = group or pipeline.name
    with KafkaHook() as hook:
        hook.alter_committed(group, {TopicPartition(pipeline.topic, p): o for p, o in offsets.items()})
    return group


def ranges(report) -> list[tuple[int, int]]:
    return [(r["start"], r["end"]) for r in sorted(report["ranges"], key=lambda r: r["partition"])]


def rows_of(offsets: list[range]) -> list:
    return sorted(row_of(order(p * PER_PARTITION + o)) for p, part in enumerate(offsets) for o in part)


class TestStart:
    def test_by_default_at_the_groups_committed_offsets_else_at_the_earliest(self, filled):
        commit(filled, {0: 15})
        assert ranges(filled.run()) == [(15, 20), (0, 20), (0, 20)]
        assert sorted(filled.rows()) == rows_of([range(15, 20), range(20), range(20)])

    def test_an_explicit_start_counts_even_where_others_have_committed_offsets(self, filled):
        starts = {
            "earliest": [0, 0, 0],
            "latest": [20, 20, 20],
            "2025-06-15T15:06:50Z": [10, 10, 10],
            "{{ params.offsets }}": [3, 0, 20],
        }
        offsets = f'{{"{filled.topic}": {{"0": 3, "1": -2, "2": -1}}}}'
        for number, (start, begins) in enumerate(starts.items()):
            name, place = f"{filled.name}-{number}", f"{filled.place}-{number}"
            commit(filled, {0: 15, 1: 15, 2: 15}, name)
            options = {"pipeline": name, "group_id": name, "place": place, "starting_offsets": start}
            operator = make(**{**filled.arguments, **options})
            operator.render_template_fields({"params": {"offsets": offsets}})
            report = operator.execute(context("run1"))
            assert ranges(report) == [(begin, 20) for begin in begins], start
            assert sorted(files_rows(place)) == rows_of([range(begin, 20) for begin in begins]), start

    def test_taking_over_from_a_connect_sink_begins_at_its_groups_offsets(self, filled):
        group = commit(filled, {0: 4, 1: 20, 2: 19}, f"connect-{filled.name}")
        assert ranges(filled.run(starting_offsets=CommittedOffsets(group, "none"))) == [(4, 20), (20, 20), (19, 20)]
        assert sorted(filled.rows()) == rows_of([range(4, 20), range(0), range(19, 20)])
        assert filled.committed() == {0: 20, 1: 20, 2: 20}, "the pipeline's own group"

    def test_another_group_that_has_committed_nothing_is_warned_of(self, filled, caplog):
        with KafkaHook() as hook:
            log = read_log(hook, [filled.topic])
            begins = resolve_starting_offsets(hook, "committed:misspelt", log, filled.name, {})
            assert set(begins.values()) == {0} and "Group misspelt has no committed offsets" in caplog.text
            caplog.clear()
            other = commit(filled, {1: 7}, f"connect-{filled.name}")
            assert sorted(resolve_starting_offsets(hook, f"committed:{other}", log, filled.name, {}).values()) == [0, 0, 7]
        assert "no committed offsets" not in caplog.text

    def test_none_refuses_where_nothing_is_committed_and_a_partition_that_is_not_named_is_an_error(self, filled):
        with pytest.raises(ValidationError, match="no committed offset"):
            filled.run(starting_offsets="none")
        with pytest.raises(ValidationError, match=f"{filled.topic}-2"):
            filled.run(starting_offsets={filled.topic: {"0": 1, "1": 1}})
        commit(filled, {0: 1, 1: 1, 2: 1})
        report = filled.run(starting_offsets="none")
        assert (report["window"], ranges(report)) == ("0000000001", [(1, 20)] * 3), "nothing was planned before"

    def test_the_ledger_and_the_sinks_record_come_before_any_start(self, filled, unique):
        filled.run(max_records=30)
        assert ranges(filled.run("run2", starting_offsets="earliest", max_records=3)) == [(10, 11)] * 3
        found = filled.run("run3", starting_offsets="earliest", ledger_topic=unique("ledger"))
        assert ranges(found) == [(11, 20)] * 3
        assert filled.check() == 60

    def test_a_pipeline_whose_ledger_is_lost_never_begins_anew_where_it_has_moved_its_group(self, kafka, unique, tmp_path):
        """A topic holds no record of windows. Only the group's offsets remain, whose metadata name the pipeline."""
        with relay(kafka, unique, tmp_path) as orders:
            orders.send(200)
            orders.run("run1")
            for number, start in enumerate(("earliest", "latest", "committed"), 2):
                if start != "latest":
                    orders.send(50)
                report = orders.run(f"run{number}", ledger_topic=unique("other"), starting_offsets=start)
                assert report["window"] == f"{number:010d}", start
                assert report["records_read"] == (0 if start == "latest" else 50), start
            assert orders.check() == 300

    def test_but_what_another_pipeline_has_committed_is_no_past_of_this_one(self, kafka, unique, tmp_path):
        """Nor does it share that one's group, wherever it would begin: each would move the other's mirror."""
        with relay(kafka, unique, tmp_path) as orders:
            orders.send(100)
            orders.run("run1")
            other = unique("other")
            options = {"pipeline": other, "starting_offsets": "earliest", "topic": unique("copy"), "auto_create": True}
            with pytest.raises(GroupOwned):
                orders.run("run2", **options)
            report = orders.run("run2", **options, group_id=other)
            assert report["records_read"] == 100
            assert orders.run("run3")["records_read"] == 0


class TestStop:
    def test_windows_stop_at_a_time_at_offsets_or_at_another_groups_and_continue_when_the_bound_moves(self, filled):
        group = f"flink-{filled.name}"

        def stop(bound: str, offset: int):
            if bound == "group":
                commit(filled, dict.fromkeys(range(3), offset), group)
            return {
                "time": f"2025-06-15T15:06:{40 + offset:02d}Z",
                "offsets": {filled.topic: {str(p): offset for p in range(3)}},
                "group": CommittedOffsets(group),
            }[bound]

        assert ranges(filled.run("run1", ending_offsets=stop("time", 5))) == [(0, 5)] * 3
        for number, (bound, offset) in enumerate([(b, o) for b in ("time", "offsets", "group") for o in (5, 3)], 2):
            report = filled.run(f"run{number}", ending_offsets=stop(bound, offset))
            assert ranges(report) == [(5, 5)] * 3, f"never below the start: {bound} {offset}"
        assert ranges(filled.run("run8", ending_offsets=stop("offsets", 12), max_records=9)) == [(5, 8)] * 3
        assert ranges(filled.run("run9", ending_offsets=stop("group", 12))) == [(8, 12)] * 3
        assert ranges(filled.run("run10")) == [(12, 20)] * 3
        assert filled.check() == 60

    def test_a_bound_behind_the_end_is_the_last_stable_offset_and_nothing_is_read_where_the_other_group_has_none(self, filled):
        group = commit(filled, {1: 7}, f"other-{filled.name}")
        assert ranges(filled.run(ending_offsets=f"committed:{group}")) == [(0, 0), (0, 7), (0, 0)]
        settings = {"transactional.id": filled.topic, "transaction.timeout.ms": 600_000}
        producer = Producer({**filled.kafka.connection_extra(), **settings})
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce(filled.topic, order(60), b"k", 0)
        producer.flush(60)
        report = filled.run("run2", ending_offsets={filled.topic: {"0": 1000, "1": 1000, "2": -1}})
        assert ranges(report) == [(0, 20), (7, 20), (0, 20)]
        assert report["held_back"] == 1
        producer.abort_transaction(60)

    def test_what_cannot_be_is_refused_before_anything_happens(self, files):
        for options, where in (
            ({"starting_offsets": "yesterday"}, "starting_offsets"),
            ({"ending_offsets": "earliest"}, "ending_offsets"),
            ({"ending_offsets": "2026-01-01T00:00:00"}, "ending_offsets"),
            ({"ending_offsets": "2026-01-01T00:00:00Z", "follows": "other"}, "ending_offsets"),
            ({"ending_offsets": f"committed:{files.name}"}, "ending_offsets"),
        ):
            with pytest.raises(ValidationError) as caught:
                files.run(**options)
            assert [p.where for p in caught.value.problems] == [where], options
