"""Decodes Avro inside a Spark task: whole batches by polars, what does not fit there value by value.

There is one way per schema that a writer may have used; which are taken the fast way is decided when the schema is first met.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_kafka_spark.formats.avro.schema import Record, columns_of
from airflow_kafka_spark.formats.avro.tasks.convert import NoFastPath
from airflow_kafka_spark.formats.avro.tasks.plan import Plan
from airflow_kafka_spark.formats.avro.tasks.row_decode import Reference
from airflow_kafka_spark.formats.confluent import HEADER, schema_id
from airflow_kafka_spark.formats.tasks.batch_decoder import CHUNK_BYTES, DividingDecoder, Doubt, Pieces
from airflow_kafka_spark.formats.text import BadValue
from airflow_kafka_spark.formats.types import arrow_schema

_FEW_VALUES, _CHUNK_VALUES = 32, 20_480


class AvroDecoder(DividingDecoder):
    """See :class:`airflow_kafka_spark.formats.avro.format.Avro`.

    :param reader: the schema of the columns.
    :param writers: the schemas of writers by their ids, each a record or what is wrong with it; without the wire format one, 0.
    :param framed: whether values begin with a schema's id.
    :param known: where the schemas are from, as it stands in a sentence.
    :param few: up to this many values the reference is faster.
    """

    def __init__(
        self, reader: Record, writers: Mapping[int, Record | str], framed: bool, known: str = "", few: int = _FEW_VALUES
    ) -> None:
        self._reader, self._writers, self._framed, self._known = reader, dict(writers), framed, known
        self._references: dict[int, Reference] = {}
        self._plans: dict[bytes, Plan | None] = {}
        self._header = HEADER if framed else 0
        super().__init__(arrow_schema(columns_of(reader)), self._read_value, few)

    def __reduce__(self) -> tuple[type[AvroDecoder], tuple[Record, dict[int, Record | str], bool, str, int]]:
        return type(self), (self._reader, self._writers, self._framed, self._known, self._few)

    # --- value by value ----------------------------------------------------------------------------------------------

    def _read_value(self, value: bytes) -> list[Any]:
        number = schema_id(value) if self._framed else 0
        reference = self._references.get(number)
        if reference is None:
            reference = self._references[number] = Reference(self._writer(number), self._reader)
        return reference.read(value, self._header)

    def _writer(self, number: int) -> Record:
        writer = self._writers.get(number)
        if writer is None:
            raise BadValue(f"found schema id {number}, expected one of {self._known}")
        if isinstance(writer, str):
            raise BadValue(f"found schema id {number}: {writer}")
        return writer

    # --- whole batches -----------------------------------------------------------------------------------------------

    def _chunks(self, records: Sequence[bytes]) -> Iterator[Pieces]:
        # Larger chunks than for texts: a bad value is found without the others being read twice as often.
        step = math.ceil(len(records) / math.ceil(len(records) / _CHUNK_VALUES)) if records else 1
        for at in range(0, len(records), step):
            yield from self._divide(records[at : at + step], at)

    def _by_arrow(self, records: Sequence[bytes]) -> pa.RecordBatch | None:
        if sum(map(len, records)) > CHUNK_BYTES * 4:
            return None
        head = records[0][: self._header]
        alike = all(records[at][: self._header] == head for at in (len(records) // 2, -1))
        # To look at all of them takes as long as half of reading: polars does it on the way.
        if alike and (read := self._try(head, records)) is not None:
            return read
        heads = [r[: self._header] for r in records] if self._framed else []
        kinds = set(heads)
        return self._mixed(kinds, heads, records) if len(kinds) > 1 else None

    def _try(self, head: bytes, records: Sequence[bytes]) -> pa.RecordBatch | None:
        plan = self._plan(head)
        try:
            return plan.read(records, head) if plan else None
        except Doubt:
            return None

    def _mixed(self, kinds: set[bytes], heads: list[bytes], records: Sequence[bytes]) -> pa.RecordBatch | None:
        order, pieces = [], []
        for head in kinds:
            places = [at for at, h in enumerate(heads) if h == head]
            piece = self._try(head, [records[at] for at in places])
            if piece is None:
                return None
            pieces.append(piece)
            order += places
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        columns = [pa.concat_arrays([p.column(n) for p in pieces]).take(pa.array(back)) for n in range(len(self._schema))]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _plan(self, head: bytes) -> Plan | None:
        if head not in self._plans:
            self._plans[head] = self._made(head)
        return self._plans[head]

    def _made(self, head: bytes) -> Plan | None:
        try:
            return Plan(self._writer(schema_id(head) if self._framed else 0), self._reader, self._header)
        except (BadValue, NoFastPath):
            return None
