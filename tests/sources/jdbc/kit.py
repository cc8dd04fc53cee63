"""Shared code of the tests of JdbcSource: tables of any key, windows read on the driver with the statements that Spark would
run, and every type by its value."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

from hypothesis import strategies as st

from airflow_kafka_spark.sources.base import MAX_SPLITS, FrozenWindow
from airflow_kafka_spark.sources.jdbc.source import JdbcSource
from airflow_kafka_spark.sources.jdbc.windows import find_relation, list_selected_columns, make_split_selects
from tests.sinks.postgres.kit import Place
from tests.sources.jdbc.spark_process import Answer


def source_of(place: Place, table: str = "t", **options: Any) -> JdbcSource:
    quoted = table if table.startswith('"') else f'"{table}"'
    return JdbcSource(place.conn_id, f"{place.quoted}.{quoted}", **options)


# --- windows ------------------------------------------------------------------------------------------------------------


def through_json(frozen: FrozenWindow) -> FrozenWindow:
    """Return a value as it is read from the ledger."""
    position, splits = json.loads(json.dumps([dict(frozen.position), [dict(split) for split in frozen.splits]]))
    return FrozenWindow(tuple(splits), position, frozen.rows, frozen.remaining)


def read(source: JdbcSource, splits: Sequence[Mapping[str, Any]]) -> list[list[tuple]]:
    """The rows of each split."""
    with source.find_database().open_session("reading") as session:
        relation = find_relation(source, session)
        selected = list_selected_columns(source, relation)
        columns = ", ".join(f"c{n}" for n in range(len(selected)))
        parts = make_split_selects(session, relation, selected, splits)
        return [session.fetch_rows(f"SELECT {columns} FROM {select} WHERE {condition}") for select, condition in parts]


def windows(source: JdbcSource, position: Mapping[str, Any] | None = None, most: int = 1000) -> Iterator[FrozenWindow]:
    """Return window after window until there is nothing left; for bulk, to the end of the pass."""
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


def every_row(source: JdbcSource) -> tuple[list[tuple], list[FrozenWindow]]:
    """Return the rows of all windows together. Each window is checked against its own counts."""
    rows, seen = [], []
    for frozen in windows(source):
        seen.append(frozen)
        parts = read(source, frozen.splits)
        count = sum(map(len, parts))
        assert frozen.rows in (None, count)
        rows += [row for part in parts for row in part]
    return rows, seen


def same(found: Sequence[tuple], expected: Sequence[tuple]) -> None:
    """Check that both have the same items, each equally often."""
    assert Counter(map(repr, found)) == Counter(map(repr, expected))


# --- any key ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeyedTable:
    """A table whose rows are cut by its key.

    :param columns: as DDL.
    :param rows: some of their values come often.
    :param key: the columns' names.
    :param index: their quoted names, as in the definition of an index.
    """

    columns: str
    rows: list[tuple]
    key: list[str]
    index: str


@st.composite
def keyed_tables(
    draw: st.DrawFn, kinds: Mapping[str, st.SearchStrategy[Any]], quote: Callable[[str], str], never_null: tuple[str, ...] = ()
) -> KeyedTable:
    """Keys of one to three columns, some of which take NULL.

    :param kinds: types, and the values of each.
    :param quote: how an identifier is written; the names hold what has to be quoted, of PostgreSQL and of MariaDB.
    :param never_null: types that begin so take none.
    """
    chosen = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=3))
    nullable = [draw(st.booleans()) and not kind.startswith(never_null) for kind in chosen]
    pools = [draw(st.lists(kinds[kind], min_size=1, max_size=draw(st.sampled_from([1, 2, 40])))) for kind in chosen]
    cells = [st.sampled_from([*pool, *([None] if empty else [])]) for pool, empty in zip(pools, nullable, strict=True)]
    names = [f'k `{n}"' for n in range(len(chosen))]
    ddl = [
        f"{quote(name)} {kind}{'' if empty else ' NOT NULL'}" for name, kind, empty in zip(names, chosen, nullable, strict=True)
    ]
    rows = draw(st.lists(st.tuples(*cells), max_size=60))
    return KeyedTable(", ".join(ddl), rows, names, ", ".join(map(quote, names)))


# --- every type ---------------------------------------------------------------------------------------------------------

Types = Sequence[tuple[str, str, Sequence[tuple[Any, Any]]]]
"""Of each type: as it is declared, what Spark makes of it, and per value what is inserted and what arrives."""


def type_names(types: Types) -> list[str]:
    """Return a column for each type, with names that have to be quoted."""
    return [f"{kind}: é`\"\\'{n}" for n, (kind, _, _) in enumerate(types)]


def depth(types: Types) -> int:
    """Return the number of rows that hold all values; one further row holds only NULL."""
    return max(len(values) for _, _, values in types)


def check_types(answer: Answer, types: Types) -> None:
    """Row by row the values of each type, then NULL, as they were to arrive; ``id`` numbers the rows."""
    names, rows = type_names(types), range(depth(types) + 1)
    assert not answer.error
    assert answer.types == {"id": "int"} | {name: spark for name, (_, spark, _) in zip(names, types, strict=True)}
    found = [row for part in answer.parts for row in part]
    assert [row["id"] for row in found] == list(rows)
    compared = 0
    for name, (_, _, values) in zip(names, types, strict=True):
        for number in rows:
            expected = values[number][1] if number < len(values) else None
            assert same_value(found[number][name], expected), f"{name}: {found[number][name]!r}, not {expected!r}"
            compared += 1
    assert compared == len(types) * len(rows) > 0


def same_value(found: Any, expected: Any) -> bool:
    """Return True if two values are equal and of one type."""
    if isinstance(expected, float) and isnan(expected):
        return isinstance(found, float) and isnan(found)
    return type(found) is type(expected) and found == expected
