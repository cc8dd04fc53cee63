from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from airflow_kafka_spark.testing import EmbeddedPostgres
from tests.sinks.postgres_kit import Place, new_place


@pytest.fixture
def place(postgres: EmbeddedPostgres, unique: Callable[[str], str]) -> Iterator[Place]:
    """A schema of its own in PostgreSQL, and an Airflow connection that leads to it."""
    with new_place(postgres, unique('A "schema"')) as found:
        yield found
