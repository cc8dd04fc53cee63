"""Offset control on a command line: ``python -m airflow_kafka_spark``, and ``airflow kafka-spark``."""
