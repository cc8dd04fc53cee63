"""The whole thing once: real Kafka, real PostgreSQL, real Airflow; a kill in the middle of a window; and a count."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from airflow_kafka_spark import faults
from airflow_kafka_spark.demo import events
from airflow_kafka_spark.demo.table import render
from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.testing import EmbeddedAirflow, EmbeddedKafka, EmbeddedPostgres

TASKS = ("orders_to_warehouse", "orders_to_lake")
CREATE = """
CREATE SCHEMA sales;
CREATE TABLE sales.orders (id bigint PRIMARY KEY, customer text, amount numeric(12,2), placed_at timestamptz);
"""


class Demo:
    def __init__(
        self, kafka: EmbeddedKafka, postgres: EmbeddedPostgres, airflow: EmbeddedAirflow, lake: Path, once: Path
    ) -> None:
        self.kafka, self.postgres, self.airflow, self.lake, self.once = kafka, postgres, airflow, lake, once
        self.produced = 0
        self.right = True

    def produce(self, count: int) -> None:
        begun = time.monotonic()
        events.produce(self.kafka.connection_extra(), self.produced, count)
        self.produced += count
        seconds = time.monotonic() - begun
        say(f"{count:,} order events put on topic `{events.TOPIC}` ({events.PARTITIONS} partitions) in {seconds:.1f} s")

    def run(self) -> None:
        """One DAG run, through Airflow's scheduler."""
        begun = time.monotonic()
        run_id, state = self.airflow.run("orders", seconds=600)
        say(f"DAG run {run_id}: {state} after {time.monotonic() - begun:.1f} s")
        for task in TASKS:
            tries = self.airflow.task("orders", run_id, task)["try_number"]
            if tries > 1:
                say(f"  {task} needed {tries} attempts")
        if state != "success":
            for task in TASKS:
                say(self.airflow.task_log("orders", run_id, task)[-3000:])
            raise SystemExit("The DAG run failed; its log is above.")
        print(self.table([(task, self.airflow.xcom("orders", run_id, task)) for task in TASKS]), flush=True)

    def table(self, reports: list[tuple[str, Any]]) -> str:
        rows = []
        for task, value in reports:
            report = json.loads(value) if isinstance(value, str) else value
            ranges = report["ranges"]
            rows.append(
                (
                    f"{task}\nwindow {int(report['window'])}, attempt {report['attempts']}",
                    "\n".join(f"{r['topic']}-{r['partition']} [{r['start']}, {r['end']})" for r in ranges),
                    f"{report['records_read']:,}",
                    f"{report['records_written']:,}",
                    f"{report['records_rejected']:,}",
                    f"{report['rate']:,.0f}/s",
                    "\n".join(str(offset) for offset in report["committed"].values()),
                )
            )
        return "\n" + render(("task", "offset ranges", "read", "written", "rejected", "rate", "committed"), rows) + "\n"

    def count(self) -> None:
        """Compare both sinks with what was produced, id by id."""
        import pyarrow.dataset as ds

        with self.postgres.connect(autocommit=True) as connection:
            ids = [row[0] for row in connection.execute("SELECT id FROM sales.orders")]
        files = (
            ds.dataset(str(self.lake / "orders"), format="parquet", partitioning="hive")
            .to_table(columns=["id"])["id"]
            .to_pylist()
        )
        for name, found in (("PostgreSQL sales.orders", ids), ("Parquet directory", files)):
            verdict = events.compare(found, self.produced)
            self.right &= not verdict.startswith("WRONG")
            say(f"{name}: {len(found):,} rows: {verdict}")


def say(text: str) -> None:
    print(text, flush=True)


def headline(text: str) -> None:
    say(f"\n=== {text}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m airflow_kafka_spark.demo", description=__doc__)
    parser.add_argument("--dags", type=Path, default=Path("dags"), help="folder with the example DAGs (default: dags)")
    parser.add_argument("--events", type=int, default=300_000, help="order events in the first window (default: 300000)")
    options = parser.parse_args()
    if not (options.dags / "orders.py").exists():
        parser.error(f"{options.dags}/orders.py does not exist; run this from the repository, or give --dags")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="airflow-kafka-spark-demo-") as temporary:
        right = play(options.dags, options.events, Path(temporary))
    headline("What to try next")
    say("  dags/orders.py         the DAG that just ran: change the schema, the sink, or `max_records`")
    say("  docs/sinks.md          what each sink promises, and how")
    say("  docs/testing.md        the same embedded servers in the tests of your own DAGs")
    say("  make bench             how fast it is here, side by side with plain Spark")
    say(f"\nNothing is left running. That took {time.monotonic() - begun:.0f} s.")
    return 0 if right else 1


def play(dags: Path, count: int, temporary: Path) -> bool:
    lake, once = temporary / "lake", temporary / "fault"
    once.touch()  # no fault in the first run
    headline("Starting a Kafka broker and a PostgreSQL server")
    with EmbeddedKafka() as kafka, EmbeddedPostgres() as postgres:
        kafka.create_topic(events.TOPIC, events.PARTITIONS)
        with postgres.connect(autocommit=True) as connection:
            connection.execute(CREATE)
        say(f"Kafka on {kafka.bootstrap_servers}, PostgreSQL on {postgres.host}:{postgres.port}")
        headline("Starting Airflow (api-server and scheduler)")
        airflow = EmbeddedAirflow(
            dags,
            connections={
                "kafka_default": kafka.connection_json(),
                "spark_default": json.dumps({"conn_type": "spark", "host": "local[2]", "extra": {"spark.driver.memory": "1g"}}),
                "warehouse": postgres.connection_uri(),
            },
            variables={"lake": str(lake)},
            env={faults.FAULT: "sink.in_transaction", faults.ONCE: str(once)},
        )
        with airflow:
            say(f"Airflow on {airflow.url}")
            demo = Demo(kafka, postgres, airflow, lake, once)
            headline("First window: from the beginning of the topic")
            demo.produce(count)
            demo.run()
            demo.count()
            headline("Second window: the first task to get so far is killed (SIGKILL) inside its sink's transaction")
            demo.produce(count // 2)
            once.unlink()
            demo.run()
            say("The killed attempt left nothing half done; Airflow's retry found the window planned and finished exactly it."
                if once.exists() else "No task was killed: that should not happen.")  # fmt: skip
            demo.right &= once.exists()
            demo.count()
            return demo.right


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KafkaSparkError as error:
        sys.exit(f"\n{error}")
