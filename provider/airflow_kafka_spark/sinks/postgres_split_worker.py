"""The task's side of ``atomic="split"``: a split goes into the target itself, in one transaction with its marker.

Where bad records are tolerated, a split that holds some, or rows that the target refuses, is put off: nothing of it is written,
and its marker says that no task will. Which those are, and what becomes of them, has to be decided before the others are
committed: that is the driver's affair (:mod:`~airflow_kafka_spark.sinks.postgres_splits`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from airflow_kafka_spark.errors import Fenced, SinkRejected
from airflow_kafka_spark.hooks.postgres import Name, quote
from airflow_kafka_spark.sinks import postgres_sql as sql
from airflow_kafka_spark.sinks.base import Rows
from airflow_kafka_spark.sinks.postgres_connection import is_refusal, lock_key
from airflow_kafka_spark.sinks.postgres_load_worker import Session, Stream
from airflow_kafka_spark.sinks.postgres_merge import Merge, Stage
from airflow_kafka_spark.sinks.postgres_worker import CopyWriter

PUT_OFF = "put_off"
"""What the token says of a split that was put off."""

_TEMPORARY = "airflow_split"
_POLL_SECONDS = 0.05
_IN_THE_WAY = ("40P01", "55P03")
"""A deadlock, or a lock that is not to be had: other splits may hold, uncommitted, rows that exclude rows of this one."""


@dataclass
class SplitAtomicWriter(CopyWriter):
    """Loads a split into the target, in one transaction with its marker: a split is there once, or not at all.

    Whoever holds the split's lock may write its marker. The first task to come takes it, writes the marker and loads. Another
    one loads a temporary table meanwhile and, once that is complete, waits for the lock; a holder that is still not done after
    the lock timeout, perhaps paused for good, is ended.

    :param windows: the sink's record of windows.
    :param splits: the markers.
    :param merge: how rows get from a temporary table into the target.
    :param direct: whether COPY may write the target itself.
    :param owner: the attempt that these tasks belong to, as the splits table names it: once another one owns the pipeline's
        splits, none of them commits anything.
    :param tolerates: whether the split is put off, and the window goes on, where the target refuses some of its rows.
    """

    windows: Name
    splits: Name
    merge: Merge
    direct: bool
    owner: int
    tolerates: bool = False
    _claimed: bool = field(default=False, init=False, repr=False)

    def _begin(self, session: Session) -> Mapping[str, Any] | None:
        self._claimed = session.rows(sql.try_lock(self._lock))[0][0]
        return self._claim(session) if self._claimed else None

    def _claim(self, session: Session) -> Mapping[str, Any] | None:
        """With the lock held: write the marker, or tell what is there.

        :raises Fenced: another attempt owns the pipeline's splits.
        :raises SinkRejected: another split is there that has some of the same offsets.
        """
        # First: the row stays locked until this transaction ends. Whoever takes the window over waits for that, and then sees the
        # marker; or was faster, and then this sees that.
        owners = session.rows(sql.owner_of(self.splits, self.load.pipeline))
        if (there := self._known(session)) is not None:
            return there
        # Its markers go when the next window is applied: a task that comes later still must not find the way free.
        if session.rows(sql.applied_since(self.windows, self.load.pipeline, self.load.number)):
            return {}
        if [owner for (owner,) in owners] != [self.owner]:
            raise Fenced(self.load.pipeline, f"writing {self.split.range} of window {self.load.number}")
        self._refuse_overlap(session)
        session.run(sql.claim_split(self.splits, self.load.pipeline, self.load.number, self._marker))
        return None

    def _known(self, session: Session) -> Mapping[str, Any] | None:
        there = next((marker for marker in self._markers(session) if marker[:4] == self._marker[:4]), None)
        return None if there is None else _token(there)

    def _refuse_overlap(self, session: Session) -> None:
        mine = self._marker
        for there in self._markers(session):
            shares = there.start == mine.start or (there.start < mine.end and mine.start < there.end)
            if there[:2] == mine[:2] and shares:
                detail = f"an earlier attempt wrote {there.text} as one split, this one has {self.split.range}"
                raise SinkRejected(self.load.target, self.load.window, detail, "Keep the splits of a window until it is complete")

    def _markers(self, session: Session) -> list[sql.Marker]:
        found = session.rows(sql.markers(self.splits, self.load.pipeline, self.load.number))
        return [sql.Marker(*row) for row in found]

    def _start(self, session: Session) -> Stream:
        if self._copies:
            filled = [sql.OFFSET_TYPES[sql.OFFSET_COLUMNS.index(name)] for name in self.merge.filled]
            return Stream(session, self.merge.target, self._schema, [*(c.sql for c in self.load.columns), *filled])
        session.run(sql.create_temporary(self.load.definitions, _TEMPORARY))
        return Stream(session, _TEMPORARY, self._schema, [kind for _, kind in self.load.definitions])

    def _end(self, session: Session, rows: int) -> Mapping[str, Any]:
        copied = self._copies
        if not self._claimed:
            self._wait(session)
            self._claimed = True
            if (there := self._claim(session)) is not None:
                return {"rows": rows, **there}
        written, deleted = (rows, 0) if copied or not rows else self._merge(session)
        if rows != self.progress.seen or (not self.merge.key and written != rows):
            detail = f"{self.progress.seen} rows of {self.split.range} became {written}"
            raise SinkRejected(self.load.target, self.load.window, detail, "See the table's triggers")
        marker = self._marker._replace(rows=rows, written=written, deleted=deleted)
        session.run(sql.count_split(self.splits, self.load.pipeline, self.load.number, marker))
        session.commit()
        return _token(marker)

    def put_off(self) -> None:
        """See :meth:`SplitWriter.put_off`."""
        if self.tolerates and self.progress.there is None:
            with self._explained("putting off"):
                self.progress.there = self._put_off()

    def _put(self, rows: Rows) -> None:
        try:
            super()._put(rows)
        except Exception as error:
            if not self._puts_off(error):
                raise
            self.progress.there = self._put_off()

    def _flush(self) -> Mapping[str, Any]:
        try:
            return super()._flush()
        except Exception as error:
            if not self._puts_off(error):
                raise
            return {"rows": self.progress.seen, **self._put_off()}

    def _puts_off(self, error: Exception) -> bool:
        return self.tolerates and (is_refusal(error) or getattr(error, "sqlstate", None) in _IN_THE_WAY)

    def _put_off(self) -> Mapping[str, Any]:
        """Take back what was written of the split, for good: whoever comes for it finds its marker. Another task may have been
        faster, with that or with the split."""
        if self.progress.stream is not None:
            # Its thread uses the session until then: to close that before it would crash the process.
            self.progress.stream.abandon()
            self.progress.stream = None
        self.progress.session.close()
        session = self.progress.session = self._open_session()
        self._wait(session)
        if (there := self._claim(session)) is None:
            marker = self._marker._replace(rows=sql.PUT_OFF)
            session.run(sql.count_split(self.splits, self.load.pipeline, self.load.number, marker))
            session.commit()
            there = _token(marker)
        session.close()
        return there

    def _wait(self, session: Session) -> None:
        """Take the split's lock, if need be from a task that is slower than this one."""
        deadline = time.monotonic() + self.load.server.lock_timeout
        # Asked, not waited for: an error would cost the transaction, and what is loaded with it.
        while not session.rows(sql.try_lock(self._lock))[0][0]:
            if time.monotonic() > deadline:
                session.rows(sql.end_holder(self._lock))
            time.sleep(_POLL_SECONDS)

    def _merge(self, session: Session) -> tuple[int, int]:
        stage = Stage(quote(_TEMPORARY), self.split.range.topic, self.split.range.partition)
        if not self.merge.key:
            return session.run(self.merge.insert(stage)), 0
        if not self.progress.tombstones:
            return session.run(self.merge.upsert([stage])), 0
        written, deleted = session.rows(self.merge.upsert_and_delete([stage]))[0]
        return written, deleted

    @property
    def _copies(self) -> bool:
        """Whether the rows go straight into the target."""
        return self.direct and self._claimed

    @property
    def _marker(self) -> sql.Marker:
        r = self.split.range
        return sql.Marker(r.topic, r.partition, r.start, r.end)

    @property
    def _lock(self) -> int:
        r = self.split.range
        return lock_key(
            "split", str(self.windows), self.load.pipeline, str(self.load.number), r.topic, str(r.partition), str(r.start)
        )

    @property
    def _schema(self) -> pa.Schema:
        if not self._copies:
            return self.load.schema
        kinds = dict(zip(sql.OFFSET_COLUMNS, (pa.string(), pa.int32(), pa.int64()), strict=True))
        own = [(c.name, c.arrow) for c in self.load.columns]
        return pa.schema([*own, *((name, kinds[name]) for name in self.merge.filled)])

    def _encode(self, rows: Rows) -> pa.RecordBatch:
        batch, n, r = self.load.encode(rows), rows.batch.num_rows, self.split.range
        if not self._copies:
            return batch
        known = (pa.repeat(pa.scalar(r.topic), n), pa.repeat(pa.scalar(r.partition, pa.int32()), n), rows.offsets)
        origin = dict(zip(sql.OFFSET_COLUMNS, known, strict=True))
        own = batch.columns[: len(self.load.columns)]
        return pa.RecordBatch.from_arrays([*own, *(origin[name] for name in self.merge.filled)], schema=self._schema)


def _token(marker: sql.Marker) -> Mapping[str, Any]:
    if marker.put_off:
        return {PUT_OFF: True}
    return {"rows": marker.rows, "written": marker.written, "deleted": marker.deleted}
