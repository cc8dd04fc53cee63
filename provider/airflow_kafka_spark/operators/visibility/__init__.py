"""The presentation of a window in Airflow's UI, metrics and OpenLineage."""
