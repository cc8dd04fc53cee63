"""A lake table or files as one side of a comparison by buckets: a Delta or Iceberg table, or files, read in Arrow batches."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import KafkaSparkError, SinkUnavailable
from airflow_kafka_spark.hooks.databases import quote
from airflow_kafka_spark.sinks import DeltaSink, FilesSink, IcebergSink
from airflow_kafka_spark.sinks.delta.log import DeltaLog
from airflow_kafka_spark.sinks.delta.validation import DELETION_VECTORS_REMEDY
from airflow_kafka_spark.sinks.files.manifest import DATA, open_manifests
from airflow_kafka_spark.sinks.iceberg.validation import EQUALITY_DELETES, EQUALITY_DELETES_REMEDY
from airflow_kafka_spark.verification.buckets import Buckets, BucketSums, add_sums
from airflow_kafka_spark.verification.forms import CanonicalRow, Comparable, Family, Form, Sums, compute_row_checksum, to_form

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.dataset as ds
    from deltalake import DeltaTable
    from pyiceberg.table import Table

    from airflow_kafka_spark.sinks.lake.tasks.rewrite import TableFile
    from airflow_kafka_spark.sinks.storage.store import TableStore


_SINCE_2000 = 946_684_800_000_000
"""Microseconds from 1970 to 2000."""
_FRACTION_ZEROS = (r"(\.[0-9]*[1-9])0+$|\.0*$", r"\1")


def find_family(kind: pa.DataType) -> Family:
    """Return the family of a column's type."""
    import pyarrow as pa

    is_a = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return "uuid" if kind.extension_name == "arrow.uuid" else find_family(kind.storage_type)
    if is_a.is_dictionary(kind):
        return find_family(kind.value_type)
    if is_a.is_timestamp(kind):
        return "zoned" if kind.tz else "local"
    tests: tuple[tuple[Any, Family], ...] = (
        (is_a.is_integer, "integer"),
        (is_a.is_boolean, "boolean"),
        (is_a.is_decimal, "decimal"),
        (is_a.is_float32, "single"),
        (is_a.is_float64, "double"),
        (is_a.is_string, "text"),
        (is_a.is_large_string, "text"),
        (is_a.is_string_view, "text"),
        (is_a.is_binary, "binary"),
        (is_a.is_large_binary, "binary"),
        (is_a.is_binary_view, "binary"),
        (is_a.is_fixed_size_binary, "binary"),
        (is_a.is_date, "date"),
        (is_a.is_time, "time"),
    )
    return next((family for holds, family in tests if holds(kind)), "nested")


def format_rows(batch: pa.RecordBatch, columns: Sequence[str], forms: Sequence[Form]) -> Iterator[CanonicalRow]:
    """Return the rows of a batch, with each value in its form."""
    values = [_format_column(batch.column(name), form) for name, form in zip(columns, forms, strict=True)]
    return zip(*values, strict=True)


def _format_column(column: pa.Array, form: Form) -> list[str | None]:
    import pyarrow as pa
    import pyarrow.compute as pc

    column = _unwrap_column(column)
    family = find_family(column.type)
    if form == "instant":
        micros = column.cast(pa.timestamp("us", getattr(column.type, "tz", None)), safe=False).cast(pa.int64())
        return [None if value is None else struct.pack(">q", value - _SINCE_2000).hex() for value in micros.to_pylist()]
    if form == "date":
        days = column.cast(pa.date32()).cast(pa.int32())
        return [None if value is None else struct.pack(">i", value - 10_957).hex() for value in days.to_pylist()]
    if form in ("single", "double", "json"):
        return [to_form(form, value) for value in column.to_pylist()]
    if form == "binary":
        return [None if value is None else value.hex() for value in column.to_pylist()]
    if family == "decimal":
        return [None if value is None else _format_decimal(value) for value in column.to_pylist()]
    if family == "boolean":
        column = column.cast(pa.int8())
    text = column.cast(pa.string())
    if form in ("decimal", "numeral", "time") and family not in ("integer", "boolean"):
        text = pc.replace_substring_regex(text, *_FRACTION_ZEROS)
    elif form == "uuid":
        text = pc.utf8_lower(text)
    elif form == "trimmed":
        text = pc.utf8_rtrim(text, " ")
    return text.to_pylist()


