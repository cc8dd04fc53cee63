from __future__ import annotations

from functools import partial

import pytest

from tests.support.pipelines import pipeline


@pytest.fixture
def partitions():
    """The number of partitions of a pipeline's topic: each costs a split of every window. Parametrize a test that needs more."""
    return 2


@pytest.fixture
def files(kafka, unique, tmp_path, request, partitions):
    """A pipeline from a topic into Parquet files."""
    postgres = partial(request.getfixturevalue, "postgres")
    with pipeline("files", kafka, postgres, unique, tmp_path, partitions=partitions) as made:
        yield made


@pytest.fixture
def table(kafka, unique, tmp_path, request, partitions):
    """A pipeline from a topic into a PostgreSQL table."""
    postgres = partial(request.getfixturevalue, "postgres")
    with pipeline("postgres", kafka, postgres, unique, tmp_path, partitions=partitions) as made:
        yield made
