"""What a process has read of a window in the ledger, so that each look of its tasks reads only what came since. Runs in Spark's
tasks: imports neither Airflow nor pyspark.

Spark's Python workers run many tasks, one after the other. Without this, each of n tasks would read the markers of all that were
published before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from airflow_kafka_spark.ledger.topic import LedgerPlace
from airflow_kafka_spark.windows.memory import LedgerRecord, Memory, marker_key, remember, split_prefix, window_key

KEPT = 4
"""Claims whose records a process keeps: several pipelines may share Spark's workers."""

ReadFrom = Callable[[int], Iterator[LedgerRecord]]
"""Returns the committed records of the ledger's partition from an offset on."""


class ClaimedWindow:
    """The newest records of one claimed window: its own, and the markers of its splits.

    :param place: the claim.
    """

    def __init__(self, place: LedgerPlace) -> None:
        self._place = place
        self._mine = (window_key(place.pipeline, place.number), split_prefix(place.pipeline, place.number))
        self._newest: dict[bytes, LedgerRecord] = {}
        self._last: LedgerRecord | None = None

    def read_on(self, read: ReadFrom, end: int) -> None:
        """Read what came since the last time. Begin again at the claim if the log is not the one that was read then.

        Reading goes on with the last record of this window, which has to be there as it was, leader epoch included. It is not

        - in a log that has lost its end, whatever was written to it since, and in a ledger that was created anew;
        - after the window was closed or given up, once compaction has removed something of that: markers get their tombstones in
          the transaction that ends their window, so that they are removed before any of these tombstones is.

        Everything before a record that a read_committed reader has seen is decided: what a transaction hides lies behind it.

        :param end: the partition's high watermark.
        """
        last = self._last
        if last is not None:
            records = read(last.offset) if last.offset < end else iter(())
            if next(records, None) == last:
                self._take(records)
                return
            self._newest, self._last = {}, None
        self._take(read(self._place.offset))

    def _take(self, records: Iterator[LedgerRecord]) -> None:
        for record in records:
            if record.key.startswith(self._mine):
                self._newest[record.key] = self._last = record

    def memory(self, split: int) -> Memory:
        """Return what these records say of the window and of one of its splits."""
        place = self._place
        keys = (window_key(place.pipeline, place.number), marker_key(place.pipeline, place.number, split))
        return remember(place.pipeline, [self._newest[key] for key in keys if key in self._newest])


_kept: OrderedDict[LedgerPlace, ClaimedWindow] = OrderedDict()


def look(place: LedgerPlace, split: int, read: ReadFrom, end: int) -> Memory:
    """Return what the ledger says of a claimed window and of one of its splits.

    :param place: the claim. Its token is unique.
    :param end: the partition's high watermark: everything committed before it is seen.
    """
    # Taken out while it is read on: a thread beside begins at the claim, and so does the next look after an error.
    window = _kept.pop(place, None) or ClaimedWindow(place)
    window.read_on(read, end)
    _kept[place] = window
    while len(_kept) > KEPT:
        _kept.popitem(last=False)
    return window.memory(split)
