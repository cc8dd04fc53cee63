"""The Spark session of the tests that compare formats with Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> SparkSession:
    """Return the process's session; its time zone is UTC."""
    from tests.sources.contract import spark_session

    session = spark_session()
    assert session.conf.get("spark.sql.session.timeZone") == "UTC"
    return session
