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
import pyarrow.compute as pc

from airflow_kafka_spark.formats.base import Decoded, Decoder
from airflow_kafka_spark.formats.text import MAX_MICRO, MIN_DATE, MIN_MICRO, BadValue

CHUNK_RECORDS = 2048
CHUNK_BYTES = 32 << 20
MAX_BLOCK_BYTES = (1 << 31) - 16
FEW_RECORDS, FEW_BYTES = 8, 64 << 10
DIVISIONS = 8
FINDER_MIN_RECORDS = 64
"""From so many on it is worth a look which records of a doubtful batch are bad."""

DecodedPart = tuple[pa.RecordBatch, list[tuple[int, str]]]
"""The rows of the good records, and where the bad ones are, with the reason."""


class NeedsRowWise(Exception):
    """The fast path cannot answer for these records."""


SuspectFinder = Callable[[Sequence[bytes]], Sequence[int]]
"""Where bad records are likely to be, ascending; a guess, which costs time when it is wrong, and nothing else."""

ArrayFunction = Callable[[pa.Array], pa.Array]
"""What becomes of a column."""


def refuse_nulls(change: ArrayFunction) -> ArrayFunction:
    """A change of a column in which a null is a matter of doubt."""

    def checked(array: pa.Array) -> pa.Array:
        if array.null_count:
            raise NeedsRowWise
        return change(array)

    return checked


