"""The values of a window and the pure functions that plan it. Imports neither Airflow nor Spark nor Kafka."""
