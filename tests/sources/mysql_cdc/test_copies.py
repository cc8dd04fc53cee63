"""Copies of a table in lakes, while its rows and columns change. See :mod:`tests.sources.copies`."""

from __future__ import annotations

import pytest

from tests.sources.copies import MINUTES, SNAPSHOT, InMariaDB, compare_copies
from tests.sources.mysql_cdc.kit import Binlog
from tests.sources.postgres_cdc.kit import Windows


@pytest.mark.extended
@pytest.mark.timeout(MINUTES * 60 + 600)
@pytest.mark.flaky(reruns=0)
def test_copies_in_lakes_equal_a_table_whose_rows_and_columns_change(shop: Binlog, tmp_path):
    """Rows are read in chunks while others change; columns are added and dropped between windows, and before chunks are read."""
    table = InMariaDB(log=shop)
    table.create()
    table.windows = Windows(shop.source(tables=["t"], **SNAPSHOT))
    assert compare_copies(table, tmp_path)
