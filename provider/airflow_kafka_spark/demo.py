"""Run pipelines once with a real Kafka, PostgreSQL and Airflow, kill them in the middle of windows, and count the records."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from airflow_kafka_spark import faults
from airflow_kafka_spark.cli.commands import format_table
from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.hooks.spark.class_archive import SparkClassArchive, is_whole
from airflow_kafka_spark.hooks.spark.warm.process import connect, read_peer_credentials
from airflow_kafka_spark.testing import EmbeddedAirflow, EmbeddedKafka, EmbeddedPostgres
from airflow_kafka_spark.testing._processes import wait_until

TASKS = ("publish", "orders_to_warehouse", "orders_to_lake")
TOPIC = "orders"
KILLS = {"publish.marked": "a split's Kafka transaction", "sink.in_transaction": "a sink's transaction"}

_RUN_SECONDS = 900.0
_STATES = {
    "running": "attempt {} is running",
    "up_for_retry": "attempt {} has failed, as it should; the next one begins in 5 s",
    "success": "done",
    "failed": "failed",
}

_COLUMNS = "id bigint PRIMARY KEY, customer text, amount numeric(12,2), placed_at timestamptz"

CREATE_TABLES = f"""
CREATE SCHEMA shop;
CREATE TABLE shop.orders ({_COLUMNS});
CREATE SCHEMA sales;
CREATE TABLE sales.orders ({_COLUMNS});
"""

INSERT_ORDERS = """
INSERT INTO shop.orders
SELECT n, 'customer-' || n * 7919 %% 50000, n %% 900 + 1 + n %% 100 / 100.0,
    timestamptz '2026-11-01 00:00+00' + n * interval '7 s'
FROM generate_series(%s::bigint, %s::bigint) AS n
"""

COUNT_DIFFERENCES = """
SELECT count(*) FROM (
    (TABLE shop.orders EXCEPT ALL TABLE sales.orders) UNION ALL (TABLE sales.orders EXCEPT ALL TABLE shop.orders)
) AS different
"""


class Demo:
    """The servers of the demo, what was sold in it, and whether all counts were right so far."""

    def __init__(
        self, kafka: EmbeddedKafka, postgres: EmbeddedPostgres, airflow: EmbeddedAirflow, lake: Path, once: Path
    ) -> None:
        self.kafka, self.postgres, self.airflow, self.lake, self.once = kafka, postgres, airflow, lake, once
        self.sold = 0
        self.right = True

    def sell(self, count: int) -> None:
        """Insert orders into the table of the shop."""
        with self.postgres.connect(autocommit=True) as connection:
            connection.execute(INSERT_ORDERS, (self.sold, self.sold + count - 1))
        self.sold += count
        print_text(f"{count:,} orders sold: {self.sold:,} rows in shop.orders")

    def run(self) -> None:
        """Trigger a DAG run, and wait until Airflow's scheduler has finished it."""
        begun = time.monotonic()
        run_id = self.airflow.trigger("orders")
        state = self._follow(run_id, begun)
        print_text(f"DAG run {run_id}: {state} after {time.monotonic() - begun:.1f} s")
        for task in TASKS:
            tries = self.airflow.task("orders", run_id, task)["try_number"]
            if tries > 1:
                print_text(f"  {task} needed {tries} attempts")
        if state != "success":
            for task in TASKS:
                print_text(self.airflow.read_task_log("orders", run_id, task)[-3000:])
            raise SystemExit("The DAG run failed; its log is above.")
        print(self.format_reports([(task, self.airflow.xcom("orders", run_id, task)) for task in TASKS]), flush=True)

    def _follow(self, run_id: str, begun: float) -> str:
        """Print each change of a task's state until a DAG run has ended, and return the state of the run."""
        known: dict[str, str] = {}
        while time.monotonic() - begun < _RUN_SECONDS:
            self.airflow.check()
            state = str(self.airflow.api("GET", f"/dags/orders/dagRuns/{run_id}")["state"])
            for task in self.airflow.api("GET", f"/dags/orders/dagRuns/{run_id}/taskInstances")["task_instances"]:
                now = _STATES.get(task["state"], "").format(task["try_number"])
                if now and known.get(task["task_id"]) != now:
                    known[task["task_id"]] = now
                    print_text(f"  {time.monotonic() - begun:5.1f} s  {task['task_id']}: {now}")
            if state in ("success", "failed"):
                return state
            time.sleep(0.3)
        raise SystemExit(f"The DAG run has not ended after {_RUN_SECONDS:g} s:\n{self.airflow.account('orders', run_id)}")

    def format_reports(self, reports: list[tuple[str, str | Mapping[str, Any]]]) -> str:
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
            different = connection.execute(COUNT_DIFFERENCES).fetchone()
        files = (
            ds.dataset(str(self.lake / "orders"), format="parquet", partitioning="hive")
            .to_table(columns=["id"])["id"]
            .to_pylist()
        )
        places = (
            (f"Kafka topic {TOPIC}", read_record_keys(self.kafka.connection_extra(), TOPIC)),
            ("PostgreSQL sales.orders", ids),
            ("Parquet directory", files),
        )
        for name, found in places:
            verdict = check_ids(found, self.sold)
            self.right &= not verdict.startswith("WRONG")
            print_text(f"{name}: {len(found):,}: {verdict}")
        assert different is not None
        self.right &= different[0] == 0
        print_text(f"Rows in which shop.orders and sales.orders differ: {different[0]:,}")

    def kill_from_now_on(self) -> None:
        """Let the next attempts be killed, once at each of :data:`KILLS`."""
        for point in KILLS:
            self._get_flag_path(point).unlink()

    def check_kills(self) -> None:
        """Check that an attempt was killed at each of :data:`KILLS`."""
        for point, where in KILLS.items():
            fired = self._get_flag_path(point).exists()
            self.right &= fired
            print_text(f"Killed inside {where}: {'yes' if fired else 'NO, and that should not happen'}")

    def _get_flag_path(self, point: str) -> Path:
        return Path(f"{self.once}.{point}")


