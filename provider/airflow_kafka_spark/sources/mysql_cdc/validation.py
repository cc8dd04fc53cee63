"""Checks of a MySqlCdcSource that need its server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import ConnectionInvalid, KafkaSparkError, LogLost, Problem, SourceRejected, Unchecked
from airflow_kafka_spark.sources.cdc.options import find_shared_topic_problems, parse_table_name
from airflow_kafka_spark.sources.jdbc.mysql import fetch_rows, find_database_grant, get_error_code, quote_literal, read_account
from airflow_kafka_spark.sources.mysql_cdc.options import MySqlCdcOptions
from airflow_kafka_spark.sources.mysql_cdc.tasks.catalog import DIALECT, ENGINE
from airflow_kafka_spark.sources.mysql_cdc.tasks.session import (
    FIRST,
    LogCoordinates,
    LogServer,
    is_mariadb,
    is_replicating,
    logs_cascades,
    read_replica_lag,
    read_version,
)
from airflow_kafka_spark.sources.mysql_cdc.tasks.values import CODECS
from airflow_kafka_spark.sources.mysql_cdc.windows import UNDESCRIBED

if TYPE_CHECKING:
    from pymysql.connections import Connection

_NO_SUCH_TABLE, _ABSENT = 1146, "airflow_kafka_spark_absent"

WAITING = (Unchecked("source.tables", "source.conn_id"),)
"""The checks that need the server."""

OLDEST = {True: (10, 5), False: (8, 0)}
KEPT_SECONDS = 3600
"""Minimum time in seconds for which a server has to keep its log."""

_WANTED = {"binlog_format": "ROW", "binlog_row_image": "FULL", "binlog_row_metadata": "FULL"}
_REFUSED = {
    "log_bin_compress": "compressed events cannot be read",
    "binlog_row_value_options": "partial values of JSON cannot be read",
}


@dataclass(frozen=True)
class MySqlLogValidation:
    """Checks the options of a source against its server.

    :param options: the source's options.
    :param server: its address and login.
    :param replicas: the replicas whose lag is checked.
    :param wrong: the options that are already known to be invalid, as users know them. Checks that depend on them are left out.
    """

    options: MySqlCdcOptions
    server: LogServer
    replicas: tuple[LogServer, ...] = ()
    wrong: frozenset[str] = frozenset()

    def find_problems(self) -> list[Problem]:
        """Return all problems that would prevent windows from being frozen and read."""
        try:
            with self.server.open_session("checking the server") as connection:
                found = list(self._find_release_problems(connection))
                if found:
                    return [*found, *WAITING]
                found += self._find_setting_problems(connection)
                has_log = self._read_setting(connection, "log_bin") == "ON"
                found += self._find_lag_problems()
                found += self._find_right_problems() if has_log else ()
                if "source.tables" in self.wrong:
                    return found
                if "source.message_key_columns" in self.wrong:
                    return [*found, Unchecked("source.tables", "source.message_key_columns")]
                return [*found, *self._find_table_problems(connection, has_log)]
        except KafkaSparkError as error:
            waiting = WAITING if "source.tables" not in self.wrong else ()
            action = error.action if isinstance(error, ConnectionInvalid) else "Correct the connection, or see to the server"
            if grant := find_database_grant(error.found):
                action = f"{grant}, or correct the connection"
            return [Problem.of("source.conn_id", error, action), *waiting]

    def _find_lag_problems(self) -> Iterator[Problem]:
        for replica in self.replicas:
            grant = ""
            try:
                with replica.open_session("asking for the lag of a replica") as connection:
                    right = "SLAVE MONITOR" if is_mariadb(connection) else "REPLICATION CLIENT"
                    grant = f"GRANT {right} ON *.* TO {read_account(connection)}"
                    read_replica_lag(replica, connection)
            except KafkaSparkError as error:
                yield Problem.of("source.replica_conn_ids", error, error.action or grant)

    # --- the server and its log ---

    def _find_release_problems(self, connection: Connection) -> Iterator[Problem]:
        of_mariadb = is_mariadb(connection)
        found, oldest = read_version(connection), OLDEST[of_mariadb]
        if found < oldest:
            product = "MariaDB" if of_mariadb else "MySQL"
            what = f"the server is {product} {found[0]}.{found[1]}; expected {oldest[0]}.{oldest[1]} or later"
            yield Problem("source.conn_id", f"{what}, whose log names columns")

    def _find_setting_problems(self, connection: Connection) -> Iterator[Problem]:
        if self._read_setting(connection, "log_bin") != "ON":
            yield Problem("source.conn_id", "the server writes no binary log", "Set `log_bin`, and restart the server")
        for name, wanted in _WANTED.items():
            found = self._read_setting(connection, name).upper()
            if found not in ("", wanted):
                action = f"SET GLOBAL {name} = '{wanted}', and set it in the server's configuration"
                yield Problem("source.conn_id", f"`{name}` of the server is `{found}`; expected `{wanted}`", action)
        for name, reason in _REFUSED.items():
            found = self._read_setting(connection, name)
            if found not in ("", "OFF", "0"):
                yield Problem("source.conn_id", f"`{name}` of the server is `{found}`: {reason}", f"SET GLOBAL {name} = DEFAULT")
        yield from self._find_kept_problems(connection)
        yield from self._find_replica_problems(connection)

    def _find_kept_problems(self, connection: Connection) -> Iterator[Problem]:
        seconds = float(self._read_setting(connection, "binlog_expire_logs_seconds") or 0)
        days = float(self._read_setting(connection, "expire_logs_days") or 0) if not seconds else 0
        kept = seconds or days * 86_400
        if 0 < kept < KEPT_SECONDS:
            what = f"the server keeps its log for {kept:,.0f} seconds: a pipeline that is paused for longer loses changes"
            action = "SET GLOBAL binlog_expire_logs_seconds = 604800, or longer than the longest pause"
            yield Problem("source.conn_id", what, action)

    def _find_replica_problems(self, connection: Connection) -> Iterator[Problem]:
        import pymysql

        try:
            is_replica = is_replicating(connection)
        except pymysql.Error:
            return  # the right is missing, which is reported by itself
        names = ("log_slave_updates", "log_replica_updates")
        if is_replica and "OFF" in [self._read_setting(connection, name) for name in names]:
            what = "the server is a replica, and does not log the changes that it gets from its primary"
            yield Problem(
                "source.conn_id", what, "Set `log_slave_updates = ON` and restart the server, or connect to the primary"
            )

    def _find_right_problems(self) -> Iterator[Problem]:
        """Yield the rights that are missing. Each right is tried once."""
        user = self.server.server.user
        try:
            with self.server.open_session("reading the end of the log") as connection:
                monitor = "BINLOG MONITOR" if is_mariadb(connection) else "REPLICATION CLIENT"
                account = read_account(connection)
                self.server.read_end(connection)
                files = self.server.list_files(connection)
        except SourceRejected as error:
            action = f"GRANT {monitor}, REPLICATION SLAVE ON *.* TO {account}"
            yield Problem("source.conn_id", f"user `{user}` may not ask where the log ends: {error.detail}", action)
            return
        try:
            self.server.read_beginning(LogCoordinates(files[-1].file, FIRST))
        except LogLost as error:
            yield Problem.of("source.conn_id", error, "")
        except SourceRejected as error:
            what = f"user `{user}` may not read the log: {error.detail}"
            yield Problem("source.conn_id", what, f"GRANT REPLICATION SLAVE ON *.* TO {account}")

    # --- tables ---

    def _find_table_problems(self, connection: Connection, has_log: bool) -> Iterator[Problem]:
        database = self.server.server.database
        unnamed = [name for name in self.options.tables or () if not parse_table_name(name, database)[0]]
        if unnamed or (self.options.tables is None and not database):
            what = f"{unnamed[0]} has no database" if unnamed else "it is None"
            yield Problem("source.tables", f"{what}, and the connection names none (its `schema`)", "Write `database.table`")
            return
        keys = {parse_table_name(name, database): columns for name, columns in self.options.message_key_columns.items()}
        wanted = [parse_table_name(name, database) for name in self.options.tables or ()]
        if self.options.tables is None:
            types = "'BASE TABLE', 'SYSTEM VERSIONED'"
            query = f"SELECT table_name FROM information_schema.tables WHERE table_type IN ({types}) AND table_schema = "
            wanted = [(database, str(row[0])) for row in fetch_rows(connection, query + quote_literal(database))]
            if other := self._find_other_spelling(connection, database):
                what = f"there is no database `{database}`; there is `{other}`, and names are compared exactly"
                yield Problem("source.conn_id", what, "Correct the `schema` of the connection")
                return
            if not wanted:
                found = f"there are no tables in database `{database}` that the user may see"
                yield Problem(
                    "source.tables", found, f"GRANT SELECT ON {DIALECT.quote(database)}.* TO {read_account(connection)}"
                )
        yield from find_shared_topic_problems(self.options.topic_prefix, wanted)
        for table in sorted({*wanted, *keys}):
            if table not in wanted:
                shown = ".".join(table)
                yield Problem("source.message_key_columns", f"{shown} is not among `tables`", "Leave it out")
                continue
            yield from self._find_problems_of(connection, table, keys.get(table))
        if has_log:
            yield from self._find_filter_problems(connection, sorted({name for name, _ in wanted}))

    def _find_other_spelling(self, connection: Connection, database: str) -> str:
        """Return the name of a database if it differs from the given one, which the server takes for equal; else "".

        The names of a server may have no case (``lower_case_table_names``). Its log has one spelling only.
        """
        query = f"SELECT schema_name FROM information_schema.schemata WHERE schema_name = {quote_literal(database)}"
        names = [str(row[0]) for row in fetch_rows(connection, query)]
        return names[0] if names and database not in names else ""

    def _find_problems_of(self, connection: Connection, table: tuple[str, str], key: Sequence[str] | None) -> Iterator[Problem]:
        shown, quoted = ".".join(table), ".".join(map(DIALECT.quote, table))
        condition = f"table_schema = {quote_literal(table[0])} AND table_name = {quote_literal(table[1])}"
        query = f"SELECT table_schema, table_name, table_type FROM information_schema.tables WHERE {condition}"
        kinds = {(str(schema), str(name)): str(kind) for schema, name, kind in fetch_rows(connection, query)}
        if table not in kinds:
            alike = "".join(f"; there is {'.'.join(name)}, and names are compared exactly" for name in kinds)
            action = f"Create it, correct its name, or GRANT SELECT ON {quoted} TO {read_account(connection)}"
            yield Problem("source.tables", f"there is no table {shown} that the user may see{alike}", action)
            return
        kind = kinds[table]
        if kind != "BASE TABLE":
            reason = "its log has rows of its history, too" if kind == "SYSTEM VERSIONED" else f"it is a {kind.lower()}"
            yield Problem("source.tables", f"{shown} cannot be captured: {reason}", "Leave it out")
            return
        columns = fetch_rows(
            connection,
            "SELECT column_name, data_type, character_set_name, column_key, column_type, datetime_precision "
            f"FROM information_schema.columns WHERE {condition}",
        )
        names = [str(column[0]) for column in columns]
        if key is None and not any(column[3] == "PRI" for column in columns):
            yield Problem("source.tables", f"{shown} has no primary key", "Name the columns of a key in `message_key_columns`")
        for name in key or ():
            if name not in names:
                yield Problem("source.message_key_columns", f"{shown} has no column `{name}`", "Correct the name")
        undescribed = UNDESCRIBED if is_mariadb(connection) else ()
        yield from self._find_column_problems(shown, columns, key, undescribed)
        yield from self._find_cascade_problems(connection, table)
        if self.options.snapshot != "never":
            yield from self._find_snapshot_problems(connection, table)

    def _find_column_problems(
        self, shown: str, columns: Sequence[Sequence[Any]], key: Sequence[str] | None, undescribed: Sequence[str]
    ) -> Iterator[Problem]:
        """Yield the columns that cannot be read from the log, and those of the key whose form is not one of a single value.

        :param shown: the table.
        :param columns: per column its name, type, character set, kind of key, declaration and digits after the seconds.
        :param key: the columns of the key that the options name; None for the primary key.
        :param undescribed: the types that the log describes as plain bytes.
        """
        identifying = key or [str(column[0]) for column in columns if column[3] == "PRI"]
        for name, data_type, charset, _, declared, precision in columns:
            if str(data_type).lower() in undescribed and not charset:
                what = f"column `{name}` of {shown} has the type {data_type}, which cannot be read from the log"
                yield Problem("source.tables", what, "Change its type, or leave the table out")
            if charset and charset not in CODECS:
                what = f"column `{name}` of {shown} has the character set {charset}, which cannot be read"
                yield Problem("source.tables", what, f"ALTER TABLE {shown} CONVERT TO CHARACTER SET utf8mb4, or leave it out")
            if " COMPRESSED" in str(declared).upper():
                what = f"column `{name}` of {shown} is COMPRESSED, and cannot be read from the log"
                yield Problem("source.tables", what, f"ALTER TABLE {shown} MODIFY it without COMPRESSED, or leave the table out")
            if name in identifying and (why := self._find_lossy_form(str(data_type).lower(), precision or 0)):
                what = f"column `{name}` of the key of {shown} is {declared}: {why}, so that two keys may become one"
                yield Problem("source.tables", what, "Leave the option out, or name other columns in `message_key_columns`")

    def _find_lossy_form(self, data_type: str, precision: int) -> str:
        """Return the reason why values of a type may differ and have the same form; "" if they may not.

        :param precision: digits after the seconds.
        """
        if data_type in ("datetime", "time") and precision > 3 and self.options.time_precision_mode == "connect":
            return "`time_precision_mode` cuts it to milliseconds"
        if data_type == "decimal" and self.options.decimal_handling_mode == "double":
            return "`decimal_handling_mode` rounds it"
        return ""

    def _find_snapshot_problems(self, connection: Connection, table: tuple[str, str]) -> Iterator[Problem]:
        import pymysql

        shown, condition = ".".join(table), f"table_schema = {quote_literal(table[0])} AND table_name = {quote_literal(table[1])}"
        engine = str(fetch_rows(connection, f"SELECT engine FROM information_schema.tables WHERE {condition}")[0][0])
        if engine != ENGINE:
            what = f"the engine of {shown} is {engine}, and a snapshot of it would have no coordinates in the log"
            yield Problem("source.snapshot", what, f"ALTER TABLE {shown} ENGINE = {ENGINE}, or leave the table out")
        quoted = ".".join(map(DIALECT.quote, table))
        try:
            fetch_rows(connection, f"SELECT * FROM {quoted} LIMIT 0")
        except pymysql.Error as error:
            what = f"user `{self.server.server.user}` may not read {shown}: {error.args[-1]}"
            yield Problem("source.snapshot", what, f"GRANT SELECT ON {quoted} TO {read_account(connection)}")
            return
        if not is_mariadb(connection):
            yield from self._find_lock_problems(connection, table[0])

    def _find_lock_problems(self, connection: Connection, database: str) -> Iterator[Problem]:
        """Yield the missing right to lock tables of a database of MySQL."""
        import pymysql

        try:
            # The server checks the right first, and nobody waits for a table that does not exist.
            fetch_rows(connection, f"LOCK TABLES {DIALECT.quote(database)}.{DIALECT.quote(_ABSENT)} READ")
        except pymysql.Error as error:
            if get_error_code(error) != _NO_SUCH_TABLE:
                what = f"user `{self.server.server.user}` may not lock tables of {database} for a moment: {error.args[-1]}"
                action = f"GRANT SELECT, LOCK TABLES ON {DIALECT.quote(database)}.* TO {read_account(connection)}"
                yield Problem("source.snapshot", what, action)
        fetch_rows(connection, "UNLOCK TABLES")

    def _find_cascade_problems(self, connection: Connection, table: tuple[str, str]) -> Iterator[Problem]:
        if self.options.ignore_cascades or logs_cascades(connection):
            return
        found = fetch_rows(
            connection,
            "SELECT constraint_name, update_rule, delete_rule FROM information_schema.referential_constraints WHERE "
            f"constraint_schema = {quote_literal(table[0])} AND table_name = {quote_literal(table[1])}",
        )
        for name, on_update, on_delete in found:
            if {on_update, on_delete} & {"CASCADE", "SET NULL", "SET DEFAULT"}:
                what = (
                    f"the foreign key `{name}` of {'.'.join(table)} changes rows by ON UPDATE {on_update} ON DELETE {on_delete}, "
                    "and the log does not hold such changes"
                )
                action = "Use RESTRICT, or set `ignore_cascades=True` if no key of the other table changes or is deleted"
                yield Problem("source.tables", what, action)

    def _find_filter_problems(self, connection: Connection, databases: Sequence[str]) -> Iterator[Problem]:
        """Yield the databases whose changes are not logged."""
        import pymysql

        try:
            status = fetch_rows(connection, self.server.make_status_statement(connection))
        except pymysql.Error:
            return  # the right is missing, which is reported by itself
        only, ignored = (set(filter(None, str(part or "").split(","))) for part in (status[0][2:4] if status else ("", "")))
        for database in databases:
            if (only and database not in only) or database in ignored:
                action = "Change `binlog_do_db` or `binlog_ignore_db` of the server"
                yield Problem("source.tables", f"the server does not log database `{database}`", action)

    def _read_setting(self, connection: Connection, name: str) -> str:
        found = fetch_rows(connection, f"SHOW GLOBAL VARIABLES LIKE '{name}'")
        return str(found[0][1]) if found else ""
