"""Windows full of awkward values for sinks. :class:`Feed` makes one after the other, like a pipeline."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import lru_cache
from typing import Any

import pyarrow as pa

from airflow_kafka_spark.sinks.base import Rows, Shape
from airflow_kafka_spark.windows.model import OffsetRange, Split, TopicPartition, Window

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("name", pa.string()),
        ("amount", pa.decimal128(12, 2)),
        ("wide", pa.decimal128(38, 10)),
        ("placed_at", pa.timestamp("us", "UTC")),
        ("wall_clock", pa.timestamp("us")),
        ("day", pa.date32()),
        ("flag", pa.bool_()),
        ("tiny", pa.int8()),
        ("small", pa.int16()),
        ("medium", pa.int32()),
        ("ratio", pa.float64()),
        ("share", pa.float32()),
        ("raw", pa.binary()),
        ("tags", pa.list_(pa.string())),
        ("place", pa.struct([("city", pa.string()), ("zip", pa.int32())])),
        ("counts", pa.map_(pa.string(), pa.int64())),
    ]
)
"""One column of each type that Spark's DDL has."""

TEXTS = [
    "plain",
    "",
    "Grüße, Łódź",
    "日本語",
    "emoji 🎉👩‍👩‍👧",
    'a "quoted" word and ""two""',
    "comma, semicolon; tab\t.",
    "line\nbreak",
    'back\\slash \\n \\" \\',
    "it's",
    " blanks around ",
    "NULL",
    "null",
    "\\N",
    "NaN",
    "0012",
    "2026-11-20",
    '{"a": [1]}',
    "control \x01\x1f\x7f",
    "separators \u2028\u2029\xa0",
    "%41 # = / : ?",
    "x" * 3000,
]
_UTC = dt.timezone.utc
INSTANTS = [
    dt.datetime(2026, 11, 20, 12, 34, 56, 123456, _UTC),
    dt.datetime(1970, 1, 1, tzinfo=_UTC),
    dt.datetime(1969, 12, 31, 23, 59, 59, tzinfo=_UTC),
    dt.datetime(1900, 1, 1, tzinfo=_UTC),
    dt.datetime(2199, 12, 31, 23, 59, 59, 999999, _UTC),
    dt.datetime(2026, 3, 29, 1, 30, tzinfo=_UTC),
    dt.datetime(2026, 10, 25, 1, 30, 0, 1, _UTC),
]
WIDES = ["1234567890123456789012345678.0123456789", "-9999999999999999999999999999.9999999999", "0", "0.0000000001", "-1.5"]
RATIOS = [0.0, -0.0, 1.0, -1.5, 0.1, 1e300, 5e-324, 1e22, 123456789.125, math.nan, math.inf, -math.inf]
DAYS = ["Mo", "Di/Tu=?", None, "Fr 100%", "Sá"]
SHARES = [0.0, 1.0, -2.5, 3.4028234663852886e38, 0.10000000149011612, math.nan, math.inf]


def row(i: int) -> dict[str, Any]:
    """Return the row with this id; equal at each call. Over many ids, each column has all of its values, and nulls."""
    values: dict[str, Any] = {
        "name": TEXTS[i % len(TEXTS)],
        "amount": Decimal((-1) ** i * (i * 7919 % 10**12)).scaleb(-2),
        "wide": Decimal(WIDES[i % len(WIDES)]),
        "placed_at": INSTANTS[i % len(INSTANTS)],
        "wall_clock": INSTANTS[(i + 3) % len(INSTANTS)].replace(tzinfo=None),
        "day": dt.date(1900, 1, 1) + dt.timedelta(days=i * 997 % 100_000),
        "flag": i % 2 == 0,
        "tiny": i % 256 - 128,
        "small": i * 7 % 65536 - 32768,
        "medium": i * 7919 % 2**32 - 2**31,
        "ratio": RATIOS[i % len(RATIOS)],
        "share": SHARES[i % len(SHARES)],
        "raw": bytes([i % 256, 0, 255, 10, 34, 92]) if i % 5 else b"",
        "tags": [TEXTS[i % 7], None, TEXTS[-1 - i % 7]][: i % 4],
        "place": {"city": TEXTS[(i + 5) % len(TEXTS)], "zip": None if i % 3 == 0 else i},
        "counts": [(f"k{k} {TEXTS[k % 6]}", None if k == 2 else k) for k in range(i % 4)],
    }
    nulls = {name: None for n, name in enumerate(values) if (i + n) % 11 == 0}
    return {"id": i, "day_of_week": DAYS[i % len(DAYS)], **values, **nulls}


@dataclass(frozen=True)
class Job:
    """One window and all its rows; picklable, so that another process can write it, too."""

    window: Window
    splits: tuple[Split, ...]
    shape: Shape
    rows: Mapping[int, Sequence[Rows]]

    @property
    def expected(self) -> list[dict[str, Any]]:
        """Return the rows that a reader must find."""
        return [line for batches in self.rows.values() for rows in batches for line in rows.batch.to_pylist()]

    @property
    def ids(self) -> list[int]:
        return [i for batches in self.rows.values() for rows in batches for i in rows.batch["id"].to_pylist()]


