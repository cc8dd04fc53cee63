"""Where an operator's first window begins, and where its windows stop: on a real broker, into a real sink."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer

from airflow_kafka_spark.errors import BoundRefused, GroupOwned, PlanError, ValidationError
from airflow_kafka_spark.hooks.kafka import KafkaHook
from airflow_kafka_spark.windows.bounds import CommittedOffsets
from airflow_kafka_spark.windows.model import TopicPartition
from tests.support.pipelines import order, row_of
from tests.support.relay import relay

BASE = 1_750_000_000_000
PER_PARTITION = 20


@pytest.fixture
def filled(files):
    """Twenty records in each partition, a second apart: offset n is at BASE + n seconds."""
    producer = Producer(files.kafka.connection_extra())
    for number in range(3 * PER_PARTITION):
        partition, offset = divmod(number, PER_PARTITION)
        producer.produce(files.topic, order(number), b"k", partition, timestamp=BASE + 1000 * offset)
    producer.flush(30)
    return files


def commit(pipeline, offsets: dict[int, int], group: str | None = None) -> str:
    """A consumer of another kind has left its offsets: Connect, Flink, or somebody with a console."""
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

    @pytest.mark.parametrize(
        "start, begins",
        [
            ("earliest", [0, 0, 0]),
            ("latest", [20, 20, 20]),
            ("2025-06-15T15:06:50Z", [10, 10, 10]),
            ("{{ params.offsets }}", [3, 0, 20]),
        ],
        ids=["earliest", "latest", "time", "specific offsets from a template"],
    )
    def test_an_explicit_start_counts_even_where_others_have_committed_offsets(self, filled, start, begins):
        from tests.support.pipelines import make
        from tests.support.runs import context

        commit(filled, {0: 15, 1: 15, 2: 15})
        operator = make(**{**filled.arguments, "starting_offsets": start})
        offsets = f'{{"{filled.topic}": {{"0": 3, "1": -2, "2": -1}}}}'
        operator.render_template_fields({"params": {"offsets": offsets}})
        report = operator.execute(context("run1"))
        assert ranges(report) == [(begin, 20) for begin in begins]
        assert sorted(filled.rows()) == rows_of([range(begin, 20) for begin in begins])

    def test_taking_over_from_a_connect_sink_begins_at_its_groups_offsets(self, filled):
        group = commit(filled, {0: 4, 1: 20, 2: 19}, f"connect-{filled.name}")
        assert ranges(filled.run(starting_offsets=CommittedOffsets(group, "none"))) == [(4, 20), (20, 20), (19, 20)]
        assert sorted(filled.rows()) == rows_of([range(4, 20), range(0), range(19, 20)])
        assert filled.committed() == {0: 20, 1: 20, 2: 20}, "the pipeline's own group"

    def test_none_refuses_where_nothing_is_committed(self, filled):
        with pytest.raises(PlanError, match="no committed offset"):
            filled.run(starting_offsets="none")
        commit(filled, {0: 1, 1: 1, 2: 1})
        assert ranges(filled.run(starting_offsets="none")) == [(1, 20)] * 3

    def test_a_partition_that_is_not_named_is_an_error_and_nothing_is_planned(self, filled):
        with pytest.raises(BoundRefused, match=f"{filled.topic}-2"):
            filled.run(starting_offsets={filled.topic: {"0": 1, "1": 1}})
        assert ranges(filled.run()) == [(0, 20)] * 3

    def test_the_ledger_and_the_sinks_record_come_before_any_start(self, filled, unique):
        filled.run(max_records=30)
        assert ranges(filled.run("run2", starting_offsets="earliest", max_records=3)) == [(10, 11)] * 3
        found = filled.run("run3", starting_offsets="earliest", ledger_topic=unique("ledger"))
        assert ranges(found) == [(11, 20)] * 3
        assert filled.check() == 60

    def test_a_pipeline_whose_ledger_is_lost_never_begins_anew_where_it_has_moved_its_group(self, kafka, unique, tmp_path):
        """A topic remembers no window, so that only the group's offsets tell: their metadata says who has committed them."""
        with relay(kafka, unique, tmp_path) as orders:
            orders.send(200)
            orders.run("run1")
            orders.send(50)
            for number, start in enumerate(("earliest", "latest"), 2):
                report = orders.run(f"run{number}", ledger_topic=unique("other"), starting_offsets=start)
                assert report["window"] == f"{number:010d}"
                assert report["records_read"] == (50 if number == 2 else 0)
            assert orders.check() == 250

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
    @pytest.mark.parametrize("bound", ["time", "offsets", "group"])
    def test_windows_stop_at_the_bound_and_go_on_when_it_moves(self, filled, bound):
        group = f"flink-{filled.name}"

        def stop(offset: int):
            if bound == "group":
                commit(filled, dict.fromkeys(range(3), offset), group)
            return {
                "time": f"2025-06-15T15:06:{40 + offset:02d}Z",
                "offsets": {filled.topic: {str(p): offset for p in range(3)}},
                "group": CommittedOffsets(group),
            }[bound]

        assert ranges(filled.run("run1", ending_offsets=stop(5))) == [(0, 5)] * 3
        assert ranges(filled.run("run2", ending_offsets=stop(5))) == [(5, 5)] * 3
        assert ranges(filled.run("run3", ending_offsets=stop(3))) == [(5, 5)] * 3, "never below the start"
        assert ranges(filled.run("run4", ending_offsets=stop(12), max_records=9)) == [(5, 8)] * 3
        assert ranges(filled.run("run5", ending_offsets=stop(12))) == [(8, 12)] * 3
        assert ranges(filled.run("run6")) == [(12, 20)] * 3
        assert filled.check() == 60

    def test_a_bound_behind_the_end_is_the_last_stable_offset(self, filled):
        settings = {"transactional.id": filled.topic, "transaction.timeout.ms": 600_000}
        producer = Producer({**filled.kafka.connection_extra(), **settings})
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce(filled.topic, order(60), b"k", 0)
        producer.flush(30)
        report = filled.run(ending_offsets={filled.topic: {"0": 1000, "1": 1000, "2": -1}})
        assert ranges(report) == [(0, 20)] * 3
        assert report["held_back"] == 1
        producer.abort_transaction(30)

    def test_of_a_partition_that_the_other_group_never_committed_nothing_is_read(self, filled):
        group = commit(filled, {1: 7}, f"other-{filled.name}")
        assert ranges(filled.run(ending_offsets=f"committed:{group}")) == [(0, 0), (0, 7), (0, 0)]

    @pytest.mark.parametrize(
        "options, where",
        [
            ({"starting_offsets": "yesterday"}, "starting_offsets"),
            ({"ending_offsets": "earliest"}, "ending_offsets"),
            ({"ending_offsets": "2026-01-01T00:00:00"}, "ending_offsets"),
            ({"ending_offsets": "2026-01-01T00:00:00Z", "follows": "other"}, "ending_offsets"),
            ({"ending_offsets": "OWN"}, "ending_offsets"),
        ],
        ids=["no start", "no stop", "no zone", "with follows", "its own group"],
    )
    def test_what_cannot_be_is_refused_before_anything_happens(self, files, options, where):
        options = {k: f"committed:{files.name}" if v == "OWN" else v for k, v in options.items()}
        with pytest.raises(ValidationError) as caught:
            files.run(**options)
        assert [p.where for p in caught.value.problems] == [where]