class BatchDecoder(Decoder):
    """Decodes records of one schema.

    :param schema: the columns.
    :param read: the reference: one value per column of one record, in the form that ``pyarrow.array(values, type)`` takes;
        raises :class:`.BadValue`.
    :param few: up to this many records (and 64 KiB) the reference is faster than starting Arrow's reader.
    :param only_reference: Arrow cannot read this schema.
    :param screens: what looks for bad records in a doubtful batch; the one that has found them last is asked first.
    """

    def __init__(
        self,
        schema: pa.Schema,
        read: Callable[[bytes], list[Any]],
        few: int = FEW_RECORDS,
        row_wise_only: bool = False,
        screens: Sequence[SuspectFinder] = (),
    ) -> None:
        self._few = few
        self._schema = schema
        self._read_one = read
        self._only_reference = row_wise_only
        self._screens = tuple(screens)
        self._recently_bad = False
        self.row_wise_count = 0
        """How many records the reference decoded so far."""

    @abstractmethod
    def _read_batch(self, records: Sequence[bytes]) -> pa.RecordBatch | None:
        """One row per record, or None when there is any doubt."""

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

    def decode_row_wise(self, values: Sequence[bytes | None]) -> Decoded:
        """The same by the reference alone: what :meth:`decode` has to equal."""
        piece, bad = self.read_row_wise([v for v in values if v is not None], 0)
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
        present = np.ones(len(values), bool)
        if None in values:
            present[:] = [v is not None for v in values]
        places = np.flatnonzero(present)
        wrong = [int(places[at]) for at, _ in bad]
        present[wrong] = False
        rows = pa.array(np.cumsum(present) - 1, mask=~present)
        taken = [column.take(rows) for column in good.columns]
        return Decoded(
            pa.RecordBatch.from_arrays(taken, schema=self._schema), tuple(zip(wrong, (reason for _, reason in bad), strict=True))
        )

    def _chunks(self, records: Sequence[bytes]) -> Iterator[DecodedPart]:
        # In even chunks: small enough that a bad record spoils little, large enough that starting Arrow's reader costs little.
        step = math.ceil(len(records) / math.ceil(len(records) / CHUNK_RECORDS)) if records else 1
        for at in range(0, len(records), step):
            yield from self._divide(records[at : at + step], at)

    def _divide(self, records: Sequence[bytes], start: int) -> Iterator[DecodedPart]:
        """The records by Arrow; on doubt in eight parts, so that a bad record costs little more than its chunk a second time."""
        count, size = len(records), sum(map(len, records))
        if self._only_reference or (count <= self._few and size <= FEW_BYTES) or (count == 1 and size > MAX_BLOCK_BYTES):
            yield self.read_row_wise(records, start)
            return
        if size <= CHUNK_BYTES or count == 1:
            found = self._read_part(records, start)
            if found is not None:
                yield found
                return
        if count == 1:
            yield self.read_row_wise(records, start)
            return
        step = math.ceil(count / DIVISIONS)
        for at in range(0, count, step):
            yield from self._divide(records[at : at + step], start + at)

    def _read_part(self, records: Sequence[bytes], start: int) -> DecodedPart | None:
        """All of them by Arrow but for bad ones that a screen finds; None when there is any doubt."""
        screens = self._screens if len(records) >= FINDER_MIN_RECORDS else ()
        # Where bad records were there are likely to be more, and Arrow need not be asked in vain.
        first = screens[:1] if self._recently_bad else ()
        found = self._read_without_suspects(records, start, first)
        if found is None:
            batch = self._read_batch(records)
            if batch is not None:
                self._recently_bad = False
                return batch, []
            found = self._read_without_suspects(records, start, screens[len(first) :])
        return found

    def _read_without_suspects(
        self, records: Sequence[bytes], start: int, screens: Sequence[SuspectFinder]
    ) -> DecodedPart | None:
        for screen in screens:
            found = self._separate_suspects(records, screen(records), start)
            if found is not None:
                self._recently_bad = True
                self._screens = (screen, *(other for other in self._screens if other is not screen))
                return found
        return None

    def _separate_suspects(self, records: Sequence[bytes], suspects: Sequence[int], start: int) -> DecodedPart | None:
        """The suspects by the reference and the others by Arrow; None where a suspect is good, or Arrow still in doubt."""
        if not suspects or 2 * len(suspects) > len(records):
            return None
        wrong: list[tuple[int, str]] = []
        others: list[bytes] = []
        reached = 0
        for at in suspects:
            self.row_wise_count += 1
            try:
                self._read_one(records[at])
                return None
            except BadValue as e:
                wrong.append((start + at, e.reason))
            others += records[reached:at]
            reached = at + 1
        batch = self._read_batch([*others, *records[reached:]])
        return None if batch is None else (batch, wrong)

    def read_row_wise(self, records: Sequence[bytes], start: int) -> DecodedPart:
        """Record by record; positions are counted from ``start``."""
        rows: list[list[Any]] = []
        bad: list[tuple[int, str]] = []
        self.row_wise_count += len(records)
        for at, record in enumerate(records, start):
            try:
                rows.append(self._read_one(record))
            except BadValue as e:
                bad.append((at, e.reason))
        columns = list(zip(*rows, strict=True)) or [()] * len(self._schema)
        arrays = [pa.array(values, f.type) for f, values in zip(self._schema, columns, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema), bad


def check_within(array: pa.Array, low: int, high: int) -> None:
    """Raises unless all values, as their integers, lie in the range."""
    kind = {32: pa.int32(), 64: pa.int64()}[array.type.bit_width]
    ends = pc.min_max(array.view(kind))
    smallest, largest = ends["min"].as_py(), ends["max"].as_py()
    if smallest is not None and not low <= smallest <= largest <= high:
        raise NeedsRowWise


def check_length(length: int) -> ArrayFunction:
    def checked(array: pa.Array) -> pa.Array:
        longest = pc.max(pc.utf8_length(array)).as_py()
        if longest is not None and longest > length:
            raise NeedsRowWise
        return array

    return checked


def check_years(array: pa.Array) -> pa.Array:
    check_within(array, MIN_MICRO, MAX_MICRO)
    return array


def timestamps_from_text(array: pa.Array) -> pa.Array:
    return check_years(array.cast(pa.timestamp("us")))


def dates_from_text(array: pa.Array) -> pa.Array:
    dates = array.cast(pa.date32())
    check_within(dates, MIN_DATE, 1 << 30)
    return dates