def check_ids(ids: Iterable[int], total: int) -> str:
    """Return a sentence that says whether these are exactly the ids 0 to total - 1, each once."""
    counts = Counter(ids)
    missing = total - sum(1 for n in counts if 0 <= n < total)
    doubled = sum(1 for c in counts.values() if c > 1)
    if missing or doubled or len(counts) != total:
        return f"WRONG: {missing:,} missing, {doubled:,} doubled"
    return f"all {total:,} orders, each exactly once"


def read_record_keys(config: dict[str, Any], topic: str) -> list[int]:
    """Return the keys of all records that a ``read_committed`` reader sees. Uses none of this package's operators."""
    from confluent_kafka import Consumer, KafkaError, TopicPartition

    settings = {
        "group.id": "demo",
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
        "enable.auto.commit": False,
    }
    consumer = Consumer({**config, **settings})
    try:
        partitions = list(consumer.list_topics(topic, timeout=30).topics[topic].partitions)
        consumer.assign([TopicPartition(topic, p, 0) for p in partitions])
        left, found = len(partitions), []
        while left:
            for message in consumer.consume(10_000, 0.5):
                if (error := message.error()) is None:
                    found.append(int(message.key() or b"-1"))
                elif error.code() == KafkaError._PARTITION_EOF:
                    left -= 1
                else:
                    raise RuntimeError(error.str())
        return found
    finally:
        consumer.close()


def print_text(text: str) -> None:
    """Print a text at once, also if the output is not a terminal."""
    print(text, flush=True)


