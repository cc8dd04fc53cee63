"""The columns of a stage and of its target: Arrow types as PostgreSQL types, the columns of a target that they fit into, and the
columns that the target lacks, which are added with ``auto_evolve`` and reported otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from airflow_kafka_spark.errors import Problem, SinkRejected
from airflow_kafka_spark.errors.base import quote_names
from airflow_kafka_spark.hooks.databases import Name, quote, run
from airflow_kafka_spark.sinks.postgres import sql
from airflow_kafka_spark.sinks.postgres.server import Table, TargetColumn, make_lock_key, read_table
from airflow_kafka_spark.sinks.postgres.sql import MergeColumn

if TYPE_CHECKING:
    import psycopg
    import pyarrow as pa

    from airflow_kafka_spark.sinks.base import Shape
    from airflow_kafka_spark.sinks.postgres.options import PostgresSinkOptions

log = logging.getLogger(__name__)


Holds = Literal["value", "array", "json", "nothing"]


class UnsupportedType(ValueError):
    """Raised for an Arrow type that has no counterpart in PostgreSQL."""


@dataclass(frozen=True)
class StageColumn:
    """A column as it is sent to PostgreSQL.

    :param name: its name.
    :param arrow: the Arrow type that is sent. Values are cast to it or, for ``json``, written as JSON text.
    :param sql: the PostgreSQL type that ADBC's binary COPY writes for it. The column must have exactly this type: nothing checks
        it, and the bytes would be read as something else.
    :param holds: the kind of its values: ``value``, ``array``, ``json`` (as text) or ``nothing`` (Arrow's null type).
    """

    name: str
    arrow: pa.DataType
    sql: str
    holds: Holds = "value"


def make_stage_column(name: str, arrow: pa.DataType) -> StageColumn:
    """Return the column that is sent for an Arrow type.

    :raises UnsupportedType: PostgreSQL has no column type for it.
    """
    import pyarrow as pa

    arrow = _unwrap_type(arrow)
    if pa.types.is_null(arrow):
        return StageColumn(name, pa.string(), "text", "nothing")
    if (scalar := _find_scalar_type(arrow)) is not None:
        return StageColumn(name, *scalar)
    if _is_list(arrow):
        element = _unwrap_type(arrow.value_type)
        if (scalar := _find_scalar_type(element)) is not None:
            return StageColumn(name, pa.list_(scalar[0]), f"{scalar[1]}[]", "array")
    if _is_list(arrow) or pa.types.is_struct(arrow) or pa.types.is_map(arrow):
        check_json(arrow)
        return StageColumn(name, pa.string(), "text", "json")
    raise UnsupportedType(f"PostgreSQL has no column type for Arrow's {arrow}")


def get_created_type(column: StageColumn) -> str:
    """Return the type of a column that the sink creates."""
    return "jsonb" if column.holds == "json" else column.sql


def check_json(arrow: pa.DataType) -> None:
    """Check that values of a type can be written as JSON.

    :raises UnsupportedType: the type, or one inside of it, has no form in JSON.
    """
    import pyarrow as pa

    arrow = _unwrap_type(arrow)
    if pa.types.is_map(arrow):
        check_json(arrow.key_type)
        check_json(arrow.item_type)
    elif pa.types.is_struct(arrow):
        for field in arrow:
            check_json(field.type)
    elif _is_list(arrow):
        check_json(arrow.value_type)
    elif not pa.types.is_null(arrow) and (_find_scalar_type(arrow) is None or _is_span(arrow)):
        raise UnsupportedType(f"Arrow's {arrow} has no form in JSON")


def _is_span(arrow: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_duration(arrow) or pa.types.is_interval(arrow)


def _unwrap_type(arrow: pa.DataType) -> pa.DataType:
    """Return the type without dictionary encoding and without Arrow's extension type for JSON."""
    import pyarrow as pa

    if pa.types.is_dictionary(arrow):
        return _unwrap_type(arrow.value_type)
    if isinstance(arrow, pa.BaseExtensionType) and arrow.extension_name == "arrow.json":
        return arrow.storage_type
    return arrow


def _is_list(arrow: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_list(arrow) or pa.types.is_large_list(arrow) or pa.types.is_fixed_size_list(arrow)


def _find_scalar_type(t: pa.DataType) -> tuple[pa.DataType, str] | None:
    """Return the Arrow type that is sent for a scalar type, and its PostgreSQL type; None if it is no scalar type."""
    import pyarrow as pa

    simple = {
        pa.bool_(): (pa.bool_(), "boolean"),
        pa.int8(): (pa.int16(), "smallint"),
        pa.uint8(): (pa.int16(), "smallint"),
        pa.int16(): (pa.int16(), "smallint"),
        pa.uint16(): (pa.int32(), "integer"),
        pa.int32(): (pa.int32(), "integer"),
        pa.uint32(): (pa.int64(), "bigint"),
        pa.int64(): (pa.int64(), "bigint"),
        # ADBC would send the upper half of these as negative numbers.
        pa.uint64(): (pa.decimal128(20, 0), "numeric(20,0)"),
        pa.float16(): (pa.float32(), "real"),
        pa.float32(): (pa.float32(), "real"),
        pa.float64(): (pa.float64(), "double precision"),
        pa.date32(): (pa.date32(), "date"),
        pa.date64(): (pa.date32(), "date"),
        pa.month_day_nano_interval(): (t, "interval"),
    }
    if t in simple:
        return simple[t]
    if pa.types.is_decimal(t):
        return _find_decimal_type(t)
    if _is_text(t):
        return pa.string() if t == pa.string_view() else t, "text"
    if _is_binary(t):
        return pa.binary() if t == pa.binary_view() else t, "bytea"
    if pa.types.is_timestamp(t):
        return pa.timestamp("us", t.tz), "timestamp with time zone" if t.tz else "timestamp without time zone"
    if pa.types.is_time(t):
        return pa.time64("us"), "time without time zone"
    if pa.types.is_duration(t):
        return pa.duration("us"), "interval"
    return None


def _find_decimal_type(t: pa.DataType) -> tuple[pa.DataType, str]:
    import pyarrow as pa

    sent = t if t.bit_width >= 128 else pa.decimal128(t.precision, t.scale)
    # PostgreSQL before 15 has no other scales. A column without a scale takes all of them.
    return sent, f"numeric({t.precision},{t.scale})" if 0 <= t.scale <= t.precision else "numeric"


def _is_text(t: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_string(t) or pa.types.is_large_string(t) or t == pa.string_view()


def _is_binary(t: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_binary(t) or pa.types.is_large_binary(t) or pa.types.is_fixed_size_binary(t) or t == pa.binary_view()


# --- the target's side --------------------------------------------------------------------------------------------------


_INTEGERS = ("smallint", "integer", "bigint")
_TIMES = ("timestamp without time zone", "timestamp with time zone")
# Types that formats return themselves, so that text is not parsed into them.
_TYPED = frozenset(
    {*_INTEGERS, *_TIMES, "boolean", "numeric", "real", "double precision", "bytea", "date", "interval", "money", "oid"}
    | {"time without time zone", "time with time zone"}
)
_JSON = ("json", "jsonb")

_WIDENS: dict[str, frozenset[str]] = {
    "boolean": frozenset({"boolean"}),
    "smallint": frozenset({*_INTEGERS, "numeric", "real", "double precision"}),
    "integer": frozenset({*_INTEGERS, "numeric", "double precision"}),
    "bigint": frozenset({*_INTEGERS, "numeric"}),
    "real": frozenset({"real", "double precision"}),
    "double precision": frozenset({"double precision"}),
    "bytea": frozenset({"bytea"}),
    "date": frozenset({"date", *_TIMES}),
    "timestamp without time zone": frozenset(_TIMES),
    "timestamp with time zone": frozenset(_TIMES),
    "time without time zone": frozenset({"time without time zone"}),
    "interval": frozenset({"interval"}),
}


def explain_misfit(column: StageColumn, target: TargetColumn) -> str | None:
    """Return the reason why a column of the rows does not fit into the target's, as "the rows have ...; expected ..."; None if it
    fits."""
    if column.holds == "nothing":
        return None
    if column.holds == "json":
        fits = target.base in _JSON or _is_string(target.base, target.category)
        return None if fits else _describe_difference("a structure, which arrives as JSON", "jsonb, json or text")
    if column.holds == "array":
        if target.base in _JSON:
            return None
        fits = target.category == "A" and _fits(
            column.sql.removesuffix("[]"), target.element, target.element_category, target.scale
        )
    else:
        fits = _fits(column.sql, target.base, target.category, target.scale)
    return None if fits else _describe_difference(f"{column.sql} (Arrow's {column.arrow})", _describe_expected(column.sql))


def _fits(stage: str, base: str, category: str, scale: int | None) -> bool:
    kind, _, modifier = stage.partition("(")
    if kind == "numeric":
        own = int(modifier.rstrip(")").split(",")[1]) if modifier else None
        if base in _INTEGERS:
            return own == 0
        return base == "numeric" and (scale is None or own is not None and scale >= own)
    if kind == "text":
        # Text is parsed into any other type: uuid, jsonb, inet, an enum; but not into `name`, which cuts long values.
        return _is_string(base, category) or category not in ("A", "S", "Z") and base not in _TYPED
    return base in _WIDENS[kind]


def _is_string(base: str, category: str) -> bool:
    return category == "S" and base not in ("name", '"char"')


def _describe_expected(stage: str) -> str:
    kind = stage.partition("(")[0].removesuffix("[]")
    array = "[]" if stage.endswith("[]") else ""
    if kind == "text":
        names = ["text", "varchar"]
    elif kind == "numeric":
        names = ["numeric with as many digits after the point"]
    else:
        names = sorted(_WIDENS[kind], key=lambda n: n != kind)
    return ", ".join(f"{n}{array}" for n in names)


def _describe_difference(found: str, expected: str) -> str:
    return f"the rows have {found}; expected a column of {expected}"


def merge_column(column: StageColumn, target: TargetColumn) -> MergeColumn:
    """Return the conversion of a stage's column to the target's. It is an assignment if possible, because a cast to varchar(5)
    cuts silently."""
    before, after = "", ""
    if column.holds == "nothing":
        after = f"::{target.base}"
    elif column.holds == "json":
        after = f"::{target.base}" if target.base in _JSON else ""
    elif column.holds == "array":
        if target.base in _JSON:
            before, after = f"to_{target.base}(", ")"
        elif column.sql == "text[]" and not _is_string(target.element, target.element_category):
            after = f"::{target.base}"
    elif column.sql == "text" and not _is_string(target.base, target.category):
        after = f"::{target.base}"
    return MergeColumn(column.name, before, after, key_after=_find_key_cast(target))


def _find_key_cast(target: TargetColumn) -> str:
    """Return the cast that makes two keys equal exactly if the target's unique index finds them equal."""
    kind = target.base if target.category == "S" else target.precise or target.base
    return f"::{kind}" + (f" COLLATE {target.collation}" if target.collation else "")


def can_copy_directly(column: StageColumn, target: TargetColumn) -> bool:
    """Return True if the bytes sent for the stage's type are those of the target's type, so that COPY can write into the
    target."""
    if target.domain or column.holds in ("json", "nothing"):
        return False
    kind = column.sql.partition("(")[0] if column.holds == "value" else column.sql
    if column.holds == "array":
        kind = f"{column.sql.removesuffix('[]').partition('(')[0]}[]"
    return target.base == kind or (kind == "text" and target.base in ("character varying", "bpchar"))


SYSTEM = frozenset({"ctid", "xmin", "cmin", "xmax", "cmax", "tableoid"})
"""Names of columns that PostgreSQL reserves in every table."""


def list_wanted_columns(sink: PostgresSinkOptions, columns: Sequence[StageColumn]) -> list[tuple[str, str]]:
    """Return names and types of the columns that a table needs: those of the rows, and those that the sink fills."""
    wanted = [(column.name, get_created_type(column)) for column in columns]
    given = {name for name, _ in wanted}
    if sink.offset_columns:
        wanted += [c for c in zip(sql.OFFSET_COLUMNS, sql.OFFSET_TYPES, strict=True) if c[0] not in given]
    if sink.window_column:
        wanted.append((sink.window_column, "text"))
    return wanted


def find_missing_columns(sink: PostgresSinkOptions, columns: Sequence[StageColumn], table: Table) -> list[tuple[str, str]]:
    """Return names and types of the wanted columns that the table lacks."""
    return [column for column in list_wanted_columns(sink, columns) if column[0] not in table.columns]


def add_missing_columns(connection: psycopg.Connection, sink: PostgresSinkOptions, name: Name, shape: Shape) -> None:
    """Add the missing columns, nullable, in one statement that commits by itself: all of them or none, and once, even if several
    attempts do so concurrently. No column is ever dropped, renamed or given another type.
    """
    columns = [make_stage_column(f.name, f.type) for f in shape.schema]
    with connection.transaction():
        # A second attempt finds the columns of the first one. Their types are compared afterwards (refuse_misfits).
        run(connection, sql.lock(make_lock_key("evolve", str(name))))
        table = read_table(connection, name)
        added = find_missing_columns(sink, columns, table) if table is not None else []
        if added:
            run(connection, sql.add_columns(name, added, "IF NOT EXISTS"))
    if added:
        log.info("Added to %s: %s", name, ", ".join(f"{quote(column)} {kind}" for column, kind in added))


def refuse_misfits(table: Table, columns: Sequence[StageColumn], window: str) -> None:
    """Compare the rows with the table again: it may have been changed since ``validate``.

    :raises SinkRejected: a column is missing, or of a type that the rows do not fit into.
    """
    if lacking := [c.name for c in columns if c.name not in table.columns]:
        raise SinkRejected(str(table.name), window, f"it has no column {', '.join(f'`{m}`' for m in lacking)}")
    for column in columns:
        if reason := explain_misfit(column, table.columns[column.name]):
            found = f"column `{column.name}` is {table.columns[column.name].type}, {reason}"
            raise SinkRejected(str(table.name), window, found)


# --- problems that are reported before anything runs
# ---------------------------------------------------------------------------------------------


def find_missing_column_problems(
    sink: PostgresSinkOptions, columns: Sequence[StageColumn], table: Table, role: str
) -> Iterator[Problem]:
    """Yield a problem for each missing column without ``auto_evolve``, and with it for each that cannot be added."""
    absent = [column for column in columns if column.name not in table.columns]
    if not sink.auto_evolve:
        yield from (_make_refused_problem(column, table) for column in absent)
        return
    for column in absent:
        yield from _find_addition_problems(column, sink, table)
    lacking = find_missing_columns(sink, columns, table)
    if lacking and not table.owned:
        named = ", ".join(f"`{name}`" for name, _ in lacking)
        what = f"role `{role}` does not own {table.name}, which lacks {named}; expected its owner, who alone may add columns"
        yield Problem("sink.auto_evolve", what, f"Have the owner run: {sql.add_columns(table.name, lacking)}")


def _make_refused_problem(column: StageColumn, table: Table) -> Problem:
    kind = get_created_type(column)
    there = quote_names(table.columns) or "none"
    alike = _find_similar_name(column.name, table)
    what = f"{table.name} has no such column{alike}; found {there}; expected `{column.name}` {kind}"
    # A name that differs by case only is refused with the option, too.
    first = "Rename one of them" if alike else "Set `auto_evolve=True` on the sink"
    action = f"{first}, or run: {sql.add_columns(table.name, [(column.name, kind)])}"
    return Problem(f"sink.table column `{column.name}`", what, f"{action}; or leave it out of the schema")


def _find_addition_problems(column: StageColumn, sink: PostgresSinkOptions, table: Table) -> Iterator[Problem]:
    where = f"sink.table column `{column.name}`"
    if column.name in SYSTEM:
        yield Problem(where, "PostgreSQL has a column of that name in every table", "Give it another name")
    if column.holds == "nothing":
        yield Problem(where, "nothing is known of its type (Arrow's null), so it cannot be added", "Give it a type in the schema")
    if alike := _find_similar_name(column.name, table):
        what = f"{table.name} has no such column{alike}; a second one beside it is not added by itself"
        yield Problem(where, what, f"Rename one of them, or run: {sql.add_columns(table.name, [_get_name_and_type(column)])}")
    if column.name in sink.key:
        what = f"it is part of the key, and {table.name} does not have it; expected a column with a unique index"
        yield Problem(where, what, "Add it and the index by hand: the rows that are there need a value in it")


def make_changed_type_problem(column: StageColumn, table: Table, reason: str) -> Problem:
    """Return the problem of a column that has another type. The sink never changes a type."""
    kind, name = get_created_type(column), quote(column.name)
    using = f"to_jsonb({name})" if column.holds == "json" else f"{name}::{kind}"
    action = f"Correct the schema, or run: ALTER TABLE {table.name} ALTER COLUMN {name} TYPE {kind} USING {using}"
    what = f"{table.name} has {table.columns[column.name].type}, {reason}"
    return Problem(f"sink.table column `{column.name}`", what, action)


def _get_name_and_type(column: StageColumn) -> tuple[str, str]:
    return column.name, get_created_type(column)


def _find_similar_name(name: str, table: Table) -> str:
    alike = [c for c in table.columns if c.casefold() == name.casefold()]
    return f", only `{alike[0]}`: names are compared exactly" if alike else ""
