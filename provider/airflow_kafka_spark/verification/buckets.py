"""Comparison by buckets of the key's hash, for keys that two systems sort differently, and for tables without an index or a key.

Each side reads its rows once, in pieces, and adds up the checksums of each bucket. Buckets that differ are divided until they are
small. Then their rows are read from both sides. Each of these steps reads both tables once more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Protocol, TypeVar

from airflow_kafka_spark.verification.concurrency import ConcurrentWork, ProgressLog
from airflow_kafka_spark.verification.forms import CanonicalRow, Form, Sums
from airflow_kafka_spark.verification.report import Findings

log = logging.getLogger(__name__)

FEWEST, MOST = 16, 4_096
"""Number of buckets in the first step."""
DIVISION = 64
"""Number of parts into which a bucket is divided."""
DIVIDED_BUCKETS = 1_000
"""Maximum number of differing buckets that are divided. The rows of more buckets are read without a division."""
READ_ROWS = 10_000
"""Maximum number of rows of a bucket that is read without a further division."""
ROUND_ROWS = 200_000
"""Maximum number of rows of each side that are read at a time, unless a single bucket has more."""
ROUNDS = 20
"""Maximum number of times that both tables are read to find the rows that differ."""

BucketSums = dict[int, Sums]
"""The sums of buckets by their numbers; a bucket without rows may be missing."""


@dataclass(frozen=True)
class Buckets:
    """Some of the buckets into which a table's rows are divided by the hash of their keys.

    :param count: the number of all buckets. The bucket of a row is the checksum of its key, modulo this number.
    :param parents: the number of buckets from which ``chosen`` were selected; a divisor of ``count``.
    :param chosen: the buckets of that division whose rows are compared; None for all.
    """

    count: int
    parents: int = 1
    chosen: frozenset[int] | None = None

    def find(self, key_checksum: int) -> int | None:
        """Return the bucket of a row; None if the row is not compared."""
        if self.chosen is not None and key_checksum % self.parents not in self.chosen:
            return None
        return key_checksum % self.count

    def select(self, chosen: Iterable[int]) -> Buckets:
        """Return the given buckets of this division."""
        return Buckets(self.count, self.count, frozenset(chosen))

    def divide(self, chosen: Iterable[int]) -> Buckets:
        """Return a finer division of these buckets."""
        return Buckets(self.count * DIVISION, self.count, frozenset(chosen))


PieceT = TypeVar("PieceT")


class BucketSide(Protocol[PieceT]):
    """A table whose rows are read in pieces."""

    @property
    def forms(self) -> tuple[Form, ...]: ...

    def estimate_row_count(self) -> int:
        """Return the approximate number of rows; 0 if it is unknown."""

    def read_pieces(self) -> Iterator[PieceT]:
        """Yield the pieces of the table, each row in exactly one."""

    def sum_buckets(self, piece: PieceT, buckets: Buckets) -> BucketSums:
        """Return the sums of the rows of a piece, by bucket."""

    def read_bucket_rows(self, piece: PieceT, buckets: Buckets) -> list[CanonicalRow]:
        """Return the rows of a piece that are in these buckets."""


@dataclass(frozen=True)
class BucketResult:
    """The result of the comparison of all buckets.

    :param source_rows: the source's rows.
    :param sink_rows: the sink's rows.
    :param buckets: the number of buckets.
    :param differing: the buckets that differ.
    """

    source_rows: int
    sink_rows: int
    buckets: Buckets
    differing: frozenset[int]


@dataclass(frozen=True)
class BucketComparison:
    """Compares two tables by buckets.

    :param source: the table with the expected rows.
    :param sink: the table that is compared with it.
    :param work: runs the comparisons.
    """

    source: BucketSide
    sink: BucketSide
    work: ConcurrentWork

    def scan(self) -> BucketResult:
        """Compare all buckets."""
        sides = (self.source, self.sink)
        expected = [self.work.run_with_retries(side.estimate_row_count) for side in sides]
        buckets = Buckets(min(MOST, max(FEWEST, max(expected) // READ_ROWS)))
        progress = ProgressLog(sum(expected))
        source, sink = (self._compute_sums(side, buckets, progress) for side in sides)
        return BucketResult(_count_rows(source.values()), _count_rows(sink.values()), buckets, _find_differing(source, sink))

    def find_differing(self, buckets: Buckets, chosen: Set[int]) -> frozenset[int]:
        """Return the chosen buckets that still differ."""
        some = buckets.select(chosen)
        return _find_differing(self._compute_sums(self.source, some), self._compute_sums(self.sink, some))

    def name_differences(self, buckets: Buckets, chosen: frozenset[int], findings: Findings) -> int:
        """Find the rows that differ in the chosen buckets.

        :return: the number of buckets that differ and whose rows were not read, because there are too many.
        """
        while chosen:
            some = buckets.divide(chosen) if len(chosen) <= DIVIDED_BUCKETS else buckets.select(chosen)
            source, sink = self._compute_sums(self.source, some), self._compute_sums(self.sink, some)
            buckets, chosen = some, _find_differing(source, sink)
            sizes = {number: max(_get_size(source, number), _get_size(sink, number)) for number in chosen}
            # Rows with equal keys have equal hashes, so no division separates them.
            small = max(sizes.values(), default=0) <= READ_ROWS
            if small or len(chosen) > DIVIDED_BUCKETS or buckets.count > max(sizes.values()) * DIVISION**2:
                return self._read(buckets, sizes, findings)
        return 0

    def _read(self, buckets: Buckets, sizes: Mapping[int, int], findings: Findings) -> int:
        left = sorted(sizes)
        for _ in range(ROUNDS):
            if not left:
                break
            taken = [left.pop()]
            while left and sum(map(sizes.__getitem__, taken)) + sizes[left[-1]] <= ROUND_ROWS:
                taken.append(left.pop())
            some = buckets.select(taken)
            findings.compare(self._read_rows(self.source, some), self._read_rows(self.sink, some))
        return len(left)

    def _compute_sums(self, side: BucketSide, buckets: Buckets, progress: ProgressLog | None = None) -> BucketSums:
        total: BucketSums = {}
        for _, found in self.work.map_concurrently(lambda piece: side.sum_buckets(piece, buckets), side.read_pieces()):
            for number, sums in found.items():
                add_sums(total, number, sums)
            if progress is not None:
                progress.add(_count_rows(found.values()))
        return total

    def _read_rows(self, side: BucketSide, buckets: Buckets) -> Iterator[CanonicalRow]:
        for _, rows in self.work.map_concurrently(lambda piece: side.read_bucket_rows(piece, buckets), side.read_pieces()):
            yield from rows


def add_sums(total: BucketSums, number: int, sums: Sums) -> None:
    """Add the sums of some rows to those of their bucket."""
    rows, checksum = total.get(number, (0, 0))
    total[number] = Sums(rows + sums.rows, checksum + sums.checksum)


def _find_differing(source: BucketSums, sink: BucketSums) -> frozenset[int]:
    return frozenset(number for number in source.keys() | sink.keys() if source.get(number) != sink.get(number))


def _get_size(sums: BucketSums, number: int) -> int:
    return sums[number].rows if number in sums else 0


def _count_rows(sums: Iterable[Sums]) -> int:
    return sum(each.rows for each in sums)
