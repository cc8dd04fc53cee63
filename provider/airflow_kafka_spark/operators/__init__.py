"""The operators of a DAG author."""

from __future__ import annotations

from airflow_kafka_spark.operators.control import PipelineOffsetsOperator
from airflow_kafka_spark.operators.kafka_to_kafka import KafkaToKafkaOperator
from airflow_kafka_spark.operators.kafka_to_sink import KafkaToSinkOperator
from airflow_kafka_spark.operators.source_to_kafka import SourceToKafkaOperator
from airflow_kafka_spark.operators.verify import VerifyOperator

__all__ = ["KafkaToKafkaOperator", "KafkaToSinkOperator", "PipelineOffsetsOperator", "SourceToKafkaOperator", "VerifyOperator"]
