"""Reading splits: by Spark's JDBC reader as a DataFrame with one partition each, or by Spark's tasks themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import SourceRejected
from airflow_kafka_spark.formats.types import backticked
from airflow_kafka_spark.sources.jdbc.database import DatabaseSession, Relation, SourceColumn, SourceDatabase
from airflow_kafka_spark.sources.jdbc.options import JdbcSourceOptions
from airflow_kafka_spark.sources.jdbc.windows import SplitOrder, column_of, find_relation, selected_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from airflow_kafka_spark.sources.base import SplitReader


def read_frame(
    options: JdbcSourceOptions, database: SourceDatabase, spark: SparkSession, splits: Sequence[Mapping[str, Any]]
) -> DataFrame:
    """Return the rows of the splits as a DataFrame; see :meth:`RowSource.frame`."""
    with database.session("reading the catalog") as session:
        relation = find_relation(options, session)
        columns = selected_columns(options, relation)
        order = _common_order(relation, splits)
        select = select_statement(session, relation, columns, order)
        conditions = split_conditions(session, relation, order, splits)
    reader = database.spark_reader(options.fetchsize)
    properties = {
        **reader.options,
        "driver": reader.driver,
        # Spark compares texts as bytes, the database by a collation: conditions of Spark's stay on Spark's side.
        "pushDownPredicate": "false",
    }
    read = spark.read.jdbc(reader.url, select, predicates=conditions, properties=properties)
    # Spark does not escape quotes in names of columns: its statements only ever name these numbered ones.
    values = [f"{column.spark.format(c=f'c{n}')} AS {backticked(column.name)}" for n, column in enumerate(columns)]
    return read.selectExpr(*values)


def make_split_reader(
    options: JdbcSourceOptions, database: SourceDatabase, splits: Sequence[Mapping[str, Any]], needed: Sequence[str] | None
) -> SplitReader | str:
    """Return how tasks read the splits, by the same conditions as :func:`read_frame`; see :meth:`RowSource.reader`."""
    with database.session("reading the catalog") as session:
        if obstacle := session.task_read_obstacle():
            return obstacle
        relation = find_relation(options, session)
        columns = [column for column in selected_columns(options, relation) if needed is None or column.name in needed]
        for column in columns:
            if column.kind is None:
                return f"column `{column.name}` is of type {column.type}"
        order = _common_order(relation, splits)
        select = select_statement(session, relation, [replace(column, select=column.task) for column in columns], order)
        conditions = split_conditions(session, relation, order, splits)
    values = ", ".join(f"c{n}" for n in range(len(columns)))
    return database.split_reader(relation.name, columns, [f"SELECT {values} FROM {select} WHERE {c}" for c in conditions])


def _common_order(relation: Relation, splits: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    orders = {tuple(split["order"]) for split in splits}
    if len(orders) > 1:
        raise SourceRejected(relation.name, f"its splits are cut by different columns: {sorted(orders)}")
    return next(iter(orders), ())


def select_statement(session: DatabaseSession, relation: Relation, columns: Sequence[SourceColumn], order: Sequence[str]) -> str:
    """Return the derived table that is read: the values as c0, c1, ... and the unchanged split columns as k0, k1, ..."""
    quote = session.dialect.quote
    values = [f"{column.select.format(c=quote(column.name))} AS c{n}" for n, column in enumerate(columns)]
    keys = [f"{quote(column_of(relation, name).name)} AS k{n}" for n, name in enumerate(order)]
    return f"(SELECT {', '.join([*values, *keys])} FROM {relation.sql}) AS __source"


def split_conditions(
    session: DatabaseSession, relation: Relation, order: Sequence[str], splits: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return per split the condition for its rows in :func:`select_statement`."""
    columns = tuple(column_of(relation, name) for name in order)
    aliased = SplitOrder(session, columns, tuple(f"k{n}" for n in range(len(order))))
    return [aliased.split_condition(split) for split in splits]
