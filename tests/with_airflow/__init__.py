"""Tests through Airflow itself: all of them share one Airflow, which ends with the last of them."""
