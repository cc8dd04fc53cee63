"""An empty module with the name of the distribution.

Airflow imports a module of this name for each provider outside of `airflow.providers`, to look for example DAGs, and logs an
error with a stack trace if it does not exist.
"""
