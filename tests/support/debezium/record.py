"""Record the output of Debezium's engine for the tables and changes of this package.

    python -m tests.support.debezium.record [postgres|mariadb|mysql]

Maven downloads the engine. For ``mysql``, the environment variable ``MYSQLD`` names the server (see
tests/support/mariadb.py). Each file ``<database>.json`` has, per set of options, the records in their order. Times and positions
in them are those of the run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from airflow_kafka_spark.testing import EmbeddedPostgres
from tests.support.debezium import mariadb, postgres
from tests.support.mariadb import EmbeddedMariaDB, is_mysql

HERE = Path(__file__).parent
JARS = Path(os.environ.get("DEBEZIUM_JARS", HERE.parents[2] / "build" / "debezium"))

OPTIONS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "connect": {
        "decimal.handling.mode": "string",
        "time.precision.mode": "connect",
        "skipped.operations": "none",
        "tombstones.on.delete": "false",
        "provide.transaction.metadata": "true",
        "bigint.unsigned.handling.mode": "precise",
    },
    "adaptive": {"decimal.handling.mode": "double", "time.precision.mode": "adaptive_time_microseconds"},
    "rows": {
        "transforms": "unwrap",
        "transforms.unwrap.type": "io.debezium.transforms.ExtractNewRecordState",
        "transforms.unwrap.delete.tombstone.handling.mode": "rewrite-with-tombstone",
        "transforms.unwrap.add.fields": "op,table:of,source.ts_ms",
    },
}
"""The sets of options with which the engine is run. Those of the first one are Debezium's defaults."""

POSTGRES_SETTINGS = {"wal_level": "logical", "max_replication_slots": 10}
MARIADB_LOG = ("--log-bin=bin", "--server-id=7", "--binlog-format=ROW", "--binlog-row-metadata=FULL")


def download() -> None:
    """Download the engine's jars unless they are there."""
    if not JARS.exists():
        copy = ["mvn", "-q", "-f", str(HERE / "pom.xml"), "dependency:copy-dependencies", f"-DoutputDirectory={JARS}"]
        subprocess.run(copy, check=True)


