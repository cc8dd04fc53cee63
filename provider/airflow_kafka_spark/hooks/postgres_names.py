"""Names and values in PostgreSQL's statements, and the tables that names stand for.

Names are taken exactly as they are and always quoted, values are always literals: what looks like SQL in either is just a name or
just a value.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from airflow_kafka_spark.hooks.postgres import rows

if TYPE_CHECKING:
    import psycopg

NAME_BYTES = 63
"""The longest name PostgreSQL keeps whole."""


def quote(name: str) -> str:
    """``name`` as an identifier, whatever it holds.

    :raises ValueError: it is empty or holds a NUL, which no name in PostgreSQL can.
    """
    if not name or "\x00" in name:
        raise ValueError(f"Not a name in PostgreSQL: {name!r}")
    return '"' + name.replace('"', '""') + '"'


def literal(value: str | int | bool | None) -> str:
    """``value`` as a literal, read the same with ``standard_conforming_strings`` on and off."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if "\x00" in value:
        raise ValueError("A text in PostgreSQL cannot hold a NUL")
    escaped = value.replace("'", "''")
    return f" E'{escaped.replace(chr(92), chr(92) * 2)}'" if "\\" in escaped else f"'{escaped}'"


class Name(NamedTuple):
    """A table: ``str()`` is what stands in a statement."""

    schema: str
    table: str

    def __str__(self) -> str:
        return f"{quote(self.schema)}.{quote(self.table)}"


def parse_name(text: str) -> tuple[str | None, str]:
    """``table`` or ``schema.table``, each part as it is written (no folding to lower case) or in double quotes.

    :return: schema, None where none is given, and table.
    :raises ValueError: it is neither.
    """
    part = r'"(?:[^"\x00]|"")+"|[^".\x00]+'
    found = re.fullmatch(rf"\s*(?:({part})\s*\.\s*)?({part})\s*", text)
    if not found:
        raise ValueError(f"`{text}` is not the name of a table")
    schema, table = (_unquote(p) if p else None for p in found.groups())
    if not table or schema == "":
        raise ValueError(f"`{text}` is not the name of a table")
    return schema, table


def _unquote(part: str) -> str:
    part = part.strip()
    return part[1:-1].replace('""', '"') if part.startswith('"') else part


def resolve(connection: psycopg.Connection, schema: str | None, table: str) -> Name:
    """The full name of a table: without a schema the one the server would take, and for a new one the current schema."""
    if schema is not None:
        return Name(schema, table)
    found = rows(
        connection,
        "SELECT n.nspname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
        f"WHERE c.oid = to_regclass({literal(quote(table))})",
    )
    current = found or rows(connection, "SELECT coalesce(current_schema(), 'public')")
    return Name(current[0][0], table)


def tables_alike(connection: psycopg.Connection, name: Name) -> list[Name]:
    """Tables whose names differ from ``name`` in upper and lower case only."""
    found = rows(
        connection,
        "SELECT n.nspname, c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
        f"WHERE lower(n.nspname) = lower({literal(name.schema)}) AND lower(c.relname) = lower({literal(name.table)}) "
        "AND c.relkind IN ('r', 'p') ORDER BY 1, 2",
    )
    return [Name(*row) for row in found]
