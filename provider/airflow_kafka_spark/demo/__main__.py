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
from airflow_kafka_spark.demo import shop
from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.table import format_table
from airflow_kafka_spark.testing import EmbeddedAirflow, EmbeddedKafka, EmbeddedPostgres

TASKS = ("publish", "orders_to_warehouse", "orders_to_lake")
TOPIC = "orders"
KILLS = {"publish.marked": "a split's Kafka transaction", "sink.in_transaction": "a sink's transaction"}


class Demo:
    def __init__(
        self, kafka: EmbeddedKafka, postgres: EmbeddedPostgres, airflow: EmbeddedAirflow, lake: Path, once: Path
    ) -> None:
        self.kafka, self.postgres, self.airflow, self.lake, self.once = kafka, postgres, airflow, lake, once
        self.sold = 0
        self.right = True

    def sell(self, count: int) -> None:
        with self.postgres.connect(autocommit=True) as connection:
            connection.execute(shop.SELL, (self.sold, self.sold + count - 1))
        self.sold += count
        say(f"{count:,} orders sold: {self.sold:,} rows in shop.orders")

    def run(self) -> None:
        """Trigger a DAG run, and wait until Airflow's scheduler has finished it."""
        begun = time.monotonic()
        run_id, state = self.airflow.run("orders", seconds=900)
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
            parts = report.get("published") or report["ranges"]
            rows.append(
                (
                    f"{task}\nwindow {int(report['window'])}, attempt {report['attempts']}",
                    "\n".join(
                        f"{r['topic']}-{r['partition']} [{r.get('start', r.get('first'))}, {r.get('end', r.get('last', -1) + 1)})"
                        for r in parts
                    ),
                    f"{report['records_read']:,}",
                    f"{report['records_written']:,}",
                    f"{report['records_rejected']:,}",
                    f"{report['rate']:,.0f}/s",
                    "\n".join(str(offset) for offset in report["committed"].values()),
                )
            )
        return "\n" + format_table(("task", "offset ranges", "read", "written", "rejected", "rate", "committed"), rows) + "\n"

    def count(self) -> None:
        """Compare the topic and both sinks with what was sold, id by id, and the warehouse with the shop, row by row."""
        import pyarrow.dataset as ds

        with self.postgres.connect(autocommit=True) as connection:
            ids = [row[0] for row in connection.execute("SELECT id FROM sales.orders")]
            different = connection.execute(shop.DIFFERENT).fetchone()
        files = (
            ds.dataset(str(self.lake / "orders"), format="parquet", partitioning="hive")
            .to_table(columns=["id"])["id"]
            .to_pylist()
        )
        places = (
            (f"Kafka topic {TOPIC}", shop.topic_ids(self.kafka.connection_extra(), TOPIC)),
            ("PostgreSQL sales.orders", ids),
            ("Parquet directory", files),
        )
        for name, found in places:
            verdict = shop.compare(found, self.sold)
            self.right &= not verdict.startswith("WRONG")
            say(f"{name}: {len(found):,}: {verdict}")
        assert different is not None
        self.right &= different[0] == 0
        say(f"Rows in which shop.orders and sales.orders differ: {different[0]:,}")

    def kill_from_now_on(self) -> None:
        for point in KILLS:
            self._fired(point).unlink()

    def check_kills(self) -> None:
        for point, where in KILLS.items():
            fired = self._fired(point).exists()
            self.right &= fired
            say(f"Killed inside {where}: {'yes' if fired else 'NO, and that should not happen'}")

    def _fired(self, point: str) -> Path:
        return Path(f"{self.once}.{point}")


def say(text: str) -> None:
    print(text, flush=True)


def headline(text: str) -> None:
    say(f"\n=== {text}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m airflow_kafka_spark.demo", description=__doc__)
    parser.add_argument("--dags", type=Path, default=Path("dags"), help="folder with the example DAGs (default: dags)")
    parser.add_argument("--events", type=int, default=300_000, help="orders in the first window (default: 300000)")
    options = parser.parse_args()
    if not (options.dags / "orders.py").exists():
        parser.error(f"{options.dags}/orders.py does not exist; run this from the repository, or give --dags")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="airflow-kafka-spark-demo-") as temporary:
        right = play(options.dags, options.events, Path(temporary))
    headline("What to try next")
    say("  dags/orders.py         the DAG that just ran: change the source, the schema, the sinks")
    say("  docs/sources.md        the ways from a database and from files to a topic")
    say("  docs/sinks.md          what each sink promises, and how")
    say("  docs/testing.md        the same embedded servers in the tests of your own DAGs")
    say("  make bench             how fast it is here, side by side with plain Spark")
    say(f"\nNothing is left running. That took {time.monotonic() - begun:.0f} s.")
    return 0 if right else 1


def play(dags: Path, count: int, temporary: Path) -> bool:
    lake, once = temporary / "lake", temporary / "fault"
    for point in KILLS:
        Path(f"{once}.{point}").touch()  # no fault in the first run
    headline("Starting a Kafka broker and a PostgreSQL server")
    with EmbeddedKafka() as kafka, EmbeddedPostgres() as postgres:
        with postgres.connect(autocommit=True) as connection:
            connection.execute(shop.CREATE)
        say(f"Kafka on {kafka.bootstrap_servers}, PostgreSQL on {postgres.host}:{postgres.port}")
        headline("Starting Airflow (api-server and scheduler)")
        airflow = EmbeddedAirflow(
            dags,
            connections={
                "kafka_default": kafka.connection_json(),
                "spark_default": json.dumps({"conn_type": "spark", "host": "local[2]", "extra": {"spark.driver.memory": "1g"}}),
                "shop": postgres.connection_uri(),
                "warehouse": postgres.connection_uri(),
            },
            variables={"lake": str(lake)},
            env={faults.FAULT: ",".join(KILLS), faults.ONCE: str(once)},
        )
        with airflow:
            say(f"Airflow on {airflow.url}")
            demo = Demo(kafka, postgres, airflow, lake, once)
            headline("First windows: shop database -> Kafka -> warehouse table and Parquet files")
            demo.sell(count)
            demo.run()
            demo.count()
            headline("Second windows, with a SIGKILL in each direction, in the middle of a transaction")
            demo.sell(count // 2)
            demo.kill_from_now_on()
            demo.run()
            demo.check_kills()
            say("The killed attempts left nothing half done: the retries found the windows planned, and finished exactly them.")
            demo.count()
            return demo.right


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KafkaSparkError as error:
        sys.exit(f"\n{error}")