def _unwrap_column(column: pa.Array) -> pa.Array:
    """Return a column without dictionary encoding and extension types. A UUID becomes text."""
    import pyarrow as pa

    if isinstance(column.type, pa.BaseExtensionType):
        storage = column.storage
        if column.type.extension_name != "arrow.uuid":
            return _unwrap_column(storage)
        return pa.array([None if value is None else str(uuid.UUID(bytes=value)) for value in storage.to_pylist()], pa.string())
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _format_decimal(value: Decimal) -> str:
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


ComparableSink = DeltaSink | IcebergSink | FilesSink
Piece = Callable[[], "Iterator[pa.RecordBatch]"]
"""Reads a part of a table."""


@dataclass(frozen=True)
class LakeTable:
    """The newest version of a lake table.

    :param sink: the sink that names its location.
    :param schema: its columns.
    """

    sink: ComparableSink
    schema: pa.Schema

    @classmethod
    def load(cls, sink: ComparableSink) -> LakeTable | None:
        """Return the table; None if it does not exist.

        :raises SinkUnavailable: store or catalog did not answer.
        """
        import pyarrow as pa

        doing = "reading the table's columns"
        with _errors(sink, doing):
            if isinstance(sink, DeltaSink):
                delta = _load_delta(sink, doing)
                return None if delta is None else cls(sink, pa.schema(delta.schema().to_arrow()))
            if isinstance(sink, FilesSink):
                files = _load_files(sink)
                return None if files is None else cls(sink, files[0])
            with sink.open() as lake:
                table = lake.load(doing)
                if table is None:
                    return None
                _refuse_equality_deletes(sink, table, doing)
                return cls(sink, table.schema().as_arrow())

    @property
    def name(self) -> str:
        return self.sink.uri

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.schema.names)

    def find_column(self, name: str) -> Comparable | None:
        """Return a column; None if there is none."""
        if name not in self.schema.names:
            return None
        kind = self.schema.field(name).type
        return Comparable(name, find_family(kind), str(kind))


