"""A table against its copy: equal ones of all types, and rows that are lost, doubled or changed, each found and named."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_kafka_spark.errors import SinkDiffers, ValidationError
from airflow_kafka_spark.operators import VerifyOperator
from airflow_kafka_spark.sinks import PostgresSink
from airflow_kafka_spark.sources import JdbcSource
from tests.sinks.postgres.kit import Place
from tests.support.runs import context
from tests.verification.conftest import MARIA


def verify(place: Place, store: Any = None, **options: Any) -> dict[str, Any]:
    given = {"source": JdbcSource(place.conn_id, f"{place.quoted}.s"), "sink": place.sink("t"), **options}
    operator = VerifyOperator(task_id="verify", **given)
    return operator.execute({**context("run1"), "task_state_store": store})


def named(found: dict[str, Any] | SinkDiffers) -> list[dict[str, Any]]:
    differences = found["differences"] if isinstance(found, dict) else [d.to_json() for d in found.differences]
    return sorted(differences, key=str)


@pytest.fixture
def orders(place: Place) -> Place:
    """A table ``s`` of 1,000 rows, and its copy ``t``."""
    columns = "(id bigint PRIMARY KEY, amount numeric(12, 2), note text)"
    for table in ("s", "t"):
        place.connection.execute(f"CREATE TABLE {table} {columns}".encode())
        place.connection.execute(f"INSERT INTO {table} SELECT n, n / 4.0, 'note ' || n FROM generate_series(1, 1000) n".encode())
    return place


def test_equal_tables_are_equal(orders: Place) -> None:
    found = verify(orders, chunk_rows=100)
    assert found["equal"] and (found["source_rows"], found["sink_rows"], found["method"]) == (1000, 1000, "ranges")
    assert found["chunks"] == 10 and not found["differences"]


def test_rows_that_are_missing_extra_or_different_are_counted_and_named(orders: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airflow_kafka_spark.verification.ranges.READ_ROWS", 4)
    for statement in (
        "DELETE FROM t WHERE id IN (1, 500)",
        "INSERT INTO t VALUES (0, 0, 'x'), (2000, 0, 'x')",
        "UPDATE t SET amount = amount + 0.01 WHERE id = 250",
        "UPDATE t SET note = NULL, amount = 1 WHERE id = 1000",
        "UPDATE s SET note = '' WHERE id = 77",
        "UPDATE t SET note = NULL WHERE id = 77",
    ):
        orders.connection.execute(statement.encode())
    with pytest.raises(SinkDiffers, match="2 missing in the sink, 2 only in the sink, 3 different") as raised:
        verify(orders, chunk_rows=100)
    assert named(raised.value) == [
        {"kind": "different", "key": {"id": 1000}, "columns": ["amount", "note"]},
        {"kind": "different", "key": {"id": 250}, "columns": ["amount"]},
        {"kind": "different", "key": {"id": 77}, "columns": ["note"]},
        {"kind": "extra", "key": {"id": 0}},
        {"kind": "extra", "key": {"id": 2000}},
        {"kind": "missing", "key": {"id": 1}},
        {"kind": "missing", "key": {"id": 500}},
    ]
    found = verify(orders, chunk_rows=100, max_keys=2, on_difference="warn")
    assert (found["missing"], found["extra"], found["different"], len(found["differences"])) == (2, 2, 3, 2)
