"""A Delta table as ``VerifyOperator`` reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import Problem, SinkUnavailable
from airflow_kafka_spark.hooks.databases import quote
from airflow_kafka_spark.sinks.base import ComparedTable, ReadPiece
from airflow_kafka_spark.sinks.delta.log import DeltaLog
from airflow_kafka_spark.sinks.delta.options import DeltaSinkOptions
from airflow_kafka_spark.sinks.delta.validation import DELETION_VECTORS_REMEDY

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable


@dataclass(frozen=True)
class ComparedDeltaTable(ComparedTable):
    """A Delta table. A condition is SQL of DataFusion.

    :param sink: the sink that names its location.
    """

    sink: DeltaSinkOptions

    @property
    def name(self) -> str:
        return self.sink.uri

    def find_problems(self, condition: str) -> list[Problem]:
        return []

    def load_schema(self) -> pa.Schema | None:
        import pyarrow as pa

        table = self._load("reading the table's columns")
        return None if table is None else pa.schema(table.schema().to_arrow())

    def read_pieces(self, columns: Sequence[str], condition: str) -> Iterator[ReadPiece]:
        """Yield the whole table. deltalake's query engine reads its files in parallel."""
        from deltalake import QueryBuilder

        doing = "listing its files"
        table = self._load(doing)
        if table is None:
            raise SinkUnavailable(self.name, doing, "the table is gone")
        selected = ", ".join(map(quote, columns))
        query = f"SELECT {selected} FROM verified" + (f" WHERE {condition}" if condition else "")

        def read() -> Iterator[pa.RecordBatch]:
            import pyarrow as pa

            for batch in QueryBuilder().register("verified", table).execute(query):
                yield pa.record_batch(batch)

        yield read

    def _load(self, doing: str) -> DeltaTable | None:
        """Return the newest version of the table; None if it does not exist.

        :raises SinkUnavailable: others have given it deletion vectors since it was validated, so that its files have deleted
            rows.
        """
        table = DeltaLog(self.sink.store).load(doing)
        if table is not None and "deletionVectors" in (table.protocol().reader_features or ()):
            found = "the table has deletion vectors, which are not supported"
            raise SinkUnavailable(self.name, doing, found, DELETION_VECTORS_REMEDY)
        return table
