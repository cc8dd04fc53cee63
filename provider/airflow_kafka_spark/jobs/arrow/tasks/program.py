"""A program over record batches, which computes columns and only when they are needed.

Runs in Spark's tasks: imports neither Airflow nor pyspark. No struct is built between two transforms: the program works on the
fields, and builds only the structs of its results. If a condition has one value for a whole batch, which is the usual case ("no
error so far"), only the branch that it selects is computed.

A function that fails for some values is computed only for the rows that need it, as in Spark: the rows of its branch, those that
a filter keeps, and those for which the left side of AND and OR does not decide. In other rows its arguments count as null.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.errors import SqlFailed
from airflow_kafka_spark.formats.base import OFFSET
from airflow_kafka_spark.jobs.arrow.tasks.functions import FALLIBLE, FUNCTIONS, ExpressionFailed, Value

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
    - ``call``: the function ``data`` of :data:`~airflow_kafka_spark.jobs.arrow.tasks.functions.FUNCTIONS`.

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

    @cached_property
    def fallible(self) -> frozenset[int]:
        """Return the nodes that may fail because of a value, and those that use them."""
        found: set[int] = set()
        for at, node in enumerate(self.nodes):
            if (node.kind == CALL and node.data in FALLIBLE) or not found.isdisjoint(node.args):
                found.add(at)
        return frozenset(found)

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
        """Return the columns of a batch.

        :raises ExpressionFailed: the program fails for a value.
        """
        return _Evaluation(self, batch).run()

    def over(self, batches: Iterable[pa.RecordBatch], place: object) -> Iterator[pa.RecordBatch]:
        """Yield the columns of the batches of a split.

        :param place: the topic and partition of the split, for the message.
        :raises SqlFailed: the program fails for a record. The first such record of its batch is named.
        """
        for batch in batches:
            try:
                made = self(batch)
            except ExpressionFailed as refused:
                raise SqlFailed(f"{place}@{self._find_first_refused(batch)}", str(refused)) from None
            yield made

    def _find_first_refused(self, batch: pa.RecordBatch) -> int:
        while batch.num_rows > 1:
            half = batch.slice(0, batch.num_rows // 2)
            try:
                self(half)
                batch = batch.slice(half.num_rows)
            except ExpressionFailed:
                batch = half
        return int(batch.column(batch.schema.get_field_index(OFFSET))[0].as_py())

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
        arrays = [self._make_column(node, count) for _, node in self._program.outputs]
        return pa.RecordBatch.from_arrays(arrays, names)

    def _make_column(self, node: int, count: int) -> pa.Array:
        value = self._get_value(node)
        return pa.repeat(value, count) if isinstance(value, pa.Scalar) else value

    def _get_value(self, at: int, rows: pa.Array | None = None) -> Value:
        """Return the value of a node.

        :param rows: the rows that need it; None: all. Only nodes that may fail use it: in other rows their value is not used.
        """
        if at not in self._program.fallible:
            rows = None
        if rows is not None:
            return self._compute(self._program.nodes[at], rows)
        found = self._values.get(at)
        if found is None:
            found = self._values[at] = self._compute(self._program.nodes[at], None)
        return found

    def _compute(self, node: Node, rows: pa.Array | None) -> Value:
        if node.kind == CASE:
            return self._compute_case(node, rows)
        if node.kind == COLUMN:
            return self._given.column(self._given.schema.get_field_index(node.data))
        if node.kind == LITERAL:
            return pa.scalar(node.data, node.type)
        if node.kind == FIELD:
            return pc.struct_field(self._get_value(node.args[0], rows), [node.data])
        if node.kind == KEPT:
            return self._filter_kept(node, rows)
        if node.kind == STRUCT:
            return self._make_struct(node, rows)
        return self._call(node, rows)

    def _call(self, node: Node, rows: pa.Array | None) -> Value:
        if node.data in ("both", "either") and node.args[1] in self._program.fallible:
            left = self._get_value(node.args[0], rows)
            # The left side decides if it is false, or true: then the right side is not computed.
            undecided = pc.fill_null(left if node.data == "both" else pc.invert(left), True)
            if isinstance(undecided, pa.Scalar):
                if not undecided.as_py():
                    return left
            elif not self._all_branches:
                rows = undecided if rows is None else pc.and_(rows, undecided)
            return FUNCTIONS[node.data](node.type, left, self._get_value(node.args[1], rows))
        values = [self._get_value(arg, rows) for arg in node.args]
        if rows is None or node.data not in FALLIBLE:
            return FUNCTIONS[node.data](node.type, *values)
        first = values[0]
        return FUNCTIONS[node.data](node.type, pc.if_else(rows, first, pa.scalar(None, first.type)), *values[1:])

    def _compute_case(self, node: Node, rows: pa.Array | None) -> Value:
        *pairs, last = node.args
        open_branches: list[tuple[pa.Array, int, pa.Array | None]] = []
        for condition, value in zip(pairs[::2], pairs[1::2], strict=True):
            holds = self._get_value(condition, rows)
            if self._all_branches:
                open_branches.append((holds, value, None))
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
                holds = pc.fill_null(holds, False)
                open_branches.append((holds, value, holds if rows is None else pc.and_(rows, holds)))
                rows = pc.invert(holds) if rows is None else pc.and_not(rows, holds)
        otherwise = self._get_value(last, rows)
        # From the last branch to the first, because the first true condition decides. A condition that is null is not true.
        made = otherwise
        for holds, value, within in reversed(open_branches):
            made = pc.if_else(pc.fill_null(holds, False), self._get_value(value, within), made)
        return made

    def _make_struct(self, node: Node, rows: pa.Array | None) -> Value:
        *fields, null = (self._get_value(arg, rows) for arg in node.args)
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

    def _filter_kept(self, node: Node, rows: pa.Array | None) -> Value:
        """Return the rows of an earlier node that a filter keeps."""
        of = node.args[0]
        if of not in self._program.fallible:
            value = self._get_value(of)
            mask = None if isinstance(value, pa.Scalar) else self._find_mask(node.data)
            return value if mask is None else value.filter(mask)
        mask = self._find_mask(node.data)
        if mask is None:
            return self._get_value(of, rows)
        mask = pc.fill_null(mask, False)
        value = self._get_value(of, mask if rows is None else pc.replace_with_mask(mask, mask, rows))
        return value if isinstance(value, pa.Scalar) else value.filter(mask)

    def _find_mask(self, number: int) -> pa.Array | None:
        """Return the rows that a filter keeps of those that reach it; None if it keeps all."""
        if number not in self._kept:
            holds = self._get_value(self._program.filters[number])
            if isinstance(holds, pa.Scalar):
                mask = None if holds.as_py() else pa.repeat(pa.scalar(False), self._count(number))
            else:
                mask = None if holds.true_count == len(holds) else holds
            self._kept[number] = mask
        return self._kept[number]

    def _count(self, filters: int) -> int:
        """Return the number of rows after this many filters."""
        if filters not in self._counts:
            mask = self._find_mask(filters - 1)
            self._counts[filters] = self._count(filters - 1) if mask is None else mask.true_count
        return self._counts[filters]
