"""A topic, or a ledger, that has lost its last records and has grown again. The broker is real, and its log files are cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, ResourceType

from airflow_kafka_spark.control.pipelines import read_pipeline
from airflow_kafka_spark.errors import LedgerBehind, LogTruncated, ValidationError
from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.hooks.kafka.log import compare_epochs, read_log
from airflow_kafka_spark.ledger.topic import LedgerTopic
from airflow_kafka_spark.operators import KafkaToKafkaOperator
from airflow_kafka_spark.sinks import PostgresSink
from airflow_kafka_spark.sources.kafka.tasks.read import KafkaSplitReader
from airflow_kafka_spark.testing import EmbeddedKafka
from airflow_kafka_spark.transforms import Sql
from airflow_kafka_spark.windows.interval import Interval
from airflow_kafka_spark.windows.model import Gap, OffsetRange, TopicPartition
from airflow_kafka_spark.windows.times import format_instant, to_milliseconds
from tests.support.compacting import alter_config
from tests.support.control import replay, reset
from tests.support.intervals import BEGIN, Intervals, hour
from tests.support.kafka_sinks import OF_RECORDS, with_sink
from tests.support.late import LateFilesSink, LatePostgresSink
from tests.support.oracle import wait_stable
from tests.support.pipelines import order, pipeline, row_of
from tests.support.relay import relay
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def lone():
    """A broker that may be killed, and whose log files may be cut."""
    with EmbeddedKafka() as kafka:
        yield kafka


def send(kafka: EmbeddedKafka, topic: str, numbers: range) -> None:
    """Send orders to partition 0, each in a separate batch."""
    producer = Producer({**kafka.connection_extra(), "linger.ms": 0})
    for number in numbers:
        producer.produce(topic, order(number), b"k", 0)
        assert producer.flush(60) == 0


def segment(kafka: EmbeddedKafka, topic: str) -> Path:
    (found,) = Path(kafka.broker().data).glob(f"{topic}-0/*.log")
    return found


def settled_size(kafka: EmbeddedKafka, ledger: str, file: Path) -> int:
    """Return the size of a log file with the markers of all its transactions; brokers answer before they write markers."""
    assert wait_stable(kafka.connection_extra(), ledger)
    return file.stat().st_size


def cut_off(kafka: EmbeddedKafka, *logs: tuple[Path, int]) -> None:
    """Cut log files to a size, like an unclean leader election that picks a lagging replica. The broker restarts with new leader
    epochs.
    """
    kafka.kill()
    for file, size in logs:
        with file.open("r+b") as log:
            log.truncate(size)
    kafka.restart()


Logs = tuple[tuple[Path, int], ...]
"""Log files, and the sizes that they are cut to."""

SCENES: dict[str, Callable[..., Iterator[Logs]]] = {}


def around_the_cut(scene: Callable[..., Iterator[Logs]]) -> Callable[[Cut], None]:
    """Make a test of a generator, so that one restart of the broker serves all of these tests.

    The code up to the first ``yield`` runs before an election that loses nothing. Then the generator yields the logs that are to
    be cut off. The code after that ``yield`` is the test.
    """
    name = scene.__name__
    SCENES[name] = scene

    def test(cut: Cut) -> None:
        assert next(cut.scenes[name], None) is None

    test.__doc__ = scene.__doc__
    return test


@around_the_cut
def test_a_log_that_was_cut_off_and_has_grown_again_is_refused_until_a_user_decides(lone, unique, tmp_path):
    with pipeline("files", lone, None, unique, tmp_path) as flow:
        place = TopicPartition(flow.topic, 0)
        send(lone, flow.topic, range(10))
        file = segment(lone, flow.topic)
        size = file.stat().st_size
        send(lone, flow.topic, range(10, 20))
        flow.run("run1")

        yield ()
        send(lone, flow.topic, range(20, 24))
        assert flow.run("run2")["records_read"] == 4, "an election that loses nothing"

        yield ((file, size),)
        send(lone, flow.topic, range(100, 130))
        lost = f"lost-{flow.name}"
        lone.create_topic(lost, 1, config={"cleanup.policy": "compact"})
        with pytest.raises(LogTruncated):
            flow.run("run3", ledger_topic=lost)  # the ledger is gone, and the group has the leader epoch
        with pytest.raises(LogTruncated) as refused:
            flow.run("run3")
        error = refused.value
        assert (error.topic, error.partition, error.position, error.end) == (flow.topic, 0, 24, 10)
        assert error.found_epoch > error.known_epoch >= 0
        with KafkaHook() as hook:
            known = read_pipeline(hook, flow.name, f"ledger-{flow.name}").memory.position
            assert known.epochs[place] == error.known_epoch
            log = read_log(hook, [flow.topic])
            assert compare_epochs(hook, log, {place: 10}, known.epochs, known.topic_ids).diverged == {}, (
                "all that is left was read"
            )

        with KafkaHook() as hook:
            at = {flow.topic: {"0": error.end}}
            reset(hook, flow.name, at, why="read what is there now", ledger_topic=f"ledger-{flow.name}")
        assert flow.run("run4")["records_read"] == 30
        assert sorted(flow.rows()) == sorted(row_of(order(n)) for n in (*range(24), *range(100, 130)))

        with KafkaHook() as hook:
            known = read_pipeline(hook, flow.name, f"ledger-{flow.name}").memory.position
            assert known.epochs[place] == error.found_epoch, "from here on, this log is compared"


@around_the_cut
def test_where_lost_records_are_passed_over_windows_continue_at_their_position_in_a_log_that_was_cut_off(lone, unique, tmp_path):
    yield ()
    with pipeline("files", lone, None, unique, tmp_path) as flow:
        send(lone, flow.topic, range(10))
        file = segment(lone, flow.topic)
        size = file.stat().st_size
        send(lone, flow.topic, range(10, 12))
        flow.run("run1")
        yield ((file, size),)
        send(lone, flow.topic, range(200, 205))
        report = flow.run("run2", data_loss="skip")
        assert (report["records_read"], report["gaps"]) == (3, [{"topic": flow.topic, "partition": 0, "start": 10, "end": 12}])
        assert flow.run("run3")["records_read"] == 0, "the gap was decided once"


@around_the_cut
def test_intervals_behind_a_log_that_was_cut_off_and_has_grown_again_are_refused_until_a_user_decides(lone, unique, tmp_path):
    yield ()
    with pipeline("files", lone, None, unique, tmp_path) as flow:
        hours = Intervals(flow, table=False)
        hours.produce(*range(5), partition=0)
        file = segment(lone, flow.topic)
        size = file.stat().st_size
        hours.produce(*range(5, 20), 61, 62, 121, partition=0)
        for partition in (1, 2):
            hours.produce(300, partition=partition)
        # With the second interval, the records of the first one's window are removed.
        assert [hours.run(number, keep_windows=1)["records_read"] for number in (0, 1)] == [20, 2]
        yield ((file, size),)
        hours.produce(*range(130, 160), partition=0)
        for number in (0, 1):
            with pytest.raises(LogTruncated), KafkaHook() as hook:
                name = Interval(*hour(number)).name
                replay(hook, flow.name, name=name, why="test", ledger_topic=f"ledger-{flow.name}")
            for data_loss in ("fail", "skip"):
                with pytest.raises(LogTruncated, match="A replay would remove their rows"):
                    hours.run(number, cleared=1, keep_windows=1, data_loss=data_loss)
        assert len(flow.rows()) == 22, "no replay has replaced them"
        with pytest.raises(LogTruncated) as refused:
            flow.run("manual", on_missing_interval="progress")
        assert (refused.value.position, refused.value.end) == (22, 5), "a run without an interval begins behind them"
        with pytest.raises(LogTruncated) as refused:
            hours.run(2)
        error = refused.value
        assert (error.topic, error.partition, error.position, error.end) == (flow.topic, 0, 22, 5)
        assert error.interval == format_instant(to_milliseconds(BEGIN + timedelta(hours=2)))
        report = hours.run(2, data_loss="skip")
        assert (report["records_read"], report["gaps"]) == (13, [{"topic": flow.topic, "partition": 0, "start": 5, "end": 22}])
        assert hours.run(3)["records_read"] == 0, "the gap was decided once"


def batches(file: Path, size: int, count: int) -> int:
    """Return the ends of the first batches after a position in a log file."""
    content = file.read_bytes()
    for _ in range(count):
        size += 12 + int.from_bytes(content[size + 8 : size + 12], "big")
    return size


@around_the_cut
def test_a_ledger_that_has_lost_its_last_records_is_refused_and_the_command_that_is_named_continues(lone, unique, tmp_path):
    yield ()
    with pipeline("files", lone, None, unique, tmp_path) as flow:
        ledger = f"ledger-{flow.name}"
        flow.produce(30)
        flow.run("run1")
        file = segment(lone, ledger)
        size = settled_size(lone, ledger, file)
        for run in ("run2", "run3"):
            flow.produce(30)
            flow.run(run)
        with KafkaHook() as hook:
            reader = LedgerTopic(hook, ledger)
            reader.ensure()
            assert reader.read_without_waiting(flow.name).memory.last_number == 3
            yield ((file, size),)
            assert reader.read_without_waiting(flow.name).memory.last_number == 1, (
                "what was read before the election counts no more"
            )
        flow.produce(30)
        with pytest.raises(LedgerBehind) as refused:
            flow.run("run4")
        error = refused.value
        assert (error.window, error.known, error.group_id) == (3, 1, flow.name)
        with KafkaHook() as hook:
            assert read_pipeline(hook, flow.name, ledger).memory.open_entry is None, "nothing was planned"
            reset(hook, flow.name, json.loads(error.to), why="the ledger's tail is lost", ledger_topic=ledger, group_id=flow.name)
        report = flow.run("run4")
        assert (report["window"], report["records_read"]) == ("0000000004", 30)
        assert sorted(row[0] for row in flow.rows()) == list(range(120))
        assert flow.run("run5")["records_read"] == 0


@around_the_cut
def test_between_topics_what_is_published_is_not_published_again_where_the_ledger_has_lost_that_it_is(lone, unique, tmp_path):
    yield ()
    with relay(lone, unique, tmp_path) as orders:
        ledger = f"ledger-{orders.name}"
        orders.send(90)
        orders.run("run1")
        file = segment(lone, ledger)
        size = settled_size(lone, ledger, file)
        orders.send(90)
        orders.run("run2")
        # Its plan and the marker of that transaction are left, and no split's marker.
        yield ((file, batches(file, size, 2)),)
        orders.send(20)
        with pytest.raises(LedgerBehind) as refused:
            orders.run("run2")
        assert (refused.value.window, refused.value.known, refused.value.to) == (2, 1, f"committed:{orders.name}")
        with KafkaHook() as hook:
            options = {"ledger_topic": ledger, "group_id": orders.name, "discard_open": True}
            reset(hook, orders.name, refused.value.to, why="the ledger's tail is lost", **options)
        assert orders.run("run3")["records_read"] == 20
        assert orders.check() == 200


# --- a log that is cut off, and grows again, after the driver has looked at it and before a task reads it ---


class LateOperator(KafkaToKafkaOperator):
    def __init__(self, before=None, **options):
        super().__init__(**{"task_id": "task", **with_sink(options, OF_RECORDS)})
        self.before = before

    def _publish_splits(self, *arguments):
        if self.before is not None:
            self.before()
        super()._publish_splits(*arguments)


def begin_log(kafka: EmbeddedKafka, topic: str) -> tuple[Path, int]:
    """Write 20 orders. Return the log file and its size after the first ten."""
    send(kafka, topic, range(10))
    file = segment(kafka, topic)
    size = file.stat().st_size
    send(kafka, topic, range(10, 20))
    return file, size


LEFT = (*range(10), *range(100, 130))
"""The orders that are in such a log in the end."""


def give_up(flow, error: LogTruncated) -> None:
    """Run the command that the error names."""
    assert (error.topic, error.partition, error.position, error.end) == (flow.topic, 0, 20, 10)
    with KafkaHook() as hook:
        options = {"ledger_topic": f"ledger-{flow.name}", "group_id": flow.name, "discard_open": True}
        reset(hook, flow.name, {flow.topic: {"0": error.end}}, why="read what is there now", **options)


FILES = {
    # Tasks that read and write in one step, with and without transforms, read by the same class.
    "tasks": {"split_records": 10, "transforms": [Sql(filter="value.id >= 0")]},
    "sql": {"transforms": [Sql({"id": "id", "customer": "customer", "amount": "amount", "placed_at": "placed_at"})]},
    "spark": {"read_with": "spark"},
    "gap": {"data_loss": "skip", "split_records": 5},
}
RELAYS = {"copy": None, "filter": "id >= 0"}


def open_flows(
    lone: EmbeddedKafka, postgres: Any, unique: Callable[[str], str], directory: Path, stack: ExitStack
) -> dict[str, Any]:
    """Make the pipelines whose logs are cut off while their drivers are running."""
    for name in (*FILES, "splits", *RELAYS):
        (directory / name).mkdir()
    made: dict[str, Any] = {
        name: pipeline("files", lone, None, unique, directory / name, **options) for name, options in FILES.items()
    }
    made["splits"] = pipeline("postgres-split", lone, lambda: postgres, unique, directory / "splits", split_records=10)
    for name, filter in RELAYS.items():
        made[name] = relay(lone, unique, directory / name, filter=filter, value=Json(schema="id bigint"))
    flows = {name: stack.enter_context(flow) for name, flow in made.items()}
    for name in RELAYS:
        flows[name].make = LateOperator
    return flows


def run_late(name: str, flow: Any, before: Callable[[], None]) -> Any:
    """Run a window, with a function that is called after the driver's comparison. Return its report, or the error."""
    if name in RELAYS:
        late: dict[str, Any] = {"before": before}
    elif name == "splits":
        late = {"sink": LatePostgresSink(conn_id="warehouse", table=flow.place, atomic="split", before=before)}
    else:
        late = {"sink": LateFilesSink(path=flow.place, before=before)}
    try:
        return flow.run("run1", **late)
    except LogTruncated as error:
        return error


