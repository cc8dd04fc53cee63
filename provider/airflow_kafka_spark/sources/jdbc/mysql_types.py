"""How each type of MariaDB and MySQL is read so that no value changes on its way into Spark."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_kafka_spark.sources.jdbc.database import Column

SPARK_DIGITS = 38
# What an integer becomes, signed and unsigned.
_INTEGERS = {
    "tinyint": ("tinyint", "smallint"),
    "smallint": ("smallint", "int"),
    "mediumint": ("int", "int"),
    "int": ("int", "bigint"),
    "bigint": ("bigint", "decimal(20,0)"),
}
_CHARACTERS = frozenset({"char", "varchar", "tinytext", "text", "mediumtext", "longtext", "json", "enum", "set"})
_BYTES = frozenset({"binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"})
_OTHERS = frozenset({"uuid", "inet4", "inet6"})
_INCREASING = frozenset({*_INTEGERS, "decimal", "char", "varchar", "datetime", "timestamp", "uuid"})
_CLOCKS = {"timestamp": "zoned", "datetime": "local", "date": "date"}
# Farther away than any day these servers know.
_NO_DAY = -(2**62)
_EPOCH = "TIMESTAMP'1970-01-01 00:00:00'"


@dataclass(frozen=True)
class Facts:
    """What the server tells of a column.

    :param kind: the type's name in lower case, without sizes.
    :param declared: with sizes, for people.
    :param collation: of a text, where it is known.
    """

    name: str
    kind: str
    declared: str
    nullable: bool
    unsigned: bool = False
    precision: int = 0
    scale: int = 0
    charset: str = ""
    collation: str = ""
    readable: bool = True


def column(facts: Facts) -> Column:
    select, spark, problem = _read(facts)
    return Column(
        name=facts.name,
        type=facts.declared,
        nullable=facts.nullable,
        literal=_literal(facts),
        clock=_CLOCKS.get(facts.kind, ""),
        increases=facts.kind in _INCREASING,
        select=select,
        spark=spark,
        problem=problem,
        readable=facts.readable,
    )


def _literal(facts: Facts) -> str:
    """How values of the type are written and compared; see :class:`MysqlDialect`."""
    if facts.kind in _INTEGERS or facts.kind in ("decimal", "year"):
        return "number"
    if facts.kind in ("enum", "set", "bit"):
        # They are sorted by the number behind the text, and compared with a text by the text.
        return "ordinal"
    if facts.kind in ("float", "double"):
        return "double"
    if facts.kind in ("datetime", "timestamp", "date", "time", "uuid"):
        return facts.kind
    if facts.kind in _BYTES:
        return "binary"
    if facts.kind in _CHARACTERS and facts.kind != "json":
        return f"text {facts.charset} {facts.collation}".rstrip()
    return ""


def _read(facts: Facts) -> tuple[str, str, str]:
    """What is read, what Spark makes of it, and why it cannot be read."""
    kind = facts.kind
    if kind in _INTEGERS:
        spark = _INTEGERS[kind][facts.unsigned]
        # As it is, tinyint(1) would become a boolean.
        select = "CAST({c} AS DECIMAL(20,0))" if spark.startswith("decimal") else "CAST({c} AS SIGNED)"
        return select, f"CAST({{c}} AS {spark})", ""
    if kind == "decimal":
        return ("{c}" if facts.precision <= SPARK_DIGITS else "CAST({c} AS CHAR)"), "{c}", ""
    if kind in ("float", "double"):
        # As it is, a float would be written with six digits.
        return "({c} + 0e0)", f"CAST({{c}} AS {kind})", ""
    if kind == "bit":
        return _bits(facts.precision)
    if kind in _CLOCKS:
        return _moment(facts)
    simple = {"year": ("CAST({c} AS SIGNED)", "CAST({c} AS int)", ""), "time": ("CAST({c} AS CHAR)", "{c}", "")}
    if kind in simple:
        return simple[kind]
    if kind in _CHARACTERS:
        return "CONVERT({c} USING utf8mb4)", "{c}", ""
    if kind in _BYTES:
        return "{c}", "CAST({c} AS binary)", ""
    if kind in _OTHERS:
        return "CAST({c} AS CHAR)", "{c}", ""
    return "NULL", "{c}", "values of its type cannot be read"


def _bits(size: int) -> tuple[str, str, str]:
    if size == 1:
        return "CAST({c} AS SIGNED)", "CAST({c} AS boolean)", ""
    if size < 64:
        return "CAST({c} AS SIGNED)", "CAST({c} AS bigint)", ""
    return "CAST(CAST({c} AS UNSIGNED) AS DECIMAL(20,0))", "CAST({c} AS decimal(20,0))", ""


def _moment(facts: Facts) -> tuple[str, str, str]:
    if facts.kind == "date":
        value, spark = "DATEDIFF({c}, DATE'1970-01-01')", "date_from_unix_date(CAST({c} AS int))"
    else:
        value = f"TIMESTAMPDIFF(MICROSECOND, {_EPOCH}, {{c}})"
        spark = (
            "timestamp_micros(CAST({c} AS bigint))"
            if facts.kind == "timestamp"
            else "CAST(timestamp_micros(CAST({c} AS bigint)) AS timestamp_ntz)"
        )
    # A day that is none (0000-00-00) has no distance from another, and would silently become NULL.
    told = f"column `{facts.name}` holds a day that is none, as 0000-00-00".replace("\\", "\\\\").replace("'", "\\'")
    told = told.replace("{", "{{").replace("}", "}}")
    select = f"CASE WHEN {{c}} IS NULL THEN NULL ELSE COALESCE({value}, {_NO_DAY}) END"
    return select, f"if(CAST({{c}} AS bigint) = {_NO_DAY}, raise_error('{told}'), {spark})", ""
