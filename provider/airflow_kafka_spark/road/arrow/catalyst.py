"""From what Spark's analyzer has made of a chain of transforms to a program in Arrow, where all of it is known here.

The analyzer has named every column by a number, chosen every function and put in every cast, so nothing of Spark's SQL is
guessed. Only what the outputs need is looked at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from airflow_kafka_spark.road.arrow.building import Builder, Unknown
from airflow_kafka_spark.road.arrow.expressions import EXPRESSIONS, Expression, LevelColumn, LevelColumns, number_of, short
from airflow_kafka_spark.road.arrow.tasks.program import Program

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_PLANS = "org.apache.spark.sql.catalyst.plans.logical."

_DEEPEST = 250
_LARGEST = 64_000_000


def program_of(frame: DataFrame, schema: pa.Schema) -> Program:
    """Return the program that makes the same of a record frame as Spark's plan.

    :param frame: what was made, by columns and filters alone, of a frame that was created from rows.
    :param schema: of the batches: that frame's columns.
    :raises Unknown: some of it is not known here; or the session is one of Spark Connect, which shows no plan.
    """
    try:
        program = _program_of(frame, schema)
        program.rehearse(schema)
    except Unknown:
        raise
    except Exception as error:
        # A plan of another form than those that were seen, or a type for which Arrow has no function. Spark knows what to do.
        raise Unknown(f"plan like this one ({type(error).__name__}: {str(error).partition(chr(10))[0]})") from error
    return program


def _program_of(frame: DataFrame, schema: pa.Schema) -> Program:
    from pyspark.sql.pandas.types import to_arrow_schema

    plan = _plan(frame)
    # A plan's text repeats a struct's type wherever that is named, so it grows with the square of the fields.
    told = str(plan.toJSON())
    if len(told) > _LARGEST:
        raise Unknown(f"a plan of {len(told)} characters")
    levels = json.loads(told)
    *upper, leaf = levels
    if any(level["num-children"] != 1 for level in upper) or leaf["num-children"]:
        raise Unknown("a plan that is no chain")
    builder = Builder()
    known = _leaf(builder, leaf, schema)
    for at in range(len(levels) - 2, -1, -1):
        known = _level(builder, levels[at], known, lambda at=at: plan.apply(at))  # type: ignore[misc]
    types = to_arrow_schema(frame.schema)
    outputs = [(column.name, builder.whole(column.node, types.field(column.name).type)) for column in known.values()]
    if any(builder.depth_of(at) > _DEEPEST for _, at in outputs):
        raise Unknown(f"expressions nested more than {_DEEPEST} deep")
    return builder.program(outputs)


def _plan(frame: DataFrame) -> Any:
    execution = getattr(getattr(frame, "_jdf", None), "queryExecution", None)
    if execution is None:
        raise Unknown("a session of Spark Connect")
    return execution().analyzed()


# --- levels: projections and filters -----------------------------------------------------------------------------------------


def _leaf(builder: Builder, level: Mapping[str, Any], schema: pa.Schema) -> LevelColumns:
    if "output" not in level:
        raise Unknown(short(level))
    columns = [output[0] for output in level["output"]]
    return {
        number_of(c): LevelColumn(c["name"], lambda c=c: builder.column(c["name"], schema.field(c["name"]).type))  # type: ignore[misc]
        for c in columns
    }


def _level(builder: Builder, level: Mapping[str, Any], known: LevelColumns, plan: Callable[[], Any]) -> LevelColumns:
    kind = level["class"]
    if kind == f"{_PLANS}Project":
        made: dict[int, LevelColumn] = {}
        for index, trees in enumerate(level["projectList"]):
            top, found = trees[0], Expression(builder, known, trees, lambda i=index: plan().expressions().apply(i))  # type: ignore[misc]
            if top["class"] not in (f"{EXPRESSIONS}Alias", f"{EXPRESSIONS}AttributeReference"):
                raise Unknown(short(top))
            made[number_of(top)] = LevelColumn(top["name"], found.node)
        return made
    if kind == f"{_PLANS}Filter":
        condition = Expression(builder, known, level["condition"], lambda: plan().expressions().apply(0))
        number = builder.filter(condition.node())
        return {
            key: LevelColumn(column.name, lambda column=column: builder.kept(column.node, number))  # type: ignore[misc]
            for key, column in known.items()
        }
    raise Unknown(short(level))


__all__ = ["Unknown", "program_of"]
