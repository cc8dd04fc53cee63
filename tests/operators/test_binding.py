"""A window goes to the destination of its plan, moved by the task of its pipeline, unless a user changes this."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from airflow_kafka_spark.control.pipelines import read_pipeline
from airflow_kafka_spark.errors import (
    BadRecords,
    DestinationChanged,
    GroupOwned,
    KafkaSparkError,
    PipelineTaken,
    RecordElsewhere,
    SinkRecordMissing,
    SinkRejected,
    SourceChanged,
    TopicRecreated,
    ValidationError,
    WindowConflict,
)
from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.ledger.attempt import Ledger
from airflow_kafka_spark.operators import KafkaToKafkaOperator, KafkaToSinkOperator, SourceToKafkaOperator
from airflow_kafka_spark.operators.binding import find_committed_before
from airflow_kafka_spark.sinks import FilesSink, KafkaSink, PostgresSink
from airflow_kafka_spark.sources import FilesSource
from airflow_kafka_spark.transforms import Condition, Filter, RegexRouter
from airflow_kafka_spark.windows.binding import Binding, Endpoint, Writer, compare_endpoints, compare_locations
from airflow_kafka_spark.windows.memory import Attempt, Memory, WindowEntry, make_binding_record
from airflow_kafka_spark.windows.model import ELSEWHERE, OffsetRange, State, Window
from tests.support.control import forget, rebind, reset
from tests.support.distribution import extended
from tests.support.dry import Dry
from tests.support.intervals import Intervals, facts
from tests.support.oracle import committed_records, same_multiset, wait_stable
from tests.support.pipelines import COLUMNS, SPARK, files_rows, row_of
from tests.support.relay import relay
from tests.support.runs import context, fails_at
from tests.support.shop import shop
from tests.support.waiting import settled


@pytest.fixture
def dies():
    """Run an attempt that ends after a point of its window's life. The window stays open."""

    def died(flow, run, point="sink.committed", **options):
        with fails_at(point):
            flow.run(run, **options)

    return died


@pytest.fixture
def deployment(monkeypatch):
    """Set the Airflow deployment of the next run."""
    return lambda name: monkeypatch.setenv("AIRFLOW__KAFKA_SPARK__DEPLOYMENT", name)


def decide(flow, **options):
    wait_stable(flow.kafka.connection_extra(), f"ledger-{flow.name}")
    with KafkaHook() as hook:
        return rebind(hook, flow.name, why="it moves", who="ann", ledger_topic=f"ledger-{flow.name}", **options)


def orders(flow):
    return [row_of(value) for *_, value in flow.events() if value is not None]


# --- destinations ---------------------------------------------------------------------------------------------------------


def test_an_open_window_is_not_moved_into_another_directory_and_neither_is_the_next_one(files, tmp_path):
    files.produce(30)
    dead = files.victim("run1", fault="sink.committed")
    assert dead.wait() != 0 and dead.fired
    files.produce(20)
    elsewhere = FilesSink(path=str(tmp_path / "elsewhere"))
    with pytest.raises(DestinationChanged, match="was planned into path") as refused:
        files.run("run2", sink=elsewhere)
    assert refused.value.differences == (("path", f"file://{files.place}", f"file://{tmp_path}/elsewhere"),)
    for said in ("run1", "rebind", "--not-running", "elsewhere"):
        assert said in str(refused.value)
    assert files.run("run1")["records_read"] == 30
    with pytest.raises(DestinationChanged, match="has moved its windows into path"):
        files.run("run2", sink=elsewhere)
    assert not files_rows(elsewhere.path)
    assert decide(files).changed and not decide(files).changed
    assert files.run("run2", sink=elsewhere)["records_read"] == 20
    same_multiset(orders(files), [*files.rows(), *files_rows(elsewhere.path)])
    with pytest.raises(DestinationChanged):
        files.run("run3")
    assert files.run("run3", sink=elsewhere)["records_read"] == 0


def test_an_open_window_is_not_moved_through_a_link_that_leads_elsewhere_now(files, tmp_path, dies):
    one, two, link = (tmp_path / name for name in ("one", "two", "link"))
    one.mkdir()
    two.mkdir()
    link.symlink_to(one)
    files.produce(30)
    linked = FilesSink(path=str(link / "table"))
    dies(files, "run1", sink=linked)
    link.unlink()
    link.symlink_to(two)
    with pytest.raises(DestinationChanged) as refused:
        files.run("run1", sink=linked)
    assert refused.value.differences == (("directory", f"{one}/table", f"{two}/table"),)
    link.unlink()
    link.symlink_to(one)
    assert files.run("run1", sink=linked)["records_read"] == 30
    assert len(files_rows(str(one / "table"))) == 30 and not files_rows(str(two / "table"))


def test_with_a_template_each_window_has_its_own_directory_but_an_open_one_keeps_it(files, tmp_path, dies):
    def run(day, run_id):
        made = files.make(**{**files.arguments, "sink": FilesSink(path=f"{tmp_path}/{{{{ ds }}}}")})
        made.render_template_fields({"ds": day})
        return made.execute(context(run_id))

    rows = lambda *days: [row for day in days for row in files_rows(str(tmp_path / day))]  # noqa: E731
    files.produce(30)
    assert run("01", "run1")["records_read"] == 30
    files.produce(30)
    dies(files, "run2", sink=FilesSink(path=str(tmp_path / "02")))
    files.produce(30)
    with pytest.raises(DestinationChanged):
        run("03", "run3")
    assert (run("02", "run2")["records_read"], run("03", "run3")["records_read"]) == (30, 30)
    # A late run of the first day: its directory has no record of the windows of the other days.
    files.produce(10)
    assert run("01", "run4")["records_read"] == 10
    assert [len(rows(day)) for day in ("01", "02", "03")] == [40, 30, 30]
    same_multiset(orders(files), rows("01", "02", "03"))


