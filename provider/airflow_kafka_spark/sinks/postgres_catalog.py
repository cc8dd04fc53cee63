"""What the server's catalog says about a table, its columns and the rights on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from airflow_kafka_spark.hooks.postgres import Name, literal, rows
from airflow_kafka_spark.sinks.postgres_types import TargetColumn

if TYPE_CHECKING:
    import psycopg


@dataclass(frozen=True)
class Table:
    """A relation as the catalog describes it.

    :param kind: ``r`` table, ``p`` partitioned table, ``v`` view, ``m`` materialized view, ``f`` foreign table.
    :param logged: False for one that a crash of the server empties.
    :param hides_rows: whether a row-level policy applies to this role.
    :param filters: whether a trigger may change or drop rows before they are inserted.
    :param rights: what this role may do of SELECT, INSERT, UPDATE, DELETE.
    :param columns: in their order.
    :param unique: the column sets that a unique index lets ON CONFLICT find: valid, not partial, not deferrable, no expressions.
    :param deferrable: those of deferrable constraints, which ON CONFLICT stumbles over even beside a good index.
    :param owned: whether this role may do what only its owner may, as adding columns.
    """

    name: Name
    kind: str
    logged: bool
    hides_rows: bool
    filters: bool
    rights: frozenset[str]
    columns: Mapping[str, TargetColumn] = field(default_factory=dict)
    unique: tuple[frozenset[str], ...] = ()
    deferrable: tuple[frozenset[str], ...] = ()
    owned: bool = True


@dataclass(frozen=True)
class Place:
    """What holds for the whole session.

    :param version: ``server_version_num``, 160014.
    :param standby: whether the server only follows another one.
    :param read_only: whether transactions are read-only by default.
    """

    version: int
    release: str
    role: str
    standby: bool
    read_only: bool
    may_create_temporary: bool


def read_place(connection: psycopg.Connection) -> Place:
    found = rows(
        connection,
        "SELECT current_setting('server_version_num')::int, current_setting('server_version'), current_user::text, "
        "pg_is_in_recovery(), current_setting('transaction_read_only') = 'on', "
        "has_database_privilege(current_database(), 'TEMPORARY')",
    )
    return Place(*found[0])


def schema_rights(connection: psycopg.Connection, schema: str) -> frozenset[str] | None:
    """What this role may do in a schema of USAGE and CREATE; None: there is no such schema."""
    found = rows(
        connection,
        "SELECT has_schema_privilege(oid, 'USAGE'), has_schema_privilege(oid, 'CREATE') "
        f"FROM pg_catalog.pg_namespace WHERE nspname = {literal(schema)}",
    )
    if not found:
        return None
    return frozenset(right for right, has in zip(("USAGE", "CREATE"), found[0], strict=True) if has)


_RELATION = """
SELECT c.oid::bigint, c.relkind::text, c.relpersistence = 'p', c.relkind IN ('r', 'p') AND row_security_active(c.oid),
    EXISTS (SELECT FROM pg_catalog.pg_trigger g WHERE g.tgrelid = c.oid AND NOT g.tgisinternal AND g.tgtype & 7 = 7),
    array_remove(ARRAY[
        CASE WHEN has_table_privilege(c.oid, 'SELECT') THEN 'SELECT' END,
        CASE WHEN has_table_privilege(c.oid, 'INSERT') THEN 'INSERT' END,
        CASE WHEN has_table_privilege(c.oid, 'UPDATE') THEN 'UPDATE' END,
        CASE WHEN has_table_privilege(c.oid, 'DELETE') THEN 'DELETE' END], NULL),
    pg_has_role(c.relowner, 'USAGE')
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = {schema} AND c.relname = {table} AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
"""

# format_type(oid, -1), not NULL: that would call char(5) "character", which as a cast means char(1).
_COLUMNS = """
WITH RECURSIVE base AS (
    SELECT attnum, atttypid AS oid, atttypmod AS modifier
    FROM pg_catalog.pg_attribute WHERE attrelid = {oid} AND attnum > 0 AND NOT attisdropped
    UNION ALL
    SELECT b.attnum, t.typbasetype, t.typtypmod
    FROM base b JOIN pg_catalog.pg_type t ON t.oid = b.oid WHERE t.typtype = 'd')
SELECT a.attname, format_type(a.atttypid, a.atttypmod), format_type(t.oid, -1), t.typcategory::text,
    CASE WHEN 1700 IN (t.oid, t.typelem) AND b.modifier >= 0 THEN (((b.modifier - 4) & 2047) # 1024) - 1024 END,
    format_type(t.oid, b.modifier),
    coalesce(format_type(e.oid, -1), ''), coalesce(e.typcategory::text, ''),
    a.atttypid <> t.oid,
    CASE WHEN a.attcollation NOT IN (0, t.typcollation) THEN
        (SELECT quote_ident(n.nspname) || '.' || quote_ident(l.collname)
         FROM pg_catalog.pg_collation l JOIN pg_catalog.pg_namespace n ON n.oid = l.collnamespace WHERE l.oid = a.attcollation)
    ELSE '' END,
    a.attnotnull AND NOT a.atthasdef AND a.attidentity = '',
    a.attgenerated <> '' OR a.attidentity = 'a'
FROM base b JOIN pg_catalog.pg_type t ON t.oid = b.oid AND t.typtype <> 'd'
JOIN pg_catalog.pg_attribute a ON a.attrelid = {oid} AND a.attnum = b.attnum
LEFT JOIN pg_catalog.pg_type e ON e.oid = t.typelem AND t.typcategory = 'A'
ORDER BY a.attnum
"""

_UNIQUE = """
SELECT (SELECT array_agg(a.attname::text) FROM unnest(i.indkey::int2[]) WITH ORDINALITY AS k(attnum, place)
        JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum WHERE k.place <= i.indnkeyatts),
    i.indimmediate
FROM pg_catalog.pg_index i
WHERE i.indrelid = {oid} AND i.indisunique AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
"""


def read_table(connection: psycopg.Connection, name: Name) -> Table | None:
    """None: there is no such relation."""
    found = rows(connection, _RELATION.format(schema=literal(name.schema), table=literal(name.table)))
    if not found:
        return None
    oid, kind, logged, hides_rows, filters, rights, owned = found[0]
    columns = [TargetColumn(*row) for row in rows(connection, _COLUMNS.replace("{oid}", str(oid)))]
    indexes = [(frozenset(names), immediate) for names, immediate in rows(connection, _UNIQUE.replace("{oid}", str(oid)))]
    unique, deferrable = (tuple(names for names, immediate in indexes if immediate is wanted) for wanted in (True, False))
    named = {c.name: c for c in columns}
    return Table(name, kind, logged, hides_rows, filters, frozenset(rights), named, unique, deferrable, owned)
