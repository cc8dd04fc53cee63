"""Bounded, exactly-once windows between Kafka and other systems, run by Airflow on Spark."""

from __future__ import annotations

__version__ = "0.1.0"
