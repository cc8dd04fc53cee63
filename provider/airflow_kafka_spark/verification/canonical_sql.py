"""SQL that brings values into the forms in which they are compared, and adds up checksums, in the dialect of each database."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from airflow_kafka_spark.sources.jdbc.database import SourceColumn
from airflow_kafka_spark.verification.forms import CHECKSUM_DIGITS, FREE_FORMS, Family, Form


class CanonicalSql(ABC):
    """Writes a database's expressions. ``c`` always is an expression of a column."""

    @abstractmethod
    def family(self, column: SourceColumn) -> Family:
        """Return what the values of a column are."""

    @abstractmethod
    def form(self, family: Family, form: Form, c: str) -> str | None:
        """Return the expression for a value in its form, a text; None if the database cannot compute it."""

    @abstractmethod
    def plain(self, form: Form, c: str) -> str:
        """Return the expression that reads a value for :func:`~airflow_kafka_spark.verification.forms.of_value`."""

    @abstractmethod
    def checksum(self, values: Sequence[tuple[Form, str]]) -> str:
        """Return the expression for a row's checksum.

        :param values: per column its form and the expression of :meth:`form`.
        """

    @abstractmethod
    def key_to_neutral(self, family: Family, text: str) -> str:
        """Return a value of a key, which the dialect has written, as both databases understand it."""

    def key_column(self, column: SourceColumn) -> SourceColumn:
        """Return a column of the key, whose literals may be values of the other side."""
        return column

    @abstractmethod
    def key_from_neutral(self, family: Family, text: str) -> str:
        """Return a value of a key for the dialect's literals."""


_LARGEST = 2**63 - 1


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
_SINGLE = "encode(float4send(CAST({c} AS real) + CAST(0 AS real)), 'hex')"
_DOUBLE = "encode(float8send(CAST({c} AS double precision) + 0), 'hex')"


@dataclass(frozen=True)
class PostgresCanonicalSql(CanonicalSql):
    """
    :param trims: True if the server has trim_scale(), which came with release 13.
    """

    trims: bool

    def family(self, column: SourceColumn) -> Family:
        base = column.literal or column.type
        return "array" if base.endswith("[]") else _POSTGRES_FAMILIES.get(base, "other")

    def form(self, family: Family, form: Form, c: str) -> str | None:
        if form == "json":
            return None
        if form in ("integer", "decimal"):
            return self._number(family, form, c)
        if form == "instant":
            if family == "zoned":
                return f"encode(timestamptz_send({c}), 'hex')"
            return f"encode(timestamp_send(CAST({c} AS timestamp)), 'hex')"
        if form == "time":
            return _without_zeros(f"CAST({c} AS text)")
        if form == "single" and family != "single":
            # Beyond a single's range the cast would fail.
            d = f"CAST({c} AS double precision)"
            within = f"abs({d}) BETWEEN 1.2e-38 AND 3.4e38 OR {d} IN (0, 'Infinity', '-Infinity', 'NaN')"
            return f"CASE WHEN {within} THEN {_SINGLE.format(c=c)} ELSE {_DOUBLE.format(c=c)} END"
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

    def _number(self, family: Family, form: Form, c: str) -> str:
        if family == "boolean":
            return f"CAST(CAST({c} AS integer) AS text)"
        if form == "integer" or family == "integer":
            return f"CAST({c} AS text)"
        if family == "decimal" and self.trims:
            return f"CAST(trim_scale({c}) AS text)"
        return _without_zeros(f"CAST({c} AS text)")

    def plain(self, form: Form, c: str) -> str:
        return f"CAST({c} AS text)"

    def checksum(self, values: Sequence[tuple[Form, str]]) -> str:
        parts = [f"octet_length({text}) || ':' || {text}" if form in FREE_FORMS else text for form, text in values]
        # concat() leaves NULL out, and takes 100 arguments.
        groups = [", '|', ".join(parts[first : first + 40]) for first in range(0, len(parts), 40)]
        row = ", '|', ".join(f"concat({group})" for group in groups)
        row = row if len(groups) == 1 else f"concat({row})"
        return f"CAST(CAST('x' || left(md5({row}), {CHECKSUM_DIGITS}) AS bit({CHECKSUM_DIGITS * 4})) AS bigint)"

    def key_to_neutral(self, family: Family, text: str) -> str:
        if family == "binary":
            return text.removeprefix("\\x")
        return text.removesuffix("+00") if family == "zoned" else text

    def key_from_neutral(self, family: Family, text: str) -> str:
        if family == "integer":
            # Beyond the largest integer there is no row.
            return str(min(int(text), _LARGEST))
        return f"\\x{text}" if family == "binary" else text

    def key_column(self, column: SourceColumn) -> SourceColumn:
        # A literal of the column's own type would fail on a larger number of the other side.
        return replace(column, literal="bigint") if self.family(column) == "integer" else column


