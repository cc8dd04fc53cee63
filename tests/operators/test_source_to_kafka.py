"""Windows of a table become records of a topic: counts, offsets, positions and places."""

from __future__ import annotations

import pytest

from airflow_kafka_spark.errors import KafkaSparkError
from tests.support.oracle import committed_records
from tests.support.shop import shop
from tests.support.timings import check_move


@pytest.fixture
def orders(kafka, postgres, unique, tmp_path):
    with shop(kafka, postgres, unique, tmp_path) as made:
        yield made


def test_every_row_becomes_one_record_and_the_report_holds_counts_and_first_and_last_offset_per_partition(orders):
    orders.sell(500)
    first = orders.run("run1")
    assert (first["records_read"], first["records_written"]) == (500, 500)
    assert orders.check() == 500
    found = {}
    for partition, offset, *_ in committed_records(orders.kafka.connection_extra(), orders.topic):
        found.setdefault(partition, []).append(offset)
    expected = [
        {"topic": orders.topic, "partition": p, "first": min(o), "last": max(o), "records": len(o)}
        for p, o in sorted(found.items())
    ]
    assert first["published"] == expected and len(expected) == 3
    check_move(first, "read", "decode", "write")
    again = orders.run("run1")
    assert again == first, "a cleared task publishes nothing and returns the same report"
    orders.sell(1)
    second = orders.run("run2")
    assert (second["window"], second["records_written"]) == ("0000000002", 1)
    third = orders.run("run3")
    assert third["records_written"] == 0
    assert orders.check() == 501


def test_a_split_whose_reading_breaks_off_in_the_jvm_is_not_published_in_part(orders):
    """Arrow takes a stream that breaks off for one that ends: what was handed over so far must not pass for the split."""
    orders.sell(70_000)
    with orders.postgres.connect(autocommit=True) as connection:
        connection.execute(f"UPDATE \"{orders.table}\" SET placed_at = 'infinity' WHERE id = 69990")
    whole = {"source": {"split_records": 100_000}, "read_with": "spark"}
    with pytest.raises(KafkaSparkError, match="placed_at"):
        orders.run(**whole)
    assert orders.records() == []
    with orders.postgres.connect(autocommit=True) as connection:
        connection.execute(f'UPDATE "{orders.table}" SET placed_at = now() WHERE id = 69990')
    assert orders.run(**whole)["records_written"] == 70_000
    assert orders.check() == 70_000