@dataclass(frozen=True)
class LakeSide:
    """A lake table, with the columns and the forms in which its rows are compared. Each pass reads the newest version.

    :param sink: the sink that names its location.
    :param columns: the columns that are compared, the key's columns first.
    :param forms: the form of each column.
    :param key: the number of columns of the key.
    :param where: a condition: SQL for Delta, an expression of pyiceberg for Iceberg; empty for all rows, and for files.
    """

    sink: ComparableSink
    columns: tuple[str, ...]
    forms: tuple[Form, ...]
    key: int
    where: str

    def estimate_row_count(self) -> int:
        return 0

    def explain(self) -> None:
        """Start reading, so that an invalid condition is reported before the comparison.

        :raises SinkUnavailable: the condition is wrong, or the store did not answer.
        """
        with _errors(self.sink, "trying the condition"):
            for piece in self.read_pieces():
                next(piece(), None)
                return

    def read_pieces(self) -> Iterator[Piece]:
        doing = "listing its files"
        with _errors(self.sink, doing):
            if isinstance(self.sink, DeltaSink):
                yield from self._list_delta(self.sink, doing)
            elif isinstance(self.sink, FilesSink):
                yield from self._list_files(self.sink)
            else:
                yield from self._list_iceberg(self.sink, doing)

    def sum_buckets(self, piece: Piece, buckets: Buckets) -> BucketSums:
        total: BucketSums = {}
        for number, row in self._read_rows(piece, buckets):
            add_sums(total, number, Sums(1, compute_row_checksum(row, self.forms)))
        return total

    def read_bucket_rows(self, piece: Piece, buckets: Buckets) -> list[CanonicalRow]:
        return [row for _, row in self._read_rows(piece, buckets)]

    def _read_rows(self, piece: Piece, buckets: Buckets) -> Iterator[tuple[int, CanonicalRow]]:
        key = self.forms[: self.key]
        with _errors(self.sink, "reading its rows"):
            for batch in piece():
                for row in format_rows(batch, self.columns, self.forms):
                    number = buckets.find(compute_row_checksum(row[: self.key], key))
                    if number is not None:
                        yield number, row

    def _list_files(self, sink: FilesSink) -> Iterator[Piece]:
        """Yield each file."""
        import pyarrow.dataset as ds

        if (files := _load_files(sink)) is None:
            return
        schema, fragments = files

        def read_file(opened: Callable[[], ds.Fragment]) -> Iterator[pa.RecordBatch]:
            return ds.Scanner.from_fragment(opened(), schema=schema, columns=list(self.columns), use_threads=False).to_batches()

        for opened in fragments:
            yield partial(read_file, opened)

    def _list_delta(self, sink: DeltaSink, doing: str) -> Iterator[Piece]:
        """Yield the whole table. deltalake's query engine reads its files in parallel."""
        from deltalake import QueryBuilder

        table = _load_delta(sink, doing)
        if table is None:
            raise SinkUnavailable(sink.uri, doing, "the table is gone")
        selected = ", ".join(map(quote, self.columns))
        query = f"SELECT {selected} FROM verified" + (f" WHERE {self.where}" if self.where else "")

        def read() -> Iterator[pa.RecordBatch]:
            import pyarrow as pa

            for batch in QueryBuilder().register("verified", table).execute(query):
                yield pa.record_batch(batch)

        yield read

    def _list_iceberg(self, sink: IcebergSink, doing: str) -> Iterator[Piece]:
        """Yield each data file, with its delete files."""
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.expressions.visitors import bind, extract_field_ids
        from pyiceberg.io.pyarrow import ArrowScan, expression_to_pyarrow
        from pyiceberg.manifest import FileFormat

        from airflow_kafka_spark.sinks.iceberg.tasks.table_files import IcebergFile

        with sink.open() as lake:
            table = lake.load_newest(doing)
            _refuse_equality_deletes(sink, table, doing)
            snapshot = table.snapshot_by_name(sink.branch)
            if snapshot is None:
                return
            schema = table.schema()
            scan = table.scan(self.where or AlwaysTrue(), self.columns, snapshot_id=snapshot.snapshot_id)
            arrow = ArrowScan(table.metadata, table.io, scan.projection(), scan.row_filter, scan.case_sensitive)
            bound = bind(schema, scan.row_filter, scan.case_sensitive)
            tested = [schema.find_column_name(number) or "" for number in sorted(extract_field_ids(bound))]
            columns = tuple(dict.fromkeys([*self.columns, *(name.partition(".")[0] for name in tested)]))
            condition = expression_to_pyarrow(bound, schema) if self.where else None
            for task in scan.plan_files():
                if task.file.file_format == FileFormat.PARQUET:
                    # pyiceberg's scan reads timestamps that Spark has written as nanoseconds, which hold few centuries.
                    file = IcebergFile(table, task, {name: name for name in columns})
                    yield partial(_read_file, file, columns, condition)
                else:
                    yield partial(arrow.to_record_batches, [task])


