"""Kafka Connect's single message transforms and predicates, as Spark expressions. Cheap to import."""

from __future__ import annotations

from airflow_kafka_spark.transforms.base import ByColumns, OfPart, Transform
from airflow_kafka_spark.transforms.cast import Cast
from airflow_kafka_spark.transforms.chaining import chain, problems
from airflow_kafka_spark.transforms.fields import ExtractField, Flatten, HoistField, InsertField, ReplaceField, ValueToKey
from airflow_kafka_spark.transforms.headers import DropHeaders, HeaderFrom, InsertHeader
from airflow_kafka_spark.transforms.mask import MaskField
from airflow_kafka_spark.transforms.predicates import Condition, HasHeaderKey, Predicate, RecordIsTombstone, TopicNameMatches
from airflow_kafka_spark.transforms.record import Record
from airflow_kafka_spark.transforms.routing import Filter, RegexRouter, TimestampRouter
from airflow_kafka_spark.transforms.sql import Python, Sql
from airflow_kafka_spark.transforms.timestamps import TimestampConverter

__all__ = [
    "ByColumns",
    "Cast",
    "Condition",
    "DropHeaders",
    "ExtractField",
    "Filter",
    "Flatten",
    "HasHeaderKey",
    "HeaderFrom",
    "HoistField",
    "InsertField",
    "InsertHeader",
    "MaskField",
    "OfPart",
    "Predicate",
    "Python",
    "Record",
    "RecordIsTombstone",
    "RegexRouter",
    "ReplaceField",
    "Sql",
    "TimestampConverter",
    "TimestampRouter",
    "TopicNameMatches",
    "Transform",
    "ValueToKey",
    "chain",
    "problems",
]