def print_headline(text: str) -> None:
    """Print a headline."""
    print_text(f"\n=== {text}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m airflow_kafka_spark.demo", description=__doc__)
    parser.add_argument("--dags", type=Path, default=Path("dags"), help="folder with the example DAGs (default: dags)")
    parser.add_argument("--events", type=int, default=300_000, help="orders in the first window (default: 300000)")
    options = parser.parse_args()
    if not (options.dags / "orders.py").exists():
        parser.error(f"{options.dags}/orders.py does not exist; run this from the repository, or give --dags")
    begun = time.monotonic()
    print_text(
        "Five steps: start the servers, start Airflow, move the first windows, move the next ones with kills, count. On two idle"
    )
    print_text("cores they take less than two minutes; the first time on a machine Kafka is downloaded before.")
    with tempfile.TemporaryDirectory(prefix="airflow-kafka-spark-demo-") as temporary:
        right = run_demo(options.dags, options.events, Path(temporary))
    print_headline("What to try next")
    print_text("  dags/orders.py         the DAG that just ran: change the source, the schema, the sinks")
    print_text("  docs/sources.md        the ways from a database and from files to a topic")
    print_text("  docs/sinks.md          what each sink promises, and how")
    print_text("  docs/testing.md        the same embedded servers in the tests of your own DAGs")
    print_text("  make bench             how fast it is here, side by side with plain Spark")
    print_text(f"\nNothing is left running. That took {time.monotonic() - begun:.0f} s.")
    return 0 if right else 1


def run_demo(dags: Path, count: int, temporary: Path) -> bool:
    lake, once = temporary / "lake", temporary / "fault"
    fault_variables = {faults.FAULT: ",".join(KILLS), faults.ONCE: str(once)}
    for point in KILLS:
        Path(f"{once}.{point}").touch()  # no fault in the first run
    print_headline("Starting a Kafka broker and a PostgreSQL server")
    with EmbeddedKafka() as kafka, EmbeddedPostgres() as postgres:
        with postgres.connect(autocommit=True) as connection:
            connection.execute(CREATE_TABLES)
        print_text(f"Kafka on {kafka.bootstrap_servers}, PostgreSQL on {postgres.host}:{postgres.port}")
        print_headline("Starting Airflow (api-server and scheduler): its database is created first, which takes a while")
        airflow = EmbeddedAirflow(
            dags,
            connections={
                "kafka_default": kafka.connection_json(),
                "spark_default": _make_spark_connection(fault_variables),
                "shop": postgres.connection_uri(),
                "warehouse": postgres.connection_uri(),
            },
            variables={"lake": str(lake)},
            # The Spark process that stays between the tasks is found here, and ended below.
            env={**fault_variables, "TMPDIR": str(temporary)},
            # The DAG file does not change.
            dag_processor=False,
        )
        with airflow, _end_spark_on_exit(temporary):
            print_text(f"Airflow on {airflow.url}")
            demo = Demo(kafka, postgres, airflow, lake, once)
            print_headline("First windows: shop database -> Kafka -> warehouse table and Parquet files")
            demo.sell(count)
            demo.run()
            demo.count()
            print_headline("Second windows, with a SIGKILL in each direction, in the middle of a transaction")
            demo.sell(count // 2)
            demo.kill_from_now_on()
            demo.run()
            demo.check_kills()
            print_text(
                "The killed attempts left nothing half done: the retries found the windows planned, and finished exactly them."
            )
            demo.count()
            return demo.right


def _make_spark_connection(variables: Mapping[str, str]) -> str:
    """Return the connection of a Spark process that all tasks share.

    :param variables: the environment variables of its Python workers.
    """
    archive = SparkClassArchive.find()
    extra = {
        "spark.driver.memory": "1g",
        "keep_alive": "5m",
        # An archive that exists makes the start faster. One that is made now would take a core from the demo, and outlive it.
        "class_archive": archive is not None and is_whole(archive.file),
        **{f"spark.executorEnv.{name}": value for name, value in variables.items()},
    }
    return json.dumps({"conn_type": "spark", "host": "local[2]", "extra": extra})


@contextmanager
def _end_spark_on_exit(temporary: Path) -> Iterator[None]:
    """End the Spark process of the tasks on leaving."""
    try:
        yield
    finally:
        for path in temporary.glob("airflow-kafka-spark-*/*.socket"):
            connection = connect(path)
            if connection is not None:
                pid = read_peer_credentials(connection)[0]
                connection.close()
                os.kill(pid, signal.SIGTERM)
                wait_until(lambda: not Path(f"/proc/{pid}").exists(), 30)  # noqa: B023 - called within the loop


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KafkaSparkError as error:
        sys.exit(f"\n{error}")
