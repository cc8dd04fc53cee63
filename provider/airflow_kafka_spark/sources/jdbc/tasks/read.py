"""Reading splits of a PostgreSQL table as Arrow, with ADBC (a binary COPY). Runs in Spark's tasks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import adbc_driver_manager
import adbc_driver_postgresql.dbapi as adbc
import pyarrow as pa

from airflow_kafka_spark.errors import KafkaSparkError, SourceRejected, SourceUnavailable
from airflow_kafka_spark.formats.base import Kind
from airflow_kafka_spark.formats.text_write_worker import content
from airflow_kafka_spark.hooks.postgres import APPLICATION, PostgresServer
from airflow_kafka_spark.sources.base import SplitReader

BATCH_BYTES = 2 << 20
"""What is read ahead of what is sent, about."""

_HINT = "adbc.postgresql.batch_size_hint_bytes"
_REFUSED = ("22", "23", "25", "28", "3D", "3F", "42", "44", "0A", "0L", "P0")
_DECIMAL = b"0123456789.-"


@dataclass(frozen=True)
class PostgresReader(SplitReader):
    """See :class:`SplitReader`.

    :param server: where to, with the password.
    :param session: the statement that makes the session's settings.
    :param table: for people.
    :param columns: names and kinds of the columns.
    :param statements: per split, the SELECT of its rows, with the columns in this order.
    """

    server: PostgresServer
    session: str
    table: str
    columns: tuple[tuple[str, Kind], ...]
    statements: tuple[str, ...]

    def read(self, split: int) -> Iterator[pa.RecordBatch]:
        with self._explained(f"reading split {split}"), self._cursor() as cursor:
            cursor.execute(self.session)
            cursor.fetchall()
            cursor.adbc_statement.set_options(**{_HINT: str(BATCH_BYTES)})
            cursor.execute(self.statements[split])
            for batch in _batches(cursor):
                yield self._checked(batch)

    @contextmanager
    def _cursor(self) -> Iterator[Any]:
        # Whatever the connection says: what arrives is taken for UTF-8.
        connection = adbc.connect(f"{self.server.named(APPLICATION)} client_encoding=UTF8")
        try:
            cursor = connection.cursor()
            try:
                yield cursor
            finally:
                with suppress(Exception):
                    cursor.close()
        finally:
            with suppress(Exception):
                connection.close()

    def _checked(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch under the columns' own names.

        :raises SourceRejected: a decimal is NaN, for which Spark has nothing.
        """
        for (name, kind), column in zip(self.columns, batch.columns, strict=True):
            if kind in ("decimal", "fine decimal") and content(column).translate(None, _DECIMAL):
                raise SourceRejected(self.table, f"column `{name}` holds NaN, for which Spark's decimals have nothing")
        return pa.RecordBatch.from_arrays(batch.columns, [name for name, _ in self.columns])

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (adbc_driver_manager.Error, pa.ArrowException, OSError) as error:
            raise self._explain(error, doing) from self.server.cause(error)

    def _explain(self, error: Exception, doing: str) -> KafkaSparkError:
        detail = self.server.scrub(message(error))
        if (getattr(error, "sqlstate", None) or "")[:2] in _REFUSED:
            return SourceRejected(self.table, f"{doing}: {detail}")
        return SourceUnavailable(self.server.where, doing, detail)


def _batches(cursor: Any) -> Iterable[pa.RecordBatch]:
    """What was asked for. An error in the middle comes out of ADBC's own reader with its SQLSTATE, out of pyarrow's without."""
    own = getattr(getattr(cursor, "_results", None), "reader", None)
    return own if own is not None else cursor.fetch_record_batch()


def message(error: BaseException) -> str:
    """The server's own words, which ADBC puts between its own and the whole statement."""
    text = str(error)
    said = re.search(r"(?:ERROR|FATAL):\s+(.*)", text)
    return " ".join((said[1] if said else text.partition("Query was:")[0]).split())
