"""A database table as one side of a comparison: chunks, checksums and rows, and the SQL that computes them.

The SQL converts values to the forms in which they are compared, and adds up checksums, in the dialect of each database.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from airflow_kafka_spark.errors import SourceRejected
from airflow_kafka_spark.sources.jdbc.database import DatabaseSession, Relation, SourceColumn, SourceDatabase, SplitKey
from airflow_kafka_spark.sources.jdbc.windows import SplitOrder
from airflow_kafka_spark.verification.buckets import Buckets, BucketSums, add_sums
from airflow_kafka_spark.verification.forms import (
    CHECKSUM_DIGITS,
    FREE_FORMS,
    CanonicalRow,
    Family,
    Form,
    Sums,
    compute_row_checksum,
    to_form,
)

LEAST_ROWS = 100_000
"""Number of rows of a part in which a table is read, unless the table is large."""
MOST_PARTS = 32
"""Approximate number of parts of a large table. A page has rows of many parts if the rows are not stored in the order of the key,
and is read once for each of these parts."""


class CanonicalSql(ABC):
    """Builds SQL expressions in the dialect of a database. ``c`` is always the expression of a column."""

    @abstractmethod
    def find_family(self, column: SourceColumn) -> Family:
        """Return the family of a column's type."""

    @abstractmethod
    def make_form(self, family: Family, form: Form, c: str) -> str | None:
        """Return the expression of a value's form, which is a text; None if the database cannot compute it."""

    @abstractmethod
    def make_plain(self, form: Form, c: str) -> str:
        """Return the expression that reads a value for :func:`~airflow_kafka_spark.verification.forms.to_form`."""

    @abstractmethod
    def make_checksum(self, values: Sequence[tuple[Form, str]]) -> str:
        """Return the expression for a row's checksum.

        :param values: per column its form and the expression of :meth:`make_form`.
        """

    @abstractmethod
    def convert_key_to_neutral(self, family: Family, text: str) -> str:
        """Return a key value of this dialect in the notation that both databases understand."""

    def make_key_column(self, column: SourceColumn) -> SourceColumn:
        """Return a column of the key. Its literals may be values of the other side."""
        return column

    @abstractmethod
    def convert_key_from_neutral(self, family: Family, text: str) -> str:
        """Return a key value as a literal of this dialect."""


_LARGEST = 2**63 - 1
TOO_LONG = "too long: "
"""Beginning of the form of a value from which a database cannot compute it. The rest differs each time."""


# --- PostgreSQL -----------------------------------------------------------------------------------------------------------

_POSTGRES_FAMILIES: dict[str, Family] = {
    "smallint": "integer",
    "integer": "integer",
    "bigint": "integer",
    "oid": "integer",
    "boolean": "boolean",
    "numeric": "decimal",
    "real": "single",
    "double precision": "double",
    "text": "text",
    "character varying": "text",
    "name": "text",
    "bpchar": "padded",
    "bytea": "binary",
    "timestamp with time zone": "zoned",
    "timestamp without time zone": "local",
    "date": "date",
    "time without time zone": "time",
    "uuid": "uuid",
    "json": "json",
    "jsonb": "json",
}
# The functions that write the bits of a value: a timestamp's are microseconds, a date's are days, both since 2000-01-01.
# A NaN has many bit patterns, which no query tells apart.
_NAN = "CAST({c} AS double precision) = 'NaN'"
_SINGLE = f"CASE WHEN {_NAN} THEN '7fc00000' ELSE encode(float4send(CAST({{c}} AS real) + CAST(0 AS real)), 'hex') END"
_DOUBLE = f"CASE WHEN {_NAN} THEN '7ff8000000000000' ELSE encode(float8send(CAST({{c}} AS double precision) + 0), 'hex') END"
_LEAST_SINGLE, _BEYOND_SINGLE = "7.006492321624085e-46", "3.4028235677973366e38"
"""Doubles up to the first number are 0 as a single, those from the second one on are too large. The cast fails for both."""


