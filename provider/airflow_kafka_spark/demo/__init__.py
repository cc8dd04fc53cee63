"""``python -m airflow_kafka_spark.demo``: everything once, on real servers of its own, with a kill in the middle."""
