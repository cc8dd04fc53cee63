"""Tables as the catalog describes them now, in the form in which the log describes them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from airflow_kafka_spark.errors import SourceRejected
from airflow_kafka_spark.sources.cdc.tasks.events import TableName
from airflow_kafka_spark.sources.jdbc.database import MissingRelation, Relation
from airflow_kafka_spark.sources.jdbc.mysql import MySqlDialect, MySqlSession
from airflow_kafka_spark.sources.mysql_cdc.tasks import binlog
from airflow_kafka_spark.sources.mysql_cdc.tasks.binlog import LogColumn, LogTable
from airflow_kafka_spark.sources.mysql_cdc.tasks.session import NEW_PIPELINE, LogServer
from airflow_kafka_spark.sources.mysql_cdc.tasks.values import BINARY, CODECS, ColumnRefused, ValueForm, read_column

if TYPE_CHECKING:
    from pymysql.connections import Connection

DIALECT = MySqlDialect()

ENGINE = "InnoDB"
"""The engine whose tables can be read in a snapshot whose coordinates in the log are known."""

_KINDS = {
    "tinyint": binlog.TINY, "smallint": binlog.SHORT, "mediumint": binlog.INT24, "int": binlog.LONG, "bigint": binlog.LONGLONG,
    "float": binlog.FLOAT, "double": binlog.DOUBLE, "decimal": binlog.NEWDECIMAL, "year": binlog.YEAR, "bit": binlog.BIT,
    "date": binlog.DATE, "time": binlog.TIME2, "datetime": binlog.DATETIME2, "timestamp": binlog.TIMESTAMP2,
    "char": binlog.STRING, "binary": binlog.STRING, "varchar": binlog.VARCHAR, "varbinary": binlog.VARCHAR,
    "enum": binlog.ENUM, "set": binlog.SET, "json": binlog.JSON,
    "uuid": binlog.STRING, "inet4": binlog.STRING, "inet6": binlog.STRING, "vector": binlog.VECTOR,
}  # fmt: skip
_SIZES = {"tiny": 1, "": 2, "medium": 3, "long": 4}

_COLUMNS = (
    "SELECT column_name, data_type, column_type, numeric_precision, numeric_scale, datetime_precision, character_set_name, "
    "character_octet_length, is_nullable FROM information_schema.columns WHERE table_schema = %s AND table_name = %s "
    "ORDER BY ordinal_position"
)


class _ColumnRow(NamedTuple):
    """A row of :data:`_COLUMNS`."""

    name: str
    kind: str
    declared: str
    precision: int | None
    scale: int | None
    time_precision: int | None
    charset: str | None
    octets: int | None
    nullable: str


@dataclass(frozen=True)
class MySqlTableShape:
    """A table as it is now.

    :param table: its columns, as the log would describe them.
    :param source: its name for a ``FROM`` clause.
    :param key: the columns by which its rows are cut into chunks: those of a unique key; empty if it has none that can be
        compared.
    :param types: per column of the key, the form in which :class:`MySqlDialect` writes and compares its values.
    """

    table: LogTable
    source: str
    key: tuple[str, ...]
    types: tuple[str, ...]

    @property
    def shown(self) -> str:
        """The table's name for messages."""
        return f"{self.table.database}.{self.table.name}"

    @property
    def expressions(self) -> str:
        """The columns, for a query whose results :attr:`ReadColumn.of_query` takes."""
        # A float is shown with six digits, unless it is an operand.
        return ", ".join(
            DIALECT.quote(column.name) + (" * 1e0" if column.kind in (binlog.FLOAT, binlog.DOUBLE) else "")
            for column in self.table.columns
        )

    def refuse_other_key(self, key: tuple[str, ...], types: tuple[str, ...]) -> None:
        """Refuse a key that is not the key by which the table was cut so far.

        :raises SourceRejected: the table has another key.
        """
        if (self.key, self.types) != (key, types):
            found, planned = (
                ", ".join(f"{name} ({of})" for name, of in zip(*part, strict=True)) or "none"
                for part in ((self.key, self.types), (key, types))
            )
            what = f"its key is {found}, and its snapshot was begun by {planned}"
            raise SourceRejected(self.shown, what, f"Restore the key until the snapshot is complete. {NEW_PIPELINE}")


