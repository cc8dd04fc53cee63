"""A table of each kind of lake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.sinks.delta.cases import DeltaCase
from tests.sinks.iceberg.cases import IcebergCase

KINDS = {"delta": DeltaCase, "iceberg": IcebergCase}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def new_lake(kind: str, tmp_path: Path) -> Callable[..., DeltaCase | IcebergCase]:
    """Return a table for rows of a schema: ``new_lake(schema, **options of the sink)``."""

    def make(schema: pa.Schema, **options: Any) -> DeltaCase | IcebergCase:
        found = KINDS[kind](tmp_path / "lake" / "orders", **options)
        found.schema = schema
        return found

    return make