@dataclass(frozen=True)
class PostgresCanonicalSql(CanonicalSql):
    """
    :param trims: True if the server has trim_scale(), which came with release 13.
    """

    trims: bool

    def find_family(self, column: SourceColumn) -> Family:
        base = column.literal or column.type
        return "array" if base.endswith("[]") else _POSTGRES_FAMILIES.get(base, "other")

    def make_form(self, family: Family, form: Form, c: str) -> str | None:
        if form == "json":
            return None
        if form in ("integer", "decimal", "numeral"):
            return self._format_number(family, form, c)
        if form == "instant":
            if family == "zoned":
                return f"encode(timestamptz_send({c}), 'hex')"
            return f"encode(timestamp_send(CAST({c} AS timestamp)), 'hex')"
        if form == "time":
            return _remove_zeros(f"CAST({c} AS text)")
        if form == "single" and family != "single":
            size = f"abs(CAST({c} AS double precision))"
            within = f"{size} < {_BEYOND_SINGLE} OR {size} IN ('Infinity', 'NaN')"
            some = f"WHEN {size} <= {_LEAST_SINGLE} THEN '00000000' WHEN {within} THEN {_SINGLE.format(c=c)}"
            return f"CASE {some} ELSE {_DOUBLE.format(c=c)} END"
        expressions: dict[Form, str] = {
            "single": _SINGLE,
            "double": _DOUBLE,
            "date": "encode(date_send({c}), 'hex')",
            "binary": "encode({c}, 'hex')",
            "uuid": "lower(CAST({c} AS text))",
            "trimmed": "rtrim(CAST({c} AS text), ' ')",
            "jsonb": "CAST(CAST({c} AS jsonb) AS text)",
        }
        return expressions.get(form, "CAST({c} AS text)").format(c=c)

    def _format_number(self, family: Family, form: Form, c: str) -> str:
        if family == "boolean":
            return f"CAST(CAST({c} AS integer) AS text)"
        if form == "integer" or family == "integer":
            return f"CAST({c} AS text)"
        if family == "decimal" and self.trims:
            return f"CAST(trim_scale({c}) AS text)"
        return _remove_zeros(f"CAST({c} AS text)")

    def make_plain(self, form: Form, c: str) -> str:
        return f"CAST({c} AS text)"

    def make_checksum(self, values: Sequence[tuple[Form, str]]) -> str:
        parts = [f"octet_length({text}) || ':' || {text}" if form in FREE_FORMS else text for form, text in values]
        # concat() ignores NULL, and accepts at most 100 arguments.
        groups = [", '|', ".join(parts[first : first + 40]) for first in range(0, len(parts), 40)]
        row = ", '|', ".join(f"concat({group})" for group in groups)
        row = row if len(groups) == 1 else f"concat({row})"
        return f"CAST(CAST('x' || left(md5({row}), {CHECKSUM_DIGITS}) AS bit({CHECKSUM_DIGITS * 4})) AS bigint)"

    def convert_key_to_neutral(self, family: Family, text: str) -> str:
        if family == "binary":
            return text.removeprefix("\\x")
        return text.removesuffix("+00") if family == "zoned" else text

    def convert_key_from_neutral(self, family: Family, text: str) -> str:
        if family == "integer":
            # No row has a key beyond the largest integer.
            return str(min(int(text), _LARGEST))
        return f"\\x{text}" if family == "binary" else text

    def make_key_column(self, column: SourceColumn) -> SourceColumn:
        # A literal of the column's own type would fail on a larger number of the other side.
        return replace(column, literal="bigint") if self.find_family(column) == "integer" else column


def _remove_zeros(text: str) -> str:
    """Return a number or a time of day without trailing zeros in its fraction."""
    return f"CASE WHEN strpos({text}, '.') > 0 THEN rtrim(rtrim({text}, '0'), '.') ELSE {text} END"


# --- MariaDB and MySQL ----------------------------------------------------------------------------------------------------

_MYSQL_FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("tinyint", "smallint", "mediumint", "int", "bigint", "year", "bit"), "integer"),
    **dict.fromkeys(("char", "varchar", "tinytext", "text", "mediumtext", "longtext", "enum", "set"), "text"),
    **dict.fromkeys(("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"), "binary"),
    "decimal": "decimal",
    "float": "single",
    "double": "double",
    "json": "json",
    "datetime": "local",
    "timestamp": "zoned",
    "date": "date",
    "time": "time",
    "uuid": "uuid",
}


