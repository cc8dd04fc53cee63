"""A ledger of two years: fence, look, plan and close of a window in it, and the memory that takes.

500 pipelines have moved 10,000 windows; three of them also 17,520 hourly intervals each, of a topic with 50 partitions. Needs
neither Spark nor a database. Each window is moved by a process of its own, as a task is. ``unarchived-0`` finds all of its old
intervals, and all boundaries of its topic, with a record of their own, and archives them. ``holes-3`` is a fourth pipeline whose
schedule leaves holes: 17,520 intervals of half an hour, one in each hour.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

from benchmarks.measure import Table, peak_memory, print_title

PIPELINES, WINDOWS, INTERVALS, PARTITIONS = 500, 10_000, 17_520, 50
OF_INTERVALS = 3
LEDGER, TOPIC, OLD_TOPIC = "airflow-windows", "hourly", "unarchived"
MORE = 20
EACH = WINDOWS // (PIPELINES - OF_INTERVALS) + 1
"""Number of windows of each pipeline without intervals."""
DIRECTORY = "BENCH_LEDGER_DIRECTORY"
"""Environment variable with the directory of the pipelines' sinks."""
END = datetime(2026, 11, 1, tzinfo=timezone.utc)
HOUR = timedelta(hours=1)


def run() -> None:
    """Print a table."""
    from airflow_kafka_spark.testing import EmbeddedKafka

    print_title("A ledger of two years")
    intervals = f"{OF_INTERVALS} x {INTERVALS:,} intervals of {PARTITIONS} partitions"
    print(f"{PIPELINES} pipelines, {WINDOWS:,} windows, {intervals}\n")
    steps = ("peek, s", "fence and look, s", "plan, s", "close, s", "move the group, s")
    table = Table("window of", *steps, "all, s", "CPU, s", "peak MB", "of these libraries")
    with EmbeddedKafka() as kafka, tempfile.TemporaryDirectory(prefix="airflow-kafka-spark-bench-") as directory:
        os.environ[DIRECTORY] = directory
        _fill(kafka)
        for what in (
            "progress-7",
            "source-9",
            "interval-1",
            "interval-2",
            "holes-3",
            "unarchived-0",
            "unarchived-0",
            "progress-7",
        ):
            os.environ["AIRFLOW_CONN_KAFKA_DEFAULT"] = kafka.connection_json()
            arguments = [sys.executable, "-m", "benchmarks.ledger", what, str(_next(what))]
            done = subprocess.run(arguments, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr)
            table.row(*json.loads(done.stdout.splitlines()[-1]))


def _hour(number: int, pipeline: str = "") -> Any:
    """Return an interval of a pipeline: an hour, or its first half where the schedule has holes."""
    from airflow_kafka_spark.windows.interval import Interval

    start = END - (INTERVALS - number) * HOUR
    return Interval(start, start + (HOUR / 2 if pipeline.startswith("holes") else HOUR))


def _fill(kafka: Any) -> None:
    """Write what two years leave: a record of each partition in each hour, and the ledger."""
    from confluent_kafka import Producer

    from airflow_kafka_spark.hooks.kafka.partitioner import choose_partition
    from airflow_kafka_spark.ledger.attempt import COMPACT
    from airflow_kafka_spark.ledger.topic import CONFIG
    from airflow_kafka_spark.ledger.topic import PARTITIONS as LEDGER_PARTITIONS

    kafka.create_topic(LEDGER, LEDGER_PARTITIONS, CONFIG)
    for topic in (TOPIC, OLD_TOPIC):
        kafka.create_topic(topic, PARTITIONS, {"retention.ms": "-1", "segment.bytes": str(1 << 20)})
    kafka.create_topic("topic-7", PARTITIONS, {"retention.ms": "-1"})
    options = {"queue.buffering.max.messages": 2_000_000, "linger.ms": 50, "compression.type": "zstd"}
    producer = Producer({**kafka.connection_extra(), **options})
    for number in range(INTERVALS + MORE):
        at = _hour(number).start_ms
        for partition in range(PARTITIONS):
            for topic in (TOPIC, OLD_TOPIC):
                producer.produce(topic, b"x", partition=partition, timestamp=at)
        producer.poll(0)
    for number in range(40 * (EACH + 3) * PARTITIONS):
        producer.produce("topic-7", b"x", partition=number % PARTITIONS)
        producer.poll(0)
    assert producer.flush(120) == 0
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

    os.environ["AIRFLOW_CONN_KAFKA_DEFAULT"] = kafka.connection_json()
    with KafkaHook() as hook:
        topic_ids = {name: found.topic_id for name, found in hook.describe_topics([TOPIC, OLD_TOPIC]).items()}
    # In batches as large as those of operators: a reader holds a batch as a whole.
    producer = Producer({**kafka.connection_extra(), **options, **COMPACT})
    for name, record in _records(topic_ids):
        producer.produce(LEDGER, record.value, record.key, partition=choose_partition(name.encode(), LEDGER_PARTITIONS))
        producer.poll(0)
    assert producer.flush(120) == 0