@dataclass(frozen=True)
class Cut:
    """The state of the tests after all logs were cut off.

    :ivar flows: the pipelines that were running meanwhile, with their results: a report, or an error.
    :ivar scenes: the generators of :data:`SCENES`, which continue from here.
    """

    flows: dict[str, tuple[Any, Any]]
    scenes: dict[str, Iterator[Logs]]


@pytest.fixture(scope="module")
def make_cut(lone, postgres, tmp_path_factory):
    """Return a function that cuts off all logs of this file at the same time.

    A first run of several pipelines is going on: their logs grow again when each driver has made its comparison and no task has
    read. Each run begins within the previous run.
    """
    numbers = count(1)

    def unique(prefix: str) -> str:
        return f"{prefix}-cut-{next(numbers)}"

    with ExitStack() as stack:

        def make() -> Cut:
            directory, scenes = tmp_path_factory.mktemp("cut"), {}
            for name, scene in SCENES.items():
                (directory / name).mkdir()
                scenes[name] = scene(lone, unique, directory / name)
                stack.callback(scenes[name].close)
                assert next(scenes[name]) == ()
            lone.restart()
            others = [log for scene in scenes.values() for log in next(scene)]
            flows = open_flows(lone, postgres, unique, directory, stack)
            logs = {flow.topic: begin_log(lone, flow.topic) for flow in flows.values()}
            found: dict[str, Any] = {}

            def run(names: list[str]) -> None:
                if names:
                    found[names[0]] = run_late(names[0], flows[names[0]], lambda: run(names[1:]))
                    return
                cut_off(lone, *others, *logs.values())
                for topic in logs:
                    send(lone, topic, range(100, 130))

            run(list(flows))
            return Cut({name: (flow, found[name]) for name, flow in flows.items()}, scenes)

        yield make


