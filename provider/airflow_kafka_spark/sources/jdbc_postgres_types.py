"""How each type of PostgreSQL is read so that no value changes on its way into Spark.

Timestamps cross as microseconds and dates as days: on the way through ``java.sql.Timestamp`` they would depend on the JVM's zone
and calendar. What Spark has no type for crosses as the text that the database itself writes.
"""

from __future__ import annotations

from airflow_kafka_spark.formats.base import Kind
from airflow_kafka_spark.hooks.postgres import literal
from airflow_kafka_spark.sources.jdbc_database import Column

SPARK_DIGITS = 38
ZONED, LOCAL, DATE = "timestamp with time zone", "timestamp without time zone", "date"

_PLAIN = {
    "smallint": "smallint",
    "integer": "int",
    "bigint": "bigint",
    "real": "float",
    "double precision": "double",
    "boolean": "boolean",
    "bytea": "binary",
}
_TEXTS = frozenset({"text", "character varying"})
_INCREASING = frozenset({"smallint", "integer", "bigint", "numeric", "oid", "uuid", "text", "character varying", ZONED, LOCAL})

# Exact for every timestamp there is. Before PostgreSQL 14, extract() gave a double, which holds no microseconds of far centuries.
MICROS = "CAST(extract(epoch FROM {c}) * 1000000 AS bigint)"
MICROS_BEFORE_14 = (
    "(CAST(date_part('epoch', date_trunc('second', {c})) AS bigint) * 1000000 "
    "+ CAST(date_part('microseconds', {c}) AS bigint) % 1000000)"
)
_CLOCKS = {ZONED: "zoned", LOCAL: "local", DATE: "date"}


def column(name: str, facts: tuple, *, required: bool, dimensions: int, readable: bool, micros: str) -> Column:
    """A column of a relation or query.

    :param facts: the declared type, the type behind its domains, that one's modifier and kind, the type and kind of an array's
        elements, and whether a btree index can order it.
    :param micros: the expression for a timestamp's microseconds.
    """
    declared, base, modifier, _, element, element_kind, orders = facts
    kind: Kind | None = None
    if element:
        select, spark = _array(name, element, modifier, dimensions, domain=element_kind == "d")
        task, orders = select, False
        # Arrays of several dimensions are read as the server's own JSON.
        kind = "text" if dimensions > 1 else None
    else:
        select, spark = _scalar(name, base, modifier, micros)
        kind, task = _by_task(name, base, modifier, select)
    return Column(
        name=name,
        type=declared,
        nullable=not required,
        literal=base if orders else "",
        clock=_CLOCKS.get(base, ""),
        increases=base in _INCREASING,
        select=select,
        spark=spark,
        kind=kind,
        task=task,
        readable=readable,
    )


def _scalar(name: str, base: str, modifier: int, micros: str) -> tuple[str, str]:
    if base in _PLAIN or base in _TEXTS:
        return ("CAST({c} AS text)" if base in _TEXTS else "{c}"), "{c}"
    if base == "oid":
        return "CAST({c} AS bigint)", "{c}"
    if base == "bpchar":
        # As text it would lose the blanks that belong to it.
        return (f"rpad(CAST({{c}} AS text), {modifier - 4})" if modifier > 4 else "CAST({c} AS text)"), "{c}"
    if base == "numeric":
        return ("{c}" if _fits(modifier) else "CAST({c} AS text)"), "{c}"
    if base in (ZONED, LOCAL):
        spark = "timestamp_micros({c})"
        return _finite(name, micros), spark if base == ZONED else f"CAST({spark} AS timestamp_ntz)"
    if base == DATE:
        return _finite(name, "({c} - DATE '1970-01-01')", "integer"), "date_from_unix_date({c})"
    return "CAST({c} AS text)", "{c}"


def _by_task(name: str, base: str, modifier: int, select: str) -> tuple[Kind | None, str]:
    """What a task reads, which needs no detour for what Arrow has a type for."""
    if base in ("real", "double precision"):
        return None, select
    if base in ("smallint", "integer", "bigint", "boolean", "bytea"):
        kind: Kind = "boolean" if base == "boolean" else "binary" if base == "bytea" else "integer"
        return kind, f"CAST({{c}} AS {base})"
    if base == "oid":
        return "integer", select
    if base == "numeric" and _fits(modifier):
        # As text it comes at a quarter of the cost.
        return ("decimal" if (modifier - 4) & 2047 <= 6 else "fine decimal"), "CAST({c} AS text)"
    if base in _LAST:
        return _KINDS[base], _held(name, base)
    return "text", select


# The last of each type that fits into Spark's microseconds, and into Arrow's: ADBC would begin again from the other end.
_LAST = {ZONED: "294247-01-10 04:00:54.775807+00", LOCAL: "294247-01-10 04:00:54.775807", DATE: "5874897-12-31"}
_KINDS: dict[str, Kind] = {ZONED: "zoned", LOCAL: "local", DATE: "date"}


def _held(name: str, base: str) -> str:
    told = _escaped(literal(f'column "{name}" holds '))
    within = f"{{c}} > CAST('-infinity' AS {base}) AND {{c}} <= CAST('{_LAST[base]}' AS {base})"
    return f"CASE WHEN {within} THEN {{c}} WHEN {{c}} IS NULL THEN NULL ELSE CAST({told} || {{c}} AS {base}) END"


def _fits(modifier: int) -> bool:
    """Whether ``numeric(p,s)`` is one of Spark's decimals."""
    if modifier < 0:
        return False
    precision, scale = (modifier - 4) >> 16, (((modifier - 4) & 2047) ^ 1024) - 1024
    return precision <= SPARK_DIGITS and 0 <= scale <= precision


def _finite(name: str, expression: str, kind: str = "bigint") -> str:
    """An error that says what is wrong instead of a value that cannot be. Not a constant: it would be raised when planning."""
    told = _escaped(literal(f'column "{name}" holds '))
    return f"CASE WHEN isfinite({{c}}) THEN {expression} WHEN {{c}} IS NULL THEN NULL ELSE CAST({told} || {{c}} AS {kind}) END"


def _array(name: str, element: str, modifier: int, dimensions: int, *, domain: bool) -> tuple[str, str]:
    if dimensions > 1:
        return "CAST(array_to_json({c}) AS text)", "{c}"
    select, spark = _elements("" if domain else element, modifier)
    told = _escaped(literal(f'column "{name}" holds an array of more than one dimension: '))
    flat = f"CAST({told} || array_ndims({{c}}) AS integer)"
    return f"CASE WHEN array_ndims({{c}}) > 1 AND {flat} > 0 THEN NULL ELSE {select} END", spark


def _elements(element: str, modifier: int) -> tuple[str, str]:
    if element in _PLAIN and element != "bytea":
        return "{c}", "{c}"
    if element == "numeric" and _fits(modifier):
        kind = f"decimal({(modifier - 4) >> 16},{(modifier - 4) & 2047})"
        return "CAST({c} AS text[])", f"transform({{c}}, x -> CAST(x AS {kind}))"
    casts = {ZONED: "CAST(x AS timestamp)", LOCAL: "CAST(x AS timestamp_ntz)", DATE: "CAST(x AS date)"}
    if element == "bytea":
        casts["bytea"] = "unhex(substr(x, 3))"
    cast = casts.get(element)
    return "CAST({c} AS text[])", f"transform({{c}}, x -> {cast})" if cast else "{c}"


def _escaped(text: str) -> str:
    """For a place in a template."""
    return text.replace("{", "{{").replace("}", "}}")
