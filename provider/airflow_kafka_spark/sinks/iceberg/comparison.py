"""An Iceberg table as ``VerifyOperator`` reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import Problem, SinkUnavailable
from airflow_kafka_spark.sinks.base import ComparedTable, ReadPiece
from airflow_kafka_spark.sinks.iceberg.options import IcebergSinkOptions
from airflow_kafka_spark.sinks.iceberg.validation import EQUALITY_DELETES, EQUALITY_DELETES_REMEDY

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyiceberg.table import Table

    from airflow_kafka_spark.sinks.lake.tasks.rewrite import TableFile


@dataclass(frozen=True)
class ComparedIcebergTable(ComparedTable):
    """A branch of an Iceberg table. A condition is a ``row_filter`` of pyiceberg.

    :param sink: the sink that names table and branch.
    """

    sink: IcebergSinkOptions

    @property
    def name(self) -> str:
        return self.sink.uri

    def find_problems(self, condition: str) -> list[Problem]:
        return []

    def load_schema(self) -> pa.Schema | None:
        doing = "reading the table's columns"
        with self.sink.open() as lake:
            table = lake.load(doing)
            if table is None:
                return None
            self._refuse_equality_deletes(table, doing)
            return table.schema().as_arrow()

    def read_pieces(self, columns: Sequence[str], condition: str) -> Iterator[ReadPiece]:
        """Yield each data file, with its delete files."""
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.expressions.visitors import bind, extract_field_ids
        from pyiceberg.io.pyarrow import ArrowScan, expression_to_pyarrow
        from pyiceberg.manifest import FileFormat

        from airflow_kafka_spark.sinks.iceberg.tasks.table_files import IcebergFile

        doing = "listing its files"
        with self.sink.open() as lake:
            table = lake.load_newest(doing)
            self._refuse_equality_deletes(table, doing)
            snapshot = table.snapshot_by_name(self.sink.branch)
            if snapshot is None:
                return
            schema = table.schema()
            scan = table.scan(condition or AlwaysTrue(), tuple(columns), snapshot_id=snapshot.snapshot_id)
            # The head of a branch is read with the table's columns, which may be newer than those of its snapshot.
            projection = schema.select(*columns)
            arrow = ArrowScan(table.metadata, table.io, projection, scan.row_filter, scan.case_sensitive)
            bound = bind(schema, scan.row_filter, scan.case_sensitive)
            tested = [schema.find_column_name(number) or "" for number in sorted(extract_field_ids(bound))]
            read = tuple(dict.fromkeys([*columns, *(name.partition(".")[0] for name in tested)]))
            kept = expression_to_pyarrow(bound, schema) if condition else None
            for task in scan.plan_files():
                if task.file.file_format == FileFormat.PARQUET:
                    # pyiceberg's scan reads timestamps that Spark has written as nanoseconds, which hold few centuries.
                    file = IcebergFile(table, task, {name: name for name in read})
                    yield partial(_read_file, file, read, kept)
                else:
                    yield partial(arrow.to_record_batches, [task])

    def make_unavailable_error(self, doing: str, error: Exception) -> SinkUnavailable:
        """Return the error to raise for an error of catalog or store, without secrets."""
        return self.sink.open().make_unavailable_error(doing, error)

    def _refuse_equality_deletes(self, table: Table, doing: str) -> None:
        """Make sure that the branch has no rows that are deleted by their values: a scan would refuse only some of them.

        :raises SinkUnavailable: there are such rows.
        """
        from airflow_kafka_spark.sinks.iceberg.tasks.table_files import find_equality_deletes

        if (path := find_equality_deletes(table, table.snapshot_by_name(self.sink.branch))) is not None:
            raise SinkUnavailable(self.name, doing, f"{path} {EQUALITY_DELETES}", EQUALITY_DELETES_REMEDY)


def _read_file(file: TableFile, columns: Sequence[str], condition: pc.Expression | None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a data file that meet a condition; None: all rows."""
    import pyarrow as pa

    for batch in file.read_batches(columns):
        if condition is None:
            yield batch
        else:
            yield from pa.Table.from_batches([batch]).filter(condition).to_batches()
