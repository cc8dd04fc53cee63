from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def spark() -> SparkSession:
    """The Spark of the process."""
    from tests.sources.contract import spark_session

    return spark_session()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An empty directory."""
    (tmp_path / "in").mkdir()
    return tmp_path / "in"
