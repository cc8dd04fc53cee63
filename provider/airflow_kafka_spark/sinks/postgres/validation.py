"""Validation of a PostgreSQL sink: find all problems that would prevent writing a window, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import ConnectionInvalid, Problem, Unchecked
from airflow_kafka_spark.errors.base import quote_names
from airflow_kafka_spark.hooks.connections import name_other_server
from airflow_kafka_spark.hooks.databases import (
    NAME_BYTES,
    OLDEST_POSTGRES,
    Name,
    choose_action,
    describe_driver_message,
    hint_at_similar_table,
    is_login_refused,
    parse_name,
    quote,
    resolve_table,
)
from airflow_kafka_spark.sinks.postgres import sql
from airflow_kafka_spark.sinks.postgres.columns import (
    SYSTEM,
    StageColumn,
    UnsupportedType,
    explain_misfit,
    find_missing_column_problems,
    make_changed_type_problem,
    make_stage_column,
)
from airflow_kafka_spark.sinks.postgres.options import PostgresSinkOptions, is_name

if TYPE_CHECKING:
    import psycopg
    import pyarrow as pa

    from airflow_kafka_spark.sinks.base import Shape
    from airflow_kafka_spark.sinks.postgres.server import ServerFacts, SinkServer, Table

RESERVED = "__airflow_"
_KINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table"}


def find_postgres_sink_problems(sink: PostgresSinkOptions, shape: Shape | None) -> list[Problem]:
    """Return the problems of options, connection, server, table and rights. See :meth:`.PostgresSink.validate`.

    :param shape: None if the rows are not known: then their columns are not compared with the table's.
    """
    found = [*sink.find_problems(), *(_find_shape_problems(sink, shape) if shape else ())]
    columns = None if shape is None else [c for c in map(_try_stage_column, shape.schema) if c is not None]
    tolerates = shape is not None and shape.tolerates
    unchecked = [Unchecked(name, "sink.conn_id") for name in ("sink.table", *(("sink.key",) if sink.key else ()))]
    try:
        import psycopg
    except ImportError:
        action = "Install it with `pip install 'airflow-provider-kafka-spark[postgres]'`, on the executors too"
        return [*found, Problem("sink", "the package `psycopg` is not installed", action), Unchecked("sink.table", "sink")]
    try:
        server = sink.find_server()
    except ConnectionInvalid as error:
        return [*found, Problem.of("sink.conn_id", error), *unchecked]
    try:
        connection = server.connect()
    except psycopg.Error as error:
        message = _format_message(server, error)
        may_answer = not is_login_refused(message)
        if may_answer:
            message = name_other_server(message, server.host, server.port, "postgres")
        what = f"connection `{sink.conn_id}` does not lead to a database: {message}"
        action = f"Correct the connection `{sink.conn_id}`, or see to the server"
        return [*found, Problem("sink.conn_id", what, action, retryable=may_answer), *unchecked]
    try:
        with connection:
            return [*found, *_TargetValidation(sink, columns, connection, tolerates).find_problems()]
    except psycopg.Error as error:
        what = f"the catalog of {server.where} cannot be read: {_format_message(server, error)}"
        return [*found, Problem("sink.conn_id", what, choose_action(what, "")), *unchecked]
    finally:
        connection.close()


def _format_message(server: SinkServer, error: Exception) -> str:
    """Return the driver's message in one line, without passwords."""
    return describe_driver_message(server.scrub(" ".join(str(error).split())))


# --- without the server ---------------------------------------------------------------------------------


def _find_shape_problems(sink: PostgresSinkOptions, shape: Shape) -> Iterator[Problem]:
    names = shape.schema.names
    if not names:
        yield Problem("sink", "the rows have no columns", "Give `value=` a schema")
    for name in sorted({n for n in names if names.count(n) > 1}):
        yield Problem("sink", f"the rows have two columns `{name}`", "Give one of them another name")
    for name in names:
        if not is_name(name):
            yield Problem("sink", f"{name!r} cannot be a column; expected 1 to {NAME_BYTES} bytes without NUL")
        if name.startswith(RESERVED):
            yield Problem("sink", f"the rows have a column `{name}`; names that begin with `{RESERVED}` are the sink's own")
    if sink.window_column is not None and (sink.window_column in names or not is_name(sink.window_column)):
        what = (
            "the rows have a column of that name" if sink.window_column in names else f"{sink.window_column!r} cannot be a name"
        )
        yield Problem("sink.window_column", what, "Give it another one")
    missing = [name for name in sink.key if name not in names]
    if missing:
        yield Problem(
            "sink.key", f"the rows have no column {quote_names(missing)}; they have {quote_names(names)}", "Name one of these"
        )
    for field in shape.schema:
        try:
            make_stage_column(field.name, field.type)
        except UnsupportedType as error:
            yield Problem(f"sink.table column `{field.name}`", str(error), "Give it another type in the schema")


