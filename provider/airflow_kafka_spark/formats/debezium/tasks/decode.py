"""Debezium's change events flattened to rows, in batches."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.formats.base import Decoded, Decoder

_ROWS = pa.array(["c", "u", "r"])
_ENVELOPE = re.compile(rb'\s*\{\s*"(?:schema|payload)"\s*:').match


@dataclass(frozen=True)
class DebeziumDecoder(Decoder):
    """The decoder of :class:`~airflow_kafka_spark.formats.debezium.format.Debezium`.

    :param events: decodes the events: ``op``, ``after``, perhaps ``before``, and the added fields.
    :param schema: the columns of the rows.
    :param added: the fields that become columns: the struct that contains them, their name, the column's name.
    :param rewrites: True if a delete event becomes a row.
    :param deleting: the events that delete the row of their key: ``d`` for delete events, ``none`` for tombstones.
    :param ignores_truncates: True to leave out truncate events; False if they are bad.
    :param placeholder: the text in place of a value that the log does not hold; None if such texts are values.
    """

    events: Decoder
    schema: pa.Schema
    added: tuple[tuple[str, str, str], ...]
    rewrites: bool
    deleting: Collection[str]
    ignores_truncates: bool
    placeholder: str | None = None

    def decode(self, values: Sequence[bytes | None]) -> Decoded:
        """Return the rows of the events."""
        return self._decode_rows(self.events.decode(values), values)

    def _decode_rows(self, events: Decoded, values: Sequence[bytes | None]) -> Decoded:
        batch = events.batch
        op, after = batch.column("op"), batch.column("after")
        is_row = np.asarray(pc.and_(pc.is_in(op, _ROWS), after.is_valid()))
        columns = [*after.flatten(), *(self._get_added_column(batch, outer, name) for outer, name, _ in self.added)]
        incomplete = self._find_incomplete_rows(after)
        if incomplete:
            is_row[list(incomplete)] = False
        if is_row.all():
            columns += [pa.repeat("false", len(values))] if self.rewrites else []
            return Decoded(self._decode_batch(columns))
        bad, deleted, left_out = {**incomplete, **dict(events.bad)}, np.zeros(len(values), bool), []
        gone = set() if events.deleted is None else set(np.flatnonzero(np.asarray(events.deleted)).tolist())
        from_before = np.zeros(len(values), bool)
        for at in np.flatnonzero(~is_row).tolist():
            if at in bad:
                continue
            kind = "none" if values[at] is None or at in gone else op[at].as_py()
            if kind in self.deleting:
                deleted[at] = values[at] is not None
            elif kind == "d" and self.rewrites and batch.column("before")[at].is_valid:
                from_before[at] = True
            elif kind in ("none", "m") or (kind == "d" and not self.rewrites) or (kind == "t" and self.ignores_truncates):
                left_out.append(at)
            else:
                bad[at] = _describe_wrong_operation(kind, values[at])
        columns += [pa.array(np.where(from_before, "true", "false"))] if self.rewrites else []
        if from_before.any():
            before = batch.column("before")
            for n, name in enumerate(f.name for f in after.type):
                columns[n] = self._choose(columns[n], before.flatten()[before.type.get_field_index(name)], from_before)
        kept = is_row | from_before
        order = pa.array(np.arange(len(values)), pa.int64(), mask=~kept)
        rows = self._decode_batch([c.take(order) for c in columns])
        mask = pa.array(deleted) if deleted.any() else None
        return Decoded(rows, tuple(sorted(bad.items())), mask, tuple(left_out))

    def _find_incomplete_rows(self, rows: pa.StructArray) -> dict[int, str]:
        """Return the rows that lack a value which the log does not hold, and the reason why they are bad."""
        found: dict[int, str] = {}
        if self.placeholder is None:
            return found
        placeholder = self.placeholder.encode()
        for field, column in zip(rows.type, rows.flatten(), strict=True):
            texts = column
            if pa.types.is_list(field.type):
                texts = pc.list_element(column.filter(_has_one(column)), 0)
            if not pa.types.is_string(texts.type) and not pa.types.is_binary(texts.type):
                continue
            is_missing = pc.equal(texts, pa.scalar(placeholder, pa.binary()).cast(texts.type))
            if not pc.any(is_missing).as_py():
                continue
            places = np.arange(len(rows)) if texts is column else np.flatnonzero(np.asarray(_has_one(column)))
            for at in places[np.asarray(is_missing.fill_null(False))].tolist():
                found.setdefault(at, _describe_missing_value(field.name))
        return found

    def _decode_batch(self, columns: list[pa.Array]) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _get_added_column(self, batch: pa.RecordBatch, outer: str, name: str) -> pa.Array:
        if not outer:
            return batch.column(name)
        struct = batch.column(outer)
        return struct.flatten()[struct.type.get_field_index(name)]

    def _choose(self, after: pa.Array, before: pa.Array, from_before: np.ndarray) -> pa.Array:
        positions = np.arange(len(after))
        return pa.concat_arrays([after, before]).take(pa.array(np.where(from_before, positions + len(after), positions)))


def _has_one(lists: pa.ListArray) -> pa.Array:
    """Return for each list whether it has one element."""
    return pc.fill_null(pc.equal(pc.list_value_length(lists), 1), False)


def _describe_missing_value(column: str) -> str:
    return (
        f"the event does not hold the value of `{column}`, which is stored out of line and was not changed; "
        "set ALTER TABLE ... REPLICA IDENTITY FULL on the source's table, and write the row again"
    )


def _describe_wrong_operation(op: str | None, value: bytes | None) -> str:
    if op is None:
        missing = "`op` is missing; expected a change event of Debezium"
        envelope = value is not None and _ENVELOPE(value) is not None
        return f"{missing}; it looks like Connect's envelope, which Debezium(JsonEnvelope(...)) reads" if envelope else missing
    if op in ("c", "u", "r"):
        return f"`after` is null in an event of op `{op}`; expected the row"
    if op == "d":
        return "`before` is null in a delete event; expected the row that was deleted, or the mode `tombstone`"
    if op == "t":
        return 'it is a truncate of the table, which no sink repeats; empty the target, then set truncates="ignore"'
    return f"`op` is {op!r}; expected c, u, r, d, t or m"
