"""Checks of a PostgresCdcSource that need its server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import KafkaSparkError, Problem, Unchecked
from airflow_kafka_spark.errors.base import quote_names
from airflow_kafka_spark.hooks.databases import OLDEST_POSTGRES, SEES_LAG, Name, PostgresServer, choose_action, quote
from airflow_kafka_spark.sources.cdc.options import find_shared_topic_problems, parse_table_name
from airflow_kafka_spark.sources.postgres_cdc.options import DEFAULT_SCHEMA, PostgresCdcOptions
from airflow_kafka_spark.sources.postgres_cdc.tasks.session import SlotServer, describe_foreign_use, make_session_name

if TYPE_CHECKING:
    import psycopg

WAITING = tuple(Unchecked(f"source.{name}", "source.conn_id") for name in ("slot", "publication", "tables"))
"""The checks that need the server."""

_OF_TABLES = ("source.publication", "source.tables", "source.message_key_columns")
"""The options that name tables."""

_IDENTIFYING = (
    "(SELECT array_agg(a.attname::text) FROM pg_catalog.pg_index i JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid "
    "AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]) WHERE i.indrelid = c.oid AND i.indimmediate "
    "AND CASE c.relreplident WHEN 'i' THEN i.indisreplident ELSE i.indisprimary END)"
)
"""The columns of the replica identity of a table ``c``; those of the primary key if the identity is the whole row.

