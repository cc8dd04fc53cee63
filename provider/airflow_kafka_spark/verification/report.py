"""The result of a verification: counts, and the keys of rows that differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from airflow_kafka_spark.verification.forms import CanonicalRow, Form, to_report_value

DifferenceKind = Literal["missing", "extra", "different", "doubled"]
KINDS: tuple[DifferenceKind, ...] = ("missing", "extra", "different", "doubled")


@dataclass(frozen=True)
class RowDifference:
    """A row that differs.

    :param kind: ``missing``: the sink lacks it; ``extra``: the source has no row of its key; ``different``: a value differs;
        ``doubled``: the sink has more rows of its key than the source.
    :param key: its key, by the source's names.
    :param columns: the source's columns whose values differ.
    """

    kind: DifferenceKind
    key: tuple[tuple[str, Any], ...]
    columns: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the value for a report."""
        return {"kind": self.kind, "key": dict(self.key), **({"columns": list(self.columns)} if self.columns else {})}

    def __str__(self) -> str:
        key = ", ".join(f"{name}={value!r}" for name, value in self.key)
        return f"{self.kind}: {key}" + (f" ({', '.join(self.columns)})" if self.columns else "")


@dataclass
class Findings:
    """Counts differences, and keeps the keys of the first ones.

    :param names: the source's columns, the key's columns first.
    :param forms: the form of each column.
    :param key: the number of columns of the key.
    :param most: maximum number of keys that are kept.
    """

    names: tuple[str, ...]
    forms: tuple[Form, ...]
    key: int
    most: int
    counts: Counter[DifferenceKind] = field(default_factory=Counter)
    kept: list[RowDifference] = field(default_factory=list)

    def compare(self, source: Iterable[CanonicalRow], sink: Iterable[CanonicalRow]) -> None:
        """Compare all rows that both sides have of some keys."""
        ours, theirs = self._group_by_key(source), self._group_by_key(sink)
        for key, rows in ours.items():
            self._compare_key(key, rows, theirs.pop(key, Counter()))
        for key, rows in theirs.items():
            self._add("extra", key, rows.total())

    def _group_by_key(self, rows: Iterable[CanonicalRow]) -> dict[CanonicalRow, Counter[CanonicalRow]]:
        found: dict[CanonicalRow, Counter[CanonicalRow]] = {}
        for row in rows:
            found.setdefault(row[: self.key], Counter())[row[self.key :]] += 1
        return found

    def _compare_key(self, key: CanonicalRow, source: Counter[CanonicalRow], sink: Counter[CanonicalRow]) -> None:
        ours, theirs = source - sink, sink - source
        pairs = min(ours.total(), theirs.total())
        if pairs:
            self._add("different", key, pairs, next(iter(ours)), next(iter(theirs)))
        self._add("missing", key, ours.total() - pairs)
        self._add("doubled", key, theirs.total() - pairs)

    def _add(
        self, kind: DifferenceKind, key: CanonicalRow, count: int, ours: CanonicalRow = (), theirs: CanonicalRow = ()
    ) -> None:
        if not count:
            return
        self.counts[kind] += count
        if len(self.kept) < self.most:
            named = zip(self.names, map(to_report_value, self.forms, key), strict=False)
            others = zip(self.names[self.key :], ours, theirs, strict=False)
            self.kept.append(RowDifference(kind, tuple(named), tuple(name for name, a, b in others if a != b)))


@dataclass(frozen=True)
class VerificationReport:
    """The result of a verification.

    :param source: the source's URI.
    :param sink: the sink's URI.
    :param method: ``ranges`` or ``buckets``, see :class:`~airflow_kafka_spark.operators.VerifyOperator`.
    :param columns: the source's columns that were compared.
    :param source_rows: the number of rows that the source had.
    :param sink_rows: the number of rows that the sink had.
    :param chunks: the number of chunks that were compared.
    :param differing_chunks: the number of chunks that differed at first.
    :param settled_chunks: the number of chunks that differed at first and were equal when they were compared again.
    :param counts: the number of rows by kind of difference.
    :param differences: the first rows that differ.
    :param uncounted_chunks: the number of differing chunks whose rows were not read, because there are too many. Their rows are
        not in ``counts``.
    :param seconds: the duration.
    """

    source: str
    sink: str
    method: Literal["ranges", "buckets"]
    columns: Sequence[str]
    source_rows: int
    sink_rows: int
    chunks: int
    differing_chunks: int
    settled_chunks: int
    counts: dict[DifferenceKind, int]
    differences: Sequence[RowDifference]
    uncounted_chunks: int
    seconds: float

    @property
    def is_equal(self) -> bool:
        """True if no row differs."""
        return not any(self.counts.values()) and not self.uncounted_chunks

    @property
    def summary(self) -> str:
        """The numbers of rows that differ, as a clause."""
        said = {"missing": "missing in the sink", "extra": "only in the sink", "different": "different", "doubled": "doubled"}
        found = [f"{count:,} {said[kind]}" for kind in KINDS if (count := self.counts.get(kind, 0))]
        if self.uncounted_chunks:
            found.append(f"more in {self.uncounted_chunks:,} chunks")
        return ", ".join(found) or "equal"

    def to_json(self) -> dict[str, Any]:
        """Return the value for XCom."""
        return {
            "source": self.source,
            "sink": self.sink,
            "equal": self.is_equal,
            "method": self.method,
            "columns": list(self.columns),
            "source_rows": self.source_rows,
            "sink_rows": self.sink_rows,
            "chunks": self.chunks,
            "differing_chunks": self.differing_chunks,
            "settled_chunks": self.settled_chunks,
            **{kind: self.counts.get(kind, 0) for kind in KINDS},
            "differences": [difference.to_json() for difference in self.differences],
            "uncounted_chunks": self.uncounted_chunks,
            "seconds": round(self.seconds, 3),
        }
