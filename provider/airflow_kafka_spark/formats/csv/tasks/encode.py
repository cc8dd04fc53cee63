"""CSV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.formats.base import Encoder, Kind
from airflow_kafka_spark.formats.csv.dialect import CsvDialect
from airflow_kafka_spark.formats.json.tasks.encode import format_unquoted, merge_constants


@dataclass(frozen=True)
class CsvEncoder(Encoder):
    """One line per row, as :meth:`~airflow_kafka_spark.formats.Csv.encode` has it.

    :param columns: the columns and what they hold, in order.
    :param dialect: how the fields stand in a line.
    """

    columns: tuple[tuple[str, Kind], ...]
    dialect: CsvDialect

    def encode(self, rows: Mapping[str, pa.Array]) -> pa.Array:
        """The rows' lines."""
        parts: list[str | pa.Array] = []
        for name, kind in self.columns:
            parts += [self.dialect.delimiter] if parts else []
            parts.append(self._field(rows[name], kind))
        return pc.binary_join_element_wise(*merge_constants(parts), "").cast(pa.binary())

    def _field(self, column: pa.Array, kind: Kind) -> pa.Array:
        quote, escape, null = self.dialect.quote, self.dialect.escape, self.dialect.null
        if kind == "text":
            text = column.cast(pa.string())
            if not self.dialect.doubled:
                text = pc.replace_substring(text, escape, escape * 2)
            text = pc.replace_substring(text, quote, escape + quote)
            return pc.fill_null(pc.binary_join_element_wise(quote, text, quote, ""), null)
        text = format_unquoted(column, kind)
        # Bytes may be an empty text.
        text = pc.if_else(pc.equal(text, null), self.dialect.quoted(null), text)
        return pc.fill_null(text, null)
