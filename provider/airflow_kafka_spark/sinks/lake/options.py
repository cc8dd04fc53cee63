"""The options that all sinks of lake tables have. They validate themselves as far as that needs no table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.errors.arguments import names_of
from airflow_kafka_spark.errors.base import quote_names
from airflow_kafka_spark.sinks.base import MODES, OFFSET_COLUMNS, Shape, key_problems

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "partition_by", names_of(self.partition_by))
        object.__setattr__(self, "key", names_of(self.key))

    @property
    def upserts(self) -> bool:
        """True if rows replace older ones of the same key."""
        return self.mode == "upsert"

    def rows(self, shape: Shape) -> Shape:
        """Return what the table gets: the columns of the rows, and those of their offsets and window if the options say so."""
        if not self.offset_columns and not self.window_column:
            return shape
        import pyarrow as pa

        types = (pa.string(), pa.int32(), pa.int64()) if self.offset_columns else ()
        added = [pa.field(name, kind) for name, kind in zip(OFFSET_COLUMNS, types, strict=False)]
        if self.window_column:
            added.append(pa.field(self.window_column, pa.string()))
        return replace(shape, schema=pa.schema([*shape.schema, *added]))

    def spec(self) -> FileSpec:
        """Return the codec and options that tasks write Parquet files with."""
        from airflow_kafka_spark.sinks.storage.tasks.formats import FileSpec

        return FileSpec("parquet", self.compression, bool(self.partition_by), dict(self.options))

    def problems(self) -> Iterator[Problem]:
        """Yield what is wrong with mode, key, compression and options."""
        import pyarrow as pa

        from airflow_kafka_spark.sinks.storage.tasks.formats import FileSpec, try_writing

        if self.mode not in MODES:
            yield Problem("sink.mode", f"it is {self.mode!r}; expected {' or '.join(map(repr, MODES))}")
        yield from key_problems(self)
        codecs = FileSpec("parquet").writer.codecs
        if self.compression not in codecs:
            known = ", ".join(c for c in codecs if c)
            yield Problem("sink.compression", f"`{self.compression}` is not known; expected one of {known}")
            return
        for name in _LIMITS:
            value = self.options.get(name, 1)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                yield Problem("sink.options", f"`{name}` is {value!r}; expected a whole number from 1")
        spec = self.spec()
        if reserved := sorted(spec.writer.reserved & set(self.options)):
            yield Problem("sink.options", f"`{'`, `'.join(reserved)}` cannot be set: the sink sets it itself", "Leave it out")
        elif error := try_writing(spec, pa.schema([("a", pa.int64())])):
            yield Problem("sink.options", f"the Parquet writer does not take {dict(spec.format_options)}: {error}")

    def row_problems(self, schema: pa.Schema) -> Iterator[Problem]:
        """Yield what is wrong with the columns of the rows, as far as key and offsets need them.

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