class Engine:
    """A running engine.

    :param properties: its options.
    """

    def __init__(self, properties: Mapping[str, str]) -> None:
        self._properties = {
            "name": "engine",
            "topic.prefix": "shop",
            "offset.storage": "org.apache.kafka.connect.storage.MemoryOffsetBackingStore",
            "offset.flush.interval.ms": "1000",
            "snapshot.mode": "initial",
            **properties,
        }

    def __enter__(self) -> Engine:
        self._directory = tempfile.TemporaryDirectory()
        file = Path(self._directory.name) / "engine.properties"
        file.write_text("".join(f"{name}={value}\n" for name, value in self._properties.items()), encoding="utf-8")
        self.log = Path(self._directory.name) / "log"
        java = ["java", "-Xmx1g", "-Dfile.encoding=UTF-8", "-cp", f"{JARS}/*", str(HERE / "Engine.java"), str(file)]
        with self.log.open("w") as log:
            self._process = subprocess.Popen(java, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._directory.cleanup()

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the decoded records as they arrive."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            record = json.loads(line)
            yield {**record, **{part: record[part] and json.loads(record[part]) for part in ("key", "value")}}
        raise RuntimeError(self.log.read_text()[-3000:])


def recorded(engine: Engine, change: Any) -> list[dict[str, Any]]:
    """Return the records after the snapshot, up to the record of the table ``finish``.

    :param change: makes the changes.
    """
    found: list[dict[str, Any]] = []
    changed = False
    for record in engine.records():
        payload = (record["value"] or {}).get("payload") or {}
        op = payload.get("op", payload.get("__op"))
        if op == "r" and not changed:
            changed = True
            change()
        if op not in ("r", None) or record["value"] is None or "status" in payload:
            found.append(record)
        if record["topic"].endswith(".finish") and op == "c":
            if payload.get("transaction") is None:
                return found
        elif payload.get("status") == "END" and "finish" in json.dumps(payload):
            return found
    raise AssertionError


def compact(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the records, with each schema only once."""
    schemas: list[Any] = []
    out = []
    for record in records:
        made = {part: record[part] for part in ("topic", "key", "value")}
        for part in ("key", "value"):
            if made[part] is not None:
                if made[part]["schema"] not in schemas:
                    schemas.append(made[part]["schema"])
                made[part] = {"schema": schemas.index(made[part]["schema"]), "payload": made[part]["payload"]}
        out.append(made)
    return {"schemas": schemas, "records": out}


@contextmanager
def postgres_database(server: EmbeddedPostgres, name: str) -> Iterator[Any]:
    """Create a new database with the tables.

    :yield: a connection to it.
    """
    import psycopg

    with server.connect(autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}".encode())
    with psycopg.connect(server.dsn.rsplit("/", 1)[0] + f"/{name}", autocommit=True) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        for statement in postgres.TABLES:
            connection.execute(statement.encode())
        yield connection


def change_postgres(connection: Any) -> None:
    """Make the changes."""
    for transaction in postgres.CHANGES:
        with connection.transaction():
            for statement in transaction:
                connection.execute(statement.encode())


def record_postgres(options: Mapping[str, str]) -> dict[str, Any]:
    """Return the engine's output for PostgreSQL."""
    with EmbeddedPostgres(settings=POSTGRES_SETTINGS) as server, postgres_database(server, "shop") as connection:
        connection.execute("INSERT INTO finish VALUES (0)")
        connection.execute("CREATE PUBLICATION everything FOR ALL TABLES")
        properties = {
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "plugin.name": "pgoutput",
            "publication.name": "everything",
            "slot.name": "engine",
            "database.hostname": server.host,
            "database.port": str(server.port),
            "database.user": server.user,
            "database.password": server.password,
            "database.dbname": "shop",
            "message.key.columns": ";".join(f"public.{name}:{','.join(key)}" for name, key in postgres.KEYS.items()),
            **options,
        }
        with Engine(properties) as engine:
            return compact(recorded(engine, lambda: change_postgres(connection)))


def make_mariadb(connection: Any) -> None:
    """Make the database and its tables."""
    with connection.cursor() as cursor:
        for statement in ("DROP DATABASE IF EXISTS shop", "CREATE DATABASE shop CHARACTER SET utf8mb4", "USE shop"):
            cursor.execute(statement)
        cursor.execute("SET time_zone = '+00:00'")
        for statement in mariadb.TABLES_OF_MYSQL if is_mysql() else mariadb.TABLES:
            cursor.execute(statement)


def change_mariadb(connection: Any) -> None:
    """Make the changes."""
    with connection.cursor() as cursor:
        for transaction in mariadb.CHANGES_OF_MYSQL if is_mysql() else mariadb.CHANGES:
            connection.begin()
            for statement in transaction:
                cursor.execute(statement)
            connection.commit()


def record_mariadb(options: Mapping[str, str]) -> dict[str, Any]:
    """Return the engine's output for MariaDB, or MySQL."""
    with EmbeddedMariaDB(*MARIADB_LOG) as server, server.connect() as connection:
        make_mariadb(connection)
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO finish VALUES (0)")
        connector = "mysql.MySqlConnector" if is_mysql() else "mariadb.MariaDbConnector"
        properties = {
            "connector.class": f"io.debezium.connector.{connector}",
            **({"driver.allowPublicKeyRetrieval": "true"} if is_mysql() else {}),
            "schema.history.internal": "io.debezium.relational.history.MemorySchemaHistory",
            "include.schema.changes": "false",
            "database.server.id": "99",
            "database.hostname": server.host,
            "database.port": str(server.port),
            "database.user": server.user,
            "database.password": server.password,
            "database.include.list": "shop",
            "message.key.columns": ";".join(f"shop.{name}:{','.join(key)}" for name, key in mariadb.KEYS.items()),
            **options,
        }
        with Engine(properties) as engine:
            return compact(recorded(engine, lambda: change_mariadb(connection)))


def main() -> None:
    """Write the files."""
    download()
    makers = {"postgres": record_postgres, "mysql" if is_mysql() else "mariadb": record_mariadb}
    for name in sys.argv[1:] or makers:
        found = {}
        for options, properties in OPTIONS.items():
            found[options] = makers[name](properties)
            print(name, options, len(found[options]["records"]), "records", flush=True)
        text = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
        (HERE / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