def test_an_open_window_keeps_its_table_and_the_tables_that_remember_it_by_whatever_address(table, dies, monkeypatch):
    other, aside = f"other_{table.place}", f"aside_{table.place}"
    with table.postgres.connect(autocommit=True) as connection:
        connection.execute(f'CREATE SCHEMA "{aside}"')
        for name in (f'"{other}"', f'"{aside}"."{table.place}"'):
            connection.execute(f"CREATE TABLE {name} ({COLUMNS})")
    table.produce(30)
    dies(table, "run1")
    own = {"conn_id": "warehouse", "table": table.place}
    for changed, fact in (
        ({"table": other}, "table"),
        ({"table": f"{aside}.{table.place}"}, "table"),
        ({"windows_table": "elsewhere"}, "windows_table"),
        ({"splits_table": "elsewhere"}, "splits_table"),
    ):
        with pytest.raises(DestinationChanged) as refused:
            table.run("run2", sink=PostgresSink(**{**own, **changed}))
        assert [what for what, *_ in refused.value.differences] == [fact]
    uri = os.environ["AIRFLOW_CONN_WAREHOUSE"]
    renamed = uri.replace("127.0.0.1", "localhost") if "127.0.0.1" in uri else uri.replace("localhost", "127.0.0.1")
    assert renamed != uri
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE", renamed)
    report = table.run("run2", sink=PostgresSink(**own, lock_timeout=30))
    assert report["window"] == "0000000002" and table.check() == 30
    # Between windows, how a window is seen may change.
    table.produce(10)
    assert table.run("run3", sink=PostgresSink(**own, atomic="split"))["records_read"] == 10
    assert table.check() == 40
    ledger = b"".join(value or b"" for *_, value in committed_ledger(table))
    assert b'"binding"' in ledger and b"password" not in ledger


def committed_ledger(flow):
    from tests.support.oracle import committed_records

    return committed_records(flow.kafka.connection_extra(), f"ledger-{flow.name}")


def test_how_a_window_is_seen_and_cut_may_change_while_it_is_open_and_no_split_of_it_is_in_the_table(table, dies):
    """The sink decides, because it knows which splits it has."""

    def sink(atomic):
        return PostgresSink(conn_id="warehouse", table=table.place, atomic=atomic)

    table.produce(30)
    dies(table, "run1", point="planned", sink=sink("split"))
    assert table.run("run1", sink=sink("window"))["attempts"] == 2
    table.produce(30)
    dies(table, "run2", point="sink.staged", sink=sink("window"), split_records=100)
    report = table.run("run2", sink=sink("split"), split_records=4)
    assert (report["attempts"], table.check()) == (2, 60)


@pytest.mark.parametrize("partitions", [3])
def test_splits_that_an_earlier_attempt_has_committed_stay_and_the_window_continues_as_it_began(table):
    sink = PostgresSink(conn_id="warehouse", table=table.place, atomic="split")
    table.produce(60)
    # Two tasks run at a time, so the third one begins when another one has committed.
    refused = next(row_of(value)[0] for partition, _, _, value in table.events() if partition == 2)

    def constrain(action):
        with table.postgres.connect(autocommit=True) as connection:
            connection.execute(f'ALTER TABLE "{table.place}" {action}')

    constrain("ADD PRIMARY KEY (id)")
    constrain(f"ADD CONSTRAINT sieve CHECK (id <> {refused})")
    with pytest.raises(KafkaSparkError):
        table.run("run1", sink=sink)
    constrain("DROP CONSTRAINT sieve")
    there = len(table.rows())
    assert 0 < there < 60
    with pytest.raises(SinkRejected, match='Keep `atomic="split"`'):
        table.run("run1", sink=replace(sink, atomic="window"))
    with pytest.raises(SinkRejected, match="not a split of this attempt"):
        table.run("run1", sink=sink, split_records=4)
    with pytest.raises(DestinationChanged, match="mode"):
        table.run("run1", sink=replace(sink, mode="upsert", key=["id"]))
    assert len(table.rows()) == there
    assert table.run("run1", sink=sink)["records_read"] == 60
    assert table.check() == 60
    # As the error messages say: once the window is complete, both may change.
    table.produce(20)
    assert table.run("run2", sink=replace(sink, atomic="window"), split_records=4)["records_read"] == 20
    assert table.check() == 80


