"""Imported by every process of an Airflow that has this directory on its path, as Airflow does with settings of this name.

The scheduler forks the process of each task: what it has imported none of them has to, which is most of a second of each.
"""

import sys

__all__: list[str] = []  # nothing of it is a setting

if "scheduler" in sys.argv:
    import confluent_kafka.admin  # noqa: F401
    import pandas  # noqa: F401
    import psycopg  # noqa: F401
    import pyarrow.dataset  # noqa: F401
    import pyspark.sql.connect.session  # noqa: F401

    import airflow_kafka_spark.operators
    import airflow_kafka_spark.sensors  # noqa: F401
