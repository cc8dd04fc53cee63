"""Code that runs in Spark's Python workers: it imports neither Airflow nor pyspark."""