def test_an_open_window_keeps_the_topics_that_its_other_records_go_to(files, dies):
    from tests.support.dead_letters import check_sorted_out, produce_mixed

    def tolerant(topic):
        return {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": topic}

    dead = f"dead-{files.topic}"
    bad = produce_mixed(files, 30, 10)
    with pytest.raises(BadRecords):
        files.run("run1")
    dies(files, "run1", point="dead.committed", **tolerant(dead))
    with pytest.raises(DestinationChanged, match="dead_letters"):
        files.run("run1", **tolerant(f"other-{dead}"))
    files.run("run1", **tolerant(dead))
    assert check_sorted_out(files, dead) == (30, bad)
    assert files.run("run2", **tolerant(f"other-{dead}"))["records_read"] == 0, "between windows it may change"


ROUTES = [Filter(predicate=Condition("id > 1"), to="rare"), Filter(predicate=Condition("id > 2"), to="common")]


@pytest.mark.parametrize(
    "made",
    [
        lambda **o: KafkaToSinkOperator(topics="t", group_id="g", value=Json(schema="id bigint"), sink=FilesSink(path="/l"), **o),
        lambda **o: KafkaToKafkaOperator(
            topics="t", group_id="g", value=Json(schema="id bigint"), sink=KafkaSink(topic="copy"), **o
        ),
        lambda **o: SourceToKafkaOperator(
            source=FilesSource(path="/in", format="text"), sink=KafkaSink(topic="copy", value=Json()), **o
        ),
    ],
    ids=["to a sink", "between topics", "from a source"],
)
def test_side_topics_are_part_of_where_an_open_window_goes_and_of_no_later_one(made):
    dead = {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": "dead"}
    found = [made(task_id="task", **options).list_destinations() for options in ({}, {**dead, "transforms": ROUTES})]
    assert {w: v for w, v in found[1].details.items() if w in ("dead_letters", "routes")} == {
        "dead_letters": "dead",
        "routes": "common, rare",
    }
    assert not compare_endpoints(*found) and not compare_endpoints(*reversed(found)) and not compare_locations(*found)
    other = made(task_id="task", **{**dead, "errors_deadletterqueue_topic_name": "x"}, transforms=ROUTES[:1]).list_destinations()
    assert [d.what for d in compare_endpoints(found[1], other)] == ["dead_letters", "routes"]


def test_an_open_window_keeps_the_sinks_of_its_filters(table, tmp_path, dies):
    def rare(place):
        return [Filter(predicate=Condition("id % 10 = 0"), negate=True, to=FilesSink(path=str(tmp_path / place)))]

    table.produce(100)
    dies(table, "run1", transforms=rare("one"))
    with pytest.raises(DestinationChanged, match="filter 1 path"):
        table.run("run2", transforms=rare("two"))
    with pytest.raises(DestinationChanged, match="filter 1 path"):
        table.run("run2")
    table.run("run1", transforms=rare("one"))
    same_multiset(orders(table), [*table.rows(), *files_rows(str(tmp_path / "one"))])
    # After a rebind, it goes into another table, although the ledger knows the first one.
    table.produce(50)
    dies(table, "run3", point="dead.committed", transforms=rare("one"))
    decide(table, running=False)
    table.run("run3", transforms=rare("two"))
    places = [files_rows(str(tmp_path / place)) for place in ("one", "two")]
    assert [len(rows) for rows in places] == [90, 45]
    same_multiset(orders(table), [*table.rows(), *places[0], *places[1]])
    table.produce(50)
    dies(table, "run4", point="dead.committed", transforms=rare("two"))
    decide(table, running=False)
    report = table.run("run4")
    assert (report["records_read"], report["records_written"], report.get("records_routed")) == (50, 50, None)


def test_an_open_window_goes_elsewhere_after_a_rebind(files, tmp_path, dies):
    files.produce(30)
    dies(files, "run1", point="sink.staged")
    elsewhere = FilesSink(path=str(tmp_path / "elsewhere"))
    done = decide(files, running=False)
    assert done.changed and [o.number for o in done.open_windows] == [1]
    assert files.run("run1", sink=elsewhere)["attempts"] == 2
    same_multiset(orders(files), files_rows(elsewhere.path))
    assert not files.rows()


def test_a_sink_of_a_filter_that_a_rebind_has_replaced_gets_its_part_though_the_own_sink_has_its_own(files, tmp_path, dies):
    def routed_to(name):
        to = FilesSink(path=str(tmp_path / name))
        return {"transforms": [Filter(predicate=Condition("id % 10 = 0"), negate=True, to=to)]}

    files.produce(30)
    dies(files, "run1", point="close.begin", **routed_to("one"))
    decide(files, running=False)
    dies(files, "run1", point="close.begin", **routed_to("other"))
    assert files.run("run1", **routed_to("other"))["attempts"] == 3
    for name in ("one", "other"):
        same_multiset(orders(files), [*files.rows(), *files_rows(str(tmp_path / name))])


@pytest.mark.parametrize(("atomic", "point"), [("window", "sink.committed"), ("split", "job.done")])
def test_an_open_window_goes_into_another_table_of_the_schema_once_somebody_says_so(table, dies, atomic, point):
    """The two tables share one record of windows and splits."""
    other, third = f"other_{table.place}", f"third_{table.place}"

    def ask(statement):
        with table.postgres.connect(autocommit=True) as connection:
            found = connection.execute(statement)
            return found.fetchall() if found.description else []

    def ids(name):
        return sorted(number for (number,) in ask(f'SELECT id FROM "{name}"'))

    sink = PostgresSink(conn_id="warehouse", table=table.place, atomic=atomic)
    ask(f'CREATE TABLE "{other}" ({COLUMNS})')
    table.produce(30)
    dies(table, "run1", point=point, sink=sink)
    decide(table, running=False)
    dies(table, "run1", point=point, sink=replace(sink, table=other))
    assert ids(other) == ids(table.place) == list(range(30)), "what the first table has stays there"
    assert table.run("run1", sink=replace(sink, table=other))["attempts"] == 3
    table.produce(10)
    assert table.run("run2", sink=replace(sink, table=other))["records_read"] == 10
    assert ids(other) == list(range(40))
    # A table that was renamed has the rows of its open window already.
    table.produce(5)
    dies(table, "run3", point=point, sink=replace(sink, table=other))
    ask(f'ALTER TABLE "{other}" RENAME TO "{third}"')
    decide(table, running=False)
    table.run("run3", sink=replace(sink, table=third))
    assert ids(third) == list(range(45))


@pytest.mark.parametrize("dies_at", [extended("planned"), "publish.committed", extended("close.begin")])
def test_an_open_window_that_is_published_in_part_continues_in_another_topic(kafka, unique, tmp_path, dies_at):
    with relay(kafka, unique, tmp_path) as made:
        other = unique("other")
        kafka.create_topic(other, 3)
        made.send(30)
        dead = made.victim("run1", fault=dies_at)
        assert dead.wait() != 0 and dead.fired
        done = decide(made, running=False)
        assert "Its published records stay" in " ".join(done.warnings)
        assert made.run("run2", topic=other)["records_read"] == 0
        made.send(10)
        assert made.run("run3", topic=other)["records_read"] == 10
        settled(made.output, other)
        there = {name: [r.content for r in made.read(name)] for name in (made.topic, made.output, other)}
        same_multiset(there[made.topic], [*there[made.output], *there[other]])
        assert len(there[made.output]) == {"planned": 0, "close.begin": 30}.get(dies_at, len(there[made.output]))
        assert len(there[other]) >= 10


def test_an_open_window_whose_topic_was_created_again_continues_in_the_new_one(kafka, unique, tmp_path, dies):
    with relay(kafka, unique, tmp_path) as made:
        made.send(30)
        dies(made, "run1", point="planned")
        kafka.delete_topic(made.output)
        kafka.create_topic(made.output, 4)
        with pytest.raises(TopicRecreated, match="rebind <pipeline> --not-running"):
            made.run("run1")
        decide(made, running=False)
        assert made.run("run1")["records_read"] == 30
        assert made.check() == 30


def test_an_open_window_whose_dead_letters_are_gone_with_their_topic_sends_them_again_once_a_user_says_so(files, dies):
    from tests.support.dead_letters import check_sorted_out, letters, produce_mixed

    dead = f"dead-{files.topic}"
    tolerant = {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead}
    bad = produce_mixed(files, 30, 10)
    dies(files, "run1", point="dead.committed", **tolerant)
    assert len(letters(files.kafka.connection_extra(), dead)) == bad
    files.kafka.delete_topic(dead)
    with pytest.raises(TopicRecreated, match="the broker has no such topic"):
        files.run("run1", **tolerant)
    files.kafka.create_topic(dead, 2)
    with pytest.raises(TopicRecreated, match="rebind <pipeline> --not-running"):
        files.run("run1", **tolerant)
    assert not files.rows()
    decide(files, running=False)
    report = files.run("run1", **tolerant)
    assert (report["records_read"], report["records_rejected"], len(files.rows())) == (30 + bad, bad, 30)
    assert check_sorted_out(files, dead) == (30, bad)


def test_records_of_an_open_window_that_are_gone_with_a_topic_beside_its_target_are_not_left_out_silently(
    kafka, unique, tmp_path
):
    """The dead letter topic, one that a filter names, and one that records name."""
    with relay(kafka, unique, tmp_path) as made:
        dead, rare, other = (unique(name) for name in ("dead", "rare", "other"))
        for name in (dead, rare, other):
            kafka.create_topic(name, 2)
        routes = [
            Filter(predicate=Condition("id % 4 = 0"), to=rare),
            RegexRouter(".*", other, predicate=Condition("id % 4 = 1")),
        ]
        options = {
            "value": Json(schema="id bigint"), "transforms": routes,
            "errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead,
        }  # fmt: skip
        bad = made.send_mixed(60, 10)
        with fails_at("job.done"):
            made.run("run1", **options)
        kafka.delete_topic(rare)
        with pytest.raises(TopicRecreated, match=f"`{rare}` was deleted: "):
            made.run("run1", **options)
        for name in (other, dead):
            kafka.delete_topic(name)
        for name in (dead, rare, other):
            kafka.create_topic(name, 2)
        with pytest.raises(TopicRecreated, match=f"`{dead}` was deleted and created again.*rebind <pipeline> --not-running"):
            made.run("run1", **options)
        decide(made, running=False)
        report = made.run("run1", **options)
        counts = ("records_read", "records_written", "records_routed", "records_rejected")
        assert [report[name] for name in counts] == [60 + bad, 45, 15, bad]
        settled(made.topic, made.output, dead, rare, other)
        assert {name: len(made.read(name)) for name in (made.output, dead, rare, other)} == {
            made.output: 30, dead: 0, rare: 0, other: 0,
        }  # fmt: skip


@pytest.mark.parametrize("others", ["id % 10 = 7", "true"], ids=["one_of_two", "the_only_one"])
def test_rows_of_an_open_window_that_are_gone_with_a_topic_that_they_name_are_not_left_out_silently(
    kafka, postgres, unique, tmp_path, others
):
    with shop(kafka, postgres, unique, tmp_path, topic=None, topic_column="topic") as sold:
        other = unique("other")
        kafka.create_topic(other, 2)
        with postgres.connect(autocommit=True) as connection:
            place = f"CASE WHEN {others} THEN '{other}' ELSE '{sold.topic}' END"
            connection.execute(f'ALTER TABLE "{sold.table}" ADD COLUMN topic text GENERATED ALWAYS AS ({place}) STORED')
        sold.sell(30)
        with fails_at("job.done"):
            sold.run("run1")
        kafka.delete_topic(other)
        kafka.create_topic(other, 2)
        with pytest.raises(TopicRecreated, match=f"`{other}` was deleted and created again"):
            sold.run("run1")
        decide(sold, running=False)
        assert sold.run("run1")["records_written"] == 30
        there = [len(committed_records(kafka.connection_extra(), name)) for name in (sold.topic, other)]
        assert there == [0 if others == "true" else 27, 0]


def test_an_open_window_of_rows_continues_in_another_topic(kafka, postgres, unique, tmp_path, dies):
    with shop(kafka, postgres, unique, tmp_path) as sold:
        other = unique("other")
        kafka.create_topic(other, 2)
        sold.sell(30)
        dies(sold, "run1", point="planned")
        decide(sold, running=False)
        assert sold.run("run1", topic=other)["records_read"] == 30
        assert (len(committed_records(kafka.connection_extra(), other)), len(sold.records())) == (30, 0)


def test_a_sink_of_a_filter_that_has_lost_its_windows_takes_no_further_one_until_a_user_confirms(files, tmp_path):
    """This happens if the sink's mount is missing on a worker."""
    there, away = tmp_path / "rare", tmp_path / "mounted elsewhere"
    routed = {"transforms": [Filter(predicate=Condition("id % 10 = 0"), negate=True, to=FilesSink(path=str(there)))]}
    for number in (1, 2):
        files.produce(30)
        files.run(f"run{number}", **routed)
    there.rename(away)
    files.produce(30)
    with pytest.raises(SinkRecordMissing, match="window 2 was committed there") as refused:
        files.run("run3", **routed)
    assert f"rebind {files.name} --not-running" in str(refused.value)
    assert not files_rows(str(there))
    shutil.rmtree(there, ignore_errors=True)
    away.rename(there)
    assert files.run("run3", **routed)["records_read"] == 30
    same_multiset(orders(files), [*files.rows(), *files_rows(str(there))])
    shutil.rmtree(there)
    files.produce(10)
    decide(files, running=None)
    assert files.run("run4", **routed)["records_read"] == 10


def test_what_is_published_goes_to_the_topic_it_was_planned_for(kafka, unique, tmp_path, dies):
    with relay(kafka, unique, tmp_path) as made:
        other = unique("other")
        kafka.create_topic(other, 3)
        made.send(30)
        dies(made, "run1", point="close.begin")
        for changed, kind in (({"topic": other}, DestinationChanged), ({"group_id": f"{made.name}-2"}, SourceChanged)):
            with pytest.raises(kind):
                made.run("run2", **changed)
        # Another ledger does not show which partitions are published, and does not fence the tasks that may still publish others.
        with pytest.raises(
            GroupOwned, match=f"{made.name}#1 of this pipeline is open in another ledger topic, `ledger-{made.name}`"
        ):
            made.run("run1", ledger_topic=unique("ledger"))
        made.run("run1")
        with pytest.raises(DestinationChanged):
            made.run("run2", topic=other)
        assert not made.read(other)


# --- sources --------------------------------------------------------------------------------------------------------------


def test_an_open_window_of_a_table_is_not_read_from_another_one(kafka, postgres, unique, tmp_path, dies):
    with shop(kafka, postgres, unique, tmp_path) as sold:
        sold.sell(30)
        other = f"other_{sold.table}"
        with sold.postgres.connect(autocommit=True) as connection:
            connection.execute(f'CREATE TABLE "{other}" (LIKE "{sold.table}" INCLUDING ALL)')
            connection.execute(f'INSERT INTO "{other}" SELECT id, \'foreign\', amount, placed_at FROM "{sold.table}"')
        dies(sold, "run1", point="planned")
        for changed in ({"table": other}, {"source": {"mode": "bulk", "cursor": None}}):
            with pytest.raises(SourceChanged, match="was planned from"):
                sold.run("run2", **changed)
        # Part of its rows may be published, so that a rebind does not make the other table's rows part of it.
        decide(sold, running=False)
        for changed in ({"table": other}, {"source": {"mode": "bulk", "cursor": None}}):
            with pytest.raises(SourceChanged, match="so `rebind` allows another one only for the window after it"):
                sold.run("run2", **changed)
        assert sold.run("run2")["records_read"] == 0
        assert sold.check() == 30
        with pytest.raises(SourceChanged, match="has moved its windows from"):
            sold.run("run3", table=other)


def test_an_open_window_of_files_is_not_read_from_another_directory_and_keeps_its_files_with_another_pattern(
    kafka, unique, tmp_path, monkeypatch, dies
):
    name, topic = unique("files"), unique("lines")
    kafka.create_topic(topic, 1)
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", kafka.connection_json())
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", SPARK)
    for number, file in enumerate(("here/a.json", "here/b.txt", "there/a.json")):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(json.dumps({"id": number}))

    def run(run_id, path="here", glob="*.json"):
        source = FilesSource(path=str(tmp_path / path), format="json", glob=glob, schema="id bigint")
        operator = SourceToKafkaOperator(
            task_id="task", source=source, sink=KafkaSink(topic=topic, value=Json()), pipeline=name, ledger_topic=f"ledger-{name}"
        )
        return operator.execute(context(run_id))

    dies(SimpleNamespace(run=run), "run1", point="planned")
    with pytest.raises(SourceChanged, match="was planned from"):
        run("run2", path="there")
    assert run("run2", glob="*")["records_written"] == 1, (
        "the open window is finished with its own file, then comes the other one"
    )
    with pytest.raises(SourceChanged, match="has moved its windows from"):
        run("run3", path="there")
    assert [json.loads(value) for *_, value in committed_records(kafka.connection_extra(), topic)] == [{"id": 0}, {"id": 1}]


# --- writers --------------------------------------------------------------------------------------------------------------


def test_another_deployment_does_not_take_windows_whatever_its_runs_are_called(files, tmp_path, deployment):
    mine, elsewhere = f"{tmp_path}/mine", FilesSink(path=f"{tmp_path}/theirs")
    files.produce(30)
    deployment("one")
    files.run("run1", sink=FilesSink(path=mine))
    deployment("two")
    for run in ("run1", "run2"):
        with pytest.raises(PipelineTaken, match="is moved by task `dag.task` of deployment `one`") as refused:
            files.run(run, sink=elsewhere)
        assert refused.value.differences == (("deployment", "one", "two"),)
        assert "[kafka_spark] deployment = one" in str(refused.value)
    # A worker without a deployment name belongs to the same deployment.
    deployment("")
    files.produce(10)
    assert files.run("run2", sink=FilesSink(path=mine))["records_read"] == 10
    deployment("two")
    files.produce(10)
    decide(files)
    assert files.run("run3", sink=FilesSink(path=mine))["records_read"] == 10
    deployment("one")
    with pytest.raises(PipelineTaken):
        files.run("run4", sink=FilesSink(path=mine))
    same_multiset(orders(files), files_rows(mine))


def test_a_deployment_without_a_name_does_not_take_the_window_of_another_one_for_its_own(files, tmp_path, deployment, caplog):
    deployment("")
    files.produce(30)
    files.run("run1")
    assert "set `[kafka_spark] deployment`" in caplog.text
    caplog.clear()
    elsewhere = FilesSink(path=str(tmp_path / "theirs"))
    with pytest.raises(DestinationChanged, match="has moved its windows into path"):
        files.run("run1", sink=elsewhere)
    decide(files)
    assert files.run("run1", sink=elsewhere)["records_read"] == 30, "it was allowed: the window of this run is complete"
    assert "set `[kafka_spark] deployment`" not in caplog.text
    same_multiset(orders(files), files.rows())
    assert not files_rows(elsewhere.path)


def test_a_deployment_with_a_ledger_of_its_own_does_not_begin_at_the_offsets_of_another_ones_group(
    files, tmp_path, deployment, unique
):
    """This deployment has moved none of the other one's records, and both would move the offsets of one group."""
    deployment("one")
    files.produce(30)
    files.run("run1")
    deployment("two")
    theirs = {"ledger_topic": unique("theirs"), "sink": FilesSink(path=str(tmp_path / "theirs"))}
    with pytest.raises(GroupOwned, match="of another ledger topic") as refused:
        files.run("run1", **theirs)
    assert f"forget {files.name} --ledger-topic ledger-{files.name}" in str(refused.value)
    assert files.run("run1", **theirs, group_id=unique("own"))["records_read"] == 30
    same_multiset(orders(files), files_rows(theirs["sink"].path))
    files.produce(10)
    wait_stable(files.kafka.connection_extra(), f"ledger-{files.name}")
    with KafkaHook() as hook:
        forget(hook, files.name, why="it moves to another ledger", ledger_topic=f"ledger-{files.name}")
    assert files.run("run2", **{**theirs, "ledger_topic": unique("third")})["records_read"] == 10


def test_a_directory_that_has_lost_its_data_intervals_takes_no_further_one_until_somebody_says_so(files, tmp_path):
    """Each interval has a record of its own, so that the commit of one says nothing about the others."""
    intervals, there, away = Intervals(files, table=False), Path(files.place), tmp_path / "mounted elsewhere"
    intervals.fill()
    for number in (1, 0):
        intervals.run(number)
    there.rename(away)
    with pytest.raises(SinkRecordMissing, match="whose data interval [0-9TZ-]+ was committed there") as refused:
        intervals.run(2)
    assert f"rebind {files.name} --not-running" in str(refused.value)
    assert not files.rows()
    shutil.rmtree(there, ignore_errors=True)
    away.rename(there)
    assert intervals.check([intervals.run(number) for number in range(4)]) > 0
    shutil.rmtree(there)
    decide(files, running=None)
    moved = intervals.run(4)["records_read"]
    assert len(files.rows()) == moved > 0
    assert intervals.run(5)["records_read"] > 0, "the interval before has a record there"


def test_a_directory_that_has_lost_its_windows_takes_no_further_one_until_a_user_confirms(files, tmp_path):
    """If a mount is missing on a worker, the windows would be in two directories, and no reader would see all of them."""
    for number in (1, 2):
        files.produce(30)
        files.run(f"run{number}")
    there, away = Path(files.place), tmp_path / "mounted elsewhere"
    there.rename(away)
    files.produce(10)
    for _ in range(2):
        with pytest.raises(SinkRecordMissing, match="window 2 was committed there") as refused:
            files.run("run3")
    assert f"rebind {files.name} --not-running" in str(refused.value)
    assert not files.rows()
    shutil.rmtree(there, ignore_errors=True)
    away.rename(there)
    assert files.run("run3")["records_read"] == 10
    assert files.check() == 70
    shutil.rmtree(there)
    files.produce(10)
    with pytest.raises(SinkRecordMissing):
        files.run("run4")
    decide(files, running=False)
    assert files.run("run4")["records_read"] == len(files.rows()) == 10
    files.produce(5)
    assert files.run("run5")["records_read"] == 5


def test_what_a_restored_table_has_lost_is_moved_again_by_the_command_that_is_named(table):
    def forget_window(number, ids):
        with table.postgres.connect(autocommit=True) as connection:
            connection.execute("DELETE FROM airflow_windows WHERE pipeline = %s AND number = %s", (table.name, number))
            connection.execute(f'DELETE FROM "{table.place}" WHERE id >= {ids}')

    for number in (1, 2):
        table.produce(30)
        table.run(f"run{number}")
    forget_window(2, 30)
    table.produce(30)
    with pytest.raises(WindowConflict) as refused:
        table.run("run3")
    to = re.search(rf"reset {table.name} --to '(.*)' --discard-open", refused.value.action)
    wait_stable(table.kafka.connection_extra(), f"ledger-{table.name}")
    with KafkaHook() as hook:
        reset(hook, table.name, to[1], why="a backup", ledger_topic=f"ledger-{table.name}", discard_open=True)
    assert table.run("run4")["records_read"] == 60
    same_multiset(orders(table), table.rows())


def test_another_task_of_the_same_pipeline_is_refused_mapped_or_not(files):
    files.produce(30)
    files.run("run1", facts={"map_index": 0})
    files.produce(10)
    with KafkaHook() as hook, Ledger(hook, files.name, "run2", group_id="", topic=f"ledger-{files.name}") as running:
        with pytest.raises(PipelineTaken, match=r"`dag.other`"):
            files.run("run1", facts={"task_id": "other"})
        # An attempt that is running meanwhile was not fenced: it writes what is there already.
        running.withdraw(make_binding_record(files.name, running.memory.binding))
    with pytest.raises(PipelineTaken, match="index 1"):
        files.run("run1", facts={"map_index": 1})
    # What a task is mapped over may change from run to run.
    assert files.run("run2", facts={"map_index": 1})["records_read"] == 10
    assert files.check() == 40


# --- groups ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def dry(kafka, unique, tmp_path):
    return Dry(kafka, unique, tmp_path)


def moved_once(dry, records):
    assert dry.offsets() == {f"{dry.topic}-0": [*range(records)]}


@pytest.mark.parametrize("number", [None, 0], ids=["progress", "intervals"])
def test_of_two_new_pipelines_that_plan_with_one_group_at_once_one_moves_the_records(dry, number):
    dry.produce(0, 10, 70)
    other = dry.attempt(number, pipeline=f"{dry.name}-other")
    with pytest.raises(GroupOwned, match=f"mirrors pipeline `{dry.name}-other`"):
        dry.run(number, between=other)
    moved_once(dry, there := 3 if number is None else 2)
    assert dry.run(number, group_id=f"{dry.name}-own")["records_read"] == there


@pytest.mark.faults
def test_a_new_pipeline_that_was_killed_before_it_looked_at_its_group_again_is_refused_in_the_retry(dry):
    dry.produce(0, 10, 70)
    dry.killed(fault="plan.written", between=dry.attempt(pipeline=f"{dry.name}-other"))
    for _ in range(2):
        with pytest.raises(GroupOwned, match=f"mirrors pipeline `{dry.name}-other`"):
            dry.run()
    moved_once(dry, 3)


@pytest.mark.faults
@pytest.mark.parametrize("number", [None, 1], ids=["progress", "intervals"])
def test_another_group_that_a_pipeline_continues_with_is_its_own_as_soon_as_a_window_is_planned(dry, number):
    dry.produce(0, 10, 70, 130)
    dry.run(None if number is None else 0)
    dry.produce(140)
    dry.killed(number, fault="planned", group_id=f"{dry.name}-2", run_id="second")
    with pytest.raises(GroupOwned, match=f"mirrors pipeline `{dry.name}`"):
        dry.run(number, pipeline=f"{dry.name}-other", group_id=f"{dry.name}-2")
    dry.run(number, group_id=f"{dry.name}-2", run_id="second")
    moved_once(dry, 5 if number is None else 3)


def test_a_pipeline_of_intervals_that_another_one_overtakes_at_its_new_group_is_refused_until_it_has_another(dry):
    dry.produce(0, 10, 70, 130)
    dry.run(0)
    group, other = f"{dry.name}-2", f"{dry.name}-other"
    overtaking = dry.attempt(1, pipeline=other, group_id=group)
    with pytest.raises(GroupOwned, match=f"mirrors pipeline `{other}`"):
        dry.run(1, group_id=group, between=overtaking)
    with KafkaHook() as hook:
        assert read_pipeline(hook, dry.name, f"ledger-{dry.name}").memory.binding.origin.details == {"group": dry.name}
    moved_once(dry, 3)
    assert dry.run(1)["records_read"] == 1


def stop():
    """End an attempt that has bound its pipeline and planned no window."""
    raise RuntimeError("ended")


def test_intervals_that_got_another_group_and_stopped_before_they_were_planned_leave_it_to_a_pipeline_that_took_it(dry):
    dry.produce(0, 10, 70, 130)
    dry.run(0)
    group, other = f"{dry.name}-2", f"{dry.name}-other"
    with pytest.raises(RuntimeError, match="ended"):
        dry.run(1, group_id=group, between=stop)
    assert dry.run(pipeline=other, group_id=group, between=None)["records_read"] == 4
    with pytest.raises(GroupOwned, match=f"mirrors pipeline `{other}`"):
        dry.run(1, group_id=group)
    assert len(dry.moved.read_text().splitlines()) == 2


def test_intervals_that_were_bound_and_never_planned_may_be_bound_anew_or_forgotten(dry, deployment):
    dry.produce(0, 10, 70)
    place = {"why": "it moves", "who": "ann", "ledger_topic": f"ledger-{dry.name}"}
    deployment("a")
    for name, command in (("rebound", rebind), ("forgotten", forget)):
        pipeline = f"{dry.name}-{name}"
        deployment("a")
        with pytest.raises(RuntimeError, match="ended"):
            dry.run(0, pipeline=pipeline, group_id=pipeline, between=stop)
        deployment("b")
        with pytest.raises(PipelineTaken):
            dry.run(0, pipeline=pipeline, group_id=pipeline)
        wait_stable(dry.kafka.connection_extra(), f"ledger-{dry.name}")
        with KafkaHook() as hook:
            command(hook, pipeline, **place)
        assert dry.run(0, pipeline=pipeline, group_id=pipeline)["records_read"] == 2


# --- intervals and replays ------------------------------------------------------------------------------------------------


def test_intervals_keep_their_place_and_their_task_planned_open_complete_and_replayed(files, tmp_path, dies, deployment, unique):
    deployment("one")
    intervals = Intervals(files, table=False)
    intervals.fill()
    reports = [intervals.run(0)]
    elsewhere = FilesSink(path=str(tmp_path / "elsewhere"))
    with pytest.raises(DestinationChanged, match="has moved its windows"):
        intervals.run(1, sink=elsewhere)
    dies(files, "run-1", facts=facts(1))
    with pytest.raises(DestinationChanged, match="was planned into"):
        intervals.run(1, sink=elsewhere)
    with pytest.raises(DestinationChanged, match="was planned into"):
        intervals.run(0, cleared=1, sink=elsewhere)
    deployment("two")
    for number in (0, 1, 2):
        with pytest.raises(PipelineTaken):
            intervals.run(number)
    deployment("one")
    reports += [intervals.run(1), intervals.run(2)]
    assert intervals.run(0, cleared=2)["replay"] == 1
    assert not files_rows(elsewhere.path)
    decide(files)
    deployment("two")
    reports.append(intervals.run(3))
    deployment("one")
    with pytest.raises(PipelineTaken):
        intervals.run(4)
    assert intervals.check(reports) > 10
    with pytest.raises(GroupOwned, match=f"ledger-{files.name}"):
        intervals.run(4, ledger_topic=unique("theirs"))


def test_an_old_interval_is_not_replayed_into_a_place_that_the_pipeline_got_since(table, postgres):
    intervals = Intervals(table, table=True)
    intervals.fill()
    few = {"keep_windows": 1}
    for number in (0, 1, 2):
        intervals.run(number, **few)
    elsewhere = f"elsewhere_{table.place}"
    with postgres.connect(autocommit=True) as connection:
        connection.execute(f'CREATE TABLE "{elsewhere}" (LIKE "{table.place}" INCLUDING ALL)')
    sink = PostgresSink(conn_id="warehouse", table=elsewhere, window_column="window")
    decide(table)
    assert intervals.run(3, sink=sink, **few)["records_read"] == 7
    # The ledger has no record of its window any more, but knows its place.
    with pytest.raises(DestinationChanged, match=table.place):
        intervals.run(0, cleared=1, sink=sink, **few)
    with postgres.connect(autocommit=True) as connection:
        assert connection.execute(f'SELECT count(*) FROM "{elsewhere}"').fetchone() == (7,)
    # A window that was moved since is replayed in its own place.
    assert intervals.run(3, cleared=1, sink=sink, **few)["replay"] == 1


def test_an_old_interval_is_not_replayed_without_the_filters_that_it_had(files, tmp_path):
    intervals, other = Intervals(files, table=False), FilesSink(path=str(tmp_path / "rare"))
    intervals.fill()
    before = {"keep_windows": 1, "transforms": [Filter(predicate=Condition("id % 2 = 0"), to=other)]}
    reports = [intervals.run(number, **before) for number in range(3)]
    # New windows may go without the filter.
    now = {"keep_windows": 1}
    reports.append(intervals.run(3, **now))

    def count():
        return len(files.rows()) + len(files_rows(other.path))

    assert count() == sum(report["records_read"] for report in reports)
    with pytest.raises(DestinationChanged, match="filter 1 path"):
        intervals.run(0, cleared=1, **now)
    assert intervals.run(0, cleared=1, **before)["replay"] == 1
    assert count() == sum(report["records_read"] for report in reports)


@pytest.mark.parametrize("by_interval", [False, True], ids=["progress", "intervals"])
def test_the_record_of_another_table_of_the_schema_does_not_count_for_a_pipeline_that_was_forgotten(table, by_interval):
    """That record would say that the records are in the table of this run."""
    other = f"other_{table.place}"
    if by_interval:
        intervals = Intervals(table, table=True)
        intervals.fill()
        run = partial(intervals.run, 0)
    else:
        table.produce(30)
        run = partial(table.run, "run1")
    with table.postgres.connect(autocommit=True) as connection:
        connection.execute(f'CREATE TABLE "{other}" (LIKE "{table.place}")')
    column = "window" if by_interval else None
    sink = PostgresSink(conn_id="warehouse", table=table.place, window_column=column)
    moved = run(sink=sink)["records_read"]
    wait_stable(table.kafka.connection_extra(), f"ledger-{table.name}")
    with KafkaHook() as hook:
        forget(hook, table.name, why="a test", ledger_topic=f"ledger-{table.name}")
    with pytest.raises(RecordElsewhere, match=table.place):
        run(sink=replace(sink, table=other))
    if by_interval:  # which bind the pipeline before they are planned
        decide(table)
    run(sink=sink)
    assert len(table.rows()) == moved > 0


def test_an_open_replay_stays_in_its_table_also_where_a_rebind_allows_another_one(table, dies):
    other = f"other_{table.place}"
    with table.postgres.connect(autocommit=True) as connection:
        connection.execute(f'ALTER TABLE "{table.place}" ADD COLUMN "window" text')
        connection.execute(f'CREATE TABLE "{other}" (LIKE "{table.place}")')
    sink = PostgresSink(conn_id="warehouse", table=table.place, window_column="window")
    table.produce(30)
    table.run("run1", sink=sink)
    again = {"on_rerun": "replay", "facts": {"max_tries": 1}}
    dies(table, "run1", point="planned", sink=sink, **again)
    decide(table, running=False)
    with pytest.raises(ValidationError, match="has no record of window"):
        table.run("run1", sink=replace(sink, table=other), **again)
    assert table.run("run1", sink=sink, **again)["replay"] == 1
    assert table.check() == 30


TASK = Writer("dag", "task", -1, "run1", "prod")
PLACE = Endpoint({"server": "a:5432", "server_id": "7", "table": "public.orders"}, {"windows_table": "w", "dead_letters": "d"})


@pytest.mark.parametrize(
    ("known", "found", "number"),
    [
        ({}, {}, 3),
        ({}, {"destination": replace(PLACE, place={**PLACE.place, "server": "b:5432"})}, 3),
        ({}, {"destination": Endpoint({**PLACE.place, "table": "public.other"}, PLACE.details)}, ELSEWHERE),
        ({}, {"destination": Endpoint(PLACE.place, {**PLACE.details, "windows_table": "other"})}, ELSEWHERE),
        ({}, {"decided": 1}, 0),
        ({"binding": None}, {}, 0),
        ({"ranges": (OffsetRange("t", 0, 10, 10),)}, {}, 2),
    ],
)
def test_a_window_names_the_last_one_with_records_at_the_same_place_unless_a_user_has_decided_since(known, found, number):
    """The sink has to have a record of it, or of a later one."""

    def entry(number, state=State.COMPLETE, **facts):
        window = Window("p", number, (OffsetRange("t", 0, 0, 10),), "r", "", binding=Binding(TASK, PLACE))
        return WindowEntry(replace(window, **facts), state, Attempt(1, "", "r", ""))

    memory = Memory("p", entries={2: entry(2), 3: entry(3, **known), 4: entry(4, State.PLANNED)})
    assert find_committed_before(memory, replace(Binding(TASK, PLACE), **found)) == number
    assert find_committed_before(Memory("p"), Binding(TASK, PLACE)) == 0


def test_windows_that_the_ledger_keeps_no_longer_went_where_the_pipeline_is_bound_to():
    there, elsewhere = Binding(TASK, PLACE), Binding(TASK, Endpoint({**PLACE.place, "table": "public.other"}, PLACE.details))
    whole = Memory("p", binding=there)
    assert (find_committed_before(whole, there), find_committed_before(whole, elsewhere)) == (0, ELSEWHERE)
