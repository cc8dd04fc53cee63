"""Pages of this provider in Airflow's UI: pipelines, their windows and lag, and the actions that change them."""
