"""From stages into the target: the statements, as pure functions of names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from airflow_kafka_spark.hooks.postgres import Name, literal, quote
from airflow_kafka_spark.sinks.postgres_sql import OFFSET_COLUMNS


@dataclass(frozen=True)
class Column:
    """A column on its way from a stage into the target.

    :param name: its name in both.
    :param before: what stands before a reference to it, to make it the target's type; empty where assignment does that.
    :param after: what stands behind it.
    :param key_after: the same where it is compared as a key, so that rows equal in the target are equal here.
    """

    name: str
    before: str = ""
    after: str = ""
    key_after: str = ""

    @property
    def value(self) -> str:
        return f"{self.before}s.{quote(self.name)}{self.after}"

    @property
    def key_value(self) -> str:
        return f"s.{quote(self.name)}{self.key_after}"


@dataclass(frozen=True)
class Stage:
    """A table that holds one split's rows.

    :param table: as it stands in a statement.
    :param order: the place of its partition among the window's partitions.
    :param span: only the rows of these offsets, the second one excluded; None: all.
    """

    table: str
    topic: str
    partition: int
    order: int = 0
    span: tuple[int, int] | None = None


@dataclass(frozen=True)
class Merge:
    """How rows get from stages into the target.

    :param target: the table.
    :param columns: what the rows have.
    :param key: the key's columns; empty when rows are only added.
    :param offset: the stage's hidden column of offsets, if it has one.
    :param tombstone: the stage's hidden column that marks deletes, if it has one.
    :param filled: which of :data:`~airflow_kafka_spark.sinks.postgres_sql.OFFSET_COLUMNS` the sink fills.
    :param guarded: whether the target has all of them, so that an older offset never overwrites a newer one.
    :param again: whether rows of these very offsets may be there already, and are written again.
    :param window: a column and what it holds in every row: the window's name.
    """

    target: Name
    columns: tuple[Column, ...]
    key: tuple[str, ...] = ()
    offset: str | None = None
    tombstone: str | None = None
    filled: tuple[str, ...] = ()
    guarded: bool = False
    again: bool = False
    window: tuple[str, str] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The target's columns that get a value."""
        return (*(c.name for c in self.columns), *self.filled, *(self.window or ())[:1])

    def insert(self, stage: Stage) -> str:
        """Add all rows of one stage."""
        return f"INSERT INTO {self.target} ({_list(self.names)}) SELECT {', '.join(self._values())} FROM {self._rows([stage])}"

    def upsert(self, stages: Sequence[Stage]) -> str:
        """Insert or update the last row of each key, the highest offset of the last partition."""
        return f"{self._put(f'({self._last(stages)}) AS last')}"

    def upsert_and_delete(self, stages: Sequence[Stage]) -> str:
        """The same, where the last event of a key may be its deletion. Selects how many rows were put and how many removed.

        One statement: the keys of its two halves differ, so that neither touches a row of the other.
        """
        assert self.tombstone
        dead = f"last.{quote(self.tombstone)}"
        same = " AND ".join(f"t.{quote(k)} = last.{quote(k)}" for k in self.key)
        guard = self._guard("last", " AND ")
        return (
            f"WITH last AS MATERIALIZED ({self._last(stages)}), "
            f"gone AS (DELETE FROM {self.target} AS t USING last WHERE {dead} AND {same}{guard} RETURNING 1), "
            f"put AS ({self._put('last', f' WHERE NOT {dead}')} RETURNING 1) "
            "SELECT (SELECT count(*) FROM put), (SELECT count(*) FROM gone)"
        )

    def _values(self) -> list[str]:
        named = [f"{literal(self.window[1])}::text"] if self.window else []
        return [*(c.value for c in self.columns), *(f"s.{quote(name)}" for name in self.filled), *named]

    def _rows(self, stages: Sequence[Stage]) -> str:
        """The rows of all stages, with where they came from: ``s``."""
        parts = []
        for stage in stages:
            offset = f"r.{quote(self.offset)}" if self.offset else "NULL::bigint"
            known = dict(zip(OFFSET_COLUMNS, (f"{literal(stage.topic)}::text", f"{stage.partition}", offset), strict=True))
            origin = [f"{known[name]} AS {quote(name)}" for name in self.filled]
            within = f" WHERE {offset} >= {stage.span[0]} AND {offset} < {stage.span[1]}" if stage.span else ""
            values = ", ".join([*origin, f"{stage.order} AS {quote(_ORDER)}", "r.*"])
            parts.append(f"SELECT {values} FROM {stage.table} AS r{within}")
        return f"({' UNION ALL '.join(parts)}) AS s"

    def _last(self, stages: Sequence[Stage]) -> str:
        assert self.offset
        by_name = {c.name: c for c in self.columns}
        keys = ", ".join(by_name[k].key_value for k in self.key)
        # A key is compared as the target compares it, and handed on like that.
        values = [f"{c.key_value if c.name in self.key else c.value} AS {quote(c.name)}" for c in self.columns]
        values += [f"s.{quote(name)}" for name in self.filled]
        values += [f"{literal(self.window[1])}::text AS {quote(self.window[0])}"] if self.window else []
        values += [f"s.{quote(self.tombstone)}"] if self.tombstone else []
        return (
            f"SELECT DISTINCT ON ({keys}) {', '.join(values)} FROM {self._rows(stages)} "
            f"ORDER BY {keys}, s.{quote(_ORDER)} DESC, s.{quote(self.offset)} DESC"
        )

    def _put(self, source: str, where: str = "") -> str:
        columns = ", ".join(f"last.{quote(name)}" for name in self.names)
        changed = [name for name in self.names if name not in self.key]
        if changed:
            assignments = ", ".join(f"{quote(name)} = excluded.{quote(name)}" for name in changed)
            action = f"DO UPDATE SET {assignments}{self._guard('excluded', ' WHERE ')}"
        else:
            action = "DO NOTHING"
        return (
            f"INSERT INTO {self.target} AS t ({_list(self.names)}) SELECT {columns} FROM {source}{where} "
            f"ON CONFLICT ({_list(self.key)}) {action}"
        )

    def _guard(self, new: str, word: str) -> str:
        if not self.guarded:
            return ""
        topic, partition, offset = map(quote, OFFSET_COLUMNS)
        return (
            f"{word}((t.{topic}, t.{partition}) IS DISTINCT FROM ({new}.{topic}, {new}.{partition}) "
            f"OR t.{offset} {'<=' if self.again else '<'} {new}.{offset})"
        )


_ORDER = "__airflow_partition_order"


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(quote, names))
