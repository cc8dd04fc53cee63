"""A chain of transforms: check it, find the topics to which it routes records, and apply it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import Problem, ValidationError
from airflow_kafka_spark.formats.base import ERROR, ROUTE, make_spark_column
from airflow_kafka_spark.transforms.base import (
    CARRIED,
    FIXED,
    PARTS,
    ColumnTransform,
    RecordSchema,
    Transform,
    list_carried_columns,
)
from airflow_kafka_spark.transforms.custom import Python

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


TransformLike = Transform | Callable[["DataFrame"], "DataFrame"]
"""A transform, or a function of a record frame, which stands for ``Python(function)``."""


def as_transform(given: TransformLike) -> Transform:
    """Return a transform unchanged, and a function as ``Python(function)``."""
    return given if isinstance(given, Transform) else Python(given)


def find_chain_problems(
    transforms: Sequence[TransformLike], where: str = "transforms", *, capturing: bool = False
) -> list[Problem]:
    """Return the problems of the options of a chain's transforms, without Spark.

    :param transforms: in the order in which they apply.
    :param where: the operator's argument.
    :param capturing: True if the operator supports ``Filter(to=<sink>)``.
    """
    if isinstance(transforms, (str, Transform)) or not isinstance(transforms, Sequence):
        return [Problem(where, f"found {transforms!r}; expected a list of transforms", "Put them in a list")]
    found = []
    for index, given in enumerate(transforms):
        transform = as_transform(given)
        at = f"{where}[{index}] {transform.name}"
        found += transform.validate(at)
        if transform.captured_by is not None and not capturing:
            what = "it sends records to a sink, which only KafkaToSinkOperator does"
            found.append(Problem(f"{at}.to", what, "Name a topic, and take it to the sink with a KafkaToSinkOperator"))
    return found


def list_chain_routes(transforms: Sequence[TransformLike], where: str = "transforms") -> dict[str, str]:
    """Return the topics to which a chain routes records, by the argument that names each; empty if it is not a valid list.

    :param where: the operator's argument.
    """
    if not isinstance(transforms, Sequence):
        return {}
    found = {f"{where}[{n}] {t.name}.to": t.routes_to for n, t in enumerate(transforms) if isinstance(t, Transform)}
    return {where: topic for where, topic in found.items() if isinstance(topic, str)}


def apply_chain(
    frame: DataFrame, transforms: Sequence[TransformLike], where: str = "transforms", changed: set[str] | None = None
) -> DataFrame:
    """Apply transforms in order.

    :param frame: a record frame: ``key``, ``value``, ``topic``, ``partition``, ``offset``, ``timestamp``, ``headers`` and columns
        whose names begin with ``__kafka_``. The session's time zone is UTC.
    :param where: the operator's argument.
    :param changed: if given, the parts of a record that the transforms may change are added to it.
    :return: a record frame: the parts in this order, the carried columns unchanged, and ``__kafka_error``, null for records
        without an error. Rows that end a split are unchanged. Nothing is run. Do not filter it: Spark moves a filter down
        through the whole chain, with copies of its expressions. A :class:`~airflow_kafka_spark.transforms.routing.Filter` stays
        in its place.
    :raises ValidationError: a transform does not fit its input. The message names it by index and class.
    """
    from pyspark.errors import AnalysisException, ParseException

    frame = _make_record_frame(frame, where, routed=any(as_transform(given).routes_to for given in transforms))
    for index, given in enumerate(transforms):
        transform = as_transform(given)
        at = f"{where}[{index}] {transform.name}"
        try:
            if changed is not None:
                # A function of a frame may change any part.
                changed |= set(
                    transform.make_changes(RecordSchema(frame.schema)) if isinstance(transform, ColumnTransform) else PARTS
                )
            frame = transform.apply_guarded(frame)
            _ = frame.schema  # Spark Connect only reports errors when asked for the schema
        except ValidationError as error:
            found = [Problem(f"{at}.{problem.where}", problem.what, problem.action) for problem in error.problems]
            raise ValidationError(found) from error.__cause__
        except (AnalysisException, ParseException) as error:
            raise ValidationError([Problem(at, describe_sql_refusal(error), "Correct it")]) from None
    return frame


def describe_sql_refusal(error: Exception) -> str:
    """Return the reason why Spark's analyzer or parser refuses SQL: its first line, without the columns and conditions of this
    package.
    """
    if re.match(r"\s*\[MISSING_(?:GROUP_BY|AGGREGATION)\]", str(error)):
        # Spark proposes GROUP BY and OVER, which are refused as well.
        return "found an aggregate; expected an expression that is computed for each record alone"
    reason = re.sub(r"(?:, )?`__kafka_\w+`", "", str(error).strip().partition("\n")[0])
    reason = re.sub(r"CASE WHEN \(\([^()]*__kafka_\w+[^()]*\) AND \([^()]*__kafka_\w+[^()]*\)\) THEN (.*) END", r"\1", reason)
    reason = re.sub(r"; line \d+ pos \d+;?$", "", reason.rstrip()).rstrip("; ").replace("[, ", "[")
    return f"Spark's SQL does not understand it: {reason.replace(' Did you mean one of the following? [].', '')}"


def _make_record_frame(frame: DataFrame, where: str, *, routed: bool) -> DataFrame:
    """Return the frame with the parts first, in their fixed types, and with the columns for errors and, if needed, routes."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import NullType

    types = {f.name: f.dataType for f in frame.schema}
    problems = [Problem(where, f"the frame has no column `{part}`", "Add it") for part in PARTS if part not in types]
    problems += [
        Problem(where, f"the frame has a column `{name}`; expected a part of a record, or a name with `{CARRIED}`", "Rename it")
        for name in types
        if name not in PARTS and not name.startswith(CARRIED)
    ]
    for part, want in FIXED.items():
        if part in types and not isinstance(types[part], NullType) and types[part].simpleString() != want:
            what = f"the frame's column `{part}` is {types[part].simpleString()}; expected {want}"
            problems.append(Problem(where, what, "Cast it"))
    if problems:
        raise ValidationError(problems)
    parts = [F.col(p).cast(FIXED[p]).alias(p) if p in FIXED and isinstance(types[p], NullType) else F.col(p) for p in PARTS]
    wanted = [ERROR, *([ROUTE] if routed else [])]
    own = [F.lit(None).cast("string").alias(name) for name in wanted if name not in types]
    return frame.select(*parts, *map(make_spark_column, list_carried_columns(frame)), *own)
