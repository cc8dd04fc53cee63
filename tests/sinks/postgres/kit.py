"""Helpers for tests of the PostgreSQL sink: a schema for each test, and windows made row by row."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from airflow_kafka_spark.sinks.base import Rows, Shape
from airflow_kafka_spark.sinks.postgres.sink import PostgresSink
from airflow_kafka_spark.testing import EmbeddedPostgres
from airflow_kafka_spark.windows.model import Applied, OffsetRange, Split, Window
from tests.sinks.attempt import apply
from tests.sinks.feed import Job

DEAD = "<tombstone>"
"""A key of a row's mapping: the row is a tombstone."""


def dead(id: int) -> dict[str, Any]:
    """Return a tombstone of the key ``id``."""
    return {"id": id, DEAD: True}


EVENTS_OF_KEYS = [
    dead(0),  # deleted
    {"id": 1, "v": "new"},
    dead(1),  # updated, then deleted
    dead(2),
    {"id": 2, "v": "again"},  # deleted, then inserted
    {"id": 7, "v": "short-lived"},
    dead(7),  # inserted, then deleted: never there
    dead(99),  # never was there
    {"id": 3, "v": "a"},
    dead(3),
    {"id": 3, "v": "b"},
    {"id": 8, "v": "x"},
]
"""Behind rows with the keys 0 to 5 and the value "old", these leave 2: again, 3: b, 4: old, 5: old, 8: x."""


class Place:
    """A separate schema in the shared server, and an Airflow connection to it.

    :ivar schema: its name, which needs quotes.
    """

    def __init__(self, server: EmbeddedPostgres, name: str, uri: str | None = None) -> None:
        self.server = server
        self.schema = name
        self.conn_id = "pg_" + name.replace("-", "_")
        self.connection = server.connect(autocommit=True)
        self.connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
        self.connection.execute(sql.SQL("SET search_path = {}").format(sql.Identifier(name)))
        self.connect_with(uri or server.connection_uri())

    @property
    def quoted(self) -> str:
        """Return the schema's name as it is written in a statement."""
        doubled = self.schema.replace('"', '""')
        return f'"{doubled}"'

    def connect_with(self, value: str) -> None:
        """Change the Airflow connection."""
        os.environ[f"AIRFLOW_CONN_{self.conn_id.upper()}"] = value

    def connect_as(self, role: str, password: str) -> None:
        """Let the Airflow connection use a role."""
        self.connect_with(json.dumps({**json.loads(self.server.connection_json()), "login": role, "password": password}))

    @contextmanager
    def make_role(self, password: str) -> Iterator[str]:
        """Create a role without rights. Yield its name; drop it afterwards."""
        role = "reader_" + "".join(filter(str.isalnum, self.conn_id)).lower()
        self.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{password}'")
        try:
            yield role
        finally:
            self.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")

    @contextmanager
    def connect_as_new_role(self, password: str) -> Iterator[str]:
        """Create a role without rights, which the Airflow connection uses from now on. Yield its name; drop it afterwards."""
        with self.make_role(password) as role:
            self.connect_as(role, password)
            yield role

    def close(self) -> None:
        os.environ.pop(f"AIRFLOW_CONN_{self.conn_id.upper()}", None)
        self.connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(self.schema)))
        self.connection.close()

    def sink(self, table: str = "t", **options: Any) -> PostgresSink:
        quoted = table if table.startswith('"') else f'"{table}"'
        return PostgresSink(self.conn_id, f"{self.quoted}.{quoted}", **{"lock_timeout": 30, **options})

    def execute(self, *statements: str) -> None:
        """Unqualified names are those of this schema."""
        for statement in statements:
            self.connection.execute(statement.encode())

    def rows(self, query: str) -> list[tuple]:
        return self.connection.execute(query.encode()).fetchall()

    def one(self, query: str) -> Any:
        return self.rows(query)[0][0]

    def tables(self) -> list[str]:
        query = (
            "SELECT relname FROM pg_class WHERE relkind IN ('r', 'p') AND relnamespace = "
            "(SELECT oid FROM pg_namespace WHERE nspname = %s) ORDER BY relname"
        )
        return [row[0] for row in self.connection.execute(query, [self.schema])]


@contextmanager
def new_place(server: EmbeddedPostgres, name: str) -> Iterator[Place]:
    place = Place(server, name)
    try:
        yield place
    finally:
        place.close()


class Pipeline:
    """Windows of one pipeline, one after the other.

    :param schema: of its rows.
    :param tombstones: True if tombstones may come.
    """

    def __init__(self, schema: pa.Schema, name: str = "dag.task", *, tombstones: bool = False, topic: str = "orders") -> None:
        self.shape = Shape(name, schema, tombstones)
        self.topic = topic
        self.number = 0
        self.ends: dict[int, int] = {}

    def job(self, *partitions: Sequence[Mapping[str, Any]], batch_rows: int = 1000) -> Job:
        """Return the next window: for each partition its rows, in the order of their offsets."""
        self.number += 1
        splits, data = [], {}
        # A partition that was once there is in every later window.
        for index, lines in enumerate([*partitions, *[[]] * (len(self.ends) - len(partitions))]):
            start = self.ends.get(index, 0)
            self.ends[index] = start + len(lines)
            splits.append(Split(index, OffsetRange(self.topic, index, start, start + len(lines))))
            data[index] = [
                self._rows(lines[at : at + batch_rows], start + at) for at in range(0, len(lines), batch_rows)
            ]  # fmt: skip
        ranges = tuple(split.range for split in splits)
        window = Window(self.shape.pipeline, self.number, ranges, run="dag/run/task", planned_at="2026-11-20T00:00:00+00:00")
        return Job(window, tuple(splits), self.shape, data)

    def _rows(self, lines: Sequence[Mapping[str, Any]], first: int) -> Rows:
        schema = self.shape.schema
        batch = pa.RecordBatch.from_pylist([{n: line.get(n) for n in schema.names} for line in lines], schema)
        dead = [bool(line.get(DEAD)) for line in lines]
        return Rows(batch, pa.array(range(first, first + len(lines)), pa.int64()), pa.array(dead) if any(dead) else None)


def write(sink: PostgresSink, pipeline: Pipeline, *partitions: Sequence[Mapping[str, Any]]) -> Applied:
    """Apply the next window."""
    return apply(sink, pipeline.job(*partitions))


def names(problems: Sequence[Any]) -> set[str]:
    return {problem.where for problem in problems}


def sessions(connection: psycopg.Connection, application_name: str) -> list[int]:
    query = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE %s"
    return [row[0] for row in connection.execute(query, [f"{application_name}%"])]
