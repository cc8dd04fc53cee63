"""Reading the server's catalog: a table, its columns and indexes, and the rights of the connection's role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from airflow_kafka_spark.hooks.postgres import Name, literal, rows

if TYPE_CHECKING:
    import psycopg


@dataclass(frozen=True)
class TargetColumn:
    """A column of the target table, as the catalog describes it.

    :param type: the type as users write it, ``character varying(5)``.
    :param base: the type without domain and modifier, as a cast takes it: ``character varying``.
    :param category: PostgreSQL's category of ``base``: ``S`` string, ``A`` array, ``E`` enum, ``U`` user-defined, ...
    :param scale: digits after the point of a ``numeric`` that limits them, or of the elements of an array.
    :param precise: the type with its modifier but without its domain: ``numeric(12,2)``.
    :param element: the type of an array's elements; else empty.
    :param element_category: the category of ``element``.
    :param domain: True if the type is a domain over ``base``.
    :param collation: an explicit collation, quoted; empty for the type's own.
    :param required: True if it takes no NULL and has no default.
    :param generated: True if its values are computed (``GENERATED ALWAYS``).
    """

    name: str
    type: str
    base: str
    category: str
    scale: int | None = None
    precise: str = ""
    element: str = ""
    element_category: str = ""
    domain: bool = False
    collation: str = ""
    required: bool = False
    generated: bool = False


@dataclass(frozen=True)
class Table:
    """A relation as the catalog describes it.

    :param kind: ``r`` table, ``p`` partitioned table, ``v`` view, ``m`` materialized view, ``f`` foreign table.
    :param logged: False for one that a crash of the server empties.
    :param hides_rows: True if a row-level policy applies to this role.
    :param filters: True if a trigger may change or drop rows before they are inserted.
    :param rights: those of SELECT, INSERT, UPDATE and DELETE that this role has.
    :param columns: the columns by name, in their order.
    :param unique: the column sets of unique indexes that ON CONFLICT can use: valid, not partial, not deferrable, no expressions.
    :param deferrable: the column sets of deferrable constraints, with which ON CONFLICT fails even beside a usable index.
    :param owned: True if this role may do what only the owner may, such as adding columns.
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
class ServerFacts:
    """Properties of the server and of the session's role.

    :param version: ``server_version_num``, for instance 160014.
    :param release: the version as users know it, ``16.14``.
    :param role: the session's role.
    :param standby: True if the server is a standby.
    :param read_only: True if transactions are read-only by default.
    :param may_create_temporary: True if the role may create temporary tables.
    """

    version: int
    release: str
    role: str
    standby: bool
    read_only: bool
    may_create_temporary: bool


def read_server_facts(connection: psycopg.Connection) -> ServerFacts:
    """Return the properties of the server and of the session's role."""
    found = rows(
        connection,
        "SELECT current_setting('server_version_num')::int, current_setting('server_version'), current_user::text, "
        "pg_is_in_recovery(), current_setting('transaction_read_only') = 'on', "
        "has_database_privilege(current_database(), 'TEMPORARY')",
    )
    return ServerFacts(*found[0])


def schema_rights(connection: psycopg.Connection, schema: str) -> frozenset[str] | None:
    """Return those of USAGE and CREATE that this role has in a schema, or None if there is no such schema."""
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
    """Return a relation as the catalog describes it, or None if there is none of this name."""
    found = rows(connection, _RELATION.format(schema=literal(name.schema), table=literal(name.table)))
    if not found:
        return None
    oid, kind, logged, hides_rows, filters, rights, owned = found[0]
    columns = [TargetColumn(*row) for row in rows(connection, _COLUMNS.replace("{oid}", str(oid)))]
    indexes = [(frozenset(names), immediate) for names, immediate in rows(connection, _UNIQUE.replace("{oid}", str(oid)))]
    unique, deferrable = (tuple(names for names, immediate in indexes if immediate is wanted) for wanted in (True, False))
    named = {c.name: c for c in columns}
    return Table(name, kind, logged, hides_rows, filters, frozenset(rights), named, unique, deferrable, owned)
