"""PostgreSQL as a case of the contract suite."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.types as t
from psycopg import sql

from airflow_kafka_spark.sinks.base import Shape, Sink
from airflow_kafka_spark.sinks.postgres.sink import PostgresSink
from airflow_kafka_spark.testing import EmbeddedPostgres
from tests.sinks.cases import Case
from tests.sinks.feed import SCHEMA

RECORDS = ("airflow_windows", "airflow_window_splits")


class PostgresCase(Case):
    """A separate schema with a table that the sink creates."""

    schema = SCHEMA

    def __init__(self, server: EmbeddedPostgres, name: str, **options: Any) -> None:
        self.connection = server.connect(autocommit=True)
        self.name = name
        self.secrets = (server.password,)
        self.conn_id = f"pg_{name}"
        os.environ[self._variable] = server.connection_uri()
        self.connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
        # Plenty for locks that are held by accident: by a session that has been ended, and takes its time.
        self.sink = PostgresSink(self.conn_id, f"{name}.orders", auto_create=True, lock_timeout=30, **options)

    @property
    def _variable(self) -> str:
        return f"AIRFLOW_CONN_{self.conn_id.upper()}"

    def close(self) -> None:
        del os.environ[self._variable]
        self.connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(self.name)))
        self.connection.close()

    @property
    def impatient(self) -> Sink:
        return replace(self.sink, lock_timeout=2)

    def read(self, *only: str) -> list[dict[str, Any]]:
        # From any thread: psycopg lets one after the other use the connection.
        return read_table(self.connection, self.name, "orders", self.wanted(only))

    def everything(self) -> Any:
        return self.published(), self.tables()

    def published(self) -> Any:
        return {name: self._rows(name) for name in ("orders", *RECORDS)}

    def leftovers(self) -> list[str]:
        return [name for name in self.tables() if name not in ("orders", *RECORDS)]

    def age(self, days: float) -> None:
        for name in self.leftovers():
            if name.endswith("_r"):
                began = sql.SQL("COMMENT ON TABLE {}.{} IS {}").format(
                    sql.Identifier(self.name), sql.Identifier(name), sql.Literal(str(round(time.time() - days * 86400)))
                )
                self.connection.execute(began)

    def tables(self) -> list[str]:
        query = "SELECT relname FROM pg_class WHERE relnamespace = %s::regnamespace AND relkind IN ('r', 'p') ORDER BY relname"
        return [row[0] for row in self.connection.execute(query, [self.name])]

    def broken(self) -> tuple[Sink, Shape, set[str]]:
        self.connection.execute(
            sql.SQL("CREATE TABLE {}.broken (id text, required int NOT NULL)").format(sql.Identifier(self.name))
        )
        options = {"mode": "upsert", "key": ("nobody",), "merge": "soon"}
        shape = Shape("broken", pa.schema([("id", pa.int64()), ("extra", pa.string()), ("odd", pa.month_day_nano_interval())]))
        sink = PostgresSink(self.conn_id, f"{self.name}.broken", **options)
        columns = {f"sink.table column `{name}`" for name in ("id", "extra", "required", "odd")}
        return sink, shape, {"sink.key", "sink.merge"} | columns

    def _rows(self, table: str) -> list[str] | None:
        if table not in self.tables():
            return None
        query = sql.SQL("SELECT r::text FROM {} AS r ORDER BY 1").format(sql.Identifier(self.name, table))
        return [row[0] for row in self.connection.execute(query)]


@contextmanager
def postgres_case(server: EmbeddedPostgres, name: str, **options: Any) -> Iterator[PostgresCase]:
    case = PostgresCase(server, name, **options)
    try:
        yield case
    finally:
        case.close()


def read_table(connection: psycopg.Connection, schema_name: str, table: str, schema: pa.Schema) -> list[dict[str, Any]]:
    """Return every row, as values of the types of ``schema``."""
    exists = connection.execute("SELECT to_regclass(%s)", [f'"{schema_name}"."{table}"']).fetchone()[0]
    if exists is None:
        return []
    # `real` as text has only the digits that tell it from its neighbours: read it as what it is.
    columns = [
        sql.SQL("{}::float8").format(sql.Identifier(f.name)) if t.is_float32(f.type) else sql.Identifier(f.name) for f in schema
    ]
    query = sql.SQL("SELECT {} FROM {}").format(sql.SQL(", ").join(columns), sql.Identifier(schema_name, table))
    return [{f.name: _value(v, f.type) for f, v in zip(schema, row, strict=True)} for row in connection.execute(query)]


def _value(value: Any, kind: pa.DataType) -> Any:
    """JSON objects know neither the fields that are null nor an order of their names."""
    if value is None:
        return None
    if t.is_struct(kind):
        return {f.name: _value(value.get(f.name), f.type) for f in kind}
    if t.is_map(kind):
        return sorted((k, _value(v, kind.item_type)) for k, v in value.items())
    return value
