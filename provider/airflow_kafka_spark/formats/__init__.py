"""Formats decode the bytes of a key or a value to columns, and encode columns; Kafka Connect calls them converters. Cheap to
import."""

from __future__ import annotations

from airflow_kafka_spark.formats.avro.format import Avro
from airflow_kafka_spark.formats.base import Format
from airflow_kafka_spark.formats.csv.format import Csv
from airflow_kafka_spark.formats.debezium.format import Debezium
from airflow_kafka_spark.formats.json.format import Json, JsonEnvelope, JsonSchema
from airflow_kafka_spark.formats.protobuf.format import Protobuf
from airflow_kafka_spark.formats.raw_string import Raw, String

__all__ = ["Avro", "Csv", "Debezium", "Format", "Json", "JsonEnvelope", "JsonSchema", "Protobuf", "Raw", "String"]