def _read_file(file: TableFile, columns: Sequence[str], condition: pc.Expression | None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a data file that meet a condition; None: all rows."""
    import pyarrow as pa

    for batch in file.read_batches(columns):
        if condition is None:
            yield batch
        else:
            yield from pa.Table.from_batches([batch]).filter(condition).to_batches()


class _errors:  # noqa: N801 - used like `contextlib.suppress`
    """Converts the errors of a store to the errors of this package.

    :param sink: the table.
    :param doing: the operation, for the message.
    """

    def __init__(self, sink: ComparableSink, doing: str) -> None:
        self.sink, self.doing = sink, doing

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # Stores and catalogs have no common base class of errors.
        if not isinstance(error, Exception) or isinstance(error, KafkaSparkError):
            return
        if isinstance(self.sink, IcebergSink):
            raise self.sink.open().make_unavailable_error(self.doing, error) from error
        raise SinkUnavailable(self.sink.uri, self.doing, f"{type(error).__name__}: {error}") from error


def _load_files(sink: FilesSink) -> tuple[pa.Schema, Sequence[Callable[[], ds.Fragment]]] | None:
    """Return the columns of complete windows, and functions that open their files; None if there are none."""
    import pyarrow as pa
    import pyarrow.dataset as ds
    import pyarrow.fs

    columns = [sink.window_column, *sink.partition_by]
    partitions = pa.schema([(name, pa.string()) for name in columns])
    hive = ds.HivePartitioning(partitions)
    found: pyarrow.fs.FileSelector | list[str]
    if sink.renames:
        if not sink.directory.exists():
            return None
        base = str(sink.directory)
        found = pyarrow.fs.FileSelector(base, recursive=True)
    else:
        table = open_manifests(sink)
        base = table.store.make_full_path(DATA)
        paths = [file["path"] for record in table.list_visible_records() for file in record.files]
        if not table.store.location.is_local:
            opened = [partial(_open_object, table.store, hive, path) for path in paths]
            schemas = [one().physical_schema for one in (opened if sink.auto_evolve else opened[:1])]
            return (pa.unify_schemas([*schemas, partitions], promote_options="permissive"), opened) if opened else None
        found = [table.store.make_full_path(path) for path in paths]
    given = ds.FileSystemFactoryOptions(partition_base_dir=base, partitioning=hive, selector_ignore_prefixes=[".", "_"])
    factory = ds.FileSystemDatasetFactory(pyarrow.fs.LocalFileSystem(), found, ds.ParquetFileFormat(), given)
    files = factory.finish(factory.inspect(promote_options="permissive", fragments=None if sink.auto_evolve else 1))
    return (files.schema, [partial(_open_fragment, fragment) for fragment in files.get_fragments()]) if files.files else None


def _open_fragment(fragment: ds.Fragment) -> ds.Fragment:
    """Return a file that is opened when it is read."""
    return fragment


def _open_object(store: TableStore, hive: ds.HivePartitioning, path: str) -> ds.Fragment:
    """Return a file in an object store, with the values of its directories."""
    import pyarrow.dataset as ds

    below = path.removeprefix(f"{DATA}/").rpartition("/")[0]
    return ds.ParquetFileFormat().make_fragment(store.open_input(path), partition_expression=hive.parse(f"{below}/"))


def _load_delta(sink: DeltaSink, doing: str) -> DeltaTable | None:
    """Return the newest version of a table; None if it does not exist.

    :raises SinkUnavailable: others have given it deletion vectors since it was validated, so that its files have deleted rows.
    """
    table = DeltaLog(sink.store).load(doing)
    if table is not None and "deletionVectors" in (table.protocol().reader_features or ()):
        raise SinkUnavailable(sink.uri, doing, "the table has deletion vectors, which are not supported", DELETION_VECTORS_REMEDY)
    return table


def _refuse_equality_deletes(sink: IcebergSink, table: Table, doing: str) -> None:
    """Make sure that the branch of a table has no rows that are deleted by their values: a scan would refuse only some of them.

    :raises SinkUnavailable: there are such rows.
    """
    from airflow_kafka_spark.sinks.iceberg.tasks.table_files import find_equality_deletes

    if (path := find_equality_deletes(table, table.snapshot_by_name(sink.branch))) is not None:
        raise SinkUnavailable(sink.uri, doing, f"{path} {EQUALITY_DELETES}", EQUALITY_DELETES_REMEDY)
