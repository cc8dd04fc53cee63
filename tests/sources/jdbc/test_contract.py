"""JdbcSource, as all sources of rows: the contract, by a cursor and in bulk."""

from __future__ import annotations

from datetime import timezone
from typing import Any

import pytest
from pyspark.sql import Row

from tests.sinks.postgres.kit import Place
from tests.sources.contract import ROWS, RowSourceCase, RowSourceContract
from tests.sources.jdbc.kit import source_of

KINDS: dict[str, dict[str, Any]] = {
    "incrementing": {"cursor": "id"},
    "timestamp": {"timestamp_column": "at"},
    "bulk": {},
    "pages": {"split_by": "pages"},
}
COLUMNS = ("shop", "id", "at", "note")


class JdbcCase(RowSourceCase):
    """A table whose rows come in the order of its composite primary key, of its id, and of its timestamp, which seven share."""

    def __init__(self, place: Place, kind: str) -> None:
        self.place = place
        self.incremental = kind not in ("bulk", "pages")
        place.execute("CREATE TABLE t (shop text, id bigint, at timestamptz NOT NULL, note text, PRIMARY KEY (shop, id))")
        options = {**KINDS[kind], "include_columns": COLUMNS, "split_records": 60}
        self.source = source_of(place, **options)
        self.limited = source_of(place, max_records=ROWS // 3, **options)
        self.next = 0

    def add(self, rows: int) -> list[tuple[Any, ...]]:
        values = (
            "chr(65 + n / 100) || ' é''s', n, timestamptz '2026-01-01 00:00:00.000001+00' + n / 7 * interval '1 s', "
            "CASE WHEN n % 5 > 0 THEN 'note ' || n END"
        )
        series = f"generate_series({self.next}, {self.next + rows - 1}) AS n"
        self.place.execute(f"INSERT INTO t SELECT {values} FROM {series}")
        self.next += rows
        return self.place.rows(f"SELECT shop, id, at, note FROM t WHERE id >= {self.next - rows}")

    def identity(self, row: Row) -> tuple[Any, ...]:
        return row["shop"], row["id"], row["at"].astimezone(timezone.utc), row["note"]


class TestJdbcSource(RowSourceContract):
    @pytest.fixture(params=KINDS)
    def case(self, request, place):
        return JdbcCase(place, request.param)
