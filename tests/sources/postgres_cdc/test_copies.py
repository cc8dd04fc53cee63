"""Copies of a table in lakes, while its rows and columns change. See :mod:`tests.sources.copies`."""

from __future__ import annotations

import pytest

from tests.sources.copies import MINUTES, SNAPSHOT, InPostgres, compare_copies
from tests.sources.postgres_cdc.kit import Windows, log_of


@pytest.mark.extended
@pytest.mark.timeout(MINUTES * 60 + 600)
@pytest.mark.flaky(reruns=0)
def test_copies_in_lakes_equal_a_table_whose_rows_and_columns_change(place, tmp_path):
    """Rows are read in chunks while others change; columns are added and dropped between windows, and before chunks are read."""
    table = InPostgres(place=place)
    table.create()
    with log_of(place, "t") as log:
        table.windows = Windows(log.source(**SNAPSHOT))
        assert compare_copies(table, tmp_path)
