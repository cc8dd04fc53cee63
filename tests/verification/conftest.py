from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from airflow_kafka_spark.testing import EmbeddedPostgres
from tests.sinks.postgres.kit import Place, new_place
from tests.support.mariadb import EmbeddedMariaDB, is_mysql, missing

MARIA = "maria_verify"


@pytest.fixture
def place(postgres: EmbeddedPostgres, unique: Callable[[str], str]) -> Iterator[Place]:
    """A new schema in PostgreSQL, and an Airflow connection to it."""
    with new_place(postgres, unique("verify")) as found:
        yield found


@pytest.fixture(scope="session")
def mariadb() -> Iterator[EmbeddedMariaDB]:
    """A MariaDB whose connection is ``maria_verify``."""
    pytest.importorskip("pymysql")
    if missing():
        pytest.skip(missing())
    with EmbeddedMariaDB() as started:
        os.environ[f"AIRFLOW_CONN_{MARIA.upper()}"] = started.connection_uri()
        yield started
        del os.environ[f"AIRFLOW_CONN_{MARIA.upper()}"]


@pytest.fixture
def maria(mariadb: EmbeddedMariaDB) -> Iterator[Any]:
    """A session of MariaDB, in an empty database."""
    connection = mariadb.connect()
    with connection.cursor() as cursor:
        for statement in ("DROP DATABASE shop", "CREATE DATABASE shop CHARACTER SET utf8mb4", "USE shop"):
            cursor.execute(statement)
        cursor.execute("SET time_zone = '+00:00'")
        if is_mysql():  # for MD5
            cursor.execute("SELECT count(*) FROM mysql.component WHERE component_urn LIKE '%classic_hashing'")
            if not cursor.fetchone()[0]:
                cursor.execute("INSTALL COMPONENT 'file://component_classic_hashing'")
        yield cursor
    connection.close()
