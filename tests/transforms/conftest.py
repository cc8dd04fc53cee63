"""One Spark session for the tests of transforms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession


@pytest.fixture(scope="package")
def spark() -> Iterator[SparkSession]:
    """A local session whose time zone is UTC, as the road's is; one that is there already is shared, and left as it was."""
    active = SparkSession.getActiveSession()
    settings = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2", "spark.driver.host": "127.0.0.1"}
    session = active or SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    before = session.conf.get("spark.sql.session.timeZone")
    session.conf.set("spark.sql.session.timeZone", "UTC")
    yield session
    if active is None:
        session.stop()
    else:
        session.conf.set("spark.sql.session.timeZone", before)
