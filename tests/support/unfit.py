"""A shop with orders that do not fit the schema of their topic, and the check that each is a record or a dead letter once."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Collection
from decimal import Decimal
from typing import Any

import fastavro

from airflow_kafka_spark.formats import Avro
from tests.support.dead_letters import decode_headers, letters
from tests.support.oracle import committed_records, same_multiset
from tests.support.reader import same_log
from tests.support.shop import Shop

AMOUNT = {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}
VALUE = {"type": "record", "name": "shop.Order", "fields": [
    {"name": "id", "type": "long"},
    {"name": "customer", "type": "string"},
    {"name": "amount", "type": AMOUNT},
    {"name": "placed_at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
]}  # fmt: skip
KEY = "int"

Row = tuple[int, Any, str, str]
Read = Callable[[bytes], Any]


def avro(schema: Any, **options: Any) -> Avro:
    return Avro(json.dumps(schema), **options)


def plain(schema: Any) -> Read:
    """Return a decoder of values without a header."""
    parsed = fastavro.parse_schema(schema)
    return lambda value: fastavro.schemaless_reader(io.BytesIO(value), parsed)


def spoil(orders: Shop, *, null: int, large: int, key: int) -> set[int]:
    """Insert three orders that do not fit: a null that is not allowed, a decimal and a key that are too large. Return the ids."""
    with orders.postgres.connect(autocommit=True) as connection:
        for change, number in (("customer = NULL", null), ("amount = 1234567.89", large), (f"id = {1 << 40} + id", key)):
            connection.execute(f'UPDATE "{orders.table}" SET {change} WHERE id = {number}')
    return {null, large, (1 << 40) + key}


def check_sorted_out(orders: Shop, dead: str, bad: Collection[int], read: Read, read_key: Read) -> tuple[int, int]:
    """Check that every order is on the topic or a dead letter that shows it, exactly once, also for the background reader, and
    that none of the pipeline's transactions is open. Return the numbers of both.

    :param bad: the ids of the orders that do not fit.
    """
    orders.wait_settled(also=(dead,))
    there = committed_records(orders.kafka.connection_extra(), orders.topic)
    found = []
    for _, _, key, value in there:
        assert key is not None and value is not None
        row = read(value)
        assert read_key(key) == row["id"]
        found.append((row["id"], row["customer"], str(row["amount"]), f"{row['placed_at']:%Y-%m-%dT%H:%M:%S.%fZ}"))
    good = same_multiset([row for row in orders.rows() if row[0] not in bad], found)
    if orders.reader is not None:
        assert same_log(there, orders.reader.caught_up()) == good
    shown: list[Row] = []
    for key, value, _, headers in letters(orders.kafka.connection_extra(), dead):
        assert value is not None
        row = json.loads(value, parse_float=Decimal)
        shown.append((row["id"], row["customer"], str(row["amount"]), row["placed_at"]))
        if decode_headers(headers)["stage"] == "VALUE_CONVERTER":
            assert key is not None and read_key(key) == row["id"]
        else:
            assert key is None
    return good, same_multiset([row for row in orders.rows() if row[0] in bad], shown)