def _try_stage_column(field: pa.Field) -> StageColumn | None:
    try:
        return make_stage_column(field.name, field.type) if is_name(field.name) else None
    except UnsupportedType:
        return None


# --- with the server ----------------------------------------------------------------------------------------


@dataclass
class _TargetValidation:
    """Compares options and rows with the server's catalog, in one session.

    :param columns: the columns of the rows; None if they are not known.
    """

    sink: PostgresSinkOptions
    columns: Sequence[StageColumn] | None
    connection: psycopg.Connection
    tolerates: bool
    facts: ServerFacts | None = None

    def find_problems(self) -> list[Problem]:
        from airflow_kafka_spark.sinks.postgres.server import read_server_facts, read_table

        facts = self.facts = read_server_facts(self.connection)
        if facts.version < OLDEST_POSTGRES * 10_000:
            what = f"connection `{self.sink.conn_id}` leads to PostgreSQL {facts.release}; expected {OLDEST_POSTGRES} or newer"
            return [Problem("sink.conn_id", what), Unchecked("sink.table", "sink.conn_id")]
        found = list(self._find_server_problems(facts))
        try:
            schema, table = parse_name(self.sink.table)
        except ValueError:
            return [*found, *self._list_unchecked()]
        name = resolve_table(self.connection, schema, table)
        target = read_table(self.connection, name)
        found += self._find_schema_problems(name, facts.role, creates=target is None)
        if target is None:
            return found + list(self._find_creation_problems(name))
        if target.kind in _KINDS:
            what = f"{name} is {_KINDS[target.kind]}; expected a table"
            return [*found, Problem("sink.table", what, "Name the table itself"), *self._list_unchecked()]
        of_rows = () if self.columns is None else (self._find_column_problems, self._find_filled_problems)
        checks: tuple[Callable[[Table], Iterator[Problem]], ...] = (
            self._find_table_problems, *of_rows, self._find_key_problems, self._find_right_problems
        )  # fmt: skip
        return found + [problem for check in checks for problem in check(target)]

    def _list_unchecked(self) -> Iterator[Unchecked]:
        """Yield the checks that need the table, if it is missing or is no table."""
        if self.columns is not None:
            yield Unchecked("sink.table columns", "sink.table")
        if self.sink.key:
            yield Unchecked("sink.key", "sink.table")

    def _find_server_problems(self, facts: ServerFacts) -> Iterator[Problem]:
        where = f"connection `{self.sink.conn_id}`"
        if facts.standby:
            yield Problem("sink.conn_id", f"{where} leads to a standby, which takes no writes", "Connect to the primary")
        elif facts.read_only:
            yield Problem(
                "sink.conn_id",
                f"transactions of {where} are read-only",
                f"Set `default_transaction_read_only = off` for role {quote(facts.role)}, or where database or server set it",
            )
        # A session that marks the attempt as alive, one that merges stages, and one of a Spark task.
        needed = 2 if self.sink.atomic == "split" else 3
        if facts.sessions is not None and facts.sessions < needed:
            what = f"role `{facts.role}` may have {facts.sessions} sessions at a time in this database; the sink needs {needed}"
            grant = f"ALTER ROLE {quote(facts.role)} CONNECTION LIMIT {needed}, or the limit of the database"
            yield Problem("sink.conn_id", what, f"{grant}; for each further core of Spark, one more")
        if self.sink.atomic == "split" and not facts.may_create_temporary:
            database = quote(self.connection.info.dbname)
            what = f'role `{facts.role}` may not create temporary tables, which `atomic="split"` can need'
            yield Problem("sink.conn_id", what, f"GRANT TEMPORARY ON DATABASE {database} TO {quote(facts.role)}")

    # --- schemas ---

    def _find_schema_problems(self, name: Name, role: str, *, creates: bool) -> list[Problem]:
        from airflow_kafka_spark.sinks.postgres.server import read_table

        needed: dict[str, list[str]] = {}
        # Splits that commit one by one are staged, too, if rows of them are refused.
        if self.sink.atomic == "window" or self.tolerates:
            needed.setdefault(self.sink.stage_schema or name.schema, []).append("its stages")
        own = [self.sink.windows_table] + ([self.sink.splits_table] if self.sink.atomic == "split" else [])
        found: list[Problem] = []
        for table in own:
            there = read_table(self.connection, Name(name.schema, table))
            if there is None:
                needed.setdefault(name.schema, []).append(f"`{table}`")
            else:
                found += _find_own_table_problems(there, role)
        if creates and self.sink.auto_create:
            needed.setdefault(name.schema, []).append(f"{name}")
        needed.setdefault(name.schema, [])
        return found + [p for schema, tables in needed.items() for p in self._find_schema_right_problems(schema, tables, role)]

    def _find_schema_right_problems(self, schema: str, tables: Sequence[str], role: str) -> Iterator[Problem]:
        from airflow_kafka_spark.sinks.postgres.server import read_schema_rights

        rights = read_schema_rights(self.connection, schema)
        where = "sink.stage_schema" if schema == self.sink.stage_schema else "sink.table"
        if rights is None:
            table = parse_name(self.sink.table)[1]
            hint = hint_at_similar_table(self.connection, Name(schema, table)) if where == "sink.table" else ""
            yield Problem(where, f"there is no schema `{schema}`{hint}", f"CREATE SCHEMA {quote(schema)}, or correct the name")
            return
        missing = sorted({"USAGE", *(["CREATE"] if tables else [])} - rights)
        if missing:
            why = f" to make {', '.join(tables)}" if tables else ""
            grant = f"GRANT {', '.join(missing)} ON SCHEMA {quote(schema)} TO {quote(role)}"
            other = "; or let the stages live elsewhere with `stage_schema=`" if "its stages" in tables else ""
            yield Problem(where, f"role `{role}` lacks {', '.join(missing)} on schema `{schema}`{why}", grant + other)

    # --- a table that is not there yet ---

    def _find_creation_problems(self, name: Name) -> Iterator[Problem]:
        from airflow_kafka_spark.sinks.postgres.server import read_schema_rights

        if not self.sink.auto_create:
            # A schema that is missing is a problem already.
            if read_schema_rights(self.connection, name.schema) is not None:
                hint = hint_at_similar_table(self.connection, name)
                action = "Create it, correct `table`, or set `auto_create=True`"
                yield Problem("sink.table", f"there is no table {name}{hint}", action)
            yield from self._list_unchecked()
            return
        if not is_name(name.table):
            yield Problem("sink.table", f"its name has {len(name.table.encode())} bytes; expected 1 to {NAME_BYTES}")
        for column in self.columns or ():
            where = f"sink.table column `{column.name}`"
            if column.name in SYSTEM:
                yield Problem(where, "PostgreSQL has a column of that name in every table", "Give it another name")
            if column.holds == "nothing":
                yield Problem(where, "nothing is known of its type (Arrow's null)", "Give it a type in the schema")
            if column.holds == "json" and column.name in self.sink.key:
                yield Problem("sink.key", f"`{column.name}` is a structure; expected a scalar column")

    # --- a table that is there ---

    def _find_table_problems(self, table: Table) -> Iterator[Problem]:
        if not table.logged:
            what = f"{table.name} is UNLOGGED: a crash of the server would empty it, though its windows are remembered"
            yield Problem("sink.table", what, f"ALTER TABLE {table.name} SET LOGGED")
        if table.hides_rows:
            what = f"a row-level security policy on {table.name} applies to the connection's role"
            yield Problem("sink.table", what, "Give the role BYPASSRLS, or let it own the table")

    def _find_column_problems(self, table: Table) -> Iterator[Problem]:
        columns = self.columns or ()
        yield from find_missing_column_problems(self.sink, columns, table, self.facts.role if self.facts else "")
        for column in columns:
            target = table.columns.get(column.name)
            if target is not None and target.generated:
                where = f"sink.table column `{column.name}`"
                yield Problem(
                    where, f"{table.name} generates it always ({target.type})", "Leave it out of the schema, or of the table"
                )
            elif target is not None and (reason := explain_misfit(column, target)):
                yield make_changed_type_problem(column, table, reason)

    def _find_filled_problems(self, table: Table) -> Iterator[Problem]:
        """Yield problems of the columns that the sink fills, and of required columns that get no value."""
        filled = {*(c.name for c in self.columns or ()), *sql.OFFSET_COLUMNS, self.sink.window_column}
        yield from self._find_window_column_problems(table)
        for name, kind in zip(sql.OFFSET_COLUMNS, sql.OFFSET_TYPES, strict=True):
            target = table.columns.get(name)
            if target is None and self.sink.offset_columns and not self.sink.auto_evolve:
                add = f"ALTER TABLE {table.name} ADD COLUMN {quote(name)} {kind}"
                yield Problem("sink.offset_columns", f"{table.name} has no column `{name}`", add)
            elif target is not None and not _can_hold_offsets(kind, target.base):
                yield Problem(f"sink.table column `{name}`", f"{table.name} has {target.type}; the sink fills it with {kind}")
        for name, target in table.columns.items():
            if target.required and name not in filled:
                what = f"{table.name} takes no NULL in it and has no default, and the rows do not have it"
                yield Problem(f"sink.table column `{name}`", what, "Add it to the schema, or give it a default")

    def _find_window_column_problems(self, table: Table) -> Iterator[Problem]:
        name = self.sink.window_column
        if name is None or not is_name(name):
            return
        target = table.columns.get(name)
        if target is None and self.sink.auto_evolve:
            return
        if target is None:
            add = f"ALTER TABLE {table.name} ADD COLUMN {quote(name)} text"
            yield Problem("sink.window_column", f"{table.name} has no column `{name}`", add)
        elif target.base not in ("text", "character varying"):
            yield Problem("sink.window_column", f"`{name}` is {target.type}; the sink fills it with text")

    def _find_key_problems(self, table: Table) -> Iterator[Problem]:
        key = frozenset(self.sink.key)
        if self.sink.mode != "upsert" or not key or not key <= table.columns.keys():
            return
        if key in table.deferrable:
            what = f"{table.name} has a deferrable constraint on {quote_names(self.sink.key)}, which no upsert can use"
            yield Problem("sink.key", what, f"Drop it, and CREATE UNIQUE INDEX ON {table.name} instead")
            return
        if key in table.unique:
            return
        columns = ", ".join(map(quote, self.sink.key))
        has = "; ".join(quote_names(sorted(u)) for u in table.unique) or "none"
        index = f"unique index on exactly {quote_names(self.sink.key)} (valid, not partial, not deferrable)"
        what = f"{table.name} has no {index}; it has: {has}"
        yield Problem("sink.key", what, f"CREATE UNIQUE INDEX ON {table.name} ({columns})")

    def _find_right_problems(self, table: Table) -> Iterator[Problem]:
        needed = {"INSERT"}
        if self.sink.mode == "upsert":
            needed |= {"SELECT", "UPDATE"}
        elif self.sink.window_column:
            needed |= {"SELECT", "DELETE"}
        if self.sink.delete_enabled:
            needed.add("DELETE")
        missing = ", ".join(sorted(needed - table.rights))
        if missing:
            role = self.facts.role if self.facts else ""
            what = f"role `{role}` lacks {missing} on {table.name}"
            yield Problem("sink.table", what, f"GRANT {missing} ON {table.name} TO {quote(role)}")


def _find_own_table_problems(table: Table, role: str) -> Iterator[Problem]:
    missing = ", ".join(sorted({"SELECT", "INSERT", "UPDATE", "DELETE"} - table.rights))
    if table.kind != "r" or "pipeline" not in table.columns or "number" not in table.columns:
        what = f"{table.name}, where the sink keeps its record of windows, is another table"
        yield Problem("sink.windows_table", what, "Give it another name with `windows_table=` or `splits_table=`")
    elif missing:
        what = f"role `{role}` lacks {missing} on {table.name}, the sink's record of windows"
        yield Problem("sink.windows_table", what, f"GRANT {missing} ON {table.name} TO {quote(role)}")


def _can_hold_offsets(kind: str, base: str) -> bool:
    return base in {"text": ("text", "character varying"), "integer": ("integer", "bigint"), "bigint": ("bigint",)}[kind]