def recut(job: Job, *cuts: float) -> Job:
    """Return an equal window and its rows in other splits.

    :param cuts: where each split is cut, as parts of its span.
    """
    splits: list[Split] = []
    data: dict[int, list[Rows]] = {}
    for split in job.splits:
        r = split.range
        bounds = [r.start, *(r.start + round(r.span * cut) for cut in cuts), r.end]
        for start, end in zip(bounds, bounds[1:], strict=False):
            if start == end:
                continue
            index = len(splits)
            splits.append(Split(index, OffsetRange(r.topic, r.partition, start, end)))
            within = [rows.filter(_between(rows.offsets, start, end)) for rows in job.rows[split.index]]
            data[index] = [rows for rows in within if rows.batch.num_rows]
    return Job(job.window, tuple(splits), job.shape, data)


def replayed(job: Job, replay: int = 1, first: int = 0) -> Job:
    """Return a replay of a window that finds fewer rows.

    :param first: rows of each batch that it no longer finds.
    """
    data = {
        n: [rows.filter(pa.array([i >= first for i in range(rows.batch.num_rows)])) for rows in b] for n, b in job.rows.items()
    }
    return replace(job, window=replace(job.window, replay=replay), rows=data)


def _between(offsets: pa.Array, start: int, end: int) -> pa.Array:
    return pa.array([start <= offset < end for offset in offsets.to_pylist()])


@dataclass
class Feed:
    """A pipeline's windows, one after the other, over two topics; one of their names begins with an underscore, as it may.

    :param schema: the rows' columns, some of :data:`SCHEMA`.
    :param pipeline: its name.
    :param first_id: of the first row.
    """

    schema: pa.Schema = SCHEMA
    pipeline: str = "shop.orders_to_warehouse"
    first_id: int = 0
    number: int = 0
    positions: dict[TopicPartition, int] = field(default_factory=dict)
    places: tuple[TopicPartition, ...] = (TopicPartition("orders", 0), TopicPartition("orders", 1), TopicPartition("_returns", 0))

    @property
    def shape(self) -> Shape:
        return Shape(self.pipeline, self.schema)

    def next(self, *counts: int, batch_rows: int = 16, values: Any = row) -> Job:
        """Return the next window.

        :param counts: rows of each split: one split per topic partition. Default: 40, 25 and 33.
        :param values: makes a row from an id.
        """
        self.number += 1
        splits, data = [], {}
        for index, (place, count) in enumerate(zip(self.places, counts or (40, 25, 33), strict=True)):
            start = self.positions.get(place, 0)
            # Every tenth offset is a transaction's marker or was compacted away: a split has fewer rows than offsets.
            offsets = [start + i + i // 9 for i in range(count)]
            end = offsets[-1] + 2 if offsets else start + 1
            splits.append(Split(index, OffsetRange(*place, start, end)))
            ids = range(self.first_id, self.first_id + count)
            self.first_id += count
            self.positions[place] = end
            data[index] = list(self._batches(ids, offsets, batch_rows, values))
        return self._job(splits, data)

    @property
    def _facts(self) -> dict[str, Any]:
        topic_ids = {place.topic: f"id of {place.topic}" for place in self.places}
        run = {"run": "dag/run/task", "planned_at": "2026-11-20T00:00:00+00:00"}
        return {**run, "cluster_id": "cluster", "topic_ids": topic_ids}

    def empty(self) -> Job:
        """Return the next window, which has no rows."""
        self.number += 1
        ranges = [OffsetRange(*place, (at := self.positions.get(place, 0)), at) for place in self.places]
        window = Window(self.pipeline, self.number, tuple(ranges), **self._facts)
        return Job(window, (), self.shape, {})

    def _job(self, splits: list[Split], data: Mapping[int, Sequence[Rows]]) -> Job:
        ranges = tuple(split.range for split in splits)
        window = Window(self.pipeline, self.number, ranges, **self._facts)
        return Job(window, tuple(splits), self.shape, data)

    def _batches(self, ids: range, offsets: list[int], size: int, values: Any) -> Iterator[Rows]:
        for at in range(0, len(ids), size):
            yield Rows(_batch(self.schema, values, ids[at : at + size]), pa.array(offsets[at : at + size], pa.int64()))


@lru_cache(5_000)
def _batch(schema: pa.Schema, values: Any, ids: range) -> pa.RecordBatch:
    """Return the rows of these ids. Each test begins with the ones that the test before began with."""
    return rows_of(schema, map(values, ids), ()).batch


def rows_of(schema: pa.Schema, lines: Iterable[Mapping[str, Any]], offsets: Sequence[int]) -> Rows:
    """Return a batch as a task gets it."""
    batch = pa.RecordBatch.from_pylist([{name: line[name] for name in schema.names} for line in lines], schema)
    return Rows(batch, pa.array(offsets, pa.int64()))
