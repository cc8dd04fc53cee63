from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from airflow_kafka_spark.sources.jdbc.mysql import DRIVER as MYSQL_DRIVER
from airflow_kafka_spark.sources.jdbc.postgres import DRIVER as POSTGRES_DRIVER
from airflow_kafka_spark.testing import EmbeddedPostgres
from tests.sinks.postgres.kit import Place, new_place
from tests.sources.jdbc.spark_process import JdbcSpark
from tests.support import mariadb


@pytest.fixture
def place(postgres: EmbeddedPostgres, unique: Callable[[str], str]) -> Iterator[Place]:
    """A new schema in PostgreSQL, and an Airflow connection to it."""
    with new_place(postgres, unique('A "schema"')) as found:
        yield found


@pytest.fixture(scope="session")
def jdbc_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JdbcSpark]:
    """A Spark for the tests of all databases. Its JVM has another time zone than its session."""
    drivers = [POSTGRES_DRIVER, *([] if mariadb.missing() else [MYSQL_DRIVER])]
    with JdbcSpark(tmp_path_factory.mktemp("spark"), drivers) as started:
        yield started
