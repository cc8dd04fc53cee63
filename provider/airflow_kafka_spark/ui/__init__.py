"""In Airflow's own UI: pipelines, their windows and lag, and what may be done with them."""
