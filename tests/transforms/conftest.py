"""One Spark session for the tests of transforms, and its results for all their cases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tests.sources.contract import INTERPRETED, applied, spark_session
from tests.transforms.cases import SETTINGS, Outcome, run


@pytest.fixture(scope="package")
def spark() -> Iterator[SparkSession]:
    """Yield the process's session, with the time zone that the operators give theirs."""
    session = spark_session()
    with applied(session, SETTINGS | INTERPRETED):
        yield session


@pytest.fixture(scope="package")
def outcomes(spark: SparkSession) -> dict[str, Outcome]:
    """Return the outcomes of the cases of all files here, by name."""
    from tests.transforms import test_chain, test_connect_examples

    found = run(spark, [*test_chain.CASES, *test_connect_examples.CASES])
    assert len(found) == len(test_chain.CASES) + len(test_connect_examples.CASES)
    return found
