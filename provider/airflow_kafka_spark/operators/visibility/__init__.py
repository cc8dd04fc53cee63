"""What Airflow's UI, its metrics and OpenLineage show of a window."""
