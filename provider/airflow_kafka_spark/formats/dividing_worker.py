"""Two ways to one meaning: whole batches by Arrow, and on doubt in ever smaller parts, until the reference decides.

Runs in Spark's tasks; the ground of the decoders of JSON and of CSV.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_kafka_spark.formats.base import Decoded, Decoder
from airflow_kafka_spark.formats.json_values import BadValue

CHUNK_RECORDS = 2048
CHUNK_BYTES = 32 << 20
BLOCK_LIMIT = (1 << 31) - 16
FEW_RECORDS, FEW_BYTES = 8, 64 << 10
PARTS = 8
SIFTED_RECORDS = 64
"""From so many on it is worth a look which records of a doubtful batch are bad."""

Pieces = tuple[pa.RecordBatch, list[tuple[int, str]]]
"""The rows of the good records, and where the bad ones are, with the reason."""


class Doubt(Exception):
    """The fast path cannot answer for these records."""


Change = Callable[[pa.Array], pa.Array]
"""What becomes of a column."""


def never_null(change: Change) -> Change:
    """A change of a column in which a null is a matter of doubt."""

    def checked(array: pa.Array) -> pa.Array:
        if array.null_count:
            raise Doubt
        return change(array)

    return checked


class DividingDecoder(Decoder):
    """Decodes records of one schema.

    :param schema: the columns.
    :param read: the reference: one value per column of one record, in the form that ``pyarrow.array(values, type)`` takes;
        raises :class:`.BadValue`.
    :param few: up to this many records (and 64 KiB) the reference is faster than starting Arrow's reader.
    :param only_reference: Arrow cannot read this schema.
    """

    def __init__(
        self, schema: pa.Schema, read: Callable[[bytes], list[Any]], few: int = FEW_RECORDS, only_reference: bool = False
    ) -> None:
        self._few = few
        self._schema = schema
        self._read_one = read
        self._only_reference = only_reference
        self.by_reference = 0
        """How many records the reference decoded so far."""

    @abstractmethod
    def _by_arrow(self, records: Sequence[bytes]) -> pa.RecordBatch | None:
        """One row per record, or None when there is any doubt."""

    def _suspects(self, records: Sequence[bytes]) -> Sequence[int]:
        """Where bad records are likely to be, ascending; a guess, which costs time when it is wrong, and nothing else."""
        return ()

    def decode(self, values: Sequence[bytes | None]) -> Decoded:
        """Decode many values at once; see the format for what they mean.

        :param values: less than 2 GiB of text per string column, which is what an Arrow column holds.
        """
        records = [v for v in values if v is not None]
        pieces: list[pa.RecordBatch] = []
        bad: list[tuple[int, str]] = []
        for piece, wrong in self._chunks(records):
            pieces.append(piece)
            bad.extend(wrong)
        return self._assemble(pieces, values, bad)

    def decode_by_reference(self, values: Sequence[bytes | None]) -> Decoded:
        """The same by the reference alone: what :meth:`decode` has to equal."""
        piece, bad = self.read_by_reference([v for v in values if v is not None], 0)
        return self._assemble([piece], values, bad)

    def _assemble(self, pieces: list[pa.RecordBatch], values: Sequence[bytes | None], bad: list[tuple[int, str]]) -> Decoded:
        """One row per value again: the pieces hold the good records only."""
        if len(pieces) == 1:
            good = pieces[0]
        else:
            columns = [pa.concat_arrays([p.column(i) for p in pieces]) for i in range(len(self._schema))] if pieces else []
            good = pa.RecordBatch.from_arrays(columns or [pa.array([], f.type) for f in self._schema], schema=self._schema)
        if good.num_rows == len(values):
            return Decoded(good)
        present = np.fromiter((v is not None for v in values), bool, len(values))
        places = np.flatnonzero(present)
        wrong = [int(places[at]) for at, _ in bad]
        present[wrong] = False
        rows = pa.array(np.cumsum(present) - 1, mask=~present)
        taken = [column.take(rows) for column in good.columns]
        return Decoded(
            pa.RecordBatch.from_arrays(taken, schema=self._schema), tuple(zip(wrong, (reason for _, reason in bad), strict=True))
        )

    def _chunks(self, records: Sequence[bytes]) -> Iterator[Pieces]:
        # In even chunks: small enough that a bad record spoils little, large enough that starting Arrow's reader costs little.
        step = math.ceil(len(records) / math.ceil(len(records) / CHUNK_RECORDS)) if records else 1
        for at in range(0, len(records), step):
            yield from self._divide(records[at : at + step], at)

    def _divide(self, records: Sequence[bytes], start: int) -> Iterator[Pieces]:
        """The records by Arrow; on doubt in eight parts, so that a bad record costs little more than its chunk a second time."""
        count, size = len(records), sum(map(len, records))
        if self._only_reference or (count <= self._few and size <= FEW_BYTES) or (count == 1 and size > BLOCK_LIMIT):
            yield self.read_by_reference(records, start)
            return
        if size <= CHUNK_BYTES or count == 1:
            batch = self._by_arrow(records)
            if batch is not None:
                yield batch, []
                return
            sifted = self._sift(records, start) if count >= SIFTED_RECORDS else None
            if sifted is not None:
                yield sifted
                return
        if count == 1:
            yield self.read_by_reference(records, start)
            return
        step = math.ceil(count / PARTS)
        for at in range(0, count, step):
            yield from self._divide(records[at : at + step], start + at)

    def _sift(self, records: Sequence[bytes], start: int) -> Pieces | None:
        """The suspects by the reference and the others by Arrow; None where a suspect is good, or Arrow still in doubt."""
        places = self._suspects(records)
        if not places or 2 * len(places) > len(records):
            return None
        _, wrong = self.read_by_reference([records[at] for at in places], 0)
        if len(wrong) < len(places):
            return None
        apart = set(places)
        batch = self._by_arrow([record for at, record in enumerate(records) if at not in apart])
        return None if batch is None else (batch, [(start + places[at], reason) for at, reason in wrong])

    def read_by_reference(self, records: Sequence[bytes], start: int) -> Pieces:
        """Record by record; positions are counted from ``start``."""
        rows: list[list[Any]] = []
        bad: list[tuple[int, str]] = []
        self.by_reference += len(records)
        for at, record in enumerate(records, start):
            try:
                rows.append(self._read_one(record))
            except BadValue as e:
                bad.append((at, e.reason))
        columns = list(zip(*rows, strict=True)) or [()] * len(self._schema)
        arrays = [pa.array(values, f.type) for f, values in zip(self._schema, columns, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema), bad
