"""Windows of more and more splits with few rows each: what a split costs must not grow with them.

PostgreSQL -> Kafka, where each split is a transaction; then Kafka -> files and -> PostgreSQL, where a split is a partition of the
topic, beside the cost of a record.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import events
from benchmarks.bench import SCHEMA, Stand
from benchmarks.measure import Table, print_title, print_turn

SPLITS = (20, 80, 320, 800)
ROWS = 10

PARTITIONS = (2, 57, 146)
RECORDS = 150
"""Records of each partition."""


def run(stand: Stand) -> None:
    from_source(stand)
    from_kafka(stand)


def from_kafka(stand: Stand) -> None:
    """Print the cost of a split and that of a record.

    A split costs the slope between windows of few and of many splits, a record that between few and many records in two splits.
    """
    from airflow_kafka_spark.sinks import FilesSink, PostgresSink

    print_title(f"Kafka -> sinks, windows of {', '.join(map(str, PARTITIONS))} splits with {RECORDS} records each")
    sinks: dict[str, Any] = {
        "files": lambda name: FilesSink(path=str(stand.directory / name)),
        "PostgreSQL, window-atomic": lambda name: PostgresSink(conn_id="warehouse", table=stand.table(f'"{name}"')),
        "PostgreSQL, split-atomic": lambda name: PostgresSink(
            conn_id="warehouse", table=stand.table(f'"{name}"'), atomic="split"
        ),
    }
    many = 100_000
    for partitions in PARTITIONS:
        stand.kafka.create_topic(f"few-{partitions}", partitions)
        events.produce(stand.kafka.connection_extra(), 0, RECORDS * partitions, f"few-{partitions}")
    stand.kafka.create_topic("many-2", 2)
    events.produce(stand.kafka.connection_extra(), 0, 2 * many, "many-2")
    topics = [*(f"few-{partitions}" for partitions in PARTITIONS), "many-2"]
    times: dict[tuple[str, str], list[float]] = {(sink, topic): [] for sink in sinks for topic in topics}
    for turn in range(stand.rounds + 1):
        for number, (sink, make) in enumerate(sinks.items()):
            for topic in topics:
                seconds = _move(topic, f"{topic}-{number}-{turn}", make(f"s{number}-{topic}-{turn}"))
                if turn:
                    times[sink, topic].append(seconds)
                print_turn(f"{sink}, {topic}", f"{seconds:.2f} s", warming_up=not turn)
    print()
    table = Table("Kafka ->", "milliseconds per split", "microseconds per record")
    for sink in sinks:
        few, most, records = (statistics.median(times[sink, topic]) for topic in (topics[0], topics[-2], topics[-1]))
        split = (most - few) / (PARTITIONS[-1] - PARTITIONS[0])
        table.row(sink, f"{split * 1000:,.1f}", f"{(records - few) / (2 * (many - RECORDS)) * 1e6:,.2f}")


def _move(topic: str, name: str, sink: Any) -> float:
    """Move all of a topic, and return the seconds of the move."""
    from airflow_kafka_spark.formats import Json
    from airflow_kafka_spark.operators import KafkaToSinkOperator
    from tests.support.runs import context

    operator = KafkaToSinkOperator(
        task_id="bench", topics=topic, group_id=name, pipeline=name, value=Json(schema=SCHEMA), sink=sink
    )
    return float(operator.execute(context(f"run-{name}"))["timings"]["move"])


def from_source(stand: Stand) -> None:
    from airflow_kafka_spark.formats import Json
    from airflow_kafka_spark.operators import SourceToKafkaOperator
    from airflow_kafka_spark.sinks import KafkaSink
    from airflow_kafka_spark.sources import JdbcSource
    from tests.support.runs import context

    print_title(f"Windows of {', '.join(map(str, SPLITS))} splits with {ROWS} rows each")
    for splits in SPLITS:
        with stand.postgres.connect(autocommit=True) as connection:
            connection.execute(f"DROP TABLE IF EXISTS splits_{splits}")
            connection.execute(f"CREATE TABLE splits_{splits} (id bigint PRIMARY KEY, customer text)")
            connection.execute(
                f"INSERT INTO splits_{splits} SELECT n, 'customer-' || n FROM generate_series(1, {splits * ROWS}) AS n"
            )
            connection.execute(f"VACUUM ANALYZE splits_{splits}")
    seconds: dict[int, list[float]] = {splits: [] for splits in SPLITS}
    for turn in range(stand.rounds + 1):
        for splits in SPLITS:
            name = f"splits-{splits}-{turn}"
            stand.kafka.create_topic(name, 4)
            source = JdbcSource(conn_id="warehouse", table=f"splits_{splits}", cursor="id", split_records=ROWS)
            operator = SourceToKafkaOperator(
                task_id="bench",
                source=source,
                sink=KafkaSink(topic=name, key="id", value=Json()),
                pipeline=name,
                read_with="task",
            )
            report = operator.execute(context(f"run-{name}"))
            assert report["records_written"] == splits * ROWS, report
            if turn:
                seconds[splits].append(report["timings"]["move"])
            print_turn(f"{splits} splits", str(report["timings"]), warming_up=not turn)
    base = statistics.median(seconds[SPLITS[0]]) / SPLITS[0]
    print()
    table = Table("splits of the window", "milliseconds per split", "ratio", texts=0)
    for splits, found in seconds.items():
        each = statistics.median(found) / splits
        table.row(str(splits), f"{each * 1000:,.0f}", f"{each / base:.2f}")
