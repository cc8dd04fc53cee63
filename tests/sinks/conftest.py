"""The sinks that the contract suite runs over."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from airflow_kafka_spark.testing import EmbeddedPostgres
from tests.sinks.cases import Case, FilesCase
from tests.sinks.feed import Feed
from tests.sinks.postgres.kit import Place, new_place

FILES = {
    "parquet": {},
    "parquet, partitioned": {"partition_by": ("flag", "day_of_week")},
    "json": {"compression": "gzip"},
    "csv": {},
    "orc": {},
}
POSTGRES = {
    "postgres append": {"mode": "append"},
    "postgres upsert": {"mode": "upsert", "key": ("id",)},
    "postgres split": {"mode": "append", "atomic": "split"},
}
# How files are published, and what a crash leaves, does not depend on their format.
MECHANISMS = ["parquet, partitioned", *POSTGRES]
FAULT_CASES = ["parquet", *POSTGRES]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        marked = metafunc.definition.get_closest_marker
        cases = FAULT_CASES if marked("faults") else [*FILES, *POSTGRES] if marked("every_format") else MECHANISMS
        metafunc.parametrize("case", cases, indirect=True)


@pytest.fixture
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    """A sink with nothing in it, and what a test must know of it."""
    if request.param in FILES:
        options = dict(FILES[request.param])
        yield FilesCase(tmp_path / "lake" / "orders", request.param.split(",")[0], **options)
        return
    from tests.sinks.postgres.cases import postgres_case

    unique, postgres = request.getfixturevalue("unique"), request.getfixturevalue("postgres")
    with postgres_case(postgres, unique("orders").replace("-", "_"), **POSTGRES[request.param]) as found:
        yield found


@pytest.fixture
def feed(case: Case) -> Feed:
    """The pipeline that feeds it."""
    return Feed(case.schema)


@pytest.fixture
def place(postgres: EmbeddedPostgres, unique: Callable[[str], str]) -> Iterator[Place]:
    """A schema of its own in PostgreSQL, and an Airflow connection that leads to it."""
    with new_place(postgres, unique('A "schema"')) as found:
        yield found


@pytest.fixture(params=["adbc", "psycopg"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The tasks' way into PostgreSQL: ADBC, and psycopg where that is not installed."""
    if request.param == "psycopg":
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if "adbc" in name else find(name, *a))
    return request.param
