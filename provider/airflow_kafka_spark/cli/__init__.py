"""Commands that show and control pipelines: ``airflow kafka-spark`` and ``python -m airflow_kafka_spark``."""
