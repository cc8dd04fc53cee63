"""The sinks that the contract suite runs over."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from airflow_kafka_spark.testing import EmbeddedPostgres
from tests.sinks.cases import Case, FilesCase, ManifestCase
from tests.sinks.feed import Feed
from tests.sinks.postgres.kit import Place, new_place
from tests.support.distribution import extended

MakeCase = Callable[[pytest.FixtureRequest, Path], AbstractContextManager[Case]]
Group = Literal["values", "memory", "mechanism", "kills"]


@dataclass(frozen=True)
class SinkUnderTest:
    """A sink and the tests that it runs: all tests, unless another entry covers some of them.

    :param make: makes the case.
    :param groups: ``values``: tests marked ``every_format``; ``memory``: tests marked ``every_writer``; ``kills``: tests marked
        ``faults``; ``mechanism``: all others.
    """

    make: MakeCase
    groups: tuple[Group, ...] = ("values", "memory", "mechanism", "kills")


def _files(format: str, **options: Any) -> MakeCase:
    return lambda request, tmp_path: nullcontext(FilesCase(tmp_path / "lake" / "orders", format, **options))


def _manifest(format: str, **options: Any) -> MakeCase:
    return lambda request, tmp_path: nullcontext(ManifestCase(tmp_path / "lake" / "orders", format, **options))


def _delta(**options: Any) -> MakeCase:
    def make(request: pytest.FixtureRequest, tmp_path: Path) -> AbstractContextManager[Case]:
        from tests.sinks.delta.cases import DeltaCase

        return nullcontext(DeltaCase(tmp_path / "lake" / "orders", **options))

    return make


def _iceberg(**options: Any) -> MakeCase:
    def make(request: pytest.FixtureRequest, tmp_path: Path) -> AbstractContextManager[Case]:
        from tests.sinks.iceberg.cases import IcebergCase

        return nullcontext(IcebergCase(tmp_path / "lake", **options))

    return make


def _postgres(**options: Any) -> MakeCase:
    def make(request: pytest.FixtureRequest, tmp_path: Path) -> AbstractContextManager[Case]:
        from tests.sinks.postgres.cases import postgres_case

        unique, postgres = request.getfixturevalue("unique"), request.getfixturevalue("postgres")
        return postgres_case(postgres, unique("orders").replace("-", "_"), **options)

    return make


# How files are published, and what a crash leaves, does not depend on their format. Two columns of partitions are fifteen files a
# split; one of them is enough for all that is not about values. How much a task holds in memory depends on its writer: with
# partitions it is that of files for all of them, upserts into lakes have one in common, and upserts into PostgreSQL are staged as
# appends are.
SINKS = {
    "parquet": SinkUnderTest(_files("parquet"), ("values", "memory", "kills")),
    "parquet, partitioned": SinkUnderTest(_files("parquet", partition_by=("flag", "day_of_week")), ("values", "memory")),
    "parquet, by flag": SinkUnderTest(_files("parquet", partition_by=("flag",)), ("mechanism",)),
    "json": SinkUnderTest(_files("json", compression="gzip"), ("values", "memory")),
    "csv": SinkUnderTest(_files("csv"), ("values", "memory")),
    "orc": SinkUnderTest(_files("orc"), ("values", "memory")),
    "manifest": SinkUnderTest(_manifest("parquet"), ("mechanism", "kills")),
    "manifest, partitioned": SinkUnderTest(_manifest("parquet", partition_by=("flag", "day_of_week")), ("values",)),
    "delta": SinkUnderTest(_delta(), ("values", "memory", "kills")),
    "delta, partitioned": SinkUnderTest(_delta(partition_by=("flag", "day_of_week")), ("values",)),
    "delta, by flag": SinkUnderTest(_delta(partition_by=("flag",)), ("mechanism",)),
    "delta upsert": SinkUnderTest(_delta(mode="upsert", key=("id",)), ("values", "memory")),
    "iceberg": SinkUnderTest(_iceberg(), ("values", "memory", "kills")),
    "iceberg, partitioned": SinkUnderTest(_iceberg(partition_by=("flag", "bucket(2, id)")), ("values",)),
    "iceberg, by flag": SinkUnderTest(_iceberg(partition_by=("flag",)), ("mechanism",)),
    "iceberg upsert": SinkUnderTest(_iceberg(mode="upsert", key=("id",)), ("values",)),
    "postgres append": SinkUnderTest(_postgres(mode="append")),
    # An upsert is another statement in the transaction of an append. postgres/test_faults.py kills and overtakes it.
    "postgres upsert": SinkUnderTest(_postgres(mode="upsert", key=("id",)), ("values",)),
    "postgres split": SinkUnderTest(_postgres(mode="append", atomic="split")),
}

WRITERS = ("parquet", "delta", "postgres append")
"""The sinks whose memory `make test` measures: one of each kind of writer."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        marked = metafunc.definition.get_closest_marker
        groups: dict[str, Group] = {"faults": "kills", "every_format": "values", "every_writer": "memory"}
        group = next((group for mark, group in groups.items() if marked(mark)), "mechanism")
        cases: list[Any] = [name for name, sink in SINKS.items() if group in sink.groups]
        if group == "memory":
            cases = [name if name in WRITERS else extended(name) for name in cases]
        metafunc.parametrize("case", cases, indirect=True)


@pytest.fixture
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    """An empty sink, and the facts that a test needs of it."""
    with SINKS[request.param].make(request, tmp_path) as found:
        yield found


@pytest.fixture
def feed(case: Case) -> Feed:
    """The pipeline that feeds it."""
    return Feed(case.schema)


@pytest.fixture
def place(postgres: EmbeddedPostgres, unique: Callable[[str], str]) -> Iterator[Place]:
    """A new schema in PostgreSQL, and an Airflow connection to it."""
    with new_place(postgres, unique('A "schema"')) as found:
        yield found


@pytest.fixture(params=["adbc", "psycopg"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The driver that tasks use for PostgreSQL: ADBC, or psycopg if ADBC is not installed."""
    if request.param == "psycopg":
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if "adbc" in name else find(name, *a))
    return request.param