class MySqlCanonicalSql(CanonicalSql):
    def find_family(self, column: SourceColumn) -> Family:
        found = re.match(r"[a-z0-9]+", column.type)
        return _MYSQL_FAMILIES.get(found[0] if found else "", "other")

    def make_form(self, family: Family, form: Form, c: str) -> str | None:
        if form in ("single", "double", "json", "jsonb"):
            return None
        if form in ("integer", "decimal", "numeral"):
            return _make_mysql_number(family, form, c)
        if form in ("instant", "date"):
            distance = f"DATEDIFF({c}, DATE'2000-01-01')"
            if form == "instant":
                distance = f"TIMESTAMPDIFF(MICROSECOND, TIMESTAMP'2000-01-01 00:00:00', {c})"
            digits = 8 if form == "date" else 16
            # The zero date (0000-00-00) has no distance from another date.
            return f"COALESCE(LOWER(RIGHT(LPAD(HEX({distance}), 16, '0'), {digits})), CAST({c} AS CHAR))"
        text = f"CONVERT({c} USING utf8mb4)"
        expressions: dict[Form, str] = {
            # A function whose result is longer than `max_allowed_packet` returns NULL.
            "binary": f"COALESCE(LOWER(HEX({c})), IF({c} IS NULL, NULL, CONCAT('{TOO_LONG}', UUID())))",
            "uuid": f"LOWER(CAST({c} AS CHAR))",
            "trimmed": f"TRIM(TRAILING ' ' FROM {text})",
            "time": _remove_mysql_zeros(f"CAST({c} AS CHAR)"),
        }
        return expressions.get(form, text if family == "text" else f"CAST({c} AS CHAR)")

    def make_plain(self, form: Form, c: str) -> str:
        # Without the addition, a float would be written with six digits.
        return f"CAST({c} AS CHAR)" if form == "json" else f"({c} + 0e0)"

    def make_checksum(self, values: Sequence[tuple[Form, str]]) -> str:
        # Bytes, because texts of different collations cannot be joined.
        parts = [
            f"CONCAT(LENGTH({text}), ':', CAST({text} AS BINARY))" if form in FREE_FORMS else f"CAST({text} AS BINARY)"
            for form, text in values
        ]
        row = ", '|', ".join(f"COALESCE({part}, '')" for part in parts)
        checksum = f"CAST(CONV(LEFT(MD5(CONCAT({row})), {CHECKSUM_DIGITS}), 16, 10) AS UNSIGNED)"
        # A row whose text is longer than `max_allowed_packet` has none. With a random one, its chunk differs, and is read.
        return f"COALESCE({checksum}, CAST(FLOOR(RAND() * {1 << 52}) AS UNSIGNED))"

    def convert_key_to_neutral(self, family: Family, text: str) -> str:
        return text.lower() if family == "binary" else text

    def convert_key_from_neutral(self, family: Family, text: str) -> str:
        return text


def _make_mysql_number(family: Family, form: Form, c: str) -> str:
    # The addition makes a number of a bit, an enum's text would become its number.
    text = f"CONVERT({c} USING utf8mb4)" if family == "text" else f"CAST({c} + 0 AS CHAR)"
    if form == "integer" or family in ("integer", "boolean"):
        return text
    return _remove_mysql_zeros(text if family == "text" else f"CAST({c} AS CHAR)")


def _remove_mysql_zeros(text: str) -> str:
    return f"IF(LOCATE('.', {text}) > 0, TRIM(TRAILING '.' FROM TRIM(TRAILING '0' FROM {text})), {text})"


@dataclass(frozen=True)
class Chunk:
    """A range of the key: the rows after ``after``, up to and including ``upto``.

    :param after: the last key before the range; None if it has no lower bound.
    :param upto: the last key of the range; None if it has no upper bound.
    :param nulls: True for the rows whose key contains a NULL.
    """

    after: SplitKey | None = None
    upto: SplitKey | None = None
    nulls: bool = False

    def __str__(self) -> str:
        """Return the range in words, for a log line."""
        if self.nulls:
            return "whose key has a NULL"
        after, upto = (", ".join(map(str, key)) if key else "" for key in (self.after, self.upto))
        parts = [*([f"after key {after}"] if after else []), *([f"up to key {upto}"] if upto else [])]
        return " ".join(parts) or "of any key"

    def to_json(self) -> dict[str, Any]:
        """Return the chunk as JSON, for the saved state of a task."""
        return {"after": self.after and list(self.after), "upto": self.upto and list(self.upto), "nulls": self.nulls}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Chunk:
        """Return the chunk from the result of :meth:`to_json`."""
        after, upto = value["after"], value["upto"]
        return cls(None if after is None else tuple(after), None if upto is None else tuple(upto), value["nulls"])


