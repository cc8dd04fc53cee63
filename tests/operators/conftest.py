from __future__ import annotations

import pytest

from tests.support.pipelines import pipeline


@pytest.fixture
def files(kafka, unique, tmp_path, request):
    """A pipeline from a topic into Parquet files."""
    with pipeline("files", kafka, lambda: request.getfixturevalue("postgres"), unique, tmp_path) as made:
        yield made


@pytest.fixture
def table(kafka, unique, tmp_path, request):
    """A pipeline from a topic into a PostgreSQL table."""
    with pipeline("postgres", kafka, lambda: request.getfixturevalue("postgres"), unique, tmp_path) as made:
        yield made