@pytest.fixture(scope="module")
def first_cut(make_cut):
    return make_cut()


@pytest.fixture
def cut(request, first_cut, make_cut):
    """The cut that all tests share. The second try of a test gets a new cut, because the first try has used its logs."""
    return first_cut if getattr(request.node, "execution_count", 1) == 1 else make_cut()


@pytest.mark.parametrize("way", ["tasks", "sql", "spark"])
def test_records_of_a_log_that_is_cut_off_between_look_and_read_are_not_committed(cut, way):
    flow, refused = cut.flows[way]
    assert isinstance(refused, LogTruncated)
    assert flow.rows() == []
    with pytest.raises(LogTruncated, match='To complete the planned window without them set `data_loss="skip"`'):
        flow.run("run1")
    give_up_at_start(flow, refused)
    assert flow.run("run2")["records_read"] == 40
    assert sorted(flow.rows()) == sorted(row_of(order(n)) for n in LEFT)


def give_up_at_start(flow, error: LogTruncated) -> None:
    """Give up the open window, of which nothing is in the sink."""
    assert (error.topic, error.partition, error.position, error.end) == (flow.topic, 0, 20, 10)
    assert error.found_epoch > error.known_epoch >= 0
    with KafkaHook() as hook:
        options = {"ledger_topic": f"ledger-{flow.name}", "group_id": flow.name, "discard_open": True}
        reset(hook, flow.name, "earliest", why="nothing of it was moved", **options)