def _records(topic_ids: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield the ledger's records, each with the name that decides its partition."""
    yield from _windows()
    for index, kind in enumerate(("unarchived", *["interval"] * (OF_INTERVALS - 1), "holes")):
        yield from _intervals(index, f"{kind}-{index}", topic_ids)
    for topic, topic_id in topic_ids.items():
        yield from _boundaries(topic, topic_id)


def _bind(operator: Any, run: str = "") -> Any:
    """Return the binding of a window, or that of its pipeline, which has recorded that it uses its group."""
    from airflow_kafka_spark.windows.binding import Binding, Writer

    writer = Writer("flow", "bench", run_id=run)
    return Binding(writer, operator.list_destinations(), operator.find_origin(), owns=not run)


def _list_owner_records(name: str, operator: Any) -> Iterator[tuple[str, Any]]:
    """Yield the records of a pipeline's binding, and of its group."""
    from airflow_kafka_spark.windows.memory import make_binding_record, make_group_record

    yield name, make_binding_record(name, _bind(operator))
    yield operator.group_id, make_group_record(operator.group_id, name)


def _windows() -> Iterator[tuple[str, Any]]:
    from airflow_kafka_spark.windows.memory import Attempt, WindowEntry, make_position_record, make_window_record
    from airflow_kafka_spark.windows.model import OffsetRange, State, Window
    from airflow_kafka_spark.windows.plan import Position, find_next_position
    from airflow_kafka_spark.windows.report import Report

    for index in range(PIPELINES - OF_INTERVALS):
        name, position, window = f"progress-{index}", Position(), None
        operator = _operator(name, f"topic-{index}")
        yield from _list_owner_records(name, operator)
        for number in range(1, EACH + 1):
            at = (END + number * HOUR).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            ranges = tuple(OffsetRange(f"topic-{index}", p, 40 * number - 40, 40 * number) for p in range(PARTITIONS))
            run = f"scheduled__{at}"
            window = Window(name, number, ranges, f"flow/{run}/bench", at, binding=_bind(operator, run))
            position = find_next_position(position, window)
            report = Report(window, records_read=120, records_written=120, timings={"total": 3.0}, completed_at=at, group_id=name)
            yield (
                name,
                make_window_record(WindowEntry(window, State.COMPLETE, Attempt(1, "0" * 16, window.run, at), report.to_dict())),
            )
            yield name, make_position_record(name, position, number)
        if index == 7:
            _commit(operator, window)


def _intervals(index: int, name: str, topic_ids: dict[str, str]) -> Iterator[tuple[str, Any]]:
    from airflow_kafka_spark.windows.interval import IntervalState
    from airflow_kafka_spark.windows.interval_archive import ARCHIVE_AFTER, group_into_archives
    from airflow_kafka_spark.windows.memory import (
        Attempt,
        WindowEntry,
        make_archive_record,
        make_interval_record,
        make_window_record,
    )
    from airflow_kafka_spark.windows.model import OffsetRange, State, Window
    from airflow_kafka_spark.windows.report import Report

    topic = TOPIC if index else OLD_TOPIC
    ids, old, window = {topic: topic_ids[topic]}, [], None
    operator = _operator(name, topic)
    yield from _list_owner_records(name, operator)
    for number in range(INTERVALS):
        interval = _hour(number, name)
        ranges = tuple(OffsetRange(topic, p, number, number + 1) for p in range(PARTITIONS))
        run_id = f"scheduled__{interval.start.isoformat()}"
        run = f"flow/{run_id}/bench"
        is_old = number < INTERVALS - 100
        state = IntervalState(interval, State.COMPLETE, ranges, run, topic_ids=ids, forgotten=is_old)
        if index and is_old and number < INTERVALS - 100 - ARCHIVE_AFTER:
            old.append(state)
            for archive, _ in group_into_archives(old):
                yield name, make_archive_record(name, archive)
                old.clear()
        else:
            yield name, make_interval_record(name, state)
        if not is_old:
            lane = interval.make_ledger_name(name)
            bounds, at = (interval.start_ms, interval.end_ms), interval.end.isoformat()
            window = Window(lane, 1, ranges, run, at, topic_ids=ids, interval=bounds, binding=_bind(operator, run_id))
            timings = {"total": 3.0}
            report = Report(window, records_read=50, records_written=50, timings=timings, group_id=name, completed_at=at)
            yield name, make_window_record(WindowEntry(window, State.COMPLETE, Attempt(1, "0" * 16, run, at), report.to_dict()))
    yield from ((name, make_interval_record(name, state)) for state in old)
    _commit(operator, window)


def _boundaries(topic: str, topic_id: str) -> Iterator[tuple[str, Any]]:
    from airflow_kafka_spark.windows.interval_boundaries import (
        UNARCHIVED,
        Boundary,
        BoundaryArchive,
        archive_to_record,
        boundary_to_record,
    )
    from airflow_kafka_spark.windows.memory import LedgerRecord

    part: list[Boundary] = []
    for number in range(INTERVALS + 1):
        instant = _hour(number).start_ms
        boundary = Boundary(topic, topic_id, instant, dict.fromkeys(range(PARTITIONS), number), by="run", decided_at=instant)
        if topic == OLD_TOPIC or number > INTERVALS - UNARCHIVED:
            yield f"boundaries of {topic}", LedgerRecord(*boundary_to_record(boundary, f"{number:016x}"))
            continue
        part.append(boundary)
        if len(part) > UNARCHIVED or number == INTERVALS - UNARCHIVED:
            yield f"boundaries of {topic}", LedgerRecord(*archive_to_record(BoundaryArchive.of(part), f"{number:016x}"))
            part = []


def _operator(name: str, topic: str) -> Any:
    """Return the operator of a pipeline, whose sink is a directory of its own."""
    from airflow_kafka_spark.formats import Raw
    from airflow_kafka_spark.operators import KafkaToSinkOperator
    from airflow_kafka_spark.sinks import FilesSink

    sink = FilesSink(path=f"{os.environ[DIRECTORY]}/{name}")
    window: Any = "progress" if name.startswith("progress") else "interval"
    return KafkaToSinkOperator(task_id="bench", topics=topic, group_id=name, pipeline=name, value=Raw(), sink=sink, window=window)


def _commit(operator: Any, window: Any) -> None:
    """Let the sink record a window, without rows."""
    with operator.sink.begin(window, (), operator.make_shape_for(window.pipeline)) as writer:
        writer.commit([])


def _move(what: str, hour: int) -> None:
    """Move a window as an operator does, without its records, and print a line of the table.

    :param hour: the number of the interval that is moved, as its DAG run knows it.
    """
    import confluent_kafka  # noqa: F401
    import pyarrow  # noqa: F401

    from airflow_kafka_spark.operators.binding import Run

    kind, _, number = what.partition("-")
    topic = f"topic-{number}" if kind in ("progress", "source") else OLD_TOPIC if kind == "unarchived" else TOPIC
    interval = _hour(hour, what)
    operator = _operator(what, topic)
    operator.kafka.read_cluster_id()
    run = Run("flow", f"bench-{time.time()}", "bench", interval=(interval.start, interval.end))
    libraries, marks, cpu = peak_memory(), [time.monotonic()], time.process_time()

    def mark() -> None:
        marks.append(time.monotonic())

    if kind == "source":
        _move_without_group(operator.kafka, f"progress-{number}", mark)
    else:
        _move_with_group(operator, run, mark)
    peak, cpu = peak_memory(), time.process_time() - cpu
    times = [f"{later - earlier:.2f}" for earlier, later in zip(marks, marks[1:], strict=False)]
    name = what if kind != "source" else "no group"
    print(json.dumps([name, *times, f"{marks[-1] - marks[0]:.2f}", f"{cpu:.2f}", f"{peak:.0f}", f"{libraries:.0f}"]))


def _move_with_group(operator: Any, run: Any, mark: Callable[[], None]) -> None:
    """Take the operator's own steps, apart from the one that moves records.

    :param mark: called after each step.
    """
    from airflow_kafka_spark.windows.report import Report

    ledger = operator.open_ledger(run)
    ledger.peek()
    mark()
    with ledger:
        assert ledger.find_completed(run.id) is None
        mark()
        window = operator._choose_next_window(ledger, run, None).window
        assert window.interval is None or [r.span for r in window.ranges] == [1] * PARTITIONS, window
        mark()
        _commit(operator, window)
        operator.close(ledger, window, Report(window, records_read=PARTITIONS, records_written=PARTITIONS))
        mark()
        operator.follow(ledger)
        mark()


def _move_without_group(hook: Any, name: str, mark: Callable[[], None]) -> None:
    """Take the ledger's steps of a pipeline whose position no group mirrors, such as one of a table.

    :param mark: called after each step.
    """
    from airflow_kafka_spark.ledger.attempt import Ledger
    from airflow_kafka_spark.windows.model import OffsetRange, Window

    ledger = Ledger(hook, name, f"run-{time.time()}")
    ledger.peek()
    mark()
    with ledger:
        mark()
        known = ledger.memory
        assert known.last_number
        ranges = tuple(OffsetRange(*tp, offset, offset + 40) for tp, offset in sorted(known.position.offsets.items()))
        ledger.plan(Window(ledger.pipeline, known.last_number + 1, ranges, ledger.run, ""))
        mark()
        ledger.close({"completed_at": "2026-11-02T00:00:00.000Z"}, {})
        mark()
        mark()


def _next(pipeline: str) -> int:
    """Return the number of the first hour that a pipeline has not moved; 0 for one without intervals."""
    from airflow_kafka_spark.control.pipelines import read_pipeline
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

    if pipeline.startswith(("progress", "source")):
        return 0
    with KafkaHook() as hook:
        intervals = read_pipeline(hook, pipeline).memory.intervals
    hours = range(INTERVALS, INTERVALS + MORE)
    return next(number for number in hours if _hour(number, pipeline).name not in intervals)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _move(sys.argv[1], int(sys.argv[2]))
    else:
        run()
