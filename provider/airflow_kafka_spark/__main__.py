"""``python -m airflow_kafka_spark show|plan|reset|windows|forget PIPELINE``: offset control, see docs/offsets.md."""

from __future__ import annotations

import sys

from airflow_kafka_spark.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