A deferrable key does not count, because rows may exchange its values within a transaction.
"""

_KEY_TYPES = (
    "SELECT a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod), coalesce(nullif(t.typbasetype, 0), t.oid)::bigint, "
    "CASE WHEN t.typbasetype <> 0 THEN t.typtypmod ELSE a.atttypmod END FROM pg_catalog.pg_attribute a "
    "JOIN pg_catalog.pg_type t ON t.oid = a.atttypid "
    "JOIN pg_catalog.pg_class c ON c.oid = a.attrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
    "WHERE n.nspname = %s AND c.relname = %s AND a.attname = ANY (%s::text[]) ORDER BY a.attnum"
)
"""The types of columns; of a domain, its base type."""

_LOSSY = {
    1186: "its months are written as days",
    1266: "it is written in UTC",
    1562: "its zeros at the end are not written",
}
"""Types (interval, timetz, varbit) whose values may differ and have the same form, as with Debezium."""

_PARTITIONS = (
    f"SELECT n.nspname, c.relname, {_IDENTIFYING} FROM pg_catalog.pg_partition_tree(pg_catalog.format('%%I.%%I', %s::text, "
    "%s::text)::regclass) AS t JOIN pg_catalog.pg_class c ON c.oid = t.relid "
    "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
    "WHERE t.isleaf AND c.relkind = 'r' AND c.relreplident <> 'f' ORDER BY 1, 2"
)
"""Partitions whose replica identity is not the whole row."""

_TABLES = (
    "SELECT n.nspname, c.relname, c.relkind::text, c.relreplident::text, "
    "(SELECT array_agg(a.attname::text) FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 "
    f"AND NOT a.attisdropped), {_IDENTIFYING}, "
    "(SELECT array_agg(a.attname::text) FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attgenerated <> ''), "
    "(SELECT min(k.conname::text) FROM pg_catalog.pg_constraint k JOIN pg_catalog.pg_index i ON i.indrelid = c.oid "
    "AND i.indisreplident AND k.conkey[1] = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]) "
    "WHERE k.conrelid = c.oid AND k.contype = 'n' AND NOT k.convalidated AND c.relreplident = 'i') "
    "FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
    "WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND (n.nspname, c.relname) IN "
    "(SELECT * FROM unnest(%s::text[], %s::text[]))"
)


@dataclass(frozen=True)
class PostgresLogValidation:
    """Checks the options of a source against its server.

    :param options: the source's options.
    :param server: host, database and login.
    :param wrong: the options that are already known to be invalid, as users know them. Checks that depend on them are left out.
    """

    options: PostgresCdcOptions
    server: PostgresServer
    wrong: frozenset[str] = frozenset()

    def find_problems(self) -> list[Problem]:
        """Return all problems that would prevent windows from being frozen and read."""
        slot = SlotServer(self.server, self.options.slot)
        try:
            with slot.open_session("checking the server") as connection:
                if found := list(_find_release_problems(connection)):
                    return found
                found += self._find_server_problems(connection)
                found += self._find_slot_problems(connection, slot) if "source.slot" not in self.wrong else ()
                if cause := next((where for where in _OF_TABLES if where in self.wrong), ""):
                    return [*found, *(Unchecked(where, cause) for where in _OF_TABLES[:2] if where not in self.wrong)]
                found += self._find_publication_problems(connection)
                if not any(problem.where in ("source.publication", "source.tables") for problem in found):
                    found += self._find_missing_rights(connection)
                return found
        except KafkaSparkError as error:
            action = choose_action(error.found, "Correct the connection, or see to the server")
            problem = Problem.of("source.conn_id", error, action)
            return [problem, *(waiting for waiting in WAITING if waiting.where not in self.wrong)]

    # --- the server ---

    def _find_server_problems(self, connection: psycopg.Connection[Any]) -> Iterator[Problem]:
        level = _read_setting(connection, "wal_level")
        if level != "logical":
            action = "Set `wal_level = logical` and restart the server"
            yield Problem("source.conn_id", f"`wal_level` of the server is `{level}`; expected `logical`", action)
        if _fetch_one(connection, "SELECT pg_catalog.pg_is_in_recovery()"):
            yield Problem("source.conn_id", "the server is a standby; expected a primary", "Connect to the primary")
        rights = "SELECT rolreplication OR rolsuper FROM pg_catalog.pg_roles WHERE rolname = current_user"
        if not _fetch_one(connection, rights):
            user = _read_role(connection)
            found = f"role `{user}` may not use replication slots"
            yield Problem("source.conn_id", found, f"ALTER ROLE {quote(user)} REPLICATION")
        if self.options.max_replica_lag is not None and not _fetch_one(connection, SEES_LAG):
            user, found = _read_role(connection), "the role may not see the lag of replicas"
            yield Problem("source.max_replica_lag", found, f"GRANT pg_read_all_stats TO {quote(user)}")

    # --- slot ---

    def _find_slot_problems(self, connection: psycopg.Connection[Any], slot: SlotServer) -> Iterator[Problem]:
        state, name = slot.read_state(connection), self.options.slot
        if state is None:
            most = int(_read_setting(connection, "max_replication_slots"))
            used = _fetch_one(connection, "SELECT count(*) FROM pg_catalog.pg_replication_slots")
            if used >= most:
                action = "Raise `max_replication_slots`, or drop an unused slot"
                yield Problem("source.slot", f"`{name}` is missing, and all {most} slots of the server are taken", action)
        elif state.plugin != "pgoutput":
            kind = f"decodes with `{state.plugin}`" if state.plugin else "is a physical slot"
            yield Problem("source.slot", f"`{name}` {kind}; expected `pgoutput`", "Name another slot; a missing one is created")
        elif state.database != connection.info.dbname:
            found = f"`{name}` belongs to database `{state.database}`; the connection leads to `{connection.info.dbname}`"
            yield Problem("source.slot", found, "Name another slot, or correct the connection")
        elif state.wal_status == "lost" and self.options.snapshot != "when_needed":
            action = "Raise `max_slot_wal_keep_size`, drop the slot, and begin with a new pipeline"
            yield Problem("source.slot", f"`{name}` is lost: WAL that it needs was removed", action)
        elif state.temporary:
            yield Problem("source.slot", f"`{name}` is temporary; expected a lasting one", "Name another slot")
        elif state.two_phase:
            found = f"`{name}` decodes prepared transactions before they are committed (`two_phase`)"
            yield Problem("source.slot", found, "Name another slot; a missing one is created")
        elif state.pid is not None and state.application != make_session_name(name):
            yield Problem("source.slot", describe_foreign_use(name, state), "Stop that program, or name another slot")
        yield from self._find_keep_problems(connection)

    def _find_keep_problems(self, connection: psycopg.Connection[Any]) -> Iterator[Problem]:
        if connection.info.server_version < 130000:
            return
        kept = _fetch_one(connection, "SELECT setting::bigint FROM pg_catalog.pg_settings WHERE name = 'max_slot_wal_keep_size'")
        if 0 <= kept << 20 < self.options.max_wal_bytes:
            found = f"it is {self.options.max_wal_bytes:,}, and the server keeps {kept << 20:,} bytes of WAL for a slot"
            action = "Raise `max_slot_wal_keep_size` well above it, or lower `max_wal_bytes`: a slot that falls behind is lost"
            yield Problem("source.max_wal_bytes", found, action)

    # --- publication and tables ---

    def _find_publication_problems(self, connection: psycopg.Connection[Any]) -> Iterator[Problem]:
        name = self.options.publication
        found = connection.execute(
            "SELECT pubinsert, pubupdate, pubdelete, pubtruncate FROM pg_catalog.pg_publication WHERE pubname = %s", [name]
        ).fetchone()
        if found is None:
            what = f"there is no publication `{name}` in database `{connection.info.dbname}`"
            tables = ", ".join(map(str, self.options.tables or ())) or "<the tables>"
            yield Problem("source.publication", what, f"CREATE PUBLICATION {name} FOR TABLE {tables}")
            yield Unchecked("source.tables", "source.publication")
            return
        skipped = self.options.skipped_operations
        missing = [
            what
            for what, op, there in zip(("insert", "update", "delete", "truncate"), "cudt", found, strict=True)
            if not there and op not in skipped
        ]
        if missing:
            what = f"`{name}` does not publish {', '.join(missing)}"
            yield Problem("source.publication", what, "ALTER PUBLICATION ... SET (publish = ...), or `skipped_operations`")
        columns = "attnames::text[]" if connection.info.server_version >= 150000 else "NULL::text[]"
        query = f"SELECT schemaname, tablename, {columns} FROM pg_catalog.pg_publication_tables WHERE pubname = %s"
        covered = {(schema, table): names for schema, table, names in connection.execute(query, [name])}
        wanted = self.options.named_tables
        if wanted is None and not covered:
            yield Problem("source.publication", f"`{name}` has no tables", f"ALTER PUBLICATION {name} ADD TABLE <the table>")
        yield from self._find_table_problems(connection, covered.keys() if wanted is None else wanted, covered)

    def _find_table_problems(
        self,
        connection: psycopg.Connection[Any],
        wanted: Set[tuple[str, str]],
        covered: Mapping[tuple[str, str], Sequence[str] | None],
    ) -> Iterator[Problem]:
        """Yield the problems of tables.

        :param covered: per table of the publication, the columns that it publishes; None: all.
        """
        yield from find_shared_topic_problems(self.options.topic_prefix, wanted)
        keys = {
            parse_table_name(name, DEFAULT_SCHEMA): tuple(columns) for name, columns in self.options.message_key_columns.items()
        }
        asked = sorted(wanted | set(keys))
        there = {
            (row[0], row[1]): row[2:]
            for row in connection.execute(_TABLES, [[schema for schema, _ in asked], [table for _, table in asked]])
        }
        for full in asked:
            option, shown = ("tables" if full in wanted else "message_key_columns"), ".".join(full)
            if full not in there:
                yield Problem(f"source.{option}", f"there is no table {shown}", "Create it, or correct its name")
                continue
            kind, identity, columns, identifying, generated, unvalidated = there[full]
            if full in wanted and full not in covered:
                yield self._make_uncovered_problem(shown, kind)
                continue
            if full not in wanted:
                yield Problem("source.message_key_columns", f"{shown} is not among `tables`", "Leave it out")
                continue
            yield from _find_key_problems(shown, identity, columns or [], identifying or [], keys.get(full))
            key, published = keys.get(full) or identifying or (), covered[full]
            for name in sorted({*key} & {*(generated or ())}):
                found = f"column `{name}` of the key of {shown} is generated, and the log does not hold it"
                yield Problem(
                    f"source.{option}", found, "Name other columns in `message_key_columns`, with the replica identity FULL"
                )
            if published is not None and (lacking := sorted({*key} - {*published} - {*(generated or ())})):
                found = f"`{self.options.publication}` publishes {shown} without {quote_names(lacking)}, which its key has"
                yield Problem("source.publication", found, "ALTER PUBLICATION ... SET TABLE, with them or without a list")
            if unvalidated:
                found = f"a column of the replica identity of {shown} may hold nulls: `{unvalidated}` (NOT NULL) is not valid"
                yield Problem(f"source.{option}", found, f"ALTER TABLE {shown} VALIDATE CONSTRAINT {unvalidated}")
            yield from self._find_key_form_problems(connection, full, key)
            if kind == "p":
                yield from self._find_partition_problems(connection, full, key)

    def _find_key_form_problems(
        self, connection: psycopg.Connection[Any], table: tuple[str, str], key: Sequence[str]
    ) -> Iterator[Problem]:
        """Yield the columns of a key whose values may differ and have the same form: rows would replace each other in a copy."""
        for name, shown, base, modifier in connection.execute(_KEY_TYPES, [*table, list(key)]):
            fits_millis = 0 <= modifier <= 3
            if base in _LOSSY:
                why = _LOSSY[base]
            elif base in (1083, 1114) and self.options.time_precision_mode == "connect" and not fits_millis:
                why = "`time_precision_mode` cuts it to milliseconds"
            elif base == 1700 and self.options.decimal_handling_mode == "double":
                why = "`decimal_handling_mode` rounds it"
            else:
                continue
            found = f"column `{name}` of the key of {'.'.join(table)} is {shown}: {why}, so that two keys may become one"
            yield Problem("source.tables", found, "Name other columns in `message_key_columns`, with the replica identity FULL")

    def _find_partition_problems(
        self, connection: psycopg.Connection[Any], table: tuple[str, str], key: Sequence[str]
    ) -> Iterator[Problem]:
        """Yield the first partition whose log does not hold the key of its root. Each partition has its own replica identity."""
        for schema, name, identifying in connection.execute(_PARTITIONS, table):
            if missing := [column for column in key if column not in (identifying or ())]:
                shown = f"{schema}.{name}"
                found = f"the log does not hold column `{missing[0]}` of rows of {shown}, a partition of {'.'.join(table)}"
                yield Problem("source.tables", found, f"ALTER TABLE {shown} REPLICA IDENTITY FULL, as for each partition")
                return

    def _find_missing_rights(self, connection: psycopg.Connection[Any]) -> Iterator[Problem]:
        """Yield the tables that a snapshot may not read, or not completely."""
        if self.options.snapshot == "never":
            return
        wanted = self.options.named_tables
        found = connection.execute(
            "SELECT schemaname, tablename, has_schema_privilege(schemaname, 'USAGE'), has_table_privilege(oid, 'SELECT'), "
            "row_security_active(oid) FROM (SELECT *, (SELECT c.oid FROM pg_catalog.pg_class c "
            "WHERE c.relname = tablename AND c.relnamespace = (SELECT n.oid FROM pg_catalog.pg_namespace n "
            "WHERE n.nspname = schemaname)) AS oid FROM pg_catalog.pg_publication_tables WHERE pubname = %s) AS t ORDER BY 1, 2",
            [self.options.publication],
        ).fetchall()
        user = _read_role(connection)
        closed = set[str]()
        for schema, table, may_use, may_read, is_filtered in found:
            if wanted is not None and (schema, table) not in wanted:
                continue
            if not may_use and schema not in closed:
                closed.add(schema)
                what = f"role `{user}` may not use schema {schema}, whose tables `snapshot` reads"
                yield Problem("source.tables", what, f"GRANT USAGE ON SCHEMA {quote(schema)} TO {quote(user)}")
            if not may_read:
                what = f"role `{user}` may not read {schema}.{table}, as `snapshot` asks for"
                yield Problem("source.tables", what, f"GRANT SELECT ON {Name(schema, table)} TO {quote(user)}")
            elif is_filtered:
                what = f"row security of {schema}.{table} applies to role `{user}`: a snapshot would not have all rows"
                yield Problem("source.tables", what, f"ALTER ROLE {quote(user)} BYPASSRLS, or let it own the table")

    def _make_uncovered_problem(self, shown: str, kind: str) -> Problem:
        if kind == "p":
            found = f"{shown} is partitioned, and `{self.options.publication}` publishes its partitions under their own names"
            action = "ALTER PUBLICATION ... SET (publish_via_partition_root = true), or name the partitions"
            return Problem("source.tables", found, action)
        if kind != "r":
            return Problem("source.tables", f"{shown} is no table, and has no changes in the log", "Leave it out")
        action = f"ALTER PUBLICATION {self.options.publication} ADD TABLE {shown}"
        return Problem("source.tables", f"`{self.options.publication}` does not publish {shown}", action)


def _find_release_problems(connection: psycopg.Connection[Any]) -> Iterator[Problem]:
    version = connection.info.server_version // 10_000
    if version < OLDEST_POSTGRES:
        yield Problem("source.conn_id", f"the server is PostgreSQL {version}; expected {OLDEST_POSTGRES} or later")


def _find_key_problems(
    shown: str, identity: str, columns: list[str], identifying: list[str], given: tuple[str, ...] | None
) -> Iterator[Problem]:
    """Yield the reasons why events of a table would have no key.

    :param identity: the replica identity.
    :param identifying: the columns of the replica identity's index; of the primary key if it is the whole row.
    :param given: the columns of the key that the options name.
    """
    where = "source.tables" if given is None else "source.message_key_columns"
    if identity == "n" or (identity in "di" and not identifying):
        found = f"{shown} has no replica identity, so the log does not say which row an UPDATE or DELETE has changed"
        yield Problem(where, found, f"Give it a primary key, or ALTER TABLE {shown} REPLICA IDENTITY FULL")
    elif given is None:
        if not identifying:
            found = (
                f"{shown} has no primary key, or a deferrable one, and its replica identity is the whole row: its events would "
                "have no key"
            )
            yield Problem(where, found, "Name the columns of a key in `message_key_columns`")
    else:
        for name in given:
            if name not in columns:
                yield Problem(where, f"{shown} has no column `{name}`", "Correct the name")
            elif identity != "f" and name not in identifying:
                found = f"the log does not hold column `{name}` of rows of {shown} that are deleted"
                yield Problem(where, found, f"ALTER TABLE {shown} REPLICA IDENTITY FULL")


def _fetch_one(connection: psycopg.Connection[Any], query: str) -> Any:
    found = connection.execute(query.encode()).fetchone()
    return found[0] if found else None


def _read_role(connection: psycopg.Connection[Any]) -> str:
    return str(_fetch_one(connection, "SELECT current_user::text"))


def _read_setting(connection: psycopg.Connection[Any], name: str) -> str:
    return str(_fetch_one(connection, f"SELECT pg_catalog.current_setting('{name}')"))