@dataclass(frozen=True)
class DatabaseSide:
    """A database table, with the columns and the forms in which its rows are compared.

    :param database: the server.
    :param relation: the table or query.
    :param columns: the columns that are compared, the key's columns first.
    :param forms: the form of each column.
    :param key: the number of columns of the key.
    :param where: a condition for the rows that are compared; empty for all.
    :param sql: the database's expressions.
    :param piece_rows: number of rows of the parts in which the table is read; None: see :meth:`choose_piece_rows`.
    """

    database: SourceDatabase
    relation: Relation
    columns: tuple[SourceColumn, ...]
    forms: tuple[Form, ...]
    key: int
    where: str
    sql: CanonicalSql
    piece_rows: int | None = None

    @property
    def name(self) -> str:
        return self.relation.name

    def open_session(self, doing: str) -> AbstractContextManager[DatabaseSession]:
        """Open a session; see :meth:`SourceDatabase.open_session`."""
        return self.database.open_session(doing)

    def estimate_rows(self, session: DatabaseSession) -> int:
        """Return the number of rows that the server estimates."""
        return session.estimate_rows(self.make_rows_clause(session, Chunk()))

    def choose_piece_rows(self, rows: int) -> int:
        """Return the number of rows of the parts in which the table is read.

        :param rows: the number of all rows, as :meth:`estimate_rows` returns it.
        """
        return self.piece_rows or max(LEAST_ROWS, rows // MOST_PARTS)

    @property
    def is_indexed(self) -> bool:
        """True if an index returns the rows in the order of the key."""
        names = tuple(column.name for column in self.columns[: self.key])
        return any(index[: self.key] == names for index in self.relation.indexes)

    def has_nulls(self) -> bool:
        """Return True if a column of the key may be NULL."""
        return any(column.nullable for column in self.columns[: self.key])

    def end_of(self, session: DatabaseSession, chunk: Chunk, size: int) -> SplitKey | None:
        """Return the key of row number ``size`` of a chunk; None if the chunk has fewer rows."""
        order = self._make_order(session)
        if self.is_indexed:
            session.prefer_indexes()
        row = f"SELECT {order.sql} FROM {self.make_rows_clause(session, chunk)} ORDER BY {order.sql} LIMIT 1 OFFSET {size - 1}"
        found = session.fetch_rows(f"SELECT {order.texts} FROM ({row}) AS __end")
        if not found:
            return None
        families = [self.sql.find_family(column) for column in order.columns]
        return tuple(self.sql.convert_key_to_neutral(family, text) for family, text in zip(families, found[0], strict=True))

    def compute_sums(self, session: DatabaseSession, chunk: Chunk) -> Sums:
        """Return the number of rows of a chunk and the sum of their checksums. The database adds up if it supports all forms."""
        if self._knows_forms(session):
            ((rows, total),) = session.fetch_rows(self._make_sums_statement(session, chunk))
            return Sums(int(rows), int(total))
        rows = total = 0
        for row in self.read_rows(session, chunk):
            rows, total = rows + 1, total + compute_row_checksum(row, self.forms)
        return Sums(rows, total)

    def read_rows(self, session: DatabaseSession, chunk: Chunk) -> Iterator[CanonicalRow]:
        """Return the rows of a chunk, with each value in its form."""
        return self._read(session, self.make_rows_clause(session, chunk))

    def _read(self, session: DatabaseSession, rows: str) -> Iterator[CanonicalRow]:
        raw = [(n, self.forms[n]) for n, (known, _) in enumerate(self._make_expressions(session)) if known is None]
        binary = [n for n, form in enumerate(self.forms) if form == "binary"]
        for found in session.stream_rows(self._make_rows_statement(session, rows)):
            row = [value.decode() if isinstance(value, bytes) else value for value in found]
            for n, form in raw:
                row[n] = to_form(form, row[n])
            for n in binary:
                if row[n] is not None and row[n].startswith(TOO_LONG):
                    what = f"a value of `{self.columns[n].name}` has more bytes than half of the server's `max_allowed_packet`"
                    raise SourceRejected(self.name, what, "Increase it, or leave the column out with `exclude_columns=`")
            yield tuple(row)

    # --- by buckets ---

    def estimate_row_count(self) -> int:
        """See :class:`~airflow_kafka_spark.verification.buckets.BucketSide`, also for the next ones."""
        with self.open_session("asking for the number of rows") as session:
            return self.estimate_rows(session)

    def read_pieces(self) -> Iterator[Chunk]:
        after: SplitKey | None = None
        size = self.choose_piece_rows(self.estimate_row_count())
        while self.is_indexed:
            with self.open_session("cutting a piece") as session:
                end = self.end_of(session, Chunk(after), size)
            if end is None:
                break
            yield Chunk(after, end)
            after = end
        yield Chunk(after)
        if self.has_nulls():
            yield Chunk(nulls=True)

    def sum_buckets(self, piece: Chunk, buckets: Buckets) -> BucketSums:
        with self.open_session("adding up a piece") as session:
            if self._knows_forms(session):
                return self._query_bucket_sums(session, piece, buckets)
            total: BucketSums = {}
            for row in self.read_rows(session, piece):
                number = buckets.find(compute_row_checksum(row[: self.key], self.forms[: self.key]))
                if number is not None:
                    add_sums(total, number, Sums(1, compute_row_checksum(row, self.forms)))
            return total

    def _query_bucket_sums(self, session: DatabaseSession, piece: Chunk, buckets: Buckets) -> BucketSums:
        key, checksum = self._make_checksum(session, self.key), self._make_checksum(session, len(self.forms))
        rows = self._make_bucket_clause(session, piece, buckets)
        each = f"SELECT {key} % {buckets.count} AS bucket, {checksum} AS checksum FROM {rows}"
        found = session.fetch_rows(f"SELECT bucket, count(*), sum(checksum) FROM ({each}) AS rows_of_buckets GROUP BY bucket")
        return {int(number): Sums(int(count), int(total)) for number, count, total in found}

    def read_bucket_rows(self, piece: Chunk, buckets: Buckets) -> list[CanonicalRow]:
        key = self.forms[: self.key]
        with self.open_session("reading rows of some buckets") as session:
            found = self._read(session, self._make_bucket_clause(session, piece, buckets))
            return [row for row in found if buckets.find(compute_row_checksum(row[: self.key], key)) is not None]

    def _make_bucket_clause(self, session: DatabaseSession, piece: Chunk, buckets: Buckets) -> str:
        """Return the FROM clause for the rows of some buckets, or for more rows if the database lacks the key's form."""
        known = all(known is not None for known, _ in self._make_expressions(session)[: self.key])
        if buckets.chosen is None or not known:
            return self.make_rows_clause(session, piece)
        numbers = ", ".join(map(str, sorted(buckets.chosen)))
        return self.make_rows_clause(
            session, piece, f"{self._make_checksum(session, self.key)} % {buckets.parents} IN ({numbers})"
        )

    # --- statements ---

    def explain(self) -> None:
        """Let the server plan the statement for all rows, without running it.

        :raises SourceRejected: the condition is wrong, or a right is missing.
        """
        with self.open_session("trying the statement") as session:
            session.fetch_rows(f"EXPLAIN {self._make_rows_statement(session, self.make_rows_clause(session, Chunk()))}")

    def _make_sums_statement(self, session: DatabaseSession, chunk: Chunk) -> str:
        checksum = self._make_checksum(session, len(self.forms))
        return f"SELECT count(*), coalesce(sum({checksum}), 0) FROM {self.make_rows_clause(session, chunk)}"

    def _make_checksum(self, session: DatabaseSession, columns: int) -> str:
        """Return the expression for the checksum of the first columns. The database supports their forms."""
        known = [(form, str(value)) for form, (value, _) in zip(self.forms, self._make_expressions(session), strict=True)]
        return self.sql.make_checksum(known[:columns])

    def _make_rows_statement(self, session: DatabaseSession, rows: str) -> str:
        return f"SELECT {', '.join(known or plain for known, plain in self._make_expressions(session))} FROM {rows}"

    def _knows_forms(self, session: DatabaseSession) -> bool:
        return all(known is not None for known, _ in self._make_expressions(session))

    def _make_expressions(self, session: DatabaseSession) -> list[tuple[str | None, str]]:
        """Return for each column the expression of its form, None if the database has none, and that of its plain value."""
        found = []
        for column, form in zip(self.columns, self.forms, strict=True):
            name = session.dialect.quote(column.name)
            found.append((self.sql.make_form(self.sql.find_family(column), form, name), self.sql.make_plain(form, name)))
        return found

    def _make_order(self, session: DatabaseSession) -> SplitOrder:
        columns = tuple(self.sql.make_key_column(column) for column in self.columns[: self.key])
        return SplitOrder(session, columns, tuple(session.dialect.quote(column.name) for column in columns))

    def make_rows_clause(self, session: DatabaseSession, chunk: Chunk, *further: str) -> str:
        """Return the FROM clause for the rows of a chunk.

        :param further: further conditions.
        """
        order = self._make_order(session)
        conditions = [*([f"{self.where}\n"] if self.where else []), *further]
        if chunk.nulls:
            conditions.append(order.make_null_condition() or "1 = 0")
        else:
            conditions += order.make_not_null_condition()
            conditions += [order.make_after_condition(self._convert_key(order, chunk.after))] if chunk.after is not None else []
            conditions += [order.make_up_to_condition(self._convert_key(order, chunk.upto))] if chunk.upto is not None else []
        return self.relation.sql + (f" WHERE {' AND '.join(f'({c})' for c in conditions)}" if conditions else "")

    def _convert_key(self, order: SplitOrder, key: Sequence[str]) -> list[str]:
        return [
            self.sql.convert_key_from_neutral(self.sql.find_family(column), text)
            for column, text in zip(order.columns, key, strict=True)
        ]
