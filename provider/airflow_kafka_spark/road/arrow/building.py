"""Programs are built here, expression by expression: what is the same is there once, and structs are known by their fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from airflow_kafka_spark.road.arrow.tasks.functions import FUNCTIONS
from airflow_kafka_spark.road.arrow.tasks.program import (
    CALL,
    CASE,
    COLUMN,
    FIELD,
    KEPT,
    LITERAL,
    STRUCT,
    Node,
    Program,
)

_BOOLEAN = pa.bool_()
_UNKNOWN = "unknown"


class Unknown(Exception):
    """Something that is not known here; its message says what. No fault: Spark does it."""


class Builder:
    """The nodes of a program that is being made. All methods take and return the numbers of nodes."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._depths: list[int] = []
        self._known: dict[Any, int] = {}
        self._filters: list[int] = []

    def type_of(self, at: int) -> pa.DataType:
        return self._nodes[at].type

    def constant(self, at: int) -> Any:
        """Return the value of a literal; None for any other node."""
        node = self._nodes[at]
        return node.data if node.kind == LITERAL else None

    def is_column(self, at: int, name: str) -> bool:
        """Return True if a node is a column of the batches, or the part of one that filters have kept."""
        node = self._nodes[at]
        return self.is_column(node.args[0], name) if node.kind == KEPT else node.kind == COLUMN and node.data == name

    def depth_of(self, at: int) -> int:
        """Return how deep the expressions of a node are nested."""
        return self._depths[at]

    # --- expressions ---

    def column(self, name: str, kind: pa.DataType) -> int:
        return self._add(Node(COLUMN, kind, (), name))

    def literal(self, value: Any, kind: pa.DataType) -> int:
        return self._add(Node(LITERAL, kind, (), value))

    def unknown(self, what: str) -> int:
        """Return the node of an expression that Arrow has no function for. A program that needs it cannot be made."""
        return self._add(Node(_UNKNOWN, pa.null(), (), what))

    def struct(self, names: Sequence[str], values: Sequence[int]) -> int:
        """Return a struct that is not null."""
        kind = pa.struct([pa.field(name, self.type_of(value)) for name, value in zip(names, values, strict=True)])
        return self._add(Node(STRUCT, kind, (*values, self.literal(False, _BOOLEAN))))

    def field(self, at: int, number: int) -> int:
        """Return a field of a struct; it is null where the struct is."""
        node = self._nodes[at]
        if node.kind == _UNKNOWN:
            return at
        kind = node.type.field(number).type
        if node.kind == STRUCT:
            value, null = node.args[number], node.args[-1]
            return self.case([(null, self.literal(None, kind))], value)
        if node.kind == LITERAL and node.data is None:
            return self.literal(None, kind)
        if node.kind == CASE:
            *pairs, last = node.args
            branches = [(c, self.field(v, number)) for c, v in zip(pairs[::2], pairs[1::2], strict=True)]
            return self.case(branches, self.field(last, number))
        if node.kind == KEPT:
            return self.kept(self.field(node.args[0], number), node.data)
        return self._add(Node(FIELD, kind, (at,), number))

    def is_null(self, at: int) -> int:
        node = self._nodes[at]
        if node.kind == LITERAL:
            return self.literal(node.data is None, _BOOLEAN)
        if node.kind == STRUCT:
            return node.args[-1]
        if node.kind == CASE:
            *pairs, last = node.args
            branches = [(c, self.is_null(v)) for c, v in zip(pairs[::2], pairs[1::2], strict=True)]
            return self.case(branches, self.is_null(last))
        if node.kind == KEPT:
            return self.kept(self.is_null(node.args[0]), node.data)
        return self.call("is_null", _BOOLEAN, at)

    def case(self, branches: Sequence[tuple[int, int]], otherwise: int) -> int:
        """Return the value of the first condition that is true, else the last value."""
        kept: list[tuple[int, int]] = []
        for condition, value in branches:
            said = self._nodes[condition]
            if said.kind == LITERAL and said.data:
                otherwise = value
                break
            if said.kind != LITERAL:
                kept.append((condition, value))
        while kept and kept[-1][1] == otherwise:
            kept.pop()
        if not kept:
            return otherwise
        return self._add(Node(CASE, self.type_of(otherwise), (*(at for pair in kept for at in pair), otherwise)))

    def coalesced(self, values: Sequence[int]) -> int:
        """Return the first value that is not null."""
        *before, last = values
        for value in reversed(before):
            last = self.case([(self.is_null(value), last)], value)
        return last

    def call(self, function: str, kind: pa.DataType, *args: int) -> int:
        """Return the call of a function of :data:`~airflow_kafka_spark.road.arrow.tasks.functions.FUNCTIONS`."""
        assert function in FUNCTIONS, function
        return self._add(Node(CALL, kind, args, function))

    # --- filters ---

    def filter(self, condition: int) -> int:
        """Keep only the rows for which a condition is true, from here on. Return the filter's number, for :meth:`kept`."""
        self._filters.append(condition)
        return len(self._filters) - 1

    def kept(self, at: int, number: int) -> int:
        """Return the part of an earlier node that a filter has kept."""
        node = self._nodes[at]
        return at if node.kind == LITERAL else self._add(Node(KEPT, node.type, (at,), number))

    # --- the end ---

    def whole(self, at: int, kind: pa.DataType) -> int:
        """Return a node that leaves the program, with its structs built.

        :param kind: its type, which also says what of a struct is never null.
        """
        node = self._nodes[at]
        if not pa.types.is_struct(node.type) or node.kind in (COLUMN, FIELD, LITERAL):
            return at
        if node.kind == KEPT and self._nodes[node.args[0]].kind in (COLUMN, FIELD):
            return at
        fields = [self.whole(self.field(at, number), kind.field(number).type) for number in range(kind.num_fields)]
        return self._add(Node(STRUCT, kind, (*fields, self.is_null(at))))

    def program(self, outputs: Sequence[tuple[str, int]]) -> Program:
        """Return the program that computes these columns, and nothing else.

        :raises Unknown: something has no node.
        """
        program = Program(tuple(self._nodes), tuple(outputs), tuple(self._filters)).without(())
        for node in program.nodes:
            if node.kind == _UNKNOWN:
                raise Unknown(node.data)
        return program

    def _add(self, node: Node) -> int:
        # Python takes 1, 1.0 and True for the same.
        key = (node.kind, str(node.type), node.args, type(node.data), repr(node.data))
        if key not in self._known:
            self._known[key] = len(self._nodes)
            self._nodes.append(node)
            self._depths.append(1 + max((self._depths[arg] for arg in node.args), default=0))
        return self._known[key]
