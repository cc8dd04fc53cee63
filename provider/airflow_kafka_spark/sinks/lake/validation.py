"""Columns of the rows beside those of a lake table: the problems that a table of every format has with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from airflow_kafka_spark.errors import Problem


@dataclass(frozen=True)
class ComparedColumn:
    """A column of the rows beside the table's column that takes it.

    :param name: its name in the rows.
    :param kind: its type, for messages.
    :param expected: the type of the table's column; None if the table has none for it.
    :param fits: True if the table's column takes its values.
    """

    name: str
    kind: str
    expected: str | None
    fits: bool


def doubled_names(names: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem if columns differ in upper and lower case only."""
    count = Counter(name.casefold() for name in names)
    if doubled := [name for name in names if count[name.casefold()] > 1]:
        yield Problem("schema", f"many readers take the columns `{'`, `'.join(doubled)}` for one", "Rename all but one of them")


def column_problems(
    option: str, rows: Iterable[ComparedColumn], there: Mapping[str, str], required: Iterable[tuple[str, bool]], auto_evolve: bool
) -> Iterator[Problem]:
    """Yield a problem for each column that the table does not take.

    :param option: the option that names the table.
    :param there: the types of the table's columns, for messages.
    :param required: the table's columns that take no null where rows may have one, with True if the rows have that column.
    """
    for column in rows:
        where, name = f"sink.{option} column `{column.name}`", column.name
        if column.expected is not None:
            if not column.fits:
                what = f"found {column.kind}; expected {column.expected}, as the table has it"
                yield Problem(where, what, "Correct the schema, or give the column another name")
        elif alike := [known for known in there if known.casefold() == name.casefold()]:
            yield Problem(where, f"the table has `{alike[0]}`, and many readers take the two for one", f"Call it `{alike[0]}`")
        elif not auto_evolve:
            known = ", ".join(f"`{known}` {kind}" for known, kind in there.items())
            what = f"it is new ({column.kind}); the table has {known}"
            yield Problem(where, what, "Set `auto_evolve=True` on the sink, or leave it out of the schema")
    for name, has in required:
        what = "the table takes no null in it, and " + ("rows may have one" if has else "the rows do not have it")
        yield Problem(f"sink.{option} column `{name}`", what, "Let the table's column take nulls (`DROP NOT NULL`)")
