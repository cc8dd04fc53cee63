"""How whole batches of Avro values are read: by polars, from an Avro file that is made up around them in memory.

A value in Kafka is a row of an Avro file without its file. So the values of a batch become the one block of a file, whose
schema has the writer's types by what they are on the wire: enums and ints are longs, booleans are single bytes, decimals and
timestamps are bytes and longs, maps are arrays of key and value. What these mean is decided here, with Arrow and NumPy, by the
rules of :mod:`.avro.tasks.row_decode`; anything that might mean something else raises :class:`.Doubt`.

Why row n holds value n and nothing else. After every value stands a nonce of 8 random bytes, made after the values were, and the
file's schema ends in a field for it. Every row that is read has to end in the nonce. As there are as many rows as nonces, and
rows follow each other without a gap, each row ends exactly where its value does.

What polars does not look at is which branch of a union a number names: anything but 0 is the second. Where a schema has
optional fields, the places of these numbers are computed from the sizes of the values before them, and compared.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.formats import types
from airflow_kafka_spark.formats.avro.resolution import branch_for, field_for, goes_with
from airflow_kafka_spark.formats.avro.schema import ArrayOf, Enum, Field, Fixed, Leaf, MapOf, Record, Schema, Union, columns_of
from airflow_kafka_spark.formats.avro.tasks.convert import Change, NoFastPath, content, long_of, scalar_change
from airflow_kafka_spark.formats.avro.tasks.layout import Binary, Items, Layout, Long, Optional, Row, Sized
from airflow_kafka_spark.formats.avro.tasks.row_decode import default_of, smallest_size, without_logical
from airflow_kafka_spark.formats.tasks.batch_decoder import Doubt, never_null

NONCE_BYTES = 8
_SYNC = bytes(16)
_silence = threading.Lock()


@dataclass(frozen=True)
class Step:
    """How values of one type are read.

    :param schema: the type in the file, as JSON.
    :param layout: where its values stand.
    :param change: from what polars gave to the column.
    """

    schema: Any
    layout: Layout
    change: Change


class Plan:
    """Reads batches of one writer.

    :param writer: the schema they were written with.
    :param reader: the schema of the columns.
    :param header: how many bytes stand before each value.
    :raises NoFastPath: there is something in the schemas that only the reference reads.
    """

    def __init__(self, writer: Record, reader: Record, header: int) -> None:
        self._schema = types.arrow_schema(columns_of(reader))
        self._header = header
        self._names = 0
        compiled = self._fields(writer, reader)
        self._steps, self._build = compiled
        ahead = [{"name": "h", "type": self._fixed(header)}] if header else []
        fields = [{"name": f"f{n}", "type": step.schema} for n, (step, _) in enumerate(self._steps)]
        last = {"name": "z", "type": self._fixed(NONCE_BYTES)}
        text = json.dumps({"type": "record", "name": "T", "fields": [*ahead, *fields, last]}).encode()
        meta = long_of(1) + long_of(11) + b"avro.schema" + long_of(len(text)) + text + long_of(0)
        self._head = b"Obj\x01" + meta + _SYNC
        self._layout = Row([step.layout for step, _ in self._steps])

    def read(self, values: Sequence[bytes], head: bytes) -> pa.RecordBatch:
        """One row per value.

        :param head: what every value has to begin with; looked at.
        :raises Doubt: one of them is bad, or may be.
        """
        nonce = os.urandom(NONCE_BYTES)
        body = nonce.join(values) + nonce
        file = b"".join((self._head, long_of(len(values)), long_of(len(body)), body, _SYNC))
        try:
            with _silent():
                frame = pl.read_avro(io.BytesIO(file))
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, OverflowError):
            raise Doubt from None
        if frame.height != len(values) or content(_arrow(frame["z"]))[1].tobytes() != nonce * len(values):
            raise Doubt
        if head and content(_arrow(frame["h"]))[1].tobytes() != head * len(values):
            raise Doubt
        columns = [_arrow(frame[f"f{n}"]) for n in range(len(self._steps))]
        if self._layout.looks:
            self._check(columns, values, body)
        try:
            return pa.RecordBatch.from_arrays(self._build(columns, len(values)), schema=self._schema)
        except (pa.ArrowException, OverflowError, UnicodeDecodeError):
            raise Doubt from None

    def _check(self, columns: list[pa.Array], values: Sequence[bytes], body: bytes) -> None:
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        starts = np.cumsum(lengths + NONCE_BYTES) - lengths - NONCE_BYTES + self._header
        sizes = self._layout.sizes_of(columns)
        if not np.array_equal(sum(sizes) + self._header, lengths):
            raise Doubt
        self._layout.check_of(columns, sizes, starts, np.frombuffer(body, np.uint8))

    # --- types -------------------------------------------------------------------------------------------------------

    def _fixed(self, size: int) -> dict[str, Any]:
        return {"type": "fixed", "name": self._name(), "size": size}

    def _name(self) -> str:
        self._names += 1
        return f"N{self._names}"

    def _step(self, writer: Schema, reader: Schema) -> Step:
        """How the writer's type is read as the reader's."""
        if isinstance(writer, Union):
            return self._optional(writer, reader)
        if isinstance(reader, Union):
            if len(reader.present) != 1 or (at := branch_for(writer, reader)) is None or reader.branches[at].kind == "null":
                raise NoFastPath
            reader = reader.branches[at]
        if not goes_with(writer, reader):
            raise NoFastPath
        if isinstance(writer, Record):
            return self._record(writer, cast(Record, reader))
        if isinstance(writer, ArrayOf):
            return self._array(writer, cast(ArrayOf, reader))
        if isinstance(writer, MapOf):
            return self._map(writer, cast(MapOf, reader))
        return self._leaf(writer, cast("Leaf | Fixed | Enum", reader))

    def _leaf(self, writer: Leaf | Fixed | Enum, reader: Leaf | Fixed | Enum) -> Step:
        change = scalar_change(writer, reader)
        if isinstance(writer, Fixed):
            return Step(self._fixed(writer.size), Sized(writer.size), change)
        if writer.kind == "boolean":
            return Step(self._fixed(1), Sized(1), change)
        if writer.kind in ("enum", "int", "long"):
            return Step("long", Long(), change)
        if writer.kind in ("bytes", "string"):
            return Step(writer.kind, Binary(), change)
        if writer.kind == "null":
            raise NoFastPath
        return Step(writer.kind, Sized(4 if writer.kind == "float" else 8), change)

    def _optional(self, writer: Union, reader: Schema) -> Step:
        if not writer.optional:
            raise NoFastPath
        if isinstance(reader, Union) and (not reader.optional):
            raise NoFastPath
        step = self._step(writer.present[0], reader)
        first = writer.branches[0].kind == "null"
        change = step.change if isinstance(reader, Union) else never_null(step.change)
        schema = ["null", step.schema] if first else [step.schema, "null"]
        return Step(schema, Optional(step.layout, 2 if first else 0, 0 if first else 2), change)

    def _array(self, writer: ArrayOf, reader: ArrayOf) -> Step:
        # Items without bytes could be more than memory holds.
        if not smallest_size(writer.items):
            raise NoFastPath
        item, wanted = self._step(writer.items, reader.items), _type_of(reader)

        def change(array: pa.Array) -> pa.Array:
            return pa.ListArray.from_arrays(_offsets(array), item.change(array.flatten()), type=wanted)

        return Step({"type": "array", "items": item.schema}, Items(item.layout), change)

    def _map(self, writer: MapOf, reader: MapOf) -> Step:
        key, item = self._leaf(Leaf("string"), Leaf("string")), self._step(writer.values, reader.values)
        wanted = cast(pa.MapType, _type_of(reader))

        def change(array: pa.Array) -> pa.Array:
            entries = array.flatten()
            keys, values = key.change(entries.field(0)), item.change(entries.field(1))
            _refuse_doubles(array, keys)
            made = pa.MapArray.from_arrays(_offsets(array), keys, values)
            return made if made.type == wanted else made.cast(wanted)

        fields = [{"name": "k", "type": key.schema}, {"name": "v", "type": item.schema}]
        schema = {"type": "array", "items": {"type": "record", "name": self._name(), "fields": fields}}
        return Step(schema, Items(Row([key.layout, item.layout])), change)

    def _record(self, writer: Record, reader: Record) -> Step:
        if not writer.fields:
            raise NoFastPath
        steps, build = self._fields(writer, reader)
        wanted = _type_of(reader)

        def change(array: pa.Array) -> pa.Array:
            children = build([array.field(n) for n in range(len(steps))], len(array))
            return pa.StructArray.from_arrays(children, fields=list(wanted), mask=array.is_null())

        fields = [{"name": f"f{n}", "type": step.schema} for n, (step, _) in enumerate(steps)]
        return Step({"type": "record", "name": self._name(), "fields": fields}, Row([s.layout for s, _ in steps]), change)

    def _fields(
        self, writer: Record, reader: Record
    ) -> tuple[list[tuple[Step, Field | None]], Callable[[Sequence[pa.Array], int], list[pa.Array]]]:
        """The steps of a writer's fields, and what makes the reader's columns of what they read."""
        steps: list[tuple[Step, Field | None]] = []
        for written in writer.fields:
            field = field_for(written, writer, reader)
            bare = without_logical(written.type)
            steps.append((self._step(bare, bare) if field is None else self._step(written.type, field.type), field))
        taken = {field.name for _, field in steps if field}
        constants: dict[str, pa.Array] = {}
        for f in reader.fields:
            if f.name not in taken:
                if not f.default:
                    raise NoFastPath
                constants[f.name] = pa.array([default_of(f)], _type_of(f.type))

        def build(arrays: Sequence[pa.Array], rows: int) -> list[pa.Array]:
            # What nobody reads is changed too: it has to fit all the same.
            made = {f.name if f else n: s.change(a) for n, ((s, f), a) in enumerate(zip(steps, arrays, strict=True))}
            none = pa.array(np.zeros(rows, np.int64))
            return [made[f.name] if f.name in made else constants[f.name].take(none) for f in reader.fields]

        return steps, build


def _type_of(schema: Schema) -> pa.DataType:
    return types.arrow_schema(columns_of(Record("one", (Field("x", schema),)))).field(0).type


def _arrow(series: pl.Series) -> pa.Array:
    array = series.to_arrow(compat_level=pl.CompatLevel.oldest())
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _offsets(array: pa.Array) -> pa.Array:
    """Where each list begins among all items, null where the list is."""
    counts = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
    ends = np.zeros(len(array) + 1, np.int64)
    np.cumsum(counts, out=ends[1:])
    if ends[-1] > np.iinfo(np.int32).max:
        raise Doubt
    mask = np.append(array.is_null().to_numpy(zero_copy_only=False), False) if array.null_count else None
    return pa.array(ends.astype(np.int32), mask=mask)


def _refuse_doubles(array: pa.Array, keys: pa.Array) -> None:
    """Of a key that a map has twice, the reference takes the last."""
    if not len(keys):
        return
    counts = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
    codes = pc.dictionary_encode(keys)
    pairs = np.repeat(np.arange(len(counts)), counts) * len(codes.dictionary) + codes.indices.to_numpy()
    if len(np.unique(pairs)) != len(pairs):
        raise Doubt


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without a message on standard error: polars writes one for each value that ends too early."""
    # One thread at a time: another one would take the silence for what it has to restore.
    with _silence:
        sys.stderr.flush()
        kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            os.close(nowhere)
