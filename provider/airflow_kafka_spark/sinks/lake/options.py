"""The options that all sinks of lake tables have, and the checks of columns that all table formats need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from airflow_kafka_spark.arguments import as_names
from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.errors.base import quote_names
from airflow_kafka_spark.sinks.base import MODES, OFFSET_COLUMNS, Shape, find_key_problems

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_kafka_spark.sinks.storage.tasks.formats import FileSpec


_RESERVED = ("__airflow_", "__connect_")
_LIMITS = ("max_open_files", "max_rows_per_group", "max_bytes_per_group")


@dataclass(frozen=True, kw_only=True)
class LakeSinkOptions:
    """Parameters of :class:`~airflow_kafka_spark.sinks.DeltaSink` and :class:`~airflow_kafka_spark.sinks.IcebergSink`, which
    document them."""

    mode: Literal["append", "upsert"] = "append"
    key: Sequence[str] = ()
    delete_enabled: bool = False
    offset_columns: bool = False
    window_column: str | None = None
    partition_by: Sequence[str] = ()
    auto_create: bool = True
    auto_evolve: bool = False
    compression: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    table_properties: Mapping[str, str] = field(default_factory=dict, hash=False)
    optimize: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "partition_by", as_names(self.partition_by))
        object.__setattr__(self, "key", as_names(self.key))

    @property
    def upserts(self) -> bool:
        """True if rows replace older ones of the same key."""
        return self.mode == "upsert"

    def add_own_columns(self, shape: Shape) -> Shape:
        """Return the columns of the table: those of the rows, and those of their offsets and window if the options ask for
        them.
        """
        if not self.offset_columns and not self.window_column:
            return shape
        import pyarrow as pa

        types = (pa.string(), pa.int32(), pa.int64()) if self.offset_columns else ()
        added = [pa.field(name, kind) for name, kind in zip(OFFSET_COLUMNS, types, strict=False)]
        if self.window_column:
            added.append(pa.field(self.window_column, pa.string()))
        return replace(shape, schema=pa.schema([*shape.schema, *added]))

    def make_spec(self) -> FileSpec:
        """Return the codec and options that tasks write Parquet files with."""
        from airflow_kafka_spark.sinks.storage.tasks.formats import FileSpec

        return FileSpec("parquet", self.compression, bool(self.partition_by), dict(self.options))

    def find_problems(self) -> Iterator[Problem]:
        """Yield the problems of mode, key, compression, options and ``optimize``."""
        import pyarrow as pa

        from airflow_kafka_spark.sinks.storage.tasks.formats import FileSpec, try_writing

        if self.mode not in MODES:
            yield Problem("sink.mode", f"it is {self.mode!r}; expected {' or '.join(map(repr, MODES))}")
        yield from find_key_problems(self)
        if self.optimize is not None and self.optimize < 1:
            yield Problem("sink.optimize", f"it is {self.optimize}; expected a number of windows from 1, or None", "Leave it out")
        spec, codecs = self.make_spec(), FileSpec("parquet").writer.codecs
        if self.compression not in codecs:
            known = ", ".join(c for c in codecs if c)
            yield Problem("sink.compression", f"`{self.compression}` is not known; expected one of {known}")
            spec = replace(spec, compression=None)
        for name in _LIMITS:
            value = self.options.get(name, 1)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                yield Problem("sink.options", f"`{name}` is {value!r}; expected a whole number from 1")
        if reserved := sorted(spec.writer.reserved & set(self.options)):
            yield Problem("sink.options", f"`{'`, `'.join(reserved)}` cannot be set: the sink sets it itself", "Leave it out")
        elif error := try_writing(spec, pa.schema([("a", pa.int64())])):
            yield Problem("sink.options", f"the Parquet writer does not take {dict(spec.format_options)}: {error}")

    def find_row_problems(self, schema: pa.Schema) -> Iterator[Problem]:
        """Yield the problems of the columns of the rows, as far as key and offsets need them.

        :param schema: the rows' columns.
        """
        import pyarrow as pa

        if own := [name for name in schema.names if name.casefold().startswith(_RESERVED)]:
            what = f"the rows have columns {quote_names(own)}; names that begin with {' or '.join(_RESERVED)} are the sink's own"
            yield Problem("schema", what, "Rename them")
        if self.window_column is not None and (not self.window_column or self.window_column in schema.names):
            what = "the rows have a column of that name" if self.window_column else "it is empty"
            yield Problem("sink.window_column", what, "Give it another name")
        if missing := [name for name in self.key if name not in schema.names]:
            what = f"the rows have no column {quote_names(missing)}; they have {quote_names(schema.names)}"
            yield Problem("sink.key", what, "Name one of these")
        for name in self.key:
            kind = schema.field(name).type if name in schema.names else pa.int64()
            if pa.types.is_nested(kind) or pa.types.is_floating(kind):
                what = (
                    f"`{name}` is {kind}; expected a column whose values are equal or not: no floating point number, no structure"
                )
                yield Problem("sink.key", what, "Name another column")


@dataclass(frozen=True)
class ComparedColumn:
    """A column of the rows beside the table's column that takes it.

    :param name: its name in the rows.
    :param kind: its type, for messages.
    :param expected: the type of the table's column; None if the table has none for it.
    :param fits: True if the table's column takes its values.
    :param grows: True if it would take them with further members of its structures.
    """

    name: str
    kind: str
    expected: str | None
    fits: bool
    grows: bool = False


def find_doubled_names(names: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem if columns differ in upper and lower case only."""
    count = Counter(name.casefold() for name in names)
    if doubled := [name for name in names if count[name.casefold()] > 1]:
        yield Problem("schema", f"many readers treat the columns `{'`, `'.join(doubled)}` as one", "Rename all but one of them")


def find_column_problems(
    option: str, rows: Iterable[ComparedColumn], there: Mapping[str, str], required: Iterable[tuple[str, bool]], auto_evolve: bool
) -> Iterator[Problem]:
    """Yield a problem for each column that the table does not take.

    :param option: the option that names the table.
    :param there: the types of the table's columns, for messages.
    :param required: the table's columns that take no null where rows may have one, with True if the rows have that column.
    """
    for column in rows:
        where, name = f"sink.{option} column `{column.name}`", column.name
        if column.expected is not None:
            if not (column.fits or column.grows and auto_evolve):
                what = f"found {column.kind}; expected {column.expected}, the type in the table"
                action = "Correct the schema, or give the column another name"
                yield Problem(
                    where, what, "Set `auto_evolve=True` on the sink, or correct the schema" if column.grows else action
                )
        elif similar := [known for known in there if known.casefold() == name.casefold()]:
            yield Problem(
                where, f"the table has `{similar[0]}`, and many readers treat the two as one", f"Call it `{similar[0]}`"
            )
        elif not auto_evolve:
            known = ", ".join(f"`{known}` {kind}" for known, kind in there.items())
            what = f"it is new ({column.kind}); the table has {known}"
            yield Problem(where, what, "Set `auto_evolve=True` on the sink, or leave it out of the schema")
    for name, has in required:
        what = "the table takes no null in it, and " + ("rows may have one" if has else "the rows do not have it")
        yield Problem(f"sink.{option} column `{name}`", what, "Let the table's column take nulls (`DROP NOT NULL`)")
