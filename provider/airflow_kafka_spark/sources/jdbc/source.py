"""Tables and queries of a database as frozen windows of rows."""

from __future__ import annotations

import hashlib
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_kafka_spark.errors import ConnectionInvalid, Problem, SourceRejected
from airflow_kafka_spark.hooks.connections import get_connection_type, look_up
from airflow_kafka_spark.hooks.databases import parse_name
from airflow_kafka_spark.sources.base import FrozenWindow, RowSource
from airflow_kafka_spark.sources.jdbc.options import JdbcSourceOptions
from airflow_kafka_spark.windows.binding import SERVER, SERVER_ID, Endpoint

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from airflow_kafka_spark.sources.base import SplitReader
    from airflow_kafka_spark.sources.jdbc.database import SourceDatabase


_INVALID_TEXT = re.compile(r'invalid byte sequence for encoding "UTF8"(?:: 0x[0-9a-f]{2})*')
"""The end of PostgreSQL's message about a text of a database without an encoding."""


@dataclass(frozen=True)
class JdbcSource(JdbcSourceOptions, RowSource):
    """Reads windows of a table or query.

    Spark's tasks read PostgreSQL directly, if this gives equal values (:meth:`make_reader`). Otherwise, and for MariaDB and
    MySQL, Spark's JDBC reader is used.

    A window is the rows of ``(last, end]`` in the order of the *split columns*: those of the cursor, of the key, or both.
    ``last`` is the end of the previous window, ``end`` a row that existed when the window was frozen. The window is cut into
    splits by counting rows in the database, along an index on these columns if there is one. So composite keys, text keys and
    skewed keys give splits of equal size. The database compares values, with its collations, when cutting and when reading.

    Guarantee, in every mode: splits are frozen with the window. They tile it: no row is in two of them, and every attempt reads
    each of them by equal bounds. Changes that are committed between two attempts affect the unpublished splits only; a published
    split is never read again. So a row is published once per window, *as long as its split columns keep their values while the
    window is open*: a row whose key is changed may move from a published split into an unpublished one.

    The rows of all windows of a pipeline together depend on the mode:

    - ``bulk``: the whole table, repeatedly, by its key. Each *pass* is one window, or several if ``max_records`` (or the
      limit of 2 000 splits) ends a window early; the next window then continues. After a complete pass the next window begins a
      new one. Rows that are inserted during a pass are in it or in the next. With ``split_by="pages"``, a pass reads the rows
      as they were when it began, and each of them at most once. If rows were inserted, updated or moved since, the window
      fails before it is complete, and so does each last window of a pass: rows that were updated may be missing. Rows that are
      deleted meanwhile may be published. ``split_records`` and ``max_records`` are approximate then, by the server's estimates.
    - ``incrementing``: every row once, by a column whose values only grow; later updates are not seen. A row that becomes visible
      with a smaller value than one already published is never read. So transactions that are writing the table are awaited
      when a window is frozen (``writers_timeout``; on a primary of PostgreSQL). Not covered are values that were drawn long
      before they are inserted (clients that reserve ranges of ids, a sequence with CACHE) and, on MariaDB and MySQL, all rows
      that are committed in another order than that of their values.
    - ``timestamp``: every row, and every version of it that is still the last one when its window is read, by a column that each
      insert and update sets. Rows younger than ``delay`` are left to a later window. So are those of the second that is not over
      yet, if the column holds whole seconds (of the tenth of a second, if it holds tenths ...), because further rows may get the
      same timestamp. If the column holds more digits than its writers fill, ``delay`` has to cover that unit. A row is missed if
      it becomes visible with a timestamp before a published one: if its transaction was neither awaited (as above) nor complete
      within ``delay`` after the timestamp. A row with a timestamp in the future waits until then; the log and the report have
      the number of such rows.
    - ``timestamp+incrementing``: like ``timestamp``; rows of one timestamp are ordered by the incrementing column.

    A row that is updated while a window with a timestamp is open leaves that window, because its new timestamp lies after the
    window's end. A later window publishes it.

    Columns keep their types: ``smallint``, ``int``, ``bigint``, ``float``, ``double``, ``boolean``, ``decimal(p,s)``, ``date``,
    ``binary``, ``string``; with time zone as ``timestamp``, without as ``timestamp_ntz``, both to the microsecond; arrays as
    arrays. As the text that the database writes: ``numeric`` without precision or with more than Spark's 38 digits (it is never
    rounded), ``json``, ``uuid``, enums, ``time``, intervals, network addresses, arrays of several dimensions (JSON) and all other
    types. ``infinity`` in a date or timestamp, which Spark cannot hold, fails the read and names the column.

    :param conn_id: Airflow connection of type ``postgres`` or ``mysql``. Executors use it too: certificate files have to exist
        there.
    :param table: ``table`` or ``schema.table``, as written, not folded to lower case; ``"My schema"."my.table"`` if a name
        contains a dot. Default None: ``query`` is given instead.
    :param query: a SELECT that can be used in a FROM clause. It has no primary key, so give ``key`` or a cursor. Default None.
    :param mode: as above. By default, the mode follows from the columns that are given: ``bulk`` without a cursor.
    :param cursor: a short name of ``incrementing_column``; default None.
    :param incrementing_column: Connect's ``incrementing.column.name``; default None.
    :param timestamp_column: Connect's ``timestamp.column.name``: a timestamp, or a date (whole days then, once they are over);
        default None.
    :param delay: seconds that rows have to be old, by the database's clock, before a window with a timestamp takes them
        (Connect's ``timestamp.delay.interval.ms``); default 0.
    :param db_timezone: the zone of a timestamp column without zone (Connect's ``db.timezone``); default UTC. In the hour before
        its clock is set back, a window ends before the times that the clock will show again.
    :param validate_non_null: refuse a cursor column that takes NULL, and a query with rows in which the cursor is NULL (Connect's
        ``validate.non.null``). With False, rows without a cursor are never read. Default True.
    :param key: the columns to cut by, for ``bulk`` and between rows of one timestamp; default the primary key. They need not be
        unique: rows of equal keys are in one split. In ``bulk``, rows with a NULL in it are a split of their own.
    :param split_by: ``key`` (default), or ``pages`` for a ``bulk`` read of a table of PostgreSQL 14 or newer that does not change
        meanwhile: splits are ranges of its pages, so that each page is read once, whatever the order of the key.
    :param include_columns: the columns to read, in this order; default all.
    :param split_records: rows per split, and so per Spark task and Kafka transaction; default 250 000.
    :param max_records: rows per window, at most; None (default) for all there are, up to 2 000 splits. Rows with equal split
        columns stay together, even if the window then has more rows.
    :param writers_timeout: seconds to wait, when a window with a cursor is frozen, for transactions that are writing the table;
        when a pass by pages begins, for all transactions of the server that have made changes.
        Then the task fails and may be retried. 0 does not wait. A standby of PostgreSQL does not show them, nor does the server
        of a foreign table or of a table that a subscription writes, nor a replica of MariaDB or MySQL: these are refused, unless
        this is 0. On other servers of MariaDB and MySQL, it has no effect. Default 60.
    :param fetchsize: rows per round trip to the database, where Spark's JDBC reader reads; default 10 000.
    :param max_sessions: number of Spark's tasks that read this database at a time; further ones wait before their first row.
        It counts the tasks of all pipelines that have this option, whatever cluster they run on: each holds an advisory lock of
        PostgreSQL, a named lock of MariaDB (not of MySQL). Default None: as many as Spark has cores.
    :param max_replica_lag: seconds that a replica of PostgreSQL may be behind. While one is further behind, each task waits
        before its first row: on a primary, while any replica that streams from it is; on a replica, while that one is, or has
        lost its primary. The role needs ``pg_read_all_stats`` on a primary. Default None: the lag of replicas is not checked.
    """

    template_fields: ClassVar[Sequence[str]] = (
        "conn_id", "table", "query", "cursor", "incrementing_column", "timestamp_column", "key", "include_columns"
    )  # fmt: skip

    # --- the contract ---

    @property
    def uri(self) -> str:
        """``postgres://host:port/database/schema/table``, ``mysql://host:port/database/table``.

        :raises ConnectionInvalid: the connection cannot be used.
        """
        database = self.find_database()
        schema, table = self._parts
        parts = [schema or (database.default_schema if self.query is None else ""), table]
        # In MariaDB a schema is a database.
        base = database.uri if database.default_schema or not schema else database.server_uri
        return "/".join([base, *(urllib.parse.quote(part, safe="") for part in parts if part)])

    @property
    def asset_uri(self) -> str:
        """``x-jdbc://conn_id/schema/table``: only the connection knows the host, and Airflow does not check x- schemes."""
        if any("{{" in (text or "") for text in (self.conn_id, self.table, self.query)):
            return f"x-jdbc://{self.conn_id}/{self.table or 'query'}"
        parts = [self.conn_id, *(part for part in self._parts if part)]
        return "x-jdbc://" + "/".join(urllib.parse.quote(part, safe="") for part in parts)

    @property
    def _parts(self) -> tuple[str | None, str]:
        try:
            return (None, self.name) if self.query is not None else parse_name(self.name)
        except ValueError:
            return None, self.name

    def find_origin(self) -> Endpoint:
        """Return server, database and table; the query, or the definition of a view, the mode and the cursor."""
        from airflow_kafka_spark.sources.jdbc.windows import find_relation

        database = self.find_database()
        server = database.server_uri
        name = database.uri.removeprefix(server).removeprefix("/")
        with database.open_session("asking where the table is") as session:
            identity = session.read_identity()
            relation = find_relation(self, session) if self.query is None else None
            view = session.read_view_definition(relation) if relation is not None else ""
        table = relation.name if relation is not None else "a query"
        place = {SERVER: server, "database": name, "table": table, **({SERVER_ID: identity} if identity else {})}
        digest = f"view-{hashlib.sha256(view.encode()).hexdigest()[:12]}" if view else ""
        definition = {"query": self.name} if self.query is not None else {"view": digest} if view else {}
        return Endpoint(place, {**definition, "mode": self.effective_mode, "cursor": ", ".join(self.cursor_columns)})

    @property
    def packages(self) -> tuple[str, ...]:
        """The database's JDBC driver. Looks the connection up.

        :raises ConnectionInvalid: the connection cannot be used.
        """
        return self.find_database().packages

    @property
    def settings(self) -> Mapping[str, str]:
        """UTC as the session's zone, in which Spark makes timestamps without zone."""
        return {"spark.sql.session.timeZone": "UTC"}

    def find_database(self) -> SourceDatabase:
        """Return the database that the connection leads to, as :func:`open_database`."""
        return open_database(self.conn_id)

    def validate(self) -> list[Problem]:
        """Return the problems of options, connection, server, table, columns and their types, cursor, key and rights."""
        from airflow_kafka_spark.sources.jdbc.validation import ServerValidation, list_unchecked_arguments

        found = self.find_option_problems()
        try:
            database = self.find_database()
        except ConnectionInvalid as error:
            return [*found, Problem.of("source.conn_id", error), *list_unchecked_arguments(self, "source.conn_id")]
        except ImportError as error:
            return [*found, make_missing_driver_problem(error)]
        found += database.find_problems()
        found += ServerValidation(self, database, options_valid=not found).find_problems()
        # A column may be unfit both to be read and to be split by.
        return list(dict.fromkeys(found))

    def find_columns(self) -> tuple[str, ...]:
        """Return the names of the columns, as the catalog has them now.

        :raises SourceUnavailable: the server cannot be reached.
        :raises SourceRejected: there is no such table, a column is missing, or there are both a table and a query.
        """
        from airflow_kafka_spark.sources.jdbc.windows import find_relation, list_selected_columns

        for problem in self.find_relation_problems():
            raise SourceRejected(self.uri, problem.what, problem.action)
        with self.find_database().open_session("reading the catalog") as session:
            return tuple(column.name for column in list_selected_columns(self, find_relation(self, session)))

    def freeze(self, position: Mapping[str, Any] | None) -> FrozenWindow:
        """Decide the next window's end and its splits, by one pass over the index of the split columns.

        See :meth:`RowSource.freeze`.

        :raises SourceUnavailable: the server does not answer, or other transactions write the table for longer than
            ``writers_timeout``.
        :raises SourceRejected: the table is not what the options say, or the position is another table's or cursor's.
        """
        from airflow_kafka_spark.sources.jdbc.windows import freeze_window

        return freeze_window(self, self.find_database(), position)

    def check_published(self, splits: Sequence[Mapping[str, Any]], position: Mapping[str, Any]) -> None:
        """Make sure that no row has changed since a pass by pages began. See :meth:`RowSource.check_published`.

        :raises SourceUnavailable: the server does not answer.
        :raises SourceRejected: rows were inserted, updated or moved.
        """
        from airflow_kafka_spark.sources.jdbc.windows import refuse_changed_table

        refuse_changed_table(self, self.find_database(), splits, position)

    def read_frame(self, spark: SparkSession, splits: Sequence[Mapping[str, Any]]) -> DataFrame:
        """Return the rows of these splits, with the columns that the table has now. See :meth:`RowSource.read_frame`.

        :raises SourceRejected: a column that the splits were cut by is gone.
        """
        from airflow_kafka_spark.sources.jdbc.windows import read_frame

        return read_frame(self, self.find_database(), spark, splits)

    def explain(self, error: BaseException) -> SourceRejected | None:
        """Return the error for a value that Spark cannot hold, or for a text that is not UTF-8, in a database without an
        encoding (SQL_ASCII); None for others."""
        from airflow_kafka_spark.sources.jdbc.database import UNHELD_ACTION, find_unheld_value

        if unheld := find_unheld_value(str(error)):
            return SourceRejected(self.uri, unheld, UNHELD_ACTION)
        found = _INVALID_TEXT.search(str(error))
        if found is None:
            return None
        detail = f"it holds a text that is not UTF-8: {found[0]}"
        action = "Correct the text: a database of the encoding SQL_ASCII stores bytes of any encoding, and does not know which"
        return SourceRejected(self.uri, detail, action)

    def make_empty_frame(self, spark: SparkSession) -> DataFrame | None:
        """Return a DataFrame without rows that has the columns of the table as they are now."""
        return self.read_frame(spark, ())

    def make_reader(self, splits: Sequence[Mapping[str, Any]], columns: Sequence[str] | None) -> SplitReader | str:
        """Return the reader with which tasks read these splits, or the reason why only Spark can.

        See :meth:`RowSource.make_reader`.

        Tasks read PostgreSQL in UTF-8, by ADBC, if no needed column is an array or a floating-point number, which Java writes in
        its own way.

        :raises SourceUnavailable: the server does not answer.
        :raises SourceRejected: a column that the splits were cut by is gone.
        """
        from airflow_kafka_spark.sources.jdbc.windows import make_split_reader

        return make_split_reader(self, self.find_database(), splits, columns)


def open_database(conn_id: str) -> SourceDatabase:
    """Return the database that an Airflow connection leads to.

    :raises ConnectionInvalid: the connection is not defined, of another type, or has options that mean nothing here.
    :raises ImportError: the database's Python driver is not installed (:func:`make_missing_driver_problem`).
    """
    connection = look_up(conn_id, "postgres", "mysql")
    if get_connection_type(connection) == "postgres":
        from airflow_kafka_spark.hooks import databases
        from airflow_kafka_spark.sources.jdbc.postgres import PostgresDatabase

        return PostgresDatabase(databases.read_server(connection))
    import pymysql  # noqa: F401

    from airflow_kafka_spark.sources.jdbc.mysql import MySqlDatabase, read_server

    return MySqlDatabase(read_server(connection))


def make_missing_driver_problem(error: ImportError) -> Problem:
    """Return the problem of a driver that is not installed, with the extra that brings it."""
    package = error.name or str(error)
    extra = f"airflow-provider-kafka-spark[{'mysql' if 'mysql' in package else 'postgres'}]"
    return Problem("source", f"the package `{package}` is not installed", f"Install it with `pip install '{extra}'`")
