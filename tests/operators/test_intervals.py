"""Windows of data intervals: in any order, side by side, replayed, on a real broker and real sinks."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from airflow_kafka_spark.errors import (
    ChangeRefused,
    DataLoss,
    ForeignOffsets,
    IntervalNotOver,
    IntervalOverlaps,
    IntervalsOpen,
    OldOffsetsInRows,
    ProgressWindowOpen,
    SinkRejected,
    TooManyOutOfInterval,
    TopicRecreated,
    ValidationError,
)
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.ledger.topic import LedgerTopic
from airflow_kafka_spark.sinks import PostgresSink
from airflow_kafka_spark.windows import model
from tests.support.clients import find_producer
from tests.support.control import forget, reset, skip
from tests.support.dead_letters import BAD, letters
from tests.support.intervals import BEGIN, HOURS, Intervals, ends, hour
from tests.support.oracle import same_multiset, wait_stable
from tests.support.pipelines import order, row_of


@pytest.fixture
def partitions():
    return 3


@pytest.fixture
def intervals(files):
    return Intervals(files, table=False)


@pytest.fixture
def in_table(table):
    return Intervals(table, table=True)


def by_interval(intervals) -> dict[str, list]:
    """Return the rows of each interval in one order."""
    return {name: sorted(rows) for name, rows in intervals.rows().items()}


def spoil(pipeline, interval: str) -> None:
    """Change the rows of an interval, and delete one of them."""
    with pipeline.postgres.connect(autocommit=True) as connection:
        of_it = f'FROM "{pipeline.place}" WHERE "window" LIKE \'%{interval}%\''
        ids = [row[0] for row in connection.execute(f"SELECT id {of_it}").fetchall()]
        assert len(ids) > 1
        connection.execute(f"UPDATE \"{pipeline.place}\" SET customer = 'spoilt' WHERE id = ANY(%s)", [ids])
        connection.execute(f'DELETE FROM "{pipeline.place}" WHERE id = %s', [ids[0]])


def test_in_whatever_order_intervals_are_moved_they_tile_the_log_and_the_group_follows_the_complete_ones_without_a_hole(
    intervals,
):
    intervals.fill()
    reports: dict[int, dict] = {}
    for number in (3, 0, 5, 1, 4, 2):
        reports[number] = intervals.run(number)
        # Between two runs a late record arrives.
        intervals.produce(5, 200, partition=number % 3)
        missing = next(n for n in range(HOURS + 1) if n not in reports)
        stands = ends(reports[missing - 1]) if missing else dict.fromkeys(range(3), -1001)
        assert intervals.pipeline.committed() == stands, f"interval {missing} is missing"
        if missing == 2:
            with pytest.raises(IntervalsOpen):  # a window of progress does not pass over one that is missing
                intervals.pipeline.run("manual", on_missing_interval="progress")
    assert intervals.check(list(reports.values())) >= HOURS * 5


def test_a_record_at_the_end_of_an_interval_belongs_to_the_next(intervals):
    intervals.produce(0, 59.9999, 60, 60.001, 120, 121, partition=0)
    intervals.produce(200, partition=1)
    intervals.produce(200, partition=2)
    reports = [intervals.run(0), intervals.run(1)]
    assert [r["records_read"] for r in reports] == [2, 2]
    assert intervals.check(reports) == 4
    assert [sorted(row[0] for row in rows) for _, rows in sorted(intervals.rows().items())] == [[0, 1], [2, 3]]


def test_records_outside_of_their_interval_are_counted_with_the_largest_distance_and_can_fail_it_before_anything_is_committed(
    intervals,
):
    # The record of 59.9 is late: it comes after a record of the next hour. The record of 130 is not late, it ends the interval.
    intervals.produce(0, 59, 61, 10, 59.9, 130, partition=0)
    for partition in (1, 2):
        intervals.produce(130, partition=partition)
    assert "records_out_of_interval" not in intervals.run(0)
    with pytest.raises(TooManyOutOfInterval, match=r"2 of the 3 records .* by up to 3,000.000 s") as raised:
        intervals.run(1, max_out_of_interval=1)
    assert (raised.value.count, raised.value.records, raised.value.limit, raised.value.seconds) == (2, 3, 1, 3000.0)
    assert sorted(row[0] for rows in intervals.rows().values() for row in rows) == [0, 1]
    report = intervals.run(1, max_out_of_interval=2)
    assert (report["records_read"], report["records_out_of_interval"], report["out_of_interval_seconds"]) == (3, 2, 3000.0)
    for wrong, options in ((-1, {}), ("all", {}), (5, {"window": "progress"})):
        with pytest.raises(ValidationError, match="max_out_of_interval"):
            intervals.run(1, max_out_of_interval=wrong, **options)


@pytest.mark.extended
def test_intervals_side_by_side_are_each_moved_once(in_table):
    in_table.fill()
    in_table.run(0)
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(in_table.run, range(5)))
    assert in_table.check(reports) >= 25
    assert in_table.pipeline.committed() == ends(reports[-1])


def test_a_boundary_beyond_the_newest_record_is_decided_only_after_grace(intervals):
    now, grace = datetime.now(timezone.utc), timedelta(seconds=1)
    intervals.produce(0)
    report = intervals.pipeline.run("run-a", facts={"interval": (BEGIN, now)}, grace=grace)
    assert datetime.now(timezone.utc) >= now + grace
    assert report["records_read"] == 1
    # The boundary is decided: a record that comes later belongs to the next interval, even if its timestamp is older.
    intervals.produce(1, 2)
    assert intervals.pipeline.run("run-b", facts={"interval": (now, now + grace)}, grace=0)["records_read"] == 2


def test_two_pipelines_with_the_same_boundaries_agree_also_on_the_records_of_a_partition_created_later(
    intervals, unique, tmp_path
):
    intervals.produce(0, 70, 130, partition=0)
    intervals.produce(130, partition=1)
    intervals.produce(130, partition=2)
    hourly = [intervals.run(0)]
    intervals.pipeline.kafka.create_partitions(intervals.pipeline.topic, 4)
    intervals.produce(100, 150, partition=3)
    hourly.append(intervals.run(1))
    assert {r["partition"]: (r["start"], r["end"]) for r in hourly[1]["ranges"]}[3] == (0, 1)
    assert intervals.check(hourly) == 3
    # Late records belong to neither interval, whichever of them is planned first.
    intervals.produce(40, 110, partition=0)
    name = unique("daily")
    options = {"pipeline": name, "group_id": name, "place": str(tmp_path / "daily")}
    daily = intervals.pipeline.run("daily", facts={"interval": hour(0, 2)}, **options)
    assert daily["records_read"] == sum(r["records_read"] for r in hourly) == 3


class TestReplay:
    @pytest.mark.parametrize("kind", ["intervals", "in_table"])
    def test_clearing_an_interval_replays_the_same_offsets_and_replaces_exactly_its_rows(self, kind, request):
        intervals = request.getfixturevalue(kind)
        intervals.fill()
        reports = [intervals.run(0), intervals.run(1)]
        assert intervals.run(1) == reports[1], "a retry after success is no replay"
        other = intervals.pipeline.run("another", facts={"interval": hour(1), "max_tries": 5})
        assert other == reports[1], "another run of the same interval does nothing"
        before, group = by_interval(intervals), intervals.pipeline.committed()
        if kind == "in_table":
            spoil(intervals.pipeline, sorted(before)[1])
        again = intervals.run(1, cleared=1)
        assert again["replay"] == 1
        assert [(r["start"], r["end"]) for r in again["ranges"]] == [(r["start"], r["end"]) for r in reports[1]["ranges"]]
        assert by_interval(intervals) == before
        assert intervals.pipeline.committed() == group, "a replay never moves the group"
        assert intervals.check([reports[0], again]) >= 10
        # Records that were deleted since fail a replay, and the rows stay.
        admin = AdminClient(intervals.pipeline.kafka.connection_extra())
        target = TopicPartition(intervals.pipeline.topic, 0, reports[1]["ranges"][0]["start"] + 1)
        admin.delete_records([target])[target].result(60)
        with pytest.raises(DataLoss):
            intervals.run(1, cleared=2)
        assert by_interval(intervals) == before

    def test_appended_rows_that_do_not_say_their_window_are_neither_replayed_nor_doubled(self, in_table):
        in_table.fill()
        sink = PostgresSink(conn_id="warehouse", table=in_table.pipeline.place)
        in_table.run(0, sink=sink)
        before = sorted(in_table.pipeline.rows())
        with pytest.raises(ValidationError, match="window_column"):
            in_table.run(0, sink=sink, cleared=1)
        with pytest.raises(ValidationError, match="window_column"):
            in_table.run(1, sink=sink, on_rerun="replay")
        assert in_table.run(0, sink=sink, cleared=1, on_rerun="skip")["records_read"] == len(before)
        # The sink has got a window column since.
        with pytest.raises(SinkRejected, match="rows with none"):
            in_table.run(0, cleared=1)
        assert sorted(in_table.pipeline.rows()) == before

    def test_an_upsert_replays_without_bringing_back_what_is_older(self, table):
        name = table.place
        with table.postgres.connect(autocommit=True) as connection:
            connection.execute(
                f'ALTER TABLE "{name}" ADD PRIMARY KEY (id), ADD COLUMN "__connect_topic" text, '
                'ADD COLUMN "__connect_partition" integer, ADD COLUMN "__connect_offset" bigint'
            )
        sink = PostgresSink(conn_id="warehouse", table=name, mode="upsert", key="id", offset_columns=True)
        producer = Producer(table.kafka.connection_extra())
        for version, minutes in enumerate((0, 60, 120)):
            at = round((BEGIN + timedelta(minutes=minutes)).timestamp() * 1000)
            event = json.loads(order(1)) | {"customer": f"version-{version}"}
            producer.produce(table.topic, json.dumps(event).encode(), b"1", 0, timestamp=at)
        producer.flush(60)
        options = {"window": "interval", "grace": 0, "sink": sink}

        def customer():
            with table.postgres.connect(autocommit=True) as connection:
                return connection.execute(f'SELECT customer FROM "{name}"').fetchall()

        table.run("b", facts={"interval": hour(1)}, **options)
        assert customer() == [("version-1",)]
        table.run("a", facts={"interval": hour(0)}, **options)
        assert customer() == [("version-1",)], "an interval that is moved later is not a newer one"
        with table.postgres.connect(autocommit=True) as connection:
            connection.execute(f"UPDATE \"{name}\" SET customer = 'spoilt'")
        table.run("b", facts={"interval": hour(1), "max_tries": 1}, **options)
        assert customer() == [("version-1",)]
        with pytest.raises(ValidationError, match="offset_columns"):
            plain = PostgresSink(conn_id="warehouse", table=name, mode="upsert", key="id")
            table.run("c", facts={"interval": hour(2)}, window="interval", sink=plain)
        table.kafka.delete_topic(table.topic)
        table.kafka.create_topic(table.topic, 3)
        with pytest.raises(OldOffsetsInRows, match=table.topic):
            table.run("c", facts={"interval": hour(2)}, data_loss="skip", **options)

    def test_clearing_a_progress_window_is_a_no_op_unless_it_is_to_be_replayed(self, files):
        files.produce(50)
        first = files.run("run1")
        files.produce(30)
        files.run("run2")
        assert files.run("run1", facts={"max_tries": 1}) == first
        group = files.committed()
        again = files.run("run1", facts={"max_tries": 1}, on_rerun="replay")
        assert (again["replay"], again["records_read"], again["ranges"]) == (1, 50, first["ranges"])
        assert files.committed() == group
        assert same_multiset((row_of(value) for *_, value in files.events()), files.rows()) == 80


class TestWhatIsRefused:
    def test_an_interval_that_is_missing_has_no_width_or_is_not_over_and_options_that_mean_nothing_for_one(self, intervals):
        for interval in (None, (BEGIN, BEGIN)):
            with pytest.raises(ValidationError, match="CronDataIntervalTimetable"):  # the timetable to use
                intervals.pipeline.run("manual", facts={"interval": interval})
        with pytest.raises(IntervalNotOver):
            intervals.pipeline.run("daily", facts={"interval": hour(0, 24)})
        with pytest.raises(ValidationError, match="max_records"):
            intervals.run(0, max_records=5, follows="other")

    def test_such_a_run_moves_what_is_new_if_the_user_says_so(self, intervals):
        intervals.produce(0, 30, 70, 130, partition=0)
        first = intervals.run(0)
        manual = intervals.pipeline.run("manual", on_missing_interval="progress")
        assert (first["records_read"], manual["records_read"]) == (2, 2)
        # What the manual run has moved belongs to no interval any more.
        intervals.produce(80, 190, partition=0)
        assert [intervals.run(1)["records_read"], intervals.run(2)["records_read"]] == [0, 1]
        assert same_multiset(range(5), (row[0] for _, row in intervals.marked_rows())) == 5

    def test_an_interval_that_overlaps_another_one_is_refused(self, intervals):
        intervals.fill()
        reports = [intervals.run(1)]
        with pytest.raises(IntervalOverlaps):
            intervals.pipeline.run("daily", facts={"interval": hour(0, 6)})
        assert intervals.check([*reports, intervals.run(0)]) >= 10


def test_what_is_remembered_of_intervals_stays_small_and_old_ones_can_still_be_replayed(intervals):
    pipeline, dead = intervals.pipeline, f"dead-{intervals.pipeline.topic}"
    tolerant = {"keep_windows": 2, "errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead}
    producer = find_producer(pipeline.kafka, pipeline.topic)
    for partition in range(3):
        producer.produce(pipeline.topic, BAD[0], b"bad", partition, timestamp=round(BEGIN.timestamp() * 1000))
    producer.flush(60)
    intervals.fill()
    reports = [intervals.run(number, **tolerant) for number in range(3)]
    assert reports[0]["records_rejected"] == 3
    with KafkaHook() as hook:
        ledger = LedgerTopic(hook, f"ledger-{pipeline.name}")
        ledger.ensure()
        ledgers = [f"{pipeline.name}.{name}" for name in ledger.read(pipeline.name).memory.intervals]
        assert len(ledgers) == 3
        remembered = [name for name in ledgers if ledger.read(name, parent=pipeline.name).memory.entries]
    assert len(remembered) == 2
    assert intervals.run(0, **tolerant)["records_read"] == 0, "reported without its details"
    again = intervals.run(0, cleared=1, **tolerant)
    assert (again["replay"], again["records_rejected"]) == (1, 3)
    assert intervals.check([again, *reports[1:]]) >= 15
    assert len(letters(pipeline.kafka.connection_extra(), dead)) == 3, "they were sent by the first move"


def test_a_new_group_reads_the_topic_from_the_start_into_another_table_and_takes_over(table, unique):
    """The example of docs/intervals.md."""
    table.produce(300)
    table.run("old-1")
    name, place = unique("new"), unique("orders")
    with table.postgres.connect(autocommit=True) as connection:
        connection.execute(f'CREATE TABLE "{place}" (LIKE "{table.place}")')
    new = {"pipeline": name, "group_id": name, "starting_offsets": "earliest"}
    new["sink"] = PostgresSink(conn_id="warehouse", table=place)
    table.produce(200)
    first = table.run("new-1", **new)
    old = table.run("old-2")
    assert (first["records_read"], old["records_read"]) == (500, 200)
    assert {r["partition"]: r["end"] for r in first["ranges"]} == {r["partition"]: r["end"] for r in old["ranges"]}
    with table.postgres.connect(autocommit=True) as connection:
        query = f'SELECT id, customer, amount::text, extract(epoch FROM placed_at)::bigint FROM "{place}"'
        rows = [tuple(row) for row in connection.execute(query).fetchall()]
    assert same_multiset((row_of(value) for *_, value in table.events()), rows) == 500


@pytest.mark.parametrize("data_loss", ["fail", "skip"])
def test_a_replay_of_what_retention_has_removed_fails_and_leaves_the_rows(in_table, data_loss):
    in_table.fill()
    reports = [in_table.run(number, data_loss=data_loss) for number in (0, 1)]
    rows = by_interval(in_table)
    delete_below(in_table.pipeline, {r["partition"]: r["end"] - (r["partition"] == 0) for r in reports[0]["ranges"]})
    with pytest.raises(DataLoss, match="they stay there"):
        in_table.run(0, cleared=1, data_loss=data_loss)
    delete_below(in_table.pipeline, ends(reports[1]))
    for number in (0, 1):
        with pytest.raises(DataLoss):
            in_table.run(number, cleared=2, data_loss=data_loss)
    assert by_interval(in_table) == rows
    assert in_table.run(2)["records_read"] == 7


def test_an_interval_that_retention_has_removed_in_part_is_replayed_with_what_it_had(in_table):
    in_table.fill()
    delete_below(in_table.pipeline, dict.fromkeys(range(3), 1))
    with pytest.raises(DataLoss):
        in_table.run(0)
    report = in_table.run(0, data_loss="skip")
    assert (report["records_read"], len(report["gaps"])) == (4, 3)
    rows = by_interval(in_table)
    again = [in_table.run(0, cleared=number, **given) for number, given in ((1, {}), (2, {"data_loss": "skip"}))]
    assert [(r["records_read"], r["replay"]) for r in again] == [(4, 1), (4, 2)]
    assert by_interval(in_table) == rows
    # All records of an interval between others were deleted: it is skipped once, and after a clear it has nothing to replace.
    in_table.run(1)
    later = in_table.run(3)
    delete_below(in_table.pipeline, {r["partition"]: r["start"] for r in later["ranges"]})
    with pytest.raises(DataLoss):
        in_table.run(2)
    assert in_table.pipeline.committed() == ends(in_table.pipeline.reports[-2])
    for cleared in (0, 1):
        gone = in_table.run(2, data_loss="skip", cleared=cleared)
        assert (gone["records_read"], [r["start"] for r in gone["ranges"]]) == (0, [r["start"] for r in later["ranges"]])
    assert in_table.pipeline.committed() == ends(later)


def test_an_open_progress_window_beside_intervals_may_be_skipped_and_windows_of_both_kinds_continue(intervals):
    flow = intervals.pipeline
    flow.options["on_missing_interval"] = "progress"
    intervals.produce(0, 1, 2, 3, 4, 5)
    assert flow.run("manual1")["records_read"] == 6
    intervals.produce(61, 62, 63, *([121] * 3))
    assert intervals.run(1)["records_read"] == 3
    dead = flow.victim("manual2", fault="planned")
    assert dead.wait() != 0 and dead.fired
    with pytest.raises(ProgressWindowOpen, match='Set `window="progress"`, and run the task again'):
        flow.run("manual2", facts={"interval": hour(2)})
    asked = {"why": "it never fits", "ledger_topic": f"ledger-{flow.name}"}
    wait_stable(flow.kafka.connection_extra(), asked["ledger_topic"])
    with KafkaHook() as hook:
        assert sum(gap.end - gap.start for gap in skip(hook, flow.name, running=False, **asked).skipped) == 3
        with pytest.raises(ChangeRefused, match="do not wait for each other"):
            skip(hook, flow.name, **asked)
    intervals.produce(122, 123, 124, *([181] * 3))
    assert intervals.run(2)["records_read"] == 3
    intervals.produce(200)
    # The sink has the intervals under names of their own: its last progress window ended before them.
    assert flow.run("manual3")["records_read"] == 4
    skipped = {3 + 6, 4 + 6, 5 + 6}
    same_multiset([row_of(v) for *_, v in flow.events() if row_of(v)[0] not in skipped], flow.rows())


@pytest.mark.parametrize("lost", ["forgotten-with-its-group", "ledger-lost"])
def test_a_pipeline_with_windows_of_both_kinds_doubles_nothing_when_it_was(intervals, lost):
    flow = intervals.pipeline
    flow.options["on_missing_interval"] = "progress"
    ledger = f"ledger-{flow.name}"

    def lose() -> None:
        wait_stable(flow.kafka.connection_extra(), ledger)
        with KafkaHook() as hook:
            if lost == "ledger-lost":
                flow.kafka.delete_topic(ledger)
                hook.create_topic(ledger, 1, config={"cleanup.policy": "compact"})
            else:
                forget(hook, flow.name, why="a test", ledger_topic=ledger, delete_group=True)

    intervals.produce(*range(61, 67))
    assert flow.run("manual1")["records_read"] == 6
    intervals.produce(70, 71, 72, *([121] * 3))
    intervals.run(1)
    lose()
    # A progress window begins behind the intervals, which the sink has under names of their own.
    intervals.produce(122, 123, 124)
    assert flow.run("manual2")["records_read"] == 6
    if lost != "ledger-lost":
        intervals.produce(130, 131, *([181] * 3))
        lose()
        # An interval leaves out what progress windows have moved, as long as their position is only in the sink.
        assert intervals.run(2)["records_read"] == 2
        assert flow.run("manual3")["records_read"] == 3
    assert same_multiset((row_of(v) for *_, v in flow.events()), flow.rows()) >= 15


def test_a_position_that_was_moved_back_is_still_there_behind_an_empty_interval(intervals):
    """Otherwise the sink would refuse each further window, as one that does not continue the last one."""
    flow = intervals.pipeline
    flow.options["on_missing_interval"] = "progress"
    intervals.produce(*range(6))
    assert flow.run("manual1")["records_read"] == 6
    asked = {"why": "once more", "ledger_topic": f"ledger-{flow.name}", "group_id": flow.name}
    wait_stable(flow.kafka.connection_extra(), asked["ledger_topic"])
    with KafkaHook() as hook:
        reset(hook, flow.name, "earliest", **asked)
    assert intervals.run(3)["records_read"] == 0
    assert flow.run("manual2")["records_read"] == 6
    assert len(flow.rows()) == 12


def delete_below(pipeline, offsets: dict[int, int]) -> None:
    """Delete the records below some offsets, by partition, as retention does."""
    with KafkaHook() as hook:
        hook.delete_records({model.TopicPartition(pipeline.topic, partition): offset for partition, offset in offsets.items()})


def test_a_topic_created_again_with_records_that_were_not_read_is_refused_until_skip_is_said(intervals):
    made = intervals.pipeline
    intervals.fill()
    for number in (0, 1):
        intervals.run(number)
    moved = len(made.rows())
    made.kafka.delete_topic(made.topic)
    made.kafka.create_topic(made.topic, 3)
    intervals.produce(*(120 + minute for minute in range(0, 300, 10)))
    with pytest.raises(TopicRecreated):
        intervals.run(2)
    assert len(made.rows()) == moved and made.committed() == dict.fromkeys(range(3), -1001)
    report = intervals.run(2, data_loss="skip")
    assert report["records_read"] == 6
    # The boundary of this topic is decided already.
    following = intervals.run(3)
    assert following["records_read"] == 6
    assert len(made.rows()) == moved + 12
    assert made.committed() == {r["partition"]: r["end"] for r in following["ranges"]}, "nothing of the old topic counts"


def test_an_interval_that_the_sink_has_of_another_topic_is_not_taken_for_this_one(intervals):
    made = intervals.pipeline
    intervals.fill()
    intervals.run(0)
    moved = len(made.rows())
    for topic in (made.topic, f"ledger-{made.name}"):
        made.kafka.delete_topic(topic)
    made.kafka.create_topic(made.topic, 3)
    intervals.produce(*range(0, 60, 5))
    for partition in range(3):
        intervals.produce(61, partition=partition)
    for options in ({}, {"data_loss": "skip"}):
        with pytest.raises(ForeignOffsets) as caught:
            intervals.run(0, **options)
    assert list(caught.value.topics) == [made.topic]
    assert len(made.rows()) == moved


def test_a_pipeline_of_intervals_that_was_forgotten_or_lost_its_ledger_doubles_nothing_when_it_runs_again(intervals):
    intervals.fill()
    reports = [intervals.run(number) for number in (0, 1)]
    name, topic = intervals.pipeline.name, f"ledger-{intervals.pipeline.name}"
    with KafkaHook() as hook:
        forgotten = forget(hook, name, why="a test", ledger_topic=topic)
        assert forgotten.records >= 6, "two lanes with a window and a position each, and their intervals"
        ledger = LedgerTopic(hook, topic)
        ledger.ensure()
        assert not ledger.read(name).memory.intervals
    again = intervals.run(0)
    assert [(r["start"], r["end"]) for r in again["ranges"]] == [(r["start"], r["end"]) for r in reports[0]["ranges"]]
    intervals.pipeline.kafka.delete_topic(topic)
    with KafkaHook() as hook:
        hook.create_topic(topic, 1, config={"cleanup.policy": "compact"})
    assert intervals.run(1)["ranges"] is not None
    assert intervals.check([*reports, intervals.run(2)]) >= 15
