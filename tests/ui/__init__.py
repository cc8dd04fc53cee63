"""Tests of the pages in the UI: they share an Airflow, which ends with the last of them."""