def test_what_is_cut_off_between_look_and_read_is_a_gap_where_lost_records_are_passed_over(cut):
    flow, report = cut.flows["gap"]
    lost = [{"topic": flow.topic, "partition": 0, "start": start, "end": start + 5} for start in (10, 15)]
    assert (report["records_read"], report["gaps"]) == (10, lost)
    assert flow.run("run2")["records_read"] == 20
    assert sorted(flow.rows()) == sorted(row_of(order(n)) for n in (*range(10), *range(110, 130)))


def test_a_split_of_records_that_were_cut_off_is_not_committed_by_itself(cut):
    flow, refused = cut.flows["splits"]
    assert isinstance(refused, LogTruncated)
    assert sorted(flow.rows()) == [row_of(order(n)) for n in range(10)], "these are in the log, and the first split's"
    give_up(flow, refused)
    assert flow.run("run2")["records_read"] == 30
    assert sorted(flow.rows()) == sorted(row_of(order(n)) for n in LEFT)


def test_sparks_source_does_not_read_a_topic_with_unclean_elections_for_splits_that_commit_by_themselves(
    lone, postgres, unique, tmp_path
):
    with pipeline("postgres-split", lone, lambda: postgres, unique, tmp_path, read_with="spark") as flow:
        sink = PostgresSink(conn_id="warehouse", table=flow.place, atomic="split")
        assert flow.run("run1", sink=sink)["records_read"] == 0
        admin, risky = AdminClient(lone.connection_extra()), {"unclean.leader.election.enable": "true"}
        alter_config(admin, ResourceType.TOPIC, flow.topic, risky)
        with KafkaHook() as hook:
            assert eventually(lambda: risky.items() <= hook.read_topic_config([flow.topic])[flow.topic].items())
        with pytest.raises(ValidationError, match="read_with: splits are committed one by one, and topic"):
            flow.run("run2", sink=sink)


