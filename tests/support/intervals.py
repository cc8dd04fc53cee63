"""A pipeline of data intervals under test: records with timestamps, runs with intervals, and the sink's rows of each interval."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

from airflow_kafka_spark.operators import KafkaToSinkOperator
from airflow_kafka_spark.sinks import PostgresSink
from airflow_kafka_spark.windows import interval_archive, interval_boundaries
from tests.support.clients import find_producer
from tests.support.dead_letters import is_bad
from tests.support.oracle import same_multiset
from tests.support.pipelines import Pipeline, make, order, row_of
from tests.support.runs import Victim

HOURS = 6
BEGIN = (datetime.now(timezone.utc) - timedelta(hours=12)).replace(minute=0, second=0, microsecond=0)


def hour(number: int, length: int = 1) -> tuple[datetime, datetime]:
    return BEGIN + timedelta(hours=number), BEGIN + timedelta(hours=number + length)


def facts(number: int, cleared: int = 0) -> dict[str, Any]:
    """Return the context of a task for an hour's run."""
    return {"interval": hour(number), "max_tries": cleared}


EARLY = {
    (interval_archive, "ARCHIVE_AFTER"): 5,
    (interval_boundaries, "ARCHIVE_AFTER"): 8,
    (interval_boundaries, "UNARCHIVED"): 4,
}
"""Limits with which old intervals and boundaries go into archives after a few of them."""


@contextmanager
def usual_limits() -> Iterator[None]:
    """Restore at the end the limits of archives, which :func:`make_archiving` lowers."""
    before = {limit: getattr(*limit) for limit in EARLY}
    try:
        yield
    finally:
        for limit, number in before.items():
            setattr(*limit, number)


def make_archiving(kind: str, place: str, **options: Any) -> KafkaToSinkOperator:
    """Return the operator, and lower the limits of archives in this process."""
    for limit, number in EARLY.items():
        setattr(*limit, number)
    return make(kind, place, **options)


class Intervals:
    """A pipeline whose records have timestamps, and the sink's rows of each interval."""

    def __init__(self, pipeline: Pipeline, table: bool) -> None:
        self.pipeline, self.table, self.sent = pipeline, table, 0
        pipeline.options |= {"window": "interval", "grace": 0}
        if table:
            with pipeline.postgres.connect(autocommit=True) as connection:
                connection.execute(f'ALTER TABLE "{pipeline.place}" ADD COLUMN "window" text')
            pipeline.options["sink"] = PostgresSink(conn_id="warehouse", table=pipeline.place, window_column="window")

    def produce(self, *minutes: float, partition: int | None = None) -> None:
        """Produce one record for each number, with a timestamp that many minutes after the beginning."""
        producer = find_producer(self.pipeline.kafka, self.pipeline.topic)
        for minute in minutes:
            at = round((BEGIN + timedelta(minutes=minute)).timestamp() * 1000)
            place = self.sent % self.pipeline.partitions if partition is None else partition
            producer.produce(self.pipeline.topic, order(self.sent), str(self.sent).encode(), place, timestamp=at)
            self.sent += 1
        producer.flush(60)

    def fill(self) -> None:
        """Produce records of each hour, with a late and an early record among them."""
        for number in range(HOURS + 1):
            self.produce(*(number * 60 + minute for minute in (0, 10, 59.99, 30, 20, 45, max(0, 5 - number * 20))))
        # So that every partition has a record behind the last interval.
        for partition in range(self.pipeline.partitions):
            self.produce((HOURS + 1) * 60, partition=partition)

    def run(self, number: int, *, cleared: int = 0, **options: Any) -> dict[str, Any]:
        """Run one task attempt at an hour in this process, and return its report.

        :param cleared: how often the task was cleared.
        """
        return self.pipeline.run(f"run-{number}", facts=facts(number, cleared), **options)

    def victim(self, number: int, *, fault: str, cleared: int = 0) -> Victim:
        """Run an attempt in a separate process, which dies at ``fault``."""
        return self.pipeline.victim(f"run-{number}", fault=fault, facts=facts(number, cleared))

    def rows(self) -> dict[str, list]:
        """Return the rows by interval, under the sink's names of the intervals."""
        found: dict[str, list] = {}
        for name, row in self.marked_rows():
            found.setdefault(name.removeprefix(self.pipeline.name + ".")[:33], []).append(row)
        return found

    def marked_rows(self) -> list[tuple[str, tuple]]:
        """Return each row with the name of its window."""
        if self.table:
            with self.pipeline.postgres.connect(autocommit=True) as connection:
                query = 'SELECT "window", id, customer, amount::text, extract(epoch FROM placed_at)::bigint FROM "{}"'
                return [(row[0], tuple(row[1:])) for row in connection.execute(query.format(self.pipeline.place)).fetchall()]
        import pyarrow.dataset as ds

        table = ds.dataset(self.pipeline.place, format="parquet", partitioning="hive").to_table()
        columns = [table[name].to_pylist() for name in ("window", "id", "customer", "amount", "placed_at")]
        return [(w, (i, c, str(a), int(p.timestamp()))) for w, i, c, a, p in zip(*columns, strict=True)]

    def check(self, reports: list[dict[str, Any]]) -> int:
        """Check that each interval's rows are the topic's records between its boundaries, and that no record is missing."""
        by_place = {(p, o): row_of(v) for p, o, _, v in self.pipeline.events() if not is_bad(v)}
        rows, compared = self.rows(), 0
        for report in reports:
            ranges = {r["partition"]: range(r["start"], r["end"]) for r in report["ranges"]}
            expected = [row for (p, o), row in by_place.items() if o in ranges.get(p, ())]
            start, end = (datetime.fromisoformat(text.replace("Z", "+00:00")) for text in report["interval"])
            name = f"{start:%Y%m%dT%H%M%SZ}-{end:%Y%m%dT%H%M%SZ}"
            if expected:
                compared += same_multiset(expected, rows.pop(name))
        assert not rows, f"rows of no interval: {sorted(rows)}"
        in_order = sorted(reports, key=lambda r: r["interval"])
        for one, other in zip(in_order, in_order[1:], strict=False):
            before = ends(one)
            assert all(r["start"] == before.get(r["partition"], 0) for r in other["ranges"])
        return compared


def ends(report: dict[str, Any]) -> dict[int, int]:
    """Return the ends of a window, by partition."""
    return {r["partition"]: r["end"] for r in report["ranges"]}
