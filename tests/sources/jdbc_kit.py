"""What the tests of JdbcSource have in common: windows read on the driver, with the statements that Spark would run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from airflow_kafka_spark.sources.base import MAX_SPLITS, Frozen
from airflow_kafka_spark.sources.jdbc import JdbcSource
from airflow_kafka_spark.sources.jdbc_read import predicates, statement
from airflow_kafka_spark.sources.jdbc_window import find, selected


def through_json(frozen: Frozen) -> Frozen:
    """As it comes back from the ledger."""
    position, splits = json.loads(json.dumps([dict(frozen.position), [dict(split) for split in frozen.splits]]))
    return Frozen(tuple(splits), position, frozen.rows, frozen.remaining)


def read(source: JdbcSource, splits: Sequence[Mapping[str, Any]]) -> list[list[tuple]]:
    """The rows of each split."""
    with source.database().session("reading") as session:
        relation = find(source, session)
        order = tuple(splits[0]["order"]) if splits else ()
        select = statement(session, relation, selected(source, relation), order)
        columns = ", ".join(f"c{n}" for n in range(len(selected(source, relation))))
        conditions = predicates(session, relation, order, splits)
        return [session.rows(f"SELECT {columns} FROM {select} WHERE {condition}") for condition in conditions]


def windows(source: JdbcSource, position: Mapping[str, Any] | None = None, most: int = 1000) -> Iterator[Frozen]:
    """Windows one after the other, until there is nothing left: for bulk, to the end of the pass."""
    for _ in range(most):
        frozen = through_json(source.freeze(position))
        position = frozen.position
        assert len(frozen.splits) <= MAX_SPLITS
        if not frozen.splits:
            assert not frozen.remaining
            return
        yield frozen
        if source.effective_mode == "bulk" and not frozen.remaining:
            return
    raise AssertionError(f"there is no end after {most} windows")


def every_row(source: JdbcSource) -> tuple[list[tuple], list[Frozen]]:
    """The rows of all windows together, each window checked against what it says of itself."""
    rows, seen = [], []
    for frozen in windows(source):
        seen.append(frozen)
        parts = read(source, frozen.splits)
        count = sum(map(len, parts))
        assert frozen.rows in (None, count)
        rows += [row for part in parts for row in part]
    return rows, seen


def same(found: Sequence[tuple], expected: Sequence[tuple]) -> None:
    """Each as often in one as in the other."""
    assert Counter(map(repr, found)) == Counter(map(repr, expected))