@pytest.mark.parametrize("way", RELAYS)
def test_a_partition_that_was_cut_off_is_not_published_to_another_topic(cut, way):
    orders, refused = cut.flows[way]
    assert isinstance(refused, LogTruncated)
    assert orders.read(orders.output) == []
    with KafkaHook() as hook:
        options = {"ledger_topic": f"ledger-{orders.name}", "group_id": orders.name, "discard_open": True}
        reset(hook, orders.name, "earliest", why="nothing of it was moved", **options)
    assert refused.end == 10
    assert orders.run("run2")["records_read"] == 40
    assert orders.check() == 40


@around_the_cut
def test_a_reader_hands_out_records_of_the_log_that_was_planned_only(lone, unique, tmp_path):
    with pipeline("files", lone, None, unique, tmp_path) as flow, KafkaHook() as hook:
        place, log = TopicPartition(flow.topic, 0), begin_log(lone, flow.topic)
        epoch = read_log(hook, [flow.topic]).partitions[place].epoch
        yield ()
        config = hook.make_consumer_config()

        def read(start: int, end: int, **options):
            reader = KafkaSplitReader(config, OffsetRange(*place, start, end), **options)
            return [offset for records in reader for offset in records.offsets.to_pylist()], reader.gaps

        assert read(5, 20, epoch=epoch) == (list(range(5, 20)), []), "an election that loses nothing"
        yield (log,)
        send(lone, flow.topic, range(100, 130))
        assert read(0, 10, epoch=epoch) == (list(range(10)), []), "what is left was planned"
        assert read(5, 20, epoch=epoch, skip_lost=True) == (list(range(5, 10)), [Gap(*place, 10, 20)])
        assert read(15, 20, epoch=epoch, skip_lost=True) == ([], [Gap(*place, 15, 20)])
        assert read(5, 20)[0] == list(range(5, 20)), "nobody knows the epoch"
        for start, end, cut in ((5, 20, 10), (15, 18, 10)):
            with pytest.raises(LogTruncated) as refused:
                read(start, end, epoch=epoch)
            assert (refused.value.position, refused.value.end, refused.value.known_epoch) == (end, cut, epoch)
