"""Tests through Airflow itself. They share one Airflow, which ends with the last of them."""
