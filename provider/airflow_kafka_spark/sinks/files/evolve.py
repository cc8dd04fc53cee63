"""Columns of a directory's windows: what was there before, and whether the rows of the next window still fit beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import Problem

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_kafka_spark.sinks.files.options import FilesOptions


def columns_of(schema: pa.Schema) -> dict[str, str]:
    """Names and types, in their order."""
    return {field.name: str(field.type) for field in schema}


def together(before: Mapping[str, str], schema: pa.Schema) -> dict[str, str]:
    """All columns that the windows up to this one have had: those that came first stand first."""
    return {**before, **columns_of(schema)}


def problems(sink: FilesOptions, before: Mapping[str, str], schema: pa.Schema) -> Iterator[Problem]:
    """What is different from the windows that are there.

    :param before: their columns; empty where nothing is known of them.
    """
    if not before:
        return
    now = columns_of(schema)
    for name, kind in now.items():
        where = f"sink.path column `{name}`"
        if name in before and before[name] != kind:
            what = f"found {kind}; expected {before[name]}, as in the windows that are there: readers cannot combine the two"
            yield Problem(where, what, "Correct the schema, give the column another name, or name another directory")
        elif name not in before and (alike := [known for known in before if known.casefold() == name.casefold()]):
            what = f"the windows that are there have `{alike[0]}`, and Spark takes the two for one"
            yield Problem(where, what, f"Call it `{alike[0]}` in the schema, or give it another name")
        elif name not in before and not sink.auto_evolve:
            what = f"it is new ({kind}); the windows that are there have {_listed(before)}"
            yield Problem(where, what, "Set `auto_evolve=True` on the sink, or leave it out of the schema")
    if sink.format == "csv" and list(now)[: len(before)] != list(before):
        what = f"found {_listed(now)}; expected {_listed(before)}, and new ones behind them: readers of CSV go by position"
        yield Problem("sink.format", what, "Keep the columns and their order, or name another directory")


def _listed(columns: Mapping[str, str]) -> str:
    return ", ".join(f"`{name}` {kind}" for name, kind in columns.items())
