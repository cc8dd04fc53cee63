"""Kafka Connect's single message transforms and predicates, as Spark expressions. Cheap to import."""

from __future__ import annotations

from airflow_kafka_spark.transforms.base import ColumnTransform, KeyOrValueTransform, RecordSchema, Transform
from airflow_kafka_spark.transforms.chain import apply_chain, find_chain_problems
from airflow_kafka_spark.transforms.conversions import Cast, TimestampConverter
from airflow_kafka_spark.transforms.custom import Python, Sql
from airflow_kafka_spark.transforms.fields import (
    DropHeaders,
    ExtractField,
    Flatten,
    HeaderFrom,
    HoistField,
    InsertField,
    InsertHeader,
    MaskField,
    ReplaceField,
    ValueToKey,
)
from airflow_kafka_spark.transforms.predicates import Condition, HasHeaderKey, Predicate, RecordIsTombstone, TopicNameMatches
from airflow_kafka_spark.transforms.routing import Filter, RegexRouter, TimestampRouter

__all__ = [
    "Cast",
    "ColumnTransform",
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
    "KeyOrValueTransform",
    "MaskField",
    "Predicate",
    "Python",
    "RecordIsTombstone",
    "RecordSchema",
    "RegexRouter",
    "ReplaceField",
    "Sql",
    "TimestampConverter",
    "TimestampRouter",
    "TopicNameMatches",
    "Transform",
    "ValueToKey",
    "apply_chain",
    "find_chain_problems",
]
