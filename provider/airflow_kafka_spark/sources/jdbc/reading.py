"""Splits as a DataFrame, one partition each, by Spark's JDBC reader; or as what tasks read by themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import SourceRejected
from airflow_kafka_spark.formats.ddl import backticked
from airflow_kafka_spark.sources.jdbc.connection import read_database
from airflow_kafka_spark.sources.jdbc.database import Column, Relation, Session
from airflow_kafka_spark.sources.jdbc.windows import Order, column_of, find, selected

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from airflow_kafka_spark.sources.base import SplitReader
    from airflow_kafka_spark.sources.jdbc.options import JdbcSettings


def frame(source: JdbcSettings, spark: SparkSession, splits: Sequence[Mapping[str, Any]]) -> DataFrame:
    """See :meth:`JdbcSource.frame`."""
    database = read_database(source.conn_id)
    with database.session("reading the catalog") as session:
        relation = find(source, session)
        columns = selected(source, relation)
        order = _order(relation, splits)
        select = statement(session, relation, columns, order)
        conditions = predicates(session, relation, order, splits)
    reader = database.reader(source.fetchsize)
    options = {
        **reader.options,
        "driver": reader.driver,
        # What Spark compares as bytes, the database compares by a collation: conditions stay on Spark's side.
        "pushDownPredicate": "false",
    }
    read = spark.read.jdbc(reader.url, select, predicates=conditions, properties=options)
    # In Spark's statements a name that holds a quote would end there: only these numbered ones ever get into them.
    values = [f"{column.spark.format(c=f'c{n}')} AS {backticked(column.name)}" for n, column in enumerate(columns)]
    return read.selectExpr(*values)


def reader(source: JdbcSettings, splits: Sequence[Mapping[str, Any]], needed: Sequence[str] | None) -> SplitReader | str:
    """See :meth:`JdbcSource.reader`. The same rows by the same conditions."""
    database = read_database(source.conn_id)
    with database.session("reading the catalog") as session:
        if why := session.unread_by_tasks():
            return why
        relation = find(source, session)
        columns = [column for column in selected(source, relation) if needed is None or column.name in needed]
        for column in columns:
            if column.kind is None:
                return f"column `{column.name}` is of type {column.type}"
        order = _order(relation, splits)
        select = statement(session, relation, [replace(column, select=column.task) for column in columns], order)
        conditions = predicates(session, relation, order, splits)
    values = ", ".join(f"c{n}" for n in range(len(columns)))
    return database.split_reader(relation.name, columns, [f"SELECT {values} FROM {select} WHERE {c}" for c in conditions])


def _order(relation: Relation, splits: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    orders = {tuple(split["order"]) for split in splits}
    if len(orders) > 1:
        raise SourceRejected(relation.name, f"its splits are cut by different columns: {sorted(orders)}")
    return next(iter(orders), ())


def statement(session: Session, relation: Relation, columns: Sequence[Column], order: Sequence[str]) -> str:
    """What Spark reads from: the values as c0, c1, ..., and the cut columns, as they are, as k0, k1, ..."""
    quote = session.dialect.quote
    values = [f"{column.select.format(c=quote(column.name))} AS c{n}" for n, column in enumerate(columns)]
    keys = [f"{quote(column_of(relation, name).name)} AS k{n}" for n, name in enumerate(order)]
    return f"(SELECT {', '.join([*values, *keys])} FROM {relation.sql}) AS __source"


def predicates(session: Session, relation: Relation, order: Sequence[str], splits: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = tuple(column_of(relation, name) for name in order)
    aliased = Order(session, columns, tuple(f"k{n}" for n in range(len(order))))
    return [aliased.split(split) for split in splits]
