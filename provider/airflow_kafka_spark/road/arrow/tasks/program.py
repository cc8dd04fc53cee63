"""A program over record batches, which computes columns and only when they are needed.

Runs in Spark's tasks: imports neither Airflow nor pyspark. No struct is built between two transforms: the program works on the
fields, and builds only the structs of its results. If a condition has one value for a whole batch, which is the usual case ("no
error so far"), only the branch that it selects is computed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.road.arrow.tasks.functions import FUNCTIONS, Value

COLUMN, LITERAL, FIELD, STRUCT, CASE, KEPT, CALL = "column", "literal", "field", "struct", "case", "kept", "call"


@dataclass(frozen=True)
class Node:
    """One step of a program. The meaning of ``args`` and ``data`` depends on ``kind``:

    - ``column``: ``data`` names a column of the batch.
    - ``literal``: ``data`` is the value.
    - ``field``: the field number ``data`` of a struct.
    - ``struct``: ``args`` are the values of its fields, and last a boolean that is true if the struct is null.
    - ``case``: ``args`` are condition, value, condition, value ..., and last the value if no condition is true.
    - ``kept``: the rows of an earlier step that filter number ``data`` has kept.
    - ``call``: the function ``data`` of :data:`~airflow_kafka_spark.road.arrow.tasks.functions.FUNCTIONS`.

    :param type: of the value.
    """

    kind: str
    type: pa.DataType
    args: tuple[int, ...] = ()
    data: Any = None


@dataclass(frozen=True)
class Program:
    """A program that computes columns of a record batch and removes rows.

    :param nodes: the steps. Each one follows those that it uses.
    :param outputs: the node of each resulting column, by the column's name.
    :param filters: the nodes of filters, in their order. Rows stay for which all of them are true.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, int], ...]
    filters: tuple[int, ...] = ()

    @property
    def columns(self) -> frozenset[str]:
        """Return the columns that the program reads."""
        return frozenset(node.data for node in self.nodes if node.kind == COLUMN)

    def without_outputs(self, names: Collection[str]) -> Program:
        """Return the program without some outputs, and without the nodes that only they need."""
        outputs = [(name, at) for name, at in self.outputs if name not in names]
        wanted, asked = set[int](), [*(at for _, at in outputs), *self.filters]
        while asked:
            at = asked.pop()
            if at not in wanted:
                wanted.add(at)
                asked += self.nodes[at].args
        number = {at: index for index, at in enumerate(sorted(wanted))}
        nodes = [replace(self.nodes[at], args=tuple(number[arg] for arg in self.nodes[at].args)) for at in number]
        filters = tuple(number[at] for at in self.filters)
        return Program(tuple(nodes), tuple((name, number[at]) for name, at in outputs), filters)

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return _Evaluation(self, batch).run()

    def run_over_nulls(self, schema: pa.Schema) -> None:
        """Run all branches of the program over nulls.

        :param schema: the schema of the batches.
        :raises pyarrow.ArrowException: Arrow has no function for a type.
        """
        nulls = [pa.nulls(2, f.type) for f in schema]
        _Evaluation(self, pa.RecordBatch.from_arrays(nulls, schema.names), all_branches=True).run()


class _Evaluation:
    """The evaluation of a program over one batch."""

    def __init__(self, program: Program, batch: pa.RecordBatch, *, all_branches: bool = False) -> None:
        self._all_branches = all_branches
        self._program = program
        self._given = batch
        self._values: dict[int, Value] = {}
        self._kept: dict[int, pa.Array | None] = {}
        self._counts: dict[int, int] = {0: batch.num_rows}

    def run(self) -> pa.RecordBatch:
        count = self._count(len(self._program.filters))
        names = [name for name, _ in self._program.outputs]
        arrays = [self._column(node, count) for _, node in self._program.outputs]
        return pa.RecordBatch.from_arrays(arrays, names)

    def _column(self, node: int, count: int) -> pa.Array:
        value = self._value(node)
        return pa.repeat(value, count) if isinstance(value, pa.Scalar) else value

    def _value(self, at: int) -> Value:
        found = self._values.get(at)
        if found is None:
            found = self._values[at] = self._computed(self._program.nodes[at])
        return found

    def _computed(self, node: Node) -> Value:
        if node.kind == CASE:
            return self._case(node)
        if node.kind == COLUMN:
            return self._given.column(self._given.schema.get_field_index(node.data))
        if node.kind == LITERAL:
            return pa.scalar(node.data, node.type)
        if node.kind == FIELD:
            return pc.struct_field(self._value(node.args[0]), [node.data])
        if node.kind == KEPT:
            value = self._value(node.args[0])
            mask = None if isinstance(value, pa.Scalar) else self._mask(node.data)
            return value if mask is None else value.filter(mask)
        if node.kind == STRUCT:
            return self._struct(node)
        return FUNCTIONS[node.data](node.type, *map(self._value, node.args))

    def _case(self, node: Node) -> Value:
        *pairs, last = node.args
        open_branches: list[tuple[pa.Array, int]] = []
        for condition, value in zip(pairs[::2], pairs[1::2], strict=True):
            holds = self._value(condition)
            if self._all_branches:
                open_branches.append((holds, value))
                continue
            if isinstance(holds, pa.Scalar):
                if holds.as_py():
                    last = value
                    break
                continue
            trues = holds.true_count
            if trues == len(holds):
                last = value
                break
            if trues:
                open_branches.append((holds, value))
        otherwise = self._value(last)
        # From the last branch to the first, because the first true condition decides. A condition that is null is not true.
        return reduce(lambda rest, branch: self._either(branch[0], branch[1], rest), reversed(open_branches), otherwise)

    def _either(self, holds: pa.Array, value: int, otherwise: Value) -> Value:
        return pc.if_else(pc.fill_null(holds, False), self._value(value), otherwise)

    def _struct(self, node: Node) -> Value:
        *fields, null = (self._value(arg) for arg in node.args)
        lengths = {len(value) for value in (*fields, null) if isinstance(value, pa.Array)}
        if not lengths:
            values = dict(zip((f.name for f in node.type), (f.as_py() for f in fields), strict=True))
            return pa.scalar(None if null.as_py() else values, node.type)
        (count,) = lengths
        arrays = [pa.repeat(value, count) if isinstance(value, pa.Scalar) else value for value in fields]
        if isinstance(null, pa.Scalar):
            null = pa.repeat(null, count) if null.as_py() else None
        return pa.StructArray.from_arrays(arrays, fields=list(node.type), mask=null)

    # --- filters ---

    def _mask(self, number: int) -> pa.Array | None:
        """Return the rows that a filter keeps of those that reach it; None if it keeps all."""
        if number not in self._kept:
            holds = self._value(self._program.filters[number])
            if isinstance(holds, pa.Scalar):
                mask = None if holds.as_py() else pa.repeat(pa.scalar(False), self._count(number))
            else:
                mask = None if holds.true_count == len(holds) else holds
            self._kept[number] = mask
        return self._kept[number]

    def _count(self, filters: int) -> int:
        """Return the number of rows after this many filters."""
        if filters not in self._counts:
            mask = self._mask(filters - 1)
            self._counts[filters] = self._count(filters - 1) if mask is None else mask.true_count
        return self._counts[filters]
