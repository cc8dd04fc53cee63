"""Partition fields as users write them: ``day``, ``bucket(16, id)``, ``hour(placed_at)``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.schema import Schema
    from pyiceberg.transforms import Transform

_FIELD = re.compile(r"([A-Za-z]+)\(\s*(?:(?P<first>\d+)\s*,\s*)?(?P<column>[^(),]+?)\s*(?:,\s*(?P<last>\d+)\s*)?\)")
_PARAMETRIC = ("bucket", "truncate")
_TIMES = ("year", "month", "day", "hour")
EXPECTED = "a column, `bucket(N, column)`, `truncate(N, column)`, or `year`, `month`, `day` or `hour` of `(column)`"


@dataclass(frozen=True)
class PartitionField:
    """A column, and the transform that makes partition values of it.

    :param column: name of the column.
    :param transform: name of the transform as Iceberg has it: ``identity``, ``bucket[16]``, ``day``.
    """

    column: str
    transform: str = "identity"

    @classmethod
    def parse(cls, text: str) -> PartitionField:
        """Return the field that a text names.

        :raises ValueError: the text has parentheses, but is no transform of a column.
        """
        if "(" not in text:
            return cls(text)
        found = _FIELD.fullmatch(text.strip())
        name = found[1].lower().removesuffix("s") if found else ""
        width = (found["first"] or found["last"]) if found else None
        if found and name in _PARAMETRIC and width and int(width) > 0:
            return cls(found["column"], f"{name}[{int(width)}]")
        if found and name in _TIMES and width is None:
            return cls(found["column"], name)
        raise ValueError(f"`{text}` is not understood; expected {EXPECTED}")

    @property
    def name(self) -> str:
        """The name of the partition field, as Spark calls it."""
        transform, _, _ = self.transform.partition("[")
        if transform == "identity":
            return self.column
        return f"{self.column}_{'trunc' if transform == 'truncate' else transform}"

    def __str__(self) -> str:
        if self.transform == "identity":
            return self.column
        name, _, width = self.transform.rstrip("]").partition("[")
        return f"{name}({width}, {self.column})" if width else f"{name}({self.column})"

    def parsed(self) -> Transform[Any, Any]:
        """Return the transform of pyiceberg."""
        from pyiceberg.transforms import parse_transform

        return parse_transform(self.transform)


def fields_of(spec: PartitionSpec, schema: Schema) -> list[PartitionField]:
    """Return the fields of a table's spec, without those that were removed from a table of format version 1."""
    found = [PartitionField(schema.find_column_name(f.source_id) or f.name, str(f.transform)) for f in spec.fields]
    return [field for field in found if field.transform != "void"]


def make_spec(fields: list[PartitionField], schema: Schema) -> PartitionSpec:
    """Return the spec of a table that is created.

    :raises ValueError: the schema has no such column.
    """
    from pyiceberg import partitioning

    first = 1000
    made = [
        partitioning.PartitionField(schema.find_field(f.column).field_id, first + i, f.parsed(), f.name)
        for i, f in enumerate(fields)
    ]
    return partitioning.PartitionSpec(*made)
