"""PostgreSQL -> Kafka in windows of more and more splits with few rows each: what a split costs must not grow with them."""

from __future__ import annotations

import statistics

from benchmarks.bench import Stand

SPLITS = (20, 80, 320, 800)
ROWS = 10


def run(stand: Stand) -> None:
    from airflow_kafka_spark.formats import Json
    from airflow_kafka_spark.operators import SourceToKafkaOperator
    from airflow_kafka_spark.sinks import KafkaSink
    from airflow_kafka_spark.sources import JdbcSource
    from tests.support.runs import context

    print(f"\n## Windows of {', '.join(map(str, SPLITS))} splits with {ROWS} rows each\n", flush=True)
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
            print(f"   {splits} splits: {report['timings']}{'' if turn else ' (warming up)'}", flush=True)
    base = statistics.median(seconds[SPLITS[0]]) / SPLITS[0]
    print("\n| splits of the window | milliseconds per split | ratio |\n| ---: | ---: | ---: |")
    for splits, found in seconds.items():
        each = statistics.median(found) / splits
        print(f"| {splits} | {each * 1000:,.0f} | {each / base:.2f} |", flush=True)