def read_table_shape(server: LogServer, connection: Connection, name: TableName, form: ValueForm) -> MySqlTableShape | None:
    """Return the present definition of a table; None if no table has this name.

    :raises SourceRejected: its engine has no snapshots.
    """
    session = MySqlSession(connection, server.server)
    found = session.find_table(*name)
    if isinstance(found, MissingRelation):
        return None
    with connection.cursor() as cursor:
        cursor.execute("SELECT engine FROM information_schema.tables WHERE table_schema = %s AND table_name = %s", name)
        (engine,) = cursor.fetchone()
        cursor.execute(_COLUMNS, name)
        columns = [_make_log_column(form, _ColumnRow(*row)) for row in cursor.fetchall()]
        cursor.execute(
            "SELECT column_name FROM information_schema.statistics WHERE table_schema = %s AND table_name = %s "
            "AND index_name = 'PRIMARY' ORDER BY seq_in_index",
            name,
        )
        primary = [str(row[0]) for row in cursor.fetchall()]
    if engine != ENGINE:
        what = f"its engine is {engine}, and a snapshot of it would have no coordinates in the log"
        raise SourceRejected(".".join(name), what, f"ALTER TABLE {found.name} ENGINE = {ENGINE}, or leave the table out")
    names = [column.name for column in columns]
    table = LogTable(0, *name, columns, tuple(names.index(column) for column in primary))
    key = _choose_cut_columns(found, {column.name: column for column in columns}, form)
    return MySqlTableShape(table, found.name, key, tuple(found.columns[column].literal for column in key))


def _choose_cut_columns(relation: Relation, columns: dict[str, LogColumn], form: ValueForm) -> tuple[str, ...]:
    """Return the columns of the first unique key whose values can be compared; empty without such a key."""
    for key in relation.keys:
        try:
            if all(read_column(columns[name], form).key is not None for name in key):
                return key
        except ColumnRefused:
            continue
    return ()


def _make_log_column(form: ValueForm, row: _ColumnRow) -> LogColumn:
    """Return a column as the log describes it."""
    kind, code, meta = row.kind.lower(), _KINDS.get(row.kind.lower()), b""
    if text := re.fullmatch(r"(tiny|medium|long|)(?:text|blob)", kind):
        code, meta = binlog.BLOB, bytes([_SIZES[text[1]]])
    elif code is None:
        code, meta = binlog.GEOMETRY, b"\4"
    elif kind in ("json", "vector"):
        meta = b"\4"
    elif kind == "decimal":
        meta = bytes([int(row.precision or 0), int(row.scale or 0)])
    elif kind in ("time", "datetime", "timestamp"):
        meta = bytes([int(row.time_precision or 0)])
    elif kind == "bit":
        meta = bytes([int(row.precision or 0) % 8, int(row.precision or 0) // 8])
    elif kind in ("varchar", "varbinary"):
        meta = int(row.octets or 0).to_bytes(2, "little")
    elif kind in ("char", "binary"):
        length = int(row.octets or 0)
        meta = bytes([binlog.STRING ^ (length & 0x300) >> 4, length & 0xFF])
    elif kind in ("enum", "set"):
        meta = bytes([code, 1])
    values = tuple(map(_unescape, re.findall(r"'((?:[^']|'')*)'", row.declared))) if code in _CHOSEN else ()
    charset = row.charset
    collation = BINARY if charset is None else next((n for n, of in sorted(form.charsets.items()) if of == charset), 0)
    codec = "cp1252" if charset == "latin1" else CODECS.get(charset or "", "latin1")
    encoded = tuple(value.encode(codec, "replace") for value in values)
    geometry, is_unsigned = int(kind == "point"), "unsigned" in row.declared.lower()
    return LogColumn(code, meta, row.name, is_unsigned, collation, encoded, geometry, row.nullable == "YES")


_CHOSEN = (binlog.ENUM, binlog.SET)
_ESCAPED = {"''": "'", r"\n": "\n", r"\r": "\r", r"\0": "\0"}


def _unescape(text: str) -> str:
    """Return a value of an ENUM or SET from the declaration of its column in the catalog."""
    return re.sub(r"''|\\(.)", lambda found: _ESCAPED.get(found[0], found[1]), text)
