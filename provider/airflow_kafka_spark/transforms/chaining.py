"""A chain of transforms: what is wrong with it, where it sends records to, and applying it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import Problem, ValidationError
from airflow_kafka_spark.formats.base import spark_column
from airflow_kafka_spark.transforms import record as r
from airflow_kafka_spark.transforms.base import ByColumns, Transform
from airflow_kafka_spark.transforms.sql import Python

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

TransformLike = Transform | Callable[["DataFrame"], "DataFrame"]
"""A transform, or a function of a record frame, which is taken as ``Python(function)``."""


def as_transform(given: Any) -> Transform:
    """A transform as it is; a function as ``Python(function)``."""
    return given if isinstance(given, Transform) else Python(given)


def problems(transforms: Sequence[TransformLike], where: str = "transforms", *, capturing: bool = False) -> list[Problem]:
    """What is wrong with the options of a chain's transforms, all of it at once, without Spark.

    :param transforms: in the order in which they apply.
    :param where: the operator's argument.
    :param capturing: whether the operator hands records to other sinks that a transform takes out (``Filter(to=<sink>)``).
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


def routes(transforms: Sequence[TransformLike], where: str = "transforms") -> dict[str, str]:
    """The topics that a chain sends records to which it takes out, by the argument that names each; none of what is no chain.

    :param where: the operator's argument.
    """
    if not isinstance(transforms, Sequence):
        return {}
    found = {f"{where}[{n}] {t.name}.to": t.routes_to for n, t in enumerate(transforms) if isinstance(t, Transform)}
    return {where: topic for where, topic in found.items() if isinstance(topic, str)}


def chain(
    frame: DataFrame, transforms: Sequence[TransformLike], where: str = "transforms", changed: set[str] | None = None
) -> DataFrame:
    """Apply transforms in order.

    :param frame: a record frame: ``key``, ``value``, ``topic``, ``partition``, ``offset``, ``timestamp``, ``headers`` and columns
        whose names begin with ``__kafka_``. The session's time zone is UTC.
    :param where: the operator's argument.
    :param changed: is given the parts of a record that they may change, where somebody asks for them.
    :return: a record frame: the parts in this order, the carried columns as they came, and ``__kafka_error``, null where all is
        well. Rows that end a split are as they were. Nothing is run. Do not filter it: Spark moves a filter down through all of
        the chain, with copies of its expressions; a :class:`~airflow_kafka_spark.transforms.routing.Filter` stays where it is.
    :raises ValidationError: a transform does not fit what comes to it, named by its index and class.
    """
    from pyspark.errors import AnalysisException, ParseException

    frame = _record_frame(frame, where, routed=any(as_transform(given).routes_to for given in transforms))
    for index, given in enumerate(transforms):
        transform = as_transform(given)
        at = f"{where}[{index}] {transform.name}"
        try:
            if changed is not None:
                # Nobody knows what a function of a frame changes.
                changed |= set(transform.changes(r.Record(frame.schema)) if isinstance(transform, ByColumns) else r.PARTS)
            frame = transform.guarded(frame)
            _ = frame.schema  # Spark Connect says what is wrong only when it is asked
        except ValidationError as error:
            found = [Problem(f"{at}.{problem.where}", problem.what, problem.action) for problem in error.problems]
            raise ValidationError(found) from error.__cause__
        except (AnalysisException, ParseException) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ValidationError([Problem(at, f"Spark's SQL does not understand it: {reason}", "Correct it")]) from None
    return frame


def _record_frame(frame: DataFrame, where: str, *, routed: bool) -> DataFrame:
    """The parts first, with the types that they must have, and with the columns of errors and, where some are, of routes."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import NullType

    types = {f.name: f.dataType for f in frame.schema}
    problems = [Problem(where, f"the frame has no column `{part}`", "Add it") for part in r.PARTS if part not in types]
    problems += [
        Problem(where, f"the frame has a column `{name}`; expected a part of a record, or a name with `{r.CARRIED}`", "Rename it")
        for name in types
        if name not in r.PARTS and not name.startswith(r.CARRIED)
    ]
    for part, want in r.FIXED.items():
        if part in types and not isinstance(types[part], NullType) and types[part].simpleString() != want:
            what = f"the frame's column `{part}` is {types[part].simpleString()}; expected {want}"
            problems.append(Problem(where, what, "Cast it"))
    if problems:
        raise ValidationError(problems)
    parts = [F.col(p).cast(r.FIXED[p]).alias(p) if p in r.FIXED and isinstance(types[p], NullType) else F.col(p) for p in r.PARTS]
    wanted = [r.ERROR, *([r.ROUTE] if routed else [])]
    own = [F.lit(None).cast("string").alias(name) for name in wanted if name not in types]
    return frame.select(*parts, *map(spark_column, r.carried(frame)), *own)