def _without_zeros(text: str) -> str:
    """Return a number or a time of day without zeros at the end of its fraction."""
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


class MysqlCanonicalSql(CanonicalSql):
    def family(self, column: SourceColumn) -> Family:
        found = re.match(r"[a-z0-9]+", column.type)
        return _MYSQL_FAMILIES.get(found[0] if found else "", "other")

    def form(self, family: Family, form: Form, c: str) -> str | None:
        if form in ("single", "double", "json", "jsonb"):
            return None
        if form in ("integer", "decimal"):
            return _mysql_number(family, form, c)
        if form in ("instant", "date"):
            distance = f"DATEDIFF({c}, DATE'2000-01-01')"
            if form == "instant":
                distance = f"TIMESTAMPDIFF(MICROSECOND, TIMESTAMP'2000-01-01 00:00:00', {c})"
            digits = 8 if form == "date" else 16
            # The zero date (0000-00-00) has no distance from another date.
            return f"COALESCE(LOWER(RIGHT(LPAD(HEX({distance}), 16, '0'), {digits})), CAST({c} AS CHAR))"
        text = f"CONVERT({c} USING utf8mb4)"
        expressions: dict[Form, str] = {
            "binary": f"LOWER(HEX({c}))",
            "uuid": f"LOWER(CAST({c} AS CHAR))",
            "trimmed": f"TRIM(TRAILING ' ' FROM {text})",
            "time": _mysql_without_zeros(f"CAST({c} AS CHAR)"),
        }
        return expressions.get(form, text if family == "text" else f"CAST({c} AS CHAR)")

    def plain(self, form: Form, c: str) -> str:
        # Without the addition, a float would be written with six digits.
        return f"CAST({c} AS CHAR)" if form == "json" else f"({c} + 0e0)"

    def checksum(self, values: Sequence[tuple[Form, str]]) -> str:
        # Bytes, because texts of different collations cannot be joined.
        parts = [
            f"CONCAT(LENGTH({text}), ':', CAST({text} AS BINARY))" if form in FREE_FORMS else f"CAST({text} AS BINARY)"
            for form, text in values
        ]
        row = ", '|', ".join(f"COALESCE({part}, '')" for part in parts)
        return f"CAST(CONV(LEFT(MD5(CONCAT({row})), {CHECKSUM_DIGITS}), 16, 10) AS UNSIGNED)"

    def key_to_neutral(self, family: Family, text: str) -> str:
        return text.lower() if family == "binary" else text

    def key_from_neutral(self, family: Family, text: str) -> str:
        return text


def _mysql_number(family: Family, form: Form, c: str) -> str:
    # The addition makes a number of a bit, an enum's text would become its number.
    text = f"CONVERT({c} USING utf8mb4)" if family == "text" else f"CAST({c} + 0 AS CHAR)"
    if form == "integer" or family in ("integer", "boolean"):
        return text
    return _mysql_without_zeros(text if family == "text" else f"CAST({c} AS CHAR)")


def _mysql_without_zeros(text: str) -> str:
    return f"IF(LOCATE('.', {text}) > 0, TRIM(TRAILING '.' FROM TRIM(TRAILING '0' FROM {text})), {text})"
