"""Airflow's local settings: every process of an Airflow that has this directory on its path imports this module.

The scheduler forks the process of each task. Modules that the scheduler has imported need not be imported by the tasks, which
saves each of them most of a second.
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
