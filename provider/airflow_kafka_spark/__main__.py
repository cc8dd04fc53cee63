"""Offset control on the command line: ``python -m airflow_kafka_spark COMMAND PIPELINE``, see docs/offsets.md."""

from __future__ import annotations

import sys

from airflow_kafka_spark.cli.definition import main

if __name__ == "__main__":
    sys.exit(main())
